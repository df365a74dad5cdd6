//! Measures the cost of shares on a workstation: starting a command in a share, and the CPU time of the daemon and of `partage top` with a
//! hundred shares. Run by `make bench`. Needs no GPU: uses the simulated driver in a temporary state directory.
#![allow(unsafe_code, clippy::unwrap_used, clippy::print_stdout, missing_docs)]

use partage_driver_api::exports::DriverVersion;
use partage_sim_node::node::{NodeConfig, NodeDir};
use partage_sim_node::{install, profile};
use partage_workstation::client::DaemonClient;
use partage_workstation::state_dir::StateDir;
use rustix::termios::{Winsize, tcsetwinsize};
use std::fs::File;
use std::io::Read;
use std::os::fd::FromRawFd;
use std::path::Path;
use std::process::{Child, Command, Stdio};
use std::ptr::null_mut;
use std::time::{Duration, Instant};

const PAIRS: usize = 100;
const COLD: usize = 20;
/// Time after which an ended share has been released.
const PAUSE: Duration = Duration::from_millis(100);
const SHARES: usize = 100;
/// Time over which CPU usage is measured.
const MEASURED_TIME: Duration = Duration::from_secs(20);
/// Maximum time to wait for a state; long, because the machine may be busy.
const WAIT_TIMEOUT: Duration = Duration::from_secs(120);

fn main() {
    let machine = Machine::new();
    println!("a command in a share     bare ms   in a share ms   added ms: median   99th of 100");
    let other = machine.share("other");
    measure_start(&machine, "beside another share", PAIRS, || std::thread::sleep(PAUSE));
    measure_start(&machine, "right after another", PAIRS, || ());
    drop(other);
    machine.stop_daemon();
    measure_start(&machine, "no daemon runs", COLD, || machine.stop_daemon());
    println!();
    println!("{SHARES} shares               percent of a core, over {} s", MEASURED_TIME.as_secs());
    let shares: Vec<RunningProcess> = (0..SHARES).map(|at| machine.share(&format!("share-{at}"))).collect();
    let daemon = machine.daemon_pid();
    // Lets the daemon finish its work for the new shares.
    std::thread::sleep(Duration::from_secs(2));
    let [idle] = cpu_percent([daemon]);
    println!("{:<24} {idle:>8.2}", "daemon");
    let top = TopOnTerminal::start(&machine);
    let [watched, top_cpu] = cpu_percent([daemon, top.child.id()]);
    drop(top);
    println!("{:<24} {top_cpu:>8.2}", "partage top");
    println!("{:<24} {:>+8.2}", "daemon, with top", watched - idle);
    drop(shares);
    machine.stop_daemon();
}

/// Measures a command without and with a share alternately, so that other load of the machine affects both.
fn measure_start(machine: &Machine, what: &str, pairs: usize, before: impl Fn()) {
    let (mut bare, mut held, mut added) = (Vec::new(), Vec::new(), Vec::new());
    for at in 0..=pairs {
        before();
        let without_share = timed(Command::new("true"));
        let mut command = machine.command(&["run", "-q", "--memory", "1Gi", "--cores", "10", "--"]);
        command.arg("true");
        let with_share = timed(command);
        // The first pair is a warm-up, which reads the files.
        if at > 0 {
            bare.push(without_share);
            held.push(with_share);
            added.push(with_share - without_share);
        }
    }
    println!(
        "{what:<24} {:>7.2} {:>15.2} {:>18.2} {:>13.2}",
        quantile(&mut bare, 50),
        quantile(&mut held, 50),
        quantile(&mut added, 50),
        quantile(&mut added, 99)
    );
}

/// Returns the milliseconds from the start of a command to its exit.
fn timed(mut command: Command) -> f64 {
    let begun = Instant::now();
    assert!(command.stdin(Stdio::null()).status().unwrap().success());
    begun.elapsed().as_secs_f64() * 1e3
}

fn quantile(values: &mut [f64], percent: usize) -> f64 {
    values.sort_by(f64::total_cmp);
    values[(values.len() * percent / 100).min(values.len() - 1)]
}

/// Returns the CPU usage of processes, in percent of a core.
fn cpu_percent<const N: usize>(pids: [u32; N]) -> [f64; N] {
    let (begun, before) = (Instant::now(), pids.map(cpu_ticks));
    std::thread::sleep(MEASURED_TIME);
    let (took, after) = (begun.elapsed().as_secs_f64(), pids.map(cpu_ticks));
    // SAFETY: sysconf only returns a number.
    let per_second = unsafe { libc::sysconf(libc::_SC_CLK_TCK) } as f64;
    std::array::from_fn(|at| (after[at] - before[at]) as f64 / per_second / took * 100.0)
}

/// Returns the CPU time of a process and its threads, in clock ticks.
fn cpu_ticks(pid: u32) -> u64 {
    let stat = std::fs::read_to_string(format!("/proc/{pid}/stat")).unwrap();
    let fields: Vec<&str> = stat.rsplit_once(") ").unwrap().1.split(' ').collect();
    fields[11].parse::<u64>().unwrap() + fields[12].parse::<u64>().unwrap()
}

