//! The catalog of programs: sources and build flags. Versions are defined in the module files only.

use std::fmt::Write;

/// A Go module that pins a set of programs: `modules/<name>`.
#[derive(Debug)]
pub(super) struct GoModule {
    pub(super) name: &'static str,
    pub(super) go_mod: &'static str,
    pub(super) go_sum: &'static str,
    /// Disk space of a cold download and build, measured and rounded up.
    pub(super) gibibytes: u64,
}

macro_rules! module {
    ($name:literal, $gibibytes:literal) => {
        GoModule {
            name: $name,
            go_mod: include_str!(concat!("../../modules/", $name, "/go.mod")),
            go_sum: include_str!(concat!("../../modules/", $name, "/go.sum")),
            gibibytes: $gibibytes,
        }
    };
}

pub(super) const KUBERNETES: GoModule = module!("kubernetes-1.36", 4);
/// Separate from containerd, next to which it gets a newer otelgrpc that breaks its build.
pub(super) const ETCD: GoModule = module!("etcd", 1);
pub(super) const RUNTIME: GoModule = module!("runtime", 1);
pub(super) const HELM: GoModule = module!("helm", 2);
pub(super) const CONTAINERD_1_7: GoModule = module!("containerd-1.7", 1);

/// Programs in one directory. A change of one program makes a new directory.
#[derive(Debug)]
pub(super) struct ProgramSet {
    /// What the programs are, in messages.
    pub(super) what: &'static str,
    pub(super) modules: &'static [&'static GoModule],
    pub(super) programs: &'static [ProgramSpec],
}

/// The programs of a bed.
pub(super) static BED_PROGRAMS: ProgramSet =
    ProgramSet { what: "programs", modules: &[&ETCD, &RUNTIME, &KUBERNETES], programs: PROGRAMS };
/// The tools that render the plain manifests from the chart.
pub(super) static CHART_TOOLS: ProgramSet = ProgramSet {
    what: "chart tools",
    modules: &[&HELM],
    programs: &[ProgramSpec {
        name: "helm",
        source: ProgramSource::Go(GoSource {
            stamps: &[("helm.sh/helm/v3/internal/version.version", VersionPart::Whole)],
            ..go(&HELM, "helm.sh/helm/v3/cmd/helm", "helm.sh/helm/v3")
        }),
        version_arguments: &["version", "--short"],
    }],
};
/// The oldest supported containerd.
pub(super) static CONTAINERD_1_7_PROGRAMS: ProgramSet = ProgramSet {
    what: "programs of containerd 1.7",
    modules: &[&CONTAINERD_1_7],
    programs: &[
        containerd_1_7("containerd-1.7", "github.com/containerd/containerd/cmd/containerd", &["--version"]),
        containerd_1_7(
            "containerd-shim-runc-1.7",
            "github.com/containerd/containerd/cmd/containerd-shim-runc-v2",
            &["-v"],
        ),
    ],
};
pub(super) const PROGRAM_SETS: [&ProgramSet; 3] = [&BED_PROGRAMS, &CHART_TOOLS, &CONTAINERD_1_7_PROGRAMS];

/// One program and how it is built.
#[derive(Debug)]
pub(super) struct ProgramSpec {
    pub(super) name: &'static str,
    pub(super) source: ProgramSource,
    /// Arguments that print its version.
    pub(super) version_arguments: &'static [&'static str],
}

#[derive(Debug)]
pub(super) enum ProgramSource {
    Go(GoSource),
    /// Candidate paths in the package; Debian moves programs between releases.
    Debian {
        package: &'static str,
        files: &'static [&'static str],
    },
}

#[derive(Debug)]
pub(super) struct GoSource {
    pub(super) module: &'static GoModule,
    pub(super) package: &'static str,
    /// The module whose line in the module file has the program's version.
    pinned_by: &'static str,
    /// Linker variables for the version, if the source does not contain it.
    stamps: &'static [(&'static str, VersionPart)],
    /// Whether it links C code, all of it statically.
    pub(super) links_c: bool,
}

#[derive(Clone, Copy, Debug)]
enum VersionPart {
    Whole,
    Major,
    Minor,
}

