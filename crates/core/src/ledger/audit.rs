//! Overcommitment: what the audit reports about a whole ledger, and why a single grant is refused.
//!
//! Both apply the same rules to a GPU's usage. The audit applies them to every GPU; [`Ledger::try_confirm`] applies
//! them to the GPUs of one grant, as they would be with the grant.

use super::{HeldGrant, Ledger, peak_usage};
use crate::model::{Bytes, Cores, GpuUuid, MilliCpu, NodeName, PodGrant, PodUid, Share};
use crate::place::{GpuAllocation, GpuClass, HostUsage, NodeCapacity};
use std::collections::BTreeSet;
use std::fmt;

/// Compute of one GPU in thousandths of a percent.
const WHOLE_CORES: u64 = Cores::WHOLE.as_millipercent() as u64;

/// A contradiction in the ledger that only an invalid grant can cause.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum LedgerFinding {
    /// More of a GPU is granted than it has.
    OverCommitted {
        /// Name of the node concerned.
        node: NodeName,
        /// UUID of the GPU concerned.
        gpu: GpuUuid,
        /// The limit that is exceeded.
        what: OverCommitment,
        /// The pods that hold shares of it.
        pods: Vec<String>,
    },
    /// A pod holds a share of a GPU that its node does not have.
    UnknownGpu {
        /// Namespace and name of the pod.
        pod: String,
        /// Name of the node concerned.
        node: NodeName,
        /// UUID of the GPU concerned.
        gpu: GpuUuid,
    },
    /// A pod holds shares on a node that the ledger does not know.
    UnknownNode {
        /// Namespace and name of the pod.
        pod: String,
        /// Name of the node concerned.
        node: NodeName,
    },
    /// A rebuild found different grants for one pod.
    SeveralGrants {
        /// Namespace and name of the pod.
        pod: String,
        /// The nodes that the grants name.
        nodes: BTreeSet<NodeName>,
    },
}

/// A limit of a GPU that is exceeded.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum OverCommitment {
    /// More memory than is allocatable.
    Memory {
        /// Granted to all pods together.
        granted: Bytes,
        /// Allocatable memory of the GPU.
        limit: Bytes,
    },
    /// More than all of its compute.
    Cores {
        /// Guaranteed to all pods together, in thousandths of a percent.
        guaranteed: u64,
    },
    /// Held whole while other shares are on it.
    Whole {
        /// Number of shares on the GPU.
        shares: u32,
    },
    /// Shares with and without a memory limit on one GPU.
    Mixed,
    /// More shares than the node allows.
    Shares {
        /// Number of shares on the GPU.
        shares: u32,
        /// Maximum number of shares per GPU on the node.
        max: u32,
    },
    /// A single share larger than the card.
    Share {
        /// Memory of the share.
        memory: Bytes,
        /// Memory of the card.
        card: Bytes,
    },
}

impl fmt::Display for LedgerFinding {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            LedgerFinding::OverCommitted { node, gpu, what, pods } => {
                write!(f, "{node}/{gpu} is overcommitted: ")?;
                match what {
                    OverCommitment::Memory { granted, limit } => write!(f, "{granted} granted of {limit}")?,
                    OverCommitment::Cores { guaranteed } => {
                        write!(f, "{} % of its cores guaranteed", guaranteed.div_ceil(1000))?;
                    }
                    OverCommitment::Whole { shares } => {
                        write!(f, "exclusive, but with {shares} shares")?;
                    }
                    OverCommitment::Mixed => f.write_str("shares with and without a memory limit on it")?,
                    OverCommitment::Shares { shares, max } => {
                        write!(f, "{shares} shares, at most {max} allowed")?;
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
                write!(f, "pod {pod} holds shares on node {node}, which is unknown")
            }
            LedgerFinding::SeveralGrants { pod, nodes } => {
                let nodes: Vec<&str> = nodes.iter().map(NodeName::as_str).collect();
                write!(f, "pod {pod} has different grants, on {}", nodes.join(" and "))
            }
        }
    }
}

/// Why a grant was refused: everything that it conflicts with. Nothing was changed.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct GrantRefused {
    /// The conflicts, at least one: of the node first, then of its GPUs in the order of the node.
    pub conflicts: Vec<GrantConflict>,
}

