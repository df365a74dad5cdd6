//! Utilization of a GPU by the container's work.
//!
//! The driver has one value per process; those of the container are added up. Functions without values per process
//! return that sum; functions whose value cannot be split (GPM counters, the bus) return "not supported" rather than
//! what others do.
#![allow(unsafe_code)]

use super::processes::ContainerProcesses;
use super::{DeviceShare, NvmlResult, check, query_list, read_argument, with_share, write_result};
use crate::driver::nvml as driver;
use crate::hook::hooks;
use partage_driver_api::nvml::*;
use std::time::{SystemTime, UNIX_EPOCH};

/// Microseconds that count as "now" in functions without a time: a few of the driver's sampling windows.
const RECENT_WINDOW_US: u64 = 500_000;

/// Utilization of each engine by the container's processes, in percent.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
struct EngineUtilization {
    compute: u32,
    memory: u32,
    encoder: u32,
    decoder: u32,
}

impl EngineUtilization {
    /// Adds up the newest sample of each process.
    fn sum(samples: &[nvmlProcessUtilizationSample_t]) -> Self {
        let mut sum = Self::default();
        for (index, sample) in samples.iter().enumerate() {
            let newer = |other: &&nvmlProcessUtilizationSample_t| {
                other.pid == sample.pid && other.timeStamp > sample.timeStamp
            };
            let again = samples
                .iter()
                .take(index)
                .any(|other| other.pid == sample.pid && other.timeStamp == sample.timeStamp);
            if again || samples.iter().any(|other| newer(&other)) {
                continue;
            }
            let add = |to: &mut u32, percent: u32| *to = to.saturating_add(percent).min(100);
            add(&mut sum.compute, sample.smUtil);
            add(&mut sum.memory, sample.memUtil);
            add(&mut sum.encoder, sample.encUtil);
            add(&mut sum.decoder, sample.decUtil);
        }
        sum
    }

    /// Returns the utilization since a time of the wall clock, in microseconds.
    fn since(share: &DeviceShare, micros: u64) -> Result<Self, nvmlReturn_t> {
        match samples(share, micros) {
            Ok(samples) => Ok(Self::sum(&samples)),
            // A driver without values per process has none that could be returned.
            Err(NVML_ERROR_NOT_SUPPORTED | NVML_ERROR_FUNCTION_NOT_FOUND) => Err(NVML_ERROR_NOT_SUPPORTED),
            Err(code) => Err(code),
        }
    }

    fn recent(share: &DeviceShare) -> Result<Self, nvmlReturn_t> {
        Self::since(share, now().saturating_sub(RECENT_WINDOW_US))
    }
}

/// Returns the wall clock in microseconds, as NVML's time stamps.
fn now() -> u64 {
    let since = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
    u64::try_from(since.as_micros()).unwrap_or(u64::MAX)
}

/// Returns the driver's samples of the container's processes, with the pids that are shown.
pub(super) fn samples(
    share: &DeviceShare,
    seen: u64,
) -> Result<Vec<nvmlProcessUtilizationSample_t>, nvmlReturn_t> {
    let all = query_list(|count, to| {
        // SAFETY: `query_list` passes a `to` that is null or holds `*count` entries.
        unsafe { driver::nvmlDeviceGetProcessUtilization(share.device, to, count, seen) }
    })?;
    let Some(all) = all else { return Ok(Vec::new()) };
    let own = ContainerProcesses::of(share);
    Ok(all
        .into_iter()
        .filter_map(|sample| {
            Some(nvmlProcessUtilizationSample_t { pid: own.visible_pid(sample.pid)?, ..sample })
        })
        .collect())
}

/// Returns the samples in the newer format.
pub(super) fn infos(
    share: &DeviceShare,
    seen: u64,
) -> Result<Vec<nvmlProcessUtilizationInfo_v1_t>, nvmlReturn_t> {
    let all = query_list(|count, to| {
        let mut asked = nvmlProcessesUtilizationInfo_t {
            version: nvmlProcessesUtilizationInfo_v1,
            processSamplesCount: *count,
            lastSeenTimeStamp: seen,
            procUtilArray: to,
        };
        // SAFETY: the pointer is to a local structure, whose array has the stated room.
        let answer = unsafe { driver::nvmlDeviceGetProcessesUtilizationInfo(share.device, &mut asked) };
        *count = asked.processSamplesCount;
        answer
    })?;
    let Some(all) = all else { return Ok(Vec::new()) };
    let own = ContainerProcesses::of(share);
    Ok(all
        .into_iter()
        .filter_map(|info| Some(nvmlProcessUtilizationInfo_v1_t { pid: own.visible_pid(info.pid)?, ..info }))
        .collect())
}

/// Answers a query for one engine's utilization. An engine that is idle is idle for every container.
fn answer_engine(
    device: nvmlDevice_t,
    utilization: *mut u32,
    query: impl Fn() -> nvmlReturn_t,
    own: impl FnOnce(&DeviceShare) -> Result<u32, nvmlReturn_t>,
) -> nvmlReturn_t {
    with_share(device, |share| {
        check(query())?;
        // SAFETY: the call succeeded, so the driver has written there.
        if unsafe { read_argument(utilization.cast_const()) }? == 0 {
            return Ok(());
        }
        let percent = own(&share)?;
        // SAFETY: the driver has written to this address, so it is valid for writes.
        unsafe { write_result(utilization, percent) }
    })
}

