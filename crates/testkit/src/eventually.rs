//! Waiting on a condition instead of a time.

use std::fmt::Display;
use std::time::{Duration, Instant};

/// Long enough for a loaded machine; only a test that fails waits so long.
const DEADLINE: Duration = Duration::from_secs(300);
const PAUSE: Duration = Duration::from_millis(100);

/// Asks again until the answer is `Ok`, and returns it.
///
/// `Err` says what was seen instead. The last one stands in the panic when five minutes have passed.
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
pub async fn eventually<T, E: Display>(what: &str, mut ask: impl AsyncFnMut() -> Result<T, E>) -> T {
    let begun = Instant::now();
    loop {
        match ask().await {
            Ok(answer) => return answer,
            Err(seen) if begun.elapsed() > DEADLINE => {
                panic!("not within {} s: {what}; last seen: {seen}", DEADLINE.as_secs())
            }
            Err(_) => tokio::time::sleep(PAUSE).await,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::eventually;

    #[tokio::test]
    async fn asks_until_it_holds() {
        let mut asked = 0;
        let answer = eventually("the third answer", async || {
            asked += 1;
            if asked == 3 { Ok("here") } else { Err("not yet") }
        })
        .await;
        assert_eq!((answer, asked), ("here", 3));
    }
}
