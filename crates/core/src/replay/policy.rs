//! The policies that a replay can compare.

use super::baselines::{BestFitPolicy, DotProductPolicy, FgdPolicy, LargestNode, RandomPolicy};
use super::trace::TracePod;
use crate::model::{PlacementPolicy, PodAsk};
use crate::place::demand_histogram::DemandHistogram;
use crate::place::{ClusterCapacity, Decision, PolicyEngine, RankCache};
use std::fmt;
use std::str::FromStr;

/// A placement policy to replay a trace with: one of the allocator's own or one of the literature.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ReplayPolicy {
    /// Any node that fits, any GPU that fits.
    Random,
    /// Best fit: the node with the least capacity left over.
    BestFit,
    /// Dot product of request and free capacity, as published.
    DotProduct,
    /// Fragmentation gradient descent, the best published policy.
    Fgd,
    /// A policy of the allocator.
    Allocator(PlacementPolicy),
}

impl ReplayPolicy {
    /// All policies, the allocator's own last.
    pub const ALL: [ReplayPolicy; 8] = [
        ReplayPolicy::Random,
        ReplayPolicy::DotProduct,
        ReplayPolicy::BestFit,
        ReplayPolicy::Fgd,
        ReplayPolicy::Allocator(PlacementPolicy::Spread),
        ReplayPolicy::Allocator(PlacementPolicy::Topology),
        ReplayPolicy::Allocator(PlacementPolicy::Binpack),
        ReplayPolicy::Allocator(PlacementPolicy::Fragmentation),
    ];

    /// Returns the policy's name on command lines and in tables.
    pub fn name(self) -> &'static str {
        match self {
            ReplayPolicy::Random => "random",
            ReplayPolicy::BestFit => "best-fit",
            ReplayPolicy::DotProduct => "dot-product",
            ReplayPolicy::Fgd => "fgd",
            ReplayPolicy::Allocator(policy) => policy.name(),
        }
    }

    /// Starts a run of this policy. Only FGD reads `pods`: it knows the whole workload beforehand.
    pub(super) fn start(self, pods: &[TracePod], cluster: &ClusterCapacity, seed: u64) -> PolicyState {
        match self {
            ReplayPolicy::Random => PolicyState::Random(RandomPolicy::new(seed)),
            ReplayPolicy::BestFit => PolicyState::BestFit(BestFitPolicy(LargestNode::of(cluster))),
            ReplayPolicy::DotProduct => PolicyState::DotProduct(DotProductPolicy(LargestNode::of(cluster))),
            ReplayPolicy::Fgd => {
                let mut demand = DemandHistogram::default();
                for pod in pods {
                    demand.add(&pod.to_ask(), 1);
                }
                PolicyState::Fgd(FgdPolicy::new(&demand, cluster.classes()))
            }
            ReplayPolicy::Allocator(policy) => PolicyState::Allocator(PolicyEngine::new(policy)),
        }
    }
}

impl fmt::Display for ReplayPolicy {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(self.name())
    }
}

/// A name that belongs to no policy.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error(
    "unknown policy \"{0}\": use fragmentation, binpack, spread, topology, fgd, best-fit, dot-product or random"
)]
pub struct UnknownReplayPolicy(String);

impl FromStr for ReplayPolicy {
    type Err = UnknownReplayPolicy;

    fn from_str(text: &str) -> Result<Self, UnknownReplayPolicy> {
        ReplayPolicy::ALL
            .into_iter()
            .find(|policy| policy.name() == text)
            .ok_or_else(|| UnknownReplayPolicy(text.into()))
    }
}

/// A policy together with the state that it keeps during a run.
pub(super) enum PolicyState {
    Random(RandomPolicy),
    BestFit(BestFitPolicy),
    DotProduct(DotProductPolicy),
    Fgd(FgdPolicy),
    Allocator(PolicyEngine),
}

impl PolicyState {
    /// Chooses a node and GPUs for the next pod, or `None` if it fits nowhere.
    pub(super) fn decide(
        &mut self,
        cluster: &ClusterCapacity,
        ask: &PodAsk,
        cache: &mut RankCache,
    ) -> Option<Decision> {
        match self {
            PolicyState::Random(random) => {
                random.start_decision();
                cache.best(cluster, ask, random)
            }
            PolicyState::BestFit(ranking) => cache.best(cluster, ask, ranking),
            PolicyState::DotProduct(ranking) => cache.best(cluster, ask, ranking),
            PolicyState::Fgd(ranking) => cache.best(cluster, ask, ranking),
            PolicyState::Allocator(policies) => {
                policies.arrived(ask, cluster);
                policies.best(cluster, ask, cache)
            }
        }
    }
}
