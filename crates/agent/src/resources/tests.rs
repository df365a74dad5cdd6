use super::*;
use partage_core::model::{Bytes, Grant, Overcommit, PodGrant, Share};
use partage_core::pod::PodManifest;
use proptest::collection::{btree_map, btree_set, vec};
use proptest::prelude::*;
use serde_json::json;

pub(crate) fn settings(dialects: &[Dialect]) -> AgentSettings {
    AgentSettings { dialects: dialects.to_vec(), ..AgentSettings::default() }
}

pub(crate) fn node(mib: &[u64]) -> Node {
    let gpu = |(minor, mib): (u32, &u64)| Gpu {
        uuid: format!("GPU-{minor}").into(),
        minor,
        model: "NVIDIA A100".into(),
        memory_bytes: Bytes(mib << 20),
        numa: None,
        pci: None,
        withheld: None,
    };
    Node::new("node1", (0..).zip(mib).map(gpu).collect())
}

fn held(ids: &[(u64, &[usize])]) -> BTreeMap<DeviceId, BTreeSet<usize>> {
    ids.iter().map(|(number, gpus)| (slot_id(*number), gpus.iter().copied().collect())).collect()
}

fn unhealthy(listed: &[ListedDevice]) -> Vec<&str> {
    listed.iter().filter(|listed| !listed.healthy).map(|listed| listed.id.0.as_str()).collect()
}

#[test]
fn slots_follow_the_unit_of_each_dialect() {
    let all = settings(&Dialect::ALL);
    let mut node = node(&[11_178, 40_960]);
    node.gpus.push(Gpu { withheld: Some("MIG mode is enabled".into()), ..node.gpus[1].clone() });
    let counted: Vec<(String, Vec<u32>)> = CountResource::enabled(&all)
        .iter()
        .map(|resource| (resource.name(), slots(resource, &node, &all)))
        .collect();
    let expected = [
        ("partage.dev/gpu", [10, 10, 0]),
        ("volcano.sh/vgpu-number", [10, 10, 0]),
        ("inspur.com/vcuda-core", [100, 100, 0]),
        ("tencent.com/vcuda-core", [100, 100, 0]),
        ("k8s.amazonaws.com/vgpu", [10, 10, 0]),
        ("aliyun.com/gpu-mem", [10, 40, 0]),
        ("nvidia.com/gpu", [10, 10, 0]),
    ];
    assert_eq!(counted, expected.map(|(name, slots)| (name.to_string(), slots.to_vec())));
    assert_eq!(CountResource::enabled(&settings(&[Dialect::Aws, Dialect::Aws])), [CountResource::Aws]);
}

/// Admission webhooks add such a resource to a container that requests only memory.
#[test]
fn count_with_one_device_for_each_share_can_be_a_carrier() {
    let settings = AgentSettings { shares_per_gpu: 7, ..settings(&Dialect::ALL) };
    let gpu = &node(&[40_960]).gpus[0];
    let is_share_count = |resource: &CountResource| resource.slots_of(gpu, &settings) == 7;
    for resource in CountResource::enabled(&settings).into_iter().filter(is_share_count) {
        let metadata = json!({"annotations": {"partage.dev/carrier": format!("main={resource}")}});
        let limits = json!({"limits": {resource.name(): 1}});
        let (pod, _) =
            PodManifest::read(&metadata, &json!({"containers": [{"name": "main", "resources": limits}]}));
        let reading = partage_core::dialect::asks::read(&pod, &settings.dialect());
        let refused: Vec<_> =
            reading.problems.iter().filter(|problem| problem.message.contains("cannot be")).collect();
        assert!(refused.is_empty(), "{refused:?}");
    }
}

