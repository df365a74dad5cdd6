//! The card thread: does what a card does without any thread of the program, such as writing words into memory.
//!
//! It is not the worker thread, which runs functions of the program: those may take long, and this thread must be on
//! time. A card is never descheduled, so the thread gets the highest priority that the process may have. It therefore
//! must not spin for a lock that an ordinary thread holds.

use super::super::device::Device;
use super::super::entry;
use super::{ExecutionEngine, host_tasks};
use crate::state::now;
use std::panic::AssertUnwindSafe;
use std::sync::Condvar;
use std::time::Duration;

/// Minimum time in nanoseconds between two turns of the thread: what becomes due in between is done together.
const MIN_TURN_INTERVAL: u64 = 25_000;

/// Longest sleep in nanoseconds while there is something to do: the GPU may be lost or become faster.
const MAX_SLEEP: u64 = 50_000_000;

/// The state of the card thread, protected by the engine's lock.
#[derive(Default)]
pub(super) struct CardThread {
    started: bool,
    /// The position in service time for which the thread sleeps; `None` while it runs.
    sleeps_until: Option<u64>,
    /// Wakes the thread.
    wake: std::sync::Arc<Condvar>,
}

impl ExecutionEngine {
    /// Makes the card thread look again no later than when the GPU reaches `position`.
    pub(super) fn wake_card_thread(&mut self, position: u64) {
        if !self.card_thread.started {
            let Some(device) = self.device else { return };
            let thread = std::thread::Builder::new().name("sim-card".into());
            let run = || card_thread_main(device);
            self.card_thread.started = host_tasks::spawn_without_signals(|| thread.spawn(run).is_ok());
        } else if self.card_thread.sleeps_until.is_some_and(|until| position < until) {
            // At most one wake-up per sleep.
            self.card_thread.sleeps_until = None;
            self.card_thread.wake.notify_one();
        }
    }

    /// Returns the earliest position at which the card has to do something.
    fn next_card_position(&self) -> Option<u64> {
        let spin = self.next_spin_position();
        self.word_writes.first_position().into_iter().chain(spin).min()
    }

    /// Does what is due. Returns the next position and the earliest instant at which something is due again.
    fn run_card(&mut self) -> Option<(u64, u64)> {
        if self.next_card_position().is_none() && self.next_copy_end().is_none() {
            return None;
        }
        if let Ok(lane) = self.lane() {
            // A lost GPU is noticed below.
            let _ = lane.refresh();
        }
        // Timelines may wait for the words or for spinning kernels.
        self.store_reached_words();
        self.advance();
        let copy_end = self.next_copy_end();
        let position = self.next_card_position();
        let reached = position.and_then(|position| {
            let instant = self.lane().ok()?.not_before(position).ok()?;
            Some(instant.unwrap_or_else(now))
        });
        let instant = [copy_end, reached].into_iter().flatten().min()?;
        Some((position.unwrap_or(u64::MAX), instant))
    }
}

fn card_thread_main(device: &'static Device) {
    entry::mark_driver_thread();
    raise_priority();
    while std::panic::catch_unwind(AssertUnwindSafe(|| card_thread_loop(device))).is_err() {}
}

fn card_thread_loop(device: &'static Device) {
    let mut engine = device.engine();
    let wake = std::sync::Arc::clone(&engine.card_thread.wake);
    loop {
        let turn = now();
        let before = (engine.unsettled.count(), engine.queued);
        let next = engine.run_card();
        if (engine.unsettled.count(), engine.queued) != before {
            // Threads may wait for what is no longer blocked.
            device.work_changed.notify_all();
        }
        engine = match next {
            Some((position, instant)) => {
                engine.card_thread.sleeps_until = Some(position);
                let at = instant.max(turn + MIN_TURN_INTERVAL).min(turn + MAX_SLEEP);
                let sleep = Duration::from_nanos(at.saturating_sub(now()).max(1));
                wake.wait_timeout(engine, sleep)
                    .map_or_else(|poisoned| poisoned.into_inner().0, |woken| woken.0)
            }
            None => {
                engine.card_thread.sleeps_until = Some(u64::MAX);
                wake.wait(engine).unwrap_or_else(|poisoned| poisoned.into_inner())
            }
        };
        engine.card_thread.sleeps_until = None;
    }
}

/// Lets the calling thread run before ordinary threads and wake up on time, as far as the process may do that.
fn raise_priority() {
    // SAFETY: the call takes integers only and changes the calling thread's own timer slack.
    unsafe { libc::prctl(libc::PR_SET_TIMERSLACK, 1000_u64, 0, 0, 0) };
    // SAFETY: `sched_param` is a C struct of integers, for which zero is valid.
    let mut parameters: libc::sched_param = unsafe { std::mem::zeroed() };
    parameters.sched_priority = 1;
    // SAFETY: zero means the calling thread, and the parameters outlive the call.
    let real_time = unsafe { libc::sched_setscheduler(0, libc::SCHED_RR, &parameters) };
    if real_time != 0 {
        // SAFETY: the call takes integers only. On Linux, zero means the calling thread.
        unsafe { libc::setpriority(libc::PRIO_PROCESS, 0, -20) };
    }
}
