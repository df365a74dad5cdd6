//! What the driver says, beside what the shares say of themselves.

use super::Keeper;
use crate::home::Home;
use crate::store::Record;
use partage_host::members::{Census, Mark};
use partage_host::truth::{Truth, Watched};
use std::collections::BTreeMap;
use std::sync::{Arc, MutexGuard, PoisonError};
use std::time::Duration;

/// How often the driver is asked.
const BEAT: Duration = Duration::from_secs(1);

impl Keeper {
    pub(super) fn truth(&self) -> MutexGuard<'_, Truth<String>> {
        self.truth.lock().unwrap_or_else(PoisonError::into_inner)
    }

    pub(super) fn look_again_and_again(self: &Arc<Self>) {
        loop {
            std::thread::sleep(BEAT);
            let _span = tracing::info_span!("reconcile", cause = "poll").entered();
            let state = self.state();
            let needed = self.options.foreground || !state.shares.is_empty() || !state.queue.is_empty();
            let (ending, kept) = (state.ending, !state.shares.is_empty());
            drop(state);
            if ending {
                return;
            }
            if kept {
                // Shares that were taken up have nobody yet, and the one who waited may have been killed.
                self.call_successor();
            }
            let released = self.release_held_elsewhere();
            if (needed && self.look()) || released {
                // A GPU became unhealthy or recovered, or something is free that was held.
                let mut state = self.state();
                self.after_change(&mut state);
            }
        }
    }

    /// Releases what shares of another version of the daemon held once their folders are gone. Returns whether any are.
    fn release_held_elsewhere(&self) -> bool {
        let mut state = self.state();
        let before = state.held_elsewhere.len();
        state.held_elsewhere.retain(|name, _| self.home.share(name).exists());
        state.held_elsewhere.len() < before
    }

    /// Asks the driver and compares; whether a GPU's health changed.
    pub(super) fn look(self: &Arc<Self>) -> bool {
        let (records, watched): (Vec<Record>, Vec<Watched<String>>) = {
            let state = self.state();
            let watched = state.shares.values().map(|live| {
                let key = live.record.name.clone();
                {
                    let region = self.regions.region(&key);
                    (live.record.clone(), Watched { key, region })
                }
            });
            watched.unzip()
        };
        let mut auditor = self.auditor.lock().unwrap_or_else(PoisonError::into_inner);
        // The driver is asked first, who has which processes then: what it names is older than the list.
        let owners = std::cell::OnceCell::new();
        let owner = |pid: u32| owners.get_or_init(|| Owners::of(&records, &self.home)).find(pid);
        let truth = auditor.round(&self.machine.gpus, &watched, &owner);
        for (name, word) in &truth.raised {
            tracing::warn!(share = %name, finding = %word, "bypass of limits suspected");
        }
        for (uuid, health) in &truth.health_changes {
            let gpu = self.machine.node.gpu_index(uuid).unwrap_or_default();
            match health {
                Some(reason) => tracing::warn!(gpu, %uuid, %reason, "GPU unhealthy"),
                None => tracing::info!(gpu, %uuid, "GPU recovered"),
            }
        }
        let mut fatal_errors = self.fatal_errors.lock().unwrap_or_else(PoisonError::into_inner);
        fatal_errors.store(&self.machine.records, &self.machine.boot_id, self.machine.gpus.fatal());
        drop(fatal_errors);
        let changed = !truth.health_changes.is_empty();
        *self.truth() = truth;
        changed
    }
}

/// What the processes of a share are found by. A cgroup has them all, and says so at once.
pub(super) fn marks(record: &Record, home: &Home) -> Vec<Mark> {
    match &record.cgroup {
        Some(cgroup) => vec![Mark::Cgroup(cgroup.clone())],
        None => record.marks(home),
    }
}

/// Whose a process is.
struct Owners<'a> {
    names: Vec<&'a str>,
    /// The first process of each share, which has no marks in the beginning.
    main: BTreeMap<u32, &'a str>,
    census: Census,
}

impl Owners<'_> {
    fn of<'a>(shares: &'a [Record], home: &Home) -> Owners<'a> {
        let names: Vec<&str> = shares.iter().map(|record| record.name.as_str()).collect();
        let main = shares.iter().zip(&names).map(|(record, name)| (record.main.pid, *name)).collect();
        let marks: Vec<Vec<Mark>> = shares.iter().map(|record| marks(record, home)).collect();
        // Who cannot be found out belongs to nobody for now; the next look asks again.
        Owners { names, main, census: Census::of(&marks).unwrap_or_default() }
    }

    fn find(&self, pid: u32) -> Option<String> {
        let counted = || self.census.owner(pid).and_then(|at| self.names.get(at));
        self.main.get(&pid).or_else(counted).map(|name| name.to_string())
    }
}
