//! Polls the driver: reports GPUs that become unhealthy or recover, and containers that bypass their limits.
//!
//! [`partage_enforce::monitor`] compares the driver with the regions. This module attributes processes to containers by their
//! cgroups, and turns findings into events, metrics and evictions.

mod container_index;
mod unshared_use;

use crate::plugin::ContainerKey;
use crate::processes::Processes;
use crate::settings::OnBypass;
use crate::state::NodeState;
use container_index::{ContainerIndex, NamedContainer};
use partage_cluster::Severity;
use partage_core::model::{ContainerName, GpuUuid, PodId, PodUid};
use partage_enforce::monitor::{AuditedShare, Monitor, MonitorReport};
use std::cell::RefCell;
use std::collections::{BTreeMap, BTreeSet};
use std::path::Path;
use std::sync::{Arc, PoisonError};
use std::time::{Duration, Instant};
use tokio_util::sync::CancellationToken;
use unshared_use::{UnsharedProcess, UnsharedUse};

/// Interval between the starts of two polls: kubelet is to learn of a lost GPU within a second.
const POLL_INTERVAL: Duration = Duration::from_millis(700);
/// Shortest pause between two polls, however long they take.
const MIN_POLL_PAUSE: Duration = Duration::from_millis(100);
/// A driver that has not answered for this long hangs: with a broken card the kernel can wait for it forever.
const DRIVER_SILENCE_LIMIT: Duration = Duration::from_secs(30);
/// A pod that still exists this long after its eviction is evicted again.
const EVICTION_RETRY_INTERVAL: Duration = Duration::from_secs(30);

/// State that is kept from poll to poll.
struct NodeMonitor {
    monitor: Monitor<ContainerKey>,
    containers: ContainerIndex,
    unshared_use: UnsharedUse,
    /// When pods were last evicted.
    evicted: BTreeMap<PodUid, Instant>,
}

/// Polls until told to stop, or until the GPUs are no longer those that the agent started with: then it returns what changed.
/// Such a change is ignored until `lets_be_until`, so that a flapping GPU does not restart everything at once.
pub(crate) async fn keep_looking(
    state: Arc<NodeState>,
    stop: CancellationToken,
    lets_be_until: Instant,
) -> Option<String> {
    let monitor = Monitor::new(state.hardware(), reported_unhealthy(&state))
        .recording_fatal_errors(state.adapters.store.singletons(), &state.machine.boot);
    let mut node_monitor = NodeMonitor {
        monitor,
        containers: ContainerIndex::default(),
        unshared_use: UnsharedUse::default(),
        evicted: BTreeMap::new(),
    };
    while !stop.is_cancelled() {
        let begun = Instant::now();
        let (live, runtime) = (state.adapters.regions.count(), state.adapters.runtime.clone());
        node_monitor.containers.refresh(live, || async move { runtime.containers().await.ok() }).await;
        // The driver can be slow to answer. Regions are in memory.
        let change = tokio::task::block_in_place(|| {
            node_monitor.poll(&state);
            state.machine.inventory.change(state.adapters.gpus.counted(), &state.monitor_report().looks)
        });
        if change.is_some() && Instant::now() >= lets_be_until {
            return change;
        }
        *state.last_poll.lock().unwrap_or_else(PoisonError::into_inner) = Instant::now();
        tokio::select! {
            () = tokio::time::sleep(POLL_INTERVAL.saturating_sub(begun.elapsed()).max(MIN_POLL_PAUSE)) => {}
            () = stop.cancelled() => {}
        }
    }
    None
}

/// Reports, once, that the driver does not answer: from then on the health of the GPUs is unknown.
pub(crate) async fn keep_watch(state: Arc<NodeState>, stop: CancellationToken) {
    let mut reported = false;
    while stop.run_until_cancelled(tokio::time::sleep(DRIVER_SILENCE_LIMIT / 3)).await.is_some() {
        let silent = state.last_poll.lock().unwrap_or_else(PoisonError::into_inner).elapsed();
        if silent >= DRIVER_SILENCE_LIMIT && !reported {
            let note = format!(
                "the driver has not answered for {} s: it is not known whether GPUs are well; containers go on as they are; look at the \
                 kernel's log (dmesg) for XIDs, and boot the node where it does not recover",
                silent.as_secs()
            );
            tracing::error!("{note}");
            state.tell_node(Severity::Warning, "DriverSilent", &note);
        }
        reported = silent >= DRIVER_SILENCE_LIMIT;
    }
}

