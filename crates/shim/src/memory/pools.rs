//! Stream-ordered memory, and the pools that it comes from.
//!
//! A pool is counted as a whole: by what it has reserved of the GPU, according to the driver. Before an allocation, as
//! much is reserved as the pool may grow by; afterwards the driver is queried for what it has. A pool shrinks by itself
//! when the program synchronizes, so it is queried then, and whenever memory runs short.
#![allow(unsafe_code)]

use super::allocations::{HandleMap, HeldMemory};
use super::stream_ordered_free::FreedMemory;
use super::{Reservation, checked, current_gpu, linear, lock, retry, with_grant, write_result};
use crate::driver::cuda as driver;
use crate::hook::{StreamVariant, hooks};
use crate::process::{self, Process};
use crate::throttle::boundaries::{self, WaitScope};
use crate::throttle::capture;
use partage_driver_api::cuda::*;
use partage_region::MAX_GPUS;
use std::sync::atomic::{AtomicU32, Ordering::Relaxed};
use std::sync::{Mutex, MutexGuard, TryLockError};

/// Bytes that a pool takes of the GPU at a time.
const POOL_GROWTH_BYTES: u64 = 32 << 20;

/// The pools of this process.
#[derive(Default)]
pub(super) struct MemoryPools {
    /// Pools by GPU and by handle. Locked while the driver allocates, so that the growth can be attributed.
    records: [Mutex<HandleMap<PoolRecord>>; MAX_GPUS],
    /// Bitmap of GPUs with a pool that may have returned memory.
    may_shrink: AtomicU32,
}

/// A pool that has been allocated from.
#[derive(Clone, Copy, Default)]
struct PoolRecord {
    /// Bytes reserved for it in the container's account.
    charged: u64,
    /// Number of allocations in use.
    pieces: u64,
    /// Whether it was destroyed: it ends with its last allocation, and the driver can no longer be queried.
    destroyed: bool,
}

fn key(pool: CUmemoryPool) -> u64 {
    pool.addr() as u64
}

fn handle(key: u64) -> CUmemoryPool {
    std::ptr::with_exposed_provenance_mut(key as usize)
}

/// Reads an attribute of a pool.
fn attribute(pool: u64, attribute: CUmemPool_attribute) -> Option<u64> {
    let mut value = 0u64;
    // SAFETY: the pool exists, and the pointer is to a local `u64`, which is the type of these attributes.
    let answer = unsafe { driver::cuMemPoolGetAttribute(handle(pool), attribute, (&raw mut value).cast()) };
    (answer == CUDA_SUCCESS).then_some(value)
}

impl MemoryPools {
    fn records_of(&self, gpu: usize) -> Result<MutexGuard<'_, HandleMap<PoolRecord>>, CUresult> {
        self.records.get(gpu).map(lock).ok_or(CUDA_ERROR_NOT_PERMITTED)
    }

    fn may_shrink(&self, gpu: usize) {
        self.may_shrink.fetch_or(1 << gpu, Relaxed);
    }

    /// Releases what the GPU's pools have returned to the driver.
    pub(super) fn refresh(&self, process: &Process, gpu: usize) {
        let Some(records) = self.records.get(gpu) else { return };
        let mut records = match records.try_lock() {
            Ok(records) => records,
            Err(TryLockError::Poisoned(poisoned)) => poisoned.into_inner(),
            // The thread that allocates there refreshes it itself.
            Err(TryLockError::WouldBlock) => return,
        };
        self.may_shrink.fetch_and(!(1 << gpu), Relaxed);
        refresh(process, gpu, &mut records);
        if records.iter().any(|(&pool, own)| !own.destroyed && can_shrink(pool, own))
            || process.memory.pending_frees.has_any()
        {
            self.may_shrink(gpu);
        }
    }

    /// Refreshes pools after the program has synchronized.
    #[inline]
    pub(super) fn after_synchronize(process: &Process) {
        let own = &process.memory;
        let gpus = own.pools.may_shrink.load(Relaxed);
        if gpus != 0 {
            own.pending_frees.release_finished(process);
            (0..MAX_GPUS).filter(|gpu| gpus >> gpu & 1 == 1).for_each(|gpu| own.pools.refresh(process, gpu));
        }
    }

    /// Records that an allocation is freed: now, or when the stream has reached the free.
    pub(super) fn piece_freed(
        &self,
        process: &Process,
        held: HeldMemory,
        stream: Option<(CUstream, StreamVariant)>,
    ) {
        let gpu = held.gpu();
        let Some(records) = self.records.get(gpu) else { return };
        let mut records = lock(records);
        self.may_shrink(gpu);
        let Some(pool) = records.get_mut(&held.pool) else { return };
        pool.pieces = pool.pieces.saturating_sub(1);
        if !pool.destroyed || pool.pieces > 0 {
            return;
        }
        let rest = FreedMemory::Bytes(gpu, pool.charged);
        records.remove(&held.pool);
        drop(records);
        match (stream, rest) {
            (Some((stream, variant)), rest) => process.memory.pending_frees.add(rest, stream, variant),
            (None, FreedMemory::Bytes(gpu, bytes)) => process.region.release(gpu, bytes),
            (None, FreedMemory::FreeingPiece(_)) => {}
        }
    }

    /// Returns whether any pool may have returned memory.
    #[inline]
    pub(super) fn any(&self) -> bool {
        self.may_shrink.load(Relaxed) != 0
    }
}

