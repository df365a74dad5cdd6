//! The composition root: builds a daemon from its configuration, runs it, and ends it.
//!
//! ```text
//!  DaemonConfig ── DaemonApp::build ──▶ DaemonApp ── run ──▶ stopped, handed over, or idle ──▶ threads joined, lock released
//! ```

use super::connections::Connections;
use super::exit_watch::ExitWatch;
use super::gpu_claims::GpuClaims;
use super::standby::Successor;
use super::threads::Threads;
use super::warnings::Warnings;
use super::{Daemon, DaemonError, now};
use crate::machine::Machine;
use crate::report::MachineReport;
use crate::settings::WorkstationSettings;
use crate::share_store;
use crate::state_dir::StateDir;
use partage_enforce::instance_lock::InstanceLock;
use partage_enforce::monitor::Monitor;
use partage_enforce::shares::ManagedShares;
use partage_host::atomic_file;
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

/// The configuration of a daemon.
#[derive(Clone, Debug)]
pub struct DaemonConfig {
    /// The state directory of the daemon.
    pub state_dir: StateDir,
    /// The settings in force.
    pub settings: WorkstationSettings,
    /// Whether it is `partage up`: it runs without shares, and does not hand over.
    pub foreground: bool,
    /// The address where metrics are served, for the report.
    pub metrics: Option<SocketAddr>,
    /// The settings file, which is copied for the daemon that takes over when this one is killed.
    pub settings_file: Option<PathBuf>,
}

/// A running daemon that manages the shares of a state directory.
///
/// The processes of shares keep running when the daemon exits, and the next daemon adopts them.
pub struct DaemonApp {
    daemon: Arc<Daemon>,
}

impl DaemonApp {
    /// Builds a daemon and adopts the shares that run. Fails with [`DaemonError::Busy`] while another daemon manages
    /// the state directory.
    pub fn build(config: DaemonConfig) -> Result<DaemonApp, DaemonError> {
        prepare_process();
        config.state_dir.create()?;
        let lock = InstanceLock::try_acquire(&config.state_dir.lock())?;
        DaemonApp::build_with(config, lock)
    }

    /// Waits until no other daemon manages the state directory, then builds one if there are shares to adopt.
    pub fn stand_by(config: DaemonConfig) -> Result<Option<DaemonApp>, DaemonError> {
        prepare_process();
        config.state_dir.create()?;
        let lock = InstanceLock::acquire(&config.state_dir.lock())?;
        if !share_store::has_shares(&config.state_dir) {
            return Ok(None);
        }
        let app = DaemonApp::build_with(config, lock)?;
        app.daemon.call_successor();
        Ok(Some(app))
    }

    fn build_with(config: DaemonConfig, lock: InstanceLock) -> Result<DaemonApp, DaemonError> {
        let DaemonConfig { state_dir, settings, foreground, metrics, settings_file } = config;
        let (machine, contexts) = Machine::open(&state_dir, &settings)?;
        keep_settings(&state_dir, settings_file.as_deref())
            .map_err(DaemonError::io("cannot copy the settings"))?;
        let watch = ExitWatch::new().map_err(DaemonError::io("cannot watch processes"))?;
        let threads = Threads::new().map_err(DaemonError::io("cannot create the stop signal"))?;
        let monitor = Monitor::new(&machine.node, machine.previously_unhealthy.iter().cloned())
            .recording_fatal_errors(&machine.records, &machine.boot_id);
        let regions = ManagedShares::new(contexts);
        regions.set_throttle_copies(settings.throttle_copies);
        let daemon = Arc::new(Daemon {
            claims: GpuClaims::new(&machine.device_files()),
            regions,
            since: now(),
            state: Mutex::default(),
            changed: Condvar::new(),
            monitor: Mutex::new(monitor),
            observed: Mutex::default(),
            connections: Connections::default(),
            warnings: Warnings::default(),
            standby: Successor::default(),
            state_dir,
            settings,
            machine,
            foreground,
            metrics,
            watch,
            threads,
            _lock: lock,
        });
        let app = DaemonApp { daemon };
        // Dropping the daemon does not stop the threads that run already.
        app.start().inspect_err(|_| app.shut_down())?;
        Ok(app)
    }

