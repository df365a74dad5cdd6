//! A buddy allocator for small allocations, which share blocks of 2 MiB.
//!
//! Its metadata is outside the managed memory: host pages stay uncommitted until the program writes to them.

/// The smallest piece, and the alignment of every allocation.
pub(super) const MIN_PIECE_BYTES: usize = 512;

/// Number of times a block can be halved: from 2 MiB to 512 bytes.
const ORDERS: usize = 12;

/// The block that small allocations share, and the granularity of larger ones.
pub(super) const BLOCK_BYTES: usize = MIN_PIECE_BYTES << ORDERS;

/// Larger allocations get separate blocks. So does one of exactly 1 MiB, of which only two would share a block.
pub(super) const MAX_SMALL_BYTES: usize = BLOCK_BYTES / 2 - MIN_PIECE_BYTES;

const PIECES_PER_BLOCK: usize = 1 << ORDERS;
const NO_BLOCK: u32 = u32::MAX;

/// A block that small allocations share. Its pieces form a binary tree: node 1 is the block, 2 and 3 are its halves.
struct BuddyBlock {
    /// The index of the block in the address space.
    block: u32,
    /// Bitmap of tree nodes that are entirely free.
    free: [u64; 2 * PIECES_PER_BLOCK / 64],
    /// The record of the allocation that starts at each piece, plus one.
    records: [u32; PIECES_PER_BLOCK],
    /// The order of the allocation that starts at each piece.
    orders: [u8; PIECES_PER_BLOCK],
    /// Links of the list of blocks with a free node, for each order.
    next: [u32; ORDERS],
    before: [u32; ORDERS],
    /// Number of free nodes of each order.
    count: [u16; ORDERS],
}

/// All shared blocks of a card.
pub(super) struct BuddyAllocator {
    shared: Vec<Box<BuddyBlock>>,
    unused: Vec<u32>,
    /// The first block with a free node of each order.
    heads: [u32; ORDERS],
    /// Bitmap of the orders with a free node in any block.
    available: u32,
}

/// Returns the order of a node that holds `bytes`.
fn order_of(bytes: usize) -> usize {
    bytes.div_ceil(MIN_PIECE_BYTES).next_power_of_two().trailing_zeros() as usize
}

impl BuddyBlock {
    fn new() -> Box<Self> {
        Box::new(Self {
            block: 0,
            free: [0; 2 * PIECES_PER_BLOCK / 64],
            records: [0; PIECES_PER_BLOCK],
            orders: [0; PIECES_PER_BLOCK],
            next: [NO_BLOCK; ORDERS],
            before: [NO_BLOCK; ORDERS],
            count: [0; ORDERS],
        })
    }

    fn is_free(&self, node: usize) -> bool {
        self.free[node / 64] >> (node % 64) & 1 == 1
    }

    /// Returns a free node of this order.
    fn first(&self, order: usize) -> Option<usize> {
        let begin = PIECES_PER_BLOCK >> order;
        if begin < 64 {
            // Nodes of this order are bits `begin..2 * begin` of the first word.
            let bits = self.free[0] >> begin & ((1 << begin) - 1);
            return (bits != 0).then(|| begin + bits.trailing_zeros() as usize);
        }
        let words = begin / 64..2 * begin / 64;
        let word = words.clone().find(|&word| self.free[word] != 0)?;
        Some(word * 64 + self.free[word].trailing_zeros() as usize)
    }
}

impl BuddyAllocator {
    pub(super) fn new() -> Self {
        Self { shared: Vec::new(), unused: Vec::new(), heads: [NO_BLOCK; ORDERS], available: 0 }
    }

    fn set_free(&mut self, index: u32, node: usize, order: usize) {
        let head = self.heads[order];
        let shared = &mut self.shared[index as usize];
        shared.free[node / 64] |= 1 << (node % 64);
        shared.count[order] += 1;
        if shared.count[order] == 1 {
            shared.next[order] = head;
            shared.before[order] = NO_BLOCK;
            if head != NO_BLOCK {
                self.shared[head as usize].before[order] = index;
            }
            self.heads[order] = index;
            self.available |= 1 << order;
        }
    }

