//! NVML as a container may see it: its own memory, processes and utilization, and no control of a GPU that others use,
//! too.
//!
//! Every function of NVML was examined. Functions that are not hooked describe the GPU and not its users: the number of
//! GPUs, their handles, names, UUIDs, locations and links; the driver's version; clocks, power, temperature, errors,
//! events; traffic on PCIe and NVLink. None of that can be split by container. Neither can the use of the BAR1 window
//! through which the host accesses the GPU, which would show how many others there are: `nvmlDeviceGetBAR1MemoryInfo`
//! shows all of it as free. Fields by number (`nvmlDeviceGetFieldValues`) include neither memory nor utilization.
//! `nvmlSystemGetProcessName` knows the container's own processes that have loaded the driver: the driver may know all
//! processes, by their host pids.
//!
//! A GPU that is not in the region does not belong to the container: queries for its memory, processes or utilization
//! return "no permission". So do all queries if the region is missing ([`GrantStatus::Refused`]). A GPU's identity can
//! always be queried.
#![allow(unsafe_code)]

pub(crate) mod controls;
pub(crate) mod export_table;
pub(crate) mod memory;
pub(crate) mod processes;
pub(crate) mod sessions;
pub(crate) mod utilization;

use crate::driver::nvml as driver;
use crate::process::{self, GrantStatus, Process};
use partage_driver_api::nvml::*;
use std::ffi::CStr;

/// Result of a hooked function: the error code to return, if any.
type NvmlResult = Result<(), nvmlReturn_t>;

/// The container's share of a GPU.
#[derive(Clone, Copy)]
struct DeviceShare {
    process: &'static Process,
    gpu: usize,
    device: nvmlDevice_t,
}

/// Answers a query about a device with `own` if the process has a share of it, and refuses it otherwise.
fn with_share(device: nvmlDevice_t, own: impl FnOnce(DeviceShare) -> NvmlResult) -> nvmlReturn_t {
    match process::grant_status() {
        GrantStatus::Refused => NVML_ERROR_NO_PERMISSION,
        GrantStatus::Granted(process) => match find_share(process, device).and_then(own) {
            Ok(()) => NVML_SUCCESS,
            Err(code) => code,
        },
    }
}

/// Returns which GPU of the region a device is. The driver is queried every time: it answers from memory, and a handle
/// may mean another GPU after the library was initialized again.
fn find_share(process: &'static Process, device: nvmlDevice_t) -> Result<DeviceShare, nvmlReturn_t> {
    let mut text = [0; NVML_DEVICE_UUID_V2_BUFFER_SIZE as usize];
    // SAFETY: the buffer has the length that is passed.
    check(unsafe { driver::nvmlDeviceGetUUID(device, text.as_mut_ptr(), NVML_DEVICE_UUID_V2_BUFFER_SIZE) })?;
    let uuid = uuid(&text.map(|letter| letter as u8)).ok_or(NVML_ERROR_NO_PERMISSION)?;
    let gpu = process.region.find(&uuid).ok_or(NVML_ERROR_NO_PERMISSION)?;
    Ok(DeviceShare { process, gpu, device })
}

/// Parses the UUID in `GPU-01234567-…`. A MIG instance has another prefix, and is never granted.
fn uuid(text: &[u8]) -> Option<[u8; 16]> {
    let text = CStr::from_bytes_until_nul(text).ok()?.to_str().ok()?.strip_prefix("GPU-")?;
    let mut digits = text.chars().filter(|&letter| letter != '-').map(|digit| digit.to_digit(16));
    let mut uuid = [0; 16];
    for byte in &mut uuid {
        // Both digits are below 16, so it fits.
        *byte = (digits.next()?? << 4 | digits.next()??) as u8;
    }
    digits.next().is_none().then_some(uuid)
}

fn check(code: nvmlReturn_t) -> NvmlResult {
    if code == NVML_SUCCESS { Ok(()) } else { Err(code) }
}

/// Reads an argument that the application passed by address; null is an invalid argument.
///
/// # Safety
/// `from` must be null or valid for reads.
unsafe fn read_argument<T: Copy>(from: *const T) -> Result<T, nvmlReturn_t> {
    if from.is_null() {
        return Err(NVML_ERROR_INVALID_ARGUMENT);
    }
    // SAFETY: not null, so it is valid for reads by this function's safety contract. Applications do pass packed
    // structures.
    Ok(unsafe { from.read_unaligned() })
}

/// Writes a result for the application; null is an invalid argument.
///
/// # Safety
/// `to` must be null or valid for writes.
unsafe fn write_result<T>(to: *mut T, value: T) -> NvmlResult {
    if to.is_null() {
        return Err(NVML_ERROR_INVALID_ARGUMENT);
    }
    // SAFETY: not null, so it is valid for writes by this function's safety contract.
    unsafe { to.write_unaligned(value) };
    Ok(())
}

