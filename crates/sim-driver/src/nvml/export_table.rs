//! The undocumented function table that `nvidia-smi` requests: a table identified by a UUID, with functions
//! identified by their index. The functions were identified by observing what `nvidia-smi` requests and prints.

use super::arguments::{
    self, NvmlResult, VisibleGpu, fixed_text, read_in, write_list, write_out, write_out_text,
};
use super::sensors::SensorReading;
use super::session::session;
use super::{
    NvmlError, c_char, c_void, entry, nvmlDevice_t, nvmlReturn_t, nvmlValue_t, nvmlViolationTime_t, topology,
};
use crate::profile::Architecture;
use partage_driver_api::exports::DriverVersion;
use std::ffi::CStr;
use std::sync::OnceLock;

/// The UUID of the table.
const TABLE_ID: [u8; 16] =
    [0xc4, 0xfe, 0x3e, 0x6c, 0xc9, 0x8f, 0x6c, 0x4e, 0xa3, 0x27, 0xee, 0x69, 0x6e, 0x12, 0xf7, 0xc4];

/// A function of the table. All take as many arguments as fit in registers and ignore those they do not need.
type TableFunction = unsafe extern "C" fn(usize, usize, usize, usize, usize, usize) -> nvmlReturn_t;

/// The first entry is the size of the table in bytes; the others are functions.
type FunctionTable = Vec<usize>;

/// Writes the address of the table.
///
/// # Safety
/// `table` is null or valid for writes, and `id` is null or valid for reads of 16 bytes.
pub(super) unsafe fn write_table(table: *mut *const c_void, id: *const u8) -> NvmlResult {
    let version = session()?.config().driver;
    let id = read_in!(id.cast::<[u8; 16]>());
    if id != TABLE_ID {
        return Err(NvmlError::NOT_FOUND);
    }
    static R535: OnceLock<FunctionTable> = OnceLock::new();
    static R550: OnceLock<FunctionTable> = OnceLock::new();
    let slots = match version {
        DriverVersion::R535 => R535.get_or_init(|| build(245, version)),
        DriverVersion::R550 => R550.get_or_init(|| build(251, version)),
    };
    write_out!(table => slots.as_ptr().cast())
}

fn build(slots: usize, version: DriverVersion) -> FunctionTable {
    let mut table = vec![unsupported as TableFunction as usize; slots];
    let known: [(usize, TableFunction); 16] = [
        (23, pci_distance),
        (26, accept_log),
        (72, is_monitored),
        (81, pci_bus_id),
        (108, power_limit),
        (138, thermal_violation),
        (145, if version == DriverVersion::R535 { samples::<4> } else { samples::<6> }),
        (213, compute_processes),
        (214, no_processes),
        (215, no_processes),
        (226, atomic_capabilities),
        (230, host_generation),
        (231, chip_part),
        (240, temperature_margin),
        (242, addressing_mode),
        (if version == DriverVersion::R535 { 243 } else { 249 }, sparse_operation_mode),
    ];
    for (slot, function) in known {
        table[slot] = function as usize;
    }
    table[0] = slots * size_of::<usize>();
    table
}

