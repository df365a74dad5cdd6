//! Creates node objects without machines, so that a real kube-scheduler can be loaded with thousands of nodes.
//!
//! Each has the name, labels, capacity and GPU inventory of a node in a snapshot, is Ready, and is kept Ready by
//! renewing its Lease as a kubelet does. No containers run there: a pod bound to a fake node stays Pending with its
//! `nodeName` set. Grants in the snapshot are not made into pods.
//!
//! ```no_run
//! # async fn load(client: kube::Client) -> Result<(), Box<dyn std::error::Error>> {
//! use partage_testkit::fake_nodes::{self, FakeNodes, FakeNodesOptions, NodeTemplate};
//! let snapshot = fake_nodes::generate_snapshot(5000, &NodeTemplate::default())?;
//! let nodes = FakeNodes::start(client, &snapshot, FakeNodesOptions::default()).await?;
//! // schedule
//! nodes.delete().await?;
//! # Ok(())
//! # }
//! ```

mod heartbeats;
mod objects;
mod retry;
mod snapshot;

pub use objects::{GROUP_LABEL, INVENTORY_ANNOTATION, gpu_count};
pub use snapshot::{NodeTemplate, generate_snapshot, read_snapshot};

use futures::{StreamExt, TryStreamExt, stream};
use heartbeats::HeartbeatSchedule;
use k8s_openapi::api::coordination::v1::Lease;
use k8s_openapi::api::core::v1::Node;
use k8s_openapi::apimachinery::pkg::api::resource::Quantity;
use kube::api::{DeleteParams, ListParams, Patch, PatchParams, PostParams};
use kube::core::Status;
use kube::{Api, Client};
use partage_core::cluster_file::{ClusterFile, ClusterFileError};
use partage_core::model;
use retry::with_retries;
use serde_json::json;
use std::collections::BTreeMap;
use std::path::PathBuf;
use std::sync::atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, OnceLock, PoisonError};
use std::time::Duration;
use tokio::sync::Semaphore;
use tokio::task::JoinHandle;
use tokio_util::sync::CancellationToken;
use tokio_util::task::TaskTracker;

/// Namespace of the nodes' Leases.
const LEASE_NAMESPACE: &str = "kube-node-lease";

/// Maximum number of heartbeats in flight. Higher than the number of concurrent creations: a late heartbeat makes a
/// node NotReady.
const MAX_CONCURRENT_HEARTBEATS: usize = 32;

/// How fake nodes are created and kept Ready.
pub struct FakeNodesOptions {
    group: String,
    labels: BTreeMap<String, String>,
    resources: Box<ResourcesFn>,
    concurrency: usize,
    progress: Box<ProgressFn>,
}

type ResourcesFn = dyn Fn(&model::Node) -> BTreeMap<String, Quantity> + Send + Sync;
type ProgressFn = dyn Fn(usize, usize) + Send + Sync;

impl Default for FakeNodesOptions {
    /// Offers one `partage.dev/gpu` per offered GPU, and creates 16 nodes concurrently.
    fn default() -> FakeNodesOptions {
        FakeNodesOptions {
            group: "fake".into(),
            labels: BTreeMap::new(),
            resources: Box::new(gpu_count),
            concurrency: 16,
            progress: Box::new(|_, _| {}),
        }
    }
}

impl FakeNodesOptions {
    /// Sets the value of the label [`GROUP_LABEL`], which distinguishes these fake nodes from others in the same
    /// cluster.
    #[must_use]
    pub fn group(mut self, group: impl Into<String>) -> FakeNodesOptions {
        self.group = group.into();
        self
    }

    /// Adds a label to every node.
    #[must_use]
    pub fn label(mut self, key: impl Into<String>, value: impl Into<String>) -> FakeNodesOptions {
        self.labels.insert(key.into(), value.into());
        self
    }

    /// Sets the extended resources of a node, in place of [`gpu_count`].
    #[must_use]
    pub fn resources(
        mut self,
        resources: impl Fn(&model::Node) -> BTreeMap<String, Quantity> + Send + Sync + 'static,
    ) -> FakeNodesOptions {
        self.resources = Box::new(resources);
        self
    }

