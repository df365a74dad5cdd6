//! A node reduced to what scoring needs: free CPU and memory, and the idle part of each GPU.
//!
//! Scores look at many hypothetical nodes. A capacity vector is cheap to copy and to change, and it measures every
//! share on one scale, whatever combination of memory and compute it is: thousandths of a percent of one GPU, the
//! unit of [`Cores`].

use super::capacity::{GpuAllocation, GpuCapacity, GpuClass, NodeCapacity, proportion};
use super::fit::{PreparedAsk, ShareNeed};
use crate::model::{Cores, MAX_GPUS_PER_NODE};

/// All of a GPU, in thousandths of a percent.
pub(crate) const WHOLE_GPU: u32 = Cores::WHOLE.as_millipercent();
/// The size of a share that a GPU can never take: larger than any GPU.
pub(crate) const NEVER_FITS: u32 = u32::MAX;
/// Stands for the CPU or memory of a node that does not count it: more than any node has.
pub(crate) const UNCOUNTED: i64 = 1 << 56;

/// A node as scores see it.
#[derive(Clone, Copy, Debug)]
pub(crate) struct CapacityVector {
    /// Free CPU in thousandths; [`UNCOUNTED`] if the node's CPU is unknown.
    pub(crate) cpu: i64,
    /// Free host memory in bytes; [`UNCOUNTED`] if the node's memory is unknown.
    pub(crate) memory: i64,
    /// Number of GPUs of the node.
    pub(crate) gpus: usize,
    /// The idle part of each GPU in thousandths of a percent.
    pub(crate) idle: [u32; MAX_GPUS_PER_NODE],
    /// The class of each GPU.
    pub(crate) class: [u16; MAX_GPUS_PER_NODE],
}

impl CapacityVector {
    /// Returns the vector of a node as it is.
    pub(crate) fn of(capacity: &NodeCapacity, classes: &[GpuClass]) -> CapacityVector {
        let mut vector = CapacityVector {
            cpu: capacity.free_cpu().map_or(UNCOUNTED, |cpu| host_amount(cpu.0)),
            memory: capacity.free_memory().map_or(UNCOUNTED, |memory| host_amount(memory.0)),
            gpus: capacity.gpus.len().min(MAX_GPUS_PER_NODE),
            idle: [0; MAX_GPUS_PER_NODE],
            class: [0; MAX_GPUS_PER_NODE],
        };
        for (at, gpu) in capacity.gpus.iter().enumerate().take(MAX_GPUS_PER_NODE) {
            vector.idle[at] = idle(gpu, classes);
            vector.class[at] = gpu.class;
        }
        vector
    }

    /// Subtracts a pod's CPU and memory.
    pub(crate) fn take_host(&mut self, prepared: &PreparedAsk) {
        self.cpu -= host_amount(prepared.ask.cpu.0);
        self.memory -= host_amount(prepared.ask.memory.0);
    }

    /// Subtracts a share from a GPU.
    pub(crate) fn take_share(
        &mut self,
        at: usize,
        gpu: &GpuCapacity,
        need: &ShareNeed,
        classes: &[GpuClass],
    ) {
        self.take_usage(at, gpu, need.usage, classes);
    }

    /// Subtracts usage from a GPU.
    pub(crate) fn take_usage(
        &mut self,
        at: usize,
        gpu: &GpuCapacity,
        usage: GpuAllocation,
        classes: &[GpuClass],
    ) {
        let after = GpuCapacity { used: gpu.used.plus(usage), ..*gpu };
        self.idle[at] = idle(&after, classes);
    }

    /// Returns the sum of the idle parts of all GPUs, in thousandths of a percent of one GPU.
    pub(crate) fn idle_sum(&self) -> u32 {
        // 64 GPUs of 100,000 fit a word many times over.
        self.idle[..self.gpus].iter().sum()
    }

    /// Returns the idle part and the class of each GPU, in order.
    pub(crate) fn gpus(&self) -> impl Iterator<Item = (u32, usize)> {
        let classes = self.class[..self.gpus].iter().map(|&class| usize::from(class));
        self.idle[..self.gpus].iter().copied().zip(classes)
    }
}

/// Converts an amount of CPU or host memory to the range of scores.
pub(crate) fn host_amount(amount: u64) -> i64 {
    i64::try_from(amount).unwrap_or(UNCOUNTED).min(UNCOUNTED)
}

fn idle(gpu: &GpuCapacity, classes: &[GpuClass]) -> u32 {
    gpu.idle(&classes[usize::from(gpu.class)]).as_millipercent()
}

/// Returns how much of a GPU a share takes: its part of the memory or of the compute, whichever is larger, in
/// thousandths of a percent; [`NEVER_FITS`] if the GPU is too small.
pub(crate) fn size_on(need: &ShareNeed, class: &GpuClass) -> u32 {
    if need.too_large {
        return NEVER_FITS;
    }
    let cores = u32::try_from(need.usage.cores).unwrap_or(WHOLE_GPU);
    let memory = need.usage.memory.min(class.allocatable.0);
    // The remainder is rounded down, so the amount taken is rounded up.
    let memory = WHOLE_GPU - proportion(class.allocatable.0 - memory, class.allocatable.0);
    memory.max(cores).clamp(1, WHOLE_GPU)
}
