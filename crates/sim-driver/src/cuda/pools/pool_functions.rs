//! Exported functions for memory pools.

use super::*;
use crate::cuda::context::write_out;
use crate::cuda::session::device;
use crate::cuda::stream;
use rustix::fs::MemfdFlags;
use std::os::fd::{BorrowedFd, IntoRawFd};

/// File descriptors are the only supported kind of shareable handle.
const FILE_DESCRIPTOR_HANDLE: CUmemAllocationHandleType = CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR;

/// Identifies exported pointers of this driver.
const EXPORT_MAGIC: u64 = u64::from_ne_bytes(*b"simpool1");

fn allocate(
    pointer: *mut CUdeviceptr,
    bytes: usize,
    pool: Option<CUmemoryPool>,
    stream: CUstream,
) -> Result<(), CudaError> {
    let stream = stream::resolve(stream)?;
    let pool = match pool {
        Some(pool) => resolve(pool)?,
        None => device_pools(stream.context().device)?[1],
    };
    if pointer.is_null() || pool.imported {
        return Err(CudaError::INVALID_VALUE);
    }
    // Unlike `cuMemAlloc`, it accepts zero bytes. They have an address, as the smallest piece does.
    let bytes = bytes.max(1);
    memory::check(pool.device)?;
    if let Some(capture) = stream.capture() {
        let made = capture.add_allocation(bytes)?;
        // SAFETY: non-null, and the program passes a pointer valid for writes.
        return unsafe { write_out(pointer, made) };
    }
    let start = pool.allocate(bytes, stream)?;
    // SAFETY: non-null, and the program passes a pointer valid for writes.
    unsafe { write_out(pointer, start) }
}

/// Encodes an exported pointer: the magic number, the offset in the pool's file, and the size.
fn exported(at: u64, bytes: usize) -> CUmemPoolPtrExportData {
    let mut data = CUmemPoolPtrExportData::default();
    for (to, word) in data.reserved.chunks_exact_mut(8).zip([EXPORT_MAGIC, at, bytes as u64]) {
        to.copy_from_slice(&word.to_ne_bytes());
    }
    data
}

fn import(data: &CUmemPoolPtrExportData) -> Option<(u64, usize)> {
    let mut words = data.reserved.chunks_exact(8).map(|word| word.try_into().map_or(0, u64::from_ne_bytes));
    let (mark, at, bytes) = (words.next()?, words.next()?, words.next()?);
    (mark == EXPORT_MAGIC && bytes > 0).then_some((at, usize::try_from(bytes).ok()?))
}

impl MemoryPoolApi for Library {
    unsafe fn cuDeviceGetDefaultMemPool(
        pool_out: *mut CUmemoryPool,
        device: CUdevice,
    ) -> Result<(), CudaError> {
        let [own, _] = device_pools(self::device(device)?)?;
        // SAFETY: CUDA requires output pointers to be null or valid for writes.
        unsafe { write_out(pool_out, own.handle()) }
    }

    unsafe fn cuDeviceGetMemPool(pool: *mut CUmemoryPool, device: CUdevice) -> Result<(), CudaError> {
        let [_, current] = device_pools(self::device(device)?)?;
        // SAFETY: CUDA requires output pointers to be null or valid for writes.
        unsafe { write_out(pool, current.handle()) }
    }

    unsafe fn cuDeviceSetMemPool(device: CUdevice, pool: CUmemoryPool) -> Result<(), CudaError> {
        let (device, pool) = (self::device(device)?, resolve(pool)?);
        if !std::ptr::eq(device, pool.device) || pool.imported {
            return Err(CudaError::INVALID_VALUE);
        }
        set_current(device, pool)
    }

    unsafe fn cuMemAllocAsync(
        pointer: *mut CUdeviceptr,
        bytes: usize,
        stream: CUstream,
    ) -> Result<(), CudaError> {
        allocate(pointer, bytes, None, stream)
    }

    unsafe fn cuMemAllocFromPoolAsync(
        pointer: *mut CUdeviceptr,
        bytes: usize,
        pool: CUmemoryPool,
        stream: CUstream,
    ) -> Result<(), CudaError> {
        allocate(pointer, bytes, Some(pool), stream)
    }

