//! Stream-ordered memory and its pools.
//!
//! A pool reserves memory on its card in chunks of 32 MiB and allocates pieces of them. A piece freed in a stream can
//! be reused by that stream immediately, and by others when the stream has reached the free. Unused memory above the
//! pool's release threshold returns to the card at the next synchronization.

mod pool_allocator;
mod pool_functions;

use super::context::Context;
use super::device::Device;
use super::handle::{HandleArena, handle_of};
use super::memory::{self, MemoryKind, MemoryRange, REMAP_LOCK};
use super::session::session;
use super::stream::Stream;
use super::*;
use pool_allocator::{PoolAllocator, round_up};
use rustix::fd::{AsRawFd, OwnedFd};
use std::collections::BTreeMap;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Mutex, MutexGuard, PoisonError};

/// A memory pool of one device.
pub(super) struct MemoryPool {
    device: &'static Device,
    /// Whether it is the default pool of its device.
    default: bool,
    /// The handle types by which it can be exported to other processes.
    handle_types: u32,
    /// Maximum size of the pool in bytes; zero means unlimited.
    max_bytes: u64,
    /// The file that holds its memory, if it can be exported.
    file: Option<OwnedFd>,
    /// Whether it belongs to another process: exported pointers can be imported, but nothing can be allocated.
    imported: bool,
    state: Mutex<PoolState>,
}

/// The part of a pool that changes.
struct PoolState {
    alive: bool,
    allocator: PoolAllocator,
    threshold: u64,
    reuse: [bool; 3],
    /// Access rights of other devices, by ordinal.
    access: BTreeMap<i32, CUmemAccess_flags>,
    /// Number of pieces in use.
    live: usize,
}

static POOLS: HandleArena<MemoryPool> = HandleArena::new();

/// The default pool and the current pool of each device, by ordinal.
static DEVICE_POOLS: Mutex<BTreeMap<i32, [&'static MemoryPool; 2]>> = Mutex::new(BTreeMap::new());

/// Bitmap of the devices with a pool that may have memory to release.
static MAY_TRIM: AtomicU64 = AtomicU64::new(0);

fn mark_for_trim(device: &Device) {
    MAY_TRIM.fetch_or(1 << (device.ordinal as u64 % 64), Ordering::AcqRel);
}

/// Resolves a pool handle.
fn resolve(handle: CUmemoryPool) -> Result<&'static MemoryPool, CudaError> {
    session()?;
    POOLS.get(handle).filter(|pool| pool.state().alive).ok_or(CudaError::INVALID_VALUE)
}

fn register_pool(pool: MemoryPool) -> Result<&'static MemoryPool, CudaError> {
    // Slots of pools are not reused: pieces of a destroyed pool may still be in use.
    POOLS.make(|| pool, |_| ()).ok_or(CudaError::OUT_OF_MEMORY)
}

impl MemoryPool {
    fn new(device: &'static Device, handle_types: u32, max_bytes: u64, file: Option<OwnedFd>) -> Self {
        let state = PoolState {
            alive: true,
            allocator: PoolAllocator::default(),
            threshold: 0,
            reuse: [true; 3],
            access: BTreeMap::new(),
            live: 0,
        };
        let state = Mutex::new(state);
        // A pool grows by whole chunks.
        let max_bytes = PoolAllocator::round_up_to_chunk(max_bytes);
        Self { device, default: false, handle_types, max_bytes, file, imported: false, state }
    }

