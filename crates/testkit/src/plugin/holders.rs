//! Who holds device ids, as kubelet knows it.
//!
//! PodResources `List` names pods and containers, but leaves out ordinary init containers and says no UID. Kubelet's
//! checkpoint has every container, its pod's UID and the answer it was given, but no names. Together they say exactly
//! which container was told which name, also when an init container and an ordinary one hold the same ids.

use super::{KIND, Owner, Source};
use base64::Engine;
use base64::engine::general_purpose::STANDARD;
use partage_rpc::deviceplugin::ContainerAllocateResponse;
use partage_rpc::podresources::pod_resources_lister_client::PodResourcesListerClient;
use partage_rpc::podresources::{ListPodResourcesRequest, PodResources};
use partage_rpc::unix;
use prost::Message;
use serde::Deserialize;
use std::collections::{BTreeMap, BTreeSet};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;
use tonic::{Code, Status};

/// Kubelet refuses more than 100 calls a second, after 10 at once.
const PAUSE_AFTER_REFUSAL: Duration = Duration::from_millis(20);
/// Kubelet gives up on `PreStartContainer` after 30 s; leave it time to read our sentence.
const PATIENCE: Duration = Duration::from_secs(20);
const CHECKPOINT: &str = "device-plugins/kubelet_internal_checkpoint";

/// One container that holds the ids, and the name that it was answered.
#[derive(Debug, Clone)]
pub(super) struct Holder {
    /// `None` when the checkpoint does not say.
    pub(super) nonce: Option<String>,
    pub(super) owner: Owner,
    pub(super) source: Source,
}

/// What kubelet says about some ids.
#[derive(Debug)]
pub(super) struct Held {
    /// The containers that hold exactly these ids. They are all of one pod: several, when it has init containers.
    pub(super) by: Vec<Holder>,
    /// Every name that kubelet keeps for any container; `None` when the checkpoint does not say.
    pub(super) kept: Option<BTreeSet<String>>,
}

/// Asks kubelet.
#[derive(Debug)]
pub(super) struct Holders {
    kubelet: PathBuf,
    pod_logs: PathBuf,
    resource: String,
    /// How many lists were begun.
    begun: AtomicU64,
    /// The last list that ended well, with its number.
    last: tokio::sync::Mutex<(u64, Arc<Vec<PodResources>>)>,
}

impl Holders {
    pub(super) fn new(kubelet: &Path, pod_logs: &Path, resource: &str) -> Holders {
        Holders {
            kubelet: kubelet.to_path_buf(),
            pod_logs: pod_logs.to_path_buf(),
            resource: resource.to_string(),
            begun: AtomicU64::new(0),
            last: tokio::sync::Mutex::new((0, Arc::default())),
        }
    }

    /// Who holds these ids.
    pub(super) async fn of(&self, ids: &BTreeSet<String>) -> Result<Held, Status> {
        let pods = self.list().await?;
        let mut pod_of_ids = None;
        let mut listed = None;
        for pod in pods.iter() {
            for container in &pod.containers {
                let devices = container.devices.iter().filter(|d| d.resource_name == self.resource);
                let held: BTreeSet<&String> = devices.flat_map(|d| &d.device_ids).collect();
                if held.iter().any(|id| ids.contains(*id)) {
                    pod_of_ids = Some(pod);
                }
                if held.iter().copied().eq(ids) {
                    listed = Some(container.name.as_str());
                }
            }
        }
        // A checkpoint that cannot be read is as good as none: the list still knows most containers.
        let checkpoint = read_checkpoint(&self.kubelet.join(CHECKPOINT)).unwrap_or_default();
        let ours = checkpoint.iter().filter(|entry| entry.resource_name == self.resource);
        let kept = ours.clone().filter_map(Entry::nonce).collect();
        let entries: Vec<&Entry> = ours.filter(|entry| entry.ids() == ids.iter().collect()).collect();
        if let [first, rest @ ..] = entries.as_slice() {
            if rest.iter().any(|entry| entry.pod_uid != first.pod_uid) {
                return Err(Status::internal(format!("kubelet's checkpoint gives {ids:?} to two pods")));
            }
            let named = match pod_of_ids {
                Some(pod) => Some((pod.namespace.clone(), pod.name.clone())),
                None => self.named(&first.pod_uid),
            };
            let Some((namespace, pod)) = named else {
                return Err(Status::unavailable(format!("no name is known for the pod {}", first.pod_uid)));
            };
            let by = entries
                .iter()
                .map(|entry| Holder {
                    nonce: entry.nonce(),
                    owner: Owner {
                        namespace: namespace.clone(),
                        pod: pod.clone(),
                        container: entry.container_name.clone(),
                        uid: Some(entry.pod_uid.clone()),
                    },
                    source: match listed == Some(&entry.container_name) {
                        true => Source::List,
                        false => Source::Checkpoint,
                    },
                })
                .collect();
            return Ok(Held { by, kept: Some(kept) });
        }
        let (Some(pod), Some(container)) = (pod_of_ids, listed) else {
            return Err(Status::unavailable(format!("kubelet knows no container that holds {ids:?}")));
        };
        let (namespace, pod, container) = (pod.namespace.clone(), pod.name.clone(), container.to_string());
        let owner = Owner { namespace, pod, container, uid: None };
        Ok(Held { by: vec![Holder { nonce: None, owner, source: Source::List }], kept: None })
    }

