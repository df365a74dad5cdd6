//! Stream captures: work that is launched into a captured stream does not run now.
#![allow(unsafe_code)]

use super::Throttle;
use super::streams::StreamKey;
use crate::driver::cuda as driver;
use crate::hook::{StreamVariant, hooks};
use crate::process;
use partage_driver_api::cuda::*;
use partage_region::futex::preserve_errno;
use std::sync::atomic::{AtomicU32, Ordering::Relaxed};
use std::sync::{Mutex, MutexGuard, PoisonError};

/// Returns whether the stream is being captured. Called only while some stream of the process is.
pub(super) fn is_stream_captured(stream: CUstream, variant: StreamVariant) -> bool {
    let mut status = CU_STREAM_CAPTURE_STATUS_NONE;
    let answer = match variant {
        // SAFETY: the stream is the application's, and the pointer is to a local variable.
        StreamVariant::Legacy => unsafe { driver::cuStreamIsCapturing(stream, &mut status) },
        // SAFETY: the stream is the application's, and the pointer is to a local variable.
        StreamVariant::PerThread => unsafe { driver::cuStreamIsCapturing_ptsz(stream, &mut status) },
    };
    answer == CUDA_SUCCESS && status != CU_STREAM_CAPTURE_STATUS_NONE
}

/// Returns whether the stream is being captured, for callers that do not know whether any stream is.
#[inline]
pub(crate) fn is_capturing_stream(
    process: &process::Process,
    stream: CUstream,
    variant: StreamVariant,
) -> bool {
    process.throttle.is_capturing() && is_stream_captured(stream, variant)
}

/// The captures in progress in this process.
#[derive(Default)]
pub(super) struct OpenCaptures {
    /// Length of `list`, readable without the lock. While it is zero, no stream has to be queried.
    count: AtomicU32,
    list: Mutex<Vec<OpenCapture>>,
    /// Held while a capture begins or ends, and while a marker is put into a stream.
    changing: Mutex<()>,
}

/// A capture in progress. It ends with the stream that it began on, and not with a stream that joined it later.
struct OpenCapture {
    /// The driver's number of the capture.
    id: u64,
    /// The stream that it began on, as an address.
    origin: usize,
    /// The context of that stream, as an address; zero if it is not known.
    context: usize,
}

impl OpenCaptures {
    /// Keeps captures from beginning and ending while the guard is held.
    pub(super) fn lock_out(&self) -> MutexGuard<'_, ()> {
        self.changing.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn change(&self, change: impl FnOnce(&mut Vec<OpenCapture>)) {
        let mut list = self.list.lock().unwrap_or_else(PoisonError::into_inner);
        change(&mut list);
        // A program has a few at a time, so it fits.
        self.count.store(list.len() as u32, Relaxed);
    }
}

impl Throttle {
    /// Returns whether a capture is in progress in this process. Some driver calls would invalidate it, from whichever
    /// thread they come: then the shim makes none of its own.
    #[inline]
    pub(crate) fn is_capturing(&self) -> bool {
        self.captures.count.load(Relaxed) != 0
    }

    /// Drops the captures of a context that the driver has destroyed.
    pub(super) fn end_captures_of(&self, context: CUcontext) {
        if self.is_capturing() {
            self.captures.change(|list| list.retain(|open| open.context != context.addr()));
        }
    }
}

/// Returns the number of the capture that a stream takes part in.
fn capture_id(stream: CUstream, variant: StreamVariant) -> Option<u64> {
    let (mut status, mut id) = (CU_STREAM_CAPTURE_STATUS_NONE, 0);
    let nothing = (std::ptr::null_mut(), std::ptr::null_mut(), std::ptr::null_mut());
    let info = match variant {
        StreamVariant::Legacy => driver::cuStreamGetCaptureInfo_v2,
        StreamVariant::PerThread => driver::cuStreamGetCaptureInfo_v2_ptsz,
    };
    // SAFETY: the stream is the application's; the driver writes to the two local variables during the call, and the other
    // outputs are optional.
    let answer = unsafe { info(stream, &mut status, &mut id, nothing.0, nothing.1, nothing.2) };
    (answer == CUDA_SUCCESS && status != CU_STREAM_CAPTURE_STATUS_NONE).then_some(id)
}

/// Returns the context of a stream as an address, or zero.
fn context_of(stream: CUstream, variant: StreamVariant) -> usize {
    let mut context = std::ptr::null_mut();
    let answer = match variant {
        // SAFETY: the stream is the application's, and the driver writes to a local variable during the call.
        StreamVariant::Legacy => unsafe { driver::cuStreamGetCtx(stream, &mut context) },
        // SAFETY: the stream is the application's, and the driver writes to a local variable during the call.
        StreamVariant::PerThread => unsafe { driver::cuStreamGetCtx_ptsz(stream, &mut context) },
    };
    if answer == CUDA_SUCCESS { context.addr() } else { 0 }
}

