//! Node objects without machines, so that a real kube-scheduler can be loaded with thousands of nodes.
//!
//! Each has the name, labels, capacity and GPU inventory of a node in a snapshot, is Ready, and is kept Ready by
//! renewing its Lease as a kubelet does. Nobody runs anything there: a pod bound to a fake node stays Pending with
//! its `nodeName` set. Grants in the snapshot are not made into pods.
//!
//! ```no_run
//! # async fn load(client: kube::Client) -> Result<(), Box<dyn std::error::Error>> {
//! use partage_testkit::fake_nodes::{self, FakeNodes, Plan, Template};
//! let snapshot = fake_nodes::inventory(5000, &Template::default())?;
//! let nodes = FakeNodes::start(client, &snapshot, Plan::default()).await?;
//! // schedule
//! nodes.delete().await?;
//! # Ok(())
//! # }
//! ```

mod beats;
mod inventory;
mod objects;
mod write;

pub use inventory::{Template, inventory, read};
pub use objects::{GROUP, INVENTORY, gpu_count};

use beats::Beats;
use futures::{StreamExt, TryStreamExt, stream};
use k8s_openapi::api::coordination::v1::Lease;
use k8s_openapi::api::core::v1::Node;
use k8s_openapi::apimachinery::pkg::api::resource::Quantity;
use kube::api::{DeleteParams, ListParams, Patch, PatchParams, PostParams};
use kube::core::Status;
use kube::{Api, Client};
use partage_core::cluster_file::{ClusterFile, ClusterFileError};
use partage_core::model;
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
use write::retrying;

/// Where the Leases of nodes live.
const LEASES: &str = "kube-node-lease";

/// More than nodes being made: a heartbeat that comes too late costs a node.
const BEATS_AT_ONCE: usize = 32;

/// How fake nodes are made and kept.
pub struct Plan {
    group: String,
    labels: BTreeMap<String, String>,
    resources: Box<Resources>,
    at_once: usize,
    progress: Box<Progress>,
}

type Resources = dyn Fn(&model::Node) -> BTreeMap<String, Quantity> + Send + Sync;
type Progress = dyn Fn(usize, usize) + Send + Sync;

impl Default for Plan {
    /// One `partage.dev/gpu` per GPU offered, 16 nodes made at once.
    fn default() -> Plan {
        Plan {
            group: "fake".into(),
            labels: BTreeMap::new(),
            resources: Box::new(gpu_count),
            at_once: 16,
            progress: Box::new(|_, _| {}),
        }
    }
}

impl Plan {
    /// The value of the label [`GROUP`] that tells these fake nodes from others in the same cluster.
    #[must_use]
    pub fn group(mut self, group: impl Into<String>) -> Plan {
        self.group = group.into();
        self
    }

    /// A label for every node.
    #[must_use]
    pub fn label(mut self, key: impl Into<String>, value: impl Into<String>) -> Plan {
        self.labels.insert(key.into(), value.into());
        self
    }

    /// The extended resources of a node, in place of [`gpu_count`].
    #[must_use]
    pub fn resources(
        mut self,
        resources: impl Fn(&model::Node) -> BTreeMap<String, Quantity> + Send + Sync + 'static,
    ) -> Plan {
        self.resources = Box::new(resources);
        self
    }

    /// How many nodes are made at once.
    #[must_use]
    pub fn at_once(mut self, requests: usize) -> Plan {
        self.at_once = requests.max(1);
        self
    }

    /// Called after every node with how many there are now, and how many there will be.
    #[must_use]
    pub fn progress(mut self, progress: impl Fn(usize, usize) + Send + Sync + 'static) -> Plan {
        self.progress = Box::new(progress);
        self
    }
}

/// Why there are no fake nodes.
#[derive(Debug, thiserror::Error)]
pub enum FakeNodesError {
    /// A node of this name is there and is not one of ours.
    #[error(
        "node {name} exists already and is none of these fake nodes: delete it, or rename the one in the snapshot"
    )]
    NameTaken {
        /// The name.
        name: String,
    },
    /// The API server does not do it.
    #[error("cannot {doing} {name}: {source}")]
    Refused {
        /// What was asked of it.
        doing: &'static str,
        /// With which object.
        name: String,
        /// Its answer, after retries where they could help.
        source: Box<kube::Error>,
    },
    /// A node's inventory cannot be written as JSON.
    #[error("cannot write the inventory of node {name}: {source}")]
    Inventory {
        /// The node.
        name: String,
        /// Why.
        source: serde_json::Error,
    },
    /// The snapshot file cannot be read.
    #[error("cannot read {}: {source}", file.display())]
    File {
        /// The file.
        file: PathBuf,
        /// Why.
        source: std::io::Error,
    },
    /// What is in the file is no snapshot.
    #[error("{}: {source}", file.display())]
    Snapshot {
        /// The file.
        file: PathBuf,
        /// Where and why.
        source: ClusterFileError,
    },
}