    /// Adopts running shares, and starts the threads.
    fn start(&self) -> Result<(), DaemonError> {
        log_start(&self.daemon);
        self.daemon.poll();
        self.daemon.adopt_shares().map_err(DaemonError::io("cannot read the shares"))?;
        let listener = listen(&self.daemon.state_dir).map_err(DaemonError::io("cannot create the socket"))?;
        self.spawn("serve", move |daemon| daemon.serve(&listener))?;
        self.spawn("watch", |daemon| daemon.watch_all())?;
        self.spawn("monitor", |daemon| daemon.poll_until_end())
    }

    fn spawn(&self, name: &str, work: impl FnOnce(&Arc<Daemon>) + Send + 'static) -> Result<(), DaemonError> {
        let daemon = Arc::clone(&self.daemon);
        let started = self.daemon.threads.spawn(name, move || work(&daemon));
        started.map_err(DaemonError::io("cannot start a thread"))
    }

    /// Returns the daemon, for threads that report about it.
    pub fn daemon(&self) -> &Arc<Daemon> {
        &self.daemon
    }

    /// Reports about all GPUs and shares.
    pub fn report(&self) -> MachineReport {
        self.daemon.report()
    }

    /// Returns the number of shares.
    pub fn shares(&self) -> usize {
        self.daemon.shares()
    }

    /// Stops the daemon: [`DaemonApp::run`] returns.
    pub fn stop(&self) {
        self.daemon.end();
    }

    /// Runs until the daemon is stopped, handed over, or was idle for a while. Returns the number of shares that keep
    /// running.
    pub fn run(self) -> usize {
        self.daemon.wait_for_end();
        self.shut_down();
        let shares = self.daemon.shares();
        if shares > 0 {
            // The standby process adopts them as soon as the lock is released.
            self.daemon.call_successor();
        } else {
            self.daemon.standby.dismiss();
            // No daemon runs here any more, and commands of other users must not wait for one.
            let _ = fs::remove_file(self.daemon.state_dir.socket());
            let _ = fs::remove_file(self.daemon.state_dir.settings_in_force());
        }
        shares
    }

    /// Finishes requests in progress, and stops all threads.
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
        state_dir = %daemon.state_dir.path().display(),
        gpus = daemon.machine.node.gpus.len(),
        driver = daemon.machine.gpus.driver_version(),
        simulated = daemon.machine.driver.simulated.is_some(),
        foreground = daemon.foreground,
        "daemon started"
    );
    for warning in &daemon.machine.warnings {
        tracing::warn!(cause = warning, "GPU setup is incomplete");
    }
}

/// Copies the settings file for the next daemon, because the file may be changed meanwhile, and be invalid.
fn keep_settings(state_dir: &StateDir, file: Option<&Path>) -> io::Result<()> {
    let copy = state_dir.settings_in_force();
    match file {
        Some(file) if file == copy => Ok(()),
        Some(file) => atomic_file::replace_durably(&copy, &fs::read(file)?, 0o600),
        None => match fs::remove_file(&copy) {
            Err(error) if error.kind() != io::ErrorKind::NotFound => Err(error),
            _ => Ok(()),
        },
    }
}

/// Prepares the process for the shares of many users.
fn prepare_process() {
    use rustix::process::{Resource, getrlimit, setrlimit};
    // Programs of other users load and map files that the daemon writes.
    rustix::process::umask(rustix::fs::Mode::from_raw_mode(0o022));
    // The limits may have been lowered for another purpose, and each share and each connection needs a few descriptors.
    for resource in [Resource::Nofile, Resource::Fsize, Resource::As, Resource::Nproc] {
        let mut limit = getrlimit(resource);
        limit.current = limit.maximum;
        let _ = setrlimit(resource, limit);
    }
}

/// Listens on the socket of the state directory, in place of an earlier daemon's.
fn listen(state_dir: &StateDir) -> io::Result<UnixListener> {
    let (path, unfinished) = (state_dir.socket(), state_dir.path().join("daemon.sock.new"));
    let _ = fs::remove_file(&unfinished);
    let listener = UnixListener::bind(&unfinished)?;
    // All users may connect: the kernel reports the user of a connection, and the settings limit what each may do.
    let mode = if StateDir::is_for_all_users() { 0o666 } else { 0o600 };
    fs::set_permissions(&unfinished, fs::Permissions::from_mode(mode))?;
    // A caller may disconnect between the poll and the accept.
    listener.set_nonblocking(true)?;
    fs::rename(&unfinished, &path)?;
    Ok(listener)
}
