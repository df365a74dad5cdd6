//! Who uses a GPU: processes of the container.
//!
//! Lists of processes are not the driver's with others left out, but the region's own: the driver calls processes by the pids
//! of the machine, or of the caller's namespace, as its version has it, and a process in a container cannot tell which are its
//! brothers. The region can: every process holds a lock there, and the kernel translates its owner's pid. So a process is
//! listed by the pid that `ps` shows beside the caller, with the bytes that the ledger says it holds, and the list adds up to
//! what is used. Who holds nothing, such as the program that asks, is not on it. All that holds memory is a process that
//! computes: lists of graphics and of MPS are empty.
//!
//! Where only the driver knows the answer (utilisation, accounting), its pids are compared with both names that the region has
//! for a process. NVIDIA's open kernel modules translate them for the caller's namespace, so its own are found. They leave a
//! process of another namespace the machine's pid, which may by chance be one of ours: it is a percentage that is then wrong,
//! nobody is named. The closed modules of old translate nothing, and in a namespace of its own a container has used nothing.
#![allow(unsafe_code)]

use super::{Answer, Share, check, everything, export_table, put, put_list, take, told, utilisation};
use crate::driver::nvml as real;
use crate::hook::hooks;
use crate::process::{self, Process, Standing};
use partage_driver_api::nvml::*;
use partage_region::futex::keeping_errno;
use std::ffi::c_char;
use std::ptr::null_mut;

/// A process of the container.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Own {
    /// Its pid as the caller's `ps` shows it; as the process calls itself, where it has none there.
    pub(super) pid: u32,
    /// Its pid as it calls itself.
    calls_itself: u32,
    /// Bytes it holds of the GPU.
    pub(super) bytes: u64,
}

/// All processes of the container that live.
pub(super) struct Container(Vec<Own>);

impl Container {
    pub(super) fn of(share: &Share) -> Self {
        let (region, gpu) = (&share.process.region, share.gpu);
        let mut all = Self(Vec::new());
        keeping_errno(|| {
            region.tidy();
            for process in region.processes() {
                let bytes = process.held.get(gpu).copied().unwrap_or(0);
                all.add(process.pid_here.unwrap_or(process.pid), process.pid, bytes);
            }
        });
        all
    }

    /// A process that has loaded both libraries has two slots.
    fn add(&mut self, pid: u32, calls_itself: u32, bytes: u64) {
        match self.0.iter_mut().find(|own| (own.pid, own.calls_itself) == (pid, calls_itself)) {
            Some(own) => own.bytes = own.bytes.saturating_add(bytes),
            None => self.0.push(Own { pid, calls_itself, bytes }),
        }
    }

    /// Those that hold memory, in the order in which they came.
    pub(super) fn holders(&self) -> impl Iterator<Item = &Own> {
        self.0.iter().filter(|own| own.bytes > 0)
    }

    /// The pid to show for one of the driver's, if it is of this container.
    pub(super) fn shown(&self, driver_pid: u32) -> Option<u32> {
        let by = |is: fn(&Own) -> u32| self.0.iter().find(|own| is(own) == driver_pid && driver_pid != 0);
        by(|own| own.pid).or_else(|| by(|own| own.calls_itself)).map(|own| own.pid)
    }
}

/// A process in one of NVML's forms.
trait Record: Copy {
    fn of(own: &Own) -> Self;
}

impl Record for nvmlProcessInfo_v1_t {
    fn of(own: &Own) -> Self {
        Self { pid: own.pid, usedGpuMemory: own.bytes }
    }
}

impl Record for nvmlProcessInfo_v2_t {
    fn of(own: &Own) -> Self {
        // Without MIG a process is in no instance.
        Self { pid: own.pid, usedGpuMemory: own.bytes, gpuInstanceId: u32::MAX, computeInstanceId: u32::MAX }
    }
}

impl Record for nvmlProcessDetail_v1_t {
    fn of(own: &Own) -> Self {
        Self {
            pid: own.pid,
            usedGpuMemory: own.bytes,
            gpuInstanceId: u32::MAX,
            computeInstanceId: u32::MAX,
            usedGpuCcProtectedMemory: 0,
        }
    }
}

/// Lists of which there are three.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Kind {
    Compute,
    /// Graphics or MPS.
    Other,
}

