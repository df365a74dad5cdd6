//! Resolves device ids to the containers that hold them, with the help of kubelet and the container runtime.
//!
//! Kubelet's requests name devices, never containers. Its checkpoint records which container holds them, with the pod's UID and
//! the agent's own answer to `Allocate`: the key in it proves that the entry belongs to Partage. Where the checkpoint cannot be
//! read, the agent queries kubelet's PodResources API, which has names but no UIDs and leaves out ordinary init containers; the
//! container runtime has the UIDs.

mod cri;
mod kubelet_checkpoint;
mod pod_resources;
mod runtime_info;

pub use cri::{ContainerRuntime, ContainerState, PodSandbox, RuntimeContainer};
pub use runtime_info::{CdiSupportError, RuntimeInfo};

use crate::containers::ContainerKey;
use crate::device_plugin::DeviceId;
use kubelet_checkpoint::KubeletCheckpoint;
use partage_core::model::{ContainerName, Namespace, PodName, PodUid};
use pod_resources::PodResourcesList;
use std::collections::BTreeSet;
use std::path::{Path, PathBuf};

/// Why the container that holds devices cannot be determined.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum DeviceOwnerError {
    /// Kubelet has not recorded a container for them yet.
    #[error(
        "kubelet has not reported a container for {} of {resource} yet; kubelet retries automatically",
        join(ids)
    )]
    NotAllocated {
        /// The extended resource that kubelet allocates the devices of.
        resource: String,
        /// The devices for which no container was found.
        ids: BTreeSet<DeviceId>,
    },
    /// Several pods hold them.
    #[error(
        "kubelet has allocated {} of {resource} to the pods {}, and the container runtime does not report which of them is running; \
         delete those that should not exist",
        join(ids),
        join(pods)
    )]
    Ambiguous {
        /// The extended resource that kubelet allocates the devices of.
        resource: String,
        /// The devices that more than one pod holds.
        ids: BTreeSet<DeviceId>,
        /// The UIDs of the pods that hold them, at least two.
        pods: BTreeSet<PodUid>,
    },
    /// The pod's name is known, its UID is not.
    #[error(
        "the container runtime has no ready sandbox for {namespace}/{pod}, so its UID is not known yet; kubelet retries automatically"
    )]
    SandboxNotReady {
        /// The namespace of the pod whose sandbox is missing.
        namespace: Namespace,
        /// The name of the pod in its namespace.
        pod: PodName,
    },
    /// Kubelet's PodResources API does not respond.
    #[error("kubelet's PodResources API at {} does not respond: {cause}", socket.display())]
    PodResourcesUnavailable {
        /// The path of kubelet's PodResources socket.
        socket: PathBuf,
        /// The status that it returned, or a timeout.
        cause: String,
    },
    /// The container runtime does not respond.
    #[error("the container runtime at {} does not respond: {cause}; is this the socket that kubelet uses?", socket.display())]
    RuntimeUnavailable {
        /// The path of the CRI socket that was tried.
        socket: PathBuf,
        /// The status that it returned, or a timeout.
        cause: String,
    },
}

fn join<T: std::fmt::Display>(items: &BTreeSet<T>) -> String {
    items.iter().map(T::to_string).collect::<Vec<_>>().join(", ")
}

/// A container that holds devices.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct DeviceHolder {
    /// The UID of its pod.
    pub uid: PodUid,
    /// The container's name in the pod.
    pub container: ContainerName,
    /// The resource of the devices.
    pub resource: String,
    /// The devices that it holds.
    pub ids: BTreeSet<DeviceId>,
    /// The key that the agent answered for it; `None` if the holder is not from kubelet's checkpoint.
    pub key: Option<ContainerKey>,
    /// Whether the answer also has [`partage_host::cdi::SHARED_DEVICE`]; `false` if the holder is not from
    /// kubelet's checkpoint.
    pub shared: bool,
    /// The pod's namespace and name; `None` if the holder is from kubelet's checkpoint.
    pub name: Option<(Namespace, PodName)>,
}

/// Resolves devices to containers: from kubelet's checkpoint, or from PodResources and the container runtime.
#[derive(Debug)]
pub struct DeviceOwners {
    checkpoint: KubeletCheckpoint,
    pod_resources: PodResourcesList,
    runtime: ContainerRuntime,
}

