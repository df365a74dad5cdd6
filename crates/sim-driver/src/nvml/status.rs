//! Current state of a GPU: memory, utilization, clocks, power, temperature, performance.

use super::arguments::{NvmlResult, VisibleGpu, gpu, read_in, write_out, write_out_list};
use super::sensors::{ClockDomain, SensorReading};
use super::*;
use crate::profile::Architecture;
use crate::state::{GpuSetting, UNIT, now};

const MIB: u64 = 1 << 20;

fn read_sensors(device: nvmlDevice_t) -> Result<SensorReading, NvmlError> {
    gpu(device).map(SensorReading::read)
}

/// Converts NVML's clock type.
fn clock_of(kind: nvmlClockType_t) -> Result<ClockDomain, NvmlError> {
    match kind {
        // Multiprocessors run at the graphics clock.
        NVML_CLOCK_GRAPHICS | NVML_CLOCK_SM => Ok(ClockDomain::Graphics),
        NVML_CLOCK_MEM => Ok(ClockDomain::Memory),
        NVML_CLOCK_VIDEO => Ok(ClockDomain::Video),
        _ => Err(NvmlError::INVALID_ARGUMENT),
    }
}

/// Returns the default of a clock that applications can set.
fn default_clock(gpu: VisibleGpu, kind: nvmlClockType_t) -> Result<u32, NvmlError> {
    let clocks = &gpu.profile().clocks;
    match clock_of(kind)? {
        ClockDomain::Graphics => Ok(clocks.graphics_default),
        ClockDomain::Memory => Ok(clocks.memory_max),
        ClockDomain::Video => Err(NvmlError::NOT_SUPPORTED),
    }
}

fn application_clock(gpu: VisibleGpu, kind: nvmlClockType_t) -> Result<u32, NvmlError> {
    SensorReading::read(gpu).application_clock(clock_of(kind)?).ok_or(NvmlError::NOT_SUPPORTED)
}

fn boost_clock(gpu: VisibleGpu, kind: nvmlClockType_t) -> Result<u32, NvmlError> {
    match clock_of(kind)? {
        ClockDomain::Graphics => Ok(gpu.profile().clocks.graphics_max),
        ClockDomain::Memory | ClockDomain::Video => Err(NvmlError::NOT_SUPPORTED),
    }
}

/// Returns the supported memory clocks in MHz, highest first.
pub(super) fn memory_clocks(gpu: VisibleGpu) -> Vec<u32> {
    let clocks = &gpu.profile().clocks;
    let mut list = vec![clocks.memory_max, clocks.memory_idle];
    list.dedup();
    list
}

/// Returns the graphics clocks supported with a memory clock, in MHz, highest first.
pub(super) fn graphics_clocks(gpu: VisibleGpu, memory: u32) -> Vec<u32> {
    const CLOCK_STEP_MHZ: usize = 15;
    let clocks = &gpu.profile().clocks;
    let most = if memory == clocks.memory_max { clocks.graphics_max } else { 2 * clocks.graphics_idle };
    (clocks.graphics_idle..=most.min(clocks.graphics_max)).rev().step_by(CLOCK_STEP_MHZ).collect()
}

/// Memory usage in bytes; `reserved` is the driver's own.
pub(super) struct MemoryUse {
    pub(super) total: u64,
    pub(super) reserved: u64,
    pub(super) used: u64,
    pub(super) free: u64,
}

pub(super) fn memory(gpu: VisibleGpu) -> MemoryUse {
    let memory = &gpu.profile().memory;
    let state = &gpu.session.state;
    // Memory of dead processes counts as free.
    state.reclaim_dead();
    let used = (state.used_memory(gpu.index) * UNIT).min(memory.usable());
    MemoryUse { total: memory.total, reserved: memory.reserved, used, free: memory.usable() - used }
}

