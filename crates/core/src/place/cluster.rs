//! All nodes, and the best of them for a pod.

use super::board::{Board, Boards, Nodes};
use super::fit::Prepared;
use super::placement::Placement;
use super::rank::{self, Ranking};
use super::room::{Charge, GpuClass, HostUse, MAX_GPUS, NodeRoom};
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
pub struct Cluster {
    classes: Vec<GpuClass>,
    rooms: Vec<NodeRoom>,
    /// When each node last changed.
    changed: Vec<u64>,
    names: HashMap<NodeName, usize>,
    boards: Boards,
    clock: u64,
}

impl Cluster {
    /// A cluster of empty nodes.
    pub fn new(nodes: impl IntoIterator<Item = Node>) -> Cluster {
        let mut cluster = Cluster::default();
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
            None => self.rooms.iter().position(|room| room.removed).unwrap_or(self.rooms.len()),
        };
        self.names.insert(node.name.clone(), at);
        let room = NodeRoom::new(Arc::new(node), &classes, self.clock);
        if at == self.rooms.len() {
            self.rooms.push(room);
            self.changed.push(0);
        } else {
            self.rooms[at] = room;
        }
        self.touch(at);
        NodeIndex(at)
    }

    /// Forgets a node. Its index is given to the next new one; the others keep theirs.
    pub fn remove_node(&mut self, node: NodeIndex) {
        let room = &mut self.rooms[node.0];
        self.names.remove(&room.node.name);
        *room = NodeRoom::new(Arc::new(Node::new(room.node.name.clone(), Vec::new())), &[], self.clock);
        room.removed = true;
        self.touch(node.0);
    }

    /// Every node there is, in order.
    pub fn nodes(&self) -> impl Iterator<Item = (NodeIndex, &NodeRoom)> {
        let rooms = self.rooms.iter().enumerate().filter(|(_, room)| !room.removed);
        rooms.map(|(at, room)| (NodeIndex(at), room))
    }

    /// One node.
    pub fn room(&self, node: NodeIndex) -> &NodeRoom {
        &self.rooms[node.0]
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
    pub fn take(&mut self, node: NodeIndex, charges: &[(usize, Charge)], host: HostUse) {
        self.change(node, charges, Charge::plus, |used| used.plus(host));
    }

    /// Gives charges back.
    pub fn give_back(&mut self, node: NodeIndex, charges: &[(usize, Charge)], host: HostUse) {
        self.change(node, charges, Charge::minus, |used| used.minus(host));
    }

    fn change(
        &mut self,
        node: NodeIndex,
        charges: &[(usize, Charge)],
        apply: impl Fn(Charge, Charge) -> Charge,
        apply_host: impl Fn(HostUse) -> HostUse,
    ) {
        let room = &mut self.rooms[node.0];
        for &(gpu, charge) in charges {
            if let Some(gpu) = room.gpus.get_mut(gpu) {
                gpu.used = apply(gpu.used, charge);
            }
        }
        room.host_used = apply_host(room.host_used);
        self.touch(node.0);
    }

    /// Resolves an ask against this cluster's classes of GPU.
    pub fn prepare(&self, ask: &PodAsk) -> Prepared {
        Prepared::new(ask, &self.classes)
    }

    /// Whether a pod fits a node.
    pub fn fits(&self, node: NodeIndex, prepared: &Prepared) -> bool {
        rank::fits(self.room(node), &self.classes, prepared)
    }

    /// Places a pod on a given node.
    pub fn place_on(&self, node: NodeIndex, ask: &PodAsk, ranking: &impl Ranking) -> Option<Placement> {
        ranking.place(self.room(node), &self.classes, &self.prepare(ask))
    }

    /// The best node for a pod, and the GPUs there; `None` where it fits nowhere.
    pub fn best(&mut self, ask: &PodAsk, ranking: &impl Ranking) -> Option<Decision> {
        let board = self.board(ask, ranking);
        let (node, rank) = board.highest()?;
        let prepared = board.prepared();
        let room = self.room(node);
        let placement = ranking.place(room, &self.classes, &prepared)?;
        Some(Decision { node, placement, rank, layout: room.layout })
    }

    /// The rank of every node that a pod fits, in order.
    pub fn ranks(&mut self, ask: &PodAsk, ranking: &impl Ranking) -> Vec<(NodeIndex, i64)> {
        self.board(ask, ranking).fitting().collect()
    }

    /// The node of a decision, while its indexes still mean the GPUs they meant when it was taken.
    pub(crate) fn current(&self, decision: &Decision) -> Option<&NodeRoom> {
        self.rooms.get(decision.node.0).filter(|room| !room.removed && room.layout == decision.layout)
    }

    /// The up-to-date ranks for an ask.
    fn board(&mut self, ask: &PodAsk, ranking: &impl Ranking) -> &Board {
        self.clock += 1;
        let nodes =
            Nodes { rooms: &self.rooms, classes: &self.classes, changed: &self.changed, now: self.clock };
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
