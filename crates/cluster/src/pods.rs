//! The pods of this node, as the API server last told them.

mod read;
mod view;

pub use view::{Phase, PodView};

use crate::connection::{Cluster, Contact, Watched};
use crate::error::ClusterError;
use kube::Api;
use kube::api::{DeleteParams, Patch, PatchParams, Preconditions};
use kube::runtime::watcher::Event;
use partage_core::model::{Namespace, PodId, PodName, PodUid};
use read::LeanPod;
use serde_json::json;
use std::collections::{BTreeMap, HashMap};
use std::fmt;
use std::sync::{Arc, PoisonError, RwLock};
use std::time::{Duration, Instant};
use tokio::sync::watch;
use tokio_util::task::AbortOnDropHandle;

/// The longest that a pod which is evicted may take to end, in seconds: what it asks for is its author's, and may be a year.
const LONGEST_GRACE: u32 = 30;

/// What became of annotations.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Annotated {
    /// The pod has them.
    Done,
    /// There is no such pod any more, though perhaps another one of its name.
    Gone,
}

impl Cluster {
    /// Follows the pods of this node from now on, until the last clone of the answer is dropped.
    pub fn watch_pods(&self) -> Pods {
        let store = Arc::new(Store::default());
        let (cluster, filled) = (self.clone(), store.clone());
        let task = tokio::spawn(async move {
            let mut coming = HashMap::new();
            let fields = format!("spec.nodeName={}", cluster.node);
            cluster.follow("pods", fields, |event| filled.hear(event, &mut coming)).await;
        });
        Pods { store, contact: self.contact.clone(), _task: Arc::new(AbortOnDropHandle::new(task)) }
    }

    /// A pod as it is now, on whatever node.
    pub async fn pod(
        &self,
        namespace: &Namespace,
        name: &PodName,
    ) -> Result<Option<Arc<PodView>>, ClusterError> {
        let doing = || format!("reading pod {namespace}/{name}");
        let pod = self.ask(doing, self.pods_in(namespace).get_opt(name.as_str())).await?;
        Ok(pod.and_then(read::view).map(Arc::new))
    }

    /// Sets annotations of a pod, and removes those that are `None`. Never those of another pod of the same name.
    pub async fn annotate(
        &self,
        pod: &PodId,
        annotations: &BTreeMap<String, Option<String>>,
    ) -> Result<Annotated, ClusterError> {
        let doing = || format!("annotating pod {}/{}", pod.namespace, pod.name);
        // With the UID in it, which cannot be changed, the server refuses to patch any other pod.
        let patch = Patch::Merge(json!({"metadata": {"uid": pod.uid, "annotations": annotations}}));
        let api = self.pods_in(&pod.namespace);
        let options = PatchParams::default();
        let patched = api.patch(pod.name.as_str(), &options, &patch);
        match self.ask(doing, patched).await {
            Ok(_) => Ok(Annotated::Done),
            Err(ClusterError::Refused { code: 404, .. }) => Ok(Annotated::Gone),
            Err(error @ ClusterError::Refused { code: 422, .. }) => {
                match self.pod(&pod.namespace, &pod.name).await? {
                    Some(there) if there.id.uid == pod.uid => Err(error),
                    _ => Ok(Annotated::Gone),
                }
            }
            Err(error) => Err(error),
        }
    }

    /// Ends a pod, and never another one of the same name. One that is gone already is ended.
    ///
    /// It is deleted, as kubelet deletes pods that it evicts: an Eviction does not name its pod's node, so that no policy could
    /// hold an agent to its own. It has as long to end as it asks for itself, and never longer than 30 seconds.
    pub async fn evict(&self, pod: &PodId) -> Result<(), ClusterError> {
        let doing = || format!("evicting pod {}/{}", pod.namespace, pod.name);
        let api = self.pods_in(&pod.namespace);
        let Some(there) = self.ask(doing, api.get_opt(pod.name.as_str())).await? else { return Ok(()) };
        let preconditions = Preconditions { uid: Some(pod.uid.to_string()), resource_version: None };
        let options = DeleteParams {
            preconditions: Some(preconditions),
            grace_period_seconds: Some(grace(there.spec.grace())),
            ..DeleteParams::default()
        };
        match self.ask(doing, api.delete(pod.name.as_str(), &options)).await {
            Ok(_) | Err(ClusterError::Refused { code: 404 | 409, .. }) => Ok(()),
            Err(error) => Err(error),
        }
    }