/// Writes the utilization of an engine that is never used, and the sampling period in microseconds.
fn unused_engine(device: nvmlDevice_t, since: Architecture, load: *mut u32, period: *mut u32) -> NvmlResult {
    let gpu = gpu(device)?;
    if gpu.profile().architecture < since {
        return Err(NvmlError::NOT_SUPPORTED);
    }
    if period.is_null() {
        return Err(NvmlError::INVALID_ARGUMENT);
    }
    write_out!(load => 0, period => (gpu.session.state.window() / 1000) as u32)
}

fn fan(device: nvmlDevice_t, fan: u32, speed: *mut u32) -> NvmlResult {
    if !gpu(device)?.profile().fan {
        return Err(NvmlError::NOT_SUPPORTED);
    }
    if fan > 0 {
        return Err(NvmlError::INVALID_ARGUMENT);
    }
    // Server cards are cooled by the fans of the server.
    write_out!(speed => 0)
}

/// Clocks event reasons that every card supports.
const SUPPORTED_CLOCK_REASONS: u64 = nvmlClocksEventReasonAll;

impl NvmlStatus for Library {
    unsafe fn nvmlDeviceGetMemoryInfo(device: nvmlDevice_t, memory: *mut nvmlMemory_t) -> NvmlResult {
        let now = self::memory(gpu(device)?);
        // This version does not report reserved memory: it counts as used.
        write_out!(memory => nvmlMemory_t { total: now.total, free: now.free, used: now.used + now.reserved })
    }

    unsafe fn nvmlDeviceGetMemoryInfo_v2(device: nvmlDevice_t, memory: *mut nvmlMemory_v2_t) -> NvmlResult {
        let gpu = gpu(device)?;
        let version = read_in!(memory.cast_const().cast::<u32>());
        if version != nvmlMemory_v2 {
            return Err(NvmlError::ARGUMENT_VERSION_MISMATCH);
        }
        let MemoryUse { total, reserved, used, free } = self::memory(gpu);
        write_out!(memory => nvmlMemory_v2_t { version, total, reserved, free, used })
    }

    unsafe fn nvmlDeviceGetBAR1MemoryInfo(
        device: nvmlDevice_t,
        bar1_memory: *mut nvmlBAR1Memory_t,
    ) -> NvmlResult {
        let gpu = gpu(device)?;
        let total = gpu.profile().memory.bar1;
        // One mapping of the driver and one per process.
        let used = (MIB + 2 * MIB * gpu.session.state.processes(gpu.index).len() as u64).min(total);
        write_out!(bar1_memory => nvmlBAR1Memory_t { bar1Total: total, bar1Free: total - used, bar1Used: used })
    }

    unsafe fn nvmlDeviceGetUtilizationRates(
        device: nvmlDevice_t,
        utilization: *mut nvmlUtilization_t,
    ) -> NvmlResult {
        let sensors = read_sensors(device)?;
        write_out!(utilization => nvmlUtilization_t { gpu: sensors.gpu_percent(), memory: sensors.memory_percent() })
    }

    unsafe fn nvmlDeviceGetEncoderUtilization(
        device: nvmlDevice_t,
        load: *mut u32,
        period: *mut u32,
    ) -> NvmlResult {
        unused_engine(device, Architecture::Volta, load, period)
    }

    unsafe fn nvmlDeviceGetDecoderUtilization(
        device: nvmlDevice_t,
        load: *mut u32,
        period: *mut u32,
    ) -> NvmlResult {
        unused_engine(device, Architecture::Volta, load, period)
    }

    unsafe fn nvmlDeviceGetJpgUtilization(
        device: nvmlDevice_t,
        load: *mut u32,
        period: *mut u32,
    ) -> NvmlResult {
        unused_engine(device, Architecture::Ampere, load, period)
    }

    unsafe fn nvmlDeviceGetOfaUtilization(
        device: nvmlDevice_t,
        load: *mut u32,
        period: *mut u32,
    ) -> NvmlResult {
        unused_engine(device, Architecture::Ampere, load, period)
    }

