//! Memory without an address, and the addresses that it is mapped to.
//!
//! A handle is counted from its creation until its last reference and its last mapping are gone. Memory that another
//! process created and sent here (`cuMemImportFromShareableHandle`) is counted where it was created, and not a second
//! time. So exported memory is counted as long as its creator's process lives: every process that has the shareable
//! handle, or imported it, keeps the memory, and the last release is not visible. This counts too much rather than too
//! little. Multicast objects take no memory of their own: the memory bound to them was created like any other.
#![allow(unsafe_code)]

use super::allocations::HandleMap;
use super::{Reservation, checked, gpu_of_device, lock, with_grant, write_result};
use crate::hook::hooks;
use crate::process;
use partage_driver_api::cuda::*;
use std::collections::BTreeMap;
use std::sync::Mutex;

/// The handles of this process. Locked while the driver changes them, because it may reuse a number at once.
#[derive(Default)]
pub(super) struct VirtualMemory {
    records: Mutex<HandleRecords>,
}

#[derive(Default)]
struct HandleRecords {
    handles: HandleMap<HandleRecord>,
    /// Sizes and handles, by address.
    mapped: BTreeMap<CUdeviceptr, (u64, CUmemGenericAllocationHandle)>,
}

struct HandleRecord {
    gpu: usize,
    bytes: u64,
    references: u64,
    mappings: u64,
    /// Whether other processes may hold it, for an unknown time.
    exported: bool,
}

impl HandleRecords {
    /// Changes the reference counts of a handle. Returns what to release if that was the last reference.
    fn update(&mut self, handle: u64, change: impl FnOnce(&mut HandleRecord)) -> Option<(usize, u64)> {
        let own = self.handles.get_mut(&handle)?;
        change(own);
        if own.references > 0 || own.mappings > 0 {
            return None;
        }
        // Exported memory is forgotten but not released: the driver may reuse its number.
        self.handles.remove(&handle).filter(|gone| !gone.exported).map(|gone| (gone.gpu, gone.bytes))
    }
}

/// Makes a driver call that changes handles, and releases what is free afterwards.
fn with_change(
    call: impl FnOnce() -> CUresult,
    change: impl FnOnce(&mut HandleRecords) -> Vec<(usize, u64)>,
) -> CUresult {
    let Some(process) = process::attached() else { return call() };
    let mut records = lock(&process.memory.virtual_memory.records);
    let answer = call();
    if answer == CUDA_SUCCESS {
        for (gpu, bytes) in change(&mut records) {
            process.region.release(gpu, bytes);
        }
    }
    answer
}

