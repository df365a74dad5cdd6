use super::*;
use crate::records::Durability;
use partage_core::model::{Bytes, Gpu, GpuLink, LinkMatrix};
use partage_host::gpus::FatalGpuError;
use std::path::Path;

fn records(directory: &Path) -> RecordDir {
    RecordDir::open(directory, &directory.join("quarantine"), Durability::AcrossReboots).unwrap()
}

fn gpu(name: &str) -> Gpu {
    Gpu {
        uuid: name.into(),
        minor: 0,
        model: "card".into(),
        memory_bytes: Bytes(1 << 30),
        numa: None,
        pci: Some(format!("slot of {name}")),
        withheld: None,
    }
}

/// Returns a node with GPUs in this order, all on one switch.
fn node(names: &[&str]) -> Node {
    let mut node = Node::new("n1", names.iter().map(|name| gpu(name)).collect());
    node.links =
        Some(LinkMatrix::from_fn(names.len(), |a, b| if a == b { GpuLink::NvLink } else { GpuLink::Pix }));
    node
}

fn observed<'a>(
    boot_id: &'a str,
    source: &'a str,
    counted: usize,
    node: Node,
    unix_seconds: i64,
) -> Observation<'a> {
    Observation { boot_id, source, counted, node, unix_seconds }
}

fn first(names: &[&str]) -> Inventory {
    Inventory::new(observed("boot-1", "nvidia", names.len(), node(names), 100), None)
}

fn later(kept: &Inventory, boot_id: &str, counted: usize, names: &[&str]) -> Inventory {
    Inventory::new(observed(boot_id, "nvidia", counted, node(names), 200), Some(kept))
}

/// Returns the listed GPUs, with `!` before those that are withheld.
fn listed(inventory: &Inventory) -> Vec<String> {
    let gpus = inventory.node.gpus.iter();
    gpus.map(|gpu| format!("{}{}", if gpu.withheld.is_some() { "!" } else { "" }, gpu.uuid)).collect()
}

fn sample(uuid: &str, mig: Option<bool>) -> GpuSample {
    GpuSample {
        uuid: uuid.into(),
        health: None,
        mig,
        memory_used: None,
        utilization: None,
        temperature: None,
        power_milliwatts: None,
        processes: Vec::new(),
    }
}

#[test]
fn missing_gpu_stays_in_its_place() {
    let kept = first(&["a", "b", "c"]);
    assert_eq!(listed(&kept), ["a", "b", "c"]);
    let now = later(&kept, "boot-1", 3, &["a", "c"]);
    assert_eq!(listed(&now), ["a", "!b", "c"]);
    let why = now.node.gpus[1].withheld.as_deref().unwrap();
    assert!(
        now.counted_node().gpus.iter().all(|gpu| gpu.withheld.is_none()),
        "kubelet counts it all the same"
    );
    assert!(why.starts_with("no response since 1970-01-01T00:03:20Z"), "{why}");
    assert_eq!((now.node.link(0, 1), now.node.link(0, 2)), (GpuLink::Pix, GpuLink::Pix));
    // The next daemon keeps the time, also when it reads it from the record.
    let read: Inventory = serde_json::from_str(&serde_json::to_string(&now).unwrap()).unwrap();
    assert_eq!(read, now);
    let again = Inventory::new(observed("boot-1", "nvidia", 2, node(&["a", "c"]), 999), Some(&read));
    assert_eq!(again.node, now.node);
    // The GPU returns: the list is as before.
    assert_eq!(later(&again, "boot-1", 3, &["a", "b", "c"]), kept);
    // No GPU answers.
    assert_eq!(listed(&later(&kept, "boot-1", 3, &[])), ["!a", "!b", "!c"]);
}

#[test]
fn after_a_boot_the_list_is_what_the_driver_counts() {
    let kept = first(&["a", "b", "c"]);
    assert_eq!(listed(&later(&kept, "boot-2", 3, &["b", "c"])), ["!a", "b", "c"]);
    assert_eq!(listed(&later(&kept, "boot-2", 2, &["b", "c"])), ["b", "c"]);
    // Other cards, one of which is silent.
    assert_eq!(listed(&later(&kept, "boot-2", 3, &["x", "y"])), ["x", "y"]);
    assert_eq!(listed(&later(&kept, "boot-2", 3, &["x", "y", "z"])), ["x", "y", "z"]);
}

#[test]
fn new_card_takes_the_place_of_the_one_in_its_slot() {
    let kept = first(&["a", "b", "c"]);
    let mut now = node(&["x", "c"]);
    now.gpus[0].pci = Some("slot of a".into());
    let now = Inventory::new(observed("boot-2", "nvidia", 3, now, 200), Some(&kept));
    assert_eq!(listed(&now), ["x", "!b", "c"]);
    // A new GPU beside a missing one is listed last, and its links are not guessed.
    let now = later(&kept, "boot-1", 3, &["n", "a", "c"]);
    assert_eq!(listed(&now), ["a", "!b", "c", "n"]);
    assert_eq!((now.node.link(0, 3), now.node.link(1, 3)), (GpuLink::Pix, GpuLink::System));
}

#[test]
fn gpus_of_another_source_are_not_missing() {
    let kept = Inventory::new(observed("boot-1", "simulated 3 T4", 3, node(&["a", "b", "c"]), 1), None);
    let now = |source| Inventory::new(observed("boot-1", source, 2, node(&["a", "b"]), 2), Some(&kept));
    assert_eq!(listed(&now("simulated 2 T4")), ["a", "b"]);
    assert_eq!(listed(&now("simulated 3 T4")), ["a", "b", "!c"]);
}

