//! The turn scheduler's account of one container: its credit, its debt, and how it has used its turns.

use super::credit::TimeCredit;
use super::tuning;
use crate::protocol::WHOLE_GPU;

/// One container's state on one GPU, as polled. The daemon sets `cores`, `ceiling` and `priority`. The other fields
/// come from the container's own processes and may have any value.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct ContainerView {
    /// Guaranteed compute, in thousandths of a percent of the GPU's time.
    pub cores: u32,
    /// Compute that the container may reach with time that others leave unused; equal to `cores` in hard mode.
    pub ceiling: u32,
    /// Priority among containers that want the same turn: the higher goes first.
    pub priority: u32,
    /// Whether a thread of the container waits for a turn.
    pub waiting: bool,
    /// Time at which everything that it submitted is predicted to have run, on the clock of `now`.
    pub busy_until: u64,
    /// GPU time charged in total, in nanoseconds.
    pub spent: u64,
}

impl ContainerView {
    pub(super) fn cores(&self) -> u32 {
        self.cores.min(WHOLE_GPU)
    }

    pub(super) fn ceiling(&self) -> u32 {
        self.ceiling.clamp(self.cores(), WHOLE_GPU)
    }
}

/// Counts of reported values that cannot be true.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Anomalies {
    /// How often `spent` fell by more than corrections explain.
    pub backwards: u64,
    /// How often `spent` rose by more than ten seconds between two polls.
    pub leaps: u64,
}

/// One container's credit and its observed behavior.
#[derive(Clone, Copy, Debug)]
pub(super) struct Account {
    /// Guaranteed time that it has accrued and not used.
    pub(super) guarantee: TimeCredit,
    /// Time that its ceiling still allows it to use.
    pub(super) headroom: TimeCredit,
    /// Lent time that it has used, divided by its weight: the container with the least goes first.
    pub(super) weighted_lent: u64,
    pub(super) spent: u64,
    /// Earliest time at which its work can end if it was charged correctly.
    earliest_end: u64,
    /// Latest time at which its work can end if it was charged correctly.
    latest_end: u64,
    /// `busy_until` as last reported.
    busy_until: u64,
    /// Nanoseconds that may still be charged without an announcement that work will run.
    unannounced_allowance: i64,
    /// Nanoseconds that were charged and may still be corrected downwards.
    correctable: i64,
    /// The part of `correctable` that a correction refunds: not the part that paid for time that others could have
    /// used, whatever ran in it.
    refundable: i64,
    /// The part of `refundable` that was charged as lent time.
    borrowed: i64,
    /// Everything that was charged, minus refunds.
    pub(super) charged: i64,
    /// Nanoseconds for which it may still hold the GPU idle at no charge while it wakes up or prepares work. It earns
    /// them by what it is charged.
    idle_grace: i64,
    pub(super) wanted: bool,
    /// Its share as of the previous poll.
    cores: u32,
    ceiling: u32,
    idle_since: u64,
    /// How long it may be without work in its turn before the turn passes on.
    pub(super) idle_allowance: u64,
    /// How long it may take to wake up before its turn passes on.
    pub(super) wake_allowance: u64,
    /// Time before which it is not offered a turn, because it missed earlier ones.
    pub(super) skipped_until: u64,
    missed_turns: u32,
    /// Time at which its last turn was opened.
    pub(super) last_turn_at: u64,
    pub(super) anomalies: Anomalies,
}

/// Upper bound of what a correction can refund, in nanoseconds: corrections come soon after the charge.
const MAX_CORRECTION_NS: i64 = 100_000_000;

/// Upper bound of charges without an announcement, in nanoseconds. The first kernels of a program have unknown lengths,
/// and some are long.
const MAX_UNANNOUNCED_NS: i64 = 50_000_000;

/// Upper bound of the idle time at no charge: no container begins instantly, and the next one is called when the idle
/// allowance ends.
#[expect(clippy::cast_possible_wrap, reason = "a constant")]
const MAX_IDLE_GRACE_NS: i64 = (tuning::MAX_IDLE_IN_TURN_NS + tuning::HANDOVER_LEAD_NS) as i64;

