//! Waiting for the turn, and for time in it.

use super::{GpuThrottle, Throttle, Work};
use crate::process::Process;
use partage_region::clock;
use partage_region::futex::{self, keeping_errno};
use partage_region::protocol::{SCHEDULER_SILENCE_NS, TIME_CHUNK_NS, WHOLE_GPU};
use partage_region::{GpuLimits, TurnWord};
use std::sync::PoisonError;
use std::sync::atomic::Ordering::{AcqRel, Acquire, Relaxed, Release};
use std::time::Duration;

const MILLISECOND: u64 = 1_000_000;

/// Longest wait in nanoseconds before a thread checks again whether there is a turn scheduler.
const CHECK_INTERVAL_NS: u64 = 50 * MILLISECOND;

/// Without a turn scheduler: nanoseconds of unused time that a container keeps.
const MAX_UNUSED_NS: u64 = 50 * MILLISECOND;

/// Shortest wait in nanoseconds: as soon as possible, without spinning.
const MIN_WAIT_NS: u64 = MILLISECOND / 10;

// A thread that waits notices in time that the turn scheduler is gone.
const _: () = assert!(CHECK_INTERVAL_NS < SCHEDULER_SILENCE_NS);

/// What a container may do now.
enum Allowance {
    /// It may spend so much more.
    UpTo(u64),
    /// It has to wait; at most so long until somebody looks again.
    Wait(u64),
}

impl Throttle {
    /// Takes `nanoseconds` for a launch, when there is time for it. The turn is looked at again and again: it may have
    /// gone, come, or stopped to matter.
    #[cold]
    pub(super) fn wait_for_turn(&self, process: &Process, gpu: usize, work: &Work, nanoseconds: i64) {
        keeping_errno(|| {
            let mut began = None;
            let (limits, lane, book) =
                (process.region.limits(gpu), process.region.lane(gpu), process.region.gpu_account(gpu));
            loop {
                let turn = limits.turn();
                if !limits.gated() || self.gpus[gpu].take(process, gpu, turn, nanoseconds) {
                    break;
                }
                let now = clock::exact();
                if began.is_none() {
                    began = Some(now);
                    lane.waiting.fetch_add(1, Relaxed);
                    if !is_silent(process, gpu, now) {
                        // Beside others, without turns, nothing ends when it should.
                        self.check(process, gpu, work);
                    }
                }
                // Every time: a turn may have come and gone to others of this container.
                book.doorbell().fetch_add(1, Release);
                futex::wake(book.doorbell(), u32::MAX);
                // Whoever waits has time to look at what was measured.
                self.look(process, now);
                let longest = match allowance(process, gpu, limits, turn, now) {
                    Allowance::UpTo(_) => MIN_WAIT_NS,
                    Allowance::Wait(longest) => {
                        longest.min(CHECK_INTERVAL_NS).min(self.due().saturating_sub(now).max(MIN_WAIT_NS))
                    }
                };
                futex::wait(limits.turn_word(), turn.0, Some(Duration::from_nanos(longest)));
            }
            if let Some(began) = began {
                let _ = lane.waiting.fetch_update(Relaxed, Relaxed, |count| count.checked_sub(1));
                book.throttled().fetch_add(clock::exact().saturating_sub(began), Relaxed);
            }
        });
    }

    /// Charges (or credits) what work took beyond what was assumed of it. It has run: nobody has to wait for it.
    pub(super) fn correct(process: &Process, gpu: usize, nanoseconds: i64) {
        process.region.gpu_account(gpu).spent().fetch_add(nanoseconds.cast_unsigned(), AcqRel);
        process.region.lane(gpu).spent.fetch_add(nanoseconds.cast_unsigned(), Relaxed);
    }
}

impl GpuThrottle {
    /// Takes a chunk from the container, and a launch's part of it; false if there is none.
    fn take(&self, process: &Process, gpu: usize, turn: TurnWord, nanoseconds: i64) -> bool {
        let _one = self.taking.lock().unwrap_or_else(PoisonError::into_inner);
        let (book, lane) = (process.region.gpu_account(gpu), process.region.lane(gpu));
        let now = clock::exact();
        if self.turn.swap(turn.0, Relaxed) != turn.0 {
            // What was left of another turn goes back.
            let left = self.left.swap(0, Relaxed);
            let back = self.charge(left.unsigned_abs()).cast_signed() * left.signum();
            book.spent().fetch_sub(back.cast_unsigned(), AcqRel);
            lane.spent.fetch_sub(back.cast_unsigned(), Relaxed);
            if turn.is_open() {
                self.began.store(now, Relaxed);
            }
        } else if self.left.fetch_sub(nanoseconds, Relaxed) >= nanoseconds {
            // Another thread has taken a chunk in the meantime.
            return true;
        } else {
            self.left.fetch_add(nanoseconds, Relaxed);
        }
        let Allowance::UpTo(there) = allowance(process, gpu, process.region.limits(gpu), turn, now) else {
            return false;
        };
        // A launch may take more than there is: a kernel cannot be cut. What is too much is debt.
        let missing = nanoseconds.saturating_sub(self.left.load(Relaxed).max(0)).max(0).unsigned_abs();
        let chunk = TIME_CHUNK_NS.max(missing);
        let charged = self.charge(chunk);
        let (chunk, charged) = if charged > there && chunk > missing {
            (missing, self.charge(missing))
        } else {
            (chunk, charged)
        };
        book.spent().fetch_add(charged, AcqRel);
        lane.spent.fetch_add(charged, Relaxed);
        self.taken.store(charged, Relaxed);
        self.will_be_busy(process, gpu, now, charged);
        self.left.fetch_add(chunk.cast_signed() - nanoseconds, Relaxed);
        true
    }

