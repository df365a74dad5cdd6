//! What is kept of a pod.

use partage_core::model::{ContainerName, PodId};
use partage_core::pod::{Pod, Problem};
use std::collections::BTreeSet;

/// What is kept of a pod: the rest of the object is dropped as soon as it is read.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct PodView {
    /// Which pod.
    pub id: PodId,
    /// Its asks. Of a pod that asks for no extended resource neither labels nor annotations are kept.
    pub pod: Pod,
    /// What is wrong with it.
    pub problems: Vec<Problem>,
    /// How far it is.
    pub phase: Phase,
    /// Where kubelet did not take it, or no longer, because its devices were not to be had: what it says.
    pub rejected: Option<String>,
    /// When it was made, in seconds since 1970.
    pub created: i64,
    /// Its init containers that have succeeded.
    pub finished_inits: BTreeSet<ContainerName>,
}

impl PodView {
    /// Whether none of its containers runs any more, or ever will.
    pub fn is_finished(&self) -> bool {
        matches!(self.phase, Phase::Succeeded | Phase::Failed)
    }
}

/// How far a pod is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Phase {
    /// Not all its containers have been started.
    Pending,
    /// On its way.
    Running,
    /// All its containers ended well.
    Succeeded,
    /// It has ended otherwise.
    Failed,
    /// Its node does not say.
    Unknown,
}
