//! What is freed in a stream's order: it counts until the stream has come to it.
#![allow(unsafe_code)]

use super::contexts;
use super::suballocation::Piece;
use super::{BLOCK, locked};
use crate::driver::cuda as real;
use crate::hook::Variant;
use crate::process::Process;
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
    list: Mutex<List>,
    /// How many there are: most processes never have any.
    count: AtomicUsize,
}

#[derive(Default)]
struct List {
    freed: Vec<Freed>,
    /// Contexts that are being destroyed: the driver is not asked about their events any more.
    going: Vec<u64>,
}

/// A context that is being destroyed. If it lives on, so do its events.
pub(super) struct Going<'a> {
    later: &'a Later,
    context: u64,
}

impl Drop for Going<'_> {
    fn drop(&mut self) {
        let mut list = locked(&self.later.list);
        if let Some(at) = list.going.iter().position(|&going| going == self.context) {
            list.going.swap_remove(at);
        }
    }
}

impl Later {
    /// Notes what is free when the stream has come to here.
    pub(super) fn add(&self, what: What, stream: CUstream, variant: Variant) {
        // Without a context there is no event; a stream that could be freed in is of one.
        let (context, event) = match contexts::current() {
            Ok(context) => (context, mark(stream, variant)),
            Err(_) => (of_stream(stream), None),
        };
        let mut list = locked(&self.list);
        list.freed.push(Freed { what, context, event });
        self.count.store(list.freed.len(), Relaxed);
    }

    /// Whether there is anything.
    pub(super) fn any(&self) -> bool {
        self.count.load(Relaxed) > 0
    }

    /// Gives back what is free by now. Not while a stream is being captured: a question about an event may spoil that.
    pub(super) fn look(&self, process: &Process) {
        if !self.any() || process.throttle.is_capturing() {
            return;
        }
        self.give_back_if(process, |freed, going| {
            let Some(event) = freed.event.filter(|_| !going.contains(&key(freed.context))) else {
                return false;
            };
            // SAFETY: an event of ours, whose context lives: whoever destroys one says so before, and waits for this lock.
            let passed = unsafe { real::cuEventQuery(event) } == CUDA_SUCCESS;
            if passed {
                // SAFETY: likewise, and nobody uses it any more.
                unsafe { real::cuEventDestroy_v2(event) };
            }
            passed
        });
    }

    /// A context is about to be destroyed: until it is known whether it was, its events are left alone.
    pub(super) fn going(&self, context: CUcontext) -> Going<'_> {
        locked(&self.list).going.push(key(context));
        Going { later: self, context: key(context) }
    }

    /// The context is gone, and everything in its streams.
    pub(super) fn forget_context(&self, process: &Process, context: CUcontext) {
        self.give_back_if(process, |freed, _| freed.context == context);
    }

    fn give_back_if(&self, process: &Process, mut free: impl FnMut(&Freed, &[u64]) -> bool) {
        let mut list = locked(&self.list);
        let List { freed, going } = &mut *list;
        freed.retain(|one| {
            let free = free(one, going);
            if free {
                give_back(process, &one.what);
            }
            !free
        });
        self.count.store(freed.len(), Relaxed);
    }
}

fn key(context: CUcontext) -> u64 {
    context.addr() as u64
}

/// The context of a stream; null if it cannot be told.
fn of_stream(stream: CUstream) -> CUcontext {
    let mut context = std::ptr::null_mut();
    // SAFETY: the program's stream, in which it has just freed something, and a handle to fill in.
    let answer = unsafe { real::cuStreamGetCtx(stream, &mut context) };
    if answer == CUDA_SUCCESS { context } else { std::ptr::null_mut() }
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