/// Returns whether a pool has more than it uses and more than its release threshold.
fn can_shrink(pool: u64, own: &PoolRecord) -> bool {
    let used = || attribute(pool, CU_MEMPOOL_ATTR_USED_MEM_CURRENT).unwrap_or(0);
    let kept = || attribute(pool, CU_MEMPOOL_ATTR_RELEASE_THRESHOLD).unwrap_or(0);
    own.charged > 0 && own.charged > used() && own.charged > kept()
}

fn refresh(process: &Process, gpu: usize, records: &mut HandleMap<PoolRecord>) {
    for (&pool, own) in records.iter_mut().filter(|(_, own)| !own.destroyed) {
        if let Some(reserved) = attribute(pool, CU_MEMPOOL_ATTR_RESERVED_MEM_CURRENT)
            && reserved < own.charged
        {
            process.region.release(gpu, own.charged - reserved);
            own.charged = reserved;
        }
    }
}

/// Returns unused memory of all pools to the driver.
fn trim(records: &HandleMap<PoolRecord>) {
    for (&pool, _) in records.iter().filter(|(_, own)| !own.destroyed) {
        // SAFETY: the pool exists, because it was not destroyed.
        unsafe { driver::cuMemPoolTrimTo(handle(pool), 0) };
    }
}

/// Reserves what a pool may grow by. Returns zero if there is no room to grow but the pool has enough free memory.
fn reserve_growth(
    process: &Process,
    gpu: usize,
    records: &mut HandleMap<PoolRecord>,
    pool: u64,
    bytes: u64,
) -> Result<u64, CUresult> {
    let step = bytes.checked_next_multiple_of(POOL_GROWTH_BYTES).unwrap_or(u64::MAX);
    let region = &process.region;
    // A pool takes more than the program requested: if there is not enough, nothing counts as refused yet.
    let take = || region.try_reserve(gpu, step);
    if take() {
        return Ok(step);
    }
    region.reclaim_dead_processes_if_due();
    process.memory.pending_frees.release_finished(process);
    refresh(process, gpu, records);
    let room = |pool| {
        let reserved = attribute(pool, CU_MEMPOOL_ATTR_RESERVED_MEM_CURRENT).unwrap_or(0);
        reserved.saturating_sub(attribute(pool, CU_MEMPOOL_ATTR_USED_MEM_CURRENT).unwrap_or(0))
    };
    if room(pool) >= bytes {
        return Ok(0);
    }
    trim(records);
    refresh(process, gpu, records);
    if take() || retry::reserve_with_retry(region, gpu, step) {
        Ok(step)
    } else {
        Err(CUDA_ERROR_OUT_OF_MEMORY)
    }
}

