//! Exported functions that copy and fill memory.

use super::{context, run_async, run_between_contexts, run_now};
use crate::cuda::memory::MemoryOp;
use crate::cuda::*;

/// Reads a structure through a pointer from the program.
///
/// # Safety
/// `pointer` is null or valid for reads.
unsafe fn read<T: Copy>(pointer: *const T) -> Result<T, CudaError> {
    if pointer.is_null() {
        return Err(CudaError::INVALID_VALUE);
    }
    // SAFETY: non-null, and the caller guarantees that it is valid for reads.
    Ok(unsafe { pointer.read() })
}

/// Converts the 32-bit version 1 structure to the current one.
fn widen(copy: CUDA_MEMCPY2D_v1) -> CUDA_MEMCPY2D {
    CUDA_MEMCPY2D {
        srcXInBytes: copy.srcXInBytes as usize,
        srcY: copy.srcY as usize,
        srcMemoryType: copy.srcMemoryType,
        srcHost: copy.srcHost,
        srcDevice: u64::from(copy.srcDevice),
        srcArray: copy.srcArray,
        srcPitch: copy.srcPitch as usize,
        dstXInBytes: copy.dstXInBytes as usize,
        dstY: copy.dstY as usize,
        dstMemoryType: copy.dstMemoryType,
        dstHost: copy.dstHost,
        dstDevice: u64::from(copy.dstDevice),
        dstArray: copy.dstArray,
        dstPitch: copy.dstPitch as usize,
        WidthInBytes: copy.WidthInBytes as usize,
        Height: copy.Height as usize,
    }
}

/// One end of a one-dimensional copy that involves an array.
#[derive(Clone, Copy)]
enum CopyEnd {
    Host(*mut c_void),
    Device(CUdeviceptr),
    Array(CUarray, usize),
}

/// Describes a one-dimensional copy between an array and other memory.
fn linear_copy(to: CopyEnd, from: CopyEnd, bytes: usize) -> Result<MemoryOp, CudaError> {
    let mut copy = CUDA_MEMCPY3D { WidthInBytes: bytes, Height: 1, Depth: 1, ..CUDA_MEMCPY3D::default() };
    match to {
        CopyEnd::Host(pointer) => (copy.dstMemoryType, copy.dstHost) = (CU_MEMORYTYPE_HOST, pointer),
        CopyEnd::Device(pointer) => (copy.dstMemoryType, copy.dstDevice) = (CU_MEMORYTYPE_DEVICE, pointer),
        CopyEnd::Array(array, offset) => {
            (copy.dstMemoryType, copy.dstArray, copy.dstXInBytes) = (CU_MEMORYTYPE_ARRAY, array, offset);
        }
    }
    match from {
        CopyEnd::Host(pointer) => {
            (copy.srcMemoryType, copy.srcHost) = (CU_MEMORYTYPE_HOST, pointer.cast_const())
        }
        CopyEnd::Device(pointer) => (copy.srcMemoryType, copy.srcDevice) = (CU_MEMORYTYPE_DEVICE, pointer),
        CopyEnd::Array(array, offset) => {
            (copy.srcMemoryType, copy.srcArray, copy.srcXInBytes) = (CU_MEMORYTYPE_ARRAY, array, offset);
        }
    }
    MemoryOp::copy_3d(&copy)
}

/// Resolves the contexts of a peer copy.
fn resolve_contexts(to: CUcontext, from: CUcontext) -> Result<[&'static context::Context; 2], CudaError> {
    Ok([context::resolve(from)?, context::resolve(to)?])
}

