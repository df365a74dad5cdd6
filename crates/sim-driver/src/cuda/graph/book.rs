//! All graphs of the process: nodes, edges, and who holds which object. Nothing here runs.
//!
//! One lock keeps all of it. Programs build graphs now and then and launch them often, and a launch takes the lock only
//! to learn what to do.

use super::exec::Exec;
use super::work::{Call, Work};
use super::*;
use std::collections::{BTreeMap, BTreeSet, BinaryHeap};

/// A graph, by its handle.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(in crate::cuda) struct GraphKey(pub(super) usize);

/// A node, by its handle.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(in crate::cuda) struct NodeKey(pub(super) usize);

/// What an edge says beyond its ends; zeros usually.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(in crate::cuda) struct Port {
    pub(super) from: u8,
    pub(super) to: u8,
    pub(super) kind: u8,
}

/// What a node comes after.
pub(in crate::cuda) type After = (NodeKey, Port);

/// A node of a graph.
pub(super) struct Node {
    /// Never used again, unlike its handle.
    pub(super) id: u64,
    pub(super) graph: GraphKey,
    pub(super) work: Work,
    pub(super) after: Vec<After>,
    pub(super) before: Vec<NodeKey>,
    /// The node it was cloned from.
    pub(super) origin: u64,
    /// In an executable graph: whether it does anything.
    pub(super) enabled: bool,
}

/// A graph.
pub(super) struct Graph {
    pub(super) id: u64,
    /// In the order they were added.
    pub(super) nodes: Vec<NodeKey>,
    /// Objects of the program that it holds, and how often.
    pub(super) objects: BTreeMap<usize, u32>,
    /// The graph it was cloned from.
    pub(super) origin: u64,
    /// Whether a node or an executable graph owns it: it is not the program's to destroy.
    pub(super) owned: bool,
    /// How many executable graphs were made from it and live.
    pub(super) execs: u32,
}

/// An object of the program that graphs keep alive.
pub(super) struct Object {
    pub(super) references: u64,
    pub(super) destroy: Call,
}

/// All of it.
pub(super) struct Book {
    pub(super) graphs: BTreeMap<GraphKey, Graph>,
    pub(super) nodes: BTreeMap<NodeKey, Node>,
    pub(super) execs: BTreeMap<usize, Exec>,
    pub(super) objects: BTreeMap<usize, Object>,
    /// Objects that nobody holds any more, to be destroyed once the lock is free.
    pub(super) due: Vec<Call>,
}

static GRAPHS: Arena<u64> = Arena::new();
static NODES: Arena<u64> = Arena::new();

const BAD: CudaError = CudaError::INVALID_VALUE;

/// A handle that nothing in use has.
pub(super) fn new_handle(arena: &'static Arena<u64>) -> Result<usize, CudaError> {
    let tag = arena.make(|| 0, |_| ()).ok_or(CudaError::OUT_OF_MEMORY)?;
    Ok(handle_of::<_, u8>(tag) as usize)
}

impl Book {
    pub(super) const fn new() -> Self {
        Self {
            graphs: BTreeMap::new(),
            nodes: BTreeMap::new(),
            execs: BTreeMap::new(),
            objects: BTreeMap::new(),
            due: Vec::new(),
        }
    }

    pub(super) fn graph(&self, key: GraphKey) -> Result<&Graph, CudaError> {
        self.graphs.get(&key).ok_or(BAD)
    }

    pub(super) fn node(&self, key: NodeKey) -> Result<&Node, CudaError> {
        self.nodes.get(&key).ok_or(BAD)
    }

    pub(super) fn create(&mut self, owned: bool) -> Result<GraphKey, CudaError> {
        let key = GraphKey(new_handle(&GRAPHS)?);
        let graph =
            Graph { id: unique(), nodes: Vec::new(), objects: BTreeMap::new(), origin: 0, owned, execs: 0 };
        self.graphs.insert(key, graph);
        Ok(key)
    }

