//! Checks the layers of the architecture: which crate may depend on which.
//!
//! Dependencies go down only. A crate that is missing in the table below fails the test: add it to its layer first.
#![allow(clippy::unwrap_used, clippy::expect_used)]

use serde_json::Value;
use std::collections::{BTreeMap, BTreeSet};

/// The crates of the workspace and the crates that each may depend on. Tests may also use [`TEST_CRATES`].
const ALLOWED_DEPENDENCIES: &[(&str, &[&str])] = &[
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

/// Crates that only tests and `make` use: they may depend on all others, and no product crate links them.
const DEVELOPMENT: &[&str] = &["partage-e2e", "partage-testkit", "partage-xtask"];

/// Crates that the tests of every crate may use.
const TEST_CRATES: &[&str] = &["partage-testkit", "partage-sim-node", "partage-sim-driver"];

/// Packages that a crate must not link, not even transitively.
const FORBIDDEN_PACKAGES: &[(&str, &[&str])] = &[
    // Loaded into processes of users.
    ("partage-shim", &["serde", "serde_json", "tokio", "kube"]),
    ("partage-region", &["serde", "tokio", "kube"]),
    // Pure decisions, without I/O.
    ("partage-core", &["tokio", "kube", "k8s-openapi", "tonic", "libc", "rustix"]),
    // Loaded into programs as their driver.
    ("partage-sim-driver", &["tokio", "kube", "k8s-openapi", "tonic", "clap"]),
    // A table of functions: driver-api must not depend on system crates.
    ("partage-driver-api", &["libc", "serde", "rustix"]),
    // These build and install test programs.
    ("partage", DEVELOPMENT),
];

fn metadata() -> Value {
    let output = std::process::Command::new(env!("CARGO"))
        // Only packages of this platform: others may not have been downloaded.
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
fn dependencies_follow_the_layers() {
    let metadata = metadata();
    let members: BTreeSet<&str> =
        metadata["workspace_members"].as_array().unwrap().iter().map(|id| id.as_str().unwrap()).collect();
    let ours = metadata["packages"].as_array().unwrap().iter();
    let ours: Vec<&Value> =
        ours.filter(|package| members.contains(package["id"].as_str().unwrap())).collect();
    let our_names: BTreeSet<String> =
        ours.iter().map(|package| package["name"].as_str().unwrap().to_string()).collect();
    let may_use: BTreeMap<&str, &[&str]> = ALLOWED_DEPENDENCIES.iter().copied().collect();
    let mut checked = 0;
    for package in ours {
        let name = package["name"].as_str().unwrap();
        if DEVELOPMENT.contains(&name) {
            continue;
        }
        let allowed = may_use
            .get(name)
            .unwrap_or_else(|| panic!("{name} has no layer: add it to ALLOWED_DEPENDENCIES"));
        for dependency in package["dependencies"].as_array().unwrap() {
            let used = dependency["name"].as_str().unwrap();
            let for_tests = dependency["kind"] == "dev";
            if our_names.contains(used) && !(for_tests && TEST_CRATES.contains(&used)) {
                assert!(allowed.contains(&used), "{name} must not depend on {used}");
            }
        }
        checked += 1;
    }
    assert!(checked >= 2, "the workspace has at least core and the binary");
}

#[test]
fn forbidden_packages_are_not_linked() {
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
    for (crate_name, banned) in FORBIDDEN_PACKAGES {
        let Some(root) = name_of.iter().find(|(_, name)| *name == crate_name).map(|(id, _)| *id) else {
            continue;
        };
        let (mut linked, mut left) = (BTreeSet::new(), vec![root]);
        while let Some(id) = left.pop() {
            for dependency in nodes[id]["deps"].as_array().unwrap() {
                // `null` is a normal dependency; build and dev dependencies are not linked.
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

/// Returns the packages that the program links when it is built with these features.
fn linked_packages(features: &[&str]) -> BTreeSet<String> {
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
    let default = linked_packages(&[]);
    assert!(simulated.iter().all(|name| default.contains(*name)), "{default:?}");
    let pure = linked_packages(&["--no-default-features"]);
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

#[test]
fn fuzz_workflow_runs_for_every_crate_that_fuzz_targets_link() {
    let workspace = std::path::Path::new(env!("CARGO_MANIFEST_DIR")).join("../..");
    let read = |path: &str| std::fs::read_to_string(workspace.join(path)).unwrap();
    let (manifest, workflow) = (read("fuzz/Cargo.toml"), read(".github/workflows/fuzz.yaml"));
    let linked = manifest.split("path = \"../").skip(1).filter_map(|rest| rest.split('"').next());
    let linked: Vec<&str> = linked.collect();
    assert!(linked.contains(&"crates/core"), "{linked:?}");
    let is_missing = |path: &&&str| !workflow.contains(&format!("- {path}/**\n"));
    let missing: Vec<&&str> = linked.iter().filter(is_missing).collect();
    assert!(missing.is_empty(), ".github/workflows/fuzz.yaml does not run for {missing:?}");
}

/// `CONTRIBUTING.md` names files by their paths in the repository.
#[test]
fn files_named_in_the_contributing_page_exist() {
    let workspace = std::path::Path::new(env!("CARGO_MANIFEST_DIR")).join("../..");
    let text = std::fs::read_to_string(workspace.join("CONTRIBUTING.md")).unwrap();
    let roots = ["crates/", "tests/", "fuzz/", "xtask/", "docs/"];
    let quoted = text.split('`').skip(1).step_by(2);
    let named: BTreeSet<&str> =
        quoted.filter(|quoted| roots.iter().any(|root| quoted.starts_with(root))).collect();
    let missing: Vec<&&str> = named.iter().filter(|path| !workspace.join(path).exists()).collect();
    assert!(named.len() > 15, "the page names few files: {named:?}");
    assert!(missing.is_empty(), "CONTRIBUTING.md names files that do not exist: {missing:?}");
}

/// Returns the text of `docs/architecture.md`.
fn architecture_page() -> String {
    let path = std::path::Path::new(env!("CARGO_MANIFEST_DIR")).join("../../docs/architecture.md");
    std::fs::read_to_string(path).unwrap()
}

/// `docs/architecture.md` names files as `crate/path.rs` and functions as `crate/path.rs::function`: a change that moves one of
/// them must update the page.
#[test]
fn files_named_in_the_architecture_page_exist() {
    let crates = std::path::Path::new(env!("CARGO_MANIFEST_DIR")).join("..");
    let text = architecture_page();
    let quoted = text.split('`').skip(1).step_by(2);
    let named: BTreeSet<(&str, Option<&str>)> = quoted
        .map(|quoted| quoted.split_once("::").map_or((quoted, None), |(file, item)| (file, Some(item))))
        .filter(|(file, _)| file.ends_with(".rs") && !file.starts_with("crates/"))
        .collect();
    let is_missing = |(file, function): &&(&str, Option<&str>)| {
        let path = file.split_once('/').map(|(name, path)| crates.join(name).join("src").join(path));
        let Some(code) = path.and_then(|path| std::fs::read_to_string(path).ok()) else { return true };
        let defines =
            |function: &str| ["(", "<"].iter().any(|after| code.contains(&format!("fn {function}{after}")));
        function.is_some_and(|function| !defines(function))
    };
    let missing: Vec<_> = named.iter().filter(is_missing).collect();
    assert!(named.len() > 70, "the page names few files: {named:?}");
    assert!(
        missing.is_empty(),
        "docs/architecture.md names files or functions that do not exist: {missing:?}"
    );
}

/// The boxes of `docs/architecture.md` are the map of two crates: a new module must be added to them.
#[test]
fn boxes_of_the_architecture_page_name_every_module() {
    let text = architecture_page();
    let crates = std::path::Path::new(env!("CARGO_MANIFEST_DIR")).join("..");
    for (name, heading) in [("agent", "\n## Inside `agent`"), ("host", "\n## Inside `host`")] {
        let section = text.split_once(heading).unwrap().1;
        let drawing = section.split("```").nth(1).unwrap();
        let words: BTreeSet<&str> =
            drawing.split(|letter: char| !letter.is_ascii_alphanumeric() && letter != '_').collect();
        let modules: Vec<String> = std::fs::read_dir(crates.join(name).join("src"))
            .unwrap()
            .filter_map(|entry| entry.unwrap().file_name().into_string().ok())
            .filter_map(|file| file.strip_suffix(".rs").map(str::to_string))
            .filter(|module| module != "lib")
            .collect();
        assert!(modules.len() > 10, "{modules:?}");
        let missing: Vec<&String> =
            modules.iter().filter(|module| !words.contains(module.as_str())).collect();
        assert!(missing.is_empty(), "the box of {name} in docs/architecture.md lacks {missing:?}");
    }
}
