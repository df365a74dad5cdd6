//! Polls the driver, audits the shares, and attributes processes to them.

use super::Daemon;
use crate::share_store::ShareRecord;
use crate::state_dir::StateDir;
use partage_enforce::monitor::MonitorReport;
use partage_host::share_processes::{Membership, ProcessIndex};
use std::cell::OnceCell;
use std::collections::BTreeMap;
use std::sync::{Arc, MutexGuard, PoisonError};
use std::time::Duration;

/// Interval between two polls of the driver.
const POLL_INTERVAL: Duration = Duration::from_secs(1);

impl Daemon {
    /// Returns the result of the last poll.
    pub(super) fn observed(&self) -> MutexGuard<'_, MonitorReport<String>> {
        self.observed.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Polls until the daemon ends.
    pub(super) fn poll_until_end(self: &Arc<Self>) {
        while !self.threads.sleep(POLL_INTERVAL) {
            let _span = tracing::info_span!("reconcile", cause = "poll").entered();
            let state = self.state();
            let has_shares = !state.shares.is_empty();
            let needed = self.foreground || has_shares || !state.queue.is_empty();
            drop(state);
            if has_shares {
                // A daemon that adopted shares has no standby process yet, and one that was started may have been
                // killed.
                self.call_successor();
            }
            let released = self.release_held_elsewhere();
            if (needed && self.poll()) || released {
                // A GPU became unhealthy or recovered, or capacity that was held is free.
                let mut state = self.state();
                self.after_change(&mut state);
            }
        }
    }

    /// Releases the shares of another version of the daemon once their directories are removed. Returns whether any
    /// were.
    fn release_held_elsewhere(&self) -> bool {
        let mut state = self.state();
        let before = state.held_elsewhere.len();
        state.held_elsewhere.retain(|name, _| self.state_dir.share(name).exists());
        state.held_elsewhere.len() < before
    }

    /// Polls the driver once. Returns whether the health of a GPU changed.
    pub(super) fn poll(self: &Arc<Self>) -> bool {
        let (records, audited) = {
            let state = self.state();
            let records: Vec<ShareRecord> = state.shares.values().map(|live| live.record.clone()).collect();
            (records, self.regions.audited())
        };
        let mut monitor = self.monitor.lock().unwrap_or_else(PoisonError::into_inner);
        // Processes are listed after the driver was read, so that the list contains all processes that the driver
        // names.
        let owners = OnceCell::new();
        let owner = |pid: u32| owners.get_or_init(|| ProcessOwners::of(&records, &self.state_dir)).find(pid);
        let report = monitor.poll(&self.machine.gpus, &audited, &owner);
        drop(monitor);
        self.regions.charge_unaccounted(&report.unaccounted);
        for (name, finding) in &report.new_findings {
            tracing::warn!(share = %name, %finding, "bypass of limits suspected");
        }
        for (uuid, health) in &report.health_changes {
            let gpu_index = self.machine.node.gpu_index(uuid);
            match health {
                Some(cause) => tracing::warn!(gpu_index, gpu = %uuid, cause, "GPU unhealthy"),
                None => tracing::info!(gpu_index, gpu = %uuid, "GPU recovered"),
            }
        }
        let changed = !report.health_changes.is_empty();
        *self.observed() = report;
        changed
    }
}

/// Returns the memberships by which the processes of a share are found. A cgroup lists all of them in one read.
pub(super) fn memberships(record: &ShareRecord, state_dir: &StateDir) -> Vec<Membership> {
    match &record.cgroup {
        Some(cgroup) => vec![Membership::Cgroup(cgroup.clone())],
        None => record.memberships(state_dir),
    }
}

/// The share of each process.
struct ProcessOwners<'a> {
    names: Vec<&'a str>,
    /// The first process of each share, which has no membership before it is confined.
    main: BTreeMap<u32, &'a str>,
    process_index: ProcessIndex,
}

impl ProcessOwners<'_> {
    fn of<'a>(shares: &'a [ShareRecord], state_dir: &StateDir) -> ProcessOwners<'a> {
        let names: Vec<&str> = shares.iter().map(|record| record.name.as_str()).collect();
        let main = shares.iter().zip(&names).map(|(record, name)| (record.main.pid, *name)).collect();
        let memberships: Vec<Vec<Membership>> =
            shares.iter().map(|record| memberships(record, state_dir)).collect();
        // If the processes cannot be listed, they have no owner until the next poll.
        ProcessOwners { names, main, process_index: ProcessIndex::of(&memberships).unwrap_or_default() }
    }

    fn find(&self, pid: u32) -> Option<String> {
        let counted = || self.process_index.owner(pid).and_then(|at| self.names.get(at));
        self.main.get(&pid).or_else(counted).map(|name| name.to_string())
    }
}
