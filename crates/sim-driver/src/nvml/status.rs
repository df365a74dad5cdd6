//! What a GPU does now: memory, utilisation, clocks, power, temperature, performance.

use super::call::{Answer, Gpu, answer, answer_list, gpu, passed};
use super::reading::{Clock, Reading};
use super::*;
use crate::profile::Architecture;
use crate::state::{Setting, UNIT, now};

const MIB: u64 = 1 << 20;

fn look(device: nvmlDevice_t) -> Result<Reading, NvmlError> {
    gpu(device).map(Reading::of)
}

/// The clock that NVML means.
fn clock_of(kind: nvmlClockType_t) -> Result<Clock, NvmlError> {
    match kind {
        // Multiprocessors run with the graphics clock.
        NVML_CLOCK_GRAPHICS | NVML_CLOCK_SM => Ok(Clock::Graphics),
        NVML_CLOCK_MEM => Ok(Clock::Memory),
        NVML_CLOCK_VIDEO => Ok(Clock::Video),
        _ => Err(NvmlError::INVALID_ARGUMENT),
    }
}

/// What the card comes with, for clocks that applications can choose.
fn default_clock(gpu: Gpu, kind: nvmlClockType_t) -> Result<u32, NvmlError> {
    let clocks = &gpu.profile().clocks;
    match clock_of(kind)? {
        Clock::Graphics => Ok(clocks.graphics_default),
        Clock::Memory => Ok(clocks.memory_max),
        Clock::Video => Err(NvmlError::NOT_SUPPORTED),
    }
}

fn application_clock(gpu: Gpu, kind: nvmlClockType_t) -> Result<u32, NvmlError> {
    Reading::of(gpu).application_clock(clock_of(kind)?).ok_or(NvmlError::NOT_SUPPORTED)
}

fn boost_clock(gpu: Gpu, kind: nvmlClockType_t) -> Result<u32, NvmlError> {
    match clock_of(kind)? {
        Clock::Graphics => Ok(gpu.profile().clocks.graphics_max),
        Clock::Memory | Clock::Video => Err(NvmlError::NOT_SUPPORTED),
    }
}

/// Memory clocks that can be asked for, fastest first.
pub(super) fn memory_clocks(gpu: Gpu) -> Vec<u32> {
    let clocks = &gpu.profile().clocks;
    let mut list = vec![clocks.memory_max, clocks.memory_idle];
    list.dedup();
    list
}

/// Graphics clocks that go with a memory clock, fastest first.
pub(super) fn graphics_clocks(gpu: Gpu, memory: u32) -> Vec<u32> {
    const STEP: usize = 15;
    let clocks = &gpu.profile().clocks;
    let most = if memory == clocks.memory_max { clocks.graphics_max } else { 2 * clocks.graphics_idle };
    (clocks.graphics_idle..=most.min(clocks.graphics_max)).rev().step_by(STEP).collect()
}

/// What is used, and what of it is the driver's own.
pub(super) struct MemoryUse {
    pub(super) total: u64,
    pub(super) reserved: u64,
    pub(super) used: u64,
    pub(super) free: u64,
}

pub(super) fn memory(gpu: Gpu) -> MemoryUse {
    let memory = &gpu.profile().memory;
    let state = &gpu.session.state;
    // The dead hold nothing.
    state.sweep();
    let used = (state.used_memory(gpu.index) * UNIT).min(memory.usable());
    MemoryUse { total: memory.total, reserved: memory.reserved, used, free: memory.usable() - used }
}

/// An engine that is never used: its load, and how often that is looked at.
fn unused_engine(device: nvmlDevice_t, since: Architecture, load: *mut u32, period: *mut u32) -> Answer {
    let gpu = gpu(device)?;
    if gpu.profile().architecture < since {
        return Err(NvmlError::NOT_SUPPORTED);
    }
    if period.is_null() {
        return Err(NvmlError::INVALID_ARGUMENT);
    }
    answer!(load => 0, period => (gpu.session.state.window() / 1000) as u32)
}

fn fan(device: nvmlDevice_t, fan: u32, speed: *mut u32) -> Answer {
    if !gpu(device)?.profile().fan {
        return Err(NvmlError::NOT_SUPPORTED);
    }
    if fan > 0 {
        return Err(NvmlError::INVALID_ARGUMENT);
    }
    // Cards for servers are cooled by the server's fans.
    answer!(speed => 0)
}

