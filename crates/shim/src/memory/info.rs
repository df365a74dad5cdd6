//! How much memory there is, and how much of it is free: the container's, as if the card had no more.
#![allow(unsafe_code)]

use super::{checked, granted, here, of_device};
use crate::driver::cuda as real;
use crate::hook::hooks;
use crate::process::Process;
use partage_driver_api::cuda::*;

/// Free and all memory of a GPU, from what the driver says of the card.
#[inline]
pub(crate) fn shown(process: &Process, gpu: usize, free: u64, total: u64) -> (u64, u64) {
    let region = &process.region;
    let Some(limit) = region.memory_limit(gpu) else { return (free, total) };
    // What the dead held is free, and what pools gave back.
    region.tidy();
    if process.memory.pools.any() {
        process.memory.look_for_returned(process, gpu);
    }
    let total = total.min(limit);
    // Somebody may have lowered the limit below what is used.
    (total.saturating_sub(region.used(gpu)).min(free), total)
}

/// The same of the thread's GPU.
#[inline]
fn shown_here(process: &Process) -> Result<(u64, u64), CUresult> {
    let (mut free, mut total) = (0, 0);
    // It also says whether there is a context to ask for.
    // SAFETY: numbers to fill in.
    checked(unsafe { real::cuMemGetInfo_v2(&mut free, &mut total) })?;
    Ok(shown(process, here(process)?, free as u64, total as u64))
}

fn shown_total(process: &Process, device: CUdevice) -> Result<u64, CUresult> {
    let mut total = 0;
    // SAFETY: a number to fill in.
    checked(unsafe { real::cuDeviceTotalMem_v2(&mut total, device) })?;
    let limit = process.region.memory_limit(of_device(process, device)?);
    Ok((total as u64).min(limit.unwrap_or(u64::MAX)))
}

/// As much of it as an old program can be told.
fn narrow(bytes: u64) -> u32 {
    u32::try_from(bytes).unwrap_or(u32::MAX)
}

/// Writes an answer, unless the program does not want it: as the driver does, one of two may be asked for alone.
///
/// # Safety
///
/// Null, or the program's to write.
#[inline]
unsafe fn tell<T>(to: *mut T, value: T) {
    if !to.is_null() {
        // SAFETY: not null, and the caller's promise.
        unsafe { to.write(value) };
    }
}

hooks! { cuda;
    fn cuMemGetInfo_v2(free: *mut usize, total: *mut usize) |next, _variant| {
        granted(
            |process| {
                let (left, all) = shown_here(process)?;
                // SAFETY: null, or the program's to write.
                unsafe { tell(free, left as usize) };
                // SAFETY: likewise.
                unsafe { tell(total, all as usize) };
                Ok(())
            })
    }

    fn cuMemGetInfo(free: *mut u32, total: *mut u32) |next, _variant| {
        granted(
            |process| {
                let (left, all) = shown_here(process)?;
                // SAFETY: null, or the program's to write.
                unsafe { tell(free, narrow(left)) };
                // SAFETY: likewise.
                unsafe { tell(total, narrow(all)) };
                Ok(())
            })
    }

    fn cuDeviceTotalMem_v2(bytes: *mut usize, device: CUdevice) |next, _variant| {
        if bytes.is_null() {
            // SAFETY: the program's promise.
            return unsafe { next(bytes, device) };
        }
        granted(
            |process| {
                // SAFETY: not null, and the program's to write.
                unsafe { bytes.write(shown_total(process, device)? as usize) };
                Ok(())
            })
    }

    fn cuDeviceTotalMem(bytes: *mut u32, device: CUdevice) |next, _variant| {
        if bytes.is_null() {
            // SAFETY: the program's promise.
            return unsafe { next(bytes, device) };
        }
        granted(
            |process| {
                // SAFETY: not null, and the program's to write.
                unsafe { bytes.write(narrow(shown_total(process, device)?)) };
                Ok(())
            })
    }
}
