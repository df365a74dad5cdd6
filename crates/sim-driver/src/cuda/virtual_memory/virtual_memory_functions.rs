//! Exported functions for virtual memory management.

use super::*;
use crate::cuda::context::{self, write_out};
use std::os::fd::{BorrowedFd, IntoRawFd};

/// Returns the key of a location in the access map: a device ordinal, or -1 for the host.
fn accessor(location: &CUmemLocation) -> Result<i32, CudaError> {
    Ok(location_device(location)?.map_or(-1, |device| device.ordinal))
}

impl VirtualMemoryApi for Library {
    unsafe fn cuMemAddressReserve(
        pointer: *mut CUdeviceptr,
        size: usize,
        alignment: usize,
        address: CUdeviceptr,
        flags: u64,
    ) -> Result<(), CudaError> {
        session()?;
        if pointer.is_null() || flags != 0 {
            return Err(CudaError::INVALID_VALUE);
        }
        let start = reserve(size, alignment, address)?;
        // SAFETY: non-null, and the program passes a pointer valid for writes.
        unsafe { write_out(pointer, start) }
    }

    unsafe fn cuMemAddressFree(pointer: CUdeviceptr, size: usize) -> Result<(), CudaError> {
        session()?;
        unreserve(pointer, size)
    }

    unsafe fn cuMemCreate(
        handle: *mut CUmemGenericAllocationHandle,
        size: usize,
        properties: *const CUmemAllocationProp,
        flags: u64,
    ) -> Result<(), CudaError> {
        session()?;
        if handle.is_null() || flags != 0 {
            return Err(CudaError::INVALID_VALUE);
        }
        let made = create(size, properties)?;
        // SAFETY: non-null, and the program passes a pointer valid for writes.
        unsafe { write_out(handle, made.number()) }
    }

    unsafe fn cuMemRelease(handle: CUmemGenericAllocationHandle) -> Result<(), CudaError> {
        let handle = resolve(handle)?;
        if handle.get()?.references == 0 {
            return Err(CudaError::INVALID_VALUE);
        }
        handle.adjust_counts(|inner| inner.references -= 1)
    }

    unsafe fn cuMemMap(
        pointer: CUdeviceptr,
        size: usize,
        offset: usize,
        handle: CUmemGenericAllocationHandle,
        flags: u64,
    ) -> Result<(), CudaError> {
        let handle = resolve(handle)?;
        if offset != 0 || flags != 0 || handle.get()?.references == 0 {
            return Err(CudaError::INVALID_VALUE);
        }
        map(pointer, size, handle)
    }

    unsafe fn cuMemUnmap(pointer: CUdeviceptr, size: usize) -> Result<(), CudaError> {
        session()?;
        if let Ok(context) = context::current() {
            memory::wait_until_unused(context)?;
        }
        unmap(pointer, size)
    }

    unsafe fn cuMemSetAccess(
        pointer: CUdeviceptr,
        size: usize,
        descriptor: *const CUmemAccessDesc,
        count: usize,
    ) -> Result<(), CudaError> {
        session()?;
        if descriptor.is_null() || count == 0 {
            return Err(CudaError::INVALID_VALUE);
        }
        let mut all = addresses();
        let mappings = whole_mappings(&all, pointer, size)?;
        // SAFETY: non-null, and the program passes an array of the stated length.
        let descriptors = unsafe { std::slice::from_raw_parts(descriptor, count) };
        for descriptor in descriptors {
            let known = matches!(
                descriptor.flags,
                CU_MEM_ACCESS_FLAGS_PROT_NONE
                    | CU_MEM_ACCESS_FLAGS_PROT_READ
                    | CU_MEM_ACCESS_FLAGS_PROT_READWRITE
            );
            let accessor_id = accessor(&descriptor.location)?;
            if !known {
                return Err(CudaError::INVALID_VALUE);
            }
            for at in &mappings {
                let Some(mapping) = all.mapped.get_mut(at) else { continue };
                mapping.access.insert(accessor_id, u64::from(descriptor.flags));
                let most = mapping.access.values().max().copied().unwrap_or(0);
                memory::update_range(*at, |found| found.flags = most as u32);
            }
        }
        Ok(())
    }