/// Fake nodes that are kept Ready until they are stopped or dropped.
///
/// After that kube-controller-manager marks them NotReady within its grace period.
pub struct FakeNodes {
    client: Client,
    group: String,
    fleet: Arc<Fleet>,
    end: CancellationToken,
    beating: Option<JoinHandle<()>>,
}

impl FakeNodes {
    /// Creates a node for each one of the snapshot, and returns when all are there and can be scheduled to.
    ///
    /// Heartbeats begin with the first node. Nodes that an earlier run left are taken over if their inventory, labels
    /// and kinds of resources are the same. Where a node fails, those made so far stay: [`delete`] removes them.
    pub async fn start(
        client: Client,
        snapshot: &ClusterFile,
        plan: Plan,
    ) -> Result<FakeNodes, FakeNodesError> {
        let all = snapshot.nodes.len();
        let fleet = Arc::new(Fleet {
            leases: Api::namespaced(client.clone(), LEASES),
            slots: (0..all).map(|_| OnceLock::new()).collect(),
            at_once: Arc::new(Semaphore::new(BEATS_AT_ONCE)),
            late: AtomicBool::new(false),
            renewed: AtomicU64::new(0),
            missed: AtomicU64::new(0),
            last_miss: Mutex::new(None),
        });
        let end = CancellationToken::new();
        let beating = tokio::spawn(beat(Arc::clone(&fleet), end.clone()));
        let fakes = FakeNodes {
            client: client.clone(),
            group: plan.group.clone(),
            fleet,
            end,
            beating: Some(beating),
        };
        let nodes: Api<Node> = Api::all(client);
        let made = AtomicUsize::new(0);
        let (nodes, made, plan) = (&nodes, &made, &plan);
        let (slots, late) = (&fakes.fleet.slots, &fakes.fleet.late);
        stream::iter(snapshot.nodes.iter().zip(slots))
            .map(Ok)
            .try_for_each_concurrent(plan.at_once, |(node, slot)| async move {
                // Heartbeats go first: on a busy machine nodes come later, and those that are there stay Ready.
                while late.load(Ordering::Relaxed) {
                    tokio::time::sleep(Duration::from_millis(50)).await;
                }
                let created = create(nodes, node, plan).await?;
                let lease = objects::lease(&created, &plan.group);
                let _ = slot.set(Slot { lease, there: AtomicBool::new(false) });
                (plan.progress)(made.fetch_add(1, Ordering::Relaxed) + 1, all);
                Ok(())
            })
            .await?;
        Ok(fakes)
    }

    /// How many nodes there are.
    pub fn len(&self) -> usize {
        self.fleet.slots.len()
    }

    /// Whether the snapshot had no node.
    pub fn is_empty(&self) -> bool {
        self.fleet.slots.is_empty()
    }

    /// How many heartbeats arrived.
    pub fn renewed(&self) -> u64 {
        self.fleet.renewed.load(Ordering::Relaxed)
    }

    /// How many heartbeats failed after all retries. A node that misses two in a row may turn NotReady.
    pub fn missed(&self) -> u64 {
        self.fleet.missed.load(Ordering::Relaxed)
    }

    /// Why the last heartbeat that failed did.
    pub fn last_miss(&self) -> Option<String> {
        self.fleet.last_miss.lock().unwrap_or_else(PoisonError::into_inner).clone()
    }

    /// Ends the heartbeats and leaves the nodes. None is under way when this returns.
    pub async fn stop(mut self) {
        self.end.cancel();
        if let Some(beating) = self.beating.take() {
            let _ = beating.await;
        }
    }

