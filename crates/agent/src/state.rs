//! The state of the node: its containers, and the connections to everything around the agent.
//!
//! Kubelet's requests and the tasks of a [session](crate::app) share one [`NodeState`]; the operations on containers are in
//! [`crate::containers`].

use crate::api_server::ApiServer;
use crate::cdi_edits::DriverBundle;
use crate::containers::ContainerKey;
use crate::containers::lifecycle::Containers;
use crate::device_owner::{ContainerRuntime, DeviceOwners};
use crate::monitor::suspected_bypasses::SuspectedBypasses;
use crate::refusal_log::RefusalLog;
use crate::regions::ContainerRegions;
use crate::report::AgentCounters;
use crate::settings::AgentSettings;
use crate::store::AgentStore;
use partage_cluster::{PodCache, Severity};
use partage_core::model::{GpuUuid, Node, PodId, PodUid};
use partage_enforce::gpus::{Inventory, withhold_unhealthy};
use partage_enforce::monitor::MonitorReport;
use partage_enforce::shares::throttled_gpus;
use partage_host::cdi;
use partage_host::gpus::NvmlSession;
use std::collections::{BTreeMap, BTreeSet};
use std::path::PathBuf;
use std::sync::atomic::AtomicBool;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant, SystemTime, UNIX_EPOCH};
use tokio::sync::Notify;

/// Minimum interval between two passes over all pods: many pods start and end at the same time.
pub(crate) const MIN_PASS_INTERVAL: Duration = Duration::from_millis(100);

/// The state of a session, shared by all of its tasks.
pub(crate) struct NodeState {
    pub(crate) adapters: NodeAdapters,
    pub(crate) machine: MachineFacts,
    settings: Mutex<Arc<AgentSettings>>,
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
    suspected: Mutex<SuspectedBypasses>,
    counts: Mutex<AgentCounters>,
    /// The mismatches that were reported and still exist.
    pub(crate) reported_mismatches: Mutex<BTreeSet<String>>,
    /// The refusals that were logged.
    pub(crate) refusals: RefusalLog,
    /// A pod is started, changed or ended by one task at a time.
    pod_locks: Mutex<BTreeMap<PodUid, Arc<tokio::sync::Mutex<()>>>>,
    /// The GPUs on which launches were last set to wait for turns. Locked while regions are updated: of two tasks, the one that
    /// read the grants first must not update last.
    throttled: Mutex<BTreeSet<GpuUuid>>,
    /// Notified when shares are granted or released.
    pub(crate) changed: Notify,
}

/// The connections of the agent to everything around it.
pub(crate) struct NodeAdapters {
    pub(crate) cluster: ApiServer,
    pub(crate) pods: PodCache,
    pub(crate) device_owners: DeviceOwners,
    pub(crate) runtime: ContainerRuntime,
    pub(crate) gpus: NvmlSession,
    pub(crate) driver_bundle: DriverBundle,
    pub(crate) regions: ContainerRegions,
    pub(crate) store: AgentStore,
    pub(crate) cdi: cdi::SpecDir,
}

/// Facts about the machine from the start of the session.
pub(crate) struct MachineFacts {
    /// Identifies this boot of the node.
    pub(crate) boot: String,
    pub(crate) inventory: Inventory,
    /// The simulated node's directory, if the driver is simulated.
    pub(crate) simulated: Option<PathBuf>,
    /// Whether NVIDIA's container runtime may change containers too. It can be installed while the agent runs.
    pub(crate) nvidia_runtime: AtomicBool,
    /// GPUs that an earlier agent reported as unhealthy.
    pub(crate) previously_unhealthy: BTreeSet<GpuUuid>,
}

