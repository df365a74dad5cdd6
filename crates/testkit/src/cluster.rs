//! A cluster for interactive use: `make cluster` starts it and returns, `make cluster-down` stops it.
//!
//! A holder process owns the bed in the background. It holds a lock while it runs, so a second cluster of that name is
//! refused, and no other process can be mistaken for it.

mod api_relay;
mod install;
mod state;

pub use install::install_nvidia_smi;
pub use state::ClusterState;

use crate::bed::{BedError, BedProfile, CgroupVersion, NodeProfile, TestBed};
use api_relay::ApiServerRelay;
use rustix::process::{Pid, Signal, kill_process};
use state::{ClusterDir, Holder};
use std::io::{BufRead, BufReader, Write};
use std::os::unix::process::CommandExt;
use std::path::PathBuf;
use std::process::{Child, Command, Stdio};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc::{self, RecvTimeoutError};
use std::time::{Duration, Instant};

/// Command-line options of a cluster.
#[derive(Clone, Debug, clap::Args)]
pub struct ClusterOptions {
    /// Number of nodes, named node1, node2 and so on
    #[arg(long, default_value_t = 1, value_parser = clap::value_parser!(u8).range(1..=20))]
    pub nodes: u8,
    /// Cgroup version of the nodes [default: that of the host]
    #[arg(long, value_enum)]
    pub cgroups: Option<CgroupVersionArg>,
    /// OCI archive of Partage's image, which is installed with simulated GPUs on every node
    #[arg(long, value_name = "FILE")]
    pub partage: Option<PathBuf>,
    /// Name of the cluster.
    #[command(flatten)]
    pub name: ClusterName,
}

/// The name of a cluster for interactive use.
#[derive(Clone, Debug, clap::Args, serde::Serialize, serde::Deserialize)]
pub struct ClusterName {
    /// Name of the cluster; names are unique
    #[arg(long, default_value = DEFAULT_NAME, value_parser = parse_name)]
    pub name: String,
}

impl ClusterName {
    /// Returns the command that stops the cluster of this name.
    pub fn down_command(&self) -> String {
        match self.name.as_str() {
            DEFAULT_NAME => "make cluster-down".to_string(),
            other => format!("cargo run -p partage-testkit -- cluster down --name {other}"),
        }
    }
}

/// The cluster name of `make cluster`.
const DEFAULT_NAME: &str = "bed";

/// Parses a cluster name, which becomes a directory.
fn parse_name(text: &str) -> Result<String, String> {
    let good = |one: char| one.is_ascii_alphanumeric() || one == '-';
    if !text.is_empty() && text.len() <= 40 && text.chars().all(good) {
        Ok(text.to_string())
    } else {
        Err("use 1 to 40 letters, digits and -".to_string())
    }
}

/// The cgroup version on the command line.
#[derive(Clone, Copy, Debug, clap::ValueEnum)]
pub enum CgroupVersionArg {
    /// One hierarchy per controller
    V1,
    /// One unified hierarchy for all controllers
    V2,
}

impl ClusterOptions {
    fn profile(&self) -> BedProfile {
        let empty = BedProfile::control_plane().debian();
        let empty = self.partage.iter().fold(empty, BedProfile::image);
        (1..=self.nodes).fold(empty, |profile, number| {
            let node = NodeProfile::new(format!("node{number}"));
            profile.node(match self.cgroups {
                Some(CgroupVersionArg::V1) => node.cgroups(CgroupVersion::V1),
                Some(CgroupVersionArg::V2) => node.cgroups(CgroupVersion::V2),
                None => node,
            })
        })
    }

    /// Returns the options as arguments for the holder.
    fn arguments(&self) -> Vec<String> {
        let mut arguments =
            vec!["--name".to_string(), self.name.name.clone(), "--nodes".to_string(), self.nodes.to_string()];
        if let Some(cgroups) = self.cgroups {
            let word = format!("{cgroups:?}").to_lowercase();
            arguments.extend(["--cgroups".to_string(), word]);
        }
        if let Some(image) = &self.partage {
            arguments.extend(["--partage".to_string(), image.display().to_string()]);
        }
        arguments
    }
}

