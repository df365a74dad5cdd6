//! Ends turns, and starts the next ones.
//!
//! A turn belongs to a container and covers all GPUs on which it waits for one or has worked recently. It ends when its
//! time is used, when its container leaves the GPUs idle, or does not begin. Then its queued work is waited for, at
//! most [`tuning::MAX_OVERRUN_NS`].
//!
//! A container that needs several GPUs reserves those that are free until the others are; meanwhile other containers
//! may have turns there that end in time.

use super::super::account::TurnClass;
use super::super::tuning;
use super::TurnScheduler;
use crate::protocol::MAX_GPUS;

/// Shortest turn for which a reserved GPU is given away.
const MIN_FILLER_TURN_NS: u64 = 2 * tuning::MIN_TURN_NS;

/// Indexes of contenders: at most one for each GPU.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct Members {
    list: [usize; MAX_GPUS],
    count: usize,
}

impl Members {
    fn push(&mut self, index: usize) {
        if let Some(place) = self.list.get_mut(self.count) {
            *place = index;
            self.count += 1;
        }
    }

    fn remove(&mut self, index: usize) {
        if let Some(at) = self.as_slice().iter().position(|&member| member == index) {
            self.list.copy_within(at + 1..self.count, at);
            self.count -= 1;
        }
    }

    fn as_slice(&self) -> &[usize] {
        &self.list[..self.count]
    }

    pub(super) fn contains(&self, index: usize) -> bool {
        self.as_slice().contains(&index)
    }
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum TurnStage {
    /// Launches pass.
    Open,
    /// Launches wait, and queued work is waited for since this time.
    Draining { since: u64 },
}

/// A container's turn on one or several GPUs.
#[derive(Clone, Debug)]
pub(super) struct Turn {
    container: u64,
    members: Members,
    /// The GPUs of the members, as a bitmap.
    gpus: u32,
    class: TurnClass,
    stage: TurnStage,
    opened_at: u64,
    /// Whether its work has begun.
    begun: bool,
    length: u64,
    /// The time that was used on the GPU where it was most.
    used: [u64; MAX_GPUS],
    /// Since when its GPUs are idle.
    idle_since: Option<u64>,
    /// Charged part of the current gap between kernels.
    gap: u64,
    /// When another container began to want the turn.
    contested_at: Option<u64>,
    /// Whether its queued work made no progress while a thread waited on another of its GPUs. Until the work has run,
    /// launches pass there.
    lets_peers_pass: bool,
}

impl Turn {
    pub(super) fn members(&self) -> &[usize] {
        self.members.as_slice()
    }

    pub(super) fn member_list(&self) -> Members {
        self.members
    }

    pub(super) fn covers(&self, gpu: usize) -> bool {
        self.gpus >> gpu & 1 == 1
    }

    pub(super) fn class(&self) -> TurnClass {
        self.class
    }

    pub(super) fn has_begun(&self) -> bool {
        self.begun
    }

    pub(super) fn gap(&self) -> u64 {
        self.gap
    }

    pub(super) fn is_open(&self) -> bool {
        self.stage == TurnStage::Open
    }

    pub(super) fn lets_peers_pass(&self) -> bool {
        self.lets_peers_pass
    }

    pub(super) fn use_time(&mut self, gpu: usize, nanos: u64) {
        if let Some(used) = self.used.get_mut(gpu) {
            *used = used.saturating_add(nanos);
        }
    }

    fn used(&self) -> u64 {
        self.used.iter().copied().max().unwrap_or(0)
    }

