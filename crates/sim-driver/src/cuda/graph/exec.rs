//! Executable graphs: a copy of a graph that can be launched again and again.

use super::super::device::Device;
use super::super::event::Event;
use super::super::session;
use super::super::stream::Stream;
use super::book::{Book, new_handle};
use super::memory;
use super::program::{self, Program};
use super::work::Work;
use super::*;
use std::collections::BTreeMap;

static EXECS: Arena<u64> = Arena::new();

const BAD: CudaError = CudaError::INVALID_VALUE;

/// An executable graph.
pub(super) struct Exec {
    /// Its own copy.
    pub(super) graph: GraphKey,
    /// The graph it was made from, while that lives: its handle, and its number.
    source: (GraphKey, u64),
    /// Its own nodes, by the number of the node each was made from.
    twins: BTreeMap<u64, NodeKey>,
    pub(super) flags: u64,
    /// What a launch does, on the GPU of that number; nothing while a node has changed since.
    program: Option<(i32, Arc<Program>)>,
    /// Where the last launch ends.
    last: Option<(&'static Event, u64)>,
    /// Taken while a launch is submitted: launches of one graph come one after the other.
    turn: Arc<Mutex<()>>,
    /// Tracks on other GPUs, by their number.
    tracks: BTreeMap<i32, (&'static Device, usize)>,
    /// Memory it has of each device.
    mapped: Vec<(&'static Device, u64)>,
}

/// Why a graph cannot be made executable.
pub(super) struct Refused {
    pub(super) error: CudaError,
    pub(super) node: Option<NodeKey>,
    pub(super) result: CUgraphInstantiateResult,
}

impl From<CudaError> for Refused {
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

/// Makes an executable graph; returns its handle.
pub(super) fn instantiate(book: &mut Book, graph: GraphKey, flags: u64) -> Result<usize, Refused> {
    let source = book.graph(graph)?;
    let (id, execs) = (source.id, source.execs);
    if flags & !KNOWN_FLAGS != 0 || flags & DEVICE_LAUNCH != 0 && flags & AUTO_FREE != 0 {
        return Err(BAD.into());
    }
    if let Some(node) = program::circle(book, graph) {
        let result = CUDA_GRAPH_INSTANTIATE_INVALID_STRUCTURE;
        return Err(Refused { error: BAD, node: Some(node), result });
    }
    if execs > 0 && book.has_memory(graph) {
        return Err(CudaError::NOT_SUPPORTED.into());
    }
    if flags & DEVICE_LAUNCH != 0 {
        check_for_device(book, graph)?;
    }
    let handle = new_handle(&EXECS)?;
    let copy = match book.clone_graph(graph, true) {
        Ok(copy) => copy,
        Err(error) => {
            EXECS.drop(handle as *mut u8);
            return Err(error.into());
        }
    };
    let mut twins = BTreeMap::new();
    pair(book, copy, &mut twins);
    let exec = Exec {
        graph: copy,
        source: (graph, id),
        twins,
        flags,
        program: None,
        last: None,
        turn: Arc::default(),
        tracks: BTreeMap::new(),
        mapped: Vec::new(),
    };
    book.execs.insert(handle, exec);
    if let Some(source) = book.graphs.get_mut(&graph) {
        source.execs += 1;
    }
    Ok(handle)
}

fn pair(book: &Book, graph: GraphKey, twins: &mut BTreeMap<u64, NodeKey>) {
    let Ok(graph) = book.graph(graph) else { return };
    for &key in &graph.nodes {
        let Ok(node) = book.node(key) else { continue };
        twins.insert(node.origin, key);
        if let Work::Child(child) = node.work {
            pair(book, child, twins);
        }
    }
}

/// Kernels can launch only what the device can do alone, and in one context.
fn check_for_device(book: &Book, graph: GraphKey) -> Result<(), Refused> {
    let nodes = &book.graph(graph)?.nodes;
    if nodes.is_empty() {
        return Err(BAD.into());
    }
    let mut contexts: Vec<u64> = Vec::new();
    for &key in nodes {
        let work = &book.node(key)?.work;
        let refused = |result| Refused { error: BAD, node: Some(key), result };
        match work {
            Work::Kernel(_) | Work::Copy(..) | Work::Fill(..) => {}
            Work::Child(child) => check_for_device(book, *child)?,
            _ => return Err(refused(CUDA_GRAPH_INSTANTIATE_NODE_OPERATION_NOT_SUPPORTED)),
        }
        contexts.extend(work.context().map(|context| context.id));
        if contexts.iter().any(|&id| Some(&id) != contexts.first()) {
            return Err(refused(CUDA_GRAPH_INSTANTIATE_MULTIPLE_CTXS_NOT_SUPPORTED));
        }
    }
    Ok(())
}

/// Ends it. What runs of it goes on.
pub(super) fn destroy(handle: usize) -> Result<(), CudaError> {
    let mut book = book();
    let exec = book.execs.remove(&handle).ok_or(BAD)?;
    EXECS.drop(handle as *mut u8);
    if let Some(source) = book.graphs.get_mut(&exec.source.0).filter(|graph| graph.id == exec.source.1) {
        source.execs = source.execs.saturating_sub(1);
    }
    let mut outliving: BTreeMap<i32, u64> = BTreeMap::new();
    for left in book.allocations(exec.graph) {
        *outliving.entry(left.device().ordinal).or_default() += left.outlive();
    }
    for (device, bytes) in exec.mapped {
        let kept = outliving.get(&device.ordinal).copied().unwrap_or(0);
        memory::unmap(device, bytes.saturating_sub(kept));
    }
    book.destroy(exec.graph);
    for (device, track) in exec.tracks.into_values() {
        device.engine().close_track(track);
    }
    objects::finish(book, exec.last);
    Ok(())
}

impl Book {
    pub(super) fn exec(&self, handle: usize) -> Result<&Exec, CudaError> {
        self.execs.get(&handle).ok_or(BAD)
    }

    fn exec_mut(&mut self, handle: usize) -> Result<&mut Exec, CudaError> {
        self.execs.get_mut(&handle).ok_or(BAD)
    }

    /// The executable graph's own node for one of the graph it was made from.
    pub(super) fn twin(&self, exec: usize, node: NodeKey) -> Result<NodeKey, CudaError> {
        self.exec(exec)?.twins.get(&self.node(node)?.id).copied().ok_or(BAD)
    }

    /// Changes what a node of an executable graph does.
    pub(super) fn set_in_exec(&mut self, exec: usize, node: NodeKey, work: Work) -> Result<(), CudaError> {
        let own = self.twin(exec, node)?;
        let now = &self.node(own)?.work;
        if now.kind() != work.kind() || !can_become(now, &work) {
            return Err(BAD);
        }
        self.replace(own, work);
        self.exec_mut(exec)?.program = None;
        Ok(())
    }

    /// Changes what a node does, keeping what its parameters do not say.
    pub(super) fn replace(&mut self, key: NodeKey, mut work: Work) {
        let Some(node) = self.nodes.get_mut(&key) else { return };
        if let (Work::Kernel(old), Work::Kernel(new)) = (&node.work, &mut work) {
            new.attributes.clone_from(&old.attributes);
        }
        let before = std::mem::replace(&mut node.work, work);
        self.drop_work(&before);
    }

    /// Gives the child graph of an executable graph's node other parameters.
    pub(super) fn set_child(&mut self, exec: usize, node: NodeKey, with: GraphKey) -> Result<(), CudaError> {
        let own = self.twin(exec, node)?;
        let Work::Child(child) = self.node(own)?.work else { return Err(BAD) };
        self.graph(with)?;
        compare(self, child, with).map_err(|_| BAD)?;
        apply(self, child, with);
        self.exec_mut(exec)?.program = None;
        Ok(())
    }

    pub(super) fn enable(&mut self, exec: usize, node: NodeKey, enabled: bool) -> Result<(), CudaError> {
        let own = self.twin(exec, node)?;
        if !can_be_disabled(&self.node(own)?.work) {
            return Err(BAD);
        }
        if let Some(node) = self.nodes.get_mut(&own) {
            node.enabled = enabled;
        }
        self.exec_mut(exec)?.program = None;
        Ok(())
    }

    pub(super) fn is_enabled(&self, exec: usize, node: NodeKey) -> Result<bool, CudaError> {
        let own = self.node(self.twin(exec, node)?)?;
        if can_be_disabled(&own.work) { Ok(own.enabled) } else { Err(BAD) }
    }

    /// Makes an executable graph do what another graph of the same form does.
    pub(super) fn update(&mut self, exec: usize, with: GraphKey) -> Result<(), Differs> {
        let own = self.exec(exec).map_err(|_| Differs::UNKNOWN)?.graph;
        compare(self, own, with)?;
        apply(self, own, with);
        if let Ok(exec) = self.exec_mut(exec) {
            exec.program = None;
        }
        Ok(())
    }

    /// What a launch of it does on that GPU.
    fn program(&mut self, exec: usize, ordinal: i32) -> Result<Arc<Program>, CudaError> {
        let own = self.exec(exec)?;
        if let Some((on, program)) = &own.program
            && *on == ordinal
        {
            return Ok(Arc::clone(program));
        }
        let program = Arc::new(Program::new(self, own.graph, ordinal)?);
        self.exec_mut(exec)?.program = Some((ordinal, Arc::clone(&program)));
        Ok(program)
    }
}

fn can_be_disabled(work: &Work) -> bool {
    matches!(work, Work::Kernel(_) | Work::Copy(..) | Work::Fill(..))
}

/// Whether a node of an executable graph can be made to do this: memory and functions stay where they were.
fn can_become(now: &Work, new: &Work) -> bool {
    match (now, new) {
        (Work::Kernel(now), Work::Kernel(new)) => now.context.id == new.context.id,
        (Work::Copy(now, _, there), Work::Copy(new, _, here)) => {
            there.id == here.id && now.to_place() == new.to_place() && now.from_place() == new.from_place()
        }
        (Work::Fill(_, _, there), Work::Fill(_, _, here)) => there.id == here.id,
        (Work::Alloc(now), Work::Alloc(new)) => now.pointer() == new.pointer(),
        (Work::Free(now), Work::Free(new)) => now == new,
        _ => true,
    }
}

/// How two graphs differ.
pub(super) struct Differs {
    pub(super) result: CUgraphExecUpdateResult,
    pub(super) node: Option<NodeKey>,
    pub(super) from: Option<NodeKey>,
}

impl Differs {
    const UNKNOWN: Self = Self { result: CU_GRAPH_EXEC_UPDATE_ERROR, node: None, from: None };
}

/// Nodes belong together in the order they were added.
fn compare(book: &Book, own: GraphKey, with: GraphKey) -> Result<(), Differs> {
    let (own, with) = (book.graph(own), book.graph(with));
    let (Ok(own), Ok(with)) = (own, with) else { return Err(Differs::UNKNOWN) };
    let differs = |result, node| Differs { result, node: Some(node), from: None };
    if own.nodes.len() != with.nodes.len() {
        let extra = with.nodes.get(own.nodes.len()).copied();
        let result = CU_GRAPH_EXEC_UPDATE_ERROR_TOPOLOGY_CHANGED;
        return Err(Differs { result, node: extra, from: None });
    }
    let pairs: BTreeMap<NodeKey, NodeKey> =
        with.nodes.iter().copied().zip(own.nodes.iter().copied()).collect();
    for (&theirs, &ours) in with.nodes.iter().zip(&own.nodes) {
        let (Ok(new), Ok(now)) = (book.node(theirs), book.node(ours)) else { return Err(Differs::UNKNOWN) };
        if new.work.kind() != now.work.kind() {
            return Err(differs(CU_GRAPH_EXEC_UPDATE_ERROR_NODE_TYPE_CHANGED, theirs));
        }
        let strange = new.after.iter().find(|(before, port)| {
            !pairs.get(before).is_some_and(|before| now.after.contains(&(*before, *port)))
        });
        if strange.is_some() || new.after.len() != now.after.len() {
            let from = strange.map(|&(before, _)| before);
            let result = CU_GRAPH_EXEC_UPDATE_ERROR_TOPOLOGY_CHANGED;
            return Err(Differs { result, node: Some(theirs), from });
        }
        if let (Work::Child(new), Work::Child(now)) = (&new.work, &now.work) {
            compare(book, *now, *new)?;
        }
        if !can_become(&now.work, &new.work) {
            let result = match now.work {
                Work::Kernel(_) => CU_GRAPH_EXEC_UPDATE_ERROR_UNSUPPORTED_FUNCTION_CHANGE,
                Work::Alloc(_) | Work::Free(_) => CU_GRAPH_EXEC_UPDATE_ERROR_NOT_SUPPORTED,
                _ => CU_GRAPH_EXEC_UPDATE_ERROR_PARAMETERS_CHANGED,
            };
            return Err(differs(result, theirs));
        }
    }
    Ok(())
}

fn apply(book: &mut Book, own: GraphKey, with: GraphKey) {
    let nodes = |book: &Book, key| book.graph(key).map(|graph| graph.nodes.clone()).unwrap_or_default();
    let (ours, theirs) = (nodes(book, own), nodes(book, with));
    for (own, with) in ours.into_iter().zip(theirs) {
        let Ok(work) = book.node(with).map(|node| node.work.clone()) else { continue };
        match (work, book.node(own).map(|node| node.work.clone())) {
            (Work::Child(with), Ok(Work::Child(own))) => apply(book, own, with),
            (work, _) => {
                if let Some(node) = book.nodes.get_mut(&own) {
                    node.work = work;
                }
            }
        }
    }
}

/// Gives an executable graph its memory, if it has not got it.
fn provide(book: &mut Book, handle: usize, program: &Program) -> Result<(), CudaError> {
    let exec = book.exec_mut(handle)?;
    for (&ordinal, &bytes) in &program.memory.peak {
        if bytes == 0 || exec.mapped.iter().any(|(device, _)| device.ordinal == ordinal) {
            continue;
        }
        let device = session::device(ordinal)?;
        memory::map(device, bytes)?;
        exec.mapped.push((device, bytes));
    }
    Ok(())
}

/// Prepares launches on a stream.
pub(super) fn upload(handle: usize, stream: &'static Stream) -> Result<(), CudaError> {
    let mut book = book();
    let program = book.program(handle, stream.context().device.ordinal)?;
    provide(&mut book, handle, &program)
}

/// Gives up the memory of executable graphs that do not run, and then what no graph uses.
pub(super) fn trim(device: &'static Device) {
    let mut book = book();
    let idle = |exec: &Exec| {
        exec.last.is_none_or(|(event, ticket)| event.is_over(ticket, None))
            && !book.allocations(exec.graph).iter().any(|allocation| allocation.is_live())
    };
    let idle: Vec<usize> =
        book.execs.iter().filter(|(_, exec)| idle(exec)).map(|(&handle, _)| handle).collect();
    for handle in idle {
        let Some(exec) = book.execs.get_mut(&handle) else { continue };
        exec.mapped.retain(|&(on, bytes)| {
            let here = on.ordinal == device.ordinal;
            if here {
                memory::unmap(device, bytes);
            }
            !here
        });
    }
    drop(book);
    memory::trim(device);
}

/// What a launch finds in the book.
struct Launch {
    program: Arc<Program>,
    tracks: Vec<usize>,
    before: Option<(&'static Event, u64)>,
    end: (&'static Event, u64),
}

/// Launches an executable graph in a stream.
pub(super) fn launch(handle: usize, stream: &'static Stream) -> Result<(), CudaError> {
    let turn = Arc::clone(&book().exec(handle)?.turn);
    let _turn = locked(&turn);
    let Launch { program, tracks, before, end } = prepare(handle, stream)?;
    let launched = program::launch(&program, stream, &tracks, before, end);
    if launched.is_err()
        && let Ok(exec) = book().exec_mut(handle)
    {
        // Its mark may never come.
        exec.last = None;
    }
    launched
}

fn prepare(handle: usize, stream: &'static Stream) -> Result<Launch, CudaError> {
    let mut book = book();
    let program = book.program(handle, stream.context().device.ordinal)?;
    for context in &program.places {
        if !context.is_alive() {
            return Err(CudaError::CONTEXT_IS_DESTROYED);
        }
    }
    let auto_free = book.exec(handle)?.flags & AUTO_FREE != 0;
    let memory = &program.memory;
    if !auto_free && memory.left.iter().any(|left| left.is_live()) {
        return Err(BAD);
    }
    let freed: Vec<_> = memory.frees.iter().map(|&pointer| memory::find(pointer)).collect();
    if !freed.iter().all(|freed| freed.as_ref().is_some_and(|freed| freed.is_live())) {
        return Err(BAD);
    }
    provide(&mut book, handle, &program)?;
    for freed in freed.iter().flatten().chain(&memory.left) {
        freed.free();
    }
    memory.left.iter().for_each(|left| left.set_live());
    let end = program::mark(stream.context())?;
    let exec = book.exec_mut(handle)?;
    let mut tracks = Vec::with_capacity(program.places.len());
    for context in &program.places {
        let track = match exec.tracks.get(&context.device.ordinal) {
            Some(&(_, track)) => track,
            None => {
                let track = program::open_track(context)?;
                exec.tracks.insert(context.device.ordinal, (context.device, track));
                track
            }
        };
        tracks.push(track);
    }
    Ok(Launch { program, tracks, before: exec.last.replace(end), end })
}
