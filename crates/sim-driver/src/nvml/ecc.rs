//! Memory errors, retired pages, remapped rows. All errors happen in the card's memory; its caches are sound.

use super::call::{Answer, Gpu, answer, gpu, passed};
use super::*;
use crate::profile::Architecture;
use crate::state::{Counter, Setting};

/// Whether errors are corrected, now and after the next restart.
pub(super) fn mode(gpu: Gpu) -> Result<(u32, u32), NvmlError> {
    if !gpu.profile().memory.ecc {
        return Err(NvmlError::NOT_SUPPORTED);
    }
    Ok((1, gpu.setting(Setting::EccPending).unwrap_or(1) as u32))
}

/// Errors of a kind, since the last restart or ever.
pub(super) fn errors(
    gpu: Gpu,
    kind: nvmlMemoryErrorType_t,
    counter: nvmlEccCounterType_t,
) -> Result<u64, NvmlError> {
    mode(gpu)?;
    let counter = match (kind, counter) {
        (NVML_MEMORY_ERROR_TYPE_CORRECTED, NVML_VOLATILE_ECC) => Counter::CorrectedVolatile,
        (NVML_MEMORY_ERROR_TYPE_UNCORRECTED, NVML_VOLATILE_ECC) => Counter::UncorrectedVolatile,
        (NVML_MEMORY_ERROR_TYPE_CORRECTED, NVML_AGGREGATE_ECC) => Counter::CorrectedAggregate,
        (NVML_MEMORY_ERROR_TYPE_UNCORRECTED, NVML_AGGREGATE_ECC) => Counter::UncorrectedAggregate,
        _ => return Err(NvmlError::INVALID_ARGUMENT),
    };
    Ok(gpu.counter(counter))
}

/// Pages that were retired for a cause, on cards that retire pages.
pub(super) fn retired(gpu: Gpu, cause: nvmlPageRetirementCause_t) -> Result<u32, NvmlError> {
    if cause >= NVML_PAGE_RETIREMENT_CAUSE_COUNT {
        return Err(NvmlError::INVALID_ARGUMENT);
    }
    if gpu.profile().architecture.remaps_rows() {
        return Err(NvmlError::NOT_SUPPORTED);
    }
    let double = cause == NVML_PAGE_RETIREMENT_CAUSE_DOUBLE_BIT_ECC_ERROR;
    Ok(if double { gpu.counter(Counter::RetiredPages) as u32 } else { 0 })
}

/// Rows that were remapped after corrected and uncorrected errors, on cards that remap rows.
pub(super) fn remapped(gpu: Gpu) -> Result<(u32, u32), NvmlError> {
    if !gpu.profile().architecture.remaps_rows() {
        return Err(NvmlError::NOT_SUPPORTED);
    }
    Ok((0, gpu.counter(Counter::RetiredPages) as u32))
}

/// Addresses of retired pages: as good as any.
fn pages(gpu: Gpu, cause: nvmlPageRetirementCause_t) -> Result<Vec<u64>, NvmlError> {
    Ok((0..u64::from(retired(gpu, cause)?)).map(|page| 0x10_0000 + page * 0x1000).collect())
}

/// Puts the addresses; without an array only their count.
fn put_pages(count: *mut u32, to: *mut u64, list: &[u64]) -> Answer {
    let room = passed!(count.cast_const());
    if to.is_null() && room == 0 {
        return answer!(count => list.len() as u32);
    }
    call::answer_list!(count, to, list)
}

impl Ecc for Library {
    unsafe fn nvmlDeviceGetEccMode(
        device: nvmlDevice_t,
        current: *mut nvmlEnableState_t,
        pending: *mut nvmlEnableState_t,
    ) -> Answer {
        let (now, later) = mode(gpu(device)?)?;
        if pending.is_null() {
            return Err(NvmlError::INVALID_ARGUMENT);
        }
        answer!(current => now, pending => later)
    }

    unsafe fn nvmlDeviceGetDefaultEccMode(
        device: nvmlDevice_t,
        default_mode: *mut nvmlEnableState_t,
    ) -> Answer {
        mode(gpu(device)?)?;
        answer!(default_mode => NVML_FEATURE_ENABLED)
    }

    unsafe fn nvmlDeviceGetTotalEccErrors(
        device: nvmlDevice_t,
        error_type: nvmlMemoryErrorType_t,
        counter_type: nvmlEccCounterType_t,
        ecc_counts: *mut u64,
    ) -> Answer {
        answer!(ecc_counts => errors(gpu(device)?, error_type, counter_type)?)
    }