    unsafe fn cuMemGetAccess(
        flags: *mut u64,
        location: *const CUmemLocation,
        pointer: CUdeviceptr,
    ) -> Result<(), CudaError> {
        session()?;
        if location.is_null() {
            return Err(CudaError::INVALID_VALUE);
        }
        // SAFETY: non-null, and the program passes a pointer valid for reads.
        let accessor_id = accessor(&unsafe { location.read() })?;
        let all = addresses();
        let (start, mapping) = all.mapped.range(..=pointer).next_back().ok_or(CudaError::INVALID_VALUE)?;
        if pointer - start >= mapping.bytes as u64 {
            return Err(CudaError::INVALID_VALUE);
        }
        // SAFETY: CUDA requires output pointers to be null or valid for writes.
        unsafe { write_out(flags, mapping.access.get(&accessor_id).copied().unwrap_or(0)) }
    }

    unsafe fn cuMemGetAllocationGranularity(
        granularity: *mut usize,
        properties: *const CUmemAllocationProp,
        option: CUmemAllocationGranularity_flags,
    ) -> Result<(), CudaError> {
        check_properties(properties)?;
        if option > CU_MEM_ALLOC_GRANULARITY_RECOMMENDED {
            return Err(CudaError::INVALID_VALUE);
        }
        // SAFETY: CUDA requires output pointers to be null or valid for writes.
        unsafe { write_out(granularity, GRANULARITY_BYTES) }
    }

    unsafe fn cuMemGetAllocationPropertiesFromHandle(
        properties: *mut CUmemAllocationProp,
        handle: CUmemGenericAllocationHandle,
    ) -> Result<(), CudaError> {
        let inner = resolve(handle)?.get()?;
        let mut own = CUmemAllocationProp {
            type_: CU_MEM_ALLOCATION_TYPE_PINNED,
            requestedHandleTypes: inner.handle_types,
            location: inner.location,
            ..CUmemAllocationProp::default()
        };
        own.allocFlags.compressionType = inner.compression;
        own.allocFlags.gpuDirectRDMACapable = inner.rdma;
        own.allocFlags.usage = inner.usage;
        // SAFETY: CUDA requires output pointers to be null or valid for writes.
        unsafe { write_out(properties, own) }
    }

    unsafe fn cuMemExportToShareableHandle(
        shareable_handle: *mut c_void,
        handle: CUmemGenericAllocationHandle,
        handle_type: CUmemAllocationHandleType,
        flags: u64,
    ) -> Result<(), CudaError> {
        let inner = resolve(handle)?.get()?;
        let descriptor = handle_type == CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR;
        if shareable_handle.is_null() || flags != 0 || !descriptor || inner.handle_types != handle_type {
            return Err(CudaError::INVALID_VALUE);
        }
        let copy = inner.file.try_clone().map_err(|_| CudaError::OPERATING_SYSTEM)?;
        // SAFETY: non-null, and the program passes a pointer to an `int`.
        unsafe { shareable_handle.cast::<i32>().write_unaligned(copy.into_raw_fd()) };
        Ok(())
    }

    unsafe fn cuMemImportFromShareableHandle(
        handle: *mut CUmemGenericAllocationHandle,
        os_handle: *mut c_void,
        sh_handle_type: CUmemAllocationHandleType,
    ) -> Result<(), CudaError> {
        session()?;
        let number = i32::try_from(os_handle as usize).map_err(|_| CudaError::INVALID_VALUE)?;
        if handle.is_null() || sh_handle_type != CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR || number < 0 {
            return Err(CudaError::INVALID_VALUE);
        }
        // SAFETY: the descriptor is only duplicated, which fails if it is invalid; the program keeps its own.
        let copy = unsafe { BorrowedFd::borrow_raw(number) }.try_clone_to_owned();
        let made = import(copy.map_err(|_| CudaError::INVALID_VALUE)?)?;
        // SAFETY: non-null, and the program passes a pointer valid for writes.
        unsafe { write_out(handle, made.number()) }
    }

    unsafe fn cuMemRetainAllocationHandle(
        handle: *mut CUmemGenericAllocationHandle,
        address: *mut c_void,
    ) -> Result<(), CudaError> {
        session()?;
        if handle.is_null() {
            return Err(CudaError::INVALID_VALUE);
        }
        let pointer = address as u64;
        let all = addresses();
        let (start, mapping) = all.mapped.range(..=pointer).next_back().ok_or(CudaError::INVALID_VALUE)?;
        if pointer - start >= mapping.bytes as u64 {
            return Err(CudaError::INVALID_VALUE);
        }
        mapping.handle.adjust_counts(|inner| inner.references += 1)?;
        // SAFETY: non-null, and the program passes a pointer valid for writes.
        unsafe { write_out(handle, mapping.handle.number()) }
    }
}
