//! The composition root: connects the agent to its node, and runs it until it is stopped.
//!
//! ```text
//!  Config ── App::build ──▶ App ── run ──▶ GPUs found ──▶ Session ──▶ GPUs changed, or stopped
//!                                              ▲                          │
//!                                              └──────────────────────────┘
//! ```
//!
//! An [`App`] has what outlives a change of the node's GPUs: settings, connections, the instance lock. A [`Session`] counts
//! everything by one set of GPUs, and ends when that changes.

mod gpu_changes;
mod session;
mod tasks;

use crate::api_server::ApiServer;
use crate::config::{AgentError, Config};
use crate::identity::{self, Runtime};
use crate::progress::{Progress, keep_telling};
use crate::settings::{Followed, Settings};
use crate::store::Store;
use crate::{find, resources};
use gpu_changes::ChangeBackoff;
use partage_cluster::{PodCache, Severity};
use partage_enforce::error_chain::describe;
use partage_enforce::gpus::{DiscoveredGpus, Inventory};
use partage_enforce::instance_lock::InstanceLock;
use partage_host::process::boot_id;
use partage_host::root::Root;
use session::{Session, SessionEnd};
use std::path::Path;
use std::sync::Arc;
use std::time::{Duration, Instant};
use tasks::Tasks;
use tokio_util::sync::CancellationToken;

/// How long an event may take to be written, and tasks to end, when the agent stops.
const SHUTDOWN_TIMEOUT: Duration = Duration::from_secs(5);
/// The lock file of the agent, in its runtime directory.
const LOCK_FILE: &str = "agent.lock";

/// Runs an agent until it is stopped. Containers go on running.
pub async fn run(config: Config, stop: CancellationToken) -> Result<(), AgentError> {
    partage_region::failpoint::arm_from_environment();
    match App::build(config, stop).await? {
        Some(app) => app.run().await,
        None => Ok(()),
    }
}

/// An agent on its node.
struct App {
    config: Config,
    store: Store,
    followed: Followed,
    /// The settings in force.
    settings: Settings,
    cluster: ApiServer,
    pods: PodCache,
    runtime: Runtime,
    about: identity::About,
    boot: String,
    progress: Arc<Progress>,
    /// Tasks that run from the first moment to the last.
    tasks: Tasks,
    stop: CancellationToken,
    /// Held for as long as the agent runs.
    _lock: InstanceLock,
}

impl App {
    /// Connects to the API server and the container runtime, and waits until no other agent runs on the node. Returns `None`
    /// if it is stopped meanwhile.
    async fn build(config: Config, stop: CancellationToken) -> Result<Option<App>, AgentError> {
        let config = config.resolved();
        let store = Store::open(&config.state, &config.run).map_err(AgentError::io(&config.state))?;
        let mut followed = Followed::new(config.settings.clone(), &config.node, &store);
        let read = followed.read();
        let cluster = match ApiServer::connect(config.kubeconfig.as_deref(), &config.node).await {
            Ok(cluster) => cluster,
            Err(error) => {
                read?;
                return Err(error.into());
            }
        };
        let settings = match read {
            Ok(settings) => settings,
            Err(error) => match last_good_settings(&cluster, &followed, &error.to_string()).await {
                Some(settings) => settings,
                None => return Err(error.into()),
            },
        };
        let progress = Arc::new(Progress::default());
        let mut tasks = Tasks::default();
        // From here on probes are answered: the driver may take its time.
        let metrics = settings.metrics.clone();
        tasks.spawn(keep_telling(Arc::clone(&progress), cluster.clone(), metrics, stop.clone()));
        let pods = cluster.watch_pods();
        let runtime = find::runtime(&config)?;
        let about = find::insist(&stop, "the container runtime", || async {
            runtime.about().await.map_err(|error| error.to_string())
        })
        .await;
        let Some(about) = about else { return Ok(None) };
        find::check_cdi(&config.cdi, &about)?;
        let Some(lock) = instance_lock(&stop, &config.run).await else { return Ok(None) };
        Ok(Some(App {
            config,
            store,
            followed,
            settings,
            cluster,
            pods,
            runtime,
            about,
            boot: boot_id(),
            progress,
            tasks,
            stop,
            _lock: lock,
        }))
    }

    /// Runs one session after the other until stopped.
    async fn run(mut self) -> Result<(), AgentError> {
        let ended = self.run_sessions().await;
        // Whatever ended the sessions ends everything.
        self.stop.cancel();
        self.tasks.join(SHUTDOWN_TIMEOUT).await;
        ended
    }

