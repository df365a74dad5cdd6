//! Which programs, from where, with which flags. Versions stand in the module files, once.

use std::fmt::Write;

/// A Go module that pins a set of programs: `modules/<name>`.
#[derive(Debug)]
pub(super) struct Module {
    pub(super) name: &'static str,
    pub(super) go_mod: &'static str,
    pub(super) go_sum: &'static str,
    /// What downloading and building it cold takes on disk, measured and rounded up.
    pub(super) gibibytes: u64,
}

macro_rules! module {
    ($name:literal, $gibibytes:literal) => {
        Module {
            name: $name,
            go_mod: include_str!(concat!("../../modules/", $name, "/go.mod")),
            go_sum: include_str!(concat!("../../modules/", $name, "/go.sum")),
            gibibytes: $gibibytes,
        }
    };
}

pub(super) const KUBERNETES: Module = module!("kubernetes-1.36", 4);
/// On its own: next to containerd it gets a newer otelgrpc, which breaks its build.
pub(super) const ETCD: Module = module!("etcd", 1);
pub(super) const RUNTIME: Module = module!("runtime", 1);
pub(super) const HELM: Module = module!("helm", 2);
pub(super) const CONTAINERD_1_7: Module = module!("containerd-1.7", 1);

/// Programs that stand in one folder. A change of one makes the whole folder new.
#[derive(Debug)]
pub(super) struct Set {
    /// What they are, for people.
    pub(super) what: &'static str,
    pub(super) modules: &'static [&'static Module],
    pub(super) programs: &'static [Program],
}

/// The programs of a bed.
pub(super) static BED: Set =
    Set { what: "programs", modules: &[&ETCD, &RUNTIME, &KUBERNETES], programs: PROGRAMS };
/// What makes the plain manifests of the chart.
pub(super) static CHART: Set = Set {
    what: "tool for the chart",
    modules: &[&HELM],
    programs: &[Program {
        name: "helm",
        source: Source::Go(GoSource {
            stamps: &[("helm.sh/helm/v3/internal/version.version", Part::Whole)],
            ..go(&HELM, "helm.sh/helm/v3/cmd/helm", "helm.sh/helm/v3")
        }),
        version_arguments: &["version", "--short"],
    }],
};
/// The oldest containerd that is supported.
pub(super) static OLDER: Set = Set {
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
pub(super) const SETS: [&Set; 3] = [&BED, &CHART, &OLDER];

/// One program of the bed.
#[derive(Debug)]
pub(super) struct Program {
    pub(super) name: &'static str,
    pub(super) source: Source,
    /// Makes it say its version.
    pub(super) version_arguments: &'static [&'static str],
}

#[derive(Debug)]
pub(super) enum Source {
    Go(GoSource),
    /// Where it is in the package; Debian moves programs between releases.
    Debian {
        package: &'static str,
        files: &'static [&'static str],
    },
}

#[derive(Debug)]
pub(super) struct GoSource {
    pub(super) module: &'static Module,
    pub(super) package: &'static str,
    /// The line of the module file that has the program's version.
    pinned_by: &'static str,
    /// Variables that hold the version, where the source does not know it.
    stamps: &'static [(&'static str, Part)],
    /// Links C, all of it statically.
    pub(super) links_c: bool,
}

#[derive(Clone, Copy, Debug)]
enum Part {
    Whole,
    Major,
    Minor,
}

const KUBERNETES_STAMPS: &[(&str, Part)] = &[
    ("k8s.io/component-base/version.gitVersion", Part::Whole),
    ("k8s.io/component-base/version.gitMajor", Part::Major),
    ("k8s.io/component-base/version.gitMinor", Part::Minor),
];
const CONTAINERD_STAMPS: &[(&str, Part)] =
    &[("github.com/containerd/containerd/v2/version.Version", Part::Whole)];
const CNI_STAMPS: &[(&str, Part)] =
    &[("github.com/containernetworking/plugins/pkg/utils/buildversion.BuildVersion", Part::Whole)];

const fn go(module: &'static Module, package: &'static str, pinned_by: &'static str) -> GoSource {
    GoSource { module, package, pinned_by, stamps: &[], links_c: false }
}

const fn kubernetes(
    name: &'static str,
    package: &'static str,
    version_arguments: &'static [&'static str],
) -> Program {
    let source = GoSource { stamps: KUBERNETES_STAMPS, ..go(&KUBERNETES, package, "k8s.io/kubernetes") };
    Program { name, source: Source::Go(source), version_arguments }
}

const fn containerd(
    name: &'static str,
    package: &'static str,
    version_arguments: &'static [&'static str],
) -> Program {
    let pinned_by = "github.com/containerd/containerd/v2";
    let source = GoSource { stamps: CONTAINERD_STAMPS, ..go(&RUNTIME, package, pinned_by) };
    Program { name, source: Source::Go(source), version_arguments }
}