    /// Says when what was submitted will have run.
    fn will_be_busy(&self, process: &Process, gpu: usize, now: u64, nanoseconds: u64) {
        let later = |until: u64| Some(until.max(now).saturating_add(nanoseconds));
        let until = self.busy_until.fetch_update(Relaxed, Relaxed, later).unwrap_or(0);
        process.region.lane(gpu).busy_until.store(until.max(now).saturating_add(nanoseconds), Relaxed);
    }

    /// What was submitted runs at least until then.
    pub(super) fn goes_on(&self, process: &Process, gpu: usize, until: u64) {
        self.busy_until.fetch_max(until, Relaxed);
        process.region.lane(gpu).busy_until.fetch_max(until, Relaxed);
    }

    /// What was submitted has run earlier than was thought.
    pub(super) fn is_done(&self, process: &Process, gpu: usize, now: u64) {
        self.busy_until.fetch_min(now, Relaxed);
        process.region.lane(gpu).busy_until.fetch_min(now, Relaxed);
    }

    /// When what was submitted will have run.
    pub(super) fn busy_until(&self) -> u64 {
        self.busy_until.load(Relaxed)
    }
}

/// Whether a GPU's turn scheduler has stopped reporting that it runs.
pub(super) fn is_silent(process: &Process, gpu: usize, now: u64) -> bool {
    now.saturating_sub(process.region.heartbeat(gpu)) >= SCHEDULER_SILENCE_NS
}

/// How much is left up to `allowed`. Both count round, and a container may have written anything: it is the difference that
/// counts.
fn left(allowed: u64, spent: u64) -> Option<u64> {
    u64::try_from(allowed.wrapping_sub(spent).cast_signed()).ok().filter(|&left| left > 0)
}

/// GPU time in nanoseconds that `elapsed` is worth at a rate below a whole GPU. It cannot overflow, whatever `elapsed` a
/// container forged.
fn accrued(elapsed: u64, rate: u64) -> u64 {
    let whole = u64::from(WHOLE_GPU);
    elapsed / whole * rate + elapsed % whole * rate / whole
}

/// What the container may do: by the turn scheduler's word or, where it is gone, by the clock.
fn allowance(process: &Process, gpu: usize, limits: &GpuLimits, turn: TurnWord, now: u64) -> Allowance {
    let book = process.region.gpu_account(gpu);
    let spent = book.spent().load(Acquire);
    let (since_word, base_word) = (&book.time.local_since, &book.time.local_base);
    if !is_silent(process, gpu, now) {
        if since_word.load(Relaxed) != 0 {
            since_word.store(0, Relaxed);
        }
        return match left(limits.allowed(), spent).filter(|_| turn.is_open()) {
            Some(there) => Allowance::UpTo(there),
            None => Allowance::Wait(CHECK_INTERVAL_NS),
        };
    }
    let rate = match process.region.cores(gpu) {
        0 => process.region.ceiling(gpu),
        cores => cores,
    };
    let (rate, whole) = (u64::from(rate), u64::from(WHOLE_GPU));
    if rate == 0 {
        return Allowance::Wait(CHECK_INTERVAL_NS);
    }
    if rate >= whole {
        return Allowance::UpTo(u64::MAX);
    }
    // The first to notice says from when and from what the others count, too.
    let mut since = since_word.load(Acquire);
    if since == 0 || since > now {
        let settled = since_word.compare_exchange(since, now, AcqRel, Acquire);
        since = settled.map_or_else(|other| other, |_| now);
        if settled.is_ok() {
            base_word.store(spent, Relaxed);
        }
    }
    let accrued = accrued(now.saturating_sub(since), rate);
    let allowed = base_word.load(Relaxed).wrapping_add(accrued);
    match left(allowed, spent) {
        Some(there) if there > MAX_UNUSED_NS => {
            // Time that nobody wanted is over.
            since_word.store(now, Relaxed);
            base_word.store(spent, Relaxed);
            Allowance::UpTo(MAX_UNUSED_NS / 10)
        }
        Some(there) => Allowance::UpTo(there),
        None => {
            let debt = spent.wrapping_sub(allowed);
            Allowance::Wait((debt.saturating_mul(whole) / rate).max(MIN_WAIT_NS))
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn accrued_time_is_the_rate_of_what_has_passed() {
        let whole = u64::from(WHOLE_GPU);
        assert_eq!(accrued(1_000_000_000, whole * 30 / 100), 300_000_000);
        assert_eq!((accrued(0, 1), accrued(whole, 1), accrued(whole - 1, 1)), (0, 1, 0));
        assert_eq!(accrued(u64::MAX, whole - 1), u64::MAX - u64::MAX / whole - 1);
    }
}
