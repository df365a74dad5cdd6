//! Waiting for a word of shared memory to change, without a thread that spins. Both calls work across processes, and
//! waiting works where the word can only be read. Both leave `errno` as it was.
#![allow(unsafe_code)]

use core::sync::atomic::AtomicU32;
use std::time::Duration;

/// How a wait ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum WaitOutcome {
    /// Woken, or interrupted by a signal: look again.
    Woken,
    /// The word was not what it was expected to be.
    Changed,
    /// The time was over.
    TimedOut,
}

/// Waits while the word is `expected`, at most for `timeout`.
pub fn wait(word: &AtomicU32, expected: u32, timeout: Option<Duration>) -> WaitOutcome {
    let timeout = timeout.map(|timeout| libc::timespec {
        tv_sec: libc::time_t::try_from(timeout.as_secs()).unwrap_or(libc::time_t::MAX),
        // Below a thousand million.
        tv_nsec: timeout.subsec_nanos() as libc::c_long,
    });
    let timeout = timeout.as_ref().map_or(std::ptr::null(), std::ptr::from_ref);
    let kept = errno();
    // SAFETY: an aligned word and a time that live through the call.
    let answer =
        unsafe { libc::syscall(libc::SYS_futex, word.as_ptr(), libc::FUTEX_WAIT, expected, timeout) };
    let failed = errno();
    set_errno(kept);
    match (answer, failed) {
        (0, _) | (_, libc::EINTR) => WaitOutcome::Woken,
        (_, libc::ETIMEDOUT) => WaitOutcome::TimedOut,
        _ => WaitOutcome::Changed,
    }
}

/// Wakes at most `number` of those who wait for the word, in any process.
pub fn wake(word: &AtomicU32, number: u32) {
    let number = libc::c_int::try_from(number).unwrap_or(libc::c_int::MAX);
    let kept = errno();
    // SAFETY: an aligned word that lives through the call, which does not touch it.
    unsafe { libc::syscall(libc::SYS_futex, word.as_ptr(), libc::FUTEX_WAKE, number) };
    set_errno(kept);
}

/// The calling thread's `errno`.
#[must_use]
pub fn errno() -> i32 {
    // SAFETY: takes nothing.
    let place = unsafe { libc::__errno_location() };
    // SAFETY: points to the thread's own, always.
    unsafe { *place }
}

/// Sets the calling thread's `errno`.
pub fn set_errno(value: i32) {
    // SAFETY: takes nothing.
    let place = unsafe { libc::__errno_location() };
    // SAFETY: points to the thread's own, always.
    unsafe { *place = value };
}

/// Does something that may leave a different `errno`, and puts the old one back.
pub fn keeping_errno<T>(work: impl FnOnce() -> T) -> T {
    let kept = errno();
    let result = work();
    set_errno(kept);
    result
}