/// A list of processes; `ask` is the driver's own function.
fn running<T: Record>(
    device: nvmlDevice_t,
    kind: Kind,
    count: *mut u32,
    infos: *mut T,
    ask: impl Fn(*mut u32, *mut T) -> nvmlReturn_t,
) -> nvmlReturn_t {
    told(device, |share| {
        if count.is_null() {
            return check(ask(count, infos));
        }
        // What speaks against any answer is the driver's to say: a card that is lost, a library that has ended.
        let mut none = 0;
        may_answer(ask(&mut none, null_mut()))?;
        let list: Vec<T> = match kind {
            Kind::Compute => Container::of(&share).holders().map(T::of).collect(),
            Kind::Other => Vec::new(),
        };
        // SAFETY: the program's count and array.
        unsafe { put_list(count, infos, &list) }
    })
}

/// Whether the driver would have answered, had there been room.
fn may_answer(code: nvmlReturn_t) -> Answer {
    if code == NVML_ERROR_INSUFFICIENT_SIZE { Ok(()) } else { check(code) }
}

/// Whether the card answers at all.
pub(super) fn answers(share: &Share) -> Answer {
    let mut none = 0;
    // SAFETY: a number, and no room.
    may_answer(unsafe { real::nvmlDeviceGetComputeRunningProcesses(share.device, &mut none, null_mut()) })
}

