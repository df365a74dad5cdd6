use super::*;
use partage_core::dialect::grants::native;
use partage_core::model::{Bytes, Gpu, GpuUuid, NodeName, Oversubscription, TurnPreferences};
use proptest::prelude::*;
use serde_json::json;

const GPU: [&str; 2] =
    ["GPU-00000000-0000-0000-0000-000000000001", "GPU-00000000-0000-0000-0000-000000000002"];

fn node() -> Node {
    let gpu = |at: usize| Gpu {
        uuid: GPU[at].into(),
        minor: at as u32,
        model: "Tesla T4".into(),
        memory_bytes: Bytes(16 << 30),
        numa: None,
        pci: None,
        withheld: None,
    };
    Node::new("n1", vec![gpu(0), gpu(1)])
}

fn pod(limits: serde_json::Value, annotations: serde_json::Value) -> PodManifest {
    let spec = json!({"containers": [{"name": "main", "resources": {"limits": limits}}]});
    PodManifest::read(&json!({"annotations": annotations}), &spec).0
}

fn decide(
    grants: &mut NodeGrants,
    uid: &str,
    pod: &PodManifest,
    settings: &AgentSettings,
) -> Result<PodRecord, String> {
    let id = PodId { uid: uid.into(), namespace: "default".into(), name: uid.into() };
    let request = GrantRequest { id: &id, pod, problems: &[], boot: "b", now: 7 };
    grants.decide(&request, settings).map_err(|refusal| refusal.sentence())
}

/// Returns what is held of a GPU: memory, compute in thousandths of a percent, shares. Init containers are not counted in addition
/// to the others.
fn held(grants: &NodeGrants, gpu: &GpuUuid) -> (u64, u32, u32) {
    let on = grants.shares().filter(|(_, grant, share)| share.gpu == *gpu && !grant.init);
    on.fold((0, 0, 0), |(memory, cores, shares), (_, _, share)| {
        (
            memory + share.memory_bytes.map_or(0, |bytes| bytes.0),
            cores + share.cores.map_or(0, |cores| cores.as_millipercent()),
            shares + 1,
        )
    })
}

fn extender() -> AgentSettings {
    AgentSettings { extender: true, ..AgentSettings::default() }
}

/// A grant as an extender would write it.
fn granted(node: &str, container: &str, gpu: &str, memory: u64) -> serde_json::Value {
    let share = Share {
        gpu: gpu.into(),
        memory_bytes: Some(Bytes(memory)),
        cores: None,
        ceiling: None,
        whole: false,
    };
    let grants = vec![Grant { container: container.into(), init: false, shares: vec![share] }];
    let text = native::encode(&PodGrant { node: NodeName::from(node), grants }).unwrap();
    json!({native::ANNOTATION: text})
}

#[test]
fn second_request_of_a_pod_returns_the_same_grant() {
    let mut grants = NodeGrants::new(node(), BTreeMap::new());
    let asks = pod(json!({"partage.dev/gpu": 1, "partage.dev/memory": "10Gi"}), json!({}));
    let first = decide(&mut grants, "a", &asks, &AgentSettings::default()).unwrap();
    assert_eq!(decide(&mut grants, "a", &asks, &AgentSettings::default()).unwrap(), first);
    assert_eq!(grants.records().count(), 1);
    assert!(first.annotations.contains_key(native::ANNOTATION));
    assert_eq!(first.env["main"]["NVIDIA_VISIBLE_DEVICES"], first.grant.grants[0].shares[0].gpu.as_str());
}

#[test]
fn turn_preferences_are_kept_by_the_record_and_priority_is_capped_by_the_node() {
    let limits = json!({"partage.dev/gpu": 1, "partage.dev/memory": "4Gi", "partage.dev/cores": 10});
    let asks = pod(limits.clone(), json!({"partage.dev/latency": "low", "partage.dev/priority": "9"}));
    for (max_priority, priority) in [(0, 0), (4, 4), (10, 9)] {
        let settings = AgentSettings { max_priority, ..AgentSettings::default() };
        let mut grants = NodeGrants::new(node(), BTreeMap::new());
        let record = decide(&mut grants, "a", &asks, &settings).unwrap();
        let turns = TurnPreferences { low_latency: true, priority };
        assert_eq!(record.turns, turns);
        assert_eq!(crate::store::decode(&crate::store::encode(&record).unwrap()).unwrap(), record);
        // Neither its tenants nor a changed setting affect a running pod.
        let (changed, all) = (pod(limits.clone(), json!({})), AgentSettings { max_priority: 10, ..settings });
        assert_eq!(grants.with_grant(&record, &changed, record.grant.clone(), &all).unwrap().turns, turns);
        let plain = decide(&mut grants, "b", &changed, &all).unwrap();
        assert!(!crate::store::encode(&plain).unwrap().contains("turns"));
        assert!(grants.with_grant(&plain, &asks, plain.grant.clone(), &all).unwrap().turns.is_default());
    }
    let settings = AgentSettings::default();
    let wrong = pod(limits, json!({"partage.dev/latency": "lowest"}));
    let why = decide(&mut NodeGrants::new(node(), BTreeMap::new()), "c", &wrong, &settings).unwrap_err();
    assert_eq!(
        why,
        "partage.dev/latency: \"lowest\" is not a latency class: write \"low\", or remove this annotation"
    );
}

