//! The addresses of one card in this process, and what lies at them.
//!
//! There are far more addresses than the card has memory, so that only the card's memory is ever short. Small
//! allocations share blocks of 2 MiB, larger ones are rounded up to whole blocks: free memory moves in steps of 2 MiB,
//! as it does with the real driver.

use super::super::CudaError;
use super::runs::Runs;
use super::small::{BLOCK, MOST, Small};
use std::collections::BTreeMap;

/// Who says whether the card has room.
pub(super) trait Card {
    fn take(&self, bytes: u64) -> Result<(), CudaError>;
    fn give(&self, bytes: u64);
}

/// For addresses that no card has memory behind.
pub(super) struct Nobody;

impl Card for Nobody {
    fn take(&self, _bytes: u64) -> Result<(), CudaError> {
        Ok(())
    }

    fn give(&self, _bytes: u64) {}
}

/// An allocation.
#[derive(Clone, Copy, Debug)]
pub(super) struct Record<T> {
    /// Counts allocations.
    pub(super) number: u64,
    pub(super) start: u64,
    /// As asked for.
    pub(super) bytes: usize,
    /// Whether bytes of it were written: its pages are the system's again when it is freed.
    pub(super) touched: bool,
    pub(super) tag: T,
}

/// The addresses of one card.
pub(super) struct Space<T> {
    base: u64,
    runs: Runs,
    small: Small,
    /// By block: zero, or the number of the shared block plus one.
    shared: Vec<u32>,
    /// Large allocations by their first block.
    large: BTreeMap<u32, u32>,
    records: Vec<Option<Record<T>>>,
    unused: Vec<u32>,
    allocations: u64,
}

/// Blocks that a large allocation takes.
fn blocks(bytes: usize) -> u32 {
    bytes.div_ceil(BLOCK) as u32
}

impl<T: Copy> Space<T> {
    /// So many blocks from `base` on, which is a multiple of their size.
    pub(super) fn new(base: u64, blocks: u32) -> Self {
        Self {
            base,
            runs: Runs::new(blocks),
            small: Small::new(),
            shared: vec![0; blocks as usize],
            large: BTreeMap::new(),
            records: Vec::new(),
            unused: Vec::new(),
            allocations: 0,
        }
    }

    /// Takes memory of the card.
    pub(super) fn allocate(&mut self, card: &impl Card, bytes: usize, tag: T) -> Result<u64, CudaError> {
        if bytes == 0 {
            return Err(CudaError::INVALID_VALUE);
        }
        let index = match self.unused.last() {
            Some(&index) => index,
            None => self.records.len() as u32,
        };
        let start = if bytes <= MOST {
            self.allocate_small(card, bytes, index)?
        } else {
            self.allocate_large(card, bytes, index)?
        };
        self.allocations += 1;
        let record = Some(Record { number: self.allocations, start, bytes, touched: false, tag });
        match self.unused.pop() {
            Some(index) => self.records[index as usize] = record,
            None => self.records.push(record),
        }
        Ok(start)
    }

    /// Takes addresses only, in blocks of their own: whether there is memory behind them is somebody else's account.
    pub(super) fn reserve(&mut self, bytes: usize, tag: T) -> Result<u64, CudaError> {
        if bytes == 0 {
            return Err(CudaError::INVALID_VALUE);
        }
        let index = self.unused.pop().unwrap_or_else(|| {
            self.records.push(None);
            (self.records.len() - 1) as u32
        });
        match self.allocate_large(&Nobody, bytes, index) {
            Ok(start) => {
                self.allocations += 1;
                let number = self.allocations;
                self.records[index as usize] = Some(Record { number, start, bytes, touched: false, tag });
                Ok(start)
            }
            Err(error) => {
                self.unused.push(index);
                Err(error)
            }
        }
    }

    fn allocate_small(&mut self, card: &impl Card, bytes: usize, record: u32) -> Result<u64, CudaError> {
        let (block, offset) = match self.small.take(bytes, record) {
            Some(place) => place,
            None => {
                let block = self.take_blocks(card, 1)?;
                let (index, offset) = self.small.add(block, bytes, record);
                self.shared[block as usize] = index + 1;
                (block, offset)
            }
        };
        Ok(self.base + u64::from(block) * BLOCK as u64 + offset as u64)
    }

