//! Sessions of the encoder and of frame capture: those of the container's processes.
#![allow(unsafe_code)]

use super::processes::ContainerProcesses;
use super::{DeviceShare, query_list, with_share, write_list, write_result};
use crate::driver::nvml as driver;
use crate::hook::hooks;
use partage_driver_api::nvml::*;

/// Returns the container's encoder sessions, with the pids that are shown.
fn encoder_sessions(share: &DeviceShare) -> Result<Vec<nvmlEncoderSessionInfo_t>, nvmlReturn_t> {
    // SAFETY: `query_list` passes a `to` that is null or holds `*count` entries.
    let all =
        query_list(|count, to| unsafe { driver::nvmlDeviceGetEncoderSessions(share.device, count, to) })?;
    let own = ContainerProcesses::of(share);
    let shown = |session: nvmlEncoderSessionInfo_t| {
        Some(nvmlEncoderSessionInfo_t { pid: own.visible_pid(session.pid)?, ..session })
    };
    Ok(all.into_iter().flatten().filter_map(shown).collect())
}

/// Returns the container's frame capture sessions, with the pids that are shown.
fn capture_sessions(share: &DeviceShare) -> Result<Vec<nvmlFBCSessionInfo_t>, nvmlReturn_t> {
    // SAFETY: `query_list` passes a `to` that is null or holds `*count` entries.
    let all = query_list(|count, to| unsafe { driver::nvmlDeviceGetFBCSessions(share.device, count, to) })?;
    let own = ContainerProcesses::of(share);
    let shown = |session: nvmlFBCSessionInfo_t| {
        Some(nvmlFBCSessionInfo_t { pid: own.visible_pid(session.pid)?, ..session })
    };
    Ok(all.into_iter().flatten().filter_map(shown).collect())
}

/// Returns the mean; zero for no values.
fn mean(values: impl ExactSizeIterator<Item = u32>) -> u32 {
    let count = values.len().max(1) as u64;
    // At most the largest of the values, so it fits.
    (values.map(u64::from).sum::<u64>() / count) as u32
}

hooks! { nvml;
    fn nvmlDeviceGetEncoderSessions(
        device: nvmlDevice_t,
        session_count: *mut u32,
        session_infos: *mut nvmlEncoderSessionInfo_t,
    ) |next, _variant| {
        with_share(device, |share| {
            // SAFETY: the application passed the count, and an array with room for as many entries.
            unsafe { write_list(session_count, session_infos, &encoder_sessions(&share)?) }
        })
    }

    /// Computed from the container's sessions.
    fn nvmlDeviceGetEncoderStats(
        device: nvmlDevice_t,
        session_count: *mut u32,
        average_fps: *mut u32,
        average_latency: *mut u32,
    ) |next, _variant| {
        // SAFETY: the application's arguments, passed on unchanged under the driver function's own contract.
        let query = || unsafe { next(device, session_count, average_fps, average_latency) };
        with_share(device, |share| {
            super::check(query())?;
            let own = encoder_sessions(&share)?;
            // SAFETY: the call succeeded, so the driver has written there. The driver counts sessions in 32 bits, so it
            // fits.
            unsafe { write_result(session_count, own.len() as u32) }?;
            // SAFETY: the call succeeded, so the driver has written there.
            unsafe { write_result(average_fps, mean(own.iter().map(|session| session.averageFps))) }?;
            // SAFETY: the call succeeded, so the driver has written there.
            unsafe { write_result(average_latency, mean(own.iter().map(|session| session.averageLatency))) }
        })
    }

    fn nvmlDeviceGetFBCSessions(
        device: nvmlDevice_t,
        session_count: *mut u32,
        session_info: *mut nvmlFBCSessionInfo_t,
    ) |next, _variant| {
        with_share(device, |share| {
            // SAFETY: the application passed the count, and an array with room for as many entries.
            unsafe { write_list(session_count, session_info, &capture_sessions(&share)?) }
        })
    }

    /// Computed from the container's sessions.
    fn nvmlDeviceGetFBCStats(device: nvmlDevice_t, fbc_stats: *mut nvmlFBCStats_t) |next, _variant| {
        // SAFETY: the application's arguments, passed on unchanged under the driver function's own contract.
        let query = || unsafe { next(device, fbc_stats) };
        with_share(device, |share| {
            super::check(query())?;
            let own = capture_sessions(&share)?;
            let stats = nvmlFBCStats_t {
                sessionsCount: own.len() as u32,
                averageFPS: mean(own.iter().map(|session| session.averageFPS)),
                averageLatency: mean(own.iter().map(|session| session.averageLatency)),
            };
            // SAFETY: the call succeeded, so the driver has written there.
            unsafe { write_result(fbc_stats, stats) }
        })
    }
}
