//! Memory in stream order, and the pools it comes from.
//!
//! A pool counts as a whole: what it has reserved of the card, as the driver tells it. Before an allocation as much is
//! taken as the pool may grow by; afterwards the driver is asked what it has. A pool shrinks by itself when the program
//! synchronises, so it is looked at then, and whenever memory runs short.
#![allow(unsafe_code)]

use super::allocations::{Held, Table};
use super::stream_ordered_free::What;
use super::{Reserved, answer, checked, granted, here, linear, locked, retry};
use crate::driver::cuda as real;
use crate::hook::{Variant, hooks};
use crate::process::{self, Process};
use crate::throttle::capture;
use partage_driver_api::cuda::*;
use partage_region::MAX_GPUS;
use std::sync::atomic::{AtomicU32, Ordering::Relaxed};
use std::sync::{Mutex, MutexGuard, TryLockError};

/// What a pool takes of the card at a time.
const STEP: u64 = 32 << 20;

/// The pools of this process.
#[derive(Default)]
pub(super) struct Pools {
    /// By GPU, and by handle. Held while the driver allocates: whose growth it is must be known.
    books: [Mutex<Table<Pool>>; MAX_GPUS],
    /// A bit for every GPU with a pool that may have given something back.
    may_shrink: AtomicU32,
}

/// A pool that was allocated from.
#[derive(Clone, Copy, Default)]
struct Pool {
    /// What is taken for it from the container's account.
    charged: u64,
    /// Pieces in use.
    pieces: u64,
    /// Destroyed: it ends with its last piece, and the driver cannot be asked any more.
    destroyed: bool,
}

fn key(pool: CUmemoryPool) -> u64 {
    pool.addr() as u64
}

fn handle(key: u64) -> CUmemoryPool {
    std::ptr::with_exposed_provenance_mut(key as usize)
}

/// A number that the driver knows of a pool.
fn attribute(pool: u64, attribute: CUmemPool_attribute) -> Option<u64> {
    let mut value = 0u64;
    // SAFETY: a live pool, and a number of the size that these attributes have.
    let answer = unsafe { real::cuMemPoolGetAttribute(handle(pool), attribute, (&raw mut value).cast()) };
    (answer == CUDA_SUCCESS).then_some(value)
}

impl Pools {
    fn book(&self, gpu: usize) -> Result<MutexGuard<'_, Table<Pool>>, CUresult> {
        self.books.get(gpu).map(locked).ok_or(CUDA_ERROR_NOT_PERMITTED)
    }

    fn may_shrink(&self, gpu: usize) {
        self.may_shrink.fetch_or(1 << gpu, Relaxed);
    }

    /// Gives back what the GPU's pools gave back.
    pub(super) fn refresh(&self, process: &Process, gpu: usize) {
        let Some(book) = self.books.get(gpu) else { return };
        let mut book = match book.try_lock() {
            Ok(book) => book,
            Err(TryLockError::Poisoned(poisoned)) => poisoned.into_inner(),
            // Whoever allocates there looks itself.
            Err(TryLockError::WouldBlock) => return,
        };
        self.may_shrink.fetch_and(!(1 << gpu), Relaxed);
        refresh(process, gpu, &mut book);
        if book.iter().any(|(&pool, own)| !own.destroyed && can_shrink(pool, own))
            || process.memory.later.any()
        {
            self.may_shrink(gpu);
        }
    }

    /// The program has synchronised.
    #[inline]
    pub(super) fn at_sync(process: &Process) {
        let own = &process.memory;
        let gpus = own.pools.may_shrink.load(Relaxed);
        if gpus != 0 {
            own.later.look(process);
            (0..MAX_GPUS).filter(|gpu| gpus >> gpu & 1 == 1).for_each(|gpu| own.pools.refresh(process, gpu));
        }
    }

    /// A piece is freed: now, or when the stream has come to here.
    pub(super) fn piece_gone(&self, process: &Process, held: Held, stream: Option<(CUstream, Variant)>) {
        let gpu = held.gpu();
        let Some(book) = self.books.get(gpu) else { return };
        let mut book = locked(book);
        self.may_shrink(gpu);
        let Some(pool) = book.get_mut(&held.pool) else { return };
        pool.pieces = pool.pieces.saturating_sub(1);
        if !pool.destroyed || pool.pieces > 0 {
            return;
        }
        let rest = What::Bytes(gpu, pool.charged);
        book.remove(&held.pool);
        drop(book);
        match (stream, rest) {
            (Some((stream, variant)), rest) => process.memory.later.add(rest, stream, variant),
            (None, What::Bytes(gpu, bytes)) => process.region.release(gpu, bytes),
            (None, What::Piece(_)) => {}
        }
    }

    /// Whether any of them may have given something back.
    #[inline]
    pub(super) fn any(&self) -> bool {
        self.may_shrink.load(Relaxed) != 0
    }
}

