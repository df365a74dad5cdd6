//! The table without documentation through which `nvidia-smi` asks for processes: a program gets a copy of it, in which the
//! places that tell of processes are ours.
//!
//! Its first word is its size in bytes, so it grows at its end: where a place is was learnt from 535 (245 places) and 550
//! (251), and is taken to be the same in any that has as many or more. What `pmon` asks for has another form in each, so in a
//! table of another size it is not supported. Other tables pass untouched.
#![allow(unsafe_code)]

use super::processes::{Container, Kind, Own, answers};
use super::{Answer, Share, check, put_list, take, told};
use crate::driver::nvml as real;
use crate::hook::{guarded, hooks};
use partage_driver_api::nvml::*;
use partage_region::futex::keeping_errno;
use std::sync::OnceLock;
use std::sync::atomic::{AtomicUsize, Ordering};

/// The number of the table.
const ID: [u8; 16] =
    [0xc4, 0xfe, 0x3e, 0x6c, 0xc9, 0x8f, 0x6c, 0x4e, 0xa3, 0x27, 0xee, 0x69, 0x6e, 0x12, 0xf7, 0xc4];

/// Places: what processes did by engine, and who computes, draws, or is a client of MPS.
const SAMPLES: usize = 145;
const COMPUTE: usize = 213;
const GRAPHICS: usize = 214;
const MPS: usize = 215;

/// Places of the tables that are known.
const PLACES_535: usize = 245;
const PLACES_550: usize = 251;

/// No table is as large.
const MOST: usize = 1 << 13;

/// A place of the table. As many arguments as fit in registers, of which each function takes what it needs.
type Place = unsafe extern "C" fn(usize, usize, usize, usize, usize, usize) -> nvmlReturn_t;

/// The driver's own function in the place of the samples.
static REAL_SAMPLES: AtomicUsize = AtomicUsize::new(0);

/// Bytes of what happened in a moment, in the table that was copied; zero where it is not known.
static MOMENT: AtomicUsize = AtomicUsize::new(0);

/// A copy of the driver's table with our places in it. The driver has one, for as long as it is loaded.
///
/// # Safety
/// `table` is the driver's.
unsafe fn copy_of(table: *const usize) -> Option<*const usize> {
    static COPY: OnceLock<Option<(usize, Box<[usize]>)>> = OnceLock::new();
    let copy = COPY.get_or_init(|| {
        // SAFETY: every table begins with its size in bytes.
        let places = unsafe { table.read() } / size_of::<usize>();
        if !(MPS + 1..=MOST).contains(&places) {
            return None;
        }
        // SAFETY: it is as long as it says.
        let mut copy: Box<[usize]> = unsafe { std::slice::from_raw_parts(table, places) }.into();
        let hooks: [(usize, Place); 3] = [(COMPUTE, compute), (GRAPHICS, graphics), (MPS, mps)];
        for (place, hook) in hooks {
            *copy.get_mut(place)? = hook as usize;
        }
        let samples = std::mem::replace(copy.get_mut(SAMPLES)?, samples as *const () as usize);
        REAL_SAMPLES.store(samples, Ordering::Release);
        MOMENT.store(moment(places), Ordering::Release);
        Some((table.addr(), copy))
    });
    let (of, copy) = copy.as_ref()?;
    (*of == table.addr()).then_some(copy.as_ptr())
}

/// Bytes of a moment: when it was, and its engines.
fn moment(places: usize) -> usize {
    let engines = match places {
        PLACES_535 => 4,
        PLACES_550 => 6,
        _ => return 0,
    };
    size_of::<u64>() + engines * size_of::<Engine>()
}

/// What one process did with one engine.
#[repr(C)]
#[derive(Clone, Copy)]
struct Engine {
    busy: u64,
    pid: u32,
    unread: [u8; 68],
}

const _: () = assert!(size_of::<Engine>() == 80);

/// A process on the list.
#[repr(C)]
#[derive(Clone, Copy)]
struct Listed {
    pid: u32,
    padding: u32,
    used: u64,
    gpu_instance: u32,
    compute_instance: u32,
    protected: u64,
    name: [u8; 4096],
}

const _: () = assert!(size_of::<Listed>() == 4128);

impl Listed {
    fn of(own: &Own) -> Self {
        Self {
            pid: own.pid,
            padding: 0,
            used: own.bytes,
            gpu_instance: u32::MAX,
            compute_instance: u32::MAX,
            protected: 0,
            name: name(own.pid),
        }
    }
}

/// How a process was called, cut to its field and ended by zeros. As the caller's `ps` knows it; the driver may know more.
pub(super) fn name(pid: u32) -> [u8; 4096] {
    let mut name = [0; 4096];
    let called = keeping_errno(|| std::fs::read(format!("/proc/{pid}/cmdline"))).unwrap_or_default();
    let first = called.split(|&byte| byte == 0).next().unwrap_or_default();
    if first.is_empty() {
        // SAFETY: a buffer as long as is said. Where it fails the name stays empty.
        unsafe { real::nvmlSystemGetProcessName(pid, name.as_mut_ptr().cast(), 4096) };
    }
    // The last byte stays zero.
    for (to, from) in name.iter_mut().take(4095).zip(first) {
        *to = *from;
    }
    name
}

