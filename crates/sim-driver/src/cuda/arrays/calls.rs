//! The functions on arrays and on what lies over them.

use super::objects::{self, Object};
use super::*;
use crate::cuda::context::{self, answer};

/// What a pointer of the program's leads to.
///
/// # Safety
/// `pointer` is null or the program's to read.
unsafe fn read<T: Copy>(pointer: *const T) -> Result<T, CudaError> {
    if pointer.is_null() {
        return Err(CudaError::INVALID_VALUE);
    }
    // SAFETY: not null, and the caller's promise.
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

/// # Safety
/// `handle` is null or the program's to write.
unsafe fn make(handle: *mut CUarray, descriptor: CUDA_ARRAY3D_DESCRIPTOR) -> Result<(), CudaError> {
    let context = context::current()?;
    if handle.is_null() {
        return Err(CudaError::INVALID_VALUE);
    }
    let made = create(context, descriptor)?;
    // SAFETY: not null, and the caller's promise.
    unsafe { answer(handle, made) }
}

impl Arrays for Library {
    unsafe fn cuArrayCreate(
        handle: *mut CUarray,
        allocate_array: *const CUDA_ARRAY_DESCRIPTOR_v1,
    ) -> Result<(), CudaError> {
        context::current()?;
        // SAFETY: the caller's promise.
        let wanted = unsafe { read(allocate_array) }?;
        let (width, height) = (wanted.Width as usize, wanted.Height as usize);
        // SAFETY: the caller's promise.
        unsafe { make(handle, plane(width, height, wanted.Format, wanted.NumChannels)) }
    }

    unsafe fn cuArrayCreate_v2(
        handle: *mut CUarray,
        allocate_array: *const CUDA_ARRAY_DESCRIPTOR,
    ) -> Result<(), CudaError> {
        context::current()?;
        // SAFETY: the caller's promise.
        let wanted = unsafe { read(allocate_array) }?;
        // SAFETY: the caller's promise.
        unsafe { make(handle, plane(wanted.Width, wanted.Height, wanted.Format, wanted.NumChannels)) }
    }

    unsafe fn cuArray3DCreate(
        handle: *mut CUarray,
        allocate_array: *const CUDA_ARRAY3D_DESCRIPTOR_v1,
    ) -> Result<(), CudaError> {
        context::current()?;
        // SAFETY: the caller's promise.
        let wanted = unsafe { read(allocate_array) }?;
        let descriptor = CUDA_ARRAY3D_DESCRIPTOR {
            Width: wanted.Width as usize,
            Height: wanted.Height as usize,
            Depth: wanted.Depth as usize,
            Format: wanted.Format,
            NumChannels: wanted.NumChannels,
            Flags: wanted.Flags,
        };
        // SAFETY: the caller's promise.
        unsafe { make(handle, descriptor) }
    }

    unsafe fn cuArray3DCreate_v2(
        handle: *mut CUarray,
        allocate_array: *const CUDA_ARRAY3D_DESCRIPTOR,
    ) -> Result<(), CudaError> {
        context::current()?;
        // SAFETY: the caller's promise.
        let descriptor = unsafe { read(allocate_array) }?;
        // SAFETY: the caller's promise.
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
        // SAFETY: the caller's promise.
        unsafe { answer(array_descriptor, answered) }
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
        // SAFETY: the caller's promise.
        unsafe { answer(array_descriptor, answered) }
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
        // SAFETY: the caller's promise.
        unsafe { answer(array_descriptor, answered) }
    }

    unsafe fn cuArray3DGetDescriptor_v2(
        array_descriptor: *mut CUDA_ARRAY3D_DESCRIPTOR,
        array: CUarray,
    ) -> Result<(), CudaError> {
        // SAFETY: the caller's promise.
        unsafe { answer(array_descriptor, resolve(array)?.1.descriptor) }
    }

    unsafe fn cuArrayDestroy(array: CUarray) -> Result<(), CudaError> {
        let (array, image) = resolve(array)?;
        // A level belongs to its mipmapped array.
        if !image.own {
            return Err(CudaError::INVALID_HANDLE);
        }
        memory::settle(image.context)?;
        array.end();
        Ok(())
    }

    unsafe fn cuArrayGetMemoryRequirements(
        _memory_requirements: *mut CUDA_ARRAY_MEMORY_REQUIREMENTS,
        array: CUarray,
        device: CUdevice,
    ) -> Result<(), CudaError> {
        resolve(array)?;
        session::device(device)?;
        // Only arrays whose memory is mapped later have any, and there are none here.
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
        // None of the formats here has planes.
        Err(CudaError::INVALID_VALUE)
    }

    unsafe fn cuMipmappedArrayCreate(
        handle: *mut CUmipmappedArray,
        mipmapped_array_desc: *const CUDA_ARRAY3D_DESCRIPTOR,
        num_mipmap_levels: u32,
    ) -> Result<(), CudaError> {
        let context = context::current()?;
        // SAFETY: the caller's promise.
        let descriptor = unsafe { read(mipmapped_array_desc) }?;
        if handle.is_null() {
            return Err(CudaError::INVALID_VALUE);
        }
        let made = create_mipmap(context, descriptor, num_mipmap_levels, None)?;
        // SAFETY: not null, and the program's to write.
        unsafe { answer(handle, made) }
    }

    unsafe fn cuMipmappedArrayDestroy(mipmapped_array: CUmipmappedArray) -> Result<(), CudaError> {
        let (mipmap, levels) = resolve_mipmap(mipmapped_array)?;
        memory::settle(levels.context)?;
        mipmap.end();
        Ok(())
    }

    unsafe fn cuMipmappedArrayGetLevel(
        level_array: *mut CUarray,
        mipmapped_array: CUmipmappedArray,
        level: u32,
    ) -> Result<(), CudaError> {
        let (_, levels) = resolve_mipmap(mipmapped_array)?;
        let array = levels.levels.get(level as usize).ok_or(CudaError::INVALID_VALUE)?;
        // SAFETY: the caller's promise.
        unsafe { answer(level_array, handle_of(*array)) }
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
        // SAFETY: the caller's promise.
        let resource = unsafe { read(res_desc) }?;
        // SAFETY: the caller's promise.
        let texture = unsafe { read(tex_desc) }?;
        // SAFETY: the caller's promise.
        let view = unsafe { read(res_view_desc) }.ok();
        // Only what lies in arrays can be seen as something else.
        let linear = matches!(resource.resType, CU_RESOURCE_TYPE_LINEAR | CU_RESOURCE_TYPE_PITCH2D);
        if tex_object.is_null() || view.is_some() && linear {
            return Err(CudaError::INVALID_VALUE);
        }
        objects::check(&resource, false)?;
        let number = objects::add(Object { resource, texture: Some(texture), view });
        // SAFETY: not null, and the program's to write.
        unsafe { answer(tex_object, number) }
    }

    unsafe fn cuTexObjectDestroy(tex_object: CUtexObject) -> Result<(), CudaError> {
        objects::remove(tex_object, false)
    }

    unsafe fn cuTexObjectGetResourceDesc(
        res_desc: *mut CUDA_RESOURCE_DESC,
        tex_object: CUtexObject,
    ) -> Result<(), CudaError> {
        // SAFETY: the caller's promise.
        unsafe { answer(res_desc, objects::get(tex_object, false)?.resource) }
    }

    unsafe fn cuTexObjectGetTextureDesc(
        tex_desc: *mut CUDA_TEXTURE_DESC,
        tex_object: CUtexObject,
    ) -> Result<(), CudaError> {
        let texture = objects::get(tex_object, false)?.texture.ok_or(CudaError::INVALID_VALUE)?;
        // SAFETY: the caller's promise.
        unsafe { answer(tex_desc, texture) }
    }

    unsafe fn cuTexObjectGetResourceViewDesc(
        res_view_desc: *mut CUDA_RESOURCE_VIEW_DESC,
        tex_object: CUtexObject,
    ) -> Result<(), CudaError> {
        let view = objects::get(tex_object, false)?.view.ok_or(CudaError::INVALID_VALUE)?;
        // SAFETY: the caller's promise.
        unsafe { answer(res_view_desc, view) }
    }

    unsafe fn cuSurfObjectCreate(
        surf_object: *mut CUsurfObject,
        res_desc: *const CUDA_RESOURCE_DESC,
    ) -> Result<(), CudaError> {
        context::current()?;
        // SAFETY: the caller's promise.
        let resource = unsafe { read(res_desc) }?;
        if surf_object.is_null() {
            return Err(CudaError::INVALID_VALUE);
        }
        objects::check(&resource, true)?;
        let number = objects::add(Object { resource, texture: None, view: None });
        // SAFETY: not null, and the program's to write.
        unsafe { answer(surf_object, number) }
    }

    unsafe fn cuSurfObjectDestroy(surf_object: CUsurfObject) -> Result<(), CudaError> {
        objects::remove(surf_object, true)
    }

    unsafe fn cuSurfObjectGetResourceDesc(
        res_desc: *mut CUDA_RESOURCE_DESC,
        surf_object: CUsurfObject,
    ) -> Result<(), CudaError> {
        // SAFETY: the caller's promise.
        unsafe { answer(res_desc, objects::get(surf_object, true)?.resource) }
    }
}
