//! The cards' memory in this process: addresses with host pages behind them, which come when they are written to.

use super::super::context::Context;
use super::super::device::Device;
use super::super::session::session;
use super::super::spin::Held;
use super::find::{Found, Kind};
use super::small::BLOCK;
use super::space::{Card, Nobody, Record, Space};
use super::*;
use std::cell::UnsafeCell;
use std::sync::OnceLock;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};

/// What is known of an allocation besides where it is.
#[derive(Clone, Copy)]
pub(in crate::cuda) struct Tag {
    pub(super) kind: Kind,
    pub(super) context: Option<&'static Context>,
    /// Its bytes are in a file that other processes may map.
    pub(super) exported: bool,
    pub(super) sync_memops: bool,
}

impl Tag {
    /// Whether other processes may have it.
    pub(in crate::cuda) fn is_exported(&self) -> bool {
        self.exported
    }

    /// Other processes may have it from now on.
    pub(in crate::cuda) fn set_exported(&mut self) {
        self.exported = true;
    }
}

/// All cards' addresses: one piece of the same size, a power of two, for each.
struct Arena {
    base: u64,
    shift: u32,
    parts: Box<[Part]>,
}

/// One card's addresses. Whoever changes them changes the card's books too, and has the right to both at once.
struct Part {
    device: &'static Device,
    /// The card's generation when the first memory was asked for: what was on a card that fell off the bus is gone.
    generation: u32,
    space: UnsafeCell<Space<Tag>>,
}

// SAFETY: the space is only reached by who has the device's books.
unsafe impl Sync for Part {}

/// A card's addresses and books, held.
struct Open {
    part: &'static Part,
    books: Held<'static, ()>,
}

impl Part {
    #[inline]
    fn open(&'static self) -> Open {
        Open { part: self, books: self.device.books() }
    }
}

impl Open {
    #[inline]
    fn space(&mut self) -> (&mut Space<Tag>, Books<'_>) {
        // SAFETY: the books are held as long as the space is borrowed.
        let space = unsafe { &mut *self.part.space.get() };
        (space, Books { device: self.part.device, books: &self.books })
    }
}

/// The books of a card, held.
struct Books<'a> {
    device: &'static Device,
    books: &'a Held<'static, ()>,
}

static ARENA: OnceLock<Option<Arena>> = OnceLock::new();

/// So many times the card's memory is reserved in addresses. However it is cut up, there is a piece that is long enough.
const PLENTY: u64 = 8;

impl Card for Books<'_> {
    #[inline]
    fn take(&self, bytes: u64) -> Result<(), CudaError> {
        self.device.take_with(self.books, bytes)
    }

    #[inline]
    fn give(&self, bytes: u64) {
        self.device.give_with(self.books, bytes);
    }
}

/// A new number for a piece of memory.
pub(in crate::cuda) fn new_id() -> u64 {
    static NEXT: AtomicU64 = AtomicU64::new(1);
    number(NEXT.fetch_add(1, Ordering::Relaxed), u64::MAX)
}

/// Cards count for themselves; so does everything that is on none.
fn number(count: u64, card: u64) -> u64 {
    count << 6 | card & 63
}

/// Reserves addresses that read as zeros and can be written to, aligned to blocks.
fn reserve_addresses(bytes: usize) -> Option<u64> {
    let length = bytes.checked_add(BLOCK)?;
    // SAFETY: a new private mapping over no other.
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
    // Children have no GPU, dumps need none, and a byte that is written should not cost two megabytes.
    for advice in [libc::MADV_DONTFORK, libc::MADV_DONTDUMP, libc::MADV_NOHUGEPAGE] {
        // SAFETY: the mapping made above; the advice changes nothing of what is in it.
        unsafe { libc::madvise(address, length, advice) };
    }
    Some((address as u64).next_multiple_of(BLOCK as u64))
}

