//! This node's own object: what it shows, and what is written there.

use crate::connection::{Cluster, Watched};
use crate::error::ClusterError;
use k8s_openapi::api::core::v1;
use kube::Api;
use kube::api::{Patch, PatchParams};
use kube::core::{ApiResource, NotUsed, Object};
use kube::runtime::watcher::Event;
use serde::{Deserialize, Serialize};
use serde_json::{Map, Value, json};
use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;
use tokio::sync::watch;

/// What a node shows of itself.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct NodeView {
    /// Its extended resources, as the API server writes quantities.
    pub capacity: BTreeMap<String, String>,
    /// The part of them that pods may have.
    pub allocatable: BTreeMap<String, String>,
    /// Its annotations.
    pub annotations: BTreeMap<String, String>,
    /// Its labels.
    pub labels: BTreeMap<String, String>,
}

/// What is to be changed of what a node shows.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Publication {
    /// Extended resources with the amounts that pods may have of them.
    pub capacity: BTreeMap<String, u64>,
    /// Extended resources that it has no more.
    pub gone_capacity: BTreeSet<String>,
    /// Annotations; `None` removes one.
    pub annotations: BTreeMap<String, Option<String>>,
    /// Labels; `None` removes one.
    pub labels: BTreeMap<String, Option<String>>,
}

impl Cluster {
    /// What this node shows now.
    pub async fn node(&self) -> Result<NodeView, ClusterError> {
        let doing = || format!("reading node {}", self.node);
        let answer = self.ask(doing, self.nodes().get(self.node.as_str())).await;
        answer.map(view).map_err(|error| self.no_node(error))
    }

    /// Follows what this node shows, until the last receiver is dropped. `None` before the first answer, and where there is
    /// no such node.
    pub fn watch_node(&self) -> watch::Receiver<Option<Arc<NodeView>>> {
        let (told, receiver) = watch::channel(None);
        let cluster = self.clone();
        tokio::spawn(async move {
            let fields = format!("metadata.name={}", cluster.node);
            let mut coming = None;
            let follow = cluster.follow("this node", fields, |event: Event<LeanNode>| {
                let now = match event {
                    Event::Init => {
                        coming = None;
                        return;
                    }
                    Event::InitApply(node) => {
                        coming = Some(view(node));
                        return;
                    }
                    Event::InitDone => coming.take(),
                    Event::Apply(node) => Some(view(node)),
                    Event::Delete(_) => None,
                };
                told.send_if_modified(|known| {
                    let differs = known.as_deref() != now.as_ref();
                    if differs {
                        *known = now.map(Arc::new);
                    }
                    differs
                });
            });
            tokio::select! {
                () = follow => {}
                () = told.closed() => {}
            }
        });
        receiver
    }

    /// Changes what this node shows, all at once or not at all.
    ///
    /// Through the status alone: it takes labels and annotations, too, so that a node's daemon needs no right to the spec.
    pub async fn publish(&self, said: &Publication) -> Result<(), ClusterError> {
        let doing = || format!("publishing what node {} has", self.node);
        // Kubelet would make the one of the other in a while, and a pod that came meanwhile would be refused.
        let amounts: Map<String, Value> = said
            .gone_capacity
            .iter()
            .map(|name| (name.clone(), Value::Null))
            .chain(said.capacity.iter().map(|(name, amount)| (name.clone(), amount.to_string().into())))
            .collect();
        let patch = Patch::Merge(json!({
            "metadata": {"annotations": said.annotations, "labels": said.labels},
            "status": {"capacity": amounts, "allocatable": amounts},
        }));
        let nodes = self.nodes();
        let options = PatchParams::default();
        let patched = nodes.patch_status(self.node.as_str(), &options, &patch);
        self.ask(doing, patched).await.map(drop).map_err(|error| self.no_node(error))
    }

    fn nodes(&self) -> Api<LeanNode> {
        Api::all_with(self.client.clone(), &LeanNode::resource())
    }

    fn no_node(&self, error: ClusterError) -> ClusterError {
        match error {
            ClusterError::Refused { code: 404, doing, .. } => {
                ClusterError::NoNode { doing, node: self.node.to_string() }
            }
            other => other,
        }
    }
}

/// A node with what is read of it: most of one is its list of images.
type LeanNode = Object<NotUsed, Status>;

impl Watched for LeanNode {
    fn resource() -> ApiResource {
        ApiResource::erase::<v1::Node>(&())
    }
}

#[derive(Clone, Debug, Default, Serialize, Deserialize)]
#[serde(rename_all = "camelCase", default)]
struct Status {
    capacity: BTreeMap<String, String>,
    allocatable: BTreeMap<String, String>,
}

fn view(node: LeanNode) -> NodeView {
    let status = node.status.unwrap_or_default();
    let extended = |mut amounts: BTreeMap<String, String>| {
        amounts.retain(|name, _| is_extended(name));
        amounts
    };
    NodeView {
        capacity: extended(status.capacity),
        allocatable: extended(status.allocatable),
        annotations: node.metadata.annotations.unwrap_or_default(),
        labels: node.metadata.labels.unwrap_or_default(),
    }
}

/// Whether a resource is one that somebody added: Kubernetes' own have no domain or theirs.
fn is_extended(resource: &str) -> bool {
    resource.split_once('/').is_some_and(|(domain, _)| !domain.ends_with("kubernetes.io"))
}
