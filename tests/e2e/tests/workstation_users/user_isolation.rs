//! Several users on one machine: the owners of shares, and the limits of users.

use crate::shared_machine::{ADA, BOB, EVE, SharedMachine, as_user, forbid_user_namespaces};
use crate::support::{BackgroundProcess, GIB, TestStateDir, eventually, is_root, skip_or_fail};
use serde_json::Value;
use std::fs::OpenOptions;
use std::io::{ErrorKind, Write};
use std::os::unix::fs::PermissionsExt;

/// Skips a test without root, because only root can act as another user.
fn skip_without_root() -> bool {
    if !is_root() {
        skip_or_fail(&"acting as several users needs root");
    }
    !is_root()
}

#[test]
fn share_can_be_changed_only_by_its_owner_or_root() {
    if skip_without_root() {
        return;
    }
    let (machine, mut up) = SharedMachine::managed_by_root("");
    let four = ["--memory", "4Gi", "--cores", "20"];
    let (mut ada, output) = machine.start_sleeper(ADA, "users-ada", &four);
    assert!(output.ends_with("; confined by a user namespace"), "{output}");
    up.wait_for_line(&format!("share granted share=users-ada grant=4 GiB and 20 % of GPU 0 user={ADA}"));
    let (mut bob, _) = machine.start_sleeper(BOB, "users-bob", &four);
    let (mut second, _) = machine.start_sleeper(BOB, "users-bob-2", &four);
    let (mut eve, _) = machine.start_sleeper(EVE, "users-eve", &four);
    // Every user sees all shares, for example to know whose memory to wait for.
    let report: Value = serde_json::from_str(&machine.run_ok(EVE, &["ps", "-o", "json"])).unwrap();
    let owners: Vec<(&str, u64)> = report["shares"].as_array().unwrap().iter().map(share_owner).collect();
    let bobs = u64::from(BOB);
    let expected =
        [("users-ada", ADA.into()), ("users-bob", bobs), ("users-bob-2", bobs), ("users-eve", EVE.into())];
    assert!(expected.iter().all(|one| owners.contains(one)) && owners.len() == 4, "{owners:?}");

    let not_yours = |name: &str, share_owner: u32| {
        format!(
            "error: {name} belongs to user {share_owner}: only this user and the administrator may change it\n"
        )
    };
    for arguments in [&["stop", "users-ada"][..], &["resize", "users-ada", "--memory", "1Gi"]] {
        assert_eq!(machine.run_err(BOB, arguments), (1, not_yours("users-ada", ADA)), "{arguments:?}");
    }
    assert_eq!(machine.state_dir.find_share("users-ada").unwrap()["gpuShares"][0]["memoryBytes"], 4 * GIB);
    let (code, taken) =
        machine.run_err(EVE, &["run", "--name", "users-ada", "--memory", "1Gi", "--", "true"]);
    assert!(code == 125 && taken.contains(&format!("already exists, of user {ADA}")), "{taken}");
    let (code, message) = machine.run_err(EVE, &["up", "--metrics", "off"]);
    assert!(code == 1 && message.contains("only the daemon's own user may take over from it"), "{message}");

    machine.run_ok(ADA, &["resize", "users-ada", "--memory", "6Gi"]);
    assert_eq!(machine.state_dir.find_share("users-ada").unwrap()["gpuShares"][0]["memoryBytes"], 6 * GIB);
    let stopped: Value =
        serde_json::from_str(&machine.run_ok(BOB, &["stop", "--all", "-o", "json"])).unwrap();
    assert_eq!(stopped["stopped"].as_array().unwrap().len(), 2, "{stopped}");
    assert!(
        !bob.wait_for_exit().success()
            && !second.wait_for_exit().success()
            && ada.is_running()
            && eve.is_running()
    );
    assert_eq!(machine.run_ok(BOB, &["stop", "--all"]), "you have no shares: nothing to stop\n");
    // The administrator may stop any share.
    machine.state_dir.run_ok(&["stop", "users-eve"]);
    assert!(!eve.wait_for_exit().success());
    machine.run_ok(ADA, &["stop", "users-ada"]);
    assert!(!ada.wait_for_exit().success());
    machine.state_dir.wait_until_clean();
}

fn share_owner(share: &Value) -> (&str, u64) {
    (share["name"].as_str().unwrap(), share["uid"].as_u64().unwrap())
}

