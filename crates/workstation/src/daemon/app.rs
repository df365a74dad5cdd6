//! The composition root: builds a daemon from its configuration, runs it, and ends it.
//!
//! ```text
//!  Config ── App::build ──▶ App ── run ──▶ stopped, handed over, or idle ──▶ threads joined, lock released
//! ```

use super::connections::Connections;
use super::exit_watch::ExitWatch;
use super::gpu_claims::GpuClaims;
use super::standby::Successor;
use super::threads::Threads;
use super::warnings::Warnings;
use super::{Daemon, DaemonError, now};
use crate::home::Home;
use crate::machine::Machine;
use crate::report::Report;
use crate::settings::Settings;
use crate::store;
use partage_enforce::instance_lock::InstanceLock;
use partage_enforce::monitor::Monitor;
use partage_enforce::shares::Shares;
use partage_host::files;
use std::fs;
use std::io;
use std::net::SocketAddr;
use std::os::unix::fs::PermissionsExt;
use std::os::unix::net::UnixListener;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Condvar, Mutex};
use std::time::Duration;

/// How long threads may take to end when the daemon stops. Requests in progress and the removal of cgroups take less.
const SHUTDOWN_TIMEOUT: Duration = Duration::from_secs(6);

/// What a daemon is built from.
#[derive(Clone, Debug)]
pub struct Config {
    /// The state directory.
    pub home: Home,
    /// The settings in force.
    pub settings: Settings,
    /// Whether it is `partage up`: it runs without shares, and does not hand over.
    pub foreground: bool,
    /// The address where metrics are served, for the report.
    pub metrics: Option<SocketAddr>,
    /// The settings file, which is copied for the daemon that takes over when this one is killed.
    pub settings_file: Option<PathBuf>,
}

/// A daemon that manages the shares of a state directory. Its threads run.
///
/// What runs in shares goes on when the daemon ends, and the next daemon adopts it.
pub struct App {
    daemon: Arc<Daemon>,
}

impl App {
    /// Builds a daemon and adopts the shares that run. Fails with [`DaemonError::Busy`] while another daemon manages the state
    /// directory.
    pub fn build(config: Config) -> Result<App, DaemonError> {
        prepare_process();
        config.home.make()?;
        let lock = InstanceLock::try_acquire(&config.home.lock())?;
        App::build_with(config, lock)
    }

    /// Waits until no other daemon manages the state directory, then builds one if there are shares to adopt.
    pub fn stand_by(config: Config) -> Result<Option<App>, DaemonError> {
        prepare_process();
        config.home.make()?;
        let lock = InstanceLock::acquire(&config.home.lock())?;
        if !store::is_any(&config.home) {
            return Ok(None);
        }
        let app = App::build_with(config, lock)?;
        app.daemon.call_successor();
        Ok(Some(app))
    }

    fn build_with(config: Config, lock: InstanceLock) -> Result<App, DaemonError> {
        let Config { home, settings, foreground, metrics, settings_file } = config;
        let (machine, contexts) = Machine::open(&home, &settings)?;
        keep_settings(&home, settings_file.as_deref())
            .map_err(DaemonError::io("the settings cannot be kept"))?;
        let watch = ExitWatch::new().map_err(DaemonError::io("processes cannot be watched"))?;
        let threads = Threads::new().map_err(DaemonError::io("threads cannot be stopped"))?;
        let monitor = Monitor::new(&machine.node, machine.previously_unhealthy.iter().cloned())
            .recording_fatal_errors(&machine.records, &machine.boot_id);
        let daemon = Arc::new(Daemon {
            claims: GpuClaims::new(&machine.device_files()),
            regions: Shares::new(contexts),
            since: now(),
            state: Mutex::default(),
            changed: Condvar::new(),
            monitor: Mutex::new(monitor),
            observed: Mutex::default(),
            connections: Connections::default(),
            warnings: Warnings::default(),
            standby: Successor::default(),
            home,
            settings,
            machine,
            foreground,
            metrics,
            watch,
            threads,
            _lock: lock,
        });
        let app = App { daemon };
        // Dropping the daemon does not end the threads that run already.
        app.start().inspect_err(|_| app.shut_down())?;
        Ok(app)
    }

