//! How busy a GPU is with the container's work.
//!
//! The driver has one figure per process, of which the container's own add up. Functions without one per process tell that
//! sum; those whose figure cannot be split (GPM's counters, the bus) say that they are not supported, rather than what others
//! do.
#![allow(unsafe_code)]

use super::processes::Container;
use super::{Answer, Share, check, everything, put, take, told};
use crate::driver::nvml as real;
use crate::hook::hooks;
use partage_driver_api::nvml::*;
use std::time::{SystemTime, UNIX_EPOCH};

/// "Now" in functions without a time: the last half second, which is some of the driver's windows.
const LATELY: u64 = 500_000;

/// What the container's processes had of each engine, in percent.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
struct Engines {
    compute: u32,
    memory: u32,
    encoder: u32,
    decoder: u32,
}

impl Engines {
    /// The newest sample of each process, added up.
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

    /// Since an instant of the wall clock, in microseconds.
    fn since(share: &Share, micros: u64) -> Result<Self, nvmlReturn_t> {
        match samples(share, micros) {
            Ok(samples) => Ok(Self::sum(&samples)),
            // A driver that has no figures per process has none that could be told.
            Err(NVML_ERROR_NOT_SUPPORTED | NVML_ERROR_FUNCTION_NOT_FOUND) => Err(NVML_ERROR_NOT_SUPPORTED),
            Err(code) => Err(code),
        }
    }

    fn lately(share: &Share) -> Result<Self, nvmlReturn_t> {
        Self::since(share, now().saturating_sub(LATELY))
    }
}

/// Microseconds of the wall clock, as NVML stamps.
fn now() -> u64 {
    let since = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
    u64::try_from(since.as_micros()).unwrap_or(u64::MAX)
}

/// The driver's samples of the container's processes, under the pids that are shown.
pub(super) fn samples(share: &Share, seen: u64) -> Result<Vec<nvmlProcessUtilizationSample_t>, nvmlReturn_t> {
    let all = everything(|count, to| {
        // SAFETY: room as it is said.
        unsafe { real::nvmlDeviceGetProcessUtilization(share.device, to, count, seen) }
    })?;
    let Some(all) = all else { return Ok(Vec::new()) };
    let own = Container::of(share);
    Ok(all
        .into_iter()
        .filter_map(|sample| Some(nvmlProcessUtilizationSample_t { pid: own.shown(sample.pid)?, ..sample }))
        .collect())
}

/// The same in the newer form.
pub(super) fn infos(share: &Share, seen: u64) -> Result<Vec<nvmlProcessUtilizationInfo_v1_t>, nvmlReturn_t> {
    let all = everything(|count, to| {
        let mut asked = nvmlProcessesUtilizationInfo_t {
            version: nvmlProcessesUtilizationInfo_v1,
            processSamplesCount: *count,
            lastSeenTimeStamp: seen,
            procUtilArray: to,
        };
        // SAFETY: a structure of ours, with the room that it says.
        let answer = unsafe { real::nvmlDeviceGetProcessesUtilizationInfo(share.device, &mut asked) };
        *count = asked.processSamplesCount;
        answer
    })?;
    let Some(all) = all else { return Ok(Vec::new()) };
    let own = Container::of(share);
    Ok(all
        .into_iter()
        .filter_map(|info| Some(nvmlProcessUtilizationInfo_v1_t { pid: own.shown(info.pid)?, ..info }))
        .collect())
}

/// An engine's figure and the period it is of. One that is idle is idle for everybody.
fn engine(
    device: nvmlDevice_t,
    utilization: *mut u32,
    ask: impl Fn() -> nvmlReturn_t,
    own: impl FnOnce(&Share) -> Result<u32, nvmlReturn_t>,
) -> nvmlReturn_t {
    told(device, |share| {
        check(ask())?;
        // SAFETY: the driver has just written there.
        if unsafe { take(utilization.cast_const()) }? == 0 {
            return Ok(());
        }
        let percent = own(&share)?;
        // SAFETY: the same place.
        unsafe { put(utilization, percent) }
    })
}

