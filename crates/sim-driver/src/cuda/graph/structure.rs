//! The functions on graphs: their form, objects they hold, their memory.

use super::super::context::answer;
use super::super::session::device;
use super::work::Call;
use super::*;
use std::ffi::{CStr, OsStr};
use std::os::unix::ffi::OsStrExt;

const BAD: CudaError = CudaError::INVALID_VALUE;

/// # Safety
/// The lists have `count` entries; `data` may be null.
unsafe fn edges(
    from: *const CUgraphNode,
    to: *const CUgraphNode,
    data: *const CUgraphEdgeData,
    count: usize,
) -> Result<Vec<(NodeKey, NodeKey, Port)>, CudaError> {
    // SAFETY: the caller's promise.
    let from = unsafe { list(from, count) }?;
    // SAFETY: likewise.
    let to = unsafe { after(to, data, count) }?;
    Ok(from.iter().zip(to).map(|(&from, (to, port))| (NodeKey(from as usize), to, port)).collect())
}

/// The older functions cannot say what an edge has beyond its ends.
fn plain(mut ports: impl Iterator<Item = Port>) -> Result<(), CudaError> {
    if ports.all(|port| port == Port::default()) { Ok(()) } else { Err(CudaError::LOSSY_QUERY) }
}

/// # Safety
/// As of [`give`], for each list.
unsafe fn give_nodes(nodes: &[NodeKey], to: *mut CUgraphNode, count: *mut usize) -> Result<(), CudaError> {
    let handles: Vec<CUgraphNode> = nodes.iter().map(|node| node.handle()).collect();
    // SAFETY: the caller's promise.
    unsafe { give(&handles, std::ptr::null_mut(), to, count) }
}

/// # Safety
/// As of [`give`], for each list.
unsafe fn give_after(
    after: &[After],
    to: *mut CUgraphNode,
    data: *mut CUgraphEdgeData,
    count: *mut usize,
) -> Result<(), CudaError> {
    if !data.is_null() && !to.is_null() && !count.is_null() {
        let ports: Vec<CUgraphEdgeData> = after.iter().map(|(_, port)| port.data()).collect();
        // SAFETY: not null, and the caller's promise.
        let mut room = unsafe { count.read() };
        // SAFETY: the caller's promise; the count itself is written with the nodes.
        unsafe { give(&ports, CUgraphEdgeData::default(), data, &mut room) }?;
    }
    let nodes: Vec<NodeKey> = after.iter().map(|&(node, _)| node).collect();
    // SAFETY: the caller's promise.
    unsafe { give_nodes(&nodes, to, count) }
}

fn dependencies(node: CUgraphNode) -> Result<Vec<After>, CudaError> {
    let key = node_key(node)?;
    Ok(book().node(key)?.after.clone())
}

fn dependents(node: CUgraphNode) -> Result<Vec<After>, CudaError> {
    let key = node_key(node)?;
    let book = book();
    let port = |next: NodeKey| {
        let after = &book.node(next)?.after;
        let port = after.iter().find(|(before, _)| *before == key).map(|&(_, port)| port);
        Ok((next, port.unwrap_or_default()))
    };
    book.node(key)?.before.iter().map(|&next| port(next)).collect()
}

/// # Safety
/// As of [`give`], for each list.
unsafe fn give_edges(
    edges: &[(NodeKey, NodeKey, Port)],
    from: *mut CUgraphNode,
    to: *mut CUgraphNode,
    data: *mut CUgraphEdgeData,
    count: *mut usize,
) -> Result<(), CudaError> {
    if from.is_null() != to.is_null() || count.is_null() {
        return Err(BAD);
    }
    let begins: Vec<NodeKey> = edges.iter().map(|&(from, ..)| from).collect();
    let ends: Vec<After> = edges.iter().map(|&(_, to, port)| (to, port)).collect();
    // SAFETY: not null, and the caller's promise.
    let mut room = unsafe { count.read() };
    // SAFETY: the caller's promise; the count itself is written with the ends.
    unsafe { give_nodes(&begins, from, &mut room) }?;
    // SAFETY: the caller's promise.
    unsafe { give_after(&ends, to, data, count) }
}

