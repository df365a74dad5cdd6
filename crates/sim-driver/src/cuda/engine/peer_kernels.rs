//! Kernels that spin until their peers have begun, as the kernels of collective operations do.
//!
//! Such a kernel occupies its share of the GPU from when it begins until all ranks have begun theirs, and then for its
//! duration. How long it spins is unknown, so it takes the lane a quantum at a time, and its timeline is blocked. A
//! kernel that fills the GPU also keeps the kernels of other streams waiting. The [card thread](super::card_thread)
//! extends the lane and notices that the peers have begun.

use super::super::CudaError;
use super::super::device::Device;
use super::{BlockedOn, ExecutionEngine, FULL_GPU_SHARE, StreamOp};

/// The GPU time that a spinning kernel takes at a time, in nanoseconds.
const SPIN_QUANTUM: u64 = 80_000;

/// How far ahead of the GPU a spinning kernel takes its next quantum, in nanoseconds.
const SPIN_LOOKAHEAD: u64 = 40_000;

/// A launch of a kernel that waits for its peers.
#[derive(Clone, Copy)]
pub(in super::super) struct PeerKernel {
    /// The index of the group in the node's state.
    pub(in super::super) group: usize,
    /// The number of ranks.
    pub(in super::super) count: u64,
    /// Time in nanoseconds that it takes after all ranks have begun.
    pub(in super::super) duration: u64,
    /// The share of the GPU that it occupies.
    pub(in super::super) share: u32,
}

/// A peer kernel that has its place on the GPU and is not done.
pub(super) struct SpinningKernel {
    kernel: PeerKernel,
    timeline: usize,
    /// The position at which it begins.
    start: u64,
    /// The position up to which it has taken the lane.
    end: u64,
    /// Its number among the launches of its group, once it has begun.
    arrival: Option<u64>,
    /// Whether its end is known.
    is_done: bool,
}

impl StreamOp {
    /// Returns whether it needs multiprocessors.
    pub(super) fn is_kernel(&self) -> bool {
        match self {
            StreamOp::Kernel { duration, .. } => *duration > 0,
            StreamOp::GraphKernels(_) | StreamOp::PeerKernel(_) => true,
            _ => false,
        }
    }
}

impl ExecutionEngine {
    /// Returns whether a spinning kernel fills the GPU.
    pub(super) fn is_gpu_filled_by_spin(&self) -> bool {
        self.spinning.iter().any(|spin| spin.kernel.share >= FULL_GPU_SHARE)
    }

    /// Places a peer kernel that is not blocked.
    pub(super) fn place_peer_kernel(
        &mut self,
        timeline: usize,
        earliest: u64,
        kernel: PeerKernel,
    ) -> Result<(), CudaError> {
        if self.groups[self.timelines[timeline].group].closing {
            // The context is being destroyed: it does not wait for peers.
            let end = self.place_kernel(earliest, kernel.duration, kernel.share)?;
            self.extend_tail(timeline, end);
            return Ok(());
        }
        let end = self.place_kernel(earliest, SPIN_QUANTUM, kernel.share)?;
        let start = end - SPIN_QUANTUM;
        // The GPU reaches this position even if the quantum is shortened.
        self.record_launch(start + 1);
        self.spinning.push(SpinningKernel { kernel, timeline, start, end, arrival: None, is_done: false });
        self.block_on(timeline, BlockedOn::Peers);
        self.wake_card_thread(start);
        Ok(())
    }

