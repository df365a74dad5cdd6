//! Small allocations share blocks of 2 MiB: a block counts once, from the first to the last one in it.
//!
//! Which block an allocation got is told by its address. So a whole block is reserved first, and given back if the driver
//! did not open one.

use super::allocations::Table;
use super::{BLOCK, locked};
use partage_driver_api::cuda::CUdeviceptr;
use partage_region::MAX_GPUS;
use std::collections::BTreeMap;
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
}

/// The blocks that small allocations share.
#[derive(Default)]
pub(super) struct Small {
    blocks: Mutex<Table<Block>>,
    /// One at a time on a GPU: who finds room in a block gets it.
    allocating: [Mutex<()>; MAX_GPUS],
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
    /// Whether a piece of this size fits, and surely so.
    fn has_room(&self, bytes: u64) -> bool {
        let mut at = 0;
        for (&offset, &size) in &self.pieces {
            if at + bytes <= u64::from(offset) {
                return true;
            }
            let end = u64::from(offset) + rounded(u64::from(size));
            at = at.max(end.next_multiple_of(bytes));
        }
        at + bytes <= BLOCK
    }
}

impl Small {
    /// The right to allocate on a GPU; none for one that cannot be.
    pub(super) fn begin(&self, gpu: usize) -> Option<MutexGuard<'_, ()>> {
        self.allocating.get(gpu).map(locked)
    }

    /// Whether the driver surely finds room in a block that is there.
    pub(super) fn has_room(&self, gpu: usize, bytes: u64) -> bool {
        let bytes = rounded(bytes);
        let blocks = locked(&self.blocks);
        blocks.values().any(|block| block.gpu == gpu && block.going == 0 && block.has_room(bytes))
    }

    /// Notes a new piece; whether its block is new, too.
    pub(super) fn insert(&self, gpu: usize, pointer: CUdeviceptr, bytes: u64) -> bool {
        let (block, offset) = (pointer / BLOCK, (pointer % BLOCK) as u32);
        let mut blocks = locked(&self.blocks);
        let new = !blocks.contains_key(&block);
        let block = blocks.entry(block).or_insert_with(|| Block { gpu, pieces: BTreeMap::new(), going: 0 });
        // Small is less than a block.
        block.pieces.insert(offset, bytes as u32);
        new
    }

    /// A piece is about to be freed.
    pub(super) fn begin_to_free(&self, pointer: CUdeviceptr) -> Option<Piece> {
        let (block, offset) = (pointer / BLOCK, (pointer % BLOCK) as u32);
        let mut blocks = locked(&self.blocks);
        let own = blocks.get_mut(&block)?;
        let bytes = own.pieces.remove(&offset)?;
        own.going += 1;
        Some(Piece { gpu: own.gpu, block, offset, bytes })
    }

    /// It is freed; whether its block is, too.
    pub(super) fn freed(&self, piece: &Piece) -> bool {
        let mut blocks = locked(&self.blocks);
        let Some(block) = blocks.get_mut(&piece.block) else { return false };
        block.going = block.going.saturating_sub(1);
        let empty = block.pieces.is_empty() && block.going == 0;
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
                        prop_assert!(!small.has_room(GPU, 1));
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
                        prop_assert_eq!(small.has_room(GPU, bytes), place.is_some());
                        prop_assert!(!small.has_room(GPU + 1, bytes));
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
}
