//! Memory with an address: linear, pitched, managed.
//!
//! Host memory that the driver knows (`cuMemHostAlloc`, `cuMemAllocHost`, `cuMemHostRegister`) takes no GPU memory and
//! is not hooked.
#![allow(unsafe_code)]

use super::allocations::HeldMemory;
use super::suballocation::MAX_SUBALLOCATION;
use super::{
    BLOCK_BYTES, Reservation, checked, current_gpu, oversubscribe, refusal_code, with_grant, write_result,
};
use crate::driver::cuda as driver;
use crate::hook::hooks;
use crate::process::{self, Process};
use crate::throttle::boundaries;
use partage_driver_api::cuda::*;

/// Alignment of rows of pitched memory in bytes, on every GPU there is.
const PITCH_ALIGNMENT: u64 = 512;

/// Allocates on the thread's GPU, with the driver's call.
#[inline]
fn allocate(
    process: &Process,
    bytes: u64,
    call: impl FnOnce(&mut CUdeviceptr) -> CUresult,
) -> Result<CUdeviceptr, CUresult> {
    let gpu = current_gpu(process)?;
    if bytes > MAX_SUBALLOCATION {
        allocate_blocks(process, gpu, bytes, call)
    } else {
        allocate_in_block(process, gpu, bytes, call)
    }
}

/// Allocates memory that takes blocks of its own.
#[inline]
fn allocate_blocks(
    process: &Process,
    gpu: usize,
    bytes: u64,
    call: impl FnOnce(&mut CUdeviceptr) -> CUresult,
) -> Result<CUdeviceptr, CUresult> {
    let whole = bytes.checked_next_multiple_of(BLOCK_BYTES).unwrap_or(u64::MAX);
    let reserved = Reservation::take(process, gpu, whole).map_err(refusal_code)?;
    let mut pointer = 0;
    checked(call(&mut pointer))?;
    process.memory.record(process, pointer, HeldMemory::new(gpu, reserved.keep()));
    Ok(pointer)
}

/// Allocates memory that shares a block with others.
fn allocate_in_block(
    process: &Process,
    gpu: usize,
    bytes: u64,
    call: impl FnOnce(&mut CUdeviceptr) -> CUresult,
) -> Result<CUdeviceptr, CUresult> {
    let suballocations = &process.memory.suballocations;
    let _alone = suballocations.begin(gpu).ok_or(CUDA_ERROR_NOT_PERMITTED)?;
    // If less than a block is left, any existing block may have room.
    let short = process
        .region
        .memory_limit(gpu)
        .is_some_and(|limit| limit.saturating_sub(process.region.used(gpu)) < BLOCK_BYTES);
    let mut pointer = 0;
    let Some(block) = suballocations.lease_block(gpu, bytes, short) else {
        let reserved = Reservation::take(process, gpu, BLOCK_BYTES).map_err(refusal_code)?;
        checked(call(&mut pointer))?;
        if suballocations.insert(gpu, pointer, bytes) {
            reserved.keep();
        }
        return Ok(pointer);
    };
    let lease = BlockLease { process, gpu, block };
    checked(call(&mut pointer))?;
    if !suballocations.insert(gpu, pointer, bytes) || lease.hand_over() {
        return Ok(pointer);
    }
    // The free range was occupied by an untracked allocation.
    suballocations.distrust(gpu);
    if let Ok(reserved) = Reservation::take(process, gpu, BLOCK_BYTES) {
        reserved.keep();
        return Ok(pointer);
    }
    // SAFETY: the allocation was just made, and its address was not handed out.
    unsafe { driver::cuMemFree_v2(pointer) };
    if let Some(piece) = suballocations.begin_free(pointer) {
        suballocations.finish_free(&piece);
    }
    Err(CUDA_ERROR_OUT_OF_MEMORY)
}

/// A block that an allocation in progress relies on.
struct BlockLease<'a> {
    process: &'a Process,
    gpu: usize,
    block: u64,
}

impl BlockLease<'_> {
    /// Ends the lease after the driver has opened another block. Returns true if this block became free meanwhile: then
    /// its reservation is used for the other one.
    fn hand_over(self) -> bool {
        let own = std::mem::ManuallyDrop::new(self);
        own.process.memory.suballocations.end_lease(own.block)
    }
}

impl Drop for BlockLease<'_> {
    fn drop(&mut self) {
        if self.process.memory.suballocations.end_lease(self.block) {
            self.process.region.release(self.gpu, BLOCK_BYTES);
        }
    }
}

