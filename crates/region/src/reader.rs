//! The daemon's side of `usage`. It is read through the file and never through a mapping, since the container may
//! truncate it at any time, and everything in it that can be verified is verified.

use crate::USAGE_FILE;
use crate::error::RegionError;
use crate::layout::{
    ConfirmedOperations, GpuAccount, GpuTimeAccount, MARKERS_OFFSET, OccupiedSlots, ProcessIdentity,
    ProcessLane, ProcessSlot, USAGE_SIZE, UsageFile, UsageHeader,
};
use crate::liveness_lock::LivenessLocks;
use crate::markers::{ActivitySample, DIRECTORY_LENGTH, MarkerArea, PageOwner};
use crate::memory_account::{AccountWord, MEMORY_UNIT, SlotValues};
use crate::mmap::{self, number};
use crate::protocol::{
    LIVENESS_LOCKS_AT, MARKER_PAGE_COUNT, MARKER_PAGE_SIZE, MAX_GPUS, PID_LOCKS_AT, SLOT_COUNT,
};
use std::fs::File;
use std::io;
use std::mem::offset_of;
use std::os::unix::fs::{FileExt, MetadataExt};
use std::path::{Path, PathBuf};

/// Reads what a container's processes use, from outside the container.
#[derive(Debug)]
pub struct UsageReader {
    alive: LivenessLocks,
    path: PathBuf,
    /// The user that the daemon gave the file to, if it manages the region.
    owner: Option<u32>,
    /// The length of the file in the region's layout, whatever the file itself contains.
    size: usize,
}

/// Usage of a container's processes at one time.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct UsageSnapshot {
    /// Usage by GPU, in the order of the limits.
    pub gpus: [GpuUsage; MAX_GPUS],
    /// Live processes, in the order of their slots.
    pub processes: Vec<ProcessUsage>,
    /// Contradictions in the file, which only forgery can explain.
    pub forged: Vec<Forgery>,
}

/// Usage of one GPU by all processes of a container.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct GpuUsage {
    /// Bytes held by live processes.
    pub used: u64,
    /// Bytes that dead processes held and that have not been reclaimed yet.
    pub dead: u64,
    /// Most bytes that were ever in use at once.
    pub peak: u64,
    /// Number of times that memory was refused.
    pub refusals: u64,
    /// Nanoseconds that threads waited for a turn.
    pub throttled: u64,
    /// Nanoseconds of GPU time by the container's own account: all of it in layouts 1 and 2, and in layout 3 what was
    /// accounted while there was no turn scheduler.
    pub spent: u64,
    /// Incremented whenever a process begins to wait for a turn.
    pub doorbell: u32,
}

/// What a container does with one GPU's compute at one time. Any of it may be forged: bound it before use.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct ComputeActivity {
    /// Incremented whenever a process begins to wait for a turn, or to work unwatched.
    pub doorbell: u32,
    /// Number of threads of live processes that wait for a turn.
    pub waiting: u32,
    /// Whether streams of live processes occupy the GPU.
    pub streams: ActivitySample,
}

/// The processes of a container on one GPU: which slots to read, and which marker pages. The list changes rarely, and is
/// kept between reads.
#[derive(Clone, Debug, Default)]
pub(crate) struct ActiveProcesses {
    /// Occupied slots of live processes.
    slots: Vec<usize>,
    /// Marker pages of these processes for the GPU.
    pages: Vec<usize>,
}

impl ActiveProcesses {
    /// Returns the number of reads of the file that one look at the processes takes.
    pub(crate) fn reads(&self) -> usize {
        self.slots.len() + self.pages.len()
    }
}

/// Most threads that a process can have: the kernel has no more pids.
const MAX_THREADS_PER_PROCESS: u32 = 1 << 22;

