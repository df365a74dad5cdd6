//! Finds the container runtime's socket, and checks that the runtime applies the agent's CDI specs.

use crate::config::AgentConfig;
use crate::device_owner::{CdiSupportError, ContainerRuntime, RuntimeInfo};
use partage_host::host_root::HostRoot;
use std::path::{Path, PathBuf};

/// The usual sockets of container runtimes, in the order in which they are tried. Docker brings a containerd of its own, on
/// the last one, beside that of the cluster.
const RUNTIME_SOCKETS: [&str; 3] =
    ["/run/k3s/containerd/containerd.sock", "/run/crio/crio.sock", "/run/containerd/containerd.sock"];

/// Why the node's container runtime cannot be used.
#[derive(Debug, thiserror::Error)]
pub enum ContainerRuntimeError {
    /// None of the usual sockets exists.
    #[error(
        "no container runtime listens at {}: set its socket with --runtime-socket",
        RUNTIME_SOCKETS.join(", ")
    )]
    NotFound,
    /// The runtime does not apply CDI specs as the agent needs it.
    #[error("{name} {version} cannot be used")]
    Unsupported {
        /// The name that the runtime reports over CRI.
        name: String,
        /// The version that the runtime reports over CRI.
        version: String,
        /// Why it does not apply CDI specs.
        #[source]
        source: CdiSupportError,
    },
    /// The runtime does not read the directory that the agent writes to.
    #[error(
        "the container runtime reads CDI specs from {}, and not from {}: start the agent with --cdi-dir and one of them",
        list_paths(runtime_dirs),
        agent_dir.display()
    )]
    OtherDirectory {
        /// The directories that the runtime reads.
        runtime_dirs: Vec<PathBuf>,
        /// The directory that the agent writes to.
        agent_dir: PathBuf,
    },
}

fn list_paths(paths: &[PathBuf]) -> String {
    paths.iter().map(|path| path.display().to_string()).collect::<Vec<_>>().join(", ")
}

/// Returns the runtime on the configured socket, or on the first usual one that exists.
pub(crate) fn find(config: &AgentConfig) -> Result<ContainerRuntime, ContainerRuntimeError> {
    if let Some(socket) = &config.runtime_socket {
        return Ok(ContainerRuntime::new(socket));
    }
    let root = HostRoot::new(&config.host_root);
    let mut sockets = RUNTIME_SOCKETS.iter().map(|socket| root.at(Path::new(socket)));
    let found = sockets.find(|socket| socket.exists());
    found.as_deref().map(ContainerRuntime::new).ok_or(ContainerRuntimeError::NotFound)
}

/// Checks that the runtime applies CDI specs, and reads those of the agent's directory.
pub(crate) fn check_cdi(agent_dir: &Path, info: &RuntimeInfo) -> Result<(), ContainerRuntimeError> {
    if let Err(source) = &info.cdi {
        return Err(ContainerRuntimeError::Unsupported {
            name: info.name.clone(),
            version: info.version.clone(),
            source: source.clone(),
        });
    }
    // `/var/run` is a link to `/run` on every host; the agent's own image may not have that link.
    let without_link = |path: &Path| {
        path.strip_prefix("/var/run").map_or_else(|_| path.to_path_buf(), |rest| Path::new("/run").join(rest))
    };
    let is_same = |dir: &PathBuf| without_link(dir) == without_link(agent_dir);
    if info.cdi_dirs.is_empty() || info.cdi_dirs.iter().any(is_same) {
        return Ok(());
    }
    Err(ContainerRuntimeError::OtherDirectory {
        runtime_dirs: info.cdi_dirs.clone(),
        agent_dir: agent_dir.to_path_buf(),
    })
}
