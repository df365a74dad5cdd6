//! Measuring what work takes: an event before it, one behind it, in the same stream. Nobody waits for them; they are read
//! when they have probably passed.
//!
//! What a kind of work takes may change from launch to launch. So it is also checked, when a turn is used up, whether all
//! that was submitted ends when it should: an event behind the last launch, looked at when it should have passed. As long as
//! it has not, the container pays for the time, and what it submits next counts as so much longer.
#![allow(unsafe_code)]

use super::kernel_costs::{Cost, Key};
use super::{GpuThrottle, ONE, Throttle, Work};
use crate::driver::cuda as real;
use crate::hook::Variant;
use crate::process::Process;
use partage_driver_api::cuda::*;
use partage_region::clock;
use partage_region::futex::keeping_errno;
use std::sync::atomic::Ordering::Relaxed;
use std::sync::{MutexGuard, PoisonError};
use std::time::Duration;

/// Measurements of launches that can be under way at once in a context.
const MOST: usize = 16;

/// How long the first launch of a kernel waits for it to have run, in nanoseconds. A kernel may wait for something that the
/// program does only afterwards, so it does not wait for ever.
const PATIENCE: u64 = 50_000_000;

/// Launches between two checks, at least: each takes three calls of the driver's.
const CHECKED: u32 = 224;

/// A process whose work has ended when it should so many times is trusted. Before, it is looked at after 8 launches, 16 more, 32…
const TRUSTED: u32 = 5;

/// What may come late without meaning anything, in nanoseconds.
const LATE: u64 = 2_000_000;

/// What is later than this, in nanoseconds, does not run.
const BLOCKED: u64 = 500_000_000;

/// Work is never taken for longer than so many times what is known of it.
const MOST_EXCESS: u32 = 1000 * ONE;

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
    waits_for: Option<Measurement>,
}

// SAFETY: handles of the driver's, which are good for every thread.
unsafe impl Send for Pair {}

#[derive(Clone, Copy)]
enum Measurement {
    /// A launch that is being made: nobody else takes the pair.
    Launching,
    /// How long a launch takes.
    Sample { gpu: usize, key: Key, charged: u64, ready: u64 },
    /// Whether what was submitted ends at `expected`; it has been paid for until `paid`.
    Check { gpu: usize, began: u64, expected: u64, paid: u64 },
}

