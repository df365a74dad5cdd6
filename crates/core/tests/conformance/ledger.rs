//! Ledger cases: restarts, repeated calls and races.

use crate::test_cluster::*;
use partage_core::ledger::{Ledger, LedgerFinding, LedgerTime, OverCommitment, ReserveError};
use partage_core::model::*;
use partage_core::place::HostUsage;
use partage_core::place::NodeIndex;

fn share(gpu: &str, mib: u64) -> Share {
    Share { gpu: gpu.into(), memory_bytes: Bytes::mib(mib), cores: None, ceiling: None, whole: false }
}

fn grant(node: &str, shares: Vec<Share>) -> PodGrant {
    PodGrant { node: node.into(), grants: vec![Grant { container: "c".into(), init: false, shares }] }
}

#[test]
fn a2_second_reservation_is_refused() {
    let mut ledger = Ledger::new([s6(1024)]);
    let ask = pod(&[vcuda(600, 0)]);
    let decision = best(&mut ledger, &ask, PlacementPolicy::Topology).unwrap();
    let first = ledger.reserve(id("p"), &ask, &decision, LedgerTime(1)).unwrap();
    let again = ledger.reserve(id("p"), &ask, &decision, LedgerTime(1)).unwrap();
    assert_eq!(first, again);
    assert!(ledger.cluster().node_capacity(NodeIndex(0)).gpus.iter().all(|gpu| gpu.used.shares == 1));
}

/// Of a pending, a failed and a terminated pod, only the first holds a grant, before and after a restart.
#[test]
fn a4_recovery_counts_only_active_pods() {
    let mut ledger = Ledger::new([s6(1024)]);
    for (name, gpu) in [("pending", "GPU-s6-0"), ("failed", "GPU-s6-1"), ("terminated", "GPU-s6-2")] {
        ledger.confirm(id(name), grant("s6", vec![share(gpu, 256)]), HostUsage::default());
    }
    let free = |ledger: &Ledger| -> Vec<usize> {
        let gpus = &ledger.cluster().node_capacity(NodeIndex(0)).gpus;
        (0..gpus.len()).filter(|&gpu| gpus[gpu].is_free()).collect()
    };
    assert_eq!(free(&ledger), [3, 4, 5]);
    ledger.release(&id("failed").uid);
    ledger.release(&id("terminated").uid);
    assert_eq!(free(&ledger), [1, 2, 3, 4, 5]);
    let held: Vec<_> = ledger.all_held().map(|h| (h.pod.clone(), h.grant.clone(), h.host)).collect();
    assert_eq!(free(&Ledger::rebuild([s6(1024)], held)), [1, 2, 3, 4, 5]);
}

#[test]
fn b17_one_of_two_binds_gets_the_last_units() {
    let mut ledger = Ledger::new([node("n", &[8])]);
    let ask = pod(&[memory(1, 8)]);
    let decision = best(&mut ledger, &ask, PlacementPolicy::Binpack).unwrap();
    ledger.reserve(id("first"), &ask, &decision, LedgerTime(1)).unwrap();
    let refused = ledger.reserve(id("second"), &ask, &decision, LedgerTime(1)).unwrap_err();
    assert!(matches!(&refused, ReserveError::CapacityTaken { .. }));
    assert!(refused.to_string().contains("default/second"), "{refused}");
}

