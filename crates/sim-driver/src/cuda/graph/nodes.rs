//! The functions on nodes: adding them, and reading and changing what they do.

use super::super::context::answer;
use super::work::{Kernel, newer, older};
use super::*;

const BAD: CudaError = CudaError::INVALID_VALUE;

/// A structure of the program's.
///
/// # Safety
/// `from` is null or leads to one.
pub(super) unsafe fn read<T: Copy>(from: *const T) -> Result<T, CudaError> {
    if from.is_null() {
        return Err(BAD);
    }
    // SAFETY: not null, and the caller's promise.
    Ok(unsafe { from.read() })
}

/// Where a new node goes, as the program says it.
struct Where {
    to: *mut CUgraphNode,
    graph: CUgraph,
    nodes: *const CUgraphNode,
    data: *const CUgraphEdgeData,
    count: usize,
}

impl Where {
    fn new(to: *mut CUgraphNode, graph: CUgraph, nodes: *const CUgraphNode, count: usize) -> Self {
        Self { to, graph, nodes, data: std::ptr::null(), count }
    }

    /// Adds a node, if the place for it is right; `work` comes after that is known.
    ///
    /// # Safety
    /// The lists are as long as it says, and `to` is null or the program's to write.
    unsafe fn add(
        self,
        work: impl FnOnce(GraphKey) -> Result<Work, CudaError>,
    ) -> Result<NodeKey, CudaError> {
        let graph = graph_key(self.graph)?;
        if self.to.is_null() {
            return Err(BAD);
        }
        // SAFETY: the caller's promise.
        let after = unsafe { after(self.nodes, self.data, self.count) }?;
        book().check_after(graph, &after)?;
        let work = work(graph)?;
        let mut book = book();
        if matches!(&work, Work::Free(pointer) if !book.can_free(graph, *pointer)) {
            return Err(BAD);
        }
        let child = if let Work::Child(child) = work { Some(child) } else { None };
        let node = match book.add(graph, after, work) {
            Ok(node) => node,
            Err(error) => {
                child.into_iter().for_each(|child| book.destroy(child));
                return Err(error);
            }
        };
        // SAFETY: not null, and the caller's to write.
        unsafe { answer(self.to, node.handle()) }?;
        Ok(node)
    }
}

/// The program's child graph as the node's own.
fn child(graph: CUgraph) -> Result<Work, CudaError> {
    let key = graph_key(graph)?;
    let mut book = book();
    if book.has_memory(key) {
        return Err(CudaError::NOT_SUPPORTED);
    }
    book.clone_graph(key, true).map(Work::Child)
}

/// What a node does, if it is of the right kind.
fn look<T>(node: CUgraphNode, take: impl FnOnce(&Work) -> Option<T>) -> Result<T, CudaError> {
    let key = node_key(node)?;
    take(&book().node(key)?.work).ok_or(BAD)
}

/// Changes what a node does, not its kind.
fn set(node: CUgraphNode, work: Work) -> Result<(), CudaError> {
    let key = node_key(node)?;
    let mut book = book();
    if book.node(key)?.work.kind() != work.kind() {
        return Err(BAD);
    }
    book.replace(key, work);
    Ok(())
}

fn kernel_of(node: CUgraphNode) -> Result<Kernel, CudaError> {
    look(node, |work| if let Work::Kernel(kernel) = work { Some(kernel.clone()) } else { None })
}

/// Attributes that a kernel's node can have.
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
        _ => Err(BAD),
    }
}

/// Changes the attributes of a kernel's node.
fn set_attributes(
    node: CUgraphNode,
    change: impl FnOnce(&mut std::collections::BTreeMap<u32, [u8; 64]>),
) -> Result<(), CudaError> {
    let key = node_key(node)?;
    match book().nodes.get_mut(&key).map(|node| &mut node.work) {
        Some(Work::Kernel(kernel)) => {
            change(&mut kernel.attributes);
            Ok(())
        }
        _ => Err(BAD),
    }
}

impl GraphNodes for Library {
    unsafe fn cuGraphAddEmptyNode(
        graph_node: *mut CUgraphNode,
        graph: CUgraph,
        dependencies: *const CUgraphNode,
        num_dependencies: usize,
    ) -> Result<(), CudaError> {
        let place = Where::new(graph_node, graph, dependencies, num_dependencies);
        // SAFETY: the caller's promise.
        unsafe { place.add(|_| Ok(Work::Empty)) }.map(|_| ())
    }

