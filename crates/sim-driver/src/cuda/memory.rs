//! Device memory and host memory.
//!
//! A device pointer is an address in this process: device memory is host memory that is committed on first write. The
//! limit is the card's memory accounting, which all processes of the node share.

mod address_space;
mod buddy;
mod device_arena;
mod free_blocks;
mod host;
mod lookup;
mod managed;
mod memory_functions;
mod memory_op;
mod pointer_attributes;
mod ranges;
#[cfg(test)]
mod tests;

pub(super) use device_arena::{check, new_id, note_file, replace_pages, reserve, unreserve, update};
pub(super) use lookup::{MemoryKind, MemoryRange, covers, find};
pub(super) use memory_op::{MemoryNodeParams, MemoryOp, MemoryPlace, REMAP_LOCK};
pub(super) use ranges::{add, insert, list, map, remove, unmap, update as update_range};

use super::context::Context;
use super::device::Device;
use super::stream::Stream;
use super::*;
use std::sync::atomic::{AtomicUsize, Ordering};

/// Copies and fills that were submitted and are not done.
static PENDING_OPERATIONS: AtomicUsize = AtomicUsize::new(0);

/// Frees all memory of a context.
pub(super) fn drop_all(context: &'static Context) {
    pools::drop_all(context);
    let of_context = |found: &MemoryRange| found.context.is_some_and(|own| std::ptr::eq(own, context));
    // Physical handles and their mappings belong to the process, not to a context.
    for range in
        list(|found| of_context(found) && !matches!(found.kind, MemoryKind::Mapped | MemoryKind::Pool))
    {
        let _ = release(range.start, |_| true);
    }
    arrays::drop_all(context);
    device_arena::drop_all(context);
}

/// Returns the host address of device memory if the driver knows the whole range.
pub(super) fn host_address(pointer: CUdeviceptr, bytes: usize) -> Result<*mut u8, CudaError> {
    covers(pointer, bytes, true).map(|()| pointer as *mut u8)
}

/// Returns whether the program can still access memory that the driver knew when work on it was submitted.
pub(super) fn is_still_mapped(pointer: CUdeviceptr) -> bool {
    // Addresses of cards stay mapped when they are freed.
    lookup::is_device_address(pointer) || ranges::find(pointer).is_some()
}

/// Allocates device memory for the driver's own use.
pub(super) fn allocate(context: &'static Context, bytes: usize) -> Result<CUdeviceptr, CudaError> {
    device_arena::allocate(context, bytes, MemoryKind::Global)
}

/// Frees plain device memory and module globals.
pub(super) fn free(pointer: CUdeviceptr) -> Result<(), CudaError> {
    device_arena::free(pointer, |kind| matches!(kind, MemoryKind::Plain | MemoryKind::Global))
}

/// Frees memory by the address that the program has; nothing may use it any more.
pub(super) fn free_unused(pointer: CUdeviceptr) -> Result<(), CudaError> {
    match device_arena::free(pointer, |kind| kind == MemoryKind::Plain) {
        Ok(()) => Ok(()),
        Err(_) => free_other(pointer),
    }
}

#[cold]
fn free_other(pointer: CUdeviceptr) -> Result<(), CudaError> {
    match find(pointer).map(|found| found.kind) {
        Some(MemoryKind::Pool) => pools::free_now(pointer),
        Some(MemoryKind::Graph) => free_graph_allocation(pointer, None),
        _ => release(pointer, |found| matches!(found.kind, MemoryKind::Managed | MemoryKind::External)),
    }
}

/// Frees memory that a graph node allocated.
pub(super) fn free_graph_allocation(
    pointer: CUdeviceptr,
    _stream: Option<&'static Stream>,
) -> Result<(), CudaError> {
    // The next launch can reuse it immediately: its address is fixed, and launches are ordered anyway.
    if graph::free(pointer) { Ok(()) } else { Err(CudaError::INVALID_VALUE) }
}

/// Allocates device memory that programs have no address of or see only in pieces.
pub(super) fn allocate_internal(
    device: &'static Device,
    bytes: usize,
    kind: MemoryKind,
) -> Result<u64, CudaError> {
    device_arena::allocate_on(device, None, bytes, kind)
}

/// Returns the chunk of a memory pool that starts at this address.
pub(super) fn find_chunk(start: u64) -> Option<MemoryRange> {
    device_arena::find(start).filter(|found| found.kind == MemoryKind::Chunk)
}

/// Frees memory from `allocate_internal`.
pub(super) fn free_internal(start: u64) {
    let _ = device_arena::free(start, |kind| matches!(kind, MemoryKind::Array | MemoryKind::Chunk));
}

/// Releases memory that is not a plain device allocation.
pub(super) fn release(start: u64, accept: impl FnOnce(&MemoryRange) -> bool) -> Result<(), CudaError> {
    let range = remove(start, accept).ok_or(CudaError::INVALID_VALUE)?;
    match range.kind {
        MemoryKind::Managed => managed::forget(&range),
        MemoryKind::Opened => sharing::unmap_opened(&range),
        _ => {}
    }
    if !matches!(range.kind, MemoryKind::HostRegistered | MemoryKind::Opened) {
        unmap(&range);
    }
    Ok(())
}

/// Waits for work that may use memory about to be freed, as the real driver does.
#[inline]
pub(super) fn wait_until_unused(context: &'static Context) -> Result<(), CudaError> {
    let device = context.device;
    check(device)?;
    let pending = PENDING_OPERATIONS.load(Ordering::Acquire) > 0 || engine::has_pending_writes();
    if !pending && device.state.is_idle(device.gpu) {
        return Ok(());
    }
    wait_until_unused_slow(context)
}

#[cold]
fn wait_until_unused_slow(context: &'static Context) -> Result<(), CudaError> {
    let busy = PENDING_OPERATIONS.load(Ordering::Acquire) > 0 || {
        let mut engine = context.device.engine();
        let lane = engine.lane()?;
        let busy = lane.refresh()? < lane.submitted();
        engine.store_reached_words();
        busy
    };
    if busy {
        context.sync()?;
    }
    // Copies of other contexts may refer to the memory.
    if PENDING_OPERATIONS.load(Ordering::Acquire) > 0 {
        context::live().for_each(|other| {
            let _ = other.sync();
        });
    }
    Ok(())
}

/// Counts an operation as pending until the returned guard is dropped.
pub(super) fn begin_operation() -> PendingOperation {
    PENDING_OPERATIONS.fetch_add(1, Ordering::AcqRel);
    PendingOperation
}

/// A pending copy, fill or prefetch.
pub(super) struct PendingOperation;

impl Drop for PendingOperation {
    fn drop(&mut self) {
        PENDING_OPERATIONS.fetch_sub(1, Ordering::AcqRel);
    }
}
