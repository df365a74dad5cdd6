//! The layers of the architecture: who may depend on whom.
//!
//! Arrows go down only. A crate that is not in the table below fails the test: put it in its layer first.
#![allow(clippy::unwrap_used, clippy::expect_used)]

use serde_json::Value;
use std::collections::{BTreeMap, BTreeSet};

/// The crates of the workspace and the ones that each may use. Tests may use those of [`FOR_TESTS`] anywhere.
const MAY_USE: &[(&str, &[&str])] = &[
    ("partage-core", &[]),
    ("partage-region", &[]),
    ("partage-driver-api", &[]),
    ("partage-elf-rewrite", &[]),
    ("partage-shim", &["partage-region", "partage-driver-api", "partage-elf-rewrite"]),
    ("partage-sim-node", &["partage-core", "partage-region", "partage-driver-api", "partage-elf-rewrite"]),
    ("partage-sim-driver", &["partage-driver-api", "partage-elf-rewrite", "partage-sim-node"]),
    ("partage-samples", &["partage-core", "partage-driver-api"]),
    ("partage-kubelet-api", &[]),
    ("partage-serve", &[]),
    ("partage-cluster", &["partage-core"]),
    ("partage-host", &["partage-core", "partage-driver-api", "partage-sim-node"]),
    (
        "partage-enforce",
        &["partage-core", "partage-region", "partage-driver-api", "partage-shim", "partage-host"],
    ),
    (
        "partage-workstation",
        &[
            "partage-core",
            "partage-region",
            "partage-driver-api",
            "partage-shim",
            "partage-host",
            "partage-enforce",
        ],
    ),
    (
        "partage-agent",
        &[
            "partage-core",
            "partage-region",
            "partage-driver-api",
            "partage-shim",
            "partage-host",
            "partage-enforce",
            "partage-cluster",
            "partage-kubelet-api",
            "partage-serve",
        ],
    ),
    ("partage-control", &["partage-core", "partage-cluster", "partage-serve"]),
    (
        "partage",
        &[
            "partage-core",
            "partage-region",
            "partage-driver-api",
            "partage-shim",
            "partage-sim-node",
            "partage-sim-driver",
            "partage-host",
            "partage-enforce",
            "partage-workstation",
            "partage-cluster",
            "partage-kubelet-api",
            "partage-serve",
            "partage-agent",
            "partage-control",
        ],
    ),
];

/// Crates that only tests and `make` use: they may use all others, and no product links them.
const DEVELOPMENT: &[&str] = &["partage-e2e", "partage-testkit", "partage-xtask"];

/// What the tests of every crate may use.
const FOR_TESTS: &[&str] = &["partage-testkit", "partage-sim-node", "partage-sim-driver"];

/// What a crate must never link, not even through others.
const NEVER_LINKS: &[(&str, &[&str])] = &[
    // It lives in other people's processes.
    ("partage-shim", &["serde", "serde_json", "tokio", "kube"]),
    ("partage-region", &["serde", "tokio", "kube"]),
    // It decides; it does not talk.
    ("partage-core", &["tokio", "kube", "k8s-openapi", "tonic", "libc", "rustix"]),
    // It is loaded into programs as their driver.
    ("partage-sim-driver", &["tokio", "kube", "k8s-openapi", "tonic", "clap"]),
    // It is a table.
    ("partage-driver-api", &["libc", "serde", "rustix"]),
    // They build and install things.
    ("partage", DEVELOPMENT),
];

fn metadata() -> Value {
    let output = std::process::Command::new(env!("CARGO"))
        // Only what this platform links: the rest may not have been fetched.
        .args([
            "metadata",
            "--format-version",
            "1",
            "--locked",
            "--filter-platform",
            "x86_64-unknown-linux-gnu",
        ])
        .current_dir(env!("CARGO_MANIFEST_DIR"))
        .output()
        .expect("cargo runs");
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    serde_json::from_slice(&output.stdout).unwrap()
}

#[test]
fn arrows_go_down_only() {
    let metadata = metadata();
    let members: BTreeSet<&str> =
        metadata["workspace_members"].as_array().unwrap().iter().map(|id| id.as_str().unwrap()).collect();
    let ours = metadata["packages"].as_array().unwrap().iter();
    let ours: Vec<&Value> =
        ours.filter(|package| members.contains(package["id"].as_str().unwrap())).collect();
    let our_names: BTreeSet<String> =
        ours.iter().map(|package| package["name"].as_str().unwrap().to_string()).collect();
    let may_use: BTreeMap<&str, &[&str]> = MAY_USE.iter().copied().collect();
    let mut checked = 0;
    for package in ours {
        let name = package["name"].as_str().unwrap();
        if DEVELOPMENT.contains(&name) {
            continue;
        }
        let allowed =
            may_use.get(name).unwrap_or_else(|| panic!("{name} is in no layer: put it in the table"));
        for dependency in package["dependencies"].as_array().unwrap() {
            let used = dependency["name"].as_str().unwrap();
            let for_tests = dependency["kind"] == "dev";
            if our_names.contains(used) && !(for_tests && FOR_TESTS.contains(&used)) {
                assert!(allowed.contains(&used), "{name} may not use {used}");
            }
        }
        checked += 1;
    }
    assert!(checked >= 2, "the workspace has core and the binary at least");
}

