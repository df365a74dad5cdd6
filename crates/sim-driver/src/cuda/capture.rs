//! Stream capture: operations become nodes of a graph instead of being executed.

mod capture_info;

pub(super) use capture_info::{CaptureInfoOutputs, update_dependencies, write_capture_info};

use super::context::Context;
use super::event::Event;
use super::graph::{self, Dependency, GraphAllocation, GraphKey, HostCallback, NodeOperation};
use super::launch::LaunchShape;
use super::memory::MemoryOp;
use super::module::Function;
use super::session::unique_id;
use super::stream::Stream;
use super::*;
use std::cell::Cell;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, MutexGuard};
use std::thread::ThreadId;

/// The participation of one stream in a capture.
pub(super) struct Capture(CaptureRole);

/// How a stream takes part in a capture.
enum CaptureRole {
    /// The stream is being captured.
    Member(Arc<CaptureSequence>, &'static Stream),
    /// The legacy default stream of a context in which a blocking stream is being captured. Any use of it is an
    /// error.
    Implicit(&'static Context),
}

/// One capture: the participating streams and the graph that it builds.
pub(super) struct CaptureSequence {
    id: u64,
    graph: GraphKey,
    /// Identity of the graph: the program may destroy it during the capture, and a new graph may get the same handle.
    graph_id: u64,
    /// Whether the program supplied the graph (`cuStreamBeginCaptureToGraph`).
    is_user_graph: bool,
    mode: CUstreamCaptureMode,
    thread: ThreadId,
    origin: &'static Stream,
    inner: Mutex<SequenceState>,
}

/// Whether a capture can still record operations.
#[derive(Clone, Copy, PartialEq, Eq)]
enum CaptureState {
    Active,
    Invalid,
    Ended,
}

/// The part of a capture that changes.
struct SequenceState {
    state: CaptureState,
    ends: Vec<BranchEnd>,
    /// Last nodes of branches whose streams were destroyed during the capture. They must be joined like any other branch.
    detached: Vec<Dependency>,
}

/// The position that a captured stream has reached in the graph.
struct BranchEnd {
    stream: &'static Stream,
    /// Dependencies of the stream's next operation.
    dependencies: Vec<Dependency>,
    /// The nodes last reported to the program, which keeps pointers to this buffer.
    reported_nodes: Vec<usize>,
    reported_data: Vec<CUgraphEdgeData>,
}

/// The nodes that a captured recording of an event refers to.
#[derive(Clone)]
pub(super) struct CapturedEvent {
    sequence: Arc<CaptureSequence>,
    dependencies: Vec<Dependency>,
}

static ACTIVE_CAPTURES: Mutex<Vec<Arc<CaptureSequence>>> = Mutex::new(Vec::new());
/// Number of active captures, readable without the lock.
static ACTIVE_CAPTURE_COUNT: AtomicUsize = AtomicUsize::new(0);

thread_local! {
    /// Which captures of other threads restrict this thread.
    static THREAD_CAPTURE_MODE: Cell<CUstreamCaptureMode> = const { Cell::new(CU_STREAM_CAPTURE_MODE_GLOBAL) };
}

fn locked<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(|poisoned| poisoned.into_inner())
}

/// Returns the captures that have not ended.
fn sequences() -> Vec<Arc<CaptureSequence>> {
    if ACTIVE_CAPTURE_COUNT.load(Ordering::Acquire) == 0 {
        Vec::new()
    } else {
        locked(&ACTIVE_CAPTURES).clone()
    }
}

impl CaptureSequence {
    fn inner(&self) -> MutexGuard<'_, SequenceState> {
        locked(&self.inner)
    }

    fn invalidate(&self) {
        let mut inner = self.inner();
        if inner.state == CaptureState::Active {
            inner.state = CaptureState::Invalid;
        }
    }

    /// Returns the capture's graph; invalidates the capture if the program has destroyed it.
    fn graph(&self) -> Result<GraphKey, CudaError> {
        match graph::id(self.graph) {
            Ok(id) if id == self.graph_id => Ok(self.graph),
            _ => {
                self.invalidate();
                Err(CudaError::STREAM_CAPTURE_INVALIDATED)
            }
        }
    }

    /// Destroys the graph unless the program supplied it.
    fn discard(&self) {
        if !self.is_user_graph
            && let Ok(graph) = self.graph()
        {
            graph::discard(graph);
        }
    }

    fn check(&self) -> Result<(), CudaError> {
        match self.inner().state {
            CaptureState::Active => Ok(()),
            CaptureState::Invalid => Err(CudaError::STREAM_CAPTURE_INVALIDATED),
            CaptureState::Ended => Err(CudaError::CAPTURED_EVENT),
        }
    }