#[test]
fn user_rules_and_reservations_are_enforced() {
    if skip_without_root() {
        return;
    }
    let settings = format!(
        "default: {{memory: 3Gi, cores: 10}}\n\
         users:\n\
         - {{applyTo: {ADA}, shares: 2, memory: 8Gi, cores: 50, whole: false}}\n\
         - {{applyTo: \"@{BOB}\", gpus: 1, only: [1]}}\n\
         reservations:\n\
         - {{applyTo: {ADA}, gpu: 1, memory: 30Gi}}\n"
    );
    let (machine, _up) = SharedMachine::managed_by_root(&settings);
    let run = |uid: u32, options: &[&str]| {
        let (code, message) = machine.run_err(uid, &[&["run"], options, &["--", "true"]].concat());
        assert_eq!(code, 125, "{message}");
        message
    };
    let expect =
        |message: String, what: &str| assert!(message.contains(what), "{what:?} is not in {message:?}");
    expect(run(EVE, &["--memory", "1Gi"]), "no rule under users");
    expect(run(ADA, &["--whole"]), "may not have a whole GPU: request a share");
    expect(
        run(ADA, &["--memory", "9Gi"]),
        "may have 8 GiB of GPU memory in total, has 0 B and requests 9 GiB",
    );
    expect(run(ADA, &["--memory", "2Gi", "--cores", "60"]), "may have 50 % of GPU time in total");
    // A share without a size gets the default of the settings.
    let (_first, output) = machine.start_sleeper(ADA, "rules-one", &[]);
    assert!(output.contains(": 3 GiB and 10 % of GPU "), "{output}");
    let message = run(ADA, &["--memory", "6Gi"]);
    assert!(
        message.contains("has 3 GiB and requests 6 GiB") && message.contains("stop another share"),
        "{message}"
    );
    let (code, message) = machine.run_err(ADA, &["resize", "rules-one", "--memory", "9Gi"]);
    assert!(code == 1 && message.contains("may have 8 GiB of GPU memory in total"), "{message}");
    let (_second, _) = machine.start_sleeper(ADA, "rules-two", &["--memory", "1Gi"]);
    expect(run(ADA, &["--memory", "1Gi"]), "may have 2 shares at a time and has rules-one, rules-two");

    expect(run(BOB, &["--gpus", "2", "--memory", "1Gi"]), "may have 1 GPUs per share, requested 2");
    // Ada's shares were spread over both GPUs: what she holds on GPU 1 counts toward her reservation there.
    let message = run(BOB, &["--memory", "12Gi"]);
    assert!(message.contains("of GPU 1 is reserved for 61001"), "{message}");
    let (_bob, output) = machine.start_sleeper(BOB, "rules-bob", &["--memory", "9Gi"]);
    assert!(output.contains("9 GiB of GPU 1"), "{output}");
    // The rules do not apply to the administrator, but reservations of others do.
    let (code, message) = machine.state_dir.run_err(&["run", "--whole", "--gpus", "2", "--", "true"]);
    assert_eq!(code, 125, "{message}");
    machine.state_dir.run_ok(&["run", "--memory", "20Gi", "--", "true"]);
}

#[test]
fn user_runs_a_daemon_in_their_own_state_dir() {
    if skip_without_root() {
        return;
    }
    let machine = SharedMachine::owned_by(ADA);
    let memory = ["run", "--name", "own-greedy", "--memory", "2Gi", "--"];
    let sample = machine.sample();
    let mut greedy = BackgroundProcess::start(
        machine.partage(ADA, &[&memory[..], &["env", "-i", &sample, "greedy"]].concat()),
    );
    let output = greedy.wait_for_line("partage: own-greedy: ");
    assert!(output.contains("2 GiB of GPU 0; confined by a user namespace"), "{output}");
    // It allocates 512 MiB at a time, and the context takes some.
    let refused = greedy.wait_for_line("refused at ");
    assert!(refused.contains("refused at 1.5 GiB") || refused.contains("refused at 1.0 GiB"), "{refused}");
    let report: Value = serde_json::from_str(&machine.run_ok(ADA, &["ps", "-o", "json"])).unwrap();
    let share = &report["shares"][0];
    assert_eq!((&share["uid"], &share["confinement"]), (&ADA.into(), &"user namespace".into()), "{share}");
    assert!(share["gpuShares"][0]["peakBytes"].as_u64().unwrap() <= 2 * GIB, "{share}");
    assert!(share["gpuShares"][0]["refusals"].as_u64().unwrap() >= 1, "{share}");
    // No other user may connect.
    let (code, message) = machine.run_err(BOB, &["ps"]);
    assert!(code == 2 && message.contains("ermission denied"), "{code} {message}");
    greedy.signal(libc::SIGTERM);
    assert!(greedy.wait_for_exit().success());
    machine.state_dir.wait_until_clean();
    assert_eq!(
        machine.run_ok(ADA, &["ps"]),
        "no shares; start one with: partage run --memory 4Gi -- COMMAND\n"
    );
}

