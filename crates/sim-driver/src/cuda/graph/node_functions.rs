//! Exported functions that add graph nodes and read or change their parameters.

use super::super::context::write_out;
use super::node_operation::{KernelNode, downgrade_params, upgrade_params};
use super::*;

const INVALID_VALUE: CudaError = CudaError::INVALID_VALUE;

/// Reads a structure through a pointer from the program.
///
/// # Safety
/// `from` is null or valid for reads.
pub(super) unsafe fn read<T: Copy>(from: *const T) -> Result<T, CudaError> {
    if from.is_null() {
        return Err(INVALID_VALUE);
    }
    // SAFETY: non-null, and the caller guarantees that it is valid for reads.
    Ok(unsafe { from.read() })
}

/// The arguments that say where a new node goes.
struct NodePlacement {
    to: *mut CUgraphNode,
    graph: CUgraph,
    nodes: *const CUgraphNode,
    data: *const CUgraphEdgeData,
    count: usize,
}

impl NodePlacement {
    fn new(to: *mut CUgraphNode, graph: CUgraph, nodes: *const CUgraphNode, count: usize) -> Self {
        Self { to, graph, nodes, data: std::ptr::null(), count }
    }

    /// Adds a node; `operation` is called after the arguments were checked.
    ///
    /// # Safety
    /// `nodes` is valid for reads of `count` entries, `data` is null or valid for as many, and `to` is null or valid for
    /// writes.
    unsafe fn add(
        self,
        operation: impl FnOnce(GraphKey) -> Result<NodeOperation, CudaError>,
    ) -> Result<NodeKey, CudaError> {
        let graph = graph_key(self.graph)?;
        if self.to.is_null() {
            return Err(INVALID_VALUE);
        }
        // SAFETY: the caller guarantees arrays of the stated length.
        let dependencies = unsafe { read_dependencies(self.nodes, self.data, self.count) }?;
        store().check_dependencies(graph, &dependencies)?;
        let operation = operation(graph)?;
        let mut store = store();
        if matches!(&operation, NodeOperation::Free(pointer) if !store.can_free(graph, *pointer)) {
            return Err(INVALID_VALUE);
        }
        let child = if let NodeOperation::Child(child) = operation { Some(child) } else { None };
        let node = match store.add(graph, dependencies, operation) {
            Ok(node) => node,
            Err(error) => {
                child.into_iter().for_each(|child| store.destroy(child));
                return Err(error);
            }
        };
        // SAFETY: non-null, and the caller guarantees that it is valid for writes.
        unsafe { write_out(self.to, node.handle()) }?;
        Ok(node)
    }
}

/// Clones the program's graph as the child graph of a node.
fn child(graph: CUgraph) -> Result<NodeOperation, CudaError> {
    let key = graph_key(graph)?;
    let mut store = store();
    if store.has_memory(key) {
        return Err(CudaError::NOT_SUPPORTED);
    }
    store.clone_graph(key, true).map(NodeOperation::Child)
}

/// Reads the operation of a node; fails if `take` returns `None` because the node is of another kind.
fn read_operation<T>(
    node: CUgraphNode,
    take: impl FnOnce(&NodeOperation) -> Option<T>,
) -> Result<T, CudaError> {
    let key = node_key(node)?;
    take(&store().node(key)?.operation).ok_or(INVALID_VALUE)
}

/// Replaces the operation of a node by one of the same kind.
fn set(node: CUgraphNode, operation: NodeOperation) -> Result<(), CudaError> {
    let key = node_key(node)?;
    let mut store = store();
    if store.node(key)?.operation.kind() != operation.kind() {
        return Err(INVALID_VALUE);
    }
    store.replace(key, operation);
    Ok(())
}

fn kernel_of(node: CUgraphNode) -> Result<KernelNode, CudaError> {
    read_operation(node, |operation| {
        if let NodeOperation::Kernel(kernel) = operation { Some(kernel.clone()) } else { None }
    })
}

