//! Waiting for a share.

use crate::support::{BackgroundProcess, GIB, TerminalProgram, TestStateDir, eventually, signal};
use serde_json::Value;
use std::os::unix::process::ExitStatusExt;

const ONE_GPU: &str = "driver: simulated\nsimulated: {gpus: 1}\n";

fn start_waiting(state_dir: &TestStateDir, name: &str, memory: &str) -> BackgroundProcess {
    let arguments = ["run", "--wait", "--name", name, "--memory", memory, "--", "sleep", "1000"];
    BackgroundProcess::start(state_dir.partage(&arguments))
}

fn queued_names(state_dir: &TestStateDir) -> Vec<String> {
    let report = state_dir.run_json(&["ps", "-o", "json"]);
    let names = report["waiting"].as_array().unwrap().iter().map(|one| one["name"].as_str().unwrap().into());
    names.collect()
}

fn wait_until_running(state_dir: &TestStateDir, name: &str) -> Value {
    eventually(&format!("{name} is running"), || {
        state_dir.find_share(name).filter(|share| share["stage"] == "running")
    })
}

#[test]
fn queue_is_served_in_order() {
    let state_dir = TestStateDir::new();
    let _up = state_dir.start_up(ONE_GPU, &["--metrics", "off"]);
    let first = state_dir.start_share("wait-first", &["--memory", "30Gi"], &["sleep", "1000"]);
    let mut second = start_waiting(&state_dir, "wait-second", "20Gi");
    let output = second.wait_for_line("partage: queued, position 1 of 1: ");
    assert!(output.contains("9.39 GiB"), "{output}");
    let mut third = start_waiting(&state_dir, "wait-third", "25Gi");
    third.wait_for_line("partage: queued, position 2 of 2: ");
    second.wait_for_line("partage: queued, position 1 of 2: ");
    let mut fourth = start_waiting(&state_dir, "wait-fourth", "30Gi");
    fourth.wait_for_line("partage: queued, position 3 of 3: ");
    assert_eq!(queued_names(&state_dir), ["wait-second", "wait-third", "wait-fourth"]);
    let ps = state_dir.run_ok(&["ps"]);
    assert!(ps.contains("wait-third") && ps.contains("25 GiB"), "{ps}");
    // A name is in use while its owner waits.
    let (code, message) =
        state_dir.run_err(&["run", "--name", "wait-third", "--memory", "1Gi", "--", "true"]);
    assert!(code == 125 && message.contains("share wait-third already exists"), "{message}");
    // A request that fits does not wait for one that does not.
    state_dir.run_ok(&["run", "--wait", "--memory", "2Gi", "--", "true"]);
    // A request that never fits does not wait.
    for never in [&["--memory", "90Gi"][..], &["--gpus", "2"], &["--model", "H100"]] {
        let (code, message) = state_dir.run_err(&[&["run", "--wait"], never, &["--", "true"]].concat());
        assert!(code == 125 && !message.contains("waiting"), "{never:?}: {message}");
    }
    // Ctrl-C leaves the queue.
    second.signal(libc::SIGINT);
    assert_eq!(second.wait_for_exit().signal(), Some(libc::SIGINT));
    third.wait_for_line("partage: queued, position 1 of 2: ");
    fourth.wait_for_line("partage: queued, position 2 of 2: ");
    first.signal(libc::SIGTERM);
    third.wait_for_line("partage: wait-third: 25 GiB of GPU 0; confined by");
    assert_eq!(wait_until_running(&state_dir, "wait-third")["gpuShares"][0]["memoryBytes"], 25 * GIB);
    fourth.wait_for_line("partage: queued, position 1 of 1: ");
    assert_eq!(queued_names(&state_dir), ["wait-fourth"]);
    // A share that becomes smaller frees capacity, too.
    state_dir.run_ok(&["resize", "wait-third", "--memory", "8Gi"]);
    wait_until_running(&state_dir, "wait-fourth");
    assert_eq!(queued_names(&state_dir), Vec::<String>::new());
    state_dir.run_ok(&["stop", "--all"]);
    state_dir.wait_until_clean();
}

#[test]
fn queued_run_survives_a_daemon_kill() {
    let state_dir = TestStateDir::new();
    let up = state_dir.start_up(ONE_GPU, &["--metrics", "off"]);
    let first = state_dir.start_share("stay-first", &["--memory", "30Gi"], &["sleep", "1000"]);
    let mut second = start_waiting(&state_dir, "stay-second", "20Gi");
    second.wait_for_line("position 1 of 1");
    eventually("a standby daemon runs", || state_dir.standby_pid());
    up.signal(libc::SIGKILL);
    second.wait_for_line("position 1 of 1");
    assert_eq!(queued_names(&state_dir), ["stay-second"]);
    first.signal(libc::SIGTERM);
    second.wait_for_line("partage: stay-second: 20 GiB of GPU 0; confined by");
    wait_until_running(&state_dir, "stay-second");
    state_dir.run_ok(&["stop", "stay-second"]);
    assert!(!second.wait_for_exit().success());
    state_dir.wait_until_clean();
}

#[test]
fn terminal_shows_queue_position_on_one_line_and_ctrl_c_leaves() {
    let state_dir = TestStateDir::new();
    let _up = state_dir.start_up(ONE_GPU, &["--metrics", "off"]);
    let first = state_dir.start_share("line-first", &["--memory", "30Gi"], &["sleep", "1000"]);
    let arguments = ["run", "--wait", "--name", "line-second", "--memory", "20Gi", "--", "echo", "hello"];
    let mut given_up = TerminalProgram::start(state_dir.partage(&arguments), 24, 60);
    let shown = given_up.wait_for_text("partage: queued, position 1 of 1: ");
    assert!(!shown.contains('\n'), "{shown:?}");
    given_up.type_keys("\u{3}");
    assert_eq!(given_up.wait_for_exit().signal(), Some(libc::SIGINT));
    eventually("the queue is empty", || queued_names(&state_dir).is_empty().then_some(()));

    let mut served = TerminalProgram::start(state_dir.partage(&arguments), 24, 60);
    served.wait_for_text("partage: queued, position 1 of 1: ");
    signal(first.pid(), libc::SIGTERM);
    // The line is erased before the next one is written.
    let shown = served.wait_for_text("hello");
    assert!(shown.contains("\r\u{1b}[Kpartage: line-second: 20 GiB of GPU 0; confined by"), "{shown:?}");
    assert!(served.wait_for_exit().success());
    state_dir.wait_until_clean();
}