#[test]
fn amounts_match_the_replaced_systems() {
    let mut node = node(&[11_178; 8]);
    let all = amounts(&node, &settings(&Dialect::ALL), &RequestedAmounts::default());
    let expected = [
        ("aliyun.com/gpu-count", 8),
        ("inspur.com/vcuda-memory", 8 * 11_178 / 256),
        ("nvidia.com/gpucores", 800),
        ("nvidia.com/gpumem", 89_424),
        ("nvidia.com/gpumem-percentage", 800),
        ("partage.dev/cores", 800),
        ("partage.dev/memory", 89_424 << 20),
        ("partage.dev/memory-percent", 800),
        ("tencent.com/vcuda-memory", 8 * 11_178 / 256),
        ("volcano.sh/vgpu-cores", 800),
        ("volcano.sh/vgpu-memory", 89_424),
        ("volcano.sh/vgpu-memory-percentage", 800),
    ];
    assert_eq!(all, expected.map(|(name, amount)| (name.to_string(), amount)).into());

    node.gpus[0].withheld = Some("it is lost".into());
    let volcano = AgentSettings {
        volcano_memory_factor: 10,
        memory_overcommit: Overcommit::percent(150).unwrap(),
        ..settings(&[Dialect::Volcano])
    };
    let total = BTreeMap::from([("volcano.sh/vgpu-cores".to_string(), 790), ("other.com/x".to_string(), 1)]);
    let lost = amounts(&node, &volcano, &RequestedAmounts { total, ..RequestedAmounts::default() });
    let expected = [
        ("volcano.sh/vgpu-cores", 790),
        ("volcano.sh/vgpu-memory", 7 * (11_178 * 3 / 2 / 10)),
        ("volcano.sh/vgpu-memory-percentage", 7 * 150),
    ];
    assert_eq!(lost, expected.map(|(name, amount)| (name.to_string(), amount)).into());
}

#[test]
fn too_many_devices_are_refused_with_the_setting_to_change() {
    let mib = AgentSettings { gpushare_unit: MemoryUnit::Mib, ..settings(&Dialect::ALL) };
    assert_eq!(check(&mib, &node(&[40_960])), Ok(()));
    assert_eq!(
        check(&mib, &node(&[40_960, 40_960])).unwrap_err().to_string(),
        "aliyun.com/gpu-mem would have 81920 devices on node node1, and kubelet supports at most 50000 of one resource: \
         set gpushareUnit: GiB"
    );
    assert_eq!(check(&settings(&Dialect::ALL), &node(&[40_960, 40_960])), Ok(()));
    let shares = AgentSettings { shares_per_gpu: 50_001, ..settings(&[Dialect::Native]) };
    assert!(check(&shares, &node(&[1])).unwrap_err().to_string().ends_with("lower sharesPerGpu"));
}

#[test]
fn unhealthy_gpu_makes_its_held_and_free_ids_unhealthy() {
    let holders = held(&[(0, &[1]), (1, &[0]), (2, &[0])]);
    let listed = devices(&[3, 3], &[true, false], &holders);
    assert_eq!(listed.len(), 7, "one more, so that the scheduler counts two free ones on the healthy GPU");
    assert_eq!(unhealthy(&listed), ["slot-1", "slot-2"], "those that are held on it");
    let listed = devices(&[3, 3], &[false, true], &holders);
    assert_eq!(unhealthy(&listed), ["slot-0", "slot-5"], "one that is held on it, and one that is free");
    assert_eq!(unhealthy(&devices(&[3, 3], &[true, true], &holders)).len(), 6);
}

/// The scheduler subtracts all pods' requests from the healthy ids. The remainder equals the free capacity of healthy GPUs.
#[test]
fn lost_gpu_takes_no_free_slot_from_a_healthy_one() {
    let numbers: Vec<u64> = (0..4).collect();
    let on_first = numbers.iter().map(|&number| (number, [0].as_slice())).collect::<Vec<_>>();
    let listed = devices(&[5, 5], &[true, false], &held(&on_first));
    let allocatable = listed.iter().filter(|one| one.healthy).count();
    assert_eq!(allocatable - on_first.len(), 5);
    // Without a healthy GPU there is nothing to offer.
    assert_eq!(unhealthy(&devices(&[5, 5], &[true, true], &held(&on_first))).len(), 10);
}

#[test]
fn id_without_a_gpu_is_unhealthy_when_all_gpus_are() {
    // As of a pod that is gone, until kubelet reuses its device.
    let holders = held(&[(0, &[0]), (1, &[])]);
    assert_eq!(unhealthy(&devices(&[2, 2], &[true, true], &holders)).len(), 4);
    assert_eq!(unhealthy(&devices(&[2, 2], &[false, false], &holders)), [""; 0]);
    assert_eq!(unhealthy(&devices(&[2, 2], &[true, false], &holders)), ["slot-0"]);
}

