//! What has been gathered and not yet been used: nanoseconds, exact to the hundred-thousandth.

use super::tuning;
use crate::protocol::WHOLE_GPU;

/// Time that accrues at a rate and is spent at will. Below nothing is debt.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct Credit {
    /// In hundred-thousandths of a nanosecond, so that no share is lost to rounding.
    held: i64,
}

const UNIT: i64 = WHOLE_GPU as i64;

fn scaled(nanos: u64) -> i64 {
    i64::try_from(nanos).unwrap_or(i64::MAX).saturating_mul(UNIT)
}

impl Credit {
    pub(super) fn holding(nanos: u64) -> Self {
        Self { held: scaled(nanos) }
    }

    /// Whole nanoseconds held; debt is negative.
    pub(super) fn nanos(self) -> i64 {
        self.held.div_euclid(UNIT)
    }

    /// Accrues `rate` of `passed`, up to `cap`. What is above the cap already stays and grows no more.
    pub(super) fn grow(&mut self, passed: u64, rate: u32, cap: u64) {
        let gain = i64::try_from(passed).unwrap_or(i64::MAX).saturating_mul(i64::from(rate));
        let cap = scaled(cap);
        if self.held < cap {
            self.held = self.held.saturating_add(gain).min(cap);
        }
    }

    pub(super) fn clip(&mut self, cap: u64) {
        self.held = self.held.min(scaled(cap));
    }

    /// Spends; negative gives back.
    pub(super) fn take(&mut self, nanos: i64) {
        self.held = self.held.saturating_sub(nanos.saturating_mul(UNIT)).max(-scaled(tuning::MAX_DEBT));
    }

    /// How long until `goal` is held, at `rate`; `None` if never.
    pub(super) fn until(self, goal: u64, rate: u32) -> Option<u64> {
        let missing = scaled(goal).saturating_sub(self.held);
        if missing <= 0 {
            return Some(0);
        }
        let missing = u64::try_from(missing).unwrap_or(u64::MAX);
        (rate > 0).then(|| missing.div_ceil(u64::from(rate)))
    }
}
