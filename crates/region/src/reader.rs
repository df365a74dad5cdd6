//! The daemon's side of `usage`: read through the file and never through a mapping, since the container may truncate it at
//! any time, and trusted in nothing that can be verified.

use crate::USAGE;
use crate::error::RegionError;
use crate::layout::{
    Confirmed, GpuAccount, GpuTimeAccount, Identity, OccupiedSlots, ProcessLane, Slot, USAGE_SIZE, UsageFile,
    UsageHeader,
};
use crate::liveness_lock::LivenessLocks;
use crate::memory_account::{AccountWord, SlotValues, UNIT};
use crate::mmap::{self, number};
use crate::protocol::{LIVENESS_LOCKS_AT, MAX_GPUS, PID_LOCKS_AT, SLOT_COUNT};
use std::fs::File;
use std::io;
use std::mem::offset_of;
use std::os::unix::fs::{FileExt, MetadataExt};
use std::path::{Path, PathBuf};

/// Reads what a container's processes have, from outside.
#[derive(Debug)]
pub struct UsageReader {
    alive: LivenessLocks,
    path: PathBuf,
}

/// What a container's processes have, at one time.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct UsageSnapshot {
    /// By GPU, in the order of the limits.
    pub gpus: [GpuUsage; MAX_GPUS],
    /// The living, in the order of their slots.
    pub processes: Vec<ProcessUsage>,
    /// What contradicts itself: nobody but a forger writes this.
    pub forged: Vec<Forgery>,
}

/// What all processes of a container have on one GPU.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct GpuUsage {
    /// Bytes held by the living.
    pub used: u64,
    /// Bytes that dead processes held and nobody has given back yet.
    pub dead: u64,
    /// The most bytes that were ever used at once.
    pub peak: u64,
    /// How often memory was refused.
    pub refusals: u64,
    /// Nanoseconds that threads waited for a turn.
    pub throttled: u64,
    /// Nanoseconds of the GPU that were submitted.
    pub spent: u64,
    /// Counted up whenever a process begins to wait for a turn.
    pub doorbell: u32,
}

/// What a container wants of one GPU's time. Any of it may be forged: bound it before use.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct ComputeDemand {
    /// Nanoseconds of the GPU that were submitted, in all.
    pub spent: u64,
    /// Counted up whenever a process begins to wait for a turn.
    pub doorbell: u32,
    /// Threads of living processes that wait for a turn.
    pub waiting: u32,
    /// Until when what the living have submitted will run, as they predict; zero or in the past if nothing runs.
    pub busy_until: u64,
}

/// What a container's doorbell said at one time.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct DoorbellSample {
    /// Nanoseconds of GPU time that were submitted in total.
    pub(crate) spent: u64,
    /// Counted up whenever a process begins to wait for a turn.
    pub(crate) doorbell: u32,
}

/// No process has more threads than the kernel has pids.
const MOST_THREADS: u32 = 1 << 22;

/// What one process has.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ProcessUsage {
    /// Its slot.
    pub slot: usize,
    /// Its pid as the kernel tells it here; none if it has none here, or does not show it.
    pub pid_here: Option<u32>,
    /// Its pid as it says itself.
    pub pid: u32,
    /// Clock ticks between the machine's start and its own, as it says itself.
    pub started: u64,
    /// The pid namespace it says that it is in.
    pub namespace: u64,
    /// Bytes it holds on each GPU.
    pub held: [u64; MAX_GPUS],
    /// Nanoseconds it has submitted on each GPU.
    pub spent: [u64; MAX_GPUS],
    /// Its threads that wait for a turn on each GPU.
    pub waiting: [u32; MAX_GPUS],
    /// Until when what it submitted will run on each GPU, as it predicts, on the monotonic clock.
    pub busy_until: [u64; MAX_GPUS],
}

