//! All graphs of the process: nodes, edges and references to user objects. Nothing here executes.
//!
//! One lock protects the whole store. Programs build graphs rarely and launch them often, and a launch locks the
//! store only to get its plan.

use super::executable::ExecutableGraph;
use super::node_operation::{HostCallback, NodeOperation};
use super::*;
use std::collections::{BTreeMap, BTreeSet, BinaryHeap};

/// A graph, identified by its handle.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(in crate::cuda) struct GraphKey(pub(super) usize);

/// A node, identified by its handle.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(in crate::cuda) struct NodeKey(pub(super) usize);

/// The edge data of a dependency; usually zero.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(in crate::cuda) struct EdgePort {
    pub(super) from: u8,
    pub(super) to: u8,
    pub(super) kind: u8,
}

/// A node that another node depends on, with the edge data.
pub(in crate::cuda) type Dependency = (NodeKey, EdgePort);

/// A node of a graph.
pub(super) struct GraphNode {
    /// Identity of the node; never reused, unlike its handle.
    pub(super) id: u64,
    pub(super) graph: GraphKey,
    pub(super) operation: NodeOperation,
    pub(super) dependencies: Vec<Dependency>,
    pub(super) dependents: Vec<NodeKey>,
    /// The id of the node from which it was cloned, or zero.
    pub(super) origin: u64,
    /// In an executable graph: whether the node runs.
    pub(super) enabled: bool,
}

/// A graph and its nodes.
pub(super) struct GraphRecord {
    pub(super) id: u64,
    /// Nodes in the order in which they were added.
    pub(super) nodes: Vec<NodeKey>,
    /// References to user objects that the graph holds, with their counts.
    pub(super) objects: BTreeMap<usize, u32>,
    /// The id of the graph from which it was cloned, or zero.
    pub(super) origin: u64,
    /// Whether a node or an executable graph owns it, so that the program must not destroy it.
    pub(super) owned: bool,
    /// Number of executable graphs instantiated from it that still exist.
    pub(super) execs: u32,
}

/// A user object whose lifetime is tied to graphs.
pub(super) struct UserObject {
    pub(super) references: u64,
    pub(super) destroy: HostCallback,
}

/// The store of all graphs, executables and user objects.
pub(super) struct GraphStore {
    pub(super) graphs: BTreeMap<GraphKey, GraphRecord>,
    pub(super) nodes: BTreeMap<NodeKey, GraphNode>,
    pub(super) execs: BTreeMap<usize, ExecutableGraph>,
    pub(super) objects: BTreeMap<usize, UserObject>,
    /// Destructors of unreferenced user objects, to be called after the lock is released.
    pub(super) pending_destructors: Vec<HostCallback>,
}

static GRAPHS: HandleArena<u64> = HandleArena::new();
static NODES: HandleArena<u64> = HandleArena::new();

const INVALID_VALUE: CudaError = CudaError::INVALID_VALUE;

/// Allocates a unique handle.
pub(super) fn new_handle(arena: &'static HandleArena<u64>) -> Result<usize, CudaError> {
    let tag = arena.make(|| 0, |_| ()).ok_or(CudaError::OUT_OF_MEMORY)?;
    Ok(handle_of::<_, u8>(tag) as usize)
}

impl GraphStore {
    pub(super) const fn new() -> Self {
        Self {
            graphs: BTreeMap::new(),
            nodes: BTreeMap::new(),
            execs: BTreeMap::new(),
            objects: BTreeMap::new(),
            pending_destructors: Vec::new(),
        }
    }

    pub(super) fn graph(&self, key: GraphKey) -> Result<&GraphRecord, CudaError> {
        self.graphs.get(&key).ok_or(INVALID_VALUE)
    }

    pub(super) fn node(&self, key: NodeKey) -> Result<&GraphNode, CudaError> {
        self.nodes.get(&key).ok_or(INVALID_VALUE)
    }