/// Whether a pool has more than it uses and was told to keep.
fn can_shrink(pool: u64, own: &Pool) -> bool {
    let used = || attribute(pool, CU_MEMPOOL_ATTR_USED_MEM_CURRENT).unwrap_or(0);
    let kept = || attribute(pool, CU_MEMPOOL_ATTR_RELEASE_THRESHOLD).unwrap_or(0);
    own.charged > 0 && own.charged > used() && own.charged > kept()
}

fn refresh(process: &Process, gpu: usize, book: &mut Table<Pool>) {
    for (&pool, own) in book.iter_mut().filter(|(_, own)| !own.destroyed) {
        if let Some(reserved) = attribute(pool, CU_MEMPOOL_ATTR_RESERVED_MEM_CURRENT)
            && reserved < own.charged
        {
            process.region.release(gpu, own.charged - reserved);
            own.charged = reserved;
        }
    }
}

/// Gives the card back what no piece is in.
fn trim(book: &Table<Pool>) {
    for (&pool, _) in book.iter().filter(|(_, own)| !own.destroyed) {
        // SAFETY: a live pool.
        unsafe { real::cuMemPoolTrimTo(handle(pool), 0) };
    }
}

/// Takes what a pool may grow by. None: it may grow by nothing, but has room.
fn prepare(
    process: &Process,
    gpu: usize,
    book: &mut Table<Pool>,
    pool: u64,
    bytes: u64,
) -> Result<u64, CUresult> {
    let step = bytes.checked_next_multiple_of(STEP).unwrap_or(u64::MAX);
    let region = &process.region;
    // A pool asks for more than the program did: if there is not as much, nothing has been refused yet.
    let take = || region.try_reserve(gpu, step);
    if take() {
        return Ok(step);
    }
    region.tidy();
    process.memory.later.look(process);
    refresh(process, gpu, book);
    let room = |pool| {
        let reserved = attribute(pool, CU_MEMPOOL_ATTR_RESERVED_MEM_CURRENT).unwrap_or(0);
        reserved.saturating_sub(attribute(pool, CU_MEMPOOL_ATTR_USED_MEM_CURRENT).unwrap_or(0))
    };
    if room(pool) >= bytes {
        return Ok(0);
    }
    trim(book);
    refresh(process, gpu, book);
    if take() || retry::take(region, gpu, step) { Ok(step) } else { Err(CUDA_ERROR_OUT_OF_MEMORY) }
}

/// Sets what a pool is charged to what it has, out of what was taken before; false if it has more and that is not there.
fn settle(process: &Process, gpu: usize, own: &mut Pool, pool: u64, taken: u64) -> bool {
    let have = own.charged.saturating_add(taken);
    // A pool that cannot be asked is assumed to have grown.
    let reserved = attribute(pool, CU_MEMPOOL_ATTR_RESERVED_MEM_CURRENT).unwrap_or(have);
    if reserved > have {
        let there = Reserved::take(process, gpu, reserved - have).map(Reserved::keep).is_ok();
        own.charged = if there { reserved } else { have };
        return there;
    }
    if reserved < have {
        process.region.release(gpu, have - reserved);
    }
    own.charged = reserved;
    true
}

