//! Whose device ids are these? Kubelet and the container runtime know.
//!
//! Kubelet's calls name devices, never containers. Its checkpoint says who holds them, with the pod's UID and the very answer that
//! our `Allocate` gave: the name in it proves that the entry is ours. Where it cannot be read kubelet is asked for its list of
//! resources, which says names but no UID, and leaves out ordinary init containers; the container runtime has the UID.

mod about;
mod kubelet_checkpoint;
mod list;
mod runtime;

pub use about::About;
pub use runtime::{ContainerState, RunningContainer, Runtime, Sandbox};

use crate::plugin::{ContainerKey, DeviceId};
use kubelet_checkpoint::Checkpoint;
use list::PodResourcesList;
use partage_core::model::{ContainerName, Namespace, PodName, PodUid};
use std::collections::BTreeSet;
use std::path::{Path, PathBuf};

/// Why it is not known whose devices are meant.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum IdentityError {
    /// Nobody has them, as far as kubelet says.
    #[error(
        "kubelet knows no container that holds {} of {resource} yet; it tries again by itself",
        written(ids)
    )]
    Nobody {
        /// The resource.
        resource: String,
        /// The devices.
        ids: BTreeSet<DeviceId>,
    },
    /// Several pods have them.
    #[error(
        "kubelet gives {} of {resource} to the pods {}, and the container runtime does not say which of them lives; delete those that \
         should not",
        written(ids),
        written(pods)
    )]
    Several {
        /// The resource.
        resource: String,
        /// The devices.
        ids: BTreeSet<DeviceId>,
        /// The pods.
        pods: BTreeSet<PodUid>,
    },
    /// The pod's name is known, its UID is not.
    #[error(
        "the container runtime has no ready sandbox for {namespace}/{pod}, so its UID is not known yet; kubelet tries again by itself"
    )]
    NotReady {
        /// The pod's namespace.
        namespace: Namespace,
        /// Its name.
        pod: PodName,
    },
    /// Kubelet does not say who holds what.
    #[error("kubelet does not say who holds what, over {}: {why}", socket.display())]
    Kubelet {
        /// Its socket.
        socket: PathBuf,
        /// What it said.
        why: String,
    },
    /// The container runtime does not answer.
    #[error("the container runtime at {} does not answer: {why}; is this the socket that kubelet uses?", socket.display())]
    Runtime {
        /// Its socket.
        socket: PathBuf,
        /// What went wrong.
        why: String,
    },
}

fn written<T: std::fmt::Display>(items: &BTreeSet<T>) -> String {
    items.iter().map(T::to_string).collect::<Vec<_>>().join(", ")
}

/// A container that holds devices.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Holder {
    /// Its pod.
    pub uid: PodUid,
    /// Its name in the pod.
    pub container: ContainerName,
    /// The resource.
    pub resource: String,
    /// Its devices.
    pub ids: BTreeSet<DeviceId>,
    /// The name that was answered for it; `None` where kubelet's checkpoint did not say.
    pub key: Option<ContainerKey>,
    /// Whether the answer also has [`partage_host::cdi::SHARED_DEVICE`]; `false` where kubelet's checkpoint did not say.
    pub shared: bool,
    /// The pod's name; `None` where kubelet's checkpoint said the rest.
    pub name: Option<(Namespace, PodName)>,
}

/// Kubelet, as the one who knows who holds what.
#[derive(Debug)]
pub struct Kubelet {
    checkpoint: Checkpoint,
    list: PodResourcesList,
    runtime: Runtime,
}

impl Kubelet {
    /// The kubelet whose folder this is (`/var/lib/kubelet`), with the container runtime that it uses.
    pub fn new(folder: &Path, runtime: Runtime) -> Kubelet {
        Kubelet { checkpoint: Checkpoint::new(folder), list: PodResourcesList::new(folder), runtime }
    }

    /// The containers that hold exactly these devices of this resource: all of one pod. Several, when init containers passed them
    /// on. Where the checkpoint cannot be read, ordinary init containers are left out.
    ///
    /// `newest` is the name that was last answered for these devices, as far as it is known. A checkpoint without it is older than
    /// that answer: kubelet writes what several of its threads saw, and not always in the order in which they saw it.
    pub async fn holders(
        &self,
        resource: &str,
        ids: &BTreeSet<DeviceId>,
        newest: Option<&ContainerKey>,
    ) -> Result<Vec<Holder>, IdentityError> {
        let mut holders = self.all().unwrap_or_default();
        holders.retain(|holder| holder.resource == resource && holder.ids == *ids);
        let is_old = newest.is_some_and(|_| holders.iter().all(|holder| holder.key.as_ref() != newest));
        if holders.is_empty() || is_old {
            return self.listed(resource, ids).await;
        }
        // Of several pods, the one that has the newest answer: the others are gone, and kubelet has not forgotten them yet.
        let last = holders.iter().find(|holder| newest.is_some() && holder.key.as_ref() == newest);
        if let Some(uid) = last.map(|holder| holder.uid.clone()) {
            holders.retain(|holder| holder.uid == uid);
        }
        let pods: BTreeSet<PodUid> = holders.iter().map(|holder| holder.uid.clone()).collect();
        if pods.len() > 1 {
            let ready: BTreeSet<PodUid> =
                self.runtime.sandboxes().await?.into_iter().filter(|s| s.ready).map(|s| s.uid).collect();
            let mut living = pods.intersection(&ready);
            match (living.next(), living.next()) {
                (Some(uid), None) => holders.retain(|holder| holder.uid == *uid),
                _ => {
                    return Err(IdentityError::Several { resource: resource.into(), ids: ids.clone(), pods });
                }
            }
        }
        Ok(holders)
    }

    /// Everything that kubelet has given, of all resources whose answers carry our CDI kind. `None` where its checkpoint cannot be
    /// read.
    pub fn all(&self) -> Option<Vec<Holder>> {
        self.checkpoint.holders()
    }

    /// When kubelet last wrote down what it has given, in nanoseconds since 1970.
    pub fn written(&self) -> Option<u64> {
        self.checkpoint.written()
    }

    /// The same from kubelet's list of resources.
    async fn listed(&self, resource: &str, ids: &BTreeSet<DeviceId>) -> Result<Vec<Holder>, IdentityError> {
        let listed = self.list.holders(resource, ids).await?;
        if listed.is_empty() {
            return Err(IdentityError::Nobody { resource: resource.into(), ids: ids.clone() });
        }
        let sandboxes = self.runtime.sandboxes().await?;
        let mut holders = Vec::new();
        for (namespace, pod, container) in listed {
            let of_pod = sandboxes.iter().filter(|s| s.ready && s.namespace == namespace && s.pod == pod);
            let Some(newest) = of_pod.max_by_key(|sandbox| sandbox.created) else {
                return Err(IdentityError::NotReady { namespace, pod });
            };
            holders.push(Holder {
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
            _ => Err(IdentityError::Several { resource: resource.into(), ids: ids.clone(), pods }),
        }
    }
}

#[cfg(test)]
mod tests;