    unsafe fn cuMemFreeAsync(pointer: CUdeviceptr, stream: CUstream) -> Result<(), CudaError> {
        let stream = stream::resolve(stream)?;
        if let Some(capture) = stream.capture() {
            return capture.add_free(pointer);
        }
        let found = memory::find(pointer).filter(|found| found.start == pointer);
        match found.ok_or(CudaError::INVALID_VALUE)?.kind {
            MemoryKind::Pool => free_later(pointer, stream),
            MemoryKind::Plain | MemoryKind::External => {
                // Not from a pool: freed when the stream reaches this point.
                stream.run_in_order(move || {
                    let _ = memory::free_unused(pointer);
                })
            }
            MemoryKind::Graph => memory::free_graph_allocation(pointer, Some(stream)),
            _ => Err(CudaError::INVALID_VALUE),
        }
    }

    unsafe fn cuMemPoolCreate(
        pool: *mut CUmemoryPool,
        pool_props: *const CUmemPoolProps,
    ) -> Result<(), CudaError> {
        session()?;
        if pool.is_null() || pool_props.is_null() {
            return Err(CudaError::INVALID_VALUE);
        }
        // SAFETY: non-null, and the program passes a pointer valid for reads.
        let props = unsafe { pool_props.read() };
        let on_device = props.location.type_ == CU_MEM_LOCATION_TYPE_DEVICE;
        if props.allocType != CU_MEM_ALLOCATION_TYPE_PINNED || !on_device {
            return Err(CudaError::INVALID_VALUE);
        }
        let device = device(props.location.id)?;
        let file = match props.handleTypes {
            CU_MEM_HANDLE_TYPE_NONE => None,
            FILE_DESCRIPTOR_HANDLE => Some(
                rustix::fs::memfd_create("partage-sim-pool", MemfdFlags::CLOEXEC)
                    .map_err(|_| CudaError::OPERATING_SYSTEM)?,
            ),
            _ => return Err(CudaError::NOT_SUPPORTED),
        };
        memory::check(device)?;
        let made = register_pool(MemoryPool::new(device, props.handleTypes, props.maxSize as u64, file))?;
        // SAFETY: non-null, and the program passes a pointer valid for writes.
        unsafe { write_out(pool, made.handle()) }
    }

    unsafe fn cuMemPoolDestroy(pool: CUmemoryPool) -> Result<(), CudaError> {
        let pool = resolve(pool)?;
        if pool.default {
            return Err(CudaError::INVALID_VALUE);
        }
        let [own, current] = device_pools(pool.device)?;
        if std::ptr::eq(current, pool) {
            set_current(pool.device, own)?;
        }
        let mut state = pool.state();
        state.alive = false;
        pool.release_if_destroyed(&mut state);
        Ok(())
    }

    unsafe fn cuMemPoolTrimTo(pool: CUmemoryPool, min_bytes_to_keep: usize) -> Result<(), CudaError> {
        let pool = resolve(pool)?;
        pool.trim(&mut pool.state(), min_bytes_to_keep as u64);
        Ok(())
    }

    unsafe fn cuMemPoolGetAttribute(
        pool: CUmemoryPool,
        attribute: CUmemPool_attribute,
        value: *mut c_void,
    ) -> Result<(), CudaError> {
        let state = resolve(pool)?.state();
        if value.is_null() {
            return Err(CudaError::INVALID_VALUE);
        }
        let long = match attribute {
            CU_MEMPOOL_ATTR_REUSE_FOLLOW_EVENT_DEPENDENCIES
                ..=CU_MEMPOOL_ATTR_REUSE_ALLOW_INTERNAL_DEPENDENCIES => {
                let on = state.reuse[attribute as usize - 1];
                // SAFETY: non-null, and the program passes a pointer to an `int`.
                unsafe { value.cast::<i32>().write_unaligned(i32::from(on)) };
                return Ok(());
            }
            CU_MEMPOOL_ATTR_RELEASE_THRESHOLD => state.threshold,
            CU_MEMPOOL_ATTR_RESERVED_MEM_CURRENT => state.allocator.reserved().0,
            CU_MEMPOOL_ATTR_RESERVED_MEM_HIGH => state.allocator.reserved().1,
            CU_MEMPOOL_ATTR_USED_MEM_CURRENT => state.allocator.used().0,
            CU_MEMPOOL_ATTR_USED_MEM_HIGH => state.allocator.used().1,
            _ => return Err(CudaError::INVALID_VALUE),
        };
        // SAFETY: non-null; the attribute is a 64-bit integer.
        unsafe { value.cast::<u64>().write_unaligned(long) };
        Ok(())
    }

