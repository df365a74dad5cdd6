//! What a test asks of a bed.

use serde_json::Value;
use std::path::PathBuf;

/// How a bed should be: which nodes, and what the scheduler is told.
#[derive(Clone, Debug, Default)]
pub struct Profile {
    pub(super) nodes: Vec<NodeProfile>,
    pub(super) extenders: Vec<Value>,
    pub(super) node_grace: Option<u32>,
    pub(super) debian: bool,
    pub(super) images: Vec<PathBuf>,
}

impl Profile {
    /// A control plane without a node.
    pub fn control_plane() -> Self {
        Self::default()
    }

    /// A control plane and one node, `node1`.
    pub fn one_node() -> Self {
        Self::nodes(1)
    }

    /// A control plane and so many nodes, `node1` and on.
    pub fn nodes(count: usize) -> Self {
        let nodes = (1..=count).map(|number| NodeProfile::new(format!("node{number}"))).collect();
        Self { nodes, ..Self::default() }
    }

    /// Has it no node?
    pub fn is_control_plane_only(&self) -> bool {
        self.nodes.is_empty()
    }

    /// One more node.
    #[must_use]
    pub fn node(mut self, node: NodeProfile) -> Self {
        self.nodes.push(node);
        self
    }

    /// One more entry of the scheduler's `extenders`, as its configuration file has them.
    #[must_use]
    pub fn extender(mut self, entry: Value) -> Self {
        self.extenders.push(entry);
        self
    }

    /// Nodes that say nothing for so many seconds are given up; the default is kube-controller-manager's, 50.
    #[must_use]
    pub fn give_nodes_up_after(mut self, seconds: u32) -> Self {
        self.node_grace = Some(seconds);
        self
    }

    /// With `localhost/debian:bed` on every node; it takes a second to bring.
    #[must_use]
    pub fn debian(mut self) -> Self {
        self.debian = true;
        self
    }

    /// One more image, an OCI archive, on every node. Pause and busybox are on all of them.
    #[must_use]
    pub fn image(mut self, archive: impl Into<PathBuf>) -> Self {
        self.images.push(archive.into());
        self
    }
}

/// How one node should be.
#[derive(Clone, Debug)]
pub struct NodeProfile {
    pub(super) name: String,
    pub(super) cgroups: Option<Cgroups>,
    pub(super) containerd: Containerd,
}

impl NodeProfile {
    /// A node of this name, with the cgroups that the machine itself uses.
    pub fn new(name: impl Into<String>) -> Self {
        Self { name: name.into(), cgroups: None, containerd: Containerd::default() }
    }

    /// With this containerd.
    #[must_use]
    pub fn containerd(mut self, containerd: Containerd) -> Self {
        self.containerd = containerd;
        self
    }

    /// With these cgroups, whatever the machine itself uses.
    #[must_use]
    pub fn cgroups(mut self, cgroups: Cgroups) -> Self {
        self.cgroups = Some(cgroups);
        self
    }
}

/// Which containerd a node has.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Containerd {
    /// The newest.
    #[default]
    Newest,
    /// The oldest that is supported, 1.7, with CDI switched on, which it is not by itself.
    Oldest,
}

/// Which cgroups a node sees.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Cgroups {
    /// A hierarchy per controller; devices are gated by `devices.allow`.
    V1,
    /// One hierarchy; devices are gated by a BPF program. Where the machine gives the controllers cpu, memory and pids
    /// to v1, the node runs without them: no limits, no usage figures, everything else real.
    V2,
}
