//! Reads the kernel's monotonic clock, which is the same in every container. Turns, heartbeats and predictions use it.
#![allow(unsafe_code)]

/// Returns the monotonic time in nanoseconds.
#[must_use]
pub fn monotonic_ns() -> u64 {
    read(libc::CLOCK_MONOTONIC)
}

/// Returns the coarse monotonic time in nanoseconds: up to a few milliseconds stale, and a few nanoseconds to read.
#[must_use]
pub fn coarse_monotonic_ns() -> u64 {
    read(libc::CLOCK_MONOTONIC_COARSE)
}

fn read(clock: libc::clockid_t) -> u64 {
    let mut time = libc::timespec { tv_sec: 0, tv_nsec: 0 };
    // SAFETY: `time` is a valid `timespec` that lives through the call, which only writes to it.
    unsafe { libc::clock_gettime(clock, &mut time) };
    (time.tv_sec as u64).wrapping_mul(1_000_000_000).wrapping_add(time.tv_nsec as u64)
}