    /// Advances all spinning kernels; returns whether one is done.
    pub(super) fn advance_spinning(&mut self) -> bool {
        if self.spinning.is_empty() {
            return false;
        }
        let (Some(lane), Some(device)) = (self.lane.as_mut(), self.device) else { return false };
        let Ok(served) = lane.refresh() else {
            // Their work is lost. Their timelines stay blocked: threads that wait get the error of the lane.
            self.spinning.clear();
            return false;
        };
        let state = &device.state;
        for index in 0..self.spinning.len() {
            let SpinningKernel { kernel, start, end, arrival, .. } = self.spinning[index];
            if arrival.is_none() && served > start {
                self.spinning[index].arrival = Some(state.arrive_at_peer_group(kernel.group));
            }
            let arrival = self.spinning[index].arrival;
            let is_met =
                arrival.is_some_and(|arrival| state.has_peer_group_met(kernel.group, arrival, kernel.count));
            let end = if is_met {
                served + kernel.duration
            } else if served + SPIN_LOOKAHEAD >= end {
                end.max(served) + SPIN_QUANTUM
            } else {
                continue;
            };
            // An error means that the GPU was lost, which the next call notices.
            let _ = self.set_spin_end(index, end);
            self.spinning[index].end = end;
            if is_met {
                let timeline = self.spinning[index].timeline;
                self.extend_tail(timeline, end);
                self.spinning[index].is_done = true;
                self.unblock(timeline);
            }
        }
        let before = self.spinning.len();
        self.spinning.retain(|spin| !spin.is_done);
        self.spinning.len() < before
    }

    /// Makes a spinning kernel end at `end`, which the GPU has not passed.
    fn set_spin_end(&mut self, index: usize, end: u64) -> Result<(), CudaError> {
        let is_alone = self.spinning.len() == 1;
        let SpinningKernel { kernel, end: before, .. } = self.spinning[index];
        let lane = self.lane.as_mut().ok_or(CudaError::INVALID_CONTEXT)?;
        if end < before && is_alone && lane.submitted() == before {
            // Nothing else needs the rest of the quantum.
            lane.truncate(end)?;
        }
        if end > lane.submitted() {
            lane.extend(end)?;
        }
        if kernel.share >= FULL_GPU_SHARE {
            self.concurrent.set_exclusive_until(end);
        } else {
            self.concurrent.occupy(before, end, kernel.share);
        }
        Ok(())
    }

    fn unblock(&mut self, timeline: usize) {
        if self.timelines[timeline].blocked_on.take().is_some() {
            self.unsettled.remove();
        }
    }

    /// Ends the spinning kernels for which `wanted` returns true of their timeline; returns whether there were any.
    fn finish_spinning(&mut self, wanted: impl Fn(usize) -> bool) -> bool {
        let all = std::mem::take(&mut self.spinning);
        let (ended, rest): (Vec<_>, Vec<_>) = all.into_iter().partition(|spin| wanted(spin.timeline));
        self.spinning = rest;
        for spin in &ended {
            self.extend_tail(spin.timeline, spin.end);
            self.unblock(spin.timeline);
        }
        !ended.is_empty()
    }

    /// Lets the kernels of a context end without their peers, because the context is being destroyed.
    pub(in super::super) fn stop_waiting_for_peers(&mut self, group: usize) {
        self.groups[group].closing = true;
        let of_group: Vec<bool> = self.timelines.iter().map(|timeline| timeline.group == group).collect();
        if self.finish_spinning(|timeline| of_group[timeline]) {
            self.advance();
        }
    }

    /// Lets kernels of a reopened context wait for their peers again.
    pub(in super::super) fn reopen_group(&mut self, group: usize) {
        self.groups[group].closing = false;
    }

    /// Returns the position at which a spinning kernel has to be advanced next.
    pub(super) fn next_spin_position(&self) -> Option<u64> {
        let next = |spin: &SpinningKernel| match spin.arrival {
            None => spin.start + 1,
            Some(_) => spin.end - SPIN_LOOKAHEAD,
        };
        self.spinning.iter().map(next).min()
    }
}

impl Device {
    /// Submits a kernel that waits until `count` ranks of the group with this key have begun theirs.
    pub(in super::super) fn peer_kernel(
        &self,
        key: u64,
        count: u64,
        duration: u64,
        share: u32,
    ) -> Result<PeerKernel, CudaError> {
        let group = self.state.open_peer_group(key).ok_or(CudaError::OUT_OF_MEMORY)?;
        Ok(PeerKernel { group, count, duration, share })
    }
}
