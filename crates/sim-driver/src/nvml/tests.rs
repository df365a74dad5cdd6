//! Tests of NVML through the C functions. To the library, each test thread acts as a separate process.
// Every unsafe block calls a C function with null or with pointers to local variables.
#![allow(clippy::undocumented_unsafe_blocks)]

mod all_functions;
mod events_and_settings;

use super::exports::*;
use super::session::tests::{IS_ROOT, NODE_PATH};
use super::*;
use crate::node::{NodeConfig, NodeDir};
use crate::profile::{self, GpuProfile};
use crate::state::{GpuFault, GpuLane, SimNodeState, UNIT, now, units};
use partage_driver_api::exports::DriverVersion;
use std::ffi::CString;
use std::sync::Arc;
use std::time::Duration;

const SAMPLE_PERIOD: Duration = Duration::from_millis(40);

/// A node, and the shared state attached as another process.
struct NodeFixture {
    _dir: tempfile::TempDir,
    other: Arc<SimNodeState>,
}

/// Creates a node without initializing the library.
fn unopened_node(card: &GpuProfile, count: usize, driver: DriverVersion) -> NodeFixture {
    let dir = tempfile::tempdir().unwrap();
    let card = GpuProfile { sample_period_micros: SAMPLE_PERIOD.as_micros() as u32, ..card.clone() };
    let config = NodeConfig::new(driver, &card, count, 1).unwrap();
    let node = NodeDir::create(&dir.path().join("node"), &config).unwrap();
    NODE_PATH.set(Some(node.path().to_path_buf()));
    IS_ROOT.set(true);
    let other = Arc::new(SimNodeState::attach(node.path()).unwrap());
    NodeFixture { _dir: dir, other }
}

/// Creates a node and initializes the library.
fn opened_node(card: &GpuProfile, count: usize) -> NodeFixture {
    let fixture = unopened_node(card, count, DriverVersion::R550);
    assert_eq!(call(|| unsafe { nvmlInit_v2() }), Ok(()));
    fixture
}

/// Makes a call and converts its status code.
fn call(body: impl FnOnce() -> nvmlReturn_t) -> Result<(), NvmlError> {
    check(body())
}

/// Makes a call that returns a value through its last argument.
fn ask<T: Default>(body: impl FnOnce(*mut T) -> nvmlReturn_t) -> Result<T, NvmlError> {
    let mut result = T::default();
    check(body(&mut result)).map(|()| result)
}

/// Returns the handle of a GPU by index.
fn device(index: u32) -> nvmlDevice_t {
    let mut device = std::ptr::null_mut();
    assert_eq!(call(|| unsafe { nvmlDeviceGetHandleByIndex_v2(index, &mut device) }), Ok(()));
    device
}

fn text(body: impl FnOnce(*mut c_char, u32) -> nvmlReturn_t, length: u32) -> Result<String, NvmlError> {
    let mut buffer = vec![0x7f_u8; 128];
    check(body(buffer.as_mut_ptr().cast(), length))?;
    let end = buffer.iter().position(|&byte| byte == 0).unwrap();
    Ok(String::from_utf8(buffer[..end].to_vec()).unwrap())
}

const NULL: nvmlDevice_t = std::ptr::null_mut();

#[test]
fn init_and_shutdown_are_counted() {
    let fixture = unopened_node(&profile::T4, 1, DriverVersion::R535);
    assert_eq!(call(|| unsafe { nvmlShutdown() }), Err(NvmlError::UNINITIALIZED));
    for init in [|| unsafe { nvmlInit() }, || unsafe { nvmlInit_v2() }, || unsafe { nvmlInitWithFlags(0) }] {
        assert_eq!(call(init), Ok(()));
    }
    for _ in 0..3 {
        assert_eq!(ask(|count| unsafe { nvmlDeviceGetCount_v2(count) }), Ok(1));
        assert_eq!(call(|| unsafe { nvmlShutdown() }), Ok(()));
    }
    assert_eq!(ask::<u32>(|count| unsafe { nvmlDeviceGetCount_v2(count) }), Err(NvmlError::UNINITIALIZED));
    assert_eq!(call(|| unsafe { nvmlShutdown() }), Err(NvmlError::UNINITIALIZED));
    drop(fixture);
}

