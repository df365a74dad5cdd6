use super::*;
use crate::profile::{self, GpuProfile};
use crate::state::GpuFault;
use partage_driver_api::exports::DriverVersion;
use proptest::prelude::*;
use std::os::unix::fs::PermissionsExt;

fn config(card: &GpuProfile, count: usize) -> NodeConfig {
    NodeConfig::new(DriverVersion::R550, card, count, 7).unwrap()
}

fn matrix(config: &NodeConfig) -> Vec<String> {
    let cell = |a, b| match config.nvlinks(a, b) {
        _ if a == b => "X".to_string(),
        0 => config.pci_path(a, b).unwrap().name().to_string(),
        links => format!("NV{links}"),
    };
    let count = config.gpus.len();
    (0..count).map(|a| (0..count).map(|b| cell(a, b)).collect::<Vec<_>>().join(" ")).collect()
}

#[test]
fn every_card_and_count_makes_a_valid_node() {
    for card in GpuProfile::ALL {
        for count in 1..=MAX_NODE_GPUS {
            let config = config(card, count);
            assert_eq!(config.gpus.len(), count);
            let mut minors: Vec<u32> = config.gpus.iter().map(|gpu| gpu.minor).collect();
            minors.sort_unstable();
            assert_eq!(minors, (0..count as u32).collect::<Vec<_>>(), "minor numbers have no gaps");
            assert_eq!(NodeConfig::from_json(&config.to_json().unwrap()).unwrap(), config);
            // NVML and CUDA enumerate GPUs in the order of their PCI addresses.
            assert!(config.gpus.is_sorted_by_key(|gpu| gpu.pci));
        }
        for count in [0, MAX_NODE_GPUS + 1] {
            assert_eq!(NodeConfig::new(DriverVersion::R535, card, count, 7), Err(ConfigError::Count(count)));
        }
    }
}

#[test]
fn topology_matches_nvidia_smi() {
    let dgx1 = [
        "X NV1 NV1 NV2 NV2 SYS SYS SYS",
        "NV1 X NV2 NV1 SYS NV2 SYS SYS",
        "NV1 NV2 X NV2 SYS SYS NV1 SYS",
        "NV2 NV1 NV2 X SYS SYS SYS NV1",
        "NV2 SYS SYS SYS X NV1 NV1 NV2",
        "SYS NV2 SYS SYS NV1 X NV2 NV1",
        "SYS SYS NV1 SYS NV1 NV2 X NV2",
        "SYS SYS SYS NV1 NV2 NV1 NV2 X",
    ];
    let v100 = config(&profile::V100_SXM2_32GB, 8);
    assert_eq!(matrix(&v100), dgx1);
    assert!(v100.gpus.iter().all(|gpu| gpu.links.len() == 6), "every link is used");
    assert_eq!(matrix(&config(&profile::A100_SXM4_40GB, 3)), ["X NV12 NV12", "NV12 X NV12", "NV12 NV12 X"]);
    assert_eq!(matrix(&config(&profile::H100_SXM5_80GB, 2)), ["X NV18", "NV18 X"]);
    assert_eq!(
        matrix(&config(&profile::T4, 5)),
        [
            "X PIX NODE NODE SYS",
            "PIX X NODE NODE SYS",
            "NODE NODE X PIX SYS",
            "NODE NODE PIX X SYS",
            "SYS SYS SYS SYS X"
        ]
    );
    assert_eq!(matrix(&config(&profile::A30, 3)), ["X NV4 NODE", "NV4 X NODE", "NODE NODE X"]);
    let two_boards = config(&profile::A100_SXM4_40GB, 16);
    assert_eq!((two_boards.nvlinks(0, 7), two_boards.nvlinks(7, 8), two_boards.nvlinks(8, 15)), (12, 0, 12));
}

#[test]
fn a100_board_has_the_published_addresses() {
    let config = config(&profile::A100_SXM4_80GB, 8);
    let gpu = &config.gpus[0];
    assert_eq!(gpu.pci.to_string(), "00000000:07:00.0");
    assert_eq!((gpu.numa, gpu.minor, gpu.board_id()), (3, 2, 0x700));
    assert_eq!(gpu.cpus.to_string(), "48-63,176-191");
    assert_eq!(config.pci_path(0, 1), Some(PciPath::Pxb));
    assert_eq!(gpu.links[0].to_string(), "switch 00000000:C4:00.0");
}

