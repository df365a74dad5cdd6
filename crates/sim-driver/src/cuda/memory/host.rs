//! Memory of the host that the driver knows: copies from and to it need no stop on the way. It is not on the card.

use super::super::context::Context;
use super::arena::new_id;
use super::find::{Found, Kind};
use super::*;

const ALLOCATION_FLAGS: u32 =
    CU_MEMHOSTALLOC_PORTABLE | CU_MEMHOSTALLOC_DEVICEMAP | CU_MEMHOSTALLOC_WRITECOMBINED;
const REGISTRATION_FLAGS: u32 = CU_MEMHOSTREGISTER_PORTABLE
    | CU_MEMHOSTREGISTER_DEVICEMAP
    | CU_MEMHOSTREGISTER_IOMEMORY
    | CU_MEMHOSTREGISTER_READ_ONLY;

const PAGE: usize = 4096;

fn range(context: &'static Context, kind: Kind, start: u64, bytes: usize, flags: u32) -> Found {
    Found {
        kind,
        start,
        bytes,
        device: Some(context.device),
        context: Some(context),
        id: new_id(),
        flags,
        owner: 0,
        sync_memops: false,
    }
}

/// New memory of the host.
pub(super) fn allocate(context: &'static Context, bytes: usize, flags: u32) -> Result<u64, CudaError> {
    if bytes == 0 || flags & !ALLOCATION_FLAGS != 0 {
        return Err(CudaError::INVALID_VALUE);
    }
    check(context.device)?;
    // Not more than the host has: the kernel refuses what could never be there.
    let start = map(bytes, libc::MAP_PRIVATE | libc::MAP_ANONYMOUS, None).ok_or(CudaError::OUT_OF_MEMORY)?;
    insert(range(context, Kind::HostAllocated, start, bytes, flags));
    Ok(start)
}

/// Frees it.
pub(super) fn free(context: &'static Context, start: u64) -> Result<(), CudaError> {
    settle(context)?;
    release(start, |found| found.kind == Kind::HostAllocated)
}

/// Whether the program has memory there.
fn is_mapped(start: u64, bytes: usize) -> bool {
    let first = start / PAGE as u64 * PAGE as u64;
    let pages = (start + bytes as u64 - first).div_ceil(PAGE as u64) as usize;
    // One byte for each page, a piece at a time.
    let mut there = [0u8; 1024];
    (0..pages).step_by(there.len()).all(|page| {
        let length = (pages - page).min(there.len()) * PAGE;
        let address = (first + (page * PAGE) as u64) as *mut c_void;
        // SAFETY: only looks; the answer has room for as many pages.
        unsafe { libc::mincore(address, length, there.as_mut_ptr()) == 0 }
    })
}

/// Makes memory of the program known.
pub(super) fn register(
    context: &'static Context,
    start: u64,
    bytes: usize,
    flags: u32,
) -> Result<(), CudaError> {
    let known = flags & !REGISTRATION_FLAGS == 0;
    if start == 0 || bytes == 0 || start.checked_add(bytes as u64).is_none() || !known {
        return Err(CudaError::INVALID_VALUE);
    }
    check(context.device)?;
    if super::arena::is_inside(start) || !is_mapped(start, bytes) {
        return Err(CudaError::INVALID_VALUE);
    }
    if add(range(context, Kind::HostRegistered, start, bytes, flags)) {
        Ok(())
    } else {
        Err(CudaError::HOST_MEMORY_ALREADY_REGISTERED)
    }
}

/// Forgets it.
pub(super) fn unregister(context: &'static Context, start: u64) -> Result<(), CudaError> {
    settle(context)?;
    release(start, |found| found.kind == Kind::HostRegistered)
        .map_err(|_| CudaError::HOST_MEMORY_NOT_REGISTERED)
}

/// The host memory at an address.
pub(super) fn at(pointer: u64) -> Result<Found, CudaError> {
    find::find(pointer).filter(|found| found.kind.is_host()).ok_or(CudaError::INVALID_VALUE)
}
