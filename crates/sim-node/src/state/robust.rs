//! A lock in shared memory that a killed owner does not keep.

use partage_region::failpoint::point;
use partage_region::liveness_lock::LivenessLocks;
use rustix::thread::futex;
use std::sync::atomic::{AtomicU32, Ordering};

/// Set while somebody sleeps on the lock.
const WAITERS: u32 = 1 << 31;

/// Held until dropped.
pub(super) struct Held<'a> {
    word: &'a AtomicU32,
    /// The previous owner died inside: what it was doing must be finished first.
    pub(super) inherited: bool,
}

/// Takes the lock for the client of `slot`, waiting for a living owner and inheriting from a dead one.
pub(super) fn take<'a>(word: &'a AtomicU32, slot: usize, alive: &LivenessLocks) -> Held<'a> {
    // Slots are fewer than 2^31.
    let me = slot as u32 + 1;
    if word.compare_exchange(0, me, Ordering::Acquire, Ordering::Relaxed).is_ok() {
        point("sim.lock");
        return Held { word, inherited: false };
    }
    wait(word, me, alive)
}

#[cold]
fn wait<'a>(word: &'a AtomicU32, me: u32, alive: &LivenessLocks) -> Held<'a> {
    /// Sections under the lock take about a microsecond: after this the owner has been put aside, or is dead.
    const PATIENCE: futex::Timespec = futex::Timespec { tv_sec: 0, tv_nsec: 2_000_000 };
    loop {
        for _ in 0..100 {
            if word.compare_exchange(0, me, Ordering::Acquire, Ordering::Relaxed).is_ok() {
                return Held { word, inherited: false };
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
        let timed_out = futex::wait(word, futex::Flags::empty(), marked, Some(&PATIENCE))
            == Err(rustix::io::Errno::TIMEDOUT);
        if word.compare_exchange(0, me | WAITERS, Ordering::Acquire, Ordering::Relaxed).is_ok() {
            // Others may sleep still; the mark makes the unlock wake one of them.
            return Held { word, inherited: false };
        }
        let owner = marked & !WAITERS;
        if timed_out && owner != me {
            // Nobody else can come to live in the slot, or inherit from it, while it is ours.
            let slot = owner as usize - 1;
            let inherited = alive.with_dead_slot(slot, || {
                word.compare_exchange(marked, me | WAITERS, Ordering::Acquire, Ordering::Relaxed).is_ok()
            });
            if inherited == Some(true) {
                return Held { word, inherited: true };
            }
        }
    }
}

/// Takes over the lock from an earlier owner of this slot, who must be dead, since the slot is ours now.
pub(super) fn inherit(word: &AtomicU32, slot: usize) -> Option<Held<'_>> {
    let me = slot as u32 + 1;
    // Made only if it is held: whoever drops it opens the lock, which may be another's.
    (word.load(Ordering::Acquire) & !WAITERS == me).then(|| Held { word, inherited: true })
}

impl Drop for Held<'_> {
    fn drop(&mut self) {
        if self.word.swap(0, Ordering::Release) & WAITERS != 0 {
            let _ = futex::wake(self.word, futex::Flags::empty(), 1);
        }
    }
}
