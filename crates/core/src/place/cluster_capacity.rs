//! All nodes, and the best of them for a pod.

use super::capacity::{GpuClass, HostUsage, MAX_GPUS, NodeCapacity, Usage};
use super::fit::PreparedAsk;
use super::placement::Placement;
use super::policies::{self, NodeRanking};
use super::rank_cache::{AskRanks, Nodes, RankCache};
use crate::model::{Node, NodeName, PodAsk};
use std::collections::HashMap;
use std::sync::Arc;

/// A node's place in the cluster.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct NodeIndex(pub usize);

/// Where a pod goes.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Decision {
    /// The node.
    pub node: NodeIndex,
    /// The GPUs.
    pub placement: Placement,
    /// How good, in the ranking's own terms.
    pub rank: i64,
    /// Which GPUs the placement's indexes mean.
    pub(crate) layout: u64,
}

/// The room on every node.
#[derive(Debug, Default)]
pub struct ClusterCapacity {
    classes: Vec<GpuClass>,
    nodes: Vec<NodeCapacity>,
    /// When each node last changed.
    changed: Vec<u64>,
    names: HashMap<NodeName, usize>,
    boards: RankCache,
    clock: u64,
}

impl ClusterCapacity {
    /// A cluster of empty nodes.
    pub fn new(nodes: impl IntoIterator<Item = Node>) -> ClusterCapacity {
        let mut cluster = ClusterCapacity::default();
        for node in nodes {
            cluster.set_node(node);
        }
        cluster
    }

    /// Adds a node, or replaces what is known of it. What is taken on it must be charged again. GPUs beyond
    /// [`MAX_GPUS`] are left out; a snapshot with more is refused before it comes here.
    pub fn set_node(&mut self, mut node: Node) -> NodeIndex {
        node.gpus.truncate(MAX_GPUS);
        let classes: Vec<u16> = node.gpus.iter().map(|gpu| self.class(&GpuClass::of(&node, gpu))).collect();
        let at = match self.names.get(&node.name) {
            Some(&at) => at,
            // The lowest index nobody uses.
            None => self.nodes.iter().position(|capacity| capacity.removed).unwrap_or(self.nodes.len()),
        };
        self.names.insert(node.name.clone(), at);
        let capacity = NodeCapacity::new(Arc::new(node), &classes, self.clock);
        if at == self.nodes.len() {
            self.nodes.push(capacity);
            self.changed.push(0);
        } else {
            self.nodes[at] = capacity;
        }
        self.touch(at);
        NodeIndex(at)
    }

    /// Forgets a node. Its index is given to the next new one; the others keep theirs.
    pub fn remove_node(&mut self, node: NodeIndex) {
        let capacity = &mut self.nodes[node.0];
        self.names.remove(&capacity.node.name);
        *capacity =
            NodeCapacity::new(Arc::new(Node::new(capacity.node.name.clone(), Vec::new())), &[], self.clock);
        capacity.removed = true;
        self.touch(node.0);
    }

    /// Every node there is, in order.
    pub fn nodes(&self) -> impl Iterator<Item = (NodeIndex, &NodeCapacity)> {
        let nodes = self.nodes.iter().enumerate().filter(|(_, capacity)| !capacity.removed);
        nodes.map(|(at, capacity)| (NodeIndex(at), capacity))
    }

    /// One node.
    pub fn node_capacity(&self, node: NodeIndex) -> &NodeCapacity {
        &self.nodes[node.0]
    }

    /// The classes of GPU seen so far.
    pub fn classes(&self) -> &[GpuClass] {
        &self.classes
    }

    /// The node of this name.
    pub fn node(&self, name: &NodeName) -> Option<NodeIndex> {
        self.names.get(name).copied().map(NodeIndex)
    }

    /// Takes charges off a node's room.
    pub fn add_usage(&mut self, node: NodeIndex, usage: &[(usize, Usage)], host: HostUsage) {
        self.change(node, usage, Usage::plus, |used| used.plus(host));
    }

    /// Gives charges back.
    pub fn remove_usage(&mut self, node: NodeIndex, usage: &[(usize, Usage)], host: HostUsage) {
        self.change(node, usage, Usage::minus, |used| used.minus(host));
    }

    fn change(
        &mut self,
        node: NodeIndex,
        usage: &[(usize, Usage)],
        apply: impl Fn(Usage, Usage) -> Usage,
        apply_host: impl Fn(HostUsage) -> HostUsage,
    ) {
        let capacity = &mut self.nodes[node.0];
        for &(gpu, usage) in usage {
            if let Some(gpu) = capacity.gpus.get_mut(gpu) {
                gpu.used = apply(gpu.used, usage);
            }
        }
        capacity.host_used = apply_host(capacity.host_used);
        self.touch(node.0);
    }

    /// Resolves an ask against this cluster's classes of GPU.
    pub fn prepare(&self, ask: &PodAsk) -> PreparedAsk {
        PreparedAsk::new(ask, &self.classes)
    }

    /// Whether a pod fits a node.
    pub fn fits(&self, node: NodeIndex, prepared: &PreparedAsk) -> bool {
        policies::fits(self.node_capacity(node), &self.classes, prepared)
    }

    /// Places a pod on a given node.
    pub fn place_on(&self, node: NodeIndex, ask: &PodAsk, ranking: &impl NodeRanking) -> Option<Placement> {
        ranking.place(self.node_capacity(node), &self.classes, &self.prepare(ask))
    }

    /// The best node for a pod, and the GPUs there; `None` where it fits nowhere.
    pub fn best(&mut self, ask: &PodAsk, ranking: &impl NodeRanking) -> Option<Decision> {
        let board = self.board(ask, ranking);
        let (node, rank) = board.highest()?;
        let prepared = board.prepared();
        let capacity = self.node_capacity(node);
        let placement = ranking.place(capacity, &self.classes, &prepared)?;
        Some(Decision { node, placement, rank, layout: capacity.layout })
    }

    /// The rank of every node that a pod fits, in order.
    pub fn ranks(&mut self, ask: &PodAsk, ranking: &impl NodeRanking) -> Vec<(NodeIndex, i64)> {
        self.board(ask, ranking).fitting().collect()
    }

    /// The node of a decision, while its indexes still mean the GPUs they meant when it was taken.
    pub(crate) fn current(&self, decision: &Decision) -> Option<&NodeCapacity> {
        self.nodes
            .get(decision.node.0)
            .filter(|capacity| !capacity.removed && capacity.layout == decision.layout)
    }

    /// The up-to-date ranks for an ask.
    fn board(&mut self, ask: &PodAsk, ranking: &impl NodeRanking) -> &AskRanks {
        self.clock += 1;
        let nodes =
            Nodes { nodes: &self.nodes, classes: &self.classes, changed: &self.changed, now: self.clock };
        self.boards.up_to_date(ask, ranking, &nodes)
    }

    fn class(&mut self, class: &GpuClass) -> u16 {
        let at = self.classes.iter().position(|known| known == class).unwrap_or_else(|| {
            self.classes.push(class.clone());
            self.classes.len() - 1
        });
        // 65,536 kinds of GPU in one cluster do not exist; the last one stands for the rest.
        u16::try_from(at).unwrap_or(u16::MAX)
    }

    fn touch(&mut self, node: usize) {
        self.clock += 1;
        self.changed[node] = self.clock;
    }
}
