//! Exported functions for arrays, texture objects and surface objects.

use super::texture_objects::{self, TextureObject};
use super::*;
use crate::cuda::context::{self, write_out};

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

fn plane(width: usize, height: usize, format: CUarray_format, channels: u32) -> CUDA_ARRAY3D_DESCRIPTOR {
    CUDA_ARRAY3D_DESCRIPTOR {
        Width: width,
        Height: height,
        Depth: 0,
        Format: format,
        NumChannels: channels,
        Flags: 0,
    }
}

/// Creates an array and writes its handle.
///
/// # Safety
/// `handle` is null or valid for writes.
unsafe fn make(handle: *mut CUarray, descriptor: CUDA_ARRAY3D_DESCRIPTOR) -> Result<(), CudaError> {
    let context = context::current()?;
    if handle.is_null() {
        return Err(CudaError::INVALID_VALUE);
    }
    let made = create(context, descriptor)?;
    // SAFETY: non-null, and the caller guarantees that it is valid for writes.
    unsafe { write_out(handle, made) }
}

impl ArrayApi for Library {
    unsafe fn cuArrayCreate(
        handle: *mut CUarray,
        allocate_array: *const CUDA_ARRAY_DESCRIPTOR_v1,
    ) -> Result<(), CudaError> {
        context::current()?;
        // SAFETY: CUDA requires input pointers to be null or valid for reads.
        let wanted = unsafe { read(allocate_array) }?;
        let (width, height) = (wanted.Width as usize, wanted.Height as usize);
        // SAFETY: CUDA requires output pointers to be null or valid for writes.
        unsafe { make(handle, plane(width, height, wanted.Format, wanted.NumChannels)) }
    }

    unsafe fn cuArrayCreate_v2(
        handle: *mut CUarray,
        allocate_array: *const CUDA_ARRAY_DESCRIPTOR,
    ) -> Result<(), CudaError> {
        context::current()?;
        // SAFETY: CUDA requires input pointers to be null or valid for reads.
        let wanted = unsafe { read(allocate_array) }?;
        // SAFETY: CUDA requires output pointers to be null or valid for writes.
        unsafe { make(handle, plane(wanted.Width, wanted.Height, wanted.Format, wanted.NumChannels)) }
    }

    unsafe fn cuArray3DCreate(
        handle: *mut CUarray,
        allocate_array: *const CUDA_ARRAY3D_DESCRIPTOR_v1,
    ) -> Result<(), CudaError> {
        context::current()?;
        // SAFETY: CUDA requires input pointers to be null or valid for reads.
        let wanted = unsafe { read(allocate_array) }?;
        let descriptor = CUDA_ARRAY3D_DESCRIPTOR {
            Width: wanted.Width as usize,
            Height: wanted.Height as usize,
            Depth: wanted.Depth as usize,
            Format: wanted.Format,
            NumChannels: wanted.NumChannels,
            Flags: wanted.Flags,
        };
        // SAFETY: CUDA requires output pointers to be null or valid for writes.
        unsafe { make(handle, descriptor) }
    }

    unsafe fn cuArray3DCreate_v2(
        handle: *mut CUarray,
        allocate_array: *const CUDA_ARRAY3D_DESCRIPTOR,
    ) -> Result<(), CudaError> {
        context::current()?;
        // SAFETY: CUDA requires input pointers to be null or valid for reads.
        let descriptor = unsafe { read(allocate_array) }?;
        // SAFETY: CUDA requires output pointers to be null or valid for writes.
        unsafe { make(handle, descriptor) }
    }

    unsafe fn cuArrayGetDescriptor(
        array_descriptor: *mut CUDA_ARRAY_DESCRIPTOR_v1,
        array: CUarray,
    ) -> Result<(), CudaError> {
        let own = resolve(array)?.1.descriptor;
        let answered = CUDA_ARRAY_DESCRIPTOR_v1 {
            Width: own.Width as u32,
            Height: own.Height as u32,
            Format: own.Format,
            NumChannels: own.NumChannels,
        };
        // SAFETY: CUDA requires output pointers to be null or valid for writes.
        unsafe { write_out(array_descriptor, answered) }
    }

    unsafe fn cuArrayGetDescriptor_v2(
        array_descriptor: *mut CUDA_ARRAY_DESCRIPTOR,
        array: CUarray,
    ) -> Result<(), CudaError> {
        let own = resolve(array)?.1.descriptor;
        let answered = CUDA_ARRAY_DESCRIPTOR {
            Width: own.Width,
            Height: own.Height,
            Format: own.Format,
            NumChannels: own.NumChannels,
        };
        // SAFETY: CUDA requires output pointers to be null or valid for writes.
        unsafe { write_out(array_descriptor, answered) }
    }

