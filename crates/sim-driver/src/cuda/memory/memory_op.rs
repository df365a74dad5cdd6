//! Copies and fills as reusable descriptions, for execution in stream order and in graphs.

use super::super::arrays;
use super::super::engine::{CopyDirection, CopyLink, CopyTime};
use super::lookup::{self, MemoryRange};
use super::*;
use std::sync::{Arc, PoisonError, RwLock};

/// Held for reading while bytes are copied, for writing while the pages behind addresses are replaced.
pub(in crate::cuda) static REMAP_LOCK: RwLock<()> = RwLock::new(());

/// Largest pitch in bytes: `CU_DEVICE_ATTRIBUTE_MAX_PITCH`.
const MAX_PITCH: usize = (1 << 31) - 1;

/// From this size on, zeroing by `madvise` is cheaper than writing, and frees host memory.
const MIN_MADVISE_BYTES: usize = 256 << 10;

/// The kind of memory on one side of a copy.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(in crate::cuda) enum MemoryPlace {
    /// Memory of the program that the driver does not know.
    Pageable,
    /// Host memory that the driver knows.
    Pinned,
    /// Memory that the card can access by address.
    Device,
    /// An array, whose bytes the driver places.
    Array,
}

/// Rows of bytes: start address, distance between rows (pitch), and distance between planes of rows.
#[derive(Clone, Copy, Debug)]
struct RowLayout {
    start: usize,
    pitch: usize,
    plane: usize,
    place: MemoryPlace,
    /// The handle of the array, or zero.
    array: usize,
}

/// A copy or fill as the parameters of a graph node.
pub(in crate::cuda) enum MemoryNodeParams {
    Copy(CUDA_MEMCPY3D),
    Fill(CUDA_MEMSET_NODE_PARAMS),
}

/// Bytes per row, rows per plane, and number of planes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(in crate::cuda) struct CopyExtent {
    pub(in crate::cuda) width: usize,
    pub(in crate::cuda) height: usize,
    pub(in crate::cuda) depth: usize,
}

impl CopyExtent {
    fn is_empty(self) -> bool {
        self.width == 0 || self.height == 0 || self.depth == 0
    }
}

/// A copy or fill. It can run any number of times; [`validate`](Self::validate) checks whether its memory still
/// exists.
#[derive(Clone, Debug)]
pub(in crate::cuda) struct MemoryOp {
    to: RowLayout,
    source: CopySource,
    extent: CopyExtent,
}

/// The source of a copy or fill.
#[derive(Clone, Debug)]
enum CopySource {
    Rows(RowLayout),
    /// Bytes read when the copy was submitted, as packed rows.
    Staged(Arc<[u8]>),
    /// A repeated value of one, two or four bytes.
    Value(u32, usize),
}

impl RowLayout {
    fn line(start: u64, place: MemoryPlace) -> Self {
        Self { start: start as usize, pitch: 0, plane: 0, place, array: 0 }
    }

    /// Describes packed rows at an address.
    fn packed(start: *const u8, extent: CopyExtent) -> Self {
        let (pitch, plane) = (extent.width, extent.width * extent.height);
        Self { start: start as usize, pitch, plane, place: MemoryPlace::Pageable, array: 0 }
    }

    /// Returns the first address after the last byte.
    fn end(&self, extent: CopyExtent) -> Option<usize> {
        let planes = self.plane.checked_mul(extent.depth - 1)?;
        let rows = self.pitch.checked_mul(extent.height - 1)?;
        self.start.checked_add(planes)?.checked_add(rows)?.checked_add(extent.width)
    }

    fn check(&self, extent: CopyExtent, write: bool) -> Result<(), CudaError> {
        let end = self.end(extent).ok_or(CudaError::INVALID_VALUE)?;
        match self.place {
            // The array may have been destroyed since; its addresses stay mapped.
            MemoryPlace::Array => {
                arrays::layout(self.array as CUarray)?;
                if write {
                    update(self.start as u64, |_, touched| *touched = true);
                }
                Ok(())
            }
            MemoryPlace::Pageable if self.start == 0 => Err(CudaError::INVALID_VALUE),
            MemoryPlace::Pageable => Ok(()),
            MemoryPlace::Pinned | MemoryPlace::Device => {
                lookup::covers(self.start as u64, end - self.start, write)
            }
        }
    }

    /// Returns whether the rows form one contiguous range.
    fn is_contiguous(&self, extent: CopyExtent) -> bool {
        (extent.height == 1 || self.pitch == extent.width)
            && (extent.depth == 1 || self.plane == extent.width * extent.height)
    }