/// Reasons for clocks that a card can have.
const REASONS: u64 = nvmlClocksEventReasonAll;

impl Status for Library {
    unsafe fn nvmlDeviceGetMemoryInfo(device: nvmlDevice_t, memory: *mut nvmlMemory_t) -> Answer {
        let now = self::memory(gpu(device)?);
        // This one knows no reserve: what is not free is used.
        answer!(memory => nvmlMemory_t { total: now.total, free: now.free, used: now.used + now.reserved })
    }

    unsafe fn nvmlDeviceGetMemoryInfo_v2(device: nvmlDevice_t, memory: *mut nvmlMemory_v2_t) -> Answer {
        let gpu = gpu(device)?;
        let version = passed!(memory.cast_const().cast::<u32>());
        if version != nvmlMemory_v2 {
            return Err(NvmlError::ARGUMENT_VERSION_MISMATCH);
        }
        let MemoryUse { total, reserved, used, free } = self::memory(gpu);
        answer!(memory => nvmlMemory_v2_t { version, total, reserved, free, used })
    }

    unsafe fn nvmlDeviceGetBAR1MemoryInfo(
        device: nvmlDevice_t,
        bar1_memory: *mut nvmlBAR1Memory_t,
    ) -> Answer {
        let gpu = gpu(device)?;
        let total = gpu.profile().memory.bar1;
        // The driver's own mapping, and one of each process.
        let used = (MIB + 2 * MIB * gpu.session.state.processes(gpu.index).len() as u64).min(total);
        answer!(bar1_memory => nvmlBAR1Memory_t { bar1Total: total, bar1Free: total - used, bar1Used: used })
    }

    unsafe fn nvmlDeviceGetUtilizationRates(
        device: nvmlDevice_t,
        utilization: *mut nvmlUtilization_t,
    ) -> Answer {
        let look = look(device)?;
        answer!(utilization => nvmlUtilization_t { gpu: look.gpu_percent(), memory: look.memory_percent() })
    }

    unsafe fn nvmlDeviceGetEncoderUtilization(
        device: nvmlDevice_t,
        load: *mut u32,
        period: *mut u32,
    ) -> Answer {
        unused_engine(device, Architecture::Volta, load, period)
    }

    unsafe fn nvmlDeviceGetDecoderUtilization(
        device: nvmlDevice_t,
        load: *mut u32,
        period: *mut u32,
    ) -> Answer {
        unused_engine(device, Architecture::Volta, load, period)
    }

    unsafe fn nvmlDeviceGetJpgUtilization(device: nvmlDevice_t, load: *mut u32, period: *mut u32) -> Answer {
        unused_engine(device, Architecture::Ampere, load, period)
    }

    unsafe fn nvmlDeviceGetOfaUtilization(device: nvmlDevice_t, load: *mut u32, period: *mut u32) -> Answer {
        unused_engine(device, Architecture::Ampere, load, period)
    }

    unsafe fn nvmlDeviceGetEncoderCapacity(
        device: nvmlDevice_t,
        encoder_query_type: nvmlEncoderType_t,
        encoder_capacity: *mut u32,
    ) -> Answer {
        let gpu = gpu(device)?;
        if encoder_query_type > NVML_ENCODER_QUERY_AV1 {
            return Err(NvmlError::INVALID_ARGUMENT);
        }
        if gpu.profile().encoders == 0 {
            return Err(NvmlError::NOT_SUPPORTED);
        }
        answer!(encoder_capacity => 100)
    }

    unsafe fn nvmlDeviceGetSamples(
        device: nvmlDevice_t,
        kind: nvmlSamplingType_t,
        last_seen_time_stamp: u64,
        sample_val_type: *mut nvmlValueType_t,
        sample_count: *mut u32,
        samples: *mut nvmlSample_t,
    ) -> Answer {
        let gpu = gpu(device)?;
        // SAFETY: the caller's promise.
        unsafe { samples::put(gpu, kind, last_seen_time_stamp, sample_val_type, sample_count, samples) }
    }

    unsafe fn nvmlDeviceGetFieldValues(
        device: nvmlDevice_t,
        values_count: i32,
        values: *mut nvmlFieldValue_t,
    ) -> Answer {
        let gpu = gpu(device)?;
        // SAFETY: the caller's promise.
        unsafe { fields::fill(gpu, values_count, values) }
    }

