//! A command in a share is as it would be without one; and what the other commands answer.

use super::support::*;
use serde_json::Value;
use std::io::Write;
use std::os::unix::process::ExitStatusExt;
use std::process::{Command, Stdio};

const RUN: [&str; 5] = ["run", "-q", "--memory", "1Gi", "--"];

fn run(home: &Home, command: &[&str]) -> Command {
    home.partage(&[&RUN[..], command].concat())
}

#[test]
fn the_exit_code_is_the_commands() {
    let home = Home::new();
    let run = |script: &str| run(&home, &["sh", "-c", script]).status().unwrap();
    assert_eq!(run("exit 0").code(), Some(0));
    assert_eq!(run("exit 3").code(), Some(3));
    for signal in [libc::SIGKILL, libc::SIGSEGV, libc::SIGTERM] {
        assert_eq!(run(&format!("kill -{signal} $$")).signal(), Some(signal));
    }
    home.nothing_left();
}

#[test]
fn what_is_written_and_read_is_the_commands() {
    let home = Home::new();
    let mut command =
        run(&home, &["sh", "-c", "cat; echo to the other >&2; pwd; echo \"$A $PARTAGE_SHARE\""]);
    command.env("A", "its own").current_dir("/usr").stdin(Stdio::piped());
    let mut child = command.stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap();
    child.stdin.take().unwrap().write_all(b"from outside\n").unwrap();
    let output = child.wait_with_output().unwrap();
    assert_eq!(String::from_utf8(output.stdout).unwrap(), "from outside\n/usr\nits own sh-1\n");
    assert_eq!(String::from_utf8(output.stderr).unwrap(), "to the other\n");
    home.nothing_left();
    // Without -q it is said what the share is and what holds it; nothing of it on standard output.
    let output = home.output(&["run", "--memory", "1Gi", "--name", "loud", "--", "echo", "out"]);
    let words = String::from_utf8(output.stderr).unwrap();
    assert_eq!(output.stdout, b"out\n");
    assert!(words.starts_with("partage: loud: 1 GiB of GPU 0; held by a "), "{words}");
    if is_root() {
        assert_eq!(words, "partage: loud: 1 GiB of GPU 0; held by a mount namespace\n");
    }
    home.nothing_left();
}

#[test]
fn signals_reach_the_command() {
    let home = Home::new();
    let script =
        "trap 'echo asked; exit 7' TERM; trap 'echo told' USR1; echo ready; while :; do sleep 0.05; done";
    let mut running = home.share("deaf", &["--memory", "1Gi"], &["sh", "-c", script]);
    running.says("ready");
    running.signal(libc::SIGUSR1);
    running.says("told");
    running.signal(libc::SIGTERM);
    running.says("asked");
    assert_eq!(running.ended().code(), Some(7));
    home.nothing_left();
}

/// Keys that make signals, and a shell's jobs, as in anybody's terminal.
#[test]
fn a_job_is_stopped_continued_and_interrupted_in_a_terminal() {
    let home = Home::new();
    let mut shell = home.partage(&[]);
    let program = shell.get_program().to_owned();
    // The builder's variables, for a shell.
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
    let mut terminal = Terminal::start(shell, 24, 80);
    terminal.shows("> ");
    let script = "trap \"echo over; exit 9\" INT; echo wor'k's; while :; do sleep 0.05; done";
    let line = format!("{} run -q --name job --memory 1Gi -- sh -c '{script}'\n", program.to_str().unwrap());
    terminal.strike(&line.replace("wor'k's", "wor\"\"ks"));
    terminal.shows("works\r\n");
    let share = home.find("job").unwrap();
    terminal.strike("\u{1a}");
    terminal.until(|shown| shown.contains("Stopped") && shown.ends_with("> "));
    let state = || {
        let stat = std::fs::read_to_string(format!("/proc/{}/stat", share["pid"])).unwrap();
        stat.rsplit(") ").next().unwrap().chars().next().unwrap()
    };
    assert_eq!(state(), 'T');
    // A share whose command sleeps is still its owner's.
    assert_eq!(home.find("job").unwrap()["stage"], "running");
    terminal.strike("fg\n");
    eventually("the job goes on", || (state() != 'T').then_some(()));
    terminal.strike("\u{3}");
    terminal.shows("over\r\n");
    terminal.until(|shown| shown.ends_with("> "));
    terminal.strike("echo code=$?\n");
    terminal.shows("code=9\r\n");
    terminal.strike("exit\n");
    assert_eq!(terminal.ended().code(), Some(0));
    home.nothing_left();
}

