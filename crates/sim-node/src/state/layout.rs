//! The layout of the `state` file. It consists of atomics only, so that any number of processes may map it. A file of
//! zeros is the state of a new node.

use std::sync::atomic::{AtomicU8, AtomicU32, AtomicU64};

/// The maximum number of GPUs of a node.
pub const MAX_GPUS: usize = 16;

/// The maximum number of processes that use the libraries of one node at a time.
pub const MAX_CLIENTS: usize = 1024;

/// The length of a lane's service log; see [`ServiceSegment`].
pub(super) const MAX_SEGMENTS: usize = 4096;

/// The number of utilization windows that are kept per GPU and per lane.
pub(super) const MAX_WINDOWS: usize = 64;

/// The number of fault events that are kept.
pub(super) const MAX_EVENTS: usize = 256;

/// The number of groups of kernels that wait for each other.
pub(super) const MAX_PEER_GROUPS: usize = 1024;

/// Identifies the file and its layout. A change of the layout needs a new value.
pub(super) const MAGIC: u64 = u64::from_le_bytes(*b"PARTSIM2");

#[repr(C)]
pub(super) struct StateFile {
    pub(super) header: StateHeader,
    pub(super) gpus: [GpuRecord; MAX_GPUS],
    pub(super) clients: [ClientRecord; MAX_CLIENTS],
    /// Separate from the clients, so that a lane without work touches no page of its log.
    pub(super) logs: [[ServiceLog; MAX_GPUS]; MAX_CLIENTS],
}

#[repr(C, align(4096))]
pub(super) struct StateHeader {
    pub(super) magic: AtomicU64,
    /// The PID namespace in which the node was created, whose PIDs a kernel driver would report.
    pub(super) host_namespace: AtomicU64,
    /// A bit map of the slots that were acquired and not yet cleared. It saves a scan of all slots.
    pub(super) occupied: [AtomicU64; MAX_CLIENTS / 64],
    /// Not zero while the simulated kernel module is unloaded.
    pub(super) unloaded: AtomicU32,
    pub(super) slice: AtomicU64,
    pub(super) window: AtomicU64,
    /// The number of fault events; also the futex of processes that wait for one.
    pub(super) event_count: AtomicU32,
    pub(super) event_lock: AtomicU32,
    pub(super) events: [EventRecord; MAX_EVENTS],
    pub(super) peer_groups: [PeerGroupRecord; MAX_PEER_GROUPS],
}

/// A group of kernels that wait for each other. `key` is zero while the record is unused; it is never freed.
#[repr(C)]
pub(super) struct PeerGroupRecord {
    pub(super) key: AtomicU64,
    /// The number of kernels of the group that have begun since the creation of the node.
    pub(super) arrivals: AtomicU64,
}

/// One fault event. `number` is written last; a reader accepts an event only if it has the expected number.
#[repr(C)]
pub(super) struct EventRecord {
    pub(super) number: AtomicU64,
    pub(super) gpu: AtomicU32,
    pub(super) kind: AtomicU32,
    pub(super) data: AtomicU64,
}

#[repr(C, align(4096))]
pub(super) struct GpuRecord {
    pub(super) memory: GpuMemoryRecord,
    pub(super) line: TimelineRecord,
    pub(super) condition: GpuCondition,
}

#[repr(C, align(128))]
pub(super) struct GpuMemoryRecord {
    /// The memory that programs may allocate, in units.
    pub(super) capacity: AtomicU64,
    /// The word of the memory account; see [`partage_region::memory_account`].
    pub(super) word: AtomicU64,
}

/// The timeline of one GPU: the instant up to which it is advanced, and the slot that holds the GPU then.
#[repr(C, align(128))]
pub(super) struct TimelineRecord {
    pub(super) lock: AtomicU32,
    pub(super) holder: AtomicU32,
    pub(super) now: AtomicU64,
    pub(super) slice_left: AtomicU64,
    pub(super) dead_checked_at: AtomicU64,
    pub(super) busy: AtomicU64,
    pub(super) runnable: [AtomicU64; MAX_CLIENTS / 64],
    pub(super) windows: [AtomicU64; MAX_WINDOWS],
    pub(super) step: TimelineStep,
}

/// The step that is being applied, in absolute values, so that a committed step can be applied again.
#[repr(C)]
pub(super) struct TimelineStep {
    pub(super) committed: AtomicU32,
    pub(super) slot: AtomicU32,
    pub(super) now: AtomicU64,
    pub(super) slice_left: AtomicU64,
    pub(super) busy: AtomicU64,
    pub(super) served: AtomicU64,
    pub(super) segments: AtomicU64,
    pub(super) segment: ServiceSegment,
    pub(super) window: AtomicU64,
    pub(super) gpu_window: AtomicU64,
    pub(super) lane_window: AtomicU64,
}

/// The persistent state of a GPU: settings made through NVML, counters, and injected faults.
#[repr(C, align(128))]
pub(super) struct GpuCondition {
    /// Incremented when the GPU falls off the bus and when it returns; odd while it is off the bus.
    pub(super) generation: AtomicU32,
    /// The wall time of a nanosecond of service, in thousandths; zero means 1000.
    pub(super) slowness: AtomicU32,
    pub(super) settings: [AtomicU64; 32],
    pub(super) counters: [AtomicU64; 16],
}

#[repr(C, align(4096))]
pub(super) struct ClientRecord {
    pub(super) identity: ClientIdentity,
    pub(super) lanes: [LaneRecord; MAX_GPUS],
}

#[repr(C)]
pub(super) struct ClientIdentity {
    /// Zero while the slot is free.
    pub(super) pid: AtomicU32,
    /// The PID in the host's namespace; zero until a process of that namespace has resolved it.
    pub(super) host_pid: AtomicU32,
    pub(super) started: AtomicU64,
    pub(super) name: [AtomicU8; 256],
}

/// The memory and the work of one process on one GPU.
#[repr(C, align(128))]
pub(super) struct LaneRecord {
    /// The number of open contexts. The GPU lists the process while it is not zero.
    pub(super) contexts: AtomicU32,
    pub(super) total: AtomicU64,
    pub(super) intent: AtomicU64,
    /// The position in service time up to which work is submitted, and the flag `DRY`.
    pub(super) submitted: AtomicU64,
    pub(super) served: AtomicU64,
    pub(super) segments: AtomicU64,
    pub(super) windows: [AtomicU64; MAX_WINDOWS],
    pub(super) confirmed: CachePadded,
}

/// A word that other processes write, on its own cache line, so that they do not invalidate the owner's line.
#[repr(C, align(128))]
pub(super) struct CachePadded(pub(super) AtomicU64);

#[repr(C, align(4096))]
pub(super) struct ServiceLog {
    pub(super) segments: [ServiceSegment; MAX_SEGMENTS],
}

/// The lane was served without interruption from this instant until the beginning of the next segment.
#[repr(C)]
pub(super) struct ServiceSegment {
    pub(super) served: AtomicU64,
    pub(super) wall: AtomicU64,
    pub(super) slowness: AtomicU64,
}
