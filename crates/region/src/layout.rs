//! Contents of the two files of a region.
//!
//! Both hold nothing but atomic words, little endian, so that any number of processes can map them at once. A zero word
//! means that nothing has happened yet. Words that different processes write at different times lie on different cache
//! lines.
//!
//! ```text
//! limits  0     header: magic, version, GPUs, size, policy, base GPUs, generation
//!         128   per GPU: 128 bytes that the daemon sets, 128 bytes of turns
//! usage   0     header: magic, version, slots, size, last reclaim
//!         128   bitmap of occupied slots
//!         256   per GPU: 128 bytes of memory account, 128 bytes of time account
//!         4352  per slot: identity, confirmations, and 128 bytes per GPU
//!         2367488  marker directory, and the marker pages: see [`markers`](crate::markers)
//! ```
//!
//! All layouts have every word in the same place, so code that runs at every call of a program does not need to know
//! which one it works on. Words called *reserved* are zero and ignored. The differences:
//!
//! - Layout 1 has another unit of compute, and a fixed list of GPUs (`layout/v1.rs`).
//! - Layouts 1 and 2 end with the slots. Their shims charge predicted time to `spent`, up to `allowed`; they get no
//!   turns from this release, and limit their own rate.
//! - Layout 3 has markers, and the words of `limits` that belong to them: `gated`, `charged`, `run_ahead`, `watched`,
//!   `low_latency`.

mod v1;

use crate::markers::MarkerArea;
use crate::protocol::{DEFAULT_RUN_AHEAD_NS, LAYOUT_VERSION, MAX_GPUS, OLDEST_LAYOUT_VERSION, SLOT_COUNT};
use core::mem::offset_of;
use core::ops::RangeInclusive;
use core::sync::atomic::{AtomicU32, AtomicU64, Ordering};

/// The layouts that this build works with.
pub const SUPPORTED_LAYOUTS: RangeInclusive<u32> = OLDEST_LAYOUT_VERSION..=LAYOUT_VERSION;

/// Length of `limits` in bytes.
pub const LIMITS_SIZE: usize = size_of::<LimitsFile>();

/// Length of `usage` in bytes in the current layout.
pub const USAGE_SIZE: usize = MARKERS_OFFSET + size_of::<MarkerArea>();

/// Offset of the markers in `usage`, and the length of `usage` in layouts without markers.
pub(crate) const MARKERS_OFFSET: usize = size_of::<UsageFile>();

/// A layout version that this build supports.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum LayoutVersion {
    V1,
    V2,
    V3,
}

impl LayoutVersion {
    /// The layout of new regions.
    pub(crate) const CURRENT: Self = Self::V3;

    /// Returns the layout with this number; `None` if this build does not support it.
    pub(crate) fn from_number(number: u32) -> Option<Self> {
        match number {
            1 => Some(Self::V1),
            2 => Some(Self::V2),
            3 => Some(Self::V3),
            _ => None,
        }
    }

    pub(crate) fn number(self) -> u32 {
        match self {
            Self::V1 => 1,
            Self::V2 => 2,
            Self::V3 => 3,
        }
    }

    /// Returns the length of `usage` in bytes.
    pub(crate) fn usage_size(self) -> usize {
        if self.has_markers() { USAGE_SIZE } else { MARKERS_OFFSET }
    }

    /// Returns whether processes mark when their work runs. Without markers, the turn scheduler gives no turns.
    pub(crate) fn has_markers(self) -> bool {
        self == Self::V3
    }

    /// Converts a word of `cores` or `ceiling` into thousandths of a percent.
    pub(crate) fn cores_from_word(self, word: u32) -> u32 {
        match self {
            Self::V1 => v1::cores_from_word(word),
            Self::V2 | Self::V3 => word,
        }
    }

    /// Converts thousandths of a percent into a word of `cores` or `ceiling`.
    pub(crate) fn cores_to_word(self, cores: u32) -> u32 {
        match self {
            Self::V1 => v1::cores_to_word(cores),
            Self::V2 | Self::V3 => cores,
        }
    }

