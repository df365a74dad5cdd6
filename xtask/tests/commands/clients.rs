//! The real clients of the simulated driver: they are complete, each runs without a driver, and missing ones are
//! reported.

use crate::test_dir::{TestDir, xtask};
use partage_testkit::skip_or_fail;
use partage_xtask::clients::{Clients, DriverBranch};
use std::fs;
use std::path::Path;
use std::process::Command;

/// Returns the whole output of a program that finds no driver.
fn output_of(program: &Path, arguments: &[&str]) -> String {
    let output = Command::new(program).args(arguments).env_remove("LD_LIBRARY_PATH").output().unwrap();
    String::from_utf8([output.stdout, output.stderr].concat()).unwrap()
}

fn clients() -> Option<Clients> {
    Clients::ready().map_err(|missing| skip_or_fail(&missing)).ok()
}

#[test]
fn nvidia_smi_of_both_branches_runs_without_a_driver() {
    let Some(clients) = clients() else { return };
    for (branch, version) in [(DriverBranch::R535, "535."), (DriverBranch::R550, "550.")] {
        let program = clients.nvidia_smi(branch);
        let output_text = output_of(&program, &["-L"]);
        assert!(output_text.contains("NVIDIA") || output_text.contains("NVML"), "{branch:?}: {output_text}");
        // It prints its version only with a driver; without one the version string in the file is checked.
        let bytes = fs::read(&program).unwrap();
        let start = [b"\0", version.as_bytes()].concat();
        assert!(bytes.windows(start.len()).any(|window| window == start), "{branch:?} is not {version}x");
    }
}

#[test]
fn nvtop_prints_its_version() {
    let Some(clients) = clients() else { return };
    let output_text = output_of(&clients.nvtop(), &["--version"]);
    assert!(output_text.starts_with("nvtop version 3.0."), "{output_text}");
}

#[test]
fn python_clients_have_the_pinned_versions() {
    let Some(clients) = clients() else { return };
    let script =
        "import importlib.metadata as m\nfor d in m.distributions(): print(d.name.lower(), d.version)";
    let installed = output_of(&clients.python(), &["-c", script]);
    for line in include_str!("../../clients-requirements.txt").lines() {
        let Some((name, version)) = line.split_once("==") else { continue };
        assert!(installed.lines().any(|line| line == format!("{name} {version}")), "{name}: {installed}");
    }
}

#[test]
fn python_clients_run_without_a_driver() {
    let Some(clients) = clients() else { return };
    let python = clients.python();
    assert!(output_of(&python, &["-m", "gpustat", "--version"]).contains("1.1.1"));
    assert!(output_of(&python, &["-m", "nvitop", "--version"]).contains("1.7.2"));
    let script =
        "import pynvml\ntry: pynvml.nvmlInit(); print('a driver')\nexcept pynvml.NVMLError as e: print(e)";
    let output_text = output_of(&python, &["-c", script]);
    assert!(
        output_text.contains("NVML Shared Library Not Found") || output_text.contains("river"),
        "{output_text}"
    );
}

#[test]
fn numba_compiles_ptx_and_cuda_python_imports() {
    let Some(clients) = clients() else { return };
    let script = "\
import cuda.bindings.driver
from numba import cuda, float32
from numba.cuda import compile_ptx
def double(x):
    x[cuda.grid(1)] *= 2
print(compile_ptx(double, (float32[:],), cc=(8, 0))[0])
";
    let output_text = output_of(&clients.python(), &["-c", script]);
    assert!(output_text.contains(".target sm_80") && output_text.contains("double"), "{output_text}");
}

#[test]
fn missing_clients_are_named() {
    let folder = TestDir::new();
    let (code, out, err) = xtask(&["clients", "--check"], &[("XDG_CACHE_HOME", folder.path())]);
    assert_eq!(code, 1);
    assert!(out.contains("  nvidia-smi-535           missing\n"), "{out}");
    assert!(
        err.starts_with(
            "error: 4 of 4 clients of the simulated driver are not fetched (nvidia-smi-535, nvidia-smi-550, nvtop, python) in "
        ),
        "{err}"
    );
    assert!(err.ends_with("; run `make binaries`\n"), "{err}");
    assert_eq!(fs::read_dir(folder.path()).unwrap().count(), 0, "nothing is left behind");
}

#[test]
fn missing_apt_is_reported() {
    let folder = TestDir::new();
    let (empty, cache) = (folder.path().join("path"), folder.path().join("cache"));
    let (code, _, err) = xtask(&["clients"], &[("PATH", &empty), ("XDG_CACHE_HOME", &cache)]);
    assert_eq!(code, 1);
    assert!(err.contains("apt-get is not installed; fetch on Debian or a derivative"), "{err}");
}

#[test]
fn network_failure_is_reported_with_what_to_check() {
    let folder = TestDir::new();
    let cache = folder.path().join("cache");
    folder.program(
        "tools/apt-get",
        "case \"$*\" in *indextargets*) echo http://mirror.example/debian/ bookworm;; \
         *) echo 'E: Failed to fetch http://mirror.example/debian/x  Could not resolve'; exit 100;; esac",
    );
    let tools = folder.path().join("tools");
    let (code, out, err) = xtask(&["clients"], &[("PATH", &tools), ("XDG_CACHE_HOME", &cache)]);
    assert_eq!(code, 1, "{out}");
    assert!(out.contains("Debian's package lists") && out.contains("failed"), "{out}");
    assert!(err.contains("check the network and apt's sources and proxy, and try again"), "{err}");
    let key = fs::read_dir(cache.join("partage/clients")).unwrap().next().unwrap().unwrap().path();
    let left: Vec<_> = fs::read_dir(key).unwrap().map(|entry| entry.unwrap().file_name()).collect();
    assert_eq!(left, ["lock"], "no unfinished files are left behind");
}
