use super::*;
use partage_core::model::{Bytes, Link};

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

/// GPUs in this order, all on one switch.
fn node(names: &[&str]) -> Node {
    let mut node = Node::new("n1", names.iter().map(|name| gpu(name)).collect());
    node.links = Some(Links::from_fn(names.len(), |a, b| if a == b { Link::NvLink } else { Link::Pix }));
    node
}

fn found<'a>(boot: &'a str, settings: &'a Settings, counted: usize, node: Node, now: i64) -> Found<'a> {
    Found { boot, settings, counted, node, now }
}

fn first(names: &[&str]) -> Inventory {
    Inventory::new(found("boot-1", &Settings::default(), names.len(), node(names), 100), None)
}

fn later(kept: &Inventory, boot: &str, counted: usize, names: &[&str]) -> Inventory {
    Inventory::new(found(boot, &Settings::default(), counted, node(names), 200), Some(kept))
}

/// Which are listed, with `!` those that are withheld.
fn listed(inventory: &Inventory) -> Vec<String> {
    let gpus = inventory.node.gpus.iter();
    gpus.map(|gpu| format!("{}{}", if gpu.withheld.is_some() { "!" } else { "" }, gpu.uuid)).collect()
}

fn look(uuid: &str, mig: Option<bool>) -> Look {
    Look {
        uuid: uuid.into(),
        health: None,
        mig,
        memory_used: None,
        utilisation: None,
        temperature: None,
        power_milliwatts: None,
        processes: Vec::new(),
    }
}

#[test]
fn what_is_missing_stays_in_its_place() {
    let kept = first(&["a", "b", "c"]);
    assert_eq!(listed(&kept), ["a", "b", "c"]);
    let now = later(&kept, "boot-1", 3, &["a", "c"]);
    assert_eq!(listed(&now), ["a", "!b", "c"]);
    let why = now.node.gpus[1].withheld.as_deref().unwrap();
    assert!(
        now.counted_node().gpus.iter().all(|gpu| gpu.withheld.is_none()),
        "kubelet counts it all the same"
    );
    assert!(why.starts_with("it does not answer, since 1970-01-01T00:03:20Z"), "{why}");
    assert_eq!((now.node.link(0, 1), now.node.link(0, 2)), (Link::Pix, Link::Pix));
    // Since when is not forgotten by the next agent, also one that reads it from a disk.
    let read: Inventory = serde_json::from_str(&serde_json::to_string(&now).unwrap()).unwrap();
    assert_eq!(read, now);
    let again = Inventory::new(found("boot-1", &Settings::default(), 2, node(&["a", "c"]), 999), Some(&read));
    assert_eq!(again.node, now.node);
    // It is back: everything is as it was.
    assert_eq!(later(&again, "boot-1", 3, &["a", "b", "c"]), kept);
    // None answers.
    assert_eq!(listed(&later(&kept, "boot-1", 3, &[])), ["!a", "!b", "!c"]);
}

#[test]
fn after_a_boot_it_is_what_the_driver_counts() {
    let kept = first(&["a", "b", "c"]);
    assert_eq!(listed(&later(&kept, "boot-2", 3, &["b", "c"])), ["!a", "b", "c"]);
    assert_eq!(listed(&later(&kept, "boot-2", 2, &["b", "c"])), ["b", "c"]);
    // Other cards, one of which is silent.
    assert_eq!(listed(&later(&kept, "boot-2", 3, &["x", "y"])), ["x", "y"]);
    assert_eq!(listed(&later(&kept, "boot-2", 3, &["x", "y", "z"])), ["x", "y", "z"]);
}

#[test]
fn a_card_in_the_place_of_another_is_its_successor() {
    let kept = first(&["a", "b", "c"]);
    let mut now = node(&["x", "c"]);
    now.gpus[0].pci = Some("slot of a".into());
    let now = Inventory::new(found("boot-2", &Settings::default(), 3, now, 200), Some(&kept));
    assert_eq!(listed(&now), ["x", "!b", "c"]);
    // One that is new besides one that is missing is at the end, and its links are not guessed.
    let now = later(&kept, "boot-1", 3, &["n", "a", "c"]);
    assert_eq!(listed(&now), ["a", "!b", "c", "n"]);
    assert_eq!((now.node.link(0, 3), now.node.link(1, 3)), (Link::Pix, Link::System));
}

#[test]
fn other_settings_are_other_gpus() {
    let simulated = |gpus| {
        let mut settings = Settings { driver: DriverChoice::Simulated, ..Settings::default() };
        settings.simulated.gpus = gpus;
        settings
    };
    let kept = Inventory::new(found("boot-1", &simulated(3), 3, node(&["a", "b", "c"]), 1), None);
    let now = |gpus| Inventory::new(found("boot-1", &simulated(gpus), 2, node(&["a", "b"]), 2), Some(&kept));
    assert_eq!(listed(&now(2)), ["a", "b"]);
    assert_eq!(listed(&now(3)), ["a", "b", "!c"]);
}

#[test]
fn a_change_is_what_needs_another_list() {
    let kept = first(&["a", "b"]);
    let both = [look("a", Some(false)), look("b", Some(false))];
    assert_eq!(kept.change(Some(2), &both), None);
    // What is lost is ill, and a driver that is away tells nothing.
    assert_eq!(kept.change(None, &[look("a", Some(false)), look("b", None)]), None);
    let said =
        |inventory: &Inventory, counted, looks: &[Look]| inventory.change(Some(counted), looks).unwrap();
    assert!(said(&kept, 3, &both).contains("counts 3 of them"));
    assert!(said(&kept, 2, &[look("c", Some(false))]).contains("GPU c is new"));
    assert!(said(&kept, 2, &[look("b", Some(true))]).contains("MIG mode of GPU b was enabled"));

    let now = later(&kept, "boot-1", 2, &["a"]);
    assert_eq!(now.change(Some(2), &both[..1]), None);
    assert!(said(&now, 2, &both).contains("GPU b answers again"));

    let mut split = node(&["a"]);
    split.gpus[0].withheld = Some("MIG mode is enabled".into());
    let split = Inventory::new(found("boot-1", &Settings::default(), 1, split, 1), None);
    assert_eq!(split.change(Some(1), &[look("a", Some(true))]), None);
    assert!(said(&split, 1, &both[..1]).contains("MIG mode of GPU a was disabled"));
}
