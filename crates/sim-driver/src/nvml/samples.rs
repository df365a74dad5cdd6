//! What a card was seen doing: the samples of the last windows.

use super::call::{Answer, Gpu, answer, answer_list, passed};
use super::reading::{Clock, Reading, memory_share};
use super::*;

/// Samples that are kept.
const KEPT: u32 = 63;

/// Answers `nvmlDeviceGetSamples`.
///
/// # Safety
/// The pointers are null or may be written to; `samples` has room for `*count`.
pub(super) unsafe fn put(
    gpu: Gpu,
    kind: nvmlSamplingType_t,
    seen: u64,
    value_kind: *mut nvmlValueType_t,
    count: *mut u32,
    samples: *mut nvmlSample_t,
) -> Answer {
    if kind >= NVML_SAMPLINGTYPE_COUNT {
        return Err(NvmlError::INVALID_ARGUMENT);
    }
    if kind == NVML_MODULE_POWER_SAMPLES {
        return Err(NvmlError::NOT_SUPPORTED);
    }
    let room = passed!(count.cast_const());
    answer!(value_kind => NVML_VALUE_TYPE_UNSIGNED_INT)?;
    if samples.is_null() {
        return answer!(count => KEPT);
    }
    if room == 0 {
        return Err(NvmlError::INVALID_ARGUMENT);
    }
    let state = &gpu.session.state;
    let windows = state.windows(gpu.index, None, gpu.session.instant(seen));
    if windows.is_empty() {
        return Err(NvmlError::NOT_FOUND);
    }
    let now = Reading::of(gpu);
    let value = |load: u64| {
        let then = now.with_load(load);
        match kind {
            NVML_TOTAL_POWER_SAMPLES => then.power(),
            NVML_GPU_UTILIZATION_SAMPLES => (load / 10) as u32,
            NVML_MEMORY_UTILIZATION_SAMPLES => (memory_share(load) / 10) as u32,
            NVML_PROCESSOR_CLK_SAMPLES => then.clock(Clock::Graphics),
            NVML_MEMORY_CLK_SAMPLES => then.clock(Clock::Memory),
            // Encoders and their like are never used.
            _ => 0,
        }
    };
    // The newest ones, if there is not room for all.
    let fitting = windows.len().saturating_sub(room as usize);
    let list: Vec<nvmlSample_t> = windows[fitting..]
        .iter()
        .map(|&(end, load)| nvmlSample_t {
            timeStamp: gpu.session.wall_micros(end),
            sampleValue: nvmlValue_t { ullVal: u64::from(value(load)) },
        })
        .collect();
    answer_list!(count, samples, list)
}
