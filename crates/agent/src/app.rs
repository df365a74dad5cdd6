//! The composition root: connects the agent to its node, and runs it until it is stopped.
//!
//! ```text
//!  AgentConfig ── AgentApp::build ──▶ AgentApp ── run ──▶ GPUs discovered ──▶ AgentSession ──▶ GPUs changed, or stopped
//!                                                                ▲                                  │
//!                                                                └──────────────────────────────────┘
//! ```
//!
//! An [`AgentApp`] has what outlives a change of the node's GPUs: settings, connections, the instance lock. An [`AgentSession`]
//! counts everything by one set of GPUs, and ends when that set changes.

mod gpu_changes;
mod session;
mod shutdown;
mod tasks;

pub use tasks::TaskError;

use crate::api_server::ApiServer;
use crate::config::{AgentConfig, AgentError, SettingsCheckError};
use crate::device_owner::{ContainerRuntime, RuntimeInfo};
use crate::readiness::Readiness;
use crate::retry::{RetryLog, retry_until_stopped};
use crate::settings::{AgentSettings, SettingsWatcher};
use crate::store::AgentStore;
use crate::{container_runtime, device_plugin_set, gpu_discovery, metrics, resources};
use gpu_changes::ChangeBackoff;
use partage_cluster::{PodCache, Severity};
use partage_enforce::error_chain::describe;
use partage_enforce::gpus::{DiscoveredGpus, Inventory};
use partage_enforce::instance_lock::InstanceLock;
use partage_host::host_root::HostRoot;
use partage_host::process::boot_id;
use session::{AgentSession, SessionEnd};
use shutdown::{SHUTDOWN_TIMEOUT, ShutdownDeadline};
use std::path::Path;
use std::sync::Arc;
use std::time::{Duration, Instant};
use tasks::TaskSet;
use tokio_util::sync::CancellationToken;

/// File name of the agent's lock in its runtime directory.
const LOCK_FILE: &str = "agent.lock";

/// Runs an agent until it is stopped. Containers continue to run.
///
/// After `stop` is cancelled, everything that still runs has one deadline: `SHUTDOWN_TIMEOUT`.
pub async fn run(config: AgentConfig, stop: CancellationToken) -> Result<(), AgentError> {
    partage_region::failpoint::arm_from_environment();
    let deadline = ShutdownDeadline::new(stop.clone(), SHUTDOWN_TIMEOUT);
    let app = run_app(config, stop, deadline.clone());
    match deadline.join(tokio::spawn(app)).await {
        Some(Ok(ended)) => ended,
        Some(Err(error)) => Err(TaskError::Failed(error).into()),
        None => {
            tracing::warn!(timeout_seconds = SHUTDOWN_TIMEOUT.as_secs(), "shutdown deadline passed, exiting");
            Ok(())
        }
    }
}

async fn run_app(
    config: AgentConfig,
    stop: CancellationToken,
    deadline: ShutdownDeadline,
) -> Result<(), AgentError> {
    match AgentApp::build(config, stop, deadline).await? {
        Some(app) => app.run().await,
        None => Ok(()),
    }
}

/// An agent that is connected to its node.
struct AgentApp {
    config: AgentConfig,
    store: AgentStore,
    settings_watcher: SettingsWatcher,
    /// The settings in force.
    settings: AgentSettings,
    cluster: ApiServer,
    pods: PodCache,
    runtime: ContainerRuntime,
    runtime_info: RuntimeInfo,
    /// Identifies this boot of the node.
    boot: String,
    readiness: Arc<Readiness>,
    /// Tasks that run for as long as the agent does.
    tasks: TaskSet,
    stop: CancellationToken,
    /// By when everything has to end once `stop` is cancelled.
    deadline: ShutdownDeadline,
    /// Held for as long as the agent runs.
    _lock: InstanceLock,
}