    unsafe fn cuMemPoolSetAttribute(
        pool: CUmemoryPool,
        attribute: CUmemPool_attribute,
        value: *mut c_void,
    ) -> Result<(), CudaError> {
        let pool = resolve(pool)?;
        let mut state = pool.state();
        if value.is_null() {
            return Err(CudaError::INVALID_VALUE);
        }
        if let CU_MEMPOOL_ATTR_REUSE_FOLLOW_EVENT_DEPENDENCIES
            ..=CU_MEMPOOL_ATTR_REUSE_ALLOW_INTERNAL_DEPENDENCIES = attribute
        {
            // SAFETY: non-null, and the program passes a pointer to an `int`.
            state.reuse[attribute as usize - 1] = unsafe { value.cast::<i32>().read_unaligned() } != 0;
            return Ok(());
        }
        // SAFETY: non-null; the attribute is a 64-bit integer.
        let long = unsafe { value.cast::<u64>().read_unaligned() };
        match attribute {
            CU_MEMPOOL_ATTR_RELEASE_THRESHOLD => {
                state.threshold = long;
                mark_for_trim(pool.device);
            }
            // High-water marks can only be reset.
            CU_MEMPOOL_ATTR_RESERVED_MEM_HIGH if long == 0 => state.allocator.reset_reserved_high(),
            CU_MEMPOOL_ATTR_USED_MEM_HIGH if long == 0 => state.allocator.reset_used_high(),
            _ => return Err(CudaError::INVALID_VALUE),
        }
        Ok(())
    }

    unsafe fn cuMemPoolSetAccess(
        pool: CUmemoryPool,
        map: *const CUmemAccessDesc,
        count: usize,
    ) -> Result<(), CudaError> {
        let pool = resolve(pool)?;
        if map.is_null() && count > 0 {
            return Err(CudaError::INVALID_VALUE);
        }
        for index in 0..count {
            // SAFETY: the program passes an array of `count` entries.
            let descriptor = unsafe { map.add(index) };
            // SAFETY: `descriptor` is inside the array.
            let CUmemAccessDesc { location, flags } = unsafe { descriptor.read() };
            let known = matches!(
                flags,
                CU_MEM_ACCESS_FLAGS_PROT_NONE
                    | CU_MEM_ACCESS_FLAGS_PROT_READ
                    | CU_MEM_ACCESS_FLAGS_PROT_READWRITE
            );
            if location.type_ != CU_MEM_LOCATION_TYPE_DEVICE || !known {
                return Err(CudaError::INVALID_VALUE);
            }
            let device = device(location.id)?;
            // A device always has access to its own memory.
            if std::ptr::eq(device, pool.device) && flags != CU_MEM_ACCESS_FLAGS_PROT_READWRITE {
                return Err(CudaError::INVALID_VALUE);
            }
            pool.state().access.insert(device.ordinal, flags);
        }
        Ok(())
    }

    unsafe fn cuMemPoolGetAccess(
        flags: *mut CUmemAccess_flags,
        mem_pool: CUmemoryPool,
        location: *mut CUmemLocation,
    ) -> Result<(), CudaError> {
        let pool = resolve(mem_pool)?;
        if location.is_null() {
            return Err(CudaError::INVALID_VALUE);
        }
        // SAFETY: non-null, and the program passes a pointer valid for reads.
        let location = unsafe { location.read() };
        if location.type_ != CU_MEM_LOCATION_TYPE_DEVICE {
            return Err(CudaError::INVALID_VALUE);
        }
        let device = device(location.id)?;
        let own = if std::ptr::eq(device, pool.device) {
            CU_MEM_ACCESS_FLAGS_PROT_READWRITE
        } else {
            CU_MEM_ACCESS_FLAGS_PROT_NONE
        };
        let access = pool.state().access.get(&device.ordinal).copied().unwrap_or(own);
        // SAFETY: CUDA requires output pointers to be null or valid for writes.
        unsafe { write_out(flags, access) }
    }

