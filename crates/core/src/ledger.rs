//! The ledger records which pod holds which share of which GPU. It is derived from grants and is never a second source of truth.
//!
//! A grant is **reserved** when a decision is made, **confirmed** when it is seen on the pod, and **released** when
//! the pod has ended. A reservation that is not confirmed in time expires. Every event may arrive twice, and after a
//! restart the same grants in any order give the same ledger.
//!
//! Changes that must happen together, or only if all of them are possible, are made in a [`Statement`], which is
//! committed or rolled back as a whole. Readers that must not wait for the ledger take a [`Snapshot`]. Two ways lead
//! to a confirmed grant: [`Ledger::try_confirm`] for a grant that can still be refused, and [`Ledger::confirm`] for
//! a fact, such as the grant of a running pod; the ledger then counts it even if a GPU is overcommitted by it, and
//! [`Ledger::audit`] reports that.

mod audit;
mod snapshot;
mod statement;

pub use audit::{GrantConflict, GrantRefused, LedgerFinding, OverCommitment};
pub use snapshot::Snapshot;
pub use statement::{Checkpoint, ReplaceError, StaleCheckpoint, Statement};

use crate::model::{
    Ask, ContainerRole, CoresAsk, Grant, MemoryAsk, Node, NodeName, PodAsk, PodGrant, PodId, PodUid,
    ShareAsk, WantedGpus,
};
use crate::place::{
    ClusterCapacity, Decision, GpuAllocation, HostUsage, NodeIndex, PolicyEngine, RankCache, placement,
};
use statement::UndoEntry;
use std::collections::{BTreeMap, BTreeSet, HashMap};

/// A point in time in milliseconds, by whatever clock the caller uses.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord)]
pub struct LedgerTime(pub u64);

/// How far a grant has come.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum GrantStage {
    /// Decided, and not seen on the pod yet.
    Reserved {
        /// When the reservation expires.
        until: LedgerTime,
    },
    /// Seen on the pod.
    Confirmed,
}

/// The grant of one pod, as the ledger counts it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct HeldGrant {
    /// The pod that holds the grant.
    pub pod: PodId,
    /// How far the grant has come.
    pub stage: GrantStage,
    /// The shares, by container.
    pub grant: PodGrant,
    /// CPU and host memory that the pod uses.
    pub host: HostUsage,
    /// The counted usage on each GPU of the node, by GPU index.
    usage: Vec<(usize, GpuAllocation)>,
}

impl HeldGrant {
    /// Returns what the pod uses of a GPU of its node, by GPU index, at the time when it uses most.
    pub fn usage_on(&self, gpu: usize) -> GpuAllocation {
        self.usage.iter().find(|(at, _)| *at == gpu).map_or_else(GpuAllocation::default, |(_, usage)| *usage)
    }

    /// Returns an ask that would have been granted this, for policies that learn from what is held after a restart.
    pub fn to_ask(&self) -> PodAsk {
        let asks = self.grant.grants.iter().filter_map(|grant| {
            let first = grant.shares.first()?;
            let share = ShareAsk {
                memory: first.memory_bytes.map_or(MemoryAsk::Unlimited, MemoryAsk::Exactly),
                cores: first.cores.map_or(CoresAsk::Uncounted, CoresAsk::Exactly),
                whole: first.whole,
                ceiling: first.ceiling,
            };
            let count = u32::try_from(grant.shares.len()).unwrap_or(u32::MAX);
            let role = if grant.init { ContainerRole::Init } else { ContainerRole::App };
            Some(Ask { container: grant.container.clone(), role, want: WantedGpus { count, share } })
        });
        PodAsk { asks: asks.collect(), cpu: self.host.cpu(), memory: self.host.memory(), ..PodAsk::default() }
    }
}