/// Allocates from a pool, with the driver's call.
fn allocate(
    process: &Process,
    gpu: usize,
    pool: CUmemoryPool,
    bytes: u64,
    call: impl FnOnce(&mut CUdeviceptr) -> CUresult,
) -> Result<CUdeviceptr, CUresult> {
    let pools = &process.memory.pools;
    let mut book = pools.book(gpu)?;
    let at = key(pool);
    book.entry(at).or_default();
    let taken = prepare(process, gpu, &mut book, at, bytes)?;
    let mut pointer = 0;
    let answer = call(&mut pointer);
    let own = book.entry(at).or_default();
    let paid = settle(process, gpu, own, at, taken);
    checked(answer)?;
    if !paid {
        // It had room, but not in one piece, and grew.
        // SAFETY: just allocated, and nobody knows of it.
        unsafe { real::cuMemFree_v2(pointer) };
        trim(&book);
        refresh(process, gpu, &mut book);
        return Err(CUDA_ERROR_OUT_OF_MEMORY);
    }
    own.pieces += 1;
    drop(book);
    process.memory.note(process, pointer, Held::of_pool(gpu, at));
    Ok(pointer)
}

/// The device and GPU that a stream is of.
fn place_of(process: &Process, stream: CUstream) -> Result<(CUdevice, usize), CUresult> {
    /// Handles up to this mean default streams, of the thread's context.
    const DEFAULT: usize = 2;
    if let Some(gpu) = process.devices.only() {
        return Ok((0, gpu));
    }
    if stream.addr() > DEFAULT {
        let mut context = std::ptr::null_mut();
        // SAFETY: the program's stream, and a handle to fill in.
        if unsafe { real::cuStreamGetCtx(stream, &mut context) } == CUDA_SUCCESS
            && let Some(place) = process.memory.contexts.place(context)
        {
            return Ok(place);
        }
    }
    let mut device = 0;
    // SAFETY: a number to fill in.
    checked(unsafe { real::cuCtxGetDevice(&mut device) })?;
    Ok((device, here(process)?))
}

/// The GPU of a pool; none for one of another process.
fn gpu_of(process: &Process, pool: CUmemoryPool) -> Option<usize> {
    let known = process.memory.pools.books.iter().position(|book| locked(book).contains_key(&key(pool)));
    known.or_else(|| {
        let mut count = 0;
        // SAFETY: a number to fill in.
        unsafe { real::cuDeviceGetCount(&mut count) };
        let own = (0..count).find(|&device| {
            let mut default = std::ptr::null_mut();
            // SAFETY: a handle to fill in.
            let answer = unsafe { real::cuDeviceGetDefaultMemPool(&mut default, device) };
            answer == CUDA_SUCCESS && default == pool
        })?;
        process.devices.gpu(&process.region, own)
    })
}

/// Allocates in a stream's order: from the pool, or from that of the stream's device.
fn allocate_in(
    process: &Process,
    bytes: usize,
    pool: Option<CUmemoryPool>,
    (stream, variant): (CUstream, Variant),
    call: impl Fn(&mut CUdeviceptr) -> CUresult,
) -> Result<CUdeviceptr, CUresult> {
    let mut pointer = 0;
    if capture::is_captured_now(process, stream, variant) {
        // A node of a graph: it takes memory when the graph runs.
        checked(call(&mut pointer))?;
        process.memory.graphs.has_memory();
        return Ok(pointer);
    }
    if let Some(pool) = pool {
        let Some(gpu) = gpu_of(process, pool) else {
            // Nothing can be allocated from a pool of another process.
            return checked(call(&mut pointer)).map(|()| pointer);
        };
        return allocate(process, gpu, pool, bytes as u64, call);
    }
    let (device, gpu) = place_of(process, stream)?;
    let mut pool = std::ptr::null_mut();
    // SAFETY: a handle to fill in.
    checked(unsafe { real::cuDeviceGetMemPool(&mut pool, device) })?;
    let made = allocate(process, gpu, pool, bytes as u64, call);
    // The pool takes more at a time than there is left. Plain memory serves as well, and any stream may free it. But where
    // something is captured, allocating it may spoil that.
    match made {
        Err(CUDA_ERROR_OUT_OF_MEMORY) if !process.throttle.is_capturing() => {
            linear::allocate_plainly(process, bytes).map_err(|_| CUDA_ERROR_OUT_OF_MEMORY)
        }
        made => made,
    }
}

