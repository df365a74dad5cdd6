//! `partage stop`: signals, grace periods and permissions.

use super::support::*;
use std::os::unix::process::{CommandExt, ExitStatusExt};

#[test]
fn stop_sends_sigterm_then_kills_after_the_grace_period() {
    let state_dir = TestStateDir::new();
    let polite = "trap 'echo bye; exit 4' TERM; echo ready; while :; do sleep 0.05; done";
    let mut polite = state_dir.start_share("polite", &["--memory", "1Gi"], &["sh", "-c", polite]);
    polite.wait_for_line("ready");
    let output = state_dir.run_ok(&["stop", "polite"]);
    assert!(output.starts_with("polite: stopped, ") && !output.contains("killed"), "{output}");
    polite.wait_for_line("bye");
    assert_eq!(polite.wait_for_exit().code(), Some(4));

    // Its children ignore the signal too.
    let stubborn = "trap '' TERM; echo ready; sleep 1000 & sleep 1000";
    let mut stubborn = state_dir.start_share("stubborn", &["--memory", "1Gi"], &["sh", "-c", stubborn]);
    stubborn.wait_for_line("ready");
    eventually("its children are running", || {
        (state_dir.find_share("stubborn").unwrap()["members"] == 3).then_some(())
    });
    let output = state_dir.run_ok(&["stop", "stubborn", "--grace", "200ms"]);
    assert_eq!(output, "stubborn: stopped, 3 processes killed\n");
    assert_eq!(stubborn.wait_for_exit().signal(), Some(libc::SIGKILL));
    state_dir.wait_until_clean();
}

#[test]
fn stop_ends_detached_descendants() {
    let state_dir = TestStateDir::new();
    let script = "(setsid sh -c 'trap \"\" TERM; setsid sleep 1000 & sleep 1000' > /dev/null 2>&1 < /dev/null &) & wait";
    state_dir.run_ok(&["run", "-q", "--memory", "1Gi", "--name", "parent", "--", "sh", "-c", script]);
    let members = || state_dir.find_share("parent").unwrap()["members"].as_u64().unwrap();
    eventually("its descendants are running", || (members() == 3).then_some(()));
    assert_eq!(state_dir.find_share("parent").unwrap()["stage"], "lingering");
    state_dir.run_ok(&["stop", "parent", "--grace", "100ms"]);
    assert_eq!(state_dir.share_processes(), Vec::<u32>::new());
    assert_eq!(state_dir.shares().len(), 0);
    state_dir.wait_until_clean();
}

#[test]
fn stop_ends_a_suspended_job() {
    let state_dir = TestStateDir::new();
    let mut running = state_dir.start_sleeper("paused");
    running.signal(libc::SIGSTOP);
    state_dir.run_ok(&["stop", "paused"]);
    assert_eq!(running.wait_for_exit().signal(), Some(libc::SIGTERM));
    state_dir.wait_until_clean();
}

#[test]
fn unknown_names_are_refused_with_a_suggestion() {
    let state_dir = TestStateDir::new();
    assert_eq!(state_dir.run_err(&["stop", "x"]), (1, "error: share x not found: no shares exist\n".into()));
    let mut trainer = state_dir.start_sleeper("trainer");
    let (code, message) = state_dir.run_err(&["stop", "trianer"]);
    assert_eq!((code, message.as_str()), (1, "error: share trianer not found: did you mean trainer?\n"));
    let (code, message) = state_dir.run_err(&["stop", "trainer", "--grace", "soon"]);
    assert!(code == 2 && message.contains("soon"), "{message}");
    assert!(trainer.is_running());
    state_dir.run_ok(&["stop", "--all"]);
    assert_eq!(state_dir.run_ok(&["stop", "--all"]), "you have no shares: nothing to stop\n");
    state_dir.wait_until_clean();
}

#[test]
fn shares_of_other_users_cannot_be_stopped_or_resized() {
    if !is_root() {
        return skip_or_fail(&"becoming another user needs root");
    }
    let state_dir = TestStateDir::new();
    let program = state_dir.path().join("partage");
    install_program(partage_e2e::partage(), &program);
    let mut running = state_dir.start_sleeper("roots");
    for command in [&["stop", "roots"][..], &["resize", "roots", "--memory", "1Gi"]] {
        let mut other = std::process::Command::new(&program);
        other.args(command).env("PARTAGE_STATE_DIR", state_dir.path()).uid(61001).gid(61001);
        let output = other.output().unwrap();
        let message = String::from_utf8(output.stderr).unwrap();
        assert_eq!(output.status.code(), Some(1), "{message}");
        assert_eq!(
            message,
            "error: roots belongs to user root: only this user and the administrator may change it\n"
        );
    }
    let mut all = std::process::Command::new(&program);
    all.args(["stop", "--all"]).env("PARTAGE_STATE_DIR", state_dir.path()).uid(61001).gid(61001);
    assert_eq!(all.output().unwrap().stdout, b"you have no shares: nothing to stop\n");
    assert!(running.is_running());
    assert_eq!(state_dir.find_share("roots").unwrap()["gpuShares"][0]["memoryBytes"], 4 * GIB);
}