/// Implements all memset functions for one element type.
macro_rules! fills {
    ($type:ident $old:ident $now:ident $later:ident $old_rows:ident $now_rows:ident $later_rows:ident) => {
        unsafe fn $old(to: CUdeviceptr_v1, value: $type, count: u32) -> Result<(), CudaError> {
            let element = size_of::<$type>();
            run_now(MemoryOp::fill(u64::from(to), 0, u32::from(value), element, count as usize, 1)?)
        }

        unsafe fn $now(to: CUdeviceptr, value: $type, count: usize) -> Result<(), CudaError> {
            run_now(MemoryOp::fill(to, 0, u32::from(value), size_of::<$type>(), count, 1)?)
        }

        unsafe fn $later(
            to: CUdeviceptr,
            value: $type,
            count: usize,
            stream: CUstream,
        ) -> Result<(), CudaError> {
            run_async(MemoryOp::fill(to, 0, u32::from(value), size_of::<$type>(), count, 1)?, stream)
        }

        unsafe fn $old_rows(
            to: CUdeviceptr_v1,
            pitch: u32,
            value: $type,
            width: u32,
            height: u32,
        ) -> Result<(), CudaError> {
            let (element, pitch) = (size_of::<$type>(), pitch as usize);
            let (width, height) = (width as usize, height as usize);
            run_now(MemoryOp::fill(u64::from(to), pitch, u32::from(value), element, width, height)?)
        }

        unsafe fn $now_rows(
            to: CUdeviceptr,
            pitch: usize,
            value: $type,
            width: usize,
            height: usize,
        ) -> Result<(), CudaError> {
            run_now(MemoryOp::fill(to, pitch, u32::from(value), size_of::<$type>(), width, height)?)
        }

        unsafe fn $later_rows(
            to: CUdeviceptr,
            pitch: usize,
            value: $type,
            width: usize,
            height: usize,
            stream: CUstream,
        ) -> Result<(), CudaError> {
            run_async(MemoryOp::fill(to, pitch, u32::from(value), size_of::<$type>(), width, height)?, stream)
        }
    };
}

impl CopyApi for Library {
    fills! { u8 cuMemsetD8 cuMemsetD8_v2 cuMemsetD8Async cuMemsetD2D8 cuMemsetD2D8_v2 cuMemsetD2D8Async }
    fills! { u16 cuMemsetD16 cuMemsetD16_v2 cuMemsetD16Async cuMemsetD2D16 cuMemsetD2D16_v2 cuMemsetD2D16Async }
    fills! { u32 cuMemsetD32 cuMemsetD32_v2 cuMemsetD32Async cuMemsetD2D32 cuMemsetD2D32_v2 cuMemsetD2D32Async }

    unsafe fn cuMemcpy(to: CUdeviceptr, from: CUdeviceptr, bytes: usize) -> Result<(), CudaError> {
        run_now(MemoryOp::copy(to, from, bytes)?)
    }

    unsafe fn cuMemcpyAsync(
        to: CUdeviceptr,
        from: CUdeviceptr,
        bytes: usize,
        stream: CUstream,
    ) -> Result<(), CudaError> {
        run_async(MemoryOp::copy(to, from, bytes)?, stream)
    }

    unsafe fn cuMemcpyHtoD(to: CUdeviceptr_v1, from: *const c_void, bytes: u32) -> Result<(), CudaError> {
        run_now(MemoryOp::to_device(u64::from(to), from, bytes as usize)?)
    }

    unsafe fn cuMemcpyHtoD_v2(to: CUdeviceptr, from: *const c_void, bytes: usize) -> Result<(), CudaError> {
        run_now(MemoryOp::to_device(to, from, bytes)?)
    }

    unsafe fn cuMemcpyHtoDAsync(
        to: CUdeviceptr_v1,
        from: *const c_void,
        bytes: u32,
        stream: CUstream,
    ) -> Result<(), CudaError> {
        run_async(MemoryOp::to_device(u64::from(to), from, bytes as usize)?, stream)
    }

    unsafe fn cuMemcpyHtoDAsync_v2(
        to: CUdeviceptr,
        from: *const c_void,
        bytes: usize,
        stream: CUstream,
    ) -> Result<(), CudaError> {
        run_async(MemoryOp::to_device(to, from, bytes)?, stream)
    }

    unsafe fn cuMemcpyDtoH(to: *mut c_void, from: CUdeviceptr_v1, bytes: u32) -> Result<(), CudaError> {
        run_now(MemoryOp::to_host(to, u64::from(from), bytes as usize)?)
    }

