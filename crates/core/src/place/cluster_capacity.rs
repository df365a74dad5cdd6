//! The capacity of all nodes: a persistent structure that can be cloned in constant time.
//!
//! Nodes are kept in chunks of 64 reference-counted entries. A clone shares everything with the original; a write to
//! either copies the list of chunks (one pointer per 64 nodes), the chunk and the node that it touches, each at most
//! once per clone, and nothing else. Writes while no clone exists copy nothing. Adding or removing a node while a clone
//! exists copies the index of names as well.
//!
//! Every write gives the node a version that no other node content in this process has or will have. Two
//! equal versions therefore mean equal content, whichever clone they were read from, which is what
//! [`RankCache`] relies on.

use super::capacity::{GpuAllocation, GpuClass, HostUsage, NodeCapacity};
use super::fit::PreparedAsk;
use super::placement::Placement;
use super::policies::{self, NodeRanking};
use super::rank_cache::RankCache;
use crate::model::{MAX_GPUS_PER_NODE, Node, NodeName, PodAsk};
use std::collections::{BTreeSet, HashMap};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

/// Nodes per chunk: 5,000 nodes are 79 chunks.
pub(super) const CHUNK_NODES: usize = 64;
const _: () = assert!(CHUNK_NODES <= u64::BITS as usize, "the rank cache keeps one bit per node of a chunk");

/// The index of a node in its cluster.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct NodeIndex(pub usize);

/// The placement of a pod: a node, and GPUs on it.
#[derive(Clone, Debug)]
pub struct Decision {
    /// Index of the chosen node.
    pub node: NodeIndex,
    /// The GPUs of each container.
    pub placement: Placement,
    /// How good the node is, on the ranking's own scale.
    pub rank: i64,
    /// The inventory that the placement's GPU indexes refer to.
    pub(crate) inventory: u64,
}

/// Compares where the pod goes, also between clusters that were built separately.
impl PartialEq for Decision {
    fn eq(&self, other: &Self) -> bool {
        (self.node, self.rank) == (other.node, other.rank) && self.placement == other.placement
    }
}

/// The capacity of every node of a cluster. Cloning takes constant time and shares all nodes.
#[derive(Clone, Debug, Default)]
pub struct ClusterCapacity {
    classes: Arc<Vec<GpuClass>>,
    chunks: Arc<Vec<Arc<NodeChunk>>>,
    directory: Arc<NodeDirectory>,
}

/// Consecutive nodes that are copied together when one of them is written while a clone shares them.
#[derive(Clone, Debug)]
pub(super) struct NodeChunk {
    /// Changes with every write to a node of this chunk.
    pub(super) version: u64,
    /// The version of each node.
    pub(super) versions: Vec<u64>,
    pub(super) nodes: Vec<Arc<NodeCapacity>>,
}

/// Maps node names to indexes. Copied when a node is added or removed while a clone shares it.
#[derive(Clone, Debug, Default)]
struct NodeDirectory {
    by_name: HashMap<NodeName, usize>,
    /// Indexes of removed nodes.
    unused: BTreeSet<usize>,
}

/// The content of one node at some time, to be put back by [`ClusterCapacity::restore`].
#[derive(Debug)]
pub(crate) struct SavedNode {
    node: NodeIndex,
    version: u64,
    capacity: Arc<NodeCapacity>,
}

/// Returns a number that was never returned before in this process. It distinguishes contents and caches and decides
/// nothing.
pub(crate) fn unique_version() -> u64 {
    static NEXT: AtomicU64 = AtomicU64::new(1);
    NEXT.fetch_add(1, Ordering::Relaxed)
}

impl ClusterCapacity {
    /// Returns a cluster of these nodes with nothing in use.
    pub fn new(nodes: impl IntoIterator<Item = Node>) -> ClusterCapacity {
        let mut cluster = ClusterCapacity::default();
        for node in nodes {
            cluster.set_node(node);
        }
        cluster
    }

