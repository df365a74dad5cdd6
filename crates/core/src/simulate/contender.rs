//! Who takes part in a comparison.

use super::classic::{BestFit, DotProduct, Fgd, Largest, Random};
use super::trace::TracePod;
use crate::model::{PodAsk, Policy};
use crate::place::demand_histogram::DemandHistogram;
use crate::place::{ClusterCapacity, Decision, PolicyEngine, RankCache};
use std::fmt;
use std::str::FromStr;

/// A policy to simulate: ours and those of the literature.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Contender {
    /// Any node, any GPU.
    Random,
    /// The least left over.
    BestFit,
    /// The least resemblance.
    DotProduct,
    /// Fragmentation gradient descent, the best published.
    Fgd,
    /// One of ours.
    Ours(Policy),
}

impl Contender {
    /// Everyone, ours last.
    pub const ALL: [Contender; 8] = [
        Contender::Random,
        Contender::DotProduct,
        Contender::BestFit,
        Contender::Fgd,
        Contender::Ours(Policy::Spread),
        Contender::Ours(Policy::Topology),
        Contender::Ours(Policy::Binpack),
        Contender::Ours(Policy::Fragmentation),
    ];

    /// Its name on command lines and in tables.
    pub fn name(self) -> &'static str {
        match self {
            Contender::Random => "random",
            Contender::BestFit => "best-fit",
            Contender::DotProduct => "dot-product",
            Contender::Fgd => "fgd",
            Contender::Ours(policy) => policy.name(),
        }
    }

    pub(super) fn player(self, pods: &[TracePod], cluster: &ClusterCapacity, seed: u64) -> Player {
        match self {
            Contender::Random => Player::Random(Random::new(seed)),
            Contender::BestFit => Player::BestFit(BestFit(Largest::of(cluster))),
            Contender::DotProduct => Player::DotProduct(DotProduct(Largest::of(cluster))),
            Contender::Fgd => {
                let mut demand = DemandHistogram::default();
                for pod in pods {
                    demand.add(&pod.to_ask(), 1);
                }
                Player::Fgd(Fgd::new(&demand, cluster.classes()))
            }
            Contender::Ours(policy) => Player::Ours(PolicyEngine::new(policy)),
        }
    }
}

impl fmt::Display for Contender {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(self.name())
    }
}

/// A name nobody goes by.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error(
    "\"{0}\" is no policy: use fragmentation, binpack, spread, topology, fgd, best-fit, dot-product or random"
)]
pub struct UnknownContender(String);

impl FromStr for Contender {
    type Err = UnknownContender;

    fn from_str(text: &str) -> Result<Self, UnknownContender> {
        Contender::ALL.into_iter().find(|c| c.name() == text).ok_or_else(|| UnknownContender(text.into()))
    }
}

/// A contender with what it knows.
pub(super) enum Player {
    Random(Random),
    BestFit(BestFit),
    DotProduct(DotProduct),
    Fgd(Fgd),
    Ours(PolicyEngine),
}

impl Player {
    pub(super) fn decide(
        &mut self,
        cluster: &ClusterCapacity,
        ask: &PodAsk,
        cache: &mut RankCache,
    ) -> Option<Decision> {
        match self {
            Player::Random(random) => {
                random.next();
                cache.best(cluster, ask, random)
            }
            Player::BestFit(ranking) => cache.best(cluster, ask, ranking),
            Player::DotProduct(ranking) => cache.best(cluster, ask, ranking),
            Player::Fgd(ranking) => cache.best(cluster, ask, ranking),
            Player::Ours(policies) => {
                policies.arrived(ask, cluster);
                policies.best(cluster, ask, cache)
            }
        }
    }
}
