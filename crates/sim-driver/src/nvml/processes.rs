//! Processes on a GPU, their utilization, and accounting.

use super::arguments::{NvmlResult, VisibleGpu, gpu, read_in, write_out, write_out_list};
use super::sensors::memory_share;
use super::*;
use crate::state::{GpuSetting, SimGpuProcess, UNIT};

/// A utilization window and each process's share of it.
pub(super) struct UtilizationWindow {
    /// The end of the window, in microseconds of wall-clock time.
    pub(super) micros: u64,
    /// Pid and share in thousandths of the window, for processes with a share.
    pub(super) shares: Vec<(u32, u64)>,
}

/// Returns the complete windows that ended after a wall-clock time, oldest first.
pub(super) fn windows(gpu: VisibleGpu, seen: u64) -> Vec<UtilizationWindow> {
    let (session, state) = (gpu.session, &gpu.session.state);
    let since = session.instant(seen);
    let processes = state.processes(gpu.index);
    let mut windows: Vec<(u64, UtilizationWindow)> = state
        .windows(gpu.index, None, since)
        .into_iter()
        .map(|(end, _)| (end, UtilizationWindow { micros: session.wall_micros(end), shares: Vec::new() }))
        .collect();
    for process in &processes {
        for (end, thousandths) in state.windows(gpu.index, Some(process.slot), since) {
            // A window may have ended since `windows` was collected.
            let known = windows.iter_mut().find(|(known, _)| *known == end && thousandths > 0);
            if let Some((_, window)) = known {
                window.shares.push((process.pid, thousandths));
            }
        }
    }
    windows.into_iter().map(|(_, window)| window).collect()
}

