//! The functions on memory of others, and on what others get.

use super::*;
use crate::cuda::arrays;
use crate::cuda::context::{self, answer};
use crate::cuda::handle::{Arena, handle_of};
use std::os::fd::{FromRawFd, OwnedFd};

/// Memory that somebody gave as a file.
#[derive(Default)]
struct External {
    inner: Mutex<Option<(OwnedFd, u64)>>,
}

static EXTERNAL: Arena<External> = Arena::new();

const PAGE: u64 = 4096;

impl External {
    fn inner(&self) -> MutexGuard<'_, Option<(OwnedFd, u64)>> {
        self.inner.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

fn resolve(handle: CUexternalMemory) -> Result<&'static External, CudaError> {
    session()?;
    EXTERNAL.get(handle).ok_or(CudaError::INVALID_HANDLE)
}

/// Maps a part of the memory; its address.
fn map(memory: &External, offset: u64, bytes: u64) -> Result<u64, CudaError> {
    let context = context::current()?;
    let inner = memory.inner();
    let (file, size) = inner.as_ref().ok_or(CudaError::INVALID_HANDLE)?;
    let end = offset.checked_add(bytes).ok_or(CudaError::INVALID_VALUE)?;
    if bytes == 0 || end > *size {
        return Err(CudaError::INVALID_VALUE);
    }
    let inside = offset % PAGE;
    let place = Some((file.as_raw_fd(), (offset - inside) as i64));
    let length = (bytes + inside) as usize;
    let start = memory::map(length, libc::MAP_SHARED | libc::MAP_NORESERVE, place);
    let start = start.ok_or(CudaError::MAP_FAILED)? + inside;
    memory::insert(Found {
        kind: Kind::External,
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

impl Sharing for Library {
    unsafe fn cuIpcGetMemHandle(handle: *mut CUipcMemHandle, pointer: CUdeviceptr) -> Result<(), CudaError> {
        context::current()?;
        if handle.is_null() {
            return Err(CudaError::INVALID_VALUE);
        }
        let made = super::handle(pointer)?;
        // SAFETY: not null, and the program's to write.
        unsafe { answer(handle, made) }
    }

    unsafe fn cuIpcOpenMemHandle(
        pointer: *mut CUdeviceptr,
        handle: CUipcMemHandle,
        flags: u32,
    ) -> Result<(), CudaError> {
        // SAFETY: the caller's promise is the same.
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
        // SAFETY: not null, and the program's to write.
        unsafe { answer(pointer, start) }
    }

    unsafe fn cuIpcCloseMemHandle(pointer: CUdeviceptr) -> Result<(), CudaError> {
        memory::settle(context::current()?)?;
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
        // SAFETY: not null, and the caller's to read.
        let wanted = unsafe { mem_handle_desc.read() };
        if wanted.type_ != CU_EXTERNAL_MEMORY_HANDLE_TYPE_OPAQUE_FD {
            return Err(CudaError::NOT_SUPPORTED);
        }
        if wanted.size == 0 || wanted.flags & !CUDA_EXTERNAL_MEMORY_DEDICATED != 0 {
            return Err(CudaError::INVALID_VALUE);
        }
        // SAFETY: the type says which member is there.
        let number = unsafe { wanted.handle.fd };
        if number < 0 {
            return Err(CudaError::INVALID_VALUE);
        }
        // SAFETY: only looked at; it stays the program's if it is not what it should be.
        let size = rustix::fs::fstat(unsafe { rustix::fd::BorrowedFd::borrow_raw(number) });
        let size = size.map_err(|_| CudaError::INVALID_VALUE)?.st_size as u64;
        if size < wanted.size {
            return Err(CudaError::INVALID_VALUE);
        }
        let made = EXTERNAL.make(External::default, |_| ()).ok_or(CudaError::OUT_OF_MEMORY)?;
        // SAFETY: an open file that is the driver's from now on, as the program knows.
        *made.inner() = Some((unsafe { OwnedFd::from_raw_fd(number) }, wanted.size));
        // SAFETY: not null, and the program's to write.
        unsafe { answer(ext_mem_out, handle_of(made)) }
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
        // SAFETY: not null, and the caller's to read.
        let wanted = unsafe { buffer_desc.read() };
        if wanted.flags != 0 {
            return Err(CudaError::INVALID_VALUE);
        }
        let start = map(external, wanted.offset, wanted.size)?;
        // SAFETY: not null, and the program's to write.
        unsafe { answer(pointer, start) }
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
        // SAFETY: not null, and the caller's to read.
        let wanted = unsafe { mipmap_desc.read() };
        let size = external.inner().as_ref().map_or(0, |(_, size)| *size);
        let room = size.checked_sub(wanted.offset).ok_or(CudaError::INVALID_VALUE)?;
        // It stays mapped until its context goes: programs have no address of it to free.
        let start = map(external, wanted.offset, room)?;
        let over = Some((start, room as usize));
        let made = arrays::create_mipmap(context, wanted.arrayDesc, wanted.numLevels, over)?;
        // SAFETY: not null, and the program's to write.
        unsafe { answer(mipmap, made) }
    }

    unsafe fn cuDestroyExternalMemory(ext_mem: CUexternalMemory) -> Result<(), CudaError> {
        let external = resolve(ext_mem)?;
        *external.inner() = None;
        EXTERNAL.drop(ext_mem);
        Ok(())
    }
}
