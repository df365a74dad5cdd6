//! What the turn scheduler keeps about one container.

use super::credit::Credit;
use super::tuning;
use crate::protocol::WHOLE_GPU;

/// What is seen of one container on one GPU. The first three are its owner's, the others are the container's own
/// words and may be anything.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct ContainerView {
    /// Promised, in hundredths of a percent of the GPU's time.
    pub cores: u32,
    /// What it may reach with time that others leave; in hard mode the same.
    pub ceiling: u32,
    /// The higher goes first.
    pub priority: u32,
    /// Somebody in it waits for a turn.
    pub waiting: bool,
    /// When all it has submitted will have run, on the clock of `now`.
    pub busy_until: u64,
    /// All GPU time it was charged so far, in nanoseconds.
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

/// What a container said that cannot be.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Anomalies {
    /// Its `spent` fell by more than corrections explain.
    pub backwards: u64,
    /// Its `spent` rose by more than ten seconds between two looks.
    pub leaps: u64,
}

/// One container's credit, and what is known of its ways.
#[derive(Clone, Copy, Debug)]
pub(super) struct Account {
    /// What its promise brought and it did not use yet.
    pub(super) promise: Credit,
    /// What its ceiling still lets it use.
    pub(super) roof: Credit,
    /// Lent time it had for its weight: the least goes first.
    pub(super) lent: u64,
    pub(super) spent: u64,
    /// Its work cannot end before this if it was charged rightly...
    early: u64,
    /// ...nor after this.
    late: u64,
    /// What it said last.
    busy_until: u64,
    /// How much it may yet be charged without saying that work will run.
    excused: i64,
    /// What was charged and may yet turn out to have been too much.
    creditable: i64,
    /// How much of that is given back: not what paid for time that others had a use for, whatever ran in it.
    refundable: i64,
    /// How much of that was charged as lent time.
    borrowed: i64,
    /// All that was charged, less what was given back.
    pub(super) charged: i64,
    /// How long it may yet hold the GPU for nothing while it wakes up or thinks. It earns this by what it is charged.
    grace: i64,
    pub(super) wanted: bool,
    /// Its share as it was until now.
    cores: u32,
    ceiling: u32,
    idle_since: u64,
    /// How long it may be without work in its turn.
    pub(super) patience: u64,
    /// How long it may take to wake up.
    pub(super) wake: u64,
    /// It had turns and did not come: not asked before this.
    pub(super) away_until: u64,
    absences: u32,
    /// When its last turn was given.
    pub(super) served: u64,
    pub(super) anomalies: Anomalies,
}

/// Corrections come soon after what they correct.
const CREDITABLE: i64 = 100_000_000;

/// The first kernels of a program are of unknown length, and some are long.
const EXCUSED: i64 = 50_000_000;

/// Nobody begins at once, and the next one is called when patience ends.
#[expect(clippy::cast_possible_wrap, reason = "a constant")]
const GRACE: i64 = (tuning::MAX_IDLE_IN_TURN + tuning::HANDOVER_LEAD) as i64;

/// `nanos` of `rate`.
fn part(nanos: u64, rate: u32) -> u64 {
    nanos.saturating_mul(u64::from(rate)) / u64::from(WHOLE_GPU)
}

/// What someone kept waiting gathers at most.
fn behind(rate: u32) -> u64 {
    part(tuning::MAX_CREDIT_AGE_WAITING, rate)
}

/// What someone who does not want keeps.
fn saved(rate: u32) -> u64 {
    part(tuning::MAX_CREDIT_AGE_IDLE, rate).min(tuning::MAX_IDLE_CREDIT).max(worth(rate))
}

/// The shortest turn.
fn worth(rate: u32) -> u64 {
    part(tuning::MIN_TURN_ACCRUAL, rate).clamp(tuning::MIN_TURN, tuning::MAX_MIN_TURN).min(behind(rate))
}

impl Account {
    /// A container that was not there before: it begins with what one that did not want has, and what it spent under
    /// another arbiter is past.
    pub(super) fn new(now: u64, view: &ContainerView) -> Self {
        Self {
            promise: Credit::holding(saved(view.cores())),
            roof: Credit::holding(saved(view.ceiling())),
            lent: 0,
            spent: view.spent,
            early: 0,
            late: now,
            busy_until: view.busy_until,
            excused: EXCUSED,
            creditable: 0,
            refundable: 0,
            borrowed: 0,
            charged: 0,
            grace: 0,
            wanted: false,
            cores: view.cores(),
            ceiling: view.ceiling(),
            idle_since: now,
            patience: tuning::MAX_IDLE_IN_TURN,
            wake: tuning::WAKE_ALLOWANCE,
            away_until: 0,
            absences: 0,
            served: now,
            anomalies: Anomalies::default(),
        }
    }

