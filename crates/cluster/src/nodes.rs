//! Nodes: a cache of those that a selector matches.

use crate::cache::WatchCache;
use crate::client::ApiClient;
use crate::watch::{Projection, WatchSelector, watch};
use k8s_openapi::api::core::v1;
use kube::core::{ApiResource, NotUsed, Object};
use kube::{Api, Client};
use serde::{Deserialize, Serialize};
use std::collections::BTreeMap;

/// Nodes, as the API server last reported them.
pub type NodeCache = WatchCache<NodeView>;

/// The part of a node that is kept: its extended resources and its texts.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct NodeView {
    /// Capacity of its extended resources, as the API server writes quantities.
    pub capacity: BTreeMap<String, String>,
    /// Allocatable amounts of its extended resources.
    pub allocatable: BTreeMap<String, String>,
    /// Annotations of the node, by key.
    pub annotations: BTreeMap<String, String>,
    /// Labels of the node, by key.
    pub labels: BTreeMap<String, String>,
}

impl ApiClient {
    /// Watches nodes until the last clone of the cache is dropped. [`WatchCache::entries`] has their names.
    pub fn watch_nodes(&self, selector: &WatchSelector) -> NodeCache {
        watch::<NodeProjection>(self, selector)
    }
}

/// Keeps a [`NodeView`] of each node. Most of a node object is its list of images, which is not decoded.
#[derive(Debug)]
pub struct NodeProjection;

/// A node with only the fields that are read.
pub(crate) type LeanNode = Object<NotUsed, NodeStatus>;

/// The fields of a node's status that are read.
#[derive(Clone, Debug, Default, Serialize, Deserialize)]
#[serde(rename_all = "camelCase", default)]
pub struct NodeStatus {
    capacity: BTreeMap<String, String>,
    allocatable: BTreeMap<String, String>,
}

impl Projection for NodeProjection {
    type Object = LeanNode;
    type View = NodeView;
    const RESOURCE: &'static str = "nodes";

    /// Nodes have no namespace.
    fn api(client: Client, _: Option<&str>) -> Api<LeanNode> {
        Api::all_with(client, &ApiResource::erase::<v1::Node>(&()))
    }

    fn view(node: LeanNode) -> Option<NodeView> {
        let status = node.status.unwrap_or_default();
        let extended = |mut amounts: BTreeMap<String, String>| {
            amounts.retain(|name, _| is_extended(name));
            amounts
        };
        Some(NodeView {
            capacity: extended(status.capacity),
            allocatable: extended(status.allocatable),
            annotations: node.metadata.annotations.unwrap_or_default(),
            labels: node.metadata.labels.unwrap_or_default(),
        })
    }
}

/// Returns whether a resource is an extended one: Kubernetes' own have no domain, or one of its own.
fn is_extended(resource: &str) -> bool {
    resource.split_once('/').is_some_and(|(domain, _)| !domain.ends_with("kubernetes.io"))
}
