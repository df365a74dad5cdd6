//! Controls of a GPU and of the machine: a GPU does not belong to one container, so none may change them.
//!
//! The driver itself requires root, which a container often has. `nvmlDeviceSetCpuAffinity` and its opposite affect
//! only the calling thread, and are not hooked.
#![allow(unsafe_code)]

use crate::hook::hooks;
use partage_driver_api::nvml::*;

macro_rules! refused {
    ($($(#[$doc:meta])* fn $name:ident($($arg:ident: $type:ty),* $(,)?);)*) => {
        hooks! { nvml; $(
            fn $name($($arg: $type),*) |next, _variant| {
                let _ = ($($arg,)*);
                NVML_ERROR_NO_PERMISSION
            }
        )* }
    };
}

refused! {
    // Clocks, power, fans, modes and counters of a GPU.
    fn nvmlDeviceClearAccountingPids(device: nvmlDevice_t);
    fn nvmlDeviceClearEccErrorCounts(device: nvmlDevice_t, counter_type: nvmlEccCounterType_t);
    fn nvmlDeviceClearFieldValues(device: nvmlDevice_t, values_count: i32, values: *mut nvmlFieldValue_t);
    fn nvmlDeviceResetApplicationsClocks(device: nvmlDevice_t);
    fn nvmlDeviceResetGpuLockedClocks(device: nvmlDevice_t);
    fn nvmlDeviceResetMemoryLockedClocks(device: nvmlDevice_t);
    fn nvmlDeviceSetAPIRestriction(
        device: nvmlDevice_t,
        api_type: nvmlRestrictedAPI_t,
        is_restricted: nvmlEnableState_t,
    );
    fn nvmlDeviceSetAccountingMode(device: nvmlDevice_t, mode: nvmlEnableState_t);
    fn nvmlDeviceSetApplicationsClocks(device: nvmlDevice_t, mem_clock_mhz: u32, graphics_clock_mhz: u32);
    fn nvmlDeviceSetAutoBoostedClocksEnabled(device: nvmlDevice_t, enabled: nvmlEnableState_t);
    fn nvmlDeviceSetComputeMode(device: nvmlDevice_t, mode: nvmlComputeMode_t);
    fn nvmlDeviceSetDefaultAutoBoostedClocksEnabled(
        device: nvmlDevice_t,
        enabled: nvmlEnableState_t,
        flags: u32,
    );
    fn nvmlDeviceSetDefaultFanSpeed_v2(device: nvmlDevice_t, fan: u32);
    fn nvmlDeviceSetDriverModel(device: nvmlDevice_t, driver_model: nvmlDriverModel_t, flags: u32);
    fn nvmlDeviceSetEccMode(device: nvmlDevice_t, ecc: nvmlEnableState_t);
    fn nvmlDeviceSetFanControlPolicy(device: nvmlDevice_t, fan: u32, policy: nvmlFanControlPolicy_t);
    fn nvmlDeviceSetFanSpeed_v2(device: nvmlDevice_t, fan: u32, speed: u32);
    fn nvmlDeviceSetGpcClkVfOffset(device: nvmlDevice_t, offset: i32);
    fn nvmlDeviceSetGpuLockedClocks(device: nvmlDevice_t, min_gpu_clock_mhz: u32, max_gpu_clock_mhz: u32);
    fn nvmlDeviceSetGpuOperationMode(device: nvmlDevice_t, mode: nvmlGpuOperationMode_t);
    fn nvmlDeviceSetMemClkVfOffset(device: nvmlDevice_t, offset: i32);
    fn nvmlDeviceSetMemoryLockedClocks(device: nvmlDevice_t, min_mem_clock_mhz: u32, max_mem_clock_mhz: u32);
    fn nvmlDeviceSetPersistenceMode(device: nvmlDevice_t, mode: nvmlEnableState_t);
    fn nvmlDeviceSetPowerManagementLimit(device: nvmlDevice_t, limit: u32);
    fn nvmlDeviceSetPowerManagementLimit_v2(device: nvmlDevice_t, power_value: *mut nvmlPowerValue_v2_t);
    fn nvmlDeviceSetTemperatureThreshold(
        device: nvmlDevice_t,
        threshold_type: nvmlTemperatureThresholds_t,
        temperature: *mut i32,
    );

    // Units and links.
    fn nvmlUnitSetLedState(unit: nvmlUnit_t, color: nvmlLedColor_t);
    fn nvmlDeviceFreezeNvLinkUtilizationCounter(
        device: nvmlDevice_t,
        link: u32,
        counter: u32,
        freeze: nvmlEnableState_t,
    );
    fn nvmlDeviceResetNvLinkErrorCounters(device: nvmlDevice_t, link: u32);
    fn nvmlDeviceResetNvLinkUtilizationCounter(device: nvmlDevice_t, link: u32, counter: u32);
    fn nvmlDeviceSetNvLinkDeviceLowPowerThreshold(device: nvmlDevice_t, info: *mut nvmlNvLinkPowerThres_t);
    fn nvmlDeviceSetNvLinkUtilizationControl(
        device: nvmlDevice_t,
        link: u32,
        counter: u32,
        control: *mut nvmlNvLinkUtilizationControl_t,
        reset: u32,
    );
    fn nvmlSystemSetNvlinkBwMode(nvlink_bw_mode: u32);

    // MIG instances, and counters that all share.
    fn nvmlComputeInstanceDestroy(compute_instance: nvmlComputeInstance_t);
    fn nvmlDeviceCreateGpuInstance(
        device: nvmlDevice_t,
        profile_id: u32,
        gpu_instance: *mut nvmlGpuInstance_t,
    );
    fn nvmlDeviceCreateGpuInstanceWithPlacement(
        device: nvmlDevice_t,
        profile_id: u32,
        placement: *const nvmlGpuInstancePlacement_t,
        gpu_instance: *mut nvmlGpuInstance_t,
    );
    fn nvmlDeviceSetMigMode(device: nvmlDevice_t, mode: u32, activation_status: *mut nvmlReturn_t);
    fn nvmlGpmSetStreamingEnabled(device: nvmlDevice_t, state: u32);
    fn nvmlGpuInstanceCreateComputeInstance(
        gpu_instance: nvmlGpuInstance_t,
        profile_id: u32,
        compute_instance: *mut nvmlComputeInstance_t,
    );
    fn nvmlGpuInstanceCreateComputeInstanceWithPlacement(
        gpu_instance: nvmlGpuInstance_t,
        profile_id: u32,
        placement: *const nvmlComputeInstancePlacement_t,
        compute_instance: *mut nvmlComputeInstance_t,
    );
    fn nvmlGpuInstanceDestroy(gpu_instance: nvmlGpuInstance_t);

    // Virtual machines.
    fn nvmlDeviceSetVgpuCapabilities(
        device: nvmlDevice_t,
        capability: nvmlDeviceVgpuCapability_t,
        state: nvmlEnableState_t,
    );
    fn nvmlDeviceSetVgpuHeterogeneousMode(
        device: nvmlDevice_t,
        heterogeneous_mode: *const nvmlVgpuHeterogeneousMode_t,
    );
    fn nvmlDeviceSetVgpuSchedulerState(
        device: nvmlDevice_t,
        scheduler_state: *mut nvmlVgpuSchedulerSetState_t,
    );
    fn nvmlDeviceSetVirtualizationMode(device: nvmlDevice_t, virtual_mode: nvmlGpuVirtualizationMode_t);
    fn nvmlSetVgpuVersion(vgpu_version: *mut nvmlVgpuVersion_t);
    fn nvmlVgpuInstanceClearAccountingPids(vgpu_instance: nvmlVgpuInstance_t);
    fn nvmlVgpuInstanceSetEncoderCapacity(vgpu_instance: nvmlVgpuInstance_t, encoder_capacity: u32);

    // Activity of virtual machines and their processes: a container is not their host.
    fn nvmlDeviceGetVgpuInstancesUtilizationInfo(
        device: nvmlDevice_t,
        vgpu_util_info: *mut nvmlVgpuInstancesUtilizationInfo_t,
    );
    fn nvmlDeviceGetVgpuProcessUtilization(
        device: nvmlDevice_t,
        last_seen_time_stamp: u64,
        vgpu_process_samples_count: *mut u32,
        utilization_samples: *mut nvmlVgpuProcessUtilizationSample_t,
    );
    fn nvmlDeviceGetVgpuProcessesUtilizationInfo(
        device: nvmlDevice_t,
        vgpu_proc_util_info: *mut nvmlVgpuProcessesUtilizationInfo_t,
    );
    fn nvmlDeviceGetVgpuUtilization(
        device: nvmlDevice_t,
        last_seen_time_stamp: u64,
        sample_val_type: *mut nvmlValueType_t,
        vgpu_instance_samples_count: *mut u32,
        utilization_samples: *mut nvmlVgpuInstanceUtilizationSample_t,
    );
    fn nvmlVgpuInstanceGetAccountingPids(vgpu_instance: nvmlVgpuInstance_t, count: *mut u32, pids: *mut u32);
    fn nvmlVgpuInstanceGetAccountingStats(
        vgpu_instance: nvmlVgpuInstance_t,
        pid: u32,
        stats: *mut nvmlAccountingStats_t,
    );
    fn nvmlVgpuInstanceGetEncoderSessions(
        vgpu_instance: nvmlVgpuInstance_t,
        session_count: *mut u32,
        session_info: *mut nvmlEncoderSessionInfo_t,
    );
    fn nvmlVgpuInstanceGetEncoderStats(
        vgpu_instance: nvmlVgpuInstance_t,
        session_count: *mut u32,
        average_fps: *mut u32,
        average_latency: *mut u32,
    );
    fn nvmlVgpuInstanceGetFBCSessions(
        vgpu_instance: nvmlVgpuInstance_t,
        session_count: *mut u32,
        session_info: *mut nvmlFBCSessionInfo_t,
    );
    fn nvmlVgpuInstanceGetFBCStats(vgpu_instance: nvmlVgpuInstance_t, fbc_stats: *mut nvmlFBCStats_t);
    fn nvmlVgpuInstanceGetFbUsage(vgpu_instance: nvmlVgpuInstance_t, fb_usage: *mut u64);
    fn nvmlDeviceGetVgpuSchedulerLog(device: nvmlDevice_t, scheduler_log: *mut nvmlVgpuSchedulerLog_t);

    // Removing GPUs, discovering new ones, confidential computing.
    fn nvmlDeviceModifyDrainState(pci_info: *mut nvmlPciInfo_t, new_state: nvmlEnableState_t);
    fn nvmlDeviceRemoveGpu(pci_info: *mut nvmlPciInfo_v2_t);
    fn nvmlDeviceRemoveGpu_v2(
        pci_info: *mut nvmlPciInfo_t,
        gpu_state: nvmlDetachGpuState_t,
        link_state: nvmlPcieLinkState_t,
    );
    fn nvmlDeviceDiscoverGpus(pci_info: *mut nvmlPciInfo_t);
    fn nvmlDeviceSetConfComputeUnprotectedMemSize(device: nvmlDevice_t, size_kib: u64);
    fn nvmlSystemSetConfComputeGpusReadyState(is_accepting_work: u32);
    fn nvmlSystemSetConfComputeKeyRotationThresholdInfo(
        key_rotation_thr_info: *mut nvmlConfComputeSetKeyRotationThresholdInfo_t,
    );
}
