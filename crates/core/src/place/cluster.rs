//! All nodes, and the best of them for a pod.
//!
//! Ranks are kept per kind of ask: when the same ask comes again, only nodes that changed since are ranked
//! anew. A decision then costs a scan over one number per node.

use super::fit::Prepared;
use super::placement::Placement;
use super::rank::{self, Ranking};
use super::room::{Charge, GpuClass, HostUse, MAX_GPUS, NodeRoom, State};
use crate::model::{Node, NodeName, PodAsk};
use std::collections::HashMap;
use std::hash::{BuildHasher, RandomState};
use std::sync::Arc;

/// Kinds of ask whose ranks are kept. Beyond it the one unused for longest goes.
const MOST_BOARDS: usize = 512;
/// The rank of a node that does not fit.
const UNFIT: i64 = i64::MIN;

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
    boards: HashMap<u64, Vec<Board>>,
    board_count: usize,
    clock: u64,
    hasher: RandomState,
}

/// The ranks of all nodes for one kind of ask under one ranking.
#[derive(Debug)]
struct Board {
    ranking: &'static str,
    prepared: Arc<Prepared>,
    epoch: u64,
    /// Ranks hold for every node unchanged since then.
    seen: u64,
    used: u64,
    ranks: Vec<i64>,
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

    /// Adds a node, or replaces what is known of it. What is taken on it must be charged again.
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
        let (node, rank) = highest(&board.ranks)?;
        let prepared = Arc::clone(&board.prepared);
        let room = &self.rooms[node];
        let placement = ranking.place(room, &self.classes, &prepared)?;
        Some(Decision { node: NodeIndex(node), placement, rank, layout: room.layout })
    }

    /// The rank of every node that a pod fits, in order.
    pub fn ranks(&mut self, ask: &PodAsk, ranking: &impl Ranking) -> Vec<(NodeIndex, i64)> {
        let board = self.board(ask, ranking);
        let ranks = board.ranks.iter().enumerate().filter(|(_, rank)| **rank != UNFIT);
        ranks.map(|(at, &rank)| (NodeIndex(at), rank)).collect()
    }

    /// Whether a decision still means the GPUs it meant when it was taken.
    pub(crate) fn is_current(&self, decision: &Decision) -> bool {
        self.rooms.get(decision.node.0).is_some_and(|room| !room.removed && room.layout == decision.layout)
    }

    /// The up-to-date ranks for an ask.
    fn board(&mut self, ask: &PodAsk, ranking: &impl Ranking) -> &Board {
        self.clock += 1;
        let key = self.hasher.hash_one((ranking.name(), Likeness(ask)));
        let bucket = self.boards.entry(key).or_default();
        let known = bucket
            .iter()
            .position(|b| b.ranking == ranking.name() && Likeness(&b.prepared.ask) == Likeness(ask));
        let at = match known {
            Some(at)
                if bucket[at].prepared.wants.first().is_none_or(|w| w.needs.len() == self.classes.len()) =>
            {
                at
            }
            // A class of GPU came since: what the ask comes to there is not known yet.
            Some(at) => {
                bucket[at] = Board::new(ask, ranking.name(), &self.classes);
                at
            }
            None => {
                bucket.push(Board::new(ask, ranking.name(), &self.classes));
                self.board_count += 1;
                bucket.len() - 1
            }
        };
        if self.board_count > MOST_BOARDS {
            self.drop_oldest_board(key);
        }
        let (rooms, classes, changed) = (&self.rooms, &self.classes, &self.changed);
        let board = &mut self.boards.entry(key).or_default()[at];
        board.used = self.clock;
        board.refresh(rooms, classes, changed, self.clock, ranking);
        board
    }

    /// Forgets the board unused for longest, sparing the bucket just asked for.
    fn drop_oldest_board(&mut self, spared: u64) {
        let oldest = self
            .boards
            .iter()
            .filter(|(key, _)| **key != spared)
            .flat_map(|(key, bucket)| bucket.iter().map(|board| (board.used, *key)))
            .min();
        if let Some((used, key)) = oldest
            && let Some(bucket) = self.boards.get_mut(&key)
        {
            let before = bucket.len();
            bucket.retain(|board| board.used != used);
            self.board_count -= before - bucket.len();
            if bucket.is_empty() {
                self.boards.remove(&key);
            }
        }
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

impl Board {
    fn new(ask: &PodAsk, ranking: &'static str, classes: &[GpuClass]) -> Board {
        let prepared = Arc::new(Prepared::new(ask, classes));
        Board { ranking, prepared, epoch: 0, seen: 0, used: 0, ranks: Vec::new() }
    }

    fn refresh(
        &mut self,
        rooms: &[NodeRoom],
        classes: &[GpuClass],
        changed: &[u64],
        now: u64,
        ranking: &impl Ranking,
    ) {
        let seen = if self.epoch == ranking.epoch() { self.seen } else { 0 };
        self.ranks.resize(rooms.len(), UNFIT);
        // A pod of several containers is worth remembering by state: in a large cluster many nodes are alike.
        let costly = self.prepared.wants.len() > 1 && self.prepared.ask.constraints.uuids.is_open();
        let mut known: HashMap<State, i64> = HashMap::new();
        for (node, room) in rooms.iter().enumerate().filter(|&(node, _)| changed[node] > seen) {
            let rank = || ranking.rank(room, classes, &self.prepared).unwrap_or(UNFIT);
            self.ranks[node] = match room {
                room if room.removed => UNFIT,
                room if costly => *known.entry(room.state()).or_insert_with(rank),
                _ => rank(),
            };
        }
        self.epoch = ranking.epoch();
        self.seen = now;
    }
}

/// The first node of the highest rank.
fn highest(ranks: &[i64]) -> Option<(usize, i64)> {
    // The maximum first, then where it is: both passes are simple enough to be vectorised.
    let best = ranks.iter().copied().max().filter(|&rank| rank != UNFIT)?;
    let node = ranks.iter().position(|&rank| rank == best)?;
    Some((node, best))
}

/// Two asks are alike when the allocator cannot tell them apart: everything but the containers' names.
struct Likeness<'a>(&'a PodAsk);

impl Likeness<'_> {
    fn wants(&self) -> impl Iterator<Item = (crate::model::Role, crate::model::Want)> {
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
