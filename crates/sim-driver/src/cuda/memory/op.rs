//! What is done to memory in a stream's order: copies and fills, as descriptions that can be done any number of times.

use super::super::arrays;
use super::find::{self, Found};
use super::*;
use std::sync::{Arc, PoisonError, RwLock};

/// Taken for reading while bytes are moved, for writing while what lies behind addresses is replaced.
pub(in crate::cuda) static MOVING: RwLock<()> = RwLock::new(());

/// No pitch is larger: `CU_DEVICE_ATTRIBUTE_MAX_PITCH`.
const MAX_PITCH: usize = (1 << 31) - 1;

/// As many zeros are had more cheaply from the system, and take no memory of the host.
const WORTH_A_CALL: usize = 256 << 10;

/// What kind of memory a side of a copy lies in.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(in crate::cuda) enum Place {
    /// The program's own memory, which the driver knows nothing of.
    Pageable,
    /// Memory of the host that the driver knows.
    Pinned,
    /// Anything the card can reach by address.
    Device,
    /// An array; its bytes are the driver's.
    Array,
}

/// Rows of bytes in memory: where the first begins, and how far it is from one to the next, and from one plane of rows
/// to the next.
#[derive(Clone, Copy, Debug)]
struct Rows {
    start: usize,
    pitch: usize,
    plane: usize,
    place: Place,
    /// The array's handle, where it is one.
    array: usize,
}

/// A copy or a fill as graphs' nodes say it.
pub(in crate::cuda) enum Params {
    Copy(CUDA_MEMCPY3D),
    Fill(CUDA_MEMSET_NODE_PARAMS),
}

/// How many bytes are in a row, rows in a plane, planes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(in crate::cuda) struct Extent {
    pub(in crate::cuda) width: usize,
    pub(in crate::cuda) height: usize,
    pub(in crate::cuda) depth: usize,
}

impl Extent {
    fn is_empty(self) -> bool {
        self.width == 0 || self.height == 0 || self.depth == 0
    }
}

/// Something done to memory. It stays the same however often it is done; where it lies is looked at anew by
/// [`validate`](Self::validate).
#[derive(Clone, Debug)]
pub(in crate::cuda) struct MemoryOp {
    to: Rows,
    source: Source,
    extent: Extent,
}

#[derive(Clone, Debug)]
enum Source {
    Rows(Rows),
    /// Bytes that were taken when the copy was asked for, row by row without gaps.
    Staged(Arc<[u8]>),
    /// A value of one, two or four bytes, over and over.
    Value(u32, usize),
}

impl Rows {
    fn line(start: u64, place: Place) -> Self {
        Self { start: start as usize, pitch: 0, plane: 0, place, array: 0 }
    }

    /// Bytes without gaps.
    fn packed(start: *const u8, extent: Extent) -> Self {
        let (pitch, plane) = (extent.width, extent.width * extent.height);
        Self { start: start as usize, pitch, plane, place: Place::Pageable, array: 0 }
    }

    /// The first address after the last byte.
    fn end(&self, extent: Extent) -> Option<usize> {
        let planes = self.plane.checked_mul(extent.depth - 1)?;
        let rows = self.pitch.checked_mul(extent.height - 1)?;
        self.start.checked_add(planes)?.checked_add(rows)?.checked_add(extent.width)
    }

    fn check(&self, extent: Extent, write: bool) -> Result<(), CudaError> {
        let end = self.end(extent).ok_or(CudaError::INVALID_VALUE)?;
        match self.place {
            // It may be gone since; its bytes' addresses stay.
            Place::Array => {
                arrays::layout(self.array as CUarray)?;
                if write {
                    update(self.start as u64, |_, touched| *touched = true);
                }
                Ok(())
            }
            Place::Pageable if self.start == 0 => Err(CudaError::INVALID_VALUE),
            Place::Pageable => Ok(()),
            Place::Pinned | Place::Device => find::covers(self.start as u64, end - self.start, write),
        }
    }

    /// Whether all of it is one piece.
    fn is_solid(&self, extent: Extent) -> bool {
        (extent.height == 1 || self.pitch == extent.width)
            && (extent.depth == 1 || self.plane == extent.width * extent.height)
    }

