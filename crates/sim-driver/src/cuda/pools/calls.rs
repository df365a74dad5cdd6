//! The functions on pools.

use super::*;
use crate::cuda::context::answer;
use crate::cuda::session::device;
use crate::cuda::stream;
use rustix::fs::MemfdFlags;
use std::os::fd::{BorrowedFd, IntoRawFd};

/// `CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR` is the only way here.
const DESCRIPTOR: CUmemAllocationHandleType = CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR;

/// What the exported form of a pointer begins with.
const MARK: u64 = u64::from_ne_bytes(*b"simpool1");

fn allocate(
    pointer: *mut CUdeviceptr,
    bytes: usize,
    pool: Option<CUmemoryPool>,
    stream: CUstream,
) -> Result<(), CudaError> {
    let stream = stream::resolve(stream)?;
    let pool = match pool {
        Some(pool) => resolve(pool)?,
        None => of_device(stream.context().device)?[1],
    };
    if pointer.is_null() || bytes == 0 || pool.imported {
        return Err(CudaError::INVALID_VALUE);
    }
    memory::check(pool.device)?;
    if let Some(capture) = stream.capture() {
        let made = capture.allocate(bytes)?;
        // SAFETY: not null, and the program's to write.
        return unsafe { answer(pointer, made) };
    }
    let start = pool.allocate(bytes, stream)?;
    // SAFETY: not null, and the program's to write.
    unsafe { answer(pointer, start) }
}

/// The two numbers at the end of a pointer's exported form are where it lies in the pool's file, and how long it is.
fn exported(at: u64, bytes: usize) -> CUmemPoolPtrExportData {
    let mut data = CUmemPoolPtrExportData::default();
    for (to, word) in data.reserved.chunks_exact_mut(8).zip([MARK, at, bytes as u64]) {
        to.copy_from_slice(&word.to_ne_bytes());
    }
    data
}

fn import(data: &CUmemPoolPtrExportData) -> Option<(u64, usize)> {
    let mut words = data.reserved.chunks_exact(8).map(|word| word.try_into().map_or(0, u64::from_ne_bytes));
    let (mark, at, bytes) = (words.next()?, words.next()?, words.next()?);
    (mark == MARK && bytes > 0).then_some((at, usize::try_from(bytes).ok()?))
}

impl Pools for Library {
    unsafe fn cuDeviceGetDefaultMemPool(
        pool_out: *mut CUmemoryPool,
        device: CUdevice,
    ) -> Result<(), CudaError> {
        let [own, _] = of_device(self::device(device)?)?;
        // SAFETY: the caller's promise.
        unsafe { answer(pool_out, own.handle()) }
    }

    unsafe fn cuDeviceGetMemPool(pool: *mut CUmemoryPool, device: CUdevice) -> Result<(), CudaError> {
        let [_, current] = of_device(self::device(device)?)?;
        // SAFETY: the caller's promise.
        unsafe { answer(pool, current.handle()) }
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
            return capture.free(pointer);
        }
        let found = memory::find(pointer).filter(|found| found.start == pointer);
        match found.ok_or(CudaError::INVALID_VALUE)?.kind {
            Kind::Pool => free_later(pointer, stream),
            Kind::Plain | Kind::External => {
                // Not of a pool: it goes when the stream has come to it.
                stream.in_order(move || {
                    let _ = memory::free_settled(pointer);
                })
            }
            Kind::Graph => memory::free_of_graph(pointer, Some(stream)),
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
        // SAFETY: not null, and the caller's to read.
        let props = unsafe { pool_props.read() };
        let on_device = props.location.type_ == CU_MEM_LOCATION_TYPE_DEVICE;
        if props.allocType != CU_MEM_ALLOCATION_TYPE_PINNED || !on_device {
            return Err(CudaError::INVALID_VALUE);
        }
        let device = device(props.location.id)?;
        let file = match props.handleTypes {
            CU_MEM_HANDLE_TYPE_NONE => None,
            DESCRIPTOR => Some(
                rustix::fs::memfd_create("partage-sim-pool", MemfdFlags::CLOEXEC)
                    .map_err(|_| CudaError::OPERATING_SYSTEM)?,
            ),
            _ => return Err(CudaError::NOT_SUPPORTED),
        };
        memory::check(device)?;
        let made = make(Pool::new(device, props.handleTypes, props.maxSize as u64, file))?;
        // SAFETY: not null, and the program's to write.
        unsafe { answer(pool, made.handle()) }
    }

