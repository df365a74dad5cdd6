//! The pods that running containers belong to, as the container runtime reports them.
//!
//! The runtime is queried only when a container is unknown, and no poll waits for it: a runtime that hangs must not delay the
//! report of a lost GPU.

use crate::device_owner::{ContainerState, RuntimeContainer};
use partage_core::model::{ContainerName, PodId};
use partage_host::container_of_pid::ContainerId;
use std::cell::Cell;
use std::collections::BTreeMap;
use std::time::Duration;
use tokio::time::Instant;
use tokio_util::task::AbortOnDropHandle;

/// Minimum interval between queries for containers that the runtime does not list, and after a query that failed.
const QUERY_INTERVAL: Duration = Duration::from_secs(2);
/// How long the poll that starts a query waits for it. A runtime answers in milliseconds; a later poll takes a later answer.
const QUERY_WAIT: Duration = Duration::from_millis(100);

/// A container and its pod.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct NamedContainer {
    pub(super) pod: PodId,
    pub(super) container: ContainerName,
}

/// The runtime's containers; none if the query failed.
type RuntimeListing = Option<Vec<RuntimeContainer>>;

/// The containers of this node, by the id that the runtime gave them.
#[derive(Default)]
pub(super) struct ContainerIndex {
    known: BTreeMap<ContainerId, NamedContainer>,
    /// The number of containers with a region at the last query.
    live_at_query: usize,
    /// A process was seen in a container that the last listing does not have: it started later.
    has_unknown: Cell<bool>,
    queried: Option<Instant>,
    /// A query without an answer yet.
    query: Option<AbortOnDropHandle<RuntimeListing>>,
}

impl ContainerIndex {
    /// Queries the runtime if there is a reason to, and takes an answer that comes soon. `live` is the number of containers with
    /// a region.
    pub(super) async fn refresh<F>(&mut self, live: usize, list: impl FnOnce() -> F)
    where
        F: Future<Output = RuntimeListing> + Send + 'static,
    {
        let recently = self.queried.is_some_and(|queried| queried.elapsed() < QUERY_INTERVAL);
        let due = live != self.live_at_query || (self.has_unknown.get() && !recently);
        let mut wait = Duration::ZERO;
        if self.query.is_none() && due {
            self.query = Some(AbortOnDropHandle::new(tokio::spawn(list())));
            self.live_at_query = live;
            self.queried = Some(Instant::now());
            wait = QUERY_WAIT;
        }
        let Some(query) = &mut self.query else { return };
        let Ok(listing) = tokio::time::timeout(wait, query).await else { return };
        self.query = None;
        let Ok(Some(containers)) = listing else {
            // A container may have started that is not known.
            self.has_unknown.set(true);
            return;
        };
        let running = containers.into_iter().filter(|one| one.state == ContainerState::Running);
        self.known = running.filter_map(entry).collect();
        self.has_unknown.set(false);
    }

    /// Returns the pod and name of a container. Where they are not known, the next refresh queries the runtime.
    pub(super) fn owner(&self, container: &ContainerId) -> Option<&NamedContainer> {
        let known = self.known.get(container);
        self.has_unknown.set(self.has_unknown.get() || known.is_none());
        known
    }
}

fn entry(one: RuntimeContainer) -> Option<(ContainerId, NamedContainer)> {
    let pod = PodId { uid: one.uid, namespace: one.namespace, name: one.pod };
    Some((ContainerId::new(&one.id)?, NamedContainer { pod, container: one.container }))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn id() -> ContainerId {
        ContainerId::new(&"a".repeat(64)).unwrap()
    }

    fn running() -> RuntimeContainer {
        RuntimeContainer {
            id: id().to_string(),
            sandbox: "s".into(),
            uid: "u".into(),
            namespace: "n".into(),
            pod: "p".into(),
            container: "main".into(),
            state: ContainerState::Running,
        }
    }

    fn no_query() -> std::future::Ready<RuntimeListing> {
        panic!("the runtime must not be queried")
    }

    #[tokio::test(start_paused = true)]
    async fn hanging_runtime_does_not_delay_a_refresh() {
        let mut containers = ContainerIndex::default();
        let (answer, hangs) = tokio::sync::oneshot::channel::<Vec<RuntimeContainer>>();
        containers.refresh(1, || async { hangs.await.ok() }).await;
        // There is one query at a time, and no refresh waits for it.
        for _ in 0..50 {
            containers.refresh(1, no_query).await;
            assert_eq!(containers.owner(&id()), None);
        }
        let begun = Instant::now();
        containers.refresh(1, no_query).await;
        assert_eq!(begun.elapsed(), Duration::ZERO);
        answer.send(vec![running()]).unwrap();
        // The spawned query has to run before its answer can be taken.
        tokio::task::yield_now().await;
        containers.refresh(1, no_query).await;
        assert_eq!(containers.owner(&id()).unwrap().container.as_str(), "main");
    }

    #[tokio::test(start_paused = true)]
    async fn failed_query_is_retried_later() {
        let mut containers = ContainerIndex::default();
        containers.refresh(1, async || None).await;
        containers.refresh(1, no_query).await;
        tokio::time::advance(QUERY_INTERVAL).await;
        containers.refresh(1, async || Some(vec![running()])).await;
        assert!(containers.owner(&id()).is_some());
        // A known container causes no query; another number of regions does.
        tokio::time::advance(QUERY_INTERVAL).await;
        containers.refresh(1, no_query).await;
        containers.refresh(2, async || Some(Vec::new())).await;
        assert!(containers.owner(&id()).is_none());
    }
}
