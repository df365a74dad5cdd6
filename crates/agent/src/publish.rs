//! What the node says of itself: amounts in its status, its inventory, labels.
//!
//! One loop compares what the node shall say with what it shows, and mends the difference: after a start, when a GPU falls ill,
//! and when somebody else changed it. Which keys are ours stands on the node itself, so that what is no longer said is taken
//! back, also by another version or after a long absence. What was there before us, and as it should be, stays.

use crate::api_server::ApiServer;
use crate::resources::{self, Requested};
use crate::settings::Settings;
use partage_cluster::{ClusterError, NodePatch, NodeView, RetryBackoff, Severity};
use partage_core::dialect::Dialect;
use partage_core::dialect::grants::node_register;
use partage_core::model::Node;
use partage_core::quantity::Quantity;
use serde::{Deserialize, Serialize};
use std::collections::{BTreeMap, BTreeSet};
use std::time::Duration;
use tokio::sync::watch;
use tokio::time::Instant;

/// The node and its GPUs, in the core's format: what a scheduler reads.
pub(crate) const INVENTORY: &str = "partage.dev/inventory";
/// Which keys of the node are ours.
const PUBLISHED: &str = "partage.dev/published";
/// What is undone after so long is undone by no rival.
const PEACE: Duration = Duration::from_secs(60);

/// What a node shall say of itself.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(crate) struct Statement {
    /// Amounts of extended resources.
    pub(crate) amounts: BTreeMap<String, u64>,
    /// Annotations.
    pub(crate) annotations: BTreeMap<String, String>,
    /// Labels.
    pub(crate) labels: BTreeMap<String, String>,
}

/// What this node shall say.
///
/// Unhealthy GPUs are withheld in `node`. `requested` must be of all pods here ([`partage_cluster::WatchCache::is_synced`]): with
/// amounts below what is requested, kubelet's next restart kills pods.
pub(crate) fn publication(node: &Node, settings: &Settings, requested: &Requested) -> Statement {
    let mut annotations = BTreeMap::new();
    match serde_json::to_string(node) {
        Ok(inventory) => drop(annotations.insert(INVENTORY.to_string(), inventory)),
        Err(error) => tracing::error!("the inventory of node {} cannot be written: {error}", node.name),
    }
    if settings.dialects.contains(&Dialect::Volcano) {
        // A bound of this dialect's count, and of no other's.
        let counted = Node { max_shares_per_gpu: Some(settings.shares_per_gpu), ..node.clone() };
        let register = node_register::encode(&counted, &settings.dialect());
        annotations.insert(node_register::ANNOTATION.to_string(), register);
    }
    Statement {
        amounts: resources::amounts(node, settings, requested),
        annotations,
        labels: settings.labels.clone(),
    }
}

/// What a node says that Partage has left: nothing.
pub(crate) fn withdrawn() -> Statement {
    Statement::default()
}

/// Takes back whatever this node says by Partage: amounts first, which no label holds up.
pub(crate) async fn withdraw(cluster: &ApiServer) -> Result<(), ClusterError> {
    for part in [change, relabelling] {
        if let Some(needed) = part(&withdrawn(), &cluster.node.read().await?) {
            cluster.node.apply(&needed).await?;
        }
    }
    Ok(())
}

