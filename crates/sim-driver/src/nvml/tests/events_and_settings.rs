//! Tests of events, settings and NVLinks.

use super::*;

#[test]
fn events_reach_registered_sets() {
    let fixture = opened_node(&profile::A100_SXM4_40GB, 2);
    let (first, second) = (device(0), device(1));
    fixture.other.inject(0, GpuFault::Xid(13));
    let set = {
        let mut set = std::ptr::null_mut();
        assert_eq!(call(|| unsafe { nvmlEventSetCreate(&mut set) }), Ok(()));
        set
    };
    let register = |device, kinds| call(|| unsafe { nvmlDeviceRegisterEvents(device, kinds, set) });
    let wait = |timeout| {
        ask::<nvmlEventData_t>(|data| unsafe { nvmlEventSetWait_v2(set, data, timeout) })
            .map(|data| (data.device, data.eventType, data.eventData))
    };
    assert_eq!(register(first, nvmlEventTypeXidCriticalError), Ok(()));
    assert_eq!(register(first, nvmlEventTypeDoubleBitEccError), Ok(()));
    assert_eq!(register(second, 1 << 40), Err(NvmlError::INVALID_ARGUMENT));
    assert_eq!(register(second, nvmlEventTypePowerSourceChange), Err(NvmlError::NOT_SUPPORTED));

    assert_eq!(wait(0), Err(NvmlError::TIMEOUT));
    let begun = std::time::Instant::now();
    assert_eq!(wait(50), Err(NvmlError::TIMEOUT));
    assert!(begun.elapsed() >= Duration::from_millis(50));

    fixture.other.inject(1, GpuFault::Xid(31));
    fixture.other.inject(0, GpuFault::CorrectedErrors(4));
    fixture.other.inject(0, GpuFault::UncorrectedErrors(2));
    assert_eq!(wait(1000), Ok((first, nvmlEventTypeDoubleBitEccError, 2)));
    assert_eq!(wait(1000), Ok((first, nvmlEventTypeXidCriticalError, 48)));
    assert_eq!(wait(0), Err(NvmlError::TIMEOUT));

    let other = Arc::clone(&fixture.other);
    let later = std::thread::spawn(move || {
        std::thread::sleep(Duration::from_millis(30));
        other.inject(0, GpuFault::Xid(43));
    });
    let old = ask::<nvmlEventData_v1_t>(|data| unsafe { nvmlEventSetWait(set, data, 10_000) }).unwrap();
    assert_eq!((old.device, old.eventData), (first, 43));
    later.join().unwrap();

    assert_eq!(call(|| unsafe { nvmlEventSetFree(set) }), Ok(()));
    assert_eq!(call(|| unsafe { nvmlEventSetFree(set) }), Err(NvmlError::INVALID_ARGUMENT));
    assert_eq!(wait(0), Err(NvmlError::INVALID_ARGUMENT));
}

#[test]
fn ecc_errors_are_counted_per_gpu() {
    let fixture = opened_node(&profile::T4, 2);
    fixture.other.inject(1, GpuFault::CorrectedErrors(3));
    fixture.other.inject(1, GpuFault::UncorrectedErrors(2));
    let device = device(1);
    let total =
        |kind, counter| ask::<u64>(|to| unsafe { nvmlDeviceGetTotalEccErrors(device, kind, counter, to) });
    assert_eq!((total(0, 0), total(0, 1), total(1, 0), total(1, 1)), (Ok(3), Ok(3), Ok(2), Ok(2)));
    assert_eq!(total(2, 0), Err(NvmlError::INVALID_ARGUMENT));
    let at = |place| ask::<u64>(|to| unsafe { nvmlDeviceGetMemoryErrorCounter(device, 1, 0, place, to) });
    assert_eq!((at(NVML_MEMORY_LOCATION_DRAM), at(NVML_MEMORY_LOCATION_SRAM)), (Ok(2), Ok(0)));
    assert_eq!(at(NVML_MEMORY_LOCATION_COUNT), Err(NvmlError::INVALID_ARGUMENT));
    IS_ROOT.set(false);
    let clear = |counter| call(|| unsafe { nvmlDeviceClearEccErrorCounts(device, counter) });
    assert_eq!(clear(NVML_VOLATILE_ECC), Err(NvmlError::NO_PERMISSION));
    IS_ROOT.set(true);
    assert_eq!(clear(NVML_VOLATILE_ECC), Ok(()));
    assert_eq!((total(1, 0), total(1, 1)), (Ok(0), Ok(2)));
}

