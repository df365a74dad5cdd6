//! A process's side of the region: it takes a slot of `usage`, and takes memory before it allocates it.
//!
//! Guaranteed: a process may be killed at any instruction. Its slot is found free by the next one who looks, and what it
//! held is given back, no more and no less. Nothing in the file makes any of this panic or go on for ever.

use crate::error::{Refused, RegionError};
use crate::failpoint::point;
use crate::layout::{
    GpuAccount, GpuLimits, LimitsFile, MAX_GPUS, NO_LIMIT, ProcessLane, SLOTS, Slot, UsageFile,
};
use crate::liveness_lock::LivenessLocks;
use crate::memory_account::{self, MemoryAccount, SlotTable, SlotWords, UNIT, UNLIMITED, units};
use crate::mmap::{self, MappedFile};
use crate::owner::{self, RegionPolicy};
use crate::{LIMITS, USAGE, futex};
use core::sync::atomic::AtomicBool;
use core::sync::atomic::Ordering::{Acquire, Relaxed, Release};
use std::array;
use std::mem::offset_of;
use std::os::unix::fs::MetadataExt;
use std::path::Path;
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::Duration;

/// The bytes of `usage` whose locks say who lives, who is who, and that somebody sees to the dead.
pub(crate) const LIVES_AT: u64 = 0;
pub(crate) const PIDS_AT: u64 = 1 << 32;
/// As if it were one more slot.
const UNDERTAKER: usize = SLOTS;

/// A process's hold on its container's region. Dropping it gives everything back.
#[derive(Debug)]
pub struct RegionTenant {
    limits: MappedFile<LimitsFile>,
    usage: MappedFile<UsageFile>,
    alive: LivenessLocks,
    slot: usize,
    /// One thread at a time changes this process's lane on a GPU.
    turns: [Mutex<()>; MAX_GPUS],
    /// A thread of this process sees to the dead.
    sweeping: AtomicBool,
}

/// A living process of the container.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Process {
    /// Its slot.
    pub slot: usize,
    /// Its pid as it calls itself.
    pub pid: u32,
    /// Its pid in the namespace of the caller, where the kernel knows one.
    pub pid_here: Option<u32>,
    /// Clock ticks between the machine's start and its own; with the pid, this names it for good.
    pub started: u64,
    /// The number of the pid namespace that `pid` is of.
    pub namespace: u64,
    /// Bytes it holds on each GPU.
    pub held: [u64; MAX_GPUS],
}