    pub(super) fn create(&mut self, owned: bool) -> Result<GraphKey, CudaError> {
        let key = GraphKey(new_handle(&GRAPHS)?);
        let graph = GraphRecord {
            id: unique_id(),
            nodes: Vec::new(),
            objects: BTreeMap::new(),
            origin: 0,
            owned,
            execs: 0,
        };
        self.graphs.insert(key, graph);
        Ok(key)
    }

    /// Destroys a graph, its nodes and their child graphs.
    pub(super) fn destroy(&mut self, key: GraphKey) {
        let Some(graph) = self.graphs.remove(&key) else { return };
        GRAPHS.drop(key.0 as *mut u8);
        for node in graph.nodes {
            self.remove_node(node);
        }
        for (object, count) in graph.objects {
            let _ = self.release(object, count);
        }
    }

    fn remove_node(&mut self, key: NodeKey) -> Option<GraphNode> {
        let node = self.nodes.remove(&key)?;
        NODES.drop(key.0 as *mut u8);
        self.drop_operation(&node.operation);
        Some(node)
    }

    pub(super) fn drop_operation(&mut self, operation: &NodeOperation) {
        if let NodeOperation::Child(child) = operation {
            self.destroy(*child);
        }
    }

    /// Adds a node with dependencies on nodes of the same graph.
    pub(super) fn add(
        &mut self,
        graph: GraphKey,
        dependencies: Vec<Dependency>,
        operation: NodeOperation,
    ) -> Result<NodeKey, CudaError> {
        self.check_dependencies(graph, &dependencies)?;
        self.insert(graph, dependencies, operation, 0)
    }

    /// Checks that a node of the graph can depend on these nodes.
    pub(super) fn check_dependencies(
        &self,
        graph: GraphKey,
        dependencies: &[Dependency],
    ) -> Result<(), CudaError> {
        self.graph(graph)?;
        let mut seen = BTreeSet::new();
        for (node, _) in dependencies {
            if self.node(*node)?.graph != graph || !seen.insert(*node) {
                return Err(INVALID_VALUE);
            }
        }
        Ok(())
    }

    fn insert(
        &mut self,
        graph: GraphKey,
        dependencies: Vec<Dependency>,
        operation: NodeOperation,
        origin: u64,
    ) -> Result<NodeKey, CudaError> {
        let key = NodeKey(new_handle(&NODES)?);
        for (before, _) in &dependencies {
            if let Some(node) = self.nodes.get_mut(before) {
                node.dependents.push(key);
            }
        }
        let node = GraphNode {
            id: unique_id(),
            graph,
            operation,
            dependencies,
            dependents: Vec::new(),
            origin,
            enabled: true,
        };
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
        let Some(node) = self.remove_node(key) else { return Err(INVALID_VALUE) };
        for (other, _) in node.dependencies {
            if let Some(other) = self.nodes.get_mut(&other) {
                other.dependents.retain(|&dependent| dependent != key);
            }
        }
        for other in node.dependents {
            if let Some(other) = self.nodes.get_mut(&other) {
                other.dependencies.retain(|&(dependency, _)| dependency != key);
            }
        }
        if let Some(graph) = self.graphs.get_mut(&graph) {
            graph.nodes.retain(|&other| other != key);
        }
        Ok(())
    }

    /// Returns whether the graph allocates or frees memory, which ties it to its addresses.
    pub(super) fn has_memory(&self, graph: GraphKey) -> bool {
        self.graphs.get(&graph).is_some_and(|graph| {
            graph.nodes.iter().any(|node| {
                let operation = self.nodes.get(node).map(|node| &node.operation);
                matches!(operation, Some(NodeOperation::Alloc(_) | NodeOperation::Free(_)))
            })
        })
    }

    /// Returns the allocations of the graph's nodes.
    pub(super) fn allocations(&self, graph: GraphKey) -> Vec<Arc<GraphAllocation>> {
        let nodes = self.graphs.get(&graph).into_iter().flat_map(|graph| &graph.nodes);
        let made = nodes.filter_map(|node| match self.nodes.get(node).map(|node| &node.operation) {
            Some(NodeOperation::Alloc(made)) => Some(Arc::clone(made)),
            _ => None,
        });
        made.collect()
    }

