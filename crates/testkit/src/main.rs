//! `partage-testkit`: clusters to try things on, and the workload of tests.

use clap::{Parser, Subcommand};
use partage_testkit::bed::BedError;
use partage_testkit::binaries::{Binaries, Missing};
use partage_testkit::cluster::{self, ClusterError, Name, Wishes};
use partage_testkit::workload::{self, Load, WorkloadError};
use std::io::{self, Write};
use std::process::ExitCode;
use std::sync::Arc;
use std::sync::atomic::AtomicBool;
use std::time::Instant;

/// A real Kubernetes for Partage's tests.
#[derive(Parser)]
#[command(name = "partage-testkit", version)]
struct Cli {
    #[command(subcommand)]
    command: Command,
}

#[derive(Subcommand)]
enum Command {
    /// A real Kubernetes to try things on, without a GPU.
    #[command(subcommand)]
    Cluster(Cluster),
    /// Use a GPU until standard input ends: hold memory, keep it busy. For tests.
    #[command(hide = true)]
    Workload(Load),
}

#[derive(Subcommand)]
enum Cluster {
    /// Bring it up, and say how to use it
    #[command(
        after_help = "Examples:\n  partage-testkit cluster up\n  partage-testkit cluster up --nodes 3 --cgroups v2"
    )]
    Up(Wishes),
    /// End it; nothing of it stays
    Down(Name),
    /// Say whether it is up
    Status(Name),
    /// Own the cluster until told to stop; `up` starts this
    #[command(hide = true)]
    Hold(Wishes),
}

fn main() -> ExitCode {
    let command = Cli::parse().command;
    let stop = Arc::new(AtomicBool::new(false));
    for signal in [signal_hook::consts::SIGINT, signal_hook::consts::SIGTERM, signal_hook::consts::SIGHUP] {
        // Without the handler a signal simply ends the program, and the next run tidies up.
        let _ = signal_hook::flag::register(signal, Arc::clone(&stop));
    }
    let mut out = io::stdout();
    let done = match command {
        Command::Cluster(command) => cluster(&command, &mut out, &stop),
        Command::Workload(load) => workload::run(&load, &mut out, &stop).map_err(Failure::from),
    };
    match done {
        Ok(()) => ExitCode::SUCCESS,
        Err(failure) => {
            // Where even this cannot be written, the exit code is all that is left to say.
            let _ = writeln!(io::stderr(), "error: {}", failure.words);
            failure.code
        }
    }
}

/// Why not, and the exit code that says so.
struct Failure {
    words: String,
    code: ExitCode,
}

impl Failure {
    fn new(words: String, interrupted: bool) -> Self {
        Self { words, code: if interrupted { ExitCode::from(130) } else { ExitCode::FAILURE } }
    }
}

impl From<Missing> for Failure {
    fn from(missing: Missing) -> Self {
        Self::new(missing.to_string(), matches!(missing, Missing::Interrupted { .. }))
    }
}

impl From<ClusterError> for Failure {
    fn from(error: ClusterError) -> Self {
        Self::new(error.to_string(), matches!(error, ClusterError::Bed(BedError::Interrupted)))
    }
}

impl From<WorkloadError> for Failure {
    fn from(error: WorkloadError) -> Self {
        Self::new(error.to_string(), false)
    }
}

/// With Partage in the cluster.
const TRY: &str = "
Partage is in it, with simulated GPUs. A pod in 4 GiB and 30 % of one:

  kubectl apply -f examples/pod.yaml && kubectl wait --for=condition=Ready pod/share
  kubectl exec share -- nvidia-smi
  kubectl describe node node1
";

fn cluster(command: &Cluster, out: &mut dyn Write, stop: &AtomicBool) -> Result<(), Failure> {
    let words = match command {
        Cluster::Hold(wishes) => {
            cluster::hold(wishes, out, stop)?;
            String::new()
        }
        Cluster::Up(wishes) => {
            let start = Instant::now();
            let state = cluster::up(wishes, out, stop)?;
            let kubectl = Binaries::ready()?.path("kubectl");
            format!(
                "\nA Kubernetes is up after {:.1} s, with {}. Use it, with any kubectl:\n\n  export KUBECONFIG='{}'\n  \
                 '{}' get nodes\n{}\nIts images are localhost/debian:bed and localhost/busybox:bed (imagePullPolicy: Never).\n\
                 End it with: {}\n",
                start.elapsed().as_secs_f64(),
                state.nodes.join(", "),
                state.kubeconfig.display(),
                kubectl.display(),
                if wishes.partage.is_some() { TRY } else { "" },
                state.name.ending(),
            )
        }
        Cluster::Down(name) => match cluster::down(name)? {
            true => "the cluster is gone\n".to_string(),
            false => "no cluster is running\n".to_string(),
        },
        Cluster::Status(name) => match cluster::status(name)? {
            Some(state) => format!(
                "a cluster is up (pid {}), with {}: export KUBECONFIG='{}'\n",
                state.pid,
                state.nodes.join(", "),
                state.kubeconfig.display()
            ),
            None => "no cluster is running\n".to_string(),
        },
    };
    // A reader who went away has what it wanted.
    let _ = out.write_all(words.as_bytes());
    Ok(())
}
