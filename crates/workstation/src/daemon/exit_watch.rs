//! Detects when the last process of a share exits.
//!
//! One process of each share is watched, the command first. When it exits, another running process of the share is
//! watched; if there is none, the share is released.

use super::Daemon;
use rustix::event::{EventfdFlags, PollFd, PollFlags, eventfd, poll};
use std::os::fd::OwnedFd;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

/// Interval between counts of a share's processes if none of them can be watched.
const RECOUNT_INTERVAL: Duration = Duration::from_millis(500);

/// The processes that are watched, one for each share.
pub(super) struct ExitWatch {
    /// Signaled when the list changes.
    signal: OwnedFd,
    list: Mutex<Vec<WatchedProcess>>,
}

struct WatchedProcess {
    name: String,
    /// Distinguishes shares that have the same name one after the other.
    number: u64,
    process: Arc<OwnedFd>,
}

impl ExitWatch {
    pub(super) fn new() -> std::io::Result<ExitWatch> {
        let signal = eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK)?;
        Ok(ExitWatch { signal, list: Mutex::default() })
    }

    fn list(&self) -> std::sync::MutexGuard<'_, Vec<WatchedProcess>> {
        self.list.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn add(&self, name: &str, number: u64, process: OwnedFd) {
        let mut list = self.list();
        list.retain(|watched| watched.name != name);
        list.push(WatchedProcess { name: name.into(), number, process: Arc::new(process) });
        drop(list);
        // Fails only if the counter is full, and then the descriptor is readable.
        let _ = rustix::io::write(&self.signal, &1u64.to_ne_bytes());
    }
}

impl Daemon {
    /// Watches processes until the daemon is stopped.
    pub(super) fn watch_all(self: &Arc<Self>) {
        loop {
            let watched: Vec<(String, u64, Arc<OwnedFd>)> = self
                .watch
                .list()
                .iter()
                .map(|watched| (watched.name.clone(), watched.number, Arc::clone(&watched.process)))
                .collect();
            let stop = self.threads.stop_signal();
            let mut fds =
                vec![PollFd::new(&stop, PollFlags::IN), PollFd::new(&self.watch.signal, PollFlags::IN)];
            fds.extend(watched.iter().map(|(_, _, process)| PollFd::new(&**process, PollFlags::IN)));
            if poll(&mut fds, None).is_err() {
                continue;
            }
            let is_ready = |at: usize| !fds[at].revents().is_empty();
            if is_ready(0) {
                return;
            }
            let is_signaled = is_ready(1);
            let ended: Vec<usize> = (0..watched.len()).filter(|at| is_ready(at + 2)).collect();
            drop(fds);
            if is_signaled {
                let _ = rustix::io::read(&self.watch.signal, &mut [0; 8]);
            }
            for at in ended {
                let (name, number, process) = &watched[at];
                self.watch.list().retain(|watched| !Arc::ptr_eq(&watched.process, process));
                self.watch_next(name, *number);
            }
        }
    }

    /// Watches another process of a share after one has exited, or releases the share.
    fn watch_next(self: &Arc<Self>, name: &str, number: u64) {
        let _span = tracing::info_span!("reconcile", cause = "process exit").entered();
        let state = self.state();
        let Some(live) = state.shares.get(name).filter(|live| live.number == number) else { return };
        let record = live.record.clone();
        drop(state);
        match record.members(&self.state_dir) {
            // The processes of a share that is not confined yet cannot be found.
            Ok(left) if left.is_empty() && record.main.is_running() => self.watch_next_later(name, number),
            Ok(left) if left.is_empty() => self.release(name, number),
            Ok(left) => {
                let process = left.iter().find_map(|process| process.pidfd().ok());
                match process {
                    Some(process) => self.watch.add(name, number, process),
                    // All of them have exited meanwhile, or cannot be watched by this user.
                    None => self.watch_next_later(name, number),
                }
            }
            Err(error) => {
                tracing::warn!(share = name, %error, "cannot count the share's processes");
                self.watch_next_later(name, number);
            }
        }
    }

    fn watch_next_later(self: &Arc<Self>, name: &str, number: u64) {
        let (daemon, name) = (Arc::clone(self), name.to_string());
        let again = move || {
            if !daemon.threads.sleep(RECOUNT_INTERVAL) {
                daemon.watch_next(&name, number);
            }
        };
        if let Err(error) = self.threads.spawn("recount", again) {
            tracing::error!(%error, "cannot start a thread to count a share's processes");
        }
    }

    /// Starts to watch a share, by any of its running processes.
    pub(super) fn watch_share(self: &Arc<Self>, name: &str) {
        let state = self.state();
        let Some(live) = state.shares.get(name) else { return };
        let (number, main) = (live.number, live.record.main);
        drop(state);
        match main.pidfd() {
            Ok(process) => self.watch.add(name, number, process),
            // It has exited, or cannot be watched: then processes are counted at intervals.
            Err(_) => self.watch_next(name, number),
        }
    }
}
