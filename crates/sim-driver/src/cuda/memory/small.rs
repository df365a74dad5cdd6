//! Small allocations share blocks of 2 MiB, each halved and halved again as far as needed.
//!
//! Nothing of this is written into the memory itself: the host's pages stay untouched until a program's bytes come.

/// The smallest piece, and what every allocation is aligned to.
pub(super) const PIECE: usize = 512;

/// Halvings of a block: 2 MiB to 512 bytes.
const ORDERS: usize = 12;

/// The block that small allocations share, and what larger ones are rounded up to.
pub(super) const BLOCK: usize = PIECE << ORDERS;

/// More than this has blocks of its own; so has a whole mebibyte, of which only two would share one.
pub(super) const MOST: usize = BLOCK / 2 - PIECE;

const PIECES: usize = 1 << ORDERS;
const NONE: u32 = u32::MAX;

/// A block that small allocations share. Its pieces are a tree: 1 is the whole, 2 and 3 its halves, and so on.
struct Shared {
    /// Its number in the address space.
    block: u32,
    /// Nodes of the tree that are free as a whole.
    free: [u64; 2 * PIECES / 64],
    /// The record of the allocation that begins at a piece, plus one.
    records: [u32; PIECES],
    /// The order of the allocation that begins at a piece.
    orders: [u8; PIECES],
    /// Neighbours in the list of blocks with a free node of each order.
    next: [u32; ORDERS],
    before: [u32; ORDERS],
    /// How many free nodes of each order there are.
    count: [u16; ORDERS],
}

/// All shared blocks of a card.
pub(super) struct Small {
    shared: Vec<Box<Shared>>,
    unused: Vec<u32>,
    /// The first block with a free node of each order.
    heads: [u32; ORDERS],
    /// A bit for every order that has one.
    available: u32,
}

/// The order that `bytes` need.
fn order_of(bytes: usize) -> usize {
    bytes.div_ceil(PIECE).next_power_of_two().trailing_zeros() as usize
}

impl Shared {
    fn new() -> Box<Self> {
        Box::new(Self {
            block: 0,
            free: [0; 2 * PIECES / 64],
            records: [0; PIECES],
            orders: [0; PIECES],
            next: [NONE; ORDERS],
            before: [NONE; ORDERS],
            count: [0; ORDERS],
        })
    }

    fn is_free(&self, node: usize) -> bool {
        self.free[node / 64] >> (node % 64) & 1 == 1
    }

    /// A free node of the order.
    fn first(&self, order: usize) -> Option<usize> {
        let begin = PIECES >> order;
        if begin < 64 {
            // Nodes of this order are the bits from `begin` to twice that of the first word.
            let bits = self.free[0] >> begin & ((1 << begin) - 1);
            return (bits != 0).then(|| begin + bits.trailing_zeros() as usize);
        }
        let words = begin / 64..2 * begin / 64;
        let word = words.clone().find(|&word| self.free[word] != 0)?;
        Some(word * 64 + self.free[word].trailing_zeros() as usize)
    }
}

impl Small {
    pub(super) fn new() -> Self {
        Self { shared: Vec::new(), unused: Vec::new(), heads: [NONE; ORDERS], available: 0 }
    }

    fn set_free(&mut self, index: u32, node: usize, order: usize) {
        let head = self.heads[order];
        let shared = &mut self.shared[index as usize];
        shared.free[node / 64] |= 1 << (node % 64);
        shared.count[order] += 1;
        if shared.count[order] == 1 {
            shared.next[order] = head;
            shared.before[order] = NONE;
            if head != NONE {
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
        if next != NONE {
            self.shared[next as usize].before[order] = before;
        }
        if before != NONE {
            self.shared[before as usize].next[order] = next;
        } else {
            self.heads[order] = next;
            if next == NONE {
                self.available &= !(1 << order);
            }
        }
    }

    /// Room for `bytes` in a new block; the index that the block is known by, and the offset in it.
    pub(super) fn add(&mut self, block: u32, bytes: usize, record: u32) -> (u32, usize) {
        let index = self.unused.pop().unwrap_or_else(|| {
            self.shared.push(Shared::new());
            (self.shared.len() - 1) as u32
        });
        self.shared[index as usize].block = block;
        (index, self.cut(index, 1, ORDERS, order_of(bytes), record))
    }

    /// Halves a node until it is of the wanted order; the offset of what is left of it.
    #[inline]
    fn cut(&mut self, index: u32, mut node: usize, mut order: usize, wanted: usize, record: u32) -> usize {
        while order > wanted {
            order -= 1;
            node *= 2;
            self.set_free(index, node + 1, order);
        }
        let piece = (node << order) - PIECES;
        let shared = &mut self.shared[index as usize];
        shared.records[piece] = record + 1;
        shared.orders[piece] = order as u8;
        piece * PIECE
    }

    /// Room for `bytes` in a block that is there: its number, and the offset in it.
    pub(super) fn take(&mut self, bytes: usize, record: u32) -> Option<(u32, usize)> {
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

    /// Gives room back; the block's number if nothing is left in it.
    pub(super) fn give(&mut self, index: u32, offset: usize) -> Option<u32> {
        let piece = offset / PIECE;
        let shared = &mut self.shared[index as usize];
        shared.records[piece] = 0;
        let mut order = usize::from(shared.orders[piece]);
        let mut node = (PIECES + piece) >> order;
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

    /// The record of the allocation that the offset is in.
    pub(super) fn find(&self, index: u32, offset: usize) -> Option<u32> {
        let shared = self.shared.get(index as usize)?;
        let piece = offset / PIECE;
        (0..ORDERS).find_map(|order| {
            let begin = piece >> order << order;
            let record = shared.records[begin];
            (record != 0 && usize::from(shared.orders[begin]) >= order).then(|| record - 1)
        })
    }
}
