//! The decisions for one GPU.

use super::account::{Account, Anomalies, ContainerView};
use super::{MILLI, tuning};
use crate::protocol::{HEARTBEAT_INTERVAL_NS, TIME_CHUNK_NS, WHOLE_GPU};

/// Why a turn is given.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum TurnClass {
    /// It was promised.
    Promised,
    /// Nobody with a claim wants it.
    Lent,
}

/// A turn to open.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct TurnGrant {
    /// Whose turn.
    pub index: usize,
    /// What the container may have spent in all until it must wait again.
    pub allowed: u64,
    /// Of which kind.
    pub class: TurnClass,
}

/// What to write, in this order, and when to ask again at the latest.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct TurnDecision {
    /// Whose turn to close.
    pub close: Option<usize>,
    /// Whose turn to open, or to prolong if it is open.
    pub open: Option<TurnGrant>,
    /// When to ask again, even if no doorbell rings.
    pub next: u64,
}

/// Others began to want while one had the turn: from here on its idling is theirs to lose.
#[derive(Clone, Copy, Debug)]
struct Contest {
    since: u64,
    /// When, counted from the end of what it had submitted by then.
    from: u64,
    /// What it had been charged by then.
    charged: i64,
    /// When it must have used its turn.
    until: u64,
}

#[derive(Clone, Copy, Debug)]
struct Turn {
    index: usize,
    /// It may submit; otherwise only what it has submitted is waited for.
    open: bool,
    class: TurnClass,
    allowed: u64,
    length: u64,
    since: u64,
    /// It has begun, since it was opened or last prolonged.
    begun: bool,
    /// What it had spent then.
    spent: u64,
    contest: Option<Contest>,
}

impl Turn {
    /// What is left of it to be spent.
    fn left(&self, view: &ContainerView) -> u64 {
        #[expect(clippy::cast_possible_wrap, reason = "the difference of counters that may wrap")]
        let left = self.allowed.wrapping_sub(view.spent) as i64;
        u64::try_from(left).unwrap_or(0)
    }
}

/// Somebody who could have the next turn.
#[derive(Clone, Copy, Debug)]
struct Candidate {
    index: usize,
    class: TurnClass,
    length: u64,
    /// How long it had no turn, if it is too far behind: then neither its priority matters nor what others say they are
    /// owed. All who are overdue take turns.
    overdue: u64,
    priority: u32,
    /// The higher of two of the same class and priority goes first.
    rank: i64,
}

impl Candidate {
    fn before(&self, other: &Self) -> bool {
        let order = |pick: &Self| (pick.class == TurnClass::Promised, pick.overdue, pick.priority, pick.rank);
        order(self) > order(other)
    }
}

/// Deals out one GPU's time among containers.
///
/// A container's place in the slice of views is its *index*; an empty place is `None`, and so is one that cannot be seen:
/// its account is kept until [`vacate`](TurnScheduler::vacate), so that nobody loses its debt by hiding. Memory is allocated only
/// when the slice becomes longer than ever before.
#[derive(Debug, Default)]
pub struct TurnScheduler {
    now: u64,
    accounts: Vec<Option<Account>>,
    turn: Option<Turn>,
    /// The lent time per weight of who had some last, as far as the clock bears it out: newcomers start there, not at
    /// nothing.
    lent: u64,
}

impl TurnScheduler {
    /// Nobody has a index yet.
    #[must_use]
    pub fn new() -> Self {
        Self::default()
    }

    /// Someone else will sit here from now on.
    pub fn vacate(&mut self, index: usize) {
        if let Some(account) = self.accounts.get_mut(index) {
            *account = None;
        }
        if self.turn.is_some_and(|turn| turn.index == index) {
            self.turn = None;
        }
    }

    /// Who has the turn and may submit.
    #[must_use]
    pub fn holder(&self) -> Option<usize> {
        self.turn.filter(|turn| turn.open).map(|turn| turn.index)
    }

    /// Whether nobody has a turn, nor work left of one.
    #[must_use]
    pub fn is_idle(&self) -> bool {
        self.turn.is_none()
    }

    /// What the container on this index said that cannot be.
    #[must_use]
    pub fn anomalies(&self, index: usize) -> Anomalies {
        self.accounts
            .get(index)
            .copied()
            .flatten()
            .map_or_else(Anomalies::default, |account| account.anomalies)
    }

    /// What its promise brought that it did not use, in nanoseconds; debt is negative.
    #[must_use]
    pub fn credit(&self, index: usize) -> i64 {
        self.accounts.get(index).copied().flatten().map_or(0, |account| account.promise.nanos())
    }

