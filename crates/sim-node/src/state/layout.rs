//! What lies in the `state` file: only atomics, so that any number of processes may hold it at once. A file of zeros is
//! the state of a node on which nothing has happened yet.

use std::sync::atomic::{AtomicU8, AtomicU32, AtomicU64};

/// The most GPUs a node can have.
pub const MAX_GPUS: usize = 16;

/// The most processes that can hold the libraries of one node open at a time.
pub const SLOTS: usize = 1024;

/// Segments of a lane's service that are remembered; see [`Segment`].
pub(super) const SEGMENTS: usize = 4096;

/// Utilisation windows that are remembered per GPU and per lane.
pub(super) const WINDOWS: usize = 64;

/// Fault events that are remembered for those who wait for them.
pub(super) const EVENTS: usize = 256;

/// Identifies the file and its layout: another layout is another file, never a guess.
pub(super) const MAGIC: u64 = u64::from_le_bytes(*b"PARTSIM1");

#[repr(C)]
pub(super) struct Shared {
    pub(super) header: Header,
    pub(super) gpus: [Gpu; MAX_GPUS],
    pub(super) clients: [Client; SLOTS],
    /// Apart from the clients: a lane that never computes touches no page of its log.
    pub(super) logs: [[Log; MAX_GPUS]; SLOTS],
}

#[repr(C, align(4096))]
pub(super) struct Header {
    pub(super) magic: AtomicU64,
    /// The pid namespace the node was made in: the one whose pids the kernel driver would report.
    pub(super) host_namespace: AtomicU64,
    /// Slots that have been taken and not yet cleaned, so that nobody looks through all of them.
    pub(super) occupied: [AtomicU64; SLOTS / 64],
    /// Not zero while the kernel module is away.
    pub(super) unloaded: AtomicU32,
    pub(super) slice: AtomicU64,
    pub(super) window: AtomicU64,
    /// Counts fault events; futex of those who wait for one.
    pub(super) event_count: AtomicU32,
    pub(super) event_lock: AtomicU32,
    pub(super) events: [Event; EVENTS],
}

/// One fault event. `number` is written last; a reader takes an event only if it carries the number it looks for.
#[repr(C)]
pub(super) struct Event {
    pub(super) number: AtomicU64,
    pub(super) gpu: AtomicU32,
    pub(super) kind: AtomicU32,
    pub(super) data: AtomicU64,
}

#[repr(C, align(4096))]
pub(super) struct Gpu {
    pub(super) memory: MemoryBook,
    pub(super) line: Line,
    pub(super) condition: Condition,
}

#[repr(C, align(128))]
pub(super) struct MemoryBook {
    /// Memory that may be used, in units.
    pub(super) capacity: AtomicU64,
    /// See `memory.rs`.
    pub(super) word: AtomicU64,
}

/// The timeline of one GPU: up to which instant it has been worked out, and who holds the GPU there.
#[repr(C, align(128))]
pub(super) struct Line {
    pub(super) lock: AtomicU32,
    pub(super) holder: AtomicU32,
    pub(super) now: AtomicU64,
    pub(super) slice_left: AtomicU64,
    pub(super) looked_for_dead: AtomicU64,
    pub(super) busy: AtomicU64,
    pub(super) runnable: [AtomicU64; SLOTS / 64],
    pub(super) windows: [AtomicU64; WINDOWS],
    pub(super) step: Step,
}

/// The step that is being applied, in absolute values: whoever finds a committed one applies it again.
#[repr(C)]
pub(super) struct Step {
    pub(super) committed: AtomicU32,
    pub(super) slot: AtomicU32,
    pub(super) now: AtomicU64,
    pub(super) slice_left: AtomicU64,
    pub(super) busy: AtomicU64,
    pub(super) served: AtomicU64,
    pub(super) segments: AtomicU64,
    pub(super) segment: Segment,
    pub(super) window: AtomicU64,
    pub(super) gpu_window: AtomicU64,
    pub(super) lane_window: AtomicU64,
}

/// What the card itself remembers: settings made through NVML, and what is wrong with it.
#[repr(C, align(128))]
pub(super) struct Condition {
    /// Odd while the GPU is off the bus; counts every fall and return.
    pub(super) generation: AtomicU32,
    /// Wall time of a nanosecond of work, in thousandths; zero is as good as 1000.
    pub(super) slowness: AtomicU32,
    pub(super) settings: [AtomicU64; 32],
    pub(super) counters: [AtomicU64; 16],
}

#[repr(C, align(4096))]
pub(super) struct Client {
    pub(super) identity: Identity,
    pub(super) lanes: [Lane; MAX_GPUS],
}

#[repr(C)]
pub(super) struct Identity {
    /// Zero while the slot is free.
    pub(super) pid: AtomicU32,
    /// As seen from the host's pid namespace; zero while nobody there has looked.
    pub(super) host_pid: AtomicU32,
    pub(super) started: AtomicU64,
    pub(super) name: [AtomicU8; 256],
}

/// What one process has on one GPU.
#[repr(C, align(128))]
pub(super) struct Lane {
    /// Contexts open; the process is on the GPU's list while there are any.
    pub(super) contexts: AtomicU32,
    pub(super) total: AtomicU64,
    pub(super) intent: AtomicU64,
    /// Position in service time up to which there is work, and a mark while the GPU knows that it has run dry.
    pub(super) submitted: AtomicU64,
    pub(super) served: AtomicU64,
    pub(super) segments: AtomicU64,
    pub(super) windows: [AtomicU64; WINDOWS],
    pub(super) confirmed: Apart,
}

/// A word that other processes write, on a line of its own: they must not take the owner's line from it every time.
#[repr(C, align(128))]
pub(super) struct Apart(pub(super) AtomicU64);

#[repr(C, align(4096))]
pub(super) struct Log {
    pub(super) segments: [Segment; SEGMENTS],
}

/// From this instant on the lane was served without a break, until the next segment says otherwise.
#[repr(C)]
pub(super) struct Segment {
    pub(super) served: AtomicU64,
    pub(super) wall: AtomicU64,
    pub(super) slowness: AtomicU64,
}