/// Begins a capture with the driver's call.
fn begin_capture(stream: CUstream, variant: StreamVariant, call: impl FnOnce() -> CUresult) -> CUresult {
    let Some(process) = process::attached() else { return call() };
    let throttle = &process.throttle;
    if throttle.streams.any() {
        // While a capture is in progress, no marker can be put into the legacy stream.
        preserve_errno(|| {
            throttle.streams.matching(|_| true).iter().for_each(|one| one.flush(throttle, true))
        });
    }
    let _locked = throttle.captures.lock_out();
    let answer = call();
    if answer == CUDA_SUCCESS
        && let Some(id) = capture_id(stream, variant)
    {
        let open = OpenCapture { id, origin: stream.addr(), context: context_of(stream, variant) };
        throttle.captures.change(|list| list.push(open));
    }
    answer
}

/// Ends the capture of a stream with the driver's call. It has ended if the stream took part in it before and no longer
/// does, whatever the driver returned.
fn end_capture(stream: CUstream, variant: StreamVariant, call: impl FnOnce() -> CUresult) -> CUresult {
    let Some(process) = process::attached() else { return call() };
    let _locked = process.throttle.captures.lock_out();
    let id = capture_id(stream, variant);
    let answer = call();
    if let Some(id) = id
        && !is_stream_captured(stream, variant)
    {
        process.throttle.captures.change(|list| list.retain(|open| open.id != id));
    }
    answer
}

/// Destroys a stream with the driver's call. That ends the capture that began on it.
fn destroy_stream(stream: CUstream, call: impl FnOnce() -> CUresult) -> CUresult {
    let Some(process) = process::attached() else { return call() };
    let throttle = &process.throttle;
    let key = |gpu| StreamKey::new(stream, StreamVariant::Legacy, gpu);
    for marked in (0..process.region.gpus()).filter_map(|gpu| throttle.streams.find(key(gpu))) {
        preserve_errno(|| marked.flush(throttle, true));
        throttle.streams.forget(marked);
    }
    let _locked = throttle.captures.lock_out();
    let id = capture_id(stream, StreamVariant::Legacy);
    let answer = call();
    if let Some(id) = id
        && answer == CUDA_SUCCESS
    {
        let is_ended = |open: &OpenCapture| open.id == id && open.origin == stream.addr();
        process.throttle.captures.change(|list| list.retain(|open| !is_ended(open)));
    }
    answer
}

/// Returns whether the destruction of a stream matters: a capture is in progress, or streams are marked.
fn matters() -> bool {
    process::attached()
        .is_some_and(|process| process.throttle.is_capturing() || process.throttle.streams.any())
}

hooks! { cuda;
    fn cuStreamBeginCapture(stream: CUstream) twin cuStreamBeginCapture_ptsz |next, variant| {
        // SAFETY: the application's arguments, passed on unchanged under the driver function's own contract.
        begin_capture(stream, variant, || unsafe { next(stream) })
    }

    fn cuStreamBeginCapture_v2(
        stream: CUstream,
        mode: CUstreamCaptureMode,
    ) twin cuStreamBeginCapture_v2_ptsz |next, variant| {
        // SAFETY: the application's arguments, passed on unchanged under the driver function's own contract.
        begin_capture(stream, variant, || unsafe { next(stream, mode) })
    }

    fn cuStreamBeginCaptureToGraph(
        stream: CUstream,
        graph: CUgraph,
        dependencies: *const CUgraphNode,
        dependency_data: *const CUgraphEdgeData,
        count: usize,
        mode: CUstreamCaptureMode,
    ) twin cuStreamBeginCaptureToGraph_ptsz |next, variant| {
        // SAFETY: the application's arguments, passed on unchanged under the driver function's own contract.
        begin_capture(stream, variant, || unsafe {
            next(stream, graph, dependencies, dependency_data, count, mode)
        })
    }

    fn cuStreamEndCapture(stream: CUstream, graph: *mut CUgraph) twin cuStreamEndCapture_ptsz |next, variant| {
        // SAFETY: the application's arguments, passed on unchanged under the driver function's own contract.
        end_capture(stream, variant, || unsafe { next(stream, graph) })
    }

    fn cuStreamDestroy(stream: CUstream) |next, _variant| if matters {
        // SAFETY: the application's arguments, passed on unchanged under the driver function's own contract.
        destroy_stream(stream, || unsafe { next(stream) })
    }

    fn cuStreamDestroy_v2(stream: CUstream) |next, _variant| if matters {
        // SAFETY: the application's arguments, passed on unchanged under the driver function's own contract.
        destroy_stream(stream, || unsafe { next(stream) })
    }
}
