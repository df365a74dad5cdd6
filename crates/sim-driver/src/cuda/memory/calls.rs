//! The functions on memory.

use super::super::context::{self, answer};
use super::super::session::session;
use super::find::Kind;
use super::{attributes, host, managed};
use crate::cuda::memory::{arena, find, free_settled, settle};
use crate::cuda::*;
use crate::state::UNIT;

/// Rows of pitched memory begin at multiples of this.
const PITCH: usize = 512;

/// Free and all memory of the current context's card.
#[inline]
fn info() -> Result<(u64, u64), CudaError> {
    let device = context::current()?.device;
    device.state.mind_the_dead(device.gpu);
    let (used, total) = (device.state.used_memory(device.gpu), device.state.memory(device.gpu));
    Ok((total.saturating_sub(used) * UNIT, total * UNIT))
}

/// Writes an answer, unless the program does not want it: programs ask for one of two with null for the other.
///
/// # Safety
/// `to` is null or may be written to.
#[inline]
unsafe fn tell<T>(to: *mut T, value: T) {
    if !to.is_null() {
        // SAFETY: not null, so the caller promised it.
        unsafe { to.write(value) };
    }
}

fn free(pointer: CUdeviceptr) -> Result<(), CudaError> {
    let context = context::current()?;
    capture::safe()?;
    settle(context)?;
    free_settled(pointer)
}

fn host_pointer(to: *mut *mut c_void, bytes: usize, flags: u32) -> Result<(), CudaError> {
    let context = context::current()?;
    if to.is_null() {
        return Err(CudaError::INVALID_VALUE);
    }
    let start = host::allocate(context, bytes, flags)?;
    // SAFETY: not null, and the program's to write.
    unsafe { answer(to, start as *mut c_void) }
}

fn range(pointer: CUdeviceptr) -> Result<(CUdeviceptr, usize), CudaError> {
    context::current()?;
    // What the program registered is the program's, and no allocation.
    let found = find::find(pointer).filter(|found| found.kind != Kind::HostRegistered);
    found.map(|found| (found.start, found.bytes)).ok_or(CudaError::NOT_FOUND)
}

impl Memory for Library {
    unsafe fn cuMemAlloc(_pointer: *mut CUdeviceptr_v1, _bytes: u32) -> Result<(), CudaError> {
        context::current()?;
        // No address of a card fits into 32 bits.
        Err(CudaError::INVALID_VALUE)
    }

    #[inline]
    unsafe fn cuMemAlloc_v2(pointer: *mut CUdeviceptr, bytes: usize) -> Result<(), CudaError> {
        let context = context::current()?;
        if pointer.is_null() {
            return Err(CudaError::INVALID_VALUE);
        }
        capture::safe()?;
        let start = arena::allocate(context, bytes, Kind::Plain)?;
        // SAFETY: not null, and the program's to write.
        unsafe { answer(pointer, start) }
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
        let wide = width_in_bytes.checked_next_multiple_of(PITCH).ok_or(CudaError::OUT_OF_MEMORY)?;
        let bytes = wide.checked_mul(height).ok_or(CudaError::OUT_OF_MEMORY)?;
        let start = arena::allocate(context, bytes, Kind::Plain)?;
        // SAFETY: not null, and the program's to write.
        unsafe { answer(pitch, wide) }?;
        // SAFETY: likewise.
        unsafe { answer(pointer, start) }
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
        // SAFETY: not null, and the program's to write.
        unsafe { answer(pointer, start) }
    }

    unsafe fn cuMemFree(pointer: CUdeviceptr_v1) -> Result<(), CudaError> {
        free(u64::from(pointer))
    }

    #[inline]
    unsafe fn cuMemFree_v2(pointer: CUdeviceptr) -> Result<(), CudaError> {
        free(pointer)
    }

    unsafe fn cuMemGetInfo(free: *mut u32, total: *mut u32) -> Result<(), CudaError> {
        let (left, all) = info()?;
        let narrow = |bytes: u64| u32::try_from(bytes).unwrap_or(u32::MAX);
        // SAFETY: the caller's promise.
        unsafe { tell(free, narrow(left)) };
        // SAFETY: the caller's promise.
        unsafe { tell(total, narrow(all)) };
        Ok(())
    }

