use super::device_filter::*;
use super::*;

/// Interprets a program as the kernel would, for the instructions that are used.
fn run(program: &[Instruction], kind: u32, major: u32, minor: u32) -> i64 {
    let context = [kind, major, minor];
    let mut registers = [0i64; 11];
    let mut at = 0usize;
    loop {
        let Instruction { code, registers: pair, offset, value } = program[at];
        let (to, from) = (usize::from(pair & 15), pair >> 4);
        let low = registers[to] as u32;
        let jump = match code {
            LOAD => {
                assert_eq!(from, 1, "only the context can be read");
                registers[to] = i64::from(context[usize::try_from(offset).unwrap() / 4]);
                false
            }
            AND => {
                registers[to] = i64::from(low & value as u32);
                false
            }
            SET => {
                registers[to] = i64::from(value);
                false
            }
            IF_EQUAL => low == value as u32,
            IF_OTHER => low != value as u32,
            EXIT => return registers[0],
            other => panic!("{other:#x}"),
        };
        at += 1 + if jump { usize::try_from(offset).unwrap() } else { 0 };
    }
}

/// Returns the access type as the kernel passes it: the access in the upper half, the kind of device in the lower.
fn access_type(access: u32, kind: u32) -> u32 {
    access << 16 | kind
}

#[test]
fn filter_denies_listed_devices_only() {
    let list = [(195, 0), (195, 255), (511, 1_048_575), (u32::MAX, 0x8000_0000)];
    let program = filter_program(&list);
    for access in 0..8 {
        for (major, minor) in list {
            assert_eq!(run(&program, access_type(access, 2), major, minor), 0, "{major}:{minor}");
            assert_eq!(run(&program, access_type(access, 1), major, minor), 1, "a block device");
            assert_eq!(run(&program, access_type(access, 2), major, minor ^ 1), 1);
            assert_eq!(run(&program, access_type(access, 2), major ^ 1, minor), 1);
        }
        assert_eq!(run(&program, access_type(access, 2), 1, 3), 1);
    }
}

#[test]
fn filter_of_an_empty_list_denies_nothing() {
    assert_eq!(run(&filter_program(&[]), access_type(2, 2), 195, 0), 1);
}

#[test]
fn filter_is_encoded_as_the_kernel_documents() {
    let bytes: Vec<[u8; 2]> =
        filter_program(&[(195, 7)]).iter().map(|one| [one.code, one.registers]).collect();
    let head = [[0x61, 0x12], [0x54, 2], [0x61, 0x13], [0x61, 0x14], [0x16, 2], [0xb7, 0], [0x95, 0]];
    assert_eq!(bytes[..7], head);
    assert_eq!(bytes[7..], [[0x56, 3], [0x56, 4], [0xb7, 0], [0x95, 0], [0xb7, 0], [0x95, 0]]);
    assert_eq!(size_of::<Instruction>(), 8);
}

#[test]
fn invalid_cgroup_names_are_refused() {
    for name in ["", ".", "..", "a/b", "/a", "a b", "a\n", ".hidden", "é", &"x".repeat(201)] {
        let error = Cgroup::create(name, std::process::id()).unwrap_err();
        assert!(matches!(error, CgroupError::InvalidName(_)), "{name:?}: {error}");
    }
    assert!(is_valid_name("partage-1000-train.0_x"));
}

const HYBRID: &[u8] = b"\
36 31 0:33 / /cg/freezer rw - cgroup cgroup rw,freezer
37 31 0:33 / /cg/devices rw - cgroup cgroup rw,devices
41 31 0:38 / /cg/unified rw - cgroup2 cgroup2 rw
";

#[test]
fn cgroup_directory_follows_the_membership_of_the_process() {
    let mounts = proc_mounts::parse_mountinfo(HYBRID);
    let of =
        |table: &[u8], hierarchy| find_cgroup_dir(hierarchy, &mounts, &proc_mounts::parse_cgroups(table));
    let table = b"6:freezer:/f\n5:devices:/d\n1:name=systemd:/s\n0::/user/1\n";
    assert_eq!(of(table, Hierarchy::Unified), Some("/cg/unified/user/1".into()));
    assert_eq!(of(table, Hierarchy::Devices), Some("/cg/devices/d".into()));
    assert_eq!(of(b"1:name=systemd:/s\n", Hierarchy::Unified), None);
    assert_eq!(of(b"0::/../outside\n", Hierarchy::Unified), None);
    let empty = find_cgroup_dir(Hierarchy::Unified, &[], &proc_mounts::parse_cgroups(table));
    assert_eq!(empty, None);
}

#[test]
fn cgroup_beside_a_missing_process_is_refused() {
    let error = Cgroup::create("partage-test-gone", u32::MAX).unwrap_err();
    assert!(error.to_string().contains("/proc/4294967295/cgroup"), "{error}");
}

#[test]
fn device_filter_on_a_plain_directory_is_refused() {
    let folder = tempfile::tempdir().unwrap();
    for hierarchy in [Hierarchy::Unified, Hierarchy::Devices] {
        let cgroup = Cgroup { hierarchy, folder: folder.path().into() };
        let error = cgroup.deny_devices(&[(195, 0)]).unwrap_err().to_string();
        assert!(error.contains("1 devices") && error.contains("root"), "{error}");
        assert!(!cgroup.exists());
        assert_eq!(fs::read_dir(&folder).unwrap().count(), 0, "no file may be created in it");
    }
}
