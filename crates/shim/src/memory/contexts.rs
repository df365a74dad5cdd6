//! Contexts: each takes GPU memory before a program has allocated anything, and frees what is in it when it is
//! destroyed.
//!
//! The daemon has measured how much a context takes. Whether a primary context is active is queried from the driver.
#![allow(unsafe_code)]

use super::allocations::HandleMap;
use super::{Reservation, checked, gpu_of_device, lock, with_grant, write_result};
use crate::driver::cuda as driver;
use crate::hook::hooks;
use crate::process::{self, Process};
use partage_driver_api::cuda::*;
use std::sync::Mutex;

/// The contexts of this process.
#[derive(Default)]
pub(super) struct Contexts {
    live: Mutex<HandleMap<ContextRecord>>,
    /// Ensures that one thread at a time changes whether a primary context is active.
    primary: Mutex<HandleMap<PrimaryContext>>,
    /// Devices of green contexts.
    green: Mutex<HandleMap<CUdevice>>,
}

/// A context that exists, and the GPU memory that is reserved for it.
#[derive(Clone, Copy)]
struct ContextRecord {
    gpu: usize,
    device: CUdevice,
    /// Bytes reserved for it.
    bytes: u64,
    /// Number of creations and attaches, minus the number of detaches.
    attached: u32,
}

/// A device's primary context.
#[derive(Clone, Copy)]
struct PrimaryContext {
    handle: CUcontext,
    /// Number of retains, minus the number of releases.
    retained: u64,
}

// SAFETY: context handles of the driver may be used from every thread.
unsafe impl Send for PrimaryContext {}

fn key(context: CUcontext) -> u64 {
    context.addr() as u64
}

impl Contexts {
    /// Returns the device of a context, and its GPU.
    pub(super) fn location(&self, context: CUcontext) -> Option<(CUdevice, usize)> {
        lock(&self.live).get(&key(context)).map(|context| (context.device, context.gpu))
    }

    /// Returns the context that owns a context: itself, or the primary context of a green context's device, which must
    /// be current.
    pub(super) fn owning_context(&self, context: CUcontext) -> CUcontext {
        let mut device = 0;
        // SAFETY: the pointer is to a local variable, which the driver fills in.
        if self.location(context).is_some() || unsafe { driver::cuCtxGetDevice(&mut device) } != CUDA_SUCCESS
        {
            return context;
        }
        let primary = lock(&self.primary).get(&device.unsigned_abs().into()).map(|primary| primary.handle);
        primary.unwrap_or(context)
    }
}

/// Returns the thread's context.
pub(super) fn current_context() -> Result<CUcontext, CUresult> {
    let mut context = std::ptr::null_mut();
    // SAFETY: the pointer is to a local variable, which the driver fills in.
    checked(unsafe { driver::cuCtxGetCurrent(&mut context) })?;
    if context.is_null() { Err(CUDA_ERROR_INVALID_CONTEXT) } else { Ok(context) }
}

/// Creates a context, with the driver's call.
fn create(
    process: &Process,
    device: CUdevice,
    call: impl FnOnce(&mut CUcontext) -> CUresult,
) -> Result<CUcontext, CUresult> {
    let gpu = gpu_of_device(process, device)?;
    let reserved = Reservation::take(process, gpu, process.region.limits(gpu).context())?;
    let mut context = std::ptr::null_mut();
    checked(call(&mut context))?;
    process::current_context::forget();
    let new = ContextRecord { gpu, device, bytes: reserved.keep(), attached: 1 };
    lock(&process.memory.contexts.live).insert(key(context), new);
    Ok(context)
}

/// Destroys a context, with the driver's call.
fn destroy(context: CUcontext, call: impl FnOnce() -> CUresult) -> CUresult {
    let Some(process) = process::attached() else { return call() };
    process.throttle.forget_context(context);
    process::current_context::forget();
    let _destruction = process.memory.pending_frees.begin_destroy(context);
    let answer = call();
    if answer == CUDA_SUCCESS {
        context_destroyed(process, context);
    }
    answer
}

