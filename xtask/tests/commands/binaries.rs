//! `partage-xtask binaries` in situations where it fails: each failure is one clear message, and nothing is left
//! behind.

use crate::test_dir::{TestDir, xtask};
use std::fs;
use std::os::unix::fs::PermissionsExt;

const ALL_PROGRAMS: [&str; 15] = [
    "busybox",
    "bpftool",
    "etcd",
    "runc",
    "bridge",
    "host-local",
    "loopback",
    "containerd",
    "containerd-shim-runc-v2",
    "ctr",
    "kubectl",
    "kube-scheduler",
    "kube-apiserver",
    "kube-controller-manager",
    "kubelet",
];

#[test]
fn missing_go_is_reported_with_the_required_version() {
    let folder = TestDir::new();
    let (empty, cache) = (folder.path().join("path"), folder.path().join("cache"));
    for arguments in [&["binaries"][..], &["binaries", "--check"]] {
        let (code, out, err) = xtask(arguments, &[("PATH", &empty), ("XDG_CACHE_HOME", &cache)]);
        assert_eq!((code, out.as_str()), (1, ""));
        assert!(err.starts_with("error: no Go compiler on the PATH"), "{err}");
        assert!(err.contains("Go 1.26.8 or newer") && err.contains("https://go.dev/dl"), "{err}");
    }
    assert!(!cache.exists(), "nothing is left behind");
}

#[test]
fn programs_of_the_bin_dir_are_listed_with_versions() {
    let folder = TestDir::new();
    for name in ALL_PROGRAMS {
        folder.program(name, &format!("echo {name} v1.36.4"));
    }
    let (code, out, err) = xtask(&["binaries"], &[("PARTAGE_KUBE_BIN_DIR", folder.path())]);
    assert_eq!((code, err.as_str()), (0, ""), "{out}");
    assert!(out.contains("  kubelet                  1.36.4\n"), "{out}");
    assert!(out.contains("  etcd                     1.36.4 (tested with 3.6.16)\n"), "{out}");
}

#[test]
fn missing_programs_of_the_bin_dir_are_named() {
    let folder = TestDir::new();
    for name in ALL_PROGRAMS.iter().filter(|name| **name != "kubelet") {
        folder.program(name, "echo v1.36.4");
    }
    let etcd = folder.path().join("etcd");
    fs::set_permissions(&etcd, fs::Permissions::from_mode(0o644)).unwrap();
    let (code, out, err) = xtask(&["binaries", "--check"], &[("PARTAGE_KUBE_BIN_DIR", folder.path())]);
    assert_eq!(code, 1, "{out}");
    assert!(out.contains("  kubelet                  missing\n"), "{out}");
    assert!(err.contains("lacks: etcd (not executable), kubelet (missing); put them there"), "{err}");
}

#[test]
fn program_that_does_not_run_is_named() {
    let folder = TestDir::new();
    for name in ALL_PROGRAMS {
        folder.program(name, "echo v1.36.4");
    }
    folder.program("runc", "echo 'libseccomp.so.2: no such file' >&2; exit 127");
    let (code, _, err) = xtask(&["binaries"], &[("PARTAGE_KUBE_BIN_DIR", folder.path())]);
    assert_eq!(code, 1);
    assert!(err.contains("runc (does not print its version: libseccomp.so.2: no such file)"), "{err}");
}