    /// Sets how many nodes are created concurrently.
    #[must_use]
    pub fn concurrency(mut self, requests: usize) -> FakeNodesOptions {
        self.concurrency = requests.max(1);
        self
    }

    /// Sets a function that is called after every node with the number of created nodes and the total.
    #[must_use]
    pub fn progress(mut self, progress: impl Fn(usize, usize) + Send + Sync + 'static) -> FakeNodesOptions {
        self.progress = Box::new(progress);
        self
    }
}

/// Why fake nodes could not be created or kept.
#[derive(Debug, thiserror::Error)]
pub enum FakeNodesError {
    /// A node of this name exists and is not a fake node of this group.
    #[error(
        "node {name} already exists and is not one of these fake nodes: delete it, or rename the node in the snapshot"
    )]
    NameTaken {
        /// Name of the node.
        name: String,
    },
    /// The API server refused a request.
    #[error("cannot {doing} {name}: {source}")]
    Refused {
        /// Operation that failed, as a verb phrase.
        doing: &'static str,
        /// The name of the object.
        name: String,
        /// The server's error, after retries if they could help.
        source: Box<kube::Error>,
    },
    /// A node's inventory cannot be written as JSON.
    #[error("cannot write the inventory of node {name}: {source}")]
    Inventory {
        /// Name of the node.
        name: String,
        /// The error of the serializer.
        source: serde_json::Error,
    },
    /// The snapshot file cannot be read.
    #[error("cannot read {}: {source}", file.display())]
    File {
        /// The path of the file.
        file: PathBuf,
        /// The error of the operating system.
        source: std::io::Error,
    },
    /// The file is not a valid snapshot.
    #[error("{}: {source}", file.display())]
    Snapshot {
        /// The path of the file.
        file: PathBuf,
        /// The position and the reason.
        source: ClusterFileError,
    },
}

/// Fake nodes that are kept Ready until they are stopped or dropped.
///
/// Afterwards kube-controller-manager marks them NotReady within its grace period.
pub struct FakeNodes {
    client: Client,
    group: String,
    fleet: Arc<HeartbeatState>,
    end: CancellationToken,
    heartbeats: Option<JoinHandle<()>>,
}

impl FakeNodes {
    /// Creates a node for each node of the snapshot, and returns when all exist and pods can be scheduled to them.
    ///
    /// Heartbeats begin with the first node. Nodes of an earlier run are adopted if their inventory, labels and kinds
    /// of resources match. If a node fails, those created so far stay: [`delete`] removes them.
    pub async fn start(
        client: Client,
        snapshot: &ClusterFile,
        plan: FakeNodesOptions,
    ) -> Result<FakeNodes, FakeNodesError> {
        let all = snapshot.nodes.len();
        let fleet = Arc::new(HeartbeatState {
            leases: Api::namespaced(client.clone(), LEASE_NAMESPACE),
            slots: (0..all).map(|_| OnceLock::new()).collect(),
            concurrency: Arc::new(Semaphore::new(MAX_CONCURRENT_HEARTBEATS)),
            late: AtomicBool::new(false),
            renewed: AtomicU64::new(0),
            missed: AtomicU64::new(0),
            last_miss: Mutex::new(None),
        });
        let end = CancellationToken::new();
        let heartbeats = tokio::spawn(run_heartbeats(Arc::clone(&fleet), end.clone()));
        let fakes = FakeNodes {
            client: client.clone(),
            group: plan.group.clone(),
            fleet,
            end,
            heartbeats: Some(heartbeats),
        };
        let nodes: Api<Node> = Api::all(client);
        let made = AtomicUsize::new(0);
        let (nodes, made, plan) = (&nodes, &made, &plan);
        let (slots, late) = (&fakes.fleet.slots, &fakes.fleet.late);
        stream::iter(snapshot.nodes.iter().zip(slots))
            .map(Ok)
            .try_for_each_concurrent(plan.concurrency, |(node, node_slot)| async move {
                // Heartbeats have priority: on a busy machine nodes are created later, and existing nodes stay Ready.
                while late.load(Ordering::Relaxed) {
                    tokio::time::sleep(Duration::from_millis(50)).await;
                }
                let created = create(nodes, node, plan).await?;
                let lease = objects::lease(&created, &plan.group);
                let _ = node_slot.set(FakeNode { lease, there: AtomicBool::new(false) });
                (plan.progress)(made.fetch_add(1, Ordering::Relaxed) + 1, all);
                Ok(())
            })
            .await?;
        Ok(fakes)
    }