    /// Returns whether a stream of the context takes part; with `blocking`, only blocking streams count.
    fn has_stream_of(&self, context: &'static Context, blocking: bool) -> bool {
        self.inner()
            .ends
            .iter()
            .any(|end| std::ptr::eq(end.stream.context(), context) && (!blocking || end.stream.is_blocking()))
    }

    /// Adds a stream to the capture.
    fn add_stream(self: &Arc<Self>, stream: &'static Stream, dependencies: Vec<Dependency>) {
        self.inner().ends.push(BranchEnd {
            stream,
            dependencies,
            reported_nodes: Vec::new(),
            reported_data: Vec::new(),
        });
        stream.set_capture(Some(Arc::new(Capture(CaptureRole::Member(Arc::clone(self), stream)))));
        update_default_stream(stream.context());
    }

    /// Ends the capture and releases its streams. Returns what it had recorded.
    fn end(self: &Arc<Self>) -> SequenceState {
        let ended = {
            let ended = SequenceState { state: CaptureState::Ended, ends: Vec::new(), detached: Vec::new() };
            std::mem::replace(&mut *self.inner(), ended)
        };
        {
            let mut sequences = locked(&ACTIVE_CAPTURES);
            sequences.retain(|other| !Arc::ptr_eq(other, self));
            ACTIVE_CAPTURE_COUNT.store(sequences.len(), Ordering::Release);
        }
        for end in &ended.ends {
            end.stream.set_capture(None);
        }
        for end in &ended.ends {
            update_default_stream(end.stream.context());
        }
        ended
    }
}

impl BranchEnd {
    fn extend(&mut self, more: &[Dependency]) {
        for dependency in more {
            if !self.dependencies.iter().any(|(node, _)| *node == dependency.0) {
                self.dependencies.push(*dependency);
            }
        }
    }
}

/// Bars the legacy default stream of a context while a blocking stream of the context is being captured.
fn update_default_stream(context: &'static Context) {
    let Ok(default) = context.legacy() else { return };
    let barred = sequences().iter().any(|sequence| sequence.has_stream_of(context, true));
    default.set_capture(barred.then(|| Arc::new(Capture(CaptureRole::Implicit(context)))));
}

impl Capture {
    pub(super) fn status(&self) -> Result<CUstreamCaptureStatus, CudaError> {
        match &self.0 {
            CaptureRole::Implicit(_) => Err(CudaError::STREAM_CAPTURE_IMPLICIT),
            CaptureRole::Member(sequence, _) => Ok(match sequence.inner().state {
                CaptureState::Active => CU_STREAM_CAPTURE_STATUS_ACTIVE,
                CaptureState::Invalid => CU_STREAM_CAPTURE_STATUS_INVALIDATED,
                CaptureState::Ended => CU_STREAM_CAPTURE_STATUS_NONE,
            }),
        }
    }

    /// Invalidates the capture after an operation that cannot be captured.
    pub(super) fn invalidate(&self) {
        match &self.0 {
            CaptureRole::Member(sequence, _) => sequence.invalidate(),
            CaptureRole::Implicit(context) => sequences()
                .iter()
                .filter(|sequence| sequence.has_stream_of(context, true))
                .for_each(|sequence| sequence.invalidate()),
        }
    }

    /// Invalidates the capture and returns the error to report.
    pub(super) fn reject(&self) -> CudaError {
        let error = match &self.0 {
            CaptureRole::Implicit(_) => CudaError::STREAM_CAPTURE_IMPLICIT,
            CaptureRole::Member(sequence, _) => {
                sequence.check().err().unwrap_or(CudaError::STREAM_CAPTURE_UNSUPPORTED)
            }
        };
        self.invalidate();
        error
    }

    /// Removes the stream from its capture because it is being destroyed. The capture ends with its origin; it goes on
    /// without a forked stream, whose branch must still be joined.
    pub(super) fn remove_stream(&self) {
        let CaptureRole::Member(sequence, stream) = &self.0 else { return };
        if std::ptr::eq(sequence.origin, *stream) {
            sequence.end();
            sequence.discard();
            return;
        }
        {
            let mut inner = sequence.inner();
            let is_own = |end: &BranchEnd| std::ptr::eq(end.stream, *stream);
            let (own, ends) = std::mem::take(&mut inner.ends).into_iter().partition(is_own);
            inner.ends = ends;
            let own: Vec<BranchEnd> = own;
            inner.detached.extend(own.into_iter().flat_map(|end| end.dependencies));
        }
        stream.set_capture(None);
        update_default_stream(stream.context());
    }

