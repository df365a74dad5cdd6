//! The state that all processes of a simulated node share: the processes, their memory, the schedule of each GPU, and
//! injected faults. It is one file that all processes map; there is no daemon.
//!
//! A process may be killed at any instruction. Another process then reclaims its slot, its memory and its submitted
//! work, and completes or reverts the update that was in progress.
#![allow(unsafe_code)]

mod clients;
mod clock;
mod faults;
mod lane;
mod layout;
mod memory;
mod peer_groups;
mod robust_mutex;
mod timeline;

#[cfg(test)]
mod tests;

pub use clients::SimGpuProcess;
use clock::TickClock;
pub use clock::{now, wait_until};
pub use faults::{FaultEvent, GpuCounter, GpuFault, GpuSetting};
pub use lane::{GpuLane, GpuLost};
pub use layout::{MAX_CLIENTS, MAX_GPUS};
pub use memory::{UNIT, units};

use layout::{MAGIC, StateFile};
use partage_region::liveness_lock::LivenessLocks;
use partage_region::memory_account;
use robust_mutex::RobustMutexGuard;
use std::fs::{File, OpenOptions};
use std::io;
use std::os::fd::AsRawFd;
use std::os::unix::fs::OpenOptionsExt;
use std::path::{Path, PathBuf};
use std::sync::atomic::AtomicU64;
use std::sync::atomic::Ordering::{Acquire, Relaxed, Release};
use timeline::Timeline;

/// The file that all processes map.
pub(crate) const STATE_FILE: &str = "state";
/// The file whose record locks show which processes are alive.
pub(crate) const CLIENTS_FILE: &str = "clients";
/// The file whose record locks identify the processes.
pub(crate) const PIDS_FILE: &str = "pids";

/// The parameters of a new state file.
#[derive(Clone, Debug)]
pub struct InitialState {
    /// The memory that programs may allocate on each GPU, in bytes.
    pub memory: Vec<u64>,
    /// The time slice of a process while others wait for the GPU, in nanoseconds.
    pub slice: u64,
    /// The period over which utilization is averaged, in nanoseconds.
    pub window: u64,
}

/// Why the state of a node cannot be created or attached.
#[derive(Debug, thiserror::Error)]
pub enum StateError {
    /// A state file cannot be opened or mapped.
    #[error("cannot {what} {}: {source}", path.display())]
    File {
        /// The operation that failed.
        what: &'static str,
        /// The path of the file.
        path: PathBuf,
        /// The error of the operating system.
        source: io::Error,
    },
    /// The file is not a state file, or one of another version.
    #[error("{} was not created by this version of Partage: create the simulated node again", .0.display())]
    Foreign(PathBuf),
    /// All slots are in use.
    #[error("this simulated node is used by {0} processes, which is the maximum")]
    Full(usize),
    /// The number of GPUs exceeds the maximum.
    #[error("a simulated node has at most {MAX_GPUS} GPUs, not {0}")]
    TooManyGpus(usize),
}

/// A process's attachment to the state of a node. Dropping it releases the slot.
#[derive(Debug)]
pub struct SimNodeState {
    shared: &'static StateFile,
    /// The mapped file. Its blocks are allocated before the pages are touched.
    file: File,
    alive: LivenessLocks,
    slot: usize,
    gpus: usize,
    /// The tick of the processor's counter at which dead processes are reclaimed next.
    next_reclaim: AtomicU64,
}

/// The activity of a GPU up to an instant.
#[derive(Clone, Debug)]
pub struct GpuActivity {
    /// The instant, in nanoseconds of the monotonic clock.
    pub at: u64,
    /// The nanoseconds during which the GPU was busy since the creation of the node.
    pub busy: u64,
    /// The processes that have contexts, with the service time in nanoseconds of each since it opened its lane.
    pub processes: Vec<(SimGpuProcess, u64)>,
}

impl std::fmt::Debug for StateFile {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("StateFile")
    }
}

/// Creates the state files of a node in its directory.
pub fn create(folder: &Path, setup: &InitialState) -> Result<(), StateError> {
    if setup.memory.len() > MAX_GPUS {
        return Err(StateError::TooManyGpus(setup.memory.len()));
    }
    open(&folder.join(CLIENTS_FILE))?;
    open(&folder.join(PIDS_FILE))?;
    let path = folder.join(STATE_FILE);
    let file = open(&path)?;
    file.set_len(size_of::<StateFile>() as u64).map_err(|source| StateError::File {
        what: "resize",
        path: path.clone(),
        source,
    })?;
    let shared = map(&file, &path)?;
    reserve(&file, &path, &shared.header, shared)?;
    reserve(&file, &path, &shared.gpus, shared)?;
    let header = &shared.header;
    header.host_namespace.store(clients::pid_namespace(), Relaxed);
    header.slice.store(setup.slice, Relaxed);
    header.window.store(setup.window, Relaxed);
    for (gpu, memory) in shared.gpus.iter().zip(&setup.memory) {
        gpu.memory.capacity.store(memory / UNIT, Relaxed);
    }
    header.magic.store(MAGIC, Release);
    Ok(())
}

