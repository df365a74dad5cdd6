//! Polls the driver: reports GPUs that become unhealthy or recover, and containers that bypass their limits.
//!
//! [`partage_enforce::monitor`] compares the driver with the regions. This module attributes processes to containers by their
//! cgroups, and turns findings into events, metrics and evictions.

mod container_index;
pub(crate) mod driver_watchdog;
mod evictions;
pub(crate) mod suspected_bypasses;
mod unshared_use;

use crate::api_server::ApiServer;
use crate::containers::ContainerKey;
use crate::settings::BypassAction;
use crate::state::{NodeState, lock};
use container_index::{ContainerIndex, NamedContainer};
use evictions::Evictions;
use partage_cluster::Severity;
use partage_core::model::{ContainerName, GpuUuid, PodId, PodUid};
use partage_enforce::error_chain::describe;
use partage_enforce::monitor::{AuditedShare, Monitor, MonitorReport};
use partage_host::container_of_pid::ProcessContainers;
use std::cell::RefCell;
use std::collections::{BTreeMap, BTreeSet};
use std::path::Path;
use std::sync::Arc;
use std::time::{Duration, Instant};
use tokio_util::sync::CancellationToken;
use unshared_use::{UnsharedProcess, UnsharedUse};

/// Interval between the starts of two polls: a lost GPU must be reported to kubelet within a second.
const POLL_INTERVAL: Duration = Duration::from_millis(700);
/// Shortest pause between two polls, however long they take.
const MIN_POLL_PAUSE: Duration = Duration::from_millis(100);
/// A pod that still exists this long after its eviction is evicted again.
const EVICTION_RETRY_INTERVAL: Duration = Duration::from_secs(30);

/// State that is kept from poll to poll.
struct NodeMonitor {
    monitor: Monitor<ContainerKey>,
    containers: ContainerIndex,
    unshared_use: UnsharedUse,
    evictions: Evictions,
}

/// Polls until stopped, or until the GPUs are no longer those that the session started with: then it returns what changed. Such a
/// change is ignored until `ignore_changes_until`, so that a flapping GPU does not restart the session all the time.
pub(crate) async fn run(
    state: Arc<NodeState>,
    stop: CancellationToken,
    ignore_changes_until: Instant,
) -> Option<String> {
    let monitor = Monitor::new(state.hardware(), reported_unhealthy(&state))
        .recording_fatal_errors(state.adapters.store.singletons(), &state.machine.boot);
    let mut node_monitor = NodeMonitor {
        monitor,
        containers: ContainerIndex::default(),
        unshared_use: UnsharedUse::default(),
        evictions: Evictions::default(),
    };
    while !stop.is_cancelled() {
        let started = Instant::now();
        let live = state.adapters.regions.count();
        let runtime = state.adapters.runtime.clone();
        node_monitor.containers.refresh(live, || async move { runtime.containers().await.ok() }).await;
        // The driver can be slow to answer. Regions are in memory.
        let change = tokio::task::block_in_place(|| {
            let _span = tracing::info_span!("poll_driver").entered();
            node_monitor.poll(&state);
            state
                .machine
                .inventory
                .change(state.adapters.gpus.device_count(), &state.monitor_report().samples)
        });
        if change.is_some() && Instant::now() >= ignore_changes_until {
            return change;
        }
        *lock(&state.last_poll) = Instant::now();
        tokio::select! {
            () = tokio::time::sleep(POLL_INTERVAL.saturating_sub(started.elapsed()).max(MIN_POLL_PAUSE)) => {}
            () = stop.cancelled() => {}
        }
    }
    None
}

/// Returns the GPUs that an earlier agent, or the poll at the start of this one, found unhealthy: their recovery is reported.
fn reported_unhealthy(state: &NodeState) -> BTreeSet<GpuUuid> {
    let report = state.monitor_report();
    let unhealthy = report.samples.iter().filter(|sample| sample.health.is_some()).map(|sample| &sample.uuid);
    unhealthy.chain(&state.machine.previously_unhealthy).cloned().collect()
}

impl NodeMonitor {
    fn poll(&mut self, state: &NodeState) {
        let live = state.adapters.regions.live();
        let audited: Vec<AuditedShare<ContainerKey>> = live
            .iter()
            .map(|(key, live)| AuditedShare { key: key.clone(), region: live.region().cloned() })
            .collect();
        let keys: BTreeMap<(&PodUid, &ContainerName), &ContainerKey> =
            live.iter().map(|(key, live)| ((&live.uid, &live.container), key)).collect();
        let processes = ProcessContainers::new(Path::new("/proc"));
        // Processes of containers that the runtime reports and that have no region.
        let without_region: RefCell<BTreeMap<u32, NamedContainer>> = RefCell::default();
        let owner = |pid: u32| {
            let owner = self.containers.owner(&processes.container(pid)?)?;
            let key = keys.get(&(&owner.pod.uid, &owner.container)).map(|key| (*key).clone());
            if key.is_none() {
                without_region.borrow_mut().insert(pid, owner.clone());
            }
            key
        };
        let report = self.monitor.poll(&state.adapters.gpus, &audited, &owner);
        state.adapters.regions.charge_unaccounted(&report.unaccounted);
        let unshared = unshared_processes(state, &report, &without_region.into_inner());
        let unshared = self.unshared_use.update(Instant::now(), unshared);
        let suspects: BTreeSet<&PodUid> =
            report.findings.keys().filter_map(|key| live.get(key)).map(|live| &live.uid).collect();
        state.suspected().record(report.findings.keys(), Instant::now());
        *state.monitor_report() = report.clone();
        if !report.health_changes.is_empty() {
            report_health(state, &report.health_changes);
            state.refresh(None);
        }
        for (key, finding) in &report.new_findings {
            let Some(live) = live.get(key) else { continue };
            let pod = state.containers().grants().record(&live.uid).map(|record| record.pod.clone());
            if let Some(pod) = pod {
                let owner = NamedContainer { pod, container: live.container.clone() };
                report_bypass(state, &owner, finding);
            }
        }
        for process in &unshared.new {
            report_bypass(state, &process.owner, &process.sentence());
        }
        if state.settings().on_bypass == BypassAction::Evict {
            let unshared = unshared.all.iter().map(|process| &process.owner.pod.uid);
            self.evict(state, suspects.into_iter().chain(unshared).cloned().collect());
        }
    }

