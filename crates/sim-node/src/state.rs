//! What all processes of a simulated node share: who they are, what memory they hold, whose turn it is on which GPU, and
//! what is wrong with the cards. One file, mapped by all; no process serves the others.
//!
//! Guaranteed: a process may be killed at any instruction. Its slot is found free by the next one who looks, its memory
//! and its work are taken back, and what it was in the middle of is finished or undone.
#![allow(unsafe_code)]

mod client;
mod clock;
mod condition;
mod lane;
mod layout;
mod memory;
mod robust;
mod timeline;

#[cfg(test)]
mod tests;

pub use client::Process;
use clock::Ticks;
pub use clock::{now, wait_until};
pub use condition::{Counter, Fault, FaultEvent, Setting};
pub use lane::{GpuLane, GpuLost};
pub use layout::{MAX_GPUS, SLOTS};
pub use memory::{UNIT, units};

use layout::{MAGIC, Shared};
use partage_region::liveness_lock::LivenessLocks;
use partage_region::memory_account;
use robust::Held;
use std::fs::{File, OpenOptions};
use std::io;
use std::os::fd::AsRawFd;
use std::os::unix::fs::OpenOptionsExt;
use std::path::{Path, PathBuf};
use std::sync::atomic::AtomicU64;
use std::sync::atomic::Ordering::{Acquire, Relaxed, Release};
use timeline::Timeline;

/// The file that all processes map.
pub(crate) const STATE: &str = "state";
/// The file whose locks say who is alive.
pub(crate) const CLIENTS: &str = "clients";
/// The file whose locks say who is who.
pub(crate) const PIDS: &str = "pids";

/// What a node's state is made from.
#[derive(Clone, Debug)]
pub struct Setup {
    /// Memory that programs may use, of each GPU.
    pub memory: Vec<u64>,
    /// How long a process keeps the GPU while others wait, in nanoseconds.
    pub slice: u64,
    /// The period over which utilisation is averaged, in nanoseconds.
    pub window: u64,
}

/// Why the state of a node cannot be had.
#[derive(Debug, thiserror::Error)]
pub enum StateError {
    /// A file of it cannot be opened or mapped.
    #[error("{what} {}: {source}", path.display())]
    File {
        /// What was done to it.
        what: &'static str,
        /// Which.
        path: PathBuf,
        /// Why it failed.
        source: io::Error,
    },
    /// Not a state file, or one of another version.
    #[error("{} was not made by this version of Partage: make the simulated node anew", .0.display())]
    Foreign(PathBuf),
    /// Every slot is taken.
    #[error("{0} processes use this simulated node already, and it has room for no more")]
    Full(usize),
    /// There cannot be as many GPUs.
    #[error("a simulated node has at most {MAX_GPUS} GPUs, not {0}")]
    TooManyGpus(usize),
}

/// A process's hold on the state of a node. Dropping it gives up the slot.
#[derive(Debug)]
pub struct State {
    shared: &'static Shared,
    /// The mapped file: pages are asked for before they are touched.
    file: File,
    alive: LivenessLocks,
    slot: usize,
    gpus: usize,
    /// When, on the processor's counter, it is worth looking for the dead again.
    next_look: AtomicU64,
}

/// What happened on a GPU up to an instant.
#[derive(Clone, Debug)]
pub struct Usage {
    /// The instant, in nanoseconds of the monotonic clock.
    pub at: u64,
    /// Nanoseconds of the clock during which anything ran, since the node was made.
    pub busy: u64,
    /// The processes that have contexts, with the nanoseconds each was served since it opened its lane.
    pub processes: Vec<(Process, u64)>,
}

impl std::fmt::Debug for Shared {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("Shared")
    }
}

/// Makes the state files of a node in its folder.
pub fn create(folder: &Path, setup: &Setup) -> Result<(), StateError> {
    if setup.memory.len() > MAX_GPUS {
        return Err(StateError::TooManyGpus(setup.memory.len()));
    }
    open(&folder.join(CLIENTS))?;
    open(&folder.join(PIDS))?;
    let path = folder.join(STATE);
    let file = open(&path)?;
    file.set_len(size_of::<Shared>() as u64).map_err(|source| StateError::File {
        what: "give its size to",
        path: path.clone(),
        source,
    })?;
    let shared = map(&file, &path)?;
    reserve(&file, &path, &shared.header, shared)?;
    reserve(&file, &path, &shared.gpus, shared)?;
    let header = &shared.header;
    header.host_namespace.store(client::pid_namespace(), Relaxed);
    header.slice.store(setup.slice, Relaxed);
    header.window.store(setup.window, Relaxed);
    for (gpu, memory) in shared.gpus.iter().zip(&setup.memory) {
        gpu.memory.capacity.store(memory / UNIT, Relaxed);
    }
    header.magic.store(MAGIC, Release);
    Ok(())
}

