//! Memory that graphs allocate and free themselves.
//!
//! The driver keeps it per device, for all graphs together. It takes it when an executable graph first needs it, and
//! returns it when it is trimmed. What it has reserved is what is counted. A process without such nodes pays one load
//! per launch.
#![allow(unsafe_code)]

use super::allocations::HandleMap;
use super::{BLOCK_BYTES, Reservation, checked, code, gpu_of_device, lock, with_grant};
use crate::driver::cuda as driver;
use crate::hook::hooks;
use crate::process::{self, Process};
use partage_driver_api::cuda::*;
use partage_region::MAX_GPUS;
use std::sync::atomic::{AtomicBool, Ordering::Relaxed};
use std::sync::{Mutex, TryLockError};

/// Memory of the graphs of this process.
#[derive(Default)]
pub(super) struct GraphMemory {
    /// Whether any graph has ever allocated.
    any: AtomicBool,
    execs: Mutex<HandleMap<ExecutableGraph>>,
    /// Charges by GPU. Locked while the driver takes memory for a graph, so that the growth can be attributed.
    devices: Mutex<[GraphDevice; MAX_GPUS]>,
}

/// An executable graph that allocates.
#[derive(Clone)]
struct ExecutableGraph {
    needs: Vec<GraphMemoryNeed>,
    /// Whether its memory has been reserved.
    provided: bool,
}

/// Upper bound of what a graph needs of a device.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct GraphMemoryNeed {
    device: CUdevice,
    bytes: u64,
}

#[derive(Clone, Copy, Default)]
struct GraphDevice {
    number: CUdevice,
    /// Bytes reserved in the container's account.
    charged: u64,
}

/// Reads a memory attribute of a device's graphs.
fn attribute(device: CUdevice, attribute: CUgraphMem_attribute) -> Option<u64> {
    let mut value = 0u64;
    // SAFETY: the pointer is to a local `u64`, which is the type of these attributes.
    let answer = unsafe { driver::cuDeviceGetGraphMemAttribute(device, attribute, (&raw mut value).cast()) };
    (answer == CUDA_SUCCESS).then_some(value)
}

/// Returns the nodes of a graph.
fn nodes(graph: CUgraph) -> Vec<CUgraphNode> {
    let mut count = 0;
    // SAFETY: the graph is the application's, and the pointer is to a local variable.
    if unsafe { driver::cuGraphGetNodes(graph, std::ptr::null_mut(), &mut count) } != CUDA_SUCCESS {
        return Vec::new();
    }
    let mut nodes = vec![std::ptr::null_mut(); count];
    // SAFETY: the graph is the application's, and `nodes` has room for `count` handles.
    unsafe { driver::cuGraphGetNodes(graph, nodes.as_mut_ptr(), &mut count) };
    nodes.truncate(count);
    nodes
}

/// Adds what the nodes of a graph allocate, including those of child graphs: all at once, as if nothing were freed
/// between.
fn collect_needs(graph: CUgraph, depth: u32, all: &mut Vec<GraphMemoryNeed>) {
    /// Bound of the nesting of graphs: programs do not nest deeper, and a cycle would never end.
    const MAX_DEPTH: u32 = 64;
    if depth > MAX_DEPTH {
        return;
    }
    for node in nodes(graph) {
        let mut kind = CU_GRAPH_NODE_TYPE_EMPTY;
        // SAFETY: the node belongs to the graph, and the pointer is to a local variable.
        unsafe { driver::cuGraphNodeGetType(node, &mut kind) };
        if kind == CU_GRAPH_NODE_TYPE_GRAPH {
            let mut child = std::ptr::null_mut();
            // SAFETY: the node is a child graph, and the pointer is to a local variable.
            if unsafe { driver::cuGraphChildGraphNodeGetGraph(node, &mut child) } == CUDA_SUCCESS {
                collect_needs(child, depth + 1, all);
            }
        }
        if kind == CU_GRAPH_NODE_TYPE_MEM_ALLOC {
            let mut params = CUDA_MEM_ALLOC_NODE_PARAMS::default();
            // SAFETY: the node is an allocation, and the pointer is to a local structure.
            if unsafe { driver::cuGraphMemAllocNodeGetParams(node, &mut params) } == CUDA_SUCCESS {
                let bytes =
                    (params.bytesize as u64).checked_next_multiple_of(BLOCK_BYTES).unwrap_or(u64::MAX);
                let device = params.poolProps.location.id;
                match all.iter_mut().find(|need| need.device == device) {
                    Some(need) => need.bytes = need.bytes.saturating_add(bytes),
                    None => all.push(GraphMemoryNeed { device, bytes }),
                }
            }
        }
    }
}

