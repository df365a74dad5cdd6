//! The plugin and the owners of devices, with a real kubelet and containerd. A container's devices are read from
//! inside.

use crate::recording_plugin::{ContainerStart, RecordingNode, container, pod};
use partage_agent::device_owner::{ContainerState, DeviceHolder, DeviceOwnerError};
use partage_kubelet_api::unix::SocketFile;
use partage_testkit::bed::{BedProfile, TestBed};
use partage_testkit::eventually;
use serde_json::json;
use std::collections::{BTreeMap, BTreeSet};
use std::path::PathBuf;
use std::slice::from_ref;

const MANY_RESOURCE: &str = "example.com/many";
const ONE_RESOURCE: &str = "example.com/one";

fn holder_names(holders: &[DeviceHolder]) -> BTreeSet<(String, String)> {
    holders.iter().map(|holder| (holder.uid.to_string(), holder.container.to_string())).collect()
}

/// Starts a pod: kubelet must know the plugin and call it.
fn start_pod(test_node: &RecordingNode, name: &str, resource: &str) {
    test_node.create(&[pod(name, &[], &[container("main", resource, 1, true)])]);
    test_node.wait_until_running(name, &["main"]);
}

/// Returns how often each resource was registered with the kubelet that runs now, from its own metrics.
fn registrations(test_node: &RecordingNode) -> BTreeMap<String, u32> {
    let metrics = test_node.eventually("kubelet serves its metrics", || {
        test_node
            .bed
            .kubectl(&["get", "--raw", "/api/v1/nodes/node1/proxy/metrics"])
            .map_err(|e| e.to_string())
    });
    let counts = metrics.lines().filter_map(|line| {
        let labels = line.strip_prefix("kubelet_device_plugin_registration_total{resource_name=\"")?;
        let (resource, count) = labels.split_once("\"} ")?;
        Some((resource.to_string(), count.parse().unwrap()))
    });
    counts.collect()
}

#[test]
fn plugin_stays_registered_across_restarts_and_socket_loss() {
    let Some(bed) = TestBed::for_test(BedProfile::one_node()) else { return };
    let test_node = RecordingNode::start(&bed);
    let many = test_node.serve(MANY_RESOURCE, 16);
    let one = test_node.serve(ONE_RESOURCE, 1);
    test_node.wait_until_watched(&one);
    start_pod(&test_node, "at-start", MANY_RESOURCE);

    // Changes of health, in both directions.
    many.devices.send_modify(|devices| devices[3].healthy = false);
    test_node.wait_until_offered(MANY_RESOURCE, 15);
    many.devices.send_modify(|devices| devices[3].healthy = true);
    test_node.wait_until_offered(MANY_RESOURCE, 16);
    // Changes of the number of devices.
    many.devices.send_modify(|devices| devices.truncate(8));
    test_node.wait_until_offered(MANY_RESOURCE, 8);

    let socket = test_node.plugin_dir().join("partage_example_com_many.sock");
    let wait_until_replaced = |before: SocketFile, what: &str| {
        test_node.eventually(&format!("the plugin serves again after {what}"), || {
            match SocketFile::at(&socket) {
                Ok(now) if now != before => Ok(()),
                other => Err(format!("{other:?}")),
            }
        });
        test_node.wait_until_watched(&many);
        test_node.wait_until_offered(MANY_RESOURCE, 8);
    };

    // The plugin registers once with each new kubelet: a second registration would replace the first. It registers
    // again if kubelet does not respond for two seconds.
    let once = BTreeMap::from([(MANY_RESOURCE.to_string(), 1), (ONE_RESOURCE.to_string(), 1)]);
    let mut told = Vec::new();
    while told.iter().filter(|told| **told == once).count() < 3 {
        assert!(told.len() < 6, "{told:?}");
        let before = SocketFile::at(&socket).unwrap();
        test_node.node().kubelet().restart().unwrap();
        wait_until_replaced(before, "a restart of kubelet");
        test_node.wait_until_watched(&one);
        told.push(registrations(&test_node));
    }
    start_pod(&test_node, "after-restart", MANY_RESOURCE);

    let before = SocketFile::at(&socket).unwrap();
    std::fs::remove_file(&socket).unwrap();
    wait_until_replaced(before, "removal of its socket");
    start_pod(&test_node, "after-removal", MANY_RESOURCE);

    // Without its socket no plugin can register with kubelet, but its connections still work.
    let before = SocketFile::at(&socket).unwrap();
    std::fs::rename(test_node.plugin_dir(), test_node.plugin_dir().with_file_name("aside")).unwrap();
    many.devices.send_modify(|devices| devices[3].healthy = false);
    test_node.wait_until_offered(MANY_RESOURCE, 7);
    many.devices.send_modify(|devices| devices[3].healthy = true);
    test_node.wait_until_offered(MANY_RESOURCE, 8);
    assert_eq!((*many.plugin.kubelet_streams().borrow(), *one.plugin.kubelet_streams().borrow()), (1, 1));
    test_node.node().kubelet().restart().unwrap();
    wait_until_replaced(before, "removal of the whole directory");
    start_pod(&test_node, "after-all", MANY_RESOURCE);

    // A plugin that ends removes its socket, and a later one is registered again.
    bed.block_on(many.plugin.stop());
    assert!(!socket.exists());
    test_node.wait_until_offered(MANY_RESOURCE, 0);
    test_node.wait_until_offered(ONE_RESOURCE, 1);
    drop(test_node.serve(MANY_RESOURCE, 4));
    test_node.wait_until_offered(MANY_RESOURCE, 0);
}

