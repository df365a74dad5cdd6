//! Pods say what they were granted, and may wish for other amounts: both are annotations.

use crate::checkpoint::PodRecord;
use crate::node::{CROWD, NodeState};
use crate::settings::Resize;
use partage_cluster::{Annotated, ClusterError, PodView, Severity};
use partage_core::model::{ContainerName, PodId, PodUid, Share};
use partage_core::resize;
use partage_region::failpoint as fault;
use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::{Duration, Instant};
use tokio_util::sync::CancellationToken;

/// A pod that loses what was written on it is not written on more often.
const AGAIN: Duration = Duration::from_secs(10);
/// While the API server takes nothing.
const LATER: Duration = Duration::from_secs(1);
/// Nothing is missed for longer.
const BEAT: Duration = Duration::from_secs(60);

/// When something was last written on pods, and why it could not be.
#[derive(Default)]
struct Said {
    /// Their grants.
    written: BTreeMap<PodUid, Instant>,
    /// The answer to a resize.
    answered: BTreeMap<PodUid, Instant>,
    /// Grants that cannot be written, with the reason that was reported.
    failing: Reported,
}

/// What was reported about pods, so that each reason is reported once for as long as it lasts.
#[derive(Debug, Default)]
struct Reported(BTreeMap<PodUid, String>);

impl Reported {
    /// Records a reason. Returns whether it is another one than before.
    fn insert(&mut self, uid: &PodUid, reason: &str) -> bool {
        let before = self.0.insert(uid.clone(), reason.to_string());
        before.is_none_or(|before| before != reason)
    }

    /// Forgets a pod for which the operation succeeded.
    fn remove(&mut self, uid: &PodUid) {
        self.0.remove(uid);
    }
}

/// Writes grants on pods and answers wishes, until told to stop.
pub(crate) async fn keep_answering(state: Arc<NodeState>, stop: CancellationToken) {
    let mut pods = state.pods.changed();
    let mut said = Said::default();
    while !stop.is_cancelled() {
        let looked = tokio::time::Instant::now();
        pods.borrow_and_update();
        let changed = state.changed.notified();
        let all_said = answer(&state, &mut said).await;
        tokio::select! {
            () = tokio::time::sleep(if all_said { BEAT } else { LATER }) => {}
            _ = pods.changed() => {}
            () = changed => {}
            () = stop.cancelled() => {}
        }
        tokio::time::sleep_until(looked + CROWD).await;
    }
}

/// Whether every pod says what it should.
async fn answer(state: &NodeState, said: &mut Said) -> bool {
    let mut all_said = true;
    let uids: Vec<PodUid> =
        state.containers().grants().records().map(|record| record.pod.uid.clone()).collect();
    said.written.retain(|uid, _| uids.contains(uid));
    said.answered.retain(|uid, _| uids.contains(uid));
    said.failing.0.retain(|uid, _| uids.contains(uid));
    for uid in uids {
        let Some(pod) = state.pods.by_uid(&uid) else { continue };
        all_said &= wish(state, &pod, &mut said.answered).await;
        let Some(record) = state.containers().grants().record(&uid).cloned() else { continue };
        let missing: BTreeMap<String, Option<String>> = record
            .annotations
            .iter()
            .filter(|(key, value)| pod.pod.annotations.get(*key) != Some(value))
            .map(|(key, value)| (key.clone(), Some(value.clone())))
            .collect();
        if missing.is_empty() {
            continue;
        }
        if said.written.get(&uid).is_some_and(|at| at.elapsed() < AGAIN) {
            // The watch is on its way, or somebody else writes too.
            all_said = false;
            continue;
        }
        match state.cluster.client.annotate_pod(&record.pod, &missing).await {
            Ok(Annotated::Done) => {
                said.failing.remove(&uid);
                said.written.insert(uid, Instant::now());
            }
            Ok(Annotated::Gone) => {}
            Err(error) => {
                all_said = false;
                if said.failing.insert(&uid, &error.to_string()) {
                    tell_unwritten(state, &record.pod, &error);
                }
                // Not at once again: it may be the pod that cannot be annotated.
                said.written.insert(uid, Instant::now());
            }
        }
    }
    all_said
}

/// Reports that a pod's grant cannot be written on it. Where the API server refuses it for good, as when the pod's own annotations leave
/// no space, its author has to act and gets an event.
fn tell_unwritten(state: &NodeState, pod: &PodId, error: &ClusterError) {
    tracing::warn!(namespace = %pod.namespace, pod = %pod.name, %error, "grant cannot be written on the pod; it is tried again");
    if matches!(error, ClusterError::Rejected { .. }) && !error.is_transient() {
        let note = format!(
            "the grant holds, but cannot be written on the pod: {error}; remove annotations of the pod where they take up all space, and \
             the agent writes it"
        );
        state.cluster.pod_event(pod, Severity::Warning, "GrantNotWritten", &note);
    }
}

