//! The daemon's side of `limits`: sets what the container may use, while its programs run.

use crate::error::RegionError;
use crate::layout::{
    FileHeader, GpuLimits, LIMITS_SIZE, LayoutVersion, LimitsFile, TurnWord, USAGE_SIZE, UsageFile,
};
use crate::memory_account::MAX_BYTES;
use crate::mmap::{self, FileLayout, MappedFile};
use crate::protocol::{
    MAX_GPUS, NO_MEMORY_LIMIT, POLICY_OVERSUBSCRIBE, POLICY_THROTTLE_COPIES, SLOT_COUNT, WHOLE_GPU,
};
use crate::{LIMITS_FILE, USAGE_FILE, futex};
use core::sync::atomic::AtomicU32;
use core::sync::atomic::Ordering::{AcqRel, Acquire, Relaxed, Release};
use std::fs::{self, File, OpenOptions, Permissions};
use std::mem::offset_of;
use std::os::unix::fs::{OpenOptionsExt, PermissionsExt};
use std::path::{Path, PathBuf};
use std::sync::{Mutex, PoisonError};

/// What a container may use of one GPU.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct GpuShare {
    /// UUID of the GPU, as raw bytes.
    pub uuid: [u8; 16],
    /// Bytes that may be used; `u64::MAX` for no limit.
    pub memory: u64,
    /// Bytes that one context takes on this card; zero if unknown.
    pub context: u64,
    /// Guaranteed compute in thousandths of a percent of the GPU's time; zero for no guarantee.
    pub cores: u32,
    /// Compute that the container may reach, in thousandths of a percent of the GPU's time.
    pub ceiling: u32,
    /// Priority among containers that want the same turn: the higher goes first.
    pub priority: u32,
    /// Whether launches may have to wait for turns.
    pub waits_for_turns: bool,
    /// Whether its launches should start soon, at some cost in throughput.
    pub low_latency: bool,
}

impl Default for GpuShare {
    /// Returns an unlimited share of a GPU with a zero UUID.
    fn default() -> Self {
        Self {
            uuid: [0; 16],
            memory: NO_MEMORY_LIMIT,
            context: 0,
            cores: 0,
            ceiling: WHOLE_GPU,
            priority: 0,
            waits_for_turns: false,
            low_latency: false,
        }
    }
}

impl GpuShare {
    fn check(&self) -> Result<(), RegionError> {
        if self.memory > MAX_BYTES && self.memory != NO_MEMORY_LIMIT {
            return Err(RegionError::MemoryLimitTooLarge(self.memory));
        }
        Ok(())
    }
}

/// Settings that apply to all GPUs of a container.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct RegionPolicy {
    /// Whether memory beyond the limit may be placed on the host.
    pub oversubscribe: bool,
    /// Whether copies and fills wait for turns as launches do.
    pub throttle_copies: bool,
}

impl RegionPolicy {
    fn bits(self) -> u32 {
        let flag = |on: bool, bit| if on { bit } else { 0 };
        flag(self.oversubscribe, POLICY_OVERSUBSCRIBE) | flag(self.throttle_copies, POLICY_THROTTLE_COPIES)
    }

    pub(crate) fn from_bits(bits: u32) -> Self {
        Self {
            oversubscribe: bits & POLICY_OVERSUBSCRIBE != 0,
            throttle_copies: bits & POLICY_THROTTLE_COPIES != 0,
        }
    }
}

/// The writer of a container's limits.
#[derive(Debug)]
pub struct RegionOwner {
    limits: MappedFile<LimitsFile>,
    layout: LayoutVersion,
    path: PathBuf,
    /// Held while the list of GPUs grows.
    growing: Mutex<()>,
    /// Per GPU: how often this handle has changed whether launches look at the turn; wraps.
    gate_changes: [AtomicU32; MAX_GPUS],
}

/// Whether a container's launches look at its turn on a GPU, which decides whether it is charged by its markers.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct TurnGate {
    /// Whether they do now.
    pub is_gated: bool,
    /// How often that has changed since the region was opened; wraps. If it is the same as before, nothing has changed
    /// meanwhile.
    pub changes: u32,
}

