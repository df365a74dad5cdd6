//! Tests a process that confines itself to a share and then executes a shell: what it sees, and what it cannot do.
//!
//! The test starts itself again as that process, as root and as the user `nobody`.
#![allow(clippy::unwrap_used, clippy::expect_used, unsafe_code)]

use partage_host::confine::{Confinement, ConfinementError, ConfinementPlan, enter};
use partage_testkit::skip_or_fail;
use rustix::thread::CapabilitySet;
use std::fs::{self, Permissions};
use std::os::unix::fs::{PermissionsExt, chown};
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::{Command, Output};
use tempfile::TempDir;

/// The variables that configure the confined process.
const FOLDER: &str = "PARTAGE_HOST_TEST_FOLDER";
const SCRIPT: &str = "PARTAGE_HOST_TEST_SCRIPT";
const NOBODY: u32 = 65534;

/// The files of a machine in a temporary directory: a driver, stand-ins, a region and files to cover.
struct Machine {
    folder: TempDir,
}

impl Machine {
    fn new() -> Self {
        let folder = tempfile::tempdir().unwrap();
        let at = |name: &str| folder.path().join(name);
        for name in
            ["lib", "real", "ours", "region", "region-at", "dev", "share-dev", "share-dev/sub", "dev/sub"]
        {
            fs::create_dir_all(at(name)).unwrap();
        }
        let files = [
            ("lib/libcuda.so.575", "driver cuda"),
            ("lib/libnvidia-ml.so.575", "driver nvml"),
            ("real/cuda", ""),
            ("real/nvml", ""),
            ("ours/libcuda.so.1", "stand-in cuda"),
            ("ours/libnvidia-ml.so.1", "stand-in nvml"),
            ("region/limits", "limits"),
            ("region/usage", "usage"),
            ("cache", "system cache"),
            ("our-cache", "our cache"),
            ("dev/nvidia7", "another's gpu"),
            ("share-dev/nvidia0", "our gpu"),
        ];
        for (name, text) in files {
            fs::write(at(name), text).unwrap();
        }
        // The user `nobody` must be able to reach it. Another process copies it: a program that is open for writing,
        // even in a forked child of another test before its `execve`, cannot be executed.
        let mut copy = Command::new("install");
        copy.args(["-m", "755"]).arg(std::env::current_exe().unwrap()).arg(at("program"));
        assert!(copy.status().unwrap().success());
        fs::set_permissions(at("region/usage"), Permissions::from_mode(0o666)).unwrap();
        fs::set_permissions(folder.path(), Permissions::from_mode(0o755)).unwrap();
        Self { folder }
    }

    /// Returns a machine whose files belong to a user, as if the daemon ran as that user.
    fn all_of(user: u32) -> Self {
        let machine = Self::new();
        for name in ["region", "region/limits", "region/usage", "ours", "lib", "lib/libcuda.so.575"] {
            chown(machine.folder.path().join(name), Some(user), Some(user)).unwrap();
        }
        machine
    }

    /// Returns the command of a process that confines itself and then runs a script.
    fn confined(&self, script: &str) -> Command {
        let mut command = Command::new(self.folder.path().join("program"));
        command
            .args(["--exact", "confined_process", "--ignored", "--nocapture", "--test-threads=1"])
            .env(FOLDER, self.folder.path())
            .env(SCRIPT, script)
            .current_dir(self.folder.path());
        command
    }

    fn unprivileged(&self, script: &str) -> Command {
        let mut command = self.confined(script);
        command.uid(NOBODY).gid(NOBODY);
        command
    }
}

fn plan(folder: &Path) -> ConfinementPlan {
    let at = |name: &str| folder.join(name);
    ConfinementPlan {
        region: at("region"),
        region_at: at("region-at"),
        stand_ins: at("ours"),
        driver: [at("lib/libcuda.so.575"), at("lib/libnvidia-ml.so.575")],
        driver_at: [at("real/cuda"), at("real/nvml")],
        covers: vec![(at("cache"), at("our-cache")), (at("dev"), at("share-dev"))],
    }
}

