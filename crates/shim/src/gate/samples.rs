//! Measuring what work takes: an event before it, one behind it, in the same stream. Nobody waits for them; they are read
//! when they have probably passed.
#![allow(unsafe_code)]

use super::costs::{Cost, Key};
use super::{Gate, Work};
use crate::hook::Variant;
use crate::process::{Process, exact_now};
use crate::real::cuda as real;
use partage_driver_api::cuda::*;
use partage_region::futex::keeping_errno;
use std::time::Duration;

/// Measurements that can be under way at once.
const MOST: usize = 64;

/// How long the first launch of a kernel waits for it to have run, in nanoseconds. A kernel may wait for something that the
/// program does only afterwards, so it does not wait for ever.
const PATIENCE: u64 = 50_000_000;

/// The measurements that are under way.
#[derive(Default)]
pub(crate) struct Samples {
    pairs: Vec<Pair>,
}

/// Two events of one context.
struct Pair {
    context: CUcontext,
    start: CUevent,
    end: CUevent,
    pending: Option<Pending>,
}

// SAFETY: handles of the driver's, which are good for every thread.
unsafe impl Send for Pair {}

#[derive(Clone, Copy)]
struct Pending {
    gpu: usize,
    key: Key,
    /// What was charged for it.
    charged: u64,
    /// Whether its kind was not well known: then what it took is charged, not what was thought.
    first: bool,
    /// When it has probably run.
    ready: u64,
}

impl Gate {
    /// Launches with an event before and one behind.
    #[cold]
    pub(super) fn measured(
        &self,
        process: &Process,
        gpu: usize,
        work: &Work,
        cost: Cost,
        launch: impl FnOnce() -> CUresult,
    ) -> CUresult {
        let first = !matches!(cost, Cost::Known(_));
        let unknown = matches!(cost, Cost::Guessed(_));
        let Some(pair) = self.begin(work) else { return launch() };
        let answer = launch();
        // SAFETY: an event of this context, and the program's stream.
        let recorded = answer == CUDA_SUCCESS && unsafe { record(pair.1, work) } == CUDA_SUCCESS;
        let mut samples = self.samples();
        let ready = self.gpus[gpu].busy_until();
        if let Some(pair) = samples.pairs.iter_mut().find(|known| known.end == pair.1) {
            let charged = cost.nanoseconds();
            pair.pending = recorded.then_some(Pending { gpu, key: work.key, charged, first, ready });
        }
        drop(samples);
        if unknown {
            self.wait_for_first(process, gpu, pair.1);
        }
        answer
    }

    /// What is known of work after a look at what is through: it may have run since.
    #[cold]
    pub(super) fn newest(&self, process: &Process, key: Key) -> Cost {
        self.look_at_samples(process, u64::MAX);
        self.costs.of(key)
    }

    fn samples(&self) -> std::sync::MutexGuard<'_, Samples> {
        self.samples.lock().unwrap_or_else(std::sync::PoisonError::into_inner)
    }

    /// Waits until a kernel that nobody knew has run: a program could otherwise put a minute's work into the queue before
    /// anybody knows. Programs are used to it: the driver loads a kernel's code at its first launch, too.
    fn wait_for_first(&self, process: &Process, gpu: usize, end: CUevent) {
        keeping_errno(|| {
            let began = exact_now();
            let mut pause = 20_000;
            loop {
                self.look_at_samples(process, u64::MAX);
                let under_way =
                    self.samples().pairs.iter().any(|pair| pair.end == end && pair.pending.is_some());
                if !under_way {
                    return self.gpus[gpu].is_done(process, gpu, exact_now());
                }
                if exact_now().saturating_sub(began) > PATIENCE {
                    return;
                }
                std::thread::sleep(Duration::from_nanos(pause));
                pause = (pause * 2).min(250_000);
            }
        });
    }

    /// Two events for this thread's context, the first of them recorded.
    fn begin(&self, work: &Work) -> Option<(CUevent, CUevent)> {
        let mut context = std::ptr::null_mut();
        // SAFETY: a handle to fill in.
        if unsafe { real::cuCtxGetCurrent(&mut context) } != CUDA_SUCCESS || context.is_null() {
            return None;
        }
        let mut samples = self.samples();
        let is_free = |pair: &Pair| pair.context == context && pair.pending.is_none();
        if !samples.pairs.iter().any(is_free) && samples.pairs.len() < MOST {
            samples.pairs.push(Pair { context, start: event()?, end: event()?, pending: None });
        }
        let pair = samples.pairs.iter_mut().find(|pair| is_free(pair))?;
        let events = (pair.start, pair.end);
        // Nobody else takes it while the launch goes on.
        pair.pending =
            Some(Pending { gpu: usize::MAX, key: work.key, charged: 0, first: false, ready: u64::MAX });
        drop(samples);
        // SAFETY: an event of this context, and the program's stream.
        if unsafe { record(events.0, work) } == CUDA_SUCCESS {
            return Some(events);
        }
        self.samples().pairs.retain(|pair| pair.end != events.1);
        None
    }

    /// Learns from the measurements that are through.
    pub(super) fn look_at_samples(&self, process: &Process, now: u64) {
        let mut samples = self.samples();
        samples.pairs.retain_mut(|pair| {
            let Some(pending) =
                pair.pending.filter(|pending| pending.gpu != usize::MAX && pending.ready <= now)
            else {
                return true;
            };
            let mut milliseconds = 0.0;
            // SAFETY: two events of ours and a number to fill in. If their context is gone the driver says so.
            match unsafe { real::cuEventElapsedTime(&mut milliseconds, pair.start, pair.end) } {
                CUDA_SUCCESS => {
                    pair.pending = None;
                    let took = (f64::from(milliseconds) * 1e6) as u64;
                    self.costs.learn(pending.key, took);
                    if pending.first {
                        let difference = i128::from(took) - i128::from(pending.charged);
                        Self::correct(process, pending.gpu, i64::try_from(difference).unwrap_or(i64::MAX));
                    }
                    true
                }
                CUDA_ERROR_NOT_READY => true,
                _ => false,
            }
        });
    }

    /// The context is going: its events go with it.
    pub(crate) fn forget_context(&self, context: CUcontext) {
        self.samples().pairs.retain(|pair| pair.context != context);
    }
}

fn event() -> Option<CUevent> {
    let mut event = std::ptr::null_mut();
    // SAFETY: a handle to fill in; the context is current.
    (unsafe { real::cuEventCreate(&mut event, CU_EVENT_DEFAULT) } == CUDA_SUCCESS).then_some(event)
}

/// # Safety
///
/// An event of the thread's context, and a stream that the program gave.
unsafe fn record(event: CUevent, work: &Work) -> CUresult {
    match work.variant {
        // SAFETY: the caller's promise.
        Variant::Plain => unsafe { real::cuEventRecord(event, work.stream) },
        // SAFETY: likewise.
        Variant::PerThread => unsafe { real::cuEventRecord_ptsz(event, work.stream) },
    }
}
