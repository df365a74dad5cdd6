//! Pinned host memory: allocated by or registered with the driver, so that copies need no staging. It is not charged
//! to the card.

use super::super::context::Context;
use super::device_arena::new_id;
use super::lookup::{MemoryKind, MemoryRange};
use super::*;

const ALLOCATION_FLAGS: u32 =
    CU_MEMHOSTALLOC_PORTABLE | CU_MEMHOSTALLOC_DEVICEMAP | CU_MEMHOSTALLOC_WRITECOMBINED;
const REGISTRATION_FLAGS: u32 = CU_MEMHOSTREGISTER_PORTABLE
    | CU_MEMHOSTREGISTER_DEVICEMAP
    | CU_MEMHOSTREGISTER_IOMEMORY
    | CU_MEMHOSTREGISTER_READ_ONLY;

const PAGE_BYTES: usize = 4096;

fn range(context: &'static Context, kind: MemoryKind, start: u64, bytes: usize, flags: u32) -> MemoryRange {
    MemoryRange {
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

/// Allocates pinned host memory.
pub(super) fn allocate(context: &'static Context, bytes: usize, flags: u32) -> Result<u64, CudaError> {
    if bytes == 0 || flags & !ALLOCATION_FLAGS != 0 {
        return Err(CudaError::INVALID_VALUE);
    }
    check(context.device)?;
    // Without `MAP_NORESERVE`, so that the kernel refuses more than the host can have.
    let start = map(bytes, libc::MAP_PRIVATE | libc::MAP_ANONYMOUS, None).ok_or(CudaError::OUT_OF_MEMORY)?;
    insert(range(context, MemoryKind::HostAllocated, start, bytes, flags));
    Ok(start)
}

/// Frees pinned host memory.
pub(super) fn free(context: &'static Context, start: u64) -> Result<(), CudaError> {
    wait_until_unused(context)?;
    release(start, |found| found.kind == MemoryKind::HostAllocated)
}

/// Returns whether the whole range is mapped in this process.
fn is_mapped(start: u64, bytes: usize) -> bool {
    let first = start / PAGE_BYTES as u64 * PAGE_BYTES as u64;
    let pages = (start + bytes as u64 - first).div_ceil(PAGE_BYTES as u64) as usize;
    // One byte per page, a batch of pages at a time.
    let mut there = [0u8; 1024];
    (0..pages).step_by(there.len()).all(|page| {
        let length = (pages - page).min(there.len()) * PAGE_BYTES;
        let address = (first + (page * PAGE_BYTES) as u64) as *mut c_void;
        // SAFETY: `mincore` only queries the pages, and the vector has an entry for each page of the batch.
        unsafe { libc::mincore(address, length, there.as_mut_ptr()) == 0 }
    })
}

/// Registers memory of the program as pinned.
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
    if super::device_arena::is_inside(start) || !is_mapped(start, bytes) {
        return Err(CudaError::INVALID_VALUE);
    }
    if add(range(context, MemoryKind::HostRegistered, start, bytes, flags)) {
        Ok(())
    } else {
        Err(CudaError::HOST_MEMORY_ALREADY_REGISTERED)
    }
}

/// Unregisters memory of the program.
pub(super) fn unregister(context: &'static Context, start: u64) -> Result<(), CudaError> {
    wait_until_unused(context)?;
    release(start, |found| found.kind == MemoryKind::HostRegistered)
        .map_err(|_| CudaError::HOST_MEMORY_NOT_REGISTERED)
}

/// Returns the pinned host memory at an address.
pub(super) fn find_host_range(pointer: u64) -> Result<MemoryRange, CudaError> {
    lookup::find(pointer).filter(|found| found.kind.is_host()).ok_or(CudaError::INVALID_VALUE)
}