/// One thing that a grant conflicts with: what it requests, and what is free.
///
/// The text names no other pod: it is for the author of the one that was refused.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum GrantConflict {
    /// The node of the grant is not known.
    #[error("node {node} is not known")]
    UnknownNode {
        /// Name of the node concerned.
        node: NodeName,
    },
    /// The node does not have a GPU of the grant.
    #[error("node {node} does not have GPU {gpu}")]
    UnknownGpu {
        /// Name of the node concerned.
        node: NodeName,
        /// UUID of the GPU concerned.
        gpu: GpuUuid,
    },
    /// The node has too little free CPU.
    #[error("node {node} has {free} free, {requested} requested")]
    HostCpu {
        /// Name of the node concerned.
        node: NodeName,
        /// Requested by the pod.
        requested: MilliCpu,
        /// Free for the pod.
        free: MilliCpu,
    },
    /// The node has too little free memory.
    #[error("node {node} has {free} of host memory free, {requested} requested")]
    HostMemory {
        /// Name of the node concerned.
        node: NodeName,
        /// Requested by the pod.
        requested: Bytes,
        /// Free for the pod.
        free: Bytes,
    },
    /// The GPU has too little free memory.
    #[error("GPU {gpu} has {free} of memory free for this pod, {requested} requested")]
    Memory {
        /// UUID of the GPU concerned.
        gpu: GpuUuid,
        /// Requested by all containers that run at the same time.
        requested: Bytes,
        /// Free for the pod.
        free: Bytes,
    },
    /// The GPU has too little free compute.
    #[error(
        "GPU {gpu} has {} % of its compute free for this pod, {} % requested", *.free / 1000, .requested.div_ceil(1000)
    )]
    Cores {
        /// UUID of the GPU concerned.
        gpu: GpuUuid,
        /// Requested by all containers that run at the same time, in thousandths of a percent.
        requested: u64,
        /// Free for the pod, in thousandths of a percent.
        free: u64,
    },
    /// The GPU is exclusive to another pod, or requested whole while other shares are on it.
    #[error(
        "GPU {gpu} is held or requested exclusively, but has other shares: {requested} requested, {others} held by others"
    )]
    Whole {
        /// UUID of the GPU concerned.
        gpu: GpuUuid,
        /// Number of shares that the grant requests.
        requested: u32,
        /// Shares of other pods on it.
        others: u32,
    },
    /// The GPU would have shares with and without a memory limit.
    #[error("GPU {gpu} would have shares with and without a memory limit, which cannot be combined")]
    MixedLimits {
        /// UUID of the GPU concerned.
        gpu: GpuUuid,
    },
    /// The GPU takes no more shares.
    #[error("GPU {gpu} has {free} of its {max} shares free, {requested} requested")]
    Shares {
        /// UUID of the GPU concerned.
        gpu: GpuUuid,
        /// Number of shares that the grant requests.
        requested: u32,
        /// Shares that the GPU still takes.
        free: u32,
        /// Maximum number of shares per GPU on the node.
        max: u32,
    },
    /// A share of the grant is larger than the card.
    #[error("GPU {gpu} has {card} of memory in total, a share of {requested} requested")]
    LargerThanCard {
        /// UUID of the GPU concerned.
        gpu: GpuUuid,
        /// Memory of the largest share requested.
        requested: Bytes,
        /// Memory of the card.
        card: Bytes,
    },
    /// Another pod holds a share larger than the card.
    #[error("GPU {gpu} is overcommitted: another pod holds a share larger than its memory, which is {card}")]
    OversizedNeighbor {
        /// UUID of the GPU concerned.
        gpu: GpuUuid,
        /// Memory of the card.
        card: Bytes,
    },
}

impl std::error::Error for GrantRefused {}

impl fmt::Display for GrantRefused {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        // One reason is enough to act on; a program reads all of them.
        match self.conflicts.first() {
            Some(first) => write!(f, "{first}"),
            None => f.write_str("the grant was refused"),
        }
    }
}

