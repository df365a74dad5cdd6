use super::*;

#[test]
fn reads_every_resource() {
    let reading =
        read_one(json!({"partage.dev/gpu": 2, "partage.dev/memory": "8Gi", "partage.dev/cores": 30}));
    assert_eq!(want(&reading), parts(2, mib(8192), percent(30)));
    assert_eq!(want(&read_one(json!({"partage.dev/gpu": 1}))), parts(1, MemoryAsk::All, CoresAsk::Uncounted));
    assert_eq!(
        want(&read_one(json!({"partage.dev/memory-percent": 25}))),
        parts(1, MemoryAsk::Percent(25), CoresAsk::Uncounted)
    );
    assert_eq!(
        want(&read_one(json!({"partage.dev/memory": "8G"}))).part.memory,
        MemoryAsk::Exactly(Bytes(8_000_000_000))
    );
    assert!(!want(&read_one(json!({"partage.dev/cores": 100}))).part.whole);
}

#[test]
fn slips_of_the_pen_are_named() {
    let said = |resource: &str, amount: Value| message(&read_one(json!({resource: amount}))).to_string();
    assert_eq!(said("partage.dev/memory", json!(8)), "\"8\" is 8 B of memory: did you mean 8Gi?");
    assert_eq!(
        said("partage.dev/memory", json!("8192")),
        "\"8192\" is 8 KiB of memory: did you mean 8192Mi?"
    );
    let reading = read_one(json!({"partage.dev/gpu": 1, "partage.dev/memory": 0}));
    assert_eq!(message(&reading), "\"0\" is 0 B of memory: write it like 8Gi, or leave it out");
    assert_eq!(
        said("partage.dev/gpu", json!("500m")),
        "500m is not a whole number: write a whole number, Kubernetes does not split this resource"
    );
    assert_eq!(said("partage.dev/gpu", json!(-1)), "-1 is negative: write 1 or more");
    assert!(said("partage.dev/memory", json!("8gb")).contains("no Kubernetes suffix"));
    assert_eq!(
        said("partage.dev/cores", json!(101)),
        "101 is not a part of one GPU: write 1 to 100, in percent, or leave it out"
    );
    assert_eq!(
        said("partage.dev/memroy", json!("8Gi")),
        "Partage knows no such resource: did you mean partage.dev/memory?"
    );
    let reading = read_one(json!({"partage.dev/memory": "8Gi", "partage.dev/memory-percent": 10}));
    assert_eq!(message(&reading), "says how much memory a second time: keep it or partage.dev/memory");
    let reading = read_one(json!({"partage.dev/gpu": 1, "partage.dev/cores": 0}));
    assert_eq!(reading.problems.len(), 1);
    assert_eq!(read_one(json!({"partage.dev/attachable": 1})).problems, []);
}

fn annotated(annotations: Value) -> Reading {
    let amounts = json!({"partage.dev/memory": "8Gi", "partage.dev/cores": 30});
    read_one_in(&Settings::default(), annotations, amounts)
}

#[test]
fn annotations_choose_gpus() {
    let reading = annotated(json!({
        "partage.dev/policy": "topology", "partage.dev/models": "A100", "partage.dev/not-models": "PCIE",
        "partage.dev/gpus": "GPU-a, GPU-b", "partage.dev/not-gpus": "GPU-c",
        "partage.dev/same-gpu": "true", "partage.dev/exclusive": "true", "partage.dev/cores-limit": "60",
    }));
    let want = want(&reading);
    let constraints = &reading.ask.constraints;
    assert_eq!(constraints.policy, Some(Policy::Topology));
    assert_eq!((constraints.models.only.len(), constraints.models.never.len()), (1, 1));
    assert_eq!((constraints.uuids.only.len(), constraints.uuids.never.len()), (2, 1));
    assert_eq!(constraints.together, Together::Required);
    assert_eq!((want.part.whole, want.part.ceiling), (true, Cores::percent(60)));
}