    unsafe fn nvmlDeviceGetDetailedEccErrors(
        device: nvmlDevice_t,
        error_type: nvmlMemoryErrorType_t,
        counter_type: nvmlEccCounterType_t,
        ecc_counts: *mut nvmlEccErrorCounts_t,
    ) -> Answer {
        let gpu = gpu(device)?;
        let deviceMemory = errors(gpu, error_type, counter_type)?;
        if gpu.profile().architecture >= Architecture::Turing {
            return Err(NvmlError::NOT_SUPPORTED);
        }
        answer!(ecc_counts => nvmlEccErrorCounts_t { deviceMemory, ..Default::default() })
    }

    unsafe fn nvmlDeviceGetMemoryErrorCounter(
        device: nvmlDevice_t,
        error_type: nvmlMemoryErrorType_t,
        counter_type: nvmlEccCounterType_t,
        location_type: nvmlMemoryLocation_t,
        count: *mut u64,
    ) -> Answer {
        let gpu = gpu(device)?;
        let errors = errors(gpu, error_type, counter_type)?;
        // Since Turing all caches are told as one.
        let joined = gpu.profile().architecture >= Architecture::Turing;
        let there = match location_type {
            NVML_MEMORY_LOCATION_DRAM => errors,
            NVML_MEMORY_LOCATION_SRAM if joined => 0,
            // These caches can tell, but not correct.
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
        answer!(count => there)
    }

    unsafe fn nvmlDeviceGetSramEccErrorStatus(
        device: nvmlDevice_t,
        status: *mut nvmlEccSramErrorStatus_t,
    ) -> Answer {
        let gpu = gpu(device)?;
        let version = passed!(status.cast_const().cast::<u32>());
        if version != nvmlEccSramErrorStatus_v1 {
            return Err(NvmlError::ARGUMENT_VERSION_MISMATCH);
        }
        mode(gpu)?;
        if gpu.profile().architecture < Architecture::Ampere {
            return Err(NvmlError::NOT_SUPPORTED);
        }
        answer!(status => nvmlEccSramErrorStatus_t { version, ..Default::default() })
    }

    unsafe fn nvmlDeviceGetRetiredPages(
        device: nvmlDevice_t,
        cause: nvmlPageRetirementCause_t,
        page_count: *mut u32,
        addresses: *mut u64,
    ) -> Answer {
        put_pages(page_count, addresses, &pages(gpu(device)?, cause)?)
    }

    unsafe fn nvmlDeviceGetRetiredPages_v2(
        device: nvmlDevice_t,
        cause: nvmlPageRetirementCause_t,
        page_count: *mut u32,
        addresses: *mut u64,
        timestamps: *mut u64,
    ) -> Answer {
        let gpu = gpu(device)?;
        let pages = pages(gpu, cause)?;
        put_pages(page_count, addresses, &pages)?;
        if !addresses.is_null() {
            let long_ago = gpu.session.wall_micros(0) / 1_000_000;
            put_pages(page_count, timestamps, &vec![long_ago; pages.len()])?;
        }
        Ok(())
    }

    unsafe fn nvmlDeviceGetRetiredPagesPendingStatus(
        device: nvmlDevice_t,
        is_pending: *mut nvmlEnableState_t,
    ) -> Answer {
        retired(gpu(device)?, 0)?;
        answer!(is_pending => NVML_FEATURE_DISABLED)
    }

    unsafe fn nvmlDeviceGetRemappedRows(
        device: nvmlDevice_t,
        corr_rows: *mut u32,
        unc_rows: *mut u32,
        is_pending: *mut u32,
        failure_occurred: *mut u32,
    ) -> Answer {
        let (corrected, uncorrected) = remapped(gpu(device)?)?;
        answer!(corr_rows => corrected, unc_rows => uncorrected, is_pending => 0, failure_occurred => 0)
    }

    unsafe fn nvmlDeviceGetRowRemapperHistogram(
        device: nvmlDevice_t,
        values: *mut nvmlRowRemapperHistogramValues_t,
    ) -> Answer {
        let gpu = gpu(device)?;
        let used = remapped(gpu)?.1;
        // Banks follow the width of the bus.
        let width = gpu.profile().memory.bus_width;
        let banks = if gpu.profile().compute.capability == 80 { width / 8 } else { width / 2 };
        answer!(values => nvmlRowRemapperHistogramValues_t {
            max: banks.saturating_sub(used),
            high: used.min(banks),
            ..Default::default()
        })
    }
}
