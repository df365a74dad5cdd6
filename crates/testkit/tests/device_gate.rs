//! The kernel's gate in front of device nodes, on both kinds of cgroups. Major 195 is NVIDIA's; no driver has it here,
//! so who is let through gets ENXIO, and who is not gets EPERM.
#![allow(clippy::unwrap_used, clippy::expect_used)]

use partage_testkit::bed::{Bed, Cgroups, Node, NodeProfile, Profile};
use partage_testkit::plugin::{DeviceNode, Edits, LatePlugin, Settings};
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
                             "resources": {{"limits": {{"example.com/late": 1}}}}}}]}}}}"#
    );
    bed.kubectl_with(&["apply", "-f", "-"], &manifest).unwrap();
    bed.kubectl(&["wait", "--for=condition=Ready", &format!("pod/{name}"), "--timeout=90s"]).unwrap();
    plugin
}

/// What the kernel says to a container that opens a GPU.
fn open(bed: &Bed, node: &Node, gpu: u8) -> String {
    let script = format!("exec 2>&1; true < /dev/nvidia{gpu}; true");
    bed.kubectl(&["exec", node.name(), "--", "sh", "-c", &script]).unwrap()
}

/// The cgroup of the pod's container, as the node sees it: its path in the hierarchy of this name.
fn cgroup(node: &Node, hierarchy: &str) -> String {
    let script =
        format!("cat $(grep -l '#{}' /proc/[0-9]*/cmdline | head -n1 | sed s/cmdline/cgroup/)", node.name());
    let lines = node.run("/bed/bin/busybox", ["sh", "-c", &script]).unwrap();
    let line = lines.lines().find_map(|line| line.split_once(&format!(":{hierarchy}:")));
    line.unwrap_or_else(|| panic!("{hierarchy} is in {lines}")).1.to_string()
}

#[test]
fn a_container_opens_what_it_was_granted_and_nothing_else() {
    let profile = Profile::control_plane()
        .node(NodeProfile::new("old").cgroups(Cgroups::V1))
        .node(NodeProfile::new("new").cgroups(Cgroups::V2));
    let Some(bed) = Bed::for_test(profile) else { return };
    let (old, new) = (bed.node("old").unwrap(), bed.node("new").unwrap());
    let _plugins = [start_pod(&bed, old), start_pod(&bed, new)];
    for node in [old, new] {
        let granted = open(&bed, node, 0);
        assert!(granted.contains(LET_THROUGH), "{}: {granted}", node.name());
        let other = open(&bed, node, 1);
        assert!(other.contains(REFUSED), "{}: {other}", node.name());
    }
    v1_is_opened_and_closed_while_the_container_runs(&bed, old);
    v2_is_opened_and_closed_while_the_container_runs(&bed, new);
    // Neither machine nor node has a say in the other's devices.
    assert!(!std::path::Path::new("/dev/nvidia0").exists());
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
