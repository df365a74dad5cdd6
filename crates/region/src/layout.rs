//! What lies in the two files: only atomics, little endian, so that any number of processes may hold them at once. Zeros
//! mean that nothing has happened yet. What different processes write at different times lies on different lines.

use core::mem::offset_of;
use core::sync::atomic::{AtomicU32, AtomicU64, Ordering};

/// The most GPUs a container can have.
pub const MAX_GPUS: usize = 16;

/// The most processes of a container that can use its GPUs at a time.
pub const SLOTS: usize = 1024;

/// The layout of both files. Another layout is another number, never a guess.
pub const VERSION: u32 = 1;

/// The first word of `limits`.
pub const LIMITS_MAGIC: u64 = u64::from_le_bytes(*b"PARTLIM\n");

/// The first word of `usage`.
pub const USAGE_MAGIC: u64 = u64::from_le_bytes(*b"PARTUSE\n");

/// All of this is `memory` when the owner sets no limit.
pub const NO_LIMIT: u64 = u64::MAX;

/// RegionPolicy: beyond the limit the shim may place memory on the host's side.
pub const OVERSUBSCRIBE: u32 = 1;

/// RegionPolicy: copies and fills keep to turns as launches do.
pub const GATE_COPIES: u32 = 1 << 1;

/// Length of `limits`.
pub const LIMITS_SIZE: usize = size_of::<LimitsFile>();

/// Length of `usage`.
pub const USAGE_SIZE: usize = size_of::<UsageFile>();

/// How both files begin.
#[repr(C)]
#[derive(Debug)]
pub(crate) struct Start {
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
    pub(crate) start: Start,
    pub(crate) policy: AtomicU32,
}

/// What the container may have of one GPU. Its owner changes it while programs run; nobody else can.
#[repr(C, align(128))]
#[derive(Debug)]
pub struct GpuLimits {
    pub(crate) uuid: [AtomicU64; 2],
    pub(crate) memory: AtomicU64,
    pub(crate) context: AtomicU64,
    pub(crate) cores: AtomicU32,
    pub(crate) ceiling: AtomicU32,
    pub(crate) priority: AtomicU32,
    pub(crate) gated: AtomicU32,
    pub(crate) gate: GateLine,
}

#[repr(C, align(128))]
#[derive(Debug)]
pub(crate) struct GateLine {
    pub(crate) turn: AtomicU32,
    pub(crate) allowed: AtomicU64,
    /// Each GPU has an arbiter of its own: one may be gone while the others deal.
    pub(crate) heartbeat: AtomicU64,
}

/// A container's turn on a GPU: which, and whether it lasts.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct TurnWord(pub u32);

impl TurnWord {
    /// How many turns there have been; goes round.
    #[must_use]
    pub fn number(self) -> u32 {
        self.0 >> 1
    }

    /// Whether it lasts.
    #[must_use]
    pub fn is_open(self) -> bool {
        self.0 & 1 == 1
    }

    /// The next one, open.
    #[must_use]
    pub fn next_open(self) -> Self {
        Self((self.0 & !1).wrapping_add(2) | 1)
    }

    /// The same one, over.
    #[must_use]
    pub fn closed(self) -> Self {
        Self(self.0 & !1)
    }
}

impl GpuLimits {
    /// Nothing of no GPU.
    pub(crate) const fn none() -> Self {
        Self {
            uuid: [const { AtomicU64::new(0) }; 2],
            memory: AtomicU64::new(0),
            context: AtomicU64::new(0),
            cores: AtomicU32::new(0),
            ceiling: AtomicU32::new(0),
            priority: AtomicU32::new(0),
            gated: AtomicU32::new(0),
            gate: GateLine {
                turn: AtomicU32::new(0),
                allowed: AtomicU64::new(0),
                heartbeat: AtomicU64::new(0),
            },
        }
    }

    /// The GPU's UUID.
    #[must_use]
    pub fn uuid(&self) -> [u8; 16] {
        let mut bytes = [0; 16];
        for (half, word) in bytes.chunks_exact_mut(8).zip(&self.uuid) {
            half.copy_from_slice(&word.load(Ordering::Relaxed).to_le_bytes());
        }
        bytes
    }

    /// Bytes that may be used; [`NO_LIMIT`] if any number may.
    #[inline]
    #[must_use]
    pub fn memory(&self) -> u64 {
        self.memory.load(Ordering::Relaxed)
    }

    /// Bytes one context takes on this card; zero while nobody has measured it.
    #[inline]
    #[must_use]
    pub fn context(&self) -> u64 {
        self.context.load(Ordering::Relaxed)
    }

