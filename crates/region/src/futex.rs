//! Waits for a word of shared memory to change, without spinning. Both calls work across processes, and waiting works
//! on a read-only mapping. Both preserve `errno`.
#![allow(unsafe_code)]

use core::sync::atomic::AtomicU32;
use std::time::Duration;

/// The reason why a wait ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum WaitOutcome {
    /// Woken, or interrupted by a signal: check the word again.
    Woken,
    /// The word did not have the expected value.
    Changed,
    /// The timeout has elapsed.
    TimedOut,
}

/// Waits while the word is `expected`, at most for `timeout`.
pub fn wait(word: &AtomicU32, expected: u32, timeout: Option<Duration>) -> WaitOutcome {
    let timeout = timeout.map(|timeout| libc::timespec {
        tv_sec: libc::time_t::try_from(timeout.as_secs()).unwrap_or(libc::time_t::MAX),
        // Below 1,000,000,000, so it fits.
        tv_nsec: timeout.subsec_nanos() as libc::c_long,
    });
    let timeout = timeout.as_ref().map_or(std::ptr::null(), std::ptr::from_ref);
    let kept = errno();
    // SAFETY: the word is aligned, and the word and the timeout live through the call.
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

/// Wakes at most `number` threads that wait for the word, in any process.
pub fn wake(word: &AtomicU32, number: u32) {
    let number = libc::c_int::try_from(number).unwrap_or(libc::c_int::MAX);
    let kept = errno();
    // SAFETY: the word is aligned and lives through the call, which neither reads nor writes it.
    unsafe { libc::syscall(libc::SYS_futex, word.as_ptr(), libc::FUTEX_WAKE, number) };
    set_errno(kept);
}

/// Returns the calling thread's `errno`.
#[must_use]
pub fn errno() -> i32 {
    // SAFETY: the function takes no arguments and cannot fail.
    let place = unsafe { libc::__errno_location() };
    // SAFETY: the pointer is to the calling thread's `errno`, which is valid for as long as the thread runs.
    unsafe { *place }
}

/// Sets the calling thread's `errno`.
pub fn set_errno(value: i32) {
    // SAFETY: the function takes no arguments and cannot fail.
    let place = unsafe { libc::__errno_location() };
    // SAFETY: the pointer is to the calling thread's `errno`, which is valid for as long as the thread runs.
    unsafe { *place = value };
}

/// Runs `work` and restores `errno` afterwards.
pub fn preserve_errno<T>(work: impl FnOnce() -> T) -> T {
    let kept = errno();
    let result = work();
    set_errno(kept);
    result
}
