//! The namespaces of a bed: one process that is the first in them, and the keeper that tidies up after it.

use super::cgroups::Hierarchies;
use super::folder::Folder;
use super::network::{self, Network};
use super::{BedError, wait};
use rustix::process::{Pid, Signal, kill_process};
use std::fs::{self, File};
use std::os::unix::process::CommandExt;
use std::path::Path;
use std::process::{Child, ChildStdin, Command, ExitStatus, Stdio};
use std::sync::atomic::AtomicBool;
use std::time::{Duration, Instant};

/// The namespaces, for as long as this lives.
#[derive(Debug)]
pub(super) struct World {
    keeper: Keeper,
    first: u32,
    pub(super) network: Network,
}

impl World {
    pub(super) fn begin(
        folder: &Folder,
        busybox: &Path,
        hierarchies: &Hierarchies,
        stop: &AtomicBool,
    ) -> Result<Self, BedError> {
        let log_path = folder.logs.join("keeper.log");
        let log = File::create(&log_path).map_err(BedError::io(format!("writing {}", log_path.display())))?;
        let copy = log.try_clone().map_err(BedError::io("copying a file handle"))?;
        let mut command = Command::new("sh");
        command.arg(folder.path.join("keeper.sh")).arg(&folder.path).arg(&folder.name).arg(busybox);
        // A group of its own: Ctrl-C is for us, and the keeper must outlive us.
        command.args(hierarchies.roots()).process_group(0);
        let keeper = command.stdin(Stdio::piped()).stdout(log).stderr(copy).spawn();
        let process = keeper.map_err(BedError::io("starting the bed's keeper"));
        let mut keeper = Keeper::new(process?, folder.clone(), hierarchies.clone());
        let pid_file = folder.path.join("init.pid");
        let first = wait::until("the bed's namespaces", Duration::from_secs(120), stop, || {
            if let Some(status) = keeper.ended()? {
                let said = fs::read_to_string(&log_path).unwrap_or_default();
                return Err(BedError::Kernel {
                    what: "make namespaces".to_string(),
                    said: format!("{status}: {}", said.trim()),
                    needs: "mount, network, pid and cgroup namespaces, and to be root in the machine's user namespace",
                });
            }
            Ok(read_pid(&pid_file))
        })?;
        let network = Network::of(first)?;
        network.ip(&network::host_commands())?;
        let visit = network.visit()?;
        // Of this network namespace only.
        fs::write("/proc/sys/net/ipv4/ip_forward", "1").map_err(BedError::io("switching on forwarding"))?;
        drop(visit);
        Ok(Self { keeper, first, network })
    }

    /// The first process, by its name on the machine.
    pub(super) fn first(&self) -> u32 {
        self.first
    }

    /// Did somebody else end it?
    pub(super) fn is_gone(&self) -> bool {
        !Path::new(&format!("/proc/{}", self.first)).exists()
    }

    /// Ends every process, and waits until nothing is left. `nudge` is for those outside who wait for one inside.
    pub(super) fn end(&mut self, nudge: impl Fn()) {
        self.keeper.end(nudge);
    }
}

/// The process that tidies up, and the pipe by which it knows that we live.
#[derive(Debug)]
struct Keeper {
    process: Child,
    /// Nothing is ever written. The kernel closes it when we die.
    life: Option<ChildStdin>,
    folder: Folder,
    hierarchies: Hierarchies,
}

/// How long the dead may take to be gone.
const GRACE: Duration = Duration::from_secs(20);

impl Keeper {
    fn new(mut process: Child, folder: Folder, hierarchies: Hierarchies) -> Self {
        let life = process.stdin.take();
        Self { process, life, folder, hierarchies }
    }

    fn ended(&mut self) -> Result<Option<ExitStatus>, BedError> {
        self.process.try_wait().map_err(BedError::io("waiting for the keeper"))
    }

    fn end(&mut self, nudge: impl Fn()) {
        if self.life.take().is_none() {
            return;
        }
        wait_nudging(&mut self.process, &nudge);
        // One that was killed left its work to us.
        let start = Instant::now();
        while !self.folder.tidy(&self.hierarchies) && start.elapsed() < GRACE {
            nudge();
            std::thread::sleep(Duration::from_millis(5));
        }
    }
}

impl Drop for Keeper {
    fn drop(&mut self) {
        self.end(|| ());
    }
}

/// Waits for the end of a process that waits for a pid namespace. The kernel lets the namespace go when all of its dead
/// were collected, and a waiter that stopped together with its program collects nothing until it is woken.
pub(super) fn wait_nudging(child: &mut Child, nudge: impl Fn()) {
    while matches!(child.try_wait(), Ok(None)) {
        nudge();
        std::thread::sleep(Duration::from_millis(2));
    }
}

/// The only child of a process, by its name on the machine.
pub(super) fn child_of(process: u32) -> Option<u32> {
    let children = fs::read_to_string(format!("/proc/{process}/task/{process}/children")).ok()?;
    children.split_whitespace().next()?.parse().ok()
}

/// A process number that a script left us.
fn read_pid(path: &Path) -> Option<u32> {
    fs::read_to_string(path).ok()?.trim().parse().ok()
}

/// Sends a signal; a process that is gone has no need of it.
pub(super) fn signal(process: u32, signal: Signal) {
    if let Some(pid) = i32::try_from(process).ok().and_then(Pid::from_raw) {
        let _ = kill_process(pid, signal);
    }
}
