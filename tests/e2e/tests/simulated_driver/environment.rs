//! `partage sim env` as a shell uses it, on a shared object that exports all names.

use partage_driver_api::exports::{DriverLibraryKind, DriverVersion, exports};
use partage_sim_node::install;
use partage_sim_node::node::NodeDir;
use partage_sim_node::profile::GpuProfile;
use std::collections::BTreeSet;
use std::fmt::Write as _;
use std::path::{Path, PathBuf};
use std::process::{Command, Output};
use std::sync::LazyLock;

/// A library whose functions return the length of their name: their behavior is tested elsewhere.
static SHARED_OBJECT: LazyLock<(tempfile::TempDir, PathBuf)> = LazyLock::new(|| {
    let folder = tempfile::tempdir().unwrap();
    let (source, object) = (folder.path().join("all.c"), folder.path().join("all.so"));
    let mut text = String::new();
    let libraries =
        DriverLibraryKind::ALL.into_iter().flat_map(|library| exports(library, DriverVersion::R550));
    let older = DriverLibraryKind::ALL.into_iter().flat_map(|library| exports(library, DriverVersion::R535));
    for name in libraries.chain(older).collect::<BTreeSet<_>>() {
        writeln!(text, "int {name}(void) {{ return {}; }}", name.len()).unwrap();
    }
    // The place of the node's directory.
    let place: Vec<String> = install::marker().iter().map(u8::to_string).collect();
    writeln!(text, "const unsigned char place[{} + 512] = {{ {} }};", place.len(), place.join(", ")).unwrap();
    std::fs::write(&source, text).unwrap();
    let link = "-Wl,-Bsymbolic,--hash-style=gnu,-soname,libpartage_sim.so";
    let mut cc = Command::new("cc");
    assert!(cc.args(["-shared", "-fPIC", link, "-o"]).arg(&object).arg(&source).status().unwrap().success());
    (folder, object)
});

fn partage_command(arguments: &[&str]) -> Command {
    let mut command = Command::new(partage_e2e::partage());
    command.args(arguments).env(install::LIBRARY_VARIABLE, &SHARED_OBJECT.1);
    command.env_remove("LD_LIBRARY_PATH").env_remove("PARTAGE_SIM_DIR");
    command
}

fn text(bytes: &[u8]) -> String {
    String::from_utf8(bytes.to_vec()).unwrap()
}

fn assert_refused(output: &Output) -> String {
    assert_eq!((output.status.code(), text(&output.stdout).as_str()), (Some(2), ""));
    text(&output.stderr)
}

/// Returns the variables of a shell after it evaluated the lines.
fn evaluate_in_shell(lines: &str) -> Vec<String> {
    let script = format!("{lines}\nprintf '%s\\n' \"$PARTAGE_SIM_DIR\" \"$LD_LIBRARY_PATH\"");
    let output = Command::new("sh").args(["-euc", &script]).output().unwrap();
    assert!(output.status.success());
    text(&output.stdout).lines().map(str::to_string).collect()
}

#[test]
fn env_without_dir_makes_a_new_node_each_time() {
    let nodes: Vec<PathBuf> = (0..2)
        .map(|_| {
            let output = partage_command(&["sim", "env", "--gpus", "2", "--model", "t4", "--driver", "535"])
                .output()
                .unwrap();
            assert!(output.status.success(), "{output:?}");
            let words = text(&output.stderr);
            assert!(
                words.starts_with("simulated node: 2 GPUs, Tesla T4, driver 535.261.03; remove it with: "),
                "{words}"
            );
            let variables = evaluate_in_shell(&text(&output.stdout));
            assert_eq!(variables[1], format!("{}/lib", variables[0]));
            assert!(Path::new(&variables[1]).join("libcuda.so.1").is_file());
            PathBuf::from(&variables[0])
        })
        .collect();
    assert_ne!(nodes[0], nodes[1]);
    let uuid = |dir: &Path| NodeDir::open(dir).unwrap().config().gpus[0].uuid.clone();
    assert_ne!(uuid(&nodes[0]), uuid(&nodes[1]));
    let dirs: Vec<&str> = nodes.iter().map(|dir| dir.to_str().unwrap()).collect();
    let removed = partage_command(&["sim", "rm", dirs[0], dirs[1]]).output().unwrap();
    assert_eq!((removed.status.code(), text(&removed.stderr).as_str()), (Some(0), ""));
    assert!(!nodes[0].exists() && !nodes[1].exists());
}

