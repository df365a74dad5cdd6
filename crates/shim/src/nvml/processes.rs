//! Processes that use a GPU: those of the container.
//!
//! Lists of processes come from the region, not from the driver's list with others removed: the driver reports host
//! pids, or pids of the caller's namespace, depending on its version, and a process in a container cannot tell which
//! processes share its container. The region can: every process holds a lock there, and the kernel translates the pid
//! of its owner. So a process is listed by the pid that `ps` shows to the caller, with the bytes that its account
//! holds, and the list adds up to what is used. A process that holds nothing, such as the calling program, is not in
//! it. Every process that holds memory is a compute process: the lists of graphics and MPS processes are empty.
//!
//! Where only the driver has the answer (utilization, accounting), its pids are compared with both pids that the region
//! has for a process. NVIDIA's open kernel modules translate pids for the caller's namespace, so the container's own
//! are found. For a process of another namespace they report the host pid, which may by chance equal one of the
//! container's: then a percentage is wrong, but no foreign process is named. The older closed modules translate
//! nothing, and in a pid namespace of its own a container appears to have used nothing.
#![allow(unsafe_code)]

use super::{
    DeviceShare, NvmlResult, check, export_table, query_list, read_argument, utilization, with_share,
    write_list, write_result,
};
use crate::driver::nvml as driver;
use crate::hook::hooks;
use crate::process::{self, GrantStatus, Process};
use partage_driver_api::nvml::*;
use partage_region::futex::preserve_errno;
use std::ffi::c_char;
use std::ptr::null_mut;

/// A process of the container.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct OwnProcess {
    /// Pid as the caller's `ps` shows it; the process's own pid if it has none there.
    pub(super) pid: u32,
    /// Pid in the process's own namespace.
    own_pid: u32,
    /// Bytes that it holds of the GPU.
    pub(super) bytes: u64,
}

/// All live processes of the container.
pub(super) struct ContainerProcesses(Vec<OwnProcess>);

impl ContainerProcesses {
    pub(super) fn of(share: &DeviceShare) -> Self {
        let (region, gpu) = (&share.process.region, share.gpu);
        let mut all = Self(Vec::new());
        preserve_errno(|| {
            region.reclaim_dead_processes_if_due();
            for process in region.processes() {
                let bytes = process.held.get(gpu).copied().unwrap_or(0);
                all.add(process.pid_here.unwrap_or(process.pid), process.pid, bytes);
            }
        });
        all
    }

    /// Adds a process. A process that has loaded both libraries has two slots, which are added up.
    fn add(&mut self, pid: u32, own_pid: u32, bytes: u64) {
        match self.0.iter_mut().find(|own| (own.pid, own.own_pid) == (pid, own_pid)) {
            Some(own) => own.bytes = own.bytes.saturating_add(bytes),
            None => self.0.push(OwnProcess { pid, own_pid, bytes }),
        }
    }

    /// Returns the processes that hold memory, in the order of their slots.
    pub(super) fn holders(&self) -> impl Iterator<Item = &OwnProcess> {
        self.0.iter().filter(|own| own.bytes > 0)
    }

    /// Returns the pid to show for a pid of the driver, if the process belongs to this container.
    pub(super) fn visible_pid(&self, driver_pid: u32) -> Option<u32> {
        let by =
            |is: fn(&OwnProcess) -> u32| self.0.iter().find(|own| is(own) == driver_pid && driver_pid != 0);
        by(|own| own.pid).or_else(|| by(|own| own.own_pid)).map(|own| own.pid)
    }
}

/// A process in one of NVML's formats.
trait ProcessRecord: Copy {
    fn of(own: &OwnProcess) -> Self;
}

impl ProcessRecord for nvmlProcessInfo_v1_t {
    fn of(own: &OwnProcess) -> Self {
        Self { pid: own.pid, usedGpuMemory: own.bytes }
    }
}

impl ProcessRecord for nvmlProcessInfo_v2_t {
    fn of(own: &OwnProcess) -> Self {
        // Without MIG a process is in no instance.
        Self { pid: own.pid, usedGpuMemory: own.bytes, gpuInstanceId: u32::MAX, computeInstanceId: u32::MAX }
    }
}

impl ProcessRecord for nvmlProcessDetail_v1_t {
    fn of(own: &OwnProcess) -> Self {
        Self {
            pid: own.pid,
            usedGpuMemory: own.bytes,
            gpuInstanceId: u32::MAX,
            computeInstanceId: u32::MAX,
            usedGpuCcProtectedMemory: 0,
        }
    }
}

/// The kind of a list of processes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum ListKind {
    Compute,
    /// Graphics or MPS processes.
    Other,
}