/// Looks up a variable of a module, with the driver's call: the driver may allocate it at the first lookup.
pub(super) fn module_variable(
    pointer: *mut CUdeviceptr,
    bytes: *mut usize,
    call: impl Fn(*mut CUdeviceptr, *mut usize) -> CUresult,
) -> CUresult {
    with_grant(|process| {
        let gpu = current_gpu(process)?;
        let suballocations = &process.memory.suballocations;
        let _alone = suballocations.begin(gpu).ok_or(CUDA_ERROR_NOT_PERMITTED)?;
        let (mut at, mut size) = (0, 0);
        let reserved = Reservation::take(process, gpu, BLOCK_BYTES);
        checked(call(&mut at, &mut size))?;
        if size as u64 > MAX_SUBALLOCATION {
            if !process.memory.allocations.contains(at) {
                drop(reserved);
                let whole = (size as u64).checked_next_multiple_of(BLOCK_BYTES).unwrap_or(u64::MAX);
                let taken = Reservation::take(process, gpu, whole)?;
                process.memory.record(process, at, HeldMemory::new(gpu, taken.keep()));
            }
        } else if suballocations.insert(gpu, at, size as u64) {
            // It is allocated now. If there is no room for its block, the application does not get its address.
            reserved?.keep();
        }
        if !pointer.is_null() {
            // SAFETY: not null, and the application passed it for the driver to write the result to.
            unsafe { write_result(pointer, at) };
        }
        if !bytes.is_null() {
            // SAFETY: not null, and the application passed it for the driver to write the result to.
            unsafe { write_result(bytes, size) };
        }
        Ok(())
    })
}

/// Allocates linear memory with `cuMemAlloc_v2`, whichever call the application made.
pub(super) fn allocate_linear(process: &Process, bytes: usize) -> Result<CUdeviceptr, CUresult> {
    // SAFETY: the pointer is to a local variable, which the driver fills in.
    allocate(process, bytes as u64, |pointer| unsafe { driver::cuMemAlloc_v2(pointer, bytes) })
}

/// Frees memory with an address, with the driver's call.
#[inline]
pub(super) fn free(pointer: CUdeviceptr, call: impl FnOnce() -> CUresult) -> CUresult {
    let Some(process) = process::attached() else { return call() };
    // The driver waits until no work can use the memory.
    boundaries::mark_before_implicit_wait();
    let memory = &process.memory;
    if let Some(held) = memory.allocations.remove(pointer) {
        let answer = call();
        if answer == CUDA_SUCCESS {
            memory.release(process, held);
        } else {
            memory.record(process, pointer, held);
        }
        return answer;
    }
    let Some(piece) = memory.suballocations.begin_free(pointer) else {
        return memory.oversubscribed.free(pointer, call);
    };
    let answer = call();
    if answer != CUDA_SUCCESS {
        memory.suballocations.restore(&piece);
    } else if memory.suballocations.finish_free(&piece) {
        process.region.release(piece.gpu, BLOCK_BYTES);
    }
    answer
}

/// Converts an address for the 32-bit functions; an allocation whose address is too long is freed.
fn to_v1_pointer(pointer: CUdeviceptr) -> Result<CUdeviceptr_v1, CUresult> {
    CUdeviceptr_v1::try_from(pointer).map_err(|_| {
        // SAFETY: the allocation was just made, and its address was not handed out.
        free(pointer, || unsafe { driver::cuMemFree_v2(pointer) });
        CUDA_ERROR_OUT_OF_MEMORY
    })
}

/// Allocates pitched memory, whose size is known when the driver has chosen the pitch.
fn allocate_pitched(
    process: &Process,
    (width, height, element): (usize, usize, u32),
) -> Result<(CUdeviceptr, usize), CUresult> {
    let wide = (width as u64).checked_next_multiple_of(PITCH_ALIGNMENT).unwrap_or(u64::MAX);
    let bytes = wide.saturating_mul(height as u64);
    let mut pitch = 0;
    let pointer = allocate(process, bytes, |pointer| {
        // SAFETY: the pointers are to local variables, which the driver fills in.
        unsafe { driver::cuMemAllocPitch_v2(pointer, &mut pitch, width, height, element) }
    })?;
    let true_bytes = (pitch as u64).saturating_mul(height as u64);
    if true_bytes > bytes
        && let Err(refused) = grow(process, pointer, true_bytes)
    {
        // SAFETY: the allocation was just made, and its address was not handed out.
        free(pointer, || unsafe { driver::cuMemFree_v2(pointer) });
        return Err(refused);
    }
    Ok((pointer, pitch))
}

/// Reserves more for an allocation that turned out larger than what was reserved for it.
fn grow(process: &Process, pointer: CUdeviceptr, bytes: u64) -> Result<(), CUresult> {
    let memory = &process.memory;
    // A small allocation that is larger than estimated is still in its block.
    let Some(held) = memory.allocations.remove(pointer) else { return Ok(()) };
    let whole = bytes.checked_next_multiple_of(BLOCK_BYTES).unwrap_or(u64::MAX);
    let more = Reservation::take(process, held.gpu(), whole.saturating_sub(held.bytes));
    let bytes = held.bytes + more.as_ref().map_or(0, |more| more.bytes);
    memory.record(process, pointer, HeldMemory::new(held.gpu(), bytes));
    more.map(|more| {
        more.keep();
    })
}

