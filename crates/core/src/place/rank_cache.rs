//! Cached ranks: one board per kind of ask, one number per node.
//!
//! When the same kind of ask comes again, only nodes that changed since are ranked anew. A decision then costs a
//! scan over plain numbers.

use super::NodeIndex;
use super::capacity::{GpuClass, NodeCapacity, NodeState};
use super::fit::PreparedAsk;
use super::policies::NodeRanking;
use crate::model::{ContainerRole, PodAsk, WantedGpus};
use std::collections::HashMap;
use std::hash::{BuildHasher, RandomState};
use std::sync::Arc;

/// Kinds of ask whose ranks are kept. Beyond it the one unused for longest goes.
const MOST_BOARDS: usize = 512;
/// The rank of a node that does not fit.
const UNFIT: i64 = i64::MIN;

/// The nodes as boards see them.
pub(super) struct Nodes<'a> {
    pub(super) nodes: &'a [NodeCapacity],
    pub(super) classes: &'a [GpuClass],
    /// When each node last changed.
    pub(super) changed: &'a [u64],
    pub(super) now: u64,
}

/// The boards of all kinds of ask that came lately.
#[derive(Debug, Default)]
pub(super) struct RankCache {
    /// By a hash of the kind; kinds that share one stand side by side.
    buckets: HashMap<u64, Vec<AskRanks>>,
    count: usize,
    hasher: RandomState,
}

/// The ranks of all nodes for one kind of ask under one ranking.
#[derive(Debug)]
pub(super) struct AskRanks {
    ranking: &'static str,
    prepared: Arc<PreparedAsk>,
    epoch: u64,
    /// Ranks hold for every node unchanged since then.
    seen: u64,
    used: u64,
    ranks: Vec<i64>,
}

impl RankCache {
    /// The ranks for an ask, brought up to date.
    pub(super) fn up_to_date(
        &mut self,
        ask: &PodAsk,
        ranking: &impl NodeRanking,
        nodes: &Nodes,
    ) -> &AskRanks {
        let key = self.hasher.hash_one((ranking.name(), Likeness(ask)));
        let bucket = self.buckets.entry(key).or_default();
        let is_it = |board: &AskRanks| {
            board.ranking == ranking.name() && Likeness(&board.prepared.ask) == Likeness(ask)
        };
        let at = match bucket.iter().position(is_it) {
            Some(at) => at,
            None => {
                bucket.push(AskRanks::new(ask, ranking.name(), nodes.classes));
                self.count += 1;
                bucket.len() - 1
            }
        };
        if !bucket[at].knows(nodes.classes) {
            bucket[at] = AskRanks::new(ask, ranking.name(), nodes.classes);
        }
        if self.count > MOST_BOARDS {
            self.drop_oldest(key);
        }
        let board = &mut self.buckets.entry(key).or_default()[at];
        board.used = nodes.now;
        board.refresh(nodes, ranking);
        board
    }

    /// Forgets the board unused for longest, sparing the bucket just asked for.
    fn drop_oldest(&mut self, spared: u64) {
        let others = self.buckets.iter().filter(|(key, _)| **key != spared);
        let oldest = others.flat_map(|(key, bucket)| bucket.iter().map(|board| (board.used, *key))).min();
        if let Some((used, key)) = oldest
            && let Some(bucket) = self.buckets.get_mut(&key)
        {
            let before = bucket.len();
            bucket.retain(|board| board.used != used);
            self.count -= before - bucket.len();
            if bucket.is_empty() {
                self.buckets.remove(&key);
            }
        }
    }
}

impl AskRanks {
    fn new(ask: &PodAsk, ranking: &'static str, classes: &[GpuClass]) -> AskRanks {
        let prepared = Arc::new(PreparedAsk::new(ask, classes));
        AskRanks { ranking, prepared, epoch: 0, seen: 0, used: 0, ranks: Vec::new() }
    }

    /// Ranks every node that changed since, or all of them where the ranking itself has changed.
    fn refresh(&mut self, nodes: &Nodes, ranking: &impl NodeRanking) {
        let seen = if self.epoch == ranking.epoch() { self.seen } else { 0 };
        self.ranks.resize(nodes.nodes.len(), UNFIT);
        // A pod of several containers is worth remembering by state: in a large cluster many nodes are alike.
        let costly = self.prepared.wants.len() > 1 && self.prepared.ask.constraints.uuids.is_open();
        let mut known: HashMap<NodeState, i64> = HashMap::new();
        for (at, capacity) in nodes.nodes.iter().enumerate().filter(|&(at, _)| nodes.changed[at] > seen) {
            let rank = || ranking.rank(capacity, nodes.classes, &self.prepared).unwrap_or(UNFIT);
            self.ranks[at] = match capacity {
                capacity if capacity.removed => UNFIT,
                capacity if costly => *known.entry(capacity.state()).or_insert_with(rank),
                _ => rank(),
            };
        }
        self.epoch = ranking.epoch();
        self.seen = nodes.now;
    }

    /// Whether the ask was resolved for all classes of GPU there are now.
    fn knows(&self, classes: &[GpuClass]) -> bool {
        self.prepared.wants.first().is_none_or(|wanted| wanted.needs.len() == classes.len())
    }

    /// The ask these ranks are for.
    pub(super) fn prepared(&self) -> Arc<PreparedAsk> {
        Arc::clone(&self.prepared)
    }

    /// The first node of the highest rank.
    pub(super) fn highest(&self) -> Option<(NodeIndex, i64)> {
        // The maximum first, then where it is: both passes are simple enough to be vectorised.
        let best = self.ranks.iter().copied().max().filter(|&rank| rank != UNFIT)?;
        let at = self.ranks.iter().position(|&rank| rank == best)?;
        Some((NodeIndex(at), best))
    }

    /// Every node that fits, with its rank.
    pub(super) fn fitting(&self) -> impl Iterator<Item = (NodeIndex, i64)> {
        let ranks = self.ranks.iter().enumerate().filter(|(_, rank)| **rank != UNFIT);
        ranks.map(|(at, &rank)| (NodeIndex(at), rank))
    }
}

/// Two asks are alike when the allocator cannot tell them apart: everything but the containers' names.
struct Likeness<'a>(&'a PodAsk);

impl Likeness<'_> {
    fn wants(&self) -> impl Iterator<Item = (ContainerRole, WantedGpus)> {
        self.0.asks.iter().map(|ask| (ask.role, ask.want))
    }
}

impl PartialEq for Likeness<'_> {
    fn eq(&self, other: &Self) -> bool {
        self.wants().eq(other.wants())
            && self.0.constraints == other.0.constraints
            && (self.0.cpu, self.0.memory) == (other.0.cpu, other.0.memory)
    }
}

impl std::hash::Hash for Likeness<'_> {
    fn hash<H: std::hash::Hasher>(&self, state: &mut H) {
        for want in self.wants() {
            want.hash(state);
        }
        self.0.constraints.hash(state);
        (self.0.cpu, self.0.memory).hash(state);
    }
}