    /// Removes a graph, its nodes, and the graphs inside them.
    pub(super) fn destroy(&mut self, key: GraphKey) {
        let Some(graph) = self.graphs.remove(&key) else { return };
        GRAPHS.drop(key.0 as *mut u8);
        for node in graph.nodes {
            self.forget(node);
        }
        for (object, count) in graph.objects {
            let _ = self.release(object, count);
        }
    }

    fn forget(&mut self, key: NodeKey) -> Option<Node> {
        let node = self.nodes.remove(&key)?;
        NODES.drop(key.0 as *mut u8);
        self.drop_work(&node.work);
        Some(node)
    }

    pub(super) fn drop_work(&mut self, work: &Work) {
        if let Work::Child(child) = work {
            self.destroy(*child);
        }
    }

    /// Adds a node that comes after others of the same graph.
    pub(super) fn add(
        &mut self,
        graph: GraphKey,
        after: Vec<After>,
        work: Work,
    ) -> Result<NodeKey, CudaError> {
        self.check_after(graph, &after)?;
        self.insert(graph, after, work, 0)
    }

    /// Whether a node of the graph can come after these.
    pub(super) fn check_after(&self, graph: GraphKey, after: &[After]) -> Result<(), CudaError> {
        self.graph(graph)?;
        let mut seen = BTreeSet::new();
        for (node, _) in after {
            if self.node(*node)?.graph != graph || !seen.insert(*node) {
                return Err(BAD);
            }
        }
        Ok(())
    }

    fn insert(
        &mut self,
        graph: GraphKey,
        after: Vec<After>,
        work: Work,
        origin: u64,
    ) -> Result<NodeKey, CudaError> {
        let key = NodeKey(new_handle(&NODES)?);
        for (before, _) in &after {
            if let Some(node) = self.nodes.get_mut(before) {
                node.before.push(key);
            }
        }
        let node = Node { id: unique(), graph, work, after, before: Vec::new(), origin, enabled: true };
        self.nodes.insert(key, node);
        if let Some(graph) = self.graphs.get_mut(&graph) {
            graph.nodes.push(key);
        }
        Ok(key)
    }

    /// Removes a node and its edges.
    pub(super) fn remove(&mut self, key: NodeKey) -> Result<(), CudaError> {
        let graph = self.node(key)?.graph;
        if self.has_memory(graph) {
            return Err(CudaError::NOT_SUPPORTED);
        }
        let Some(node) = self.forget(key) else { return Err(BAD) };
        for (other, _) in node.after {
            if let Some(other) = self.nodes.get_mut(&other) {
                other.before.retain(|&before| before != key);
            }
        }
        for other in node.before {
            if let Some(other) = self.nodes.get_mut(&other) {
                other.after.retain(|&(after, _)| after != key);
            }
        }
        if let Some(graph) = self.graphs.get_mut(&graph) {
            graph.nodes.retain(|&other| other != key);
        }
        Ok(())
    }

    /// Whether the graph allocates or frees: such a graph is bound to its addresses.
    pub(super) fn has_memory(&self, graph: GraphKey) -> bool {
        self.graphs.get(&graph).is_some_and(|graph| {
            graph.nodes.iter().any(|node| {
                let work = self.nodes.get(node).map(|node| &node.work);
                matches!(work, Some(Work::Alloc(_) | Work::Free(_)))
            })
        })
    }

    /// What the graph's nodes allocate.
    pub(super) fn allocations(&self, graph: GraphKey) -> Vec<Arc<Allocation>> {
        let nodes = self.graphs.get(&graph).into_iter().flat_map(|graph| &graph.nodes);
        let made = nodes.filter_map(|node| match self.nodes.get(node).map(|node| &node.work) {
            Some(Work::Alloc(made)) => Some(Arc::clone(made)),
            _ => None,
        });
        made.collect()
    }

    /// Whether the graph may free what lies there: an allocation of a graph, and only once.
    pub(super) fn can_free(&self, graph: GraphKey, pointer: CUdeviceptr) -> bool {
        let mut nodes = self.graphs.get(&graph).into_iter().flat_map(|graph| &graph.nodes);
        let freed = |node| match self.nodes.get(node).map(|node| &node.work) {
            Some(Work::Free(other)) => *other == pointer,
            _ => false,
        };
        memory::find(pointer).is_some() && !nodes.any(freed)
    }