hooks! { cuda;
    fn cuMemCreate(
        handle: *mut CUmemGenericAllocationHandle,
        size: usize,
        properties: *const CUmemAllocationProp,
        flags: u64,
    ) |next, _variant| {
        // SAFETY: null, or a structure that the application passed for the driver to read.
        let location = unsafe { properties.as_ref() }.map(|properties| properties.location);
        let on_device = location.filter(|location| location.type_ == CU_MEM_LOCATION_TYPE_DEVICE);
        let Some(location) = on_device.filter(|_| !handle.is_null() && size > 0) else {
            // Host memory, or invalid arguments.
            // SAFETY: the application's arguments, passed on unchanged under the driver function's own contract.
            return unsafe { next(handle, size, properties, flags) };
        };
        with_grant(
            |process| {
                let gpu = gpu_of_device(process, location.id)?;
                let reserved = Reservation::take(process, gpu, size as u64)?;
                let mut records = lock(&process.memory.virtual_memory.records);
                let mut made = 0;
                // SAFETY: the output pointer is valid for writes; the other arguments are the application's, unchanged.
                checked(unsafe { next(&mut made, size, properties, flags) })?;
                let own = HandleRecord { gpu, bytes: reserved.keep(), references: 1, mappings: 0, exported: false };
                records.handles.insert(made, own);
                // SAFETY: not null, and the application passed it for the driver to write the result to.
                unsafe { write_result(handle, made) };
                Ok(())
            })
    }

    fn cuMemRelease(handle: CUmemGenericAllocationHandle) |next, _variant| {
        with_change(
            // SAFETY: the application's arguments, passed on unchanged under the driver function's own contract.
            || unsafe { next(handle) },
            |records| {
                let gone = records.update(handle, |own| own.references = own.references.saturating_sub(1));
                gone.into_iter().collect()
            },
        )
    }

    fn cuMemRetainAllocationHandle(
        handle: *mut CUmemGenericAllocationHandle,
        address: *mut c_void,
    ) |next, _variant| {
        with_change(
            // SAFETY: the application's arguments, passed on unchanged under the driver function's own contract.
            || unsafe { next(handle, address) },
            |records| {
                // SAFETY: null, or a pointer to which the driver has just written.
                let retained = unsafe { handle.as_ref() }.copied().unwrap_or(0);
                records.update(retained, |own| own.references += 1);
                Vec::new()
            },
        )
    }

    fn cuMemExportToShareableHandle(
        shareable_handle: *mut c_void,
        handle: CUmemGenericAllocationHandle,
        handle_type: CUmemAllocationHandleType,
        flags: u64,
    ) |next, _variant| {
        with_change(
            // SAFETY: the application's arguments, passed on unchanged under the driver function's own contract.
            || unsafe { next(shareable_handle, handle, handle_type, flags) },
            |records| {
                records.update(handle, |own| own.exported = true);
                Vec::new()
            },
        )
    }

    fn cuMemMap(
        pointer: CUdeviceptr,
        size: usize,
        offset: usize,
        handle: CUmemGenericAllocationHandle,
        flags: u64,
    ) |next, _variant| {
        with_change(
            // SAFETY: the application's arguments, passed on unchanged under the driver function's own contract.
            || unsafe { next(pointer, size, offset, handle, flags) },
            |records| {
                if records.handles.contains_key(&handle) {
                    records.update(handle, |own| own.mappings += 1);
                    records.mapped.insert(pointer, (size as u64, handle));
                }
                Vec::new()
            },
        )
    }

    fn cuMemUnmap(pointer: CUdeviceptr, size: usize) |next, _variant| {
        with_change(
            // SAFETY: the application's arguments, passed on unchanged under the driver function's own contract.
            || unsafe { next(pointer, size) },
            |records| {
                let end = pointer.saturating_add(size as u64);
                let gone: Vec<_> = records.mapped.range(pointer..end).map(|(&at, &(_, handle))| (at, handle)).collect();
                let free = gone.into_iter().filter_map(|(at, handle)| {
                    records.mapped.remove(&at);
                    records.update(handle, |own| own.mappings = own.mappings.saturating_sub(1))
                });
                free.collect()
            },
        )
    }

    /// Memory that is mapped to parts of an array stays there when its handle is released, and its unmapping is not
    /// visible: such memory is counted as long as the process lives.
    fn cuMemMapArrayAsync(
        map_info_list: *mut CUarrayMapInfo,
        count: u32,
        stream: CUstream,
    ) twin cuMemMapArrayAsync_ptsz |next, _variant| {
        with_change(
            // SAFETY: the application's arguments, passed on unchanged under the driver function's own contract.
            || unsafe { next(map_info_list, count, stream) },
            |records| {
                if !map_info_list.is_null() {
                    // SAFETY: not null, and the application passed `count` entries, which the driver has read.
                    let list = unsafe { std::slice::from_raw_parts(map_info_list, count as usize) };
                    for info in list.iter().filter(|info| info.memOperationType == CU_MEM_OPERATION_TYPE_MAP) {
                        // SAFETY: every bit pattern of the union is a valid handle number.
                        let handle = unsafe { info.memHandle.memHandle };
                        records.update(handle, |own| own.mappings += 1);
                    }
                }
                Vec::new()
            },
        )
    }
}
