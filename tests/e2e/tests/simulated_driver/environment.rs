//! `partage sim env` as a shell uses it, on a shared object that has all the names.

use partage_driver_api::exports::{DriverVersion, Library, exports};
use partage_sim_node::install;
use partage_sim_node::node::NodeDir;
use partage_sim_node::profile::Profile;
use std::collections::BTreeSet;
use std::fmt::Write as _;
use std::path::{Path, PathBuf};
use std::process::{Command, Output};
use std::sync::LazyLock;

/// Functions that answer the length of their name: what they do is another test's.
static OBJECT: LazyLock<(tempfile::TempDir, PathBuf)> = LazyLock::new(|| {
    let folder = tempfile::tempdir().unwrap();
    let (source, object) = (folder.path().join("all.c"), folder.path().join("all.so"));
    let mut text = String::new();
    let libraries = Library::ALL.into_iter().flat_map(|library| exports(library, DriverVersion::R550));
    let older = Library::ALL.into_iter().flat_map(|library| exports(library, DriverVersion::R535));
    for name in libraries.chain(older).collect::<BTreeSet<_>>() {
        writeln!(text, "int {name}(void) {{ return {}; }}", name.len()).unwrap();
    }
    // The place of the node's folder.
    let place: Vec<String> = install::marker().iter().map(u8::to_string).collect();
    writeln!(text, "const unsigned char place[{} + 512] = {{ {} }};", place.len(), place.join(", ")).unwrap();
    std::fs::write(&source, text).unwrap();
    let link = "-Wl,-Bsymbolic,--hash-style=gnu,-soname,libpartage_sim.so";
    let mut cc = Command::new("cc");
    assert!(cc.args(["-shared", "-fPIC", link, "-o"]).arg(&object).arg(&source).status().unwrap().success());
    (folder, object)
});

fn partage(arguments: &[&str]) -> Command {
    let mut command = Command::new(partage_e2e::partage());
    command.args(arguments).env(install::VARIABLE, &OBJECT.1);
    command.env_remove("LD_LIBRARY_PATH").env_remove("PARTAGE_SIM_DIR");
    command
}

fn text(bytes: &[u8]) -> String {
    String::from_utf8(bytes.to_vec()).unwrap()
}

fn refused(output: &Output) -> String {
    assert_eq!((output.status.code(), text(&output.stdout).as_str()), (Some(2), ""));
    text(&output.stderr)
}

/// What a shell has after it evaluated the lines.
fn evaluated(lines: &str) -> Vec<String> {
    let script = format!("{lines}\nprintf '%s\\n' \"$PARTAGE_SIM_DIR\" \"$LD_LIBRARY_PATH\"");
    let output = Command::new("sh").args(["-euc", &script]).output().unwrap();
    assert!(output.status.success());
    text(&output.stdout).lines().map(str::to_string).collect()
}

#[test]
fn a_fresh_node_every_time() {
    let nodes: Vec<PathBuf> = (0..2)
        .map(|_| {
            let output =
                partage(&["sim", "env", "--gpus", "2", "--model", "t4", "--driver", "535"]).output().unwrap();
            assert!(output.status.success(), "{output:?}");
            let words = text(&output.stderr);
            assert!(
                words.starts_with("simulated node: 2 GPUs, Tesla T4, driver 535.261.03; remove it with: "),
                "{words}"
            );
            let variables = evaluated(&text(&output.stdout));
            assert_eq!(variables[1], format!("{}/lib", variables[0]));
            assert!(Path::new(&variables[1]).join("libcuda.so.1").is_file());
            PathBuf::from(&variables[0])
        })
        .collect();
    assert_ne!(nodes[0], nodes[1]);
    let uuid = |dir: &Path| NodeDir::open(dir).unwrap().config().gpus[0].uuid.clone();
    assert_ne!(uuid(&nodes[0]), uuid(&nodes[1]));
    let dirs: Vec<&str> = nodes.iter().map(|dir| dir.to_str().unwrap()).collect();
    let removed = partage(&["sim", "rm", dirs[0], dirs[1]]).output().unwrap();
    assert_eq!((removed.status.code(), text(&removed.stderr).as_str()), (Some(0), ""));
    assert!(!nodes[0].exists() && !nodes[1].exists());
}

#[test]
fn a_named_node_is_the_same_again() {
    let folder = tempfile::tempdir().unwrap();
    let dir = folder.path().join("it's a node");
    let dir = dir.to_str().unwrap();
    let made = partage(&["sim", "env", "--dir", dir, "--gpus", "3"]).output().unwrap();
    let again = partage(&["sim", "env", "--dir", dir]).output().unwrap();
    let asked = ["sim", "env", "--dir", dir, "--gpus", "3", "--model", "A100-SXM4-40GB", "--driver", "550"];
    let exactly = partage(&asked).output().unwrap();
    assert!(
        made.status.success() && again.status.success() && exactly.status.success(),
        "{made:?} {again:?}"
    );
    assert_eq!((&made.stdout, &made.stdout), (&again.stdout, &exactly.stdout));
    assert_eq!(evaluated(&text(&made.stdout))[0], dir);
    for (asked, words) in [
        (["--gpus", "4"], "it has 3 GPUs, asked were 4"),
        (["--model", "T4"], "its model is A100-SXM4-40GB, asked was T4"),
        (["--driver", "535"], "its driver is 550.163.01, asked was 535.261.03"),
        (["--seed", "1"], "asked was 1"),
        (["--slice-micros", "500"], "its slice is 2000, asked was 500"),
        (["--kernel-micros", "0"], "its kernel time is 10, asked was 0"),
        (["--queue", "2"], "its queue is 1024, asked was 2"),
    ] {
        let error = refused(&partage(&["sim", "env", "--dir", dir, asked[0], asked[1]]).output().unwrap());
        assert!(error.contains("is another node: ") && error.contains(words), "{error}");
    }
    // Removed and made again it has the same GPUs.
    let before = NodeDir::open(Path::new(dir)).unwrap();
    assert!(partage(&["sim", "rm", dir]).status().unwrap().success());
    assert!(partage(&["sim", "env", "--dir", dir, "--gpus", "3"]).output().unwrap().status.success());
    assert_eq!(NodeDir::open(Path::new(dir)).unwrap().config(), before.config());
}