    /// Returns the number of nodes.
    pub fn len(&self) -> usize {
        self.fleet.slots.len()
    }

    /// Returns whether the snapshot had no nodes.
    pub fn is_empty(&self) -> bool {
        self.fleet.slots.is_empty()
    }

    /// Returns the number of successful heartbeats.
    pub fn renewed(&self) -> u64 {
        self.fleet.renewed.load(Ordering::Relaxed)
    }

    /// Returns the number of heartbeats that failed after all retries. A node that misses two in a row may become
    /// NotReady.
    pub fn missed_heartbeats(&self) -> u64 {
        self.fleet.missed.load(Ordering::Relaxed)
    }

    /// Returns the error of the last failed heartbeat.
    pub fn last_heartbeat_error(&self) -> Option<String> {
        self.fleet.last_miss.lock().unwrap_or_else(PoisonError::into_inner).clone()
    }

    /// Stops the heartbeats and keeps the nodes. No heartbeat is in flight when this returns.
    pub async fn stop(mut self) {
        self.end.cancel();
        if let Some(heartbeats) = self.heartbeats.take() {
            let _ = heartbeats.await;
        }
    }

    /// Stops the heartbeats and deletes the nodes and their Leases.
    pub async fn delete(self) -> Result<(), FakeNodesError> {
        let (client, group) = (self.client.clone(), self.group.clone());
        self.stop().await;
        delete(client, &group).await
    }
}

impl Drop for FakeNodes {
    fn drop(&mut self) {
        self.end.cancel();
    }
}

/// Deletes the fake nodes of a group and their Leases, also those of another process.
pub async fn delete(client: Client, group: &str) -> Result<(), FakeNodesError> {
    let ours = ListParams::default().labels(&format!("{GROUP_LABEL}={group}"));
    let how = DeleteParams::default();
    let nodes: Api<Node> = Api::all(client.clone());
    with_retries("delete nodes of the group", group, || nodes.delete_collection(&how, &ours)).await?;
    let leases: Api<Lease> = Api::namespaced(client, LEASE_NAMESPACE);
    with_retries("delete leases of the group", group, || leases.delete_collection(&how, &ours)).await?;
    Ok(())
}

async fn create(
    nodes: &Api<Node>,
    of: &model::Node,
    plan: &FakeNodesOptions,
) -> Result<Node, FakeNodesError> {
    let name = of.name.as_str();
    let wanted = objects::node(of, &plan.group, &plan.labels, (plan.resources)(of))
        .map_err(|source| FakeNodesError::Inventory { name: name.into(), source })?;
    let params = PostParams::default();
    let posted = with_retries("create node", name, || nodes.create(&params, &wanted)).await;
    let mut created = match posted {
        Err(FakeNodesError::Refused { source, .. }) if is_api_error(&source, Status::is_already_exists) => {
            // The response was lost, or an earlier run was killed.
            let there = with_retries("read node", name, || nodes.get(name)).await?;
            if !objects::is_same_node(&there, &wanted) {
                return Err(FakeNodesError::NameTaken { name: name.into() });
            }
            // A Lease alone does not revive a node that was marked NotReady: its kubelet has to report that it is
            // Ready.
            let (how, ready) = (PatchParams::default(), Patch::Merge(json!({"status": wanted.status})));
            with_retries("report ready node", name, || nodes.patch_status(name, &how, &ready)).await?
        }
        posted => posted?,
    };
    // The API server taints every new node not-ready. kube-controller-manager would remove 9 of these taints a second:
    // nine minutes for 5,000 nodes.
    if created.spec.as_ref().and_then(|spec| spec.taints.as_ref()).is_some_and(|taints| !taints.is_empty()) {
        let (how, untainted) = (PatchParams::default(), Patch::Merge(json!({"spec": {"taints": null}})));
        created =
            with_retries("remove the taint of node", name, || nodes.patch(name, &how, &untainted)).await?;
    }
    Ok(created)
}

