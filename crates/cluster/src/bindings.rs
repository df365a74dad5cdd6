//! Binding a pod to a node, together with its grant.
//!
//! The API server merges the annotations of a Binding into the pod in the same write that sets its node: a pod is never
//! bound without its grant. When the outcome is unknown (the connection broke, the server failed), the pod has to be read
//! back before its share is given to another: see [`ApiClient::read_binding`].

use crate::client::ApiClient;
use crate::error::ClusterError;
use k8s_openapi::api::core::v1::{Binding, ObjectReference};
use k8s_openapi::apimachinery::pkg::apis::meta::v1::ObjectMeta;
use kube::Api;
use kube::api::PostParams;
use kube::core::{ApiResource, NotUsed, Object};
use partage_core::model::{NodeName, PodId};
use serde::{Deserialize, Serialize};
use std::collections::BTreeMap;

/// A pod, the target node, and the annotations that the pod gets with the binding.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct PodBinding {
    /// The pod. Another pod of the same name is never bound.
    pub pod: PodId,
    /// The target node.
    pub node: NodeName,
    /// Annotations that the pod gets in the same write, such as its grant.
    pub annotations: BTreeMap<String, String>,
    /// If set, the pod is bound only if it has not changed since this version. A request whose outcome is unknown, and
    /// that may still be on its way, then fails once the pod has been changed.
    pub resource_version: Option<String>,
}

/// The outcome of a request to bind a pod.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum BindOutcome {
    /// The pod is bound as requested. This includes a repeated request whose first answer was lost.
    Bound,
    /// The pod cannot be bound as requested.
    Conflict(BindConflict),
    /// The pod does not exist.
    NotFound,
    /// The pod may or may not be bound: read it back before its share is used for another pod.
    Unknown(ClusterError),
}

/// Why a pod cannot be bound.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum BindConflict {
    /// Another scheduler bound it.
    #[error("the pod is already bound to node {0}")]
    BoundElsewhere(NodeName),
    /// It is bound to the node, but with other annotations: another replica made another decision.
    #[error("the pod is bound to the node with a different grant")]
    OtherAnnotations,
    /// A pod of the same name, but with another UID, exists.
    #[error("another pod has the same name")]
    Replaced,
    /// The pod is being deleted.
    #[error("the pod is being deleted")]
    Deleting,
    /// The pod has changed since the required version, or the server refused for another reason.
    #[error("{0}")]
    Refused(String),
}

/// Where a pod is, compared with a binding.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum BindingState {
    /// The pod is bound to the node and has the annotations.
    Bound,
    /// The pod is not bound, and can be.
    Unbound,
    /// The pod cannot be bound as requested.
    Conflict(BindConflict),
    /// The pod does not exist.
    NotFound,
}

impl ApiClient {
    /// Binds a pod to a node and gives it annotations, both or neither.
    ///
    /// # Errors
    ///
    /// An error means that the pod was not bound: the request was forbidden, malformed or throttled.
    pub async fn bind_pod(&self, binding: &PodBinding) -> Result<BindOutcome, ClusterError> {
        let PodBinding { pod, node, annotations, resource_version } = binding;
        let operation = || format!("binding pod {}/{} to node {node}", pod.namespace, pod.name);
        let body = Binding {
            metadata: ObjectMeta {
                name: Some(pod.name.to_string()),
                namespace: Some(pod.namespace.to_string()),
                uid: Some(pod.uid.to_string()),
                resource_version: resource_version.clone(),
                annotations: Some(annotations.clone()),
                ..ObjectMeta::default()
            },
            target: ObjectReference {
                api_version: Some("v1".into()),
                kind: Some("Node".into()),
                name: Some(node.to_string()),
                ..ObjectReference::default()
            },
        };
        let pods = self.bound_pods(binding);
        let options = PostParams::default();
        // The answer is a Status.
        let posted =
            pods.create_subresource::<_, serde_json::Value>("binding", pod.name.as_str(), &options, &body);
        match self.request(operation, posted).await {
            Ok(_) => Ok(BindOutcome::Bound),
            Err(ClusterError::Rejected { code: 404, .. }) => Ok(BindOutcome::NotFound),
            Err(error @ ClusterError::Rejected { code: 409, .. }) => Ok(self.explain(binding, error).await),
            Err(error) if error.is_outcome_unknown() => Ok(BindOutcome::Unknown(error)),
            Err(error) => Err(error),
        }
    }