/// Releases what belonged to a context that the driver has destroyed.
fn context_destroyed(process: &Process, context: CUcontext) {
    process.throttle.context_destroyed(process, context);
    let Some(ended) = lock(&process.memory.contexts.live).remove(&key(context)) else { return };
    process.memory.forget_context(process, ended.gpu, context);
    if ended.bytes > 0 {
        process.region.release(ended.gpu, ended.bytes);
    }
}

fn is_active(device: CUdevice) -> bool {
    let (mut flags, mut active) = (0, 0);
    // SAFETY: the pointers are to local variables, which the driver fills in.
    let answer = unsafe { driver::cuDevicePrimaryCtxGetState(device, &mut flags, &mut active) };
    answer == CUDA_SUCCESS && active != 0
}

/// Returns the handle of a device's primary context, which must be active.
fn primary_handle(device: CUdevice) -> Option<CUcontext> {
    let mut context = std::ptr::null_mut();
    // SAFETY: the pointer is to a local variable, which the driver fills in.
    if unsafe { driver::cuDevicePrimaryCtxRetain(&mut context, device) } != CUDA_SUCCESS {
        return None;
    }
    // SAFETY: it was retained above, and the application's own reference keeps it alive.
    unsafe { driver::cuDevicePrimaryCtxRelease_v2(device) };
    Some(context)
}

/// Retains a device's primary context, with the driver's call: the first reference creates it.
fn retain_primary(
    process: &Process,
    device: CUdevice,
    call: impl FnOnce() -> CUresult,
) -> Result<(), CUresult> {
    let gpu = gpu_of_device(process, device)?;
    let contexts = &process.memory.contexts;
    let mut primary = lock(&contexts.primary);
    // A device's index is small and not negative, because the driver knows it.
    let at = device.unsigned_abs().into();
    if let Some(known) = primary.get_mut(&at) {
        checked(call())?;
        known.retained += 1;
        return Ok(());
    }
    let reserved = Reservation::take(process, gpu, process.region.limits(gpu).context())?;
    checked(call())?;
    if let Some(handle) = primary_handle(device) {
        primary.insert(at, PrimaryContext { handle, retained: 1 });
        let new = ContextRecord { gpu, device, bytes: reserved.keep(), attached: 1 };
        lock(&contexts.live).insert(key(handle), new);
    }
    Ok(())
}

/// Releases one reference to a primary context, or all of them: the last one destroys it.
fn release_primary(device: CUdevice, all: bool, call: impl FnOnce() -> CUresult) -> CUresult {
    let Some(process) = process::attached() else { return call() };
    let mut primary = lock(&process.memory.contexts.primary);
    let at = device.unsigned_abs().into();
    let known = primary.get(&at).copied();
    if let Some(known) = known.filter(|known| all || known.retained <= 1) {
        process.throttle.forget_context(known.handle);
    }
    let _destruction = known.map(|known| process.memory.pending_frees.begin_destroy(known.handle));
    let answer = call();
    let Some(known) = known.filter(|_| answer == CUDA_SUCCESS) else { return answer };
    if is_active(device) {
        let retained = if all { 0 } else { known.retained.saturating_sub(1) };
        primary.insert(at, PrimaryContext { retained, ..known });
    } else {
        primary.remove(&at);
        context_destroyed(process, known.handle);
    }
    answer
}

