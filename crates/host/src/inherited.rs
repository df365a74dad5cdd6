//! What a process has from the one that started it.
#![allow(unsafe_code)]

/// Closes all files but the standard ones: a daemon that outlives who started it must not hold their locks and pipes.
///
/// To be called first of all, before this process has opened anything itself.
pub fn close_files() {
    const FIRST: libc::c_uint = 3;
    // SAFETY: nothing here owns a file yet. A kernel without the call leaves them open, which costs nothing but their use.
    unsafe { libc::syscall(libc::SYS_close_range, FIRST, libc::c_uint::MAX, 0) };
}
