//! The annotations of pods: writes grants on them, and has resizes answered that they ask for.

use crate::resize;
use crate::state::{MIN_PASS_INTERVAL, NodeState};
use partage_cluster::{Annotated, ClusterError, Severity};
use partage_core::model::{PodId, PodUid};
use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::{Duration, Instant};
use tokio_util::sync::CancellationToken;

/// Minimum interval between two writes on one pod: somebody else may remove what is written.
const MIN_WRITE_INTERVAL: Duration = Duration::from_secs(10);
/// Interval between passes while something remains to be written.
const RETRY_INTERVAL: Duration = Duration::from_secs(1);
/// Interval between passes when nothing changes.
const FULL_PASS_INTERVAL: Duration = Duration::from_secs(60);

/// When something was last written on pods, and why it could not be.
#[derive(Default)]
struct Writes {
    /// Their grants.
    grants: BTreeMap<PodUid, Instant>,
    /// The answer to a resize.
    resizes: BTreeMap<PodUid, Instant>,
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

/// Keeps the annotations of all pods with a grant up to date, until stopped.
pub(crate) async fn keep_written(state: Arc<NodeState>, stop: CancellationToken) {
    let mut pods = state.adapters.pods.changed();
    let mut writes = Writes::default();
    while !stop.is_cancelled() {
        let began = tokio::time::Instant::now();
        pods.borrow_and_update();
        let changed = state.changed.notified();
        let is_complete = write_all(&state, &mut writes).await;
        tokio::select! {
            () = tokio::time::sleep(if is_complete { FULL_PASS_INTERVAL } else { RETRY_INTERVAL }) => {}
            _ = pods.changed() => {}
            () = changed => {}
            () = stop.cancelled() => {}
        }
        tokio::time::sleep_until(began + MIN_PASS_INTERVAL).await;
    }
}

/// Runs one pass. Returns whether every pod has the annotations that it should have.
async fn write_all(state: &NodeState, writes: &mut Writes) -> bool {
    let mut is_complete = true;
    let uids: Vec<PodUid> =
        state.containers().grants().records().map(|record| record.pod.uid.clone()).collect();
    writes.grants.retain(|uid, _| uids.contains(uid));
    writes.resizes.retain(|uid, _| uids.contains(uid));
    writes.failing.0.retain(|uid, _| uids.contains(uid));
    for uid in uids {
        let Some(pod) = state.adapters.pods.by_uid(&uid) else { continue };
        is_complete &= resize::answer(state, &pod, &mut writes.resizes).await;
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
        if writes.grants.get(&uid).is_some_and(|at| at.elapsed() < MIN_WRITE_INTERVAL) {
            // The watch has not delivered the last write yet, or somebody else writes too.
            is_complete = false;
            continue;
        }
        match state.adapters.cluster.client.annotate_pod(&record.pod, &missing).await {
            Ok(Annotated::Done) => {
                writes.failing.remove(&uid);
                writes.grants.insert(uid, Instant::now());
            }
            Ok(Annotated::Gone) => {}
            Err(error) => {
                is_complete = false;
                if writes.failing.insert(&uid, &error.to_string()) {
                    report_unwritten(state, &record.pod, &error);
                }
                // Not again at once: it may be the pod that cannot be annotated.
                writes.grants.insert(uid, Instant::now());
            }
        }
    }
    is_complete
}

/// Reports that a pod's grant cannot be written on it. Where the API server refuses it for good, as when the pod's own annotations leave
/// no space, its author has to act and gets an event.
fn report_unwritten(state: &NodeState, pod: &PodId, error: &ClusterError) {
    tracing::warn!(namespace = %pod.namespace, pod = %pod.name, %error, "grant cannot be written on the pod; it is tried again");
    if matches!(error, ClusterError::Rejected { .. }) && !error.is_transient() {
        let note = format!(
            "the grant holds, but cannot be written on the pod: {error}; remove annotations of the pod where they take up all space, and \
             the agent writes it"
        );
        state.adapters.cluster.pod_event(pod, Severity::Warning, "GrantNotWritten", &note);
    }
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
