//! Memory that is freed in stream order: it is counted until the stream has reached the free.
#![allow(unsafe_code)]

use super::contexts;
use super::suballocation::FreeingPiece;
use super::{BLOCK_BYTES, lock};
use crate::driver::cuda as driver;
use crate::hook::StreamVariant;
use crate::process::Process;
use crate::stream_event;
use partage_driver_api::cuda::*;
use std::sync::Mutex;
use std::sync::atomic::{AtomicUsize, Ordering::Relaxed};

/// Memory that will be free.
pub(super) enum FreedMemory {
    /// This many bytes of a GPU.
    Bytes(usize, u64),
    /// A piece of a shared block.
    FreeingPiece(FreeingPiece),
}

struct PendingFree {
    what: FreedMemory,
    context: CUcontext,
    /// The memory is free when this event has passed. Without an event it is free when the context is gone.
    event: Option<CUevent>,
}

// SAFETY: event and context handles of the driver may be used from every thread.
unsafe impl Send for PendingFree {}

/// Memory that was freed and may not be free yet.
#[derive(Default)]
pub(super) struct PendingFrees {
    list: Mutex<PendingFreeList>,
    /// Number of entries: most processes never have any.
    count: AtomicUsize,
}

#[derive(Default)]
struct PendingFreeList {
    freed: Vec<PendingFree>,
    /// Contexts that are being destroyed: the driver is no longer queried about their events.
    destroying: Vec<u64>,
}

/// A context that is being destroyed. If the call fails, its events are used again.
pub(super) struct ContextDestruction<'a> {
    pending_frees: &'a PendingFrees,
    context: u64,
}

impl Drop for ContextDestruction<'_> {
    fn drop(&mut self) {
        let mut list = lock(&self.pending_frees.list);
        if let Some(at) = list.destroying.iter().position(|&destroying| destroying == self.context) {
            list.destroying.swap_remove(at);
        }
    }
}

impl PendingFrees {
    /// Records memory that is free when the stream has reached this point.
    pub(super) fn add(&self, what: FreedMemory, stream: CUstream, variant: StreamVariant) {
        // Without a context no event can be created; a stream in which memory was freed belongs to one.
        let (context, event) = match contexts::current_context() {
            Ok(context) => (context, stream_event::record(stream, variant)),
            Err(_) => (context_of_stream(stream), None),
        };
        let mut list = lock(&self.list);
        list.freed.push(PendingFree { what, context, event });
        self.count.store(list.freed.len(), Relaxed);
    }

    /// Returns whether there are any entries.
    pub(super) fn has_any(&self) -> bool {
        self.count.load(Relaxed) > 0
    }

    /// Releases what is free by now. Not during a capture: querying an event might invalidate it.
    pub(super) fn release_finished(&self, process: &Process) {
        if !self.has_any() || process.throttle.is_capturing() {
            return;
        }
        self.release_if(process, |freed, destroying| {
            let Some(event) = freed.event.filter(|_| !destroying.contains(&key(freed.context))) else {
                return false;
            };
            // SAFETY: the event was created here, and its context exists: a thread that destroys one registers that
            // before, and waits for this lock.
            let passed = unsafe { driver::cuEventQuery(event) } == CUDA_SUCCESS;
            if passed {
                // SAFETY: the event was created here, its context exists, and it is not used any more.
                unsafe { driver::cuEventDestroy_v2(event) };
            }
            passed
        });
    }

    /// Registers that a context is about to be destroyed: until the outcome is known, its events are left alone.
    pub(super) fn begin_destroy(&self, context: CUcontext) -> ContextDestruction<'_> {
        lock(&self.list).destroying.push(key(context));
        ContextDestruction { pending_frees: self, context: key(context) }
    }

    /// Releases what was freed in a context that has been destroyed.
    pub(super) fn forget_context(&self, process: &Process, context: CUcontext) {
        self.release_if(process, |freed, _| freed.context == context);
    }

    fn release_if(&self, process: &Process, mut free: impl FnMut(&PendingFree, &[u64]) -> bool) {
        let mut list = lock(&self.list);
        let PendingFreeList { freed, destroying } = &mut *list;
        freed.retain(|one| {
            let free = free(one, destroying);
            if free {
                release(process, &one.what);
            }
            !free
        });
        self.count.store(freed.len(), Relaxed);
    }
}

fn key(context: CUcontext) -> u64 {
    context.addr() as u64
}

/// Returns the context of a stream; null if it cannot be determined.
fn context_of_stream(stream: CUstream) -> CUcontext {
    let mut context = std::ptr::null_mut();
    // SAFETY: the stream is the application's, which has just freed memory in it, and the pointer is to a local
    // variable.
    let answer = unsafe { driver::cuStreamGetCtx(stream, &mut context) };
    if answer == CUDA_SUCCESS { context } else { std::ptr::null_mut() }
}

fn release(process: &Process, what: &FreedMemory) {
    match what {
        FreedMemory::Bytes(gpu, bytes) => process.region.release(*gpu, *bytes),
        FreedMemory::FreeingPiece(piece) => {
            if process.memory.suballocations.finish_free(piece) {
                process.region.release(piece.gpu, BLOCK_BYTES);
            }
        }
    }
}