fn open(path: &Path) -> Result<File, StateError> {
    // Programs of any user, in any container, use the node's GPUs, as they may use the device nodes of real ones.
    let file = OpenOptions::new().read(true).write(true).create(true).truncate(false).mode(0o666).open(path);
    let named = |what, source| StateError::File { what, path: path.to_path_buf(), source };
    let file = file.map_err(|source| named("open", source))?;
    // The mode above was cut by the umask. Only the owner can mend it, and the owner is who made it.
    if file.metadata().is_ok_and(|data| {
        use std::os::unix::fs::MetadataExt;
        data.mode() & 0o666 != 0o666 && data.uid() == rustix::process::geteuid().as_raw()
    }) {
        use std::os::unix::fs::PermissionsExt;
        file.set_permissions(std::fs::Permissions::from_mode(0o666))
            .map_err(|source| named("open up", source))?;
    }
    Ok(file)
}

fn map(file: &File, path: &Path) -> Result<&'static Shared, StateError> {
    let refused = |source| StateError::File { what: "map", path: path.to_path_buf(), source };
    if file.metadata().map_err(refused)?.len() != size_of::<Shared>() as u64 {
        return Err(StateError::Foreign(path.to_path_buf()));
    }
    // SAFETY: a new mapping over no other; its length is the file's.
    let address = unsafe {
        libc::mmap(
            std::ptr::null_mut(),
            size_of::<Shared>(),
            libc::PROT_READ | libc::PROT_WRITE,
            libc::MAP_SHARED | libc::MAP_NORESERVE,
            file.as_raw_fd(),
            0,
        )
    };
    if address == libc::MAP_FAILED {
        return Err(refused(io::Error::last_os_error()));
    }
    // SAFETY: page-aligned, as long as the type, never unmapped; atomics of integers have no invalid bit pattern.
    Ok(unsafe { &*address.cast::<Shared>() })
}

/// Has the file system keep room for a part of the file: touching a page that it has none for would kill the process.
fn reserve<T: ?Sized>(file: &File, path: &Path, part: &T, shared: &Shared) -> Result<(), StateError> {
    let offset = std::ptr::from_ref(part).addr() - std::ptr::from_ref(shared).addr();
    let kept = rustix::fs::fallocate(
        file,
        rustix::fs::FallocateFlags::empty(),
        offset as u64,
        size_of_val(part) as u64,
    );
    kept.map_err(|error| StateError::File { what: "keep room in", path: path.into(), source: error.into() })
}

impl State {
    /// Keeps room for the log of this process's lane on a GPU, before it opens it.
    pub fn reserve_lane(&self, gpu: usize) -> Result<(), StateError> {
        reserve(&self.file, Path::new(STATE), &self.shared.logs[self.slot][gpu], self.shared)
    }

    /// Takes a slot of the node in `folder`.
    ///
    /// The mapping and the two lock files stay open until the process ends.
    pub fn attach(folder: &Path) -> Result<Self, StateError> {
        let path = folder.join(STATE);
        let existing = |path: &Path| {
            OpenOptions::new().read(true).write(true).open(path).map_err(|source| StateError::File {
                what: "open",
                path: path.to_path_buf(),
                source,
            })
        };
        let file = existing(&path)?;
        let shared = map(&file, &path)?;
        if shared.header.magic.load(Acquire) != MAGIC {
            return Err(StateError::Foreign(path));
        }
        let alive =
            LivenessLocks::in_two_files(existing(&folder.join(CLIENTS))?, existing(&folder.join(PIDS))?);
        let gpus = shared.gpus.iter().filter(|gpu| gpu.memory.capacity.load(Relaxed) > 0).count();
        let mut state = Self { shared, file, alive, slot: 0, gpus, next_look: AtomicU64::new(0) };
        // Low slots first: they stay in few pages, and in few words of the GPUs' maps.
        state.slot = (0..SLOTS).find(|&slot| state.alive.try_acquire(slot)).ok_or(StateError::Full(SLOTS))?;
        reserve(&state.file, &path, &shared.clients[state.slot], shared)?;
        state.clean(state.slot);
        state.introduce();
        Ok(state)
    }

    /// GPUs of the node.
    pub fn gpus(&self) -> usize {
        self.gpus
    }

    /// This process's slot.
    pub fn slot(&self) -> usize {
        self.slot
    }

