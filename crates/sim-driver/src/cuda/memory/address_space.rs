//! The address space of one card in this process and the allocations in it.
//!
//! The address space is much larger than the card's memory, so that only the memory can run out. Small allocations
//! share blocks of 2 MiB, larger ones are rounded up to whole blocks: like in the real driver, free memory changes in
//! steps of 2 MiB.

use super::super::CudaError;
use super::buddy::{BLOCK_BYTES, BuddyAllocator, MAX_SMALL_BYTES};
use super::free_blocks::FreeBlocks;
use std::collections::BTreeMap;

/// Decides whether the card has enough free memory.
pub(super) trait MemoryAccount {
    fn charge(&self, bytes: u64) -> Result<(), CudaError>;
    fn refund(&self, bytes: u64);
}

/// For reserved addresses without memory: nothing is charged.
pub(super) struct NoAccount;

impl MemoryAccount for NoAccount {
    fn charge(&self, _bytes: u64) -> Result<(), CudaError> {
        Ok(())
    }

    fn refund(&self, _bytes: u64) {}
}

/// An allocation in the address space.
#[derive(Clone, Copy, Debug)]
pub(super) struct AllocationRecord<T> {
    /// Sequence number of the allocation.
    pub(super) number: u64,
    pub(super) start: u64,
    /// The requested size, before rounding.
    pub(super) bytes: usize,
    /// Whether the allocation may have been written: its pages are then discarded when it is freed.
    pub(super) touched: bool,
    pub(super) tag: T,
}

/// The address space of one card.
pub(super) struct AddressSpace<T> {
    base: u64,
    free_blocks: FreeBlocks,
    buddy: BuddyAllocator,
    /// For each block: zero, or the index of its buddy block plus one.
    shared: Vec<u32>,
    /// Large allocations by their first block.
    large: BTreeMap<u32, u32>,
    records: Vec<Option<AllocationRecord<T>>>,
    unused: Vec<u32>,
    allocations: u64,
}

/// Returns the number of blocks of a large allocation.
fn blocks(bytes: usize) -> u32 {
    bytes.div_ceil(BLOCK_BYTES) as u32
}

impl<T: Copy> AddressSpace<T> {
    /// Creates an address space of this many blocks from `base`, which must be a multiple of the block size.
    pub(super) fn new(base: u64, blocks: u32) -> Self {
        Self {
            base,
            free_blocks: FreeBlocks::new(blocks),
            buddy: BuddyAllocator::new(),
            shared: vec![0; blocks as usize],
            large: BTreeMap::new(),
            records: Vec::new(),
            unused: Vec::new(),
            allocations: 0,
        }
    }

    /// Allocates memory and charges it.
    pub(super) fn allocate(
        &mut self,
        account: &impl MemoryAccount,
        bytes: usize,
        tag: T,
    ) -> Result<u64, CudaError> {
        if bytes == 0 {
            return Err(CudaError::INVALID_VALUE);
        }
        let index = match self.unused.last() {
            Some(&index) => index,
            None => self.records.len() as u32,
        };
        let start = if bytes <= MAX_SMALL_BYTES {
            self.allocate_small(account, bytes, index)?
        } else {
            self.allocate_large(account, bytes, index)?
        };
        self.allocations += 1;
        let record = Some(AllocationRecord { number: self.allocations, start, bytes, touched: false, tag });
        match self.unused.pop() {
            Some(index) => self.records[index as usize] = record,
            None => self.records.push(record),
        }
        Ok(start)
    }

    /// Reserves addresses in separate blocks without charging memory; the caller accounts for it.
    pub(super) fn reserve(&mut self, bytes: usize, tag: T) -> Result<u64, CudaError> {
        if bytes == 0 {
            return Err(CudaError::INVALID_VALUE);
        }
        let index = self.unused.pop().unwrap_or_else(|| {
            self.records.push(None);
            (self.records.len() - 1) as u32
        });
        match self.allocate_large(&NoAccount, bytes, index) {
            Ok(start) => {
                self.allocations += 1;
                let number = self.allocations;
                self.records[index as usize] =
                    Some(AllocationRecord { number, start, bytes, touched: false, tag });
                Ok(start)
            }
            Err(error) => {
                self.unused.push(index);
                Err(error)
            }
        }
    }