/// Returns the portion of `nanos` that `rate` is of a whole GPU.
fn portion(nanos: u64, rate: u32) -> u64 {
    nanos.saturating_mul(u64::from(rate)) / u64::from(WHOLE_GPU)
}

/// Returns the most credit that a waiting container accrues.
fn max_waiting_credit(rate: u32) -> u64 {
    portion(tuning::MAX_CREDIT_AGE_WAITING_NS, rate)
}

/// Returns the most credit that a container keeps while it does not wait.
fn max_idle_credit(rate: u32) -> u64 {
    portion(tuning::MAX_CREDIT_AGE_IDLE_NS, rate).min(tuning::MAX_IDLE_CREDIT_NS).max(min_turn(rate))
}

/// Returns the length of the shortest turn.
fn min_turn(rate: u32) -> u64 {
    portion(tuning::MIN_TURN_ACCRUAL_NS, rate)
        .clamp(tuning::MIN_TURN_NS, tuning::MAX_MIN_TURN_NS)
        .min(max_waiting_credit(rate))
}

impl Account {
    /// Opens the account of a new container. It begins with the credit of one that has been idle; time that was spent
    /// under an earlier arbiter is not charged.
    pub(super) fn new(now: u64, view: &ContainerView) -> Self {
        Self {
            guarantee: TimeCredit::from_nanos(max_idle_credit(view.cores())),
            headroom: TimeCredit::from_nanos(max_idle_credit(view.ceiling())),
            weighted_lent: 0,
            spent: view.spent,
            earliest_end: 0,
            latest_end: now,
            busy_until: view.busy_until,
            unannounced_allowance: MAX_UNANNOUNCED_NS,
            correctable: 0,
            refundable: 0,
            borrowed: 0,
            charged: 0,
            idle_grace: 0,
            wanted: false,
            cores: view.cores(),
            ceiling: view.ceiling(),
            idle_since: now,
            idle_allowance: tuning::MAX_IDLE_IN_TURN_NS,
            wake_allowance: tuning::WAKE_ALLOWANCE_NS,
            skipped_until: 0,
            missed_turns: 0,
            last_turn_at: now,
            anomalies: Anomalies::default(),
        }
    }

    /// Returns its share as last polled, with all other fields zero.
    pub(super) fn share(&self) -> ContainerView {
        ContainerView { cores: self.cores, ceiling: self.ceiling, ..ContainerView::default() }
    }

    /// Records the container's total and returns how much to charge: negative when costs were corrected downwards.
    pub(super) fn record_spent(&mut self, spent: u64) -> i64 {
        let limit = i64::try_from(tuning::MAX_DEBT_NS).unwrap_or(i64::MAX);
        #[expect(clippy::cast_possible_wrap, reason = "the difference of counters that may wrap")]
        let grown = spent.wrapping_sub(self.spent) as i64;
        self.spent = spent;
        let grown = if grown > limit {
            self.anomalies.leaps = self.anomalies.leaps.saturating_add(1);
            limit
        } else if grown < -self.correctable {
            // A counter that restarted, or a forged value: no container is refunded more than it was charged.
            self.anomalies.backwards = self.anomalies.backwards.saturating_add(1);
            0
        } else {
            grown
        };
        self.correctable = self.correctable.saturating_add(grown).min(MAX_CORRECTION_NS);
        let grown = grown.max(-self.refundable);
        self.refundable = self.refundable.saturating_add(grown).min(MAX_CORRECTION_NS);
        self.idle_grace = self.idle_grace.saturating_add(grown).clamp(-MAX_CORRECTION_NS, MAX_IDLE_GRACE_NS);
        self.charged = self.charged.wrapping_add(grown);
        grown
    }

