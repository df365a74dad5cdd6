//! Who may use a GPU now. One container at a time has the turn; what it submits in it is charged to it, and what it
//! submits too much is debt.
//!
//! [`TurnScheduler`] decides, for one GPU, with no clock and no memory but its own. [`Arbiter`] lives in the
//! owner's process: it reads `usage`, asks the deal, and writes the gate words of `limits`.

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

/// The whole of a GPU's time, in the hundredths of a percent that shares are counted in.
pub const WHOLE: u32 = 10_000;

const MICRO: u64 = 1_000;
const MILLI: u64 = 1_000_000;

/// How the deal weighs smoothness against the cost of handing over.
pub mod tuning {
    use super::{MICRO, MILLI};

    /// The longest turn that a promise gives at once.
    pub const TURN: u64 = 25 * MILLI;
    /// The longest turn of time that nobody was promised or that its owner leaves: who comes back waits no longer.
    pub const LENT: u64 = 10 * MILLI;
    /// The shortest turn is what a promise brings in this time...
    pub const GATHER: u64 = 50 * MILLI;
    /// ...but no less than this...
    pub const LEAST: u64 = MILLI;
    /// ...and no more: one this long costs less than a hundredth to hand over.
    pub const ENOUGH: u64 = 10 * MILLI;
    /// Who wants and is kept waiting gathers this long and can catch up on all of it: longer than anybody is kept.
    pub const BEHIND: u64 = BOUND + OVERDUE;
    /// Who is kept waiting so long goes before any priority.
    pub const OVERDUE: u64 = 2 * TURN;
    /// Who does not want gathers this long at most...
    pub const IDLE: u64 = 100 * MILLI;
    /// ...and this much.
    pub const SAVED: u64 = 10 * MILLI;
    /// The deepest debt: whoever submitted more than that is not locked out for good.
    pub const DEBT: u64 = 10_000 * MILLI;
    /// The next turn opens so long before the last one's work ends: a thread takes about as long to wake up. The model
    /// loses too much of the GPU in handing over with less, and with more two run at once more often.
    pub const LEAD: u64 = 65 * MICRO;
    /// Who may go on learns it so long before its work ends: its GPU does not stop.
    pub const AHEAD: u64 = 5 * MILLI;
    /// A turn's rest that is too little for a process to take some.
    pub const CHUNK: u64 = 500 * MICRO;
    /// How long one may take to wake up before its turn passes on...
    pub const WAKE: u64 = 2 * MILLI;
    /// ...and at most, if that has been too short for it: where processors are scarce, nobody is called in vain for good.
    pub const SLOWEST: u64 = 16 * MILLI;
    /// Who takes longer than usual to wake up has turns so many times as long as what it takes more.
    pub const WORTH: u64 = 8;
    /// When to see whether one has begun.
    pub const GLANCE: u64 = 300 * MICRO;
    /// How long one may be without work before its turn passes on, at most; who used it in vain has less of it.
    pub const PATIENCE: u64 = 500 * MICRO;
    /// And at least.
    pub const HASTE: u64 = 30 * MICRO;
    /// Work that lasts longer than this past its turn no longer keeps others out.
    pub const BOUND: u64 = 200 * MILLI;
    /// A look at a container that takes longer than this is dear...
    pub const DEAR: u64 = MILLI;
    /// ...and the next one comes after so many times as long.
    pub const REST: u64 = 32;
    /// The longest time between two looks...
    pub const BEAT: u64 = 50 * MILLI;
    /// ...and between two while nobody has a turn or wants one: who does rings. Containers are told that they will hear no more
    /// for so long.
    pub const QUIET: u64 = 500 * MILLI;
}