impl GraphMemory {
    /// Records that a graph with memory of its own was created.
    pub(super) fn note_allocating_graph(&self) {
        self.any.store(true, Relaxed);
    }

    /// Releases what the driver has returned from graphs.
    pub(super) fn refresh(&self, process: &Process, gpu: usize) {
        if !self.any.load(Relaxed) {
            return;
        }
        let mut devices = match self.devices.try_lock() {
            Ok(devices) => devices,
            Err(TryLockError::Poisoned(poisoned)) => poisoned.into_inner(),
            // The thread that launches there refreshes it itself.
            Err(TryLockError::WouldBlock) => return,
        };
        if let Some(own) = devices.get_mut(gpu).filter(|own| own.charged > 0) {
            settle_charge(process, gpu, own, 0);
        }
    }

    /// Reserves memory for the needs, makes the driver's call, and keeps what the driver has taken.
    fn with_memory(
        &self,
        process: &Process,
        needs: &[GraphMemoryNeed],
        call: impl FnOnce() -> CUresult,
    ) -> Result<(), CUresult> {
        let mut devices = lock(&self.devices);
        let mut taken = [0u64; MAX_GPUS];
        let mut refused = Ok(());
        for need in needs {
            refused = refused.and_then(|()| {
                let gpu = gpu_of_device(process, need.device)?;
                let own = devices.get_mut(gpu).ok_or(CUDA_ERROR_NOT_PERMITTED)?;
                own.number = need.device;
                settle_charge(process, gpu, own, 0);
                // Memory that graphs have and do not use is used first.
                let used = attribute(need.device, CU_GRAPH_MEM_ATTR_USED_MEM_CURRENT).unwrap_or(own.charged);
                let more = used.saturating_add(need.bytes).saturating_sub(own.charged);
                Reservation::take(process, gpu, more)?.keep();
                taken[gpu] = more;
                Ok(())
            });
        }
        let answer = match refused {
            Ok(()) => call(),
            Err(refused) => refused,
        };
        for ((gpu, own), taken) in devices.iter_mut().enumerate().zip(taken) {
            if taken > 0 || own.charged > 0 {
                settle_charge(process, gpu, own, taken);
            }
        }
        checked(answer)
    }
}

/// Sets the charge of a device's graphs to what they have, out of what was reserved before.
fn settle_charge(process: &Process, gpu: usize, own: &mut GraphDevice, taken: u64) {
    let have = own.charged.saturating_add(taken);
    let reserved = attribute(own.number, CU_GRAPH_MEM_ATTR_RESERVED_MEM_CURRENT).unwrap_or(have);
    if reserved < have {
        process.region.release(gpu, have - reserved);
    }
    own.charged = reserved.min(have);
}

/// Returns whether any graph of this process has ever allocated.
#[inline]
pub(crate) fn any_allocates() -> bool {
    process::attached().is_some_and(|process| process.memory.graphs.any.load(Relaxed))
}

/// Launches an executable graph, with the driver's call: what it allocates is reserved before.
#[inline]
pub(crate) fn launch_graph(exec: CUgraphExec, call: impl FnOnce() -> CUresult) -> CUresult {
    match process::attached().filter(|_| any_allocates()) {
        Some(process) => launch_allocating(process, exec, call),
        None => call(),
    }
}