impl Throttle {
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
        let here = &self.gpus[gpu];
        here.unmeasured.store(self.stride(), Relaxed);
        let charged = here.charge(cost.nanoseconds());
        let unknown = matches!(cost, Cost::Guessed(_));
        // Who keeps all measurements waiting pays what was assumed.
        let Some((start, end)) = self.begin(work, MOST) else { return launch() };
        let answer = launch();
        if answer != CUDA_SUCCESS && unknown {
            Self::correct(process, gpu, -signed(charged));
        }
        // SAFETY: an event of this context, and the program's stream.
        let recorded = answer == CUDA_SUCCESS && unsafe { record(end, work) } == CUDA_SUCCESS;
        let ready = here.busy_until();
        self.settle(start, recorded.then_some(Measurement::Sample { gpu, key: work.key, charged, ready }));
        if unknown && recorded {
            self.wait_for_first(process, gpu, start);
        }
        answer
    }

    /// What is known of work after a look at what is through: it may have run since.
    #[cold]
    pub(super) fn newest(&self, process: &Process, key: Key) -> Cost {
        self.look(process, u64::MAX);
        self.costs.of(key)
    }

    fn samples(&self) -> MutexGuard<'_, Samples> {
        self.samples.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Says what the pair with this event waits for now.
    fn settle(&self, start: CUevent, waits_for: Option<Measurement>) {
        let mut samples = self.samples();
        if let Some(pair) = samples.pairs.iter_mut().find(|pair| pair.start == start) {
            pair.waits_for = waits_for;
        }
        self.count(&samples);
    }

    fn count(&self, samples: &Samples) {
        let waiting = samples.pairs.iter().filter(|pair| pair.waits_for.is_some()).count();
        self.awaited.store(u32::try_from(waiting).unwrap_or(u32::MAX), Relaxed);
    }

    /// Whether something is being measured.
    #[inline]
    pub(crate) fn awaits(&self) -> bool {
        self.awaited.load(Relaxed) != 0
    }

    /// The program has waited for its work: what was measured is known, and a process that ends now has paid.
    #[cold]
    pub(crate) fn synchronised(&self, process: &Process) {
        keeping_errno(|| self.look(process, u64::MAX));
    }

    /// Waits until a kernel that nobody knew has run: a program could otherwise put a minute's work into the queue before
    /// anybody knows. Programs are used to it: the driver loads a kernel's code at its first launch, too.
    fn wait_for_first(&self, process: &Process, gpu: usize, start: CUevent) {
        keeping_errno(|| {
            let began = clock::exact();
            let mut pause = 20_000;
            loop {
                self.look(process, u64::MAX);
                if !self.samples().pairs.iter().any(|pair| pair.start == start && pair.waits_for.is_some()) {
                    return self.gpus[gpu].is_done(process, gpu, clock::exact());
                }
                if clock::exact().saturating_sub(began) > PATIENCE || self.is_capturing() {
                    return;
                }
                std::thread::sleep(Duration::from_nanos(pause));
                pause = (pause * 2).min(250_000);
            }
        });
    }

    /// Two events for this thread's context, the first of them recorded; none while a capture goes on, which the driver might
    /// end for it.
    fn begin(&self, work: &Work, most: usize) -> Option<(CUevent, CUevent)> {
        if self.is_capturing() {
            return None;
        }
        let mut context = std::ptr::null_mut();
        // SAFETY: a handle to fill in.
        let answer = unsafe { real::cuCtxGetCurrent(&mut context) };
        if answer != CUDA_SUCCESS || context.is_null() {
            return None;
        }
        let mut samples = self.samples();
        let is_free = |pair: &Pair| pair.context == context && pair.waits_for.is_none();
        let there = samples.pairs.iter().filter(|pair| pair.context == context).count();
        if !samples.pairs.iter().any(is_free) && there < most {
            let start = event()?;
            let Some(end) = event() else {
                destroy(start);
                return None;
            };
            samples.pairs.push(Pair { context, start, end, waits_for: None });
        }
        let pair = samples.pairs.iter_mut().find(|pair| is_free(pair))?;
        let (start, end) = (pair.start, pair.end);
        pair.waits_for = Some(Measurement::Launching);
        drop(samples);
        // SAFETY: an event of this context, and the program's stream.
        if unsafe { record(start, work) } == CUDA_SUCCESS {
            return Some((start, end));
        }
        self.settle(start, None);
        None
    }

    /// Begins to check whether all that was submitted ends when it should.
    pub(super) fn check(&self, process: &Process, gpu: usize, work: &Work) {
        let here = &self.gpus[gpu];
        let launches = here.launches.load(Relaxed);
        if launches.wrapping_sub(here.checked.load(Relaxed)) < CHECKED {
            return;
        }
        here.checked.store(launches, Relaxed);
        let is_check =
            |pair: &Pair| matches!(pair.waits_for, Some(Measurement::Check { gpu: of, .. }) if of == gpu);
        if self.samples().pairs.iter().any(is_check) {
            return;
        }
        // One more than launches may have: they cannot keep a check away.
        if let Some((start, _)) = self.begin(work, MOST + 1) {
            self.settle(start, Some(here.expectation(gpu)));
        }
        // The look at it comes when it should have passed.
        self.look(process, clock::exact());
    }

    /// A process that is not yet trusted waits until what it has submitted has run: what it says of its work may be wrong by
    /// far, and the queue is long.
    #[cold]
    pub(super) fn probe(&self, process: &Process, gpu: usize, work: &Work) {
        let here = &self.gpus[gpu];
        let launches = here.launches.load(Relaxed);
        let due =
            launches.wrapping_sub(here.checked.load(Relaxed)) >= 8 << here.trust.load(Relaxed).min(TRUSTED);
        if !due {
            return;
        }
        here.checked.store(launches, Relaxed);
        if super::wait::is_silent(process, gpu, clock::exact()) {
            // Beside others, without turns, nothing ends when it should.
            return;
        }
        let Some((start, _)) = self.begin(work, MOST + 1) else { return };
        self.settle(start, Some(here.expectation(gpu)));
        self.wait_for_first(process, gpu, start);
    }

    /// When the next check is due, on the monotonic clock.
    pub(super) fn due(&self) -> u64 {
        let due = |pair: &Pair| match pair.waits_for {
            Some(Measurement::Check { paid, .. }) => Some(paid.saturating_add(LATE)),
            _ => None,
        };
        self.samples().pairs.iter().filter_map(due).min().unwrap_or(u64::MAX)
    }

    /// Learns from the measurements that are through at this time.
    pub(super) fn look(&self, process: &Process, now: u64) {
        if self.is_capturing() {
            return;
        }
        let mut samples = self.samples();
        samples.pairs.retain_mut(|pair| match pair.waits_for {
            Some(Measurement::Sample { gpu, key, charged, ready }) if ready <= now => {
                let mut milliseconds = 0.0;
                // SAFETY: two events of ours and a number to fill in. If their context is gone the driver says so.
                match unsafe { real::cuEventElapsedTime(&mut milliseconds, pair.start, pair.end) } {
                    CUDA_SUCCESS => {
                        pair.waits_for = None;
                        let took = (f64::from(milliseconds) * 1e6) as u64;
                        self.costs.learn(key, took);
                        Self::correct(process, gpu, signed(took) - signed(charged));
                        true
                    }
                    CUDA_ERROR_NOT_READY => true,
                    _ => false,
                }
            }
            Some(Measurement::Check { gpu, began, expected, paid }) => {
                let forced = now == u64::MAX;
                let now = clock::exact();
                let late = now >= paid.saturating_add(LATE);
                if !late && !forced {
                    return true;
                }
                let here = &self.gpus[gpu];
                // SAFETY: an event of ours. If its context is gone the driver says so.
                match unsafe { real::cuEventQuery(pair.start) } {
                    CUDA_SUCCESS => {
                        here.ended(began, expected, paid);
                        pair.waits_for = None;
                        true
                    }
                    CUDA_ERROR_NOT_READY if !late => true,
                    CUDA_ERROR_NOT_READY if now.saturating_sub(expected) > BLOCKED => {
                        // The stream waits for something that is no work; the program may be what it waits for.
                        here.trusts();
                        pair.waits_for = None;
                        true
                    }
                    CUDA_ERROR_NOT_READY => {
                        Self::correct(process, gpu, signed(now - paid));
                        here.goes_on(process, gpu, now.saturating_add(LATE));
                        pair.waits_for = Some(Measurement::Check { gpu, began, expected, paid: now });
                        true
                    }
                    _ => false,
                }
            }
            _ => true,
        });
        self.count(&samples);
    }

    /// The context is going: its events go with it.
    pub(crate) fn forget_context(&self, context: CUcontext) {
        self.samples().pairs.retain(|pair| pair.context != context);
    }
}

