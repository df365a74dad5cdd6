//! The plugin and whose devices are whose, with a real kubelet and containerd. What a container was given is read from inside.

use crate::recorder::{Stage, Start, container, pod};
use partage_agent::identity::{ContainerState, Holder, IdentityError};
use partage_kubelet_api::unix::SocketFile;
use partage_testkit::bed::{Bed, Profile};
use partage_testkit::eventually;
use serde_json::json;
use std::collections::{BTreeMap, BTreeSet};
use std::path::PathBuf;
use std::slice::from_ref;

const MANY: &str = "example.com/many";
const ONE: &str = "example.com/one";

fn holder_names(holders: &[Holder]) -> BTreeSet<(String, String)> {
    holders.iter().map(|holder| (holder.uid.to_string(), holder.container.to_string())).collect()
}

/// A pod starts: kubelet knows the plugin, and asks it.
fn a_pod_starts(stage: &Stage, name: &str, resource: &str) {
    stage.create(&[pod(name, &[], &[container("main", resource, 1, true)])]);
    stage.runs(name, &["main"]);
}

/// How often each resource was registered with the kubelet that runs now, as it counts itself.
fn registrations(stage: &Stage) -> BTreeMap<String, u32> {
    let metrics = stage.eventually("kubelet serves its metrics", || {
        stage.bed.kubectl(&["get", "--raw", "/api/v1/nodes/node1/proxy/metrics"]).map_err(|e| e.to_string())
    });
    let counts = metrics.lines().filter_map(|line| {
        let labels = line.strip_prefix("kubelet_device_plugin_registration_total{resource_name=\"")?;
        let (resource, count) = labels.split_once("\"} ")?;
        Some((resource.to_string(), count.parse().unwrap()))
    });
    counts.collect()
}

#[test]
fn kubelet_always_knows_the_plugin() {
    let Some(bed) = Bed::for_test(Profile::one_node()) else { return };
    let stage = Stage::set(&bed);
    let many = stage.serve(MANY, 16);
    let one = stage.serve(ONE, 1);
    stage.watched(&one);
    a_pod_starts(&stage, "at-start", MANY);

    // Its health goes both ways.
    many.devices.send_modify(|devices| devices[3].healthy = false);
    stage.offered(MANY, 15);
    many.devices.send_modify(|devices| devices[3].healthy = true);
    stage.offered(MANY, 16);
    // So does the number of devices.
    many.devices.send_modify(|devices| devices.truncate(8));
    stage.offered(MANY, 8);

    let socket = stage.folder().join("partage_example_com_many.sock");
    let replaced = |before: SocketFile, what: &str| {
        stage.eventually(&format!("it serves again after {what}"), || match SocketFile::at(&socket) {
            Ok(now) if now != before => Ok(()),
            other => Err(format!("{other:?}")),
        });
        stage.watched(&many);
        stage.offered(MANY, 8);
    };

    // Each new kubelet is told once: a second time it would drop the first. One that has no time for two seconds is told again.
    let once = BTreeMap::from([(MANY.to_string(), 1), (ONE.to_string(), 1)]);
    let mut told = Vec::new();
    while told.iter().filter(|told| **told == once).count() < 3 {
        assert!(told.len() < 6, "{told:?}");
        let before = SocketFile::at(&socket).unwrap();
        stage.node().kubelet().restart().unwrap();
        replaced(before, "a restart of kubelet");
        stage.watched(&one);
        told.push(registrations(&stage));
    }
    a_pod_starts(&stage, "after-restart", MANY);

    let before = SocketFile::at(&socket).unwrap();
    std::fs::remove_file(&socket).unwrap();
    replaced(before, "its socket was removed");
    a_pod_starts(&stage, "after-removal", MANY);

    // Without its socket kubelet can be told nothing, but it still has its connections.
    let before = SocketFile::at(&socket).unwrap();
    std::fs::rename(stage.folder(), stage.folder().with_file_name("aside")).unwrap();
    many.devices.send_modify(|devices| devices[3].healthy = false);
    stage.offered(MANY, 7);
    many.devices.send_modify(|devices| devices[3].healthy = true);
    stage.offered(MANY, 8);
    assert_eq!((*many.plugin.watched().borrow(), *one.plugin.watched().borrow()), (1, 1));
    stage.node().kubelet().restart().unwrap();
    replaced(before, "the whole folder went away");
    a_pod_starts(&stage, "after-all", MANY);

    // A plugin that ends takes its socket with it, and one after it is known again.
    bed.block_on(many.plugin.stop());
    assert!(!socket.exists());
    stage.offered(MANY, 0);
    stage.offered(ONE, 1);
    drop(stage.serve(MANY, 4));
    stage.offered(MANY, 0);
}

