//! The GPU of the calling thread's context, where a process has several: remembered, because asking the driver at every
//! launch would be a call more at every launch.
//!
//! The calls that change a thread's context are hooked to keep up. The CUDA runtime knows ways of its own to change it, so
//! the driver is asked again now and then.
#![allow(unsafe_code)]

use crate::driver::cuda as real;
use crate::hook::hooks;
use crate::process::{self, Process};
use partage_driver_api::cuda::*;
use std::cell::Cell;

/// Launches until the driver is asked again.
const TRUSTED: u16 = 64;

#[derive(Clone, Copy)]
struct Current {
    gpu: Option<u8>,
    trusted: u16,
}

thread_local! {
    static CURRENT: Cell<Current> = const { Cell::new(Current { gpu: None, trusted: 0 }) };
}

/// The thread's context has changed, nobody knows to which.
pub(crate) fn forget() {
    // A thread that is ending has no memory of its own any more.
    let _ = CURRENT.try_with(|current| current.set(Current { gpu: None, trusted: 0 }));
}

/// The GPU of the thread's context.
pub(super) fn gpu(ask: impl FnOnce() -> Option<usize>) -> Option<usize> {
    let known = CURRENT.try_with(Cell::get).ok()?;
    if known.trusted > 0 {
        let _ = CURRENT.try_with(|current| current.set(Current { trusted: known.trusted - 1, ..known }));
        return known.gpu.map(usize::from);
    }
    let gpu = ask()?;
    remember(gpu);
    Some(gpu)
}

fn remember(gpu: usize) {
    let gpu = u8::try_from(gpu).ok();
    let _ = CURRENT.try_with(|current| current.set(Current { gpu, trusted: TRUSTED }));
}

/// The thread has this context now.
fn changed(process: &Process, context: CUcontext) {
    match process.memory.gpu_of(context) {
        Some(gpu) => remember(gpu),
        None => forget(),
    }
}

fn changed_to(answer: CUresult, context: CUcontext) -> CUresult {
    if answer == CUDA_SUCCESS
        && let Some(process) = process::attached()
    {
        changed(process, context);
    }
    answer
}

/// Whether it matters: not where there is one device.
fn needed() -> bool {
    process::attached().is_some_and(|process| process.devices.only().is_none())
}

hooks! { cuda;
    fn cuCtxSetCurrent(context: CUcontext) |next, _variant| if needed {
        // SAFETY: the program's promise.
        changed_to(unsafe { next(context) }, context)
    }

    fn cuCtxPushCurrent(context: CUcontext) |next, _variant| if needed {
        // SAFETY: the program's promise.
        changed_to(unsafe { next(context) }, context)
    }

    fn cuCtxPushCurrent_v2(context: CUcontext) |next, _variant| if needed {
        // SAFETY: the program's promise.
        changed_to(unsafe { next(context) }, context)
    }

    fn cuCtxPopCurrent(context: *mut CUcontext) |next, _variant| if needed {
        // SAFETY: the program's promise.
        let answer = unsafe { next(context) };
        changed_to(answer, current())
    }

    fn cuCtxPopCurrent_v2(context: *mut CUcontext) |next, _variant| if needed {
        // SAFETY: the program's promise.
        let answer = unsafe { next(context) };
        changed_to(answer, current())
    }
}

fn current() -> CUcontext {
    let mut context = std::ptr::null_mut();
    // SAFETY: a handle to fill in; without a context it stays null.
    let _ = unsafe { real::cuCtxGetCurrent(&mut context) };
    context
}
