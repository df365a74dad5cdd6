use super::*;
use proptest::prelude::*;

const MOUNTS: &str = "\
22 26 0:20 / /sys rw,relatime - sysfs sysfs rw
31 23 0:28 / /sys/fs/cgroup rw,relatime shared:9 - tmpfs tmpfs rw,mode=755
36 31 0:33 / /sys/fs/cgroup/devices rw,relatime shared:15 master:2 - cgroup cgroup rw,devices
41 31 0:38 /a\\040b /mnt/with\\134back\\011tab rw - cgroup2 cgroup2 rw,nsdelegate
";

#[test]
fn mounts_are_read() {
    let mounts = mounts(MOUNTS.as_bytes());
    assert_eq!(mounts.len(), 4);
    assert_eq!(mounts[2].at, Path::new("/sys/fs/cgroup/devices"));
    assert_eq!(
        (mounts[2].kind.as_str(), &mounts[2].options[..]),
        ("cgroup", &["rw".into(), "devices".into()][..])
    );
    assert_eq!(
        (mounts[3].root.as_path(), mounts[3].at.as_path()),
        (Path::new("/a b"), Path::new("/mnt/with\\back\ttab"))
    );
}

#[test]
fn lines_that_are_none_are_left_out() {
    let broken = [
        "36 31 0:33 / /at rw,relatime - cgroup",
        "36 31 0:33 / /at rw,relatime cgroup cgroup rw",
        "36 31 0:33 relative /at rw - cgroup cgroup rw",
        "36 31 0:33 / at rw - cgroup cgroup rw",
        "36 31 0:33 / /\\777 rw - cgroup cgroup rw",
        "36",
        "",
    ];
    let table = broken.join("\n") + "\n" + MOUNTS;
    assert_eq!(mounts(table.as_bytes()).len(), 4);
    let table = "x:devices:/\n5:devices\n5\n:::\n5:devices:relative\n4294967296::/\n0::/right\n";
    let right = Membership { id: 0, controllers: vec![], path: "/right".into() };
    assert_eq!(memberships(table.as_bytes()), [right]);
}

#[test]
fn memberships_are_read() {
    let table = b"9:name=systemd:/\n5:devices,freezer:/a:b/c\n0::/user.slice/\xff\n";
    let all = memberships(table);
    assert_eq!((all[1].id, all[1].path.as_path()), (5, Path::new("/a:b/c")));
    assert_eq!(all[1].controllers, ["devices", "freezer"]);
    assert!(all[2].controllers.is_empty());
    assert_eq!(all[2].path.as_os_str().len(), "/user.slice/".len() + 1);
}

#[test]
fn a_path_is_found_only_below_what_is_mounted() {
    let mount =
        |root: &str| Mount { root: root.into(), at: "/at".into(), kind: "cgroup2".into(), options: vec![] };
    let find = |root: &str, path: &str| mount(root).find(Path::new(path));
    assert_eq!(find("/", "/a/b"), Some("/at/a/b".into()));
    assert_eq!(find("/", "/"), Some("/at".into()));
    assert_eq!(find("/a", "/a/b"), Some("/at/b".into()));
    assert_eq!(find("/a", "/ab"), None);
    assert_eq!(find("/a", "/"), None);
    assert_eq!(find("/", "/../../other"), None);
    assert_eq!(find("/", "/a/../../other"), None);
}

proptest! {
    #[test]
    fn any_text_is_read_without_harm(table in proptest::collection::vec(any::<u8>(), 0..400)) {
        let _ = memberships(&table);
        for mount in mounts(&table) {
            prop_assert!(mount.at.is_absolute() && mount.root.is_absolute());
        }
    }

    #[test]
    fn nearly_right_text_leads_nowhere_else(path in "[./a\\\\0-7]{0,12}", root in "(/[.a]{1,3}){0,2}/?") {
        let line = format!("36 31 0:33 /{root} /at{path} rw x:1 - cgroup2 cgroup2 rw\n");
        for mount in mounts(line.as_bytes()) {
            if let Some(found) = mount.find(Path::new(&format!("/{path}"))) {
                prop_assert!(found.starts_with(&mount.at));
                let below = found.strip_prefix(&mount.at).unwrap();
                prop_assert!(below.components().all(|part| matches!(part, Component::Normal(_))));
            }
        }
    }
}