/// A state directory and two simulated GPUs.
struct Machine {
    directory: tempfile::TempDir,
}

impl Machine {
    fn new() -> Machine {
        // In memory, as the default state directory in /run is.
        let memory = Path::new("/dev/shm");
        let directory =
            tempfile::tempdir_in(if memory.is_dir() { memory } else { Path::new("/tmp") }).unwrap();
        // Selected explicitly, so that a real GPU of the machine is not used.
        let config = NodeConfig::new(DriverVersion::R550, &profile::A100_SXM4_40GB, 2, 7).unwrap();
        let node = NodeDir::create(&directory.path().join("node"), &config).unwrap();
        let object = install::shared_object().unwrap();
        install::write_libraries(&object, &node.libraries(), config.driver, node.path()).unwrap();
        Machine { directory }
    }

    fn command(&self, arguments: &[&str]) -> Command {
        let mut command = Command::new(env!("CARGO_BIN_EXE_partage"));
        command.args(arguments).env("PARTAGE_STATE_DIR", self.directory.path().join("state_dir"));
        command.env("PARTAGE_SIM_DIR", self.directory.path().join("node")).env("LC_ALL", "C.UTF-8");
        command
    }

    fn state_dir(&self) -> StateDir {
        StateDir::at(&self.directory.path().join("state_dir")).unwrap()
    }

    /// Returns the daemon's process id, and checks that all shares run.
    fn daemon_pid(&self) -> u32 {
        let out = self.command(&["top", "-o", "json", "--interval", "100ms"]).output().unwrap();
        let report: serde_json::Value = serde_json::from_slice(&out.stdout).unwrap();
        assert_eq!(report["shares"].as_array().unwrap().len(), SHARES);
        report["daemon"]["pid"].as_u64().unwrap().try_into().unwrap()
    }

    fn wait_until(&self, holds: impl Fn(&Machine) -> bool) {
        let deadline = Instant::now() + WAIT_TIMEOUT;
        while !holds(self) {
            assert!(Instant::now() < deadline, "timed out");
            std::thread::sleep(Duration::from_millis(5));
        }
    }

    /// Starts a share whose command does nothing.
    fn share(&self, name: &str) -> RunningProcess {
        let arguments =
            ["run", "-q", "--memory", "256Mi", "--cores", "1", "--name", name, "--", "sleep", "1000"];
        let running = RunningProcess(self.command(&arguments).stdin(Stdio::null()).spawn().unwrap());
        let sleeps = |pid: u32| {
            std::fs::read_to_string(format!("/proc/{pid}/comm")).is_ok_and(|name| name.trim() == "sleep")
        };
        self.wait_until(|_| sleeps(running.0.id()));
        running
    }

    /// Waits until no daemon runs.
    fn stop_daemon(&self) {
        let state_dir = self.state_dir();
        let [socket, shares, lock] =
            ["daemon.sock", "shares", "daemon.lock"].map(|name| state_dir.path().join(name));
        // The daemon notices the end of shares by itself, and then hands over on request.
        self.wait_until(|_| std::fs::read_dir(&shares).is_ok_and(|mut left| left.next().is_none()));
        DaemonClient::new(state_dir).take_over().unwrap();
        self.wait_until(|_| !socket.exists() && is_unlocked(&lock));
    }
}

/// Returns whether no process holds the lock file.
fn is_unlocked(lock: &Path) -> bool {
    let Ok(file) = File::options().write(true).open(lock) else { return true };
    rustix::fs::flock(&file, rustix::fs::FlockOperation::NonBlockingLockExclusive).is_ok()
}

/// A process that is killed when dropped.
struct RunningProcess(Child);

impl Drop for RunningProcess {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

/// `partage top` on a pseudo-terminal whose output is discarded.
struct TopOnTerminal {
    child: Child,
}

impl TopOnTerminal {
    fn start(machine: &Machine) -> TopOnTerminal {
        let (mut ours, mut theirs) = (0, 0);
        // SAFETY: both pointers refer to local variables; null pointers for name, modes and size are allowed.
        let made = unsafe { libc::openpty(&mut ours, &mut theirs, null_mut(), null_mut(), null_mut()) };
        assert_eq!(made, 0);
        // SAFETY: openpty has just opened this descriptor, and nothing else owns it.
        let mut ours = unsafe { File::from_raw_fd(ours) };
        // SAFETY: openpty has just opened this descriptor, and nothing else owns it.
        let theirs = unsafe { File::from_raw_fd(theirs) };
        tcsetwinsize(&theirs, Winsize { ws_row: 50, ws_col: 120, ws_xpixel: 0, ws_ypixel: 0 }).unwrap();
        let mut command = machine.command(&["top", "--interval", "1s"]);
        command.env("TERM", "xterm").stdin(theirs.try_clone().unwrap()).stdout(theirs);
        let child = command.spawn().unwrap();
        std::thread::spawn(move || {
            let mut bytes = [0; 4096];
            while ours.read(&mut bytes).is_ok_and(|read| read > 0) {}
        });
        // The start of the program is not measured.
        std::thread::sleep(Duration::from_secs(2));
        TopOnTerminal { child }
    }
}

impl Drop for TopOnTerminal {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}