#[test]
fn init_without_driver_is_rejected() {
    NODE_PATH.set(None);
    assert_eq!(call(|| unsafe { nvmlInit_v2() }), Err(NvmlError::DRIVER_NOT_LOADED));
    NODE_PATH.set(Some("/nonexistent".into()));
    assert_eq!(call(|| unsafe { nvmlInit_v2() }), Err(NvmlError::DRIVER_NOT_LOADED));

    let fixture = unopened_node(&profile::T4, 1, DriverVersion::R535);
    fixture.other.set_loaded(false);
    assert_eq!(call(|| unsafe { nvmlInit_v2() }), Err(NvmlError::DRIVER_NOT_LOADED));
    assert_eq!(call(|| unsafe { nvmlShutdown() }), Err(NvmlError::UNINITIALIZED));
    fixture.other.set_loaded(true);
    assert_eq!(call(|| unsafe { nvmlInit_v2() }), Ok(()));
    let device = device(0);
    fixture.other.set_loaded(false);
    assert_eq!(
        ask::<u32>(|power| unsafe { nvmlDeviceGetPowerUsage(device, power) }),
        Err(NvmlError::DRIVER_NOT_LOADED)
    );
}

#[test]
fn invented_handles_are_rejected() {
    let _fixture = opened_node(&profile::A100_SXM4_40GB, 2);
    let (first, second) = (device(0), device(1));
    let index = |device| ask::<u32>(|index| unsafe { nvmlDeviceGetIndex(device, index) });
    assert_eq!((index(first), index(second)), (Ok(0), Ok(1)));
    let invented = [
        NULL,
        8 as nvmlDevice_t,
        usize::MAX as nvmlDevice_t,
        first.wrapping_byte_add(2),
        first.wrapping_byte_sub(1),
    ];
    for device in invented {
        assert_eq!(index(device), Err(NvmlError::INVALID_ARGUMENT), "{device:?}");
    }
    for index in [2, u32::MAX] {
        let result = call(|| unsafe { nvmlDeviceGetHandleByIndex_v2(index, &mut { NULL }) });
        assert_eq!(result, Err(NvmlError::INVALID_ARGUMENT));
    }
    assert_eq!(
        call(|| unsafe { nvmlDeviceGetHandleByIndex_v2(0, std::ptr::null_mut()) }),
        Err(NvmlError::INVALID_ARGUMENT)
    );
}

#[test]
fn gpu_is_found_by_uuid_serial_and_pci_address() {
    let _fixture = opened_node(&profile::H100_SXM5_80GB, 8);
    type FindFunction = unsafe extern "C" fn(*const c_char, *mut nvmlDevice_t) -> nvmlReturn_t;
    let find = |function: FindFunction, text: &str| {
        let text = CString::new(text).unwrap();
        let mut device = NULL;
        call(|| unsafe { function(text.as_ptr(), &mut device) }).map(|()| device)
    };
    for number in 0..8 {
        let device = device(number);
        let uuid = text(|to, length| unsafe { nvmlDeviceGetUUID(device, to, length) }, 80).unwrap();
        let serial = text(|to, length| unsafe { nvmlDeviceGetSerial(device, to, length) }, 30).unwrap();
        let pci: nvmlPciInfo_t = ask(|pci| unsafe { nvmlDeviceGetPciInfo_v3(device, pci) }).unwrap();
        let place = |fixed_text: &[c_char]| {
            fixed_text
                .iter()
                .take_while(|&&letter| letter != 0)
                .map(|&letter| letter as u8 as char)
                .collect::<String>()
        };
        let address = place(&pci.busId);
        assert_eq!(address, format!("{:08X}:{:02X}:{:02X}.0", pci.domain, pci.bus, pci.device));
        assert_eq!(find(nvmlDeviceGetHandleByUUID, &uuid), Ok(device));
        assert_eq!(find(nvmlDeviceGetHandleBySerial, &serial), Ok(device));
        assert_eq!(find(nvmlDeviceGetHandleByPciBusId_v2, &address), Ok(device));
        assert_eq!(find(nvmlDeviceGetHandleByPciBusId, &place(&pci.busIdLegacy)), Ok(device));
    }
    let unknown = "GPU-00000000-0000-0000-0000-000000000000";
    assert_eq!(find(nvmlDeviceGetHandleByUUID, unknown), Err(NvmlError::NOT_FOUND));
    assert_eq!(find(nvmlDeviceGetHandleByUUID, "0"), Err(NvmlError::INVALID_ARGUMENT));
    assert_eq!(find(nvmlDeviceGetHandleByPciBusId_v2, "00000000:FE:00.0"), Err(NvmlError::NOT_FOUND));
    assert_eq!(find(nvmlDeviceGetHandleByPciBusId_v2, "first"), Err(NvmlError::INVALID_ARGUMENT));
    assert_eq!(find(nvmlDeviceGetHandleBySerial, "1"), Err(NvmlError::NOT_FOUND));
}

