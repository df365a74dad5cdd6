//! The annotations of pods: writes grants on them, and answers the resizes that they request.

use crate::resize;
use crate::state::{MIN_PASS_INTERVAL, NodeState};
use partage_cluster::{AnnotateOutcome, ClusterError, Severity};
use partage_core::model::{PodId, PodUid};
use partage_enforce::error_chain::describe;
use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::{Duration, Instant};
use tokio_util::sync::CancellationToken;
use tracing::Instrument;

/// Minimum interval between two writes on one pod: another component may remove the annotations again.
const MIN_WRITE_INTERVAL: Duration = Duration::from_secs(10);
/// Interval between passes while something remains to be written.
const RETRY_INTERVAL: Duration = Duration::from_secs(1);
/// Interval between passes when nothing changes.
const FULL_PASS_INTERVAL: Duration = Duration::from_secs(60);

/// The last writes on pods, and the errors that were reported.
#[derive(Default)]
struct LastWrites {
    /// When a pod's grant was last written.
    grants: BTreeMap<PodUid, Instant>,
    /// When a pod's resize was last answered.
    resizes: BTreeMap<PodUid, Instant>,
    /// Pods whose grant cannot be written, with the error that was reported.
    failing: ReportedReasons,
}

/// The reasons that were reported about pods, so that each is reported once for as long as it lasts.
#[derive(Debug, Default)]
struct ReportedReasons(BTreeMap<PodUid, String>);

impl ReportedReasons {
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
pub(crate) async fn run(state: Arc<NodeState>, stop: CancellationToken) {
    let mut pods = state.adapters.pods.changed();
    let mut writes = LastWrites::default();
    let mut cause = "start";
    while !stop.is_cancelled() {
        let started = tokio::time::Instant::now();
        pods.borrow_and_update();
        let changed = state.changed.notified();
        let pass = write_all(&state, &mut writes);
        let is_complete = pass.instrument(tracing::info_span!("write_annotations", cause)).await;
        let pause = if is_complete { FULL_PASS_INTERVAL } else { RETRY_INTERVAL };
        cause = tokio::select! {
            () = tokio::time::sleep(pause) => if is_complete { "interval" } else { "retry" },
            _ = pods.changed() => "pods changed",
            () = changed => "shares changed",
            () = stop.cancelled() => "stop",
        };
        tokio::time::sleep_until(started + MIN_PASS_INTERVAL).await;
    }
}

/// Runs one pass. Returns whether every pod has the annotations that it should have.
async fn write_all(state: &NodeState, writes: &mut LastWrites) -> bool {
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
            // The watch has not delivered the last write yet, or another component removed it.
            is_complete = false;
            continue;
        }
        match state.adapters.cluster.client.annotate_pod(&record.pod, &missing).await {
            Ok(AnnotateOutcome::Done) => {
                writes.failing.remove(&uid);
                writes.grants.insert(uid, Instant::now());
            }
            Ok(AnnotateOutcome::Gone) => {}
            Err(error) => {
                is_complete = false;
                if writes.failing.insert(&uid, &describe(&error)) {
                    report_unwritten(state, &record.pod, &error);
                }
                // Not retried at once: it may be this pod that cannot be annotated.
                writes.grants.insert(uid, Instant::now());
            }
        }
    }
    is_complete
}

/// Reports that a pod's grant cannot be written to it. If the API server refuses it permanently, for example because the pod's own
/// annotations reach the size limit, its author has to act and gets an event.
fn report_unwritten(state: &NodeState, pod: &PodId, error: &ClusterError) {
    tracing::warn!(namespace = %pod.namespace, pod = %pod.name, error = %describe(error), "cannot write the grant to the pod, retrying");
    if matches!(error, ClusterError::Rejected { .. }) && !error.is_transient() {
        let note = format!(
            "the grant is in force, but cannot be written to the pod: {}; if the pod's annotations reach the size limit, \
             remove some",
            describe(error)
        );
        state.adapters.cluster.pod_event(pod, Severity::Warning, "GrantNotWritten", &note);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn reason_is_reported_once_until_it_changes_or_passes() {
        let mut reported = ReportedReasons::default();
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
