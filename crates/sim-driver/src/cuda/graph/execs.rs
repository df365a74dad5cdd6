//! The functions on executable graphs.

use super::super::context::answer;
use super::super::stream;
use super::exec::{Differs, Refused, instantiate};
use super::nodes::read;
use super::work::newer;
use super::*;

const BAD: CudaError = CudaError::INVALID_VALUE;

/// Makes an executable graph, and says what is wrong where the program wants it.
///
/// # Safety
/// The pointers are null or the program's to write; `log` has room for `length` bytes.
unsafe fn instantiate_with_log(
    graph_exec: *mut CUgraphExec,
    graph: CUgraph,
    error_node: *mut CUgraphNode,
    log: *mut c_char,
    length: usize,
) -> Result<(), CudaError> {
    let key = graph_key(graph)?;
    if graph_exec.is_null() {
        return Err(BAD);
    }
    let (code, node, words) = match instantiate(&mut book(), key, 0) {
        Ok(handle) => {
            // SAFETY: not null, and the caller's to write.
            unsafe { graph_exec.write(handle as CUgraphExec) };
            (Ok(()), None, "")
        }
        Err(Refused { error, node: Some(node), .. }) => {
            (Err(error), Some(node), "the graph has a dependency cycle")
        }
        Err(Refused { error, .. }) => (Err(error), None, "the graph cannot be instantiated"),
    };
    if !error_node.is_null() {
        // SAFETY: not null, and the caller's to write.
        unsafe { error_node.write(node.map_or(std::ptr::null_mut(), NodeKey::handle)) };
    }
    if !log.is_null() && length > 0 {
        let text = words.as_bytes().get(..length - 1).unwrap_or(words.as_bytes());
        // SAFETY: not longer than the room there is.
        unsafe { std::ptr::copy_nonoverlapping(text.as_ptr(), log.cast(), text.len()) };
        // SAFETY: one byte behind, which there is room for.
        let end = unsafe { log.add(text.len()) };
        // SAFETY: likewise.
        unsafe { end.write(0) };
    }
    code
}

/// The handle of an executable graph, if it is one.
fn known(exec: CUgraphExec) -> Result<usize, CudaError> {
    session()?;
    book().exec(exec as usize).map(|_| exec as usize)
}

fn set(exec: CUgraphExec, node: CUgraphNode, work: Result<Work, CudaError>) -> Result<(), CudaError> {
    let (exec, node) = (known(exec)?, node_key(node)?);
    let work = work?;
    book().set_in_exec(exec, node, work)
}

fn update(exec: CUgraphExec, graph: CUgraph) -> Result<Result<(), Differs>, CudaError> {
    let (exec, graph) = (known(exec)?, graph_key(graph)?);
    Ok(book().update(exec, graph))
}

fn handle(node: Option<NodeKey>) -> CUgraphNode {
    node.map_or(std::ptr::null_mut(), NodeKey::handle)
}

impl GraphExecs for Library {
    unsafe fn cuGraphInstantiate(
        graph_exec: *mut CUgraphExec,
        graph: CUgraph,
        error_node: *mut CUgraphNode,
        log_buffer: *mut c_char,
        length: usize,
    ) -> Result<(), CudaError> {
        // SAFETY: the caller's promise.
        unsafe { instantiate_with_log(graph_exec, graph, error_node, log_buffer, length) }
    }

    unsafe fn cuGraphInstantiate_v2(
        graph_exec: *mut CUgraphExec,
        graph: CUgraph,
        error_node: *mut CUgraphNode,
        log_buffer: *mut c_char,
        length: usize,
    ) -> Result<(), CudaError> {
        // SAFETY: the caller's promise.
        unsafe { instantiate_with_log(graph_exec, graph, error_node, log_buffer, length) }
    }

    unsafe fn cuGraphInstantiateWithFlags(
        graph_exec: *mut CUgraphExec,
        graph: CUgraph,
        flags: u64,
    ) -> Result<(), CudaError> {
        let key = graph_key(graph)?;
        // There is no stream to upload in.
        if graph_exec.is_null() || flags & u64::from(CUDA_GRAPH_INSTANTIATE_FLAG_UPLOAD) != 0 {
            return Err(BAD);
        }
        let made = instantiate(&mut book(), key, flags).map_err(|refused| refused.error)?;
        // SAFETY: not null, and the caller's to write.
        unsafe { answer(graph_exec, made as CUgraphExec) }
    }