/// Answers a query for a list of processes; `query` is the driver's own function.
fn list_running<T: ProcessRecord>(
    device: nvmlDevice_t,
    kind: ListKind,
    count: *mut u32,
    infos: *mut T,
    query: impl Fn(*mut u32, *mut T) -> nvmlReturn_t,
) -> nvmlReturn_t {
    with_share(device, |share| {
        if count.is_null() {
            return check(query(count, infos));
        }
        // Errors that prevent any answer are reported by the driver: a lost GPU, a library that was shut down.
        let mut none = 0;
        allow_insufficient_size(query(&mut none, null_mut()))?;
        let list: Vec<T> = match kind {
            ListKind::Compute => ContainerProcesses::of(&share).holders().map(T::of).collect(),
            ListKind::Other => Vec::new(),
        };
        // SAFETY: the application passed the count, and an array with room for as many entries.
        unsafe { write_list(count, infos, &list) }
    })
}

/// Accepts `INSUFFICIENT_SIZE`: the driver would have answered if there had been room.
fn allow_insufficient_size(code: nvmlReturn_t) -> NvmlResult {
    if code == NVML_ERROR_INSUFFICIENT_SIZE { Ok(()) } else { check(code) }
}

/// Checks whether the GPU answers at all.
pub(super) fn check_device_answers(share: &DeviceShare) -> NvmlResult {
    let mut none = 0;
    // SAFETY: the count is a local variable, and there is no room for entries.
    allow_insufficient_size(unsafe {
        driver::nvmlDeviceGetComputeRunningProcesses(share.device, &mut none, null_mut())
    })
}

