//! The node's own state, and everything that is done to it.
//!
//! One value holds what the agent knows; the loops around it ([`crate::run`]) call it when something happened. It begins with what
//! earlier agents left ([`known`]), gives containers what their pods were granted ([`start`]), and keeps that on disk ([`save`]).

mod known;
mod save;
mod start;

pub(crate) use known::used_paths;
pub(crate) use save::keep_saving;

use crate::api_server::ApiServer;
use crate::audit::{self, Mismatch};
use crate::checkpoint::Checkpoint;
use crate::containers::lifecycle::{Containers, REMOVE, RemoveStep, Stage};
use crate::identity::{Holder, Kubelet, Runtime};
use crate::inject::Materials;
use crate::plugin::{DeviceId, Nonce};
use crate::refusals::RefusalLog;
use crate::regions::Regions;
use crate::report::Counts;
use crate::settings::Settings;
use crate::suspected::Suspected;
use partage_cluster::{PodCache, Severity};
use partage_core::model::{GpuUuid, Node, PodId, PodUid};
use partage_enforce::gpus::{Inventory, withhold_unhealthy};
use partage_enforce::monitor::MonitorReport;
use partage_enforce::shares::gated_gpus;
use partage_host::cdi;
use partage_host::gpus::Gpus;
use partage_region::failpoint as fault;
use std::collections::{BTreeMap, BTreeSet};
use std::fmt;
use std::ops::Deref;
use std::path::PathBuf;
use std::sync::atomic::AtomicBool;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant, SystemTime, UNIX_EPOCH};
use tokio::sync::Notify;

/// Pods come and go in crowds: who looks through everything when one changes does so no more often than this.
pub(crate) const CROWD: Duration = Duration::from_millis(100);

/// What the agent knows.
pub(crate) struct NodeState {
    parts: Parts,
    settings: Mutex<Arc<Settings>>,
    /// The containers and what they hold.
    containers: Mutex<Containers>,
    /// Held while a pod's record is written to disk or removed from it: of two writers, the one that read the grant first must
    /// not write last.
    record_writes: Mutex<()>,
    /// Notified when a record is not on disk.
    unsaved: Notify,
    pub(crate) truth: Mutex<MonitorReport<Nonce>>,
    /// When the driver last answered all that it was asked.
    pub(crate) looked: Mutex<Instant>,
    /// Containers in which the audit found a bypass lately.
    suspected: Mutex<Suspected>,
    counts: Mutex<Counts>,
    /// What the books do not agree on, as far as it was told.
    mismatched: Mutex<BTreeSet<String>>,
    /// The refusals that were logged.
    pub(crate) refusals: RefusalLog,
    /// A pod is started, changed or forgotten by one at a time.
    busy: Mutex<BTreeMap<PodUid, Arc<tokio::sync::Mutex<()>>>>,
    /// The GPUs whose regions were last set to take turns. By one at a time: who reads the book first must not write last.
    settled: Mutex<BTreeSet<GpuUuid>>,
    /// Something is held that was not, or no longer.
    pub(crate) changed: Notify,
}

/// What the state is made of and does not change: everything around the agent, as it was found.
pub(crate) struct Parts {
    pub(crate) cluster: ApiServer,
    pub(crate) pods: PodCache,
    pub(crate) kubelet: Kubelet,
    pub(crate) runtime: Runtime,
    pub(crate) gpus: Gpus,
    pub(crate) materials: Materials,
    pub(crate) regions: Regions,
    pub(crate) checkpoint: Checkpoint,
    pub(crate) cdi: cdi::Folder,
    /// Whether the NVIDIA runtime may stand between us and a container. It can come while we run.
    pub(crate) nvidia_runtime: AtomicBool,
    /// The simulated node's folder, where the driver is simulated.
    pub(crate) simulated: Option<PathBuf>,
    pub(crate) boot: String,
    pub(crate) inventory: Inventory,
    /// GPUs that an earlier agent said are not to be used.
    pub(crate) were_ill: BTreeSet<GpuUuid>,
}

/// Whoever has the state has all around it.
impl Deref for NodeState {
    type Target = Parts;

    fn deref(&self) -> &Parts {
        &self.parts
    }
}

impl NodeState {
    /// The GPUs on which launches keep to turns now.
    pub(crate) fn gated(&self) -> BTreeSet<GpuUuid> {
        gated_gpus(self.containers().grants().shares().map(|(_, _, share)| share))
    }

