use super::*;
use crate::cgroup::Hierarchy;
use partage_testkit::skip_or_fail;
use std::io::{BufRead, BufReader};
use std::process::{Child, Command, Stdio};

const LONG: Duration = Duration::from_secs(120);

fn all(_: &Identity) -> bool {
    true
}

/// A mark that only this call's processes have.
fn variable() -> Mark {
    static COUNT: std::sync::atomic::AtomicU32 = std::sync::atomic::AtomicU32::new(0);
    let count = COUNT.fetch_add(1, std::sync::atomic::Ordering::Relaxed);
    Mark::Variable { name: "PARTAGE_TEST_MARK".into(), value: format!("{}-{count}", std::process::id()) }
}

/// A shell that does something, says `ready` and is ended with the test.
struct Shell(Child);

impl Shell {
    fn start(command: &mut Command) -> Self {
        let mut child =
            command.stdin(Stdio::null()).stdout(Stdio::piped()).stderr(Stdio::null()).spawn().unwrap();
        let mut line = String::new();
        BufReader::new(child.stdout.take().unwrap()).read_line(&mut line).unwrap();
        assert_eq!(line, "ready\n");
        Self(child)
    }

    fn marked(mark: &Mark, script: &str) -> Self {
        let Mark::Variable { name, value } = mark else { panic!("{mark:?}") };
        Self::start(Command::new("sh").args(["-c", script]).env(name, value))
    }

    fn id(&self) -> Identity {
        Identity::of(self.0.id()).unwrap()
    }
}

