//! A device plugin that binds late, and nothing else: the agent's plugin with a giver that a test tells what to give.
//!
//! Kubelet's `Allocate` does not say for which container it is, so the answer is only a fresh CDI name, recorded on
//! disk. `PreStartContainer` comes with the same device ids when the container is about to be created. By then kubelet
//! knows whose they are: the plugin asks, and writes the CDI file under the name it answered. What a container gets is
//! for the test to say, by [`Settings::edits`].

mod record;

use partage_agent::identity::{Holder, Kubelet, Runtime};
use partage_agent::plugin::{ContainerKey, DeviceId, Giver, Listed, Plugin, Refusal};
use record::Record;
use serde::Serialize;
use std::collections::{BTreeSet, VecDeque};
use std::fmt;
use std::io;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};
use tokio::runtime::Handle;
use tokio::sync::watch;

/// Why the plugin did not start.
#[derive(Debug, thiserror::Error)]
pub enum PluginError {
    /// The record of earlier answers could not be read.
    #[error("cannot read the plugin's record {path}")]
    Record {
        /// The file.
        path: PathBuf,
        /// What went wrong.
        source: io::Error,
    },
}

/// What a plugin serves, and where.
#[derive(Clone)]
pub struct Settings {
    /// The extended resource, such as `example.com/late`.
    pub resource: String,
    /// How many devices there are.
    pub devices: usize,
    /// Kubelet's folder (`/var/lib/kubelet` on the node), as this process sees it.
    pub kubelet: PathBuf,
    /// The folder of pod logs (`/var/log/pods` on the node), as this process sees it. It says the names of pods.
    pub pod_logs: PathBuf,
    /// The container runtime's socket, as this process sees it.
    pub runtime: PathBuf,
    /// The folder where the node's container runtime looks for CDI files, as this process sees it.
    pub cdi: PathBuf,
    /// The file that outlives the plugin. Not in kubelet's folder of device plugins: kubelet takes any file there for a
    /// checkpoint of its own.
    pub record: PathBuf,
    /// What a container gets.
    pub edits: Arc<dyn Fn(&Owner) -> Edits + Send + Sync>,
}

impl Settings {
    /// 64 devices; every container gets its own name in `GRANT`.
    pub fn new(kubelet: &Path, pod_logs: &Path, runtime: &Path, cdi: &Path, record: &Path) -> Settings {
        Settings {
            resource: "example.com/late".to_string(),
            devices: 64,
            kubelet: kubelet.to_path_buf(),
            pod_logs: pod_logs.to_path_buf(),
            runtime: runtime.to_path_buf(),
            cdi: cdi.to_path_buf(),
            record: record.to_path_buf(),
            edits: Arc::new(|owner| Edits { env: vec![format!("GRANT={owner}")], ..Edits::default() }),
        }
    }
}

/// What is changed in a container, in the words of a CDI file.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct Edits {
    /// `NAME=value`.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub env: Vec<String>,
    /// Device nodes, with the right to use them.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub device_nodes: Vec<DeviceNode>,
    /// Files and folders.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub mounts: Vec<Mount>,
}

/// A device node of the node in a container.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct DeviceNode {
    /// Where it appears.
    pub path: String,
    /// Where it is, as the container runtime sees it.
    pub host_path: String,
}

/// A file or folder of the node in a container.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct Mount {
    /// Where it is, as the container runtime sees it.
    pub host_path: String,
    /// Where it appears.
    pub container_path: String,
    /// As for mount(8), such as `ro` and `bind`.
    pub options: Vec<String>,
}

/// The container that devices belong to.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord)]
pub struct Owner {
    /// The pod's namespace.
    pub namespace: String,
    /// The pod's name.
    pub pod: String,
    /// The container's name in the pod.
    pub container: String,
    /// The pod's UID.
    pub uid: String,
}

impl fmt::Display for Owner {
    /// `namespace/pod/container`.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}/{}/{}", self.namespace, self.pod, self.container)
    }
}

/// A CDI file that was written.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Written {
    /// The name after `partage.dev/grant=`.
    pub key: String,
    /// The container that was answered this name.
    pub owner: Owner,
}