    fn state(&self) -> MutexGuard<'_, PoolState> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn handle(&'static self) -> CUmemoryPool {
        handle_of(self)
    }

    /// Reserves a chunk that holds `bytes`.
    fn grow(&self, state: &mut PoolState, bytes: usize) -> Result<(), CudaError> {
        let mut refused = CudaError::OUT_OF_MEMORY;
        for size in PoolAllocator::chunk_sizes(bytes).into_iter().flatten() {
            if self.max_bytes > 0
                && state.allocator.reserved().0 + size as u64 > self.max_bytes.max(bytes as u64)
            {
                continue;
            }
            match memory::allocate_internal(self.device, size, MemoryKind::Chunk) {
                Ok(start) => {
                    let at = state.allocator.add(start, size);
                    let shared = self.map_file(start, size, at);
                    if shared.is_err() {
                        // Without its file the chunk could not be exported.
                        self.trim(state, 0);
                    }
                    return shared;
                }
                Err(error) => refused = error,
            }
        }
        Err(refused)
    }

    /// Maps the pool's file over a chunk.
    fn map_file(&self, start: u64, bytes: usize, at: u64) -> Result<(), CudaError> {
        let Some(file) = &self.file else { return Ok(()) };
        let _guard = REMAP_LOCK.write();
        memory::note_file();
        rustix::fs::ftruncate(file, at + bytes as u64).map_err(|_| CudaError::OUT_OF_MEMORY)?;
        // SAFETY: arena addresses of a chunk that the pool has just reserved.
        let address = unsafe {
            libc::mmap(
                start as *mut c_void,
                bytes,
                libc::PROT_READ | libc::PROT_WRITE,
                libc::MAP_SHARED | libc::MAP_FIXED | libc::MAP_NORESERVE,
                file.as_raw_fd(),
                at as i64,
            )
        };
        if address == libc::MAP_FAILED { Err(CudaError::OUT_OF_MEMORY) } else { Ok(()) }
    }

    /// Releases unused chunks until `keep` bytes remain reserved.
    fn trim(&self, state: &mut PoolState, keep: u64) {
        for start in state.allocator.trim(keep) {
            if self.file.is_some()
                && let Some(chunk) = memory::find_chunk(start)
            {
                let _guard = REMAP_LOCK.write();
                memory::replace_pages(chunk.start, chunk.bytes);
            }
            memory::free_internal(start);
        }
    }

    /// Allocates a piece in stream order.
    fn allocate(&'static self, bytes: usize, stream: &'static Stream) -> Result<u64, CudaError> {
        let bytes_taken = round_up(bytes)?;
        let (context, timeline) = stream.context_and_timeline();
        let stream_key = (context.device.ordinal, timeline);
        let mut state = self.state();
        let mut start = state.allocator.allocate(bytes_taken, stream_key);
        if start.is_none() {
            match self.grow(&mut state, bytes_taken) {
                Ok(()) => start = state.allocator.allocate(bytes_taken, stream_key),
                Err(CudaError::OUT_OF_MEMORY) => {
                    drop(state);
                    self.make_room(context)?;
                    state = self.state();
                    start = state.allocator.allocate(bytes_taken, stream_key);
                    if start.is_none() {
                        self.grow(&mut state, bytes_taken)?;
                        start = state.allocator.allocate(bytes_taken, stream_key);
                    }
                }
                Err(error) => return Err(error),
            }
        }
        let start = start.ok_or(CudaError::OUT_OF_MEMORY)?;
        state.live += 1;
        drop(state);
        memory::insert(MemoryRange {
            kind: MemoryKind::Pool,
            start,
            bytes,
            device: Some(self.device),
            context: Some(context),
            id: memory::new_id(),
            flags: 0,
            owner: self.handle() as usize,
            sync_memops: false,
        });
        Ok(start)
    }

    /// Waits for pending frees, and releases unused memory of all pools of the device.
    #[cold]
    fn make_room(&'static self, context: &'static Context) -> Result<(), CudaError> {
        let waiting = self.state().allocator.has_pending_frees();
        if waiting {
            context.sync()?;
        }
        for pool in POOLS.live().filter(|pool| std::ptr::eq(pool.device, self.device)) {
            pool.trim(&mut pool.state(), 0);
        }
        Ok(())
    }

    /// Releases the memory of a destroyed pool when its last piece is freed.
    fn release_if_destroyed(&self, state: &mut PoolState) {
        if !state.alive && state.live == 0 && !state.allocator.has_pending_frees() {
            self.trim(state, 0);
        }
        mark_for_trim(self.device);
    }
}

