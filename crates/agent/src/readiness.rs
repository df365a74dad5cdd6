//! Readiness: whether the agent serves all of its resources to kubelet, for probes and metrics.

use crate::state::{NodeState, lock};
use std::sync::{Arc, Mutex};
use tokio::sync::watch;

/// The agent's progress from its start until all of its resources are registered with kubelet.
#[derive(Default)]
pub(crate) struct Readiness {
    /// Set once the node's GPUs are known.
    state: Mutex<Option<Arc<NodeState>>>,
    /// Why there is nothing to share on this node; then the agent is ready, and waits.
    idle: Mutex<Option<String>>,
    /// The number of streams that kubelet has open for each resource.
    resources: Mutex<Vec<(String, watch::Receiver<usize>)>>,
}

/// Why the agent is not ready.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub(crate) enum ReadinessError {
    /// The driver does not respond yet.
    #[error("the node's GPUs are not known yet")]
    NoGpus,
    /// No device plugin is running yet.
    #[error("no resource is served to kubelet yet")]
    NoResources,
    /// Kubelet has not opened a stream for a resource.
    #[error("{resource} is not registered with kubelet yet")]
    NotRegistered {
        /// The first resource without an open stream.
        resource: String,
    },
}

impl Readiness {
    /// Sets the state of a new session, or none while there is no session.
    pub(crate) fn set_state(&self, state: Option<&Arc<NodeState>>) {
        *lock(&self.state) = state.cloned();
    }

    /// Returns the state of the session.
    pub(crate) fn state(&self) -> Option<Arc<NodeState>> {
        lock(&self.state).clone()
    }

    /// Sets why there is nothing to share on this node, if so.
    pub(crate) fn set_idle(&self, cause: Option<&str>) {
        *lock(&self.idle) = cause.map(str::to_string);
    }

    /// Sets the resources that are served, each with the number of streams that kubelet has open.
    pub(crate) fn set_resources(&self, resources: Vec<(String, watch::Receiver<usize>)>) {
        *lock(&self.resources) = resources;
    }

    /// Checks whether the agent is ready: all resources are registered with kubelet, or there is nothing to share.
    pub(crate) fn check(&self) -> Result<(), ReadinessError> {
        if lock(&self.state).is_none() {
            return if lock(&self.idle).is_some() { Ok(()) } else { Err(ReadinessError::NoGpus) };
        }
        check_registered(&lock(&self.resources))
    }
}

/// Checks whether kubelet has a stream open for every resource.
fn check_registered(resources: &[(String, watch::Receiver<usize>)]) -> Result<(), ReadinessError> {
    if resources.is_empty() {
        return Err(ReadinessError::NoResources);
    }
    match resources.iter().find(|(_, streams)| *streams.borrow() == 0) {
        Some((resource, _)) => Err(ReadinessError::NotRegistered { resource: resource.clone() }),
        None => Ok(()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn agent_is_ready_when_kubelet_has_a_stream_for_every_resource() {
        let not_registered =
            |resource: &str| Err(ReadinessError::NotRegistered { resource: resource.into() });
        assert_eq!(check_registered(&[]), Err(ReadinessError::NoResources));
        let (one, two) = (watch::Sender::new(1), watch::Sender::new(0));
        let resources = [("a".to_string(), one.subscribe()), ("b".to_string(), two.subscribe())];
        assert_eq!(check_registered(&resources), not_registered("b"));
        two.send_replace(1);
        assert_eq!(check_registered(&resources), Ok(()));
        one.send_replace(0);
        assert_eq!(check_registered(&resources), not_registered("a"));
    }

    #[test]
    fn agent_without_gpus_is_ready_only_when_there_is_nothing_to_share() {
        let readiness = Readiness::default();
        assert_eq!(readiness.check(), Err(ReadinessError::NoGpus));
        readiness.set_idle(Some("no driver"));
        assert_eq!(readiness.check(), Ok(()));
        readiness.set_idle(None);
        assert_eq!(readiness.check(), Err(ReadinessError::NoGpus));
    }
}
