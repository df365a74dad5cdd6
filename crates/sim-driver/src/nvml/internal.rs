//! The table without documentation that `nvidia-smi` asks for: one table, known by its number, of functions
//! known by their place in it. What a place does was learnt by watching what `nvidia-smi` asks and prints.

use super::call::{self, Answer, Gpu, answer, answer_text, letters, passed, put_list};
use super::reading::Reading;
use super::session::session;
use super::{
    NvmlError, c_char, c_void, entry, nvmlDevice_t, nvmlReturn_t, nvmlValue_t, nvmlViolationTime_t, topology,
};
use crate::profile::Architecture;
use partage_driver_api::exports::DriverVersion;
use std::ffi::CStr;
use std::sync::OnceLock;

/// The number of the table.
const ID: [u8; 16] =
    [0xc4, 0xfe, 0x3e, 0x6c, 0xc9, 0x8f, 0x6c, 0x4e, 0xa3, 0x27, 0xee, 0x69, 0x6e, 0x12, 0xf7, 0xc4];

/// A place of the table. All functions take what they need of as many arguments as fit in registers.
type Slot = unsafe extern "C" fn(usize, usize, usize, usize, usize, usize) -> nvmlReturn_t;

/// Its first entry is its size in bytes; the others are functions.
type Table = Vec<usize>;

/// Gives out the table.
///
/// # Safety
/// `table` is null or may be written to; `id` is null or 16 bytes.
pub(super) unsafe fn table(table: *mut *const c_void, id: *const u8) -> Answer {
    let version = session()?.config().driver;
    let id = passed!(id.cast::<[u8; 16]>());
    if id != ID {
        return Err(NvmlError::NOT_FOUND);
    }
    static R535: OnceLock<Table> = OnceLock::new();
    static R550: OnceLock<Table> = OnceLock::new();
    let slots = match version {
        DriverVersion::R535 => R535.get_or_init(|| build(245, version)),
        DriverVersion::R550 => R550.get_or_init(|| build(251, version)),
    };
    answer!(table => slots.as_ptr().cast())
}

fn build(slots: usize, version: DriverVersion) -> Table {
    let mut table = vec![absent as Slot as usize; slots];
    let known: [(usize, Slot); 16] = [
        (23, path),
        (26, log),
        (72, is_monitored),
        (81, place),
        (108, power_limit),
        (138, thermal_violation),
        (145, if version == DriverVersion::R535 { samples::<4> } else { samples::<6> }),
        (213, compute),
        (214, nobody),
        (215, nobody),
        (226, atomics),
        (230, host_generation),
        (231, chip_part),
        (240, margin),
        (242, addressing),
        (if version == DriverVersion::R535 { 243 } else { 249 }, sparse),
    ];
    for (slot, function) in known {
        table[slot] = function as usize;
    }
    table[0] = slots * size_of::<usize>();
    table
}