#[cold]
fn launch_allocating(process: &Process, exec: CUgraphExec, call: impl FnOnce() -> CUresult) -> CUresult {
    let graphs = &process.memory.graphs;
    let at = exec.addr() as u64;
    let needs = lock(&graphs.execs).get(&at).filter(|own| !own.provided).map(|own| own.needs.clone());
    let Some(needs) = needs else { return call() };
    process.memory.pending_frees.release_finished(process);
    let done = graphs.with_memory(process, &needs, call);
    if done.is_ok()
        && let Some(own) = lock(&graphs.execs).get_mut(&at)
    {
        own.provided = true;
    }
    code(done)
}

/// Instantiates a graph, with the driver's call.
fn instantiate(
    graph: CUgraph,
    exec: *mut CUgraphExec,
    uploads: bool,
    call: impl FnOnce() -> CUresult,
) -> CUresult {
    let process = process::attached().filter(|process| process.memory.graphs.any.load(Relaxed));
    let Some(process) = process.filter(|_| !exec.is_null()) else { return call() };
    let mut all = Vec::new();
    collect_needs(graph, 0, &mut all);
    if all.is_empty() {
        return call();
    }
    let graphs = &process.memory.graphs;
    let done = if uploads { graphs.with_memory(process, &all, call) } else { checked(call()) };
    if done.is_ok() {
        // SAFETY: not null, and the call succeeded, so the driver has written a handle there.
        let made = unsafe { *exec }.addr() as u64;
        lock(&graphs.execs).insert(made, ExecutableGraph { needs: all, provided: uploads });
    }
    code(done)
}

/// Records that a node was added, by the driver's call.
fn note_node_added(answer: CUresult, allocates: bool) -> CUresult {
    if answer == CUDA_SUCCESS
        && allocates
        && let Some(process) = process::attached()
    {
        process.memory.graphs.note_allocating_graph();
    }
    answer
}

/// Returns whether the parameters are those of a node that allocates memory; false for null.
///
/// # Safety
///
/// `params` must be null, or a structure that the application passed.
unsafe fn allocates(params: *const CUgraphNodeParams) -> bool {
    // SAFETY: the caller guarantees that `params` is null or points to a structure of the application.
    unsafe { params.as_ref() }.is_some_and(|params| params.type_ == CU_GRAPH_NODE_TYPE_MEM_ALLOC)
}

