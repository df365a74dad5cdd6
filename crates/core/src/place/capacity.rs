//! What is left on each GPU.

use crate::model::{Bytes, Cores, Gpu, Link, Links, MilliCpu, Node, Share};
use std::sync::Arc;

/// The most GPUs one node may have: sets of GPUs are bits of one word.
pub const MAX_GPUS: usize = 64;

/// What GPUs of one kind have in common, as far as placing is concerned.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct GpuClass {
    /// Product name.
    pub model: String,
    /// Memory of the card.
    pub memory: Bytes,
    /// Memory that may be promised: more than the card has where the node overcommits.
    pub allocatable: Bytes,
    /// Slots for the AWS dialect.
    pub slots: u32,
    /// The most shares at once.
    pub max_shares: u32,
}

impl GpuClass {
    /// The class of a node's GPU.
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

/// What is taken of one GPU. Charges add up, and taking one back restores exactly what was there.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub struct Usage {
    /// Promised memory.
    pub memory: u64,
    /// Promised compute in thousandths of a percent.
    pub cores: u64,
    /// Shares held.
    pub shares: u32,
    /// Shares with a memory limit.
    pub limited: u32,
    /// Shares without a memory limit.
    pub unlimited: u32,
    /// Shares without a promise of compute: they still need something left to run on.
    pub uncounted: u32,
    /// Shares that want the GPU for themselves.
    pub whole: u32,
}

/// A share that claims more than so many times what may be promised of its card is counted as that much: it is
/// over-committed either way, which the audit reports, and sums stay far from where they would be cut.
const MOST_TIMES: u64 = 4;
/// More CPU (in thousandths) and host memory than any node has; claims beyond are counted as this much.
const MOST_CPU: u64 = 1 << 40;
const MOST_HOST_MEMORY: u64 = 1 << 46;

impl Usage {
    /// What a share takes of a GPU of this class.
    pub fn of_share(share: &Share, class: &GpuClass) -> Usage {
        if share.whole {
            return Usage::of_whole(class);
        }
        Usage {
            memory: share
                .memory_bytes
                .map_or(0, |memory| memory.0.min(class.allocatable.0.saturating_mul(MOST_TIMES))),
            cores: share.cores.map_or(0, |cores| cores.as_millipercent().into()),
            shares: 1,
            limited: u32::from(share.memory_bytes.is_some()),
            unlimited: u32::from(share.memory_bytes.is_none()),
            uncounted: u32::from(share.cores.is_none()),
            whole: 0,
        }
    }

    /// All of a GPU.
    pub fn of_whole(class: &GpuClass) -> Usage {
        Usage {
            memory: class.allocatable.0,
            cores: Cores::WHOLE.as_millipercent().into(),
            shares: 1,
            limited: 0,
            unlimited: 0,
            uncounted: 0,
            whole: 1,
        }
    }

    /// Both at once.
    pub fn plus(self, other: Usage) -> Usage {
        Usage {
            memory: self.memory.saturating_add(other.memory),
            cores: self.cores.saturating_add(other.cores),
            shares: self.shares.saturating_add(other.shares),
            limited: self.limited.saturating_add(other.limited),
            unlimited: self.unlimited.saturating_add(other.unlimited),
            uncounted: self.uncounted.saturating_add(other.uncounted),
            whole: self.whole.saturating_add(other.whole),
        }
    }

    /// This without the other.
    pub fn minus(self, other: Usage) -> Usage {
        Usage {
            memory: self.memory.saturating_sub(other.memory),
            cores: self.cores.saturating_sub(other.cores),
            shares: self.shares.saturating_sub(other.shares),
            limited: self.limited.saturating_sub(other.limited),
            unlimited: self.unlimited.saturating_sub(other.unlimited),
            uncounted: self.uncounted.saturating_sub(other.uncounted),
            whole: self.whole.saturating_sub(other.whole),
        }
    }

    /// Enough for either, when the two never hold at the same time (init containers and the running set).
    pub fn max(self, other: Usage) -> Usage {
        let most = Usage {
            memory: self.memory.max(other.memory),
            cores: self.cores.max(other.cores),
            shares: self.shares.max(other.shares),
            limited: self.limited.max(other.limited),
            unlimited: self.unlimited.max(other.unlimited),
            uncounted: self.uncounted.max(other.uncounted),
            whole: self.whole.max(other.whole),
        };
        if self.is_whole_and_shared() || other.is_whole_and_shared() || most.whole == 0 {
            return most;
        }
        // Whole at one time is whole at all times: nobody else can come in between.
        Usage { shares: 1, limited: 0, unlimited: 0, uncounted: 0, whole: 1, ..most }
    }

    /// Held whole with somebody else on it: only a wrong grant does that, and it must stay visible.
    pub fn is_whole_and_shared(self) -> bool {
        self.whole > 0 && self.shares > 1
    }
}

/// What a pod takes of the node itself.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub struct HostUsage {
    cpu: MilliCpu,
    memory: Bytes,
}

impl HostUsage {
    /// What a pod requests; absurd amounts are counted as the most there could be.
    pub fn new(cpu: MilliCpu, memory: Bytes) -> HostUsage {
        HostUsage { cpu: MilliCpu(cpu.0.min(MOST_CPU)), memory: Bytes(memory.0.min(MOST_HOST_MEMORY)) }
    }

