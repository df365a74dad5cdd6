//! Volcano vGPU's device choice.

use crate::world::*;
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
    WantedGpus { count, part: ShareAsk { memory, cores: cores_ask, whole: cores == 100, ceiling: None } }
}

fn world(policy: Policy, mib: &[u64]) -> World {
    World::new(policy, [node("n", mib)])
}

#[test]
fn c20_binpack_joins_the_used_gpu() {
    let mut world = world(Policy::Binpack, &[16384, 16384]);
    world.occupy(0, vgpu(1, 4096, 25));
    assert_eq!(world.would(vgpu(1, 4096, 25)), [0]);
}

#[test]
fn c21_spread_takes_the_idle_gpu() {
    let mut world = world(Policy::Spread, &[16384, 16384]);
    world.occupy(0, vgpu(1, 4096, 25));
    assert_eq!(world.would(vgpu(1, 4096, 25)), [1]);
}

#[test]
fn c23_three_in_a_row_pack_on_one() {
    let mut world = world(Policy::Binpack, &[16384, 16384]);
    for name in ["a", "b", "c"] {
        assert_eq!(world.gpus(name, vgpu(1, 4096, 0)), [0]);
    }
}

#[test]
fn c24_whole_cards_of_different_sizes() {
    let mut world = world(Policy::Binpack, &[30000, 20000, 30000]);
    world.place("p", &pod(&[vgpu(3, 0, 100)])).unwrap();
    let grant = &world.ledger.held(&id("p").uid).unwrap().grant.grants[0];
    let mib: Vec<u64> = grant.shares.iter().map(|share| share.memory_bytes.unwrap().0 >> 20).collect();
    assert_eq!(mib, [30000, 20000, 30000]);
}

#[test]
fn c25_more_cards_than_there_are() {
    assert_eq!(world(Policy::Binpack, &[16384, 16384]).would(vgpu(3, 1000, 0)), NOWHERE);
}

#[test]
fn c26_exclusive_needs_an_empty_card() {
    let mut world = world(Policy::Binpack, &[16384]);
    world.occupy(0, vgpu(1, 1000, 0));
    assert_eq!(world.would(vgpu(1, 1000, 100)), NOWHERE);
}

#[test]
fn c27_nothing_beside_fully_promised_cores() {
    let mut world = world(Policy::Binpack, &[16384]);
    world.occupy(0, vgpu(1, 1000, 60));
    world.occupy(0, vgpu(1, 1000, 40));
    assert_eq!(world.would(vgpu(1, 1000, 0)), NOWHERE);
}

#[test]
fn c28_cores_never_exceed_the_card() {
    let mut world = world(Policy::Binpack, &[16384]);
    world.occupy(0, vgpu(1, 1000, 60));
    assert_eq!(world.would(vgpu(1, 1000, 50)), NOWHERE);
}

#[test]
fn c29_no_more_shares_than_the_node_allows() {
    let mut split = node("n", &[16384]);
    split.max_shares_per_gpu = Some(2);
    let mut world = World::new(Policy::Binpack, [split]);
    world.occupy(0, vgpu(1, 1000, 10));
    world.occupy(0, vgpu(1, 1000, 10));
    assert_eq!(world.would(vgpu(1, 1000, 10)), NOWHERE);
}

/// Upstream never asks for a GPU's health.
#[test]
fn c33_unhealthy_is_never_chosen() {
    let mut sick = node("n", &[16384, 16384]);
    sick.gpus[0].withheld = Some("XID 79: fell off the bus".into());
    assert_eq!(World::new(Policy::Binpack, [sick]).would(vgpu(1, 1000, 10)), [1]);
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
        assert_eq!(world(Policy::Binpack, &[16384]).place("p", &ask).is_some(), fits, "{only:?} {never:?}");
    }
    for (only, never, gpu) in [
        (&["GPU-n-0", "GPU-n-1"][..], &["GPU-n-0"][..], Some(1)),
        (&["GPU-n-10"], &[], None),
        (&[], &["GPU-n-0", "GPU-n-1"], None),
    ] {
        let mut ask = pod(&[vgpu(1, 1000, 10)]);
        ask.constraints.uuids = models(only, never);
        let placed = world(Policy::Binpack, &[16384, 16384]).place("p", &ask);
        assert_eq!(placed.map(|(_, gpus)| gpus[0][0]), gpu);
    }
}

/// Two containers on one GPU are charged twice and freed twice (upstream: once).
#[test]
fn c53_two_containers_on_one_gpu() {
    let mut world = world(Policy::Binpack, &[16384]);
    world.place("p", &pod(&[vgpu(1, 1000, 25), vgpu(1, 2000, 25)])).unwrap();
    let used = world.ledger.cluster().node_capacity(NodeIndex(0)).gpus[0].used;
    assert_eq!((used.memory >> 20, used.cores, used.shares), (3000, 50_000, 2));
    world.delete("p");
    assert_eq!(world.ledger.cluster().node_capacity(NodeIndex(0)).gpus[0].used, Default::default());
}

/// Running containers add up, init containers run before them: the larger of the two is charged.
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
        let mut world = world(Policy::Binpack, &[16384]);
        world.place("p", &ask).unwrap();
        world.ledger.cluster().node_capacity(NodeIndex(0)).gpus[0].used.memory >> 20
    };
    assert_eq!(charged(&[], &[1, 3]), 4);
    assert_eq!(charged(&[1, 3], &[2]), 3);
}

/// One pod is counted once however often it is seen, and given back once.
#[test]
fn c50_accounting() {
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
