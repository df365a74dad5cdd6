//! Partage in a person's cluster, installed as people install it: with kubectl.

use super::{ClusterError, State};
use crate::bed::{Bed, BedError};
use crate::binaries::Binaries;
use crate::clients::{Branch, Clients};
use crate::manifests::{Manifest, NAMESPACE};
use serde_json::Value;
use std::fs;
use std::path::Path;
use std::process::Command;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

/// Agents that have said nothing by then will not.
const PATIENCE: Duration = Duration::from_secs(300);

/// `nvidia-smi` where a driver would have put it, on every node. Without it everything else works.
pub fn bring_nvidia_smi(bed: &Bed) -> Result<(), BedError> {
    let Ok(clients) = Clients::ready() else { return Ok(()) };
    for node in bed.nodes() {
        let place = node.path("/usr/bin/nvidia-smi")?;
        // A machine with a driver has its own.
        if !place.exists() {
            let copied = fs::copy(clients.nvidia_smi(Branch::R550), &place);
            copied.map_err(BedError::io(format!("writing {}", place.display())))?;
        }
    }
    Ok(())
}

/// Applies the manifest and waits until every node has shares to give.
pub(super) fn install(
    state: &State,
    tell: &mut dyn FnMut(&str),
    stop: &AtomicBool,
) -> Result<(), ClusterError> {
    let manifest = Manifest::Simulated.path();
    let kubectl = Binaries::ready().map_err(BedError::from)?.path("kubectl");
    let kubectl = Kubectl { program: &kubectl, kubeconfig: &state.kubeconfig };
    tell("kubectl apply -f deploy/partage-simulated.yaml");
    kubectl.run(&["apply", "-f", &manifest.display().to_string()])?;
    tell("waiting until the nodes have shares of GPUs");
    let start = Instant::now();
    loop {
        if stop.load(Ordering::Relaxed) {
            return Err(BedError::Interrupted.into());
        }
        let nodes = kubectl.run(&["get", "nodes", "-o", "json"])?;
        let waiting = without_shares(&serde_json::from_str(&nodes).unwrap_or_default());
        if waiting.is_empty() {
            return Ok(());
        }
        if start.elapsed() > PATIENCE {
            let logs = ["--namespace", NAMESPACE, "logs", "daemonset/partage-node", "--tail=20"];
            let said = kubectl.run(&logs).unwrap_or_else(|error| error.to_string());
            return Err(ClusterError::NotInstalled { nodes: waiting.join(", "), said });
        }
        std::thread::sleep(Duration::from_millis(250));
    }
}

/// The nodes on which no share of a GPU can be had.
fn without_shares(nodes: &Value) -> Vec<String> {
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
        match output.status.success() {
            true => Ok(text(&output.stdout)),
            false => Err(BedError::Failed { doing, said: text(&output.stderr) }),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    #[test]
    fn nodes_without_shares_are_waited_for() {
        let node = |name: &str, allocatable: Value| json!({"metadata": {"name": name}, "status": {"allocatable": allocatable}});
        let nodes = json!({"items": [
            node("a", json!({"partage.dev/gpu": "20"})),
            node("b", json!({"partage.dev/gpu": "0"})),
            node("c", json!({"cpu": "2"})),
        ]});
        assert_eq!(without_shares(&nodes), ["b", "c"]);
        assert_eq!(without_shares(&Value::Null), ["all"]);
    }
}
