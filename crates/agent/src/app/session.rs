//! A session: everything that is counted by one set of GPUs, and the tasks that work on it.

use super::tasks::Tasks;
use super::{App, SHUTDOWN_TIMEOUT};
use crate::config::AgentError;
use crate::containers::{gc, persist, recover};
use crate::device_plugins::{self, Plugins};
use crate::identity::Kubelet;
use crate::inject::Materials;
use crate::mounted::Mounted;
use crate::regions::Regions;
use crate::state::{Adapters, MIN_PASS_INTERVAL, Machine, NodeState};
use crate::{look, other_runtime, pod_annotations, publish, uncounted};
use partage_cluster::Severity;
use partage_core::model::Node;
use partage_enforce::context_sizes::ContextSizes;
use partage_enforce::gpus::DiscoveredGpus;
use partage_host::cdi;
use partage_host::files;
use partage_host::process_setup;
use partage_host::root::Root;
use partage_host::selinux;
use std::fs;
use std::path::Path;
use std::pin::pin;
use std::sync::Arc;
use std::time::{Duration, Instant};
use tokio::sync::watch;
use tokio_util::sync::CancellationToken;

/// How often the settings file is looked at. Kubelet itself takes a minute to bring a changed ConfigMap.
const SETTINGS_POLL_INTERVAL: Duration = Duration::from_secs(2);
/// How often everything is offered and published again although nothing has changed.
const REFRESH_INTERVAL: Duration = Duration::from_secs(30);
/// How often it is checked whether a state is still in use.
const RELEASE_POLL_INTERVAL: Duration = Duration::from_millis(10);

/// Why a session ended.
pub(super) enum SessionEnd {
    /// The agent was stopped.
    Stopped,
    /// The node's GPUs changed, and how.
    GpusChanged(String),
}

/// The state of a node with one set of GPUs.
pub(super) struct Session {
    state: Arc<NodeState>,
}

impl Session {
    /// Installs what containers need, and recovers what earlier agents left.
    pub(super) fn build(app: &App, gpus: DiscoveredGpus) -> Result<Session, AgentError> {
        let DiscoveredGpus { driver, session: gpus, inventory, previously_unhealthy } = gpus;
        let (config, node) = (&app.config, &inventory.node);
        let version = gpus.driver_version().to_string();
        tracing::info!(
            gpus = node.gpus.len(),
            driver = version,
            runtime = app.about.name,
            "the node's GPUs are found"
        );
        report_withheld(app, node);
        for path in [&config.state, &config.run, &config.cdi] {
            fs::create_dir_all(path).map_err(AgentError::io(path))?;
        }
        let mut sizes = ContextSizes::read(config.state.join("contexts.json"), &version);
        for warning in sizes.measure_unknown(node, &driver) {
            tracing::warn!("{warning}");
        }
        let root = Root::new(&config.host_root);
        let (lib, regions) = (config.state.join("lib"), config.run.join("regions"));
        // Before there is anything in them: what is made there inherits their label.
        for path in [Some(&lib), Some(&regions), driver.simulated.as_ref()].into_iter().flatten() {
            fs::create_dir_all(path).map_err(AgentError::io(path))?;
            selinux::open_to_containers(&root, path).map_err(AgentError::io(path))?;
        }
        let materials = Materials::gather(&root, &driver, &version, &lib)
            .map_err(|error| AgentError::Cannot(error.to_string()))?;
        let cdi = cdi::Folder::new(&config.cdi);
        cdi.remove_unfinished().map_err(AgentError::io(&config.cdi))?;
        // Before kubelet passes it to the container runtime.
        cdi.put_shared(&materials.shared_edits()).map_err(AgentError::io(&config.cdi))?;
        files::remove_unfinished(&config.state, "").map_err(AgentError::io(&config.state))?;
        let adapters = Adapters {
            cluster: app.cluster.clone(),
            pods: app.pods.clone(),
            kubelet: Kubelet::new(&config.kubelet, app.runtime.clone()),
            runtime: app.runtime.clone(),
            gpus,
            materials,
            regions: Regions::new(&regions, sizes).map_err(AgentError::io(&regions))?,
            store: app.store.clone(),
            cdi,
        };
        let machine = Machine {
            boot: app.boot.clone(),
            inventory,
            simulated: driver.simulated.clone(),
            nvidia_runtime: app.about.nvidia.into(),
            previously_unhealthy,
        };
        let state = NodeState::recover(adapters, machine, app.settings.clone());
        let state = state.map_err(AgentError::io(&config.state))?;
        remove_stale(&state);
        report_reboot(&state);
        Ok(Session { state: Arc::new(state) })
    }

    pub(super) fn state(&self) -> &Arc<NodeState> {
        &self.state
    }

