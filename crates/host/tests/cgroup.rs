//! Tests cgroups of both versions, and device filters on real processes.
#![allow(clippy::unwrap_used, clippy::expect_used)]

use partage_host::cgroup::{Cgroup, CgroupError, Hierarchy};
use partage_testkit::skip_or_fail;
use std::fs;
use std::io::{BufRead, BufReader, Write};
use std::path::Path;
use std::process::{Child, ChildStdout, Command, Stdio};
use std::sync::atomic::{AtomicU32, Ordering::Relaxed};
use tempfile::TempDir;

const HIERARCHIES: [Hierarchy; 2] = [Hierarchy::Unified, Hierarchy::Devices];

/// A cgroup that is removed when the test ends.
struct TestCgroup(Cgroup);

impl TestCgroup {
    fn new(hierarchy: Hierarchy) -> Option<Self> {
        static COUNT: AtomicU32 = AtomicU32::new(0);
        let name = format!("partage-test-{}-{}", std::process::id(), COUNT.fetch_add(1, Relaxed));
        if !rustix::process::geteuid().is_root() {
            skip_or_fail(&"it creates cgroups and devices; run it as root");
            return None;
        }
        let made = Cgroup::create_in(hierarchy, &name, std::process::id()).unwrap();
        if made.is_none() {
            skip_or_fail(&format!("the hierarchy {hierarchy:?} is not mounted, or read-only"));
        }
        made.map(Self)
    }
}

impl Drop for TestCgroup {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.remove();
    }
}

/// A shell that runs one command per line.
struct ScriptedShell {
    child: Child,
    stdout: BufReader<ChildStdout>,
}

impl ScriptedShell {
    fn start() -> Self {
        let mut command = Command::new("sh");
        command.env("LC_ALL", "C").stdin(Stdio::piped()).stdout(Stdio::piped()).stderr(Stdio::null());
        let mut child = command.spawn().unwrap();
        let stdout = BufReader::new(child.stdout.take().unwrap());
        Self { child, stdout }
    }

    fn ask(&mut self, line: &str) -> String {
        writeln!(self.child.stdin.as_mut().unwrap(), "{line}").unwrap();
        let mut answer = String::new();
        self.stdout.read_line(&mut answer).unwrap();
        answer.trim().into()
    }

    /// Returns the result of opening a file: `open`, or the error message.
    fn open(&mut self, path: &Path) -> String {
        self.ask(&format!(
            "if m=$(sh -c ': < {0}' 2>&1); then echo open; else echo ${{m##*: }}; fi",
            path.display()
        ))
    }

    fn pid(&self) -> u32 {
        self.child.id()
    }
}

