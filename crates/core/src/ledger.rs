//! Who holds which share of which GPU: derived from grants, never a second truth.
//!
//! A grant is **reserved** when a decision is taken, **confirmed** when it is seen on the pod, and **released**
//! when the pod has ended. A reservation that is never confirmed expires. Every event may come twice, and after
//! a restart the same grants in any order give the same ledger. What cannot be right (more promised than there
//! is, a GPU nobody has) is reported by [`Ledger::audit`] and never underflows.

use crate::model::{
    Ask, Bytes, ContainerRole, CoresAsk, GpuUuid, Grant, MemoryAsk, Node, NodeName, PodAsk, PodGrant, PodId,
    PodUid, ShareAsk, WantedGpus,
};
use crate::place::{
    ClusterCapacity, Decision, GpuClass, HostUsage, NodeIndex, PolicyEngine, RankCache, Usage, placement,
};
use std::collections::{BTreeMap, BTreeSet, HashMap};
use std::fmt;

/// A point in time, in milliseconds of whatever clock the caller keeps.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord)]
pub struct LedgerTime(pub u64);

/// How far a grant has come.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Stage {
    /// Decided, not yet seen on the pod; given back at this moment.
    Reserved {
        /// When it expires.
        until: LedgerTime,
    },
    /// Seen on the pod.
    Confirmed,
}

/// What the ledger knows of one pod.
#[derive(Clone, Debug)]
pub struct HeldGrant {
    /// The pod.
    pub pod: PodId,
    /// How far it has come.
    pub stage: Stage,
    /// What it holds.
    pub grant: PodGrant,
    /// What it takes of the node itself.
    pub host: HostUsage,
    /// What it takes of each GPU, as charged.
    usage: Vec<(usize, Usage)>,
}

impl HeldGrant {
    /// What it takes of a GPU of its node, by index, at the time it takes most.
    pub fn usage_on(&self, gpu: usize) -> Usage {
        let of = self.usage.iter().find(|(at, _)| *at == gpu);
        of.map_or_else(Usage::default, |(_, usage)| *usage)
    }

    /// An ask that would have been granted this: what a policy learns from after a restart.
    pub fn ask(&self) -> PodAsk {
        let asks = self.grant.grants.iter().filter_map(|grant| {
            let first = grant.shares.first()?;
            let part = ShareAsk {
                memory: first.memory_bytes.map_or(MemoryAsk::Unlimited, MemoryAsk::Exactly),
                cores: first.cores.map_or(CoresAsk::Uncounted, CoresAsk::Exactly),
                whole: first.whole,
                ceiling: first.ceiling,
            };
            let count = u32::try_from(grant.shares.len()).unwrap_or(u32::MAX);
            let role = if grant.init { ContainerRole::Init } else { ContainerRole::App };
            Some(Ask { container: grant.container.clone(), role, want: WantedGpus { count, part } })
        });
        PodAsk { asks: asks.collect(), cpu: self.host.cpu(), memory: self.host.memory(), ..PodAsk::default() }
    }
}

/// Why nothing was reserved.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum ReserveError {
    /// The node is gone or has other GPUs now.
    #[error("the node chosen for pod {namespace}/{name} has changed since the decision: decide again")]
    Changed {
        /// The pod's namespace.
        namespace: String,
        /// The pod's name.
        name: String,
    },
    /// Another pod was faster.
    #[error(
        "node {node} has no capacity left for pod {namespace}/{name}: another pod took it since the decision; decide again"
    )]
    Taken {
        /// The node.
        node: NodeName,
        /// The pod's namespace.
        namespace: String,
        /// The pod's name.
        name: String,
    },
    /// The pod holds something else already.
    #[error("pod {namespace}/{name} already holds a grant on node {node}: release it first")]
    Holds {
        /// The node it holds a grant on.
        node: NodeName,
        /// The pod's namespace.
        namespace: String,
        /// The pod's name.
        name: String,
    },
}

/// Something that cannot be right.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum LedgerFinding {
    /// A GPU is promised to more than it has.
    OverCommitted {
        /// The node.
        node: NodeName,
        /// The GPU.
        gpu: GpuUuid,
        /// What is wrong with it.
        what: OverCommitment,
        /// The pods that hold shares of it.
        pods: Vec<String>,
    },
    /// A pod holds a share of a GPU its node does not have.
    UnknownGpu {
        /// The pod.
        pod: String,
        /// The node.
        node: NodeName,
        /// The GPU.
        gpu: GpuUuid,
    },
    /// A pod holds shares on a node nobody knows.
    UnknownNode {
        /// The pod.
        pod: String,
        /// The node.
        node: NodeName,
    },
    /// One pod came with different grants.
    SeveralGrants {
        /// The pod.
        pod: String,
        /// The nodes they name.
        nodes: BTreeSet<NodeName>,
    },
}

