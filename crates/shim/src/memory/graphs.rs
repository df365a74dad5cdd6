//! Memory that graphs allocate and free themselves.
//!
//! The driver keeps it for all graphs of a device together, takes it when an executable graph first needs it, and gives it
//! back when it is told to. What it has reserved is what counts. A process without such nodes pays one load per launch.
#![allow(unsafe_code)]

use super::allocations::Table;
use super::{BLOCK, Reserved, checked, code, granted, locked, of_device};
use crate::driver::cuda as real;
use crate::hook::hooks;
use crate::process::{self, Process};
use partage_driver_api::cuda::*;
use partage_region::MAX_GPUS;
use std::sync::atomic::{AtomicBool, Ordering::Relaxed};
use std::sync::{Mutex, TryLockError};

/// What the graphs of this process have.
#[derive(Default)]
pub(super) struct Graphs {
    /// Whether any graph ever allocated.
    any: AtomicBool,
    execs: Mutex<Table<Exec>>,
    /// By GPU. Held while the driver takes memory for a graph: whose growth it is must be known.
    devices: Mutex<[Device; MAX_GPUS]>,
}

/// An executable graph that allocates.
#[derive(Clone)]
struct Exec {
    needs: Vec<Need>,
    /// It has what it needs.
    provided: bool,
}

/// What a graph may need of a device at most.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Need {
    device: CUdevice,
    bytes: u64,
}

#[derive(Clone, Copy, Default)]
struct Device {
    number: CUdevice,
    /// What is taken from the container's account.
    charged: u64,
}

/// A number that the driver knows of a device's graphs.
fn attribute(device: CUdevice, attribute: CUgraphMem_attribute) -> Option<u64> {
    let mut value = 0u64;
    // SAFETY: a number of the size that these attributes have.
    let answer = unsafe { real::cuDeviceGetGraphMemAttribute(device, attribute, (&raw mut value).cast()) };
    (answer == CUDA_SUCCESS).then_some(value)
}

/// The nodes of a graph.
fn nodes(graph: CUgraph) -> Vec<CUgraphNode> {
    let mut count = 0;
    // SAFETY: the program's graph, and a number to fill in.
    if unsafe { real::cuGraphGetNodes(graph, std::ptr::null_mut(), &mut count) } != CUDA_SUCCESS {
        return Vec::new();
    }
    let mut nodes = vec![std::ptr::null_mut(); count];
    // SAFETY: likewise, with room for as many.
    unsafe { real::cuGraphGetNodes(graph, nodes.as_mut_ptr(), &mut count) };
    nodes.truncate(count);
    nodes
}

/// What the nodes of a graph allocate, and those of the graphs in it: all of it at once, as if nothing were freed between.
fn needs(graph: CUgraph, depth: u32, all: &mut Vec<Need>) {
    /// Graphs in graphs in graphs: nobody goes deeper, and a circle would go on for ever.
    const DEEPEST: u32 = 64;
    if depth > DEEPEST {
        return;
    }
    for node in nodes(graph) {
        let mut kind = CU_GRAPH_NODE_TYPE_EMPTY;
        // SAFETY: a node of the graph, and a number to fill in.
        unsafe { real::cuGraphNodeGetType(node, &mut kind) };
        if kind == CU_GRAPH_NODE_TYPE_GRAPH {
            let mut child = std::ptr::null_mut();
            // SAFETY: a node of the graph that is a graph, and a handle to fill in.
            if unsafe { real::cuGraphChildGraphNodeGetGraph(node, &mut child) } == CUDA_SUCCESS {
                needs(child, depth + 1, all);
            }
        }
        if kind == CU_GRAPH_NODE_TYPE_MEM_ALLOC {
            let mut params = CUDA_MEM_ALLOC_NODE_PARAMS::default();
            // SAFETY: a node of the graph that allocates, and a struct to fill in.
            if unsafe { real::cuGraphMemAllocNodeGetParams(node, &mut params) } == CUDA_SUCCESS {
                let bytes = (params.bytesize as u64).checked_next_multiple_of(BLOCK).unwrap_or(u64::MAX);
                let device = params.poolProps.location.id;
                match all.iter_mut().find(|need| need.device == device) {
                    Some(need) => need.bytes = need.bytes.saturating_add(bytes),
                    None => all.push(Need { device, bytes }),
                }
            }
        }
    }
}

impl Graphs {
    /// A graph with memory of its own was made.
    pub(super) fn has_memory(&self) {
        self.any.store(true, Relaxed);
    }