/// Frees in a stream's order, with the driver's call.
fn free_in(
    pointer: CUdeviceptr,
    stream: CUstream,
    variant: Variant,
    call: impl FnOnce() -> CUresult,
) -> CUresult {
    let Some(process) = process::attached() else { return call() };
    let memory = &process.memory;
    if capture::is_captured_now(process, stream, variant) {
        return call();
    }
    if let Some(held) = memory.allocations.remove(pointer) {
        let answer = call();
        if answer != CUDA_SUCCESS {
            memory.note(process, pointer, held);
        } else if held.pool != 0 {
            memory.pools.piece_gone(process, held, Some((stream, variant)));
        } else {
            memory.pools.may_shrink(held.gpu());
            memory.later.add(What::Bytes(held.gpu(), held.bytes), stream, variant);
        }
        return answer;
    }
    let Some(piece) = memory.small.begin_to_free(pointer) else { return memory.beyond.free(pointer, call) };
    let answer = call();
    if answer == CUDA_SUCCESS {
        memory.pools.may_shrink(piece.gpu);
        memory.later.add(What::Piece(piece), stream, variant);
    } else {
        memory.small.kept(&piece);
    }
    answer
}

/// Does what may make pools shrink, and looks what they have afterwards.
fn shrinking(call: impl FnOnce() -> CUresult) -> CUresult {
    let answer = call();
    if let Some(process) = process::attached() {
        (0..process.region.gpus()).for_each(|gpu| process.memory.pools.refresh(process, gpu));
    }
    answer
}

/// Ends a pool, with the driver's call.
fn destroy(pool: CUmemoryPool, call: impl FnOnce() -> CUresult) -> CUresult {
    let Some(process) = process::attached() else { return call() };
    let Some(gpu) = gpu_of(process, pool) else { return call() };
    let Ok(mut book) = process.memory.pools.book(gpu) else { return call() };
    let at = key(pool);
    if book.contains_key(&at) {
        // What is in use is known only as long as it lives.
        // SAFETY: a live pool.
        unsafe { real::cuMemPoolTrimTo(pool, 0) };
        refresh(process, gpu, &mut book);
    }
    let answer = call();
    if answer != CUDA_SUCCESS {
        return answer;
    }
    let Some(own) = book.get_mut(&at) else { return answer };
    own.destroyed = true;
    if own.pieces == 0 {
        let charged = own.charged;
        book.remove(&at);
        drop(book);
        // What streams have yet to come to.
        if charged > 0 {
            let all = std::ptr::null_mut();
            process.memory.pools.may_shrink(gpu);
            process.memory.later.add(What::Bytes(gpu, charged), all, Variant::Plain);
        }
    }
    answer
}

/// Whether any pool of this process may have given something back.
#[inline]
fn may_shrink() -> bool {
    process::attached().is_some_and(|process| process.memory.pools.any() || process.throttle.awaits())
}

fn synchronised(answer: CUresult) -> CUresult {
    if let Some(process) = process::attached() {
        Pools::at_sync(process);
        if process.throttle.awaits() {
            process.throttle.synchronised(process);
        }
    }
    answer
}

