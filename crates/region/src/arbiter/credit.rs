//! Credit: time that was accrued and not yet used, in nanoseconds with a resolution of a hundred-thousandth.

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

    /// Spends an amount. The balance falls to no less than a debt of `max_debt`.
    pub(super) fn spend(&mut self, nanos: u64, max_debt: u64) {
        let floor = to_fractions(max_debt).saturating_neg();
        let left = self.fractions.saturating_sub(to_fractions(nanos));
        self.fractions = left.max(floor.min(self.fractions));
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

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn debt_ends_at_its_bound_and_a_lower_bound_forgives_nothing() {
        let mut credit = TimeCredit::from_nanos(10);
        credit.spend(100, 50);
        assert_eq!(credit.nanos(), -50);
        credit.spend(100, 200);
        assert_eq!(credit.nanos(), -150);
        credit.spend(10, 50);
        assert_eq!(credit.nanos(), -150);
        credit.accrue(1_000, WHOLE_GPU / 2, 20);
        assert_eq!(credit.nanos(), 20);
    }
}
