//! Who uses a GPU, and how much; accounting.

use super::call::{Answer, Gpu, answer, answer_list, gpu, passed};
use super::reading::memory_share;
use super::*;
use crate::state::{Process, Setting, UNIT};

/// One window of utilisation, and who had which part of it.
pub(super) struct Window {
    /// When it ended, in microseconds of the wall clock.
    pub(super) micros: u64,
    /// Pids and thousandths of the window, without those who had nothing.
    pub(super) shares: Vec<(u32, u64)>,
}

/// The whole windows that ended after an instant of the wall clock, oldest first.
pub(super) fn windows(gpu: Gpu, seen: u64) -> Vec<Window> {
    let (session, state) = (gpu.session, &gpu.session.state);
    let since = session.instant(seen);
    let processes = state.processes(gpu.index);
    let mut windows: Vec<(u64, Window)> = state
        .windows(gpu.index, None, since)
        .into_iter()
        .map(|(end, _)| (end, Window { micros: session.wall_micros(end), shares: Vec::new() }))
        .collect();
    for process in &processes {
        for (end, thousandths) in state.windows(gpu.index, Some(process.slot), since) {
            // A window may have ended since the list above was made.
            let known = windows.iter_mut().find(|(known, _)| *known == end && thousandths > 0);
            if let Some((_, window)) = known {
                window.shares.push((process.pid, thousandths));
            }
        }
    }
    windows.into_iter().map(|(_, window)| window).collect()
}

/// What processes did since an instant of the wall clock: pid and percent. Those who did nothing are not told
/// of.
fn averages(gpu: Gpu, seen: u64) -> Result<(u64, Vec<(u32, u64)>), NvmlError> {
    let windows = windows(gpu, seen);
    let last = windows.last().ok_or(NvmlError::NOT_FOUND)?.micros;
    let mut sums: Vec<(u32, u64)> = Vec::new();
    for &(pid, thousandths) in windows.iter().flat_map(|window| &window.shares) {
        match sums.iter_mut().find(|(known, _)| *known == pid) {
            Some((_, sum)) => *sum += thousandths,
            None => sums.push((pid, thousandths)),
        }
    }
    if sums.is_empty() {
        return Err(NvmlError::NOT_FOUND);
    }
    for (_, sum) in &mut sums {
        *sum /= windows.len() as u64;
    }
    Ok((last, sums))
}

/// Records that there can be: as many as processes.
fn room_for_all(gpu: Gpu) -> u32 {
    gpu.session.state.processes(gpu.index).len().max(1) as u32
}

/// The processes with contexts, in one of NVML's forms.
fn running<T: Copy>(
    device: nvmlDevice_t,
    count: *mut u32,
    infos: *mut T,
    form: impl Fn(&Process) -> T,
) -> Answer {
    let gpu = gpu(device)?;
    answer_list!(count, infos, gpu.session.state.processes(gpu.index).iter().map(form).collect::<Vec<_>>())
}

/// Processes of kinds that there are none of.
fn none(device: nvmlDevice_t, count: *mut u32) -> Answer {
    gpu(device)?;
    passed!(count.cast_const());
    answer!(count => 0)
}

fn v1(process: &Process) -> nvmlProcessInfo_v1_t {
    nvmlProcessInfo_v1_t { pid: process.pid, usedGpuMemory: process.used * UNIT }
}

fn v2(process: &Process) -> nvmlProcessInfo_v2_t {
    // Without MIG a process is in no instance.
    nvmlProcessInfo_v2_t {
        pid: process.pid,
        usedGpuMemory: process.used * UNIT,
        gpuInstanceId: u32::MAX,
        computeInstanceId: u32::MAX,
    }
}

/// The card, if accounting is on.
fn accounted(device: nvmlDevice_t) -> Result<Gpu, NvmlError> {
    let gpu = gpu(device)?;
    match gpu.setting(Setting::Accounting) {
        Some(1) => Ok(gpu),
        _ => Err(NvmlError::NOT_SUPPORTED),
    }
}

impl Processes for Library {
    unsafe fn nvmlDeviceGetComputeRunningProcesses(
        device: nvmlDevice_t,
        count: *mut u32,
        infos: *mut nvmlProcessInfo_v1_t,
    ) -> Answer {
        running(device, count, infos, v1)
    }

    unsafe fn nvmlDeviceGetComputeRunningProcesses_v2(
        device: nvmlDevice_t,
        count: *mut u32,
        infos: *mut nvmlProcessInfo_v2_t,
    ) -> Answer {
        running(device, count, infos, v2)
    }

    unsafe fn nvmlDeviceGetComputeRunningProcesses_v3(
        device: nvmlDevice_t,
        count: *mut u32,
        infos: *mut nvmlProcessInfo_t,
    ) -> Answer {
        running(device, count, infos, v2)
    }

    unsafe fn nvmlDeviceGetGraphicsRunningProcesses(
        device: nvmlDevice_t,
        count: *mut u32,
        _infos: *mut nvmlProcessInfo_v1_t,
    ) -> Answer {
        none(device, count)
    }

    unsafe fn nvmlDeviceGetGraphicsRunningProcesses_v2(
        device: nvmlDevice_t,
        count: *mut u32,
        _infos: *mut nvmlProcessInfo_v2_t,
    ) -> Answer {
        none(device, count)
    }

    unsafe fn nvmlDeviceGetGraphicsRunningProcesses_v3(
        device: nvmlDevice_t,
        count: *mut u32,
        _infos: *mut nvmlProcessInfo_t,
    ) -> Answer {
        none(device, count)
    }

