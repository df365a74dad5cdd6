//! What a process holds of its GPUs' memory, and every call that changes it.
//!
//! One rule: memory is taken from the container's account, then from the driver; what the driver does not give goes back
//! to the account. What the driver counts is what is counted: whole blocks of 2 MiB, what a pool has reserved, a context's
//! own. Where that cannot be known, more is counted rather than less.
//!
//! | | |
//! |---|---|
//! | [`plain`] | memory with an address: linear, pitched, managed |
//! | [`beyond`] | what the host has instead |
//! | [`pools`] | memory in stream order |
//! | [`virtual_memory`] | memory without an address |
//! | [`arrays`] | arrays and mipmapped arrays |
//! | [`graphs`] | what graphs allocate themselves |
//! | [`modules`] | device code and its variables |
//! | [`sharing`] | memory of others |
//! | [`contexts`] | contexts, and what goes with them |
//! | [`heaps`] | what kernels allocate and print into |
//! | [`info`] | how much there is and how much of it is free |
#![allow(unsafe_code)]

pub(crate) mod arrays;
pub(crate) mod contexts;
pub(crate) mod device_heaps;
pub(crate) mod graphs;
pub(crate) mod info;
pub(crate) mod ipc;
pub(crate) mod linear;
pub(crate) mod modules;
pub(crate) mod oversubscribe;
pub(crate) mod pools;
pub(crate) mod virtual_memory;

mod allocations;
mod module_images;
mod retry;
mod stream_ordered_free;
mod suballocation;

use crate::driver::cuda as real;
use crate::process::{self, Process, Standing};
use allocations::{Allocations, Held};
use arrays::Arrays;
use contexts::Contexts;
use device_heaps::Heaps;
use graphs::Graphs;
use ipc::Sharing;
use modules::Modules;
use oversubscribe::Beyond;
use partage_driver_api::cuda::*;
use partage_region::futex::keeping_errno;
use pools::Pools;
use std::sync::{Mutex, MutexGuard, PoisonError};
use stream_ordered_free::Later;
use suballocation::Small;
use virtual_memory::VirtualMemory;

/// What the driver takes of a card at a time, and what small allocations share.
const BLOCK: u64 = 2 << 20;

/// What this process holds, by what the driver calls it.
#[derive(Default)]
pub(crate) struct Memory {
    /// What has an address and blocks of its own.
    allocations: Allocations,
    /// What has an address and shares its block.
    small: Small,
    contexts: Contexts,
    pools: Pools,
    /// What is freed when a stream has come to it.
    later: Later,
    virtual_memory: VirtualMemory,
    arrays: Arrays,
    graphs: Graphs,
    modules: Modules,
    sharing: Sharing,
    heaps: Heaps,
    /// What is not counted, because it stays on the host.
    beyond: Beyond,
}

/// Memory taken from the container's account, given back unless it is kept.
struct Reserved<'a> {
    process: &'a Process,
    gpu: usize,
    bytes: u64,
}

impl<'a> Reserved<'a> {
    /// Takes memory, or answers what the driver would.
    #[inline]
    fn take(process: &'a Process, gpu: usize, bytes: u64) -> Result<Self, CUresult> {
        if bytes > 0 && !process.region.try_reserve(gpu, bytes) {
            take_again(process, gpu, bytes)?;
        }
        Ok(Self { process, gpu, bytes })
    }

    /// It is used: whoever holds what it is used for gives it back.
    #[inline]
    fn keep(self) -> u64 {
        std::mem::ManuallyDrop::new(self).bytes
    }
}

impl Drop for Reserved<'_> {
    #[inline]
    fn drop(&mut self) {
        if self.bytes > 0 {
            self.process.region.release(self.gpu, self.bytes);
        }
    }
}

/// What the dead had, what the driver has given back in the meantime and what others do not need after all may be enough.
#[cold]
fn take_again(process: &Process, gpu: usize, bytes: u64) -> Result<(), CUresult> {
    let region = &process.region;
    region.sweep();
    if region.try_reserve(gpu, bytes)
        || process.memory.look_for_returned(process, gpu) && region.try_reserve(gpu, bytes)
        || retry::take(region, gpu, bytes)
    {
        return Ok(());
    }
    region.note_refusal(gpu);
    Err(CUDA_ERROR_OUT_OF_MEMORY)
}

impl Memory {
    /// Gives back what the driver gave up by itself; whether that was anything.
    fn look_for_returned(&self, process: &Process, gpu: usize) -> bool {
        let before = process.region.held(gpu);
        self.later.look(process);
        self.pools.refresh(process, gpu);
        self.graphs.refresh(process, gpu);
        process.region.held(gpu) < before
    }

    /// The GPU of a context that this process has.
    pub(crate) fn gpu_of(&self, context: CUcontext) -> Option<usize> {
        self.contexts.place(context).map(|(_, gpu)| gpu)
    }