impl AgentApp {
    /// Connects to the API server and the container runtime, and waits until no other agent runs on the node. Returns `None`
    /// if the agent is stopped meanwhile.
    async fn build(
        config: AgentConfig,
        stop: CancellationToken,
        deadline: ShutdownDeadline,
    ) -> Result<Option<AgentApp>, AgentError> {
        let config = config.resolved();
        let store = AgentStore::open(&config.state, &config.run).map_err(AgentError::io(&config.state))?;
        let mut settings_watcher = SettingsWatcher::new(config.settings.clone(), &config.node, &store);
        let read = settings_watcher.read();
        let cluster = match ApiServer::connect(config.kubeconfig.as_deref(), &config.node).await {
            Ok(cluster) => cluster,
            Err(error) => {
                // Wrong settings are the more useful of two errors.
                read.map_err(AgentError::Settings)?;
                return Err(error.into());
            }
        };
        let settings = match read {
            Ok(settings) => settings,
            Err(error) => {
                let restored =
                    restore_settings(&cluster, &settings_watcher, &describe(&error), deadline.at()).await;
                restored.ok_or(AgentError::Settings(error))?
            }
        };
        let readiness = Arc::new(Readiness::default());
        let mut tasks = TaskSet::default();
        // Started first, so that probes are answered while the driver is waited for.
        let server = metrics::run_server(
            Arc::clone(&readiness),
            cluster.clone(),
            settings.metrics.clone(),
            stop.clone(),
        );
        tasks.spawn(server);
        let pods = cluster.watch_pods();
        let runtime = container_runtime::find(&config)?;
        let runtime_info = retry_until_stopped(&stop, "the container runtime", || runtime.info()).await;
        let Some(runtime_info) = runtime_info else { return Ok(None) };
        container_runtime::check_cdi(&config.cdi, &runtime_info)?;
        let Some(lock) = instance_lock(&stop, &config.run).await else { return Ok(None) };
        Ok(Some(AgentApp {
            config,
            store,
            settings_watcher,
            settings,
            cluster,
            pods,
            runtime,
            runtime_info,
            boot: boot_id(),
            readiness,
            tasks,
            stop,
            deadline,
            _lock: lock,
        }))
    }

    /// Runs one session after the other until the agent is stopped.
    async fn run(mut self) -> Result<(), AgentError> {
        let ended = self.run_sessions().await;
        // An error of a session ends the agent's other tasks, too.
        self.stop.cancel();
        self.tasks.join(self.deadline.at()).await;
        self.cluster.flush_events(self.deadline.at()).await;
        ended
    }

    async fn run_sessions(&mut self) -> Result<(), AgentError> {
        let mut backoff = ChangeBackoff::default();
        let mut ignore_changes_for = Duration::ZERO;
        loop {
            let Some(gpus) = self.discover().await? else { return Ok(()) };
            let session = tokio::task::block_in_place(|| AgentSession::build(self, gpus))?;
            self.readiness.set_state(Some(session.state()));
            let change = match session.serve(self, ignore_changes_for).await? {
                SessionEnd::Stopped => return Ok(()),
                SessionEnd::GpusChanged(change) => change,
            };
            self.readiness.set_state(None);
            tracing::warn!(change, "the node's GPUs have changed, the agent starts a new session");
            let note = format!(
                "the node's GPUs have changed: {change}; the agent discovers them again, and containers continue to run"
            );
            self.cluster.node_event(Severity::Normal, "GpusChanged", &note);
            if !session.release(self.deadline.at()).await {
                // Two sessions that grant the same GPUs would be worse than none for a while.
                return Err(AgentError::NotReleased { change });
            }
            ignore_changes_for = backoff.next(Instant::now());
        }
    }