/// Declares functions of the table: they enter as all functions do.
macro_rules! slots {
    ($($(#[$doc:meta])* fn $name:ident($($arg:ident: $type:ty),*) $body:block)*) => { $(
        $(#[$doc])*
        #[allow(unused_assignments, unused_variables, unused_mut)]
        unsafe extern "C" fn $name(a: usize, b: usize, c: usize, d: usize, e: usize, f: usize) -> nvmlReturn_t {
            entry::plain(|| {
                let mut given = [a, b, c, d, e, f].into_iter();
                $(let $arg = given.next().unwrap_or_default() as $type;)*
                $body
            })
        }
    )* };
}

slots! {
    /// A place nobody has seen used, or whose answer a card does not have.
    fn absent() { Err(NvmlError::NOT_SUPPORTED) }

    /// The way between two GPUs over PCIe, by their addresses, the nearest is 0: a cell of `topo -m` unless
    /// there are NVLinks, which `nvidia-smi` finds by itself.
    fn path(one: *const c_char, other: *const c_char, level: *mut u32) {
        let (one, other) = (by_address(one)?, by_address(other)?);
        answer!(level => (topology::level(one, other.index) / 10).saturating_sub(1))
    }

    /// What `nvidia-smi` would log.
    fn log() { Ok(()) }

    /// Where a GPU sits, also one that is off the bus: how it is called when its handle cannot be had.
    fn place(index: u32, to: *mut c_char, length: u32) {
        let session = session()?;
        let gpu = *session.shown.get(index as usize).ok_or(NvmlError::INVALID_ARGUMENT)?;
        let pci = session.cards[gpu].gpu.pci;
        answer_text!(to, length, format!("{:04X}:{:02X}:{:02X}.0", pci.domain, pci.bus, pci.device))
    }

    /// Whether `dmon` and `pmon` can watch it.
    fn is_monitored(device: nvmlDevice_t, yes: *mut u32) {
        call::gpu(device)?;
        answer!(yes => 1)
    }

    /// The power limit in force.
    fn power_limit(device: nvmlDevice_t, milliwatts: *mut u32) {
        answer!(milliwatts => Reading::of(call::gpu(device)?).power_limit())
    }

    /// For how long heat has held it back.
    fn thermal_violation(device: nvmlDevice_t, time: *mut nvmlViolationTime_t) {
        let gpu = call::gpu(device)?;
        let reference = gpu.session.wall_micros(crate::state::now());
        answer!(time => nvmlViolationTime_t { referenceTime: reference, violationTime: 0 })
    }

    /// The processes with contexts.
    fn compute(device: nvmlDevice_t, count: *mut u32, to: *mut Listed) {
        let gpu = call::gpu(device)?;
        let room = passed!(count.cast_const()) as usize;
        // As many as there is room for: a table with some of them is better than none.
        let list: Vec<Listed> = gpu.session.state.processes(gpu.index).iter().take(room).map(|process| Listed {
            pid: process.pid,
            padding: 0,
            used: process.used * crate::state::UNIT,
            gpu_instance: u32::MAX,
            compute_instance: u32::MAX,
            protected: 0,
            name: letters(&process.name),
        }).collect();
        // SAFETY: the program's count and array, which are null or as long as it says.
        unsafe { put_list(count, to, &list) }
    }

    /// Processes of kinds that there are none of: graphics, and clients of an MPS server.
    fn nobody(device: nvmlDevice_t, count: *mut u32, to: *mut Listed) {
        call::gpu(device)?;
        answer!(count => 0)
    }

    /// Atomic operations that the card can do on the host's memory: 32 and 64 bits, all three kinds.
    fn atomics(device: nvmlDevice_t, mask: *mut u32) {
        hopper(device)?;
        answer!(mask => 0b11_1111)
    }

    /// The newest PCIe generation that the host speaks.
    fn host_generation(device: nvmlDevice_t, generation: *mut u32) {
        answer!(generation => call::gpu(device)?.profile().pci.generation)
    }

    /// The chip's part number.
    fn chip_part(device: nvmlDevice_t, to: *mut c_char, length: u32) {
        answer_text!(to, length, call::gpu(device)?.profile().board.chip)
    }

    /// How much warmer it may get; cards before Hopper say how warm instead.
    fn margin(device: nvmlDevice_t, celsius: *mut i32) {
        answer!(celsius => Reading::of(hopper(device)?).margin())
    }

    /// How programs reach the host's pages: not at all without the kernel's help.
    fn addressing(device: nvmlDevice_t, mode: *mut u32) {
        call::gpu(device)?;
        answer!(mode => 0)
    }

    /// Whether zeros are skipped everywhere.
    fn sparse(device: nvmlDevice_t, on: *mut u32) {
        hopper(device)?;
        answer!(on => 0)
    }
}

/// The GPU, if it is new enough to say more of itself.
fn hopper(device: nvmlDevice_t) -> Result<Gpu, NvmlError> {
    let gpu = call::gpu(device)?;
    if gpu.profile().architecture < Architecture::Hopper { Err(NvmlError::NOT_SUPPORTED) } else { Ok(gpu) }
}

/// The GPU at a PCI address.
fn by_address(address: *const c_char) -> Result<Gpu, NvmlError> {
    if address.is_null() {
        return Err(NvmlError::INVALID_ARGUMENT);
    }
    // SAFETY: not null, so it is a text.
    let address = unsafe { CStr::from_ptr(address) };
    topology::by_address(&address.to_string_lossy())
}

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
    name: [c_char; 4096],
}

/// What one process did with one engine.
#[repr(C)]
#[derive(Clone, Copy)]
struct Engine {
    busy: nvmlValue_t,
    pid: u32,
    unread: [u8; 68],
}

/// What the engines did for a moment: multiprocessors, memory, encoder, decoder, and since 550 JPEG and
/// optical flow.
#[repr(C)]
#[derive(Clone, Copy)]
struct Moment<const ENGINES: usize> {
    micros: u64,
    engines: [Engine; ENGINES],
}

/// Moments of a window. A moment belongs to one process, so a window that several shared is told as several
/// moments.
const MOMENTS: usize = 16;

/// Who used the GPU since `seen`: what `pmon` adds up.
unsafe extern "C" fn samples<const ENGINES: usize>(
    device: usize,
    seen: usize,
    kind: usize,
    count: usize,
    to: usize,
    _: usize,
) -> nvmlReturn_t {
    entry::plain(|| {
        let gpu = call::gpu(device as nvmlDevice_t)?;
        let count = count as *mut u32;
        let room = passed!(count.cast_const()) as usize;
        let mut moments = moments::<ENGINES>(gpu, seen as u64);
        // The newest ones, if there is not room for all.
        moments.drain(..moments.len().saturating_sub(room));
        answer!(kind as *mut u32 => super::NVML_VALUE_TYPE_UNSIGNED_INT)?;
        // SAFETY: the program's array, which has room for as many.
        unsafe { put_list(count, to as *mut Moment<ENGINES>, &moments) }
    })
}

fn moments<const ENGINES: usize>(gpu: Gpu, seen: u64) -> Vec<Moment<ENGINES>> {
    let mut moments = Vec::new();
    for window in super::processes::windows(gpu, seen) {
        let mut left = MOMENTS;
        let mut push = |pid: u32, thousandths: u64| {
            let engine = |busy: u64| Engine { busy: nvmlValue_t { ullVal: busy }, pid, unread: [0; 68] };
            let mut engines = [engine(0); ENGINES];
            engines[0] = engine(thousandths / 10);
            engines[1] = engine(super::reading::memory_share(thousandths) / 10);
            moments.push(Moment { micros: window.micros, engines });
        };
        for &(pid, thousandths) in &window.shares {
            // As many moments as fit its share, each a little less than full.
            let own = (thousandths as usize * MOMENTS).div_ceil(1000).min(left);
            left -= own;
            for _ in 0..own {
                push(pid, (thousandths * MOMENTS as u64 / own as u64).min(1000));
            }
        }
        for _ in 0..left {
            push(0, 0);
        }
    }
    moments
}