    unsafe fn nvmlDeviceGetClockInfo(device: nvmlDevice_t, kind: nvmlClockType_t, clock: *mut u32) -> Answer {
        answer!(clock => look(device)?.clock(clock_of(kind)?))
    }

    unsafe fn nvmlDeviceGetMaxClockInfo(
        device: nvmlDevice_t,
        kind: nvmlClockType_t,
        clock: *mut u32,
    ) -> Answer {
        answer!(clock => look(device)?.max_clock(clock_of(kind)?))
    }

    unsafe fn nvmlDeviceGetClock(
        device: nvmlDevice_t,
        clock_type: nvmlClockType_t,
        clock_id: nvmlClockId_t,
        clock_mhz: *mut u32,
    ) -> Answer {
        let gpu = gpu(device)?;
        let clock = match clock_id {
            NVML_CLOCK_ID_CURRENT => Reading::of(gpu).clock(clock_of(clock_type)?),
            NVML_CLOCK_ID_APP_CLOCK_TARGET => application_clock(gpu, clock_type)?,
            NVML_CLOCK_ID_APP_CLOCK_DEFAULT => default_clock(gpu, clock_type)?,
            NVML_CLOCK_ID_CUSTOMER_BOOST_MAX => boost_clock(gpu, clock_type)?,
            _ => return Err(NvmlError::INVALID_ARGUMENT),
        };
        answer!(clock_mhz => clock)
    }

    unsafe fn nvmlDeviceGetApplicationsClock(
        device: nvmlDevice_t,
        clock_type: nvmlClockType_t,
        clock_mhz: *mut u32,
    ) -> Answer {
        answer!(clock_mhz => application_clock(gpu(device)?, clock_type)?)
    }

    unsafe fn nvmlDeviceGetDefaultApplicationsClock(
        device: nvmlDevice_t,
        clock_type: nvmlClockType_t,
        clock_mhz: *mut u32,
    ) -> Answer {
        answer!(clock_mhz => default_clock(gpu(device)?, clock_type)?)
    }

    unsafe fn nvmlDeviceGetMaxCustomerBoostClock(
        device: nvmlDevice_t,
        clock_type: nvmlClockType_t,
        clock_mhz: *mut u32,
    ) -> Answer {
        answer!(clock_mhz => boost_clock(gpu(device)?, clock_type)?)
    }

    unsafe fn nvmlDeviceGetSupportedMemoryClocks(
        device: nvmlDevice_t,
        count: *mut u32,
        clocks_mhz: *mut u32,
    ) -> Answer {
        answer_list!(count, clocks_mhz, memory_clocks(gpu(device)?))
    }

    unsafe fn nvmlDeviceGetSupportedGraphicsClocks(
        device: nvmlDevice_t,
        memory_clock_mhz: u32,
        count: *mut u32,
        clocks_mhz: *mut u32,
    ) -> Answer {
        let gpu = gpu(device)?;
        if !memory_clocks(gpu).contains(&memory_clock_mhz) {
            return Err(NvmlError::NOT_FOUND);
        }
        answer_list!(count, clocks_mhz, graphics_clocks(gpu, memory_clock_mhz))
    }

    unsafe fn nvmlDeviceGetMinMaxClockOfPState(
        device: nvmlDevice_t,
        kind: nvmlClockType_t,
        pstate: nvmlPstates_t,
        min_clock_mhz: *mut u32,
        max_clock_mhz: *mut u32,
    ) -> Answer {
        let gpu = gpu(device)?;
        let clocks = &gpu.profile().clocks;
        let (idle, most) = match clock_of(kind)? {
            Clock::Graphics => (clocks.graphics_idle, clocks.graphics_max),
            Clock::Memory => (clocks.memory_idle, clocks.memory_max),
            Clock::Video => (clocks.video_idle, clocks.video_max),
        };
        let (least, most) = match pstate {
            NVML_PSTATE_0 if kind == NVML_CLOCK_MEM => (most, most),
            NVML_PSTATE_0 => (idle, most),
            state if state == gpu.profile().idle_state => (idle, idle),
            NVML_PSTATE_1..=NVML_PSTATE_15 => return Err(NvmlError::NOT_SUPPORTED),
            _ => return Err(NvmlError::INVALID_ARGUMENT),
        };
        answer!(min_clock_mhz => least, max_clock_mhz => most)
    }