/// Returns the kind of confinement and the output of the shell.
fn confined_output(output: &Output) -> (String, String) {
    let all = String::from_utf8_lossy(&output.stdout);
    let (_, rest) = all.split_once("@confined: ").unwrap_or_else(|| panic!("not confined: {output:?}"));
    let (confinement, message) = rest.split_once('\n').unwrap();
    assert!(output.status.success(), "{output:?}");
    // The test runner prints last.
    let message = message.rsplit_once("ok\n\ntest result:").map_or(message, |(message, _)| message);
    (confinement.to_string(), message.to_string())
}

#[test]
#[ignore = "it is the process that the other tests start"]
fn confined_process() {
    let mut plan = plan(&PathBuf::from(std::env::var_os(FOLDER).unwrap()));
    if std::env::var_os("WITHOUT_REGION").is_some() {
        plan.region.set_file_name("no-region");
    }
    if std::env::var_os("UPDATED").is_some() {
        plan.driver[1].set_file_name("libnvidia-ml.so.570");
    }
    let without_admin = std::env::var_os("WITHOUT_ADMIN").is_some();
    let mut shell = Command::new("/bin/sh");
    shell.args(["-c", &std::env::var(SCRIPT).unwrap_or_default()]);
    let bind = move || {
        if without_admin {
            let mut sets = rustix::thread::capabilities(None)?;
            sets.effective.remove(CapabilitySet::SYS_ADMIN);
            sets.permitted.remove(CapabilitySet::SYS_ADMIN);
            rustix::thread::set_capabilities(None, sets)?;
        }
        let entered = enter(&plan);
        let line = match &entered {
            Ok(confinement) => format!("@confined: {confinement}\n"),
            Err(error) => format!("@unbound: unchanged {}: {error}\n", error.is_unchanged()),
        };
        rustix::io::write(std::io::stdout(), line.as_bytes())?;
        entered.map(|_| ()).map_err(std::io::Error::other)
    };
    // SAFETY: the closure runs in a forked child of a program with threads. It allocates, which the C library supports
    // there.
    let shell = unsafe { shell.pre_exec(bind) }.status();
    assert!(shell.is_ok_and(|status| status.success()));
}

fn root() -> bool {
    let root = rustix::process::geteuid().is_root();
    if !root {
        skip_or_fail(&"it starts processes of root and of the user nobody; run it as root");
    }
    root
}

/// A script that prints everything that a process of the share should see, and attempts what it should not be able to
/// do.
const SEE_AND_ATTEMPT: &str = r#"
    cat lib/libcuda.so.575; echo; cat lib/libnvidia-ml.so.575; echo
    cat real/cuda; echo; cat real/nvml; echo
    cat region-at/limits; echo; cat cache; echo; ls dev; pwd
    (echo x > region-at/limits) 2>/dev/null && echo 'limits were written'
    (rm -f region-at/limits) 2>/dev/null && echo 'limits were removed'
    (mv region-at/usage region-at/other) 2>/dev/null && echo 'usage was moved'
    (echo x > lib/libcuda.so.575) 2>/dev/null && echo 'the stand-in was written'
    (echo x > dev/x) 2>/dev/null && echo 'a cover was written'
    echo 'much used' > region-at/usage
    :
"#;

fn seen(machine: &Machine) -> String {
    let folder = machine.folder.path().display();
    format!(
        "stand-in cuda\nstand-in nvml\ndriver cuda\ndriver nvml\nlimits\nour cache\nnvidia0\nsub\n{folder}\n"
    )
}

fn nothing_has_changed_outside(machine: &Machine) {
    let read = |name: &str| fs::read_to_string(machine.folder.path().join(name)).unwrap();
    assert_eq!(read("lib/libcuda.so.575"), "driver cuda");
    assert_eq!(read("real/cuda"), "");
    assert_eq!(read("region/limits"), "limits");
    assert_eq!(read("region/usage"), "much used\n");
    assert_eq!(fs::read_dir(machine.folder.path().join("region-at")).unwrap().count(), 0);
    let mounts = fs::read_to_string("/proc/self/mountinfo").unwrap();
    assert!(!mounts.contains(machine.folder.path().to_str().unwrap()), "{mounts}");
}

#[test]
fn root_is_confined_by_a_mount_namespace() {
    if !root() {
        return;
    }
    let machine = Machine::new();
    let output = machine.confined(SEE_AND_ATTEMPT).output().unwrap();
    assert_eq!(confined_output(&output), ("mount namespace".into(), seen(&machine)));
    nothing_has_changed_outside(&machine);
}

