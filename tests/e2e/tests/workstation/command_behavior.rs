//! A command in a share behaves as without one; and the output of the other commands.

use super::support::*;
use serde_json::Value;
use std::io::Write;
use std::os::unix::process::ExitStatusExt;
use std::process::{Command, Stdio};

const RUN_ARGUMENTS: [&str; 5] = ["run", "-q", "--memory", "1Gi", "--"];

fn run_command(state_dir: &TestStateDir, command: &[&str]) -> Command {
    state_dir.partage(&[&RUN_ARGUMENTS[..], command].concat())
}

#[test]
fn exit_code_and_signal_of_the_command_are_passed_on() {
    let state_dir = TestStateDir::new();
    let run = |script: &str| run_command(&state_dir, &["sh", "-c", script]).status().unwrap();
    assert_eq!(run("exit 0").code(), Some(0));
    assert_eq!(run("exit 3").code(), Some(3));
    for signal in [libc::SIGKILL, libc::SIGSEGV, libc::SIGTERM] {
        assert_eq!(run(&format!("kill -{signal} $$")).signal(), Some(signal));
    }
    state_dir.wait_until_clean();
}

#[test]
fn stdio_directory_and_environment_are_passed_on() {
    let state_dir = TestStateDir::new();
    let mut command =
        run_command(&state_dir, &["sh", "-c", "cat; echo to the other >&2; pwd; echo \"$A $PARTAGE_SHARE\""]);
    command.env("A", "its own").current_dir("/usr").stdin(Stdio::piped());
    let mut child = command.stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap();
    child.stdin.take().unwrap().write_all(b"from outside\n").unwrap();
    let output = child.wait_with_output().unwrap();
    assert_eq!(String::from_utf8(output.stdout).unwrap(), "from outside\n/usr\nits own sh-1\n");
    assert_eq!(String::from_utf8(output.stderr).unwrap(), "to the other\n");
    state_dir.wait_until_clean();
    // Without -q, the share and its binding are printed to standard error.
    let output = state_dir.output(&["run", "--memory", "1Gi", "--name", "loud", "--", "echo", "out"]);
    let message = String::from_utf8(output.stderr).unwrap();
    assert_eq!(output.stdout, b"out\n");
    assert!(message.starts_with("partage: loud: 1 GiB of GPU 0; confined by a "), "{message}");
    if is_root() {
        assert_eq!(message, "partage: loud: 1 GiB of GPU 0; confined by a mount namespace\n");
    }
    state_dir.wait_until_clean();
}

#[test]
fn signals_reach_the_command() {
    let state_dir = TestStateDir::new();
    let script =
        "trap 'echo asked; exit 7' TERM; trap 'echo told' USR1; echo ready; while :; do sleep 0.05; done";
    let mut running = state_dir.start_share("deaf", &["--memory", "1Gi"], &["sh", "-c", script]);
    running.wait_for_line("ready");
    running.signal(libc::SIGUSR1);
    running.wait_for_line("told");
    running.signal(libc::SIGTERM);
    running.wait_for_line("asked");
    assert_eq!(running.wait_for_exit().code(), Some(7));
    state_dir.wait_until_clean();
}

/// Keys that send signals, and a shell's job control, as in any terminal.
#[test]
fn job_control_works_in_a_terminal() {
    let state_dir = TestStateDir::new();
    let mut shell = state_dir.partage(&[]);
    let program = shell.get_program().to_owned();
    // The variables of the command above, for a shell.
    let variables: Vec<_> =
        shell.get_envs().map(|(name, value)| (name.to_owned(), value.map(ToOwned::to_owned))).collect();
    shell = Command::new("sh");
    for (name, value) in variables {
        match value {
            Some(value) => shell.env(name, value),
            None => shell.env_remove(name),
        };
    }
    shell.arg("-i").env("PS1", "> ").env_remove("ENV");
    let mut terminal = TerminalProgram::start(shell, 24, 80);
    terminal.wait_for_text("> ");
    let script = "trap \"echo over; exit 9\" INT; echo wor'k's; while :; do sleep 0.05; done";
    let line = format!("{} run -q --name job --memory 1Gi -- sh -c '{script}'\n", program.to_str().unwrap());
    terminal.type_keys(&line.replace("wor'k's", "wor\"\"ks"));
    terminal.wait_for_text("works\r\n");
    let share = state_dir.find_share("job").unwrap();
    terminal.type_keys("\u{1a}");
    terminal.read_until(|shown| shown.contains("Stopped") && shown.ends_with("> "));
    let state = || {
        let stat = std::fs::read_to_string(format!("/proc/{}/stat", share["pid"])).unwrap();
        stat.rsplit(") ").next().unwrap().chars().next().unwrap()
    };
    assert_eq!(state(), 'T');
    // A share whose command is stopped still belongs to its owner.
    assert_eq!(state_dir.find_share("job").unwrap()["stage"], "running");
    terminal.type_keys("fg\n");
    eventually("the job continues", || (state() != 'T').then_some(()));
    terminal.type_keys("\u{3}");
    terminal.wait_for_text("over\r\n");
    terminal.read_until(|shown| shown.ends_with("> "));
    terminal.type_keys("echo code=$?\n");
    terminal.wait_for_text("code=9\r\n");
    terminal.type_keys("exit\n");
    assert_eq!(terminal.wait_for_exit().code(), Some(0));
    state_dir.wait_until_clean();
}