    /// Adds edges, all of them or none. A circle is only found when the graph is made executable, as the driver does.
    pub(super) fn connect(
        &mut self,
        graph: GraphKey,
        edges: &[(NodeKey, NodeKey, Port)],
    ) -> Result<(), CudaError> {
        self.graph(graph)?;
        let mut seen = BTreeSet::new();
        for &(from, to, _) in edges {
            let (before, after) = (self.node(from)?, self.node(to)?);
            let known = after.after.iter().any(|&(other, _)| other == from);
            if before.graph != graph || after.graph != graph || from == to || known {
                return Err(BAD);
            }
            if !seen.insert((from, to)) {
                return Err(BAD);
            }
        }
        for &(from, to, port) in edges {
            if let Some(node) = self.nodes.get_mut(&from) {
                node.before.push(to);
            }
            if let Some(node) = self.nodes.get_mut(&to) {
                node.after.push((from, port));
            }
        }
        Ok(())
    }

    /// Removes edges, all of them or none.
    pub(super) fn disconnect(
        &mut self,
        graph: GraphKey,
        edges: &[(NodeKey, NodeKey, Port)],
    ) -> Result<(), CudaError> {
        self.graph(graph)?;
        if !edges.is_empty() && self.has_memory(graph) {
            return Err(CudaError::NOT_SUPPORTED);
        }
        let mut seen = BTreeSet::new();
        for &(from, to, port) in edges {
            let (before, after) = (self.node(from)?, self.node(to)?);
            let known = after.after.contains(&(from, port));
            if before.graph != graph || after.graph != graph || !known || !seen.insert((from, to)) {
                return Err(BAD);
            }
        }
        for &(from, to, _) in edges {
            if let Some(node) = self.nodes.get_mut(&from) {
                node.before.retain(|&other| other != to);
            }
            if let Some(node) = self.nodes.get_mut(&to) {
                node.after.retain(|&(other, _)| other != from);
            }
        }
        Ok(())
    }

    /// All edges, in the order of the nodes they lead to.
    pub(super) fn edges(&self, graph: GraphKey) -> Result<Vec<(NodeKey, NodeKey, Port)>, CudaError> {
        let mut edges = Vec::new();
        for &to in &self.graph(graph)?.nodes {
            edges.extend(self.node(to)?.after.iter().map(|&(from, port)| (from, to, port)));
        }
        Ok(edges)
    }

    /// The nodes that come after none.
    pub(super) fn roots(&self, graph: GraphKey) -> Result<Vec<NodeKey>, CudaError> {
        let nodes = self.graph(graph)?.nodes.iter().copied();
        Ok(nodes.filter(|&node| self.node(node).is_ok_and(|node| node.after.is_empty())).collect())
    }

    /// Nodes in an order in which each comes after those it depends on: as they were added where that is free, kernels
    /// together where that is possible. A node of a circle if there is one.
    pub(super) fn order(&self, graph: GraphKey) -> Result<Vec<NodeKey>, NodeKey> {
        let Ok(graph) = self.graph(graph) else { return Ok(Vec::new()) };
        let position: BTreeMap<NodeKey, usize> =
            graph.nodes.iter().enumerate().map(|(index, &key)| (key, index)).collect();
        let node = |index: usize| graph.nodes.get(index).and_then(|key| self.nodes.get(key));
        let rank = |index: usize| {
            let host = node(index).is_some_and(|node| node.work.is_of_host());
            std::cmp::Reverse((host, index))
        };
        let mut missing: Vec<usize> =
            (0..graph.nodes.len()).map(|index| node(index).map_or(0, |node| node.after.len())).collect();
        let mut ready: BinaryHeap<_> = (0..missing.len()).filter(|&n| missing[n] == 0).map(rank).collect();
        let mut order = Vec::with_capacity(missing.len());
        while let Some(std::cmp::Reverse((_, index))) = ready.pop() {
            order.push(graph.nodes[index]);
            for next in node(index).into_iter().flat_map(|node| &node.before) {
                let Some(&next) = position.get(next) else { continue };
                missing[next] -= 1;
                if missing[next] == 0 {
                    ready.push(rank(next));
                }
            }
        }
        match missing.iter().position(|&missing| missing > 0) {
            Some(index) => Err(graph.nodes[index]),
            None => Ok(order),
        }
    }

