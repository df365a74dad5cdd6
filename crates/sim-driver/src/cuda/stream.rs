//! Streams: operations in order.

mod calls;
mod values;

use super::context::{self, Context};
use super::engine::{Kind, Op};
use super::handle::{Arena, handle_of};
use super::session::{session, unique};
use super::{CUstream, CudaError};
use crate::cuda::capture::Capture;
use std::cell::RefCell;
use std::sync::atomic::{AtomicBool, AtomicPtr, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, MutexGuard};

/// The priorities a stream can have: lower numbers come first.
pub(super) const LEAST_PRIORITY: i32 = 0;
pub(super) const GREATEST_PRIORITY: i32 = -5;

/// `CU_STREAM_NON_BLOCKING`.
const NON_BLOCKING: u32 = 1;

/// A stream. What a launch needs is outside the lock.
pub(super) struct Stream {
    context: AtomicPtr<Context>,
    track: AtomicUsize,
    capturing: AtomicBool,
    inner: Mutex<Inner>,
}

#[derive(Clone)]
struct Inner {
    flags: u32,
    priority: i32,
    id: u64,
    capture: Option<Arc<Capture>>,
}

static STREAMS: Arena<Stream> = Arena::new();

thread_local! {
    /// This thread's own default streams, by their context's number.
    static OWN: RefCell<Vec<(u64, &'static Stream)>> = const { RefCell::new(Vec::new()) };
}

/// The stream a handle means: the default ones have small numbers.
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

/// The same where the calling thread's context is at hand.
#[inline]
pub(super) fn resolve_in(
    context: &'static Context,
    handle: CUstream,
    per_thread: bool,
) -> Result<&'static Stream, CudaError> {
    match handle as usize {
        0 if per_thread => own(context),
        0 | 1 => context.legacy(),
        2 => own(context),
        _ => resolve_named(handle),
    }
}

#[inline]
fn resolve_named(handle: CUstream) -> Result<&'static Stream, CudaError> {
    let stream = STREAMS.get(handle).ok_or(CudaError::INVALID_HANDLE)?;
    if stream.context().is_alive() { Ok(stream) } else { Err(CudaError::CONTEXT_IS_DESTROYED) }
}

/// The calling thread's own default stream.
fn own(context: &'static Context) -> Result<&'static Stream, CudaError> {
    OWN.with_borrow_mut(|own| {
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
    let kind = if flags & NON_BLOCKING != 0 { Kind::Alone } else { Kind::Blocking };
    let track = context.device.engine().open_track(context.group, kind);
    make(context, track, flags, priority)
}

/// A stream on a track.
pub(super) fn make(
    context: &'static Context,
    track: usize,
    flags: u32,
    priority: i32,
) -> Result<&'static Stream, CudaError> {
    let priority = priority.clamp(GREATEST_PRIORITY, LEAST_PRIORITY);
    let inner = Inner { flags, priority, id: unique(), capture: None };
    let new = inner.clone();
    let pointer = std::ptr::from_ref(context).cast_mut();
    let fresh = || Stream {
        context: AtomicPtr::new(pointer),
        track: AtomicUsize::new(track),
        capturing: AtomicBool::new(false),
        inner: Mutex::new(new),
    };
    let again = |old: &'static Stream| {
        old.context.store(pointer, Ordering::Release);
        old.track.store(track, Ordering::Release);
        old.capturing.store(false, Ordering::Release);
        *old.inner() = inner;
    };
    STREAMS.make(fresh, again).ok_or(CudaError::OUT_OF_MEMORY)
}

/// Streams go with their context; the default one of a primary context stays for its next life.
pub(super) fn drop_all(context: &'static Context) {
    for stream in STREAMS.live() {
        let (own, track) = stream.place();
        let legacy = context.legacy().is_ok_and(|legacy| std::ptr::eq(legacy, stream));
        if std::ptr::eq(own, context) && !legacy {
            if let Some(capture) = stream.capture() {
                capture.leave();
            }
            if STREAMS.drop(handle_of::<_, u8>(stream)) {
                context.device.engine().close_track(track);
            }
        }
    }
}

impl Stream {
    fn inner(&self) -> MutexGuard<'_, Inner> {
        self.inner.lock().unwrap_or_else(|poisoned| poisoned.into_inner())
    }

    #[inline]
    pub(super) fn context(&self) -> &'static Context {
        // SAFETY: set from a context's address, and contexts are never freed.
        unsafe { &*self.context.load(Ordering::Acquire) }
    }

    pub(super) fn handle(&'static self) -> CUstream {
        handle_of(self)
    }

    /// Context and track at once.
    #[inline]
    pub(super) fn place(&self) -> (&'static Context, usize) {
        (self.context(), self.track.load(Ordering::Acquire))
    }

    /// The capture it is in.
    #[inline]
    pub(super) fn capture(&self) -> Option<Arc<Capture>> {
        if self.capturing.load(Ordering::Acquire) { self.inner().capture.clone() } else { None }
    }

    /// Whether it is ordered with its context's default stream.
    pub(super) fn is_blocking(&self) -> bool {
        self.inner().flags & NON_BLOCKING == 0
    }

    /// Whether it is its context's default stream.
    pub(super) fn is_legacy(&self) -> bool {
        self.context().legacy().is_ok_and(|legacy| std::ptr::eq(legacy, self))
    }

    /// Refuses what a capture does not allow: waiting for a stream that only records, and the like.
    pub(super) fn outside_capture(&self) -> Result<(), CudaError> {
        self.capture().map_or(Ok(()), |capture| Err(capture.refuse()))
    }

    pub(super) fn set_capture(&self, capture: Option<Arc<Capture>>) {
        self.capturing.store(capture.is_some(), Ordering::Release);
        self.inner().capture = capture;
    }

    /// Submits an operation, past any capture.
    pub(super) fn submit(&self, op: Op) -> Result<(), CudaError> {
        let (context, track) = self.place();
        context.device.submit(track, op)
    }

    /// Does `work` in the stream's order: at once if nothing comes before it.
    pub(super) fn in_order(&self, work: impl FnOnce() + Send + 'static) -> Result<(), CudaError> {
        self.submit(Op::Host(Box::new(work)))
    }

    /// Waits until everything submitted so far is done.
    pub(super) fn sync(&self) -> Result<(), CudaError> {
        let (context, track) = self.place();
        context.device.sync(track)
    }
}