fn some(count: u32) -> Result<u32, CudaError> {
    if (1..=i32::MAX as u32).contains(&count) { Ok(count) } else { Err(BAD) }
}

impl Graphs for Library {
    unsafe fn cuGraphCreate(graph: *mut CUgraph, flags: u32) -> Result<(), CudaError> {
        session()?;
        if graph.is_null() || flags != 0 {
            return Err(BAD);
        }
        // SAFETY: not null, and the caller's to write.
        unsafe { answer(graph, create()?.handle()) }
    }

    unsafe fn cuGraphDestroy(graph: CUgraph) -> Result<(), CudaError> {
        let key = graph_key(graph)?;
        let mut book = book();
        if book.graph(key)?.owned {
            return Err(BAD);
        }
        book.destroy(key);
        objects::finish(book, None);
        Ok(())
    }

    unsafe fn cuGraphClone(graph_clone: *mut CUgraph, original_graph: CUgraph) -> Result<(), CudaError> {
        let key = graph_key(original_graph)?;
        if graph_clone.is_null() {
            return Err(BAD);
        }
        let mut book = book();
        if book.has_memory(key) {
            return Err(CudaError::NOT_SUPPORTED);
        }
        let clone = book.clone_graph(key, false)?;
        // SAFETY: not null, and the caller's to write.
        unsafe { answer(graph_clone, clone.handle()) }
    }

    unsafe fn cuGraphNodeFindInClone(
        node: *mut CUgraphNode,
        original_node: CUgraphNode,
        cloned_graph: CUgraph,
    ) -> Result<(), CudaError> {
        let (original, clone) = (node_key(original_node)?, graph_key(cloned_graph)?);
        let found = book().find_in_clone(original, clone)?;
        // SAFETY: the caller's promise.
        unsafe { answer(node, found.handle()) }
    }

    unsafe fn cuGraphDestroyNode(node: CUgraphNode) -> Result<(), CudaError> {
        let key = node_key(node)?;
        let mut book = book();
        book.remove(key)?;
        objects::finish(book, None);
        Ok(())
    }

    unsafe fn cuGraphNodeGetType(node: CUgraphNode, kind: *mut CUgraphNodeType) -> Result<(), CudaError> {
        let key = node_key(node)?;
        let own = book().node(key)?.work.kind();
        // SAFETY: the caller's promise.
        unsafe { answer(kind, own) }
    }

    unsafe fn cuGraphGetNodes(
        graph: CUgraph,
        nodes: *mut CUgraphNode,
        num_nodes: *mut usize,
    ) -> Result<(), CudaError> {
        let key = graph_key(graph)?;
        let own = book().graph(key)?.nodes.clone();
        // SAFETY: the caller's promise.
        unsafe { give_nodes(&own, nodes, num_nodes) }
    }

    unsafe fn cuGraphGetRootNodes(
        graph: CUgraph,
        root_nodes: *mut CUgraphNode,
        num_root_nodes: *mut usize,
    ) -> Result<(), CudaError> {
        let key = graph_key(graph)?;
        let own = book().roots(key)?;
        // SAFETY: the caller's promise.
        unsafe { give_nodes(&own, root_nodes, num_root_nodes) }
    }

    unsafe fn cuGraphGetEdges(
        graph: CUgraph,
        from: *mut CUgraphNode,
        to: *mut CUgraphNode,
        num_edges: *mut usize,
    ) -> Result<(), CudaError> {
        let key = graph_key(graph)?;
        let own = book().edges(key)?;
        plain(own.iter().map(|&(_, _, port)| port))?;
        // SAFETY: the caller's promise.
        unsafe { give_edges(&own, from, to, std::ptr::null_mut(), num_edges) }
    }

