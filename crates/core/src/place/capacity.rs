//! The capacity of GPUs and nodes, and how much of it is in use.

use crate::model::{Bytes, Cores, Gpu, GpuLink, LinkMatrix, MAX_GPUS_PER_NODE, MilliCpu, Node, Share};
use std::sync::Arc;

/// The properties of a GPU model on a node that matter for placement.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct GpuClass {
    /// Product name of the GPUs.
    pub model: String,
    /// Memory of the card.
    pub memory: Bytes,
    /// Memory that may be granted: more than the card has if the node overcommits.
    pub allocatable: Bytes,
    /// Slots per GPU for the AWS dialect.
    pub slots: u32,
    /// Maximum number of shares at the same time.
    pub max_shares: u32,
}

impl GpuClass {
    /// Returns the class of a node's GPU.
    pub fn of(node: &Node, gpu: &Gpu) -> GpuClass {
        GpuClass {
            model: gpu.model.clone(),
            memory: gpu.memory_bytes,
            allocatable: node.memory_overcommit_percent.of(gpu.memory_bytes),
            slots: node.slots_per_gpu.max(1),
            max_shares: node.max_shares_per_gpu.unwrap_or(u32::MAX),
        }
    }
}

/// How much of one GPU is in use. Usages add up, and subtracting one restores exactly what was there before.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub struct GpuAllocation {
    /// Granted memory in bytes.
    pub memory: u64,
    /// Guaranteed compute in thousandths of a percent of one GPU.
    pub cores: u64,
    /// Number of shares on the GPU.
    pub shares: u32,
    /// Number of shares with a memory limit.
    pub limited: u32,
    /// Number of shares without a memory limit.
    pub unlimited: u32,
    /// Number of shares without guaranteed compute. They still need some compute left to run on.
    pub uncounted: u32,
    /// Number of shares that require the GPU for themselves.
    pub whole: u32,
    /// Number of shares that are larger than the card: only an invalid grant has one.
    pub oversized: u32,
}

/// A share that claims more than this multiple of its GPU's allocatable memory is counted as this much. It is
/// overcommitted either way, which the audit reports, and sums stay far from saturation.
const MAX_CLAIM_FACTOR: u64 = 4;
/// Upper bound for the CPU (in thousandths) of one pod; larger claims are counted as this much.
const MAX_HOST_CPU: u64 = 1 << 40;
/// Upper bound for the host memory of one pod; larger claims are counted as this much.
const MAX_HOST_MEMORY: u64 = 1 << 46;

impl GpuAllocation {
    /// Returns what a share uses of a GPU of this class.
    pub fn of_share(share: &Share, class: &GpuClass) -> GpuAllocation {
        let oversized = u32::from(share.memory_bytes.is_some_and(|memory| memory > class.memory));
        if share.whole {
            return GpuAllocation { oversized, ..GpuAllocation::of_whole(class) };
        }
        GpuAllocation {
            memory: share
                .memory_bytes
                .map_or(0, |memory| memory.0.min(class.allocatable.0.saturating_mul(MAX_CLAIM_FACTOR))),
            cores: share.cores.map_or(0, |cores| cores.as_millipercent().into()),
            shares: 1,
            limited: u32::from(share.memory_bytes.is_some()),
            unlimited: u32::from(share.memory_bytes.is_none()),
            uncounted: u32::from(share.cores.is_none()),
            whole: 0,
            oversized,
        }
    }

    /// Returns the usage of a whole GPU.
    pub fn of_whole(class: &GpuClass) -> GpuAllocation {
        GpuAllocation {
            memory: class.allocatable.0,
            cores: Cores::WHOLE.as_millipercent().into(),
            shares: 1,
            whole: 1,
            ..GpuAllocation::default()
        }
    }

    /// Returns the sum of both.
    pub fn plus(self, other: GpuAllocation) -> GpuAllocation {
        GpuAllocation {
            memory: self.memory.saturating_add(other.memory),
            cores: self.cores.saturating_add(other.cores),
            shares: self.shares.saturating_add(other.shares),
            limited: self.limited.saturating_add(other.limited),
            unlimited: self.unlimited.saturating_add(other.unlimited),
            uncounted: self.uncounted.saturating_add(other.uncounted),
            whole: self.whole.saturating_add(other.whole),
            oversized: self.oversized.saturating_add(other.oversized),
        }
    }

    /// Subtracts the usage of `other`, stopping at zero.
    pub fn minus(self, other: GpuAllocation) -> GpuAllocation {
        GpuAllocation {
            memory: self.memory.saturating_sub(other.memory),
            cores: self.cores.saturating_sub(other.cores),
            shares: self.shares.saturating_sub(other.shares),
            limited: self.limited.saturating_sub(other.limited),
            unlimited: self.unlimited.saturating_sub(other.unlimited),
            uncounted: self.uncounted.saturating_sub(other.uncounted),
            whole: self.whole.saturating_sub(other.whole),
            oversized: self.oversized.saturating_sub(other.oversized),
        }
    }

