//! Fault injection points: places where a test kills the process, or stops the thread, as a crash there would.
//!
//! Debug builds have them; in release builds [`point`] is empty. A point is armed in one of three ways: by its name,
//! for the whole process ([`arm_from_environment`]); as the n-th point that a thread reaches, which kills the process
//! ([`kill_process_at`]); or as the n-th point that a closure reaches, which stops its thread forever
//! ([`stop_thread_at`]).

use std::cell::Cell;
use std::sync::OnceLock;
use std::sync::mpsc::{RecvTimeoutError, Sender, channel};
use std::time::Duration;

/// Whether this build has fault injection points.
pub const ENABLED: bool = cfg!(debug_assertions);

/// Environment variable that names the point at which [`arm_from_environment`] kills the process.
pub const VARIABLE: &str = "PARTAGE_FAILPOINT";

/// How long [`stop_thread_at`] waits for its closure.
const STOP_TIMEOUT: Duration = Duration::from_secs(60);

/// Name of the armed point.
static ARMED: OnceLock<String> = OnceLock::new();

thread_local! {
    /// Number of points that this thread passes before it reaches the armed one.
    static COUNTDOWN: Cell<Option<u32>> = const { Cell::new(None) };
    /// Reports that the thread has stopped; without it the process is killed.
    static STOPPED: Cell<Option<Sender<()>>> = const { Cell::new(None) };
}

/// Marks a fault injection point: kills the process or stops the thread here if the point is armed.
#[inline(always)]
pub fn point(name: &str) {
    #[cfg(debug_assertions)]
    reached(name);
    #[cfg(not(debug_assertions))]
    let _ = name;
}

#[cfg(debug_assertions)]
fn reached(name: &str) {
    if ARMED.get().is_some_and(|armed| armed == name) {
        kill_this_process();
    }
    match COUNTDOWN.get() {
        None => {}
        Some(0) => stop(),
        Some(left) => COUNTDOWN.set(Some(left - 1)),
    }
}

#[cfg(debug_assertions)]
fn stop() {
    match STOPPED.take() {
        Some(stopped) => {
            let _ = stopped.send(());
        }
        None => kill_this_process(),
    }
    loop {
        std::thread::park();
    }
}

/// Kills the process without any cleanup.
#[cfg(debug_assertions)]
#[allow(unsafe_code)]
fn kill_this_process() {
    // SAFETY: the function takes no arguments and cannot fail.
    let pid = unsafe { libc::getpid() };
    // SAFETY: no pointers are passed; the signal goes to this process only.
    unsafe { libc::kill(pid, libc::SIGKILL) };
}

/// Arms the point that [`VARIABLE`] names, for the lifetime of the process. Only Partage's own programs call this: the
/// shim never reads the environment.
pub fn arm_from_environment() {
    if ENABLED && let Ok(name) = std::env::var(VARIABLE) {
        // Later calls find it set already; the variable does not change.
        let _ = ARMED.set(name);
    }
}

/// Arms the n-th point that this thread reaches from now on: the process is killed there.
pub fn kill_process_at(n: u32) {
    COUNTDOWN.set(Some(n));
}

/// Disarms this thread's points.
pub fn disarm() {
    COUNTDOWN.set(None);
}

/// Runs `work` on a thread that stops forever at the n-th point that it reaches. Returns whether it stopped, rather
/// than finished.
///
/// # Panics
/// If `work` neither finishes nor stops within a minute.
pub fn stop_thread_at(n: u32, work: impl FnOnce() + Send + 'static) -> bool {
    let (stopped, stop) = channel();
    std::thread::spawn(move || {
        COUNTDOWN.set(Some(n));
        STOPPED.set(Some(stopped));
        work();
        COUNTDOWN.set(None);
    });
    match stop.recv_timeout(STOP_TIMEOUT) {
        Ok(()) => true,
        Err(RecvTimeoutError::Disconnected) => false,
        Err(RecvTimeoutError::Timeout) => panic!("the work neither finished nor stopped"),
    }
}
