//! Samples of the last utilization windows.

use super::arguments::{NvmlResult, VisibleGpu, read_in, write_out, write_out_list};
use super::sensors::{ClockDomain, SensorReading, memory_share};
use super::*;

/// Number of samples that the buffer holds.
const MAX_SAMPLES: u32 = 63;

/// Writes the samples that `nvmlDeviceGetSamples` returns.
///
/// # Safety
/// The pointers are null or valid for writes, and `samples` has room for `*count` entries.
pub(super) unsafe fn write_samples(
    gpu: VisibleGpu,
    kind: nvmlSamplingType_t,
    seen: u64,
    value_kind: *mut nvmlValueType_t,
    count: *mut u32,
    samples: *mut nvmlSample_t,
) -> NvmlResult {
    if kind >= NVML_SAMPLINGTYPE_COUNT {
        return Err(NvmlError::INVALID_ARGUMENT);
    }
    if kind == NVML_MODULE_POWER_SAMPLES {
        return Err(NvmlError::NOT_SUPPORTED);
    }
    let room = read_in!(count.cast_const());
    write_out!(value_kind => NVML_VALUE_TYPE_UNSIGNED_INT)?;
    if samples.is_null() {
        return write_out!(count => MAX_SAMPLES);
    }
    if room == 0 {
        return Err(NvmlError::INVALID_ARGUMENT);
    }
    let state = &gpu.session.state;
    let windows = state.windows(gpu.index, None, gpu.session.instant(seen));
    if windows.is_empty() {
        return Err(NvmlError::NOT_FOUND);
    }
    let now = SensorReading::read(gpu);
    let value = |load: u64| {
        let then = now.with_load(load);
        match kind {
            NVML_TOTAL_POWER_SAMPLES => then.power(),
            NVML_GPU_UTILIZATION_SAMPLES => (load / 10) as u32,
            NVML_MEMORY_UTILIZATION_SAMPLES => (memory_share(load) / 10) as u32,
            NVML_PROCESSOR_CLK_SAMPLES => then.clock(ClockDomain::Graphics),
            NVML_MEMORY_CLK_SAMPLES => then.clock(ClockDomain::Memory),
            // Encoders, decoders and other engines are never used.
            _ => 0,
        }
    };
    // Keeps the newest ones if the array is too small.
    let fitting = windows.len().saturating_sub(room as usize);
    let list: Vec<nvmlSample_t> = windows[fitting..]
        .iter()
        .map(|&(end, load)| nvmlSample_t {
            timeStamp: gpu.session.wall_micros(end),
            sampleValue: nvmlValue_t { ullVal: u64::from(value(load)) },
        })
        .collect();
    write_out_list!(count, samples, list)
}
