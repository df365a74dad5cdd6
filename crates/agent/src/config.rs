//! The paths and names that an agent is started with, and why an agent cannot run.

use crate::app::TaskError;
use crate::cdi_edits::MissingDriverFile;
use crate::container_runtime::ContainerRuntimeError;
use crate::resources::TooManyDevices;
use crate::settings::AgentSettingsError;
use crate::stale_mounts::StaleMountError;
use partage_cluster::ClusterError;
use partage_core::model::NodeName;
use partage_enforce::libraries::LibraryError;
use partage_enforce::records::RecordError;
use partage_host::host_root::HostRoot;
use std::io;
use std::path::{Path, PathBuf};

/// The paths and names that an agent is started with.
#[derive(Clone, Debug)]
pub struct AgentConfig {
    /// The name under which kubelet registered this node in the cluster.
    pub node: NodeName,
    /// The settings file. Without one, every setting has its default.
    pub settings: Option<PathBuf>,
    /// The kubeconfig. Without one, the agent connects as a pod of the cluster.
    pub kubeconfig: Option<PathBuf>,
    /// Where the host's root file system is mounted.
    pub host_root: PathBuf,
    /// Kubelet's root directory, which contains `device-plugins`.
    pub kubelet: PathBuf,
    /// The directory where the container runtime reads CDI specs.
    pub cdi: PathBuf,
    /// The directory for state that survives a reboot.
    pub state: PathBuf,
    /// The directory for state that does not.
    pub run: PathBuf,
    /// The container runtime's socket. Without one, the usual places are tried.
    pub runtime_socket: Option<PathBuf>,
}

impl AgentConfig {
    /// Resolves links in paths below the host's root as the host resolves them.
    pub(crate) fn resolved(mut self) -> AgentConfig {
        let root = HostRoot::new(&self.host_root);
        let paths = [&mut self.kubelet, &mut self.cdi, &mut self.state, &mut self.run];
        for path in paths.into_iter().chain(&mut self.runtime_socket) {
            *path = root.follow(path);
        }
        self
    }

    /// Returns kubelet's directory of device plugin sockets.
    pub(crate) fn device_plugins(&self) -> PathBuf {
        self.kubelet.join("device-plugins")
    }
}

/// Why the agent cannot run.
#[derive(Debug, thiserror::Error)]
pub enum AgentError {
    /// The settings cannot be read, or contradict themselves.
    #[error("the settings cannot be used")]
    Settings(#[source] AgentSettingsError),
    /// The settings are valid, and this node cannot apply them.
    #[error("the settings cannot be applied on this node")]
    UnusableSettings(#[source] SettingsCheckError),
    /// The API server refuses a request, or there is no usable configuration for it.
    #[error(transparent)]
    Cluster(#[from] ClusterError),
    /// The container runtime cannot be used.
    #[error(transparent)]
    Runtime(#[from] ContainerRuntimeError),
    /// The libraries of containers cannot be installed.
    #[error("cannot install the libraries of containers")]
    Libraries(#[source] LibraryError),
    /// The records of earlier agents cannot be read.
    #[error("cannot read the agent's records")]
    Records(#[source] RecordError),
    /// The CDI specs of earlier agents cannot be listed.
    #[error("cannot read CDI specs")]
    Specs(#[source] io::Error),
    /// A directory that is mounted in the agent's container was replaced on the host.
    #[error(transparent)]
    StaleMount(#[from] StaleMountError),
    /// The driver was updated or removed while the agent was running.
    #[error(transparent)]
    DriverFiles(#[from] MissingDriverFile),
    /// One of the agent's tasks ended although the agent was not stopped.
    #[error(transparent)]
    Task(#[from] TaskError),
    /// The node's GPUs changed, and the tasks that count by the old ones do not end.
    #[error(
        "the node's GPUs have changed ({change}), and tasks of the agent have not ended: the agent has to restart"
    )]
    NotReleased {
        /// How the GPUs changed.
        change: String,
    },
    /// A directory or file cannot be used.
    #[error("cannot use {}", path.display())]
    Io {
        /// The file or directory of the failed operation.
        path: PathBuf,
        /// What the system reported.
        #[source]
        source: io::Error,
    },
}

impl AgentError {
    /// Returns a function that adds a path to an I/O error.
    pub(crate) fn io(path: &Path) -> impl FnOnce(io::Error) -> AgentError {
        let path = path.to_path_buf();
        move |source| AgentError::Io { path, source }
    }
}

/// Why valid settings cannot be applied on this node.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum SettingsCheckError {
    /// Kubelet cannot count the devices of a resource.
    #[error(transparent)]
    Devices(#[from] TooManyDevices),
    /// The path of a device plugin's socket is longer than the kernel allows.
    #[error(
        "the socket of {resource} in {} has a path of {length} bytes, and the kernel allows {MAX_SOCKET_PATH}: use a shorter domain \
         (vcudaDomains), or a shorter kubelet directory",
        directory.display()
    )]
    SocketPath {
        /// The resource that the plugin would serve, such as `tencent.com/vcuda-core`.
        resource: String,
        /// Returns kubelet's directory of device plugin sockets.
        directory: PathBuf,
        /// The length of the socket's path in bytes.
        length: usize,
    },
}

/// Maximum length of a socket's path in bytes, without the terminating zero.
pub(crate) const MAX_SOCKET_PATH: usize = 107;
