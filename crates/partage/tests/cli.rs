//! Runs the golden files of the command line and the console blocks of the docs.
#![allow(clippy::unwrap_used, clippy::expect_used)]

use partage_driver_api::exports::DriverVersion;
use partage_sim_node::node::{NodeConfig, NodeDir};
use partage_sim_node::{install, profile};
use partage_workstation::client::DaemonClient;
use partage_workstation::state_dir::StateDir;
use std::time::{Duration, Instant};
use trycmd::TestCases;

/// Maximum time for the daemon to stop; long, because the machine may be busy.
const STOP_TIMEOUT: Duration = Duration::from_secs(120);

/// The page that runs commands in shares. It has its own test, because other pages inject faults into GPUs.
const SHARES_PAGE: &str = "docs/workstation.md";

/// Runs cases with their own simulated node of two GPUs, whose directory they call `[NODE]`. With a state directory they can run
/// commands in shares; usage lines then show the variable that sets it.
fn run(name: &str, state_dir: Option<&str>, cases: &[&str]) {
    // Paths in the docs are relative to the repository's root.
    std::env::set_current_dir(concat!(env!("CARGO_MANIFEST_DIR"), "/../.."))
        .expect("the repository's root is readable");
    let directory = tempfile::Builder::new().prefix(name).tempdir().unwrap();
    let config = NodeConfig::new(DriverVersion::R550, &profile::A100_SXM4_40GB, 2, 7).unwrap();
    let node = NodeDir::create(&directory.path().join("node"), &config).unwrap();
    let object = install::shared_object().unwrap();
    install::write_libraries(&object, &node.libraries(), config.driver, node.path()).unwrap();
    let path = node.path().to_str().unwrap().to_string();
    let state_dir = state_dir.map(|name| directory.path().join(name));
    let tests = TestCases::new();
    tests.env("PARTAGE_SIM_DIR", &path).insert_var("[NODE]", path).unwrap();
    if let Some(state_dir) = &state_dir {
        tests.env("PARTAGE_STATE_DIR", state_dir.to_str().unwrap());
    }
    for case in cases {
        tests.case(case);
    }
    if state_dir.is_none() {
        tests.skip(SHARES_PAGE);
    }
    // Dropping runs the cases. The daemon must stop before its directory is removed.
    drop(tests);
    let Some(state_dir) = state_dir else { return };
    let state_dir = StateDir::at(&state_dir).unwrap();
    DaemonClient::new(state_dir.clone()).take_over().unwrap();
    let deadline = Instant::now() + STOP_TIMEOUT;
    while state_dir.path().join("daemon.sock").exists() {
        assert!(Instant::now() < deadline, "the daemon does not stop");
        std::thread::sleep(Duration::from_millis(20));
    }
}

#[test]
fn golden_files_match() {
    run("cmd", None, &["crates/partage/tests/cmd/*.toml"]);
}

#[test]
fn console_blocks_of_the_docs_match() {
    run("docs", None, &["README.md", "docs/*.md", "docs/migrate/*.md"]);
}

#[test]
fn console_blocks_of_the_workstation_page_match() {
    run("shares", Some("state_dir"), &[SHARES_PAGE]);
}