/// Something that happened.
#[derive(Debug, Clone)]
pub struct Event {
    /// When.
    pub at: Instant,
    /// What.
    pub what: What,
}

/// What can happen.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum What {
    /// Devices were given to a container that is not known yet.
    Allocated {
        /// The name that was answered.
        key: String,
        /// The devices.
        ids: BTreeSet<String>,
    },
    /// A container may be created.
    Started {
        /// Its devices.
        ids: BTreeSet<String>,
        /// The files that were written: one for each container of the pod that holds exactly these devices. Kubelet
        /// gives the devices of an init container to later containers of the pod.
        written: Vec<Written>,
        /// From the call to the answer.
        took: Duration,
    },
    /// A container may not be created.
    Refused {
        /// Its devices.
        ids: BTreeSet<String>,
        /// The sentence that kubelet was told.
        why: String,
    },
}

/// A running plugin. Dropping it ends it; what it recorded is there for the next one.
pub struct LatePlugin {
    giver: Arc<Late>,
    devices: watch::Sender<Vec<Listed>>,
    plugin: Plugin,
}

impl LatePlugin {
    /// Starts on a runtime. Kubelet need not be there yet.
    pub fn start(runtime: &Handle, settings: Settings) -> Result<LatePlugin, PluginError> {
        let record = Record::open(&settings.record)?;
        let device = |number| Listed { id: DeviceId(format!("late-{number}")), healthy: true };
        let devices = watch::Sender::new((0..settings.devices).map(device).collect());
        let giver = Arc::new(Late {
            kubelet: Kubelet::new(&settings.kubelet, Runtime::new(&settings.runtime)),
            record: Mutex::new(record),
            events: Mutex::default(),
            refusals: Mutex::default(),
            settings,
        });
        let folder = giver.settings.kubelet.join("device-plugins");
        let plugin =
            Plugin::start(runtime, &folder, &giver.settings.resource, devices.subscribe(), giver.clone());
        Ok(LatePlugin { giver, devices, plugin })
    }

    /// Waits until kubelet watches the list of devices.
    pub async fn watched(&self) {
        // The plugin lives as long as we do.
        let _ = self.plugin.watched().wait_for(|watchers| *watchers > 0).await;
    }

    /// Ends, and waits until the socket is gone.
    pub async fn stop(self) {
        self.plugin.stop().await;
    }

    /// What happened since the start, in order.
    pub fn events(&self) -> Vec<Event> {
        lock(&self.giver.events).clone()
    }

    /// The ids of all devices.
    pub fn ids(&self) -> Vec<String> {
        self.devices.borrow().iter().map(|device| device.id.0.clone()).collect()
    }

    /// Makes a device healthy or not. Kubelet is told at once.
    pub fn set_health(&self, id: &str, healthy: bool) {
        self.devices.send_modify(|devices| {
            for device in devices.iter_mut().filter(|device| device.id.0 == id) {
                device.healthy = healthy;
            }
        });
    }

    /// Refuses the next `times` starts of containers with a sentence.
    pub fn refuse_starts(&self, times: usize, sentence: &str) {
        lock(&self.giver.refusals).extend(std::iter::repeat_n(sentence.to_string(), times));
    }

    /// The CDI file of a name, whether it was written or not.
    pub fn cdi_file(&self, key: &str) -> PathBuf {
        record::spec_path(&self.giver.settings.cdi, key)
    }
}

/// Gives what the settings say, and writes down what happens.
struct Late {
    settings: Settings,
    kubelet: Kubelet,
    record: Mutex<Record>,
    events: Mutex<Vec<Event>>,
    refusals: Mutex<VecDeque<String>>,
}

impl Giver for Late {
    async fn allocate(&self, _: &str, ids: BTreeSet<DeviceId>) -> Result<ContainerKey, Refusal> {
        let ids: BTreeSet<String> = ids.into_iter().map(|id| id.0).collect();
        let key = lock(&self.record)
            .answer(ids.clone())
            .map_err(|e| Refusal(format!("cannot record the answer: {e}")))?;
        self.log(What::Allocated { key: key.clone(), ids });
        Ok(ContainerKey(key))
    }

