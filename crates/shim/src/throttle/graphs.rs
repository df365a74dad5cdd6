//! Graphs that change after their instantiation: their past cost does not predict their future cost.
#![allow(unsafe_code)]

use super::needed;
use crate::hook::hooks;
use crate::launch::graph_key;
use crate::process;
use partage_driver_api::cuda::*;

fn invalidate_graph_cost(exec: CUgraphExec, answer: CUresult) -> CUresult {
    if let Some(process) = process::attached() {
        process.throttle.invalidate_cost(graph_key(exec));
    }
    answer
}

macro_rules! graph_update_hooks {
    ($(fn $name:ident($exec:ident: CUgraphExec, $($arg:ident: $type:ty),* $(,)?);)*) => {
        hooks! { cuda; $(
            fn $name($exec: CUgraphExec, $($arg: $type),*) |next, _variant| if needed {
                // SAFETY: the application's arguments, passed on unchanged under the driver function's own contract.
                invalidate_graph_cost($exec, unsafe { next($exec, $($arg),*) })
            }
        )* }
    };
}

graph_update_hooks! {
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