impl RegionOwner {
    /// Creates the region in a directory, in the newest layout. An intact `usage` of that layout is kept. `limits` is created again
    /// and put in place by a rename: processes that have the old file mapped continue with the old one, so a region in
    /// use is changed through [`RegionOwner::open`]. Files of an unsupported layout are never replaced.
    pub fn create(folder: &Path, shares: &[GpuShare], policy: RegionPolicy) -> Result<Self, RegionError> {
        if shares.len() > MAX_GPUS {
            return Err(RegionError::TooManyGpus(shares.len()));
        }
        shares.iter().try_for_each(GpuShare::check)?;
        let (limits, usage) = (folder.join(LIMITS_FILE), folder.join(USAGE_FILE));
        intact_layout::<LimitsFile>(&limits)?;
        if intact_layout::<UsageFile>(&usage)? != Some(LayoutVersion::CURRENT) {
            // Each process allocates its own slot when it takes it.
            let start = offset_of!(UsageFile, slots);
            make::<UsageFile>(&usage, 0o666, USAGE_SIZE, start, |file: &UsageFile| {
                begin::<UsageFile>(&file.header.file, USAGE_SIZE, SLOT_COUNT);
            })?;
        }
        let layout = LayoutVersion::CURRENT;
        let file = make::<LimitsFile>(&limits, 0o644, LIMITS_SIZE, LIMITS_SIZE, |file| {
            for (gpu, share) in file.gpus.iter().zip(shares) {
                write(gpu, share, layout);
            }
            file.header.policy.store(policy.bits(), Relaxed);
            // At most 16, so it fits.
            file.header.base_gpus.store(shares.len() as u32, Relaxed);
            begin::<LimitsFile>(&file.header.file, LIMITS_SIZE, shares.len());
        })?;
        Ok(Self::of_file(file, layout, limits))
    }

    /// Opens the region in a directory, of any supported layout. `limits` must belong to the calling user: neither the
    /// container nor another user may be able to change it.
    pub fn open(folder: &Path) -> Result<Self, RegionError> {
        let path = folder.join(LIMITS_FILE);
        let file = mmap::open(&path, true)?;
        let layout = mmap::check::<LimitsFile>(&file, &path)?;
        mmap::check_owner(&file, &path, effective_user())?;
        let limits = MappedFile::new(&file, &path, true)?;
        Ok(Self::of_file(limits, layout, path))
    }

    fn of_file(limits: MappedFile<LimitsFile>, layout: LayoutVersion, path: PathBuf) -> Self {
        let gate_changes = [const { AtomicU32::new(0) }; MAX_GPUS];
        Self { limits, layout, path, growing: Mutex::new(()), gate_changes }
    }

    /// Returns the version of the region's layout.
    #[must_use]
    pub fn layout(&self) -> u32 {
        self.layout.number()
    }

    /// Returns whether processes mark when their work runs. The turn scheduler gives no turns without that.
    #[must_use]
    pub fn has_markers(&self) -> bool {
        self.layout.has_markers()
    }

    /// Returns the length of `usage` in bytes in this layout.
    pub(crate) fn usage_size(&self) -> usize {
        self.layout.usage_size()
    }

    /// Returns the path of the limits file.
    #[must_use]
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// Returns the number of GPUs, including attachments.
    #[must_use]
    pub fn gpus(&self) -> usize {
        gpu_count(&self.limits)
    }

    /// Returns the number of GPUs that the region was created with. They come first.
    #[must_use]
    pub fn base_gpus(&self) -> usize {
        if self.layout.can_grow() {
            (self.limits.header.base_gpus.load(Relaxed) as usize).min(self.gpus())
        } else {
            self.gpus()
        }
    }