    unsafe fn cuGraphAddKernelNode(
        graph_node: *mut CUgraphNode,
        graph: CUgraph,
        dependencies: *const CUgraphNode,
        num_dependencies: usize,
        node_params: *const CUDA_KERNEL_NODE_PARAMS_v1,
    ) -> Result<(), CudaError> {
        let place = Where::new(graph_node, graph, dependencies, num_dependencies);
        // SAFETY: the caller's promise.
        let params = unsafe { read(node_params) };
        // SAFETY: likewise.
        unsafe { place.add(|_| Work::kernel(&newer(&params?))) }.map(|_| ())
    }

    unsafe fn cuGraphAddKernelNode_v2(
        graph_node: *mut CUgraphNode,
        graph: CUgraph,
        dependencies: *const CUgraphNode,
        num_dependencies: usize,
        node_params: *const CUDA_KERNEL_NODE_PARAMS,
    ) -> Result<(), CudaError> {
        let place = Where::new(graph_node, graph, dependencies, num_dependencies);
        // SAFETY: the caller's promise.
        let params = unsafe { read(node_params) };
        // SAFETY: likewise.
        unsafe { place.add(|_| Work::kernel(&params?)) }.map(|_| ())
    }

    unsafe fn cuGraphAddMemcpyNode(
        graph_node: *mut CUgraphNode,
        graph: CUgraph,
        dependencies: *const CUgraphNode,
        num_dependencies: usize,
        copy_params: *const CUDA_MEMCPY3D,
        context: CUcontext,
    ) -> Result<(), CudaError> {
        let place = Where::new(graph_node, graph, dependencies, num_dependencies);
        // SAFETY: the caller's promise.
        let params = unsafe { read(copy_params) };
        // SAFETY: likewise.
        unsafe { place.add(|_| Work::copy(&params?, context)) }.map(|_| ())
    }

    unsafe fn cuGraphAddMemsetNode(
        graph_node: *mut CUgraphNode,
        graph: CUgraph,
        dependencies: *const CUgraphNode,
        num_dependencies: usize,
        memset_params: *const CUDA_MEMSET_NODE_PARAMS,
        context: CUcontext,
    ) -> Result<(), CudaError> {
        let place = Where::new(graph_node, graph, dependencies, num_dependencies);
        // SAFETY: the caller's promise.
        let params = unsafe { read(memset_params) };
        // SAFETY: likewise.
        unsafe { place.add(|_| Work::fill(&params?, context)) }.map(|_| ())
    }

    unsafe fn cuGraphAddHostNode(
        graph_node: *mut CUgraphNode,
        graph: CUgraph,
        dependencies: *const CUgraphNode,
        num_dependencies: usize,
        node_params: *const CUDA_HOST_NODE_PARAMS,
    ) -> Result<(), CudaError> {
        let place = Where::new(graph_node, graph, dependencies, num_dependencies);
        // SAFETY: the caller's promise.
        let params = unsafe { read(node_params) };
        // SAFETY: likewise.
        unsafe { place.add(|_| Work::host(&params?)) }.map(|_| ())
    }

    unsafe fn cuGraphAddChildGraphNode(
        graph_node: *mut CUgraphNode,
        graph: CUgraph,
        dependencies: *const CUgraphNode,
        num_dependencies: usize,
        child_graph: CUgraph,
    ) -> Result<(), CudaError> {
        let place = Where::new(graph_node, graph, dependencies, num_dependencies);
        // SAFETY: the caller's promise.
        unsafe { place.add(|_| child(child_graph)) }.map(|_| ())
    }

    unsafe fn cuGraphAddEventRecordNode(
        graph_node: *mut CUgraphNode,
        graph: CUgraph,
        dependencies: *const CUgraphNode,
        num_dependencies: usize,
        event: CUevent,
    ) -> Result<(), CudaError> {
        let place = Where::new(graph_node, graph, dependencies, num_dependencies);
        // SAFETY: the caller's promise.
        unsafe { place.add(|_| Work::record(event)) }.map(|_| ())
    }

    unsafe fn cuGraphAddEventWaitNode(
        graph_node: *mut CUgraphNode,
        graph: CUgraph,
        dependencies: *const CUgraphNode,
        num_dependencies: usize,
        event: CUevent,
    ) -> Result<(), CudaError> {
        let place = Where::new(graph_node, graph, dependencies, num_dependencies);
        // SAFETY: the caller's promise.
        unsafe { place.add(|_| Work::wait(event)) }.map(|_| ())
    }

