//! User errors, and failures of the system around the commands.

use super::support::*;
use std::fs;
use std::net::TcpListener;
use std::path::Path;
use std::process::Command;

#[test]
fn invalid_commands_are_refused_with_the_reason() {
    let state_dir = TestStateDir::new();
    let plain = state_dir.path().join("plain");
    fs::write(&plain, "#!/bin/sh\n").unwrap();
    let plain = plain.to_str().unwrap();
    for (arguments, code, expected) in [
        (&["run"][..], 2, "<COMMAND>"),
        (&["run", "--memory", "1Gi", "--"], 2, "<COMMAND>"),
        (&["run", "--memory", "5gb", "--", "true"], 2, "write 5Gi (5 x 2^30 bytes)"),
        (&["run", "--memory", "90Gi", "--", "true"], 125, "GPU 0 has 39.39 GiB in total, 90 GiB requested"),
        (&["run", "--memory", "-1Gi", "--", "true"], 2, "-1"),
        (&["run", "--cores", "130", "--", "true"], 2, "more than one GPU"),
        (&["run", "--memory", "1Gi", "--mode", "hard", "--", "true"], 125, "--mode hard requires --cores"),
        (&["run", "--gpus", "0", "--", "true"], 125, "request 1 to 16"),
        (&["run", "--gpus", "3", "--", "true"], 125, "the share requests 3 GPUs, 2 fit: "),
        (&["run", "--model", "H100", "--", "true"], 125, "GPU 0 is not of a requested model; "),
        (&["run", "--whole", "--memory", "3Gi", "--", "true"], 125, "--whole requests all memory and cores"),
        (&["run", "--name", "a/b", "--", "true"], 125, "invalid name"),
        (&["run", "--name", "..", "--", "true"], 125, "invalid name"),
        (&["run", "--name", "", "--", "true"], 125, "invalid name"),
        (&["run", "/tmp"], 126, "/tmp: "),
        (&["run", plain], 126, "not executable"),
        (&["run", "no-such-command"], 127, "no-such-command: command not found"),
        (&["run", "/no/such/command"], 127, "No such file"),
        (&["inspect"], 2, "<NAME>"),
        (&["inspect", "x"], 1, "share x not found"),
        (&["pss"], 2, "ps"),
        (&["top", "--interval", "0"], 2, "0"),
    ] {
        let (was, message) = state_dir.run_err(arguments);
        assert!(
            was == code && message.starts_with("error: ") && message.contains(expected),
            "{arguments:?}: {was} {message}"
        );
        // There are no pods and no containers in workstation mode.
        assert!(!message.contains("pod") && !message.contains("container"), "{arguments:?}: {message}");
    }
    state_dir.wait_until_clean();
    assert_eq!(state_dir.shares().len(), 0);
}

/// The share existed already, and is released.
#[test]
fn share_is_released_when_exec_fails() {
    use std::os::unix::fs::PermissionsExt;
    let state_dir = TestStateDir::new();
    let script = state_dir.path().join("script");
    fs::write(&script, "#!/no/such/interpreter\n").unwrap();
    fs::set_permissions(&script, fs::Permissions::from_mode(0o755)).unwrap();
    let (code, message) =
        state_dir.run_err(&["run", "-q", "--memory", "1Gi", "--", script.to_str().unwrap()]);
    assert!(
        code == 127 && message.starts_with(&format!("error: {}: ", script.display())),
        "{code} {message}"
    );
    state_dir.wait_until_clean();
    eventually("the share is released", || state_dir.shares().is_empty().then_some(()));
}

#[test]
fn taken_names_and_memory_are_refused() {
    let state_dir = TestStateDir::new();
    let _up = state_dir.start_up("driver: simulated\nmetrics: off\nsimulated:\n  gpus: 1\n", &[]);
    let _one = state_dir.start_share("one", &["--memory", "30Gi"], &["sleep", "1000"]);
    let (code, message) = state_dir.run_err(&["run", "--memory", "1Gi", "--name", "one", "--", "true"]);
    let user = state_dir.find_share("one").unwrap()["user"].as_str().unwrap().to_string();
    let taken = format!("error: share one already exists, of user {user}: choose another name with --name\n");
    assert_eq!((code, message), (125, taken));
    let (code, message) = state_dir.run_err(&["run", "--memory", "16Gi", "--", "true"]);
    assert!(code == 125 && message.contains("9.39 GiB") && message.contains("16 GiB requested"), "{message}");
    let (code, message) = state_dir.run_err(&["run", "--whole", "--", "true"]);
    assert!(code == 125 && message.starts_with("error: "), "{message}");
    // Memory that is free is granted.
    state_dir.run_ok(&["run", "-q", "--memory", "9Gi", "--", "true"]);
}

