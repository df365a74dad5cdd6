//! Stream capture: operations become nodes of a graph instead of being done.

mod calls;

pub(super) use calls::{Info, info, update};

use super::context::Context;
use super::event::Event;
use super::graph::{self, After, Allocation, Call, GraphKey, Work};
use super::launch::Shape;
use super::memory::MemoryOp;
use super::module::Function;
use super::session::unique;
use super::stream::Stream;
use super::*;
use std::cell::Cell;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, MutexGuard};
use std::thread::ThreadId;

/// A capture as one stream takes part in it.
pub(super) struct Capture(Part);

enum Part {
    /// The stream is captured.
    Member(Arc<Sequence>, &'static Stream),
    /// The context's default stream while another that it is ordered with is captured: it can do nothing.
    Implicit(&'static Context),
}

/// All of a capture: the streams that take part, and the graph that comes of it.
pub(super) struct Sequence {
    id: u64,
    graph: GraphKey,
    /// Which graph that is: the program may destroy it meanwhile, and another one get its handle.
    graph_id: u64,
    /// Whether the graph was the program's before.
    given: bool,
    mode: CUstreamCaptureMode,
    thread: ThreadId,
    origin: &'static Stream,
    inner: Mutex<Inner>,
}

#[derive(Clone, Copy, PartialEq, Eq)]
enum State {
    Active,
    Invalid,
    Ended,
}

struct Inner {
    state: State,
    ends: Vec<End>,
}

/// Where a stream has come to.
struct End {
    stream: &'static Stream,
    /// What its next operation comes after.
    after: Vec<After>,
    /// The same as the program last asked for it: it keeps the addresses.
    answer: Vec<usize>,
    data: Vec<CUgraphEdgeData>,
}

/// What a captured recording of an event stands for.
#[derive(Clone)]
pub(super) struct Captured {
    sequence: Arc<Sequence>,
    after: Vec<After>,
}

static SEQUENCES: Mutex<Vec<Arc<Sequence>>> = Mutex::new(Vec::new());
/// How many there are.
static COUNT: AtomicUsize = AtomicUsize::new(0);

thread_local! {
    /// What other captures forbid this thread.
    static MODE: Cell<CUstreamCaptureMode> = const { Cell::new(CU_STREAM_CAPTURE_MODE_GLOBAL) };
}

fn locked<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(|poisoned| poisoned.into_inner())
}

/// Captures that have not ended.
fn sequences() -> Vec<Arc<Sequence>> {
    if COUNT.load(Ordering::Acquire) == 0 { Vec::new() } else { locked(&SEQUENCES).clone() }
}

impl Sequence {
    fn inner(&self) -> MutexGuard<'_, Inner> {
        locked(&self.inner)
    }

    fn invalidate(&self) {
        let mut inner = self.inner();
        if inner.state == State::Active {
            inner.state = State::Invalid;
        }
    }

    /// Its graph, while there is one.
    fn graph(&self) -> Result<GraphKey, CudaError> {
        match graph::id(self.graph) {
            Ok(id) if id == self.graph_id => Ok(self.graph),
            _ => {
                self.invalidate();
                Err(CudaError::STREAM_CAPTURE_INVALIDATED)
            }
        }
    }

    /// Throws away what it made.
    fn discard(&self) {
        if !self.given
            && let Ok(graph) = self.graph()
        {
            graph::discard(graph);
        }
    }

    fn check(&self) -> Result<(), CudaError> {
        match self.inner().state {
            State::Active => Ok(()),
            State::Invalid => Err(CudaError::STREAM_CAPTURE_INVALIDATED),
            State::Ended => Err(CudaError::CAPTURED_EVENT),
        }
    }

    /// Whether it has a stream of the context; a blocking one, if that is asked for.
    fn touches(&self, context: &'static Context, blocking: bool) -> bool {
        self.inner()
            .ends
            .iter()
            .any(|end| std::ptr::eq(end.stream.context(), context) && (!blocking || end.stream.is_blocking()))
    }

    /// A stream takes part from now on.
    fn join(self: &Arc<Self>, stream: &'static Stream, after: Vec<After>) {
        self.inner().ends.push(End { stream, after, answer: Vec::new(), data: Vec::new() });
        stream.set_capture(Some(Arc::new(Capture(Part::Member(Arc::clone(self), stream)))));
        mind_default(stream.context());
    }