hooks! { cuda;
    fn cuMemAllocAsync(
        pointer: *mut CUdeviceptr,
        bytes: usize,
        stream: CUstream,
    ) twin cuMemAllocAsync_ptsz |next, variant| {
        if pointer.is_null() || bytes == 0 {
            // SAFETY: the program's promise.
            return unsafe { next(pointer, bytes, stream) };
        }
        granted(
            |process| {
                let made = allocate_in(process, bytes, None, (stream, variant), |pointer| {
                    // SAFETY: a number to fill in, and the program's promise.
                    unsafe { next(pointer, bytes, stream) }
                })?;
                // SAFETY: not null, and the program's to write.
                unsafe { answer(pointer, made) };
                Ok(())
            })
    }

    fn cuMemAllocFromPoolAsync(
        pointer: *mut CUdeviceptr,
        bytes: usize,
        pool: CUmemoryPool,
        stream: CUstream,
    ) twin cuMemAllocFromPoolAsync_ptsz |next, variant| {
        if pointer.is_null() || bytes == 0 || pool.is_null() {
            // SAFETY: the program's promise.
            return unsafe { next(pointer, bytes, pool, stream) };
        }
        granted(
            |process| {
                let made = allocate_in(process, bytes, Some(pool), (stream, variant), |pointer| {
                    // SAFETY: a number to fill in, and the program's promise.
                    unsafe { next(pointer, bytes, pool, stream) }
                })?;
                // SAFETY: not null, and the program's to write.
                unsafe { answer(pointer, made) };
                Ok(())
            })
    }

    fn cuMemFreeAsync(pointer: CUdeviceptr, stream: CUstream) twin cuMemFreeAsync_ptsz |next, variant| {
        // SAFETY: the program's promise.
        free_in(pointer, stream, variant, || unsafe { next(pointer, stream) })
    }

    /// Takes nothing yet; but whose it is must be known when it does.
    fn cuMemPoolCreate(pool: *mut CUmemoryPool, pool_props: *const CUmemPoolProps) |next, _variant| {
        // SAFETY: null, or the program's; the driver refuses null.
        let location = unsafe { pool_props.as_ref() }.map(|props| props.location);
        let on_device = location.filter(|location| location.type_ == CU_MEM_LOCATION_TYPE_DEVICE);
        granted(
            |process| {
                let gpu = on_device.map(|location| super::of_device(process, location.id)).transpose()?;
                // SAFETY: the program's promise.
                checked(unsafe { next(pool, pool_props) })?;
                if let Some(gpu) = gpu.filter(|_| !pool.is_null()) {
                    // SAFETY: not null, and the driver has just written there.
                    let made = key(unsafe { *pool });
                    process.memory.pools.book(gpu)?.insert(made, Pool::default());
                }
                Ok(())
            })
    }

    fn cuMemPoolDestroy(pool: CUmemoryPool) |next, _variant| {
        // SAFETY: the program's promise.
        destroy(pool, || unsafe { next(pool) })
    }

    fn cuMemPoolTrimTo(pool: CUmemoryPool, min_bytes_to_keep: usize) |next, _variant| {
        // SAFETY: the program's promise.
        shrinking(|| unsafe { next(pool, min_bytes_to_keep) })
    }

    fn cuMemPoolSetAttribute(
        pool: CUmemoryPool,
        attribute: CUmemPool_attribute,
        value: *mut c_void,
    ) |next, _variant| {
        if let Some(process) = process::attached()
            && attribute == CU_MEMPOOL_ATTR_RELEASE_THRESHOLD
        {
            (0..process.region.gpus()).for_each(|gpu| process.memory.pools.may_shrink(gpu));
        }
        // SAFETY: the program's promise.
        unsafe { next(pool, attribute, value) }
    }

    fn cuStreamSynchronize(stream: CUstream) twin cuStreamSynchronize_ptsz |next, _variant| if may_shrink {
        // SAFETY: the program's promise.
        synchronised(unsafe { next(stream) })
    }

    fn cuCtxSynchronize() |next, _variant| if may_shrink {
        // SAFETY: the program's promise.
        synchronised(unsafe { next() })
    }

    fn cuEventSynchronize(event: CUevent) |next, _variant| if may_shrink {
        // SAFETY: the program's promise.
        synchronised(unsafe { next(event) })
    }
}
