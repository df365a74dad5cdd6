//! When which Lease is renewed: each once per round, evenly over the round.

use std::ops::Range;
use std::time::Duration;

/// What a kubelet does.
const FASTEST: Duration = Duration::from_secs(10);
/// kube-controller-manager gives up on a node after 50 s: this leaves 20 s for a slow machine.
const SLOWEST: Duration = Duration::from_secs(30);
/// Renewals a second that a small machine bears beside the work under test.
const BEARABLE: u64 = 150;

/// Which renewals are due as time passes.
pub(super) struct Beats {
    nodes: u64,
    round: Duration,
    /// Renewals handed out or passed over so far, over all rounds.
    done: u64,
}

impl Beats {
    pub(super) fn new(nodes: usize) -> Beats {
        let nodes = nodes as u64;
        let round = Duration::from_millis(nodes * 1000 / BEARABLE).clamp(FASTEST, SLOWEST);
        Beats { nodes, round, done: 0 }
    }

    /// The nodes due now that were not due when last asked.
    ///
    /// After a standstill longer than a round each node is due once, not once per round missed.
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

    const TICK: Duration = Duration::from_millis(50);

    #[test]
    fn a_round_grows_with_the_fleet_and_stays_below_the_grace_period() {
        for (nodes, seconds) in [(0, 10), (1, 10), (1500, 10), (3000, 20), (5000, 30), (20_000, 30)] {
            assert_eq!(Beats::new(nodes).round, Duration::from_secs(seconds), "{nodes} nodes");
        }
    }

    #[test]
    fn five_thousand_nodes_cost_under_two_hundred_writes_a_second() {
        let mut beats = Beats::new(5000);
        let (mut most, mut all) = (0, 0);
        for tick in 1..=20 * 60 {
            let due = beats.due(TICK * tick).count();
            (most, all) = (most.max(due), all + due);
        }
        assert_eq!(all, 10_000, "two rounds in a minute");
        assert!(most <= 9, "evenly: {most} in one tick of 50 ms");
    }

    #[test]
    fn each_node_has_its_turn_once_per_round_whatever_the_ticks() {
        let mut beats = Beats::new(7);
        let mut turns = BTreeMap::new();
        let mut elapsed = Duration::ZERO;
        for step in [1, 3, 900, 50, 1203, 2843, 17, 4983, 10_000] {
            elapsed += Duration::from_millis(step);
            for node in beats.due(elapsed) {
                *turns.entry(node).or_insert(0) += 1;
            }
        }
        assert_eq!(elapsed, Duration::from_secs(20), "two rounds");
        assert_eq!(turns, (0..7).map(|node| (node, 2)).collect());
    }

    #[test]
    fn after_a_standstill_each_node_is_due_once() {
        let mut beats = Beats::new(100);
        assert_eq!(beats.due(Duration::from_secs(95)).count(), 100);
        assert_eq!(beats.due(Duration::from_secs(95)).count(), 0);
        assert_eq!(beats.due(Duration::from_secs(105)).count(), 100);
    }

    #[test]
    fn no_nodes_no_beats() {
        assert_eq!(Beats::new(0).due(Duration::from_secs(1000)).count(), 0);
    }
}
