//! Small allocations share blocks of 2 MiB: a block counts once, from the first to the last one in it.
//!
//! Which block an allocation got is told by its address. Where a block that is there surely has room, the allocation leans
//! on it: the block counts until the driver has answered, whatever becomes of it. Elsewhere a whole block is reserved first,
//! and given back if the driver did not open one.

use super::allocations::Table;
use super::{BLOCK, locked};
use partage_driver_api::cuda::CUdeviceptr;
use partage_region::MAX_GPUS;
use std::collections::BTreeMap;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering::Relaxed};
use std::sync::{Mutex, MutexGuard};

/// More than this has blocks of its own.
pub(super) const MOST: u64 = BLOCK / 2 - PIECE;

/// Allocations begin at multiples of this.
const PIECE: u64 = 512;

/// A block that is in use.
struct Block {
    gpu: usize,
    /// Offsets and sizes of what is in it.
    pieces: BTreeMap<u32, u32>,
    /// Pieces that are being freed: the driver may or may not have done it.
    going: u32,
    /// An allocation counts on its room: it counts as in use.
    leaned_on: bool,
}

/// How many pieces of a block are looked at where memory is not short.
const GLANCE: usize = 32;

/// The blocks that small allocations share.
#[derive(Default)]
pub(super) struct Small {
    blocks: Mutex<Table<Block>>,
    /// One at a time on a GPU: who finds room in a block gets it.
    allocating: [Mutex<()>; MAX_GPUS],
    /// Where the latest one went: the next one probably fits there, too.
    latest: [AtomicU64; MAX_GPUS],
    /// The driver did otherwise once: it is only relied on where memory is short.
    doubted: [AtomicBool; MAX_GPUS],
}

/// A piece that is being freed.
pub(super) struct Piece {
    pub(super) gpu: usize,
    block: u64,
    offset: u32,
    bytes: u32,
}

/// What the driver takes for a piece: halves of halves of a block.
fn rounded(bytes: u64) -> u64 {
    bytes.max(1).div_ceil(PIECE).next_power_of_two() * PIECE
}

impl Block {
    /// Whether a piece of this size fits, and surely so; only the first gaps and the end are looked at.
    fn has_room(&self, bytes: u64, gaps: usize) -> bool {
        let after = |offset: u32, size: u32| u64::from(offset) + rounded(u64::from(size));
        let end = self.pieces.last_key_value().map_or(0, |(&offset, &size)| after(offset, size));
        if end.next_multiple_of(bytes) + bytes <= BLOCK {
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
        self.pieces.is_empty() && self.going == 0 && !self.leaned_on
    }
}

impl Small {
    /// The right to allocate on a GPU; none for one that cannot be.
    pub(super) fn begin(&self, gpu: usize) -> Option<MutexGuard<'_, ()>> {
        self.allocating.get(gpu).map(locked)
    }

    /// A block in which the driver surely finds room; it counts until the end of that. For who has the right to allocate.
    pub(super) fn lean(&self, gpu: usize, bytes: u64, short: bool) -> Option<u64> {
        if !short && self.doubted.get(gpu)?.load(Relaxed) {
            return None;
        }
        let bytes = rounded(bytes);
        let mut blocks = locked(&self.blocks);
        let fits = |block: &Block, gaps| block.gpu == gpu && block.going == 0 && block.has_room(bytes, gaps);
        let latest = self.latest.get(gpu)?;
        let hint = latest.load(Relaxed);
        let found = if blocks.get(&hint).is_some_and(|block| fits(block, GLANCE)) {
            hint
        } else if short {
            *blocks.iter().find(|(_, block)| fits(block, usize::MAX))?.0
        } else {
            return None;
        };
        blocks.get_mut(&found)?.leaned_on = true;
        Some(found)
    }

    /// The driver did not find the room.
    pub(super) fn doubt(&self, gpu: usize) {
        if let Some(doubted) = self.doubted.get(gpu) {
            doubted.store(true, Relaxed);
        }
    }

    /// The end of that; whether the block is free now.
    pub(super) fn straighten(&self, block: u64) -> bool {
        let mut blocks = locked(&self.blocks);
        let Some(own) = blocks.get_mut(&block) else { return false };
        own.leaned_on = false;
        let free = own.is_free();
        if free {
            blocks.remove(&block);
        }
        free
    }

    /// Notes a new piece; whether its block is new, too.
    pub(super) fn insert(&self, gpu: usize, pointer: CUdeviceptr, bytes: u64) -> bool {
        let (block, offset) = (pointer / BLOCK, (pointer % BLOCK) as u32);
        let mut blocks = locked(&self.blocks);
        let new = !blocks.contains_key(&block);
        if let Some(latest) = self.latest.get(gpu) {
            latest.store(block, Relaxed);
        }
        let none = || Block { gpu, pieces: BTreeMap::new(), going: 0, leaned_on: false };
        let block = blocks.entry(block).or_insert_with(none);
        // Small is less than a block.
        block.pieces.insert(offset, bytes as u32);
        new
    }

    /// A piece is about to be freed.
    pub(super) fn begin_to_free(&self, pointer: CUdeviceptr) -> Option<Piece> {
        self.begin_to_free_if(pointer, || true)
    }