    #[inline]
    unsafe fn cuMemGetInfo_v2(free: *mut usize, total: *mut usize) -> Result<(), CudaError> {
        let (left, all) = info()?;
        // SAFETY: the caller's promise.
        unsafe { tell(free, left as usize) };
        // SAFETY: the caller's promise.
        unsafe { tell(total, all as usize) };
        Ok(())
    }

    unsafe fn cuMemGetAddressRange(
        base: *mut CUdeviceptr_v1,
        size: *mut u32,
        pointer: CUdeviceptr_v1,
    ) -> Result<(), CudaError> {
        let (start, bytes) = range(u64::from(pointer))?;
        if !base.is_null() {
            // SAFETY: not null, and the program's to write.
            unsafe { answer(base, start as u32) }?;
        }
        if !size.is_null() {
            // SAFETY: likewise.
            unsafe { answer(size, bytes as u32) }?;
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
            // SAFETY: not null, and the program's to write.
            unsafe { answer(base, start) }?;
        }
        if !size.is_null() {
            // SAFETY: likewise.
            unsafe { answer(size, bytes) }?;
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
        host::at(host as u64)?;
        // SAFETY: the caller's promise.
        unsafe { answer(pointer, host as u64) }
    }

    unsafe fn cuMemHostGetFlags(flags: *mut u32, host: *mut c_void) -> Result<(), CudaError> {
        context::current()?;
        let found = host::at(host as u64)?;
        // SAFETY: the caller's promise.
        unsafe { answer(flags, found.flags) }
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
        // These two say nothing of a place.
        let nowhere = matches!(advice, CU_MEM_ADVISE_SET_READ_MOSTLY | CU_MEM_ADVISE_UNSET_READ_MOSTLY)
            || advice == CU_MEM_ADVISE_UNSET_PREFERRED_LOCATION;
        let place = if nowhere { 0 } else { managed::place_of(device)? };
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
        let place = if nowhere { 0 } else { managed::place(&location)? };
        managed::advise(pointer, count, advice, place)
    }

    unsafe fn cuMemPrefetchAsync(
        pointer: CUdeviceptr,
        count: usize,
        to: CUdevice,
        stream: CUstream,
    ) -> Result<(), CudaError> {
        session()?;
        managed::prefetch(pointer, count, managed::place_of(to)?, stream)
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
        managed::prefetch(pointer, count, managed::place(&location)?, stream)
    }

    unsafe fn cuMemRangeGetAttribute(
        data: *mut c_void,
        data_size: usize,
        attribute: CUmem_range_attribute,
        pointer: CUdeviceptr,
        count: usize,
    ) -> Result<(), CudaError> {
        session()?;
        // SAFETY: the caller's promise.
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
        // SAFETY: the caller's promise: all three are as long as it says.
        let data = unsafe { std::slice::from_raw_parts(data, num_attributes) };
        // SAFETY: likewise.
        let sizes = unsafe { std::slice::from_raw_parts(data_sizes, num_attributes) };
        // SAFETY: likewise.
        let attributes = unsafe { std::slice::from_raw_parts(attributes, num_attributes) };
        for ((&data, &size), &attribute) in data.iter().zip(sizes).zip(attributes) {
            // SAFETY: the caller's promise.
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
        // SAFETY: the caller's promise.
        unsafe { attributes::get(data, attribute, pointer) }
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
        // SAFETY: the caller's promise: both are as long as it says.
        let attributes = unsafe { std::slice::from_raw_parts(attributes, num_attributes as usize) };
        // SAFETY: likewise.
        let data = unsafe { std::slice::from_raw_parts(data, num_attributes as usize) };
        for (&attribute, &data) in attributes.iter().zip(data) {
            // SAFETY: the caller's promise.
            unsafe { attributes::get_one_of_many(data, attribute, pointer) }?;
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
        // SAFETY: not null, and a number of the program's.
        let on = unsafe { value.cast::<u32>().read_unaligned() };
        if find::set_sync_memops(pointer, on != 0) { Ok(()) } else { Err(CudaError::INVALID_VALUE) }
    }
}
