//! `partage node`: the agent of one node of a cluster.

use super::Outcome;
use crate::logging::{self, FilterError, LogFormat, LogOptions};
use crate::output::line;
use clap::Args;
use partage_agent::settings::{Settings, SettingsError};
use partage_agent::{Config, run, withdraw};
use partage_core::model::NodeName;
use partage_enforce::error_chain::describe;
use std::io::{self, IsTerminal, Write};
use std::path::PathBuf;
use tokio::signal::unix::{SignalKind, signal};
use tokio_util::sync::CancellationToken;

/// Share this node's GPUs between the pods of a cluster
///
/// Runs on every node with GPUs, as the DaemonSet of deploy/ does. GPUs become resources that pods ask for; a container gets
/// exactly what its pod was granted, by plain runc. Containers that run go on when this ends, and keep their limits.
#[derive(Args)]
#[command(after_help = EXAMPLES)]
pub(crate) struct Node {
    /// This node's name in the cluster
    #[arg(long, value_name = "NAME", env = "NODE_NAME", required_unless_present = "check")]
    node_name: Option<String>,

    /// The settings [default: none, everything as by default]
    #[arg(long, value_name = "FILE")]
    settings: Option<PathBuf>,

    /// Read the settings, say whether they are right, and do nothing
    #[arg(long)]
    check: bool,

    /// Take back what this node says by Partage, remove everything that Partage keeps on it, and end. Pods that use GPUs lose them
    /// with their next restart: delete them first
    #[arg(long, conflicts_with = "check")]
    withdraw: bool,

    /// Stay after the withdrawal, until told to end: as the pod of a DaemonSet, which would be started again
    #[arg(long, requires = "withdraw")]
    stay: bool,

    /// How the API server is reached [default: as a pod of the cluster]
    #[arg(long, value_name = "FILE")]
    kubeconfig: Option<PathBuf>,

    /// Where the host's files are seen
    #[arg(long, value_name = "FOLDER", default_value = "/")]
    host_root: PathBuf,

    /// Kubelet's folder
    #[arg(long, value_name = "FOLDER", default_value = "/var/lib/kubelet")]
    kubelet: PathBuf,

    /// Where the container runtime looks for CDI files
    #[arg(long, value_name = "FOLDER", default_value = "/run/cdi")]
    cdi: PathBuf,

    /// What outlives a restart of the node; the same path on the host
    #[arg(long, value_name = "FOLDER", default_value = "/var/lib/partage")]
    state: PathBuf,

    /// What does not; the same path on the host
    #[arg(long, value_name = "FOLDER", default_value = "/run/partage")]
    run: PathBuf,

    /// The container runtime's socket [default: where containerd or CRI-O listen]
    #[arg(long, value_name = "SOCKET")]
    runtime_socket: Option<PathBuf>,

    /// Log as JSON lines
    #[arg(long)]
    json: bool,

    /// Enable debug logging [env: PARTAGE_LOG is a filter by level and crate]
    #[arg(long, short)]
    verbose: bool,
}

const EXAMPLES: &str = "\
Examples:
  partage node --check --settings node.yaml                     are these settings right?
  partage node --node-name gpu-1 --settings node.yaml           as a service of the machine itself
  partage node --node-name $NODE_NAME --host-root /host         as a pod: see deploy/

The settings' keys are those of docs/install.md (with Helm: what is below `settings` in the values).

Exit code: 0 ended as asked, 1 it cannot run here, 2 wrong command line or, with --check, settings";

/// Most of what it does is to wait.
const THREADS: usize = 2;

impl Node {
    pub(crate) fn run(&self, out: &mut dyn Write, err: &mut dyn Write) -> io::Result<Outcome> {
        if self.check {
            return self.check(out, err);
        }
        let Some(name) = self.node_name.as_ref().filter(|name| !name.is_empty()) else {
            line(
                err,
                format_args!(
                    "error: the node's name is empty: write it after --node-name, or into NODE_NAME"
                ),
            )?;
            return Ok(Outcome::Unreadable);
        };
        if let Err(error) = self.log() {
            line(err, format_args!("error: {}", describe(&error)))?;
            return Ok(Outcome::Unreadable);
        }
        partage_host::process_setup::limit_heap();
        let config = self.config(name);
        let runtime =
            tokio::runtime::Builder::new_multi_thread().worker_threads(THREADS).enable_all().build()?;
        let stop = CancellationToken::new();
        let done = runtime.block_on(async {
            let told = stop.clone();
            let (mut interrupted, mut ended) =
                (signal(SignalKind::interrupt())?, signal(SignalKind::terminate())?);
            tokio::spawn(async move {
                tokio::select! { _ = interrupted.recv() => {}, _ = ended.recv() => {} }
                told.cancel();
            });
            // Both may call the kernel for long: on the runtime's own threads.
            let work = match self.withdraw {
                true => {
                    let stay = self.stay;
                    tokio::spawn(async move {
                        withdraw(config).await?;
                        if stay {
                            stop.cancelled().await;
                        }
                        Ok(())
                    })
                }
                false => tokio::spawn(run(config, stop)),
            };
            io::Result::Ok(work.await)
        })?;
        // Who still waits for a driver that does not answer is not waited for.
        runtime.shutdown_background();
        let why = match done {
            Ok(Ok(())) => return Ok(Outcome::Fine),
            Ok(Err(error)) => error.to_string(),
            Err(error) => error.to_string(),
        };
        line(err, format_args!("error: {why}"))?;
        Ok(Outcome::Problems)
    }

    fn log(&self) -> Result<(), FilterError> {
        let format = if self.json { LogFormat::Json } else { logging::format_from_env() };
        let options = LogOptions { format, verbose: self.verbose, colors: io::stderr().is_terminal() };
        logging::init(options, io::stderr)
    }

    fn config(&self, name: &str) -> Config {
        Config {
            node: NodeName::from(name),
            settings: self.settings.clone(),
            kubeconfig: self.kubeconfig.clone(),
            host_root: self.host_root.clone(),
            kubelet: self.kubelet.clone(),
            cdi: self.cdi.clone(),
            state: self.state.clone(),
            run: self.run.clone(),
            runtime_socket: self.runtime_socket.clone(),
        }
    }

    fn check(&self, out: &mut dyn Write, err: &mut dyn Write) -> io::Result<Outcome> {
        let Some(file) = &self.settings else {
            line(err, format_args!("error: no settings to check: name them with --settings"))?;
            return Ok(Outcome::Unreadable);
        };
        let node = NodeName::from(self.node_name.as_deref().unwrap_or("any node"));
        match Settings::read(file, &node) {
            Ok(settings) => {
                let dialects: Vec<&str> = settings.dialects.iter().map(|dialect| dialect.name()).collect();
                line(out, format_args!("{}: right; {node} speaks {}", file.display(), dialects.join(", ")))?;
                Ok(Outcome::Fine)
            }
            Err(error) => {
                match error {
                    // It names the file itself.
                    SettingsError::Io { .. } => line(err, format_args!("error: {error}"))?,
                    error => line(err, format_args!("error: {}: {error}", file.display()))?,
                }
                Ok(Outcome::Unreadable)
            }
        }
    }
}
