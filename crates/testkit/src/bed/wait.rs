//! Waiting for things to come about.

use super::BedError;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

/// Between two looks.
const GLANCE: Duration = Duration::from_millis(15);

/// Looks until there is something. An error ends it, and so does `stop`.
pub(super) fn until<T>(
    what: &str,
    patience: Duration,
    stop: &AtomicBool,
    mut look: impl FnMut() -> Result<Option<T>, BedError>,
) -> Result<T, BedError> {
    until_seen(what, patience, stop, || Ok(look()?.ok_or_else(|| "nothing yet".to_string())))
}

/// The same, where a look that finds nothing says what it saw instead.
pub(super) fn until_seen<T>(
    what: &str,
    patience: Duration,
    stop: &AtomicBool,
    mut look: impl FnMut() -> Result<Result<T, String>, BedError>,
) -> Result<T, BedError> {
    let start = Instant::now();
    loop {
        let last = match look()? {
            Ok(found) => return Ok(found),
            Err(last) => last,
        };
        if stop.load(Ordering::Relaxed) {
            return Err(BedError::Interrupted);
        }
        if start.elapsed() > patience {
            return Err(BedError::TooLate { what: what.to_string(), seconds: patience.as_secs(), last });
        }
        std::thread::sleep(GLANCE);
    }
}
