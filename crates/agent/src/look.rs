//! What the driver says, again and again: a GPU that is lost or back, and who goes around limits.

mod containers;
mod foreign;

use crate::node::NodeState;
use crate::plugin::Nonce;
use crate::processes::Processes;
use crate::settings::OnBypass;
use containers::{Containers, Whose};
use foreign::{Foreign, Seen};
use partage_cluster::Severity;
use partage_core::model::{ContainerName, GpuUuid, PodId, PodUid};
use partage_enforce::gpus::FatalErrorLog;
use partage_host::truth::{Auditor, Truth, Watched};
use std::cell::RefCell;
use std::collections::{BTreeMap, BTreeSet};
use std::path::Path;
use std::sync::{Arc, PoisonError};
use std::time::{Duration, Instant};
use tokio_util::sync::CancellationToken;

/// How often the driver is asked, from one look's beginning to the next: kubelet is to know within a second.
const BEAT: Duration = Duration::from_millis(700);
/// Between two looks, however long they take.
const BREATH: Duration = Duration::from_millis(100);
/// A driver that has not answered for so long has hung: a kernel with a card that is broken can wait for it for ever.
const SILENT: Duration = Duration::from_secs(30);

/// A pod that is still there after this is asked to go again.
const EVICT_AGAIN: Duration = Duration::from_secs(30);

/// What is remembered from look to look.
struct Looker {
    auditor: Auditor<Nonce>,
    runtime: Containers,
    foreign: Foreign,
    /// Pods that were asked to go, and when.
    evicted: BTreeMap<PodUid, Instant>,
}

/// Looks until told to stop, or until the GPUs are no longer those that the agent began with: then it says what changed. Until some
/// moment such a change is let be.
pub(crate) async fn keep_looking(
    state: Arc<NodeState>,
    stop: CancellationToken,
    lets_be_until: Instant,
) -> Option<String> {
    let mut looker = Looker {
        auditor: Auditor::new(state.hardware()).after(ill_at_first(&state)),
        runtime: Containers::default(),
        foreign: Foreign::default(),
        evicted: BTreeMap::new(),
    };
    let mut fatal_errors = FatalErrorLog::default();
    while !stop.is_cancelled() {
        let begun = Instant::now();
        let (live, runtime) = (state.regions.live().len(), state.runtime.clone());
        looker.runtime.refresh(live, || async move { runtime.containers().await.ok() }).await;
        // The driver may take its time, and the region's files are on no disk.
        let change = tokio::task::block_in_place(|| {
            looker.look(&state);
            fatal_errors.store(state.checkpoint.singletons(), &state.boot, state.gpus.fatal());
            state.inventory.change(state.gpus.counted(), &state.truth().looks)
        });
        if change.is_some() && Instant::now() >= lets_be_until {
            return change;
        }
        *state.looked.lock().unwrap_or_else(PoisonError::into_inner) = Instant::now();
        tokio::select! {
            () = tokio::time::sleep(BEAT.saturating_sub(begun.elapsed()).max(BREATH)) => {}
            () = stop.cancelled() => {}
        }
    }
    None
}

/// Tells, once, that the driver does not answer: nobody else would say that nothing is known of the GPUs' health any more.
pub(crate) async fn keep_watch(state: Arc<NodeState>, stop: CancellationToken) {
    let mut told = false;
    while stop.run_until_cancelled(tokio::time::sleep(SILENT / 3)).await.is_some() {
        let silent = state.looked.lock().unwrap_or_else(PoisonError::into_inner).elapsed();
        if silent >= SILENT && !told {
            let note = format!(
                "the driver has not answered for {} s: it is not known whether GPUs are well; containers go on as they are; look at the \
                 kernel's log (dmesg) for XIDs, and boot the node where it does not recover",
                silent.as_secs()
            );
            tracing::error!("{note}");
            state.tell_node(Severity::Warning, "DriverSilent", &note);
        }
        told = silent >= SILENT;
    }
}

/// GPUs that were said to be ill, by an earlier agent or by the look that the books were made with: that one is well is news, and
/// why it is not, too.
fn ill_at_first(state: &NodeState) -> BTreeSet<GpuUuid> {
    let truth = state.truth();
    let ill = truth.looks.iter().filter(|look| look.health.is_some()).map(|look| &look.uuid);
    ill.chain(&state.were_ill).cloned().collect()
}