/// How a GPU is promised to more than it has.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum OverCommitment {
    /// More memory than may be promised.
    Memory {
        /// Promised.
        promised: Bytes,
        /// May be promised.
        limit: Bytes,
    },
    /// More than all of its compute, in thousandths of a percent.
    Cores {
        /// Promised.
        promised: u64,
    },
    /// HeldGrant whole, and somebody else is on it.
    Whole {
        /// Shares on it.
        shares: u32,
    },
    /// Memory-limited and unlimited shares on one GPU.
    Mixed,
    /// More shares than the node allows.
    Shares {
        /// Shares on it.
        shares: u32,
        /// The node's limit.
        most: u32,
    },
    /// A single share larger than the card.
    Share {
        /// Its memory.
        memory: Bytes,
        /// The card's.
        card: Bytes,
    },
}

impl fmt::Display for LedgerFinding {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            LedgerFinding::OverCommitted { node, gpu, what, pods } => {
                write!(f, "{node}/{gpu} is over-committed: ")?;
                match what {
                    OverCommitment::Memory { promised, limit } => {
                        write!(f, "{promised} promised of {limit}")?
                    }
                    OverCommitment::Cores { promised } => {
                        write!(f, "{} % of its cores promised", promised.div_ceil(1000))?;
                    }
                    OverCommitment::Whole { shares } => write!(f, "held whole, with {shares} shares on it")?,
                    OverCommitment::Mixed => f.write_str("shares with and without a memory limit on it")?,
                    OverCommitment::Shares { shares, most } => {
                        write!(f, "{shares} shares where {most} are allowed")?
                    }
                    OverCommitment::Share { memory, card } => {
                        write!(f, "a share of {memory} on a card of {card}")?;
                    }
                }
                write!(f, " (pods: {})", pods.join(", "))
            }
            LedgerFinding::UnknownGpu { pod, node, gpu } => {
                write!(f, "pod {pod} holds a share of {gpu}, which node {node} does not have")
            }
            LedgerFinding::UnknownNode { pod, node } => {
                write!(f, "pod {pod} holds shares on node {node}, which nobody knows")
            }
            LedgerFinding::SeveralGrants { pod, nodes } => {
                let nodes: Vec<&str> = nodes.iter().map(NodeName::as_str).collect();
                write!(f, "pod {pod} came with different grants, on {}", nodes.join(" and "))
            }
        }
    }
}

/// The ledger, and the room it leaves.
#[derive(Debug, Default)]
pub struct Ledger {
    cluster: ClusterCapacity,
    rank_cache: RankCache,
    held: HashMap<PodUid, HeldGrant>,
    by_node: HashMap<NodeName, BTreeSet<PodUid>>,
    /// Pods that a rebuild found with different grants, and the nodes these named.
    several: BTreeMap<PodUid, BTreeSet<NodeName>>,
}

impl Ledger {
    /// A ledger of empty nodes.
    pub fn new(nodes: impl IntoIterator<Item = Node>) -> Ledger {
        Ledger { cluster: ClusterCapacity::new(nodes), ..Ledger::default() }
    }

    /// The room that is left.
    pub fn cluster(&self) -> &ClusterCapacity {
        &self.cluster
    }

    /// The best node for a pod, and the GPUs there; `None` where it fits nowhere.
    pub fn best(&mut self, placer: &PolicyEngine, ask: &PodAsk) -> Option<Decision> {
        placer.best(&self.cluster, ask, &mut self.rank_cache)
    }

    /// What a pod holds.
    pub fn held(&self, uid: &PodUid) -> Option<&HeldGrant> {
        self.held.get(uid)
    }

    /// Everything held, in no order.
    pub fn all_held(&self) -> impl Iterator<Item = &HeldGrant> {
        self.held.values()
    }

    /// Adds a node or replaces what is known of it; what pods hold there stays held.
    pub fn set_node(&mut self, node: Node) -> NodeIndex {
        let name = node.name.clone();
        let index = self.cluster.set_node(node);
        let uids: Vec<PodUid> = self.by_node.get(&name).into_iter().flatten().cloned().collect();
        for uid in uids {
            if let Some(held) = self.held.get_mut(&uid) {
                held.usage = peak_usage(&self.cluster, &held.grant);
                self.cluster.add_usage(index, &held.usage, held.host);
            }
        }
        index
    }