/// Returns the last window's end, and pid and share in thousandths of each process that used the GPU since a
/// wall-clock time.
fn average_utilization(gpu: VisibleGpu, seen: u64) -> Result<(u64, Vec<(u32, u64)>), NvmlError> {
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

/// Returns the maximum number of samples: one per process.
fn max_samples(gpu: VisibleGpu) -> u32 {
    gpu.session.state.processes(gpu.index).len().max(1) as u32
}

/// Writes the processes with contexts, in one of NVML's versions of the structure.
fn write_processes<T: Copy>(
    device: nvmlDevice_t,
    count: *mut u32,
    infos: *mut T,
    form: impl Fn(&SimGpuProcess) -> T,
) -> NvmlResult {
    let gpu = gpu(device)?;
    write_out_list!(count, infos, gpu.session.state.processes(gpu.index).iter().map(form).collect::<Vec<_>>())
}

/// Writes an empty list, for graphics processes and MPS clients.
fn no_processes(device: nvmlDevice_t, count: *mut u32) -> NvmlResult {
    gpu(device)?;
    read_in!(count.cast_const());
    write_out!(count => 0)
}

fn process_info_v1(process: &SimGpuProcess) -> nvmlProcessInfo_v1_t {
    nvmlProcessInfo_v1_t { pid: process.pid, usedGpuMemory: process.used * UNIT }
}

fn process_info_v2(process: &SimGpuProcess) -> nvmlProcessInfo_v2_t {
    // Without MIG a process is in no instance.
    nvmlProcessInfo_v2_t {
        pid: process.pid,
        usedGpuMemory: process.used * UNIT,
        gpuInstanceId: u32::MAX,
        computeInstanceId: u32::MAX,
    }
}

/// Resolves a device handle; fails unless accounting is enabled.
fn accounting_gpu(device: nvmlDevice_t) -> Result<VisibleGpu, NvmlError> {
    let gpu = gpu(device)?;
    match gpu.setting(GpuSetting::Accounting) {
        Some(1) => Ok(gpu),
        _ => Err(NvmlError::NOT_SUPPORTED),
    }
}

impl NvmlProcesses for Library {
    unsafe fn nvmlDeviceGetComputeRunningProcesses(
        device: nvmlDevice_t,
        count: *mut u32,
        infos: *mut nvmlProcessInfo_v1_t,
    ) -> NvmlResult {
        write_processes(device, count, infos, process_info_v1)
    }

    unsafe fn nvmlDeviceGetComputeRunningProcesses_v2(
        device: nvmlDevice_t,
        count: *mut u32,
        infos: *mut nvmlProcessInfo_v2_t,
    ) -> NvmlResult {
        write_processes(device, count, infos, process_info_v2)
    }

    unsafe fn nvmlDeviceGetComputeRunningProcesses_v3(
        device: nvmlDevice_t,
        count: *mut u32,
        infos: *mut nvmlProcessInfo_t,
    ) -> NvmlResult {
        write_processes(device, count, infos, process_info_v2)
    }

    unsafe fn nvmlDeviceGetGraphicsRunningProcesses(
        device: nvmlDevice_t,
        count: *mut u32,
        _infos: *mut nvmlProcessInfo_v1_t,
    ) -> NvmlResult {
        no_processes(device, count)
    }

    unsafe fn nvmlDeviceGetGraphicsRunningProcesses_v2(
        device: nvmlDevice_t,
        count: *mut u32,
        _infos: *mut nvmlProcessInfo_v2_t,
    ) -> NvmlResult {
        no_processes(device, count)
    }

    unsafe fn nvmlDeviceGetGraphicsRunningProcesses_v3(
        device: nvmlDevice_t,
        count: *mut u32,
        _infos: *mut nvmlProcessInfo_t,
    ) -> NvmlResult {
        no_processes(device, count)
    }

    unsafe fn nvmlDeviceGetMPSComputeRunningProcesses(
        device: nvmlDevice_t,
        count: *mut u32,
        _infos: *mut nvmlProcessInfo_v1_t,
    ) -> NvmlResult {
        no_processes(device, count)
    }

    unsafe fn nvmlDeviceGetMPSComputeRunningProcesses_v2(
        device: nvmlDevice_t,
        count: *mut u32,
        _infos: *mut nvmlProcessInfo_v2_t,
    ) -> NvmlResult {
        no_processes(device, count)
    }

    unsafe fn nvmlDeviceGetMPSComputeRunningProcesses_v3(
        device: nvmlDevice_t,
        count: *mut u32,
        _infos: *mut nvmlProcessInfo_t,
    ) -> NvmlResult {
        no_processes(device, count)
    }

    unsafe fn nvmlDeviceGetRunningProcessDetailList(
        device: nvmlDevice_t,
        list: *mut nvmlProcessDetailList_t,
    ) -> NvmlResult {
        let gpu = gpu(device)?;
        let version = read_in!(list.cast_const().cast::<u32>());
        if version != nvmlProcessDetailList_v1 {
            return Err(NvmlError::ARGUMENT_VERSION_MISMATCH);
        }
        let mut request = read_in!(list.cast_const());
        let details: Vec<nvmlProcessDetail_v1_t> = match request.mode {
            // Mode 0 is compute; there are no graphics or MPS processes.
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
        let put = write_out_list!(&raw mut request.numProcArrayEntries, request.procArray, details);
        write_out!(list => request)?;
        put
    }

    unsafe fn nvmlDeviceGetProcessUtilization(
        device: nvmlDevice_t,
        utilization: *mut nvmlProcessUtilizationSample_t,
        process_samples_count: *mut u32,
        last_seen_time_stamp: u64,
    ) -> NvmlResult {
        let gpu = gpu(device)?;
        read_in!(process_samples_count.cast_const());
        if utilization.is_null() {
            write_out!(process_samples_count => max_samples(gpu))?;
            return Err(NvmlError::INSUFFICIENT_SIZE);
        }
        let (micros, processes) = average_utilization(gpu, last_seen_time_stamp)?;
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
        write_out_list!(process_samples_count, utilization, samples)
    }

    unsafe fn nvmlDeviceGetProcessesUtilizationInfo(
        device: nvmlDevice_t,
        processes_util_info: *mut nvmlProcessesUtilizationInfo_t,
    ) -> NvmlResult {
        let gpu = gpu(device)?;
        let version = read_in!(processes_util_info.cast_const().cast::<u32>());
        if version != nvmlProcessesUtilizationInfo_v1 {
            return Err(NvmlError::ARGUMENT_VERSION_MISMATCH);
        }
        let mut request = read_in!(processes_util_info.cast_const());
        if request.procUtilArray.is_null() {
            request.processSamplesCount = max_samples(gpu);
            write_out!(processes_util_info => request)?;
            return Err(NvmlError::INSUFFICIENT_SIZE);
        }
        let (micros, processes) = average_utilization(gpu, request.lastSeenTimeStamp)?;
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
        request.lastSeenTimeStamp = micros;
        let put = write_out_list!(&raw mut request.processSamplesCount, request.procUtilArray, samples);
        write_out!(processes_util_info => request)?;
        put
    }

    unsafe fn nvmlDeviceGetAccountingMode(device: nvmlDevice_t, mode: *mut nvmlEnableState_t) -> NvmlResult {
        write_out!(mode => gpu(device)?.setting(GpuSetting::Accounting).unwrap_or(0) as u32)
    }

    unsafe fn nvmlDeviceGetAccountingBufferSize(device: nvmlDevice_t, length: *mut u32) -> NvmlResult {
        gpu(device)?;
        write_out!(length => 4000)
    }

    unsafe fn nvmlDeviceGetAccountingPids(
        device: nvmlDevice_t,
        count: *mut u32,
        _pids: *mut u32,
    ) -> NvmlResult {
        // Accounting records nothing.
        accounting_gpu(device)?;
        read_in!(count.cast_const());
        write_out!(count => 0)
    }

    unsafe fn nvmlDeviceGetAccountingStats(
        device: nvmlDevice_t,
        _pid: u32,
        _stats: *mut nvmlAccountingStats_t,
    ) -> NvmlResult {
        accounting_gpu(device)?;
        Err(NvmlError::NOT_FOUND)
    }
}
