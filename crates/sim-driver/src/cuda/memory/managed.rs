//! Managed memory: one address on the host and on all cards.
//!
//! It lies on the host until a program sends it to a card, in pages of 2 MiB; from then on these count there. A card
//! that has no room for more keeps what it has, and the rest stays on the host: managed memory may be larger than any
//! card. Kernels touch nothing here, so nothing moves without being sent.

use super::super::context::Context;
use super::super::device::Device;
use super::super::session;
use super::arena::new_id;
use super::find::{Found, Kind};
use super::*;
use std::collections::BTreeMap;
use std::collections::btree_map::Entry;
use std::sync::{Mutex, MutexGuard, PoisonError};

const PAGE: u64 = 2 << 20;

/// `CU_DEVICE_CPU`.
const CPU: i32 = -1;
/// `CU_DEVICE_INVALID`.
const NOWHERE: i32 = -2;

/// What was said about a piece of managed memory, and where its pages are.
struct Managed {
    read_mostly: bool,
    preferred: i32,
    accessed_by: Vec<i32>,
    last_prefetch: i32,
    pages: BTreeMap<u64, &'static Device>,
}

static MANAGED: Mutex<BTreeMap<u64, Managed>> = Mutex::new(BTreeMap::new());

fn managed() -> MutexGuard<'static, BTreeMap<u64, Managed>> {
    MANAGED.lock().unwrap_or_else(PoisonError::into_inner)
}

/// New managed memory.
pub(super) fn allocate(context: &'static Context, bytes: usize, flags: u32) -> Result<u64, CudaError> {
    if bytes == 0 || !matches!(flags, CU_MEM_ATTACH_GLOBAL | CU_MEM_ATTACH_HOST) {
        return Err(CudaError::INVALID_VALUE);
    }
    check(context.device)?;
    let how = libc::MAP_PRIVATE | libc::MAP_ANONYMOUS | libc::MAP_NORESERVE;
    let start = map(bytes, how, None).ok_or(CudaError::OUT_OF_MEMORY)?;
    let new = Managed {
        read_mostly: false,
        preferred: NOWHERE,
        accessed_by: Vec::new(),
        last_prefetch: NOWHERE,
        pages: BTreeMap::new(),
    };
    managed().insert(start, new);
    insert(Found {
        kind: Kind::Managed,
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

/// It is gone: cards get their pages back.
pub(super) fn forget(range: &Found) {
    let gone = managed().remove(&range.start);
    for device in gone.into_iter().flat_map(|gone| gone.pages.into_values()) {
        device.give(PAGE);
    }
}

/// The managed memory that all of these bytes are in.
fn at(pointer: u64, count: usize) -> Result<Found, CudaError> {
    let found = find::find(pointer).filter(|found| found.kind == Kind::Managed);
    found.filter(|found| count > 0 && count as u64 <= found.end() - pointer).ok_or(CudaError::INVALID_VALUE)
}

/// The place a location means: a device's number, or the host.
pub(super) fn place(location: &CUmemLocation) -> Result<i32, CudaError> {
    match location.type_ {
        CU_MEM_LOCATION_TYPE_DEVICE => session::device(location.id).map(|device| device.ordinal),
        CU_MEM_LOCATION_TYPE_HOST
        | CU_MEM_LOCATION_TYPE_HOST_NUMA
        | CU_MEM_LOCATION_TYPE_HOST_NUMA_CURRENT => Ok(CPU),
        _ => Err(CudaError::INVALID_VALUE),
    }
}

/// The same of a device's number.
pub(super) fn place_of(ordinal: i32) -> Result<i32, CudaError> {
    if ordinal == CPU { Ok(CPU) } else { session::device(ordinal).map(|device| device.ordinal) }
}

/// Notes advice. It is kept for the allocation as a whole.
pub(super) fn advise(pointer: u64, count: usize, advice: CUmem_advise, place: i32) -> Result<(), CudaError> {
    let start = at(pointer, count)?.start;
    let mut all = managed();
    let own = all.get_mut(&start).ok_or(CudaError::INVALID_VALUE)?;
    match advice {
        CU_MEM_ADVISE_SET_READ_MOSTLY => own.read_mostly = true,
        CU_MEM_ADVISE_UNSET_READ_MOSTLY => own.read_mostly = false,
        CU_MEM_ADVISE_SET_PREFERRED_LOCATION => own.preferred = place,
        CU_MEM_ADVISE_UNSET_PREFERRED_LOCATION => own.preferred = NOWHERE,
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

/// Sends memory to a card or to the host, in the stream's order.
pub(super) fn prefetch(pointer: u64, count: usize, to: i32, stream: CUstream) -> Result<(), CudaError> {
    let found = at(pointer, count)?;
    let stream = stream::resolve(stream)?;
    if let Some(capture) = stream.capture() {
        capture.invalidate();
        return Err(CudaError::STREAM_CAPTURE_UNSUPPORTED);
    }
    check(stream.context().device)?;
    let pages = pointer / PAGE..(pointer + count as u64).div_ceil(PAGE);
    let device = if to == CPU { None } else { Some(session::device(to)?) };
    let under_way = under_way();
    stream.in_order(move || {
        let _under_way = under_way;
        let mut all = managed();
        let Some(own) = all.get_mut(&found.start) else { return };
        own.last_prefetch = to;
        for page in pages {
            if let Some(there) = own.pages.get(&page)
                && device.is_none_or(|device| !std::ptr::eq(*there, device))
            {
                there.give(PAGE);
                own.pages.remove(&page);
            }
            let Some(device) = device else { continue };
            if let Entry::Vacant(free) = own.pages.entry(page) {
                if device.take(PAGE).is_err() {
                    break;
                }
                free.insert(device);
            }
        }
    })
}

/// Writes numbers where the program wants them: one, or as many as there is room for.
///
/// # Safety
/// `data` is the program's to write, as long as `size` says.
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
        // SAFETY: inside what the caller promised, in steps of its own numbers.
        let to = unsafe { data.cast::<i32>().add(index) };
        // SAFETY: likewise.
        unsafe { to.write_unaligned(number) };
    }
    Ok(())
}

/// Answers what was said about managed memory.
///
/// # Safety
/// `data` is the program's to write, as long as `size` says.
pub(super) unsafe fn attribute(
    data: *mut c_void,
    size: usize,
    attribute: CUmem_range_attribute,
    pointer: u64,
    count: usize,
) -> Result<(), CudaError> {
    let start = at(pointer, count)?.start;
    let all = managed();
    let own = all.get(&start).ok_or(CudaError::INVALID_VALUE)?;
    let kind = |place: i32| match place {
        NOWHERE => CU_MEM_LOCATION_TYPE_INVALID,
        CPU => CU_MEM_LOCATION_TYPE_HOST,
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
            // SAFETY: the caller's promise.
            return unsafe { write_numbers(data, size, &own.accessed_by, Some(NOWHERE)) };
        }
        _ => return Err(CudaError::INVALID_VALUE),
    };
    // SAFETY: the caller's promise.
    unsafe { write_numbers(data, size, &[one], None) }
}