#[test]
fn some_crates_stay_light() {
    let metadata = metadata();
    let nodes: BTreeMap<&str, &Value> = metadata["resolve"]["nodes"]
        .as_array()
        .unwrap()
        .iter()
        .map(|node| (node["id"].as_str().unwrap(), node))
        .collect();
    let name_of: BTreeMap<&str, &str> = metadata["packages"]
        .as_array()
        .unwrap()
        .iter()
        .map(|package| (package["id"].as_str().unwrap(), package["name"].as_str().unwrap()))
        .collect();
    for (crate_name, banned) in NEVER_LINKS {
        let Some(root) = name_of.iter().find(|(_, name)| *name == crate_name).map(|(id, _)| *id) else {
            continue;
        };
        let (mut linked, mut left) = (BTreeSet::new(), vec![root]);
        while let Some(id) = left.pop() {
            for dependency in nodes[id]["deps"].as_array().unwrap() {
                // `null` is an ordinary dependency; build and dev ones are not linked.
                let linked_in =
                    dependency["dep_kinds"].as_array().unwrap().iter().any(|kind| kind["kind"].is_null());
                let id = dependency["pkg"].as_str().unwrap();
                if linked_in && linked.insert(id) {
                    left.push(id);
                }
            }
        }
        for id in linked {
            assert!(!banned.contains(&name_of[id]), "{crate_name} links {}", name_of[id]);
        }
    }
}

/// The packages that the program links when it is built with these features.
fn linked_by_the_program(features: &[&str]) -> BTreeSet<String> {
    let output = std::process::Command::new(env!("CARGO"))
        .args(["tree", "--locked", "--offline", "--package", "partage", "--edges", "normal"])
        .args(["--prefix", "none", "--format", "{p}"])
        .args(features)
        .current_dir(env!("CARGO_MANIFEST_DIR"))
        .output()
        .expect("cargo runs");
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    let text = String::from_utf8(output.stdout).unwrap();
    text.lines().filter_map(|line| line.split(' ').next()).map(str::to_string).collect()
}

#[test]
fn program_without_default_features_links_no_simulated_driver() {
    let simulated = ["partage-sim-node", "partage-sim-driver"];
    let default = linked_by_the_program(&[]);
    assert!(simulated.iter().all(|name| default.contains(*name)), "{default:?}");
    let pure = linked_by_the_program(&["--no-default-features"]);
    assert!(pure.contains("partage-agent") && pure.contains("partage-workstation"), "{pure:?}");
    assert!(simulated.iter().all(|name| !pure.contains(*name)), "{pure:?}");
}

#[test]
fn every_crate_takes_the_workspace_lints() {
    let metadata = metadata();
    let members = metadata["workspace_members"].as_array().unwrap();
    for package in metadata["packages"].as_array().unwrap() {
        if !members.contains(&package["id"]) {
            continue;
        }
        let manifest = package["manifest_path"].as_str().unwrap();
        let text = std::fs::read_to_string(manifest).unwrap_or_else(|e| panic!("{manifest}: {e}"));
        assert!(text.contains("[lints]\nworkspace = true"), "{manifest} does not take the workspace's lints");
    }
}

/// The walks of `docs/architecture.md` name files as `crate/path.rs`: a file that is moved or renamed takes its walk with it.
#[test]
fn files_that_the_architecture_names_exist() {
    let workspace = std::path::Path::new(env!("CARGO_MANIFEST_DIR")).join("../..");
    let text = std::fs::read_to_string(workspace.join("docs/architecture.md")).unwrap();
    let quoted = text.split('`').skip(1).step_by(2);
    let files: BTreeSet<&str> = quoted
        .map(|quoted| quoted.split("::").next().unwrap())
        .filter(|file| file.ends_with(".rs") && !file.starts_with("crates/"))
        .collect();
    let is_missing = |file: &&&str| {
        let found = file
            .split_once('/')
            .map(|(name, path)| workspace.join("crates").join(name).join("src").join(path));
        found.is_none_or(|path| !path.is_file())
    };
    let missing: Vec<&&str> = files.iter().filter(is_missing).collect();
    assert!(files.len() > 50, "the walks are gone: {files:?}");
    assert!(missing.is_empty(), "docs/architecture.md names files that do not exist: {missing:?}");
}
