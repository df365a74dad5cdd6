//! Arrays and mipmapped arrays.
//!
//! Arrays have no address, so the block that a small one shares is unknown: each is counted as a block of its own. That
//! is always enough, even if a program leaves single arrays behind in many otherwise empty blocks. Where the driver
//! puts several arrays into one block, up to 2 MiB too much is counted for each.
#![allow(unsafe_code)]

mod format;

use super::allocations::HandleMap;
use super::{
    BLOCK_BYTES, Reservation, checked, contexts, current_gpu, lock, refusal_code, with_grant, write_result,
};
use crate::hook::hooks;
use crate::process::{self, Process};
use partage_driver_api::cuda::*;
use std::sync::Mutex;

/// The arrays of this process, including mipmapped ones: their handles are distinct. Locked while the driver creates
/// and destroys them, because it may reuse a handle at once.
#[derive(Default)]
pub(super) struct ProcessArrays {
    records: Mutex<HandleMap<ArrayRecord>>,
}

#[derive(Clone, Copy)]
struct ArrayRecord {
    gpu: usize,
    context: u64,
    /// Whole blocks; zero for an array without memory.
    bytes: u64,
}

impl ProcessArrays {
    /// Releases the arrays of a context that has been destroyed.
    pub(super) fn forget_context(&self, process: &Process, context: CUcontext) {
        let mut records = lock(&self.records);
        let context = context.addr() as u64;
        records.retain(|_, array| {
            let gone = array.context == context;
            if gone {
                process.region.release(array.gpu, array.bytes);
            }
            !gone
        });
    }
}

/// Creates an array of this many bytes, with the driver's call.
fn create<T>(
    process: &Process,
    bytes: u64,
    call: impl FnOnce(&mut *mut T) -> CUresult,
) -> Result<*mut T, CUresult> {
    let mut made = std::ptr::null_mut();
    let gpu = current_gpu(process)?;
    let context = contexts::current_context()?.addr() as u64;
    let mut records = lock(&process.memory.arrays.records);
    let whole = bytes.checked_next_multiple_of(BLOCK_BYTES).unwrap_or(u64::MAX);
    let reserved = Reservation::take(process, gpu, whole).map_err(refusal_code)?;
    checked(call(&mut made))?;
    records.insert(made.addr() as u64, ArrayRecord { gpu, context, bytes: reserved.keep() });
    Ok(made)
}

/// Destroys an array, with the driver's call.
fn destroy(array: u64, call: impl FnOnce() -> CUresult) -> CUresult {
    let Some(process) = process::attached() else { return call() };
    let mut records = lock(&process.memory.arrays.records);
    let answer = call();
    if answer == CUDA_SUCCESS
        && let Some(gone) = records.remove(&array)
    {
        process.region.release(gone.gpu, gone.bytes);
    }
    answer
}

/// Creates an array and writes its handle for the application.
macro_rules! create {
    ($handle:ident, $wanted:ident, $levels:expr, $next:ident($($more:expr),*)) => {{
        // SAFETY: null, or a structure that the application passed for the driver to read.
        let descriptor = unsafe { $wanted.as_ref() };
        let Some(descriptor) = descriptor.filter(|_| !$handle.is_null()) else {
            // SAFETY: the application's arguments, passed on unchanged under the driver function's own contract.
            return unsafe { $next($handle, $wanted, $($more),*) };
        };
        with_grant(
            |process| {
                let bytes = format::ArrayShape::from(descriptor).bytes($levels);
                // SAFETY: the output pointer is valid for writes; the other arguments are the application's, unchanged.
                let made = create(process, bytes, |handle| unsafe { $next(handle, $wanted, $($more),*) })?;
                // SAFETY: not null, and the application passed it for the driver to write the result to.
                unsafe { write_result($handle, made) };
                Ok(())
            })
    }};
}

hooks! { cuda;
    fn cuArrayCreate(handle: *mut CUarray, allocate_array: *const CUDA_ARRAY_DESCRIPTOR_v1) |next, _variant| {
        create!(handle, allocate_array, None, next())
    }

    fn cuArrayCreate_v2(handle: *mut CUarray, allocate_array: *const CUDA_ARRAY_DESCRIPTOR) |next, _variant| {
        create!(handle, allocate_array, None, next())
    }

    fn cuArray3DCreate(handle: *mut CUarray, allocate_array: *const CUDA_ARRAY3D_DESCRIPTOR_v1) |next, _variant| {
        create!(handle, allocate_array, None, next())
    }

    fn cuArray3DCreate_v2(handle: *mut CUarray, allocate_array: *const CUDA_ARRAY3D_DESCRIPTOR) |next, _variant| {
        create!(handle, allocate_array, None, next())
    }

    fn cuMipmappedArrayCreate(
        handle: *mut CUmipmappedArray,
        mipmapped_array_desc: *const CUDA_ARRAY3D_DESCRIPTOR,
        num_mipmap_levels: u32,
    ) |next, _variant| {
        create!(handle, mipmapped_array_desc, Some(num_mipmap_levels), next(num_mipmap_levels))
    }

    fn cuArrayDestroy(array: CUarray) |next, _variant| {
        // SAFETY: the application's arguments, passed on unchanged under the driver function's own contract.
        destroy(array.addr() as u64, || unsafe { next(array) })
    }

    fn cuMipmappedArrayDestroy(mipmapped_array: CUmipmappedArray) |next, _variant| {
        // SAFETY: the application's arguments, passed on unchanged under the driver function's own contract.
        destroy(mipmapped_array.addr() as u64, || unsafe { next(mipmapped_array) })
    }
}
