//! What shares of one machine cost: starting a command in one, looking at a hundred, keeping a hundred. Run by `make
//! bench`. No GPU: the simulated driver is in a home of the benchmark's own.
#![allow(unsafe_code, clippy::unwrap_used, clippy::print_stdout, missing_docs)]

use partage_driver_api::exports::DriverVersion;
use partage_sim_node::node::{NodeConfig, NodeDir};
use partage_sim_node::{install, profile};
use partage_workstation::client::Client;
use partage_workstation::home::Home;
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
/// By then a share that has ended is given back.
const PAUSE: Duration = Duration::from_millis(100);
const SHARES: usize = 100;
const LOOKED_AT: Duration = Duration::from_secs(20);
/// Nothing here takes long; on a busy machine everything may.
const PATIENCE: Duration = Duration::from_secs(120);

fn main() {
    let machine = Machine::new();
    println!("a command in a share     bare ms   in a share ms   added ms: median   99th of 100");
    let other = machine.share("other");
    starting(&machine, "beside another share", PAIRS, || std::thread::sleep(PAUSE));
    starting(&machine, "right after another", PAIRS, || ());
    drop(other);
    machine.alone();
    starting(&machine, "no keeper runs", COLD, || machine.alone());
    println!();
    println!("{SHARES} shares               percent of a core, over {} s", LOOKED_AT.as_secs());
    let shares: Vec<Running> = (0..SHARES).map(|at| machine.share(&format!("share-{at}"))).collect();
    let keeper = machine.keeper();
    // What starting them left to do is done.
    std::thread::sleep(Duration::from_secs(2));
    let [idle] = busy([keeper]);
    println!("{:<24} {idle:>8.2}", "keeper");
    let top = Top::start(&machine);
    let [watched, top_cpu] = busy([keeper, top.child.id()]);
    drop(top);
    println!("{:<24} {top_cpu:>8.2}", "partage top");
    println!("{:<24} {:>+8.2}", "keeper, looked at", watched - idle);
    drop(shares);
    machine.alone();
}