#[test]
fn expected_inventory_lists_gpus_and_links() {
    let config = config(&profile::V100_SXM2_32GB, 6);
    let node = config.expected_inventory("here");
    assert_eq!(node.gpus[0].model, "Tesla V100-SXM2-32GB");
    // Without the memory that the driver reserves.
    assert_eq!(node.gpus[0].memory_bytes.0, (32 << 30) - profile::V100_SXM2_32GB.memory.reserved);
    let rows: Vec<String> = node.links.clone().unwrap().into();
    assert_eq!(rows[0], "X NV NV NV NV SYS");
    assert_eq!(node.gpus[4].numa, Some(1));
}

#[test]
fn uuids_are_derived_from_the_seed() {
    let uuids = |seed| {
        let config = NodeConfig::new(DriverVersion::R550, &profile::T4, 16, seed).unwrap();
        config.gpus.into_iter().map(|gpu| gpu.uuid).collect::<Vec<_>>()
    };
    assert_eq!(uuids(1), uuids(1));
    let mut all: Vec<String> = (0..100).flat_map(uuids).collect();
    all.sort();
    all.dedup();
    assert_eq!(all.len(), 1600);
    // Existing nodes and recorded output contain them, so a change of the derivation is visible to users.
    assert_eq!(uuids(0)[0], "GPU-a706dd2f-4d19-7e6f-b382-a305f4414f5e");
}

#[test]
fn invalid_node_configs_are_refused_with_a_reason() {
    let good = serde_json::to_value(config(&profile::V100_SXM2_16GB, 2)).unwrap();
    let with = |pointer: &str, value: serde_json::Value| {
        let mut wrong = good.clone();
        *wrong.pointer_mut(pointer).unwrap() = value;
        NodeConfig::from_json(&wrong.to_string()).unwrap_err().to_string()
    };
    let uuid = good.pointer("/gpus/0/uuid").unwrap().clone();
    for (error, words) in [
        (with("/version", 2.into()), "unsupported version 2"),
        (with("/driver", "470".into()), "cannot simulate driver 470: use 535.261.03 or 550.163.01"),
        (with("/gpus", serde_json::json!([])), "a node with 0 GPUs"),
        (with("/pciPaths", serde_json::json!(["X"])), "pciPaths has 1 rows for 2 GPUs"),
        (with("/settings/queue", 0.into()), "settings.queue is 0: use 1 to"),
        (with("/gpus/1/uuid", uuid), "is used by another GPU"),
        (with("/gpus/1/uuid", "GPU-1".into()), "GPU 1: invalid UUID \"GPU-1\""),
        (with("/gpus/1/minor", 0.into()), "GPU 1: minor number 0 is used by another GPU"),
        (
            with("/gpus/1/pci", "00000000:06:00.0".into()),
            "GPU 1: PCI address 00000000:06:00.0 is used by another GPU",
        ),
        (with("/gpus/1/model", "T4".into()), "GPU 1: profiles does not contain T4"),
        (
            with("/gpus/0/links/0", "gpu 1 link 5".into()),
            "GPU 0: link 0 ends at gpu 1 link 5, which is not linked back",
        ),
        (with("/gpus/0/links/0", "gpu 1".into()), "invalid NVLink end \"gpu 1\""),
        (with("/gpus/0/cpus", "all".into()), "invalid list of CPUs \"all\""),
        (with("/profiles/0/memory/total", 0.into()), "\"memory.total\" is 0"),
    ] {
        assert!(error.contains(words), "{error}");
    }
    let mut extra = good.clone();
    extra["gpu"] = 1.into();
    assert!(
        NodeConfig::from_json(&extra.to_string()).unwrap_err().to_string().contains("unknown field `gpu`")
    );
}