    /// Its share as last seen, and nothing else.
    pub(super) fn share(&self) -> ContainerView {
        ContainerView { cores: self.cores, ceiling: self.ceiling, ..ContainerView::default() }
    }

    /// How much more is charged now that `spent` is this; less than nothing when costs were corrected.
    pub(super) fn growth(&mut self, spent: u64) -> i64 {
        let limit = i64::try_from(tuning::MAX_DEBT).unwrap_or(i64::MAX);
        #[expect(clippy::cast_possible_wrap, reason = "the difference of counters that may wrap")]
        let grown = spent.wrapping_sub(self.spent) as i64;
        self.spent = spent;
        let grown = if grown > limit {
            self.anomalies.leaps = self.anomalies.leaps.saturating_add(1);
            limit
        } else if grown < -self.creditable {
            // A counter that began anew, or a lie: nobody is given back more than was taken.
            self.anomalies.backwards = self.anomalies.backwards.saturating_add(1);
            0
        } else {
            grown
        };
        self.creditable = self.creditable.saturating_add(grown).min(CREDITABLE);
        let grown = grown.max(-self.refundable);
        self.refundable = self.refundable.saturating_add(grown).min(CREDITABLE);
        self.grace = self.grace.saturating_add(grown).clamp(-CREDITABLE, GRACE);
        self.charged = self.charged.wrapping_add(grown);
        grown
    }

    /// Books what [`growth`](Self::growth) says: to the lent time if that is what it had, else to the promise; and back
    /// to where it came from.
    pub(super) fn charge(&mut self, view: &ContainerView, grown: i64, lent: bool) {
        self.roof.take(grown);
        let lent = match grown {
            0.. if lent => grown,
            0.. => 0,
            _ => grown.max(-self.borrowed),
        };
        self.borrowed = (self.borrowed + lent).min(self.refundable);
        self.lend(view, lent);
        if view.cores() > 0 {
            self.promise.take(grown - lent);
        }
    }

    /// It held the GPU for so long while others had a use for it, and was charged so much for this: says what is
    /// missing. What it was charged for it is not given back later: else it could say that work will run, have all wait
    /// for that, and then say that there was none.
    pub(super) fn held(&mut self, held: i64, paid: i64) -> i64 {
        let free = held.min(self.grace).max(0);
        self.grace -= free;
        let due = held - free;
        let missing = (due - paid).clamp(0, due.max(0));
        self.refundable = (self.refundable - (due - missing)).max(0);
        self.borrowed = self.borrowed.min(self.refundable);
        missing
    }

    /// Work of this length was submitted at some time between the two.
    pub(super) fn submitted(&mut self, last: u64, now: u64, view: &ContainerView, grown: i64) {
        if grown > 0 {
            // A cost that turned out higher is charged after the work has run: that is nothing to wait for. Who says
            // so of much of its work is not believed: it lies, or several processes each believe to be alone.
            let said = view.busy_until.saturating_sub(self.busy_until.max(last));
            let said = i64::try_from(said).unwrap_or(i64::MAX).min(grown);
            let unsaid = grown - said;
            let ahead = if unsaid <= self.excused { said } else { grown };
            self.excused = (self.excused - (grown - ahead) + said / 64).min(EXCUSED);
            if ahead > 0 {
                self.early = self.early.max(last).saturating_add_signed(ahead);
            }
            self.busy_until = view.busy_until;
            self.late = self.late.max(now).saturating_add_signed(grown);
            self.absences = 0;
        } else {
            self.early = self.early.saturating_add_signed(grown);
            self.late = self.late.saturating_add_signed(grown);
        }
    }

    /// When its work will have run: its own word, as far as its charges bear it out. So nobody can hold a GPU for
    /// longer than it pays, and several processes that each think they are alone do not run into the next turn.
    pub(super) fn drained(&self, view: &ContainerView) -> u64 {
        view.busy_until.min(self.late).max(self.early)
    }

