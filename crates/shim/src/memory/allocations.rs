//! Allocations by their address or handle.

use super::lock;
use partage_driver_api::cuda::CUdeviceptr;
use std::collections::HashMap;
use std::hash::{BuildHasherDefault, Hasher};
use std::sync::{Mutex, MutexGuard};

/// The amount that is counted for an allocation.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct HeldMemory {
    /// Index of the GPU; there are at most 16.
    gpu: u8,
    /// Bytes reserved in the container's account for this allocation alone.
    pub(super) bytes: u64,
    /// The pool that it belongs to, which is counted as a whole; zero for none.
    pub(super) pool: u64,
}

impl HeldMemory {
    #[inline]
    pub(super) fn new(gpu: usize, bytes: u64) -> Self {
        Self { gpu: gpu as u8, bytes, pool: 0 }
    }

    /// Returns the record of a pool's piece.
    pub(super) fn of_pool(gpu: usize, pool: u64) -> Self {
        Self { gpu: gpu as u8, bytes: 0, pool }
    }

    #[inline]
    pub(super) fn gpu(self) -> usize {
        usize::from(self.gpu)
    }
}

/// A hasher for addresses: one multiplication spreads them well, and no program gains by making them collide.
#[derive(Default)]
pub(super) struct MultiplyHasher(u64);

impl Hasher for MultiplyHasher {
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
        // Hash tables use the lowest and the highest bits.
        self.0 = spread ^ spread >> 32;
    }

    #[inline]
    fn write_usize(&mut self, number: usize) {
        self.write_u64(number as u64);
    }
}

/// A hash map by address or handle.
pub(super) type HandleMap<T> = HashMap<u64, T, BuildHasherDefault<MultiplyHasher>>;

const SHARD_COUNT: usize = 16;

/// A part of the addresses, on a cache line of its own.
#[derive(Default)]
#[repr(align(64))]
struct AllocationShard(Mutex<HandleMap<HeldMemory>>);

/// Allocations by address. Threads rarely contend: the address determines the shard.
#[derive(Default)]
pub(super) struct Allocations {
    shards: [AllocationShard; SHARD_COUNT],
}

impl Allocations {
    #[inline]
    fn shard(&self, pointer: CUdeviceptr) -> MutexGuard<'_, HandleMap<HeldMemory>> {
        let index = (pointer >> 21 ^ pointer >> 12) as usize % SHARD_COUNT;
        lock(&self.shards[index].0)
    }

    #[inline]
    pub(super) fn insert(&self, pointer: CUdeviceptr, held: HeldMemory) -> Option<HeldMemory> {
        self.shard(pointer).insert(pointer, held)
    }

    #[inline]
    pub(super) fn remove(&self, pointer: CUdeviceptr) -> Option<HeldMemory> {
        self.shard(pointer).remove(&pointer)
    }

    /// Removes the record if the allocation is gone. The shard is locked meanwhile, so no other thread records one
    /// there.
    pub(super) fn remove_if(&self, pointer: CUdeviceptr, gone: impl FnOnce() -> bool) -> Option<HeldMemory> {
        let mut shard = self.shard(pointer);
        if shard.contains_key(&pointer) && gone() { shard.remove(&pointer) } else { None }
    }

    pub(super) fn contains(&self, pointer: CUdeviceptr) -> bool {
        self.shard(pointer).contains_key(&pointer)
    }

    /// Returns all addresses on a GPU.
    pub(super) fn on_gpu(&self, gpu: usize) -> Vec<CUdeviceptr> {
        let all = self.shards.iter().flat_map(|shard| {
            let shard = lock(&shard.0);
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
    fn reallocated_address_is_not_removed() {
        let all = Allocations::default();
        let (old, new) = (HeldMemory::new(0, 2), HeldMemory::new(0, 4));
        all.insert(7, old);
        assert_eq!(all.on_gpu(0), [7]);
        // Listed, and gone; but before the removal the address is allocated again.
        assert_eq!(all.insert(7, new), Some(old));
        assert_eq!(all.remove_if(7, || false), None);
        assert_eq!(all.remove_if(7, || true), Some(new));
        assert_eq!(all.remove_if(7, || unreachable!()), None);
    }
}