/// Checks that a kernel node can have the attribute.
fn known_attribute(attribute: CUkernelNodeAttrID) -> Result<(), CudaError> {
    match attribute {
        CU_LAUNCH_ATTRIBUTE_ACCESS_POLICY_WINDOW
        | CU_LAUNCH_ATTRIBUTE_COOPERATIVE
        | CU_LAUNCH_ATTRIBUTE_CLUSTER_DIMENSION
        | CU_LAUNCH_ATTRIBUTE_CLUSTER_SCHEDULING_POLICY_PREFERENCE
        | CU_LAUNCH_ATTRIBUTE_PRIORITY
        | CU_LAUNCH_ATTRIBUTE_MEM_SYNC_DOMAIN_MAP
        | CU_LAUNCH_ATTRIBUTE_MEM_SYNC_DOMAIN => Ok(()),
        CU_LAUNCH_ATTRIBUTE_DEVICE_UPDATABLE_KERNEL_NODE => Err(CudaError::NOT_SUPPORTED),
        _ => Err(INVALID_VALUE),
    }
}

/// Changes the attributes of a kernel node.
fn set_attributes(
    node: CUgraphNode,
    change: impl FnOnce(&mut std::collections::BTreeMap<u32, [u8; 64]>),
) -> Result<(), CudaError> {
    let key = node_key(node)?;
    match store().nodes.get_mut(&key).map(|node| &mut node.operation) {
        Some(NodeOperation::Kernel(kernel)) => {
            change(&mut kernel.attributes);
            Ok(())
        }
        _ => Err(INVALID_VALUE),
    }
}

impl GraphNodeApi for Library {
    unsafe fn cuGraphAddEmptyNode(
        graph_node: *mut CUgraphNode,
        graph: CUgraph,
        dependencies: *const CUgraphNode,
        num_dependencies: usize,
    ) -> Result<(), CudaError> {
        let place = NodePlacement::new(graph_node, graph, dependencies, num_dependencies);
        // SAFETY: CUDA requires arrays of the stated length and a node pointer that is null or valid for writes.
        unsafe { place.add(|_| Ok(NodeOperation::Empty)) }.map(|_| ())
    }

    unsafe fn cuGraphAddKernelNode(
        graph_node: *mut CUgraphNode,
        graph: CUgraph,
        dependencies: *const CUgraphNode,
        num_dependencies: usize,
        node_params: *const CUDA_KERNEL_NODE_PARAMS_v1,
    ) -> Result<(), CudaError> {
        let place = NodePlacement::new(graph_node, graph, dependencies, num_dependencies);
        // SAFETY: CUDA requires input pointers to be null or valid for reads.
        let params = unsafe { read(node_params) };
        // SAFETY: CUDA requires arrays of the stated length and a node pointer that is null or valid for writes.
        unsafe { place.add(|_| NodeOperation::kernel(&upgrade_params(&params?))) }.map(|_| ())
    }

    unsafe fn cuGraphAddKernelNode_v2(
        graph_node: *mut CUgraphNode,
        graph: CUgraph,
        dependencies: *const CUgraphNode,
        num_dependencies: usize,
        node_params: *const CUDA_KERNEL_NODE_PARAMS,
    ) -> Result<(), CudaError> {
        let place = NodePlacement::new(graph_node, graph, dependencies, num_dependencies);
        // SAFETY: CUDA requires input pointers to be null or valid for reads.
        let params = unsafe { read(node_params) };
        // SAFETY: CUDA requires arrays of the stated length and a node pointer that is null or valid for writes.
        unsafe { place.add(|_| NodeOperation::kernel(&params?)) }.map(|_| ())
    }

    unsafe fn cuGraphAddMemcpyNode(
        graph_node: *mut CUgraphNode,
        graph: CUgraph,
        dependencies: *const CUgraphNode,
        num_dependencies: usize,
        copy_params: *const CUDA_MEMCPY3D,
        context: CUcontext,
    ) -> Result<(), CudaError> {
        let place = NodePlacement::new(graph_node, graph, dependencies, num_dependencies);
        // SAFETY: CUDA requires input pointers to be null or valid for reads.
        let params = unsafe { read(copy_params) };
        // SAFETY: CUDA requires arrays of the stated length and a node pointer that is null or valid for writes.
        unsafe { place.add(|_| NodeOperation::copy(&params?, context)) }.map(|_| ())
    }