impl Looker {
    fn look(&mut self, state: &NodeState) {
        let (watched, owners) = {
            let live = state.regions.live();
            let watched: Vec<Watched<Nonce>> = live
                .iter()
                .map(|(nonce, live)| Watched { key: nonce.clone(), region: live.region().cloned() })
                .collect();
            let owners: BTreeMap<(PodUid, ContainerName), Nonce> = live
                .iter()
                .map(|(nonce, live)| ((live.uid.clone(), live.container.clone()), nonce.clone()))
                .collect();
            (watched, owners)
        };
        let processes = Processes::new(Path::new("/proc"));
        // Of containers that the runtime knows, and that have no region.
        let others: RefCell<BTreeMap<u32, Whose>> = RefCell::default();
        let owner = |pid: u32| {
            let whose = self.runtime.whose(&processes.container(pid)?)?;
            let nonce = owners.get(&(whose.pod.uid.clone(), whose.container.clone())).cloned();
            if nonce.is_none() {
                others.borrow_mut().insert(pid, whose.clone());
            }
            nonce
        };
        let truth = self.auditor.round(&state.gpus, &watched, &owner);
        let foreign = self.foreign.take(Instant::now(), without_share(state, &truth, &others.into_inner()));
        let (raised, health) = (truth.raised.clone(), truth.health_changes.clone());
        state.suspected().note(truth.suspicions.keys(), Instant::now());
        *state.truth() = truth;
        if !health.is_empty() {
            tell_health(state, &health);
            state.refresh(None);
        }
        for (nonce, what) in raised {
            let live = state.regions.live();
            let whose = live.get(&nonce).map(|live| (live.uid.clone(), live.container.clone()));
            drop(live);
            let Some((uid, container)) = whose else { continue };
            let pod = state.containers().grants().record(&uid).map(|record| record.pod.clone());
            if let Some(pod) = pod {
                tell_bypass(state, &Whose { pod, container }, &what);
            }
        }
        for seen in &foreign.new {
            tell_bypass(state, &seen.whose, &seen.words());
        }
        if state.settings().on_bypass == OnBypass::Evict {
            self.evict(state, &foreign.all);
        }
    }

    /// Ends the pods that go around their limits. Again where the API server was away, as long as they do.
    fn evict(&mut self, state: &NodeState, foreign: &[Seen]) {
        let suspects: Vec<Nonce> = state.truth().suspicions.keys().cloned().collect();
        let mut uids: BTreeSet<PodUid> = {
            let live = state.regions.live();
            suspects.iter().filter_map(|nonce| live.get(nonce)).map(|live| live.uid.clone()).collect()
        };
        uids.extend(foreign.iter().map(|seen| seen.whose.pod.uid.clone()));
        self.evicted.retain(|uid, at| uids.contains(uid) && at.elapsed() < EVICT_AGAIN);
        for uid in uids {
            if self.evicted.contains_key(&uid) {
                continue;
            }
            // A pod that was granted nothing is not ours to end.
            let Some(pod) = state.containers().grants().record(&uid).map(|record| record.pod.clone()) else {
                continue;
            };
            self.evicted.insert(uid, Instant::now());
            let cluster = state.cluster.clone();
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

/// Processes on GPUs whose containers have no share of them. One that was granted a share and whose region was lost is none.
fn without_share(state: &NodeState, truth: &Truth<Nonce>, others: &BTreeMap<u32, Whose>) -> Vec<Seen> {
    if !state.pods.is_synced() {
        // Who holds what may be written on pods that nobody has told of.
        return Vec::new();
    }
    let containers = state.containers();
    let grants = containers.grants();
    let holds = |whose: &Whose, gpu: &GpuUuid| {
        let grant = grants.record(&whose.pod.uid).and_then(|record| record.grant_of(&whose.container));
        grant.is_some_and(|grant| grant.shares.iter().any(|share| share.gpu == *gpu))
    };
    let on = truth.looks.iter().zip(&truth.strangers);
    let all = on.flat_map(|(look, pids)| pids.iter().map(|pid| (*pid, &look.uuid)));
    all.filter_map(|(pid, gpu)| {
        let whose = others.get(&pid).filter(|whose| !holds(whose, gpu))?;
        Some(Seen { whose: whose.clone(), gpu: gpu.clone(), pid })
    })
    .collect()
}

fn tell_health(state: &NodeState, changes: &[(GpuUuid, Option<String>)]) {
    for (gpu, ill) in changes {
        let (severity, reason, note) = match ill {
            Some(why) => (
                Severity::Warning,
                "GpuUnhealthy",
                format!("GPU {gpu}: {why}; no container gets it until it is well"),
            ),
            None => (Severity::Normal, "GpuHealthy", format!("GPU {gpu} is well again and is offered")),
        };
        match ill {
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
            state.cluster.pod_event(&pod, severity, reason, &note);
        }
    }
}

fn tell_bypass(state: &NodeState, Whose { pod, container }: &Whose, what: &str) {
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
    state.cluster.pod_event(pod, Severity::Warning, "BypassSuspected", &note);
}
