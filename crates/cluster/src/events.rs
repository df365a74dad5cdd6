//! Events: what people see under `kubectl describe`.
//!
//! Telling never waits and never fails. What is told is kept in a small book; one task writes it to the API server, and goes
//! on trying while that is away. The same again within ten minutes is counted, not written anew.

mod book;

use crate::connection::{Cluster, in_time};
use crate::error::ClusterError;
use crate::pauses::Pauses;
use book::{Book, Due, Told, Wait};
use k8s_openapi::api::core::v1::ObjectReference;
use k8s_openapi::api::events::v1::Event;
use k8s_openapi::apimachinery::pkg::apis::meta::v1::{MicroTime, ObjectMeta};
use kube::api::{Patch, PatchParams, PostParams};
use kube::{Api, Client};
use partage_core::model::{NodeName, PodId};
use serde_json::json;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};
use tokio::sync::Notify;
use tokio_util::task::AbortOnDropHandle;

/// Who tells.
const CONTROLLER: &str = "partage.dev/node";
/// What the API server takes.
const LONGEST_NOTE: usize = 1024;
const LONGEST_INSTANCE: usize = 128;
/// With the number that is added, what a name may be.
const LONGEST_NAME: usize = 230;

/// What an event is about.
#[derive(Clone, Copy, Debug)]
pub enum About<'a> {
    /// A pod.
    Pod(&'a PodId),
    /// This node.
    Node,
}

/// Whether an event is bad news.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Severity {
    /// It is not.
    Normal,
    /// It is.
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

impl Cluster {
    /// Tells people something, in the background. `reason` is one word (`GpuLost`), `note` a sentence.
    pub fn tell(&self, about: About<'_>, severity: Severity, reason: &'static str, note: &str) {
        let pod = match about {
            About::Pod(pod) => Some(pod.clone()),
            About::Node => None,
        };
        self.events.tell(Told { pod, severity, reason, note: cut(note, LONGEST_NOTE).to_string() });
    }

    /// Waits until everything that was told is written, and no longer than this: for who is about to end.
    pub async fn all_told(&self, patience: Duration) {
        // What is not written by then is in the log.
        let _ = tokio::time::timeout(patience, self.events.desk.all_written()).await;
    }
}

/// The book, and the task that writes it out.
pub(crate) struct Events {
    desk: Arc<Desk>,
    _task: AbortOnDropHandle<()>,
}

impl Events {
    pub(crate) fn start(client: Client, node: NodeName) -> Events {
        let desk = Arc::new(Desk::default());
        let writer = Writer { client, node, desk: desk.clone() };
        Events { desk, _task: AbortOnDropHandle::new(tokio::spawn(writer.write())) }
    }

    fn tell(&self, told: Told) {
        let reason = told.reason;
        if self.desk.book().tell(told, Instant::now()) {
            self.desk.more.notify_one();
        } else {
            tracing::warn!("an event ({reason}) is lost: too many of them wait for the API server");
        }
    }
}

#[derive(Default)]
struct Desk {
    book: Mutex<Book>,
    more: Notify,
    /// Something was written or given up.
    less: Notify,
}

impl Desk {
    fn book(&self) -> MutexGuard<'_, Book> {
        self.book.lock().unwrap_or_else(PoisonError::into_inner)
    }

    async fn all_written(&self) {
        loop {
            // What is written while we look is noticed.
            let less = self.less.notified();
            if self.book().all_written() {
                return;
            }
            less.await;
        }
    }
}

struct Writer {
    client: Client,
    node: NodeName,
    desk: Arc<Desk>,
}