    unsafe fn cuMemcpyDtoH_v2(to: *mut c_void, from: CUdeviceptr, bytes: usize) -> Result<(), CudaError> {
        run_now(MemoryOp::to_host(to, from, bytes)?)
    }

    unsafe fn cuMemcpyDtoHAsync(
        to: *mut c_void,
        from: CUdeviceptr_v1,
        bytes: u32,
        stream: CUstream,
    ) -> Result<(), CudaError> {
        run_async(MemoryOp::to_host(to, u64::from(from), bytes as usize)?, stream)
    }

    unsafe fn cuMemcpyDtoHAsync_v2(
        to: *mut c_void,
        from: CUdeviceptr,
        bytes: usize,
        stream: CUstream,
    ) -> Result<(), CudaError> {
        run_async(MemoryOp::to_host(to, from, bytes)?, stream)
    }

    unsafe fn cuMemcpyDtoD(to: CUdeviceptr_v1, from: CUdeviceptr_v1, bytes: u32) -> Result<(), CudaError> {
        run_now(MemoryOp::on_device(u64::from(to), u64::from(from), bytes as usize)?)
    }

    unsafe fn cuMemcpyDtoD_v2(to: CUdeviceptr, from: CUdeviceptr, bytes: usize) -> Result<(), CudaError> {
        run_now(MemoryOp::on_device(to, from, bytes)?)
    }

    unsafe fn cuMemcpyDtoDAsync(
        to: CUdeviceptr_v1,
        from: CUdeviceptr_v1,
        bytes: u32,
        stream: CUstream,
    ) -> Result<(), CudaError> {
        run_async(MemoryOp::on_device(u64::from(to), u64::from(from), bytes as usize)?, stream)
    }

    unsafe fn cuMemcpyDtoDAsync_v2(
        to: CUdeviceptr,
        from: CUdeviceptr,
        bytes: usize,
        stream: CUstream,
    ) -> Result<(), CudaError> {
        run_async(MemoryOp::on_device(to, from, bytes)?, stream)
    }

    unsafe fn cuMemcpyAtoA(
        to: CUarray,
        to_offset: u32,
        from: CUarray,
        from_offset: u32,
        bytes: u32,
    ) -> Result<(), CudaError> {
        run_now(linear_copy(
            CopyEnd::Array(to, to_offset as usize),
            CopyEnd::Array(from, from_offset as usize),
            bytes as usize,
        )?)
    }

    unsafe fn cuMemcpyAtoA_v2(
        to: CUarray,
        to_offset: usize,
        from: CUarray,
        from_offset: usize,
        bytes: usize,
    ) -> Result<(), CudaError> {
        run_now(linear_copy(CopyEnd::Array(to, to_offset), CopyEnd::Array(from, from_offset), bytes)?)
    }

    unsafe fn cuMemcpyAtoD(
        to: CUdeviceptr_v1,
        from: CUarray,
        from_offset: u32,
        bytes: u32,
    ) -> Result<(), CudaError> {
        run_now(linear_copy(
            CopyEnd::Device(u64::from(to)),
            CopyEnd::Array(from, from_offset as usize),
            bytes as usize,
        )?)
    }

    unsafe fn cuMemcpyAtoD_v2(
        to: CUdeviceptr,
        from: CUarray,
        from_offset: usize,
        bytes: usize,
    ) -> Result<(), CudaError> {
        run_now(linear_copy(CopyEnd::Device(to), CopyEnd::Array(from, from_offset), bytes)?)
    }

    unsafe fn cuMemcpyDtoA(
        to: CUarray,
        to_offset: u32,
        from: CUdeviceptr_v1,
        bytes: u32,
    ) -> Result<(), CudaError> {
        run_now(linear_copy(
            CopyEnd::Array(to, to_offset as usize),
            CopyEnd::Device(u64::from(from)),
            bytes as usize,
        )?)
    }

    unsafe fn cuMemcpyDtoA_v2(
        to: CUarray,
        to_offset: usize,
        from: CUdeviceptr,
        bytes: usize,
    ) -> Result<(), CudaError> {
        run_now(linear_copy(CopyEnd::Array(to, to_offset), CopyEnd::Device(from), bytes)?)
    }

