//! Decides which container gets the turn on one GPU.

use super::account::{Account, Anomalies, ContainerView};
use super::{MILLI, tuning};
use crate::protocol::{HEARTBEAT_INTERVAL_NS, TIME_CHUNK_NS, WHOLE_GPU};

/// The reason for which a turn is given.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum TurnClass {
    /// The container's guarantee covers it.
    Guaranteed,
    /// No container with a guarantee waits for the time.
    Lent,
}

/// A turn to open.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct TurnGrant {
    /// Index of the container.
    pub index: usize,
    /// GPU time that the container may have spent in total before it must wait again, in nanoseconds.
    pub allowed: u64,
    /// Whether the turn is guaranteed or lent.
    pub class: TurnClass,
}

/// Turns to close and to open, in this order, and when to decide again at the latest.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct TurnDecision {
    /// Index of the container whose turn is to be closed.
    pub close: Option<usize>,
    /// The turn to open, or to prolong if it is open.
    pub open: Option<TurnGrant>,
    /// Time of the next decision, even if no doorbell rings.
    pub next: u64,
}

/// Set when other containers begin to want the GPU during a turn: from then on, idling in the turn costs them time.
#[derive(Clone, Copy, Debug)]
struct Contest {
    since: u64,
    /// The same moment, or the predicted end of the work that was submitted before it, if that is later.
    from: u64,
    /// Amount that the holder had been charged at that moment.
    charged: i64,
    /// Time at which the holder must have used up its turn.
    until: u64,
}

#[derive(Clone, Copy, Debug)]
struct CurrentTurn {
    index: usize,
    /// Whether the holder may submit work; if not, only its submitted work is waited for.
    open: bool,
    class: TurnClass,
    allowed: u64,
    length: u64,
    since: u64,
    /// Whether the holder has begun to use the turn since it was opened or last prolonged.
    begun: bool,
    /// What the holder had spent when the turn was opened or last prolonged.
    spent: u64,
    contest: Option<Contest>,
}

impl CurrentTurn {
    /// Returns how much of the turn is left to spend.
    fn left(&self, view: &ContainerView) -> u64 {
        #[expect(clippy::cast_possible_wrap, reason = "the difference of counters that may wrap")]
        let left = self.allowed.wrapping_sub(view.spent) as i64;
        u64::try_from(left).unwrap_or(0)
    }
}

/// A container that could have the next turn.
#[derive(Clone, Copy, Debug)]
struct Candidate {
    index: usize,
    class: TurnClass,
    length: u64,
    /// Time since its last turn, if it is too far behind: then neither its priority matters nor how far others are
    /// behind. All overdue containers take turns.
    overdue: u64,
    priority: u32,
    /// Order among candidates of the same class and priority: the higher goes first.
    rank: i64,
}

impl Candidate {
    fn goes_before(&self, other: &Self) -> bool {
        let order = |candidate: &Self| {
            (candidate.class == TurnClass::Guaranteed, candidate.overdue, candidate.priority, candidate.rank)
        };
        order(self) > order(other)
    }
}

/// Distributes one GPU's time among containers.
///
/// A container's position in the slice of views is its *index*. `None` stands for an unused index or a container that
/// cannot be polled: its account is kept until [`remove`](TurnScheduler::remove), so that a container cannot lose its
/// debt by becoming unreadable. Memory is allocated only when the slice becomes longer than before.
#[derive(Debug, Default)]
pub struct TurnScheduler {
    now: u64,
    accounts: Vec<Option<Account>>,
    turn: Option<CurrentTurn>,
    /// Weighted lent time of the container that had some last, as far as the clock supports it: new containers start
    /// from here, not from zero.
    weighted_lent: u64,
}

impl TurnScheduler {
    /// Returns a scheduler without containers.
    #[must_use]
    pub fn new() -> Self {
        Self::default()
    }

