//! CUDA graphs: work that is described once and launched many times.

mod dot;
mod exec_functions;
mod executable;
mod graph_functions;
mod graph_memory;
mod launch_plan;
mod node_functions;
mod node_operation;
mod store;
#[cfg(test)]
mod tests;
mod user_objects;

pub(super) use graph_memory::{GraphAllocation, free};
pub(super) use node_operation::{HostCallback, NodeOperation};
pub(super) use store::{Dependency, EdgePort, GraphKey, NodeKey};

use super::handle::{HandleArena, handle_of};
use super::session::{session, unique_id};
use super::*;
use node_operation::UserData;
use std::sync::{Arc, Mutex, MutexGuard};
use store::GraphStore;

static STORE: Mutex<GraphStore> = Mutex::new(GraphStore::new());

fn locked<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    // Every modification leaves the data consistent, so a poisoned lock can be used.
    mutex.lock().unwrap_or_else(|poisoned| poisoned.into_inner())
}

fn store() -> MutexGuard<'static, GraphStore> {
    locked(&STORE)
}

fn graph_key(handle: CUgraph) -> Result<GraphKey, CudaError> {
    session()?;
    let key = GraphKey(handle as usize);
    store().graph(key).map(|_| key)
}

fn node_key(handle: CUgraphNode) -> Result<NodeKey, CudaError> {
    session()?;
    let key = NodeKey(handle as usize);
    store().node(key).map(|_| key)
}

impl EdgePort {
    fn from_edge_data(data: &CUgraphEdgeData) -> Result<Self, CudaError> {
        let known = data.reserved == [0; 5] && data.from_port <= 2 && data.to_port == 0 && data.type_ <= 1;
        // Only programmatic edges may start at a port other than the end of the node.
        let plain = data.type_ != 0 || data.from_port == 0;
        if !known || !plain {
            return Err(CudaError::INVALID_VALUE);
        }
        Ok(Self { from: data.from_port, to: data.to_port, kind: data.type_ })
    }

    pub(super) fn data(self) -> CUgraphEdgeData {
        CUgraphEdgeData { from_port: self.from, to_port: self.to, type_: self.kind, reserved: [0; 5] }
    }
}

/// Reads the dependencies that the program passes for a node.
///
/// # Safety
/// `nodes` is valid for reads of `count` entries, and so is `data` unless it is null.
pub(super) unsafe fn read_dependencies(
    nodes: *const CUgraphNode,
    data: *const CUgraphEdgeData,
    count: usize,
) -> Result<Vec<Dependency>, CudaError> {
    // SAFETY: the caller guarantees null or `count` readable entries.
    let nodes = unsafe { read_list(nodes, count) }?;
    // SAFETY: the caller guarantees null or `count` readable entries.
    let ports = unsafe { read_ports(data, count) }?;
    Ok(nodes.iter().map(|&node| NodeKey(node as usize)).zip(ports).collect())
}

/// Reads edge data; null means default ports.
///
/// # Safety
/// `data` is null or valid for reads of `count` entries.
unsafe fn read_ports(data: *const CUgraphEdgeData, count: usize) -> Result<Vec<EdgePort>, CudaError> {
    if data.is_null() {
        return Ok(vec![EdgePort::default(); count]);
    }
    // SAFETY: non-null, and the caller guarantees `count` readable entries.
    unsafe { read_list(data, count) }?.iter().map(EdgePort::from_edge_data).collect()
}

/// Borrows an array of the program.
///
/// # Safety
/// `from` is null or valid for reads of `count` entries.
unsafe fn read_list<'a, T>(from: *const T, count: usize) -> Result<&'a [T], CudaError> {
    // A larger count is a mistake, and the array must not be read.
    const MAX_ENTRIES: usize = 1 << 24;
    if count == 0 {
        return Ok(&[]);
    }
    if from.is_null() || count > MAX_ENTRIES {
        return Err(CudaError::INVALID_VALUE);
    }
    // SAFETY: non-null, and the caller guarantees `count` readable entries.
    Ok(unsafe { std::slice::from_raw_parts(from, count) })
}

/// Writes a list as CUDA's list queries do. Without a buffer only the count is written. Otherwise `*count` is the
/// buffer's capacity, and unused entries are filled with `filler`.
///
/// # Safety
/// `count` is null or valid for reads and writes, and `to` is null or valid for writes of `*count` entries.
unsafe fn write_list<T: Copy>(
    items: &[T],
    filler: T,
    to: *mut T,
    count: *mut usize,
) -> Result<(), CudaError> {
    if count.is_null() {
        return Err(CudaError::INVALID_VALUE);
    }
    if !to.is_null() {
        // SAFETY: non-null, and the caller guarantees that it is valid for reads.
        let room = unsafe { count.read() };
        for index in 0..room {
            let item = items.get(index).copied().unwrap_or(filler);
            // SAFETY: `index` is below the capacity that the caller stated.
            let place = unsafe { to.add(index) };
            // SAFETY: `place` is inside the buffer.
            unsafe { place.write(item) };
        }
        if room < items.len() {
            return Ok(());
        }
    }
    // SAFETY: non-null, and the caller guarantees that it is valid for writes.
    unsafe { count.write(items.len()) };
    Ok(())
}

/// Creates the graph of a capture.
pub(super) fn create() -> Result<GraphKey, CudaError> {
    store().create(false)
}

/// Returns the graph's id, which is never reused, unlike its handle.
pub(super) fn id(graph: GraphKey) -> Result<u64, CudaError> {
    store().graph(graph).map(|graph| graph.id)
}

/// Destroys the graph of a failed capture.
pub(super) fn discard(graph: GraphKey) {
    let mut store = store();
    store.destroy(graph);
    user_objects::run_destructors(store, None);
}

/// Resolves a graph handle.
pub(super) fn key(handle: CUgraph) -> Result<GraphKey, CudaError> {
    graph_key(handle)
}

/// Adds a node for a captured operation.
pub(super) fn add(
    graph: GraphKey,
    dependencies: &[Dependency],
    operation: NodeOperation,
) -> Result<NodeKey, CudaError> {
    store().add(graph, dependencies.to_vec(), operation)
}

/// Checks that a node of the graph can depend on these nodes.
pub(super) fn check_dependencies(graph: GraphKey, dependencies: &[Dependency]) -> Result<(), CudaError> {
    store().check_dependencies(graph, dependencies)
}

/// Returns whether each of `nodes` is in `ends` or precedes one of them.
pub(super) fn is_joined(ends: &[Dependency], mut nodes: impl Iterator<Item = NodeKey>) -> bool {
    let before = store().ancestors(ends.iter().map(|&(node, _)| node));
    nodes.all(|node| before.contains(&node))
}

/// Returns whether a node of the graph may free this address.
pub(super) fn can_free(graph: GraphKey, pointer: CUdeviceptr) -> bool {
    store().can_free(graph, pointer)
}

/// Clones the graph of an executable as the child graph of a captured launch.
pub(super) fn child_of_exec(exec: usize) -> Result<GraphKey, CudaError> {
    let mut store = store();
    let graph = store.exec(exec)?.graph;
    if store.has_memory(graph) {
        return Err(CudaError::NOT_SUPPORTED);
    }
    store.clone_graph(graph, true)
}

impl GraphKey {
    pub(super) fn handle(self) -> CUgraph {
        self.0 as CUgraph
    }
}

impl NodeKey {
    pub(super) fn handle(self) -> CUgraphNode {
        self.0 as CUgraphNode
    }
}