    /// Returns whether the list of GPUs can grow.
    pub(crate) fn can_grow(self) -> bool {
        self != Self::V1
    }
}

/// Reserved words: zero, and ignored by readers.
#[repr(transparent)]
#[derive(Debug)]
pub(crate) struct Reserved<const N: usize>([AtomicU64; N]);

impl<const N: usize> Reserved<N> {
    const fn zeroed() -> Self {
        Self([const { AtomicU64::new(0) }; N])
    }
}

/// The first words of both files.
#[repr(C)]
#[derive(Debug)]
pub(crate) struct FileHeader {
    pub(crate) magic: AtomicU64,
    pub(crate) version: AtomicU32,
    /// GPUs in `limits`, slots in `usage`.
    pub(crate) count: AtomicU32,
    pub(crate) size: AtomicU64,
}

#[repr(C, align(4096))]
#[derive(Debug)]
pub(crate) struct LimitsFile {
    pub(crate) header: LimitsHeader,
    pub(crate) gpus: [GpuLimits; MAX_GPUS],
}

#[repr(C, align(128))]
#[derive(Debug)]
pub(crate) struct LimitsHeader {
    pub(crate) file: FileHeader,
    pub(crate) policy: AtomicU32,
    /// GPUs that the region was created with; those after them were attached later. Layout 2.
    pub(crate) base_gpus: AtomicU32,
    /// Number of times that the list of GPUs grew; wraps. Layout 2.
    pub(crate) generation: AtomicU32,
    _reserved: AtomicU32,
}

/// Limits of the container on one GPU. The daemon changes them while programs run; the container cannot.
#[repr(C, align(128))]
#[derive(Debug)]
pub struct GpuLimits {
    pub(crate) uuid: [AtomicU64; 2],
    pub(crate) memory: AtomicU64,
    pub(crate) context: AtomicU64,
    /// In the layout's unit: see [`LayoutVersion::cores_from_word`].
    pub(crate) cores: AtomicU32,
    /// In the layout's unit.
    pub(crate) ceiling: AtomicU32,
    pub(crate) priority: AtomicU32,
    pub(crate) waits_for_turns: AtomicU32,
    /// Whether the container asked for short waits at some cost in throughput. Layout 3.
    pub(crate) low_latency: AtomicU32,
    _padding: AtomicU32,
    _reserved: Reserved<9>,
    pub(crate) turns: TurnLine,
}

#[repr(C, align(128))]
#[derive(Debug)]
pub(crate) struct TurnLine {
    pub(crate) turn: AtomicU32,
    /// Whether launches must look at the turn at all: set by the turn scheduler. Layout 3.
    pub(crate) gated: AtomicU32,
    /// Nanoseconds that may have been spent in total. Layouts 1 and 2.
    pub(crate) allowed: AtomicU64,
    /// One per GPU, because each GPU has a turn scheduler of its own: one may have stopped while the others give turns.
    pub(crate) heartbeat: AtomicU64,
    /// Nanoseconds that the daemon has charged in total: the turn scheduler by the markers, and the monitor by the driver
    /// while the container is not gated. Layout 3.
    pub(crate) charged: AtomicU64,
    /// Nanoseconds of work that may be queued; zero for the default. Layout 3.
    pub(crate) run_ahead: AtomicU64,
    /// Whether the turn scheduler looks at this container at short intervals, so that a process that begins to work
    /// need not ring. Layout 3.
    pub(crate) watched: AtomicU32,
    _padding: AtomicU32,
    _reserved: Reserved<10>,
}

/// A container's turn on a GPU: its number, and whether launches may pass.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct TurnWord(pub u32);

/// Bit of a [`TurnWord`]: launches pass.
const OPEN: u32 = 1;
/// Bit of a [`TurnWord`]: launches pass into streams that have nothing queued, because running work may wait for them.
const DRAINING: u32 = 2;
/// Distance of two turns' words.
const NEXT_TURN: u32 = 4;