#[test]
fn holders_of_fifty_concurrent_pods_are_identified() {
    let Some(bed) = TestBed::for_test(BedProfile::one_node()) else { return };
    let test_node = RecordingNode::start(&bed);
    let _many = test_node.serve(MANY_RESOURCE, 128);
    let names: Vec<String> = (0..50).map(|number| format!("train-{number}")).collect();
    let pods: Vec<_> = names
        .iter()
        .enumerate()
        .map(|(number, name)| {
            let mut containers = vec![container("main", MANY_RESOURCE, 1 + number % 2, true)];
            if number.is_multiple_of(3) {
                containers.push(container("other", MANY_RESOURCE, 1, true));
            }
            pod(name, &[], &containers)
        })
        .collect();
    test_node.create(&pods);
    let mut expected = BTreeSet::new();
    for (number, name) in names.iter().enumerate() {
        let containers: &[&str] = if number.is_multiple_of(3) { &["main", "other"] } else { &["main"] };
        let uid = test_node.wait_until_running(name, containers).to_string();
        expected.extend(containers.iter().map(|container| (uid.clone(), container.to_string())));
    }
    let starts = test_node.giver.starts.lock().unwrap();
    let held: Vec<DeviceHolder> = starts.iter().flat_map(|start| start.holders.clone().unwrap()).collect();
    assert_eq!(holder_names(&held), expected);
    for start in starts.iter() {
        let (holders, other) = (start.holders.as_ref().unwrap(), start.without_checkpoint.as_ref().unwrap());
        assert_eq!(holders.len(), 1, "no ids of an init container are reused");
        assert_eq!((&holders[0].ids, &other[0].ids), (&start.ids, &start.ids));
        assert_eq!(holder_names(holders), holder_names(other), "kubelet's list equals its checkpoint");
        let (namespace, name) = other[0].name.clone().unwrap();
        assert!(
            other[0].key.is_none() && namespace.as_str() == "default" && names.contains(&name.to_string())
        );
    }
}