#[test]
fn later_mounts_outside_propagate_into_the_share() {
    if !root() {
        return;
    }
    let machine = Machine::new();
    let at = machine.folder.path();
    let folder = at.join("shared");
    fs::create_dir(&folder).unwrap();
    // In a mount namespace of the test: a directory with shared propagation, as on most systems.
    let script = "
        mount -t tmpfs none shared && mount --make-shared shared && mkdir shared/inner || exit 1
        \"$PROGRAM\" --exact confined_process --ignored --nocapture --test-threads=1 &
        until [ -e confined ] || ! kill -0 $!; do sleep 0.02; done
        mount -t tmpfs none shared/inner && echo there > shared/inner/file; touch go; wait $!
    ";
    let inside = "touch confined; until [ -e go ]; do sleep 0.02; done; cat shared/inner/file";
    let output = Command::new("unshare")
        .args(["-m", "sh", "-c", script])
        .env("PROGRAM", at.join("program"))
        .env(FOLDER, at)
        .env(SCRIPT, inside)
        .current_dir(at)
        .output()
        .unwrap();
    assert_eq!(confined_output(&output), ("mount namespace".into(), "there\n".into()));
}

#[test]
fn unprivileged_user_is_confined_by_a_user_namespace() {
    if !root() {
        return;
    }
    for machine in [Machine::new(), Machine::all_of(NOBODY)] {
        let output = machine.unprivileged(&format!("{SEE_AND_ATTEMPT} id -u; id -g")).output().unwrap();
        let expected = seen(&machine) + "65534\n65534\n";
        assert_eq!(confined_output(&output), ("user namespace".into(), expected));
        nothing_has_changed_outside(&machine);
    }
}

#[test]
fn children_and_login_shells_stay_confined_without_environment() {
    if !root() {
        return;
    }
    let machine = Machine::new();
    let script = "env -i /bin/sh -c 'cat lib/libcuda.so.575'; echo; setsid sh -lc 'cat lib/libcuda.so.575'";
    for mut command in [machine.confined(script), machine.unprivileged(script)] {
        assert_eq!(confined_output(&command.output().unwrap()).1, "stand-in cuda\nstand-in cuda");
    }
    // Another user, as with `su`: only root can switch users.
    let script = "setpriv --reuid 65534 --regid 65534 --clear-groups cat lib/libcuda.so.575";
    assert_eq!(confined_output(&machine.confined(script).output().unwrap()).1, "stand-in cuda");
}

/// Attempts to reach the driver's file from inside the share.
const ATTEMPTS: &[&str] = &[
    "umount lib/libcuda.so.575",
    "umount -l lib/libcuda.so.575",
    "umount -l region-at/usage",
    "umount -l region-at",
    "umount -l dev",
    "mount -o remount,rw,bind region-at",
    "mount --bind lib real",
    "mount -t tmpfs none region-at",
    // In a user namespace of its own the process is root, but inherited mounts are locked.
    "unshare -Ur umount -l lib/libcuda.so.575",
    "unshare -Urm umount -l lib/libcuda.so.575",
    "unshare -Urm umount -l region-at",
    "unshare -Urm umount -l dev",
    "unshare -Urm mount --bind lib real",
    "unshare -Urm mount -o remount,rw,bind region-at",
    "nsenter -t $PPID -m true",
];

#[test]
fn unprivileged_user_cannot_undo_the_mounts() {
    if !root() {
        return;
    }
    let machine = Machine::all_of(NOBODY);
    for attempt in ATTEMPTS {
        let script = format!(
            "if {attempt} 2>/dev/null; then echo 'attempt succeeded'; fi; cat lib/libcuda.so.575; cat dev/*0"
        );
        let output = machine.unprivileged(&script).output().unwrap();
        assert_eq!(confined_output(&output).1, "stand-in cudaour gpu", "{attempt}");
    }
}