    /// Forgets the container at this index, so that another one can use the index.
    pub fn remove(&mut self, index: usize) {
        if let Some(account) = self.accounts.get_mut(index) {
            *account = None;
        }
        if self.turn.is_some_and(|turn| turn.index == index) {
            self.turn = None;
        }
    }

    /// Returns the container that has the turn and may submit work.
    #[must_use]
    pub fn holder(&self) -> Option<usize> {
        self.turn.filter(|turn| turn.open).map(|turn| turn.index)
    }

    /// Returns whether no container has a turn, nor unfinished work of one.
    #[must_use]
    pub fn is_idle(&self) -> bool {
        self.turn.is_none()
    }

    /// Returns how often the container at this index reported values that cannot be true.
    #[must_use]
    pub fn anomalies(&self, index: usize) -> Anomalies {
        self.accounts
            .get(index)
            .copied()
            .flatten()
            .map_or_else(Anomalies::default, |account| account.anomalies)
    }

    /// Returns the container's unused guaranteed time in nanoseconds; debt is negative.
    #[must_use]
    pub fn credit(&self, index: usize) -> i64 {
        self.accounts.get(index).copied().flatten().map_or(0, |account| account.guarantee.nanos())
    }

    /// Decides what to do at `now`, given the polled state of all containers.
    pub fn decide(&mut self, now: u64, views: &[Option<ContainerView>]) -> TurnDecision {
        let now = now.max(self.now);
        self.update_accounts(now, views);
        self.now = now;
        let mut decision = match self.turn {
            None => self.start_turn(now, views),
            Some(turn) => match views.get(turn.index).copied().flatten() {
                None => {
                    if let Some(Some(account)) = self.accounts.get(turn.index) {
                        self.charge_held_time(now, &turn, &account.share());
                    }
                    self.turn = None;
                    self.start_turn(now, views)
                }
                Some(view) => self.continue_turn(now, views, turn, &view),
            },
        };
        decision.next = decision
            .next
            .clamp(now.saturating_add(50 * super::MICRO), now.saturating_add(HEARTBEAT_INTERVAL_NS));
        decision
    }

    /// Charges what was spent and accrues credit.
    fn update_accounts(&mut self, now: u64, views: &[Option<ContainerView>]) {
        if self.accounts.len() < views.len() {
            self.accounts.resize(views.len(), None);
        }
        let last = if self.now == 0 { now } else { self.now };
        let passed = (now - last).min(1_000 * MILLI);
        // If the containers that want time were guaranteed more than there is, all guarantees accrue more slowly, in
        // proportion.
        let guaranteed = |(view, account): (&Option<ContainerView>, &Option<Account>)| match (view, account) {
            (Some(view), Some(account)) if account.wanted => u64::from(view.cores()),
            _ => 0,
        };
        let guaranteed: u64 = views.iter().zip(&self.accounts).map(guaranteed).sum();
        let owed = passed * u64::from(WHOLE_GPU) / guaranteed.max(u64::from(WHOLE_GPU));
        let turn = self.turn;
        let mut lent = self.weighted_lent;
        for (index, account) in self.accounts.iter_mut().enumerate() {
            let Some(view) = views.get(index).and_then(Option::as_ref) else {
                if let Some(account) = account {
                    account.accrue(now, owed, passed, &account.share(), false);
                }
                continue;
            };
            let account = account.get_or_insert_with(|| Account::new(now, view));
            let before = account.predicted_end(view);
            let grown = account.record_spent(view.spent);
            let mine = turn.filter(|turn| turn.index == index);
            let lends = mine.is_some_and(|turn| turn.class == TurnClass::Lent);
            account.charge(view, grown, lends);
            if lends {
                // A container that claims more lent time than has passed puts only itself behind.
                let most = self.weighted_lent.saturating_add(Account::weighted(view, passed));
                lent = lent.max(account.weighted_lent.min(most));
            }
            account.record_submission(last, now, view, grown);
            if mine.is_some() && grown > 0 && before < last {
                // It had no work when last polled and then submitted some, so waiting for it was right.
                account.idle_allowance = (account.idle_allowance * 2).min(tuning::MAX_IDLE_IN_TURN_NS);
            }
            let wants = view.waiting || (mine.is_some() && (grown > 0 || account.predicted_end(view) > now));
            if wants && !account.wanted {
                account.weighted_lent = account.weighted_lent.max(self.weighted_lent);
            }
            account.accrue(now, owed, passed, view, wants);
        }
        self.weighted_lent = lent;
    }

