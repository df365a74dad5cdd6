//! Compares the GPU time that the driver reports with what the daemon charges.
//!
//! The turn scheduler charges a container by the markers that its processes set, and only while its launches look at
//! turns (*gated*): a container that has a GPU to itself is not slowed by markers. What it uses then is known from the
//! driver only, in whole percents and up to a second late.

use partage_region::TurnGate;
use std::collections::{BTreeMap, VecDeque};

/// GPU time of a container on one GPU at a poll.
#[derive(Clone, Copy, Debug)]
pub(super) struct GpuTimeReading {
    /// Whether the container is charged by its markers.
    pub(super) gate: TurnGate,
    /// Nanoseconds of GPU time in total, by its region.
    pub(super) accounted: u64,
    /// Nanoseconds of GPU time since the last poll, by the driver.
    pub(super) worked: u64,
}

/// The result of the comparison at one poll.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) struct GpuTimeRound {
    /// Whether the container was gated since the last poll without interruption, so that it was charged for its work.
    pub(super) was_gated: bool,
    /// Nanoseconds of GPU time in total that the container accounts for, without what it was charged because of
    /// `unaccounted` earlier.
    pub(super) accounted: u64,
    /// Nanoseconds of work that were not charged, because it was not gated.
    pub(super) uncharged: u64,
    /// Nanoseconds of work for which it must be charged, because it was gated and did not account for them.
    pub(super) unaccounted: u64,
}

/// Nanoseconds by which the driver reports work late, at most.
const REPORT_LAG_NS: u64 = 2_000_000_000;
/// Nanoseconds of unaccounted work that are not charged yet.
const TOLERANCE_NS: u64 = 500_000_000;
/// The driver may report more work than is charged, by one part in this many: both are measured by sampling.
const TOLERATED_PART: u64 = 8;

/// The work of a gated container by the driver, compared with what it was charged.
///
/// The driver reports work late, so it may still report what was charged within [`REPORT_LAG_NS`], and nothing that was
/// charged before: a container that is charged for more than it uses gets no credit for later.
#[derive(Clone, Debug)]
struct WorkBalance {
    /// Work minus charges, in nanoseconds.
    nanos: i64,
    /// Nanoseconds until the driver no longer reports work from before the comparison began.
    settles: u64,
    /// The latest polls, newest last: how long each covers, and what was charged.
    recent: VecDeque<(u64, u64)>,
}

impl WorkBalance {
    fn new() -> Self {
        Self { nanos: 0, settles: REPORT_LAG_NS, recent: VecDeque::new() }
    }

    /// Adds the time since the last poll, `passed` nanoseconds ago. Returns the nanoseconds to be charged.
    fn update(&mut self, passed: u64, worked: u64, charged: u64) -> u64 {
        let signed = |nanos: u64| i64::try_from(nanos).unwrap_or(i64::MAX);
        self.recent.push_back((passed, charged));
        let covered =
            |recent: &VecDeque<(u64, u64)>| recent.iter().skip(1).map(|(passed, _)| passed).sum::<u64>();
        while covered(&self.recent) >= REPORT_LAG_NS {
            self.recent.pop_front();
        }
        let reported_later =
            self.recent.iter().map(|(_, charged)| charged).fold(0, |a, b| b.saturating_add(a));
        let least = -signed(reported_later);
        if self.settles > 0 {
            self.settles = self.settles.saturating_sub(passed);
            self.nanos = least;
            return 0;
        }
        let tolerated = charged.saturating_add(charged / TOLERATED_PART);
        let nanos = self.nanos.saturating_add(signed(worked)).saturating_sub(signed(tolerated));
        self.nanos = nanos.max(least);
        match u64::try_from(self.nanos) {
            Ok(unaccounted) if unaccounted > TOLERANCE_NS => {
                self.nanos = 0;
                unaccounted
            }
            _ => 0,
        }
    }
}

/// The state of one container on one GPU at the last poll.
#[derive(Clone, Debug)]
struct TrackedTime {
    gate: TurnGate,
    /// As in [`GpuTimeRound::accounted`].
    accounted: u64,
    /// Nanoseconds that it was charged because of the driver's reports.
    charged_by_driver: u64,
    balance: WorkBalance,
    /// The poll that found it last.
    round: u64,
}

/// Follows all containers from poll to poll.
#[derive(Debug)]
pub(super) struct GpuTimeTracker<K> {
    /// By container, and index of the GPU in its region.
    known: BTreeMap<(K, usize), TrackedTime>,
    last: Option<u64>,
    passed: u64,
    round: u64,
}

impl<K> Default for GpuTimeTracker<K> {
    fn default() -> Self {
        Self { known: BTreeMap::new(), last: None, passed: 0, round: 0 }
    }
}

