use super::*;
use crate::profile::{self, Profile};
use crate::state::Fault;
use partage_driver_api::exports::DriverVersion;
use proptest::prelude::*;
use std::os::unix::fs::PermissionsExt;

fn config(card: &Profile, count: usize) -> NodeConfig {
    NodeConfig::new(DriverVersion::R550, card, count, 7).unwrap()
}

fn matrix(config: &NodeConfig) -> Vec<String> {
    let cell = |a, b| match config.nvlinks(a, b) {
        _ if a == b => "X".to_string(),
        0 => config.pci_path(a, b).unwrap().word().to_string(),
        links => format!("NV{links}"),
    };
    let count = config.gpus.len();
    (0..count).map(|a| (0..count).map(|b| cell(a, b)).collect::<Vec<_>>().join(" ")).collect()
}

#[test]
fn every_count_of_every_card_is_a_valid_node() {
    for card in Profile::ALL {
        for count in 1..=MOST_GPUS {
            let config = config(card, count);
            assert_eq!(config.gpus.len(), count);
            let mut minors: Vec<u32> = config.gpus.iter().map(|gpu| gpu.minor).collect();
            minors.sort_unstable();
            assert_eq!(minors, (0..count as u32).collect::<Vec<_>>(), "device files have no gaps");
            assert_eq!(NodeConfig::from_json(&config.to_json().unwrap()).unwrap(), config);
            // NVML and CUDA count in the order of addresses.
            assert!(config.gpus.is_sorted_by_key(|gpu| gpu.pci));
        }
        for count in [0, MOST_GPUS + 1] {
            assert_eq!(NodeConfig::new(DriverVersion::R535, card, count, 7), Err(ConfigError::Count(count)));
        }
    }
}