    /// Returns whether a node of the graph may free this address: it must be a graph allocation, freed only once.
    pub(super) fn can_free(&self, graph: GraphKey, pointer: CUdeviceptr) -> bool {
        let mut nodes = self.graphs.get(&graph).into_iter().flat_map(|graph| &graph.nodes);
        let freed = |node| match self.nodes.get(node).map(|node| &node.operation) {
            Some(NodeOperation::Free(other)) => *other == pointer,
            _ => false,
        };
        graph_memory::find(pointer).is_some() && !nodes.any(freed)
    }

    /// Adds all of the edges or none. As in the real driver, a cycle is detected only at instantiation.
    pub(super) fn connect(
        &mut self,
        graph: GraphKey,
        edges: &[(NodeKey, NodeKey, EdgePort)],
    ) -> Result<(), CudaError> {
        self.graph(graph)?;
        let mut seen = BTreeSet::new();
        for &(from, to, _) in edges {
            let (source, target) = (self.node(from)?, self.node(to)?);
            let known = target.dependencies.iter().any(|&(other, _)| other == from);
            if source.graph != graph || target.graph != graph || from == to || known {
                return Err(INVALID_VALUE);
            }
            if !seen.insert((from, to)) {
                return Err(INVALID_VALUE);
            }
        }
        for &(from, to, port) in edges {
            if let Some(node) = self.nodes.get_mut(&from) {
                node.dependents.push(to);
            }
            if let Some(node) = self.nodes.get_mut(&to) {
                node.dependencies.push((from, port));
            }
        }
        Ok(())
    }

    /// Removes all of the edges or none.
    pub(super) fn disconnect(
        &mut self,
        graph: GraphKey,
        edges: &[(NodeKey, NodeKey, EdgePort)],
    ) -> Result<(), CudaError> {
        self.graph(graph)?;
        if !edges.is_empty() && self.has_memory(graph) {
            return Err(CudaError::NOT_SUPPORTED);
        }
        let mut seen = BTreeSet::new();
        for &(from, to, port) in edges {
            let (source, target) = (self.node(from)?, self.node(to)?);
            let known = target.dependencies.contains(&(from, port));
            if source.graph != graph || target.graph != graph || !known || !seen.insert((from, to)) {
                return Err(INVALID_VALUE);
            }
        }
        for &(from, to, _) in edges {
            if let Some(node) = self.nodes.get_mut(&from) {
                node.dependents.retain(|&other| other != to);
            }
            if let Some(node) = self.nodes.get_mut(&to) {
                node.dependencies.retain(|&(other, _)| other != from);
            }
        }
        Ok(())
    }

    /// Returns all edges, ordered by target node.
    pub(super) fn edges(&self, graph: GraphKey) -> Result<Vec<(NodeKey, NodeKey, EdgePort)>, CudaError> {
        let mut edges = Vec::new();
        for &to in &self.graph(graph)?.nodes {
            edges.extend(self.node(to)?.dependencies.iter().map(|&(from, port)| (from, to, port)));
        }
        Ok(edges)
    }

    /// Returns the nodes without dependencies.
    pub(super) fn roots(&self, graph: GraphKey) -> Result<Vec<NodeKey>, CudaError> {
        let nodes = self.graph(graph)?.nodes.iter().copied();
        Ok(nodes.filter(|&node| self.node(node).is_ok_and(|node| node.dependencies.is_empty())).collect())
    }

