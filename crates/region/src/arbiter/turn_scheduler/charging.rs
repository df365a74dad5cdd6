//! Charges the time since the last decision.
//!
//! Occupancy is known at the two decisions; in between, a change is assumed to have happened in the middle. Over many
//! samples at irregular times that is exact. Where the work of several containers overlaps, the time is divided between
//! them, so the charges never exceed the time that has passed.

use super::super::account::TurnClass;
use super::super::tuning;
use super::TurnScheduler;
use super::turns::Members;

/// Above this interval a container was not polled because it was idle, and the time at which it began is known.
const UNWATCHED_NS: u64 = 3 * tuning::SAMPLE_INTERVAL_NS;

/// Returns how long something was true within an interval, given whether it was at the interval's begin and end, and
/// since when if that is known.
fn true_for(before: bool, after: bool, last: u64, now: u64, since: u64) -> u64 {
    let passed = now - last;
    match (before, after) {
        (true, true) => passed,
        (false, false) => 0,
        (false, true) if passed > UNWATCHED_NS && since > 0 => now - since.clamp(last, now),
        (false, true) | (true, false) => passed / 2,
    }
}

impl TurnScheduler {
    pub(super) fn charge(&mut self, last: u64, now: u64) {
        if now == last {
            return;
        }
        for gpu in self.used_gpus() {
            self.charge_gpu(gpu, last, now);
        }
        for at in 0..self.turns.len() {
            self.finish_turn_interval(at, last, now);
        }
    }

    fn charge_gpu(&mut self, gpu: usize, last: u64, now: u64) {
        if !self.gpus[gpu].regime.takes_turns() {
            self.charge_together(gpu, None, last, now);
            return;
        }
        let turn = self.turns.iter().position(|turn| turn.covers(gpu));
        let mut left = now - last;
        left -= self.charge_together(gpu, turn, last, now);
        let Some(at) = turn else { return };
        let (before, after, since) = self.turn_occupancy(at);
        // Time that is charged to work that overran is part of the turn all the same: otherwise the turn would not end.
        let occupied = true_for(before, after, last, now, since);
        let busy = occupied.min(left);
        let charged_gap = self.charged_gap(at);
        let turn = &self.turns[at];
        // A gap that no other container could have used, because handing over takes as long.
        let mut gap = 0;
        if turn.has_begun() {
            gap = (left - busy).min(charged_gap.saturating_sub(turn.gap()));
            self.gpus[gpu].regime.add_idle_in_turn(left - busy);
        }
        self.gpus[gpu].regime.add_busy(busy);
        let class = turn.class();
        let member = turn
            .members()
            .iter()
            .copied()
            .find(|&index| self.contender(index).is_some_and(|it| it.gpu == gpu));
        if let Some(contender) = member.and_then(|index| self.contender_mut(index)) {
            contender.account.charge(busy + gap, class);
            contender.charge(busy + gap);
            let weighted = contender.account.weighted_lent;
            if class == TurnClass::Lent {
                self.gpus[gpu].weighted_lent = self.gpus[gpu].weighted_lent.max(weighted);
            }
        }
        self.turns[at].use_time(gpu, occupied.saturating_add(gap));
    }

    /// Charges all containers that are not in a turn for the time in which any of them occupied the GPU, in proportion.
    /// Returns that time. In turns, that is work that overran: its time counts as guaranteed.
    fn charge_together(&mut self, gpu: usize, turn: Option<usize>, last: u64, now: u64) -> u64 {
        let overran = self.gpus[gpu].regime.takes_turns();
        let members = turn.map_or(Members::default(), |at| self.turns[at].member_list());
        let (mut before, mut after, mut since, mut sum) = (false, false, u64::MAX, 0_u64);
        for (index, contender) in self.contenders.iter().enumerate() {
            let Some(contender) = contender.as_ref().filter(|it| it.gpu == gpu && !members.contains(index))
            else {
                continue;
            };
            let view = &contender.view;
            before |= contender.was_occupied;
            after |= view.occupied;
            if view.occupied && view.since > 0 {
                since = since.min(view.since);
            }
            let time = true_for(contender.was_occupied, view.occupied, last, now, view.since);
            sum = sum.saturating_add(time);
        }
        if sum == 0 {
            return 0;
        }
        let since = if since == u64::MAX { 0 } else { since };
        let union = true_for(before, after, last, now, since);
        self.gpus[gpu].regime.add_busy(union);
        for (index, contender) in self.contenders.iter_mut().enumerate() {
            let Some(contender) = contender.as_mut().filter(|it| it.gpu == gpu && !members.contains(index))
            else {
                continue;
            };
            let view = &contender.view;
            let time = true_for(contender.was_occupied, view.occupied, last, now, view.since);
            // The daemon may have been stopped for long, so the product may not fit. The result is at most `time`.
            let part = u128::from(time) * u128::from(union) / u128::from(sum);
            let time = if sum > union { part as u64 } else { time };
            if overran {
                contender.account.charge(time, TurnClass::Guaranteed);
            } else {
                contender.account.charge_unscheduled(time);
            }
            contender.charge(time);
        }
        union.min(sum)
    }

    /// Returns whether any GPU of a turn was occupied by its container at the previous decision and is now, and since
    /// when.
    pub(super) fn turn_occupancy(&self, at: usize) -> (bool, bool, u64) {
        let (mut before, mut after, mut since) = (false, false, u64::MAX);
        for &index in self.turns[at].members() {
            let Some(contender) = self.contender(index) else { continue };
            before |= contender.was_occupied;
            after |= contender.view.occupied;
            if contender.view.occupied && contender.view.since > 0 {
                since = since.min(contender.view.since);
            }
        }
        (before, after, if since == u64::MAX { 0 } else { since })
    }
}
