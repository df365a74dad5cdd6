//! How long to wait before the next try.

use partage_core::model::NodeName;
use std::hash::{DefaultHasher, Hash, Hasher};
use std::time::Duration;

const FIRST: Duration = Duration::from_millis(400);
const LONGEST: Duration = Duration::from_secs(10);

/// Ever longer pauses, up to ten seconds. They differ from node to node, so that an API server that comes back is not
/// asked by all nodes in the same moment.
#[derive(Clone, Debug)]
pub struct Pauses {
    first: Duration,
    next: Duration,
}

impl Pauses {
    /// The pauses of a node.
    pub fn of(node: &NodeName) -> Pauses {
        let mut hasher = DefaultHasher::new();
        node.hash(&mut hasher);
        let first = FIRST + FIRST * (hasher.finish() % 1000) as u32 / 1000;
        Pauses { first, next: first }
    }

    /// The next pause: longer than the one before.
    pub fn longer(&mut self) -> Duration {
        let pause = self.next;
        self.next = (pause * 2).min(LONGEST);
        pause
    }

    /// It worked: the next pause is a short one again.
    pub fn reset(&mut self) {
        self.next = self.first;
    }
}

impl Iterator for Pauses {
    type Item = Duration;

    fn next(&mut self) -> Option<Duration> {
        Some(self.longer())
    }
}

impl kube::runtime::utils::Backoff for Pauses {
    fn reset(&mut self) {
        Pauses::reset(self);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn pauses_grow_to_a_bound_and_begin_again() {
        let mut pauses = Pauses::of(&"node1".into());
        let first = pauses.longer();
        assert!(first >= FIRST && first < FIRST * 2);
        assert_eq!(pauses.longer(), first * 2);
        assert_eq!(pauses.clone().nth(20), Some(LONGEST));
        pauses.reset();
        assert_eq!(pauses.longer(), first);
        assert_ne!(Pauses::of(&"node2".into()).longer(), first);
    }
}