impl TurnWord {
    /// Returns the number of the turn, counted from the region's creation; wraps.
    #[must_use]
    pub fn number(self) -> u32 {
        self.0 / NEXT_TURN
    }

    /// Returns whether the turn is open.
    #[inline]
    #[must_use]
    pub fn is_open(self) -> bool {
        self.0 & OPEN != 0
    }

    /// Returns whether the turn is over, and launches still pass into streams that have nothing queued.
    #[must_use]
    pub fn is_draining(self) -> bool {
        self.0 & DRAINING != 0
    }

    fn number_bits(self) -> u32 {
        self.0 & !(OPEN | DRAINING)
    }

    /// Returns the next turn, open.
    #[must_use]
    pub fn next_open(self) -> Self {
        Self(self.number_bits().wrapping_add(NEXT_TURN) | OPEN)
    }

    /// Returns this turn's word without the bits that let launches pass.
    #[must_use]
    pub fn closed(self) -> Self {
        Self(self.number_bits())
    }

    /// Returns this turn's word, closed except for streams that have nothing queued.
    #[must_use]
    pub fn draining(self) -> Self {
        Self(self.number_bits() | DRAINING)
    }
}

impl GpuLimits {
    /// Returns the limits of a GPU that the container does not have: nothing is allowed.
    pub(crate) const fn none() -> Self {
        Self {
            uuid: [const { AtomicU64::new(0) }; 2],
            memory: AtomicU64::new(0),
            context: AtomicU64::new(0),
            cores: AtomicU32::new(0),
            ceiling: AtomicU32::new(0),
            priority: AtomicU32::new(0),
            waits_for_turns: AtomicU32::new(0),
            low_latency: AtomicU32::new(0),
            _padding: AtomicU32::new(0),
            _reserved: Reserved::zeroed(),
            turns: TurnLine {
                turn: AtomicU32::new(0),
                gated: AtomicU32::new(0),
                allowed: AtomicU64::new(0),
                heartbeat: AtomicU64::new(0),
                charged: AtomicU64::new(0),
                run_ahead: AtomicU64::new(0),
                watched: AtomicU32::new(0),
                _padding: AtomicU32::new(0),
                _reserved: Reserved::zeroed(),
            },
        }
    }

    /// Returns the GPU's UUID.
    #[must_use]
    pub fn uuid(&self) -> [u8; 16] {
        let mut bytes = [0; 16];
        for (half, word) in bytes.chunks_exact_mut(8).zip(&self.uuid) {
            half.copy_from_slice(&word.load(Ordering::Relaxed).to_le_bytes());
        }
        bytes
    }

    /// Returns the bytes that may be used; [`NO_MEMORY_LIMIT`](crate::protocol::NO_MEMORY_LIMIT) if there is no limit.
    #[inline]
    #[must_use]
    pub fn memory(&self) -> u64 {
        self.memory.load(Ordering::Relaxed)
    }

    /// Returns the bytes that one context takes on this GPU; zero until that has been measured.
    #[inline]
    #[must_use]
    pub fn context(&self) -> u64 {
        self.context.load(Ordering::Relaxed)
    }

    /// Returns the priority among containers that want the same turn: the higher goes first.
    #[inline]
    #[must_use]
    pub fn priority(&self) -> u32 {
        self.priority.load(Ordering::Relaxed)
    }

    /// Returns whether launches may have to wait for turns.
    #[inline]
    #[must_use]
    pub fn waits_for_turns(&self) -> bool {
        self.waits_for_turns.load(Ordering::Relaxed) != 0
    }

    /// Returns whether the container asked for short waits at some cost in throughput.
    #[inline]
    #[must_use]
    pub fn is_low_latency(&self) -> bool {
        self.low_latency.load(Ordering::Relaxed) != 0
    }

