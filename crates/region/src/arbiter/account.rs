//! The turn scheduler's account of one container on one GPU: its credit and debt, and how it has used its turns.

use super::credit::TimeCredit;
use super::{MILLI, tuning};
use crate::protocol::WHOLE_GPU;

/// Shares of a container on one GPU, in thousandths of a percent.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) struct ComputeShare {
    cores: u32,
    ceiling: u32,
}

impl ComputeShare {
    /// Returns the share; values that contradict each other are adjusted.
    pub(super) fn new(cores: u32, ceiling: u32) -> Self {
        let cores = cores.min(WHOLE_GPU);
        Self { cores, ceiling: ceiling.clamp(cores, WHOLE_GPU) }
    }

    pub(super) fn cores(self) -> u32 {
        self.cores
    }

    pub(super) fn has_ceiling(self) -> bool {
        self.ceiling < WHOLE_GPU
    }

    /// Weighs lent time: it counts less for a container with a larger guarantee.
    fn weighted(self, nanos: u64) -> u64 {
        nanos.saturating_mul(u64::from(WHOLE_GPU)) / u64::from(self.cores.max(WHOLE_GPU / 100))
    }
}

/// Where time is booked.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum TurnClass {
    /// By its guarantee.
    Guaranteed,
    /// Time that no container claims now.
    Lent,
}

/// How long turns and handovers are on a GPU now.
#[derive(Clone, Copy, Debug)]
pub(super) struct Pace {
    pub(super) max_guaranteed_turn: u64,
    pub(super) max_lent_turn: u64,
}