    unsafe fn cuGraphInstantiateWithParams(
        graph_exec: *mut CUgraphExec,
        graph: CUgraph,
        instantiate_params: *mut CUDA_GRAPH_INSTANTIATE_PARAMS,
    ) -> Result<(), CudaError> {
        let key = graph_key(graph)?;
        // SAFETY: the caller's promise.
        let mut params = unsafe { read(instantiate_params) }?;
        if graph_exec.is_null() {
            return Err(BAD);
        }
        let upload = params.flags & u64::from(CUDA_GRAPH_INSTANTIATE_FLAG_UPLOAD) != 0;
        let stream = if upload { Some(stream::resolve(params.hUploadStream)?) } else { None };
        let made = instantiate(&mut book(), key, params.flags);
        let (result, node) = match &made {
            Ok(_) => (CUDA_GRAPH_INSTANTIATE_SUCCESS, None),
            Err(refused) => (refused.result, refused.node),
        };
        params.result_out = result;
        params.hErrNode_out = handle(node);
        // SAFETY: not null, or it would not have been read above.
        unsafe { instantiate_params.write(params) };
        let made = made.map_err(|refused| refused.error)?;
        if let Some(stream) = stream
            && let Err(error) = exec::upload(made, stream)
        {
            exec::destroy(made)?;
            return Err(error);
        }
        // SAFETY: not null, and the caller's to write.
        unsafe { answer(graph_exec, made as CUgraphExec) }
    }

    unsafe fn cuGraphExecDestroy(graph_exec: CUgraphExec) -> Result<(), CudaError> {
        session()?;
        exec::destroy(graph_exec as usize)
    }

    unsafe fn cuGraphExecGetFlags(graph_exec: CUgraphExec, flags: *mut u64) -> Result<(), CudaError> {
        let exec = known(graph_exec)?;
        let own = book().exec(exec)?.flags;
        // SAFETY: the caller's promise.
        unsafe { answer(flags, own) }
    }

    unsafe fn cuGraphUpload(graph: CUgraphExec, stream: CUstream) -> Result<(), CudaError> {
        let (exec, stream) = (known(graph)?, stream::resolve(stream)?);
        stream.outside_capture()?;
        exec::upload(exec, stream)
    }

    unsafe fn cuGraphLaunch(graph: CUgraphExec, stream: CUstream) -> Result<(), CudaError> {
        let (exec, stream) = (known(graph)?, stream::resolve(stream)?);
        if let Some(capture) = stream.capture() {
            return capture.graph(exec);
        }
        exec::launch(exec, stream)
    }

    unsafe fn cuGraphNodeGetEnabled(
        graph_exec: CUgraphExec,
        node: CUgraphNode,
        is_enabled: *mut u32,
    ) -> Result<(), CudaError> {
        let (exec, node) = (known(graph_exec)?, node_key(node)?);
        let own = book().is_enabled(exec, node)?;
        // SAFETY: the caller's promise.
        unsafe { answer(is_enabled, u32::from(own)) }
    }

    unsafe fn cuGraphNodeSetEnabled(
        graph_exec: CUgraphExec,
        node: CUgraphNode,
        is_enabled: u32,
    ) -> Result<(), CudaError> {
        let (exec, node) = (known(graph_exec)?, node_key(node)?);
        book().enable(exec, node, is_enabled != 0)
    }

    unsafe fn cuGraphExecUpdate(
        graph_exec: CUgraphExec,
        graph: CUgraph,
        error_node_out: *mut CUgraphNode,
        update_result_out: *mut CUgraphExecUpdateResult,
    ) -> Result<(), CudaError> {
        if update_result_out.is_null() {
            return Err(BAD);
        }
        let (result, node, code) = match update(graph_exec, graph)? {
            Ok(()) => (CU_GRAPH_EXEC_UPDATE_SUCCESS, None, Ok(())),
            Err(differs) => (differs.result, differs.node, Err(CudaError::GRAPH_EXEC_UPDATE_FAILURE)),
        };
        // SAFETY: not null, and the caller's to write.
        unsafe { update_result_out.write(result) };
        if !error_node_out.is_null() {
            // SAFETY: likewise.
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
            Err(Differs { result, node, from }) => {
                let (error, from) = (handle(node), handle(from));
                let info = CUgraphExecUpdateResultInfo { result, errorNode: error, errorFromNode: from };
                (info, Err(CudaError::GRAPH_EXEC_UPDATE_FAILURE))
            }
        };
        // SAFETY: the caller's promise.
        unsafe { answer(result_info, info) }?;
        code
    }

