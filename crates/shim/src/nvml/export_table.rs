//! The undocumented function table through which `nvidia-smi` lists processes: a program gets a copy of it, in which
//! the functions that report processes are the shim's.
//!
//! Its first word is its size in bytes, so it grows at its end: the indexes of the functions were learned from drivers
//! 535 (245 entries) and 550 (251), and are assumed to be the same in every table with as many entries or more. The
//! data for `pmon` has another format in each, so in a table of another size it is not supported. Other tables are
//! returned unchanged.
#![allow(unsafe_code)]

use super::processes::{ContainerProcesses, ListKind, OwnProcess, check_device_answers};
use super::{DeviceShare, NvmlResult, check, read_argument, with_share, write_list};
use crate::driver::nvml as driver;
use crate::hook::{catch_panic, hooks};
use partage_driver_api::nvml::*;
use partage_region::futex::preserve_errno;
use std::sync::OnceLock;
use std::sync::atomic::{AtomicUsize, Ordering};

/// Identifier of the table.
const TABLE_ID: [u8; 16] =
    [0xc4, 0xfe, 0x3e, 0x6c, 0xc9, 0x8f, 0x6c, 0x4e, 0xa3, 0x27, 0xee, 0x69, 0x6e, 0x12, 0xf7, 0xc4];

/// Indexes: activity of processes by engine, and the lists of compute, graphics and MPS processes.
const SAMPLES_INDEX: usize = 145;
const COMPUTE_INDEX: usize = 213;
const GRAPHICS_INDEX: usize = 214;
const MPS_INDEX: usize = 215;

/// Number of entries of the known tables.
const TABLE_LENGTH_535: usize = 245;
const TABLE_LENGTH_550: usize = 251;

/// Upper bound of a table's entries.
const MAX_TABLE_LENGTH: usize = 1 << 13;

/// A function of the table. It takes as many arguments as fit in registers, of which each function uses what it needs.
type TableFunction = unsafe extern "C" fn(usize, usize, usize, usize, usize, usize) -> nvmlReturn_t;

/// The driver's own function at the index of the samples.
static DRIVER_SAMPLES: AtomicUsize = AtomicUsize::new(0);

/// Bytes of one sample in the table that was copied; zero if unknown.
static SAMPLE_BYTES: AtomicUsize = AtomicUsize::new(0);

/// Returns a copy of the driver's table with the shim's functions in it. The driver has one table, for as long as it is
/// loaded.
///
/// # Safety
/// `table` must be the driver's table.
unsafe fn copy_table(table: *const usize) -> Option<*const usize> {
    static COPY: OnceLock<Option<(usize, Box<[usize]>)>> = OnceLock::new();
    let copy = COPY.get_or_init(|| {
        // SAFETY: every table begins with its size in bytes.
        let places = unsafe { table.read() } / size_of::<usize>();
        if !(MPS_INDEX + 1..=MAX_TABLE_LENGTH).contains(&places) {
            return None;
        }
        // SAFETY: the table has the size that its first word states.
        let mut copy: Box<[usize]> = unsafe { std::slice::from_raw_parts(table, places) }.into();
        let hooks: [(usize, TableFunction); 3] =
            [(COMPUTE_INDEX, compute), (GRAPHICS_INDEX, graphics), (MPS_INDEX, mps)];
        for (place, hook) in hooks {
            *copy.get_mut(place)? = hook as usize;
        }
        let samples = std::mem::replace(copy.get_mut(SAMPLES_INDEX)?, samples as *const () as usize);
        DRIVER_SAMPLES.store(samples, Ordering::Release);
        SAMPLE_BYTES.store(sample_bytes(places), Ordering::Release);
        Some((table.addr(), copy))
    });
    let (of, copy) = copy.as_ref()?;
    (*of == table.addr()).then_some(copy.as_ptr())
}

/// Returns the bytes of a sample: its time and its engines.
fn sample_bytes(places: usize) -> usize {
    let engines = match places {
        TABLE_LENGTH_535 => 4,
        TABLE_LENGTH_550 => 6,
        _ => return 0,
    };
    size_of::<u64>() + engines * size_of::<EngineSample>()
}

/// Activity of one process on one engine.
#[repr(C)]
#[derive(Clone, Copy)]
struct EngineSample {
    busy: u64,
    pid: u32,
    unread: [u8; 68],
}

const _: () = assert!(size_of::<EngineSample>() == 80);

/// A process in the list.
#[repr(C)]
#[derive(Clone, Copy)]
struct ListedProcess {
    pid: u32,
    padding: u32,
    used: u64,
    gpu_instance: u32,
    compute_instance: u32,
    protected: u64,
    name: [u8; 4096],
}

const _: () = assert!(size_of::<ListedProcess>() == 4128);

impl ListedProcess {
    fn of(own: &OwnProcess) -> Self {
        Self {
            pid: own.pid,
            padding: 0,
            used: own.bytes,
            gpu_instance: u32::MAX,
            compute_instance: u32::MAX,
            protected: 0,
            name: process_name(own.pid),
        }
    }
}

/// Returns a process's command, truncated to its field and padded with zeros: as the caller's `ps` shows it, or as the
/// driver knows it.
pub(super) fn process_name(pid: u32) -> [u8; 4096] {
    let mut name = [0; 4096];
    let called = preserve_errno(|| std::fs::read(format!("/proc/{pid}/cmdline"))).unwrap_or_default();
    let first = called.split(|&byte| byte == 0).next().unwrap_or_default();
    if first.is_empty() {
        // SAFETY: the buffer has the length that is passed. If the call fails, the name stays empty.
        unsafe { driver::nvmlSystemGetProcessName(pid, name.as_mut_ptr().cast(), 4096) };
    }
    // The last byte stays zero.
    for (to, from) in name.iter_mut().take(4095).zip(first) {
        *to = *from;
    }
    name
}

