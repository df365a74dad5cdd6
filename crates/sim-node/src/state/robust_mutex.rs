//! A robust mutex in shared memory: another process inherits it if its owner is killed.

use partage_region::failpoint::point;
use partage_region::liveness_lock::LivenessLocks;
use rustix::thread::futex;
use std::sync::atomic::{AtomicU32, Ordering};

/// Set while a thread may be waiting for the mutex.
const WAITERS: u32 = 1 << 31;

/// Holds the mutex until it is dropped.
pub(super) struct RobustMutexGuard<'a> {
    word: &'a AtomicU32,
    /// Whether the previous owner died while holding the mutex. Its update must then be completed first.
    pub(super) inherited: bool,
}

/// Locks the mutex for the client of `slot`. Waits for a living owner, and inherits from a dead one.
pub(super) fn lock<'a>(word: &'a AtomicU32, slot: usize, alive: &LivenessLocks) -> RobustMutexGuard<'a> {
    // There are fewer than 2^31 slots.
    let me = slot as u32 + 1;
    if word.compare_exchange(0, me, Ordering::Acquire, Ordering::Relaxed).is_ok() {
        point("sim.lock");
        return RobustMutexGuard { word, inherited: false };
    }
    wait(word, me, alive)
}

#[cold]
fn wait<'a>(word: &'a AtomicU32, me: u32, alive: &LivenessLocks) -> RobustMutexGuard<'a> {
    /// After this time, the owner is checked for liveness: critical sections take about a microsecond, so it has been
    /// preempted or is dead.
    const OWNER_CHECK_INTERVAL: futex::Timespec = futex::Timespec { tv_sec: 0, tv_nsec: 2_000_000 };
    loop {
        for _ in 0..100 {
            if word.compare_exchange(0, me, Ordering::Acquire, Ordering::Relaxed).is_ok() {
                return RobustMutexGuard { word, inherited: false };
            }
            std::hint::spin_loop();
        }
        let seen = word.load(Ordering::Relaxed);
        if seen == 0 {
            continue;
        }
        let marked = seen | WAITERS;
        if seen != marked
            && word.compare_exchange(seen, marked, Ordering::Relaxed, Ordering::Relaxed).is_err()
        {
            continue;
        }
        let timed_out = futex::wait(word, futex::Flags::empty(), marked, Some(&OWNER_CHECK_INTERVAL))
            == Err(rustix::io::Errno::TIMEDOUT);
        if word.compare_exchange(0, me | WAITERS, Ordering::Acquire, Ordering::Relaxed).is_ok() {
            // Other threads may still wait; the flag makes the unlock wake one of them.
            return RobustMutexGuard { word, inherited: false };
        }
        let owner = marked & !WAITERS;
        if timed_out && owner != me {
            // While the dead slot is locked, no new process can acquire it, and no other can inherit from it.
            let slot = owner as usize - 1;
            let inherited = alive.with_dead_slot(slot, || {
                word.compare_exchange(marked, me | WAITERS, Ordering::Acquire, Ordering::Relaxed).is_ok()
            });
            if inherited == Some(true) {
                return RobustMutexGuard { word, inherited: true };
            }
        }
    }
}

/// Inherits the mutex from the previous process of this slot. It is dead, because the caller holds the slot's lock.
pub(super) fn inherit_own(word: &AtomicU32, slot: usize) -> Option<RobustMutexGuard<'_>> {
    let me = slot as u32 + 1;
    // Only if this slot is the owner: dropping the guard unlocks the mutex, which another process may hold.
    (word.load(Ordering::Acquire) & !WAITERS == me).then(|| RobustMutexGuard { word, inherited: true })
}

impl Drop for RobustMutexGuard<'_> {
    fn drop(&mut self) {
        if self.word.swap(0, Ordering::Release) & WAITERS != 0 {
            let _ = futex::wake(self.word, futex::Flags::empty(), 1);
        }
    }
}