#[test]
fn fifty_pods_at_once_are_told_apart() {
    let Some(bed) = Bed::for_test(Profile::one_node()) else { return };
    let stage = Stage::set(&bed);
    let _many = stage.serve(MANY, 128);
    let names: Vec<String> = (0..50).map(|number| format!("train-{number}")).collect();
    let pods: Vec<_> = names
        .iter()
        .enumerate()
        .map(|(number, name)| {
            let mut containers = vec![container("main", MANY, 1 + number % 2, true)];
            if number.is_multiple_of(3) {
                containers.push(container("other", MANY, 1, true));
            }
            pod(name, &[], &containers)
        })
        .collect();
    stage.create(&pods);
    let mut expected = BTreeSet::new();
    for (number, name) in names.iter().enumerate() {
        let containers: &[&str] = if number.is_multiple_of(3) { &["main", "other"] } else { &["main"] };
        let uid = stage.runs(name, containers).to_string();
        expected.extend(containers.iter().map(|container| (uid.clone(), container.to_string())));
    }
    let starts = stage.giver.starts.lock().unwrap();
    let held: Vec<Holder> = starts.iter().flat_map(|start| start.holders.clone().unwrap()).collect();
    assert_eq!(holder_names(&held), expected);
    for start in starts.iter() {
        let (holders, other) = (start.holders.as_ref().unwrap(), start.without_checkpoint.as_ref().unwrap());
        assert_eq!(holders.len(), 1, "no init container passed ids on");
        assert_eq!((&holders[0].ids, &other[0].ids), (&start.ids, &start.ids));
        assert_eq!(
            holder_names(holders),
            holder_names(other),
            "kubelet's list says the same as its checkpoint"
        );
        let (namespace, name) = other[0].name.clone().unwrap();
        assert!(
            other[0].key.is_none() && namespace.as_str() == "default" && names.contains(&name.to_string())
        );
    }
}

#[test]
fn init_containers_and_sidecars_are_told_apart() {
    let Some(bed) = Bed::for_test(Profile::one_node()) else { return };
    let stage = Stage::set(&bed);
    let _many = stage.serve(MANY, 16);
    let (fetch, main) = (container("fetch", MANY, 1, false), container("main", MANY, 1, true));
    let mut sidecar = container("sidecar", MANY, 1, true);
    sidecar["restartPolicy"] = json!("Always");
    let mut idle = container("idle", MANY, 0, true);
    idle.as_object_mut().unwrap().remove("resources");
    stage.create(&[
        pod("alone", from_ref(&fetch), &[idle]),
        pod("same", &[fetch.clone(), container("unpack", MANY, 1, false)], from_ref(&main)),
        pod("more", &[container("fetch", MANY, 3, false)], from_ref(&main)),
        pod("sidecar", &[sidecar], from_ref(&main)),
    ]);
    let pods: [(&str, &[&str]); 4] = [
        ("alone", &["fetch"]),
        ("same", &["fetch", "unpack", "main"]),
        ("more", &["fetch", "main"]),
        ("sidecar", &["sidecar", "main"]),
    ];
    let uids: BTreeMap<&str, String> =
        pods.iter().map(|(pod, containers)| (*pod, stage.runs(pod, containers).to_string())).collect();
    let starts = stage.giver.starts.lock().unwrap();
    let of_pod = |pod: &str| {
        let is_its = |start: &&Start| start.holders.as_ref().unwrap()[0].uid.as_str() == uids[pod];
        starts.iter().filter(is_its).collect::<Vec<_>>()
    };
    // Only the checkpoint knows an init container whose devices nobody else has.
    for start in of_pod("alone") {
        assert!(matches!(start.without_checkpoint, Err(IdentityError::Nobody { .. })));
    }
    // All that were given the same devices are named at each of their starts.
    for start in of_pod("same") {
        let holders = start.holders.as_ref().unwrap();
        assert_eq!(holders.len(), 3);
        let keys: BTreeSet<_> = holders.iter().map(|holder| holder.key.clone().unwrap()).collect();
        assert_eq!(keys.len(), 3, "each has a name of its own");
        let listed = start.without_checkpoint.as_ref().unwrap();
        assert_eq!(holder_names(listed), BTreeSet::from([(uids["same"].clone(), "main".to_string())]));
    }
    for start in of_pod("sidecar") {
        let (holders, listed) = (start.holders.as_ref().unwrap(), start.without_checkpoint.as_ref().unwrap());
        assert_eq!(holder_names(holders), holder_names(listed));
    }
    assert!(of_pod("more").iter().all(|start| start.holders.as_ref().unwrap().len() == 1));
}

