//! `topo -m`: the connections between GPUs.

use crate::client_node::ClientNode;

/// Returns the rows of the matrix: the connection to every other GPU, then CPUs, NUMA node, and NUMA node of its
/// memory.
fn matrix(client_node: &ClientNode) -> Vec<Vec<String>> {
    let output = client_node.nvidia_smi(&["topo", "-m"]).success();
    let rows = output.lines().filter(|line| line.starts_with("GPU"));
    rows.map(|line| line.split_whitespace().skip(1).map(str::to_string).collect()).collect()
}

fn assert_matches_node(client_node: &ClientNode) -> Vec<Vec<String>> {
    let (config, matrix) = (client_node.node.config(), matrix(client_node));
    assert_eq!(matrix.len(), config.gpus.len());
    for (a, row) in matrix.iter().enumerate() {
        let way = |b: usize| match (config.pci_path(a, b), config.nvlinks(a, b)) {
            (None, _) => "X".to_string(),
            (Some(path), 0) => path.name().to_string(),
            (Some(_), links) => format!("NV{links}"),
        };
        let gpu = &config.gpus[a];
        let mut expected: Vec<String> = (0..config.gpus.len()).map(way).collect();
        expected.extend([gpu.cpus.to_string(), gpu.numa.to_string(), "N/A".to_string()]);
        assert_eq!(*row, expected, "GPU {a}");
    }
    matrix
}

#[test]
fn gpus_behind_nvswitch_have_all_links_to_each_other() {
    for client_node in ClientNode::one_model("A100-SXM4-40GB", 8) {
        for (gpu, row) in assert_matches_node(&client_node).iter().enumerate() {
            assert!((0..8).all(|other| row[other] == if other == gpu { "X" } else { "NV12" }), "{row:?}");
        }
    }
}

#[test]
fn gpus_in_a_mesh_have_up_to_two_links() {
    for client_node in ClientNode::one_model("V100-SXM2-32GB", 8) {
        let matrix = assert_matches_node(&client_node);
        // The DGX-1 topology in NVIDIA's documentation.
        assert_eq!(matrix[0][..8], ["X", "NV1", "NV1", "NV2", "NV2", "SYS", "SYS", "SYS"]);
        assert_eq!(matrix[7][..8], ["SYS", "SYS", "SYS", "NV1", "NV2", "NV1", "NV2", "X"]);
    }
}

#[test]
fn gpus_without_nvlink_connect_over_pcie() {
    for client_node in ClientNode::one_model("T4", 4) {
        assert_eq!(
            assert_matches_node(&client_node)[0],
            ["X", "PIX", "NODE", "NODE", "0-23,48-71", "0", "N/A"]
        );
    }
}

#[test]
fn nvlink_status_shows_link_speed() {
    for client_node in ClientNode::one_model("A100-SXM4-40GB", 2) {
        let output = client_node.nvidia_smi(&["nvlink", "-s", "-i", "1"]).success();
        let uuid = &client_node.node.config().gpus[1].uuid;
        let links: String = (0..12).map(|link| format!("\t Link {link}: 25 GB/s\n")).collect();
        assert_eq!(output, format!("GPU 1: NVIDIA A100-SXM4-40GB (UUID: {uuid})\n{links}"));
    }
}

#[test]
fn unconnected_nvlinks_are_inactive() {
    // Two GPUs of a mesh of eight: the other links of each lead to GPUs that do not exist.
    for client_node in ClientNode::one_model("V100-SXM2-32GB", 2) {
        let output = client_node.nvidia_smi(&["nvlink", "-s", "-i", "0"]).success();
        let links: Vec<&str> = output.lines().skip(1).map(str::trim).collect();
        assert_eq!(links[..2], ["Link 0: 25.781 GB/s", "Link 1: <inactive>"], "{output}");
        assert_eq!(links.len(), 6, "{output}");
    }
}