/// The lanes of one GPU.
#[derive(Clone, Copy, Debug)]
struct GpuLanes<'a> {
    slots: &'a [Slot; SLOTS],
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
    /// Takes a slot of the region in `folder`.
    pub fn attach(folder: &Path) -> Result<Self, RegionError> {
        let path = folder.join(LIMITS);
        let file = mmap::open(&path, false)?;
        mmap::check::<LimitsFile>(&file, &path)?;
        let limits = MappedFile::new(&file, &path, false)?;
        drop(file);
        let path = folder.join(USAGE);
        let file = mmap::open(&path, true)?;
        mmap::check::<UsageFile>(&file, &path)?;
        mmap::keep_room(&file, &path, 0, offset_of!(UsageFile, slots))?;
        let usage = MappedFile::new(&file, &path, true)?;
        let mapped = mmap::identity(&file, &path)?;
        drop(file);
        // Opened once more: memory keeps its opening, and a forked child keeps the memory, which must not keep the locks.
        // The first is closed before there are any, since closing one gives up those of the old kind.
        let file = mmap::open(&path, true)?;
        if mmap::identity(&file, &path)? != mapped {
            return Err(RegionError::broken(&path, "it was replaced just now"));
        }
        let alive = LivenessLocks::in_one_file(file, LIVES_AT, PIDS_AT);
        let mut region = Self {
            limits,
            usage,
            alive,
            // Nobody's, until one is found.
            slot: SLOTS,
            turns: array::from_fn(|_| Mutex::new(())),
            sweeping: AtomicBool::new(false),
        };
        region.tidy();
        let slot = region.claim().or_else(|| {
            // Every slot is marked. Marks of the dead go.
            region.sweep();
            region.claim()
        });
        let slot = slot.ok_or(RegionError::NoFreeSlot)?;
        let at = offset_of!(UsageFile, slots) + slot * size_of::<Slot>();
        mmap::keep_room(region.alive.file(), &path, at, size_of::<Slot>())?;
        region.slot = slot;
        region.introduce();
        Ok(region)
    }

    /// A slot without a mark that nobody lives in. Low ones first: they stay in few pages.
    fn claim(&self) -> Option<usize> {
        (0..SLOTS).find(|&slot| {
            if self.is_occupied(slot) || !self.alive.try_acquire(slot) {
                return false;
            }
            // Somebody may have come and died in between. Its remains are not ours to see to: whoever needs what it held
            // waits for the undertaker only.
            let free = !self.is_occupied(slot);
            if !free {
                self.alive.release(slot);
            }
            free
        })
    }

    /// Puts this process's name on its slot.
    fn introduce(&self) {
        point("slot.locked");
        self.alive.publish_pid(self.slot);
        let Some(slot) = self.usage.slots.get(self.slot) else { return };
        // Nothing is held in a slot without a mark, unless somebody forged it.
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

    /// GPUs the container has now.
    #[inline]
    #[must_use]
    pub fn gpus(&self) -> usize {
        owner::gpus(&self.limits)
    }

    /// The GPU with this UUID.
    #[must_use]
    pub fn find(&self, uuid: &[u8; 16]) -> Option<usize> {
        self.limits.gpus.iter().take(self.gpus()).position(|gpu| gpu.uuid() == *uuid)
    }

    /// What the container may have of a GPU; of one it does not have, nothing.
    #[inline]
    #[must_use]
    pub fn limits(&self, gpu: usize) -> &GpuLimits {
        static NOTHING: GpuLimits = GpuLimits::none();
        if gpu < self.gpus() { self.limits.gpus.get(gpu).unwrap_or(&NOTHING) } else { &NOTHING }
    }

    /// What the container's processes have together on a GPU.
    #[inline]
    #[must_use]
    pub fn gpu_account(&self, gpu: usize) -> &GpuAccount {
        static NOWHERE: GpuAccount = GpuAccount::none();
        self.usage.accounts.get(gpu).unwrap_or(&NOWHERE)
    }

    /// What this process has on a GPU.
    #[inline]
    #[must_use]
    pub fn lane(&self, gpu: usize) -> &ProcessLane {
        static NOWHERE: ProcessLane = ProcessLane::none();
        let slot = self.usage.slots.get(self.slot);
        slot.and_then(|slot| slot.lanes.get(gpu)).unwrap_or(&NOWHERE)
    }

    /// What holds for all GPUs.
    #[inline]
    #[must_use]
    pub fn policy(&self) -> RegionPolicy {
        RegionPolicy::of(self.limits.header.policy.load(Relaxed))
    }

    /// When the GPU's arbiter last said that it lives, on the monotonic clock; zero if none ever did.
    #[inline]
    #[must_use]
    pub fn heartbeat(&self, gpu: usize) -> u64 {
        self.limits(gpu).heartbeat()
    }

    /// This process's slot.
    #[must_use]
    pub fn slot(&self) -> usize {
        self.slot
    }

    /// Whether the calling process attached itself. A forked child did not: it must attach anew, and to
    /// drop this there does nothing to the parent's slot.
    #[inline]
    #[must_use]
    pub fn is_own(&self) -> bool {
        self.alive.is_own()
    }

    /// Takes memory of a GPU for this process, before it is allocated.
    ///
    /// In a forked child, which has no slot, everything is refused.
    #[inline]
    pub fn reserve(&self, gpu: usize, bytes: u64) -> Result<(), Refused> {
        let asked = units(bytes);
        let _turn = self.turn(gpu);
        match self.try_take(gpu, asked) {
            Some(used) => {
                self.note_peak(gpu, used);
                Ok(())
            }
            None => self.take_after_sweep(gpu, bytes),
        }
    }

    /// As [`RegionTenant::reserve`], for who has something to do before it gives up: nothing is swept, and no refusal counted.
    #[inline]
    #[must_use]
    pub fn try_reserve(&self, gpu: usize, bytes: u64) -> bool {
        let _turn = self.turn(gpu);
        let taken = self.try_take(gpu, units(bytes));
        if let Some(used) = taken {
            self.note_peak(gpu, used);
        }
        taken.is_some()
    }

    /// Counts a refusal, for who has given up.
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

    /// What the dead held may be enough.
    #[cold]
    fn take_after_sweep(&self, gpu: usize, bytes: u64) -> Result<(), Refused> {
        self.sweep();
        if let Some(used) = self.try_take(gpu, units(bytes)) {
            self.note_peak(gpu, used);
            return Ok(());
        }
        self.note_refusal(gpu);
        Err(Refused { asked: bytes, used: self.used(gpu), limit: self.limits(gpu).memory() })
    }

    #[inline]
    fn note_peak(&self, gpu: usize, used: u64) {
        let peak = &self.gpu_account(gpu).peak;
        let used = used.saturating_mul(UNIT);
        if used > peak.load(Relaxed) {
            peak.fetch_max(used, Relaxed);
        }
    }

    /// Gives memory back, as much as was taken for it.
    #[inline]
    pub fn release(&self, gpu: usize, bytes: u64) {
        let _turn = self.turn(gpu);
        if self.is_own()
            && let Some(account) = self.account(self.slot, gpu)
        {
            account.give(units(bytes));
        }
    }

    /// The account of a slot; none if there is no such GPU or slot.
    #[inline]
    fn account(&self, slot: usize, gpu: usize) -> Option<MemoryAccount<'_, GpuLanes<'_>>> {
        let book = self.usage.accounts.get(gpu)?;
        Some(MemoryAccount { word: &book.word, lanes: GpuLanes { slots: &self.usage.slots, gpu }, slot })
    }

    #[inline]
    fn turn(&self, gpu: usize) -> Option<MutexGuard<'_, ()>> {
        // A forked child may have been born while another thread held it.
        if !self.is_own() {
            return None;
        }
        let turn = self.turns.get(gpu)?;
        Some(turn.try_lock().unwrap_or_else(|_| wait_for(turn)))
    }

    /// Units there may be of a GPU.
    #[inline]
    fn capacity(&self, gpu: usize) -> u64 {
        match self.limits(gpu).memory() {
            NO_LIMIT => UNLIMITED,
            memory => memory / UNIT,
        }
    }

    /// Bytes of a GPU used by all processes of the container.
    #[inline]
    #[must_use]
    pub fn used(&self, gpu: usize) -> u64 {
        memory_account::used(&self.gpu_account(gpu).word).saturating_mul(UNIT)
    }

    /// Bytes of a GPU that this process holds.
    #[must_use]
    pub fn held(&self, gpu: usize) -> u64 {
        self.held_by(self.slot, gpu)
    }

    fn held_by(&self, slot: usize, gpu: usize) -> u64 {
        self.account(slot, gpu).map_or(0, |account| account.held()).saturating_mul(UNIT)
    }

    /// Bytes of a GPU that may be used, if there is a limit.
    #[inline]
    #[must_use]
    pub fn memory_limit(&self, gpu: usize) -> Option<u64> {
        Some(self.limits(gpu).memory()).filter(|&memory| memory != NO_LIMIT)
    }

    /// Gives back what dead processes held; returns how many there were. `errno` stays as it was.
    pub fn sweep(&self) -> usize {
        futex::keeping_errno(|| {
            let Some(_sweeping) = Sweeping::begin(self) else { return 0 };
            self.usage.header.swept.store(crate::clock::coarse(), Relaxed);
            self.occupied().filter(|&slot| self.bury(slot)).count()
        })
    }

    /// As [`RegionTenant::sweep`], unless somebody did it a moment ago or nobody else holds anything: cheap enough to be
    /// called whenever somebody asks how much is used.
    #[inline]
    pub fn tidy(&self) {
        /// Nanoseconds.
        const A_MOMENT: u64 = 10_000_000;
        let others = (0..self.gpus()).any(|gpu| self.used(gpu) != self.held(gpu));
        if !others {
            return;
        }
        let now = crate::clock::coarse();
        let swept = &self.usage.header.swept;
        let last = swept.load(Relaxed);
        // A forged instant that is yet to come is long ago.
        if now.wrapping_sub(last) > A_MOMENT && swept.compare_exchange(last, now, Relaxed, Relaxed).is_ok() {
            self.sweep();
        }
    }

    /// Cleans the slot if its process is dead.
    fn bury(&self, slot: usize) -> bool {
        if slot == self.slot || self.alive.is_alive(slot) {
            return false;
        }
        self.alive.with_dead_slot(slot, || self.clean(slot)).is_some()
    }

    /// Takes back everything a slot's process had. The slot must be ours by its lock.
    fn clean(&self, slot: usize) {
        for gpu in 0..MAX_GPUS {
            self.clear_lane(slot, gpu);
        }
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

    /// Slots that have been taken and not yet cleaned.
    fn occupied(&self) -> impl Iterator<Item = usize> + '_ {
        self.usage.header.occupied.0.iter().enumerate().flat_map(|(index, word)| {
            let word = word.load(Acquire);
            (0..64).filter(move |bit| word >> bit & 1 == 1).map(move |bit| index * 64 + bit)
        })
    }

    /// The living processes of the container, this one among them.
    pub fn processes(&self) -> impl Iterator<Item = Process> + '_ {
        let living = self.occupied().filter(|&slot| slot == self.slot || self.alive.is_alive(slot));
        living.filter_map(|slot| {
            let identity = &self.usage.slots.get(slot)?.identity;
            let own = slot == self.slot;
            Some(Process {
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
        if !self.is_own() || self.slot >= SLOTS {
            return;
        }
        futex::keeping_errno(|| {
            self.clean(self.slot);
            self.alive.withdraw_pid(self.slot);
            self.alive.release(self.slot);
        });
    }
}

#[cold]
fn wait_for(turn: &Mutex<()>) -> MutexGuard<'_, ()> {
    futex::keeping_errno(|| turn.lock().unwrap_or_else(PoisonError::into_inner))
}

/// While it lives, nobody else of the container sees to the dead: who is refused memory has waited for all of theirs.
struct Sweeping<'a>(&'a RegionTenant);

