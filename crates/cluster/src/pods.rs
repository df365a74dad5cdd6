//! Pods: a cache of those that a selector matches, and requests about one.

mod projection;
mod view;

pub use projection::PodProjection;
pub use view::{PodPhase, PodView};

use crate::cache::WatchCache;
use crate::client::ApiClient;
use crate::error::ClusterError;
use crate::watch::{Projection, WatchSelector, watch};
use kube::Api;
use kube::api::{DeleteParams, Patch, PatchParams, Preconditions};
use partage_core::model::{Namespace, NodeName, PodId, PodName};
use projection::LeanPod;
use serde_json::json;
use std::collections::BTreeMap;
use std::sync::Arc;

/// The longest grace period of an evicted pod, in seconds. A pod's own is up to its author and may be a year.
const MAX_EVICTION_GRACE_SECONDS: u32 = 30;

/// Pods, as the API server last reported them.
pub type PodCache = WatchCache<PodView>;

/// Whether a pod was annotated.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum AnnotateOutcome {
    /// The pod has the annotations.
    Done,
    /// The pod no longer exists, though another one may have its name.
    Gone,
}

impl WatchSelector {
    /// Returns the pods that are bound to a node.
    pub fn on_node(node: &NodeName) -> WatchSelector {
        WatchSelector::all().fields(&format!("spec.nodeName={node}"))
    }
}

impl ApiClient {
    /// Watches pods until the last clone of the cache is dropped.
    pub fn watch_pods(&self, selector: &WatchSelector) -> PodCache {
        watch::<PodProjection>(self, selector)
    }

    /// Reads a pod, on whatever node it is; `None` if it does not exist.
    pub async fn pod(
        &self,
        namespace: &Namespace,
        name: &PodName,
    ) -> Result<Option<Arc<PodView>>, ClusterError> {
        let operation = || format!("reading pod {namespace}/{name}");
        let pod = self.request(operation, self.lean_pods(namespace).get_opt(name.as_str())).await?;
        Ok(pod.and_then(PodProjection::view).map(Arc::new))
    }

    /// Sets annotations of a pod and removes those that are `None`. Another pod of the same name is never changed.
    pub async fn annotate_pod(
        &self,
        pod: &PodId,
        annotations: &BTreeMap<String, Option<String>>,
    ) -> Result<AnnotateOutcome, ClusterError> {
        let operation = || format!("annotating pod {}/{}", pod.namespace, pod.name);
        // A UID is immutable: with it in the patch, the server refuses to patch any other pod.
        let patch = Patch::Merge(json!({"metadata": {"uid": pod.uid, "annotations": annotations}}));
        let api = self.lean_pods(&pod.namespace);
        let options = PatchParams::default();
        let patched = api.patch(pod.name.as_str(), &options, &patch);
        match self.request(operation, patched).await {
            Ok(_) => Ok(AnnotateOutcome::Done),
            Err(ClusterError::Rejected { code: 404, .. }) => Ok(AnnotateOutcome::Gone),
            Err(error @ ClusterError::Rejected { code: 422, .. }) => {
                match self.pod(&pod.namespace, &pod.name).await? {
                    Some(existing) if existing.id.uid == pod.uid => Err(error),
                    _ => Ok(AnnotateOutcome::Gone),
                }
            }
            Err(error) => Err(error),
        }
    }

    /// Deletes a pod, as kubelet does with pods that it evicts. Another pod of the same name is never deleted, and one
    /// that is gone already counts as evicted.
    ///
    /// The Eviction API is not used: an Eviction does not name its pod's node, so no admission policy could limit an agent
    /// to its own node. The pod gets its own grace period, but no more than 30 seconds.
    pub async fn evict_pod(&self, pod: &PodId) -> Result<(), ClusterError> {
        let operation = || format!("evicting pod {}/{}", pod.namespace, pod.name);
        let api = self.lean_pods(&pod.namespace);
        let existing = self.request(operation, api.get_opt(pod.name.as_str())).await?;
        let Some(existing) = existing else { return Ok(()) };
        let preconditions = Preconditions { uid: Some(pod.uid.to_string()), resource_version: None };
        let options = DeleteParams {
            preconditions: Some(preconditions),
            grace_period_seconds: Some(eviction_grace_seconds(existing.spec.grace_period_seconds())),
            ..DeleteParams::default()
        };
        match self.request(operation, api.delete(pod.name.as_str(), &options)).await {
            Ok(_) | Err(ClusterError::Rejected { code: 404 | 409, .. }) => Ok(()),
            Err(error) => Err(error),
        }
    }

    fn lean_pods(&self, namespace: &Namespace) -> Api<LeanPod> {
        PodProjection::api(self.kube().clone(), Some(namespace.as_str()))
    }
}

/// Returns the grace period of an evicted pod whose spec has this one. It is at least a second: 0 would force its deletion.
fn eviction_grace_seconds(requested: Option<i64>) -> u32 {
    requested
        .and_then(|requested| u32::try_from(requested.max(1)).ok())
        .map_or(MAX_EVICTION_GRACE_SECONDS, |requested| requested.min(MAX_EVICTION_GRACE_SECONDS))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn eviction_grace_is_between_one_and_thirty_seconds() {
        for (requested, expected) in [
            (None, 30),
            (Some(5), 5),
            (Some(30), 30),
            (Some(31_536_000), 30),
            (Some(i64::MAX), 30),
            (Some(0), 1),
            (Some(-1), 1),
        ] {
            assert_eq!(eviction_grace_seconds(requested), expected, "{requested:?}");
        }
    }
}