hooks! { nvml;
    fn nvmlDeviceGetComputeRunningProcesses(
        device: nvmlDevice_t,
        count: *mut u32,
        infos: *mut nvmlProcessInfo_v1_t,
    ) |next, _variant| {
        // SAFETY: the application's arguments, passed on unchanged under the driver function's own contract.
        list_running(device, ListKind::Compute, count, infos, |count, infos| unsafe { next(device, count, infos) })
    }

    fn nvmlDeviceGetComputeRunningProcesses_v2(
        device: nvmlDevice_t,
        count: *mut u32,
        infos: *mut nvmlProcessInfo_v2_t,
    ) |next, _variant| {
        // SAFETY: the application's arguments, passed on unchanged under the driver function's own contract.
        list_running(device, ListKind::Compute, count, infos, |count, infos| unsafe { next(device, count, infos) })
    }

    fn nvmlDeviceGetComputeRunningProcesses_v3(
        device: nvmlDevice_t,
        count: *mut u32,
        infos: *mut nvmlProcessInfo_t,
    ) |next, _variant| {
        // SAFETY: the application's arguments, passed on unchanged under the driver function's own contract.
        list_running(device, ListKind::Compute, count, infos, |count, infos| unsafe { next(device, count, infos) })
    }

    fn nvmlDeviceGetGraphicsRunningProcesses(
        device: nvmlDevice_t,
        count: *mut u32,
        infos: *mut nvmlProcessInfo_v1_t,
    ) |next, _variant| {
        // SAFETY: the application's arguments, passed on unchanged under the driver function's own contract.
        list_running(device, ListKind::Other, count, infos, |count, infos| unsafe { next(device, count, infos) })
    }

    fn nvmlDeviceGetGraphicsRunningProcesses_v2(
        device: nvmlDevice_t,
        count: *mut u32,
        infos: *mut nvmlProcessInfo_v2_t,
    ) |next, _variant| {
        // SAFETY: the application's arguments, passed on unchanged under the driver function's own contract.
        list_running(device, ListKind::Other, count, infos, |count, infos| unsafe { next(device, count, infos) })
    }

    fn nvmlDeviceGetGraphicsRunningProcesses_v3(
        device: nvmlDevice_t,
        count: *mut u32,
        infos: *mut nvmlProcessInfo_t,
    ) |next, _variant| {
        // SAFETY: the application's arguments, passed on unchanged under the driver function's own contract.
        list_running(device, ListKind::Other, count, infos, |count, infos| unsafe { next(device, count, infos) })
    }

    fn nvmlDeviceGetMPSComputeRunningProcesses(
        device: nvmlDevice_t,
        count: *mut u32,
        infos: *mut nvmlProcessInfo_v1_t,
    ) |next, _variant| {
        // SAFETY: the application's arguments, passed on unchanged under the driver function's own contract.
        list_running(device, ListKind::Other, count, infos, |count, infos| unsafe { next(device, count, infos) })
    }

    fn nvmlDeviceGetMPSComputeRunningProcesses_v2(
        device: nvmlDevice_t,
        count: *mut u32,
        infos: *mut nvmlProcessInfo_v2_t,
    ) |next, _variant| {
        // SAFETY: the application's arguments, passed on unchanged under the driver function's own contract.
        list_running(device, ListKind::Other, count, infos, |count, infos| unsafe { next(device, count, infos) })
    }

    fn nvmlDeviceGetMPSComputeRunningProcesses_v3(
        device: nvmlDevice_t,
        count: *mut u32,
        infos: *mut nvmlProcessInfo_t,
    ) |next, _variant| {
        // SAFETY: the application's arguments, passed on unchanged under the driver function's own contract.
        list_running(device, ListKind::Other, count, infos, |count, infos| unsafe { next(device, count, infos) })
    }

    /// Returns the same lists in another format.
    fn nvmlDeviceGetRunningProcessDetailList(
        device: nvmlDevice_t,
        list: *mut nvmlProcessDetailList_t,
    ) |next, _variant| {
        with_share(device, |_| {
            // SAFETY: null, or the application's structure; the version comes first in all versions.
            let version = unsafe { read_argument(list.cast_const().cast::<u32>()) }?;
            if version != nvmlProcessDetailList_v1 {
                return Err(NVML_ERROR_ARGUMENT_VERSION_MISMATCH);
            }
            // SAFETY: the structure has the format of this version.
            let mut asked = unsafe { read_argument(list.cast_const()) }?;
            let kind = if asked.mode == 0 { ListKind::Compute } else { ListKind::Other };
            let room = &raw mut asked.numProcArrayEntries;
            let answer = list_running(device, kind, room, asked.procArray, |count, infos| {
                let mut empty = nvmlProcessDetailList_t { numProcArrayEntries: 0, procArray: infos, ..asked };
                if !count.is_null() {
                    // SAFETY: not null, and a count of this function or of `asked`.
                    empty.numProcArrayEntries = unsafe { count.read() };
                }
                // SAFETY: the pointer is to a local structure, whose array has the stated room.
                unsafe { next(device, &mut empty) }
            });
            if matches!(answer, NVML_SUCCESS | NVML_ERROR_INSUFFICIENT_SIZE) {
                // SAFETY: the application's structure was just read, and it is for the driver to write to.
                unsafe { write_result(list, asked) }?;
            }
            check(answer)
        })
    }

    /// Returns samples of the container's processes; if there are none, "not found", as the driver does.
    fn nvmlDeviceGetProcessUtilization(
        device: nvmlDevice_t,
        utilization: *mut nvmlProcessUtilizationSample_t,
        process_samples_count: *mut u32,
        last_seen_time_stamp: u64,
    ) |next, _variant| {
        // SAFETY: the application's arguments, passed on unchanged under the driver function's own contract.
        let query = || unsafe { next(device, utilization, process_samples_count, last_seen_time_stamp) };
        with_share(device, |share| {
            if process_samples_count.is_null() {
                return check(query());
            }
            if utilization.is_null() {
                check_device_answers(&share)?;
                // SAFETY: not null, and the application passed it for the driver to write to.
                unsafe { write_result(process_samples_count, max_records(&share)) }?;
                return Err(NVML_ERROR_INSUFFICIENT_SIZE);
            }
            let samples = utilization::samples(&share, last_seen_time_stamp)?;
            if samples.is_empty() {
                return Err(NVML_ERROR_NOT_FOUND);
            }
            // SAFETY: the application passed the count, and an array with room for as many entries.
            unsafe { write_list(process_samples_count, utilization, &samples) }
        })
    }

    /// Returns the same with more engines.
    fn nvmlDeviceGetProcessesUtilizationInfo(
        device: nvmlDevice_t,
        utilization: *mut nvmlProcessesUtilizationInfo_t,
    ) |next, _variant| {
        with_share(device, |share| {
            // SAFETY: null, or the application's structure; the version comes first in all versions.
            let version = unsafe { read_argument(utilization.cast_const().cast::<u32>()) }?;
            if version != nvmlProcessesUtilizationInfo_v1 {
                return Err(NVML_ERROR_ARGUMENT_VERSION_MISMATCH);
            }
            // SAFETY: the structure has the format of this version.
            let mut asked = unsafe { read_argument(utilization.cast_const()) }?;
            let own = utilization::infos(&share, asked.lastSeenTimeStamp);
            let answer = match own {
                Err(code) => return Err(code),
                Ok(_) if asked.procUtilArray.is_null() => {
                    asked.processSamplesCount = max_records(&share);
                    Err(NVML_ERROR_INSUFFICIENT_SIZE)
                }
                Ok(infos) if infos.is_empty() => return Err(NVML_ERROR_NOT_FOUND),
                Ok(infos) => {
                    asked.lastSeenTimeStamp = infos.iter().map(|info| info.timeStamp).max().unwrap_or(0);
                    // SAFETY: the count is in a local structure, and the application's array has the room that it
                    // stated.
                    unsafe { write_list(&raw mut asked.processSamplesCount, asked.procUtilArray, &infos) }
                }
            };
            // SAFETY: the application's structure was just read, and it is for the driver to write to.
            unsafe { write_result(utilization, asked) }?;
            answer
        })
    }

    /// Returns those pids of the driver that belong to live processes of this container: the container of a dead one is
    /// unknown.
    fn nvmlDeviceGetAccountingPids(device: nvmlDevice_t, count: *mut u32, pids: *mut u32) |next, _variant| {
        with_share(device, |share| {
            // SAFETY: `query_list` passes a `pids` that is null or holds `*count` entries.
            let all = query_list(|count, pids| unsafe { next(device, count, pids) })?;
            let own = ContainerProcesses::of(&share);
            let list: Vec<u32> = all.into_iter().flatten().filter_map(|pid| own.visible_pid(pid)).collect();
            // SAFETY: the application passed the count, and an array with room for as many entries.
            unsafe { write_list(count, pids, &list) }
        })
    }

    /// Returns the name of a process of the container. Other processes cannot be queried, whichever pid the driver
    /// knows them by.
    fn nvmlSystemGetProcessName(pid: u32, name: *mut c_char, length: u32) |next, _variant| {
        // SAFETY: the application's arguments, passed on unchanged under the driver function's own contract.
        let query = |pid| unsafe { next(pid, name, length) };
        let process = match process::grant_status() {
            GrantStatus::Refused => return NVML_ERROR_NO_PERMISSION,
            GrantStatus::Granted(process) => process,
        };
        // Other errors are reported first, with a pid that no process has.
        match query(u32::MAX) {
            NVML_SUCCESS | NVML_ERROR_NOT_FOUND => {}
            code => return code,
        }
        if name.is_null() || length == 0 {
            return NVML_ERROR_INVALID_ARGUMENT;
        }
        if !is_own(process, pid) {
            return NVML_ERROR_NOT_FOUND;
        }
        let called = export_table::process_name(pid);
        let letters = called.iter().take_while(|&&letter| letter != 0);
        // A name that is too long is truncated; it is still terminated.
        let room = (length as usize - 1).min(letters.clone().count());
        for (index, &letter) in letters.take(room).enumerate() {
            let place = name.wrapping_add(index);
            // SAFETY: not null, and inside the length that the application passed.
            unsafe { place.write(letter as c_char) };
        }
        let end = name.wrapping_add(room);
        // SAFETY: not null, and `room` is below the length that the application passed.
        unsafe { end.write(0) };
        NVML_SUCCESS
    }

    /// Returns the statistics of a process of the container.
    fn nvmlDeviceGetAccountingStats(
        device: nvmlDevice_t,
        pid: u32,
        stats: *mut nvmlAccountingStats_t,
    ) |next, _variant| {
        // SAFETY: the application's arguments, passed on unchanged under the driver function's own contract.
        let query = |pid| unsafe { next(device, pid, stats) };
        with_share(device, |share| {
            match ContainerProcesses::of(&share).visible_pid(pid) {
                Some(_) => check(query(pid)),
                // Other errors are reported first, with a pid that no process has.
                None => Err(match query(u32::MAX) { NVML_SUCCESS => NVML_ERROR_NOT_FOUND, code => code }),
            }
        })
    }
}