    /// As the C structures say it.
    fn side(&self) -> Side {
        let height = self.plane.checked_div(self.pitch).unwrap_or(0);
        let mut side = Side {
            x: 0,
            y: 0,
            z: 0,
            level: 0,
            kind: CU_MEMORYTYPE_DEVICE,
            host: std::ptr::null(),
            device: 0,
            array: std::ptr::null_mut(),
            pitch: self.pitch,
            height,
        };
        match self.place {
            Place::Pageable | Place::Pinned => {
                side.kind = CU_MEMORYTYPE_HOST;
                side.host = self.start as *const c_void;
            }
            Place::Device => side.device = self.start as u64,
            Place::Array => {
                side.kind = CU_MEMORYTYPE_ARRAY;
                side.array = self.array as CUarray;
                let begin = arrays::layout(side.array).map_or(self.start, |layout| layout.start as usize);
                let offset = self.start.saturating_sub(begin);
                side.z = offset.checked_div(self.plane).unwrap_or(0);
                side.y = (offset - side.z * self.plane).checked_div(self.pitch).unwrap_or(0);
                side.x = offset - side.z * self.plane - side.y * self.pitch;
                (side.pitch, side.height) = (0, 0);
            }
        }
        side
    }

    fn row(&self, y: usize, z: usize) -> *mut u8 {
        (self.start + z * self.plane + y * self.pitch) as *mut u8
    }
}

/// Where a pointer of the unified address space leads.
fn unified(pointer: u64) -> Result<Place, CudaError> {
    match find::find(pointer) {
        Some(found) => Ok(place(&found)),
        // What lies among the card's addresses is not the program's own.
        None if find::is_device_address(pointer) => Err(CudaError::INVALID_VALUE),
        None => Ok(Place::Pageable),
    }
}

fn place(found: &Found) -> Place {
    if found.kind.is_host() { Place::Pinned } else { Place::Device }
}

/// What a pointer to host memory leads to.
fn host(pointer: u64) -> Place {
    find::find(pointer).map_or(Place::Pageable, |found| place(&found))
}

/// One side of a copy, as the C structures say it.
struct Side {
    x: usize,
    y: usize,
    z: usize,
    level: usize,
    kind: CUmemorytype,
    host: *const c_void,
    device: CUdeviceptr,
    array: CUarray,
    pitch: usize,
    height: usize,
}

impl Side {
    fn rows(&self, extent: Extent) -> Result<Rows, CudaError> {
        let bad = CudaError::INVALID_VALUE;
        let (start, place, pitch, height) = match self.kind {
            CU_MEMORYTYPE_HOST => (self.host as u64, host(self.host as u64), self.pitch, self.height),
            CU_MEMORYTYPE_DEVICE => (self.device, Place::Device, self.pitch, self.height),
            CU_MEMORYTYPE_UNIFIED => (self.device, unified(self.device)?, self.pitch, self.height),
            CU_MEMORYTYPE_ARRAY => {
                let layout = arrays::layout(self.array)?;
                let inside = self.x.checked_add(extent.width).is_some_and(|end| end <= layout.width)
                    && self.y.checked_add(extent.height).is_some_and(|end| end <= layout.height)
                    && self.z.checked_add(extent.depth).is_some_and(|end| end <= layout.depth);
                if !inside || self.level != 0 {
                    return Err(bad);
                }
                (layout.start, Place::Array, layout.width, layout.height)
            }
            _ => return Err(bad),
        };
        let wide = self.x.checked_add(extent.width).ok_or(bad)?;
        // Where there is one row or one plane only, nobody says how far it is to the next.
        let rows = extent.height > 1 || extent.depth > 1 || self.y > 0 || self.z > 0;
        let planes = extent.depth > 1 || self.z > 0;
        if self.kind != CU_MEMORYTYPE_ARRAY && pitch > MAX_PITCH
            || rows && pitch < wide
            || planes && height < self.y.checked_add(extent.height).ok_or(bad)?
        {
            return Err(bad);
        }
        let plane = pitch.checked_mul(height).ok_or(bad)?;
        let offset = || {
            let planes = self.z.checked_mul(plane)?;
            let rows = self.y.checked_mul(pitch)?;
            planes.checked_add(rows)?.checked_add(self.x)
        };
        let start = (start as usize).checked_add(offset().ok_or(bad)?).ok_or(bad)?;
        let array = if place == Place::Array { self.array as usize } else { 0 };
        Ok(Rows { start, pitch, plane, place, array })
    }
}

