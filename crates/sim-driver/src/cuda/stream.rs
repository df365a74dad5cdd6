//! Streams: operations that execute in order.

mod memory_ops;
mod stream_functions;

pub(super) use memory_ops::{MemoryWord, WordCondition};

use super::context::{self, Context};
use super::engine::{StreamKind, StreamOp};
use super::handle::{HandleArena, handle_of};
use super::session::{session, unique_id};
use super::{CUstream, CudaError};
use crate::cuda::capture::Capture;
use std::cell::RefCell;
use std::sync::atomic::{AtomicBool, AtomicPtr, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, MutexGuard};

/// The range of stream priorities; lower numbers have priority.
pub(super) const LEAST_PRIORITY: i32 = 0;
pub(super) const GREATEST_PRIORITY: i32 = -5;

/// The creation flag `CU_STREAM_NON_BLOCKING`.
const NON_BLOCKING: u32 = 1;

/// A stream. Fields that a launch needs are outside the lock.
pub(super) struct Stream {
    context: AtomicPtr<Context>,
    timeline: AtomicUsize,
    capturing: AtomicBool,
    inner: Mutex<StreamState>,
}

/// The part of a stream that launches do not need.
#[derive(Clone)]
struct StreamState {
    flags: u32,
    priority: i32,
    id: u64,
    capture: Option<Arc<Capture>>,
}

static STREAMS: HandleArena<Stream> = HandleArena::new();

thread_local! {
    /// The thread's per-thread default streams, by context id.
    static THREAD_STREAMS: RefCell<Vec<(u64, &'static Stream)>> = const { RefCell::new(Vec::new()) };
}

/// Resolves a stream handle; small values mean the default streams.
#[inline]
pub(super) fn resolve(handle: CUstream) -> Result<&'static Stream, CudaError> {
    match handle as usize {
        0..=2 => {
            let (context, per_thread) = context::current_and_mode()?;
            resolve_in(context, handle, per_thread)
        }
        _ => {
            session()?;
            resolve_named(handle)
        }
    }
}

/// Resolves a stream handle for a known current context.
#[inline]
pub(super) fn resolve_in(
    context: &'static Context,
    handle: CUstream,
    per_thread: bool,
) -> Result<&'static Stream, CudaError> {
    match handle as usize {
        0 if per_thread => per_thread_stream(context),
        0 | 1 => context.legacy(),
        2 => per_thread_stream(context),
        _ => resolve_named(handle),
    }
}

#[inline]
fn resolve_named(handle: CUstream) -> Result<&'static Stream, CudaError> {
    let stream = STREAMS.get(handle).ok_or(CudaError::INVALID_HANDLE)?;
    if stream.context().is_alive() { Ok(stream) } else { Err(CudaError::CONTEXT_IS_DESTROYED) }
}

/// Returns the calling thread's per-thread default stream.
fn per_thread_stream(context: &'static Context) -> Result<&'static Stream, CudaError> {
    THREAD_STREAMS.with_borrow_mut(|own| {
        if let Some(&(_, stream)) = own.iter().find(|(id, stream)| *id == context.id && is_live(stream)) {
            return Ok(stream);
        }
        own.retain(|(id, _)| *id != context.id);
        let stream = create(context, 0, 0)?;
        own.push((context.id, stream));
        Ok(stream)
    })
}

fn is_live(stream: &'static Stream) -> bool {
    STREAMS.get(handle_of::<_, u8>(stream)).is_some()
}

fn create(context: &'static Context, flags: u32, priority: i32) -> Result<&'static Stream, CudaError> {
    let kind = if flags & NON_BLOCKING != 0 { StreamKind::NonBlocking } else { StreamKind::Blocking };
    let timeline = {
        let mut engine = context.device.engine();
        let timeline = engine.open_timeline(context.group, kind);
        engine.set_priority(timeline, priority.clamp(GREATEST_PRIORITY, LEAST_PRIORITY));
        timeline
    };
    create_on_timeline(context, timeline, flags, priority)
}

/// Creates a stream on an existing timeline.
pub(super) fn create_on_timeline(
    context: &'static Context,
    timeline: usize,
    flags: u32,
    priority: i32,
) -> Result<&'static Stream, CudaError> {
    let priority = priority.clamp(GREATEST_PRIORITY, LEAST_PRIORITY);
    let inner = StreamState { flags, priority, id: unique_id(), capture: None };
    let new = inner.clone();
    let pointer = std::ptr::from_ref(context).cast_mut();
    let fresh = || Stream {
        context: AtomicPtr::new(pointer),
        timeline: AtomicUsize::new(timeline),
        capturing: AtomicBool::new(false),
        inner: Mutex::new(new),
    };
    let again = |old: &'static Stream| {
        old.context.store(pointer, Ordering::Release);
        old.timeline.store(timeline, Ordering::Release);
        old.capturing.store(false, Ordering::Release);
        *old.inner() = inner;
    };
    STREAMS.make(fresh, again).ok_or(CudaError::OUT_OF_MEMORY)
}