hooks! { cuda;
    fn cuMemAlloc_v2(pointer: *mut CUdeviceptr, bytes: usize) |next, _variant| {
        // Invalid arguments are left to the driver.
        if pointer.is_null() || bytes == 0 {
            // SAFETY: the application's arguments, passed on unchanged under the driver function's own contract.
            return unsafe { next(pointer, bytes) };
        }
        with_grant(
            |process| {
                // SAFETY: the pointer is valid for writes, and the size is the application's.
                let made = allocate(process, bytes as u64, |pointer| unsafe { next(pointer, bytes) });
                let made = made.or_else(|refused| oversubscribe::allocate(process, bytes as u64, refused))?;
                // SAFETY: not null, and the application passed it for the driver to write the result to.
                unsafe { write_result(pointer, made) };
                Ok(())
            })
    }

    fn cuMemAlloc(pointer: *mut CUdeviceptr_v1, bytes: u32) |next, _variant| {
        if pointer.is_null() || bytes == 0 {
            // SAFETY: the application's arguments, passed on unchanged under the driver function's own contract.
            return unsafe { next(pointer, bytes) };
        }
        with_grant(
            |process| {
                let made = allocate(process, u64::from(bytes), |pointer| {
                    let mut short = 0;
                    // SAFETY: the pointer is to a local variable, and the size is the application's.
                    let answer = unsafe { next(&mut short, bytes) };
                    *pointer = u64::from(short);
                    answer
                })?;
                // SAFETY: not null, and the application passed it for the driver to write the result to.
                unsafe { write_result(pointer, to_v1_pointer(made)?) };
                Ok(())
            })
    }

    fn cuMemAllocPitch_v2(
        pointer: *mut CUdeviceptr,
        pitch: *mut usize,
        width_in_bytes: usize,
        height: usize,
        element_size_bytes: u32,
    ) |next, _variant| {
        if pointer.is_null() || pitch.is_null() || width_in_bytes == 0 || height == 0 {
            // SAFETY: the application's arguments, passed on unchanged under the driver function's own contract.
            return unsafe { next(pointer, pitch, width_in_bytes, height, element_size_bytes) };
        }
        with_grant(
            |process| {
                let (made, wide) = allocate_pitched(process, (width_in_bytes, height, element_size_bytes))?;
                // SAFETY: not null, and the application passed it for the driver to write the result to.
                unsafe { write_result(pitch, wide) };
                // SAFETY: not null, and the application passed it for the driver to write the result to.
                unsafe { write_result(pointer, made) };
                Ok(())
            })
    }

    fn cuMemAllocPitch(
        pointer: *mut CUdeviceptr_v1,
        pitch: *mut u32,
        width_in_bytes: u32,
        height: u32,
        element_size_bytes: u32,
    ) |next, _variant| {
        if pointer.is_null() || pitch.is_null() || width_in_bytes == 0 || height == 0 {
            // SAFETY: the application's arguments, passed on unchanged under the driver function's own contract.
            return unsafe { next(pointer, pitch, width_in_bytes, height, element_size_bytes) };
        }
        with_grant(
            |process| {
                let mut wide = 0;
                let most = u64::from(width_in_bytes).next_multiple_of(PITCH_ALIGNMENT).saturating_mul(u64::from(height));
                let made = allocate(process, most, |pointer| {
                    let mut short = 0;
                    // SAFETY: the pointers are to local variables, which the driver fills in.
                    let answer = unsafe { next(&mut short, &mut wide, width_in_bytes, height, element_size_bytes) };
                    *pointer = u64::from(short);
                    answer
                })?;
                // SAFETY: not null, and the application passed it for the driver to write the result to.
                unsafe { write_result(pitch, wide) };
                // SAFETY: not null, and the application passed it for the driver to write the result to.
                unsafe { write_result(pointer, to_v1_pointer(made)?) };
                Ok(())
            })
    }

    /// Counted at its full size at once: a kernel may move all of it to the GPU, without a call that could be refused.
    fn cuMemAllocManaged(pointer: *mut CUdeviceptr, bytes: usize, flags: u32) |next, _variant| {
        if pointer.is_null() || bytes == 0 {
            // SAFETY: the application's arguments, passed on unchanged under the driver function's own contract.
            return unsafe { next(pointer, bytes, flags) };
        }
        with_grant(
            |process| {
                let gpu = current_gpu(process)?;
                // SAFETY: the pointer is to a local variable, which the driver fills in.
                let made = allocate_blocks(process, gpu, bytes as u64, |pointer| unsafe { next(pointer, bytes, flags) });
                let made = made.or_else(|refused| oversubscribe::allocate(process, bytes as u64, refused))?;
                // SAFETY: not null, and the application passed it for the driver to write the result to.
                unsafe { write_result(pointer, made) };
                Ok(())
            })
    }

    fn cuMemFree_v2(pointer: CUdeviceptr) |next, _variant| {
        // SAFETY: the application's arguments, passed on unchanged under the driver function's own contract.
        free(pointer, || unsafe { next(pointer) })
    }

    fn cuMemFree(pointer: CUdeviceptr_v1) |next, _variant| {
        // SAFETY: the application's arguments, passed on unchanged under the driver function's own contract.
        free(u64::from(pointer), || unsafe { next(pointer) })
    }
}
