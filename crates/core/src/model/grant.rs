//! What was given: shares of named GPUs.

use super::{Bytes, ContainerName, Cores, GpuUuid, Namespace, NodeName, PodName, PodUid};
use serde::{Deserialize, Serialize};

/// A part of one GPU, given away.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
pub struct Share {
    /// The GPU.
    pub gpu: GpuUuid,
    /// The memory limit; absent = no limit.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub memory_bytes: Option<Bytes>,
    /// The compute promised; absent = none promised, no cap.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub cores: Option<Cores>,
    /// How far the compute may stretch while the GPU is otherwise idle.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub ceiling: Option<Cores>,
    /// Nobody else on this GPU.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub whole: bool,
}

/// The shares one container got.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
pub struct Grant {
    /// The container.
    pub container: ContainerName,
    /// True for an init container: its shares and those of the running set never hold at the same time.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub init: bool,
    /// Its shares.
    pub shares: Vec<Share>,
}

/// The grants of one pod, all on one node.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
pub struct PodGrant {
    /// The node.
    pub node: NodeName,
    /// The grants, in the order of the spec: init containers first.
    pub grants: Vec<Grant>,
}

/// Which pod: the UID decides, the rest is for people.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
pub struct PodId {
    /// Its UID.
    pub uid: PodUid,
    /// Its namespace.
    pub namespace: Namespace,
    /// Its name.
    pub name: PodName,
}
