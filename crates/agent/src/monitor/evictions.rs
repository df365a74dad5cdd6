//! Evictions of pods, which end with the monitor.

use super::EVICTION_RETRY_INTERVAL;
use partage_core::model::PodUid;
use std::collections::{BTreeMap, BTreeSet};
use std::time::Instant;
use tokio::task::JoinSet;

/// Evictions in progress, and when each pod was last evicted. Dropping them aborts the requests that are in progress.
#[derive(Default)]
pub(super) struct Evictions {
    started: BTreeMap<PodUid, Instant>,
    tasks: JoinSet<()>,
}

impl Evictions {
    /// Starts an eviction of each of these pods, and again after [`EVICTION_RETRY_INTERVAL`] while they are among them: the API
    /// server may have been unavailable. `eviction` returns `None` for a pod that is not to be evicted.
    pub(super) fn start<E>(
        &mut self,
        now: Instant,
        uids: BTreeSet<PodUid>,
        eviction: impl Fn(&PodUid) -> Option<E>,
    ) where
        E: Future<Output = ()> + Send + 'static,
    {
        // Tasks that have ended are removed from the set.
        while self.tasks.try_join_next().is_some() {}
        let is_recent = |at: Instant| now.saturating_duration_since(at) < EVICTION_RETRY_INTERVAL;
        self.started.retain(|uid, at| uids.contains(uid) && is_recent(*at));
        for uid in uids {
            if self.started.contains_key(&uid) {
                continue;
            }
            let Some(eviction) = eviction(&uid) else { continue };
            self.started.insert(uid, now);
            self.tasks.spawn(eviction);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::sync::Arc;
    use std::sync::atomic::{AtomicUsize, Ordering};
    use std::time::Duration;

    #[tokio::test]
    async fn pod_is_evicted_again_only_after_the_retry_interval() {
        let (mut evictions, started) = (Evictions::default(), AtomicUsize::new(0));
        let begin = Instant::now();
        let mut start = |after: Duration, uids: &[&str]| {
            let uids = uids.iter().map(|uid| PodUid::from(*uid)).collect();
            evictions.start(begin + after, uids, |uid| {
                (uid.as_str() != "ungranted").then(|| {
                    started.fetch_add(1, Ordering::Relaxed);
                    std::future::ready(())
                })
            });
            started.load(Ordering::Relaxed)
        };
        assert_eq!(start(Duration::ZERO, &["a", "ungranted"]), 1);
        assert_eq!(start(EVICTION_RETRY_INTERVAL / 2, &["a", "b"]), 2);
        assert_eq!(start(EVICTION_RETRY_INTERVAL, &["a", "b"]), 3, "a still bypasses its limits");
        assert_eq!(start(EVICTION_RETRY_INTERVAL, &[]), 3);
        assert_eq!(start(EVICTION_RETRY_INTERVAL, &["a"]), 4, "it is a new bypass");
    }

    #[tokio::test]
    async fn eviction_in_progress_ends_with_the_monitor() {
        let mut evictions = Evictions::default();
        let request = Arc::new(());
        evictions.start(Instant::now(), BTreeSet::from(["a".into()]), |_| {
            let request = Arc::clone(&request);
            Some(async move {
                std::future::pending::<()>().await;
                drop(request);
            })
        });
        tokio::task::yield_now().await;
        assert_eq!(Arc::strong_count(&request), 2);
        drop(evictions);
        while Arc::strong_count(&request) > 1 {
            tokio::task::yield_now().await;
        }
    }
}
