//! Places where a process may be killed. In builds for debugging a test can have a thread, or the whole process, stop
//! for good at the n-th place it comes to. Elsewhere they are nothing.

use std::cell::Cell;
use std::sync::mpsc::{RecvTimeoutError, Sender, channel};
use std::time::Duration;

/// Whether this build has such places.
pub const PLACES: bool = cfg!(debug_assertions);

/// A place to die.
#[inline(always)]
pub fn may_die_here() {
    #[cfg(debug_assertions)]
    count_down();
}

thread_local! {
    static LEFT: Cell<Option<u32>> = const { Cell::new(None) };
    static DEATH: Cell<Option<Sender<()>>> = const { Cell::new(None) };
}

#[cfg(debug_assertions)]
fn count_down() {
    match LEFT.get() {
        None => {}
        Some(0) => die(),
        Some(left) => LEFT.set(Some(left - 1)),
    }
}

#[cfg(debug_assertions)]
fn die() {
    match DEATH.take() {
        Some(death) => {
            let _ = death.send(());
        }
        None => kill_this_process(),
    }
    loop {
        std::thread::park();
    }
}

#[cfg(debug_assertions)]
#[allow(unsafe_code)]
fn kill_this_process() {
    // SAFETY: no pointers; it asks the kernel to end this process.
    let pid = unsafe { libc::getpid() };
    // SAFETY: likewise.
    unsafe { libc::kill(pid, libc::SIGKILL) };
}

/// From here on this thread's process is killed, by SIGKILL, at the n-th place the thread comes to.
pub fn kill_at(n: u32) {
    LEFT.set(Some(n));
}

/// This thread dies nowhere any more.
pub fn spare() {
    LEFT.set(None);
}

/// Does `work` on a thread that stops for good at the n-th place; false if it lived to the end.
///
/// # Panics
/// If it neither ends nor dies within a minute.
pub fn dies(n: u32, work: impl FnOnce() + Send + 'static) -> bool {
    let (died, death) = channel();
    std::thread::spawn(move || {
        LEFT.set(Some(n));
        DEATH.set(Some(died));
        work();
        LEFT.set(None);
    });
    match death.recv_timeout(Duration::from_secs(60)) {
        Ok(()) => true,
        Err(RecvTimeoutError::Disconnected) => false,
        Err(RecvTimeoutError::Timeout) => panic!("the work neither ends nor dies"),
    }
}