    /// Sets the turns of all regions by what the book says now.
    pub(crate) fn settle(&self) {
        let mut settled = lock(&self.settled);
        *settled = self.gated();
        self.regions.settle(&settled);
    }

    /// The same after a region was made by what the book said then: mostly nothing has changed, and many start at once.
    pub(crate) fn settle_after(&self, made_by: &BTreeSet<GpuUuid>) {
        let mut settled = lock(&self.settled);
        let gated = self.gated();
        if gated != *settled || gated != *made_by {
            *settled = gated;
            self.regions.settle(&settled);
        }
    }

    /// From here on nobody else starts, changes or forgets this pod, until the answer is dropped.
    pub(crate) async fn alone_with(&self, uid: &PodUid) -> tokio::sync::OwnedMutexGuard<()> {
        let own = {
            let mut busy = lock(&self.busy);
            // Those that nobody waits for any more.
            busy.retain(|_, one| Arc::strong_count(one) > 1);
            Arc::clone(busy.entry(uid.clone()).or_default())
        };
        own.lock_owned().await
    }

    /// Runs the consistency checks and reports each mismatch once for as long as it lasts. Returns how many there are now.
    pub(crate) fn compare(&self) -> usize {
        let now = self.mismatches();
        let count = now.len();
        for Mismatch { text, pod, event } in audit::news(&mut lock(&self.mismatched), now) {
            let (namespace, name) = logged_name(pod.as_ref());
            tracing::warn!(namespace, pod = name, "mismatch: {text}");
            if let Some((pod, reason)) = pod.as_ref().zip(event) {
                self.cluster.pod_event(pod, Severity::Warning, reason, &text);
            }
        }
        count
    }

    /// What cannot be right: what the ledger finds, and where the records, kubelet and the regions disagree.
    fn mismatches(&self) -> Vec<Mismatch> {
        // Kubelet remembers pods that have finished, or are gone, until it gives their devices again.
        let holds = |uid: &PodUid| self.pods.by_uid(uid).is_some_and(|pod| !pod.is_finished());
        let written = self.kubelet.written();
        let all = self.kubelet.all();
        let held = all.iter().flatten().filter(|holder| holds(&holder.uid));
        let held: Vec<Holder> = held.cloned().collect();
        let on_disk = self.regions.on_disk().into_iter().collect();
        let specs: BTreeSet<String> = self.cdi.names().unwrap_or_default().into_iter().collect();
        let (containers, live) = (self.containers(), self.regions.live());
        let kept = live.iter().map(|(nonce, live)| audit::Kept {
            nonce,
            uid: &live.uid,
            container: &live.container,
            shares: &live.shares,
        });
        let mut wrong = audit::mismatches(&containers, kept, &on_disk, &held);
        let grants = containers.grants();
        let running = |uid: &PodUid| {
            grants.record(uid).filter(|record| record.boot == self.boot && holds(&record.pod.uid))
        };
        let missing = |key: &Nonce, stage: &Stage| {
            let (region, was_prepared) = match stage {
                Stage::Prepared { region, .. } => (region, true),
                // The CDI spec is written after the region, and removed before it.
                _ => (key, specs.contains(&key.0)),
            };
            (was_prepared && !self.regions.is_whole(region)).then(|| self.regions.folder(region))
        };
        wrong.extend(audit::missing_regions(containers.owned(), running, missing));
        if let Some((all, written)) = all.as_ref().zip(written) {
            let running = grants.records().filter(|record| running(&record.pod.uid).is_some());
            wrong.extend(audit::lost_allocations(running, all, written));
        }
        wrong
    }

    /// The GPUs as the driver has them, before anything is withheld for its health.
    pub(crate) fn hardware(&self) -> &Node {
        &self.inventory.node
    }

    pub(crate) fn settings(&self) -> Arc<Settings> {
        Arc::clone(&lock(&self.settings))
    }