fn is_api_error(error: &kube::Error, reason: impl FnOnce(&Status) -> bool) -> bool {
    matches!(error, kube::Error::Api(status) if reason(status))
}

/// The state of the heartbeats. A slot is empty until its node exists.
struct HeartbeatState {
    leases: Api<Lease>,
    slots: Vec<OnceLock<FakeNode>>,
    concurrency: Arc<Semaphore>,
    /// Whether heartbeats are delayed: no other requests should be sent to the API server now.
    late: AtomicBool,
    renewed: AtomicU64,
    missed: AtomicU64,
    last_miss: Mutex<Option<String>>,
}

struct FakeNode {
    lease: Lease,
    /// Whether the Lease exists.
    there: AtomicBool,
}

async fn run_heartbeats(fleet: Arc<HeartbeatState>, end: CancellationToken) {
    /// Renewals that are due within one tick are sent together.
    const TICK_INTERVAL: Duration = Duration::from_millis(50);
    const LATE_THRESHOLD: Duration = Duration::from_secs(1);
    let mut schedule = HeartbeatSchedule::new(fleet.slots.len());
    let started = tokio::time::Instant::now();
    let mut ticks = tokio::time::interval(TICK_INTERVAL);
    ticks.set_missed_tick_behavior(tokio::time::MissedTickBehavior::Skip);
    let in_flight = TaskTracker::new();
    while end.run_until_cancelled(ticks.tick()).await.is_some() {
        let now = started.elapsed();
        fleet.late.store(false, Ordering::Relaxed);
        for index in schedule.due(now) {
            let Ok(permit) = Arc::clone(&fleet.concurrency).acquire_owned().await else { return };
            fleet.late.store(started.elapsed() - now > LATE_THRESHOLD, Ordering::Relaxed);
            let fleet = Arc::clone(&fleet);
            in_flight.spawn(async move {
                let _permit = permit;
                if let Some(node_slot) = fleet.slots.get(index).and_then(OnceLock::get) {
                    send_heartbeat(&fleet, node_slot).await;
                }
            });
        }
    }
    in_flight.close();
    in_flight.wait().await;
}

async fn send_heartbeat(fleet: &HeartbeatState, node_slot: &FakeNode) {
    match create_or_renew_lease(&fleet.leases, node_slot).await {
        Ok(()) => drop(fleet.renewed.fetch_add(1, Ordering::Relaxed)),
        Err(error) => {
            fleet.missed.fetch_add(1, Ordering::Relaxed);
            *fleet.last_miss.lock().unwrap_or_else(PoisonError::into_inner) = Some(error.to_string());
            // Another client may have deleted the Lease.
            node_slot.there.store(false, Ordering::Relaxed);
        }
    }
}

/// Sends one request: creates the Lease the first time, and patches it later, because the API server accepts no PUT of
/// a Lease without the version that was read before.
async fn create_or_renew_lease(leases: &Api<Lease>, node_slot: &FakeNode) -> Result<(), FakeNodesError> {
    let name = node_slot.lease.metadata.name.as_deref().unwrap_or_default();
    if !node_slot.there.load(Ordering::Relaxed) {
        let (params, first) = (PostParams::default(), objects::renewed_lease(&node_slot.lease));
        let created = with_retries("create lease", name, || leases.create(&params, &first)).await;
        match created {
            // The response was lost, or the Lease is from an earlier run.
            Err(FakeNodesError::Refused { source, .. })
                if is_api_error(&source, Status::is_already_exists) => {}
            created => {
                node_slot.there.store(created.is_ok(), Ordering::Relaxed);
                return created.map(drop);
            }
        }
    }
    let (how, renewal) = (PatchParams::default(), Patch::Merge(objects::renewal_patch()));
    with_retries("renew lease", name, || leases.patch(name, &how, &renewal)).await?;
    node_slot.there.store(true, Ordering::Relaxed);
    Ok(())
}