    /// Returns the nodes in a topological order that keeps the order of insertion where edges allow it and puts
    /// kernels next to each other where possible. The error is a node of a cycle.
    pub(super) fn order(&self, graph: GraphKey) -> Result<Vec<NodeKey>, NodeKey> {
        let Ok(graph) = self.graph(graph) else { return Ok(Vec::new()) };
        let position: BTreeMap<NodeKey, usize> =
            graph.nodes.iter().enumerate().map(|(index, &key)| (key, index)).collect();
        let node = |index: usize| graph.nodes.get(index).and_then(|key| self.nodes.get(key));
        let rank = |index: usize| {
            let host = node(index).is_some_and(|node| node.operation.needs_host());
            std::cmp::Reverse((host, index))
        };
        let mut missing: Vec<usize> = (0..graph.nodes.len())
            .map(|index| node(index).map_or(0, |node| node.dependencies.len()))
            .collect();
        let mut ready: BinaryHeap<_> = (0..missing.len()).filter(|&n| missing[n] == 0).map(rank).collect();
        let mut order = Vec::with_capacity(missing.len());
        while let Some(std::cmp::Reverse((_, index))) = ready.pop() {
            order.push(graph.nodes[index]);
            for next in node(index).into_iter().flat_map(|node| &node.dependents) {
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

    /// Returns these nodes and all nodes that precede them.
    pub(super) fn ancestors(&self, nodes: impl Iterator<Item = NodeKey>) -> BTreeSet<NodeKey> {
        let mut found = BTreeSet::new();
        let mut open: Vec<NodeKey> = nodes.collect();
        while let Some(key) = open.pop() {
            if found.insert(key)
                && let Some(node) = self.nodes.get(&key)
            {
                open.extend(node.dependencies.iter().map(|&(before, _)| before));
            }
        }
        found
    }

    /// Clones a graph with its child graphs and its references to user objects.
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
        let mut copies = BTreeMap::new();
        for &key in &nodes {
            let node = self.node(key)?;
            let (origin, enabled) = (node.id, node.enabled);
            let operation = match node.operation.clone() {
                NodeOperation::Child(child) => NodeOperation::Child(self.clone_graph(child, true)?),
                operation => operation,
            };
            let node_copy = self.insert(copy, Vec::new(), operation, origin)?;
            if let Some(node) = self.nodes.get_mut(&node_copy) {
                node.enabled = enabled;
            }
            copies.insert(key, node_copy);
        }
        // Edges are copied after all nodes: a node may depend on one that was added later.
        for key in nodes {
            let (dependencies, dependents) = {
                let node = self.node(key)?;
                let node_copy = |other: &NodeKey| copies.get(other).copied();
                let dependencies: Vec<Dependency> = node
                    .dependencies
                    .iter()
                    .filter_map(|(other, port)| Some((node_copy(other)?, *port)))
                    .collect();
                (dependencies, node.dependents.iter().filter_map(node_copy).collect())
            };
            if let Some(node) = copies.get(&key).and_then(|node_copy| self.nodes.get_mut(node_copy)) {
                node.dependencies = dependencies;
                node.dependents = dependents;
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

    /// Returns the node of a cloned graph that corresponds to this one.
    pub(super) fn find_in_clone(&self, node: NodeKey, clone: GraphKey) -> Result<NodeKey, CudaError> {
        let node = self.node(node)?;
        let clone = self.graph(clone)?;
        if clone.origin != self.graph(node.graph)?.id {
            return Err(INVALID_VALUE);
        }
        let found = clone.nodes.iter().copied();
        let mut found = found
            .filter(|&node_copy| self.node(node_copy).is_ok_and(|node_copy| node_copy.origin == node.id));
        found.next().ok_or(INVALID_VALUE)
    }

    /// Adds references to a user object.
    pub(super) fn retain(&mut self, object: usize, count: u32) -> Result<(), CudaError> {
        let object = self.objects.get_mut(&object).ok_or(INVALID_VALUE)?;
        object.references += u64::from(count);
        Ok(())
    }

    /// Releases references to a user object; the last one schedules its destructor.
    pub(super) fn release(&mut self, object: usize, count: u32) -> Result<(), CudaError> {
        let found = self.objects.get_mut(&object).ok_or(INVALID_VALUE)?;
        found.references = found.references.checked_sub(u64::from(count)).ok_or(INVALID_VALUE)?;
        if found.references == 0
            && let Some(found) = self.objects.remove(&object)
        {
            user_objects::release_handle(object);
            self.pending_destructors.push(found.destroy);
        }
        Ok(())
    }
}