/// Returns the utilization of a newer engine, which only the newer format reports per process.
fn newer_engine(
    share: &DeviceShare,
    of: fn(&nvmlProcessUtilizationInfo_v1_t) -> u32,
) -> Result<u32, nvmlReturn_t> {
    let infos = infos(share, now().saturating_sub(RECENT_WINDOW_US)).map_err(|_| NVML_ERROR_NOT_SUPPORTED)?;
    Ok(infos.iter().fold(0u32, |sum, info| sum.saturating_add(of(info))).min(100))
}

/// Returns the engine that samples are about; `None` if they are about the GPU itself.
fn engine_of_samples(kind: nvmlSamplingType_t) -> Option<fn(&EngineUtilization) -> u32> {
    match kind {
        NVML_GPU_UTILIZATION_SAMPLES => Some(|engines| engines.compute),
        NVML_MEMORY_UTILIZATION_SAMPLES => Some(|engines| engines.memory),
        NVML_ENC_UTILIZATION_SAMPLES => Some(|engines| engines.encoder),
        NVML_DEC_UTILIZATION_SAMPLES => Some(|engines| engines.decoder),
        _ => None,
    }
}

/// Converts a percentage to one of NVML's value types.
fn value(kind: nvmlValueType_t, percent: u32) -> nvmlValue_t {
    match kind {
        NVML_VALUE_TYPE_DOUBLE => nvmlValue_t { dVal: f64::from(percent) },
        // All integer types begin at the same byte.
        _ => nvmlValue_t { ullVal: u64::from(percent) },
    }
}

/// Replaces each of the program's samples by the container's mean over their time: the driver has no finer value per
/// process.
///
/// # Safety
/// The driver must just have answered with `*count` samples of this kind.
unsafe fn write_mean(
    share: &DeviceShare,
    of: fn(&EngineUtilization) -> u32,
    seen: u64,
    kind: *const nvmlValueType_t,
    count: *const u32,
    samples: *mut nvmlSample_t,
) -> NvmlResult {
    if samples.is_null() {
        return Ok(());
    }
    // SAFETY: the driver has written both, by this function's safety contract.
    let (kind, count) = (unsafe { read_argument(kind) }?, unsafe { read_argument(count) }?);
    let percent = of(&EngineUtilization::since(share, seen)?);
    for index in 0..count as usize {
        let place = samples.wrapping_add(index);
        // SAFETY: the driver has written this sample, by this function's safety contract.
        let sample = unsafe { place.read_unaligned() };
        // SAFETY: the driver has written this sample, so it is valid for writes.
        unsafe { place.write_unaligned(nvmlSample_t { sampleValue: value(kind, percent), ..sample }) };
    }
    Ok(())
}