#[test]
fn command_gets_the_terminal_and_its_size() {
    let state_dir = TestStateDir::new();
    let script =
        "trap 'stty size; exit 0' WINCH; test -t 0 && test -t 1 && stty size; while :; do sleep 0.05; done";
    let mut command = run_command(&state_dir, &["sh", "-c", script]);
    command.env("COLUMNS", "");
    let mut terminal = TerminalProgram::start(command, 33, 99);
    terminal.wait_for_text("33 99\r\n");
    terminal.resize(20, 70);
    terminal.wait_for_text("20 70\r\n");
    assert_eq!(terminal.wait_for_exit().code(), Some(0));
    state_dir.wait_until_clean();
}

/// Returns the names of an object's fields.
fn field_names(value: &Value) -> Vec<&str> {
    value.as_object().unwrap().keys().map(String::as_str).collect()
}

fn assert_has_fields(value: &Value, names: &[&str]) {
    let there = field_names(value);
    assert!(names.iter().all(|name| there.contains(name)), "{names:?} in {there:?}");
}

const SHARE_FIELDS: [&str; 15] = [
    "name",
    "user",
    "uid",
    "stage",
    "since",
    "pid",
    "command",
    "confinement",
    "cgroup",
    "deviceFilter",
    "members",
    "processes",
    "gpuShares",
    "bypassSuspected",
    "stage",
];
const GPU_SHARE_FIELDS: [&str; 12] = [
    "gpu",
    "uuid",
    "memoryBytes",
    "cores",
    "ceiling",
    "whole",
    "usedBytes",
    "peakBytes",
    "refusals",
    "throttledNanos",
    "spentNanos",
    "waiting",
];

#[test]
fn every_command_has_json_output() {
    let state_dir = TestStateDir::new();
    let empty = state_dir.run_json(&["ps", "-o", "json"]);
    assert_eq!((&empty["shares"], &empty["waiting"]), (&Value::Array(vec![]), &Value::Array(vec![])));
    assert_eq!(state_dir.run_ok(&["ps"]), "no shares; start one with: partage run --memory 4Gi -- COMMAND\n");
    assert_eq!(
        state_dir.run_json(&["top", "-o", "json", "--interval", "50ms"])["shares"],
        Value::Array(vec![])
    );

    let mut running = state_dir.start_sleeper("one");
    let ps = state_dir.run_json(&["ps", "-o", "json"]);
    assert_has_fields(&ps["shares"][0], &SHARE_FIELDS);
    assert_has_fields(&ps["shares"][0]["gpuShares"][0], &GPU_SHARE_FIELDS);
    assert_eq!(ps["shares"][0]["pid"], running.pid());
    assert_eq!(ps["shares"][0]["command"], serde_json::json!(["sleep", "1000"]));
    let inspect = state_dir.run_json(&["inspect", "one", "-o", "json"]);
    assert_eq!(field_names(&inspect), field_names(&ps["shares"][0]));
    let top = state_dir.run_json(&["top", "-o", "json", "--interval", "50ms"]);
    assert_has_fields(&top, &["intervalSeconds", "gpus", "shares"]);
    assert_has_fields(
        &top["gpus"][0],
        &["index", "uuid", "model", "memoryBytes", "usedMemoryBytes", "unhealthy", "usedPercent"],
    );
    assert_has_fields(&top["shares"][0]["gpuShares"][0], &GPU_SHARE_FIELDS);
    assert_has_fields(&top["shares"][0]["gpuShares"][0], &["usedPercent", "throttledPercent"]);
    let resized = state_dir.run_json(&["resize", "one", "--memory", "5Gi", "-o", "json"]);
    assert_eq!(resized["before"]["gpuShares"][0]["memoryBytes"], 4 * GIB);
    assert_eq!(resized["after"]["gpuShares"][0]["memoryBytes"], 5 * GIB);
    let stopped = state_dir.run_json(&["stop", "one", "-o", "json"]);
    assert_eq!(
        stopped,
        serde_json::json!({"stopped": [{"name": "one", "ended": 1, "killed": 0}], "failed": []})
    );
    assert_eq!(running.wait_for_exit().signal(), Some(libc::SIGTERM));
    state_dir.wait_until_clean();
}

/// Into a pipe, top prints one table after the other, and ends when the reader does.
#[test]
fn piped_top_prints_lines() {
    let state_dir = TestStateDir::new();
    let _one = state_dir.start_sleeper("one");
    let mut top = state_dir.partage(&["top", "--interval", "100ms"]);
    let mut child = top.stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap();
    let mut reader = std::io::BufReader::new(child.stdout.take().unwrap());
    let mut tables = 0;
    let mut line = String::new();
    while tables < 2 {
        line.clear();
        assert!(std::io::BufRead::read_line(&mut reader, &mut line).unwrap() > 0);
        assert!(!line.contains('\x1b'), "{line:?}");
        tables += usize::from(line.starts_with("one "));
    }
    drop(reader);
    let status = eventually("top ends", || child.try_wait().unwrap());
    let mut message = String::new();
    std::io::Read::read_to_string(&mut child.stderr.take().unwrap(), &mut message).unwrap();
    assert!(status.success() && message.is_empty(), "{status}: {message}");
}