    /// Returns whether the region is for these GPUs, in this order: both lists begin with its base, and they agree
    /// where both have a GPU. A region that grew, or is about to grow, is still the same region.
    #[must_use]
    pub fn is_for<'a>(&self, gpus: impl ExactSizeIterator<Item = &'a [u8; 16]>) -> bool {
        gpus.len() >= self.base_gpus()
            && gpus.zip(&self.limits.gpus[..self.gpus()]).all(|(uuid, limits)| limits.uuid() == *uuid)
    }

    /// Returns what the container may use of a GPU.
    #[must_use]
    pub fn share(&self, gpu: usize) -> Option<GpuShare> {
        let limits = self.limits(gpu)?;
        let (cores, ceiling) = self.compute(limits);
        Some(GpuShare {
            uuid: limits.uuid(),
            memory: limits.memory(),
            context: limits.context(),
            cores,
            ceiling,
            priority: limits.priority(),
            waits_for_turns: limits.waits_for_turns(),
            low_latency: limits.is_low_latency(),
        })
    }

    /// Returns the limits of a GPU as processes of the container read them.
    #[must_use]
    pub fn limits(&self, gpu: usize) -> Option<&GpuLimits> {
        self.limits.gpus.get(..self.gpus())?.get(gpu)
    }

    /// Returns `cores` and `ceiling` of a GPU's limits in thousandths of a percent.
    pub(crate) fn compute(&self, limits: &GpuLimits) -> (u32, u32) {
        let cores = self.layout.cores_from_word(limits.cores.load(Relaxed));
        (cores, self.layout.cores_from_word(limits.ceiling.load(Relaxed)))
    }

    /// Changes what the container may use of a GPU. Returns whether anything changed.
    pub fn set(&self, gpu: usize, share: &GpuShare) -> Result<bool, RegionError> {
        share.check()?;
        let gpus = self.gpus();
        let Some(limits) = self.limits(gpu) else { return Err(RegionError::NoSuchGpu { gpu, gpus }) };
        let differs = words(limits) != encoded(share, self.layout);
        if differs {
            if limits.waits_for_turns() != share.waits_for_turns {
                self.gate_changes[gpu].fetch_add(1, Relaxed);
            }
            write(limits, share, self.layout);
        }
        Ok(differs)
    }

    /// Attaches a GPU: appends it to the list, up to [`MAX_GPUS`]. Returns its index. Running processes find it the
    /// next time that they look up an unknown device; the turn scheduler finds it when it is refreshed.
    pub fn extend(&self, share: &GpuShare) -> Result<usize, RegionError> {
        share.check()?;
        if !self.layout.can_grow() {
            return Err(RegionError::CannotGrow(self.layout.number()));
        }
        let _growing = self.growing.lock().unwrap_or_else(PoisonError::into_inner);
        let gpus = self.gpus();
        if let Some(same) = self.limits.gpus[..gpus].iter().position(|gpu| gpu.uuid() == share.uuid) {
            return Err(RegionError::DuplicateGpu(same));
        }
        let Some(limits) = self.limits.gpus.get(gpus) else {
            return Err(RegionError::TooManyGpus(gpus.saturating_add(1)));
        };
        write(limits, share, self.layout);
        // At most 16, so it fits. Order matters: first the limits, then the count, then the generation.
        self.limits.header.file.count.store(gpus as u32 + 1, Release);
        self.limits.header.generation.fetch_add(1, Release);
        Ok(gpus)
    }

    /// Makes running processes look up unknown devices again. A daemon that was killed while it attached a GPU may not
    /// have announced it.
    pub(crate) fn announce_gpus(&self) {
        if self.layout.can_grow() {
            self.limits.header.generation.fetch_add(1, Release);
        }
    }

    /// Returns the settings that apply to all GPUs.
    #[must_use]
    pub fn policy(&self) -> RegionPolicy {
        RegionPolicy::from_bits(self.limits.header.policy.load(Relaxed))
    }

    /// Changes the settings that apply to all GPUs.
    pub fn set_policy(&self, policy: RegionPolicy) {
        self.limits.header.policy.store(policy.bits(), Relaxed);
    }

    /// Writes a heartbeat: the GPU's turn scheduler runs at `when`, or sleeps until then, on the monotonic clock.
    pub fn beat(&self, gpu: usize, when: u64) {
        if let Some(limits) = self.limits(gpu) {
            limits.turns.heartbeat.store(when, Release);
        }
    }

    /// Returns the last heartbeat of the GPU's turn scheduler; zero if there was none.
    #[must_use]
    pub fn heartbeat(&self, gpu: usize) -> u64 {
        self.limits(gpu).map_or(0, GpuLimits::heartbeat)
    }

    /// Returns the control over a GPU's turns. One thread at a time may use it.
    #[must_use]
    pub fn turns(&self, gpu: usize) -> Option<TurnControl<'_>> {
        Some(TurnControl { limits: self.limits(gpu)?, changes: self.gate_changes.get(gpu)? })
    }

    /// Returns whether launches look at the turn on a GPU. Layouts without markers have no such state: there they
    /// account for their work wherever launches wait for turns.
    #[must_use]
    pub fn gate(&self, gpu: usize) -> Option<TurnGate> {
        let limits = self.limits(gpu)?;
        // The number is read first, so that a change during the call is found at the next call at the latest.
        let changes = self.gate_changes.get(gpu)?.load(Acquire);
        let waits = limits.waits_for_turns();
        let is_gated = if self.has_markers() { waits && limits.is_gated() } else { waits };
        Some(TurnGate { is_gated, changes })
    }
}