    /// Both at once.
    pub fn plus(self, other: HostUsage) -> HostUsage {
        HostUsage {
            cpu: MilliCpu(self.cpu.0.saturating_add(other.cpu.0)),
            memory: Bytes(self.memory.0.saturating_add(other.memory.0)),
        }
    }

    /// CPU.
    pub fn cpu(self) -> MilliCpu {
        self.cpu
    }

    /// Memory.
    pub fn memory(self) -> Bytes {
        self.memory
    }

    /// This without the other.
    pub fn minus(self, other: HostUsage) -> HostUsage {
        HostUsage {
            cpu: MilliCpu(self.cpu.0.saturating_sub(other.cpu.0)),
            memory: Bytes(self.memory.0.saturating_sub(other.memory.0)),
        }
    }
}

/// One GPU and what is taken of it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct GpuCapacity {
    /// Its class in the cluster's list.
    pub class: u16,
    /// Listed but not offered.
    pub withheld: bool,
    /// What is taken.
    pub used: Usage,
}

impl GpuCapacity {
    /// Memory that can still be promised.
    pub fn free_memory(&self, class: &GpuClass) -> Bytes {
        Bytes(class.allocatable.0.saturating_sub(self.used.memory))
    }

    /// Compute that can still be promised.
    pub fn free_cores(&self) -> Cores {
        let used = u32::try_from(self.used.cores).unwrap_or(u32::MAX);
        let free = Cores::WHOLE.as_millipercent().saturating_sub(used);
        Cores::millipercent(free).unwrap_or(Cores::NONE)
    }

    /// Nothing taken and offered.
    pub fn is_free(&self) -> bool {
        !self.withheld && self.used.shares == 0
    }

    /// The part of this GPU that a proportionate share could still take, in thousandths.
    ///
    /// Memory and compute run out separately; what is left of the scarcer one counts. A GPU whose shares have
    /// no memory limit takes no limited share, so only its compute counts.
    pub fn idle_milli(&self, class: &GpuClass) -> u32 {
        if self.withheld || self.used.whole > 0 {
            return 0;
        }
        let cores = self.free_cores().as_millipercent() / 100;
        if self.used.unlimited > 0 || class.allocatable.0 == 0 {
            return cores;
        }
        let free = self.free_memory(class).0;
        // Bytes times a thousand fit a word up to 16 PiB; nobody has that on one card.
        let memory = free.saturating_mul(1000) / class.allocatable.0;
        cores.min(u32::try_from(memory).unwrap_or(1000))
    }
}

/// One node and what is taken of it.
#[derive(Clone, Debug)]
pub struct NodeCapacity {
    /// What the node is.
    pub node: Arc<Node>,
    /// Its GPUs.
    pub gpus: Vec<GpuCapacity>,
    /// CPU and host memory taken, whether or not the node's own are known.
    pub host_used: HostUsage,
    /// No longer there; its index waits for another node.
    pub(super) removed: bool,
    /// When its GPUs last changed: a decision taken before names other GPUs by the same indexes.
    pub(super) layout: u64,
    /// For each kind of link, best first: the group every GPU belongs to when all links up to it are followed.
    pub(super) groups: Arc<[Vec<u8>; Link::ALL.len()]>,
}

impl NodeCapacity {
    /// An empty node whose GPUs' classes are given in order.
    pub(super) fn new(node: Arc<Node>, classes: &[u16], layout: u64) -> NodeCapacity {
        let gpus = node.gpus.iter().zip(classes);
        NodeCapacity {
            gpus: gpus
                .map(|(gpu, &class)| GpuCapacity {
                    class,
                    withheld: gpu.withheld.is_some(),
                    used: Usage::default(),
                })
                .collect(),
            host_used: HostUsage::default(),
            removed: false,
            layout,
            groups: Arc::new(Link::ALL.map(|link| groups_up_to(&node, link))),
            node,
        }
    }

    /// Everything about the node that can make a difference to a pod that names no GPU by UUID.
    pub(crate) fn state(&self) -> NodeState<'_> {
        NodeState {
            gpus: &self.gpus,
            cpu: self.free_cpu(),
            memory: self.free_memory(),
            links: self.node.links.as_ref(),
            groups: &self.groups,
        }
    }

    /// CPU left; `None` = not counted.
    pub fn free_cpu(&self) -> Option<MilliCpu> {
        self.node.cpu_milli.map(|all| MilliCpu(all.0.saturating_sub(self.host_used.cpu.0)))
    }

    /// Host memory left; `None` = not counted.
    pub fn free_memory(&self) -> Option<Bytes> {
        self.node.memory_bytes.map(|all| Bytes(all.0.saturating_sub(self.host_used.memory.0)))
    }
}

/// A node's state: two nodes of one state are the same to a pod.
#[derive(PartialEq, Eq, Hash)]
pub(crate) struct NodeState<'a> {
    gpus: &'a [GpuCapacity],
    cpu: Option<MilliCpu>,
    memory: Option<Bytes>,
    links: Option<&'a Links>,
    // Where links are not given they follow from the NUMA nodes, which these groups show.
    groups: &'a [Vec<u8>; Link::ALL.len()],
}

/// Numbers the groups of GPUs that reach each other by links at least as good as `worst`; a group's number is
/// its lowest GPU.
fn groups_up_to(node: &Node, worst: Link) -> Vec<u8> {
    let mut group: Vec<u8> = (0..node.gpus.len().min(MAX_GPUS)).map(|gpu| gpu as u8).collect();
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
