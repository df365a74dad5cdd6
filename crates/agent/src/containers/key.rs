//! The identity of a container on this node.

use std::fmt;

/// Identifies a container on this node. It names the container's files and its CDI device, and is never reused.
///
/// The key is opaque: all that matters is whether two keys are equal, and that a key is a valid name of a file and of a CDI
/// device. Today it is a random nonce, because kubelet's `Allocate` names no container; a source of devices that knows the
/// claim of a container, as dynamic resource allocation does, can use the UID of the claim.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, serde::Serialize, serde::Deserialize)]
#[serde(transparent)]
pub struct ContainerKey(pub String);

impl fmt::Display for ContainerKey {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0)
    }
}
