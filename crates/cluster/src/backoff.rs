//! Delays between retries, which double up to an upper bound.

use std::hash::{DefaultHasher, Hash, Hasher};
use std::time::Duration;

/// The shortest first delay; an instance's own is up to twice as long.
const MIN_FIRST_DELAY: Duration = Duration::from_millis(400);
/// Upper bound of the delay, however often a request has failed.
const MAX_DELAY: Duration = Duration::from_secs(10);

/// Exponential backoff, up to ten seconds.
///
/// The first delay depends on the instance's name, so that an API server that comes back does not receive the requests
/// of all nodes at the same moment.
///
/// ```
/// use partage_cluster::RetryBackoff;
///
/// let mut backoff = RetryBackoff::for_instance("node-1");
/// let first = backoff.next_delay();
/// assert_eq!(backoff.next_delay(), first * 2);
/// backoff.reset();
/// assert_eq!(backoff.next_delay(), first);
/// ```
#[derive(Clone, Debug)]
pub struct RetryBackoff {
    first: Duration,
    next: Duration,
}

impl RetryBackoff {
    /// Returns the delays of the instance with this name: a node's or a pod's.
    pub fn for_instance(name: &str) -> RetryBackoff {
        let first = MIN_FIRST_DELAY + MIN_FIRST_DELAY.mul_f64(spread(name));
        RetryBackoff { first, next: first }
    }

    /// Returns the delay before the next retry, and doubles the one after it.
    pub fn next_delay(&mut self) -> Duration {
        let delay = self.next;
        self.next = (delay * 2).min(MAX_DELAY);
        delay
    }

    /// Starts again with the first delay, after a success.
    pub fn reset(&mut self) {
        self.next = self.first;
    }
}

/// Returns a fraction between 0 and 1 that differs from name to name and is the same for one name.
pub(crate) fn spread(name: &str) -> f64 {
    let mut hasher = DefaultHasher::new();
    name.hash(&mut hasher);
    (hasher.finish() % 1000) as f64 / 1000.0
}

impl Iterator for RetryBackoff {
    type Item = Duration;

    fn next(&mut self) -> Option<Duration> {
        Some(self.next_delay())
    }
}

impl kube::runtime::utils::Backoff for RetryBackoff {
    fn reset(&mut self) {
        RetryBackoff::reset(self);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn delays_double_up_to_the_maximum_and_restart_after_a_success() {
        let mut backoff = RetryBackoff::for_instance("node1");
        let first = backoff.next_delay();
        assert!(first >= MIN_FIRST_DELAY && first < MIN_FIRST_DELAY * 2);
        assert_eq!(backoff.next_delay(), first * 2);
        assert_eq!(backoff.clone().nth(20), Some(MAX_DELAY));
        backoff.reset();
        assert_eq!(backoff.next_delay(), first);
        assert_ne!(RetryBackoff::for_instance("node2").next_delay(), first);
    }
}