/// The two sides of a C structure whose fields are all called the same.
macro_rules! sides {
    ($copy:ident) => {
        (
            Side {
                x: $copy.dstXInBytes as usize,
                y: $copy.dstY as usize,
                z: $copy.dstZ as usize,
                level: $copy.dstLOD as usize,
                kind: $copy.dstMemoryType,
                host: $copy.dstHost,
                device: u64::from($copy.dstDevice),
                array: $copy.dstArray,
                pitch: $copy.dstPitch as usize,
                height: $copy.dstHeight as usize,
            },
            Side {
                x: $copy.srcXInBytes as usize,
                y: $copy.srcY as usize,
                z: $copy.srcZ as usize,
                level: $copy.srcLOD as usize,
                kind: $copy.srcMemoryType,
                host: $copy.srcHost,
                device: u64::from($copy.srcDevice),
                array: $copy.srcArray,
                pitch: $copy.srcPitch as usize,
                height: $copy.srcHeight as usize,
            },
        )
    };
}

impl MemoryOp {
    /// A copy of `bytes` from anywhere to anywhere.
    pub(in crate::cuda) fn copy(to: CUdeviceptr, from: CUdeviceptr, bytes: usize) -> Result<Self, CudaError> {
        if bytes == 0 {
            return Ok(Self::between(to, Place::Pageable, from, Place::Pageable, 0));
        }
        let op = Self::between(to, unified(to)?, from, unified(from)?, bytes);
        op.validate().map(|()| op)
    }

    /// A copy of `bytes` between two places whose kind is known.
    pub(in crate::cuda) fn between(
        to: u64,
        to_place: Place,
        from: u64,
        from_place: Place,
        bytes: usize,
    ) -> Self {
        Self {
            to: Rows::line(to, to_place),
            source: Source::Rows(Rows::line(from, from_place)),
            extent: Extent { width: bytes, height: 1, depth: 1 },
        }
    }

    /// To the card from the program's memory.
    pub(in crate::cuda) fn to_device(
        to: CUdeviceptr,
        from: *const c_void,
        bytes: usize,
    ) -> Result<Self, CudaError> {
        let op = Self::between(to, Place::Device, from as u64, host(from as u64), bytes);
        op.validate().map(|()| op)
    }

    /// From the card to the program's memory.
    pub(in crate::cuda) fn to_host(
        to: *mut c_void,
        from: CUdeviceptr,
        bytes: usize,
    ) -> Result<Self, CudaError> {
        let op = Self::between(to as u64, host(to as u64), from, Place::Device, bytes);
        op.validate().map(|()| op)
    }

    /// Within or between cards.
    pub(in crate::cuda) fn on_device(
        to: CUdeviceptr,
        from: CUdeviceptr,
        bytes: usize,
    ) -> Result<Self, CudaError> {
        let op = Self::between(to, Place::Device, from, Place::Device, bytes);
        op.validate().map(|()| op)
    }

    fn of_sides(to: &Side, from: &Side, extent: Extent) -> Result<Self, CudaError> {
        if extent.is_empty() {
            return Ok(Self::between(0, Place::Pageable, 0, Place::Pageable, 0));
        }
        let op = Self { to: to.rows(extent)?, source: Source::Rows(from.rows(extent)?), extent };
        op.validate().map(|()| op)
    }

    /// A copy of a box, as graphs' nodes have it too.
    pub(in crate::cuda) fn copy_3d(copy: &CUDA_MEMCPY3D) -> Result<Self, CudaError> {
        let (to, from) = sides!(copy);
        let extent = Extent { width: copy.WidthInBytes, height: copy.Height, depth: copy.Depth };
        Self::of_sides(&to, &from, extent)
    }

