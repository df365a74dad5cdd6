//! Contexts: each takes memory of the card before a program has allocated anything, and takes what is in it along when it
//! goes.
//!
//! How much one takes the container's owner has measured. Whether a primary context lives, the driver is asked.
#![allow(unsafe_code)]

use super::allocations::Table;
use super::{Reserved, answer, checked, granted, locked, of_device};
use crate::driver::cuda as real;
use crate::hook::hooks;
use crate::process::{self, Process};
use partage_driver_api::cuda::*;
use std::sync::Mutex;

/// The contexts of this process.
#[derive(Default)]
pub(super) struct Contexts {
    live: Mutex<Table<Context>>,
    /// One thread at a time changes whether a primary context lives.
    primary: Mutex<Table<Primary>>,
    /// The devices of green contexts.
    green: Mutex<Table<CUdevice>>,
}

/// A context that lives.
#[derive(Clone, Copy)]
struct Context {
    gpu: usize,
    device: CUdevice,
    /// What was taken for it.
    bytes: u64,
    /// How often it was made or attached, less how often it was let go.
    attached: u32,
}

/// A device's primary context.
#[derive(Clone, Copy)]
struct Primary {
    handle: CUcontext,
    /// How often it was retained, less how often it was released.
    retained: u64,
}

// SAFETY: a handle of the driver's, which is good for every thread.
unsafe impl Send for Primary {}

fn key(context: CUcontext) -> u64 {
    context.addr() as u64
}

impl Contexts {
    /// The device of a context, and its GPU.
    pub(super) fn place(&self, context: CUcontext) -> Option<(CUdevice, usize)> {
        locked(&self.live).get(&key(context)).map(|context| (context.device, context.gpu))
    }

    /// The context that a context goes with: itself, or the primary one of a green one's device, which must be current.
    pub(super) fn owner(&self, context: CUcontext) -> CUcontext {
        let mut device = 0;
        // SAFETY: a number to fill in.
        if self.place(context).is_some() || unsafe { real::cuCtxGetDevice(&mut device) } != CUDA_SUCCESS {
            return context;
        }
        let primary = locked(&self.primary).get(&device.unsigned_abs().into()).map(|primary| primary.handle);
        primary.unwrap_or(context)
    }
}

/// The thread's context.
pub(super) fn current() -> Result<CUcontext, CUresult> {
    let mut context = std::ptr::null_mut();
    // SAFETY: a handle to fill in.
    checked(unsafe { real::cuCtxGetCurrent(&mut context) })?;
    if context.is_null() { Err(CUDA_ERROR_INVALID_CONTEXT) } else { Ok(context) }
}

/// Makes a context, with the driver's call.
fn create(
    process: &Process,
    device: CUdevice,
    call: impl FnOnce(&mut CUcontext) -> CUresult,
) -> Result<CUcontext, CUresult> {
    let gpu = of_device(process, device)?;
    let reserved = Reserved::take(process, gpu, process.region.limits(gpu).context())?;
    let mut context = std::ptr::null_mut();
    checked(call(&mut context))?;
    process::current_context::forget();
    let new = Context { gpu, device, bytes: reserved.keep(), attached: 1 };
    locked(&process.memory.contexts.live).insert(key(context), new);
    Ok(context)
}

/// Ends a context, with the driver's call.
fn destroy(context: CUcontext, call: impl FnOnce() -> CUresult) -> CUresult {
    let Some(process) = process::attached() else { return call() };
    process.throttle.forget_context(context);
    process::current_context::forget();
    let _going = process.memory.later.going(context);
    let answer = call();
    if answer == CUDA_SUCCESS {
        gone(process, context);
    }
    answer
}

/// The driver has ended a context.
fn gone(process: &Process, context: CUcontext) {
    let Some(ended) = locked(&process.memory.contexts.live).remove(&key(context)) else { return };
    process.memory.forget_context(process, ended.gpu, context);
    if ended.bytes > 0 {
        process.region.release(ended.gpu, ended.bytes);
    }
}

fn is_active(device: CUdevice) -> bool {
    let (mut flags, mut active) = (0, 0);
    // SAFETY: numbers to fill in.
    let answer = unsafe { real::cuDevicePrimaryCtxGetState(device, &mut flags, &mut active) };
    answer == CUDA_SUCCESS && active != 0
}