#[test]
fn text_buffer_needs_room_for_nul() {
    let _fixture = opened_node(&profile::T4, 1);
    let device = device(0);
    let name = |length| text(|to, length| unsafe { nvmlDeviceGetName(device, to, length) }, length);
    assert_eq!(name(9).as_deref(), Ok("Tesla T4"));
    assert_eq!(name(8), Err(NvmlError::INSUFFICIENT_SIZE));
    assert_eq!(name(0), Err(NvmlError::INSUFFICIENT_SIZE));
    assert_eq!(
        call(|| unsafe { nvmlDeviceGetName(device, std::ptr::null_mut(), 96) }),
        Err(NvmlError::INVALID_ARGUMENT)
    );
    let driver = text(|to, length| unsafe { nvmlSystemGetDriverVersion(to, length) }, 80);
    assert_eq!(driver.as_deref(), Ok("550.163.01"));
    assert_eq!(ask(|version| unsafe { nvmlSystemGetCudaDriverVersion(version) }), Ok(12_040));
}

#[test]
fn unknown_structure_versions_are_rejected() {
    let _fixture = opened_node(&profile::A100_SXM4_40GB, 1);
    let device = device(0);
    for version in [0, 1, 2, nvmlMemory_v2 + 1, nvmlMemory_v2 & 0xffff] {
        let mut memory = nvmlMemory_v2_t { version, total: 7, ..Default::default() };
        let result = call(|| unsafe { nvmlDeviceGetMemoryInfo_v2(device, &mut memory) });
        assert_eq!((result, memory.total), (Err(NvmlError::ARGUMENT_VERSION_MISMATCH), 7));
    }
    let mut pci = nvmlPciInfoExt_t { version: nvmlPciInfoExt_v1, ..Default::default() };
    assert_eq!(call(|| unsafe { nvmlDeviceGetPciInfoExt(device, &mut pci) }), Ok(()));
    assert_eq!((pci.baseClass, pci.pciDeviceId), (3, 0x20B0_10DE));
    pci.version += 1;
    let result = call(|| unsafe { nvmlDeviceGetPciInfoExt(device, &mut pci) });
    assert_eq!(result, Err(NvmlError::ARGUMENT_VERSION_MISMATCH));
}

#[test]
fn memory_info_versions_agree() {
    let fixture = opened_node(&profile::A100_SXM4_40GB, 2);
    let card = &profile::A100_SXM4_40GB.memory;
    fixture.other.set_contexts(1, 1);
    assert!(fixture.other.take_memory(1, units(3 << 30)));
    for (gpu, used) in [(0, 0), (1, 3 << 30)] {
        let device = device(gpu);
        let old: nvmlMemory_t = ask(|memory| unsafe { nvmlDeviceGetMemoryInfo(device, memory) }).unwrap();
        let mut new = nvmlMemory_v2_t { version: nvmlMemory_v2, ..Default::default() };
        assert_eq!(call(|| unsafe { nvmlDeviceGetMemoryInfo_v2(device, &mut new) }), Ok(()));
        assert_eq!((new.total, new.reserved, new.used), (card.total, card.reserved, used));
        assert_eq!(new.total, new.reserved + new.used + new.free);
        assert_eq!((old.total, old.free, old.used), (new.total, new.free, new.used + new.reserved));
        let bar: nvmlBAR1Memory_t =
            ask(|memory| unsafe { nvmlDeviceGetBAR1MemoryInfo(device, memory) }).unwrap();
        assert_eq!((bar.bar1Total, bar.bar1Used + bar.bar1Free), (card.bar1, card.bar1));
    }
}