    /// Ends it: its streams do what they are told again.
    fn end(self: &Arc<Self>) -> (State, Vec<End>) {
        let (state, ends) = {
            let mut inner = self.inner();
            (std::mem::replace(&mut inner.state, State::Ended), std::mem::take(&mut inner.ends))
        };
        {
            let mut sequences = locked(&SEQUENCES);
            sequences.retain(|other| !Arc::ptr_eq(other, self));
            COUNT.store(sequences.len(), Ordering::Release);
        }
        for end in &ends {
            end.stream.set_capture(None);
        }
        for end in &ends {
            mind_default(end.stream.context());
        }
        (state, ends)
    }
}

impl End {
    fn extend(&mut self, more: &[After]) {
        for after in more {
            if !self.after.iter().any(|(node, _)| *node == after.0) {
                self.after.push(*after);
            }
        }
    }
}

/// The default stream of a context can be used unless a stream is captured that it is ordered with.
fn mind_default(context: &'static Context) {
    let Ok(default) = context.legacy() else { return };
    let barred = sequences().iter().any(|sequence| sequence.touches(context, true));
    default.set_capture(barred.then(|| Arc::new(Capture(Part::Implicit(context)))));
}

impl Capture {
    pub(super) fn status(&self) -> Result<CUstreamCaptureStatus, CudaError> {
        match &self.0 {
            Part::Implicit(_) => Err(CudaError::STREAM_CAPTURE_IMPLICIT),
            Part::Member(sequence, _) => Ok(match sequence.inner().state {
                State::Active => CU_STREAM_CAPTURE_STATUS_ACTIVE,
                State::Invalid => CU_STREAM_CAPTURE_STATUS_INVALIDATED,
                State::Ended => CU_STREAM_CAPTURE_STATUS_NONE,
            }),
        }
    }

    /// Something was done that cannot be captured.
    pub(super) fn invalidate(&self) {
        match &self.0 {
            Part::Member(sequence, _) => sequence.invalidate(),
            Part::Implicit(context) => sequences()
                .iter()
                .filter(|sequence| sequence.touches(context, true))
                .for_each(|sequence| sequence.invalidate()),
        }
    }

    /// The same, and what the program is told.
    pub(super) fn refuse(&self) -> CudaError {
        let error = match &self.0 {
            Part::Implicit(_) => CudaError::STREAM_CAPTURE_IMPLICIT,
            Part::Member(sequence, _) => {
                sequence.check().err().unwrap_or(CudaError::STREAM_CAPTURE_UNSUPPORTED)
            }
        };
        self.invalidate();
        error
    }

    /// Its stream goes away.
    pub(super) fn leave(&self) {
        let Part::Member(sequence, stream) = &self.0 else { return };
        if std::ptr::eq(sequence.origin, *stream) {
            sequence.end();
            sequence.discard();
            return;
        }
        sequence.invalidate();
        sequence.inner().ends.retain(|end| !std::ptr::eq(end.stream, *stream));
        stream.set_capture(None);
        mind_default(stream.context());
    }

    /// The stream comes to a new node.
    fn add(&self, work: Work) -> Result<(), CudaError> {
        let Part::Member(sequence, stream) = &self.0 else { return Err(self.refuse()) };
        sequence.check()?;
        let graph = sequence.graph()?;
        let mut inner = sequence.inner();
        let end = inner.ends.iter_mut().find(|end| std::ptr::eq(end.stream, *stream));
        let end = end.ok_or(CudaError::STREAM_CAPTURE_INVALIDATED)?;
        let node = graph::add(graph, &end.after, work)?;
        end.after = vec![(node, graph::Port::default())];
        Ok(())
    }

    pub(super) fn kernel(&self, function: &'static Function, shape: Shape) -> Result<(), CudaError> {
        let Part::Member(_, stream) = &self.0 else { return Err(self.refuse()) };
        self.add(Work::launch(function, shape, stream.context(), false)?)
    }

    pub(super) fn host(&self, function: CUhostFn, user_data: *mut c_void) -> Result<(), CudaError> {
        self.add(Work::Host(Call::new(function, user_data)?))
    }

    pub(super) fn memory(&self, op: MemoryOp) -> Result<(), CudaError> {
        let Part::Member(_, stream) = &self.0 else { return Err(self.refuse()) };
        self.add(Work::memory(op, stream.context()))
    }

