use super::*;

#[test]
fn a15_slots_prefer_one_gpu() {
    let reading = read_one(json!({"k8s.amazonaws.com/vgpu": 5}));
    assert_eq!(want(&reading), shares(1, MemoryAsk::Unlimited, CoresAsk::Slots(5)));
    assert_eq!(reading.ask.constraints.colocation, Colocation::Preferred);
    let reading = read_one(json!({"k8s.amazonaws.com/vgpu": 0}));
    assert_eq!((reading.problems.len(), reading.ask.asks.len()), (0, 0));
}

#[test]
fn memory_limit_annotation_limits_slots() {
    let limited = |limit: &str, resource: &str| {
        read_one_in(
            &DialectSettings::default(),
            json!({"partage.dev/memory-limit": limit}),
            json!({resource: 5}),
        )
    };
    assert_eq!(want(&limited("4Gi", aws::VGPU)), shares(1, mib(4096), CoresAsk::Slots(5)));
    for wrong in ["4", "2Pi", "many", "500m", "-1Gi"] {
        let reading = limited(wrong, aws::VGPU);
        assert_eq!(reading.problems.len(), 1, "{wrong}");
        assert_eq!(reading.containers[0].want.unwrap().share.memory, MemoryAsk::Unlimited, "{wrong}");
    }
    assert_eq!(
        message(&limited("4", aws::VGPU)),
        "\"4\" is not a valid memory limit: write 1 MiB to 1 TiB, like \"8Gi\""
    );
    assert_eq!(
        message(&limited("4Gi", "partage.dev/gpu")),
        "applies to k8s.amazonaws.com/vgpu only: request memory as a resource, like partage.dev/memory"
    );
    assert_eq!(limited("4Gi", "cpu").problems, []);
}