    /// Adds a node, or replaces its inventory and settings. Callers must add its usage again.
    ///
    /// GPUs beyond [`MAX_GPUS_PER_NODE`] are ignored; a cluster file with more is refused when it is read.
    pub fn set_node(&mut self, mut node: Node) -> NodeIndex {
        node.gpus.truncate(MAX_GPUS_PER_NODE);
        let classes: Vec<u16> = node.gpus.iter().map(|gpu| self.class_of(&node, gpu)).collect();
        let at = self.index_of(&node.name).map_or_else(|| self.add_to_directory(&node.name), |index| index.0);
        let capacity = Arc::new(NodeCapacity::new(Arc::new(node), &classes, unique_version()));
        let chunks = Arc::make_mut(&mut self.chunks);
        if at / CHUNK_NODES == chunks.len() {
            chunks.push(Arc::new(NodeChunk { version: 0, versions: Vec::new(), nodes: Vec::new() }));
        }
        let chunk = Arc::make_mut(&mut chunks[at / CHUNK_NODES]);
        if at % CHUNK_NODES == chunk.nodes.len() {
            chunk.versions.push(0);
            chunk.nodes.push(capacity);
        } else {
            chunk.nodes[at % CHUNK_NODES] = capacity;
        }
        chunk.stamp(at % CHUNK_NODES, unique_version());
        NodeIndex(at)
    }

    /// Removes a node. Its index is given to the next new node; the other nodes keep theirs.
    pub fn remove_node(&mut self, node: NodeIndex) {
        let name = self.node_capacity(node).node.name.clone();
        let directory = Arc::make_mut(&mut self.directory);
        directory.by_name.remove(&name);
        directory.unused.insert(node.0);
        let mut empty = NodeCapacity::new(Arc::new(Node::new(name, Vec::new())), &[], unique_version());
        empty.removed = true;
        *self.node_mut(node) = empty;
    }

    /// Returns every node, in the order of their indexes.
    pub fn nodes(&self) -> impl Iterator<Item = (NodeIndex, &NodeCapacity)> {
        let nodes = self.chunks.iter().flat_map(|chunk| &chunk.nodes).enumerate();
        nodes.filter(|(_, node)| !node.removed).map(|(at, node)| (NodeIndex(at), node.as_ref()))
    }

    /// Returns the capacity of one node.
    pub fn node_capacity(&self, node: NodeIndex) -> &NodeCapacity {
        &self.chunks[node.0 / CHUNK_NODES].nodes[node.0 % CHUNK_NODES]
    }

    /// Returns the classes of GPU seen so far. The list only grows.
    pub fn classes(&self) -> &[GpuClass] {
        &self.classes
    }

    /// Returns the index of the node with this name.
    pub fn index_of(&self, name: &NodeName) -> Option<NodeIndex> {
        self.directory.by_name.get(name).copied().map(NodeIndex)
    }

    /// Adds to what is in use on a node, by GPU index.
    pub fn add_usage(&mut self, node: NodeIndex, usage: &[(usize, GpuAllocation)], host: HostUsage) {
        self.change_usage(node, usage, GpuAllocation::plus, |used| used.plus(host));
    }

    /// Subtracts from what is in use on a node, by GPU index.
    pub fn remove_usage(&mut self, node: NodeIndex, usage: &[(usize, GpuAllocation)], host: HostUsage) {
        self.change_usage(node, usage, GpuAllocation::minus, |used| used.minus(host));
    }

    fn change_usage(
        &mut self,
        node: NodeIndex,
        usage: &[(usize, GpuAllocation)],
        apply: impl Fn(GpuAllocation, GpuAllocation) -> GpuAllocation,
        apply_host: impl Fn(HostUsage) -> HostUsage,
    ) {
        let capacity = self.node_mut(node);
        for &(gpu, usage) in usage {
            if let Some(gpu) = capacity.gpus.get_mut(gpu) {
                gpu.used = apply(gpu.used, usage);
            }
        }
        capacity.host_used = apply_host(capacity.host_used);
    }

    /// Resolves an ask for this cluster's classes of GPU.
    pub fn prepare(&self, ask: &PodAsk) -> PreparedAsk {
        PreparedAsk::new(ask, &self.classes)
    }

    /// Returns whether a pod fits a node.
    pub fn fits(&self, node: NodeIndex, prepared: &PreparedAsk) -> bool {
        policies::fits(self.node_capacity(node), &self.classes, prepared)
    }

