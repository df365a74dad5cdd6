//! Delays launches on a GPU until their container has the turn there and time left in it.
//!
//! Time is the GPU's own, in nanoseconds. The container has spent so much of it (`spent`, in `usage`) and may have spent so
//! much (`allowed`, in `limits`, which the arbiter writes). A process takes time from the container in chunks ([`TIME_CHUNK_NS`]) and its
//! launches draw on that, each by what its kernel is known to take ([`costs`]): so a launch usually costs one lookup, one
//! comparison and one subtraction, all in the process's own memory.
//!
//! The last launch of a turn may draw more than there is, because a kernel cannot be cut: what is too much is missing in the
//! turns that follow. Without an arbiter the container deals with its share by the clock itself ([`turns`]).
#![allow(unsafe_code)]

pub(crate) mod capture;
pub(crate) mod graphs;
mod kernel_costs;
mod measure;
mod wait;

pub(crate) use kernel_costs::Key;

use crate::hook::Variant;
use crate::process::{self, Process, Standing};
use kernel_costs::{Cost, Costs};
use measure::Samples;
use partage_driver_api::cuda::{CUDA_ERROR_NOT_PERMITTED, CUDA_SUCCESS, CUresult, CUstream};
use partage_region::MAX_GPUS;
#[cfg(doc)]
use partage_region::protocol::TIME_CHUNK_NS;
use std::sync::Mutex;
use std::sync::atomic::{AtomicI64, AtomicU32, AtomicU64, Ordering::Relaxed};

/// Between so many launches one is measured once its kernel is known, with four calls of the driver's. Which one is not to be
/// foreseen: a program's loop must not have the same kernel measured every time.
const STRIDE: std::ops::Range<u32> = 192..448;

/// A part of 1024.
const ONE: u32 = 1024;

/// What a process knows of its turns.
#[derive(Default)]
pub(crate) struct Throttle {
    gpus: [GpuThrottle; MAX_GPUS],
    costs: Costs,
    samples: Mutex<Samples>,
    /// Captures that are going on in this process; while there is none, no stream has to be asked.
    captures: AtomicU32,
    /// Measurements that are under way.
    awaited: AtomicU32,
    /// The last random number.
    random: AtomicU32,
}

/// One GPU's. On lines of its own: threads that launch on different GPUs do not meet.
#[derive(Default)]
#[repr(align(128))]
struct GpuThrottle {
    /// The turn that `left` is of, as the word in `limits`.
    turn: AtomicU32,
    /// Nanoseconds taken from the container and not yet drawn.
    left: AtomicI64,
    launches: AtomicU32,
    /// Launches until one is measured.
    unmeasured: AtomicU32,
    /// Launches there had been when it was last checked whether work ends when it should.
    checked: AtomicU32,
    /// How often that was so, one time after the other.
    trust: AtomicU32,
    /// How much longer than thought work takes, in parts of [`ONE`] beyond the first.
    excess: AtomicU32,
    /// When this process first saw its last turn.
    began: AtomicU64,
    /// What was charged for what it took last.
    taken: AtomicU64,
    /// When what was submitted will have run: the copy that other threads of this process agree on.
    busy_until: AtomicU64,
    /// One thread at a time takes time.
    taking: Mutex<()>,
}

/// Work that is about to be submitted.
pub(crate) struct Work {
    /// What it is, to know it again.
    pub(crate) key: Key,
    pub(crate) stream: CUstream,
    pub(crate) variant: Variant,
}

/// Submits work when it may run. `work` is only called where launches are throttled.
#[inline]
pub(crate) fn submit(work: impl FnOnce() -> Work, launch: impl FnOnce() -> CUresult) -> CUresult {
    match process::standing() {
        Standing::Held(process) => match gated(process) {
            None => launch(),
            Some(gpu) => process.throttle.pass(process, gpu, &work(), launch),
        },
        Standing::Refused => CUDA_ERROR_NOT_PERMITTED,
    }
}

/// Whether launches of this process have to be examined: not if none of its GPUs is throttled.
#[inline]
pub(crate) fn needed() -> bool {
    let Some(process) = process::attached() else { return true };
    let region = &process.region;
    match process.devices.only() {
        Some(gpu) => region.limits(gpu).gated(),
        None => (0..region.gpus()).any(|gpu| region.limits(gpu).gated()),
    }
}

/// The GPU of the thread's context, if launches on it are throttled.
#[inline]
fn gated(process: &Process) -> Option<usize> {
    process.devices.current_for_launch(&process.region).filter(|&gpu| process.region.limits(gpu).gated())
}

impl Throttle {
    #[inline]
    fn pass(
        &self,
        process: &Process,
        gpu: usize,
        work: &Work,
        launch: impl FnOnce() -> CUresult,
    ) -> CUresult {
        let Some(here) = self.gpus.get(gpu) else { return launch() };
        if self.is_capturing() && capture::is_captured(work.stream, work.variant) {
            // It is written down, not run: its time counts when the graph is launched.
            return launch();
        }
        let mut cost = self.costs.of(work.key);
        if !matches!(cost, Cost::Known(_)) {
            cost = self.newest(process, work.key);
        }
        let nanoseconds = cost.nanoseconds().cast_signed();
        let in_turn = here.turn.load(Relaxed) == process.region.limits(gpu).turn().0;
        let paid = in_turn && here.left.fetch_sub(nanoseconds, Relaxed) >= nanoseconds;
        if !paid {
            if in_turn {
                here.left.fetch_add(nanoseconds, Relaxed);
            }
            self.wait_for_turn(process, gpu, work, nanoseconds);
        }
        // Two threads at once may count one launch: it only matters for which of them is measured.
        here.launches.store(here.launches.load(Relaxed).wrapping_add(1), Relaxed);
        let unmeasured = here.unmeasured.load(Relaxed);
        here.unmeasured.store(unmeasured.wrapping_sub(1), Relaxed);
        let answer = match cost {
            Cost::Known(_) if unmeasured != 0 => launch(),
            _ => self.measured(process, gpu, work, cost, launch),
        };
        if here.is_on_probation() && answer == CUDA_SUCCESS {
            self.probe(process, gpu, work);
        }
        if answer != CUDA_SUCCESS && !matches!(cost, Cost::Guessed(_)) {
            // It did not run: autotuners try what cannot.
            here.left.fetch_add(nanoseconds, Relaxed);
        }
        answer
    }

    /// Work of this kind has changed.
    pub(crate) fn doubt(&self, key: Key) {
        self.costs.doubt(key);
    }

    /// Launches until the next one is measured.
    fn stride(&self) -> u32 {
        let mut random = self.random.load(Relaxed) | 1;
        random ^= random << 13;
        random ^= random >> 17;
        random ^= random << 5;
        self.random.store(random, Relaxed);
        STRIDE.start + random % (STRIDE.end - STRIDE.start)
    }
}
