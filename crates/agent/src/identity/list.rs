//! Kubelet's list of who holds what. It says names and no UID, and leaves out init containers that run to their end.

use super::IdentityError;
use crate::plugin::DeviceId;
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

/// Kubelet refuses more than 100 calls a second, after 10 at once.
const PAUSE_AFTER_REFUSAL: Duration = Duration::from_millis(20);
/// Kubelet gives up on `PreStartContainer` after 30 s; leave it time to read our sentence.
const PATIENCE: Duration = Duration::from_secs(20);

#[derive(Debug)]
pub(super) struct PodResourcesList {
    socket: PathBuf,
    /// How many lists were begun.
    begun: AtomicU64,
    /// The last list that ended well, with its number.
    last: tokio::sync::Mutex<(u64, Arc<Vec<PodResources>>)>,
}

impl PodResourcesList {
    /// Of the kubelet with this folder.
    pub(super) fn new(kubelet: &Path) -> PodResourcesList {
        PodResourcesList {
            socket: kubelet.join("pod-resources/kubelet.sock"),
            begun: AtomicU64::new(0),
            last: tokio::sync::Mutex::default(),
        }
    }

    /// The containers that hold exactly these devices.
    pub(super) async fn holders(
        &self,
        resource: &str,
        ids: &BTreeSet<DeviceId>,
    ) -> Result<Vec<(Namespace, PodName, ContainerName)>, IdentityError> {
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

    /// All pods, from a list that began after this was called. Callers that come at once share one.
    async fn pods(&self) -> Result<Arc<Vec<PodResources>>, IdentityError> {
        let failed = |why: String| IdentityError::Kubelet { socket: self.socket.clone(), why };
        let seen = self.begun.load(Ordering::SeqCst);
        let mut last = self.last.lock().await;
        if last.0 > seen {
            return Ok(last.1.clone());
        }
        let number = self.begun.fetch_add(1, Ordering::SeqCst) + 1;
        let asked = tokio::time::timeout(PATIENCE, self.ask()).await;
        let answer = asked.map_err(|_| failed(format!("no answer within {} s", PATIENCE.as_secs())))?;
        let pods = Arc::new(answer.map_err(|refused| failed(refused.message().to_string()))?);
        *last = (number, pods.clone());
        Ok(pods)
    }

    async fn ask(&self) -> Result<Vec<PodResources>, Status> {
        let channel = unix::connect(&self.socket).await.map_err(|e| Status::unavailable(e.to_string()))?;
        let mut client = PodResourcesListerClient::new(channel).max_decoding_message_size(usize::MAX);
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
}

#[cfg(test)]
pub(super) mod tests;
