//! Heaps on the device: memory that kernels allocate and print into, of a size that the program sets.
//!
//! A context has some of it from the beginning, which is counted with the context. Only the excess is reserved here, at
//! once and for as long as the context exists: when the driver takes it is unknown.
#![allow(unsafe_code)]

use super::{Reservation, checked, contexts, current_gpu, lock, with_grant};
use crate::driver::cuda as driver;
use crate::hook::hooks;
use crate::process::Process;
use partage_driver_api::cuda::*;
use partage_region::MEMORY_UNIT;
use std::sync::Mutex;

/// Heap sizes that were set, by context. Few programs set any.
#[derive(Default)]
pub(super) struct DeviceHeaps {
    all: Mutex<Vec<HeapLimit>>,
}

struct HeapLimit {
    context: u64,
    /// The context that it is freed with.
    owner: u64,
    limit: CUlimit,
    gpu: usize,
    /// Size that the context had from the beginning.
    initial: u64,
    /// Bytes reserved for the excess.
    bytes: u64,
}

impl DeviceHeaps {
    /// Releases the heaps of a context that has been destroyed.
    pub(super) fn forget_context(&self, process: &Process, context: CUcontext) {
        let context = context.addr() as u64;
        lock(&self.all).retain(|heap| {
            let gone = heap.owner == context;
            if gone && heap.bytes > 0 {
                process.region.release(heap.gpu, heap.bytes);
            }
            !gone
        });
    }
}

/// Sets a heap size, with the driver's call.
fn set_heap_limit(
    process: &Process,
    limit: CUlimit,
    value: u64,
    call: impl FnOnce() -> CUresult,
) -> Result<(), CUresult> {
    let gpu = current_gpu(process)?;
    let current = contexts::current_context()?;
    let context = current.addr() as u64;
    let owner = process.memory.contexts.owning_context(current).addr() as u64;
    // Locked while the driver works: the previous size must be known.
    let mut all = lock(&process.memory.device_heaps.all);
    let at = match all.iter().position(|heap| heap.context == context && heap.limit == limit) {
        Some(at) => at,
        None => {
            let mut initial = 0;
            // SAFETY: the pointer is to a local variable, which the driver fills in.
            checked(unsafe { driver::cuCtxGetLimit(&mut initial, limit) })?;
            all.push(HeapLimit { context, owner, limit, gpu, initial: initial as u64, bytes: 0 });
            all.len() - 1
        }
    };
    let Some(heap) = all.get_mut(at) else { return checked(call()) };
    let beyond = value.saturating_sub(heap.initial).checked_next_multiple_of(MEMORY_UNIT).unwrap_or(u64::MAX);
    let more = Reservation::take(process, gpu, beyond.saturating_sub(heap.bytes))?;
    checked(call())?;
    heap.bytes += more.keep();
    if heap.bytes > beyond {
        process.region.release(gpu, heap.bytes - beyond);
        heap.bytes = beyond;
    }
    Ok(())
}

hooks! { cuda;
    fn cuCtxSetLimit(limit: CUlimit, value: usize) |next, _variant| {
        if limit != CU_LIMIT_MALLOC_HEAP_SIZE && limit != CU_LIMIT_PRINTF_FIFO_SIZE {
            // SAFETY: the application's arguments, passed on unchanged under the driver function's own contract.
            return unsafe { next(limit, value) };
        }
        with_grant(
            // SAFETY: the application's arguments, passed on unchanged under the driver function's own contract.
            |process| set_heap_limit(process, limit, value as u64, || unsafe { next(limit, value) }))
    }
}