    async fn start(&self, _: &str, ids: BTreeSet<DeviceId>) -> Result<(), Refusal> {
        let begin = Instant::now();
        let given = self.give(&ids).await;
        let ids = ids.into_iter().map(|id| id.0).collect();
        match given {
            Ok(written) => {
                self.log(What::Started { ids, written, took: begin.elapsed() });
                Ok(())
            }
            Err(refusal) => {
                self.log(What::Refused { ids, why: refusal.0.clone() });
                Err(refusal)
            }
        }
    }
}

impl Late {
    fn log(&self, what: What) {
        lock(&self.events).push(Event { at: Instant::now(), what });
    }

    async fn give(&self, ids: &BTreeSet<DeviceId>) -> Result<Vec<Written>, Refusal> {
        if let Some(sentence) = lock(&self.refusals).pop_front() {
            return Err(Refusal(sentence));
        }
        let resource = &self.settings.resource;
        let holders =
            self.kubelet.holders(resource, ids, None).await.map_err(|error| Refusal(error.to_string()))?;
        let ids: BTreeSet<String> = ids.iter().map(|id| id.0.clone()).collect();
        let mut record = lock(&self.record);
        let mut written = Vec::new();
        let mut numbers = Vec::new();
        for holder in &holders {
            let owner = self.owner(holder)?;
            let Some(ContainerKey(key)) = holder.key.clone() else {
                return Err(Refusal(format!(
                    "kubelet's checkpoint does not say which name {owner} was given"
                )));
            };
            // Nothing is written under a name that we did not answer for these very ids.
            let Some(answer) = record.get(&key).filter(|answer| answer.ids == ids) else {
                return Err(Refusal(format!("{key} was never answered for {ids:?}")));
            };
            numbers.push(answer.number);
            let edits = (self.settings.edits)(&owner);
            record::write_spec(&self.settings.cdi, &key, &owner, &edits)
                .map_err(|e| Refusal(format!("cannot write the CDI file of {key}: {e}")))?;
            written.push(Written { key, owner });
        }
        // What was answered for any of these ids before, and kubelet no longer keeps, is of a pod that is gone. Its name
        // must not come alive again.
        let first = numbers.into_iter().min().unwrap_or(0);
        let kept: BTreeSet<ContainerKey> =
            self.kubelet.all().into_iter().flatten().filter_map(|holder| holder.key).collect();
        let gone = |key: &str, answer: &record::Answer| {
            let earlier = answer.number < first && !answer.ids.is_disjoint(&ids);
            earlier && !kept.contains(&ContainerKey(key.to_string()))
        };
        let stale = record.answers().filter(|(key, answer)| gone(key, answer));
        let stale: Vec<String> = stale.map(|(key, _)| key.to_string()).collect();
        for key in &stale {
            record::remove_spec(&self.settings.cdi, key).map_err(|e| Refusal(e.to_string()))?;
        }
        record.forget(&stale).map_err(|e| Refusal(e.to_string()))?;
        Ok(written)
    }

    fn owner(&self, holder: &Holder) -> Result<Owner, Refusal> {
        let (container, uid) = (holder.container.to_string(), holder.uid.to_string());
        let named = match &holder.name {
            Some((namespace, pod)) => Some((namespace.to_string(), pod.to_string())),
            None => self.named(&uid),
        };
        let (namespace, pod) = named.ok_or_else(|| Refusal(format!("no name is known for the pod {uid}")))?;
        Ok(Owner { namespace, pod, container, uid })
    }

    /// Namespace and name of a pod. Kubelet calls the folder of its logs `namespace_name_uid`, and makes it before the
    /// first container.
    fn named(&self, uid: &str) -> Option<(String, String)> {
        std::fs::read_dir(&self.settings.pod_logs).ok()?.flatten().find_map(|entry| {
            let name = entry.file_name().into_string().ok()?;
            match name.split('_').collect::<Vec<_>>().as_slice() {
                [namespace, pod, last] if *last == uid => Some((namespace.to_string(), pod.to_string())),
                _ => None,
            }
        })
    }
}

/// A test that failed while it held the lock has told its story; the others go on.
fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}