    unsafe fn cuMemcpyAtoH(
        to: *mut c_void,
        from: CUarray,
        from_offset: u32,
        bytes: u32,
    ) -> Result<(), CudaError> {
        run_now(linear_copy(CopyEnd::Host(to), CopyEnd::Array(from, from_offset as usize), bytes as usize)?)
    }

    unsafe fn cuMemcpyAtoHAsync(
        to: *mut c_void,
        from: CUarray,
        from_offset: u32,
        bytes: u32,
        stream: CUstream,
    ) -> Result<(), CudaError> {
        run_async(
            linear_copy(CopyEnd::Host(to), CopyEnd::Array(from, from_offset as usize), bytes as usize)?,
            stream,
        )
    }

    unsafe fn cuMemcpyHtoA(
        to: CUarray,
        to_offset: u32,
        from: *const c_void,
        bytes: u32,
    ) -> Result<(), CudaError> {
        run_now(linear_copy(
            CopyEnd::Array(to, to_offset as usize),
            CopyEnd::Host(from.cast_mut()),
            bytes as usize,
        )?)
    }

    unsafe fn cuMemcpyHtoAAsync(
        to: CUarray,
        to_offset: u32,
        from: *const c_void,
        bytes: u32,
        stream: CUstream,
    ) -> Result<(), CudaError> {
        run_async(
            linear_copy(
                CopyEnd::Array(to, to_offset as usize),
                CopyEnd::Host(from.cast_mut()),
                bytes as usize,
            )?,
            stream,
        )
    }

    unsafe fn cuMemcpyAtoH_v2(
        to: *mut c_void,
        from: CUarray,
        from_offset: usize,
        bytes: usize,
    ) -> Result<(), CudaError> {
        run_now(linear_copy(CopyEnd::Host(to), CopyEnd::Array(from, from_offset), bytes)?)
    }

    unsafe fn cuMemcpyAtoHAsync_v2(
        to: *mut c_void,
        from: CUarray,
        from_offset: usize,
        bytes: usize,
        stream: CUstream,
    ) -> Result<(), CudaError> {
        run_async(linear_copy(CopyEnd::Host(to), CopyEnd::Array(from, from_offset), bytes)?, stream)
    }

    unsafe fn cuMemcpyHtoA_v2(
        to: CUarray,
        to_offset: usize,
        from: *const c_void,
        bytes: usize,
    ) -> Result<(), CudaError> {
        run_now(linear_copy(CopyEnd::Array(to, to_offset), CopyEnd::Host(from.cast_mut()), bytes)?)
    }

    unsafe fn cuMemcpyHtoAAsync_v2(
        to: CUarray,
        to_offset: usize,
        from: *const c_void,
        bytes: usize,
        stream: CUstream,
    ) -> Result<(), CudaError> {
        run_async(linear_copy(CopyEnd::Array(to, to_offset), CopyEnd::Host(from.cast_mut()), bytes)?, stream)
    }

    unsafe fn cuMemcpy2D(copy: *const CUDA_MEMCPY2D_v1) -> Result<(), CudaError> {
        // SAFETY: CUDA requires input pointers to be null or valid for reads.
        let copy = unsafe { read(copy) }?;
        run_now(MemoryOp::copy_2d(&widen(copy))?)
    }

    unsafe fn cuMemcpy2D_v2(copy: *const CUDA_MEMCPY2D) -> Result<(), CudaError> {
        // SAFETY: CUDA requires input pointers to be null or valid for reads.
        let copy = unsafe { read(copy) }?;
        run_now(MemoryOp::copy_2d(&copy)?)
    }

    unsafe fn cuMemcpy2DUnaligned(copy: *const CUDA_MEMCPY2D_v1) -> Result<(), CudaError> {
        // SAFETY: CUDA requires input pointers to be null or valid for reads.
        let copy = unsafe { read(copy) }?;
        run_now(MemoryOp::copy_2d(&widen(copy))?)
    }