const KUBERNETES_STAMPS: &[(&str, VersionPart)] = &[
    ("k8s.io/component-base/version.gitVersion", VersionPart::Whole),
    ("k8s.io/component-base/version.gitMajor", VersionPart::Major),
    ("k8s.io/component-base/version.gitMinor", VersionPart::Minor),
];
const CONTAINERD_STAMPS: &[(&str, VersionPart)] =
    &[("github.com/containerd/containerd/v2/version.Version", VersionPart::Whole)];
const CNI_STAMPS: &[(&str, VersionPart)] =
    &[("github.com/containernetworking/plugins/pkg/utils/buildversion.BuildVersion", VersionPart::Whole)];

const fn go(module: &'static GoModule, package: &'static str, pinned_by: &'static str) -> GoSource {
    GoSource { module, package, pinned_by, stamps: &[], links_c: false }
}

const fn kubernetes(
    name: &'static str,
    package: &'static str,
    version_arguments: &'static [&'static str],
) -> ProgramSpec {
    let source = GoSource { stamps: KUBERNETES_STAMPS, ..go(&KUBERNETES, package, "k8s.io/kubernetes") };
    ProgramSpec { name, source: ProgramSource::Go(source), version_arguments }
}

const fn containerd(
    name: &'static str,
    package: &'static str,
    version_arguments: &'static [&'static str],
) -> ProgramSpec {
    let pinned_by = "github.com/containerd/containerd/v2";
    let source = GoSource { stamps: CONTAINERD_STAMPS, ..go(&RUNTIME, package, pinned_by) };
    ProgramSpec { name, source: ProgramSource::Go(source), version_arguments }
}

const fn containerd_1_7(
    name: &'static str,
    package: &'static str,
    version_arguments: &'static [&'static str],
) -> ProgramSpec {
    let pinned_by = "github.com/containerd/containerd";
    let stamps = &[("github.com/containerd/containerd/version.Version", VersionPart::Whole)];
    let source = GoSource { stamps, ..go(&CONTAINERD_1_7, package, pinned_by) };
    ProgramSpec { name, source: ProgramSource::Go(source), version_arguments }
}

const fn cni(name: &'static str, package: &'static str) -> ProgramSpec {
    let pinned_by = "github.com/containernetworking/plugins";
    let source = GoSource { stamps: CNI_STAMPS, ..go(&RUNTIME, package, pinned_by) };
    // A plugin without a command prints its name and version.
    ProgramSpec { name, source: ProgramSource::Go(source), version_arguments: &[] }
}

/// Every program of a bed, the quick ones first: failures show early.
const PROGRAMS: &[ProgramSpec] = &[
    ProgramSpec {
        name: "busybox",
        source: ProgramSource::Debian {
            package: "busybox-static",
            files: &["bin/busybox", "usr/bin/busybox"],
        },
        version_arguments: &[],
    },
    ProgramSpec {
        name: "bpftool",
        source: ProgramSource::Debian { package: "bpftool", files: &["usr/sbin/bpftool", "usr/bin/bpftool"] },
        version_arguments: &["version"],
    },
    ProgramSpec {
        name: "etcd",
        source: ProgramSource::Go(go(&ETCD, "go.etcd.io/etcd/server/v3", "go.etcd.io/etcd/server/v3")),
        version_arguments: &["--version"],
    },
    ProgramSpec {
        name: "runc",
        source: ProgramSource::Go(GoSource {
            links_c: true,
            ..go(&RUNTIME, "github.com/opencontainers/runc", "github.com/opencontainers/runc")
        }),
        version_arguments: &["--version"],
    },
    cni("bridge", "github.com/containernetworking/plugins/plugins/main/bridge"),
    cni("host-local", "github.com/containernetworking/plugins/plugins/ipam/host-local"),
    cni("loopback", "github.com/containernetworking/plugins/plugins/main/loopback"),
    containerd("containerd", "github.com/containerd/containerd/v2/cmd/containerd", &["--version"]),
    containerd(
        "containerd-shim-runc-v2",
        "github.com/containerd/containerd/v2/cmd/containerd-shim-runc-v2",
        &["-v"],
    ),
    containerd("ctr", "github.com/containerd/containerd/v2/cmd/ctr", &["--version"]),
    kubernetes("kubectl", "k8s.io/kubernetes/cmd/kubectl", &["version", "--client"]),
    kubernetes("kube-scheduler", "k8s.io/kubernetes/cmd/kube-scheduler", &["--version"]),
    kubernetes("kube-apiserver", "k8s.io/kubernetes/cmd/kube-apiserver", &["--version"]),
    kubernetes("kube-controller-manager", "k8s.io/kubernetes/cmd/kube-controller-manager", &["--version"]),
    kubernetes("kubelet", "k8s.io/kubernetes/cmd/kubelet", &["--version"]),
];