/// The newer engines, which only the newer form tells by process.
fn newer_engine(share: &Share, of: fn(&nvmlProcessUtilizationInfo_v1_t) -> u32) -> Result<u32, nvmlReturn_t> {
    let infos = infos(share, now().saturating_sub(LATELY)).map_err(|_| NVML_ERROR_NOT_SUPPORTED)?;
    Ok(infos.iter().fold(0u32, |sum, info| sum.saturating_add(of(info))).min(100))
}

/// Which engine samples are of; none where they are of the card itself.
fn sampled(kind: nvmlSamplingType_t) -> Option<fn(&Engines) -> u32> {
    match kind {
        NVML_GPU_UTILIZATION_SAMPLES => Some(|engines| engines.compute),
        NVML_MEMORY_UTILIZATION_SAMPLES => Some(|engines| engines.memory),
        NVML_ENC_UTILIZATION_SAMPLES => Some(|engines| engines.encoder),
        NVML_DEC_UTILIZATION_SAMPLES => Some(|engines| engines.decoder),
        _ => None,
    }
}

/// A percentage in one of NVML's kinds of value.
fn value(kind: nvmlValueType_t, percent: u32) -> nvmlValue_t {
    match kind {
        NVML_VALUE_TYPE_DOUBLE => nvmlValue_t { dVal: f64::from(percent) },
        // The whole numbers begin at the same byte.
        _ => nvmlValue_t { ullVal: u64::from(percent) },
    }
}

/// The program's samples, each with the container's mean of their time: the driver has no finer one by process.
///
/// # Safety
/// The driver has just answered with `*count` samples of this kind.
unsafe fn put_mean(
    share: &Share,
    of: fn(&Engines) -> u32,
    seen: u64,
    kind: *const nvmlValueType_t,
    count: *const u32,
    samples: *mut nvmlSample_t,
) -> Answer {
    if samples.is_null() {
        return Ok(());
    }
    // SAFETY: the driver has just written there.
    let (kind, count) = (unsafe { take(kind) }?, unsafe { take(count) }?);
    let percent = of(&Engines::since(share, seen)?);
    for index in 0..count as usize {
        let place = samples.wrapping_add(index);
        // SAFETY: the driver has just written this one.
        let sample = unsafe { place.read_unaligned() };
        // SAFETY: the same one.
        unsafe { place.write_unaligned(nvmlSample_t { sampleValue: value(kind, percent), ..sample }) };
    }
    Ok(())
}

