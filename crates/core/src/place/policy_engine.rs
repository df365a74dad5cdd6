//! The placement policies as a component uses them: its own, or another if a pod names one.

use super::cluster_capacity::{ClusterCapacity, Decision, NodeIndex};
use super::fragmentation::Fragmentation;
use super::policies::StatelessPolicy;
use super::rank_cache::RankCache;
use crate::model::{PlacementPolicy, PodAsk};

/// Chooses nodes and GPUs by the component's policy, or by the pod's, and learns from the asks that arrive.
#[derive(Clone, Debug)]
pub struct PolicyEngine {
    policy: PlacementPolicy,
    fragmentation: Fragmentation,
}

impl PolicyEngine {
    /// Returns an engine for this policy that has seen no ask yet. [`super::defaults`] has the policy of each
    /// component.
    pub fn new(policy: PlacementPolicy) -> PolicyEngine {
        PolicyEngine { policy, fragmentation: Fragmentation::new() }
    }

    /// Learns from all pods that hold a grant, as after a restart.
    pub fn learn<'a>(&mut self, held: impl IntoIterator<Item = &'a PodAsk>, cluster: &ClusterCapacity) {
        self.fragmentation.learn(held, cluster);
    }

    /// Learns from a pod that arrived. Callers must call this once per pod, before it is placed.
    pub fn arrived(&mut self, ask: &PodAsk, cluster: &ClusterCapacity) {
        self.fragmentation.arrived(ask, cluster);
    }

    /// Returns the best node for a pod, and the GPUs there; `None` if it fits nowhere.
    pub fn best(&self, cluster: &ClusterCapacity, ask: &PodAsk, cache: &mut RankCache) -> Option<Decision> {
        match ask.constraints.policy.unwrap_or(self.policy) {
            PlacementPolicy::Fragmentation => cache.best(cluster, ask, &self.fragmentation),
            policy => cache.best(cluster, ask, &StatelessPolicy(policy)),
        }
    }

    /// Returns the rank of every node that a pod fits, in the order of their indexes; higher is better.
    pub fn ranks(
        &self,
        cluster: &ClusterCapacity,
        ask: &PodAsk,
        cache: &mut RankCache,
    ) -> Vec<(NodeIndex, i64)> {
        match ask.constraints.policy.unwrap_or(self.policy) {
            PlacementPolicy::Fragmentation => cache.ranks(cluster, ask, &self.fragmentation),
            policy => cache.ranks(cluster, ask, &StatelessPolicy(policy)),
        }
    }
}
