//! The choice of devices in Volcano vGPU.

use crate::test_cluster::*;
use partage_core::ledger::Ledger;
use partage_core::model::*;
use partage_core::place::HostUsage;
use partage_core::place::NodeIndex;

fn vgpu(count: u32, mib: u64, cores: u32) -> WantedGpus {
    let cores_ask = match cores {
        0 => CoresAsk::Uncounted,
        percent => CoresAsk::Exactly(Cores::percent(percent).unwrap()),
    };
    let memory = if mib == 0 { MemoryAsk::All } else { MemoryAsk::Exactly(Bytes::mib(mib).unwrap()) };
    WantedGpus { count, share: ShareAsk { memory, cores: cores_ask, whole: cores == 100, ceiling: None } }
}

fn cluster(policy: PlacementPolicy, mib: &[u64]) -> TestCluster {
    TestCluster::new(policy, [node("n", mib)])
}

#[test]
fn c20_binpack_uses_the_used_gpu() {
    let mut cluster = cluster(PlacementPolicy::Binpack, &[16384, 16384]);
    cluster.occupy(0, vgpu(1, 4096, 25));
    assert_eq!(cluster.preview(vgpu(1, 4096, 25)), [0]);
}

#[test]
fn c21_spread_uses_the_idle_gpu() {
    let mut cluster = cluster(PlacementPolicy::Spread, &[16384, 16384]);
    cluster.occupy(0, vgpu(1, 4096, 25));
    assert_eq!(cluster.preview(vgpu(1, 4096, 25)), [1]);
}

#[test]
fn c23_three_shares_are_packed_on_one_gpu() {
    let mut cluster = cluster(PlacementPolicy::Binpack, &[16384, 16384]);
    for name in ["a", "b", "c"] {
        assert_eq!(cluster.gpus(name, vgpu(1, 4096, 0)), [0]);
    }
}

#[test]
fn c24_whole_gpus_of_different_sizes() {
    let mut cluster = cluster(PlacementPolicy::Binpack, &[30000, 20000, 30000]);
    cluster.place("p", &pod(&[vgpu(3, 0, 100)])).unwrap();
    let grant = &cluster.ledger.held(&id("p").uid).unwrap().grant.grants[0];
    let mib: Vec<u64> = grant.shares.iter().map(|share| share.memory_bytes.unwrap().0 >> 20).collect();
    assert_eq!(mib, [30000, 20000, 30000]);
}

#[test]
fn c25_more_gpus_than_the_node_has_do_not_fit() {
    assert_eq!(cluster(PlacementPolicy::Binpack, &[16384, 16384]).preview(vgpu(3, 1000, 0)), NOWHERE);
}

#[test]
fn c26_exclusive_share_needs_an_empty_gpu() {
    let mut cluster = cluster(PlacementPolicy::Binpack, &[16384]);
    cluster.occupy(0, vgpu(1, 1000, 0));
    assert_eq!(cluster.preview(vgpu(1, 1000, 100)), NOWHERE);
}

#[test]
fn c27_nothing_fits_beside_fully_guaranteed_cores() {
    let mut cluster = cluster(PlacementPolicy::Binpack, &[16384]);
    cluster.occupy(0, vgpu(1, 1000, 60));
    cluster.occupy(0, vgpu(1, 1000, 40));
    assert_eq!(cluster.preview(vgpu(1, 1000, 0)), NOWHERE);
}

#[test]
fn c28_cores_never_exceed_the_gpu() {
    let mut cluster = cluster(PlacementPolicy::Binpack, &[16384]);
    cluster.occupy(0, vgpu(1, 1000, 60));
    assert_eq!(cluster.preview(vgpu(1, 1000, 50)), NOWHERE);
}

#[test]
fn c29_no_more_shares_than_the_node_allows() {
    let mut split = node("n", &[16384]);
    split.max_shares_per_gpu = Some(2);
    let mut cluster = TestCluster::new(PlacementPolicy::Binpack, [split]);
    cluster.occupy(0, vgpu(1, 1000, 10));
    cluster.occupy(0, vgpu(1, 1000, 10));
    assert_eq!(cluster.preview(vgpu(1, 1000, 10)), NOWHERE);
}

/// Upstream ignores the health of a GPU.
#[test]
fn c33_unhealthy_gpu_is_never_chosen() {
    let mut sick = node("n", &[16384, 16384]);
    sick.gpus[0].withheld = Some("XID 79: fell off the bus".into());
    assert_eq!(TestCluster::new(PlacementPolicy::Binpack, [sick]).preview(vgpu(1, 1000, 10)), [1]);
}