#[test]
fn a_force_deleted_pod_and_its_successor_are_told_apart() {
    let Some(bed) = Bed::for_test(Profile::one_node()) else { return };
    let stage = Stage::set(&bed);
    // One device: the successor gets the very same.
    let _one = stage.serve(ONE, 1);
    let mut uids = Vec::new();
    for _ in 0..4 {
        stage.create(&[pod("train", &[], &[container("main", ONE, 1, true)])]);
        uids.push(stage.runs("train", &["main"]));
        stage.force_delete("train");
    }
    let starts = stage.giver.starts.lock().unwrap();
    let uids_of = |holders: Vec<&Holder>| {
        let mut uids: Vec<_> = holders.into_iter().map(|holder| holder.uid.clone()).collect();
        uids.dedup();
        uids
    };
    assert_eq!(uids_of(starts.iter().flat_map(|start| start.holders.as_ref().unwrap()).collect()), uids);
    let listed = starts.iter().flat_map(|start| start.without_checkpoint.as_ref().unwrap());
    assert_eq!(uids_of(listed.collect()), uids);
    assert_eq!(stage.giver.names.lock().unwrap().len(), 4, "never the same name");
}

#[test]
fn the_container_runtime_says_what_it_is_and_what_it_runs() {
    let Some(bed) = Bed::for_test(Profile::one_node()) else { return };
    let stage = Stage::set(&bed);
    let about = bed.block_on(stage.runtime.about()).unwrap();
    assert_eq!(
        (about.name.as_str(), about.cdi.clone(), about.nvidia),
        ("containerd", Ok(()), false),
        "{about:?}"
    );
    assert!(about.version.starts_with("v2."), "{about:?}");
    assert_eq!(about.cdi_dirs, ["/etc/cdi", "/run/cdi"].map(PathBuf::from));

    let _many = stage.serve(MANY, 4);
    let fetch = container("fetch", MANY, 1, false);
    stage.create(&[pod("train", &[fetch], &[container("main", MANY, 1, true)])]);
    let uid = stage.runs("train", &["fetch", "main"]);
    let ours = async || {
        let containers = stage.runtime.containers().await?;
        let ours = containers.into_iter().filter(|container| container.uid == uid);
        Ok::<_, IdentityError>(ours.map(|c| (c.container.to_string(), c.state)).collect::<BTreeMap<_, _>>())
    };
    let expected = BTreeMap::from([
        ("fetch".to_string(), ContainerState::Exited),
        ("main".to_string(), ContainerState::Running),
    ]);
    assert_eq!(bed.block_on(ours()).unwrap(), expected);
    let sandboxes = bed.block_on(stage.runtime.sandboxes()).unwrap();
    let sandbox = sandboxes.iter().find(|sandbox| sandbox.uid == uid).unwrap();
    assert_eq!((sandbox.namespace.as_str(), sandbox.pod.as_str(), sandbox.ready), ("default", "train", true));

    // It is found again when it comes back.
    stage.node().containerd().restart().unwrap();
    assert_eq!(bed.block_on(eventually("containerd is back", ours)), expected);
}
