//! The state of the node: its containers, and the connections to everything around the agent.
//!
//! One value holds what the agent knows. Kubelet's calls and the tasks of a [session](crate::app) work on it; what they do to
//! containers is in [`crate::containers`].

use crate::api_server::ApiServer;
use crate::containers::lifecycle::Containers;
use crate::identity::{Kubelet, Runtime};
use crate::inject::Materials;
use crate::plugin::ContainerKey;
use crate::refusals::RefusalLog;
use crate::regions::Regions;
use crate::report::Counts;
use crate::settings::Settings;
use crate::store::Store;
use crate::suspected::Suspected;
use partage_cluster::{PodCache, Severity};
use partage_core::model::{GpuUuid, Node, PodId, PodUid};
use partage_enforce::gpus::{Inventory, withhold_unhealthy};
use partage_enforce::monitor::MonitorReport;
use partage_enforce::shares::gated_gpus;
use partage_host::cdi;
use partage_host::gpus::Gpus;
use std::collections::{BTreeMap, BTreeSet};
use std::path::PathBuf;
use std::sync::atomic::AtomicBool;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant, SystemTime, UNIX_EPOCH};
use tokio::sync::Notify;

/// Minimum interval between two passes over all pods: pods come and go in crowds.
pub(crate) const MIN_PASS_INTERVAL: Duration = Duration::from_millis(100);

/// What the agent knows.
pub(crate) struct NodeState {
    pub(crate) adapters: Adapters,
    pub(crate) machine: Machine,
    settings: Mutex<Arc<Settings>>,
    /// The containers and what they hold.
    containers: Mutex<Containers>,
    /// Held while a pod's record is written to disk or removed from it: of two writers, the one that read the grant first must
    /// not write last.
    pub(crate) record_writes: Mutex<()>,
    /// Notified when a record is not on disk.
    pub(crate) unsaved: Notify,
    /// What the monitor found in its last poll.
    monitor_report: Mutex<MonitorReport<ContainerKey>>,
    /// When the driver last answered a poll completely.
    pub(crate) last_poll: Mutex<Instant>,
    /// Containers in which the audit found a bypass lately.
    suspected: Mutex<Suspected>,
    counts: Mutex<Counts>,
    /// The mismatches that were reported and still exist.
    pub(crate) reported_mismatches: Mutex<BTreeSet<String>>,
    /// The refusals that were logged.
    pub(crate) refusals: RefusalLog,
    /// A pod is started, changed or ended by one task at a time.
    pod_locks: Mutex<BTreeMap<PodUid, Arc<tokio::sync::Mutex<()>>>>,
    /// The GPUs on which regions were last told to wait for turns. Held while they are told: of two tasks, the one that read
    /// the grants first must not tell last.
    gated: Mutex<BTreeSet<GpuUuid>>,
    /// Notified when something is held that was not, or no longer.
    pub(crate) changed: Notify,
}

/// The connections of the agent to everything around it.
pub(crate) struct Adapters {
    pub(crate) cluster: ApiServer,
    pub(crate) pods: PodCache,
    pub(crate) kubelet: Kubelet,
    pub(crate) runtime: Runtime,
    pub(crate) gpus: Gpus,
    pub(crate) materials: Materials,
    pub(crate) regions: Regions,
    pub(crate) store: Store,
    pub(crate) cdi: cdi::Folder,
}

/// What was found out about the machine when the session began.
pub(crate) struct Machine {
    /// Identifies the boot.
    pub(crate) boot: String,
    pub(crate) inventory: Inventory,
    /// The simulated node's directory, where the driver is simulated.
    pub(crate) simulated: Option<PathBuf>,
    /// Whether NVIDIA's container runtime may change containers too. It can be installed while the agent runs.
    pub(crate) nvidia_runtime: AtomicBool,
    /// GPUs that an earlier agent reported as unhealthy.
    pub(crate) previously_unhealthy: BTreeSet<GpuUuid>,
}

