//! NVML as a container may see it: its own memory, processes and utilisation, and no switch of a card that others use too.
//!
//! Every function of NVML was looked at. What is not hooked tells of the card and not of who uses it: how many there are,
//! their handles, names, UUIDs, places and links; the driver's version; clocks, power, temperature, errors, events; traffic on
//! PCIe and NVLink. None of that can be told apart by container. Nor can the use of the window through which the host reaches
//! the card, and that tells how many others there are: `nvmlDeviceGetBAR1MemoryInfo` shows all of it free. Fields by number
//! (`nvmlDeviceGetFieldValues`) have neither memory nor utilisation among them. `nvmlSystemGetProcessName` knows the
//! container's own processes that have loaded the driver: the driver may know everybody's, by the machine's pids.
//!
//! A GPU that the region does not name is not the container's: who asks for its memory, processes or utilisation has no
//! permission. So has everybody where the region is missing ([`Standing::Refused`]). Who it is can always be asked.
#![allow(unsafe_code)]

pub(crate) mod controls;
pub(crate) mod export_table;
pub(crate) mod memory;
pub(crate) mod processes;
pub(crate) mod sessions;
pub(crate) mod utilisation;

use crate::driver::nvml as real;
use crate::process::{self, Process, Standing};
use partage_driver_api::nvml::*;
use std::ffi::CStr;

/// What a function comes to.
type Answer = Result<(), nvmlReturn_t>;

/// The container's part of a GPU.
#[derive(Clone, Copy)]
struct Share {
    process: &'static Process,
    gpu: usize,
    device: nvmlDevice_t,
}

/// Answers a query about a device with `own` where the process has a share of it, and refuses it elsewhere.
fn told(device: nvmlDevice_t, own: impl FnOnce(Share) -> Answer) -> nvmlReturn_t {
    match process::standing() {
        Standing::Refused => NVML_ERROR_NO_PERMISSION,
        Standing::Held(process) => match share(process, device).and_then(own) {
            Ok(()) => NVML_SUCCESS,
            Err(code) => code,
        },
    }
}

/// Which GPU of the region a device is. The driver is asked every time: it knows by heart, and a handle may mean another
/// card when the library has been started anew.
fn share(process: &'static Process, device: nvmlDevice_t) -> Result<Share, nvmlReturn_t> {
    let mut text = [0; NVML_DEVICE_UUID_V2_BUFFER_SIZE as usize];
    // SAFETY: a buffer of this length.
    check(unsafe { real::nvmlDeviceGetUUID(device, text.as_mut_ptr(), NVML_DEVICE_UUID_V2_BUFFER_SIZE) })?;
    let uuid = uuid(&text.map(|letter| letter as u8)).ok_or(NVML_ERROR_NO_PERMISSION)?;
    let gpu = process.region.find(&uuid).ok_or(NVML_ERROR_NO_PERMISSION)?;
    Ok(Share { process, gpu, device })
}

/// The UUID in `GPU-01234567-…`. An instance of MIG has another name, and nobody is granted one.
fn uuid(text: &[u8]) -> Option<[u8; 16]> {
    let text = CStr::from_bytes_until_nul(text).ok()?.to_str().ok()?.strip_prefix("GPU-")?;
    let mut digits = text.chars().filter(|&letter| letter != '-').map(|digit| digit.to_digit(16));
    let mut uuid = [0; 16];
    for byte in &mut uuid {
        // Both are below sixteen.
        *byte = (digits.next()?? << 4 | digits.next()??) as u8;
    }
    digits.next().is_none().then_some(uuid)
}

fn check(code: nvmlReturn_t) -> Answer {
    if code == NVML_SUCCESS { Ok(()) } else { Err(code) }
}

/// Reads what the program passed by address; null is an invalid argument.
///
/// # Safety
/// `from` is null or may be read.
unsafe fn take<T: Copy>(from: *const T) -> Result<T, nvmlReturn_t> {
    if from.is_null() {
        return Err(NVML_ERROR_INVALID_ARGUMENT);
    }
    // SAFETY: not null, so the caller promised it. Programs do pass packed structures.
    Ok(unsafe { from.read_unaligned() })
}