    fn allocate_small(
        &mut self,
        account: &impl MemoryAccount,
        bytes: usize,
        record: u32,
    ) -> Result<u64, CudaError> {
        let (block, offset) = match self.buddy.allocate(bytes, record) {
            Some(place) => place,
            None => {
                let block = self.take_blocks(account, 1)?;
                let (index, offset) = self.buddy.add(block, bytes, record);
                self.shared[block as usize] = index + 1;
                (block, offset)
            }
        };
        Ok(self.base + u64::from(block) * BLOCK_BYTES as u64 + offset as u64)
    }

    fn allocate_large(
        &mut self,
        account: &impl MemoryAccount,
        bytes: usize,
        record: u32,
    ) -> Result<u64, CudaError> {
        if bytes.div_ceil(BLOCK_BYTES) > self.shared.len() {
            return Err(CudaError::OUT_OF_MEMORY);
        }
        let block = self.take_blocks(account, blocks(bytes))?;
        self.large.insert(block, record);
        Ok(self.base + u64::from(block) * BLOCK_BYTES as u64)
    }

    fn take_blocks(&mut self, account: &impl MemoryAccount, blocks: u32) -> Result<u32, CudaError> {
        let bytes = u64::from(blocks) * BLOCK_BYTES as u64;
        account.charge(bytes)?;
        self.free_blocks.allocate(blocks).ok_or_else(|| {
            account.refund(bytes);
            CudaError::OUT_OF_MEMORY
        })
    }

    fn return_blocks(&mut self, account: &impl MemoryAccount, block: u32, blocks: u32) {
        self.free_blocks.free(block, blocks);
        account.refund(u64::from(blocks) * BLOCK_BYTES as u64);
    }

    fn place(&self, pointer: u64) -> Option<(u32, usize)> {
        let offset = pointer.checked_sub(self.base)? as usize;
        let block = offset / BLOCK_BYTES;
        (block < self.shared.len()).then_some((block as u32, offset % BLOCK_BYTES))
    }

    fn index(&self, pointer: u64) -> Option<u32> {
        let (block, offset) = self.place(pointer)?;
        let index = match self.shared[block as usize] {
            0 => *self.large.range(..=block).next_back()?.1,
            shared => self.buddy.find(shared - 1, offset)?,
        };
        let record = self.records[index as usize].as_ref()?;
        (pointer - record.start < record.bytes as u64).then_some(index)
    }

    /// Returns the allocation that contains an address.
    pub(super) fn find(&self, pointer: u64) -> Option<&AllocationRecord<T>> {
        self.records[self.index(pointer)? as usize].as_ref()
    }

    /// Returns the allocation that contains an address, for modification.
    pub(super) fn find_mut(&mut self, pointer: u64) -> Option<&mut AllocationRecord<T>> {
        let index = self.index(pointer)?;
        self.records[index as usize].as_mut()
    }

    /// Frees the allocation that starts at `start` if `accept` returns true for it. `discard_pages` is called before
    /// its addresses can be reused.
    pub(super) fn free(
        &mut self,
        account: &impl MemoryAccount,
        start: u64,
        accept: impl FnOnce(&AllocationRecord<T>) -> bool,
        discard_pages: impl FnOnce(&AllocationRecord<T>),
    ) -> Result<(), CudaError> {
        let bad = CudaError::INVALID_VALUE;
        let (block, offset) = self.place(start).ok_or(bad)?;
        let shared = self.shared[block as usize];
        let index = match shared {
            0 => *self.large.get(&block).ok_or(bad)?,
            shared => self.buddy.find(shared - 1, offset).ok_or(bad)?,
        };
        let slot = &mut self.records[index as usize];
        let record = slot.as_ref().filter(|record| record.start == start && accept(record)).ok_or(bad)?;
        discard_pages(record);
        let bytes = record.bytes;
        *slot = None;
        self.unused.push(index);
        if shared == 0 {
            self.large.remove(&block);
            self.return_blocks(account, block, blocks(bytes));
        } else if self.buddy.free(shared - 1, offset).is_some() {
            self.shared[block as usize] = 0;
            self.return_blocks(account, block, 1);
        }
        Ok(())
    }

    /// Returns all allocations of the address space.
    pub(super) fn records(&self) -> impl Iterator<Item = &AllocationRecord<T>> {
        self.records.iter().flatten()
    }
}

#[cfg(test)]
mod tests {
    use super::super::buddy::MIN_PIECE_BYTES;
    use super::*;
    use proptest::prelude::*;
    use std::cell::Cell;
    use std::collections::{BTreeMap, BTreeSet};

    /// A memory account with a fixed capacity.
    struct FakeAccount {
        used: Cell<u64>,
        capacity: u64,
    }

