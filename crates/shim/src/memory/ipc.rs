//! Memory that is imported from elsewhere.
//!
//! Memory that another CUDA process allocated (`cuIpcOpenMemHandle`, imported pools) is counted there and is not
//! hooked. Memory of a graphics library is counted nowhere else: it is counted by its size from its import on.
#![allow(unsafe_code)]

use super::allocations::{HandleMap, HeldMemory};
use super::{Reservation, checked, current_gpu, lock, refusal_code, with_grant, write_result};
use crate::hook::hooks;
use crate::process;
use partage_driver_api::cuda::*;
use std::sync::Mutex;

/// External memory objects that were imported, by handle, each with the bytes counted for it.
#[derive(Default)]
pub(super) struct ImportedMemory {
    external: Mutex<HandleMap<HeldMemory>>,
}

hooks! { cuda;
    fn cuImportExternalMemory(
        ext_mem_out: *mut CUexternalMemory,
        mem_handle_desc: *const CUDA_EXTERNAL_MEMORY_HANDLE_DESC,
    ) |next, _variant| {
        // SAFETY: null, or a structure that the application passed for the driver to read.
        let size = unsafe { mem_handle_desc.as_ref() }.map_or(0, |wanted| wanted.size);
        if ext_mem_out.is_null() || size == 0 {
            // SAFETY: the application's arguments, passed on unchanged under the driver function's own contract.
            return unsafe { next(ext_mem_out, mem_handle_desc) };
        }
        with_grant(
            |process| {
                let gpu = current_gpu(process)?;
                let reserved = Reservation::take(process, gpu, size).map_err(refusal_code)?;
                let mut records = lock(&process.memory.imported.external);
                let mut made = std::ptr::null_mut();
                // SAFETY: the output pointer is valid for writes; the other arguments are the application's, unchanged.
                checked(unsafe { next(&mut made, mem_handle_desc) })?;
                records.insert(made.addr() as u64, HeldMemory::new(gpu, reserved.keep()));
                // SAFETY: not null, and the application passed it for the driver to write the result to.
                unsafe { write_result(ext_mem_out, made) };
                Ok(())
            })
    }

    fn cuDestroyExternalMemory(ext_mem: CUexternalMemory) |next, _variant| {
        let Some(process) = process::attached() else {
            // SAFETY: the application's arguments, passed on unchanged under the driver function's own contract.
            return unsafe { next(ext_mem) };
        };
        let mut records = lock(&process.memory.imported.external);
        // SAFETY: the application's arguments, passed on unchanged under the driver function's own contract.
        let answer = unsafe { next(ext_mem) };
        if answer == CUDA_SUCCESS
            && let Some(gone) = records.remove(&(ext_mem.addr() as u64))
        {
            process.region.release(gone.gpu(), gone.bytes);
        }
        answer
    }
}
