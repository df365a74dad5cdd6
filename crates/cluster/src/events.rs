//! Events, as `kubectl describe` shows them.
//!
//! Recording never waits and never fails. Events are queued; one task writes them to the API server and retries while
//! that is unreachable. Repetitions within ten minutes are counted in one event.

mod queue;

use crate::client::ApiClient;
use crate::error::ClusterError;
use k8s_openapi::api::core::v1::ObjectReference;
use k8s_openapi::api::events::v1::Event;
use k8s_openapi::apimachinery::pkg::apis::meta::v1::{MicroTime, ObjectMeta};
use kube::Api;
use kube::api::{Patch, PatchParams, PostParams};
use partage_core::model::{NodeName, PodId};
use queue::{DueEvent, EventQueue, Occurrence, QueueWait};
use serde_json::json;
use std::fmt;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};
use tokio::sync::Notify;
use tokio_util::task::AbortOnDropHandle;

/// The API server's limit for notes.
const MAX_NOTE_BYTES: usize = 1024;
/// The API server's limit for reporting instances.
const MAX_INSTANCE_BYTES: usize = 128;
/// The API server's limit for names, less the number that is appended.
const MAX_NAME_BYTES: usize = 230;
/// Where events about cluster-scoped objects are.
const DEFAULT_NAMESPACE: &str = "default";

/// Whether an event needs attention.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Severity {
    /// It reports normal operation.
    Normal,
    /// It reports a problem.
    Warning,
}

impl Severity {
    fn name(self) -> &'static str {
        match self {
            Severity::Normal => "Normal",
            Severity::Warning => "Warning",
        }
    }
}

/// Returns a reference to a pod.
pub fn pod_reference(pod: &PodId) -> ObjectReference {
    ObjectReference {
        api_version: Some("v1".into()),
        kind: Some("Pod".into()),
        namespace: Some(pod.namespace.to_string()),
        name: Some(pod.name.to_string()),
        uid: Some(pod.uid.to_string()),
        ..ObjectReference::default()
    }
}

/// Returns a reference to a node. Its name serves as UID, as in kubelet's own events: `kubectl describe node` selects by it.
pub fn node_reference(node: &NodeName) -> ObjectReference {
    ObjectReference {
        api_version: Some("v1".into()),
        kind: Some("Node".into()),
        name: Some(node.to_string()),
        uid: Some(node.to_string()),
        ..ObjectReference::default()
    }
}

/// Records events of one component. Cloning it is cheap; all clones share one queue.
///
/// ```no_run
/// use partage_cluster::{ApiClient, Severity, Recorder};
/// use k8s_openapi::api::core::v1::ResourceQuota;
/// use kube::Resource;
///
/// # fn record(client: &ApiClient, quota: &ResourceQuota) {
/// let recorder = Recorder::start(client, "partage.dev/control", "control-0");
/// recorder.record(&quota.object_ref(&()), Severity::Warning, "QuotaExceeded", "4 GiB requested, 2 GiB free");
/// # }
/// ```
#[derive(Clone)]
pub struct Recorder {
    shared: Arc<RecorderState>,
    _task: Arc<AbortOnDropHandle<()>>,
}

impl fmt::Debug for Recorder {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Recorder").finish_non_exhaustive()
    }
}

impl Recorder {
    /// Starts the task that writes events. `controller` names the component (`partage.dev/node`), `instance` the process
    /// (its node or pod).
    ///
    /// Must be called inside a tokio runtime.
    pub fn start(client: &ApiClient, controller: &str, instance: &str) -> Recorder {
        let shared = Arc::new(RecorderState::default());
        let writer = EventWriter {
            client: client.clone(),
            controller: controller.to_string(),
            instance: truncate(instance, MAX_INSTANCE_BYTES).to_string(),
            shared: Arc::clone(&shared),
        };
        Recorder { shared, _task: Arc::new(AbortOnDropHandle::new(tokio::spawn(writer.run()))) }
    }

    /// Records an event about an object, in the background. `reason` is a CamelCase noun phrase (`GpuUnhealthy`), `note` a
    /// sentence.
    pub fn record(&self, regarding: &ObjectReference, severity: Severity, reason: &'static str, note: &str) {
        let note = truncate(note, MAX_NOTE_BYTES).to_string();
        let occurrence = Occurrence { regarding: regarding.clone(), severity, reason, note };
        if self.shared.queue().push(occurrence, Instant::now()) {
            self.shared.pushed.notify_one();
        } else {
            tracing::warn!(reason, "event dropped: too many events wait for the API server");
        }
    }