    /// Places a pod on a given node, or returns `None` if it does not fit.
    pub fn place_on(&self, node: NodeIndex, ask: &PodAsk, ranking: &impl NodeRanking) -> Option<Placement> {
        ranking.place(self.node_capacity(node), &self.classes, &self.prepare(ask))
    }

    /// Returns the best node for a pod, and the GPUs there; `None` if it fits nowhere.
    ///
    /// This ranks every node. Repeated decisions are much cheaper with a [`RankCache`].
    pub fn best(&self, ask: &PodAsk, ranking: &impl NodeRanking) -> Option<Decision> {
        RankCache::default().best(self, ask, ranking)
    }

    /// Returns the rank of every node that a pod fits, in the order of their indexes.
    pub fn ranks(&self, ask: &PodAsk, ranking: &impl NodeRanking) -> Vec<(NodeIndex, i64)> {
        RankCache::default().ranks(self, ask, ranking)
    }

    /// Returns the same nodes with nothing in use and every GPU offered, for "would it ever fit" questions.
    pub fn when_empty(&self) -> ClusterCapacity {
        ClusterCapacity::new(self.nodes().map(|(_, capacity)| {
            let mut node = (*capacity.node).clone();
            node.gpus.iter_mut().for_each(|gpu| gpu.withheld = None);
            node
        }))
    }

    /// Returns the node of a decision, if its GPU indexes still mean what they meant when the decision was made.
    pub(crate) fn current(&self, decision: &Decision) -> Option<&NodeCapacity> {
        let chunk = self.chunks.get(decision.node.0 / CHUNK_NODES)?;
        let node = chunk.nodes.get(decision.node.0 % CHUNK_NODES)?;
        (!node.removed && node.inventory == decision.inventory).then_some(node.as_ref())
    }

    /// Returns the content of a node, to be put back later.
    pub(crate) fn save(&self, node: NodeIndex) -> SavedNode {
        let chunk = &self.chunks[node.0 / CHUNK_NODES];
        let at = node.0 % CHUNK_NODES;
        SavedNode { node, version: chunk.versions[at], capacity: Arc::clone(&chunk.nodes[at]) }
    }

    /// Puts back the content of a node, with the version that it had.
    pub(crate) fn restore(&mut self, saved: SavedNode) {
        let chunk = Arc::make_mut(&mut Arc::make_mut(&mut self.chunks)[saved.node.0 / CHUNK_NODES]);
        let at = saved.node.0 % CHUNK_NODES;
        chunk.nodes[at] = saved.capacity;
        chunk.stamp(at, saved.version);
    }

    /// Returns the nodes as the rank cache reads them.
    pub(super) fn chunks(&self) -> &[Arc<NodeChunk>] {
        &self.chunks
    }

    /// Returns the list of classes, shared with every clone until it grows.
    pub(super) fn shared_classes(&self) -> &Arc<Vec<GpuClass>> {
        &self.classes
    }

    /// Returns a node to be written, under a new version.
    fn node_mut(&mut self, node: NodeIndex) -> &mut NodeCapacity {
        let chunk = Arc::make_mut(&mut Arc::make_mut(&mut self.chunks)[node.0 / CHUNK_NODES]);
        chunk.stamp(node.0 % CHUNK_NODES, unique_version());
        Arc::make_mut(&mut chunk.nodes[node.0 % CHUNK_NODES])
    }

    /// Gives a new node the lowest unused index.
    fn add_to_directory(&mut self, name: &NodeName) -> usize {
        let directory = Arc::make_mut(&mut self.directory);
        let known = directory.by_name.len() + directory.unused.len();
        let at = directory.unused.pop_first().unwrap_or(known);
        directory.by_name.insert(name.clone(), at);
        at
    }

    fn class_of(&mut self, node: &Node, gpu: &crate::model::Gpu) -> u16 {
        let class = GpuClass::of(node, gpu);
        let at = self.classes.iter().position(|known| *known == class).unwrap_or_else(|| {
            Arc::make_mut(&mut self.classes).push(class);
            self.classes.len() - 1
        });
        // No cluster has 65,536 kinds of GPU; the last one would stand for the rest.
        u16::try_from(at).unwrap_or(u16::MAX)
    }
}