#[test]
fn node_is_created_once_and_opened_afterwards() {
    let temp = tempfile::tempdir().unwrap();
    let dir = temp.path().join("a/node");
    let node = NodeDir::create(&dir, &config(&profile::T4, 2)).unwrap();
    let again = NodeDir::create(&dir, &config(&profile::T4, 2)).unwrap();
    assert_eq!((again.path(), again.config()), (node.path(), NodeDir::open(&dir).unwrap().config()));
    let bits = |path: &Path| fs::metadata(path).unwrap().permissions().mode() & 0o7777;
    assert_eq!(bits(&dir), 0o755);
    assert_eq!(
        (bits(&node.state_file()), bits(&node.shared_dir()), bits(&node.libraries())),
        (0o666, 0o1777, 0o755)
    );
    for (asked, words) in [
        (config(&profile::T4, 3), "it has 2 x T4, requested 3 x T4"),
        (config(&profile::A10, 2), "it has 2 x T4, requested 2 x A10"),
        (
            NodeConfig::new(DriverVersion::R535, &profile::T4, 2, 7).unwrap(),
            "its driver is 550.163.01, requested 535.261.03",
        ),
        (NodeConfig::new(DriverVersion::R550, &profile::T4, 2, 8).unwrap(), "its seed is 7, requested 8"),
    ] {
        let error = NodeDir::create(&dir, &asked).unwrap_err().to_string();
        assert!(error.contains(words) && error.contains("partage sim rm"), "{error}");
    }
    NodeDir::remove(&dir).unwrap();
    assert!(!dir.exists());
    assert!(NodeDir::remove(&dir).unwrap_err().to_string().contains("is not a simulated node"));
}

#[test]
fn foreign_directory_is_left_unchanged() {
    let temp = tempfile::tempdir().unwrap();
    fs::write(temp.path().join("thesis.tex"), "").unwrap();
    let error = NodeDir::create(temp.path(), &config(&profile::T4, 1)).unwrap_err().to_string();
    assert!(error.contains("contains thesis.tex, which does not belong to a simulated node"), "{error}");
    assert_eq!(fs::read_dir(temp.path()).unwrap().count(), 1, "no file was added");
    assert!(NodeDir::open(temp.path()).is_err() && NodeDir::remove(temp.path()).is_err());
    // A node that contains a foreign file is not removed.
    let node = temp.path().join("node");
    NodeDir::create(&node, &config(&profile::T4, 1)).unwrap();
    fs::write(node.join("notes"), "").unwrap();
    assert!(NodeDir::remove(&node).is_err() && node.join("notes").exists());
}

#[test]
fn interrupted_creation_is_completed() {
    let temp = tempfile::tempdir().unwrap();
    for left in [LIBRARY_DIR, DEVICE_DIR, SHARED_DIR] {
        fs::create_dir(temp.path().join(left)).unwrap();
    }
    fs::write(temp.path().join(DEVICE_DIR).join("nvidia7"), "").unwrap();
    for left in [STATE_FILE, LOCK_FILE, CONFIG_TEMP_FILE] {
        fs::write(temp.path().join(left), "half").unwrap();
    }
    assert!(matches!(NodeDir::open(temp.path()), Err(NodeError::NotANode { .. })));
    NodeDir::create(temp.path(), &config(&profile::T4, 1)).unwrap();
    let node = NodeDir::open(temp.path()).unwrap();
    assert!(node.devices().join("nvidia0").exists() && !node.devices().join("nvidia7").exists());
}

#[test]
fn device_files_decide_which_gpus_are_usable() {
    let temp = tempfile::tempdir().unwrap();
    let node = NodeDir::create(&temp.path().join("node"), &config(&profile::A100_SXM4_40GB, 4)).unwrap();
    let file = |gpu: usize| node.devices().join(format!("nvidia{}", node.config().gpus[gpu].minor));
    let bits = |path: &Path| fs::metadata(path).unwrap().permissions().mode() & 0o7777;
    assert_eq!((bits(&node.devices()), bits(&file(3)), bits(&file(0))), (0o755, 0o444, 0o444));
    assert_eq!(fs::read_dir(node.devices()).unwrap().count(), 4);
    assert_eq!(node.usable_gpus(), [0, 1, 2, 3]);
    fs::remove_file(file(2)).unwrap();
    assert_eq!(node.usable_gpus(), [0, 1, 3]);
    // Without the directory, all GPUs are usable; with an empty one, none is.
    fs::remove_dir_all(node.devices()).unwrap();
    assert_eq!(node.usable_gpus(), [0, 1, 2, 3]);
    fs::create_dir(node.devices()).unwrap();
    assert!(node.usable_gpus().is_empty());
    NodeDir::remove(node.path()).unwrap();
}

