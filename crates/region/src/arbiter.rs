//! Decides which container may use a GPU now. One container at a time has the turn. The work that it submits is charged
//! to it; work that exceeds its turn is debt.
//!
//! [`TurnScheduler`] decides for one GPU, without a clock and with no state but its own. [`Arbiter`] runs in the
//! daemon's process: it reads `usage`, calls the schedulers, and writes the turn words of `limits`.

mod account;
mod credit;
mod doorbell_wait;
mod gpu_thread;
mod runner;
#[cfg(test)]
mod tests;
mod turn_scheduler;

pub use account::{Anomalies, ContainerView};
pub use runner::{Arbiter, MemberId};
pub use turn_scheduler::{TurnClass, TurnDecision, TurnGrant, TurnScheduler};

const MICRO: u64 = 1_000;
const MILLI: u64 = 1_000_000;

/// Parameters of the turn scheduler, which balance smoothness against the cost of a handover.
pub mod tuning {
    use super::{MICRO, MILLI};
    use crate::protocol::TIME_CHUNK_NS;

    /// Longest turn that a guarantee gives at once.
    pub const MAX_GUARANTEED_TURN_NS: u64 = 25 * MILLI;
    /// Longest turn of time that is guaranteed to no container, or that its owner leaves unused: a returning owner
    /// waits no longer than this.
    pub const MAX_LENT_TURN_NS: u64 = 10 * MILLI;
    /// The shortest turn is what a guarantee accrues in this time, within the next two bounds.
    pub const MIN_TURN_ACCRUAL_NS: u64 = 50 * MILLI;
    /// Lower bound of the shortest turn.
    pub const MIN_TURN_NS: u64 = MILLI;
    /// Upper bound of the shortest turn: one of this length costs less than a hundredth to hand over.
    pub const MAX_MIN_TURN_NS: u64 = 10 * MILLI;
    /// Longest time for which a waiting container accrues credit: longer than any container is kept waiting.
    pub const MAX_CREDIT_AGE_WAITING_NS: u64 = MAX_OVERRUN_NS + OVERDUE_AFTER_NS;
    /// A container that is this far behind goes before any priority.
    pub const OVERDUE_AFTER_NS: u64 = 2 * MAX_GUARANTEED_TURN_NS;
    /// Longest time for which a container that does not wait accrues credit.
    pub const MAX_CREDIT_AGE_IDLE_NS: u64 = 100 * MILLI;
    /// Most credit that a container keeps while it does not wait.
    pub const MAX_IDLE_CREDIT_NS: u64 = 10 * MILLI;
    /// Deepest debt, so that a container that submitted too much is not locked out forever.
    pub const MAX_DEBT_NS: u64 = 10_000 * MILLI;
    /// The next turn opens this long before the work of the last one ends, because a thread takes about as long to wake
    /// up. With a smaller value the model loses too much GPU time in handovers; with a larger one two containers
    /// overlap more often.
    pub const HANDOVER_LEAD_NS: u64 = 65 * MICRO;
    /// A turn is prolonged this long before its work ends, so that the GPU does not become idle.
    pub const PROLONG_LEAD_NS: u64 = 5 * MILLI;
    /// Time that a container has to wake up before its turn passes on.
    pub const WAKE_ALLOWANCE_NS: u64 = 2 * MILLI;
    /// Upper bound of the wake-up allowance, which grows when a container keeps missing its turn (hosts short of CPU).
    pub const MAX_WAKE_ALLOWANCE_NS: u64 = 16 * MILLI;
    /// Turns of a container that wakes up slowly are this many times as long as the time by which it exceeds the allowance.
    pub const SLOW_WAKER_TURN_FACTOR: u64 = 8;
    /// Interval at which to check whether a container has begun to use its turn.
    pub const BEGIN_POLL_INTERVAL_NS: u64 = 300 * MICRO;
    /// Longest time without work before a turn passes on. It shrinks for a container that wasted it.
    pub const MAX_IDLE_IN_TURN_NS: u64 = 500 * MICRO;
    /// Lower bound of the time without work before a turn passes on.
    pub const MIN_IDLE_IN_TURN_NS: u64 = 30 * MICRO;
    /// Work that exceeds its turn by this much no longer keeps other containers waiting.
    pub const MAX_OVERRUN_NS: u64 = 200 * MILLI;
    /// A container whose poll takes longer than this is polled less often.
    pub const SLOW_POLL_NS: u64 = MILLI;
    /// The next poll of such a container comes after this many times the cost of the last one.
    pub const SLOW_POLL_BACKOFF: u64 = 32;

    // The shortest turn is worth at least two chunks; otherwise a turn could be used up before it was begun.
    const _: () = assert!(MIN_TURN_NS >= 2 * TIME_CHUNK_NS);
}
