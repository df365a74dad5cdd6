//! Executable graphs: copies of graphs that can be launched repeatedly.

use super::super::device::Device;
use super::super::event::Event;
use super::super::session;
use super::super::stream::Stream;
use super::graph_memory;
use super::launch_plan::{self, LaunchPlan};
use super::node_operation::NodeOperation;
use super::store::{GraphStore, new_handle};
use super::*;
use std::collections::BTreeMap;

static EXECS: HandleArena<u64> = HandleArena::new();

const INVALID_VALUE: CudaError = CudaError::INVALID_VALUE;

/// An executable graph: the result of instantiating a graph.
pub(super) struct ExecutableGraph {
    /// The executable's own copy of the graph.
    pub(super) graph: GraphKey,
    /// The graph from which it was instantiated: its handle and its id, because the handle may be reused.
    source: (GraphKey, u64),
    /// The executable's nodes, by the id of the node from which each was copied.
    exec_nodes: BTreeMap<u64, NodeKey>,
    pub(super) flags: u64,
    /// What a launch submits on the device with this ordinal; `None` after a node has changed.
    plan: Option<(i32, Arc<LaunchPlan>)>,
    /// The marker at the end of the last launch.
    last: Option<(&'static Event, u64)>,
    /// Held while a launch is submitted: launches of one executable are serialized.
    launch_lock: Arc<Mutex<()>>,
    /// Timelines on other GPUs, by device ordinal.
    timelines: BTreeMap<i32, (&'static Device, usize)>,
    /// Graph memory held on each device, in bytes.
    mapped: Vec<(&'static Device, u64)>,
    /// Memory that the executable itself takes, in bytes.
    charged: Option<(&'static Device, u64)>,
}

/// Why a graph cannot be instantiated.
pub(super) struct InstantiateError {
    pub(super) error: CudaError,
    pub(super) node: Option<NodeKey>,
    pub(super) result: CUgraphInstantiateResult,
}

impl From<CudaError> for InstantiateError {
    fn from(error: CudaError) -> Self {
        Self { error, node: None, result: CUDA_GRAPH_INSTANTIATE_ERROR }
    }
}

const KNOWN_FLAGS: u64 = (CUDA_GRAPH_INSTANTIATE_FLAG_AUTO_FREE_ON_LAUNCH
    | CUDA_GRAPH_INSTANTIATE_FLAG_UPLOAD
    | CUDA_GRAPH_INSTANTIATE_FLAG_DEVICE_LAUNCH
    | CUDA_GRAPH_INSTANTIATE_FLAG_USE_NODE_PRIORITY) as u64;
const DEVICE_LAUNCH: u64 = CUDA_GRAPH_INSTANTIATE_FLAG_DEVICE_LAUNCH as u64;
const AUTO_FREE: u64 = CUDA_GRAPH_INSTANTIATE_FLAG_AUTO_FREE_ON_LAUNCH as u64;

/// Instantiates a graph and returns the handle of the executable.
pub(super) fn instantiate(
    store: &mut GraphStore,
    graph: GraphKey,
    flags: u64,
) -> Result<usize, InstantiateError> {
    let source = store.graph(graph)?;
    let (id, execs) = (source.id, source.execs);
    if flags & !KNOWN_FLAGS != 0 || flags & DEVICE_LAUNCH != 0 && flags & AUTO_FREE != 0 {
        return Err(INVALID_VALUE.into());
    }
    if let Some(node) = launch_plan::find_cycle(store, graph) {
        let result = CUDA_GRAPH_INSTANTIATE_INVALID_STRUCTURE;
        return Err(InstantiateError { error: INVALID_VALUE, node: Some(node), result });
    }
    if execs > 0 && store.has_memory(graph) {
        return Err(CudaError::NOT_SUPPORTED.into());
    }
    if flags & DEVICE_LAUNCH != 0 {
        check_device_launchable(store, graph)?;
    }
    let handle = new_handle(&EXECS)?;
    let copy = match store.clone_graph(graph, true) {
        Ok(copy) => copy,
        Err(error) => {
            EXECS.drop(handle as *mut u8);
            return Err(error.into());
        }
    };
    let charged = match charge_exec() {
        Ok(charged) => charged,
        Err(error) => {
            store.destroy(copy);
            EXECS.drop(handle as *mut u8);
            return Err(error.into());
        }
    };
    let mut exec_nodes = BTreeMap::new();
    index_nodes(store, copy, &mut exec_nodes);
    let exec = ExecutableGraph {
        graph: copy,
        source: (graph, id),
        exec_nodes,
        flags,
        plan: None,
        last: None,
        launch_lock: Arc::default(),
        timelines: BTreeMap::new(),
        mapped: Vec::new(),
        charged,
    };
    store.execs.insert(handle, exec);
    if let Some(source) = store.graphs.get_mut(&graph) {
        source.execs += 1;
    }
    Ok(handle)
}

/// Charges the memory of an executable to the current context's device, if the node's settings say so.
fn charge_exec() -> Result<Option<(&'static Device, u64)>, CudaError> {
    let bytes = u64::from(session::session()?.node.config().settings.graph_mebibytes) << 20;
    match context::current() {
        Ok(context) if bytes > 0 => {
            context.device.charge(bytes)?;
            Ok(Some((context.device, bytes)))
        }
        _ => Ok(None),
    }
}

fn index_nodes(store: &GraphStore, graph: GraphKey, exec_nodes: &mut BTreeMap<u64, NodeKey>) {
    let Ok(graph) = store.graph(graph) else { return };
    for &key in &graph.nodes {
        let Ok(node) = store.node(key) else { continue };
        exec_nodes.insert(node.origin, key);
        if let NodeOperation::Child(child) = node.operation {
            index_nodes(store, child, exec_nodes);
        }
    }
}

/// Checks that kernels could launch the graph: it may use only device operations, all in one context.
fn check_device_launchable(store: &GraphStore, graph: GraphKey) -> Result<(), InstantiateError> {
    let nodes = &store.graph(graph)?.nodes;
    if nodes.is_empty() {
        return Err(INVALID_VALUE.into());
    }
    let mut contexts: Vec<u64> = Vec::new();
    for &key in nodes {
        let operation = &store.node(key)?.operation;
        let refused = |result| InstantiateError { error: INVALID_VALUE, node: Some(key), result };
        match operation {
            NodeOperation::Kernel(_) | NodeOperation::Copy(..) | NodeOperation::Fill(..) => {}
            NodeOperation::Child(child) => check_device_launchable(store, *child)?,
            _ => return Err(refused(CUDA_GRAPH_INSTANTIATE_NODE_OPERATION_NOT_SUPPORTED)),
        }
        contexts.extend(operation.context().map(|context| context.id));
        if contexts.iter().any(|&id| Some(&id) != contexts.first()) {
            return Err(refused(CUDA_GRAPH_INSTANTIATE_MULTIPLE_CTXS_NOT_SUPPORTED));
        }
    }
    Ok(())
}

/// Destroys an executable graph. Running launches continue.
pub(super) fn destroy(handle: usize) -> Result<(), CudaError> {
    let mut store = store();
    let exec = store.execs.remove(&handle).ok_or(INVALID_VALUE)?;
    EXECS.drop(handle as *mut u8);
    if let Some(source) = store.graphs.get_mut(&exec.source.0).filter(|graph| graph.id == exec.source.1) {
        source.execs = source.execs.saturating_sub(1);
    }
    let mut outliving: BTreeMap<i32, u64> = BTreeMap::new();
    for unfreed in store.allocations(exec.graph) {
        *outliving.entry(unfreed.device().ordinal).or_default() += unfreed.orphan();
    }
    for (device, bytes) in exec.mapped {
        let kept = outliving.get(&device.ordinal).copied().unwrap_or(0);
        graph_memory::unmap(device, bytes.saturating_sub(kept));
    }
    if let Some((device, bytes)) = exec.charged {
        device.refund(bytes);
    }
    store.destroy(exec.graph);
    for (device, timeline) in exec.timelines.into_values() {
        device.engine().close_timeline(timeline);
    }
    user_objects::run_destructors(store, exec.last);
    Ok(())
}

impl GraphStore {
    pub(super) fn exec(&self, handle: usize) -> Result<&ExecutableGraph, CudaError> {
        self.execs.get(&handle).ok_or(INVALID_VALUE)
    }

    fn exec_mut(&mut self, handle: usize) -> Result<&mut ExecutableGraph, CudaError> {
        self.execs.get_mut(&handle).ok_or(INVALID_VALUE)
    }

    /// Returns the executable's copy of a node.
    pub(super) fn exec_node(&self, exec: usize, node: NodeKey) -> Result<NodeKey, CudaError> {
        self.exec(exec)?.exec_nodes.get(&self.node(node)?.id).copied().ok_or(INVALID_VALUE)
    }

    /// Changes the parameters of a node of an executable graph.
    pub(super) fn set_in_exec(
        &mut self,
        exec: usize,
        node: NodeKey,
        operation: NodeOperation,
    ) -> Result<(), CudaError> {
        let own = self.exec_node(exec, node)?;
        let now = &self.node(own)?.operation;
        if now.kind() != operation.kind() || !can_become(now, &operation) {
            return Err(INVALID_VALUE);
        }
        self.replace(own, operation);
        self.exec_mut(exec)?.plan = None;
        Ok(())
    }

    /// Replaces the operation of a node, keeping attributes that are not part of its parameters.
    pub(super) fn replace(&mut self, key: NodeKey, mut operation: NodeOperation) {
        let Some(node) = self.nodes.get_mut(&key) else { return };
        if let (NodeOperation::Kernel(old), NodeOperation::Kernel(new)) = (&node.operation, &mut operation) {
            new.attributes.clone_from(&old.attributes);
        }
        let before = std::mem::replace(&mut node.operation, operation);
        self.drop_operation(&before);
    }

    /// Updates the child graph of a node of an executable graph.
    pub(super) fn set_child(&mut self, exec: usize, node: NodeKey, with: GraphKey) -> Result<(), CudaError> {
        let own = self.exec_node(exec, node)?;
        let NodeOperation::Child(child) = self.node(own)?.operation else { return Err(INVALID_VALUE) };
        self.graph(with)?;
        compare_graphs(self, child, with).map_err(|_| INVALID_VALUE)?;
        copy_operations(self, child, with);
        self.exec_mut(exec)?.plan = None;
        Ok(())
    }

    pub(super) fn enable(&mut self, exec: usize, node: NodeKey, enabled: bool) -> Result<(), CudaError> {
        let own = self.exec_node(exec, node)?;
        if !can_be_disabled(&self.node(own)?.operation) {
            return Err(INVALID_VALUE);
        }
        if let Some(node) = self.nodes.get_mut(&own) {
            node.enabled = enabled;
        }
        self.exec_mut(exec)?.plan = None;
        Ok(())
    }

    pub(super) fn is_enabled(&self, exec: usize, node: NodeKey) -> Result<bool, CudaError> {
        let own = self.node(self.exec_node(exec, node)?)?;
        if can_be_disabled(&own.operation) { Ok(own.enabled) } else { Err(INVALID_VALUE) }
    }

    /// Updates an executable graph from another graph of the same topology.
    pub(super) fn update(&mut self, exec: usize, with: GraphKey) -> Result<(), UpdateMismatch> {
        let own = self.exec(exec).map_err(|_| UpdateMismatch::UNKNOWN)?.graph;
        compare_graphs(self, own, with)?;
        copy_operations(self, own, with);
        if let Ok(exec) = self.exec_mut(exec) {
            exec.plan = None;
        }
        Ok(())
    }

    /// Returns the launch plan for a device, building it if necessary.
    fn plan(&mut self, exec: usize, ordinal: i32) -> Result<Arc<LaunchPlan>, CudaError> {
        let own = self.exec(exec)?;
        if let Some((on, plan)) = &own.plan
            && *on == ordinal
        {
            return Ok(Arc::clone(plan));
        }
        let plan = Arc::new(LaunchPlan::new(self, own.graph, ordinal)?);
        self.exec_mut(exec)?.plan = Some((ordinal, Arc::clone(&plan)));
        Ok(plan)
    }
}

fn can_be_disabled(operation: &NodeOperation) -> bool {
    matches!(operation, NodeOperation::Kernel(_) | NodeOperation::Copy(..) | NodeOperation::Fill(..))
}

/// Returns whether a node of an executable graph can be changed like this: contexts and kinds of memory must stay.
fn can_become(now: &NodeOperation, new: &NodeOperation) -> bool {
    match (now, new) {
        (NodeOperation::Kernel(now), NodeOperation::Kernel(new)) => now.context.id == new.context.id,
        (NodeOperation::Copy(now, _, there), NodeOperation::Copy(new, _, here)) => {
            there.id == here.id && now.to_place() == new.to_place() && now.from_place() == new.from_place()
        }
        (NodeOperation::Fill(_, _, there), NodeOperation::Fill(_, _, here)) => there.id == here.id,
        (NodeOperation::Alloc(now), NodeOperation::Alloc(new)) => now.pointer() == new.pointer(),
        (NodeOperation::Free(now), NodeOperation::Free(new)) => now == new,
        _ => true,
    }
}

/// Where two graphs differ.
pub(super) struct UpdateMismatch {
    pub(super) result: CUgraphExecUpdateResult,
    pub(super) node: Option<NodeKey>,
    pub(super) from: Option<NodeKey>,
}

impl UpdateMismatch {
    const UNKNOWN: Self = Self { result: CU_GRAPH_EXEC_UPDATE_ERROR, node: None, from: None };
}

/// Compares two graphs; nodes correspond in the order in which they were added.
fn compare_graphs(store: &GraphStore, own: GraphKey, with: GraphKey) -> Result<(), UpdateMismatch> {
    let (own, with) = (store.graph(own), store.graph(with));
    let (Ok(own), Ok(with)) = (own, with) else { return Err(UpdateMismatch::UNKNOWN) };
    let differs = |result, node| UpdateMismatch { result, node: Some(node), from: None };
    if own.nodes.len() != with.nodes.len() {
        let extra = with.nodes.get(own.nodes.len()).copied();
        let result = CU_GRAPH_EXEC_UPDATE_ERROR_TOPOLOGY_CHANGED;
        return Err(UpdateMismatch { result, node: extra, from: None });
    }
    let pairs: BTreeMap<NodeKey, NodeKey> =
        with.nodes.iter().copied().zip(own.nodes.iter().copied()).collect();
    for (&theirs, &ours) in with.nodes.iter().zip(&own.nodes) {
        let (Ok(new), Ok(now)) = (store.node(theirs), store.node(ours)) else {
            return Err(UpdateMismatch::UNKNOWN);
        };
        if new.operation.kind() != now.operation.kind() {
            return Err(differs(CU_GRAPH_EXEC_UPDATE_ERROR_NODE_TYPE_CHANGED, theirs));
        }
        let mismatch = new.dependencies.iter().find(|(before, port)| {
            !pairs.get(before).is_some_and(|before| now.dependencies.contains(&(*before, *port)))
        });
        if mismatch.is_some() || new.dependencies.len() != now.dependencies.len() {
            let from = mismatch.map(|&(before, _)| before);
            let result = CU_GRAPH_EXEC_UPDATE_ERROR_TOPOLOGY_CHANGED;
            return Err(UpdateMismatch { result, node: Some(theirs), from });
        }
        if let (NodeOperation::Child(new), NodeOperation::Child(now)) = (&new.operation, &now.operation) {
            compare_graphs(store, *now, *new)?;
        }
        if !can_become(&now.operation, &new.operation) {
            let result = match now.operation {
                NodeOperation::Kernel(_) => CU_GRAPH_EXEC_UPDATE_ERROR_UNSUPPORTED_FUNCTION_CHANGE,
                NodeOperation::Alloc(_) | NodeOperation::Free(_) => CU_GRAPH_EXEC_UPDATE_ERROR_NOT_SUPPORTED,
                _ => CU_GRAPH_EXEC_UPDATE_ERROR_PARAMETERS_CHANGED,
            };
            return Err(differs(result, theirs));
        }
    }
    Ok(())
}

fn copy_operations(store: &mut GraphStore, own: GraphKey, with: GraphKey) {
    let nodes =
        |store: &GraphStore, key| store.graph(key).map(|graph| graph.nodes.clone()).unwrap_or_default();
    let (ours, theirs) = (nodes(store, own), nodes(store, with));
    for (own, with) in ours.into_iter().zip(theirs) {
        let Ok(operation) = store.node(with).map(|node| node.operation.clone()) else { continue };
        match (operation, store.node(own).map(|node| node.operation.clone())) {
            (NodeOperation::Child(with), Ok(NodeOperation::Child(own))) => copy_operations(store, own, with),
            (operation, _) => {
                if let Some(node) = store.nodes.get_mut(&own) {
                    node.operation = operation;
                }
            }
        }
    }
}

/// Reserves the graph memory that an executable needs, unless it has it already.
fn ensure_memory(store: &mut GraphStore, handle: usize, plan: &LaunchPlan) -> Result<(), CudaError> {
    let exec = store.exec_mut(handle)?;
    for (&ordinal, &bytes) in &plan.memory.peak {
        if bytes == 0 || exec.mapped.iter().any(|(device, _)| device.ordinal == ordinal) {
            continue;
        }
        let device = session::device(ordinal)?;
        graph_memory::map(device, bytes)?;
        exec.mapped.push((device, bytes));
    }
    Ok(())
}

/// Reserves the memory for launches on a stream.
pub(super) fn upload(handle: usize, stream: &'static Stream) -> Result<(), CudaError> {
    let mut store = store();
    let plan = store.plan(handle, stream.context().device.ordinal)?;
    ensure_memory(&mut store, handle, &plan)
}

/// Releases the graph memory of idle executables, then memory that no graph uses.
pub(super) fn trim(device: &'static Device) {
    let mut store = store();
    let idle = |exec: &ExecutableGraph| {
        exec.last.is_none_or(|(event, ticket)| event.is_complete(ticket, None))
            && !store.allocations(exec.graph).iter().any(|allocation| allocation.is_live())
    };
    let idle: Vec<usize> =
        store.execs.iter().filter(|(_, exec)| idle(exec)).map(|(&handle, _)| handle).collect();
    for handle in idle {
        let Some(exec) = store.execs.get_mut(&handle) else { continue };
        exec.mapped.retain(|&(on, bytes)| {
            let here = on.ordinal == device.ordinal;
            if here {
                graph_memory::unmap(device, bytes);
            }
            !here
        });
    }
    drop(store);
    graph_memory::trim(device);
}

/// What a launch needs from the store.
struct PreparedLaunch {
    plan: Arc<LaunchPlan>,
    timelines: Vec<usize>,
    before: Option<(&'static Event, u64)>,
    end: (&'static Event, u64),
}

/// Launches an executable graph in a stream.
pub(super) fn launch(handle: usize, stream: &'static Stream) -> Result<(), CudaError> {
    let launch_lock = Arc::clone(&store().exec(handle)?.launch_lock);
    let _guard = locked(&launch_lock);
    let PreparedLaunch { plan, timelines, before, end } = prepare_launch(handle, stream)?;
    let launched = launch_plan::launch(&plan, stream, &timelines, before, end);
    if launched.is_err()
        && let Ok(exec) = store().exec_mut(handle)
    {
        // The launch failed, so its end marker may never be reached.
        exec.last = None;
    }
    launched
}

fn prepare_launch(handle: usize, stream: &'static Stream) -> Result<PreparedLaunch, CudaError> {
    let mut store = store();
    let plan = store.plan(handle, stream.context().device.ordinal)?;
    for context in &plan.places {
        if !context.is_alive() {
            return Err(CudaError::CONTEXT_IS_DESTROYED);
        }
    }
    let auto_free = store.exec(handle)?.flags & AUTO_FREE != 0;
    let memory = &plan.memory;
    if !auto_free && memory.unfreed.iter().any(|unfreed| unfreed.is_live()) {
        return Err(INVALID_VALUE);
    }
    let freed: Vec<_> = memory.frees.iter().map(|&pointer| graph_memory::find(pointer)).collect();
    if !freed.iter().all(|freed| freed.as_ref().is_some_and(|freed| freed.is_live())) {
        return Err(INVALID_VALUE);
    }
    ensure_memory(&mut store, handle, &plan)?;
    for freed in freed.iter().flatten().chain(&memory.unfreed) {
        freed.free();
    }
    memory.unfreed.iter().for_each(|unfreed| unfreed.set_live());
    let end = launch_plan::acquire_marker(stream.context())?;
    let exec = store.exec_mut(handle)?;
    let mut timelines = Vec::with_capacity(plan.places.len());
    for context in &plan.places {
        let timeline = match exec.timelines.get(&context.device.ordinal) {
            Some(&(_, timeline)) => timeline,
            None => {
                let timeline = launch_plan::open_timeline(context)?;
                exec.timelines.insert(context.device.ordinal, (context.device, timeline));
                timeline
            }
        };
        timelines.push(timeline);
    }
    Ok(PreparedLaunch { plan, timelines, before: exec.last.replace(end), end })
}