const fn containerd_1_7(
    name: &'static str,
    package: &'static str,
    version_arguments: &'static [&'static str],
) -> Program {
    let pinned_by = "github.com/containerd/containerd";
    let stamps = &[("github.com/containerd/containerd/version.Version", Part::Whole)];
    let source = GoSource { stamps, ..go(&CONTAINERD_1_7, package, pinned_by) };
    Program { name, source: Source::Go(source), version_arguments }
}

const fn cni(name: &'static str, package: &'static str) -> Program {
    let pinned_by = "github.com/containernetworking/plugins";
    let source = GoSource { stamps: CNI_STAMPS, ..go(&RUNTIME, package, pinned_by) };
    // A plugin without a command says who it is.
    Program { name, source: Source::Go(source), version_arguments: &[] }
}

/// Every program of a bed, the quick ones first: what is wrong shows early.
const PROGRAMS: &[Program] = &[
    Program {
        name: "busybox",
        source: Source::Debian { package: "busybox-static", files: &["bin/busybox", "usr/bin/busybox"] },
        version_arguments: &[],
    },
    Program {
        name: "bpftool",
        source: Source::Debian { package: "bpftool", files: &["usr/sbin/bpftool", "usr/bin/bpftool"] },
        version_arguments: &["version"],
    },
    Program {
        name: "etcd",
        source: Source::Go(go(&ETCD, "go.etcd.io/etcd/server/v3", "go.etcd.io/etcd/server/v3")),
        version_arguments: &["--version"],
    },
    Program {
        name: "runc",
        source: Source::Go(GoSource {
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

impl Module {
    /// The version a `require` line pins.
    fn version_of(&self, path: &str) -> Option<&'static str> {
        self.go_mod.lines().find_map(|line| {
            let mut words = line.split_whitespace().skip_while(|word| *word == "require");
            (words.next() == Some(path)).then(|| words.next()).flatten()
        })
    }

    /// What its `go` line asks for.
    fn go_version(&self) -> &'static str {
        self.go_mod.lines().find_map(|line| line.strip_prefix("go ")).map_or("0", str::trim)
    }
}

impl GoSource {
    /// The pinned version, as the module file has it: `v1.36.4`.
    pub(super) fn version(&self) -> &'static str {
        self.module.version_of(self.pinned_by).unwrap_or("?")
    }

    /// The flags of `go build`.
    pub(super) fn flags(&self) -> Vec<String> {
        let version = self.version();
        let mut parts = version.trim_start_matches('v').split('.');
        let (major, minor) = (parts.next().unwrap_or_default(), parts.next().unwrap_or_default());
        let mut linker = "-s -w".to_string();
        for (variable, part) in self.stamps {
            let value = match part {
                Part::Whole => version,
                Part::Major => major,
                Part::Minor => minor,
            };
            // A String takes every write.
            let _ = write!(linker, " -X {variable}={value}");
        }
        let mut flags = vec!["-trimpath".to_string()];
        if self.links_c {
            linker += " -extldflags -static";
            // Without seccomp every pod sandbox fails; the others keep a static program from asking glibc's plugins.
            flags.push("-tags=seccomp,netgo,osusergo".to_string());
        }
        flags.push(format!("-ldflags={linker}"));
        flags
    }
}

/// The Go version all modules can be built with.
pub(super) fn go_needed() -> &'static str {
    let versions = SETS.iter().flat_map(|set| set.modules).map(|module| module.go_version());
    versions.max_by_key(|version| super::go::numbers(version)).unwrap_or("0")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_program_is_a_tool_of_its_module_and_has_a_version() {
        for program in SETS.iter().flat_map(|set| set.programs) {
            let Source::Go(source) = &program.source else { continue };
            let is_tool = source
                .module
                .go_mod
                .lines()
                .any(|line| line.trim_start_matches("tool").trim() == source.package);
            assert!(is_tool, "{} is no tool of {}", source.package, source.module.name);
            assert!(source.version().starts_with('v'), "{}: {}", program.name, source.version());
        }
    }

    #[test]
    fn kubernetes_knows_its_version() {
        let kubelet = PROGRAMS.iter().find(|p| p.name == "kubelet").unwrap();
        let Source::Go(source) = &kubelet.source else { panic!("built by Go") };
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
    fn names_are_one_each() {
        let names: std::collections::BTreeSet<_> = PROGRAMS.iter().map(|p| p.name).collect();
        assert_eq!(names.len(), PROGRAMS.len());
    }

    #[test]
    fn the_newest_go_line_counts() {
        assert_eq!(go_needed(), "1.26.8");
    }
}