/// A device's primary context, which lives.
fn handle_of_primary(device: CUdevice) -> Option<CUcontext> {
    let mut context = std::ptr::null_mut();
    // SAFETY: a handle to fill in.
    if unsafe { real::cuDevicePrimaryCtxRetain(&mut context, device) } != CUDA_SUCCESS {
        return None;
    }
    // SAFETY: it was retained above, and somebody else's hold is on it.
    unsafe { real::cuDevicePrimaryCtxRelease_v2(device) };
    Some(context)
}

/// One more hold on a device's primary context, with the driver's call: the first makes it.
fn retain(process: &Process, device: CUdevice, call: impl FnOnce() -> CUresult) -> Result<(), CUresult> {
    let gpu = of_device(process, device)?;
    let contexts = &process.memory.contexts;
    let mut primary = locked(&contexts.primary);
    // A device's number is small and not negative: it is one that the driver knows.
    let at = device.unsigned_abs().into();
    if let Some(known) = primary.get_mut(&at) {
        checked(call())?;
        known.retained += 1;
        return Ok(());
    }
    let reserved = Reserved::take(process, gpu, process.region.limits(gpu).context())?;
    checked(call())?;
    if let Some(handle) = handle_of_primary(device) {
        primary.insert(at, Primary { handle, retained: 1 });
        let new = Context { gpu, device, bytes: reserved.keep(), attached: 1 };
        locked(&contexts.live).insert(key(handle), new);
    }
    Ok(())
}

/// One hold less, or none any more: the last ends it.
fn release(device: CUdevice, all: bool, call: impl FnOnce() -> CUresult) -> CUresult {
    let Some(process) = process::attached() else { return call() };
    let mut primary = locked(&process.memory.contexts.primary);
    let at = device.unsigned_abs().into();
    let known = primary.get(&at).copied();
    if let Some(known) = known.filter(|known| all || known.retained <= 1) {
        process.throttle.forget_context(known.handle);
    }
    let _going = known.map(|known| process.memory.later.going(known.handle));
    let answer = call();
    let Some(known) = known.filter(|_| answer == CUDA_SUCCESS) else { return answer };
    if is_active(device) {
        let retained = if all { 0 } else { known.retained.saturating_sub(1) };
        primary.insert(at, Primary { retained, ..known });
    } else {
        primary.remove(&at);
        gone(process, known.handle);
    }
    answer
}

/// Makes a context where the program wants it.
macro_rules! create {
    ($context:ident, $device:ident, $next:ident($($before:expr),*; $($after:expr),*)) => {{
        if $context.is_null() {
            // SAFETY: the program's promise.
            return unsafe { $next($context, $($before,)* $($after),*) };
        }
        granted(
            |process| {
                // SAFETY: a handle to fill in, and the program's promise.
                let made = create(process, $device, |context| unsafe { $next(context, $($before,)* $($after),*) })?;
                // SAFETY: not null, and the program's to write.
                unsafe { answer($context, made) };
                Ok(())
            })
    }};
}