    /// Forgets a node; what pods hold there stays held, and the audit names it until they are released.
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

    /// Holds a decision for a pod until it is confirmed or `until` has come.
    ///
    /// Asking again for a pod that holds this very grant changes nothing and answers it again.
    pub fn reserve(
        &mut self,
        pod: PodId,
        ask: &PodAsk,
        decision: &Decision,
        until: LedgerTime,
    ) -> Result<PodGrant, ReserveError> {
        let (namespace, name) = (pod.namespace.to_string(), pod.name.to_string());
        let Some(capacity) = self.cluster.current(decision) else {
            return Err(ReserveError::Changed { namespace, name });
        };
        let node = capacity.node.name.clone();
        let grant = decision.placement.grant(&ask.asks, capacity);
        if let Some(held) = self.held.get(&pod.uid) {
            if held.grant == grant {
                return Ok(grant);
            }
            return Err(ReserveError::Holds { node: held.grant.node.clone(), namespace, name });
        }
        let host = HostUsage::new(ask.cpu, ask.memory);
        let usage = decision.placement.usage_by_gpu(&ask.asks);
        if !placement::still_fits(
            capacity,
            self.cluster.classes(),
            &self.cluster.prepare(ask),
            &decision.placement,
        ) {
            return Err(ReserveError::Taken { node, namespace, name });
        }
        self.hold(HeldGrant { pod, stage: Stage::Reserved { until }, grant: grant.clone(), host, usage });
        Ok(grant)
    }

    /// Notes a grant seen on a living pod. The pod's word is final: a grant that differs from what was held
    /// replaces it and is returned.
    pub fn confirm(&mut self, pod: PodId, grant: PodGrant, host: HostUsage) -> Option<PodGrant> {
        if let Some(held) = self.held.get_mut(&pod.uid)
            && held.grant == grant
            && held.host == host
        {
            held.stage = Stage::Confirmed;
            return None;
        }
        let replaced = self.release(&pod.uid).map(|held| held.grant).filter(|old| *old != grant);
        let usage = peak_usage(&self.cluster, &grant);
        self.hold(HeldGrant { pod, stage: Stage::Confirmed, grant, host, usage });
        replaced
    }

    /// Gives back what a pod held, once it has ended. Releasing twice changes nothing.
    pub fn release(&mut self, uid: &PodUid) -> Option<HeldGrant> {
        self.several.remove(uid);
        let held = self.held.remove(uid)?;
        if let Some(uids) = self.by_node.get_mut(&held.grant.node) {
            uids.remove(uid);
            if uids.is_empty() {
                self.by_node.remove(&held.grant.node);
            }
        }
        if let Some(node) = self.cluster.index_of(&held.grant.node) {
            self.cluster.remove_usage(node, &held.usage, held.host);
        }
        Some(held)
    }

    /// Gives back every reservation that was not confirmed in time.
    pub fn expire(&mut self, now: LedgerTime) -> Vec<HeldGrant> {
        let late = |held: &&HeldGrant| matches!(held.stage, Stage::Reserved { until } if until <= now);
        let mut uids: Vec<PodUid> =
            self.held.values().filter(late).map(|held| held.pod.uid.clone()).collect();
        uids.sort_unstable();
        uids.iter().filter_map(|uid| self.release(uid)).collect()
    }