    fn left(&self) -> u64 {
        self.length.saturating_sub(self.used())
    }
}

/// A container that could have a turn.
#[derive(Clone, Copy, Debug)]
pub(super) struct Candidate {
    container: u64,
    members: Members,
    gpus: u32,
    class: TurnClass,
    length: u64,
    low_latency: bool,
    /// Time since its last turn, if it is too far behind: then neither its priority matters nor how far others are
    /// behind. All overdue containers take turns.
    overdue: u64,
    priority: u32,
    /// Order among candidates of the same class and priority: the higher goes first.
    rank: i64,
}

impl Candidate {
    fn goes_before(&self, other: &Self) -> bool {
        let order = |one: &Self| {
            let guaranteed = one.class == TurnClass::Guaranteed;
            (guaranteed, guaranteed && one.low_latency, one.overdue, one.priority, one.rank)
        };
        order(self) > order(other)
    }
}

impl TurnScheduler {
    /// Updates what a turn knows about its use after an interval was charged.
    pub(super) fn finish_turn_interval(&mut self, at: usize, last: u64, now: u64) {
        let (before, after, since) = self.turn_occupancy(at);
        let charged_gap = self.charged_gap(at);
        let turn = &mut self.turns[at];
        if after {
            turn.idle_since = None;
            turn.gap = 0;
            if !turn.begun {
                turn.begun = true;
                // Work that was queued before the turn says nothing about how long a thread takes to wake up.
                let fresh = !before && turn.contested_at == Some(turn.opened_at);
                let began = if since > 0 { since.clamp(turn.opened_at, now) } else { now };
                let late = began - turn.opened_at;
                if fresh {
                    self.record_handover(at, late);
                }
            }
            return;
        }
        if turn.begun {
            let idle = if before { (now - last) / 2 } else { now - last };
            turn.gap = turn.gap.saturating_add(idle).min(charged_gap);
            turn.idle_since.get_or_insert(now - idle);
        }
    }

    /// Returns the longest gap between kernels that is charged in a turn. A container that is behind its guarantee may
    /// keep its turn over longer gaps: it would only fall back further.
    pub(super) fn charged_gap(&self, at: usize) -> u64 {
        let turn = &self.turns[at];
        let members = || turn.members().iter().filter_map(|&index| self.contender(index));
        let is_behind = |it: &super::Contender| {
            // More than the credit of a container that was idle.
            let far = tuning::MAX_CREDIT_AGE_IDLE_NS + tuning::OVERDUE_AFTER_NS;
            u64::try_from(it.account.lag()).is_ok_and(|behind| behind >= far)
        };
        if turn.class == TurnClass::Guaranteed && members().any(is_behind) {
            return tuning::MAX_CHARGED_GAP_NS;
        }
        members().map(|it| self.gpus[it.gpu].charged_gap()).max().unwrap_or(0)
    }

    fn record_handover(&mut self, at: usize, late: u64) {
        let members = self.turns[at].members;
        for &index in members.as_slice() {
            let Some(contender) = self.contenders[index].as_mut() else { continue };
            contender.account.record_start(late);
            let handover = &mut self.gpus[contender.gpu].handover;
            // Rises quickly and falls slowly: turns that are too long cost less than turns that are too short.
            *handover =
                if late > *handover { (*handover + late) / 2 } else { *handover - (*handover - late) / 16 };
            *handover = (*handover).clamp(tuning::MIN_HANDOVER_NS, tuning::MAX_HANDOVER_NS);
        }
    }

    /// Removes a contender from its turn.
    pub(super) fn leave_turns(&mut self, index: usize) {
        for turn in &mut self.turns {
            turn.members.remove(index);
        }
        self.drop_empty_turns();
    }

    /// Removes all contenders on a GPU from their turns.
    pub(super) fn leave_turns_on(&mut self, gpu: usize) {
        for index in 0..self.contenders.len() {
            if self.contender(index).is_some_and(|it| it.gpu == gpu) {
                for turn in self.turns.iter_mut().filter(|turn| turn.covers(gpu)) {
                    turn.members.remove(index);
                }
            }
        }
        for turn in &mut self.turns {
            turn.gpus &= !(1 << gpu);
        }
        self.drop_empty_turns();
    }

    fn drop_empty_turns(&mut self) {
        self.turns.retain(|turn| turn.members.count > 0);
    }

