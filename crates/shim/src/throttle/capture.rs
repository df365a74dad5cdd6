//! Captures: what is launched into a stream that is captured does not run now.
#![allow(unsafe_code)]

use super::Throttle;
use crate::driver::cuda as real;
use crate::hook::{Variant, hooks};
use crate::process;
use partage_driver_api::cuda::*;
use std::sync::atomic::Ordering::Relaxed;

/// Whether the stream is being captured. The driver is only asked while some stream of the process is.
pub(super) fn is_captured(stream: CUstream, variant: Variant) -> bool {
    let mut status = CU_STREAM_CAPTURE_STATUS_NONE;
    let answer = match variant {
        // SAFETY: the program's stream, and a number to fill in.
        Variant::Plain => unsafe { real::cuStreamIsCapturing(stream, &mut status) },
        // SAFETY: likewise.
        Variant::PerThread => unsafe { real::cuStreamIsCapturing_ptsz(stream, &mut status) },
    };
    answer == CUDA_SUCCESS && status != CU_STREAM_CAPTURE_STATUS_NONE
}

/// The same, for who does not know whether any is.
#[inline]
pub(crate) fn is_captured_now(process: &process::Process, stream: CUstream, variant: Variant) -> bool {
    process.throttle.is_capturing() && is_captured(stream, variant)
}

impl Throttle {
    /// Whether a capture goes on in this process. Some calls of the driver's would end it, whichever thread they come from:
    /// then we make none of our own.
    #[inline]
    pub(crate) fn is_capturing(&self) -> bool {
        self.captures.load(Relaxed) != 0
    }
}

fn began(answer: CUresult) -> CUresult {
    if answer == CUDA_SUCCESS
        && let Some(process) = process::attached()
    {
        process.throttle.captures.fetch_add(1, Relaxed);
    }
    answer
}

/// A capture may have ended: it has if the stream is captured no more, whatever the driver answered.
fn ended(answer: CUresult, stream: CUstream, variant: Variant) -> CUresult {
    if let Some(process) = process::attached()
        && (answer == CUDA_SUCCESS || !is_captured(stream, variant))
    {
        let _ = process.throttle.captures.fetch_update(Relaxed, Relaxed, |count| count.checked_sub(1));
    }
    answer
}

/// A stream goes, and with it a capture of it.
fn destroyed(stream: CUstream, call: impl FnOnce() -> CUresult) -> CUresult {
    let captured = is_captured(stream, Variant::Plain);
    let answer = call();
    if captured
        && answer == CUDA_SUCCESS
        && let Some(process) = process::attached()
    {
        let _ = process.throttle.captures.fetch_update(Relaxed, Relaxed, |count| count.checked_sub(1));
    }
    answer
}

/// Whether any capture goes on.
fn capturing() -> bool {
    process::attached().is_some_and(|process| process.throttle.is_capturing())
}

hooks! { cuda;
    fn cuStreamBeginCapture(stream: CUstream) twin cuStreamBeginCapture_ptsz |next, _variant| {
        // SAFETY: the program's promise.
        began(unsafe { next(stream) })
    }

    fn cuStreamBeginCapture_v2(
        stream: CUstream,
        mode: CUstreamCaptureMode,
    ) twin cuStreamBeginCapture_v2_ptsz |next, _variant| {
        // SAFETY: the program's promise.
        began(unsafe { next(stream, mode) })
    }

    fn cuStreamBeginCaptureToGraph(
        stream: CUstream,
        graph: CUgraph,
        dependencies: *const CUgraphNode,
        dependency_data: *const CUgraphEdgeData,
        count: usize,
        mode: CUstreamCaptureMode,
    ) twin cuStreamBeginCaptureToGraph_ptsz |next, _variant| {
        // SAFETY: the program's promise.
        began(unsafe { next(stream, graph, dependencies, dependency_data, count, mode) })
    }

    fn cuStreamEndCapture(stream: CUstream, graph: *mut CUgraph) twin cuStreamEndCapture_ptsz |next, variant| {
        // SAFETY: the program's promise.
        let answer = unsafe { next(stream, graph) };
        ended(answer, stream, variant)
    }

    fn cuStreamDestroy(stream: CUstream) |next, _variant| if capturing {
        // SAFETY: the program's promise.
        destroyed(stream, || unsafe { next(stream) })
    }

    fn cuStreamDestroy_v2(stream: CUstream) |next, _variant| if capturing {
        // SAFETY: the program's promise.
        destroyed(stream, || unsafe { next(stream) })
    }
}