#[test]
fn nested_share_is_refused() {
    let state_dir = TestStateDir::new();
    let inner = format!("{} run --memory 1Gi -- true", partage_e2e::partage());
    let outer = ["run", "-q", "--memory", "1Gi", "--name", "outer", "--", "sh", "-c"];
    let (code, message) = state_dir.run_err(&[&outer[..], &[inner.as_str()]].concat());
    assert_eq!(code, 125);
    assert!(
        message.starts_with("error: this process is already in share outer, and shares do not nest"),
        "{message}"
    );
    let cleared = format!("env -i PARTAGE_STATE_DIR={} {inner}", state_dir.path().display());
    let (code, message) = state_dir.run_err(&[&outer[..], &[cleared.as_str()]].concat());
    assert!(code == 125 && message.contains("shares do not nest"), "{message}");
    // `ps` works inside a share.
    let ps = format!("{} ps -o json", partage_e2e::partage());
    let seen = state_dir.run_json(&[&outer[..], &[ps.as_str()]].concat());
    assert_eq!(seen["shares"][0]["name"], "outer");
    state_dir.wait_until_clean();
}

#[test]
fn killed_daemon_is_replaced() {
    let state_dir = TestStateDir::new();
    let mut running = state_dir.start_sleeper("lasting");
    let first = state_dir.daemon_pid().unwrap();
    let standby = eventually("a standby runs", || state_dir.standby_pid());
    assert_ne!(first, standby);
    signal(first, libc::SIGKILL);
    // At once, as by a user who did not notice it.
    let share = state_dir.find_share("lasting").unwrap();
    assert_eq!((&share["stage"], &share["pid"]), (&"running".into(), &running.pid().into()));
    // Either the standby, or the process that the command started: the first to get the lock becomes the daemon.
    let second = eventually("another daemon runs", || state_dir.daemon_pid().filter(|pid| *pid != first));
    eventually("a standby runs again", || state_dir.standby_pid().filter(|pid| *pid != second));

    // All at once: no daemon runs until the next command.
    eventually("no daemon runs", || {
        for pid in [state_dir.standby_pid(), state_dir.daemon_pid()].into_iter().flatten() {
            signal(pid, libc::SIGKILL);
        }
        state_dir.daemon_pid().is_none().then_some(())
    });
    assert!(running.is_running());
    assert_eq!(state_dir.find_share("lasting").unwrap()["gpuShares"][0]["memoryBytes"], 4 * GIB);
    state_dir.run_ok(&["resize", "lasting", "--memory", "5Gi"]);
    state_dir.run_ok(&["run", "-q", "--memory", "1Gi", "--", "true"]);
    state_dir.run_ok(&["stop", "lasting"]);
    running.wait_for_exit();
    state_dir.wait_until_clean();

    // A share whose command ends while no daemon runs is released by the next one.
    let mut alone = state_dir.start_sleeper("alone");
    let (daemon, standby) =
        (state_dir.daemon_pid().unwrap(), eventually("a standby runs", || state_dir.standby_pid()));
    signal(standby, libc::SIGKILL);
    signal(daemon, libc::SIGKILL);
    alone.signal(libc::SIGKILL);
    alone.wait_for_exit();
    assert_eq!(state_dir.shares().len(), 0);
    state_dir.wait_until_clean();
}

