//! One program of the cluster: started, killed, paused, restarted.

use super::folder::Folder;
use super::world::{child_of, signal, wait_nudging};
use super::{BedError, logs, wait};
use rustix::process::Signal;
use std::fs::{self, OpenOptions};
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::sync::atomic::AtomicBool;
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::Duration;

/// How long the steps around a start may take on a machine that is busy with other things.
const PATIENCE: Duration = Duration::from_secs(120);

/// Namespaces and cgroups that programs are started in.
#[derive(Clone, Debug)]
pub(super) struct Place {
    /// A process that is in them.
    pub(super) target: u32,
    pub(super) cgroups: Vec<PathBuf>,
    /// The script that does it.
    pub(super) enter: PathBuf,
    /// The folder with the programs, as seen from inside.
    pub(super) bin: PathBuf,
}

impl Place {
    /// A command that runs `program` inside.
    pub(super) fn command(&self, program: &Path, arguments: &[String]) -> Command {
        let mut command = Command::new("sh");
        command.arg(&self.enter).arg(self.target.to_string()).args(&self.cgroups);
        command.arg("--").arg(program).args(arguments);
        // What the test's environment says is not for the cluster.
        command.env_clear().env("PATH", path_inside(&self.bin)).env("HOME", "/root").env("LC_ALL", "C.UTF-8");
        command.stdin(Stdio::null()).process_group(0);
        command
    }
}

fn path_inside(bin: &Path) -> String {
    format!("{}:/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin", bin.display())
}

/// A program and whether it runs.
#[derive(Debug)]
pub struct Component {
    name: String,
    program: String,
    arguments: Vec<String>,
    log: PathBuf,
    place: Mutex<Place>,
    running: Mutex<Option<Running>>,
}

#[derive(Debug)]
struct Running {
    /// `nsenter`: it waits for the program and ends as the program did.
    waiter: Child,
    /// The program, by its name on the machine.
    process: u32,
}

impl Component {
    pub(super) fn new(
        name: impl Into<String>,
        program: impl Into<String>,
        arguments: Vec<String>,
        folder: &Folder,
        place: &Place,
    ) -> Self {
        let name = name.into();
        let log = folder.logs.join(format!("{}.log", name.replace('/', "-")));
        Self {
            name,
            program: program.into(),
            arguments,
            log,
            place: Mutex::new(place.clone()),
            running: Mutex::new(None),
        }
    }

    /// What it is called: `etcd`, `node1/kubelet`.
    pub fn name(&self) -> &str {
        &self.name
    }

    /// Everything it said, since the bed began.
    pub fn log(&self) -> &Path {
        &self.log
    }

    /// Its process number on the machine, while it runs.
    pub fn process(&self) -> Option<u32> {
        let mut running = lock(&self.running);
        match running.as_mut().map(|running| (running.waiter.try_wait(), running.process)) {
            Some((Ok(None), process)) => Some(process),
            _ => None,
        }
    }

    /// The memory it holds, in bytes; nothing while it does not run.
    pub fn resident_bytes(&self) -> u64 {
        let Some(process) = self.process() else { return 0 };
        let status = fs::read_to_string(format!("/proc/{process}/status")).unwrap_or_default();
        let line = status.lines().find_map(|line| line.strip_prefix("VmRSS:")).unwrap_or_default();
        line.split_whitespace().next().and_then(|kib| kib.parse::<u64>().ok()).unwrap_or_default() * 1024
    }

