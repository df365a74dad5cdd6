//! The process's side of the region: takes a slot of `usage`, and reserves memory before it is allocated.
//!
//! A process may be killed at any instruction: the next process that looks finds its slot free, and exactly what it
//! held is released. No contents of the files make this code panic or loop forever.

use crate::error::{RegionError, ReservationRefused};
use crate::failpoint::point;
use crate::layout::{
    GpuAccount, GpuLimits, LayoutVersion, LimitsFile, MARKERS_OFFSET, ProcessLane, ProcessSlot, UsageFile,
};
use crate::liveness_lock::LivenessLocks;
use crate::markers::{ActivitySample, MarkerArea, MarkerPage, PageOwner};
use crate::memory_account::{self, MEMORY_UNIT, MemoryAccount, SlotTable, SlotWords, UNLIMITED, units};
use crate::mmap::{self, MappedFile};
use crate::owner::{self, RegionPolicy};
use crate::protocol::{
    LIVENESS_LOCKS_AT, MAX_GPUS, NO_MEMORY_LIMIT, PID_LOCKS_AT, RECLAIM_LOCK_SLOT, SLOT_COUNT,
};
use crate::{LIMITS_FILE, USAGE_FILE, futex};
use core::sync::atomic::AtomicBool;
use core::sync::atomic::Ordering::{AcqRel, Acquire, Relaxed, Release};
use std::array;
use std::mem::offset_of;
use std::os::unix::fs::MetadataExt;
use std::path::Path;
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::Duration;

/// A process's attachment to its container's region. Dropping it releases everything that it holds.
#[derive(Debug)]
pub struct RegionTenant {
    limits: MappedFile<LimitsFile>,
    layout: LayoutVersion,
    usage: MappedFile<UsageFile>,
    /// In layouts without markers, memory of this process: it limits its own rate by them.
    markers: MappedFile<MarkerArea>,
    has_shared_markers: bool,
    alive: LivenessLocks,
    slot: usize,
    /// Ensures that one thread at a time changes this process's lane on a GPU.
    lanes: [Mutex<()>; MAX_GPUS],
    /// Whether a thread of this process is reclaiming slots of dead processes.
    reclaiming: AtomicBool,
}

/// A live process of the container.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct TenantProcess {
    /// Slot of the process.
    pub slot: usize,
    /// Pid in its own pid namespace.
    pub pid: u32,
    /// Pid in the caller's pid namespace, if it has one there.
    pub pid_here: Option<u32>,
    /// Clock ticks between the machine's boot and the process's start; together with the pid it is unique.
    pub started: u64,
    /// Inode of the pid namespace that `pid` belongs to.
    pub namespace: u64,
    /// Bytes that it holds on each GPU.
    pub held: [u64; MAX_GPUS],
}

/// The lanes of all slots on one GPU.
#[derive(Clone, Copy, Debug)]
struct GpuLanes<'a> {
    slots: &'a [ProcessSlot; SLOT_COUNT],
    gpu: usize,
}

impl SlotTable for GpuLanes<'_> {
    #[inline]
    fn words(&self, slot: usize) -> Option<SlotWords<'_>> {
        let slot = self.slots.get(slot)?;
        let lane = slot.lanes.get(self.gpu)?;
        Some(SlotWords {
            total: &lane.total,
            intent: &lane.intent,
            confirmed: slot.confirmed.0.get(self.gpu)?,
        })
    }
}