/// Destroys all streams of a context, except the legacy stream, which a primary context reuses when it is reopened.
pub(super) fn drop_all(context: &'static Context) {
    for stream in STREAMS.live() {
        let (own, timeline) = stream.context_and_timeline();
        let legacy = context.legacy().is_ok_and(|legacy| std::ptr::eq(legacy, stream));
        if std::ptr::eq(own, context) && !legacy {
            if let Some(capture) = stream.capture() {
                capture.remove_stream();
            }
            if STREAMS.drop(handle_of::<_, u8>(stream)) {
                context.device.engine().close_timeline(timeline);
            }
        }
    }
}

impl Stream {
    fn inner(&self) -> MutexGuard<'_, StreamState> {
        self.inner.lock().unwrap_or_else(|poisoned| poisoned.into_inner())
    }

    #[inline]
    pub(super) fn context(&self) -> &'static Context {
        // SAFETY: the pointer is set from a `&'static Context`, and contexts are never freed.
        unsafe { &*self.context.load(Ordering::Acquire) }
    }

    pub(super) fn handle(&'static self) -> CUstream {
        handle_of(self)
    }

    /// Returns the stream's context and timeline.
    #[inline]
    pub(super) fn context_and_timeline(&self) -> (&'static Context, usize) {
        (self.context(), self.timeline.load(Ordering::Acquire))
    }

    /// Returns the capture in which the stream takes part.
    #[inline]
    pub(super) fn capture(&self) -> Option<Arc<Capture>> {
        if self.capturing.load(Ordering::Acquire) { self.inner().capture.clone() } else { None }
    }

    /// Returns whether the stream is ordered with the legacy default stream.
    pub(super) fn is_blocking(&self) -> bool {
        self.inner().flags & NON_BLOCKING == 0
    }

    /// Returns whether it is the legacy default stream of its context.
    pub(super) fn is_legacy(&self) -> bool {
        self.context().legacy().is_ok_and(|legacy| std::ptr::eq(legacy, self))
    }

    /// Fails, and invalidates the capture, if the stream is being captured: for operations that cannot be captured,
    /// such as waiting.
    pub(super) fn check_not_capturing(&self) -> Result<(), CudaError> {
        self.capture().map_or(Ok(()), |capture| Err(capture.reject()))
    }

    pub(super) fn set_capture(&self, capture: Option<Arc<Capture>>) {
        self.capturing.store(capture.is_some(), Ordering::Release);
        self.inner().capture = capture;
    }

    /// Submits an operation for execution, even during a capture.
    pub(super) fn submit(&self, op: StreamOp) -> Result<(), CudaError> {
        let (context, timeline) = self.context_and_timeline();
        context.device.submit(timeline, op)
    }

    /// Runs `work` in stream order, immediately if nothing precedes it.
    pub(super) fn run_in_order(&self, work: impl FnOnce() + Send + 'static) -> Result<(), CudaError> {
        self.submit(StreamOp::HostWork(Box::new(work)))
    }

    /// Waits until everything submitted so far is done.
    pub(super) fn sync(&self) -> Result<(), CudaError> {
        let (context, timeline) = self.context_and_timeline();
        context.device.sync(timeline)
    }
}