    unsafe fn cuGraphExecKernelNodeSetParams(
        graph_exec: CUgraphExec,
        node: CUgraphNode,
        node_params: *const CUDA_KERNEL_NODE_PARAMS_v1,
    ) -> Result<(), CudaError> {
        // SAFETY: the caller's promise.
        let params = unsafe { read(node_params) };
        set(graph_exec, node, params.and_then(|params| Work::kernel(&newer(&params))))
    }

    unsafe fn cuGraphExecKernelNodeSetParams_v2(
        graph_exec: CUgraphExec,
        node: CUgraphNode,
        node_params: *const CUDA_KERNEL_NODE_PARAMS,
    ) -> Result<(), CudaError> {
        // SAFETY: the caller's promise.
        let params = unsafe { read(node_params) };
        set(graph_exec, node, params.and_then(|params| Work::kernel(&params)))
    }

    unsafe fn cuGraphExecMemcpyNodeSetParams(
        graph_exec: CUgraphExec,
        node: CUgraphNode,
        copy_params: *const CUDA_MEMCPY3D,
        context: CUcontext,
    ) -> Result<(), CudaError> {
        // SAFETY: the caller's promise.
        let params = unsafe { read(copy_params) };
        set(graph_exec, node, params.and_then(|params| Work::copy(&params, context)))
    }

    unsafe fn cuGraphExecMemsetNodeSetParams(
        graph_exec: CUgraphExec,
        node: CUgraphNode,
        memset_params: *const CUDA_MEMSET_NODE_PARAMS,
        context: CUcontext,
    ) -> Result<(), CudaError> {
        // SAFETY: the caller's promise.
        let params = unsafe { read(memset_params) };
        set(graph_exec, node, params.and_then(|params| Work::fill(&params, context)))
    }

    unsafe fn cuGraphExecHostNodeSetParams(
        graph_exec: CUgraphExec,
        node: CUgraphNode,
        node_params: *const CUDA_HOST_NODE_PARAMS,
    ) -> Result<(), CudaError> {
        // SAFETY: the caller's promise.
        let params = unsafe { read(node_params) };
        set(graph_exec, node, params.and_then(|params| Work::host(&params)))
    }

    unsafe fn cuGraphExecEventRecordNodeSetEvent(
        graph_exec: CUgraphExec,
        node: CUgraphNode,
        event: CUevent,
    ) -> Result<(), CudaError> {
        set(graph_exec, node, Work::record(event))
    }

    unsafe fn cuGraphExecEventWaitNodeSetEvent(
        graph_exec: CUgraphExec,
        node: CUgraphNode,
        event: CUevent,
    ) -> Result<(), CudaError> {
        set(graph_exec, node, Work::wait(event))
    }

    unsafe fn cuGraphExecChildGraphNodeSetParams(
        graph_exec: CUgraphExec,
        node: CUgraphNode,
        child_graph: CUgraph,
    ) -> Result<(), CudaError> {
        let (exec, node, child) = (known(graph_exec)?, node_key(node)?, graph_key(child_graph)?);
        book().set_child(exec, node, child)
    }

    unsafe fn cuGraphExecNodeSetParams(
        graph_exec: CUgraphExec,
        node: CUgraphNode,
        node_params: *mut CUgraphNodeParams,
    ) -> Result<(), CudaError> {
        let (exec, key) = (known(graph_exec)?, node_key(node)?);
        // SAFETY: the caller's promise.
        let mut params = unsafe { read(node_params) }?;
        if matches!(params.type_, CU_GRAPH_NODE_TYPE_MEM_ALLOC | CU_GRAPH_NODE_TYPE_MEM_FREE) {
            return Err(CudaError::NOT_SUPPORTED);
        }
        // SAFETY: the caller's promise.
        if let Some(work) = unsafe { Work::of(&mut params) }? {
            return book().set_in_exec(exec, key, work);
        }
        // SAFETY: of that kind, or something else would have come.
        let child = graph_key(unsafe { params.params.graph }.graph)?;
        book().set_child(exec, key, child)
    }
}
