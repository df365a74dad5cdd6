//! Measures how long work takes: an event before it and one after it, in the same stream. Normally no thread waits for
//! them; they are read when they have probably passed.
//!
//! The cost of one kind of work may change between launches. So when a turn is used up, it is also checked whether all
//! submitted work ends when expected: an event after the last launch, queried when it should have passed. As long as it
//! has not, the container is charged for the time, and its next work counts as that much longer.
#![allow(unsafe_code)]

use super::kernel_costs::{KernelCost, WorkKey};
use super::{EXCESS_UNIT, GpuThrottle, SubmittedWork, Throttle};
use crate::driver::cuda as driver;
use crate::hook::StreamVariant;
use crate::process::Process;
use partage_driver_api::cuda::*;
use partage_region::clock;
use partage_region::futex::preserve_errno;
use std::sync::atomic::Ordering::Relaxed;
use std::sync::{MutexGuard, PoisonError};
use std::time::Duration;

/// Measurements of launches that can be in progress at once in a context.
const MAX_PAIRS_PER_CONTEXT: usize = 16;

/// Nanoseconds for which the first launch of a kernel waits until it has run. It is bounded, because a kernel may wait
/// for something that the program does only afterwards.
const FIRST_RUN_TIMEOUT_NS: u64 = 50_000_000;

/// Least number of launches between two checks: each check makes three driver calls.
const MIN_LAUNCHES_BETWEEN_CHECKS: u32 = 224;

/// Number of checks in time after which a process is trusted. Before that, it is checked after 8 launches, 16 more, 32…
const CHECKS_UNTIL_TRUSTED: u32 = 5;

/// Lateness in nanoseconds that is not significant.
const LATENESS_TOLERANCE_NS: u64 = 2_000_000;

/// Lateness in nanoseconds from which on work is considered blocked rather than running.
const BLOCKED_AFTER_NS: u64 = 500_000_000;

/// Upper bound of [`GpuThrottle::excess`]: work never counts as longer than this many times its known cost.
const MAX_EXCESS: u32 = 1000 * EXCESS_UNIT;

/// The measurements in progress.
#[derive(Default)]
pub(crate) struct EventPairs {
    pairs: Vec<EventPair>,
}

/// Two events of one context.
struct EventPair {
    context: CUcontext,
    start: CUevent,
    end: CUevent,
    pending: Option<Measurement>,
}

// SAFETY: event and context handles of the driver may be used from every thread.
unsafe impl Send for EventPair {}

#[derive(Clone, Copy)]
enum Measurement {
    /// A launch is in progress: no other thread takes the pair.
    Launching,
    /// How long a launch takes.
    Sample { gpu: usize, key: WorkKey, charged: u64, ready: u64 },
    /// Whether the submitted work ends at `expected`; it has been paid for until `paid`.
    Check { gpu: usize, began: u64, expected: u64, paid: u64 },
}

impl Throttle {
    /// Launches work between two recorded events.
    #[cold]
    pub(super) fn launch_measured(
        &self,
        process: &Process,
        gpu: usize,
        work: &SubmittedWork,
        cost: KernelCost,
        launch: impl FnOnce() -> CUresult,
    ) -> CUresult {
        let here = &self.gpus[gpu];
        here.unmeasured.store(self.next_stride(), Relaxed);
        let charged = here.charge(cost.nanoseconds());
        let unknown = matches!(cost, KernelCost::Guessed(_));
        // A program that keeps all measurements waiting pays the assumed cost.
        let Some((start, end)) = self.begin_measurement(work, MAX_PAIRS_PER_CONTEXT) else { return launch() };
        let answer = launch();
        if answer != CUDA_SUCCESS && unknown {
            Self::correct(process, gpu, -to_signed(charged));
        }
        // SAFETY: the event belongs to this thread's context, and the stream is the application's.
        let recorded = answer == CUDA_SUCCESS && unsafe { record_event(end, work) } == CUDA_SUCCESS;
        let ready = here.busy_until();
        self.set_pending(
            start,
            recorded.then_some(Measurement::Sample { gpu, key: work.key, charged, ready }),
        );
        if unknown && recorded {
            self.wait_until_run(process, gpu, start);
        }
        answer
    }

    /// Returns the cost after collecting finished measurements: the work may have run since.
    #[cold]
    pub(super) fn refreshed_cost(&self, process: &Process, key: WorkKey) -> KernelCost {
        self.collect(process, u64::MAX);
        self.costs.get(key)
    }