    unsafe fn cuGraphAddMemsetNode(
        graph_node: *mut CUgraphNode,
        graph: CUgraph,
        dependencies: *const CUgraphNode,
        num_dependencies: usize,
        memset_params: *const CUDA_MEMSET_NODE_PARAMS,
        context: CUcontext,
    ) -> Result<(), CudaError> {
        let place = NodePlacement::new(graph_node, graph, dependencies, num_dependencies);
        // SAFETY: CUDA requires input pointers to be null or valid for reads.
        let params = unsafe { read(memset_params) };
        // SAFETY: CUDA requires arrays of the stated length and a node pointer that is null or valid for writes.
        unsafe { place.add(|_| NodeOperation::fill(&params?, context)) }.map(|_| ())
    }

    unsafe fn cuGraphAddHostNode(
        graph_node: *mut CUgraphNode,
        graph: CUgraph,
        dependencies: *const CUgraphNode,
        num_dependencies: usize,
        node_params: *const CUDA_HOST_NODE_PARAMS,
    ) -> Result<(), CudaError> {
        let place = NodePlacement::new(graph_node, graph, dependencies, num_dependencies);
        // SAFETY: CUDA requires input pointers to be null or valid for reads.
        let params = unsafe { read(node_params) };
        // SAFETY: CUDA requires arrays of the stated length and a node pointer that is null or valid for writes.
        unsafe { place.add(|_| NodeOperation::host(&params?)) }.map(|_| ())
    }

    unsafe fn cuGraphAddChildGraphNode(
        graph_node: *mut CUgraphNode,
        graph: CUgraph,
        dependencies: *const CUgraphNode,
        num_dependencies: usize,
        child_graph: CUgraph,
    ) -> Result<(), CudaError> {
        let place = NodePlacement::new(graph_node, graph, dependencies, num_dependencies);
        // SAFETY: CUDA requires arrays of the stated length and a node pointer that is null or valid for writes.
        unsafe { place.add(|_| child(child_graph)) }.map(|_| ())
    }

    unsafe fn cuGraphAddEventRecordNode(
        graph_node: *mut CUgraphNode,
        graph: CUgraph,
        dependencies: *const CUgraphNode,
        num_dependencies: usize,
        event: CUevent,
    ) -> Result<(), CudaError> {
        let place = NodePlacement::new(graph_node, graph, dependencies, num_dependencies);
        // SAFETY: CUDA requires arrays of the stated length and a node pointer that is null or valid for writes.
        unsafe { place.add(|_| NodeOperation::record(event)) }.map(|_| ())
    }

    unsafe fn cuGraphAddEventWaitNode(
        graph_node: *mut CUgraphNode,
        graph: CUgraph,
        dependencies: *const CUgraphNode,
        num_dependencies: usize,
        event: CUevent,
    ) -> Result<(), CudaError> {
        let place = NodePlacement::new(graph_node, graph, dependencies, num_dependencies);
        // SAFETY: CUDA requires arrays of the stated length and a node pointer that is null or valid for writes.
        unsafe { place.add(|_| NodeOperation::wait(event)) }.map(|_| ())
    }

    unsafe fn cuGraphAddMemAllocNode(
        graph_node: *mut CUgraphNode,
        graph: CUgraph,
        dependencies: *const CUgraphNode,
        num_dependencies: usize,
        node_params: *mut CUDA_MEM_ALLOC_NODE_PARAMS,
    ) -> Result<(), CudaError> {
        let place = NodePlacement::new(graph_node, graph, dependencies, num_dependencies);
        // SAFETY: CUDA requires input pointers to be null or valid for reads.
        let params = unsafe { read(node_params) };
        // SAFETY: CUDA requires arrays of the stated length and a node pointer that is null or valid for writes.
        let node = unsafe { place.add(|_| GraphAllocation::new(&params?).map(NodeOperation::Alloc)) }?;
        let store = store();
        if let NodeOperation::Alloc(made) = &store.node(node)?.operation {
            // SAFETY: non-null, because it was read above; the program passes a pointer valid for reads and writes.
            unsafe { (*node_params).dptr = made.pointer() };
        }
        Ok(())
    }

