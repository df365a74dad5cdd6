//! A node reduced to what scoring needs: CPU and memory left, and each GPU's idle thousandths.
//!
//! Scores look at many hypothetical nodes; a sketch is cheap to copy and to change, and it measures every part
//! of a GPU on one scale, whatever mix of memory and compute it is made of.

use super::fit::{Need, Prepared};
use super::room::{GpuClass, GpuRoom, MAX_GPUS, NodeRoom};
use crate::model::Cores;

/// More thousandths than any GPU has: the size of what a GPU may never take.
pub const NEVER: u16 = u16::MAX;

/// A node as far as scoring goes.
#[derive(Clone, Copy, Debug)]
pub struct Sketch {
    /// CPU left in thousandths; endless where the node's is unknown.
    pub cpu: f64,
    /// Host memory left in bytes; endless where the node's is unknown.
    pub memory: f64,
    /// GPUs.
    pub gpus: usize,
    /// Idle thousandths of each GPU.
    pub idle: [u16; MAX_GPUS],
    /// The class of each GPU.
    pub class: [u16; MAX_GPUS],
}

impl Sketch {
    /// Of a node as it is.
    pub fn of(room: &NodeRoom, classes: &[GpuClass]) -> Sketch {
        let mut sketch = Sketch {
            cpu: room.free_cpu().map_or(f64::INFINITY, |cpu| cpu.0 as f64),
            memory: room.free_memory().map_or(f64::INFINITY, |memory| memory.0 as f64),
            gpus: room.gpus.len().min(MAX_GPUS),
            idle: [0; MAX_GPUS],
            class: [0; MAX_GPUS],
        };
        for (at, gpu) in room.gpus.iter().enumerate().take(MAX_GPUS) {
            sketch.idle[at] = idle(gpu, classes);
            sketch.class[at] = gpu.class;
        }
        sketch
    }

    /// Takes a pod's CPU and memory off.
    pub fn take_host(&mut self, prepared: &Prepared) {
        self.cpu -= prepared.ask.cpu.0 as f64;
        self.memory -= prepared.ask.memory.0 as f64;
    }

    /// Takes a part off a GPU.
    pub fn take_part(&mut self, at: usize, gpu: &GpuRoom, need: &Need, classes: &[GpuClass]) {
        let after = GpuRoom { used: gpu.used.plus(need.charge), ..*gpu };
        self.idle[at] = idle(&after, classes);
    }

    /// Idle thousandths of all GPUs together.
    pub fn idle_sum(&self) -> u32 {
        self.idle[..self.gpus].iter().map(|&idle| u32::from(idle)).sum()
    }

    /// The GPUs, in order, as idle thousandths and class.
    pub fn gpus(&self) -> impl Iterator<Item = (u16, usize)> {
        self.idle[..self.gpus]
            .iter()
            .zip(&self.class[..self.gpus])
            .map(|(&idle, &class)| (idle, usize::from(class)))
    }

    /// The class of all GPUs, where there is but one.
    pub fn only_class(&self) -> Option<usize> {
        let (first, rest) = self.class[..self.gpus].split_first()?;
        rest.iter().all(|class| class == first).then_some(usize::from(*first))
    }
}

fn idle(gpu: &GpuRoom, classes: &[GpuClass]) -> u16 {
    gpu.idle_milli(&classes[usize::from(gpu.class)]) as u16
}

/// How many thousandths of a GPU a part takes: its memory or its compute, whichever is more.
pub fn milli(need: &Need, class: &GpuClass) -> u16 {
    if need.too_large {
        return NEVER;
    }
    let whole = u64::from(Cores::WHOLE.as_millipercent());
    let cores = (need.charge.cores * 1000).div_ceil(whole);
    let memory = u128::from(need.charge.memory) * 1000;
    let memory = memory.div_ceil(u128::from(class.promised.0.max(1)));
    u16::try_from(memory.max(u128::from(cores)).clamp(1, 1000)).unwrap_or(1000)
}
