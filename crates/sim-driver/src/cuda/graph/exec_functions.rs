//! Exported functions for executable graphs.

use super::super::context::write_out;
use super::super::stream;
use super::executable::{InstantiateError, UpdateMismatch, instantiate};
use super::node_functions::read;
use super::node_operation::upgrade_params;
use super::*;

const INVALID_VALUE: CudaError = CudaError::INVALID_VALUE;

/// Instantiates a graph and writes the error node and message to the buffers of the program.
///
/// # Safety
/// `graph_exec` and `error_node` are null or valid for writes, and `log` is null or valid for writes of `length`
/// bytes.
unsafe fn instantiate_with_log(
    graph_exec: *mut CUgraphExec,
    graph: CUgraph,
    error_node: *mut CUgraphNode,
    log: *mut c_char,
    length: usize,
) -> Result<(), CudaError> {
    let key = graph_key(graph)?;
    if graph_exec.is_null() {
        return Err(INVALID_VALUE);
    }
    let (code, node, words) = match instantiate(&mut store(), key, 0) {
        Ok(handle) => {
            // SAFETY: non-null, and the program passes a pointer valid for writes.
            unsafe { graph_exec.write(handle as CUgraphExec) };
            (Ok(()), None, "")
        }
        Err(InstantiateError { error, node: Some(node), .. }) => {
            (Err(error), Some(node), "the graph has a dependency cycle")
        }
        Err(InstantiateError { error, .. }) => (Err(error), None, "the graph cannot be instantiated"),
    };
    if !error_node.is_null() {
        // SAFETY: non-null, and the program passes a pointer valid for writes.
        unsafe { error_node.write(node.map_or(std::ptr::null_mut(), NodeKey::handle)) };
    }
    if !log.is_null() && length > 0 {
        let text = words.as_bytes().get(..length - 1).unwrap_or(words.as_bytes());
        // SAFETY: `text` is shorter than `length`.
        unsafe { std::ptr::copy_nonoverlapping(text.as_ptr(), log.cast(), text.len()) };
        // SAFETY: the terminator follows the text, within `length`.
        let end = unsafe { log.add(text.len()) };
        // SAFETY: `end` is inside the buffer.
        unsafe { end.write(0) };
    }
    code
}

/// Checks the handle of an executable graph.
fn exec_handle(exec: CUgraphExec) -> Result<usize, CudaError> {
    session()?;
    store().exec(exec as usize).map(|_| exec as usize)
}

fn set(
    exec: CUgraphExec,
    node: CUgraphNode,
    operation: Result<NodeOperation, CudaError>,
) -> Result<(), CudaError> {
    let (exec, node) = (exec_handle(exec)?, node_key(node)?);
    let operation = operation?;
    store().set_in_exec(exec, node, operation)
}

fn update(exec: CUgraphExec, graph: CUgraph) -> Result<Result<(), UpdateMismatch>, CudaError> {
    let (exec, graph) = (exec_handle(exec)?, graph_key(graph)?);
    Ok(store().update(exec, graph))
}

fn handle(node: Option<NodeKey>) -> CUgraphNode {
    node.map_or(std::ptr::null_mut(), NodeKey::handle)
}

impl GraphExecApi for Library {
    unsafe fn cuGraphInstantiate(
        graph_exec: *mut CUgraphExec,
        graph: CUgraph,
        error_node: *mut CUgraphNode,
        log_buffer: *mut c_char,
        length: usize,
    ) -> Result<(), CudaError> {
        // SAFETY: this function's contract requires the same of its caller, and the arguments are passed on unchanged.
        unsafe { instantiate_with_log(graph_exec, graph, error_node, log_buffer, length) }
    }

    unsafe fn cuGraphInstantiate_v2(
        graph_exec: *mut CUgraphExec,
        graph: CUgraph,
        error_node: *mut CUgraphNode,
        log_buffer: *mut c_char,
        length: usize,
    ) -> Result<(), CudaError> {
        // SAFETY: this function's contract requires the same of its caller, and the arguments are passed on unchanged.
        unsafe { instantiate_with_log(graph_exec, graph, error_node, log_buffer, length) }
    }

    unsafe fn cuGraphInstantiateWithFlags(
        graph_exec: *mut CUgraphExec,
        graph: CUgraph,
        flags: u64,
    ) -> Result<(), CudaError> {
        let key = graph_key(graph)?;
        // This function has no stream to upload in.
        if graph_exec.is_null() || flags & u64::from(CUDA_GRAPH_INSTANTIATE_FLAG_UPLOAD) != 0 {
            return Err(INVALID_VALUE);
        }
        let made = instantiate(&mut store(), key, flags).map_err(|refused| refused.error)?;
        // SAFETY: non-null, and the program passes a pointer valid for writes.
        unsafe { write_out(graph_exec, made as CUgraphExec) }
    }

