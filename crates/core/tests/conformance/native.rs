//! Partage's own cases: regression tests.

use crate::test_cluster::*;
use partage_core::ledger::{Ledger, LedgerTime, ReserveError};
use partage_core::model::*;
use partage_core::place::{HostUsage, NodeIndex, PolicyEngine};

fn whole_gpus(count: u32) -> WantedGpus {
    WantedGpus { count, share: whole(MemoryAsk::All) }
}

fn grant(node: &str, gpu: &str, mib: u64) -> PodGrant {
    let share =
        Share { gpu: gpu.into(), memory_bytes: Bytes::mib(mib), cores: None, ceiling: None, whole: false };
    PodGrant {
        node: node.into(),
        grants: vec![Grant { container: "c".into(), init: false, shares: vec![share] }],
    }
}

/// In a hybrid cube mesh, some GPUs reach each other over NVLink only through other GPUs.
#[test]
fn best_set_has_direct_links() {
    let mut dgx = node("dgx", &[16384; 8]);
    dgx.links = Some(LinkMatrix::from_fn(8, |a, b| {
        let (low, high) = (a.min(b), a.max(b));
        let direct = low / 4 == high / 4 || high == low + 4;
        if direct { GpuLink::NvLink } else { GpuLink::System }
    }));
    let mut cluster = TestCluster::new(PlacementPolicy::Topology, [dgx]);
    for busy in [1, 2, 3, 4] {
        cluster.occupy(busy, whole_gpus(1));
    }
    assert_eq!(cluster.preview(whole_gpus(2)), [5, 6]);
}

#[test]
fn spread_takes_the_emptiest_gpus() {
    let mut cluster = TestCluster::new(PlacementPolicy::Spread, [node("n", &[1000; 4])]);
    cluster.occupy(0, memory(1, 500));
    cluster.occupy(1, memory(1, 500));
    assert_eq!(cluster.preview(memory(2, 100)), [2, 3]);
}

/// If whole GPUs were placed first, they would take the large GPUs that the second container needs.
#[test]
fn large_gpus_are_left_for_large_requests() {
    let mut mib = vec![80 * 1024; 8];
    mib.extend([40 * 1024; 8]);
    let ask = pod(&[whole_gpus(8), memory(8, 80 * 1024)]);
    for policy in PlacementPolicy::ALL {
        let mut ledger = Ledger::new([node("n", &mib)]);
        assert!(best(&mut ledger, &ask, policy).is_some(), "{policy}");
    }
}

/// A share without guaranteed compute needs some compute left, in any order of arrival.
#[test]
fn uncounted_cores_do_not_depend_on_order() {
    let all = WantedGpus {
        count: 1,
        share: ShareAsk {
            memory: MemoryAsk::Exactly(Bytes(1 << 20)),
            cores: CoresAsk::Exactly(Cores::WHOLE),
            whole: false,
            ceiling: None,
        },
    };
    let mut cluster = TestCluster::new(PlacementPolicy::Binpack, [node("n", &[1000])]);
    assert_eq!(cluster.place("a", &pod(&[all, memory(1, 1)])), None);
    assert_eq!(cluster.place("b", &pod(&[memory(1, 1), all])), None);
}

#[test]
fn moved_gpu_is_counted_on_its_new_node() {
    let mut ledger = Ledger::new([node("a", &[16]), node("b", &[])]);
    let mut moved = node("b", &[]);
    moved.gpus = node("a", &[16]).gpus;
    ledger.set_node(moved);
    ledger.set_node(node("a", &[]));
    ledger.confirm(id("p"), grant("b", "GPU-a-0", 16), HostUsage::default());
    assert!(best(&mut ledger, &pod(&[memory(1, 1)]), PlacementPolicy::Binpack).is_none());
    assert_eq!(ledger.audit(), []);
}

#[test]
fn decision_from_before_a_node_change_is_refused() {
    let mut ledger = Ledger::new([node("n", &[16, 16])]);
    let ask = pod(&[whole_gpus(2)]);
    let decision = best(&mut ledger, &ask, PlacementPolicy::Binpack).unwrap();
    ledger.set_node(node("n", &[16]));
    assert!(matches!(
        ledger.reserve(id("p"), &ask, &decision, LedgerTime(1)),
        Err(ReserveError::NodeChanged { .. })
    ));
}

