//! Tests of graphs and captures through the C functions. Times are simulated GPU time.

mod captures;
mod launch_plan;
mod launches;
mod memory;
mod structure;

use super::super::exports::*;
use super::super::test_node;
use super::*;
use std::ffi::CString;
use std::ptr::{null, null_mut};

/// A context on GPU 0 with a loaded module.
pub(super) struct GraphFixture {
    module: CUmodule,
    pub(super) context: CUcontext,
}

/// Calls a C function and converts its status code to a `Result`.
macro_rules! call {
    ($function:ident($($argument:expr),* $(,)?)) => {
        // SAFETY: the arguments are local variables as the function requires, or invalid handles that it must reject.
        CudaError::from_code(unsafe { $function($($argument),*) }).map_or(Ok(()), Err)
    };
}
pub(super) use call;

impl GraphFixture {
    pub(super) fn new() -> Self {
        let (mut context, mut module) = (null_mut(), null_mut());
        call!(cuInit(0)).unwrap();
        call!(cuDevicePrimaryCtxRetain(&mut context, 0)).unwrap();
        call!(cuCtxSetCurrent(context)).unwrap();
        call!(cuModuleLoadData(&mut module, c"// code".as_ptr().cast())).unwrap();
        Self { module, context }
    }

    pub(super) fn function(&self, name: &str) -> CUfunction {
        let (mut function, name) = (null_mut(), CString::new(name).unwrap());
        call!(cuModuleGetFunction(&mut function, self.module, name.as_ptr())).unwrap();
        function
    }

    pub(super) fn stream(&self) -> CUstream {
        let mut stream = null_mut();
        call!(cuStreamCreate(&mut stream, CU_STREAM_NON_BLOCKING)).unwrap();
        stream
    }

    pub(super) fn event(&self) -> CUevent {
        let mut event = null_mut();
        call!(cuEventCreate(&mut event, 0)).unwrap();
        event
    }

    pub(super) fn graph(&self) -> CUgraph {
        let mut graph = null_mut();
        call!(cuGraphCreate(&mut graph, 0)).unwrap();
        graph
    }

    /// Launches a kernel that fills the GPU.
    pub(super) fn launch(&self, name: &str, stream: CUstream) -> Result<(), CudaError> {
        let function = self.function(name);
        call!(cuLaunchKernel(function, 4096, 1, 1, 1024, 1, 1, 0, stream, null_mut(), null_mut()))
    }

    /// Adds a kernel node with this many blocks of 1024 threads.
    pub(super) fn kernel(
        &self,
        graph: CUgraph,
        after: &[CUgraphNode],
        name: &str,
        blocks: u32,
    ) -> CUgraphNode {
        let params = self.params(name, blocks);
        let mut node = null_mut();
        call!(cuGraphAddKernelNode_v2(&mut node, graph, after.as_ptr(), after.len(), &params)).unwrap();
        node
    }

    pub(super) fn params(&self, name: &str, blocks: u32) -> CUDA_KERNEL_NODE_PARAMS {
        CUDA_KERNEL_NODE_PARAMS {
            func: self.function(name),
            gridDimX: blocks,
            gridDimY: 1,
            gridDimZ: 1,
            blockDimX: 1024,
            blockDimY: 1,
            blockDimZ: 1,
            ..Default::default()
        }
    }

    pub(super) fn exec(&self, graph: CUgraph) -> CUgraphExec {
        let mut exec = null_mut();
        call!(cuGraphInstantiateWithFlags(&mut exec, graph, 0)).unwrap();
        exec
    }

    /// Returns the microseconds of GPU clock between event recordings before and after `between`.
    pub(super) fn time(&self, stream: CUstream, between: impl Fn()) -> f64 {
        let (start, end) = (self.event(), self.event());
        let seen = locked(&CALLED).len();
        for _ in 0..10 {
            // Earlier attempts were not measured.
            locked(&CALLED).truncate(seen);
            // Keeps the GPU busy until everything is submitted, because the host may be slow.
            self.launch("busy_100000us", stream).unwrap();
            call!(cuEventRecord(start, stream)).unwrap();
            between();
            call!(cuEventRecord(end, stream)).unwrap();
            let in_time = call!(cuEventQuery(start)) == Err(CudaError::NOT_READY);
            call!(cuEventSynchronize(end)).unwrap();
            // If the GPU had to wait for the host, the time measured is not the GPU's: measure again.
            if in_time {
                break;
            }
        }
        let mut milliseconds = 0.0;
        call!(cuEventElapsedTime(&mut milliseconds, start, end)).unwrap();
        f64::from(milliseconds) * 1000.0
    }
}

pub(super) fn nodes(graph: CUgraph) -> Vec<CUgraphNode> {
    let mut count = 0;
    call!(cuGraphGetNodes(graph, null_mut(), &mut count)).unwrap();
    let mut nodes = vec![null_mut(); count];
    call!(cuGraphGetNodes(graph, nodes.as_mut_ptr(), &mut count)).unwrap();
    nodes
}

pub(super) fn edges(graph: CUgraph) -> Vec<(CUgraphNode, CUgraphNode)> {
    let mut count = 0;
    call!(cuGraphGetEdges(graph, null_mut(), null_mut(), &mut count)).unwrap();
    let (mut from, mut to) = (vec![null_mut(); count], vec![null_mut(); count]);
    call!(cuGraphGetEdges(graph, from.as_mut_ptr(), to.as_mut_ptr(), &mut count)).unwrap();
    from.into_iter().zip(to).collect()
}

pub(super) fn kind(node: CUgraphNode) -> CUgraphNodeType {
    let mut kind = u32::MAX;
    call!(cuGraphNodeGetType(node, &mut kind)).unwrap();
    kind
}

/// Arguments with which host functions were called, in order.
pub(super) static CALLED: Mutex<Vec<usize>> = Mutex::new(Vec::new());

/// A host function that records its argument.
pub(super) unsafe extern "C" fn record_call(argument: *mut c_void) {
    locked(&CALLED).push(argument as usize);
}

pub(super) fn host(graph: CUgraph, after: &[CUgraphNode], number: usize) -> CUgraphNode {
    let params = CUDA_HOST_NODE_PARAMS { fn_: Some(record_call), userData: number as *mut c_void };
    let mut node = null_mut();
    call!(cuGraphAddHostNode(&mut node, graph, after.as_ptr(), after.len(), &params)).unwrap();
    node
}

pub(super) fn assert_close(measured: f64, expected: f64) {
    assert!((measured - expected).abs() <= expected * 0.01, "{measured} µs, not {expected} µs");
}
