//! A device plugin that binds late: the agent's plugin with an allocator whose result a test decides.
//! `Allocate` does not name the container, so its response is only a new CDI name, recorded on disk.
//! `PreStartContainer` has the same device ids when the container is about to be created. By then kubelet knows the
//! container of the ids: the plugin asks kubelet, and writes the CDI file under the name of the response.
//! [`LatePluginSettings::edits`] decides what a container gets.

mod answer_record;

use answer_record::AnswerRecord;
use partage_agent::ContainerKey;
use partage_agent::device_owner::{ContainerRuntime, DeviceHolder, DeviceOwners};
use partage_agent::device_plugin::{
    DeviceAllocator, DeviceId, DevicePluginHandle, ListedDevice, Refusal, RefusalReason,
};
use serde::Serialize;
use std::collections::{BTreeSet, VecDeque};
use std::fmt;
use std::io;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};
use tokio::runtime::Handle;
use tokio::sync::watch;

/// The reason why the plugin did not start.
#[derive(Debug, thiserror::Error)]
pub enum LatePluginError {
    /// The record of earlier responses could not be read.
    #[error("cannot read the plugin's record {path}")]
    Record {
        /// Path of the record file.
        path: PathBuf,
        /// Error of the operating system.
        source: io::Error,
    },
}

/// What a plugin serves, and where.
#[derive(Clone)]
pub struct LatePluginSettings {
    /// The extended resource, such as `example.com/late`.
    pub resource: String,
    /// How many devices there are.
    pub devices: usize,
    /// Kubelet's directory (`/var/lib/kubelet` on the node), as this process sees it.
    pub kubelet: PathBuf,
    /// The directory of pod logs (`/var/log/pods` on the node), as this process sees it. Names of pods are read from
    /// it.
    pub pod_logs: PathBuf,
    /// The container runtime's socket, as this process sees it.
    pub runtime: PathBuf,
    /// The directory where the node's container runtime looks for CDI files, as this process sees it.
    pub cdi: PathBuf,
    /// The file that outlives the plugin. It must not be in kubelet's directory of device plugins: kubelet takes any
    /// file there for a checkpoint of its own.
    pub record: PathBuf,
    /// Returns what a container gets.
    pub edits: Arc<dyn Fn(&ContainerIdentity) -> ContainerEdits + Send + Sync>,
}

impl LatePluginSettings {
    /// Returns settings with 64 devices, where every container gets its own name in `GRANT`.
    pub fn new(
        kubelet: &Path,
        pod_logs: &Path,
        runtime: &Path,
        cdi: &Path,
        record: &Path,
    ) -> LatePluginSettings {
        LatePluginSettings {
            resource: "example.com/late".to_string(),
            devices: 64,
            kubelet: kubelet.to_path_buf(),
            pod_logs: pod_logs.to_path_buf(),
            runtime: runtime.to_path_buf(),
            cdi: cdi.to_path_buf(),
            record: record.to_path_buf(),
            edits: Arc::new(|owner| ContainerEdits {
                env: vec![format!("GRANT={owner}")],
                ..ContainerEdits::default()
            }),
        }
    }
}

/// The changes to a container, as in a CDI file.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct ContainerEdits {
    /// Variables of the form `NAME=value`.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub env: Vec<String>,
    /// Device nodes, with permission to use them.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub device_nodes: Vec<EditDeviceNode>,
    /// Mounts of files and directories.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub mounts: Vec<EditMount>,
}

/// A device node of the host in a container.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct EditDeviceNode {
    /// The path in the container.
    pub path: String,
    /// The path on the host, as the container runtime sees it.
    pub host_path: String,
}

/// A file or directory of the host in a container.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct EditMount {
    /// The path on the host, as the container runtime sees it.
    pub host_path: String,
    /// The path in the container.
    pub container_path: String,
    /// Options of mount(8), such as `ro` and `bind`.
    pub options: Vec<String>,
}

/// The container that devices belong to.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord)]
pub struct ContainerIdentity {
    /// Namespace of the pod.
    pub namespace: String,
    /// Name of the pod.
    pub pod: String,
    /// The container's name in the pod.
    pub container: String,
    /// UID of the pod.
    pub uid: String,
}

impl fmt::Display for ContainerIdentity {
    /// Formats the owner as `namespace/pod/container`.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}/{}/{}", self.namespace, self.pod, self.container)
    }
}

/// A CDI file that was written.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct WrittenSpec {
    /// The name after `partage.dev/grant=`.
    pub key: String,
    /// The container that this name was allocated for.
    pub owner: ContainerIdentity,
}

