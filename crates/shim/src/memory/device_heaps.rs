//! What kernels allocate and print into lies on the card, as much as the program says.
//!
//! A context has some of it from the beginning, which counts with it. Only what is beyond that is taken here, at once and as
//! long as the context lives: when the driver takes it is not to be known.
#![allow(unsafe_code)]

use super::{Reserved, checked, contexts, granted, here, locked};
use crate::driver::cuda as real;
use crate::hook::hooks;
use crate::process::Process;
use partage_driver_api::cuda::*;
use partage_region::UNIT;
use std::sync::Mutex;

/// What was set, by context. Few programs set any.
#[derive(Default)]
pub(super) struct Heaps {
    all: Mutex<Vec<Heap>>,
}

struct Heap {
    context: u64,
    /// The context that it goes with.
    owner: u64,
    limit: CUlimit,
    gpu: usize,
    /// What the context had from the beginning.
    initial: u64,
    /// What is taken for the rest.
    bytes: u64,
}

impl Heaps {
    /// The context is gone, and what was set in it.
    pub(super) fn forget_context(&self, process: &Process, context: CUcontext) {
        let context = context.addr() as u64;
        locked(&self.all).retain(|heap| {
            let gone = heap.owner == context;
            if gone && heap.bytes > 0 {
                process.region.release(heap.gpu, heap.bytes);
            }
            !gone
        });
    }
}

/// Sets one, with the driver's call.
fn set(
    process: &Process,
    limit: CUlimit,
    value: u64,
    call: impl FnOnce() -> CUresult,
) -> Result<(), CUresult> {
    let gpu = here(process)?;
    let current = contexts::current()?;
    let context = current.addr() as u64;
    let owner = process.memory.contexts.owner(current).addr() as u64;
    // Held while the driver works: what was there before must be known.
    let mut all = locked(&process.memory.heaps.all);
    let at = match all.iter().position(|heap| heap.context == context && heap.limit == limit) {
        Some(at) => at,
        None => {
            let mut initial = 0;
            // SAFETY: a number to fill in.
            checked(unsafe { real::cuCtxGetLimit(&mut initial, limit) })?;
            all.push(Heap { context, owner, limit, gpu, initial: initial as u64, bytes: 0 });
            all.len() - 1
        }
    };
    let Some(heap) = all.get_mut(at) else { return checked(call()) };
    let beyond = value.saturating_sub(heap.initial).checked_next_multiple_of(UNIT).unwrap_or(u64::MAX);
    let more = Reserved::take(process, gpu, beyond.saturating_sub(heap.bytes))?;
    checked(call())?;
    heap.bytes += more.keep();
    if heap.bytes > beyond {
        process.region.release(gpu, heap.bytes - beyond);
        heap.bytes = beyond;
    }
    Ok(())
}

hooks! { cuda;
    fn cuCtxSetLimit(limit: CUlimit, value: usize) |next, _variant| {
        if limit != CU_LIMIT_MALLOC_HEAP_SIZE && limit != CU_LIMIT_PRINTF_FIFO_SIZE {
            // SAFETY: the program's promise.
            return unsafe { next(limit, value) };
        }
        granted(
            // SAFETY: the program's promise.
            |process| set(process, limit, value as u64, || unsafe { next(limit, value) }))
    }
}