    /// The containers and what they hold. No method of the state that locks them may be called while the guard is held.
    pub(crate) fn containers(&self) -> MutexGuard<'_, Containers> {
        lock(&self.containers)
    }

    pub(crate) fn suspected(&self) -> MutexGuard<'_, Suspected> {
        lock(&self.suspected)
    }

    pub(crate) fn counts(&self) -> MutexGuard<'_, Counts> {
        lock(&self.counts)
    }

    pub(crate) fn truth(&self) -> MutexGuard<'_, MonitorReport<Nonce>> {
        lock(&self.truth)
    }

    /// Other settings, or other health: what can be given away is counted anew.
    pub(crate) fn refresh(&self, settings: Option<Settings>) {
        if let Some(settings) = settings {
            *lock(&self.settings) = Arc::new(settings);
        }
        {
            // Under the lock: of two at once, the one that reads the health last must set it last.
            let mut containers = self.containers();
            containers.set_node(offered(self.hardware(), &self.settings(), &self.truth()));
        }
        self.changed.notify_waiters();
    }

    /// The devices of a resource that containers hold, with the indexes of the GPUs that their shares are of. Devices of
    /// containers that were granted nothing yet are on no GPU.
    pub(crate) fn held(&self, resource: &str) -> BTreeMap<DeviceId, BTreeSet<usize>> {
        let mut held: BTreeMap<DeviceId, BTreeSet<usize>> = BTreeMap::new();
        let containers = self.containers();
        for allocation in containers.allocations().filter(|allocation| allocation.resource == resource) {
            // By the grant and not by the region: after a reboot, and on an unhealthy GPU, there may be no region yet.
            let grant = containers.owner(&allocation.nonce).and_then(|owner| containers.grant_of(owner));
            let shares = grant.map_or([].as_slice(), |grant| &grant.shares);
            let gpus: Vec<usize> =
                shares.iter().filter_map(|share| self.hardware().gpu_index(&share.gpu)).collect();
            let each = allocation.ids.len().div_ceil(gpus.len().max(1)).max(1);
            for (at, id) in allocation.ids.iter().enumerate() {
                held.entry(id.clone()).or_default().extend(gpus.get(at / each));
            }
        }
        held
    }

    /// Releases a pod that has ended, and removes its files.
    pub(crate) fn end_pod(&self, uid: &PodUid) {
        fault::point("before-forget");
        let keys = self.containers().end_pod(uid);
        for key in &keys {
            self.remove_container(key);
        }
        // Last: an agent that is killed before this ends the pod again.
        self.remove_record(uid);
        self.settle();
        self.changed.notify_waiters();
    }

    /// Removes everything of one container, in the order of [`REMOVE`].
    pub(crate) fn remove_container(&self, key: &Nonce) {
        let owner = self.containers().owner(key).map(|owner| owner.pod.clone());
        let pod = owner.and_then(|uid| self.pod_id(&uid));
        let failed = |error: &dyn fmt::Display, message: &'static str| {
            let (namespace, name) = logged_name(pod.as_ref());
            tracing::warn!(namespace, pod = name, nonce = %key, %error, "{message}");
        };
        for step in REMOVE {
            match step {
                RemoveStep::Spec => {
                    if let Err(error) = self.cdi.remove(&key.0) {
                        failed(&error, "cannot remove a CDI spec");
                    }
                    fault::point("after-forget-cdi");
                }
                RemoveStep::Region => {
                    self.regions.remove(key);
                    fault::point("after-forget-region");
                }
                RemoveStep::Allocation => {
                    if let Err(error) = self.checkpoint.remove_name(key) {
                        failed(&error, "cannot remove the record of an allocation");
                    }
                }
            }
        }
        self.containers().remove(key);
    }

    /// The namespace and name of a pod, from wherever it is known.
    pub(crate) fn pod_id(&self, uid: &PodUid) -> Option<PodId> {
        let recorded = self.containers().grants().record(uid).map(|record| record.pod.clone());
        recorded.or_else(|| Some(self.pods.by_uid(uid)?.id.clone()))
    }

    pub(crate) fn tell_node(&self, severity: Severity, reason: &'static str, note: &str) {
        self.cluster.node_event(severity, reason, note);
    }
}

/// A pod's namespace and name as fields of a log line; absent where the pod is not known.
pub(crate) fn logged_name(pod: Option<&PodId>) -> (Option<&str>, Option<&str>) {
    (pod.map(|pod| pod.namespace.as_str()), pod.map(|pod| pod.name.as_str()))
}

/// The node as it can be given away: cut as the settings say, without what is ill.
fn offered(hardware: &Node, settings: &Settings, truth: &MonitorReport<Nonce>) -> Node {
    let mut node = hardware.clone();
    node.memory_overcommit_percent = settings.memory_overcommit;
    node.slots_per_gpu = settings.aws_slots;
    withhold_unhealthy(&mut node, &truth.looks);
    node
}

/// In nanoseconds since 1970.
pub(crate) fn now() -> u64 {
    let since = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
    u64::try_from(since.as_nanos()).unwrap_or(u64::MAX)
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    // Every change under these locks is whole.
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}
