//! Sessions of the encoder and of frame capture: those of the container's processes.
#![allow(unsafe_code)]

use super::processes::Container;
use super::{Share, everything, put, put_list, told};
use crate::driver::nvml as real;
use crate::hook::hooks;
use partage_driver_api::nvml::*;

/// The container's sessions of the encoder, under the pids that are shown.
fn encoding(share: &Share) -> Result<Vec<nvmlEncoderSessionInfo_t>, nvmlReturn_t> {
    // SAFETY: room as it is said.
    let all = everything(|count, to| unsafe { real::nvmlDeviceGetEncoderSessions(share.device, count, to) })?;
    let own = Container::of(share);
    let shown = |session: nvmlEncoderSessionInfo_t| {
        Some(nvmlEncoderSessionInfo_t { pid: own.shown(session.pid)?, ..session })
    };
    Ok(all.into_iter().flatten().filter_map(shown).collect())
}

/// The container's sessions of frame capture.
fn capturing(share: &Share) -> Result<Vec<nvmlFBCSessionInfo_t>, nvmlReturn_t> {
    // SAFETY: room as it is said.
    let all = everything(|count, to| unsafe { real::nvmlDeviceGetFBCSessions(share.device, count, to) })?;
    let own = Container::of(share);
    let shown = |session: nvmlFBCSessionInfo_t| {
        Some(nvmlFBCSessionInfo_t { pid: own.shown(session.pid)?, ..session })
    };
    Ok(all.into_iter().flatten().filter_map(shown).collect())
}

/// The mean; of nothing, zero.
fn mean(values: impl ExactSizeIterator<Item = u32>) -> u32 {
    let count = values.len().max(1) as u64;
    // No larger than the largest of them.
    (values.map(u64::from).sum::<u64>() / count) as u32
}

hooks! { nvml;
    fn nvmlDeviceGetEncoderSessions(
        device: nvmlDevice_t,
        session_count: *mut u32,
        session_infos: *mut nvmlEncoderSessionInfo_t,
    ) |next, _variant| {
        told(device, |share| {
            // SAFETY: the program's count and array.
            unsafe { put_list(session_count, session_infos, &encoding(&share)?) }
        })
    }

    /// Worked out from the container's sessions.
    fn nvmlDeviceGetEncoderStats(
        device: nvmlDevice_t,
        session_count: *mut u32,
        average_fps: *mut u32,
        average_latency: *mut u32,
    ) |next, _variant| {
        // SAFETY: the program's promise.
        let ask = || unsafe { next(device, session_count, average_fps, average_latency) };
        told(device, |share| {
            super::check(ask())?;
            let own = encoding(&share)?;
            // SAFETY: the driver has just written there. There are at most as many as the driver counts in 32 bits.
            unsafe { put(session_count, own.len() as u32) }?;
            // SAFETY: likewise.
            unsafe { put(average_fps, mean(own.iter().map(|session| session.averageFps))) }?;
            // SAFETY: likewise.
            unsafe { put(average_latency, mean(own.iter().map(|session| session.averageLatency))) }
        })
    }

    fn nvmlDeviceGetFBCSessions(
        device: nvmlDevice_t,
        session_count: *mut u32,
        session_info: *mut nvmlFBCSessionInfo_t,
    ) |next, _variant| {
        told(device, |share| {
            // SAFETY: the program's count and array.
            unsafe { put_list(session_count, session_info, &capturing(&share)?) }
        })
    }

    /// Worked out from the container's sessions.
    fn nvmlDeviceGetFBCStats(device: nvmlDevice_t, fbc_stats: *mut nvmlFBCStats_t) |next, _variant| {
        // SAFETY: the program's promise.
        let ask = || unsafe { next(device, fbc_stats) };
        told(device, |share| {
            super::check(ask())?;
            let own = capturing(&share)?;
            let stats = nvmlFBCStats_t {
                sessionsCount: own.len() as u32,
                averageFPS: mean(own.iter().map(|session| session.averageFPS)),
                averageLatency: mean(own.iter().map(|session| session.averageLatency)),
            };
            // SAFETY: the driver has just written there.
            unsafe { put(fbc_stats, stats) }
        })
    }
}
