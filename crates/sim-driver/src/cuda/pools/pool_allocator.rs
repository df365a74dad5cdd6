//! Allocator of a memory pool: its chunks, and the pieces that are free or will be.

use super::super::CudaError;
use std::collections::{BTreeMap, BTreeSet};

/// Alignment of pieces, in bytes.
const PIECE_ALIGNMENT: usize = 512;

/// Size of the chunks that a pool reserves.
const CHUNK_BYTES: usize = 32 << 20;

/// Chunk granularity when the card has too little memory for a full chunk.
const SMALL_CHUNK_BYTES: usize = 2 << 20;

/// Identifies a stream by device ordinal and timeline.
pub(super) type StreamKey = (i32, usize);

/// A piece freed in stream order that the stream has not reached.
struct PendingFree {
    stream_key: StreamKey,
    ticket: u64,
    start: u64,
    bytes: usize,
}

/// The chunks and pieces of a pool.
#[derive(Default)]
pub(super) struct PoolAllocator {
    /// Chunks by address: size, and offset in the pool's file.
    chunks: BTreeMap<u64, (usize, u64)>,
    free: BTreeMap<u64, usize>,
    by_size: BTreeSet<(usize, u64)>,
    pending: Vec<PendingFree>,
    next_ticket: u64,
    used: u64,
    used_high: u64,
    reserved: u64,
    reserved_high: u64,
    /// The file offset of the next chunk.
    file_end: u64,
}

/// Returns the size of a piece that holds `bytes`.
pub(super) fn round_up(bytes: usize) -> Result<usize, CudaError> {
    bytes.checked_next_multiple_of(PIECE_ALIGNMENT).ok_or(CudaError::OUT_OF_MEMORY)
}