#[test]
fn library_path_holds_limits_without_user_namespaces() {
    if skip_without_root() {
        return;
    }
    let machine = SharedMachine::owned_by(ADA);
    let sample = machine.sample();
    // One after the other: greedy leaves no memory for later programs.
    let script = format!("{sample} trainer --memory 256Mi & read go; {sample} greedy & wait");
    let arguments = ["run", "--name", "path", "--memory", "2Gi", "--", "sh", "-c", &script];
    let mut command = machine.partage(ADA, &arguments);
    forbid_user_namespaces(&mut command, ADA);
    let mut both = BackgroundProcess::start(command);
    let output = both.wait_for_line("partage: path: ");
    assert!(output.ends_with("2 GiB of GPU 0; confined by a library path"), "{output}");
    let why = both.wait_for_line("partage: ");
    assert!(why.contains("programs that clear their environment escape the share"), "{why}");
    assert!(why.contains("user.max_user_namespaces is 0"), "{why}");
    both.wait_for_line("the model takes");
    both.input.as_mut().unwrap().write_all(b"go\n").unwrap();
    // It allocates 512 MiB at a time, next to another program in the same share and two contexts.
    both.wait_for_line("refused at 0.5 GiB");
    let report: Value = serde_json::from_str(&machine.run_ok(ADA, &["ps", "-o", "json"])).unwrap();
    let share = &report["shares"][0];
    assert_eq!(share["confinement"], "library path", "{share}");
    assert!(share["gpuShares"][0]["peakBytes"].as_u64().unwrap() <= 2 * GIB, "{share}");
    let mut again = machine.partage(ADA, &["run", "--memory", "1Gi", "--", "true"]);
    forbid_user_namespaces(&mut again, ADA);
    assert!(again.status().unwrap().success());
    // The shell ends, and its children keep running: they keep the share.
    both.signal(libc::SIGKILL);
    assert!(!both.wait_for_exit().success());
    eventually("the share is lingering", || {
        let report: Value = serde_json::from_str(&machine.run_ok(ADA, &["ps", "-o", "json"])).unwrap();
        (report["shares"][0]["stage"] == "lingering").then_some(())
    });
    let stopped: Value = serde_json::from_str(&machine.run_ok(ADA, &["stop", "path", "-o", "json"])).unwrap();
    assert_eq!(stopped["stopped"][0]["ended"], 2, "{stopped}");
    machine.state_dir.wait_until_clean();
}

#[test]
fn requests_succeed_while_daemons_are_replaced() {
    if skip_without_root() {
        return;
    }
    let (machine, up) = SharedMachine::managed_by_root("");
    let (_ada, _) = machine.start_sleeper(ADA, "turn-ada", &["--memory", "1Gi"]);
    eventually("a standby runs", || machine.state_dir.standby_pid());
    up.signal(libc::SIGKILL);
    machine.run_ok(BOB, &["ps"]);
    for _ in 0..4 {
        let daemon = eventually("a daemon runs", || machine.state_dir.daemon_pid());
        eventually("a standby runs", || machine.state_dir.standby_pid());
        crate::support::signal(daemon, libc::SIGKILL);
        let run = ["run", "-q", "--memory", "1Gi", "--", "true"];
        machine.run_ok(BOB, &run);
    }
    assert!(machine.state_dir.find_share("turn-ada").is_some());
    // Without shares there is no standby, and a user cannot start a daemon here.
    machine.state_dir.run_ok(&["stop", "turn-ada"]);
    let daemon = eventually("a daemon runs", || machine.state_dir.daemon_pid());
    crate::support::signal(daemon, libc::SIGKILL);
    let message = eventually("no daemon runs", || {
        let output = machine.output(BOB, &["ps"]);
        (!output.status.success()).then(|| String::from_utf8(output.stderr).unwrap())
    });
    assert!(message.contains("belongs to another user, and no daemon is running there"), "{message}");
}

#[test]
fn region_of_another_user_is_not_writable() {
    if skip_without_root() {
        return;
    }
    let (machine, mut up) = SharedMachine::managed_by_root("");
    let sample = machine.sample();
    let greedy = |uid: u32, name: &str| {
        let arguments = ["run", "--name", name, "--memory", "2Gi", "--cores", "20", "--", &sample, "greedy"];
        let mut running = BackgroundProcess::start(machine.partage(uid, &arguments));
        running.wait_for_line("refused at 1.5 GiB");
        running
    };
    let mut shares = [greedy(ADA, "reach-ada"), greedy(0, "reach-root")];
    for name in ["reach-ada", "reach-root"] {
        let region = machine.state_dir.path().join("shares").join(name).join("region");
        for file in ["usage", "limits"] {
            let opened = as_user(BOB, || OpenOptions::new().write(true).open(region.join(file)));
            assert_eq!(opened.unwrap_err().kind(), ErrorKind::PermissionDenied, "{name}: {file}");
        }
        for folder in [region.clone(), region.join("..")] {
            let removed = as_user(BOB, || std::fs::remove_dir_all(&folder));
            assert!(removed.is_err() && region.join("usage").exists(), "{name}");
        }
    }
    // Users can truncate their own files. That ends their own programs, and nothing else.
    let own = machine.state_dir.path().join("shares/reach-ada/region/usage");
    as_user(ADA, || OpenOptions::new().write(true).truncate(true).open(&own)).unwrap();
    assert!(!shares[0].wait_for_exit().success());
    eventually("the share is released", || machine.state_dir.find_share("reach-ada").is_none().then_some(()));
    shares[1].wait_for_line("refused at 1.5 GiB");
    assert!(up.is_running());
    machine.state_dir.run_ok(&["stop", "reach-root"]);
    machine.state_dir.wait_until_clean();
}