    unsafe fn cuMemPoolDestroy(pool: CUmemoryPool) -> Result<(), CudaError> {
        let pool = resolve(pool)?;
        if pool.default {
            return Err(CudaError::INVALID_VALUE);
        }
        let [own, current] = of_device(pool.device)?;
        if std::ptr::eq(current, pool) {
            set_current(pool.device, own)?;
        }
        let mut inner = pool.inner();
        inner.alive = false;
        pool.end_if_over(&mut inner);
        Ok(())
    }

    unsafe fn cuMemPoolTrimTo(pool: CUmemoryPool, min_bytes_to_keep: usize) -> Result<(), CudaError> {
        let pool = resolve(pool)?;
        pool.trim(&mut pool.inner(), min_bytes_to_keep as u64);
        Ok(())
    }

    unsafe fn cuMemPoolGetAttribute(
        pool: CUmemoryPool,
        attribute: CUmemPool_attribute,
        value: *mut c_void,
    ) -> Result<(), CudaError> {
        let inner = resolve(pool)?.inner();
        if value.is_null() {
            return Err(CudaError::INVALID_VALUE);
        }
        let long = match attribute {
            CU_MEMPOOL_ATTR_REUSE_FOLLOW_EVENT_DEPENDENCIES
                ..=CU_MEMPOOL_ATTR_REUSE_ALLOW_INTERNAL_DEPENDENCIES => {
                let on = inner.reuse[attribute as usize - 1];
                // SAFETY: not null, and an int of the program's.
                unsafe { value.cast::<i32>().write_unaligned(i32::from(on)) };
                return Ok(());
            }
            CU_MEMPOOL_ATTR_RELEASE_THRESHOLD => inner.threshold,
            CU_MEMPOOL_ATTR_RESERVED_MEM_CURRENT => inner.book.reserved().0,
            CU_MEMPOOL_ATTR_RESERVED_MEM_HIGH => inner.book.reserved().1,
            CU_MEMPOOL_ATTR_USED_MEM_CURRENT => inner.book.used().0,
            CU_MEMPOOL_ATTR_USED_MEM_HIGH => inner.book.used().1,
            _ => return Err(CudaError::INVALID_VALUE),
        };
        // SAFETY: not null, and a 64-bit number of the program's.
        unsafe { value.cast::<u64>().write_unaligned(long) };
        Ok(())
    }