impl Drop for Shell {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

/// Waits until so many members are `sleep`. In the middle of becoming another program a process has no variables.
fn settled(marks: &[Mark], sleepers: usize) {
    let until = Instant::now() + LONG;
    let sleeps = |one: &&Identity| {
        fs::read(format!("/proc/{}/cmdline", one.pid)).is_ok_and(|words| words.starts_with(b"sleep\0"))
    };
    while members(marks).unwrap().iter().filter(sleeps).count() != sleepers {
        assert!(Instant::now() < until, "{:?}", members(marks));
        std::thread::sleep(Duration::from_millis(1));
    }
}

fn root() -> bool {
    let root = rustix::process::geteuid().is_root();
    if !root {
        skip_or_fail(&"it makes mount namespaces and cgroups; run it as root");
    }
    root
}

#[test]
fn children_of_a_process_are_members_too_and_all_end_when_asked() {
    let mark = variable();
    let shell = Shell::marked(&mark, "sleep 1000 & sleep 1000 & echo ready; wait");
    let marks = [mark];
    settled(&marks, 2);
    let found = members(&marks).unwrap();
    assert_eq!(found.len(), 3, "{found:?}");
    assert!(found.contains(&shell.id()));
    assert_eq!(end(&marks, &all, LONG).unwrap(), Ended { ended: 3, killed: 0 });
    assert_eq!(members(&marks).unwrap(), []);
    assert_eq!(end(&marks, &all, LONG).unwrap(), Ended::default());
}

#[test]
fn a_variable_counts_whole_and_as_it_was_at_the_start() {
    let mark = variable();
    // What it starts says so itself: until it is another program it has the variables of the one that started it.
    let script =
        "export PARTAGE_TEST_MARK=$PARTAGE_TEST_MARK-other; sh -c 'echo ready; exec sleep 1000' & wait";
    let shell = Shell::marked(&mark, script);
    let Mark::Variable { name, value } = mark.clone() else { panic!("{mark:?}") };
    for (name, value) in [(name.clone(), value[1..].to_string()), (name[1..].to_string(), value.clone())] {
        assert_eq!(members(&[Mark::Variable { name, value }]).unwrap(), []);
    }
    assert_eq!(members(std::slice::from_ref(&mark)).unwrap(), [shell.id()], "not what it started after");
    let other = Mark::Variable { name, value: value + "-other" };
    settled(std::slice::from_ref(&other), 1);
    assert_eq!(end(&[mark, other], &all, LONG).unwrap(), Ended { ended: 2, killed: 0 });
}

#[test]
fn what_does_not_listen_is_killed() {
    let mark = variable();
    let shell = Shell::marked(&mark, "trap '' TERM; sleep 1000 & echo ready; wait");
    let marks = [mark];
    settled(&marks, 1);
    let ended = end(&marks, &all, Duration::from_millis(300)).unwrap();
    assert_eq!(ended, Ended { ended: 0, killed: 2 });
    assert!(!shell.id().lives());
}

#[test]
fn what_is_stopped_hears_that_it_shall_end() {
    let mark = variable();
    let shell = Shell::marked(&mark, "echo ready; exec sleep 1000");
    let marks = [mark];
    settled(&marks, 1);
    shell.id().signal(Signal::STOP).unwrap();
    assert_eq!(end(&marks, &all, LONG).unwrap(), Ended { ended: 1, killed: 0 });
}

#[test]
fn what_starts_ever_new_processes_ends_too() {
    let mark = variable();
    let script = "trap '' TERM; echo ready; while :; do sleep 1000 & sleep 0.005; done";
    let _shell = Shell::marked(&mark, script);
    let marks = [mark];
    let ended = end(&marks, &all, Duration::from_millis(200)).unwrap();
    assert!(ended.killed >= 2, "{ended:?}");
    assert_eq!(members(&marks).unwrap(), []);
}

#[test]
fn what_may_not_be_ended_stays() {
    let mark = variable();
    let mine = Shell::marked(&mark, "echo ready; exec sleep 1000");
    let other = Shell::marked(&mark, "echo ready; exec sleep 1000");
    settled(std::slice::from_ref(&mark), 2);
    let spared = other.id();
    let ended = end(std::slice::from_ref(&mark), &|one| *one != spared, LONG).unwrap();
    assert_eq!(ended, Ended { ended: 1, killed: 0 });
    assert!(other.id().lives() && !mine.id().lives());
    assert_eq!(members(&[mark]).unwrap(), [spared]);
}

#[test]
fn a_mount_namespace_has_its_processes_and_no_others() {
    if !root() {
        return;
    }
    let script = "sleep 1000 & echo ready; wait";
    let shell = Shell::start(Command::new("unshare").args(["-m", "env", "-i", "/bin/sh", "-c", script]));
    let marks = [mount_namespace(shell.0.id()).unwrap()];
    assert_ne!(marks[0], mount_namespace(std::process::id()).unwrap());
    assert_eq!(members(&marks).unwrap().len(), 2);
    assert_eq!(end(&marks, &all, LONG).unwrap(), Ended { ended: 2, killed: 0 });
}

#[test]
fn who_sees_a_region_is_found_in_namespaces_of_its_own_too() {
    if !root() {
        return;
    }
    let folder = tempfile::tempdir().unwrap();
    for name in ["usage", "other", "at"] {
        fs::write(folder.path().join(name), "").unwrap();
    }
    let script = "mount --bind usage at && unshare -m sh -c 'sleep 1000 & echo ready; wait'; :";
    let inside = Shell::start(Command::new("unshare").args(["-m", "sh", "-c", script]).current_dir(&folder));
    let script = "mount --bind other at && echo ready; sleep 1000";
    let outside = Shell::start(Command::new("unshare").args(["-m", "sh", "-c", script]).current_dir(&folder));
    let marks = [region(&folder.path().join("usage"), &folder.path().join("at")).unwrap()];
    let found = members(&marks).unwrap();
    assert!(found.contains(&inside.id()) && !found.contains(&outside.id()), "{found:?}");
    assert_eq!(end(&marks, &all, LONG).unwrap(), Ended { ended: 3, killed: 0 });
    assert!(outside.id().lives());
    end(&[mount_namespace(outside.0.id()).unwrap()], &all, LONG).unwrap();
}

#[test]
fn a_cgroup_is_killed_with_all_below() {
    if !root() {
        return;
    }
    for hierarchy in [Hierarchy::Unified, Hierarchy::Devices] {
        let name = format!("partage-test-members-{}", std::process::id());
        let Some(cgroup) = Cgroup::make_in(hierarchy, &name, std::process::id()).unwrap() else {
            skip_or_fail(&format!("{hierarchy:?} is not mounted, or read-only"));
            continue;
        };
        let below = cgroup.folder().join("below");
        fs::create_dir(&below).unwrap();
        let script = "trap '' TERM; echo ready; exec sleep 1000";
        let [first, second] = [script; 2].map(|script| Shell::start(Command::new("sh").args(["-c", script])));
        cgroup.take(first.0.id()).unwrap();
        fs::write(below.join("cgroup.procs"), second.0.id().to_string()).unwrap();
        let marks = [Mark::Cgroup(cgroup.clone())];
        let found = members(&marks).unwrap();
        assert!(found.contains(&first.id()) && found.contains(&second.id()), "{found:?}");
        assert_eq!(end(&marks, &all, Duration::from_millis(100)).unwrap(), Ended { ended: 0, killed: 2 });
        assert!(!first.id().lives() && !second.id().lives());
        cgroup.remove().unwrap();
        assert!(!cgroup.exists());
        assert_eq!(members(&marks).unwrap(), []);
    }
}

#[test]
fn a_member_that_may_not_be_killed_saves_no_other_and_is_not_killed_with_the_cgroup() {
    if !root() {
        return;
    }
    let name = format!("partage-test-spared-{}", std::process::id());
    let Some(cgroup) = Cgroup::make(&name, std::process::id()).unwrap() else {
        return skip_or_fail(&"no cgroup can be made here");
    };
    let script = "trap '' TERM; echo ready; exec sleep 1000";
    let shells = [script; 2].map(|script| Shell::start(Command::new("sh").args(["-c", script])));
    for shell in &shells {
        cgroup.take(shell.0.id()).unwrap();
    }
    let spared = shells[0].id();
    let marks = [Mark::Cgroup(cgroup.clone())];
    let ended = end(&marks, &|one| *one != spared, Duration::from_millis(100)).unwrap();
    assert_eq!(ended, Ended { ended: 0, killed: 1 });
    assert!(spared.lives() && !shells[1].id().lives());
    assert!(cgroup.remove().unwrap_err().to_string().contains("has processes"));
    drop(shells);
    cgroup.remove().unwrap();
}

/// What a census of many shares finds is what a look for each of them finds.
fn counted(shares: &[Vec<Mark>]) -> Vec<usize> {
    let found = census(shares).unwrap();
    let one_by_one: Vec<Vec<Identity>> = shares.iter().map(|marks| members(marks).unwrap()).collect();
    assert_eq!(found, one_by_one);
    let census = Census::of(shares).unwrap();
    for (share, members) in found.iter().enumerate() {
        assert!(members.iter().all(|member| census.owner(member.pid) == Some(share)), "{share}: {members:?}");
    }
    assert_eq!(census.owner(std::process::id()), None);
    found.iter().map(Vec::len).collect()
}

#[test]
fn many_shares_are_counted_at_once_by_their_variables() {
    let mut shares: Vec<Vec<Mark>> = (0..60).map(|_| vec![variable()]).collect();
    // One that has nobody, and one that has no mark yet.
    shares[7].clear();
    let one = Shell::marked(&shares[3][0], "echo ready; exec sleep 1000");
    let many = Shell::marked(&shares[50][0], "sleep 1000 & sleep 1000 & echo ready; wait");
    settled(&shares[3], 1);
    settled(&shares[50], 2);
    let counts = counted(&shares);
    let those: Vec<(usize, usize)> = counts.into_iter().enumerate().filter(|(_, count)| *count > 0).collect();
    assert_eq!(those, [(3, 1), (50, 3)]);
    assert!(one.id().lives() && many.id().lives());
    for marks in [&shares[3], &shares[50]] {
        end(marks, &all, LONG).unwrap();
    }
    assert!(counted(&shares).iter().all(|count| *count == 0));
}

#[test]
fn many_shares_are_counted_at_once_by_all_kinds_of_marks() {
    if !root() {
        return;
    }
    let folder = tempfile::tempdir().unwrap();
    for name in ["a", "b", "at"] {
        fs::write(folder.path().join(name), "").unwrap();
    }
    let bound = |file: &str| {
        let script = format!("mount --bind {file} at && unshare -m sh -c 'sleep 1000 & echo ready; wait'; :");
        Shell::start(Command::new("unshare").args(["-m", "sh", "-c", &script]).current_dir(&folder))
    };
    let sees = |file: &str| region(&folder.path().join(file), &folder.path().join("at")).unwrap();
    let [a, b] = ["a", "b"].map(bound);
    let apart = Shell::start(Command::new("unshare").args(["-m", "sh", "-c", "echo ready; exec sleep 1000"]));
    let named = variable();
    let _named = Shell::marked(&named, "echo ready; exec sleep 1000");
    settled(std::slice::from_ref(&named), 1);
    let mut shares =
        vec![vec![sees("a")], vec![sees("b")], vec![mount_namespace(apart.0.id()).unwrap()], vec![named]];
    let mut expected = vec![3, 3, 1, 1];
    let name = format!("partage-test-census-{}", std::process::id());
    let held = Shell::start(Command::new("sh").args(["-c", "echo ready; exec sleep 1000"]));
    match Cgroup::make(&name, std::process::id()).unwrap() {
        Some(cgroup) => {
            cgroup.take(held.0.id()).unwrap();
            shares.push(vec![Mark::Cgroup(cgroup)]);
            expected.push(1);
        }
        None => skip_or_fail(&"no cgroup can be made here"),
    }
    assert_eq!(counted(&shares), expected);
    for (shell, marks) in [a, b].into_iter().zip(&shares) {
        end(marks, &all, LONG).unwrap();
        drop(shell);
    }
    drop(held);
    if let Some([Mark::Cgroup(cgroup)]) = shares.get(4).map(Vec::as_slice) {
        cgroup.remove().unwrap();
    }
}

#[test]
fn marks_are_kept_in_a_file() {
    let marks = [variable(), Mark::MountNamespace { device: 4, inode: 4_026_531_841 }];
    let text = serde_json::to_string(&marks).unwrap();
    assert_eq!(serde_json::from_str::<Vec<Mark>>(&text).unwrap(), marks);
}
