//! Memory ranges other than plain device allocations, by address: host, pool, mapped, opened and managed memory.

use super::lookup::{MemoryKind, MemoryRange};
use super::*;
use std::collections::BTreeMap;
use std::sync::{PoisonError, RwLock};

static RANGES: RwLock<BTreeMap<u64, MemoryRange>> = RwLock::new(BTreeMap::new());

/// Adds a range; returns false if it overlaps a known one.
pub(in crate::cuda) fn add(range: MemoryRange) -> bool {
    let mut ranges = RANGES.write().unwrap_or_else(PoisonError::into_inner);
    let end = range.start + range.bytes as u64;
    let overlaps = ranges
        .range(..end)
        .next_back()
        .is_some_and(|(_, other)| other.start + other.bytes as u64 > range.start);
    if !overlaps {
        ranges.insert(range.start, range);
    }
    !overlaps
}

/// Adds a range that the driver has just mapped. Stale ranges there, which the program registered and unmapped
/// without unregistering, are removed.
pub(in crate::cuda) fn insert(range: MemoryRange) {
    while !add(range) {
        let stale = list(|old| old.start < range.end() && range.start < old.end());
        for old in stale {
            remove(old.start, |_| true);
        }
    }
}

/// Removes the range that starts at `start` if `accept` returns true for it.
pub(in crate::cuda) fn remove(start: u64, accept: impl FnOnce(&MemoryRange) -> bool) -> Option<MemoryRange> {
    let removed = {
        let mut ranges = RANGES.write().unwrap_or_else(PoisonError::into_inner);
        ranges.get(&start).is_some_and(accept).then(|| ranges.remove(&start)).flatten()
    };
    // The caller may unmap the range now, or the program when the call returns.
    engine::wait_for_stores();
    removed
}

/// Returns the range that contains an address.
pub(in crate::cuda) fn find(pointer: u64) -> Option<MemoryRange> {
    let ranges = RANGES.read().unwrap_or_else(PoisonError::into_inner);
    let (_, found) = ranges.range(..=pointer).next_back()?;
    (pointer - found.start < found.bytes as u64).then_some(*found)
}

/// Changes the range that contains an address; returns false if there is none.
pub(in crate::cuda) fn update(pointer: u64, change: impl FnOnce(&mut MemoryRange)) -> bool {
    let mut ranges = RANGES.write().unwrap_or_else(PoisonError::into_inner);
    let Some((_, found)) = ranges.range_mut(..=pointer).next_back() else { return false };
    if pointer - found.start >= found.bytes as u64 {
        return false;
    }
    change(found);
    true
}

/// Returns the ranges for which `want` returns true, by address.
pub(in crate::cuda) fn list(want: impl Fn(&MemoryRange) -> bool) -> Vec<MemoryRange> {
    let ranges = RANGES.read().unwrap_or_else(PoisonError::into_inner);
    ranges.values().filter(|found| want(found)).copied().collect()
}

/// Unmaps the pages of a range.
pub(in crate::cuda) fn unmap(range: &MemoryRange) {
    debug_assert!(range.kind != MemoryKind::HostRegistered && range.kind != MemoryKind::Pool);
    // The range may start inside its first page.
    let first = range.start / 4096 * 4096;
    // SAFETY: the driver mapped these pages for the range, which was removed and is no longer found.
    unsafe { libc::munmap(first as *mut c_void, (range.end() - first) as usize) };
}

/// Maps fresh pages, or a part of a file given as descriptor and offset.
pub(in crate::cuda) fn map(bytes: usize, flags: i32, file: Option<(i32, i64)>) -> Option<u64> {
    let (descriptor, offset) = file.unwrap_or((-1, 0));
    // SAFETY: a new mapping that replaces no other.
    let address = unsafe {
        libc::mmap(std::ptr::null_mut(), bytes, libc::PROT_READ | libc::PROT_WRITE, flags, descriptor, offset)
    };
    (address != libc::MAP_FAILED).then_some(address as u64)
}