/// Why a cluster for interactive use could not be started or stopped.
#[derive(Debug, thiserror::Error)]
pub enum TestClusterError {
    /// The bed did not start.
    #[error(transparent)]
    TestBed(#[from] BedError),
    /// A cluster of this name is running already.
    #[error(
        "a cluster is running already (pid {}, nodes {}): use it with export KUBECONFIG='{}', or stop it with `{}`",
        .0.pid, .0.nodes.join(", "), .0.kubeconfig.display(), .0.name.down_command()
    )]
    Running(ClusterState),
    /// A cluster of this name is starting or stopping.
    #[error("a cluster of this name is starting or stopping; try again in a moment")]
    Busy,
    /// Partage does not run in the cluster.
    #[error(
        "the cluster is up, but Partage offers no GPU shares on {nodes}; run kubectl --namespace partage-system describe \
         pods; last log lines of the agent:\n{message}"
    )]
    NotInstalled {
        /// Names of the affected nodes.
        nodes: String,
        /// Last lines of the agent's log.
        message: String,
    },
    /// The holder exited before the cluster was up, with this error.
    #[error("{0}")]
    HolderFailed(String),
    /// The holder exited without an error message.
    #[error("the cluster did not start, and its holder process exited without an error message; try again")]
    NotUp,
}

/// The line by which the holder reports that the cluster is up.
const UP_MARKER: &str = "up";

/// Starts the holder and prints its progress. Returns when the cluster can be used.
pub fn up(
    options: &ClusterOptions,
    out: &mut dyn Write,
    stop: &AtomicBool,
) -> Result<ClusterState, TestClusterError> {
    let cluster_dir = ClusterDir::find(&options.name)?;
    if let Some(state) = cluster_dir.running()? {
        return Err(TestClusterError::Running(state));
    }
    let doing = "starting the cluster's holder";
    let this = std::env::current_exe().map_err(BedError::io(doing))?;
    let log = cluster_dir.create_log()?;
    let mut holder = Command::new(this)
        .args(["cluster", "hold"])
        .args(options.arguments())
        // Not in this process group: this process handles Ctrl-C, and the holder must survive the end of the terminal.
        .process_group(0)
        .stdin(Stdio::null())
        .stdout(Stdio::piped())
        .stderr(log)
        .spawn()
        .map_err(BedError::io(doing))?;
    let start = Instant::now();
    match follow_progress(&mut holder, start, out, stop) {
        Ok(()) => {
            let state = cluster_dir.running()?.ok_or(TestClusterError::NotUp)?;
            if options.partage.is_some() {
                // If Partage does not start, the cluster stays up for inspection.
                install::install(&state, &mut |line| print_progress(out, start, line), stop)?;
            }
            Ok(state)
        }
        Err(error) => {
            terminate(&mut holder);
            match (error, cluster_dir.last_error()) {
                (TestClusterError::NotUp, Some(message)) => Err(TestClusterError::HolderFailed(message)),
                (error, _) => Err(error),
            }
        }
    }
}

/// Prints a line per step with the elapsed time, until the holder reports that the cluster is up.
fn follow_progress(
    holder: &mut Child,
    start: Instant,
    out: &mut dyn Write,
    stop: &AtomicBool,
) -> Result<(), TestClusterError> {
    let Some(pipe) = holder.stdout.take() else { return Err(TestClusterError::NotUp) };
    let (send, lines) = mpsc::channel();
    // The thread ends with the pipe.
    std::thread::spawn(move || {
        for line in BufReader::new(pipe).lines().map_while(Result::ok) {
            if send.send(line).is_err() {
                break;
            }
        }
    });
    loop {
        if stop.load(Ordering::Relaxed) {
            return Err(BedError::Interrupted.into());
        }
        match lines.recv_timeout(Duration::from_millis(50)) {
            Ok(line) if line == UP_MARKER => return Ok(()),
            Ok(line) => print_progress(out, start, &line),
            Err(RecvTimeoutError::Timeout) => {}
            Err(RecvTimeoutError::Disconnected) => return Err(TestClusterError::NotUp),
        }
    }
}

