//! Events of the shim's own in streams of the application.
#![allow(unsafe_code)]

use crate::driver::cuda as driver;
use crate::hook::StreamVariant;
use partage_driver_api::cuda::*;

/// Creates an event and records it in the stream.
pub(crate) fn record(stream: CUstream, variant: StreamVariant) -> Option<CUevent> {
    let mut event = std::ptr::null_mut();
    // SAFETY: the pointer is to a local variable, which the driver fills in.
    if unsafe { driver::cuEventCreate(&mut event, CU_EVENT_DISABLE_TIMING) } != CUDA_SUCCESS {
        return None;
    }
    let recorded = match variant {
        // SAFETY: the event was just created, and the stream is the application's.
        StreamVariant::Legacy => unsafe { driver::cuEventRecord(event, stream) },
        // SAFETY: the event was just created, and the stream is the application's.
        StreamVariant::PerThread => unsafe { driver::cuEventRecord_ptsz(event, stream) },
    };
    if recorded == CUDA_SUCCESS {
        return Some(event);
    }
    destroy(event);
    None
}

/// Destroys an event that [`record`] returned.
pub(crate) fn destroy(event: CUevent) {
    // SAFETY: the event was created here, and no other code has its handle.
    let _ = unsafe { driver::cuEventDestroy_v2(event) };
}
