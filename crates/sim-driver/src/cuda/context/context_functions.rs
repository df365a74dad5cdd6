//! Exported functions for contexts.

use super::*;
use crate::cuda::engine::StreamOp;
use crate::cuda::{ContextApi, Library, capture, event, session::device, stream};
use partage_driver_api::cuda::*;

/// Context creation flags that the driver accepts.
const KNOWN_FLAGS: u32 = CU_CTX_SCHED_MASK
    | CU_CTX_MAP_HOST
    | CU_CTX_LMEM_RESIZE_TO_MAX
    | CU_CTX_COREDUMP_ENABLE
    | CU_CTX_USER_COREDUMP_ENABLE
    | CU_CTX_SYNC_MEMOPS;

fn check_flags(flags: u32) -> Result<u32, CudaError> {
    let schedule = flags & CU_CTX_SCHED_MASK;
    let one_way = schedule == 0 || schedule.is_power_of_two();
    if flags & !KNOWN_FLAGS == 0 && one_way { Ok(flags) } else { Err(CudaError::INVALID_VALUE) }
}

/// Writes a result through an output pointer; fails if the pointer is null.
///
/// # Safety
/// `to` is null or valid for writes.
pub(in super::super) unsafe fn write_out<T>(to: *mut T, value: T) -> Result<(), CudaError> {
    if to.is_null() {
        return Err(CudaError::INVALID_VALUE);
    }
    // SAFETY: non-null, and the caller guarantees that it is valid for writes.
    unsafe { to.write(value) };
    Ok(())
}

fn create(context: *mut CUcontext, flags: u32, ordinal: i32, api: u32) -> Result<(), CudaError> {
    let device = device(ordinal)?;
    if context.is_null() {
        return Err(CudaError::INVALID_VALUE);
    }
    let made = Context::create(device, check_flags(flags)?, api, false)?;
    push(made);
    // SAFETY: non-null, and the program passes a pointer valid for writes.
    unsafe { write_out(context, made.handle()) }
}

fn destroy(handle: CUcontext) -> Result<(), CudaError> {
    let context = resolve(handle)?;
    if context.primary {
        return Err(CudaError::INVALID_CONTEXT);
    }
    context.destroy();
    if selected().is_some_and(|current| std::ptr::eq(current, context)) {
        let _ = pop();
    }
    Ok(())
}

pub(super) fn release_primary(ordinal: i32) -> Result<(), CudaError> {
    let device = device(ordinal)?;
    let mut primary = device.primary.lock().map_err(|_| CudaError::UNKNOWN)?;
    if primary.retained == 0 {
        return Err(CudaError::INVALID_CONTEXT);
    }
    primary.retained -= 1;
    if primary.retained == 0
        && let Some(context) = primary.context
    {
        drop(primary);
        context.destroy();
    }
    Ok(())
}

fn reset_primary(ordinal: i32) -> Result<(), CudaError> {
    let device = device(ordinal)?;
    let mut primary = device.primary.lock().map_err(|_| CudaError::UNKNOWN)?;
    primary.retained = 0;
    primary.flags = 0;
    let context = primary.context.filter(|context| context.is_alive());
    drop(primary);
    if let Some(context) = context {
        context.destroy();
    }
    Ok(())
}

fn set_primary_flags(ordinal: i32, flags: u32) -> Result<(), CudaError> {
    let device = device(ordinal)?;
    let flags = check_flags(flags)?;
    let mut primary = device.primary.lock().map_err(|_| CudaError::UNKNOWN)?;
    primary.flags = flags;
    if let Some(context) = primary.context {
        context.flags.store(flags, Ordering::Relaxed);
    }
    Ok(())
}