#[test]
fn capabilities_are_restored() {
    if !root() {
        return;
    }
    let machine = Machine::new();
    let script = "grep -E '^Cap(Prm|Eff|Inh|Amb|Bnd)' /proc/self/status";
    let sets = |output: &Output| -> Vec<u64> {
        let (_, message) = confined_output(output);
        message
            .lines()
            .map(|line| u64::from_str_radix(line.split_whitespace().nth(1).unwrap(), 16).unwrap())
            .collect()
    };
    let own = fs::read_to_string("/proc/self/status").unwrap();
    let own = own.lines().find_map(|line| line.strip_prefix("CapBnd:")).unwrap().trim();
    let bounding = u64::from_str_radix(own, 16).unwrap();
    let admin = 1 << 21;

    let [inherited, permitted, effective, bound, ambient] =
        sets(&machine.confined(script).output().unwrap())[..]
    else {
        panic!("five sets")
    };
    assert_eq!([inherited, permitted, effective, bound, ambient], [0, bounding, bounding, bounding, 0]);
    // The user `nobody` has none, and no file can give it CAP_SYS_ADMIN.
    assert_eq!(sets(&machine.unprivileged(script).output().unwrap()), [0, 0, 0, bounding & !admin, 0]);
    // Root without CAP_SYS_ADMIN, as in most containers, keeps the others and does not gain it.
    let output = machine.confined(script).env("WITHOUT_ADMIN", "1").output().unwrap();
    let rest = bounding & !admin;
    assert_eq!(confined_output(&output).0, "user namespace");
    assert_eq!(sets(&output), [0, rest, rest, rest, 0]);
    let attempt = "umount -l lib/libcuda.so.575 2>/dev/null; cat lib/libcuda.so.575";
    let output = machine.confined(attempt).env("WITHOUT_ADMIN", "1").output().unwrap();
    assert_eq!(confined_output(&output).1, "stand-in cuda");
}

#[test]
fn covered_working_directory_is_entered_again() {
    if !root() {
        return;
    }
    let machine = Machine::new();
    for (folder, sees) in [("dev", "nvidia0\nsub\n"), ("dev/sub", "")] {
        for mut command in [machine.confined("ls"), machine.unprivileged("ls")] {
            let output = command.current_dir(machine.folder.path().join(folder)).output().unwrap();
            assert_eq!(confined_output(&output).1, sees, "{folder}");
        }
    }
}

#[test]
fn mount_flags_are_kept_and_stand_ins_stay_executable() {
    if !root() {
        return;
    }
    let machine = Machine::new();
    let at = machine.folder.path();
    fs::write(at.join("ours/libcuda.so.1"), "#!/bin/sh\necho ran\n").unwrap();
    fs::set_permissions(at.join("ours/libcuda.so.1"), Permissions::from_mode(0o755)).unwrap();
    let run = |prepare: &str, user: &str| {
        let script = format!(
            "{prepare} && exec {user} \"$PROGRAM\" --exact confined_process --ignored --nocapture --test-threads=1"
        );
        Command::new("unshare")
            .args(["-m", "sh", "-c", &script])
            .env("PROGRAM", at.join("program"))
            .env(FOLDER, at)
            .env(SCRIPT, "lib/libcuda.so.575; grep region-at /proc/self/mountinfo | cut -d' ' -f6")
            .current_dir(at)
            .output()
            .unwrap()
    };
    let nobody = "setpriv --reuid 65534 --regid 65534 --clear-groups";
    let flags = "mount --bind region region && mount -o remount,bind,nosuid,nodev,noexec region";
    for user in ["", nobody] {
        let (_, message) = confined_output(&run(flags, user));
        let lines: Vec<&str> = message.lines().collect();
        assert_eq!(lines[0], "ran");
        assert!(lines[1].starts_with("ro,nosuid,nodev,noexec"), "{message}");
        assert!(lines[2].starts_with("rw,nosuid,nodev,noexec"), "{message}");
    }
    // Root can clear the flag for its own file; other users cannot, and get an error.
    let flags = "mount --bind ours ours && mount -o remount,bind,noexec ours";
    assert!(confined_output(&run(flags, "")).1.starts_with("ran\n"));
    let output = run(flags, nobody);
    let message = String::from_utf8_lossy(&output.stdout);
    assert!(message.contains("@unbound: unchanged false") && message.contains("noexec"), "{output:?}");
}

