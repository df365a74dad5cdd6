//! Lookup of the memory at an address.

use super::super::context::Context;
use super::super::device::Device;
use super::*;

/// The origin of a memory range.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(in crate::cuda) enum MemoryKind {
    /// Allocated by `cuMemAlloc` and its variants.
    Plain,
    /// A global variable of a module.
    Global,
    /// Storage of an array, which has no address for programs.
    Array,
    /// A chunk of a memory pool; programs see pieces of it.
    Chunk,
    /// Allocated by a graph node, which accounts for it.
    Graph,
    /// Allocated from a memory pool in stream order.
    Pool,
    /// Physical memory mapped at a reserved address.
    Mapped,
    /// Memory of another process, opened by an IPC handle.
    Opened,
    /// Imported external memory, or a pool allocation of another process.
    External,
    /// Managed memory, on the host and on cards.
    Managed,
    /// Pinned host memory allocated by the driver.
    HostAllocated,
    /// Host memory of the program that is registered with the driver.
    HostRegistered,
}

impl MemoryKind {
    /// Returns whether it is host memory.
    pub(in crate::cuda) fn is_host(self) -> bool {
        matches!(self, MemoryKind::HostAllocated | MemoryKind::HostRegistered)
    }
}

/// The memory at an address.
#[derive(Clone, Copy)]
pub(in crate::cuda) struct MemoryRange {
    pub(in crate::cuda) kind: MemoryKind,
    pub(in crate::cuda) start: u64,
    pub(in crate::cuda) bytes: usize,
    /// The device it is on or was created for.
    pub(in crate::cuda) device: Option<&'static Device>,
    /// The context in which it was created.
    pub(in crate::cuda) context: Option<&'static Context>,
    /// Identifies the range; unique in this process.
    pub(in crate::cuda) id: u64,
    /// The flags passed when it was created; for mappings, the access flags.
    pub(in crate::cuda) flags: u32,
    /// The handle of its memory pool or physical memory.
    pub(in crate::cuda) owner: usize,
    /// Whether the program requires operations on it to be synchronous (`SYNC_MEMOPS`).
    pub(in crate::cuda) sync_memops: bool,
}

impl MemoryRange {
    /// Returns the first address after the range.
    pub(in crate::cuda) fn end(&self) -> u64 {
        self.start + self.bytes as u64
    }
}

/// Returns the memory range that contains an address.
pub(in crate::cuda) fn find(pointer: u64) -> Option<MemoryRange> {
    match device_arena::find(pointer) {
        Some(found) if found.kind == MemoryKind::Array => None,
        Some(found) if found.kind != MemoryKind::Chunk => Some(found),
        _ => ranges::find(pointer),
    }
}

/// Returns whether an address belongs to a card, allocated or not.
pub(in crate::cuda) fn is_device_address(pointer: u64) -> bool {
    device_arena::is_inside(pointer)
}

/// Checks that the driver knows all of these bytes; with `write`, marks them as written.
#[inline]
pub(in crate::cuda) fn covers(pointer: u64, bytes: usize, write: bool) -> Result<(), CudaError> {
    let inside = match device_arena::covers(pointer, bytes, write) {
        Some((MemoryKind::Array, _)) => false,
        Some((MemoryKind::Chunk, _)) | None => covers_range(pointer, bytes, write),
        Some((_, inside)) => inside,
    };
    if inside { Ok(()) } else { Err(CudaError::INVALID_VALUE) }
}

fn covers_range(pointer: u64, bytes: usize, write: bool) -> bool {
    let Some(end) = pointer.checked_add(bytes as u64) else { return false };
    let mut at = pointer;
    while let Some(found) = ranges::find(at) {
        let wanted = if write { CU_MEM_ACCESS_FLAGS_PROT_READWRITE } else { CU_MEM_ACCESS_FLAGS_PROT_READ };
        if found.kind == MemoryKind::Mapped && found.flags & wanted != wanted {
            return false;
        }
        if found.end() >= end {
            return true;
        }
        // Adjacent mappings form one range for programs.
        if found.kind != MemoryKind::Mapped {
            return false;
        }
        at = found.end();
    }
    false
}

/// Sets whether operations on the memory at an address are synchronous.
pub(super) fn set_sync_memops(pointer: u64, on: bool) -> bool {
    match find(pointer) {
        Some(found) if ranges::find(pointer).is_none() => {
            device_arena::update(found.start, |tag, _| tag.sync_memops = on)
        }
        Some(_) => ranges::update(pointer, |found| found.sync_memops = on),
        None => false,
    }
}
