//! What is freed in a stream's order: it counts until the stream has come to it.
#![allow(unsafe_code)]

use super::contexts;
use super::small::Piece;
use super::{BLOCK, locked};
use crate::hook::Variant;
use crate::process::Process;
use crate::real::cuda as real;
use partage_driver_api::cuda::*;
use std::sync::Mutex;
use std::sync::atomic::{AtomicUsize, Ordering::Relaxed};

/// What will be free.
pub(super) enum What {
    /// So many bytes of a GPU.
    Bytes(usize, u64),
    /// A piece of a block.
    Piece(Piece),
}

struct Freed {
    what: What,
    context: CUcontext,
    /// When it has passed, it is free. Without one it is when the context is gone.
    event: Option<CUevent>,
}

// SAFETY: handles of the driver's, which are good for every thread.
unsafe impl Send for Freed {}

/// What was freed and may not be free yet.
#[derive(Default)]
pub(super) struct Later {
    freed: Mutex<Vec<Freed>>,
    /// How many there are: most processes never have any.
    count: AtomicUsize,
}

impl Later {
    /// Notes what is free when the stream has come to here.
    pub(super) fn add(&self, process: &Process, what: What, stream: CUstream, variant: Variant) {
        let Ok(context) = contexts::current() else {
            return give_back(process, &what);
        };
        let event = mark(stream, variant);
        let mut freed = locked(&self.freed);
        freed.push(Freed { what, context, event });
        self.count.store(freed.len(), Relaxed);
    }

    /// Whether there is anything.
    pub(super) fn any(&self) -> bool {
        self.count.load(Relaxed) > 0
    }

    /// Gives back what is free by now.
    pub(super) fn look(&self, process: &Process) {
        if !self.any() {
            return;
        }
        self.give_back_if(process, |freed| {
            let Some(event) = freed.event else { return false };
            // SAFETY: an event of ours, whose context lives.
            let passed = unsafe { real::cuEventQuery(event) } != CUDA_ERROR_NOT_READY;
            if passed {
                // SAFETY: likewise, and nobody uses it any more.
                unsafe { real::cuEventDestroy_v2(event) };
            }
            passed
        });
    }

    /// The context is gone, and everything in its streams.
    pub(super) fn forget_context(&self, process: &Process, context: CUcontext) {
        self.give_back_if(process, |freed| freed.context == context);
    }

    fn give_back_if(&self, process: &Process, mut free: impl FnMut(&Freed) -> bool) {
        let mut freed = locked(&self.freed);
        freed.retain(|one| {
            let free = free(one);
            if free {
                give_back(process, &one.what);
            }
            !free
        });
        self.count.store(freed.len(), Relaxed);
    }
}

fn give_back(process: &Process, what: &What) {
    match what {
        What::Bytes(gpu, bytes) => process.region.release(*gpu, *bytes),
        What::Piece(piece) => {
            if process.memory.small.freed(piece) {
                process.region.release(piece.gpu, BLOCK);
            }
        }
    }
}

/// An event in the stream.
fn mark(stream: CUstream, variant: Variant) -> Option<CUevent> {
    let mut event = std::ptr::null_mut();
    // SAFETY: a handle to fill in.
    if unsafe { real::cuEventCreate(&mut event, CU_EVENT_DISABLE_TIMING) } != CUDA_SUCCESS {
        return None;
    }
    let recorded = match variant {
        // SAFETY: an event of ours, and the stream that the program gave.
        Variant::Plain => unsafe { real::cuEventRecord(event, stream) },
        // SAFETY: likewise.
        Variant::PerThread => unsafe { real::cuEventRecord_ptsz(event, stream) },
    };
    if recorded == CUDA_SUCCESS {
        return Some(event);
    }
    // SAFETY: an event of ours that nobody uses.
    unsafe { real::cuEventDestroy_v2(event) };
    None
}