    unsafe fn cuArray3DGetDescriptor(
        array_descriptor: *mut CUDA_ARRAY3D_DESCRIPTOR_v1,
        array: CUarray,
    ) -> Result<(), CudaError> {
        let own = resolve(array)?.1.descriptor;
        let answered = CUDA_ARRAY3D_DESCRIPTOR_v1 {
            Width: own.Width as u32,
            Height: own.Height as u32,
            Depth: own.Depth as u32,
            Format: own.Format,
            NumChannels: own.NumChannels,
            Flags: own.Flags,
        };
        // SAFETY: CUDA requires output pointers to be null or valid for writes.
        unsafe { write_out(array_descriptor, answered) }
    }

    unsafe fn cuArray3DGetDescriptor_v2(
        array_descriptor: *mut CUDA_ARRAY3D_DESCRIPTOR,
        array: CUarray,
    ) -> Result<(), CudaError> {
        // SAFETY: CUDA requires output pointers to be null or valid for writes.
        unsafe { write_out(array_descriptor, resolve(array)?.1.descriptor) }
    }

    unsafe fn cuArrayDestroy(array: CUarray) -> Result<(), CudaError> {
        let (array, image) = resolve(array)?;
        // A mipmap level cannot be destroyed on its own.
        if !image.own {
            return Err(CudaError::INVALID_HANDLE);
        }
        memory::wait_until_unused(image.context)?;
        array.destroy();
        Ok(())
    }

    unsafe fn cuArrayGetMemoryRequirements(
        _memory_requirements: *mut CUDA_ARRAY_MEMORY_REQUIREMENTS,
        array: CUarray,
        device: CUdevice,
    ) -> Result<(), CudaError> {
        resolve(array)?;
        session::device(device)?;
        // Only deferred-mapping arrays have memory requirements, and they are not supported.
        Err(CudaError::INVALID_VALUE)
    }

    unsafe fn cuArrayGetSparseProperties(
        _sparse_properties: *mut CUDA_ARRAY_SPARSE_PROPERTIES,
        array: CUarray,
    ) -> Result<(), CudaError> {
        resolve(array)?;
        Err(CudaError::INVALID_VALUE)
    }

    unsafe fn cuArrayGetPlane(
        _plane_array: *mut CUarray,
        array: CUarray,
        _plane_idx: u32,
    ) -> Result<(), CudaError> {
        resolve(array)?;
        // None of the supported formats is multi-planar.
        Err(CudaError::INVALID_VALUE)
    }

    unsafe fn cuMipmappedArrayCreate(
        handle: *mut CUmipmappedArray,
        mipmapped_array_desc: *const CUDA_ARRAY3D_DESCRIPTOR,
        num_mipmap_levels: u32,
    ) -> Result<(), CudaError> {
        let context = context::current()?;
        // SAFETY: CUDA requires input pointers to be null or valid for reads.
        let descriptor = unsafe { read(mipmapped_array_desc) }?;
        if handle.is_null() {
            return Err(CudaError::INVALID_VALUE);
        }
        let made = create_mipmap(context, descriptor, num_mipmap_levels, None)?;
        // SAFETY: non-null, and the program passes a pointer valid for writes.
        unsafe { write_out(handle, made) }
    }

    unsafe fn cuMipmappedArrayDestroy(mipmapped_array: CUmipmappedArray) -> Result<(), CudaError> {
        let (mipmap, levels) = resolve_mipmap(mipmapped_array)?;
        memory::wait_until_unused(levels.context)?;
        mipmap.destroy();
        Ok(())
    }

    unsafe fn cuMipmappedArrayGetLevel(
        level_array: *mut CUarray,
        mipmapped_array: CUmipmappedArray,
        level: u32,
    ) -> Result<(), CudaError> {
        let (_, levels) = resolve_mipmap(mipmapped_array)?;
        let array = levels.levels.get(level as usize).ok_or(CudaError::INVALID_VALUE)?;
        // SAFETY: CUDA requires output pointers to be null or valid for writes.
        unsafe { write_out(level_array, handle_of(*array)) }
    }

    unsafe fn cuMipmappedArrayGetMemoryRequirements(
        _memory_requirements: *mut CUDA_ARRAY_MEMORY_REQUIREMENTS,
        mipmap: CUmipmappedArray,
        device: CUdevice,
    ) -> Result<(), CudaError> {
        resolve_mipmap(mipmap)?;
        session::device(device)?;
        Err(CudaError::INVALID_VALUE)
    }

