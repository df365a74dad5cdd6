//! Exported functions for graph topology, user objects and graph memory.

use super::super::context::write_out;
use super::super::session::device;
use super::node_operation::HostCallback;
use super::*;
use std::ffi::{CStr, OsStr};
use std::os::unix::ffi::OsStrExt;

const INVALID_VALUE: CudaError = CudaError::INVALID_VALUE;

/// Reads a list of edges.
///
/// # Safety
/// `from` and `to` are valid for reads of `count` entries, and so is `data` unless it is null.
unsafe fn edges(
    from: *const CUgraphNode,
    to: *const CUgraphNode,
    data: *const CUgraphEdgeData,
    count: usize,
) -> Result<Vec<(NodeKey, NodeKey, EdgePort)>, CudaError> {
    // SAFETY: CUDA requires arrays of the stated length.
    let from = unsafe { read_list(from, count) }?;
    // SAFETY: CUDA requires arrays of the stated length.
    let to = unsafe { read_dependencies(to, data, count) }?;
    Ok(from.iter().zip(to).map(|(&from, (to, port))| (NodeKey(from as usize), to, port)).collect())
}

/// Fails if an edge has port data, which the functions without edge data cannot return.
fn check_default_ports(mut ports: impl Iterator<Item = EdgePort>) -> Result<(), CudaError> {
    if ports.all(|port| port == EdgePort::default()) { Ok(()) } else { Err(CudaError::LOSSY_QUERY) }
}

/// Writes the handles of nodes.
///
/// # Safety
/// The contract of [`write_list`] holds for `to` and `count`.
unsafe fn write_nodes(nodes: &[NodeKey], to: *mut CUgraphNode, count: *mut usize) -> Result<(), CudaError> {
    let handles: Vec<CUgraphNode> = nodes.iter().map(|node| node.handle()).collect();
    // SAFETY: this function's contract requires the same of its caller, and the arguments are passed on unchanged.
    unsafe { write_list(&handles, std::ptr::null_mut(), to, count) }
}

/// Writes dependencies: nodes and edge data.
///
/// # Safety
/// The contract of [`write_list`] holds for `to`, `data` and `count`.
unsafe fn write_dependencies(
    dependencies: &[Dependency],
    to: *mut CUgraphNode,
    data: *mut CUgraphEdgeData,
    count: *mut usize,
) -> Result<(), CudaError> {
    if !data.is_null() && !to.is_null() && !count.is_null() {
        let ports: Vec<CUgraphEdgeData> = dependencies.iter().map(|(_, port)| port.data()).collect();
        // SAFETY: non-null, and the caller guarantees that it is valid for reads.
        let mut room = unsafe { count.read() };
        // SAFETY: the caller guarantees the capacity; the count itself is written with the nodes.
        unsafe { write_list(&ports, CUgraphEdgeData::default(), data, &mut room) }?;
    }
    let nodes: Vec<NodeKey> = dependencies.iter().map(|&(node, _)| node).collect();
    // SAFETY: this function's contract requires the same of these pointers from its caller.
    unsafe { write_nodes(&nodes, to, count) }
}

fn dependencies(node: CUgraphNode) -> Result<Vec<Dependency>, CudaError> {
    let key = node_key(node)?;
    Ok(store().node(key)?.dependencies.clone())
}

fn dependents(node: CUgraphNode) -> Result<Vec<Dependency>, CudaError> {
    let key = node_key(node)?;
    let store = store();
    let port = |next: NodeKey| {
        let dependencies = &store.node(next)?.dependencies;
        let port = dependencies.iter().find(|(before, _)| *before == key).map(|&(_, port)| port);
        Ok((next, port.unwrap_or_default()))
    };
    store.node(key)?.dependents.iter().map(|&next| port(next)).collect()
}

/// Writes edges: source nodes, target nodes and edge data.
///
/// # Safety
/// The contract of [`write_list`] holds for `from`, `to`, `data` and `count`.
unsafe fn write_edges(
    edges: &[(NodeKey, NodeKey, EdgePort)],
    from: *mut CUgraphNode,
    to: *mut CUgraphNode,
    data: *mut CUgraphEdgeData,
    count: *mut usize,
) -> Result<(), CudaError> {
    if from.is_null() != to.is_null() || count.is_null() {
        return Err(INVALID_VALUE);
    }
    let begins: Vec<NodeKey> = edges.iter().map(|&(from, ..)| from).collect();
    let ends: Vec<Dependency> = edges.iter().map(|&(_, to, port)| (to, port)).collect();
    // SAFETY: non-null, and the caller guarantees that it is valid for reads.
    let mut room = unsafe { count.read() };
    // SAFETY: the caller guarantees the capacity; the count itself is written with the target nodes.
    unsafe { write_nodes(&begins, from, &mut room) }?;
    // SAFETY: this function's contract requires the same of these pointers from its caller.
    unsafe { write_dependencies(&ends, to, data, count) }
}

