//! What a launch of an executable graph submits: as few operations as its nodes allow.
//!
//! Kernels with nothing of the host between them are one operation, inside which they overlap as their edges and their
//! grids allow. What the host does comes between, in an order that the edges allow. Nodes of other GPUs than the
//! stream's go to tracks of their own there, and marks keep the order between the GPUs.

use super::super::context::Context;
use super::super::engine::{FULL, Kind, Node as Placed, Op};
use super::super::event::Event;
use super::super::memory::{MemoryOp, under_way};
use super::super::stream::Stream;
use super::book::Book;
use super::memory::Allocation;
use super::work::{Call, Kernel, Work};
use super::*;
use std::collections::{BTreeMap, VecDeque};

/// What a step does.
pub(super) enum Action {
    Kernels(Arc<[Placed]>),
    Memory(MemoryOp),
    Call(Call),
    Record(&'static Event),
    Wait(&'static Event),
}

/// One operation.
pub(super) struct Step {
    pub(super) place: usize,
    /// Steps on other GPUs that come first.
    pub(super) waits: Vec<usize>,
    /// Whether one on another GPU comes after it.
    pub(super) signals: bool,
    pub(super) action: Action,
}

/// All of a launch.
pub(super) struct Program {
    /// Contexts on other GPUs, by their place from one on; the stream's is place zero.
    pub(super) places: Vec<&'static Context>,
    pub(super) steps: Vec<Step>,
    pub(super) memory: Memory,
}

/// What a graph does with graph memory.
#[derive(Default)]
pub(super) struct Memory {
    /// What it needs at most, by device.
    pub(super) peak: BTreeMap<i32, u64>,
    /// What it leaves to be freed later.
    pub(super) left: Vec<Arc<Allocation>>,
    /// Those of others that it frees.
    pub(super) frees: Vec<CUdeviceptr>,
}

/// A node among all nodes of a graph and of the graphs inside it, in an order that its edges allow.
struct Flat {
    work: Option<Work>,
    after: Vec<usize>,
}

/// A step that is being put together.
struct Open {
    place: usize,
    waits: Vec<usize>,
    signals: bool,
    kernels: Vec<Placed>,
    action: Option<Action>,
}

impl Program {
    /// For launches on the GPU of that number.
    pub(super) fn new(book: &Book, graph: GraphKey, ordinal: i32) -> Result<Self, CudaError> {
        let mut flat = Vec::new();
        flatten(book, graph, &mut flat, Vec::new()).map_err(|_| CudaError::INVALID_VALUE)?;
        let memory = Memory::of(&flat);
        let mut builder = Builder { ordinal, places: Vec::new(), steps: Vec::new(), open: vec![None] };
        let mut located: Vec<(usize, usize)> = Vec::with_capacity(flat.len());
        for node in flat {
            let at = builder.add(node, &located);
            located.push(at);
        }
        let steps = builder.steps.into_iter().map(|open| Step {
            place: open.place,
            waits: open.waits,
            signals: open.signals,
            action: open.action.unwrap_or_else(|| Action::Kernels(open.kernels.into())),
        });
        let steps = steps.collect();
        Ok(Self { places: builder.places, steps, memory })
    }
}

struct Builder {
    ordinal: i32,
    places: Vec<&'static Context>,
    steps: Vec<Open>,
    /// The step of each place that kernels can still be added to.
    open: Vec<Option<usize>>,
}

impl Builder {
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

    /// Adds a node; returns its step, and its number among the kernels of that.
    fn add(&mut self, node: Flat, located: &[(usize, usize)]) -> (usize, usize) {
        let before: Vec<(usize, usize)> =
            node.after.iter().filter_map(|&index| located.get(index)).copied().collect();
        let place = match node.work.as_ref().and_then(Work::context) {
            Some(context) => self.place(context),
            None => before.first().map_or(0, |&(step, _)| self.steps[step].place),
        };
        let mut waits = Vec::new();
        for &(step, _) in &before {
            let other = self.steps[step].place;
            if other != place && !waits.contains(&step) {
                waits.push(step);
                self.steps[step].signals = true;
                // What is added after this would have to be waited for too, and might wait for us.
                self.open[other] = self.open[other].filter(|&open| open != step);
            }
        }
        let action = match &node.work {
            Some(Work::Copy(op, ..) | Work::Fill(op, ..)) => Some(Action::Memory(op.clone())),
            Some(Work::Host(call)) => Some(Action::Call(*call)),
            Some(Work::Record(event)) => Some(Action::Record(event)),
            Some(Work::Wait(event)) => Some(Action::Wait(event)),
            _ => None,
        };
        if action.is_some() {
            self.open[place] = None;
            self.steps.push(Open { place, waits, signals: false, kernels: Vec::new(), action });
            return (self.steps.len() - 1, 0);
        }
        let step = match self.open[place].filter(|_| waits.is_empty()) {
            Some(step) => step,
            None => {
                self.steps.push(Open { place, waits, signals: false, kernels: Vec::new(), action: None });
                self.open[place] = Some(self.steps.len() - 1);
                self.steps.len() - 1
            }
        };
        let after = before.iter().filter(|&&(other, _)| other == step).map(|&(_, number)| number).collect();
        let (duration, share) = match &node.work {
            Some(Work::Kernel(kernel)) => kernel.cost(),
            _ => (0, FULL),
        };
        let kernels = &mut self.steps[step].kernels;
        kernels.push(Placed { duration, share, after });
        (step, kernels.len() - 1)
    }
}

impl Kernel {
    fn cost(&self) -> (u64, u32) {
        let duration = self.function.duration;
        (duration, if duration == 0 { FULL } else { self.shape.share(self.context.device) })
    }
}

/// Puts the nodes of a graph behind those of `out`; all of them come after `entry`. Returns what to wait for to wait
/// for all of them, or a node of a circle.
fn flatten(
    book: &Book,
    graph: GraphKey,
    out: &mut Vec<Flat>,
    entry: Vec<usize>,
) -> Result<Vec<usize>, NodeKey> {
    let mut exits: BTreeMap<NodeKey, usize> = BTreeMap::new();
    let mut ends = Vec::new();
    for key in book.order(graph)? {
        let Ok(node) = book.node(key) else { continue };
        let mut after: Vec<usize> =
            node.after.iter().filter_map(|(before, _)| exits.get(before)).copied().collect();
        if after.is_empty() {
            after.clone_from(&entry);
        }
        let work = match &node.work {
            Work::Child(child) => {
                let inside = flatten(book, *child, out, after.clone())?;
                if !inside.is_empty() {
                    after = inside;
                }
                None
            }
            _ if !node.enabled => None,
            work => Some(work.clone()),
        };
        out.push(Flat { work, after });
        let index = out.len() - 1;
        exits.insert(key, index);
        if node.before.is_empty() {
            ends.push(index);
        }
    }
    Ok(ends)
}

/// A node of a circle in the graph or a graph inside it.
pub(super) fn circle(book: &Book, graph: GraphKey) -> Option<NodeKey> {
    match book.order(graph) {
        Err(node) => Some(node),
        Ok(nodes) => nodes.into_iter().find_map(|node| match book.node(node).map(|node| &node.work) {
            Ok(Work::Child(child)) => circle(book, *child),
            _ => None,
        }),
    }
}

impl Memory {
    fn of(flat: &[Flat]) -> Self {
        let mut memory = Self::default();
        let mut now: BTreeMap<i32, u64> = BTreeMap::new();
        for work in flat.iter().filter_map(|node| node.work.as_ref()) {
            match work {
                Work::Alloc(made) => {
                    let ordinal = made.device().ordinal;
                    let used = now.entry(ordinal).or_default();
                    *used += made.size();
                    let peak = memory.peak.entry(ordinal).or_default();
                    *peak = (*peak).max(*used);
                    memory.left.push(Arc::clone(made));
                }
                Work::Free(pointer) => match memory.left.iter().position(|made| made.pointer() == *pointer) {
                    Some(index) => {
                        let made = memory.left.swap_remove(index);
                        let used = now.entry(made.device().ordinal).or_default();
                        *used = used.saturating_sub(made.size());
                    }
                    None => memory.frees.push(*pointer),
                },
                _ => {}
            }
        }
        memory
    }
}

/// Marks that launches leave for others to wait for.
static MARKS: Arena<Event> = Arena::new();
static IN_USE: Mutex<VecDeque<(&'static Event, u64)>> = Mutex::new(VecDeque::new());

/// So many are not worth looking whether the oldest is over.
const FEW: usize = 16;

/// A mark for the GPU of that context: each is used for one recording, until that is over.
pub(super) fn mark(context: &'static Context) -> Result<(&'static Event, u64), CudaError> {
    let mut in_use = locked(&IN_USE);
    let over = in_use.front().filter(|(event, ticket)| event.is_over(*ticket, None));
    let again = if in_use.len() >= FEW && over.is_some() { in_use.pop_front() } else { None };
    let event = match again {
        Some((event, _)) => event,
        None => MARKS.make(Event::default, |_| ()).ok_or(CudaError::OUT_OF_MEMORY)?,
    };
    let ticket = event.renew(context);
    in_use.push_back((event, ticket));
    Ok((event, ticket))
}

/// Submits a program to a stream, and to the tracks of its other places. `before` and `end` are the marks of the former
/// launch and of this one.
pub(super) fn launch(
    program: &Program,
    stream: &'static Stream,
    tracks: &[usize],
    before: Option<(&'static Event, u64)>,
    end: (&'static Event, u64),
) -> Result<(), CudaError> {
    let submit = |place: usize, op: Op| match (place, place.checked_sub(1)) {
        (0, _) | (_, None) => stream.submit(op),
        (_, Some(other)) => program.places[other].device.submit(tracks[other], op),
    };
    let context_of = |place: usize| match place {
        0 => stream.context(),
        _ => program.places[place - 1],
    };
    let signal = |place: usize| {
        let (event, ticket) = mark(context_of(place))?;
        submit(place, Op::Record(event, ticket))?;
        Ok::<_, CudaError>((event, ticket))
    };
    if let Some((event, ticket)) = before {
        submit(0, Op::Wait(event, ticket))?;
    }
    if !program.places.is_empty() {
        let (event, ticket) = signal(0)?;
        for place in 1..=program.places.len() {
            submit(place, Op::Wait(event, ticket))?;
        }
    }
    let mut signals: BTreeMap<usize, (&'static Event, u64)> = BTreeMap::new();
    for (index, step) in program.steps.iter().enumerate() {
        for other in &step.waits {
            if let Some(&(event, ticket)) = signals.get(other) {
                submit(step.place, Op::Wait(event, ticket))?;
            }
        }
        match &step.action {
            Action::Kernels(kernels) => submit(step.place, Op::Kernels(Arc::clone(kernels)))?,
            Action::Memory(op) => {
                let (op, under_way) = (op.clone(), under_way());
                let work = move || {
                    run(&op);
                    drop(under_way);
                };
                submit(step.place, Op::Host(Box::new(work)))?;
            }
            Action::Call(call) => {
                let call = *call;
                submit(step.place, Op::Call(Box::new(move || call.run())))?;
            }
            Action::Record(event) => submit(step.place, Op::Record(event, 0))?,
            Action::Wait(event) => submit(step.place, Op::Wait(event, event.ticket()))?,
        }
        if step.signals {
            signals.insert(index, signal(step.place)?);
        }
    }
    for place in 1..=program.places.len() {
        let (event, ticket) = signal(place)?;
        submit(0, Op::Wait(event, ticket))?;
    }
    submit(0, Op::Record(end.0, end.1))
}

/// Memory may have been freed since the graph was made.
fn run(op: &MemoryOp) {
    if op.validate().is_ok() {
        op.run();
    }
}

/// A track on another GPU for the nodes that are there.
pub(super) fn open_track(context: &'static Context) -> Result<usize, CudaError> {
    if !context.is_alive() {
        return Err(CudaError::CONTEXT_IS_DESTROYED);
    }
    Ok(context.device.engine().open_track(context.group, Kind::Alone))
}
