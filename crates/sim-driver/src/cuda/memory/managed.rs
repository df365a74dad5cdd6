//! Managed memory: one address on the host and on all cards.
//!
//! It is on the host until a program prefetches it to a card, in pages of 2 MiB, which are then charged there. A full
//! card keeps what it has and the rest stays on the host, so managed memory may exceed any card. Kernels access
//! nothing here, so memory moves only when it is prefetched.

use super::super::context::Context;
use super::super::device::Device;
use super::super::session;
use super::device_arena::new_id;
use super::lookup::{MemoryKind, MemoryRange};
use super::*;
use std::collections::BTreeMap;
use std::collections::btree_map::Entry;
use std::sync::{Mutex, MutexGuard, PoisonError};

const PAGE_BYTES: u64 = 2 << 20;

/// The location of host memory: `CU_DEVICE_CPU`.
const CPU_LOCATION: i32 = -1;
/// The location is not set: `CU_DEVICE_INVALID`.
const NO_LOCATION: i32 = -2;

/// Advice for a managed allocation, and the cards on which its pages are.
struct ManagedAllocation {
    read_mostly: bool,
    preferred: i32,
    accessed_by: Vec<i32>,
    last_prefetch: i32,
    pages: BTreeMap<u64, &'static Device>,
}

static MANAGED: Mutex<BTreeMap<u64, ManagedAllocation>> = Mutex::new(BTreeMap::new());

fn managed() -> MutexGuard<'static, BTreeMap<u64, ManagedAllocation>> {
    MANAGED.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Allocates managed memory on the host.
pub(super) fn allocate(context: &'static Context, bytes: usize, flags: u32) -> Result<u64, CudaError> {
    if bytes == 0 || !matches!(flags, CU_MEM_ATTACH_GLOBAL | CU_MEM_ATTACH_HOST) {
        return Err(CudaError::INVALID_VALUE);
    }
    check(context.device)?;
    let how = libc::MAP_PRIVATE | libc::MAP_ANONYMOUS | libc::MAP_NORESERVE;
    let start = map(bytes, how, None).ok_or(CudaError::OUT_OF_MEMORY)?;
    let new = ManagedAllocation {
        read_mostly: false,
        preferred: NO_LOCATION,
        accessed_by: Vec::new(),
        last_prefetch: NO_LOCATION,
        pages: BTreeMap::new(),
    };
    managed().insert(start, new);
    insert(MemoryRange {
        kind: MemoryKind::Managed,
        start,
        bytes,
        device: Some(context.device),
        context: Some(context),
        id: new_id(),
        flags,
        owner: 0,
        sync_memops: false,
    });
    Ok(start)
}

/// Removes a freed allocation and refunds its pages to the cards.
pub(super) fn forget(range: &MemoryRange) {
    let gone = managed().remove(&range.start);
    for device in gone.into_iter().flat_map(|gone| gone.pages.into_values()) {
        device.refund(PAGE_BYTES);
    }
}

/// Returns the managed allocation that contains all of these bytes.
fn find_managed(pointer: u64, count: usize) -> Result<MemoryRange, CudaError> {
    let found = lookup::find(pointer).filter(|found| found.kind == MemoryKind::Managed);
    found.filter(|found| count > 0 && count as u64 <= found.end() - pointer).ok_or(CudaError::INVALID_VALUE)
}

/// Converts a location to a device ordinal or `CU_DEVICE_CPU`.
pub(super) fn location_ordinal(location: &CUmemLocation) -> Result<i32, CudaError> {
    match location.type_ {
        CU_MEM_LOCATION_TYPE_DEVICE => session::device(location.id).map(|device| device.ordinal),
        CU_MEM_LOCATION_TYPE_HOST
        | CU_MEM_LOCATION_TYPE_HOST_NUMA
        | CU_MEM_LOCATION_TYPE_HOST_NUMA_CURRENT => Ok(CPU_LOCATION),
        _ => Err(CudaError::INVALID_VALUE),
    }
}

/// Checks a device ordinal or `CU_DEVICE_CPU`.
pub(super) fn device_location(ordinal: i32) -> Result<i32, CudaError> {
    if ordinal == CPU_LOCATION {
        Ok(CPU_LOCATION)
    } else {
        session::device(ordinal).map(|device| device.ordinal)
    }
}

/// Records advice, for the whole allocation.
pub(super) fn advise(pointer: u64, count: usize, advice: CUmem_advise, place: i32) -> Result<(), CudaError> {
    let start = find_managed(pointer, count)?.start;
    let mut all = managed();
    let own = all.get_mut(&start).ok_or(CudaError::INVALID_VALUE)?;
    match advice {
        CU_MEM_ADVISE_SET_READ_MOSTLY => own.read_mostly = true,
        CU_MEM_ADVISE_UNSET_READ_MOSTLY => own.read_mostly = false,
        CU_MEM_ADVISE_SET_PREFERRED_LOCATION => own.preferred = place,
        CU_MEM_ADVISE_UNSET_PREFERRED_LOCATION => own.preferred = NO_LOCATION,
        CU_MEM_ADVISE_SET_ACCESSED_BY => {
            if !own.accessed_by.contains(&place) {
                own.accessed_by.push(place);
            }
        }
        CU_MEM_ADVISE_UNSET_ACCESSED_BY => own.accessed_by.retain(|&other| other != place),
        _ => return Err(CudaError::INVALID_VALUE),
    }
    Ok(())
}