impl RegionTenant {
    /// Takes a slot of the region in `folder`, which may have any supported layout.
    pub fn attach(folder: &Path) -> Result<Self, RegionError> {
        let path = folder.join(LIMITS_FILE);
        let file = mmap::open(&path, false)?;
        let layout = mmap::check::<LimitsFile>(&file, &path)?;
        let limits = MappedFile::new(&file, &path, false)?;
        drop(file);
        let path = folder.join(USAGE_FILE);
        let file = mmap::open(&path, true)?;
        let has_markers = mmap::check::<UsageFile>(&file, &path)?.has_markers();
        mmap::allocate(&file, &path, 0, offset_of!(UsageFile, slots))?;
        let usage = MappedFile::new(&file, &path, true)?;
        let has_shared_markers = has_markers && layout.has_markers();
        let markers = if has_shared_markers {
            mmap::allocate(&file, &path, MARKERS_OFFSET, offset_of!(MarkerArea, pages))?;
            MappedFile::new(&file, &path, true)?
        } else {
            MappedFile::private(&path)?
        };
        let mapped = mmap::identity(&file, &path)?;
        drop(file);
        // Opened a second time for the locks. A mapping keeps its open file description, and a forked child inherits
        // the mapping, which must not keep the locks. The first descriptor is closed before any lock is taken, since
        // closing any descriptor of a file releases the process's classic locks on it.
        let file = mmap::open(&path, true)?;
        if mmap::identity(&file, &path)? != mapped {
            return Err(RegionError::damaged(&path, "it was replaced while it was being opened"));
        }
        let alive = LivenessLocks::in_one_file(file, LIVENESS_LOCKS_AT, PID_LOCKS_AT);
        let mut region = Self {
            limits,
            layout,
            usage,
            markers,
            has_shared_markers,
            alive,
            // No slot yet.
            slot: SLOT_COUNT,
            lanes: array::from_fn(|_| Mutex::new(())),
            reclaiming: AtomicBool::new(false),
        };
        region.reclaim_dead_processes_if_due();
        let slot = region.claim().or_else(|| {
            // Every slot is marked as occupied. Reclaiming removes the marks of dead processes.
            region.reclaim_dead_processes();
            region.claim()
        });
        let slot = slot.ok_or(RegionError::NoFreeSlot)?;
        let at = offset_of!(UsageFile, slots) + slot * size_of::<ProcessSlot>();
        mmap::allocate(region.alive.file(), &path, at, size_of::<ProcessSlot>())?;
        region.slot = slot;
        region.introduce();
        Ok(region)
    }

    /// Locks a slot that is neither marked nor held by a live process. Low slots first, so that few pages are used.
    fn claim(&self) -> Option<usize> {
        (0..SLOT_COUNT).find(|&slot| {
            if self.is_occupied(slot) || !self.alive.try_acquire(slot) {
                return false;
            }
            // A process may have taken the slot and died in between. The slot is left to the process that reclaims: a
            // process that needs its memory waits for that one only.
            let free = !self.is_occupied(slot);
            if !free {
                self.alive.release(slot);
            }
            free
        })
    }

    /// Writes this process's identity into its slot.
    fn introduce(&self) {
        point("slot.locked");
        self.alive.publish_pid(self.slot);
        let Some(slot) = self.usage.slots.get(self.slot) else { return };
        self.return_marker_pages_of(self.slot);
        // A slot without a mark holds nothing, unless it was forged.
        for gpu in 0..MAX_GPUS {
            self.clear_lane(self.slot, gpu);
        }
        slot.identity.started.store(start_time(), Relaxed);
        let namespace = std::fs::metadata("/proc/self/ns/pid").map_or(0, |data| data.ino());
        slot.identity.namespace.store(namespace, Relaxed);
        slot.identity.pid.store(std::process::id(), Release);
        point("slot.identified");
        self.mark(self.slot, true);
        point("slot.marked");
    }

    /// Returns the number of GPUs that the container has now, including attachments.
    #[inline]
    #[must_use]
    pub fn gpus(&self) -> usize {
        owner::gpu_count(&self.limits)
    }

    /// Returns a number that changes whenever the list of GPUs grows. Results derived from the list before may be
    /// outdated.
    #[inline]
    #[must_use]
    pub fn generation(&self) -> u32 {
        self.limits.header.generation.load(Acquire)
    }

    /// Returns the index of the GPU with this UUID.
    #[must_use]
    pub fn find(&self, uuid: &[u8; 16]) -> Option<usize> {
        self.limits.gpus.iter().take(self.gpus()).position(|gpu| gpu.uuid() == *uuid)
    }

    /// Returns the limits of a GPU; for a GPU that the container does not have, they allow nothing.
    #[inline]
    #[must_use]
    pub fn limits(&self, gpu: usize) -> &GpuLimits {
        static NOTHING: GpuLimits = GpuLimits::none();
        if gpu < self.gpus() { self.limits.gpus.get(gpu).unwrap_or(&NOTHING) } else { &NOTHING }
    }