/// Why a decision was not reserved.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum ReserveError {
    /// No node has capacity for the pod.
    #[error("no node has capacity for pod {namespace}/{name}")]
    NoCapacity {
        /// Namespace of the pod concerned.
        namespace: String,
        /// Name of the pod concerned.
        name: String,
    },
    /// The node was removed, or its inventory or settings changed.
    #[error("the node chosen for pod {namespace}/{name} has changed since the decision: decide again")]
    NodeChanged {
        /// Namespace of the pod concerned.
        namespace: String,
        /// Name of the pod concerned.
        name: String,
    },
    /// Another pod took the capacity.
    #[error(
        "node {node} has no capacity left for pod {namespace}/{name}: another pod took it since the decision; decide again"
    )]
    CapacityTaken {
        /// Name of the node concerned.
        node: NodeName,
        /// Namespace of the pod concerned.
        namespace: String,
        /// Name of the pod concerned.
        name: String,
    },
    /// The pod holds another grant already.
    #[error("pod {namespace}/{name} already holds a grant on node {node}: release it first")]
    AlreadyHeld {
        /// The node it holds a grant on.
        node: NodeName,
        /// Namespace of the pod concerned.
        namespace: String,
        /// Name of the pod concerned.
        name: String,
    },
}

/// The grants of all pods, and the capacity that they leave.
#[derive(Debug, Default)]
pub struct Ledger {
    cluster: ClusterCapacity,
    /// Never changes a decision, only its cost.
    rank_cache: RankCache,
    /// Ordered, so that everything derived from all grants is the same after a restart.
    held: BTreeMap<PodUid, Box<HeldGrant>>,
    by_node: HashMap<NodeName, BTreeSet<PodUid>>,
    /// Pods that a rebuild found with different grants, and the nodes that these named.
    contradicted: BTreeMap<PodUid, BTreeSet<NodeName>>,
}

/// Compares grants and capacity. Caches are not compared.
impl PartialEq for Ledger {
    fn eq(&self, other: &Self) -> bool {
        self.cluster == other.cluster
            && self.held == other.held
            && self.by_node == other.by_node
            && self.contradicted == other.contradicted
    }
}

impl Ledger {
    /// Returns a ledger of these nodes without grants.
    pub fn new(nodes: impl IntoIterator<Item = Node>) -> Ledger {
        Ledger { cluster: ClusterCapacity::new(nodes), ..Ledger::default() }
    }

    /// Returns a ledger with these grants confirmed, as after a restart. The order of the grants makes no difference.
    pub fn rebuild(
        nodes: impl IntoIterator<Item = Node>,
        grants: impl IntoIterator<Item = (PodId, PodGrant, HostUsage)>,
    ) -> Ledger {
        let mut ledger = Ledger::new(nodes);
        let mut by_pod: BTreeMap<PodUid, Vec<(PodId, PodGrant, HostUsage)>> = BTreeMap::new();
        for (pod, grant, host) in grants {
            by_pod.entry(pod.uid.clone()).or_default().push((pod, grant, host));
        }
        for (uid, mut claims) in by_pod {
            if claims.len() > 1 {
                // Of several claims for one pod the same one wins in any order; the audit reports them all.
                claims.sort_by_cached_key(|claim| format!("{claim:?}"));
                if claims.iter().any(|(_, grant, _)| *grant != claims[0].1) {
                    let nodes = claims.iter().map(|(_, grant, _)| grant.node.clone()).collect();
                    ledger.contradicted.insert(uid, nodes);
                }
            }
            let (pod, grant, host) = claims.swap_remove(0);
            ledger.insert(ledger.confirmed(pod, grant, host), None);
        }
        ledger
    }

    /// Returns the capacity that the grants leave.
    pub fn cluster(&self) -> &ClusterCapacity {
        &self.cluster
    }

    /// Returns an immutable view of the capacity as it is now, for readers on any thread. Takes constant time.
    pub fn snapshot(&self) -> Snapshot {
        Snapshot::new(self.cluster.clone())
    }

