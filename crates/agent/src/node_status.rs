//! The node object: amounts in its status, the inventory annotation, labels.
//!
//! One loop compares the desired with the observed state and patches the difference: after a start, when the health of a GPU
//! changes, and when another component changed the node. The keys that Partage owns are recorded on the node itself, so that
//! keys which are no longer wanted are removed, also by another version or after a long time. Keys that already had the desired
//! value are not owned and stay.

use crate::api_server::ApiServer;
use crate::resources::{self, PodRequest, RequestedAmounts};
use crate::settings::AgentSettings;
use crate::state::NodeState;
use partage_cluster::{ClusterError, NodePatch, NodeView, RetryBackoff, Severity};
use partage_core::dialect::Dialect;
use partage_core::dialect::grants::node_register;
use partage_core::model::Node;
use partage_core::quantity::Quantity;
use partage_enforce::error_chain::describe;
use serde::{Deserialize, Serialize};
use std::collections::{BTreeMap, BTreeSet};
use std::time::Duration;
use tokio::sync::watch;
use tokio::time::Instant;

/// The annotation with the node and its GPUs in the core's format, for schedulers.
pub(crate) const INVENTORY_ANNOTATION: &str = "partage.dev/inventory";
/// The annotation with the keys of the node that Partage owns.
const PUBLISHED_ANNOTATION: &str = "partage.dev/published";
/// If a change survives this long before it is reverted, the revert is not a conflict with another writer.
const CONFLICT_WINDOW: Duration = Duration::from_secs(60);

/// The desired state of the node object.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(crate) struct DesiredNodeStatus {
    /// Amounts of extended resources.
    pub(crate) amounts: BTreeMap<String, u64>,
    /// Annotations by key: the inventory, and Volcano's register if that dialect is enabled.
    pub(crate) annotations: BTreeMap<String, String>,
    /// Labels by key, from the settings.
    pub(crate) labels: BTreeMap<String, String>,
}

impl DesiredNodeStatus {
    /// Computes the desired state from the session's state; `None` before all pods of the node are known.
    pub(crate) fn of(state: &NodeState) -> Option<DesiredNodeStatus> {
        if !state.adapters.pods.is_synced() {
            return None;
        }
        let pods = state.adapters.pods.all();
        let containers = state.containers();
        let grants = containers.grants();
        let running = pods.iter().filter(|pod| !pod.is_finished());
        let requests: Vec<PodRequest<'_>> = running
            .map(|pod| PodRequest {
                pod: &pod.pod,
                grant: grants.record(&pod.id.uid).map(|record| &record.grant),
            })
            .collect();
        let requested = resources::requested(&requests, grants.node());
        Some(desired(grants.node(), &state.settings(), &requested))
    }
}

/// Computes the desired state of the node.
///
/// Unhealthy GPUs are withheld in `node`. `requested` must be of all pods here ([`partage_cluster::WatchCache::is_synced`]): with
/// amounts below what is requested, kubelet's next restart kills pods.
pub(crate) fn desired(
    node: &Node,
    settings: &AgentSettings,
    requested: &RequestedAmounts,
) -> DesiredNodeStatus {
    let mut annotations = BTreeMap::new();
    match serde_json::to_string(node) {
        Ok(inventory) => drop(annotations.insert(INVENTORY_ANNOTATION.to_string(), inventory)),
        Err(error) => tracing::error!(%error, "cannot encode the node's inventory"),
    }
    if settings.dialects.contains(&Dialect::Volcano) {
        // This limit holds for the count of this dialect only.
        let counted = Node { max_shares_per_gpu: Some(settings.shares_per_gpu), ..node.clone() };
        let register = node_register::encode(&counted, &settings.dialect());
        annotations.insert(node_register::ANNOTATION.to_string(), register);
    }
    DesiredNodeStatus {
        amounts: resources::amounts(node, settings, requested),
        annotations,
        labels: settings.labels.clone(),
    }
}