#[test]
fn lost_gpu_reports_lost_until_it_returns() {
    let fixture = opened_node(&profile::A100_SXM4_80GB, 2);
    let (first, second) = (device(0), device(1));
    let mut set = std::ptr::null_mut();
    assert_eq!(call(|| unsafe { nvmlEventSetCreate(&mut set) }), Ok(()));
    let register = call(|| unsafe { nvmlDeviceRegisterEvents(second, nvmlEventTypeXidCriticalError, set) });
    assert_eq!(register, Ok(()));
    let energy = || ask::<u64>(|to| unsafe { nvmlDeviceGetTotalEnergyConsumption(second, to) });
    let before = energy().unwrap();
    fixture.other.inject(1, GpuFault::Lost);

    let power = |device| ask::<u32>(|to| unsafe { nvmlDeviceGetPowerUsage(device, to) });
    assert!(power(first).is_ok());
    assert_eq!(power(second), Err(NvmlError::GPU_IS_LOST));
    let uuid = text(|to, length| unsafe { nvmlDeviceGetUUID(second, to, length) }, 80);
    assert_eq!(uuid, Err(NvmlError::GPU_IS_LOST));
    assert_eq!(ask(|count| unsafe { nvmlDeviceGetCount_v2(count) }), Ok(2));
    assert_eq!(ask(|index| unsafe { nvmlDeviceGetIndex(second, index) }), Ok(1));
    let again = call(|| unsafe { nvmlDeviceGetHandleByIndex_v2(1, &mut { NULL }) });
    assert_eq!(again, Err(NvmlError::GPU_IS_LOST));

    let wait = || ask::<nvmlEventData_t>(|data| unsafe { nvmlEventSetWait_v2(set, data, 20) });
    let event = wait().unwrap();
    assert_eq!((event.device, event.eventData), (second, 79));
    assert_eq!(wait().map(|_| ()), Err(NvmlError::GPU_IS_LOST));

    fixture.other.inject(1, GpuFault::Returned);
    assert!(power(second).is_ok());
    assert!(energy().unwrap() < before);
    assert_eq!(wait().map(|_| ()), Err(NvmlError::TIMEOUT));
    assert_eq!(call(|| unsafe { nvmlEventSetFree(set) }), Ok(()));
}

#[test]
fn settings_require_root_and_persist() {
    let _fixture = opened_node(&profile::A100_SXM4_40GB, 2);
    let device = device(0);
    let set_power = |limit| call(|| unsafe { nvmlDeviceSetPowerManagementLimit(device, limit) });
    let power = || ask::<u32>(|to| unsafe { nvmlDeviceGetEnforcedPowerLimit(device, to) });
    IS_ROOT.set(false);
    assert_eq!(set_power(300_000), Err(NvmlError::NO_PERMISSION));
    assert_eq!(call(|| unsafe { nvmlDeviceSetPersistenceMode(device, 1) }), Err(NvmlError::NO_PERMISSION));
    assert_eq!(call(|| unsafe { nvmlDeviceSetComputeMode(device, 3) }), Err(NvmlError::NO_PERMISSION));
    assert_eq!(power(), Ok(400_000));
    IS_ROOT.set(true);
    assert_eq!(set_power(300_000), Ok(()));
    assert_eq!(power(), Ok(300_000));
    for wrong in [0, 99_999, 400_001] {
        assert_eq!(set_power(wrong), Err(NvmlError::INVALID_ARGUMENT));
    }
    assert_eq!(
        call(|| unsafe { nvmlDeviceSetComputeMode(device, NVML_COMPUTEMODE_EXCLUSIVE_PROCESS) }),
        Ok(())
    );
    assert_eq!(call(|| unsafe { nvmlDeviceSetComputeMode(device, 9) }), Err(NvmlError::INVALID_ARGUMENT));
    assert_eq!(call(|| unsafe { nvmlDeviceSetEccMode(device, 0) }), Ok(()));
    assert_eq!(call(|| unsafe { nvmlDeviceSetApplicationsClocks(device, 1215, 1005) }), Ok(()));
    let clocks = call(|| unsafe { nvmlDeviceSetApplicationsClocks(device, 1215, 1004) });
    assert_eq!(clocks, Err(NvmlError::INVALID_ARGUMENT));

    // The settings are visible to a later process.
    assert_eq!(call(|| unsafe { nvmlShutdown() }), Ok(()));
    let dir = NODE_PATH.with_borrow(Clone::clone);
    std::thread::spawn(move || {
        NODE_PATH.set(dir);
        assert_eq!(call(|| unsafe { nvmlInit_v2() }), Ok(()));
        let device = self::device(0);
        assert_eq!(ask::<u32>(|to| unsafe { nvmlDeviceGetEnforcedPowerLimit(device, to) }), Ok(300_000));
        assert_eq!(ask::<u32>(|to| unsafe { nvmlDeviceGetComputeMode(device, to) }), Ok(3));
        let (mut now, mut later) = (9, 9);
        assert_eq!(call(|| unsafe { nvmlDeviceGetEccMode(device, &mut now, &mut later) }), Ok(()));
        assert_eq!((now, later), (1, 0));
        let clock = ask::<u32>(|to| unsafe { nvmlDeviceGetApplicationsClock(device, NVML_CLOCK_SM, to) });
        assert_eq!(clock, Ok(1005));
        let other = self::device(1);
        assert_eq!(ask::<u32>(|to| unsafe { nvmlDeviceGetEnforcedPowerLimit(other, to) }), Ok(400_000));
    })
    .join()
    .unwrap();
}