/// An event of the plugin.
#[derive(Debug, Clone)]
pub struct PluginEvent {
    /// The time of the event.
    pub at: Instant,
    /// The kind of event.
    pub what: PluginEventKind,
}

/// The kinds of events.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum PluginEventKind {
    /// Devices were allocated to a container that is not known yet.
    Allocated {
        /// The name in the response.
        key: String,
        /// Ids of the allocated devices.
        ids: BTreeSet<String>,
    },
    /// A container may be created.
    Started {
        /// Ids of the container's devices.
        ids: BTreeSet<String>,
        /// The files that were written: one for each container of the pod that holds exactly these devices. Kubelet
        /// hands the devices of an init container to later containers of the pod.
        written: Vec<WrittenSpec>,
        /// The time from the call to the response.
        took: Duration,
    },
    /// A container may not be created.
    Refused {
        /// Ids of the container's devices.
        ids: BTreeSet<String>,
        /// The message that kubelet got.
        why: String,
    },
}

/// A running plugin. Dropping it ends it; its record remains for the next one.
pub struct LatePlugin {
    giver: Arc<LateBinder>,
    devices: watch::Sender<Vec<ListedDevice>>,
    plugin: DevicePluginHandle,
}

impl LatePlugin {
    /// Starts the plugin on a runtime. Kubelet need not be running yet.
    pub fn start(runtime: &Handle, settings: LatePluginSettings) -> Result<LatePlugin, LatePluginError> {
        let record = AnswerRecord::open(&settings.record)?;
        let device = |number| ListedDevice { id: DeviceId(format!("late-{number}")), healthy: true };
        let devices = watch::Sender::new((0..settings.devices).map(device).collect());
        let giver = Arc::new(LateBinder {
            kubelet: DeviceOwners::new(&settings.kubelet, ContainerRuntime::new(&settings.runtime)),
            record: Mutex::new(record),
            events: Mutex::default(),
            refusals: Mutex::default(),
            settings,
        });
        let folder = giver.settings.kubelet.join("device-plugins");
        let plugin = DevicePluginHandle::start(
            runtime,
            &folder,
            &giver.settings.resource,
            devices.subscribe(),
            giver.clone(),
        );
        Ok(LatePlugin { giver, devices, plugin })
    }

    /// Waits until kubelet watches the list of devices.
    pub async fn wait_until_watched(&self) {
        // The plugin lives as long as `self`, so the channel is open.
        let _ = self.plugin.kubelet_streams().wait_for(|watchers| *watchers > 0).await;
    }

    /// Ends the plugin, and waits until its socket is removed.
    pub async fn stop(self) {
        self.plugin.stop().await;
    }

    /// Returns the events since the start, in order.
    pub fn events(&self) -> Vec<PluginEvent> {
        lock(&self.giver.events).clone()
    }

    /// Returns the ids of all devices.
    pub fn ids(&self) -> Vec<String> {
        self.devices.borrow().iter().map(|device| device.id.0.clone()).collect()
    }

    /// Sets the health of a device. Kubelet is notified at once.
    pub fn set_health(&self, id: &str, healthy: bool) {
        self.devices.send_modify(|devices| {
            for device in devices.iter_mut().filter(|device| device.id.0 == id) {
                device.healthy = healthy;
            }
        });
    }

    /// Refuses the next `times` starts of containers with this message.
    pub fn refuse_starts(&self, times: usize, sentence: &str) {
        lock(&self.giver.refusals).extend(std::iter::repeat_n(sentence.to_string(), times));
    }

    /// Returns the CDI file of a name, whether it was written or not.
    pub fn cdi_file(&self, key: &str) -> PathBuf {
        answer_record::spec_path(&self.giver.settings.cdi, key)
    }
}

/// Provides what the settings define, and records the events.
struct LateBinder {
    settings: LatePluginSettings,
    kubelet: DeviceOwners,
    record: Mutex<AnswerRecord>,
    events: Mutex<Vec<PluginEvent>>,
    refusals: Mutex<VecDeque<String>>,
}

impl DeviceAllocator for LateBinder {
    async fn allocate(&self, _: &str, ids: BTreeSet<DeviceId>) -> Result<ContainerKey, Refusal> {
        let ids: BTreeSet<String> = ids.into_iter().map(|id| id.0).collect();
        let key = lock(&self.record)
            .answer(ids.clone())
            .map_err(|e| Refusal::new(RefusalReason::Failed, format!("cannot record the answer: {e}")))?;
        self.record_event(PluginEventKind::Allocated { key: key.clone(), ids });
        Ok(ContainerKey(key))
    }

