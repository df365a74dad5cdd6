//! Decides which container may use a GPU now, and charges each container for the time that it occupies the GPU.
//!
//! While a GPU is not saturated, the driver interleaves the containers' work, and only containers with a ceiling are
//! held back, to their own budget. When it is saturated, containers take turns: one at a time may launch.
//!
//! [`TurnScheduler`] decides for all GPUs of a node, without a clock and with no state but its own. [`Arbiter`] runs in
//! the daemon's process: it reads the stream markers in `usage`, calls the scheduler, and writes the turn words of
//! `limits`.

mod account;
mod credit;
mod doorbell_wait;
mod occupancy;
mod runner;
mod scheduler_thread;
#[cfg(test)]
mod tests;
mod turn_scheduler;

pub use runner::{Arbiter, MemberId};
pub use turn_scheduler::{ContenderView, GateState, SchedulerDecision, TurnScheduler};

const MICRO: u64 = 1_000;
const MILLI: u64 = 1_000_000;

/// Parameters of the turn scheduler, which balance smoothness against the cost of a handover.
pub mod tuning {
    use super::{MICRO, MILLI};

    /// Longest turn that a guarantee gives at once, where handovers are fast.
    pub const MAX_GUARANTEED_TURN_NS: u64 = 25 * MILLI;
    /// Longest turn of time that is guaranteed to no container, or that its owner leaves unused: a returning owner
    /// waits no longer than this.
    pub const MAX_LENT_TURN_NS: u64 = 10 * MILLI;
    /// Turns are at least this many times as long as a handover takes, so that handovers cost little time.
    pub const TURN_PER_HANDOVER: u64 = 32;
    /// Longest turn where handovers are slow.
    pub const MAX_SLOW_HOST_TURN_NS: u64 = 200 * MILLI;
    /// Longest turn of other containers while one that asked for short waits is waiting.
    pub const MAX_TURN_BESIDE_LOW_LATENCY_NS: u64 = 2 * MILLI;
    /// The shortest turn is what a guarantee accrues in this time, within the next two bounds.
    pub const MIN_TURN_ACCRUAL_NS: u64 = 50 * MILLI;
    /// Lower bound of the shortest turn.
    pub const MIN_TURN_NS: u64 = MILLI;
    /// Upper bound of the shortest turn: one of this length costs less than a hundredth to hand over.
    pub const MAX_MIN_TURN_NS: u64 = 10 * MILLI;
    /// Longest time for which a waiting container accrues credit: longer than any container is kept waiting.
    pub const MAX_CREDIT_AGE_WAITING_NS: u64 = 500 * MILLI;
    /// A container that is this far behind goes before any priority.
    pub const OVERDUE_AFTER_NS: u64 = 2 * MAX_GUARANTEED_TURN_NS;
    /// Longest time for which a container that does not wait accrues credit.
    pub const MAX_CREDIT_AGE_IDLE_NS: u64 = 100 * MILLI;
    /// Most credit that a container keeps while it does not wait.
    pub const MAX_IDLE_CREDIT_NS: u64 = 10 * MILLI;
    /// Deepest debt of a container whose turns are short.
    pub const MAX_DEBT_NS: u64 = 500 * MILLI;
    /// Deepest debt of a container with long kernels, in turns as long as its last one really was.
    pub const MAX_DEBT_TURNS: u64 = 4;
    /// Bounds of the measured cost of a handover. A gap between kernels is charged up to that cost, because no other
    /// container could have used it; a longer one ends the turn if others wait.
    pub const MIN_HANDOVER_NS: u64 = 50 * MICRO;
    /// Upper bound of the measured cost of a handover that is charged for gaps.
    pub const MAX_CHARGED_GAP_NS: u64 = MILLI;
    /// Upper bound of the measured cost of a handover.
    pub const MAX_HANDOVER_NS: u64 = 10 * MILLI;
    /// Time that a container has to wake up before its turn passes on.
    pub const WAKE_ALLOWANCE_NS: u64 = 2 * MILLI;
    /// Upper bound of the wake-up allowance, which grows when a container keeps missing its turn (hosts short of CPU).
    pub const MAX_WAKE_ALLOWANCE_NS: u64 = 32 * MILLI;
    /// Work that exceeds its turn by this much no longer keeps other containers waiting.
    pub const MAX_OVERRUN_NS: u64 = 100 * MILLI;
    /// Work of a closed turn that makes no progress for this long may wait for launches that the closed turn holds
    /// back.
    pub const STALLED_AFTER_NS: u64 = 2 * MILLI;
    /// Work of a container on one of several GPUs that makes no progress for this long most likely waits for a launch on
    /// another one.
    pub const PEER_STALLED_AFTER_NS: u64 = 300 * MICRO;
    /// Interval at which such launches are let pass again while the work still makes no progress.
    pub const STALL_RETRY_INTERVAL_NS: u64 = 200 * MILLI;
    /// Time for which they are let pass then.
    pub const STALL_RETRY_NS: u64 = 20 * MILLI;
    /// A GPU is saturated if it is occupied for this percentage of the time.
    pub const SATURATED_PERCENT: u64 = 90;
    /// Time over which saturation is measured while containers take no turns.
    pub const SATURATION_WINDOW_NS: u64 = 50 * MILLI;
    /// Time over which it is measured whether turns are still needed.
    pub const TURNS_WINDOW_NS: u64 = 100 * MILLI;
    /// Longest time for which turns continue after an attempt to do without them has failed.
    pub const MAX_TURNS_BACKOFF_NS: u64 = 5_000 * MILLI;
    /// A container that neither waited nor occupied a GPU for this long is idle there.
    pub const IDLE_AFTER_NS: u64 = 20 * MILLI;
    /// Mean interval at which occupancy is sampled. It is varied at random, because a program may have a rhythm of its
    /// own.
    pub const SAMPLE_INTERVAL_NS: u64 = MILLI;
    /// Interval at which a turn's work is polled while others wait for the turn.
    pub const CONTESTED_POLL_INTERVAL_NS: u64 = 400 * MICRO;
    /// Interval at which to check whether a turn has begun, or its last work has ended.
    pub const HANDOVER_POLL_INTERVAL_NS: u64 = 80 * MICRO;
    /// Work that a process may have queued, in units of the cost of a handover: it must not run dry while its thread
    /// waits for a processor.
    pub const RUN_AHEAD_PER_HANDOVER: u64 = 4;
    /// Upper bound of the work that a process may have queued.
    pub const MAX_RUN_AHEAD_NS: u64 = 32 * MILLI;
    /// Work that processes may have queued beside a container that asked for short waits.
    pub const RUN_AHEAD_BESIDE_LOW_LATENCY_NS: u64 = 300 * MICRO;
    /// A poll that reads the file of a container more often than this is followed by a pause. A container chooses how many
    /// slots and marker pages it has, and all GPUs of the node wait for its poll.
    pub const MAX_CHEAP_READS: usize = 64;
    /// Pause for each read of such a poll: about 40 times as long as the read takes.
    pub const PAUSE_PER_READ_NS: u64 = 20 * MICRO;
    /// A container whose poll takes longer than this is polled less often.
    pub const SLOW_POLL_NS: u64 = MILLI;
    /// The next poll of such a container comes after this many times the cost of the last one.
    pub const SLOW_POLL_BACKOFF: u64 = 32;
}