    unsafe fn nvmlDeviceGetEncoderCapacity(
        device: nvmlDevice_t,
        encoder_query_type: nvmlEncoderType_t,
        encoder_capacity: *mut u32,
    ) -> NvmlResult {
        let gpu = gpu(device)?;
        if encoder_query_type > NVML_ENCODER_QUERY_AV1 {
            return Err(NvmlError::INVALID_ARGUMENT);
        }
        if gpu.profile().encoders == 0 {
            return Err(NvmlError::NOT_SUPPORTED);
        }
        write_out!(encoder_capacity => 100)
    }

    unsafe fn nvmlDeviceGetSamples(
        device: nvmlDevice_t,
        kind: nvmlSamplingType_t,
        last_seen_time_stamp: u64,
        sample_val_type: *mut nvmlValueType_t,
        sample_count: *mut u32,
        samples: *mut nvmlSample_t,
    ) -> NvmlResult {
        let gpu = gpu(device)?;
        // SAFETY: NVML requires pointers that are null or valid for writes, and an array of `*sample_count` samples.
        unsafe {
            samples::write_samples(gpu, kind, last_seen_time_stamp, sample_val_type, sample_count, samples)
        }
    }

    unsafe fn nvmlDeviceGetFieldValues(
        device: nvmlDevice_t,
        values_count: i32,
        values: *mut nvmlFieldValue_t,
    ) -> NvmlResult {
        let gpu = gpu(device)?;
        // SAFETY: NVML requires an array of `values_count` records, or null.
        unsafe { field_values::fill(gpu, values_count, values) }
    }

    unsafe fn nvmlDeviceGetClockInfo(
        device: nvmlDevice_t,
        kind: nvmlClockType_t,
        clock: *mut u32,
    ) -> NvmlResult {
        write_out!(clock => read_sensors(device)?.clock(clock_of(kind)?))
    }

    unsafe fn nvmlDeviceGetMaxClockInfo(
        device: nvmlDevice_t,
        kind: nvmlClockType_t,
        clock: *mut u32,
    ) -> NvmlResult {
        write_out!(clock => read_sensors(device)?.max_clock(clock_of(kind)?))
    }

    unsafe fn nvmlDeviceGetClock(
        device: nvmlDevice_t,
        clock_type: nvmlClockType_t,
        clock_id: nvmlClockId_t,
        clock_mhz: *mut u32,
    ) -> NvmlResult {
        let gpu = gpu(device)?;
        let clock = match clock_id {
            NVML_CLOCK_ID_CURRENT => SensorReading::read(gpu).clock(clock_of(clock_type)?),
            NVML_CLOCK_ID_APP_CLOCK_TARGET => application_clock(gpu, clock_type)?,
            NVML_CLOCK_ID_APP_CLOCK_DEFAULT => default_clock(gpu, clock_type)?,
            NVML_CLOCK_ID_CUSTOMER_BOOST_MAX => boost_clock(gpu, clock_type)?,
            _ => return Err(NvmlError::INVALID_ARGUMENT),
        };
        write_out!(clock_mhz => clock)
    }

    unsafe fn nvmlDeviceGetApplicationsClock(
        device: nvmlDevice_t,
        clock_type: nvmlClockType_t,
        clock_mhz: *mut u32,
    ) -> NvmlResult {
        write_out!(clock_mhz => application_clock(gpu(device)?, clock_type)?)
    }

    unsafe fn nvmlDeviceGetDefaultApplicationsClock(
        device: nvmlDevice_t,
        clock_type: nvmlClockType_t,
        clock_mhz: *mut u32,
    ) -> NvmlResult {
        write_out!(clock_mhz => default_clock(gpu(device)?, clock_type)?)
    }

    unsafe fn nvmlDeviceGetMaxCustomerBoostClock(
        device: nvmlDevice_t,
        clock_type: nvmlClockType_t,
        clock_mhz: *mut u32,
    ) -> NvmlResult {
        write_out!(clock_mhz => boost_clock(gpu(device)?, clock_type)?)
    }