/// Usage of one process.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ProcessUsage {
    /// Slot of the process.
    pub slot: usize,
    /// Pid in the caller's pid namespace, from the kernel; `None` if it has none there, or does not publish it.
    pub pid_here: Option<u32>,
    /// Pid in its own namespace, as it reports itself.
    pub pid: u32,
    /// Clock ticks between the machine's boot and the process's start, as it reports itself.
    pub started: u64,
    /// Inode of its pid namespace, as it reports itself.
    pub namespace: u64,
    /// Bytes that it holds on each GPU.
    pub held: [u64; MAX_GPUS],
    /// Nanoseconds of GPU time that it has submitted on each GPU.
    pub spent: [u64; MAX_GPUS],
    /// Number of its threads that wait for a turn on each GPU.
    pub waiting: [u32; MAX_GPUS],
    /// Time until which its submitted work will run on each GPU, as it predicts, on the monotonic clock.
    pub busy_until: [u64; MAX_GPUS],
}

/// A contradiction in `usage`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Forgery {
    /// The GPU's word differs from the sum of its slots.
    Accounts {
        /// Index of the GPU.
        gpu: usize,
        /// Bytes according to the GPU's word.
        word: u64,
        /// Bytes according to the slots.
        slots: u64,
    },
    /// A slot has several operations in progress at once.
    Slot {
        /// Number of the slot.
        slot: usize,
        /// Index of the GPU.
        gpu: usize,
    },
    /// The file was too long, or had blocks allocated beyond its end, and was truncated: see
    /// [`UsageReader::truncate_excess`].
    Grown {
        /// Bytes that were removed.
        bytes: u64,
    },
    /// The file cannot be read to its end: it was truncated.
    Truncated,
    /// The header has another magic number, layout version or size than the daemon wrote.
    Header,
    /// The file was given to another user.
    Owner,
}

impl UsageSnapshot {
    /// Returns the snapshot of a file that was truncated: nothing else is known.
    #[must_use]
    pub fn of_truncated_file() -> Self {
        Self {
            gpus: [GpuUsage::default(); MAX_GPUS],
            processes: Vec::new(),
            forged: vec![Forgery::Truncated],
        }
    }
}

/// Bytes that a file system may allocate for the file beyond its length: it allocates in blocks, which may be large.
const MAX_PREALLOCATED_BYTES: u64 = 4 << 20;

/// Length of the header and the accounts.
const SLOTS_OFFSET: usize = offset_of!(UsageFile, slots);

/// The contents of one slot, as read from the file.
struct SlotBytes {
    slot: usize,
    is_alive: bool,
    bytes: [u8; size_of::<ProcessSlot>()],
}

impl SlotBytes {
    fn lane(&self, gpu: usize, offset: usize, length: usize) -> u64 {
        number(&self.bytes, offset_of!(ProcessSlot, lanes) + gpu * size_of::<ProcessLane>() + offset, length)
    }

    fn identity(&self, offset: usize, length: usize) -> u64 {
        number(&self.bytes, offset_of!(ProcessSlot, identity) + offset, length)
    }

    fn values(&self, gpu: usize) -> SlotValues {
        SlotValues {
            total: self.lane(gpu, offset_of!(ProcessLane, total), 8),
            intent: self.lane(gpu, offset_of!(ProcessLane, intent), 8),
            confirmed: number(&self.bytes, offset_of!(ProcessSlot, confirmed) + gpu * size_of::<u64>(), 8),
        }
    }
}

const _: () = assert!(size_of::<ConfirmedOperations>() == MAX_GPUS * size_of::<u64>());

type HeaderBytes = [u8; SLOTS_OFFSET];

fn account_number(start: &HeaderBytes, gpu: usize, offset: usize, length: usize) -> u64 {
    number(start, offset_of!(UsageFile, accounts) + gpu * size_of::<GpuAccount>() + offset, length)
}

fn word(start: &HeaderBytes, gpu: usize) -> u64 {
    account_number(start, gpu, offset_of!(GpuAccount, word), 8)
}

impl UsageReader {
    /// Opens `usage` of the region in `folder`, of any supported layout.
    pub fn open(folder: &Path) -> Result<Self, RegionError> {
        let (file, path) = Self::open_file(folder)?;
        let size = mmap::check::<UsageFile>(&file, &path)?.usage_size();
        Ok(Self::of_file(file, path, None, size))
    }

