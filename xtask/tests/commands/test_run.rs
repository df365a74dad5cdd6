//! `partage-xtask test` on a small package: failing, crashing and hanging tests are reported, and fail the run.

use crate::test_dir::TestDir;
use std::fs;
use std::io::{BufRead, BufReader};
use std::process::{Command, Stdio};

/// Creates a package with a library and these test binaries, by name and source.
fn test_package(tests: &[(&str, &str)]) -> TestDir {
    let folder = TestDir::new();
    let write = |path: &str, text: &str| {
        let path = folder.path().join(path);
        fs::create_dir_all(path.parent().unwrap()).unwrap();
        fs::write(path, text).unwrap();
    };
    // Its own workspace, wherever the temporary directory is.
    write(
        "Cargo.toml",
        "[package]\nname = \"small\"\nversion = \"0.1.0\"\nedition = \"2024\"\n\n[workspace]\n",
    );
    write("src/lib.rs", "//! ```\n//! assert_eq!(1 + 1, 2);\n//! ```\n");
    for (name, source) in tests {
        write(&format!("tests/{name}.rs"), source);
    }
    folder
}

fn runner(package: &TestDir, arguments: &[&str]) -> Command {
    let mut command = Command::new(env!("CARGO_BIN_EXE_partage-xtask"));
    command
        .args(["test", "--records", "records"])
        .args(arguments)
        .current_dir(package.path())
        .env("CARGO_TARGET_DIR", package.path().join("target"));
    command
}

/// Runs the tests and returns exit code and standard output.
fn run_tests(package: &TestDir, arguments: &[&str]) -> (i32, String) {
    let output = runner(package, arguments).output().unwrap();
    (output.status.code().unwrap(), String::from_utf8(output.stdout).unwrap())
}

const PASSES: &str = r#"
#[test]
fn adds() {}

#[test]
#[ignore = "takes long"]
fn waits() {}

#[test]
fn is_skipped() {
    use std::io::Write;
    assert_eq!(std::env::var("PARTAGE_PROGRAMS_BUILT").unwrap(), "1");
    let skips = std::env::var("PARTAGE_SKIPPED").unwrap();
    let mut skips = std::fs::OpenOptions::new().append(true).open(skips).unwrap();
    writeln!(skips, "is_skipped: no bed").unwrap();
}
"#;

#[test]
fn run_without_failures_succeeds_and_lists_skips_and_durations() {
    let package = test_package(&[("passes", PASSES)]);
    let (code, out) = run_tests(&package, &[]);
    assert_eq!(code, 0, "{out}");
    for line in ["slowest tests:", "skipped 1 tests:\n  is_skipped: no bed", " s  small passes: adds"] {
        assert!(out.contains(line), "{line}: {out}");
    }
    // Two tests and the example in the library.
    assert!(out.contains("\ntest result: ok. 3 passed; 0 failed; 1 ignored;"), "{out}");
    let durations = fs::read_to_string(package.path().join("records/durations.json")).unwrap();
    assert!(durations.contains("small tests/passes.rs"), "{durations}");
}

#[test]
fn failing_crashing_and_hanging_binaries_fail_the_run_and_are_named() {
    let package = test_package(&[
        ("passes", PASSES),
        ("fails", "#[test]\nfn compares() {\n    println!(\"seen before\");\n    assert_eq!(1, 2);\n}\n"),
        ("aborts", "#[test]\nfn crashes() {\n    std::process::abort();\n}\n"),
        ("leaves", "#[test]\nfn exits() {\n    std::process::exit(0);\n}\n"),
        ("hangs", "#[test]\nfn sleeps() {\n    loop {\n        std::thread::park();\n    }\n}\n"),
    ]);
    let (code, out) = run_tests(&package, &["--stall-limit", "3"]);
    assert_eq!(code, 1, "{out}");
    let (before, failures) = out.split_once("\nfailures:\n  small").expect(&out);
    assert!(before.contains("seen before") && before.contains("left: 1"), "the test's own output: {out}");
    for failure in [
        " fails: compares\n",
        " aborts: signal: 6 (SIGABRT) (core dumped) before its end during crashes\n",
        " leaves: exit status: 0 before its end during exits\n",
        " hangs: killed because no test ended during sleeps\n",
    ] {
        let failure = failure.replace(" (core dumped)", "");
        assert!(failures.replace(" (core dumped)", "").contains(&failure), "{failure}: {out}");
    }
    assert!(out.contains("\ntest result: FAILED. 3 passed; 4 failed; 1 ignored;"), "{out}");
}

#[test]
fn interruption_ends_the_tests_and_fails_the_run() {
    let hangs = "#[test]\nfn sleeps() {\n    let own = std::process::id();\n    \
                 std::fs::write(\"pid\", own.to_string()).unwrap();\n    loop {\n        std::thread::park();\n    }\n}\n";
    let package = test_package(&[("hangs", hangs)]);
    let mut child = runner(&package, &[]).stdout(Stdio::piped()).stderr(Stdio::null()).spawn().unwrap();
    let mut lines = BufReader::new(child.stdout.take().unwrap()).lines();
    lines.find(|line| line.as_ref().unwrap().contains("Running tests/hangs.rs")).unwrap().unwrap();
    let pid = package.path().join("pid");
    while fs::read_to_string(&pid).unwrap_or_default().is_empty() {
        std::thread::sleep(std::time::Duration::from_millis(20));
    }
    let killed = Command::new("kill").args(["-INT", &child.id().to_string()]).status().unwrap();
    assert!(killed.success());
    assert_eq!(child.wait().unwrap().code(), Some(130));
    let out: Vec<String> = lines.map(Result::unwrap).collect();
    assert!(out.iter().any(|line| line.contains("hangs: interrupted during sleeps")), "{out:?}");
    let test = fs::read_to_string(pid).unwrap();
    assert!(!fs::exists(format!("/proc/{test}")).unwrap(), "the test binary must have ended");
}

#[test]
fn tests_that_do_not_compile_fail_the_run() {
    let package = test_package(&[("broken", "#[test]\nfn broken() { nothing(); }\n")]);
    let output = runner(&package, &[]).output().unwrap();
    assert_eq!(output.status.code(), Some(1));
    let err = String::from_utf8(output.stderr).unwrap();
    assert!(err.contains("cannot find function `nothing`"), "cargo's own message: {err}");
    assert!(
        err.ends_with("error: the tests could not be built: cargo ended with exit status: 101\n"),
        "{err}"
    );
}