    unsafe fn cuGraphAddMemFreeNode(
        graph_node: *mut CUgraphNode,
        graph: CUgraph,
        dependencies: *const CUgraphNode,
        num_dependencies: usize,
        pointer: CUdeviceptr,
    ) -> Result<(), CudaError> {
        let place = NodePlacement::new(graph_node, graph, dependencies, num_dependencies);
        // SAFETY: CUDA requires arrays of the stated length and a node pointer that is null or valid for writes.
        unsafe { place.add(|_| Ok(NodeOperation::Free(pointer))) }.map(|_| ())
    }

    unsafe fn cuGraphAddNode(
        graph_node: *mut CUgraphNode,
        graph: CUgraph,
        dependencies: *const CUgraphNode,
        num_dependencies: usize,
        node_params: *mut CUgraphNodeParams,
    ) -> Result<(), CudaError> {
        let no_data = std::ptr::null();
        // SAFETY: this function's contract requires the same of its caller, and the arguments are passed on unchanged.
        unsafe {
            Self::cuGraphAddNode_v2(graph_node, graph, dependencies, no_data, num_dependencies, node_params)
        }
    }

    unsafe fn cuGraphAddNode_v2(
        graph_node: *mut CUgraphNode,
        graph: CUgraph,
        dependencies: *const CUgraphNode,
        dependency_data: *const CUgraphEdgeData,
        num_dependencies: usize,
        node_params: *mut CUgraphNodeParams,
    ) -> Result<(), CudaError> {
        // SAFETY: CUDA requires input pointers to be null or valid for reads.
        let mut params = unsafe { read(node_params) }?;
        let mut place = NodePlacement::new(graph_node, graph, dependencies, num_dependencies);
        place.data = dependency_data;
        let operation = |_| {
            // SAFETY: CUDA requires the union to hold the member named by `type_`, with valid pointers.
            match unsafe { NodeOperation::from_node_params(&mut params) }? {
                Some(operation) => Ok(operation),
                // SAFETY: the parameters are those of a child graph, the only kind for which `from_node_params`
                // returns `None`.
                None => child(unsafe { params.params.graph }.graph),
            }
        };
        // SAFETY: CUDA requires arrays of the stated length and a node pointer that is null or valid for writes.
        unsafe { place.add(operation) }?;
        if params.type_ == CU_GRAPH_NODE_TYPE_MEM_ALLOC {
            // SAFETY: non-null, because it was read above; the program passes a pointer valid for writes, which
            // returns the address.
            unsafe { node_params.write(params) };
        }
        Ok(())
    }

    unsafe fn cuGraphNodeSetParams(
        node: CUgraphNode,
        node_params: *mut CUgraphNodeParams,
    ) -> Result<(), CudaError> {
        node_key(node)?;
        // SAFETY: CUDA requires input pointers to be null or valid for reads.
        let mut params = unsafe { read(node_params) }?;
        if matches!(params.type_, CU_GRAPH_NODE_TYPE_MEM_ALLOC | CU_GRAPH_NODE_TYPE_MEM_FREE) {
            return Err(CudaError::NOT_SUPPORTED);
        }
        // SAFETY: CUDA requires the union to hold the member named by `type_`, with valid pointers.
        match unsafe { NodeOperation::from_node_params(&mut params) }? {
            Some(operation) => set(node, operation),
            None => Err(CudaError::NOT_SUPPORTED),
        }
    }

    unsafe fn cuGraphChildGraphNodeGetGraph(node: CUgraphNode, graph: *mut CUgraph) -> Result<(), CudaError> {
        let own = read_operation(node, |operation| {
            if let NodeOperation::Child(child) = operation { Some(*child) } else { None }
        })?;
        // SAFETY: CUDA requires output pointers to be null or valid for writes.
        unsafe { write_out(graph, own.handle()) }
    }

