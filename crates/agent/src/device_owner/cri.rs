//! A CRI client: the container runtime's version and configuration, its pod sandboxes and containers.

use super::DeviceOwnerError;
use super::runtime_info::RuntimeInfo;
use partage_core::model::{ContainerName, Namespace, PodName, PodUid};
use partage_enforce::error_chain::describe;
use partage_kubelet_api::cri::runtime_service_client::RuntimeServiceClient;
use partage_kubelet_api::cri::{
    self, ListContainersRequest, ListPodSandboxRequest, StatusRequest, VersionRequest,
};
use partage_kubelet_api::unix;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;
use tokio::sync::OnceCell;
use tonic::Status;
use tonic::transport::Channel;

/// Time limit for one request. A runtime lists a node full of pods in milliseconds.
const REQUEST_TIMEOUT: Duration = Duration::from_secs(10);

/// Labels in which kubelet writes the pod and name of a container. Pods cannot set them: their own labels stay in the API server.
const POD_UID: &str = "io.kubernetes.pod.uid";
const POD_NAMESPACE: &str = "io.kubernetes.pod.namespace";
const POD_NAME: &str = "io.kubernetes.pod.name";
const CONTAINER_NAME: &str = "io.kubernetes.container.name";

/// A client of the container runtime. It connects with the first request, and again after the runtime restarted.
#[derive(Clone, Debug)]
pub struct ContainerRuntime {
    socket: PathBuf,
    channel: Arc<OnceCell<Channel>>,
}

/// The sandbox that a pod's containers run in.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct PodSandbox {
    /// The runtime's id of the sandbox.
    pub id: String,
    /// The pod's UID, which a later pod of the same name does not have.
    pub uid: PodUid,
    /// The namespace of the pod, as kubelet passed it to the runtime.
    pub namespace: Namespace,
    /// The name of the pod in its namespace.
    pub pod: PodName,
    /// Whether containers can be created in it. A sandbox that has ended stays in the list for a while.
    pub ready: bool,
    /// When it was created, in nanoseconds since the epoch.
    pub created: i64,
}

/// A container of a pod, whether it runs or not.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct RuntimeContainer {
    /// The runtime's id of the container, which is part of its cgroup's name, too.
    pub id: String,
    /// The id of the sandbox that it runs in.
    pub sandbox: String,
    /// The UID of the pod that the container belongs to.
    pub uid: PodUid,
    /// The namespace of the pod, from the label that kubelet sets.
    pub namespace: Namespace,
    /// The name of the pod, from the label that kubelet sets.
    pub pod: PodName,
    /// The container's name in the pod.
    pub container: ContainerName,
    /// The state at the time of the request.
    pub state: ContainerState,
}

/// The state of a container, as CRI defines it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ContainerState {
    /// Created, and not started yet.
    Created,
    /// Started, and not ended yet.
    Running,
    /// Ended by itself or stopped.
    Exited,
    /// The runtime does not know.
    Unknown,
}

impl ContainerRuntime {
    /// Creates a client of the runtime on this socket, which need not run yet.
    pub fn new(socket: &Path) -> ContainerRuntime {
        ContainerRuntime { socket: socket.to_path_buf(), channel: Arc::default() }
    }

    /// Returns which runtime it is, and whether it supports what the agent needs.
    pub async fn info(&self) -> Result<RuntimeInfo, DeviceOwnerError> {
        self.with_timeout(async {
            let mut client = self.client().await?;
            let version = client.version(VersionRequest::default()).await?.into_inner();
            let status = client.status(StatusRequest { verbose: true }).await?.into_inner();
            Ok(RuntimeInfo::new(&version, &status))
        })
        .await
    }

    /// Returns all containers of pods, in every state.
    pub async fn containers(&self) -> Result<Vec<RuntimeContainer>, DeviceOwnerError> {
        let answer = self
            .with_timeout(async {
                Ok(self.client().await?.list_containers(ListContainersRequest {}).await?.into_inner())
            })
            .await?;
        Ok(answer.containers.into_iter().filter_map(container).collect())
    }

    /// Returns the sandboxes of all pods that were not removed yet.
    pub async fn sandboxes(&self) -> Result<Vec<PodSandbox>, DeviceOwnerError> {
        let answer = self
            .with_timeout(async {
                Ok(self.client().await?.list_pod_sandbox(ListPodSandboxRequest {}).await?.into_inner())
            })
            .await?;
        Ok(answer.items.into_iter().filter_map(sandbox).collect())
    }

    /// Returns a connected client. A list of many pods with long labels exceeds the default limit of 4 MiB.
    async fn client(&self) -> Result<RuntimeServiceClient<Channel>, Status> {
        let connected = self.channel.get_or_try_init(|| unix::connect(&self.socket)).await;
        let channel = connected.map_err(|error| Status::unavailable(describe(&error)))?;
        Ok(RuntimeServiceClient::new(channel.clone()).max_decoding_message_size(64 << 20))
    }

    async fn with_timeout<T>(
        &self,
        request: impl Future<Output = Result<T, Status>>,
    ) -> Result<T, DeviceOwnerError> {
        let failed =
            |cause: String| DeviceOwnerError::RuntimeUnavailable { socket: self.socket.clone(), cause };
        match tokio::time::timeout(REQUEST_TIMEOUT, request).await {
            Ok(answer) => answer.map_err(|status| failed(status.message().to_string())),
            Err(_) => Err(failed(format!("no response within {} s", REQUEST_TIMEOUT.as_secs()))),
        }
    }
}

/// Converts a container; `None` if kubelet did not create it.
fn container(container: cri::Container) -> Option<RuntimeContainer> {
    let state = match container.state() {
        cri::ContainerState::ContainerCreated => ContainerState::Created,
        cri::ContainerState::ContainerRunning => ContainerState::Running,
        cri::ContainerState::ContainerExited => ContainerState::Exited,
        cri::ContainerState::ContainerUnknown => ContainerState::Unknown,
    };
    let label = |name: &str| container.labels.get(name).map(String::as_str);
    Some(RuntimeContainer {
        uid: label(POD_UID)?.into(),
        namespace: label(POD_NAMESPACE)?.into(),
        pod: label(POD_NAME)?.into(),
        container: label(CONTAINER_NAME)?.into(),
        id: container.id,
        sandbox: container.pod_sandbox_id,
        state,
    })
}

/// Converts a sandbox; `None` if it has no metadata.
fn sandbox(sandbox: cri::PodSandbox) -> Option<PodSandbox> {
    let ready = sandbox.state() == cri::PodSandboxState::SandboxReady;
    let pod = sandbox.metadata?;
    Some(PodSandbox {
        id: sandbox.id,
        uid: pod.uid.into(),
        namespace: pod.namespace.into(),
        pod: pod.name.into(),
        ready,
        created: sandbox.created_at,
    })
}