/// Opens and closes a container's turns on a GPU.
#[derive(Clone, Copy, Debug)]
pub struct TurnControl<'a> {
    limits: &'a GpuLimits,
    changes: &'a AtomicU32,
}

impl TurnControl<'_> {
    /// Returns the last turn.
    #[must_use]
    pub fn turn(&self) -> TurnWord {
        self.limits.turn()
    }

    /// Opens the next turn and wakes every thread that waits for one.
    pub fn open(&self) -> TurnWord {
        self.change(self.turn().next_open())
    }

    /// Closes the turn, which keeps its number. Has no effect on a turn that is closed already.
    pub fn close(&self) {
        self.limits.turns.turn.store(self.turn().closed().0, Release);
    }

    /// Closes the turn except for streams that have nothing queued, and wakes every thread that waits.
    pub fn drain(&self) {
        self.change(self.turn().draining());
    }

    fn change(&self, turn: TurnWord) -> TurnWord {
        self.limits.turns.turn.store(turn.0, Release);
        futex::wake(&self.limits.turns.turn, u32::MAX);
        turn
    }

    /// Sets whether launches must look at the turn. Threads that wait are woken if they no longer have to.
    pub fn set_gated(&self, gated: bool) {
        let was_gated = self.limits.turns.gated.swap(gated.into(), AcqRel) != 0;
        if was_gated != gated {
            self.changes.fetch_add(1, Release);
        }
        if was_gated && !gated {
            futex::wake(&self.limits.turns.turn, u32::MAX);
        }
    }

    /// Sets whether the turn scheduler looks at the container at short intervals.
    pub fn set_watched(&self, watched: bool) {
        self.limits.turns.watched.store(watched.into(), Release);
    }

    /// Sets the nanoseconds of work that a process may have queued.
    pub fn set_run_ahead(&self, nanoseconds: u64) {
        self.limits.turns.run_ahead.store(nanoseconds, Relaxed);
    }

    /// Adds to the nanoseconds that the container is charged in total. Any thread may call this.
    pub fn charge(&self, nanoseconds: u64) {
        self.limits.turns.charged.fetch_add(nanoseconds, Relaxed);
    }
}

/// Returns the number of GPUs in the file, at most [`MAX_GPUS`].
#[inline]
pub(crate) fn gpu_count(limits: &LimitsFile) -> usize {
    (limits.header.file.count.load(Acquire) as usize).min(MAX_GPUS)
}

/// The words of a share as a layout encodes them.
type ShareWords = ([u64; 4], [u32; 5]);

fn encoded(share: &GpuShare, layout: LayoutVersion) -> ShareWords {
    let half = |at| mmap::number(&share.uuid, at, 8);
    let cores = [share.cores, share.ceiling].map(|cores| layout.cores_to_word(cores));
    (
        [half(0), half(8), share.memory, share.context],
        [
            cores[0],
            cores[1],
            share.priority,
            u32::from(share.low_latency && layout.has_markers()),
            u32::from(share.waits_for_turns),
        ],
    )
}

