//! Exported functions for linear, pinned and managed memory.

use super::super::context::{self, write_out};
use super::super::session::session;
use super::lookup::MemoryKind;
use super::{host, managed, pointer_attributes};
use crate::cuda::memory::{device_arena, free_unused, lookup, wait_until_unused};
use crate::cuda::*;
use crate::state::UNIT;

/// Alignment of the rows of pitched memory, in bytes.
const PITCH_ALIGNMENT: usize = 512;

/// Returns the free and total memory of the current context's card, in bytes.
#[inline]
fn free_and_total() -> Result<(u64, u64), CudaError> {
    let device = context::current()?.device;
    device.state.reclaim_dead_periodically(device.gpu);
    let (used, total) = (device.state.used_memory(device.gpu), device.state.memory(device.gpu));
    Ok((total.saturating_sub(used) * UNIT, total * UNIT))
}

/// Writes an output unless its pointer is null: programs query one of two values with null for the other.
///
/// # Safety
/// `to` is null or valid for writes.
#[inline]
unsafe fn write_optional<T>(to: *mut T, value: T) {
    if !to.is_null() {
        // SAFETY: non-null, and the caller guarantees that it is valid for writes.
        unsafe { to.write(value) };
    }
}

fn free(pointer: CUdeviceptr) -> Result<(), CudaError> {
    let context = context::current()?;
    capture::check_unsafe_call()?;
    wait_until_unused(context)?;
    free_unused(pointer)
}

fn host_pointer(to: *mut *mut c_void, bytes: usize, flags: u32) -> Result<(), CudaError> {
    let context = context::current()?;
    if to.is_null() {
        return Err(CudaError::INVALID_VALUE);
    }
    let start = host::allocate(context, bytes, flags)?;
    // SAFETY: non-null, and the program passes a pointer valid for writes.
    unsafe { write_out(to, start as *mut c_void) }
}

fn range(pointer: CUdeviceptr) -> Result<(CUdeviceptr, usize), CudaError> {
    context::current()?;
    // Registered host memory belongs to the program and is not an allocation.
    let found = lookup::find(pointer).filter(|found| found.kind != MemoryKind::HostRegistered);
    found.map(|found| (found.start, found.bytes)).ok_or(CudaError::NOT_FOUND)
}

impl MemoryApi for Library {
    unsafe fn cuMemAlloc(_pointer: *mut CUdeviceptr_v1, _bytes: u32) -> Result<(), CudaError> {
        context::current()?;
        // No device address fits into 32 bits.
        Err(CudaError::INVALID_VALUE)
    }

    #[inline]
    unsafe fn cuMemAlloc_v2(pointer: *mut CUdeviceptr, bytes: usize) -> Result<(), CudaError> {
        let context = context::current()?;
        if pointer.is_null() {
            return Err(CudaError::INVALID_VALUE);
        }
        capture::check_unsafe_call()?;
        let start = device_arena::allocate(context, bytes, MemoryKind::Plain)?;
        // SAFETY: non-null, and the program passes a pointer valid for writes.
        unsafe { write_out(pointer, start) }
    }

    unsafe fn cuMemAllocPitch(
        _pointer: *mut CUdeviceptr_v1,
        _pitch: *mut u32,
        _width_in_bytes: u32,
        _height: u32,
        _element_size_bytes: u32,
    ) -> Result<(), CudaError> {
        context::current()?;
        Err(CudaError::INVALID_VALUE)
    }

