//! The operations that a launch of an executable graph submits: as few as its nodes allow.
//!
//! Consecutive kernels without host work between them form one operation, inside which they overlap as far as their
//! edges and grids allow. Host work is placed between kernels in a topological order. Nodes on other GPUs than the
//! stream's go to separate timelines there, and marker events keep the order between the GPUs.

use super::super::context::Context;
use super::super::engine::{FULL_GPU_SHARE, GraphKernel, StreamKind, StreamOp};
use super::super::event::Event;
use super::super::memory::{MemoryOp, begin_operation};
use super::super::module::PeerGroup;
use super::super::stream::Stream;
use super::graph_memory::GraphAllocation;
use super::node_operation::{HostCallback, KernelNode, NodeOperation};
use super::store::GraphStore;
use super::*;
use std::collections::{BTreeMap, VecDeque};

/// The action of a step.
pub(super) enum StepAction {
    Kernels(Arc<[GraphKernel]>),
    Memory(MemoryOp),
    Callback(HostCallback),
    PeerKernel(KernelNode),
    Record(&'static Event),
    Wait(&'static Event),
}

/// One operation of a plan.
pub(super) struct PlanStep {
    pub(super) place: usize,
    /// Steps on other GPUs that must complete first.
    pub(super) waits: Vec<usize>,
    /// Whether a step on another GPU waits for this one.
    pub(super) signals: bool,
    pub(super) action: StepAction,
}

/// Everything that a launch submits.
pub(super) struct LaunchPlan {
    /// Contexts on other GPUs: entry `i` is place `i + 1`; place zero is the launching stream.
    pub(super) places: Vec<&'static Context>,
    pub(super) steps: Vec<PlanStep>,
    pub(super) memory: PlanMemory,
}

/// How a launch uses graph memory.
#[derive(Default)]
pub(super) struct PlanMemory {
    /// Peak usage per device ordinal, in bytes.
    pub(super) peak: BTreeMap<i32, u64>,
    /// Allocations that the launch leaves to be freed later.
    pub(super) unfreed: Vec<Arc<GraphAllocation>>,
    /// Addresses allocated by other launches that this one frees.
    pub(super) frees: Vec<CUdeviceptr>,
}

/// A node of the flattened graph, child graphs included, in topological order.
struct FlatNode {
    operation: Option<NodeOperation>,
    dependencies: Vec<usize>,
}

/// A step under construction.
struct OpenStep {
    place: usize,
    waits: Vec<usize>,
    signals: bool,
    kernels: Vec<GraphKernel>,
    action: Option<StepAction>,
}

impl LaunchPlan {
    /// Builds the plan for launches on the device with this ordinal.
    pub(super) fn new(store: &GraphStore, graph: GraphKey, ordinal: i32) -> Result<Self, CudaError> {
        let mut flat = Vec::new();
        flatten(store, graph, &mut flat, Vec::new()).map_err(|_| CudaError::INVALID_VALUE)?;
        let memory = PlanMemory::from_nodes(&flat);
        let mut builder = PlanBuilder { ordinal, places: Vec::new(), steps: Vec::new(), open: vec![None] };
        let mut located: Vec<(usize, usize)> = Vec::with_capacity(flat.len());
        for node in flat {
            let at = builder.add(node, &located);
            located.push(at);
        }
        let steps = builder.steps.into_iter().map(|open| PlanStep {
            place: open.place,
            waits: open.waits,
            signals: open.signals,
            action: open.action.unwrap_or_else(|| StepAction::Kernels(open.kernels.into())),
        });
        let steps = steps.collect();
        Ok(Self { places: builder.places, steps, memory })
    }
}

/// Builds the steps of a launch plan, node by node.
struct PlanBuilder {
    ordinal: i32,
    places: Vec<&'static Context>,
    steps: Vec<OpenStep>,
    /// For each place, the step to which kernels can still be added.
    open: Vec<Option<usize>>,
}

impl PlanBuilder {
    fn place(&mut self, context: &'static Context) -> usize {
        if context.device.ordinal == self.ordinal {
            return 0;
        }
        let ordinal = context.device.ordinal;
        let known = self.places.iter().position(|other| other.device.ordinal == ordinal);
        known.map_or_else(
            || {
                self.places.push(context);
                self.open.push(None);
                self.places.len()
            },
            |index| index + 1,
        )
    }

    /// Adds a node; returns its step and its index among the kernels of the step.
    fn add(&mut self, node: FlatNode, located: &[(usize, usize)]) -> (usize, usize) {
        let before: Vec<(usize, usize)> =
            node.dependencies.iter().filter_map(|&index| located.get(index)).copied().collect();
        let place = match node.operation.as_ref().and_then(NodeOperation::context) {
            Some(context) => self.place(context),
            None => before.first().map_or(0, |&(step, _)| self.steps[step].place),
        };
        let mut waits = Vec::new();
        for &(step, _) in &before {
            let other = self.steps[step].place;
            if other != place && !waits.contains(&step) {
                waits.push(step);
                self.steps[step].signals = true;
                // A kernel added to that step now would also have to be waited for, and might itself wait for this
                // step.
                self.open[other] = self.open[other].filter(|&open| open != step);
            }
        }
        let action = match &node.operation {
            Some(NodeOperation::Copy(op, ..) | NodeOperation::Fill(op, ..)) => {
                Some(StepAction::Memory(op.clone()))
            }
            Some(NodeOperation::Host(call)) => Some(StepAction::Callback(*call)),
            Some(NodeOperation::Kernel(kernel)) if kernel.function.peers.is_some() => {
                Some(StepAction::PeerKernel(kernel.clone()))
            }
            Some(NodeOperation::Record(event)) => Some(StepAction::Record(event)),
            Some(NodeOperation::Wait(event)) => Some(StepAction::Wait(event)),
            _ => None,
        };
        if action.is_some() {
            self.open[place] = None;
            self.steps.push(OpenStep { place, waits, signals: false, kernels: Vec::new(), action });
            return (self.steps.len() - 1, 0);
        }
        let step = match self.open[place].filter(|_| waits.is_empty()) {
            Some(step) => step,
            None => {
                self.steps.push(OpenStep { place, waits, signals: false, kernels: Vec::new(), action: None });
                self.open[place] = Some(self.steps.len() - 1);
                self.steps.len() - 1
            }
        };
        let dependencies =
            before.iter().filter(|&&(other, _)| other == step).map(|&(_, number)| number).collect();
        let (duration, share) = match &node.operation {
            Some(NodeOperation::Kernel(kernel)) => kernel.cost(),
            _ => (0, FULL_GPU_SHARE),
        };
        let kernels = &mut self.steps[step].kernels;
        kernels.push(GraphKernel { duration, share, dependencies });
        (step, kernels.len() - 1)
    }
}

impl KernelNode {
    fn cost(&self) -> (u64, u32) {
        let duration = self.function.duration;
        (duration, if duration == 0 { FULL_GPU_SHARE } else { self.shape.share(self.context.device) })
    }
}

/// Appends the nodes of a graph to `out`, all of them after `entry`. Returns the nodes at which the graph ends, or a
/// node of a cycle.
fn flatten(
    store: &GraphStore,
    graph: GraphKey,
    out: &mut Vec<FlatNode>,
    entry: Vec<usize>,
) -> Result<Vec<usize>, NodeKey> {
    let mut exits: BTreeMap<NodeKey, usize> = BTreeMap::new();
    let mut ends = Vec::new();
    for key in store.order(graph)? {
        let Ok(node) = store.node(key) else { continue };
        let mut dependencies: Vec<usize> =
            node.dependencies.iter().filter_map(|(before, _)| exits.get(before)).copied().collect();
        if dependencies.is_empty() {
            dependencies.clone_from(&entry);
        }
        let operation = match &node.operation {
            NodeOperation::Child(child) => {
                let inside = flatten(store, *child, out, dependencies.clone())?;
                if !inside.is_empty() {
                    dependencies = inside;
                }
                None
            }
            _ if !node.enabled => None,
            operation => Some(operation.clone()),
        };
        out.push(FlatNode { operation, dependencies });
        let index = out.len() - 1;
        exits.insert(key, index);
        if node.dependents.is_empty() {
            ends.push(index);
        }
    }
    Ok(ends)
}

/// Returns a node of a cycle in the graph or one of its child graphs.
pub(super) fn find_cycle(store: &GraphStore, graph: GraphKey) -> Option<NodeKey> {
    match store.order(graph) {
        Err(node) => Some(node),
        Ok(nodes) => nodes.into_iter().find_map(|node| match store.node(node).map(|node| &node.operation) {
            Ok(NodeOperation::Child(child)) => find_cycle(store, *child),
            _ => None,
        }),
    }
}

impl PlanMemory {
    fn from_nodes(flat: &[FlatNode]) -> Self {
        let mut memory = Self::default();
        let mut now: BTreeMap<i32, u64> = BTreeMap::new();
        for operation in flat.iter().filter_map(|node| node.operation.as_ref()) {
            match operation {
                NodeOperation::Alloc(made) => {
                    let ordinal = made.device().ordinal;
                    let used = now.entry(ordinal).or_default();
                    *used += made.size();
                    let peak = memory.peak.entry(ordinal).or_default();
                    *peak = (*peak).max(*used);
                    memory.unfreed.push(Arc::clone(made));
                }
                NodeOperation::Free(pointer) => {
                    match memory.unfreed.iter().position(|made| made.pointer() == *pointer) {
                        Some(index) => {
                            let made = memory.unfreed.swap_remove(index);
                            let used = now.entry(made.device().ordinal).or_default();
                            *used = used.saturating_sub(made.size());
                        }
                        None => memory.frees.push(*pointer),
                    }
                }
                _ => {}
            }
        }
        memory
    }
}

/// Marker events at the end of launches, for others to wait for.
static MARKERS: HandleArena<Event> = HandleArena::new();
static MARKERS_IN_USE: Mutex<VecDeque<(&'static Event, u64)>> = Mutex::new(VecDeque::new());

/// Below this number, new markers are created without checking whether the oldest is complete.
const MIN_MARKERS_BEFORE_REUSE: usize = 16;

/// Returns a marker for the GPU of the context, with a new recording. Markers are reused when their recording is
/// complete.
pub(super) fn acquire_marker(context: &'static Context) -> Result<(&'static Event, u64), CudaError> {
    let mut in_use = locked(&MARKERS_IN_USE);
    let over = in_use.front().filter(|(event, ticket)| event.is_complete(*ticket, None));
    let again =
        if in_use.len() >= MIN_MARKERS_BEFORE_REUSE && over.is_some() { in_use.pop_front() } else { None };
    let event = match again {
        Some((event, _)) => event,
        None => MARKERS.make(Event::default, |_| ()).ok_or(CudaError::OUT_OF_MEMORY)?,
    };
    let ticket = event.rearm(context);
    in_use.push_back((event, ticket));
    Ok((event, ticket))
}

/// Submits a plan to a stream and to the timelines of its other places. `before` and `end` are the end markers of the
/// previous launch and of this one.
pub(super) fn launch(
    plan: &LaunchPlan,
    stream: &'static Stream,
    timelines: &[usize],
    before: Option<(&'static Event, u64)>,
    end: (&'static Event, u64),
) -> Result<(), CudaError> {
    let submit = |place: usize, op: StreamOp| match (place, place.checked_sub(1)) {
        (0, _) | (_, None) => stream.submit(op),
        (_, Some(other)) => plan.places[other].device.submit(timelines[other], op),
    };
    let context_of = |place: usize| match place {
        0 => stream.context(),
        _ => plan.places[place - 1],
    };
    let signal = |place: usize| {
        let (event, ticket) = acquire_marker(context_of(place))?;
        submit(place, StreamOp::RecordEvent(event, ticket))?;
        Ok::<_, CudaError>((event, ticket))
    };
    if let Some((event, ticket)) = before {
        submit(0, StreamOp::WaitEvent(event, ticket))?;
    }
    if !plan.places.is_empty() {
        let (event, ticket) = signal(0)?;
        for place in 1..=plan.places.len() {
            submit(place, StreamOp::WaitEvent(event, ticket))?;
        }
    }
    let mut signals: BTreeMap<usize, (&'static Event, u64)> = BTreeMap::new();
    for (index, step) in plan.steps.iter().enumerate() {
        for other in &step.waits {
            if let Some(&(event, ticket)) = signals.get(other) {
                submit(step.place, StreamOp::WaitEvent(event, ticket))?;
            }
        }
        match &step.action {
            StepAction::Kernels(kernels) => submit(step.place, StreamOp::GraphKernels(Arc::clone(kernels)))?,
            StepAction::Memory(op) => {
                let time = op.time(context_of(step.place).device);
                let (op, pending) = (op.clone(), begin_operation());
                let operation = move || {
                    run(&op);
                    drop(pending);
                };
                submit(
                    step.place,
                    match time {
                        Some(time) => StreamOp::Copy(time, Box::new(operation)),
                        None => StreamOp::HostWork(Box::new(operation)),
                    },
                )?;
            }
            StepAction::Callback(call) => {
                let call = *call;
                submit(step.place, StreamOp::Callback(Box::new(move || call.run())))?;
            }
            StepAction::PeerKernel(node) => {
                if let Some(PeerGroup { key, count, duration }) = node.function.peers {
                    let device = node.context.device;
                    let kernel = device.peer_kernel(key, count, duration, node.shape.share(device))?;
                    submit(step.place, StreamOp::PeerKernel(kernel))?;
                }
            }
            StepAction::Record(event) => submit(step.place, StreamOp::RecordEvent(event, 0))?,
            StepAction::Wait(event) => submit(step.place, StreamOp::WaitEvent(event, event.ticket()))?,
        }
        if step.signals {
            signals.insert(index, signal(step.place)?);
        }
    }
    for place in 1..=plan.places.len() {
        let (event, ticket) = signal(place)?;
        submit(0, StreamOp::WaitEvent(event, ticket))?;
    }
    submit(0, StreamOp::RecordEvent(end.0, end.1))
}

/// Runs a copy or fill unless its memory was freed since the graph was built.
fn run(op: &MemoryOp) {
    if op.validate().is_ok() {
        op.run();
    }
}

/// Opens a timeline on another GPU for the nodes there.
pub(super) fn open_timeline(context: &'static Context) -> Result<usize, CudaError> {
    if !context.is_alive() {
        return Err(CudaError::CONTEXT_IS_DESTROYED);
    }
    Ok(context.device.engine().open_timeline(context.group, StreamKind::NonBlocking))
}
