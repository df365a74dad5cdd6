//! Waits until a launch may pass: for the turn, and until little enough work is queued.

use super::marked_stream::{MarkedStream, StreamQueue};
use super::{Throttle, add_throttled, is_silent, self_limit};
use crate::process::Process;
use partage_region::TurnWord;
use partage_region::clock;
use partage_region::futex;
use partage_region::protocol::{DEFAULT_RUN_AHEAD_NS, SCHEDULER_SILENCE_NS};
use std::sync::atomic::Ordering::{Relaxed, Release};
use std::time::Duration;

const MICROSECOND: u64 = 1_000;
const MILLISECOND: u64 = 1_000 * MICROSECOND;

/// Longest wait in nanoseconds before a thread checks again whether there is a turn scheduler.
const CHECK_INTERVAL_NS: u64 = 50 * MILLISECOND;

// A thread that waits notices in time that the turn scheduler is gone.
const _: () = assert!(CHECK_INTERVAL_NS < SCHEDULER_SILENCE_NS);

/// Time between markers from which on one kernel is queued at a time: the gap between two of them is short in comparison.
const LONG_PERIOD_NS: u64 = 10 * MILLISECOND;
/// Least and most time between two looks at a stream's markers.
const MIN_PAUSE_NS: u64 = 60 * MICROSECOND;
const MAX_PAUSE_NS: u64 = MILLISECOND;
/// Most markers that may be in a stream.
const MAX_MARKERS_AHEAD: u64 = 8;
/// Least and most time for which a launch waits for queued work that makes no progress: the work may wait for something
/// that the program does only afterwards.
const MIN_STALL_NS: u64 = 10 * MILLISECOND;
const MAX_STALL_NS: u64 = 500 * MILLISECOND;

impl Throttle {
    /// Waits until a launch into a stream may pass. The turn is checked repeatedly: it may have ended, begun, or no
    /// longer be needed.
    pub(super) fn wait_for_turn(&self, process: &Process, gpu: usize, stream: Option<&MarkedStream>) {
        let (limits, lane, account) =
            (process.region.limits(gpu), process.region.lane(gpu), process.region.gpu_account(gpu));
        let mut began = None;
        let mut stall = MIN_STALL_NS;
        while process.region.is_gated(gpu) {
            let turn = limits.turn();
            let now = clock::monotonic_ns();
            let timeout = if is_silent(process, gpu, now) || !process.region.has_shared_markers() {
                match self_limit::wait_needed(process, gpu, now) {
                    Some(wait) => wait,
                    // Work that is queued is charged only later.
                    None if self.wait_for_queue(process, gpu, turn, stream, &mut stall) => break,
                    None => continue,
                }
            } else if may_pass(turn, stream) {
                if self.wait_for_queue(process, gpu, turn, stream, &mut stall) {
                    break;
                }
                continue;
            } else if self.poll_events(gpu) {
                MAX_PAUSE_NS
            } else {
                CHECK_INTERVAL_NS
            };
            if began.is_none() {
                began = Some(now);
                lane.waiting.fetch_add(1, Relaxed);
                // The turn scheduler must learn when the work before this launch has run.
                self.flush(gpu);
            }
            // Every time: a turn may have come and gone to other threads of this container.
            account.doorbell().fetch_add(1, Release);
            futex::wake(account.doorbell(), u32::MAX);
            futex::wait(limits.turn_word(), turn.0, Some(Duration::from_nanos(timeout)));
        }
        if let Some(began) = began {
            let _ = lane.waiting.fetch_update(Relaxed, Relaxed, |count| count.checked_sub(1));
            add_throttled(process, gpu, clock::monotonic_ns().saturating_sub(began));
        }
    }

    /// Waits until little enough work is queued in the stream. Returns false if the turn has changed meanwhile.
    fn wait_for_queue(
        &self,
        process: &Process,
        gpu: usize,
        turn: TurnWord,
        stream: Option<&MarkedStream>,
        stall: &mut u64,
    ) -> bool {
        let Some(stream) = stream else { return true };
        let limits = process.region.limits(gpu);
        let mut waiting = None;
        let mut pause = MIN_PAUSE_NS;
        loop {
            let queue = stream.queue();
            if has_room(&queue, limits.run_ahead()) {
                return true;
            }
            let StreamQueue { markers, period, .. } = queue;
            let now = clock::monotonic_ns();
            let (since, before) = *waiting.get_or_insert((now, markers));
            if markers != before {
                *stall = MIN_STALL_NS;
                waiting = Some((now, markers));
            } else if now.saturating_sub(since) >= (*stall).max(period.saturating_mul(4).min(MAX_STALL_NS)) {
                *stall = stall.saturating_mul(2).min(MAX_STALL_NS);
                return true;
            }
            // The period is an estimate, so the first look comes soon.
            std::thread::sleep(Duration::from_nanos(pause));
            pause = (pause + pause / 2).min((period / 2).clamp(MIN_PAUSE_NS, MAX_PAUSE_NS));
            if limits.turn() != turn || !process.region.is_gated(gpu) {
                return false;
            }
        }
    }
}

/// Returns whether a turn lets a launch into the stream pass.
fn may_pass(turn: TurnWord, stream: Option<&MarkedStream>) -> bool {
    turn.is_open() || (turn.is_draining() && stream.is_none_or(|stream| stream.queue().markers == 0))
}

/// Returns whether more may be queued in a stream.
fn has_room(queue: &StreamQueue, run_ahead: u64) -> bool {
    if queue.is_at_boundary {
        // The work does not run yet, and the program may have to queue more before it can.
        return queue.markers < MAX_MARKERS_AHEAD;
    }
    let least = match queue.period {
        // Not measured yet.
        0 => return queue.markers < 2,
        LONG_PERIOD_NS.. => 1,
        // Kernels of different lengths: several short ones may follow each other.
        _ if run_ahead >= DEFAULT_RUN_AHEAD_NS => 3,
        // Beside a container that asked for short waits: one group of launches runs, and the next is queued.
        period if period <= 2 * run_ahead => 2,
        _ => 1,
    };
    queue.markers < least
        || (queue.markers < MAX_MARKERS_AHEAD && queue.work.saturating_add(queue.period) <= run_ahead)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn long_kernels_are_queued_one_at_a_time() {
        let most = |period, run_ahead| {
            let has_room = |markers: &u64| {
                let queue =
                    StreamQueue { markers: *markers, is_at_boundary: false, work: markers * period, period };
                has_room(&queue, run_ahead)
            };
            (0..100).take_while(has_room).count()
        };
        let of = |period| most(period, 2 * MILLISECOND);
        assert_eq!([0, 100 * MICROSECOND, 500 * MICROSECOND, 2 * MILLISECOND].map(of), [2, 8, 4, 3]);
        assert_eq!([LONG_PERIOD_NS, 1_000 * MILLISECOND].map(of), [1, 1]);
        assert_eq!(most(500 * MICROSECOND, 300 * MICROSECOND), 2);
        assert_eq!(most(700 * MICROSECOND, 300 * MICROSECOND), 1);
    }

    #[test]
    fn work_behind_a_boundary_is_queued_however_long_it_is() {
        let queue = StreamQueue { markers: 5, is_at_boundary: true, work: u64::MAX, period: u64::MAX };
        assert!(has_room(&queue, MILLISECOND));
    }
}
