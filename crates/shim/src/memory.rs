//! Accounts for the GPU memory of a process, and hooks every call that changes it.
//!
//! The rule: memory is reserved in the container's account first, then allocated by the driver; what the driver refuses
//! is released again. The account counts what the driver takes: whole blocks of 2 MiB, what a pool has reserved, a
//! context's own memory. Where that cannot be known, more is counted rather than less.
//!
//! | | |
//! |---|---|
//! | `linear` | memory with an address: linear, pitched, managed |
//! | `oversubscribe` | memory on the host instead of the GPU |
//! | `pools` | stream-ordered memory |
//! | `virtual_memory` | memory without an address |
//! | `arrays` | arrays and mipmapped arrays |
//! | `graphs` | memory that graphs allocate themselves |
//! | `modules` | device code and its variables |
//! | `ipc` | memory imported from other APIs |
//! | `contexts` | contexts, and what is freed with them |
//! | `device_heaps` | memory that kernels allocate and print into |
//! | `info` | total and free memory, as the application sees it |
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

use crate::driver::cuda as driver;
use crate::process::{self, GrantStatus, Process};
use allocations::{Allocations, HeldMemory};
use arrays::ProcessArrays;
use contexts::Contexts;
use device_heaps::DeviceHeaps;
use graphs::GraphMemory;
use ipc::ImportedMemory;
use modules::Modules;
use oversubscribe::OversubscribedMemory;
use partage_driver_api::cuda::*;
use partage_region::futex::preserve_errno;
use pools::MemoryPools;
use std::sync::{Mutex, MutexGuard, PoisonError};
use stream_ordered_free::PendingFrees;
use suballocation::Suballocations;
use virtual_memory::VirtualMemory;

/// Bytes that the driver takes of a GPU at a time, and that small allocations share.
const BLOCK_BYTES: u64 = 2 << 20;

/// Memory that this process holds, by kind of driver object.
#[derive(Default)]
pub(crate) struct ProcessMemory {
    /// Allocations with an address and blocks of their own.
    allocations: Allocations,
    /// Allocations with an address that share a block.
    suballocations: Suballocations,
    contexts: Contexts,
    pools: MemoryPools,
    /// Memory that is freed when a stream has reached the free.
    pending_frees: PendingFrees,
    virtual_memory: VirtualMemory,
    arrays: ProcessArrays,
    graphs: GraphMemory,
    modules: Modules,
    imported: ImportedMemory,
    device_heaps: DeviceHeaps,
    /// Memory that is not counted, because it stays on the host.
    oversubscribed: OversubscribedMemory,
}

/// Memory reserved in the container's account; released on drop unless it is kept.
struct Reservation<'a> {
    process: &'a Process,
    gpu: usize,
    bytes: u64,
}

impl<'a> Reservation<'a> {
    /// Reserves memory, or returns the driver's error code.
    #[inline]
    fn take(process: &'a Process, gpu: usize, bytes: u64) -> Result<Self, CUresult> {
        if bytes > 0 && !process.region.try_reserve(gpu, bytes) {
            take_after_reclaim(process, gpu, bytes)?;
        }
        Ok(Self { process, gpu, bytes })
    }

    /// Keeps the reservation: the record of the allocation releases it later.
    #[inline]
    fn keep(self) -> u64 {
        std::mem::ManuallyDrop::new(self).bytes
    }
}

impl Drop for Reservation<'_> {
    #[inline]
    fn drop(&mut self) {
        if self.bytes > 0 {
            self.process.region.release(self.gpu, self.bytes);
        }
    }
}

/// Tries again after reclaiming memory of dead processes, memory that the driver has returned meanwhile, and
/// short-lived reservations of other threads.
#[cold]
fn take_after_reclaim(process: &Process, gpu: usize, bytes: u64) -> Result<(), CUresult> {
    let region = &process.region;
    region.reclaim_dead_processes();
    if region.try_reserve(gpu, bytes)
        || process.memory.release_returned(process, gpu) && region.try_reserve(gpu, bytes)
        || retry::reserve_with_retry(region, gpu, bytes)
    {
        return Ok(());
    }
    region.note_refusal(gpu);
    Err(CUDA_ERROR_OUT_OF_MEMORY)
}

impl ProcessMemory {
    /// Releases what the driver has freed by itself. Returns whether anything was released.
    fn release_returned(&self, process: &Process, gpu: usize) -> bool {
        let before = process.region.held(gpu);
        self.pending_frees.release_finished(process);
        self.pools.refresh(process, gpu);
        self.graphs.refresh(process, gpu);
        process.region.held(gpu) < before
    }

    /// Returns the GPU of a context of this process.
    pub(crate) fn gpu_of(&self, context: CUcontext) -> Option<usize> {
        self.contexts.location(context).map(|(_, gpu)| gpu)
    }

