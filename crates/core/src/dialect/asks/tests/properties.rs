use super::*;
use proptest::prelude::*;

fn any_resource() -> impl Strategy<Value = String> {
    let known = prop::sample::select(
        native::RESOURCES
            .into_iter()
            .chain(gpushare::RESOURCES)
            .chain(volcano::RESOURCES)
            .chain(hami::RESOURCES)
            .chain([aws::VGPU, "a.com/vcuda-core", "a.com/vcuda-memory", "cpu", "memory", "nvidia.com/mig-1"])
            .map(String::from)
            .collect::<Vec<_>>(),
    );
    prop_oneof![6 => known, 1 => "[a-z./-]{0,20}"]
}

fn any_amount() -> impl Strategy<Value = String> {
    prop_oneof![
        4 => (0u32..300).prop_map(|n| n.to_string()),
        1 => any::<i64>().prop_map(|n| n.to_string()),
        1 => "[0-9.]{1,6}[a-zA-Z]{0,2}",
        1 => ".{0,6}",
    ]
}

fn any_annotation() -> impl Strategy<Value = (String, String)> {
    let known = prop::sample::select(vec![
        "partage.dev/policy",
        "partage.dev/models",
        "partage.dev/gpus",
        "partage.dev/same-gpu",
        "partage.dev/exclusive",
        "partage.dev/oversubscribe",
        "partage.dev/latency",
        "partage.dev/priority",
        "partage.dev/cores-limit",
        "partage.dev/carrier",
        "a.com/vcuda-core-limit",
        "volcano.sh/vgpu-mode",
        "nvidia.com/use-gputype",
        "hami.io/gpu-scheduler-policy",
        "aliyun.com/gpu-count",
    ]);
    let value = prop_oneof![
        Just("true".to_string()),
        Just("main=partage.dev/gpu".to_string()),
        (0u32..200).prop_map(|n| n.to_string()),
        ".{0,12}",
    ];
    (prop_oneof![6 => known.prop_map(String::from), 1 => "partage[.]dev/.{0,8}"], value)
}

fn any_pod() -> impl Strategy<Value = PodManifest> {
    let amounts = || prop::collection::btree_map(any_resource(), any_amount(), 0..5);
    let roles = prop::sample::select(vec![ContainerRole::Init, ContainerRole::Sidecar, ContainerRole::App]);
    let container = (roles, amounts(), amounts()).prop_map(|(role, limits, requests)| {
        crate::pod::ContainerManifest { name: "main".into(), role, limits, requests }
    });
    let annotations = prop::collection::btree_map(any_annotation(), Just(()), 0..5);
    (annotations, prop::collection::vec(container, 0..4)).prop_map(|(annotations, containers)| PodManifest {
        labels: Default::default(),
        annotations: annotations.into_keys().collect(),
        containers,
    })
}

proptest! {
    #[test]
    fn reading_never_panics_and_wants_are_within_range(pod in any_pod()) {
        let reading = read(&pod, &DialectSettings::default());
        prop_assert_eq!(reading.containers.len(), pod.containers.len());
        for container in &reading.containers {
            let Some(want) = container.want else { continue };
            prop_assert!(container.dialect.is_some());
            prop_assert!((1..=64).contains(&want.count));
            match want.share.memory {
                MemoryAsk::Exactly(bytes) | MemoryAsk::AtMost(bytes) => prop_assert!(bytes.0 >= 1 << 20),
                MemoryAsk::Percent(percent) => prop_assert!((1..=100).contains(&percent)),
                MemoryAsk::All | MemoryAsk::Unlimited => {}
            }
            match want.share.cores {
                CoresAsk::Exactly(cores) => prop_assert!(Cores::NONE < cores && cores <= Cores::WHOLE),
                CoresAsk::Slots(slots) => prop_assert!(slots >= 1),
                CoresAsk::Uncounted => {}
            }
        }
        let asking = reading.containers.iter().filter(|c| c.want.is_some()).count();
        prop_assert_eq!(reading.ask.asks.len(), asking);
    }

    #[test]
    fn order_of_resources_does_not_matter(
        amounts in prop::collection::btree_map(any_resource(), any_amount(), 0..6),
        annotations in prop::collection::vec(any_annotation(), 0..5),
    ) {
        let text = |pairs: &[(String, String)]| {
            let list: Vec<String> = pairs.iter().map(|(k, v)| format!("{}:{}", json!(k), json!(v))).collect();
            format!("{{{}}}", list.join(","))
        };
        let build = |reversed: bool| {
            let mut amounts: Vec<_> = amounts.clone().into_iter().collect();
            let mut annotations = annotations.clone();
            annotations.sort();
            annotations.dedup_by(|a, b| a.0 == b.0);
            if reversed {
                amounts.reverse();
                annotations.reverse();
            }
            let (limits, annotations) = (text(&amounts), text(&annotations));
            let metadata: Value = serde_json::from_str(&format!("{{\"annotations\":{annotations}}}")).unwrap();
            let spec: Value = serde_json::from_str(&format!(
                "{{\"containers\":[{{\"name\":\"main\",\"resources\":{{\"limits\":{limits}}}}}]}}"
            )).unwrap();
            read(&PodManifest::read(&metadata, &spec).0, &DialectSettings::default())
        };
        prop_assert_eq!(build(false), build(true));
    }

    #[test]
    fn unclear_request_always_has_a_problem(pod in any_pod()) {
        let reading = read(&pod, &DialectSettings::default());
        for container in reading.containers {
            if container.dialect.is_some() && container.want.is_none() {
                prop_assert!(!reading.problems.is_empty());
            }
        }
    }
}