    /// Books an amount from [`record_spent`](Self::record_spent): to lent time if the container's turn is lent, else to
    /// the guarantee. A refund goes back to where the charge was booked.
    pub(super) fn charge(&mut self, view: &ContainerView, grown: i64, lent: bool) {
        self.headroom.spend(grown);
        let lent = match grown {
            0.. if lent => grown,
            0.. => 0,
            _ => grown.max(-self.borrowed),
        };
        self.borrowed = (self.borrowed + lent).min(self.refundable);
        self.add_lent_time(view, lent);
        if view.cores() > 0 {
            self.guarantee.spend(grown - lent);
        }
    }

    /// Settles time for which the container held the GPU while others could have used it: `paid` nanoseconds were
    /// charged for `held`. Returns what is still owed. What paid for held time is not refunded later; otherwise a
    /// container could announce work, make all others wait for it, and then report that there was none.
    pub(super) fn settle_held_time(&mut self, held: i64, paid: i64) -> i64 {
        let free = held.min(self.idle_grace).max(0);
        self.idle_grace -= free;
        let due = held - free;
        let missing = (due - paid).clamp(0, due.max(0));
        self.refundable = (self.refundable - (due - missing)).max(0);
        self.borrowed = self.borrowed.min(self.refundable);
        missing
    }

    /// Records that work of length `grown` was submitted between `last` and `now`.
    pub(super) fn record_submission(&mut self, last: u64, now: u64, view: &ContainerView, grown: i64) {
        if grown > 0 {
            // A cost that turned out higher is charged after the work has run, so there is nothing to wait for. A
            // container that reports this for much of its work is not trusted: it lies, or several of its processes
            // each assume that they have the GPU alone.
            let announced = view.busy_until.saturating_sub(self.busy_until.max(last));
            let announced = i64::try_from(announced).unwrap_or(i64::MAX).min(grown);
            let unannounced = grown - announced;
            let ahead = if unannounced <= self.unannounced_allowance { announced } else { grown };
            self.unannounced_allowance =
                (self.unannounced_allowance - (grown - ahead) + announced / 64).min(MAX_UNANNOUNCED_NS);
            if ahead > 0 {
                self.earliest_end = self.earliest_end.max(last).saturating_add_signed(ahead);
            }
            self.busy_until = view.busy_until;
            self.latest_end = self.latest_end.max(now).saturating_add_signed(grown);
            self.missed_turns = 0;
        } else {
            self.earliest_end = self.earliest_end.saturating_add_signed(grown);
            self.latest_end = self.latest_end.saturating_add_signed(grown);
        }
    }

    /// Returns when its work will have run: its own prediction, as far as its charges support it. So no container can
    /// hold a GPU for longer than it pays for, and the work of several processes that each assume to be alone does not
    /// overlap the next turn.
    pub(super) fn predicted_end(&self, view: &ContainerView) -> u64 {
        view.busy_until.min(self.latest_end).max(self.earliest_end)
    }

    /// Accrues credit at the rates of the previous poll, up to the caps of the current share. `owed` is the time that
    /// counts for guarantees, `passed` the time that counts for ceilings.
    pub(super) fn accrue(&mut self, now: u64, owed: u64, passed: u64, view: &ContainerView, wants: bool) {
        let (cores, ceiling) = (view.cores(), view.ceiling());
        if wants {
            self.idle_since = now;
        }
        // A container that begins to want time only now did not want it in the time that has passed.
        let cap = if wants && self.wanted { max_waiting_credit } else { max_idle_credit };
        self.wanted = wants;
        self.guarantee.accrue(owed, self.cores, cap(cores));
        self.headroom.accrue(passed, self.ceiling, cap(ceiling));
        (self.cores, self.ceiling) = (cores, ceiling);
        let kept = if now.saturating_sub(self.idle_since) > tuning::MAX_CREDIT_AGE_IDLE_NS {
            max_idle_credit
        } else {
            max_waiting_credit
        };
        self.guarantee.limit_to(kept(cores));
        self.headroom.limit_to(kept(ceiling));
    }

