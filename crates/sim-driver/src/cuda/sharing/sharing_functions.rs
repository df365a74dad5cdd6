//! Exported functions for IPC handles and external memory.

use super::*;
use crate::cuda::arrays;
use crate::cuda::context::{self, write_out};
use crate::cuda::handle::{HandleArena, handle_of};
use std::os::fd::{FromRawFd, OwnedFd};

/// External memory: an imported file and its size.
#[derive(Default)]
struct ExternalMemory {
    inner: Mutex<Option<(OwnedFd, u64)>>,
}

static EXTERNAL_MEMORY: HandleArena<ExternalMemory> = HandleArena::new();

const PAGE_BYTES: u64 = 4096;

impl ExternalMemory {
    fn inner(&self) -> MutexGuard<'_, Option<(OwnedFd, u64)>> {
        self.inner.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

fn resolve(handle: CUexternalMemory) -> Result<&'static ExternalMemory, CudaError> {
    session()?;
    EXTERNAL_MEMORY.get(handle).ok_or(CudaError::INVALID_HANDLE)
}

/// Maps a part of external memory and returns its address.
fn map(memory: &ExternalMemory, offset: u64, bytes: u64) -> Result<u64, CudaError> {
    let context = context::current()?;
    let inner = memory.inner();
    let (file, size) = inner.as_ref().ok_or(CudaError::INVALID_HANDLE)?;
    let end = offset.checked_add(bytes).ok_or(CudaError::INVALID_VALUE)?;
    if bytes == 0 || end > *size {
        return Err(CudaError::INVALID_VALUE);
    }
    let inside = offset % PAGE_BYTES;
    let place = Some((file.as_raw_fd(), (offset - inside) as i64));
    let length = (bytes + inside) as usize;
    let start = memory::map(length, libc::MAP_SHARED | libc::MAP_NORESERVE, place);
    let start = start.ok_or(CudaError::MAP_FAILED)? + inside;
    memory::insert(MemoryRange {
        kind: MemoryKind::External,
        start,
        bytes: bytes as usize,
        device: Some(context.device),
        context: Some(context),
        id: memory::new_id(),
        flags: 0,
        owner: 0,
        sync_memops: false,
    });
    Ok(start)
}

impl SharingApi for Library {
    unsafe fn cuIpcGetMemHandle(handle: *mut CUipcMemHandle, pointer: CUdeviceptr) -> Result<(), CudaError> {
        context::current()?;
        if handle.is_null() {
            return Err(CudaError::INVALID_VALUE);
        }
        let made = super::export_handle(pointer)?;
        // SAFETY: non-null, and the program passes a pointer valid for writes.
        unsafe { write_out(handle, made) }
    }

    unsafe fn cuIpcOpenMemHandle(
        pointer: *mut CUdeviceptr,
        handle: CUipcMemHandle,
        flags: u32,
    ) -> Result<(), CudaError> {
        // SAFETY: this function's contract requires the same of its caller, and the arguments are passed on unchanged.
        unsafe { Self::cuIpcOpenMemHandle_v2(pointer, handle, flags) }
    }

    unsafe fn cuIpcOpenMemHandle_v2(
        pointer: *mut CUdeviceptr,
        handle: CUipcMemHandle,
        flags: u32,
    ) -> Result<(), CudaError> {
        let context = context::current()?;
        if pointer.is_null() || flags & !CU_IPC_MEM_LAZY_ENABLE_PEER_ACCESS != 0 {
            return Err(CudaError::INVALID_VALUE);
        }
        memory::check(context.device)?;
        let start = open(context, &handle)?;
        // SAFETY: non-null, and the program passes a pointer valid for writes.
        unsafe { write_out(pointer, start) }
    }

    unsafe fn cuIpcCloseMemHandle(pointer: CUdeviceptr) -> Result<(), CudaError> {
        memory::wait_until_unused(context::current()?)?;
        close(pointer)
    }

