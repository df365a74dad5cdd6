//! Texture and surface objects: descriptors that programs can read back.

use super::*;
use std::collections::BTreeMap;

/// The descriptors with which a texture or surface object was created.
#[derive(Clone, Copy)]
pub(super) struct TextureObject {
    pub(super) resource: CUDA_RESOURCE_DESC,
    /// The texture descriptor; `None` for surface objects.
    pub(super) texture: Option<CUDA_TEXTURE_DESC>,
    pub(super) view: Option<CUDA_RESOURCE_VIEW_DESC>,
}

// SAFETY: the pointers in the descriptors are handles that are compared and returned, never dereferenced.
unsafe impl Send for TextureObject {}

/// All texture and surface objects by handle. Handles are never reused.
struct TextureObjects {
    all: BTreeMap<u64, TextureObject>,
    next: u64,
}

static OBJECTS: Mutex<TextureObjects> = Mutex::new(TextureObjects { all: BTreeMap::new(), next: 1 });

fn texture_objects() -> MutexGuard<'static, TextureObjects> {
    OBJECTS.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Checks that the resource under a texture or surface object exists.
pub(super) fn check(resource: &CUDA_RESOURCE_DESC, surface: bool) -> Result<(), CudaError> {
    if resource.flags != 0 {
        return Err(CudaError::INVALID_VALUE);
    }
    match resource.resType {
        CU_RESOURCE_TYPE_ARRAY => {
            // SAFETY: the type field says that the union holds this member.
            let array = unsafe { resource.res.array }.hArray;
            let (_, image) = resolve(array)?;
            if surface && !format::is_surface(&image.descriptor) {
                return Err(CudaError::INVALID_VALUE);
            }
            Ok(())
        }
        _ if surface => Err(CudaError::INVALID_VALUE),
        CU_RESOURCE_TYPE_MIPMAPPED_ARRAY => {
            // SAFETY: the type field says that the union holds this member.
            let mipmap = unsafe { resource.res.mipmap }.hMipmappedArray;
            resolve_mipmap(mipmap).map(|_| ())
        }
        CU_RESOURCE_TYPE_LINEAR => {
            // SAFETY: the type field says that the union holds this member.
            let linear = unsafe { resource.res.linear };
            memory::covers(linear.devPtr, linear.sizeInBytes.max(1), false)
        }
        CU_RESOURCE_TYPE_PITCH2D => {
            // SAFETY: the type field says that the union holds this member.
            let pitched = unsafe { resource.res.pitch2D };
            let bytes =
                pitched.pitchInBytes.checked_mul(pitched.height.max(1)).ok_or(CudaError::INVALID_VALUE)?;
            memory::covers(pitched.devPtr, bytes.max(1), false)
        }
        _ => Err(CudaError::INVALID_VALUE),
    }
}

pub(super) fn add(object: TextureObject) -> u64 {
    let mut texture_objects = texture_objects();
    let number = texture_objects.next;
    texture_objects.next += 1;
    texture_objects.all.insert(number, object);
    number
}

/// Returns the object with this handle if it is of the requested kind.
pub(super) fn get(number: u64, surface: bool) -> Result<TextureObject, CudaError> {
    session()?;
    let object = texture_objects().all.get(&number).copied();
    object.filter(|object| object.texture.is_none() == surface).ok_or(CudaError::INVALID_VALUE)
}

pub(super) fn remove(number: u64, surface: bool) -> Result<(), CudaError> {
    get(number, surface)?;
    texture_objects().all.remove(&number);
    Ok(())
}