fn check_count(count: u32) -> Result<u32, CudaError> {
    if (1..=i32::MAX as u32).contains(&count) { Ok(count) } else { Err(INVALID_VALUE) }
}

impl GraphApi for Library {
    unsafe fn cuGraphCreate(graph: *mut CUgraph, flags: u32) -> Result<(), CudaError> {
        session()?;
        if graph.is_null() || flags != 0 {
            return Err(INVALID_VALUE);
        }
        // SAFETY: non-null, and the program passes a pointer valid for writes.
        unsafe { write_out(graph, create()?.handle()) }
    }

    unsafe fn cuGraphDestroy(graph: CUgraph) -> Result<(), CudaError> {
        let key = graph_key(graph)?;
        let mut store = store();
        if store.graph(key)?.owned {
            return Err(INVALID_VALUE);
        }
        store.destroy(key);
        user_objects::run_destructors(store, None);
        Ok(())
    }

    unsafe fn cuGraphClone(graph_clone: *mut CUgraph, original_graph: CUgraph) -> Result<(), CudaError> {
        let key = graph_key(original_graph)?;
        if graph_clone.is_null() {
            return Err(INVALID_VALUE);
        }
        let mut store = store();
        if store.has_memory(key) {
            return Err(CudaError::NOT_SUPPORTED);
        }
        let clone = store.clone_graph(key, false)?;
        // SAFETY: non-null, and the program passes a pointer valid for writes.
        unsafe { write_out(graph_clone, clone.handle()) }
    }

    unsafe fn cuGraphNodeFindInClone(
        node: *mut CUgraphNode,
        original_node: CUgraphNode,
        cloned_graph: CUgraph,
    ) -> Result<(), CudaError> {
        let (original, clone) = (node_key(original_node)?, graph_key(cloned_graph)?);
        let found = store().find_in_clone(original, clone)?;
        // SAFETY: CUDA requires output pointers to be null or valid for writes.
        unsafe { write_out(node, found.handle()) }
    }

    unsafe fn cuGraphDestroyNode(node: CUgraphNode) -> Result<(), CudaError> {
        let key = node_key(node)?;
        let mut store = store();
        store.remove(key)?;
        user_objects::run_destructors(store, None);
        Ok(())
    }

    unsafe fn cuGraphNodeGetType(node: CUgraphNode, kind: *mut CUgraphNodeType) -> Result<(), CudaError> {
        let key = node_key(node)?;
        let own = store().node(key)?.operation.kind();
        // SAFETY: CUDA requires output pointers to be null or valid for writes.
        unsafe { write_out(kind, own) }
    }

    unsafe fn cuGraphGetNodes(
        graph: CUgraph,
        nodes: *mut CUgraphNode,
        num_nodes: *mut usize,
    ) -> Result<(), CudaError> {
        let key = graph_key(graph)?;
        let own = store().graph(key)?.nodes.clone();
        // SAFETY: CUDA requires arrays with room for the stated count, and pointers that are null or valid.
        unsafe { write_nodes(&own, nodes, num_nodes) }
    }

    unsafe fn cuGraphGetRootNodes(
        graph: CUgraph,
        root_nodes: *mut CUgraphNode,
        num_root_nodes: *mut usize,
    ) -> Result<(), CudaError> {
        let key = graph_key(graph)?;
        let own = store().roots(key)?;
        // SAFETY: CUDA requires arrays with room for the stated count, and pointers that are null or valid.
        unsafe { write_nodes(&own, root_nodes, num_root_nodes) }
    }

    unsafe fn cuGraphGetEdges(
        graph: CUgraph,
        from: *mut CUgraphNode,
        to: *mut CUgraphNode,
        num_edges: *mut usize,
    ) -> Result<(), CudaError> {
        let key = graph_key(graph)?;
        let own = store().edges(key)?;
        check_default_ports(own.iter().map(|&(_, _, port)| port))?;
        // SAFETY: CUDA requires arrays with room for the stated count, and pointers that are null or valid.
        unsafe { write_edges(&own, from, to, std::ptr::null_mut(), num_edges) }
    }

    unsafe fn cuGraphGetEdges_v2(
        graph: CUgraph,
        from: *mut CUgraphNode,
        to: *mut CUgraphNode,
        edge_data: *mut CUgraphEdgeData,
        num_edges: *mut usize,
    ) -> Result<(), CudaError> {
        let key = graph_key(graph)?;
        let own = store().edges(key)?;
        if edge_data.is_null() && !from.is_null() {
            check_default_ports(own.iter().map(|&(_, _, port)| port))?;
        }
        // SAFETY: CUDA requires arrays with room for the stated count, and pointers that are null or valid.
        unsafe { write_edges(&own, from, to, edge_data, num_edges) }
    }