    fn samples(&self) -> MutexGuard<'_, EventPairs> {
        self.samples.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Sets what the pair with this event waits for.
    fn set_pending(&self, start: CUevent, pending: Option<Measurement>) {
        let mut samples = self.samples();
        if let Some(pair) = samples.pairs.iter_mut().find(|pair| pair.start == start) {
            pair.pending = pending;
        }
        self.update_pending_count(&samples);
    }

    fn update_pending_count(&self, samples: &EventPairs) {
        let waiting = samples.pairs.iter().filter(|pair| pair.pending.is_some()).count();
        self.pending_measurements.store(u32::try_from(waiting).unwrap_or(u32::MAX), Relaxed);
    }

    /// Returns whether a measurement is in progress.
    #[inline]
    pub(crate) fn has_pending_measurements(&self) -> bool {
        self.pending_measurements.load(Relaxed) != 0
    }

    /// Collects measurements after the program has synchronized: they have finished, and a process that exits now has
    /// paid.
    #[cold]
    pub(crate) fn after_synchronize(&self, process: &Process) {
        preserve_errno(|| self.collect(process, u64::MAX));
    }

    /// Waits until a kernel of unknown cost has run: otherwise a program could queue a minute of work before its cost
    /// is known. Programs expect a slow first launch: the driver loads a kernel's code then, too.
    fn wait_until_run(&self, process: &Process, gpu: usize, start: CUevent) {
        preserve_errno(|| {
            let began = clock::monotonic_ns();
            let mut pause = 20_000;
            loop {
                self.collect(process, u64::MAX);
                if !self.samples().pairs.iter().any(|pair| pair.start == start && pair.pending.is_some()) {
                    return self.gpus[gpu].finish_at(process, gpu, clock::monotonic_ns());
                }
                if clock::monotonic_ns().saturating_sub(began) > FIRST_RUN_TIMEOUT_NS || self.is_capturing() {
                    return;
                }
                std::thread::sleep(Duration::from_nanos(pause));
                pause = (pause * 2).min(250_000);
            }
        });
    }

    /// Returns two events of this thread's context, the first of them recorded; `None` during a capture, which the
    /// driver might invalidate.
    fn begin_measurement(&self, work: &SubmittedWork, most: usize) -> Option<(CUevent, CUevent)> {
        if self.is_capturing() {
            return None;
        }
        let mut context = std::ptr::null_mut();
        // SAFETY: the pointer is to a local variable, which the driver fills in.
        let answer = unsafe { driver::cuCtxGetCurrent(&mut context) };
        if answer != CUDA_SUCCESS || context.is_null() {
            return None;
        }
        let mut samples = self.samples();
        let is_free = |pair: &EventPair| pair.context == context && pair.pending.is_none();
        let there = samples.pairs.iter().filter(|pair| pair.context == context).count();
        if !samples.pairs.iter().any(is_free) && there < most {
            let start = create_event()?;
            let Some(end) = create_event() else {
                destroy_event(start);
                return None;
            };
            samples.pairs.push(EventPair { context, start, end, pending: None });
        }
        let pair = samples.pairs.iter_mut().find(|pair| is_free(pair))?;
        let (start, end) = (pair.start, pair.end);
        pair.pending = Some(Measurement::Launching);
        drop(samples);
        // SAFETY: the event belongs to this thread's context, and the stream is the application's.
        if unsafe { record_event(start, work) } == CUDA_SUCCESS {
            return Some((start, end));
        }
        self.set_pending(start, None);
        None
    }

    /// Begins a check of whether all submitted work ends when expected.
    pub(super) fn begin_check(&self, process: &Process, gpu: usize, work: &SubmittedWork) {
        let here = &self.gpus[gpu];
        let launches = here.launches.load(Relaxed);
        if launches.wrapping_sub(here.checked_at_launch.load(Relaxed)) < MIN_LAUNCHES_BETWEEN_CHECKS {
            return;
        }
        here.checked_at_launch.store(launches, Relaxed);
        let is_check =
            |pair: &EventPair| matches!(pair.pending, Some(Measurement::Check { gpu: of, .. }) if of == gpu);
        if self.samples().pairs.iter().any(is_check) {
            return;
        }
        // One more pair than launches may have, so that they cannot prevent a check.
        if let Some((start, _)) = self.begin_measurement(work, MAX_PAIRS_PER_CONTEXT + 1) {
            self.set_pending(start, Some(here.expected_end(gpu)));
        }
        // It is queried when it should have passed.
        self.collect(process, clock::monotonic_ns());
    }

