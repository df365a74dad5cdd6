//! The programs under test.
//!
//! Cargo passes the path of a program to the tests of its own package only (`CARGO_BIN_EXE_partage`), and builds it for
//! them only. The programs are therefore looked up where cargo puts them, in the directory of the profile that the
//! running test was built with. `cargo test --workspace` builds them with the tests of their packages; after `cargo
//! test --package partage-e2e` alone they may be missing or older than their sources, which is an error here and never
//! a wrong result.

use std::fs;
use std::io;
use std::path::{Path, PathBuf};
use std::sync::LazyLock;
use std::time::SystemTime;

/// Set by `make test`, which has just built the programs, so that source changes during the run do not matter.
const BUILT_VARIABLE: &str = "PARTAGE_PROGRAMS_BUILT";

/// Returns the path of `partage`.
pub fn partage() -> &'static str {
    static PATH: LazyLock<String> = LazyLock::new(|| find_program("partage", "partage"));
    &PATH
}

/// Returns the path of `partage-sample`, the programs that use a GPU as users' programs do.
pub fn sample() -> &'static str {
    static PATH: LazyLock<String> = LazyLock::new(|| find_program("partage-sample", "partage-samples"));
    &PATH
}

/// Returns the path of `partage-testkit`, with the clusters of `make cluster` and the workload of tests.
pub fn testkit() -> &'static str {
    static PATH: LazyLock<String> = LazyLock::new(|| find_program("partage-testkit", "partage-testkit"));
    &PATH
}

/// Returns the path of `partage-xtask`, which builds what tests need.
pub fn xtask() -> &'static str {
    static PATH: LazyLock<String> = LazyLock::new(|| find_program("partage-xtask", "partage-xtask"));
    &PATH
}

/// Returns the path of a program, or panics with the command to run.
#[allow(clippy::panic)] // A test fails by a panic.
fn find_program(name: &str, package: &str) -> String {
    let test = std::env::current_exe().unwrap_or_default();
    let profile = test.ancestors().nth(2).unwrap_or(Path::new("/"));
    let program = profile.join(name);
    let checked = match std::env::var_os(BUILT_VARIABLE) {
        Some(_) => check_exists(&program).map(drop),
        None => check_current(&program),
    };
    match checked {
        Ok(()) => program.to_string_lossy().into_owned(),
        Err(why) => {
            let release = if profile.ends_with("release") { " --release" } else { "" };
            panic!("{why}: cargo build{release} --package {package}, or test the whole workspace")
        }
    }
}

/// Checks that a program exists, and returns when it was built.
fn check_exists(program: &Path) -> Result<SystemTime, String> {
    modification_time(program).map_err(|error| format!("{}: {error}", program.display()))
}

/// Checks that a program exists and is not older than its sources.
fn check_current(program: &Path) -> Result<(), String> {
    let built = check_exists(program)?;
    // Cargo's list of the sources of a program and of the workspace crates that it is built from.
    let Ok(list) = fs::read_to_string(program.with_extension("d")) else { return Ok(()) };
    // A new commit changes what `--version` prints, and nothing that a test looks at.
    let is_source = |path: &PathBuf| !path.components().any(|part| part.as_os_str() == ".git");
    let is_newer = |source: &PathBuf| {
        is_source(source) && modification_time(source).is_ok_and(|changed| changed > built)
    };
    match parse_sources(&list).into_iter().find(is_newer) {
        Some(source) => Err(format!("{} is older than {}", program.display(), source.display())),
        None => Ok(()),
    }
}

fn modification_time(path: &Path) -> io::Result<SystemTime> {
    fs::metadata(path)?.modified()
}

/// Returns the paths after the colon of a Makefile rule. Spaces in them are escaped by a backslash.
fn parse_sources(rule: &str) -> Vec<PathBuf> {
    let Some((_, list)) = rule.lines().next().and_then(|line| line.split_once(": ")) else {
        return Vec::new();
    };
    let mut paths = vec![String::new()];
    let mut letters = list.chars();
    while let Some(letter) = letters.next() {
        match (letter, paths.last_mut()) {
            (' ', _) => paths.push(String::new()),
            ('\\', Some(path)) => path.extend(letters.next()),
            (_, Some(path)) => path.push(letter),
            (_, None) => {}
        }
    }
    paths.into_iter().filter(|path| !path.is_empty()).map(PathBuf::from).collect()
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;
    use std::time::Duration;

    #[test]
    fn source_paths_with_spaces_are_parsed() {
        let rule = "/a b/target/debug/partage: /a\\ b/src/main.rs  /c/lib.rs\n\n/c/lib.rs:\n";
        assert_eq!(parse_sources(rule), [Path::new("/a b/src/main.rs"), Path::new("/c/lib.rs")]);
        assert_eq!(parse_sources("no rule"), [] as [PathBuf; 0]);
    }

    #[test]
    fn program_older_than_a_source_is_refused() {
        let folder = tempfile::tempdir().unwrap();
        let at = |name: &str| folder.path().join(name);
        let (program, source) = (at("partage"), at("main.rs"));
        assert!(check_current(&program).unwrap_err().contains("partage: "), "absent");
        for file in [&program, &source] {
            fs::write(file, "").unwrap();
        }
        fs::write(at("partage.d"), format!("{}: {}\n", program.display(), source.display())).unwrap();
        let touch = |file: &Path, seconds| {
            let time = SystemTime::UNIX_EPOCH + Duration::from_secs(seconds);
            fs::File::options().write(true).open(file).unwrap().set_modified(time).unwrap();
        };
        touch(&program, 2000);
        touch(&source, 1000);
        check_current(&program).unwrap();
        touch(&source, 3000);
        assert!(check_current(&program).unwrap_err().contains("is older than"));
        check_exists(&program).unwrap();
        fs::remove_file(at("partage.d")).unwrap();
        check_current(&program).unwrap();
    }
}
