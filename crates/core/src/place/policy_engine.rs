//! The policies as a cluster uses them: one by default, another where a pod says so.

use super::fragmentation::Fragmentation;
use super::policies::StatelessPolicy;
use super::{ClusterCapacity, Decision};
use crate::model::{PodAsk, Policy};

/// Chooses by the cluster's policy, or the pod's, and learns from what arrives.
#[derive(Clone, Debug)]
pub struct PolicyEngine {
    policy: Policy,
    fragmentation: Fragmentation,
}

impl PolicyEngine {
    /// By this policy, having seen nothing yet.
    pub fn new(policy: Policy) -> PolicyEngine {
        PolicyEngine { policy, fragmentation: Fragmentation::new() }
    }

    /// Takes note of all pods that hold something, as after a restart.
    pub fn learn<'a>(&mut self, held: impl IntoIterator<Item = &'a PodAsk>, cluster: &ClusterCapacity) {
        self.fragmentation.learn(held, cluster);
    }

    /// Takes note of a pod that arrived. Call it once per pod, before it is placed.
    pub fn arrived(&mut self, ask: &PodAsk, cluster: &ClusterCapacity) {
        self.fragmentation.arrived(ask, cluster);
    }

    /// The best node for a pod, and the GPUs there; `None` where it fits nowhere.
    pub fn best(&self, cluster: &mut ClusterCapacity, ask: &PodAsk) -> Option<Decision> {
        match ask.constraints.policy.unwrap_or(self.policy) {
            Policy::Fragmentation => cluster.best(ask, &self.fragmentation),
            plain => cluster.best(ask, &StatelessPolicy(plain)),
        }
    }
}
