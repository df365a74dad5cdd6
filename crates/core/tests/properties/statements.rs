//! Statements: a rollback restores the exact state, a commit keeps the exact changes, and nothing is overcommitted.

use crate::strategies::*;
use partage_core::ledger::{Ledger, LedgerFinding, LedgerTime, Statement};
use partage_core::model::*;
use partage_core::place::{HostUsage, PolicyEngine};
use proptest::collection::vec;
use proptest::prelude::*;
use std::panic::{AssertUnwindSafe, catch_unwind};

/// One operation of a statement, on one of a few pods.
#[derive(Clone, Debug)]
enum Operation {
    Place(usize, PodAsk),
    TryConfirm(usize, PodGrant, HostUsage),
    /// Confirms a grant without checks, which may overcommit.
    Confirm(usize, PodGrant, HostUsage),
    Release(usize),
    Replace(usize, PodGrant),
}

fn operations() -> impl Strategy<Value = Operation> {
    let pod = 0usize..6;
    let host = (0u64..40_000).prop_map(|cpu| HostUsage::new(MilliCpu(cpu), Bytes::ZERO));
    prop_oneof![
        4 => (pod.clone(), asks()).prop_map(|(pod, ask)| Operation::Place(pod, ask)),
        4 => (pod.clone(), grants(), host.clone()).prop_map(|(pod, grant, host)| Operation::TryConfirm(pod, grant, host)),
        1 => (pod.clone(), grants(), host).prop_map(|(pod, grant, host)| Operation::Confirm(pod, grant, host)),
        2 => pod.clone().prop_map(Operation::Release),
        2 => (pod, grants()).prop_map(|(pod, grant)| Operation::Replace(pod, grant)),
    ]
}

fn apply(statement: &mut Statement<'_>, operation: &Operation) {
    match operation.clone() {
        Operation::Place(pod, ask) => {
            let policies = PolicyEngine::new(PlacementPolicy::Binpack);
            let _ = statement.place(id(pod), &ask, &policies, LedgerTime(10));
        }
        Operation::TryConfirm(pod, grant, host) => drop(statement.try_confirm(id(pod), grant, host)),
        Operation::Confirm(pod, grant, host) => drop(statement.confirm(id(pod), grant, host)),
        Operation::Release(pod) => drop(statement.release(&id(pod).uid)),
        Operation::Replace(pod, grant) => drop(statement.replace(&id(pod).uid, grant)),
    }
}

/// A grant that a pod claims after a restart. The ledger records several claims for one pod as a contradiction.
type ClaimedGrant = (usize, PodGrant);

fn claims() -> impl Strategy<Value = Vec<ClaimedGrant>> {
    vec((0usize..6, grants()), 0..4)
}

/// A ledger rebuilt from these claims, to which these operations were then applied one by one.
fn ledger_after<'a>(
    nodes: &[Node],
    claims: &[ClaimedGrant],
    operations: impl IntoIterator<Item = &'a Operation>,
) -> Ledger {
    let claims = claims.iter().map(|(pod, grant)| (id(*pod), grant.clone(), HostUsage::default()));
    let mut ledger = Ledger::rebuild(nodes.to_vec(), claims);
    for operation in operations {
        let mut statement = ledger.statement();
        apply(&mut statement, operation);
        statement.commit();
    }
    ledger
}

/// How a statement ends without a commit.
#[derive(Clone, Copy, Debug)]
enum RollbackKind {
    Drop,
    Rollback,
    RollbackToStart,
}