/// Declares functions of the table, with the same entry point as exported functions.
macro_rules! slots {
    ($($(#[$doc:meta])* fn $name:ident($($arg:ident: $type:ty),*) $body:block)*) => { $(
        $(#[$doc])*
        #[allow(unused_assignments, unused_variables, unused_mut)]
        unsafe extern "C" fn $name(a: usize, b: usize, c: usize, d: usize, e: usize, f: usize) -> nvmlReturn_t {
            entry::enter(|| {
                let mut given = [a, b, c, d, e, f].into_iter();
                $(let $arg = given.next().unwrap_or_default() as $type;)*
                $body
            })
        }
    )* };
}

slots! {
    /// A function that was never seen in use, or that the card does not support.
    fn unsupported() { Err(NvmlError::NOT_SUPPORTED) }

    /// Writes the PCIe distance of two GPUs, given by address, nearest first from 0: a cell of `topo -m` unless there
    /// are NVLinks, which `nvidia-smi` queries separately.
    fn pci_distance(one: *const c_char, other: *const c_char, level: *mut u32) {
        let (one, other) = (by_address(one)?, by_address(other)?);
        write_out!(level => (topology::level(one, other.index) / 10).saturating_sub(1))
    }

    /// Accepts log output of `nvidia-smi`.
    fn accept_log() { Ok(()) }

    /// Writes the PCI bus id of a GPU, even of a lost one: how `nvidia-smi` names a GPU without a handle.
    fn pci_bus_id(index: u32, to: *mut c_char, length: u32) {
        let session = session()?;
        let gpu = *session.visible.get(index as usize).ok_or(NvmlError::INVALID_ARGUMENT)?;
        let pci = session.cards[gpu].gpu.pci;
        write_out_text!(to, length, format!("{:04X}:{:02X}:{:02X}.0", pci.domain, pci.bus, pci.device))
    }

    /// Writes whether `dmon` and `pmon` can monitor the GPU.
    fn is_monitored(device: nvmlDevice_t, is_supported: *mut u32) {
        arguments::gpu(device)?;
        write_out!(is_supported => 1)
    }

    /// Writes the enforced power limit.
    fn power_limit(device: nvmlDevice_t, milliwatts: *mut u32) {
        write_out!(milliwatts => SensorReading::read(arguments::gpu(device)?).power_limit())
    }

    /// Writes how long the GPU was throttled by heat: never.
    fn thermal_violation(device: nvmlDevice_t, time: *mut nvmlViolationTime_t) {
        let gpu = arguments::gpu(device)?;
        let reference = gpu.session.wall_micros(crate::state::now());
        write_out!(time => nvmlViolationTime_t { referenceTime: reference, violationTime: 0 })
    }

    /// Writes the processes with contexts.
    fn compute_processes(device: nvmlDevice_t, count: *mut u32, to: *mut ProcessRecord) {
        let gpu = arguments::gpu(device)?;
        let room = read_in!(count.cast_const()) as usize;
        // Writes as many as fit, because a partial list is more useful than none.
        let list: Vec<ProcessRecord> = gpu.session.state.processes(gpu.index).iter().take(room).map(|process| ProcessRecord {
            pid: process.pid,
            padding: 0,
            used: process.used * crate::state::UNIT,
            gpu_instance: u32::MAX,
            compute_instance: u32::MAX,
            protected: 0,
            name: fixed_text(&process.name),
        }).collect();
        // SAFETY: `nvidia-smi` passes a count and an array of that length, or null.
        unsafe { write_list(count, to, &list) }
    }

    /// Writes an empty list, for graphics processes and MPS clients.
    fn no_processes(device: nvmlDevice_t, count: *mut u32, to: *mut ProcessRecord) {
        arguments::gpu(device)?;
        write_out!(count => 0)
    }

    /// Writes the atomic operations on host memory that the card supports: three kinds, with 32 and 64 bits.
    fn atomic_capabilities(device: nvmlDevice_t, mask: *mut u32) {
        hopper_gpu(device)?;
        write_out!(mask => 0b11_1111)
    }

    /// Writes the highest PCIe generation that the host supports.
    fn host_generation(device: nvmlDevice_t, generation: *mut u32) {
        write_out!(generation => arguments::gpu(device)?.profile().pci.generation)
    }

    /// Writes the part number of the chip.
    fn chip_part(device: nvmlDevice_t, to: *mut c_char, length: u32) {
        write_out_text!(to, length, arguments::gpu(device)?.profile().board.chip)
    }

    /// Writes the temperature margin; cards before Hopper report only the temperature.
    fn temperature_margin(device: nvmlDevice_t, celsius: *mut i32) {
        write_out!(celsius => SensorReading::read(hopper_gpu(device)?).temperature_margin())
    }

    /// Writes how programs can access pageable host memory: not without kernel support.
    fn addressing_mode(device: nvmlDevice_t, mode: *mut u32) {
        arguments::gpu(device)?;
        write_out!(mode => 0)
    }

    /// Writes whether sparse operation mode is enabled: never.
    fn sparse_operation_mode(device: nvmlDevice_t, on: *mut u32) {
        hopper_gpu(device)?;
        write_out!(on => 0)
    }
}

/// Resolves a device handle; fails on cards before Hopper.
fn hopper_gpu(device: nvmlDevice_t) -> Result<VisibleGpu, NvmlError> {
    let gpu = arguments::gpu(device)?;
    if gpu.profile().architecture < Architecture::Hopper { Err(NvmlError::NOT_SUPPORTED) } else { Ok(gpu) }
}

/// Resolves a PCI address to a GPU.
fn by_address(address: *const c_char) -> Result<VisibleGpu, NvmlError> {
    if address.is_null() {
        return Err(NvmlError::INVALID_ARGUMENT);
    }
    // SAFETY: non-null, and `nvidia-smi` passes a NUL-terminated string.
    let address = unsafe { CStr::from_ptr(address) };
    topology::by_address(&address.to_string_lossy())
}

/// A process in the list of compute processes.
#[repr(C)]
#[derive(Clone, Copy)]
struct ProcessRecord {
    pid: u32,
    padding: u32,
    used: u64,
    gpu_instance: u32,
    compute_instance: u32,
    protected: u64,
    name: [c_char; 4096],
}

/// The usage of one engine by one process.
#[repr(C)]
#[derive(Clone, Copy)]
struct EngineSample {
    busy: nvmlValue_t,
    pid: u32,
    unread: [u8; 68],
}

/// A sample of all engines: multiprocessors, memory, encoder, decoder, and since 550 JPEG and optical flow.
#[repr(C)]
#[derive(Clone, Copy)]
struct ProcessSample<const ENGINES: usize> {
    micros: u64,
    engines: [EngineSample; ENGINES],
}

/// Samples per utilization window. A sample belongs to one process, so a window that several processes shared is
/// reported as several samples.
const SAMPLES_PER_WINDOW: usize = 16;

/// Writes which processes used the GPU since `seen`; `pmon` sums the samples.
unsafe extern "C" fn samples<const ENGINES: usize>(
    device: usize,
    seen: usize,
    kind: usize,
    count: usize,
    to: usize,
    _: usize,
) -> nvmlReturn_t {
    entry::enter(|| {
        let gpu = arguments::gpu(device as nvmlDevice_t)?;
        let count = count as *mut u32;
        let room = read_in!(count.cast_const()) as usize;
        let mut process_samples = process_samples::<ENGINES>(gpu, seen as u64);
        // Keeps the newest ones if the array is too small.
        process_samples.drain(..process_samples.len().saturating_sub(room));
        write_out!(kind as *mut u32 => super::NVML_VALUE_TYPE_UNSIGNED_INT)?;
        // SAFETY: `nvidia-smi` passes an array with room for `*count` samples, or null.
        unsafe { write_list(count, to as *mut ProcessSample<ENGINES>, &process_samples) }
    })
}

fn process_samples<const ENGINES: usize>(gpu: VisibleGpu, seen: u64) -> Vec<ProcessSample<ENGINES>> {
    let mut process_samples = Vec::new();
    for window in super::processes::windows(gpu, seen) {
        let mut left = SAMPLES_PER_WINDOW;
        let mut push = |pid: u32, thousandths: u64| {
            let engine =
                |busy: u64| EngineSample { busy: nvmlValue_t { ullVal: busy }, pid, unread: [0; 68] };
            let mut engines = [engine(0); ENGINES];
            engines[0] = engine(thousandths / 10);
            engines[1] = engine(super::sensors::memory_share(thousandths) / 10);
            process_samples.push(ProcessSample { micros: window.micros, engines });
        };
        for &(pid, thousandths) in &window.shares {
            // The number of samples that the process's share needs if each is at most full.
            let own = (thousandths as usize * SAMPLES_PER_WINDOW).div_ceil(1000).min(left);
            left -= own;
            for _ in 0..own {
                push(pid, (thousandths * SAMPLES_PER_WINDOW as u64 / own as u64).min(1000));
            }
        }
        for _ in 0..left {
            push(0, 0);
        }
    }
    process_samples
}