/// A contradiction in `usage`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Forgery {
    /// The GPU's word says other than the slots do together.
    Accounts {
        /// Which GPU.
        gpu: usize,
        /// Bytes by its word.
        word: u64,
        /// Bytes by its slots.
        slots: u64,
    },
    /// A slot has several operations under way at once.
    Slot {
        /// Which slot.
        slot: usize,
        /// On which GPU.
        gpu: usize,
    },
    /// The file was longer than such a file is, or had room kept behind its end, and was cut back: see [`UsageReader::cut`].
    Grown {
        /// Bytes too many.
        bytes: u64,
    },
    /// The file cannot be read to its end: somebody made it shorter.
    Short,
}

impl UsageSnapshot {
    /// Of a file that somebody made shorter: nothing is known but that.
    #[must_use]
    pub fn of_a_short_file() -> Self {
        Self { gpus: [GpuUsage::default(); MAX_GPUS], processes: Vec::new(), forged: vec![Forgery::Short] }
    }
}

/// Bytes that a file system may take for the file beyond its length: it gives room in pages, which may be large.
const SPARE: u64 = 4 << 20;

/// Header and books.
const START: usize = offset_of!(UsageFile, slots);

/// What the file said about one slot.
struct Read {
    slot: usize,
    lives: bool,
    bytes: [u8; size_of::<Slot>()],
}

impl Read {
    fn lane(&self, gpu: usize, offset: usize, length: usize) -> u64 {
        number(&self.bytes, offset_of!(Slot, lanes) + gpu * size_of::<ProcessLane>() + offset, length)
    }

    fn identity(&self, offset: usize, length: usize) -> u64 {
        number(&self.bytes, offset_of!(Slot, identity) + offset, length)
    }

    fn values(&self, gpu: usize) -> SlotValues {
        SlotValues {
            total: self.lane(gpu, offset_of!(ProcessLane, total), 8),
            intent: self.lane(gpu, offset_of!(ProcessLane, intent), 8),
            confirmed: number(&self.bytes, offset_of!(Slot, confirmed) + gpu * size_of::<u64>(), 8),
        }
    }
}

const _: () = assert!(size_of::<Confirmed>() == MAX_GPUS * size_of::<u64>());

type Start = [u8; START];

fn book(start: &Start, gpu: usize, offset: usize, length: usize) -> u64 {
    number(start, offset_of!(UsageFile, accounts) + gpu * size_of::<GpuAccount>() + offset, length)
}

fn word(start: &Start, gpu: usize) -> u64 {
    book(start, gpu, offset_of!(GpuAccount, word), 8)
}

impl UsageReader {
    /// Opens the `usage` of the region in `folder`, of any supported layout.
    pub fn open(folder: &Path) -> Result<Self, RegionError> {
        Self::open_with(folder, |_, _| Ok(()))
    }

    /// As [`UsageReader::open`], if the file belongs to a user.
    pub(crate) fn open_owned(folder: &Path, user: u32) -> Result<Self, RegionError> {
        Self::open_with(folder, |file, path| mmap::check_owner(file, path, user))
    }

    fn open_with(
        folder: &Path,
        verify: impl FnOnce(&File, &Path) -> Result<(), RegionError>,
    ) -> Result<Self, RegionError> {
        let path = folder.join(USAGE);
        let file = mmap::open(&path, false)?;
        mmap::check::<UsageFile>(&file, &path)?;
        verify(&file, &path)?;
        Ok(Self { alive: LivenessLocks::in_one_file(file, LIVENESS_LOCKS_AT, PID_LOCKS_AT), path })
    }

    pub(crate) fn file(&self) -> &File {
        self.alive.file()
    }

    pub(crate) fn path(&self) -> &Path {
        &self.path
    }

    /// Reads the few words that tell whether processes of the container wait for a turn; none if the file was truncated.
    pub(crate) fn doorbell(&self, gpu: usize) -> Option<DoorbellSample> {
        const LENGTH: usize = offset_of!(GpuTimeAccount, doorbell) + 4;
        let at =
            offset_of!(UsageFile, accounts) + gpu * size_of::<GpuAccount>() + offset_of!(GpuAccount, time);
        let mut bytes = [0; LENGTH];
        self.file().read_exact_at(&mut bytes, at as u64).ok()?;
        Some(DoorbellSample {
            spent: number(&bytes, offset_of!(GpuTimeAccount, spent), 8),
            // Four bytes were read.
            doorbell: number(&bytes, offset_of!(GpuTimeAccount, doorbell), 4) as u32,
        })
    }

