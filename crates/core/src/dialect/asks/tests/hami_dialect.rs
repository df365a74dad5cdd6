use super::*;

#[test]
fn counts_memory_and_cores_are_read() {
    let reading =
        read_one(json!({"nvidia.com/gpu": 2, "nvidia.com/gpumem": 3000, "nvidia.com/gpucores": 30}));
    assert_eq!(want(&reading), shares(2, mib(3000), percent(30)));
    let reading = read_one(json!({"nvidia.com/gpumem-percentage": 50}));
    assert_eq!(want(&reading), shares(1, MemoryAsk::Percent(50), CoresAsk::Uncounted));
    assert!(want(&read_one(json!({"nvidia.com/gpu": 1, "nvidia.com/gpucores": 100}))).share.whole);
    let reading = read_one(json!({"nvidia.com/gpumem-percentage": 50, "nvidia.com/gpumem": 3000}));
    assert_eq!(message(&reading), "sets the memory a second time: keep this or nvidia.com/gpumem");
}

#[test]
fn mig_is_reported_as_unsupported() {
    let reading = read_one(json!({"nvidia.com/mig-1g.5gb": 1}));
    assert!(message(&reading).starts_with("MIG devices are not supported yet"));
    assert_eq!(reading.containers[0].dialect, None);
    // NVIDIA's network devices are not GPUs.
    assert_eq!(read_one(json!({"nvidia.com/hostdev": 1})).problems, []);
}

#[test]
fn annotations_constrain_gpus_and_policy() {
    let constrained =
        |annotations| read_one_in(&DialectSettings::default(), annotations, json!({"nvidia.com/gpu": 1}));
    let reading = constrained(json!({
        "nvidia.com/use-gputype": "A100,V100", "nvidia.com/nouse-gputype": "T4",
        "nvidia.com/use-gpuuuid": "GPU-a", "nvidia.com/nouse-gpuuuid": "GPU-b",
        "hami.io/gpu-scheduler-policy": "spread", "hami.io/node-scheduler-policy": "spread",
    }));
    assert_eq!(reading.problems, []);
    assert_eq!(reading.ask.constraints.models.only, ["A100", "V100"]);
    assert_eq!(reading.ask.constraints.uuids.never, ["GPU-b"]);
    assert_eq!(reading.ask.constraints.policy, Some(PlacementPolicy::Spread));
    let reading = constrained(json!({"hami.io/node-scheduler-policy": "random"}));
    assert_eq!(message(&reading), "unknown policy \"random\": write \"binpack\" or \"spread\"");
    let reading = constrained(json!({
        "hami.io/gpu-scheduler-policy": "spread", "hami.io/node-scheduler-policy": "binpack",
    }));
    assert!(message(&reading).starts_with("binpack for nodes and spread for GPUs"));
}

#[test]
fn unsupported_features_are_problems() {
    let in_mode = |mode: &str| {
        let annotations = json!({"nvidia.com/vgpu-mode": mode});
        read_one_in(&DialectSettings::default(), annotations, json!({"nvidia.com/gpu": 1}))
    };
    assert_eq!(in_mode("hami-core").problems, []);
    assert_eq!(
        message(&in_mode("mig")),
        "MIG is not supported yet: write \"hami-core\" or remove the annotation"
    );
    assert!(message(&in_mode("mps")).starts_with("unsupported mode \"mps\""));
    let reading = read_one(json!({"nvidia.com/gpu": 1, "nvidia.com/priority": 1}));
    assert_eq!(message(&reading), "priorities among the shares of one GPU are not supported yet: remove it");
}
