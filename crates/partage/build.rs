//! Records the commit that the program is built from, for `partage --version`.
//!
//! `PARTAGE_COMMIT` overrides it, for builds from an archive without a git directory.

use std::process::Command;

fn main() {
    println!("cargo::rerun-if-env-changed=PARTAGE_COMMIT");
    for file in ["HEAD", "logs/HEAD"] {
        if let Some(path) = git(&["rev-parse", "--path-format=absolute", "--git-path", file]) {
            println!("cargo::rerun-if-changed={path}");
        }
    }
    let commit = std::env::var("PARTAGE_COMMIT").ok().filter(|commit| !commit.is_empty());
    let commit = commit.or_else(|| git(&["rev-parse", "--short=12", "HEAD"]));
    let version = env!("CARGO_PKG_VERSION");
    let version = commit.map_or_else(|| version.to_string(), |commit| format!("{version} ({commit})"));
    println!("cargo::rustc-env=PARTAGE_VERSION={version}");
}

fn git(arguments: &[&str]) -> Option<String> {
    let output = Command::new("git").args(arguments).output().ok()?;
    let text = String::from_utf8(output.stdout).ok()?.trim().to_string();
    (output.status.success() && !text.is_empty()).then_some(text)
}
