//! Backs off while a GPU flaps, so that the agent does not rebuild its state for every change of the node's GPUs.

use std::time::{Duration, Instant};

/// The time without a change after which the next one is acted upon at once.
const CALM_PERIOD: Duration = Duration::from_secs(300);
const MIN_BACKOFF: Duration = Duration::from_secs(1);
const MAX_BACKOFF: Duration = Duration::from_secs(60);

/// Doubles the time for which a further change is ignored: a card that comes and goes must not keep the agent rebuilding.
#[derive(Default)]
pub(super) struct ChangeBackoff {
    last: Option<Instant>,
    backoff: Duration,
}

impl ChangeBackoff {
    /// Records a change now. Returns for how long the next one is ignored.
    pub(super) fn next(&mut self, now: Instant) -> Duration {
        let calm = self.last.is_none_or(|last| now.duration_since(last) >= CALM_PERIOD);
        self.last = Some(now);
        self.backoff = if calm { Duration::ZERO } else { (self.backoff * 2).clamp(MIN_BACKOFF, MAX_BACKOFF) };
        self.backoff
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn backoff_doubles_and_resets_after_calm_period() {
        let (mut backoff, start) = (ChangeBackoff::default(), Instant::now());
        let mut at = |seconds| backoff.next(start + Duration::from_secs(seconds)).as_secs();
        assert_eq!([0, 10, 20, 30, 40, 50, 60, 70, 80].map(&mut at), [0, 1, 2, 4, 8, 16, 32, 60, 60]);
        assert_eq!([379, 700, 701].map(&mut at), [60, 0, 1], "the calm period starts with the last change");
    }
}
