//! Numbers that the node daemon and the shim must agree on.
//!
//! Both are built from this module, but rarely at the same time: a container keeps the shim that it was started with,
//! and the daemon may be upgraded while it runs. A number here may change only with [`LAYOUT_VERSION`], and both sides
//! must continue to work with older ones down to [`OLDEST_LAYOUT_VERSION`]. Numbers that only one side uses (the turn
//! scheduler's tuning, the shim's own rate limiter) stay with that side.

/// Layout version of new regions.
pub const LAYOUT_VERSION: u32 = 3;

/// Oldest layout version that this build supports. Regions of any other version are left as they are.
pub const OLDEST_LAYOUT_VERSION: u32 = 1;

/// First word of `limits`.
pub const LIMITS_MAGIC: u64 = u64::from_le_bytes(*b"PARTLIM\n");

/// First word of `usage`.
pub const USAGE_MAGIC: u64 = u64::from_le_bytes(*b"PARTUSE\n");

/// Most GPUs that a region can have, including attachments.
pub const MAX_GPUS: usize = 16;

/// Number of process slots. A process that uses both driver libraries takes two.
pub const SLOT_COUNT: usize = 1024;

/// Compute of one whole GPU. `cores` and `ceiling` are in this unit: thousandths of a percent.
pub const WHOLE_GPU: u32 = 100_000;

/// Value of `memory` that stands for no limit.
pub const NO_MEMORY_LIMIT: u64 = u64::MAX;

/// Bytes of one unit of the memory account. No allocation of the driver is smaller or spans two units.
pub const MEMORY_UNIT: u64 = 64 << 10;

/// Bits of the memory account's word that count units in use. The word also holds the number of the operation that
/// resulted in them, and the slot of the process that performed it.
pub const ACCOUNT_UNITS_BITS: u32 = 24;
/// Bits of the memory account's word that number operations.
pub const ACCOUNT_NUMBER_BITS: u32 = 30;
/// Bits of the memory account's word that name a slot.
pub const ACCOUNT_SLOT_BITS: u32 = 64 - ACCOUNT_UNITS_BITS - ACCOUNT_NUMBER_BITS;

/// Policy bit: memory above the limit may be placed on the host.
pub const POLICY_OVERSUBSCRIBE: u32 = 1;

/// Policy bit: copies and fills wait for turns as launches do.
pub const POLICY_THROTTLE_COPIES: u32 = 1 << 1;

/// Pages for stream markers that follow the slots in `usage`. Every process takes one per GPU on which its launches are
/// marked, and more if it has many streams.
pub const MARKER_PAGE_COUNT: usize = 255;

/// Streams whose markers fit on one page.
pub const STREAMS_PER_PAGE: usize = 63;

/// Bytes of a marker page: the smallest unit that a driver can register.
pub const MARKER_PAGE_SIZE: usize = 4096;

/// Nanoseconds of work that a process may have queued when the turn scheduler has not set another amount.
pub const DEFAULT_RUN_AHEAD_NS: u64 = 2_000_000;

/// Longest time between two heartbeats of a GPU's turn scheduler while any container has a turn or waits for one.
pub const HEARTBEAT_INTERVAL_NS: u64 = 50_000_000;

/// Longest time between two heartbeats while no container has a turn or waits for one. The heartbeat is then dated this far
/// ahead, so that containers do not mistake the pause for silence.
pub const IDLE_HEARTBEAT_INTERVAL_NS: u64 = 500_000_000;

/// Age of a heartbeat at which the shim considers the turn scheduler gone and limits its container's rate itself.
pub const SCHEDULER_SILENCE_NS: u64 = 250_000_000;

/// Offset in `usage` of the byte that slot zero's process keeps locked for as long as it lives.
pub const LIVENESS_LOCKS_AT: u64 = 0;

/// Slot number of the lock that a process holds while it reclaims slots of dead processes: one past the last slot.
pub const RECLAIM_LOCK_SLOT: usize = SLOT_COUNT;

/// Offset in `usage` of the byte whose classic lock shows slot zero's pid across pid namespaces. It lies beyond the end
/// of the file: locks need no bytes.
pub const PID_LOCKS_AT: u64 = 1 << 32;

const _: () = {
    assert!(OLDEST_LAYOUT_VERSION < LAYOUT_VERSION);
    // A percent is a whole number of units.
    assert!(WHOLE_GPU.is_multiple_of(100));
    // Three heartbeats may be lost on a busy machine before containers limit themselves.
    assert!(SCHEDULER_SILENCE_NS >= 4 * HEARTBEAT_INTERVAL_NS);
    assert!(IDLE_HEARTBEAT_INTERVAL_NS > HEARTBEAT_INTERVAL_NS);
    assert!(DEFAULT_RUN_AHEAD_NS < HEARTBEAT_INTERVAL_NS);
    assert!(MEMORY_UNIT.is_power_of_two());
    assert!(SLOT_COUNT <= 1 << ACCOUNT_SLOT_BITS && SLOT_COUNT.is_multiple_of(64));
    // An entry of the marker directory holds a slot, counted from one, and a GPU.
    assert!(SLOT_COUNT < 1 << 16 && MAX_GPUS <= 1 << 16);
    // The two kinds of locks conflict with each other, so their ranges must not overlap.
    assert!(LIVENESS_LOCKS_AT + RECLAIM_LOCK_SLOT as u64 <= PID_LOCKS_AT);
    // Policy bits do not overlap.
    assert!(POLICY_OVERSUBSCRIBE & POLICY_THROTTLE_COPIES == 0);
};
