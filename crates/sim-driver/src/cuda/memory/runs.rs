//! Which blocks of an address space are free: runs of them, joined with their neighbours.

use std::collections::{BTreeMap, BTreeSet};

/// Single blocks that are kept at hand: most of what programs free is asked for again.
const AT_HAND: usize = 64;

/// Free blocks.
pub(super) struct Runs {
    by_start: BTreeMap<u32, u32>,
    by_length: BTreeSet<(u32, u32)>,
    single: Vec<u32>,
}

impl Runs {
    /// All of `blocks` are free.
    pub(super) fn new(blocks: u32) -> Self {
        let mut runs = Self {
            by_start: BTreeMap::new(),
            by_length: BTreeSet::new(),
            single: Vec::with_capacity(AT_HAND),
        };
        runs.insert(0, blocks);
        runs
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

    /// The first of so many blocks in a row, out of the shortest run that is long enough.
    pub(super) fn take(&mut self, blocks: u32) -> Option<u32> {
        if blocks == 1
            && let Some(block) = self.single.pop()
        {
            return Some(block);
        }
        if let Some(start) = self.take_run(blocks) {
            return Some(start);
        }
        for block in std::mem::take(&mut self.single) {
            self.give_run(block, 1);
        }
        self.take_run(blocks)
    }

    fn take_run(&mut self, blocks: u32) -> Option<u32> {
        let &(length, start) = self.by_length.range((blocks, 0)..).next()?;
        self.remove(start, length);
        self.insert(start + blocks, length - blocks);
        Some(start)
    }

    /// Gives blocks back.
    pub(super) fn give(&mut self, start: u32, blocks: u32) {
        if blocks == 1 && self.single.len() < AT_HAND {
            self.single.push(start);
            return;
        }
        self.give_run(start, blocks);
    }

    fn give_run(&mut self, mut start: u32, mut blocks: u32) {
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