#[test]
fn node_can_start_in_mig_mode() {
    let temp = tempfile::tempdir().unwrap();
    let mut split = config(&profile::A100_SXM4_40GB, 2);
    split.gpus[1].mig = true;
    assert_eq!(NodeConfig::from_json(&split.to_json().unwrap()), Ok(split.clone()));
    let node = NodeDir::create(&temp.path().join("node"), &split).unwrap();
    let state = SimNodeState::attach(node.path()).unwrap();
    assert!(!node.is_mig_enabled(&state, 0) && node.is_mig_enabled(&state, 1));
    state.inject(0, GpuFault::Mig(true));
    state.inject(1, GpuFault::Mig(false));
    assert!(node.is_mig_enabled(&state, 0) && !node.is_mig_enabled(&state, 1));
    let words = split.difference(&config(&profile::A100_SXM4_40GB, 2)).unwrap();
    assert!(words.contains("MIG mode"), "{words}");
    let mut uncut = config(&profile::T4, 1);
    uncut.gpus[0].mig = true;
    assert!(uncut.validate().unwrap_err().to_string().contains("T4 does not support MIG mode"));
    NodeDir::remove(node.path()).unwrap();
}

#[test]
fn unconfigured_node_error_names_both_ways() {
    let words = NodeError::NotConfigured.to_string();
    assert!(words.contains(NODE_DIR_VARIABLE) && words.contains("this library file contains"), "{words}");
}

#[test]
fn concurrent_creation_makes_one_node() {
    let temp = tempfile::tempdir().unwrap();
    let dir = temp.path().join("node");
    let nodes: Vec<NodeDir> = std::thread::scope(|scope| {
        let makers: Vec<_> = (0..8)
            .map(|_| scope.spawn(|| NodeDir::create(&dir, &config(&profile::T4, 4)).unwrap()))
            .collect();
        makers.into_iter().map(|maker| maker.join().unwrap()).collect()
    });
    assert!(nodes.iter().all(|node| node.config() == nodes[0].config()));
}

#[test]
fn temporary_nodes_have_distinct_directories() {
    let nodes: Vec<NodeDir> =
        (0..3).map(|_| NodeDir::create_temporary(&config(&profile::T4, 1)).unwrap()).collect();
    assert!(nodes[0].path() != nodes[1].path() && nodes[1].path() != nodes[2].path());
    for node in nodes {
        NodeDir::remove(node.path()).unwrap();
    }
}

proptest! {
    #[test]
    fn random_text_is_refused(text in "\\PC{0,200}") {
        prop_assert!(NodeConfig::from_json(&text).is_err());
    }

    #[test]
    fn changed_byte_does_not_panic(at in any::<prop::sample::Index>(), byte in any::<u8>()) {
        let mut text = config(&profile::V100_SXM2_16GB, 3).to_json().unwrap().into_bytes();
        let at = at.index(text.len());
        text[at] = byte;
        if let Ok(text) = String::from_utf8(text) && let Ok(config) = NodeConfig::from_json(&text) {
            prop_assert!(config.validate().is_ok());
            config.expected_inventory("any");
        }
    }
}

#[test]
fn node_is_recreated_only_if_different_or_damaged_and_unused() {
    let folder = tempfile::tempdir().unwrap();
    let dir = folder.path().join("node");
    let (one, two) = (config(&profile::T4, 1), config(&profile::T4, 2));
    let file =
        |node: &NodeDir| std::os::unix::fs::MetadataExt::ino(&fs::metadata(node.state_file()).unwrap());
    let first = NodeDir::open_or_recreate(&dir, &one, true).unwrap();
    let before = file(&first);
    assert_eq!(file(&NodeDir::open_or_recreate(&dir, &one, false).unwrap()), before);
    let error = NodeDir::open_or_recreate(&dir, &two, true).unwrap_err().to_string();
    assert!(error.contains("other GPUs, and is in use"), "{error}");
    assert_eq!(NodeDir::open_or_recreate(&dir, &two, false).unwrap().config(), &two);
    // A truncated state file.
    fs::write(dir.join(STATE_FILE), "short").unwrap();
    let error = NodeDir::open_or_recreate(&dir, &two, true).unwrap_err().to_string();
    assert!(error.contains("damaged, and is in use"), "{error}");
    let again = NodeDir::open_or_recreate(&dir, &two, false).unwrap();
    assert!(crate::state::SimNodeState::attach(again.path()).is_ok());
    // A directory that is not a node is left alone.
    let other = tempfile::tempdir().unwrap();
    fs::write(other.path().join("letter"), "").unwrap();
    assert!(matches!(
        NodeDir::open_or_recreate(other.path(), &one, false),
        Err(NodeError::ForeignFile { .. })
    ));
}
