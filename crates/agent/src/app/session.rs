//! A session: everything that is counted by one set of GPUs, and the tasks that work on it.

use super::AgentApp;
use super::tasks::TaskSet;
use crate::cdi_edits::DriverBundle;
use crate::config::AgentError;
use crate::containers::{gc, persist, recover};
use crate::device_owner::DeviceOwners;
use crate::device_plugin_set::{DevicePluginSet, replace_if_changed};
use crate::monitor::driver_watchdog;
use crate::node_status::DesiredNodeStatus;
use crate::regions::ContainerRegions;
use crate::stale_mounts::HostMount;
use crate::state::{MIN_PASS_INTERVAL, MachineFacts, NodeAdapters, NodeState};
use crate::{monitor, node_status, pod_annotations, runtime_watch, unserved_asks};
use partage_cluster::Severity;
use partage_core::model::Node;
use partage_enforce::context_sizes::ContextSizes;
use partage_enforce::gpus::DiscoveredGpus;
use partage_host::atomic_file;
use partage_host::cdi;
use partage_host::host_root::HostRoot;
use partage_host::process_setup;
use partage_host::selinux;
use std::fs;
use std::pin::pin;
use std::sync::Arc;
use std::time::{Duration, Instant};
use tokio::sync::watch;
use tokio_util::sync::CancellationToken;
use tracing::Instrument;

/// Interval between two checks of the settings file. Kubelet itself takes a minute to update a mounted ConfigMap.
const SETTINGS_POLL_INTERVAL: Duration = Duration::from_secs(2);
/// Interval between two reconciles when nothing changes.
const REFRESH_INTERVAL: Duration = Duration::from_secs(30);
/// Interval between two checks of whether the state is still in use.
const RELEASE_POLL_INTERVAL: Duration = Duration::from_millis(10);

/// Why a session ended.
pub(super) enum SessionEnd {
    /// The agent was stopped.
    Stopped,
    /// The node's GPUs changed, and how.
    GpusChanged(String),
}

/// The state of a node with one set of GPUs.
pub(super) struct AgentSession {
    state: Arc<NodeState>,
}

impl AgentSession {
    /// Installs what containers need, and recovers what earlier agents left.
    pub(super) fn build(app: &AgentApp, gpus: DiscoveredGpus) -> Result<AgentSession, AgentError> {
        let DiscoveredGpus { driver, session: gpus, inventory, previously_unhealthy } = gpus;
        let (config, node) = (&app.config, &inventory.node);
        let version = gpus.driver_version().to_string();
        tracing::info!(
            gpus = node.gpus.len(),
            driver = version,
            runtime = app.runtime_info.name,
            "GPUs discovered"
        );
        report_withheld(app, node);
        for path in [&config.state, &config.run, &config.cdi] {
            fs::create_dir_all(path).map_err(AgentError::io(path))?;
        }
        let mut sizes = ContextSizes::read(config.state.join("contexts.json"), &version);
        for warning in sizes.measure_unknown(node, &driver) {
            tracing::warn!(cause = warning, "context sizes are incomplete");
        }
        let root = HostRoot::new(&config.host_root);
        let (lib, regions) = (config.state.join("lib"), config.run.join("regions"));
        // Before anything is created in them: new files inherit the SELinux label of their directory.
        for path in [Some(&lib), Some(&regions), driver.simulated.as_ref()].into_iter().flatten() {
            fs::create_dir_all(path).map_err(AgentError::io(path))?;
            selinux::label_for_containers(&root, path).map_err(AgentError::io(path))?;
        }
        let driver_bundle =
            DriverBundle::install(&root, &driver, &version, &lib).map_err(AgentError::Libraries)?;
        let cdi = cdi::SpecDir::new(&config.cdi);
        cdi.remove_temp_files().map_err(AgentError::io(&config.cdi))?;
        // Before kubelet passes the shared device to the container runtime.
        cdi.put_shared(&driver_bundle.shared_edits()).map_err(AgentError::io(&config.cdi))?;
        atomic_file::remove_temp_files(&config.state, "").map_err(AgentError::io(&config.state))?;
        let adapters = NodeAdapters {
            cluster: app.cluster.clone(),
            pods: app.pods.clone(),
            device_owners: DeviceOwners::new(&config.kubelet, app.runtime.clone()),
            runtime: app.runtime.clone(),
            gpus,
            driver_bundle,
            regions: ContainerRegions::new(&regions, sizes).map_err(AgentError::io(&regions))?,
            store: app.store.clone(),
            cdi,
        };
        let machine = MachineFacts {
            boot: app.boot.clone(),
            inventory,
            simulated: driver.simulated.clone(),
            nvidia_runtime: app.runtime_info.nvidia.into(),
            previously_unhealthy,
        };
        let state = NodeState::recover(adapters, machine, app.settings.clone())?;
        remove_stale_libraries(&state);
        report_reboot(&state);
        Ok(AgentSession { state: Arc::new(state) })
    }