    unsafe fn cuGraphNodeGetDependencies(
        node: CUgraphNode,
        dependencies_out: *mut CUgraphNode,
        num_dependencies: *mut usize,
    ) -> Result<(), CudaError> {
        check_default_ports(dependencies(node)?.iter().map(|&(_, port)| port))?;
        // SAFETY: this function's contract requires the same of its caller, and the arguments are passed on unchanged.
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
            check_default_ports(own.iter().map(|&(_, port)| port))?;
        }
        // SAFETY: CUDA requires arrays with room for the stated count, and pointers that are null or valid.
        unsafe { write_dependencies(&own, dependencies_out, edge_data, num_dependencies) }
    }

    unsafe fn cuGraphNodeGetDependentNodes(
        node: CUgraphNode,
        dependent_nodes: *mut CUgraphNode,
        num_dependent_nodes: *mut usize,
    ) -> Result<(), CudaError> {
        check_default_ports(dependents(node)?.iter().map(|&(_, port)| port))?;
        // SAFETY: this function's contract requires the same of its caller, and the arguments are passed on unchanged.
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
            check_default_ports(own.iter().map(|&(_, port)| port))?;
        }
        // SAFETY: CUDA requires arrays with room for the stated count, and pointers that are null or valid.
        unsafe { write_dependencies(&own, dependent_nodes, edge_data, num_dependent_nodes) }
    }

    unsafe fn cuGraphAddDependencies(
        graph: CUgraph,
        from: *const CUgraphNode,
        to: *const CUgraphNode,
        num_dependencies: usize,
    ) -> Result<(), CudaError> {
        // SAFETY: this function's contract requires the same of its caller, and the arguments are passed on unchanged.
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
        // SAFETY: CUDA requires arrays of the stated length.
        let edges = unsafe { edges(from, to, edge_data, num_dependencies) }?;
        store().connect(key, &edges)
    }

    unsafe fn cuGraphRemoveDependencies(
        graph: CUgraph,
        from: *const CUgraphNode,
        to: *const CUgraphNode,
        num_dependencies: usize,
    ) -> Result<(), CudaError> {
        // SAFETY: this function's contract requires the same of its caller, and the arguments are passed on unchanged.
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
        // SAFETY: CUDA requires arrays of the stated length.
        let edges = unsafe { edges(from, to, edge_data, num_dependencies) }?;
        store().disconnect(key, &edges)
    }

    unsafe fn cuGraphDebugDotPrint(graph: CUgraph, path: *const c_char, flags: u32) -> Result<(), CudaError> {
        let key = graph_key(graph)?;
        if path.is_null() {
            return Err(INVALID_VALUE);
        }
        let text = dot::render(&store(), key, flags)?;
        // SAFETY: non-null, and the program passes a NUL-terminated string.
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
            return Err(INVALID_VALUE);
        }
        let object =
            user_objects::create(HostCallback::new(destroy, pointer)?, check_count(initial_refcount)?)?;
        // SAFETY: non-null, and the program passes a pointer valid for writes.
        unsafe { write_out(object_out, object) }
    }

    unsafe fn cuUserObjectRetain(object: CUuserObject, count: u32) -> Result<(), CudaError> {
        session()?;
        store().retain(object as usize, check_count(count)?)
    }

    unsafe fn cuUserObjectRelease(object: CUuserObject, count: u32) -> Result<(), CudaError> {
        session()?;
        let mut store = store();
        store.release(object as usize, check_count(count)?)?;
        user_objects::run_destructors(store, None);
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
            return Err(INVALID_VALUE);
        }
        user_objects::retain_in(key, object as usize, check_count(count)?, flags == CU_GRAPH_USER_OBJECT_MOVE)
    }

    unsafe fn cuGraphReleaseUserObject(
        graph: CUgraph,
        object: CUuserObject,
        count: u32,
    ) -> Result<(), CudaError> {
        user_objects::release_in(graph_key(graph)?, object as usize, check_count(count)?)
    }

    unsafe fn cuDeviceGetGraphMemAttribute(
        ordinal: CUdevice,
        attribute: CUgraphMem_attribute,
        value: *mut c_void,
    ) -> Result<(), CudaError> {
        let own = graph_memory::attribute(device(ordinal)?, attribute)?;
        // SAFETY: CUDA requires null or a pointer to a 64-bit value for graph memory attributes.
        unsafe { write_out(value.cast::<u64>(), own) }
    }

    unsafe fn cuDeviceSetGraphMemAttribute(
        ordinal: CUdevice,
        attribute: CUgraphMem_attribute,
        value: *mut c_void,
    ) -> Result<(), CudaError> {
        let device = device(ordinal)?;
        if value.is_null() {
            return Err(INVALID_VALUE);
        }
        // SAFETY: non-null; CUDA requires a pointer to a 64-bit value for graph memory attributes.
        graph_memory::reset(device, attribute, unsafe { value.cast::<u64>().read_unaligned() })
    }

    unsafe fn cuDeviceGraphMemTrim(ordinal: CUdevice) -> Result<(), CudaError> {
        executable::trim(device(ordinal)?);
        Ok(())
    }
}