#[test]
fn process_list_reports_required_size() {
    let fixture = opened_node(&profile::V100_SXM2_32GB, 1);
    let device = device(0);
    let third = SimNodeState::attach(NODE_PATH.with_borrow(Clone::clone).unwrap().as_path()).unwrap();
    for state in [&*fixture.other, &third] {
        state.set_contexts(0, 1);
        assert!(state.take_memory(0, units(1 << 30)));
    }
    let own = std::process::id();

    let mut count = 0;
    let list =
        |count: &mut u32, to| call(|| unsafe { nvmlDeviceGetComputeRunningProcesses_v3(device, count, to) });
    assert_eq!(list(&mut count, std::ptr::null_mut()), Err(NvmlError::INSUFFICIENT_SIZE));
    assert_eq!(count, 2);
    assert_eq!(list(&mut count, std::ptr::null_mut()), Err(NvmlError::INVALID_ARGUMENT));
    let mut infos = [nvmlProcessInfo_t::default(); 4];
    count = 4;
    assert_eq!(list(&mut count, infos.as_mut_ptr()), Ok(()));
    assert_eq!(count, 2);
    for info in &infos[..2] {
        assert_eq!((info.pid, info.usedGpuMemory), (own, 1 << 30));
        assert_eq!((info.gpuInstanceId, info.computeInstanceId), (u32::MAX, u32::MAX));
    }
    assert_eq!(infos[2].pid, 0);

    // Version 1 has shorter records.
    let mut old = [0_u64; 4];
    count = 2;
    let result =
        call(|| unsafe { nvmlDeviceGetComputeRunningProcesses(device, &mut count, old.as_mut_ptr().cast()) });
    assert_eq!((result, old[1], old[3]), (Ok(()), 1 << 30, 1 << 30));

    count = 0;
    let none = call(|| unsafe {
        nvmlDeviceGetGraphicsRunningProcesses_v3(device, &mut count, std::ptr::null_mut())
    });
    assert_eq!((none, count), (Ok(()), 0));
    let name = |length| text(|to, length| unsafe { nvmlSystemGetProcessName(own, to, length) }, length);
    assert!(name(128).is_ok_and(|name| !name.is_empty()));
    assert_eq!(name(4).map(|name| name.len()), Ok(3));
    let unknown = text(|to, length| unsafe { nvmlSystemGetProcessName(u32::MAX, to, length) }, 64);
    assert_eq!(unknown, Err(NvmlError::NOT_FOUND));

    drop(third);
    count = 0;
    assert_eq!(list(&mut count, std::ptr::null_mut()), Err(NvmlError::INSUFFICIENT_SIZE));
    assert_eq!(count, 1);
}

/// Returns the process utilization samples since a wall-clock time.
fn process_samples(
    device: nvmlDevice_t,
    seen: u64,
) -> Result<Vec<nvmlProcessUtilizationSample_t>, NvmlError> {
    let mut samples = vec![nvmlProcessUtilizationSample_t::default(); 8];
    let mut count = 8;
    call(|| unsafe { nvmlDeviceGetProcessUtilization(device, samples.as_mut_ptr(), &mut count, seen) })?;
    samples.truncate(count as usize);
    Ok(samples)
}

/// Sleeps until the next utilization window begins.
fn next_window(fixture: &NodeFixture) {
    let window = fixture.other.window();
    std::thread::sleep(Duration::from_nanos(window - now() % window));
}

