//! Confines the first process of a share: a cgroup of its own, and a check of the namespaces that the process reports.

use super::Daemon;
use crate::share_store::ConfinementRecord;
use partage_enforce::error_chain::describe;
use partage_enforce::libraries::LibraryError;
use partage_enforce::records::RecordError;
use partage_host::cgroup::Cgroup;
use partage_host::confine::Confinement;
use partage_host::process::ProcessIdentity;
use std::sync::Arc;
use std::time::Duration;

/// How the daemon confined a share's processes, with notes on what failed.
pub(super) struct ConfinementOutcome {
    /// Whether the device filter denies other GPUs.
    device_filter: bool,
    pub(super) notes: Vec<String>,
}

/// Why a process cannot start in its share.
#[derive(Debug, thiserror::Error)]
pub(super) enum ConfineError {
    /// The share was stopped in the meantime.
    #[error("the share no longer exists")]
    ShareGone,
    /// The process reports a confinement that it does not have.
    #[error("the process is not confined: its region is not visible in its mount namespace")]
    NotConfined,
    /// The share's own libraries cannot be installed.
    #[error(transparent)]
    Libraries(#[from] LibraryError),
    /// The confinement cannot be recorded.
    #[error(transparent)]
    Record(#[from] RecordError),
}

impl Daemon {
    /// Moves the process into a cgroup of its own that denies the device files of other GPUs. The kernel needs an RCU
    /// grace period for that, during which the process confines itself.
    pub(super) fn confine(self: &Arc<Self>, name: &str, main: ProcessIdentity) -> ConfinementOutcome {
        let mut confined = ConfinementOutcome { device_filter: false, notes: Vec::new() };
        let id = self.state().shares.get(name).map(|live| live.record.id.clone()).unwrap_or_default();
        let cgroup = match Cgroup::create(&self.state_dir.cgroup(name, &id), main.pid) {
            Ok(Some(cgroup)) => cgroup,
            Ok(None) => return confined,
            Err(error) => {
                confined.notes.push(format!("its processes are not in a cgroup: {error}"));
                return confined;
            }
        };
        let mut state = self.state();
        let Some(live) = state.shares.get_mut(name).filter(|live| live.record.main == main) else {
            drop(state);
            self.remove_soon(cgroup);
            return confined;
        };
        // Recorded first, so that a daemon that takes over can remove it.
        live.record.cgroup = Some(cgroup.clone());
        if let Err(error) = live.record.write(&self.state_dir) {
            confined.notes.push(format!("cannot record its cgroup: {}", describe(&error)));
        }
        let devices = self.machine.other_devices(&live.record.shares);
        drop(state);
        if !devices.is_empty() {
            match cgroup.deny_devices(&devices) {
                Ok(()) => confined.device_filter = true,
                Err(error) => confined
                    .notes
                    .push(format!("the device files of other GPUs stay accessible: {}", describe(&error))),
            }
        }
        // If the process has exited, its pid may belong to a process of no share.
        let taken = cgroup.add_process(main.pid).map_err(|error| error.to_string());
        if let Err(error) =
            taken.and_then(|()| main.is_running().then_some(()).ok_or_else(|| "it has ended".into()))
        {
            confined.notes.push(format!("its processes are not in a cgroup: {error}"));
            confined.device_filter = false;
            if let Some(live) = self.state().shares.get_mut(name).filter(|live| live.record.main == main) {
                live.record.cgroup = None;
            }
            self.remove_soon(cgroup);
        }
        confined
    }

    /// Checks the confinement that a process reports, and records it.
    pub(super) fn verify_confinement(
        &self,
        name: &str,
        main: ProcessIdentity,
        confinement: Confinement,
        confined: &ConfinementOutcome,
    ) -> Result<(), ConfineError> {
        let state = self.state();
        let live = state.shares.get(name).filter(|live| live.record.main == main);
        let membership = live.ok_or(ConfineError::ShareGone)?.record.membership(&self.state_dir, confinement);
        drop(state);
        match confinement {
            Confinement::LibraryPath => {
                self.machine.install_for(&self.state_dir, name)?;
            }
            Confinement::MountNamespace | Confinement::UserNamespace => {
                if !membership.is_some_and(|membership| membership.includes(main.pid)) {
                    return Err(ConfineError::NotConfined);
                }
            }
        }
        let mut state = self.state();
        let live = state.shares.get_mut(name).filter(|live| live.record.main == main);
        let live = live.ok_or(ConfineError::ShareGone)?;
        live.record.confinement =
            Some(ConfinementRecord { confinement, device_filter: confined.device_filter });
        let written = live.record.write(&self.state_dir);
        drop(state);
        written?;
        self.call_successor();
        Ok(())
    }

    /// Removes a cgroup as soon as the kernel allows it: its process is about to exit, or runs on outside of it.
    pub(super) fn remove_soon(self: &Arc<Self>, cgroup: Cgroup) {
        const MAX_ATTEMPTS: u32 = 100;
        const RETRY_INTERVAL: Duration = Duration::from_millis(50);
        let remove = move || {
            // Not interrupted when the daemon stops, which waits for this thread: the cgroup would stay forever.
            for _ in 0..MAX_ATTEMPTS {
                if cgroup.move_to_parent().is_ok() && cgroup.remove().is_ok() {
                    return;
                }
                std::thread::sleep(RETRY_INTERVAL);
            }
        };
        if let Err(error) = self.threads.spawn("remove-cgroup", remove) {
            tracing::error!(%error, "cannot start a thread to remove a cgroup");
        }
    }
}