    /// Says what to do at `now`, by what is seen.
    pub fn decide(&mut self, now: u64, views: &[Option<ContainerView>]) -> TurnDecision {
        let now = now.max(self.now);
        self.settle(now, views);
        self.now = now;
        let mut order = match self.turn {
            None => self.fresh(now, views),
            Some(turn) => match views.get(turn.index).copied().flatten() {
                None => {
                    if let Some(Some(account)) = self.accounts.get(turn.index) {
                        self.fine(now, &turn, &account.share());
                    }
                    self.turn = None;
                    self.fresh(now, views)
                }
                Some(view) => self.held(now, views, turn, &view),
            },
        };
        order.next = order
            .next
            .clamp(now.saturating_add(50 * super::MICRO), now.saturating_add(HEARTBEAT_INTERVAL_NS));
        order
    }

    /// Charges what was spent and lets credit accrue.
    fn settle(&mut self, now: u64, views: &[Option<ContainerView>]) {
        if self.accounts.len() < views.len() {
            self.accounts.resize(views.len(), None);
        }
        let last = if self.now == 0 { now } else { self.now };
        let passed = (now - last).min(1_000 * MILLI);
        // If those who want were promised more than there is, an hour of the GPU is less than an hour's worth for all.
        let promised = |(view, account): (&Option<ContainerView>, &Option<Account>)| match (view, account) {
            (Some(view), Some(account)) if account.wanted => u64::from(view.cores()),
            _ => 0,
        };
        let promised: u64 = views.iter().zip(&self.accounts).map(promised).sum();
        let owed = passed * u64::from(WHOLE_GPU) / promised.max(u64::from(WHOLE_GPU));
        let turn = self.turn;
        let mut lent = self.lent;
        for (index, account) in self.accounts.iter_mut().enumerate() {
            let Some(view) = views.get(index).and_then(Option::as_ref) else {
                if let Some(account) = account {
                    account.accrue(now, owed, passed, &account.share(), false);
                }
                continue;
            };
            let account = account.get_or_insert_with(|| Account::new(now, view));
            let before = account.drained(view);
            let grown = account.growth(view.spent);
            let mine = turn.filter(|turn| turn.index == index);
            let lends = mine.is_some_and(|turn| turn.class == TurnClass::Lent);
            account.charge(view, grown, lends);
            if lends {
                // Whoever claims to have had more than there was puts only itself behind.
                let most = self.lent.saturating_add(Account::weighed(view, passed));
                lent = lent.max(account.lent.min(most));
            }
            account.submitted(last, now, view, grown);
            if mine.is_some() && grown > 0 && before < last {
                // It was without work when last seen, and it was right to wait for it.
                account.patience = (account.patience * 2).min(tuning::MAX_IDLE_IN_TURN);
            }
            let wants = view.waiting || (mine.is_some() && (grown > 0 || account.drained(view) > now));
            if wants && !account.wanted {
                account.lent = account.lent.max(self.lent);
            }
            account.accrue(now, owed, passed, view, wants);
        }
        self.lent = lent;
    }

    /// What this index could have now.
    fn pick(&self, now: u64, index: usize, view: &ContainerView) -> Option<Candidate> {
        let account = self.accounts.get(index)?.as_ref()?;
        if now < account.away_until {
            return None;
        }
        let priority = view.priority;
        if let Some(length) = account.promised(view) {
            let rank = account.behind(view);
            let late = u64::try_from(rank).is_ok_and(|behind| behind >= tuning::OVERDUE_AFTER);
            let overdue = if late { now.saturating_sub(account.served) } else { 0 };
            return Some(Candidate { index, class: TurnClass::Promised, length, overdue, priority, rank });
        }
        let length = account.lendable(view)?;
        let rank = -i64::try_from(account.lent).unwrap_or(i64::MAX);
        Some(Candidate { index, class: TurnClass::Lent, length, overdue: 0, priority, rank })
    }

    /// The first in line among those who wait, but for one index.
    fn first(&self, now: u64, views: &[Option<ContainerView>], but: Option<usize>) -> Option<Candidate> {
        let waiting = views.iter().enumerate().filter_map(|(index, view)| {
            let view = view.as_ref().filter(|view| view.waiting && Some(index) != but)?;
            self.pick(now, index, view)
        });
        waiting.reduce(|best, pick| if pick.before(&best) { pick } else { best })
    }

