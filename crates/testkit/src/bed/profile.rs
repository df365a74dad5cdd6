//! Describes the bed that a test needs.

use serde_json::Value;
use std::path::PathBuf;

/// The nodes of a bed, and the configuration of its scheduler.
#[derive(Clone, Debug, Default)]
pub struct BedProfile {
    pub(super) nodes: Vec<NodeProfile>,
    pub(super) extenders: Vec<Value>,
    pub(super) node_grace: Option<u32>,
    pub(super) debian: bool,
    pub(super) images: Vec<PathBuf>,
}

impl BedProfile {
    /// Describes a control plane without nodes.
    pub fn control_plane() -> Self {
        Self::default()
    }

    /// Describes a control plane and one node, `node1`.
    pub fn one_node() -> Self {
        Self::nodes(1)
    }

    /// Describes a control plane and `count` nodes, named `node1`, `node2` and so on.
    pub fn nodes(count: usize) -> Self {
        let nodes = (1..=count).map(|number| NodeProfile::new(format!("node{number}"))).collect();
        Self { nodes, ..Self::default() }
    }

    /// Returns whether the bed has no nodes.
    pub fn is_control_plane_only(&self) -> bool {
        self.nodes.is_empty()
    }

    /// Adds a node to the bed.
    #[must_use]
    pub fn node(mut self, node: NodeProfile) -> Self {
        self.nodes.push(node);
        self
    }

    /// Adds an entry to the scheduler's `extenders`, in the format of its configuration file.
    #[must_use]
    pub fn extender(mut self, entry: Value) -> Self {
        self.extenders.push(entry);
        self
    }

    /// Sets the seconds without heartbeats after which a node becomes NotReady; the default is that of
    /// kube-controller-manager, 50.
    #[must_use]
    pub fn node_monitor_grace_seconds(mut self, seconds: u32) -> Self {
        self.node_grace = Some(seconds);
        self
    }

    /// Imports `localhost/debian:bed` on every node, which takes a second.
    #[must_use]
    pub fn debian(mut self) -> Self {
        self.debian = true;
        self
    }

    /// Imports one more image, an OCI archive, on every node. Pause and busybox are always imported.
    #[must_use]
    pub fn image(mut self, archive: impl Into<PathBuf>) -> Self {
        self.images.push(archive.into());
        self
    }
}

/// Description of one node of a bed.
#[derive(Clone, Debug)]
pub struct NodeProfile {
    pub(super) name: String,
    pub(super) cgroups: Option<CgroupVersion>,
    pub(super) containerd: ContainerdVersion,
}

impl NodeProfile {
    /// Describes a node with this name, and with the cgroup version of the host.
    pub fn new(name: impl Into<String>) -> Self {
        Self { name: name.into(), cgroups: None, containerd: ContainerdVersion::default() }
    }

    /// Sets the containerd version.
    #[must_use]
    pub fn containerd(mut self, containerd: ContainerdVersion) -> Self {
        self.containerd = containerd;
        self
    }

    /// Sets the cgroup version, regardless of the host's own.
    #[must_use]
    pub fn cgroups(mut self, cgroups: CgroupVersion) -> Self {
        self.cgroups = Some(cgroups);
        self
    }
}

/// The containerd version of a node.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum ContainerdVersion {
    /// Newest version that the beds support.
    #[default]
    Newest,
    /// The oldest supported version, 1.7, with CDI enabled, which is not its default.
    Oldest,
}

/// The cgroup version that a node sees.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum CgroupVersion {
    /// One hierarchy per controller; devices are filtered by `devices.allow`.
    V1,
    /// One hierarchy; devices are filtered by a BPF program. If the host keeps the controllers cpu, memory and pids in
    /// v1, the node runs without them: no limits and no usage figures, and everything else works.
    V2,
}