/// Returns whether a pid, as the caller's `ps` shows it, is that of a process of the container that has loaded the
/// driver.
fn is_own(process: &Process, pid: u32) -> bool {
    preserve_errno(|| process.region.processes().any(|own| own.pid_here == Some(pid)))
}

/// Returns the most records that a query can return.
fn max_records(share: &DeviceShare) -> u32 {
    // At most as many as slots, so it fits.
    ContainerProcesses::of(share).0.len().max(1) as u32
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn two_slots_of_one_process_are_summed() {
        let mut all = ContainerProcesses(Vec::new());
        all.add(100, 7, 10);
        all.add(101, 8, 0);
        all.add(100, 7, 5);
        all.add(102, 9, u64::MAX);
        all.add(102, 9, 1);
        let holders: Vec<_> = all.holders().map(|own| (own.pid, own.bytes)).collect();
        assert_eq!(holders, [(100, 15), (102, u64::MAX)]);
    }

    #[test]
    fn driver_may_report_either_pid() {
        let mut all = ContainerProcesses(Vec::new());
        all.add(100, 7, 10);
        all.add(7, 3, 10);
        assert_eq!(all.visible_pid(100), Some(100));
        assert_eq!(all.visible_pid(7), Some(7), "what is shown goes first");
        assert_eq!(all.visible_pid(3), Some(7));
        assert_eq!((all.visible_pid(0), all.visible_pid(5)), (None, None));
    }
}