    unsafe fn nvmlDeviceGetMPSComputeRunningProcesses(
        device: nvmlDevice_t,
        count: *mut u32,
        _infos: *mut nvmlProcessInfo_v1_t,
    ) -> Answer {
        none(device, count)
    }

    unsafe fn nvmlDeviceGetMPSComputeRunningProcesses_v2(
        device: nvmlDevice_t,
        count: *mut u32,
        _infos: *mut nvmlProcessInfo_v2_t,
    ) -> Answer {
        none(device, count)
    }

    unsafe fn nvmlDeviceGetMPSComputeRunningProcesses_v3(
        device: nvmlDevice_t,
        count: *mut u32,
        _infos: *mut nvmlProcessInfo_t,
    ) -> Answer {
        none(device, count)
    }

    unsafe fn nvmlDeviceGetRunningProcessDetailList(
        device: nvmlDevice_t,
        list: *mut nvmlProcessDetailList_t,
    ) -> Answer {
        let gpu = gpu(device)?;
        let version = passed!(list.cast_const().cast::<u32>());
        if version != nvmlProcessDetailList_v1 {
            return Err(NvmlError::ARGUMENT_VERSION_MISMATCH);
        }
        let mut asked = passed!(list.cast_const());
        let details: Vec<nvmlProcessDetail_v1_t> = match asked.mode {
            // Compute; graphics and MPS have none.
            0 => gpu
                .session
                .state
                .processes(gpu.index)
                .iter()
                .map(|process| nvmlProcessDetail_v1_t {
                    pid: process.pid,
                    usedGpuMemory: process.used * UNIT,
                    gpuInstanceId: u32::MAX,
                    computeInstanceId: u32::MAX,
                    usedGpuCcProtectedMemory: 0,
                })
                .collect(),
            1 | 2 => Vec::new(),
            _ => return Err(NvmlError::INVALID_ARGUMENT),
        };
        let put = answer_list!(&raw mut asked.numProcArrayEntries, asked.procArray, details);
        answer!(list => asked)?;
        put
    }

    unsafe fn nvmlDeviceGetProcessUtilization(
        device: nvmlDevice_t,
        utilization: *mut nvmlProcessUtilizationSample_t,
        process_samples_count: *mut u32,
        last_seen_time_stamp: u64,
    ) -> Answer {
        let gpu = gpu(device)?;
        passed!(process_samples_count.cast_const());
        if utilization.is_null() {
            answer!(process_samples_count => room_for_all(gpu))?;
            return Err(NvmlError::INSUFFICIENT_SIZE);
        }
        let (micros, processes) = averages(gpu, last_seen_time_stamp)?;
        let samples: Vec<_> = processes
            .into_iter()
            .map(|(pid, thousandths)| nvmlProcessUtilizationSample_t {
                pid,
                timeStamp: micros,
                smUtil: (thousandths / 10) as u32,
                memUtil: (memory_share(thousandths) / 10) as u32,
                encUtil: 0,
                decUtil: 0,
            })
            .collect();
        answer_list!(process_samples_count, utilization, samples)
    }

    unsafe fn nvmlDeviceGetProcessesUtilizationInfo(
        device: nvmlDevice_t,
        proceses_util_info: *mut nvmlProcessesUtilizationInfo_t,
    ) -> Answer {
        let gpu = gpu(device)?;
        let version = passed!(proceses_util_info.cast_const().cast::<u32>());
        if version != nvmlProcessesUtilizationInfo_v1 {
            return Err(NvmlError::ARGUMENT_VERSION_MISMATCH);
        }
        let mut asked = passed!(proceses_util_info.cast_const());
        if asked.procUtilArray.is_null() {
            asked.processSamplesCount = room_for_all(gpu);
            answer!(proceses_util_info => asked)?;
            return Err(NvmlError::INSUFFICIENT_SIZE);
        }
        let (micros, processes) = averages(gpu, asked.lastSeenTimeStamp)?;
        let samples: Vec<_> = processes
            .into_iter()
            .map(|(pid, thousandths)| nvmlProcessUtilizationInfo_v1_t {
                timeStamp: micros,
                pid,
                smUtil: (thousandths / 10) as u32,
                memUtil: (memory_share(thousandths) / 10) as u32,
                ..Default::default()
            })
            .collect();
        asked.lastSeenTimeStamp = micros;
        let put = answer_list!(&raw mut asked.processSamplesCount, asked.procUtilArray, samples);
        answer!(proceses_util_info => asked)?;
        put
    }

    unsafe fn nvmlDeviceGetAccountingMode(device: nvmlDevice_t, mode: *mut nvmlEnableState_t) -> Answer {
        answer!(mode => gpu(device)?.setting(Setting::Accounting).unwrap_or(0) as u32)
    }

    unsafe fn nvmlDeviceGetAccountingBufferSize(device: nvmlDevice_t, length: *mut u32) -> Answer {
        gpu(device)?;
        answer!(length => 4000)
    }

    unsafe fn nvmlDeviceGetAccountingPids(device: nvmlDevice_t, count: *mut u32, _pids: *mut u32) -> Answer {
        // Nothing is written down: there is nobody to tell of.
        accounted(device)?;
        passed!(count.cast_const());
        answer!(count => 0)
    }

    unsafe fn nvmlDeviceGetAccountingStats(
        device: nvmlDevice_t,
        _pid: u32,
        _stats: *mut nvmlAccountingStats_t,
    ) -> Answer {
        accounted(device)?;
        Err(NvmlError::NOT_FOUND)
    }
}