    unsafe fn cuMemAllocPitch_v2(
        pointer: *mut CUdeviceptr,
        pitch: *mut usize,
        width_in_bytes: usize,
        height: usize,
        element_size_bytes: u32,
    ) -> Result<(), CudaError> {
        let context = context::current()?;
        let sizes = width_in_bytes > 0 && height > 0 && matches!(element_size_bytes, 4 | 8 | 16);
        if pointer.is_null() || pitch.is_null() || !sizes {
            return Err(CudaError::INVALID_VALUE);
        }
        let wide =
            width_in_bytes.checked_next_multiple_of(PITCH_ALIGNMENT).ok_or(CudaError::OUT_OF_MEMORY)?;
        let bytes = wide.checked_mul(height).ok_or(CudaError::OUT_OF_MEMORY)?;
        let start = device_arena::allocate(context, bytes, MemoryKind::Plain)?;
        // SAFETY: non-null, and the program passes a pointer valid for writes.
        unsafe { write_out(pitch, wide) }?;
        // SAFETY: CUDA requires output pointers to be null or valid for writes.
        unsafe { write_out(pointer, start) }
    }

    unsafe fn cuMemAllocManaged(
        pointer: *mut CUdeviceptr,
        bytes: usize,
        flags: u32,
    ) -> Result<(), CudaError> {
        let context = context::current()?;
        if pointer.is_null() {
            return Err(CudaError::INVALID_VALUE);
        }
        let start = managed::allocate(context, bytes, flags)?;
        // SAFETY: non-null, and the program passes a pointer valid for writes.
        unsafe { write_out(pointer, start) }
    }

    unsafe fn cuMemFree(pointer: CUdeviceptr_v1) -> Result<(), CudaError> {
        free(u64::from(pointer))
    }

    #[inline]
    unsafe fn cuMemFree_v2(pointer: CUdeviceptr) -> Result<(), CudaError> {
        free(pointer)
    }

    unsafe fn cuMemGetInfo(free: *mut u32, total: *mut u32) -> Result<(), CudaError> {
        let (left, all) = free_and_total()?;
        let narrow = |bytes: u64| u32::try_from(bytes).unwrap_or(u32::MAX);
        // SAFETY: CUDA requires output pointers to be null or valid for writes.
        unsafe { write_optional(free, narrow(left)) };
        // SAFETY: CUDA requires output pointers to be null or valid for writes.
        unsafe { write_optional(total, narrow(all)) };
        Ok(())
    }

    #[inline]
    unsafe fn cuMemGetInfo_v2(free: *mut usize, total: *mut usize) -> Result<(), CudaError> {
        let (left, all) = free_and_total()?;
        // SAFETY: CUDA requires output pointers to be null or valid for writes.
        unsafe { write_optional(free, left as usize) };
        // SAFETY: CUDA requires output pointers to be null or valid for writes.
        unsafe { write_optional(total, all as usize) };
        Ok(())
    }

    unsafe fn cuMemGetAddressRange(
        base: *mut CUdeviceptr_v1,
        size: *mut u32,
        pointer: CUdeviceptr_v1,
    ) -> Result<(), CudaError> {
        let (start, bytes) = range(u64::from(pointer))?;
        if !base.is_null() {
            // SAFETY: non-null, and the program passes a pointer valid for writes.
            unsafe { write_out(base, start as u32) }?;
        }
        if !size.is_null() {
            // SAFETY: CUDA requires output pointers to be null or valid for writes.
            unsafe { write_out(size, bytes as u32) }?;
        }
        Ok(())
    }

    unsafe fn cuMemGetAddressRange_v2(
        base: *mut CUdeviceptr,
        size: *mut usize,
        pointer: CUdeviceptr,
    ) -> Result<(), CudaError> {
        let (start, bytes) = range(pointer)?;
        if !base.is_null() {
            // SAFETY: non-null, and the program passes a pointer valid for writes.
            unsafe { write_out(base, start) }?;
        }
        if !size.is_null() {
            // SAFETY: CUDA requires output pointers to be null or valid for writes.
            unsafe { write_out(size, bytes) }?;
        }
        Ok(())
    }

    unsafe fn cuMemAllocHost(pointer: *mut *mut c_void, bytes: u32) -> Result<(), CudaError> {
        host_pointer(pointer, bytes as usize, 0)
    }