#[test]
fn holders_of_init_containers_and_sidecars_are_identified() {
    let Some(bed) = TestBed::for_test(BedProfile::one_node()) else { return };
    let test_node = RecordingNode::start(&bed);
    let _many = test_node.serve(MANY_RESOURCE, 16);
    let (fetch, main) =
        (container("fetch", MANY_RESOURCE, 1, false), container("main", MANY_RESOURCE, 1, true));
    let mut sidecar = container("sidecar", MANY_RESOURCE, 1, true);
    sidecar["restartPolicy"] = json!("Always");
    let mut idle = container("idle", MANY_RESOURCE, 0, true);
    idle.as_object_mut().unwrap().remove("resources");
    test_node.create(&[
        pod("alone", from_ref(&fetch), &[idle]),
        pod("same", &[fetch.clone(), container("unpack", MANY_RESOURCE, 1, false)], from_ref(&main)),
        pod("more", &[container("fetch", MANY_RESOURCE, 3, false)], from_ref(&main)),
        pod("sidecar", &[sidecar], from_ref(&main)),
    ]);
    let pods: [(&str, &[&str]); 4] = [
        ("alone", &["fetch"]),
        ("same", &["fetch", "unpack", "main"]),
        ("more", &["fetch", "main"]),
        ("sidecar", &["sidecar", "main"]),
    ];
    let uids: BTreeMap<&str, String> = pods
        .iter()
        .map(|(pod, containers)| (*pod, test_node.wait_until_running(pod, containers).to_string()))
        .collect();
    let starts = test_node.giver.starts.lock().unwrap();
    let of_pod = |pod: &str| {
        let is_its = |start: &&ContainerStart| start.holders.as_ref().unwrap()[0].uid.as_str() == uids[pod];
        starts.iter().filter(is_its).collect::<Vec<_>>()
    };
    // Only the checkpoint knows an init container that shares its devices with no other container.
    for start in of_pod("alone") {
        assert!(matches!(start.without_checkpoint, Err(DeviceOwnerError::NotAllocated { .. })));
    }
    // All containers with the same devices are returned at each of their starts.
    for start in of_pod("same") {
        let holders = start.holders.as_ref().unwrap();
        assert_eq!(holders.len(), 3);
        let keys: BTreeSet<_> = holders.iter().map(|holder| holder.key.clone().unwrap()).collect();
        assert_eq!(keys.len(), 3, "every name is unique");
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
fn force_deleted_pod_and_its_successor_are_distinguished() {
    let Some(bed) = TestBed::for_test(BedProfile::one_node()) else { return };
    let test_node = RecordingNode::start(&bed);
    // With one device, the successor gets the same one.
    let _one = test_node.serve(ONE_RESOURCE, 1);
    let mut uids = Vec::new();
    for _ in 0..4 {
        test_node.create(&[pod("train", &[], &[container("main", ONE_RESOURCE, 1, true)])]);
        uids.push(test_node.wait_until_running("train", &["main"]));
        test_node.force_delete("train");
    }
    let starts = test_node.giver.starts.lock().unwrap();
    let uids_of = |holders: Vec<&DeviceHolder>| {
        let mut uids: Vec<_> = holders.into_iter().map(|holder| holder.uid.clone()).collect();
        uids.dedup();
        uids
    };
    assert_eq!(uids_of(starts.iter().flat_map(|start| start.holders.as_ref().unwrap()).collect()), uids);
    let listed = starts.iter().flat_map(|start| start.without_checkpoint.as_ref().unwrap());
    assert_eq!(uids_of(listed.collect()), uids);
    assert_eq!(test_node.giver.names.lock().unwrap().len(), 4, "every name is new");
}

#[test]
fn container_runtime_reports_its_version_and_containers() {
    let Some(bed) = TestBed::for_test(BedProfile::one_node()) else { return };
    let test_node = RecordingNode::start(&bed);
    let about = bed.block_on(test_node.runtime.info()).unwrap();
    assert_eq!(
        (about.name.as_str(), about.cdi.clone(), about.nvidia),
        ("containerd", Ok(()), false),
        "{about:?}"
    );
    assert!(about.version.starts_with("v2."), "{about:?}");
    assert_eq!(about.cdi_dirs, ["/etc/cdi", "/run/cdi"].map(PathBuf::from));

    let _many = test_node.serve(MANY_RESOURCE, 4);
    let fetch = container("fetch", MANY_RESOURCE, 1, false);
    test_node.create(&[pod("train", &[fetch], &[container("main", MANY_RESOURCE, 1, true)])]);
    let uid = test_node.wait_until_running("train", &["fetch", "main"]);
    let ours = async || {
        let containers = test_node.runtime.containers().await?;
        let ours = containers.into_iter().filter(|container| container.uid == uid);
        Ok::<_, DeviceOwnerError>(
            ours.map(|c| (c.container.to_string(), c.state)).collect::<BTreeMap<_, _>>(),
        )
    };
    let expected = BTreeMap::from([
        ("fetch".to_string(), ContainerState::Exited),
        ("main".to_string(), ContainerState::Running),
    ]);
    assert_eq!(bed.block_on(ours()).unwrap(), expected);
    let sandboxes = bed.block_on(test_node.runtime.sandboxes()).unwrap();
    let sandbox = sandboxes.iter().find(|sandbox| sandbox.uid == uid).unwrap();
    assert_eq!((sandbox.namespace.as_str(), sandbox.pod.as_str(), sandbox.ready), ("default", "train", true));

    // The client reconnects when the runtime comes back.
    test_node.node().containerd().restart().unwrap();
    assert_eq!(bed.block_on(eventually("containerd is back", ours)), expected);
}