    /// Ends the heartbeats and deletes the nodes and their Leases.
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

/// Deletes the fake nodes of a group and their Leases, whoever made them.
pub async fn delete(client: Client, group: &str) -> Result<(), FakeNodesError> {
    let ours = ListParams::default().labels(&format!("{GROUP}={group}"));
    let how = DeleteParams::default();
    let nodes: Api<Node> = Api::all(client.clone());
    retrying("delete nodes of the group", group, || nodes.delete_collection(&how, &ours)).await?;
    let leases: Api<Lease> = Api::namespaced(client, LEASES);
    retrying("delete leases of the group", group, || leases.delete_collection(&how, &ours)).await?;
    Ok(())
}

async fn create(nodes: &Api<Node>, of: &model::Node, plan: &Plan) -> Result<Node, FakeNodesError> {
    let name = of.name.as_str();
    let wanted = objects::node(of, &plan.group, &plan.labels, (plan.resources)(of))
        .map_err(|source| FakeNodesError::Inventory { name: name.into(), source })?;
    let params = PostParams::default();
    let posted = retrying("create node", name, || nodes.create(&params, &wanted)).await;
    let mut created = match posted {
        Err(FakeNodesError::Refused { source, .. }) if is(&source, Status::is_already_exists) => {
            // An answer that was lost on the way, or an earlier run that was killed.
            let there = retrying("read node", name, || nodes.get(name)).await?;
            if !objects::same(&there, &wanted) {
                return Err(FakeNodesError::NameTaken { name: name.into() });
            }
            // A Lease alone does not bring back a node that was given up: its kubelet has to say that it is Ready.
            let (how, ready) = (PatchParams::default(), Patch::Merge(json!({"status": wanted.status})));
            retrying("report ready node", name, || nodes.patch_status(name, &how, &ready)).await?
        }
        posted => posted?,
    };
    // The API server taints every new node not-ready. kube-controller-manager would take the taint away, 9 nodes
    // a second: nine minutes for 5,000.
    if created.spec.as_ref().and_then(|spec| spec.taints.as_ref()).is_some_and(|taints| !taints.is_empty()) {
        let (how, untainted) = (PatchParams::default(), Patch::Merge(json!({"spec": {"taints": null}})));
        created = retrying("remove the taint of node", name, || nodes.patch(name, &how, &untainted)).await?;
    }
    Ok(created)
}

fn is(error: &kube::Error, reason: impl FnOnce(&Status) -> bool) -> bool {
    matches!(error, kube::Error::Api(status) if reason(status))
}

/// What the heartbeats need of the nodes; a slot is empty until its node is there.
struct Fleet {
    leases: Api<Lease>,
    slots: Vec<OnceLock<Slot>>,
    at_once: Arc<Semaphore>,
    /// Heartbeats wait for each other: nothing else may be asked of the API server now.
    late: AtomicBool,
    renewed: AtomicU64,
    missed: AtomicU64,
    last_miss: Mutex<Option<String>>,
}

struct Slot {
    lease: Lease,
    /// Whether the Lease was created.
    there: AtomicBool,
}

async fn beat(fleet: Arc<Fleet>, end: CancellationToken) {
    /// Renewals due within one tick go out together.
    const TICK: Duration = Duration::from_millis(50);
    const LATE: Duration = Duration::from_secs(1);
    let mut beats = Beats::new(fleet.slots.len());
    let begun = tokio::time::Instant::now();
    let mut ticks = tokio::time::interval(TICK);
    ticks.set_missed_tick_behavior(tokio::time::MissedTickBehavior::Skip);
    let under_way = TaskTracker::new();
    while end.run_until_cancelled(ticks.tick()).await.is_some() {
        let now = begun.elapsed();
        fleet.late.store(false, Ordering::Relaxed);
        for index in beats.due(now) {
            let Ok(permit) = Arc::clone(&fleet.at_once).acquire_owned().await else { return };
            fleet.late.store(begun.elapsed() - now > LATE, Ordering::Relaxed);
            let fleet = Arc::clone(&fleet);
            under_way.spawn(async move {
                let _permit = permit;
                if let Some(slot) = fleet.slots.get(index).and_then(OnceLock::get) {
                    renew(&fleet, slot).await;
                }
            });
        }
    }
    under_way.close();
    under_way.wait().await;
}

async fn renew(fleet: &Fleet, slot: &Slot) {
    match renewed(&fleet.leases, slot).await {
        Ok(()) => drop(fleet.renewed.fetch_add(1, Ordering::Relaxed)),
        Err(error) => {
            fleet.missed.fetch_add(1, Ordering::Relaxed);
            *fleet.last_miss.lock().unwrap_or_else(PoisonError::into_inner) = Some(error.to_string());
            // Somebody may have deleted it.
            slot.there.store(false, Ordering::Relaxed);
        }
    }
}

/// One request: the first time the Lease is created, then it is patched, because the API server takes no PUT of a
/// Lease without the version that was read before.
async fn renewed(leases: &Api<Lease>, slot: &Slot) -> Result<(), FakeNodesError> {
    let name = slot.lease.metadata.name.as_deref().unwrap_or_default();
    if !slot.there.load(Ordering::Relaxed) {
        let (params, first) = (PostParams::default(), objects::renewed(&slot.lease));
        let created = retrying("create lease", name, || leases.create(&params, &first)).await;
        match created {
            // An answer that was lost on the way, or an earlier run.
            Err(FakeNodesError::Refused { source, .. }) if is(&source, Status::is_already_exists) => {}
            created => {
                slot.there.store(created.is_ok(), Ordering::Relaxed);
                return created.map(drop);
            }
        }
    }
    let (how, renewal) = (PatchParams::default(), Patch::Merge(objects::renewal()));
    retrying("renew lease", name, || leases.patch(name, &how, &renewal)).await?;
    slot.there.store(true, Ordering::Relaxed);
    Ok(())
}