    unsafe fn nvmlDeviceGetSupportedMemoryClocks(
        device: nvmlDevice_t,
        count: *mut u32,
        clocks_mhz: *mut u32,
    ) -> NvmlResult {
        write_out_list!(count, clocks_mhz, memory_clocks(gpu(device)?))
    }

    unsafe fn nvmlDeviceGetSupportedGraphicsClocks(
        device: nvmlDevice_t,
        memory_clock_mhz: u32,
        count: *mut u32,
        clocks_mhz: *mut u32,
    ) -> NvmlResult {
        let gpu = gpu(device)?;
        if !memory_clocks(gpu).contains(&memory_clock_mhz) {
            return Err(NvmlError::NOT_FOUND);
        }
        write_out_list!(count, clocks_mhz, graphics_clocks(gpu, memory_clock_mhz))
    }

    unsafe fn nvmlDeviceGetMinMaxClockOfPState(
        device: nvmlDevice_t,
        kind: nvmlClockType_t,
        pstate: nvmlPstates_t,
        min_clock_mhz: *mut u32,
        max_clock_mhz: *mut u32,
    ) -> NvmlResult {
        let gpu = gpu(device)?;
        let clocks = &gpu.profile().clocks;
        let (idle, most) = match clock_of(kind)? {
            ClockDomain::Graphics => (clocks.graphics_idle, clocks.graphics_max),
            ClockDomain::Memory => (clocks.memory_idle, clocks.memory_max),
            ClockDomain::Video => (clocks.video_idle, clocks.video_max),
        };
        let (least, most) = match pstate {
            NVML_PSTATE_0 if kind == NVML_CLOCK_MEM => (most, most),
            NVML_PSTATE_0 => (idle, most),
            state if state == gpu.profile().idle_state => (idle, idle),
            NVML_PSTATE_1..=NVML_PSTATE_15 => return Err(NvmlError::NOT_SUPPORTED),
            _ => return Err(NvmlError::INVALID_ARGUMENT),
        };
        write_out!(min_clock_mhz => least, max_clock_mhz => most)
    }

    unsafe fn nvmlDeviceGetCurrentClocksEventReasons(device: nvmlDevice_t, reasons: *mut u64) -> NvmlResult {
        write_out!(reasons => read_sensors(device)?.reasons())
    }

    unsafe fn nvmlDeviceGetCurrentClocksThrottleReasons(
        device: nvmlDevice_t,
        reasons: *mut u64,
    ) -> NvmlResult {
        write_out!(reasons => read_sensors(device)?.reasons())
    }

    unsafe fn nvmlDeviceGetSupportedClocksEventReasons(
        device: nvmlDevice_t,
        reasons: *mut u64,
    ) -> NvmlResult {
        gpu(device)?;
        write_out!(reasons => SUPPORTED_CLOCK_REASONS)
    }

    unsafe fn nvmlDeviceGetSupportedClocksThrottleReasons(
        device: nvmlDevice_t,
        reasons: *mut u64,
    ) -> NvmlResult {
        gpu(device)?;
        write_out!(reasons => SUPPORTED_CLOCK_REASONS)
    }

    unsafe fn nvmlDeviceGetAdaptiveClockInfoStatus(
        device: nvmlDevice_t,
        adaptive_clock_status: *mut u32,
    ) -> NvmlResult {
        gpu(device)?;
        write_out!(adaptive_clock_status => NVML_ADAPTIVE_CLOCKING_INFO_STATUS_ENABLED)
    }

    unsafe fn nvmlDeviceGetAPIRestriction(
        device: nvmlDevice_t,
        api_type: nvmlRestrictedAPI_t,
        is_restricted: *mut nvmlEnableState_t,
    ) -> NvmlResult {
        gpu(device)?;
        match api_type {
            NVML_RESTRICTED_API_SET_APPLICATION_CLOCKS => write_out!(is_restricted => NVML_FEATURE_ENABLED),
            NVML_RESTRICTED_API_SET_AUTO_BOOSTED_CLOCKS => Err(NvmlError::NOT_SUPPORTED),
            _ => Err(NvmlError::INVALID_ARGUMENT),
        }
    }

