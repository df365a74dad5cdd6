//! Garbage collection: releases the grants of pods that have ended and removes orphaned files.
//!
//! A pod holds its grant until nothing of it can use a GPU any more: the pod is finished or gone from the API server, *and* the
//! runtime reports no running container of it. A force-deleted pod disappears from the API server at once, while its containers may
//! still run.

use super::lifecycle::{OrphanCriteria, PodPhase, REMOVE_STEPS, RemoveStep};
use crate::containers::ContainerKey;
use crate::device_owner::{ContainerState, DeviceHolder, RuntimeContainer};
use crate::refusal_log::StartSubject;
use crate::rejections::{self, requests_served_resource};
use crate::state::{MIN_PASS_INTERVAL, NodeState, logged_name, now};
use partage_cluster::PodView;
use partage_core::model::PodUid;
use partage_enforce::error_chain::describe;
use partage_region::failpoint as fault;
use std::collections::BTreeSet;
use std::fmt;
use std::sync::Arc;
use std::time::{Duration, Instant};
use tokio_util::sync::CancellationToken;
use tracing::Instrument;

/// Interval between full passes when nothing changes.
const FULL_PASS_INTERVAL: Duration = Duration::from_secs(60);
/// Interval between passes while a pod that has ended still has running containers.
const DRAIN_POLL_INTERVAL: Duration = Duration::from_millis(500);

/// Runs a pass whenever pods change, and once a minute, until stopped.
pub(crate) async fn run(state: Arc<NodeState>, stop: CancellationToken) {
    let mut pods = state.adapters.pods.changed();
    let mut reported = BTreeSet::new();
    let mut last_check = Instant::now();
    let mut cause = "start";
    while !stop.is_cancelled() {
        pods.borrow_and_update();
        let pass = async {
            rejections::report(&state, &mut reported);
            let is_draining = collect_garbage(&state).await;
            // Also where nothing scrapes the metrics.
            if last_check.elapsed() >= FULL_PASS_INTERVAL {
                tokio::task::block_in_place(|| state.check_consistency());
                last_check = Instant::now();
            }
            is_draining
        };
        let is_draining = pass.instrument(tracing::info_span!("collect_garbage", cause)).await;
        let pause = if is_draining { DRAIN_POLL_INTERVAL } else { FULL_PASS_INTERVAL };
        cause = tokio::select! {
            () = tokio::time::sleep(pause) => if is_draining { "draining pods" } else { "interval" },
            _ = pods.changed(), if !is_draining => {
                tokio::time::sleep(MIN_PASS_INTERVAL).await;
                "pods changed"
            }
            () = stop.cancelled() => "stop",
        };
    }
}

/// Runs one pass. Returns whether a pod that has ended still has running containers.
async fn collect_garbage(state: &NodeState) -> bool {
    if !state.adapters.pods.is_synced() {
        return false;
    }
    // A file is not orphaned before it is known which pods hold grants.
    if let Err(refusal) = state.resolve_pods().await {
        tracing::debug!(cause = refusal.sentence(), "garbage collection postponed");
        return true;
    }
    let mut is_draining = false;
    let ended = state.containers().ended_pods(|uid| phase(state.adapters.pods.by_uid(uid).as_deref()), now());
    if !ended.is_empty() {
        // Without the runtime's report nothing is released: a container may still use its GPU.
        let Ok(containers) = state.adapters.runtime.containers().await else { return true };
        for (pod, why) in ended {
            let uid = &pod.uid;
            if !has_ended(uid, &containers) {
                is_draining = true;
                continue;
            }
            let _guard = state.lock_pod(uid).await;
            // A container may have started in the meantime.
            let Ok(containers) = state.adapters.runtime.containers().await else { return true };
            if !has_ended(uid, &containers) {
                is_draining = true;
                continue;
            }
            tracing::info!(namespace = %pod.namespace, pod = %pod.name, %uid, cause = %why, "pod ended, its shares are released");
            tokio::task::block_in_place(|| state.end_pod(uid));
        }
    }
    tokio::task::block_in_place(|| remove_orphans(state));
    state.refusals.retain(|subject| match subject {
        StartSubject::Container(uid, _) => state.pod_id(uid).is_some(),
        StartSubject::Devices(resource, ids) => state.containers().newest_key(resource, ids).is_some(),
    });
    is_draining
}