fn limit(context: &'static Context, limit: CUlimit) -> Result<&'static AtomicU64, CudaError> {
    // Limits from 7 on do not exist in this driver version.
    context.limits.get(limit as usize).filter(|_| limit < 7).ok_or(CudaError::UNSUPPORTED_LIMIT)
}

impl ContextApi for Library {
    unsafe fn cuCtxCreate(context: *mut CUcontext, flags: u32, device: CUdevice) -> Result<(), CudaError> {
        create(context, flags, device, 3010)
    }

    unsafe fn cuCtxCreate_v2(context: *mut CUcontext, flags: u32, device: CUdevice) -> Result<(), CudaError> {
        create(context, flags, device, 3020)
    }

    unsafe fn cuCtxCreate_v3(
        context: *mut CUcontext,
        params_array: *mut CUexecAffinityParam,
        num_params: i32,
        flags: u32,
        device: CUdevice,
    ) -> Result<(), CudaError> {
        if num_params != 0 || !params_array.is_null() {
            // Execution affinity requires MPS.
            return Err(CudaError::UNSUPPORTED_EXEC_AFFINITY);
        }
        create(context, flags, device, 3020)
    }

    unsafe fn cuCtxDestroy(context: CUcontext) -> Result<(), CudaError> {
        destroy(context)
    }

    unsafe fn cuCtxDestroy_v2(context: CUcontext) -> Result<(), CudaError> {
        destroy(context)
    }

    unsafe fn cuCtxAttach(context: *mut CUcontext, flags: u32) -> Result<(), CudaError> {
        let own = current()?;
        if flags != 0 {
            return Err(CudaError::INVALID_VALUE);
        }
        own.attached.fetch_add(1, Ordering::Relaxed);
        // SAFETY: CUDA requires output pointers to be null or valid for writes.
        unsafe { write_out(context, own.handle()) }
    }

    unsafe fn cuCtxDetach(context: CUcontext) -> Result<(), CudaError> {
        let own = resolve(context)?;
        if own.attached.fetch_sub(1, Ordering::AcqRel) > 1 { Ok(()) } else { destroy(context) }
    }

    unsafe fn cuCtxGetCurrent(context: *mut CUcontext) -> Result<(), CudaError> {
        session()?;
        let handle = selected().map_or(std::ptr::null_mut(), |own| own.handle());
        // SAFETY: CUDA requires output pointers to be null or valid for writes.
        unsafe { write_out(context, handle) }
    }

    unsafe fn cuCtxSetCurrent(context: CUcontext) -> Result<(), CudaError> {
        session()?;
        if context.is_null() {
            // Like the real driver: pops the top of the stack, which makes the context below it current.
            if selected().is_some() {
                pop()?;
            }
            return Ok(());
        }
        select(Some(resolve(context)?));
        Ok(())
    }

    unsafe fn cuCtxPushCurrent(context: CUcontext) -> Result<(), CudaError> {
        push(resolve(context)?);
        Ok(())
    }

    unsafe fn cuCtxPushCurrent_v2(context: CUcontext) -> Result<(), CudaError> {
        push(resolve(context)?);
        Ok(())
    }

    unsafe fn cuCtxPopCurrent(context: *mut CUcontext) -> Result<(), CudaError> {
        session()?;
        let popped = pop()?;
        if context.is_null() {
            return Ok(());
        }
        // SAFETY: CUDA requires output pointers to be null or valid for writes.
        unsafe { write_out(context, popped.handle()) }
    }

    unsafe fn cuCtxPopCurrent_v2(context: *mut CUcontext) -> Result<(), CudaError> {
        // SAFETY: this function's contract requires the same of its caller, and the arguments are passed on unchanged.
        unsafe { Self::cuCtxPopCurrent(context) }
    }

    unsafe fn cuCtxGetDevice(device: *mut CUdevice) -> Result<(), CudaError> {
        // SAFETY: CUDA requires output pointers to be null or valid for writes.
        unsafe { write_out(device, current()?.device.ordinal) }
    }

    unsafe fn cuCtxSynchronize() -> Result<(), CudaError> {
        let own = current()?;
        capture::check_context_not_capturing(own)?;
        own.sync()
    }

    unsafe fn cuCtxGetApiVersion(context: CUcontext, version: *mut u32) -> Result<(), CudaError> {
        let context = if context.is_null() { current()? } else { resolve(context)? };
        // SAFETY: CUDA requires output pointers to be null or valid for writes.
        unsafe { write_out(version, context.api) }
    }

    unsafe fn cuCtxGetFlags(flags: *mut u32) -> Result<(), CudaError> {
        // SAFETY: CUDA requires output pointers to be null or valid for writes.
        unsafe { write_out(flags, current()?.flags.load(Ordering::Relaxed)) }
    }

    unsafe fn cuCtxSetFlags(flags: u32) -> Result<(), CudaError> {
        current()?.flags.store(check_flags(flags)?, Ordering::Relaxed);
        Ok(())
    }

    unsafe fn cuCtxGetId(context: CUcontext, id: *mut u64) -> Result<(), CudaError> {
        let context = if context.is_null() { current()? } else { resolve(context)? };
        // SAFETY: CUDA requires output pointers to be null or valid for writes.
        unsafe { write_out(id, context.id) }
    }

    unsafe fn cuCtxGetLimit(value: *mut usize, which: CUlimit) -> Result<(), CudaError> {
        let limit = limit(current()?, which)?.load(Ordering::Relaxed);
        // SAFETY: CUDA requires output pointers to be null or valid for writes.
        unsafe { write_out(value, limit as usize) }
    }

    unsafe fn cuCtxSetLimit(which: CUlimit, value: usize) -> Result<(), CudaError> {
        let context = current()?;
        limit(context, which)?;
        context.set_limit(which as usize, value as u64)
    }

    unsafe fn cuCtxGetCacheConfig(config: *mut CUfunc_cache) -> Result<(), CudaError> {
        // SAFETY: CUDA requires output pointers to be null or valid for writes.
        unsafe { write_out(config, current()?.cache.load(Ordering::Relaxed)) }
    }

    unsafe fn cuCtxSetCacheConfig(config: CUfunc_cache) -> Result<(), CudaError> {
        current()?.cache.store(config, Ordering::Relaxed);
        Ok(())
    }

    unsafe fn cuCtxGetSharedMemConfig(config: *mut CUsharedconfig) -> Result<(), CudaError> {
        // SAFETY: CUDA requires output pointers to be null or valid for writes.
        unsafe { write_out(config, current()?.banks.load(Ordering::Relaxed)) }
    }

    unsafe fn cuCtxSetSharedMemConfig(config: CUsharedconfig) -> Result<(), CudaError> {
        current()?.banks.store(config, Ordering::Relaxed);
        Ok(())
    }

    unsafe fn cuCtxGetStreamPriorityRange(least: *mut i32, greatest: *mut i32) -> Result<(), CudaError> {
        current()?;
        for (to, value) in [(least, stream::LEAST_PRIORITY), (greatest, stream::GREATEST_PRIORITY)] {
            if !to.is_null() {
                // SAFETY: non-null, and the program passes a pointer valid for writes.
                unsafe { to.write(value) };
            }
        }
        Ok(())
    }

    unsafe fn cuCtxResetPersistingL2Cache() -> Result<(), CudaError> {
        current().map(|_| ())
    }

    unsafe fn cuCtxEnablePeerAccess(peer_context: CUcontext, flags: u32) -> Result<(), CudaError> {
        let (own, peer) = (current()?, resolve(peer_context)?);
        if flags != 0 || std::ptr::eq(own.device, peer.device) {
            return Err(CudaError::INVALID_VALUE);
        }
        let mut peers = own.peers.lock().map_err(|_| CudaError::UNKNOWN)?;
        if peers.contains(&peer.id) {
            return Err(CudaError::PEER_ACCESS_ALREADY_ENABLED);
        }
        peers.push(peer.id);
        Ok(())
    }

    unsafe fn cuCtxDisablePeerAccess(peer_context: CUcontext) -> Result<(), CudaError> {
        let (own, peer) = (current()?, resolve(peer_context)?);
        let mut peers = own.peers.lock().map_err(|_| CudaError::UNKNOWN)?;
        let before = peers.len();
        peers.retain(|&id| id != peer.id);
        if peers.len() < before { Ok(()) } else { Err(CudaError::PEER_ACCESS_NOT_ENABLED) }
    }

    unsafe fn cuDevicePrimaryCtxRetain(context: *mut CUcontext, ordinal: CUdevice) -> Result<(), CudaError> {
        let device = device(ordinal)?;
        if context.is_null() {
            return Err(CudaError::INVALID_VALUE);
        }
        // SAFETY: non-null, and the program passes a pointer valid for writes.
        unsafe { write_out(context, retain_primary(device)?.handle()) }
    }

    unsafe fn cuDevicePrimaryCtxRelease(device: CUdevice) -> Result<(), CudaError> {
        release_primary(device)
    }

    unsafe fn cuDevicePrimaryCtxRelease_v2(device: CUdevice) -> Result<(), CudaError> {
        release_primary(device)
    }

    unsafe fn cuDevicePrimaryCtxReset(device: CUdevice) -> Result<(), CudaError> {
        reset_primary(device)
    }

    unsafe fn cuDevicePrimaryCtxReset_v2(device: CUdevice) -> Result<(), CudaError> {
        reset_primary(device)
    }

    unsafe fn cuDevicePrimaryCtxSetFlags(device: CUdevice, flags: u32) -> Result<(), CudaError> {
        set_primary_flags(device, flags)
    }

    unsafe fn cuDevicePrimaryCtxSetFlags_v2(device: CUdevice, flags: u32) -> Result<(), CudaError> {
        set_primary_flags(device, flags)
    }

    unsafe fn cuDevicePrimaryCtxGetState(
        ordinal: CUdevice,
        flags: *mut u32,
        active: *mut i32,
    ) -> Result<(), CudaError> {
        let primary = device(ordinal)?.primary.lock().map_err(|_| CudaError::UNKNOWN)?;
        let alive = primary.context.is_some_and(Context::is_alive);
        // SAFETY: CUDA requires output pointers to be null or valid for writes.
        unsafe { write_out(flags, primary.flags) }?;
        // SAFETY: CUDA requires output pointers to be null or valid for writes.
        unsafe { write_out(active, i32::from(alive)) }
    }

    unsafe fn cuDeviceGetDevResource(
        ordinal: CUdevice,
        resource: *mut CUdevResource,
        kind: CUdevResourceType,
    ) -> Result<(), CudaError> {
        // SAFETY: CUDA requires output pointers to be null or valid for writes.
        unsafe { write_out(resource, green_context::of_device(device(ordinal)?, kind)?) }
    }

    unsafe fn cuCtxGetDevResource(
        context: CUcontext,
        resource: *mut CUdevResource,
        kind: CUdevResourceType,
    ) -> Result<(), CudaError> {
        let own = if context.is_null() { current()? } else { resolve(context)? };
        // SAFETY: CUDA requires output pointers to be null or valid for writes.
        unsafe { write_out(resource, green_context::of_device(own.device, kind)?) }
    }

    unsafe fn cuGreenCtxGetDevResource(
        context: CUgreenCtx,
        resource: *mut CUdevResource,
        kind: CUdevResourceType,
    ) -> Result<(), CudaError> {
        // SAFETY: CUDA requires output pointers to be null or valid for writes.
        unsafe { write_out(resource, green_context::resource(context, kind)?) }
    }

    unsafe fn cuDevSmResourceSplitByCount(
        result: *mut CUdevResource,
        group_count: *mut u32,
        input: *const CUdevResource,
        remaining: *mut CUdevResource,
        use_flags: u32,
        min_count: u32,
    ) -> Result<(), CudaError> {
        session()?;
        // The flags select which multiprocessors are grouped; the simulation treats all alike.
        if group_count.is_null() || input.is_null() || use_flags > 3 {
            return Err(CudaError::INVALID_VALUE);
        }
        // SAFETY: non-null, and the program passes a pointer valid for reads.
        let input = unsafe { input.read() };
        // SAFETY: CUDA requires input pointers to be null or valid for reads.
        let room = if result.is_null() { None } else { Some(unsafe { group_count.read() }) };
        let (made, left) = green_context::split(&input, min_count, room)?;
        if !result.is_null() {
            // SAFETY: `made` has at most `group_count` entries, for which the program provides room.
            unsafe { std::ptr::copy_nonoverlapping(made.as_ptr(), result, made.len()) };
            if !remaining.is_null() {
                // SAFETY: non-null, and the program passes a pointer valid for writes.
                unsafe { remaining.write(left) };
            }
        }
        // SAFETY: CUDA requires output pointers to be null or valid for writes.
        unsafe { write_out(group_count, made.len() as u32) }
    }

    unsafe fn cuDevResourceGenerateDesc(
        descriptor: *mut CUdevResourceDesc,
        resources: *mut CUdevResource,
        resource_count: u32,
    ) -> Result<(), CudaError> {
        session()?;
        if descriptor.is_null() || resources.is_null() || resource_count == 0 {
            return Err(CudaError::INVALID_VALUE);
        }
        // SAFETY: non-null, and the program passes an array of the stated length.
        let resources = unsafe { std::slice::from_raw_parts(resources, resource_count as usize) };
        // SAFETY: non-null, and the program passes a pointer valid for writes.
        unsafe { write_out(descriptor, green_context::describe(resources)?) }
    }

    unsafe fn cuGreenCtxCreate(
        context: *mut CUgreenCtx,
        descriptor: CUdevResourceDesc,
        device: CUdevice,
        flags: u32,
    ) -> Result<(), CudaError> {
        if context.is_null() {
            return Err(CudaError::INVALID_VALUE);
        }
        // SAFETY: non-null, and the program passes a pointer valid for writes.
        unsafe { write_out(context, green_context::create(descriptor, device, flags)?) }
    }

    unsafe fn cuGreenCtxDestroy(context: CUgreenCtx) -> Result<(), CudaError> {
        green_context::destroy(context)
    }

    unsafe fn cuCtxFromGreenCtx(context: *mut CUcontext, green: CUgreenCtx) -> Result<(), CudaError> {
        // SAFETY: CUDA requires output pointers to be null or valid for writes.
        unsafe { write_out(context, green_context::context(green)?.handle()) }
    }

    unsafe fn cuGreenCtxRecordEvent(context: CUgreenCtx, event: CUevent) -> Result<(), CudaError> {
        let stream = green_context::context(context)?.legacy()?;
        stream.check_not_capturing()?;
        event::record(event::resolve(event)?, stream)
    }

    unsafe fn cuGreenCtxWaitEvent(context: CUgreenCtx, event: CUevent) -> Result<(), CudaError> {
        let stream = green_context::context(context)?.legacy()?;
        stream.check_not_capturing()?;
        let event = event::resolve(event)?;
        stream.submit(StreamOp::WaitEvent(event, event.ticket()))
    }

    unsafe fn cuStreamGetGreenCtx(stream: CUstream, context: *mut CUgreenCtx) -> Result<(), CudaError> {
        stream::resolve(stream)?;
        // Streams belong to the primary context.
        // SAFETY: CUDA requires output pointers to be null or valid for writes.
        unsafe { write_out(context, std::ptr::null_mut()) }
    }
}

#[cfg(test)]
mod tests {
    use crate::cuda::exports::*;
    use crate::cuda::test_node;
    use partage_driver_api::cuda::*;

    #[test]
    fn sm_split_respects_architecture_granularity() {
        test_node::run(|| {
            let code = |error: CudaError| error.code();
            let (mut all, mut parts) = (CUdevResource::default(), [CUdevResource::default(); 8]);
            let (mut left, mut count) = (CUdevResource::default(), 0);
            let ok = CUDA_SUCCESS;
            let count_of = |resource: &CUdevResource| {
                // SAFETY: the union member is an integer, for which every bit pattern is valid.
                unsafe { resource.resource.sm }.smCount
            };
            // SAFETY: no pointer is passed.
            assert_eq!(unsafe { cuInit(0) }, ok);
            // SAFETY: all output pointers refer to local variables, here and below.
            assert_eq!(unsafe { cuDeviceGetDevResource(0, &mut all, CU_DEV_RESOURCE_TYPE_SM) }, ok);
            assert_eq!(count_of(&all), 108);
            let no = std::ptr::null_mut();
            // SAFETY: the count and the input are local variables; the other outputs are null.
            assert_eq!(unsafe { cuDevSmResourceSplitByCount(no, &mut count, &all, no, 0, 15) }, ok);
            assert_eq!(count, 6, "partitions of 16 multiprocessors");
            count = 8;
            let to = parts.as_mut_ptr();
            // SAFETY: all pointers refer to local variables, and `count` is the length of the array.
            assert_eq!(unsafe { cuDevSmResourceSplitByCount(to, &mut count, &all, &mut left, 0, 15) }, ok);
            assert_eq!((count, count_of(&parts[0]), count_of(&left)), (6, 16, 12));
            // SAFETY: all pointers refer to local variables, and `count` is the length of the array.
            let again = unsafe { cuDevSmResourceSplitByCount(to, &mut count, &parts[1], no, 0, 4) };
            assert_eq!(again, code(CudaError::INVALID_RESOURCE_CONFIGURATION));
            let (mut descriptor, mut green) = (std::ptr::null_mut(), std::ptr::null_mut());
            // SAFETY: the output and the array are local variables.
            assert_eq!(unsafe { cuDevResourceGenerateDesc(&mut descriptor, to, 1) }, ok);
            // SAFETY: the output is a local variable, valid for writes during the call.
            let flagless = unsafe { cuGreenCtxCreate(&mut green, descriptor, 0, 0) };
            assert_eq!(flagless, code(CudaError::INVALID_VALUE));
            // SAFETY: the output is a local variable, valid for writes during the call.
            assert_eq!(unsafe { cuGreenCtxCreate(&mut green, descriptor, 0, 1) }, ok);
            // SAFETY: the output is a local variable, valid for writes during the call.
            assert_eq!(unsafe { cuGreenCtxGetDevResource(green, &mut all, CU_DEV_RESOURCE_TYPE_SM) }, ok);
            assert_eq!(count_of(&all), 16);
            let mut context = std::ptr::null_mut();
            // SAFETY: the output is a local variable, valid for writes during the call.
            assert_eq!(unsafe { cuCtxFromGreenCtx(&mut context, green) }, ok);
            // SAFETY: handles are validated, not dereferenced.
            assert_eq!(unsafe { cuCtxSetCurrent(context) }, ok);
            // SAFETY: handles are validated, not dereferenced.
            assert_eq!(unsafe { cuGreenCtxDestroy(green) }, ok);
            // SAFETY: handles are validated, not dereferenced.
            assert_eq!(unsafe { cuGreenCtxDestroy(green) }, code(CudaError::INVALID_CONTEXT));
        });
    }
}