    pub(super) fn state(&self) -> &Arc<NodeState> {
        &self.state
    }

    /// Serves kubelet and runs the tasks until the agent is stopped or the GPUs change. Such a change is ignored for a while.
    pub(super) async fn serve(
        &self,
        app: &mut AgentApp,
        ignore_changes_for: Duration,
    ) -> Result<SessionEnd, AgentError> {
        let stop = app.stop.child_token();
        // Records are written until kubelet's last request is answered.
        let stop_writes = CancellationToken::new();
        let mut plugins = DevicePluginSet::new(&app.config.device_plugins());
        // Before all else: kubelet fails pods that it admits before the plugins are registered.
        plugins.reconcile(&self.state).await;
        // Discovery read large files: return the memory.
        process_setup::trim_heap();
        let (desired_status, published) = watch::channel(None);
        let ignore_changes_until = Instant::now() + ignore_changes_for;
        let mut tasks = self.spawn_tasks(app, &stop, &stop_writes, published, ignore_changes_until);
        let ended = self.reconcile_until_ended(app, &mut plugins, &desired_status, &mut tasks).await;
        app.readiness.set_resources(Vec::new());
        stop.cancel();
        plugins.stop(app.deadline.at()).await;
        stop_writes.cancel();
        drop(desired_status);
        tasks.join(app.deadline.at()).await;
        ended
    }

    /// Keeps the device plugins and the desired node status up to date, and applies changed settings.
    async fn reconcile_until_ended(
        &self,
        app: &mut AgentApp,
        plugins: &mut DevicePluginSet,
        desired_status: &watch::Sender<Option<DesiredNodeStatus>>,
        tasks: &mut TaskSet,
    ) -> Result<SessionEnd, AgentError> {
        let state = &self.state;
        let mounts = host_mounts(app);
        let mut pods = state.adapters.pods.changed();
        let mut settings_poll = tokio::time::interval(SETTINGS_POLL_INTERVAL);
        let mut refresh = tokio::time::interval(REFRESH_INTERVAL);
        let mut cause = "start";
        loop {
            let started = tokio::time::Instant::now();
            // Registered before the state is read, so that no change is missed.
            let mut changed = pin!(state.changed.notified());
            pods.borrow_and_update();
            let reconcile = async {
                plugins.reconcile(state).await;
                app.readiness.set_resources(plugins.kubelet_streams());
                let desired = DesiredNodeStatus::of(state);
                desired_status.send_if_modified(|current| replace_if_changed(current, desired));
            };
            reconcile.instrument(tracing::info_span!("reconcile", cause)).await;
            cause = loop {
                tokio::select! {
                    () = &mut changed => break "shares changed",
                    _ = pods.changed() => break "pods changed",
                    _ = refresh.tick() => break "interval",
                    _ = settings_poll.tick() => {
                        if let Some(settings) = app.reload_settings(&state.machine.inventory) {
                            state.refresh(Some(settings));
                        }
                        // Kubelet restarts the agent, which then has the new directory or driver.
                        mounts.iter().try_for_each(HostMount::check)?;
                        state.adapters.driver_bundle.check_driver_files()?;
                    }
                    end = tasks.ended() => {
                        return if app.stop.is_cancelled() { Ok(SessionEnd::Stopped) } else { end };
                    }
                    end = app.tasks.ended() => {
                        return if app.stop.is_cancelled() { Ok(SessionEnd::Stopped) } else { end };
                    }
                    () = app.stop.cancelled() => return Ok(SessionEnd::Stopped),
                }
            };
            tokio::time::sleep_until(started + MIN_PASS_INTERVAL).await;
        }
    }