    unsafe fn nvmlDeviceGetCurrentClocksEventReasons(device: nvmlDevice_t, reasons: *mut u64) -> Answer {
        answer!(reasons => look(device)?.reasons())
    }

    unsafe fn nvmlDeviceGetCurrentClocksThrottleReasons(device: nvmlDevice_t, reasons: *mut u64) -> Answer {
        answer!(reasons => look(device)?.reasons())
    }

    unsafe fn nvmlDeviceGetSupportedClocksEventReasons(device: nvmlDevice_t, reasons: *mut u64) -> Answer {
        gpu(device)?;
        answer!(reasons => REASONS)
    }

    unsafe fn nvmlDeviceGetSupportedClocksThrottleReasons(device: nvmlDevice_t, reasons: *mut u64) -> Answer {
        gpu(device)?;
        answer!(reasons => REASONS)
    }

    unsafe fn nvmlDeviceGetAdaptiveClockInfoStatus(
        device: nvmlDevice_t,
        adaptive_clock_status: *mut u32,
    ) -> Answer {
        gpu(device)?;
        answer!(adaptive_clock_status => NVML_ADAPTIVE_CLOCKING_INFO_STATUS_ENABLED)
    }

    unsafe fn nvmlDeviceGetAPIRestriction(
        device: nvmlDevice_t,
        api_type: nvmlRestrictedAPI_t,
        is_restricted: *mut nvmlEnableState_t,
    ) -> Answer {
        gpu(device)?;
        match api_type {
            NVML_RESTRICTED_API_SET_APPLICATION_CLOCKS => answer!(is_restricted => NVML_FEATURE_ENABLED),
            NVML_RESTRICTED_API_SET_AUTO_BOOSTED_CLOCKS => Err(NvmlError::NOT_SUPPORTED),
            _ => Err(NvmlError::INVALID_ARGUMENT),
        }
    }

    unsafe fn nvmlDeviceGetComputeMode(device: nvmlDevice_t, mode: *mut nvmlComputeMode_t) -> Answer {
        answer!(mode => gpu(device)?.setting(Setting::ComputeMode).unwrap_or(0) as u32)
    }

    unsafe fn nvmlDeviceGetPersistenceMode(device: nvmlDevice_t, mode: *mut nvmlEnableState_t) -> Answer {
        answer!(mode => gpu(device)?.setting(Setting::Persistence).unwrap_or(0) as u32)
    }

    unsafe fn nvmlDeviceGetDisplayActive(device: nvmlDevice_t, is_active: *mut nvmlEnableState_t) -> Answer {
        gpu(device)?;
        answer!(is_active => NVML_FEATURE_DISABLED)
    }

    unsafe fn nvmlDeviceGetDisplayMode(device: nvmlDevice_t, display: *mut nvmlEnableState_t) -> Answer {
        gpu(device)?;
        // Also of cards that no display can be connected to.
        answer!(display => NVML_FEATURE_ENABLED)
    }

    unsafe fn nvmlDeviceGetDynamicPstatesInfo(
        device: nvmlDevice_t,
        dynamic_pstates_info: *mut nvmlGpuDynamicPstatesInfo_t,
    ) -> Answer {
        let look = look(device)?;
        let domain = |percentage| nvmlGpuDynamicPstatesInfo_t_utilization {
            bIsPresent: 1,
            percentage,
            ..Default::default()
        };
        let mut info = nvmlGpuDynamicPstatesInfo_t { flags: 1, ..Default::default() };
        info.utilization[NVML_GPU_UTILIZATION_DOMAIN_GPU as usize] = domain(look.gpu_percent());
        info.utilization[NVML_GPU_UTILIZATION_DOMAIN_FB as usize] = domain(look.memory_percent());
        info.utilization[NVML_GPU_UTILIZATION_DOMAIN_VID as usize] = domain(0);
        info.utilization[NVML_GPU_UTILIZATION_DOMAIN_BUS as usize] = domain(0);
        answer!(dynamic_pstates_info => info)
    }

    unsafe fn nvmlDeviceGetFanSpeed(device: nvmlDevice_t, speed: *mut u32) -> Answer {
        fan(device, 0, speed)
    }

    unsafe fn nvmlDeviceGetFanSpeed_v2(device: nvmlDevice_t, index: u32, speed: *mut u32) -> Answer {
        fan(device, index, speed)
    }

    unsafe fn nvmlDeviceGetTargetFanSpeed(
        device: nvmlDevice_t,
        index: u32,
        target_speed: *mut u32,
    ) -> Answer {
        fan(device, index, target_speed)
    }

