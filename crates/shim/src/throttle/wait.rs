//! Waits for the turn, and for time in it.

use super::{GpuThrottle, SubmittedWork, Throttle};
use crate::process::Process;
use partage_region::clock;
use partage_region::futex::{self, preserve_errno};
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
    /// It may spend this much more, in nanoseconds.
    UpTo(u64),
    /// It must wait, for at most this many nanoseconds before it checks again.
    Wait(u64),
}

impl Throttle {
    /// Takes `nanoseconds` for a launch as soon as there is time for it. The turn is checked repeatedly: it may have
    /// ended, begun, or no longer be needed.
    #[cold]
    pub(super) fn wait_for_turn(
        &self,
        process: &Process,
        gpu: usize,
        work: &SubmittedWork,
        nanoseconds: i64,
    ) {
        preserve_errno(|| {
            let mut began = None;
            let (limits, lane, account) =
                (process.region.limits(gpu), process.region.lane(gpu), process.region.gpu_account(gpu));
            loop {
                let turn = limits.turn();
                if !limits.waits_for_turns() || self.gpus[gpu].take_chunk(process, gpu, turn, nanoseconds) {
                    break;
                }
                let now = clock::monotonic_ns();
                if began.is_none() {
                    began = Some(now);
                    lane.waiting.fetch_add(1, Relaxed);
                    if !is_silent(process, gpu, now) {
                        // Next to other containers and without turns, no work ends when expected.
                        self.begin_check(process, gpu, work);
                    }
                }
                // Every time: a turn may have come and gone to other threads of this container.
                account.doorbell().fetch_add(1, Release);
                futex::wake(account.doorbell(), u32::MAX);
                // A waiting thread has time to collect measurements.
                self.collect(process, now);
                let longest = match allowance(process, gpu, limits, turn, now) {
                    Allowance::UpTo(_) => MIN_WAIT_NS,
                    Allowance::Wait(longest) => longest
                        .min(CHECK_INTERVAL_NS)
                        .min(self.next_check_due().saturating_sub(now).max(MIN_WAIT_NS)),
                };
                futex::wait(limits.turn_word(), turn.0, Some(Duration::from_nanos(longest)));
            }
            if let Some(began) = began {
                let _ = lane.waiting.fetch_update(Relaxed, Relaxed, |count| count.checked_sub(1));
                account.throttled().fetch_add(clock::monotonic_ns().saturating_sub(began), Relaxed);
            }
        });
    }

    /// Charges (or refunds) what work took beyond its assumed cost. It has run, so no container has to wait for it.
    pub(super) fn correct(process: &Process, gpu: usize, nanoseconds: i64) {
        process.region.gpu_account(gpu).spent().fetch_add(nanoseconds.cast_unsigned(), AcqRel);
        process.region.lane(gpu).spent.fetch_add(nanoseconds.cast_unsigned(), Relaxed);
    }
}

impl GpuThrottle {
    /// Takes a chunk from the container, and a launch's part of it. Returns false if there is none.
    fn take_chunk(&self, process: &Process, gpu: usize, turn: TurnWord, nanoseconds: i64) -> bool {
        let _one = self.taking_chunk.lock().unwrap_or_else(PoisonError::into_inner);
        let (account, lane) = (process.region.gpu_account(gpu), process.region.lane(gpu));
        let now = clock::monotonic_ns();
        if self.turn.swap(turn.0, Relaxed) != turn.0 {
            // The rest of another turn is returned.
            let left = self.budget.swap(0, Relaxed);
            let back = self.charge(left.unsigned_abs()).cast_signed() * left.signum();
            account.spent().fetch_sub(back.cast_unsigned(), AcqRel);
            lane.spent.fetch_sub(back.cast_unsigned(), Relaxed);
            if turn.is_open() {
                self.turn_seen_at.store(now, Relaxed);
            }
        } else if self.budget.fetch_sub(nanoseconds, Relaxed) >= nanoseconds {
            // Another thread has taken a chunk in the meantime.
            return true;
        } else {
            self.budget.fetch_add(nanoseconds, Relaxed);
        }
        let Allowance::UpTo(there) = allowance(process, gpu, process.region.limits(gpu), turn, now) else {
            return false;
        };
        // A launch may take more than there is, because a kernel cannot be interrupted. The excess is debt.
        let missing = nanoseconds.saturating_sub(self.budget.load(Relaxed).max(0)).max(0).unsigned_abs();
        let chunk = TIME_CHUNK_NS.max(missing);
        let charged = self.charge(chunk);
        let (chunk, charged) = if charged > there && chunk > missing {
            (missing, self.charge(missing))
        } else {
            (chunk, charged)
        };
        account.spent().fetch_add(charged, AcqRel);
        lane.spent.fetch_add(charged, Relaxed);
        self.last_charge.store(charged, Relaxed);
        self.extend_busy_until(process, gpu, now, charged);
        self.budget.fetch_add(chunk.cast_signed() - nanoseconds, Relaxed);
        true
    }

