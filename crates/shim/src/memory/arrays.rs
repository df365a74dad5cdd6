//! Arrays and mipmapped arrays.
//!
//! Nobody has an address of an array, so which block a small one shares cannot be seen. Small ones are counted as if they
//! shared blocks among themselves only, and a block is given back when there are fewer arrays than blocks: that is more
//! than they take where they lie beside other small allocations, and less only where a program leaves single ones behind
//! in many blocks that it has emptied otherwise.
#![allow(unsafe_code)]

mod format;

use super::allocations::Table;
use super::small::{MOST, rounded};
use super::{BLOCK, Reserved, answer, checked, contexts, granted, here, locked, refused_here};
use crate::hook::hooks;
use crate::process::{self, Process};
use partage_driver_api::cuda::*;
use partage_region::MAX_GPUS;
use std::sync::Mutex;

/// The arrays of this process. Held while the driver makes and ends them: it may use a handle again at once.
#[derive(Default)]
pub(super) struct Arrays {
    books: Mutex<Books>,
}

#[derive(Default)]
struct Books {
    /// Arrays have handles of their own, and so have mipmapped ones: no two of them are the same.
    arrays: Table<Array>,
    small: [Shared; MAX_GPUS],
}

#[derive(Clone, Copy)]
struct Array {
    gpu: usize,
    context: u64,
    bytes: u64,
}

/// The blocks that small arrays share.
#[derive(Clone, Copy, Default)]
struct Shared {
    arrays: u64,
    bytes: u64,
    blocks: u64,
}

impl Shared {
    /// Blocks that it takes to have one more.
    fn more(&self, bytes: u64) -> u64 {
        (self.bytes + rounded(bytes)).div_ceil(BLOCK).saturating_sub(self.blocks)
    }

    fn add(&mut self, bytes: u64, blocks: u64) {
        self.arrays += 1;
        self.bytes += rounded(bytes);
        self.blocks += blocks;
    }

    /// Blocks that it takes less.
    fn remove(&mut self, bytes: u64) -> u64 {
        self.arrays = self.arrays.saturating_sub(1);
        self.bytes = self.bytes.saturating_sub(rounded(bytes));
        let less = self.blocks.saturating_sub(self.arrays);
        self.blocks -= less;
        less
    }
}

impl Books {
    /// Bytes to give back.
    fn remove(&mut self, array: u64) -> Option<(usize, u64)> {
        let gone = self.arrays.remove(&array)?;
        let bytes = if gone.bytes > MOST {
            gone.bytes.checked_next_multiple_of(BLOCK)?
        } else if gone.bytes > 0 {
            self.small.get_mut(gone.gpu)?.remove(gone.bytes) * BLOCK
        } else {
            0
        };
        Some((gone.gpu, bytes))
    }
}

impl Arrays {
    /// The context is gone, and its arrays with it.
    pub(super) fn forget_context(&self, process: &Process, context: CUcontext) {
        let mut books = locked(&self.books);
        let context = context.addr() as u64;
        let gone: Vec<u64> = books
            .arrays
            .iter()
            .filter(|(_, array)| array.context == context)
            .map(|(&array, _)| array)
            .collect();
        for array in gone {
            if let Some((gpu, bytes)) = books.remove(array) {
                process.region.release(gpu, bytes);
            }
        }
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
    let small = books.small.get(gpu).copied().unwrap_or_default();
    let blocks = if bytes > MOST || bytes == 0 { 0 } else { small.more(bytes) };
    let whole =
        if bytes > MOST { bytes.checked_next_multiple_of(BLOCK).unwrap_or(u64::MAX) } else { blocks * BLOCK };
    let reserved = Reserved::take(process, gpu, whole).map_err(refused_here)?;
    checked(call(&mut made))?;
    reserved.keep();
    if (1..=MOST).contains(&bytes)
        && let Some(small) = books.small.get_mut(gpu)
    {
        small.add(bytes, blocks);
    }
    books.arrays.insert(made.addr() as u64, Array { gpu, context, bytes });
    Ok(made)
}

/// Ends an array, with the driver's call.
fn destroy(array: u64, call: impl FnOnce() -> CUresult) -> CUresult {
    let Some(process) = process::attached() else { return call() };
    let mut books = locked(&process.memory.arrays.books);
    let answer = call();
    if answer == CUDA_SUCCESS
        && let Some((gpu, bytes)) = books.remove(array)
    {
        process.region.release(gpu, bytes);
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
            },
            // SAFETY: the program's promise.
            || unsafe { $next($handle, $wanted, $($more),*) },
        )
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

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    proptest! {
        #[test]
        fn small_arrays_have_room_and_all_of_it_comes_back(steps in prop::collection::vec((any::<bool>(), 1..=MOST), 1..200)) {
            let (mut shared, mut arrays) = (Shared::default(), Vec::new());
            let mut taken = 0;
            for (free, bytes) in steps {
                if free && let Some(bytes) = arrays.pop() {
                    taken -= shared.remove(bytes);
                } else {
                    let blocks = shared.more(bytes);
                    shared.add(bytes, blocks);
                    taken += blocks;
                    arrays.push(bytes);
                }
                prop_assert!(taken * BLOCK >= arrays.iter().map(|&bytes| rounded(bytes)).sum::<u64>());
                prop_assert!(taken <= arrays.len() as u64);
            }
            arrays.into_iter().for_each(|bytes| taken -= shared.remove(bytes));
            prop_assert_eq!(taken, 0);
        }
    }
}
