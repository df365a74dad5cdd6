//! Memory that a daemon has used once is not kept for ever.
//!
//! glibc keeps what was freed in an arena for each thread, and from the first large block on takes large blocks from there,
//! too. A daemon that reads a library of 20 MiB at its start would hold it until its end.
#![allow(unsafe_code)]

/// Blocks of this size go back to the kernel as soon as they are freed.
#[cfg(target_env = "gnu")]
const LARGE: libc::c_int = 128 << 10;
/// Few: each keeps some. But where processors are scarce, who has to wait while it allocates makes all wait that share its arena.
#[cfg(target_env = "gnu")]
const ARENAS: libc::c_int = 4;

/// Keeps the heap small from now on. Call it before there are threads: an arena that is there stays.
pub fn keep_small() {
    #[cfg(target_env = "gnu")]
    for (what, value) in [(libc::M_ARENA_MAX, ARENAS), (libc::M_MMAP_THRESHOLD, LARGE)] {
        // SAFETY: it takes two numbers. Where it refuses them, all stays as it was.
        unsafe { libc::mallopt(what, value) };
    }
}

/// Gives back to the kernel what is free in the heap: after work that is done once, or rarely.
pub fn give_back() {
    #[cfg(target_env = "gnu")]
    // SAFETY: it takes a number, and moves nothing that is in use.
    unsafe {
        libc::malloc_trim(0)
    };
}