    unsafe fn nvmlDeviceGetComputeMode(device: nvmlDevice_t, mode: *mut nvmlComputeMode_t) -> NvmlResult {
        write_out!(mode => gpu(device)?.setting(GpuSetting::ComputeMode).unwrap_or(0) as u32)
    }

    unsafe fn nvmlDeviceGetPersistenceMode(device: nvmlDevice_t, mode: *mut nvmlEnableState_t) -> NvmlResult {
        write_out!(mode => gpu(device)?.setting(GpuSetting::Persistence).unwrap_or(0) as u32)
    }

    unsafe fn nvmlDeviceGetDisplayActive(
        device: nvmlDevice_t,
        is_active: *mut nvmlEnableState_t,
    ) -> NvmlResult {
        gpu(device)?;
        write_out!(is_active => NVML_FEATURE_DISABLED)
    }

    unsafe fn nvmlDeviceGetDisplayMode(device: nvmlDevice_t, display: *mut nvmlEnableState_t) -> NvmlResult {
        gpu(device)?;
        // Reported even for cards without display outputs.
        write_out!(display => NVML_FEATURE_ENABLED)
    }

    unsafe fn nvmlDeviceGetDynamicPstatesInfo(
        device: nvmlDevice_t,
        dynamic_pstates_info: *mut nvmlGpuDynamicPstatesInfo_t,
    ) -> NvmlResult {
        let sensors = read_sensors(device)?;
        let domain = |percentage| nvmlGpuDynamicPstatesInfo_t_utilization {
            bIsPresent: 1,
            percentage,
            ..Default::default()
        };
        let mut info = nvmlGpuDynamicPstatesInfo_t { flags: 1, ..Default::default() };
        info.utilization[NVML_GPU_UTILIZATION_DOMAIN_GPU as usize] = domain(sensors.gpu_percent());
        info.utilization[NVML_GPU_UTILIZATION_DOMAIN_FB as usize] = domain(sensors.memory_percent());
        info.utilization[NVML_GPU_UTILIZATION_DOMAIN_VID as usize] = domain(0);
        info.utilization[NVML_GPU_UTILIZATION_DOMAIN_BUS as usize] = domain(0);
        write_out!(dynamic_pstates_info => info)
    }

    unsafe fn nvmlDeviceGetFanSpeed(device: nvmlDevice_t, speed: *mut u32) -> NvmlResult {
        fan(device, 0, speed)
    }

    unsafe fn nvmlDeviceGetFanSpeed_v2(device: nvmlDevice_t, index: u32, speed: *mut u32) -> NvmlResult {
        fan(device, index, speed)
    }

    unsafe fn nvmlDeviceGetTargetFanSpeed(
        device: nvmlDevice_t,
        index: u32,
        target_speed: *mut u32,
    ) -> NvmlResult {
        fan(device, index, target_speed)
    }

    unsafe fn nvmlDeviceGetNumFans(device: nvmlDevice_t, num_fans: *mut u32) -> NvmlResult {
        write_out!(num_fans => u32::from(gpu(device)?.profile().fan))
    }

    unsafe fn nvmlDeviceGetPerformanceState(device: nvmlDevice_t, state: *mut nvmlPstates_t) -> NvmlResult {
        write_out!(state => read_sensors(device)?.performance_state())
    }

    unsafe fn nvmlDeviceGetPowerState(device: nvmlDevice_t, state: *mut nvmlPstates_t) -> NvmlResult {
        write_out!(state => read_sensors(device)?.performance_state())
    }

    unsafe fn nvmlDeviceGetSupportedPerformanceStates(
        device: nvmlDevice_t,
        pstates: *mut nvmlPstates_t,
        size: u32,
    ) -> NvmlResult {
        let mut list = vec![0, gpu(device)?.profile().idle_state];
        list.dedup();
        let room = size as usize / size_of::<nvmlPstates_t>();
        if room < list.len() {
            return Err(NvmlError::INSUFFICIENT_SIZE);
        }
        list.resize(room.min(NVML_MAX_GPU_PERF_PSTATES as usize), NVML_PSTATE_UNKNOWN);
        let mut count = list.len() as u32;
        write_out_list!(&raw mut count, pstates, list)
    }