    /// Returns whether launches must look at the turn: not while the container has the GPU to itself and no ceiling.
    #[inline]
    #[must_use]
    pub fn is_gated(&self) -> bool {
        self.turns.gated.load(Ordering::Relaxed) != 0
    }

    /// Returns the nanoseconds that the daemon has charged in total.
    #[inline]
    #[must_use]
    pub fn charged(&self) -> u64 {
        self.turns.charged.load(Ordering::Relaxed)
    }

    /// Returns the nanoseconds of work that a process may have queued.
    #[inline]
    #[must_use]
    pub fn run_ahead(&self) -> u64 {
        match self.turns.run_ahead.load(Ordering::Relaxed) {
            0 => DEFAULT_RUN_AHEAD_NS,
            nanoseconds => nanoseconds,
        }
    }

    /// Returns whether the turn scheduler looks at the container at short intervals.
    #[inline]
    #[must_use]
    pub fn is_watched(&self) -> bool {
        self.turns.watched.load(Ordering::Relaxed) != 0
    }

    /// Returns the container's last turn.
    #[inline]
    #[must_use]
    pub fn turn(&self) -> TurnWord {
        TurnWord(self.turns.turn.load(Ordering::Acquire))
    }

    /// Returns the futex word of [`GpuLimits::turn`], to wait on. It is mapped read-only in containers.
    #[inline]
    #[must_use]
    pub fn turn_word(&self) -> &AtomicU32 {
        &self.turns.turn
    }

    /// Returns when the GPU's turn scheduler last reported that it runs, on the monotonic clock; zero if it never did.
    #[inline]
    #[must_use]
    pub(crate) fn heartbeat(&self) -> u64 {
        self.turns.heartbeat.load(Ordering::Acquire)
    }
}

#[repr(C, align(4096))]
#[derive(Debug)]
pub(crate) struct UsageFile {
    pub(crate) header: UsageHeader,
    pub(crate) accounts: [GpuAccount; MAX_GPUS],
    pub(crate) slots: [ProcessSlot; SLOT_COUNT],
}

#[repr(C, align(128))]
#[derive(Debug)]
pub(crate) struct UsageHeader {
    pub(crate) file: FileHeader,
    /// Time at which slots of dead processes were last reclaimed, on the monotonic clock.
    pub(crate) reclaimed_at: AtomicU64,
    pub(crate) occupied: OccupiedSlots,
}

/// Bitmap of slots that were taken and not yet cleaned, so that readers do not have to scan all slots.
#[repr(C, align(128))]
#[derive(Debug)]
pub(crate) struct OccupiedSlots(pub(crate) [AtomicU64; SLOT_COUNT / 64]);

/// What a container's processes use together of one GPU. Any of them may have written any value here.
#[repr(C, align(128))]
#[derive(Debug)]
pub struct GpuAccount {
    /// The word of the memory account: see [`memory_account`](crate::memory_account).
    pub(crate) word: AtomicU64,
    pub(crate) peak: AtomicU64,
    pub(crate) refusals: AtomicU64,
    _reserved: Reserved<13>,
    /// Time that was spent on the GPU, and time that threads waited for it.
    pub time: GpuTimeAccount,
}

/// Time that a container's processes have spent on one GPU, and time that they waited for it.
#[repr(C, align(128))]
#[derive(Debug)]
pub struct GpuTimeAccount {
    /// Nanoseconds of GPU time in total, by the container's own account. In layout 3 it grows only while there is no
    /// turn scheduler.
    pub(crate) spent: AtomicU64,
    /// Nanoseconds that threads waited for a turn in total.
    pub(crate) throttled: AtomicU64,
    /// Futex word, incremented by a process that begins to wait.
    pub(crate) doorbell: AtomicU32,
    /// Without a turn scheduler: start of the container's local rate limiting, on the monotonic clock.
    pub local_since: AtomicU64,
    /// Without a turn scheduler: the time spent up to that moment.
    pub local_base: AtomicU64,
    /// Without a turn scheduler: time of the last sample of the container's own occupancy, on the monotonic clock, with
    /// the lowest bit set if it was occupied then. Layout 3.
    pub local_sample: AtomicU64,
    _reserved: Reserved<10>,
}

