use super::*;
use crate::model::{MAX_PRIORITY, TurnPreferences};

#[test]
fn every_resource_is_read() {
    let reading =
        read_one(json!({"partage.dev/gpu": 2, "partage.dev/memory": "8Gi", "partage.dev/cores": 30}));
    assert_eq!(want(&reading), shares(2, mib(8192), percent(30)));
    assert_eq!(
        want(&read_one(json!({"partage.dev/gpu": 1}))),
        shares(1, MemoryAsk::All, CoresAsk::Uncounted)
    );
    assert_eq!(
        want(&read_one(json!({"partage.dev/memory-percent": 25}))),
        shares(1, MemoryAsk::Percent(25), CoresAsk::Uncounted)
    );
    assert_eq!(
        want(&read_one(json!({"partage.dev/memory": "8G"}))).share.memory,
        MemoryAsk::Exactly(Bytes(8_000_000_000))
    );
    assert!(!want(&read_one(json!({"partage.dev/cores": 100}))).share.whole);
}

#[test]
fn mistakes_have_suggestions() {
    let message_for =
        |resource: &str, amount: Value| message(&read_one(json!({resource: amount}))).to_string();
    assert_eq!(message_for("partage.dev/memory", json!(8)), "\"8\" is 8 B of memory: did you mean 8Gi?");
    assert_eq!(
        message_for("partage.dev/memory", json!("8192")),
        "\"8192\" is 8 KiB of memory: did you mean 8192Mi?"
    );
    let reading = read_one(json!({"partage.dev/gpu": 1, "partage.dev/memory": 0}));
    assert_eq!(message(&reading), "\"0\" is 0 B of memory: write a value like 8Gi, or remove it");
    assert_eq!(
        message_for("partage.dev/gpu", json!("500m")),
        "500m is not a whole number: write a whole number, Kubernetes does not split this resource"
    );
    assert_eq!(message_for("partage.dev/gpu", json!(-1)), "-1 is negative: write 1 or more");
    assert!(message_for("partage.dev/memory", json!("8gb")).contains("not a Kubernetes suffix"));
    assert_eq!(
        message_for("partage.dev/cores", json!(101)),
        "101 is not a percentage of one GPU: write 1 to 100, or remove it"
    );
    assert_eq!(
        message_for("partage.dev/memroy", json!("8Gi")),
        "unknown resource: did you mean partage.dev/memory?"
    );
    let reading = read_one(json!({"partage.dev/memory": "8Gi", "partage.dev/memory-percent": 10}));
    assert_eq!(message(&reading), "sets the memory a second time: keep this or partage.dev/memory");
    let reading = read_one(json!({"partage.dev/gpu": 1, "partage.dev/cores": 0}));
    assert_eq!(reading.problems.len(), 1);
    assert_eq!(read_one(json!({"partage.dev/attachable": 1})).problems, []);
}

fn annotated(annotations: Value) -> PodReading {
    let amounts = json!({"partage.dev/memory": "8Gi", "partage.dev/cores": 30});
    read_one_in(&DialectSettings::default(), annotations, amounts)
}

#[test]
fn annotations_constrain_gpus() {
    let reading = annotated(json!({
        "partage.dev/policy": "topology", "partage.dev/models": "A100", "partage.dev/not-models": "PCIE",
        "partage.dev/gpus": "GPU-a, GPU-b", "partage.dev/not-gpus": "GPU-c",
        "partage.dev/same-gpu": "true", "partage.dev/exclusive": "true", "partage.dev/cores-limit": "60",
    }));
    let want = want(&reading);
    let constraints = &reading.ask.constraints;
    assert_eq!(constraints.policy, Some(PlacementPolicy::Topology));
    assert_eq!((constraints.models.only.len(), constraints.models.never.len()), (1, 1));
    assert_eq!((constraints.uuids.only.len(), constraints.uuids.never.len()), (2, 1));
    assert_eq!(constraints.colocation, Colocation::Required);
    assert_eq!((want.share.whole, want.share.ceiling), (true, Cores::percent(60)));
}

#[test]
fn invalid_annotations_are_problems() {
    let message_for = |key: &str, value: &str| message(&annotated(json!({key: value}))).to_string();
    assert_eq!(
        message_for("partage.dev/policy", "random"),
        "unknown policy \"random\": use fragmentation, binpack, spread or topology"
    );
    assert_eq!(
        message_for("partage.dev/exclusive", "yes"),
        "\"yes\" is not a boolean: write \"true\" or \"false\""
    );
    assert_eq!(
        message_for("partage.dev/model", "A100"),
        "unknown annotation: did you mean partage.dev/models?"
    );
    assert_eq!(
        message_for("partage.dev/cores-limit", "20"),
        "20 % is less than the 30 % requested: write 30 % or more"
    );
    let reading = read_one_in(
        &DialectSettings::default(),
        json!({"partage.dev/cores-limit": "20"}),
        json!({"partage.dev/gpu": 1}),
    );
    assert_eq!(
        message(&reading),
        "no container requests cores that this could limit: add partage.dev/cores or its equivalent"
    );
    for known in ["partage.dev/grant", "partage.dev/attachable"] {
        assert_eq!(annotated(json!({known: "true"})).problems, []);
    }
}

