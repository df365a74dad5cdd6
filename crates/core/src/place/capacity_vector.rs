//! A node reduced to what scoring needs: CPU and memory left, and each GPU's idle thousandths.
//!
//! Scores look at many hypothetical nodes; a sketch is cheap to copy and to change, and it measures every part
//! of a GPU on one scale, whatever mix of memory and compute it is made of.

use super::capacity::{GpuCapacity, GpuClass, NodeCapacity, Usage};
use super::fit::{PreparedAsk, ShareNeed};
use crate::model::{Cores, MAX_GPUS_PER_NODE};

/// More thousandths than any GPU has: the size of what a GPU may never take.
pub(crate) const NEVER: u16 = u16::MAX;
/// More CPU or memory than any node has.
pub(crate) const ENDLESS: i64 = 1 << 56;

/// A node as far as scoring goes.
#[derive(Clone, Copy, Debug)]
pub(crate) struct CapacityVector {
    /// CPU left in thousandths; [`ENDLESS`] where the node's is unknown.
    pub(crate) cpu: i64,
    /// Host memory left in bytes; [`ENDLESS`] where the node's is unknown.
    pub(crate) memory: i64,
    /// GPUs.
    pub(crate) gpus: usize,
    /// Idle thousandths of each GPU.
    pub(crate) idle: [u16; MAX_GPUS_PER_NODE],
    /// The class of each GPU.
    pub(crate) class: [u16; MAX_GPUS_PER_NODE],
}

impl CapacityVector {
    /// Of a node as it is.
    pub(crate) fn of(capacity: &NodeCapacity, classes: &[GpuClass]) -> CapacityVector {
        let mut sketch = CapacityVector {
            cpu: capacity.free_cpu().map_or(ENDLESS, |cpu| amount(cpu.0)),
            memory: capacity.free_memory().map_or(ENDLESS, |memory| amount(memory.0)),
            gpus: capacity.gpus.len().min(MAX_GPUS_PER_NODE),
            idle: [0; MAX_GPUS_PER_NODE],
            class: [0; MAX_GPUS_PER_NODE],
        };
        for (at, gpu) in capacity.gpus.iter().enumerate().take(MAX_GPUS_PER_NODE) {
            sketch.idle[at] = idle(gpu, classes);
            sketch.class[at] = gpu.class;
        }
        sketch
    }

    /// Takes a pod's CPU and memory off.
    pub(crate) fn take_host(&mut self, prepared: &PreparedAsk) {
        self.cpu -= amount(prepared.ask.cpu.0);
        self.memory -= amount(prepared.ask.memory.0);
    }

    /// Takes a part off a GPU.
    pub(crate) fn take_part(&mut self, at: usize, gpu: &GpuCapacity, need: &ShareNeed, classes: &[GpuClass]) {
        self.take_usage(at, gpu, need.usage, classes);
    }

    /// Takes a charge off a GPU.
    pub(crate) fn take_usage(&mut self, at: usize, gpu: &GpuCapacity, usage: Usage, classes: &[GpuClass]) {
        let after = GpuCapacity { used: gpu.used.plus(usage), ..*gpu };
        self.idle[at] = idle(&after, classes);
    }

    /// Idle thousandths of all GPUs together.
    pub(crate) fn idle_sum(&self) -> u32 {
        self.idle[..self.gpus].iter().map(|&idle| u32::from(idle)).sum()
    }

    /// The GPUs, in order, as idle thousandths and class.
    pub(crate) fn gpus(&self) -> impl Iterator<Item = (u16, usize)> {
        self.idle[..self.gpus]
            .iter()
            .zip(&self.class[..self.gpus])
            .map(|(&idle, &class)| (idle, usize::from(class)))
    }
}

/// An amount as scores count it; beyond [`ENDLESS`] there is no telling apart.
pub(crate) fn amount(amount: u64) -> i64 {
    i64::try_from(amount).unwrap_or(ENDLESS).min(ENDLESS)
}

fn idle(gpu: &GpuCapacity, classes: &[GpuClass]) -> u16 {
    gpu.idle_milli(&classes[usize::from(gpu.class)]) as u16
}

/// How many thousandths of a GPU a part takes: its memory or its compute, whichever is more.
pub(crate) fn milli(need: &ShareNeed, class: &GpuClass) -> u16 {
    if need.too_large {
        return NEVER;
    }
    let whole = u64::from(Cores::WHOLE.as_millipercent());
    let cores = (need.usage.cores * 1000).div_ceil(whole);
    let memory = u128::from(need.usage.memory) * 1000;
    let memory = memory.div_ceil(u128::from(class.allocatable.0.max(1)));
    u16::try_from(memory.max(u128::from(cores)).clamp(1, 1000)).unwrap_or(1000)
}
