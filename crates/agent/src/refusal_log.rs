//! Tracks which refusals were logged: kubelet retries a container that cannot start every few seconds, for as long as its pod
//! exists.

use crate::device_owner::DeviceHolder;
use crate::device_plugin::DeviceId;
use partage_core::model::{ContainerName, PodUid};
use std::collections::{BTreeMap, BTreeSet};
use std::sync::{Mutex, MutexGuard, PoisonError};

/// Maximum number of different reasons that are logged for one container. A message contains figures that change while other
/// pods come and go.
const MAX_REASONS: usize = 32;

/// What kubelet requested to start, as far as it could be resolved.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) enum StartSubject {
    /// A container of a pod.
    Container(PodUid, ContainerName),
    /// Devices of a resource that could not be attributed to any container.
    Devices(String, BTreeSet<DeviceId>),
}

impl StartSubject {
    /// Returns the container that holds these devices.
    pub(crate) fn of(holder: &DeviceHolder) -> StartSubject {
        StartSubject::Container(holder.uid.clone(), holder.container.clone())
    }
}

/// The reasons that were logged, by what they were about.
#[derive(Debug, Default)]
pub(crate) struct RefusalLog(Mutex<BTreeMap<StartSubject, BTreeSet<String>>>);

impl RefusalLog {
    /// Records a refusal. Returns whether this reason is new for this subject and has to be logged.
    pub(crate) fn insert(&self, subject: &StartSubject, reason: &str) -> bool {
        let mut logged = self.logged();
        let reasons = logged.entry(subject.clone()).or_default();
        reasons.len() < MAX_REASONS && reasons.insert(reason.to_string())
    }

    /// Forgets a container that has started: a refusal at its next start is logged again.
    pub(crate) fn remove(&self, subject: &StartSubject) {
        self.logged().remove(subject);
    }

    /// Keeps only what still exists.
    pub(crate) fn retain(&self, exists: impl Fn(&StartSubject) -> bool) {
        self.logged().retain(|subject, _| exists(subject));
    }

    fn logged(&self) -> MutexGuard<'_, BTreeMap<StartSubject, BTreeSet<String>>> {
        // Every change under this lock is complete.
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn container(uid: &str) -> StartSubject {
        StartSubject::Container(uid.into(), "main".into())
    }

    #[test]
    fn refusal_is_logged_once_per_container_and_reason() {
        let log = RefusalLog::default();
        assert!(log.insert(&container("a"), "insufficient capacity: 3 GiB are free"));
        for _ in 0..5 {
            assert!(!log.insert(&container("a"), "insufficient capacity: 3 GiB are free"));
        }
        assert!(log.insert(&container("b"), "insufficient capacity: 3 GiB are free"), "another pod");
        assert!(log.insert(&container("a"), "its GPU is unhealthy"), "another reason");
        assert!(
            !log.insert(&container("a"), "insufficient capacity: 3 GiB are free"),
            "it was logged before"
        );
        log.remove(&container("a"));
        assert!(
            log.insert(&container("a"), "insufficient capacity: 3 GiB are free"),
            "it had started in between"
        );
    }

    #[test]
    fn deleted_subjects_are_dropped() {
        let log = RefusalLog::default();
        let devices = StartSubject::Devices("partage.dev/gpu".into(), [DeviceId("slot-1".into())].into());
        for subject in [&container("a"), &container("b"), &devices] {
            assert!(log.insert(subject, "no"));
        }
        log.retain(|subject| *subject == container("a"));
        assert_eq!(log.logged().len(), 1);
    }

    #[test]
    fn number_of_reasons_is_bounded() {
        let log = RefusalLog::default();
        let news = (0..1000).filter(|at| log.insert(&container("a"), &format!("{at} MiB are free"))).count();
        assert_eq!(news, MAX_REASONS);
    }
}