    /// Starts it; where it runs already, that is all right.
    pub fn start(&self) -> Result<(), BedError> {
        if self.process().is_some() {
            return Ok(());
        }
        let doing = || format!("starting {}", self.name);
        let place = lock(&self.place).clone();
        let log =
            OpenOptions::new().create(true).append(true).open(&self.log).map_err(BedError::io(doing()))?;
        let copy = log.try_clone().map_err(BedError::io(doing()))?;
        let program = place.bin.join(&self.program);
        let mut waiter = place
            .command(&program, &self.arguments)
            .stdout(log)
            .stderr(copy)
            .spawn()
            .map_err(BedError::io(doing()))?;
        let process =
            wait::until(&doing(), PATIENCE, &AtomicBool::new(false), || match child_of(waiter.id()) {
                Some(process) => Ok(Some(process)),
                None => match waiter.try_wait().map_err(BedError::io(doing()))? {
                    Some(status) => Err(self.ended(&status.to_string())),
                    None => Ok(None),
                },
            })?;
        *lock(&self.running) = Some(Running { waiter, process });
        Ok(())
    }

    /// Ends it at once, as a crash would.
    pub fn kill(&self) {
        self.end(Signal::KILL);
    }

    /// Asks it to end, and waits for it.
    pub fn stop(&self) {
        self.end(Signal::TERM);
    }

    fn end(&self, with: Signal) {
        if let Some(mut running) = lock(&self.running).take() {
            if matches!(running.waiter.try_wait(), Ok(None)) {
                signal(running.process, with);
            }
            // One that is paused hears nothing but a kill, and its waiter not even that.
            let process = running.process;
            let waiter = running.waiter.id();
            wait_nudging(&mut running.waiter, || {
                signal(waiter, Signal::CONT);
                if with != Signal::KILL {
                    signal(process, Signal::CONT);
                }
            });
        }
    }

    /// Kills it and starts it anew.
    pub fn restart(&self) -> Result<(), BedError> {
        self.kill();
        self.start()
    }

    /// Stops it where it stands, as a machine that hangs.
    pub fn pause(&self) {
        if let Some(process) = self.process() {
            signal(process, Signal::STOP);
        }
    }

    /// Lets it go on.
    pub fn resume(&self) {
        if let Some(running) = lock(&self.running).as_ref() {
            wake(running);
        }
    }

    /// Wakes who waits for it outside; see [`super::world::wait_nudging`].
    pub(super) fn nudge(&self) {
        if let Some(running) = lock(&self.running).as_ref() {
            signal(running.waiter.id(), Signal::CONT);
        }
    }

    /// Did it end without being told to?
    pub(crate) fn ended_by_itself(&self) -> bool {
        self.check().is_err()
    }

    /// An error where it ended by itself.
    pub(super) fn check(&self) -> Result<(), BedError> {
        let mut running = lock(&self.running);
        match running.as_mut().map(|running| running.waiter.try_wait()) {
            Some(Ok(Some(status))) => Err(self.ended(&status.to_string())),
            _ => Ok(()),
        }
    }

    /// After a reboot programs are started elsewhere. It must not run.
    pub(super) fn move_to(&self, place: &Place) {
        *lock(&self.place) = place.clone();
    }

    fn ended(&self, how: &str) -> BedError {
        let said = logs::cut(&fs::read_to_string(&self.log).unwrap_or_default(), 12);
        BedError::Ended { name: self.name.clone(), how: how.to_string(), log: self.log.clone(), said }
    }

    /// In one line for people: `running (pid 12)`.
    pub(super) fn state(&self) -> String {
        match (self.process(), lock(&self.running).as_mut().map(|running| running.waiter.try_wait())) {
            (Some(process), _) => format!("running, pid {process}"),
            (None, Some(Ok(Some(status)))) => format!("ended by itself, {status}"),
            _ => "not running".to_string(),
        }
    }
}

/// `nsenter` stops when its child stops, and wakes it when it is woken.
fn wake(running: &Running) {
    signal(running.waiter.id(), Signal::CONT);
    signal(running.process, Signal::CONT);
}

impl Drop for Component {
    fn drop(&mut self) {
        // The bed ends its programs; here their waiters are collected.
        if let Some(mut running) = lock(&self.running).take() {
            let _ = running.waiter.wait();
        }
    }
}

/// A thread that panicked while it held the lock left a whole value behind.
pub(super) fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}