    /// Adopts what runs, and starts the threads.
    fn start(&self) -> Result<(), DaemonError> {
        log_start(&self.daemon);
        self.daemon.poll();
        self.daemon.restore().map_err(DaemonError::io("the shares cannot be read"))?;
        let listener = listen(&self.daemon.home).map_err(DaemonError::io("the socket cannot be made"))?;
        self.spawn("serve", move |daemon| daemon.serve(&listener))?;
        self.spawn("watch", |daemon| daemon.watch_all())?;
        self.spawn("monitor", |daemon| daemon.poll_until_end())
    }

    fn spawn(&self, name: &str, work: impl FnOnce(&Arc<Daemon>) + Send + 'static) -> Result<(), DaemonError> {
        let daemon = Arc::clone(&self.daemon);
        let started = self.daemon.threads.spawn(name, move || work(&daemon));
        started.map_err(DaemonError::io("a thread cannot be started"))
    }

    /// Returns the daemon, for threads that report about it.
    pub fn daemon(&self) -> &Arc<Daemon> {
        &self.daemon
    }

    /// Reports about all GPUs and shares.
    pub fn report(&self) -> Report {
        self.daemon.report()
    }

    /// Returns the number of shares.
    pub fn shares(&self) -> usize {
        self.daemon.shares()
    }

    /// Ends [`App::run`].
    pub fn stop(&self) {
        self.daemon.end();
    }

    /// Runs until the daemon is stopped, handed over, or was not needed for a while. Returns the number of shares that go on.
    pub fn run(self) -> usize {
        self.daemon.wait_for_end();
        self.shut_down();
        let shares = self.daemon.shares();
        if shares > 0 {
            // The standby process adopts them as soon as the lock is released.
            self.daemon.call_successor();
        } else {
            self.daemon.standby.dismiss();
            // No daemon answers here any more: commands of other users must not wait for one.
            let _ = fs::remove_file(self.daemon.home.socket());
            let _ = fs::remove_file(self.daemon.home.settings_in_force());
        }
        shares
    }

    /// Lets requests in progress finish, and ends all threads.
    fn shut_down(&self) {
        self.daemon.end();
        let left = self.daemon.threads.join(SHUTDOWN_TIMEOUT);
        if !left.is_empty() {
            tracing::warn!(threads = %left.join(", "), "threads did not end in time");
        }
    }
}

fn log_start(daemon: &Daemon) {
    tracing::info!(
        home = %daemon.home.path().display(),
        gpus = daemon.machine.node.gpus.len(),
        driver = daemon.machine.gpus.driver_version(),
        simulated = daemon.machine.driver.simulated.is_some(),
        foreground = daemon.foreground,
        "daemon started"
    );
    for warning in &daemon.machine.warnings {
        tracing::warn!("{warning}");
    }
}

/// Copies the settings file for the next daemon: the file may be changed meanwhile, and be invalid.
fn keep_settings(home: &Home, file: Option<&Path>) -> io::Result<()> {
    let copy = home.settings_in_force();
    match file {
        Some(file) if file == copy => Ok(()),
        Some(file) => files::write_whole(&copy, &fs::read(file)?, 0o600),
        None => match fs::remove_file(&copy) {
            Err(error) if error.kind() != io::ErrorKind::NotFound => Err(error),
            _ => Ok(()),
        },
    }
}

/// Prepares the process for the shares of many users.
fn prepare_process() {
    use rustix::process::{Resource, getrlimit, setrlimit};
    // Other users' programs load and map what the daemon writes.
    rustix::process::umask(rustix::fs::Mode::from_raw_mode(0o022));
    // The limits may have been lowered for another purpose, and each share and each connection needs a few files.
    for resource in [Resource::Nofile, Resource::Fsize, Resource::As, Resource::Nproc] {
        let mut limit = getrlimit(resource);
        limit.current = limit.maximum;
        let _ = setrlimit(resource, limit);
    }
}

/// Listens on the socket of the state directory, in place of an earlier daemon's.
fn listen(home: &Home) -> io::Result<UnixListener> {
    let (path, unfinished) = (home.socket(), home.path().join("keeper.new"));
    let _ = fs::remove_file(&unfinished);
    let listener = UnixListener::bind(&unfinished)?;
    // The kernel says which user connects, and the settings what each may do.
    let mode = if Home::is_for_everybody() { 0o666 } else { 0o600 };
    fs::set_permissions(&unfinished, fs::Permissions::from_mode(mode))?;
    // A caller may be gone between the poll and the accept.
    listener.set_nonblocking(true)?;
    fs::rename(&unfinished, &path)?;
    Ok(listener)
}
