//! Waits for a condition instead of a fixed time.

use std::fmt::Display;
use std::time::{Duration, Instant};

/// Long enough for a loaded machine; only a failing test waits this long.
const TIMEOUT: Duration = Duration::from_secs(300);
const POLL_INTERVAL: Duration = Duration::from_millis(100);

/// Calls `check` until it returns `Ok`, and returns the value.
///
/// `Err` describes the observed state. The last one is part of the panic message after five minutes.
///
/// ```no_run
/// # async fn test(pods: kube::Api<k8s_openapi::api::core::v1::Pod>) {
/// use partage_testkit::eventually;
/// let node = eventually("the pod is bound", async || {
///     let pod = pods.get("a").await.map_err(|e| e.to_string())?;
///     pod.spec.and_then(|spec| spec.node_name).ok_or_else(|| format!("{:?}", pod.status))
/// })
/// .await;
/// # }
/// ```
pub async fn eventually<T, E: Display>(what: &str, mut check: impl AsyncFnMut() -> Result<T, E>) -> T {
    let started = Instant::now();
    loop {
        match check().await {
            Ok(answer) => return answer,
            Err(seen) if started.elapsed() > TIMEOUT => {
                panic!("timed out after {} s: {what}; last state: {seen}", TIMEOUT.as_secs())
            }
            Err(_) => tokio::time::sleep(POLL_INTERVAL).await,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::eventually;

    #[tokio::test]
    async fn eventually_retries_until_the_condition_holds() {
        let mut asked = 0;
        let answer = eventually("the third answer", async || {
            asked += 1;
            if asked == 3 { Ok("here") } else { Err("not yet") }
        })
        .await;
        assert_eq!((answer, asked), ("here", 3));
    }
}
