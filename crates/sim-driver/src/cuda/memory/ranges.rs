//! Memory that is not simply a card's: of the host, of pools, mapped, opened, managed. By address.

use super::find::{Found, Kind};
use super::*;
use std::collections::BTreeMap;
use std::sync::{PoisonError, RwLock};

static RANGES: RwLock<BTreeMap<u64, Found>> = RwLock::new(BTreeMap::new());

/// Adds memory; false if some of it is known already.
pub(in crate::cuda) fn add(range: Found) -> bool {
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

/// Adds memory that the driver has just mapped. What a program registered there before and unmapped behind the
/// driver's back is forgotten.
pub(in crate::cuda) fn insert(range: Found) {
    while !add(range) {
        let stale = list(|old| old.start < range.end() && range.start < old.end());
        for old in stale {
            remove(old.start, |_| true);
        }
    }
}

/// Takes out what begins at `start`, if it is something that `accept` takes.
pub(in crate::cuda) fn remove(start: u64, accept: impl FnOnce(&Found) -> bool) -> Option<Found> {
    let mut ranges = RANGES.write().unwrap_or_else(PoisonError::into_inner);
    ranges.get(&start).is_some_and(accept).then(|| ranges.remove(&start)).flatten()
}

/// What an address lies in.
pub(in crate::cuda) fn find(pointer: u64) -> Option<Found> {
    let ranges = RANGES.read().unwrap_or_else(PoisonError::into_inner);
    let (_, found) = ranges.range(..=pointer).next_back()?;
    (pointer - found.start < found.bytes as u64).then_some(*found)
}

/// Changes what an address lies in; false if that is nothing.
pub(in crate::cuda) fn update(pointer: u64, change: impl FnOnce(&mut Found)) -> bool {
    let mut ranges = RANGES.write().unwrap_or_else(PoisonError::into_inner);
    let Some((_, found)) = ranges.range_mut(..=pointer).next_back() else { return false };
    if pointer - found.start >= found.bytes as u64 {
        return false;
    }
    change(found);
    true
}

/// Everything that `want` takes, in the order of addresses.
pub(in crate::cuda) fn list(want: impl Fn(&Found) -> bool) -> Vec<Found> {
    let ranges = RANGES.read().unwrap_or_else(PoisonError::into_inner);
    ranges.values().filter(|found| want(found)).copied().collect()
}

/// Ends a mapping that lies behind a range.
pub(in crate::cuda) fn unmap(range: &Found) {
    debug_assert!(range.kind != Kind::HostRegistered && range.kind != Kind::Pool);
    // It may begin inside its first page.
    let first = range.start / 4096 * 4096;
    // SAFETY: mapped by the driver for this range, which nobody finds any more.
    unsafe { libc::munmap(first as *mut c_void, (range.end() - first) as usize) };
}

/// Maps fresh pages of the host, or a part of a file.
pub(in crate::cuda) fn map(bytes: usize, flags: i32, file: Option<(i32, i64)>) -> Option<u64> {
    let (descriptor, offset) = file.unwrap_or((-1, 0));
    // SAFETY: a new mapping over no other.
    let address = unsafe {
        libc::mmap(std::ptr::null_mut(), bytes, libc::PROT_READ | libc::PROT_WRITE, flags, descriptor, offset)
    };
    (address != libc::MAP_FAILED).then_some(address as u64)
}