    /// Cuts the file back to its length where somebody made it longer, or had room kept behind its end: it lies in the machine's
    /// memory. How many bytes that gave back; none where all is as it should be.
    pub fn cut(&self) -> Result<Option<u64>, RegionError> {
        let examine = |file: &File| {
            let data = file.metadata().map_err(|error| RegionError::io("examine", &self.path, error))?;
            Ok::<_, RegionError>((
                data.len().saturating_sub(USAGE_SIZE as u64),
                data.blocks().saturating_mul(512),
            ))
        };
        let own = self.alive.file();
        let (longer, room) = examine(own)?;
        if longer == 0 && room <= USAGE_SIZE as u64 + SPARE {
            return Ok(None);
        }
        let file = mmap::open(&self.path, true)?;
        if mmap::identity(&file, &self.path)? != mmap::identity(own, &self.path)? {
            return Err(RegionError::damaged(&self.path, "another file is in its place"));
        }
        // To its length and no shorter, whatever was done to it meanwhile: who has it mapped would be killed.
        file.set_len(USAGE_SIZE as u64).map_err(|error| RegionError::io("cut back", &self.path, error))?;
        let (_, left) = examine(&file)?;
        // Some file systems take more for any file than is thought here: that is nobody's doing.
        let back = longer.max(room.saturating_sub(left));
        Ok((back > 0).then_some(back))
    }

    /// What an arbiter goes by, in few small reads. `now` is the monotonic clock's.
    pub fn demand(&self, gpu: usize, now: u64) -> Result<ComputeDemand, RegionError> {
        let mut demand = ComputeDemand::default();
        if gpu >= MAX_GPUS {
            return Ok(demand);
        }
        let start = self.start()?;
        let book = GpuUsage::of(|offset, length| book(&start, gpu, offset, length));
        (demand.spent, demand.doorbell) = (book.spent, book.doorbell);
        for slot in occupied(&start) {
            let mut lane = [0; size_of::<ProcessLane>()];
            let lanes = START + slot * size_of::<Slot>() + offset_of!(Slot, lanes);
            self.read(&mut lane, lanes + gpu * size_of::<ProcessLane>())?;
            let waiting = number(&lane, offset_of!(ProcessLane, waiting), 4) as u32;
            let busy_until = number(&lane, offset_of!(ProcessLane, busy_until), 8);
            // The dead neither wait nor compute, and most of the living do neither.
            if (waiting > 0 || busy_until > now) && self.alive.is_alive(slot) {
                demand.waiting = demand.waiting.saturating_add(waiting.min(MOST_THREADS));
                demand.busy_until = demand.busy_until.max(busy_until);
            }
        }
        Ok(demand)
    }

    /// Everything, as of now.
    pub fn snapshot(&self) -> Result<UsageSnapshot, RegionError> {
        /// Programs change the books while they are read. What still contradicts itself after this many looks is no
        /// accident of reading.
        const LOOKS: usize = 5;
        let mut snapshot = self.look()?;
        for _ in 1..LOOKS {
            if snapshot.1 && snapshot.0.forged.is_empty() {
                break;
            }
            snapshot = self.look()?;
        }
        if !snapshot.1 {
            // It never held still: no contradiction can be told from a change.
            snapshot.0.forged.clear();
        }
        Ok(snapshot.0)
    }

