//! Live resizes: a pod's annotation requests other amounts, and its running containers get them.

use crate::settings::Resize;
use crate::state::NodeState;
use crate::store::PodRecord;
use partage_cluster::{PodView, Severity};
use partage_core::model::{ContainerName, PodId, PodUid, Share};
use partage_core::resize;
use partage_region::failpoint as fault;
use std::collections::BTreeMap;
use std::time::{Duration, Instant};

/// Minimum interval between two answers to one pod.
const MIN_ANSWER_INTERVAL: Duration = Duration::from_secs(1);

/// Answers a pod's request for other amounts, once. Returns false where the pod was answered just before and has to wait.
pub(crate) async fn answer(
    state: &NodeState,
    pod: &PodView,
    answered: &mut BTreeMap<PodUid, Instant>,
) -> bool {
    let request = pod.pod.annotations.get(resize::ANNOTATION);
    let _guard = state.lock_pod(&pod.id.uid).await;
    let Some(record) = state.containers().grants().record(&pod.id.uid).cloned() else { return true };
    if record.resize.as_ref() == request {
        return true;
    }
    let Some(request) = request else {
        // The amounts stay. The same request, written again, is a new one.
        let without = PodRecord { resize: None, ..record };
        state.containers().replace(without.clone());
        save(state, &without);
        return true;
    };
    if answered.get(&pod.id.uid).is_some_and(|at| at.elapsed() < MIN_ANSWER_INTERVAL) {
        return false;
    }
    answered.insert(pod.id.uid.clone(), Instant::now());
    let answer = tokio::task::block_in_place(|| resize(state, &record, pod, request));
    let (severity, reason, note) = match answer {
        Ok(()) => (Severity::Normal, "Resized", format!("the pod's shares are changed: {request}")),
        Err(why) => (
            Severity::Warning,
            "ResizeRefused",
            format!("{}: {why}; nothing was changed", resize::ANNOTATION),
        ),
    };
    tracing::info!(namespace = %pod.id.namespace, pod = %pod.id.name, "{note}");
    state.adapters.cluster.pod_event(&pod.id, severity, reason, &note);
    true
}

fn resize(state: &NodeState, old: &PodRecord, pod: &PodView, request: &str) -> Result<(), String> {
    let answered = |record: PodRecord| PodRecord { resize: Some(request.into()), ..record };
    let done = resize_regions(state, old, pod, request).and_then(|record| {
        fault::point("after-resize-regions");
        let record = answered(record);
        state.save_now(&record).inspect_err(|_| restore_regions(state, old))?;
        fault::point("after-resize-record");
        Ok(record)
    });
    match done {
        Ok(record) => {
            let prepared = {
                let mut containers = state.containers();
                containers.replace(record.clone());
                containers.set_saved(&record.pod.uid, true);
                containers.prepared_of(&record.pod.uid)
            };
            state.apply_turns();
            for (key, container) in prepared {
                state.rewrite_spec(&key, &record, &container);
            }
            Ok(())
        }
        Err(why) => {
            // A request that was refused is answered: it is not tried again until it is another one.
            let record = answered(old.clone());
            state.containers().replace(record.clone());
            state.apply_turns();
            // If this fails too, the next agent answers once more.
            save(state, &record);
            Err(why)
        }
    }
}

fn save(state: &NodeState, record: &PodRecord) {
    if let Err(why) = tokio::task::block_in_place(|| state.save_now(record)) {
        tracing::warn!(namespace = %record.pod.namespace, pod = %record.pod.name, "{why}");
    }
}

/// Sets the limits of the pod's regions, and returns the new record. The ledger then holds the larger of both amounts. An agent
/// that is killed here sets the old limits again when it starts.
fn resize_regions(
    state: &NodeState,
    old: &PodRecord,
    pod: &PodView,
    request: &str,
) -> Result<PodRecord, String> {
    let settings = state.settings();
    if settings.resize == Resize::Off {
        return Err("this cluster's settings do not allow it (resize: off): change the manifest".into());
    }
    let grant = resize::read(request).and_then(|changes| resize::apply(&old.grant, &changes));
    let grant = grant.map_err(|error| error.to_string())?;
    let (record, mut containers) = {
        let mut containers = state.containers();
        let record = containers.grants().rewritten(old, &pod.pod, grant, &settings);
        let record = record.map_err(|refusal| refusal.0)?;
        containers.reserve_resize(old, &record).map_err(|refusal| refusal.0)?;
        let prepared = containers.prepared_of(&old.pod.uid);
        (record, prepared)
    };
    let gated = state.gated();
    // Only a container that is to have less can refuse, so those come first: no container has more for a moment and uses it.
    containers.sort_by_key(|(_, container)| {
        let memory =
            |record| shares(record, container).iter().map(|share| share.memory_bytes).collect::<Vec<_>>();
        memory(&record) > memory(old)
    });
    for (key, container) in containers {
        let resized = state.adapters.regions.resize(&key, &shares(&record, &container), &gated);
        resized.inspect_err(|_| restore_regions(state, old))?;
    }
    Ok(record)
}

/// Sets the limits of all regions of a pod to what they were.
fn restore_regions(state: &NodeState, old: &PodRecord) {
    let gated = state.gated();
    let prepared = state.containers().prepared_of(&old.pod.uid);
    for (key, container) in prepared {
        if let Err(error) = state.adapters.regions.put_back(&key, &shares(old, &container), &gated) {
            let PodId { namespace, name, .. } = &old.pod;
            tracing::warn!(%namespace, pod = %name, %container, %error, "limits cannot be restored");
        }
    }
}

fn shares(record: &PodRecord, container: &ContainerName) -> Vec<Share> {
    record.grant_of(container).map(|grant| grant.shares.clone()).unwrap_or_default()
}
