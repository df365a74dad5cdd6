//! Retries what the agent needs before it can run, and logs each cause of failure once.

use partage_enforce::error_chain::describe;
use std::error::Error;
use std::time::Duration;
use tokio_util::sync::CancellationToken;

/// Interval between two attempts.
const RETRY_INTERVAL: Duration = Duration::from_secs(5);

/// Repeats `attempt` until it succeeds. Returns `None` if the agent is stopped before. `dependency` names in the log
/// what the agent waits for.
pub(crate) async fn retry_until_stopped<T, E: Error, F: Future<Output = Result<T, E>>>(
    stop: &CancellationToken,
    dependency: &'static str,
    mut attempt: impl FnMut() -> F,
) -> Option<T> {
    let mut log = RetryLog::new(dependency);
    loop {
        match attempt().await {
            Ok(done) => return Some(done),
            Err(error) => log.report(&describe(&error)),
        };
        if !log.wait(stop).await {
            return None;
        }
    }
}

/// The causes for which the agent waits: each is logged once until another one follows.
pub(crate) struct RetryLog {
    dependency: &'static str,
    last_cause: String,
}

impl RetryLog {
    /// Creates a log without a cause yet. `dependency` names what the agent waits for.
    pub(crate) fn new(dependency: &'static str) -> RetryLog {
        RetryLog { dependency, last_cause: String::new() }
    }

    /// Logs why an attempt failed, unless the last one failed for the same cause. Returns whether it was logged.
    pub(crate) fn report(&mut self, cause: &str) -> bool {
        let is_new = self.last_cause != cause;
        if is_new {
            tracing::warn!(cause, dependency = self.dependency, "dependency unavailable, retrying");
            self.last_cause = cause.into();
        }
        is_new
    }

    /// Waits until the next attempt is due. Returns false if the agent is stopped before.
    pub(crate) async fn wait(&self, stop: &CancellationToken) -> bool {
        stop.run_until_cancelled(tokio::time::sleep(RETRY_INTERVAL)).await.is_some()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn cause_is_logged_once_until_it_changes() {
        let mut log = RetryLog::new("the driver");
        assert!(log.report("no driver") && !log.report("no driver"));
        assert!(log.report("no GPU") && log.report("no driver"));
    }

    #[tokio::test(start_paused = true)]
    async fn failing_attempt_is_repeated_until_it_succeeds_or_the_agent_stops() {
        let stop = CancellationToken::new();
        let mut attempts = 0;
        let done = retry_until_stopped(&stop, "the node", || {
            attempts += 1;
            let result = if attempts < 3 { Err(std::io::Error::other("busy")) } else { Ok(attempts) };
            async { result }
        });
        assert_eq!(done.await, Some(3));
        stop.cancel();
        let never = retry_until_stopped(&stop, "the node", || async { Err::<(), _>(std::fmt::Error) });
        assert_eq!(never.await, None);
    }
}