/// Calls the driver's own function for samples.
fn driver_samples(given: [usize; 6]) -> nvmlReturn_t {
    let address = DRIVER_SAMPLES.load(Ordering::Acquire);
    if address == 0 {
        return NVML_ERROR_FUNCTION_NOT_FOUND;
    }
    // SAFETY: the address is the function that the driver's table had at that index.
    let function = unsafe { std::mem::transmute::<usize, TableFunction>(address) };
    let [a, b, c, d, e, f] = given;
    // SAFETY: the application's arguments, passed on unchanged under the driver function's own contract.
    unsafe { function(a, b, c, d, e, f) }
}

/// Answers a query for a list of processes.
fn list_processes(kind: ListKind, given: [usize; 6]) -> nvmlReturn_t {
    catch_panic(NVML_ERROR_UNKNOWN, || {
        let [device, count, to, ..] = given;
        let (count, to) = (count as *mut u32, to as *mut ListedProcess);
        with_share(device as nvmlDevice_t, |share| {
            check_device_answers(&share)?;
            // SAFETY: null, or the count that the application passed.
            let room = unsafe { read_argument(count.cast_const()) }? as usize;
            let list: Vec<ListedProcess> = match kind {
                // As many as there is room for: a partial list is better than none.
                ListKind::Compute => {
                    ContainerProcesses::of(&share).holders().take(room).map(ListedProcess::of).collect()
                }
                ListKind::Other => Vec::new(),
            };
            // SAFETY: the application passed the count and an array with room for that many entries, and the list is
            // not longer.
            unsafe { write_list(count, to, &list) }
        })
    })
}

unsafe extern "C" fn compute(a: usize, b: usize, c: usize, d: usize, e: usize, f: usize) -> nvmlReturn_t {
    list_processes(ListKind::Compute, [a, b, c, d, e, f])
}

unsafe extern "C" fn graphics(a: usize, b: usize, c: usize, d: usize, e: usize, f: usize) -> nvmlReturn_t {
    list_processes(ListKind::Other, [a, b, c, d, e, f])
}

unsafe extern "C" fn mps(a: usize, b: usize, c: usize, d: usize, e: usize, f: usize) -> nvmlReturn_t {
    list_processes(ListKind::Other, [a, b, c, d, e, f])
}

/// Answers a query for samples: entries of other containers' processes are cleared.
unsafe extern "C" fn samples(a: usize, b: usize, c: usize, d: usize, e: usize, f: usize) -> nvmlReturn_t {
    catch_panic(NVML_ERROR_UNKNOWN, || {
        let given = [a, b, c, d, e, f];
        with_share(a as nvmlDevice_t, |share| {
            let bytes = SAMPLE_BYTES.load(Ordering::Acquire);
            if bytes == 0 {
                return Err(NVML_ERROR_NOT_SUPPORTED);
            }
            check(driver_samples(given))?;
            // SAFETY: the call succeeded, so the driver has written `*d` samples to `e`.
            unsafe { retain_own_processes(&share, bytes, d as *const u32, e as *mut u8) }
        })
    })
}

/// # Safety
/// `to` must be null, or have `*count` samples of `bytes` bytes each.
unsafe fn retain_own_processes(
    share: &DeviceShare,
    bytes: usize,
    count: *const u32,
    to: *mut u8,
) -> NvmlResult {
    // SAFETY: `count` is null, which is checked, or the caller's, valid for reads.
    let count = unsafe { read_argument(count) }? as usize;
    if to.is_null() {
        return Ok(());
    }
    let own = ContainerProcesses::of(share);
    let engines = (bytes - size_of::<u64>()) / size_of::<EngineSample>();
    for index in 0..count {
        let first = to.wrapping_add(index * bytes + size_of::<u64>()).cast::<EngineSample>();
        for engine in (0..engines).map(|engine| first.wrapping_add(engine)) {
            // SAFETY: the entry is inside the array, by this function's safety contract.
            let did = unsafe { engine.read_unaligned() };
            if did.pid == 0 {
                continue;
            }
            let kept = match own.visible_pid(did.pid) {
                Some(pid) => EngineSample { pid, ..did },
                None => EngineSample { pid: 0, busy: 0, ..did },
            };
            // SAFETY: the entry is inside the array, by this function's safety contract.
            unsafe { engine.write_unaligned(kept) };
        }
    }
    Ok(())
}

hooks! { nvml;
    fn nvmlInternalGetExportTable(table: *mut *const c_void, id: *const u8) |next, _variant| {
        // SAFETY: the application's arguments, passed on unchanged under the driver function's own contract.
        let answer = unsafe { next(table, id) };
        if answer != NVML_SUCCESS || table.is_null() || id.is_null() {
            return answer;
        }
        // SAFETY: not null, and the driver has read as many bytes.
        if unsafe { id.cast::<[u8; 16]>().read_unaligned() } != TABLE_ID {
            return answer;
        }
        // SAFETY: not null, and the driver has written the table's address there.
        let real = unsafe { table.read() }.cast::<usize>();
        // Whether a function answers or passes the call on is decided when it is called.
        // SAFETY: the address is that of the driver's table.
        match unsafe { copy_table(real) } {
            Some(copy) => {
                // SAFETY: not null, and the driver has written there.
                unsafe { table.write(copy.cast()) };
                answer
            }
            // A table that cannot be copied would show the processes of all containers.
            None => NVML_ERROR_NOT_FOUND,
        }
    }
}
