//! Credit: time that was accrued and not yet used, in nanoseconds with a resolution of a hundred-thousandth.

use super::tuning;
use crate::protocol::WHOLE_GPU;

/// Time that accrues at a rate and is spent at will. A negative balance is debt.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct TimeCredit {
    /// Balance in hundred-thousandths of a nanosecond, so that no share is lost to rounding.
    fractions: i64,
}

const FRACTIONS_PER_NS: i64 = WHOLE_GPU as i64;

fn to_fractions(nanos: u64) -> i64 {
    i64::try_from(nanos).unwrap_or(i64::MAX).saturating_mul(FRACTIONS_PER_NS)
}

impl TimeCredit {
    pub(super) fn from_nanos(nanos: u64) -> Self {
        Self { fractions: to_fractions(nanos) }
    }

    /// Returns the balance in whole nanoseconds; debt is negative.
    pub(super) fn nanos(self) -> i64 {
        self.fractions.div_euclid(FRACTIONS_PER_NS)
    }

    /// Accrues `rate` of `passed`, up to `cap`. A balance above the cap stays and does not grow.
    pub(super) fn accrue(&mut self, passed: u64, rate: u32, cap: u64) {
        let gain = i64::try_from(passed).unwrap_or(i64::MAX).saturating_mul(i64::from(rate));
        let cap = to_fractions(cap);
        if self.fractions < cap {
            self.fractions = self.fractions.saturating_add(gain).min(cap);
        }
    }

    pub(super) fn limit_to(&mut self, cap: u64) {
        self.fractions = self.fractions.min(to_fractions(cap));
    }

    /// Spends an amount; a negative amount is a refund.
    pub(super) fn spend(&mut self, nanos: i64) {
        self.fractions = self
            .fractions
            .saturating_sub(nanos.saturating_mul(FRACTIONS_PER_NS))
            .max(-to_fractions(tuning::MAX_DEBT_NS));
    }

    /// Returns how long it takes until the balance reaches `goal` at `rate`; `None` if it never does.
    pub(super) fn time_until(self, goal: u64, rate: u32) -> Option<u64> {
        let missing = to_fractions(goal).saturating_sub(self.fractions);
        if missing <= 0 {
            return Some(0);
        }
        let missing = u64::try_from(missing).unwrap_or(u64::MAX);
        (rate > 0).then(|| missing.div_ceil(u64::from(rate)))
    }
}
