//! The keeper: gives shares and takes them back, deals turns, tells how everything is. One in a home.
//!
//! ```text
//!  serve   who asks, over the socket            give    shares are made and taken back
//!  bind    a share and its process              change  other amounts, and stopping
//!  queue   who waits                            watch   when the last process of a share ends
//!  monitor polls the driver, the audit          tell    the report
//! ```

mod bind;
mod change;
mod claims;
mod give;
mod monitor;
mod queue;
mod serve;
mod standby;
mod tell;
mod watch;

pub(crate) use standby::background;
pub use standby::{COMMAND, stand_by};

use crate::home::{Home, HomeError};
use crate::machine::{Machine, MachineError};
use crate::settings::{Settings, SettingsError};
use crate::store::{self, Found, HeldElsewhere, Record};
use give::Live;
use partage_core::model::GpuUuid;
use partage_enforce::error_chain::describe;
use partage_enforce::instance_lock::{InstanceLock, LockError};
use partage_enforce::monitor::{Monitor, MonitorReport};
use partage_enforce::records::RecordError;
use partage_enforce::shares::{Shares, gated_gpus};
use partage_host::files;
use queue::Ticket;
use std::collections::{BTreeMap, BTreeSet};
use std::fs;
use std::io;
use std::net::SocketAddr;
use std::os::unix::fs::PermissionsExt;
use std::os::unix::net::UnixListener;
use std::path::{Path, PathBuf};
use std::sync::atomic::AtomicUsize;
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant, SystemTime};
use watch::Watch;

/// How long a keeper in the background stays after its last share: the next command need not start one.
const LINGER: Duration = Duration::from_secs(10);

/// How a keeper is to be.
#[derive(Clone, Debug)]
pub struct Options {
    /// Whether it is `partage up`: it stays without shares and makes place for nobody.
    pub foreground: bool,
    /// Where metrics are served, to be told.
    pub metrics: Option<SocketAddr>,
    /// The settings' file, for the one who follows.
    pub settings_file: Option<PathBuf>,
}

/// Why the daemon cannot run.
#[derive(Debug, thiserror::Error)]
pub enum KeepError {
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

impl From<LockError> for KeepError {
    fn from(error: LockError) -> KeepError {
        match error {
            LockError::Held { .. } => KeepError::Busy,
            error => KeepError::Lock(error),
        }
    }
}

/// Who keeps the shares of a home.
pub struct Keeper {
    home: Home,
    settings: Settings,
    machine: Machine,
    options: Options,
    /// The regions of all shares, by name.
    regions: Shares<String>,
    watch: Watch,
    since: u64,
    state: Mutex<State>,
    changed: Condvar,
    monitor: Mutex<Monitor<String>>,
    /// The result of the last poll.
    observed: Mutex<MonitorReport<String>>,
    claims: claims::Claims,
    /// How many cgroups are being removed.
    removing: AtomicUsize,
    /// What is wrong, for the report.
    warnings: Mutex<Vec<String>>,
    standby: standby::Successor,
    /// Held for as long as it keeps.
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
    /// Connections, by user.
    callers: BTreeMap<u32, usize>,
    /// Since when nobody needs it.
    idle: Option<Instant>,
    ending: bool,
    /// Whether it ends because another keeper comes in its place.
    handed_over: bool,
}

impl Keeper {
    /// Takes over a home: what runs there goes on. Fails with [`KeepError::Busy`] while another daemon holds it.
    pub fn start(home: &Home, settings: Settings, options: Options) -> Result<Arc<Keeper>, KeepError> {
        be_a_keeper();
        let lock = lock(home)?;
        Keeper::start_with(home, settings, options, lock)
    }

    fn start_with(
        home: &Home,
        settings: Settings,
        options: Options,
        lock: InstanceLock,
    ) -> Result<Arc<Keeper>, KeepError> {
        let (machine, contexts) = Machine::open(home, &settings)?;
        let cannot = |what: &'static str| move |source: io::Error| KeepError::Io { what, source };
        put_in_force(home, options.settings_file.as_deref())
            .map_err(cannot("the settings cannot be kept"))?;
        let watch = Watch::new().map_err(cannot("processes cannot be watched"))?;
        let monitor = Monitor::new(&machine.node, machine.previously_unhealthy.iter().cloned())
            .recording_fatal_errors(&machine.records, &machine.boot_id);
        let keeper = Arc::new(Keeper {
            home: home.clone(),
            settings,
            machine,
            options,
            regions: Shares::new(contexts),
            watch,
            since: now(),
            state: Mutex::default(),
            changed: Condvar::new(),
            monitor: Mutex::new(monitor),
            observed: Mutex::default(),
            claims: claims::Claims::default(),
            removing: AtomicUsize::new(0),
            warnings: Mutex::default(),
            standby: standby::Successor::default(),
            _lock: lock,
        });
        tracing::info!(
            home = %home.path().display(),
            gpus = keeper.machine.node.gpus.len(),
            driver = keeper.machine.gpus.driver_version(),
            simulated = keeper.machine.driver.simulated.is_some(),
            foreground = keeper.options.foreground,
            "daemon started"
        );
        for warning in &keeper.machine.warnings {
            tracing::warn!("{warning}");
        }
        keeper.poll();
        keeper.restore().map_err(cannot("the shares cannot be read"))?;
        let listener = listen(home).map_err(cannot("the socket cannot be made"))?;
        for (name, work) in [
            (
                "serve",
                Box::new(move |keeper: &Arc<Keeper>| keeper.serve(&listener))
                    as Box<dyn FnOnce(&Arc<Keeper>) + Send>,
            ),
            ("watch", Box::new(|keeper: &Arc<Keeper>| keeper.watch_all())),
            ("monitor", Box::new(|keeper: &Arc<Keeper>| keeper.poll_until_end())),
        ] {
            let keeper = Arc::clone(&keeper);
            let thread = std::thread::Builder::new().name(name.into());
            thread.spawn(move || work(&keeper)).map_err(cannot("a thread cannot be started"))?;
        }
        Ok(keeper)
    }

