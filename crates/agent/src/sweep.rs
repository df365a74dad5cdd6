//! Garbage collection: releases the grants of pods that have ended and removes orphaned files.
//!
//! A pod holds its grant until nothing of it can use a GPU any more: the pod is finished or gone from the API server, *and* the
//! runtime reports no running container of it. A force-deleted pod disappears from the API server at once, while its containers may
//! still run.

use crate::containers::lifecycle::{OrphanView, PodPhase};
use crate::identity::{ContainerState, Holder, RunningContainer};
use crate::node::{CROWD, NodeState, now};
use crate::plugin::Nonce;
use crate::refusals::StartSubject;
use crate::resources::CountResource;
use crate::settings::Settings;
use partage_cluster::{PodView, Severity};
use partage_core::model::PodUid;
use std::collections::BTreeSet;
use std::sync::Arc;
use std::time::{Duration, Instant};
use tokio_util::sync::CancellationToken;

/// Interval between full passes when nothing changes.
const FULL_PASS_INTERVAL: Duration = Duration::from_secs(60);
/// Interval between passes while a pod that has ended still has running containers.
const DRAIN_POLL_INTERVAL: Duration = Duration::from_millis(500);
/// Maximum age of a rejected pod that still gets an event: an earlier agent has explained older ones.
const MAX_REJECTION_AGE: Duration = Duration::from_secs(600);

/// Runs a pass whenever pods change, and once a minute.
pub(crate) async fn keep_sweeping(state: Arc<NodeState>, stop: CancellationToken) {
    let mut pods = state.pods.changed();
    let mut told = BTreeSet::new();
    let mut compared = Instant::now();
    while !stop.is_cancelled() {
        pods.borrow_and_update();
        tell_rejected(&state, &mut told);
        let waits = sweep(&state).await;
        // Also where nothing scrapes the metrics.
        if compared.elapsed() >= FULL_PASS_INTERVAL {
            tokio::task::block_in_place(|| state.compare());
            compared = Instant::now();
        }
        let pause = if waits { DRAIN_POLL_INTERVAL } else { FULL_PASS_INTERVAL };
        tokio::select! {
            () = tokio::time::sleep(pause) => {}
            _ = pods.changed(), if !waits => tokio::time::sleep(CROWD).await,
            () = stop.cancelled() => {}
        }
    }
}

