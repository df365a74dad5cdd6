//! The policies as a cluster uses them: one by default, another where a pod says so.

use super::fragmentation::Fragmentation;
use super::rank::Plain;
use super::{Cluster, Decision};
use crate::model::{PodAsk, Policy};

/// Chooses by the cluster's policy, or the pod's, and learns from what arrives.
#[derive(Clone, Debug)]
pub struct Placer {
    policy: Policy,
    fragmentation: Fragmentation,
}

impl Placer {
    /// By this policy, having seen nothing yet.
    pub fn new(policy: Policy) -> Placer {
        Placer { policy, fragmentation: Fragmentation::new() }
    }

    /// Takes note of all pods that hold something, as after a restart.
    pub fn learn<'a>(&mut self, held: impl IntoIterator<Item = &'a PodAsk>, cluster: &Cluster) {
        self.fragmentation.learn(held, cluster);
    }

    /// Takes note of a pod that arrived. Call it once per pod, before it is placed.
    pub fn arrived(&mut self, ask: &PodAsk, cluster: &Cluster) {
        self.fragmentation.arrived(ask, cluster);
    }

    /// The best node for a pod, and the GPUs there; `None` where it fits nowhere.
    pub fn best(&self, cluster: &mut Cluster, ask: &PodAsk) -> Option<Decision> {
        match ask.constraints.policy.unwrap_or(self.policy) {
            Policy::Fragmentation => cluster.best(ask, &self.fragmentation),
            plain => cluster.best(ask, &Plain(plain)),
        }
    }
}