    /// Returns the guaranteed compute on a GPU in thousandths of a percent; zero for no guarantee.
    #[must_use]
    pub fn cores(&self, gpu: usize) -> u32 {
        self.layout.cores_from_word(self.limits(gpu).cores.load(Relaxed))
    }

    /// Returns the compute that may be reached on a GPU, in thousandths of a percent.
    #[must_use]
    pub fn ceiling(&self, gpu: usize) -> u32 {
        self.layout.cores_from_word(self.limits(gpu).ceiling.load(Relaxed))
    }

    /// Returns the account of a GPU that all processes of the container share.
    #[inline]
    #[must_use]
    pub fn gpu_account(&self, gpu: usize) -> &GpuAccount {
        static NOWHERE: GpuAccount = GpuAccount::none();
        self.usage.accounts.get(gpu).unwrap_or(&NOWHERE)
    }

    /// Returns this process's lane on a GPU.
    #[inline]
    #[must_use]
    pub fn lane(&self, gpu: usize) -> &ProcessLane {
        static NOWHERE: ProcessLane = ProcessLane::none();
        let slot = self.usage.slots.get(self.slot);
        slot.and_then(|slot| slot.lanes.get(gpu)).unwrap_or(&NOWHERE)
    }

    /// Returns the settings that apply to all GPUs.
    #[inline]
    #[must_use]
    pub fn policy(&self) -> RegionPolicy {
        RegionPolicy::from_bits(self.limits.header.policy.load(Relaxed))
    }

    /// Returns when the GPU's turn scheduler last reported that it runs, on the monotonic clock; zero if it never did.
    #[inline]
    #[must_use]
    pub fn heartbeat(&self, gpu: usize) -> u64 {
        self.limits(gpu).heartbeat()
    }

    /// Returns this process's slot.
    #[must_use]
    pub fn slot(&self) -> usize {
        self.slot
    }

    /// Returns whether the calling process attached itself. A forked child did not: it must attach on its own, and
    /// dropping this value in the child leaves the parent's slot alone.
    #[inline]
    #[must_use]
    pub fn is_own(&self) -> bool {
        self.alive.is_own()
    }

    /// Reserves memory of a GPU for this process, before it is allocated.
    ///
    /// In a forked child, which has no slot, every reservation is refused.
    #[inline]
    pub fn reserve(&self, gpu: usize, bytes: u64) -> Result<(), ReservationRefused> {
        let asked = units(bytes);
        let _lane = self.lock_lane(gpu);
        match self.try_take(gpu, asked) {
            Some(used) => {
                self.note_peak(gpu, used);
                Ok(())
            }
            None => self.take_after_reclaim(gpu, bytes),
        }
    }

    /// Tries to reserve as [`RegionTenant::reserve`] does, for a caller with another option before it gives up: memory
    /// of dead processes is not reclaimed, and no refusal is counted.
    #[inline]
    #[must_use]
    pub fn try_reserve(&self, gpu: usize, bytes: u64) -> bool {
        let _lane = self.lock_lane(gpu);
        let taken = self.try_take(gpu, units(bytes));
        if let Some(used) = taken {
            self.note_peak(gpu, used);
        }
        taken.is_some()
    }

    /// Counts a refusal, for a caller of [`RegionTenant::try_reserve`] that has given up.
    #[cold]
    pub fn note_refusal(&self, gpu: usize) {
        if self.is_own() {
            self.gpu_account(gpu).refusals.fetch_add(1, Relaxed);
        }
    }

    #[inline]
    fn try_take(&self, gpu: usize, asked: u64) -> Option<u64> {
        if !self.is_own() {
            return None;
        }
        self.account(self.slot, gpu)?.take(asked, self.capacity(gpu))
    }

    /// Tries again after reclaiming what dead processes held, which may be enough.
    #[cold]
    fn take_after_reclaim(&self, gpu: usize, bytes: u64) -> Result<(), ReservationRefused> {
        self.reclaim_dead_processes();
        if let Some(used) = self.try_take(gpu, units(bytes)) {
            self.note_peak(gpu, used);
            return Ok(());
        }
        self.note_refusal(gpu);
        Err(ReservationRefused { asked: bytes, used: self.used(gpu), limit: self.limits(gpu).memory() })
    }

