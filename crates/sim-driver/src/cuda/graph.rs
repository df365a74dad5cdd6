//! Graphs: work described once and launched often.

mod book;
mod dot;
mod exec;
mod execs;
mod memory;
mod nodes;
mod objects;
mod program;
mod structure;
#[cfg(test)]
mod tests;
mod work;

pub(super) use book::{After, GraphKey, NodeKey, Port};
pub(super) use memory::{Allocation, free};
pub(super) use work::{Call, Work};

use super::handle::{Arena, handle_of};
use super::session::{session, unique};
use super::*;
use book::Book;
use std::sync::{Arc, Mutex, MutexGuard};
use work::Foreign;

static BOOK: Mutex<Book> = Mutex::new(Book::new());

fn locked<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    // Whoever panicked inside left something that is whole at every step.
    mutex.lock().unwrap_or_else(|poisoned| poisoned.into_inner())
}

fn book() -> MutexGuard<'static, Book> {
    locked(&BOOK)
}

fn graph_key(handle: CUgraph) -> Result<GraphKey, CudaError> {
    session()?;
    let key = GraphKey(handle as usize);
    book().graph(key).map(|_| key)
}

fn node_key(handle: CUgraphNode) -> Result<NodeKey, CudaError> {
    session()?;
    let key = NodeKey(handle as usize);
    book().node(key).map(|_| key)
}

impl Port {
    fn of(data: &CUgraphEdgeData) -> Result<Self, CudaError> {
        let known = data.reserved == [0; 5] && data.from_port <= 2 && data.to_port == 0 && data.type_ <= 1;
        // Only programmatic edges begin elsewhere than at a node's end.
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

/// What the program says a node comes after.
///
/// # Safety
/// `nodes` has `count` entries, and so has `data` unless it is null.
pub(super) unsafe fn after(
    nodes: *const CUgraphNode,
    data: *const CUgraphEdgeData,
    count: usize,
) -> Result<Vec<After>, CudaError> {
    // SAFETY: the caller's promise.
    let nodes = unsafe { list(nodes, count) }?;
    // SAFETY: likewise.
    let ports = unsafe { ports(data, count) }?;
    Ok(nodes.iter().map(|&node| NodeKey(node as usize)).zip(ports).collect())
}

/// # Safety
/// `data` is null or has `count` entries.
unsafe fn ports(data: *const CUgraphEdgeData, count: usize) -> Result<Vec<Port>, CudaError> {
    if data.is_null() {
        return Ok(vec![Port::default(); count]);
    }
    // SAFETY: the caller's promise.
    unsafe { list(data, count) }?.iter().map(Port::of).collect()
}

/// # Safety
/// `from` is null or has `count` entries.
unsafe fn list<'a, T>(from: *const T, count: usize) -> Result<&'a [T], CudaError> {
    // More than there can be is a mistake, and must not be read.
    const MOST: usize = 1 << 24;
    if count == 0 {
        return Ok(&[]);
    }
    if from.is_null() || count > MOST {
        return Err(CudaError::INVALID_VALUE);
    }
    // SAFETY: not null, and the caller's promise.
    Ok(unsafe { std::slice::from_raw_parts(from, count) })
}

/// Puts a list where the program wants it, as all of CUDA's queries for lists do: without a place for it the count is
/// the answer; with one, its room is in the count, and what it has too much is nulled.
///
/// # Safety
/// `to` is null or has room for as many as `count` says, and `count` is null or the program's to write.
unsafe fn give<T: Copy>(items: &[T], nothing: T, to: *mut T, count: *mut usize) -> Result<(), CudaError> {
    if count.is_null() {
        return Err(CudaError::INVALID_VALUE);
    }
    if !to.is_null() {
        // SAFETY: not null, and the caller's promise.
        let room = unsafe { count.read() };
        for index in 0..room {
            let item = items.get(index).copied().unwrap_or(nothing);
            // SAFETY: inside the room that the caller says there is.
            let place = unsafe { to.add(index) };
            // SAFETY: likewise.
            unsafe { place.write(item) };
        }
        if room < items.len() {
            return Ok(());
        }
    }
    // SAFETY: not null, and the caller's promise.
    unsafe { count.write(items.len()) };
    Ok(())
}

/// Starts a graph for a capture.
pub(super) fn create() -> Result<GraphKey, CudaError> {
    book().create(false)
}

/// What tells a graph from all others, those that had or will have its handle included.
pub(super) fn id(graph: GraphKey) -> Result<u64, CudaError> {
    book().graph(graph).map(|graph| graph.id)
}

/// Throws away what a failed capture made.
pub(super) fn discard(graph: GraphKey) {
    let mut book = book();
    book.destroy(graph);
    objects::finish(book, None);
}

/// The graph that the program means.
pub(super) fn key(handle: CUgraph) -> Result<GraphKey, CudaError> {
    graph_key(handle)
}

/// Adds a node for a captured operation.
pub(super) fn add(graph: GraphKey, after: &[After], work: Work) -> Result<NodeKey, CudaError> {
    book().add(graph, after.to_vec(), work)
}

/// Whether a node of the graph can come after these.
pub(super) fn check_after(graph: GraphKey, after: &[After]) -> Result<(), CudaError> {
    book().check_after(graph, after)
}

/// Whether all of `nodes` are among `ends` or come before one of them.
pub(super) fn is_joined(ends: &[After], mut nodes: impl Iterator<Item = NodeKey>) -> bool {
    let before = book().ancestors(ends.iter().map(|&(node, _)| node));
    nodes.all(|node| before.contains(&node))
}

/// Whether the graph may free what lies there.
pub(super) fn can_free(graph: GraphKey, pointer: CUdeviceptr) -> bool {
    book().can_free(graph, pointer)
}

/// What a captured launch of an executable graph becomes.
pub(super) fn child_of_exec(exec: usize) -> Result<GraphKey, CudaError> {
    let mut book = book();
    let graph = book.exec(exec)?.graph;
    if book.has_memory(graph) {
        return Err(CudaError::NOT_SUPPORTED);
    }
    book.clone_graph(graph, true)
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
