//! Delays launches on a GPU until their container has the turn there and time left in it.
//!
//! Time is GPU time in nanoseconds. The container has spent a total (`spent`, in `usage`) and may have spent a total
//! (`allowed`, in `limits`, which the arbiter writes). A process takes time from the container in chunks
//! ([`TIME_CHUNK_NS`]), and its launches draw on that by the known cost of their kernels (`kernel_costs`): so a launch
//! usually costs one lookup, one comparison and one subtraction, all in the process's own memory.
//!
//! The last launch of a turn may draw more than there is, because a kernel cannot be interrupted: the excess is
//! subtracted from the turns that follow. Without an arbiter the container limits its own rate by the clock (`wait`).
#![allow(unsafe_code)]

pub(crate) mod capture;
pub(crate) mod graphs;
mod kernel_costs;
mod measure;
mod wait;

pub(crate) use kernel_costs::WorkKey;

use crate::hook::StreamVariant;
use crate::process::{self, GrantStatus, Process};
use capture::OpenCaptures;
use kernel_costs::{KernelCost, KernelCosts};
use measure::EventPairs;
use partage_driver_api::cuda::{CUDA_ERROR_NOT_PERMITTED, CUDA_SUCCESS, CUresult, CUstream};
use partage_region::MAX_GPUS;
#[cfg(doc)]
use partage_region::protocol::TIME_CHUNK_NS;
use std::sync::Mutex;
use std::sync::atomic::{AtomicI64, AtomicU32, AtomicU64, Ordering::Relaxed};

/// Range of the number of launches between two measurements of known kernels; a measurement makes four driver calls.
/// The number is random, so that a program's loop does not have the same kernel measured every time.
const MEASUREMENT_STRIDE: std::ops::Range<u32> = 192..448;

/// Unit of [`GpuThrottle::excess`]: one as a fixed-point number.
const EXCESS_UNIT: u32 = 1024;

/// State of a process's throttling.
#[derive(Default)]
pub(crate) struct Throttle {
    gpus: [GpuThrottle; MAX_GPUS],
    costs: KernelCosts,
    samples: Mutex<EventPairs>,
    captures: OpenCaptures,
    /// Number of measurements in progress.
    pending_measurements: AtomicU32,
    /// State of the random number generator.
    random: AtomicU32,
}

/// State of one GPU, on cache lines of its own: threads that launch on different GPUs do not share one.
#[derive(Default)]
#[repr(align(128))]
struct GpuThrottle {
    /// The turn that `budget` belongs to, as the word in `limits`.
    turn: AtomicU32,
    /// Nanoseconds taken from the container and not drawn yet.
    budget: AtomicI64,
    launches: AtomicU32,
    /// Launches until the next measurement.
    unmeasured: AtomicU32,
    /// Value of `launches` at the last check of whether work ends when expected.
    checked_at_launch: AtomicU32,
    /// Number of consecutive checks that found the work finished in time.
    trust: AtomicU32,
    /// How much longer than estimated work takes, beyond a factor of one, in units of [`EXCESS_UNIT`].
    excess: AtomicU32,
    /// Time at which this process first saw its current turn.
    turn_seen_at: AtomicU64,
    /// Amount charged for the chunk that was taken last.
    last_charge: AtomicU64,
    /// Predicted end of the submitted work, shared by the threads of this process.
    busy_until: AtomicU64,
    /// Ensures that one thread at a time takes a chunk.
    taking_chunk: Mutex<()>,
}

/// Work that is about to be submitted.
pub(crate) struct SubmittedWork {
    /// Identifies the kind of work, to recognize it later.
    pub(crate) key: WorkKey,
    pub(crate) stream: CUstream,
    pub(crate) variant: StreamVariant,
}

/// Submits work when it may run. `work` is called only if launches are throttled.
#[inline]
pub(crate) fn submit(work: impl FnOnce() -> SubmittedWork, launch: impl FnOnce() -> CUresult) -> CUresult {
    match process::grant_status() {
        GrantStatus::Granted(process) => match throttled_gpu(process) {
            None => launch(),
            Some(gpu) => process.throttle.throttle_launch(process, gpu, &work(), launch),
        },
        GrantStatus::Refused => CUDA_ERROR_NOT_PERMITTED,
    }
}

/// Returns whether launches of this process need the hook: not if none of its GPUs is throttled.
#[inline]
pub(crate) fn needed() -> bool {
    let Some(process) = process::attached() else { return true };
    let region = &process.region;
    match process.devices.only() {
        Some(gpu) => region.limits(gpu).waits_for_turns(),
        None => (0..region.gpus()).any(|gpu| region.limits(gpu).waits_for_turns()),
    }
}

/// Returns the GPU of the thread's context, if launches on it are throttled.
#[inline]
fn throttled_gpu(process: &Process) -> Option<usize> {
    process
        .devices
        .current_for_launch(&process.region)
        .filter(|&gpu| process.region.limits(gpu).waits_for_turns())
}

impl Throttle {
    #[inline]
    fn throttle_launch(
        &self,
        process: &Process,
        gpu: usize,
        work: &SubmittedWork,
        launch: impl FnOnce() -> CUresult,
    ) -> CUresult {
        let Some(here) = self.gpus.get(gpu) else { return launch() };
        if self.is_capturing() && capture::is_stream_captured(work.stream, work.variant) {
            // It is recorded, not run: its time is charged when the graph is launched.
            return launch();
        }
        let mut cost = self.costs.get(work.key);
        if !matches!(cost, KernelCost::Known(_)) {
            cost = self.refreshed_cost(process, work.key);
        }
        let nanoseconds = cost.nanoseconds().cast_signed();
        let in_turn = here.turn.load(Relaxed) == process.region.limits(gpu).turn().0;
        let paid = in_turn && here.budget.fetch_sub(nanoseconds, Relaxed) >= nanoseconds;
        if !paid {
            if in_turn {
                here.budget.fetch_add(nanoseconds, Relaxed);
            }
            self.wait_for_turn(process, gpu, work, nanoseconds);
        }
        // Two concurrent threads may count one launch: this only affects which of them is measured.
        here.launches.store(here.launches.load(Relaxed).wrapping_add(1), Relaxed);
        let unmeasured = here.unmeasured.load(Relaxed);
        here.unmeasured.store(unmeasured.wrapping_sub(1), Relaxed);
        let answer = match cost {
            KernelCost::Known(_) if unmeasured != 0 => launch(),
            _ => self.launch_measured(process, gpu, work, cost, launch),
        };
        if here.is_untrusted() && answer == CUDA_SUCCESS {
            self.probe(process, gpu, work);
        }
        if answer != CUDA_SUCCESS && !matches!(cost, KernelCost::Guessed(_)) {
            // It did not run: autotuners try launches that fail.
            here.budget.fetch_add(nanoseconds, Relaxed);
        }
        answer
    }

    /// Marks the cost of this kind of work as outdated.
    pub(crate) fn invalidate_cost(&self, key: WorkKey) {
        self.costs.invalidate(key);
    }

    /// Returns the number of launches until the next measurement.
    fn next_stride(&self) -> u32 {
        let mut random = self.random.load(Relaxed) | 1;
        random ^= random << 13;
        random ^= random >> 17;
        random ^= random << 5;
        self.random.store(random, Relaxed);
        MEASUREMENT_STRIDE.start + random % (MEASUREMENT_STRIDE.end - MEASUREMENT_STRIDE.start)
    }
}
