//! The namespaces of a bed: their first process, and the process that cleans up after it.

use super::bed_dir::BedDir;
use super::cgroups::Hierarchies;
use super::network::{self, Network};
use super::{BedError, wait};
use rustix::process::{Pid, Signal, kill_process};
use std::fs::{self, File};
use std::os::unix::process::CommandExt;
use std::path::Path;
use std::process::{Child, ChildStdin, Command, ExitStatus, Stdio};
use std::sync::atomic::AtomicBool;
use std::time::{Duration, Instant};

/// The namespaces of a bed, which exist as long as this value.
#[derive(Debug)]
pub(super) struct Sandbox {
    cleanup: CleanupProcess,
    first_pid: u32,
    pub(super) network: Network,
}

impl Sandbox {
    pub(super) fn start(
        folder: &BedDir,
        busybox: &Path,
        hierarchies: &Hierarchies,
        stop: &AtomicBool,
    ) -> Result<Self, BedError> {
        let log_path = folder.logs.join("cleanup.log");
        let log = File::create(&log_path).map_err(BedError::io(format!("writing {}", log_path.display())))?;
        let copy = log.try_clone().map_err(BedError::io("copying a file handle"))?;
        let mut command = Command::new("sh");
        command.arg(folder.path.join("cleanup.sh")).arg(&folder.path).arg(&folder.name).arg(busybox);
        // Its own process group: Ctrl-C is for this process, and the cleanup process must outlive it.
        command.args(hierarchies.roots()).process_group(0);
        let cleanup = command.stdin(Stdio::piped()).stdout(log).stderr(copy).spawn();
        let process = cleanup.map_err(BedError::io("starting the bed's cleanup process"));
        let mut cleanup = CleanupProcess::new(process?, folder.clone(), hierarchies.clone());
        let pid_file = folder.path.join("init.pid");
        let first_pid = wait::poll_until("the bed's namespaces", Duration::from_secs(120), stop, || {
            if let Some(status) = cleanup.exit_status()? {
                let message = fs::read_to_string(&log_path).unwrap_or_default();
                return Err(BedError::Kernel {
                    what: "create namespaces".to_string(),
                    message: format!("{status}: {}", message.trim()),
                    needs: "mount, network, pid and cgroup namespaces, and root in the host's user namespace",
                });
            }
            Ok(read_pid(&pid_file))
        })?;
        let network = Network::of_process(first_pid)?;
        network.run_ip(&network::host_commands())?;
        let in_network = network.enter_temporarily()?;
        // This applies to the bed's network namespace only.
        fs::write("/proc/sys/net/ipv4/ip_forward", "1").map_err(BedError::io("enabling IP forwarding"))?;
        drop(in_network);
        Ok(Self { cleanup, first_pid, network })
    }

    /// Returns the PID of the first process on the host.
    pub(super) fn first_pid(&self) -> u32 {
        self.first_pid
    }

    /// Returns whether another process has ended the sandbox.
    pub(super) fn is_gone(&self) -> bool {
        !Path::new(&format!("/proc/{}", self.first_pid)).exists()
    }

    /// Kills every process and waits until nothing is left. `wake` wakes the processes outside that wait for one
    /// inside.
    pub(super) fn terminate(&mut self, wake: impl Fn()) {
        self.cleanup.terminate(wake);
    }
}

/// The process that cleans up, and the pipe whose end shows that this process has exited.
#[derive(Debug)]
struct CleanupProcess {
    process: Child,
    /// Nothing is ever written. The kernel closes it when this process exits.
    liveness_pipe: Option<ChildStdin>,
    folder: BedDir,
    hierarchies: Hierarchies,
}

/// Time limit for killed processes to disappear.
const CLEANUP_TIMEOUT: Duration = Duration::from_secs(20);

impl CleanupProcess {
    fn new(mut process: Child, folder: BedDir, hierarchies: Hierarchies) -> Self {
        let liveness_pipe = process.stdin.take();
        Self { process, liveness_pipe, folder, hierarchies }
    }

    fn exit_status(&mut self) -> Result<Option<ExitStatus>, BedError> {
        self.process.try_wait().map_err(BedError::io("waiting for the cleanup process"))
    }

    fn terminate(&mut self, wake: impl Fn()) {
        if self.liveness_pipe.take().is_none() {
            return;
        }
        wait_waking(&mut self.process, &wake);
        // If the cleanup process was killed, this process does its work.
        let start = Instant::now();
        while !self.folder.try_remove(&self.hierarchies) && start.elapsed() < CLEANUP_TIMEOUT {
            wake();
            std::thread::sleep(Duration::from_millis(5));
        }
    }
}

impl Drop for CleanupProcess {
    fn drop(&mut self) {
        self.terminate(|| ());
    }
}

/// Waits for a process that waits for a pid namespace. The kernel releases the namespace when all its processes were
/// reaped, and a waiter that was stopped together with its program reaps nothing until it is woken.
pub(super) fn wait_waking(child: &mut Child, wake: impl Fn()) {
    while matches!(child.try_wait(), Ok(None)) {
        wake();
        std::thread::sleep(Duration::from_millis(2));
    }
}

/// Returns the only child of a process, by PIDs of the host.
pub(super) fn only_child_of(process: u32) -> Option<u32> {
    let children = fs::read_to_string(format!("/proc/{process}/task/{process}/children")).ok()?;
    children.split_whitespace().next()?.parse().ok()
}

/// Reads a PID that a script has written.
fn read_pid(path: &Path) -> Option<u32> {
    fs::read_to_string(path).ok()?.trim().parse().ok()
}

/// Sends a signal; does nothing if the process is gone.
pub(super) fn signal(process: u32, signal: Signal) {
    if let Some(pid) = i32::try_from(process).ok().and_then(Pid::from_raw) {
        let _ = kill_process(pid, signal);
    }
}
