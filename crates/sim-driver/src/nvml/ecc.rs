//! ECC errors, retired pages and remapped rows. Errors occur only in the card's memory, not in its caches.

use super::arguments::{NvmlResult, VisibleGpu, gpu, read_in, write_out};
use super::*;
use crate::profile::Architecture;
use crate::state::{GpuCounter, GpuSetting};

/// Returns the ECC mode, current and after the next reboot.
pub(super) fn mode(gpu: VisibleGpu) -> Result<(u32, u32), NvmlError> {
    if !gpu.profile().memory.ecc {
        return Err(NvmlError::NOT_SUPPORTED);
    }
    Ok((1, gpu.setting(GpuSetting::EccPending).unwrap_or(1) as u32))
}

/// Returns the number of errors of a type, since the last reboot (volatile) or in total (aggregate).
pub(super) fn errors(
    gpu: VisibleGpu,
    kind: nvmlMemoryErrorType_t,
    counter: nvmlEccCounterType_t,
) -> Result<u64, NvmlError> {
    mode(gpu)?;
    let counter = match (kind, counter) {
        (NVML_MEMORY_ERROR_TYPE_CORRECTED, NVML_VOLATILE_ECC) => GpuCounter::CorrectedVolatile,
        (NVML_MEMORY_ERROR_TYPE_UNCORRECTED, NVML_VOLATILE_ECC) => GpuCounter::UncorrectedVolatile,
        (NVML_MEMORY_ERROR_TYPE_CORRECTED, NVML_AGGREGATE_ECC) => GpuCounter::CorrectedAggregate,
        (NVML_MEMORY_ERROR_TYPE_UNCORRECTED, NVML_AGGREGATE_ECC) => GpuCounter::UncorrectedAggregate,
        _ => return Err(NvmlError::INVALID_ARGUMENT),
    };
    Ok(gpu.counter(counter))
}

/// Returns the number of pages retired for a cause, on cards that retire pages.
pub(super) fn retired(gpu: VisibleGpu, cause: nvmlPageRetirementCause_t) -> Result<u32, NvmlError> {
    if cause >= NVML_PAGE_RETIREMENT_CAUSE_COUNT {
        return Err(NvmlError::INVALID_ARGUMENT);
    }
    if gpu.profile().architecture.remaps_rows() {
        return Err(NvmlError::NOT_SUPPORTED);
    }
    let double = cause == NVML_PAGE_RETIREMENT_CAUSE_DOUBLE_BIT_ECC_ERROR;
    Ok(if double { gpu.counter(GpuCounter::RetiredPages) as u32 } else { 0 })
}

/// Returns the number of rows remapped after corrected and uncorrected errors, on cards that remap rows.
pub(super) fn remapped(gpu: VisibleGpu) -> Result<(u32, u32), NvmlError> {
    if !gpu.profile().architecture.remaps_rows() {
        return Err(NvmlError::NOT_SUPPORTED);
    }
    Ok((0, gpu.counter(GpuCounter::RetiredPages) as u32))
}

/// Returns made-up addresses of the retired pages.
fn pages(gpu: VisibleGpu, cause: nvmlPageRetirementCause_t) -> Result<Vec<u64>, NvmlError> {
    Ok((0..u64::from(retired(gpu, cause)?)).map(|page| 0x10_0000 + page * 0x1000).collect())
}

/// Writes page addresses; without an array only their count.
fn write_pages(count: *mut u32, to: *mut u64, list: &[u64]) -> NvmlResult {
    let room = read_in!(count.cast_const());
    if to.is_null() && room == 0 {
        return write_out!(count => list.len() as u32);
    }
    arguments::write_out_list!(count, to, list)
}

impl NvmlEcc for Library {
    unsafe fn nvmlDeviceGetEccMode(
        device: nvmlDevice_t,
        current: *mut nvmlEnableState_t,
        pending: *mut nvmlEnableState_t,
    ) -> NvmlResult {
        let (now, later) = mode(gpu(device)?)?;
        if pending.is_null() {
            return Err(NvmlError::INVALID_ARGUMENT);
        }
        write_out!(current => now, pending => later)
    }

    unsafe fn nvmlDeviceGetDefaultEccMode(
        device: nvmlDevice_t,
        default_mode: *mut nvmlEnableState_t,
    ) -> NvmlResult {
        mode(gpu(device)?)?;
        write_out!(default_mode => NVML_FEATURE_ENABLED)
    }

    unsafe fn nvmlDeviceGetTotalEccErrors(
        device: nvmlDevice_t,
        error_type: nvmlMemoryErrorType_t,
        counter_type: nvmlEccCounterType_t,
        ecc_counts: *mut u64,
    ) -> NvmlResult {
        write_out!(ecc_counts => errors(gpu(device)?, error_type, counter_type)?)
    }