#[test]
fn utilization_is_reported_after_its_window() {
    let fixture = opened_node(&profile::A10, 1);
    let device = device(0);
    fixture.other.set_contexts(0, 1);
    let rates =
        || ask::<nvmlUtilization_t>(|to| unsafe { nvmlDeviceGetUtilizationRates(device, to) }).unwrap();
    assert_eq!((rates().gpu, rates().memory), (0, 0));
    assert_eq!(process_samples(device, 0).map(|list| list.len()), Err(NvmlError::NOT_FOUND));
    let mut room = 0;
    let sizing =
        call(|| unsafe { nvmlDeviceGetProcessUtilization(device, std::ptr::null_mut(), &mut room, 0) });
    assert_eq!((sizing, room), (Err(NvmlError::INSUFFICIENT_SIZE), 1));

    next_window(&fixture);
    let begun = now();
    let mut lane = GpuLane::open(Arc::clone(&fixture.other), 0).unwrap();
    // Longer than the test, however slow the machine is.
    let long = 10_000 * fixture.other.window();
    lane.extend(long).unwrap();
    let rate = rates().gpu;
    if now() / fixture.other.window() == begun / fixture.other.window() {
        assert_eq!(rate, 0, "the window in which the work started has not ended");
    }
    next_window(&fixture);
    next_window(&fixture);
    assert_eq!(rates().gpu, 100);
    assert!((1..100).contains(&rates().memory));

    let samples = process_samples(device, 0).unwrap();
    assert_eq!((samples.len(), samples[0].pid), (1, std::process::id()));
    let seen = samples[0].timeStamp;
    let wall = std::time::SystemTime::now().duration_since(std::time::UNIX_EPOCH).unwrap().as_micros() as u64;
    assert!(seen <= wall && wall - seen < 60_000_000, "{seen} is not within a minute before {wall}");
    // Samples that were seen are not returned again.
    match process_samples(device, seen) {
        Err(failure) => assert_eq!(failure, NvmlError::NOT_FOUND),
        Ok(newer) => assert!(newer[0].timeStamp >= seen + SAMPLE_PERIOD.as_micros() as u64 / 2),
    }
    next_window(&fixture);
    let newer = process_samples(device, seen).unwrap();
    assert_eq!(newer[0].smUtil, 100);
    assert!(newer[0].timeStamp > seen);

    let mut info = nvmlProcessesUtilizationInfo_t {
        version: nvmlProcessesUtilizationInfo_v1,
        lastSeenTimeStamp: seen,
        ..Default::default()
    };
    let sizing = call(|| unsafe { nvmlDeviceGetProcessesUtilizationInfo(device, &mut info) });
    assert_eq!((sizing, info.processSamplesCount), (Err(NvmlError::INSUFFICIENT_SIZE), 1));
    let mut one = nvmlProcessUtilizationInfo_v1_t::default();
    info.procUtilArray = &mut one;
    assert_eq!(call(|| unsafe { nvmlDeviceGetProcessesUtilizationInfo(device, &mut info) }), Ok(()));
    assert_eq!((one.pid, one.smUtil), (std::process::id(), 100));

    // Under load, power and clocks are high.
    let number = |function: unsafe extern "C" fn(nvmlDevice_t, *mut u32) -> nvmlReturn_t| {
        ask::<u32>(|to| unsafe { function(device, to) }).unwrap()
    };
    assert!(number(nvmlDeviceGetPowerUsage) > 100_000);
    assert_eq!(number(nvmlDeviceGetPerformanceState), 0);
    let clock = ask::<u32>(|to| unsafe { nvmlDeviceGetClockInfo(device, NVML_CLOCK_SM, to) });
    assert_eq!(clock, Ok(profile::A10.clocks.graphics_max));
}

#[test]
fn samples_since_last_seen_are_returned() {
    let fixture = opened_node(&profile::T4, 1);
    let device = device(0);
    next_window(&fixture);
    let take = |seen, room: u32| {
        let mut samples = [nvmlSample_t::default(); 128];
        let (mut kind, mut count) = (99, room);
        let result = call(|| unsafe {
            nvmlDeviceGetSamples(
                device,
                NVML_GPU_UTILIZATION_SAMPLES,
                seen,
                &mut kind,
                &mut count,
                samples.as_mut_ptr(),
            )
        });
        result.map(|()| samples[..count as usize].iter().map(|sample| sample.timeStamp).collect::<Vec<u64>>())
    };
    let all = take(0, 128).unwrap();
    assert!(all.len() > 1 && all.is_sorted());
    let last = all[all.len() - 1];
    assert!(take(0, 1).unwrap()[0] >= last);
    assert_eq!(take(0, 0), Err(NvmlError::INVALID_ARGUMENT));
    assert_eq!(take(last + 3_600_000_000, 128), Err(NvmlError::NOT_FOUND));
    let (mut kind, mut count) = (99, 0);
    let sizing = call(|| unsafe {
        nvmlDeviceGetSamples(device, NVML_TOTAL_POWER_SAMPLES, 0, &mut kind, &mut count, std::ptr::null_mut())
    });
    assert_eq!((sizing, kind), (Ok(()), NVML_VALUE_TYPE_UNSIGNED_INT));
    assert!(count as usize >= all.len());
}