#[test]
fn nodes_look_as_nvidia_smi_shows_them() {
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
fn an_a100_board_is_where_it_is() {
    let config = config(&profile::A100_SXM4_80GB, 8);
    let gpu = &config.gpus[0];
    assert_eq!(gpu.pci.to_string(), "00000000:07:00.0");
    assert_eq!((gpu.numa, gpu.minor, gpu.board_id()), (3, 2, 0x700));
    assert_eq!(gpu.cpus.to_string(), "48-63,176-191");
    assert_eq!(config.pci_path(0, 1), Some(PciPath::Pxb));
    assert_eq!(gpu.links[0].to_string(), "switch 00000000:C4:00.0");
}

#[test]
fn the_truth_is_what_discovery_should_find() {
    let config = config(&profile::V100_SXM2_32GB, 6);
    let node = config.expected_inventory("here");
    assert_eq!(node.gpus[0].model, "Tesla V100-SXM2-32GB");
    // Without what the driver keeps for itself.
    assert_eq!(node.gpus[0].memory_bytes.0, (32 << 30) - profile::V100_SXM2_32GB.memory.reserved);
    let rows: Vec<String> = node.links.clone().unwrap().into();
    assert_eq!(rows[0], "X NV NV NV NV SYS");
    assert_eq!(node.gpus[4].numa, Some(1));
}

#[test]
fn uuids_come_from_the_seed() {
    let uuids = |seed| {
        let config = NodeConfig::new(DriverVersion::R550, &profile::T4, 16, seed).unwrap();
        config.gpus.into_iter().map(|gpu| gpu.uuid).collect::<Vec<_>>()
    };
    assert_eq!(uuids(1), uuids(1));
    let mut all: Vec<String> = (0..100).flat_map(uuids).collect();
    all.sort();
    all.dedup();
    assert_eq!(all.len(), 1600);
    // Folders and transcripts have them: another way to make them is a change that users see.
    assert_eq!(uuids(0)[0], "GPU-a706dd2f-4d19-7e6f-b382-a305f4414f5e");
}

#[test]
fn what_is_wrong_with_a_node_is_said() {
    let good = serde_json::to_value(config(&profile::V100_SXM2_16GB, 2)).unwrap();
    let with = |pointer: &str, value: serde_json::Value| {
        let mut wrong = good.clone();
        *wrong.pointer_mut(pointer).unwrap() = value;
        NodeConfig::from_json(&wrong.to_string()).unwrap_err().to_string()
    };
    let uuid = good.pointer("/gpus/0/uuid").unwrap().clone();
    for (error, words) in [
        (with("/version", 2.into()), "version 2 is not known"),
        (with("/driver", "470".into()), "driver 470 cannot be simulated: use 535.261.03 or 550.163.01"),
        (with("/gpus", serde_json::json!([])), "a node with 0 GPUs"),
        (with("/pciPaths", serde_json::json!(["X"])), "pciPaths has 1 rows for 2 GPUs"),
        (with("/settings/queue", 0.into()), "settings.queue is 0: use 1 to"),
        (with("/gpus/1/uuid", uuid), "GPU 1: another one has the UUID"),
        (with("/gpus/1/uuid", "GPU-1".into()), "GPU 1: \"GPU-1\" is no UUID"),
        (with("/gpus/1/minor", 0.into()), "GPU 1: another one has the minor number 0"),
        (with("/gpus/1/pci", "00000000:06:00.0".into()), "GPU 1: another one has the address"),
        (with("/gpus/1/model", "T4".into()), "GPU 1: profiles has no T4"),
        (
            with("/gpus/0/links/0", "gpu 1 link 5".into()),
            "GPU 0: link 0 ends at gpu 1 link 5, which does not",
        ),
        (with("/gpus/0/links/0", "gpu 1".into()), "\"gpu 1\" is no end of an NVLink"),
        (with("/gpus/0/cpus", "all".into()), "\"all\" is no list of CPUs"),
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
fn a_folder_is_made_once_and_opened_after() {
    let temp = tempfile::tempdir().unwrap();
    let dir = temp.path().join("a/node");
    let node = NodeDir::create(&dir, &config(&profile::T4, 2)).unwrap();
    let again = NodeDir::create(&dir, &config(&profile::T4, 2)).unwrap();
    assert_eq!((again.path(), again.config()), (node.path(), NodeDir::open(&dir).unwrap().config()));
    let bits = |path: &Path| fs::metadata(path).unwrap().permissions().mode() & 0o7777;
    assert_eq!(bits(&dir), 0o755);
    assert_eq!((bits(&node.state()), bits(&node.shared()), bits(&node.libraries())), (0o666, 0o1777, 0o755));
    for (asked, words) in [
        (config(&profile::T4, 3), "it has 2 x T4, asked were 3 x T4"),
        (config(&profile::A10, 2), "it has 2 x T4, asked were 2 x A10"),
        (
            NodeConfig::new(DriverVersion::R535, &profile::T4, 2, 7).unwrap(),
            "its driver is 550.163.01, asked was 535.261.03",
        ),
        (NodeConfig::new(DriverVersion::R550, &profile::T4, 2, 8).unwrap(), "its seed is 7, asked was 8"),
    ] {
        let error = NodeDir::create(&dir, &asked).unwrap_err().to_string();
        assert!(error.contains(words) && error.contains("partage sim rm"), "{error}");
    }
    NodeDir::remove(&dir).unwrap();
    assert!(!dir.exists());
    assert!(NodeDir::remove(&dir).unwrap_err().to_string().contains("is no simulated node"));
}

#[test]
fn a_folder_of_something_else_is_left_alone() {
    let temp = tempfile::tempdir().unwrap();
    fs::write(temp.path().join("thesis.tex"), "").unwrap();
    let error = NodeDir::create(temp.path(), &config(&profile::T4, 1)).unwrap_err().to_string();
    assert!(error.contains("holds thesis.tex, which is no part of a simulated node"), "{error}");
    assert_eq!(fs::read_dir(temp.path()).unwrap().count(), 1, "nothing was added");
    assert!(NodeDir::open(temp.path()).is_err() && NodeDir::remove(temp.path()).is_err());
    // A node that somebody put a file into is not removed with it.
    let node = temp.path().join("node");
    NodeDir::create(&node, &config(&profile::T4, 1)).unwrap();
    fs::write(node.join("notes"), "").unwrap();
    assert!(NodeDir::remove(&node).is_err() && node.join("notes").exists());
}

#[test]
fn what_a_dead_maker_left_is_finished() {
    let temp = tempfile::tempdir().unwrap();
    for left in [LIBRARIES, DEVICES, SHARED] {
        fs::create_dir(temp.path().join(left)).unwrap();
    }
    fs::write(temp.path().join(DEVICES).join("nvidia7"), "").unwrap();
    for left in [STATE, LOCK, UNFINISHED] {
        fs::write(temp.path().join(left), "half").unwrap();
    }
    assert!(matches!(NodeDir::open(temp.path()), Err(NodeError::NoNode { .. })));
    NodeDir::create(temp.path(), &config(&profile::T4, 1)).unwrap();
    let node = NodeDir::open(temp.path()).unwrap();
    assert!(node.devices().join("nvidia0").exists() && !node.devices().join("nvidia7").exists());
}

#[test]
fn device_files_say_which_gpus_a_program_may_use() {
    let temp = tempfile::tempdir().unwrap();
    let node = NodeDir::create(&temp.path().join("node"), &config(&profile::A100_SXM4_40GB, 4)).unwrap();
    let file = |gpu: usize| node.devices().join(format!("nvidia{}", node.config().gpus[gpu].minor));
    let bits = |path: &Path| fs::metadata(path).unwrap().permissions().mode() & 0o7777;
    assert_eq!((bits(&node.devices()), bits(&file(3)), bits(&file(0))), (0o755, 0o444, 0o444));
    assert_eq!(fs::read_dir(node.devices()).unwrap().count(), 4);
    assert_eq!(node.usable(), [0, 1, 2, 3]);
    fs::remove_file(file(2)).unwrap();
    assert_eq!(node.usable(), [0, 1, 3]);
    // A folder without any is one of a program that may use nothing; no folder says nothing.
    fs::remove_dir_all(node.devices()).unwrap();
    assert_eq!(node.usable(), [0, 1, 2, 3]);
    fs::create_dir(node.devices()).unwrap();
    assert!(node.usable().is_empty());
    NodeDir::remove(node.path()).unwrap();
}

#[test]
fn a_node_may_begin_in_mig_mode() {
    let temp = tempfile::tempdir().unwrap();
    let mut split = config(&profile::A100_SXM4_40GB, 2);
    split.gpus[1].mig = true;
    assert_eq!(NodeConfig::from_json(&split.to_json().unwrap()), Ok(split.clone()));
    let node = NodeDir::create(&temp.path().join("node"), &split).unwrap();
    let state = State::attach(node.path()).unwrap();
    assert!(!node.is_split(&state, 0) && node.is_split(&state, 1));
    state.inject(0, Fault::Mig(true));
    state.inject(1, Fault::Mig(false));
    assert!(node.is_split(&state, 0) && !node.is_split(&state, 1));
    let words = split.difference(&config(&profile::A100_SXM4_40GB, 2)).unwrap();
    assert!(words.contains("MIG mode"), "{words}");
    let mut uncut = config(&profile::T4, 1);
    uncut.gpus[0].mig = true;
    assert!(uncut.validate().unwrap_err().to_string().contains("a T4 has no MIG mode"));
    NodeDir::remove(node.path()).unwrap();
}

#[test]
fn who_names_no_node_is_told_both_ways() {
    let words = NodeError::NotNamed.to_string();
    assert!(words.contains(VARIABLE) && words.contains("written into this file"), "{words}");
}

#[test]
fn many_makers_make_one_node() {
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
fn fresh_nodes_are_all_different() {
    let nodes: Vec<NodeDir> = (0..3).map(|_| NodeDir::fresh(&config(&profile::T4, 1)).unwrap()).collect();
    assert!(nodes[0].path() != nodes[1].path() && nodes[1].path() != nodes[2].path());
    for node in nodes {
        NodeDir::remove(node.path()).unwrap();
    }
}

proptest! {
    #[test]
    fn any_text_is_refused_or_a_valid_node(text in "\\PC{0,200}") {
        prop_assert!(NodeConfig::from_json(&text).is_err());
    }

    #[test]
    fn a_changed_byte_never_panics(at in any::<prop::sample::Index>(), byte in any::<u8>()) {
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
fn a_kept_node_is_made_anew_only_where_it_must_and_nobody_uses_it() {
    let folder = tempfile::tempdir().unwrap();
    let dir = folder.path().join("node");
    let (one, two) = (config(&profile::T4, 1), config(&profile::T4, 2));
    let file = |node: &NodeDir| std::os::unix::fs::MetadataExt::ino(&fs::metadata(node.state()).unwrap());
    let first = NodeDir::keep(&dir, &one, true).unwrap();
    let before = file(&first);
    assert_eq!(file(&NodeDir::keep(&dir, &one, false).unwrap()), before);
    let error = NodeDir::keep(&dir, &two, true).unwrap_err().to_string();
    assert!(error.contains("other GPUs, and is in use"), "{error}");
    assert_eq!(NodeDir::keep(&dir, &two, false).unwrap().config(), &two);
    // One that was cut short.
    fs::write(dir.join(STATE), "short").unwrap();
    let error = NodeDir::keep(&dir, &two, true).unwrap_err().to_string();
    assert!(error.contains("damaged, and is in use"), "{error}");
    let again = NodeDir::keep(&dir, &two, false).unwrap();
    assert!(crate::state::State::attach(again.path()).is_ok());
    // What is no node of ours stays.
    let other = tempfile::tempdir().unwrap();
    fs::write(other.path().join("letter"), "").unwrap();
    assert!(matches!(NodeDir::keep(other.path(), &one, false), Err(NodeError::Foreign { .. })));
}
