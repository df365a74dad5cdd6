//! The native record `partage.dev/grant`: the grant as compact JSON.

use super::{GrantError, MAX_RECORD_BYTES, RecordReader, quoted};
use crate::cluster_file::check_grants;
use crate::model::{ContainerRole, Grant, NodeName, PodGrant};
use serde::{Deserialize, Serialize};
use std::collections::BTreeMap;

/// The annotation that holds the grant.
pub const ANNOTATION: &str = crate::dialect::asks::native::GRANT;
/// The version that is written. Readers refuse other versions, because they would misinterpret them.
pub const VERSION: u32 = 1;

/// Encodes a grant as the text of the annotation. Returns an error for a grant that [`decode`] would refuse.
pub fn encode(grant: &PodGrant) -> Result<String, GrantError> {
    check_grants(&grant.grants, "grant").map_err(|e| GrantError::new(ANNOTATION, e.to_string()))?;
    let fields = RecordFields { version: VERSION, node: grant.node.clone(), grants: grant.grants.clone() };
    let text = serde_json::to_string(&fields).map_err(|e| GrantError::new(ANNOTATION, e.to_string()))?;
    if text.len() > MAX_RECORD_BYTES {
        let message = format!(
            "the grant takes {} bytes, more than the {MAX_RECORD_BYTES} that Kubernetes allows: split the pod",
            text.len()
        );
        return Err(GrantError::new(ANNOTATION, message));
    }
    Ok(text)
}

/// Decodes the text of the annotation. The grant is checked for consistency, but not against a pod or node.
pub fn decode(text: &str) -> Result<PodGrant, GrantError> {
    let fail = |message: String| GrantError::new(ANNOTATION, message);
    if text.len() > MAX_RECORD_BYTES {
        return Err(fail(format!("is {} bytes long, more than {MAX_RECORD_BYTES}", text.len())));
    }
    let unreadable = |e: serde_json::Error| fail(format!("{} is not a grant: {e}", quoted(text)));
    // Parse the version first: a later version may have unknown fields.
    let RecordVersion { version } = serde_json::from_str(text).map_err(unreadable)?;
    if version != VERSION {
        return Err(fail(format!(
            "has version {version}, but this program supports version {VERSION}: upgrade it"
        )));
    }
    let RecordFields { node, grants, .. } = serde_json::from_str(text).map_err(unreadable)?;
    check_grants(&grants, "grant").map_err(|e| fail(e.to_string()))?;
    Ok(PodGrant { node, grants })
}

/// Decodes the annotation of a pod. A GPU that the node no longer has is not an error: the shares on its other GPUs are still
/// held, and the ledger reports the lost GPU.
pub(super) fn read(text: &str, record: &RecordReader<'_>) -> Result<PodGrant, GrantError> {
    let fail = |message: String| GrantError::new(ANNOTATION, message);
    let grant = decode(text)?;
    if grant.node != record.node.name {
        let node = quoted(grant.node.as_str());
        return Err(fail(format!("is for node {node}, but this is {}", record.node.name)));
    }
    let roles: BTreeMap<&str, ContainerRole> =
        record.pod.containers.iter().map(|container| (container.name.as_str(), container.role)).collect();
    for Grant { container, init, .. } in &grant.grants {
        let name = quoted(container.as_str());
        let role = roles.get(container.as_str());
        let role =
            role.ok_or_else(|| fail(format!("names container {name}, which the pod does not have")))?;
        // If an app container could pass as an init container, its share would not be counted.
        if *init != (*role == ContainerRole::Init) {
            let (marked, is) = if *init {
                ("an init container", "is not one")
            } else {
                ("an app container", "is an init container")
            };
            return Err(fail(format!("marks container {name} as {marked}, but it {is}")));
        }
    }
    Ok(grant)
}

#[derive(Serialize, Deserialize)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
struct RecordFields {
    version: u32,
    node: NodeName,
    grants: Vec<Grant>,
}

#[derive(Deserialize)]
struct RecordVersion {
    version: u32,
}