/// Returns a pod's phase by the API server's list.
fn phase(listed: Option<&PodView>) -> PodPhase {
    match listed {
        Some(pod) if pod.is_finished() => PodPhase::Finished,
        Some(_) => PodPhase::Active,
        None => PodPhase::Absent,
    }
}

/// Returns whether no container of a pod runs or is about to.
fn has_ended(uid: &PodUid, containers: &[RuntimeContainer]) -> bool {
    containers.iter().filter(|one| one.uid == *uid).all(|one| one.state == ContainerState::Exited)
}

impl NodeState {
    /// Releases a pod that has ended, and removes its files.
    pub(crate) fn end_pod(&self, uid: &PodUid) {
        fault::point("before-forget");
        let keys = self.containers().end_pod(uid);
        for key in &keys {
            self.remove_container(key);
        }
        // Last: an agent that is killed before this ends the pod again.
        self.remove_record(uid);
        self.apply_turns();
        self.changed.notify_waiters();
    }

    /// Removes everything of one container, in the order of [`REMOVE_STEPS`].
    pub(crate) fn remove_container(&self, key: &ContainerKey) {
        let owner = self.containers().owner(key).map(|owner| owner.pod.clone());
        let pod = owner.and_then(|uid| self.pod_id(&uid));
        let failed = |error: &dyn fmt::Display, message: &'static str| {
            let (namespace, name) = logged_name(pod.as_ref());
            tracing::warn!(namespace, pod = name, key = %key, %error, "{message}");
        };
        for step in REMOVE_STEPS {
            match step {
                RemoveStep::Spec => {
                    if let Err(error) = self.adapters.cdi.remove(&key.0) {
                        failed(&error, "cannot remove a CDI spec");
                    }
                    fault::point("after-forget-cdi");
                }
                RemoveStep::Region => {
                    if let Err(error) = self.adapters.regions.remove(key) {
                        failed(&describe(&error), "cannot remove the region of an ended container");
                    }
                    fault::point("after-forget-region");
                }
                RemoveStep::Allocation => {
                    if let Err(error) = self.adapters.store.remove_allocation(key) {
                        failed(&describe(&error), "cannot remove the record of an allocation");
                    }
                }
            }
        }
        self.containers().remove(key);
    }
}

/// Removes the files of containers that belong to no pod.
fn remove_orphans(state: &NodeState) {
    // Read before kubelet's checkpoint, so that files which are created meanwhile are not among them.
    let specs = state.adapters.cdi.names().unwrap_or_default().into_iter().map(ContainerKey);
    let regions = state.adapters.regions.on_disk();
    let kept = regions.iter().filter(|key| state.adapters.regions.must_be_kept(key)).cloned().collect();
    let on_disk: BTreeSet<ContainerKey> = specs.chain(regions).collect();
    let checkpoint_written = state.adapters.device_owners.checkpoint_written();
    let Some(held) = state.adapters.device_owners.all() else { return };
    let pods = state.adapters.pods.all();
    let settings = state.settings();
    let orphans = {
        let containers = state.containers();
        // Kubelet keeps pods that are gone in its checkpoint until it allocates their devices again.
        let exists = |uid: &PodUid| {
            state.adapters.pods.by_uid(uid).is_some() || containers.grants().record(uid).is_some()
        };
        let held = held.into_iter().filter(|holder| exists(&holder.uid));
        let held: BTreeSet<ContainerKey> = held.filter_map(|DeviceHolder { key, .. }| key).collect();
        let is_waiting = |pod: &PodView| {
            !pod.is_finished()
                && requests_served_resource(pod, &settings)
                && !containers.has_all_keys(&pod.id.uid)
        };
        containers.orphans(&OrphanCriteria {
            on_disk: &on_disk,
            kept: &kept,
            held: &held,
            checkpoint_written,
            pods_waiting: pods.iter().any(|pod| is_waiting(pod)),
            now: now(),
        })
    };
    for key in &orphans {
        tracing::debug!(%key, "removing orphaned files");
        state.remove_container(key);
    }
}