impl Ledger {
    /// Returns every contradiction in the ledger, in a stable order.
    pub fn audit(&self) -> Vec<LedgerFinding> {
        let mut findings: Vec<LedgerFinding> = Vec::new();
        for held in self.all_held() {
            let Some(node) = self.cluster.index_of(&held.grant.node) else {
                let node = held.grant.node.clone();
                findings.push(LedgerFinding::UnknownNode { pod: pod_name(held), node });
                continue;
            };
            let node = &self.cluster.node_capacity(node).node;
            for share in shares(&held.grant).filter(|share| node.gpu_index(&share.gpu).is_none()) {
                let (node, gpu) = (held.grant.node.clone(), share.gpu.clone());
                findings.push(LedgerFinding::UnknownGpu { pod: pod_name(held), node, gpu });
            }
        }
        for (uid, nodes) in &self.contradicted {
            if let Some(held) = self.held(uid) {
                let pod = pod_name(held);
                findings.push(LedgerFinding::SeveralGrants { pod, nodes: nodes.clone() });
            }
        }
        for (_, capacity) in self.cluster.nodes() {
            for (gpu, state) in capacity.node.gpus.iter().zip(&capacity.gpus) {
                let class = &self.cluster.classes()[usize::from(state.class)];
                for exceeded in exceeded_limits(state.used, class) {
                    let holders = self.holders(&capacity.node.name, &gpu.uuid);
                    findings.push(LedgerFinding::OverCommitted {
                        node: capacity.node.name.clone(),
                        gpu: gpu.uuid.clone(),
                        what: over_commitment(exceeded, state.used, class, &holders, &gpu.uuid),
                        pods: holders
                            .iter()
                            .map(|held| pod_name(held))
                            .collect::<BTreeSet<_>>()
                            .into_iter()
                            .collect(),
                    });
                }
            }
        }
        findings.sort_unstable();
        findings.dedup();
        findings
    }

    /// Returns the grants with shares of a GPU.
    fn holders(&self, node: &NodeName, gpu: &GpuUuid) -> Vec<&HeldGrant> {
        let on_node = self.by_node.get(node).into_iter().flatten().filter_map(|uid| self.held(uid));
        on_node.filter(|held| shares(&held.grant).any(|share| share.gpu == *gpu)).collect()
    }

    /// Examines whether a grant can be confirmed for a pod, in place of what the pod holds now.
    pub(super) fn examine(
        &self,
        uid: &PodUid,
        grant: &PodGrant,
        host: HostUsage,
    ) -> Result<(), GrantRefused> {
        let own = self.held(uid);
        if own.is_some_and(|own| own.grant == *grant && own.host == host) {
            return Ok(());
        }
        let own = own.filter(|own| own.grant.node == grant.node);
        let Some(node) = self.cluster.index_of(&grant.node) else {
            return Err(GrantRefused {
                conflicts: vec![GrantConflict::UnknownNode { node: grant.node.clone() }],
            });
        };
        let capacity = self.cluster.node_capacity(node);
        let mut conflicts = host_conflicts(capacity, own, host);
        let unknown: BTreeSet<&GpuUuid> = shares(grant)
            .map(|share| &share.gpu)
            .filter(|gpu| capacity.node.gpu_index(gpu).is_none())
            .collect();
        conflicts.extend(
            unknown
                .into_iter()
                .map(|gpu| GrantConflict::UnknownGpu { node: grant.node.clone(), gpu: gpu.clone() }),
        );
        for (gpu, requested) in peak_usage(&self.cluster, grant) {
            let state = &capacity.gpus[gpu];
            let class = &self.cluster.classes()[usize::from(state.class)];
            let others = state.used.minus(own.map(|own| own.usage_on(gpu)).unwrap_or_default());
            let uuid = &capacity.node.gpus[gpu].uuid;
            let exceeded = exceeded_limits(others.plus(requested), class);
            conflicts.extend(exceeded.map(|limit| conflict(limit, grant, uuid, requested, others, class)));
        }
        if conflicts.is_empty() { Ok(()) } else { Err(GrantRefused { conflicts }) }
    }
}

/// A limit of a GPU.
#[derive(Clone, Copy, Debug)]
enum GpuLimit {
    Whole,
    Memory,
    Cores,
    MixedLimits,
    Shares,
    Card,
}

/// Returns every limit that a GPU's usage exceeds.
fn exceeded_limits(used: GpuAllocation, class: &GpuClass) -> impl Iterator<Item = GpuLimit> {
    let whole = used.is_whole_and_shared();
    // A whole GPU with other shares on it is one mistake, not three.
    let memory = !whole && used.memory > class.allocatable.0;
    let cores = !whole && used.cores > WHOLE_CORES;
    let mixed = used.limited > 0 && used.unlimited > 0;
    [
        whole.then_some(GpuLimit::Whole),
        memory.then_some(GpuLimit::Memory),
        cores.then_some(GpuLimit::Cores),
        mixed.then_some(GpuLimit::MixedLimits),
        (used.shares > class.max_shares).then_some(GpuLimit::Shares),
        (used.oversized > 0).then_some(GpuLimit::Card),
    ]
    .into_iter()
    .flatten()
}