/// Removes everything that Partage has published on the node: amounts first, so that a label which an admission policy protects does
/// not block them.
pub(crate) async fn clean_up(cluster: &ApiServer) -> Result<(), ClusterError> {
    for part in [status_patch, label_patch] {
        if let Some(needed) = part(&DesiredNodeStatus::default(), &cluster.node.read().await?) {
            cluster.node.apply(&needed).await?;
        }
    }
    Ok(())
}

/// Keeps the node object in the desired state, until the sender is dropped. While the desired state is not known, nothing is changed.
///
/// Labels have a patch and a backoff of their own: an admission policy that refuses a label does not block amounts.
pub(crate) async fn run(cluster: ApiServer, mut wanted: watch::Receiver<Option<DesiredNodeStatus>>) {
    let shown = cluster.node.watch();
    let mut changed = shown.changed();
    let (mut amounts, mut labels) = (PatchAttempts::new(&cluster), PatchAttempts::new(&cluster));
    loop {
        let desired = wanted.borrow_and_update().clone();
        changed.mark_unchanged();
        let node = shown.by_name("", cluster.node.name());
        let again = match desired.zip(node) {
            None => None,
            Some((desired, node)) => match (status_patch(&desired, &node), label_patch(&desired, &node)) {
                (Some(needed), _) => amounts.apply(&cluster, needed).await,
                (None, Some(needed)) => labels.apply(&cluster, needed).await,
                (None, None) => None,
            },
        };
        let later = async {
            match again {
                Some(at) => tokio::time::sleep_until(at).await,
                None => std::future::pending().await,
            }
        };
        // During the wait the node or the desired state may change.
        let open = tokio::select! {
            open = wanted.changed() => open.is_ok(),
            open = changed.changed() => open.is_ok(),
            () = later => true,
        };
        if !open {
            return;
        }
    }
}

/// Patches of one kind, with a backoff between those that fail or are reverted.
struct PatchAttempts {
    backoff: RetryBackoff,
    ready: Instant,
    last: Option<(NodePatch, Instant)>,
    /// The error that was logged last: the same one is not logged again.
    last_error: String,
}

impl PatchAttempts {
    fn new(cluster: &ApiServer) -> PatchAttempts {
        let backoff = cluster.client.backoff();
        PatchAttempts { backoff, ready: Instant::now(), last: None, last_error: String::new() }
    }

    /// Applies a patch if the backoff has passed. Returns when to retry, if it has to be.
    async fn apply(&mut self, cluster: &ApiServer, needed: NodePatch) -> Option<Instant> {
        if Instant::now() < self.ready {
            return Some(self.ready);
        }
        let outcome = cluster.node.apply(&needed).await;
        match &self.last {
            // Applied a moment ago, and reverted: another component writes the same keys. Kubelet reverts once, when it restarts.
            Some((before, at)) if *before == needed && at.elapsed() < CONFLICT_WINDOW => {}
            _ if outcome.is_ok() => self.backoff.reset(),
            _ => {}
        }
        self.ready = Instant::now() + self.backoff.next_delay();
        if let Err(error) = outcome {
            self.log_failure(cluster, &error);
            return Some(self.ready);
        }
        self.last_error.clear();
        self.last = Some((needed, Instant::now()));
        None
    }

    fn log_failure(&mut self, cluster: &ApiServer, error: &ClusterError) {
        let text = describe(error);
        if self.last_error == text {
            tracing::debug!(error = text, "cannot update the node, retrying");
            return;
        }
        tracing::warn!(error = text, "cannot update the node, retrying");
        // While the API server is unavailable, an event would not reach it either.
        if matches!(error, ClusterError::Rejected { .. } | ClusterError::Forbidden { .. }) {
            cluster.node_event(Severity::Warning, "NodeUpdateRefused", &text);
        }
        self.last_error = text;
    }
}

/// The keys of the node that Partage owns.
///
/// The admission policy reads the labels in it, too: they come last.
#[derive(Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase", default)]
struct PublishedKeys {
    amounts: BTreeSet<String>,
    annotations: BTreeSet<String>,
    labels: BTreeSet<String>,
}