impl<K: Ord + Clone> GpuTimeTracker<K> {
    /// Begins a poll. Returns the nanoseconds since the last one; zero at the first.
    pub(super) fn begin_round(&mut self, now: u64) -> u64 {
        self.round += 1;
        self.passed = self.last.replace(now).map_or(0, |last| now.saturating_sub(last));
        self.passed
    }

    /// Compares the readings of a container on a GPU with those of the last poll.
    pub(super) fn update(&mut self, key: &K, gpu: usize, reading: GpuTimeReading) -> GpuTimeRound {
        let GpuTimeReading { gate, accounted, worked } = reading;
        let Some(known) = self.known.get_mut(&(key.clone(), gpu)) else {
            // Counting starts with this poll.
            let balance = WorkBalance::new();
            let known = TrackedTime { gate, accounted, charged_by_driver: 0, balance, round: self.round };
            self.known.insert((key.clone(), gpu), known);
            return GpuTimeRound { accounted, ..GpuTimeRound::default() };
        };
        let accounted = accounted.saturating_sub(known.charged_by_driver);
        let charged = accounted.saturating_sub(known.accounted);
        let was_gated = gate.is_gated && gate == known.gate;
        let (mut uncharged, mut unaccounted) = (0, 0);
        if was_gated {
            unaccounted = known.balance.update(self.passed, worked, charged);
        } else {
            uncharged = worked.saturating_sub(charged);
            known.balance = WorkBalance::new();
        }
        // The caller adds the one to the region, and has the other charged.
        let accounted = accounted.saturating_add(uncharged);
        known.charged_by_driver = known.charged_by_driver.saturating_add(unaccounted);
        (known.gate, known.accounted, known.round) = (gate, accounted, self.round);
        GpuTimeRound { was_gated, accounted, uncharged, unaccounted }
    }