    /// Opens the `usage` that belongs to a `limits` of a supported layout, in which it has `size` bytes, and that the
    /// daemon gave to `user`.
    ///
    /// Contents and owner are not verified where only the daemon can put files into the directory: the container can
    /// change both, and could otherwise end its own audit with one write. Each snapshot then has a [`Forgery`].
    pub(crate) fn open_managed(folder: &Path, user: u32, size: usize) -> Result<Self, RegionError> {
        let (file, path) = Self::open_file(folder)?;
        mmap::check_regular(&file, &path)?;
        if !mmap::is_private_directory(folder)? {
            mmap::check_owner(&file, &path, user)?;
        }
        Ok(Self::of_file(file, path, Some(user), size))
    }

    fn open_file(folder: &Path) -> Result<(File, PathBuf), RegionError> {
        let path = folder.join(USAGE_FILE);
        Ok((mmap::open(&path, false)?, path))
    }

    fn of_file(file: File, path: PathBuf, owner: Option<u32>, size: usize) -> Self {
        Self { alive: LivenessLocks::in_one_file(file, LIVENESS_LOCKS_AT, PID_LOCKS_AT), path, owner, size }
    }

    pub(crate) fn file(&self) -> &File {
        self.alive.file()
    }

    pub(crate) fn path(&self) -> &Path {
        &self.path
    }

    /// Reads the word that processes increment when they begin to wait; `None` if the file was truncated.
    pub(crate) fn doorbell(&self, gpu: usize) -> Option<u32> {
        let at = offset_of!(UsageFile, accounts)
            + gpu * size_of::<GpuAccount>()
            + offset_of!(GpuAccount, time)
            + offset_of!(GpuTimeAccount, doorbell);
        let mut bytes = [0; 4];
        self.file().read_exact_at(&mut bytes, at as u64).ok()?;
        Some(u32::from_le_bytes(bytes))
    }

    /// Lists the live processes of the container and their marker pages for a GPU.
    pub(crate) fn list_active(&self, gpu: usize, active: &mut ActiveProcesses) -> Result<(), RegionError> {
        let start = self.read_header()?;
        let ActiveProcesses { slots, pages } = active;
        slots.clear();
        pages.clear();
        slots.extend(occupied(&start).filter(|&slot| self.alive.is_alive(slot)));
        if self.size < USAGE_SIZE {
            return Ok(());
        }
        let mut directory = [0; DIRECTORY_LENGTH];
        self.read_at(&mut directory, MARKERS_OFFSET)?;
        let owner = |page: usize| PageOwner::unpack(number(&directory, page * size_of::<u32>(), 4) as u32);
        pages.extend((0..MARKER_PAGE_COUNT).filter(|&page| {
            owner(page).is_some_and(|owner| owner.gpu == gpu && slots.contains(&owner.slot))
        }));
        Ok(())
    }

    /// Reads what these processes do on a GPU, in a few small reads.
    pub(crate) fn activity(
        &self,
        gpu: usize,
        active: &ActiveProcesses,
    ) -> Result<ComputeActivity, RegionError> {
        let doorbell = self.doorbell(gpu).ok_or_else(|| self.truncated())?;
        let mut activity = ComputeActivity { doorbell, ..ComputeActivity::default() };
        for slot in &active.slots {
            let at = SLOTS_OFFSET
                + slot * size_of::<ProcessSlot>()
                + offset_of!(ProcessSlot, lanes)
                + gpu * size_of::<ProcessLane>()
                + offset_of!(ProcessLane, waiting);
            let mut waiting = [0; 4];
            self.read_at(&mut waiting, at)?;
            let waiting = u32::from_le_bytes(waiting).min(MAX_THREADS_PER_PROCESS);
            activity.waiting = activity.waiting.saturating_add(waiting);
        }
        for page in &active.pages {
            let mut bytes = [0; MARKER_PAGE_SIZE];
            let at = MARKERS_OFFSET + offset_of!(MarkerArea, pages) + page * MARKER_PAGE_SIZE;
            self.read_at(&mut bytes, at)?;
            activity.streams.merge(&ActivitySample::of_page(&bytes));
        }
        Ok(activity)
    }