proptest! {
    #![proptest_config(ProptestConfig { failure_persistence: None, ..ProptestConfig::default() })]

    #[test]
    fn statement_that_is_not_committed_restores_the_ledger(
        nodes in nodes(),
        claims in claims(),
        before in vec(operations(), 0..10),
        within in vec(operations(), 0..10),
        probe in asks(),
        ending in prop::sample::select(vec![RollbackKind::Drop, RollbackKind::Rollback, RollbackKind::RollbackToStart]),
        policy in policies(),
    ) {
        let mut ledger = ledger_after(&nodes, &claims, &before);
        let unchanged = ledger_after(&nodes, &claims, &before);
        let policies = trained_policy(policy, &probe, ledger.cluster());
        let decision = ledger.best(&policies, &probe);
        let mut statement = ledger.statement();
        let start = statement.checkpoint();
        for operation in &within {
            apply(&mut statement, operation);
            // Fill the rank cache with ranks of a state that is rolled back.
            statement.best(&policies, &probe);
        }
        match ending {
            RollbackKind::Drop => drop(statement),
            RollbackKind::Rollback => statement.rollback(),
            RollbackKind::RollbackToStart => {
                statement.rollback_to(start).unwrap();
                statement.commit();
            }
        }
        prop_assert!(ledger == unchanged);
        prop_assert_eq!(ledger.audit(), unchanged.audit());
        prop_assert_eq!(ledger.best(&policies, &probe), decision.clone());
        // A decision from before the statement is still valid.
        if let Some(decision) = decision {
            ledger.reserve(id(99), &probe, &decision, LedgerTime(10)).unwrap();
        }
    }

    /// With checkpoints at random points and rollbacks in random order, exactly the remaining changes are committed.
    #[test]
    fn nested_checkpoints_keep_exactly_what_came_before_them(
        nodes in nodes(),
        claims in claims(),
        steps in vec((operations(), prop::bool::weighted(0.4), prop::option::weighted(0.3, any::<prop::sample::Index>())), 1..20),
    ) {
        let mut ledger = ledger_after(&nodes, &claims, []);
        let mut statement = ledger.statement();
        let mut kept: Vec<&Operation> = Vec::new();
        let mut checkpoints = vec![(statement.checkpoint(), 0)];
        for (operation, mark, back) in &steps {
            if *mark {
                checkpoints.push((statement.checkpoint(), kept.len()));
            }
            apply(&mut statement, operation);
            kept.push(operation);
            if let Some(back) = back {
                let at = back.index(checkpoints.len());
                let stale = checkpoints.split_off(at + 1);
                let (checkpoint, operations) = checkpoints[at];
                statement.rollback_to(checkpoint).unwrap();
                kept.truncate(operations);
                let changed_since = |(_, later): &(_, usize)| *later > operations;
                for (checkpoint, _) in stale.iter().filter(|later| changed_since(later)) {
                    // The checkpoint is stale unless nothing was recorded in between.
                    let before = statement.checkpoint();
                    if statement.rollback_to(*checkpoint).is_ok() {
                        prop_assert_eq!(statement.checkpoint(), before);
                    }
                }
            }
        }
        statement.commit();
        prop_assert!(ledger == ledger_after(&nodes, &claims, kept));
    }

    #[test]
    fn try_confirm_accepts_exactly_what_the_audit_accepts(
        nodes in nodes(),
        facts in vec((0usize..5, grants()), 0..8),
        pod in 0usize..6,
        grant in grants(),
    ) {
        let confirmed = || {
            let mut ledger = Ledger::new(nodes.clone());
            for (pod, grant) in &facts {
                ledger.confirm(id(*pod), grant.clone(), HostUsage::default());
            }
            ledger
        };
        let (mut ledger, mut audited) = (confirmed(), confirmed());
        let held = ledger.held(&id(pod).uid).map(|held| held.grant.clone());
        let answer = ledger.try_confirm(id(pod), grant.clone(), HostUsage::default());
        if held.as_ref() == Some(&grant) {
            prop_assert_eq!(answer, Ok(None));
            return Ok(());
        }
        audited.confirm(id(pod), grant.clone(), HostUsage::default());
        let gpus: Vec<&GpuUuid> = grant.grants.iter().flat_map(|one| &one.shares).map(|share| &share.gpu).collect();
        let concerns = |finding: &LedgerFinding| match finding {
            LedgerFinding::OverCommitted { node, gpu, .. } | LedgerFinding::UnknownGpu { node, gpu, .. } => {
                *node == grant.node && gpus.contains(&gpu)
            }
            LedgerFinding::UnknownNode { node, .. } => *node == grant.node,
            LedgerFinding::SeveralGrants { .. } => false,
        };
        let accepted = !audited.audit().iter().any(concerns);
        prop_assert_eq!(answer.is_ok(), accepted, "{:?}", answer);
        // Computed from the grants alone: no share is larger than its GPU.
        let on_node = audited.all_held().filter(|held| held.grant.node == grant.node);
        let shares: Vec<&Share> = on_node.flat_map(|held| &held.grant.grants).flat_map(|one| &one.shares).collect();
        let is_oversized = |gpu: &Gpu| {
            let of_gpu = shares.iter().filter(|share| share.gpu == gpu.uuid);
            gpus.contains(&&gpu.uuid) && of_gpu.clone().any(|share| share.memory_bytes > Some(gpu.memory_bytes))
        };
        if nodes.iter().filter(|node| node.name == grant.node).flat_map(|node| &node.gpus).any(is_oversized) {
            prop_assert!(answer.is_err());
        }
        match answer {
            Ok(replaced) => {
                prop_assert_eq!(replaced, held);
                prop_assert!(ledger == audited);
            }
            Err(refused) => {
                prop_assert!(!refused.conflicts.is_empty());
                prop_assert!(ledger == confirmed());
            }
        }
    }

    /// Applies statements of placements, external grants, replacements and releases, some committed and some not.
    #[test]
    fn statements_never_over_commit(
        nodes in nodes(),
        statements in vec((vec(operations(), 1..8), any::<bool>()), 1..10),
    ) {
        let mut ledger = Ledger::new(nodes);
        for (operations, commit) in statements {
            let mut statement = ledger.statement();
            for operation in operations.iter().filter(|operation| !matches!(operation, Operation::Confirm(..))) {
                apply(&mut statement, operation);
                check_not_over_committed(statement.ledger())?;
            }
            if commit {
                statement.commit();
            } else {
                drop(statement);
            }
            check_not_over_committed(&ledger)?;
        }
    }
}

fn check_not_over_committed(ledger: &Ledger) -> Result<(), TestCaseError> {
    prop_assert_eq!(ledger.audit(), Vec::<LedgerFinding>::new());
    for (_, capacity) in ledger.cluster().nodes() {
        prop_assert!(capacity.node.cpu_milli.is_none_or(|cpu| capacity.host_used.cpu() <= cpu));
    }
    Ok(())
}

#[test]
fn statement_is_rolled_back_when_a_panic_unwinds() {
    let mut ledger = Ledger::new([Node::new("node-0", Vec::new())]);
    let unwound = catch_unwind(AssertUnwindSafe(|| {
        let mut statement = ledger.statement();
        let policies = PolicyEngine::new(PlacementPolicy::Binpack);
        statement.place(id(0), &PodAsk::default(), &policies, LedgerTime(10)).unwrap();
        panic!("this test panics on purpose");
    }));
    assert!(unwound.is_err());
    assert!(ledger == Ledger::new([Node::new("node-0", Vec::new())]));
}
