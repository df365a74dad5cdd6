//! Retries requests to a busy API server.

use super::FakeNodesError;
use std::time::Duration;

const MAX_ATTEMPTS: u32 = 8;
const INITIAL_BACKOFF: Duration = Duration::from_millis(100);

/// Sends a request until it succeeds or fails permanently. Backoff doubles; all attempts take about 13 s.
pub(super) async fn with_retries<T, F>(
    doing: &'static str,
    name: &str,
    mut send: impl FnMut() -> F,
) -> Result<T, FakeNodesError>
where
    F: Future<Output = Result<T, kube::Error>>,
{
    let mut attempts = 0;
    loop {
        attempts += 1;
        match send().await {
            Ok(answer) => return Ok(answer),
            Err(error) if attempts < MAX_ATTEMPTS && is_transient(&error) => {
                tokio::time::sleep(INITIAL_BACKOFF * (1 << (attempts - 1))).await;
            }
            Err(source) => {
                return Err(FakeNodesError::Refused { doing, name: name.into(), source: Box::new(source) });
            }
        }
    }
}

/// Returns whether a retry can help: the server is busy, another client wrote at the same time, or the connection
/// broke.
fn is_transient(error: &kube::Error) -> bool {
    match error {
        kube::Error::Api(status) => {
            status.code == 429 || status.code >= 500 || (status.is_conflict() && !status.is_already_exists())
        }
        kube::Error::Service(_) | kube::Error::HyperError(_) => true,
        _ => false,
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use kube::core::Status;

    fn answer(code: u16, reason: &str) -> kube::Error {
        kube::Error::Api(Box::new(Status::failure("no", reason).with_code(code)))
    }

    #[tokio::test(start_paused = true)]
    async fn transient_errors_are_retried() {
        for (code, reason) in [(429, "TooManyRequests"), (503, "ServiceUnavailable"), (409, "Conflict")] {
            let mut asked = 0;
            let done = with_retries("renew lease", "a", || {
                asked += 1;
                let first = asked == 1;
                async move { if first { Err(answer(code, reason)) } else { Ok(()) } }
            });
            done.await.unwrap();
            assert_eq!(asked, 2, "{reason}");
        }
    }

    #[tokio::test(start_paused = true)]
    async fn permanent_error_is_returned_without_retry() {
        for (code, reason) in [(403, "Forbidden"), (422, "Invalid"), (409, "AlreadyExists")] {
            let mut asked = 0;
            let done: Result<(), _> = with_retries("create node", "a", || {
                asked += 1;
                async move { Err(answer(code, reason)) }
            })
            .await;
            let error = done.unwrap_err().to_string();
            assert!(error.starts_with("cannot create node a: ") && error.contains("no"), "{error}");
            assert_eq!(asked, 1, "{reason}");
        }
    }

    #[tokio::test(start_paused = true)]
    async fn retries_end_after_the_last_attempt() {
        let mut asked = 0;
        let done: Result<(), _> = with_retries("create node", "a", || {
            asked += 1;
            async move { Err(answer(500, "InternalError")) }
        })
        .await;
        assert!(done.is_err());
        assert_eq!(asked, MAX_ATTEMPTS);
    }
}