#[test]
fn wrong_annotations_are_named() {
    let said = |key: &str, value: &str| message(&annotated(json!({key: value}))).to_string();
    assert_eq!(
        said("partage.dev/policy", "random"),
        "\"random\" is no policy: use fragmentation, binpack, spread or topology"
    );
    assert_eq!(said("partage.dev/exclusive", "yes"), "\"yes\" is not a boolean: write \"true\" or \"false\"");
    assert_eq!(
        said("partage.dev/model", "A100"),
        "Partage knows no such annotation: did you mean partage.dev/models?"
    );
    assert_eq!(said("partage.dev/cores-limit", "20"), "20 % is less than the 30 % asked: write that or more");
    let reading = read_one_in(
        &Settings::default(),
        json!({"partage.dev/cores-limit": "20"}),
        json!({"partage.dev/gpu": 1}),
    );
    assert_eq!(message(&reading), "there are no cores to stretch: add partage.dev/cores or the like");
    for known in ["partage.dev/grant", "partage.dev/attachable"] {
        assert_eq!(annotated(json!({known: "true"})).problems, []);
    }
}

#[test]
fn oversubscription_is_read_and_needs_a_memory_limit() {
    assert!(annotated(json!({"partage.dev/oversubscribe": "true"})).ask.oversubscribe);
    for absent in [json!({}), json!({"partage.dev/oversubscribe": "false"})] {
        let reading = annotated(absent);
        assert_eq!((reading.ask.oversubscribe, reading.problems), (false, vec![]));
    }
    let reading = annotated(json!({"partage.dev/oversubscribe": "yes"}));
    assert!(!reading.ask.oversubscribe);
    assert_eq!(message(&reading), "\"yes\" is not a boolean: write \"true\" or \"false\"");

    let read = |amounts: Value| {
        let annotations = json!({"partage.dev/oversubscribe": "true"});
        read_one_in(&Settings::default(), annotations, amounts)
    };
    for limited in [
        json!({"partage.dev/gpu": 1}),
        json!({"partage.dev/memory-percent": 50}),
        json!({"aliyun.com/gpu-mem": 8}),
        json!({"volcano.sh/vgpu-number": 1, "volcano.sh/vgpu-memory": 1000}),
    ] {
        let reading = read(limited);
        assert_eq!((reading.ask.oversubscribe, &reading.problems), (true, &vec![]));
    }
    for unlimited in [json!({"tencent.com/vcuda-core": 100}), json!({"k8s.amazonaws.com/vgpu": 1})] {
        let reading = read(unlimited);
        assert!(!reading.ask.oversubscribe);
        assert_eq!(
            message(&reading),
            "no container has a memory limit that could be exceeded: ask for memory, like partage.dev/memory, or leave this \
             annotation out"
        );
    }
    let nothing = read(json!({}));
    assert_eq!((nothing.ask.oversubscribe, nothing.problems), (false, vec![]));
}

#[test]
fn they_hold_for_every_dialect() {
    let annotations = json!({"partage.dev/exclusive": "true", "partage.dev/same-gpu": "false"});
    let reading = read_one_in(&Settings::default(), annotations, json!({"aliyun.com/gpu-mem": 8}));
    assert!(want(&reading).part.whole);
    assert_eq!(reading.ask.constraints.together, Together::Anywhere);
}

#[test]
fn the_same_gpu_must_be_possible() {
    let annotations = json!({"partage.dev/same-gpu": "true"});
    let reading = read_one_in(&Settings::default(), annotations.clone(), json!({"partage.dev/gpu": 2}));
    assert!(message(&reading).starts_with("container \"main\" asks for 2 GPUs, which cannot be one"));
    let whole = |name: &str| json!({"name": name, "resources": {"limits": {"tencent.com/vcuda-core": 100}}});
    let reading = read_pod(annotations, vec![whole("a"), whole("b")]);
    assert!(message(&reading).starts_with("container \"a\" wants its GPU for itself"));
}