#[test]
fn second_up_and_taken_port_are_refused() {
    let state_dir = TestStateDir::new();
    let mut up = state_dir.start_up("driver: simulated\nmetrics: off\n", &[]);
    let (code, message) = state_dir.run_err(&["up", "--plain", "--metrics", "off"]);
    let expected = format!(
        "error: partage up is already running here, as process {}: watch it with partage top, or end it first\n",
        up.pid()
    );
    assert_eq!((code, message), (1, expected));
    assert!(up.is_running());
    up.signal(libc::SIGINT);
    assert!(up.wait_for_exit().success());

    let taken = TcpListener::bind("127.0.0.1:0").unwrap();
    let address = taken.local_addr().unwrap().to_string();
    let (code, message) = state_dir.run_err(&["up", "--plain", "--metrics", &address]);
    assert!(code == 1 && message.starts_with("error: ") && message.contains(&address), "{message}");
    let (code, message) = state_dir.run_err(&["up", "--metrics", "0.0.0.0:9464"]);
    assert!(code == 1 && message.contains("can be reached from other machines"), "{message}");
    assert_eq!(state_dir.daemon_pid(), None);
}

#[test]
fn invalid_settings_are_refused() {
    let state_dir = TestStateDir::new();
    for (text, expected) in [
        ("drivr: simulated\n", "drivr"),
        ("driver: amd\n", "amd"),
        ("driver: [\n", "settings.yaml"),
        ("metrics: 127.0.0.1\n", "127.0.0.1"),
        ("metrics: 0.0.0.0:9464\n", "other machines"),
        ("default:\n  memory: 5gb\n", "5gb"),
        ("default:\n  cores: 200\n", "200"),
        ("users:\n  - applyTo: no-such-user\n    shares: 1\n", "user no-such-user not found"),
        ("users:\n  - applyTo: '*'\n    shares: 0\n", "shares: 0"),
        ("users:\n  - shares: 1\n", "applyTo"),
        ("reservations:\n  - applyTo: '*'\n    gpu: 0\n", "reserves nothing"),
    ] {
        let file = state_dir.write_settings(text);
        let file = file.to_str().unwrap();
        for arguments in [&["up", "--check", "--settings", file][..], &["up", "--plain", "--settings", file]]
        {
            let (code, message) = state_dir.run_err(arguments);
            assert!(
                code == 1 && message.starts_with("error: ") && message.contains(expected),
                "{text:?}: {code} {message}"
            );
            assert!(message.contains(file), "{message}");
        }
    }
    assert!(!state_dir.path().join("daemon.sock").exists());
    // Errors that depend on the machine are reported at the start.
    let simulated = "driver: simulated\nmetrics: off\n";
    for (more, expected) in [
        ("reservations:\n  - applyTo: '*'\n    gpu: 7\n    memory: 1Gi\n", "must select exactly one GPU"),
        ("reservations:\n  - applyTo: '*'\n    gpu: 1\n    memory: 90Gi\n", "more than its 39.39 GiB"),
        ("simulated:\n  model: RTX-9999\n", "RTX-9999"),
        ("simulated:\n  gpus: 0\n", "simulated"),
    ] {
        let file = state_dir.write_settings(&format!("{simulated}{more}"));
        let (code, message) = state_dir.run_err(&["up", "--plain", "--settings", file.to_str().unwrap()]);
        assert!(
            code == 1 && message.starts_with("error: ") && message.contains(expected),
            "{more:?}: {code} {message}"
        );
    }
    let file = state_dir.write_settings("driver: simulated\n");
    let file = file.to_str().unwrap();
    assert_eq!(
        state_dir.run_ok(&["up", "--check", "--settings", file]),
        format!("the settings are valid ({file})\n")
    );
}

#[test]
fn invalid_state_dirs_are_refused() {
    let state_dir = TestStateDir::new();
    let long = state_dir.path().join("x".repeat(120));
    let file = state_dir.path().join("file");
    fs::write(&file, "").unwrap();
    let below = file.join("home");
    let mut wrong = vec![
        (long.to_str().unwrap(), "use a shorter path"),
        ("/tmp/a:b", "with :, ;"),
        (below.to_str().unwrap(), "cannot create the directory"),
        (file.to_str().unwrap(), "not a directory"),
    ];
    let others = state_dir.path().join("others");
    fs::create_dir(&others).unwrap();
    if is_root() {
        std::os::unix::fs::chown(&others, Some(61001), Some(61001)).unwrap();
        wrong.push((others.to_str().unwrap(), "belongs to another user"));
    }
    for (folder, expected) in wrong {
        let (code, message) = state_dir.run_err(&["run", "--state-dir", folder, "--", "true"]);
        assert!(
            code == 125 && message.starts_with("error: ") && message.contains(expected),
            "{folder}: {code} {message}"
        );
        let (code, message) = state_dir.run_err(&["ps", "--state-dir", folder]);
        assert!(code == 2 && message.contains(expected), "{folder}: {code} {message}");
    }
}