    /// Returns the turn that the container at this index could have now.
    fn candidate(&self, now: u64, index: usize, view: &ContainerView) -> Option<Candidate> {
        let account = self.accounts.get(index)?.as_ref()?;
        if now < account.skipped_until {
            return None;
        }
        let priority = view.priority;
        if let Some(length) = account.guaranteed_turn(view) {
            let rank = account.lag(view);
            let late = u64::try_from(rank).is_ok_and(|behind| behind >= tuning::OVERDUE_AFTER_NS);
            let overdue = if late { now.saturating_sub(account.last_turn_at) } else { 0 };
            return Some(Candidate { index, class: TurnClass::Guaranteed, length, overdue, priority, rank });
        }
        let length = account.lent_turn(view)?;
        let rank = -i64::try_from(account.weighted_lent).unwrap_or(i64::MAX);
        Some(Candidate { index, class: TurnClass::Lent, length, overdue: 0, priority, rank })
    }

    /// Returns the waiting container that goes first, apart from one index.
    fn best_candidate(
        &self,
        now: u64,
        views: &[Option<ContainerView>],
        except: Option<usize>,
    ) -> Option<Candidate> {
        let waiting = views.iter().enumerate().filter_map(|(index, view)| {
            let view = view.as_ref().filter(|view| view.waiting && Some(index) != except)?;
            self.candidate(now, index, view)
        });
        waiting.reduce(|best, candidate| if candidate.goes_before(&best) { candidate } else { best })
    }

    /// Returns when the next of the waiting containers may have a turn by its credit.
    fn next_eligible(&self, now: u64, views: &[Option<ContainerView>]) -> u64 {
        let each = views.iter().zip(&self.accounts).filter_map(|(view, account)| {
            let view = view.as_ref().filter(|view| view.waiting)?;
            let account = account.as_ref()?;
            Some(now.saturating_add(account.eligible_in(view)?).max(account.skipped_until))
        });
        each.filter(|at| *at > now).min().unwrap_or(u64::MAX)
    }

    /// Opens a turn when no container has one.
    fn start_turn(&mut self, now: u64, views: &[Option<ContainerView>]) -> TurnDecision {
        match self.best_candidate(now, views, None) {
            Some(candidate) => self.open_turn(now, views, candidate, None),
            None => TurnDecision { close: None, open: None, next: self.next_eligible(now, views) },
        }
    }

    /// Opens a turn, or prolongs it.
    fn open_turn(
        &mut self,
        now: u64,
        views: &[Option<ContainerView>],
        candidate: Candidate,
        close: Option<usize>,
    ) -> TurnDecision {
        let spent = views.get(candidate.index).copied().flatten().map_or(0, |view| view.spent);
        let allowed = spent.wrapping_add(candidate.length);
        let (index, class, length) = (candidate.index, candidate.class, candidate.length);
        let mut turn = CurrentTurn {
            index,
            open: true,
            class,
            allowed,
            length,
            since: now,
            begun: false,
            spent,
            contest: None,
        };
        if let (Some(_), Some(Some(view))) = (self.best_candidate(now, views, Some(index)), views.get(index))
        {
            turn.contest = self.contest(now, &turn, view);
        }
        self.turn = Some(turn);
        if let Some(Some(account)) = self.accounts.get_mut(index) {
            account.last_turn_at = now;
        }
        let poll = if turn.contest.is_some() { tuning::BEGIN_POLL_INTERVAL_NS } else { length / 2 };
        TurnDecision {
            close,
            open: Some(TurnGrant { index, allowed, class }),
            next: now.saturating_add(poll),
        }
    }

