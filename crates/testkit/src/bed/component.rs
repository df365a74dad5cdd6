//! One program of the cluster, which tests can start, kill, pause and restart.

use super::bed_dir::BedDir;
use super::sandbox::{only_child_of, signal, wait_waking};
use super::{BedError, log_excerpt, wait};
use rustix::process::Signal;
use std::fs::{self, OpenOptions};
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::sync::atomic::AtomicBool;
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::Duration;

/// Time limit for the steps around a start on a loaded machine.
const START_TIMEOUT: Duration = Duration::from_secs(120);

/// The namespaces and cgroups that programs are started in.
#[derive(Clone, Debug)]
pub(super) struct ExecEnvironment {
    /// PID of a process that is in the namespaces.
    pub(super) target: u32,
    pub(super) cgroups: Vec<PathBuf>,
    /// The script that enters them.
    pub(super) enter: PathBuf,
    /// Directory of the programs, as seen from inside.
    pub(super) bin: PathBuf,
}

impl ExecEnvironment {
    /// Returns a command that runs `program` inside.
    pub(super) fn command(&self, program: &Path, arguments: &[String]) -> Command {
        let mut command = Command::new("sh");
        command.arg(&self.enter).arg(self.target.to_string()).args(&self.cgroups);
        command.arg("--").arg(program).args(arguments);
        // The environment of the test must not reach the cluster.
        command.env_clear().env("PATH", search_path(&self.bin)).env("HOME", "/root").env("LC_ALL", "C.UTF-8");
        command.stdin(Stdio::null()).process_group(0);
        command
    }
}

fn search_path(bin: &Path) -> String {
    format!("{}:/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin", bin.display())
}

/// A program with its log, and its process while it runs.
#[derive(Debug)]
pub struct Component {
    name: String,
    program: String,
    arguments: Vec<String>,
    log: PathBuf,
    environment: Mutex<ExecEnvironment>,
    running: Mutex<Option<RunningProcess>>,
}

#[derive(Debug)]
struct RunningProcess {
    /// `nsenter`, which waits for the program and exits with its status.
    waiter: Child,
    /// PID of the program on the host.
    process: u32,
}

impl Component {
    pub(super) fn new(
        name: impl Into<String>,
        program: impl Into<String>,
        arguments: Vec<String>,
        folder: &BedDir,
        environment: &ExecEnvironment,
    ) -> Self {
        let name = name.into();
        let log = folder.logs.join(format!("{}.log", name.replace('/', "-")));
        Self {
            name,
            program: program.into(),
            arguments,
            log,
            environment: Mutex::new(environment.clone()),
            running: Mutex::new(None),
        }
    }

    /// Returns the component's name: `etcd`, `node1/kubelet`.
    pub fn name(&self) -> &str {
        &self.name
    }

    /// Returns the path of the log, which has everything since the bed started.
    pub fn log(&self) -> &Path {
        &self.log
    }

    /// Returns the PID on the host while the program runs.
    pub fn pid(&self) -> Option<u32> {
        let mut running = lock(&self.running);
        match running.as_mut().map(|running| (running.waiter.try_wait(), running.process)) {
            Some((Ok(None), process)) => Some(process),
            _ => None,
        }
    }

    /// Returns the resident memory in bytes; 0 while the program does not run.
    pub fn resident_bytes(&self) -> u64 {
        let Some(process) = self.pid() else { return 0 };
        let status = fs::read_to_string(format!("/proc/{process}/status")).unwrap_or_default();
        let line = status.lines().find_map(|line| line.strip_prefix("VmRSS:")).unwrap_or_default();
        line.split_whitespace().next().and_then(|kib| kib.parse::<u64>().ok()).unwrap_or_default() * 1024
    }

