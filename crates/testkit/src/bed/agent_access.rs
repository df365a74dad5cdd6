//! Gives an agent what it has in an installation: permissions, policies, and a token that is bound to its node.

use super::kubeconfig::Identity;
use super::{BedError, TestBed};
use crate::manifests::NAMESPACE;
use std::path::PathBuf;

/// The manifest that users apply.
const SIMULATED_MANIFEST: &str = include_str!("../../../../deploy/partage-simulated.yaml");
/// The service account of the agents.
const AGENT_ACCOUNT: &str = "partage-node";

impl TestBed {
    /// Returns the kubeconfig of this node's agent, as a path on the node. `partage node` then runs there as a process
    /// with the permissions and behind the policies of the DaemonSet's pods. Installs these first; no agent is
    /// installed.
    pub fn agent_kubeconfig(&self, node: &str) -> Result<PathBuf, BedError> {
        let config = self.kubeconfig_of(&Identity::Token(&self.agent_token(node)?)).to_string();
        let name = "agent.kubeconfig";
        self.context.folder.write(&format!("nodes/{}/{name}", self.node(node)?.name()), &config)?;
        Ok(PathBuf::from("/bed").join(name))
    }

    /// Creates a token of the agents' service account that is bound to a node, as a pod's token is bound to the pod's
    /// node. Installs what [`TestBed::agent_kubeconfig`] installs.
    pub fn agent_token(&self, node: &str) -> Result<String, BedError> {
        self.install_agent_rights()?;
        let words = ["create", "token", AGENT_ACCOUNT, "--namespace", NAMESPACE, "--duration", "24h"];
        let bound = ["--bound-object-kind", "Node", "--bound-object-name", node];
        Ok(self.kubectl(&[&words[..], &bound].concat())?.trim().to_string())
    }

    /// Applies the manifest without the DaemonSet.
    pub fn install_agent_rights(&self) -> Result<(), BedError> {
        let objects =
            SIMULATED_MANIFEST.split("\n---\n").filter(|object| !object.contains("\nkind: DaemonSet\n"));
        let rights = objects.collect::<Vec<_>>().join("\n---\n");
        self.kubectl_with(&["apply", "-f", "-"], &rights).map(drop)
    }
}
