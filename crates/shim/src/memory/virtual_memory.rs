//! Memory without an address, and the addresses it is mapped to.
//!
//! A handle counts from its making to the end of the last of its references and mappings. Memory that somebody else made
//! and sent here (`cuMemImportFromShareableHandle`) counts where it was made and not a second time. So what was exported
//! counts as long as its maker's process lives: whoever has the shareable handle, or imported it, keeps the memory, and
//! when the last of them lets go is not seen. Rather once too often than never. Multicast objects take no memory of their
//! own: what is bound to them was made as any other.
#![allow(unsafe_code)]

use super::allocations::Table;
use super::{Reserved, answer, checked, granted, locked, of_device};
use crate::hook::hooks;
use crate::process;
use partage_driver_api::cuda::*;
use std::collections::BTreeMap;
use std::sync::Mutex;

/// The handles of this process. Held while the driver changes them: it may use a number again at once.
#[derive(Default)]
pub(super) struct VirtualMemory {
    books: Mutex<Books>,
}

#[derive(Default)]
struct Books {
    handles: Table<Handle>,
    /// Sizes and handles, by address.
    mapped: BTreeMap<CUdeviceptr, (u64, CUmemGenericAllocationHandle)>,
}

struct Handle {
    gpu: usize,
    bytes: u64,
    references: u64,
    mappings: u64,
    /// Others may have it, for as long as they like.
    exported: bool,
}

impl Books {
    /// Changes how often a handle is held; what to give back if that was the last time.
    fn count(&mut self, handle: u64, change: impl FnOnce(&mut Handle)) -> Option<(usize, u64)> {
        let own = self.handles.get_mut(&handle)?;
        change(own);
        if own.references > 0 || own.mappings > 0 {
            return None;
        }
        // What was exported is forgotten but not given back: the driver may use its number again.
        self.handles.remove(&handle).filter(|gone| !gone.exported).map(|gone| (gone.gpu, gone.bytes))
    }
}

/// Does what changes the books, with the driver's call, and gives back what is free then.
fn changing(
    call: impl FnOnce() -> CUresult,
    change: impl FnOnce(&mut Books) -> Vec<(usize, u64)>,
) -> CUresult {
    let Some(process) = process::attached() else { return call() };
    let mut books = locked(&process.memory.virtual_memory.books);
    let answer = call();
    if answer == CUDA_SUCCESS {
        for (gpu, bytes) in change(&mut books) {
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
        // SAFETY: null, or the program's; the driver refuses null.
        let location = unsafe { properties.as_ref() }.map(|properties| properties.location);
        let on_device = location.filter(|location| location.type_ == CU_MEM_LOCATION_TYPE_DEVICE);
        let Some(location) = on_device.filter(|_| !handle.is_null() && size > 0) else {
            // The host's, or nothing that there is.
            // SAFETY: the program's promise.
            return unsafe { next(handle, size, properties, flags) };
        };
        granted(
            |process| {
                let gpu = of_device(process, location.id)?;
                let reserved = Reserved::take(process, gpu, size as u64)?;
                let mut books = locked(&process.memory.virtual_memory.books);
                let mut made = 0;
                // SAFETY: a number to fill in, and the program's promise.
                checked(unsafe { next(&mut made, size, properties, flags) })?;
                let own = Handle { gpu, bytes: reserved.keep(), references: 1, mappings: 0, exported: false };
                books.handles.insert(made, own);
                // SAFETY: not null, and the program's to write.
                unsafe { answer(handle, made) };
                Ok(())
            })
    }

    fn cuMemRelease(handle: CUmemGenericAllocationHandle) |next, _variant| {
        changing(
            // SAFETY: the program's promise.
            || unsafe { next(handle) },
            |books| {
                let gone = books.count(handle, |own| own.references = own.references.saturating_sub(1));
                gone.into_iter().collect()
            },
        )
    }

    fn cuMemRetainAllocationHandle(
        handle: *mut CUmemGenericAllocationHandle,
        address: *mut c_void,
    ) |next, _variant| {
        changing(
            // SAFETY: the program's promise.
            || unsafe { next(handle, address) },
            |books| {
                // SAFETY: null, or the program's, where the driver has just written.
                let retained = unsafe { handle.as_ref() }.copied().unwrap_or(0);
                books.count(retained, |own| own.references += 1);
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
        changing(
            // SAFETY: the program's promise.
            || unsafe { next(shareable_handle, handle, handle_type, flags) },
            |books| {
                books.count(handle, |own| own.exported = true);
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
        changing(
            // SAFETY: the program's promise.
            || unsafe { next(pointer, size, offset, handle, flags) },
            |books| {
                if books.handles.contains_key(&handle) {
                    books.count(handle, |own| own.mappings += 1);
                    books.mapped.insert(pointer, (size as u64, handle));
                }
                Vec::new()
            },
        )
    }

    fn cuMemUnmap(pointer: CUdeviceptr, size: usize) |next, _variant| {
        changing(
            // SAFETY: the program's promise.
            || unsafe { next(pointer, size) },
            |books| {
                let end = pointer.saturating_add(size as u64);
                let gone: Vec<_> = books.mapped.range(pointer..end).map(|(&at, &(_, handle))| (at, handle)).collect();
                let free = gone.into_iter().filter_map(|(at, handle)| {
                    books.mapped.remove(&at);
                    books.count(handle, |own| own.mappings = own.mappings.saturating_sub(1))
                });
                free.collect()
            },
        )
    }

    /// What is behind parts of an array stays there when its handle goes, and when it leaves again is not seen: such
    /// memory counts as long as the process lives.
    fn cuMemMapArrayAsync(
        map_info_list: *mut CUarrayMapInfo,
        count: u32,
        stream: CUstream,
    ) twin cuMemMapArrayAsync_ptsz |next, _variant| {
        changing(
            // SAFETY: the program's promise.
            || unsafe { next(map_info_list, count, stream) },
            |books| {
                if !map_info_list.is_null() {
                    // SAFETY: not null, and as many as the program says, which the driver has read.
                    let list = unsafe { std::slice::from_raw_parts(map_info_list, count as usize) };
                    for info in list.iter().filter(|info| info.memOperationType == CU_MEM_OPERATION_TYPE_MAP) {
                        // SAFETY: every bit pattern is a number.
                        let handle = unsafe { info.memHandle.memHandle };
                        books.count(handle, |own| own.mappings += 1);
                    }
                }
                Vec::new()
            },
        )
    }
}