/// A command by itself and in a share, one after the other, so that what else the machine does meets both.
fn starting(machine: &Machine, what: &str, pairs: usize, before: impl Fn()) {
    let (mut bare, mut held, mut added) = (Vec::new(), Vec::new(), Vec::new());
    for at in 0..=pairs {
        before();
        let alone = timed(Command::new("true"));
        let mut command = machine.command(&["run", "-q", "--memory", "1Gi", "--cores", "10", "--"]);
        command.arg("true");
        let inside = timed(command);
        // The first of each has its files read.
        if at > 0 {
            bare.push(alone);
            held.push(inside);
            added.push(inside - alone);
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

/// Milliseconds from the start of a command to its end.
fn timed(mut command: Command) -> f64 {
    let begun = Instant::now();
    assert!(command.stdin(Stdio::null()).status().unwrap().success());
    begun.elapsed().as_secs_f64() * 1e3
}

fn quantile(values: &mut [f64], percent: usize) -> f64 {
    values.sort_by(f64::total_cmp);
    values[(values.len() * percent / 100).min(values.len() - 1)]
}

/// What processes take of a core, in percent.
fn busy<const N: usize>(pids: [u32; N]) -> [f64; N] {
    let (begun, before) = (Instant::now(), pids.map(ticks));
    std::thread::sleep(LOOKED_AT);
    let (took, after) = (begun.elapsed().as_secs_f64(), pids.map(ticks));
    // SAFETY: asks for a number.
    let per_second = unsafe { libc::sysconf(libc::_SC_CLK_TCK) } as f64;
    std::array::from_fn(|at| (after[at] - before[at]) as f64 / per_second / took * 100.0)
}

/// Processor time of a process, its threads included.
fn ticks(pid: u32) -> u64 {
    let stat = std::fs::read_to_string(format!("/proc/{pid}/stat")).unwrap();
    let fields: Vec<&str> = stat.rsplit_once(") ").unwrap().1.split(' ').collect();
    fields[11].parse::<u64>().unwrap() + fields[12].parse::<u64>().unwrap()
}

/// A home, two simulated GPUs, and who keeps them.
struct Machine {
    folder: tempfile::TempDir,
}

impl Machine {
    fn new() -> Machine {
        // Homes are in memory, where there is a /run.
        let memory = Path::new("/dev/shm");
        let folder = tempfile::tempdir_in(if memory.is_dir() { memory } else { Path::new("/tmp") }).unwrap();
        // Named, so that a machine with a GPU is measured without it, too.
        let config = NodeConfig::new(DriverVersion::R550, &profile::A100_SXM4_40GB, 2, 7).unwrap();
        let node = NodeDir::create(&folder.path().join("node"), &config).unwrap();
        let object = install::shared_object().unwrap();
        install::libraries(&object, &node.libraries(), config.driver, node.path()).unwrap();
        Machine { folder }
    }

    fn command(&self, arguments: &[&str]) -> Command {
        let mut command = Command::new(env!("CARGO_BIN_EXE_partage"));
        command.args(arguments).env("PARTAGE_HOME", self.folder.path().join("home"));
        command.env("PARTAGE_SIM_DIR", self.folder.path().join("node")).env("LC_ALL", "C.UTF-8");
        command
    }

    fn home(&self) -> Home {
        Home::at(&self.folder.path().join("home")).unwrap()
    }

    /// The process that keeps the shares, all of which are there.
    fn keeper(&self) -> u32 {
        let out = self.command(&["top", "-o", "json", "--interval", "100ms"]).output().unwrap();
        let report: serde_json::Value = serde_json::from_slice(&out.stdout).unwrap();
        assert_eq!(report["shares"].as_array().unwrap().len(), SHARES);
        report["keeper"]["pid"].as_u64().unwrap().try_into().unwrap()
    }

    fn until(&self, holds: impl Fn(&Machine) -> bool) {
        let deadline = Instant::now() + PATIENCE;
        while !holds(self) {
            assert!(Instant::now() < deadline, "this takes too long");
            std::thread::sleep(Duration::from_millis(5));
        }
    }

    /// A share whose command does nothing.
    fn share(&self, name: &str) -> Running {
        let arguments =
            ["run", "-q", "--memory", "256Mi", "--cores", "1", "--name", name, "--", "sleep", "1000"];
        let running = Running(self.command(&arguments).stdin(Stdio::null()).spawn().unwrap());
        let sleeps = |pid: u32| {
            std::fs::read_to_string(format!("/proc/{pid}/comm")).is_ok_and(|name| name.trim() == "sleep")
        };
        self.until(|_| sleeps(running.0.id()));
        running
    }

    /// Until no keeper is there any more.
    fn alone(&self) {
        let home = self.home();
        let [socket, shares, lock] =
            ["keeper.sock", "shares", "keeper.lock"].map(|name| home.path().join(name));
        // It notices by itself that they have ended; then it makes place for anybody.
        self.until(|_| std::fs::read_dir(&shares).is_ok_and(|mut left| left.next().is_none()));
        Client::new(home).take_over().unwrap();
        self.until(|_| !socket.exists() && is_free(&lock));
    }
}

/// Whether nobody keeps.
fn is_free(lock: &Path) -> bool {
    let Ok(file) = File::options().write(true).open(lock) else { return true };
    rustix::fs::flock(&file, rustix::fs::FlockOperation::NonBlockingLockExclusive).is_ok()
}

/// A process that ends with the benchmark.
struct Running(Child);

impl Drop for Running {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

/// `partage top` on a terminal that nobody looks at.
struct Top {
    child: Child,
}

impl Top {
    fn start(machine: &Machine) -> Top {
        let (mut ours, mut theirs) = (0, 0);
        // SAFETY: two variables for the two ends; no name, modes or size are given.
        let made = unsafe { libc::openpty(&mut ours, &mut theirs, null_mut(), null_mut(), null_mut()) };
        assert_eq!(made, 0);
        // SAFETY: it was opened just now, and is nobody else's.
        let mut ours = unsafe { File::from_raw_fd(ours) };
        // SAFETY: likewise.
        let theirs = unsafe { File::from_raw_fd(theirs) };
        tcsetwinsize(&theirs, Winsize { ws_row: 50, ws_col: 120, ws_xpixel: 0, ws_ypixel: 0 }).unwrap();
        let mut command = machine.command(&["top", "--interval", "1s"]);
        command.env("TERM", "xterm").stdin(theirs.try_clone().unwrap()).stdout(theirs);
        let child = command.spawn().unwrap();
        std::thread::spawn(move || {
            let mut bytes = [0; 4096];
            while ours.read(&mut bytes).is_ok_and(|read| read > 0) {}
        });
        // Its beginning is not what is measured.
        std::thread::sleep(Duration::from_secs(2));
        Top { child }
    }
}

impl Drop for Top {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}
