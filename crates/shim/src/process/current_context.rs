//! The GPU of the calling thread's context in a process with several GPUs: cached, because querying the driver would
//! add a call to every launch.
//!
//! Hooks on the calls that change a thread's context update the cache. The CUDA runtime has other ways to change it, so
//! the driver is queried again now and then.
#![allow(unsafe_code)]

use crate::driver::cuda as driver;
use crate::hook::hooks;
use crate::process::{self, Process};
use partage_driver_api::cuda::*;
use std::cell::Cell;

/// Launches after which the driver is queried again.
const LAUNCHES_PER_QUERY: u16 = 64;

#[derive(Clone, Copy)]
struct CachedGpu {
    gpu: Option<u8>,
    remaining: u16,
}

thread_local! {
    static CACHED_GPU: Cell<CachedGpu> = const { Cell::new(CachedGpu { gpu: None, remaining: 0 }) };
}

/// Clears the cache: the thread's context has changed in an unknown way.
pub(crate) fn forget() {
    // The thread-local is gone in a thread that is ending.
    let _ = CACHED_GPU.try_with(|current| current.set(CachedGpu { gpu: None, remaining: 0 }));
}

/// Returns the GPU of the thread's context, from the cache or by `query`.
pub(super) fn gpu(query: impl FnOnce() -> Option<usize>) -> Option<usize> {
    let known = CACHED_GPU.try_with(Cell::get).ok()?;
    if known.remaining > 0 {
        let _ =
            CACHED_GPU.try_with(|current| current.set(CachedGpu { remaining: known.remaining - 1, ..known }));
        return known.gpu.map(usize::from);
    }
    let gpu = query()?;
    remember(gpu);
    Some(gpu)
}

fn remember(gpu: usize) {
    let gpu = u8::try_from(gpu).ok();
    let _ = CACHED_GPU.try_with(|current| current.set(CachedGpu { gpu, remaining: LAUNCHES_PER_QUERY }));
}

/// Updates the cache: the thread has this context now.
fn update_cache(process: &Process, context: CUcontext) {
    match process.memory.gpu_of(context) {
        Some(gpu) => remember(gpu),
        None => forget(),
    }
}

fn context_changed_to(answer: CUresult, context: CUcontext) -> CUresult {
    if answer == CUDA_SUCCESS
        && let Some(process) = process::attached()
    {
        update_cache(process, context);
    }
    answer
}

/// Returns whether the cache is needed: not if there is only one device.
fn needed() -> bool {
    process::attached().is_some_and(|process| process.devices.only().is_none())
}

hooks! { cuda;
    fn cuCtxSetCurrent(context: CUcontext) |next, _variant| if needed {
        // SAFETY: the application's arguments, passed on unchanged under the driver function's own contract.
        context_changed_to(unsafe { next(context) }, context)
    }

    fn cuCtxPushCurrent(context: CUcontext) |next, _variant| if needed {
        // SAFETY: the application's arguments, passed on unchanged under the driver function's own contract.
        context_changed_to(unsafe { next(context) }, context)
    }

    fn cuCtxPushCurrent_v2(context: CUcontext) |next, _variant| if needed {
        // SAFETY: the application's arguments, passed on unchanged under the driver function's own contract.
        context_changed_to(unsafe { next(context) }, context)
    }

    fn cuCtxPopCurrent(context: *mut CUcontext) |next, _variant| if needed {
        // SAFETY: the application's arguments, passed on unchanged under the driver function's own contract.
        let answer = unsafe { next(context) };
        context_changed_to(answer, current_context())
    }

    fn cuCtxPopCurrent_v2(context: *mut CUcontext) |next, _variant| if needed {
        // SAFETY: the application's arguments, passed on unchanged under the driver function's own contract.
        let answer = unsafe { next(context) };
        context_changed_to(answer, current_context())
    }
}

fn current_context() -> CUcontext {
    let mut context = std::ptr::null_mut();
    // SAFETY: the pointer is to a local variable, which stays null if the thread has no context.
    let _ = unsafe { driver::cuCtxGetCurrent(&mut context) };
    context
}
