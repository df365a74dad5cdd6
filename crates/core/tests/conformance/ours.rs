//! Cases of our own: what once went wrong, and must not again.

use crate::world::*;
use partage_core::ledger::{Ledger, LedgerTime, ReserveError};
use partage_core::model::*;
use partage_core::place::{HostUsage, NodeIndex, PolicyEngine};

fn whole_gpus(count: u32) -> WantedGpus {
    WantedGpus { count, part: whole(MemoryAsk::All) }
}

fn grant(node: &str, gpu: &str, mib: u64) -> PodGrant {
    let share =
        Share { gpu: gpu.into(), memory_bytes: Bytes::mib(mib), cores: None, ceiling: None, whole: false };
    PodGrant {
        node: node.into(),
        grants: vec![Grant { container: "c".into(), init: false, shares: vec![share] }],
    }
}

/// In a hybrid cube mesh every GPU reaches every other over NVLink, but not directly.
#[test]
fn the_best_set_is_linked_directly() {
    let mut dgx = node("dgx", &[16384; 8]);
    dgx.links = Some(Links::from_fn(8, |a, b| {
        let (low, high) = (a.min(b), a.max(b));
        let direct = low / 4 == high / 4 || high == low + 4;
        if direct { Link::NvLink } else { Link::System }
    }));
    let mut world = World::new(Policy::Topology, [dgx]);
    for busy in [1, 2, 3, 4] {
        world.occupy(busy, whole_gpus(1));
    }
    assert_eq!(world.would(whole_gpus(2)), [5, 6]);
}

#[test]
fn spread_takes_the_emptiest_of_several() {
    let mut world = World::new(Policy::Spread, [node("n", &[1000; 4])]);
    world.occupy(0, memory(1, 500));
    world.occupy(1, memory(1, 500));
    assert_eq!(world.would(memory(2, 100)), [2, 3]);
}

/// Whole GPUs first would take the large cards that the second container needs.
#[test]
fn large_cards_are_left_to_who_needs_them() {
    let mut mib = vec![80 * 1024; 8];
    mib.extend([40 * 1024; 8]);
    let ask = pod(&[whole_gpus(8), memory(8, 80 * 1024)]);
    for policy in Policy::ALL {
        let mut ledger = Ledger::new([node("n", &mib)]);
        assert!(best(&mut ledger, &ask, policy).is_some(), "{policy}");
    }
}

/// A share without a promise of compute needs something to run on, whichever comes first.
#[test]
fn uncounted_cores_do_not_depend_on_order() {
    let all = WantedGpus {
        count: 1,
        part: ShareAsk {
            memory: MemoryAsk::Exactly(Bytes(1 << 20)),
            cores: CoresAsk::Exactly(Cores::WHOLE),
            whole: false,
            ceiling: None,
        },
    };
    let mut world = World::new(Policy::Binpack, [node("n", &[1000])]);
    assert_eq!(world.place("a", &pod(&[all, memory(1, 1)])), None);
    assert_eq!(world.place("b", &pod(&[memory(1, 1), all])), None);
}

#[test]
fn a_gpu_moved_to_another_node_is_charged_there() {
    let mut ledger = Ledger::new([node("a", &[16]), node("b", &[])]);
    let mut moved = node("b", &[]);
    moved.gpus = node("a", &[16]).gpus;
    ledger.set_node(moved);
    ledger.set_node(node("a", &[]));
    ledger.confirm(id("p"), grant("b", "GPU-a-0", 16), HostUsage::default());
    assert!(best(&mut ledger, &pod(&[memory(1, 1)]), Policy::Binpack).is_none());
    assert_eq!(ledger.audit(), []);
}

#[test]
fn a_decision_from_before_a_node_changed_is_refused() {
    let mut ledger = Ledger::new([node("n", &[16, 16])]);
    let ask = pod(&[whole_gpus(2)]);
    let decision = best(&mut ledger, &ask, Policy::Binpack).unwrap();
    ledger.set_node(node("n", &[16]));
    assert!(matches!(
        ledger.reserve(id("p"), &ask, &decision, LedgerTime(1)),
        Err(ReserveError::NodeChanged { .. })
    ));
}

#[test]
fn a_removed_node_takes_nothing_and_its_index_is_used_again() {
    let mut ledger = Ledger::new([node("a", &[16]), node("b", &[16])]);
    ledger.remove_node(&"a".into());
    let none = PodAsk { cpu: MilliCpu(1), ..PodAsk::default() };
    let decision = best(&mut ledger, &none, Policy::Binpack).unwrap();
    assert_eq!(decision.node, NodeIndex(1));
    assert_eq!(ledger.set_node(node("c", &[16])), NodeIndex(0));
    assert_eq!(ledger.cluster().nodes().count(), 2);
}

#[test]
fn a_claim_beyond_all_bounds_is_given_back_exactly() {
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

/// Two policies that learned different things look at one cluster.
#[test]
fn placers_do_not_take_each_others_ranks() {
    let mut ledger = Ledger::new([node("a", &[16, 16]), node("b", &[16, 16])]);
    let ask = pod(&[memory(1, 4)]);
    let (mut one, other) =
        (PolicyEngine::new(Policy::Fragmentation), PolicyEngine::new(Policy::Fragmentation));
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

/// Claims larger than sixteen TiB are as real as smaller ones where the card is.
#[test]
fn the_largest_cards_are_counted_to_the_byte() {
    let tib = 1u64 << 20;
    let mut ledger = Ledger::new([node("n", &[64 * tib])]);
    ledger.confirm(id("a"), grant("n", "GPU-n-0", 40 * tib), HostUsage::default());
    ledger.confirm(id("b"), grant("n", "GPU-n-0", 20 * tib), HostUsage::default());
    assert!(best(&mut ledger, &pod(&[memory(1, 5 * tib)]), Policy::Binpack).is_none());
    assert!(best(&mut ledger, &pod(&[memory(1, 4 * tib)]), Policy::Binpack).is_some());
    ledger.confirm(id("c"), grant("n", "GPU-n-0", 40 * tib), HostUsage::default());
    assert_eq!(ledger.audit().len(), 1);
}

/// Slots come from several GPUs, and from no more than a container can have.
#[test]
fn slots_come_from_at_most_sixteen_gpus() {
    let slots = |slots: u32| {
        let part = ShareAsk {
            memory: MemoryAsk::Unlimited,
            cores: CoresAsk::Slots(slots),
            whole: false,
            ceiling: None,
        };
        WantedGpus { count: 1, part }
    };
    let mut world = World::new(Policy::Binpack, [node("n", &[16; 20])]);
    assert_eq!(world.would(slots(161)), NOWHERE);
    assert_eq!(world.would(slots(160)).len(), 16);
}
