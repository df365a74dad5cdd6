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

pub use app::{App, Config};
pub use standby::COMMAND;
pub(crate) use standby::background;

use crate::home::{Home, HomeError};
use crate::machine::{Machine, MachineError};
use crate::settings::{Settings, SettingsError};
use crate::store::{self, Found, HeldElsewhere, Record};
use connections::Connections;
use exit_watch::ExitWatch;
use gpu_claims::GpuClaims;
use grant::Live;
use partage_core::model::GpuUuid;
use partage_enforce::error_chain::describe;
use partage_enforce::instance_lock::{InstanceLock, LockError};
use partage_enforce::monitor::{Monitor, MonitorReport};
use partage_enforce::records::RecordError;
use partage_enforce::shares::{Shares, gated_gpus};
use queue::Ticket;
use standby::Successor;
use std::collections::{BTreeMap, BTreeSet};
use std::io;
use std::net::SocketAddr;
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant, SystemTime};
use threads::Threads;
use warnings::Warnings;

/// How long a daemon in the background stays after its last share: the next command need not start one.
const LINGER: Duration = Duration::from_secs(10);

/// Why the daemon cannot run.
#[derive(Debug, thiserror::Error)]
pub enum DaemonError {
    /// Another daemon holds the lock of this home.
    #[error("another keeper is there")]
    Busy,
    /// The state directory cannot be used.
    #[error(transparent)]
    Home(#[from] HomeError),
    /// The settings cannot be used.
    #[error(transparent)]
    Settings(#[from] SettingsError),
    /// The lock file cannot be locked.
    #[error(transparent)]
    Lock(LockError),
    /// The GPUs cannot be shared.
    #[error(transparent)]
    Machine(#[from] MachineError),
    /// The system refused something that the daemon needs.
    #[error("{what}")]
    Io {
        /// What cannot be done.
        what: &'static str,
        /// What the system reported.
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
    /// Adds to an error of the system what cannot be done.
    fn io(what: &'static str) -> impl FnOnce(io::Error) -> DaemonError {
        move |source| DaemonError::Io { what, source }
    }
}

/// The shares of a state directory and what manages them. [`App`] builds it and starts its threads.
pub struct Daemon {
    home: Home,
    settings: Settings,
    machine: Machine,
    /// Whether it is `partage up`.
    foreground: bool,
    /// The address where metrics are served, for the report.
    metrics: Option<SocketAddr>,
    /// When it started, in seconds since 1970.
    since: u64,
    /// The regions of all shares, by name.
    regions: Shares<String>,
    state: Mutex<State>,
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
struct State {
    shares: BTreeMap<String, Live>,
    /// Shares that another version of the daemon made and this one cannot manage, by name.
    held_elsewhere: BTreeMap<String, HeldElsewhere>,
    queue: Vec<Ticket>,
    tickets: u64,
    given: u64,
    /// Since when it has neither shares nor connections.
    idle: Option<Instant>,
    /// Whether it was told to end.
    ending: bool,
    /// Whether it ends because another daemon takes its place.
    handed_over: bool,
}

impl Daemon {
    /// Adopts the shares that an earlier daemon granted.
    fn restore(self: &Arc<Self>) -> std::io::Result<()> {
        let _span = tracing::info_span!("reconcile", cause = "start").entered();
        let found = store::all(&self.home)?;
        let adopted = found.iter().filter_map(|found| match found {
            Found::Share(record) => Some(&record.shares),
            _ => None,
        });
        let gated = gated_gpus(adopted.flatten());
        for found in found {
            match found {
                Found::Share(record) => self.take_up(*record, &gated),
                Found::Leftover(name) => self.removed(&name),
                Found::OtherVersion { name, held, reason } => self.hold_elsewhere(name, held, &reason),
                Found::Unreadable(name, reason) => self.warnings.add(&format!(
                    "the record of share {name} cannot be read, and what it has is not counted: {}; end its processes, \
                     then remove {}",
                    describe(&reason),
                    self.home.share(&name).display()
                )),
            }
        }
        store::tidy(&self.home)?;
        self.claims.claim(&mut self.machine.node.clone(), &self.warnings);
        self.after_change(&mut self.state());
        Ok(())
    }

    /// Counts what a share of another version of this daemon holds, for as long as its folder is there.
    fn hold_elsewhere(&self, name: String, held: Option<HeldElsewhere>, reason: &RecordError) {
        let counted = if held.is_some() { "stays held" } else { "cannot be counted" };
        self.warnings.add(&format!(
            "share {name} was made by another version of partage, and what it has {counted}: {}; start that version again, or \
             end the share's processes and remove {}",
            describe(reason),
            self.home.share(&name).display()
        ));
        if let Some(held) = held {
            self.state().held_elsewhere.insert(name, held);
        }
    }

    fn take_up(self: &Arc<Self>, record: Record, gated: &BTreeSet<GpuUuid>) {
        let name = record.name.clone();
        // A share that is not bound yet never started: its process asks again.
        let lives = record.bound.is_some() && record.has_members(&self.home).unwrap_or(true);
        if !lives {
            self.forget(&record);
            return;
        }
        match self.adopted(record, gated) {
            Ok(live) => {
                tracing::info!(share = %name, "share adopted");
                self.state().shares.insert(name.clone(), live);
                self.watch_share(&name);
            }
            Err(error) => self.warnings.add(&format!(
                "{name} runs and cannot be kept, so what it has is not counted: {}",
                describe(&error)
            )),
        }
    }

    /// Waits until the daemon is told to end, or was not needed for a while.
    fn wait_for_end(&self) {
        let mut state = self.state();
        while !state.ending {
            if self.foreground {
                state = self.changed.wait(state).unwrap_or_else(PoisonError::into_inner);
                continue;
            }
            let needed = !state.shares.is_empty() || !state.queue.is_empty() || !self.connections.is_empty();
            state.idle = if needed { None } else { state.idle.or_else(|| Some(Instant::now())) };
            let left = state.idle.map_or(LINGER, |since| LINGER.saturating_sub(since.elapsed()));
            if left.is_zero() {
                return;
            }
            let waited = self.changed.wait_timeout(state, left.min(Duration::from_secs(1)));
            state = waited.unwrap_or_else(PoisonError::into_inner).0;
        }
    }

    /// Tells all threads to end. Requests in progress are finished; those that wait for capacity are not.
    fn end(&self) {
        self.state().ending = true;
        self.changed.notify_all();
        self.threads.stop();
    }

    /// Returns the number of shares.
    fn shares(&self) -> usize {
        self.state().shares.len()
    }

    fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// Returns the seconds since 1970.
fn now() -> u64 {
    SystemTime::now().duration_since(SystemTime::UNIX_EPOCH).map_or(0, |since| since.as_secs())
}
