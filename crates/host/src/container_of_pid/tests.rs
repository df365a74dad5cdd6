use super::*;
use proptest::prelude::*;
use std::os::unix::fs::symlink;

const A: &str = "aaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaa";
const B: &str = "bbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbb";

fn of(text: &str) -> Option<String> {
    container_of(text).map(|id| id.to_string())
}

#[test]
fn id_is_found_in_all_known_formats() {
    for path in [
        "/kubepods.slice/kubepods-burstable.slice/kubepods-burstable-pod12_3.slice/cri-containerd-@.scope",
        "/kubepods.slice/kubepods-pod12_3.slice/crio-@.scope",
        "/kubepods.slice/kubepods-pod12_3.slice/crio-@.scope/container",
        "/system.slice/docker-@.scope",
        "/docker/@",
        "/kubepods/besteffort/pod0f-1/@",
        "/kubelet/kubepods/pod0f-1/@",
        "/machine.slice/libpod-@.scope/container",
        "/system.slice/containerd.service/kubepods-pod1.slice:cri-containerd:@",
    ] {
        let path = path.replace('@', A);
        assert_eq!(of(&format!("0::{path}\n")).as_deref(), Some(A), "{path}");
        let old = format!("12:pids:{path}\n5:cpu,memory:{path}\n1:name=systemd:{path}\n0::/\n");
        assert_eq!(of(&old).as_deref(), Some(A), "{path}");
    }
}

#[test]
fn id_is_found_inside_another_container() {
    for path in [
        "/../../pod0f-1/@",
        "/../@",
        "/../../../kubepods-burstable-pod12_3.slice/cri-containerd-@.scope",
        "/../../kubepods-besteffort.slice/kubepods-besteffort-pod12_3.slice/cri-containerd-@.scope",
    ] {
        let path = path.replace('@', A);
        assert_eq!(of(&format!("0::{path}\n")).as_deref(), Some(A), "{path}");
    }
    assert_eq!(of("0::/\n"), None, "one of the same container");
}

#[test]
fn process_outside_containers_has_no_id() {
    let upper = A.to_uppercase();
    for path in ["/", "", "/user.slice/user-0.slice/session-1.scope", &A[1..], &format!("{A}a"), &upper] {
        assert_eq!(of(&format!("0::/{path}\n3:memory:/{path}")), None, "{path}");
    }
}

#[test]
fn cgroups_that_a_tenant_creates_are_ignored() {
    for below in
        ["docker/@", "@", "pod0f-1/@", "kubepods/burstable/pod0f-1/@", "kubepods-pod1.slice/crio-@.scope"]
    {
        let below = below.replace('@', B);
        for own in ["/kubepods/pod1", "/kubepods.slice/kubepods-pod12_3.slice", "/../../pod1"] {
            let text = format!("0::{own}/{A}/{below}\n");
            assert_eq!(of(&text).as_deref(), Some(A), "{text}");
        }
    }
}

#[test]
fn container_of_the_node_itself_is_ignored() {
    for path in [
        "/docker/@/kubelet.slice/kubepods/pod0f-1/#",
        "/system.slice/docker-@.scope/kubepods-pod1.slice/crio-#.scope",
    ] {
        let path = path.replace('@', B).replace('#', A);
        assert_eq!(of(&format!("0::{path}\n")).as_deref(), Some(A), "{path}");
    }
    assert_eq!(of(&format!("0::/docker/{B}/system.slice/containerd.service\n")).as_deref(), Some(B));
}

#[test]
fn preferred_hierarchy_wins() {
    let mixed = format!("9:cpu:/docker/{B}\n4:devices:/docker/{B}\n3:memory:/docker/{A}\n");
    assert_eq!(of(&mixed).as_deref(), Some(A));
    let hybrid = format!("3:memory:/docker/{B}\n0::/docker/{A}\n");
    assert_eq!(of(&hybrid).as_deref(), Some(A));
}

#[test]
fn malformed_ids_are_refused() {
    assert_eq!(ContainerId::new(A).unwrap().as_str(), A);
    assert_eq!(ContainerId::new(&format!("containerd://{A}")), None);
    assert_eq!(ContainerId::new(""), None);
}

#[test]
fn containers_of_processes_are_read_from_proc() {
    let folder = tempfile::tempdir().unwrap();
    let put = |pid: u32| {
        let own = folder.path().join(pid.to_string());
        std::fs::create_dir(&own).unwrap();
        own.join("cgroup")
    };
    std::fs::write(put(7), format!("0::/kubepods/pod1/{A}\n")).unwrap();
    // Endless, and not UTF-8: only the start is read.
    symlink("/dev/zero", put(8)).unwrap();
    std::fs::write(put(9), [b"0::/kubepods/pod1/", A.as_bytes(), b"/\xff\xfe\n"].concat()).unwrap();
    let processes = ProcessContainers::new(folder.path());
    assert_eq!(processes.container(7), ContainerId::new(A));
    assert_eq!(processes.container(8), None);
    assert_eq!(processes.container(9), ContainerId::new(A));
    assert_eq!(processes.container(10), None);
    std::fs::remove_dir_all(folder.path().join("7")).unwrap();
    assert_eq!(processes.container(7), ContainerId::new(A), "read once per pass");
    assert_eq!(ProcessContainers::new(folder.path()).container(7), None);
}

proptest! {
    #[test]
    fn arbitrary_text_does_not_panic(text in "\\PC*") {
        if let Some(id) = container_of(&text) {
            prop_assert_eq!(ContainerId::new(id.as_str()), Some(id.clone()));
        }
    }

    #[test]
    fn arbitrary_lines_do_not_panic(text in "([0-9]{0,2}:[a-z,=]{0,12}:[/.a-f0-9:-]{0,90}\n){0,6}") {
        let _ = container_of(&text);
    }

    /// The names of cgroups that a tenant creates do not change its id.
    #[test]
    fn names_of_nested_cgroups_do_not_change_the_id(below in "[ -~/:]{0,80}", again in "[0-9a-f]{64}", systemd: bool) {
        let own = if systemd { "kubepods.slice/kubepods-pod1_2.slice/cri-containerd-" } else { "kubepods/pod1-2/" };
        let tail = if systemd { ".scope" } else { "" };
        let text = format!("0::/{own}{A}{tail}/{below}/{again}\n");
        prop_assert_eq!(container_of(&text), ContainerId::new(A));
    }
}
