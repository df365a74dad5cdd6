//! Device memory in this process: one address range per card, backed by host pages that are committed on first write.

use super::super::context::Context;
use super::super::device::Device;
use super::super::session::session;
use super::super::spin_lock::SpinGuard;
use super::address_space::{AddressSpace, AllocationRecord, MemoryAccount, NoAccount};
use super::buddy::BLOCK_BYTES;
use super::lookup::{MemoryKind, MemoryRange};
use super::*;
use std::cell::UnsafeCell;
use std::sync::OnceLock;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};

/// Properties of an allocation besides its location.
#[derive(Clone, Copy)]
pub(in crate::cuda) struct AllocationTag {
    pub(super) kind: MemoryKind,
    pub(super) context: Option<&'static Context>,
    /// Its bytes are in a file that other processes may map.
    pub(super) exported: bool,
    pub(super) sync_memops: bool,
}

impl AllocationTag {
    /// Returns whether the allocation was exported to other processes.
    pub(in crate::cuda) fn is_exported(&self) -> bool {
        self.exported
    }

    /// Marks the allocation as exported to other processes.
    pub(in crate::cuda) fn set_exported(&mut self) {
        self.exported = true;
    }
}

/// The address ranges of all cards, of equal size, a power of two.
struct DeviceArenas {
    base: u64,
    shift: u32,
    spaces: Box<[DeviceSpace]>,
}

/// The address space of one card, protected by the device's accounting lock: every change also changes the
/// accounting.
struct DeviceSpace {
    device: &'static Device,
    /// The card's generation when the arena was created: memory on a card that was lost since is gone.
    generation: u32,
    space: UnsafeCell<AddressSpace<AllocationTag>>,
}

// SAFETY: the address space is accessed only while the device's accounting lock is held.
unsafe impl Sync for DeviceSpace {}

/// A card's address space with the accounting lock held.
struct LockedSpace {
    device_space: &'static DeviceSpace,
    guard: SpinGuard<'static, ()>,
}

impl DeviceSpace {
    #[inline]
    fn lock(&'static self) -> LockedSpace {
        LockedSpace { device_space: self, guard: self.device.lock_accounting() }
    }
}

impl LockedSpace {
    #[inline]
    fn space(&mut self) -> (&mut AddressSpace<AllocationTag>, LockedAccount<'_>) {
        // SAFETY: the accounting lock is held for as long as the address space is borrowed.
        let space = unsafe { &mut *self.device_space.space.get() };
        (space, LockedAccount { device: self.device_space.device, guard: &self.guard })
    }
}

/// A card's memory accounting, locked.
struct LockedAccount<'a> {
    device: &'static Device,
    guard: &'a SpinGuard<'static, ()>,
}

static ARENA: OnceLock<Option<DeviceArenas>> = OnceLock::new();

/// Address space reserved per byte of card memory. However fragmented it becomes, a range of any size is left.
const ADDRESS_SPACE_FACTOR: u64 = 8;

impl MemoryAccount for LockedAccount<'_> {
    #[inline]
    fn charge(&self, bytes: u64) -> Result<(), CudaError> {
        self.device.charge_locked(self.guard, bytes)
    }

    #[inline]
    fn refund(&self, bytes: u64) {
        self.device.refund_locked(self.guard, bytes);
    }
}

/// Returns a unique id for a memory range outside the arena.
pub(in crate::cuda) fn new_id() -> u64 {
    static NEXT: AtomicU64 = AtomicU64::new(1);
    unique_id(NEXT.fetch_add(1, Ordering::Relaxed), u64::MAX)
}

/// Combines a per-card sequence number and a card into a unique id.
fn unique_id(count: u64, card: u64) -> u64 {
    count << 6 | card & 63
}

/// Reserves block-aligned addresses that read as zero and are writable.
fn reserve_addresses(bytes: usize) -> Option<u64> {
    let length = bytes.checked_add(BLOCK_BYTES)?;
    // SAFETY: a new private anonymous mapping that replaces no other.
    let address = unsafe {
        libc::mmap(
            std::ptr::null_mut(),
            length,
            libc::PROT_READ | libc::PROT_WRITE,
            libc::MAP_PRIVATE | libc::MAP_ANONYMOUS | libc::MAP_NORESERVE,
            -1,
            0,
        )
    };
    if address == libc::MAP_FAILED {
        return None;
    }
    // Forked children have no GPU, core dumps do not need it, and writing one byte should not commit 2 MiB.
    for advice in [libc::MADV_DONTFORK, libc::MADV_DONTDUMP, libc::MADV_NOHUGEPAGE] {
        // SAFETY: the range was mapped above, and the advice does not change its contents.
        unsafe { libc::madvise(address, length, advice) };
    }
    Some((address as u64).next_multiple_of(BLOCK_BYTES as u64))
}

