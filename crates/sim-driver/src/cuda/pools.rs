//! Memory in stream order, and the pools it comes from.
//!
//! A pool takes memory of its card in steps of 32 MiB and hands out pieces. A piece that is freed in a stream can be
//! had again by that stream at once, by others when the stream has come to the free. Unused memory beyond the pool's
//! threshold goes back to the card when the program synchronises next.

mod book;
mod calls;

use super::context::Context;
use super::device::Device;
use super::handle::{Arena, handle_of};
use super::memory::{self, Found, Kind, MOVING};
use super::session::session;
use super::stream::Stream;
use super::*;
use book::{Book, rounded};
use rustix::fd::{AsRawFd, OwnedFd};
use std::collections::BTreeMap;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Mutex, MutexGuard, PoisonError};

/// A pool.
pub(super) struct Pool {
    device: &'static Device,
    /// One that the device has by itself.
    default: bool,
    /// How it can be given to other processes.
    handle_types: u32,
    /// It never has more than this; zero means no limit of its own.
    most: u64,
    /// What its memory lies in, if it can be given to other processes.
    file: Option<OwnedFd>,
    /// Of another process: its pointers can be had, new ones cannot.
    imported: bool,
    inner: Mutex<Inner>,
}

struct Inner {
    alive: bool,
    book: Book,
    threshold: u64,
    reuse: [bool; 3],
    /// What other devices may do.
    access: BTreeMap<i32, CUmemAccess_flags>,
    /// Pieces in use.
    live: usize,
}

static POOLS: Arena<Pool> = Arena::new();

/// Each device's own pool and the one it uses, by its number.
static OF_DEVICE: Mutex<BTreeMap<i32, [&'static Pool; 2]>> = Mutex::new(BTreeMap::new());

/// A bit for every device with a pool that may have something to give back.
static MAY_TRIM: AtomicU64 = AtomicU64::new(0);

fn may_trim(device: &Device) {
    MAY_TRIM.fetch_or(1 << (device.ordinal as u64 % 64), Ordering::AcqRel);
}

/// The pool a handle means.
fn resolve(handle: CUmemoryPool) -> Result<&'static Pool, CudaError> {
    session()?;
    POOLS.get(handle).filter(|pool| pool.inner().alive).ok_or(CudaError::INVALID_VALUE)
}

fn make(pool: Pool) -> Result<&'static Pool, CudaError> {
    // Never used again: pieces of a pool that was destroyed may still be in use.
    POOLS.make(|| pool, |_| ()).ok_or(CudaError::OUT_OF_MEMORY)
}

impl Pool {
    fn new(device: &'static Device, handle_types: u32, most: u64, file: Option<OwnedFd>) -> Self {
        let inner = Inner {
            alive: true,
            book: Book::default(),
            threshold: 0,
            reuse: [true; 3],
            access: BTreeMap::new(),
            live: 0,
        };
        let inner = Mutex::new(inner);
        Self { device, default: false, handle_types, most, file, imported: false, inner }
    }

    fn inner(&self) -> MutexGuard<'_, Inner> {
        self.inner.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn handle(&'static self) -> CUmemoryPool {
        handle_of(self)
    }

    /// Takes a chunk of the card that `bytes` fit into.
    fn grow(&self, inner: &mut Inner, bytes: usize) -> Result<(), CudaError> {
        let mut refused = CudaError::OUT_OF_MEMORY;
        for size in Book::steps(bytes).into_iter().flatten() {
            if self.most > 0 && inner.book.reserved().0 + size as u64 > self.most.max(bytes as u64) {
                continue;
            }
            match memory::take(self.device, size, Kind::Chunk) {
                Ok(start) => {
                    let at = inner.book.add(start, size);
                    let shared = self.share(start, size, at);
                    if shared.is_err() {
                        // Others would get what they cannot give away.
                        self.trim(inner, 0);
                    }
                    return shared;
                }
                Err(error) => refused = error,
            }
        }
        Err(refused)
    }

