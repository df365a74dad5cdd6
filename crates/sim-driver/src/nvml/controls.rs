//! Functions that change settings of a GPU. They require root, and the settings outlive the process.

use super::arguments::{NvmlResult, gpu, gpu_as_root, read_in};
use super::sensors::pack_clock_range;
use super::status::{graphics_clocks, memory_clocks};
use super::*;
use crate::state::{GpuCounter, GpuSetting};

fn set_mode(device: nvmlDevice_t, setting: GpuSetting, mode: nvmlEnableState_t) -> NvmlResult {
    let gpu = gpu_as_root(device)?;
    if mode > NVML_FEATURE_ENABLED {
        return Err(NvmlError::INVALID_ARGUMENT);
    }
    gpu.set(setting, Some(u64::from(mode)));
    Ok(())
}

fn limit_power(device: nvmlDevice_t, limit: u32) -> NvmlResult {
    let gpu = gpu_as_root(device)?;
    let power = &gpu.profile().power;
    if !(power.min_limit..=power.max_limit).contains(&limit) {
        return Err(NvmlError::INVALID_ARGUMENT);
    }
    gpu.set(GpuSetting::PowerLimit, Some(u64::from(limit)));
    Ok(())
}

fn lock_clocks(device: nvmlDevice_t, setting: GpuSetting, least: u32, most: u32) -> NvmlResult {
    let gpu = gpu_as_root(device)?;
    if least > most || most == 0 {
        return Err(NvmlError::INVALID_ARGUMENT);
    }
    gpu.set(setting, Some(pack_clock_range(least, most)));
    Ok(())
}

impl NvmlControls for Library {
    unsafe fn nvmlDeviceSetPersistenceMode(device: nvmlDevice_t, mode: nvmlEnableState_t) -> NvmlResult {
        set_mode(device, GpuSetting::Persistence, mode)
    }

    unsafe fn nvmlDeviceSetAccountingMode(device: nvmlDevice_t, mode: nvmlEnableState_t) -> NvmlResult {
        set_mode(device, GpuSetting::Accounting, mode)
    }

    unsafe fn nvmlDeviceClearAccountingPids(device: nvmlDevice_t) -> NvmlResult {
        gpu_as_root(device).map(|_| ())
    }

    unsafe fn nvmlDeviceSetComputeMode(device: nvmlDevice_t, mode: nvmlComputeMode_t) -> NvmlResult {
        let gpu = gpu_as_root(device)?;
        match mode {
            NVML_COMPUTEMODE_DEFAULT | NVML_COMPUTEMODE_PROHIBITED | NVML_COMPUTEMODE_EXCLUSIVE_PROCESS => {
                gpu.set(GpuSetting::ComputeMode, Some(u64::from(mode)));
                Ok(())
            }
            NVML_COMPUTEMODE_EXCLUSIVE_THREAD => Err(NvmlError::NOT_SUPPORTED),
            _ => Err(NvmlError::INVALID_ARGUMENT),
        }
    }

    unsafe fn nvmlDeviceSetEccMode(device: nvmlDevice_t, ecc: nvmlEnableState_t) -> NvmlResult {
        ecc::mode(gpu(device)?)?;
        set_mode(device, GpuSetting::EccPending, ecc)
    }

    unsafe fn nvmlDeviceClearEccErrorCounts(
        device: nvmlDevice_t,
        counter_type: nvmlEccCounterType_t,
    ) -> NvmlResult {
        let gpu = gpu_as_root(device)?;
        ecc::mode(gpu)?;
        let counters = match counter_type {
            NVML_VOLATILE_ECC => [GpuCounter::CorrectedVolatile, GpuCounter::UncorrectedVolatile],
            NVML_AGGREGATE_ECC => [GpuCounter::CorrectedAggregate, GpuCounter::UncorrectedAggregate],
            _ => return Err(NvmlError::INVALID_ARGUMENT),
        };
        for counter in counters {
            gpu.session.state.reset_counter(gpu.index, counter);
        }
        Ok(())
    }

    unsafe fn nvmlDeviceSetPowerManagementLimit(device: nvmlDevice_t, limit: u32) -> NvmlResult {
        limit_power(device, limit)
    }