impl PoolAllocator {
    /// Allocates a piece for a stream: from pieces that the same stream freed, or from free memory.
    pub(super) fn allocate(&mut self, bytes: usize, stream_key: StreamKey) -> Option<u64> {
        let own = self
            .pending
            .iter_mut()
            .filter(|piece| piece.stream_key == stream_key && piece.bytes >= bytes)
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

    /// Returns the chunk sizes to try for a piece of `bytes`, the regular one first.
    pub(super) fn chunk_sizes(bytes: usize) -> [Option<usize>; 2] {
        [bytes.checked_next_multiple_of(CHUNK_BYTES), bytes.checked_next_multiple_of(SMALL_CHUNK_BYTES)]
    }

    /// Rounds up to whole chunks of the smallest size.
    pub(super) fn round_up_to_chunk(bytes: u64) -> u64 {
        bytes.checked_next_multiple_of(SMALL_CHUNK_BYTES as u64).unwrap_or(u64::MAX)
    }

    /// Adds a reserved chunk; returns its offset in the pool's file.
    pub(super) fn add(&mut self, start: u64, bytes: usize) -> u64 {
        let at = self.file_end;
        self.file_end += bytes as u64;
        self.chunks.insert(start, (bytes, at));
        self.insert_free(start, bytes);
        self.reserved += bytes as u64;
        self.reserved_high = self.reserved_high.max(self.reserved);
        at
    }

    /// Frees a piece in stream order; returns a ticket for [`complete_free`](Self::complete_free).
    pub(super) fn free_when_reached(&mut self, start: u64, bytes: usize, stream_key: StreamKey) -> u64 {
        self.used -= bytes as u64;
        self.next_ticket += 1;
        self.pending.push(PendingFree { stream_key, ticket: self.next_ticket, start, bytes });
        self.next_ticket
    }

    /// Completes a free that the stream has reached.
    pub(super) fn complete_free(&mut self, ticket: u64) {
        let (ready, rest) =
            std::mem::take(&mut self.pending).into_iter().partition(|piece| piece.ticket == ticket);
        self.pending = rest;
        let ready: Vec<PendingFree> = ready;
        for piece in ready {
            self.merge_free(piece.start, piece.bytes);
        }
    }

    /// Frees a piece that nothing uses.
    pub(super) fn free(&mut self, start: u64, bytes: usize) {
        self.used -= bytes as u64;
        self.merge_free(start, bytes);
    }

    /// Adds a free piece, merged with its free neighbors in the same chunk.
    fn merge_free(&mut self, mut start: u64, mut bytes: usize) {
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

    /// Removes entirely free chunks until at most `keep` bytes remain reserved; returns their addresses.
    pub(super) fn trim(&mut self, keep: u64) -> Vec<u64> {
        let mut gone = Vec::new();
        let unused: Vec<(u64, usize)> = self
            .chunks
            .iter()
            .filter(|&(start, &(bytes, _))| self.free.get(start) == Some(&bytes))
            .map(|(&start, &(bytes, _))| (start, bytes))
            .collect();
        // Highest addresses first.
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

    /// Returns whether there are frees that streams have not reached.
    pub(super) fn has_pending_frees(&self) -> bool {
        !self.pending.is_empty()
    }

    /// Returns the offset of an address in the pool's file.
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

    /// One step of a random sequence.
    #[derive(Clone, Debug)]
    enum PoolStep {
        Take(usize, usize),
        Give(prop::sample::Index),
        GiveLater(prop::sample::Index, usize),
        Settle(prop::sample::Index),
        Trim(u64),
    }

    fn step() -> impl Strategy<Value = PoolStep> {
        prop_oneof![
            4 => (1..64usize << 20, 0..3usize).prop_map(|(bytes, stream_key)| PoolStep::Take(bytes, stream_key)),
            2 => (1..4096usize, 0..3usize).prop_map(|(bytes, stream_key)| PoolStep::Take(bytes, stream_key)),
            2 => any::<prop::sample::Index>().prop_map(PoolStep::Give),
            2 => (any::<prop::sample::Index>(), 0..3usize).prop_map(|(which, stream_key)| PoolStep::GiveLater(which, stream_key)),
            2 => any::<prop::sample::Index>().prop_map(PoolStep::Settle),
            1 => (0..1u64 << 28).prop_map(PoolStep::Trim),
        ]
    }

    proptest! {
        #[test]
        fn pieces_never_overlap_and_all_memory_is_returned(steps in prop::collection::vec(step(), 1..200)) {
            let mut allocator = PoolAllocator::default();
            let mut live: BTreeMap<u64, usize> = BTreeMap::new();
            let mut tickets = Vec::new();
            let mut next = 1u64 << 30;
            for step in steps {
                match step {
                    PoolStep::Take(bytes, stream_key) => {
                        let bytes = round_up(bytes).unwrap();
                        let start = allocator.allocate(bytes, (0, stream_key)).unwrap_or_else(|| {
                            let size = PoolAllocator::chunk_sizes(bytes)[0].unwrap();
                            allocator.add(next, size);
                            // Chunks may be adjacent.
                            next += size as u64;
                            allocator.allocate(bytes, (0, stream_key)).unwrap()
                        });
                        let before = live.range(..=start).next_back();
                        prop_assert!(before.is_none_or(|(&at, &long)| at + long as u64 <= start));
                        let after = live.range(start..).next();
                        prop_assert!(after.is_none_or(|(&at, _)| start + bytes as u64 <= at));
                        live.insert(start, bytes);
                    }
                    PoolStep::Give(which) if !live.is_empty() => {
                        let (&start, &bytes) = live.iter().nth(which.index(live.len())).unwrap();
                        live.remove(&start);
                        allocator.free(start, bytes);
                    }
                    PoolStep::GiveLater(which, stream_key) if !live.is_empty() => {
                        let (&start, &bytes) = live.iter().nth(which.index(live.len())).unwrap();
                        live.remove(&start);
                        tickets.push(allocator.free_when_reached(start, bytes, (0, stream_key)));
                    }
                    PoolStep::Settle(which) if !tickets.is_empty() => {
                        let ticket = tickets.swap_remove(which.index(tickets.len()));
                        allocator.complete_free(ticket);
                    }
                    PoolStep::Trim(keep) => {
                        allocator.trim(keep);
                    }
                    _ => {}
                }
                let used: usize = live.values().sum();
                prop_assert_eq!(allocator.used().0, used as u64);
                prop_assert!(allocator.reserved().0 >= used as u64);
                let pending: usize = allocator.pending.iter().map(|piece| piece.bytes).sum();
                let free: usize = allocator.free.values().sum();
                prop_assert_eq!(allocator.reserved().0, (used + pending + free) as u64);
            }
            for (start, bytes) in live {
                allocator.free(start, bytes);
            }
            for ticket in tickets {
                allocator.complete_free(ticket);
            }
            allocator.trim(0);
            prop_assert_eq!((allocator.reserved().0, allocator.used().0, allocator.has_pending_frees()), (0, 0, false));
        }
    }
}
