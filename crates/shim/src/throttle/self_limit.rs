//! Limits the container's rate while there is no turn scheduler: by the clock, and by the container's own account of the
//! time that its streams occupy the GPU.
//!
//! All processes of the container share the account. Whichever thread looks first charges the time since the last look.

use crate::process::Process;
use partage_region::protocol::{MAX_GPUS, WHOLE_GPU};
use std::sync::atomic::AtomicU64;
use std::sync::atomic::Ordering::{AcqRel, Acquire, Relaxed};

const MILLISECOND: u64 = 1_000_000;

/// Nanoseconds of unused time that a container keeps.
const MAX_UNUSED_NS: u64 = 50 * MILLISECOND;
/// Shortest and longest wait in nanoseconds before the account is looked at again.
const MIN_WAIT_NS: u64 = MILLISECOND / 10;
const MAX_WAIT_NS: u64 = 5 * MILLISECOND;
/// Longest time in nanoseconds for which launches that no marker follows count as running.
const MAX_TAIL_NS: u64 = 5 * MILLISECOND;
/// Time in nanoseconds after which a sample says nothing about the time since.
const STALE_SAMPLE_NS: u64 = 1_000 * MILLISECOND;

/// The samples of this process, by GPU, where it does not see the markers of the container's other processes.
static PRIVATE_SAMPLES: [AtomicU64; MAX_GPUS] = [const { AtomicU64::new(0) }; MAX_GPUS];

/// Returns the GPU time in nanoseconds that `elapsed` is worth at a rate below a whole GPU. It cannot overflow,
/// whatever `elapsed` a container forged.
fn accrued(elapsed: u64, rate: u64) -> u64 {
    let whole = u64::from(WHOLE_GPU);
    elapsed / whole * rate + elapsed % whole * rate / whole
}

/// Charges the time since the last sample, and takes a new one.
fn sample(process: &Process, gpu: usize, now: u64) {
    const OCCUPIED: u64 = 1;
    let account = process.region.gpu_account(gpu);
    let activity = process.region.activity(gpu);
    let has_tail = activity.has_tail && now.saturating_sub(activity.since) < MAX_TAIL_NS;
    let is_occupied = activity.occupied || has_tail;
    let word = match PRIVATE_SAMPLES.get(gpu) {
        Some(word) if !process.region.has_shared_markers() => word,
        _ => &account.time.local_sample,
    };
    let before = word.load(Acquire);
    let new = now & !OCCUPIED | u64::from(is_occupied);
    if word.compare_exchange(before, new, AcqRel, Relaxed).is_err() {
        // Another thread has charged the time.
        return;
    }
    let passed = now.saturating_sub(before & !OCCUPIED);
    if before == 0 || passed > STALE_SAMPLE_NS {
        return;
    }
    // Work that has begun or ended meanwhile is charged in full: a thread looks right when its work has ended.
    if before & OCCUPIED != 0 {
        account.spent().fetch_add(passed, AcqRel);
    } else if is_occupied && activity.since > 0 {
        account.spent().fetch_add(now.saturating_sub(activity.since).min(passed), AcqRel);
    }
}

/// Returns how long a launch must wait before it looks again; `None` if it may pass.
pub(super) fn wait_needed(process: &Process, gpu: usize, now: u64) -> Option<u64> {
    process.region.reclaim_dead_processes_if_due();
    sample(process, gpu, now);
    let account = process.region.gpu_account(gpu);
    let (since_word, base_word) = (&account.time.local_since, &account.time.local_base);
    let rate = match process.region.cores(gpu) {
        0 => process.region.ceiling(gpu),
        cores => cores,
    };
    let (rate, whole) = (u64::from(rate), u64::from(WHOLE_GPU));
    if rate >= whole {
        return None;
    }
    if rate == 0 {
        return Some(MAX_WAIT_NS);
    }
    let spent = account.spent().load(Acquire);
    // The first process that notices sets the start and the base, from which all others count, too.
    let mut since = since_word.load(Acquire);
    if since == 0 || since > now {
        let settled = since_word.compare_exchange(since, now, AcqRel, Acquire);
        since = settled.map_or_else(|other| other, |_| now);
        if settled.is_ok() {
            base_word.store(spent, Relaxed);
        }
    }
    let allowed = base_word.load(Relaxed).wrapping_add(accrued(now.saturating_sub(since), rate));
    let left = allowed.wrapping_sub(spent).cast_signed();
    if left < 0 {
        let debt = left.unsigned_abs();
        return Some((debt.saturating_mul(whole) / rate).clamp(MIN_WAIT_NS, MAX_WAIT_NS));
    }
    if left.unsigned_abs() > MAX_UNUSED_NS {
        // Unused time expires.
        since_word.store(now, Relaxed);
        base_word.store(spent.wrapping_sub(MAX_UNUSED_NS / 10), Relaxed);
    }
    None
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