    /// One look, and whether nothing changed during it.
    fn look(&self) -> Result<(UsageSnapshot, bool), RegionError> {
        let before = self.start()?;
        let slots = self.slots(&before)?;
        let after = self.start()?;
        let still = (0..MAX_GPUS).all(|gpu| word(&before, gpu) == word(&after, gpu))
            && occupied(&before).eq(occupied(&after));
        let mut forged = Vec::new();
        let mut gpus: [GpuUsage; MAX_GPUS] =
            std::array::from_fn(|gpu| GpuUsage::of(|offset, length| book(&before, gpu, offset, length)));
        let mut processes = Vec::new();
        let mut all = [0u64; MAX_GPUS];
        for read in &slots {
            let mut process = ProcessUsage {
                slot: read.slot,
                pid_here: None,
                pid: read.identity(offset_of!(Identity, pid), 4) as u32,
                started: read.identity(offset_of!(Identity, started), 8),
                namespace: read.identity(offset_of!(Identity, namespace), 8),
                held: [0; MAX_GPUS],
                spent: std::array::from_fn(|gpu| read.lane(gpu, offset_of!(ProcessLane, spent), 8)),
                // Four bytes, and no process has more threads than the kernel has pids.
                waiting: std::array::from_fn(|gpu| {
                    read.lane(gpu, offset_of!(ProcessLane, waiting), 4).min(MOST_THREADS.into()) as u32
                }),
                busy_until: std::array::from_fn(|gpu| read.lane(gpu, offset_of!(ProcessLane, busy_until), 8)),
            };
            for gpu in 0..MAX_GPUS {
                let values = read.values(gpu);
                if !values.are_of_one_time() {
                    forged.push(Forgery::Slot { slot: read.slot, gpu });
                }
                let held = values.truly_held(word(&before, gpu), read.slot).units.saturating_mul(UNIT);
                process.held[gpu] = held;
                all[gpu] = all[gpu].saturating_add(held);
                let side = if read.lives { &mut gpus[gpu].used } else { &mut gpus[gpu].dead };
                *side = side.saturating_add(held);
            }
            if read.lives {
                process.pid_here = self.alive.pid(read.slot);
                processes.push(process);
            }
        }
        for gpu in 0..MAX_GPUS {
            let bytes = AccountWord::unpack(word(&before, gpu)).units.saturating_mul(UNIT);
            if bytes != all[gpu] {
                forged.push(Forgery::Accounts { gpu, word: bytes, slots: all[gpu] });
            }
            // A process killed between taking and noting leaves it behind.
            gpus[gpu].peak = gpus[gpu].peak.max(bytes);
        }
        Ok((UsageSnapshot { gpus, processes, forged }, still))
    }

    fn start(&self) -> Result<Box<Start>, RegionError> {
        let mut start = Box::new([0; START]);
        self.read(&mut start[..], 0)?;
        Ok(start)
    }

    fn slots(&self, start: &Start) -> Result<Vec<Read>, RegionError> {
        let mut slots = Vec::new();
        for slot in occupied(start) {
            let lives = self.alive.is_alive(slot);
            let mut read = Read { slot, lives, bytes: [0; size_of::<Slot>()] };
            self.read(&mut read.bytes, START + slot * size_of::<Slot>())?;
            slots.push(read);
        }
        Ok(slots)
    }

    fn read(&self, bytes: &mut [u8], at: usize) -> Result<(), RegionError> {
        self.alive.file().read_exact_at(bytes, at as u64).map_err(|error| match error.kind() {
            io::ErrorKind::UnexpectedEof => RegionError::damaged(&self.path, "it has been truncated"),
            _ => RegionError::io("read", &self.path, error),
        })
    }
}

impl GpuUsage {
    /// A book, from a function that reads numbers of it.
    fn of(book: impl Fn(usize, usize) -> u64) -> Self {
        let time = |offset, length| book(offset_of!(GpuAccount, time) + offset, length);
        Self {
            used: 0,
            dead: 0,
            peak: book(offset_of!(GpuAccount, peak), 8),
            refusals: book(offset_of!(GpuAccount, refusals), 8),
            throttled: time(offset_of!(GpuTimeAccount, throttled), 8),
            spent: time(offset_of!(GpuTimeAccount, spent), 8),
            // Four bytes were read.
            doorbell: time(offset_of!(GpuTimeAccount, doorbell), 4) as u32,
        }
    }
}

/// Slots that are marked.
fn occupied(start: &Start) -> impl Iterator<Item = usize> + '_ {
    let at = offset_of!(UsageFile, header) + offset_of!(UsageHeader, occupied);
    (0..SLOT_COUNT).filter(move |slot| number(start, at + slot / 8, 1) >> (slot % 8) & 1 == 1)
}

const _: () = assert!(size_of::<OccupiedSlots>() == SLOT_COUNT / 8 && START < USAGE_SIZE);