impl NodeState {
    /// Returns the state of a node with these containers. `monitor_report` has the health of its GPUs.
    pub(crate) fn new(
        adapters: Adapters,
        machine: Machine,
        settings: Settings,
        containers: Containers,
        monitor_report: MonitorReport<ContainerKey>,
        counts: Counts,
    ) -> NodeState {
        NodeState {
            adapters,
            machine,
            settings: Mutex::new(Arc::new(settings)),
            containers: Mutex::new(containers),
            record_writes: Mutex::default(),
            unsaved: Notify::new(),
            monitor_report: Mutex::new(monitor_report),
            last_poll: Mutex::new(Instant::now()),
            suspected: Mutex::default(),
            counts: Mutex::new(counts),
            reported_mismatches: Mutex::default(),
            refusals: RefusalLog::default(),
            pod_locks: Mutex::default(),
            gated: Mutex::default(),
            changed: Notify::new(),
        }
    }

    /// The GPUs on which launches wait for turns, by the grants of now.
    pub(crate) fn gated(&self) -> BTreeSet<GpuUuid> {
        gated_gpus(self.containers().grants().shares().map(|(_, _, share)| share))
    }

    /// Tells all regions on which GPUs launches wait for turns.
    pub(crate) fn apply_turns(&self) {
        let mut gated = lock(&self.gated);
        *gated = self.gated();
        self.adapters.regions.apply_turns(&gated);
    }

    /// Does the same after a region was made by the grants of then. Mostly nothing has changed since, and many containers start
    /// at once.
    pub(crate) fn apply_turns_since(&self, made_with: &BTreeSet<GpuUuid>) {
        let mut gated = lock(&self.gated);
        let now = self.gated();
        if now != *gated || now != *made_with {
            *gated = now;
            self.adapters.regions.apply_turns(&gated);
        }
    }

    /// Waits until no other task starts, changes or ends a pod, and keeps them from it until the guard is dropped.
    pub(crate) async fn lock_pod(&self, uid: &PodUid) -> tokio::sync::OwnedMutexGuard<()> {
        let own = {
            let mut locks = lock(&self.pod_locks);
            // Locks that no task holds or waits for.
            locks.retain(|_, one| Arc::strong_count(one) > 1);
            Arc::clone(locks.entry(uid.clone()).or_default())
        };
        own.lock_owned().await
    }

    /// The GPUs as the driver has them, before anything is withheld for its health.
    pub(crate) fn hardware(&self) -> &Node {
        &self.machine.inventory.node
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

    pub(crate) fn monitor_report(&self) -> MutexGuard<'_, MonitorReport<ContainerKey>> {
        lock(&self.monitor_report)
    }

    /// Applies other settings, or another health of GPUs, to what can be granted.
    pub(crate) fn refresh(&self, settings: Option<Settings>) {
        if let Some(settings) = settings {
            *lock(&self.settings) = Arc::new(settings);
        }
        {
            // Under the lock: of two at once, the one that reads the health last must set it last.
            let mut containers = self.containers();
            containers.set_node(offered(self.hardware(), &self.settings(), &self.monitor_report()));
        }
        self.changed.notify_waiters();
    }

    /// The namespace and name of a pod, from wherever it is known.
    pub(crate) fn pod_id(&self, uid: &PodUid) -> Option<PodId> {
        let recorded = self.containers().grants().record(uid).map(|record| record.pod.clone());
        recorded.or_else(|| Some(self.adapters.pods.by_uid(uid)?.id.clone()))
    }

    pub(crate) fn tell_node(&self, severity: Severity, reason: &'static str, note: &str) {
        self.adapters.cluster.node_event(severity, reason, note);
    }
}

/// A pod's namespace and name as fields of a log line; absent where the pod is not known.
pub(crate) fn logged_name(pod: Option<&PodId>) -> (Option<&str>, Option<&str>) {
    (pod.map(|pod| pod.namespace.as_str()), pod.map(|pod| pod.name.as_str()))
}

/// The node as it can be granted: divided as the settings say, without unhealthy GPUs.
pub(crate) fn offered(hardware: &Node, settings: &Settings, report: &MonitorReport<ContainerKey>) -> Node {
    let mut node = hardware.clone();
    node.memory_overcommit_percent = settings.memory_overcommit;
    node.slots_per_gpu = settings.aws_slots;
    withhold_unhealthy(&mut node, &report.looks);
    node
}

/// Now, in nanoseconds since the epoch.
pub(crate) fn now() -> u64 {
    let since = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
    u64::try_from(since.as_nanos()).unwrap_or(u64::MAX)
}

/// Locks a mutex of the state, also after a task panicked with it.
pub(crate) fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    // Each change under these locks is one assignment, insertion or removal, or a transition without I/O.
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}