impl NodeChunk {
    /// Notes that a node was written and has this version now.
    fn stamp(&mut self, at: usize, version: u64) {
        self.versions[at] = version;
        // A restored node has its old version again, so the chunk cannot take it for its own.
        self.version = unique_version();
    }
}

/// Compares the nodes by index and what is in use on them. Versions are not compared: they differ between clusters
/// that were built separately.
impl PartialEq for ClusterCapacity {
    fn eq(&self, other: &Self) -> bool {
        let same = |(a, b): (&NodeCapacity, &NodeCapacity)| {
            a.node == b.node && a.gpus == b.gpus && a.host_used == b.host_used
        };
        self.classes == other.classes
            && self.directory.unused == other.directory.unused
            && self.nodes().map(|(index, _)| index).eq(other.nodes().map(|(index, _)| index))
            && self.nodes().map(|(_, a)| a).zip(other.nodes().map(|(_, b)| b)).all(same)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::model::{Bytes, Gpu, MilliCpu};

    fn cluster(nodes: usize) -> ClusterCapacity {
        let gpu = |node: usize| Gpu {
            uuid: format!("GPU-{node}").into(),
            minor: 0,
            model: "A100".into(),
            memory_bytes: Bytes(40 << 30),
            numa: None,
            pci: None,
            withheld: None,
        };
        ClusterCapacity::new((0..nodes).map(|at| Node::new(format!("n{at}"), vec![gpu(at)])))
    }

    fn one_cpu() -> HostUsage {
        HostUsage::new(MilliCpu(1000), Bytes::ZERO)
    }

    #[test]
    fn write_after_clone_copies_one_chunk_and_one_node() {
        let mut cluster = cluster(3 * CHUNK_NODES);
        let clone = cluster.clone();
        cluster.add_usage(NodeIndex(CHUNK_NODES + 5), &[], one_cpu());
        let shared = |at: usize| Arc::ptr_eq(&cluster.chunks[at], &clone.chunks[at]);
        assert_eq!([shared(0), shared(1), shared(2)], [true, false, true]);
        let (written, old) = (&cluster.chunks[1].nodes, &clone.chunks[1].nodes);
        let copied: Vec<usize> =
            (0..CHUNK_NODES).filter(|&at| !Arc::ptr_eq(&written[at], &old[at])).collect();
        assert_eq!(copied, [5]);
        assert_eq!(clone.node_capacity(NodeIndex(CHUNK_NODES + 5)).host_used, HostUsage::default());
    }

    #[test]
    fn write_without_clone_copies_nothing() {
        let mut cluster = cluster(2);
        let before = Arc::as_ptr(&cluster.chunks[0].nodes[1]);
        cluster.add_usage(NodeIndex(1), &[], one_cpu());
        assert_eq!(Arc::as_ptr(&cluster.chunks[0].nodes[1]), before);
    }

    #[test]
    fn restored_node_has_its_old_version_and_the_chunk_a_new_one() {
        let mut cluster = cluster(2);
        let (chunk, node) = (cluster.chunks[0].version, cluster.chunks[0].versions[1]);
        let saved = cluster.save(NodeIndex(1));
        cluster.add_usage(NodeIndex(1), &[], one_cpu());
        assert_ne!(cluster.chunks[0].versions[1], node);
        cluster.restore(saved);
        assert_eq!(cluster.chunks[0].versions[1], node);
        assert_ne!(cluster.chunks[0].version, chunk);
        assert_eq!(cluster.node_capacity(NodeIndex(1)).host_used, HostUsage::default());
    }

    #[test]
    fn indexes_of_removed_nodes_are_used_again_lowest_first() {
        let mut cluster = cluster(4);
        cluster.remove_node(NodeIndex(2));
        cluster.remove_node(NodeIndex(1));
        assert_eq!(cluster.set_node(Node::new("new", Vec::new())), NodeIndex(1));
        assert_eq!(cluster.set_node(Node::new("newer", Vec::new())), NodeIndex(2));
        assert_eq!(cluster.set_node(Node::new("newest", Vec::new())), NodeIndex(4));
        assert_eq!(cluster.index_of(&"n1".into()), None);
        assert_eq!(cluster.nodes().count(), 5);
    }
}