    /// Reads back whether a pod is bound as requested.
    ///
    /// `Unbound` after an unknown outcome is final only if the request cannot arrive any more: bind with a
    /// `resource_version` and change the pod, or wait for longer than the API server's request timeout.
    pub async fn read_binding(&self, binding: &PodBinding) -> Result<BindingState, ClusterError> {
        let pod = &binding.pod;
        let operation = || format!("reading back the binding of pod {}/{}", pod.namespace, pod.name);
        let found = self.request(operation, self.bound_pods(binding).get_opt(pod.name.as_str())).await?;
        Ok(match found {
            Some(found) => compare(binding, &found),
            None => BindingState::NotFound,
        })
    }

    /// Determines the reason of a conflict.
    async fn explain(&self, binding: &PodBinding, error: ClusterError) -> BindOutcome {
        match self.read_binding(binding).await {
            Ok(BindingState::Bound) => BindOutcome::Bound,
            Ok(BindingState::Conflict(conflict)) => BindOutcome::Conflict(conflict),
            Ok(BindingState::NotFound) => BindOutcome::NotFound,
            Ok(BindingState::Unbound) => {
                let message = match error {
                    ClusterError::Rejected { message, .. } => message,
                    other => other.to_string(),
                };
                BindOutcome::Conflict(BindConflict::Refused(message))
            }
            Err(error) => BindOutcome::Unknown(error),
        }
    }

    fn bound_pods(&self, binding: &PodBinding) -> Api<BoundPod> {
        let resource = ApiResource::erase::<k8s_openapi::api::core::v1::Pod>(&());
        Api::namespaced_with(self.kube().clone(), binding.pod.namespace.as_str(), &resource)
    }
}

/// A pod with only the fields that show where it is bound.
type BoundPod = Object<BoundPodSpec, NotUsed>;

#[derive(Clone, Debug, Default, Serialize, Deserialize)]
#[serde(rename_all = "camelCase", default)]
struct BoundPodSpec {
    node_name: String,
}

fn compare(binding: &PodBinding, found: &BoundPod) -> BindingState {
    let meta = &found.metadata;
    if meta.uid.as_deref() != Some(binding.pod.uid.as_str()) {
        return BindingState::Conflict(BindConflict::Replaced);
    }
    let node = found.spec.node_name.as_str();
    if node.is_empty() {
        return match meta.deletion_timestamp {
            Some(_) => BindingState::Conflict(BindConflict::Deleting),
            None => BindingState::Unbound,
        };
    }
    if node != binding.node.as_str() {
        return BindingState::Conflict(BindConflict::BoundElsewhere(node.into()));
    }
    let existing = meta.annotations.as_ref();
    let has = |(key, text): (&String, &String)| existing.and_then(|all| all.get(key)) == Some(text);
    if binding.annotations.iter().all(has) {
        BindingState::Bound
    } else {
        BindingState::Conflict(BindConflict::OtherAnnotations)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    #[test]
    fn state_is_read_from_uid_node_and_annotations() {
        let pod = PodId { uid: "u1".into(), namespace: "default".into(), name: "web".into() };
        let annotations = BTreeMap::from([("partage.dev/grant".to_string(), "g1".to_string())]);
        let binding = PodBinding { pod, node: "n1".into(), annotations, resource_version: None };
        let state = |uid: &str, node: &str, grant: &str, deleted: bool| {
            let mut object = json!({
                "metadata": {"uid": uid, "annotations": {"partage.dev/grant": grant, "other": "kept"}},
                "spec": {"nodeName": node},
            });
            if deleted {
                object["metadata"]["deletionTimestamp"] = "2026-01-01T00:00:00Z".into();
            }
            compare(&binding, &serde_json::from_value(object).unwrap())
        };
        let conflict = BindingState::Conflict;
        assert_eq!(state("u1", "n1", "g1", false), BindingState::Bound);
        assert_eq!(state("u1", "n1", "g1", true), BindingState::Bound, "it was bound before its deletion");
        assert_eq!(state("u1", "", "", false), BindingState::Unbound);
        assert_eq!(state("u1", "", "", true), conflict(BindConflict::Deleting));
        assert_eq!(state("u1", "n2", "g1", false), conflict(BindConflict::BoundElsewhere("n2".into())));
        assert_eq!(state("u1", "n1", "g2", false), conflict(BindConflict::OtherAnnotations));
        assert_eq!(state("u2", "n1", "g1", false), conflict(BindConflict::Replaced));
    }
}