    /// Returns the usage that covers either, for two that never apply at the same time (an init container and the
    /// containers that run after it).
    pub fn max(self, other: GpuAllocation) -> GpuAllocation {
        let most = GpuAllocation {
            memory: self.memory.max(other.memory),
            cores: self.cores.max(other.cores),
            shares: self.shares.max(other.shares),
            limited: self.limited.max(other.limited),
            unlimited: self.unlimited.max(other.unlimited),
            uncounted: self.uncounted.max(other.uncounted),
            whole: self.whole.max(other.whole),
            oversized: self.oversized.max(other.oversized),
        };
        if self.is_whole_and_shared() || other.is_whole_and_shared() || most.whole == 0 {
            return most;
        }
        // A GPU that is held whole at one time is held whole at all times: no other pod can use it in between.
        GpuAllocation { shares: 1, limited: 0, unlimited: 0, uncounted: 0, whole: 1, ..most }
    }

    /// Returns whether the GPU is held whole while another share is on it. Only an invalid grant does that, and it
    /// must stay visible to the audit.
    pub fn is_whole_and_shared(self) -> bool {
        self.whole > 0 && self.shares > 1
    }
}

/// CPU and host memory that pods use of a node.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub struct HostUsage {
    cpu: MilliCpu,
    memory: Bytes,
}

impl HostUsage {
    /// Returns what a pod requests, bounded to amounts that sums can hold.
    pub fn new(cpu: MilliCpu, memory: Bytes) -> HostUsage {
        HostUsage { cpu: MilliCpu(cpu.0.min(MAX_HOST_CPU)), memory: Bytes(memory.0.min(MAX_HOST_MEMORY)) }
    }

    /// Returns the sum of both.
    pub fn plus(self, other: HostUsage) -> HostUsage {
        HostUsage {
            cpu: MilliCpu(self.cpu.0.saturating_add(other.cpu.0)),
            memory: Bytes(self.memory.0.saturating_add(other.memory.0)),
        }
    }

    /// Subtracts the usage of `other`, stopping at zero.
    pub fn minus(self, other: HostUsage) -> HostUsage {
        HostUsage {
            cpu: MilliCpu(self.cpu.0.saturating_sub(other.cpu.0)),
            memory: Bytes(self.memory.0.saturating_sub(other.memory.0)),
        }
    }

    /// Returns the CPU in use.
    pub fn cpu(self) -> MilliCpu {
        self.cpu
    }

    /// Returns the host memory in use.
    pub fn memory(self) -> Bytes {
        self.memory
    }
}

/// One GPU and how much of it is in use.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct GpuCapacity {
    /// Index of its class in [`ClusterCapacity::classes`](super::ClusterCapacity::classes).
    pub class: u16,
    /// Listed but not offered, because it is unhealthy or in another mode.
    pub withheld: bool,
    /// The allocated part of the capacity.
    pub used: GpuAllocation,
}

impl GpuCapacity {
    /// Returns the memory that can still be granted.
    pub fn free_memory(&self, class: &GpuClass) -> Bytes {
        Bytes(class.allocatable.0.saturating_sub(self.used.memory))
    }

    /// Returns the compute that can still be guaranteed.
    pub fn free_cores(&self) -> Cores {
        let used = u32::try_from(self.used.cores).unwrap_or(u32::MAX);
        let free = Cores::WHOLE.as_millipercent().saturating_sub(used);
        Cores::millipercent(free).unwrap_or(Cores::NONE)
    }

    /// Returns whether the GPU is offered and no share is on it.
    pub fn is_free(&self) -> bool {
        !self.withheld && self.used.shares == 0
    }

    /// Returns the part of this GPU that a share of as much memory as compute could still take.
    ///
    /// Memory and compute run out separately; what is left of the scarcer one counts. A GPU whose shares have no
    /// memory limit takes no limited share, so only its compute counts.
    pub fn idle(&self, class: &GpuClass) -> Cores {
        if self.withheld || self.used.whole > 0 {
            return Cores::NONE;
        }
        let cores = self.free_cores();
        if self.used.unlimited > 0 || class.allocatable.0 == 0 {
            return cores;
        }
        let memory = proportion(self.free_memory(class).0, class.allocatable.0);
        cores.min(Cores::millipercent(memory).unwrap_or(Cores::WHOLE))
    }
}