    unsafe fn cuGraphEventRecordNodeGetEvent(
        node: CUgraphNode,
        event_out: *mut CUevent,
    ) -> Result<(), CudaError> {
        let own = read_operation(node, |operation| {
            if let NodeOperation::Record(event) = operation { Some(*event) } else { None }
        })?;
        // SAFETY: CUDA requires output pointers to be null or valid for writes.
        unsafe { write_out(event_out, handle_of(own)) }
    }

    unsafe fn cuGraphEventRecordNodeSetEvent(node: CUgraphNode, event: CUevent) -> Result<(), CudaError> {
        set(node, NodeOperation::record(event)?)
    }

    unsafe fn cuGraphEventWaitNodeGetEvent(
        node: CUgraphNode,
        event_out: *mut CUevent,
    ) -> Result<(), CudaError> {
        let own = read_operation(node, |operation| {
            if let NodeOperation::Wait(event) = operation { Some(*event) } else { None }
        })?;
        // SAFETY: CUDA requires output pointers to be null or valid for writes.
        unsafe { write_out(event_out, handle_of(own)) }
    }

    unsafe fn cuGraphEventWaitNodeSetEvent(node: CUgraphNode, event: CUevent) -> Result<(), CudaError> {
        set(node, NodeOperation::wait(event)?)
    }

    unsafe fn cuGraphHostNodeGetParams(
        node: CUgraphNode,
        node_params: *mut CUDA_HOST_NODE_PARAMS,
    ) -> Result<(), CudaError> {
        let call =
            read_operation(
                node,
                |operation| if let NodeOperation::Host(call) = operation { Some(*call) } else { None },
            )?;
        let own = CUDA_HOST_NODE_PARAMS { fn_: Some(call.function), userData: call.argument.0 };
        // SAFETY: CUDA requires output pointers to be null or valid for writes.
        unsafe { write_out(node_params, own) }
    }

    unsafe fn cuGraphHostNodeSetParams(
        node: CUgraphNode,
        node_params: *const CUDA_HOST_NODE_PARAMS,
    ) -> Result<(), CudaError> {
        // SAFETY: CUDA requires input pointers to be null or valid for reads.
        set(node, NodeOperation::host(&unsafe { read(node_params) }?)?)
    }

    unsafe fn cuGraphKernelNodeGetParams(
        node: CUgraphNode,
        node_params: *mut CUDA_KERNEL_NODE_PARAMS_v1,
    ) -> Result<(), CudaError> {
        let own = kernel_of(node)?.params();
        // SAFETY: CUDA requires output pointers to be null or valid for writes.
        unsafe { write_out(node_params, downgrade_params(&own)) }
    }

    unsafe fn cuGraphKernelNodeGetParams_v2(
        node: CUgraphNode,
        node_params: *mut CUDA_KERNEL_NODE_PARAMS,
    ) -> Result<(), CudaError> {
        let own = kernel_of(node)?.params();
        // SAFETY: CUDA requires output pointers to be null or valid for writes.
        unsafe { write_out(node_params, own) }
    }

    unsafe fn cuGraphKernelNodeSetParams(
        node: CUgraphNode,
        node_params: *const CUDA_KERNEL_NODE_PARAMS_v1,
    ) -> Result<(), CudaError> {
        // SAFETY: CUDA requires input pointers to be null or valid for reads.
        set(node, NodeOperation::kernel(&upgrade_params(&unsafe { read(node_params) }?))?)
    }

    unsafe fn cuGraphKernelNodeSetParams_v2(
        node: CUgraphNode,
        node_params: *const CUDA_KERNEL_NODE_PARAMS,
    ) -> Result<(), CudaError> {
        // SAFETY: CUDA requires input pointers to be null or valid for reads.
        set(node, NodeOperation::kernel(&unsafe { read(node_params) }?)?)
    }