    /// Waits for GPUs and for settings that can be applied to them. Returns `None` if the agent is stopped meanwhile.
    async fn discover(&mut self) -> Result<Option<DiscoveredGpus>, AgentError> {
        let root = HostRoot::new(&self.config.host_root);
        let mut retry = RetryLog::new("the driver");
        loop {
            // The file may have changed while the driver was waited for.
            match self.settings_watcher.poll() {
                Some(Ok(settings)) => self.settings = settings,
                Some(Err(error)) => self.reject_settings(&describe(&error)),
                None => {}
            }
            let found = tokio::task::block_in_place(|| {
                gpu_discovery::discover(&self.config, &self.settings, &root, &self.store, &self.boot)
            });
            let gpus = match found {
                Ok(gpus) => gpus,
                Err(error) => {
                    let cause = gpu_discovery::explain(&error);
                    self.readiness.set_idle(Some(&cause));
                    if retry.report(&cause) && error.needs_attention() {
                        let note = format!("the node's GPUs cannot be shared: {cause}; the agent retries");
                        self.cluster.node_event(Severity::Warning, "DriverUnusable", &note);
                    }
                    if !retry.wait(&self.stop).await {
                        return Ok(None);
                    }
                    continue;
                }
            };
            self.readiness.set_idle(None);
            let Err(error) = self.check_settings(&self.settings, &gpus.inventory) else {
                self.settings_watcher.persist(&self.settings);
                return Ok(Some(gpus));
            };
            let cause = describe(&error);
            match restore_settings(&self.cluster, &self.settings_watcher, &cause, self.deadline.at()).await {
                Some(settings) if settings != self.settings => self.settings = settings,
                _ => return Err(AgentError::UnusableSettings(error)),
            }
        }
    }

    /// Checks whether settings can be applied on this machine.
    fn check_settings(
        &self,
        settings: &AgentSettings,
        inventory: &Inventory,
    ) -> Result<(), SettingsCheckError> {
        resources::check(settings, &inventory.counted_node())?;
        device_plugin_set::check_socket_paths(&self.config.device_plugins(), settings)
    }

    /// Returns the settings to apply, if the file has changed.
    fn reload_settings(&mut self, inventory: &Inventory) -> Option<AgentSettings> {
        let read = self.settings_watcher.poll()?.map_err(|error| describe(&error));
        let checked = read.and_then(|settings| match self.check_settings(&settings, inventory) {
            Ok(()) => Ok(settings),
            Err(error) => Err(describe(&error)),
        });
        match checked {
            Ok(settings) => {
                self.settings_watcher.persist(&settings);
                // Running containers have the GPUs of the driver that they started with, and an address is bound once.
                let AgentSettings { driver, simulated, metrics, .. } = self.settings.clone();
                let applied = AgentSettings { driver, simulated, metrics, ..settings.clone() };
                if applied != settings {
                    tracing::warn!(
                        "changes of driver, simulated and metrics take effect when the agent restarts"
                    );
                }
                self.settings = applied.clone();
                tracing::info!("settings reloaded");
                Some(applied)
            }
            Err(cause) => {
                self.reject_settings(&cause);
                None
            }
        }
    }

    fn reject_settings(&self, cause: &str) {
        tracing::error!(cause, "changed settings cannot be used, the previous ones stay in force");
        let note = format!("the changed settings cannot be used, the previous ones stay in force: {cause}");
        self.cluster.node_event(Severity::Warning, "SettingsRefused", &note);
    }
}

/// Waits until no other agent manages this node. Returns `None` if the agent is stopped before.
pub(crate) async fn instance_lock(stop: &CancellationToken, runtime_dir: &Path) -> Option<InstanceLock> {
    let path = runtime_dir.join(LOCK_FILE);
    retry_until_stopped(stop, "the instance lock", || async { InstanceLock::try_acquire(&path) }).await
}

/// Returns the settings that were last in force, for a file that cannot be used, and reports either case.
async fn restore_settings(
    cluster: &ApiServer,
    settings_watcher: &SettingsWatcher,
    cause: &str,
    deadline: tokio::time::Instant,
) -> Option<AgentSettings> {
    let earlier = settings_watcher.earlier();
    let outcome = if earlier.is_some() {
        "using the last valid settings"
    } else {
        "no earlier settings exist, exiting"
    };
    tracing::error!(cause, outcome, "settings cannot be used");
    let note = format!("the settings cannot be used, {outcome}: {cause}");
    cluster.node_event(Severity::Warning, "SettingsRefused", &note);
    if earlier.is_none() {
        cluster.flush_events(deadline).await;
    }
    earlier
}
