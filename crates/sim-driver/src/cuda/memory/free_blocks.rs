//! The free blocks of an address space, as runs that are merged with their neighbors.

use std::collections::{BTreeMap, BTreeSet};

/// Number of single blocks cached outside the runs, because most freed blocks are soon allocated again.
const MAX_CACHED_BLOCKS: usize = 64;

/// The set of free blocks.
pub(super) struct FreeBlocks {
    by_start: BTreeMap<u32, u32>,
    by_length: BTreeSet<(u32, u32)>,
    cached: Vec<u32>,
}

impl FreeBlocks {
    /// Creates a set in which all blocks are free.
    pub(super) fn new(blocks: u32) -> Self {
        let mut free = Self {
            by_start: BTreeMap::new(),
            by_length: BTreeSet::new(),
            cached: Vec::with_capacity(MAX_CACHED_BLOCKS),
        };
        free.insert(0, blocks);
        free
    }

    fn insert(&mut self, start: u32, length: u32) {
        if length > 0 {
            self.by_start.insert(start, length);
            self.by_length.insert((length, start));
        }
    }

    fn remove(&mut self, start: u32, length: u32) {
        self.by_start.remove(&start);
        self.by_length.remove(&(length, start));
    }

    /// Allocates consecutive blocks from the shortest run that is long enough; returns the first.
    pub(super) fn allocate(&mut self, blocks: u32) -> Option<u32> {
        if blocks == 1
            && let Some(block) = self.cached.pop()
        {
            return Some(block);
        }
        if let Some(start) = self.take_run(blocks) {
            return Some(start);
        }
        for block in std::mem::take(&mut self.cached) {
            self.free_run(block, 1);
        }
        self.take_run(blocks)
    }

    fn take_run(&mut self, blocks: u32) -> Option<u32> {
        let &(length, start) = self.by_length.range((blocks, 0)..).next()?;
        self.remove(start, length);
        self.insert(start + blocks, length - blocks);
        Some(start)
    }

    /// Frees `blocks` consecutive blocks from `start` on. A single one is cached while the cache has space; others are
    /// merged with their free neighbors.
    pub(super) fn free(&mut self, start: u32, blocks: u32) {
        if blocks == 1 && self.cached.len() < MAX_CACHED_BLOCKS {
            self.cached.push(start);
            return;
        }
        self.free_run(start, blocks);
    }

    fn free_run(&mut self, mut start: u32, mut blocks: u32) {
        if let Some((&before, &length)) = self.by_start.range(..start).next_back()
            && before + length == start
        {
            self.remove(before, length);
            start = before;
            blocks += length;
        }
        if let Some(&length) = self.by_start.get(&(start + blocks)) {
            self.remove(start + blocks, length);
            blocks += length;
        }
        self.insert(start, blocks);
    }
}