    /// Puts the pool's file behind a chunk.
    fn share(&self, start: u64, bytes: usize, at: u64) -> Result<(), CudaError> {
        let Some(file) = &self.file else { return Ok(()) };
        let _nobody_moves = MOVING.write();
        memory::note_file();
        rustix::fs::ftruncate(file, at + bytes as u64).map_err(|_| CudaError::OUT_OF_MEMORY)?;
        // SAFETY: addresses of the arena that the pool has just taken.
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

    /// Gives unused chunks back, down to `keep` bytes.
    fn trim(&self, inner: &mut Inner, keep: u64) {
        for start in inner.book.trim(keep) {
            if self.file.is_some()
                && let Some(chunk) = memory::chunk(start)
            {
                let _nobody_moves = MOVING.write();
                memory::renew(chunk.start, chunk.bytes);
            }
            memory::give(start);
        }
    }

    /// A piece for a stream.
    fn allocate(&'static self, bytes: usize, stream: &'static Stream) -> Result<u64, CudaError> {
        let bytes_taken = rounded(bytes)?;
        let (context, track) = stream.place();
        let order = (context.device.ordinal, track);
        let mut inner = self.inner();
        let mut start = inner.book.take(bytes_taken, order);
        if start.is_none() {
            match self.grow(&mut inner, bytes_taken) {
                Ok(()) => start = inner.book.take(bytes_taken, order),
                Err(CudaError::OUT_OF_MEMORY) => {
                    drop(inner);
                    self.make_room(context)?;
                    inner = self.inner();
                    start = inner.book.take(bytes_taken, order);
                    if start.is_none() {
                        self.grow(&mut inner, bytes_taken)?;
                        start = inner.book.take(bytes_taken, order);
                    }
                }
                Err(error) => return Err(error),
            }
        }
        let start = start.ok_or(CudaError::OUT_OF_MEMORY)?;
        inner.live += 1;
        drop(inner);
        memory::insert(Found {
            kind: Kind::Pool,
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

    /// Waits for what streams have given back and not come to, and takes back what the device's pools do not use.
    #[cold]
    fn make_room(&'static self, context: &'static Context) -> Result<(), CudaError> {
        let waiting = self.inner().book.is_waiting();
        if waiting {
            context.sync()?;
        }
        for pool in POOLS.live().filter(|pool| std::ptr::eq(pool.device, self.device)) {
            pool.trim(&mut pool.inner(), 0);
        }
        Ok(())
    }

    /// The last piece of a pool that was destroyed ends it.
    fn end_if_over(&self, inner: &mut Inner) {
        if !inner.alive && inner.live == 0 && !inner.book.is_waiting() {
            self.trim(inner, 0);
        }
        may_trim(self.device);
    }
}

/// The pools of a device: its own, and the one it uses.
fn of_device(device: &'static Device) -> Result<[&'static Pool; 2], CudaError> {
    let mut all = OF_DEVICE.lock().unwrap_or_else(PoisonError::into_inner);
    if let Some(&pools) = all.get(&device.ordinal) {
        return Ok(pools);
    }
    let own = make(Pool { default: true, ..Pool::new(device, 0, 0, None) })?;
    all.insert(device.ordinal, [own, own]);
    Ok([own, own])
}

fn set_current(device: &'static Device, pool: &'static Pool) -> Result<(), CudaError> {
    let [own, _] = of_device(device)?;
    OF_DEVICE.lock().unwrap_or_else(PoisonError::into_inner).insert(device.ordinal, [own, pool]);
    Ok(())
}

/// A piece of a pool that begins there is not in use any more.
fn take_out(pointer: u64) -> Result<(&'static Pool, Found), CudaError> {
    let found = memory::remove(pointer, |found| found.kind == Kind::Pool).ok_or(CudaError::INVALID_VALUE)?;
    let pool = POOLS.get(found.owner as CUmemoryPool).ok_or(CudaError::INVALID_VALUE)?;
    Ok((pool, found))
}

/// Frees a piece at once; everything that used it is over.
pub(super) fn free_now(pointer: u64) -> Result<(), CudaError> {
    let (pool, found) = take_out(pointer)?;
    let mut inner = pool.inner();
    inner.book.give(found.start, rounded(found.bytes)?);
    inner.live -= 1;
    pool.end_if_over(&mut inner);
    Ok(())
}

/// Frees a piece when the stream has come to it.
fn free_later(pointer: u64, stream: &'static Stream) -> Result<(), CudaError> {
    let (pool, found) = take_out(pointer)?;
    let (context, track) = stream.place();
    let order = (context.device.ordinal, track);
    let ticket = {
        let mut inner = pool.inner();
        inner.live -= 1;
        inner.book.give_later(found.start, rounded(found.bytes)?, order)
    };
    stream.in_order(move || {
        let mut inner = pool.inner();
        inner.book.settle(ticket);
        pool.end_if_over(&mut inner);
    })
}

/// The program has synchronised: what pools have beyond their thresholds goes back to the card.
#[inline]
pub(super) fn at_sync(device: &'static Device) {
    if MAY_TRIM.load(Ordering::Acquire) >> (device.ordinal as u64 % 64) & 1 == 1 {
        trim_device(device);
    }
}

#[cold]
fn trim_device(device: &'static Device) {
    MAY_TRIM.fetch_and(!(1 << (device.ordinal as u64 % 64)), Ordering::AcqRel);
    for pool in POOLS.live().filter(|pool| std::ptr::eq(pool.device, device)) {
        let mut inner = pool.inner();
        let keep = if inner.alive { inner.threshold } else { 0 };
        pool.trim(&mut inner, keep);
    }
}

/// Pieces go with the context whose stream they were allocated in.
pub(super) fn drop_all(context: &'static Context) {
    let own = |found: &Found| {
        found.kind == Kind::Pool && found.context.is_some_and(|other| std::ptr::eq(other, context))
    };
    for piece in memory::list(own) {
        let _ = free_now(piece.start);
    }
    for pool in POOLS.live().filter(|pool| std::ptr::eq(pool.device, context.device)) {
        pool.trim(&mut pool.inner(), 0);
    }
}

/// How memory of a pool can be given to other processes.
pub(super) fn handle_types(pool: usize) -> u64 {
    POOLS.get(pool as CUmemoryPool).map_or(0, |pool| u64::from(pool.handle_types))
}