    /// Starts a contest: from now on, other containers could use the turn.
    fn contest(&self, now: u64, turn: &CurrentTurn, view: &ContainerView) -> Option<Contest> {
        let account = self.accounts.get(turn.index)?.as_ref()?;
        let from = account.predicted_end(view).max(now);
        let left = turn.left(view).min(turn.length);
        let until = from.saturating_add(left).saturating_add(turn.length / 4).saturating_add(MILLI);
        Some(Contest { since: now, from, charged: account.charged, until })
    }

    /// Decides while a container has the turn, or while its work still runs.
    fn continue_turn(
        &mut self,
        now: u64,
        views: &[Option<ContainerView>],
        mut turn: CurrentTurn,
        view: &ContainerView,
    ) -> TurnDecision {
        let index = turn.index;
        let Some(account) = self.accounts.get(index).copied().flatten() else {
            self.turn = None;
            return self.start_turn(now, views);
        };
        let drained = account.predicted_end(view);
        let backlog = drained.saturating_sub(now);
        let left = turn.left(view);
        let used_up = left <= TIME_CHUNK_NS.min(turn.length / 2);
        let mine =
            (view.waiting || (used_up && backlog > 0)).then(|| self.candidate(now, index, view)).flatten();
        let Some(other) = self.best_candidate(now, views, Some(index)) else {
            self.charge_held_time(now, &turn, view);
            turn.contest = None;
            self.turn = Some(turn);
            return self.continue_uncontested(now, views, view, mine, backlog, left);
        };

        turn.contest = turn.contest.or_else(|| self.contest(now, &turn, view));
        let until = turn.contest.map_or(u64::MAX, |contest| contest.until);
        let mine = mine.filter(|mine| mine.goes_before(&other));
        let mut close = None;
        let stop = (turn.class == TurnClass::Lent && other.class == TurnClass::Guaranteed) || now >= until;
        if turn.open && stop && mine.is_none_or(|mine| mine.class == TurnClass::Lent) {
            // It may submit no more; what it has submitted is waited for.
            turn.open = false;
            close = Some(index);
        }
        let bound = turn.since.saturating_add(turn.length).saturating_add(tuning::MAX_OVERRUN_NS);
        // A container that has time left from an earlier turn works without spending any of this one.
        let started = view.spent != turn.spent || drained > turn.since || !view.waiting;
        if started && !turn.begun {
            turn.begun = true;
            // Without a contest the turn was polled rarely, so the measured wake-up time would be too long.
            let watched = turn.contest.is_some_and(|contest| contest.since == turn.since);
            if let Some(account) = self.accounts.get_mut(index).and_then(Option::as_mut).filter(|_| watched) {
                account.record_start(now.saturating_sub(turn.since));
            }
        }
        let passes_at = if used_up || !turn.open {
            drained.saturating_sub(tuning::HANDOVER_LEAD_NS)
        } else if started {
            drained
                .max(turn.since.saturating_add(tuning::HANDOVER_LEAD_NS))
                .saturating_add(account.idle_allowance)
        } else {
            turn.since.saturating_add(account.wake_allowance)
        };
        let passes_at = passes_at.min(bound);
        let ready = used_up || !turn.open;
        if let Some(mine) = mine.filter(|_| ready && backlog <= tuning::PROLONG_LEAD_NS) {
            self.charge_held_time(now, &turn, view);
            return self.open_turn(now, views, mine, None);
        }
        if now < passes_at {
            self.turn = Some(turn);
            let until = if turn.open { until } else { u64::MAX };
            let ahead = if ready && backlog > tuning::PROLONG_LEAD_NS {
                drained - tuning::PROLONG_LEAD_NS
            } else {
                u64::MAX
            };
            let begins = if started { u64::MAX } else { now.saturating_add(tuning::BEGIN_POLL_INTERVAL_NS) };
            return TurnDecision { close, open: None, next: passes_at.min(until).min(ahead).min(begins) };
        }
        self.charge_held_time(now, &turn, view);
        if turn.class == TurnClass::Lent && other.class == TurnClass::Guaranteed {
            self.reclaim_lent_time(now, &turn, view);
        }
        if turn.open {
            close = Some(index);
            if let Some(account) = self.accounts.get_mut(index).and_then(Option::as_mut) {
                if !started {
                    account.record_missed_turn(now);
                } else if !used_up {
                    account.idle_allowance = (account.idle_allowance / 2).max(tuning::MIN_IDLE_IN_TURN_NS);
                }
            }
        }
        self.open_turn(now, views, other, close)
    }