    unsafe fn nvmlDeviceGetNumFans(device: nvmlDevice_t, num_fans: *mut u32) -> Answer {
        answer!(num_fans => u32::from(gpu(device)?.profile().fan))
    }

    unsafe fn nvmlDeviceGetPerformanceState(device: nvmlDevice_t, state: *mut nvmlPstates_t) -> Answer {
        answer!(state => look(device)?.performance_state())
    }

    unsafe fn nvmlDeviceGetPowerState(device: nvmlDevice_t, state: *mut nvmlPstates_t) -> Answer {
        answer!(state => look(device)?.performance_state())
    }

    unsafe fn nvmlDeviceGetSupportedPerformanceStates(
        device: nvmlDevice_t,
        pstates: *mut nvmlPstates_t,
        size: u32,
    ) -> Answer {
        let mut list = vec![0, gpu(device)?.profile().idle_state];
        list.dedup();
        let room = size as usize / size_of::<nvmlPstates_t>();
        if room < list.len() {
            return Err(NvmlError::INSUFFICIENT_SIZE);
        }
        list.resize(room.min(NVML_MAX_GPU_PERF_PSTATES as usize), NVML_PSTATE_UNKNOWN);
        let mut count = list.len() as u32;
        answer_list!(&raw mut count, pstates, list)
    }

    unsafe fn nvmlDeviceGetPowerUsage(device: nvmlDevice_t, power: *mut u32) -> Answer {
        answer!(power => look(device)?.power())
    }

    unsafe fn nvmlDeviceGetTotalEnergyConsumption(device: nvmlDevice_t, energy: *mut u64) -> Answer {
        answer!(energy => look(device)?.energy())
    }

    unsafe fn nvmlDeviceGetEnforcedPowerLimit(device: nvmlDevice_t, limit: *mut u32) -> Answer {
        answer!(limit => look(device)?.power_limit())
    }

    unsafe fn nvmlDeviceGetPowerManagementLimit(device: nvmlDevice_t, limit: *mut u32) -> Answer {
        answer!(limit => look(device)?.power_limit())
    }

    unsafe fn nvmlDeviceGetPowerManagementDefaultLimit(
        device: nvmlDevice_t,
        default_limit: *mut u32,
    ) -> Answer {
        answer!(default_limit => gpu(device)?.profile().power.default_limit)
    }

    unsafe fn nvmlDeviceGetPowerManagementLimitConstraints(
        device: nvmlDevice_t,
        min_limit: *mut u32,
        max_limit: *mut u32,
    ) -> Answer {
        let power = &gpu(device)?.profile().power;
        if max_limit.is_null() {
            return Err(NvmlError::INVALID_ARGUMENT);
        }
        answer!(min_limit => power.min_limit, max_limit => power.max_limit)
    }

    unsafe fn nvmlDeviceGetPowerManagementMode(device: nvmlDevice_t, mode: *mut nvmlEnableState_t) -> Answer {
        gpu(device)?;
        answer!(mode => NVML_FEATURE_ENABLED)
    }

    unsafe fn nvmlDeviceGetPowerSource(device: nvmlDevice_t, power_source: *mut nvmlPowerSource_t) -> Answer {
        gpu(device)?;
        answer!(power_source => NVML_POWER_SOURCE_AC)
    }

    unsafe fn nvmlDeviceGetTemperature(
        device: nvmlDevice_t,
        sensor_type: nvmlTemperatureSensors_t,
        temperature: *mut u32,
    ) -> Answer {
        let look = look(device)?;
        if sensor_type != NVML_TEMPERATURE_GPU {
            return Err(NvmlError::INVALID_ARGUMENT);
        }
        answer!(temperature => look.temperature())
    }

    unsafe fn nvmlDeviceGetTemperatureThreshold(
        device: nvmlDevice_t,
        threshold_type: nvmlTemperatureThresholds_t,
        temperature: *mut u32,
    ) -> Answer {
        let figures = &gpu(device)?.profile().temperature;
        let threshold = match threshold_type {
            NVML_TEMPERATURE_THRESHOLD_SHUTDOWN => figures.shutdown,
            NVML_TEMPERATURE_THRESHOLD_SLOWDOWN => figures.slowdown,
            NVML_TEMPERATURE_THRESHOLD_MEM_MAX => figures.memory_max.ok_or(NvmlError::NOT_SUPPORTED)?,
            NVML_TEMPERATURE_THRESHOLD_GPU_MAX => figures.max_operating,
            kind if kind < NVML_TEMPERATURE_THRESHOLD_COUNT => return Err(NvmlError::NOT_SUPPORTED),
            _ => return Err(NvmlError::INVALID_ARGUMENT),
        };
        answer!(temperature => threshold)
    }