    /// Makes a process that is not trusted yet wait until its submitted work has run: its estimates may be far off, and
    /// the queue is long.
    #[cold]
    pub(super) fn probe(&self, process: &Process, gpu: usize, work: &SubmittedWork) {
        let here = &self.gpus[gpu];
        let launches = here.launches.load(Relaxed);
        let due = launches.wrapping_sub(here.checked_at_launch.load(Relaxed))
            >= 8 << here.trust.load(Relaxed).min(CHECKS_UNTIL_TRUSTED);
        if !due {
            return;
        }
        here.checked_at_launch.store(launches, Relaxed);
        if super::wait::is_silent(process, gpu, clock::monotonic_ns()) {
            // Next to other containers and without turns, no work ends when expected.
            return;
        }
        let Some((start, _)) = self.begin_measurement(work, MAX_PAIRS_PER_CONTEXT + 1) else { return };
        self.set_pending(start, Some(here.expected_end(gpu)));
        self.wait_until_run(process, gpu, start);
    }

    /// Returns when the next check is due, on the monotonic clock.
    pub(super) fn next_check_due(&self) -> u64 {
        let due = |pair: &EventPair| match pair.pending {
            Some(Measurement::Check { paid, .. }) => Some(paid.saturating_add(LATENESS_TOLERANCE_NS)),
            _ => None,
        };
        self.samples().pairs.iter().filter_map(due).min().unwrap_or(u64::MAX)
    }

    /// Collects the measurements that have finished at this time.
    pub(super) fn collect(&self, process: &Process, now: u64) {
        if self.is_capturing() {
            return;
        }
        let mut samples = self.samples();
        samples.pairs.retain_mut(|pair| match pair.pending {
            Some(Measurement::Sample { gpu, key, charged, ready }) if ready <= now => {
                let mut milliseconds = 0.0;
                // SAFETY: both events were created here, and the pointer is to a local variable. If their context is
                // gone, the driver returns an error.
                match unsafe { driver::cuEventElapsedTime(&mut milliseconds, pair.start, pair.end) } {
                    CUDA_SUCCESS => {
                        pair.pending = None;
                        let took = (f64::from(milliseconds) * 1e6) as u64;
                        self.costs.learn(key, took);
                        Self::correct(process, gpu, to_signed(took) - to_signed(charged));
                        true
                    }
                    CUDA_ERROR_NOT_READY => true,
                    _ => false,
                }
            }
            Some(Measurement::Check { gpu, began, expected, paid }) => {
                let forced = now == u64::MAX;
                let now = clock::monotonic_ns();
                let late = now >= paid.saturating_add(LATENESS_TOLERANCE_NS);
                if !late && !forced {
                    return true;
                }
                let here = &self.gpus[gpu];
                // SAFETY: the event was created here. If its context is gone, the driver returns an error.
                match unsafe { driver::cuEventQuery(pair.start) } {
                    CUDA_SUCCESS => {
                        here.record_end(began, expected, paid);
                        pair.pending = None;
                        true
                    }
                    CUDA_ERROR_NOT_READY if !late => true,
                    CUDA_ERROR_NOT_READY if now.saturating_sub(expected) > BLOCKED_AFTER_NS => {
                        // The stream waits for something other than work, perhaps for the program itself.
                        here.add_trust();
                        pair.pending = None;
                        true
                    }
                    CUDA_ERROR_NOT_READY => {
                        Self::correct(process, gpu, to_signed(now - paid));
                        here.keep_busy_until(process, gpu, now.saturating_add(LATENESS_TOLERANCE_NS));
                        pair.pending = Some(Measurement::Check { gpu, began, expected, paid: now });
                        true
                    }
                    _ => false,
                }
            }
            _ => true,
        });
        self.update_pending_count(&samples);
    }

    /// Forgets a context that is being destroyed: its events are destroyed with it.
    pub(crate) fn forget_context(&self, context: CUcontext) {
        self.samples().pairs.retain(|pair| pair.context != context);
    }
}

impl GpuThrottle {
    /// Returns the amount charged for work of this length.
    pub(super) fn charge(&self, nanoseconds: u64) -> u64 {
        let part = u64::from(EXCESS_UNIT.saturating_add(self.excess.load(Relaxed)));
        nanoseconds.saturating_mul(part) / u64::from(EXCESS_UNIT)
    }

    fn add_trust(&self) {
        self.trust.store((self.trust.load(Relaxed) + 1).min(CHECKS_UNTIL_TRUSTED), Relaxed);
    }

    /// Returns whether its work has not ended in time often enough yet.
    #[inline]
    pub(super) fn is_untrusted(&self) -> bool {
        self.trust.load(Relaxed) < CHECKS_UNTIL_TRUSTED
    }

