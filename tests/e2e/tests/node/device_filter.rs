//! The kernel's access control for device nodes, on both versions of cgroups. Major 195 is NVIDIA's; no driver has it
//! here, so an open that is allowed returns ENXIO, and one that is not returns EPERM.

use partage_e2e::late_plugin::{ContainerEdits, EditDeviceNode, LatePlugin, LatePluginSettings};
use partage_testkit::bed::{BedNode, BedProfile, CgroupVersion, NodeProfile, TestBed};
use std::sync::Arc;

const ALLOWED_ERROR: &str = "No such device or address";
const DENIED_ERROR: &str = "Operation not permitted";

/// Starts a pod on the node that is granted the first of two GPUs, and creates a device node for the other itself.
fn start_granted_pod(bed: &TestBed, node: &BedNode) -> LatePlugin {
    node.run("/bed/bin/busybox", ["mknod", "-m", "666", "/dev/nvidia0", "c", "195", "0"]).unwrap();
    let path = |inside: &str| node.path(inside).unwrap();
    let mut settings = LatePluginSettings::new(
        &path("/var/lib/kubelet"),
        &path("/var/log/pods"),
        &path("/run/containerd/containerd.sock"),
        &path("/etc/cdi"),
        &path("/var/lib/record.json"),
    );
    std::fs::create_dir_all(&settings.cdi).unwrap();
    settings.edits = Arc::new(|_| ContainerEdits {
        device_nodes: vec![EditDeviceNode { path: "/dev/nvidia0".into(), host_path: "/dev/nvidia0".into() }],
        ..ContainerEdits::default()
    });
    let plugin = LatePlugin::start(bed.handle(), settings).unwrap();
    bed.block_on(plugin.wait_until_watched());
    let name = node.name();
    // The node's name in the container's command makes its process easy to find.
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

/// Returns the error when a container opens a GPU.
fn open_gpu_device(bed: &TestBed, node: &BedNode, gpu: u8) -> String {
    let script = format!("exec 2>&1; true < /dev/nvidia{gpu}; true");
    bed.kubectl(&["exec", node.name(), "--", "sh", "-c", &script]).unwrap()
}

/// Returns the cgroup of the pod's container, as the node sees it: its path in the hierarchy of this name.
fn container_cgroup(node: &BedNode, hierarchy: &str) -> String {
    let script = format!(
        "cat $(grep -l '[#]{}' /proc/[0-9]*/cmdline | head -n1 | sed s/cmdline/cgroup/)",
        node.name()
    );
    let lines = node.run("/bed/bin/busybox", ["sh", "-c", &script]).unwrap();
    let line = lines.lines().find_map(|line| line.split_once(&format!(":{hierarchy}:")));
    line.unwrap_or_else(|| panic!("{hierarchy} is not in {lines}")).1.to_string()
}

/// Runs a bed of one node with these cgroups, where a container can open exactly what it was granted.
fn check_device_filter(cgroups: CgroupVersion, goes_on: impl Fn(&TestBed, &BedNode)) {
    let profile = BedProfile::control_plane().node(NodeProfile::new("filtered").cgroups(cgroups));
    let Some(bed) = TestBed::for_test(profile) else { return };
    let node = bed.node("filtered").unwrap();
    let _plugin = start_granted_pod(&bed, node);
    let (granted, other) = (open_gpu_device(&bed, node, 0), open_gpu_device(&bed, node, 1));
    assert!(granted.contains(ALLOWED_ERROR), "{granted}");
    assert!(other.contains(DENIED_ERROR), "{other}");
    goes_on(&bed, node);
    // A node's devices are its own.
    assert!(!std::path::Path::new("/dev/nvidia0").exists());
}

#[test]
fn v1_container_opens_only_its_granted_device() {
    check_device_filter(CgroupVersion::V1, check_v1_filter_can_be_changed_while_running);
}

#[test]
fn v2_container_opens_only_its_granted_device() {
    check_device_filter(CgroupVersion::V2, check_v2_filter_can_be_changed_while_running);
}

/// The devices controller has a list per cgroup, which can be written.
fn check_v1_filter_can_be_changed_while_running(bed: &TestBed, node: &BedNode) {
    let folder = node.path(format!("/sys/fs/cgroup/devices{}", container_cgroup(node, "devices"))).unwrap();
    std::fs::write(folder.join("devices.allow"), "c 195:1 rw").unwrap();
    assert!(open_gpu_device(bed, node, 1).contains(ALLOWED_ERROR));
    std::fs::write(folder.join("devices.deny"), "c 195:1 rw").unwrap();
    assert!(open_gpu_device(bed, node, 1).contains(DENIED_ERROR));
    assert!(open_gpu_device(bed, node, 0).contains(ALLOWED_ERROR), "access from the start is kept");
}

/// A cgroup has a BPF program. runc's own is the only one: detached, every device can be opened; attached again, it is
/// enforced again.
fn check_v2_filter_can_be_changed_while_running(bed: &TestBed, node: &BedNode) {
    let folder = format!("/sys/fs/cgroup{}", container_cgroup(node, ""));
    let bpftool = |words: &[&str]| node.run("/bed/bin/bpftool", words.iter().copied()).unwrap();
    let attached = || -> serde_json::Value {
        serde_json::from_str(&bpftool(&["--json", "cgroup", "show", &folder])).unwrap_or_default()
    };
    let programs = attached();
    assert_eq!(programs.as_array().map(Vec::len), Some(1), "{programs}");
    assert_eq!(programs[0]["attach_type"], "cgroup_device", "{programs}");
    assert_eq!(programs[0]["attach_flags"], "multi", "{programs}");
    let id = programs[0]["id"].to_string();
    // Pinned, because the kernel frees a program with its last cgroup.
    bpftool(&["prog", "pin", "id", &id, "/sys/fs/bpf/device-filter"]);
    bpftool(&["cgroup", "detach", &folder, "cgroup_device", "id", &id]);
    assert!(open_gpu_device(bed, node, 1).contains(ALLOWED_ERROR));
    bpftool(&["cgroup", "attach", &folder, "cgroup_device", "pinned", "/sys/fs/bpf/device-filter", "multi"]);
    assert!(open_gpu_device(bed, node, 1).contains(DENIED_ERROR));
    assert!(open_gpu_device(bed, node, 0).contains(ALLOWED_ERROR));
}