/// Writes a list into an array with room for `*count` entries, and its length into `count`. If there is not enough
/// room, it returns `INSUFFICIENT_SIZE`, with the required room in `count`.
///
/// # Safety
/// `count` must be null or valid for reads and writes; `to` must be null or have room for `*count` entries.
unsafe fn write_list<T: Copy>(count: *mut u32, to: *mut T, list: &[T]) -> NvmlResult {
    // SAFETY: the caller guarantees that `count` is null or valid for reads.
    let room = unsafe { read_argument(count.cast_const()) }? as usize;
    // SAFETY: the caller guarantees that `count` is null or valid for writes. The list has at most as many entries as
    // there are slots, so its length fits.
    unsafe { write_result(count, list.len() as u32) }?;
    if room < list.len() {
        return Err(NVML_ERROR_INSUFFICIENT_SIZE);
    }
    // An empty list needs no array.
    if to.is_null() && !list.is_empty() {
        return Err(NVML_ERROR_INVALID_ARGUMENT);
    }
    for (index, &entry) in list.iter().enumerate() {
        let place = to.wrapping_add(index);
        // SAFETY: the index is below `*count`, so it is inside the array.
        unsafe { place.write_unaligned(entry) };
    }
    Ok(())
}

/// Queries a list of any length from the driver: first for its length, then with some room to spare, since processes
/// come and go meanwhile. `None` means "not found".
fn query_list<T: Copy + Default>(
    query: impl Fn(&mut u32, *mut T) -> nvmlReturn_t,
) -> Result<Option<Vec<T>>, nvmlReturn_t> {
    const SPARE_ENTRIES: u32 = 16;
    /// Upper bound of the entries of a list of processes.
    const MAX_ENTRIES: u32 = 1 << 16;
    let mut room = 0;
    match query(&mut room, std::ptr::null_mut()) {
        NVML_SUCCESS | NVML_ERROR_INSUFFICIENT_SIZE => {}
        NVML_ERROR_NOT_FOUND => return Ok(None),
        code => return Err(code),
    }
    for _ in 0..4 {
        let mut count = room.saturating_add(SPARE_ENTRIES).min(MAX_ENTRIES);
        let mut list = vec![T::default(); count as usize];
        match query(&mut count, list.as_mut_ptr()) {
            NVML_SUCCESS => {
                list.truncate(count as usize);
                return Ok(Some(list));
            }
            NVML_ERROR_INSUFFICIENT_SIZE => room = count,
            NVML_ERROR_NOT_FOUND => return Ok(None),
            code => return Err(code),
        }
    }
    Err(NVML_ERROR_UNKNOWN)
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;

    #[test]
    fn uuid_is_parsed_from_its_text() {
        let name = b"GPU-01234567-89ab-cdef-0123-456789ABCDEF\0\0\0";
        let bytes =
            [1, 0x23, 0x45, 0x67, 0x89, 0xab, 0xcd, 0xef, 1, 0x23, 0x45, 0x67, 0x89, 0xab, 0xcd, 0xef];
        assert_eq!(uuid(name), Some(bytes));
        for other in [
            &b"MIG-01234567-89ab-cdef-0123-456789abcdef\0"[..],
            b"GPU-01234567-89ab-cdef-0123-456789abcde\0",
            b"GPU-01234567-89ab-cdef-0123-456789abcdef0\0",
            b"GPU-01234567-89ab-cdef-0123-456789abcdeg\0",
            b"GPU-01234567-89ab-cdef-0123-456789abcdef",
            b"\0",
        ] {
            assert_eq!(uuid(other), None, "{:?}", String::from_utf8_lossy(other));
        }
    }

    #[test]
    fn write_list_reports_the_length() {
        let mut room = [0u32; 4];
        // SAFETY: the array has room for the count that is passed.
        let mut put = |count: &mut u32, list: &[u32]| unsafe { write_list(count, room.as_mut_ptr(), list) };
        let mut count = 4;
        assert_eq!((put(&mut count, &[1, 2, 3]), count), (Ok(()), 3));
        count = 2;
        assert_eq!((put(&mut count, &[4, 5, 6]), count), (Err(NVML_ERROR_INSUFFICIENT_SIZE), 3));
        assert_eq!(room, [1, 2, 3, 0], "nothing is put where not all fits");
        count = 0;
        // SAFETY: the array is null, which `write_list` accepts.
        let asked = |count: &mut u32, list: &[u32]| unsafe { write_list(count, std::ptr::null_mut(), list) };
        assert_eq!((asked(&mut count, &[]), count), (Ok(()), 0));
        assert_eq!((asked(&mut count, &[7]), count), (Err(NVML_ERROR_INSUFFICIENT_SIZE), 1));
        assert_eq!((asked(&mut count, &[7]), count), (Err(NVML_ERROR_INVALID_ARGUMENT), 1));
    }

    #[test]
    fn query_list_retries_until_the_list_fits() {
        // The list grows with every query.
        let now = std::cell::Cell::new(0);
        let grows = |step: u32, until: u32| {
            let now = &now;
            now.set(0);
            move |count: &mut u32, to: *mut u32| {
                let there = (now.get() + step).min(until);
                now.set(there);
                let room = std::mem::replace(count, there);
                if room < there || to.is_null() { NVML_ERROR_INSUFFICIENT_SIZE } else { NVML_SUCCESS }
            }
        };
        assert_eq!(query_list(grows(20, 60)).map(|list| list.unwrap().len()), Ok(60));
        assert_eq!(query_list(grows(20, 1000)), Err(NVML_ERROR_UNKNOWN), "it ends");
        assert_eq!(query_list(|_, _: *mut u32| NVML_ERROR_NOT_FOUND), Ok(None));
        assert_eq!(query_list(|_, _: *mut u32| NVML_ERROR_GPU_IS_LOST), Err(NVML_ERROR_GPU_IS_LOST));
    }
}