    #[inline]
    fn note_peak(&self, gpu: usize, used: u64) {
        let peak = &self.gpu_account(gpu).peak;
        let used = used.saturating_mul(MEMORY_UNIT);
        if used > peak.load(Relaxed) {
            peak.fetch_max(used, Relaxed);
        }
    }

    /// Releases as much memory as was reserved for an allocation.
    #[inline]
    pub fn release(&self, gpu: usize, bytes: u64) {
        let _lane = self.lock_lane(gpu);
        if self.is_own()
            && let Some(account) = self.account(self.slot, gpu)
        {
            account.give(units(bytes));
        }
    }

    /// Returns the memory account of a slot; `None` if there is no such GPU or slot.
    #[inline]
    fn account(&self, slot: usize, gpu: usize) -> Option<MemoryAccount<'_, GpuLanes<'_>>> {
        let account = self.usage.accounts.get(gpu)?;
        Some(MemoryAccount { word: &account.word, lanes: GpuLanes { slots: &self.usage.slots, gpu }, slot })
    }

    #[inline]
    fn lock_lane(&self, gpu: usize) -> Option<MutexGuard<'_, ()>> {
        // A child may have been forked while another thread held the lock.
        if !self.is_own() {
            return None;
        }
        let lane = self.lanes.get(gpu)?;
        Some(lane.try_lock().unwrap_or_else(|_| wait_for(lane)))
    }

    /// Returns the units that may be used of a GPU.
    #[inline]
    fn capacity(&self, gpu: usize) -> u64 {
        match self.limits(gpu).memory() {
            NO_MEMORY_LIMIT => UNLIMITED,
            memory => memory / MEMORY_UNIT,
        }
    }

    /// Returns the bytes of a GPU that all processes of the container use.
    #[inline]
    #[must_use]
    pub fn used(&self, gpu: usize) -> u64 {
        memory_account::used(&self.gpu_account(gpu).word).saturating_mul(MEMORY_UNIT)
    }

    /// Returns the bytes of a GPU that this process holds.
    #[must_use]
    pub fn held(&self, gpu: usize) -> u64 {
        self.held_by(self.slot, gpu)
    }

    fn held_by(&self, slot: usize, gpu: usize) -> u64 {
        self.account(slot, gpu).map_or(0, |account| account.held()).saturating_mul(MEMORY_UNIT)
    }

    /// Returns the bytes of a GPU that may be used, if there is a limit.
    #[inline]
    #[must_use]
    pub fn memory_limit(&self, gpu: usize) -> Option<u64> {
        Some(self.limits(gpu).memory()).filter(|&memory| memory != NO_MEMORY_LIMIT)
    }

    /// Reclaims what dead processes held. Returns how many there were. Preserves `errno`.
    pub fn reclaim_dead_processes(&self) -> usize {
        futex::preserve_errno(|| {
            let Some(_reclaiming) = Reclaiming::begin(self) else { return 0 };
            self.usage.header.reclaimed_at.store(crate::clock::coarse_monotonic_ns(), Relaxed);
            self.occupied().filter(|&slot| self.reclaim(slot)).count()
        })
    }

    /// Calls [`RegionTenant::reclaim_dead_processes`], unless that was done a moment ago or no other process holds anything:
    /// cheap enough for every query of how much is used.
    #[inline]
    pub fn reclaim_dead_processes_if_due(&self) {
        const RECLAIM_INTERVAL_NS: u64 = 10_000_000;
        let others = (0..self.gpus()).any(|gpu| self.used(gpu) != self.held(gpu));
        if !others {
            return;
        }
        let now = crate::clock::coarse_monotonic_ns();
        let reclaimed_at = &self.usage.header.reclaimed_at;
        let last = reclaimed_at.load(Relaxed);
        // A forged time in the future counts as long ago.
        let is_due = now.wrapping_sub(last) > RECLAIM_INTERVAL_NS;
        if is_due && reclaimed_at.compare_exchange(last, now, Relaxed, Relaxed).is_ok() {
            self.reclaim_dead_processes();
        }
    }

    /// Cleans the slot if its process is dead. Returns whether it did.
    fn reclaim(&self, slot: usize) -> bool {
        if slot == self.slot || self.alive.is_alive(slot) {
            return false;
        }
        self.alive.with_dead_slot(slot, || self.clean(slot)).is_some()
    }

    /// Releases everything that a slot's process had. The caller must hold the slot's lock.
    fn clean(&self, slot: usize) {
        for gpu in 0..MAX_GPUS {
            self.clear_lane(slot, gpu);
        }
        self.return_marker_pages_of(slot);
        if let Some(slot) = self.usage.slots.get(slot) {
            slot.identity.pid.store(0, Release);
        }
        point("slot.cleared");
        self.mark(slot, false);
        point("slot.unmarked");
    }

    fn clear_lane(&self, slot: usize, gpu: usize) {
        if let Some(lane) = self.usage.slots.get(slot).and_then(|slot| slot.lanes.get(gpu)) {
            lane.waiting.store(0, Relaxed);
            lane.busy_until.store(0, Relaxed);
            lane.spent.store(0, Relaxed);
        }
        if let Some(account) = self.account(slot, gpu) {
            account.release_all();
        }
    }

    /// Returns whether the turn scheduler can read this process's markers. Otherwise only the process itself can.
    #[must_use]
    pub fn has_shared_markers(&self) -> bool {
        self.has_shared_markers
    }

    /// Returns whether launches on a GPU must look at the turn.
    #[inline]
    #[must_use]
    pub fn is_gated(&self, gpu: usize) -> bool {
        let limits = self.limits(gpu);
        if self.layout.has_markers() { limits.is_gated() } else { limits.waits_for_turns() }
    }

    /// Takes a free marker page for this process's streams on a GPU; `None` if there is none.
    #[must_use]
    pub fn take_marker_page(&self, gpu: usize) -> Option<&MarkerPage> {
        let markers = Some(&self.markers).filter(|_| self.is_own() && gpu < MAX_GPUS)?;
        let owner = PageOwner { slot: self.slot, gpu }.pack();
        futex::preserve_errno(|| {
            for (index, (entry, page)) in markers.directory.0.iter().zip(&markers.pages).enumerate() {
                if entry.load(Relaxed) != 0 {
                    continue;
                }
                let at = MARKERS_OFFSET + offset_of!(MarkerArea, pages) + index * size_of::<MarkerPage>();
                if self.has_shared_markers {
                    let length = size_of::<MarkerPage>();
                    mmap::allocate(self.alive.file(), Path::new(USAGE_FILE), at, length).ok()?;
                }
                if entry.compare_exchange(0, owner, AcqRel, Relaxed).is_ok() {
                    point("page.taken");
                    page.clear();
                    return Some(page);
                }
            }
            None
        })
    }

    /// Gives up a marker page.
    pub fn return_marker_page(&self, page: &MarkerPage) {
        if !self.is_own() {
            return;
        }
        for (entry, other) in self.markers.directory.0.iter().zip(&self.markers.pages) {
            if std::ptr::eq(other, page) {
                page.clear();
                entry.store(0, Release);
            }
        }
    }

    fn return_marker_pages_of(&self, slot: usize) {
        let markers = &self.markers;
        for (entry, page) in markers.directory.0.iter().zip(&markers.pages) {
            let word = entry.load(Acquire);
            if PageOwner::unpack(word).is_some_and(|owner| owner.slot == slot) {
                page.clear();
                point("page.cleared");
                // The slot's lock is held, so no other process changes the entry.
                entry.store(0, Release);
                point("page.returned");
            }
        }
    }

    /// Returns what the streams of all processes of the container do on a GPU, for a container that limits its own
    /// rate. Without shared markers, only those of this process.
    #[must_use]
    pub fn activity(&self, gpu: usize) -> ActivitySample {
        let mut sample = ActivitySample::default();
        let markers = &self.markers;
        for (entry, page) in markers.directory.0.iter().zip(&markers.pages) {
            if PageOwner::unpack(entry.load(Acquire)).is_some_and(|owner| owner.gpu == gpu) {
                page.streams().for_each(|stream| stream.sample(&mut sample));
            }
        }
        sample
    }

    fn mark(&self, slot: usize, occupied: bool) {
        let Some(word) = self.usage.header.occupied.0.get(slot / 64) else { return };
        let bit = 1 << (slot % 64);
        if occupied {
            word.fetch_or(bit, Release)
        } else {
            word.fetch_and(!bit, Release)
        };
    }

    fn is_occupied(&self, slot: usize) -> bool {
        self.usage
            .header
            .occupied
            .0
            .get(slot / 64)
            .is_some_and(|word| word.load(Acquire) >> (slot % 64) & 1 == 1)
    }

    /// Returns the slots that were taken and not yet cleaned.
    fn occupied(&self) -> impl Iterator<Item = usize> + '_ {
        self.usage.header.occupied.0.iter().enumerate().flat_map(|(index, word)| {
            let word = word.load(Acquire);
            (0..64).filter(move |bit| word >> bit & 1 == 1).map(move |bit| index * 64 + bit)
        })
    }

    /// Returns the live processes of the container, including this one.
    pub fn processes(&self) -> impl Iterator<Item = TenantProcess> + '_ {
        let living = self.occupied().filter(|&slot| slot == self.slot || self.alive.is_alive(slot));
        living.filter_map(|slot| {
            let identity = &self.usage.slots.get(slot)?.identity;
            let own = slot == self.slot;
            Some(TenantProcess {
                slot,
                pid: identity.pid.load(Acquire),
                pid_here: if own { Some(std::process::id()) } else { self.alive.pid(slot) },
                started: identity.started.load(Relaxed),
                namespace: identity.namespace.load(Relaxed),
                held: array::from_fn(|gpu| self.held_by(slot, gpu)),
            })
        })
    }
}