    unsafe fn nvmlDeviceSetPowerManagementLimit_v2(
        device: nvmlDevice_t,
        power_value: *mut nvmlPowerValue_v2_t,
    ) -> NvmlResult {
        gpu(device)?;
        let version = read_in!(power_value.cast_const().cast::<u32>());
        if version != nvmlPowerValue_v2 {
            return Err(NvmlError::ARGUMENT_VERSION_MISMATCH);
        }
        let value = read_in!(power_value.cast_const());
        if u32::from(value.powerScope) != NVML_POWER_SCOPE_GPU {
            return Err(NvmlError::NOT_SUPPORTED);
        }
        limit_power(device, value.powerValueMw)
    }

    unsafe fn nvmlDeviceSetApplicationsClocks(
        device: nvmlDevice_t,
        mem_clock_mhz: u32,
        graphics_clock_mhz: u32,
    ) -> NvmlResult {
        let gpu = gpu_as_root(device)?;
        if !memory_clocks(gpu).contains(&mem_clock_mhz)
            || !graphics_clocks(gpu, mem_clock_mhz).contains(&graphics_clock_mhz)
        {
            return Err(NvmlError::INVALID_ARGUMENT);
        }
        gpu.set(GpuSetting::MemoryClock, Some(u64::from(mem_clock_mhz)));
        gpu.set(GpuSetting::GraphicsClock, Some(u64::from(graphics_clock_mhz)));
        Ok(())
    }

    unsafe fn nvmlDeviceResetApplicationsClocks(device: nvmlDevice_t) -> NvmlResult {
        let gpu = gpu_as_root(device)?;
        gpu.set(GpuSetting::MemoryClock, None);
        gpu.set(GpuSetting::GraphicsClock, None);
        Ok(())
    }

    unsafe fn nvmlDeviceSetGpuLockedClocks(
        device: nvmlDevice_t,
        min_gpu_clock_mhz: u32,
        max_gpu_clock_mhz: u32,
    ) -> NvmlResult {
        lock_clocks(device, GpuSetting::LockedGraphics, min_gpu_clock_mhz, max_gpu_clock_mhz)
    }

    unsafe fn nvmlDeviceResetGpuLockedClocks(device: nvmlDevice_t) -> NvmlResult {
        gpu_as_root(device)?.set(GpuSetting::LockedGraphics, None);
        Ok(())
    }

    unsafe fn nvmlDeviceSetMemoryLockedClocks(
        device: nvmlDevice_t,
        min_mem_clock_mhz: u32,
        max_mem_clock_mhz: u32,
    ) -> NvmlResult {
        lock_clocks(device, GpuSetting::LockedMemory, min_mem_clock_mhz, max_mem_clock_mhz)
    }

    unsafe fn nvmlDeviceResetMemoryLockedClocks(device: nvmlDevice_t) -> NvmlResult {
        gpu_as_root(device)?.set(GpuSetting::LockedMemory, None);
        Ok(())
    }

    unsafe fn nvmlDeviceSetCpuAffinity(device: nvmlDevice_t) -> NvmlResult {
        let gpu = gpu(device)?;
        let mut cpus = rustix::thread::CpuSet::new();
        for cpu in gpu.card().gpu.cpus.iter().map(|cpu| cpu as usize) {
            if cpu < rustix::thread::CpuSet::MAX_CPU {
                cpus.set(cpu);
            }
        }
        // Fails if the real machine has none of the simulated CPUs.
        rustix::thread::sched_setaffinity(None, &cpus).map_err(|_| NvmlError::UNKNOWN)
    }

    unsafe fn nvmlDeviceClearCpuAffinity(device: nvmlDevice_t) -> NvmlResult {
        gpu(device)?;
        let mut cpus = rustix::thread::CpuSet::new();
        (0..rustix::thread::CpuSet::MAX_CPU).for_each(|cpu| cpus.set(cpu));
        rustix::thread::sched_setaffinity(None, &cpus).map_err(|_| NvmlError::UNKNOWN)
    }

    unsafe fn nvmlDeviceClearFieldValues(
        device: nvmlDevice_t,
        values_count: i32,
        values: *mut nvmlFieldValue_t,
    ) -> NvmlResult {
        gpu_as_root(device)?;
        if values_count <= 0 || values.is_null() {
            return Err(NvmlError::INVALID_ARGUMENT);
        }
        // The counters that could be cleared are always zero.
        Ok(())
    }
}