    /// Every node that these come after, and these.
    pub(super) fn ancestors(&self, nodes: impl Iterator<Item = NodeKey>) -> BTreeSet<NodeKey> {
        let mut found = BTreeSet::new();
        let mut open: Vec<NodeKey> = nodes.collect();
        while let Some(key) = open.pop() {
            if found.insert(key)
                && let Some(node) = self.nodes.get(&key)
            {
                open.extend(node.after.iter().map(|&(before, _)| before));
            }
        }
        found
    }

    /// Copies a graph, the graphs inside its nodes and its holds on objects.
    pub(super) fn clone_graph(&mut self, from: GraphKey, owned: bool) -> Result<GraphKey, CudaError> {
        let copy = self.create(owned)?;
        let filled = self.fill(from, copy);
        if filled.is_err() {
            self.destroy(copy);
        }
        filled.map(|()| copy)
    }

    fn fill(&mut self, from: GraphKey, copy: GraphKey) -> Result<(), CudaError> {
        let original = self.graph(from)?;
        let (id, nodes, objects) = (original.id, original.nodes.clone(), original.objects.clone());
        let mut twins = BTreeMap::new();
        for &key in &nodes {
            let node = self.node(key)?;
            let (origin, enabled) = (node.id, node.enabled);
            let work = match node.work.clone() {
                Work::Child(child) => Work::Child(self.clone_graph(child, true)?),
                work => work,
            };
            let twin = self.insert(copy, Vec::new(), work, origin)?;
            if let Some(node) = self.nodes.get_mut(&twin) {
                node.enabled = enabled;
            }
            twins.insert(key, twin);
        }
        // Edges come when all nodes are there: a node may come after one that was added later.
        for key in nodes {
            let (after, before) = {
                let node = self.node(key)?;
                let twin = |other: &NodeKey| twins.get(other).copied();
                let after: Vec<After> =
                    node.after.iter().filter_map(|(other, port)| Some((twin(other)?, *port))).collect();
                (after, node.before.iter().filter_map(twin).collect())
            };
            if let Some(node) = twins.get(&key).and_then(|twin| self.nodes.get_mut(twin)) {
                node.after = after;
                node.before = before;
            }
        }
        for (&object, &count) in &objects {
            self.retain(object, count)?;
        }
        if let Some(graph) = self.graphs.get_mut(&copy) {
            graph.origin = id;
            graph.objects = objects;
        }
        Ok(())
    }

    /// The node of a cloned graph that was made from this one.
    pub(super) fn find_in_clone(&self, node: NodeKey, clone: GraphKey) -> Result<NodeKey, CudaError> {
        let node = self.node(node)?;
        let clone = self.graph(clone)?;
        if clone.origin != self.graph(node.graph)?.id {
            return Err(BAD);
        }
        let found = clone.nodes.iter().copied();
        let mut found = found.filter(|&twin| self.node(twin).is_ok_and(|twin| twin.origin == node.id));
        found.next().ok_or(BAD)
    }

    /// More holds on an object.
    pub(super) fn retain(&mut self, object: usize, count: u32) -> Result<(), CudaError> {
        let object = self.objects.get_mut(&object).ok_or(BAD)?;
        object.references += u64::from(count);
        Ok(())
    }

    /// Fewer.
    pub(super) fn release(&mut self, object: usize, count: u32) -> Result<(), CudaError> {
        let found = self.objects.get_mut(&object).ok_or(BAD)?;
        found.references = found.references.checked_sub(u64::from(count)).ok_or(BAD)?;
        if found.references == 0
            && let Some(found) = self.objects.remove(&object)
        {
            objects::let_go(object);
            self.due.push(found.destroy);
        }
        Ok(())
    }
}