#[test]
fn nested_share_is_refused() {
    if !root() {
        return;
    }
    let machine = Machine::new();
    let script = "./program --exact confined_process --ignored --nocapture --test-threads=1 2>&1; :";
    for mut command in [machine.confined(script), machine.unprivileged(script)] {
        let (_, output) = confined_output(&command.output().unwrap());
        assert!(
            output.contains("@unbound: unchanged true") && output.contains("runs in a share"),
            "{output}"
        );
    }
}

#[test]
fn missing_user_namespaces_are_explained() {
    if !root() {
        return;
    }
    let machine = Machine::new();
    let at = machine.folder.path();
    // The sysctl applies to the namespace in which it is set, and to those below.
    let script = "echo 0 > /proc/sys/user/max_user_namespaces && exec ./program --exact confined_process --ignored \
                  --nocapture --test-threads=1";
    let output = Command::new("unshare")
        .args(["-Ur", "sh", "-c", script])
        .env(FOLDER, at)
        .env("WITHOUT_ADMIN", "1")
        .current_dir(at)
        .output()
        .unwrap();
    let message = String::from_utf8_lossy(&output.stdout);
    assert!(message.contains("@unbound: unchanged true"), "{output:?}");
    assert!(message.contains("user.max_user_namespaces is 0"), "{output:?}");
}

#[test]
fn restricted_user_namespaces_leave_the_process_unchanged() {
    if !root() {
        return;
    }
    let machine = Machine::new();
    // The kernel refuses user namespaces in a chroot.
    let script = "mount --rbind / lib && exec setpriv --bounding-set -sys_admin --inh-caps -sys_admin chroot lib \
                  \"$FOLDER/program\" --exact confined_process --ignored --nocapture --test-threads=1";
    let output = Command::new("unshare")
        .args(["-m", "sh", "-c", script])
        .env("FOLDER", machine.folder.path())
        .env(FOLDER, machine.folder.path())
        .current_dir(machine.folder.path())
        .output()
        .unwrap();
    let message = String::from_utf8_lossy(&output.stdout);
    assert!(message.contains("@unbound: unchanged true") && message.contains("chroot"), "{output:?}");
}

#[test]
fn missing_path_of_the_plan_leaves_the_process_unchanged() {
    if !root() {
        return;
    }
    let machine = Machine::new();
    let output = machine.confined("true").env("WITHOUT_REGION", "1").output().unwrap();
    let message = String::from_utf8_lossy(&output.stdout);
    assert!(message.contains("@unbound: unchanged true") && message.contains("no-region"), "{output:?}");
}

#[test]
fn removed_driver_is_reported_with_advice() {
    let machine = Machine::new();
    let output = machine.confined("true").env("UPDATED", "1").output().unwrap();
    let message = String::from_utf8_lossy(&output.stdout);
    assert!(
        message.contains("@unbound: unchanged true") && message.contains("libnvidia-ml.so.570"),
        "{output:?}"
    );
    assert!(message.contains("updated or removed") && message.contains("restart partage up"), "{output:?}");
}

#[test]
fn process_with_threads_is_refused_and_unchanged() {
    let machine = Machine::new();
    let namespace = || fs::read_link("/proc/thread-self/ns/user").unwrap();
    let before = namespace();
    let plan = plan(machine.folder.path());
    let error = std::thread::spawn(move || {
        let mut sets = rustix::thread::capabilities(None).unwrap();
        sets.effective.remove(CapabilitySet::SYS_ADMIN);
        rustix::thread::set_capabilities(None, sets).unwrap();
        (enter(&plan).unwrap_err(), fs::read_link("/proc/thread-self/ns/user").unwrap())
    });
    let (error, after) = error.join().unwrap();
    assert!(error.is_unchanged() && matches!(error, ConfinementError::Unsupported(_)), "{error}");
    assert_eq!(before, after);
}

#[test]
fn confinement_has_stable_serialized_names() {
    let written = serde_json::to_string(&[
        Confinement::MountNamespace,
        Confinement::UserNamespace,
        Confinement::LibraryPath,
    ]);
    assert_eq!(written.unwrap(), r#"["mountNamespace","userNamespace","libraryPath"]"#);
    assert_eq!(Confinement::LibraryPath.to_string(), "library path");
}
