use super::devices::*;
use super::*;

/// What the kernel's machine would do, for the instructions that are used.
fn run(program: &[Instruction], kind: u32, major: u32, minor: u32) -> i64 {
    let question = [kind, major, minor];
    let mut registers = [0i64; 11];
    let mut at = 0usize;
    loop {
        let Instruction { code, registers: pair, offset, value } = program[at];
        let (to, from) = (usize::from(pair & 15), pair >> 4);
        let low = registers[to] as u32;
        let jump = match code {
            LOAD => {
                assert_eq!(from, 1, "only the question can be read");
                registers[to] = i64::from(question[usize::try_from(offset).unwrap() / 4]);
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

/// How the kernel puts it: what shall be done in the upper half, the kind in the lower.
fn asked(access: u32, kind: u32) -> u32 {
    access << 16 | kind
}

#[test]
fn the_program_closes_what_is_listed_and_nothing_else() {
    let list = [(195, 0), (195, 255), (511, 1_048_575), (u32::MAX, 0x8000_0000)];
    let program = program(&list);
    for access in 0..8 {
        for (major, minor) in list {
            assert_eq!(run(&program, asked(access, 2), major, minor), 0, "{major}:{minor}");
            assert_eq!(run(&program, asked(access, 1), major, minor), 1, "a block device");
            assert_eq!(run(&program, asked(access, 2), major, minor ^ 1), 1);
            assert_eq!(run(&program, asked(access, 2), major ^ 1, minor), 1);
        }
        assert_eq!(run(&program, asked(access, 2), 1, 3), 1);
    }
}

#[test]
fn a_program_for_nothing_closes_nothing() {
    assert_eq!(run(&program(&[]), asked(2, 2), 195, 0), 1);
}

#[test]
fn the_program_is_what_the_kernel_documents() {
    let bytes: Vec<[u8; 2]> = program(&[(195, 7)]).iter().map(|one| [one.code, one.registers]).collect();
    let head = [[0x61, 0x12], [0x54, 2], [0x61, 0x13], [0x61, 0x14], [0x16, 2], [0xb7, 0], [0x95, 0]];
    assert_eq!(bytes[..7], head);
    assert_eq!(bytes[7..], [[0x56, 3], [0x56, 4], [0xb7, 0], [0x95, 0], [0xb7, 0], [0x95, 0]]);
    assert_eq!(size_of::<Instruction>(), 8);
}

#[test]
fn a_name_is_one_folder() {
    for name in ["", ".", "..", "a/b", "/a", "a b", "a\n", ".hidden", "é", &"x".repeat(201)] {
        let error = Cgroup::make(name, std::process::id()).unwrap_err();
        assert!(matches!(error, CgroupError::Name(_)), "{name:?}: {error}");
    }
    assert!(sound("partage-1000-train.0_x"));
}

const HYBRID: &[u8] = b"\
36 31 0:33 / /cg/freezer rw - cgroup cgroup rw,freezer
37 31 0:33 / /cg/devices rw - cgroup cgroup rw,devices
41 31 0:38 / /cg/unified rw - cgroup2 cgroup2 rw
";

#[test]
fn the_place_is_where_the_process_is() {
    let mounts = tables::mounts(HYBRID);
    let of = |table: &[u8], hierarchy| folder(hierarchy, &mounts, &tables::memberships(table));
    let table = b"6:freezer:/f\n5:devices:/d\n1:name=systemd:/s\n0::/user/1\n";
    assert_eq!(of(table, Hierarchy::Unified), Some("/cg/unified/user/1".into()));
    assert_eq!(of(table, Hierarchy::Devices), Some("/cg/devices/d".into()));
    assert_eq!(of(b"1:name=systemd:/s\n", Hierarchy::Unified), None);
    assert_eq!(of(b"0::/../outside\n", Hierarchy::Unified), None);
    let empty = folder(Hierarchy::Unified, &[], &tables::memberships(table));
    assert_eq!(empty, None);
}

#[test]
fn beside_a_process_that_is_gone_nothing_is_made() {
    let error = Cgroup::make("partage-test-gone", u32::MAX).unwrap_err();
    assert!(error.to_string().contains("/proc/4294967295/cgroup"), "{error}");
}

#[test]
fn a_folder_that_is_no_cgroup_is_refused_in_words() {
    let folder = tempfile::tempdir().unwrap();
    for hierarchy in [Hierarchy::Unified, Hierarchy::Devices] {
        let cgroup = Cgroup { hierarchy, folder: folder.path().into() };
        let error = cgroup.close_devices(&[(195, 0)]).unwrap_err().to_string();
        assert!(error.contains("1 devices") && error.contains("root"), "{error}");
        assert!(!cgroup.exists());
        assert_eq!(fs::read_dir(&folder).unwrap().count(), 0, "nothing may be made in it");
    }
}
