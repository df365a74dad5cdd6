//! An agent's place in a bed: the rights and policies of an installation, and a token that belongs to a node.

use super::kubeconfig::Identity;
use super::{Bed, BedError};
use crate::manifests::NAMESPACE;
use std::path::PathBuf;

/// As people apply it.
const MANIFEST: &str = include_str!("../../../../deploy/partage-simulated.yaml");
/// Their service account.
const ACCOUNT: &str = "partage-node";

impl Bed {
    /// The kubeconfig of this node's agent, as a path of the node: `partage node` runs there as a process, with the rights and
    /// behind the policies that the DaemonSet's pods have. Installs these first; no agent is installed.
    pub fn agent_kubeconfig(&self, node: &str) -> Result<PathBuf, BedError> {
        let config = self.kubeconfig_of(&Identity::Token(&self.agent_token(node)?)).to_string();
        let name = "agent.kubeconfig";
        self.around.folder.write(&format!("nodes/{}/{name}", self.node(node)?.name()), &config)?;
        Ok(PathBuf::from("/bed").join(name))
    }

    /// A token of the agents' account, bound to a node as the one in a pod is bound to its pod's. Installs what
    /// [`Bed::agent_kubeconfig`] does.
    pub fn agent_token(&self, node: &str) -> Result<String, BedError> {
        self.install_rights()?;
        let words = ["create", "token", ACCOUNT, "--namespace", NAMESPACE, "--duration", "24h"];
        let bound = ["--bound-object-kind", "Node", "--bound-object-name", node];
        Ok(self.kubectl(&[&words[..], &bound].concat())?.trim().to_string())
    }

    /// Everything of the manifest but the agents themselves.
    pub fn install_rights(&self) -> Result<(), BedError> {
        let objects = MANIFEST.split("\n---\n").filter(|object| !object.contains("\nkind: DaemonSet\n"));
        let rights = objects.collect::<Vec<_>>().join("\n---\n");
        self.kubectl_with(&["apply", "-f", "-"], &rights).map(drop)
    }
}