#[test]
fn grant_on_several_gpus_loses_its_part_on_the_unhealthy_one() {
    let holders = held(&[(0, &[0, 1]), (1, &[0, 1]), (2, &[])]);
    let listed = devices(&[2, 2], &[false, true], &holders);
    assert_eq!(unhealthy(&listed), ["slot-1"], "the scheduler counts the other half of the grant, too");
}

#[test]
fn held_ids_stay_listed_when_slots_are_removed() {
    let mut holders = held(&[(1, &[0]), (7, &[1])]);
    holders.insert(DeviceId("from-elsewhere".into()), [1].into());
    let names = |listed: &[ListedDevice]| listed.iter().map(|listed| listed.id.0.clone()).collect::<Vec<_>>();
    let listed = devices(&[1, 1], &[false, false], &holders);
    assert_eq!(names(&listed), ["slot-0", "slot-1", "from-elsewhere", "slot-7"]);
    assert_eq!(unhealthy(&listed), ["slot-0"], "there are two slots, and three are held");
    assert_eq!(unhealthy(&devices(&[1, 1], &[false, true], &holders)), ["from-elsewhere", "slot-7"]);
}

#[test]
fn gpu_that_held_more_than_its_slots_takes_none_from_others() {
    // All of the node's slots are held on the first GPU.
    let numbers: Vec<u64> = (0..6).collect();
    let holders = held(&numbers.iter().map(|&number| (number, [0].as_slice())).collect::<Vec<_>>());
    assert_eq!(devices(&[3, 3], &[false, false], &holders).len(), 6);
    let listed = devices(&[3, 3], &[true, false], &holders);
    assert_eq!(unhealthy(&listed), ["slot-0", "slot-1", "slot-2", "slot-3", "slot-4", "slot-5"]);
    let free: Vec<&str> =
        listed.iter().filter(|one| one.healthy).map(|listed| listed.id.0.as_str()).collect();
    assert_eq!(
        free,
        (6..15).map(|number| format!("slot-{number}")).collect::<Vec<_>>(),
        "three, and six for those that are held"
    );
}

#[test]
fn requests_of_pods_are_counted_as_kubelet_does() {
    let container = |name: &str, memory: u64| json!({"name": name, "resources": {"limits": {"a.b/memory": memory, "cpu": 1}}});
    let mut sidecar = container("proxy", 5);
    sidecar["restartPolicy"] = "Always".into();
    let of = |init: serde_json::Value, app: serde_json::Value| {
        let (pod, problems) =
            PodManifest::read(&json!({}), &json!({"initContainers": init, "containers": app}));
        assert_eq!(problems, []);
        pod
    };
    let of_all = |pods: &[&PodManifest]| {
        let pods: Vec<_> = pods.iter().map(|pod| PodRequest { pod, grant: None }).collect();
        let requested = requested(&pods, &node(&[1000]));
        assert_eq!(
            requested.on_unhealthy,
            BTreeMap::new(),
            "a pod without a grant can only get healthy GPUs"
        );
        requested.total
    };
    let sum = |pods: &[&PodManifest]| of_all(pods).get("a.b/memory").copied();
    let apps = of(json!([container("fetch", 7)]), json!([container("a", 4), container("b", 4)]));
    assert_eq!(sum(&[&apps]), Some(8));
    let large_init = of(json!([container("fetch", 9)]), json!([container("a", 4), container("b", 4)]));
    assert_eq!(sum(&[&large_init]), Some(9));
    let early = of(json!([sidecar, container("fetch", 7)]), json!([container("a", 4)]));
    assert_eq!(sum(&[&early]), Some(12), "the init container runs beside the sidecar");
    let late = of(json!([container("fetch", 7), sidecar]), json!([container("a", 4)]));
    assert_eq!(sum(&[&late]), Some(9));
    assert_eq!(sum(&[&apps, &late]), Some(17));
    assert_eq!(of_all(&[&apps]).len(), 1, "cpu is not an extended resource");
}