#[test]
fn removed_node_is_not_used_and_its_index_is_reused() {
    let mut ledger = Ledger::new([node("a", &[16]), node("b", &[16])]);
    ledger.remove_node(&"a".into());
    let none = PodAsk { cpu: MilliCpu(1), ..PodAsk::default() };
    let decision = best(&mut ledger, &none, PlacementPolicy::Binpack).unwrap();
    assert_eq!(decision.node, NodeIndex(1));
    assert_eq!(ledger.set_node(node("c", &[16])), NodeIndex(0));
    assert_eq!(ledger.cluster().nodes().count(), 2);
}

#[test]
fn excessive_claim_is_released_exactly() {
    let mut ledger = Ledger::new([node("n", &[16])]);
    let absurd = HostUsage::new(MilliCpu(u64::MAX), Bytes(u64::MAX));
    let mut huge = grant("n", "GPU-n-0", 1);
    huge.grants[0].shares[0].memory_bytes = Some(Bytes(u64::MAX));
    ledger.confirm(id("huge"), huge, absurd);
    ledger.confirm(id("small"), grant("n", "GPU-n-0", 16), HostUsage::new(MilliCpu(5), Bytes(7)));
    ledger.release(&id("huge").uid);
    let capacity = ledger.cluster().node_capacity(NodeIndex(0));
    assert_eq!(capacity.gpus[0].used.memory >> 20, 16);
    assert_eq!(capacity.host_used, HostUsage::new(MilliCpu(5), Bytes(7)));
}

/// Two policies with different learned demand use one cluster.
#[test]
fn policies_do_not_share_cached_ranks() {
    let mut ledger = Ledger::new([node("a", &[16, 16]), node("b", &[16, 16])]);
    let ask = pod(&[memory(1, 4)]);
    let (mut one, other) = (
        PolicyEngine::new(PlacementPolicy::Fragmentation),
        PolicyEngine::new(PlacementPolicy::Fragmentation),
    );
    for _ in 0..60 {
        one.arrived(&pod(&[memory(1, 9)]), ledger.cluster());
    }
    let alone = |placer: &PolicyEngine| {
        let mut fresh = Ledger::new([node("a", &[16, 16]), node("b", &[16, 16])]);
        fresh.best(placer, &ask).map(|decision| decision.rank)
    };
    for placer in [&one, &other, &one] {
        assert_eq!(ledger.best(placer, &ask).map(|d| d.rank), alone(placer));
    }
}

/// Claims of more than 16 TiB are counted exactly if the GPU is as large.
#[test]
fn memory_of_the_largest_gpus_is_exact() {
    let tib = 1u64 << 20;
    let mut ledger = Ledger::new([node("n", &[64 * tib])]);
    ledger.confirm(id("a"), grant("n", "GPU-n-0", 40 * tib), HostUsage::default());
    ledger.confirm(id("b"), grant("n", "GPU-n-0", 20 * tib), HostUsage::default());
    assert!(best(&mut ledger, &pod(&[memory(1, 5 * tib)]), PlacementPolicy::Binpack).is_none());
    assert!(best(&mut ledger, &pod(&[memory(1, 4 * tib)]), PlacementPolicy::Binpack).is_some());
    ledger.confirm(id("c"), grant("n", "GPU-n-0", 40 * tib), HostUsage::default());
    assert_eq!(ledger.audit().len(), 1);
}

/// Slots come from several GPUs, up to the maximum per container.
#[test]
fn slots_come_from_at_most_sixteen_gpus() {
    let slots = |slots: u32| {
        let share = ShareAsk {
            memory: MemoryAsk::Unlimited,
            cores: CoresAsk::Slots(slots),
            whole: false,
            ceiling: None,
        };
        WantedGpus { count: 1, share }
    };
    let mut cluster = TestCluster::new(PlacementPolicy::Binpack, [node("n", &[16; 20])]);
    assert_eq!(cluster.preview(slots(161)), NOWHERE);
    assert_eq!(cluster.preview(slots(160)).len(), 16);
}
