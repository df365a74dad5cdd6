//! Total and free memory, as the application sees it: the container's limit, as if the GPU had no more.
#![allow(unsafe_code)]

use super::{checked, current_gpu, gpu_of_device, with_grant};
use crate::driver::cuda as driver;
use crate::hook::hooks;
use crate::process::Process;
use partage_driver_api::cuda::*;

/// Returns the free and the total memory of a GPU, from the driver's values for the whole GPU.
#[inline]
pub(crate) fn visible_memory(process: &Process, gpu: usize, free: u64, total: u64) -> (u64, u64) {
    let region = &process.region;
    let Some(limit) = region.memory_limit(gpu) else { return (free, total) };
    // Memory of dead processes is free, and so is what pools have returned.
    region.reclaim_dead_processes_if_due();
    if process.memory.pools.any() {
        process.memory.release_returned(process, gpu);
    }
    let total = total.min(limit);
    // The limit may have been lowered below what is used.
    (total.saturating_sub(region.used(gpu)).min(free), total)
}

/// Returns the free and the total memory of the thread's GPU.
#[inline]
fn visible_on_current_gpu(process: &Process) -> Result<(u64, u64), CUresult> {
    let (mut free, mut total) = (0, 0);
    // The call also reports whether there is a context.
    // SAFETY: the pointers are to local variables, which the driver fills in.
    checked(unsafe { driver::cuMemGetInfo_v2(&mut free, &mut total) })?;
    Ok(visible_memory(process, current_gpu(process)?, free as u64, total as u64))
}

fn visible_total(process: &Process, device: CUdevice) -> Result<u64, CUresult> {
    let mut total = 0;
    // SAFETY: the pointer is to a local variable, which the driver fills in.
    checked(unsafe { driver::cuDeviceTotalMem_v2(&mut total, device) })?;
    let limit = process.region.memory_limit(gpu_of_device(process, device)?);
    Ok((total as u64).min(limit.unwrap_or(u64::MAX)))
}

/// Returns the bytes, capped to what the 32-bit functions can return.
fn saturate_u32(bytes: u64) -> u32 {
    u32::try_from(bytes).unwrap_or(u32::MAX)
}

/// Writes a result, unless the pointer is null: as with the driver, an application may request only one of the two.
///
/// # Safety
///
/// `to` must be null or valid for writes.
#[inline]
unsafe fn write_if_requested<T>(to: *mut T, value: T) {
    if !to.is_null() {
        // SAFETY: not null, and valid for writes by this function's safety contract.
        unsafe { to.write(value) };
    }
}

hooks! { cuda;
    fn cuMemGetInfo_v2(free: *mut usize, total: *mut usize) |next, _variant| {
        with_grant(
            |process| {
                let (left, all) = visible_on_current_gpu(process)?;
                // SAFETY: null, or passed by the application for the driver to write the result to.
                unsafe { write_if_requested(free, left as usize) };
                // SAFETY: null, or passed by the application for the driver to write the result to.
                unsafe { write_if_requested(total, all as usize) };
                Ok(())
            })
    }

    fn cuMemGetInfo(free: *mut u32, total: *mut u32) |next, _variant| {
        with_grant(
            |process| {
                let (left, all) = visible_on_current_gpu(process)?;
                // SAFETY: null, or passed by the application for the driver to write the result to.
                unsafe { write_if_requested(free, saturate_u32(left)) };
                // SAFETY: null, or passed by the application for the driver to write the result to.
                unsafe { write_if_requested(total, saturate_u32(all)) };
                Ok(())
            })
    }

    fn cuDeviceTotalMem_v2(bytes: *mut usize, device: CUdevice) |next, _variant| {
        if bytes.is_null() {
            // SAFETY: the application's arguments, passed on unchanged under the driver function's own contract.
            return unsafe { next(bytes, device) };
        }
        with_grant(
            |process| {
                // SAFETY: not null, and the application passed it for the driver to write the result to.
                unsafe { bytes.write(visible_total(process, device)? as usize) };
                Ok(())
            })
    }

    fn cuDeviceTotalMem(bytes: *mut u32, device: CUdevice) |next, _variant| {
        if bytes.is_null() {
            // SAFETY: the application's arguments, passed on unchanged under the driver function's own contract.
            return unsafe { next(bytes, device) };
        }
        with_grant(
            |process| {
                // SAFETY: not null, and the application passed it for the driver to write the result to.
                unsafe { bytes.write(saturate_u32(visible_total(process, device)?)) };
                Ok(())
            })
    }
}