/// Returns the default pool and the current pool of a device.
fn device_pools(device: &'static Device) -> Result<[&'static MemoryPool; 2], CudaError> {
    let mut all = DEVICE_POOLS.lock().unwrap_or_else(PoisonError::into_inner);
    if let Some(&pools) = all.get(&device.ordinal) {
        return Ok(pools);
    }
    let own = register_pool(MemoryPool { default: true, ..MemoryPool::new(device, 0, 0, None) })?;
    all.insert(device.ordinal, [own, own]);
    Ok([own, own])
}

fn set_current(device: &'static Device, pool: &'static MemoryPool) -> Result<(), CudaError> {
    let [own, _] = device_pools(device)?;
    DEVICE_POOLS.lock().unwrap_or_else(PoisonError::into_inner).insert(device.ordinal, [own, pool]);
    Ok(())
}

/// Removes the piece that starts at this address from the pieces in use.
fn remove_piece(pointer: u64) -> Result<(&'static MemoryPool, MemoryRange), CudaError> {
    let found =
        memory::remove(pointer, |found| found.kind == MemoryKind::Pool).ok_or(CudaError::INVALID_VALUE)?;
    let pool = POOLS.get(found.owner as CUmemoryPool).ok_or(CudaError::INVALID_VALUE)?;
    Ok((pool, found))
}

/// Frees a piece immediately; nothing may use it any more.
pub(super) fn free_now(pointer: u64) -> Result<(), CudaError> {
    let (pool, found) = remove_piece(pointer)?;
    let mut state = pool.state();
    state.allocator.free(found.start, round_up(found.bytes)?);
    state.live -= 1;
    pool.release_if_destroyed(&mut state);
    Ok(())
}

/// Frees a piece when the stream reaches the free.
fn free_later(pointer: u64, stream: &'static Stream) -> Result<(), CudaError> {
    let (pool, found) = remove_piece(pointer)?;
    let (context, timeline) = stream.context_and_timeline();
    let stream_key = (context.device.ordinal, timeline);
    let ticket = {
        let mut state = pool.state();
        state.live -= 1;
        state.allocator.free_when_reached(found.start, round_up(found.bytes)?, stream_key)
    };
    stream.run_in_order(move || {
        let mut state = pool.state();
        state.allocator.complete_free(ticket);
        pool.release_if_destroyed(&mut state);
    })
}

/// Releases memory above the pools' thresholds after the program has synchronized.
#[inline]
pub(super) fn trim_after_sync(device: &'static Device) {
    if MAY_TRIM.load(Ordering::Acquire) >> (device.ordinal as u64 % 64) & 1 == 1 {
        trim_device(device);
    }
}

#[cold]
fn trim_device(device: &'static Device) {
    MAY_TRIM.fetch_and(!(1 << (device.ordinal as u64 % 64)), Ordering::AcqRel);
    for pool in POOLS.live().filter(|pool| std::ptr::eq(pool.device, device)) {
        let mut state = pool.state();
        let keep = if state.alive { state.threshold } else { 0 };
        pool.trim(&mut state, keep);
    }
}

/// Frees the pieces that were allocated in streams of a context.
pub(super) fn drop_all(context: &'static Context) {
    let own = |found: &MemoryRange| {
        found.kind == MemoryKind::Pool && found.context.is_some_and(|other| std::ptr::eq(other, context))
    };
    for piece in memory::list(own) {
        let _ = free_now(piece.start);
    }
    for pool in POOLS.live().filter(|pool| std::ptr::eq(pool.device, context.device)) {
        pool.trim(&mut pool.state(), 0);
    }
}

/// Returns the handle types by which the pool's memory can be exported.
pub(super) fn handle_types(pool: usize) -> u64 {
    POOLS.get(pool as CUmemoryPool).map_or(0, |pool| u64::from(pool.handle_types))
}