/// Calls the driver's own function for samples.
fn real_samples(given: [usize; 6]) -> nvmlReturn_t {
    let address = REAL_SAMPLES.load(Ordering::Acquire);
    if address == 0 {
        return NVML_ERROR_FUNCTION_NOT_FOUND;
    }
    // SAFETY: what the driver's table had in that place.
    let function = unsafe { std::mem::transmute::<usize, Place>(address) };
    let [a, b, c, d, e, f] = given;
    // SAFETY: as the program called it.
    unsafe { function(a, b, c, d, e, f) }
}

/// A list of processes.
fn listed(kind: Kind, given: [usize; 6]) -> nvmlReturn_t {
    guarded(NVML_ERROR_UNKNOWN, || {
        let [device, count, to, ..] = given;
        let (count, to) = (count as *mut u32, to as *mut Listed);
        told(device as nvmlDevice_t, |share| {
            answers(&share)?;
            // SAFETY: the program's number.
            let room = unsafe { take(count.cast_const()) }? as usize;
            let list: Vec<Listed> = match kind {
                // As many as there is room for: a table with some of them is better than none.
                Kind::Compute => Container::of(&share).holders().take(room).map(Listed::of).collect(),
                Kind::Other => Vec::new(),
            };
            // SAFETY: the program's number, and its array with as much room.
            unsafe { put_list(count, to, &list) }
        })
    })
}

unsafe extern "C" fn compute(a: usize, b: usize, c: usize, d: usize, e: usize, f: usize) -> nvmlReturn_t {
    listed(Kind::Compute, [a, b, c, d, e, f])
}

unsafe extern "C" fn graphics(a: usize, b: usize, c: usize, d: usize, e: usize, f: usize) -> nvmlReturn_t {
    listed(Kind::Other, [a, b, c, d, e, f])
}

unsafe extern "C" fn mps(a: usize, b: usize, c: usize, d: usize, e: usize, f: usize) -> nvmlReturn_t {
    listed(Kind::Other, [a, b, c, d, e, f])
}

/// What processes did, moment by moment: a moment of somebody else's is one in which nothing happened.
unsafe extern "C" fn samples(a: usize, b: usize, c: usize, d: usize, e: usize, f: usize) -> nvmlReturn_t {
    guarded(NVML_ERROR_UNKNOWN, || {
        let given = [a, b, c, d, e, f];
        told(a as nvmlDevice_t, |share| {
            let moment = MOMENT.load(Ordering::Acquire);
            if moment == 0 {
                return Err(NVML_ERROR_NOT_SUPPORTED);
            }
            check(real_samples(given))?;
            // SAFETY: the driver has just written there.
            unsafe { keep_own(&share, moment, d as *const u32, e as *mut u8) }
        })
    })
}

/// # Safety
/// `to` is null or has `*count` moments of that many bytes.
unsafe fn keep_own(share: &Share, moment: usize, count: *const u32, to: *mut u8) -> Answer {
    // SAFETY: the caller's promise.
    let count = unsafe { take(count) }? as usize;
    if to.is_null() {
        return Ok(());
    }
    let own = Container::of(share);
    let engines = (moment - size_of::<u64>()) / size_of::<Engine>();
    for index in 0..count {
        let first = to.wrapping_add(index * moment + size_of::<u64>()).cast::<Engine>();
        for engine in (0..engines).map(|engine| first.wrapping_add(engine)) {
            // SAFETY: inside the array.
            let did = unsafe { engine.read_unaligned() };
            if did.pid == 0 {
                continue;
            }
            let kept = match own.shown(did.pid) {
                Some(pid) => Engine { pid, ..did },
                None => Engine { pid: 0, busy: 0, ..did },
            };
            // SAFETY: the same place.
            unsafe { engine.write_unaligned(kept) };
        }
    }
    Ok(())
}

hooks! { nvml;
    fn nvmlInternalGetExportTable(table: *mut *const c_void, id: *const u8) |next, _variant| {
        // SAFETY: the program's promise.
        let answer = unsafe { next(table, id) };
        if answer != NVML_SUCCESS || table.is_null() || id.is_null() {
            return answer;
        }
        // SAFETY: the driver has read as many bytes.
        if unsafe { id.cast::<[u8; 16]>().read_unaligned() } != ID {
            return answer;
        }
        // SAFETY: the driver has just written there.
        let real = unsafe { table.read() }.cast::<usize>();
        // Whether a place is to answer or to pass on is decided when it is called.
        // SAFETY: the driver's table.
        match unsafe { copy_of(real) } {
            Some(copy) => {
                // SAFETY: where the driver has just written.
                unsafe { table.write(copy.cast()) };
                answer
            }
            // A table that cannot be copied would show everybody's processes.
            None => NVML_ERROR_NOT_FOUND,
        }
    }
}
