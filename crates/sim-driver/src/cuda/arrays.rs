//! Arrays, mipmapped arrays, and the texture and surface objects on top of them.
//!
//! The bytes of an array are packed rows, visible only to copies. An array is charged to the card like a linear
//! allocation of the same size.

mod array_functions;
mod format;
mod texture_objects;

use super::context::Context;
use super::handle::{HandleArena, handle_of};
use super::memory::{self, MemoryKind};
use super::session::session;
use super::*;
use std::sync::{Mutex, MutexGuard, PoisonError};

/// The location of an array's bytes: packed rows of `width` bytes, `height` rows per plane.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct ArrayLayout {
    pub(super) start: u64,
    pub(super) width: usize,
    pub(super) height: usize,
    pub(super) depth: usize,
}

/// A stand-alone array, or one level of a mipmapped array.
#[derive(Default)]
struct CudaArray {
    inner: Mutex<Option<ArrayStorage>>,
}

/// A mipmapped array, or an unused slot.
#[derive(Default)]
struct MipmappedArray {
    inner: Mutex<Option<MipmapLevels>>,
}

/// Shape and location of an array.
#[derive(Clone, Copy)]
struct ArrayStorage {
    descriptor: CUDA_ARRAY3D_DESCRIPTOR,
    start: u64,
    context: &'static Context,
    /// Whether destroying the array frees its bytes.
    own: bool,
}

/// Location and levels of a mipmapped array.
#[derive(Clone)]
struct MipmapLevels {
    start: u64,
    context: &'static Context,
    own: bool,
    levels: Vec<&'static CudaArray>,
}

static ARRAYS: HandleArena<CudaArray> = HandleArena::new();
static MIPMAPS: HandleArena<MipmappedArray> = HandleArena::new();

impl CudaArray {
    fn inner(&self) -> MutexGuard<'_, Option<ArrayStorage>> {
        self.inner.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn make(image: ArrayStorage) -> Result<&'static Self, CudaError> {
        let made = ARRAYS.make(CudaArray::default, |_| ()).ok_or(CudaError::OUT_OF_MEMORY)?;
        *made.inner() = Some(image);
        Ok(made)
    }

    fn destroy(&'static self) {
        let gone = self.inner().take();
        ARRAYS.drop(handle_of::<_, u8>(self));
        if let Some(image) = gone.filter(|image| image.own) {
            memory::free_internal(image.start);
        }
    }
}

impl MipmappedArray {
    fn inner(&self) -> MutexGuard<'_, Option<MipmapLevels>> {
        self.inner.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn destroy(&'static self) {
        let Some(gone) = self.inner().take() else { return };
        MIPMAPS.drop(handle_of::<_, u8>(self));
        for level in gone.levels {
            level.destroy();
        }
        if gone.own {
            memory::free_internal(gone.start);
        }
    }
}

/// Resolves an array handle to the array and its storage.
fn resolve(handle: CUarray) -> Result<(&'static CudaArray, ArrayStorage), CudaError> {
    session()?;
    let array = ARRAYS.get(handle).ok_or(CudaError::INVALID_HANDLE)?;
    let image = *array.inner();
    Ok((array, image.ok_or(CudaError::INVALID_HANDLE)?))
}

/// Resolves a mipmapped array handle to the array and its levels.
fn resolve_mipmap(handle: CUmipmappedArray) -> Result<(&'static MipmappedArray, MipmapLevels), CudaError> {
    session()?;
    let mipmap = MIPMAPS.get(handle).ok_or(CudaError::INVALID_HANDLE)?;
    let levels = mipmap.inner().clone();
    Ok((mipmap, levels.ok_or(CudaError::INVALID_HANDLE)?))
}

/// Returns where the bytes of an array are.
pub(super) fn layout(array: CUarray) -> Result<ArrayLayout, CudaError> {
    let (_, image) = resolve(array)?;
    let (width, height, depth) = format::rows(&image.descriptor)?;
    Ok(ArrayLayout { start: image.start, width, height, depth })
}

/// Creates an array with its own memory.
fn create(context: &'static Context, descriptor: CUDA_ARRAY3D_DESCRIPTOR) -> Result<CUarray, CudaError> {
    format::check(&descriptor)?;
    let bytes = format::bytes(&descriptor)?;
    let start = memory::allocate_internal(context.device, bytes, MemoryKind::Array)?;
    CudaArray::make(ArrayStorage { descriptor, start, context, own: true }).map(handle_of)
}

/// Returns the total size of the first `levels` mipmap levels, in bytes.
fn bytes_of_levels(descriptor: &CUDA_ARRAY3D_DESCRIPTOR, levels: u32) -> Result<usize, CudaError> {
    (0..levels).try_fold(0usize, |sum, level| {
        let bytes = format::bytes(&format::level(descriptor, level))?.next_multiple_of(512);
        sum.checked_add(bytes).ok_or(CudaError::OUT_OF_MEMORY)
    })
}

/// Creates a mipmapped array with its own memory, or over existing memory given as address and size.
pub(super) fn create_mipmap(
    context: &'static Context,
    descriptor: CUDA_ARRAY3D_DESCRIPTOR,
    levels: u32,
    over: Option<(u64, usize)>,
) -> Result<CUmipmappedArray, CudaError> {
    format::check(&descriptor)?;
    if levels == 0 {
        return Err(CudaError::INVALID_VALUE);
    }
    let levels = levels.min(format::max_levels(&descriptor));
    let bytes = bytes_of_levels(&descriptor, levels)?;
    let start = match over {
        Some((_, room)) if room < bytes => return Err(CudaError::INVALID_VALUE),
        Some((start, _)) => start,
        None => memory::allocate_internal(context.device, bytes, MemoryKind::Array)?,
    };
    let made = MIPMAPS.make(MipmappedArray::default, |_| ()).ok_or(CudaError::OUT_OF_MEMORY)?;
    let mut arrays = Vec::new();
    let mut at = start;
    for level in 0..levels {
        let descriptor = format::level(&descriptor, level);
        arrays.push(CudaArray::make(ArrayStorage { descriptor, start: at, context, own: false })?);
        at += format::bytes(&descriptor)?.next_multiple_of(512) as u64;
    }
    *made.inner() = Some(MipmapLevels { start, context, own: over.is_none(), levels: arrays });
    Ok(handle_of(made))
}

/// Destroys all arrays of a context.
pub(super) fn drop_all(context: &'static Context) {
    for mipmap in MIPMAPS.live() {
        let own = mipmap.inner().as_ref().is_some_and(|levels| std::ptr::eq(levels.context, context));
        if own {
            mipmap.destroy();
        }
    }
    for array in ARRAYS.live() {
        let own = array.inner().as_ref().is_some_and(|image| std::ptr::eq(image.context, context));
        if own {
            array.destroy();
        }
    }
}
