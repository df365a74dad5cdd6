//! `partage node`: runs the agent of one cluster node.

use super::CommandExit;
use crate::logging::{self, FilterError, LogFormat, LogOptions};
use crate::output::write_line;
use crate::terminal::wants_color;
use clap::Args;
use partage_agent::settings::AgentSettings;
use partage_agent::{AgentConfig, clean_up, run};
use partage_core::model::NodeName;
use partage_enforce::error_chain::describe;
use std::io::{self, Write};
use std::path::PathBuf;
use tokio::signal::unix::{SignalKind, signal};
use tokio_util::sync::CancellationToken;

/// Run the node agent of a Kubernetes cluster
///
/// Runs on every node with GPUs, usually as the DaemonSet of deploy/. Advertises GPUs as resources that pods request, and gives each
/// container exactly what its pod was granted; the container runtime is plain runc. When the agent exits, running containers continue
/// and keep their limits.
#[derive(Args)]
#[command(after_help = EXAMPLES)]
pub(crate) struct NodeCommand {
    /// Name of this node in the cluster
    #[arg(long, value_name = "NAME", env = "NODE_NAME", required_unless_present = "check")]
    node_name: Option<String>,

    /// Settings file [default: none, all settings have their defaults]
    #[arg(long, value_name = "FILE")]
    settings: Option<PathBuf>,

    /// Validate the settings file and exit
    #[arg(long)]
    check: bool,

    /// Remove the node's Partage resources, labels and files, and exit. Delete pods that use GPUs first: they lose their GPUs with
    /// their next restart
    #[arg(long, conflicts_with = "check")]
    cleanup: bool,

    /// Keep running after --cleanup until stopped: a DaemonSet would restart the pod
    #[arg(long, requires = "cleanup")]
    stay: bool,

    /// Kubeconfig for the API server [default: service account of the pod]
    #[arg(long, value_name = "FILE")]
    kubeconfig: Option<PathBuf>,

    /// Directory where the host's root file system is mounted
    #[arg(long, value_name = "DIR", default_value = "/")]
    host_root: PathBuf,

    /// Directory of kubelet
    #[arg(long, value_name = "DIR", default_value = "/var/lib/kubelet")]
    kubelet_dir: PathBuf,

    /// Directory of CDI specs that the container runtime reads
    #[arg(long, value_name = "DIR", default_value = "/run/cdi")]
    cdi_dir: PathBuf,

    /// Directory for persistent state; must be the same path on the host
    #[arg(long, value_name = "DIR", default_value = "/var/lib/partage")]
    state_dir: PathBuf,

    /// Directory for runtime state, lost on reboot; must be the same path on the host
    #[arg(long, value_name = "DIR", default_value = "/run/partage")]
    run_dir: PathBuf,

    /// Socket of the container runtime [default: the standard path of containerd or CRI-O]
    #[arg(long, value_name = "SOCKET")]
    runtime_socket: Option<PathBuf>,

    /// Log as JSON lines
    #[arg(long)]
    json: bool,

    /// Enable debug logging; PARTAGE_LOG filters by level and crate
    #[arg(long, short)]
    verbose: bool,
}

const EXAMPLES: &str = "\
Examples:
  partage node --check --settings node.yaml                     validate settings
  partage node --node-name gpu-1 --settings node.yaml           as a service of the host
  partage node --node-name $NODE_NAME --host-root /host         as a pod, see deploy/

Settings are described in docs/install.md; with Helm they are below `settings` in the values.

Exit code: 0 success, 1 the agent cannot run, 2 wrong arguments or invalid settings (with --check)";

/// Worker threads of the async runtime; the agent is idle most of the time.
const WORKER_THREADS: usize = 2;

impl NodeCommand {
    pub(crate) fn run(&self, out: &mut dyn Write, err: &mut dyn Write) -> io::Result<CommandExit> {
        if self.check {
            return self.check(out, err);
        }
        let Some(name) = self.node_name.as_ref().filter(|name| !name.is_empty()) else {
            write_line(
                err,
                format_args!("error: the node name is empty: set it with --node-name or NODE_NAME"),
            )?;
            return Ok(CommandExit::InputError);
        };
        if let Err(error) = self.log() {
            write_line(err, format_args!("error: {}", describe(&error)))?;
            return Ok(CommandExit::InputError);
        }
        partage_host::process_setup::limit_heap();
        let config = self.config(name);
        let runtime = tokio::runtime::Builder::new_multi_thread()
            .worker_threads(WORKER_THREADS)
            .enable_all()
            .build()?;
        let stop = CancellationToken::new();
        let result = runtime.block_on(async {
            let stop_on_signal = stop.clone();
            let mut interrupt = signal(SignalKind::interrupt())?;
            let mut terminate = signal(SignalKind::terminate())?;
            tokio::spawn(async move {
                tokio::select! { _ = interrupt.recv() => {}, _ = terminate.recv() => {} }
                stop_on_signal.cancel();
            });
            // Spawned on the worker threads: both may block in system calls for a long time.
            let work = if self.cleanup {
                let stay = self.stay;
                tokio::spawn(async move {
                    clean_up(config).await?;
                    if stay {
                        stop.cancelled().await;
                    }
                    Ok(())
                })
            } else {
                tokio::spawn(run(config, stop))
            };
            io::Result::Ok(work.await)
        })?;
        // Does not wait for tasks that are blocked in a hung driver.
        runtime.shutdown_background();
        let message = match result {
            Ok(Ok(())) => return Ok(CommandExit::Success),
            Ok(Err(error)) => describe(&error),
            Err(error) => error.to_string(),
        };
        write_line(err, format_args!("error: {message}"))?;
        Ok(CommandExit::ProblemsFound)
    }

    fn log(&self) -> Result<(), FilterError> {
        let format = if self.json { LogFormat::Json } else { logging::format_from_env() };
        let options = LogOptions { format, verbose: self.verbose, colors: wants_color(&io::stderr()) };
        logging::init(options, io::stderr)
    }

    fn config(&self, name: &str) -> AgentConfig {
        AgentConfig {
            node: NodeName::from(name),
            settings: self.settings.clone(),
            kubeconfig: self.kubeconfig.clone(),
            host_root: self.host_root.clone(),
            kubelet: self.kubelet_dir.clone(),
            cdi: self.cdi_dir.clone(),
            state: self.state_dir.clone(),
            run: self.run_dir.clone(),
            runtime_socket: self.runtime_socket.clone(),
        }
    }

    fn check(&self, out: &mut dyn Write, err: &mut dyn Write) -> io::Result<CommandExit> {
        let Some(file) = &self.settings else {
            write_line(err, format_args!("error: no settings file to check: specify it with --settings"))?;
            return Ok(CommandExit::InputError);
        };
        let node = NodeName::from(self.node_name.as_deref().unwrap_or("any node"));
        match AgentSettings::read(file, &node) {
            Ok(settings) => {
                let dialects: Vec<&str> = settings.dialects.iter().map(|dialect| dialect.name()).collect();
                write_line(
                    out,
                    format_args!(
                        "{}: valid; {node} accepts the dialects {}",
                        file.display(),
                        dialects.join(", ")
                    ),
                )?;
                Ok(CommandExit::Success)
            }
            Err(error) => {
                write_line(err, format_args!("error: {}", describe(&error)))?;
                Ok(CommandExit::InputError)
            }
        }
    }
}