/// Runs one pass. Returns whether a pod that has ended still has running containers.
async fn sweep(state: &NodeState) -> bool {
    if !state.pods.is_synced() {
        return false;
    }
    // A file is not orphaned before it is known which pods hold grants.
    if let Err(refusal) = state.resolve_pods().await {
        tracing::debug!("{refusal}");
        return true;
    }
    let mut waits = false;
    let ended = state.containers().ended_pods(|uid| phase(state.pods.by_uid(uid).as_deref()), now());
    if !ended.is_empty() {
        // Without the runtime's report nothing is released: a container may still use its GPU.
        let Ok(containers) = state.runtime.containers().await else { return true };
        for (pod, why) in ended {
            let uid = &pod.uid;
            if !ends(uid, &containers) {
                waits = true;
                continue;
            }
            let _alone = state.alone_with(uid).await;
            // A container may have started in the meantime.
            let Ok(containers) = state.runtime.containers().await else { return true };
            if !ends(uid, &containers) {
                waits = true;
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
    waits
}

/// What the API server's list says of a pod.
fn phase(listed: Option<&PodView>) -> PodPhase {
    match listed {
        Some(pod) if pod.is_finished() => PodPhase::Finished,
        Some(_) => PodPhase::Active,
        None => PodPhase::Absent,
    }
}

/// Whether nothing of a pod runs or is about to.
fn ends(uid: &PodUid, containers: &[RunningContainer]) -> bool {
    containers.iter().filter(|one| one.uid == *uid).all(|one| one.state == ContainerState::Exited)
}

/// Writes an event on each pod that kubelet rejected: why, and what happens next.
fn tell_rejected(state: &NodeState, told: &mut BTreeSet<PodUid>) {
    let pods = state.pods.all();
    told.retain(|uid| pods.iter().any(|pod| pod.id.uid == *uid));
    for pod in pods.iter().filter(|pod| is_ours(pod, &state.settings())) {
        let Some(said) = &pod.rejected else { continue };
        let record_boot = state.containers().grants().record(&pod.id.uid).map(|record| record.boot.clone());
        let earlier = record_boot.map(|boot| boot != state.boot);
        let created = u64::try_from(pod.created).unwrap_or(0);
        let recent = now() / 1_000_000_000 < created + MAX_REJECTION_AGE.as_secs();
        if (earlier.is_none() && !recent) || !told.insert(pod.id.uid.clone()) {
            continue;
        }
        let (reason, why) = rejection(said, earlier == Some(true));
        let note = format!(
            "{why}: kubelet failed the pod (UnexpectedAdmissionError), and what it held is free; its controller creates a replacement, \
             and a pod without a controller has to be created again"
        );
        state.cluster.pod_event(&pod.id, Severity::Warning, reason, &note);
    }
}

/// Kubelet's words where it has no device plugin, or lost the connection to it while it waited for an answer. The agent's own
/// refusals have the code `FailedPrecondition`.
const AGENT_UNAVAILABLE: [&str; 5] = [
    "no healthy devices present",
    "unregistered device",
    "has been stopped",
    "code = Unavailable",
    "code = Canceled",
];

/// Returns the reason and the cause of a rejection, by what kubelet says of it.
fn rejection(said: &str, rebooted: bool) -> (&'static str, String) {
    // Without kubelet's own words around it.
    let plain = said.trim_start_matches("Pod was rejected: ").trim_start_matches("Allocate failed due to ");
    let plain = plain.trim_end_matches(", which is unexpected").trim_end_matches('.');
    if said.is_empty() || AGENT_UNAVAILABLE.iter().any(|words| said.contains(words)) {
        let why = if rebooted {
            "the node was rebooted, and kubelet admitted its pods before the Partage agent had registered"
        } else {
            "kubelet admitted the pod while the Partage agent was unavailable"
        };
        return ("AgentUnavailable", why.into());
    }
    let why = if said.contains("requested number of devices unavailable") {
        format!(
            "kubelet has fewer free devices than the pod requests, as when another pod came first ({plain})"
        )
    } else if said.contains("rpc error") {
        format!("the Partage agent refused the pod's devices ({plain})")
    } else {
        format!("kubelet rejected the pod ({plain})")
    };
    ("NotAdmitted", why)
}

/// Whether a pod asks for something that is given here.
fn is_ours(pod: &PodView, settings: &Settings) -> bool {
    let resources: Vec<String> = CountResource::enabled(settings).iter().map(CountResource::name).collect();
    let asks = |resource: &String| pod.pod.containers.iter().any(|one| one.amount(resource).is_some());
    resources.iter().any(asks)
}

/// Removes the files of containers that belong to no pod.
fn remove_orphans(state: &NodeState) {
    // Before kubelet's checkpoint is read: what is made meanwhile is not among them.
    let specs = state.cdi.names().unwrap_or_default().into_iter().map(Nonce);
    let on_disk: BTreeSet<Nonce> = specs.chain(state.regions.on_disk()).collect();
    let checkpoint_written = state.kubelet.written();
    let Some(held) = state.kubelet.all() else { return };
    let pods = state.pods.all();
    let settings = state.settings();
    let orphans = {
        let containers = state.containers();
        // Kubelet remembers pods that are gone until it gives their devices to others.
        let exists =
            |uid: &PodUid| state.pods.by_uid(uid).is_some() || containers.grants().record(uid).is_some();
        let held = held.into_iter().filter(|holder| exists(&holder.uid));
        let held: BTreeSet<Nonce> = held.filter_map(|Holder { nonce, .. }| nonce).collect();
        let waits = |pod: &PodView| {
            !pod.is_finished() && is_ours(pod, &settings) && !containers.has_all_keys(&pod.id.uid)
        };
        containers.orphans(&OrphanView {
            on_disk: &on_disk,
            held: &held,
            checkpoint_written,
            pods_waiting: pods.iter().any(|pod| waits(pod)),
            now: now(),
        })
    };
    for key in &orphans {
        tracing::debug!(nonce = %key, "removed orphaned grant files");
        state.remove_container(key);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn rejection_quotes_kubelet_unless_the_agent_was_unavailable() {
        let away = "Pod was rejected: Allocate failed due to no healthy devices present; cannot allocate unhealthy devices partage.dev/gpu, which is unexpected";
        assert_eq!(rejection(away, false).0, "AgentUnavailable");
        assert!(rejection(away, true).1.starts_with("the node was rebooted"));
        let unregistered = "Pod was rejected: Allocate failed due to can't allocate unregistered device partage.dev/gpu, which is unexpected";
        assert_eq!(rejection(unregistered, false).0, "AgentUnavailable");
        for (said, why) in [
            (
                "Pod was rejected: Allocate failed due to requested number of devices unavailable for partage.dev/gpu. Requested: 3, Available: 1, which is unexpected",
                "kubelet has fewer free devices than the pod requests, as when another pod came first (requested number of devices \
                 unavailable for partage.dev/gpu. Requested: 3, Available: 1)",
            ),
            (
                "Pod was rejected: Allocate failed due to rpc error: code = FailedPrecondition desc = the answer cannot be recorded: no space left, which is unexpected",
                "the Partage agent refused the pod's devices (rpc error: code = FailedPrecondition desc = the answer \
                 cannot be recorded: no space left)",
            ),
            ("Pod was rejected: something new", "kubelet rejected the pod (something new)"),
        ] {
            assert_eq!(rejection(said, false), ("NotAdmitted", why.to_string()));
            assert_eq!(rejection(said, true).1, why, "a reboot has nothing to do with it");
        }
    }

    #[test]
    fn connection_lost_during_allocate_is_no_refusal() {
        for said in [
            "Pod was rejected: Allocate failed due to rpc error: code = Canceled desc = grpc: the client connection is closing, which is unexpected",
            "Pod was rejected: Allocate failed due to rpc error: code = Unavailable desc = error reading from server: EOF, which is unexpected",
        ] {
            assert_eq!(
                rejection(said, false),
                (
                    "AgentUnavailable",
                    "kubelet admitted the pod while the Partage agent was unavailable".to_string()
                )
            );
        }
    }
}