    /// Reads what the container does with a GPU's compute.
    pub fn gpu_activity(&self, gpu: usize) -> Result<ComputeActivity, RegionError> {
        if gpu >= MAX_GPUS {
            return Ok(ComputeActivity::default());
        }
        let mut active = ActiveProcesses::default();
        self.list_active(gpu, &mut active)?;
        self.activity(gpu, &active)
    }

    fn truncated(&self) -> RegionError {
        RegionError::damaged(&self.path, "it has been truncated")
    }

    /// Truncates the file to its proper length if it was made longer, or had blocks allocated beyond its end, because
    /// it lies in the machine's memory. Returns how many bytes were freed; `None` if there was nothing to truncate.
    pub fn truncate_excess(&self) -> Result<Option<u64>, RegionError> {
        let examine = |file: &File| {
            let data = file.metadata().map_err(|error| RegionError::io("examine", &self.path, error))?;
            Ok::<_, RegionError>((
                data.len().saturating_sub(self.size as u64),
                data.blocks().saturating_mul(512),
            ))
        };
        let own = self.alive.file();
        let (longer, room) = examine(own)?;
        if longer == 0 && room <= self.size as u64 + MAX_PREALLOCATED_BYTES {
            return Ok(None);
        }
        let file = mmap::open(&self.path, true)?;
        if mmap::identity(&file, &self.path)? != mmap::identity(own, &self.path)? {
            return Err(RegionError::damaged(&self.path, "it was replaced by another file"));
        }
        // To its proper length and not below, whatever was done to it meanwhile: processes that have it mapped would be
        // killed.
        file.set_len(self.size as u64).map_err(|error| RegionError::io("truncate", &self.path, error))?;
        let (_, left) = examine(&file)?;
        // Some file systems allocate more for every file than assumed here; that is not the container's doing.
        let back = longer.max(room.saturating_sub(left));
        Ok((back > 0).then_some(back))
    }

    /// Reads the usage of all GPUs and processes.
    pub fn snapshot(&self) -> Result<UsageSnapshot, RegionError> {
        /// Programs change the accounts while they are read. A contradiction that is still there after this many
        /// attempts is not an artifact of reading.
        const MAX_READ_ATTEMPTS: usize = 5;
        let mut snapshot = self.read_once()?;
        for _ in 1..MAX_READ_ATTEMPTS {
            if snapshot.1 && snapshot.0.forged.is_empty() {
                break;
            }
            snapshot = self.read_once()?;
        }
        if !snapshot.1 {
            // The file changed during every attempt: a contradiction cannot be distinguished from a change. Processes
            // never change the header and the owner.
            snapshot.0.forged.retain(|forgery| matches!(forgery, Forgery::Header | Forgery::Owner));
        }
        Ok(snapshot.0)
    }

