//! Graphs that change after they were made ready: what one took says nothing of what it will take.
#![allow(unsafe_code)]

use super::needed;
use crate::hook::hooks;
use crate::launch::graph;
use crate::process;
use partage_driver_api::cuda::*;

fn changed(exec: CUgraphExec, answer: CUresult) -> CUresult {
    if let Some(process) = process::attached() {
        process.throttle.doubt(graph(exec));
    }
    answer
}

macro_rules! changes {
    ($(fn $name:ident($exec:ident: CUgraphExec, $($arg:ident: $type:ty),* $(,)?);)*) => {
        hooks! { cuda; $(
            fn $name($exec: CUgraphExec, $($arg: $type),*) |next, _variant| if needed {
                // SAFETY: the program's promise.
                changed($exec, unsafe { next($exec, $($arg),*) })
            }
        )* }
    };
}

changes! {
    fn cuGraphExecUpdate(
        exec: CUgraphExec,
        graph: CUgraph,
        error_node_out: *mut CUgraphNode,
        update_result_out: *mut CUgraphExecUpdateResult,
    );
    fn cuGraphExecUpdate_v2(exec: CUgraphExec, graph: CUgraph, result_info: *mut CUgraphExecUpdateResultInfo);
    fn cuGraphExecKernelNodeSetParams(
        exec: CUgraphExec,
        node: CUgraphNode,
        node_params: *const CUDA_KERNEL_NODE_PARAMS_v1,
    );
    fn cuGraphExecKernelNodeSetParams_v2(
        exec: CUgraphExec,
        node: CUgraphNode,
        node_params: *const CUDA_KERNEL_NODE_PARAMS,
    );
    fn cuGraphExecNodeSetParams(exec: CUgraphExec, node: CUgraphNode, node_params: *mut CUgraphNodeParams);
    fn cuGraphExecChildGraphNodeSetParams(exec: CUgraphExec, node: CUgraphNode, child_graph: CUgraph);
    fn cuGraphNodeSetEnabled(exec: CUgraphExec, node: CUgraphNode, is_enabled: u32);
}