fn open(path: &Path) -> Result<File, StateError> {
    // Programs of all users and containers use the node's GPUs, like the device files of real GPUs.
    let file = OpenOptions::new().read(true).write(true).create(true).truncate(false).mode(0o666).open(path);
    let named = |what, source| StateError::File { what, path: path.to_path_buf(), source };
    let file = file.map_err(|source| named("open", source))?;
    // The umask may have restricted the mode above. Only the owner, who created the file, can change it.
    if file.metadata().is_ok_and(|data| {
        use std::os::unix::fs::MetadataExt;
        data.mode() & 0o666 != 0o666 && data.uid() == rustix::process::geteuid().as_raw()
    }) {
        use std::os::unix::fs::PermissionsExt;
        file.set_permissions(std::fs::Permissions::from_mode(0o666))
            .map_err(|source| named("change the mode of", source))?;
    }
    Ok(file)
}

fn map(file: &File, path: &Path) -> Result<&'static StateFile, StateError> {
    let refused = |source| StateError::File { what: "map", path: path.to_path_buf(), source };
    if file.metadata().map_err(refused)?.len() != size_of::<StateFile>() as u64 {
        return Err(StateError::Foreign(path.to_path_buf()));
    }
    // SAFETY: a null address lets the kernel choose an unused range, and the descriptor is an open file of this length.
    let address = unsafe {
        libc::mmap(
            std::ptr::null_mut(),
            size_of::<StateFile>(),
            libc::PROT_READ | libc::PROT_WRITE,
            libc::MAP_SHARED | libc::MAP_NORESERVE,
            file.as_raw_fd(),
            0,
        )
    };
    if address == libc::MAP_FAILED {
        return Err(refused(io::Error::last_os_error()));
    }
    // SAFETY: the mapping is page-aligned, has the size of the type and is never unmapped; every bit pattern is valid
    // for atomic integers.
    Ok(unsafe { &*address.cast::<StateFile>() })
}

/// Allocates the blocks of a part of the file: on a full file system, touching a page without a block raises SIGBUS.
fn reserve<T: ?Sized>(file: &File, path: &Path, part: &T, shared: &StateFile) -> Result<(), StateError> {
    let offset = std::ptr::from_ref(part).addr() - std::ptr::from_ref(shared).addr();
    let kept = rustix::fs::fallocate(
        file,
        rustix::fs::FallocateFlags::empty(),
        offset as u64,
        size_of_val(part) as u64,
    );
    kept.map_err(|error| StateError::File {
        what: "allocate blocks of",
        path: path.into(),
        source: error.into(),
    })
}

impl SimNodeState {
    /// Allocates the blocks of this process's service log on a GPU. Must be called before the lane is opened.
    pub fn reserve_lane(&self, gpu: usize) -> Result<(), StateError> {
        reserve(&self.file, Path::new(STATE_FILE), &self.shared.logs[self.slot][gpu], self.shared)
    }

    /// Attaches to the node in `folder` by acquiring a slot.
    ///
    /// The mapping and the two lock files stay open until the process ends.
    pub fn attach(folder: &Path) -> Result<Self, StateError> {
        let path = folder.join(STATE_FILE);
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
        let alive = LivenessLocks::in_two_files(
            existing(&folder.join(CLIENTS_FILE))?,
            existing(&folder.join(PIDS_FILE))?,
        );
        let gpus = shared.gpus.iter().filter(|gpu| gpu.memory.capacity.load(Relaxed) > 0).count();
        let mut state = Self { shared, file, alive, slot: 0, gpus, next_reclaim: AtomicU64::new(0) };
        // Low slots first: they share few pages, and few words of the GPUs' bit maps.
        state.slot = (0..MAX_CLIENTS)
            .find(|&slot| state.alive.try_acquire(slot))
            .ok_or(StateError::Full(MAX_CLIENTS))?;
        reserve(&state.file, &path, &shared.clients[state.slot], shared)?;
        state.clear_slot(state.slot);
        state.register_process();
        Ok(state)
    }

    /// Returns the number of GPUs of the node.
    pub fn gpus(&self) -> usize {
        self.gpus
    }

    /// Returns the slot of this process.
    pub fn slot(&self) -> usize {
        self.slot
    }

