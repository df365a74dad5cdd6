//! Statements: changes of a ledger that are committed together or rolled back.

use super::{GrantRefused, GrantStage, HeldGrant, Ledger, LedgerTime, ReserveError};
use crate::model::{NodeName, PodAsk, PodGrant, PodId, PodUid};
use crate::place::cluster_capacity::{SavedNode, unique_version};
use crate::place::{Decision, HostUsage, PolicyEngine};
use std::collections::BTreeSet;

/// Changes of a ledger that take effect together.
///
/// Every operation changes the ledger at once, so later operations of the statement see it. [`Statement::commit`]
/// keeps the changes; dropping the statement rolls all of them back, also when a panic unwinds. Rolling back restores
/// the ledger exactly. What a statement records is proportional to the number of its operations, not to the size of
/// the ledger.
///
/// ```
/// use partage_core::ledger::{Ledger, LedgerTime};
/// use partage_core::model::{PodAsk, PodId, PodUid};
/// use partage_core::place::{PolicyEngine, defaults};
///
/// # fn main() -> Result<(), Box<dyn std::error::Error>> {
/// let mut ledger = Ledger::new([partage_core::model::Node::new("node-1", Vec::new())]);
/// let policies = PolicyEngine::new(defaults::CLUSTER_POLICY);
/// let pod = |name: &str| PodId { uid: name.into(), namespace: "default".into(), name: name.into() };
///
/// let mut statement = ledger.statement();
/// statement.place(pod("worker-0"), &PodAsk::default(), &policies, LedgerTime(60_000))?;
/// let checkpoint = statement.checkpoint();
/// statement.place(pod("worker-1"), &PodAsk::default(), &policies, LedgerTime(60_000))?;
/// statement.rollback_to(checkpoint)?;
/// statement.commit();
///
/// assert!(ledger.held(&PodUid::from("worker-0")).is_some());
/// assert!(ledger.held(&PodUid::from("worker-1")).is_none());
/// # Ok(())
/// # }
/// ```
#[derive(Debug)]
#[must_use = "a statement that is dropped is rolled back"]
pub struct Statement<'a> {
    ledger: &'a mut Ledger,
    id: u64,
    log: Vec<UndoEntry>,
}

/// A point within a statement that it can be rolled back to.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Checkpoint {
    statement: u64,
    /// Entries of the log at this point.
    entries: usize,
    /// The last of these entries, to detect whether they are still the same.
    last: u64,
}

/// The checkpoint was rolled back itself, or belongs to another statement.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("the checkpoint is not part of this statement: it was rolled back, or belongs to another statement")]
pub struct StaleCheckpoint;

/// Why the grant of a pod was not replaced.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum ReplaceError {
    /// The pod holds nothing.
    #[error("pod {uid} holds no grant to replace")]
    NotHeld {
        /// UID of the pod concerned.
        uid: PodUid,
    },
    /// The new grant would overcommit a GPU.
    #[error(transparent)]
    Refused(#[from] GrantRefused),
}