#[test]
fn very_long_command_line_is_truncated_in_views() {
    let state_dir = TestStateDir::new();
    let word = "x".repeat(100_000);
    let command = [&["sh", "-c", "echo $#; exec sleep 1000"][..], &[word.as_str(); 14]].concat();
    let mut long = state_dir.start_share("long", &["--memory", "1Gi"], &command);
    // The command itself gets all arguments.
    long.read_until(|line| line == "13");
    let table = state_dir.run_ok(&["ps"]);
    assert!(table.contains("x…") && table.len() < 4000, "{table}");
    state_dir.run_ok(&["inspect", "long"]);
    state_dir.run_ok(&["top", "--once", "--interval", "50ms"]);
    state_dir.run_ok(&["stop", "long"]);
    state_dir.wait_until_clean();
}

#[test]
fn shares_of_a_root_daemon_work_with_any_umask() {
    if skip_without_root() {
        return;
    }
    let (machine, _up) = SharedMachine::managed_by_root_with_umask("077", "");
    let sample = machine.sample();
    let arguments = ["run", "--name", "umask", "--memory", "2Gi", "--", &sample, "greedy"];
    let mut greedy = BackgroundProcess::start(machine.partage(ADA, &arguments));
    greedy.wait_for_line("refused at 1.5 GiB");
    greedy.signal(libc::SIGTERM);
    assert!(greedy.wait_for_exit().success());
    machine.state_dir.wait_until_clean();
}

#[test]
fn gpu_is_shared_by_one_daemon_at_a_time() {
    if skip_without_root() {
        return;
    }
    let (ada, bob) = (SharedMachine::owned_by(ADA), SharedMachine::owned_by(BOB));
    let machine = tempfile::Builder::new().prefix("p").tempdir_in("/tmp").unwrap();
    std::fs::set_permissions(machine.path(), std::fs::Permissions::from_mode(0o755)).unwrap();
    let node = machine.path().join("node");
    ada.state_dir.run_ok(&["sim", "env", "--gpus", "1", "--dir", node.to_str().unwrap()]);
    let run = |machine: &SharedMachine, uid, memory, command: &[&str]| {
        let arguments = [&["run", "--memory", memory, "--"], command].concat();
        let mut run = machine.partage(uid, &arguments);
        run.env("PARTAGE_SIM_DIR", &node);
        run
    };
    // A daemon without shares holds no GPU; it runs for a while.
    let none = run(&bob, BOB, "90Gi", &["true"]).output().unwrap();
    assert_eq!(none.status.code(), Some(125), "{none:?}");
    let mut first = BackgroundProcess::start(run(&ada, ADA, "4Gi", &["sleep", "1000"]));
    first.wait_for_line("partage: sleep-1: 4 GiB of GPU 0");
    let second = run(&bob, BOB, "4Gi", &["true"]).output().unwrap();
    let message = String::from_utf8(second.stderr).unwrap();
    assert!(
        second.status.code() == Some(125) && message.contains("another daemon on this machine"),
        "{message}"
    );
    first.signal(libc::SIGTERM);
    first.wait_for_exit();
    eventually("the other daemon shares the GPU", || {
        run(&bob, BOB, "4Gi", &["true"]).output().unwrap().status.success().then_some(())
    });
}

#[test]
fn socket_of_another_user_is_not_trusted() {
    if skip_without_root() {
        return;
    }
    let machine = SharedMachine::owned_by(EVE);
    let socket = machine.state_dir.path().join("daemon.sock");
    let _listens = as_user(EVE, || std::os::unix::net::UnixListener::bind(&socket).unwrap());
    std::fs::set_permissions(&socket, std::fs::Permissions::from_mode(0o777)).unwrap();
    let expected = format!("runs as user {EVE}");
    for arguments in [&["ps"][..], &["run", "--", "true"]] {
        let (_, message) = machine.run_err(BOB, arguments);
        assert!(message.contains(&expected), "{arguments:?}: {message}");
        let (_, message) = machine.state_dir.run_err(arguments);
        assert!(message.contains(&expected), "root, {arguments:?}: {message}");
    }
}
