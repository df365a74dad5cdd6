//! Where everything is on this node, and why an agent cannot run there.

use partage_cluster::ClusterError;
use partage_core::model::NodeName;
use partage_host::root::Root;
use std::io;
use std::path::{Path, PathBuf};

/// The paths and names that an agent is started with.
#[derive(Clone, Debug)]
pub struct Config {
    /// The node's name.
    pub node: NodeName,
    /// The settings file. Without one, every setting has its default.
    pub settings: Option<PathBuf>,
    /// The kubeconfig. Without one, the agent connects as a pod of the cluster.
    pub kubeconfig: Option<PathBuf>,
    /// Where the host's root file system is mounted.
    pub host_root: PathBuf,
    /// Kubelet's directory.
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

impl Config {
    /// Resolves links in paths below the host's root as the host resolves them.
    pub(crate) fn resolved(mut self) -> Config {
        let root = Root::new(&self.host_root);
        let paths = [&mut self.kubelet, &mut self.cdi, &mut self.state, &mut self.run];
        for path in paths.into_iter().chain(&mut self.runtime_socket) {
            *path = root.follow(path);
        }
        self
    }

    /// Kubelet's directory of device plugin sockets.
    pub(crate) fn device_plugins(&self) -> PathBuf {
        self.kubelet.join("device-plugins")
    }
}

/// Why the agent cannot run.
#[derive(Debug, thiserror::Error)]
pub enum AgentError {
    /// The settings cannot be used.
    #[error("the settings cannot be used: {0}")]
    Settings(#[from] crate::settings::SettingsError),
    /// There is no usable configuration for the API server.
    #[error(transparent)]
    Cluster(#[from] ClusterError),
    /// A directory or file cannot be used.
    #[error("{}: {error}", path.display())]
    Io {
        /// The path.
        path: PathBuf,
        /// What the system reported.
        #[source]
        error: io::Error,
    },
    /// This node cannot share its GPUs.
    #[error("{0}")]
    Cannot(String),
}

impl AgentError {
    /// Makes an error of a path out of the system's.
    pub(crate) fn io(path: &Path) -> impl FnOnce(io::Error) -> AgentError {
        let path = path.to_path_buf();
        move |error| AgentError::Io { path, error }
    }
}
