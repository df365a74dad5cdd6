//! `partage-testkit`: clusters for interactive use, and the GPU workload of tests.

use clap::{Parser, Subcommand};
use partage_testkit::bed::BedError;
use partage_testkit::binaries::{Binaries, MissingPrerequisite};
use partage_testkit::cluster::{self, ClusterName, ClusterOptions, TestClusterError};
use partage_testkit::workload::{self, WorkloadError, WorkloadOptions};
use std::io::{self, Write};
use std::process::ExitCode;
use std::sync::Arc;
use std::sync::atomic::AtomicBool;
use std::time::Instant;

/// Run a real Kubernetes for Partage's tests.
#[derive(Parser)]
#[command(name = "partage-testkit", version)]
struct Cli {
    #[command(subcommand)]
    command: Command,
}

#[derive(Subcommand)]
enum Command {
    /// Manage a real Kubernetes without a GPU, for interactive use.
    #[command(subcommand)]
    Cluster(ClusterCommand),
    /// Use a GPU until standard input ends: hold memory and run kernels. For tests.
    #[command(hide = true)]
    Workload(WorkloadOptions),
}

#[derive(Subcommand)]
enum ClusterCommand {
    /// Start a cluster and print how to use it
    #[command(
        after_help = "Examples:\n  partage-testkit cluster up\n  partage-testkit cluster up --nodes 3 --cgroups v2"
    )]
    Up(ClusterOptions),
    /// Stop a cluster and remove everything of it
    Down(ClusterName),
    /// Show whether a cluster is running
    Status(ClusterName),
    /// Own a cluster until a signal arrives; started by `up`
    #[command(hide = true)]
    Hold(ClusterOptions),
}

fn main() -> ExitCode {
    let command = Cli::parse().command;
    let stop = Arc::new(AtomicBool::new(false));
    for signal in [signal_hook::consts::SIGINT, signal_hook::consts::SIGTERM, signal_hook::consts::SIGHUP] {
        // Without the handler a signal ends the program, and the next run cleans up.
        let _ = signal_hook::flag::register(signal, Arc::clone(&stop));
    }
    let mut out = io::stdout();
    let done = match command {
        Command::Cluster(command) => cluster(&command, &mut out, &stop),
        Command::Workload(load) => workload::run(&load, &mut out, &stop).map_err(CommandFailure::from),
    };
    match done {
        Ok(()) => ExitCode::SUCCESS,
        Err(failure) => {
            // If this cannot be written, only the exit code reports the failure.
            let _ = writeln!(io::stderr(), "error: {}", failure.text);
            failure.code
        }
    }
}

/// An error message and its exit code.
struct CommandFailure {
    text: String,
    code: ExitCode,
}

impl CommandFailure {
    fn new(text: String, interrupted: bool) -> Self {
        Self { text, code: if interrupted { ExitCode::from(130) } else { ExitCode::FAILURE } }
    }
}

impl From<MissingPrerequisite> for CommandFailure {
    fn from(missing: MissingPrerequisite) -> Self {
        Self::new(missing.to_string(), matches!(missing, MissingPrerequisite::Interrupted { .. }))
    }
}

impl From<TestClusterError> for CommandFailure {
    fn from(error: TestClusterError) -> Self {
        Self::new(error.to_string(), matches!(error, TestClusterError::TestBed(BedError::Interrupted)))
    }
}

impl From<WorkloadError> for CommandFailure {
    fn from(error: WorkloadError) -> Self {
        Self::new(error.to_string(), false)
    }
}

/// Printed if Partage is installed in the cluster.
const INSTALLED_HINT: &str = "
Partage is installed with simulated GPUs. Run a pod with 4 GiB and 30 % of a GPU:

  kubectl apply -f examples/pod.yaml && kubectl wait --for=condition=Ready pod/share
  kubectl exec share -- nvidia-smi
  kubectl describe node node1
";

fn cluster(command: &ClusterCommand, out: &mut dyn Write, stop: &AtomicBool) -> Result<(), CommandFailure> {
    let text = match command {
        ClusterCommand::Hold(options) => {
            cluster::hold(options, out, stop)?;
            String::new()
        }
        ClusterCommand::Up(options) => {
            let start = Instant::now();
            let state = cluster::up(options, out, stop)?;
            let kubectl = Binaries::ready()?.path("kubectl");
            format!(
                "\nKubernetes is up after {:.1} s, with {}. Use it with any kubectl:\n\n  export KUBECONFIG='{}'\n  \
                 '{}' get nodes\n{}\nIts images are localhost/debian:bed and localhost/busybox:bed (imagePullPolicy: Never).\n\
                 Stop it with: {}\n",
                start.elapsed().as_secs_f64(),
                state.nodes.join(", "),
                state.kubeconfig.display(),
                kubectl.display(),
                if options.partage.is_some() { INSTALLED_HINT } else { "" },
                state.name.down_command(),
            )
        }
        ClusterCommand::Down(name) => {
            if cluster::down(name)? {
                "the cluster was removed\n".to_string()
            } else {
                "no cluster is running\n".to_string()
            }
        }
        ClusterCommand::Status(name) => match cluster::status(name)? {
            Some(state) => format!(
                "a cluster is up (pid {}), with {}: export KUBECONFIG='{}'\n",
                state.pid,
                state.nodes.join(", "),
                state.kubeconfig.display()
            ),
            None => "no cluster is running\n".to_string(),
        },
    };
    // A reader that has gone needs no output.
    let _ = out.write_all(text.as_bytes());
    Ok(())
}
