//! When the last process of a share ends.
//!
//! One process of each share is watched, the command first. When it ends, the others are looked for; one of them is watched
//! next, and when there is none the share is given back.

use super::Daemon;
use rustix::event::{EventfdFlags, PollFd, PollFlags, eventfd, poll};
use std::os::fd::OwnedFd;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

/// Interval between counts of a share's processes where none of them can be watched.
const RECOUNT_INTERVAL: Duration = Duration::from_millis(500);

/// Processes that are watched, each for a share.
pub(super) struct Watch {
    /// Rung when the list changes.
    bell: OwnedFd,
    list: Mutex<Vec<Watched>>,
}

struct Watched {
    name: String,
    /// Which share of this name: one may follow another.
    number: u64,
    process: Arc<OwnedFd>,
}

impl Watch {
    pub(super) fn new() -> std::io::Result<Watch> {
        let bell = eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK)?;
        Ok(Watch { bell, list: Mutex::default() })
    }

    fn list(&self) -> std::sync::MutexGuard<'_, Vec<Watched>> {
        self.list.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn add(&self, name: &str, number: u64, process: OwnedFd) {
        let mut list = self.list();
        list.retain(|watched| watched.name != name);
        list.push(Watched { name: name.into(), number, process: Arc::new(process) });
        drop(list);
        // Full only if it was rung 2^64 times.
        let _ = rustix::io::write(&self.bell, &1u64.to_ne_bytes());
    }
}

impl Daemon {
    /// Notices the ends of processes until the daemon is told to end.
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
                vec![PollFd::new(&stop, PollFlags::IN), PollFd::new(&self.watch.bell, PollFlags::IN)];
            fds.extend(watched.iter().map(|(_, _, process)| PollFd::new(&**process, PollFlags::IN)));
            if poll(&mut fds, None).is_err() {
                continue;
            }
            let is_ready = |at: usize| !fds[at].revents().is_empty();
            if is_ready(0) {
                return;
            }
            let rung = is_ready(1);
            let ended: Vec<usize> = (0..watched.len()).filter(|at| is_ready(at + 2)).collect();
            drop(fds);
            if rung {
                let _ = rustix::io::read(&self.watch.bell, &mut [0; 8]);
            }
            for at in ended {
                let (name, number, process) = &watched[at];
                self.watch.list().retain(|watched| !Arc::ptr_eq(&watched.process, process));
                self.one_has_ended(name, *number);
            }
        }
    }

    /// A process of a share has ended: who is left?
    fn one_has_ended(self: &Arc<Self>, name: &str, number: u64) {
        let _span = tracing::info_span!("reconcile", cause = "process exit").entered();
        let state = self.state();
        let Some(live) = state.shares.get(name).filter(|live| live.number == number) else { return };
        let record = live.record.clone();
        drop(state);
        match record.members(&self.home) {
            // One that is not bound yet has nothing that could be looked for but itself.
            Ok(left) if left.is_empty() && record.main.lives() => self.look_later(name, number),
            Ok(left) if left.is_empty() => self.release(name, number),
            Ok(left) => {
                let process = left.iter().find_map(|process| process.pidfd().ok());
                match process {
                    Some(process) => self.watch.add(name, number, process),
                    // All of them ended in the meantime, or they are not ours to see: look again soon.
                    None => self.look_later(name, number),
                }
            }
            Err(error) => {
                tracing::warn!(share = name, %error, "cannot count the share's processes");
                self.look_later(name, number);
            }
        }
    }

    fn look_later(self: &Arc<Self>, name: &str, number: u64) {
        let (daemon, name) = (Arc::clone(self), name.to_string());
        let again = move || {
            if !daemon.threads.sleep(RECOUNT_INTERVAL) {
                daemon.one_has_ended(&name, number);
            }
        };
        if let Err(error) = self.threads.spawn("recount", again) {
            tracing::error!(%error, "cannot start a thread to count a share's processes");
        }
    }

    /// Watches a share from now on, whichever of its processes lives.
    pub(super) fn watch_share(self: &Arc<Self>, name: &str) {
        let state = self.state();
        let Some(live) = state.shares.get(name) else { return };
        let (number, main) = (live.number, live.record.main);
        drop(state);
        match main.pidfd() {
            Ok(process) => self.watch.add(name, number, process),
            // Also where it has not ended and cannot be watched: then it is looked at again and again.
            Err(_) => self.one_has_ended(name, number),
        }
    }
}