    unsafe fn nvmlDeviceGetPowerUsage(device: nvmlDevice_t, power: *mut u32) -> NvmlResult {
        write_out!(power => read_sensors(device)?.power())
    }

    unsafe fn nvmlDeviceGetTotalEnergyConsumption(device: nvmlDevice_t, energy: *mut u64) -> NvmlResult {
        write_out!(energy => read_sensors(device)?.energy())
    }

    unsafe fn nvmlDeviceGetEnforcedPowerLimit(device: nvmlDevice_t, limit: *mut u32) -> NvmlResult {
        write_out!(limit => read_sensors(device)?.power_limit())
    }

    unsafe fn nvmlDeviceGetPowerManagementLimit(device: nvmlDevice_t, limit: *mut u32) -> NvmlResult {
        write_out!(limit => read_sensors(device)?.power_limit())
    }

    unsafe fn nvmlDeviceGetPowerManagementDefaultLimit(
        device: nvmlDevice_t,
        default_limit: *mut u32,
    ) -> NvmlResult {
        write_out!(default_limit => gpu(device)?.profile().power.default_limit)
    }

    unsafe fn nvmlDeviceGetPowerManagementLimitConstraints(
        device: nvmlDevice_t,
        min_limit: *mut u32,
        max_limit: *mut u32,
    ) -> NvmlResult {
        let power = &gpu(device)?.profile().power;
        if max_limit.is_null() {
            return Err(NvmlError::INVALID_ARGUMENT);
        }
        write_out!(min_limit => power.min_limit, max_limit => power.max_limit)
    }

    unsafe fn nvmlDeviceGetPowerManagementMode(
        device: nvmlDevice_t,
        mode: *mut nvmlEnableState_t,
    ) -> NvmlResult {
        gpu(device)?;
        write_out!(mode => NVML_FEATURE_ENABLED)
    }

    unsafe fn nvmlDeviceGetPowerSource(
        device: nvmlDevice_t,
        power_source: *mut nvmlPowerSource_t,
    ) -> NvmlResult {
        gpu(device)?;
        write_out!(power_source => NVML_POWER_SOURCE_AC)
    }

    unsafe fn nvmlDeviceGetTemperature(
        device: nvmlDevice_t,
        sensor_type: nvmlTemperatureSensors_t,
        temperature: *mut u32,
    ) -> NvmlResult {
        let sensors = read_sensors(device)?;
        if sensor_type != NVML_TEMPERATURE_GPU {
            return Err(NvmlError::INVALID_ARGUMENT);
        }
        write_out!(temperature => sensors.temperature())
    }

    unsafe fn nvmlDeviceGetTemperatureThreshold(
        device: nvmlDevice_t,
        threshold_type: nvmlTemperatureThresholds_t,
        temperature: *mut u32,
    ) -> NvmlResult {
        let figures = &gpu(device)?.profile().temperature;
        let threshold = match threshold_type {
            NVML_TEMPERATURE_THRESHOLD_SHUTDOWN => figures.shutdown,
            NVML_TEMPERATURE_THRESHOLD_SLOWDOWN => figures.slowdown,
            NVML_TEMPERATURE_THRESHOLD_MEM_MAX => figures.memory_max.ok_or(NvmlError::NOT_SUPPORTED)?,
            NVML_TEMPERATURE_THRESHOLD_GPU_MAX => figures.max_operating,
            kind if kind < NVML_TEMPERATURE_THRESHOLD_COUNT => return Err(NvmlError::NOT_SUPPORTED),
            _ => return Err(NvmlError::INVALID_ARGUMENT),
        };
        write_out!(temperature => threshold)
    }

