//! The command line as people use it: golden files, and the console blocks of the docs.
#![allow(clippy::unwrap_used, clippy::expect_used)]

use partage_driver_api::exports::DriverVersion;
use partage_sim_node::node::{NodeConfig, NodeDir};
use partage_sim_node::{install, profile};
use partage_workstation::client::Client;
use partage_workstation::home::Home;
use std::time::{Duration, Instant};
use trycmd::TestCases;

/// Nothing here takes long; on a busy machine everything may.
const PATIENCE: Duration = Duration::from_secs(120);

/// It runs commands in shares, and the others break GPUs.
const SHARES: &str = "docs/workstation.md";

/// Runs cases with a simulated node of two GPUs that only they use; they call its folder `[NODE]`. With a home they can
/// run commands in shares; but a usage line then says so.
fn run(name: &str, home: Option<&str>, cases: &[&str]) {
    // The docs speak from the top of the repository.
    std::env::set_current_dir(concat!(env!("CARGO_MANIFEST_DIR"), "/../.."))
        .expect("the top of the repository");
    let folder = tempfile::Builder::new().prefix(name).tempdir().unwrap();
    let config = NodeConfig::new(DriverVersion::R550, &profile::A100_SXM4_40GB, 2, 7).unwrap();
    let node = NodeDir::create(&folder.path().join("node"), &config).unwrap();
    let object = install::shared_object().unwrap();
    install::libraries(&object, &node.libraries(), config.driver, node.path()).unwrap();
    let path = node.path().to_str().unwrap().to_string();
    let home = home.map(|name| folder.path().join(name));
    let tests = TestCases::new();
    tests.env("PARTAGE_SIM_DIR", &path).insert_var("[NODE]", path).unwrap();
    if let Some(home) = &home {
        tests.env("PARTAGE_HOME", home.to_str().unwrap());
    }
    for case in cases {
        tests.case(case);
    }
    if home.is_none() {
        tests.skip(SHARES);
    }
    // Dropped, they run; the folder goes after that, and the keeper before it.
    drop(tests);
    let Some(home) = home else { return };
    let home = Home::at(&home).unwrap();
    Client::new(home.clone()).take_over().unwrap();
    let deadline = Instant::now() + PATIENCE;
    while home.path().join("keeper.sock").exists() {
        assert!(Instant::now() < deadline, "the keeper stays");
        std::thread::sleep(Duration::from_millis(20));
    }
}

#[test]
fn commands() {
    run("cmd", None, &["crates/partage/tests/cmd/*.toml"]);
}

#[test]
fn documents() {
    run("docs", None, &["README.md", "docs/*.md", "docs/migrate/*.md"]);
}

#[test]
fn shares_in_documents() {
    run("shares", Some("home"), &[SHARES]);
}