    unsafe fn cuGraphGetEdges_v2(
        graph: CUgraph,
        from: *mut CUgraphNode,
        to: *mut CUgraphNode,
        edge_data: *mut CUgraphEdgeData,
        num_edges: *mut usize,
    ) -> Result<(), CudaError> {
        let key = graph_key(graph)?;
        let own = book().edges(key)?;
        if edge_data.is_null() && !from.is_null() {
            plain(own.iter().map(|&(_, _, port)| port))?;
        }
        // SAFETY: the caller's promise.
        unsafe { give_edges(&own, from, to, edge_data, num_edges) }
    }

    unsafe fn cuGraphNodeGetDependencies(
        node: CUgraphNode,
        dependencies_out: *mut CUgraphNode,
        num_dependencies: *mut usize,
    ) -> Result<(), CudaError> {
        plain(dependencies(node)?.iter().map(|&(_, port)| port))?;
        // SAFETY: the caller's promise is the same.
        unsafe {
            Self::cuGraphNodeGetDependencies_v2(
                node,
                dependencies_out,
                std::ptr::null_mut(),
                num_dependencies,
            )
        }
    }

    unsafe fn cuGraphNodeGetDependencies_v2(
        node: CUgraphNode,
        dependencies_out: *mut CUgraphNode,
        edge_data: *mut CUgraphEdgeData,
        num_dependencies: *mut usize,
    ) -> Result<(), CudaError> {
        let own = dependencies(node)?;
        if edge_data.is_null() && !dependencies_out.is_null() {
            plain(own.iter().map(|&(_, port)| port))?;
        }
        // SAFETY: the caller's promise.
        unsafe { give_after(&own, dependencies_out, edge_data, num_dependencies) }
    }

    unsafe fn cuGraphNodeGetDependentNodes(
        node: CUgraphNode,
        dependent_nodes: *mut CUgraphNode,
        num_dependent_nodes: *mut usize,
    ) -> Result<(), CudaError> {
        plain(dependents(node)?.iter().map(|&(_, port)| port))?;
        // SAFETY: the caller's promise is the same.
        unsafe {
            Self::cuGraphNodeGetDependentNodes_v2(
                node,
                dependent_nodes,
                std::ptr::null_mut(),
                num_dependent_nodes,
            )
        }
    }

    unsafe fn cuGraphNodeGetDependentNodes_v2(
        node: CUgraphNode,
        dependent_nodes: *mut CUgraphNode,
        edge_data: *mut CUgraphEdgeData,
        num_dependent_nodes: *mut usize,
    ) -> Result<(), CudaError> {
        let own = dependents(node)?;
        if edge_data.is_null() && !dependent_nodes.is_null() {
            plain(own.iter().map(|&(_, port)| port))?;
        }
        // SAFETY: the caller's promise.
        unsafe { give_after(&own, dependent_nodes, edge_data, num_dependent_nodes) }
    }

    unsafe fn cuGraphAddDependencies(
        graph: CUgraph,
        from: *const CUgraphNode,
        to: *const CUgraphNode,
        num_dependencies: usize,
    ) -> Result<(), CudaError> {
        // SAFETY: the caller's promise is the same.
        unsafe { Self::cuGraphAddDependencies_v2(graph, from, to, std::ptr::null(), num_dependencies) }
    }

    unsafe fn cuGraphAddDependencies_v2(
        graph: CUgraph,
        from: *const CUgraphNode,
        to: *const CUgraphNode,
        edge_data: *const CUgraphEdgeData,
        num_dependencies: usize,
    ) -> Result<(), CudaError> {
        let key = graph_key(graph)?;
        // SAFETY: the caller's promise.
        let edges = unsafe { edges(from, to, edge_data, num_dependencies) }?;
        book().connect(key, &edges)
    }

    unsafe fn cuGraphRemoveDependencies(
        graph: CUgraph,
        from: *const CUgraphNode,
        to: *const CUgraphNode,
        num_dependencies: usize,
    ) -> Result<(), CudaError> {
        // SAFETY: the caller's promise is the same.
        unsafe { Self::cuGraphRemoveDependencies_v2(graph, from, to, std::ptr::null(), num_dependencies) }
    }