impl GoModule {
    /// Returns the version that a `require` line pins.
    fn version_of(&self, path: &str) -> Option<&'static str> {
        self.go_mod.lines().find_map(|line| {
            let mut words = line.split_whitespace().skip_while(|word| *word == "require");
            (words.next() == Some(path)).then(|| words.next()).flatten()
        })
    }

    /// Returns the version of the `go` line.
    fn go_version(&self) -> &'static str {
        self.go_mod.lines().find_map(|line| line.strip_prefix("go ")).map_or("0", str::trim)
    }
}

impl GoSource {
    /// Returns the pinned version as in the module file: `v1.36.4`.
    pub(super) fn version(&self) -> &'static str {
        self.module.version_of(self.pinned_by).unwrap_or("?")
    }

    /// Returns the flags of `go build`.
    pub(super) fn flags(&self) -> Vec<String> {
        let version = self.version();
        let mut parts = version.trim_start_matches('v').split('.');
        let (major, minor) = (parts.next().unwrap_or_default(), parts.next().unwrap_or_default());
        let mut linker = "-s -w".to_string();
        for (variable, part) in self.stamps {
            let value = match part {
                VersionPart::Whole => version,
                VersionPart::Major => major,
                VersionPart::Minor => minor,
            };
            // Writing to a String cannot fail.
            let _ = write!(linker, " -X {variable}={value}");
        }
        let mut flags = vec!["-trimpath".to_string()];
        if self.links_c {
            linker += " -extldflags -static";
            // Without seccomp every pod sandbox fails; the others keep a static program from loading glibc's plugins.
            flags.push("-tags=seccomp,netgo,osusergo".to_string());
        }
        flags.push(format!("-ldflags={linker}"));
        flags
    }
}

/// Returns the Go version that can build all modules.
pub(super) fn required_go_version() -> &'static str {
    let versions = PROGRAM_SETS.iter().flat_map(|set| set.modules).map(|module| module.go_version());
    versions.max_by_key(|version| super::go::version_numbers(version)).unwrap_or("0")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_program_is_a_tool_of_its_module_with_a_version() {
        for program in PROGRAM_SETS.iter().flat_map(|set| set.programs) {
            let ProgramSource::Go(source) = &program.source else { continue };
            let is_tool = source
                .module
                .go_mod
                .lines()
                .any(|line| line.trim_start_matches("tool").trim() == source.package);
            assert!(is_tool, "{} is not a tool of {}", source.package, source.module.name);
            assert!(source.version().starts_with('v'), "{}: {}", program.name, source.version());
        }
    }

    #[test]
    fn kubernetes_is_stamped_with_its_version() {
        let kubelet = PROGRAMS.iter().find(|p| p.name == "kubelet").unwrap();
        let ProgramSource::Go(source) = &kubelet.source else { panic!("kubelet is built with Go") };
        assert_eq!(
            source.flags(),
            [
                "-trimpath",
                "-ldflags=-s -w -X k8s.io/component-base/version.gitVersion=v1.36.4 \
                 -X k8s.io/component-base/version.gitMajor=1 -X k8s.io/component-base/version.gitMinor=36",
            ]
        );
    }

    #[test]
    fn program_names_are_unique() {
        let names: std::collections::BTreeSet<_> = PROGRAMS.iter().map(|p| p.name).collect();
        assert_eq!(names.len(), PROGRAMS.len());
    }

    #[test]
    fn newest_go_directive_is_required() {
        assert_eq!(required_go_version(), "1.26.8");
    }
}