impl Arena {
    fn open() -> Option<Self> {
        let session = session().ok()?;
        let largest = session.devices.iter().map(|device| device.profile.memory.usable()).max()?;
        let mut each = (largest * PLENTY).next_power_of_two().max(BLOCK as u64);
        let count = session.devices.len() as u64;
        let base = loop {
            if let Some(base) = reserve_addresses((each * count) as usize) {
                break base;
            }
            // Somebody limits addresses: fewer are better than none.
            each /= 2;
            if each < largest {
                return None;
            }
        };
        let blocks = u32::try_from(each / BLOCK as u64).ok()?;
        let part = |(index, device): (usize, &'static Device)| Part {
            device,
            generation: device.state.generation(device.gpu),
            space: UnsafeCell::new(Space::new(base + index as u64 * each, blocks)),
        };
        let parts = session.devices.iter().enumerate().map(part).collect();
        Some(Self { base, shift: each.trailing_zeros(), parts })
    }

    #[inline]
    fn part(&'static self, pointer: u64) -> Option<&'static Part> {
        self.parts.get((pointer.checked_sub(self.base)? >> self.shift) as usize)
    }
}

fn arena() -> Option<&'static Arena> {
    ARENA.get_or_init(Arena::open).as_ref()
}

/// The part of the arena that an address is in.
#[inline]
fn part_of(pointer: u64) -> Option<&'static Part> {
    ARENA.get()?.as_ref()?.part(pointer)
}