    /// Appends a node to the stream's branch.
    fn add_node(&self, operation: NodeOperation) -> Result<(), CudaError> {
        let CaptureRole::Member(sequence, stream) = &self.0 else { return Err(self.reject()) };
        sequence.check()?;
        let graph = sequence.graph()?;
        let mut inner = sequence.inner();
        let end = inner.ends.iter_mut().find(|end| std::ptr::eq(end.stream, *stream));
        let end = end.ok_or(CudaError::STREAM_CAPTURE_INVALIDATED)?;
        let node = graph::add(graph, &end.dependencies, operation)?;
        end.dependencies = vec![(node, graph::EdgePort::default())];
        Ok(())
    }

    pub(super) fn add_kernel(
        &self,
        function: &'static Function,
        shape: LaunchShape,
    ) -> Result<(), CudaError> {
        let CaptureRole::Member(_, stream) = &self.0 else { return Err(self.reject()) };
        self.add_node(NodeOperation::launch(function, shape, stream.context(), false)?)
    }

    pub(super) fn add_host_callback(
        &self,
        function: CUhostFn,
        user_data: *mut c_void,
    ) -> Result<(), CudaError> {
        self.add_node(NodeOperation::Host(HostCallback::new(function, user_data)?))
    }

    pub(super) fn add_memory_op(&self, op: MemoryOp) -> Result<(), CudaError> {
        let CaptureRole::Member(_, stream) = &self.0 else { return Err(self.reject()) };
        self.add_node(NodeOperation::memory(op, stream.context()))
    }

    /// Captures the launch of an executable graph as a child graph node.
    pub(super) fn add_graph_launch(&self, exec: usize) -> Result<(), CudaError> {
        let CaptureRole::Member(sequence, _) = &self.0 else { return Err(self.reject()) };
        sequence.check()?;
        match graph::child_of_exec(exec) {
            Ok(child) => self.add_node(NodeOperation::Child(child)).inspect_err(|_| graph::discard(child)),
            Err(error) => {
                self.invalidate();
                Err(error)
            }
        }
    }

    /// Captures a stream-ordered allocation. The address is fixed now; launches of the graph provide the memory.
    pub(super) fn add_allocation(&self, bytes: usize) -> Result<CUdeviceptr, CudaError> {
        let CaptureRole::Member(_, stream) = &self.0 else { return Err(self.reject()) };
        let made = GraphAllocation::for_capture(stream.context().device, bytes)?;
        let pointer = made.pointer();
        self.add_node(NodeOperation::Alloc(made)).map(|()| pointer)
    }

    /// Captures a stream-ordered free.
    pub(super) fn add_free(&self, pointer: CUdeviceptr) -> Result<(), CudaError> {
        let CaptureRole::Member(sequence, _) = &self.0 else { return Err(self.reject()) };
        if !graph::can_free(sequence.graph()?, pointer) {
            return Err(CudaError::INVALID_VALUE);
        }
        self.add_node(NodeOperation::Free(pointer))
    }

    pub(super) fn record_event(&self, event: &'static Event, flags: u32) -> Result<(), CudaError> {
        let CaptureRole::Member(sequence, stream) = &self.0 else { return Err(self.reject()) };
        if flags & CU_EVENT_RECORD_EXTERNAL != 0 {
            return self.add_node(NodeOperation::Record(event));
        }
        sequence.check()?;
        let dependencies = {
            let inner = sequence.inner();
            let end = inner.ends.iter().find(|end| std::ptr::eq(end.stream, *stream));
            end.map(|end| end.dependencies.clone()).unwrap_or_default()
        };
        event.set_captured(CapturedEvent { sequence: Arc::clone(sequence), dependencies });
        Ok(())
    }
}

/// Begins a capture, optionally into an existing graph after some of its nodes.
pub(super) fn begin(
    stream: &'static Stream,
    mode: CUstreamCaptureMode,
    into: Option<(GraphKey, Vec<Dependency>)>,
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
    let is_user_graph = into.is_some();
    let (graph, dependencies) = match into {
        Some((graph, dependencies)) => {
            graph::check_dependencies(graph, &dependencies)?;
            (graph, dependencies)
        }
        None => (graph::create()?, Vec::new()),
    };
    let sequence = Arc::new(CaptureSequence {
        id: unique_id(),
        graph,
        graph_id: graph::id(graph)?,
        is_user_graph,
        mode,
        thread: std::thread::current().id(),
        origin: stream,
        inner: Mutex::new(SequenceState {
            state: CaptureState::Active,
            ends: Vec::new(),
            detached: Vec::new(),
        }),
    });
    {
        let mut sequences = locked(&ACTIVE_CAPTURES);
        sequences.push(Arc::clone(&sequence));
        ACTIVE_CAPTURE_COUNT.store(sequences.len(), Ordering::Release);
    }
    sequence.add_stream(stream, dependencies);
    Ok(())
}