    /// Hundredths of a percent of the GPU's time that are promised; zero for no promise.
    #[inline]
    #[must_use]
    pub fn cores(&self) -> u32 {
        self.cores.load(Ordering::Relaxed)
    }

    /// Hundredths of a percent of the GPU's time that may be reached.
    #[inline]
    #[must_use]
    pub fn ceiling(&self) -> u32 {
        self.ceiling.load(Ordering::Relaxed)
    }

    /// Who goes first: the higher one.
    #[inline]
    #[must_use]
    pub fn priority(&self) -> u32 {
        self.priority.load(Ordering::Relaxed)
    }

    /// Whether launches must keep to turns.
    #[inline]
    #[must_use]
    pub fn gated(&self) -> bool {
        self.gated.load(Ordering::Relaxed) != 0
    }

    /// The container's last turn. What [`GpuLimits::allowed`] says after an open one was written before it opened.
    #[inline]
    #[must_use]
    pub fn turn(&self) -> TurnWord {
        TurnWord(self.gate.turn.load(Ordering::Acquire))
    }

    /// The word of [`GpuLimits::turn`], to wait on. It cannot be written here.
    #[inline]
    #[must_use]
    pub fn turn_word(&self) -> &AtomicU32 {
        &self.gate.turn
    }

    /// When the GPU's arbiter last said that it lives, on the monotonic clock; zero if none ever did.
    #[inline]
    #[must_use]
    pub(crate) fn heartbeat(&self) -> u64 {
        self.gate.heartbeat.load(Ordering::Acquire)
    }

    /// Nanoseconds of the GPU that the container may have spent in all.
    #[inline]
    #[must_use]
    pub fn allowed(&self) -> u64 {
        self.gate.allowed.load(Ordering::Relaxed)
    }
}

#[repr(C, align(4096))]
#[derive(Debug)]
pub(crate) struct UsageFile {
    pub(crate) header: UsageHeader,
    pub(crate) accounts: [GpuAccount; MAX_GPUS],
    pub(crate) slots: [Slot; SLOTS],
}

#[repr(C, align(128))]
#[derive(Debug)]
pub(crate) struct UsageHeader {
    pub(crate) start: Start,
    /// When somebody last looked for the dead, on the monotonic clock.
    pub(crate) swept: AtomicU64,
    pub(crate) occupied: Occupied,
}

/// Slots that have been taken and not yet cleaned, so that nobody looks through all of them.
#[repr(C, align(128))]
#[derive(Debug)]
pub(crate) struct Occupied(pub(crate) [AtomicU64; SLOTS / 64]);

/// What a container's processes have together on one GPU. Any of them may have written anything here.
#[repr(C, align(128))]
#[derive(Debug)]
pub struct GpuAccount {
    /// See `ledger`.
    pub(crate) word: AtomicU64,
    pub(crate) peak: AtomicU64,
    pub(crate) refusals: AtomicU64,
    /// The part about time.
    pub time: GpuTimeAccount,
}

/// The time that a container's processes have taken of one GPU.
#[repr(C, align(128))]
#[derive(Debug)]
pub struct GpuTimeAccount {
    /// Nanoseconds of the GPU that were submitted, in all.
    pub(crate) spent: AtomicU64,
    /// Nanoseconds that threads waited for a turn, in all.
    pub(crate) throttled: AtomicU64,
    /// Futex, counted up by a process that begins to wait.
    pub(crate) doorbell: AtomicU32,
    /// Without an arbiter: since when the container deals with its time itself, on the monotonic clock.
    pub local_since: AtomicU64,
    /// Without an arbiter: what was spent then.
    pub local_base: AtomicU64,
}

impl GpuAccount {
    /// An empty book.
    pub(crate) const fn none() -> Self {
        Self {
            word: AtomicU64::new(0),
            peak: AtomicU64::new(0),
            refusals: AtomicU64::new(0),
            time: GpuTimeAccount {
                spent: AtomicU64::new(0),
                throttled: AtomicU64::new(0),
                doorbell: AtomicU32::new(0),
                local_since: AtomicU64::new(0),
                local_base: AtomicU64::new(0),
            },
        }
    }

    /// The most bytes that were ever used at once.
    #[must_use]
    pub fn peak(&self) -> u64 {
        self.peak.load(Ordering::Relaxed)
    }

    /// How often memory was refused.
    #[must_use]
    pub fn refusals(&self) -> u64 {
        self.refusals.load(Ordering::Relaxed)
    }

    /// Nanoseconds of the GPU that were submitted, in all.
    #[inline]
    #[must_use]
    pub fn spent(&self) -> &AtomicU64 {
        &self.time.spent
    }

    /// Nanoseconds that threads waited for a turn, in all.
    #[inline]
    #[must_use]
    pub fn throttled(&self) -> &AtomicU64 {
        &self.time.throttled
    }