    /// Lets credit accrue: by the share as it was until now, up to what the one from now on lets it keep.
    /// `owed` is the time that promises are reckoned by, `passed` that of ceilings.
    pub(super) fn accrue(&mut self, now: u64, owed: u64, passed: u64, view: &ContainerView, wants: bool) {
        let (cores, ceiling) = (view.cores(), view.ceiling());
        if wants {
            self.idle_since = now;
        }
        // Who began to want just now did not want in the time that has passed.
        let cap = if wants && self.wanted { behind } else { saved };
        self.wanted = wants;
        self.promise.grow(owed, self.cores, cap(cores));
        self.roof.grow(passed, self.ceiling, cap(ceiling));
        (self.cores, self.ceiling) = (cores, ceiling);
        let kept =
            if now.saturating_sub(self.idle_since) > tuning::MAX_CREDIT_AGE_IDLE { saved } else { behind };
        self.promise.clip(kept(cores));
        self.roof.clip(kept(ceiling));
    }

    /// The turn that its promise is worth now. Any credit is good for a whole turn, and what it lacks is debt: so time
    /// is not left idle because everybody has a little.
    pub(super) fn promised(&self, view: &ContainerView) -> Option<u64> {
        let held = u64::try_from(self.promise.nanos()).ok()?;
        (view.cores() > 0 && held > 0)
            .then(|| held.max(self.worth(view.cores())).min(tuning::MAX_GUARANTEED_TURN))
    }

    /// The turn that it may have of time nobody claims.
    pub(super) fn lendable(&self, view: &ContainerView) -> Option<u64> {
        let (cores, ceiling) = (view.cores(), view.ceiling());
        if ceiling >= WHOLE_GPU {
            return Some(tuning::MAX_LENT_TURN);
        }
        let held = u64::try_from(self.roof.nanos()).ok()?;
        (ceiling > cores && held > 0).then(|| held.max(worth(ceiling)).min(tuning::MAX_LENT_TURN))
    }

    /// The shortest turn that is worth calling it for: it pays for the time that it takes to wake up.
    fn worth(&self, rate: u32) -> u64 {
        let longer =
            self.wake.saturating_sub(tuning::WAKE_ALLOWANCE).saturating_mul(tuning::SLOW_WAKER_TURN_FACTOR);
        worth(rate).max(longer.min(behind(rate)))
    }

    /// How long its promise takes to bring what it has not used: so long it is behind. Less than nothing if it is ahead.
    pub(super) fn behind(&self, view: &ContainerView) -> i64 {
        self.promise.nanos().saturating_mul(i64::from(WHOLE_GPU)) / i64::from(view.cores().max(1))
    }

    /// How long until it may have a turn, if nobody else wanted one.
    pub(super) fn eligible_in(&self, view: &ContainerView) -> Option<u64> {
        let (cores, ceiling) = (view.cores(), view.ceiling());
        if ceiling >= WHOLE_GPU {
            return Some(0);
        }
        let promise = (cores > 0).then(|| self.promise.until(1, cores)).flatten();
        let roof = (ceiling > cores).then(|| self.roof.until(1, ceiling)).flatten();
        promise.into_iter().chain(roof).min()
    }

    /// Lent time counts less for who was promised more.
    pub(super) fn weighed(view: &ContainerView, nanos: u64) -> u64 {
        nanos.saturating_mul(u64::from(WHOLE_GPU)) / u64::from(view.cores().max(WHOLE_GPU / 100))
    }

    /// It had lent time; negative gives back.
    pub(super) fn lend(&mut self, view: &ContainerView, nanos: i64) {
        let weighed = Self::weighed(view, nanos.unsigned_abs());
        self.lent = match nanos {
            0.. => self.lent.saturating_add(weighed),
            _ => self.lent.saturating_sub(weighed),
        };
    }

    /// It had the turn and came, so long after it was called.
    pub(super) fn came(&mut self, after: u64) {
        let less = self.wake - self.wake / 16;
        self.wake =
            less.max(after.saturating_mul(2)).clamp(tuning::WAKE_ALLOWANCE, tuning::MAX_WAKE_ALLOWANCE);
    }

    /// It had the turn and did not come. The more often, the rarer it is asked, and the longer it is waited for.
    pub(super) fn absent(&mut self, now: u64) {
        self.wake = self.wake.saturating_mul(2).min(tuning::MAX_WAKE_ALLOWANCE);
        self.away_until = now.saturating_add((20 * super::MILLI) << self.absences.min(5));
        self.absences = self.absences.saturating_add(1);
    }
}