#[test]
fn nvidia_smi_export_table_has_size_and_functions() {
    const TABLE_ID: [u8; 16] = *b"\xc4\xfe\x3e\x6c\xc9\x8f\x6c\x4e\xa3\x27\xee\x69\x6e\x12\xf7\xc4";
    type TableFunction = unsafe extern "C" fn(usize, usize, usize, usize, usize, usize) -> nvmlReturn_t;
    for (driver, slots, sample) in [(DriverVersion::R535, 245, 328), (DriverVersion::R550, 251, 488)] {
        std::thread::spawn(move || {
            let fixture = unopened_node(&profile::T4, 3, driver);
            assert_eq!(call(|| unsafe { nvmlInit_v2() }), Ok(()));
            fixture.other.set_contexts(0, 1);
            let table = {
                let mut table = std::ptr::null();
                assert_eq!(
                    call(|| unsafe { nvmlInternalGetExportTable(&mut table, TABLE_ID.as_ptr()) }),
                    Ok(())
                );
                unsafe { std::slice::from_raw_parts(table.cast::<usize>(), slots) }
            };
            assert_eq!(table[0], slots * 8);
            let wrong =
                call(|| unsafe { nvmlInternalGetExportTable(&mut std::ptr::null(), [0; 16].as_ptr()) });
            assert_eq!(wrong, Err(NvmlError::NOT_FOUND));
            let slot = |number: usize| unsafe { std::mem::transmute::<usize, TableFunction>(table[number]) };
            let device = device(0);

            for (number, place) in table.iter().enumerate().skip(1) {
                assert_ne!(*place, 0, "slot {number}");
            }
            assert_eq!(call(|| unsafe { slot(1)(0, 0, 0, 0, 0, 0) }), Err(NvmlError::NOT_SUPPORTED));
            let mut level = 99_u32;
            let path = |one: &std::ffi::CStr, other: &std::ffi::CStr, level: &mut u32| {
                let level = std::ptr::from_mut(level) as usize;
                call(|| unsafe { slot(23)(one.as_ptr() as usize, other.as_ptr() as usize, level, 0, 0, 0) })
            };
            assert_eq!(path(c"00000000:3B:00.0", c"00000000:3C:00.0", &mut level), Ok(()));
            assert_eq!(level, 0);
            assert_eq!(path(c"00000000:3B:00.0", c"00000000:5E:00.0", &mut level), Ok(()));
            assert_eq!(level, 3);

            let mut records = vec![0_u8; 4128 * 2];
            let mut count = 2_u32;
            let (room, to) = (std::ptr::from_mut(&mut count) as usize, records.as_mut_ptr() as usize);
            assert_eq!(call(|| unsafe { slot(213)(device as usize, room, to, 0, 0, 0) }), Ok(()));
            assert_eq!(
                (count, u32::from_le_bytes(records[..4].try_into().unwrap())),
                (1, std::process::id())
            );
            assert_ne!(records[32], 0, "process name is empty");

            // Utilization windows, reported as samples of one process each.
            next_window(&fixture);
            let mut lane = GpuLane::open(Arc::clone(&fixture.other), 0).unwrap();
            lane.extend(10_000 * fixture.other.window()).unwrap();
            let seen = std::time::SystemTime::now().duration_since(std::time::UNIX_EPOCH).unwrap();
            std::thread::sleep(4 * SAMPLE_PERIOD);
            let mut samples = vec![0_u8; sample * 100];
            let (mut count, mut kind) = (100_u32, 0_u32);
            let result = call(|| unsafe {
                slot(145)(
                    device as usize,
                    seen.as_micros() as usize,
                    std::ptr::from_mut(&mut kind) as usize,
                    std::ptr::from_mut(&mut count) as usize,
                    samples.as_mut_ptr() as usize,
                    0,
                )
            });
            assert_eq!((result, kind), (Ok(()), 1));
            assert!((32..=100).contains(&count), "{count}");
            let last = &samples[sample * (count as usize - 1)..];
            let number = |at: usize| u32::from_le_bytes(last[at..at + 4].try_into().unwrap());
            assert_eq!((number(8), number(16)), (100, std::process::id()));
        })
        .join()
        .unwrap();
    }
}

