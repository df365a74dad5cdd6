//! The functions of libnvidia-ml.

/// Passes all functions of libnvidia-ml to the given macro, grouped in families; see the [crate
/// documentation](crate) for the format. All functions return an [`nvmlReturn_t`](crate::nvml::nvmlReturn_t), so
/// `nvmlErrorString`, which returns a string, is not in the table. The types of [`nvml`](crate::nvml) must be in
/// scope.
#[macro_export]
macro_rules! nvml_functions {
    ($($expand:tt)+) => {
        $($expand)+! {
            /// Initialization and shutdown, and the undocumented export table.
            trait NvmlLifecycle {
                fn nvmlInit();
                fn nvmlInitWithFlags(flags: u32);
                fn nvmlInit_v2();
                fn nvmlInternalGetExportTable(table: *mut *const c_void, id: *const u8);
                fn nvmlShutdown();
            }
            /// System queries: driver version, process names.
            trait NvmlSystem {
                fn nvmlSystemGetCudaDriverVersion(version: *mut i32);
                fn nvmlSystemGetCudaDriverVersion_v2(version: *mut i32);
                fn nvmlSystemGetDriverVersion(version: *mut c_char, length: u32);
                fn nvmlSystemGetHicVersion(hwbc_count: *mut u32, hwbc_entries: *mut nvmlHwbcEntry_t);
                fn nvmlSystemGetNVMLVersion(version: *mut c_char, length: u32);
                fn nvmlSystemGetProcessName(pid: u32, name: *mut c_char, length: u32);
            }
            /// Queries of S-class units.
            trait NvmlUnits {
                fn nvmlUnitGetCount(count: *mut u32);
                fn nvmlUnitGetDevices(unit: nvmlUnit_t, count: *mut u32, devices: *mut nvmlDevice_t);
                fn nvmlUnitGetFanSpeedInfo(unit: nvmlUnit_t, fan_speeds: *mut nvmlUnitFanSpeeds_t);
                fn nvmlUnitGetHandleByIndex(index: u32, unit: *mut nvmlUnit_t);
                fn nvmlUnitGetLedState(unit: nvmlUnit_t, state: *mut nvmlLedState_t);
                fn nvmlUnitGetPsuInfo(unit: nvmlUnit_t, psu: *mut nvmlPSUInfo_t);
                fn nvmlUnitGetTemperature(unit: nvmlUnit_t, kind: u32, temperature: *mut u32);
                fn nvmlUnitGetUnitInfo(unit: nvmlUnit_t, info: *mut nvmlUnitInfo_t);
                fn nvmlUnitSetLedState(unit: nvmlUnit_t, color: nvmlLedColor_t);
            }
            /// Device enumeration: handles, names, identities, locations.
            trait NvmlIdentity {
                fn nvmlDeviceGetArchitecture(
                    device: nvmlDevice_t,
                    architecture: *mut nvmlDeviceArchitecture_t,
                );
                fn nvmlDeviceGetAttributes(device: nvmlDevice_t, attributes: *mut nvmlDeviceAttributes_t);
                fn nvmlDeviceGetAttributes_v2(device: nvmlDevice_t, attributes: *mut nvmlDeviceAttributes_t);
                fn nvmlDeviceGetBoardId(device: nvmlDevice_t, board_id: *mut u32);
                fn nvmlDeviceGetBoardPartNumber(device: nvmlDevice_t, part_number: *mut c_char, length: u32);
                fn nvmlDeviceGetBrand(device: nvmlDevice_t, kind: *mut nvmlBrandType_t);
                fn nvmlDeviceGetBridgeChipInfo(
                    device: nvmlDevice_t,
                    bridge_hierarchy: *mut nvmlBridgeChipHierarchy_t,
                );
                fn nvmlDeviceGetBusType(device: nvmlDevice_t, kind: *mut nvmlBusType_t);
                fn nvmlDeviceGetCount(count: *mut u32);
                fn nvmlDeviceGetCount_v2(count: *mut u32);
                fn nvmlDeviceGetCpuAffinity(device: nvmlDevice_t, cpu_set_size: u32, cpu_set: *mut c_ulong);
                fn nvmlDeviceGetCpuAffinityWithinScope(
                    device: nvmlDevice_t,
                    cpu_set_size: u32,
                    cpu_set: *mut c_ulong,
                    scope: nvmlAffinityScope_t,
                );
                fn nvmlDeviceGetCudaComputeCapability(device: nvmlDevice_t, major: *mut i32, minor: *mut i32);
                fn nvmlDeviceGetGspFirmwareMode(
                    device: nvmlDevice_t,
                    is_enabled: *mut u32,
                    default_mode: *mut u32,
                );
                fn nvmlDeviceGetGspFirmwareVersion(device: nvmlDevice_t, version: *mut c_char);
                fn nvmlDeviceGetHandleByIndex(index: u32, device: *mut nvmlDevice_t);
                fn nvmlDeviceGetHandleByIndex_v2(index: u32, device: *mut nvmlDevice_t);
                fn nvmlDeviceGetHandleByPciBusId(pci_bus_id: *const c_char, device: *mut nvmlDevice_t);
                fn nvmlDeviceGetHandleByPciBusId_v2(pci_bus_id: *const c_char, device: *mut nvmlDevice_t);
                fn nvmlDeviceGetHandleBySerial(serial: *const c_char, device: *mut nvmlDevice_t);
                fn nvmlDeviceGetHandleByUUID(uuid: *const c_char, device: *mut nvmlDevice_t);
                fn nvmlDeviceGetIndex(device: nvmlDevice_t, index: *mut u32);
                fn nvmlDeviceGetInforomConfigurationChecksum(device: nvmlDevice_t, checksum: *mut u32);
                fn nvmlDeviceGetInforomImageVersion(device: nvmlDevice_t, version: *mut c_char, length: u32);
                fn nvmlDeviceGetInforomVersion(
                    device: nvmlDevice_t,
                    object: nvmlInforomObject_t,
                    version: *mut c_char,
                    length: u32,
                );
                fn nvmlDeviceGetIrqNum(device: nvmlDevice_t, irq_num: *mut u32);
                fn nvmlDeviceGetMemoryAffinity(
                    device: nvmlDevice_t,
                    node_set_size: u32,
                    node_set: *mut c_ulong,
                    scope: nvmlAffinityScope_t,
                );
                fn nvmlDeviceGetMemoryBusWidth(device: nvmlDevice_t, bus_width: *mut u32);
                fn nvmlDeviceGetMinorNumber(device: nvmlDevice_t, minor_number: *mut u32);
                fn nvmlDeviceGetModuleId(device: nvmlDevice_t, module_id: *mut u32);
                fn nvmlDeviceGetMultiGpuBoard(device: nvmlDevice_t, is_multi: *mut u32);
                fn nvmlDeviceGetName(device: nvmlDevice_t, name: *mut c_char, length: u32);
                fn nvmlDeviceGetNumGpuCores(device: nvmlDevice_t, num_cores: *mut u32);
                fn nvmlDeviceGetNumaNodeId(device: nvmlDevice_t, node: *mut u32);
                fn nvmlDeviceGetP2PStatus(
                    device1: nvmlDevice_t,
                    device2: nvmlDevice_t,
                    p2p_index: nvmlGpuP2PCapsIndex_t,
                    p2p_status: *mut nvmlGpuP2PStatus_t,
                );
                fn nvmlDeviceGetPciInfo(device: nvmlDevice_t, pci: *mut nvmlPciInfo_v1_t);
                fn nvmlDeviceGetPciInfoExt(device: nvmlDevice_t, pci: *mut nvmlPciInfoExt_t);
                fn nvmlDeviceGetPciInfo_v2(device: nvmlDevice_t, pci: *mut nvmlPciInfo_v2_t);
                fn nvmlDeviceGetPciInfo_v3(device: nvmlDevice_t, pci: *mut nvmlPciInfo_t);
                fn nvmlDeviceGetSerial(device: nvmlDevice_t, serial: *mut c_char, length: u32);
                fn nvmlDeviceGetTopologyCommonAncestor(
                    device1: nvmlDevice_t,
                    device2: nvmlDevice_t,
                    path_info: *mut nvmlGpuTopologyLevel_t,
                );
                fn nvmlDeviceGetTopologyNearestGpus(
                    device: nvmlDevice_t,
                    level: nvmlGpuTopologyLevel_t,
                    count: *mut u32,
                    device_array: *mut nvmlDevice_t,
                );
                fn nvmlDeviceGetUUID(device: nvmlDevice_t, uuid: *mut c_char, length: u32);
                fn nvmlDeviceGetVbiosVersion(device: nvmlDevice_t, version: *mut c_char, length: u32);
                fn nvmlDeviceOnSameBoard(
                    device1: nvmlDevice_t,
                    device2: nvmlDevice_t,
                    on_same_board: *mut i32,
                );
                fn nvmlDeviceValidateInforom(device: nvmlDevice_t);
                fn nvmlSystemGetTopologyGpuSet(
                    cpu_number: u32,
                    count: *mut u32,
                    device_array: *mut nvmlDevice_t,
                );
            }
            /// The state of a device: memory, utilization, clocks, power, temperature, performance.
            trait NvmlStatus {
                fn nvmlDeviceGetAPIRestriction(
                    device: nvmlDevice_t,
                    api_type: nvmlRestrictedAPI_t,
                    is_restricted: *mut nvmlEnableState_t,
                );
                fn nvmlDeviceGetAdaptiveClockInfoStatus(
                    device: nvmlDevice_t,
                    adaptive_clock_status: *mut u32,
                );
                fn nvmlDeviceGetApplicationsClock(
                    device: nvmlDevice_t,
                    clock_type: nvmlClockType_t,
                    clock_mhz: *mut u32,
                );
                fn nvmlDeviceGetAutoBoostedClocksEnabled(
                    device: nvmlDevice_t,
                    is_enabled: *mut nvmlEnableState_t,
                    default_is_enabled: *mut nvmlEnableState_t,
                );
                fn nvmlDeviceGetBAR1MemoryInfo(device: nvmlDevice_t, bar1_memory: *mut nvmlBAR1Memory_t);
                fn nvmlDeviceGetClkMonStatus(device: nvmlDevice_t, status: *mut nvmlClkMonStatus_t);
                fn nvmlDeviceGetClock(
                    device: nvmlDevice_t,
                    clock_type: nvmlClockType_t,
                    clock_id: nvmlClockId_t,
                    clock_mhz: *mut u32,
                );
                fn nvmlDeviceGetClockInfo(device: nvmlDevice_t, kind: nvmlClockType_t, clock: *mut u32);
                fn nvmlDeviceGetComputeMode(device: nvmlDevice_t, mode: *mut nvmlComputeMode_t);
                fn nvmlDeviceGetCurrPcieLinkGeneration(device: nvmlDevice_t, curr_link_gen: *mut u32);
                fn nvmlDeviceGetCurrPcieLinkWidth(device: nvmlDevice_t, curr_link_width: *mut u32);
                fn nvmlDeviceGetCurrentClocksEventReasons(
                    device: nvmlDevice_t,
                    clocks_event_reasons: *mut u64,
                );
                fn nvmlDeviceGetCurrentClocksThrottleReasons(
                    device: nvmlDevice_t,
                    clocks_throttle_reasons: *mut u64,
                );
                fn nvmlDeviceGetDecoderUtilization(
                    device: nvmlDevice_t,
                    utilization: *mut u32,
                    sampling_period_us: *mut u32,
                );
                fn nvmlDeviceGetDefaultApplicationsClock(
                    device: nvmlDevice_t,
                    clock_type: nvmlClockType_t,
                    clock_mhz: *mut u32,
                );
                fn nvmlDeviceGetDisplayActive(device: nvmlDevice_t, is_active: *mut nvmlEnableState_t);
                fn nvmlDeviceGetDisplayMode(device: nvmlDevice_t, display: *mut nvmlEnableState_t);
                fn nvmlDeviceGetDriverModel(
                    device: nvmlDevice_t,
                    current: *mut nvmlDriverModel_t,
                    pending: *mut nvmlDriverModel_t,
                );
                fn nvmlDeviceGetDynamicPstatesInfo(
                    device: nvmlDevice_t,
                    dynamic_pstates_info: *mut nvmlGpuDynamicPstatesInfo_t,
                );
                fn nvmlDeviceGetEncoderCapacity(
                    device: nvmlDevice_t,
                    encoder_query_type: nvmlEncoderType_t,
                    encoder_capacity: *mut u32,
                );
                fn nvmlDeviceGetEncoderUtilization(
                    device: nvmlDevice_t,
                    utilization: *mut u32,
                    sampling_period_us: *mut u32,
                );
                fn nvmlDeviceGetEnforcedPowerLimit(device: nvmlDevice_t, limit: *mut u32);
                fn nvmlDeviceGetFanControlPolicy_v2(
                    device: nvmlDevice_t,
                    fan: u32,
                    policy: *mut nvmlFanControlPolicy_t,
                );
                fn nvmlDeviceGetFanSpeed(device: nvmlDevice_t, speed: *mut u32);
                fn nvmlDeviceGetFanSpeed_v2(device: nvmlDevice_t, fan: u32, speed: *mut u32);
                fn nvmlDeviceGetFieldValues(
                    device: nvmlDevice_t,
                    values_count: i32,
                    values: *mut nvmlFieldValue_t,
                );
                fn nvmlDeviceGetGpcClkMinMaxVfOffset(
                    device: nvmlDevice_t,
                    min_offset: *mut i32,
                    max_offset: *mut i32,
                );
                fn nvmlDeviceGetGpcClkVfOffset(device: nvmlDevice_t, offset: *mut i32);
                fn nvmlDeviceGetGpuMaxPcieLinkGeneration(device: nvmlDevice_t, max_link_gen_device: *mut u32);
                fn nvmlDeviceGetGpuOperationMode(
                    device: nvmlDevice_t,
                    current: *mut nvmlGpuOperationMode_t,
                    pending: *mut nvmlGpuOperationMode_t,
                );
                fn nvmlDeviceGetJpgUtilization(
                    device: nvmlDevice_t,
                    utilization: *mut u32,
                    sampling_period_us: *mut u32,
                );
                fn nvmlDeviceGetLastBBXFlushTime(
                    device: nvmlDevice_t,
                    timestamp: *mut u64,
                    duration_us: *mut c_ulong,
                );
                fn nvmlDeviceGetMaxClockInfo(device: nvmlDevice_t, kind: nvmlClockType_t, clock: *mut u32);
                fn nvmlDeviceGetMaxCustomerBoostClock(
                    device: nvmlDevice_t,
                    clock_type: nvmlClockType_t,
                    clock_mhz: *mut u32,
                );
                fn nvmlDeviceGetMaxPcieLinkGeneration(device: nvmlDevice_t, max_link_gen: *mut u32);
                fn nvmlDeviceGetMaxPcieLinkWidth(device: nvmlDevice_t, max_link_width: *mut u32);
                fn nvmlDeviceGetMemClkMinMaxVfOffset(
                    device: nvmlDevice_t,
                    min_offset: *mut i32,
                    max_offset: *mut i32,
                );
                fn nvmlDeviceGetMemClkVfOffset(device: nvmlDevice_t, offset: *mut i32);
                fn nvmlDeviceGetMemoryInfo(device: nvmlDevice_t, memory: *mut nvmlMemory_t);
                fn nvmlDeviceGetMemoryInfo_v2(device: nvmlDevice_t, memory: *mut nvmlMemory_v2_t);
                fn nvmlDeviceGetMinMaxClockOfPState(
                    device: nvmlDevice_t,
                    kind: nvmlClockType_t,
                    pstate: nvmlPstates_t,
                    min_clock_mhz: *mut u32,
                    max_clock_mhz: *mut u32,
                );
                fn nvmlDeviceGetMinMaxFanSpeed(
                    device: nvmlDevice_t,
                    min_speed: *mut u32,
                    max_speed: *mut u32,
                );
                fn nvmlDeviceGetNumFans(device: nvmlDevice_t, num_fans: *mut u32);
                fn nvmlDeviceGetOfaUtilization(
                    device: nvmlDevice_t,
                    utilization: *mut u32,
                    sampling_period_us: *mut u32,
                );
                fn nvmlDeviceGetPcieLinkMaxSpeed(device: nvmlDevice_t, max_speed: *mut u32);
                fn nvmlDeviceGetPcieReplayCounter(device: nvmlDevice_t, value: *mut u32);
                fn nvmlDeviceGetPcieSpeed(device: nvmlDevice_t, pcie_speed: *mut u32);
                fn nvmlDeviceGetPcieThroughput(
                    device: nvmlDevice_t,
                    counter: nvmlPcieUtilCounter_t,
                    value: *mut u32,
                );
                fn nvmlDeviceGetPerformanceState(device: nvmlDevice_t, state: *mut nvmlPstates_t);
                fn nvmlDeviceGetPersistenceMode(device: nvmlDevice_t, mode: *mut nvmlEnableState_t);
                fn nvmlDeviceGetPowerManagementDefaultLimit(device: nvmlDevice_t, default_limit: *mut u32);
                fn nvmlDeviceGetPowerManagementLimit(device: nvmlDevice_t, limit: *mut u32);
                fn nvmlDeviceGetPowerManagementLimitConstraints(
                    device: nvmlDevice_t,
                    min_limit: *mut u32,
                    max_limit: *mut u32,
                );
                fn nvmlDeviceGetPowerManagementMode(device: nvmlDevice_t, mode: *mut nvmlEnableState_t);
                fn nvmlDeviceGetPowerSource(device: nvmlDevice_t, power_source: *mut nvmlPowerSource_t);
                fn nvmlDeviceGetPowerState(device: nvmlDevice_t, state: *mut nvmlPstates_t);
                fn nvmlDeviceGetPowerUsage(device: nvmlDevice_t, power: *mut u32);
                fn nvmlDeviceGetSamples(
                    device: nvmlDevice_t,
                    kind: nvmlSamplingType_t,
                    last_seen_time_stamp: u64,
                    sample_val_type: *mut nvmlValueType_t,
                    sample_count: *mut u32,
                    samples: *mut nvmlSample_t,
                );
                fn nvmlDeviceGetSupportedClocksEventReasons(
                    device: nvmlDevice_t,
                    supported_clocks_event_reasons: *mut u64,
                );
                fn nvmlDeviceGetSupportedClocksThrottleReasons(
                    device: nvmlDevice_t,
                    supported_clocks_throttle_reasons: *mut u64,
                );
                fn nvmlDeviceGetSupportedGraphicsClocks(
                    device: nvmlDevice_t,
                    memory_clock_mhz: u32,
                    count: *mut u32,
                    clocks_mhz: *mut u32,
                );
                fn nvmlDeviceGetSupportedMemoryClocks(
                    device: nvmlDevice_t,
                    count: *mut u32,
                    clocks_mhz: *mut u32,
                );
                fn nvmlDeviceGetSupportedPerformanceStates(
                    device: nvmlDevice_t,
                    pstates: *mut nvmlPstates_t,
                    size: u32,
                );
                fn nvmlDeviceGetTargetFanSpeed(device: nvmlDevice_t, fan: u32, target_speed: *mut u32);
                fn nvmlDeviceGetTemperature(
                    device: nvmlDevice_t,
                    sensor_type: nvmlTemperatureSensors_t,
                    temperature: *mut u32,
                );
                fn nvmlDeviceGetTemperatureThreshold(
                    device: nvmlDevice_t,
                    threshold_type: nvmlTemperatureThresholds_t,
                    temperature: *mut u32,
                );
                fn nvmlDeviceGetThermalSettings(
                    device: nvmlDevice_t,
                    sensor_index: u32,
                    thermal_settings: *mut nvmlGpuThermalSettings_t,
                );
                fn nvmlDeviceGetTotalEnergyConsumption(device: nvmlDevice_t, energy: *mut u64);
                fn nvmlDeviceGetUtilizationRates(device: nvmlDevice_t, utilization: *mut nvmlUtilization_t);
                fn nvmlDeviceGetViolationStatus(
                    device: nvmlDevice_t,
                    perf_policy_type: nvmlPerfPolicyType_t,
                    viol_time: *mut nvmlViolationTime_t,
                );
            }
            /// Memory errors, retired pages, remapped rows.
            trait NvmlEcc {
                fn nvmlDeviceGetDefaultEccMode(device: nvmlDevice_t, default_mode: *mut nvmlEnableState_t);
                fn nvmlDeviceGetDetailedEccErrors(
                    device: nvmlDevice_t,
                    error_type: nvmlMemoryErrorType_t,
                    counter_type: nvmlEccCounterType_t,
                    ecc_counts: *mut nvmlEccErrorCounts_t,
                );
                fn nvmlDeviceGetEccMode(
                    device: nvmlDevice_t,
                    current: *mut nvmlEnableState_t,
                    pending: *mut nvmlEnableState_t,
                );
                fn nvmlDeviceGetMemoryErrorCounter(
                    device: nvmlDevice_t,
                    error_type: nvmlMemoryErrorType_t,
                    counter_type: nvmlEccCounterType_t,
                    location_type: nvmlMemoryLocation_t,
                    count: *mut u64,
                );
                fn nvmlDeviceGetRemappedRows(
                    device: nvmlDevice_t,
                    corr_rows: *mut u32,
                    unc_rows: *mut u32,
                    is_pending: *mut u32,
                    failure_occurred: *mut u32,
                );
                fn nvmlDeviceGetRetiredPages(
                    device: nvmlDevice_t,
                    cause: nvmlPageRetirementCause_t,
                    page_count: *mut u32,
                    addresses: *mut u64,
                );
                fn nvmlDeviceGetRetiredPagesPendingStatus(
                    device: nvmlDevice_t,
                    is_pending: *mut nvmlEnableState_t,
                );
                fn nvmlDeviceGetRetiredPages_v2(
                    device: nvmlDevice_t,
                    cause: nvmlPageRetirementCause_t,
                    page_count: *mut u32,
                    addresses: *mut u64,
                    timestamps: *mut u64,
                );
                fn nvmlDeviceGetRowRemapperHistogram(
                    device: nvmlDevice_t,
                    values: *mut nvmlRowRemapperHistogramValues_t,
                );
                fn nvmlDeviceGetSramEccErrorStatus(
                    device: nvmlDevice_t,
                    status: *mut nvmlEccSramErrorStatus_t,
                );
                fn nvmlDeviceGetTotalEccErrors(
                    device: nvmlDevice_t,
                    error_type: nvmlMemoryErrorType_t,
                    counter_type: nvmlEccCounterType_t,
                    ecc_counts: *mut u64,
                );
            }
            /// Processes on a device, their utilization, and accounting.
            trait NvmlProcesses {
                fn nvmlDeviceGetAccountingBufferSize(device: nvmlDevice_t, length: *mut u32);
                fn nvmlDeviceGetAccountingMode(device: nvmlDevice_t, mode: *mut nvmlEnableState_t);
                fn nvmlDeviceGetAccountingPids(device: nvmlDevice_t, count: *mut u32, pids: *mut u32);
                fn nvmlDeviceGetAccountingStats(
                    device: nvmlDevice_t,
                    pid: u32,
                    stats: *mut nvmlAccountingStats_t,
                );
                fn nvmlDeviceGetComputeRunningProcesses(
                    device: nvmlDevice_t,
                    count: *mut u32,
                    infos: *mut nvmlProcessInfo_v1_t,
                );
                fn nvmlDeviceGetComputeRunningProcesses_v2(
                    device: nvmlDevice_t,
                    count: *mut u32,
                    infos: *mut nvmlProcessInfo_v2_t,
                );
                fn nvmlDeviceGetComputeRunningProcesses_v3(
                    device: nvmlDevice_t,
                    count: *mut u32,
                    infos: *mut nvmlProcessInfo_t,
                );
                fn nvmlDeviceGetGraphicsRunningProcesses(
                    device: nvmlDevice_t,
                    count: *mut u32,
                    infos: *mut nvmlProcessInfo_v1_t,
                );
                fn nvmlDeviceGetGraphicsRunningProcesses_v2(
                    device: nvmlDevice_t,
                    count: *mut u32,
                    infos: *mut nvmlProcessInfo_v2_t,
                );
                fn nvmlDeviceGetGraphicsRunningProcesses_v3(
                    device: nvmlDevice_t,
                    count: *mut u32,
                    infos: *mut nvmlProcessInfo_t,
                );
                fn nvmlDeviceGetMPSComputeRunningProcesses(
                    device: nvmlDevice_t,
                    count: *mut u32,
                    infos: *mut nvmlProcessInfo_v1_t,
                );
                fn nvmlDeviceGetMPSComputeRunningProcesses_v2(
                    device: nvmlDevice_t,
                    count: *mut u32,
                    infos: *mut nvmlProcessInfo_v2_t,
                );
                fn nvmlDeviceGetMPSComputeRunningProcesses_v3(
                    device: nvmlDevice_t,
                    count: *mut u32,
                    infos: *mut nvmlProcessInfo_t,
                );
                fn nvmlDeviceGetProcessUtilization(
                    device: nvmlDevice_t,
                    utilization: *mut nvmlProcessUtilizationSample_t,
                    process_samples_count: *mut u32,
                    last_seen_time_stamp: u64,
                );
                fn nvmlDeviceGetProcessesUtilizationInfo(
                    device: nvmlDevice_t,
                    utilization: *mut nvmlProcessesUtilizationInfo_t,
                );
                fn nvmlDeviceGetRunningProcessDetailList(
                    device: nvmlDevice_t,
                    list: *mut nvmlProcessDetailList_t,
                );
            }
            /// NVLink state and counters.
            trait NvmlLinks {
                fn nvmlDeviceFreezeNvLinkUtilizationCounter(
                    device: nvmlDevice_t,
                    link: u32,
                    counter: u32,
                    freeze: nvmlEnableState_t,
                );
                fn nvmlDeviceGetNvLinkCapability(
                    device: nvmlDevice_t,
                    link: u32,
                    capability: nvmlNvLinkCapability_t,
                    cap_result: *mut u32,
                );
                fn nvmlDeviceGetNvLinkErrorCounter(
                    device: nvmlDevice_t,
                    link: u32,
                    counter: nvmlNvLinkErrorCounter_t,
                    counter_value: *mut u64,
                );
                fn nvmlDeviceGetNvLinkRemoteDeviceType(
                    device: nvmlDevice_t,
                    link: u32,
                    nv_link_device_type: *mut nvmlIntNvLinkDeviceType_t,
                );
                fn nvmlDeviceGetNvLinkRemotePciInfo(
                    device: nvmlDevice_t,
                    link: u32,
                    pci: *mut nvmlPciInfo_v2_t,
                );
                fn nvmlDeviceGetNvLinkRemotePciInfo_v2(
                    device: nvmlDevice_t,
                    link: u32,
                    pci: *mut nvmlPciInfo_t,
                );
                fn nvmlDeviceGetNvLinkState(
                    device: nvmlDevice_t,
                    link: u32,
                    is_active: *mut nvmlEnableState_t,
                );
                fn nvmlDeviceGetNvLinkUtilizationControl(
                    device: nvmlDevice_t,
                    link: u32,
                    counter: u32,
                    control: *mut nvmlNvLinkUtilizationControl_t,
                );
                fn nvmlDeviceGetNvLinkUtilizationCounter(
                    device: nvmlDevice_t,
                    link: u32,
                    counter: u32,
                    rxcounter: *mut u64,
                    txcounter: *mut u64,
                );
                fn nvmlDeviceGetNvLinkVersion(device: nvmlDevice_t, link: u32, version: *mut u32);
                fn nvmlDeviceResetNvLinkErrorCounters(device: nvmlDevice_t, link: u32);
                fn nvmlDeviceResetNvLinkUtilizationCounter(device: nvmlDevice_t, link: u32, counter: u32);
                fn nvmlDeviceSetNvLinkDeviceLowPowerThreshold(
                    device: nvmlDevice_t,
                    info: *mut nvmlNvLinkPowerThres_t,
                );
                fn nvmlDeviceSetNvLinkUtilizationControl(
                    device: nvmlDevice_t,
                    link: u32,
                    counter: u32,
                    control: *mut nvmlNvLinkUtilizationControl_t,
                    reset: u32,
                );
                fn nvmlSystemGetNvlinkBwMode(nvlink_bw_mode: *mut u32);
                fn nvmlSystemSetNvlinkBwMode(nvlink_bw_mode: u32);
            }
            /// Event sets and event delivery.
            trait NvmlEvents {
                fn nvmlDeviceGetSupportedEventTypes(device: nvmlDevice_t, event_types: *mut u64);
                fn nvmlDeviceRegisterEvents(device: nvmlDevice_t, event_types: u64, set: nvmlEventSet_t);
                fn nvmlEventSetCreate(set: *mut nvmlEventSet_t);
                fn nvmlEventSetFree(set: nvmlEventSet_t);
                fn nvmlEventSetWait(set: nvmlEventSet_t, data: *mut nvmlEventData_v1_t, timeout_ms: u32);
                fn nvmlEventSetWait_v2(set: nvmlEventSet_t, data: *mut nvmlEventData_t, timeout_ms: u32);
            }
            /// Functions that change the settings of a device.
            trait NvmlControls {
                fn nvmlDeviceClearAccountingPids(device: nvmlDevice_t);
                fn nvmlDeviceClearCpuAffinity(device: nvmlDevice_t);
                fn nvmlDeviceClearEccErrorCounts(device: nvmlDevice_t, counter_type: nvmlEccCounterType_t);
                fn nvmlDeviceClearFieldValues(
                    device: nvmlDevice_t,
                    values_count: i32,
                    values: *mut nvmlFieldValue_t,
                );
                fn nvmlDeviceResetApplicationsClocks(device: nvmlDevice_t);
                fn nvmlDeviceResetGpuLockedClocks(device: nvmlDevice_t);
                fn nvmlDeviceResetMemoryLockedClocks(device: nvmlDevice_t);
                fn nvmlDeviceSetAPIRestriction(
                    device: nvmlDevice_t,
                    api_type: nvmlRestrictedAPI_t,
                    is_restricted: nvmlEnableState_t,
                );
                fn nvmlDeviceSetAccountingMode(device: nvmlDevice_t, mode: nvmlEnableState_t);
                fn nvmlDeviceSetApplicationsClocks(
                    device: nvmlDevice_t,
                    mem_clock_mhz: u32,
                    graphics_clock_mhz: u32,
                );
                fn nvmlDeviceSetAutoBoostedClocksEnabled(device: nvmlDevice_t, enabled: nvmlEnableState_t);
                fn nvmlDeviceSetComputeMode(device: nvmlDevice_t, mode: nvmlComputeMode_t);
                fn nvmlDeviceSetCpuAffinity(device: nvmlDevice_t);
                fn nvmlDeviceSetDefaultAutoBoostedClocksEnabled(
                    device: nvmlDevice_t,
                    enabled: nvmlEnableState_t,
                    flags: u32,
                );
                fn nvmlDeviceSetDefaultFanSpeed_v2(device: nvmlDevice_t, fan: u32);
                fn nvmlDeviceSetDriverModel(
                    device: nvmlDevice_t,
                    driver_model: nvmlDriverModel_t,
                    flags: u32,
                );
                fn nvmlDeviceSetEccMode(device: nvmlDevice_t, ecc: nvmlEnableState_t);
                fn nvmlDeviceSetFanControlPolicy(
                    device: nvmlDevice_t,
                    fan: u32,
                    policy: nvmlFanControlPolicy_t,
                );
                fn nvmlDeviceSetFanSpeed_v2(device: nvmlDevice_t, fan: u32, speed: u32);
                fn nvmlDeviceSetGpcClkVfOffset(device: nvmlDevice_t, offset: i32);
                fn nvmlDeviceSetGpuLockedClocks(
                    device: nvmlDevice_t,
                    min_gpu_clock_mhz: u32,
                    max_gpu_clock_mhz: u32,
                );
                fn nvmlDeviceSetGpuOperationMode(device: nvmlDevice_t, mode: nvmlGpuOperationMode_t);
                fn nvmlDeviceSetMemClkVfOffset(device: nvmlDevice_t, offset: i32);
                fn nvmlDeviceSetMemoryLockedClocks(
                    device: nvmlDevice_t,
                    min_mem_clock_mhz: u32,
                    max_mem_clock_mhz: u32,
                );
                fn nvmlDeviceSetPersistenceMode(device: nvmlDevice_t, mode: nvmlEnableState_t);
                fn nvmlDeviceSetPowerManagementLimit(device: nvmlDevice_t, limit: u32);
                fn nvmlDeviceSetPowerManagementLimit_v2(
                    device: nvmlDevice_t,
                    power_value: *mut nvmlPowerValue_v2_t,
                );
                fn nvmlDeviceSetTemperatureThreshold(
                    device: nvmlDevice_t,
                    threshold_type: nvmlTemperatureThresholds_t,
                    temperature: *mut i32,
                );
            }
            /// Multi-instance GPUs (MIG) and GPU performance metrics.
            trait NvmlMig {
                fn nvmlComputeInstanceDestroy(compute_instance: nvmlComputeInstance_t);
                fn nvmlComputeInstanceGetInfo(
                    compute_instance: nvmlComputeInstance_t,
                    info: *mut nvmlComputeInstanceInfo_t,
                );
                fn nvmlComputeInstanceGetInfo_v2(
                    compute_instance: nvmlComputeInstance_t,
                    info: *mut nvmlComputeInstanceInfo_t,
                );
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
                fn nvmlDeviceGetComputeInstanceId(device: nvmlDevice_t, id: *mut u32);
                fn nvmlDeviceGetDeviceHandleFromMigDeviceHandle(
                    mig_device: nvmlDevice_t,
                    device: *mut nvmlDevice_t,
                );
                fn nvmlDeviceGetGpuInstanceById(
                    device: nvmlDevice_t,
                    id: u32,
                    gpu_instance: *mut nvmlGpuInstance_t,
                );
                fn nvmlDeviceGetGpuInstanceId(device: nvmlDevice_t, id: *mut u32);
                fn nvmlDeviceGetGpuInstancePossiblePlacements(
                    device: nvmlDevice_t,
                    profile_id: u32,
                    placements: *mut nvmlGpuInstancePlacement_t,
                    count: *mut u32,
                );
                fn nvmlDeviceGetGpuInstancePossiblePlacements_v2(
                    device: nvmlDevice_t,
                    profile_id: u32,
                    placements: *mut nvmlGpuInstancePlacement_t,
                    count: *mut u32,
                );
                fn nvmlDeviceGetGpuInstanceProfileInfo(
                    device: nvmlDevice_t,
                    profile: u32,
                    info: *mut nvmlGpuInstanceProfileInfo_t,
                );
                fn nvmlDeviceGetGpuInstanceProfileInfoV(
                    device: nvmlDevice_t,
                    profile: u32,
                    info: *mut nvmlGpuInstanceProfileInfo_v2_t,
                );
                fn nvmlDeviceGetGpuInstanceRemainingCapacity(
                    device: nvmlDevice_t,
                    profile_id: u32,
                    count: *mut u32,
                );
                fn nvmlDeviceGetGpuInstances(
                    device: nvmlDevice_t,
                    profile_id: u32,
                    gpu_instances: *mut nvmlGpuInstance_t,
                    count: *mut u32,
                );
                fn nvmlDeviceGetMaxMigDeviceCount(device: nvmlDevice_t, count: *mut u32);
                fn nvmlDeviceGetMigDeviceHandleByIndex(
                    device: nvmlDevice_t,
                    index: u32,
                    mig_device: *mut nvmlDevice_t,
                );
                fn nvmlDeviceGetMigMode(device: nvmlDevice_t, current_mode: *mut u32, pending_mode: *mut u32);
                fn nvmlDeviceIsMigDeviceHandle(device: nvmlDevice_t, is_mig_device: *mut u32);
                fn nvmlDeviceSetMigMode(
                    device: nvmlDevice_t,
                    mode: u32,
                    activation_status: *mut nvmlReturn_t,
                );
                fn nvmlGpmMetricsGet(metrics_get: *mut nvmlGpmMetricsGet_t);
                fn nvmlGpmMigSampleGet(
                    device: nvmlDevice_t,
                    gpu_instance_id: u32,
                    gpm_sample: nvmlGpmSample_t,
                );
                fn nvmlGpmQueryDeviceSupport(device: nvmlDevice_t, gpm_support: *mut nvmlGpmSupport_t);
                fn nvmlGpmQueryIfStreamingEnabled(device: nvmlDevice_t, state: *mut u32);
                fn nvmlGpmSampleAlloc(gpm_sample: *mut nvmlGpmSample_t);
                fn nvmlGpmSampleFree(gpm_sample: nvmlGpmSample_t);
                fn nvmlGpmSampleGet(device: nvmlDevice_t, gpm_sample: nvmlGpmSample_t);
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
                fn nvmlGpuInstanceGetComputeInstanceById(
                    gpu_instance: nvmlGpuInstance_t,
                    id: u32,
                    compute_instance: *mut nvmlComputeInstance_t,
                );
                fn nvmlGpuInstanceGetComputeInstancePossiblePlacements(
                    gpu_instance: nvmlGpuInstance_t,
                    profile_id: u32,
                    placements: *mut nvmlComputeInstancePlacement_t,
                    count: *mut u32,
                );
                fn nvmlGpuInstanceGetComputeInstanceProfileInfo(
                    gpu_instance: nvmlGpuInstance_t,
                    profile: u32,
                    eng_profile: u32,
                    info: *mut nvmlComputeInstanceProfileInfo_t,
                );
                fn nvmlGpuInstanceGetComputeInstanceProfileInfoV(
                    gpu_instance: nvmlGpuInstance_t,
                    profile: u32,
                    eng_profile: u32,
                    info: *mut nvmlComputeInstanceProfileInfo_v2_t,
                );
                fn nvmlGpuInstanceGetComputeInstanceRemainingCapacity(
                    gpu_instance: nvmlGpuInstance_t,
                    profile_id: u32,
                    count: *mut u32,
                );
                fn nvmlGpuInstanceGetComputeInstances(
                    gpu_instance: nvmlGpuInstance_t,
                    profile_id: u32,
                    compute_instances: *mut nvmlComputeInstance_t,
                    count: *mut u32,
                );
                fn nvmlGpuInstanceGetInfo(gpu_instance: nvmlGpuInstance_t, info: *mut nvmlGpuInstanceInfo_t);
            }
            /// Virtual GPUs and GRID licenses.
            trait NvmlVgpu {
                fn nvmlDeviceGetActiveVgpus(
                    device: nvmlDevice_t,
                    vgpu_count: *mut u32,
                    vgpu_instances: *mut nvmlVgpuInstance_t,
                );
                fn nvmlDeviceGetCreatableVgpus(
                    device: nvmlDevice_t,
                    vgpu_count: *mut u32,
                    vgpu_type_ids: *mut nvmlVgpuTypeId_t,
                );
                fn nvmlDeviceGetGridLicensableFeatures(
                    device: nvmlDevice_t,
                    grid_licensable_features: *mut nvmlGridLicensableFeatures_t,
                );
                fn nvmlDeviceGetGridLicensableFeatures_v2(
                    device: nvmlDevice_t,
                    grid_licensable_features: *mut nvmlGridLicensableFeatures_t,
                );
                fn nvmlDeviceGetGridLicensableFeatures_v3(
                    device: nvmlDevice_t,
                    grid_licensable_features: *mut nvmlGridLicensableFeatures_t,
                );
                fn nvmlDeviceGetGridLicensableFeatures_v4(
                    device: nvmlDevice_t,
                    grid_licensable_features: *mut nvmlGridLicensableFeatures_t,
                );
                fn nvmlDeviceGetHostVgpuMode(device: nvmlDevice_t, host_vgpu_mode: *mut nvmlHostVgpuMode_t);
                fn nvmlDeviceGetPgpuMetadataString(
                    device: nvmlDevice_t,
                    pgpu_metadata: *mut c_char,
                    length: *mut u32,
                );
                fn nvmlDeviceGetSupportedVgpus(
                    device: nvmlDevice_t,
                    vgpu_count: *mut u32,
                    vgpu_type_ids: *mut nvmlVgpuTypeId_t,
                );
                fn nvmlDeviceGetVgpuCapabilities(
                    device: nvmlDevice_t,
                    capability: nvmlDeviceVgpuCapability_t,
                    cap_result: *mut u32,
                );
                fn nvmlDeviceGetVgpuHeterogeneousMode(
                    device: nvmlDevice_t,
                    heterogeneous_mode: *mut nvmlVgpuHeterogeneousMode_t,
                );
                fn nvmlDeviceGetVgpuInstancesUtilizationInfo(
                    device: nvmlDevice_t,
                    vgpu_util_info: *mut nvmlVgpuInstancesUtilizationInfo_t,
                );
                fn nvmlDeviceGetVgpuMetadata(
                    device: nvmlDevice_t,
                    pgpu_metadata: *mut nvmlVgpuPgpuMetadata_t,
                    length: *mut u32,
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
                fn nvmlDeviceGetVgpuSchedulerCapabilities(
                    device: nvmlDevice_t,
                    capabilities: *mut nvmlVgpuSchedulerCapabilities_t,
                );
                fn nvmlDeviceGetVgpuSchedulerLog(
                    device: nvmlDevice_t,
                    scheduler_log: *mut nvmlVgpuSchedulerLog_t,
                );
                fn nvmlDeviceGetVgpuSchedulerState(
                    device: nvmlDevice_t,
                    scheduler_state: *mut nvmlVgpuSchedulerGetState_t,
                );
                fn nvmlDeviceGetVgpuTypeCreatablePlacements(
                    device: nvmlDevice_t,
                    vgpu_type_id: nvmlVgpuTypeId_t,
                    placement_list: *mut nvmlVgpuPlacementList_t,
                );
                fn nvmlDeviceGetVgpuTypeSupportedPlacements(
                    device: nvmlDevice_t,
                    vgpu_type_id: nvmlVgpuTypeId_t,
                    placement_list: *mut nvmlVgpuPlacementList_t,
                );
                fn nvmlDeviceGetVgpuUtilization(
                    device: nvmlDevice_t,
                    last_seen_time_stamp: u64,
                    sample_val_type: *mut nvmlValueType_t,
                    vgpu_instance_samples_count: *mut u32,
                    utilization_samples: *mut nvmlVgpuInstanceUtilizationSample_t,
                );
                fn nvmlDeviceGetVirtualizationMode(
                    device: nvmlDevice_t,
                    virtual_mode: *mut nvmlGpuVirtualizationMode_t,
                );
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
                fn nvmlDeviceSetVirtualizationMode(
                    device: nvmlDevice_t,
                    virtual_mode: nvmlGpuVirtualizationMode_t,
                );
                fn nvmlGetVgpuCompatibility(
                    vgpu_metadata: *mut nvmlVgpuMetadata_t,
                    pgpu_metadata: *mut nvmlVgpuPgpuMetadata_t,
                    compatibility_info: *mut nvmlVgpuPgpuCompatibility_t,
                );
                fn nvmlGetVgpuDriverCapabilities(
                    capability: nvmlVgpuDriverCapability_t,
                    cap_result: *mut u32,
                );
                fn nvmlGetVgpuVersion(supported: *mut nvmlVgpuVersion_t, current: *mut nvmlVgpuVersion_t);
                fn nvmlSetVgpuVersion(vgpu_version: *mut nvmlVgpuVersion_t);
                fn nvmlVgpuInstanceClearAccountingPids(vgpu_instance: nvmlVgpuInstance_t);
                fn nvmlVgpuInstanceGetAccountingMode(
                    vgpu_instance: nvmlVgpuInstance_t,
                    mode: *mut nvmlEnableState_t,
                );
                fn nvmlVgpuInstanceGetAccountingPids(
                    vgpu_instance: nvmlVgpuInstance_t,
                    count: *mut u32,
                    pids: *mut u32,
                );
                fn nvmlVgpuInstanceGetAccountingStats(
                    vgpu_instance: nvmlVgpuInstance_t,
                    pid: u32,
                    stats: *mut nvmlAccountingStats_t,
                );
                fn nvmlVgpuInstanceGetEccMode(
                    vgpu_instance: nvmlVgpuInstance_t,
                    ecc_mode: *mut nvmlEnableState_t,
                );
                fn nvmlVgpuInstanceGetEncoderCapacity(
                    vgpu_instance: nvmlVgpuInstance_t,
                    encoder_capacity: *mut u32,
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
                fn nvmlVgpuInstanceGetFBCStats(
                    vgpu_instance: nvmlVgpuInstance_t,
                    fbc_stats: *mut nvmlFBCStats_t,
                );
                fn nvmlVgpuInstanceGetFbUsage(vgpu_instance: nvmlVgpuInstance_t, fb_usage: *mut u64);
                fn nvmlVgpuInstanceGetFrameRateLimit(
                    vgpu_instance: nvmlVgpuInstance_t,
                    frame_rate_limit: *mut u32,
                );
                fn nvmlVgpuInstanceGetGpuInstanceId(
                    vgpu_instance: nvmlVgpuInstance_t,
                    gpu_instance_id: *mut u32,
                );
                fn nvmlVgpuInstanceGetGpuPciId(
                    vgpu_instance: nvmlVgpuInstance_t,
                    vgpu_pci_id: *mut c_char,
                    length: *mut u32,
                );
                fn nvmlVgpuInstanceGetLicenseInfo(
                    vgpu_instance: nvmlVgpuInstance_t,
                    license_info: *mut nvmlVgpuLicenseInfo_t,
                );
                fn nvmlVgpuInstanceGetLicenseInfo_v2(
                    vgpu_instance: nvmlVgpuInstance_t,
                    license_info: *mut nvmlVgpuLicenseInfo_t,
                );
                fn nvmlVgpuInstanceGetLicenseStatus(vgpu_instance: nvmlVgpuInstance_t, licensed: *mut u32);
                fn nvmlVgpuInstanceGetMdevUUID(
                    vgpu_instance: nvmlVgpuInstance_t,
                    mdev_uuid: *mut c_char,
                    size: u32,
                );
                fn nvmlVgpuInstanceGetMetadata(
                    vgpu_instance: nvmlVgpuInstance_t,
                    vgpu_metadata: *mut nvmlVgpuMetadata_t,
                    length: *mut u32,
                );
                fn nvmlVgpuInstanceGetPlacementId(
                    vgpu_instance: nvmlVgpuInstance_t,
                    placement: *mut nvmlVgpuPlacementId_t,
                );
                fn nvmlVgpuInstanceGetType(
                    vgpu_instance: nvmlVgpuInstance_t,
                    vgpu_type_id: *mut nvmlVgpuTypeId_t,
                );
                fn nvmlVgpuInstanceGetUUID(vgpu_instance: nvmlVgpuInstance_t, uuid: *mut c_char, size: u32);
                fn nvmlVgpuInstanceGetVmDriverVersion(
                    vgpu_instance: nvmlVgpuInstance_t,
                    version: *mut c_char,
                    length: u32,
                );
                fn nvmlVgpuInstanceGetVmID(
                    vgpu_instance: nvmlVgpuInstance_t,
                    vm_id: *mut c_char,
                    size: u32,
                    vm_id_type: *mut nvmlVgpuVmIdType_t,
                );
                fn nvmlVgpuInstanceSetEncoderCapacity(
                    vgpu_instance: nvmlVgpuInstance_t,
                    encoder_capacity: u32,
                );
                fn nvmlVgpuTypeGetCapabilities(
                    vgpu_type_id: nvmlVgpuTypeId_t,
                    capability: nvmlVgpuCapability_t,
                    cap_result: *mut u32,
                );
                fn nvmlVgpuTypeGetClass(
                    vgpu_type_id: nvmlVgpuTypeId_t,
                    vgpu_type_class: *mut c_char,
                    size: *mut u32,
                );
                fn nvmlVgpuTypeGetDeviceID(
                    vgpu_type_id: nvmlVgpuTypeId_t,
                    device_id: *mut u64,
                    subsystem_id: *mut u64,
                );
                fn nvmlVgpuTypeGetFbReservation(vgpu_type_id: nvmlVgpuTypeId_t, fb_reservation: *mut u64);
                fn nvmlVgpuTypeGetFrameRateLimit(vgpu_type_id: nvmlVgpuTypeId_t, frame_rate_limit: *mut u32);
                fn nvmlVgpuTypeGetFramebufferSize(vgpu_type_id: nvmlVgpuTypeId_t, fb_size: *mut u64);
                fn nvmlVgpuTypeGetGpuInstanceProfileId(
                    vgpu_type_id: nvmlVgpuTypeId_t,
                    gpu_instance_profile_id: *mut u32,
                );
                fn nvmlVgpuTypeGetGspHeapSize(vgpu_type_id: nvmlVgpuTypeId_t, gsp_heap_size: *mut u64);
                fn nvmlVgpuTypeGetLicense(
                    vgpu_type_id: nvmlVgpuTypeId_t,
                    vgpu_type_license_string: *mut c_char,
                    size: u32,
                );
                fn nvmlVgpuTypeGetMaxInstances(
                    device: nvmlDevice_t,
                    vgpu_type_id: nvmlVgpuTypeId_t,
                    vgpu_instance_count: *mut u32,
                );
                fn nvmlVgpuTypeGetMaxInstancesPerVm(
                    vgpu_type_id: nvmlVgpuTypeId_t,
                    vgpu_instance_count_per_vm: *mut u32,
                );
                fn nvmlVgpuTypeGetName(
                    vgpu_type_id: nvmlVgpuTypeId_t,
                    vgpu_type_name: *mut c_char,
                    size: *mut u32,
                );
                fn nvmlVgpuTypeGetNumDisplayHeads(
                    vgpu_type_id: nvmlVgpuTypeId_t,
                    num_display_heads: *mut u32,
                );
                fn nvmlVgpuTypeGetResolution(
                    vgpu_type_id: nvmlVgpuTypeId_t,
                    display_index: u32,
                    xdim: *mut u32,
                    ydim: *mut u32,
                );
            }
            /// Other functions: confidential computing, encoder sessions, fabric, drain.
            trait NvmlMisc {
                fn nvmlDeviceDiscoverGpus(pci_info: *mut nvmlPciInfo_t);
                fn nvmlDeviceGetC2cModeInfoV(device: nvmlDevice_t, c2c_mode_info: *mut nvmlC2cModeInfo_v1_t);
                fn nvmlDeviceGetConfComputeGpuAttestationReport(
                    device: nvmlDevice_t,
                    gpu_atst_report: *mut nvmlConfComputeGpuAttestationReport_t,
                );
                fn nvmlDeviceGetConfComputeGpuCertificate(
                    device: nvmlDevice_t,
                    gpu_cert: *mut nvmlConfComputeGpuCertificate_t,
                );
                fn nvmlDeviceGetConfComputeMemSizeInfo(
                    device: nvmlDevice_t,
                    mem_info: *mut nvmlConfComputeMemSizeInfo_t,
                );
                fn nvmlDeviceGetConfComputeProtectedMemoryUsage(
                    device: nvmlDevice_t,
                    memory: *mut nvmlMemory_t,
                );
                fn nvmlDeviceGetEncoderSessions(
                    device: nvmlDevice_t,
                    session_count: *mut u32,
                    session_infos: *mut nvmlEncoderSessionInfo_t,
                );
                fn nvmlDeviceGetEncoderStats(
                    device: nvmlDevice_t,
                    session_count: *mut u32,
                    average_fps: *mut u32,
                    average_latency: *mut u32,
                );
                fn nvmlDeviceGetFBCSessions(
                    device: nvmlDevice_t,
                    session_count: *mut u32,
                    session_info: *mut nvmlFBCSessionInfo_t,
                );
                fn nvmlDeviceGetFBCStats(device: nvmlDevice_t, fbc_stats: *mut nvmlFBCStats_t);
                fn nvmlDeviceGetGpuFabricInfo(
                    device: nvmlDevice_t,
                    gpu_fabric_info: *mut nvmlGpuFabricInfo_t,
                );
                fn nvmlDeviceGetGpuFabricInfoV(
                    device: nvmlDevice_t,
                    gpu_fabric_info: *mut nvmlGpuFabricInfoV_t,
                );
                fn nvmlDeviceModifyDrainState(pci_info: *mut nvmlPciInfo_t, new_state: nvmlEnableState_t);
                fn nvmlDeviceQueryDrainState(
                    pci_info: *mut nvmlPciInfo_t,
                    current_state: *mut nvmlEnableState_t,
                );
                fn nvmlDeviceRemoveGpu(pci_info: *mut nvmlPciInfo_v2_t);
                fn nvmlDeviceRemoveGpu_v2(
                    pci_info: *mut nvmlPciInfo_t,
                    gpu_state: nvmlDetachGpuState_t,
                    link_state: nvmlPcieLinkState_t,
                );
                fn nvmlDeviceSetConfComputeUnprotectedMemSize(device: nvmlDevice_t, size_kib: u64);
                fn nvmlGetBlacklistDeviceCount(count: *mut u32);
                fn nvmlGetBlacklistDeviceInfoByIndex(index: u32, info: *mut nvmlExcludedDeviceInfo_t);
                fn nvmlGetExcludedDeviceCount(count: *mut u32);
                fn nvmlGetExcludedDeviceInfoByIndex(index: u32, info: *mut nvmlExcludedDeviceInfo_t);
                fn nvmlSystemGetConfComputeCapabilities(capabilities: *mut nvmlConfComputeSystemCaps_t);
                fn nvmlSystemGetConfComputeGpusReadyState(is_accepting_work: *mut u32);
                fn nvmlSystemGetConfComputeKeyRotationThresholdInfo(
                    key_rotation_thr_info: *mut nvmlConfComputeGetKeyRotationThresholdInfo_t,
                );
                fn nvmlSystemGetConfComputeSettings(settings: *mut nvmlSystemConfComputeSettings_t);
                fn nvmlSystemGetConfComputeState(state: *mut nvmlConfComputeSystemState_t);
                fn nvmlSystemSetConfComputeGpusReadyState(is_accepting_work: u32);
                fn nvmlSystemSetConfComputeKeyRotationThresholdInfo(
                    key_rotation_thr_info: *mut nvmlConfComputeSetKeyRotationThresholdInfo_t,
                );
            }
        }
    };
}
