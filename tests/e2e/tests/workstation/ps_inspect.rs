//! `partage ps`, `inspect`, `resize`, `stop` and `top` with a running share.

use serde_json::Value;
use std::process::{Child, Command, Output, Stdio};
use std::time::{Duration, Instant};

/// How long a condition may take on a busy machine.
const TIMEOUT: Duration = Duration::from_secs(120);

/// A state directory of the test's own.
struct ViewStateDir(tempfile::TempDir);

impl ViewStateDir {
    fn new() -> ViewStateDir {
        ViewStateDir(tempfile::tempdir().unwrap())
    }

    fn command(&self, arguments: &[&str]) -> Command {
        let mut command = Command::new(partage_e2e::partage());
        command.args(arguments).env("PARTAGE_STATE_DIR", self.0.path()).env("LC_ALL", "C.UTF-8");
        command
    }

    fn output(&self, arguments: &[&str]) -> Output {
        self.command(arguments).stdin(Stdio::null()).output().unwrap()
    }

    fn run_ok(&self, arguments: &[&str]) -> String {
        let output = self.output(arguments);
        assert!(output.status.success(), "{arguments:?}: {output:?}");
        String::from_utf8(output.stdout).unwrap()
    }

    fn run_json(&self, arguments: &[&str]) -> Value {
        serde_json::from_str(&self.run_ok(arguments)).unwrap()
    }

    /// Returns the exit code and the message of a command.
    fn run_err(&self, arguments: &[&str]) -> (i32, String) {
        let output = self.output(arguments);
        (output.status.code().unwrap(), String::from_utf8(output.stderr).unwrap())
    }

    /// Starts a share whose command does nothing until it is stopped.
    fn start_share(&self, name: &str) -> RunProcess {
        let arguments =
            ["run", "-q", "--memory", "4Gi", "--cores", "30", "--name", name, "--", "sleep", "1000"];
        let child = self.command(&arguments).stdin(Stdio::null()).spawn().unwrap();
        let running = RunProcess(child);
        let deadline = Instant::now() + TIMEOUT;
        let runs = |report: Value| {
            let shares = report["shares"].as_array().unwrap().clone();
            shares.iter().any(|share| share["name"] == name && share["stage"] == "running")
        };
        while !runs(self.run_json(&["ps", "-o", "json"])) {
            assert!(Instant::now() < deadline, "{name} does not start");
            std::thread::sleep(Duration::from_millis(20));
        }
        running
    }
}

/// A `partage run` that is killed when dropped.
struct RunProcess(Child);

impl Drop for RunProcess {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

#[test]
fn share_is_listed_inspected_and_resized() {
    let state_dir = ViewStateDir::new();
    let _trainer = state_dir.start_share("trainer");
    let table = state_dir.run_ok(&["ps"]);
    let row: Vec<&str> = table.lines().nth(1).unwrap().split_whitespace().collect();
    assert!(
        table.starts_with("NAME ") && row[0] == "trainer" && table.ends_with("  sleep 1000\n"),
        "{table}"
    );
    assert!(table.contains(" 0 B / 4 GiB "), "{table}");

    let about = state_dir.run_ok(&["inspect", "trainer"]);
    assert!(
        about.contains("\ncommand:        sleep 1000\n") && about.contains("\nconfinement:    "),
        "{about}"
    );
    assert!(!about.contains("unknown to this version"), "{about}");
    assert_eq!(
        state_dir.run_json(&["inspect", "trainer", "-o", "json"])["gpuShares"][0]["memoryBytes"],
        4u64 << 30
    );
    let (code, words) = state_dir.run_err(&["inspect", "trianer"]);
    assert_eq!((code, words.as_str()), (1, "error: share trianer not found: did you mean trainer?\n"));

    let words =
        state_dir.run_ok(&["resize", "trainer", "--memory", "6Gi", "--mode", "hard", "--cores", "50"]);
    assert_eq!(words, "trainer: memory 4 GiB → 6 GiB, cores 30 % ≤100 % → 50 %\n");
    let both = state_dir.run_json(&["resize", "trainer", "--cores", "40", "-o", "json"]);
    assert_eq!(
        (&both["before"]["gpuShares"][0]["cores"], &both["after"]["gpuShares"][0]["cores"]),
        (&50.into(), &40.into())
    );
    let (code, words) = state_dir.run_err(&["resize", "trainer", "--memory", "4000Gi"]);
    assert!(code == 1 && words.starts_with("error: ") && words.contains("39.39 GiB"), "{words}");
    let (code, words) = state_dir.run_err(&["resize", "triner", "--memory", "4Gi"]);
    assert_eq!((code, words.as_str()), (1, "error: share triner not found: did you mean trainer?\n"));
    assert_eq!(
        state_dir.run_json(&["inspect", "trainer", "-o", "json"])["gpuShares"][0]["memoryBytes"],
        6u64 << 30
    );

    let top = state_dir.run_json(&["top", "-o", "json", "--interval", "100ms"]);
    assert!(top["intervalSeconds"].as_f64().unwrap() >= 0.1, "{top}");
    assert_eq!(
        (&top["shares"][0]["gpuShares"][0]["usedPercent"], &top["gpus"][0]["usedPercent"]),
        (&0.0.into(), &0.0.into())
    );
    let top = state_dir.run_ok(&["top", "--once", "--interval", "100ms"]);
    assert!(top.lines().any(|line| line.starts_with("trainer ")) && !top.contains('\x1b'), "{top}");
    state_dir.run_ok(&["stop", "trainer"]);
}

#[test]
fn shares_are_stopped_by_name_or_all() {
    let state_dir = ViewStateDir::new();
    let (mut a, mut b, mut c) =
        (state_dir.start_share("a"), state_dir.start_share("b"), state_dir.start_share("c"));
    let (code, message) = state_dir.run_err(&["stop", "a", "x"]);
    assert!(code == 1 && message.starts_with("error: share x not found"), "{message}");
    assert!(!a.0.wait().unwrap().success());
    assert!(b.0.try_wait().unwrap().is_none() && c.0.try_wait().unwrap().is_none());
    let stopped = state_dir.run_json(&["stop", "--all", "-o", "json"]);
    let names: Vec<&str> =
        stopped["stopped"].as_array().unwrap().iter().map(|one| one["name"].as_str().unwrap()).collect();
    assert_eq!((names, stopped["failed"].as_array().unwrap().len()), (vec!["b", "c"], 0));
    assert!(!b.0.wait().unwrap().success() && !c.0.wait().unwrap().success());
    assert_eq!(state_dir.run_ok(&["stop", "--all"]), "you have no shares: nothing to stop\n");
    assert_eq!(state_dir.run_ok(&["ps"]), "no shares; start one with: partage run --memory 4Gi -- COMMAND\n");
}
