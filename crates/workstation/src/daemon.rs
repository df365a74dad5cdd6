//! The daemon: grants shares and releases them, gives turns, and reports. There is one for each state directory.
//!
//! | module | does |
//! |---|---|
//! | `app` | builds, runs and ends a daemon |
//! | `serve`, `connections`, `queue` | requests over the socket, how many at a time, and those that wait for capacity |
//! | `grant`, `resize_stop` | create, release, resize and stop shares |
//! | `confine`, `exit_watch` | confine a share's first process, and notice when the last one ends |
//! | `monitor`, `report`, `warnings` | poll the driver, and report |
//! | `standby` | the process that takes over when a daemon is killed |
//! | `gpu_claims` | locks on GPUs, between the daemons of one machine |
//! | `threads` | the threads of all of these |

mod app;
mod confine;
mod connections;
mod exit_watch;
mod gpu_claims;
mod grant;
mod monitor;
mod queue;
mod report;
mod resize_stop;
mod serve;
mod standby;
mod threads;
mod warnings;

pub use app::{DaemonApp, DaemonConfig};
pub use standby::DAEMON_COMMAND;
pub(crate) use standby::background;

use crate::machine::{Machine, MachineError};
use crate::settings::{WorkstationSettings, WorkstationSettingsError};
use crate::share_store::{self, HeldElsewhere, ShareRecord, StoredShare, UnmanagedCause, UnmanagedHold};
use crate::state_dir::{StateDir, StateDirError};
use connections::Connections;
use exit_watch::ExitWatch;
use gpu_claims::GpuClaims;
use grant::ActiveShare;
use partage_core::model::{Gpu, GpuUuid, Node, Share};
use partage_enforce::error_chain::describe;
use partage_enforce::instance_lock::{InstanceLock, LockError};
use partage_enforce::monitor::{Monitor, MonitorReport};
use partage_enforce::shares::{ManagedShares, throttled_gpus};
use queue::QueuedRequest;
use standby::Successor;
use std::collections::{BTreeMap, BTreeSet};
use std::error::Error;
use std::io;
use std::net::SocketAddr;
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant, SystemTime};
use threads::Threads;
use warnings::Warnings;

/// How long a daemon in the background stays after its last share, so that the next command need not start one.
const IDLE_TIMEOUT: Duration = Duration::from_secs(10);

