//! Cached ranks: for each kind of ask and each ranking, one number per node.
//!
//! When an ask of the same kind comes again, only nodes whose version differs from the one that was ranked are ranked
//! again. Versions identify content (see [`super::cluster_capacity`]), so one cache serves a ledger and any of
//! its snapshots, older or newer, and still never answers with an outdated rank.

use super::capacity::{GpuClass, NodeState};
use super::cluster_capacity::{CHUNK_NODES, ClusterCapacity, Decision, NodeChunk, NodeIndex};
use super::fit::PreparedAsk;
use super::policies::NodeRanking;
use crate::model::{ContainerRole, PodAsk, WantedGpus};
use std::collections::HashMap;
use std::hash::{BuildHasher, RandomState};
use std::sync::Arc;

/// Kinds of ask whose ranks are kept. Beyond it the one that was not used for longest is dropped.
const MAX_KINDS: usize = 512;
/// The rank of a node that the pod does not fit.
const UNFIT: i64 = i64::MIN;
/// The version of a node that was not ranked yet.
const UNRANKED: u64 = 0;

/// The ranks of all nodes for the kinds of ask that came lately.
#[derive(Debug, Default)]
pub struct RankCache {
    /// By a hash of the kind; kinds with equal hashes share a bucket.
    buckets: HashMap<u64, Vec<AskRanks>>,
    kinds: usize,
    hasher: RandomState,
    /// Counts decisions, to find the kind that was not used for longest.
    tick: u64,
}

/// The ranks of all nodes for one kind of ask under one ranking.
#[derive(Debug)]
struct AskRanks {
    ranking: &'static str,
    epoch: u64,
    last_used: u64,
    classes: Arc<Vec<GpuClass>>,
    prepared: Arc<PreparedAsk>,
    ranks: Vec<i64>,
    /// The version of each node when it was ranked.
    versions: Vec<u64>,
    chunks: Vec<ChunkRanks>,
}

/// The cached ranks of one chunk of nodes.
#[derive(Clone, Copy, Debug)]
struct ChunkRanks {
    /// The version of the chunk when its nodes were ranked.
    version: u64,
    /// The highest of its ranks.
    highest: i64,
}

impl RankCache {
    /// Returns the best node for a pod, and the GPUs there; `None` if it fits nowhere.
    pub fn best(
        &mut self,
        cluster: &ClusterCapacity,
        ask: &PodAsk,
        ranking: &impl NodeRanking,
    ) -> Option<Decision> {
        let ranks = self.up_to_date(cluster, ask, ranking);
        let (node, rank) = ranks.highest()?;
        let capacity = cluster.node_capacity(node);
        let placement = ranking.place(capacity, cluster.classes(), &ranks.prepared)?;
        Some(Decision { node, placement, rank, inventory: capacity.inventory })
    }

    /// Returns the rank of every node that a pod fits, in the order of their indexes.
    pub fn ranks(
        &mut self,
        cluster: &ClusterCapacity,
        ask: &PodAsk,
        ranking: &impl NodeRanking,
    ) -> Vec<(NodeIndex, i64)> {
        let ranks = self.up_to_date(cluster, ask, ranking).ranks.iter().enumerate();
        ranks.filter(|(_, rank)| **rank != UNFIT).map(|(at, &rank)| (NodeIndex(at), rank)).collect()
    }

    /// Returns the ranks for an ask after ranking the nodes that changed.
    fn up_to_date(
        &mut self,
        cluster: &ClusterCapacity,
        ask: &PodAsk,
        ranking: &impl NodeRanking,
    ) -> &AskRanks {
        self.tick += 1;
        let key = self.hasher.hash_one((ranking.name(), AskIdentity(ask)));
        let bucket = self.buckets.entry(key).or_default();
        let is_same = |ranks: &AskRanks| {
            ranks.ranking == ranking.name() && AskIdentity(&ranks.prepared.ask) == AskIdentity(ask)
        };
        let at = match bucket.iter().position(is_same) {
            Some(at) => at,
            None => {
                bucket.push(AskRanks::new(cluster, ask, ranking.name()));
                self.kinds += 1;
                bucket.len() - 1
            }
        };
        if !bucket[at].is_prepared_for(cluster) {
            bucket[at] = AskRanks::new(cluster, ask, ranking.name());
        }
        if self.kinds > MAX_KINDS {
            self.drop_oldest(key);
        }
        let ranks = &mut self.buckets.entry(key).or_default()[at];
        ranks.last_used = self.tick;
        ranks.refresh(cluster, ranking);
        ranks
    }

    /// Drops the kind that was not used for longest, except from the bucket that was just looked up.
    fn drop_oldest(&mut self, kept: u64) {
        let others = self.buckets.iter().filter(|(key, _)| **key != kept);
        let oldest =
            others.flat_map(|(key, bucket)| bucket.iter().map(|ranks| (ranks.last_used, *key))).min();
        if let Some((last_used, key)) = oldest
            && let Some(bucket) = self.buckets.get_mut(&key)
        {
            let before = bucket.len();
            bucket.retain(|ranks| ranks.last_used != last_used);
            self.kinds -= before - bucket.len();
            if bucket.is_empty() {
                self.buckets.remove(&key);
            }
        }
    }
}