    /// Releases what was in a context that has been destroyed.
    fn forget_context(&self, process: &Process, gpu: usize, context: CUcontext) {
        self.pending_frees.forget_context(process, context);
        self.arrays.forget_context(process, context);
        self.modules.forget_context(process, context);
        self.device_heaps.forget_context(process, context);
        self.forget_unknown(process, gpu);
        self.pools.refresh(process, gpu);
    }

    /// Releases allocations that the driver no longer knows: they were freed together with their owner.
    ///
    /// The driver is queried again while the record is locked: another thread may have allocated at the same address.
    fn forget_unknown(&self, process: &Process, gpu: usize) {
        for pointer in self.allocations.on_gpu(gpu) {
            if !is_known_to_driver(pointer)
                && let Some(held) = self.allocations.remove_if(pointer, || !is_known_to_driver(pointer))
            {
                self.release(process, held);
            }
        }
        self.oversubscribed.forget_unknown(is_known_to_driver);
        for pointer in self.suballocations.on_gpu(gpu) {
            if !is_known_to_driver(pointer)
                && let Some(piece) =
                    self.suballocations.begin_free_if(pointer, || !is_known_to_driver(pointer))
                && self.suballocations.finish_free(&piece)
            {
                process.region.release(gpu, BLOCK_BYTES);
            }
        }
    }

    /// Releases the reservation of a freed allocation.
    #[inline]
    fn release(&self, process: &Process, held: HeldMemory) {
        if held.pool == 0 {
            process.region.release(held.gpu(), held.bytes);
        } else {
            self.pools.piece_freed(process, held, None);
        }
    }

    /// Records an allocation. A previous record of the same address was freed with its context.
    #[inline]
    fn record(&self, process: &Process, pointer: CUdeviceptr, held: HeldMemory) {
        if let Some(gone) = self.allocations.insert(pointer, held) {
            self.release(process, gone);
        }
    }
}

/// Returns whether the driver knows an allocation at this address.
fn is_known_to_driver(pointer: CUdeviceptr) -> bool {
    let mut kind = 0u32;
    // SAFETY: the pointer is to a local variable of the attribute's type; the driver looks the address up and does not
    // access it.
    let answer = unsafe {
        driver::cuPointerGetAttribute((&raw mut kind).cast(), CU_POINTER_ATTRIBUTE_MEMORY_TYPE, pointer)
    };
    answer == CUDA_SUCCESS
}

/// Runs work that needs a grant; refuses it if the process has none.
#[inline]
fn with_grant(work: impl FnOnce(&'static Process) -> Result<(), CUresult>) -> CUresult {
    match process::grant_status() {
        GrantStatus::Granted(process) => code(work(process)),
        GrantStatus::Refused => CUDA_ERROR_NOT_PERMITTED,
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

/// Returns the GPU of the calling thread's context.
#[inline]
fn current_gpu(process: &Process) -> Result<usize, CUresult> {
    match process.devices.current(&process.region) {
        Some(gpu) => Ok(gpu),
        None => Err(no_gpu_reason()),
    }
}

/// Returns the driver's own error if there is no context, and the shim's if there is one.
#[cold]
fn no_gpu_reason() -> CUresult {
    let mut device = 0;
    // SAFETY: the pointer is to a local variable, which the driver fills in.
    match unsafe { driver::cuCtxGetDevice(&mut device) } {
        CUDA_SUCCESS => CUDA_ERROR_NOT_PERMITTED,
        refused => refused,
    }
}

/// Returns the error for a refused reservation: in a thread without a context it is the driver's, not "out of memory".
#[cold]
fn refusal_code(refused: CUresult) -> CUresult {
    match no_gpu_reason() {
        CUDA_ERROR_NOT_PERMITTED => refused,
        other => other,
    }
}

/// Returns the GPU of a device.
fn gpu_of_device(process: &Process, device: CUdevice) -> Result<usize, CUresult> {
    if let Some(gpu) = process.devices.gpu(&process.region, device) {
        return Ok(gpu);
    }
    let mut count = 0;
    // SAFETY: the pointer is to a local variable, which the driver fills in.
    checked(unsafe { driver::cuDeviceGetCount(&mut count) })?;
    Err(if (0..count).contains(&device) { CUDA_ERROR_NOT_PERMITTED } else { CUDA_ERROR_INVALID_DEVICE })
}

#[inline]
fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    /// Locks the mutex after waiting. Records are consistent at every step, even if a thread panicked. Waiting may
    /// change `errno`, which a program could notice.
    #[cold]
    fn wait<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
        preserve_errno(|| mutex.lock().unwrap_or_else(PoisonError::into_inner))
    }
    mutex.try_lock().unwrap_or_else(|_| wait(mutex))
}

/// Writes a result for the application.
///
/// # Safety
///
/// `to` must be valid for writes and not null.
#[inline]
unsafe fn write_result<T>(to: *mut T, value: T) {
    // SAFETY: the caller guarantees that `to` is valid for writes and not null.
    unsafe { to.write(value) };
}