    /// When the next of those who wait may have a turn by its credit.
    fn ripe(&self, now: u64, views: &[Option<ContainerView>]) -> u64 {
        let each = views.iter().zip(&self.accounts).filter_map(|(view, account)| {
            let view = view.as_ref().filter(|view| view.waiting)?;
            let account = account.as_ref()?;
            Some(now.saturating_add(account.eligible_in(view)?).max(account.away_until))
        });
        each.filter(|at| *at > now).min().unwrap_or(u64::MAX)
    }

    /// Nobody has the turn.
    fn fresh(&mut self, now: u64, views: &[Option<ContainerView>]) -> TurnDecision {
        match self.first(now, views, None) {
            Some(pick) => self.give(now, views, pick, None),
            None => TurnDecision { close: None, open: None, next: self.ripe(now, views) },
        }
    }

    /// Opens a turn, or prolongs it.
    fn give(
        &mut self,
        now: u64,
        views: &[Option<ContainerView>],
        pick: Candidate,
        close: Option<usize>,
    ) -> TurnDecision {
        let spent = views.get(pick.index).copied().flatten().map_or(0, |view| view.spent);
        let allowed = spent.wrapping_add(pick.length);
        let (index, class, length) = (pick.index, pick.class, pick.length);
        let mut turn = Turn {
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
        if let (Some(_), Some(Some(view))) = (self.first(now, views, Some(index)), views.get(index)) {
            turn.contest = self.contest(now, &turn, view);
        }
        self.turn = Some(turn);
        if let Some(Some(account)) = self.accounts.get_mut(index) {
            account.served = now;
        }
        let look = if turn.contest.is_some() { tuning::BEGIN_POLL_INTERVAL } else { length / 2 };
        TurnDecision {
            close,
            open: Some(TurnGrant { index, allowed, class }),
            next: now.saturating_add(look),
        }
    }

    /// From now on others could use the turn.
    fn contest(&self, now: u64, turn: &Turn, view: &ContainerView) -> Option<Contest> {
        let account = self.accounts.get(turn.index)?.as_ref()?;
        let from = account.drained(view).max(now);
        let left = turn.left(view).min(turn.length);
        let until = from.saturating_add(left).saturating_add(turn.length / 4).saturating_add(MILLI);
        Some(Contest { since: now, from, charged: account.charged, until })
    }

    /// Somebody has the turn, or its work still runs.
    fn held(
        &mut self,
        now: u64,
        views: &[Option<ContainerView>],
        mut turn: Turn,
        view: &ContainerView,
    ) -> TurnDecision {
        let index = turn.index;
        let Some(account) = self.accounts.get(index).copied().flatten() else {
            self.turn = None;
            return self.fresh(now, views);
        };
        let drained = account.drained(view);
        let backlog = drained.saturating_sub(now);
        let left = turn.left(view);
        let used_up = left <= TIME_CHUNK_NS.min(turn.length / 2);
        let mine = (view.waiting || (used_up && backlog > 0)).then(|| self.pick(now, index, view)).flatten();
        let Some(other) = self.first(now, views, Some(index)) else {
            self.fine(now, &turn, view);
            turn.contest = None;
            self.turn = Some(turn);
            return self.alone(now, views, view, mine, backlog, left);
        };

        turn.contest = turn.contest.or_else(|| self.contest(now, &turn, view));
        let until = turn.contest.map_or(u64::MAX, |contest| contest.until);
        let mine = mine.filter(|mine| mine.before(&other));
        let mut close = None;
        let stop = (turn.class == TurnClass::Lent && other.class == TurnClass::Promised) || now >= until;
        if turn.open && stop && mine.is_none_or(|mine| mine.class == TurnClass::Lent) {
            // No more of it; what it has submitted is waited for.
            turn.open = false;
            close = Some(index);
        }
        let bound = turn.since.saturating_add(turn.length).saturating_add(tuning::MAX_OVERRUN);
        // Who has something left of an earlier turn spends nothing and works all the same.
        let started = view.spent != turn.spent || drained > turn.since || !view.waiting;
        if started && !turn.begun {
            turn.begun = true;
            // Whom nobody else waited for was not looked at so closely.
            let watched = turn.contest.is_some_and(|contest| contest.since == turn.since);
            if let Some(account) = self.accounts.get_mut(index).and_then(Option::as_mut).filter(|_| watched) {
                account.came(now.saturating_sub(turn.since));
            }
        }
        let passes_at = if used_up || !turn.open {
            drained.saturating_sub(tuning::HANDOVER_LEAD)
        } else if started {
            drained.max(turn.since.saturating_add(tuning::HANDOVER_LEAD)).saturating_add(account.patience)
        } else {
            turn.since.saturating_add(account.wake)
        };
        let passes_at = passes_at.min(bound);
        let ready = used_up || !turn.open;
        if let Some(mine) = mine.filter(|_| ready && backlog <= tuning::PROLONG_LEAD) {
            self.fine(now, &turn, view);
            return self.give(now, views, mine, None);
        }
        if now < passes_at {
            self.turn = Some(turn);
            let until = if turn.open { until } else { u64::MAX };
            let ahead = if ready && backlog > tuning::PROLONG_LEAD {
                drained - tuning::PROLONG_LEAD
            } else {
                u64::MAX
            };
            let begins = if started { u64::MAX } else { now.saturating_add(tuning::BEGIN_POLL_INTERVAL) };
            return TurnDecision { close, open: None, next: passes_at.min(until).min(ahead).min(begins) };
        }
        self.fine(now, &turn, view);
        if turn.class == TurnClass::Lent && other.class == TurnClass::Promised {
            self.claim(now, &turn, view);
        }
        if turn.open {
            close = Some(index);
            if let Some(account) = self.accounts.get_mut(index).and_then(Option::as_mut) {
                if !started {
                    account.absent(now);
                } else if !used_up {
                    account.patience = (account.patience / 2).max(tuning::MIN_IDLE_IN_TURN);
                }
            }
        }
        self.give(now, views, other, close)
    }

    /// Nobody else could use the turn: it stays open, and goes on as its owner's credit allows.
    fn alone(
        &mut self,
        now: u64,
        views: &[Option<ContainerView>],
        view: &ContainerView,
        mine: Option<Candidate>,
        backlog: u64,
        left: u64,
    ) -> TurnDecision {
        let Some(turn) = self.turn else { return self.fresh(now, views) };
        let wanted = self.accounts.get(turn.index).and_then(Option::as_ref).is_some_and(|it| it.wanted);
        let wait = |next| TurnDecision { close: None, open: None, next };
        let short = !turn.open || left <= turn.length / 2;
        // Some that wait although there is something left have missed that the turn was opened.
        let stuck = view.waiting && backlog == 0 && now >= turn.since.saturating_add(tuning::WAKE_ALLOWANCE);
        let mine = mine.or_else(|| self.pick(now, turn.index, view));
        if let Some(mut mine) = mine.filter(|_| short || stuck) {
            if backlog > tuning::PROLONG_LEAD {
                return wait(now + backlog - tuning::PROLONG_LEAD);
            }
            if mine.class == TurnClass::Lent {
                mine.length = mine.length.saturating_sub(backlog).max(TIME_CHUNK_NS);
            }
            return self.give(now, views, mine, None);
        }
        let ripe = self.ripe(now, views);
        wait(match (wanted, view.waiting) {
            (false, _) => u64::MAX,
            (true, true) if short => ripe,
            (true, true) => {
                turn.since.saturating_add(tuning::WAKE_ALLOWANCE).max(now.saturating_add(backlog))
            }
            (true, false) => ripe.min(now.saturating_add((left / 2).max(2 * MILLI))),
        })
    }

    /// Lent time that lasted while its owner wanted it back was not lent: the promise pays for it. So long kernels in
    /// lent turns take nothing from others in the end.
    fn claim(&mut self, now: u64, turn: &Turn, view: &ContainerView) {
        let (Some(contest), Some(Some(account))) = (turn.contest, self.accounts.get_mut(turn.index)) else {
            return;
        };
        if view.cores() > 0 {
            let kept = i64::try_from(now.saturating_sub(contest.since)).unwrap_or(i64::MAX);
            account.promise.take(kept);
            account.lend(view, kept.saturating_neg());
        }
    }

    /// Time that one held while others had a use for it is charged to it, used or not.
    fn fine(&mut self, now: u64, turn: &Turn, view: &ContainerView) {
        let (Some(contest), Some(Some(account))) = (turn.contest, self.accounts.get_mut(turn.index)) else {
            return;
        };
        let signed = |nanos: u64| i64::try_from(nanos).unwrap_or(i64::MAX);
        // What it had submitted before was paid for, and so was what it was charged since.
        let before = signed(contest.from.saturating_sub(contest.since));
        let paid = before.saturating_add(account.charged.wrapping_sub(contest.charged));
        let missing = account.held(signed(now.saturating_sub(contest.since)), paid);
        match turn.class {
            TurnClass::Promised => account.promise.take(missing),
            TurnClass::Lent => account.lend(view, missing),
        }
    }
}