hooks! { nvml;
    /// Returns the recent utilization by the container's processes.
    fn nvmlDeviceGetUtilizationRates(device: nvmlDevice_t, utilization: *mut nvmlUtilization_t) |next, _variant| {
        // SAFETY: the application's arguments, passed on unchanged under the driver function's own contract.
        let query = || unsafe { next(device, utilization) };
        with_share(device, |share| {
            check(query())?;
            let EngineUtilization { compute, memory, .. } = EngineUtilization::recent(&share)?;
            // SAFETY: the call succeeded, so the driver has written there.
            unsafe { write_result(utilization, nvmlUtilization_t { gpu: compute, memory }) }
        })
    }

    fn nvmlDeviceGetEncoderUtilization(
        device: nvmlDevice_t,
        utilization: *mut u32,
        sampling_period_us: *mut u32,
    ) |next, _variant| {
        // SAFETY: the application's arguments, passed on unchanged under the driver function's own contract.
        let query = || unsafe { next(device, utilization, sampling_period_us) };
        answer_engine(device, utilization, query, |share| Ok(EngineUtilization::recent(share)?.encoder))
    }

    fn nvmlDeviceGetDecoderUtilization(
        device: nvmlDevice_t,
        utilization: *mut u32,
        sampling_period_us: *mut u32,
    ) |next, _variant| {
        // SAFETY: the application's arguments, passed on unchanged under the driver function's own contract.
        let query = || unsafe { next(device, utilization, sampling_period_us) };
        answer_engine(device, utilization, query, |share| Ok(EngineUtilization::recent(share)?.decoder))
    }

    fn nvmlDeviceGetJpgUtilization(
        device: nvmlDevice_t,
        utilization: *mut u32,
        sampling_period_us: *mut u32,
    ) |next, _variant| {
        // SAFETY: the application's arguments, passed on unchanged under the driver function's own contract.
        let query = || unsafe { next(device, utilization, sampling_period_us) };
        answer_engine(device, utilization, query, |share| newer_engine(share, |info| info.jpgUtil))
    }

    fn nvmlDeviceGetOfaUtilization(
        device: nvmlDevice_t,
        utilization: *mut u32,
        sampling_period_us: *mut u32,
    ) |next, _variant| {
        // SAFETY: the application's arguments, passed on unchanged under the driver function's own contract.
        let query = || unsafe { next(device, utilization, sampling_period_us) };
        answer_engine(device, utilization, query, |share| newer_engine(share, |info| info.ofaUtil))
    }

    /// Returns percentages by domain. The bus's cannot be split, and is reported as not present.
    fn nvmlDeviceGetDynamicPstatesInfo(
        device: nvmlDevice_t,
        dynamic_pstates_info: *mut nvmlGpuDynamicPstatesInfo_t,
    ) |next, _variant| {
        // SAFETY: the application's arguments, passed on unchanged under the driver function's own contract.
        let query = || unsafe { next(device, dynamic_pstates_info) };
        with_share(device, |share| {
            check(query())?;
            // SAFETY: the call succeeded, so the driver has written there.
            let mut info = unsafe { read_argument(dynamic_pstates_info.cast_const()) }?;
            let own = EngineUtilization::recent(&share)?;
            let percents = [Some(own.compute), Some(own.memory), Some(own.encoder.max(own.decoder))];
            for (domain, percent) in info.utilization.iter_mut().zip(percents.into_iter().chain([None; 5])) {
                domain.percentage = percent.unwrap_or(0);
                domain.bIsPresent &= u32::from(percent.is_some());
            }
            // SAFETY: the driver has written to this address, so it is valid for writes.
            unsafe { write_result(dynamic_pstates_info, info) }
        })
    }

    /// Returns the container's mean utilization over the requested time. Power and clocks are those of the GPU.
    fn nvmlDeviceGetSamples(
        device: nvmlDevice_t,
        kind: nvmlSamplingType_t,
        last_seen_time_stamp: u64,
        sample_val_type: *mut nvmlValueType_t,
        sample_count: *mut u32,
        samples: *mut nvmlSample_t,
    ) |next, _variant| {
        // SAFETY: the application's arguments, passed on unchanged under the driver function's own contract.
        let query = || unsafe {
            next(device, kind, last_seen_time_stamp, sample_val_type, sample_count, samples)
        };
        with_share(device, |share| {
            if matches!(kind, NVML_JPG_UTILIZATION_SAMPLES | NVML_OFA_UTILIZATION_SAMPLES) {
                return Err(NVML_ERROR_NOT_SUPPORTED);
            }
            check(query())?;
            let Some(of) = engine_of_samples(kind) else { return Ok(()) };
            // SAFETY: the call succeeded, so the driver has written the samples.
            unsafe { write_mean(&share, of, last_seen_time_stamp, sample_val_type, sample_count, samples) }
        })
    }

    /// GPM counters are those of the whole GPU, and cannot be split.
    fn nvmlGpmQueryDeviceSupport(device: nvmlDevice_t, gpm_support: *mut nvmlGpmSupport_t) |next, _variant| {
        // SAFETY: the application's arguments, passed on unchanged under the driver function's own contract.
        let query = || unsafe { next(device, gpm_support) };
        with_share(device, |_| {
            check(query())?;
            // SAFETY: the call succeeded, so the driver has written there.
            let support = unsafe { read_argument(gpm_support.cast_const()) }?;
            // SAFETY: the driver has written to this address, so it is valid for writes.
            unsafe { write_result(gpm_support, nvmlGpmSupport_t { isSupportedDevice: 0, ..support }) }
        })
    }

    fn nvmlGpmSampleGet(device: nvmlDevice_t, gpm_sample: nvmlGpmSample_t) |next, _variant| {
        let _ = gpm_sample;
        with_share(device, |_| Err(NVML_ERROR_NOT_SUPPORTED))
    }

    fn nvmlGpmMigSampleGet(
        device: nvmlDevice_t,
        gpu_instance_id: u32,
        gpm_sample: nvmlGpmSample_t,
    ) |next, _variant| {
        let _ = (gpu_instance_id, gpm_sample);
        with_share(device, |_| Err(NVML_ERROR_NOT_SUPPORTED))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn sample(pid: u32, time: u64, percent: u32) -> nvmlProcessUtilizationSample_t {
        nvmlProcessUtilizationSample_t {
            pid,
            timeStamp: time,
            smUtil: percent,
            memUtil: percent / 2,
            encUtil: 0,
            decUtil: 1,
        }
    }

    #[test]
    fn newest_sample_of_each_process_is_summed() {
        let samples = [sample(1, 10, 90), sample(2, 10, 30), sample(1, 20, 20), sample(2, 10, 30)];
        let sum = EngineUtilization::sum(&samples);
        assert_eq!(sum, EngineUtilization { compute: 50, memory: 25, encoder: 0, decoder: 2 });
        let sum = EngineUtilization::sum(&[sample(1, 1, u32::MAX), sample(2, 1, 80)]);
        assert_eq!(sum.compute, 100, "never more than all");
        assert_eq!(EngineUtilization::sum(&[]), EngineUtilization::default());
    }
}
