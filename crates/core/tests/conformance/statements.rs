//! Examples of statements and refusals. The property tests cover combinations.

use crate::test_cluster::*;
use partage_core::ledger::{
    GrantConflict, GrantStage, Ledger, LedgerTime, ReplaceError, ReserveError, StaleCheckpoint,
};
use partage_core::model::*;
use partage_core::place::{HostUsage, NodeIndex, PolicyEngine};

const MIB: u64 = 1 << 20;

fn share(gpu: &str) -> Share {
    Share { gpu: gpu.into(), memory_bytes: None, cores: None, ceiling: None, whole: false }
}

fn limited(gpu: &str, mib: u64) -> Share {
    Share { memory_bytes: Bytes::mib(mib), ..share(gpu) }
}

fn grant(shares: &[Share]) -> PodGrant {
    let grants = vec![Grant { container: "main".into(), init: false, shares: shares.to_vec() }];
    PodGrant { node: "n".into(), grants }
}

/// A ledger of one node with two GPUs of 16 MiB each; the first has 10 MiB and 70 % in use.
fn ledger() -> Ledger {
    let mut node = node("n", &[16, 16]);
    node.max_shares_per_gpu = Some(2);
    node.cpu_milli = Some(MilliCpu(4000));
    node.memory_bytes = Bytes::mib(100);
    let held = Share { cores: Cores::percent(70), ..limited("GPU-n-0", 10) };
    let mut ledger = Ledger::new([node]);
    ledger.confirm(id("other"), grant(&[held]), HostUsage::new(MilliCpu(1000), Bytes(60 * MIB)));
    ledger
}

fn refused(ledger: &mut Ledger, grant: PodGrant, host: HostUsage) -> Vec<GrantConflict> {
    let before = ledger.snapshot();
    let refused = ledger.try_confirm(id("new"), grant, host).unwrap_err();
    assert!(ledger.held(&id("new").uid).is_none());
    assert!(before.cluster() == ledger.cluster(), "a refusal changes nothing");
    assert_eq!(refused.to_string(), refused.conflicts[0].to_string());
    refused.conflicts
}

#[test]
fn refusal_names_gpu_requested_and_free() {
    let none = HostUsage::default();
    let mut ledger = ledger();
    let gpu = || GpuUuid::from("GPU-n-0");
    let too_much_memory = refused(&mut ledger, grant(&[limited("GPU-n-0", 7)]), none);
    assert_eq!(
        too_much_memory,
        [GrantConflict::Memory { gpu: gpu(), requested: Bytes(7 * MIB), free: Bytes(6 * MIB) }]
    );
    assert_eq!(
        too_much_memory[0].to_string(),
        "GPU GPU-n-0 has 6 MiB of memory free for this pod, 7 MiB requested"
    );
    let cores = Share { cores: Cores::percent(31), ..limited("GPU-n-0", 1) };
    let too_much_compute = refused(&mut ledger, grant(&[cores]), none);
    assert_eq!(too_much_compute, [GrantConflict::Cores { gpu: gpu(), requested: 31_000, free: 30_000 }]);
    assert_eq!(
        too_much_compute[0].to_string(),
        "GPU GPU-n-0 has 30 % of its compute free for this pod, 31 % requested"
    );
    let whole = Share { whole: true, ..share("GPU-n-0") };
    assert_eq!(
        refused(&mut ledger, grant(&[whole]), none),
        [GrantConflict::Whole { gpu: gpu(), requested: 1, others: 1 }]
    );
    assert_eq!(
        refused(&mut ledger, grant(&[share("GPU-n-0")]), none),
        [GrantConflict::MixedLimits { gpu: gpu() }]
    );
    let mut two = grant(&[limited("GPU-n-0", 1)]);
    two.grants.push(Grant { container: "second".into(), ..two.grants[0].clone() });
    assert_eq!(
        refused(&mut ledger, two, none),
        [GrantConflict::Shares { gpu: gpu(), requested: 2, free: 1, max: 2 }]
    );
    assert!(refused(&mut ledger, grant(&[limited("GPU-n-1", 17)]), none).contains(
        &GrantConflict::LargerThanCard {
            gpu: "GPU-n-1".into(),
            requested: Bytes(17 * MIB),
            card: Bytes(16 * MIB)
        }
    ));
    assert_eq!(
        refused(&mut ledger, grant(&[limited("GPU-n-7", 1)]), none),
        [GrantConflict::UnknownGpu { node: "n".into(), gpu: "GPU-n-7".into() }]
    );
    let elsewhere = PodGrant { node: "elsewhere".into(), ..grant(&[limited("GPU-n-0", 1)]) };
    assert_eq!(
        refused(&mut ledger, elsewhere, none),
        [GrantConflict::UnknownNode { node: "elsewhere".into() }]
    );
    assert_eq!(
        refused(
            &mut ledger,
            grant(&[limited("GPU-n-1", 1)]),
            HostUsage::new(MilliCpu(3001), Bytes(41 * MIB))
        ),
        [
            GrantConflict::HostCpu { node: "n".into(), requested: MilliCpu(3001), free: MilliCpu(3000) },
            GrantConflict::HostMemory { node: "n".into(), requested: Bytes(41 * MIB), free: Bytes(40 * MIB) },
        ]
    );
    let fits = Share { cores: Cores::percent(30), ..limited("GPU-n-0", 6) };
    let host = HostUsage::new(MilliCpu(3000), Bytes(40 * MIB));
    assert_eq!(ledger.try_confirm(id("new"), grant(&[fits]), host), Ok(None));
}