#[test]
fn c40_c41_models_and_uuids() {
    let models = |only: &[&str], never: &[&str]| Selector {
        only: only.iter().map(|s| s.to_string()).collect(),
        never: never.iter().map(|s| s.to_string()).collect(),
    };
    for (only, never, fits) in [
        (&["NVIDIA"][..], &[][..], true),
        (&["nvidia"], &[], true),
        (&["AMD", "NVIDIA", "INTEL"], &[], true),
        (&["AMD", "INTEL", "MLU"], &[], false),
        (&[], &["NVIDIA"], false),
        (&[], &["AMD"], true),
    ] {
        let mut ask = pod(&[vgpu(1, 1000, 10)]);
        ask.constraints.models = models(only, never);
        assert_eq!(
            cluster(PlacementPolicy::Binpack, &[16384]).place("p", &ask).is_some(),
            fits,
            "{only:?} {never:?}"
        );
    }
    for (only, never, gpu) in [
        (&["GPU-n-0", "GPU-n-1"][..], &["GPU-n-0"][..], Some(1)),
        (&["GPU-n-10"], &[], None),
        (&[], &["GPU-n-0", "GPU-n-1"], None),
    ] {
        let mut ask = pod(&[vgpu(1, 1000, 10)]);
        ask.constraints.uuids = models(only, never);
        let placed = cluster(PlacementPolicy::Binpack, &[16384, 16384]).place("p", &ask);
        assert_eq!(placed.map(|(_, gpus)| gpus[0][0]), gpu);
    }
}

/// Two containers on one GPU are counted twice and released twice (upstream: once).
#[test]
fn c53_two_containers_on_one_gpu() {
    let mut cluster = cluster(PlacementPolicy::Binpack, &[16384]);
    cluster.place("p", &pod(&[vgpu(1, 1000, 25), vgpu(1, 2000, 25)])).unwrap();
    let used = cluster.ledger.cluster().node_capacity(NodeIndex(0)).gpus[0].used;
    assert_eq!((used.memory >> 20, used.cores, used.shares), (3000, 50_000, 2));
    cluster.delete("p");
    assert_eq!(cluster.ledger.cluster().node_capacity(NodeIndex(0)).gpus[0].used, Default::default());
}

/// The pod uses the sum of its running containers or its largest init container, whichever is larger.
#[test]
fn c140_init_containers_count_by_maximum() {
    let charged = |init: &[u64], apps: &[u64]| {
        let mut ask = pod(&apps.iter().map(|&mib| vgpu(1, mib, 0)).collect::<Vec<_>>());
        let inits = init.iter().enumerate().map(|(index, &mib)| Ask {
            container: format!("init{index}").into(),
            role: ContainerRole::Init,
            want: vgpu(1, mib, 0),
        });
        ask.asks = inits.chain(ask.asks).collect();
        let mut cluster = cluster(PlacementPolicy::Binpack, &[16384]);
        cluster.place("p", &ask).unwrap();
        cluster.ledger.cluster().node_capacity(NodeIndex(0)).gpus[0].used.memory >> 20
    };
    assert_eq!(charged(&[], &[1, 3]), 4);
    assert_eq!(charged(&[1, 3], &[2]), 3);
}

/// A pod is counted and released once, however often it is reported.
#[test]
fn c50_pod_is_counted_and_released_once() {
    let mut ledger = Ledger::new([node("n", &[16384])]);
    let grant = |mib: u64| PodGrant {
        node: "n".into(),
        grants: vec![Grant {
            container: "c".into(),
            init: false,
            shares: vec![Share {
                gpu: "GPU-n-0".into(),
                memory_bytes: Bytes::mib(mib),
                cores: Cores::percent(25),
                ceiling: None,
                whole: false,
            }],
        }],
    };
    let used = |ledger: &Ledger| {
        let used = ledger.cluster().node_capacity(NodeIndex(0)).gpus[0].used;
        (used.shares, used.memory >> 20, used.cores / 1000)
    };
    for _ in 0..2 {
        ledger.confirm(id("a"), grant(1000), HostUsage::default());
        assert_eq!(used(&ledger), (1, 1000, 25));
    }
    ledger.confirm(id("b"), grant(1000), HostUsage::default());
    ledger.confirm(id("c"), grant(1000), HostUsage::default());
    assert_eq!(used(&ledger), (3, 3000, 75));
    for name in ["a", "b", "c", "a"] {
        ledger.release(&id(name).uid);
    }
    assert_eq!(used(&ledger), (0, 0, 0));
    ledger.confirm(id("a"), grant(1000), HostUsage::default());
    assert_eq!(used(&ledger), (1, 1000, 25));
}