/// Describes a limit that a GPU's usage exceeds.
fn over_commitment(
    exceeded: GpuLimit,
    used: GpuAllocation,
    class: &GpuClass,
    holders: &[&HeldGrant],
    gpu: &GpuUuid,
) -> OverCommitment {
    match exceeded {
        GpuLimit::Whole => OverCommitment::Whole { shares: used.shares },
        GpuLimit::Memory => OverCommitment::Memory { granted: Bytes(used.memory), limit: class.allocatable },
        GpuLimit::Cores => OverCommitment::Cores { guaranteed: used.cores },
        GpuLimit::MixedLimits => OverCommitment::Mixed,
        GpuLimit::Shares => OverCommitment::Shares { shares: used.shares, max: class.max_shares },
        GpuLimit::Card => {
            let largest = holders.iter().map(|held| largest_share(&held.grant, gpu)).max();
            OverCommitment::Share { memory: largest.unwrap_or_default(), card: class.memory }
        }
    }
}

/// Describes a limit that a GPU's usage by others and by a grant together exceeds.
fn conflict(
    exceeded: GpuLimit,
    grant: &PodGrant,
    gpu: &GpuUuid,
    requested: GpuAllocation,
    others: GpuAllocation,
    class: &GpuClass,
) -> GrantConflict {
    let gpu = gpu.clone();
    match exceeded {
        GpuLimit::Whole => GrantConflict::Whole { gpu, requested: requested.shares, others: others.shares },
        GpuLimit::Memory => GrantConflict::Memory {
            gpu,
            requested: Bytes(requested.memory),
            free: Bytes(class.allocatable.0.saturating_sub(others.memory)),
        },
        GpuLimit::Cores => GrantConflict::Cores {
            gpu,
            requested: requested.cores,
            free: WHOLE_CORES.saturating_sub(others.cores),
        },
        GpuLimit::MixedLimits => GrantConflict::MixedLimits { gpu },
        GpuLimit::Shares => GrantConflict::Shares {
            gpu,
            requested: requested.shares,
            free: class.max_shares.saturating_sub(others.shares),
            max: class.max_shares,
        },
        GpuLimit::Card if requested.oversized > 0 => {
            let largest = largest_share(grant, &gpu);
            GrantConflict::LargerThanCard { gpu, requested: largest, card: class.memory }
        }
        GpuLimit::Card => GrantConflict::OversizedNeighbor { gpu, card: class.memory },
    }
}

/// Returns where the node has too little CPU or memory for a pod, not counting what the pod uses already.
fn host_conflicts(capacity: &NodeCapacity, own: Option<&HeldGrant>, host: HostUsage) -> Vec<GrantConflict> {
    let used = capacity.host_used.minus(own.map(|own| own.host).unwrap_or_default());
    let node = &capacity.node.name;
    let free_cpu = capacity.node.cpu_milli.map(|all| MilliCpu(all.0.saturating_sub(used.cpu().0)));
    let free_memory = capacity.node.memory_bytes.map(|all| Bytes(all.0.saturating_sub(used.memory().0)));
    let cpu = free_cpu.filter(|free| host.cpu() > *free);
    let memory = free_memory.filter(|free| host.memory() > *free);
    let cpu = cpu.map(|free| GrantConflict::HostCpu { node: node.clone(), requested: host.cpu(), free });
    let memory =
        memory.map(|free| GrantConflict::HostMemory { node: node.clone(), requested: host.memory(), free });
    cpu.into_iter().chain(memory).collect()
}

fn shares(grant: &PodGrant) -> impl Iterator<Item = &Share> {
    grant.grants.iter().flat_map(|grant| &grant.shares)
}

/// Returns the memory of the largest share of a GPU in a grant.
fn largest_share(grant: &PodGrant, gpu: &GpuUuid) -> Bytes {
    let of_gpu = shares(grant).filter(|share| share.gpu == *gpu);
    of_gpu.filter_map(|share| share.memory_bytes).max().unwrap_or_default()
}

fn pod_name(held: &HeldGrant) -> String {
    format!("{}/{}", held.pod.namespace, held.pod.name)
}