/// Returns which part of `whole` an amount up to `whole` is, in thousandths of a percent, rounded down.
pub(super) fn proportion(part: u64, whole: u64) -> u32 {
    // A factor of 17 bits leaves 47; amounts of 128 TiB and more lose their lowest bits.
    let excess = 17u32.saturating_sub(whole.leading_zeros());
    let all = u64::from(Cores::WHOLE.as_millipercent());
    let proportion = ((part >> excess) * all).checked_div(whole >> excess).unwrap_or(all);
    u32::try_from(proportion.min(all)).unwrap_or(Cores::WHOLE.as_millipercent())
}

/// One node and how much of it is in use.
#[derive(Clone, Debug)]
pub struct NodeCapacity {
    /// The node's inventory and settings.
    pub node: Arc<Node>,
    /// Its GPUs, in the order of the inventory.
    pub gpus: Vec<GpuCapacity>,
    /// CPU and host memory in use, whether or not the node's totals are known.
    pub host_used: HostUsage,
    /// The node was removed; its index will be given to the next new node.
    pub(super) removed: bool,
    /// Identifies the inventory: a decision made for another inventory means other GPUs by the same indexes.
    pub(super) inventory: u64,
    /// For each kind of link, best first: the group of each GPU when all links at least as good are followed.
    pub(super) groups: Arc<[Vec<u8>; GpuLink::ALL.len()]>,
}

impl NodeCapacity {
    /// Returns a node with nothing in use. The classes of its GPUs are given in order.
    pub(super) fn new(node: Arc<Node>, classes: &[u16], inventory: u64) -> NodeCapacity {
        let gpus = node.gpus.iter().zip(classes);
        NodeCapacity {
            gpus: gpus
                .map(|(gpu, &class)| GpuCapacity {
                    class,
                    withheld: gpu.withheld.is_some(),
                    used: GpuAllocation::default(),
                })
                .collect(),
            host_used: HostUsage::default(),
            removed: false,
            inventory,
            groups: Arc::new(GpuLink::ALL.map(|link| groups_up_to(&node, link))),
            node,
        }
    }

    /// Returns everything about the node that can matter to a pod that names no GPU by UUID.
    pub(crate) fn state(&self) -> NodeState<'_> {
        NodeState {
            gpus: &self.gpus,
            cpu: self.free_cpu(),
            memory: self.free_memory(),
            links: self.node.links.as_ref(),
            groups: &self.groups,
        }
    }

    /// Returns the free CPU, or `None` if the node's CPU is not counted.
    pub fn free_cpu(&self) -> Option<MilliCpu> {
        self.node.cpu_milli.map(|all| MilliCpu(all.0.saturating_sub(self.host_used.cpu.0)))
    }

    /// Returns the free host memory, or `None` if the node's memory is not counted.
    pub fn free_memory(&self) -> Option<Bytes> {
        self.node.memory_bytes.map(|all| Bytes(all.0.saturating_sub(self.host_used.memory.0)))
    }
}

/// A node's state: a pod that names no GPU by UUID cannot tell two nodes of equal state apart.
#[derive(PartialEq, Eq, Hash)]
pub(crate) struct NodeState<'a> {
    gpus: &'a [GpuCapacity],
    cpu: Option<MilliCpu>,
    memory: Option<Bytes>,
    links: Option<&'a LinkMatrix>,
    // Links that are not given are derived from NUMA nodes, which these groups reflect.
    groups: &'a [Vec<u8>; GpuLink::ALL.len()],
}

/// Groups the GPUs that reach each other by links at least as good as `worst`. A group's number is its lowest GPU.
fn groups_up_to(node: &Node, worst: GpuLink) -> Vec<u8> {
    let mut group: Vec<u8> = (0..node.gpus.len().min(MAX_GPUS_PER_NODE)).map(|gpu| gpu as u8).collect();
    for a in 0..group.len() {
        for b in 0..a {
            if node.link(a, b) <= worst && group[a] != group[b] {
                let (low, high) = (group[a].min(group[b]), group[a].max(group[b]));
                for member in &mut group {
                    if *member == high {
                        *member = low;
                    }
                }
            }
        }
    }
    group
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn proportions_are_rounded_down_and_do_not_overflow() {
        for (part, whole, expected) in [
            (0, 40 << 30, 0),
            (1, 3, 33_333),
            (2, 3, 66_666),
            (10 << 30, 40 << 30, 25_000),
            ((40 << 30) - 1, 40 << 30, 99_999),
            (40 << 30, 40 << 30, 100_000),
            (1 << 49, 1 << 50, 50_000),
            (u64::MAX, u64::MAX, 100_000),
            (0, 0, 100_000),
        ] {
            assert_eq!(proportion(part, whole), expected, "{part} of {whole}");
        }
    }
}