/// Answers a wish for other amounts, once. Whether it was: who wishes again and again waits for its turn.
async fn wish(state: &NodeState, pod: &PodView, answered: &mut BTreeMap<PodUid, Instant>) -> bool {
    let wish = pod.pod.annotations.get(resize::ANNOTATION);
    let _alone = state.alone_with(&pod.id.uid).await;
    let Some(record) = state.containers().grants().record(&pod.id.uid).cloned() else { return true };
    if record.resize.as_ref() == wish {
        return true;
    }
    let Some(wish) = wish else {
        // The amounts stay; the same wish, written again, is a new one.
        let forgotten = PodRecord { resize: None, ..record };
        state.containers().replace(forgotten.clone());
        if let Err(why) = tokio::task::block_in_place(|| state.save_now(&forgotten)) {
            tracing::warn!(namespace = %pod.id.namespace, pod = %pod.id.name, "{why}");
        }
        return true;
    };
    if answered.get(&pod.id.uid).is_some_and(|at| at.elapsed() < LATER) {
        return false;
    }
    answered.insert(pod.id.uid.clone(), Instant::now());
    let answer = tokio::task::block_in_place(|| resize(state, &record, pod, wish));
    let (severity, reason, note) = match &answer {
        Ok(note) => (Severity::Normal, "Resized", note.clone()),
        Err(why) => (
            Severity::Warning,
            "ResizeRefused",
            format!("{}: {why}; nothing was changed", resize::ANNOTATION),
        ),
    };
    tracing::info!(namespace = %pod.id.namespace, pod = %pod.id.name, "{note}");
    state.cluster.pod_event(&pod.id, severity, reason, &note);
    true
}

fn resize(state: &NodeState, old: &PodRecord, pod: &PodView, wish: &str) -> Result<String, String> {
    let answered = |record: PodRecord| PodRecord { resize: Some(wish.into()), ..record };
    let done = changed(state, old, pod, wish).and_then(|record| {
        fault::point("after-resize-regions");
        let record = answered(record);
        state.save_now(&record).inspect_err(|_| put_back(state, old))?;
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
            state.settle();
            for (key, container) in prepared {
                state.rewrite_spec(&key, &record, &container);
            }
            Ok(format!("the pod's shares are changed: {wish}"))
        }
        Err(why) => {
            // A wish that was refused is answered: it is not tried again until it is another.
            let record = answered(old.clone());
            state.containers().replace(record.clone());
            state.settle();
            // Where that fails too, an agent that starts later answers once more.
            if let Err(why) = state.save_now(&record) {
                tracing::warn!(namespace = %pod.id.namespace, pod = %pod.id.name, "{why}");
            }
            Err(why)
        }
    }
}

/// The new record, which holds already in the pod's regions. The book holds the more of both. An agent that is killed here sets the
/// old limits when it starts.
fn changed(state: &NodeState, old: &PodRecord, pod: &PodView, wish: &str) -> Result<PodRecord, String> {
    let settings = state.settings();
    if settings.resize == Resize::Off {
        return Err("this cluster's settings do not allow it (resize: off): change the manifest".into());
    }
    let grant = resize::read(wish).and_then(|changes| resize::apply(&old.grant, &changes));
    let grant = grant.map_err(|error| error.to_string())?;
    let record = state
        .containers()
        .grants()
        .rewritten(old, &pod.pod, grant, &settings)
        .map_err(|refusal| refusal.0)?;
    state.containers().reserve_resize(old, &record).map_err(|refusal| refusal.0)?;
    let turns = state.gated();
    let mut containers = state.containers().prepared_of(&old.pod.uid);
    // Only who is to have less can refuse, so those are first: nobody has more for a moment and uses it.
    containers.sort_by_key(|(_, container)| {
        let memory =
            |record| shares(record, container).iter().map(|share| share.memory_bytes).collect::<Vec<_>>();
        memory(&record) > memory(old)
    });
    for (nonce, container) in containers {
        let resized = state.regions.resize(&nonce, &shares(&record, &container), &turns);
        resized.inspect_err(|_| put_back(state, old))?;
    }
    Ok(record)
}

/// All regions of a pod have what it had.
fn put_back(state: &NodeState, old: &PodRecord) {
    let turns = state.gated();
    let prepared = state.containers().prepared_of(&old.pod.uid);
    for (nonce, container) in prepared {
        if let Err(error) = state.regions.put_back(&nonce, &shares(old, &container), &turns) {
            let PodId { namespace, name, .. } = &old.pod;
            tracing::warn!(%namespace, pod = %name, %container, %error, "limits cannot be restored");
        }
    }
}

fn shares(record: &PodRecord, container: &ContainerName) -> Vec<Share> {
    record.grant_of(container).map(|grant| grant.shares.clone()).unwrap_or_default()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn reason_is_reported_once_until_it_changes_or_passes() {
        let mut reported = Reported::default();
        let (a, b) = (PodUid::from("a"), PodUid::from("b"));
        assert!(reported.insert(&a, "annotations: Too long"));
        assert!(!reported.insert(&a, "annotations: Too long"));
        assert!(reported.insert(&b, "annotations: Too long"));
        assert!(reported.insert(&a, "no answer"));
        assert!(!reported.insert(&a, "no answer"));
        reported.remove(&a);
        assert!(reported.insert(&a, "no answer"));
    }
}