    unsafe fn cuMemAllocHost_v2(pointer: *mut *mut c_void, bytes: usize) -> Result<(), CudaError> {
        host_pointer(pointer, bytes, 0)
    }

    unsafe fn cuMemHostAlloc(pointer: *mut *mut c_void, bytes: usize, flags: u32) -> Result<(), CudaError> {
        host_pointer(pointer, bytes, flags)
    }

    unsafe fn cuMemFreeHost(host: *mut c_void) -> Result<(), CudaError> {
        host::free(context::current()?, host as u64)
    }

    unsafe fn cuMemHostGetDevicePointer(
        _pointer: *mut CUdeviceptr_v1,
        _host: *mut c_void,
        _flags: u32,
    ) -> Result<(), CudaError> {
        context::current()?;
        Err(CudaError::INVALID_VALUE)
    }

    unsafe fn cuMemHostGetDevicePointer_v2(
        pointer: *mut CUdeviceptr,
        host: *mut c_void,
        flags: u32,
    ) -> Result<(), CudaError> {
        context::current()?;
        if flags != 0 {
            return Err(CudaError::INVALID_VALUE);
        }
        host::find_host_range(host as u64)?;
        // SAFETY: CUDA requires output pointers to be null or valid for writes.
        unsafe { write_out(pointer, host as u64) }
    }

    unsafe fn cuMemHostGetFlags(flags: *mut u32, host: *mut c_void) -> Result<(), CudaError> {
        context::current()?;
        let found = host::find_host_range(host as u64)?;
        // SAFETY: CUDA requires output pointers to be null or valid for writes.
        unsafe { write_out(flags, found.flags) }
    }

    unsafe fn cuMemHostRegister(host: *mut c_void, bytes: usize, flags: u32) -> Result<(), CudaError> {
        host::register(context::current()?, host as u64, bytes, flags)
    }

    unsafe fn cuMemHostRegister_v2(host: *mut c_void, bytes: usize, flags: u32) -> Result<(), CudaError> {
        host::register(context::current()?, host as u64, bytes, flags)
    }

    unsafe fn cuMemHostUnregister(host: *mut c_void) -> Result<(), CudaError> {
        host::unregister(context::current()?, host as u64)
    }

    unsafe fn cuMemAdvise(
        pointer: CUdeviceptr,
        count: usize,
        advice: CUmem_advise,
        device: CUdevice,
    ) -> Result<(), CudaError> {
        session()?;
        // Advice without a location.
        let nowhere = matches!(advice, CU_MEM_ADVISE_SET_READ_MOSTLY | CU_MEM_ADVISE_UNSET_READ_MOSTLY)
            || advice == CU_MEM_ADVISE_UNSET_PREFERRED_LOCATION;
        let place = if nowhere { 0 } else { managed::device_location(device)? };
        managed::advise(pointer, count, advice, place)
    }

    unsafe fn cuMemAdvise_v2(
        pointer: CUdeviceptr,
        count: usize,
        advice: CUmem_advise,
        location: CUmemLocation,
    ) -> Result<(), CudaError> {
        session()?;
        let nowhere = matches!(advice, CU_MEM_ADVISE_SET_READ_MOSTLY | CU_MEM_ADVISE_UNSET_READ_MOSTLY)
            || advice == CU_MEM_ADVISE_UNSET_PREFERRED_LOCATION;
        let place = if nowhere { 0 } else { managed::location_ordinal(&location)? };
        managed::advise(pointer, count, advice, place)
    }

    unsafe fn cuMemPrefetchAsync(
        pointer: CUdeviceptr,
        count: usize,
        to: CUdevice,
        stream: CUstream,
    ) -> Result<(), CudaError> {
        session()?;
        managed::prefetch(pointer, count, managed::device_location(to)?, stream)
    }

