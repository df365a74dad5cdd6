//! Derives from samples of a container's markers whether it occupies a GPU.

use super::{MICRO, MILLI};
use crate::markers::ActivitySample;

/// Shortest time for which launches behind the last marker count as running.
const MIN_TAIL_NS: u64 = 50 * MICRO;
/// Longest time for which launches behind the last marker count as running. The shim sets markers about every half
/// millisecond of work.
const MAX_TAIL_NS: u64 = 5 * MILLI;

/// Follows one container on one GPU.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct OccupancyTracker {
    progress: u64,
    /// When the progress last changed.
    changed_at: u64,
}

impl OccupancyTracker {
    /// Returns whether the container occupies the GPU at `now`.
    ///
    /// Work that no marker follows has no certain end. It counts as running for as long as the work between the last
    /// two markers took, from the last sign of life on.
    pub(super) fn is_occupied(&mut self, now: u64, sample: &ActivitySample) -> bool {
        if sample.progress != self.progress {
            self.progress = sample.progress;
            self.changed_at = now;
        }
        if sample.occupied {
            return true;
        }
        let tail = match sample.tail_period {
            // Not measured yet: a marker follows the first launches soon.
            0 => MAX_TAIL_NS,
            period => period.clamp(MIN_TAIL_NS, MAX_TAIL_NS),
        };
        // A time in the future is forged.
        let last_sign = self.changed_at.max(sample.since.min(now));
        sample.has_tail && now.saturating_sub(last_sign) < tail
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn tail_counts_for_one_period_after_the_last_progress() {
        let mut tracker = OccupancyTracker::default();
        let mut sample = ActivitySample {
            has_tail: true,
            since: 1_000,
            tail_period: 300 * MICRO,
            ..ActivitySample::default()
        };
        assert!(tracker.is_occupied(1_000 + 100 * MICRO, &sample));
        assert!(!tracker.is_occupied(1_000 + 400 * MICRO, &sample));
        sample.progress = 5;
        assert!(tracker.is_occupied(MILLI, &sample));
        assert!(tracker.is_occupied(MILLI + 299 * MICRO, &sample));
        assert!(!tracker.is_occupied(MILLI + 300 * MICRO, &sample));
        sample.occupied = true;
        assert!(tracker.is_occupied(1_000 * MILLI, &sample));
    }

    #[test]
    fn forged_times_keep_no_tail_running() {
        let mut tracker = OccupancyTracker::default();
        let sample = ActivitySample {
            has_tail: true,
            since: u64::MAX,
            tail_period: u64::MAX,
            ..ActivitySample::default()
        };
        assert!(tracker.is_occupied(MILLI, &sample), "now, at the most");
        let sample = ActivitySample { since: 1, ..sample };
        assert!(!tracker.is_occupied(1_000 * MILLI, &sample));
    }
}