    /// Waits until all recorded events are written, for no longer than `timeout`: for a process that is about to exit.
    pub async fn flush(&self, timeout: Duration) {
        // Events that are not written by then are in the log.
        let _ = tokio::time::timeout(timeout, self.shared.all_written()).await;
    }
}

#[derive(Default)]
struct RecorderState {
    queue: Mutex<EventQueue>,
    pushed: Notify,
    /// An event was written, or given up.
    finished: Notify,
}

impl RecorderState {
    fn queue(&self) -> MutexGuard<'_, EventQueue> {
        self.queue.lock().unwrap_or_else(PoisonError::into_inner)
    }

    async fn all_written(&self) {
        loop {
            // Created before the check, so that an event that finishes meanwhile wakes this task.
            let finished = self.finished.notified();
            if self.queue().is_all_written() {
                return;
            }
            finished.await;
        }
    }
}

struct EventWriter {
    client: ApiClient,
    controller: String,
    instance: String,
    shared: Arc<RecorderState>,
}

impl EventWriter {
    async fn run(self) {
        let mut backoff = self.client.backoff();
        loop {
            // A statement of its own: the lock must not be held across an await.
            let next = self.shared.queue().next(Instant::now());
            match next {
                Ok(due) => match self.write(&due).await {
                    Ok(()) => {
                        backoff.reset();
                        self.shared.queue().written(&due, Instant::now());
                        self.shared.finished.notify_waiters();
                    }
                    Err(error) if error.is_transient() => tokio::time::sleep(backoff.next_delay()).await,
                    Err(error) => {
                        tracing::debug!(%error, "event rejected");
                        self.shared.queue().rejected(&due, Instant::now());
                        self.shared.finished.notify_waiters();
                    }
                },
                Err(QueueWait::ForPush) => self.shared.pushed.notified().await,
                Err(QueueWait::Until(moment)) => tokio::select! {
                    () = self.shared.pushed.notified() => {}
                    () = tokio::time::sleep_until(moment.into()) => {}
                },
            }
        }
    }

    async fn write(&self, due: &DueEvent) -> Result<(), ClusterError> {
        let regarding = &due.occurrence.regarding;
        let namespace = regarding.namespace.as_deref().unwrap_or(DEFAULT_NAMESPACE);
        let events: Api<Event> = Api::namespaced(self.client.kube().clone(), namespace);
        let subject = regarding.name.as_deref().unwrap_or_default();
        let name = event_name(subject, due.number);
        let operation = || format!("recording event {} about {subject}", due.occurrence.reason);
        if due.is_new {
            let event = self.event(name, namespace, due);
            match self.client.request(operation, events.create(&PostParams::default(), &event)).await {
                // It was created before, and the answer was lost.
                Err(ClusterError::Rejected { code: 409, .. }) => Ok(()),
                other => other.map(drop),
            }
        } else {
            let series = json!({"count": due.count, "lastObservedTime": MicroTime(due.last)});
            let patch = Patch::Merge(json!({"series": series}));
            let options = PatchParams::default();
            self.client.request(operation, events.patch(&name, &options, &patch)).await.map(drop)
        }
    }

    fn event(&self, name: String, namespace: &str, due: &DueEvent) -> Event {
        let Occurrence { regarding, severity, reason, note } = &due.occurrence;
        Event {
            metadata: ObjectMeta {
                name: Some(name),
                namespace: Some(namespace.into()),
                ..ObjectMeta::default()
            },
            event_time: Some(MicroTime(due.first)),
            reporting_controller: Some(self.controller.clone()),
            reporting_instance: Some(self.instance.clone()),
            action: Some((*reason).into()),
            reason: Some((*reason).into()),
            type_: Some(severity.name().into()),
            note: Some(note.clone()),
            regarding: Some(regarding.clone()),
            ..Event::default()
        }
    }
}

/// Returns a name that no other event has, beginning with the object's.
fn event_name(subject: &str, number: u64) -> String {
    let subject = truncate(subject, MAX_NAME_BYTES).trim_end_matches(['.', '-']);
    format!("{subject}.{number:x}")
}

/// Truncates a text to at most this many bytes, ending at a character's boundary.
fn truncate(text: &str, max_bytes: usize) -> &str {
    if text.len() <= max_bytes { text } else { &text[..text.floor_char_boundary(max_bytes)] }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_and_notes_are_truncated_to_what_the_server_accepts() {
        assert_eq!(event_name("pod-1", 255), "pod-1.ff");
        let long = format!("{}-{}", "a".repeat(MAX_NAME_BYTES - 1), "b".repeat(20));
        let name = event_name(&long, u64::MAX);
        assert!(name.len() <= 253 && !name.contains("-."), "{name}");
        assert_eq!(truncate("éé", 3), "é");
        assert_eq!(truncate("short", 1024), "short");
    }
}