    /// Serves kubelet and runs the tasks until the agent is stopped or the GPUs change. Such a change is ignored for a while.
    pub(super) async fn serve(
        &self,
        app: &mut App,
        ignore_changes_for: Duration,
    ) -> Result<SessionEnd, AgentError> {
        let state = &self.state;
        let stop = app.stop.child_token();
        let sockets = app.config.device_plugins();
        let mounted = mounted(app, &sockets);
        let mut plugins = Plugins::new(&sockets);
        // Before all else: kubelet fails pods that it admits before the plugins are registered.
        plugins.follow(state).await;
        // Whole libraries were read on the way here.
        process_setup::trim_heap();
        let (publication, published) = watch::channel(None);
        let mut tasks = self.spawn_tasks(app, &stop, published, Instant::now() + ignore_changes_for);
        let mut pods = state.adapters.pods.changed();
        let mut settings_poll = tokio::time::interval(SETTINGS_POLL_INTERVAL);
        let mut refresh = tokio::time::interval(REFRESH_INTERVAL);
        let ended = 'served: loop {
            let looked = tokio::time::Instant::now();
            // Registered before the state is read: what changes meanwhile is noticed.
            let mut changed = pin!(state.changed.notified());
            pods.borrow_and_update();
            plugins.follow(state).await;
            app.progress.serves(plugins.watched());
            let next = device_plugins::publication(state);
            publication.send_if_modified(|now| device_plugins::replace(now, next));
            loop {
                tokio::select! {
                    () = &mut changed => break,
                    _ = pods.changed() => break,
                    _ = refresh.tick() => break,
                    _ = settings_poll.tick() => {
                        if let Some(settings) = app.reload_settings(&state.machine.inventory) {
                            state.refresh(Some(settings));
                        }
                        let usable = mounted.iter().try_for_each(Mounted::check).and_then(|()| state.adapters.materials.is_there());
                        if let Err(why) = usable {
                            // Kubelet starts the agent again, which then has the new one.
                            break 'served Err(AgentError::Cannot(why));
                        }
                    }
                    end = tasks.ended() => {
                        break 'served if app.stop.is_cancelled() { Ok(SessionEnd::Stopped) } else { end };
                    }
                    end = app.tasks.ended() => {
                        break 'served if app.stop.is_cancelled() { Ok(SessionEnd::Stopped) } else { end };
                    }
                    () = app.stop.cancelled() => break 'served Ok(SessionEnd::Stopped),
                }
            }
            tokio::time::sleep_until(looked + MIN_PASS_INTERVAL).await;
        };
        app.progress.serves(Vec::new());
        plugins.stop().await;
        stop.cancel();
        drop(publication);
        tasks.join(SHUTDOWN_TIMEOUT).await;
        ended
    }

    fn spawn_tasks(
        &self,
        app: &App,
        stop: &CancellationToken,
        published: watch::Receiver<Option<publish::Statement>>,
        ignore_changes_until: Instant,
    ) -> Tasks {
        let state = || Arc::clone(&self.state);
        let mut tasks = Tasks::default();
        tasks.spawn(gc::keep_collecting(state(), stop.clone()));
        tasks.spawn(pod_annotations::keep_written(state(), stop.clone()));
        tasks.spawn(publish::keep_published(app.cluster.clone(), published));
        tasks.spawn(uncounted::keep_telling(state(), stop.clone()));
        tasks.spawn(other_runtime::keep_asking(state(), app.config.cdi.clone(), stop.clone()));
        tasks.spawn(persist::keep_saving(state(), stop.clone()));
        tasks.spawn(look::keep_watch(state(), stop.clone()));
        tasks.spawn_gpu_watch(look::keep_looking(state(), stop.clone(), ignore_changes_until));
        tasks
    }

    /// Waits until nothing uses the state any more. Returns whether that was within the timeout.
    pub(super) async fn release(self, timeout: Duration) -> bool {
        let left = Arc::downgrade(&self.state);
        drop(self);
        let deadline = Instant::now() + timeout;
        while left.strong_count() > 0 {
            if Instant::now() >= deadline {
                return false;
            }
            tokio::time::sleep(RELEASE_POLL_INTERVAL).await;
        }
        true
    }
}

fn report_withheld(app: &App, node: &Node) {
    for gpu in &node.gpus {
        let Some(why) = &gpu.withheld else { continue };
        let note = format!("GPU {} ({}) is listed and not offered: {why}", gpu.uuid, gpu.model);
        tracing::warn!("{note}");
        app.cluster.node_event(Severity::Warning, "GpuNotOffered", &note);
    }
}

/// The directories that somebody may replace while they are mounted in the agent's container.
fn mounted(app: &App, sockets: &Path) -> Vec<Mounted> {
    let root = Root::new(&app.config.host_root);
    // Kubelet makes its directory again; nobody does so for CDI specs.
    let folders = [(sockets, true), (app.config.cdi.as_path(), false)];
    folders.into_iter().filter_map(|(folder, by_others)| Mounted::new(folder, &root, by_others)).collect()
}

/// Removes library directories of earlier versions that no container uses any more.
fn remove_stale(state: &NodeState) {
    let files =
        state.adapters.cdi.all().unwrap_or_default().into_iter().filter_map(|found| found.content.ok());
    let used = files.flat_map(recover::used_paths).collect();
    for folder in state.adapters.materials.stale(&used).unwrap_or_default() {
        if let Err(error) = fs::remove_dir_all(&folder) {
            tracing::warn!("{}: cannot be removed: {error}", folder.display());
        }
    }
}

/// Reports what happens to the pods that held shares before the node was rebooted.
fn report_reboot(state: &NodeState) {
    let containers = state.containers();
    let before = containers.grants().records().filter(|record| record.boot != state.machine.boot).count();
    drop(containers);
    if before == 0 {
        return;
    }
    let note = format!(
        "the node was booted, and {before} of its pods held shares of GPUs before: those that kubelet starts again get theirs, and those \
         that it failed because it looked for their GPUs before Partage was there are made again by their controllers"
    );
    tracing::info!("{note}");
    state.tell_node(Severity::Normal, "Booted", &note);
}