    /// A launch of an executable graph: its nodes as a graph inside.
    pub(super) fn graph(&self, exec: usize) -> Result<(), CudaError> {
        let Part::Member(sequence, _) = &self.0 else { return Err(self.refuse()) };
        sequence.check()?;
        match graph::child_of_exec(exec) {
            Ok(child) => self.add(Work::Child(child)).inspect_err(|_| graph::discard(child)),
            Err(error) => {
                self.invalidate();
                Err(error)
            }
        }
    }

    /// An allocation in stream order: an address that the graph's launches have memory behind.
    pub(super) fn allocate(&self, bytes: usize) -> Result<CUdeviceptr, CudaError> {
        let Part::Member(_, stream) = &self.0 else { return Err(self.refuse()) };
        let made = Allocation::on(stream.context().device, bytes)?;
        let pointer = made.pointer();
        self.add(Work::Alloc(made)).map(|()| pointer)
    }

    /// Freeing in stream order.
    pub(super) fn free(&self, pointer: CUdeviceptr) -> Result<(), CudaError> {
        let Part::Member(sequence, _) = &self.0 else { return Err(self.refuse()) };
        if !graph::can_free(sequence.graph()?, pointer) {
            return Err(CudaError::INVALID_VALUE);
        }
        self.add(Work::Free(pointer))
    }

    pub(super) fn record(&self, event: &'static Event, flags: u32) -> Result<(), CudaError> {
        let Part::Member(sequence, stream) = &self.0 else { return Err(self.refuse()) };
        if flags & CU_EVENT_RECORD_EXTERNAL != 0 {
            return self.add(Work::Record(event));
        }
        sequence.check()?;
        let after = {
            let inner = sequence.inner();
            let end = inner.ends.iter().find(|end| std::ptr::eq(end.stream, *stream));
            end.map(|end| end.after.clone()).unwrap_or_default()
        };
        event.set_captured(Captured { sequence: Arc::clone(sequence), after });
        Ok(())
    }
}

/// Begins a capture; into a graph of the program's, behind nodes of it, if one is given.
pub(super) fn begin(
    stream: &'static Stream,
    mode: CUstreamCaptureMode,
    into: Option<(GraphKey, Vec<After>)>,
) -> Result<(), CudaError> {
    if mode > CU_STREAM_CAPTURE_MODE_RELAXED {
        return Err(CudaError::INVALID_VALUE);
    }
    if stream.is_legacy() {
        return Err(CudaError::STREAM_CAPTURE_UNSUPPORTED);
    }
    if stream.capture().is_some() {
        return Err(CudaError::ILLEGAL_STATE);
    }
    let given = into.is_some();
    let (graph, after) = match into {
        Some((graph, after)) => {
            graph::check_after(graph, &after)?;
            (graph, after)
        }
        None => (graph::create()?, Vec::new()),
    };
    let sequence = Arc::new(Sequence {
        id: unique(),
        graph,
        graph_id: graph::id(graph)?,
        given,
        mode,
        thread: std::thread::current().id(),
        origin: stream,
        inner: Mutex::new(Inner { state: State::Active, ends: Vec::new() }),
    });
    {
        let mut sequences = locked(&SEQUENCES);
        sequences.push(Arc::clone(&sequence));
        COUNT.store(sequences.len(), Ordering::Release);
    }
    sequence.join(stream, after);
    Ok(())
}

/// Ends the capture that began on the stream.
pub(super) fn end(stream: &'static Stream) -> Result<CUgraph, CudaError> {
    let capture = stream.capture().ok_or(CudaError::ILLEGAL_STATE)?;
    let Part::Member(sequence, _) = &capture.0 else { return Err(CudaError::STREAM_CAPTURE_IMPLICIT) };
    if !std::ptr::eq(sequence.origin, stream) {
        sequence.invalidate();
        return Err(CudaError::STREAM_CAPTURE_UNMATCHED);
    }
    if sequence.mode != CU_STREAM_CAPTURE_MODE_RELAXED && sequence.thread != std::thread::current().id() {
        return Err(CudaError::STREAM_CAPTURE_WRONG_THREAD);
    }
    let made = sequence.graph();
    let (state, ends) = sequence.end();
    let (own, others): (Vec<End>, Vec<End>) =
        ends.into_iter().partition(|end| std::ptr::eq(end.stream, stream));
    let last: Vec<After> = own.into_iter().flat_map(|end| end.after).collect();
    let open = others.iter().flat_map(|end| end.after.iter().map(|&(node, _)| node));
    let outcome = match state {
        State::Invalid | State::Ended => Err(CudaError::STREAM_CAPTURE_INVALIDATED),
        State::Active if !graph::is_joined(&last, open) => Err(CudaError::STREAM_CAPTURE_UNJOINED),
        State::Active => made.map(GraphKey::handle),
    };
    if outcome.is_err() {
        sequence.discard();
    }
    outcome
}