impl PublishedKeys {
    /// Reads the owned keys from the node. A text that is not valid owns nothing.
    fn read(node: &NodeView) -> PublishedKeys {
        node.annotations
            .get(PUBLISHED_ANNOTATION)
            .and_then(|text| serde_json::from_str(text).ok())
            .unwrap_or_default()
    }

    /// Adds the owned keys to a patch, if the node has other ones.
    fn add_to(&self, node: &NodeView, patch: &mut NodePatch) {
        let record = (*self != PublishedKeys::default()).then(|| serde_json::to_string(self).ok()).flatten();
        if node.annotations.get(PUBLISHED_ANNOTATION) != record.as_ref() {
            patch.annotations.insert(PUBLISHED_ANNOTATION.to_string(), record);
        }
    }
}

/// Returns the patch of amounts and annotations that brings a node to the desired state; `None` if it is there. The owned labels
/// stay as they are: the admission policy checks them when a label is removed.
fn status_patch(desired: &DesiredNodeStatus, node: &NodeView) -> Option<NodePatch> {
    let before = PublishedKeys::read(node);
    let mut owned = PublishedKeys {
        amounts: desired.amounts.keys().cloned().collect(),
        labels: before.labels.clone(),
        ..PublishedKeys::default()
    };
    let mut patch = NodePatch {
        capacity: desired.amounts.clone(),
        removed_capacity: before.amounts.difference(&owned.amounts).cloned().collect(),
        annotations: text_patch(
            &desired.annotations,
            &node.annotations,
            &before.annotations,
            &mut owned.annotations,
        ),
        labels: BTreeMap::new(),
    };
    patch.capacity.retain(|name, amount| !has_amount(node, name, *amount));
    patch
        .removed_capacity
        .retain(|name| node.capacity.contains_key(name) || node.allocatable.contains_key(name));
    owned.add_to(node, &mut patch);
    (patch != NodePatch::default()).then_some(patch)
}

/// Returns the patch of labels, once there is nothing else to change.
fn label_patch(desired: &DesiredNodeStatus, node: &NodeView) -> Option<NodePatch> {
    let before = PublishedKeys::read(node);
    let mut owned = PublishedKeys { labels: BTreeSet::new(), ..before };
    let labels = text_patch(&desired.labels, &node.labels, &before.labels, &mut owned.labels);
    let mut patch = NodePatch { labels, ..NodePatch::default() };
    owned.add_to(node, &mut patch);
    (patch != NodePatch::default()).then_some(patch)
}

/// Returns the labels or annotations that differ from the desired ones, and the owned ones that are no longer wanted.
fn text_patch(
    wanted: &BTreeMap<String, String>,
    shown: &BTreeMap<String, String>,
    before: &BTreeSet<String>,
    owned: &mut BTreeSet<String>,
) -> BTreeMap<String, Option<String>> {
    let mut change = BTreeMap::new();
    for (key, text) in wanted {
        let differs = shown.get(key) != Some(text);
        if differs {
            change.insert(key.clone(), Some(text.clone()));
        }
        // A key that already has the desired value stays with its owner.
        if differs || before.contains(key) {
            owned.insert(key.clone());
        }
    }
    let left = before.iter().filter(|key| !wanted.contains_key(*key) && shown.contains_key(*key));
    change.extend(left.map(|key| (key.clone(), None)));
    change
}

/// Returns whether a node has this amount. The API server writes 100000 as 100k.
fn has_amount(node: &NodeView, name: &str, amount: u64) -> bool {
    let is = |amounts: &BTreeMap<String, String>| {
        let shown = amounts.get(name).and_then(|text| text.parse::<Quantity>().ok());
        shown.and_then(|quantity| quantity.to_count().ok()) == Some(amount)
    };
    is(&node.capacity) && is(&node.allocatable)
}

#[cfg(test)]
mod tests;
