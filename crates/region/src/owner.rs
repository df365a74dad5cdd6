//! The owner's side of `limits`: what the container may have, changed while its programs run.

use crate::error::RegionError;
use crate::layout::{
    GATE_COPIES, GpuLimits, LIMITS_SIZE, LimitsFile, MAX_GPUS, NO_LIMIT, OVERSUBSCRIBE, SLOTS, Start,
    TurnWord, USAGE_SIZE, UsageFile, VERSION,
};
use crate::memory_account::MAX_BYTES;
use crate::mmap::{self, FileLayout, MappedFile};
use crate::{LIMITS, USAGE, futex};
use core::sync::atomic::Ordering::{Acquire, Relaxed, Release};
use std::fs::{self, File, OpenOptions, Permissions};
use std::mem::offset_of;
use std::os::unix::fs::{OpenOptionsExt, PermissionsExt};
use std::path::Path;

/// What a container may have of one GPU.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct GpuShare {
    /// The GPU's UUID.
    pub uuid: [u8; 16],
    /// Bytes that may be used; `u64::MAX` for no limit.
    pub memory: u64,
    /// Bytes one context takes on this card; zero if unknown.
    pub context: u64,
    /// Hundredths of a percent of the GPU's time that are promised; zero for no promise.
    pub cores: u32,
    /// Hundredths of a percent of the GPU's time that may be reached.
    pub ceiling: u32,
    /// Who goes first: the higher one.
    pub priority: u32,
    /// Whether launches must keep to turns.
    pub gated: bool,
}

impl Default for GpuShare {
    /// Everything of a GPU without a name.
    fn default() -> Self {
        Self {
            uuid: [0; 16],
            memory: NO_LIMIT,
            context: 0,
            cores: 0,
            ceiling: 10_000,
            priority: 0,
            gated: false,
        }
    }
}

impl GpuShare {
    fn check(&self) -> Result<(), RegionError> {
        if self.memory > MAX_BYTES && self.memory != NO_LIMIT {
            return Err(RegionError::TooMuchMemory(self.memory));
        }
        Ok(())
    }
}

/// What holds for all GPUs of a container.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct RegionPolicy {
    /// Beyond the limit memory may be placed on the host's side.
    pub oversubscribe: bool,
    /// Copies and fills keep to turns as launches do.
    pub gate_copies: bool,
}

impl RegionPolicy {
    fn bits(self) -> u32 {
        let flag = |on: bool, bit| if on { bit } else { 0 };
        flag(self.oversubscribe, OVERSUBSCRIBE) | flag(self.gate_copies, GATE_COPIES)
    }

    pub(crate) fn of(bits: u32) -> Self {
        Self { oversubscribe: bits & OVERSUBSCRIBE != 0, gate_copies: bits & GATE_COPIES != 0 }
    }
}

/// Who writes a container's limits.
#[derive(Debug)]
pub struct RegionOwner {
    limits: MappedFile<LimitsFile>,
}

impl RegionOwner {
    /// Makes the region in a folder. `limits` is made anew and takes its place at once, whole: processes that hold the
    /// old file keep to the old one, so change a region in use through [`RegionOwner::open`]. A sound `usage` is kept.
    pub fn create(folder: &Path, shares: &[GpuShare], policy: RegionPolicy) -> Result<Self, RegionError> {
        if shares.len() > MAX_GPUS {
            return Err(RegionError::TooManyGpus(shares.len()));
        }
        shares.iter().try_for_each(GpuShare::check)?;
        let usage = folder.join(USAGE);
        let kept = mmap::open(&usage, false).and_then(|file| mmap::check::<UsageFile>(&file, &usage));
        if kept.is_err() {
            // Room for the processes' own parts is kept by who takes a slot.
            let start = offset_of!(UsageFile, slots);
            make::<UsageFile>(&usage, 0o666, USAGE_SIZE, start, |file: &UsageFile| {
                begin::<UsageFile>(&file.header.start, USAGE_SIZE, SLOTS);
            })?;
        }
        let limits = make::<LimitsFile>(&folder.join(LIMITS), 0o644, LIMITS_SIZE, LIMITS_SIZE, |file| {
            for (gpu, share) in file.gpus.iter().zip(shares) {
                write(gpu, share);
            }
            file.header.policy.store(policy.bits(), Relaxed);
            begin::<LimitsFile>(&file.header.start, LIMITS_SIZE, shares.len());
        })?;
        Ok(Self { limits })
    }

    /// Takes over a region that was made before.
    pub fn open(folder: &Path) -> Result<Self, RegionError> {
        let path = folder.join(LIMITS);
        let file = mmap::open(&path, true)?;
        mmap::check::<LimitsFile>(&file, &path)?;
        Ok(Self { limits: MappedFile::new(&file, &path, true)? })
    }

    /// GPUs there are.
    #[must_use]
    pub fn gpus(&self) -> usize {
        gpus(&self.limits)
    }

    /// What the container may have of a GPU.
    #[must_use]
    pub fn share(&self, gpu: usize) -> Option<GpuShare> {
        self.limits(gpu).map(|limits| GpuShare {
            uuid: limits.uuid(),
            memory: limits.memory(),
            context: limits.context(),
            cores: limits.cores(),
            ceiling: limits.ceiling(),
            priority: limits.priority(),
            gated: limits.gated(),
        })
    }

    /// The same as processes of the container read it.
    #[must_use]
    pub fn limits(&self, gpu: usize) -> Option<&GpuLimits> {
        self.limits.gpus.get(..self.gpus())?.get(gpu)
    }