    /// Returns the turn that its guarantee entitles it to now. Any credit is good for a whole turn, and the rest
    /// becomes debt, so that the GPU is not idle because every container has only a little.
    pub(super) fn guaranteed_turn(&self, view: &ContainerView) -> Option<u64> {
        let held = u64::try_from(self.guarantee.nanos()).ok()?;
        (view.cores() > 0 && held > 0)
            .then(|| held.max(self.min_worthwhile_turn(view.cores())).min(tuning::MAX_GUARANTEED_TURN_NS))
    }

    /// Returns the turn that it may have of time that no container claims.
    pub(super) fn lent_turn(&self, view: &ContainerView) -> Option<u64> {
        let (cores, ceiling) = (view.cores(), view.ceiling());
        if ceiling >= WHOLE_GPU {
            return Some(tuning::MAX_LENT_TURN_NS);
        }
        let held = u64::try_from(self.headroom.nanos()).ok()?;
        (ceiling > cores && held > 0).then(|| held.max(min_turn(ceiling)).min(tuning::MAX_LENT_TURN_NS))
    }

    /// Returns the shortest turn that is worth waking it for: long enough to pay for the time that it takes to wake up.
    fn min_worthwhile_turn(&self, rate: u32) -> u64 {
        let longer = self
            .wake_allowance
            .saturating_sub(tuning::WAKE_ALLOWANCE_NS)
            .saturating_mul(tuning::SLOW_WAKER_TURN_FACTOR);
        min_turn(rate).max(longer.min(max_waiting_credit(rate)))
    }

    /// Returns how long its guarantee took to accrue the unused credit: how far it is behind its share. Negative if it
    /// is ahead.
    pub(super) fn lag(&self, view: &ContainerView) -> i64 {
        self.guarantee.nanos().saturating_mul(i64::from(WHOLE_GPU)) / i64::from(view.cores().max(1))
    }

    /// Returns how long it takes until it may have a turn if no other container waits for one.
    pub(super) fn eligible_in(&self, view: &ContainerView) -> Option<u64> {
        let (cores, ceiling) = (view.cores(), view.ceiling());
        if ceiling >= WHOLE_GPU {
            return Some(0);
        }
        let guarantee = (cores > 0).then(|| self.guarantee.time_until(1, cores)).flatten();
        let headroom = (ceiling > cores).then(|| self.headroom.time_until(1, ceiling)).flatten();
        guarantee.into_iter().chain(headroom).min()
    }

    /// Weighs lent time: it counts less for a container with a larger guarantee.
    pub(super) fn weighted(view: &ContainerView, nanos: u64) -> u64 {
        nanos.saturating_mul(u64::from(WHOLE_GPU)) / u64::from(view.cores().max(WHOLE_GPU / 100))
    }

    /// Adds lent time; a negative amount refunds it.
    pub(super) fn add_lent_time(&mut self, view: &ContainerView, nanos: i64) {
        let weighted = Self::weighted(view, nanos.unsigned_abs());
        self.weighted_lent = match nanos {
            0.. => self.weighted_lent.saturating_add(weighted),
            _ => self.weighted_lent.saturating_sub(weighted),
        };
    }

    /// Records that it used its turn, `after` nanoseconds after it was opened.
    pub(super) fn record_start(&mut self, after: u64) {
        let less = self.wake_allowance - self.wake_allowance / 16;
        self.wake_allowance =
            less.max(after.saturating_mul(2)).clamp(tuning::WAKE_ALLOWANCE_NS, tuning::MAX_WAKE_ALLOWANCE_NS);
    }

    /// Records that it missed its turn. The more often it does, the more rarely it is offered one, and the longer it is
    /// waited for.
    pub(super) fn record_missed_turn(&mut self, now: u64) {
        self.wake_allowance = self.wake_allowance.saturating_mul(2).min(tuning::MAX_WAKE_ALLOWANCE_NS);
        self.skipped_until = now.saturating_add((20 * super::MILLI) << self.missed_turns.min(5));
        self.missed_turns = self.missed_turns.saturating_add(1);
    }
}