    unsafe fn cuGraphInstantiateWithParams(
        graph_exec: *mut CUgraphExec,
        graph: CUgraph,
        instantiate_params: *mut CUDA_GRAPH_INSTANTIATE_PARAMS,
    ) -> Result<(), CudaError> {
        let key = graph_key(graph)?;
        // SAFETY: CUDA requires input pointers to be null or valid for reads.
        let mut params = unsafe { read(instantiate_params) }?;
        if graph_exec.is_null() {
            return Err(INVALID_VALUE);
        }
        let upload = params.flags & u64::from(CUDA_GRAPH_INSTANTIATE_FLAG_UPLOAD) != 0;
        let stream = if upload { Some(stream::resolve(params.hUploadStream)?) } else { None };
        let made = instantiate(&mut store(), key, params.flags);
        let (result, node) = match &made {
            Ok(_) => (CUDA_GRAPH_INSTANTIATE_SUCCESS, None),
            Err(refused) => (refused.result, refused.node),
        };
        params.result_out = result;
        params.hErrNode_out = handle(node);
        // SAFETY: non-null, because it was read above; the program passes a pointer valid for reads and writes.
        unsafe { instantiate_params.write(params) };
        let made = made.map_err(|refused| refused.error)?;
        if let Some(stream) = stream
            && let Err(error) = executable::upload(made, stream)
        {
            executable::destroy(made)?;
            return Err(error);
        }
        // SAFETY: non-null, and the program passes a pointer valid for writes.
        unsafe { write_out(graph_exec, made as CUgraphExec) }
    }

    unsafe fn cuGraphExecDestroy(graph_exec: CUgraphExec) -> Result<(), CudaError> {
        session()?;
        executable::destroy(graph_exec as usize)
    }

    unsafe fn cuGraphExecGetFlags(graph_exec: CUgraphExec, flags: *mut u64) -> Result<(), CudaError> {
        let exec = exec_handle(graph_exec)?;
        let own = store().exec(exec)?.flags;
        // SAFETY: CUDA requires output pointers to be null or valid for writes.
        unsafe { write_out(flags, own) }
    }

    unsafe fn cuGraphUpload(graph: CUgraphExec, stream: CUstream) -> Result<(), CudaError> {
        let (exec, stream) = (exec_handle(graph)?, stream::resolve(stream)?);
        stream.check_not_capturing()?;
        executable::upload(exec, stream)
    }

    unsafe fn cuGraphLaunch(graph: CUgraphExec, stream: CUstream) -> Result<(), CudaError> {
        let (exec, stream) = (exec_handle(graph)?, stream::resolve(stream)?);
        if let Some(capture) = stream.capture() {
            return capture.add_graph_launch(exec);
        }
        executable::launch(exec, stream)
    }

    unsafe fn cuGraphNodeGetEnabled(
        graph_exec: CUgraphExec,
        node: CUgraphNode,
        is_enabled: *mut u32,
    ) -> Result<(), CudaError> {
        let (exec, node) = (exec_handle(graph_exec)?, node_key(node)?);
        let own = store().is_enabled(exec, node)?;
        // SAFETY: CUDA requires output pointers to be null or valid for writes.
        unsafe { write_out(is_enabled, u32::from(own)) }
    }

    unsafe fn cuGraphNodeSetEnabled(
        graph_exec: CUgraphExec,
        node: CUgraphNode,
        is_enabled: u32,
    ) -> Result<(), CudaError> {
        let (exec, node) = (exec_handle(graph_exec)?, node_key(node)?);
        store().enable(exec, node, is_enabled != 0)
    }

    unsafe fn cuGraphExecUpdate(
        graph_exec: CUgraphExec,
        graph: CUgraph,
        error_node_out: *mut CUgraphNode,
        update_result_out: *mut CUgraphExecUpdateResult,
    ) -> Result<(), CudaError> {
        if update_result_out.is_null() {
            return Err(INVALID_VALUE);
        }
        let (result, node, code) = match update(graph_exec, graph)? {
            Ok(()) => (CU_GRAPH_EXEC_UPDATE_SUCCESS, None, Ok(())),
            Err(differs) => (differs.result, differs.node, Err(CudaError::GRAPH_EXEC_UPDATE_FAILURE)),
        };
        // SAFETY: non-null, and the program passes a pointer valid for writes.
        unsafe { update_result_out.write(result) };
        if !error_node_out.is_null() {
            // SAFETY: non-null, and the program passes a pointer valid for writes.
            unsafe { error_node_out.write(handle(node)) };
        }
        code
    }