    /// Lists the containers that wait for a turn, best first.
    fn list_candidates(&mut self, now: u64) {
        let mut candidates = std::mem::take(&mut self.candidates);
        candidates.clear();
        for contender in self.contenders.iter().flatten() {
            if !contender.view.waiting
                || !self.gpus[contender.gpu].regime.takes_turns()
                || candidates.iter().any(|it| it.container == contender.container)
            {
                continue;
            }
            candidates.extend(self.candidate(now, contender.container));
        }
        candidates.sort_unstable_by(|one, other| {
            other.goes_before(one).cmp(&one.goes_before(other)).then(one.container.cmp(&other.container))
        });
        self.candidates = candidates;
    }

    /// Returns the turn that a container could have now, apart from GPUs on which it has one.
    fn candidate(&self, now: u64, container: u64) -> Option<Candidate> {
        let mut found: Option<Candidate> = None;
        for (index, contender) in self.contenders.iter().enumerate() {
            let Some(contender) = contender.as_ref().filter(|it| it.container == container) else { continue };
            let takes_turns = self.gpus[contender.gpu].regime.takes_turns();
            let held = self
                .turns
                .iter()
                .any(|turn| turn.members().contains(&index) && turn.stage == TurnStage::Open);
            if !takes_turns || held || !(contender.view.waiting || contender.is_active(now)) {
                continue;
            }
            let account = &contender.account;
            if now < account.skipped_until {
                return None;
            }
            let pace = self.pace(contender.gpu);
            let (class, length, rank) = match account.guaranteed_turn(&pace) {
                Some(length) => (TurnClass::Guaranteed, length, account.lag()),
                None => {
                    let rank = -i64::try_from(account.weighted_lent).unwrap_or(i64::MAX);
                    (TurnClass::Lent, account.lent_turn(&pace)?, rank)
                }
            };
            let late = class == TurnClass::Guaranteed
                && u64::try_from(rank).is_ok_and(|behind| behind >= tuning::OVERDUE_AFTER_NS);
            let overdue = if late { now.saturating_sub(account.last_turn_at) } else { 0 };
            let view = &contender.view;
            let candidate = found.get_or_insert(Candidate {
                container,
                members: Members::default(),
                gpus: 0,
                class,
                length,
                low_latency: view.low_latency,
                overdue,
                priority: view.priority,
                rank,
            });
            if candidate.class != class {
                // Guaranteed on some GPUs only: lent on all.
                candidate.class = TurnClass::Lent;
                candidate.rank = candidate.rank.min(rank);
            } else {
                candidate.rank = candidate.rank.max(rank);
            }
            candidate.members.push(index);
            candidate.gpus |= 1 << contender.gpu;
            candidate.length = candidate.length.min(length);
            candidate.overdue = candidate.overdue.max(overdue);
        }
        found
    }

    /// Ends turns that are used up, unused, or drained.
    pub(super) fn end_turns(&mut self, now: u64) {
        self.list_candidates(now);
        for at in (0..self.turns.len()).rev() {
            let ended = match self.turns[at].stage {
                TurnStage::Open => {
                    self.update_open_turn(now, at);
                    false
                }
                TurnStage::Draining { since } => self.is_drained(now, at, since),
            };
            if ended {
                self.turns.swap_remove(at);
            }
        }
    }

    /// Returns whether another container wants a GPU of the turn now.
    fn rival(&self, at: usize) -> Option<Candidate> {
        let turn = &self.turns[at];
        self.candidates.iter().find(|it| it.container != turn.container && it.gpus & turn.gpus != 0).copied()
    }

