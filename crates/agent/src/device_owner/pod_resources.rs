//! Kubelet's PodResources API: the containers that hold devices. It has names but no UIDs, and leaves out ordinary init containers.

use super::DeviceOwnerError;
use crate::device_plugin::DeviceId;
use partage_core::model::{ContainerName, Namespace, PodName};
use partage_kubelet_api::podresources::pod_resources_lister_client::PodResourcesListerClient;
use partage_kubelet_api::podresources::{ListPodResourcesRequest, PodResources};
use partage_kubelet_api::unix;
use std::collections::BTreeSet;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;
use tonic::{Code, Status};

/// Delay before a retry when kubelet limits the rate: it allows 100 calls a second, and bursts of 10.
const RATE_LIMIT_DELAY: Duration = Duration::from_millis(20);
/// Time limit for one list. Kubelet gives up on `PreStartContainer` after 30 s: the error has to arrive before that.
const LIST_TIMEOUT: Duration = Duration::from_secs(20);

/// A client of kubelet's PodResources API, which shares one list among concurrent callers.
#[derive(Debug)]
pub(super) struct PodResourcesList {
    socket: PathBuf,
    /// Number of lists that were started.
    started: AtomicU64,
    /// The last list that succeeded, with its number.
    last: tokio::sync::Mutex<(u64, Arc<Vec<PodResources>>)>,
}

impl PodResourcesList {
    /// Uses the socket of the kubelet with this directory.
    pub(super) fn new(kubelet: &Path) -> PodResourcesList {
        PodResourcesList {
            socket: kubelet.join("pod-resources/kubelet.sock"),
            started: AtomicU64::new(0),
            last: tokio::sync::Mutex::default(),
        }
    }

    /// Returns the containers that hold exactly these devices.
    pub(super) async fn holders(
        &self,
        resource: &str,
        ids: &BTreeSet<DeviceId>,
    ) -> Result<Vec<(Namespace, PodName, ContainerName)>, DeviceOwnerError> {
        let pods = self.pods().await?;
        let mut holders = Vec::new();
        for pod in pods.iter() {
            for container in &pod.containers {
                let devices = container.devices.iter().filter(|devices| devices.resource_name == resource);
                // Kubelet sends an entry for each device.
                let held: BTreeSet<&str> = devices.flat_map(|d| &d.device_ids).map(String::as_str).collect();
                if held.into_iter().eq(ids.iter().map(|id| id.0.as_str())) {
                    let (namespace, name) = (pod.namespace.as_str().into(), pod.name.as_str().into());
                    holders.push((namespace, name, container.name.as_str().into()));
                }
            }
        }
        Ok(holders)
    }

    /// Returns all pods, from a list that started after this call. Concurrent callers share one list.
    async fn pods(&self) -> Result<Arc<Vec<PodResources>>, DeviceOwnerError> {
        let failed =
            |cause: String| DeviceOwnerError::PodResourcesUnavailable { socket: self.socket.clone(), cause };
        let seen = self.started.load(Ordering::SeqCst);
        let mut last = self.last.lock().await;
        if last.0 > seen {
            return Ok(last.1.clone());
        }
        let number = self.started.fetch_add(1, Ordering::SeqCst) + 1;
        let answer = tokio::time::timeout(LIST_TIMEOUT, self.list()).await;
        let answer =
            answer.map_err(|_| failed(format!("no response within {} s", LIST_TIMEOUT.as_secs())))?;
        let pods = Arc::new(answer.map_err(|refused| failed(refused.message().to_string()))?);
        *last = (number, pods.clone());
        Ok(pods)
    }

    async fn list(&self) -> Result<Vec<PodResources>, Status> {
        let channel = unix::connect(&self.socket).await.map_err(|e| Status::unavailable(e.to_string()))?;
        let mut client = PodResourcesListerClient::new(channel).max_decoding_message_size(usize::MAX);
        loop {
            match client.list(ListPodResourcesRequest {}).await {
                Ok(answer) => return Ok(answer.into_inner().pod_resources),
                Err(refused) if refused.code() == Code::ResourceExhausted => {
                    tokio::time::sleep(RATE_LIMIT_DELAY).await;
                }
                Err(refused) => return Err(refused),
            }
        }
    }
}

#[cfg(test)]
pub(super) mod tests;
