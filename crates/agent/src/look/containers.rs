//! Which container is whose, as the runtime says. It is asked only when there is somebody it does not know, and nothing waits for it:
//! a runtime that hangs must not keep anybody from learning that a GPU is lost.

use crate::identity::{ContainerState, RunningContainer};
use crate::processes::ContainerId;
use partage_core::model::{ContainerName, PodId};
use std::cell::Cell;
use std::collections::BTreeMap;
use std::time::Duration;
use tokio::time::Instant;
use tokio_util::task::AbortOnDropHandle;

/// The runtime is not asked more often about containers that it does not tell of, or after it told nothing.
const AGAIN: Duration = Duration::from_secs(2);
/// It answers in milliseconds, which are waited for once. What takes longer is heard in a later round.
const SHORT: Duration = Duration::from_millis(100);

/// A container, and its pod.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Whose {
    pub(super) pod: PodId,
    pub(super) container: ContainerName,
}

/// The runtime's containers, as of its last answer; none where it gave none.
type Answer = Option<Vec<RunningContainer>>;

#[derive(Default)]
pub(super) struct Containers {
    known: BTreeMap<ContainerId, Whose>,
    /// How many were live when it was asked.
    asked_for: usize,
    /// A process was seen in a container that it had not told of: it started later.
    unknown: Cell<bool>,
    asked: Option<Instant>,
    /// A question that is not answered yet.
    asking: Option<AbortOnDropHandle<Answer>>,
}

impl Containers {
    /// Asks where there is a reason to, and takes in what is answered soon. `live` is how many containers have a region.
    pub(super) async fn refresh<F>(&mut self, live: usize, ask: impl FnOnce() -> F)
    where
        F: Future<Output = Answer> + Send + 'static,
    {
        let recently = self.asked.is_some_and(|asked| asked.elapsed() < AGAIN);
        let due = live != self.asked_for || (self.unknown.get() && !recently);
        let mut patience = Duration::ZERO;
        if self.asking.is_none() && due {
            self.asking = Some(AbortOnDropHandle::new(tokio::spawn(ask())));
            (self.asked_for, self.asked) = (live, Some(Instant::now()));
            patience = SHORT;
        }
        let Some(asking) = &mut self.asking else { return };
        let Ok(answer) = tokio::time::timeout(patience, asking).await else { return };
        self.asking = None;
        let Ok(Some(containers)) = answer else {
            // Somebody may be there whom nobody knows.
            self.unknown.set(true);
            return;
        };
        let running = containers.into_iter().filter(|one| one.state == ContainerState::Running);
        self.known = running.filter_map(entry).collect();
        self.unknown.set(false);
    }

    /// Whose a container is. Where that is not known, the runtime is asked again.
    pub(super) fn whose(&self, container: &ContainerId) -> Option<&Whose> {
        let known = self.known.get(container);
        self.unknown.set(self.unknown.get() || known.is_none());
        known
    }
}

fn entry(one: RunningContainer) -> Option<(ContainerId, Whose)> {
    let pod = PodId { uid: one.uid, namespace: one.namespace, name: one.pod };
    Some((ContainerId::new(&one.id)?, Whose { pod, container: one.container }))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn id() -> ContainerId {
        ContainerId::new(&"a".repeat(64)).unwrap()
    }

    fn running() -> RunningContainer {
        RunningContainer {
            id: id().to_string(),
            sandbox: "s".into(),
            uid: "u".into(),
            namespace: "n".into(),
            pod: "p".into(),
            container: "main".into(),
            state: ContainerState::Running,
        }
    }

    fn nobody_asks() -> std::future::Ready<Answer> {
        panic!("nothing is to be asked")
    }

    #[tokio::test(start_paused = true)]
    async fn nothing_waits_for_a_runtime_that_hangs() {
        let mut containers = Containers::default();
        let (answer, hangs) = tokio::sync::oneshot::channel::<Vec<RunningContainer>>();
        containers.refresh(1, || async { hangs.await.ok() }).await;
        // Nobody asks twice at once, and the rounds go on.
        for _ in 0..50 {
            containers.refresh(1, nobody_asks).await;
            assert_eq!(containers.whose(&id()), None);
        }
        let begun = Instant::now();
        containers.refresh(1, nobody_asks).await;
        assert_eq!(begun.elapsed(), Duration::ZERO);
        answer.send(vec![running()]).unwrap();
        // The one who asks hears it first.
        tokio::task::yield_now().await;
        containers.refresh(1, nobody_asks).await;
        assert_eq!(containers.whose(&id()).unwrap().container.as_str(), "main");
    }

    #[tokio::test(start_paused = true)]
    async fn a_runtime_that_fails_is_asked_again_later() {
        let mut containers = Containers::default();
        containers.refresh(1, async || None).await;
        containers.refresh(1, nobody_asks).await;
        tokio::time::advance(AGAIN).await;
        containers.refresh(1, async || Some(vec![running()])).await;
        assert!(containers.whose(&id()).is_some());
        // Who is known is not asked for; who came meanwhile is.
        tokio::time::advance(AGAIN).await;
        containers.refresh(1, nobody_asks).await;
        containers.refresh(2, async || Some(Vec::new())).await;
        assert!(containers.whose(&id()).is_none());
    }
}
