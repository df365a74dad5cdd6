//! `partage.dev/grant`: the grant itself, as compact JSON.

use super::{GrantError, MOST_TEXT, Record, quoted};
use crate::cluster_file::check_grants;
use crate::model::{ContainerRole, Grant, NodeName, PodGrant};
use serde::{Deserialize, Serialize};
use std::collections::BTreeMap;

/// The annotation.
pub const ANNOTATION: &str = crate::dialect::asks::native::GRANT;
/// The version written. A reader refuses a later one rather than half understand it.
pub const VERSION: u32 = 1;

/// The annotation's text. What [`decode`] would refuse is not written.
pub fn encode(grant: &PodGrant) -> Result<String, GrantError> {
    check_grants(&grant.grants, "grant").map_err(|e| GrantError::new(ANNOTATION, e.to_string()))?;
    let fields = Fields { version: VERSION, node: grant.node.clone(), grants: grant.grants.clone() };
    let text = serde_json::to_string(&fields).map_err(|e| GrantError::new(ANNOTATION, e.to_string()))?;
    if text.len() > MOST_TEXT {
        let message = format!(
            "the grant takes {} bytes, more than the {MOST_TEXT} Kubernetes takes: split the pod",
            text.len()
        );
        return Err(GrantError::new(ANNOTATION, message));
    }
    Ok(text)
}

/// A grant from the annotation's text, checked in itself but against no pod and no node.
pub fn decode(text: &str) -> Result<PodGrant, GrantError> {
    let fail = |message: String| GrantError::new(ANNOTATION, message);
    if text.len() > MOST_TEXT {
        return Err(fail(format!("is {} bytes long, more than {MOST_TEXT}", text.len())));
    }
    let unreadable = |e: serde_json::Error| fail(format!("{} is no grant: {e}", quoted(text)));
    // A later version may have fields this one does not know: look at the version alone first.
    let Version { version } = serde_json::from_str(text).map_err(unreadable)?;
    if version != VERSION {
        return Err(fail(format!(
            "is of version {version}, this Partage reads version {VERSION}: upgrade this part of it"
        )));
    }
    let Fields { node, grants, .. } = serde_json::from_str(text).map_err(unreadable)?;
    check_grants(&grants, "grant").map_err(|e| fail(e.to_string()))?;
    Ok(PodGrant { node, grants })
}

/// Reads the annotation of a pod. A GPU that the node no longer has is not an error here: the shares on its other
/// GPUs are still held, and the ledger reports the lost one.
pub(super) fn read(text: &str, record: &Record<'_>) -> Result<PodGrant, GrantError> {
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
        // An app container passed off as an init container would hold its share uncounted.
        if *init != (*role == ContainerRole::Init) {
            let (says, is) = if *init { ("an", "none") } else { ("no", "one") };
            return Err(fail(format!("says container {name} is {says} init container, and it is {is}")));
        }
    }
    Ok(grant)
}

#[derive(Serialize, Deserialize)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
struct Fields {
    version: u32,
    node: NodeName,
    grants: Vec<Grant>,
}

#[derive(Deserialize)]
struct Version {
    version: u32,
}