    impl MemoryAccount for FakeAccount {
        fn charge(&self, bytes: u64) -> Result<(), CudaError> {
            if self.used.get() + bytes > self.capacity {
                return Err(CudaError::OUT_OF_MEMORY);
            }
            self.used.set(self.used.get() + bytes);
            Ok(())
        }

        fn refund(&self, bytes: u64) {
            self.used.set(self.used.get() - bytes);
        }
    }

    const BASE: u64 = 64 * BLOCK_BYTES as u64;

    fn space() -> (AddressSpace<()>, FakeAccount) {
        (AddressSpace::new(BASE, 1024), FakeAccount { used: Cell::new(0), capacity: 64 * BLOCK_BYTES as u64 })
    }

    /// Computes what live allocations charge: each block that holds a small one, and large ones rounded up.
    fn expected(live: &BTreeMap<u64, usize>) -> u64 {
        let shared: BTreeSet<u64> = live
            .iter()
            .filter(|&(_, &bytes)| bytes <= MAX_SMALL_BYTES)
            .map(|(start, _)| start / BLOCK_BYTES as u64)
            .collect();
        let large: usize = live
            .values()
            .filter(|&&bytes| bytes > MAX_SMALL_BYTES)
            .map(|bytes| bytes.next_multiple_of(BLOCK_BYTES))
            .sum();
        (shared.len() * BLOCK_BYTES + large) as u64
    }

    fn sizes() -> impl Strategy<Value = usize> {
        prop_oneof![
            1..=4096usize,
            1..=MAX_SMALL_BYTES,
            MAX_SMALL_BYTES - 2..=MAX_SMALL_BYTES + 2,
            MAX_SMALL_BYTES..=16 * BLOCK_BYTES,
            Just(0),
            Just(usize::MAX)
        ]
    }

    proptest! {
        #[test]
        fn accounting_is_exact_and_allocations_never_overlap(
            steps in prop::collection::vec((sizes(), any::<prop::sample::Index>(), any::<bool>()), 1..300),
        ) {
            let (mut space, account) = space();
            let mut live = BTreeMap::new();
            for (bytes, which, free) in steps {
                if free && !live.is_empty() {
                    let (&start, &bytes) = live.iter().nth(which.index(live.len())).unwrap();
                    prop_assert!(space.free(&account, start + 1, |_| true, |_| ()).is_err());
                    prop_assert!(space.free(&account, start, |_| false, |_| ()).is_err());
                    space.free(&account, start, |_| true, |_| ()).unwrap();
                    prop_assert!(space.free(&account, start, |_| true, |_| ()).is_err());
                    prop_assert!(space.find(start).is_none() && space.find(start + bytes as u64 - 1).is_none());
                    live.remove(&start);
                } else {
                    match space.allocate(&account, bytes, ()) {
                        Ok(start) => {
                            prop_assert_eq!(start as usize % MIN_PIECE_BYTES, 0);
                            prop_assert!(bytes > 0 && (bytes <= MAX_SMALL_BYTES || start.is_multiple_of(BLOCK_BYTES as u64)));
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
                            let more = if bytes <= MAX_SMALL_BYTES { BLOCK_BYTES } else { bytes.saturating_add(BLOCK_BYTES - 1) / BLOCK_BYTES * BLOCK_BYTES };
                            prop_assert!(account.used.get().saturating_add(more as u64) > account.capacity);
                        }
                    }
                }
                prop_assert_eq!(account.used.get(), expected(&live));
                prop_assert_eq!(space.records().count(), live.len());
            }
            for start in live.into_keys() {
                space.free(&account, start, |_| true, |_| ()).unwrap();
            }
            prop_assert_eq!(account.used.get(), 0);
        }
    }

    #[test]
    fn full_card_is_used_to_the_last_block() {
        let (mut space, account) = space();
        let all: Vec<u64> =
            (0..128).map(|_| space.allocate(&account, MAX_SMALL_BYTES, ()).unwrap()).collect();
        assert_eq!(space.allocate(&account, 1, ()), Err(CudaError::OUT_OF_MEMORY));
        space.free(&account, all[77], |_| true, |_| ()).unwrap();
        // Half a block is free and can hold small allocations.
        let small: Vec<u64> = (0..2048).map(|_| space.allocate(&account, 1, ()).unwrap()).collect();
        assert_eq!(space.allocate(&account, 1, ()), Err(CudaError::OUT_OF_MEMORY));
        assert_eq!(small.into_iter().collect::<BTreeSet<_>>().len(), 2048);
    }
}