    /// Futex, counted up by a process that begins to wait.
    #[inline]
    #[must_use]
    pub fn doorbell(&self) -> &AtomicU32 {
        &self.time.doorbell
    }
}

/// One process.
#[repr(C, align(128))]
#[derive(Debug)]
pub(crate) struct Slot {
    pub(crate) identity: Identity,
    pub(crate) confirmed: Confirmed,
    pub(crate) lanes: [ProcessLane; MAX_GPUS],
}

#[repr(C, align(128))]
#[derive(Debug)]
pub(crate) struct Identity {
    /// As the process calls itself; zero while the slot is free.
    pub(crate) pid: AtomicU32,
    /// Clock ticks between the machine's start and the process's.
    pub(crate) started: AtomicU64,
    /// The number of the pid namespace that `pid` is of.
    pub(crate) namespace: AtomicU64,
}

/// Words of the ledger that other processes write: they must not take the owner's lines from it every time.
#[repr(C, align(128))]
#[derive(Debug)]
pub(crate) struct Confirmed(pub(crate) [AtomicU64; MAX_GPUS]);

/// What one process has on one GPU.
#[repr(C, align(128))]
#[derive(Debug)]
pub struct ProcessLane {
    pub(crate) total: AtomicU64,
    pub(crate) intent: AtomicU64,
    /// When all that this process has submitted will have run, as predicted, on the monotonic clock.
    pub busy_until: AtomicU64,
    /// Nanoseconds of the GPU that this process has submitted, in all.
    pub spent: AtomicU64,
    /// Threads that wait for a turn.
    pub waiting: AtomicU32,
}

impl ProcessLane {
    /// A lane on which nothing has happened.
    pub(crate) const fn none() -> Self {
        Self {
            total: AtomicU64::new(0),
            intent: AtomicU64::new(0),
            busy_until: AtomicU64::new(0),
            spent: AtomicU64::new(0),
            waiting: AtomicU32::new(0),
        }
    }
}

// The agent and the shim of a container may be built years apart: what is where is part of the contract.
const _: () = {
    assert!(cfg!(target_endian = "little"));
    assert!(
        offset_of!(Start, version) == 8 && offset_of!(Start, count) == 12 && offset_of!(Start, size) == 16
    );
    assert!(offset_of!(LimitsFile, gpus) == 128 && size_of::<GpuLimits>() == 256 && LIMITS_SIZE == 8192);
    assert!(offset_of!(LimitsHeader, policy) == 24);
    assert!(offset_of!(GpuLimits, memory) == 16 && offset_of!(GpuLimits, context) == 24);
    assert!(offset_of!(GpuLimits, cores) == 32 && offset_of!(GpuLimits, ceiling) == 36);
    assert!(offset_of!(GpuLimits, priority) == 40 && offset_of!(GpuLimits, gated) == 44);
    assert!(offset_of!(GpuLimits, gate) == 128 && offset_of!(GateLine, turn) == 0);
    assert!(offset_of!(GateLine, allowed) == 8 && offset_of!(GateLine, heartbeat) == 16);
    assert!(offset_of!(UsageHeader, swept) == 24 && offset_of!(UsageHeader, occupied) == 128);
    assert!(offset_of!(UsageFile, accounts) == 256 && size_of::<GpuAccount>() == 256);
    assert!(
        offset_of!(GpuAccount, word) == 0
            && offset_of!(GpuAccount, peak) == 8
            && offset_of!(GpuAccount, refusals) == 16
    );
    assert!(offset_of!(GpuAccount, time) == 128 && offset_of!(GpuTimeAccount, throttled) == 8);
    assert!(offset_of!(GpuTimeAccount, doorbell) == 16 && offset_of!(GpuTimeAccount, local_since) == 24);
    assert!(offset_of!(GpuTimeAccount, local_base) == 32);
    assert!(offset_of!(UsageFile, slots) == 4352 && size_of::<Slot>() == 2304 && USAGE_SIZE == 2_367_488);
    assert!(
        offset_of!(Slot, identity) == 0
            && offset_of!(Slot, confirmed) == 128
            && offset_of!(Slot, lanes) == 256
    );
    assert!(offset_of!(Identity, started) == 8 && offset_of!(Identity, namespace) == 16);
    assert!(
        offset_of!(ProcessLane, total) == 0
            && offset_of!(ProcessLane, intent) == 8
            && offset_of!(ProcessLane, busy_until) == 16
    );
    assert!(
        offset_of!(ProcessLane, spent) == 24
            && offset_of!(ProcessLane, waiting) == 32
            && size_of::<ProcessLane>() == 128
    );
};