#[test]
fn the_command_has_the_terminal_and_its_size() {
    let home = Home::new();
    let script =
        "trap 'stty size; exit 0' WINCH; test -t 0 && test -t 1 && stty size; while :; do sleep 0.05; done";
    let mut command = run(&home, &["sh", "-c", script]);
    command.env("COLUMNS", "");
    let mut terminal = Terminal::start(command, 33, 99);
    terminal.shows("33 99\r\n");
    terminal.resize(20, 70);
    terminal.shows("20 70\r\n");
    assert_eq!(terminal.ended().code(), Some(0));
    home.nothing_left();
}

/// The names of an object's fields.
fn fields(value: &Value) -> Vec<&str> {
    value.as_object().unwrap().keys().map(String::as_str).collect()
}

fn has(value: &Value, names: &[&str]) {
    let there = fields(value);
    assert!(names.iter().all(|name| there.contains(name)), "{names:?} in {there:?}");
}

const SHARE: [&str; 15] = [
    "name",
    "user",
    "uid",
    "stage",
    "since",
    "pid",
    "command",
    "binding",
    "cgroup",
    "deviceGate",
    "members",
    "processes",
    "parts",
    "bypassSuspected",
    "stage",
];
const PART: [&str; 12] = [
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
fn every_command_answers_programs_too() {
    let home = Home::new();
    let empty = home.json(&["ps", "-o", "json"]);
    assert_eq!((&empty["shares"], &empty["waiting"]), (&Value::Array(vec![]), &Value::Array(vec![])));
    assert_eq!(home.fine(&["ps"]), "no shares: partage run --memory 4Gi -- COMMAND starts one\n");
    assert_eq!(home.json(&["top", "-o", "json", "--interval", "50ms"])["shares"], Value::Array(vec![]));

    let mut running = home.sleeper("one");
    let ps = home.json(&["ps", "-o", "json"]);
    has(&ps["shares"][0], &SHARE);
    has(&ps["shares"][0]["parts"][0], &PART);
    assert_eq!(ps["shares"][0]["pid"], running.pid());
    assert_eq!(ps["shares"][0]["command"], serde_json::json!(["sleep", "1000"]));
    let inspect = home.json(&["inspect", "one", "-o", "json"]);
    assert_eq!(fields(&inspect), fields(&ps["shares"][0]));
    let top = home.json(&["top", "-o", "json", "--interval", "50ms"]);
    has(&top, &["intervalSeconds", "gpus", "shares"]);
    has(
        &top["gpus"][0],
        &["index", "uuid", "model", "memoryBytes", "usedMemoryBytes", "unhealthy", "gotPercent"],
    );
    has(&top["shares"][0]["parts"][0], &PART);
    has(&top["shares"][0]["parts"][0], &["gotPercent", "throttledPercent"]);
    let resized = home.json(&["resize", "one", "--memory", "5Gi", "-o", "json"]);
    assert_eq!(resized["before"]["parts"][0]["memoryBytes"], 4 * GIB);
    assert_eq!(resized["after"]["parts"][0]["memoryBytes"], 5 * GIB);
    let stopped = home.json(&["stop", "one", "-o", "json"]);
    assert_eq!(
        stopped,
        serde_json::json!({"stopped": [{"name": "one", "ended": 1, "killed": 0}], "failed": []})
    );
    assert_eq!(running.ended().signal(), Some(libc::SIGTERM));
    home.nothing_left();
}

/// Piped, one table follows the other, and a reader that leaves ends it.
#[test]
fn top_into_a_pipe_is_lines() {
    let home = Home::new();
    let _one = home.sleeper("one");
    let mut top = home.partage(&["top", "--interval", "100ms"]);
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
    let mut words = String::new();
    std::io::Read::read_to_string(&mut child.stderr.take().unwrap(), &mut words).unwrap();
    assert!(status.success() && words.is_empty(), "{status}: {words}");
}