#[test]
fn process_memory_is_reported_in_bytes() {
    let fixture = opened_node(&profile::T4, 1);
    fixture.other.set_contexts(0, 1);
    assert!(fixture.other.take_memory(0, 1));
    let mut info = nvmlProcessInfo_t::default();
    let mut count = 1;
    let result =
        call(|| unsafe { nvmlDeviceGetComputeRunningProcesses_v3(device(0), &mut count, &mut info) });
    assert_eq!((result, info.usedGpuMemory), (Ok(()), UNIT));
}

#[test]
fn mig_mode_change_raises_an_event() {
    let fixture = opened_node(&profile::A100_SXM4_40GB, 2);
    let mode = |gpu: u32| {
        let (mut current, mut pending) = (9, 9);
        let queried = call(|| unsafe { nvmlDeviceGetMigMode(device(gpu), &mut current, &mut pending) });
        queried.map(|()| (current, pending))
    };
    let mut set = std::ptr::null_mut();
    assert_eq!(call(|| unsafe { nvmlEventSetCreate(&mut set) }), Ok(()));
    let wanted = call(|| unsafe { nvmlDeviceRegisterEvents(device(1), nvmlEventMigConfigChange, set) });
    assert_eq!((wanted, mode(1)), (Ok(()), Ok((NVML_DEVICE_MIG_DISABLE, NVML_DEVICE_MIG_DISABLE))));
    fixture.other.inject(1, GpuFault::Mig(true));
    assert_eq!(mode(1), Ok((NVML_DEVICE_MIG_ENABLE, NVML_DEVICE_MIG_ENABLE)));
    assert_eq!(mode(0), Ok((NVML_DEVICE_MIG_DISABLE, NVML_DEVICE_MIG_DISABLE)));
    let mut event = nvmlEventData_t::default();
    assert_eq!(call(|| unsafe { nvmlEventSetWait_v2(set, &mut event, 0) }), Ok(()));
    assert_eq!((event.device, event.eventType), (device(1), nvmlEventMigConfigChange));
    // MIG mode creates no instances.
    let mut instance = std::ptr::null_mut();
    let found = call(|| unsafe { nvmlDeviceGetMigDeviceHandleByIndex(device(1), 0, &mut instance) });
    assert_eq!(found, Err(NvmlError::NOT_FOUND));
    fixture.other.inject(1, GpuFault::Mig(false));
    assert_eq!(mode(1), Ok((NVML_DEVICE_MIG_DISABLE, NVML_DEVICE_MIG_DISABLE)));
}

#[test]
fn forked_child_must_initialize_again() {
    let fixture = opened_node(&profile::T4, 1);
    let device = device(0);
    let index = || ask::<u32>(|index| unsafe { nvmlDeviceGetIndex(device, index) });
    let power = || ask::<u32>(|power| unsafe { nvmlDeviceGetPowerUsage(device, power) });
    // The child reports by its exit code, because it must not use locks that other threads of the parent hold.
    let child = unsafe { libc::fork() };
    if child == 0 {
        let unopened_node = index() == Err(NvmlError::UNINITIALIZED);
        let opened = call(|| unsafe { nvmlInit_v2() }) == Ok(()) && index() == Ok(0) && power().is_ok();
        let ended = call(|| unsafe { nvmlShutdown() }) == Ok(()) && index() == Err(NvmlError::UNINITIALIZED);
        unsafe { libc::_exit(i32::from(!unopened_node) | i32::from(!opened) << 1 | i32::from(!ended) << 2) };
    }
    let mut status = -1;
    assert_eq!(unsafe { libc::waitpid(child, &mut status, 0) }, child);
    assert_eq!(status, 0);
    assert_eq!(index(), Ok(0));
    drop(fixture);
}