#[test]
fn oversubscription_is_refused_unless_the_node_allows_it_and_is_kept_by_the_record() {
    let mut grants = NodeGrants::new(node(), BTreeMap::new());
    let refused = AgentSettings::default();
    let allowed = AgentSettings { oversubscribe: Oversubscription::Allowed, ..AgentSettings::default() };
    let limits = json!({"partage.dev/gpu": 1, "partage.dev/memory": "4Gi"});
    let asks = pod(limits.clone(), json!({"partage.dev/oversubscribe": "true"}));
    let why = decide(&mut grants, "a", &asks, &refused).unwrap_err();
    for expected in ["requests partage.dev/oversubscribe", "node n1 does not allow", "remove the annotation"]
    {
        assert!(why.contains(expected), "{expected}: {why}");
    }
    assert_eq!(grants.records().count(), 0, "a refused pod holds nothing");
    let record = decide(&mut grants, "a", &asks, &allowed).unwrap();
    assert!(record.oversubscribe);
    assert_eq!(crate::store::decode(&crate::store::encode(&record).unwrap()).unwrap(), record);

    // Neither its tenants nor a changed setting affect a running pod.
    let changed = pod(limits.clone(), json!({}));
    assert!(grants.with_grant(&record, &changed, record.grant.clone(), &refused).unwrap().oversubscribe);
    let plain = decide(&mut grants, "b", &pod(limits, json!({})), &allowed).unwrap();
    assert!(!plain.oversubscribe && !crate::store::encode(&plain).unwrap().contains("oversubscribe"));
    assert!(!grants.with_grant(&plain, &asks, plain.grant.clone(), &allowed).unwrap().oversubscribe);

    // A pod whose record was lost gets its grant back, and no more than the node allows now.
    let mut annotations = serde_json::to_value(&record.annotations).unwrap();
    annotations["partage.dev/oversubscribe"] = json!("true");
    let running = pod(json!({"partage.dev/gpu": 1, "partage.dev/memory": "4Gi"}), annotations);
    for (settings, kept) in [(&refused, false), (&allowed, true)] {
        let mut grants = NodeGrants::new(node(), BTreeMap::new());
        let request = GrantRequest { id: &record.pod, pod: &running, problems: &[], boot: "b", now: 7 };
        let adopted = grants.adopt(&request, settings).unwrap();
        assert_eq!((adopted.oversubscribe, adopted.grant), (kept, record.grant.clone()));
    }

    let wrong = pod(json!({"partage.dev/memory": "4Gi"}), json!({"partage.dev/oversubscribe": "yes"}));
    let why = decide(&mut grants, "c", &wrong, &allowed).unwrap_err();
    assert_eq!(why, "partage.dev/oversubscribe: \"yes\" is not a boolean: write \"true\" or \"false\"");
}

#[test]
fn pod_without_capacity_is_refused_until_capacity_is_released() {
    let mut grants = NodeGrants::new(node(), BTreeMap::new());
    let settings = AgentSettings::default();
    let asks = pod(json!({"partage.dev/gpu": 1, "partage.dev/memory": "10Gi"}), json!({}));
    decide(&mut grants, "a", &asks, &settings).unwrap();
    decide(&mut grants, "b", &asks, &settings).unwrap();
    let why = decide(&mut grants, "c", &asks, &settings).unwrap_err();
    assert!(why.starts_with("insufficient GPU capacity on node n1: ") && why.contains("10 GiB"), "{why}");
    assert!(why.contains("the container starts when capacity is released"), "{why}");
    grants.release(&"a".into());
    decide(&mut grants, "c", &asks, &settings).unwrap();
    // A request above the capacity of every GPU can never be granted.
    let huge = pod(json!({"partage.dev/gpu": 1, "partage.dev/memory": "17Gi"}), json!({}));
    let why = decide(&mut grants, "d", &huge, &settings).unwrap_err();
    assert!(why.starts_with("insufficient GPU capacity on node n1, even when empty: "), "{why}");
    assert!(why.contains("; delete the pod, and request"), "{why}");
}

