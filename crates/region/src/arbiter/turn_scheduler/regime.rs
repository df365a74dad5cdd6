//! Whether containers take turns on a GPU.
//!
//! Turns are exclusive, so they waste the gaps between kernels that are too short to hand over. While the GPU is not
//! saturated the driver interleaves the containers, and none of them is slowed. Turns begin when it saturates, and end
//! when the containers leave much of their turns unused.

use super::super::tuning;
use super::TurnScheduler;

/// State of one GPU.
#[derive(Clone, Copy, Debug)]
pub(super) struct RegimeState {
    takes_turns: bool,
    window_start: u64,
    /// Nanoseconds of the window in which the GPU was occupied.
    busy: u64,
    /// Nanoseconds of the window in which the holder of a turn left the GPU idle.
    idle_in_turn: u64,
    /// Whether two containers were active in the window.
    is_shared: bool,
    /// When turns last began and ended.
    changed_at: u64,
    /// How long turns continue at least.
    backoff: u64,
}

impl Default for RegimeState {
    fn default() -> Self {
        Self {
            takes_turns: false,
            window_start: 0,
            busy: 0,
            idle_in_turn: 0,
            is_shared: false,
            changed_at: 0,
            backoff: tuning::TURNS_WINDOW_NS,
        }
    }
}

impl RegimeState {
    pub(super) fn takes_turns(&self) -> bool {
        self.takes_turns
    }

    pub(super) fn add_busy(&mut self, nanos: u64) {
        self.busy = self.busy.saturating_add(nanos);
    }

    pub(super) fn add_idle_in_turn(&mut self, nanos: u64) {
        self.idle_in_turn = self.idle_in_turn.saturating_add(nanos);
    }

    /// Decides at the end of a window. Returns whether containers should take turns.
    fn update(&mut self, last: u64, now: u64, active: usize) -> bool {
        self.is_shared |= active > 1;
        if self.window_start == 0 || self.window_start > now || now - last > tuning::SATURATION_WINDOW_NS {
            // Nothing was polled meanwhile.
            self.end_window(now);
            return self.takes_turns;
        }
        let passed = now - self.window_start;
        if !self.takes_turns {
            if passed < tuning::SATURATION_WINDOW_NS {
                return false;
            }
            let saturated = self.busy.saturating_mul(100) >= passed.saturating_mul(tuning::SATURATED_PERCENT);
            let begins = saturated && self.is_shared;
            self.end_window(now);
            return begins;
        }
        if passed < tuning::TURNS_WINDOW_NS {
            return true;
        }
        let unused =
            self.idle_in_turn.saturating_mul(100) >= passed.saturating_mul(100 - tuning::SATURATED_PERCENT);
        let due = now.saturating_sub(self.changed_at) >= self.backoff;
        let ends = !self.is_shared || (unused && due);
        self.end_window(now);
        !ends
    }

    fn end_window(&mut self, now: u64) {
        (self.window_start, self.busy, self.idle_in_turn, self.is_shared) = (now, 0, 0, false);
    }

    /// Changes the regime.
    fn change(&mut self, now: u64, takes_turns: bool) {
        if takes_turns {
            // An attempt to do without turns that failed at once is repeated more rarely.
            let failed = now.saturating_sub(self.changed_at) <= 2 * tuning::TURNS_WINDOW_NS;
            self.backoff = if failed {
                self.backoff.saturating_mul(2).min(tuning::MAX_TURNS_BACKOFF_NS)
            } else {
                tuning::TURNS_WINDOW_NS
            };
        }
        self.takes_turns = takes_turns;
        self.changed_at = now;
        self.end_window(now);
    }
}

impl TurnScheduler {
    /// Decides on which GPUs containers take turns. A container with several GPUs takes turns on all of them or on none:
    /// otherwise one of its GPUs would wait for a turn while another waits for that GPU.
    pub(super) fn update_regimes(&mut self, last: u64, now: u64) {
        let mut turns = 0_u32;
        for gpu in self.used_gpus() {
            let on_it = self.contenders.iter().flatten().filter(|it| it.gpu == gpu);
            let active = on_it.filter(|it| it.is_active(now)).count();
            turns |= u32::from(self.gpus[gpu].regime.update(last, now, active)) << gpu;
        }
        turns = self.extend_to_linked_gpus(now, turns);
        for gpu in self.used_gpus() {
            let takes_turns = turns >> gpu & 1 == 1;
            if takes_turns == self.gpus[gpu].regime.takes_turns() {
                continue;
            }
            self.gpus[gpu].regime.change(now, takes_turns);
            if takes_turns {
                // Work that is queued now was allowed to be, and is waited for like the rest of a turn.
                for contender in self.contenders.iter_mut().flatten().filter(|it| it.gpu == gpu) {
                    contender.overrun_since = if contender.view.occupied { now } else { 0 };
                }
            } else {
                self.leave_turns_on(gpu);
            }
        }
    }

    /// Adds the GPUs that active containers use together with these.
    fn extend_to_linked_gpus(&self, now: u64, mut gpus: u32) -> u32 {
        loop {
            let before = gpus;
            for contender in
                self.contenders.iter().flatten().filter(|it| it.has_siblings && it.is_active(now))
            {
                let own = self
                    .contenders
                    .iter()
                    .flatten()
                    .filter(|it| it.container == contender.container && it.is_active(now));
                let own = own.fold(0, |own, it| own | 1 << it.gpu);
                if own & gpus != 0 {
                    gpus |= own;
                }
            }
            if gpus == before {
                return gpus;
            }
        }
    }
}