    unsafe fn cuMemPrefetchAsync_v2(
        pointer: CUdeviceptr,
        count: usize,
        location: CUmemLocation,
        flags: u32,
        stream: CUstream,
    ) -> Result<(), CudaError> {
        session()?;
        if flags != 0 {
            return Err(CudaError::INVALID_VALUE);
        }
        managed::prefetch(pointer, count, managed::location_ordinal(&location)?, stream)
    }

    unsafe fn cuMemRangeGetAttribute(
        data: *mut c_void,
        data_size: usize,
        attribute: CUmem_range_attribute,
        pointer: CUdeviceptr,
        count: usize,
    ) -> Result<(), CudaError> {
        session()?;
        // SAFETY: CUDA requires the buffer to be null or as long as stated.
        unsafe { managed::attribute(data, data_size, attribute, pointer, count) }
    }

    unsafe fn cuMemRangeGetAttributes(
        data: *mut *mut c_void,
        data_sizes: *mut usize,
        attributes: *mut CUmem_range_attribute,
        num_attributes: usize,
        pointer: CUdeviceptr,
        count: usize,
    ) -> Result<(), CudaError> {
        session()?;
        if data.is_null() || data_sizes.is_null() || attributes.is_null() || num_attributes == 0 {
            return Err(CudaError::INVALID_VALUE);
        }
        // SAFETY: non-null; the program passes arrays of `num_attributes` entries.
        let data = unsafe { std::slice::from_raw_parts(data, num_attributes) };
        // SAFETY: non-null; the program passes arrays of `num_attributes` entries.
        let sizes = unsafe { std::slice::from_raw_parts(data_sizes, num_attributes) };
        // SAFETY: non-null; the program passes arrays of `num_attributes` entries.
        let attributes = unsafe { std::slice::from_raw_parts(attributes, num_attributes) };
        for ((&data, &size), &attribute) in data.iter().zip(sizes).zip(attributes) {
            // SAFETY: CUDA requires the buffer to be null or as long as stated.
            unsafe { managed::attribute(data, size, attribute, pointer, count) }?;
        }
        Ok(())
    }

    unsafe fn cuPointerGetAttribute(
        data: *mut c_void,
        attribute: CUpointer_attribute,
        pointer: CUdeviceptr,
    ) -> Result<(), CudaError> {
        session()?;
        // SAFETY: CUDA requires the buffer to be null or as large as the attribute.
        unsafe { pointer_attributes::get(data, attribute, pointer) }
    }

    unsafe fn cuPointerGetAttributes(
        num_attributes: u32,
        attributes: *mut CUpointer_attribute,
        data: *mut *mut c_void,
        pointer: CUdeviceptr,
    ) -> Result<(), CudaError> {
        session()?;
        if attributes.is_null() || data.is_null() {
            return Err(CudaError::INVALID_VALUE);
        }
        // SAFETY: non-null; the program passes arrays of `num_attributes` entries.
        let attributes = unsafe { std::slice::from_raw_parts(attributes, num_attributes as usize) };
        // SAFETY: non-null; the program passes arrays of `num_attributes` entries.
        let data = unsafe { std::slice::from_raw_parts(data, num_attributes as usize) };
        for (&attribute, &data) in attributes.iter().zip(data) {
            // SAFETY: CUDA requires the buffer to be null or as large as the attribute.
            unsafe { pointer_attributes::get_one_of_many(data, attribute, pointer) }?;
        }
        Ok(())
    }

    unsafe fn cuPointerSetAttribute(
        value: *const c_void,
        attribute: CUpointer_attribute,
        pointer: CUdeviceptr,
    ) -> Result<(), CudaError> {
        session()?;
        if value.is_null() || attribute != CU_POINTER_ATTRIBUTE_SYNC_MEMOPS {
            return Err(CudaError::INVALID_VALUE);
        }
        // SAFETY: non-null; the attribute's value is a 32-bit integer.
        let on = unsafe { value.cast::<u32>().read_unaligned() };
        if lookup::set_sync_memops(pointer, on != 0) { Ok(()) } else { Err(CudaError::INVALID_VALUE) }
    }
}