hooks! { nvml;
    fn nvmlDeviceGetComputeRunningProcesses(
        device: nvmlDevice_t,
        count: *mut u32,
        infos: *mut nvmlProcessInfo_v1_t,
    ) |next, _variant| {
        // SAFETY: the program's promise.
        running(device, Kind::Compute, count, infos, |count, infos| unsafe { next(device, count, infos) })
    }

    fn nvmlDeviceGetComputeRunningProcesses_v2(
        device: nvmlDevice_t,
        count: *mut u32,
        infos: *mut nvmlProcessInfo_v2_t,
    ) |next, _variant| {
        // SAFETY: the program's promise.
        running(device, Kind::Compute, count, infos, |count, infos| unsafe { next(device, count, infos) })
    }

    fn nvmlDeviceGetComputeRunningProcesses_v3(
        device: nvmlDevice_t,
        count: *mut u32,
        infos: *mut nvmlProcessInfo_t,
    ) |next, _variant| {
        // SAFETY: the program's promise.
        running(device, Kind::Compute, count, infos, |count, infos| unsafe { next(device, count, infos) })
    }

    fn nvmlDeviceGetGraphicsRunningProcesses(
        device: nvmlDevice_t,
        count: *mut u32,
        infos: *mut nvmlProcessInfo_v1_t,
    ) |next, _variant| {
        // SAFETY: the program's promise.
        running(device, Kind::Other, count, infos, |count, infos| unsafe { next(device, count, infos) })
    }

    fn nvmlDeviceGetGraphicsRunningProcesses_v2(
        device: nvmlDevice_t,
        count: *mut u32,
        infos: *mut nvmlProcessInfo_v2_t,
    ) |next, _variant| {
        // SAFETY: the program's promise.
        running(device, Kind::Other, count, infos, |count, infos| unsafe { next(device, count, infos) })
    }

    fn nvmlDeviceGetGraphicsRunningProcesses_v3(
        device: nvmlDevice_t,
        count: *mut u32,
        infos: *mut nvmlProcessInfo_t,
    ) |next, _variant| {
        // SAFETY: the program's promise.
        running(device, Kind::Other, count, infos, |count, infos| unsafe { next(device, count, infos) })
    }

    fn nvmlDeviceGetMPSComputeRunningProcesses(
        device: nvmlDevice_t,
        count: *mut u32,
        infos: *mut nvmlProcessInfo_v1_t,
    ) |next, _variant| {
        // SAFETY: the program's promise.
        running(device, Kind::Other, count, infos, |count, infos| unsafe { next(device, count, infos) })
    }

    fn nvmlDeviceGetMPSComputeRunningProcesses_v2(
        device: nvmlDevice_t,
        count: *mut u32,
        infos: *mut nvmlProcessInfo_v2_t,
    ) |next, _variant| {
        // SAFETY: the program's promise.
        running(device, Kind::Other, count, infos, |count, infos| unsafe { next(device, count, infos) })
    }

    fn nvmlDeviceGetMPSComputeRunningProcesses_v3(
        device: nvmlDevice_t,
        count: *mut u32,
        infos: *mut nvmlProcessInfo_t,
    ) |next, _variant| {
        // SAFETY: the program's promise.
        running(device, Kind::Other, count, infos, |count, infos| unsafe { next(device, count, infos) })
    }

    /// The same lists in another form.
    fn nvmlDeviceGetRunningProcessDetailList(
        device: nvmlDevice_t,
        list: *mut nvmlProcessDetailList_t,
    ) |next, _variant| {
        told(device, |_| {
            // SAFETY: the program's structure; its version comes first in all versions.
            let version = unsafe { take(list.cast_const().cast::<u32>()) }?;
            if version != nvmlProcessDetailList_v1 {
                return Err(NVML_ERROR_ARGUMENT_VERSION_MISMATCH);
            }
            // SAFETY: this is the form of that version.
            let mut asked = unsafe { take(list.cast_const()) }?;
            let kind = if asked.mode == 0 { Kind::Compute } else { Kind::Other };
            let room = &raw mut asked.numProcArrayEntries;
            let answer = running(device, kind, room, asked.procArray, |count, infos| {
                let mut empty = nvmlProcessDetailList_t { numProcArrayEntries: 0, procArray: infos, ..asked };
                if !count.is_null() {
                    // SAFETY: a number of ours.
                    empty.numProcArrayEntries = unsafe { count.read() };
                }
                // SAFETY: a structure of ours, with the room that it says.
                unsafe { next(device, &mut empty) }
            });
            if matches!(answer, NVML_SUCCESS | NVML_ERROR_INSUFFICIENT_SIZE) {
                // SAFETY: the same structure.
                unsafe { put(list, asked) }?;
            }
            check(answer)
        })
    }

    /// Samples of the container's processes; none of theirs is "not found", as the driver says it.
    fn nvmlDeviceGetProcessUtilization(
        device: nvmlDevice_t,
        utilization: *mut nvmlProcessUtilizationSample_t,
        process_samples_count: *mut u32,
        last_seen_time_stamp: u64,
    ) |next, _variant| {
        // SAFETY: the program's promise.
        let ask = || unsafe { next(device, utilization, process_samples_count, last_seen_time_stamp) };
        told(device, |share| {
            if process_samples_count.is_null() {
                return check(ask());
            }
            if utilization.is_null() {
                answers(&share)?;
                // SAFETY: not null.
                unsafe { put(process_samples_count, room_for_all(&share)) }?;
                return Err(NVML_ERROR_INSUFFICIENT_SIZE);
            }
            let samples = utilisation::samples(&share, last_seen_time_stamp)?;
            if samples.is_empty() {
                return Err(NVML_ERROR_NOT_FOUND);
            }
            // SAFETY: the program's count and array.
            unsafe { put_list(process_samples_count, utilization, &samples) }
        })
    }

    /// The same with more engines.
    fn nvmlDeviceGetProcessesUtilizationInfo(
        device: nvmlDevice_t,
        utilization: *mut nvmlProcessesUtilizationInfo_t,
    ) |next, _variant| {
        told(device, |share| {
            // SAFETY: the program's structure; its version comes first in all versions.
            let version = unsafe { take(utilization.cast_const().cast::<u32>()) }?;
            if version != nvmlProcessesUtilizationInfo_v1 {
                return Err(NVML_ERROR_ARGUMENT_VERSION_MISMATCH);
            }
            // SAFETY: this is the form of that version.
            let mut asked = unsafe { take(utilization.cast_const()) }?;
            let own = utilisation::infos(&share, asked.lastSeenTimeStamp);
            let answer = match own {
                Err(code) => return Err(code),
                Ok(_) if asked.procUtilArray.is_null() => {
                    asked.processSamplesCount = room_for_all(&share);
                    Err(NVML_ERROR_INSUFFICIENT_SIZE)
                }
                Ok(infos) if infos.is_empty() => return Err(NVML_ERROR_NOT_FOUND),
                Ok(infos) => {
                    asked.lastSeenTimeStamp = infos.iter().map(|info| info.timeStamp).max().unwrap_or(0);
                    // SAFETY: a number of ours, and the program's array with the room that it said.
                    unsafe { put_list(&raw mut asked.processSamplesCount, asked.procUtilArray, &infos) }
                }
            };
            // SAFETY: the program's structure.
            unsafe { put(utilization, asked) }?;
            answer
        })
    }

    /// Those of the driver's that are of this container and still live: of the dead nobody knows whose they were.
    fn nvmlDeviceGetAccountingPids(device: nvmlDevice_t, count: *mut u32, pids: *mut u32) |next, _variant| {
        told(device, |share| {
            // SAFETY: room as it is said.
            let all = everything(|count, pids| unsafe { next(device, count, pids) })?;
            let own = Container::of(&share);
            let list: Vec<u32> = all.into_iter().flatten().filter_map(|pid| own.shown(pid)).collect();
            // SAFETY: the program's count and array.
            unsafe { put_list(count, pids, &list) }
        })
    }

    /// How a process of the container is called. Nobody else's can be asked for, whatever pid the driver knows it by.
    fn nvmlSystemGetProcessName(pid: u32, name: *mut c_char, length: u32) |next, _variant| {
        // SAFETY: the program's promise.
        let ask = |pid| unsafe { next(pid, name, length) };
        let process = match process::standing() {
            Standing::Refused => return NVML_ERROR_NO_PERMISSION,
            Standing::Held(process) => process,
        };
        // What else speaks against it is said first, about a pid that no process has.
        match ask(u32::MAX) {
            NVML_SUCCESS | NVML_ERROR_NOT_FOUND => {}
            code => return code,
        }
        if name.is_null() || length == 0 {
            return NVML_ERROR_INVALID_ARGUMENT;
        }
        if !is_own(process, pid) {
            return NVML_ERROR_NOT_FOUND;
        }
        let called = export_table::name(pid);
        let letters = called.iter().take_while(|&&letter| letter != 0);
        // A name that is too long is cut; its end is not.
        let room = (length as usize - 1).min(letters.clone().count());
        for (index, &letter) in letters.take(room).enumerate() {
            let place = name.wrapping_add(index);
            // SAFETY: not null, and inside what the program says is its length.
            unsafe { place.write(letter as c_char) };
        }
        let end = name.wrapping_add(room);
        // SAFETY: likewise: the end comes before the length does.
        unsafe { end.write(0) };
        NVML_SUCCESS
    }

    /// Those of a process of the container.
    fn nvmlDeviceGetAccountingStats(
        device: nvmlDevice_t,
        pid: u32,
        stats: *mut nvmlAccountingStats_t,
    ) |next, _variant| {
        // SAFETY: the program's promise.
        let ask = |pid| unsafe { next(device, pid, stats) };
        told(device, |share| {
            match Container::of(&share).shown(pid) {
                Some(_) => check(ask(pid)),
                // What else speaks against it is said first, about a pid that no process has.
                None => Err(match ask(u32::MAX) { NVML_SUCCESS => NVML_ERROR_NOT_FOUND, code => code }),
            }
        })
    }
}