    unsafe fn cuMemPoolSetAttribute(
        pool: CUmemoryPool,
        attribute: CUmemPool_attribute,
        value: *mut c_void,
    ) -> Result<(), CudaError> {
        let pool = resolve(pool)?;
        let mut inner = pool.inner();
        if value.is_null() {
            return Err(CudaError::INVALID_VALUE);
        }
        if let CU_MEMPOOL_ATTR_REUSE_FOLLOW_EVENT_DEPENDENCIES
            ..=CU_MEMPOOL_ATTR_REUSE_ALLOW_INTERNAL_DEPENDENCIES = attribute
        {
            // SAFETY: not null, and an int of the program's.
            inner.reuse[attribute as usize - 1] = unsafe { value.cast::<i32>().read_unaligned() } != 0;
            return Ok(());
        }
        // SAFETY: not null, and a 64-bit number of the program's.
        let long = unsafe { value.cast::<u64>().read_unaligned() };
        match attribute {
            CU_MEMPOOL_ATTR_RELEASE_THRESHOLD => {
                inner.threshold = long;
                may_trim(pool.device);
            }
            // High marks can only be taken down.
            CU_MEMPOOL_ATTR_RESERVED_MEM_HIGH if long == 0 => inner.book.reset_reserved_high(),
            CU_MEMPOOL_ATTR_USED_MEM_HIGH if long == 0 => inner.book.reset_used_high(),
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
            // SAFETY: the caller's promise: as many as it says.
            let descriptor = unsafe { map.add(index) };
            // SAFETY: likewise.
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
            // A device cannot be kept from its own memory.
            if std::ptr::eq(device, pool.device) && flags != CU_MEM_ACCESS_FLAGS_PROT_READWRITE {
                return Err(CudaError::INVALID_VALUE);
            }
            pool.inner().access.insert(device.ordinal, flags);
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
        // SAFETY: not null, and the caller's to read.
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
        let access = pool.inner().access.get(&device.ordinal).copied().unwrap_or(own);
        // SAFETY: the caller's promise.
        unsafe { answer(flags, access) }
    }

    unsafe fn cuMemPoolExportToShareableHandle(
        handle_out: *mut c_void,
        pool: CUmemoryPool,
        handle_type: CUmemAllocationHandleType,
        flags: u64,
    ) -> Result<(), CudaError> {
        let pool = resolve(pool)?;
        if handle_out.is_null() || flags != 0 || handle_type != DESCRIPTOR || pool.imported {
            return Err(CudaError::INVALID_VALUE);
        }
        let file = pool.file.as_ref().ok_or(CudaError::INVALID_VALUE)?;
        let copy = file.try_clone().map_err(|_| CudaError::OPERATING_SYSTEM)?;
        // SAFETY: not null, and an int of the program's.
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
        if pool_out.is_null() || flags != 0 || handle_type != DESCRIPTOR || number < 0 {
            return Err(CudaError::INVALID_VALUE);
        }
        // SAFETY: only duplicated, which fails if it is none; the program keeps its own.
        let copy = unsafe { BorrowedFd::borrow_raw(number) }.try_clone_to_owned();
        let file = copy.map_err(|_| CudaError::INVALID_VALUE)?;
        let made = make(Pool { imported: true, ..Pool::new(device, DESCRIPTOR, 0, Some(file)) })?;
        // SAFETY: not null, and the program's to write.
        unsafe { answer(pool_out, made.handle()) }
    }

    unsafe fn cuMemPoolExportPointer(
        share_data_out: *mut CUmemPoolPtrExportData,
        pointer: CUdeviceptr,
    ) -> Result<(), CudaError> {
        session()?;
        let found = memory::find(pointer).filter(|found| found.kind == Kind::Pool && found.start == pointer);
        let found = found.ok_or(CudaError::INVALID_VALUE)?;
        let pool = resolve(found.owner as CUmemoryPool)?;
        if pool.file.is_none() {
            return Err(CudaError::INVALID_VALUE);
        }
        let at = pool.inner().book.file_offset(pointer).ok_or(CudaError::INVALID_VALUE)?;
        // SAFETY: the caller's promise.
        unsafe { answer(share_data_out, exported(at, found.bytes)) }
    }

    unsafe fn cuMemPoolImportPointer(
        pointer: *mut CUdeviceptr,
        pool: CUmemoryPool,
        share_data: *mut CUmemPoolPtrExportData,
    ) -> Result<(), CudaError> {
        const PAGE: u64 = 4096;
        let pool = resolve(pool)?;
        if pointer.is_null() || share_data.is_null() || !pool.imported {
            return Err(CudaError::INVALID_VALUE);
        }
        // SAFETY: not null, and the caller's to read.
        let data = unsafe { share_data.read() };
        let (at, bytes) = import(&data).ok_or(CudaError::INVALID_VALUE)?;
        let file = pool.file.as_ref().ok_or(CudaError::INVALID_VALUE)?;
        let size = rustix::fs::fstat(file).map_err(|_| CudaError::INVALID_VALUE)?.st_size as u64;
        if at.checked_add(bytes as u64).is_none_or(|end| end > size) {
            return Err(CudaError::INVALID_VALUE);
        }
        let inside = at % PAGE;
        let place = Some((file.as_raw_fd(), (at - inside) as i64));
        let start = memory::map(bytes + inside as usize, libc::MAP_SHARED | libc::MAP_NORESERVE, place)
            .ok_or(CudaError::MAP_FAILED)?;
        memory::insert(Found {
            kind: Kind::External,
            start: start + inside,
            bytes,
            device: Some(pool.device),
            context: None,
            id: memory::new_id(),
            flags: 0,
            owner: pool.handle() as usize,
            sync_memops: false,
        });
        // SAFETY: not null, and the program's to write.
        unsafe { answer(pointer, start + inside) }
    }
}