    fn pods_in(&self, namespace: &Namespace) -> Api<LeanPod> {
        Api::namespaced_with(self.client.clone(), namespace.as_str(), &LeanPod::resource())
    }
}

/// The time that a pod gets which is evicted, by what it asks for, in seconds. None at all would be to delete it by force.
fn grace(asked: Option<i64>) -> u32 {
    asked
        .and_then(|asked| u32::try_from(asked.max(1)).ok())
        .map_or(LONGEST_GRACE, |asked| asked.min(LONGEST_GRACE))
}

/// The pods of this node. What is here stays while the API server is away. Cloning it is cheap.
#[derive(Clone)]
pub struct Pods {
    store: Arc<Store>,
    contact: Contact,
    _task: Arc<AbortOnDropHandle<()>>,
}

impl fmt::Debug for Pods {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Pods").field("pods", &self.store.pods().len()).finish_non_exhaustive()
    }
}

impl Pods {
    /// The pod with this UID.
    pub fn by_uid(&self, uid: &PodUid) -> Option<Arc<PodView>> {
        self.store.pods().get(uid).cloned()
    }

    /// All of them, in no order.
    pub fn all(&self) -> Vec<Arc<PodView>> {
        self.store.pods().values().cloned().collect()
    }

    /// The pod with this UID as soon as it is known. Kubelet may hear of a pod a moment before we do.
    pub async fn wait_for(&self, uid: &PodUid, patience: Duration) -> Option<Arc<PodView>> {
        let mut changed = self.changed();
        let known = async {
            loop {
                if let Some(pod) = self.by_uid(uid) {
                    return Some(pod);
                }
                changed.changed().await.ok()?;
            }
        };
        tokio::time::timeout(patience, known).await.ok().flatten()
    }

    /// A number that grows with every change of what is here.
    pub fn changed(&self) -> watch::Receiver<u64> {
        self.store.version.subscribe()
    }

    /// Whether the API server has told of all pods at least once. Before that a pod that is not here may well exist.
    pub fn synced(&self) -> bool {
        *self.store.version.borrow() > 0
    }

    /// When the API server last answered or told something; absent where it never did. It may be silent for two minutes
    /// where nothing happens.
    pub fn last_contact(&self) -> Option<Instant> {
        self.contact.last()
    }
}

/// Where the watch writes.
#[derive(Debug, Default)]
struct Store {
    pods: RwLock<HashMap<PodUid, Arc<PodView>>>,
    /// 0 until the first list is in.
    version: watch::Sender<u64>,
}

impl Store {
    fn pods(&self) -> std::sync::RwLockReadGuard<'_, HashMap<PodUid, Arc<PodView>>> {
        self.pods.read().unwrap_or_else(PoisonError::into_inner)
    }

    fn change(&self, how: impl FnOnce(&mut HashMap<PodUid, Arc<PodView>>) -> bool) {
        let changed = how(&mut self.pods.write().unwrap_or_else(PoisonError::into_inner));
        if changed {
            self.version.send_modify(|version| *version += 1);
        }
    }

    /// `coming` is a list that is not whole yet: until it is, the old one holds.
    fn hear(&self, event: Event<LeanPod>, coming: &mut HashMap<PodUid, Arc<PodView>>) {
        match event {
            Event::Init => coming.clear(),
            Event::InitApply(pod) => {
                if let Some(view) = read::view(pod) {
                    coming.insert(view.id.uid.clone(), Arc::new(view));
                }
            }
            Event::InitDone => {
                let listed = std::mem::take(coming);
                let first = *self.version.borrow() == 0;
                self.change(|pods| {
                    let changed = first || *pods != listed;
                    *pods = listed;
                    changed
                });
            }
            Event::Apply(pod) => {
                let Some(view) = read::view(pod) else { return };
                self.change(|pods| {
                    let same = pods.get(&view.id.uid).is_some_and(|known| **known == view);
                    if !same {
                        pods.insert(view.id.uid.clone(), Arc::new(view));
                    }
                    !same
                });
            }
            Event::Delete(pod) => {
                let Some(uid) = pod.metadata.uid.map(PodUid::from) else { return };
                self.change(|pods| pods.remove(&uid).is_some());
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn nobody_takes_a_year_to_end() {
        for (asked, gets) in [
            (None, 30),
            (Some(5), 5),
            (Some(30), 30),
            (Some(31_536_000), 30),
            (Some(i64::MAX), 30),
            (Some(0), 1),
            (Some(-1), 1),
        ] {
            assert_eq!(grace(asked), gets, "{asked:?}");
        }
    }
}