/// Ends the capture that began on this stream.
pub(super) fn end(stream: &'static Stream) -> Result<CUgraph, CudaError> {
    let capture = stream.capture().ok_or(CudaError::ILLEGAL_STATE)?;
    let CaptureRole::Member(sequence, _) = &capture.0 else { return Err(CudaError::STREAM_CAPTURE_IMPLICIT) };
    if !std::ptr::eq(sequence.origin, stream) {
        sequence.invalidate();
        return Err(CudaError::STREAM_CAPTURE_UNMATCHED);
    }
    if sequence.mode != CU_STREAM_CAPTURE_MODE_RELAXED && sequence.thread != std::thread::current().id() {
        return Err(CudaError::STREAM_CAPTURE_WRONG_THREAD);
    }
    let made = sequence.graph();
    let SequenceState { state, ends, detached } = sequence.end();
    let (own, others): (Vec<BranchEnd>, Vec<BranchEnd>) =
        ends.into_iter().partition(|end| std::ptr::eq(end.stream, stream));
    let last: Vec<Dependency> = own.into_iter().flat_map(|end| end.dependencies).collect();
    let open = others.iter().flat_map(|end| &end.dependencies).chain(&detached).map(|&(node, _)| node);
    let outcome = match state {
        CaptureState::Invalid | CaptureState::Ended => Err(CudaError::STREAM_CAPTURE_INVALIDATED),
        CaptureState::Active if !graph::is_joined(&last, open) => Err(CudaError::STREAM_CAPTURE_UNJOINED),
        CaptureState::Active => made.map(GraphKey::handle),
    };
    if outcome.is_err() {
        sequence.discard();
    }
    outcome
}

/// Handles a wait by a captured stream or for a captured event. Returns false if the wait is an ordinary one.
pub(super) fn wait_event(
    stream: &'static Stream,
    event: &'static Event,
    flags: u32,
) -> Result<bool, CudaError> {
    let external = flags & CU_EVENT_WAIT_EXTERNAL != 0;
    let (capture, captured) = (stream.capture(), event.captured());
    let Some(capture) = capture else {
        return match captured {
            _ if external => Err(CudaError::INVALID_VALUE),
            None => Ok(false),
            Some(captured) => fork_stream(stream, &captured).map(|()| true),
        };
    };
    if external {
        return capture.add_node(NodeOperation::Wait(event)).map(|()| true);
    }
    let CaptureRole::Member(sequence, _) = &capture.0 else {
        if let Some(captured) = captured {
            captured.sequence.invalidate();
        }
        return Err(capture.reject());
    };
    sequence.check()?;
    let Some(captured) = captured.filter(|captured| captured.sequence.inner().state != CaptureState::Ended)
    else {
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
        end.extend(&captured.dependencies);
    }
    Ok(true)
}

/// Adds a stream that waits for a captured event to the capture.
fn fork_stream(stream: &'static Stream, captured: &CapturedEvent) -> Result<(), CudaError> {
    captured.sequence.check()?;
    if stream.is_legacy() {
        captured.sequence.invalidate();
        return Err(CudaError::STREAM_CAPTURE_IMPLICIT);
    }
    captured.sequence.add_stream(stream, captured.dependencies.clone());
    Ok(())
}

impl Event {
    /// Fails, and invalidates the capture, if the event's last recording was captured.
    pub(super) fn check_not_captured(&self) -> Result<(), CudaError> {
        let Some(captured) = self.captured() else { return Ok(()) };
        captured.sequence.invalidate();
        Err(CudaError::CAPTURED_EVENT)
    }
}

/// Fails, and invalidates the captures, if a stream of the context is being captured.
pub(super) fn check_context_not_capturing(context: &'static Context) -> Result<(), CudaError> {
    let mut result = Ok(());
    for sequence in sequences().iter().filter(|sequence| sequence.has_stream_of(context, false)) {
        sequence.invalidate();
        result = Err(CudaError::STREAM_CAPTURE_UNSUPPORTED);
    }
    result.and_then(|()| check_unsafe_call())
}

/// Fails if CUDA forbids potentially unsafe calls for this thread because of an active capture.
#[inline]
pub(super) fn check_unsafe_call() -> Result<(), CudaError> {
    if ACTIVE_CAPTURE_COUNT.load(Ordering::Relaxed) == 0 { Ok(()) } else { check_unsafe_call_slow() }
}

#[cold]
fn check_unsafe_call_slow() -> Result<(), CudaError> {
    let mode = THREAD_CAPTURE_MODE.get();
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

/// Sets the calling thread's capture mode and returns the previous one.
pub(super) fn exchange_mode(mode: CUstreamCaptureMode) -> Result<CUstreamCaptureMode, CudaError> {
    if mode > CU_STREAM_CAPTURE_MODE_RELAXED {
        return Err(CudaError::INVALID_VALUE);
    }
    Ok(THREAD_CAPTURE_MODE.replace(mode))
}