fn words(gpu: &GpuLimits) -> ShareWords {
    let [first, second] = [0, 1].map(|half: usize| gpu.uuid[half].load(Relaxed));
    let numbers = [&gpu.cores, &gpu.ceiling, &gpu.priority, &gpu.low_latency, &gpu.waits_for_turns]
        .map(|word| word.load(Relaxed));
    ([first, second, gpu.memory(), gpu.context()], numbers)
}

fn write(gpu: &GpuLimits, share: &GpuShare, layout: LayoutVersion) {
    let ([first, second, memory, context], [cores, ceiling, priority, low_latency, waits_for_turns]) =
        encoded(share, layout);
    gpu.uuid[0].store(first, Relaxed);
    gpu.uuid[1].store(second, Relaxed);
    gpu.memory.store(memory, Relaxed);
    gpu.context.store(context, Relaxed);
    gpu.cores.store(cores, Relaxed);
    gpu.ceiling.store(ceiling, Relaxed);
    gpu.priority.store(priority, Relaxed);
    gpu.low_latency.store(low_latency, Relaxed);
    if gpu.waits_for_turns.swap(waits_for_turns, Release) != waits_for_turns {
        // Until the turn scheduler decides. Layouts 1 and 2 ignore the word.
        gpu.turns.gated.store(waits_for_turns, Release);
    }
}

/// Returns the effective user of this process.
#[allow(unsafe_code)]
pub(crate) fn effective_user() -> u32 {
    // SAFETY: the function takes no arguments and cannot fail.
    unsafe { libc::geteuid() }
}

/// Returns the layout of the file if it exists and is intact. An unsupported layout is an error: such a file must not
/// be replaced.
fn intact_layout<T: FileLayout>(path: &Path) -> Result<Option<LayoutVersion>, RegionError> {
    match mmap::open(path, false).and_then(|file| mmap::check::<T>(&file, path)) {
        Ok(layout) => Ok(Some(layout)),
        Err(error @ RegionError::UnsupportedVersion { .. }) => Err(error),
        Err(_) => Ok(None),
    }
}

fn begin<T: FileLayout>(header: &FileHeader, size: usize, count: usize) {
    header.version.store(LayoutVersion::CURRENT.number(), Relaxed);
    // At most 16 GPUs or 1,024 slots, so it fits.
    header.count.store(count as u32, Relaxed);
    header.size.store(size as u64, Relaxed);
    header.magic.store(T::MAGIC, Release);
}

/// Creates a complete file under a temporary name, then renames it.
fn make<T: FileLayout>(
    path: &Path,
    mode: u32,
    size: usize,
    allocated: usize,
    fill: impl FnOnce(&T),
) -> Result<MappedFile<T>, RegionError> {
    let new = path.with_extension("new");
    let failed = |action| move |error| RegionError::io(action, path, error);
    let _ = fs::remove_file(&new);
    let file = OpenOptions::new()
        .read(true)
        .write(true)
        .create_new(true)
        .mode(mode)
        .custom_flags(libc::O_NOFOLLOW | libc::O_CLOEXEC)
        .open(&new)
        .map_err(failed("create"))?;
    let made = (|| {
        file.set_len(size as u64).map_err(failed("set the length of"))?;
        mmap::allocate(&file, path, 0, allocated)?;
        let map = MappedFile::new(&file, path, true)?;
        fill(&map);
        // The umask restricted the mode above, and programs of any user in the container open the file.
        file.set_permissions(Permissions::from_mode(mode)).map_err(failed("set the mode of"))?;
        file.sync_all().map_err(failed("write"))?;
        fs::rename(&new, path).map_err(failed("put in place"))?;
        if let Some(folder) = path.parent() {
            File::open(folder).and_then(|folder| folder.sync_all()).map_err(failed("persist"))?;
        }
        Ok(map)
    })();
    if made.is_err() {
        let _ = fs::remove_file(&new);
    }
    made
}
