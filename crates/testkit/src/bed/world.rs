//! The namespaces of a bed: one process that is the first in them, and the keeper that tidies up after it.

use super::cgroups::{self, Hierarchies};
use super::network::{self, Network};
use super::{BedError, wait};
use rustix::process::{Pid, Signal, kill_process};
use std::fs::{self, File};
use std::os::unix::fs::{DirBuilderExt, MetadataExt};
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::{Child, ChildStdin, Command, ExitStatus, Stdio};
use std::sync::atomic::{AtomicBool, AtomicU32, Ordering};
use std::time::Duration;

/// Every bed's folder and cgroups are called so, with a number of their own behind.
const PREFIX: &str = "partage-bed-";
/// Logs of beds that failed, one folder each, next to the beds.
const LOGS: &str = "partage-bed-logs";
/// So many of them are kept.
const KEPT_LOGS: usize = 20;
/// What a bed of one node takes, images and logs included.
const NEEDED_MIB: u64 = 512;

/// Files of one bed, all in one folder that the keeper removes.
#[derive(Clone, Debug)]
pub(super) struct Folder {
    /// The folder.
    pub(super) path: PathBuf,
    /// Its last part, also the name of the bed's cgroups.
    pub(super) name: String,
    /// Logs stand elsewhere: they outlive a bed that failed.
    pub(super) logs: PathBuf,
}

/// What scripts the bed brings along.
const SCRIPTS: [(&str, &str); 4] = [
    ("keeper.sh", include_str!("scripts/keeper.sh")),
    ("init.sh", include_str!("scripts/init.sh")),
    ("node.sh", include_str!("scripts/node.sh")),
    ("enter.sh", include_str!("scripts/enter.sh")),
];

impl Folder {
    pub(super) fn new() -> Result<Self, BedError> {
        static COUNT: AtomicU32 = AtomicU32::new(0);
        let base = std::env::temp_dir();
        enough_space(&base)?;
        let count = COUNT.fetch_add(1, Ordering::Relaxed);
        let name = format!("{PREFIX}{}-{count}", std::process::id());
        let path = base.join(&name);
        // A process of our number died here before.
        let _ = fs::remove_dir_all(&path);
        private(&path)?;
        let all_logs = base.join(LOGS);
        // Another bed may be making it at this moment.
        private(&all_logs).or_else(|error| if is_ours(&all_logs) { Ok(()) } else { Err(error) })?;
        let logs = all_logs.join(format!("{}-{count}", std::process::id()));
        let _ = fs::remove_dir_all(&logs);
        for folder in [&logs, &path.join("machine-proc"), &path.join("pids")] {
            fs::create_dir(folder).map_err(BedError::io(format!("making {}", folder.display())))?;
        }
        let folder = Self { path, name, logs };
        for (name, text) in SCRIPTS {
            folder.write(name, text)?;
        }
        Ok(folder)
    }

    /// A file in the folder; the way to it is made.
    pub(super) fn write(&self, name: &str, text: &str) -> Result<PathBuf, BedError> {
        let path = self.path.join(name);
        let doing = || format!("writing {}", path.display());
        if let Some(parent) = path.parent() {
            fs::create_dir_all(parent).map_err(BedError::io(doing()))?;
        }
        fs::write(&path, text).map_err(BedError::io(doing()))?;
        Ok(path)
    }
}

/// A folder that was not there before, for our eyes: others may write next to it, and keys will be in it.
fn private(folder: &Path) -> Result<(), BedError> {
    let made = fs::DirBuilder::new().mode(0o700).create(folder);
    made.map_err(BedError::io(format!("making {}", folder.display())))
}

/// A folder that we made earlier, and not one that somebody put in our way.
fn is_ours(folder: &Path) -> bool {
    let us = rustix::process::geteuid().as_raw();
    fs::symlink_metadata(folder).is_ok_and(|there| there.is_dir() && there.uid() == us)
}

fn enough_space(base: &Path) -> Result<(), BedError> {
    // Where the file system does not say, the first write will.
    let Ok(disk) = rustix::fs::statvfs(base) else { return Ok(()) };
    let free_mib = disk.f_bavail.saturating_mul(disk.f_frsize) >> 20;
    match free_mib < NEEDED_MIB {
        true => Err(BedError::NoSpace { folder: base.to_path_buf(), free_mib, needed_mib: NEEDED_MIB }),
        false => Ok(()),
    }
}

/// Removes what beds left whose keeper was killed too: owner dead, and nobody left who holds the lock.
pub(super) fn sweep(hierarchies: &Hierarchies) {
    let base = std::env::temp_dir();
    let names = |folder: &Path| {
        let entries = fs::read_dir(folder).into_iter().flatten().flatten();
        entries.map(|entry| entry.file_name().to_string_lossy().into_owned()).collect::<Vec<_>>()
    };
    for folder in hierarchies.roots().chain([&base]) {
        for name in names(folder) {
            // A bed that is just being made has no lock yet; its owner lives.
            if name.strip_prefix(PREFIX).is_none_or(|rest| name == LOGS || owner_lives(rest)) {
                continue;
            }
            let held = File::open(base.join(&name).join("lock")).is_ok_and(|lock| lock.try_lock().is_err());
            if !held && *folder == base {
                let _ = fs::remove_dir_all(folder.join(name));
            } else if !held {
                cgroups::remove(&folder.join(name));
            }
        }
    }
    let logs = fs::read_dir(base.join(LOGS)).into_iter().flatten().flatten();
    let mut logs: Vec<_> =
        logs.filter_map(|entry| Some((entry.metadata().ok()?.modified().ok()?, entry.path()))).collect();
    logs.sort();
    for (_, old) in logs.iter().rev().skip(KEPT_LOGS) {
        let name = old.file_name().unwrap_or_default().to_string_lossy();
        if !owner_lives(&name) {
            let _ = fs::remove_dir_all(old);
        }
    }
}

/// Names of beds begin with their owner's process number.
fn owner_lives(name: &str) -> bool {
    let owner = name.split('-').next().unwrap_or_default();
    owner.parse::<u32>().is_ok() && Path::new(&format!("/proc/{owner}")).exists()
}

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
        let mut keeper = Keeper::new(keeper.map_err(BedError::io("starting the bed's keeper"))?);
        let pid_file = folder.path.join("init.pid");
        let first = wait::until("the bed's namespaces", Duration::from_secs(30), stop, || {
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
}

impl Keeper {
    fn new(mut process: Child) -> Self {
        let life = process.stdin.take();
        Self { process, life }
    }

    fn ended(&mut self) -> Result<Option<ExitStatus>, BedError> {
        self.process.try_wait().map_err(BedError::io("waiting for the keeper"))
    }

    /// Only a keeper that was killed leaves something; the next sweep tidies up then.
    fn end(&mut self, nudge: impl Fn()) {
        drop(self.life.take());
        wait_nudging(&mut self.process, nudge);
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

/// A process number that a script left us.
pub(super) fn read_pid(path: &Path) -> Option<u32> {
    fs::read_to_string(path).ok()?.trim().parse().ok()
}

/// Sends a signal; a process that is gone has no need of it.
pub(super) fn signal(process: u32, signal: Signal) {
    if let Some(pid) = i32::try_from(process).ok().and_then(Pid::from_raw) {
        let _ = kill_process(pid, signal);
    }
}