    /// Returns the period over which utilization is averaged, in nanoseconds.
    pub fn window(&self) -> u64 {
        self.shared.header.window.load(Relaxed).max(1)
    }

    #[inline]
    fn account(&self, slot: usize, gpu: usize) -> memory::GpuMemoryAccount<'_> {
        let lanes = memory::GpuLanes { clients: &self.shared.clients, gpu };
        memory::GpuMemoryAccount::new(&self.shared.gpus[gpu].memory, lanes, slot)
    }

    /// Allocates memory of a GPU to this process. Returns false if not enough is free. Callers serialize calls of this
    /// process.
    #[inline]
    pub fn take_memory(&self, gpu: usize, units: u64) -> bool {
        self.account(self.slot, gpu).take(units) || self.take_after_reclaim(gpu, units)
    }

    /// Retries after reclaiming the memory of dead processes.
    #[cold]
    fn take_after_reclaim(&self, gpu: usize, units: u64) -> bool {
        self.reclaim_dead() > 0 && self.account(self.slot, gpu).take(units)
    }

    /// Releases memory of this process. Callers serialize calls of this process.
    #[inline]
    pub fn release_memory(&self, gpu: usize, units: u64) {
        self.account(self.slot, gpu).give(units);
    }

    /// Returns the units of a GPU's memory that all processes use.
    #[inline]
    pub fn used_memory(&self, gpu: usize) -> u64 {
        memory_account::used(&self.shared.gpus[gpu].memory.word)
    }

    /// Returns the capacity of a GPU's memory in units.
    #[inline]
    pub fn memory(&self, gpu: usize) -> u64 {
        self.shared.gpus[gpu].memory.capacity.load(Relaxed)
    }

    /// Locks the GPU's timeline. It is not yet advanced to the current time.
    fn timeline(&self, gpu: usize) -> (Timeline<'_>, RobustMutexGuard<'_>) {
        let timeline = Timeline { shared: self.shared, gpu: &self.shared.gpus[gpu], index: gpu };
        let held = robust_mutex::lock(&timeline.gpu.line.lock, self.slot, &self.alive);
        if held.inherited {
            timeline.repair();
        }
        (timeline, held)
    }

    /// Completes the step that a dead holder of the GPU's lock left.
    fn finish_step(&self, gpu: &layout::GpuRecord) {
        if let Some(index) = self.shared.gpus.iter().position(|other| std::ptr::eq(other, gpu)) {
            Timeline { shared: self.shared, gpu, index }.repair();
        }
    }

    /// Returns the utilization of the last completed window in thousandths, and the end of that window.
    ///
    /// NVML shows only this: completed windows.
    pub fn utilization(&self, gpu: usize) -> (u64, u64) {
        let window = self.window();
        self.reclaim_dead_runnable(gpu);
        let now = now();
        let (timeline, _held) = self.timeline(gpu);
        timeline.advance(now);
        let last = (now / window).saturating_sub(1);
        (timeline.busy(last) * 1000 / window, (last + 1) * window)
    }

    /// Returns the completed windows that ended after `since`, oldest first: the end of each, and its utilization in
    /// thousandths. If a slot is given, only the work of that process counts.
    pub fn windows(&self, gpu: usize, slot: Option<usize>, since: u64) -> Vec<(u64, u64)> {
        let window = self.window();
        self.reclaim_dead_runnable(gpu);
        let now = now();
        let (timeline, _held) = self.timeline(gpu);
        timeline.advance(now);
        let current = now / window;
        let first = (since / window).max(current.saturating_sub(layout::MAX_WINDOWS as u64 - 1));
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

    /// Returns the exact activity of one GPU at one instant, which no real driver reports: its processes and their
    /// service times.
    pub fn usage(&self, gpu: usize) -> GpuActivity {
        let processes = self.processes(gpu);
        let (timeline, _held) = self.timeline(gpu);
        let at = now();
        timeline.advance(at);
        let served = |process: SimGpuProcess| {
            let served = timeline.lane(process.slot).served.load(Relaxed);
            (process, served)
        };
        let processes = processes.into_iter().map(served).collect();
        GpuActivity { at, busy: timeline.gpu.line.busy.load(Relaxed), processes }
    }

    /// Returns the service time of a process since it opened its lane and the busy time of the GPU, in nanoseconds.
    /// No real driver reports these.
    pub fn service_time(&self, gpu: usize, slot: usize) -> (u64, u64) {
        self.reclaim_dead_runnable(gpu);
        let (timeline, _held) = self.timeline(gpu);
        timeline.advance(now());
        (timeline.lane(slot).served.load(Relaxed), timeline.gpu.line.busy.load(Relaxed))
    }
}
