//! The kernel's gate in front of device nodes, on both kinds of cgroups. Major 195 is NVIDIA's; no driver has it here,
//! so who is let through gets ENXIO, and who is not gets EPERM.

use partage_e2e::late_plugin::{DeviceNode, Edits, LatePlugin, Settings};
use partage_testkit::bed::{Bed, Cgroups, Node, NodeProfile, Profile};
use std::sync::Arc;

const LET_THROUGH: &str = "No such device or address";
const REFUSED: &str = "Operation not permitted";

/// A pod on the node that was granted the first of two GPUs, and knows how to make a node for the other.
fn start_pod(bed: &Bed, node: &Node) -> LatePlugin {
    node.run("/bed/bin/busybox", ["mknod", "-m", "666", "/dev/nvidia0", "c", "195", "0"]).unwrap();
    let path = |inside: &str| node.path(inside).unwrap();
    let mut settings = Settings::new(
        &path("/var/lib/kubelet"),
        &path("/var/log/pods"),
        &path("/run/containerd/containerd.sock"),
        &path("/etc/cdi"),
        &path("/var/lib/record.json"),
    );
    std::fs::create_dir_all(&settings.cdi).unwrap();
    settings.edits = Arc::new(|_| Edits {
        device_nodes: vec![DeviceNode { path: "/dev/nvidia0".into(), host_path: "/dev/nvidia0".into() }],
        ..Edits::default()
    });
    let plugin = LatePlugin::start(bed.handle(), settings).unwrap();
    bed.block_on(plugin.watched());
    let name = node.name();
    // The name of the node among the container's words lets us find its process.
    let manifest = format!(
        r#"{{"apiVersion": "v1", "kind": "Pod", "metadata": {{"name": "{name}"}}, "spec": {{
            "nodeSelector": {{"kubernetes.io/hostname": "{name}"}},
            "containers": [{{"name": "main", "image": "localhost/busybox:bed", "imagePullPolicy": "Never",
                             "command": ["sh", "-c", "mknod /dev/nvidia1 c 195 1; while :; do sleep 1; done #{name}"],
                             "readinessProbe": {{"exec": {{"command": ["ls", "/dev/nvidia1"]}}, "periodSeconds": 1}},
                             "resources": {{"limits": {{"example.com/late": 1}}}}}}]}}}}"#
    );
    bed.kubectl_with(&["apply", "-f", "-"], &manifest).unwrap();
    bed.kubectl(&["wait", "--for=condition=Ready", &format!("pod/{name}"), "--timeout=300s"]).unwrap();
    plugin
}

/// What the kernel says to a container that opens a GPU.
fn open(bed: &Bed, node: &Node, gpu: u8) -> String {
    let script = format!("exec 2>&1; true < /dev/nvidia{gpu}; true");
    bed.kubectl(&["exec", node.name(), "--", "sh", "-c", &script]).unwrap()
}

/// The cgroup of the pod's container, as the node sees it: its path in the hierarchy of this name.
fn cgroup(node: &Node, hierarchy: &str) -> String {
    let script = format!(
        "cat $(grep -l '[#]{}' /proc/[0-9]*/cmdline | head -n1 | sed s/cmdline/cgroup/)",
        node.name()
    );
    let lines = node.run("/bed/bin/busybox", ["sh", "-c", &script]).unwrap();
    let line = lines.lines().find_map(|line| line.split_once(&format!(":{hierarchy}:")));
    line.unwrap_or_else(|| panic!("{hierarchy} is in {lines}")).1.to_string()
}

/// A bed of one node with these cgroups, where a container opens what it was granted and nothing else.
fn gated(cgroups: Cgroups, goes_on: impl Fn(&Bed, &Node)) {
    let profile = Profile::control_plane().node(NodeProfile::new("gated").cgroups(cgroups));
    let Some(bed) = Bed::for_test(profile) else { return };
    let node = bed.node("gated").unwrap();
    let _plugin = start_pod(&bed, node);
    let (granted, other) = (open(&bed, node, 0), open(&bed, node, 1));
    assert!(granted.contains(LET_THROUGH), "{granted}");
    assert!(other.contains(REFUSED), "{other}");
    goes_on(&bed, node);
    // Devices of a node are its own.
    assert!(!std::path::Path::new("/dev/nvidia0").exists());
}

#[test]
fn a_container_on_v1_opens_what_it_was_granted_and_nothing_else() {
    gated(Cgroups::V1, v1_is_opened_and_closed_while_the_container_runs);
}

#[test]
fn a_container_on_v2_opens_what_it_was_granted_and_nothing_else() {
    gated(Cgroups::V2, v2_is_opened_and_closed_while_the_container_runs);
}

/// A list per cgroup, that can be written.
fn v1_is_opened_and_closed_while_the_container_runs(bed: &Bed, node: &Node) {
    let folder = node.path(format!("/sys/fs/cgroup/devices{}", cgroup(node, "devices"))).unwrap();
    std::fs::write(folder.join("devices.allow"), "c 195:1 rw").unwrap();
    assert!(open(bed, node, 1).contains(LET_THROUGH));
    std::fs::write(folder.join("devices.deny"), "c 195:1 rw").unwrap();
    assert!(open(bed, node, 1).contains(REFUSED));
    assert!(open(bed, node, 0).contains(LET_THROUGH), "what was granted at the start stays");
}

/// A program per cgroup. runc's own is the only one: taken away, everything opens; put back, it holds again.
fn v2_is_opened_and_closed_while_the_container_runs(bed: &Bed, node: &Node) {
    let folder = format!("/sys/fs/cgroup{}", cgroup(node, ""));
    let bpftool = |words: &[&str]| node.run("/bed/bin/bpftool", words.iter().copied()).unwrap();
    let attached = || -> serde_json::Value {
        serde_json::from_str(&bpftool(&["--json", "cgroup", "show", &folder])).unwrap_or_default()
    };
    let programs = attached();
    assert_eq!(programs.as_array().map(Vec::len), Some(1), "{programs}");
    assert_eq!(programs[0]["attach_type"], "cgroup_device", "{programs}");
    assert_eq!(programs[0]["attach_flags"], "multi", "{programs}");
    let id = programs[0]["id"].to_string();
    // Held, or it would go with its last cgroup.
    bpftool(&["prog", "pin", "id", &id, "/sys/fs/bpf/gate"]);
    bpftool(&["cgroup", "detach", &folder, "cgroup_device", "id", &id]);
    assert!(open(bed, node, 1).contains(LET_THROUGH));
    bpftool(&["cgroup", "attach", &folder, "cgroup_device", "pinned", "/sys/fs/bpf/gate", "multi"]);
    assert!(open(bed, node, 1).contains(REFUSED));
    assert!(open(bed, node, 0).contains(LET_THROUGH));
}
