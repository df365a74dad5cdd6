//! Memory with an address: linear, pitched, managed.
//!
//! Memory of the host that the driver knows (`cuMemHostAlloc`, `cuMemAllocHost`, `cuMemHostRegister`) takes nothing of a
//! card and goes past here.
#![allow(unsafe_code)]

use super::allocations::Held;
use super::suballocation::MOST;
use super::{BLOCK, Reserved, answer, checked, granted, here, oversubscribe, refused_here};
use crate::driver::cuda as real;
use crate::hook::hooks;
use crate::process::{self, Process};
use partage_driver_api::cuda::*;

/// Rows of pitched memory begin at multiples of this on every card there is.
const PITCH: u64 = 512;

/// Allocates on the thread's GPU, with the driver's call.
#[inline]
fn allocate(
    process: &Process,
    bytes: u64,
    call: impl FnOnce(&mut CUdeviceptr) -> CUresult,
) -> Result<CUdeviceptr, CUresult> {
    let gpu = here(process)?;
    if bytes > MOST {
        allocate_blocks(process, gpu, bytes, call)
    } else {
        allocate_piece(process, gpu, bytes, call)
    }
}

/// What takes blocks of its own.
#[inline]
fn allocate_blocks(
    process: &Process,
    gpu: usize,
    bytes: u64,
    call: impl FnOnce(&mut CUdeviceptr) -> CUresult,
) -> Result<CUdeviceptr, CUresult> {
    let whole = bytes.checked_next_multiple_of(BLOCK).unwrap_or(u64::MAX);
    let reserved = Reserved::take(process, gpu, whole).map_err(refused_here)?;
    let mut pointer = 0;
    checked(call(&mut pointer))?;
    process.memory.note(process, pointer, Held::new(gpu, reserved.keep()));
    Ok(pointer)
}

/// What shares a block with others.
fn allocate_piece(
    process: &Process,
    gpu: usize,
    bytes: u64,
    call: impl FnOnce(&mut CUdeviceptr) -> CUresult,
) -> Result<CUdeviceptr, CUresult> {
    let small = &process.memory.small;
    let _alone = small.begin(gpu).ok_or(CUDA_ERROR_NOT_PERMITTED)?;
    // Where not even a block is left, any block that is there may have room.
    let short = process
        .region
        .memory_limit(gpu)
        .is_some_and(|limit| limit.saturating_sub(process.region.used(gpu)) < BLOCK);
    let mut pointer = 0;
    let Some(block) = small.lean(gpu, bytes, short) else {
        let reserved = Reserved::take(process, gpu, BLOCK).map_err(refused_here)?;
        checked(call(&mut pointer))?;
        if small.insert(gpu, pointer, bytes) {
            reserved.keep();
        }
        return Ok(pointer);
    };
    let leaned = Leaned { process, gpu, block };
    checked(call(&mut pointer))?;
    if !small.insert(gpu, pointer, bytes) || leaned.take_over() {
        return Ok(pointer);
    }
    // Something that nobody has an address of lies where there seemed to be room.
    small.doubt(gpu);
    if let Ok(reserved) = Reserved::take(process, gpu, BLOCK) {
        reserved.keep();
        return Ok(pointer);
    }
    // SAFETY: just allocated, and nobody knows of it.
    unsafe { real::cuMemFree_v2(pointer) };
    if let Some(piece) = small.begin_to_free(pointer) {
        small.freed(&piece);
    }
    Err(CUDA_ERROR_OUT_OF_MEMORY)
}

/// A block that an allocation leans on.
struct Leaned<'a> {
    process: &'a Process,
    gpu: usize,
    block: u64,
}

impl Leaned<'_> {
    /// The driver has opened another block: if this one has gone meanwhile, what was taken for it is the other's.
    fn take_over(self) -> bool {
        let own = std::mem::ManuallyDrop::new(self);
        own.process.memory.small.straighten(own.block)
    }
}

impl Drop for Leaned<'_> {
    fn drop(&mut self) {
        if self.process.memory.small.straighten(self.block) {
            self.process.region.release(self.gpu, BLOCK);
        }
    }
}