/// Why the daemon cannot run.
#[derive(Debug, thiserror::Error)]
pub enum DaemonError {
    /// Another daemon holds the lock of this state directory.
    #[error("another daemon is running")]
    Busy,
    /// The state directory cannot be used.
    #[error(transparent)]
    StateDir(#[from] StateDirError),
    /// The settings cannot be used.
    #[error(transparent)]
    Settings(#[from] WorkstationSettingsError),
    /// The lock file cannot be locked.
    #[error(transparent)]
    Lock(LockError),
    /// The GPUs cannot be shared.
    #[error(transparent)]
    Machine(#[from] MachineError),
    /// The system refused something that the daemon needs.
    #[error("{what}")]
    Io {
        /// The operation that failed.
        what: &'static str,
        /// The error of the system.
        #[source]
        source: io::Error,
    },
}

impl From<LockError> for DaemonError {
    fn from(error: LockError) -> DaemonError {
        match error {
            LockError::Held { .. } => DaemonError::Busy,
            error => DaemonError::Lock(error),
        }
    }
}

impl DaemonError {
    /// Adds what failed to an error of the system.
    fn io(what: &'static str) -> impl FnOnce(io::Error) -> DaemonError {
        move |source| DaemonError::Io { what, source }
    }
}

/// The state of a daemon and everything that its threads use. [`DaemonApp`] builds it and starts the threads.
pub struct Daemon {
    state_dir: StateDir,
    settings: WorkstationSettings,
    machine: Machine,
    /// Whether it is `partage up`.
    foreground: bool,
    /// The address where metrics are served, for the report.
    metrics: Option<SocketAddr>,
    /// When it started, in seconds since 1970.
    since: u64,
    /// The regions of all shares, by name.
    regions: ManagedShares<String>,
    state: Mutex<DaemonState>,
    /// Notified when `state` changes.
    changed: Condvar,
    watch: ExitWatch,
    monitor: Mutex<Monitor<String>>,
    /// The result of the last poll.
    observed: Mutex<MonitorReport<String>>,
    claims: GpuClaims,
    connections: Connections,
    warnings: Warnings,
    standby: Successor,
    threads: Arc<Threads>,
    /// Released after everything else: no other daemon may manage the regions before.
    _lock: InstanceLock,
}

#[derive(Default)]
struct DaemonState {
    shares: BTreeMap<String, ActiveShare>,
    /// Shares that this daemon cannot manage: their records are missing, damaged or of another version. By name.
    held_elsewhere: BTreeMap<String, HeldElsewhere>,
    queue: Vec<QueuedRequest>,
    tickets: u64,
    given: u64,
    /// Since when it has neither shares nor connections.
    idle: Option<Instant>,
    /// Whether the daemon is stopping.
    ending: bool,
    /// Whether it stops because another daemon takes over.
    handed_over: bool,
}

impl Daemon {
    /// Adopts the shares that an earlier daemon granted.
    fn adopt_shares(self: &Arc<Self>) -> std::io::Result<()> {
        let _span = tracing::info_span!("reconcile", cause = "start").entered();
        let found = share_store::load_all(&self.state_dir)?;
        let adopted = found.iter().filter_map(|found| match found {
            StoredShare::Share(record) => Some(&record.shares),
            _ => None,
        });
        let throttled = throttled_gpus(adopted.flatten());
        for found in found {
            match found {
                StoredShare::Share(record) => self.adopt_share(*record, &throttled),
                StoredShare::Leftover(name) => self.remove_share_files(&name),
                StoredShare::Unmanaged { name, held, cause } => self.hold_unmanaged(name, held, &cause),
            }
        }
        share_store::remove_orphaned_libraries(&self.state_dir)?;
        self.claims.claim(&mut self.machine.node.clone(), &self.warnings);
        self.after_change(&mut self.state());
        Ok(())
    }

    /// Reports a share that this daemon cannot manage, and accounts for it as long as its directory exists.
    fn hold_unmanaged(&self, name: String, held: UnmanagedHold, cause: &UnmanagedCause) {
        let (counted, held) = account_for(held, &self.machine.node);
        let path = self.state_dir.share(&name);
        let path = path.display();
        self.warnings.add(&match cause {
            UnmanagedCause::RecordLost => format!(
                "the record of running share {name} is missing, so it cannot be managed, and {counted}; end its \
                 processes, then remove {path}"
            ),
            UnmanagedCause::OtherVersion(reason) => format!(
                "share {name} was created by another version of partage, and {counted}: {}; start that version again, \
                 or end the share's processes and remove {path}",
                // Without the remedy for any record: that of a share is removed with its directory.
                reason.source().map_or_else(|| describe(reason), describe)
            ),
            UnmanagedCause::Unreadable(reason) => format!(
                "cannot read the record of share {name}, and {counted}: {}; end its processes, then remove {path}",
                describe(reason)
            ),
        });
        if let Some(held) = held {
            self.state().held_elsewhere.insert(name, held);
        }
    }

    fn adopt_share(self: &Arc<Self>, record: ShareRecord, throttled: &BTreeSet<GpuUuid>) {
        let name = record.name.clone();
        // A share that is not confined yet never started: its process requests it again.
        let lives = record.confinement.is_some() && record.has_members(&self.state_dir).unwrap_or(true);
        if !lives {
            self.remove_share(&record);
            return;
        }
        let live = self.adopt_region(record, throttled);
        tracing::info!(share = %name, "share adopted");
        self.state().shares.insert(name.clone(), live);
        self.watch_share(&name);
    }

    /// Waits until the daemon is stopped, or was idle for a while.
    fn wait_for_end(&self) {
        let mut state = self.state();
        while !state.ending {
            if self.foreground {
                state = self.changed.wait(state).unwrap_or_else(PoisonError::into_inner);
                continue;
            }
            let needed = !state.shares.is_empty() || !state.queue.is_empty() || !self.connections.is_empty();
            state.idle = if needed { None } else { state.idle.or_else(|| Some(Instant::now())) };
            let left = state.idle.map_or(IDLE_TIMEOUT, |since| IDLE_TIMEOUT.saturating_sub(since.elapsed()));
            if left.is_zero() {
                return;
            }
            let waited = self.changed.wait_timeout(state, left.min(Duration::from_secs(1)));
            state = waited.unwrap_or_else(PoisonError::into_inner).0;
        }
    }

    /// Stops all threads. Requests in progress are finished; those that wait for capacity are not.
    fn end(&self) {
        self.state().ending = true;
        self.changed.notify_all();
        self.threads.stop();
    }

    /// Returns the number of shares.
    fn shares(&self) -> usize {
        self.state().shares.len()
    }

    fn state(&self) -> MutexGuard<'_, DaemonState> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// Returns the shares of GPUs to account for, and how a warning describes them. A running share that may hold any GPU
/// holds all of them: memory that is granted twice fails in programs of both shares.
fn account_for(held: UnmanagedHold, node: &Node) -> (&'static str, Option<HeldElsewhere>) {
    match held {
        UnmanagedHold::Known(held) => ("its GPUs stay held", Some(held)),
        UnmanagedHold::Unknown { who } => {
            let whole = |gpu: &Gpu| Share {
                gpu: gpu.uuid.clone(),
                memory_bytes: None,
                cores: None,
                ceiling: None,
                whole: true,
            };
            let shares = node.gpus.iter().map(whole).collect();
            let counted = "all GPUs stay held, because the limits of its region cannot be read";
            (counted, Some(HeldElsewhere { who, shares }))
        }
        UnmanagedHold::NotInUse => (
            "its GPUs are not accounted for, because no process uses its region and its limits cannot be read",
            None,
        ),
    }
}

/// Returns the seconds since 1970.
fn now() -> u64 {
    SystemTime::now().duration_since(SystemTime::UNIX_EPOCH).map_or(0, |since| since.as_secs())
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::users::UserIdentity;
    use partage_core::model::Bytes;

    #[test]
    fn running_share_with_unknown_limits_holds_all_gpus() {
        let gpu = |uuid: &str| Gpu {
            uuid: uuid.into(),
            minor: 0,
            model: "Tesla T4".into(),
            memory_bytes: Bytes(16 << 30),
            numa: None,
            pci: None,
            withheld: None,
        };
        let node = Node::new("here", vec![gpu("GPU-1"), gpu("GPU-2")]);
        let who = UserIdentity { uid: 1000, gids: Vec::new() };
        let (counted, held) = account_for(UnmanagedHold::Unknown { who: who.clone() }, &node);
        let held = held.unwrap();
        assert!(counted.contains("all GPUs stay held"), "{counted}");
        assert_eq!((&held.who, held.shares.len()), (&who, 2));
        assert!(held.shares.iter().all(|share| share.whole));
        let known = HeldElsewhere { who, shares: held.shares[..1].to_vec() };
        let (counted, held) = account_for(UnmanagedHold::Known(known.clone()), &node);
        assert_eq!(held, Some(known));
        assert!(counted.contains("its GPUs stay held"), "{counted}");
        let (counted, held) = account_for(UnmanagedHold::NotInUse, &node);
        assert!(held.is_none() && counted.contains("not accounted for"), "{counted}");
    }
}