/// Creates a context and writes its handle for the application.
macro_rules! create {
    ($context:ident, $device:ident, $next:ident($($before:expr),*; $($after:expr),*)) => {{
        if $context.is_null() {
            // SAFETY: the application's arguments, passed on unchanged under the driver function's own contract.
            return unsafe { $next($context, $($before,)* $($after),*) };
        }
        with_grant(
            |process| {
                // SAFETY: the output pointer is valid for writes; the other arguments are the application's, unchanged.
                let made = create(process, $device, |context| unsafe { $next(context, $($before,)* $($after),*) })?;
                // SAFETY: not null, and the application passed it for the driver to write the result to.
                unsafe { write_result($context, made) };
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
        // SAFETY: the application's arguments, passed on unchanged under the driver function's own contract.
        destroy(context, || unsafe { next(context) })
    }

    fn cuCtxDestroy_v2(context: CUcontext) |next, _variant| {
        // SAFETY: the application's arguments, passed on unchanged under the driver function's own contract.
        destroy(context, || unsafe { next(context) })
    }

    fn cuCtxAttach(context: *mut CUcontext, flags: u32) |next, _variant| {
        // SAFETY: the application's arguments, passed on unchanged under the driver function's own contract.
        let answer = unsafe { next(context, flags) };
        if answer == CUDA_SUCCESS
            && !context.is_null()
            && let Some(process) = process::attached()
        {
            // SAFETY: not null, and the call succeeded, so the driver has written a handle there.
            let attached = key(unsafe { *context });
            if let Some(own) = lock(&process.memory.contexts.live).get_mut(&attached) {
                own.attached = own.attached.saturating_add(1);
            }
        }
        answer
    }

    fn cuCtxDetach(context: CUcontext) |next, _variant| {
        let last = process::attached().is_none_or(|process| {
            let mut live = lock(&process.memory.contexts.live);
            live.get_mut(&key(context)).is_none_or(|own| {
                own.attached = own.attached.saturating_sub(1);
                own.attached == 0
            })
        });
        if last {
            // SAFETY: the application's arguments, passed on unchanged under the driver function's own contract.
            return destroy(context, || unsafe { next(context) });
        }
        // SAFETY: the application's arguments, passed on unchanged under the driver function's own contract.
        unsafe { next(context) }
    }

    fn cuDevicePrimaryCtxRetain(context: *mut CUcontext, device: CUdevice) |next, _variant| {
        if context.is_null() {
            // SAFETY: the application's arguments, passed on unchanged under the driver function's own contract.
            return unsafe { next(context, device) };
        }
        with_grant(
            // SAFETY: the application's arguments, passed on unchanged under the driver function's own contract.
            |process| retain_primary(process, device, || unsafe { next(context, device) }))
    }

    fn cuDevicePrimaryCtxRelease(device: CUdevice) |next, _variant| {
        // SAFETY: the application's arguments, passed on unchanged under the driver function's own contract.
        release_primary(device, false, || unsafe { next(device) })
    }

    fn cuDevicePrimaryCtxRelease_v2(device: CUdevice) |next, _variant| {
        // SAFETY: the application's arguments, passed on unchanged under the driver function's own contract.
        release_primary(device, false, || unsafe { next(device) })
    }

    fn cuDevicePrimaryCtxReset(device: CUdevice) |next, _variant| {
        // SAFETY: the application's arguments, passed on unchanged under the driver function's own contract.
        release_primary(device, true, || unsafe { next(device) })
    }

    fn cuDevicePrimaryCtxReset_v2(device: CUdevice) |next, _variant| {
        // SAFETY: the application's arguments, passed on unchanged under the driver function's own contract.
        release_primary(device, true, || unsafe { next(device) })
    }

    /// A green context is part of a primary context, which it retains.
    fn cuGreenCtxCreate(
        context: *mut CUgreenCtx,
        descriptor: CUdevResourceDesc,
        device: CUdevice,
        flags: u32,
    ) |next, _variant| {
        if context.is_null() {
            // SAFETY: the application's arguments, passed on unchanged under the driver function's own contract.
            return unsafe { next(context, descriptor, device, flags) };
        }
        with_grant(
            |process| {
                // SAFETY: the application's arguments, passed on unchanged under the driver function's own contract.
                retain_primary(process, device, || unsafe { next(context, descriptor, device, flags) })?;
                // SAFETY: not null, and the call succeeded, so the driver has written a handle there.
                let made = unsafe { *context }.addr() as u64;
                lock(&process.memory.contexts.green).insert(made, device);
                Ok(())
            })
    }

    fn cuGreenCtxDestroy(context: CUgreenCtx) |next, _variant| {
        let own = context.addr() as u64;
        let green = process::attached().map(|process| &process.memory.contexts.green);
        let device = green.and_then(|green| lock(green).get(&own).copied());
        let (Some(green), Some(device)) = (green, device) else {
            // SAFETY: the application's arguments, passed on unchanged under the driver function's own contract.
            return unsafe { next(context) };
        };
        // SAFETY: the application's arguments, passed on unchanged under the driver function's own contract.
        let answer = release_primary(device, false, || unsafe { next(context) });
        if answer == CUDA_SUCCESS {
            lock(green).remove(&own);
        }
        answer
    }
}