    unsafe fn nvmlDeviceGetDetailedEccErrors(
        device: nvmlDevice_t,
        error_type: nvmlMemoryErrorType_t,
        counter_type: nvmlEccCounterType_t,
        ecc_counts: *mut nvmlEccErrorCounts_t,
    ) -> NvmlResult {
        let gpu = gpu(device)?;
        let deviceMemory = errors(gpu, error_type, counter_type)?;
        if gpu.profile().architecture >= Architecture::Turing {
            return Err(NvmlError::NOT_SUPPORTED);
        }
        write_out!(ecc_counts => nvmlEccErrorCounts_t { deviceMemory, ..Default::default() })
    }

    unsafe fn nvmlDeviceGetMemoryErrorCounter(
        device: nvmlDevice_t,
        error_type: nvmlMemoryErrorType_t,
        counter_type: nvmlEccCounterType_t,
        location_type: nvmlMemoryLocation_t,
        count: *mut u64,
    ) -> NvmlResult {
        let gpu = gpu(device)?;
        let errors = errors(gpu, error_type, counter_type)?;
        // Since Turing, errors of all caches are reported together.
        let joined = gpu.profile().architecture >= Architecture::Turing;
        let there = match location_type {
            NVML_MEMORY_LOCATION_DRAM => errors,
            NVML_MEMORY_LOCATION_SRAM if joined => 0,
            // The CBU detects errors but does not correct them.
            NVML_MEMORY_LOCATION_CBU if !joined && error_type == NVML_MEMORY_ERROR_TYPE_UNCORRECTED => 0,
            NVML_MEMORY_LOCATION_L1_CACHE
            | NVML_MEMORY_LOCATION_L2_CACHE
            | NVML_MEMORY_LOCATION_REGISTER_FILE
            | NVML_MEMORY_LOCATION_TEXTURE_MEMORY
            | NVML_MEMORY_LOCATION_TEXTURE_SHM
                if !joined =>
            {
                0
            }
            location if location < NVML_MEMORY_LOCATION_COUNT => return Err(NvmlError::NOT_SUPPORTED),
            _ => return Err(NvmlError::INVALID_ARGUMENT),
        };
        write_out!(count => there)
    }

    unsafe fn nvmlDeviceGetSramEccErrorStatus(
        device: nvmlDevice_t,
        status: *mut nvmlEccSramErrorStatus_t,
    ) -> NvmlResult {
        let gpu = gpu(device)?;
        let version = read_in!(status.cast_const().cast::<u32>());
        if version != nvmlEccSramErrorStatus_v1 {
            return Err(NvmlError::ARGUMENT_VERSION_MISMATCH);
        }
        mode(gpu)?;
        if gpu.profile().architecture < Architecture::Ampere {
            return Err(NvmlError::NOT_SUPPORTED);
        }
        write_out!(status => nvmlEccSramErrorStatus_t { version, ..Default::default() })
    }

    unsafe fn nvmlDeviceGetRetiredPages(
        device: nvmlDevice_t,
        cause: nvmlPageRetirementCause_t,
        page_count: *mut u32,
        addresses: *mut u64,
    ) -> NvmlResult {
        write_pages(page_count, addresses, &pages(gpu(device)?, cause)?)
    }

    unsafe fn nvmlDeviceGetRetiredPages_v2(
        device: nvmlDevice_t,
        cause: nvmlPageRetirementCause_t,
        page_count: *mut u32,
        addresses: *mut u64,
        timestamps: *mut u64,
    ) -> NvmlResult {
        let gpu = gpu(device)?;
        let pages = pages(gpu, cause)?;
        write_pages(page_count, addresses, &pages)?;
        if !addresses.is_null() {
            let long_ago = gpu.session.wall_micros(0) / 1_000_000;
            write_pages(page_count, timestamps, &vec![long_ago; pages.len()])?;
        }
        Ok(())
    }

    unsafe fn nvmlDeviceGetRetiredPagesPendingStatus(
        device: nvmlDevice_t,
        is_pending: *mut nvmlEnableState_t,
    ) -> NvmlResult {
        retired(gpu(device)?, 0)?;
        write_out!(is_pending => NVML_FEATURE_DISABLED)
    }

    unsafe fn nvmlDeviceGetRemappedRows(
        device: nvmlDevice_t,
        corr_rows: *mut u32,
        unc_rows: *mut u32,
        is_pending: *mut u32,
        failure_occurred: *mut u32,
    ) -> NvmlResult {
        let (corrected, uncorrected) = remapped(gpu(device)?)?;
        write_out!(corr_rows => corrected, unc_rows => uncorrected, is_pending => 0, failure_occurred => 0)
    }

    unsafe fn nvmlDeviceGetRowRemapperHistogram(
        device: nvmlDevice_t,
        values: *mut nvmlRowRemapperHistogramValues_t,
    ) -> NvmlResult {
        let gpu = gpu(device)?;
        let used = remapped(gpu)?.1;
        // The number of banks follows from the width of the memory bus.
        let width = gpu.profile().memory.bus_width;
        let banks = if gpu.profile().compute.capability == 80 { width / 8 } else { width / 2 };
        write_out!(values => nvmlRowRemapperHistogramValues_t {
            max: banks.saturating_sub(used),
            high: used.min(banks),
            ..Default::default()
        })
    }
}