    /// Extends the predicted end of the submitted work.
    fn extend_busy_until(&self, process: &Process, gpu: usize, now: u64, nanoseconds: u64) {
        let later = |until: u64| Some(until.max(now).saturating_add(nanoseconds));
        let until = self.busy_until.fetch_update(Relaxed, Relaxed, later).unwrap_or(0);
        process.region.lane(gpu).busy_until.store(until.max(now).saturating_add(nanoseconds), Relaxed);
    }

    /// Sets a lower bound for the end of the submitted work.
    pub(super) fn keep_busy_until(&self, process: &Process, gpu: usize, until: u64) {
        self.busy_until.fetch_max(until, Relaxed);
        process.region.lane(gpu).busy_until.fetch_max(until, Relaxed);
    }

    /// Records that the submitted work has run earlier than predicted.
    pub(super) fn finish_at(&self, process: &Process, gpu: usize, now: u64) {
        self.busy_until.fetch_min(now, Relaxed);
        process.region.lane(gpu).busy_until.fetch_min(now, Relaxed);
    }

    /// Returns the predicted end of the submitted work.
    pub(super) fn busy_until(&self) -> u64 {
        self.busy_until.load(Relaxed)
    }
}

/// Whether a GPU's turn scheduler has stopped reporting that it runs.
pub(super) fn is_silent(process: &Process, gpu: usize, now: u64) -> bool {
    now.saturating_sub(process.region.heartbeat(gpu)) >= SCHEDULER_SILENCE_NS
}

/// Returns how much is left up to `allowed`. Both totals wrap, and a container may have written any value: only the
/// difference counts.
fn remaining(allowed: u64, spent: u64) -> Option<u64> {
    u64::try_from(allowed.wrapping_sub(spent).cast_signed()).ok().filter(|&left| left > 0)
}

/// Returns the GPU time in nanoseconds that `elapsed` is worth at a rate below a whole GPU. It cannot overflow,
/// whatever `elapsed` a container forged.
fn accrued(elapsed: u64, rate: u64) -> u64 {
    let whole = u64::from(WHOLE_GPU);
    elapsed / whole * rate + elapsed % whole * rate / whole
}

/// Decides what the container may do: by the turn scheduler's words, or by the clock if the scheduler is gone.
fn allowance(process: &Process, gpu: usize, limits: &GpuLimits, turn: TurnWord, now: u64) -> Allowance {
    let account = process.region.gpu_account(gpu);
    let spent = account.spent().load(Acquire);
    let (since_word, base_word) = (&account.time.local_since, &account.time.local_base);
    if !is_silent(process, gpu, now) {
        if since_word.load(Relaxed) != 0 {
            since_word.store(0, Relaxed);
        }
        return match remaining(limits.allowed(), spent).filter(|_| turn.is_open()) {
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
    // The first process that notices sets the start and the base, from which all others count, too.
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
    match remaining(allowed, spent) {
        Some(there) if there > MAX_UNUSED_NS => {
            // Unused time expires.
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
    fn accrued_time_is_the_rate_of_the_elapsed_time() {
        let whole = u64::from(WHOLE_GPU);
        assert_eq!(accrued(1_000_000_000, whole * 30 / 100), 300_000_000);
        assert_eq!((accrued(0, 1), accrued(whole, 1), accrued(whole - 1, 1)), (0, 1, 0));
        assert_eq!(accrued(u64::MAX, whole - 1), u64::MAX - u64::MAX / whole - 1);
    }
}