    unsafe fn cuGraphKernelNodeGetAttribute(
        node: CUgraphNode,
        attribute: CUkernelNodeAttrID,
        value_out: *mut CUkernelNodeAttrValue,
    ) -> Result<(), CudaError> {
        let kernel = kernel_of(node)?;
        known_attribute(attribute)?;
        let bytes = kernel.attributes.get(&attribute).copied().unwrap_or([0; 64]);
        // SAFETY: the output is null or valid for writes; the union is 64 bytes for which every bit pattern is valid.
        unsafe { write_out(value_out.cast::<[u8; 64]>(), bytes) }
    }

    unsafe fn cuGraphKernelNodeSetAttribute(
        node: CUgraphNode,
        attribute: CUkernelNodeAttrID,
        value: *const CUkernelNodeAttrValue,
    ) -> Result<(), CudaError> {
        kernel_of(node)?;
        known_attribute(attribute)?;
        // SAFETY: the input is null or valid for reads; the union is 64 bytes for which every bit pattern is valid.
        let bytes = unsafe { read(value.cast::<[u8; 64]>()) }?;
        set_attributes(node, |attributes| {
            attributes.insert(attribute, bytes);
        })
    }

    unsafe fn cuGraphKernelNodeCopyAttributes(to: CUgraphNode, from: CUgraphNode) -> Result<(), CudaError> {
        let own = kernel_of(from)?.attributes;
        set_attributes(to, |attributes| *attributes = own)
    }

    unsafe fn cuGraphMemAllocNodeGetParams(
        node: CUgraphNode,
        params_out: *mut CUDA_MEM_ALLOC_NODE_PARAMS,
    ) -> Result<(), CudaError> {
        let own = read_operation(node, |operation| match operation {
            NodeOperation::Alloc(made) => Some(UserData(made.params())),
            _ => None,
        })?;
        // SAFETY: CUDA requires output pointers to be null or valid for writes.
        unsafe { write_out(params_out, own.0) }
    }

    unsafe fn cuGraphMemFreeNodeGetParams(
        node: CUgraphNode,
        pointer: *mut CUdeviceptr,
    ) -> Result<(), CudaError> {
        let own = read_operation(node, |operation| {
            if let NodeOperation::Free(pointer) = operation { Some(*pointer) } else { None }
        })?;
        // SAFETY: CUDA requires output pointers to be null or valid for writes.
        unsafe { write_out(pointer, own) }
    }

    unsafe fn cuGraphMemcpyNodeGetParams(
        node: CUgraphNode,
        node_params: *mut CUDA_MEMCPY3D,
    ) -> Result<(), CudaError> {
        let own = read_operation(node, |operation| {
            if let NodeOperation::Copy(_, params, _) = operation { Some(*params) } else { None }
        })?;
        // SAFETY: CUDA requires output pointers to be null or valid for writes.
        unsafe { write_out(node_params, own.0) }
    }

    unsafe fn cuGraphMemcpyNodeSetParams(
        node: CUgraphNode,
        node_params: *const CUDA_MEMCPY3D,
    ) -> Result<(), CudaError> {
        let context = read_operation(node, |operation| operation.context())?;
        // SAFETY: CUDA requires input pointers to be null or valid for reads.
        set(node, NodeOperation::copy(&unsafe { read(node_params) }?, context.handle())?)
    }

    unsafe fn cuGraphMemsetNodeGetParams(
        node: CUgraphNode,
        node_params: *mut CUDA_MEMSET_NODE_PARAMS,
    ) -> Result<(), CudaError> {
        let own = read_operation(node, |operation| {
            if let NodeOperation::Fill(_, params, _) = operation { Some(*params) } else { None }
        })?;
        // SAFETY: CUDA requires output pointers to be null or valid for writes.
        unsafe { write_out(node_params, own) }
    }

    unsafe fn cuGraphMemsetNodeSetParams(
        node: CUgraphNode,
        node_params: *const CUDA_MEMSET_NODE_PARAMS,
    ) -> Result<(), CudaError> {
        let context = read_operation(node, |operation| operation.context())?;
        // SAFETY: CUDA requires input pointers to be null or valid for reads.
        set(node, NodeOperation::fill(&unsafe { read(node_params) }?, context.handle())?)
    }
}