/// The grant of a running pod is always counted. If it overcommits a GPU, nothing more is granted there.
#[test]
fn confirmed_facts_are_not_refused_and_block_an_over_committed_gpu() {
    let mut ledger = ledger();
    ledger.confirm(id("huge"), grant(&[limited("GPU-n-1", 17)]), HostUsage::default());
    assert_eq!(ledger.audit().len(), 2, "more than allocatable, and larger than the card");
    assert!(
        refused(&mut ledger, grant(&[limited("GPU-n-1", 1)]), HostUsage::default())
            .contains(&GrantConflict::OversizedNeighbor { gpu: "GPU-n-1".into(), card: Bytes(16 * MIB) })
    );
    // Confirming the same grant again is not checked.
    let again = ledger.try_confirm(id("huge"), grant(&[limited("GPU-n-1", 17)]), HostUsage::default());
    assert_eq!(again, Ok(None));
    ledger.release(&id("huge").uid);
    assert_eq!(ledger.audit(), []);
}

#[test]
fn replacement_is_checked_without_the_old_grant() {
    let mut ledger = ledger();
    let uid = id("other").uid;
    let mut statement = ledger.statement();
    let larger = Share { cores: Cores::percent(100), ..limited("GPU-n-0", 16) };
    let old = statement.replace(&uid, grant(std::slice::from_ref(&larger))).unwrap();
    assert_eq!(old.grants[0].shares[0].memory_bytes, Bytes::mib(10));
    assert_eq!(
        statement.replace(&uid, grant(&[limited("GPU-n-0", 17)])).unwrap_err().to_string(),
        "GPU GPU-n-0 has 16 MiB of memory free for this pod, 17 MiB requested"
    );
    let unknown = statement.replace(&"uid-unknown".into(), grant(&[larger])).unwrap_err();
    assert_eq!(unknown, ReplaceError::NotHeld { uid: "uid-unknown".into() });
    statement.commit();
    assert_eq!(ledger.cluster().node_capacity(NodeIndex(0)).gpus[0].used.memory, 16 * MIB);
    let held = ledger.held(&uid).unwrap();
    assert_eq!((held.stage, held.host.cpu()), (GrantStage::Confirmed, MilliCpu(1000)));
}

#[test]
fn checkpoint_that_was_rolled_back_is_stale() {
    let mut ledger = ledger();
    let mut statement = ledger.statement();
    let start = statement.checkpoint();
    let confirm = |statement: &mut partage_core::ledger::Statement<'_>, name: &str| {
        statement.confirm(id(name), grant(&[limited("GPU-n-1", 1)]), HostUsage::default());
    };
    confirm(&mut statement, "a");
    let inner = statement.checkpoint();
    confirm(&mut statement, "b");
    statement.rollback_to(inner).unwrap();
    statement.rollback_to(inner).unwrap();
    statement.rollback_to(start).unwrap();
    assert_eq!(statement.rollback_to(inner), Err(StaleCheckpoint));
    // The number of changes is the same as before, but the changes differ.
    confirm(&mut statement, "c");
    assert_eq!(statement.rollback_to(inner), Err(StaleCheckpoint));
    statement.commit();
    let mut another = ledger.statement();
    assert_eq!(another.rollback_to(start), Err(StaleCheckpoint));
    drop(another);
    assert!(ledger.held(&id("c").uid).is_some());
}

#[test]
fn placement_that_fits_nowhere_changes_nothing() {
    let mut ledger = ledger();
    let before = ledger.snapshot();
    let policies = PolicyEngine::new(PlacementPolicy::Binpack);
    let mut statement = ledger.statement();
    statement.place(id("a"), &pod(&[memory(1, 16)]), &policies, LedgerTime(1)).unwrap();
    let full = statement.place(id("b"), &pod(&[memory(1, 16)]), &policies, LedgerTime(1)).unwrap_err();
    assert_eq!(full, ReserveError::NoCapacity { namespace: "default".into(), name: "b".into() });
    let held = statement.place(id("a"), &pod(&[memory(1, 1)]), &policies, LedgerTime(1)).unwrap_err();
    assert!(matches!(held, ReserveError::AlreadyHeld { .. }), "{held}");
    drop(statement);
    assert!(before.cluster() == ledger.cluster());
}