/// Sets the charge of a pool to what it has, out of what was reserved before. Returns false if it has more and that
/// cannot be reserved.
fn settle_charge(process: &Process, gpu: usize, own: &mut PoolRecord, pool: u64, taken: u64) -> bool {
    let have = own.charged.saturating_add(taken);
    // A pool that cannot be queried is assumed to have grown.
    let reserved = attribute(pool, CU_MEMPOOL_ATTR_RESERVED_MEM_CURRENT).unwrap_or(have);
    if reserved > have {
        let there = Reservation::take(process, gpu, reserved - have).map(Reservation::keep).is_ok();
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
    let mut records = pools.records_of(gpu)?;
    let at = key(pool);
    records.entry(at).or_default();
    let taken = reserve_growth(process, gpu, &mut records, at, bytes)?;
    let mut pointer = 0;
    let answer = call(&mut pointer);
    let own = records.entry(at).or_default();
    let paid = settle_charge(process, gpu, own, at, taken);
    checked(answer)?;
    if !paid {
        // It had enough memory, but fragmented, and grew.
        // SAFETY: the allocation was just made, and its address was not handed out.
        unsafe { driver::cuMemFree_v2(pointer) };
        trim(&records);
        refresh(process, gpu, &mut records);
        return Err(CUDA_ERROR_OUT_OF_MEMORY);
    }
    own.pieces += 1;
    drop(records);
    process.memory.record(process, pointer, HeldMemory::of_pool(gpu, at));
    Ok(pointer)
}

/// Returns the device and the GPU of a stream.
fn location_of_stream(process: &Process, stream: CUstream) -> Result<(CUdevice, usize), CUresult> {
    /// Handles up to this number mean default streams, of the thread's context.
    const MAX_DEFAULT_STREAM_HANDLE: usize = 2;
    if let Some(gpu) = process.devices.only() {
        return Ok((0, gpu));
    }
    if stream.addr() > MAX_DEFAULT_STREAM_HANDLE {
        let mut context = std::ptr::null_mut();
        // SAFETY: the stream is the application's, and the pointer is to a local variable.
        if unsafe { driver::cuStreamGetCtx(stream, &mut context) } == CUDA_SUCCESS
            && let Some(place) = process.memory.contexts.location(context)
        {
            return Ok(place);
        }
    }
    let mut device = 0;
    // SAFETY: the pointer is to a local variable, which the driver fills in.
    checked(unsafe { driver::cuCtxGetDevice(&mut device) })?;
    Ok((device, current_gpu(process)?))
}

/// Returns the GPU of a pool; `None` for a pool of another process.
fn gpu_of_pool(process: &Process, pool: CUmemoryPool) -> Option<usize> {
    let known =
        process.memory.pools.records.iter().position(|records| lock(records).contains_key(&key(pool)));
    known.or_else(|| {
        let mut count = 0;
        // SAFETY: the pointer is to a local variable, which the driver fills in.
        unsafe { driver::cuDeviceGetCount(&mut count) };
        let own = (0..count).find(|&device| {
            let mut default = std::ptr::null_mut();
            // SAFETY: the pointer is to a local variable, which the driver fills in.
            let answer = unsafe { driver::cuDeviceGetDefaultMemPool(&mut default, device) };
            answer == CUDA_SUCCESS && default == pool
        })?;
        process.devices.gpu(&process.region, own)
    })
}

/// Allocates in stream order: from the given pool, or from that of the stream's device.
fn allocate_stream_ordered(
    process: &Process,
    bytes: usize,
    pool: Option<CUmemoryPool>,
    (stream, variant): (CUstream, StreamVariant),
    call: impl Fn(&mut CUdeviceptr) -> CUresult,
) -> Result<CUdeviceptr, CUresult> {
    let mut pointer = 0;
    if capture::is_capturing_stream(process, stream, variant) {
        // It becomes a node of a graph, which takes memory when it runs.
        checked(call(&mut pointer))?;
        process.memory.graphs.note_allocating_graph();
        return Ok(pointer);
    }
    if let Some(pool) = pool {
        let Some(gpu) = gpu_of_pool(process, pool) else {
            // Nothing can be allocated from a pool of another process.
            return checked(call(&mut pointer)).map(|()| pointer);
        };
        return allocate(process, gpu, pool, bytes as u64, call);
    }
    let (device, gpu) = location_of_stream(process, stream)?;
    let mut pool = std::ptr::null_mut();
    // SAFETY: the pointer is to a local variable, which the driver fills in.
    checked(unsafe { driver::cuDeviceGetMemPool(&mut pool, device) })?;
    let made = allocate(process, gpu, pool, bytes as u64, call);
    // The pool takes more at a time than is left. Linear memory serves as well, and any stream may free it. But during
    // a capture, allocating it might invalidate the capture.
    match made {
        Err(CUDA_ERROR_OUT_OF_MEMORY) if !process.throttle.is_capturing() => {
            linear::allocate_linear(process, bytes).map_err(|_| CUDA_ERROR_OUT_OF_MEMORY)
        }
        made => made,
    }
}

/// Frees in stream order, with the driver's call.
fn free_stream_ordered(
    pointer: CUdeviceptr,
    stream: CUstream,
    variant: StreamVariant,
    call: impl FnOnce() -> CUresult,
) -> CUresult {
    let Some(process) = process::attached() else { return call() };
    let memory = &process.memory;
    if capture::is_capturing_stream(process, stream, variant) {
        return call();
    }
    if let Some(held) = memory.allocations.remove(pointer) {
        let answer = call();
        if answer != CUDA_SUCCESS {
            memory.record(process, pointer, held);
        } else if held.pool != 0 {
            memory.pools.piece_freed(process, held, Some((stream, variant)));
        } else {
            memory.pools.may_shrink(held.gpu());
            memory.pending_frees.add(FreedMemory::Bytes(held.gpu(), held.bytes), stream, variant);
        }
        return answer;
    }
    let Some(piece) = memory.suballocations.begin_free(pointer) else {
        return memory.oversubscribed.free(pointer, call);
    };
    let answer = call();
    if answer == CUDA_SUCCESS {
        memory.pools.may_shrink(piece.gpu);
        memory.pending_frees.add(FreedMemory::FreeingPiece(piece), stream, variant);
    } else {
        memory.suballocations.restore(&piece);
    }
    answer
}

/// Makes a call that may shrink pools, and refreshes them afterwards.
fn with_shrinking(call: impl FnOnce() -> CUresult) -> CUresult {
    let answer = call();
    if let Some(process) = process::attached() {
        (0..process.region.gpus()).for_each(|gpu| process.memory.pools.refresh(process, gpu));
    }
    answer
}

/// Destroys a pool, with the driver's call.
fn destroy(pool: CUmemoryPool, call: impl FnOnce() -> CUresult) -> CUresult {
    let Some(process) = process::attached() else { return call() };
    let Some(gpu) = gpu_of_pool(process, pool) else { return call() };
    let Ok(mut records) = process.memory.pools.records_of(gpu) else { return call() };
    let at = key(pool);
    if records.contains_key(&at) {
        // The used size is known only as long as the pool exists.
        // SAFETY: the pool is the application's and exists until the call below.
        unsafe { driver::cuMemPoolTrimTo(pool, 0) };
        refresh(process, gpu, &mut records);
    }
    let answer = call();
    if answer != CUDA_SUCCESS {
        return answer;
    }
    let Some(own) = records.get_mut(&at) else { return answer };
    own.destroyed = true;
    if own.pieces == 0 {
        let charged = own.charged;
        records.remove(&at);
        drop(records);
        // Frees that streams have not reached yet.
        if charged > 0 {
            let all = std::ptr::null_mut();
            process.memory.pools.may_shrink(gpu);
            process.memory.pending_frees.add(FreedMemory::Bytes(gpu, charged), all, StreamVariant::Legacy);
        }
    }
    answer
}

/// Returns whether any pool of this process may return memory when a thread waits for work, or streams are marked.
#[inline]
fn wait_matters() -> bool {
    process::attached().is_some_and(|process| process.memory.pools.any()) || boundaries::marked()
}

/// Waits for work with the driver's call.
fn synchronize(scope: WaitScope, call: impl FnOnce() -> CUresult) -> CUresult {
    let answer = if boundaries::marked() { boundaries::wait_for_work(scope, call) } else { call() };
    if let Some(process) = process::attached() {
        MemoryPools::after_synchronize(process);
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
            // SAFETY: the application's arguments, passed on unchanged under the driver function's own contract.
            return unsafe { next(pointer, bytes, stream) };
        }
        with_grant(
            |process| {
                let made = allocate_stream_ordered(process, bytes, None, (stream, variant), |pointer| {
                    // SAFETY: the output pointer is valid for writes; the other arguments are the application's,
                    // unchanged.
                    unsafe { next(pointer, bytes, stream) }
                })?;
                // SAFETY: not null, and the application passed it for the driver to write the result to.
                unsafe { write_result(pointer, made) };
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
            // SAFETY: the application's arguments, passed on unchanged under the driver function's own contract.
            return unsafe { next(pointer, bytes, pool, stream) };
        }
        with_grant(
            |process| {
                let made = allocate_stream_ordered(process, bytes, Some(pool), (stream, variant), |pointer| {
                    // SAFETY: the output pointer is valid for writes; the other arguments are the application's,
                    // unchanged.
                    unsafe { next(pointer, bytes, pool, stream) }
                })?;
                // SAFETY: not null, and the application passed it for the driver to write the result to.
                unsafe { write_result(pointer, made) };
                Ok(())
            })
    }

    fn cuMemFreeAsync(pointer: CUdeviceptr, stream: CUstream) twin cuMemFreeAsync_ptsz |next, variant| {
        // SAFETY: the application's arguments, passed on unchanged under the driver function's own contract.
        free_stream_ordered(pointer, stream, variant, || unsafe { next(pointer, stream) })
    }

    /// Takes no memory, but records the pool's GPU for later allocations.
    fn cuMemPoolCreate(pool: *mut CUmemoryPool, pool_props: *const CUmemPoolProps) |next, _variant| {
        // SAFETY: null, or a structure that the application passed for the driver to read.
        let location = unsafe { pool_props.as_ref() }.map(|props| props.location);
        let on_device = location.filter(|location| location.type_ == CU_MEM_LOCATION_TYPE_DEVICE);
        with_grant(
            |process| {
                let gpu = on_device.map(|location| super::gpu_of_device(process, location.id)).transpose()?;
                // SAFETY: the application's arguments, passed on unchanged under the driver function's own contract.
                checked(unsafe { next(pool, pool_props) })?;
                if let Some(gpu) = gpu.filter(|_| !pool.is_null()) {
                    // SAFETY: not null, and the call succeeded, so the driver has written a handle there.
                    let made = key(unsafe { *pool });
                    process.memory.pools.records_of(gpu)?.insert(made, PoolRecord::default());
                }
                Ok(())
            })
    }

    fn cuMemPoolDestroy(pool: CUmemoryPool) |next, _variant| {
        // SAFETY: the application's arguments, passed on unchanged under the driver function's own contract.
        destroy(pool, || unsafe { next(pool) })
    }

    fn cuMemPoolTrimTo(pool: CUmemoryPool, min_bytes_to_keep: usize) |next, _variant| {
        // SAFETY: the application's arguments, passed on unchanged under the driver function's own contract.
        with_shrinking(|| unsafe { next(pool, min_bytes_to_keep) })
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
        // SAFETY: the application's arguments, passed on unchanged under the driver function's own contract.
        unsafe { next(pool, attribute, value) }
    }

    fn cuStreamSynchronize(stream: CUstream) twin cuStreamSynchronize_ptsz |next, variant| if wait_matters {
        // SAFETY: the application's arguments, passed on unchanged under the driver function's own contract.
        synchronize(WaitScope::Stream(stream, variant), || unsafe { next(stream) })
    }

    fn cuCtxSynchronize() |next, _variant| if wait_matters {
        // SAFETY: the application's arguments, passed on unchanged under the driver function's own contract.
        synchronize(WaitScope::Context, || unsafe { next() })
    }

    fn cuEventSynchronize(event: CUevent) |next, _variant| if wait_matters {
        // SAFETY: the application's arguments, passed on unchanged under the driver function's own contract.
        synchronize(WaitScope::Other, || unsafe { next(event) })
    }
}
