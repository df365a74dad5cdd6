//! Containers that were recently found to bypass their limits, for the metric that reports them.

use crate::containers::ContainerKey;
use std::collections::BTreeMap;
use std::time::{Duration, Instant};

/// How long a container counts as suspected after the last finding. A process that ends at once would otherwise fall between two
/// scrapes, which are usually 30 or 60 seconds apart.
pub(crate) const SUSPICION_HOLD: Duration = Duration::from_secs(300);

/// When the audit last found a bypass in each container.
#[derive(Debug, Default)]
pub(crate) struct SuspectedBypasses(BTreeMap<ContainerKey, Instant>);

impl SuspectedBypasses {
    /// Records the containers with a finding now, and removes those whose last one is long ago.
    pub(crate) fn record<'a>(&mut self, found: impl IntoIterator<Item = &'a ContainerKey>, now: Instant) {
        self.0.extend(found.into_iter().map(|key| (key.clone(), now)));
        self.0.retain(|_, last| now.duration_since(*last) < SUSPICION_HOLD);
    }

    /// Returns whether a container had a finding within [`SUSPICION_HOLD`].
    pub(crate) fn contains(&self, key: &ContainerKey, now: Instant) -> bool {
        self.0.get(key).is_some_and(|last| now.duration_since(*last) < SUSPICION_HOLD)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn suspicion_outlasts_the_finding_by_several_scrapes() {
        let (mut suspected, start) = (SuspectedBypasses::default(), Instant::now());
        let (a, b) = (ContainerKey("a".into()), ContainerKey("b".into()));
        let at = |seconds| start + Duration::from_secs(seconds);
        suspected.record([&a], at(0));
        suspected.record([], at(1));
        assert!(suspected.contains(&a, at(2 * 60)), "two scrapes later");
        assert!(!suspected.contains(&b, at(1)));
        // A finding that comes again holds from then on.
        suspected.record([&a, &b], at(200));
        assert!(suspected.contains(&a, at(499)) && suspected.contains(&b, at(499)));
        assert!(!suspected.contains(&a, at(500)));
        suspected.record([], at(501));
        assert!(suspected.0.is_empty());
    }
}
