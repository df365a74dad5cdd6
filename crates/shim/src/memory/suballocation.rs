//! Small allocations share blocks of 2 MiB: a block is counted once, from the first to the last allocation in it.
//!
//! The address of an allocation determines its block. If an existing block certainly has room, the allocation leases
//! it: the block counts as used until the driver has answered, even if its allocations are freed. Otherwise a whole
//! block is reserved first, and released if the driver did not open one.

use super::allocations::HandleMap;
use super::{BLOCK_BYTES, lock};
use partage_driver_api::cuda::CUdeviceptr;
use partage_region::MAX_GPUS;
use std::collections::BTreeMap;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering::Relaxed};
use std::sync::{Mutex, MutexGuard};

/// Largest allocation in bytes that shares a block.
pub(super) const MAX_SUBALLOCATION: u64 = BLOCK_BYTES / 2 - PIECE_ALIGNMENT;

/// Alignment of small allocations in bytes.
const PIECE_ALIGNMENT: u64 = 512;

/// A block that is in use.
struct SharedBlock {
    gpu: usize,
    /// Offsets and sizes of the allocations in it.
    pieces: BTreeMap<u32, u32>,
    /// Number of pieces that are being freed: the driver may or may not have done it.
    freeing: u32,
    /// Whether an allocation in progress relies on its room: then it counts as in use.
    leased: bool,
}

/// Number of pieces of a block that are examined while memory is not short.
const MAX_GAPS_EXAMINED: usize = 32;

/// The blocks that small allocations share.
#[derive(Default)]
pub(super) struct Suballocations {
    blocks: Mutex<HandleMap<SharedBlock>>,
    /// Ensures one allocation at a time per GPU, so that the one that finds room in a block gets it.
    allocating: [Mutex<()>; MAX_GPUS],
    /// Block of the latest allocation: the next one probably fits there, too.
    latest: [AtomicU64; MAX_GPUS],
    /// Whether the driver once placed an allocation elsewhere: then leases are used only while memory is short.
    distrusted: [AtomicBool; MAX_GPUS],
}

/// A piece that is being freed.
pub(super) struct FreeingPiece {
    pub(super) gpu: usize,
    block: u64,
    offset: u32,
    bytes: u32,
}

/// Returns what the driver takes for a piece: a power of two of the alignment.
fn piece_size(bytes: u64) -> u64 {
    bytes.max(1).div_ceil(PIECE_ALIGNMENT).next_power_of_two() * PIECE_ALIGNMENT
}

impl SharedBlock {
    /// Returns whether a piece of this size certainly fits; only the first gaps and the end are examined.
    fn has_room(&self, bytes: u64, gaps: usize) -> bool {
        let after = |offset: u32, size: u32| u64::from(offset) + piece_size(u64::from(size));
        let end = self.pieces.last_key_value().map_or(0, |(&offset, &size)| after(offset, size));
        if end.next_multiple_of(bytes) + bytes <= BLOCK_BYTES {
            return true;
        }
        let mut at = 0;
        self.pieces.iter().take(gaps).any(|(&offset, &size)| {
            let fits = at + bytes <= u64::from(offset);
            at = at.max(after(offset, size).next_multiple_of(bytes));
            fits
        })
    }

    fn is_free(&self) -> bool {
        self.pieces.is_empty() && self.freeing == 0 && !self.leased
    }
}