/// A variable of a module, with the driver's call: the driver may place it when it is first asked for.
pub(super) fn variable(
    pointer: *mut CUdeviceptr,
    bytes: *mut usize,
    call: impl Fn(*mut CUdeviceptr, *mut usize) -> CUresult,
) -> CUresult {
    granted(|process| {
        let gpu = here(process)?;
        let small = &process.memory.small;
        let _alone = small.begin(gpu).ok_or(CUDA_ERROR_NOT_PERMITTED)?;
        let (mut at, mut size) = (0, 0);
        let reserved = Reserved::take(process, gpu, BLOCK);
        checked(call(&mut at, &mut size))?;
        if size as u64 > MOST {
            if !process.memory.allocations.contains(at) {
                drop(reserved);
                let whole = (size as u64).checked_next_multiple_of(BLOCK).unwrap_or(u64::MAX);
                let taken = Reserved::take(process, gpu, whole)?;
                process.memory.note(process, at, Held::new(gpu, taken.keep()));
            }
        } else if small.insert(gpu, at, size as u64) {
            // It is there now. Where there is no room for its block, the program has no use for it.
            reserved?.keep();
        }
        if !pointer.is_null() {
            // SAFETY: not null, and the program's to write.
            unsafe { answer(pointer, at) };
        }
        if !bytes.is_null() {
            // SAFETY: likewise.
            unsafe { answer(bytes, size) };
        }
        Ok(())
    })
}

/// Plain memory, whatever was asked for.
pub(super) fn allocate_plainly(process: &Process, bytes: usize) -> Result<CUdeviceptr, CUresult> {
    // SAFETY: a number to fill in.
    allocate(process, bytes as u64, |pointer| unsafe { real::cuMemAlloc_v2(pointer, bytes) })
}

/// Frees what has an address, with the driver's call.
#[inline]
pub(super) fn free(pointer: CUdeviceptr, call: impl FnOnce() -> CUresult) -> CUresult {
    let Some(process) = process::attached() else { return call() };
    let memory = &process.memory;
    if let Some(held) = memory.allocations.remove(pointer) {
        let answer = call();
        if answer == CUDA_SUCCESS {
            memory.give_back(process, held);
        } else {
            memory.note(process, pointer, held);
        }
        return answer;
    }
    let Some(piece) = memory.small.begin_to_free(pointer) else { return memory.beyond.free(pointer, call) };
    let answer = call();
    if answer != CUDA_SUCCESS {
        memory.small.kept(&piece);
    } else if memory.small.freed(&piece) {
        process.region.release(piece.gpu, BLOCK);
    }
    answer
}

/// An address that old programs can have; one that is too long is given back.
fn narrow(pointer: CUdeviceptr) -> Result<CUdeviceptr_v1, CUresult> {
    CUdeviceptr_v1::try_from(pointer).map_err(|_| {
        // SAFETY: just allocated, and nobody knows of it.
        free(pointer, || unsafe { real::cuMemFree_v2(pointer) });
        CUDA_ERROR_OUT_OF_MEMORY
    })
}

/// Pitched memory: how much it is, is known when the driver has chosen the pitch.
fn allocate_pitched(
    process: &Process,
    (width, height, element): (usize, usize, u32),
) -> Result<(CUdeviceptr, usize), CUresult> {
    let wide = (width as u64).checked_next_multiple_of(PITCH).unwrap_or(u64::MAX);
    let bytes = wide.saturating_mul(height as u64);
    let mut pitch = 0;
    let pointer = allocate(process, bytes, |pointer| {
        // SAFETY: numbers to fill in.
        unsafe { real::cuMemAllocPitch_v2(pointer, &mut pitch, width, height, element) }
    })?;
    let true_bytes = (pitch as u64).saturating_mul(height as u64);
    if true_bytes > bytes
        && let Err(refused) = grow(process, pointer, true_bytes)
    {
        // SAFETY: just allocated, and nobody knows of it.
        free(pointer, || unsafe { real::cuMemFree_v2(pointer) });
        return Err(refused);
    }
    Ok((pointer, pitch))
}