    /// Changes what the container may have of a GPU, from now on; the GPU after the last is added.
    pub fn set(&self, gpu: usize, share: &GpuShare) -> Result<(), RegionError> {
        share.check()?;
        let gpus = self.gpus();
        let Some(limits) = self.limits.gpus.get(gpu) else {
            return Err(RegionError::TooManyGpus(gpu.saturating_add(1)));
        };
        if gpu > gpus {
            return Err(RegionError::NoSuchGpu { gpu, gpus });
        }
        write(limits, share);
        if gpu == gpus {
            // At most sixteen.
            self.limits.header.start.count.store(gpus as u32 + 1, Release);
        }
        Ok(())
    }

    /// What holds for all GPUs.
    #[must_use]
    pub fn policy(&self) -> RegionPolicy {
        RegionPolicy::of(self.limits.header.policy.load(Relaxed))
    }

    /// Changes what holds for all GPUs.
    pub fn set_policy(&self, policy: RegionPolicy) {
        self.limits.header.policy.store(policy.bits(), Relaxed);
    }

    /// The GPU's arbiter lives: now, or until it has slept; on the monotonic clock, in nanoseconds.
    pub fn beat(&self, gpu: usize, when: u64) {
        if let Some(limits) = self.limits(gpu) {
            limits.gate.heartbeat.store(when, Release);
        }
    }

    /// When the GPU's arbiter lives by its own last word; zero if none ever did.
    #[must_use]
    pub fn heartbeat(&self, gpu: usize) -> u64 {
        self.limits(gpu).map_or(0, GpuLimits::heartbeat)
    }

    /// Where turns on a GPU are given. One thread at a time.
    #[must_use]
    pub fn gate(&self, gpu: usize) -> Option<TurnControl<'_>> {
        self.limits(gpu).map(|limits| TurnControl { limits })
    }
}

/// Where a container's turns on a GPU are given.
#[derive(Clone, Copy, Debug)]
pub struct TurnControl<'a> {
    limits: &'a GpuLimits,
}

impl TurnControl<'_> {
    /// The last turn.
    #[must_use]
    pub fn turn(&self) -> TurnWord {
        self.limits.turn()
    }

    /// Nanoseconds of the GPU that the container may have spent in all.
    #[must_use]
    pub fn allowed(&self) -> u64 {
        self.limits.allowed()
    }

    /// Changes what may have been spent within the turn that lasts.
    pub fn allow(&self, allowed: u64) {
        self.limits.gate.allowed.store(allowed, Release);
    }

    /// Begins the next turn and wakes all who wait for one.
    pub fn open(&self, allowed: u64) -> TurnWord {
        self.allow(allowed);
        let turn = self.turn().next_open();
        self.limits.gate.turn.store(turn.0, Release);
        futex::wake(&self.limits.gate.turn, u32::MAX);
        turn
    }

    /// Ends the turn.
    pub fn close(&self) {
        self.limits.gate.turn.store(self.turn().closed().0, Release);
    }
}

/// GPUs that the file has; never more than it has room for.
#[inline]
pub(crate) fn gpus(limits: &LimitsFile) -> usize {
    (limits.header.start.count.load(Acquire) as usize).min(MAX_GPUS)
}

fn write(gpu: &GpuLimits, share: &GpuShare) {
    for (word, half) in gpu.uuid.iter().zip(share.uuid.chunks_exact(8)) {
        word.store(mmap::number(half, 0, 8), Relaxed);
    }
    gpu.memory.store(share.memory, Relaxed);
    gpu.context.store(share.context, Relaxed);
    gpu.cores.store(share.cores, Relaxed);
    gpu.ceiling.store(share.ceiling, Relaxed);
    gpu.priority.store(share.priority, Relaxed);
    gpu.gated.store(u32::from(share.gated), Release);
}

fn begin<T: FileLayout>(start: &Start, size: usize, count: usize) {
    start.version.store(VERSION, Relaxed);
    // A handful of GPUs or a thousand slots.
    start.count.store(count as u32, Relaxed);
    start.size.store(size as u64, Relaxed);
    start.magic.store(T::MAGIC, Release);
}

/// Makes a file whole under another name, then gives it its own.
fn make<T: FileLayout>(
    path: &Path,
    mode: u32,
    size: usize,
    room: usize,
    fill: impl FnOnce(&T),
) -> Result<MappedFile<T>, RegionError> {
    let new = path.with_extension("new");
    let named = |what| move |source| RegionError::unreadable(what, path, source);
    let _ = fs::remove_file(&new);
    let file = OpenOptions::new()
        .read(true)
        .write(true)
        .create_new(true)
        .mode(mode)
        .custom_flags(libc::O_NOFOLLOW | libc::O_CLOEXEC)
        .open(&new)
        .map_err(named("make"))?;
    let made = (|| {
        file.set_len(size as u64).map_err(named("give its length to"))?;
        mmap::keep_room(&file, path, 0, room)?;
        let map = MappedFile::new(&file, path, true)?;
        fill(&map);
        // The mode above was cut by the umask, and programs of any user of the container come here.
        file.set_permissions(Permissions::from_mode(mode)).map_err(named("open up"))?;
        file.sync_all().map_err(named("write"))?;
        fs::rename(&new, path).map_err(named("put in place"))?;
        if let Some(folder) = path.parent() {
            File::open(folder).and_then(|folder| folder.sync_all()).map_err(named("keep"))?;
        }
        Ok(map)
    })();
    if made.is_err() {
        let _ = fs::remove_file(&new);
    }
    made
}