    unsafe fn nvmlDeviceGetThermalSettings(
        device: nvmlDevice_t,
        _sensor_index: u32,
        thermal_settings: *mut nvmlGpuThermalSettings_t,
    ) -> NvmlResult {
        let gpu = gpu(device)?;
        let mut settings = nvmlGpuThermalSettings_t { count: 1, ..Default::default() };
        settings.sensor[0] = nvmlGpuThermalSettings_t_sensor {
            controller: NVML_THERMAL_CONTROLLER_GPU_INTERNAL,
            defaultMinTemp: 0,
            defaultMaxTemp: gpu.profile().temperature.max_operating as i32,
            currentTemp: SensorReading::read(gpu).temperature() as i32,
            target: NVML_THERMAL_TARGET_GPU,
        };
        write_out!(thermal_settings => settings)
    }

    unsafe fn nvmlDeviceGetViolationStatus(
        device: nvmlDevice_t,
        perf_policy_type: nvmlPerfPolicyType_t,
        viol_time: *mut nvmlViolationTime_t,
    ) -> NvmlResult {
        let gpu = gpu(device)?;
        if perf_policy_type >= NVML_PERF_POLICY_COUNT {
            return Err(NvmlError::INVALID_ARGUMENT);
        }
        let referenceTime = gpu.session.wall_micros(now());
        write_out!(viol_time => nvmlViolationTime_t { referenceTime, violationTime: 0 })
    }

    unsafe fn nvmlDeviceGetCurrPcieLinkGeneration(
        device: nvmlDevice_t,
        curr_link_gen: *mut u32,
    ) -> NvmlResult {
        write_out!(curr_link_gen => read_sensors(device)?.pcie_generation())
    }

    unsafe fn nvmlDeviceGetMaxPcieLinkGeneration(device: nvmlDevice_t, max_link_gen: *mut u32) -> NvmlResult {
        write_out!(max_link_gen => gpu(device)?.profile().pci.generation)
    }

    unsafe fn nvmlDeviceGetGpuMaxPcieLinkGeneration(
        device: nvmlDevice_t,
        max_link_gen_device: *mut u32,
    ) -> NvmlResult {
        write_out!(max_link_gen_device => gpu(device)?.profile().pci.generation)
    }

    unsafe fn nvmlDeviceGetCurrPcieLinkWidth(device: nvmlDevice_t, curr_link_width: *mut u32) -> NvmlResult {
        write_out!(curr_link_width => gpu(device)?.profile().pci.width)
    }

    unsafe fn nvmlDeviceGetMaxPcieLinkWidth(device: nvmlDevice_t, max_link_width: *mut u32) -> NvmlResult {
        write_out!(max_link_width => gpu(device)?.profile().pci.width)
    }

    unsafe fn nvmlDeviceGetPcieLinkMaxSpeed(device: nvmlDevice_t, max_speed: *mut u32) -> NvmlResult {
        // NVML numbers link speeds like PCIe generations.
        write_out!(max_speed => gpu(device)?.profile().pci.generation)
    }

    unsafe fn nvmlDeviceGetPcieSpeed(device: nvmlDevice_t, pcie_speed: *mut u32) -> NvmlResult {
        let speed = match read_sensors(device)?.pcie_generation() {
            0 | 1 => 2500,
            2 => 5000,
            generation => 1000 << generation,
        };
        write_out!(pcie_speed => speed)
    }

    unsafe fn nvmlDeviceGetPcieReplayCounter(device: nvmlDevice_t, value: *mut u32) -> NvmlResult {
        gpu(device)?;
        write_out!(value => 0)
    }

    unsafe fn nvmlDeviceGetPcieThroughput(
        device: nvmlDevice_t,
        counter: nvmlPcieUtilCounter_t,
        value: *mut u32,
    ) -> NvmlResult {
        gpu(device)?;
        if counter >= NVML_PCIE_UTIL_COUNT {
            return Err(NvmlError::INVALID_ARGUMENT);
        }
        // Copies stay within host memory, so there is no PCIe traffic to count.
        write_out!(value => 0)
    }
}