    fn allocate_large(&mut self, card: &impl Card, bytes: usize, record: u32) -> Result<u64, CudaError> {
        if bytes.div_ceil(BLOCK) > self.shared.len() {
            return Err(CudaError::OUT_OF_MEMORY);
        }
        let block = self.take_blocks(card, blocks(bytes))?;
        self.large.insert(block, record);
        Ok(self.base + u64::from(block) * BLOCK as u64)
    }

    fn take_blocks(&mut self, card: &impl Card, blocks: u32) -> Result<u32, CudaError> {
        let bytes = u64::from(blocks) * BLOCK as u64;
        card.take(bytes)?;
        self.runs.take(blocks).ok_or_else(|| {
            card.give(bytes);
            CudaError::OUT_OF_MEMORY
        })
    }

    fn give_blocks(&mut self, card: &impl Card, block: u32, blocks: u32) {
        self.runs.give(block, blocks);
        card.give(u64::from(blocks) * BLOCK as u64);
    }

    fn place(&self, pointer: u64) -> Option<(u32, usize)> {
        let offset = pointer.checked_sub(self.base)? as usize;
        let block = offset / BLOCK;
        (block < self.shared.len()).then_some((block as u32, offset % BLOCK))
    }

    fn index(&self, pointer: u64) -> Option<u32> {
        let (block, offset) = self.place(pointer)?;
        let index = match self.shared[block as usize] {
            0 => *self.large.range(..=block).next_back()?.1,
            shared => self.small.find(shared - 1, offset)?,
        };
        let record = self.records[index as usize].as_ref()?;
        (pointer - record.start < record.bytes as u64).then_some(index)
    }

    /// The allocation that an address is in.
    pub(super) fn find(&self, pointer: u64) -> Option<&Record<T>> {
        self.records[self.index(pointer)? as usize].as_ref()
    }

    /// The same, to change it.
    pub(super) fn find_mut(&mut self, pointer: u64) -> Option<&mut Record<T>> {
        let index = self.index(pointer)?;
        self.records[index as usize].as_mut()
    }

    /// Gives back the allocation that begins at `start`, if it is one that `accept` takes. `scrub` sees it before its
    /// addresses can be anybody else's.
    pub(super) fn free(
        &mut self,
        card: &impl Card,
        start: u64,
        accept: impl FnOnce(&Record<T>) -> bool,
        scrub: impl FnOnce(&Record<T>),
    ) -> Result<(), CudaError> {
        let bad = CudaError::INVALID_VALUE;
        let (block, offset) = self.place(start).ok_or(bad)?;
        let shared = self.shared[block as usize];
        let index = match shared {
            0 => *self.large.get(&block).ok_or(bad)?,
            shared => self.small.find(shared - 1, offset).ok_or(bad)?,
        };
        let slot = &mut self.records[index as usize];
        let record = slot.as_ref().filter(|record| record.start == start && accept(record)).ok_or(bad)?;
        scrub(record);
        let bytes = record.bytes;
        *slot = None;
        self.unused.push(index);
        if shared == 0 {
            self.large.remove(&block);
            self.give_blocks(card, block, blocks(bytes));
        } else if self.small.give(shared - 1, offset).is_some() {
            self.shared[block as usize] = 0;
            self.give_blocks(card, block, 1);
        }
        Ok(())
    }

    /// All allocations.
    pub(super) fn records(&self) -> impl Iterator<Item = &Record<T>> {
        self.records.iter().flatten()
    }
}

#[cfg(test)]
mod tests {
    use super::super::small::PIECE;
    use super::*;
    use proptest::prelude::*;
    use std::cell::Cell;
    use std::collections::{BTreeMap, BTreeSet};

    struct Fake {
        used: Cell<u64>,
        capacity: u64,
    }

    impl Card for Fake {
        fn take(&self, bytes: u64) -> Result<(), CudaError> {
            if self.used.get() + bytes > self.capacity {
                return Err(CudaError::OUT_OF_MEMORY);
            }
            self.used.set(self.used.get() + bytes);
            Ok(())
        }

        fn give(&self, bytes: u64) {
            self.used.set(self.used.get() - bytes);
        }
    }

    const BASE: u64 = 64 * BLOCK as u64;

