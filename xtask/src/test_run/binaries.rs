//! The test binaries that cargo builds, and the environment that it runs them in.

use super::TestRunError;
use super::supervise::{ChildOutcome, LineProgress, supervise};
use serde::Deserialize;
use std::collections::BTreeMap;
use std::ffi::OsString;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::atomic::AtomicBool;
use std::time::Duration;

/// One test binary of the workspace.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct TestBinary {
    pub(super) package: String,
    /// The target: `node` for `tests/node/main.rs`, the crate's name for its unit tests.
    pub(super) target: String,
    /// The root source file, relative to the package.
    pub(super) source: PathBuf,
    pub(super) executable: PathBuf,
    manifest_dir: PathBuf,
    version: String,
}

/// Everything that cargo has built.
#[derive(Debug, Default)]
pub(super) struct BuildArtifacts {
    pub(super) tests: Vec<TestBinary>,
    /// The programs of the workspace, by name.
    programs: BTreeMap<String, PathBuf>,
    /// Whether cargo has reported the end of the build.
    is_complete: bool,
}

#[derive(Deserialize)]
struct CargoMessage {
    reason: String,
    #[serde(default)]
    package_id: String,
    #[serde(default)]
    manifest_path: PathBuf,
    target: Option<CargoTarget>,
    profile: Option<CargoProfile>,
    executable: Option<PathBuf>,
}

#[derive(Deserialize)]
struct CargoTarget {
    name: String,
    kind: Vec<String>,
    src_path: PathBuf,
}

#[derive(Deserialize)]
struct CargoProfile {
    test: bool,
}

/// Builds all tests of the workspace in the current directory. Cargo's own progress and errors go to standard error.
pub(super) fn build(stop: &AtomicBool) -> Result<BuildArtifacts, TestRunError> {
    let mut command = Command::new(cargo());
    command.args(["test", "--workspace", "--no-run", "--message-format", "json-render-diagnostics"]);
    let mut built = Ok(BuildArtifacts::default());
    // A build may compile one crate for a long time, and waits while another cargo builds in the same directory.
    let outcome = supervise(&mut command, stop, Duration::MAX, |_, line, _| {
        if let Ok(artifacts) = &mut built
            && let Err(error) = artifacts.read(line)
        {
            built = Err(error);
        }
        LineProgress::Made
    });
    let built = match outcome.map_err(TestRunError::io("starting cargo"))? {
        ChildOutcome::Exited(status) if !status.success() => return Err(TestRunError::Build(status)),
        ChildOutcome::Exited(_) => built?,
        ChildOutcome::Stalled | ChildOutcome::Interrupted => return Err(TestRunError::Interrupted),
    };
    if !built.is_complete {
        return Err(TestRunError::Incomplete);
    }
    if built.tests.is_empty() { Err(TestRunError::NoTests) } else { Ok(built) }
}

/// Returns the cargo that runs this program, else the one on the PATH.
pub(super) fn cargo() -> OsString {
    std::env::var_os("CARGO").unwrap_or_else(|| "cargo".into())
}

impl BuildArtifacts {
    /// Reads one line of cargo's JSON.
    fn read(&mut self, line: &str) -> Result<(), TestRunError> {
        let message: CargoMessage = serde_json::from_str(line).map_err(TestRunError::List)?;
        self.is_complete |= message.reason == "build-finished";
        let (Some(target), Some(profile), Some(executable)) =
            (message.target, message.profile, message.executable)
        else {
            return Ok(());
        };
        if message.reason != "compiler-artifact" {
            return Ok(());
        }
        if !profile.test {
            if target.kind.iter().any(|kind| kind == "bin") {
                self.programs.insert(target.name, executable);
            }
            return Ok(());
        }
        let manifest_dir = message.manifest_path.parent().unwrap_or(Path::new("")).to_path_buf();
        let (package, version) = identity(&message.package_id);
        self.tests.push(TestBinary {
            source: target.src_path.strip_prefix(&manifest_dir).unwrap_or(&target.src_path).to_path_buf(),
            target: target.name,
            package,
            version,
            executable,
            manifest_dir,
        });
        Ok(())
    }

    /// Returns a command that runs a test binary as cargo does: in its package's directory, with the variables that
    /// cargo documents for tests.
    pub(super) fn command(&self, test: &TestBinary) -> Command {
        let mut command = Command::new(&test.executable);
        command
            .current_dir(&test.manifest_dir)
            .env("CARGO", cargo())
            .env("CARGO_MANIFEST_DIR", &test.manifest_dir)
            .env("CARGO_MANIFEST_PATH", test.manifest_dir.join("Cargo.toml"))
            .env("CARGO_PKG_NAME", &test.package)
            .env("CARGO_PKG_VERSION", &test.version);
        for (name, program) in &self.programs {
            command.env(format!("CARGO_BIN_EXE_{name}"), program);
        }
        command
    }
}

/// Parses name and version from cargo's `path+file:///folder#name@version`, or `path+file:///folder/name#version`.
fn identity(id: &str) -> (String, String) {
    let (url, fragment) = id.rsplit_once('#').unwrap_or(("", id));
    match fragment.split_once('@') {
        Some((name, version)) => (name.to_string(), version.to_string()),
        None => (url.rsplit('/').next().unwrap_or_default().to_string(), fragment.to_string()),
    }
}

/// Returns a test binary of a package, for tests.
#[cfg(test)]
pub(super) fn named(package: &str, target: &str) -> TestBinary {
    TestBinary {
        package: package.into(),
        target: target.into(),
        source: format!("tests/{target}.rs").into(),
        executable: PathBuf::new(),
        manifest_dir: PathBuf::new(),
        version: "0.1.0".into(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn artifacts_become_tests_and_programs() {
        let mut built = BuildArtifacts::default();
        for line in [
            r#"{"reason":"compiler-artifact","package_id":"registry+x#serde@1.0.0","manifest_path":"/r/Cargo.toml",
                "target":{"name":"serde","kind":["lib"],"src_path":"/r/lib.rs"},"profile":{"test":false},"executable":null}"#,
            r#"{"reason":"compiler-artifact","package_id":"path+file:///w/crates/partage#0.1.0","manifest_path":"/w/crates/partage/Cargo.toml",
                "target":{"name":"partage","kind":["bin"],"src_path":"/w/crates/partage/src/main.rs"},"profile":{"test":false},
                "executable":"/w/target/debug/partage"}"#,
            r#"{"reason":"compiler-artifact","package_id":"path+file:///w/tests/e2e#partage-e2e@0.1.0","manifest_path":"/w/tests/e2e/Cargo.toml",
                "target":{"name":"node","kind":["test"],"src_path":"/w/tests/e2e/tests/node/main.rs"},"profile":{"test":true},
                "executable":"/w/target/debug/deps/node-1"}"#,
            r#"{"reason":"build-finished","success":true}"#,
        ] {
            built.read(line).unwrap();
        }
        let [test] = &built.tests[..] else { panic!("{built:?}") };
        assert_eq!((test.package.as_str(), test.version.as_str()), ("partage-e2e", "0.1.0"));
        assert_eq!((test.target.as_str(), test.source.as_path()), ("node", Path::new("tests/node/main.rs")));
        let command = built.command(test);
        assert_eq!(command.get_current_dir(), Some(Path::new("/w/tests/e2e")));
        let program = command.get_envs().find(|(name, _)| *name == "CARGO_BIN_EXE_partage");
        assert_eq!(program.unwrap().1.unwrap(), "/w/target/debug/partage");
        assert_eq!(identity("path+file:///w/crates/partage#0.1.0"), ("partage".into(), "0.1.0".into()));
    }
}
