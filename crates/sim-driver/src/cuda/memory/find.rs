//! From an address to what lies there.

use super::super::context::Context;
use super::super::device::Device;
use super::*;

/// How memory came to be.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(in crate::cuda) enum Kind {
    /// By `cuMemAlloc` and its like.
    Plain,
    /// A variable of a module.
    Global,
    /// The bytes of an array, which have no address for programs.
    Array,
    /// What a pool has taken of the card; programs see the pieces.
    Chunk,
    /// Of a graph's node, which accounts for it.
    Graph,
    /// From a pool, in stream order.
    Pool,
    /// Of a handle, mapped to an address that was reserved before.
    Mapped,
    /// Of another process that gave its handle away.
    Opened,
    /// Of somebody who is no CUDA program.
    External,
    /// Managed: on the host and the card.
    Managed,
    /// Of the host, made by the driver.
    HostAllocated,
    /// Of the host, made by the program and known to the driver.
    HostRegistered,
}

impl Kind {
    /// Whether it is the host's.
    pub(in crate::cuda) fn is_host(self) -> bool {
        matches!(self, Kind::HostAllocated | Kind::HostRegistered)
    }
}

/// What lies at an address.
#[derive(Clone, Copy)]
pub(in crate::cuda) struct Found {
    pub(in crate::cuda) kind: Kind,
    pub(in crate::cuda) start: u64,
    pub(in crate::cuda) bytes: usize,
    /// The card it is on.
    pub(in crate::cuda) device: Option<&'static Device>,
    /// The context it was made in.
    pub(in crate::cuda) context: Option<&'static Context>,
    /// A number that no other memory of this process has.
    pub(in crate::cuda) id: u64,
    /// As its maker gave them.
    pub(in crate::cuda) flags: u32,
    /// The pool or the handle it is of.
    pub(in crate::cuda) owner: usize,
    /// Whether the program wants what is done to it to be over when a call returns.
    pub(in crate::cuda) sync_memops: bool,
}

impl Found {
    /// The first address behind it.
    pub(in crate::cuda) fn end(&self) -> u64 {
        self.start + self.bytes as u64
    }
}

/// What lies at an address that is in use.
pub(in crate::cuda) fn find(pointer: u64) -> Option<Found> {
    match arena::find(pointer) {
        Some(found) if found.kind == Kind::Array => None,
        Some(found) if found.kind != Kind::Chunk => Some(found),
        _ => ranges::find(pointer),
    }
}

/// Whether an address can only be a card's, in use or not.
pub(in crate::cuda) fn is_device_address(pointer: u64) -> bool {
    arena::is_inside(pointer)
}

/// Whether all of these bytes are memory that the driver knows. If they are to be written, notes that.
#[inline]
pub(in crate::cuda) fn covers(pointer: u64, bytes: usize, write: bool) -> Result<(), CudaError> {
    let inside = match arena::covers(pointer, bytes, write) {
        Some((Kind::Array, _)) => false,
        Some((Kind::Chunk, _)) | None => covers_range(pointer, bytes, write),
        Some((_, inside)) => inside,
    };
    if inside { Ok(()) } else { Err(CudaError::INVALID_VALUE) }
}

fn covers_range(pointer: u64, bytes: usize, write: bool) -> bool {
    let Some(end) = pointer.checked_add(bytes as u64) else { return false };
    let mut at = pointer;
    while let Some(found) = ranges::find(at) {
        let wanted = if write { CU_MEM_ACCESS_FLAGS_PROT_READWRITE } else { CU_MEM_ACCESS_FLAGS_PROT_READ };
        if found.kind == Kind::Mapped && found.flags & wanted != wanted {
            return false;
        }
        if found.end() >= end {
            return true;
        }
        // Handles that are mapped one after the other are one piece for programs.
        if found.kind != Kind::Mapped {
            return false;
        }
        at = found.end();
    }
    false
}

/// Changes whether calls wait for what is done to the memory there.
pub(super) fn set_sync_memops(pointer: u64, on: bool) -> bool {
    match find(pointer) {
        Some(found) if ranges::find(pointer).is_none() => {
            arena::update(found.start, |tag, _| tag.sync_memops = on)
        }
        Some(_) => ranges::update(pointer, |found| found.sync_memops = on),
        None => false,
    }
}
