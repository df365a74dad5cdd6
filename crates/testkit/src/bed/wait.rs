//! Polls until a condition holds.

use super::BedError;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

/// Interval between two polls.
const POLL_INTERVAL: Duration = Duration::from_millis(15);

/// Polls until there is a value. An error or `stop` ends the wait.
pub(super) fn poll_until<T>(
    what: &str,
    timeout: Duration,
    stop: &AtomicBool,
    mut poll: impl FnMut() -> Result<Option<T>, BedError>,
) -> Result<T, BedError> {
    poll_until_ok(what, timeout, stop, || Ok(poll()?.ok_or_else(|| "not ready".to_string())))
}

/// Polls until the result is `Ok`. `Err` of the inner result describes the state, which a timeout reports.
pub(super) fn poll_until_ok<T>(
    what: &str,
    timeout: Duration,
    stop: &AtomicBool,
    mut poll: impl FnMut() -> Result<Result<T, String>, BedError>,
) -> Result<T, BedError> {
    let start = Instant::now();
    loop {
        let last = match poll()? {
            Ok(found) => return Ok(found),
            Err(last) => last,
        };
        if stop.load(Ordering::Relaxed) {
            return Err(BedError::Interrupted);
        }
        if start.elapsed() > timeout {
            return Err(BedError::TooLate { what: what.to_string(), seconds: timeout.as_secs(), last });
        }
        std::thread::sleep(POLL_INTERVAL);
    }
}