    /// Decides while no other container could use the turn: it stays open and continues as the holder's credit allows.
    fn continue_uncontested(
        &mut self,
        now: u64,
        views: &[Option<ContainerView>],
        view: &ContainerView,
        mine: Option<Candidate>,
        backlog: u64,
        left: u64,
    ) -> TurnDecision {
        let Some(turn) = self.turn else { return self.start_turn(now, views) };
        let wanted = self.accounts.get(turn.index).and_then(Option::as_ref).is_some_and(|it| it.wanted);
        let wait = |next| TurnDecision { close: None, open: None, next };
        let short = !turn.open || left <= turn.length / 2;
        // Threads that wait although time is left have missed that the turn was opened.
        let stuck =
            view.waiting && backlog == 0 && now >= turn.since.saturating_add(tuning::WAKE_ALLOWANCE_NS);
        let mine = mine.or_else(|| self.candidate(now, turn.index, view));
        if let Some(mut mine) = mine.filter(|_| short || stuck) {
            if backlog > tuning::PROLONG_LEAD_NS {
                return wait(now + backlog - tuning::PROLONG_LEAD_NS);
            }
            if mine.class == TurnClass::Lent {
                mine.length = mine.length.saturating_sub(backlog).max(TIME_CHUNK_NS);
            }
            return self.open_turn(now, views, mine, None);
        }
        let eligible = self.next_eligible(now, views);
        wait(match (wanted, view.waiting) {
            (false, _) => u64::MAX,
            (true, true) if short => eligible,
            (true, true) => {
                turn.since.saturating_add(tuning::WAKE_ALLOWANCE_NS).max(now.saturating_add(backlog))
            }
            (true, false) => eligible.min(now.saturating_add((left / 2).max(2 * MILLI))),
        })
    }

    /// Charges lent time that was kept after its owner wanted it back to the guarantee instead. So long kernels in lent
    /// turns take nothing from others in the end.
    fn reclaim_lent_time(&mut self, now: u64, turn: &CurrentTurn, view: &ContainerView) {
        let (Some(contest), Some(Some(account))) = (turn.contest, self.accounts.get_mut(turn.index)) else {
            return;
        };
        if view.cores() > 0 {
            let kept = i64::try_from(now.saturating_sub(contest.since)).unwrap_or(i64::MAX);
            account.guarantee.spend(kept);
            account.add_lent_time(view, kept.saturating_neg());
        }
    }

    /// Charges the time that a container held the GPU while others could have used it, whether it was used or not.
    fn charge_held_time(&mut self, now: u64, turn: &CurrentTurn, view: &ContainerView) {
        let (Some(contest), Some(Some(account))) = (turn.contest, self.accounts.get_mut(turn.index)) else {
            return;
        };
        let signed = |nanos: u64| i64::try_from(nanos).unwrap_or(i64::MAX);
        // Work that was submitted before the contest was paid for, and so was what has been charged since.
        let before = signed(contest.from.saturating_sub(contest.since));
        let paid = before.saturating_add(account.charged.wrapping_sub(contest.charged));
        let missing = account.settle_held_time(signed(now.saturating_sub(contest.since)), paid);
        match turn.class {
            TurnClass::Guaranteed => account.guarantee.spend(missing),
            TurnClass::Lent => account.add_lent_time(view, missing),
        }
    }
}