impl GpuThrottle {
    /// What is charged for work of this length.
    pub(super) fn charge(&self, nanoseconds: u64) -> u64 {
        let part = u64::from(ONE.saturating_add(self.excess.load(Relaxed)));
        nanoseconds.saturating_mul(part) / u64::from(ONE)
    }

    fn trusts(&self) {
        self.trust.store((self.trust.load(Relaxed) + 1).min(TRUSTED), Relaxed);
    }

    /// Whether its work has not yet ended when it should often enough.
    #[inline]
    pub(super) fn is_on_probation(&self) -> bool {
        self.trust.load(Relaxed) < TRUSTED
    }

    /// When all that was submitted until now should have run. What was taken last may have been launched only now: a thread
    /// that got no processor in between does not make its work any longer.
    fn expectation(&self, gpu: usize) -> Measurement {
        let latest = clock::exact().saturating_add(self.taken.load(Relaxed));
        let expected = self.busy_until().max(latest);
        Measurement::Check { gpu, began: self.began.load(Relaxed), expected, paid: expected }
    }

    /// What was submitted in the turn that began then has run, and was paid for until then.
    fn ended(&self, began: u64, expected: u64, paid: u64) {
        let excess = self.excess.load(Relaxed);
        let new = if paid <= expected {
            // As expected, or sooner: nobody knows how much.
            self.trusts();
            excess - excess.div_ceil(8)
        } else {
            self.trust.store(0, Relaxed);
            // Little work that came late says little about how much longer work takes.
            let (took, thought) = (paid.saturating_sub(began), expected.saturating_sub(began).max(LATE));
            let longer = u128::from(took) * u128::from(ONE.saturating_add(excess)) / u128::from(thought);
            u32::try_from(longer).unwrap_or(u32::MAX).saturating_sub(ONE).min(MOST_EXCESS)
        };
        self.excess.store(new, Relaxed);
    }
}

