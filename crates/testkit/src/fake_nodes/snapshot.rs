//! Snapshots to create fake nodes from: generated, or read from a file.

use super::FakeNodesError;
use partage_core::cluster_file::{ClusterFile, ClusterFileError};
use partage_core::model::{Bytes, Gpu, MilliCpu, Node};
use std::path::Path;

const GIB: u64 = 1 << 30;

/// The properties of each generated node.
#[derive(Clone, Debug)]
pub struct NodeTemplate {
    /// Prefix of the node names; a number follows.
    pub prefix: String,
    /// GPUs per node, half of them on each of two NUMA nodes.
    pub gpus: u32,
    /// Product name of the GPUs.
    pub model: String,
    /// Memory of each GPU.
    pub gpu_memory: Bytes,
    /// CPU that pods can request.
    pub cpu: MilliCpu,
    /// Host memory for pods.
    pub memory: Bytes,
}

impl Default for NodeTemplate {
    /// Eight A100 GPUs with 80 GiB, 96 CPUs, 768 GiB of host memory.
    fn default() -> NodeTemplate {
        NodeTemplate {
            prefix: "fake-".into(),
            gpus: 8,
            model: "NVIDIA A100-SXM4-80GB".into(),
            gpu_memory: Bytes(80 * GIB),
            cpu: MilliCpu(96_000),
            memory: Bytes(768 * GIB),
        }
    }
}

/// Generates a snapshot of equal nodes. The result depends only on the arguments.
///
/// Fails with the reason if the template makes no valid node.
pub fn generate_snapshot(nodes: u32, template: &NodeTemplate) -> Result<ClusterFile, ClusterFileError> {
    let nodes = (0..nodes).map(|number| {
        let gpus = (0..template.gpus).map(|minor| Gpu {
            uuid: uuid(&template.prefix, number, minor).as_str().into(),
            minor,
            model: template.model.clone(),
            memory_bytes: template.gpu_memory,
            numa: Some(minor * 2 / template.gpus),
            pci: Some(format!("0000:{:02x}:00.0", minor + 1)),
            withheld: None,
        });
        let mut node = Node::new(format!("{}{number:05}", template.prefix).as_str(), gpus.collect());
        (node.cpu_milli, node.memory_bytes) = (Some(template.cpu), Some(template.memory));
        node
    });
    let snapshot = ClusterFile { nodes: nodes.collect(), grants: Vec::new() };
    snapshot.check()?;
    Ok(snapshot)
}

/// Returns the UUID of a GPU. It depends on the prefix, so that nodes of two templates can be in one cluster.
fn uuid(prefix: &str, node: u32, minor: u32) -> String {
    let folded = prefix.bytes().fold(0_u32, |sum, byte| sum.rotate_left(5) ^ u32::from(byte));
    format!("GPU-{folded:08x}-{:04x}-5000-8000-{node:08x}{minor:04x}", 0xfa4e)
}

/// Reads a snapshot file (`docs/snapshot.md`).
pub fn read_snapshot(file: &Path) -> Result<ClusterFile, FakeNodesError> {
    let text =
        std::fs::read_to_string(file).map_err(|source| FakeNodesError::File { file: file.into(), source })?;
    ClusterFile::from_json(&text).map_err(|source| FakeNodesError::Snapshot { file: file.into(), source })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn snapshot_of_five_thousand_nodes_is_valid() {
        let snapshot = generate_snapshot(5000, &NodeTemplate::default()).unwrap();
        assert_eq!(snapshot.nodes.len(), 5000);
        assert_eq!(snapshot.nodes[4999].name.as_str(), "fake-04999");
        assert_eq!(snapshot.nodes[17].gpus.len(), 8);
        let numa: Vec<_> = snapshot.nodes[0].gpus.iter().filter_map(|gpu| gpu.numa).collect();
        assert_eq!(numa, [0, 0, 0, 0, 1, 1, 1, 1]);
        assert_eq!(ClusterFile::from_json(&snapshot.to_json().unwrap()).unwrap(), snapshot);
    }

    #[test]
    fn snapshots_with_different_prefixes_have_different_gpus() {
        let of = |prefix: &str| {
            generate_snapshot(3, &NodeTemplate { prefix: prefix.into(), ..NodeTemplate::default() })
                .unwrap()
                .nodes
        };
        let both = ClusterFile { nodes: [of("a-"), of("b-")].concat(), grants: Vec::new() };
        both.check().unwrap();
    }

    #[test]
    fn template_without_gpus_makes_nodes_without_gpus() {
        let snapshot = generate_snapshot(2, &NodeTemplate { gpus: 0, ..NodeTemplate::default() }).unwrap();
        assert!(snapshot.nodes.iter().all(|node| node.gpus.is_empty()));
    }

    #[test]
    fn invalid_template_is_refused() {
        let error = generate_snapshot(1, &NodeTemplate { gpus: 65, ..NodeTemplate::default() }).unwrap_err();
        assert_eq!(error.to_string(), "nodes[0] (fake-00000).gpus: are 65: the maximum is 64");
    }

    #[test]
    fn snapshot_file_is_read_and_named_in_errors() {
        let example = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../examples/cluster.json");
        assert_eq!(read_snapshot(&example).unwrap().nodes[0].name.as_str(), "gpu-a");
        let error = read_snapshot(Path::new("no/such.json")).unwrap_err().to_string();
        assert!(error.starts_with("cannot read no/such.json: "), "{error}");
        let manifest = Path::new(env!("CARGO_MANIFEST_DIR")).join("Cargo.toml");
        let error = read_snapshot(&manifest).unwrap_err().to_string();
        assert!(error.contains("Cargo.toml: snapshot: "), "{error}");
    }
}
