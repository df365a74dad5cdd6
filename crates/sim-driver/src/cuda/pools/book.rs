//! What a pool has: chunks of the card, and which pieces of them are free, or will be.

use super::super::CudaError;
use std::collections::{BTreeMap, BTreeSet};

/// Pieces begin at multiples of this.
const PIECE: usize = 512;

/// What a pool takes of the card at a time, where there is as much.
const STEP: usize = 32 << 20;

/// What it takes where there is not.
const SMALL_STEP: usize = 2 << 20;

/// Who orders pieces that were given back and may still be in use: a stream.
pub(super) type Order = (i32, usize);

/// A piece that was given back in a stream's order, which the stream has not come to.
struct Pending {
    order: Order,
    ticket: u64,
    start: u64,
    bytes: usize,
}

/// The books of a pool.
#[derive(Default)]
pub(super) struct Book {
    /// Start and size, and where it lies in the pool's file.
    chunks: BTreeMap<u64, (usize, u64)>,
    free: BTreeMap<u64, usize>,
    by_size: BTreeSet<(usize, u64)>,
    pending: Vec<Pending>,
    next_ticket: u64,
    used: u64,
    used_high: u64,
    reserved: u64,
    reserved_high: u64,
    /// Where the next chunk lies in the pool's file.
    file_end: u64,
}

/// What a piece of `bytes` takes.
pub(super) fn rounded(bytes: usize) -> Result<usize, CudaError> {
    bytes.checked_next_multiple_of(PIECE).ok_or(CudaError::OUT_OF_MEMORY)
}

impl Book {
    /// A piece for a stream out of what is there: what the stream itself gave back, or what is free.
    pub(super) fn take(&mut self, bytes: usize, order: Order) -> Option<u64> {
        let own = self
            .pending
            .iter_mut()
            .filter(|piece| piece.order == order && piece.bytes >= bytes)
            .min_by_key(|piece| piece.bytes);
        let start = if let Some(piece) = own {
            let start = piece.start;
            piece.start += bytes as u64;
            piece.bytes -= bytes;
            self.pending.retain(|piece| piece.bytes > 0);
            start
        } else {
            let &(size, start) = self.by_size.range((bytes, 0)..).next()?;
            self.remove_free(start, size);
            if size > bytes {
                self.insert_free(start + bytes as u64, size - bytes);
            }
            start
        };
        self.used += bytes as u64;
        self.used_high = self.used_high.max(self.used);
        Some(start)
    }

    fn insert_free(&mut self, start: u64, bytes: usize) {
        self.free.insert(start, bytes);
        self.by_size.insert((bytes, start));
    }

    fn remove_free(&mut self, start: u64, bytes: usize) {
        self.free.remove(&start);
        self.by_size.remove(&(bytes, start));
    }

    /// Sizes to try for a chunk that `bytes` fit into, the usual one first.
    pub(super) fn steps(bytes: usize) -> [Option<usize>; 2] {
        [bytes.checked_next_multiple_of(STEP), bytes.checked_next_multiple_of(SMALL_STEP)]
    }

    /// A chunk that was taken of the card; returns where it lies in the pool's file.
    pub(super) fn add(&mut self, start: u64, bytes: usize) -> u64 {
        let at = self.file_end;
        self.file_end += bytes as u64;
        self.chunks.insert(start, (bytes, at));
        self.insert_free(start, bytes);
        self.reserved += bytes as u64;
        self.reserved_high = self.reserved_high.max(self.reserved);
        at
    }

    /// A piece is given back in a stream's order; the ticket settles it when the stream has come to it.
    pub(super) fn give_later(&mut self, start: u64, bytes: usize, order: Order) -> u64 {
        self.used -= bytes as u64;
        self.next_ticket += 1;
        self.pending.push(Pending { order, ticket: self.next_ticket, start, bytes });
        self.next_ticket
    }

    /// The stream has come to it.
    pub(super) fn settle(&mut self, ticket: u64) {
        let (ready, rest) =
            std::mem::take(&mut self.pending).into_iter().partition(|piece| piece.ticket == ticket);
        self.pending = rest;
        let ready: Vec<Pending> = ready;
        for piece in ready {
            self.join(piece.start, piece.bytes);
        }
    }

    /// A piece is given back that nothing uses.
    pub(super) fn give(&mut self, start: u64, bytes: usize) {
        self.used -= bytes as u64;
        self.join(start, bytes);
    }

    /// A free piece and its free neighbours in the same chunk become one.
    fn join(&mut self, mut start: u64, mut bytes: usize) {
        let Some((&chunk, &(size, _))) = self.chunks.range(..=start).next_back() else { return };
        if let Some((&before, &length)) = self.free.range(chunk..start).next_back()
            && before + length as u64 == start
        {
            self.remove_free(before, length);
            start = before;
            bytes += length;
        }
        let end = start + bytes as u64;
        if end < chunk + size as u64
            && let Some(&length) = self.free.get(&end)
        {
            self.remove_free(end, length);
            bytes += length;
        }
        self.insert_free(start, bytes);
    }

