//! Stream captures: work that is launched into a captured stream does not run now.
#![allow(unsafe_code)]

use super::Throttle;
use crate::driver::cuda as driver;
use crate::hook::{StreamVariant, hooks};
use crate::process;
use partage_driver_api::cuda::*;
use std::sync::atomic::Ordering::Relaxed;

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

impl Throttle {
    /// Returns whether a capture is in progress in this process. Some driver calls would invalidate it, from whichever
    /// thread they come: then the shim makes none of its own.
    #[inline]
    pub(crate) fn is_capturing(&self) -> bool {
        self.captures.load(Relaxed) != 0
    }
}

fn note_capture_began(answer: CUresult) -> CUresult {
    if answer == CUDA_SUCCESS
        && let Some(process) = process::attached()
    {
        process.throttle.captures.fetch_add(1, Relaxed);
    }
    answer
}

/// Counts the end of a capture: it has ended if the stream is no longer captured, whatever the driver returned.
fn note_capture_ended(answer: CUresult, stream: CUstream, variant: StreamVariant) -> CUresult {
    if let Some(process) = process::attached()
        && (answer == CUDA_SUCCESS || !is_stream_captured(stream, variant))
    {
        let _ = process.throttle.captures.fetch_update(Relaxed, Relaxed, |count| count.checked_sub(1));
    }
    answer
}

/// Destroys a stream, which ends a capture of it.
fn destroy_stream(stream: CUstream, call: impl FnOnce() -> CUresult) -> CUresult {
    let captured = is_stream_captured(stream, StreamVariant::Legacy);
    let answer = call();
    if captured
        && answer == CUDA_SUCCESS
        && let Some(process) = process::attached()
    {
        let _ = process.throttle.captures.fetch_update(Relaxed, Relaxed, |count| count.checked_sub(1));
    }
    answer
}

/// Returns whether any capture is in progress.
fn is_any_capturing() -> bool {
    process::attached().is_some_and(|process| process.throttle.is_capturing())
}

hooks! { cuda;
    fn cuStreamBeginCapture(stream: CUstream) twin cuStreamBeginCapture_ptsz |next, _variant| {
        // SAFETY: the application's arguments, passed on unchanged under the driver function's own contract.
        note_capture_began(unsafe { next(stream) })
    }

    fn cuStreamBeginCapture_v2(
        stream: CUstream,
        mode: CUstreamCaptureMode,
    ) twin cuStreamBeginCapture_v2_ptsz |next, _variant| {
        // SAFETY: the application's arguments, passed on unchanged under the driver function's own contract.
        note_capture_began(unsafe { next(stream, mode) })
    }

    fn cuStreamBeginCaptureToGraph(
        stream: CUstream,
        graph: CUgraph,
        dependencies: *const CUgraphNode,
        dependency_data: *const CUgraphEdgeData,
        count: usize,
        mode: CUstreamCaptureMode,
    ) twin cuStreamBeginCaptureToGraph_ptsz |next, _variant| {
        // SAFETY: the application's arguments, passed on unchanged under the driver function's own contract.
        note_capture_began(unsafe { next(stream, graph, dependencies, dependency_data, count, mode) })
    }

    fn cuStreamEndCapture(stream: CUstream, graph: *mut CUgraph) twin cuStreamEndCapture_ptsz |next, variant| {
        // SAFETY: the application's arguments, passed on unchanged under the driver function's own contract.
        let answer = unsafe { next(stream, graph) };
        note_capture_ended(answer, stream, variant)
    }

    fn cuStreamDestroy(stream: CUstream) |next, _variant| if is_any_capturing {
        // SAFETY: the application's arguments, passed on unchanged under the driver function's own contract.
        destroy_stream(stream, || unsafe { next(stream) })
    }

    fn cuStreamDestroy_v2(stream: CUstream) |next, _variant| if is_any_capturing {
        // SAFETY: the application's arguments, passed on unchanged under the driver function's own contract.
        destroy_stream(stream, || unsafe { next(stream) })
    }
}