impl Drop for RegionTenant {
    fn drop(&mut self) {
        if !self.is_own() || self.slot >= SLOT_COUNT {
            return;
        }
        futex::preserve_errno(|| {
            self.clean(self.slot);
            self.alive.withdraw_pid(self.slot);
            self.alive.release(self.slot);
        });
    }
}

#[cold]
fn wait_for(lane: &Mutex<()>) -> MutexGuard<'_, ()> {
    futex::preserve_errno(|| lane.lock().unwrap_or_else(PoisonError::into_inner))
}

/// Holds the lock that excludes other processes from reclaiming slots: a process that is refused memory has waited for
/// everything that dead processes held.
struct Reclaiming<'a>(&'a RegionTenant);

impl<'a> Reclaiming<'a> {
    /// Waits for other processes, with a bound: one of them may have been stopped.
    fn begin(region: &'a RegionTenant) -> Option<Self> {
        const MAX_ATTEMPTS: u32 = 2_000;
        const RETRY_INTERVAL: Duration = Duration::from_micros(100);
        for _ in 0..MAX_ATTEMPTS {
            if !region.is_own() {
                return None;
            }
            if !region.reclaiming.swap(true, Acquire) {
                if region.alive.try_acquire(RECLAIM_LOCK_SLOT) {
                    return Some(Self(region));
                }
                region.reclaiming.store(false, Release);
            }
            std::thread::sleep(RETRY_INTERVAL);
        }
        None
    }
}

