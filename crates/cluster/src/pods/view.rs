//! The part of a pod that is kept.

use partage_core::model::{ContainerName, PodId};
use partage_core::pod::{PodManifest, Problem};
use std::collections::BTreeSet;

/// The part of a pod that is kept. The rest of the object is dropped as soon as it is decoded.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct PodView {
    /// The pod's UID, namespace and name.
    pub id: PodId,
    /// The pod's asks. Labels and annotations are empty for a pod that requests no extended resource.
    pub pod: PodManifest,
    /// Problems found in the pod's asks.
    pub problems: Vec<Problem>,
    /// The pod's phase as the API server last reported it.
    pub phase: PodPhase,
    /// Kubelet's message, if it rejected the pod because its devices could not be allocated.
    pub rejected: Option<String>,
    /// Creation time, in seconds since 1970.
    pub created: i64,
    /// The init containers that have succeeded.
    pub finished_inits: BTreeSet<ContainerName>,
}

impl PodView {
    /// Returns whether no container of the pod runs any more, or ever will.
    pub fn is_finished(&self) -> bool {
        matches!(self.phase, PodPhase::Succeeded | PodPhase::Failed)
    }
}

/// The phase in a pod's status.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum PodPhase {
    /// Not all of its containers have been started.
    Pending,
    /// It is bound, and at least one of its containers runs or restarts.
    Running,
    /// All of its containers have exited with code 0.
    Succeeded,
    /// All of its containers have ended, and at least one has failed.
    Failed,
    /// Its kubelet does not report its state.
    Unknown,
}