#[test]
fn state_dirs_are_isolated_from_each_other() {
    let state_dirs = [TestStateDir::new(), TestStateDir::new()];
    let shares = state_dirs.each_ref().map(|state_dir| state_dir.start_sleeper("same"));
    for (state_dir, mut running) in state_dirs.iter().zip(shares) {
        let share = state_dir.find_share("same").unwrap();
        assert_eq!((&share["pid"], &share["members"]), (&running.pid().into(), &1.into()));
        assert_eq!(share["cgroup"] == true, state_dir.cgroups().len() == 1, "{share}");
        state_dir.run_ok(&["stop", "same"]);
        running.wait_for_exit();
        state_dir.wait_until_clean();
    }
}

/// A file system of a few pages, unmounted when dropped.
struct TinyFilesystem<'a>(&'a Path);

impl<'a> TinyFilesystem<'a> {
    fn mount(at: &'a Path, size: &str) -> TinyFilesystem<'a> {
        let options = format!("size={size},mode=755");
        let mut mount = Command::new("mount");
        mount.args(["-t", "tmpfs", "-o", &options, "partage-test"]).arg(at);
        assert!(mount.status().unwrap().success());
        TinyFilesystem(at)
    }
}

impl Drop for TinyFilesystem<'_> {
    fn drop(&mut self) {
        // With `-l` it is unmounted after its last file is closed.
        let _ = Command::new("umount").arg("-l").arg(self.0).status();
    }
}

#[test]
fn full_disk_is_reported_and_recovered_from() {
    if !is_root() {
        return skip_or_fail(&"mounting a small file system needs root");
    }
    let folder = TestStateDir::new();
    // Too small for anything.
    let small = folder.path().join("s");
    fs::create_dir(&small).unwrap();
    {
        let _tiny = TinyFilesystem::mount(&small, "64k");
        let state_dir = TestStateDir::at(small.join("h"));
        let (code, message) = state_dir.run_err(&["run", "--memory", "1Gi", "--", "true"]);
        assert!(
            code == 125 && message.starts_with("error: ") && message.contains("No space left"),
            "{message}"
        );
        assert_eq!(state_dir.leftovers(), Vec::<String>::new());
    }
    // The file system becomes full later.
    let large = folder.path().join("l");
    fs::create_dir(&large).unwrap();
    let _tiny = TinyFilesystem::mount(&large, "64m");
    let state_dir = TestStateDir::at(large.join("h"));
    let mut running = state_dir.start_sleeper("before");
    let filler = large.join("filler");
    let _ = fs::write(&filler, vec![0u8; 64 << 20]);
    let (code, message) = state_dir.run_err(&["run", "--memory", "1Gi", "--name", "after", "--", "true"]);
    assert!(code == 125 && message.starts_with("error: ") && message.contains("No space left"), "{message}");
    let names: Vec<_> = state_dir.shares().iter().map(|share| share["name"].clone()).collect();
    assert_eq!(names, ["before"]);
    // A change that cannot be recorded is not made either.
    let (code, message) = state_dir.run_err(&["resize", "before", "--memory", "6Gi"]);
    assert!(code == 2 && message.contains("No space left"), "{code} {message}");
    assert_eq!(state_dir.find_share("before").unwrap()["gpuShares"][0]["memoryBytes"], 4 * GIB);
    assert!(running.is_running());
    // A daemon that is killed now is still replaced.
    signal(state_dir.daemon_pid().unwrap(), libc::SIGKILL);
    assert_eq!(state_dir.find_share("before").unwrap()["stage"], "running");
    fs::remove_file(&filler).unwrap();
    state_dir.run_ok(&["run", "-q", "--memory", "1Gi", "--name", "after", "--", "true"]);
    state_dir.run_ok(&["resize", "before", "--memory", "6Gi"]);
    state_dir.run_ok(&["stop", "before"]);
    running.wait_for_exit();
    state_dir.wait_until_clean();
}