impl GpuAccount {
    /// Returns an empty account.
    pub(crate) const fn none() -> Self {
        Self {
            word: AtomicU64::new(0),
            peak: AtomicU64::new(0),
            refusals: AtomicU64::new(0),
            _reserved: Reserved::zeroed(),
            time: GpuTimeAccount {
                spent: AtomicU64::new(0),
                throttled: AtomicU64::new(0),
                doorbell: AtomicU32::new(0),
                local_since: AtomicU64::new(0),
                local_base: AtomicU64::new(0),
                local_sample: AtomicU64::new(0),
                _reserved: Reserved::zeroed(),
            },
        }
    }

    /// Returns the most bytes that were ever in use at once.
    #[must_use]
    pub fn peak(&self) -> u64 {
        self.peak.load(Ordering::Relaxed)
    }

    /// Returns how often memory was refused.
    #[must_use]
    pub fn refusals(&self) -> u64 {
        self.refusals.load(Ordering::Relaxed)
    }

    /// Returns the counter of GPU time by the container's own account, in nanoseconds.
    #[inline]
    #[must_use]
    pub fn spent(&self) -> &AtomicU64 {
        &self.time.spent
    }

    /// Returns the counter of time that threads waited for a turn in total, in nanoseconds.
    #[inline]
    #[must_use]
    pub fn throttled(&self) -> &AtomicU64 {
        &self.time.throttled
    }

    /// Returns the futex word that a process increments when it begins to wait.
    #[inline]
    #[must_use]
    pub fn doorbell(&self) -> &AtomicU32 {
        &self.time.doorbell
    }
}

/// The slot of one process.
#[repr(C, align(128))]
#[derive(Debug)]
pub(crate) struct ProcessSlot {
    pub(crate) identity: ProcessIdentity,
    pub(crate) confirmed: ConfirmedOperations,
    pub(crate) lanes: [ProcessLane; MAX_GPUS],
}

#[repr(C, align(128))]
#[derive(Debug)]
pub(crate) struct ProcessIdentity {
    /// The process's pid in its own namespace; zero while the slot is free.
    pub(crate) pid: AtomicU32,
    /// Clock ticks between the machine's boot and the process's start.
    pub(crate) started: AtomicU64,
    /// Inode of the pid namespace that `pid` belongs to.
    pub(crate) namespace: AtomicU64,
    _reserved: Reserved<13>,
}

/// Words of the memory account that other processes write: on a cache line of their own, so that the slot's process
/// keeps its lines.
#[repr(C, align(128))]
#[derive(Debug)]
pub(crate) struct ConfirmedOperations(pub(crate) [AtomicU64; MAX_GPUS]);

/// Usage of one GPU by one process.
#[repr(C, align(128))]
#[derive(Debug)]
pub struct ProcessLane {
    pub(crate) total: AtomicU64,
    pub(crate) intent: AtomicU64,
    /// Time at which everything that this process submitted is predicted to have run, on the monotonic clock. Layouts
    /// 1 and 2.
    pub busy_until: AtomicU64,
    /// Nanoseconds of GPU time that this process submitted in total. Layouts 1 and 2.
    pub spent: AtomicU64,
    /// Number of threads that wait for a turn.
    pub waiting: AtomicU32,
    _reserved: Reserved<11>,
}

impl ProcessLane {
    /// Returns a lane on which nothing has happened.
    pub(crate) const fn none() -> Self {
        Self {
            total: AtomicU64::new(0),
            intent: AtomicU64::new(0),
            busy_until: AtomicU64::new(0),
            spent: AtomicU64::new(0),
            waiting: AtomicU32::new(0),
            _reserved: Reserved::zeroed(),
        }
    }
}

