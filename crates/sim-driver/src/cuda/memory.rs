//! Memory of the card and of the host.
//!
//! A device pointer is an address of this process: the card's memory is host memory that comes when it is written to.
//! What bounds it is the card's account, which all processes of the node share.

mod arena;
mod attributes;
mod calls;
mod find;
mod host;
mod managed;
mod op;
mod ranges;
mod runs;
mod small;
mod space;
#[cfg(test)]
mod tests;

pub(super) use arena::{check, new_id, note_file, renew, reserve, unreserve, update};
pub(super) use find::{Found, Kind, covers, find};
pub(super) use op::{MOVING, MemoryOp, Params, Place};
pub(super) use ranges::{add, insert, list, map, remove, unmap, update as change};

use super::context::Context;
use super::device::Device;
use super::stream::Stream;
use super::*;
use std::sync::atomic::{AtomicUsize, Ordering};

/// Copies and fills that were submitted and are not done.
static PENDING: AtomicUsize = AtomicUsize::new(0);

/// Memory goes with its context.
pub(super) fn drop_all(context: &'static Context) {
    pools::drop_all(context);
    let of_context = |found: &Found| found.context.is_some_and(|own| std::ptr::eq(own, context));
    // Handles and their mappings are the process's, not a context's.
    for range in list(|found| of_context(found) && !matches!(found.kind, Kind::Mapped | Kind::Pool)) {
        let _ = release(range.start, |_| true);
    }
    arrays::drop_all(context);
    arena::drop_all(context);
}

/// Where the bytes of device memory are for this process, if all of them are there.
pub(super) fn host_address(pointer: CUdeviceptr, bytes: usize) -> Result<*mut u8, CudaError> {
    covers(pointer, bytes, true).map(|()| pointer as *mut u8)
}

/// Device memory for the driver's own use.
pub(super) fn allocate(context: &'static Context, bytes: usize) -> Result<CUdeviceptr, CudaError> {
    arena::allocate(context, bytes, Kind::Global)
}

/// Frees device memory.
pub(super) fn free(pointer: CUdeviceptr) -> Result<(), CudaError> {
    arena::free(pointer, |kind| matches!(kind, Kind::Plain | Kind::Global))
}

/// Frees what a program has an address of; nothing uses it any more.
pub(super) fn free_settled(pointer: CUdeviceptr) -> Result<(), CudaError> {
    match arena::free(pointer, |kind| kind == Kind::Plain) {
        Ok(()) => Ok(()),
        Err(_) => free_other(pointer),
    }
}

#[cold]
fn free_other(pointer: CUdeviceptr) -> Result<(), CudaError> {
    match find(pointer).map(|found| found.kind) {
        Some(Kind::Pool) => pools::free_now(pointer),
        Some(Kind::Graph) => free_of_graph(pointer, None),
        _ => release(pointer, |found| matches!(found.kind, Kind::Managed | Kind::External)),
    }
}

/// Frees memory of a graph's node.
pub(super) fn free_of_graph(pointer: CUdeviceptr, _stream: Option<&'static Stream>) -> Result<(), CudaError> {
    // A launch that follows finds it free at once: its address stays, and launches come in order anyway.
    if graph::free(pointer) { Ok(()) } else { Err(CudaError::INVALID_VALUE) }
}

/// Memory of a card that programs have no address of, or see in pieces.
pub(super) fn take(device: &'static Device, bytes: usize, kind: Kind) -> Result<u64, CudaError> {
    arena::allocate_on(device, None, bytes, kind)
}

/// What a pool has taken there.
pub(super) fn chunk(start: u64) -> Option<Found> {
    arena::find(start).filter(|found| found.kind == Kind::Chunk)
}

/// Gives that back.
pub(super) fn give(start: u64) {
    let _ = arena::free(start, |kind| matches!(kind, Kind::Array | Kind::Chunk));
}

/// Ends memory that is not simply a card's.
pub(super) fn release(start: u64, accept: impl FnOnce(&Found) -> bool) -> Result<(), CudaError> {
    let range = remove(start, accept).ok_or(CudaError::INVALID_VALUE)?;
    match range.kind {
        Kind::Managed => managed::forget(&range),
        Kind::Opened => sharing::closed(&range),
        _ => {}
    }
    if !matches!(range.kind, Kind::HostRegistered | Kind::Opened) {
        unmap(&range);
    }
    Ok(())
}

/// Waits for what uses memory that is about to go away: the driver does not free under the feet of work.
#[inline]
pub(super) fn settle(context: &'static Context) -> Result<(), CudaError> {
    let device = context.device;
    check(device)?;
    if PENDING.load(Ordering::Acquire) == 0 && device.state.is_at_rest(device.gpu) {
        return Ok(());
    }
    settle_busy(context)
}

#[cold]
fn settle_busy(context: &'static Context) -> Result<(), CudaError> {
    let busy = PENDING.load(Ordering::Acquire) > 0 || {
        let mut engine = context.device.engine();
        let lane = engine.lane()?;
        lane.refresh()? < lane.submitted()
    };
    if busy {
        context.sync()?;
    }
    // Copies of other contexts may go to what is about to be freed.
    if PENDING.load(Ordering::Acquire) > 0 {
        context::live().for_each(|other| {
            let _ = other.sync();
        });
    }
    Ok(())
}

/// One more operation is under way, until what is returned is dropped.
pub(super) fn under_way() -> UnderWay {
    PENDING.fetch_add(1, Ordering::AcqRel);
    UnderWay
}

/// An operation that is under way.
pub(super) struct UnderWay;

impl Drop for UnderWay {
    fn drop(&mut self) {
        PENDING.fetch_sub(1, Ordering::AcqRel);
    }
}