    /// Everything confirmed anew, as after a restart. The order of the grants makes no difference.
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
                // Of several claims for one pod the same one wins whatever the order; the audit names them all.
                claims.sort_by_cached_key(|claim| format!("{claim:?}"));
                if claims.iter().any(|(_, grant, _)| *grant != claims[0].1) {
                    ledger
                        .several
                        .insert(uid, claims.iter().map(|(_, grant, _)| grant.node.clone()).collect());
                }
            }
            let (pod, grant, host) = claims.swap_remove(0);
            let usage = peak_usage(&ledger.cluster, &grant);
            ledger.hold(HeldGrant { pod, stage: Stage::Confirmed, grant, host, usage });
        }
        ledger
    }

    /// Everything that cannot be right, in a stable order.
    pub fn audit(&self) -> Vec<LedgerFinding> {
        let mut findings: Vec<LedgerFinding> = Vec::new();
        let mut holders: HashMap<(&NodeName, &GpuUuid), BTreeSet<String>> = HashMap::new();
        for held in self.held.values() {
            let pod = format!("{}/{}", held.pod.namespace, held.pod.name);
            let Some(node) = self.cluster.index_of(&held.grant.node) else {
                findings.push(LedgerFinding::UnknownNode { pod, node: held.grant.node.clone() });
                continue;
            };
            let node = &self.cluster.node_capacity(node).node;
            for share in held.grant.grants.iter().flat_map(|grant| &grant.shares) {
                if node.gpu_index(&share.gpu).is_some() {
                    holders.entry((&node.name, &share.gpu)).or_default().insert(pod.clone());
                } else {
                    findings.push(LedgerFinding::UnknownGpu {
                        pod: pod.clone(),
                        node: held.grant.node.clone(),
                        gpu: share.gpu.clone(),
                    });
                }
            }
        }
        for (uid, nodes) in &self.several {
            if let Some(held) = self.held.get(uid) {
                let pod = format!("{}/{}", held.pod.namespace, held.pod.name);
                findings.push(LedgerFinding::SeveralGrants { pod, nodes: nodes.clone() });
            }
        }
        let largest = self.largest_shares();
        for (_, capacity) in self.cluster.nodes() {
            for (gpu, state) in capacity.node.gpus.iter().zip(&capacity.gpus) {
                let class = &self.cluster.classes()[usize::from(state.class)];
                let largest = largest.get(&gpu.uuid).copied().unwrap_or_default();
                let pods = || {
                    holders.get(&(&capacity.node.name, &gpu.uuid)).into_iter().flatten().cloned().collect()
                };
                findings.extend(over_commits(state.used, class, largest).map(|what| {
                    LedgerFinding::OverCommitted {
                        node: capacity.node.name.clone(),
                        gpu: gpu.uuid.clone(),
                        what,
                        pods: pods(),
                    }
                }));
            }
        }
        findings.sort_unstable();
        findings.dedup();
        findings
    }

    fn largest_shares(&self) -> HashMap<&GpuUuid, Bytes> {
        let mut largest: HashMap<&GpuUuid, Bytes> = HashMap::new();
        let grants = self.held.values().flat_map(|held| &held.grant.grants);
        for share in grants.flat_map(|grant| &grant.shares) {
            let most = largest.entry(&share.gpu).or_default();
            *most = (*most).max(share.memory_bytes.unwrap_or_default());
        }
        largest
    }

    fn hold(&mut self, held: HeldGrant) {
        if let Some(node) = self.cluster.index_of(&held.grant.node) {
            self.cluster.add_usage(node, &held.usage, held.host);
        }
        self.by_node.entry(held.grant.node.clone()).or_default().insert(held.pod.uid.clone());
        self.held.insert(held.pod.uid.clone(), held);
    }
}

/// What a grant takes of each GPU of its node, at the time it takes most. GPUs the node does not have are left
/// out; the audit names them.
fn peak_usage(cluster: &ClusterCapacity, grant: &PodGrant) -> Vec<(usize, Usage)> {
    let Some(node) = cluster.index_of(&grant.node) else { return Vec::new() };
    let last_init = grant.grants.iter().rposition(|grant| grant.init);
    // Sidecars stand among the init containers, ordinary containers after them.
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
            Some((gpu, Usage::of_share(share, &cluster.classes()[class])))
        })
    })
}

/// Every way in which a GPU is promised to more than it has.
fn over_commits(used: Usage, class: &GpuClass, largest: Bytes) -> impl Iterator<Item = OverCommitment> {
    let whole = used.is_whole_and_shared();
    // A whole GPU beside others is one mistake, not three.
    let memory = !whole && used.memory > class.allocatable.0;
    let cores = !whole && used.cores > u64::from(crate::model::Cores::WHOLE.as_millipercent());
    let mixed = used.limited > 0 && used.unlimited > 0;
    [
        whole.then_some(OverCommitment::Whole { shares: used.shares }),
        memory.then_some(OverCommitment::Memory { promised: Bytes(used.memory), limit: class.allocatable }),
        cores.then_some(OverCommitment::Cores { promised: used.cores }),
        mixed.then_some(OverCommitment::Mixed),
        (used.shares > class.max_shares)
            .then_some(OverCommitment::Shares { shares: used.shares, most: class.max_shares }),
        (largest > class.memory).then_some(OverCommitment::Share { memory: largest, card: class.memory }),
    ]
    .into_iter()
    .flatten()
}