impl Drop for ScriptedShell {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

/// Creates nodes of devices that this machine does not have: opening one that is not denied gives another error.
fn nodes(numbers: &[(u32, u32)]) -> TempDir {
    let folder = tempfile::tempdir().unwrap();
    for (major, minor) in numbers {
        node(folder.path(), &format!("{major}-{minor}"), "c", *major, *minor);
    }
    folder
}

fn node(folder: &Path, name: &str, kind: &str, major: u32, minor: u32) {
    let made = Command::new("mknod")
        .arg(folder.join(name))
        .args([kind, &major.to_string(), &minor.to_string()])
        .status();
    assert!(made.unwrap().success());
}

fn closed(output: &str) -> bool {
    output == "Operation not permitted"
}

#[test]
fn devices_are_denied_inside_the_cgroup_only() {
    for hierarchy in HIERARCHIES {
        let Some(made) = TestCgroup::new(hierarchy) else { continue };
        let folder = nodes(&[(195, 0), (195, 7), (510, 7)]);
        let at = |name: &str| folder.path().join(name);
        let mut inside = ScriptedShell::start();
        let mut outside = ScriptedShell::start();
        made.0.add_process(inside.pid()).unwrap();
        let before = inside.open(&at("195-7"));
        assert!(!closed(&before), "{before}");

        made.0.deny_devices(&[(195, 7)]).unwrap();
        assert!(closed(&inside.open(&at("195-7"))), "{hierarchy:?}");
        assert_eq!(inside.open(&at("195-0")), before);
        assert_eq!(inside.open(&at("510-7")), before);
        assert_eq!(outside.open(&at("195-7")), before);
        assert_eq!(inside.open(Path::new("/dev/null")), "open");
        assert_eq!(inside.open(Path::new("/dev/zero")), "open");
        // Another node with the same numbers, and a block device with these numbers.
        node(folder.path(), "again", "c", 195, 7);
        node(folder.path(), "block", "b", 195, 7);
        assert!(closed(&inside.open(&at("again"))));
        assert!(!closed(&inside.open(&at("block"))));
        // A child of the shell, and a process that is added later.
        assert_eq!(
            inside.ask(&format!(
                "sh -c 'setsid sh -c \": < {}\"' && echo open || echo closed",
                at("195-7").display()
            )),
            "closed"
        );
        let mut later = ScriptedShell::start();
        made.0.add_process(later.pid()).unwrap();
        assert!(closed(&later.open(&at("195-7"))));

        // A second list denies more devices and allows none again.
        made.0.deny_devices(&[(195, 0)]).unwrap();
        made.0.deny_devices(&[]).unwrap();
        assert!(closed(&inside.open(&at("195-0"))) && closed(&inside.open(&at("195-7"))));
        // A process that leaves the cgroup has access again.
        let own = made.0.path().parent().unwrap().join("cgroup.procs");
        fs::write(own, later.pid().to_string()).unwrap();
        assert_eq!(later.open(&at("195-7")), before);
    }
}

#[test]
fn nested_cgroup_cannot_allow_denied_devices() {
    for hierarchy in HIERARCHIES {
        let Some(made) = TestCgroup::new(hierarchy) else { continue };
        let folder = nodes(&[(195, 7)]);
        made.0.deny_devices(&[(195, 7)]).unwrap();
        let mut shell = ScriptedShell::start();
        made.0.add_process(shell.pid()).unwrap();
        let below = Cgroup::create_in(hierarchy, "below", shell.pid()).unwrap().unwrap();
        assert_eq!(below.path(), made.0.path().join("below"));
        below.add_process(shell.pid()).unwrap();
        // It denies another device, and in cgroup v1 tries to allow everything.
        below.deny_devices(&[(510, 7)]).unwrap();
        for line in ["a", "c 195:7 rwm", "c *:* rwm"] {
            let _ = fs::write(below.path().join("devices.allow"), line);
        }
        assert!(closed(&shell.open(&folder.path().join("195-7"))), "{hierarchy:?}");
        assert_eq!(made.0.pids().unwrap(), [shell.pid()], "nested cgroups count");
    }
}

#[test]
fn many_devices_are_denied_at_once() {
    for hierarchy in HIERARCHIES {
        let Some(made) = TestCgroup::new(hierarchy) else { continue };
        let list: Vec<(u32, u32)> = (0..256).map(|minor| (195, minor)).collect();
        made.0.deny_devices(&list[1..]).unwrap();
        let folder = nodes(&[(195, 0), (195, 1), (195, 64), (195, 255)]);
        let mut shell = ScriptedShell::start();
        made.0.add_process(shell.pid()).unwrap();
        for minor in [1, 64, 255] {
            assert!(
                closed(&shell.open(&folder.path().join(format!("195-{minor}")))),
                "{hierarchy:?} {minor}"
            );
        }
        assert!(!closed(&shell.open(&folder.path().join("195-0"))));
    }
}

#[test]
fn leftover_cgroup_is_replaced_and_one_in_use_is_refused() {
    for hierarchy in HIERARCHIES {
        let Some(made) = TestCgroup::new(hierarchy) else { continue };
        let name = made.0.path().file_name().unwrap().to_str().unwrap();
        let folder = nodes(&[(195, 7)]);
        made.0.deny_devices(&[(195, 7)]).unwrap();
        fs::create_dir_all(made.0.path().join("deep/deeper")).unwrap();
        let again = Cgroup::create_in(hierarchy, name, std::process::id()).unwrap().unwrap();
        assert_eq!(again, made.0);
        assert!(!again.path().join("deep").exists());
        let mut shell = ScriptedShell::start();
        again.add_process(shell.pid()).unwrap();
        assert!(
            !closed(&shell.open(&folder.path().join("195-7"))),
            "no filter of the earlier cgroup is left"
        );

        let error = Cgroup::create_in(hierarchy, name, std::process::id()).unwrap_err();
        let CgroupError::InUse { pids, .. } = &error else { panic!("{error}") };
        assert_eq!(*pids, [shell.pid()]);
        assert!(error.to_string().contains("end them first"), "{error}");
    }
}

#[test]
fn deserialized_cgroup_is_usable() {
    for hierarchy in HIERARCHIES {
        let Some(made) = TestCgroup::new(hierarchy) else { continue };
        let text = serde_json::to_string(&made.0).unwrap();
        let again: Cgroup = serde_json::from_str(&text).unwrap();
        assert!(again.exists() && again.pids().unwrap().is_empty());
        let shell = ScriptedShell::start();
        made.0.add_process(shell.pid()).unwrap();
        assert_eq!(again.pids().unwrap(), [shell.pid()]);
        drop(shell);
        again.remove().unwrap();
        assert!(!made.0.exists());
        assert_eq!(again.pids().unwrap(), [] as [u32; 0]);
        again.remove().unwrap();
        assert!(again.add_process(std::process::id()).unwrap_err().to_string().contains("moving process"));
    }
}

/// Changes the user of this thread only: the system call applies to one thread.
fn become_nobody() {
    let nobody = rustix::process::Uid::from_raw(65534);
    rustix::thread::set_thread_res_uid(nobody, nobody, nobody).unwrap();
}

#[test]
fn unprivileged_user_cannot_create_a_cgroup() {
    if !rustix::process::geteuid().is_root() {
        return skip_or_fail(&"it changes to the user nobody; run it as root");
    }
    let made = std::thread::spawn(|| {
        become_nobody();
        Cgroup::create("partage-test-nobody", std::process::id())
    });
    assert_eq!(made.join().unwrap().unwrap(), None);
}

#[test]
fn unprivileged_user_cannot_deny_devices() {
    for hierarchy in HIERARCHIES {
        let Some(made) = TestCgroup::new(hierarchy) else { continue };
        let folder = made.0.clone();
        let closed = std::thread::spawn(move || {
            become_nobody();
            folder.deny_devices(&[(195, 7)])
        });
        let error = closed.join().unwrap().unwrap_err().to_string();
        assert!(error.contains("requires root"), "{error}");
    }
}
