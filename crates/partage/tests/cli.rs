//! The command line as people use it: golden files, and the console blocks of the docs.
#![allow(clippy::unwrap_used, clippy::expect_used)]

use partage_driver_api::exports::DriverVersion;
use partage_sim::node::{NodeConfig, NodeDir};
use partage_sim::profile;
use trycmd::TestCases;

/// Runs cases with a simulated node of two GPUs that only they use; they call its folder `[NODE]`.
fn run(name: &str, cases: &[&str]) {
    // The docs speak from the top of the repository.
    std::env::set_current_dir(concat!(env!("CARGO_MANIFEST_DIR"), "/../.."))
        .expect("the top of the repository");
    let folder = tempfile::Builder::new().prefix(name).tempdir().unwrap();
    let config = NodeConfig::new(DriverVersion::R550, &profile::A100_SXM4_40GB, 2, 7).unwrap();
    let node = NodeDir::create(&folder.path().join("node"), &config).unwrap();
    let path = node.path().to_str().unwrap().to_string();
    let tests = TestCases::new();
    tests.env("PARTAGE_SIM_DIR", &path).insert_var("[NODE]", path).unwrap();
    for case in cases {
        tests.case(case);
    }
    // Dropped, they run; the folder goes after that.
    drop(tests);
}

#[test]
fn commands() {
    run("cmd", &["crates/partage/tests/cmd/*.toml"]);
}

#[test]
fn documents() {
    run("docs", &["README.md", "docs/*.md", "docs/migrate/*.md"]);
}