impl Writer {
    async fn write(self) {
        let mut pauses = Pauses::of(&self.node);
        loop {
            // The lock must not be held while anything is waited for.
            let next = self.desk.book().next(Instant::now());
            match next {
                Ok(due) => match self.send(&due).await {
                    Ok(()) => {
                        pauses.reset();
                        self.desk.book().written(&due, Instant::now());
                        self.desk.less.notify_waiters();
                    }
                    Err(error) if error.passes() => tokio::time::sleep(pauses.longer()).await,
                    Err(error) => {
                        tracing::debug!("an event is not taken: {error}");
                        self.desk.book().refused(&due, Instant::now());
                        self.desk.less.notify_waiters();
                    }
                },
                Err(Wait::ForMore) => self.desk.more.notified().await,
                Err(Wait::Until(moment)) => tokio::select! {
                    () = self.desk.more.notified() => {}
                    () = tokio::time::sleep_until(moment.into()) => {}
                },
            }
        }
    }

    async fn send(&self, due: &Due) -> Result<(), ClusterError> {
        let regarding = self.regarding(&due.told);
        let namespace = regarding.namespace.clone().unwrap_or_else(|| "default".to_string());
        let events: Api<Event> = Api::namespaced(self.client.clone(), &namespace);
        let subject = regarding.name.clone().unwrap_or_default();
        let name = name(&subject, due.number);
        let doing = || format!("telling of {subject} ({})", due.told.reason);
        if due.fresh {
            let event = self.event(name, namespace, regarding, due);
            match in_time(doing, events.create(&PostParams::default(), &event)).await {
                // Written before, and the answer was lost.
                Err(ClusterError::Refused { code: 409, .. }) => Ok(()),
                other => other.map(drop),
            }
        } else {
            let series = json!({"count": due.count, "lastObservedTime": MicroTime(due.last)});
            let patch = Patch::Merge(json!({"series": series}));
            in_time(doing, events.patch(&name, &PatchParams::default(), &patch)).await.map(drop)
        }
    }

    fn event(&self, name: String, namespace: String, regarding: ObjectReference, due: &Due) -> Event {
        Event {
            metadata: ObjectMeta { name: Some(name), namespace: Some(namespace), ..ObjectMeta::default() },
            event_time: Some(MicroTime(due.first)),
            reporting_controller: Some(CONTROLLER.into()),
            reporting_instance: Some(cut(self.node.as_str(), LONGEST_INSTANCE).into()),
            action: Some(due.told.reason.into()),
            reason: Some(due.told.reason.into()),
            type_: Some(due.told.severity.name().into()),
            note: Some(due.told.note.clone()),
            regarding: Some(regarding),
            ..Event::default()
        }
    }

    fn regarding(&self, told: &Told) -> ObjectReference {
        let of = |kind: &str, name: &str, uid: &str| ObjectReference {
            api_version: Some("v1".into()),
            kind: Some(kind.into()),
            name: Some(name.into()),
            uid: Some(uid.into()),
            ..ObjectReference::default()
        };
        match &told.pod {
            Some(pod) => ObjectReference {
                namespace: Some(pod.namespace.to_string()),
                ..of("Pod", pod.name.as_str(), pod.uid.as_str())
            },
            // As kubelet does: `kubectl describe node` looks for its name.
            None => of("Node", self.node.as_str(), self.node.as_str()),
        }
    }
}

/// A name that no other event has, beginning with what it is about.
fn name(subject: &str, number: u64) -> String {
    let subject = cut(subject, LONGEST_NAME).trim_end_matches(['.', '-']);
    format!("{subject}.{number:x}")
}

/// At most so many bytes, and no half characters.
fn cut(text: &str, bytes: usize) -> &str {
    match text.len() <= bytes {
        true => text,
        false => &text[..text.floor_char_boundary(bytes)],
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_and_notes_are_cut_where_the_server_would_refuse_them() {
        assert_eq!(name("pod-1", 255), "pod-1.ff");
        let long = format!("{}-{}", "a".repeat(LONGEST_NAME - 1), "b".repeat(20));
        let name = name(&long, u64::MAX);
        assert!(name.len() <= 253 && !name.contains("-."), "{name}");
        assert_eq!(cut("éé", 3), "é");
        assert_eq!(cut("short", 1024), "short");
    }
}
