//! Set-up of a daemon's own process: inherited files and the allocator.
#![allow(unsafe_code)]

/// Blocks of this size, in bytes, go back to the kernel as soon as they are freed.
#[cfg(target_env = "gnu")]
const MMAP_THRESHOLD: libc::c_int = 128 << 10;
/// The number of heap arenas. Each retains freed memory; but with too few of them, a thread that the scheduler preempts
/// while it allocates stops all threads that share its arena.
#[cfg(target_env = "gnu")]
const MAX_ARENAS: libc::c_int = 4;

/// Closes all inherited files but the standard ones: a daemon that outlives the process that started it must not hold
/// that process's locks and pipes.
///
/// Callers must call it first of all, before this process has opened anything itself.
pub fn close_inherited_files() {
    const FIRST: libc::c_uint = 3;
    // SAFETY: closing a descriptor that a value owns would let it act on a descriptor of another file later. By the
    // contract above this process has opened nothing yet. A kernel without the call leaves the files open, which costs
    // only their use.
    unsafe { libc::syscall(libc::SYS_close_range, FIRST, libc::c_uint::MAX, 0) };
}

/// Limits how much freed memory the heap retains from now on. Call it before threads start: an arena that exists stays.
///
/// glibc retains freed memory in an arena for each thread, and after the first large block takes large blocks from
/// there, too. A daemon that reads a library of 20 MiB at its start would hold that memory until it exits.
pub fn limit_heap() {
    #[cfg(target_env = "gnu")]
    for (parameter, value) in [(libc::M_ARENA_MAX, MAX_ARENAS), (libc::M_MMAP_THRESHOLD, MMAP_THRESHOLD)] {
        // SAFETY: `mallopt` takes two numbers and touches no memory of the caller; it ignores a pair that it does not
        // accept.
        unsafe { libc::mallopt(parameter, value) };
    }
}

/// Returns the heap's free memory to the kernel. For the end of work that is done once, or rarely.
pub fn trim_heap() {
    #[cfg(target_env = "gnu")]
    // SAFETY: `malloc_trim` takes a number and moves no block that is in use.
    unsafe {
        libc::malloc_trim(0)
    };
}