    unsafe fn cuGraphAddMemAllocNode(
        graph_node: *mut CUgraphNode,
        graph: CUgraph,
        dependencies: *const CUgraphNode,
        num_dependencies: usize,
        node_params: *mut CUDA_MEM_ALLOC_NODE_PARAMS,
    ) -> Result<(), CudaError> {
        let place = Where::new(graph_node, graph, dependencies, num_dependencies);
        // SAFETY: the caller's promise.
        let params = unsafe { read(node_params) };
        // SAFETY: likewise.
        let node = unsafe { place.add(|_| Allocation::new(&params?).map(Work::Alloc)) }?;
        let book = book();
        if let Work::Alloc(made) = &book.node(node)?.work {
            // SAFETY: not null, or it would not have been read above.
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
        let place = Where::new(graph_node, graph, dependencies, num_dependencies);
        // SAFETY: the caller's promise.
        unsafe { place.add(|_| Ok(Work::Free(pointer))) }.map(|_| ())
    }

    unsafe fn cuGraphAddNode(
        graph_node: *mut CUgraphNode,
        graph: CUgraph,
        dependencies: *const CUgraphNode,
        num_dependencies: usize,
        node_params: *mut CUgraphNodeParams,
    ) -> Result<(), CudaError> {
        let no_data = std::ptr::null();
        // SAFETY: the caller's promise is the same.
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
        // SAFETY: the caller's promise.
        let mut params = unsafe { read(node_params) }?;
        let mut place = Where::new(graph_node, graph, dependencies, num_dependencies);
        place.data = dependency_data;
        let work = |_| {
            // SAFETY: the caller's promise.
            match unsafe { Work::of(&mut params) }? {
                Some(work) => Ok(work),
                // SAFETY: of that kind, or something else would have come.
                None => child(unsafe { params.params.graph }.graph),
            }
        };
        // SAFETY: the caller's promise.
        unsafe { place.add(work) }?;
        if params.type_ == CU_GRAPH_NODE_TYPE_MEM_ALLOC {
            // SAFETY: not null, or it would not have been read above. The address is an answer.
            unsafe { node_params.write(params) };
        }
        Ok(())
    }

    unsafe fn cuGraphNodeSetParams(
        node: CUgraphNode,
        node_params: *mut CUgraphNodeParams,
    ) -> Result<(), CudaError> {
        node_key(node)?;
        // SAFETY: the caller's promise.
        let mut params = unsafe { read(node_params) }?;
        if matches!(params.type_, CU_GRAPH_NODE_TYPE_MEM_ALLOC | CU_GRAPH_NODE_TYPE_MEM_FREE) {
            return Err(CudaError::NOT_SUPPORTED);
        }
        // SAFETY: the caller's promise.
        match unsafe { Work::of(&mut params) }? {
            Some(work) => set(node, work),
            None => Err(CudaError::NOT_SUPPORTED),
        }
    }

    unsafe fn cuGraphChildGraphNodeGetGraph(node: CUgraphNode, graph: *mut CUgraph) -> Result<(), CudaError> {
        let own = look(node, |work| if let Work::Child(child) = work { Some(*child) } else { None })?;
        // SAFETY: the caller's promise.
        unsafe { answer(graph, own.handle()) }
    }

    unsafe fn cuGraphEventRecordNodeGetEvent(
        node: CUgraphNode,
        event_out: *mut CUevent,
    ) -> Result<(), CudaError> {
        let own = look(node, |work| if let Work::Record(event) = work { Some(*event) } else { None })?;
        // SAFETY: the caller's promise.
        unsafe { answer(event_out, handle_of(own)) }
    }

    unsafe fn cuGraphEventRecordNodeSetEvent(node: CUgraphNode, event: CUevent) -> Result<(), CudaError> {
        set(node, Work::record(event)?)
    }

    unsafe fn cuGraphEventWaitNodeGetEvent(
        node: CUgraphNode,
        event_out: *mut CUevent,
    ) -> Result<(), CudaError> {
        let own = look(node, |work| if let Work::Wait(event) = work { Some(*event) } else { None })?;
        // SAFETY: the caller's promise.
        unsafe { answer(event_out, handle_of(own)) }
    }

    unsafe fn cuGraphEventWaitNodeSetEvent(node: CUgraphNode, event: CUevent) -> Result<(), CudaError> {
        set(node, Work::wait(event)?)
    }

    unsafe fn cuGraphHostNodeGetParams(
        node: CUgraphNode,
        node_params: *mut CUDA_HOST_NODE_PARAMS,
    ) -> Result<(), CudaError> {
        let call = look(node, |work| if let Work::Host(call) = work { Some(*call) } else { None })?;
        let own = CUDA_HOST_NODE_PARAMS { fn_: Some(call.function), userData: call.argument.0 };
        // SAFETY: the caller's promise.
        unsafe { answer(node_params, own) }
    }

    unsafe fn cuGraphHostNodeSetParams(
        node: CUgraphNode,
        node_params: *const CUDA_HOST_NODE_PARAMS,
    ) -> Result<(), CudaError> {
        // SAFETY: the caller's promise.
        set(node, Work::host(&unsafe { read(node_params) }?)?)
    }

    unsafe fn cuGraphKernelNodeGetParams(
        node: CUgraphNode,
        node_params: *mut CUDA_KERNEL_NODE_PARAMS_v1,
    ) -> Result<(), CudaError> {
        let own = kernel_of(node)?.params();
        // SAFETY: the caller's promise.
        unsafe { answer(node_params, older(&own)) }
    }

    unsafe fn cuGraphKernelNodeGetParams_v2(
        node: CUgraphNode,
        node_params: *mut CUDA_KERNEL_NODE_PARAMS,
    ) -> Result<(), CudaError> {
        let own = kernel_of(node)?.params();
        // SAFETY: the caller's promise.
        unsafe { answer(node_params, own) }
    }

    unsafe fn cuGraphKernelNodeSetParams(
        node: CUgraphNode,
        node_params: *const CUDA_KERNEL_NODE_PARAMS_v1,
    ) -> Result<(), CudaError> {
        // SAFETY: the caller's promise.
        set(node, Work::kernel(&newer(&unsafe { read(node_params) }?))?)
    }

    unsafe fn cuGraphKernelNodeSetParams_v2(
        node: CUgraphNode,
        node_params: *const CUDA_KERNEL_NODE_PARAMS,
    ) -> Result<(), CudaError> {
        // SAFETY: the caller's promise.
        set(node, Work::kernel(&unsafe { read(node_params) }?)?)
    }

    unsafe fn cuGraphKernelNodeGetAttribute(
        node: CUgraphNode,
        attribute: CUkernelNodeAttrID,
        value_out: *mut CUkernelNodeAttrValue,
    ) -> Result<(), CudaError> {
        let kernel = kernel_of(node)?;
        known_attribute(attribute)?;
        let bytes = kernel.attributes.get(&attribute).copied().unwrap_or([0; 64]);
        // SAFETY: the caller's promise: the value is 64 bytes of any kind.
        unsafe { answer(value_out.cast::<[u8; 64]>(), bytes) }
    }

    unsafe fn cuGraphKernelNodeSetAttribute(
        node: CUgraphNode,
        attribute: CUkernelNodeAttrID,
        value: *const CUkernelNodeAttrValue,
    ) -> Result<(), CudaError> {
        kernel_of(node)?;
        known_attribute(attribute)?;
        // SAFETY: the caller's promise: the value is 64 bytes of any kind.
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
        let own = look(node, |work| match work {
            Work::Alloc(made) => Some(Foreign(made.params())),
            _ => None,
        })?;
        // SAFETY: the caller's promise.
        unsafe { answer(params_out, own.0) }
    }

    unsafe fn cuGraphMemFreeNodeGetParams(
        node: CUgraphNode,
        pointer: *mut CUdeviceptr,
    ) -> Result<(), CudaError> {
        let own = look(node, |work| if let Work::Free(pointer) = work { Some(*pointer) } else { None })?;
        // SAFETY: the caller's promise.
        unsafe { answer(pointer, own) }
    }

    unsafe fn cuGraphMemcpyNodeGetParams(
        node: CUgraphNode,
        node_params: *mut CUDA_MEMCPY3D,
    ) -> Result<(), CudaError> {
        let own = look(node, |work| if let Work::Copy(_, params, _) = work { Some(*params) } else { None })?;
        // SAFETY: the caller's promise.
        unsafe { answer(node_params, own.0) }
    }

    unsafe fn cuGraphMemcpyNodeSetParams(
        node: CUgraphNode,
        node_params: *const CUDA_MEMCPY3D,
    ) -> Result<(), CudaError> {
        let context = look(node, |work| work.context())?;
        // SAFETY: the caller's promise.
        set(node, Work::copy(&unsafe { read(node_params) }?, context.handle())?)
    }

    unsafe fn cuGraphMemsetNodeGetParams(
        node: CUgraphNode,
        node_params: *mut CUDA_MEMSET_NODE_PARAMS,
    ) -> Result<(), CudaError> {
        let own = look(node, |work| if let Work::Fill(_, params, _) = work { Some(*params) } else { None })?;
        // SAFETY: the caller's promise.
        unsafe { answer(node_params, own) }
    }

    unsafe fn cuGraphMemsetNodeSetParams(
        node: CUgraphNode,
        node_params: *const CUDA_MEMSET_NODE_PARAMS,
    ) -> Result<(), CudaError> {
        let context = look(node, |work| work.context())?;
        // SAFETY: the caller's promise.
        set(node, Work::fill(&unsafe { read(node_params) }?, context.handle())?)
    }
}
