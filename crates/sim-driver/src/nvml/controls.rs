//! Everything that changes a GPU's settings. They are root's to make, and outlive the process that makes
//! them.

use super::call::{Answer, gpu, owned, passed};
use super::reading::lock;
use super::status::{graphics_clocks, memory_clocks};
use super::*;
use crate::state::{Counter, Setting};

fn switch(device: nvmlDevice_t, setting: Setting, mode: nvmlEnableState_t) -> Answer {
    let gpu = owned(device)?;
    if mode > NVML_FEATURE_ENABLED {
        return Err(NvmlError::INVALID_ARGUMENT);
    }
    gpu.set(setting, Some(u64::from(mode)));
    Ok(())
}

fn limit_power(device: nvmlDevice_t, limit: u32) -> Answer {
    let gpu = owned(device)?;
    let power = &gpu.profile().power;
    if !(power.min_limit..=power.max_limit).contains(&limit) {
        return Err(NvmlError::INVALID_ARGUMENT);
    }
    gpu.set(Setting::PowerLimit, Some(u64::from(limit)));
    Ok(())
}

fn lock_clocks(device: nvmlDevice_t, setting: Setting, least: u32, most: u32) -> Answer {
    let gpu = owned(device)?;
    if least > most || most == 0 {
        return Err(NvmlError::INVALID_ARGUMENT);
    }
    gpu.set(setting, Some(lock(least, most)));
    Ok(())
}

impl Controls for Library {
    unsafe fn nvmlDeviceSetPersistenceMode(device: nvmlDevice_t, mode: nvmlEnableState_t) -> Answer {
        switch(device, Setting::Persistence, mode)
    }

    unsafe fn nvmlDeviceSetAccountingMode(device: nvmlDevice_t, mode: nvmlEnableState_t) -> Answer {
        switch(device, Setting::Accounting, mode)
    }

    unsafe fn nvmlDeviceClearAccountingPids(device: nvmlDevice_t) -> Answer {
        owned(device).map(|_| ())
    }

    unsafe fn nvmlDeviceSetComputeMode(device: nvmlDevice_t, mode: nvmlComputeMode_t) -> Answer {
        let gpu = owned(device)?;
        match mode {
            NVML_COMPUTEMODE_DEFAULT | NVML_COMPUTEMODE_PROHIBITED | NVML_COMPUTEMODE_EXCLUSIVE_PROCESS => {
                gpu.set(Setting::ComputeMode, Some(u64::from(mode)));
                Ok(())
            }
            NVML_COMPUTEMODE_EXCLUSIVE_THREAD => Err(NvmlError::NOT_SUPPORTED),
            _ => Err(NvmlError::INVALID_ARGUMENT),
        }
    }

    unsafe fn nvmlDeviceSetEccMode(device: nvmlDevice_t, ecc: nvmlEnableState_t) -> Answer {
        ecc::mode(gpu(device)?)?;
        switch(device, Setting::EccPending, ecc)
    }

    unsafe fn nvmlDeviceClearEccErrorCounts(
        device: nvmlDevice_t,
        counter_type: nvmlEccCounterType_t,
    ) -> Answer {
        let gpu = owned(device)?;
        ecc::mode(gpu)?;
        let counters = match counter_type {
            NVML_VOLATILE_ECC => [Counter::CorrectedVolatile, Counter::UncorrectedVolatile],
            NVML_AGGREGATE_ECC => [Counter::CorrectedAggregate, Counter::UncorrectedAggregate],
            _ => return Err(NvmlError::INVALID_ARGUMENT),
        };
        for counter in counters {
            gpu.session.state.reset_counter(gpu.index, counter);
        }
        Ok(())
    }

    unsafe fn nvmlDeviceSetPowerManagementLimit(device: nvmlDevice_t, limit: u32) -> Answer {
        limit_power(device, limit)
    }

