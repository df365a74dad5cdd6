//! Grants: shares of specific GPUs.

use super::{Bytes, ContainerName, Cores, GpuUuid, Namespace, NodeName, PodName, PodUid};
use serde::{Deserialize, Serialize};

/// A granted share of one GPU.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
pub struct Share {
    /// UUID of the GPU.
    pub gpu: GpuUuid,
    /// Memory limit; unlimited if absent.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub memory_bytes: Option<Bytes>,
    /// Guaranteed compute; no guarantee and no limit if absent.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub cores: Option<Cores>,
    /// Upper limit of compute while the GPU is otherwise idle.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub ceiling: Option<Cores>,
    /// Whether the GPU is exclusive.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub whole: bool,
}

/// The shares of one container.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
pub struct Grant {
    /// Name of the container.
    pub container: ContainerName,
    /// Whether this is an init container, which never holds its shares at the same time as the app containers.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub init: bool,
    /// Shares, each on a different GPU.
    pub shares: Vec<Share>,
}

/// The grants of one pod, all on one node.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
pub struct PodGrant {
    /// Name of the node.
    pub node: NodeName,
    /// Grants in the order of the spec: init containers first.
    pub grants: Vec<Grant>,
}

/// Identifies a pod by its UID. Namespace and name are for messages.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
pub struct PodId {
    /// UID of the pod.
    pub uid: PodUid,
    /// Namespace of the pod.
    pub namespace: Namespace,
    /// Name of the pod.
    pub name: PodName,
}