/// One container's credit and its observed behavior.
#[derive(Clone, Copy, Debug)]
pub(super) struct Account {
    share: ComputeShare,
    /// Guaranteed time that it has accrued and not used.
    guarantee: TimeCredit,
    /// Time that its ceiling still allows it to use.
    headroom: TimeCredit,
    /// Lent time that it has used, divided by its weight: the container with the least goes first.
    pub(super) weighted_lent: u64,
    wanted: bool,
    idle_since: u64,
    /// How long it may take to wake up before its turn passes on.
    pub(super) wake_allowance: u64,
    /// Time before which it is not offered a turn, because it missed earlier ones.
    pub(super) skipped_until: u64,
    missed_turns: u32,
    /// Time at which its last turn was opened.
    pub(super) last_turn_at: u64,
    /// Time that it was charged since launches were last allowed, and in the period before.
    run: u64,
    last_run: u64,
}

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
    /// Opens the account of a new container, with the credit of one that has been idle.
    pub(super) fn new(now: u64, share: ComputeShare) -> Self {
        Self {
            share,
            guarantee: TimeCredit::from_nanos(max_idle_credit(share.cores)),
            headroom: TimeCredit::from_nanos(max_idle_credit(share.ceiling)),
            weighted_lent: 0,
            wanted: false,
            idle_since: now,
            wake_allowance: tuning::WAKE_ALLOWANCE_NS,
            skipped_until: 0,
            missed_turns: 0,
            last_turn_at: now,
            run: 0,
            last_run: 0,
        }
    }

    pub(super) fn share(&self) -> ComputeShare {
        self.share
    }

    /// Returns whether it waited for time or used some when last polled.
    pub(super) fn wanted(&self) -> bool {
        self.wanted
    }

    /// Returns unused guaranteed time in nanoseconds; debt is negative.
    #[cfg(test)]
    pub(super) fn credit(&self) -> i64 {
        self.guarantee.nanos()
    }

    fn max_debt(&self) -> u64 {
        tuning::MAX_DEBT_NS.max(self.last_run.max(self.run).saturating_mul(tuning::MAX_DEBT_TURNS))
    }

    /// Charges time in a turn of this class.
    pub(super) fn charge(&mut self, nanos: u64, class: TurnClass) {
        self.run = self.run.saturating_add(nanos);
        let max_debt = self.max_debt();
        self.headroom.spend(nanos, max_debt);
        match class {
            TurnClass::Guaranteed if self.share.cores > 0 => self.guarantee.spend(nanos, max_debt),
            TurnClass::Guaranteed | TurnClass::Lent => {
                self.weighted_lent = self.weighted_lent.saturating_add(self.share.weighted(nanos));
            }
        }
    }

    /// Charges time while containers take no turns: what exceeds the guarantee was lent.
    pub(super) fn charge_unscheduled(&mut self, nanos: u64) {
        let guaranteed = nanos.min(u64::try_from(self.guarantee.nanos()).unwrap_or(0));
        if guaranteed > 0 {
            self.charge(guaranteed, TurnClass::Guaranteed);
        }
        if nanos > guaranteed {
            self.charge(nanos - guaranteed, TurnClass::Lent);
        }
    }

    /// Charges time that was used without being accounted for: the guarantee goes into debt for it, up to the bound.
    pub(super) fn charge_unaccounted(&mut self, nanos: u64) {
        // It was not charged to the current run, so it does not raise the bound.
        let max_debt = self.max_debt();
        self.headroom.spend(nanos, max_debt);
        if self.share.cores > 0 {
            self.guarantee.spend(nanos, max_debt);
        } else {
            self.weighted_lent = self.weighted_lent.saturating_add(self.share.weighted(nanos));
        }
    }

    /// Catches up with the lent time that others have used meanwhile: a container has no claim on past lent time.
    pub(super) fn join_lending(&mut self, weighted_lent: u64) {
        self.weighted_lent = self.weighted_lent.max(weighted_lent);
    }

    /// Accrues credit at the rates of the previous poll, up to the caps of the current share. `owed` is the time that
    /// counts for guarantees, `passed` the time that counts for ceilings.
    pub(super) fn accrue(&mut self, now: u64, owed: u64, passed: u64, share: ComputeShare, wants: bool) {
        if wants {
            self.idle_since = now;
        }
        // A container that begins to want time only now did not want it in the time that has passed.
        let cap = if wants && self.wanted { max_waiting_credit } else { max_idle_credit };
        self.wanted = wants;
        self.guarantee.accrue(owed, self.share.cores, cap(share.cores));
        self.headroom.accrue(passed, self.share.ceiling, cap(share.ceiling));
        self.share = share;
        let kept = if now.saturating_sub(self.idle_since) > tuning::MAX_CREDIT_AGE_IDLE_NS {
            max_idle_credit
        } else {
            max_waiting_credit
        };
        self.guarantee.limit_to(kept(share.cores));
        self.headroom.limit_to(kept(share.ceiling));
    }

    /// Returns the turn that its guarantee entitles it to now. Any credit is good for a whole turn, and the rest
    /// becomes debt, so that the GPU is not idle because every container has only a little.
    pub(super) fn guaranteed_turn(&self, pace: &Pace) -> Option<u64> {
        let held = u64::try_from(self.guarantee.nanos()).ok()?;
        let rate = self.share.cores;
        let shortest =
            min_turn(rate).max(portion(pace.max_guaranteed_turn, rate).min(max_waiting_credit(rate)));
        (rate > 0 && held > 0).then(|| held.max(shortest).min(pace.max_guaranteed_turn))
    }

    /// Returns the turn that it may have of time that no container claims.
    pub(super) fn lent_turn(&self, pace: &Pace) -> Option<u64> {
        let ComputeShare { cores, ceiling } = self.share;
        if !self.share.has_ceiling() {
            return Some(pace.max_lent_turn);
        }
        let held = u64::try_from(self.headroom.nanos()).ok()?;
        (ceiling > cores && held > 0).then(|| held.max(min_turn(ceiling)).min(pace.max_lent_turn))
    }

    /// Returns how long its guarantee took to accrue the unused credit: how far it is behind its share. Negative if it
    /// is ahead.
    pub(super) fn lag(&self) -> i64 {
        self.guarantee.nanos().saturating_mul(i64::from(WHOLE_GPU)) / i64::from(self.share.cores.max(1))
    }

    /// Returns how long it takes until it may have a turn if no other container waits for one.
    pub(super) fn eligible_in(&self) -> Option<u64> {
        let ComputeShare { cores, ceiling } = self.share;
        if !self.share.has_ceiling() {
            return Some(0);
        }
        let guarantee = (cores > 0).then(|| self.guarantee.time_until(1, cores)).flatten();
        let headroom = (ceiling > cores).then(|| self.headroom.time_until(1, ceiling)).flatten();
        guarantee.into_iter().chain(headroom).min()
    }

    /// Returns the nanoseconds that it may still use below its ceiling; `None` if it has no ceiling.
    pub(super) fn budget(&self) -> Option<u64> {
        self.share.has_ceiling().then(|| u64::try_from(self.headroom.nanos()).unwrap_or(0))
    }

    /// Returns how long it takes until its ceiling allows a worthwhile amount of work again.
    pub(super) fn budget_in(&self) -> Option<u64> {
        self.headroom.time_until(min_turn(self.share.ceiling), self.share.ceiling)
    }

    /// Returns whether its ceiling allows a worthwhile amount of work.
    pub(super) fn has_worthwhile_budget(&self) -> bool {
        self.budget().is_none_or(|budget| budget >= min_turn(self.share.ceiling))
    }

    /// Records that it used its turn, `after` nanoseconds after it was opened.
    pub(super) fn record_start(&mut self, after: u64) {
        let less = self.wake_allowance - self.wake_allowance / 16;
        self.wake_allowance =
            less.max(after.saturating_mul(2)).clamp(tuning::WAKE_ALLOWANCE_NS, tuning::MAX_WAKE_ALLOWANCE_NS);
        self.missed_turns = 0;
    }

    /// Records that it missed its turn. The more often it does, the more rarely it is offered one, and the longer it is
    /// waited for.
    pub(super) fn record_missed_turn(&mut self, now: u64) {
        self.wake_allowance = self.wake_allowance.saturating_mul(2).min(tuning::MAX_WAKE_ALLOWANCE_NS);
        self.skipped_until = now.saturating_add((MILLI / 2) << self.missed_turns.min(12));
        self.missed_turns = self.missed_turns.saturating_add(1);
    }

    /// Begins a period in which launches are allowed.
    pub(super) fn begin_run(&mut self) {
        if self.run > 0 {
            self.last_run = self.run;
            self.run = 0;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn unaccounted_time_becomes_debt_up_to_the_bound() {
        let mut account = Account::new(0, ComputeShare::new(30_000, 30_000));
        let credit = account.credit();
        account.charge_unaccounted(1_000);
        assert_eq!(account.credit(), credit - 1_000);
        assert_eq!(account.budget(), Some(u64::try_from(credit).unwrap() - 1_000), "its ceiling, too");
        account.charge_unaccounted(60_000 * MILLI);
        assert_eq!(account.credit(), -i64::try_from(tuning::MAX_DEBT_NS).unwrap());
        // Without a guarantee, other containers go first.
        let mut account = Account::new(0, ComputeShare::new(0, WHOLE_GPU));
        account.charge_unaccounted(MILLI);
        assert_eq!((account.credit(), account.weighted_lent), (0, 100 * MILLI));
    }
}