/// Puts an answer where the program wants it; null is an invalid argument.
///
/// # Safety
/// `to` is null or may be written to.
unsafe fn put<T>(to: *mut T, value: T) -> Answer {
    if to.is_null() {
        return Err(NVML_ERROR_INVALID_ARGUMENT);
    }
    // SAFETY: not null, so the caller promised it.
    unsafe { to.write_unaligned(value) };
    Ok(())
}

/// Puts a list into an array with room for `*count`, and says how many there are. Too little room is said by
/// `INSUFFICIENT_SIZE`, with the room it takes in `count`.
///
/// # Safety
/// `count` is null or a number that may be written to; `to` is null or has room for as many.
unsafe fn put_list<T: Copy>(count: *mut u32, to: *mut T, list: &[T]) -> Answer {
    // SAFETY: the caller's promise.
    let room = unsafe { take(count.cast_const()) }? as usize;
    // SAFETY: likewise. There are at most as many as slots.
    unsafe { put(count, list.len() as u32) }?;
    if room < list.len() {
        return Err(NVML_ERROR_INSUFFICIENT_SIZE);
    }
    // Room for nothing needs no array.
    if to.is_null() && !list.is_empty() {
        return Err(NVML_ERROR_INVALID_ARGUMENT);
    }
    for (index, &entry) in list.iter().enumerate() {
        let place = to.wrapping_add(index);
        // SAFETY: inside the array, which has room for all.
        unsafe { place.write_unaligned(entry) };
    }
    Ok(())
}

/// All that the driver has to say, however long it is: asked for its length first, then with some room to spare, since
/// others come and go meanwhile. `None` is "nothing".
fn everything<T: Copy + Default>(
    ask: impl Fn(&mut u32, *mut T) -> nvmlReturn_t,
) -> Result<Option<Vec<T>>, nvmlReturn_t> {
    const SPARE: u32 = 16;
    /// More is no list of processes.
    const MOST: u32 = 1 << 16;
    let mut room = 0;
    match ask(&mut room, std::ptr::null_mut()) {
        NVML_SUCCESS | NVML_ERROR_INSUFFICIENT_SIZE => {}
        NVML_ERROR_NOT_FOUND => return Ok(None),
        code => return Err(code),
    }
    for _ in 0..4 {
        let mut count = room.saturating_add(SPARE).min(MOST);
        let mut list = vec![T::default(); count as usize];
        match ask(&mut count, list.as_mut_ptr()) {
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
    fn a_uuid_is_read_from_its_name() {
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
    fn a_list_says_how_long_it_is() {
        let mut room = [0u32; 4];
        // SAFETY: there is room for as many as is said.
        let mut put = |count: &mut u32, list: &[u32]| unsafe { put_list(count, room.as_mut_ptr(), list) };
        let mut count = 4;
        assert_eq!((put(&mut count, &[1, 2, 3]), count), (Ok(()), 3));
        count = 2;
        assert_eq!((put(&mut count, &[4, 5, 6]), count), (Err(NVML_ERROR_INSUFFICIENT_SIZE), 3));
        assert_eq!(room, [1, 2, 3, 0], "nothing is put where not all fits");
        count = 0;
        // SAFETY: no array and no room.
        let asked = |count: &mut u32, list: &[u32]| unsafe { put_list(count, std::ptr::null_mut(), list) };
        assert_eq!((asked(&mut count, &[]), count), (Ok(()), 0));
        assert_eq!((asked(&mut count, &[7]), count), (Err(NVML_ERROR_INSUFFICIENT_SIZE), 1));
        assert_eq!((asked(&mut count, &[7]), count), (Err(NVML_ERROR_INVALID_ARGUMENT), 1));
    }

    #[test]
    fn everything_is_asked_for_until_it_fits() {
        // Every time it is asked there is much more.
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
        assert_eq!(everything(grows(20, 60)).map(|list| list.unwrap().len()), Ok(60));
        assert_eq!(everything(grows(20, 1000)), Err(NVML_ERROR_UNKNOWN), "it ends");
        assert_eq!(everything(|_, _: *mut u32| NVML_ERROR_NOT_FOUND), Ok(None));
        assert_eq!(everything(|_, _: *mut u32| NVML_ERROR_GPU_IS_LOST), Err(NVML_ERROR_GPU_IS_LOST));
    }
}