#[test]
fn unhealthy_gpu_is_not_granted_and_keeps_its_grants() {
    let mut grants = NodeGrants::new(node(), BTreeMap::new());
    let settings = AgentSettings::default();
    let asks = pod(json!({"partage.dev/gpu": 1, "partage.dev/memory": "10Gi"}), json!({}));
    let first = decide(&mut grants, "a", &asks, &settings).unwrap();
    let mut unhealthy = node();
    unhealthy.gpus.iter_mut().for_each(|gpu| gpu.withheld = Some("XID 79".into()));
    grants.set_node(unhealthy);
    assert!(decide(&mut grants, "b", &asks, &settings).unwrap_err().contains("XID 79"));
    assert_eq!(decide(&mut grants, "a", &asks, &settings).unwrap(), first);
    grants.set_node(node());
    decide(&mut grants, "b", &asks, &settings).unwrap();
    assert_eq!(grants.audit(), []);
}

#[test]
fn invalid_asks_are_refused_with_the_container() {
    let mut grants = NodeGrants::new(node(), BTreeMap::new());
    let wrong = pod(json!({"partage.dev/gpu": 1, "volcano.sh/vgpu-number": 1}), json!({}));
    let why = decide(&mut grants, "a", &wrong, &AgentSettings::default()).unwrap_err();
    assert!(why.starts_with("container main, "), "{why}");
    // A pod may ask in two dialects, and kubelet counts both.
    let limits = json!({"partage.dev/gpu": 1, "aliyun.com/gpu-mem": 2});
    let carried = pod(limits, json!({"partage.dev/carrier": "main=partage.dev/gpu"}));
    let why = decide(&mut grants, "a", &carried, &AgentSettings::default()).unwrap_err();
    assert!(why.contains("partage.dev/gpu and aliyun.com/gpu-mem, which are separate shares"), "{why}");
    assert_eq!(grants.records().count(), 0);
}

/// A region has entries for 16 GPUs: a grant of more would be refused at every start of the container.
#[test]
fn more_gpus_than_a_container_can_have_are_refused() {
    let mut many = node();
    many.gpus = (0..20)
        .map(|at| Gpu {
            uuid: format!("GPU-00000000-0000-0000-0000-{at:012}").into(),
            minor: at,
            ..many.gpus[0].clone()
        })
        .collect();
    let mut grants = NodeGrants::new(many, BTreeMap::new());
    let gpus = |count: u32| pod(json!({"partage.dev/gpu": count, "partage.dev/memory": "1Gi"}), json!({}));
    for settings in [AgentSettings::default(), extender()] {
        let why = decide(&mut grants, "a", &gpus(17), &settings).unwrap_err();
        assert_eq!(
            why,
            "container main, partage.dev/gpu: 17 GPUs are more than one container can have: request at most 16"
        );
    }
    assert_eq!((grants.records().count(), grants.audit()), (0, vec![]));
    let most = decide(&mut grants, "a", &gpus(16), &AgentSettings::default()).unwrap();
    assert_eq!(most.grant.grants[0].shares.len(), 16);
}

#[test]
fn grant_carried_by_the_pod_is_applied_exactly() {
    let mut grants = NodeGrants::new(node(), BTreeMap::new());
    let limits = json!({"partage.dev/gpu": 1, "partage.dev/memory": "10Gi"});
    let asks = pod(limits.clone(), granted("n1", "main", GPU[1], 10 << 30));
    let record = decide(&mut grants, "a", &asks, &extender()).unwrap();
    assert_eq!(record.grant.grants[0].shares[0].gpu.as_str(), GPU[1]);
    assert!(
        !record.annotations.contains_key(native::ANNOTATION),
        "the annotation exists and is not replaced"
    );
    // Pods without a grant, or with one that cannot be applied.
    let huge = granted("n1", "main", GPU[1], 10 << 30);
    for (annotations, expected) in [
        (json!({}), "without a grant"),
        (huge, "has 6 GiB of memory free for this pod, 10 GiB requested"),
        (granted("n1", "main", GPU[0], 1 << 30), "requests 10 GiB of memory, granted 1 GiB"),
        (granted("n2", "main", GPU[0], 1 << 30), "n2"),
        (granted("n1", "other", GPU[0], 1 << 30), "other"),
        (granted("n1", "main", "GPU-00000000-0000-0000-0000-000000000009", 1 << 30), "does not have"),
        (json!({native::ANNOTATION: "{}"}), "is not a grant"),
    ] {
        let why = decide(&mut grants, "b", &pod(limits.clone(), annotations), &extender()).unwrap_err();
        assert!(why.contains(expected), "{expected}: {why}");
        assert_eq!((grants.records().count(), grants.audit()), (1, vec![]), "{why}");
    }
}

