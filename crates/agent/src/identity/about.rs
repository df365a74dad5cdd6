//! Whether a container runtime can do what is needed: put CDI devices into containers.
//!
//! Kubelet hands the names of CDI devices to the runtime in a field of CRI and, since 1.32, nowhere else. containerd reads that
//! field since 1.7.2 and files such as ours since 1.7.13; CDI is off unless the configuration turns it on; since 2.0 it is on.
//! CRI-O reads the field since 1.28, with CDI always on, in the folders of its `cdi_spec_dirs`; it tells of neither. Until 1.34 what
//! the image and the pod say of environment and mounts came after CDI's, and won: limits would be the tenant's to set.
//! Runtimes of which nothing is known may start containers with nothing in them, or with every GPU.

use partage_kubelet_api::cri::{StatusResponse, VersionResponse};
use serde::Deserialize;
use std::collections::BTreeMap;
use std::fmt;
use std::path::PathBuf;

/// A container runtime.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct About {
    /// `containerd`, `cri-o`, or another.
    pub name: String,
    /// As it says it.
    pub version: String,
    /// Or why CDI devices will not get into containers, and what to do.
    pub cdi: Result<(), String>,
    /// The folders that it reads CDI files from.
    pub cdi_dirs: Vec<PathBuf>,
    /// Whether containers may be run by NVIDIA's runtime: it is one of the runtime's handlers, which pods choose among.
    pub nvidia: bool,
    /// Whether they are unless they say otherwise. CRI-O does not tell: `false`.
    pub nvidia_by_default: bool,
    /// Whether it takes CDI devices from an image that says to be a checkpoint: anybody can make one.
    pub trusts_checkpoints: bool,
}

/// How NVIDIA's handlers are called.
const NVIDIA: &str = "nvidia";
/// Where CDI files are unless the runtime says otherwise.
const CDI_DIRS: [&str; 2] = ["/etc/cdi", "/var/run/cdi"];
/// The first that reads CDI names where kubelet writes them, and CDI files of version 0.6.
const CONTAINERD: Version = Version(1, 7, 13);
/// The first with CDI on by itself.
const CONTAINERD_ON: Version = Version(2, 0, 0);
/// The first in which a pod cannot override what CDI puts into its containers.
const CRI_O: Version = Version(1, 34, 0);
/// Those of containerd that believe the CDI devices of a checkpoint image (CVE-2026-53492): from, and until before.
const TRUSTING: [(Version, Version); 3] = [
    (Version(2, 1, 0), Version(2, 1, 9)),
    (Version(2, 2, 0), Version(2, 2, 5)),
    (Version(2, 3, 0), Version(2, 3, 2)),
];

pub(super) fn about(version: &VersionResponse, status: &StatusResponse) -> About {
    let (name, said) = (version.runtime_name.clone(), version.runtime_version.clone());
    let parsed = Version::parse(&said);
    if parsed.is_none() {
        tracing::warn!(
            runtime = name,
            version = said,
            "the container runtime's version is no version: taken for a new one"
        );
    }
    // What is in nobody's list of numbers was built from source, of late.
    let number = parsed.unwrap_or(Version(u32::MAX, 0, 0));
    let config = status.info.get("config").and_then(|json| serde_json::from_str::<Config>(json).ok());
    let config = config.unwrap_or_default();
    let cdi = match name.as_str() {
        "containerd" if number < CONTAINERD => Err(format!(
            "containerd {said} does not take CDI devices as Partage describes them: install containerd {CONTAINERD} or newer"
        )),
        "containerd" => containerd(&said, number, config.enable_cdi),
        "cri-o" if number < CRI_O => Err(format!(
            "CRI-O {said} lets a pod's environment and volumes replace what limits it: install CRI-O {CRI_O} or newer"
        )),
        "cri-o" => Ok(()),
        _ => Err(format!(
            "it is not known to put CDI devices into containers: use containerd {CONTAINERD} or newer, or CRI-O {CRI_O} or newer"
        )),
    };
    let cdi_dirs = match config.cdi_spec_dirs {
        Some(folders) if !folders.is_empty() => folders,
        _ => CDI_DIRS.map(PathBuf::from).to_vec(),
    };
    let handlers = config.containerd.unwrap_or_default();
    let named = status.runtime_handlers.iter().any(|handler| handler.name.starts_with(NVIDIA));
    let nvidia_by_default = handlers.is_nvidia(&handlers.default_runtime_name);
    let trusting = |(from, until): &(Version, Version)| (*from..*until).contains(&number);
    About {
        trusts_checkpoints: name == "containerd" && TRUSTING.iter().any(trusting),
        name,
        version: said,
        cdi,
        cdi_dirs,
        nvidia: named || handlers.has_nvidia(),
        nvidia_by_default,
    }
}

