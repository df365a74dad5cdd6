//! Confines the first process of a share: a cgroup of its own, and a check of the namespaces that the process reports.

use super::Daemon;
use crate::store::Bond;
use partage_enforce::error_chain::describe;
use partage_enforce::libraries::LibraryError;
use partage_enforce::records::RecordError;
use partage_host::binding::Binding;
use partage_host::cgroup::Cgroup;
use partage_host::process::Identity;
use std::sync::Arc;
use std::time::Duration;

/// How a share's processes are confined from outside, with notes on what could not be done.
pub(super) struct Confined {
    /// Whether the device files of other GPUs are closed.
    gate: bool,
    pub(super) notes: Vec<String>,
}

/// Why a process cannot start in its share.
#[derive(Debug, thiserror::Error)]
pub(super) enum ConfineError {
    /// The share was stopped in the meantime.
    #[error("the share is gone")]
    ShareGone,
    /// The process reports a confinement that it does not have.
    #[error("it says that it sees its region, and does not")]
    NotConfined,
    /// The share's own libraries cannot be installed.
    #[error(transparent)]
    Libraries(#[from] LibraryError),
    /// The confinement cannot be recorded.
    #[error(transparent)]
    Record(#[from] RecordError),
}

impl Daemon {
    /// Puts the process into a cgroup of its own, with the device files of other GPUs closed. The kernel needs
    /// a grace period for that, in which the process confines itself.
    pub(super) fn confine(self: &Arc<Self>, name: &str, main: Identity) -> Confined {
        let mut confined = Confined { gate: false, notes: Vec::new() };
        let id = self.state().shares.get(name).map(|live| live.record.id.clone()).unwrap_or_default();
        let cgroup = match Cgroup::make(&self.home.cgroup(name, &id), main.pid) {
            Ok(Some(cgroup)) => cgroup,
            Ok(None) => return confined,
            Err(error) => {
                confined.notes.push(format!("its processes are not held by a cgroup: {error}"));
                return confined;
            }
        };
        let mut state = self.state();
        let Some(live) = state.shares.get_mut(name).filter(|live| live.record.main == main) else {
            drop(state);
            self.remove_soon(cgroup);
            return confined;
        };
        // Recorded first: a daemon that takes over can remove it.
        live.record.cgroup = Some(cgroup.clone());
        if let Err(error) = live.record.write(&self.home) {
            confined.notes.push(format!("its cgroup cannot be recorded: {}", describe(&error)));
        }
        let devices = self.machine.other_devices(&live.record.shares);
        drop(state);
        if !devices.is_empty() {
            match cgroup.close_devices(&devices) {
                Ok(()) => confined.gate = true,
                Err(error) => confined.notes.push(format!("other GPUs' device files stay open: {error}")),
            }
        }
        // If the process ended meanwhile, its pid may belong to a process that is not in any share.
        let taken = cgroup.take(main.pid).map_err(|error| error.to_string());
        if let Err(error) =
            taken.and_then(|()| main.lives().then_some(()).ok_or_else(|| "it has ended".into()))
        {
            confined.notes.push(format!("its processes are not held by a cgroup: {error}"));
            confined.gate = false;
            if let Some(live) = self.state().shares.get_mut(name).filter(|live| live.record.main == main) {
                live.record.cgroup = None;
            }
            self.remove_soon(cgroup);
        }
        confined
    }

    /// Checks the confinement that a process reports, and records it.
    pub(super) fn bind(
        &self,
        name: &str,
        main: Identity,
        binding: Binding,
        confined: &Confined,
    ) -> Result<(), ConfineError> {
        let state = self.state();
        let live = state.shares.get(name).filter(|live| live.record.main == main);
        let mark = live.ok_or(ConfineError::ShareGone)?.record.mark(&self.home, binding);
        drop(state);
        match binding {
            Binding::LibraryPath => {
                self.machine.install_for(&self.home, name)?;
            }
            Binding::MountNamespace | Binding::UserNamespace => {
                if !mark.is_some_and(|mark| mark.is_on(main.pid)) {
                    return Err(ConfineError::NotConfined);
                }
            }
        }
        let mut state = self.state();
        let live = state.shares.get_mut(name).filter(|live| live.record.main == main);
        let live = live.ok_or(ConfineError::ShareGone)?;
        live.record.bound = Some(Bond { binding, gate: confined.gate });
        let written = live.record.write(&self.home);
        drop(state);
        written?;
        self.call_successor();
        Ok(())
    }

    /// Removes a cgroup whose process is about to end, or goes on outside it, as soon as the kernel lets it.
    pub(super) fn remove_soon(self: &Arc<Self>, cgroup: Cgroup) {
        const MAX_ATTEMPTS: u32 = 100;
        const RETRY_INTERVAL: Duration = Duration::from_millis(50);
        let remove = move || {
            // Not interrupted by the daemon's end, which waits for it: the cgroup would stay forever.
            for _ in 0..MAX_ATTEMPTS {
                if cgroup.let_go().is_ok() && cgroup.remove().is_ok() {
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