hooks! { cuda;
    fn cuCtxCreate(context: *mut CUcontext, flags: u32, device: CUdevice) |next, _variant| {
        create!(context, device, next(; flags, device))
    }

    fn cuCtxCreate_v2(context: *mut CUcontext, flags: u32, device: CUdevice) |next, _variant| {
        create!(context, device, next(; flags, device))
    }

    fn cuCtxCreate_v3(
        context: *mut CUcontext,
        params_array: *mut CUexecAffinityParam,
        num_params: i32,
        flags: u32,
        device: CUdevice,
    ) |next, _variant| {
        create!(context, device, next(params_array, num_params; flags, device))
    }

    fn cuGLCtxCreate(context: *mut CUcontext, flags: u32, device: CUdevice) |next, _variant| {
        create!(context, device, next(; flags, device))
    }

    fn cuGLCtxCreate_v2(context: *mut CUcontext, flags: u32, device: CUdevice) |next, _variant| {
        create!(context, device, next(; flags, device))
    }

    fn cuVDPAUCtxCreate(
        context: *mut CUcontext,
        flags: u32,
        device: CUdevice,
        vdp_device: VdpDevice,
        vdp_get_proc_address: *mut c_void,
    ) |next, _variant| {
        create!(context, device, next(; flags, device, vdp_device, vdp_get_proc_address))
    }

    fn cuVDPAUCtxCreate_v2(
        context: *mut CUcontext,
        flags: u32,
        device: CUdevice,
        vdp_device: VdpDevice,
        vdp_get_proc_address: *mut c_void,
    ) |next, _variant| {
        create!(context, device, next(; flags, device, vdp_device, vdp_get_proc_address))
    }

    fn cuCtxDestroy(context: CUcontext) |next, _variant| {
        // SAFETY: the program's promise.
        destroy(context, || unsafe { next(context) })
    }

    fn cuCtxDestroy_v2(context: CUcontext) |next, _variant| {
        // SAFETY: the program's promise.
        destroy(context, || unsafe { next(context) })
    }

    fn cuCtxAttach(context: *mut CUcontext, flags: u32) |next, _variant| {
        // SAFETY: the program's promise.
        let answer = unsafe { next(context, flags) };
        if answer == CUDA_SUCCESS
            && !context.is_null()
            && let Some(process) = process::attached()
        {
            // SAFETY: not null, and the driver has just written there.
            let attached = key(unsafe { *context });
            if let Some(own) = locked(&process.memory.contexts.live).get_mut(&attached) {
                own.attached = own.attached.saturating_add(1);
            }
        }
        answer
    }

    fn cuCtxDetach(context: CUcontext) |next, _variant| {
        let last = process::attached().is_none_or(|process| {
            let mut live = locked(&process.memory.contexts.live);
            live.get_mut(&key(context)).is_none_or(|own| {
                own.attached = own.attached.saturating_sub(1);
                own.attached == 0
            })
        });
        if last {
            // SAFETY: the program's promise.
            return destroy(context, || unsafe { next(context) });
        }
        // SAFETY: the program's promise.
        unsafe { next(context) }
    }

    fn cuDevicePrimaryCtxRetain(context: *mut CUcontext, device: CUdevice) |next, _variant| {
        if context.is_null() {
            // SAFETY: the program's promise.
            return unsafe { next(context, device) };
        }
        granted(
            // SAFETY: the program's promise.
            |process| retain(process, device, || unsafe { next(context, device) }))
    }

    fn cuDevicePrimaryCtxRelease(device: CUdevice) |next, _variant| {
        // SAFETY: the program's promise.
        release(device, false, || unsafe { next(device) })
    }

    fn cuDevicePrimaryCtxRelease_v2(device: CUdevice) |next, _variant| {
        // SAFETY: the program's promise.
        release(device, false, || unsafe { next(device) })
    }

    fn cuDevicePrimaryCtxReset(device: CUdevice) |next, _variant| {
        // SAFETY: the program's promise.
        release(device, true, || unsafe { next(device) })
    }

    fn cuDevicePrimaryCtxReset_v2(device: CUdevice) |next, _variant| {
        // SAFETY: the program's promise.
        release(device, true, || unsafe { next(device) })
    }

    /// A part of a primary context, which it holds.
    fn cuGreenCtxCreate(
        context: *mut CUgreenCtx,
        descriptor: CUdevResourceDesc,
        device: CUdevice,
        flags: u32,
    ) |next, _variant| {
        if context.is_null() {
            // SAFETY: the program's promise.
            return unsafe { next(context, descriptor, device, flags) };
        }
        granted(
            |process| {
                // SAFETY: the program's promise.
                retain(process, device, || unsafe { next(context, descriptor, device, flags) })?;
                // SAFETY: not null, and the driver has just written there.
                let made = unsafe { *context }.addr() as u64;
                locked(&process.memory.contexts.green).insert(made, device);
                Ok(())
            })
    }

    fn cuGreenCtxDestroy(context: CUgreenCtx) |next, _variant| {
        let own = context.addr() as u64;
        let green = process::attached().map(|process| &process.memory.contexts.green);
        let device = green.and_then(|green| locked(green).get(&own).copied());
        let (Some(green), Some(device)) = (green, device) else {
            // SAFETY: the program's promise.
            return unsafe { next(context) };
        };
        // SAFETY: the program's promise.
        let answer = release(device, false, || unsafe { next(context) });
        if answer == CUDA_SUCCESS {
            locked(green).remove(&own);
        }
        answer
    }
}