/// Prefetches memory to a card or to the host, in stream order.
pub(super) fn prefetch(pointer: u64, count: usize, to: i32, stream: CUstream) -> Result<(), CudaError> {
    let found = find_managed(pointer, count)?;
    let stream = stream::resolve(stream)?;
    if let Some(capture) = stream.capture() {
        capture.invalidate();
        return Err(CudaError::STREAM_CAPTURE_UNSUPPORTED);
    }
    check(stream.context().device)?;
    let pages = pointer / PAGE_BYTES..(pointer + count as u64).div_ceil(PAGE_BYTES);
    let device = if to == CPU_LOCATION { None } else { Some(session::device(to)?) };
    let pending = begin_operation();
    stream.run_in_order(move || {
        let _pending = pending;
        let mut all = managed();
        let Some(own) = all.get_mut(&found.start) else { return };
        own.last_prefetch = to;
        for page in pages {
            if let Some(there) = own.pages.get(&page)
                && device.is_none_or(|device| !std::ptr::eq(*there, device))
            {
                there.refund(PAGE_BYTES);
                own.pages.remove(&page);
            }
            let Some(device) = device else { continue };
            if let Entry::Vacant(free) = own.pages.entry(page) {
                if device.charge(PAGE_BYTES).is_err() {
                    break;
                }
                free.insert(device);
            }
        }
    })
}

/// Writes one number, or with `fill` as many as the buffer holds.
///
/// # Safety
/// `data` is null or valid for writes of `size` bytes.
unsafe fn write_numbers(
    data: *mut c_void,
    size: usize,
    numbers: &[i32],
    fill: Option<i32>,
) -> Result<(), CudaError> {
    if data.is_null() || size == 0 || !size.is_multiple_of(4) || fill.is_none() && size != 4 {
        return Err(CudaError::INVALID_VALUE);
    }
    for index in 0..size / 4 {
        let number = numbers.get(index).copied().or(fill).unwrap_or(0);
        // SAFETY: `index` is below `size / 4`, inside the buffer that the caller provides.
        let to = unsafe { data.cast::<i32>().add(index) };
        // SAFETY: `to` is inside the buffer.
        unsafe { to.write_unaligned(number) };
    }
    Ok(())
}

/// Writes an attribute of a managed range.
///
/// # Safety
/// `data` is null or valid for writes of `size` bytes.
pub(super) unsafe fn attribute(
    data: *mut c_void,
    size: usize,
    attribute: CUmem_range_attribute,
    pointer: u64,
    count: usize,
) -> Result<(), CudaError> {
    let start = find_managed(pointer, count)?.start;
    let all = managed();
    let own = all.get(&start).ok_or(CudaError::INVALID_VALUE)?;
    let kind = |place: i32| match place {
        NO_LOCATION => CU_MEM_LOCATION_TYPE_INVALID,
        CPU_LOCATION => CU_MEM_LOCATION_TYPE_HOST,
        _ => CU_MEM_LOCATION_TYPE_DEVICE,
    };
    let one = match attribute {
        CU_MEM_RANGE_ATTRIBUTE_READ_MOSTLY => i32::from(own.read_mostly),
        CU_MEM_RANGE_ATTRIBUTE_PREFERRED_LOCATION => own.preferred,
        CU_MEM_RANGE_ATTRIBUTE_LAST_PREFETCH_LOCATION => own.last_prefetch,
        CU_MEM_RANGE_ATTRIBUTE_PREFERRED_LOCATION_TYPE => kind(own.preferred) as i32,
        CU_MEM_RANGE_ATTRIBUTE_PREFERRED_LOCATION_ID => own.preferred.max(0),
        CU_MEM_RANGE_ATTRIBUTE_LAST_PREFETCH_LOCATION_TYPE => kind(own.last_prefetch) as i32,
        CU_MEM_RANGE_ATTRIBUTE_LAST_PREFETCH_LOCATION_ID => own.last_prefetch.max(0),
        CU_MEM_RANGE_ATTRIBUTE_ACCESSED_BY => {
            // SAFETY: this function's contract requires the same of the buffer from its caller.
            return unsafe { write_numbers(data, size, &own.accessed_by, Some(NO_LOCATION)) };
        }
        _ => return Err(CudaError::INVALID_VALUE),
    };
    // SAFETY: this function's contract requires the same of the buffer from its caller.
    unsafe { write_numbers(data, size, &[one], None) }
}