    fn set_used(&mut self, index: u32, node: usize, order: usize) {
        let shared = &mut self.shared[index as usize];
        shared.free[node / 64] &= !(1 << (node % 64));
        shared.count[order] -= 1;
        if shared.count[order] > 0 {
            return;
        }
        let (next, before) = (shared.next[order], shared.before[order]);
        if next != NO_BLOCK {
            self.shared[next as usize].before[order] = before;
        }
        if before != NO_BLOCK {
            self.shared[before as usize].next[order] = next;
        } else {
            self.heads[order] = next;
            if next == NO_BLOCK {
                self.available &= !(1 << order);
            }
        }
    }

    /// Allocates `bytes` in a new block; returns the index of the block here and the offset in it.
    pub(super) fn add(&mut self, block: u32, bytes: usize, record: u32) -> (u32, usize) {
        let index = self.unused.pop().unwrap_or_else(|| {
            self.shared.push(BuddyBlock::new());
            (self.shared.len() - 1) as u32
        });
        self.shared[index as usize].block = block;
        (index, self.cut(index, 1, ORDERS, order_of(bytes), record))
    }

    /// Halves a node until it has the wanted order; returns the offset of the piece.
    #[inline]
    fn cut(&mut self, index: u32, mut node: usize, mut order: usize, wanted: usize, record: u32) -> usize {
        while order > wanted {
            order -= 1;
            node *= 2;
            self.set_free(index, node + 1, order);
        }
        let piece = (node << order) - PIECES_PER_BLOCK;
        let shared = &mut self.shared[index as usize];
        shared.records[piece] = record + 1;
        shared.orders[piece] = order as u8;
        piece * MIN_PIECE_BYTES
    }

    /// Allocates `bytes` in an existing block; returns the block's index in the address space and the offset in it.
    pub(super) fn allocate(&mut self, bytes: usize, record: u32) -> Option<(u32, usize)> {
        let wanted = order_of(bytes);
        let candidates = self.available >> wanted;
        if candidates == 0 {
            return None;
        }
        let order = wanted + candidates.trailing_zeros() as usize;
        let index = self.heads[order];
        let node = self.shared[index as usize].first(order)?;
        self.set_used(index, node, order);
        let offset = self.cut(index, node, order, wanted, record);
        Some((self.shared[index as usize].block, offset))
    }

    /// Frees a piece; returns the block's index in the address space if the block is empty now.
    pub(super) fn free(&mut self, index: u32, offset: usize) -> Option<u32> {
        let piece = offset / MIN_PIECE_BYTES;
        let shared = &mut self.shared[index as usize];
        shared.records[piece] = 0;
        let mut order = usize::from(shared.orders[piece]);
        let mut node = (PIECES_PER_BLOCK + piece) >> order;
        while order < ORDERS - 1 && self.shared[index as usize].is_free(node ^ 1) {
            self.set_used(index, node ^ 1, order);
            node /= 2;
            order += 1;
        }
        if order == ORDERS - 1 && self.shared[index as usize].is_free(node ^ 1) {
            self.set_used(index, node ^ 1, order);
            self.unused.push(index);
            return Some(self.shared[index as usize].block);
        }
        self.set_free(index, node, order);
        None
    }

    /// Returns the record of the allocation that contains the offset.
    pub(super) fn find(&self, index: u32, offset: usize) -> Option<u32> {
        let shared = self.shared.get(index as usize)?;
        let piece = offset / MIN_PIECE_BYTES;
        (0..ORDERS).find_map(|order| {
            let begin = piece >> order << order;
            let record = shared.records[begin];
            (record != 0 && usize::from(shared.orders[begin]) >= order).then(|| record - 1)
        })
    }
}