    /// A context of the GPU is gone, and with it what was in it.
    fn forget_context(&self, process: &Process, gpu: usize, context: CUcontext) {
        self.later.forget_context(process, context);
        self.arrays.forget_context(process, context);
        self.modules.forget_context(process, context);
        self.heaps.forget_context(process, context);
        self.forget_gone(process, gpu);
        self.pools.refresh(process, gpu);
    }

    /// What the driver does not know any more has gone with what it was in.
    ///
    /// The driver is asked again where nobody can note anything: another thread may have allocated at the same address.
    fn forget_gone(&self, process: &Process, gpu: usize) {
        for pointer in self.allocations.on(gpu) {
            if !is_known(pointer)
                && let Some(held) = self.allocations.remove_if(pointer, || !is_known(pointer))
            {
                self.give_back(process, held);
            }
        }
        self.beyond.forget_gone(is_known);
        for pointer in self.small.on(gpu) {
            if !is_known(pointer)
                && let Some(piece) = self.small.begin_to_free_if(pointer, || !is_known(pointer))
                && self.small.freed(&piece)
            {
                process.region.release(gpu, BLOCK);
            }
        }
    }

    /// It is freed.
    #[inline]
    fn give_back(&self, process: &Process, held: Held) {
        if held.pool == 0 {
            process.region.release(held.gpu(), held.bytes);
        } else {
            self.pools.piece_gone(process, held, None);
        }
    }

    /// Notes what has been allocated. What was known there before has gone with its context.
    #[inline]
    fn note(&self, process: &Process, pointer: CUdeviceptr, held: Held) {
        if let Some(gone) = self.allocations.insert(pointer, held) {
            self.give_back(process, gone);
        }
    }
}

/// Whether the driver knows memory there.
fn is_known(pointer: CUdeviceptr) -> bool {
    let mut kind = 0u32;
    // SAFETY: a number to fill in; the driver looks the address up and does not touch it.
    let answer = unsafe {
        real::cuPointerGetAttribute((&raw mut kind).cast(), CU_POINTER_ATTRIBUTE_MEMORY_TYPE, pointer)
    };
    answer == CUDA_SUCCESS
}

/// Does what needs a grant; refuses it where the process has none.
#[inline]
fn granted(work: impl FnOnce(&'static Process) -> Result<(), CUresult>) -> CUresult {
    match process::standing() {
        Standing::Held(process) => code(work(process)),
        Standing::Refused => CUDA_ERROR_NOT_PERMITTED,
    }
}

#[inline]
fn code(result: Result<(), CUresult>) -> CUresult {
    result.err().unwrap_or(CUDA_SUCCESS)
}

#[inline]
fn checked(code: CUresult) -> Result<(), CUresult> {
    if code == CUDA_SUCCESS { Ok(()) } else { Err(code) }
}

/// The GPU of the calling thread's context.
#[inline]
fn here(process: &Process) -> Result<usize, CUresult> {
    match process.devices.current(&process.region) {
        Some(gpu) => Ok(gpu),
        None => Err(why_nowhere()),
    }
}

/// The driver's own reason if there is no context, ours if there is one.
#[cold]
fn why_nowhere() -> CUresult {
    let mut device = 0;
    // SAFETY: a number to fill in.
    match unsafe { real::cuCtxGetDevice(&mut device) } {
        CUDA_SUCCESS => CUDA_ERROR_NOT_PERMITTED,
        refused => refused,
    }
}

/// What a thread without a context is told instead of "out of memory".
#[cold]
fn refused_here(refused: CUresult) -> CUresult {
    match why_nowhere() {
        CUDA_ERROR_NOT_PERMITTED => refused,
        other => other,
    }
}

/// The GPU of a device.
fn of_device(process: &Process, device: CUdevice) -> Result<usize, CUresult> {
    if let Some(gpu) = process.devices.gpu(&process.region, device) {
        return Ok(gpu);
    }
    let mut count = 0;
    // SAFETY: a number to fill in.
    checked(unsafe { real::cuDeviceGetCount(&mut count) })?;
    Err(if (0..count).contains(&device) { CUDA_ERROR_NOT_PERMITTED } else { CUDA_ERROR_INVALID_DEVICE })
}

#[inline]
fn locked<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    /// Books are whole at every step, whoever panicked. Waiting leaves a trace that a program may see.
    #[cold]
    fn wait<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
        keeping_errno(|| mutex.lock().unwrap_or_else(PoisonError::into_inner))
    }
    mutex.try_lock().unwrap_or_else(|_| wait(mutex))
}

/// Writes an answer where the program wants it.
///
/// # Safety
///
/// The program's to write, and not null.
#[inline]
unsafe fn answer<T>(to: *mut T, value: T) {
    // SAFETY: the caller's promise.
    unsafe { to.write(value) };
}