fn print_progress(out: &mut dyn Write, start: Instant, line: &str) {
    // A reader that has gone does not stop the cluster.
    let _ = writeln!(out, "{:>5.1} s  {line}", start.elapsed().as_secs_f64());
    let _ = out.flush();
}

/// Stops the holder. If it does not react it is killed, and its bed's cleanup process removes everything.
fn terminate(holder: &mut Child) {
    let start = Instant::now();
    // It may have exited already.
    let _ = kill_process(Pid::from_child(holder), Signal::TERM);
    while matches!(holder.try_wait(), Ok(None)) {
        if start.elapsed() > Duration::from_secs(20) {
            let _ = holder.kill();
        }
        std::thread::sleep(Duration::from_millis(10));
    }
}

/// Owns the bed until `stop` is set.
pub fn hold(
    options: &ClusterOptions,
    out: &mut dyn Write,
    stop: &AtomicBool,
) -> Result<(), TestClusterError> {
    let cluster_dir = ClusterDir::find(&options.name)?;
    let _held = cluster_dir.acquire()?;
    let mut print_line = |line: &str| {
        let _ = writeln!(out, "{line}");
        let _ = out.flush();
    };
    let bed = TestBed::start_with_progress(options.profile(), stop, &mut print_line)?;
    if options.partage.is_some() {
        install::install_nvidia_smi(&bed)?;
    }
    let api_relay = ApiServerRelay::start(&bed)?;
    let name = options.name.clone();
    let nodes = bed.nodes().iter().map(|node| node.name().to_string()).collect();
    cluster_dir.write_state(&bed.kubeconfig_at(&format!("https://{}", api_relay.address()))?, name, nodes)?;
    print_line(UP_MARKER);
    while !stop.load(Ordering::Relaxed) {
        if bed.is_gone() {
            cluster_dir.remove_state();
            let message = "another process ended its first process".to_string();
            return Err(BedError::Failed { doing: "holding the cluster".to_string(), message }.into());
        }
        // Restarts components as a service manager would.
        for component in bed.components().filter(|component| component.has_exited_unexpectedly()) {
            component.start()?;
        }
        std::thread::sleep(Duration::from_millis(50));
    }
    cluster_dir.remove_state();
    drop(api_relay);
    drop(bed);
    Ok(())
}

/// Returns the running cluster of this name, if any.
pub fn status(name: &ClusterName) -> Result<Option<ClusterState>, TestClusterError> {
    ClusterDir::find(name)?.running()
}

/// Stops the cluster and waits until nothing of it is left. Returns false if none is running.
pub fn down(name: &ClusterName) -> Result<bool, TestClusterError> {
    let cluster_dir = ClusterDir::find(name)?;
    let start = Instant::now();
    let mut signaled = false;
    while let Some(holder) = cluster_dir.holder()? {
        if let (Holder::Process(process), false) = (holder, signaled) {
            if let Some(Err(error)) =
                Pid::from_raw(process).map(|process| kill_process(process, Signal::TERM))
            {
                let message = format!(
                    "process {process}: {error}; stop it as the user who started it (sudo -E make cluster-down)"
                );
                return Err(BedError::Failed { doing: "stopping the cluster".to_string(), message }.into());
            }
            signaled = true;
        }
        if start.elapsed() > Duration::from_secs(60) {
            let message = format!(
                "its holder process ({holder:?}) does not exit; see {}",
                cluster_dir.log_path().display()
            );
            return Err(BedError::Failed { doing: "stopping the cluster".to_string(), message }.into());
        }
        std::thread::sleep(Duration::from_millis(20));
    }
    Ok(signaled)
}
