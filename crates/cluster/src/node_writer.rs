//! Writes the status, labels and annotations that a node's daemon publishes.

use crate::client::ApiClient;
use crate::error::ClusterError;
use crate::nodes::{LeanNode, NodeCache, NodeProjection, NodeView};
use crate::watch::{Projection, WatchSelector};
use kube::Api;
use kube::api::{Patch, PatchParams};
use partage_core::model::NodeName;
use serde_json::{Map, Value, json};
use std::collections::{BTreeMap, BTreeSet};

/// A change of a node's status, annotations and labels.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct NodePatch {
    /// Extended resources and the amounts that pods may request of them.
    pub capacity: BTreeMap<String, u64>,
    /// Extended resources that the node no longer has.
    pub removed_capacity: BTreeSet<String>,
    /// Annotations; `None` removes one.
    pub annotations: BTreeMap<String, Option<String>>,
    /// Labels; `None` removes one.
    pub labels: BTreeMap<String, Option<String>>,
}

/// Reads and writes one node. Cloning it is cheap.
#[derive(Clone, Debug)]
pub struct NodeWriter {
    client: ApiClient,
    node: NodeName,
}

impl NodeWriter {
    /// Creates a writer for this node.
    pub fn new(client: &ApiClient, node: &NodeName) -> NodeWriter {
        NodeWriter { client: client.clone(), node: node.clone() }
    }

    /// Returns the name of the node that this writer changes.
    pub fn name(&self) -> &NodeName {
        &self.node
    }

    /// Reads the node from the API server, not a cache. Fails with [`ClusterError::NodeNotFound`] if it is missing.
    pub async fn read(&self) -> Result<NodeView, ClusterError> {
        let operation = || format!("reading node {}", self.node);
        let node = self.client.request(operation, self.nodes().get(self.node.as_str())).await;
        // The projection keeps every node.
        node.map(|node| NodeProjection::view(node).unwrap_or_default()).map_err(|error| self.not_found(error))
    }

    /// Watches this node alone: the cache has one object, or none if the node does not exist.
    pub fn watch(&self) -> NodeCache {
        self.client.watch_nodes(&WatchSelector::all().fields(&format!("metadata.name={}", self.node)))
    }

    /// Applies a change, all of it or nothing.
    ///
    /// The status subresource also takes labels and annotations, so a node's daemon needs no permission on the spec. The
    /// patch contains only the keys that change and overwrites concurrent writes of the same keys: the caller compares
    /// the result with the desired state and patches again.
    pub async fn apply(&self, change: &NodePatch) -> Result<(), ClusterError> {
        let operation = || format!("updating the status of node {}", self.node);
        let removed = change.removed_capacity.iter().map(|name| (name.clone(), Value::Null));
        let amounts = change.capacity.iter().map(|(name, amount)| (name.clone(), amount.to_string().into()));
        let amounts: Map<String, Value> = removed.chain(amounts).collect();
        // Kubelet derives allocatable from capacity only after a while, and would reject a pod that arrives before.
        let patch = Patch::Merge(json!({
            "metadata": {"annotations": change.annotations, "labels": change.labels},
            "status": {"capacity": amounts, "allocatable": amounts},
        }));
        let nodes = self.nodes();
        let options = PatchParams::default();
        let patched = nodes.patch_status(self.node.as_str(), &options, &patch);
        self.client.request(operation, patched).await.map(drop).map_err(|error| self.not_found(error))
    }

    fn nodes(&self) -> Api<LeanNode> {
        NodeProjection::api(self.client.kube().clone(), None)
    }

    fn not_found(&self, error: ClusterError) -> ClusterError {
        match error {
            ClusterError::Rejected { code: 404, operation, .. } => {
                ClusterError::NodeNotFound { operation, node: self.node.to_string() }
            }
            other => other,
        }
    }
}