/// GPUs with slots, which of them are unhealthy, and ids that are held, also beyond the slots.
fn situation() -> impl Strategy<Value = (Vec<u32>, Vec<bool>, BTreeMap<DeviceId, BTreeSet<usize>>)> {
    (1usize..5).prop_flat_map(|gpus| {
        let holders = btree_map((0u64..60).prop_map(slot_id), btree_set(0..gpus, 0..3), 0..30);
        (vec(0u32..12, gpus), vec(any::<bool>(), gpus), holders)
    })
}

proptest! {
    #[test]
    fn ids_are_listed_once_and_stay((slots, unhealthy_gpus, held) in situation()) {
        let listed = devices(&slots, &unhealthy_gpus, &held);
        let ids: BTreeSet<&DeviceId> = listed.iter().map(|listed| &listed.id).collect();
        prop_assert_eq!(ids.len(), listed.len());
        let total: u32 = slots.iter().sum();
        for number in 0..u64::from(total) {
            prop_assert!(ids.contains(&slot_id(number)));
        }
        prop_assert!(held.keys().all(|id| ids.contains(id)));
        prop_assert!(listed.iter().all(|listed| listed.id.0.len() <= 63));
    }

    #[test]
    fn id_on_a_healthy_gpu_is_never_unhealthy((slots, unhealthy_gpus, held) in situation()) {
        for ListedDevice { id, healthy } in devices(&slots, &unhealthy_gpus, &held) {
            let Some(gpus) = held.get(&id).filter(|gpus| !gpus.is_empty()) else { continue };
            if gpus.iter().all(|&gpu| !unhealthy_gpus[gpu]) {
                prop_assert!(healthy, "{id}");
            } else if gpus.iter().all(|&gpu| unhealthy_gpus[gpu]) {
                prop_assert!(!healthy, "{id}");
            }
        }
    }

    /// What kube-scheduler computes is right: healthy ids minus all that are held is what healthy GPUs have free.
    #[test]
    fn free_ids_match_the_free_slots_of_healthy_gpus((slots, unhealthy_gpus, held) in situation()) {
        let listed = devices(&slots, &unhealthy_gpus, &held);
        let on = distribute(&held);
        let well: u64 = (0..slots.len()).filter(|&gpu| !unhealthy_gpus[gpu]).map(|gpu| u64::from(slots[gpu])).sum();
        let on_ill = held.keys().filter(|id| on.get(id).is_some_and(|&gpu| unhealthy_gpus[gpu])).count() as u64;
        let taken = held.len() as u64 - on_ill;
        let allocatable = listed.iter().filter(|one| one.healthy).count() as u64;
        if well == 0 {
            let on_healthy_gpus = held.keys().filter(|id| on.get(id).is_some_and(|&gpu| !unhealthy_gpus[gpu])).count() as u64;
            prop_assert_eq!(allocatable, on_healthy_gpus, "there is nothing to offer");
        } else {
            prop_assert_eq!(allocatable.saturating_sub(held.len() as u64), well.saturating_sub(taken));
        }
        let total: u64 = slots.iter().map(|&slots| u64::from(slots)).sum();
        prop_assert!(listed.len() as u64 <= total + 2 * held.len() as u64);
    }

    /// Pods with shares of any GPUs: the scheduler's remainder is what healthy GPUs have beyond the requests on them, and no amount is
    /// below what is requested.
    #[test]
    fn amounts_cover_requests_and_lose_nothing_of_healthy_gpus(
        mib in vec(1u64..100_000, 1..9),
        lost in any::<u8>(),
        overcommit in 100u32..1000,
        requests in vec((vec(0usize..9, 0..4), 1u64..1 << 40), 0..12),
    ) {
        let settings = AgentSettings {
            memory_overcommit: Overcommit::percent(overcommit).unwrap(),
            ..settings(&Dialect::ALL)
        };
        let mut node = node(&mib);
        for (index, gpu) in node.gpus.iter_mut().enumerate() {
            gpu.withheld = (lost >> index & 1 == 1).then(|| "it is lost".to_string());
        }
        let resources: Vec<String> = amounts(&node, &settings, &RequestedAmounts::default()).into_keys().collect();
        let pods: Vec<(PodManifest, Option<PodGrant>)> = requests.iter().map(|(gpus, amount)| pod_on(gpus, *amount, &resources)).collect();
        let pods: Vec<_> = pods.iter().map(|(pod, grant)| PodRequest { pod, grant: grant.as_ref() }).collect();
        let requested = requested(&pods, &node);
        let healthy = amounts(&node, &settings, &RequestedAmounts::default());
        for (resource, amount) in amounts(&node, &settings, &requested) {
            let of = |map: &BTreeMap<String, u64>| map.get(&resource).copied().unwrap_or(0);
            let (total, on_unhealthy) = (of(&requested.total), of(&requested.on_unhealthy));
            prop_assert!(amount >= total);
            prop_assert!(on_unhealthy <= total);
            // The shares on healthy GPUs, each container's amount in equal parts, rounded up.
            let on_healthy: u64 = requests.iter().map(|(gpus, amount)| {
                let well = gpus.iter().filter(|&&gpu| gpu < mib.len() && lost >> gpu & 1 == 0).count() as u64;
                if gpus.is_empty() { *amount } else { (amount * well).div_ceil(gpus.len() as u64) }
            }).sum();
            prop_assert_eq!(total - on_unhealthy, on_healthy);
            prop_assert_eq!(amount - total, of(&healthy).saturating_sub(on_healthy));
        }
    }
}

