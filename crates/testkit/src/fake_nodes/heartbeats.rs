//! Schedules Lease renewals: each Lease once per round, evenly distributed over the round.

use std::ops::Range;
use std::time::Duration;

/// The shortest round: the renewal interval of a kubelet.
const MIN_ROUND: Duration = Duration::from_secs(10);
/// The longest round. kube-controller-manager marks a node NotReady after 50 s: this leaves 20 s for a slow machine.
const MAX_ROUND: Duration = Duration::from_secs(30);
/// Renewals per second that a small machine sustains beside the work under test.
const MAX_RENEWALS_PER_SECOND: u64 = 150;

/// Computes which renewals are due as time passes.
pub(super) struct HeartbeatSchedule {
    nodes: u64,
    round: Duration,
    /// Renewals returned or skipped so far, over all rounds.
    done: u64,
}

impl HeartbeatSchedule {
    pub(super) fn new(nodes: usize) -> HeartbeatSchedule {
        let nodes = nodes as u64;
        let round = Duration::from_millis(nodes * 1000 / MAX_RENEWALS_PER_SECOND).clamp(MIN_ROUND, MAX_ROUND);
        HeartbeatSchedule { nodes, round, done: 0 }
    }

    /// Returns the nodes that became due since the last call.
    ///
    /// After a stall longer than a round each node is due once, not once per missed round.
    pub(super) fn due(&mut self, elapsed: Duration) -> impl Iterator<Item = usize> + use<> {
        let nodes = self.nodes;
        self.due_range(elapsed).map(move |beat| (beat % nodes) as usize)
    }

    fn due_range(&mut self, elapsed: Duration) -> Range<u64> {
        let due = elapsed.as_micros() * u128::from(self.nodes) / self.round.as_micros();
        let due = u64::try_from(due).unwrap_or(u64::MAX);
        let from = self.done.max(due.saturating_sub(self.nodes));
        self.done = due.max(self.done);
        from..self.done
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::collections::BTreeMap;

    const TICK_INTERVAL: Duration = Duration::from_millis(50);

    #[test]
    fn round_grows_with_the_node_count_and_stays_below_the_grace_period() {
        for (nodes, seconds) in [(0, 10), (1, 10), (1500, 10), (3000, 20), (5000, 30), (20_000, 30)] {
            assert_eq!(HeartbeatSchedule::new(nodes).round, Duration::from_secs(seconds), "{nodes} nodes");
        }
    }

    #[test]
    fn five_thousand_nodes_need_under_two_hundred_writes_per_second() {
        let mut schedule = HeartbeatSchedule::new(5000);
        let (mut most, mut all) = (0, 0);
        for tick in 1..=20 * 60 {
            let due = schedule.due(TICK_INTERVAL * tick).count();
            (most, all) = (most.max(due), all + due);
        }
        assert_eq!(all, 10_000, "two rounds in a minute");
        assert!(most <= 9, "not evenly distributed: {most} in one tick of 50 ms");
    }

    #[test]
    fn each_node_is_due_once_per_round_at_any_tick_interval() {
        let mut schedule = HeartbeatSchedule::new(7);
        let mut turns = BTreeMap::new();
        let mut elapsed = Duration::ZERO;
        for step in [1, 3, 900, 50, 1203, 2843, 17, 4983, 10_000] {
            elapsed += Duration::from_millis(step);
            for node in schedule.due(elapsed) {
                *turns.entry(node).or_insert(0) += 1;
            }
        }
        assert_eq!(elapsed, Duration::from_secs(20), "two rounds");
        assert_eq!(turns, (0..7).map(|node| (node, 2)).collect());
    }

    #[test]
    fn each_node_is_due_once_after_a_stall() {
        let mut schedule = HeartbeatSchedule::new(100);
        assert_eq!(schedule.due(Duration::from_secs(95)).count(), 100);
        assert_eq!(schedule.due(Duration::from_secs(95)).count(), 0);
        assert_eq!(schedule.due(Duration::from_secs(105)).count(), 100);
    }

    #[test]
    fn schedule_without_nodes_has_nothing_due() {
        assert_eq!(HeartbeatSchedule::new(0).due(Duration::from_secs(1000)).count(), 0);
    }
}
