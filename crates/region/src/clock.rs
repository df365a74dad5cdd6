//! The clock that turns, beats and predictions are told by: the kernel's monotonic one, the same in every container.
#![allow(unsafe_code)]

/// Nanoseconds.
#[must_use]
pub fn exact() -> u64 {
    of(libc::CLOCK_MONOTONIC)
}

/// The same, a few milliseconds behind and a few nanoseconds dear.
#[must_use]
pub fn coarse() -> u64 {
    of(libc::CLOCK_MONOTONIC_COARSE)
}

fn of(which: libc::clockid_t) -> u64 {
    let mut time = libc::timespec { tv_sec: 0, tv_nsec: 0 };
    // SAFETY: fills the struct in, which lives through the call.
    unsafe { libc::clock_gettime(which, &mut time) };
    (time.tv_sec as u64).wrapping_mul(1_000_000_000).wrapping_add(time.tv_nsec as u64)
}
