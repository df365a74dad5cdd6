//! Memory of others.
//!
//! What another process of CUDA made (`cuIpcOpenMemHandle`, imported pools) counts there, and goes past here. What a
//! graphics library made counts nowhere else: it counts by its size from its import on.
#![allow(unsafe_code)]

use super::allocations::{Held, Table};
use super::{Reserved, answer, checked, granted, here, locked, refused_here};
use crate::hook::hooks;
use crate::process;
use partage_driver_api::cuda::*;
use std::sync::Mutex;

/// What was imported.
#[derive(Default)]
pub(super) struct Sharing {
    external: Mutex<Table<Held>>,
}

hooks! { cuda;
    fn cuImportExternalMemory(
        ext_mem_out: *mut CUexternalMemory,
        mem_handle_desc: *const CUDA_EXTERNAL_MEMORY_HANDLE_DESC,
    ) |next, _variant| {
        // SAFETY: null, or the program's; the driver refuses null.
        let size = unsafe { mem_handle_desc.as_ref() }.map_or(0, |wanted| wanted.size);
        if ext_mem_out.is_null() || size == 0 {
            // SAFETY: the program's promise.
            return unsafe { next(ext_mem_out, mem_handle_desc) };
        }
        granted(
            |process| {
                let gpu = here(process)?;
                let reserved = Reserved::take(process, gpu, size).map_err(refused_here)?;
                let mut books = locked(&process.memory.sharing.external);
                let mut made = std::ptr::null_mut();
                // SAFETY: a handle to fill in, and the program's promise.
                checked(unsafe { next(&mut made, mem_handle_desc) })?;
                books.insert(made.addr() as u64, Held::new(gpu, reserved.keep()));
                // SAFETY: not null, and the program's to write.
                unsafe { answer(ext_mem_out, made) };
                Ok(())
            })
    }

    fn cuDestroyExternalMemory(ext_mem: CUexternalMemory) |next, _variant| {
        let Some(process) = process::attached() else {
            // SAFETY: the program's promise.
            return unsafe { next(ext_mem) };
        };
        let mut books = locked(&process.memory.sharing.external);
        // SAFETY: the program's promise.
        let answer = unsafe { next(ext_mem) };
        if answer == CUDA_SUCCESS
            && let Some(gone) = books.remove(&(ext_mem.addr() as u64))
        {
            process.region.release(gone.gpu(), gone.bytes);
        }
        answer
    }
}