#[test]
fn grant_on_a_pod_is_ignored_without_an_extender() {
    let mut grants = NodeGrants::new(node(), BTreeMap::new());
    let limits = json!({"partage.dev/gpu": 1, "partage.dev/memory": "1Gi"});
    let forged = pod(limits, granted("n1", "main", GPU[0], 16 << 30));
    let record = decide(&mut grants, "a", &forged, &AgentSettings::default()).unwrap();
    assert_eq!(record.grant.grants[0].shares[0].memory_bytes, Some(Bytes(1 << 30)));
}

#[test]
fn resize_is_limited_to_the_capacity_of_the_gpu() {
    let mut grants = NodeGrants::new(node(), BTreeMap::new());
    let settings = AgentSettings::default();
    let ten = pod(json!({"partage.dev/gpu": 1, "partage.dev/memory": "10Gi"}), json!({}));
    for uid in ["a", "b"] {
        decide(&mut grants, uid, &ten, &settings).unwrap();
    }
    let old = grants.record(&"a".into()).unwrap().clone();
    let resized = |memory: u64| {
        let mut record = old.clone();
        record.grant.grants[0].shares[0].memory_bytes = Some(Bytes(memory));
        record
    };
    grants.reserve(&old, &resized(16 << 30).grant).unwrap();
    grants.replace(resized(16 << 30));
    // Until a shrink is confirmed, no other pod gets the difference.
    let now = grants.record(&"a".into()).unwrap().clone();
    grants.reserve(&now, &resized(2 << 30).grant).unwrap();
    assert!(decide(&mut grants, "c", &ten, &settings).unwrap_err().contains("insufficient GPU capacity"));
    grants.replace(resized(2 << 30));
    let now = grants.record(&"a".into()).unwrap().clone();
    let why = grants.reserve(&now, &resized(17 << 30).grant).unwrap_err().message;
    assert_eq!(why, format!("GPU {} has 16 GiB of memory free for this pod, 17 GiB requested", GPU[0]));
    assert_eq!(grants.record(&"a".into()), Some(&resized(2 << 30)));
    assert_eq!((grants.audit(), held(&grants, &old.grant.grants[0].shares[0].gpu).0), (vec![], 2 << 30));
    decide(&mut grants, "c", &ten, &settings).unwrap();
}

proptest! {
    /// Grants never exceed the capacity, and released shares can be granted again.
    #[test]
    fn never_over_capacity(steps in proptest::collection::vec((0..12_usize, 1..20_u64, 0..=100_u32, any::<bool>()), 1..60)) {
        let mut grants = NodeGrants::new(node(), BTreeMap::new());
        let settings = AgentSettings::default();
        for (uid, memory, cores, goes) in steps {
            let uid = format!("pod-{uid}");
            if goes {
                grants.release(&uid.as_str().into());
                continue;
            }
            let mut limits = json!({"partage.dev/gpu": 1, "partage.dev/memory": format!("{memory}Gi")});
            if cores > 0 {
                limits["partage.dev/cores"] = cores.into();
            }
            let _ = decide(&mut grants, &uid, &pod(limits, json!({})), &settings);
            prop_assert_eq!(grants.audit(), vec![]);
            // The ledger rebuilt from the records is the same.
            let again = NodeGrants::new(node(), grants.records.clone());
            for gpu in GPU {
                prop_assert_eq!(held(&again, &gpu.into()), held(&grants, &gpu.into()));
                prop_assert!(held(&grants, &gpu.into()).0 <= 16 << 30);
            }
        }
        let uids: Vec<PodUid> = grants.records().map(|record| record.pod.uid.clone()).collect();
        uids.iter().for_each(|uid| drop(grants.release(uid)));
        for gpu in GPU {
            prop_assert_eq!(held(&grants, &gpu.into()), (0, 0, 0));
        }
        let all = pod(json!({"partage.dev/gpu": 2, "partage.dev/memory": "16Gi", "partage.dev/cores": 100}), json!({}));
        prop_assert!(decide(&mut grants, "all", &all, &settings).is_ok());
    }
}
