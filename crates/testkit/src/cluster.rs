//! One bed for a person: `make cluster` brings it up and returns, `make cluster-down` ends it.
//!
//! A holder owns the bed in the background. It holds a lock for as long as it lives, so that a second cluster is
//! refused, and whoever looks for it never mistakes another process for it.

mod install;
mod relay;
mod state;

pub use install::bring_nvidia_smi;
pub use state::State;

use crate::bed::{Bed, BedError, Cgroups, NodeProfile, Profile};
use relay::Relay;
use rustix::process::{Pid, Signal, kill_process};
use state::{Holder, Home};
use std::io::{BufRead, BufReader, Write};
use std::os::unix::process::CommandExt;
use std::path::PathBuf;
use std::process::{Child, Command, Stdio};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc::{self, RecvTimeoutError};
use std::time::{Duration, Instant};

/// What a person can ask for.
#[derive(Clone, Debug, clap::Args)]
pub struct Wishes {
    /// How many nodes, called node1 and on
    #[arg(long, default_value_t = 1, value_parser = clap::value_parser!(u8).range(1..=20))]
    pub nodes: u8,
    /// Which cgroups the nodes see; absent = as the machine
    #[arg(long, value_enum)]
    pub cgroups: Option<CgroupsWish>,
    /// Partage's own image, an OCI archive: it is installed, with simulated GPUs on every node
    #[arg(long, value_name = "FILE")]
    pub partage: Option<PathBuf>,
    /// Which one.
    #[command(flatten)]
    pub name: Name,
}

/// A person's clusters have names.
#[derive(Clone, Debug, clap::Args, serde::Serialize, serde::Deserialize)]
pub struct Name {
    /// Which cluster; there can be one of each name
    #[arg(long, default_value = BED, value_parser = name)]
    pub name: String,
}

impl Name {
    /// The command that ends the cluster of this name.
    pub fn ending(&self) -> String {
        match self.name.as_str() {
            BED => "make cluster-down".to_string(),
            other => format!("cargo run -p partage-testkit -- cluster down --name {other}"),
        }
    }
}

/// The name of `make cluster`.
const BED: &str = "bed";

/// It becomes a folder.
fn name(text: &str) -> Result<String, String> {
    let good = |one: char| one.is_ascii_alphanumeric() || one == '-';
    match !text.is_empty() && text.len() <= 40 && text.chars().all(good) {
        true => Ok(text.to_string()),
        false => Err("take 1 to 40 letters, digits and -".to_string()),
    }
}

/// [`Cgroups`] on the command line.
#[derive(Clone, Copy, Debug, clap::ValueEnum)]
pub enum CgroupsWish {
    /// A hierarchy per controller
    V1,
    /// One hierarchy
    V2,
}

impl Wishes {
    fn profile(&self) -> Profile {
        let empty = Profile::control_plane().debian();
        let empty = self.partage.iter().fold(empty, Profile::image);
        (1..=self.nodes).fold(empty, |profile, number| {
            let node = NodeProfile::new(format!("node{number}"));
            profile.node(match self.cgroups {
                Some(CgroupsWish::V1) => node.cgroups(Cgroups::V1),
                Some(CgroupsWish::V2) => node.cgroups(Cgroups::V2),
                None => node,
            })
        })
    }

    /// The same wishes for the holder.
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

/// What stands in the way.
#[derive(Debug, thiserror::Error)]
pub enum ClusterError {
    /// The bed did not come up.
    #[error(transparent)]
    Bed(#[from] BedError),
    /// One is there already.
    #[error(
        "a cluster is running already (pid {}, nodes {}): use it with export KUBECONFIG='{}', or end it with `{}`",
        .0.pid, .0.nodes.join(", "), .0.kubeconfig.display(), .0.name.ending()
    )]
    Running(State),
    /// One is coming up, or going down, right now.
    #[error("a cluster of this name is just being started or ended; wait a moment and repeat")]
    Busy,
    /// Partage does not run in it.
    #[error(
        "the cluster is up, but Partage has no shares of GPUs on {nodes}; look with kubectl --namespace partage-system describe \
         pods; its agent says:\n{said}"
    )]
    NotInstalled {
        /// Where.
        nodes: String,
        /// The agent's last words.
        said: String,
    },
    /// The holder ended before the cluster was up; it said why.
    #[error("{0}")]
    Said(String),
    /// It did not even say why.
    #[error("the cluster did not come up, and its holder did not say why; repeat")]
    NotUp,
}

/// How the holder says that it is done.
const UP: &str = "up";