impl DeviceArenas {
    fn open() -> Option<Self> {
        let session = session().ok()?;
        let largest = session.devices.iter().map(|device| device.profile.memory.usable()).max()?;
        let mut each = (largest * ADDRESS_SPACE_FACTOR).next_power_of_two().max(BLOCK_BYTES as u64);
        let count = session.devices.len() as u64;
        let base = loop {
            if let Some(base) = reserve_addresses((each * count) as usize) {
                break base;
            }
            // The address space is limited (`ulimit -v`): try with less.
            each /= 2;
            if each < largest {
                return None;
            }
        };
        let blocks = u32::try_from(each / BLOCK_BYTES as u64).ok()?;
        let device_space = |(index, device): (usize, &'static Device)| DeviceSpace {
            device,
            generation: device.state.generation(device.gpu),
            space: UnsafeCell::new(AddressSpace::new(base + index as u64 * each, blocks)),
        };
        let spaces = session.devices.iter().enumerate().map(device_space).collect();
        Some(Self { base, shift: each.trailing_zeros(), spaces })
    }

    #[inline]
    fn device_space(&'static self, pointer: u64) -> Option<&'static DeviceSpace> {
        self.spaces.get((pointer.checked_sub(self.base)? >> self.shift) as usize)
    }
}

fn arena() -> Option<&'static DeviceArenas> {
    ARENA.get_or_init(DeviceArenas::open).as_ref()
}

/// Returns the card's address space that contains an address.
#[inline]
fn space_at(pointer: u64) -> Option<&'static DeviceSpace> {
    ARENA.get()?.as_ref()?.device_space(pointer)
}

