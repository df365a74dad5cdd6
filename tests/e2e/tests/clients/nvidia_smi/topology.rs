//! `topo -m`: how GPUs reach each other.

use crate::stage::Stage;

/// The rows of the matrix: the words for every other GPU, then CPUs, NUMA node, and NUMA node of its memory.
fn matrix(stage: &Stage) -> Vec<Vec<String>> {
    let said = stage.smi(&["topo", "-m"]).well();
    let rows = said.lines().filter(|line| line.starts_with("GPU"));
    rows.map(|line| line.split_whitespace().skip(1).map(str::to_string).collect()).collect()
}

fn is_the_nodes(stage: &Stage) -> Vec<Vec<String>> {
    let (config, matrix) = (stage.node.config(), matrix(stage));
    assert_eq!(matrix.len(), config.gpus.len());
    for (a, row) in matrix.iter().enumerate() {
        let way = |b: usize| match (config.pci_path(a, b), config.nvlinks(a, b)) {
            (None, _) => "X".to_string(),
            (Some(path), 0) => path.word().to_string(),
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
fn gpus_behind_switches_have_all_links_to_all() {
    for stage in Stage::both("A100-SXM4-40GB", 8) {
        for (gpu, row) in is_the_nodes(&stage).iter().enumerate() {
            assert!((0..8).all(|other| row[other] == if other == gpu { "X" } else { "NV12" }), "{row:?}");
        }
    }
}

#[test]
fn gpus_in_a_mesh_have_one_link_two_or_none() {
    for stage in Stage::both("V100-SXM2-32GB", 8) {
        let matrix = is_the_nodes(&stage);
        // As NVIDIA draws the DGX-1.
        assert_eq!(matrix[0][..8], ["X", "NV1", "NV1", "NV2", "NV2", "SYS", "SYS", "SYS"]);
        assert_eq!(matrix[7][..8], ["SYS", "SYS", "SYS", "NV1", "NV2", "NV1", "NV2", "X"]);
    }
}

#[test]
fn cards_in_slots_meet_on_the_bus() {
    for stage in Stage::both("T4", 4) {
        assert_eq!(is_the_nodes(&stage)[0], ["X", "PIX", "NODE", "NODE", "0-23,48-71", "0", "N/A"]);
    }
}

#[test]
fn links_have_their_speed() {
    for stage in Stage::both("A100-SXM4-40GB", 2) {
        let said = stage.smi(&["nvlink", "-s", "-i", "1"]).well();
        let uuid = &stage.node.config().gpus[1].uuid;
        let links: String = (0..12).map(|link| format!("\t Link {link}: 25 GB/s\n")).collect();
        assert_eq!(said, format!("GPU 1: NVIDIA A100-SXM4-40GB (UUID: {uuid})\n{links}"));
    }
}

#[test]
fn links_that_lead_nowhere_are_inactive() {
    // Two of a mesh of eight: the other links of each lead to GPUs that are not there.
    for stage in Stage::both("V100-SXM2-32GB", 2) {
        let said = stage.smi(&["nvlink", "-s", "-i", "0"]).well();
        let links: Vec<&str> = said.lines().skip(1).map(str::trim).collect();
        assert_eq!(links[..2], ["Link 0: 25.781 GB/s", "Link 1: <inactive>"], "{said}");
        assert_eq!(links.len(), 6, "{said}");
    }
}