impl Suballocations {
    /// Acquires the right to allocate on a GPU; `None` if there is no such GPU.
    pub(super) fn begin(&self, gpu: usize) -> Option<MutexGuard<'_, ()>> {
        self.allocating.get(gpu).map(lock)
    }

    /// Leases a block in which the driver certainly finds room; it counts as used until the lease ends. The caller must
    /// have the right to allocate.
    pub(super) fn lease_block(&self, gpu: usize, bytes: u64, short: bool) -> Option<u64> {
        if !short && self.distrusted.get(gpu)?.load(Relaxed) {
            return None;
        }
        let bytes = piece_size(bytes);
        let mut blocks = lock(&self.blocks);
        let fits =
            |block: &SharedBlock, gaps| block.gpu == gpu && block.freeing == 0 && block.has_room(bytes, gaps);
        let latest = self.latest.get(gpu)?;
        let hint = latest.load(Relaxed);
        let found = if blocks.get(&hint).is_some_and(|block| fits(block, MAX_GAPS_EXAMINED)) {
            hint
        } else if short {
            *blocks.iter().find(|(_, block)| fits(block, usize::MAX))?.0
        } else {
            return None;
        };
        blocks.get_mut(&found)?.leased = true;
        Some(found)
    }

    /// Records that the driver did not find the room.
    pub(super) fn distrust(&self, gpu: usize) {
        if let Some(distrusted) = self.distrusted.get(gpu) {
            distrusted.store(true, Relaxed);
        }
    }

    /// Ends a lease. Returns whether the block is free now.
    pub(super) fn end_lease(&self, block: u64) -> bool {
        let mut blocks = lock(&self.blocks);
        let Some(own) = blocks.get_mut(&block) else { return false };
        own.leased = false;
        let free = own.is_free();
        if free {
            blocks.remove(&block);
        }
        free
    }

    /// Records a new piece. Returns whether its block is new, too.
    pub(super) fn insert(&self, gpu: usize, pointer: CUdeviceptr, bytes: u64) -> bool {
        let (block, offset) = (pointer / BLOCK_BYTES, (pointer % BLOCK_BYTES) as u32);
        let mut blocks = lock(&self.blocks);
        let new = !blocks.contains_key(&block);
        if let Some(latest) = self.latest.get(gpu) {
            latest.store(block, Relaxed);
        }
        let none = || SharedBlock { gpu, pieces: BTreeMap::new(), freeing: 0, leased: false };
        let block = blocks.entry(block).or_insert_with(none);
        // A small allocation is smaller than a block, so it fits.
        block.pieces.insert(offset, bytes as u32);
        new
    }

    /// Begins to free a piece.
    pub(super) fn begin_free(&self, pointer: CUdeviceptr) -> Option<FreeingPiece> {
        self.begin_free_if(pointer, || true)
    }

    /// Begins to free a piece if it is gone. The table is locked meanwhile, so no other thread records a piece there.
    pub(super) fn begin_free_if(
        &self,
        pointer: CUdeviceptr,
        gone: impl FnOnce() -> bool,
    ) -> Option<FreeingPiece> {
        let (block, offset) = (pointer / BLOCK_BYTES, (pointer % BLOCK_BYTES) as u32);
        let mut blocks = lock(&self.blocks);
        let own = blocks.get_mut(&block)?;
        if !own.pieces.contains_key(&offset) || !gone() {
            return None;
        }
        let bytes = own.pieces.remove(&offset)?;
        own.freeing += 1;
        Some(FreeingPiece { gpu: own.gpu, block, offset, bytes })
    }

    /// Finishes freeing a piece. Returns whether its block is free, too.
    pub(super) fn finish_free(&self, piece: &FreeingPiece) -> bool {
        let mut blocks = lock(&self.blocks);
        let Some(block) = blocks.get_mut(&piece.block) else { return false };
        block.freeing = block.freeing.saturating_sub(1);
        let empty = block.is_free();
        if empty {
            blocks.remove(&piece.block);
        }
        empty
    }

    /// Restores a piece that could not be freed.
    pub(super) fn restore(&self, piece: &FreeingPiece) {
        let mut blocks = lock(&self.blocks);
        if let Some(block) = blocks.get_mut(&piece.block) {
            block.freeing = block.freeing.saturating_sub(1);
            block.pieces.insert(piece.offset, piece.bytes);
        }
    }

    /// Returns all pieces on a GPU.
    pub(super) fn on_gpu(&self, gpu: usize) -> Vec<CUdeviceptr> {
        let blocks = lock(&self.blocks);
        let own = blocks.iter().filter(|(_, block)| block.gpu == gpu);
        let pieces = own.flat_map(|(&at, block)| {
            block
                .pieces
                .keys()
                .map(move |&offset| at.wrapping_mul(BLOCK_BYTES).wrapping_add(u64::from(offset)))
        });
        pieces.collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    const GPU: usize = 3;
    const BASE: u64 = 7 * BLOCK_BYTES;

    /// Places an allocation as the driver does: in the first aligned range of a power of two that is free as a whole.
    fn driver_place(taken: &BTreeMap<u64, u64>, bytes: u64) -> Option<u64> {
        let size = piece_size(bytes);
        (0..BLOCK_BYTES / size).map(|index| index * size).find(|&start| {
            taken.iter().all(|(&at, &other)| at + piece_size(other) <= start || start + size <= at)
        })
    }

    proptest! {
        #[test]
        fn room_is_found_exactly_where_it_is(steps in prop::collection::vec((any::<bool>(), 1..MAX_SUBALLOCATION, 0..64usize), 1..80)) {
            let suballocations = Suballocations::default();
            let mut taken = BTreeMap::new();
            let mut bytes_of_block = 0;
            for (free, bytes, which) in steps {
                if free && !taken.is_empty() {
                    let at = *taken.keys().nth(which % taken.len()).unwrap_or(&0);
                    taken.remove(&at);
                    let piece = suballocations.begin_free(BASE + at);
                    prop_assert!(piece.is_some() && suballocations.begin_free(BASE + at).is_none());
                    if let Some(piece) = piece {
                        prop_assert_eq!(piece.gpu, GPU);
                        // A piece that is being freed is not room yet.
                        prop_assert_eq!(suballocations.lease_block(GPU, 1, true), None);
                        if which % 3 == 0 {
                            suballocations.restore(&piece);
                            taken.insert(at, u64::from(piece.bytes));
                        } else if suballocations.finish_free(&piece) {
                            bytes_of_block -= BLOCK_BYTES;
                        }
                    }
                } else {
                    let place = driver_place(&taken, bytes);
                    if !taken.is_empty() {
                        // With few gaps examined, room may be missed, but none is found where there is none.
                        let glance = suballocations.lease_block(GPU, bytes, false);
                        prop_assert!(glance.is_none() || place.is_some());
                        prop_assert_eq!(suballocations.lease_block(GPU, bytes, true).is_some(), place.is_some());
                        prop_assert_eq!(suballocations.lease_block(GPU + 1, bytes, true), None);
                        prop_assert!(!suballocations.end_lease(BASE / BLOCK_BYTES));
                    }
                    if let Some(at) = place {
                        if suballocations.insert(GPU, BASE + at, bytes) {
                            bytes_of_block += BLOCK_BYTES;
                        }
                        taken.insert(at, bytes);
                    }
                }
                // A block is counted as long as anything is in it.
                prop_assert_eq!(bytes_of_block, if taken.is_empty() { 0 } else { BLOCK_BYTES });
                prop_assert_eq!(suballocations.on_gpu(GPU).len(), taken.len());
            }
        }
    }

    #[test]
    fn leased_block_counts_after_its_last_piece_is_freed() {
        let suballocations = Suballocations::default();
        suballocations.insert(GPU, BASE, 1000);
        let leaned = suballocations.lease_block(GPU, 4096, false);
        assert_eq!(leaned, Some(BASE / BLOCK_BYTES));
        let piece = suballocations.begin_free(BASE).unwrap();
        assert!(!suballocations.finish_free(&piece));
        // The driver has opened another block: this one's reservation pays for it.
        assert!(suballocations.insert(GPU, BASE + BLOCK_BYTES, 4096));
        assert!(suballocations.end_lease(BASE / BLOCK_BYTES));
        assert!(!suballocations.end_lease(BASE / BLOCK_BYTES));
        // The next allocation goes into the same block, and nothing changes.
        assert_eq!(suballocations.lease_block(GPU, 4096, false), Some(BASE / BLOCK_BYTES + 1));
        assert!(!suballocations.insert(GPU, BASE + BLOCK_BYTES + 4096, 4096));
        assert!(!suballocations.end_lease(BASE / BLOCK_BYTES + 1));
        suballocations.distrust(GPU);
        assert_eq!(suballocations.lease_block(GPU, 4096, false), None);
        assert_eq!(suballocations.lease_block(GPU, 4096, true), Some(BASE / BLOCK_BYTES + 1));
    }
}