impl<'a> Sweeping<'a> {
    /// Waits a while for others. Not for ever: one of them may have been stopped.
    fn begin(region: &'a RegionTenant) -> Option<Self> {
        const PATIENCE: u32 = 2_000;
        const NAP: Duration = Duration::from_micros(100);
        for _ in 0..PATIENCE {
            if !region.is_own() {
                return None;
            }
            if !region.sweeping.swap(true, Acquire) {
                if region.alive.try_acquire(UNDERTAKER) {
                    return Some(Self(region));
                }
                region.sweeping.store(false, Release);
            }
            std::thread::sleep(NAP);
        }
        None
    }
}

impl Drop for Sweeping<'_> {
    fn drop(&mut self) {
        self.0.alive.release(UNDERTAKER);
        self.0.sweeping.store(false, Release);
    }
}

/// Clock ticks between the machine's start and this process's; zero where it cannot be known.
fn start_time() -> u64 {
    let stat = std::fs::read_to_string("/proc/self/stat").unwrap_or_default();
    // The name may contain anything, and ends with the last bracket. The 22nd field is the 20th after it.
    let after = stat.rsplit_once(')').map_or("", |(_, after)| after);
    after.split_ascii_whitespace().nth(19).and_then(|field| field.parse().ok()).unwrap_or(0)
}

#[cfg(test)]
impl RegionTenant {
    /// Goes as a killed process does: its locks are gone, and nothing is cleaned up.
    pub(crate) fn let_go_as_if_killed(mut self) {
        self.alive.release(self.slot);
        self.slot = SLOTS;
    }

    /// The same file, opened once more.
    #[allow(clippy::unwrap_used)]
    pub(crate) fn another_opening(&self) -> LivenessLocks {
        let path = format!("/proc/self/fd/{}", std::os::fd::AsRawFd::as_raw_fd(self.alive.file()));
        let file = std::fs::OpenOptions::new().read(true).write(true).open(path).unwrap();
        LivenessLocks::in_one_file(file, LIVES_AT, PIDS_AT)
    }
}