    /// Takes up the shares that a keeper before it gave.
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
                Found::Unreadable(name, reason) => self.warn(&format!(
                    "the record of share {name} cannot be read, and what it has is not counted: {}; end its processes, \
                     then remove {}",
                    describe(&reason),
                    self.home.share(&name).display()
                )),
            }
        }
        store::tidy(&self.home)?;
        self.claim(&mut self.machine.node.clone());
        self.after_change(&mut self.state());
        Ok(())
    }

    /// Counts what a share of another version of this daemon holds, for as long as its folder is there.
    fn hold_elsewhere(&self, name: String, held: Option<HeldElsewhere>, reason: &RecordError) {
        let counted = if held.is_some() { "stays held" } else { "cannot be counted" };
        self.warn(&format!(
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
        // One that was not bound yet never started: who asked for it asks again.
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
            Err(error) => self.warn(&format!(
                "{name} runs and cannot be kept, so what it has is not counted: {}",
                describe(&error)
            )),
        }
    }

    /// Waits until it is told to end, or nobody has needed it for a while.
    pub fn wait(&self) {
        let mut state = self.state();
        while !state.ending {
            if self.options.foreground {
                state = self.changed.wait(state).unwrap_or_else(PoisonError::into_inner);
                continue;
            }
            let needed = !state.shares.is_empty() || !state.queue.is_empty() || !state.callers.is_empty();
            state.idle = if needed { None } else { state.idle.or_else(|| Some(Instant::now())) };
            let left = state.idle.map_or(LINGER, |since| LINGER.saturating_sub(since.elapsed()));
            if left.is_zero() {
                break;
            }
            let waited = self.changed.wait_timeout(state, left.min(Duration::from_secs(1)));
            state = waited.unwrap_or_else(PoisonError::into_inner).0;
        }
        state.ending = true;
        let runs = !state.shares.is_empty();
        drop(state);
        self.finish_removing();
        // Where shares go on, the one who waits for the lock goes on with them.
        if runs {
            self.call_successor();
        } else {
            self.standby.dismiss();
            // Nobody answers there any more: another user's command must not wait for it.
            let _ = fs::remove_file(self.home.socket());
            let _ = fs::remove_file(self.home.settings_in_force());
        }
    }

    /// Ends [`Keeper::wait`].
    pub fn end(&self) {
        self.state().ending = true;
        self.changed.notify_all();
    }

    /// How many shares there are.
    pub fn shares(&self) -> usize {
        self.state().shares.len()
    }

    fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Says something that the report should go on saying.
    fn warn(&self, warning: &str) {
        let mut warnings = self.warnings.lock().unwrap_or_else(PoisonError::into_inner);
        if !warnings.iter().any(|known| known == warning) {
            warnings.push(warning.into());
            tracing::warn!("{warning}");
        }
    }
}

/// Keeps a copy of the settings for whoever follows: their file may be changed meanwhile, and be wrong.
fn put_in_force(home: &Home, file: Option<&Path>) -> std::io::Result<()> {
    let copy = home.settings_in_force();
    match file {
        Some(file) if file == copy => Ok(()),
        Some(file) => files::write_whole(&copy, &fs::read(file)?, 0o600),
        None => match fs::remove_file(&copy) {
            Err(error) if error.kind() != std::io::ErrorKind::NotFound => Err(error),
            _ => Ok(()),
        },
    }
}

/// What a process needs to keep shares of many.
fn be_a_keeper() {
    // Other users' programs load and map what it writes.
    rustix::process::umask(rustix::fs::Mode::from_raw_mode(0o022));
    // Who started it may have been bounded for another purpose, and each share and each who waits needs a few files.
    use rustix::process::{Resource, getrlimit, setrlimit};
    for resource in [Resource::Nofile, Resource::Fsize, Resource::As, Resource::Nproc] {
        let mut limit = getrlimit(resource);
        limit.current = limit.maximum;
        let _ = setrlimit(resource, limit);
    }
}

/// Acquires the lock of a home without waiting.
fn lock(home: &Home) -> Result<InstanceLock, KeepError> {
    home.make()?;
    Ok(InstanceLock::try_acquire(&home.lock())?)
}

/// The socket, in place of the one of a keeper before.
fn listen(home: &Home) -> std::io::Result<UnixListener> {
    let (path, unfinished) = (home.socket(), home.path().join("keeper.new"));
    let _ = fs::remove_file(&unfinished);
    let listener = UnixListener::bind(&unfinished)?;
    // Who asks is told by the kernel; what they may is up to the settings.
    let mode = if Home::is_for_everybody() { 0o666 } else { 0o600 };
    fs::set_permissions(&unfinished, fs::Permissions::from_mode(mode))?;
    fs::rename(&unfinished, &path)?;
    Ok(listener)
}

/// Seconds since 1970.
fn now() -> u64 {
    SystemTime::now().duration_since(SystemTime::UNIX_EPOCH).map_or(0, |since| since.as_secs())
}