    fn spawn_tasks(
        &self,
        app: &AgentApp,
        stop: &CancellationToken,
        stop_writes: &CancellationToken,
        desired_status: watch::Receiver<Option<DesiredNodeStatus>>,
        ignore_changes_until: Instant,
    ) -> TaskSet {
        let state = || Arc::clone(&self.state);
        let mut tasks = TaskSet::default();
        tasks.spawn(gc::run(state(), stop.clone()));
        tasks.spawn(pod_annotations::run(state(), stop.clone()));
        tasks.spawn(node_status::run(app.cluster.clone(), desired_status));
        tasks.spawn(unserved_asks::run(state(), stop.clone()));
        tasks.spawn(runtime_watch::run(state(), app.config.cdi.clone(), stop.clone()));
        tasks.spawn(persist::run(state(), stop_writes.clone()));
        tasks.spawn(driver_watchdog::run(state(), stop.clone()));
        tasks.spawn_gpu_watch(monitor::run(state(), stop.clone(), ignore_changes_until));
        tasks
    }

    /// Waits until nothing uses the state any more. Returns false if the deadline passes before.
    pub(super) async fn release(self, deadline: tokio::time::Instant) -> bool {
        let state = Arc::downgrade(&self.state);
        drop(self);
        while state.strong_count() > 0 {
            if tokio::time::Instant::now() >= deadline {
                return false;
            }
            tokio::time::sleep(RELEASE_POLL_INTERVAL).await;
        }
        true
    }
}

/// Reports GPUs that are discovered and not offered, such as those in MIG mode.
fn report_withheld(app: &AgentApp, node: &Node) {
    for gpu in &node.gpus {
        let Some(cause) = &gpu.withheld else { continue };
        tracing::warn!(gpu = %gpu.uuid, model = gpu.model, cause, "GPU is not offered");
        let note = format!("GPU {} ({}) is not offered: {cause}", gpu.uuid, gpu.model);
        app.cluster.node_event(Severity::Warning, "GpuNotOffered", &note);
    }
}

/// Returns the directories that can be replaced on the host while they are mounted in the agent's container.
fn host_mounts(app: &AgentApp) -> Vec<HostMount> {
    let root = HostRoot::new(&app.config.host_root);
    // Kubelet creates its directory again after it was removed; no component does so for CDI specs.
    let directories = [(app.config.device_plugins(), true), (app.config.cdi.clone(), false)];
    let mounts = directories.iter().map(|(path, recreated)| HostMount::new(path, &root, *recreated));
    mounts.flatten().collect()
}

/// Removes library directories of earlier versions that no container uses any more.
fn remove_stale_libraries(state: &NodeState) {
    let specs =
        state.adapters.cdi.all().unwrap_or_default().into_iter().filter_map(|found| found.content.ok());
    let used = specs.flat_map(recover::used_paths).collect();
    for path in state.adapters.driver_bundle.stale(&used).unwrap_or_default() {
        if let Err(error) = fs::remove_dir_all(&path) {
            tracing::warn!(path = %path.display(), %error, "cannot remove stale libraries");
        }
    }
}

/// Reports what happens to the pods that held shares before the node was rebooted.
fn report_reboot(state: &NodeState) {
    let containers = state.containers();
    let pods = containers.grants().records().filter(|record| record.boot != state.machine.boot).count();
    drop(containers);
    if pods == 0 {
        return;
    }
    tracing::info!(pods, "node rebooted, pods from before the reboot hold grants");
    let note = format!(
        "the node was rebooted while {pods} pods held GPU shares; pods that kubelet restarts keep their shares, and controllers replace \
         pods that kubelet rejected before the agent had registered"
    );
    state.node_event(Severity::Normal, "NodeRebooted", &note);
}
