//! Waits for any of many doorbells at once, with a timeout that is kept to the microsecond.
#![allow(unsafe_code)]

use crate::futex;
use crate::handle::RegionHandle;
use std::sync::OnceLock;
use std::sync::atomic::AtomicU32;
use std::time::Duration;

/// Most words that the kernel can wait for at once.
const MAX_WORDS: usize = 128;

/// `FUTEX2_SIZE_U32` without `FUTEX2_PRIVATE`: words of 32 bits, in memory that processes share.
const SHARED_U32: u32 = 2;

/// Longest wait before doorbells are polled, while containers are active, on a kernel that can wait for one word only.
const ACTIVE_POLL_INTERVAL_NS: u64 = super::MILLI;
/// Longest wait before doorbells are polled, while no container is active.
const IDLE_POLL_INTERVAL_NS: u64 = 20 * super::MILLI;

/// Pause after a doorbell's page is found missing, until the next poll excludes its container.
const FAULT_PAUSE: Duration = Duration::from_micros(500);

/// `struct futex_waitv`: one word to wait for.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
struct FutexWaitv {
    expected: u64,
    address: u64,
    flags: u32,
    reserved: u32,
}

/// Waits for a list of doorbells, which is reused so that a wait allocates nothing.
#[derive(Debug)]
pub(super) struct DoorbellWait {
    list: Vec<FutexWaitv>,
    /// Whether some doorbells are not in the list and must be polled.
    incomplete: bool,
    many: bool,
}

/// Why a wait ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum WakeReason {
    /// The time is over, and no doorbell rang.
    TimedOut,
    /// This doorbell rang, counted in the order in which they were added. Others may have rung, too, and end the next
    /// wait at once.
    Doorbell(usize),
    /// Any of the doorbells may have rung.
    Unknown,
}

/// Returns whether the kernel can wait for several words at once (Linux 5.16, unless a seccomp filter forbids it).
fn kernel_waits_for_many() -> bool {
    static ANSWER: OnceLock<bool> = OnceLock::new();
    *ANSWER.get_or_init(|| {
        let none = std::ptr::null::<FutexWaitv>();
        // SAFETY: the kernel rejects a list of length zero before it reads from the null pointer.
        let answer = unsafe { libc::syscall(libc::SYS_futex_waitv, none, 0, 0, none, libc::CLOCK_MONOTONIC) };
        answer == -1 && futex::errno() == libc::EINVAL
    })
}

impl DoorbellWait {
    pub(super) fn new() -> Self {
        Self { list: Vec::with_capacity(MAX_WORDS), incomplete: false, many: kernel_waits_for_many() }
    }

    /// Waits as on a kernel that can wait for one word only.
    #[cfg(test)]
    pub(super) fn one_at_a_time() -> Self {
        Self { many: false, ..Self::new() }
    }

    /// Begins a list with the word by which this process's other threads signal.
    pub(super) fn begin(&mut self, word: &AtomicU32, expected: u32) {
        self.list.clear();
        self.incomplete = !self.many;
        self.push(word.as_ptr(), expected);
    }

    /// Adds a container's doorbell on a GPU; `seen` is its last known value.
    pub(super) fn add(&mut self, region: &RegionHandle, gpu: usize, seen: u32) {
        if self.many && self.list.len() < MAX_WORDS {
            self.push(region.doorbell_address(gpu), seen);
        } else {
            self.incomplete = true;
        }
    }

    fn push(&mut self, address: *const u32, expected: u32) {
        let address = address.addr() as u64;
        self.list.push(FutexWaitv { expected: expected.into(), address, flags: SHARED_U32, reserved: 0 });
    }

    /// Waits until one of the words changes, or until `until` on the monotonic clock. Where the kernel cannot wait for
    /// all doorbells it returns early, so that they are polled: earlier while containers are `active`.
    pub(super) fn wait(&self, word: &AtomicU32, now: u64, until: u64, active: bool) -> WakeReason {
        let poll = if active { ACTIVE_POLL_INTERVAL_NS } else { IDLE_POLL_INTERVAL_NS };
        let until = if self.incomplete { until.min(now.saturating_add(poll)) } else { until };
        if !self.many {
            let expected = self.list.first().map_or(0, |own| own.expected);
            let expected = u32::try_from(expected).unwrap_or(0);
            futex::wait(word, expected, Some(Duration::from_nanos(until.saturating_sub(now))));
            return WakeReason::Unknown;
        }
        let time = libc::timespec {
            tv_sec: libc::time_t::try_from(until / 1_000_000_000).unwrap_or(libc::time_t::MAX),
            // Below 1,000,000,000, so it fits.
            tv_nsec: (until % 1_000_000_000) as libc::c_long,
        };
        let time = std::ptr::from_ref(&time);
        // At most 128, so it fits.
        let length = self.list.len() as libc::c_uint;
        // SAFETY: the list and the time live through the call; the kernel validates the addresses in the list and does
        // not write to them.
        let answer = unsafe {
            libc::syscall(libc::SYS_futex_waitv, self.list.as_ptr(), length, 0, time, libc::CLOCK_MONOTONIC)
        };
        if let Ok(index) = usize::try_from(answer) {
            // The first is this process's own word.
            return index.checked_sub(1).map_or(WakeReason::Unknown, WakeReason::Doorbell);
        }
        match futex::errno() {
            libc::ETIMEDOUT if !self.incomplete => WakeReason::TimedOut,
            libc::EFAULT => {
                // A container truncated its file under a doorbell. The next poll excludes it; do not spin until then.
                std::thread::sleep(FAULT_PAUSE);
                WakeReason::Unknown
            }
            _ => WakeReason::Unknown,
        }
    }
}

/// Makes the calling thread wake up at the requested time, not up to 50 µs later, and before ordinary threads, where
/// that is permitted: handovers must not wait for busy processors.
pub(super) fn raise_priority() {
    // SAFETY: no pointers are passed; the setting affects the calling thread only.
    unsafe { libc::prctl(libc::PR_SET_TIMERSLACK, 1_000, 0, 0, 0) };
    let lowest = libc::sched_param { sched_priority: 1 };
    // SAFETY: the parameter lives through the call; zero stands for the calling thread. A refusal changes nothing.
    let real_time =
        unsafe { libc::sched_setscheduler(0, libc::SCHED_RR | libc::SCHED_RESET_ON_FORK, &lowest) };
    if real_time != 0 {
        // SAFETY: no pointers are passed; on Linux, zero stands for the calling thread. A refusal changes nothing.
        unsafe { libc::setpriority(libc::PRIO_PROCESS, 0, -10) };
    }
}