    unsafe fn cuGraphRemoveDependencies_v2(
        graph: CUgraph,
        from: *const CUgraphNode,
        to: *const CUgraphNode,
        edge_data: *const CUgraphEdgeData,
        num_dependencies: usize,
    ) -> Result<(), CudaError> {
        let key = graph_key(graph)?;
        // SAFETY: the caller's promise.
        let edges = unsafe { edges(from, to, edge_data, num_dependencies) }?;
        book().disconnect(key, &edges)
    }

    unsafe fn cuGraphDebugDotPrint(graph: CUgraph, path: *const c_char, flags: u32) -> Result<(), CudaError> {
        let key = graph_key(graph)?;
        if path.is_null() {
            return Err(BAD);
        }
        let text = dot::text(&book(), key, flags)?;
        // SAFETY: not null, and the caller's text.
        let path = unsafe { CStr::from_ptr(path) };
        std::fs::write(OsStr::from_bytes(path.to_bytes()), text).map_err(|_| CudaError::OPERATING_SYSTEM)
    }

    unsafe fn cuUserObjectCreate(
        object_out: *mut CUuserObject,
        pointer: *mut c_void,
        destroy: CUhostFn,
        initial_refcount: u32,
        flags: u32,
    ) -> Result<(), CudaError> {
        session()?;
        if object_out.is_null() || flags != CU_USER_OBJECT_NO_DESTRUCTOR_SYNC {
            return Err(BAD);
        }
        let object = objects::create(Call::new(destroy, pointer)?, some(initial_refcount)?)?;
        // SAFETY: not null, and the caller's to write.
        unsafe { answer(object_out, object) }
    }

    unsafe fn cuUserObjectRetain(object: CUuserObject, count: u32) -> Result<(), CudaError> {
        session()?;
        book().retain(object as usize, some(count)?)
    }

    unsafe fn cuUserObjectRelease(object: CUuserObject, count: u32) -> Result<(), CudaError> {
        session()?;
        let mut book = book();
        book.release(object as usize, some(count)?)?;
        objects::finish(book, None);
        Ok(())
    }

    unsafe fn cuGraphRetainUserObject(
        graph: CUgraph,
        object: CUuserObject,
        count: u32,
        flags: u32,
    ) -> Result<(), CudaError> {
        let key = graph_key(graph)?;
        if flags & !CU_GRAPH_USER_OBJECT_MOVE != 0 {
            return Err(BAD);
        }
        objects::retain_in(key, object as usize, some(count)?, flags == CU_GRAPH_USER_OBJECT_MOVE)
    }

    unsafe fn cuGraphReleaseUserObject(
        graph: CUgraph,
        object: CUuserObject,
        count: u32,
    ) -> Result<(), CudaError> {
        objects::release_in(graph_key(graph)?, object as usize, some(count)?)
    }

    unsafe fn cuDeviceGetGraphMemAttribute(
        ordinal: CUdevice,
        attribute: CUgraphMem_attribute,
        value: *mut c_void,
    ) -> Result<(), CudaError> {
        let own = memory::attribute(device(ordinal)?, attribute)?;
        // SAFETY: the caller's promise: attributes of graph memory are 64 bits.
        unsafe { answer(value.cast::<u64>(), own) }
    }

    unsafe fn cuDeviceSetGraphMemAttribute(
        ordinal: CUdevice,
        attribute: CUgraphMem_attribute,
        value: *mut c_void,
    ) -> Result<(), CudaError> {
        let device = device(ordinal)?;
        if value.is_null() {
            return Err(BAD);
        }
        // SAFETY: not null; attributes of graph memory are 64 bits.
        memory::reset(device, attribute, unsafe { value.cast::<u64>().read_unaligned() })
    }

    unsafe fn cuDeviceGraphMemTrim(ordinal: CUdevice) -> Result<(), CudaError> {
        exec::trim(device(ordinal)?);
        Ok(())
    }
}