#[test]
fn nvlinks_are_symmetric() {
    let _fixture = opened_node(&profile::V100_SXM2_32GB, 8);
    let mut links = 0;
    for number in 0..8 {
        let device = device(number);
        let own: nvmlPciInfo_t = ask(|pci| unsafe { nvmlDeviceGetPciInfo_v3(device, pci) }).unwrap();
        for link in 0..6 {
            let there: nvmlPciInfo_t =
                ask(|pci| unsafe { nvmlDeviceGetNvLinkRemotePciInfo_v2(device, link, pci) }).unwrap();
            let mut remote = NULL;
            let found =
                call(|| unsafe { nvmlDeviceGetHandleByPciBusId_v2(there.busId.as_ptr(), &mut remote) });
            assert_eq!(found, Ok(()));
            let mut field = nvmlFieldValue_t {
                fieldId: NVML_FI_DEV_NVLINK_REMOTE_NVLINK_ID,
                scopeId: link,
                ..Default::default()
            };
            assert_eq!(call(|| unsafe { nvmlDeviceGetFieldValues(device, 1, &mut field) }), Ok(()));
            let link_there = unsafe { field.value.uiVal };
            let back: nvmlPciInfo_t =
                ask(|pci| unsafe { nvmlDeviceGetNvLinkRemotePciInfo_v2(remote, link_there, pci) }).unwrap();
            assert_eq!(back.busId, own.busId);
            links += 1;
        }
        let state = |link| ask::<u32>(|to| unsafe { nvmlDeviceGetNvLinkState(device, link, to) });
        assert_eq!(state(5), Ok(1));
        assert_eq!(state(6), Err(NvmlError::NOT_SUPPORTED));
        assert_eq!(state(18), Err(NvmlError::INVALID_ARGUMENT));
    }
    assert_eq!(links, 48);
}

#[test]
fn unconnected_nvlink_is_inactive() {
    // Two GPUs of an eight-GPU board, with one link between them.
    let _fixture = opened_node(&profile::V100_SXM2_32GB, 2);
    let device = device(0);
    let state = |link| ask::<u32>(|to| unsafe { nvmlDeviceGetNvLinkState(device, link, to) });
    assert_eq!([0, 1, 5].map(state), [Ok(1), Ok(0), Ok(0)]);
    assert_eq!(state(6), Err(NvmlError::NOT_SUPPORTED));
    let remote =
        |link| ask::<nvmlPciInfo_t>(|pci| unsafe { nvmlDeviceGetNvLinkRemotePciInfo_v2(device, link, pci) });
    assert!(remote(0).is_ok());
    assert_eq!(remote(1).err(), Some(NvmlError::NOT_SUPPORTED));
}
