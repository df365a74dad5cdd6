//! Arrays and mipmapped arrays.
//!
//! Nobody has an address of an array, so which block a small one shares cannot be seen: each is counted as a block of its
//! own. That is what is surely enough, also when a program leaves single ones behind in many blocks that it has emptied
//! otherwise. Where the driver puts several into one block, more is counted than they take, up to 2 MiB for each.
#![allow(unsafe_code)]

mod format;

use super::allocations::Table;
use super::{BLOCK, Reserved, answer, checked, contexts, granted, here, locked, refused_here};
use crate::hook::hooks;
use crate::process::{self, Process};
use partage_driver_api::cuda::*;
use std::sync::Mutex;

/// The arrays of this process, mipmapped ones among them: no two handles are the same. Held while the driver makes and ends
/// them: it may use a handle again at once.
#[derive(Default)]
pub(super) struct Arrays {
    books: Mutex<Table<Array>>,
}

#[derive(Clone, Copy)]
struct Array {
    gpu: usize,
    context: u64,
    /// Whole blocks; nothing for one that has no memory behind it yet.
    bytes: u64,
}

impl Arrays {
    /// The context is gone, and its arrays with it.
    pub(super) fn forget_context(&self, process: &Process, context: CUcontext) {
        let mut books = locked(&self.books);
        let context = context.addr() as u64;
        books.retain(|_, array| {
            let gone = array.context == context;
            if gone {
                process.region.release(array.gpu, array.bytes);
            }
            !gone
        });
    }
}

/// Makes an array of that many bytes, with the driver's call.
fn create<T>(
    process: &Process,
    bytes: u64,
    call: impl FnOnce(&mut *mut T) -> CUresult,
) -> Result<*mut T, CUresult> {
    let mut made = std::ptr::null_mut();
    let gpu = here(process)?;
    let context = contexts::current()?.addr() as u64;
    let mut books = locked(&process.memory.arrays.books);
    let whole = bytes.checked_next_multiple_of(BLOCK).unwrap_or(u64::MAX);
    let reserved = Reserved::take(process, gpu, whole).map_err(refused_here)?;
    checked(call(&mut made))?;
    books.insert(made.addr() as u64, Array { gpu, context, bytes: reserved.keep() });
    Ok(made)
}

/// Ends an array, with the driver's call.
fn destroy(array: u64, call: impl FnOnce() -> CUresult) -> CUresult {
    let Some(process) = process::attached() else { return call() };
    let mut books = locked(&process.memory.arrays.books);
    let answer = call();
    if answer == CUDA_SUCCESS
        && let Some(gone) = books.remove(&array)
    {
        process.region.release(gone.gpu, gone.bytes);
    }
    answer
}

/// Makes an array where the program wants it.
macro_rules! create {
    ($handle:ident, $wanted:ident, $levels:expr, $next:ident($($more:expr),*)) => {{
        // SAFETY: null, or the program's; the driver refuses null.
        let descriptor = unsafe { $wanted.as_ref() };
        let Some(descriptor) = descriptor.filter(|_| !$handle.is_null()) else {
            // SAFETY: the program's promise.
            return unsafe { $next($handle, $wanted, $($more),*) };
        };
        granted(
            |process| {
                let bytes = format::Shape::from(descriptor).bytes($levels);
                // SAFETY: a handle to fill in, and the program's promise.
                let made = create(process, bytes, |handle| unsafe { $next(handle, $wanted, $($more),*) })?;
                // SAFETY: not null, and the program's to write.
                unsafe { answer($handle, made) };
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
        // SAFETY: the program's promise.
        destroy(array.addr() as u64, || unsafe { next(array) })
    }

    fn cuMipmappedArrayDestroy(mipmapped_array: CUmipmappedArray) |next, _variant| {
        // SAFETY: the program's promise.
        destroy(mipmapped_array.addr() as u64, || unsafe { next(mipmapped_array) })
    }
}