    /// Forgets the containers that this poll did not find.
    pub(super) fn end_round(&mut self) {
        let round = self.round;
        self.known.retain(|_, time| time.round == round);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const SECOND: u64 = 1_000_000_000;

    fn gate(is_gated: bool, changes: u32) -> TurnGate {
        TurnGate { is_gated, changes }
    }

    fn poll(tracker: &mut GpuTimeTracker<u32>, gate: TurnGate, accounted: u64, worked: u64) -> GpuTimeRound {
        tracker.begin_round(0);
        let round = tracker.update(&1, 0, GpuTimeReading { gate, accounted, worked });
        tracker.end_round();
        round
    }

    #[test]
    fn work_of_an_ungated_container_is_added_once() {
        let mut tracker = GpuTimeTracker::default();
        let alone = gate(false, 1);
        assert_eq!(
            poll(&mut tracker, alone, 0, SECOND).uncharged,
            0,
            "work before the first poll is unknown"
        );
        let mut total = 0;
        for _ in 0..3 {
            let round = poll(&mut tracker, alone, total, SECOND / 2);
            assert_eq!((round.was_gated, round.uncharged), (false, SECOND / 2));
            total += round.uncharged;
        }
        assert_eq!(total, 3 * SECOND / 2);
        // What the turn scheduler charged is not added again.
        assert_eq!(
            poll(&mut tracker, alone, total + SECOND / 3, SECOND / 2).uncharged,
            SECOND / 2 - SECOND / 3
        );
    }

    #[test]
    fn work_of_a_gated_container_is_not_added() {
        let mut tracker = GpuTimeTracker::default();
        poll(&mut tracker, gate(true, 1), 0, 0);
        let round = poll(&mut tracker, gate(true, 1), 0, SECOND);
        assert_eq!((round.was_gated, round.uncharged), (true, 0));
    }

    #[test]
    fn container_whose_gate_changed_since_the_last_poll_was_not_gated() {
        let mut tracker = GpuTimeTracker::default();
        poll(&mut tracker, gate(true, 1), 0, 0);
        assert!(poll(&mut tracker, gate(true, 1), 0, 0).was_gated);
        assert!(!poll(&mut tracker, gate(false, 2), 0, 0).was_gated);
        assert!(!poll(&mut tracker, gate(true, 3), 0, 0).was_gated);
        assert!(poll(&mut tracker, gate(true, 3), 0, 0).was_gated);
        // It opened and closed between two polls.
        assert!(!poll(&mut tracker, gate(true, 5), 0, 0).was_gated);
    }

    #[test]
    fn container_that_returns_under_the_same_key_starts_again() {
        let mut tracker = GpuTimeTracker::default();
        poll(&mut tracker, gate(true, 1), SECOND, 0);
        tracker.begin_round(0);
        tracker.end_round();
        assert_eq!(poll(&mut tracker, gate(false, 1), 0, SECOND), GpuTimeRound::default());
    }

    /// A tenant whose work the driver reports `lag` seconds late, polled once a second.
    struct TestTenant {
        tracker: GpuTimeTracker<u32>,
        second: u64,
        lag: usize,
        /// Its work in each second so far.
        worked: Vec<u64>,
        /// What the turn scheduler charged in total, by markers and because of the monitor.
        accounted: u64,
        charged_by_driver: u64,
    }

    impl TestTenant {
        fn new(lag: usize) -> Self {
            let tracker = GpuTimeTracker::default();
            Self { tracker, second: 0, lag, worked: Vec::new(), accounted: 0, charged_by_driver: 0 }
        }

        /// One second in which it works for some time, and sets markers for some time.
        fn second(&mut self, worked: u64, marked: u64) -> GpuTimeRound {
            self.worked.push(worked);
            self.accounted += marked;
            let reported = self.worked.len().checked_sub(self.lag + 1).map_or(0, |at| self.worked[at]);
            self.tracker.begin_round(self.second * SECOND);
            let reading = GpuTimeReading { gate: gate(true, 1), accounted: self.accounted, worked: reported };
            let round = self.tracker.update(&1, 0, reading);
            self.tracker.end_round();
            self.second += 1;
            self.accounted += round.unaccounted;
            self.charged_by_driver += round.unaccounted;
            round
        }
    }

    #[test]
    fn tenant_that_forges_idle_markers_gains_nothing_over_ten_seconds() {
        for lag in 0..=1 {
            for percent in [5, 10, 29, 60, 100] {
                let mut tenant = TestTenant::new(lag);
                let worked = percent * SECOND / 100;
                // It was honest before.
                for _ in 0..20 {
                    assert_eq!(tenant.second(worked, worked).unaccounted, 0);
                }
                let before = tenant.accounted;
                for _ in 0..10 {
                    tenant.second(worked, 0);
                }
                // All but what the driver may report late, and the tolerance; once, and not in every ten seconds.
                let charged = tenant.accounted - before;
                let least = (8 * worked).saturating_sub(TOLERANCE_NS);
                assert!(charged >= least, "{percent} %, {lag} s late: {charged} of {least}");
                assert!(charged <= 10 * worked);
                for _ in 0..10 {
                    tenant.second(worked, 0);
                }
                let charged = tenant.accounted - before - charged;
                assert!(charged + TOLERANCE_NS >= 10 * worked, "{percent} %, {lag} s late: {charged} later");
            }
        }
    }

    #[test]
    fn tenant_that_forges_half_of_its_markers_is_charged_nearly_all() {
        let mut tenant = TestTenant::new(1);
        for _ in 0..60 {
            tenant.second(SECOND / 2, SECOND / 4);
        }
        let missing = (60 * SECOND / 2) - tenant.accounted;
        // The tolerated part of what it marked, the settling time, and what is reported late.
        assert!(missing <= 60 * SECOND / 4 / TOLERATED_PART + 3 * SECOND / 2 + TOLERANCE_NS, "{missing}");
    }

    #[test]
    fn honest_tenant_is_never_charged_by_the_driver() {
        // Bursts and pauses of any length, and whole percents.
        for lag in 0..=2 {
            for (busy, idle) in [(1, 0), (1, 1), (1, 9), (5, 1), (7, 3), (30, 30)] {
                for level in [SECOND / 100, SECOND / 3, SECOND] {
                    let mut tenant = TestTenant::new(lag);
                    for second in 0..200 {
                        let worked = if second % (busy + idle) < busy { level } else { 0 };
                        let round = tenant.second(worked, worked);
                        assert_eq!(
                            round.unaccounted, 0,
                            "{busy} s of {level} ns, {idle} s idle, {lag} s late"
                        );
                    }
                }
            }
        }
    }

    #[test]
    fn charges_caused_by_the_monitor_are_not_the_containers_own_account() {
        let mut tenant = TestTenant::new(0);
        let rounds: Vec<GpuTimeRound> = (0..10).map(|_| tenant.second(SECOND, 0)).collect();
        assert!(rounds.iter().all(|round| round.accounted == 0), "the audit still finds it");
        assert_eq!(tenant.charged_by_driver, 7 * SECOND, "after the first poll, and the time to settle");
    }

    #[test]
    fn change_of_the_gate_charges_nothing() {
        let mut tracker = GpuTimeTracker::default();
        let mut accounted = 0;
        for second in 0..100_u64 {
            tracker.begin_round(second * SECOND);
            // Gated for three polls of every five, and charged for half of its work there; the driver is late.
            let changes = u32::try_from(second / 5 * 2 + u64::from(second % 5 >= 3)).unwrap();
            let gate = gate(second % 5 < 3, changes);
            accounted += if gate.is_gated { SECOND / 2 } else { 0 };
            let round = tracker.update(&1, 0, GpuTimeReading { gate, accounted, worked: SECOND });
            accounted += round.uncharged;
            tracker.end_round();
            assert_eq!(round.unaccounted, 0, "second {second}");
        }
    }
}