    /// Gives back what the driver took from graphs.
    pub(super) fn refresh(&self, process: &Process, gpu: usize) {
        if !self.any.load(Relaxed) {
            return;
        }
        let mut devices = match self.devices.try_lock() {
            Ok(devices) => devices,
            Err(TryLockError::Poisoned(poisoned)) => poisoned.into_inner(),
            // Whoever launches there looks itself.
            Err(TryLockError::WouldBlock) => return,
        };
        if let Some(own) = devices.get_mut(gpu).filter(|own| own.charged > 0) {
            settle(process, gpu, own, 0);
        }
    }

    /// Takes memory for what is needed, does the driver's call, and keeps what it has taken.
    fn providing(
        &self,
        process: &Process,
        needs: &[Need],
        call: impl FnOnce() -> CUresult,
    ) -> Result<(), CUresult> {
        let mut devices = locked(&self.devices);
        let mut taken = [0u64; MAX_GPUS];
        let mut refused = Ok(());
        for need in needs {
            refused = refused.and_then(|()| {
                let gpu = of_device(process, need.device)?;
                let own = devices.get_mut(gpu).ok_or(CUDA_ERROR_NOT_PERMITTED)?;
                own.number = need.device;
                settle(process, gpu, own, 0);
                // What graphs have and do not use serves first.
                let used = attribute(need.device, CU_GRAPH_MEM_ATTR_USED_MEM_CURRENT).unwrap_or(own.charged);
                let more = used.saturating_add(need.bytes).saturating_sub(own.charged);
                Reserved::take(process, gpu, more)?.keep();
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
                settle(process, gpu, own, taken);
            }
        }
        checked(answer)
    }
}

/// Sets what a device's graphs are charged to what they have, out of what was taken before.
fn settle(process: &Process, gpu: usize, own: &mut Device, taken: u64) {
    let have = own.charged.saturating_add(taken);
    let reserved = attribute(own.number, CU_GRAPH_MEM_ATTR_RESERVED_MEM_CURRENT).unwrap_or(have);
    if reserved < have {
        process.region.release(gpu, have - reserved);
    }
    own.charged = reserved.min(have);
}

/// Whether any graph of this process ever allocated.
#[inline]
pub(crate) fn any() -> bool {
    process::attached().is_some_and(|process| process.memory.graphs.any.load(Relaxed))
}

/// Launches an executable graph, with the driver's call: what it allocates is taken before.
#[inline]
pub(crate) fn launched(exec: CUgraphExec, call: impl FnOnce() -> CUresult) -> CUresult {
    match process::attached().filter(|_| any()) {
        Some(process) => launch(process, exec, call),
        None => call(),
    }
}

#[cold]
fn launch(process: &Process, exec: CUgraphExec, call: impl FnOnce() -> CUresult) -> CUresult {
    let graphs = &process.memory.graphs;
    let at = exec.addr() as u64;
    let needs = locked(&graphs.execs).get(&at).filter(|own| !own.provided).map(|own| own.needs.clone());
    let Some(needs) = needs else { return call() };
    process.memory.later.look(process);
    let done = graphs.providing(process, &needs, call);
    if done.is_ok()
        && let Some(own) = locked(&graphs.execs).get_mut(&at)
    {
        own.provided = true;
    }
    code(done)
}

/// Makes a graph executable, with the driver's call.
fn instantiate(
    graph: CUgraph,
    exec: *mut CUgraphExec,
    uploads: bool,
    call: impl FnOnce() -> CUresult,
) -> CUresult {
    let process = process::attached().filter(|process| process.memory.graphs.any.load(Relaxed));
    let Some(process) = process.filter(|_| !exec.is_null()) else { return call() };
    let mut all = Vec::new();
    needs(graph, 0, &mut all);
    if all.is_empty() {
        return call();
    }
    let graphs = &process.memory.graphs;
    let done = if uploads { graphs.providing(process, &all, call) } else { checked(call()) };
    if done.is_ok() {
        // SAFETY: not null, and the driver has just written there.
        let made = unsafe { *exec }.addr() as u64;
        locked(&graphs.execs).insert(made, Exec { needs: all, provided: uploads });
    }
    code(done)
}

/// A node was added, with the driver's call.
fn added(answer: CUresult, allocates: bool) -> CUresult {
    if answer == CUDA_SUCCESS
        && allocates
        && let Some(process) = process::attached()
    {
        process.memory.graphs.has_memory();
    }
    answer
}

/// # Safety
///
/// Null, or the program's.
unsafe fn allocates(params: *const CUgraphNodeParams) -> bool {
    // SAFETY: the caller's promise.
    unsafe { params.as_ref() }.is_some_and(|params| params.type_ == CU_GRAPH_NODE_TYPE_MEM_ALLOC)
}

/// Whether the end of a graph has to be looked at.
fn destroy_matters() -> bool {
    any() || crate::throttle::needed()
}

hooks! { cuda;
    fn cuGraphAddMemAllocNode(
        graph_node: *mut CUgraphNode,
        graph: CUgraph,
        dependencies: *const CUgraphNode,
        num_dependencies: usize,
        node_params: *mut CUDA_MEM_ALLOC_NODE_PARAMS,
    ) |next, _variant| {
        granted(
            // SAFETY: the program's promise.
            |_| checked(added(unsafe { next(graph_node, graph, dependencies, num_dependencies, node_params) }, true)))
    }

    fn cuGraphAddNode(
        graph_node: *mut CUgraphNode,
        graph: CUgraph,
        dependencies: *const CUgraphNode,
        num_dependencies: usize,
        node_params: *mut CUgraphNodeParams,
    ) |next, _variant| {
        // SAFETY: the program's promise; the driver refuses null.
        let allocates = unsafe { allocates(node_params) };
        // SAFETY: likewise.
        added(unsafe { next(graph_node, graph, dependencies, num_dependencies, node_params) }, allocates)
    }

    fn cuGraphAddNode_v2(
        graph_node: *mut CUgraphNode,
        graph: CUgraph,
        dependencies: *const CUgraphNode,
        dependency_data: *const CUgraphEdgeData,
        num_dependencies: usize,
        node_params: *mut CUgraphNodeParams,
    ) |next, _variant| {
        // SAFETY: the program's promise; the driver refuses null.
        let allocates = unsafe { allocates(node_params) };
        // SAFETY: likewise.
        let answer =
            unsafe { next(graph_node, graph, dependencies, dependency_data, num_dependencies, node_params) };
        added(answer, allocates)
    }

    fn cuGraphInstantiate(
        graph_exec: *mut CUgraphExec,
        graph: CUgraph,
        error_node: *mut CUgraphNode,
        log_buffer: *mut c_char,
        length: usize,
    ) |next, _variant| {
        // SAFETY: the program's promise.
        instantiate(graph, graph_exec, false, || unsafe { next(graph_exec, graph, error_node, log_buffer, length) })
    }

    fn cuGraphInstantiate_v2(
        graph_exec: *mut CUgraphExec,
        graph: CUgraph,
        error_node: *mut CUgraphNode,
        log_buffer: *mut c_char,
        length: usize,
    ) |next, _variant| {
        // SAFETY: the program's promise.
        instantiate(graph, graph_exec, false, || unsafe { next(graph_exec, graph, error_node, log_buffer, length) })
    }

    fn cuGraphInstantiateWithFlags(graph_exec: *mut CUgraphExec, graph: CUgraph, flags: u64) |next, _variant| {
        let uploads = flags & u64::from(CUDA_GRAPH_INSTANTIATE_FLAG_UPLOAD) != 0;
        // SAFETY: the program's promise.
        instantiate(graph, graph_exec, uploads, || unsafe { next(graph_exec, graph, flags) })
    }

    fn cuGraphInstantiateWithParams(
        graph_exec: *mut CUgraphExec,
        graph: CUgraph,
        instantiate_params: *mut CUDA_GRAPH_INSTANTIATE_PARAMS,
    ) twin cuGraphInstantiateWithParams_ptsz |next, _variant| {
        // SAFETY: null, or the program's; the driver refuses null.
        let flags = unsafe { instantiate_params.as_ref() }.map_or(0, |params| params.flags);
        let uploads = flags & u64::from(CUDA_GRAPH_INSTANTIATE_FLAG_UPLOAD) != 0;
        // SAFETY: the program's promise.
        instantiate(graph, graph_exec, uploads, || unsafe { next(graph_exec, graph, instantiate_params) })
    }

    fn cuGraphUpload(exec: CUgraphExec, stream: CUstream) twin cuGraphUpload_ptsz |next, _variant| {
        // SAFETY: the program's promise.
        launched(exec, || unsafe { next(exec, stream) })
    }

    fn cuGraphExecDestroy(exec: CUgraphExec) |next, _variant| if destroy_matters {
        let Some(process) = process::attached() else {
            // SAFETY: the program's promise.
            return unsafe { next(exec) };
        };
        // Held while the driver ends it: it may use the handle again at once.
        let mut execs = locked(&process.memory.graphs.execs);
        // SAFETY: the program's promise.
        let answer = unsafe { next(exec) };
        if answer == CUDA_SUCCESS {
            execs.remove(&(exec.addr() as u64));
            process.throttle.doubt(crate::launch::graph(exec));
        }
        answer
    }

    fn cuDeviceGraphMemTrim(device: CUdevice) |next, _variant| {
        // SAFETY: the program's promise.
        let answer = unsafe { next(device) };
        if let Some(process) = process::attached() {
            let graphs = &process.memory.graphs;
            // Whatever was taken from them they take again when they are launched.
            locked(&graphs.execs).values_mut().for_each(|exec| exec.provided = false);
            (0..process.region.gpus()).for_each(|gpu| graphs.refresh(process, gpu));
        }
        answer
    }
}