/// More usage than the total leaves nothing free: the subtraction does not wrap around.
#[test]
fn b19_over_commit_never_underflows() {
    let held = [
        (id("a"), grant("n", vec![share("GPU-n-0", 12)]), HostUsage::default()),
        (id("b"), grant("n", vec![share("GPU-n-0", 12)]), HostUsage::default()),
    ];
    let mut ledger = Ledger::rebuild([node("n", &[16])], held);
    let findings = ledger.audit();
    assert!(
        matches!(&findings[..], [LedgerFinding::OverCommitted { what: OverCommitment::Memory { .. }, pods, .. }] if pods.len() == 2),
        "{findings:?}"
    );
    assert_eq!(
        findings[0].to_string(),
        "n/GPU-n-0 is overcommitted: 24 MiB granted of 16 MiB (pods: default/a, default/b)"
    );
    assert!(best(&mut ledger, &pod(&[memory(1, 1)]), PlacementPolicy::Binpack).is_none());
    ledger.release(&id("b").uid);
    assert_eq!(ledger.audit(), []);
    assert_eq!(ledger.cluster().node_capacity(NodeIndex(0)).gpus[0].used.memory >> 20, 12);
}

#[test]
fn b23_restart_counts_grants_of_pods() {
    let held = [
        (id("running"), grant("n1", vec![share("GPU-n1-0", 6)]), HostUsage::default()),
        (id("pending"), grant("n1", vec![share("GPU-n1-1", 2)]), HostUsage::default()),
    ];
    let ledger = Ledger::rebuild([node("n1", &[16, 16])], held);
    let used: Vec<u64> =
        ledger.cluster().node_capacity(NodeIndex(0)).gpus.iter().map(|gpu| gpu.used.memory >> 20).collect();
    assert_eq!(used, [6, 2]);
}

/// Pods are identified by UID: the successor of a force-deleted pod is another pod.
#[test]
fn b25_same_name_with_another_uid_does_not_leak() {
    let mut ledger = Ledger::new([node("n", &[16])]);
    let successor = PodId { uid: "uid-2".into(), ..id("p") };
    ledger.confirm(id("p"), grant("n", vec![share("GPU-n-0", 6)]), HostUsage::default());
    ledger.confirm(successor.clone(), grant("n", vec![share("GPU-n-0", 6)]), HostUsage::default());
    ledger.release(&id("p").uid);
    ledger.release(&id("p").uid);
    assert_eq!(ledger.cluster().node_capacity(NodeIndex(0)).gpus[0].used.memory >> 20, 6);
    ledger.release(&successor.uid);
    assert!(ledger.cluster().node_capacity(NodeIndex(0)).gpus[0].is_free());
}

#[test]
fn b26_new_gpus_are_used_without_a_restart() {
    let mut ledger = Ledger::new([node("n", &[16])]);
    ledger.confirm(id("p"), grant("n", vec![share("GPU-n-0", 16)]), HostUsage::default());
    ledger.set_node(node("n", &[16, 16]));
    let gpus: Vec<bool> =
        ledger.cluster().node_capacity(NodeIndex(0)).gpus.iter().map(|gpu| gpu.is_free()).collect();
    assert_eq!(gpus, [false, true]);
}

#[test]
fn d10_unconfirmed_reservation_expires() {
    let mut cluster = TestCluster::new(PlacementPolicy::Binpack, [node("n", &[8])]);
    assert_eq!(cluster.gpus("stale", memory(1, 8)), [0]);
    assert!(cluster.ledger.expire(LedgerTime(59_999)).is_empty());
    assert_eq!(cluster.ledger.expire(LedgerTime(60_000)).len(), 1);
    assert_eq!(cluster.gpus("next", memory(1, 8)), [0]);
}

#[test]
fn grants_are_counted_when_their_node_appears() {
    let mut ledger = Ledger::new([]);
    ledger.confirm(
        id("p"),
        grant("n", vec![share("GPU-n-0", 6), share("GPU-gone", 1)]),
        HostUsage::default(),
    );
    assert_eq!(ledger.audit()[0].to_string(), "pod default/p holds shares on node n, which is unknown");
    ledger.set_node(node("n", &[16]));
    assert_eq!(ledger.cluster().node_capacity(NodeIndex(0)).gpus[0].used.memory >> 20, 6);
    assert_eq!(
        ledger.audit()[0].to_string(),
        "pod default/p holds a share of GPU-gone, which node n does not have"
    );
}