    /// Returns a check of when all work submitted so far should have run. The chunk that was taken last may be launched
    /// only now: a thread that did not get a CPU in between does not make its work longer.
    fn expected_end(&self, gpu: usize) -> Measurement {
        let latest = clock::monotonic_ns().saturating_add(self.last_charge.load(Relaxed));
        let expected = self.busy_until().max(latest);
        Measurement::Check { gpu, began: self.turn_seen_at.load(Relaxed), expected, paid: expected }
    }

    /// Records that work of the turn that began at `began` has run, and was paid for until `paid`.
    fn record_end(&self, began: u64, expected: u64, paid: u64) {
        let excess = self.excess.load(Relaxed);
        let new = if paid <= expected {
            // As expected or sooner; how much sooner is not known.
            self.add_trust();
            excess - excess.div_ceil(8)
        } else {
            self.trust.store(0, Relaxed);
            // Lateness of little work says little about how much longer work takes.
            let (took, thought) =
                (paid.saturating_sub(began), expected.saturating_sub(began).max(LATENESS_TOLERANCE_NS));
            let longer =
                u128::from(took) * u128::from(EXCESS_UNIT.saturating_add(excess)) / u128::from(thought);
            u32::try_from(longer).unwrap_or(u32::MAX).saturating_sub(EXCESS_UNIT).min(MAX_EXCESS)
        };
        self.excess.store(new, Relaxed);
    }
}

/// Converts a duration for subtraction; durations beyond years are capped.
fn to_signed(nanoseconds: u64) -> i64 {
    i64::try_from(nanoseconds).unwrap_or(i64::MAX).min(1 << 56)
}

fn create_event() -> Option<CUevent> {
    let mut event = std::ptr::null_mut();
    // SAFETY: the pointer is to a local variable, and the context is current.
    (unsafe { driver::cuEventCreate(&mut event, CU_EVENT_DEFAULT) } == CUDA_SUCCESS).then_some(event)
}

fn destroy_event(event: CUevent) {
    // SAFETY: the event was created here, and no other code has its handle.
    let _ = unsafe { driver::cuEventDestroy_v2(event) };
}

/// Records an event in the stream of the work, with the variant of the call that submitted it.
///
/// # Safety
///
/// The event must belong to the thread's context, and the stream must be one that the application passed.
unsafe fn record_event(event: CUevent, work: &SubmittedWork) -> CUresult {
    match work.variant {
        // SAFETY: the caller guarantees an event of the thread's context and a stream of the application.
        StreamVariant::Legacy => unsafe { driver::cuEventRecord(event, work.stream) },
        // SAFETY: the caller guarantees an event of the thread's context and a stream of the application.
        StreamVariant::PerThread => unsafe { driver::cuEventRecord_ptsz(event, work.stream) },
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Returns the factor by which work counts as longer.
    fn times(throttle: &GpuThrottle) -> f64 {
        f64::from(EXCESS_UNIT + throttle.excess.load(Relaxed)) / f64::from(EXCESS_UNIT)
    }

    #[test]
    fn late_work_raises_the_charge_and_work_in_time_lowers_it() {
        let throttle = GpuThrottle::default();
        throttle.record_end(0, 10_000_000, 40_000_000);
        assert!((3.9..4.1).contains(&times(&throttle)) && throttle.is_untrusted());
        for _ in 0..60 {
            throttle.record_end(0, 10_000_000, 10_000_000);
        }
        assert!(times(&throttle) < 1.01 && !throttle.is_untrusted());
    }

    /// Nothing or almost nothing was submitted in the turn: a lateness of a few milliseconds is that of the thread.
    #[test]
    fn late_end_of_little_work_raises_the_charge_little() {
        for thought in [0, 1, 100_000] {
            let throttle = GpuThrottle::default();
            throttle.record_end(50_000_000, 50_000_000 + thought, 53_000_000);
            assert!(times(&throttle) < 2.0, "{} times as long", times(&throttle));
        }
    }

    #[test]
    fn expected_end_includes_the_last_chunk() {
        let throttle = GpuThrottle::default();
        let before = clock::monotonic_ns();
        throttle.last_charge.store(500_000, Relaxed);
        throttle.busy_until.store(before.saturating_sub(5_000_000), Relaxed);
        let Measurement::Check { expected, paid, .. } = throttle.expected_end(0) else { panic!("a check") };
        assert!(expected >= before + 500_000 && paid == expected);
        throttle.busy_until.store(u64::MAX / 2, Relaxed);
        let Measurement::Check { expected, .. } = throttle.expected_end(0) else { panic!("a check") };
        assert_eq!(expected, u64::MAX / 2);
    }
}