    unsafe fn nvmlDeviceSetPowerManagementLimit_v2(
        device: nvmlDevice_t,
        power_value: *mut nvmlPowerValue_v2_t,
    ) -> Answer {
        gpu(device)?;
        let version = passed!(power_value.cast_const().cast::<u32>());
        if version != nvmlPowerValue_v2 {
            return Err(NvmlError::ARGUMENT_VERSION_MISMATCH);
        }
        let value = passed!(power_value.cast_const());
        if u32::from(value.powerScope) != NVML_POWER_SCOPE_GPU {
            return Err(NvmlError::NOT_SUPPORTED);
        }
        limit_power(device, value.powerValueMw)
    }

    unsafe fn nvmlDeviceSetApplicationsClocks(
        device: nvmlDevice_t,
        mem_clock_mhz: u32,
        graphics_clock_mhz: u32,
    ) -> Answer {
        let gpu = owned(device)?;
        if !memory_clocks(gpu).contains(&mem_clock_mhz)
            || !graphics_clocks(gpu, mem_clock_mhz).contains(&graphics_clock_mhz)
        {
            return Err(NvmlError::INVALID_ARGUMENT);
        }
        gpu.set(Setting::MemoryClock, Some(u64::from(mem_clock_mhz)));
        gpu.set(Setting::GraphicsClock, Some(u64::from(graphics_clock_mhz)));
        Ok(())
    }

    unsafe fn nvmlDeviceResetApplicationsClocks(device: nvmlDevice_t) -> Answer {
        let gpu = owned(device)?;
        gpu.set(Setting::MemoryClock, None);
        gpu.set(Setting::GraphicsClock, None);
        Ok(())
    }

    unsafe fn nvmlDeviceSetGpuLockedClocks(
        device: nvmlDevice_t,
        min_gpu_clock_mhz: u32,
        max_gpu_clock_mhz: u32,
    ) -> Answer {
        lock_clocks(device, Setting::LockedGraphics, min_gpu_clock_mhz, max_gpu_clock_mhz)
    }

    unsafe fn nvmlDeviceResetGpuLockedClocks(device: nvmlDevice_t) -> Answer {
        owned(device)?.set(Setting::LockedGraphics, None);
        Ok(())
    }

    unsafe fn nvmlDeviceSetMemoryLockedClocks(
        device: nvmlDevice_t,
        min_mem_clock_mhz: u32,
        max_mem_clock_mhz: u32,
    ) -> Answer {
        lock_clocks(device, Setting::LockedMemory, min_mem_clock_mhz, max_mem_clock_mhz)
    }

    unsafe fn nvmlDeviceResetMemoryLockedClocks(device: nvmlDevice_t) -> Answer {
        owned(device)?.set(Setting::LockedMemory, None);
        Ok(())
    }

    unsafe fn nvmlDeviceSetCpuAffinity(device: nvmlDevice_t) -> Answer {
        let gpu = gpu(device)?;
        let mut cpus = rustix::thread::CpuSet::new();
        for cpu in gpu.card().gpu.cpus.iter().map(|cpu| cpu as usize) {
            if cpu < rustix::thread::CpuSet::MAX_CPU {
                cpus.set(cpu);
            }
        }
        // Fails where the machine has none of the simulated one's processors.
        rustix::thread::sched_setaffinity(None, &cpus).map_err(|_| NvmlError::UNKNOWN)
    }

    unsafe fn nvmlDeviceClearCpuAffinity(device: nvmlDevice_t) -> Answer {
        gpu(device)?;
        let mut cpus = rustix::thread::CpuSet::new();
        (0..rustix::thread::CpuSet::MAX_CPU).for_each(|cpu| cpus.set(cpu));
        rustix::thread::sched_setaffinity(None, &cpus).map_err(|_| NvmlError::UNKNOWN)
    }

    unsafe fn nvmlDeviceClearFieldValues(
        device: nvmlDevice_t,
        values_count: i32,
        values: *mut nvmlFieldValue_t,
    ) -> Answer {
        owned(device)?;
        if values_count <= 0 || values.is_null() {
            return Err(NvmlError::INVALID_ARGUMENT);
        }
        // What could be cleared counts nothing.
        Ok(())
    }
}