    async fn run_sessions(&mut self) -> Result<(), AgentError> {
        let mut backoff = ChangeBackoff::default();
        let mut ignore_changes_for = Duration::ZERO;
        loop {
            let Some(gpus) = self.discover().await? else { return Ok(()) };
            let session = tokio::task::block_in_place(|| Session::build(self, gpus))?;
            self.progress.found(session.state());
            let change = match session.serve(self, ignore_changes_for).await? {
                SessionEnd::Stopped => return Ok(()),
                SessionEnd::GpusChanged(change) => change,
            };
            self.progress.lost();
            let note = format!(
                "the node's GPUs have changed: {change}; everything is counted anew, and containers go on as they are"
            );
            tracing::warn!("{note}");
            self.cluster.node_event(Severity::Normal, "GpusChanged", &note);
            if !session.release(SHUTDOWN_TIMEOUT).await {
                // Two sessions that grant the same GPUs would be worse than none for a while.
                return Err(AgentError::Cannot(format!(
                    "{note}; not all of what was begun has ended: the agent must be started anew"
                )));
            }
            ignore_changes_for = backoff.next(Instant::now());
        }
    }

    /// Waits for GPUs and for settings that fit them. Returns `None` if it is stopped meanwhile.
    async fn discover(&mut self) -> Result<Option<DiscoveredGpus>, AgentError> {
        let root = Root::new(&self.config.host_root);
        let mut waiting = find::Waiting::new("the driver");
        loop {
            // The file may have changed while the driver was waited for.
            match self.followed.news() {
                Some(Ok(settings)) => self.settings = settings,
                Some(Err(error)) => self.refuse_settings(&error.to_string()),
                None => {}
            }
            let found = tokio::task::block_in_place(|| {
                find::gpus(&self.config, &self.settings, &root, &self.store, &self.boot)
            });
            let why = found.as_ref().err().map(find::explain).unwrap_or_default();
            self.progress.nothing(found.as_ref().err().map(|_| why.as_str()));
            let gpus = match found {
                Ok(gpus) => gpus,
                Err(error) => {
                    if waiting.tell(&why) && error.needs_attention() {
                        let note = format!("the node's GPUs cannot be shared yet: {why}; it is tried again");
                        self.cluster.node_event(Severity::Warning, "DriverUnusable", &note);
                    }
                    match waiting.again(&self.stop).await {
                        true => continue,
                        false => return Ok(None),
                    }
                }
            };
            let Err(why) = self.check_settings(&self.settings, &gpus.inventory) else {
                self.followed.keep(&self.settings);
                return Ok(Some(gpus));
            };
            match last_good_settings(&self.cluster, &self.followed, &why).await {
                Some(settings) if settings != self.settings => self.settings = settings,
                _ => return Err(AgentError::Cannot(why)),
            }
        }
    }

    /// Checks whether settings can be used on this machine.
    fn check_settings(&self, settings: &Settings, inventory: &Inventory) -> Result<(), String> {
        resources::check(settings, &inventory.counted_node())?;
        find::check_sockets(&self.config.kubelet, settings)
    }

    /// Returns the settings to apply, if the file has changed.
    fn reload_settings(&mut self, inventory: &Inventory) -> Option<Settings> {
        let read = self.followed.news()?.map_err(|error| error.to_string());
        match read.and_then(|settings| self.check_settings(&settings, inventory).map(|()| settings)) {
            Ok(settings) => {
                self.followed.keep(&settings);
                // Running containers have the GPUs of the driver that they started with, and an address is bound once.
                let Settings { driver, simulated, metrics, .. } = self.settings.clone();
                let applied = Settings { driver, simulated, metrics, ..settings.clone() };
                if applied != settings {
                    tracing::warn!(
                        "driver, simulated and metrics are taken from the settings at the next start"
                    );
                }
                self.settings = applied.clone();
                tracing::info!("the settings have changed");
                Some(applied)
            }
            Err(why) => {
                self.refuse_settings(&why);
                None
            }
        }
    }

    fn refuse_settings(&self, why: &str) {
        let note = format!("the changed settings cannot be used, the old ones stay: {why}");
        tracing::error!("{note}");
        self.cluster.node_event(Severity::Warning, "SettingsRefused", &note);
    }
}

/// Waits until no other agent manages this node; `None` if the agent is stopped before.
pub(crate) async fn instance_lock(stop: &CancellationToken, runtime_dir: &Path) -> Option<InstanceLock> {
    let path = runtime_dir.join(LOCK_FILE);
    find::insist(stop, "the node", || async {
        InstanceLock::try_acquire(&path).map_err(|error| describe(&error))
    })
    .await
}

/// Returns the settings that were last in force, for a file that cannot be used, and reports either case.
async fn last_good_settings(cluster: &ApiServer, followed: &Followed, why: &str) -> Option<Settings> {
    let earlier = followed.earlier();
    let note = match &earlier {
        Some(_) => format!("the settings cannot be used, those that were last in force are: {why}"),
        None => {
            format!("the settings cannot be used, and the agent ends, since none were in force before: {why}")
        }
    };
    tracing::error!("{note}");
    cluster.node_event(Severity::Warning, "SettingsRefused", &note);
    if earlier.is_none() {
        cluster.recorder.flush(SHUTDOWN_TIMEOUT).await;
    }
    earlier
}