#[test]
fn oversubscription_requires_a_memory_limit() {
    assert!(annotated(json!({"partage.dev/oversubscribe": "true"})).ask.oversubscribe);
    for annotations in [json!({}), json!({"partage.dev/oversubscribe": "false"})] {
        let reading = annotated(annotations);
        assert_eq!((reading.ask.oversubscribe, reading.problems), (false, vec![]));
    }
    let reading = annotated(json!({"partage.dev/oversubscribe": "yes"}));
    assert!(!reading.ask.oversubscribe);
    assert_eq!(message(&reading), "\"yes\" is not a boolean: write \"true\" or \"false\"");

    let read = |amounts: Value| {
        let annotations = json!({"partage.dev/oversubscribe": "true"});
        read_one_in(&DialectSettings::default(), annotations, amounts)
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
            "no container has a memory limit to exceed: request memory, like partage.dev/memory, or remove this annotation"
        );
    }
    let nothing = read(json!({}));
    assert_eq!((nothing.ask.oversubscribe, nothing.problems), (false, vec![]));
}

#[test]
fn only_the_latency_class_low_is_read() {
    let read = |amounts: Value| {
        read_one_in(&DialectSettings::default(), json!({"partage.dev/latency": "low"}), amounts)
    };
    for guaranteed in
        [json!({"partage.dev/gpu": 1, "partage.dev/cores": 30}), json!({"tencent.com/vcuda-core": 100})]
    {
        let low = read(guaranteed);
        assert_eq!((low.ask.turns.low_latency, low.problems), (true, vec![]));
    }
    let reading = read(json!({"partage.dev/memory": "8Gi"}));
    assert!(!reading.ask.turns.low_latency);
    assert_eq!(
        message(&reading),
        "no container requests cores, and only launches within the guarantee start soon: add partage.dev/cores or its equivalent"
    );
    for wrong in ["Low", "high", "true", ""] {
        let reading = annotated(json!({"partage.dev/latency": wrong}));
        assert!(!reading.ask.turns.low_latency);
        assert_eq!(
            message(&reading),
            format!("\"{wrong}\" is not a latency class: write \"low\", or remove this annotation")
        );
    }
}

#[test]
fn priority_is_a_whole_number_up_to_the_highest() {
    for (text, priority) in [("0", 0), ("7", 7), ("10", MAX_PRIORITY)] {
        let reading = annotated(json!({"partage.dev/priority": text}));
        assert_eq!((reading.ask.turns.priority, reading.problems), (priority, vec![]));
    }
    for wrong in ["11", "-1", "+1", "1.5", "high", "", "99999999999"] {
        let reading = annotated(json!({"partage.dev/priority": wrong}));
        assert_eq!(reading.ask.turns.priority, 0);
        assert_eq!(
            message(&reading),
            format!("\"{wrong}\" is not a priority: write a whole number from \"0\" to \"10\"")
        );
    }
}

#[test]
fn turn_preferences_apply_to_every_dialect_and_to_pods_with_gpus_only() {
    let annotations = json!({"partage.dev/latency": "low", "partage.dev/priority": "3"});
    let read = |amounts| read_one_in(&DialectSettings::default(), annotations.clone(), amounts);
    let expected = TurnPreferences { low_latency: true, priority: 3 };
    assert_eq!(
        read(json!({"tencent.com/vcuda-core": 30, "tencent.com/vcuda-memory": 8})).ask.turns,
        expected
    );
    let nothing = read(json!({}));
    assert_eq!((nothing.ask.turns, nothing.problems), (TurnPreferences::default(), vec![]));
}

#[test]
fn native_annotations_apply_to_every_dialect() {
    let annotations = json!({"partage.dev/exclusive": "true", "partage.dev/same-gpu": "false"});
    let reading = read_one_in(&DialectSettings::default(), annotations, json!({"aliyun.com/gpu-mem": 8}));
    assert!(want(&reading).share.whole);
    assert_eq!(reading.ask.constraints.colocation, Colocation::Anywhere);
}

#[test]
fn impossible_colocation_is_a_problem() {
    let annotations = json!({"partage.dev/same-gpu": "true"});
    let reading =
        read_one_in(&DialectSettings::default(), annotations.clone(), json!({"partage.dev/gpu": 2}));
    assert!(
        message(&reading).starts_with("container \"main\" requests 2 GPUs, which cannot be the same GPU")
    );
    let whole = |name: &str| json!({"name": name, "resources": {"limits": {"tencent.com/vcuda-core": 100}}});
    let reading = read_pod(annotations, vec![whole("a"), whole("b")]);
    assert!(message(&reading).starts_with("container \"a\" requires a GPU for itself"));
}