    /// Converts to the fields of CUDA's copy structures.
    fn side(&self) -> CopySide {
        let height = self.plane.checked_div(self.pitch).unwrap_or(0);
        let mut side = CopySide {
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
            MemoryPlace::Pageable | MemoryPlace::Pinned => {
                side.kind = CU_MEMORYTYPE_HOST;
                side.host = self.start as *const c_void;
            }
            MemoryPlace::Device => side.device = self.start as u64,
            MemoryPlace::Array => {
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

/// Returns the kind of memory at a unified address.
fn unified(pointer: u64) -> Result<MemoryPlace, CudaError> {
    match lookup::find(pointer) {
        Some(found) => Ok(place(&found)),
        // An unallocated device address is not memory of the program.
        None if lookup::is_device_address(pointer) => Err(CudaError::INVALID_VALUE),
        None => Ok(MemoryPlace::Pageable),
    }
}

fn place(found: &MemoryRange) -> MemoryPlace {
    if found.kind.is_host() { MemoryPlace::Pinned } else { MemoryPlace::Device }
}

/// Returns the kind of memory at a host pointer.
fn host(pointer: u64) -> MemoryPlace {
    lookup::find(pointer).map_or(MemoryPlace::Pageable, |found| place(&found))
}

/// One side of a copy, with the fields of CUDA's copy structures.
struct CopySide {
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

impl CopySide {
    fn rows(&self, extent: CopyExtent) -> Result<RowLayout, CudaError> {
        let bad = CudaError::INVALID_VALUE;
        let (start, place, pitch, height) = match self.kind {
            CU_MEMORYTYPE_HOST => (self.host as u64, host(self.host as u64), self.pitch, self.height),
            CU_MEMORYTYPE_DEVICE => (self.device, MemoryPlace::Device, self.pitch, self.height),
            CU_MEMORYTYPE_UNIFIED => (self.device, unified(self.device)?, self.pitch, self.height),
            CU_MEMORYTYPE_ARRAY => {
                let layout = arrays::layout(self.array)?;
                let inside = self.x.checked_add(extent.width).is_some_and(|end| end <= layout.width)
                    && self.y.checked_add(extent.height).is_some_and(|end| end <= layout.height)
                    && self.z.checked_add(extent.depth).is_some_and(|end| end <= layout.depth);
                if !inside || self.level != 0 {
                    return Err(bad);
                }
                (layout.start, MemoryPlace::Array, layout.width, layout.height)
            }
            _ => return Err(bad),
        };
        let wide = self.x.checked_add(extent.width).ok_or(bad)?;
        // A single row or plane needs no valid pitch or height.
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
        let array = if place == MemoryPlace::Array { self.array as usize } else { 0 };
        Ok(RowLayout { start, pitch, plane, place, array })
    }
}

/// Builds both sides from a copy structure; all versions use the same field names.
macro_rules! sides {
    ($copy:ident) => {
        (
            CopySide {
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
            CopySide {
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
    /// Describes a copy of `bytes` between unified addresses.
    pub(in crate::cuda) fn copy(to: CUdeviceptr, from: CUdeviceptr, bytes: usize) -> Result<Self, CudaError> {
        if bytes == 0 {
            return Ok(Self::between(to, MemoryPlace::Pageable, from, MemoryPlace::Pageable, 0));
        }
        let op = Self::between(to, unified(to)?, from, unified(from)?, bytes);
        op.validate().map(|()| op)
    }

    /// Describes a copy of `bytes` between places of known kind.
    pub(in crate::cuda) fn between(
        to: u64,
        to_place: MemoryPlace,
        from: u64,
        from_place: MemoryPlace,
        bytes: usize,
    ) -> Self {
        Self {
            to: RowLayout::line(to, to_place),
            source: CopySource::Rows(RowLayout::line(from, from_place)),
            extent: CopyExtent { width: bytes, height: 1, depth: 1 },
        }
    }

    /// Describes a copy from host memory to the card.
    pub(in crate::cuda) fn to_device(
        to: CUdeviceptr,
        from: *const c_void,
        bytes: usize,
    ) -> Result<Self, CudaError> {
        let op = Self::between(to, MemoryPlace::Device, from as u64, host(from as u64), bytes);
        op.validate().map(|()| op)
    }

    /// Describes a copy from the card to host memory.
    pub(in crate::cuda) fn to_host(
        to: *mut c_void,
        from: CUdeviceptr,
        bytes: usize,
    ) -> Result<Self, CudaError> {
        let op = Self::between(to as u64, host(to as u64), from, MemoryPlace::Device, bytes);
        op.validate().map(|()| op)
    }

    /// Describes a copy within a card or between cards.
    pub(in crate::cuda) fn on_device(
        to: CUdeviceptr,
        from: CUdeviceptr,
        bytes: usize,
    ) -> Result<Self, CudaError> {
        let op = Self::between(to, MemoryPlace::Device, from, MemoryPlace::Device, bytes);
        op.validate().map(|()| op)
    }

    fn of_sides(to: &CopySide, from: &CopySide, extent: CopyExtent) -> Result<Self, CudaError> {
        if extent.is_empty() {
            return Ok(Self::between(0, MemoryPlace::Pageable, 0, MemoryPlace::Pageable, 0));
        }
        let op = Self { to: to.rows(extent)?, source: CopySource::Rows(from.rows(extent)?), extent };
        op.validate().map(|()| op)
    }

    /// Describes a three-dimensional copy, also for graph nodes.
    pub(in crate::cuda) fn copy_3d(copy: &CUDA_MEMCPY3D) -> Result<Self, CudaError> {
        let (to, from) = sides!(copy);
        let extent = CopyExtent { width: copy.WidthInBytes, height: copy.Height, depth: copy.Depth };
        Self::of_sides(&to, &from, extent)
    }

    /// Describes a three-dimensional copy between cards, which the addresses identify.
    pub(in crate::cuda) fn copy_3d_peer(copy: &CUDA_MEMCPY3D_PEER) -> Result<Self, CudaError> {
        let (to, from) = sides!(copy);
        let extent = CopyExtent { width: copy.WidthInBytes, height: copy.Height, depth: copy.Depth };
        Self::of_sides(&to, &from, extent)
    }

    /// Describes a three-dimensional copy with the version 1 structure.
    pub(in crate::cuda) fn copy_3d_v1(copy: &CUDA_MEMCPY3D_v1) -> Result<Self, CudaError> {
        let (to, from) = sides!(copy);
        let extent = CopyExtent {
            width: copy.WidthInBytes as usize,
            height: copy.Height as usize,
            depth: copy.Depth as usize,
        };
        Self::of_sides(&to, &from, extent)
    }

    /// Describes a two-dimensional copy.
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

    /// Describes a fill of `height` rows with `width` values of `element` bytes each.
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
        let extent = CopyExtent { width, height, depth: 1 };
        let aligned = matches!(element, 1 | 2 | 4) && (to as usize).is_multiple_of(element);
        if !aligned || height > 1 && (pitch < width || !pitch.is_multiple_of(element) || pitch > MAX_PITCH) {
            return Err(bad);
        }
        let to = RowLayout { start: to as usize, pitch, plane: 0, place: MemoryPlace::Device, array: 0 };
        let op = Self { to, source: CopySource::Value(value, element), extent };
        op.validate().map(|()| op)
    }

    /// Describes a fill with the parameters of a graph node.
    pub(in crate::cuda) fn memset(params: &CUDA_MEMSET_NODE_PARAMS) -> Result<Self, CudaError> {
        let element = params.elementSize as usize;
        Self::fill(params.dst, params.pitch, params.value, element, params.width, params.height)
    }

    /// Returns the copy engine and the time that the operation takes on a device; `None` if it is too short to matter.
    pub(in crate::cuda) fn time(&self, device: &Device) -> Option<CopyTime> {
        let CopyExtent { width, height, depth } = self.extent;
        let bytes = (width as u64).saturating_mul(height as u64).saturating_mul(depth as u64);
        let is_host = |place| matches!(place, MemoryPlace::Pageable | MemoryPlace::Pinned);
        let gpu = |rows: &RowLayout| lookup::find(rows.start as u64)?.device.map(|device| device.gpu);
        let (direction, link) = match (&self.source, is_host(self.to.place)) {
            (CopySource::Value(..), _) => (CopyDirection::OnCard, CopyLink::Memory(1)),
            (CopySource::Staged(_), false) => (CopyDirection::ToCard, CopyLink::Pcie),
            (CopySource::Rows(from), false) if is_host(from.place) => (CopyDirection::ToCard, CopyLink::Pcie),
            (CopySource::Rows(from), true) if !is_host(from.place) => (CopyDirection::ToHost, CopyLink::Pcie),
            (CopySource::Rows(from), false) => match (gpu(from), gpu(&self.to)) {
                (Some(from), Some(to)) if from != to => {
                    (CopyDirection::ToCard, CopyLink::Peer(if to == device.gpu { from } else { to }))
                }
                // Each byte is read and written.
                _ => (CopyDirection::OnCard, CopyLink::Memory(2)),
            },
            // Between two places of the host: the card takes no part.
            (CopySource::Rows(_) | CopySource::Staged(_), true) => return None,
        };
        CopyTime::new(device, session::session().ok()?.node.config(), direction, link, bytes)
    }

    /// Converts to the parameters of a graph node.
    pub(in crate::cuda) fn params(&self) -> MemoryNodeParams {
        let CopyExtent { width, height, depth } = self.extent;
        let from = match &self.source {
            CopySource::Value(value, element) => {
                return MemoryNodeParams::Fill(CUDA_MEMSET_NODE_PARAMS {
                    dst: self.to.start as u64,
                    pitch: self.to.pitch,
                    value: *value,
                    elementSize: *element as u32,
                    width: width / element,
                    height,
                });
            }
            CopySource::Rows(rows) => *rows,
            CopySource::Staged(bytes) => RowLayout::packed(bytes.as_ptr(), self.extent),
        };
        let (to, from) = (self.to.side(), from.side());
        MemoryNodeParams::Copy(CUDA_MEMCPY3D {
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

    /// Returns whether there is nothing to copy or fill.
    pub(in crate::cuda) fn is_empty(&self) -> bool {
        self.extent.is_empty()
    }

    /// Checks that all memory it refers to still exists. Pageable memory cannot be checked.
    pub(in crate::cuda) fn validate(&self) -> Result<(), CudaError> {
        if self.is_empty() {
            return Ok(());
        }
        self.to.check(self.extent, true)?;
        match &self.source {
            CopySource::Rows(rows) => rows.check(self.extent, false),
            CopySource::Staged(_) | CopySource::Value(..) => Ok(()),
        }
    }

    /// Returns the kind of memory it writes.
    pub(in crate::cuda) fn to_place(&self) -> MemoryPlace {
        self.to.place
    }

    /// Returns the kind of memory it reads, if any.
    #[allow(clippy::wrong_self_convention, reason = "the place it copies from, not a conversion")]
    pub(in crate::cuda) fn from_place(&self) -> Option<MemoryPlace> {
        match &self.source {
            CopySource::Rows(rows) => Some(rows.place),
            CopySource::Staged(_) | CopySource::Value(..) => None,
        }
    }

    /// Replaces the source by a copy of its current bytes.
    pub(in crate::cuda) fn staged(self) -> Self {
        let CopySource::Rows(from) = &self.source else { return self };
        let CopyExtent { width, height, depth } = self.extent;
        let mut bytes = vec![0u8; width * height * depth];
        if !self.is_empty() {
            let packed = RowLayout::packed(bytes.as_mut_ptr(), self.extent);
            copy_rows(&packed, from, self.extent);
        }
        Self { source: CopySource::Staged(bytes.into()), ..self }
    }

    /// Copies or fills the bytes.
    pub(in crate::cuda) fn run(&self) {
        if self.is_empty() {
            return;
        }
        let _guard = REMAP_LOCK.read().unwrap_or_else(PoisonError::into_inner);
        match &self.source {
            CopySource::Rows(from) => copy_rows(&self.to, from, self.extent),
            CopySource::Staged(bytes) => {
                let from = RowLayout::packed(bytes.as_ptr(), self.extent);
                copy_rows(&self.to, &from, self.extent);
            }
            CopySource::Value(value, element) => fill_rows(&self.to, self.extent, *value, *element),
        }
    }
}

fn copy_rows(to: &RowLayout, from: &RowLayout, extent: CopyExtent) {
    let CopyExtent { width, height, depth } = extent;
    if to.is_contiguous(extent) && from.is_contiguous(extent) {
        // SAFETY: `validate` found both ranges to be mapped, or they are pageable memory that the program guarantees;
        // `copy` allows overlap.
        unsafe { std::ptr::copy(from.row(0, 0), to.row(0, 0), width * height * depth) };
        return;
    }
    for z in 0..depth {
        for y in 0..height {
            // SAFETY: the row lies in a range that `validate` found to be mapped, or in pageable memory that the program
            // guarantees; `copy` allows overlap.
            unsafe { std::ptr::copy(from.row(y, z), to.row(y, z), width) };
        }
    }
}

fn fill_rows(to: &RowLayout, extent: CopyExtent, value: u32, element: usize) {
    let (width, height) = if to.is_contiguous(extent) {
        (extent.width * extent.height, 1)
    } else {
        (extent.width, extent.height)
    };
    let bytes = value.to_ne_bytes();
    let same = bytes[..element].iter().all(|&byte| byte == bytes[0]);
    for y in 0..height {
        let row = to.row(y, 0);
        if value == 0 && width >= MIN_MADVISE_BYTES && device_arena::clear(row as usize, width) {
            continue;
        }
        if same {
            // SAFETY: `validate` found the range to be mapped device memory.
            unsafe { std::ptr::write_bytes(row, bytes[0], width) };
        } else if element == 2 {
            // SAFETY: `validate` found the range to be mapped device memory, and `fill` checked the alignment.
            unsafe { std::slice::from_raw_parts_mut(row.cast::<u16>(), width / 2) }.fill(value as u16);
        } else {
            // SAFETY: `validate` found the range to be mapped device memory, and `fill` checked the alignment.
            unsafe { std::slice::from_raw_parts_mut(row.cast::<u32>(), width / 4) }.fill(value);
        }
    }
}