fn containerd(said: &str, number: Version, enabled: Option<bool>) -> Result<(), String> {
    match enabled.unwrap_or(number >= CONTAINERD_ON) {
        true => Ok(()),
        false => {
            let table = match number >= CONTAINERD_ON {
                true => "[plugins.'io.containerd.cri.v1.runtime']",
                false => "[plugins.\"io.containerd.grpc.v1.cri\"]",
            };
            Err(format!(
                "CDI is off in containerd {said}: set enable_cdi = true under {table} in /etc/containerd/config.toml and restart \
                 containerd"
            ))
        }
    }
}

/// What containerd tells of its configuration, as far as it matters here. CRI-O's has none of it.
#[derive(Debug, Default, Deserialize)]
#[serde(rename_all = "camelCase")]
struct Config {
    #[serde(rename = "enableCDI")]
    enable_cdi: Option<bool>,
    cdi_spec_dirs: Option<Vec<PathBuf>>,
    containerd: Option<Handlers>,
}

#[derive(Debug, Default, Deserialize)]
#[serde(rename_all = "camelCase", default)]
struct Handlers {
    default_runtime_name: String,
    runtimes: Option<BTreeMap<String, Handler>>,
}

#[derive(Debug, Default, Deserialize)]
#[serde(default)]
struct Handler {
    options: Option<BTreeMap<String, serde_json::Value>>,
}

impl Handlers {
    /// Not the default one only: a pod chooses another by its runtimeClassName.
    fn has_nvidia(&self) -> bool {
        self.is_nvidia(&self.default_runtime_name)
            || self.runtimes.iter().flatten().any(|(name, _)| self.is_nvidia(name))
    }

    /// The toolkit has it under other names too, such as nvidia-container-runtime.cdi.
    fn is_nvidia(&self, name: &str) -> bool {
        let handler = self.runtimes.as_ref().and_then(|runtimes| runtimes.get(name));
        let options = handler.and_then(|handler| handler.options.as_ref());
        let program = options.and_then(|options| options.get("BinaryName")?.as_str()?.rsplit('/').next());
        name.starts_with(NVIDIA)
            || program.is_some_and(|program| program.starts_with("nvidia-container-runtime"))
    }
}

/// The three numbers of a version.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
struct Version(u32, u32, u32);

impl Version {
    /// Of such as `v2.3.7`, `1.7.24~ds1`, `v2.0.0-rc.1` or `1.31`.
    fn parse(said: &str) -> Option<Version> {
        let said = said.trim().trim_start_matches('v');
        let mut numbers = said.split('.').map(|part| {
            let digits = part.find(|c: char| !c.is_ascii_digit()).unwrap_or(part.len());
            part[..digits].parse().ok()
        });
        let (major, minor) = (numbers.next()??, numbers.next()??);
        Some(Version(major, minor, numbers.next().flatten().unwrap_or(0)))
    }
}

impl fmt::Display for Version {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}.{}.{}", self.0, self.1, self.2)
    }
}

#[cfg(test)]
mod tests;
