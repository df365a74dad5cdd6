//! Waiting for the turn, and for time in it.

use super::{CHUNK, Gate, GpuGate};
use crate::process::{Process, exact_now};
use partage_region::futex::{self, keeping_errno};
use partage_region::{GpuLimits, Turn};
use std::sync::PoisonError;
use std::sync::atomic::Ordering::{AcqRel, Acquire, Relaxed};
use std::time::Duration;

const MILLISECOND: u64 = 1_000_000;

/// An arbiter that has not been heard of for so long is gone.
const SILENCE: u64 = 250 * MILLISECOND;

/// Nobody waits longer than this without looking whether there still is an arbiter.
const LOOK: u64 = 50 * MILLISECOND;

/// Without an arbiter: time that was not used is kept for so long.
const KEPT: u64 = 50 * MILLISECOND;

/// Hundredths of a percent.
const WHOLE: u64 = 10_000;

/// What a container may do now.
enum Allowance {
    /// It may have spent so much.
    UpTo(u64),
    /// It has to wait; at most so long until somebody looks again.
    Wait(u64),
}

impl Gate {
    /// Takes `nanoseconds` for a launch, when there is time for it. The turn is looked at again and again: it may have
    /// gone, come, or stopped to matter.
    #[cold]
    pub(super) fn wait_for_turn(&self, process: &Process, gpu: usize, nanoseconds: i64) {
        keeping_errno(|| {
            let mut began = None;
            let limits = process.region.limits(gpu);
            let here = &self.gpus[gpu];
            loop {
                let turn = limits.turn();
                if !limits.gated() || here.take(process, gpu, turn, nanoseconds) {
                    break;
                }
                let now = exact_now();
                if began.is_none() {
                    began = Some(now);
                    process.region.lane(gpu).waiting.fetch_add(1, Relaxed);
                }
                // Every time: a turn may have come and gone to others of this container.
                let doorbell = process.region.book(gpu).doorbell();
                doorbell.fetch_add(1, Relaxed);
                futex::wake(doorbell, u32::MAX);
                // Whoever waits has time to look at what was measured.
                self.look_at_samples(process, now);
                if let Allowance::Wait(longest) = allowance(process, gpu, limits, turn, now) {
                    futex::wait(limits.turn_word(), turn.0, Some(Duration::from_nanos(longest.min(LOOK))));
                }
            }
            if let Some(began) = began {
                let lane = process.region.lane(gpu);
                let _ = lane.waiting.fetch_update(Relaxed, Relaxed, |count| count.checked_sub(1));
                process.region.book(gpu).throttled().fetch_add(exact_now().saturating_sub(began), Relaxed);
            }
        });
    }

    /// Charges (or credits) what work took beyond what was assumed of it. It has run: nobody has to wait for it.
    pub(super) fn correct(process: &Process, gpu: usize, nanoseconds: i64) {
        let book = process.region.book(gpu);
        let lane = process.region.lane(gpu);
        if nanoseconds >= 0 {
            book.spent().fetch_add(nanoseconds.unsigned_abs(), Relaxed);
            lane.spent.fetch_add(nanoseconds.unsigned_abs(), Relaxed);
        } else {
            let less = |spent: u64| Some(spent.saturating_sub(nanoseconds.unsigned_abs()));
            let _ = book.spent().fetch_update(Relaxed, Relaxed, less);
            let _ = lane.spent.fetch_update(Relaxed, Relaxed, less);
        }
    }
}

impl GpuGate {
    /// Takes a chunk from the container, and a launch's part of it; false if there is none.
    fn take(&self, process: &Process, gpu: usize, turn: Turn, nanoseconds: i64) -> bool {
        let one = self.taking.lock().unwrap_or_else(PoisonError::into_inner);
        let (book, lane) = (process.region.book(gpu), process.region.lane(gpu));
        if self.turn.swap(turn.0, Relaxed) != turn.0 {
            // What was left of another turn goes back.
            let left = self.left.swap(0, Relaxed);
            let back = |spent: u64| Some(spent.saturating_sub_signed(left));
            let _ = book.spent().fetch_update(AcqRel, Acquire, back);
            let _ = lane.spent.fetch_update(Relaxed, Relaxed, back);
        } else if self.left.fetch_sub(nanoseconds, Relaxed) >= nanoseconds {
            // Another thread has taken a chunk in the meantime.
            return true;
        } else {
            self.left.fetch_add(nanoseconds, Relaxed);
        }
        let now = exact_now();
        let Allowance::UpTo(allowed) = allowance(process, gpu, process.region.limits(gpu), turn, now) else {
            return false;
        };
        let missing = nanoseconds.saturating_sub(self.left.load(Relaxed)).unsigned_abs();
        let taken = book.spent().fetch_update(AcqRel, Acquire, |spent| {
            let there = allowed.checked_sub(spent).filter(|&there| there > 0)?;
            spent.checked_add(there.min(CHUNK).max(missing))
        });
        let Ok(before) = taken else { return false };
        let chunk = allowed.saturating_sub(before).min(CHUNK).max(missing);
        lane.spent.fetch_add(chunk, Relaxed);
        self.will_be_busy(process, gpu, now, chunk);
        self.left.fetch_add(chunk.cast_signed() - nanoseconds, Relaxed);
        drop(one);
        true
    }

    /// Says when what was submitted will have run.
    fn will_be_busy(&self, process: &Process, gpu: usize, now: u64, nanoseconds: u64) {
        let later = |until: u64| Some(until.max(now).saturating_add(nanoseconds));
        let until = self.busy_until.fetch_update(Relaxed, Relaxed, later).unwrap_or(0);
        process.region.lane(gpu).busy_until.store(until.max(now).saturating_add(nanoseconds), Relaxed);
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

/// What the container may do, by the arbiter's word or, where it is gone, by the clock.
fn allowance(process: &Process, gpu: usize, limits: &GpuLimits, turn: Turn, now: u64) -> Allowance {
    let book = process.region.book(gpu);
    let spent = book.spent().load(Acquire);
    let beat = process.region.heartbeat(gpu);
    if now.saturating_sub(beat) < SILENCE {
        book.time.local_since.store(0, Relaxed);
        return if turn.is_open() && spent < limits.allowed() {
            Allowance::UpTo(limits.allowed())
        } else {
            Allowance::Wait(LOOK)
        };
    }
    let rate = match limits.cores() {
        0 => u64::from(limits.ceiling()),
        cores => u64::from(cores),
    };
    if rate == 0 || rate >= WHOLE {
        return Allowance::UpTo(u64::MAX);
    }
    // The first to notice says from when and from what the others count, too.
    let mut since = book.time.local_since.load(Acquire);
    if since == 0 || since > now {
        let settled = book.time.local_since.compare_exchange(since, now, AcqRel, Acquire);
        since = settled.map_or_else(|other| other, |_| now);
        if settled.is_ok() {
            book.time.local_base.store(spent, Relaxed);
        }
    }
    let dealt = now.saturating_sub(since) / 100 * rate / (WHOLE / 100);
    let mut allowed = book.time.local_base.load(Relaxed).saturating_add(dealt);
    if allowed.saturating_sub(spent) > KEPT {
        // Time that nobody wanted is over.
        book.time.local_since.store(now, Relaxed);
        book.time.local_base.store(spent, Relaxed);
        allowed = spent.saturating_add(KEPT / 10);
    }
    if spent < allowed {
        Allowance::UpTo(allowed)
    } else {
        let debt = spent - allowed;
        Allowance::Wait((debt / rate).saturating_mul(WHOLE).max(MILLISECOND / 10))
    }
}