    unsafe fn cuImportExternalMemory(
        ext_mem_out: *mut CUexternalMemory,
        mem_handle_desc: *const CUDA_EXTERNAL_MEMORY_HANDLE_DESC,
    ) -> Result<(), CudaError> {
        context::current()?;
        if ext_mem_out.is_null() || mem_handle_desc.is_null() {
            return Err(CudaError::INVALID_VALUE);
        }
        // SAFETY: non-null, and the program passes a pointer valid for reads.
        let wanted = unsafe { mem_handle_desc.read() };
        if wanted.type_ != CU_EXTERNAL_MEMORY_HANDLE_TYPE_OPAQUE_FD {
            return Err(CudaError::NOT_SUPPORTED);
        }
        if wanted.size == 0 || wanted.flags & !CUDA_EXTERNAL_MEMORY_DEDICATED != 0 {
            return Err(CudaError::INVALID_VALUE);
        }
        // SAFETY: the type field says that the union holds this member.
        let number = unsafe { wanted.handle.fd };
        if number < 0 {
            return Err(CudaError::INVALID_VALUE);
        }
        // SAFETY: the descriptor is only queried, and stays the program's if it is not suitable.
        let size = rustix::fs::fstat(unsafe { rustix::fd::BorrowedFd::borrow_raw(number) });
        let size = size.map_err(|_| CudaError::INVALID_VALUE)?.st_size as u64;
        if size < wanted.size {
            return Err(CudaError::INVALID_VALUE);
        }
        let made = EXTERNAL_MEMORY.make(ExternalMemory::default, |_| ()).ok_or(CudaError::OUT_OF_MEMORY)?;
        // SAFETY: an open descriptor whose ownership passes to the driver, as CUDA documents.
        *made.inner() = Some((unsafe { OwnedFd::from_raw_fd(number) }, wanted.size));
        // SAFETY: non-null, and the program passes a pointer valid for writes.
        unsafe { write_out(ext_mem_out, handle_of(made)) }
    }

    unsafe fn cuExternalMemoryGetMappedBuffer(
        pointer: *mut CUdeviceptr,
        ext_mem: CUexternalMemory,
        buffer_desc: *const CUDA_EXTERNAL_MEMORY_BUFFER_DESC,
    ) -> Result<(), CudaError> {
        let external = resolve(ext_mem)?;
        if pointer.is_null() || buffer_desc.is_null() {
            return Err(CudaError::INVALID_VALUE);
        }
        // SAFETY: non-null, and the program passes a pointer valid for reads.
        let wanted = unsafe { buffer_desc.read() };
        if wanted.flags != 0 {
            return Err(CudaError::INVALID_VALUE);
        }
        let start = map(external, wanted.offset, wanted.size)?;
        // SAFETY: non-null, and the program passes a pointer valid for writes.
        unsafe { write_out(pointer, start) }
    }

    unsafe fn cuExternalMemoryGetMappedMipmappedArray(
        mipmap: *mut CUmipmappedArray,
        ext_mem: CUexternalMemory,
        mipmap_desc: *const CUDA_EXTERNAL_MEMORY_MIPMAPPED_ARRAY_DESC,
    ) -> Result<(), CudaError> {
        let external = resolve(ext_mem)?;
        let context = context::current()?;
        if mipmap.is_null() || mipmap_desc.is_null() {
            return Err(CudaError::INVALID_VALUE);
        }
        // SAFETY: non-null, and the program passes a pointer valid for reads.
        let wanted = unsafe { mipmap_desc.read() };
        let size = external.inner().as_ref().map_or(0, |(_, size)| *size);
        let room = size.checked_sub(wanted.offset).ok_or(CudaError::INVALID_VALUE)?;
        // It stays mapped until the context is destroyed: the program has no address with which to free it.
        let start = map(external, wanted.offset, room)?;
        let over = Some((start, room as usize));
        let made = arrays::create_mipmap(context, wanted.arrayDesc, wanted.numLevels, over)?;
        // SAFETY: non-null, and the program passes a pointer valid for writes.
        unsafe { write_out(mipmap, made) }
    }

    unsafe fn cuDestroyExternalMemory(ext_mem: CUexternalMemory) -> Result<(), CudaError> {
        let external = resolve(ext_mem)?;
        *external.inner() = None;
        EXTERNAL_MEMORY.drop(ext_mem);
        Ok(())
    }
}
