use super::*;
use proptest::prelude::*;

const MOUNTS: &str = "\
22 26 0:20 / /sys rw,relatime - sysfs sysfs rw
31 23 0:28 / /sys/fs/cgroup rw,relatime shared:9 - tmpfs tmpfs rw,mode=755
36 31 0:33 / /sys/fs/cgroup/devices rw,relatime shared:15 master:2 - cgroup cgroup rw,devices
41 31 0:38 /a\\040b /mnt/with\\134back\\011tab rw - cgroup2 cgroup2 rw,nsdelegate
";

#[test]
fn mountinfo_is_parsed_with_escaped_paths() {
    let mounts = parse_mountinfo(MOUNTS.as_bytes());
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
fn malformed_lines_are_skipped() {
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
    assert_eq!(parse_mountinfo(table.as_bytes()).len(), 4);
    let table = "x:devices:/\n5:devices\n5\n:::\n5:devices:relative\n4294967296::/\n0::/right\n";
    let right = CgroupMembership { id: 0, controllers: vec![], path: "/right".into() };
    assert_eq!(parse_cgroups(table.as_bytes()), [right]);
}

#[test]
fn cgroups_are_parsed_with_colons_and_non_utf8_paths() {
    let table = b"9:name=systemd:/\n5:devices,freezer:/a:b/c\n0::/user.slice/\xff\n";
    let all = parse_cgroups(table);
    assert_eq!((all[1].id, all[1].path.as_path()), (5, Path::new("/a:b/c")));
    assert_eq!(all[1].controllers, ["devices", "freezer"]);
    assert!(all[2].controllers.is_empty());
    assert_eq!(all[2].path.as_os_str().len(), "/user.slice/".len() + 1);
}

#[test]
fn path_is_visible_only_below_the_mounted_directory() {
    let mount = |root: &str| MountEntry {
        root: root.into(),
        at: "/at".into(),
        kind: "cgroup2".into(),
        options: vec![],
    };
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
    fn arbitrary_bytes_do_not_panic(table in proptest::collection::vec(any::<u8>(), 0..400)) {
        let _ = parse_cgroups(&table);
        for mount in parse_mountinfo(&table) {
            prop_assert!(mount.at.is_absolute() && mount.root.is_absolute());
        }
    }

    #[test]
    fn path_never_leaves_the_mount_point(path in "[./a\\\\0-7]{0,12}", root in "(/[.a]{1,3}){0,2}/?") {
        let line = format!("36 31 0:33 /{root} /at{path} rw x:1 - cgroup2 cgroup2 rw\n");
        for mount in parse_mountinfo(line.as_bytes()) {
            if let Some(found) = mount.find(Path::new(&format!("/{path}"))) {
                prop_assert!(found.starts_with(&mount.at));
                let below = found.strip_prefix(&mount.at).unwrap();
                prop_assert!(below.components().all(|part| matches!(part, Component::Normal(_))));
            }
        }
    }
}