    /// The same between two cards: addresses say which.
    pub(in crate::cuda) fn copy_3d_peer(copy: &CUDA_MEMCPY3D_PEER) -> Result<Self, CudaError> {
        let (to, from) = sides!(copy);
        let extent = Extent { width: copy.WidthInBytes, height: copy.Height, depth: copy.Depth };
        Self::of_sides(&to, &from, extent)
    }

    /// The same, of old.
    pub(in crate::cuda) fn copy_3d_v1(copy: &CUDA_MEMCPY3D_v1) -> Result<Self, CudaError> {
        let (to, from) = sides!(copy);
        let extent = Extent {
            width: copy.WidthInBytes as usize,
            height: copy.Height as usize,
            depth: copy.Depth as usize,
        };
        Self::of_sides(&to, &from, extent)
    }

    /// A copy of a rectangle.
    pub(in crate::cuda) fn copy_2d(copy: &CUDA_MEMCPY2D) -> Result<Self, CudaError> {
        Self::copy_3d(&CUDA_MEMCPY3D {
            srcXInBytes: copy.srcXInBytes,
            srcY: copy.srcY,
            srcMemoryType: copy.srcMemoryType,
            srcHost: copy.srcHost,
            srcDevice: copy.srcDevice,
            srcArray: copy.srcArray,
            srcPitch: copy.srcPitch,
            dstXInBytes: copy.dstXInBytes,
            dstY: copy.dstY,
            dstMemoryType: copy.dstMemoryType,
            dstHost: copy.dstHost,
            dstDevice: copy.dstDevice,
            dstArray: copy.dstArray,
            dstPitch: copy.dstPitch,
            WidthInBytes: copy.WidthInBytes,
            Height: copy.Height,
            Depth: 1,
            ..CUDA_MEMCPY3D::default()
        })
    }

    /// `width` values of `element` bytes in each of `height` rows, as graphs' nodes have it too.
    pub(in crate::cuda) fn fill(
        to: CUdeviceptr,
        pitch: usize,
        value: u32,
        element: usize,
        width: usize,
        height: usize,
    ) -> Result<Self, CudaError> {
        let bad = CudaError::INVALID_VALUE;
        let width = width.checked_mul(element).ok_or(bad)?;
        let extent = Extent { width, height, depth: 1 };
        let aligned = matches!(element, 1 | 2 | 4) && (to as usize).is_multiple_of(element);
        if !aligned || height > 1 && (pitch < width || !pitch.is_multiple_of(element) || pitch > MAX_PITCH) {
            return Err(bad);
        }
        let to = Rows { start: to as usize, pitch, plane: 0, place: Place::Device, array: 0 };
        let op = Self { to, source: Source::Value(value, element), extent };
        op.validate().map(|()| op)
    }

    /// A fill as a graph's node says it.
    pub(in crate::cuda) fn memset(params: &CUDA_MEMSET_NODE_PARAMS) -> Result<Self, CudaError> {
        let element = params.elementSize as usize;
        Self::fill(params.dst, params.pitch, params.value, element, params.width, params.height)
    }

    /// As a graph's node says it.
    pub(in crate::cuda) fn params(&self) -> Params {
        let Extent { width, height, depth } = self.extent;
        let from = match &self.source {
            Source::Value(value, element) => {
                return Params::Fill(CUDA_MEMSET_NODE_PARAMS {
                    dst: self.to.start as u64,
                    pitch: self.to.pitch,
                    value: *value,
                    elementSize: *element as u32,
                    width: width / element,
                    height,
                });
            }
            Source::Rows(rows) => *rows,
            Source::Staged(bytes) => Rows::packed(bytes.as_ptr(), self.extent),
        };
        let (to, from) = (self.to.side(), from.side());
        Params::Copy(CUDA_MEMCPY3D {
            srcXInBytes: from.x,
            srcY: from.y,
            srcZ: from.z,
            srcMemoryType: from.kind,
            srcHost: from.host,
            srcDevice: from.device,
            srcArray: from.array,
            srcPitch: from.pitch,
            srcHeight: from.height,
            dstXInBytes: to.x,
            dstY: to.y,
            dstZ: to.z,
            dstMemoryType: to.kind,
            dstHost: to.host.cast_mut(),
            dstDevice: to.device,
            dstArray: to.array,
            dstPitch: to.pitch,
            dstHeight: to.height,
            WidthInBytes: width,
            Height: height,
            Depth: depth,
            ..CUDA_MEMCPY3D::default()
        })
    }