    /// Takes out chunks in which nothing is used, until no more than `keep` bytes are left, or none is.
    pub(super) fn trim(&mut self, keep: u64) -> Vec<u64> {
        let mut gone = Vec::new();
        let unused: Vec<(u64, usize)> = self
            .chunks
            .iter()
            .filter(|&(start, &(bytes, _))| self.free.get(start) == Some(&bytes))
            .map(|(&start, &(bytes, _))| (start, bytes))
            .collect();
        // The youngest addresses first.
        for (start, bytes) in unused.into_iter().rev() {
            if self.reserved <= keep {
                break;
            }
            self.remove_free(start, bytes);
            self.chunks.remove(&start);
            self.reserved -= bytes as u64;
            gone.push(start);
        }
        gone
    }

    /// Whether there is anything that streams have yet to come to.
    pub(super) fn is_waiting(&self) -> bool {
        !self.pending.is_empty()
    }

    /// Where an address lies in the pool's file.
    pub(super) fn file_offset(&self, pointer: u64) -> Option<u64> {
        let (&start, &(_, at)) = self.chunks.range(..=pointer).next_back()?;
        Some(at + (pointer - start))
    }

    pub(super) fn used(&self) -> (u64, u64) {
        (self.used, self.used_high)
    }

    pub(super) fn reserved(&self) -> (u64, u64) {
        (self.reserved, self.reserved_high)
    }

    pub(super) fn reset_used_high(&mut self) {
        self.used_high = self.used;
    }

    pub(super) fn reset_reserved_high(&mut self) {
        self.reserved_high = self.reserved;
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    #[derive(Clone, Debug)]
    enum Step {
        Take(usize, usize),
        Give(prop::sample::Index),
        GiveLater(prop::sample::Index, usize),
        Settle(prop::sample::Index),
        Trim(u64),
    }

    fn step() -> impl Strategy<Value = Step> {
        prop_oneof![
            4 => (1..64usize << 20, 0..3usize).prop_map(|(bytes, order)| Step::Take(bytes, order)),
            2 => (1..4096usize, 0..3usize).prop_map(|(bytes, order)| Step::Take(bytes, order)),
            2 => any::<prop::sample::Index>().prop_map(Step::Give),
            2 => (any::<prop::sample::Index>(), 0..3usize).prop_map(|(which, order)| Step::GiveLater(which, order)),
            2 => any::<prop::sample::Index>().prop_map(Step::Settle),
            1 => (0..1u64 << 28).prop_map(Step::Trim),
        ]
    }

    proptest! {
        #[test]
        fn pieces_never_overlap_and_all_comes_back(steps in prop::collection::vec(step(), 1..200)) {
            let mut book = Book::default();
            let mut live: BTreeMap<u64, usize> = BTreeMap::new();
            let mut tickets = Vec::new();
            let mut next = 1u64 << 30;
            for step in steps {
                match step {
                    Step::Take(bytes, order) => {
                        let bytes = rounded(bytes).unwrap();
                        let start = book.take(bytes, (0, order)).unwrap_or_else(|| {
                            let size = Book::steps(bytes)[0].unwrap();
                            book.add(next, size);
                            // Chunks may lie side by side.
                            next += size as u64;
                            book.take(bytes, (0, order)).unwrap()
                        });
                        let before = live.range(..=start).next_back();
                        prop_assert!(before.is_none_or(|(&at, &long)| at + long as u64 <= start));
                        let after = live.range(start..).next();
                        prop_assert!(after.is_none_or(|(&at, _)| start + bytes as u64 <= at));
                        live.insert(start, bytes);
                    }
                    Step::Give(which) if !live.is_empty() => {
                        let (&start, &bytes) = live.iter().nth(which.index(live.len())).unwrap();
                        live.remove(&start);
                        book.give(start, bytes);
                    }
                    Step::GiveLater(which, order) if !live.is_empty() => {
                        let (&start, &bytes) = live.iter().nth(which.index(live.len())).unwrap();
                        live.remove(&start);
                        tickets.push(book.give_later(start, bytes, (0, order)));
                    }
                    Step::Settle(which) if !tickets.is_empty() => {
                        let ticket = tickets.swap_remove(which.index(tickets.len()));
                        book.settle(ticket);
                    }
                    Step::Trim(keep) => {
                        book.trim(keep);
                    }
                    _ => {}
                }
                let used: usize = live.values().sum();
                prop_assert_eq!(book.used().0, used as u64);
                prop_assert!(book.reserved().0 >= used as u64);
                let pending: usize = book.pending.iter().map(|piece| piece.bytes).sum();
                let free: usize = book.free.values().sum();
                prop_assert_eq!(book.reserved().0, (used + pending + free) as u64);
            }
            for (start, bytes) in live {
                book.give(start, bytes);
            }
            for ticket in tickets {
                book.settle(ticket);
            }
            book.trim(0);
            prop_assert_eq!((book.reserved().0, book.used().0, book.is_waiting()), (0, 0, false));
        }
    }
}
