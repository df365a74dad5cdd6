//! Installs Partage in a cluster with kubectl, as users do.

use super::{ClusterState, TestClusterError};
use crate::bed::{BedError, TestBed};
use crate::binaries::Binaries;
use crate::clients::{Clients, DriverBranch};
use crate::manifests::{DeployManifest, NAMESPACE};
use serde_json::Value;
use std::fs;
use std::path::Path;
use std::process::Command;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

/// Time limit for the agents to offer shares.
const INSTALL_TIMEOUT: Duration = Duration::from_secs(300);

/// Copies `nvidia-smi` to every node, where a driver would have put it. Does nothing if it was not fetched: nothing
/// else depends on it.
pub fn install_nvidia_smi(bed: &TestBed) -> Result<(), BedError> {
    let Ok(clients) = Clients::ready() else { return Ok(()) };
    for node in bed.nodes() {
        let place = node.path("/usr/bin/nvidia-smi")?;
        // A host with a driver has its own.
        if !place.exists() {
            let copied = fs::copy(clients.nvidia_smi(DriverBranch::R550), &place);
            copied.map_err(BedError::io(format!("writing {}", place.display())))?;
        }
    }
    Ok(())
}

/// Applies the manifest and waits until every node offers shares.
pub(super) fn install(
    state: &ClusterState,
    report_progress: &mut dyn FnMut(&str),
    stop: &AtomicBool,
) -> Result<(), TestClusterError> {
    let manifest = DeployManifest::Simulated.path();
    let kubectl = Binaries::ready().map_err(BedError::from)?.path("kubectl");
    let kubectl = Kubectl { program: &kubectl, kubeconfig: &state.kubeconfig };
    report_progress("kubectl apply -f deploy/partage-simulated.yaml");
    kubectl.run(&["apply", "-f", &manifest.display().to_string()])?;
    report_progress("waiting until the nodes offer GPU shares");
    let start = Instant::now();
    loop {
        if stop.load(Ordering::Relaxed) {
            return Err(BedError::Interrupted.into());
        }
        let nodes = kubectl.run(&["get", "nodes", "-o", "json"])?;
        let waiting = nodes_without_shares(&serde_json::from_str(&nodes).unwrap_or_default());
        if waiting.is_empty() {
            return Ok(());
        }
        if start.elapsed() > INSTALL_TIMEOUT {
            let logs = ["--namespace", NAMESPACE, "logs", "daemonset/partage-node", "--tail=20"];
            let message = kubectl.run(&logs).unwrap_or_else(|error| error.to_string());
            return Err(TestClusterError::NotInstalled { nodes: waiting.join(", "), message });
        }
        std::thread::sleep(Duration::from_millis(250));
    }
}

/// Returns the nodes that offer no GPU shares.
fn nodes_without_shares(nodes: &Value) -> Vec<String> {
    let Some(nodes) = nodes["items"].as_array() else { return vec!["all".to_string()] };
    let without = nodes.iter().filter(|node| {
        let shares = node["status"]["allocatable"]["partage.dev/gpu"].as_str();
        shares.and_then(|shares| shares.parse().ok()).unwrap_or(0) == 0
    });
    without.map(|node| node["metadata"]["name"].as_str().unwrap_or("?").to_string()).collect()
}

struct Kubectl<'a> {
    program: &'a Path,
    kubeconfig: &'a Path,
}

impl Kubectl<'_> {
    fn run(&self, words: &[&str]) -> Result<String, BedError> {
        let doing = format!("kubectl {}", words.join(" "));
        let mut command = Command::new(self.program);
        command.arg("--kubeconfig").arg(self.kubeconfig).args(words);
        let output = command.output().map_err(BedError::io(&doing))?;
        let text = |bytes: &[u8]| String::from_utf8_lossy(bytes).trim().to_string();
        if output.status.success() {
            Ok(text(&output.stdout))
        } else {
            Err(BedError::Failed { doing, message: text(&output.stderr) })
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    #[test]
    fn nodes_without_shares_are_listed() {
        let node = |name: &str, allocatable: Value| json!({"metadata": {"name": name}, "status": {"allocatable": allocatable}});
        let nodes = json!({"items": [
            node("a", json!({"partage.dev/gpu": "20"})),
            node("b", json!({"partage.dev/gpu": "0"})),
            node("c", json!({"cpu": "2"})),
        ]});
        assert_eq!(nodes_without_shares(&nodes), ["b", "c"]);
        assert_eq!(nodes_without_shares(&Value::Null), ["all"]);
    }
}