    fn space() -> (Space<()>, Fake) {
        (Space::new(BASE, 1024), Fake { used: Cell::new(0), capacity: 64 * BLOCK as u64 })
    }

    /// What live allocations take: each block that a small one lies in, and the large ones rounded up.
    fn expected(live: &BTreeMap<u64, usize>) -> u64 {
        let shared: BTreeSet<u64> =
            live.iter().filter(|&(_, &bytes)| bytes <= MOST).map(|(start, _)| start / BLOCK as u64).collect();
        let large: usize =
            live.values().filter(|&&bytes| bytes > MOST).map(|bytes| bytes.next_multiple_of(BLOCK)).sum();
        (shared.len() * BLOCK + large) as u64
    }

    fn sizes() -> impl Strategy<Value = usize> {
        prop_oneof![
            1..=4096usize,
            1..=MOST,
            MOST - 2..=MOST + 2,
            MOST..=16 * BLOCK,
            Just(0),
            Just(usize::MAX)
        ]
    }

    proptest! {
        #[test]
        fn books_are_right_and_nothing_overlaps(
            steps in prop::collection::vec((sizes(), any::<prop::sample::Index>(), any::<bool>()), 1..300),
        ) {
            let (mut space, card) = space();
            let mut live = BTreeMap::new();
            for (bytes, which, free) in steps {
                if free && !live.is_empty() {
                    let (&start, &bytes) = live.iter().nth(which.index(live.len())).unwrap();
                    prop_assert!(space.free(&card, start + 1, |_| true, |_| ()).is_err());
                    prop_assert!(space.free(&card, start, |_| false, |_| ()).is_err());
                    space.free(&card, start, |_| true, |_| ()).unwrap();
                    prop_assert!(space.free(&card, start, |_| true, |_| ()).is_err());
                    prop_assert!(space.find(start).is_none() && space.find(start + bytes as u64 - 1).is_none());
                    live.remove(&start);
                } else {
                    match space.allocate(&card, bytes, ()) {
                        Ok(start) => {
                            prop_assert_eq!(start as usize % PIECE, 0);
                            prop_assert!(bytes > 0 && (bytes <= MOST || start.is_multiple_of(BLOCK as u64)));
                            let before = live.range(..start).next_back();
                            prop_assert!(before.is_none_or(|(&at, &long)| at + long as u64 <= start));
                            let after = live.range(start..).next();
                            prop_assert!(after.is_none_or(|(&at, _)| start + bytes as u64 <= at));
                            for inside in [0, bytes / 2, bytes - 1] {
                                let found = space.find(start + inside as u64).unwrap();
                                prop_assert_eq!((found.start, found.bytes), (start, bytes));
                            }
                            live.insert(start, bytes);
                        }
                        Err(CudaError::INVALID_VALUE) => prop_assert_eq!(bytes, 0),
                        Err(_) => {
                            let more = if bytes <= MOST { BLOCK } else { bytes.saturating_add(BLOCK - 1) / BLOCK * BLOCK };
                            prop_assert!(card.used.get().saturating_add(more as u64) > card.capacity);
                        }
                    }
                }
                prop_assert_eq!(card.used.get(), expected(&live));
                prop_assert_eq!(space.records().count(), live.len());
            }
            for start in live.into_keys() {
                space.free(&card, start, |_| true, |_| ()).unwrap();
            }
            prop_assert_eq!(card.used.get(), 0);
        }
    }

    #[test]
    fn a_full_card_is_full_to_the_last_block() {
        let (mut space, card) = space();
        let all: Vec<u64> = (0..128).map(|_| space.allocate(&card, MOST, ()).unwrap()).collect();
        assert_eq!(space.allocate(&card, 1, ()), Err(CudaError::OUT_OF_MEMORY));
        space.free(&card, all[77], |_| true, |_| ()).unwrap();
        // Half a block is free, and small ones fit into it.
        let small: Vec<u64> = (0..2048).map(|_| space.allocate(&card, 1, ()).unwrap()).collect();
        assert_eq!(space.allocate(&card, 1, ()), Err(CudaError::OUT_OF_MEMORY));
        assert_eq!(small.into_iter().collect::<BTreeSet<_>>().len(), 2048);
    }
}