    unsafe fn cuMemcpy2DUnaligned_v2(copy: *const CUDA_MEMCPY2D) -> Result<(), CudaError> {
        // SAFETY: CUDA requires input pointers to be null or valid for reads.
        let copy = unsafe { read(copy) }?;
        run_now(MemoryOp::copy_2d(&copy)?)
    }

    unsafe fn cuMemcpy2DAsync(copy: *const CUDA_MEMCPY2D_v1, stream: CUstream) -> Result<(), CudaError> {
        // SAFETY: CUDA requires input pointers to be null or valid for reads.
        let copy = unsafe { read(copy) }?;
        run_async(MemoryOp::copy_2d(&widen(copy))?, stream)
    }

    unsafe fn cuMemcpy2DAsync_v2(copy: *const CUDA_MEMCPY2D, stream: CUstream) -> Result<(), CudaError> {
        // SAFETY: CUDA requires input pointers to be null or valid for reads.
        let copy = unsafe { read(copy) }?;
        run_async(MemoryOp::copy_2d(&copy)?, stream)
    }

    unsafe fn cuMemcpy3D(copy: *const CUDA_MEMCPY3D_v1) -> Result<(), CudaError> {
        // SAFETY: CUDA requires input pointers to be null or valid for reads.
        let copy = unsafe { read(copy) }?;
        run_now(MemoryOp::copy_3d_v1(&copy)?)
    }

    unsafe fn cuMemcpy3D_v2(copy: *const CUDA_MEMCPY3D) -> Result<(), CudaError> {
        // SAFETY: CUDA requires input pointers to be null or valid for reads.
        let copy = unsafe { read(copy) }?;
        run_now(MemoryOp::copy_3d(&copy)?)
    }

    unsafe fn cuMemcpy3DAsync(copy: *const CUDA_MEMCPY3D_v1, stream: CUstream) -> Result<(), CudaError> {
        // SAFETY: CUDA requires input pointers to be null or valid for reads.
        let copy = unsafe { read(copy) }?;
        run_async(MemoryOp::copy_3d_v1(&copy)?, stream)
    }

    unsafe fn cuMemcpy3DAsync_v2(copy: *const CUDA_MEMCPY3D, stream: CUstream) -> Result<(), CudaError> {
        // SAFETY: CUDA requires input pointers to be null or valid for reads.
        let copy = unsafe { read(copy) }?;
        run_async(MemoryOp::copy_3d(&copy)?, stream)
    }

    unsafe fn cuMemcpy3DPeer(copy: *const CUDA_MEMCPY3D_PEER) -> Result<(), CudaError> {
        // SAFETY: CUDA requires input pointers to be null or valid for reads.
        let copy = unsafe { read(copy) }?;
        run_between_contexts(
            MemoryOp::copy_3d_peer(&copy)?,
            resolve_contexts(copy.dstContext, copy.srcContext)?,
        )
    }

    unsafe fn cuMemcpy3DPeerAsync(
        copy: *const CUDA_MEMCPY3D_PEER,
        stream: CUstream,
    ) -> Result<(), CudaError> {
        // SAFETY: CUDA requires input pointers to be null or valid for reads.
        let copy = unsafe { read(copy) }?;
        resolve_contexts(copy.dstContext, copy.srcContext)?;
        run_async(MemoryOp::copy_3d_peer(&copy)?, stream)
    }

    unsafe fn cuMemcpyPeer(
        to: CUdeviceptr,
        to_context: CUcontext,
        from: CUdeviceptr,
        from_context: CUcontext,
        bytes: usize,
    ) -> Result<(), CudaError> {
        let contexts = resolve_contexts(to_context, from_context)?;
        run_between_contexts(MemoryOp::on_device(to, from, bytes)?, contexts)
    }

    unsafe fn cuMemcpyPeerAsync(
        to: CUdeviceptr,
        to_context: CUcontext,
        from: CUdeviceptr,
        from_context: CUcontext,
        bytes: usize,
        stream: CUstream,
    ) -> Result<(), CudaError> {
        resolve_contexts(to_context, from_context)?;
        run_async(MemoryOp::on_device(to, from, bytes)?, stream)
    }
}