/// Starts the holder and shows how far it is. Returns when the cluster can be used.
pub fn up(wishes: &Wishes, out: &mut dyn Write, stop: &AtomicBool) -> Result<State, ClusterError> {
    let home = Home::find(&wishes.name)?;
    if let Some(state) = home.running()? {
        return Err(ClusterError::Running(state));
    }
    let doing = "starting the cluster's holder";
    let this = std::env::current_exe().map_err(BedError::io(doing))?;
    let log = home.log()?;
    let mut holder = Command::new(this)
        .args(["cluster", "hold"])
        .args(wishes.arguments())
        // Not in our group: Ctrl-C comes through us, and the end of the terminal is none of its business.
        .process_group(0)
        .stdin(Stdio::null())
        .stdout(Stdio::piped())
        .stderr(log)
        .spawn()
        .map_err(BedError::io(doing))?;
    let start = Instant::now();
    match follow(&mut holder, start, out, stop) {
        Ok(()) => {
            let state = home.running()?.ok_or(ClusterError::NotUp)?;
            if wishes.partage.is_some() {
                // What does not come up is left for its owner to look at.
                install::install(&state, &mut |line| tell(out, start, line), stop)?;
            }
            Ok(state)
        }
        Err(error) => {
            end(&mut holder);
            match (error, home.last_words()) {
                (ClusterError::NotUp, Some(said)) => Err(ClusterError::Said(said)),
                (error, _) => Err(error),
            }
        }
    }
}

/// A line per step, with the time it took, until the holder says that it is up.
fn follow(
    holder: &mut Child,
    start: Instant,
    out: &mut dyn Write,
    stop: &AtomicBool,
) -> Result<(), ClusterError> {
    let Some(pipe) = holder.stdout.take() else { return Err(ClusterError::NotUp) };
    let (send, lines) = mpsc::channel();
    // Ends with the pipe.
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
            Ok(line) if line == UP => return Ok(()),
            Ok(line) => tell(out, start, &line),
            Err(RecvTimeoutError::Timeout) => {}
            Err(RecvTimeoutError::Disconnected) => return Err(ClusterError::NotUp),
        }
    }
}

fn tell(out: &mut dyn Write, start: Instant, line: &str) {
    // A reader who went away does not stop the cluster.
    let _ = writeln!(out, "{:>5.1} s  {line}", start.elapsed().as_secs_f64());
    let _ = out.flush();
}

/// Ends the holder; one that does not hear is killed, and its keeper tidies up.
fn end(holder: &mut Child) {
    let start = Instant::now();
    // It may have ended by itself.
    let _ = kill_process(Pid::from_child(holder), Signal::TERM);
    while matches!(holder.try_wait(), Ok(None)) {
        if start.elapsed() > Duration::from_secs(20) {
            let _ = holder.kill();
        }
        std::thread::sleep(Duration::from_millis(10));
    }
}

/// Owns the bed until it is told to stop.
pub fn hold(wishes: &Wishes, out: &mut dyn Write, stop: &AtomicBool) -> Result<(), ClusterError> {
    let home = Home::find(&wishes.name)?;
    let _held = home.take()?;
    let mut tell = |line: &str| {
        let _ = writeln!(out, "{line}");
        let _ = out.flush();
    };
    let bed = Bed::start_telling(wishes.profile(), stop, &mut tell)?;
    if wishes.partage.is_some() {
        install::bring_nvidia_smi(&bed)?;
    }
    let relay = Relay::start(&bed)?;
    let name = wishes.name.clone();
    let nodes = bed.nodes().iter().map(|node| node.name().to_string()).collect();
    home.write(&bed.kubeconfig_at(&format!("https://{}", relay.address()))?, name, nodes)?;
    tell(UP);
    while !stop.load(Ordering::Relaxed) {
        if bed.is_gone() {
            home.forget();
            let said = "somebody else ended its first process".to_string();
            return Err(BedError::Failed { doing: "holding the cluster".to_string(), said }.into());
        }
        // What a machine's own service manager would do.
        for component in bed.components().filter(|component| component.ended_by_itself()) {
            component.start()?;
        }
        std::thread::sleep(Duration::from_millis(50));
    }
    home.forget();
    drop(relay);
    drop(bed);
    Ok(())
}

/// The cluster that is up, if one is.
pub fn status(name: &Name) -> Result<Option<State>, ClusterError> {
    Home::find(name)?.running()
}

/// Ends the cluster and waits until nothing of it is left. False where none is running.
pub fn down(name: &Name) -> Result<bool, ClusterError> {
    let home = Home::find(name)?;
    let start = Instant::now();
    let mut told = false;
    while let Some(holder) = home.holder()? {
        if let (Holder::Process(process), false) = (holder, told) {
            if let Some(Err(error)) =
                Pid::from_raw(process).map(|process| kill_process(process, Signal::TERM))
            {
                let said = format!(
                    "process {process}: {error}; end it as who started it (sudo -E make cluster-down)"
                );
                return Err(BedError::Failed { doing: "ending the cluster".to_string(), said }.into());
            }
            told = true;
        }
        if start.elapsed() > Duration::from_secs(60) {
            let said = format!("its holder ({holder:?}) does not end; look at {}", home.log_path().display());
            return Err(BedError::Failed { doing: "ending the cluster".to_string(), said }.into());
        }
        std::thread::sleep(Duration::from_millis(20));
    }
    Ok(told)
}