/// GPUs that an earlier agent, or the poll at the start of this one, found unhealthy: that one of them is healthy is reported,
/// and so is why it is not.
fn reported_unhealthy(state: &NodeState) -> BTreeSet<GpuUuid> {
    let report = state.monitor_report();
    let unhealthy = report.looks.iter().filter(|look| look.health.is_some()).map(|look| &look.uuid);
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
        let processes = Processes::new(Path::new("/proc"));
        // Processes of containers that the runtime knows and that have no region.
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
        let unshared = unshared_processes(state, &report, &without_region.into_inner());
        let unshared = self.unshared_use.update(Instant::now(), unshared);
        let suspects: BTreeSet<&PodUid> =
            report.findings.keys().filter_map(|key| live.get(key)).map(|live| &live.uid).collect();
        state.suspected().note(report.findings.keys(), Instant::now());
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
        if state.settings().on_bypass == OnBypass::Evict {
            let unshared = unshared.all.iter().map(|process| &process.owner.pod.uid);
            self.evict(state, suspects.into_iter().chain(unshared).cloned().collect());
        }
    }

    /// Evicts pods that bypass their limits, and again as long as they do: the API server may have been unavailable.
    fn evict(&mut self, state: &NodeState, uids: BTreeSet<PodUid>) {
        self.evicted.retain(|uid, at| uids.contains(uid) && at.elapsed() < EVICTION_RETRY_INTERVAL);
        for uid in uids {
            if self.evicted.contains_key(&uid) {
                continue;
            }
            // A pod without a grant is not the agent's to evict.
            let Some(pod) = state.containers().grants().record(&uid).map(|record| record.pod.clone()) else {
                continue;
            };
            self.evicted.insert(uid, Instant::now());
            let cluster = state.adapters.cluster.clone();
            tokio::spawn(async move {
                match cluster.client.evict_pod(&pod).await {
                    Ok(()) => tracing::warn!(namespace = %pod.namespace, pod = %pod.name, "evicted"),
                    Err(error) => {
                        tracing::warn!(namespace = %pod.namespace, pod = %pod.name, "cannot be evicted yet: {error}");
                    }
                }
            });
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
    let by_gpu = report.looks.iter().zip(&report.unowned);
    let processes = by_gpu.flat_map(|(look, pids)| pids.iter().map(|pid| (*pid, &look.uuid)));
    processes
        .filter_map(|(pid, gpu)| {
            let owner = without_region.get(&pid).filter(|owner| !holds(owner, gpu))?;
            Some(UnsharedProcess { owner: owner.clone(), gpu: gpu.clone(), pid })
        })
        .collect()
}

fn report_health(state: &NodeState, changes: &[(GpuUuid, Option<String>)]) {
    for (gpu, unhealthy) in changes {
        let (severity, reason, note) = match unhealthy {
            Some(why) => (
                Severity::Warning,
                "GpuUnhealthy",
                format!("GPU {gpu}: {why}; no container gets it until it is well"),
            ),
            None => (Severity::Normal, "GpuHealthy", format!("GPU {gpu} is well again and is offered")),
        };
        match unhealthy {
            Some(_) => tracing::warn!("{note}"),
            None => tracing::info!("{note}"),
        }
        state.tell_node(severity, reason, &note);
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

fn report_bypass(state: &NodeState, NamedContainer { pod, container }: &NamedContainer, what: &str) {
    state.counts().bypasses += 1;
    let granted = state.containers().grants().record(&pod.uid).is_some();
    let note = match (granted, state.settings().on_bypass) {
        (false, _) => format!("container {container} uses a GPU past Partage: {what}"),
        (true, OnBypass::Evict) => {
            format!("container {container} goes around its limits: {what}; the pod is evicted")
        }
        (true, OnBypass::Report) => format!("container {container} goes around its limits: {what}"),
    };
    tracing::warn!(namespace = %pod.namespace, pod = %pod.name, "{note}");
    state.adapters.cluster.pod_event(pod, Severity::Warning, "BypassSuspected", &note);
}