impl NodeState {
    /// Returns the state of a node with these containers. `monitor_report` has the health of its GPUs.
    pub(crate) fn new(
        adapters: NodeAdapters,
        machine: MachineFacts,
        settings: AgentSettings,
        containers: Containers,
        monitor_report: MonitorReport<ContainerKey>,
        counts: AgentCounters,
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
            throttled: Mutex::default(),
            changed: Notify::new(),
        }
    }

    /// Returns the GPUs on which launches wait for turns, by the current grants.
    pub(crate) fn throttled(&self) -> BTreeSet<GpuUuid> {
        throttled_gpus(self.containers().grants().shares().map(|(_, _, share)| share))
    }

    /// Updates all regions with the GPUs on which launches wait for turns.
    pub(crate) fn apply_turns(&self) {
        let mut throttled = lock(&self.throttled);
        *throttled = self.throttled();
        self.adapters.regions.apply_turns(&throttled);
    }

    /// Updates the regions as [`NodeState::apply_turns`] does, unless nothing has changed since a region was created with
    /// `made_with`: many containers start at the same time, and mostly nothing has.
    pub(crate) fn apply_turns_since(&self, made_with: &BTreeSet<GpuUuid>) {
        let mut throttled = lock(&self.throttled);
        let now = self.throttled();
        if now != *throttled || now != *made_with {
            *throttled = now;
            self.adapters.regions.apply_turns(&throttled);
        }
    }

    /// Locks a pod: one task at a time starts, changes or ends it.
    pub(crate) async fn lock_pod(&self, uid: &PodUid) -> tokio::sync::OwnedMutexGuard<()> {
        let own = {
            let mut locks = lock(&self.pod_locks);
            // Locks that no task holds or waits for.
            locks.retain(|_, one| Arc::strong_count(one) > 1);
            Arc::clone(locks.entry(uid.clone()).or_default())
        };
        own.lock_owned().await
    }

    /// Returns the GPUs as the driver reports them, before unhealthy ones are withheld.
    pub(crate) fn hardware(&self) -> &Node {
        &self.machine.inventory.node
    }

    pub(crate) fn settings(&self) -> Arc<AgentSettings> {
        Arc::clone(&lock(&self.settings))
    }

    /// Locks the containers and their grants. No method of the state that locks them may be called while the guard is held.
    pub(crate) fn containers(&self) -> MutexGuard<'_, Containers> {
        lock(&self.containers)
    }

    pub(crate) fn suspected(&self) -> MutexGuard<'_, SuspectedBypasses> {
        lock(&self.suspected)
    }

    pub(crate) fn counts(&self) -> MutexGuard<'_, AgentCounters> {
        lock(&self.counts)
    }

    pub(crate) fn monitor_report(&self) -> MutexGuard<'_, MonitorReport<ContainerKey>> {
        lock(&self.monitor_report)
    }

    /// Applies changed settings, or a changed health of GPUs, to what can be granted.
    pub(crate) fn refresh(&self, settings: Option<AgentSettings>) {
        if let Some(settings) = settings {
            self.adapters.regions.set_throttle_copies(settings.throttle_copies);
            *lock(&self.settings) = Arc::new(settings);
        }
        {
            // Under the lock: of two at once, the one that reads the health last must set it last.
            let mut containers = self.containers();
            containers.set_node(offered(self.hardware(), &self.settings(), &self.monitor_report()));
        }
        self.changed.notify_waiters();
    }

    /// Returns the namespace and name of a pod, from its record or the watch.
    pub(crate) fn pod_id(&self, uid: &PodUid) -> Option<PodId> {
        let recorded = self.containers().grants().record(uid).map(|record| record.pod.clone());
        recorded.or_else(|| Some(self.adapters.pods.by_uid(uid)?.id.clone()))
    }

    /// Records an event about this node.
    pub(crate) fn node_event(&self, severity: Severity, reason: &'static str, note: &str) {
        self.adapters.cluster.node_event(severity, reason, note);
    }
}

/// Returns a pod's namespace and name as fields of a log line; absent if the pod is not known.
pub(crate) fn logged_name(pod: Option<&PodId>) -> (Option<&str>, Option<&str>) {
    (pod.map(|pod| pod.namespace.as_str()), pod.map(|pod| pod.name.as_str()))
}

/// Returns the node as it can be granted: with the settings' limits, and without unhealthy GPUs.
pub(crate) fn offered(
    hardware: &Node,
    settings: &AgentSettings,
    report: &MonitorReport<ContainerKey>,
) -> Node {
    let mut node = hardware.clone();
    node.memory_overcommit_percent = settings.memory_overcommit;
    node.slots_per_gpu = settings.aws_slots;
    withhold_unhealthy(&mut node, &report.samples);
    node
}

/// Returns the current time in nanoseconds since the epoch.
pub(crate) fn now() -> u64 {
    let since = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
    u64::try_from(since.as_nanos()).unwrap_or(u64::MAX)
}

/// Locks a mutex of the state, also after a task panicked while holding it.
pub(crate) fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    // Each change under these locks is one assignment, insertion or removal, or a transition without I/O.
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}