hooks! { cuda;
    fn cuGraphAddMemAllocNode(
        graph_node: *mut CUgraphNode,
        graph: CUgraph,
        dependencies: *const CUgraphNode,
        num_dependencies: usize,
        node_params: *mut CUDA_MEM_ALLOC_NODE_PARAMS,
    ) |next, _variant| {
        with_grant(
            // SAFETY: the application's arguments, passed on unchanged under the driver function's own contract.
            |_| checked(note_node_added(unsafe { next(graph_node, graph, dependencies, num_dependencies, node_params) }, true)))
    }

    fn cuGraphAddNode(
        graph_node: *mut CUgraphNode,
        graph: CUgraph,
        dependencies: *const CUgraphNode,
        num_dependencies: usize,
        node_params: *mut CUgraphNodeParams,
    ) |next, _variant| {
        // SAFETY: null, or a structure that the application passed for the driver to read; the driver rejects null.
        let allocates = unsafe { allocates(node_params) };
        // SAFETY: the application's arguments, passed on unchanged under the driver function's own contract.
        note_node_added(unsafe { next(graph_node, graph, dependencies, num_dependencies, node_params) }, allocates)
    }

    fn cuGraphAddNode_v2(
        graph_node: *mut CUgraphNode,
        graph: CUgraph,
        dependencies: *const CUgraphNode,
        dependency_data: *const CUgraphEdgeData,
        num_dependencies: usize,
        node_params: *mut CUgraphNodeParams,
    ) |next, _variant| {
        // SAFETY: null, or a structure that the application passed for the driver to read; the driver rejects null.
        let allocates = unsafe { allocates(node_params) };
        // SAFETY: the application's arguments, passed on unchanged under the driver function's own contract.
        let answer =
            unsafe { next(graph_node, graph, dependencies, dependency_data, num_dependencies, node_params) };
        note_node_added(answer, allocates)
    }

    fn cuGraphInstantiate(
        graph_exec: *mut CUgraphExec,
        graph: CUgraph,
        error_node: *mut CUgraphNode,
        log_buffer: *mut c_char,
        length: usize,
    ) |next, _variant| {
        // SAFETY: the application's arguments, passed on unchanged under the driver function's own contract.
        instantiate(graph, graph_exec, false, || unsafe { next(graph_exec, graph, error_node, log_buffer, length) })
    }

    fn cuGraphInstantiate_v2(
        graph_exec: *mut CUgraphExec,
        graph: CUgraph,
        error_node: *mut CUgraphNode,
        log_buffer: *mut c_char,
        length: usize,
    ) |next, _variant| {
        // SAFETY: the application's arguments, passed on unchanged under the driver function's own contract.
        instantiate(graph, graph_exec, false, || unsafe { next(graph_exec, graph, error_node, log_buffer, length) })
    }

    fn cuGraphInstantiateWithFlags(graph_exec: *mut CUgraphExec, graph: CUgraph, flags: u64) |next, _variant| {
        let uploads = flags & u64::from(CUDA_GRAPH_INSTANTIATE_FLAG_UPLOAD) != 0;
        // SAFETY: the application's arguments, passed on unchanged under the driver function's own contract.
        instantiate(graph, graph_exec, uploads, || unsafe { next(graph_exec, graph, flags) })
    }

    fn cuGraphInstantiateWithParams(
        graph_exec: *mut CUgraphExec,
        graph: CUgraph,
        instantiate_params: *mut CUDA_GRAPH_INSTANTIATE_PARAMS,
    ) twin cuGraphInstantiateWithParams_ptsz |next, _variant| {
        // SAFETY: null, or a structure that the application passed for the driver to read.
        let flags = unsafe { instantiate_params.as_ref() }.map_or(0, |params| params.flags);
        let uploads = flags & u64::from(CUDA_GRAPH_INSTANTIATE_FLAG_UPLOAD) != 0;
        // SAFETY: the application's arguments, passed on unchanged under the driver function's own contract.
        instantiate(graph, graph_exec, uploads, || unsafe { next(graph_exec, graph, instantiate_params) })
    }

    fn cuGraphUpload(exec: CUgraphExec, stream: CUstream) twin cuGraphUpload_ptsz |next, _variant| {
        // SAFETY: the application's arguments, passed on unchanged under the driver function's own contract.
        launch_graph(exec, || unsafe { next(exec, stream) })
    }

    fn cuGraphExecDestroy(exec: CUgraphExec) |next, _variant| if any_allocates {
        let Some(process) = process::attached() else {
            // SAFETY: the application's arguments, passed on unchanged under the driver function's own contract.
            return unsafe { next(exec) };
        };
        // Locked while the driver destroys it: it may reuse the handle at once.
        let mut execs = lock(&process.memory.graphs.execs);
        // SAFETY: the application's arguments, passed on unchanged under the driver function's own contract.
        let answer = unsafe { next(exec) };
        if answer == CUDA_SUCCESS {
            execs.remove(&(exec.addr() as u64));
        }
        answer
    }

    fn cuDeviceGraphMemTrim(device: CUdevice) |next, _variant| {
        // SAFETY: the application's arguments, passed on unchanged under the driver function's own contract.
        let answer = unsafe { next(device) };
        if let Some(process) = process::attached() {
            let graphs = &process.memory.graphs;
            // Trimmed memory is charged again when they are launched.
            lock(&graphs.execs).values_mut().for_each(|exec| exec.provided = false);
            (0..process.region.gpus()).for_each(|gpu| graphs.refresh(process, gpu));
        }
        answer
    }
}