hooks! { nvml;
    /// What the container's processes used, lately.
    fn nvmlDeviceGetUtilizationRates(device: nvmlDevice_t, utilization: *mut nvmlUtilization_t) |next, _variant| {
        // SAFETY: the program's promise.
        let ask = || unsafe { next(device, utilization) };
        told(device, |share| {
            check(ask())?;
            let Engines { compute, memory, .. } = Engines::lately(&share)?;
            // SAFETY: the driver has just written there.
            unsafe { put(utilization, nvmlUtilization_t { gpu: compute, memory }) }
        })
    }

    fn nvmlDeviceGetEncoderUtilization(
        device: nvmlDevice_t,
        utilization: *mut u32,
        sampling_period_us: *mut u32,
    ) |next, _variant| {
        // SAFETY: the program's promise.
        let ask = || unsafe { next(device, utilization, sampling_period_us) };
        engine(device, utilization, ask, |share| Ok(Engines::lately(share)?.encoder))
    }

    fn nvmlDeviceGetDecoderUtilization(
        device: nvmlDevice_t,
        utilization: *mut u32,
        sampling_period_us: *mut u32,
    ) |next, _variant| {
        // SAFETY: the program's promise.
        let ask = || unsafe { next(device, utilization, sampling_period_us) };
        engine(device, utilization, ask, |share| Ok(Engines::lately(share)?.decoder))
    }

    fn nvmlDeviceGetJpgUtilization(
        device: nvmlDevice_t,
        utilization: *mut u32,
        sampling_period_us: *mut u32,
    ) |next, _variant| {
        // SAFETY: the program's promise.
        let ask = || unsafe { next(device, utilization, sampling_period_us) };
        engine(device, utilization, ask, |share| newer_engine(share, |info| info.jpgUtil))
    }

    fn nvmlDeviceGetOfaUtilization(
        device: nvmlDevice_t,
        utilization: *mut u32,
        sampling_period_us: *mut u32,
    ) |next, _variant| {
        // SAFETY: the program's promise.
        let ask = || unsafe { next(device, utilization, sampling_period_us) };
        engine(device, utilization, ask, |share| newer_engine(share, |info| info.ofaUtil))
    }

    /// Percentages by domain. The bus's cannot be split, and is then not present.
    fn nvmlDeviceGetDynamicPstatesInfo(
        device: nvmlDevice_t,
        dynamic_pstates_info: *mut nvmlGpuDynamicPstatesInfo_t,
    ) |next, _variant| {
        // SAFETY: the program's promise.
        let ask = || unsafe { next(device, dynamic_pstates_info) };
        told(device, |share| {
            check(ask())?;
            // SAFETY: the driver has just written there.
            let mut info = unsafe { take(dynamic_pstates_info.cast_const()) }?;
            let own = Engines::lately(&share)?;
            let percents = [Some(own.compute), Some(own.memory), Some(own.encoder.max(own.decoder))];
            for (domain, percent) in info.utilization.iter_mut().zip(percents.into_iter().chain([None; 5])) {
                domain.percentage = percent.unwrap_or(0);
                domain.bIsPresent &= u32::from(percent.is_some());
            }
            // SAFETY: the same place.
            unsafe { put(dynamic_pstates_info, info) }
        })
    }

    /// Of utilisation: the container's mean of the time that is asked for. Power and clocks are the card's.
    fn nvmlDeviceGetSamples(
        device: nvmlDevice_t,
        kind: nvmlSamplingType_t,
        last_seen_time_stamp: u64,
        sample_val_type: *mut nvmlValueType_t,
        sample_count: *mut u32,
        samples: *mut nvmlSample_t,
    ) |next, _variant| {
        // SAFETY: the program's promise.
        let ask = || unsafe {
            next(device, kind, last_seen_time_stamp, sample_val_type, sample_count, samples)
        };
        told(device, |share| {
            if matches!(kind, NVML_JPG_UTILIZATION_SAMPLES | NVML_OFA_UTILIZATION_SAMPLES) {
                return Err(NVML_ERROR_NOT_SUPPORTED);
            }
            check(ask())?;
            let Some(of) = sampled(kind) else { return Ok(()) };
            // SAFETY: the driver has just answered.
            unsafe { put_mean(&share, of, last_seen_time_stamp, sample_val_type, sample_count, samples) }
        })
    }

    /// Its counters are the whole card's, and nothing splits them.
    fn nvmlGpmQueryDeviceSupport(device: nvmlDevice_t, gpm_support: *mut nvmlGpmSupport_t) |next, _variant| {
        // SAFETY: the program's promise.
        let ask = || unsafe { next(device, gpm_support) };
        told(device, |_| {
            check(ask())?;
            // SAFETY: the driver has just written there.
            let support = unsafe { take(gpm_support.cast_const()) }?;
            // SAFETY: the same place.
            unsafe { put(gpm_support, nvmlGpmSupport_t { isSupportedDevice: 0, ..support }) }
        })
    }

    fn nvmlGpmSampleGet(device: nvmlDevice_t, gpm_sample: nvmlGpmSample_t) |next, _variant| {
        let _ = gpm_sample;
        told(device, |_| Err(NVML_ERROR_NOT_SUPPORTED))
    }

    fn nvmlGpmMigSampleGet(
        device: nvmlDevice_t,
        gpu_instance_id: u32,
        gpm_sample: nvmlGpmSample_t,
    ) |next, _variant| {
        let _ = (gpu_instance_id, gpm_sample);
        told(device, |_| Err(NVML_ERROR_NOT_SUPPORTED))
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
    fn the_newest_of_each_process_is_added() {
        let samples = [sample(1, 10, 90), sample(2, 10, 30), sample(1, 20, 20), sample(2, 10, 30)];
        let sum = Engines::sum(&samples);
        assert_eq!(sum, Engines { compute: 50, memory: 25, encoder: 0, decoder: 2 });
        let sum = Engines::sum(&[sample(1, 1, u32::MAX), sample(2, 1, 80)]);
        assert_eq!(sum.compute, 100, "never more than all");
        assert_eq!(Engines::sum(&[]), Engines::default());
    }
}
