//! Arrays, mipmapped arrays, and the texture and surface objects over them.
//!
//! An array's bytes are rows without gaps, which only copies see. On the card they take what a plain allocation of as
//! many bytes takes.

mod calls;
mod format;
mod objects;

use super::context::Context;
use super::handle::{Arena, handle_of};
use super::memory::{self, Kind};
use super::session::session;
use super::*;
use std::sync::{Mutex, MutexGuard, PoisonError};

/// Where an array's bytes lie: rows of `width` bytes without gaps, `height` of them in a plane.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Layout {
    pub(super) start: u64,
    pub(super) width: usize,
    pub(super) height: usize,
    pub(super) depth: usize,
}

/// An array, of its own or a level of a mipmapped one.
#[derive(Default)]
struct Array {
    inner: Mutex<Option<Image>>,
}

/// A mipmapped array.
#[derive(Default)]
struct Mipmap {
    inner: Mutex<Option<Levels>>,
}

#[derive(Clone, Copy)]
struct Image {
    descriptor: CUDA_ARRAY3D_DESCRIPTOR,
    start: u64,
    context: &'static Context,
    /// Whether its bytes are its own to give back.
    own: bool,
}

#[derive(Clone)]
struct Levels {
    start: u64,
    context: &'static Context,
    own: bool,
    levels: Vec<&'static Array>,
}

static ARRAYS: Arena<Array> = Arena::new();
static MIPMAPS: Arena<Mipmap> = Arena::new();

impl Array {
    fn inner(&self) -> MutexGuard<'_, Option<Image>> {
        self.inner.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn make(image: Image) -> Result<&'static Self, CudaError> {
        let made = ARRAYS.make(Array::default, |_| ()).ok_or(CudaError::OUT_OF_MEMORY)?;
        *made.inner() = Some(image);
        Ok(made)
    }

    fn end(&'static self) {
        let gone = self.inner().take();
        ARRAYS.drop(handle_of::<_, u8>(self));
        if let Some(image) = gone.filter(|image| image.own) {
            memory::give(image.start);
        }
    }
}

impl Mipmap {
    fn inner(&self) -> MutexGuard<'_, Option<Levels>> {
        self.inner.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn end(&'static self) {
        let Some(gone) = self.inner().take() else { return };
        MIPMAPS.drop(handle_of::<_, u8>(self));
        for level in gone.levels {
            level.end();
        }
        if gone.own {
            memory::give(gone.start);
        }
    }
}

/// The array a handle means.
fn resolve(handle: CUarray) -> Result<(&'static Array, Image), CudaError> {
    session()?;
    let array = ARRAYS.get(handle).ok_or(CudaError::INVALID_HANDLE)?;
    let image = *array.inner();
    Ok((array, image.ok_or(CudaError::INVALID_HANDLE)?))
}

/// The mipmapped array a handle means.
fn resolve_mipmap(handle: CUmipmappedArray) -> Result<(&'static Mipmap, Levels), CudaError> {
    session()?;
    let mipmap = MIPMAPS.get(handle).ok_or(CudaError::INVALID_HANDLE)?;
    let levels = mipmap.inner().clone();
    Ok((mipmap, levels.ok_or(CudaError::INVALID_HANDLE)?))
}

/// Where the bytes of an array lie.
pub(super) fn layout(array: CUarray) -> Result<Layout, CudaError> {
    let (_, image) = resolve(array)?;
    let (width, height, depth) = format::rows(&image.descriptor)?;
    Ok(Layout { start: image.start, width, height, depth })
}

/// An array with bytes of its own.
fn create(context: &'static Context, descriptor: CUDA_ARRAY3D_DESCRIPTOR) -> Result<CUarray, CudaError> {
    format::check(&descriptor)?;
    let bytes = format::bytes(&descriptor)?;
    let start = memory::take(context.device, bytes, Kind::Array)?;
    Array::make(Image { descriptor, start, context, own: true }).map(handle_of)
}

/// Levels need as many bytes.
fn bytes_of_levels(descriptor: &CUDA_ARRAY3D_DESCRIPTOR, levels: u32) -> Result<usize, CudaError> {
    (0..levels).try_fold(0usize, |sum, level| {
        let bytes = format::bytes(&format::level(descriptor, level))?.next_multiple_of(512);
        sum.checked_add(bytes).ok_or(CudaError::OUT_OF_MEMORY)
    })
}

/// A mipmapped array with bytes of its own, or over bytes that are there already.
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
    let levels = levels.min(format::most_levels(&descriptor));
    let bytes = bytes_of_levels(&descriptor, levels)?;
    let start = match over {
        Some((_, room)) if room < bytes => return Err(CudaError::INVALID_VALUE),
        Some((start, _)) => start,
        None => memory::take(context.device, bytes, Kind::Array)?,
    };
    let made = MIPMAPS.make(Mipmap::default, |_| ()).ok_or(CudaError::OUT_OF_MEMORY)?;
    let mut arrays = Vec::new();
    let mut at = start;
    for level in 0..levels {
        let descriptor = format::level(&descriptor, level);
        arrays.push(Array::make(Image { descriptor, start: at, context, own: false })?);
        at += format::bytes(&descriptor)?.next_multiple_of(512) as u64;
    }
    *made.inner() = Some(Levels { start, context, own: over.is_none(), levels: arrays });
    Ok(handle_of(made))
}

/// Arrays go with their context.
pub(super) fn drop_all(context: &'static Context) {
    for mipmap in MIPMAPS.live() {
        let own = mipmap.inner().as_ref().is_some_and(|levels| std::ptr::eq(levels.context, context));
        if own {
            mipmap.end();
        }
    }
    for array in ARRAYS.live() {
        let own = array.inner().as_ref().is_some_and(|image| std::ptr::eq(image.context, context));
        if own {
            array.end();
        }
    }
}
