//! Allocations by their address or handle.

use super::locked;
use partage_driver_api::cuda::CUdeviceptr;
use std::collections::HashMap;
use std::hash::{BuildHasherDefault, Hasher};
use std::sync::{Mutex, MutexGuard};

/// What is counted for an allocation.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Held {
    /// Which GPU; there are at most sixteen.
    gpu: u8,
    /// Bytes taken from the container's account for it alone.
    pub(super) bytes: u64,
    /// The pool it is a piece of, which is counted as a whole; zero for none.
    pub(super) pool: u64,
}

impl Held {
    #[inline]
    pub(super) fn new(gpu: usize, bytes: u64) -> Self {
        Self { gpu: gpu as u8, bytes, pool: 0 }
    }

    /// A piece of a pool.
    pub(super) fn of_pool(gpu: usize, pool: u64) -> Self {
        Self { gpu: gpu as u8, bytes: 0, pool }
    }

    #[inline]
    pub(super) fn gpu(self) -> usize {
        usize::from(self.gpu)
    }
}

/// Addresses are spread well by one multiplication; nobody gains by making them collide.
#[derive(Default)]
pub(super) struct Spread(u64);

impl Hasher for Spread {
    #[inline]
    fn finish(&self) -> u64 {
        self.0
    }

    #[inline]
    fn write(&mut self, bytes: &[u8]) {
        for &byte in bytes {
            self.write_u64(u64::from(byte));
        }
    }

    #[inline]
    fn write_u64(&mut self, number: u64) {
        let spread = (self.0 ^ number).wrapping_mul(0x9e37_79b9_7f4a_7c15);
        // Tables look at the lowest and the highest bits.
        self.0 = spread ^ spread >> 32;
    }

    #[inline]
    fn write_usize(&mut self, number: usize) {
        self.write_u64(number as u64);
    }
}

/// A table by number.
pub(super) type Table<T> = HashMap<u64, T, BuildHasherDefault<Spread>>;

const SHARDS: usize = 16;

/// A part of the addresses, on a line of its own.
#[derive(Default)]
#[repr(align(64))]
struct Shard(Mutex<Table<Held>>);

/// Allocations by address. Threads rarely meet: an address tells which part it is in.
#[derive(Default)]
pub(super) struct Allocations {
    shards: [Shard; SHARDS],
}

impl Allocations {
    #[inline]
    fn shard(&self, pointer: CUdeviceptr) -> MutexGuard<'_, Table<Held>> {
        let index = (pointer >> 21 ^ pointer >> 12) as usize % SHARDS;
        locked(&self.shards[index].0)
    }

    #[inline]
    pub(super) fn insert(&self, pointer: CUdeviceptr, held: Held) -> Option<Held> {
        self.shard(pointer).insert(pointer, held)
    }

    #[inline]
    pub(super) fn remove(&self, pointer: CUdeviceptr) -> Option<Held> {
        self.shard(pointer).remove(&pointer)
    }

    /// Removes it if it is gone; nobody notes another one there while that is asked.
    pub(super) fn remove_if(&self, pointer: CUdeviceptr, gone: impl FnOnce() -> bool) -> Option<Held> {
        let mut shard = self.shard(pointer);
        if shard.contains_key(&pointer) && gone() { shard.remove(&pointer) } else { None }
    }

    pub(super) fn contains(&self, pointer: CUdeviceptr) -> bool {
        self.shard(pointer).contains_key(&pointer)
    }

    /// All addresses on a GPU.
    pub(super) fn on(&self, gpu: usize) -> Vec<CUdeviceptr> {
        let all = self.shards.iter().flat_map(|shard| {
            let shard = locked(&shard.0);
            let own = shard.iter().filter(|(_, held)| held.gpu() == gpu).map(|(&pointer, _)| pointer);
            own.collect::<Vec<_>>()
        });
        all.collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_there_again_is_not_removed() {
        let all = Allocations::default();
        let (old, new) = (Held::new(0, 2), Held::new(0, 4));
        all.insert(7, old);
        assert_eq!(all.on(0), [7]);
        // Listed, and gone; but before it is removed the address is somebody's again.
        assert_eq!(all.insert(7, new), Some(old));
        assert_eq!(all.remove_if(7, || false), None);
        assert_eq!(all.remove_if(7, || true), Some(new));
        assert_eq!(all.remove_if(7, || unreachable!()), None);
    }
}