impl Drop for Reclaiming<'_> {
    fn drop(&mut self) {
        self.0.alive.release(RECLAIM_LOCK_SLOT);
        self.0.reclaiming.store(false, Release);
    }
}

/// Returns the clock ticks between the machine's boot and this process's start; zero if they cannot be read.
fn start_time() -> u64 {
    let stat = std::fs::read_to_string("/proc/self/stat").unwrap_or_default();
    // The name may contain anything and ends with the last parenthesis. The 22nd field is the 20th after it.
    let after = stat.rsplit_once(')').map_or("", |(_, after)| after);
    after.split_ascii_whitespace().nth(19).and_then(|field| field.parse().ok()).unwrap_or(0)
}

#[cfg(test)]
impl RegionTenant {
    /// Ends as a killed process does: its locks are released, and nothing is cleaned up.
    pub(crate) fn end_as_if_killed(mut self) {
        self.alive.release(self.slot);
        self.slot = SLOT_COUNT;
    }

    /// Opens the same file a second time.
    #[allow(clippy::unwrap_used)]
    pub(crate) fn another_opening(&self) -> LivenessLocks {
        let path = format!("/proc/self/fd/{}", std::os::fd::AsRawFd::as_raw_fd(self.alive.file()));
        let file = std::fs::OpenOptions::new().read(true).write(true).open(path).unwrap();
        LivenessLocks::in_one_file(file, LIVENESS_LOCKS_AT, PID_LOCKS_AT)
    }
}