/// A device's part of the arena, unless the card fell off the bus since, also if it is back.
#[inline]
fn part(device: &'static Device) -> Result<&'static Part, CudaError> {
    let arena = arena().ok_or(CudaError::OUT_OF_MEMORY)?;
    let part = arena.parts.get(device.ordinal as usize).ok_or(CudaError::INVALID_DEVICE)?;
    let generation = device.state.generation(device.gpu);
    if generation.is_multiple_of(2) && part.generation == generation {
        return Ok(part);
    }
    Err(crate::state::GpuLost.into())
}

/// Refuses everything on a card that fell off the bus since, also if it is back.
#[inline]
pub(in crate::cuda) fn check(device: &'static Device) -> Result<(), CudaError> {
    part(device).map(|_| ())
}

/// Memory of the context's card.
#[inline]
pub(in crate::cuda) fn allocate(
    context: &'static Context,
    bytes: usize,
    kind: Kind,
) -> Result<u64, CudaError> {
    allocate_on(context.device, Some(context), bytes, kind)
}

/// Memory of a card, of a context or of none.
#[inline]
pub(in crate::cuda) fn allocate_on(
    device: &'static Device,
    context: Option<&'static Context>,
    bytes: usize,
    kind: Kind,
) -> Result<u64, CudaError> {
    let mut open = part(device)?.open();
    let (space, books) = open.space();
    space.allocate(&books, bytes, Tag { kind, context, exported: false, sync_memops: false })
}

/// Gives it back, if it is of a kind that `accept` takes.
#[inline]
pub(in crate::cuda) fn free(pointer: u64, accept: impl FnOnce(Kind) -> bool) -> Result<(), CudaError> {
    let mut open = part_of(pointer).ok_or(CudaError::INVALID_VALUE)?.open();
    let (space, books) = open.space();
    space.free(&books, pointer, |record| accept(record.tag.kind), scrub)
}

/// Addresses of a card that no memory is accounted for.
pub(in crate::cuda) fn reserve(device: &'static Device, bytes: usize) -> Result<u64, CudaError> {
    let tag = Tag { kind: Kind::Graph, context: None, exported: false, sync_memops: false };
    part(device)?.open().space().0.reserve(bytes, tag)
}

/// Gives them back.
pub(in crate::cuda) fn unreserve(pointer: u64) {
    if let Some(part) = part_of(pointer) {
        let mut open = part.open();
        let _ = open.space().0.free(&Nobody, pointer, |record| record.tag.kind == Kind::Graph, scrub);
    }
}

/// What was written is the system's again, and what other processes see is not ours any more.
fn scrub(record: &Record<Tag>) {
    const PAGE: u64 = 4096;
    if record.tag.exported {
        super::super::sharing::withdraw(record.start);
        return;
    }
    if !record.touched {
        return;
    }
    let (start, end) =
        (record.start.next_multiple_of(PAGE), (record.start + record.bytes as u64) / PAGE * PAGE);
    // Large ones have the rest of their last page to themselves.
    let end = if record.bytes > small::MOST { end + PAGE } else { end };
    if start < end {
        // SAFETY: whole pages of the arena that lie in this allocation only, which nobody uses any more.
        unsafe { libc::madvise(start as *mut c_void, (end - start) as usize, libc::MADV_DONTNEED) };
    }
}

/// What lies at an address, if the address is a card's.
pub(super) fn find(pointer: u64) -> Option<Found> {
    let mut open = part_of(pointer)?.open();
    let device = open.part.device;
    let record = open.space().0.find(pointer)?;
    Some(Found {
        kind: record.tag.kind,
        start: record.start,
        bytes: record.bytes,
        device: Some(device),
        context: record.tag.context,
        id: number(record.number, device.ordinal as u64),
        flags: 0,
        owner: 0,
        sync_memops: record.tag.sync_memops,
    })
}

/// Changes what is known of an allocation; false if there is none.
pub(in crate::cuda) fn update(pointer: u64, change: impl FnOnce(&mut Tag, &mut bool)) -> bool {
    let Some(part) = part_of(pointer) else { return false };
    let mut open = part.open();
    let Some(record) = open.space().0.find_mut(pointer) else { return false };
    change(&mut record.tag, &mut record.touched);
    true
}

/// Whether the bytes lie in one allocation. If they are to be written, notes that.
#[inline]
pub(super) fn covers(pointer: u64, bytes: usize, write: bool) -> Option<(Kind, bool)> {
    let mut open = part_of(pointer)?.open();
    let record = open.space().0.find_mut(pointer)?;
    record.touched |= write;
    Some((record.tag.kind, bytes as u64 <= record.start + record.bytes as u64 - pointer))
}

/// Whether an address is a card's, in use or not.
pub(super) fn is_inside(pointer: u64) -> bool {
    part_of(pointer).is_some()
}

/// Frees everything of a context on its card, except what belongs to pools.
pub(super) fn drop_all(context: &'static Context) {
    let Some(Some(arena)) = ARENA.get() else { return };
    let Some(part) = arena.parts.get(context.device.ordinal as usize) else { return };
    let mut open = part.open();
    let (space, books) = open.space();
    let own: Vec<u64> = space
        .records()
        .filter(|record| record.tag.context.is_some_and(|own| std::ptr::eq(own, context)))
        .map(|record| record.start)
        .collect();
    for start in own {
        let _ = space.free(&books, start, |_| true, scrub);
    }
}

/// Set once a file lies behind any of the arena's addresses: pages that are given up may then have bytes again.
static HAS_FILES: AtomicBool = AtomicBool::new(false);

/// A file is about to lie behind some of the arena's addresses. Nobody moves bytes meanwhile.
pub(in crate::cuda) fn note_file() {
    HAS_FILES.store(true, Ordering::Release);
}

/// Makes zeros of bytes by giving their pages up. False if that is not possible; bytes may be moving.
pub(super) fn clear(start: usize, bytes: usize) -> bool {
    const PAGE: usize = 4096;
    if HAS_FILES.load(Ordering::Acquire) || !is_inside(start as u64) {
        return false;
    }
    let (first, end) = (start.next_multiple_of(PAGE), (start + bytes) / PAGE * PAGE);
    for (from, to) in [(start, first), (end, start + bytes)] {
        // SAFETY: the ends of what is to be zeros.
        unsafe { std::ptr::write_bytes(from as *mut u8, 0, to - from) };
    }
    // SAFETY: whole pages of what is to be zeros, which are private to this process.
    unsafe { libc::madvise(first as *mut c_void, end - first, libc::MADV_DONTNEED) == 0 }
}

/// Puts fresh pages behind addresses of the arena: zeros, of this process only.
pub(in crate::cuda) fn renew(start: u64, bytes: usize) {
    // SAFETY: addresses of the arena, which stay mapped and become zeros.
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