impl AskRanks {
    fn new(cluster: &ClusterCapacity, ask: &PodAsk, ranking: &'static str) -> AskRanks {
        AskRanks {
            ranking,
            epoch: 0,
            last_used: 0,
            classes: Arc::clone(cluster.shared_classes()),
            prepared: Arc::new(cluster.prepare(ask)),
            ranks: Vec::new(),
            versions: Vec::new(),
            chunks: Vec::new(),
        }
    }

    /// Returns whether the ask was resolved for the classes of GPU that this cluster has.
    fn is_prepared_for(&self, cluster: &ClusterCapacity) -> bool {
        let classes = cluster.shared_classes();
        Arc::ptr_eq(&self.classes, classes) || self.classes == *classes
    }

    /// Ranks every node whose version is another than the one ranked, or all if the ranking itself changed.
    fn refresh(&mut self, cluster: &ClusterCapacity, ranking: &impl NodeRanking) {
        let chunks = cluster.chunks();
        let nodes = chunks.last().map_or(0, |last| (chunks.len() - 1) * CHUNK_NODES + last.nodes.len());
        if self.epoch != ranking.epoch() {
            self.epoch = ranking.epoch();
            self.versions.clear();
            self.chunks.clear();
        }
        self.ranks.resize(nodes, UNFIT);
        self.versions.resize(nodes, UNRANKED);
        self.chunks.resize(chunks.len(), ChunkRanks { version: UNRANKED, highest: UNFIT });
        // Ranking a pod of several containers is expensive, and in a large cluster many nodes are alike.
        let is_expensive = self.prepared.wants.len() > 1 && self.prepared.ask.constraints.uuids.is_open();
        let mut known: HashMap<NodeState, i64> = HashMap::new();
        for (index, chunk) in chunks.iter().enumerate() {
            if self.chunks[index].version == chunk.version {
                continue;
            }
            let of_chunk = index * CHUNK_NODES..index * CHUNK_NODES + chunk.nodes.len();
            let ranks = &mut self.ranks[of_chunk.clone()];
            let versions = &mut self.versions[of_chunk];
            for at in outdated(chunk, versions) {
                let node = &chunk.nodes[at];
                let rank = || ranking.rank(node, cluster.classes(), &self.prepared).unwrap_or(UNFIT);
                ranks[at] = if node.removed {
                    UNFIT
                } else if is_expensive {
                    *known.entry(node.state()).or_insert_with(rank)
                } else {
                    rank()
                };
            }
            versions.copy_from_slice(&chunk.versions);
            let highest = ranks.iter().copied().max().unwrap_or(UNFIT);
            self.chunks[index] = ChunkRanks { version: chunk.version, highest };
        }
    }

    /// Returns the first node of the highest rank.
    fn highest(&self) -> Option<(NodeIndex, i64)> {
        let highest = self.chunks.iter().map(|chunk| chunk.highest).max().filter(|&rank| rank != UNFIT)?;
        let first = self.chunks.iter().position(|chunk| chunk.highest == highest)? * CHUNK_NODES;
        let at = self.ranks[first..].iter().position(|&rank| rank == highest)?;
        Some((NodeIndex(first + at), highest))
    }
}

/// Returns the nodes of a chunk whose version differs from the one that was ranked.
fn outdated(chunk: &NodeChunk, ranked: &[u64]) -> impl Iterator<Item = usize> + use<> {
    // A mask first: the comparison vectorizes, and most nodes of a chunk did not change.
    let mut mask = 0u64;
    for (at, (version, ranked)) in chunk.versions.iter().zip(ranked).enumerate() {
        mask |= u64::from(version != ranked) << at;
    }
    super::gpu_order::indexes(mask)
}

/// Compares asks as the allocator does: everything but the names of the containers.
struct AskIdentity<'a>(&'a PodAsk);

impl AskIdentity<'_> {
    fn wants(&self) -> impl Iterator<Item = (ContainerRole, WantedGpus)> {
        self.0.asks.iter().map(|ask| (ask.role, ask.want))
    }
}

impl PartialEq for AskIdentity<'_> {
    fn eq(&self, other: &Self) -> bool {
        self.wants().eq(other.wants())
            && self.0.constraints == other.0.constraints
            && (self.0.cpu, self.0.memory) == (other.0.cpu, other.0.memory)
    }
}

impl std::hash::Hash for AskIdentity<'_> {
    fn hash<H: std::hash::Hasher>(&self, state: &mut H) {
        for want in self.wants() {
            want.hash(state);
        }
        self.0.constraints.hash(state);
        (self.0.cpu, self.0.memory).hash(state);
    }
}
