use super::*;
use crate::cgroup::Hierarchy;
use partage_testkit::skip_or_fail;
use std::io::{BufRead, BufReader};
use std::process::{Child, Command, Stdio};

const LONG_GRACE: Duration = Duration::from_secs(120);

fn all(_: &ProcessIdentity) -> bool {
    true
}

/// Returns a membership that only the processes of this call have.
fn variable() -> Membership {
    static COUNT: std::sync::atomic::AtomicU32 = std::sync::atomic::AtomicU32::new(0);
    let count = COUNT.fetch_add(1, std::sync::atomic::Ordering::Relaxed);
    Membership::Variable {
        name: "PARTAGE_TEST_MARK".into(),
        value: format!("{}-{count}", std::process::id()),
    }
}

/// A shell that runs a script, prints `ready` and is killed with the test.
struct TestShell(Child);

impl TestShell {
    fn start(command: &mut Command) -> Self {
        let mut child =
            command.stdin(Stdio::null()).stdout(Stdio::piped()).stderr(Stdio::null()).spawn().unwrap();
        let mut line = String::new();
        BufReader::new(child.stdout.take().unwrap()).read_line(&mut line).unwrap();
        assert_eq!(line, "ready\n");
        Self(child)
    }

    fn marked(membership: &Membership, script: &str) -> Self {
        let Membership::Variable { name, value } = membership else { panic!("{membership:?}") };
        Self::start(Command::new("sh").args(["-c", script]).env(name, value))
    }

    fn id(&self) -> ProcessIdentity {
        ProcessIdentity::of(self.0.id()).unwrap()
    }
}