#[test]
fn a_node_has_the_settings_that_were_asked_for() {
    let folder = tempfile::tempdir().unwrap();
    let dir = folder.path().join("node");
    let env = ["sim", "env", "--dir", dir.to_str().unwrap()];
    let asked = [&env[..], &["--slice-micros", "500", "--kernel-micros", "0"]].concat();
    assert!(partage(&asked).output().unwrap().status.success());
    let settings = NodeDir::open(&dir).unwrap().config().settings.clone();
    assert_eq!((settings.slice_micros, settings.kernel_micros, settings.queue), (500, 0, 1024));
    assert!(
        partage(&asked).output().unwrap().status.success()
            && partage(&env).output().unwrap().status.success()
    );
    let other = folder.path().join("other");
    let wrong = ["sim", "env", "--dir", other.to_str().unwrap(), "--queue", "0"];
    assert!(refused(&partage(&wrong).output().unwrap()).contains("settings.queue is 0: use 1 to 1048576"));
    assert!(!other.exists());
}

#[test]
fn the_library_path_keeps_what_was_there() {
    let folder = tempfile::tempdir().unwrap();
    let (a, b) = (folder.path().join("a"), folder.path().join("b"));
    let env = |dir: &Path, there: &str, before: Option<&Path>| {
        let mut command = partage(&["sim", "env", "-o", "json", "--dir", dir.to_str().unwrap()]);
        command.env("LD_LIBRARY_PATH", there).envs(before.map(|dir| ("PARTAGE_SIM_DIR", dir)));
        let answer: serde_json::Value = serde_json::from_slice(&command.output().unwrap().stdout).unwrap();
        answer["LD_LIBRARY_PATH"].as_str().unwrap().to_string()
    };
    let first = env(&a, "/opt/one:/opt/two", None);
    assert_eq!(first, format!("{}/lib:/opt/one:/opt/two", a.display()));
    assert_eq!(env(&a, &first, Some(&a)), first, "the same node twice");
    assert_eq!(
        env(&b, &first, Some(&a)),
        format!("{}/lib:/opt/one:/opt/two", b.display()),
        "another node instead"
    );
}

#[test]
fn the_list_has_every_figure() {
    let output = partage(&["sim", "list", "-o", "json"]).output().unwrap();
    let cards: Vec<Profile> = serde_json::from_slice(&output.stdout).unwrap();
    assert!(cards.iter().eq(Profile::ALL));
}

#[test]
fn a_card_from_a_file() {
    let folder = tempfile::tempdir().unwrap();
    let (file, dir) = (folder.path().join("small.json"), folder.path().join("node"));
    std::fs::write(&file, r#"{"base": "T4", "model": "T4-8GB", "memory": {"total": 8589934592}}"#).unwrap();
    let asked = ["sim", "env", "--model", file.to_str().unwrap(), "--dir", dir.to_str().unwrap()];
    assert!(partage(&asked).output().unwrap().status.success());
    assert_eq!(NodeDir::open(&dir).unwrap().config().profile(0).unwrap().memory.total, 8 << 30);
    std::fs::write(&file, r#"{"base": "T4", "model": "T4-8GB", "memory": {"total": 4294967296}}"#).unwrap();
    assert!(refused(&partage(&asked).output().unwrap()).contains("its T4-8GB has other figures"));
}

#[test]
fn a_shared_object_that_is_nowhere_is_said_and_nothing_stays() {
    let folder = tempfile::tempdir().unwrap();
    let dir = folder.path().join("node");
    let mut command = partage(&["sim", "env", "--dir", dir.to_str().unwrap()]);
    let error = refused(&command.env(install::VARIABLE, "/nowhere/libpartage_sim.so").output().unwrap());
    assert!(error.contains("libpartage_sim.so is not there") && error.contains("/nowhere/"), "{error}");
    assert!(!dir.exists());
}

#[test]
fn without_a_node_it_is_said_how_to_get_one() {
    for arguments in [["sim", "top", "--once"], ["sim", "inject", "lost"]].map(Vec::from) {
        let error = refused(&partage(&arguments).output().unwrap());
        assert!(error.starts_with("error: which simulated node? ") && error.contains("--dir"), "{error}");
        assert!(error.contains("eval \"$(partage sim env)\""), "{error}");
    }
}