/// A length of time, as one that can be taken from another: longer ones than years are years.
fn signed(nanoseconds: u64) -> i64 {
    i64::try_from(nanoseconds).unwrap_or(i64::MAX).min(1 << 56)
}

fn event() -> Option<CUevent> {
    let mut event = std::ptr::null_mut();
    // SAFETY: a handle to fill in; the context is current.
    (unsafe { real::cuEventCreate(&mut event, CU_EVENT_DEFAULT) } == CUDA_SUCCESS).then_some(event)
}

fn destroy(event: CUevent) {
    // SAFETY: an event of ours that nobody else knows.
    let _ = unsafe { real::cuEventDestroy_v2(event) };
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

#[cfg(test)]
mod tests {
    use super::*;

    /// How many times as long work is taken for.
    fn times(throttle: &GpuThrottle) -> f64 {
        f64::from(ONE + throttle.excess.load(Relaxed)) / f64::from(ONE)
    }

    #[test]
    fn work_that_takes_longer_than_thought_counts_as_so_much_longer() {
        let throttle = GpuThrottle::default();
        throttle.ended(0, 10_000_000, 40_000_000);
        assert!((3.9..4.1).contains(&times(&throttle)) && throttle.is_on_probation());
        for _ in 0..60 {
            throttle.ended(0, 10_000_000, 10_000_000);
        }
        assert!(times(&throttle) < 1.01 && !throttle.is_on_probation());
    }

    /// A turn in which nothing was submitted yet, or next to nothing: a few milliseconds are how late a thread is.
    #[test]
    fn little_work_that_comes_late_says_little() {
        for thought in [0, 1, 100_000] {
            let throttle = GpuThrottle::default();
            throttle.ended(50_000_000, 50_000_000 + thought, 53_000_000);
            assert!(times(&throttle) < 2.0, "{} times as long", times(&throttle));
        }
    }

    #[test]
    fn what_was_taken_last_may_be_launched_only_now() {
        let throttle = GpuThrottle::default();
        let before = clock::exact();
        throttle.taken.store(500_000, Relaxed);
        throttle.busy_until.store(before.saturating_sub(5_000_000), Relaxed);
        let Measurement::Check { expected, paid, .. } = throttle.expectation(0) else { panic!("a check") };
        assert!(expected >= before + 500_000 && paid == expected);
        throttle.busy_until.store(u64::MAX / 2, Relaxed);
        let Measurement::Check { expected, .. } = throttle.expectation(0) else { panic!("a check") };
        assert_eq!(expected, u64::MAX / 2);
    }
}