impl DeviceOwners {
    /// Uses the kubelet with this directory (`/var/lib/kubelet`), and its container runtime.
    pub fn new(kubelet_dir: &Path, runtime: ContainerRuntime) -> DeviceOwners {
        DeviceOwners {
            checkpoint: KubeletCheckpoint::new(kubelet_dir),
            pod_resources: PodResourcesList::new(kubelet_dir),
            runtime,
        }
    }

    /// Returns the containers that hold exactly these devices of this resource, all of one pod. There are several if init
    /// containers passed their devices on. Where the checkpoint cannot be read, ordinary init containers are left out.
    ///
    /// `newest` is the key that was last answered for these devices, if it is known. A checkpoint without it is older than that
    /// answer: several of kubelet's threads write the checkpoint, not always in the order of the allocations.
    pub async fn holders(
        &self,
        resource: &str,
        ids: &BTreeSet<DeviceId>,
        newest: Option<&ContainerKey>,
    ) -> Result<Vec<DeviceHolder>, DeviceOwnerError> {
        let mut holders = self.all().unwrap_or_default();
        holders.retain(|holder| holder.resource == resource && holder.ids == *ids);
        let is_old = newest.is_some_and(|_| holders.iter().all(|holder| holder.key.as_ref() != newest));
        if holders.is_empty() || is_old {
            return self.holders_from_pod_resources(resource, ids).await;
        }
        // Of several pods, the one with the newest answer counts: the others are gone, and kubelet has not removed them yet.
        let last = holders.iter().find(|holder| newest.is_some() && holder.key.as_ref() == newest);
        if let Some(uid) = last.map(|holder| holder.uid.clone()) {
            holders.retain(|holder| holder.uid == uid);
        }
        let pods: BTreeSet<PodUid> = holders.iter().map(|holder| holder.uid.clone()).collect();
        if pods.len() > 1 {
            let ready: BTreeSet<PodUid> =
                self.runtime.sandboxes().await?.into_iter().filter(|s| s.ready).map(|s| s.uid).collect();
            let mut running = pods.intersection(&ready);
            match (running.next(), running.next()) {
                (Some(uid), None) => holders.retain(|holder| holder.uid == *uid),
                _ => {
                    return Err(DeviceOwnerError::Ambiguous {
                        resource: resource.into(),
                        ids: ids.clone(),
                        pods,
                    });
                }
            }
        }
        Ok(holders)
    }

    /// Returns every container in kubelet's checkpoint whose answer carries [`crate::device_plugin::CDI_KIND`]. `None` if the
    /// checkpoint cannot be read.
    pub fn all(&self) -> Option<Vec<DeviceHolder>> {
        self.checkpoint.holders()
    }

    /// Returns when kubelet last wrote its checkpoint, in nanoseconds since the epoch.
    pub fn checkpoint_written(&self) -> Option<u64> {
        self.checkpoint.written()
    }

    /// Resolves the holders from PodResources and the runtime's sandboxes.
    async fn holders_from_pod_resources(
        &self,
        resource: &str,
        ids: &BTreeSet<DeviceId>,
    ) -> Result<Vec<DeviceHolder>, DeviceOwnerError> {
        let listed = self.pod_resources.holders(resource, ids).await?;
        if listed.is_empty() {
            return Err(DeviceOwnerError::NotAllocated { resource: resource.into(), ids: ids.clone() });
        }
        let sandboxes = self.runtime.sandboxes().await?;
        let mut holders = Vec::new();
        for (namespace, pod, container) in listed {
            let of_pod = sandboxes.iter().filter(|s| s.ready && s.namespace == namespace && s.pod == pod);
            let Some(newest) = of_pod.max_by_key(|sandbox| sandbox.created) else {
                return Err(DeviceOwnerError::SandboxNotReady { namespace, pod });
            };
            holders.push(DeviceHolder {
                uid: newest.uid.clone(),
                container,
                resource: resource.to_string(),
                ids: ids.clone(),
                key: None,
                shared: false,
                name: Some((namespace, pod)),
            });
        }
        let pods: BTreeSet<PodUid> = holders.iter().map(|holder| holder.uid.clone()).collect();
        match pods.len() {
            1 => Ok(holders),
            _ => Err(DeviceOwnerError::Ambiguous { resource: resource.into(), ids: ids.clone(), pods }),
        }
    }
}

#[cfg(test)]
mod tests;