    /// Begins a statement: changes that are committed together, or rolled back when it is dropped.
    pub fn statement(&mut self) -> Statement<'_> {
        Statement::new(self)
    }

    /// Returns the best node for a pod, and the GPUs there; `None` if it fits nowhere.
    pub fn best(&mut self, policies: &PolicyEngine, ask: &PodAsk) -> Option<Decision> {
        policies.best(&self.cluster, ask, &mut self.rank_cache)
    }

    /// Returns the grant that a pod holds.
    pub fn held(&self, uid: &PodUid) -> Option<&HeldGrant> {
        self.held.get(uid).map(Box::as_ref)
    }

    /// Returns all grants, in the order of the pods' UIDs.
    pub fn all_held(&self) -> impl Iterator<Item = &HeldGrant> {
        self.held.values().map(Box::as_ref)
    }

    /// Adds a node, or replaces its inventory and settings. The grants on it stay held.
    pub fn set_node(&mut self, node: Node) -> NodeIndex {
        let name = node.name.clone();
        let index = self.cluster.set_node(node);
        for uid in self.by_node.get(&name).into_iter().flatten() {
            if let Some(held) = self.held.get_mut(uid) {
                held.usage = peak_usage(&self.cluster, &held.grant);
                self.cluster.add_usage(index, &held.usage, held.host);
            }
        }
        index
    }

    /// Removes a node. The grants on it stay held, and the audit reports them until they are released.
    pub fn remove_node(&mut self, name: &NodeName) {
        if let Some(node) = self.cluster.index_of(name) {
            self.cluster.remove_node(node);
        }
        for uid in self.by_node.get(name).into_iter().flatten() {
            if let Some(held) = self.held.get_mut(uid) {
                held.usage.clear();
            }
        }
    }

    /// Reserves a decision for a pod until it is confirmed or `until` has come.
    ///
    /// Reserving the same grant for the same pod again changes nothing and returns it.
    pub fn reserve(
        &mut self,
        pod: PodId,
        ask: &PodAsk,
        decision: &Decision,
        until: LedgerTime,
    ) -> Result<PodGrant, ReserveError> {
        self.reserve_logged(pod, ask, decision, until, None)
    }

    /// Confirms a grant, unless a GPU or the node would be overcommitted by it; then nothing changes.
    ///
    /// Only the GPUs of the grant are examined, not the whole ledger. A grant that replaces another of the same pod
    /// is examined without the old one, and the old one is returned. The grant that the pod holds already is
    /// confirmed without examination.
    pub fn try_confirm(
        &mut self,
        pod: PodId,
        grant: PodGrant,
        host: HostUsage,
    ) -> Result<Option<PodGrant>, GrantRefused> {
        self.examine(&pod.uid, &grant, host)?;
        Ok(self.confirm(pod, grant, host))
    }

    /// Records a grant that was seen on a running pod. This is a fact and cannot be refused: a grant that differs
    /// from the one held replaces it, and the old one is returned.
    pub fn confirm(&mut self, pod: PodId, grant: PodGrant, host: HostUsage) -> Option<PodGrant> {
        self.confirm_logged(pod, grant, host, None)
    }

    /// Releases the grant of a pod that has ended. Releasing twice changes nothing.
    pub fn release(&mut self, uid: &PodUid) -> Option<HeldGrant> {
        self.remove(uid, None)
    }

    /// Releases every reservation that was not confirmed in time.
    pub fn expire(&mut self, now: LedgerTime) -> Vec<HeldGrant> {
        let expired =
            |held: &&HeldGrant| matches!(held.stage, GrantStage::Reserved { until } if until <= now);
        let uids: Vec<PodUid> = self.all_held().filter(expired).map(|held| held.pod.uid.clone()).collect();
        uids.iter().filter_map(|uid| self.release(uid)).collect()
    }

    fn reserve_logged(
        &mut self,
        pod: PodId,
        ask: &PodAsk,
        decision: &Decision,
        until: LedgerTime,
        undo: Option<&mut Vec<UndoEntry>>,
    ) -> Result<PodGrant, ReserveError> {
        let names = || (pod.namespace.to_string(), pod.name.to_string());
        let Some(capacity) = self.cluster.current(decision) else {
            let (namespace, name) = names();
            return Err(ReserveError::NodeChanged { namespace, name });
        };
        let grant = decision.placement.grant(&ask.asks, capacity);
        if let Some(held) = self.held.get(&pod.uid) {
            if held.grant == grant {
                return Ok(grant);
            }
            let (namespace, name) = names();
            return Err(ReserveError::AlreadyHeld { node: held.grant.node.clone(), namespace, name });
        }
        let prepared = self.cluster.prepare(ask);
        if !placement::still_fits(capacity, self.cluster.classes(), &prepared, &decision.placement) {
            let (namespace, name) = names();
            return Err(ReserveError::CapacityTaken { node: capacity.node.name.clone(), namespace, name });
        }
        let held = HeldGrant {
            pod,
            stage: GrantStage::Reserved { until },
            grant: grant.clone(),
            host: HostUsage::new(ask.cpu, ask.memory),
            usage: decision.placement.usage_by_gpu(&ask.asks),
        };
        self.insert(held, undo);
        Ok(grant)
    }

    fn confirm_logged(
        &mut self,
        pod: PodId,
        grant: PodGrant,
        host: HostUsage,
        mut undo: Option<&mut Vec<UndoEntry>>,
    ) -> Option<PodGrant> {
        if let Some(held) = self.held.get_mut(&pod.uid)
            && held.grant == grant
            && held.host == host
        {
            if let Some(undo) = undo {
                undo.push(UndoEntry::stage(pod.uid, held.stage));
            }
            held.stage = GrantStage::Confirmed;
            return None;
        }
        let replaced = self.remove(&pod.uid, undo.as_deref_mut());
        let held = self.confirmed(pod, grant, host);
        let replaced = replaced.map(|old| old.grant).filter(|old| *old != held.grant);
        self.insert(held, undo);
        replaced
    }

    fn confirmed(&self, pod: PodId, grant: PodGrant, host: HostUsage) -> HeldGrant {
        let usage = peak_usage(&self.cluster, &grant);
        HeldGrant { pod, stage: GrantStage::Confirmed, grant, host, usage }
    }

    /// Counts a grant. The pod must not hold another.
    fn insert(&mut self, held: HeldGrant, undo: Option<&mut Vec<UndoEntry>>) {
        let node = self.cluster.index_of(&held.grant.node);
        if let Some(undo) = undo {
            undo.push(UndoEntry::insertion(held.pod.uid.clone(), node.map(|node| self.cluster.save(node))));
        }
        if let Some(node) = node {
            self.cluster.add_usage(node, &held.usage, held.host);
        }
        self.list(Box::new(held));
    }

    /// Stops counting the grant of a pod and returns it.
    fn remove(&mut self, uid: &PodUid, undo: Option<&mut Vec<UndoEntry>>) -> Option<HeldGrant> {
        let (held, nodes) = self.unlist(uid)?;
        let node = self.cluster.index_of(&held.grant.node);
        if let Some(undo) = undo {
            let saved = node.map(|node| self.cluster.save(node));
            undo.push(UndoEntry::removal(held.clone(), nodes, saved));
        }
        if let Some(node) = node {
            self.cluster.remove_usage(node, &held.usage, held.host);
        }
        Some(*held)
    }

    /// Enters a grant without counting it.
    fn list(&mut self, held: Box<HeldGrant>) {
        self.by_node.entry(held.grant.node.clone()).or_default().insert(held.pod.uid.clone());
        self.held.insert(held.pod.uid.clone(), held);
    }

    /// Takes out a grant without uncounting it, with the nodes that a contradicting grant named.
    fn unlist(&mut self, uid: &PodUid) -> Option<(Box<HeldGrant>, Option<BTreeSet<NodeName>>)> {
        let nodes = self.contradicted.remove(uid);
        let held = self.held.remove(uid)?;
        if let Some(uids) = self.by_node.get_mut(&held.grant.node) {
            uids.remove(uid);
            if uids.is_empty() {
                self.by_node.remove(&held.grant.node);
            }
        }
        Some((held, nodes))
    }
}

/// Returns what a grant uses of each GPU of its node, at the time when it uses most. GPUs that the node does not
/// have are left out; the audit reports them.
fn peak_usage(cluster: &ClusterCapacity, grant: &PodGrant) -> Vec<(usize, GpuAllocation)> {
    let Some(node) = cluster.index_of(&grant.node) else { return Vec::new() };
    let last_init = grant.grants.iter().rposition(|grant| grant.init);
    // Sidecars are listed among the init containers, ordinary containers after them.
    let role = |(at, grant): (usize, &Grant)| match (grant.init, last_init) {
        (true, _) => ContainerRole::Init,
        (false, Some(last)) if at < last => ContainerRole::Sidecar,
        _ => ContainerRole::App,
    };
    let roles: Vec<ContainerRole> = grant.grants.iter().enumerate().map(role).collect();
    let capacity = cluster.node_capacity(node);
    placement::peak_usage(&roles, |at| {
        grant.grants[at].shares.iter().filter_map(|share| {
            let gpu = capacity.node.gpu_index(&share.gpu)?;
            let class = usize::from(capacity.gpus[gpu].class);
            Some((gpu, GpuAllocation::of_share(share, &cluster.classes()[class])))
        })
    })
}