/// A pod that requests an amount of every resource, with one share on each of these GPUs; without a grant if there are none.
fn pod_on(gpus: &[usize], amount: u64, resources: &[String]) -> (PodManifest, Option<PodGrant>) {
    let limits: serde_json::Map<String, serde_json::Value> =
        resources.iter().map(|resource| (resource.clone(), amount.into())).collect();
    let spec = json!({"containers": [{"name": "main", "resources": {"limits": limits}}]});
    let share = |gpu: &usize| Share {
        gpu: format!("GPU-{gpu}").as_str().into(),
        memory_bytes: None,
        cores: None,
        ceiling: None,
        whole: false,
    };
    let shares = gpus.iter().map(share).collect();
    let grant = Grant { container: "main".into(), init: false, shares };
    let grant = PodGrant { node: "node1".into(), grants: vec![grant] };
    (PodManifest::read(&json!({}), &spec).0, (!gpus.is_empty()).then_some(grant))
}

/// The case of a lost GPU whose pods held 12 GiB and 90 % of its compute: the other GPU is free as a whole.
#[test]
fn lost_gpu_leaves_the_healthy_one_free() {
    let mut node = node(&[40_000, 40_000]);
    node.gpus[1].withheld = Some("XID 79".into());
    let settings = settings(&Dialect::ALL);
    let free = amounts(&node, &settings, &RequestedAmounts::default());
    let resources: Vec<String> = free.keys().cloned().collect();
    let pods: Vec<_> = (0..3).map(|_| pod_on(&[1], 30, &resources)).collect();
    let pods: Vec<_> = pods.iter().map(|(pod, grant)| PodRequest { pod, grant: grant.as_ref() }).collect();
    let requested = requested(&pods, &node);
    for (resource, amount) in amounts(&node, &settings, &requested) {
        assert_eq!(requested.total[&resource], 90);
        assert_eq!(amount - 90, free[&resource], "{resource}");
    }
}

/// An init container that ran on a lost GPU does not hide what the pod holds on a healthy one.
#[test]
fn init_container_on_lost_gpu_does_not_reduce_healthy_gpu_request() {
    let mut node = node(&[40_000, 40_000]);
    node.gpus[1].withheld = Some("XID 79".into());
    let container =
        |name: &str, cores: u64| json!({"name": name, "resources": {"limits": {"partage.dev/cores": cores}}});
    let spec = json!({"initContainers": [container("fetch", 90)], "containers": [container("main", 40)]});
    let (pod, _) = PodManifest::read(&json!({}), &spec);
    let (_, grant) = pod_on(&[1], 1, &[]);
    let mut grant = grant.unwrap();
    grant.grants[0].container = "fetch".into();
    let (_, main) = pod_on(&[0], 1, &[]);
    grant.grants.extend(main.unwrap().grants);
    let requested = requested(&[PodRequest { pod: &pod, grant: Some(&grant) }], &node);
    assert_eq!(requested.total["partage.dev/cores"], 90);
    assert_eq!(requested.on_unhealthy["partage.dev/cores"], 50);
}