    /// Decides about a turn whose launches pass.
    fn update_open_turn(&mut self, now: u64, at: usize) {
        let rival = self.rival(at);
        let own = self.own_extension(now, at);
        let charged_gap = self.charged_gap(at);
        let turn = &mut self.turns[at];
        let Some(rival) = rival else {
            turn.contested_at = None;
            if turn.left() == 0 {
                match own {
                    Some((class, length)) => {
                        turn.class = class;
                        turn.length = turn.used().saturating_add(length);
                    }
                    None => turn.stage = TurnStage::Draining { since: now },
                }
            }
            return;
        };
        let contested_at = *turn.contested_at.get_or_insert(now);
        let guaranteed_rival = rival.class == TurnClass::Guaranteed;
        let used = turn.used();
        let short = guaranteed_rival && rival.low_latency && used >= tuning::MAX_TURN_BESIDE_LOW_LATENCY_NS;
        let returns = guaranteed_rival && turn.class == TurnClass::Lent;
        if turn.begun {
            if let Some(idle_since) = turn.idle_since {
                // It leaves the GPU idle although others wait: the turn passes on, and it keeps its credit. A launch may be
                // on its way, so that the GPU is looked at again.
                if now.saturating_sub(idle_since.max(contested_at)) >= charged_gap {
                    turn.stage = TurnStage::Draining { since: now };
                    return;
                }
            }
        } else {
            let waited = now.saturating_sub(turn.opened_at.max(contested_at));
            // A lent turn that is taken back early must not be offered to the same container at once again.
            let is_late = returns && waited >= tuning::WAKE_ALLOWANCE_NS / 2;
            if is_late || waited >= self.wake_allowance(at) {
                let members = self.turns[at].members;
                for &index in members.as_slice() {
                    if let Some(contender) = self.contender_mut(index) {
                        contender.account.record_missed_turn(now);
                    }
                }
                self.turns[at].stage = TurnStage::Draining { since: now };
                return;
            }
        }
        let turn = &mut self.turns[at];
        if turn.left() == 0 || short || returns {
            let own_goes_first =
                own.is_some_and(|(class, _)| class == TurnClass::Guaranteed && !guaranteed_rival && !short);
            match own.filter(|_| own_goes_first) {
                Some((class, length)) => {
                    turn.class = class;
                    turn.length = used.saturating_add(length);
                }
                None => turn.stage = TurnStage::Draining { since: now },
            }
        }
    }

    fn wake_allowance(&self, at: usize) -> u64 {
        let members = self.turns[at].members().iter().filter_map(|&index| self.contender(index));
        members.map(|it| it.account.wake_allowance).max().unwrap_or(0)
    }

    /// Returns by how much the container's credit allows the turn to be prolonged.
    fn own_extension(&self, now: u64, at: usize) -> Option<(TurnClass, u64)> {
        let mut extension: Option<(TurnClass, u64)> = None;
        for &index in self.turns[at].members() {
            let contender = self.contender(index)?;
            let (account, pace) = (&contender.account, self.pace(contender.gpu));
            if now < account.skipped_until {
                return None;
            }
            let (class, length) = match account.guaranteed_turn(&pace) {
                Some(length) => (TurnClass::Guaranteed, length),
                None => (TurnClass::Lent, account.lent_turn(&pace)?),
            };
            extension = Some(match extension {
                Some((TurnClass::Guaranteed, other)) => (class, length.min(other)),
                Some((TurnClass::Lent, other)) => (TurnClass::Lent, length.min(other)),
                None => (class, length),
            });
        }
        extension
    }

    /// Returns whether the queued work of a turn has run, or has been waited for long enough.
    fn is_drained(&mut self, now: u64, at: usize, since: u64) -> bool {
        let members = self.turns[at].members;
        let on = || members.as_slice().iter().filter_map(|&index| self.contender(index));
        if !on().any(|it| it.view.occupied) {
            return true;
        }
        let over = now.saturating_sub(since) >= tuning::MAX_OVERRUN_NS;
        let stalled = self.stalled_for(self.turns[at].container).unwrap_or(0);
        let turn = &mut self.turns[at];
        turn.lets_peers_pass |= members.count > 1 && stalled >= tuning::PEER_STALLED_AFTER_NS;
        if over {
            for &index in members.as_slice() {
                if let Some(contender) = self.contender_mut(index) {
                    contender.overrun_since = since;
                }
            }
        }
        over
    }

    /// Returns whether a new turn may begin on a GPU: no other turn covers it, and nothing runs that is still waited
    /// for.
    fn is_free(&self, now: u64, gpu: usize, container: u64) -> bool {
        let runs = |it: &super::Contender| {
            it.gpu == gpu
                && it.container != container
                && it.view.occupied
                && now.saturating_sub(it.overrun_since) < tuning::MAX_OVERRUN_NS
        };
        !self.turns.iter().any(|turn| turn.covers(gpu)) && !self.contenders.iter().flatten().any(runs)
    }