/// Keeps the node saying what it shall, until nobody is left to say what that is. `None` is not known yet: nothing is changed.
///
/// Labels go in a patch of their own, with pauses of their own: who forbids one does not hold up amounts.
pub(crate) async fn keep_published(cluster: ApiServer, mut wanted: watch::Receiver<Option<Statement>>) {
    let shown = cluster.node.watch();
    let mut changed = shown.changed();
    let (mut amounts, mut labels) = (Attempts::new(&cluster), Attempts::new(&cluster));
    loop {
        let statement = wanted.borrow_and_update().clone();
        changed.mark_unchanged();
        let node = shown.by_name("", cluster.node.name());
        let again = match statement.zip(node) {
            None => None,
            Some((statement, node)) => match (change(&statement, &node), relabelling(&statement, &node)) {
                (Some(needed), _) => amounts.make(&cluster, needed).await,
                (None, Some(needed)) => labels.make(&cluster, needed).await,
                (None, None) => None,
            },
        };
        let later = async {
            match again {
                Some(at) => tokio::time::sleep_until(at).await,
                None => std::future::pending().await,
            }
        };
        // While one waits to be tried again it may be shown, or something else wanted.
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

/// Changes of one kind, with pauses between those that fail or are undone.
struct Attempts {
    backoff: RetryBackoff,
    ready: Instant,
    last: Option<(NodePatch, Instant)>,
    /// What was complained of last: the same is not said again.
    failing: String,
}

impl Attempts {
    fn new(cluster: &ApiServer) -> Attempts {
        let backoff = cluster.client.backoff();
        Attempts { backoff, ready: Instant::now(), last: None, failing: String::new() }
    }

    /// Makes a change if it is time to. `Some` is when to try again.
    async fn make(&mut self, cluster: &ApiServer, needed: NodePatch) -> Option<Instant> {
        if Instant::now() < self.ready {
            return Some(self.ready);
        }
        let outcome = cluster.node.apply(&needed).await;
        match &self.last {
            // Mended a moment ago, and undone: somebody else wants something else. Kubelet does so once, when it restarts.
            Some((before, at)) if *before == needed && at.elapsed() < PEACE => {}
            _ if outcome.is_ok() => self.backoff.reset(),
            _ => {}
        }
        self.ready = Instant::now() + self.backoff.next_delay();
        if let Err(error) = outcome {
            self.complain(cluster, &error);
            return Some(self.ready);
        }
        self.failing.clear();
        self.last = Some((needed, Instant::now()));
        None
    }

    fn complain(&mut self, cluster: &ApiServer, error: &ClusterError) {
        let words = error.to_string();
        if self.failing == words {
            tracing::debug!("{words}");
            return;
        }
        tracing::warn!("{words}");
        // Who is away hears of no event; who forbids something does.
        if matches!(error, ClusterError::Rejected { .. } | ClusterError::Forbidden { .. }) {
            cluster.node_event(Severity::Warning, "PublishRefused", &words);
        }
        self.failing = words;
    }
}

/// Keys of the node that are ours.
///
/// The admission policy reads the labels in it, too: they come last.
#[derive(Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase", default)]
struct Owned {
    amounts: BTreeSet<String>,
    annotations: BTreeSet<String>,
    labels: BTreeSet<String>,
}

impl Owned {
    /// What the node says is ours. A text that nobody of us wrote owns nothing.
    fn read(node: &NodeView) -> Owned {
        node.annotations.get(PUBLISHED).and_then(|text| serde_json::from_str(text).ok()).unwrap_or_default()
    }

    /// Writes it down with a change, where the node says something else.
    fn record(&self, node: &NodeView, change: &mut NodePatch) {
        let record = (*self != Owned::default()).then(|| serde_json::to_string(self).ok()).flatten();
        if node.annotations.get(PUBLISHED) != record.as_ref() {
            change.annotations.insert(PUBLISHED.to_string(), record);
        }
    }
}

/// What has to be changed of a node's amounts and annotations so that it says this; `None` where it does. Which labels are ours
/// stays as it was: the admission policy goes by that when one is removed.
fn change(statement: &Statement, node: &NodeView) -> Option<NodePatch> {
    let before = Owned::read(node);
    let mut owned = Owned {
        amounts: statement.amounts.keys().cloned().collect(),
        labels: before.labels.clone(),
        ..Owned::default()
    };
    let mut change = NodePatch {
        capacity: statement.amounts.clone(),
        removed_capacity: before.amounts.difference(&owned.amounts).cloned().collect(),
        annotations: texts(
            &statement.annotations,
            &node.annotations,
            &before.annotations,
            &mut owned.annotations,
        ),
        labels: BTreeMap::new(),
    };
    change.capacity.retain(|name, amount| !shows(node, name, *amount));
    change
        .removed_capacity
        .retain(|name| node.capacity.contains_key(name) || node.allocatable.contains_key(name));
    owned.record(node, &mut change);
    (change != NodePatch::default()).then_some(change)
}

/// The same of its labels, once there is nothing else to change.
fn relabelling(statement: &Statement, node: &NodeView) -> Option<NodePatch> {
    let before = Owned::read(node);
    let mut owned = Owned { labels: BTreeSet::new(), ..before };
    let labels = texts(&statement.labels, &node.labels, &before.labels, &mut owned.labels);
    let mut change = NodePatch { labels, ..NodePatch::default() };
    owned.record(node, &mut change);
    (change != NodePatch::default()).then_some(change)
}

/// Labels or annotations that differ, with those that are ours no longer wanted.
fn texts(
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
        // Somebody else's that is as it should be stays somebody else's.
        if differs || before.contains(key) {
            owned.insert(key.clone());
        }
    }
    let left = before.iter().filter(|key| !wanted.contains_key(*key) && shown.contains_key(*key));
    change.extend(left.map(|key| (key.clone(), None)));
    change
}

/// Whether a node shows this amount. The API server writes 100000 as 100k.
fn shows(node: &NodeView, name: &str, amount: u64) -> bool {
    let is = |amounts: &BTreeMap<String, String>| {
        let shown = amounts.get(name).and_then(|text| text.parse::<Quantity>().ok());
        shown.and_then(|quantity| quantity.to_count().ok()) == Some(amount)
    };
    is(&node.capacity) && is(&node.allocatable)
}

#[cfg(test)]
mod tests;