    unsafe fn cuMipmappedArrayGetSparseProperties(
        _sparse_properties: *mut CUDA_ARRAY_SPARSE_PROPERTIES,
        mipmap: CUmipmappedArray,
    ) -> Result<(), CudaError> {
        resolve_mipmap(mipmap)?;
        Err(CudaError::INVALID_VALUE)
    }

    unsafe fn cuTexObjectCreate(
        tex_object: *mut CUtexObject,
        res_desc: *const CUDA_RESOURCE_DESC,
        tex_desc: *const CUDA_TEXTURE_DESC,
        res_view_desc: *const CUDA_RESOURCE_VIEW_DESC,
    ) -> Result<(), CudaError> {
        context::current()?;
        // SAFETY: CUDA requires input pointers to be null or valid for reads.
        let resource = unsafe { read(res_desc) }?;
        // SAFETY: CUDA requires input pointers to be null or valid for reads.
        let texture = unsafe { read(tex_desc) }?;
        // SAFETY: CUDA requires input pointers to be null or valid for reads.
        let view = unsafe { read(res_view_desc) }.ok();
        // A resource view applies to arrays only, not to linear memory.
        let linear = matches!(resource.resType, CU_RESOURCE_TYPE_LINEAR | CU_RESOURCE_TYPE_PITCH2D);
        if tex_object.is_null() || view.is_some() && linear {
            return Err(CudaError::INVALID_VALUE);
        }
        texture_objects::check(&resource, false)?;
        let number = texture_objects::add(TextureObject { resource, texture: Some(texture), view });
        // SAFETY: non-null, and the program passes a pointer valid for writes.
        unsafe { write_out(tex_object, number) }
    }

    unsafe fn cuTexObjectDestroy(tex_object: CUtexObject) -> Result<(), CudaError> {
        texture_objects::remove(tex_object, false)
    }

    unsafe fn cuTexObjectGetResourceDesc(
        res_desc: *mut CUDA_RESOURCE_DESC,
        tex_object: CUtexObject,
    ) -> Result<(), CudaError> {
        // SAFETY: CUDA requires output pointers to be null or valid for writes.
        unsafe { write_out(res_desc, texture_objects::get(tex_object, false)?.resource) }
    }

    unsafe fn cuTexObjectGetTextureDesc(
        tex_desc: *mut CUDA_TEXTURE_DESC,
        tex_object: CUtexObject,
    ) -> Result<(), CudaError> {
        let texture = texture_objects::get(tex_object, false)?.texture.ok_or(CudaError::INVALID_VALUE)?;
        // SAFETY: CUDA requires output pointers to be null or valid for writes.
        unsafe { write_out(tex_desc, texture) }
    }

    unsafe fn cuTexObjectGetResourceViewDesc(
        res_view_desc: *mut CUDA_RESOURCE_VIEW_DESC,
        tex_object: CUtexObject,
    ) -> Result<(), CudaError> {
        let view = texture_objects::get(tex_object, false)?.view.ok_or(CudaError::INVALID_VALUE)?;
        // SAFETY: CUDA requires output pointers to be null or valid for writes.
        unsafe { write_out(res_view_desc, view) }
    }

    unsafe fn cuSurfObjectCreate(
        surf_object: *mut CUsurfObject,
        res_desc: *const CUDA_RESOURCE_DESC,
    ) -> Result<(), CudaError> {
        context::current()?;
        // SAFETY: CUDA requires input pointers to be null or valid for reads.
        let resource = unsafe { read(res_desc) }?;
        if surf_object.is_null() {
            return Err(CudaError::INVALID_VALUE);
        }
        texture_objects::check(&resource, true)?;
        let number = texture_objects::add(TextureObject { resource, texture: None, view: None });
        // SAFETY: non-null, and the program passes a pointer valid for writes.
        unsafe { write_out(surf_object, number) }
    }

    unsafe fn cuSurfObjectDestroy(surf_object: CUsurfObject) -> Result<(), CudaError> {
        texture_objects::remove(surf_object, true)
    }

    unsafe fn cuSurfObjectGetResourceDesc(
        res_desc: *mut CUDA_RESOURCE_DESC,
        surf_object: CUsurfObject,
    ) -> Result<(), CudaError> {
        // SAFETY: CUDA requires output pointers to be null or valid for writes.
        unsafe { write_out(res_desc, texture_objects::get(surf_object, true)?.resource) }
    }
}