impl<'a> Statement<'a> {
    pub(super) fn new(ledger: &'a mut Ledger) -> Statement<'a> {
        Statement { ledger, id: unique_version(), log: Vec::new() }
    }

    /// Returns the ledger with the changes made so far.
    pub fn ledger(&self) -> &Ledger {
        self.ledger
    }

    /// Marks the current state, to return to it with [`Statement::rollback_to`].
    pub fn checkpoint(&self) -> Checkpoint {
        let last = self.log.last().map_or(0, |entry| entry.id);
        Checkpoint { statement: self.id, entries: self.log.len(), last }
    }

    /// Rolls back everything since a checkpoint. Checkpoints taken after it become stale.
    pub fn rollback_to(&mut self, checkpoint: Checkpoint) -> Result<(), StaleCheckpoint> {
        let last = match checkpoint.entries {
            0 => Some(0),
            entries => self.log.get(entries - 1).map(|entry| entry.id),
        };
        if checkpoint.statement != self.id || last != Some(checkpoint.last) {
            return Err(StaleCheckpoint);
        }
        self.undo_down_to(checkpoint.entries);
        Ok(())
    }

    /// Commits all changes to the ledger.
    pub fn commit(mut self) {
        self.log.clear();
    }

    /// Rolls back all changes, as dropping does.
    pub fn rollback(self) {}

    /// Returns the best node for a pod, and the GPUs there, given the changes so far; `None` if it fits nowhere.
    pub fn best(&mut self, policies: &PolicyEngine, ask: &PodAsk) -> Option<Decision> {
        self.ledger.best(policies, ask)
    }

    /// Places a pod on the best node and reserves its grant there.
    pub fn place(
        &mut self,
        pod: PodId,
        ask: &PodAsk,
        policies: &PolicyEngine,
        until: LedgerTime,
    ) -> Result<PodGrant, ReserveError> {
        let Some(decision) = self.best(policies, ask) else {
            let (namespace, name) = (pod.namespace.to_string(), pod.name.to_string());
            return Err(ReserveError::NoCapacity { namespace, name });
        };
        self.reserve(pod, ask, &decision, until)
    }

    /// Reserves a decision; see [`Ledger::reserve`].
    pub fn reserve(
        &mut self,
        pod: PodId,
        ask: &PodAsk,
        decision: &Decision,
        until: LedgerTime,
    ) -> Result<PodGrant, ReserveError> {
        self.ledger.reserve_logged(pod, ask, decision, until, Some(&mut self.log))
    }

    /// Confirms a grant unless something would be overcommitted by it; see [`Ledger::try_confirm`].
    pub fn try_confirm(
        &mut self,
        pod: PodId,
        grant: PodGrant,
        host: HostUsage,
    ) -> Result<Option<PodGrant>, GrantRefused> {
        self.ledger.examine(&pod.uid, &grant, host)?;
        Ok(self.confirm(pod, grant, host))
    }

    /// Records a grant that was seen on a running pod; see [`Ledger::confirm`].
    pub fn confirm(&mut self, pod: PodId, grant: PodGrant, host: HostUsage) -> Option<PodGrant> {
        self.ledger.confirm_logged(pod, grant, host, Some(&mut self.log))
    }

    /// Releases the grant of a pod and returns it; `None` if it holds nothing.
    pub fn release(&mut self, uid: &PodUid) -> Option<HeldGrant> {
        self.ledger.remove(uid, Some(&mut self.log))
    }

    /// Replaces the grant of a pod by another, unless something would be overcommitted by it. The pod's CPU, host
    /// memory and stage stay as they are. Returns the old grant.
    pub fn replace(&mut self, uid: &PodUid, grant: PodGrant) -> Result<PodGrant, ReplaceError> {
        let Some(held) = self.ledger.held(uid) else {
            return Err(ReplaceError::NotHeld { uid: uid.clone() });
        };
        if held.grant == grant {
            return Ok(grant);
        }
        let (pod, stage, host) = (held.pod.clone(), held.stage, held.host);
        self.ledger.examine(uid, &grant, host)?;
        let replaced = self.release(uid).map(|old| old.grant);
        let held = HeldGrant { stage, ..self.ledger.confirmed(pod, grant.clone(), host) };
        self.ledger.insert(held, Some(&mut self.log));
        Ok(replaced.unwrap_or(grant))
    }

    fn undo_down_to(&mut self, entries: usize) {
        while self.log.len() > entries {
            if let Some(entry) = self.log.pop() {
                self.ledger.undo(entry);
            }
        }
    }
}

impl Drop for Statement<'_> {
    fn drop(&mut self) {
        self.undo_down_to(0);
    }
}

/// How to undo one change of a ledger.
#[derive(Debug)]
pub(super) struct UndoEntry {
    /// Identifies the entry among all entries of all logs.
    id: u64,
    change: LedgerChange,
}

/// A change that was made.
#[derive(Debug)]
enum LedgerChange {
    /// The grant of a pod was inserted.
    Inserted { uid: PodUid, node: Option<SavedNode> },
    /// The grant of a pod was removed, with the note about contradicting grants.
    Removed { held: Box<HeldGrant>, contradicted: Option<BTreeSet<NodeName>>, node: Option<SavedNode> },
    /// The stage of a grant was changed from this one.
    StageChanged { uid: PodUid, stage: GrantStage },
}

impl UndoEntry {
    fn new(change: LedgerChange) -> UndoEntry {
        UndoEntry { id: unique_version(), change }
    }

    pub(super) fn insertion(uid: PodUid, node: Option<SavedNode>) -> UndoEntry {
        UndoEntry::new(LedgerChange::Inserted { uid, node })
    }

    pub(super) fn removal(
        held: Box<HeldGrant>,
        contradicted: Option<BTreeSet<NodeName>>,
        node: Option<SavedNode>,
    ) -> UndoEntry {
        UndoEntry::new(LedgerChange::Removed { held, contradicted, node })
    }

    pub(super) fn stage(uid: PodUid, stage: GrantStage) -> UndoEntry {
        UndoEntry::new(LedgerChange::StageChanged { uid, stage })
    }
}

impl Ledger {
    /// Reverts a change. Everything that was changed after it must have been reverted before.
    fn undo(&mut self, undo: UndoEntry) {
        let node = match undo.change {
            LedgerChange::Inserted { uid, node } => {
                self.unlist(&uid);
                node
            }
            LedgerChange::Removed { held, contradicted, node } => {
                if let Some(nodes) = contradicted {
                    self.contradicted.insert(held.pod.uid.clone(), nodes);
                }
                self.list(held);
                node
            }
            LedgerChange::StageChanged { uid, stage } => {
                if let Some(held) = self.held.get_mut(&uid) {
                    held.stage = stage;
                }
                None
            }
        };
        // The node's content as it was, rather than the difference taken back: exact by construction.
        if let Some(node) = node {
            self.cluster.restore(node);
        }
    }
}
