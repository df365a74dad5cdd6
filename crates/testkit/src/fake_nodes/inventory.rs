//! Snapshots to make fake nodes from: generated, or read from a file.

use super::FakeNodesError;
use partage_core::cluster_file::{ClusterFile, ClusterFileError};
use partage_core::model::{Bytes, Gpu, MilliCpu, Node};
use std::path::Path;

const GIB: u64 = 1 << 30;

/// What each generated node has.
#[derive(Clone, Debug)]
pub struct Template {
    /// The names' beginning; a number follows.
    pub prefix: String,
    /// GPUs per node, half of them on each of two NUMA nodes.
    pub gpus: u32,
    /// Their product name.
    pub model: String,
    /// The memory of each.
    pub gpu_memory: Bytes,
    /// CPU for pods.
    pub cpu: MilliCpu,
    /// Host memory for pods.
    pub memory: Bytes,
}

impl Default for Template {
    /// Eight A100 with 80 GiB, 96 CPUs, 768 GiB.
    fn default() -> Template {
        Template {
            prefix: "fake-".into(),
            gpus: 8,
            model: "NVIDIA A100-SXM4-80GB".into(),
            gpu_memory: Bytes(80 * GIB),
            cpu: MilliCpu(96_000),
            memory: Bytes(768 * GIB),
        }
    }
}

/// A snapshot of so many equal nodes, the same each time it is asked for.
///
/// Refused, with the reason, where the template makes no valid node.
pub fn inventory(nodes: u32, template: &Template) -> Result<ClusterFile, ClusterFileError> {
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

/// The prefix is part of it: two templates with different names can be in one cluster.
fn uuid(prefix: &str, node: u32, minor: u32) -> String {
    let folded = prefix.bytes().fold(0_u32, |sum, byte| sum.rotate_left(5) ^ u32::from(byte));
    format!("GPU-{folded:08x}-{:04x}-5000-8000-{node:08x}{minor:04x}", 0xfa4e)
}

/// Reads a snapshot file (`docs/snapshot.md`).
pub fn read(file: &Path) -> Result<ClusterFile, FakeNodesError> {
    let text =
        std::fs::read_to_string(file).map_err(|source| FakeNodesError::File { file: file.into(), source })?;
    ClusterFile::from_json(&text).map_err(|source| FakeNodesError::Snapshot { file: file.into(), source })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn five_thousand_nodes_make_a_valid_snapshot() {
        let snapshot = inventory(5000, &Template::default()).unwrap();
        assert_eq!(snapshot.nodes.len(), 5000);
        assert_eq!(snapshot.nodes[4999].name.as_str(), "fake-04999");
        assert_eq!(snapshot.nodes[17].gpus.len(), 8);
        let numa: Vec<_> = snapshot.nodes[0].gpus.iter().filter_map(|gpu| gpu.numa).collect();
        assert_eq!(numa, [0, 0, 0, 0, 1, 1, 1, 1]);
        assert_eq!(ClusterFile::from_json(&snapshot.to_json().unwrap()).unwrap(), snapshot);
    }

    #[test]
    fn two_prefixes_share_no_gpu() {
        let of = |prefix: &str| {
            inventory(3, &Template { prefix: prefix.into(), ..Template::default() }).unwrap().nodes
        };
        let both = ClusterFile { nodes: [of("a-"), of("b-")].concat(), grants: Vec::new() };
        both.check().unwrap();
    }

    #[test]
    fn a_template_without_gpus_is_a_node_without_gpus() {
        let snapshot = inventory(2, &Template { gpus: 0, ..Template::default() }).unwrap();
        assert!(snapshot.nodes.iter().all(|node| node.gpus.is_empty()));
    }

    #[test]
    fn a_template_that_makes_no_valid_node_is_refused() {
        let error = inventory(1, &Template { gpus: 65, ..Template::default() }).unwrap_err();
        assert_eq!(error.to_string(), "nodes[0] (fake-00000).gpus: are 65: a node has 64 at the most");
    }

    #[test]
    fn a_file_is_read_and_named_in_errors() {
        let example = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../examples/cluster.json");
        assert_eq!(read(&example).unwrap().nodes[0].name.as_str(), "gpu-a");
        let error = read(Path::new("no/such.json")).unwrap_err().to_string();
        assert!(error.starts_with("cannot read no/such.json: "), "{error}");
        let manifest = Path::new(env!("CARGO_MANIFEST_DIR")).join("Cargo.toml");
        let error = read(&manifest).unwrap_err().to_string();
        assert!(error.contains("Cargo.toml: snapshot: "), "{error}");
    }
}