    /// Evicts pods that bypass their limits.
    fn evict(&mut self, state: &NodeState, uids: BTreeSet<PodUid>) {
        self.evictions.start(Instant::now(), uids, |uid| {
            // A pod without a grant is not the agent's to evict.
            let pod = state.containers().grants().record(uid)?.pod.clone();
            Some(evict_pod(state.adapters.cluster.clone(), pod))
        });
    }
}

async fn evict_pod(cluster: ApiServer, pod: PodId) {
    match cluster.client.evict_pod(&pod).await {
        Ok(()) => {
            tracing::warn!(namespace = %pod.namespace, pod = %pod.name, "pod evicted for bypassing its limits");
        }
        Err(error) => {
            let error = describe(&error);
            tracing::warn!(namespace = %pod.namespace, pod = %pod.name, error, "cannot evict a pod, retrying");
        }
    }
}

/// Returns the processes on GPUs whose containers have no share of them. A container that was granted a share and whose region
/// was lost has one.
fn unshared_processes(
    state: &NodeState,
    report: &MonitorReport<ContainerKey>,
    without_region: &BTreeMap<u32, NamedContainer>,
) -> Vec<UnsharedProcess> {
    if !state.adapters.pods.is_synced() {
        // Grants may be written on pods that the watch has not delivered yet.
        return Vec::new();
    }
    let containers = state.containers();
    let grants = containers.grants();
    let holds = |owner: &NamedContainer, gpu: &GpuUuid| {
        let grant = grants.record(&owner.pod.uid).and_then(|record| record.grant_of(&owner.container));
        grant.is_some_and(|grant| grant.shares.iter().any(|share| share.gpu == *gpu))
    };
    let by_gpu = report.samples.iter().zip(&report.unowned);
    let processes = by_gpu.flat_map(|(sample, pids)| pids.iter().map(|pid| (*pid, &sample.uuid)));
    processes
        .filter_map(|(pid, gpu)| {
            let owner = without_region.get(&pid).filter(|owner| !holds(owner, gpu))?;
            Some(UnsharedProcess { owner: owner.clone(), gpu: gpu.clone(), pid })
        })
        .collect()
}

/// Reports GPUs that became unhealthy or recovered, on the node and on the pods that hold shares of them.
fn report_health(state: &NodeState, changes: &[(GpuUuid, Option<String>)]) {
    for (gpu, unhealthy) in changes {
        let gpu_index = state.containers().grants().node().gpu_index(gpu);
        let (severity, reason, note) = match unhealthy {
            Some(cause) => {
                tracing::warn!(gpu_index, %gpu, cause, "GPU unhealthy");
                let note = format!("GPU {gpu} is unhealthy: {cause}; no container gets it until it recovers");
                (Severity::Warning, "GpuUnhealthy", note)
            }
            None => {
                tracing::info!(gpu_index, %gpu, "GPU recovered");
                (Severity::Normal, "GpuRecovered", format!("GPU {gpu} has recovered and is offered again"))
            }
        };
        state.node_event(severity, reason, &note);
        let pods: Vec<PodId> = {
            let containers = state.containers();
            let mut on: Vec<PodId> = containers
                .grants()
                .shares()
                .filter(|(_, _, share)| share.gpu == *gpu)
                .map(|(record, _, _)| record.pod.clone())
                .collect();
            on.dedup();
            on
        };
        for pod in pods {
            state.adapters.cluster.pod_event(&pod, severity, reason, &note);
        }
    }
}

/// Reports a container that uses a GPU without a share of it, or more than its limits.
fn report_bypass(state: &NodeState, NamedContainer { pod, container }: &NamedContainer, finding: &str) {
    state.counts().bypasses += 1;
    let is_granted = state.containers().grants().record(&pod.uid).is_some();
    let is_evicted = is_granted && state.settings().on_bypass == BypassAction::Evict;
    tracing::warn!(
        namespace = %pod.namespace,
        pod = %pod.name,
        %container,
        finding,
        evict = is_evicted,
        "bypass of limits suspected"
    );
    let note = if !is_granted {
        format!("container {container} uses a GPU without a share of it: {finding}")
    } else if is_evicted {
        format!("container {container} bypasses its limits: {finding}; the pod is evicted")
    } else {
        format!("container {container} bypasses its limits: {finding}")
    };
    state.adapters.cluster.pod_event(pod, Severity::Warning, "BypassSuspected", &note);
}