/// A wait of a captured stream, or for an event of one. False if it is an ordinary one.
pub(super) fn wait(stream: &'static Stream, event: &'static Event, flags: u32) -> Result<bool, CudaError> {
    let external = flags & CU_EVENT_WAIT_EXTERNAL != 0;
    let (capture, captured) = (stream.capture(), event.captured());
    let Some(capture) = capture else {
        return match captured {
            _ if external => Err(CudaError::INVALID_VALUE),
            None => Ok(false),
            Some(captured) => fork(stream, &captured).map(|()| true),
        };
    };
    if external {
        return capture.add(Work::Wait(event)).map(|()| true);
    }
    let Part::Member(sequence, _) = &capture.0 else {
        if let Some(captured) = captured {
            captured.sequence.invalidate();
        }
        return Err(capture.refuse());
    };
    sequence.check()?;
    let Some(captured) = captured.filter(|captured| captured.sequence.inner().state != State::Ended) else {
        sequence.invalidate();
        return Err(CudaError::STREAM_CAPTURE_ISOLATION);
    };
    if !Arc::ptr_eq(sequence, &captured.sequence) {
        sequence.invalidate();
        captured.sequence.invalidate();
        return Err(CudaError::STREAM_CAPTURE_MERGE);
    }
    let mut inner = sequence.inner();
    if let Some(end) = inner.ends.iter_mut().find(|end| std::ptr::eq(end.stream, stream)) {
        end.extend(&captured.after);
    }
    Ok(true)
}

/// A stream that waits for a captured event is captured from there on.
fn fork(stream: &'static Stream, captured: &Captured) -> Result<(), CudaError> {
    captured.sequence.check()?;
    if stream.is_legacy() {
        captured.sequence.invalidate();
        return Err(CudaError::STREAM_CAPTURE_IMPLICIT);
    }
    captured.sequence.join(stream, captured.after.clone());
    Ok(())
}

impl Event {
    /// Refuses what cannot be asked of an event whose last recording is a part of a graph.
    pub(super) fn outside_capture(&self) -> Result<(), CudaError> {
        let Some(captured) = self.captured() else { return Ok(()) };
        captured.sequence.invalidate();
        Err(CudaError::CAPTURED_EVENT)
    }
}

/// Refuses to wait for a context that has a captured stream.
pub(super) fn outside(context: &'static Context) -> Result<(), CudaError> {
    let mut result = Ok(());
    for sequence in sequences().iter().filter(|sequence| sequence.touches(context, false)) {
        sequence.invalidate();
        result = Err(CudaError::STREAM_CAPTURE_UNSUPPORTED);
    }
    result.and_then(|()| safe())
}

/// Refuses a call that might disturb a capture, where captures and the calling thread's mode say so.
#[inline]
pub(super) fn safe() -> Result<(), CudaError> {
    if COUNT.load(Ordering::Relaxed) == 0 { Ok(()) } else { safe_beside_captures() }
}

#[cold]
fn safe_beside_captures() -> Result<(), CudaError> {
    let mode = MODE.get();
    let mut result = Ok(());
    for sequence in sequences() {
        let own = sequence.thread == std::thread::current().id();
        let forbids = match mode {
            CU_STREAM_CAPTURE_MODE_RELAXED => false,
            _ if own => sequence.mode != CU_STREAM_CAPTURE_MODE_RELAXED,
            CU_STREAM_CAPTURE_MODE_GLOBAL => sequence.mode == CU_STREAM_CAPTURE_MODE_GLOBAL,
            _ => false,
        };
        if forbids {
            sequence.invalidate();
            result = Err(CudaError::STREAM_CAPTURE_UNSUPPORTED);
        }
    }
    result
}

/// Sets what captures forbid the calling thread; returns what they did before.
pub(super) fn exchange_mode(mode: CUstreamCaptureMode) -> Result<CUstreamCaptureMode, CudaError> {
    if mode > CU_STREAM_CAPTURE_MODE_RELAXED {
        return Err(CudaError::INVALID_VALUE);
    }
    Ok(MODE.replace(mode))
}