    unsafe fn nvmlDeviceGetThermalSettings(
        device: nvmlDevice_t,
        _sensor_index: u32,
        thermal_settings: *mut nvmlGpuThermalSettings_t,
    ) -> Answer {
        let gpu = gpu(device)?;
        let mut settings = nvmlGpuThermalSettings_t { count: 1, ..Default::default() };
        settings.sensor[0] = nvmlGpuThermalSettings_t_sensor {
            controller: NVML_THERMAL_CONTROLLER_GPU_INTERNAL,
            defaultMinTemp: 0,
            defaultMaxTemp: gpu.profile().temperature.max_operating as i32,
            currentTemp: Reading::of(gpu).temperature() as i32,
            target: NVML_THERMAL_TARGET_GPU,
        };
        answer!(thermal_settings => settings)
    }

    unsafe fn nvmlDeviceGetViolationStatus(
        device: nvmlDevice_t,
        perf_policy_type: nvmlPerfPolicyType_t,
        viol_time: *mut nvmlViolationTime_t,
    ) -> Answer {
        let gpu = gpu(device)?;
        if perf_policy_type >= NVML_PERF_POLICY_COUNT {
            return Err(NvmlError::INVALID_ARGUMENT);
        }
        let referenceTime = gpu.session.wall_micros(now());
        answer!(viol_time => nvmlViolationTime_t { referenceTime, violationTime: 0 })
    }

    unsafe fn nvmlDeviceGetCurrPcieLinkGeneration(device: nvmlDevice_t, curr_link_gen: *mut u32) -> Answer {
        answer!(curr_link_gen => look(device)?.pcie_generation())
    }

    unsafe fn nvmlDeviceGetMaxPcieLinkGeneration(device: nvmlDevice_t, max_link_gen: *mut u32) -> Answer {
        answer!(max_link_gen => gpu(device)?.profile().pci.generation)
    }

    unsafe fn nvmlDeviceGetGpuMaxPcieLinkGeneration(
        device: nvmlDevice_t,
        max_link_gen_device: *mut u32,
    ) -> Answer {
        answer!(max_link_gen_device => gpu(device)?.profile().pci.generation)
    }

    unsafe fn nvmlDeviceGetCurrPcieLinkWidth(device: nvmlDevice_t, curr_link_width: *mut u32) -> Answer {
        answer!(curr_link_width => gpu(device)?.profile().pci.width)
    }

    unsafe fn nvmlDeviceGetMaxPcieLinkWidth(device: nvmlDevice_t, max_link_width: *mut u32) -> Answer {
        answer!(max_link_width => gpu(device)?.profile().pci.width)
    }

    unsafe fn nvmlDeviceGetPcieLinkMaxSpeed(device: nvmlDevice_t, max_speed: *mut u32) -> Answer {
        // NVML numbers the speeds as PCIe numbers its generations.
        answer!(max_speed => gpu(device)?.profile().pci.generation)
    }

    unsafe fn nvmlDeviceGetPcieSpeed(device: nvmlDevice_t, pcie_speed: *mut u32) -> Answer {
        let speed = match look(device)?.pcie_generation() {
            0 | 1 => 2500,
            2 => 5000,
            generation => 1000 << generation,
        };
        answer!(pcie_speed => speed)
    }

    unsafe fn nvmlDeviceGetPcieReplayCounter(device: nvmlDevice_t, value: *mut u32) -> Answer {
        gpu(device)?;
        answer!(value => 0)
    }

    unsafe fn nvmlDeviceGetPcieThroughput(
        device: nvmlDevice_t,
        counter: nvmlPcieUtilCounter_t,
        value: *mut u32,
    ) -> Answer {
        gpu(device)?;
        if counter >= NVML_PCIE_UTIL_COUNT {
            return Err(NvmlError::INVALID_ARGUMENT);
        }
        // Copies are between places of the host's memory: nothing crosses a bus that could be counted.
        answer!(value => 0)
    }
}
