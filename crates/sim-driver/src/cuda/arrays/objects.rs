//! Texture and surface objects: descriptions that programs get back.

use super::*;
use std::collections::BTreeMap;

#[derive(Clone, Copy)]
pub(super) struct Object {
    pub(super) resource: CUDA_RESOURCE_DESC,
    /// Nothing for surfaces.
    pub(super) texture: Option<CUDA_TEXTURE_DESC>,
    pub(super) view: Option<CUDA_RESOURCE_VIEW_DESC>,
}

// SAFETY: the pointers in it are handles, which are only compared and given back.
unsafe impl Send for Object {}

struct Objects {
    all: BTreeMap<u64, Object>,
    next: u64,
}

static OBJECTS: Mutex<Objects> = Mutex::new(Objects { all: BTreeMap::new(), next: 1 });

fn objects() -> MutexGuard<'static, Objects> {
    OBJECTS.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Whether what an object would be over is there.
pub(super) fn check(resource: &CUDA_RESOURCE_DESC, surface: bool) -> Result<(), CudaError> {
    if resource.flags != 0 {
        return Err(CudaError::INVALID_VALUE);
    }
    match resource.resType {
        CU_RESOURCE_TYPE_ARRAY => {
            // SAFETY: the type says which member is there.
            let array = unsafe { resource.res.array }.hArray;
            let (_, image) = resolve(array)?;
            if surface && !format::is_surface(&image.descriptor) {
                return Err(CudaError::INVALID_VALUE);
            }
            Ok(())
        }
        _ if surface => Err(CudaError::INVALID_VALUE),
        CU_RESOURCE_TYPE_MIPMAPPED_ARRAY => {
            // SAFETY: the type says which member is there.
            let mipmap = unsafe { resource.res.mipmap }.hMipmappedArray;
            resolve_mipmap(mipmap).map(|_| ())
        }
        CU_RESOURCE_TYPE_LINEAR => {
            // SAFETY: the type says which member is there.
            let linear = unsafe { resource.res.linear };
            memory::covers(linear.devPtr, linear.sizeInBytes.max(1), false)
        }
        CU_RESOURCE_TYPE_PITCH2D => {
            // SAFETY: the type says which member is there.
            let pitched = unsafe { resource.res.pitch2D };
            let bytes =
                pitched.pitchInBytes.checked_mul(pitched.height.max(1)).ok_or(CudaError::INVALID_VALUE)?;
            memory::covers(pitched.devPtr, bytes.max(1), false)
        }
        _ => Err(CudaError::INVALID_VALUE),
    }
}

pub(super) fn add(object: Object) -> u64 {
    let mut objects = objects();
    let number = objects.next;
    objects.next += 1;
    objects.all.insert(number, object);
    number
}

/// The object of that number: a texture or a surface, as wanted.
pub(super) fn get(number: u64, surface: bool) -> Result<Object, CudaError> {
    session()?;
    let object = objects().all.get(&number).copied();
    object.filter(|object| object.texture.is_none() == surface).ok_or(CudaError::INVALID_VALUE)
}

pub(super) fn remove(number: u64, surface: bool) -> Result<(), CudaError> {
    get(number, surface)?;
    objects().all.remove(&number);
    Ok(())
}