#[test]
fn change_is_reported_only_if_the_list_is_outdated() {
    let kept = first(&["a", "b"]);
    let both = [sample("a", Some(false)), sample("b", Some(false))];
    assert_eq!(kept.change(Some(2), &both), None);
    // A lost GPU is unhealthy, and an unloaded driver reports nothing.
    assert_eq!(kept.change(None, &[sample("a", Some(false)), sample("b", None)]), None);
    let change_text = |inventory: &Inventory, counted, samples: &[GpuSample]| {
        inventory.change(Some(counted), samples).unwrap()
    };
    assert!(change_text(&kept, 3, &both).contains("reports 3 GPUs"));
    assert!(change_text(&kept, 2, &[sample("c", Some(false))]).contains("GPU c is new"));
    assert!(change_text(&kept, 2, &[sample("b", Some(true))]).contains("MIG mode of GPU b was enabled"));

    let now = later(&kept, "boot-1", 2, &["a"]);
    assert_eq!(now.change(Some(2), &both[..1]), None);
    assert!(change_text(&now, 2, &both).contains("GPU b responds again"));

    let mut split = node(&["a"]);
    split.gpus[0].withheld = Some("MIG mode is enabled".into());
    let split = Inventory::new(observed("boot-1", "nvidia", 1, split, 1), None);
    assert_eq!(split.change(Some(1), &[sample("a", Some(true))]), None);
    assert!(change_text(&split, 1, &both[..1]).contains("MIG mode of GPU a was disabled"));
}

#[test]
fn unhealthy_gpus_are_withheld_for_their_first_reason() {
    let mut machine = node(&["a", "b", "c"]);
    machine.gpus[1].withheld = Some("MIG mode is enabled".into());
    let unhealthy = |uuid: &str| GpuSample { health: Some("XID 79".into()), ..sample(uuid, None) };
    withhold_unhealthy(&mut machine, &[unhealthy("a"), unhealthy("b"), sample("c", None)]);
    let withheld: Vec<Option<&str>> = machine.gpus.iter().map(|gpu| gpu.withheld.as_deref()).collect();
    assert_eq!(withheld, [Some("XID 79"), Some("MIG mode is enabled"), None]);
}

#[test]
fn fatal_errors_are_known_until_the_next_boot() {
    let directory = tempfile::tempdir().unwrap();
    let records = records(directory.path());
    let load = |boot_id: &str| FatalErrorLog::load(&records, boot_id).unwrap();
    assert_eq!(load("boot-1"), []);
    let fatal =
        |energy| vec![FatalGpuError { uuid: "GPU-1".into(), xid: 62, gone: false, energy: Some(energy) }];
    let mut log = FatalErrorLog::default();
    log.store(&records, "boot-1", fatal(5));
    // A higher energy counter alone is not written.
    log.store(&records, "boot-1", fatal(6));
    assert_eq!(load("boot-1"), fatal(5));
    assert_eq!(load("boot-2"), []);
    // The GPU was reset.
    log.store(&records, "boot-1", Vec::new());
    assert_eq!(load("boot-1"), []);
    // A daemon that starts without errors clears the record of an earlier one.
    log.store(&records, "boot-1", fatal(7));
    FatalErrorLog::default().store(&records, "boot-1", Vec::new());
    assert_eq!(load("boot-1"), []);
}

#[test]
fn missing_driver_needs_attention_only_if_there_were_gpus() {
    let host = tempfile::tempdir().unwrap();
    let root = HostRoot::new(host.path());
    let error = find_driver(DriverChoice::Nvidia, Some(&root)).unwrap_err();
    assert_eq!(error.to_string(), format!("no NVIDIA driver was found below {}", host.path().display()));
    assert!(!error.needs_attention());
    assert!(DiscoveryError::NoDriver { root: None, had_gpus: true }.needs_attention());
    assert!(find_driver(DriverChoice::Auto, Some(&root)).unwrap().is_none());
    assert!(find_driver(DriverChoice::Simulated, None).unwrap().is_none());
}

#[test]
fn records_of_version_1_are_read() {
    let written = Path::new(env!("CARGO_MANIFEST_DIR")).join("fixtures/records-version-1");
    let directory = tempfile::tempdir().unwrap();
    for file in ["inventory.json", "health.json"] {
        std::fs::copy(written.join(file), directory.path().join(file)).unwrap();
    }
    let records = records(directory.path());
    let inventory: Inventory = records.load(Inventory::NAME).unwrap().unwrap();
    assert_eq!(listed(&inventory), ["GPU-0", "!GPU-1", "GPU-2"]);
    assert_eq!(inventory.missing().map(|uuid| uuid.as_str()).collect::<Vec<_>>(), ["GPU-1"]);
    assert_eq!((inventory.node.name.as_str(), inventory.node.link(0, 1)), ("gpu-1", GpuLink::Pxb));
    // The GPU responds again, in the same boot and from the same driver.
    let mut node = inventory.node.clone();
    node.gpus[1].withheld = None;
    let now = Inventory::new(observed("boot-1", "nvidia", 3, node, 7), Some(&inventory));
    assert_eq!(listed(&now), ["GPU-0", "GPU-1", "GPU-2"]);
    let fatal = FatalErrorLog::load(&records, "boot-1").unwrap();
    let errors: Vec<_> = fatal.iter().map(|error| (error.uuid.as_str(), error.xid, error.gone)).collect();
    assert_eq!(errors, [("GPU-0", 62, false), ("GPU-1", 79, true)]);
}