impl Drop for TestShell {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

/// Waits until this many members run `sleep`. During `execve` a process has no environment.
fn settled(memberships: &[Membership], sleepers: usize) {
    let until = Instant::now() + LONG_GRACE;
    let sleeps = |one: &&ProcessIdentity| {
        fs::read(format!("/proc/{}/cmdline", one.pid)).is_ok_and(|words| words.starts_with(b"sleep\0"))
    };
    while find_members(memberships).unwrap().iter().filter(sleeps).count() != sleepers {
        assert!(Instant::now() < until, "{:?}", find_members(memberships));
        std::thread::sleep(Duration::from_millis(1));
    }
}

fn root() -> bool {
    let root = rustix::process::geteuid().is_root();
    if !root {
        skip_or_fail(&"it creates mount namespaces and cgroups; run it as root");
    }
    root
}

#[test]
fn children_are_members_and_exit_on_sigterm() {
    let membership = variable();
    let shell = TestShell::marked(&membership, "sleep 1000 & sleep 1000 & echo ready; wait");
    let memberships = [membership];
    settled(&memberships, 2);
    let found = find_members(&memberships).unwrap();
    assert_eq!(found.len(), 3, "{found:?}");
    assert!(found.contains(&shell.id()));
    assert_eq!(end_members(&memberships, &all, LONG_GRACE).unwrap(), EndedProcesses { ended: 3, killed: 0 });
    assert_eq!(find_members(&memberships).unwrap(), []);
    assert_eq!(end_members(&memberships, &all, LONG_GRACE).unwrap(), EndedProcesses::default());
}

#[test]
fn variable_must_match_exactly_as_of_process_start() {
    let membership = variable();
    // The child prints `ready`: before its `execve` it has the environment of its parent.
    let script =
        "export PARTAGE_TEST_MARK=$PARTAGE_TEST_MARK-other; sh -c 'echo ready; exec sleep 1000' & wait";
    let shell = TestShell::marked(&membership, script);
    let Membership::Variable { name, value } = membership.clone() else { panic!("{membership:?}") };
    for (name, value) in [(name.clone(), value[1..].to_string()), (name[1..].to_string(), value.clone())] {
        assert_eq!(find_members(&[Membership::Variable { name, value }]).unwrap(), []);
    }
    assert_eq!(
        find_members(std::slice::from_ref(&membership)).unwrap(),
        [shell.id()],
        "without its later child"
    );
    let other = Membership::Variable { name, value: value + "-other" };
    settled(std::slice::from_ref(&other), 1);
    assert_eq!(
        end_members(&[membership, other], &all, LONG_GRACE).unwrap(),
        EndedProcesses { ended: 2, killed: 0 }
    );
}

#[test]
fn process_that_ignores_sigterm_is_killed() {
    let membership = variable();
    let shell = TestShell::marked(&membership, "trap '' TERM; sleep 1000 & echo ready; wait");
    let memberships = [membership];
    settled(&memberships, 1);
    let ended = end_members(&memberships, &all, Duration::from_millis(300)).unwrap();
    assert_eq!(ended, EndedProcesses { ended: 0, killed: 2 });
    assert!(!shell.id().is_running());
}

#[test]
fn stopped_process_exits_on_sigterm() {
    let membership = variable();
    let shell = TestShell::marked(&membership, "echo ready; exec sleep 1000");
    let memberships = [membership];
    settled(&memberships, 1);
    shell.id().signal(Signal::STOP).unwrap();
    assert_eq!(end_members(&memberships, &all, LONG_GRACE).unwrap(), EndedProcesses { ended: 1, killed: 0 });
}

#[test]
fn fork_loop_is_ended() {
    let membership = variable();
    let script = "trap '' TERM; echo ready; while :; do sleep 1000 & sleep 0.005; done";
    let _shell = TestShell::marked(&membership, script);
    let memberships = [membership];
    let ended = end_members(&memberships, &all, Duration::from_millis(200)).unwrap();
    assert!(ended.killed >= 2, "{ended:?}");
    assert_eq!(find_members(&memberships).unwrap(), []);
}

#[test]
fn process_that_is_not_accepted_keeps_running() {
    let membership = variable();
    let mine = TestShell::marked(&membership, "echo ready; exec sleep 1000");
    let other = TestShell::marked(&membership, "echo ready; exec sleep 1000");
    settled(std::slice::from_ref(&membership), 2);
    let spared = other.id();
    let ended = end_members(std::slice::from_ref(&membership), &|one| *one != spared, LONG_GRACE).unwrap();
    assert_eq!(ended, EndedProcesses { ended: 1, killed: 0 });
    assert!(other.id().is_running() && !mine.id().is_running());
    assert_eq!(find_members(&[membership]).unwrap(), [spared]);
}

#[test]
fn mount_namespace_has_only_its_processes() {
    if !root() {
        return;
    }
    let script = "sleep 1000 & echo ready; wait";
    let shell = TestShell::start(Command::new("unshare").args(["-m", "env", "-i", "/bin/sh", "-c", script]));
    let memberships = [mount_namespace_membership(shell.0.id()).unwrap()];
    assert_ne!(memberships[0], mount_namespace_membership(std::process::id()).unwrap());
    assert_eq!(find_members(&memberships).unwrap().len(), 2);
    assert_eq!(end_members(&memberships, &all, LONG_GRACE).unwrap(), EndedProcesses { ended: 2, killed: 0 });
}

#[test]
fn region_is_found_in_nested_mount_namespaces() {
    if !root() {
        return;
    }
    let folder = tempfile::tempdir().unwrap();
    for name in ["usage", "other", "at"] {
        fs::write(folder.path().join(name), "").unwrap();
    }
    let script = "mount --bind usage at && unshare -m sh -c 'sleep 1000 & echo ready; wait'; :";
    let inside =
        TestShell::start(Command::new("unshare").args(["-m", "sh", "-c", script]).current_dir(&folder));
    let script = "mount --bind other at && echo ready; sleep 1000";
    let outside =
        TestShell::start(Command::new("unshare").args(["-m", "sh", "-c", script]).current_dir(&folder));
    let memberships = [region_membership(&folder.path().join("usage"), &folder.path().join("at")).unwrap()];
    let found = find_members(&memberships).unwrap();
    assert!(found.contains(&inside.id()) && !found.contains(&outside.id()), "{found:?}");
    assert_eq!(end_members(&memberships, &all, LONG_GRACE).unwrap(), EndedProcesses { ended: 3, killed: 0 });
    assert!(outside.id().is_running());
    end_members(&[mount_namespace_membership(outside.0.id()).unwrap()], &all, LONG_GRACE).unwrap();
}

#[test]
fn cgroup_is_killed_with_all_below() {
    if !root() {
        return;
    }
    for hierarchy in [Hierarchy::Unified, Hierarchy::Devices] {
        let name = format!("partage-test-members-{}", std::process::id());
        let Some(cgroup) = Cgroup::create_in(hierarchy, &name, std::process::id()).unwrap() else {
            skip_or_fail(&format!("{hierarchy:?} is not mounted, or read-only"));
            continue;
        };
        let below = cgroup.path().join("below");
        fs::create_dir(&below).unwrap();
        let script = "trap '' TERM; echo ready; exec sleep 1000";
        let [first, second] =
            [script; 2].map(|script| TestShell::start(Command::new("sh").args(["-c", script])));
        cgroup.add_process(first.0.id()).unwrap();
        fs::write(below.join("cgroup.procs"), second.0.id().to_string()).unwrap();
        let memberships = [Membership::Cgroup(cgroup.clone())];
        let found = find_members(&memberships).unwrap();
        assert!(found.contains(&first.id()) && found.contains(&second.id()), "{found:?}");
        assert_eq!(
            end_members(&memberships, &all, Duration::from_millis(100)).unwrap(),
            EndedProcesses { ended: 0, killed: 2 }
        );
        assert!(!first.id().is_running() && !second.id().is_running());
        cgroup.remove().unwrap();
        assert!(!cgroup.exists());
        assert_eq!(find_members(&memberships).unwrap(), []);
    }
}

#[test]
fn member_that_is_not_accepted_survives_and_others_are_killed() {
    if !root() {
        return;
    }
    let name = format!("partage-test-spared-{}", std::process::id());
    let Some(cgroup) = Cgroup::create(&name, std::process::id()).unwrap() else {
        return skip_or_fail(&"cgroups cannot be created here");
    };
    let script = "trap '' TERM; echo ready; exec sleep 1000";
    let shells = [script; 2].map(|script| TestShell::start(Command::new("sh").args(["-c", script])));
    for shell in &shells {
        cgroup.add_process(shell.0.id()).unwrap();
    }
    let spared = shells[0].id();
    let memberships = [Membership::Cgroup(cgroup.clone())];
    let ended = end_members(&memberships, &|one| *one != spared, Duration::from_millis(100)).unwrap();
    assert_eq!(ended, EndedProcesses { ended: 0, killed: 1 });
    assert!(spared.is_running() && !shells[1].id().is_running());
    assert!(cgroup.remove().unwrap_err().to_string().contains("has processes"));
    drop(shells);
    cgroup.remove().unwrap();
}

/// Checks that one pass over all shares finds the same processes as a search for each share.
fn counted(shares: &[Vec<Membership>]) -> Vec<usize> {
    let found = members_of_shares(shares).unwrap();
    let one_by_one: Vec<Vec<ProcessIdentity>> =
        shares.iter().map(|memberships| find_members(memberships).unwrap()).collect();
    assert_eq!(found, one_by_one);
    let index = ProcessIndex::of(shares).unwrap();
    for (share, members) in found.iter().enumerate() {
        assert!(members.iter().all(|member| index.owner(member.pid) == Some(share)), "{share}: {members:?}");
    }
    assert_eq!(index.owner(std::process::id()), None);
    found.iter().map(Vec::len).collect()
}

#[test]
fn one_pass_finds_the_processes_of_many_shares_by_variable() {
    let mut shares: Vec<Vec<Membership>> = (0..60).map(|_| vec![variable()]).collect();
    // Most shares have no process, and one has no membership yet.
    shares[7].clear();
    let one = TestShell::marked(&shares[3][0], "echo ready; exec sleep 1000");
    let many = TestShell::marked(&shares[50][0], "sleep 1000 & sleep 1000 & echo ready; wait");
    settled(&shares[3], 1);
    settled(&shares[50], 2);
    let counts = counted(&shares);
    let those: Vec<(usize, usize)> = counts.into_iter().enumerate().filter(|(_, count)| *count > 0).collect();
    assert_eq!(those, [(3, 1), (50, 3)]);
    assert!(one.id().is_running() && many.id().is_running());
    for memberships in [&shares[3], &shares[50]] {
        end_members(memberships, &all, LONG_GRACE).unwrap();
    }
    assert!(counted(&shares).iter().all(|count| *count == 0));
}

#[test]
fn one_pass_finds_the_processes_of_many_shares_by_all_memberships() {
    if !root() {
        return;
    }
    let folder = tempfile::tempdir().unwrap();
    for name in ["a", "b", "at"] {
        fs::write(folder.path().join(name), "").unwrap();
    }
    let bound = |file: &str| {
        let script = format!("mount --bind {file} at && unshare -m sh -c 'sleep 1000 & echo ready; wait'; :");
        TestShell::start(Command::new("unshare").args(["-m", "sh", "-c", &script]).current_dir(&folder))
    };
    let sees = |file: &str| region_membership(&folder.path().join(file), &folder.path().join("at")).unwrap();
    let [a, b] = ["a", "b"].map(bound);
    let apart =
        TestShell::start(Command::new("unshare").args(["-m", "sh", "-c", "echo ready; exec sleep 1000"]));
    let named = variable();
    let _named = TestShell::marked(&named, "echo ready; exec sleep 1000");
    settled(std::slice::from_ref(&named), 1);
    let mut shares = vec![
        vec![sees("a")],
        vec![sees("b")],
        vec![mount_namespace_membership(apart.0.id()).unwrap()],
        vec![named],
    ];
    let mut expected = vec![3, 3, 1, 1];
    let name = format!("partage-test-index-{}", std::process::id());
    let held = TestShell::start(Command::new("sh").args(["-c", "echo ready; exec sleep 1000"]));
    match Cgroup::create(&name, std::process::id()).unwrap() {
        Some(cgroup) => {
            cgroup.add_process(held.0.id()).unwrap();
            shares.push(vec![Membership::Cgroup(cgroup)]);
            expected.push(1);
        }
        None => skip_or_fail(&"cgroups cannot be created here"),
    }
    assert_eq!(counted(&shares), expected);
    for (shell, memberships) in [a, b].into_iter().zip(&shares) {
        end_members(memberships, &all, LONG_GRACE).unwrap();
        drop(shell);
    }
    drop(held);
    if let Some([Membership::Cgroup(cgroup)]) = shares.get(4).map(Vec::as_slice) {
        cgroup.remove().unwrap();
    }
}

#[test]
fn memberships_are_serialized_and_deserialized() {
    let memberships = [variable(), Membership::MountNamespace { device: 4, inode: 4_026_531_841 }];
    let text = serde_json::to_string(&memberships).unwrap();
    assert_eq!(serde_json::from_str::<Vec<Membership>>(&text).unwrap(), memberships);
}
