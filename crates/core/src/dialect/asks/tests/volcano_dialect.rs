use super::*;

fn asked(
    number: Option<u32>,
    memory: Option<u32>,
    percentage: Option<u32>,
    cores: Option<u32>,
) -> PodReading {
    let mut amounts = serde_json::Map::new();
    let names = ["number", "memory", "memory-percentage", "cores"];
    for (name, amount) in names.into_iter().zip([number, memory, percentage, cores]) {
        amounts.extend(amount.map(|amount| (format!("volcano.sh/vgpu-{name}"), json!(amount))));
    }
    read_one(amounts.into())
}

#[test]
fn c01_number_and_memory_are_read() {
    assert_eq!(want(&asked(Some(1), Some(3000), None, None)), shares(1, mib(3000), CoresAsk::Uncounted));
    assert_eq!(want(&asked(Some(3), Some(5000), None, None)), shares(3, mib(5000), CoresAsk::Uncounted));
    assert_eq!(want(&asked(Some(2), Some(3000), None, Some(50))), shares(2, mib(3000), percent(50)));
}

#[test]
fn c02_memory_only_is_one_gpu() {
    assert_eq!(want(&asked(None, Some(1024), None, None)), shares(1, mib(1024), CoresAsk::Uncounted));
}

#[test]
fn c03_number_only_is_all_memory() {
    assert_eq!(want(&asked(Some(2), None, None, None)), shares(2, MemoryAsk::All, CoresAsk::Uncounted));
    assert_eq!(want(&asked(Some(2), Some(0), None, Some(0))).share.memory, MemoryAsk::All);
}

#[test]
fn c04_percentage_takes_precedence_over_memory() {
    let want = want(&asked(Some(1), Some(3000), Some(50), None));
    assert_eq!(want.share.memory, MemoryAsk::Percent(50));
}

#[test]
fn c05_cores_only_is_one_gpu() {
    assert_eq!(want(&asked(None, None, None, Some(30))), shares(1, MemoryAsk::All, percent(30)));
}

#[test]
fn c26_100_cores_are_exclusive() {
    let want = want(&asked(Some(1), Some(3000), None, Some(100)));
    assert_eq!((want.share.whole, want.share.cores, want.share.memory), (true, percent(100), mib(3000)));
    assert_eq!(
        message(&asked(Some(1), None, None, Some(101))),
        "101 is not a percentage of one GPU: write 1 to 100, or remove it"
    );
}

#[test]
fn c97_absent_number_is_one_gpu() {
    assert_eq!(
        want(&asked(None, None, Some(20), None)),
        shares(1, MemoryAsk::Percent(20), CoresAsk::Uncounted)
    );
    let reading = asked(Some(0), None, None, None);
    assert_eq!((reading.problems.len(), reading.ask.asks.len()), (0, 0));
    assert_eq!(
        message(&asked(Some(0), Some(100), None, None)),
        "requests 0 GPUs, but other resources of the container request a share: write 1 or more, or remove it"
    );
}

#[test]
fn c95_memory_in_units_of_the_factor() {
    let settings = DialectSettings { volcano_memory_factor: 10, ..DialectSettings::default() };
    let reading = read_one_in(&settings, json!({}), json!({"volcano.sh/vgpu-memory": 300}));
    assert_eq!(want(&reading).share.memory, mib(3000));
}

fn constrained(annotations: Value) -> PodReading {
    read_one_in(&DialectSettings::default(), annotations, json!({"volcano.sh/vgpu-number": 1}))
}

fn strings(words: &[&str]) -> Vec<String> {
    words.iter().map(|word| word.to_string()).collect()
}

#[test]
fn c40_types_are_comma_separated() {
    let models = |key: &str, list| constrained(json!({key: list})).ask.constraints.models;
    for list in ["NVIDIA", "nvidia", "AMD,NVIDIA,INTEL"] {
        assert!(models("nvidia.com/use-gputype", list).admits_model("NVIDIA-Tesla T4"), "{list}");
        assert!(!models("nvidia.com/nouse-gputype", list).admits_model("NVIDIA-Tesla T4"), "{list}");
    }
    assert!(!models("nvidia.com/use-gputype", "AMD,INTEL,MLU").admits_model("NVIDIA-Tesla T4"));
    assert!(constrained(json!({})).ask.constraints.models.is_open());
}

#[test]
fn c41_uuids_are_exact_and_trimmed() {
    let only = |list| constrained(json!({"volcano.sh/vgpu-use-gpuuuid": list})).ask.constraints.uuids;
    for list in ["", "  ", ", ,"] {
        assert!(only(list).is_open(), "{list:?}");
    }
    for list in ["GPU-0, GPU-1", "GPU-0,, GPU-1,"] {
        assert_eq!(only(list).only, strings(&["GPU-0", "GPU-1"]));
        assert!(only(list).admits_uuid("GPU-1"));
        assert!(!only(list).admits_uuid(""));
    }
    assert!(!only("GPU-10").admits_uuid("GPU-1"));
    let both = json!({"volcano.sh/vgpu-use-gpuuuid": "GPU-1", "volcano.sh/vgpu-nouse-gpuuuid": "GPU-1"});
    assert!(!constrained(both).ask.constraints.uuids.admits_uuid("GPU-1"));
}

#[test]
fn c42_unknown_uuids_are_kept() {
    let reading = constrained(json!({
        "volcano.sh/vgpu-use-gpuuuid": "GPU-unknown", "volcano.sh/vgpu-nouse-gpuuuid": "GPU-0,GPU-1",
    }));
    assert_eq!(reading.problems, []);
    let uuids = Selector { only: strings(&["GPU-unknown"]), never: strings(&["GPU-0", "GPU-1"]) };
    assert_eq!(reading.ask.constraints.uuids, uuids);
}

#[test]
fn c30_unsupported_mode_is_a_problem() {
    assert_eq!(constrained(json!({"volcano.sh/vgpu-mode": "hami-core"})).problems, []);
    let reading = constrained(json!({"volcano.sh/vgpu-mode": "mig"}));
    assert_eq!(message(&reading), "MIG is not supported yet: write \"hami-core\" or remove the annotation");
    assert!(message(&constrained(json!({"volcano.sh/vgpu-mode": "mps"}))).contains("\"mps\""));
    assert_eq!(constrained(json!({"volcano.sh/vgpu-podgroup-policy": "spread"})).problems.len(), 1);
}

#[test]
fn contradicting_constraints_are_a_problem() {
    let same = json!({"partage.dev/models": "T4", "nvidia.com/use-gputype": " T4"});
    assert_eq!(constrained(same).problems, []);
    let other = json!({"partage.dev/models": "T4", "nvidia.com/use-gputype": "A100"});
    assert_eq!(message(&constrained(other)), "partage.dev/models has a different value: keep one of the two");
    let never = json!({"partage.dev/not-models": "T4", "nvidia.com/nouse-gputype": "A100,T4"});
    assert_eq!(constrained(never).ask.constraints.models.never, strings(&["T4", "A100"]));
}