    async fn prepare_container(&self, _: &str, ids: BTreeSet<DeviceId>) -> Result<(), Refusal> {
        let begin = Instant::now();
        let given = self.write_specs(&ids).await;
        let ids = ids.into_iter().map(|id| id.0).collect();
        match given {
            Ok(written) => {
                self.record_event(PluginEventKind::Started { ids, written, took: begin.elapsed() });
                Ok(())
            }
            Err(refusal) => {
                self.record_event(PluginEventKind::Refused { ids, why: refusal.sentence() });
                Err(refusal)
            }
        }
    }
}

impl LateBinder {
    fn record_event(&self, what: PluginEventKind) {
        lock(&self.events).push(PluginEvent { at: Instant::now(), what });
    }

    async fn write_specs(&self, ids: &BTreeSet<DeviceId>) -> Result<Vec<WrittenSpec>, Refusal> {
        if let Some(sentence) = lock(&self.refusals).pop_front() {
            return Err(Refusal::new(RefusalReason::Failed, sentence));
        }
        let resource = &self.settings.resource;
        let holders = self
            .kubelet
            .holders(resource, ids, None)
            .await
            .map_err(|error| Refusal::new(RefusalReason::Failed, error.to_string()))?;
        let ids: BTreeSet<String> = ids.iter().map(|id| id.0.clone()).collect();
        let mut record = lock(&self.record);
        let mut written = Vec::new();
        let mut numbers = Vec::new();
        for holder in &holders {
            let owner = self.owner(holder)?;
            let Some(ContainerKey(key)) = holder.key.clone() else {
                return Err(Refusal::new(
                    RefusalReason::Failed,
                    format!("kubelet's checkpoint does not say which name {owner} was given"),
                ));
            };
            // Nothing is written under a name that was not allocated for exactly these ids.
            let Some(answer) = record.get(&key).filter(|answer| answer.ids == ids) else {
                return Err(Refusal::new(
                    RefusalReason::Failed,
                    format!("{key} was never answered for {ids:?}"),
                ));
            };
            numbers.push(answer.number);
            let edits = (self.settings.edits)(&owner);
            answer_record::write_spec(&self.settings.cdi, &key, &owner, &edits).map_err(|e| {
                Refusal::new(RefusalReason::Failed, format!("cannot write the CDI file of {key}: {e}"))
            })?;
            written.push(WrittenSpec { key, owner });
        }
        // An earlier response for any of these ids that kubelet no longer keeps belongs to a pod that is gone. Its name
        // must not be used again.
        let first = numbers.into_iter().min().unwrap_or(0);
        let kept: BTreeSet<ContainerKey> =
            self.kubelet.all().into_iter().flatten().filter_map(|holder| holder.key).collect();
        let gone = |key: &str, answer: &answer_record::AllocationAnswer| {
            let earlier = answer.number < first && !answer.ids.is_disjoint(&ids);
            earlier && !kept.contains(&ContainerKey(key.to_string()))
        };
        let stale = record.answers().filter(|(key, answer)| gone(key, answer));
        let stale: Vec<String> = stale.map(|(key, _)| key.to_string()).collect();
        for key in &stale {
            answer_record::remove_spec(&self.settings.cdi, key)
                .map_err(|e| Refusal::new(RefusalReason::Failed, e.to_string()))?;
        }
        record.remove(&stale).map_err(|e| Refusal::new(RefusalReason::Failed, e.to_string()))?;
        Ok(written)
    }

    fn owner(&self, holder: &DeviceHolder) -> Result<ContainerIdentity, Refusal> {
        let (container, uid) = (holder.container.to_string(), holder.uid.to_string());
        let named = match &holder.name {
            Some((namespace, pod)) => Some((namespace.to_string(), pod.to_string())),
            None => self.find_pod_name(&uid),
        };
        let (namespace, pod) = named.ok_or_else(|| {
            Refusal::new(RefusalReason::Failed, format!("no name is known for the pod {uid}"))
        })?;
        Ok(ContainerIdentity { namespace, pod, container, uid })
    }

    /// Returns namespace and name of a pod. Kubelet names the directory of its logs `namespace_name_uid`, and makes it
    /// before the first container.
    fn find_pod_name(&self, uid: &str) -> Option<(String, String)> {
        std::fs::read_dir(&self.settings.pod_logs).ok()?.flatten().find_map(|entry| {
            let name = entry.file_name().into_string().ok()?;
            match name.split('_').collect::<Vec<_>>().as_slice() {
                [namespace, pod, last] if *last == uid => Some((namespace.to_string(), pod.to_string())),
                _ => None,
            }
        })
    }
}

/// Locks a mutex even if a test panicked while it held the lock: that test has reported its failure already.
fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}