/// Whether a pid, as the caller's `ps` shows it, is that of a process of the container that has loaded the driver.
fn is_own(process: &Process, pid: u32) -> bool {
    keeping_errno(|| process.region.processes().any(|own| own.pid_here == Some(pid)))
}

/// Records that there can be.
fn room_for_all(share: &Share) -> u32 {
    // At most as many as slots.
    Container::of(share).0.len().max(1) as u32
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_process_with_two_slots_is_one() {
        let mut all = Container(Vec::new());
        all.add(100, 7, 10);
        all.add(101, 8, 0);
        all.add(100, 7, 5);
        all.add(102, 9, u64::MAX);
        all.add(102, 9, 1);
        let holders: Vec<_> = all.holders().map(|own| (own.pid, own.bytes)).collect();
        assert_eq!(holders, [(100, 15), (102, u64::MAX)]);
    }

    #[test]
    fn the_driver_may_use_either_pid() {
        let mut all = Container(Vec::new());
        all.add(100, 7, 10);
        all.add(7, 3, 10);
        assert_eq!(all.shown(100), Some(100));
        assert_eq!(all.shown(7), Some(7), "what is shown goes first");
        assert_eq!(all.shown(3), Some(7));
        assert_eq!((all.shown(0), all.shown(5)), (None, None));
    }
}