// The daemon and the shim of a container may be built years apart: the offset of every word is part of the contract, in
// both layouts.
const _: () = {
    assert!(cfg!(target_endian = "little"));
    assert!(offset_of!(FileHeader, version) == 8 && offset_of!(FileHeader, count) == 12);
    assert!(offset_of!(FileHeader, size) == 16);
    assert!(offset_of!(LimitsFile, gpus) == 128 && size_of::<GpuLimits>() == 256 && LIMITS_SIZE == 8192);
    assert!(offset_of!(LimitsHeader, policy) == 24 && offset_of!(LimitsHeader, base_gpus) == 28);
    assert!(offset_of!(LimitsHeader, generation) == 32);
    assert!(offset_of!(GpuLimits, memory) == 16 && offset_of!(GpuLimits, context) == 24);
    assert!(offset_of!(GpuLimits, cores) == 32 && offset_of!(GpuLimits, ceiling) == 36);
    assert!(offset_of!(GpuLimits, priority) == 40 && offset_of!(GpuLimits, waits_for_turns) == 44);
    assert!(offset_of!(GpuLimits, low_latency) == 48 && offset_of!(GpuLimits, turns) == 128);
    assert!(offset_of!(TurnLine, turn) == 0 && offset_of!(TurnLine, gated) == 4);
    assert!(offset_of!(TurnLine, allowed) == 8 && offset_of!(TurnLine, heartbeat) == 16);
    assert!(offset_of!(TurnLine, charged) == 24 && offset_of!(TurnLine, run_ahead) == 32);
    assert!(offset_of!(TurnLine, watched) == 40);
    assert!(size_of::<TurnLine>() == 128);
    assert!(offset_of!(UsageHeader, reclaimed_at) == 24 && offset_of!(UsageHeader, occupied) == 128);
    assert!(offset_of!(UsageFile, accounts) == 256 && size_of::<GpuAccount>() == 256);
    assert!(offset_of!(GpuAccount, word) == 0 && offset_of!(GpuAccount, peak) == 8);
    assert!(offset_of!(GpuAccount, refusals) == 16 && offset_of!(GpuAccount, _reserved) == 24);
    assert!(offset_of!(GpuAccount, time) == 128 && offset_of!(GpuTimeAccount, throttled) == 8);
    assert!(offset_of!(GpuTimeAccount, doorbell) == 16 && offset_of!(GpuTimeAccount, local_since) == 24);
    assert!(offset_of!(GpuTimeAccount, local_base) == 32 && offset_of!(GpuTimeAccount, local_sample) == 40);
    assert!(offset_of!(UsageFile, slots) == 4352 && size_of::<ProcessSlot>() == 2304);
    assert!(MARKERS_OFFSET == 2_367_488 && USAGE_SIZE == 3_416_064);
    assert!(offset_of!(ProcessSlot, identity) == 0 && offset_of!(ProcessSlot, confirmed) == 128);
    assert!(offset_of!(ProcessSlot, lanes) == 256);
    assert!(offset_of!(ProcessIdentity, started) == 8 && offset_of!(ProcessIdentity, namespace) == 16);
    assert!(offset_of!(ProcessIdentity, _reserved) == 24);
    assert!(offset_of!(ProcessLane, total) == 0 && offset_of!(ProcessLane, intent) == 8);
    assert!(offset_of!(ProcessLane, busy_until) == 16 && offset_of!(ProcessLane, spent) == 24);
    assert!(offset_of!(ProcessLane, waiting) == 32 && offset_of!(ProcessLane, _reserved) == 40);
    assert!(size_of::<ProcessLane>() == 128);
};

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn layout_versions_are_the_supported_ones() {
        for number in 0..5 {
            let layout = LayoutVersion::from_number(number);
            assert_eq!(layout.is_some(), SUPPORTED_LAYOUTS.contains(&number), "{number}");
            assert!(layout.is_none_or(|layout| layout.number() == number));
        }
        assert_eq!(LayoutVersion::CURRENT.number(), LAYOUT_VERSION);
    }
}