/// An allocation turned out larger than what was taken for it.
fn grow(process: &Process, pointer: CUdeviceptr, bytes: u64) -> Result<(), CUresult> {
    let memory = &process.memory;
    // A piece that is larger than it seemed is in its block all the same.
    let Some(held) = memory.allocations.remove(pointer) else { return Ok(()) };
    let whole = bytes.checked_next_multiple_of(BLOCK).unwrap_or(u64::MAX);
    let more = Reserved::take(process, held.gpu(), whole.saturating_sub(held.bytes));
    let bytes = held.bytes + more.as_ref().map_or(0, |more| more.bytes);
    memory.note(process, pointer, Held::new(held.gpu(), bytes));
    more.map(|more| {
        more.keep();
    })
}

hooks! { cuda;
    fn cuMemAlloc_v2(pointer: *mut CUdeviceptr, bytes: usize) |next, _variant| {
        // What cannot be is the driver's to say.
        if pointer.is_null() || bytes == 0 {
            // SAFETY: the program's promise.
            return unsafe { next(pointer, bytes) };
        }
        granted(
            |process| {
                // SAFETY: a number to fill in.
                let made = allocate(process, bytes as u64, |pointer| unsafe { next(pointer, bytes) });
                let made = made.or_else(|refused| oversubscribe::allocate(process, bytes as u64, refused))?;
                // SAFETY: not null, and the program's to write.
                unsafe { answer(pointer, made) };
                Ok(())
            })
    }

    fn cuMemAlloc(pointer: *mut CUdeviceptr_v1, bytes: u32) |next, _variant| {
        if pointer.is_null() || bytes == 0 {
            // SAFETY: the program's promise.
            return unsafe { next(pointer, bytes) };
        }
        granted(
            |process| {
                let made = allocate(process, u64::from(bytes), |pointer| {
                    let mut short = 0;
                    // SAFETY: a number to fill in.
                    let answer = unsafe { next(&mut short, bytes) };
                    *pointer = u64::from(short);
                    answer
                })?;
                // SAFETY: not null, and the program's to write.
                unsafe { answer(pointer, narrow(made)?) };
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
            // SAFETY: the program's promise.
            return unsafe { next(pointer, pitch, width_in_bytes, height, element_size_bytes) };
        }
        granted(
            |process| {
                let (made, wide) = allocate_pitched(process, (width_in_bytes, height, element_size_bytes))?;
                // SAFETY: not null, and the program's to write.
                unsafe { answer(pitch, wide) };
                // SAFETY: likewise.
                unsafe { answer(pointer, made) };
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
            // SAFETY: the program's promise.
            return unsafe { next(pointer, pitch, width_in_bytes, height, element_size_bytes) };
        }
        granted(
            |process| {
                let mut wide = 0;
                let most = u64::from(width_in_bytes).next_multiple_of(PITCH).saturating_mul(u64::from(height));
                let made = allocate(process, most, |pointer| {
                    let mut short = 0;
                    // SAFETY: numbers to fill in.
                    let answer = unsafe { next(&mut short, &mut wide, width_in_bytes, height, element_size_bytes) };
                    *pointer = u64::from(short);
                    answer
                })?;
                // SAFETY: not null, and the program's to write.
                unsafe { answer(pitch, wide) };
                // SAFETY: likewise.
                unsafe { answer(pointer, narrow(made)?) };
                Ok(())
            })
    }

    /// Counted at its full size at once: a kernel may bring all of it onto the card, and nobody is asked then.
    fn cuMemAllocManaged(pointer: *mut CUdeviceptr, bytes: usize, flags: u32) |next, _variant| {
        if pointer.is_null() || bytes == 0 {
            // SAFETY: the program's promise.
            return unsafe { next(pointer, bytes, flags) };
        }
        granted(
            |process| {
                let gpu = here(process)?;
                // SAFETY: a number to fill in.
                let made = allocate_blocks(process, gpu, bytes as u64, |pointer| unsafe { next(pointer, bytes, flags) });
                let made = made.or_else(|refused| oversubscribe::allocate(process, bytes as u64, refused))?;
                // SAFETY: not null, and the program's to write.
                unsafe { answer(pointer, made) };
                Ok(())
            })
    }

    fn cuMemFree_v2(pointer: CUdeviceptr) |next, _variant| {
        // SAFETY: the program's promise.
        free(pointer, || unsafe { next(pointer) })
    }

    fn cuMemFree(pointer: CUdeviceptr_v1) |next, _variant| {
        // SAFETY: the program's promise.
        free(u64::from(pointer), || unsafe { next(pointer) })
    }
}
