//! The real clients of the simulated driver: they are whole, each runs without a driver, and what is missing is said.

use crate::folder::{Folder, xtask};
use partage_testkit::skip_or_fail;
use partage_xtask::clients::{Branch, Clients};
use std::fs;
use std::path::Path;
use std::process::Command;

/// Everything a program says, without a driver on its way.
fn said(program: &Path, arguments: &[&str]) -> String {
    let output = Command::new(program).args(arguments).env_remove("LD_LIBRARY_PATH").output().unwrap();
    String::from_utf8([output.stdout, output.stderr].concat()).unwrap()
}

fn clients() -> Option<Clients> {
    Clients::ready().map_err(|missing| skip_or_fail(&missing)).ok()
}

#[test]
fn both_nvidia_smi_ask_for_the_driver() {
    let Some(clients) = clients() else { return };
    for (branch, version) in [(Branch::R535, "535."), (Branch::R550, "550.")] {
        let program = clients.nvidia_smi(branch);
        let said = said(&program, &["-L"]);
        assert!(said.contains("NVIDIA") || said.contains("NVML"), "{branch:?}: {said}");
        // Its version is only said with a driver; until then, it is the one written in it.
        let bytes = fs::read(&program).unwrap();
        let start = [b"\0", version.as_bytes()].concat();
        assert!(bytes.windows(start.len()).any(|window| window == start), "{branch:?} is not {version}x");
    }
}

#[test]
fn nvtop_says_its_version() {
    let Some(clients) = clients() else { return };
    let said = said(&clients.nvtop(), &["--version"]);
    assert!(said.starts_with("nvtop version 3.0."), "{said}");
}

#[test]
fn the_python_clients_are_the_pinned_ones() {
    let Some(clients) = clients() else { return };
    let script =
        "import importlib.metadata as m\nfor d in m.distributions(): print(d.name.lower(), d.version)";
    let installed = said(&clients.python(), &["-c", script]);
    for line in include_str!("../../clients-requirements.txt").lines() {
        let Some((name, version)) = line.split_once("==") else { continue };
        assert!(installed.lines().any(|line| line == format!("{name} {version}")), "{name}: {installed}");
    }
}

#[test]
fn the_python_clients_look_for_a_driver() {
    let Some(clients) = clients() else { return };
    let python = clients.python();
    assert!(said(&python, &["-m", "gpustat", "--version"]).contains("1.1.1"));
    assert!(said(&python, &["-m", "nvitop", "--version"]).contains("1.7.2"));
    let script =
        "import pynvml\ntry: pynvml.nvmlInit(); print('a driver')\nexcept pynvml.NVMLError as e: print(e)";
    let said = said(&python, &["-c", script]);
    assert!(said.contains("NVML Shared Library Not Found") || said.contains("river"), "{said}");
}

#[test]
fn numba_compiles_and_cuda_python_loads() {
    let Some(clients) = clients() else { return };
    let script = "\
import cuda.bindings.driver
from numba import cuda, float32
from numba.cuda import compile_ptx
def double(x):
    x[cuda.grid(1)] *= 2
print(compile_ptx(double, (float32[:],), cc=(8, 0))[0])
";
    let said = said(&clients.python(), &["-c", script]);
    assert!(said.contains(".target sm_80") && said.contains("double"), "{said}");
}

#[test]
fn what_is_missing_is_named() {
    let folder = Folder::new();
    let (code, out, err) = xtask(&["clients", "--check"], &[("XDG_CACHE_HOME", folder.path())]);
    assert_eq!(code, 1);
    assert!(out.contains("  nvidia-smi-535           not there\n"), "{out}");
    assert!(
        err.starts_with(
            "error: 4 of 4 clients of the simulated driver are not there (nvidia-smi-535, nvidia-smi-550, nvtop, python) in "
        ),
        "{err}"
    );
    assert!(err.ends_with("; run `make binaries`, once\n"), "{err}");
    assert_eq!(fs::read_dir(folder.path()).unwrap().count(), 0, "nothing is left behind");
}

#[test]
fn without_debian_it_says_so() {
    let folder = Folder::new();
    let (empty, cache) = (folder.path().join("path"), folder.path().join("cache"));
    let (code, _, err) = xtask(&["clients"], &[("PATH", &empty), ("XDG_CACHE_HOME", &cache)]);
    assert_eq!(code, 1);
    assert!(err.contains("there is no apt-get here; fetch on Debian or on a system made from it"), "{err}");
}

#[test]
fn without_a_network_it_says_where_to_look() {
    let folder = Folder::new();
    let cache = folder.path().join("cache");
    folder.program(
        "tools/apt-get",
        "case \"$*\" in *indextargets*) echo http://mirror.example/debian/ bookworm;; \
         *) echo 'E: Failed to fetch http://mirror.example/debian/x  Could not resolve'; exit 100;; esac",
    );
    let tools = folder.path().join("tools");
    let (code, out, err) = xtask(&["clients"], &[("PATH", &tools), ("XDG_CACHE_HOME", &cache)]);
    assert_eq!(code, 1, "{out}");
    assert!(out.contains("Debian's package lists") && out.contains("not done"), "{out}");
    assert!(err.contains("look at the network and at apt's sources and proxy, then repeat"), "{err}");
    let key = fs::read_dir(cache.join("partage/clients")).unwrap().next().unwrap().unwrap().path();
    let left: Vec<_> = fs::read_dir(key).unwrap().map(|entry| entry.unwrap().file_name()).collect();
    assert_eq!(left, ["lock"], "nothing half is left behind");
}