    /// Whether there is nothing to do.
    pub(in crate::cuda) fn is_empty(&self) -> bool {
        self.extent.is_empty()
    }

    /// Whether everything it names is memory, still. What the program's own memory is, nobody knows but the program.
    pub(in crate::cuda) fn validate(&self) -> Result<(), CudaError> {
        if self.is_empty() {
            return Ok(());
        }
        self.to.check(self.extent, true)?;
        match &self.source {
            Source::Rows(rows) => rows.check(self.extent, false),
            Source::Staged(_) | Source::Value(..) => Ok(()),
        }
    }

    /// The kind of memory it writes.
    pub(in crate::cuda) fn to_place(&self) -> Place {
        self.to.place
    }

    /// The kind of memory it reads, if any.
    #[allow(clippy::wrong_self_convention, reason = "the place it copies from, not a conversion")]
    pub(in crate::cuda) fn from_place(&self) -> Option<Place> {
        match &self.source {
            Source::Rows(rows) => Some(rows.place),
            Source::Staged(_) | Source::Value(..) => None,
        }
    }

    /// The same with the source's bytes as they are now.
    pub(in crate::cuda) fn staged(self) -> Self {
        let Source::Rows(from) = &self.source else { return self };
        let Extent { width, height, depth } = self.extent;
        let mut bytes = vec![0u8; width * height * depth];
        if !self.is_empty() {
            let packed = Rows::packed(bytes.as_mut_ptr(), self.extent);
            copy_rows(&packed, from, self.extent);
        }
        Self { source: Source::Staged(bytes.into()), ..self }
    }

    /// Moves the bytes.
    pub(in crate::cuda) fn run(&self) {
        if self.is_empty() {
            return;
        }
        let _still = MOVING.read().unwrap_or_else(PoisonError::into_inner);
        match &self.source {
            Source::Rows(from) => copy_rows(&self.to, from, self.extent),
            Source::Staged(bytes) => {
                let from = Rows::packed(bytes.as_ptr(), self.extent);
                copy_rows(&self.to, &from, self.extent);
            }
            Source::Value(value, element) => fill_rows(&self.to, self.extent, *value, *element),
        }
    }
}

fn copy_rows(to: &Rows, from: &Rows, extent: Extent) {
    let Extent { width, height, depth } = extent;
    if to.is_solid(extent) && from.is_solid(extent) {
        // SAFETY: both sides were found to be memory of that size, or are the program's own and its promise; they may
        // overlap.
        unsafe { std::ptr::copy(from.row(0, 0), to.row(0, 0), width * height * depth) };
        return;
    }
    for z in 0..depth {
        for y in 0..height {
            // SAFETY: likewise, row by row.
            unsafe { std::ptr::copy(from.row(y, z), to.row(y, z), width) };
        }
    }
}

fn fill_rows(to: &Rows, extent: Extent, value: u32, element: usize) {
    let (width, height) =
        if to.is_solid(extent) { (extent.width * extent.height, 1) } else { (extent.width, extent.height) };
    let bytes = value.to_ne_bytes();
    let same = bytes[..element].iter().all(|&byte| byte == bytes[0]);
    for y in 0..height {
        let row = to.row(y, 0);
        if value == 0 && width >= WORTH_A_CALL && arena::clear(row as usize, width) {
            continue;
        }
        if same {
            // SAFETY: found to be memory of that size.
            unsafe { std::ptr::write_bytes(row, bytes[0], width) };
        } else if element == 2 {
            // SAFETY: likewise, and aligned as the value is.
            unsafe { std::slice::from_raw_parts_mut(row.cast::<u16>(), width / 2) }.fill(value as u16);
        } else {
            // SAFETY: likewise.
            unsafe { std::slice::from_raw_parts_mut(row.cast::<u32>(), width / 4) }.fill(value);
        }
    }
}