    /// All pods, from a list that began after this was called. Callers that come at once share one.
    async fn list(&self) -> Result<Arc<Vec<PodResources>>, Status> {
        let seen = self.begun.load(Ordering::SeqCst);
        let mut last = self.last.lock().await;
        if last.0 > seen {
            return Ok(last.1.clone());
        }
        let number = self.begun.fetch_add(1, Ordering::SeqCst) + 1;
        let pods = tokio::time::timeout(PATIENCE, self.ask())
            .await
            .map_err(|_| Status::unavailable("kubelet does not say who holds what"))??;
        let pods = Arc::new(pods);
        *last = (number, pods.clone());
        Ok(pods)
    }

    async fn ask(&self) -> Result<Vec<PodResources>, Status> {
        let socket = self.kubelet.join("pod-resources/kubelet.sock");
        let channel = unix::connect(&socket).await.map_err(|e| Status::unavailable(e.to_string()))?;
        let mut client = PodResourcesListerClient::new(channel);
        loop {
            match client.list(ListPodResourcesRequest {}).await {
                Ok(answer) => return Ok(answer.into_inner().pod_resources),
                Err(refused) if refused.code() == Code::ResourceExhausted => {
                    tokio::time::sleep(PAUSE_AFTER_REFUSAL).await;
                }
                Err(refused) => return Err(refused),
            }
        }
    }

    /// Namespace and name of a pod. Kubelet calls the folder of its logs `namespace_name_uid`, and makes it before the
    /// first container.
    fn named(&self, uid: &str) -> Option<(String, String)> {
        std::fs::read_dir(&self.pod_logs).ok()?.flatten().find_map(|entry| {
            let name = entry.file_name().into_string().ok()?;
            match name.split('_').collect::<Vec<_>>().as_slice() {
                [namespace, pod, last] if *last == uid => Some((namespace.to_string(), pod.to_string())),
                _ => None,
            }
        })
    }
}

/// Kubelet's checkpoint, as far as it matters here.
#[derive(Deserialize)]
#[serde(rename_all = "PascalCase")]
struct Checkpoint {
    data: Data,
}

#[derive(Deserialize)]
#[serde(rename_all = "PascalCase")]
struct Data {
    /// Written as `null` when there are none.
    pod_device_entries: Option<Vec<Entry>>,
}

#[derive(Deserialize)]
#[serde(rename_all = "PascalCase")]
struct Entry {
    #[serde(rename = "PodUID")]
    pod_uid: String,
    container_name: String,
    resource_name: String,
    /// By memory node; a device near to two nodes is there twice.
    #[serde(rename = "DeviceIDs")]
    device_ids: BTreeMap<String, Vec<String>>,
    alloc_resp: String,
}

impl Entry {
    fn ids(&self) -> BTreeSet<&String> {
        self.device_ids.values().flatten().collect()
    }

    /// The name that `Allocate` answered.
    fn nonce(&self) -> Option<String> {
        let answer = STANDARD.decode(&self.alloc_resp).ok()?;
        let answer = ContainerAllocateResponse::decode(answer.as_slice()).ok()?;
        let mut names = answer.cdi_devices.iter();
        names.find_map(|device| Some(device.name.strip_prefix(KIND)?.strip_prefix('=')?.to_string()))
    }
}

fn read_checkpoint(path: &Path) -> Option<Vec<Entry>> {
    let checkpoint: Checkpoint = serde_json::from_slice(&std::fs::read(path).ok()?).ok()?;
    checkpoint.data.pod_device_entries
}