    /// Starts turns on free GPUs.
    pub(super) fn start_turns(&mut self, now: u64) {
        if self.candidates.is_empty() {
            return;
        }
        self.list_candidates(now);
        // Until when a reserved GPU may be given to others; zero if it is not reserved.
        let mut reserved = [0_u64; MAX_GPUS];
        for at in 0..self.candidates.len() {
            let candidate = self.candidates[at];
            let gpus = (0..MAX_GPUS).filter(|gpu| candidate.gpus >> gpu & 1 == 1);
            let until = gpus.clone().map(|gpu| reserved[gpu]).filter(|&until| until > 0).min();
            let mut free = true;
            let mut free_at = now;
            for gpu in gpus.clone() {
                if !self.is_free(now, gpu, candidate.container) {
                    free = false;
                    let turns = self.turns.iter().filter(|turn| turn.covers(gpu));
                    free_at = free_at.max(now + turns.map(Turn::left).max().unwrap_or(0));
                }
            }
            match until {
                None if free => self.open_turn(now, candidate, None),
                Some(until) if free && until.saturating_sub(now) >= MIN_FILLER_TURN_NS => {
                    self.open_turn(now, candidate, Some(until - now));
                }
                _ => {
                    for gpu in gpus {
                        let until = free_at.max(now + 1);
                        reserved[gpu] = if reserved[gpu] == 0 { until } else { reserved[gpu].min(until) };
                    }
                }
            }
        }
    }

    fn open_turn(&mut self, now: u64, candidate: Candidate, most: Option<u64>) {
        let length = most.map_or(candidate.length, |most| candidate.length.min(most));
        let contested = self
            .candidates
            .iter()
            .any(|other| other.container != candidate.container && other.gpus & candidate.gpus != 0);
        let joined = self
            .turns
            .iter_mut()
            .find(|turn| turn.container == candidate.container && turn.stage == TurnStage::Open);
        if let Some(turn) = joined {
            // It began on some of its GPUs: the others join.
            for &index in candidate.members.as_slice() {
                turn.members.push(index);
            }
            turn.gpus |= candidate.gpus;
        } else {
            self.turns.push(Turn {
                container: candidate.container,
                members: candidate.members,
                gpus: candidate.gpus,
                class: candidate.class,
                stage: TurnStage::Open,
                opened_at: now,
                begun: false,
                length,
                used: [0; MAX_GPUS],
                idle_since: None,
                gap: 0,
                contested_at: contested.then_some(now),
                lets_peers_pass: false,
            });
        }
        for &index in candidate.members.as_slice() {
            if let Some(contender) = self.contender_mut(index) {
                contender.overrun_since = 0;
                // A turn that directly follows one of the same container changes no gate, and is a new run all the same.
                contender.account.begin_run();
            }
        }
    }

    /// Returns when to decide again because of a turn.
    pub(super) fn next_turn_event(&self, now: u64) -> u64 {
        let mut next = u64::MAX;
        for turn in &self.turns {
            let after = match turn.stage {
                TurnStage::Draining { .. } => tuning::HANDOVER_POLL_INTERVAL_NS,
                TurnStage::Open if turn.contested_at.is_none() => turn.left(),
                TurnStage::Open if turn.begun && turn.idle_since.is_none() => {
                    turn.left().min(tuning::CONTESTED_POLL_INTERVAL_NS)
                }
                TurnStage::Open => tuning::HANDOVER_POLL_INTERVAL_NS,
            };
            next = next.min(now.saturating_add(after));
        }
        let waits = |gpu: usize| self.candidates.iter().any(|it| it.gpus >> gpu & 1 == 1);
        let blocked = self.contenders.iter().flatten().any(|it| {
            it.view.occupied
                && self.gpus[it.gpu].regime.takes_turns()
                && waits(it.gpu)
                && !self.turns.iter().any(|turn| turn.covers(it.gpu))
        });
        if blocked { next.min(now.saturating_add(tuning::HANDOVER_POLL_INTERVAL_NS)) } else { next }
    }
}