/// Returns a device's address space; fails if the GPU was lost since, even if it returned.
#[inline]
fn device_space(device: &'static Device) -> Result<&'static DeviceSpace, CudaError> {
    let arena = arena().ok_or(CudaError::OUT_OF_MEMORY)?;
    let device_space = arena.spaces.get(device.ordinal as usize).ok_or(CudaError::INVALID_DEVICE)?;
    let generation = device.state.generation(device.gpu);
    if generation.is_multiple_of(2) && device_space.generation == generation {
        return Ok(device_space);
    }
    Err(crate::state::GpuLost.into())
}

/// Fails if the GPU was lost since the arena was created, even if it returned.
#[inline]
pub(in crate::cuda) fn check(device: &'static Device) -> Result<(), CudaError> {
    device_space(device).map(|_| ())
}

/// Allocates memory on the context's card.
#[inline]
pub(in crate::cuda) fn allocate(
    context: &'static Context,
    bytes: usize,
    kind: MemoryKind,
) -> Result<u64, CudaError> {
    allocate_on(context.device, Some(context), bytes, kind)
}

/// Allocates memory on a card, for a context or for none.
#[inline]
pub(in crate::cuda) fn allocate_on(
    device: &'static Device,
    context: Option<&'static Context>,
    bytes: usize,
    kind: MemoryKind,
) -> Result<u64, CudaError> {
    let mut locked = device_space(device)?.lock();
    let (space, account) = locked.space();
    space.allocate(&account, bytes, AllocationTag { kind, context, exported: false, sync_memops: false })
}

/// Frees an allocation if `accept` returns true for its kind.
#[inline]
pub(in crate::cuda) fn free(pointer: u64, accept: impl FnOnce(MemoryKind) -> bool) -> Result<(), CudaError> {
    let mut locked = space_at(pointer).ok_or(CudaError::INVALID_VALUE)?.lock();
    let (space, account) = locked.space();
    space.free(&account, pointer, |record| accept(record.tag.kind), discard_pages)
}

/// Reserves addresses on a card without charging memory.
pub(in crate::cuda) fn reserve(device: &'static Device, bytes: usize) -> Result<u64, CudaError> {
    let tag = AllocationTag { kind: MemoryKind::Graph, context: None, exported: false, sync_memops: false };
    device_space(device)?.lock().space().0.reserve(bytes, tag)
}

/// Frees addresses from `reserve`.
pub(in crate::cuda) fn unreserve(pointer: u64) {
    if let Some(device_space) = space_at(pointer) {
        let mut locked = device_space.lock();
        let _ = locked.space().0.free(
            &NoAccount,
            pointer,
            |record| record.tag.kind == MemoryKind::Graph,
            discard_pages,
        );
    }
}

/// Discards the pages of a freed allocation; unexports it if other processes may map it.
fn discard_pages(record: &AllocationRecord<AllocationTag>) {
    const PAGE_BYTES: u64 = 4096;
    if record.tag.exported {
        super::super::sharing::unexport(record.start);
        return;
    }
    if !record.touched {
        return;
    }
    let (start, end) = (
        record.start.next_multiple_of(PAGE_BYTES),
        (record.start + record.bytes as u64) / PAGE_BYTES * PAGE_BYTES,
    );
    // No other allocation shares the last page of a large allocation.
    let end = if record.bytes > buddy::MAX_SMALL_BYTES { end + PAGE_BYTES } else { end };
    if start < end {
        // SAFETY: whole pages inside the arena that belong to this allocation only, which is no longer in use.
        unsafe { libc::madvise(start as *mut c_void, (end - start) as usize, libc::MADV_DONTNEED) };
    }
}

/// Returns the allocation that contains an address of a card.
pub(super) fn find(pointer: u64) -> Option<MemoryRange> {
    let mut locked = space_at(pointer)?.lock();
    let device = locked.device_space.device;
    let record = locked.space().0.find(pointer)?;
    Some(MemoryRange {
        kind: record.tag.kind,
        start: record.start,
        bytes: record.bytes,
        device: Some(device),
        context: record.tag.context,
        id: unique_id(record.number, device.ordinal as u64),
        flags: 0,
        owner: 0,
        sync_memops: record.tag.sync_memops,
    })
}

/// Changes the properties of an allocation; returns false if there is none.
pub(in crate::cuda) fn update(pointer: u64, change: impl FnOnce(&mut AllocationTag, &mut bool)) -> bool {
    let Some(device_space) = space_at(pointer) else { return false };
    let mut locked = device_space.lock();
    let Some(record) = locked.space().0.find_mut(pointer) else { return false };
    change(&mut record.tag, &mut record.touched);
    true
}

/// Returns the kind of the allocation at an address and whether it contains all bytes; with `write`, marks it as
/// written.
#[inline]
pub(super) fn covers(pointer: u64, bytes: usize, write: bool) -> Option<(MemoryKind, bool)> {
    let mut locked = space_at(pointer)?.lock();
    let record = locked.space().0.find_mut(pointer)?;
    record.touched |= write;
    Some((record.tag.kind, bytes as u64 <= record.start + record.bytes as u64 - pointer))
}

/// Returns whether an address belongs to a card, allocated or not.
pub(super) fn is_inside(pointer: u64) -> bool {
    space_at(pointer).is_some()
}

/// Frees everything of a context on its card, except memory of pools.
pub(super) fn drop_all(context: &'static Context) {
    let Some(Some(arena)) = ARENA.get() else { return };
    let Some(device_space) = arena.spaces.get(context.device.ordinal as usize) else { return };
    let mut locked = device_space.lock();
    let (space, account) = locked.space();
    let own: Vec<u64> = space
        .records()
        .filter(|record| record.tag.context.is_some_and(|own| std::ptr::eq(own, context)))
        .map(|record| record.start)
        .collect();
    for start in own {
        let _ = space.free(&account, start, |_| true, discard_pages);
    }
}

/// Set once a file is mapped into the arena: discarding pages of a file mapping does not zero them.
static HAS_MAPPED_FILES: AtomicBool = AtomicBool::new(false);

/// Records that a file is about to be mapped into the arena. The caller holds the remap lock.
pub(in crate::cuda) fn note_file() {
    HAS_MAPPED_FILES.store(true, Ordering::Release);
}

/// Zeroes a range by discarding its pages. Returns false if that is not possible. The caller holds the remap lock for
/// reading.
pub(super) fn clear(start: usize, bytes: usize) -> bool {
    const PAGE_BYTES: usize = 4096;
    if HAS_MAPPED_FILES.load(Ordering::Acquire) || !is_inside(start as u64) {
        return false;
    }
    let (first, end) = (start.next_multiple_of(PAGE_BYTES), (start + bytes) / PAGE_BYTES * PAGE_BYTES);
    for (from, to) in [(start, first), (end, start + bytes)] {
        // SAFETY: the partial pages at both ends of the range to be zeroed.
        unsafe { std::ptr::write_bytes(from as *mut u8, 0, to - from) };
    }
    // SAFETY: whole pages of the range to be zeroed, private to this process.
    unsafe { libc::madvise(first as *mut c_void, end - first, libc::MADV_DONTNEED) == 0 }
}

/// Maps fresh private zero pages over addresses of the arena.
pub(in crate::cuda) fn replace_pages(start: u64, bytes: usize) {
    // SAFETY: the range is inside the arena and stays mapped.
    unsafe {
        libc::mmap(
            start as *mut c_void,
            bytes,
            libc::PROT_READ | libc::PROT_WRITE,
            libc::MAP_PRIVATE | libc::MAP_ANONYMOUS | libc::MAP_NORESERVE | libc::MAP_FIXED,
            -1,
            0,
        )
    };
}