    /// The same if it is gone; nobody notes another one there while that is asked.
    pub(super) fn begin_to_free_if(
        &self,
        pointer: CUdeviceptr,
        gone: impl FnOnce() -> bool,
    ) -> Option<Piece> {
        let (block, offset) = (pointer / BLOCK, (pointer % BLOCK) as u32);
        let mut blocks = locked(&self.blocks);
        let own = blocks.get_mut(&block)?;
        if !own.pieces.contains_key(&offset) || !gone() {
            return None;
        }
        let bytes = own.pieces.remove(&offset)?;
        own.going += 1;
        Some(Piece { gpu: own.gpu, block, offset, bytes })
    }

    /// It is freed; whether its block is, too.
    pub(super) fn freed(&self, piece: &Piece) -> bool {
        let mut blocks = locked(&self.blocks);
        let Some(block) = blocks.get_mut(&piece.block) else { return false };
        block.going = block.going.saturating_sub(1);
        let empty = block.is_free();
        if empty {
            blocks.remove(&piece.block);
        }
        empty
    }

    /// It could not be freed.
    pub(super) fn kept(&self, piece: &Piece) {
        let mut blocks = locked(&self.blocks);
        if let Some(block) = blocks.get_mut(&piece.block) {
            block.going = block.going.saturating_sub(1);
            block.pieces.insert(piece.offset, piece.bytes);
        }
    }

    /// All pieces on a GPU.
    pub(super) fn on(&self, gpu: usize) -> Vec<CUdeviceptr> {
        let blocks = locked(&self.blocks);
        let own = blocks.iter().filter(|(_, block)| block.gpu == gpu);
        let pieces = own.flat_map(|(&at, block)| {
            block.pieces.keys().map(move |&offset| at.wrapping_mul(BLOCK).wrapping_add(u64::from(offset)))
        });
        pieces.collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    const GPU: usize = 3;
    const BASE: u64 = 7 * BLOCK;

    /// What the driver does: halves of halves, the first that is free as a whole.
    fn place(taken: &BTreeMap<u64, u64>, bytes: u64) -> Option<u64> {
        let size = rounded(bytes);
        (0..BLOCK / size).map(|index| index * size).find(|&start| {
            taken.iter().all(|(&at, &other)| at + rounded(other) <= start || start + size <= at)
        })
    }

    proptest! {
        #[test]
        fn room_is_seen_where_it_is(steps in prop::collection::vec((any::<bool>(), 1..MOST, 0..64usize), 1..80)) {
            let small = Small::default();
            let mut taken = BTreeMap::new();
            let mut bytes_of_block = 0;
            for (free, bytes, which) in steps {
                if free && !taken.is_empty() {
                    let at = *taken.keys().nth(which % taken.len()).unwrap_or(&0);
                    taken.remove(&at);
                    let piece = small.begin_to_free(BASE + at);
                    prop_assert!(piece.is_some() && small.begin_to_free(BASE + at).is_none());
                    if let Some(piece) = piece {
                        prop_assert_eq!(piece.gpu, GPU);
                        // What is being freed is not room yet.
                        prop_assert_eq!(small.lean(GPU, 1, true), None);
                        if which % 3 == 0 {
                            small.kept(&piece);
                            taken.insert(at, u64::from(piece.bytes));
                        } else if small.freed(&piece) {
                            bytes_of_block -= BLOCK;
                        }
                    }
                } else {
                    let place = place(&taken, bytes);
                    if !taken.is_empty() {
                        // At a glance room may be overlooked, but none is seen where there is none.
                        let glance = small.lean(GPU, bytes, false);
                        prop_assert!(glance.is_none() || place.is_some());
                        prop_assert_eq!(small.lean(GPU, bytes, true).is_some(), place.is_some());
                        prop_assert_eq!(small.lean(GPU + 1, bytes, true), None);
                        prop_assert!(!small.straighten(BASE / BLOCK));
                    }
                    if let Some(at) = place {
                        if small.insert(GPU, BASE + at, bytes) {
                            bytes_of_block += BLOCK;
                        }
                        taken.insert(at, bytes);
                    }
                }
                // A block counts as long as anything is in it.
                prop_assert_eq!(bytes_of_block, if taken.is_empty() { 0 } else { BLOCK });
                prop_assert_eq!(small.on(GPU).len(), taken.len());
            }
        }
    }

    #[test]
    fn a_block_that_is_leaned_on_counts_when_its_last_piece_goes() {
        let small = Small::default();
        small.insert(GPU, BASE, 1000);
        let leaned = small.lean(GPU, 4096, false);
        assert_eq!(leaned, Some(BASE / BLOCK));
        let piece = small.begin_to_free(BASE).unwrap();
        assert!(!small.freed(&piece));
        // The driver has opened another one: this one's room pays for it.
        assert!(small.insert(GPU, BASE + BLOCK, 4096));
        assert!(small.straighten(BASE / BLOCK));
        assert!(!small.straighten(BASE / BLOCK));
        // Into the same one again, and nothing has changed.
        assert_eq!(small.lean(GPU, 4096, false), Some(BASE / BLOCK + 1));
        assert!(!small.insert(GPU, BASE + BLOCK + 4096, 4096));
        assert!(!small.straighten(BASE / BLOCK + 1));
        small.doubt(GPU);
        assert_eq!(small.lean(GPU, 4096, false), None);
        assert_eq!(small.lean(GPU, 4096, true), Some(BASE / BLOCK + 1));
    }
}