    /// Starts the program. Does nothing if it runs already.
    pub fn start(&self) -> Result<(), BedError> {
        if self.pid().is_some() {
            return Ok(());
        }
        let doing = || format!("starting {}", self.name);
        let environment = lock(&self.environment).clone();
        let log =
            OpenOptions::new().create(true).append(true).open(&self.log).map_err(BedError::io(doing()))?;
        let copy = log.try_clone().map_err(BedError::io(doing()))?;
        let program = environment.bin.join(&self.program);
        let mut waiter = environment
            .command(&program, &self.arguments)
            .stdout(log)
            .stderr(copy)
            .spawn()
            .map_err(BedError::io(doing()))?;
        let process = wait::poll_until(&doing(), START_TIMEOUT, &AtomicBool::new(false), || {
            match only_child_of(waiter.id()) {
                Some(process) => Ok(Some(process)),
                None => match waiter.try_wait().map_err(BedError::io(doing()))? {
                    Some(status) => Err(self.exit_error(&status.to_string())),
                    None => Ok(None),
                },
            }
        })?;
        *lock(&self.running) = Some(RunningProcess { waiter, process });
        Ok(())
    }

    /// Kills the program at once, as a crash would.
    pub fn kill(&self) {
        self.terminate(Signal::KILL);
    }

    /// Sends SIGTERM and waits until the program has exited.
    pub fn stop(&self) {
        self.terminate(Signal::TERM);
    }

    fn terminate(&self, with: Signal) {
        if let Some(mut running) = lock(&self.running).take() {
            if matches!(running.waiter.try_wait(), Ok(None)) {
                signal(running.process, with);
            }
            // A paused process reacts to SIGKILL only, and its waiter not even to that.
            let process = running.process;
            let waiter = running.waiter.id();
            wait_waking(&mut running.waiter, || {
                signal(waiter, Signal::CONT);
                if with != Signal::KILL {
                    signal(process, Signal::CONT);
                }
            });
        }
    }

    /// Kills the program and starts it again.
    pub fn restart(&self) -> Result<(), BedError> {
        self.kill();
        self.start()
    }

    /// Suspends the program with SIGSTOP, as if it hung.
    pub fn pause(&self) {
        if let Some(process) = self.pid() {
            signal(process, Signal::STOP);
        }
    }

    /// Resumes a suspended program.
    pub fn resume(&self) {
        if let Some(running) = lock(&self.running).as_ref() {
            resume_process(running);
        }
    }

    /// Wakes the process outside the namespaces that waits for the program; see [`super::sandbox::wait_waking`].
    pub(super) fn wake_waiter(&self) {
        if let Some(running) = lock(&self.running).as_ref() {
            signal(running.waiter.id(), Signal::CONT);
        }
    }

    /// Returns whether the program has exited without being stopped.
    pub(crate) fn has_exited_unexpectedly(&self) -> bool {
        self.check().is_err()
    }

    /// Fails if the program has exited without being stopped.
    pub(super) fn check(&self) -> Result<(), BedError> {
        let mut running = lock(&self.running);
        match running.as_mut().map(|running| running.waiter.try_wait()) {
            Some(Ok(Some(status))) => Err(self.exit_error(&status.to_string())),
            _ => Ok(()),
        }
    }

    /// Sets where the program starts next, after a reboot. It must not be running.
    pub(super) fn move_to(&self, environment: &ExecEnvironment) {
        *lock(&self.environment) = environment.clone();
    }

    fn exit_error(&self, how: &str) -> BedError {
        let message = log_excerpt::excerpt(&fs::read_to_string(&self.log).unwrap_or_default(), 12);
        BedError::Ended { name: self.name.clone(), how: how.to_string(), log: self.log.clone(), message }
    }

    /// Returns the state in one line: `running, pid 12`.
    pub(super) fn status_line(&self) -> String {
        match (self.pid(), lock(&self.running).as_mut().map(|running| running.waiter.try_wait())) {
            (Some(process), _) => format!("running, pid {process}"),
            (None, Some(Ok(Some(status)))) => format!("exited unexpectedly, {status}"),
            _ => "not running".to_string(),
        }
    }
}

/// Resumes a program. `nsenter` stops when its child stops, and wakes the child when it is woken.
fn resume_process(running: &RunningProcess) {
    signal(running.waiter.id(), Signal::CONT);
    signal(running.process, Signal::CONT);
}

impl Drop for Component {
    fn drop(&mut self) {
        // The bed ends its programs; only their waiters are reaped here.
        if let Some(mut running) = lock(&self.running).take() {
            let _ = running.waiter.wait();
        }
    }
}

/// Locks a mutex. A thread that panicked while it held the lock has left a complete value.
pub(super) fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}