    /// Reads the file once. Also returns whether nothing changed meanwhile.
    fn read_once(&self) -> Result<(UsageSnapshot, bool), RegionError> {
        let before = self.read_header()?;
        let slots = self.read_slots(&before)?;
        let after = self.read_header()?;
        let still = (0..MAX_GPUS).all(|gpu| word(&before, gpu) == word(&after, gpu))
            && occupied(&before).eq(occupied(&after));
        let mut forged = Vec::new();
        if !mmap::is_intact_header::<UsageFile>(&before[..]) {
            forged.push(Forgery::Header);
        }
        if self.owner.is_some_and(|owner| mmap::check_owner(self.file(), &self.path, owner).is_err()) {
            forged.push(Forgery::Owner);
        }
        let mut gpus: [GpuUsage; MAX_GPUS] = std::array::from_fn(|gpu| {
            GpuUsage::from_account(|offset, length| account_number(&before, gpu, offset, length))
        });
        let mut processes = Vec::new();
        let mut all = [0u64; MAX_GPUS];
        for read in &slots {
            let mut process = ProcessUsage {
                slot: read.slot,
                pid_here: None,
                pid: read.identity(offset_of!(ProcessIdentity, pid), 4) as u32,
                started: read.identity(offset_of!(ProcessIdentity, started), 8),
                namespace: read.identity(offset_of!(ProcessIdentity, namespace), 8),
                held: [0; MAX_GPUS],
                spent: std::array::from_fn(|gpu| read.lane(gpu, offset_of!(ProcessLane, spent), 8)),
                // Four bytes were read, so it fits.
                waiting: std::array::from_fn(|gpu| {
                    read.lane(gpu, offset_of!(ProcessLane, waiting), 4).min(MAX_THREADS_PER_PROCESS.into())
                        as u32
                }),
                busy_until: std::array::from_fn(|gpu| read.lane(gpu, offset_of!(ProcessLane, busy_until), 8)),
            };
            for gpu in 0..MAX_GPUS {
                let values = read.values(gpu);
                if !values.is_consistent() {
                    forged.push(Forgery::Slot { slot: read.slot, gpu });
                }
                let held =
                    values.resolve_held(word(&before, gpu), read.slot).units.saturating_mul(MEMORY_UNIT);
                process.held[gpu] = held;
                all[gpu] = all[gpu].saturating_add(held);
                let side = if read.is_alive { &mut gpus[gpu].used } else { &mut gpus[gpu].dead };
                *side = side.saturating_add(held);
            }
            if read.is_alive {
                process.pid_here = self.alive.pid(read.slot);
                processes.push(process);
            }
        }
        for gpu in 0..MAX_GPUS {
            let bytes = AccountWord::unpack(word(&before, gpu)).units.saturating_mul(MEMORY_UNIT);
            if bytes != all[gpu] {
                forged.push(Forgery::Accounts { gpu, word: bytes, slots: all[gpu] });
            }
            // A process that is killed between taking memory and recording the peak leaves the peak too low.
            gpus[gpu].peak = gpus[gpu].peak.max(bytes);
        }
        Ok((UsageSnapshot { gpus, processes, forged }, still))
    }

    fn read_header(&self) -> Result<Box<HeaderBytes>, RegionError> {
        let mut start = Box::new([0; SLOTS_OFFSET]);
        self.read_at(&mut start[..], 0)?;
        Ok(start)
    }

    fn read_slots(&self, start: &HeaderBytes) -> Result<Vec<SlotBytes>, RegionError> {
        let mut slots = Vec::new();
        for slot in occupied(start) {
            let is_alive = self.alive.is_alive(slot);
            let mut read = SlotBytes { slot, is_alive, bytes: [0; size_of::<ProcessSlot>()] };
            self.read_at(&mut read.bytes, SLOTS_OFFSET + slot * size_of::<ProcessSlot>())?;
            slots.push(read);
        }
        Ok(slots)
    }

    fn read_at(&self, bytes: &mut [u8], at: usize) -> Result<(), RegionError> {
        self.alive.file().read_exact_at(bytes, at as u64).map_err(|error| match error.kind() {
            io::ErrorKind::UnexpectedEof => self.truncated(),
            _ => RegionError::io("read", &self.path, error),
        })
    }
}

impl GpuUsage {
    /// Reads a GPU's account with a function that reads a number at an offset.
    fn from_account(read_number: impl Fn(usize, usize) -> u64) -> Self {
        let time = |offset, length| read_number(offset_of!(GpuAccount, time) + offset, length);
        Self {
            used: 0,
            dead: 0,
            peak: read_number(offset_of!(GpuAccount, peak), 8),
            refusals: read_number(offset_of!(GpuAccount, refusals), 8),
            throttled: time(offset_of!(GpuTimeAccount, throttled), 8),
            spent: time(offset_of!(GpuTimeAccount, spent), 8),
            // Four bytes were read, so it fits.
            doorbell: time(offset_of!(GpuTimeAccount, doorbell), 4) as u32,
        }
    }
}

/// Returns the slots that are marked as occupied.
fn occupied(start: &HeaderBytes) -> impl Iterator<Item = usize> + '_ {
    let at = offset_of!(UsageFile, header) + offset_of!(UsageHeader, occupied);
    (0..SLOT_COUNT).filter(move |slot| number(start, at + slot / 8, 1) >> (slot % 8) & 1 == 1)
}

const _: () = assert!(size_of::<OccupiedSlots>() == SLOT_COUNT / 8 && SLOTS_OFFSET < USAGE_SIZE);