    /// The period over which utilisation is averaged, in nanoseconds.
    pub fn window(&self) -> u64 {
        self.shared.header.window.load(Relaxed).max(1)
    }

    #[inline]
    fn account(&self, slot: usize, gpu: usize) -> memory::Account<'_> {
        let lanes = memory::GpuLanes { clients: &self.shared.clients, gpu };
        memory::Account::new(&self.shared.gpus[gpu].memory, lanes, slot)
    }

    /// Takes memory of a GPU for this process, or says that there is not as much. One thread at a time.
    #[inline]
    pub fn take_memory(&self, gpu: usize, units: u64) -> bool {
        self.account(self.slot, gpu).take(units) || self.take_after_sweep(gpu, units)
    }

    /// What the dead held may be enough.
    #[cold]
    fn take_after_sweep(&self, gpu: usize, units: u64) -> bool {
        self.sweep() > 0 && self.account(self.slot, gpu).take(units)
    }

    /// Gives memory back. One thread at a time.
    #[inline]
    pub fn give_memory(&self, gpu: usize, units: u64) {
        self.account(self.slot, gpu).give(units);
    }

    /// Units of a GPU that are used, by all processes.
    #[inline]
    pub fn used_memory(&self, gpu: usize) -> u64 {
        memory_account::used(&self.shared.gpus[gpu].memory.word)
    }

    /// Units of a GPU that there are.
    #[inline]
    pub fn memory(&self, gpu: usize) -> u64 {
        self.shared.gpus[gpu].memory.capacity.load(Relaxed)
    }

    /// The GPU's timeline under its lock, not yet brought up to now.
    fn timeline(&self, gpu: usize) -> (Timeline<'_>, Held<'_>) {
        let timeline = Timeline { shared: self.shared, gpu: &self.shared.gpus[gpu], index: gpu };
        let held = robust::take(&timeline.gpu.line.lock, self.slot, &self.alive);
        if held.inherited {
            timeline.repair();
        }
        (timeline, held)
    }

    /// Finishes what a dead holder of the GPU's lock left.
    fn finish(&self, gpu: &layout::Gpu) {
        if let Some(index) = self.shared.gpus.iter().position(|other| std::ptr::eq(other, gpu)) {
            Timeline { shared: self.shared, gpu, index }.repair();
        }
    }

    /// The share of the last whole window during which anything ran, in thousandths, and when that window ended.
    ///
    /// This is all that NVML shows: whole windows, after their end.
    pub fn utilisation(&self, gpu: usize) -> (u64, u64) {
        let window = self.window();
        self.bury_the_busy(gpu);
        let now = now();
        let (timeline, _held) = self.timeline(gpu);
        timeline.advance(now);
        let last = (now / window).saturating_sub(1);
        (timeline.busy(last) * 1000 / window, (last + 1) * window)
    }

    /// Whole windows that ended after `since`, oldest first: when each ended, and the thousandths of it during which
    /// anything ran; for one process if a slot is given.
    pub fn windows(&self, gpu: usize, slot: Option<usize>, since: u64) -> Vec<(u64, u64)> {
        let window = self.window();
        self.bury_the_busy(gpu);
        let now = now();
        let (timeline, _held) = self.timeline(gpu);
        timeline.advance(now);
        let current = now / window;
        let first = (since / window).max(current.saturating_sub(layout::WINDOWS as u64 - 1));
        (first..current)
            .filter(|number| (number + 1) * window > since)
            .map(|number| {
                let busy = match slot {
                    Some(slot) => timeline.lane_busy(slot, number),
                    None => timeline.busy(number),
                };
                ((number + 1) * window, busy * 1000 / window)
            })
            .collect()
    }

    /// The truth about one GPU at one instant, which no driver tells: who is on it, and who was served how much.
    pub fn usage(&self, gpu: usize) -> Usage {
        let processes = self.processes(gpu);
        let (timeline, _held) = self.timeline(gpu);
        let at = now();
        timeline.advance(at);
        let served = |process: Process| {
            let served = timeline.lane(process.slot).served.load(Relaxed);
            (process, served)
        };
        let processes = processes.into_iter().map(served).collect();
        Usage { at, busy: timeline.gpu.line.busy.load(Relaxed), processes }
    }

    /// Truth that no driver tells: nanoseconds each process was served since it opened its lane, and the GPU in all.
    pub fn service(&self, gpu: usize, slot: usize) -> (u64, u64) {
        self.bury_the_busy(gpu);
        let (timeline, _held) = self.timeline(gpu);
        timeline.advance(now());
        (timeline.lane(slot).served.load(Relaxed), timeline.gpu.line.busy.load(Relaxed))
    }
}