    unsafe fn cuMemPoolExportToShareableHandle(
        handle_out: *mut c_void,
        pool: CUmemoryPool,
        handle_type: CUmemAllocationHandleType,
        flags: u64,
    ) -> Result<(), CudaError> {
        let pool = resolve(pool)?;
        if handle_out.is_null() || flags != 0 || handle_type != FILE_DESCRIPTOR_HANDLE || pool.imported {
            return Err(CudaError::INVALID_VALUE);
        }
        let file = pool.file.as_ref().ok_or(CudaError::INVALID_VALUE)?;
        let copy = file.try_clone().map_err(|_| CudaError::OPERATING_SYSTEM)?;
        // SAFETY: non-null, and the program passes a pointer to an `int`.
        unsafe { handle_out.cast::<i32>().write_unaligned(copy.into_raw_fd()) };
        Ok(())
    }

    unsafe fn cuMemPoolImportFromShareableHandle(
        pool_out: *mut CUmemoryPool,
        handle: *mut c_void,
        handle_type: CUmemAllocationHandleType,
        flags: u64,
    ) -> Result<(), CudaError> {
        let device = session()?.devices.first().ok_or(CudaError::INVALID_DEVICE)?;
        let number = i32::try_from(handle as usize).map_err(|_| CudaError::INVALID_VALUE)?;
        if pool_out.is_null() || flags != 0 || handle_type != FILE_DESCRIPTOR_HANDLE || number < 0 {
            return Err(CudaError::INVALID_VALUE);
        }
        // SAFETY: the descriptor is only duplicated, which fails if it is invalid; the program keeps its own.
        let copy = unsafe { BorrowedFd::borrow_raw(number) }.try_clone_to_owned();
        let file = copy.map_err(|_| CudaError::INVALID_VALUE)?;
        let made = register_pool(MemoryPool {
            imported: true,
            ..MemoryPool::new(device, FILE_DESCRIPTOR_HANDLE, 0, Some(file))
        })?;
        // SAFETY: non-null, and the program passes a pointer valid for writes.
        unsafe { write_out(pool_out, made.handle()) }
    }

    unsafe fn cuMemPoolExportPointer(
        share_data_out: *mut CUmemPoolPtrExportData,
        pointer: CUdeviceptr,
    ) -> Result<(), CudaError> {
        session()?;
        let found =
            memory::find(pointer).filter(|found| found.kind == MemoryKind::Pool && found.start == pointer);
        let found = found.ok_or(CudaError::INVALID_VALUE)?;
        let pool = resolve(found.owner as CUmemoryPool)?;
        if pool.file.is_none() {
            return Err(CudaError::INVALID_VALUE);
        }
        let at = pool.state().allocator.file_offset(pointer).ok_or(CudaError::INVALID_VALUE)?;
        // SAFETY: CUDA requires output pointers to be null or valid for writes.
        unsafe { write_out(share_data_out, exported(at, found.bytes)) }
    }

    unsafe fn cuMemPoolImportPointer(
        pointer: *mut CUdeviceptr,
        pool: CUmemoryPool,
        share_data: *mut CUmemPoolPtrExportData,
    ) -> Result<(), CudaError> {
        const PAGE_BYTES: u64 = 4096;
        let pool = resolve(pool)?;
        if pointer.is_null() || share_data.is_null() || !pool.imported {
            return Err(CudaError::INVALID_VALUE);
        }
        // SAFETY: non-null, and the program passes a pointer valid for reads.
        let data = unsafe { share_data.read() };
        let (at, bytes) = import(&data).ok_or(CudaError::INVALID_VALUE)?;
        let file = pool.file.as_ref().ok_or(CudaError::INVALID_VALUE)?;
        let size = rustix::fs::fstat(file).map_err(|_| CudaError::INVALID_VALUE)?.st_size as u64;
        if at.checked_add(bytes as u64).is_none_or(|end| end > size) {
            return Err(CudaError::INVALID_VALUE);
        }
        let inside = at % PAGE_BYTES;
        let place = Some((file.as_raw_fd(), (at - inside) as i64));
        let start = memory::map(bytes + inside as usize, libc::MAP_SHARED | libc::MAP_NORESERVE, place)
            .ok_or(CudaError::MAP_FAILED)?;
        memory::insert(MemoryRange {
            kind: MemoryKind::External,
            start: start + inside,
            bytes,
            device: Some(pool.device),
            context: None,
            id: memory::new_id(),
            flags: 0,
            owner: pool.handle() as usize,
            sync_memops: false,
        });
        // SAFETY: non-null, and the program passes a pointer valid for writes.
        unsafe { write_out(pointer, start + inside) }
    }
}
