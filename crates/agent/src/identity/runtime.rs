//! The container runtime, over CRI: which one it is, and which pods and containers it knows.

use super::IdentityError;
use super::about::{self, About};
use partage_core::model::{ContainerName, Namespace, PodName, PodUid};
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

/// How long a runtime may take. It lists a node full of pods in milliseconds.
const PATIENCE: Duration = Duration::from_secs(10);

/// Kubelet writes whose a container is into these labels. Pods cannot: their labels are for the API server.
const POD_UID: &str = "io.kubernetes.pod.uid";
const POD_NAMESPACE: &str = "io.kubernetes.pod.namespace";
const POD_NAME: &str = "io.kubernetes.pod.name";
const CONTAINER_NAME: &str = "io.kubernetes.container.name";

/// The container runtime. It is connected to when first asked, and again when it comes back.
#[derive(Clone, Debug)]
pub struct Runtime {
    socket: PathBuf,
    channel: Arc<OnceCell<Channel>>,
}

/// What a pod's containers run in.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Sandbox {
    /// The runtime's name for it.
    pub id: String,
    /// The pod.
    pub uid: PodUid,
    /// Its namespace.
    pub namespace: Namespace,
    /// Its name.
    pub pod: PodName,
    /// Whether containers can be made in it. One that has ended stays in the list for a while.
    pub ready: bool,
    /// When it was made, in nanoseconds since 1970.
    pub created: i64,
}

/// A container of a pod, whether it runs or not.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct RunningContainer {
    /// The runtime's name for it, which is in its cgroup's name too.
    pub id: String,
    /// The sandbox it runs in.
    pub sandbox: String,
    /// The pod.
    pub uid: PodUid,
    /// Its namespace.
    pub namespace: Namespace,
    /// Its name.
    pub pod: PodName,
    /// The container's name in the pod.
    pub container: ContainerName,
    /// How far it is.
    pub state: ContainerState,
}

/// How far a container is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ContainerState {
    /// Made, not started.
    Created,
    /// Started.
    Running,
    /// Ended.
    Exited,
    /// The runtime cannot say.
    Unknown,
}

impl Runtime {
    /// The runtime that serves on this socket. It need not be there yet.
    pub fn new(socket: &Path) -> Runtime {
        Runtime { socket: socket.to_path_buf(), channel: Arc::default() }
    }

    /// Which runtime it is, and whether it can do what is needed of it.
    pub async fn about(&self) -> Result<About, IdentityError> {
        self.within(async {
            let mut client = self.client().await?;
            let version = client.version(VersionRequest::default()).await?.into_inner();
            let status = client.status(StatusRequest { verbose: true }).await?.into_inner();
            Ok(about::about(&version, &status))
        })
        .await
    }

    /// All containers of pods, in every state.
    pub async fn containers(&self) -> Result<Vec<RunningContainer>, IdentityError> {
        let answer = self
            .within(async {
                Ok(self.client().await?.list_containers(ListContainersRequest {}).await?.into_inner())
            })
            .await?;
        Ok(answer.containers.into_iter().filter_map(container).collect())
    }

    /// All pods that were not removed yet.
    pub async fn sandboxes(&self) -> Result<Vec<Sandbox>, IdentityError> {
        let answer = self
            .within(async {
                Ok(self.client().await?.list_pod_sandbox(ListPodSandboxRequest {}).await?.into_inner())
            })
            .await?;
        Ok(answer.items.into_iter().filter_map(sandbox).collect())
    }

    /// A node full of pods with long labels is more than the usual 4 MiB.
    async fn client(&self) -> Result<RuntimeServiceClient<Channel>, Status> {
        let connected = self.channel.get_or_try_init(|| unix::connect(&self.socket)).await;
        let channel = connected.map_err(|error| {
            let cause =
                std::error::Error::source(&error).map(|cause| format!(": {cause}")).unwrap_or_default();
            Status::unavailable(format!("{error}{cause}"))
        })?;
        Ok(RuntimeServiceClient::new(channel.clone()).max_decoding_message_size(64 << 20))
    }

    async fn within<T>(&self, asked: impl Future<Output = Result<T, Status>>) -> Result<T, IdentityError> {
        let failed = |why: String| IdentityError::Runtime { socket: self.socket.clone(), why };
        match tokio::time::timeout(PATIENCE, asked).await {
            Ok(answer) => answer.map_err(|status| failed(status.message().to_string())),
            Err(_) => Err(failed(format!("no answer within {} s", PATIENCE.as_secs()))),
        }
    }
}

/// `None` for what kubelet did not make.
fn container(container: cri::Container) -> Option<RunningContainer> {
    let state = match container.state() {
        cri::ContainerState::ContainerCreated => ContainerState::Created,
        cri::ContainerState::ContainerRunning => ContainerState::Running,
        cri::ContainerState::ContainerExited => ContainerState::Exited,
        cri::ContainerState::ContainerUnknown => ContainerState::Unknown,
    };
    let label = |name: &str| container.labels.get(name).map(String::as_str);
    Some(RunningContainer {
        uid: label(POD_UID)?.into(),
        namespace: label(POD_NAMESPACE)?.into(),
        pod: label(POD_NAME)?.into(),
        container: label(CONTAINER_NAME)?.into(),
        id: container.id,
        sandbox: container.pod_sandbox_id,
        state,
    })
}

fn sandbox(sandbox: cri::PodSandbox) -> Option<Sandbox> {
    let ready = sandbox.state() == cri::PodSandboxState::SandboxReady;
    let pod = sandbox.metadata?;
    Some(Sandbox {
        id: sandbox.id,
        uid: pod.uid.into(),
        namespace: pod.namespace.into(),
        pod: pod.name.into(),
        ready,
        created: sandbox.created_at,
    })
}