    unsafe fn cuGraphExecUpdate_v2(
        graph_exec: CUgraphExec,
        graph: CUgraph,
        result_info: *mut CUgraphExecUpdateResultInfo,
    ) -> Result<(), CudaError> {
        let (info, code) = match update(graph_exec, graph)? {
            Ok(()) => (CUgraphExecUpdateResultInfo::default(), Ok(())),
            Err(UpdateMismatch { result, node, from }) => {
                let (error, from) = (handle(node), handle(from));
                let info = CUgraphExecUpdateResultInfo { result, errorNode: error, errorFromNode: from };
                (info, Err(CudaError::GRAPH_EXEC_UPDATE_FAILURE))
            }
        };
        // SAFETY: CUDA requires output pointers to be null or valid for writes.
        unsafe { write_out(result_info, info) }?;
        code
    }

    unsafe fn cuGraphExecKernelNodeSetParams(
        graph_exec: CUgraphExec,
        node: CUgraphNode,
        node_params: *const CUDA_KERNEL_NODE_PARAMS_v1,
    ) -> Result<(), CudaError> {
        // SAFETY: CUDA requires input pointers to be null or valid for reads.
        let params = unsafe { read(node_params) };
        set(graph_exec, node, params.and_then(|params| NodeOperation::kernel(&upgrade_params(&params))))
    }

    unsafe fn cuGraphExecKernelNodeSetParams_v2(
        graph_exec: CUgraphExec,
        node: CUgraphNode,
        node_params: *const CUDA_KERNEL_NODE_PARAMS,
    ) -> Result<(), CudaError> {
        // SAFETY: CUDA requires input pointers to be null or valid for reads.
        let params = unsafe { read(node_params) };
        set(graph_exec, node, params.and_then(|params| NodeOperation::kernel(&params)))
    }

    unsafe fn cuGraphExecMemcpyNodeSetParams(
        graph_exec: CUgraphExec,
        node: CUgraphNode,
        copy_params: *const CUDA_MEMCPY3D,
        context: CUcontext,
    ) -> Result<(), CudaError> {
        // SAFETY: CUDA requires input pointers to be null or valid for reads.
        let params = unsafe { read(copy_params) };
        set(graph_exec, node, params.and_then(|params| NodeOperation::copy(&params, context)))
    }

    unsafe fn cuGraphExecMemsetNodeSetParams(
        graph_exec: CUgraphExec,
        node: CUgraphNode,
        memset_params: *const CUDA_MEMSET_NODE_PARAMS,
        context: CUcontext,
    ) -> Result<(), CudaError> {
        // SAFETY: CUDA requires input pointers to be null or valid for reads.
        let params = unsafe { read(memset_params) };
        set(graph_exec, node, params.and_then(|params| NodeOperation::fill(&params, context)))
    }

    unsafe fn cuGraphExecHostNodeSetParams(
        graph_exec: CUgraphExec,
        node: CUgraphNode,
        node_params: *const CUDA_HOST_NODE_PARAMS,
    ) -> Result<(), CudaError> {
        // SAFETY: CUDA requires input pointers to be null or valid for reads.
        let params = unsafe { read(node_params) };
        set(graph_exec, node, params.and_then(|params| NodeOperation::host(&params)))
    }

    unsafe fn cuGraphExecEventRecordNodeSetEvent(
        graph_exec: CUgraphExec,
        node: CUgraphNode,
        event: CUevent,
    ) -> Result<(), CudaError> {
        set(graph_exec, node, NodeOperation::record(event))
    }

    unsafe fn cuGraphExecEventWaitNodeSetEvent(
        graph_exec: CUgraphExec,
        node: CUgraphNode,
        event: CUevent,
    ) -> Result<(), CudaError> {
        set(graph_exec, node, NodeOperation::wait(event))
    }

    unsafe fn cuGraphExecChildGraphNodeSetParams(
        graph_exec: CUgraphExec,
        node: CUgraphNode,
        child_graph: CUgraph,
    ) -> Result<(), CudaError> {
        let (exec, node, child) = (exec_handle(graph_exec)?, node_key(node)?, graph_key(child_graph)?);
        store().set_child(exec, node, child)
    }

    unsafe fn cuGraphExecNodeSetParams(
        graph_exec: CUgraphExec,
        node: CUgraphNode,
        node_params: *mut CUgraphNodeParams,
    ) -> Result<(), CudaError> {
        let (exec, key) = (exec_handle(graph_exec)?, node_key(node)?);
        // SAFETY: CUDA requires input pointers to be null or valid for reads.
        let mut params = unsafe { read(node_params) }?;
        if matches!(params.type_, CU_GRAPH_NODE_TYPE_MEM_ALLOC | CU_GRAPH_NODE_TYPE_MEM_FREE) {
            return Err(CudaError::NOT_SUPPORTED);
        }
        // SAFETY: CUDA requires the union to hold the member named by `type_`, with valid pointers.
        if let Some(operation) = unsafe { NodeOperation::from_node_params(&mut params) }? {
            return store().set_in_exec(exec, key, operation);
        }
        // SAFETY: the parameters are those of a child graph, the only kind for which `from_node_params` returns
        // `None`.
        let child = graph_key(unsafe { params.params.graph }.graph)?;
        store().set_child(exec, key, child)
    }
}