#[test]
fn env_with_dir_reuses_the_node() {
    let folder = tempfile::tempdir().unwrap();
    let dir = folder.path().join("it's a node");
    let dir = dir.to_str().unwrap();
    let made = partage_command(&["sim", "env", "--dir", dir, "--gpus", "3"]).output().unwrap();
    let again = partage_command(&["sim", "env", "--dir", dir]).output().unwrap();
    let asked = ["sim", "env", "--dir", dir, "--gpus", "3", "--model", "A100-SXM4-40GB", "--driver", "550"];
    let exactly = partage_command(&asked).output().unwrap();
    assert!(
        made.status.success() && again.status.success() && exactly.status.success(),
        "{made:?} {again:?}"
    );
    assert_eq!((&made.stdout, &made.stdout), (&again.stdout, &exactly.stdout));
    assert_eq!(evaluate_in_shell(&text(&made.stdout))[0], dir);
    for (asked, words) in [
        (["--gpus", "4"], "it has 3 GPUs, requested 4"),
        (["--model", "T4"], "its model is A100-SXM4-40GB, requested T4"),
        (["--driver", "535"], "its driver is 550.163.01, requested 535.261.03"),
        (["--seed", "1"], "requested 1"),
        (["--slice-micros", "500"], "its time slice is 2000, requested 500"),
        (["--kernel-micros", "0"], "its kernel time is 10, requested 0"),
        (["--queue", "2"], "its queue is 1024, requested 2"),
    ] {
        let error = assert_refused(
            &partage_command(&["sim", "env", "--dir", dir, asked[0], asked[1]]).output().unwrap(),
        );
        assert!(error.contains("is another node: ") && error.contains(words), "{error}");
    }
    // A node that is removed and created again has the same GPUs.
    let before = NodeDir::open(Path::new(dir)).unwrap();
    assert!(partage_command(&["sim", "rm", dir]).status().unwrap().success());
    assert!(partage_command(&["sim", "env", "--dir", dir, "--gpus", "3"]).output().unwrap().status.success());
    assert_eq!(NodeDir::open(Path::new(dir)).unwrap().config(), before.config());
}

#[test]
fn node_gets_the_requested_settings() {
    let folder = tempfile::tempdir().unwrap();
    let dir = folder.path().join("node");
    let env = ["sim", "env", "--dir", dir.to_str().unwrap()];
    let asked = [&env[..], &["--slice-micros", "500", "--kernel-micros", "0"]].concat();
    assert!(partage_command(&asked).output().unwrap().status.success());
    let settings = NodeDir::open(&dir).unwrap().config().settings.clone();
    assert_eq!((settings.slice_micros, settings.kernel_micros, settings.queue), (500, 0, 1024));
    assert!(
        partage_command(&asked).output().unwrap().status.success()
            && partage_command(&env).output().unwrap().status.success()
    );
    let other = folder.path().join("other");
    let wrong = ["sim", "env", "--dir", other.to_str().unwrap(), "--queue", "0"];
    assert!(
        assert_refused(&partage_command(&wrong).output().unwrap())
            .contains("settings.queue is 0: use 1 to 1048576")
    );
    assert!(!other.exists());
}

#[test]
fn library_path_keeps_existing_entries() {
    let folder = tempfile::tempdir().unwrap();
    let (a, b) = (folder.path().join("a"), folder.path().join("b"));
    let env = |dir: &Path, there: &str, before: Option<&Path>| {
        let mut command = partage_command(&["sim", "env", "-o", "json", "--dir", dir.to_str().unwrap()]);
        command.env("LD_LIBRARY_PATH", there).envs(before.map(|dir| ("PARTAGE_SIM_DIR", dir)));
        let answer: serde_json::Value = serde_json::from_slice(&command.output().unwrap().stdout).unwrap();
        answer["LD_LIBRARY_PATH"].as_str().unwrap().to_string()
    };
    let first = env(&a, "/opt/one:/opt/two", None);
    assert_eq!(first, format!("{}/lib:/opt/one:/opt/two", a.display()));
    assert_eq!(env(&a, &first, Some(&a)), first, "the same node is not added twice");
    assert_eq!(
        env(&b, &first, Some(&a)),
        format!("{}/lib:/opt/one:/opt/two", b.display()),
        "another node replaces it"
    );
}

#[test]
fn list_has_every_profile() {
    let output = partage_command(&["sim", "list", "-o", "json"]).output().unwrap();
    let cards: Vec<GpuProfile> = serde_json::from_slice(&output.stdout).unwrap();
    assert!(cards.iter().eq(GpuProfile::ALL));
}

#[test]
fn profile_is_read_from_a_file() {
    let folder = tempfile::tempdir().unwrap();
    let (file, dir) = (folder.path().join("small.json"), folder.path().join("node"));
    std::fs::write(&file, r#"{"base": "T4", "model": "T4-8GB", "memory": {"total": 8589934592}}"#).unwrap();
    let asked = ["sim", "env", "--model", file.to_str().unwrap(), "--dir", dir.to_str().unwrap()];
    assert!(partage_command(&asked).output().unwrap().status.success());
    assert_eq!(NodeDir::open(&dir).unwrap().config().profile(0).unwrap().memory.total, 8 << 30);
    std::fs::write(&file, r#"{"base": "T4", "model": "T4-8GB", "memory": {"total": 4294967296}}"#).unwrap();
    assert!(
        assert_refused(&partage_command(&asked).output().unwrap())
            .contains("its T4-8GB has other properties")
    );
}

#[test]
fn missing_shared_object_is_reported_and_leaves_nothing() {
    let folder = tempfile::tempdir().unwrap();
    let dir = folder.path().join("node");
    let mut command = partage_command(&["sim", "env", "--dir", dir.to_str().unwrap()]);
    let error = assert_refused(
        &command.env(install::LIBRARY_VARIABLE, "/nowhere/libpartage_sim.so").output().unwrap(),
    );
    assert!(error.contains("was not found at /nowhere/libpartage_sim.so"), "{error}");
    assert!(!dir.exists());
}

#[test]
fn missing_node_is_reported_with_how_to_create_one() {
    for arguments in [["sim", "top", "--once"], ["sim", "inject", "lost"]].map(Vec::from) {
        let error = assert_refused(&partage_command(&arguments).output().unwrap());
        assert!(
            error.starts_with("error: no simulated node specified: ") && error.contains("--dir"),
            "{error}"
        );
        assert!(error.contains("eval \"$(partage sim env)\""), "{error}");
    }
}
