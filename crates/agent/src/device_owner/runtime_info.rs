//! Checks whether a container runtime applies CDI specs as the agent needs it.
//!
//! Kubelet passes the names of CDI devices to the runtime in a CRI field and, since 1.32, nowhere else. containerd reads that
//! field since 1.7.2 and specs of version 0.6 since 1.7.13; CDI is disabled by default before 2.0, and enabled since. CRI-O
//! reads the field since 1.28 and always enables CDI, with the directories of its `cdi_spec_dirs`; it reports neither. Before
//! 1.34, environment and mounts of the image and the pod took precedence over those of CDI: a tenant could replace its limits.
//! Other runtimes are refused: they may start containers without any GPU, or with all of them.

use partage_kubelet_api::cri::{StatusResponse, VersionResponse};
use serde::Deserialize;
use std::collections::BTreeMap;
use std::fmt;
use std::path::PathBuf;

/// The container runtime's version, and what it supports.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct RuntimeInfo {
    /// `containerd`, `cri-o`, or another.
    pub name: String,
    /// The version, as the runtime reports it.
    pub version: String,
    /// Whether the runtime applies CDI specs, or why not.
    pub cdi: Result<(), CdiSupportError>,
    /// The directories that the runtime reads CDI specs from.
    pub cdi_dirs: Vec<PathBuf>,
    /// Whether NVIDIA's runtime is one of the handlers, which pods choose by their RuntimeClass.
    pub nvidia: bool,
    /// Whether NVIDIA's runtime is the default handler. CRI-O does not report it: `false`.
    pub nvidia_by_default: bool,
    /// Whether the runtime takes CDI devices from a checkpoint image, which any user can build (CVE-2026-53492).
    pub trusts_checkpoints: bool,
}

/// Why a runtime does not apply CDI specs as the agent needs it, and what to do.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum CdiSupportError {
    /// containerd is too old.
    #[error(
        "containerd {version} cannot read Partage's CDI specs: install containerd {MIN_CONTAINERD} or newer"
    )]
    ContainerdTooOld {
        /// The version, as containerd reports it.
        version: String,
    },
    /// CDI is disabled in containerd's configuration.
    #[error(
        "CDI is off in containerd {version}: set enable_cdi = true under {table} in /etc/containerd/config.toml and restart containerd"
    )]
    Disabled {
        /// The version, as containerd reports it.
        version: String,
        /// The table of containerd's configuration that has the option.
        table: &'static str,
    },
    /// CRI-O is too old.
    #[error(
        "CRI-O {version} lets a pod's environment and volumes replace its limits: install CRI-O {MIN_CRI_O} or newer"
    )]
    CrioTooOld {
        /// The version, as CRI-O reports it.
        version: String,
    },
    /// The runtime is neither containerd nor CRI-O.
    #[error(
        "the runtime is not known to apply CDI devices: use containerd {MIN_CONTAINERD} or newer, or CRI-O {MIN_CRI_O} or newer"
    )]
    UnknownRuntime,
}

/// The beginning of the names of NVIDIA's handlers.
const NVIDIA_HANDLER_PREFIX: &str = "nvidia";
/// The default directories of CDI specs.
const DEFAULT_CDI_DIRS: [&str; 2] = ["/etc/cdi", "/var/run/cdi"];
/// The first containerd that reads CDI names from the CRI field, and specs of version 0.6.
const MIN_CONTAINERD: RuntimeVersion = RuntimeVersion(1, 7, 13);
/// The first containerd that enables CDI by default.
const CONTAINERD_CDI_DEFAULT: RuntimeVersion = RuntimeVersion(2, 0, 0);
/// The first CRI-O in which a pod cannot override what CDI adds to its containers.
const MIN_CRI_O: RuntimeVersion = RuntimeVersion(1, 34, 0);
/// The containerd versions that take CDI devices from a checkpoint image (CVE-2026-53492): from, and until before.
const CHECKPOINT_VULNERABLE: [(RuntimeVersion, RuntimeVersion); 3] = [
    (RuntimeVersion(2, 1, 0), RuntimeVersion(2, 1, 9)),
    (RuntimeVersion(2, 2, 0), RuntimeVersion(2, 2, 5)),
    (RuntimeVersion(2, 3, 0), RuntimeVersion(2, 3, 2)),
];

impl RuntimeInfo {
    /// Evaluates the runtime's answers to `Version` and `Status`.
    pub(super) fn new(version: &VersionResponse, status: &StatusResponse) -> RuntimeInfo {
        let name = version.runtime_name.clone();
        let reported = version.runtime_version.clone();
        let parsed = RuntimeVersion::parse(&reported);
        if parsed.is_none() {
            tracing::warn!(
                runtime = name,
                version = reported,
                "cannot parse the container runtime's version, assuming a recent one"
            );
        }
        // A version without numbers was built from recent source.
        let number = parsed.unwrap_or(RuntimeVersion(u32::MAX, 0, 0));
        let config =
            status.info.get("config").and_then(|json| serde_json::from_str::<ContainerdConfig>(json).ok());
        let config = config.unwrap_or_default();
        let cdi = match name.as_str() {
            "containerd" => containerd_cdi(&reported, number, config.enable_cdi),
            "cri-o" if number < MIN_CRI_O => Err(CdiSupportError::CrioTooOld { version: reported.clone() }),
            "cri-o" => Ok(()),
            _ => Err(CdiSupportError::UnknownRuntime),
        };
        let cdi_dirs = match config.cdi_spec_dirs {
            Some(dirs) if !dirs.is_empty() => dirs,
            _ => DEFAULT_CDI_DIRS.map(PathBuf::from).to_vec(),
        };
        let handlers = config.containerd.unwrap_or_default();
        let is_named =
            status.runtime_handlers.iter().any(|handler| handler.name.starts_with(NVIDIA_HANDLER_PREFIX));
        let nvidia_by_default = handlers.is_nvidia(&handlers.default_runtime_name);
        let is_vulnerable =
            |(from, until): &(RuntimeVersion, RuntimeVersion)| (*from..*until).contains(&number);
        RuntimeInfo {
            trusts_checkpoints: name == "containerd" && CHECKPOINT_VULNERABLE.iter().any(is_vulnerable),
            name,
            version: reported,
            cdi,
            cdi_dirs,
            nvidia: is_named || handlers.has_nvidia(),
            nvidia_by_default,
        }
    }
}

fn containerd_cdi(
    reported: &str,
    number: RuntimeVersion,
    enabled: Option<bool>,
) -> Result<(), CdiSupportError> {
    let version = reported.to_string();
    if number < MIN_CONTAINERD {
        return Err(CdiSupportError::ContainerdTooOld { version });
    }
    let has_default = number >= CONTAINERD_CDI_DEFAULT;
    if enabled.unwrap_or(has_default) {
        return Ok(());
    }
    let table = if has_default {
        "[plugins.'io.containerd.cri.v1.runtime']"
    } else {
        "[plugins.\"io.containerd.grpc.v1.cri\"]"
    };
    Err(CdiSupportError::Disabled { version, table })
}

/// The parts of containerd's reported configuration that the agent uses. CRI-O reports none of them.
#[derive(Debug, Default, Deserialize)]
#[serde(rename_all = "camelCase")]
struct ContainerdConfig {
    #[serde(rename = "enableCDI")]
    enable_cdi: Option<bool>,
    cdi_spec_dirs: Option<Vec<PathBuf>>,
    containerd: Option<RuntimeHandlers>,
}

/// The handlers that pods choose by their RuntimeClass.
#[derive(Debug, Default, Deserialize)]
#[serde(rename_all = "camelCase", default)]
struct RuntimeHandlers {
    default_runtime_name: String,
    runtimes: Option<BTreeMap<String, RuntimeHandler>>,
}

/// The options of one handler.
#[derive(Debug, Default, Deserialize)]
#[serde(default)]
struct RuntimeHandler {
    options: Option<BTreeMap<String, serde_json::Value>>,
}

impl RuntimeHandlers {
    /// Returns whether any handler runs NVIDIA's runtime: a pod chooses one by its runtimeClassName.
    fn has_nvidia(&self) -> bool {
        self.is_nvidia(&self.default_runtime_name)
            || self.runtimes.iter().flatten().any(|(name, _)| self.is_nvidia(name))
    }

    /// Returns whether a handler runs NVIDIA's runtime, by its name or its program. The toolkit installs the program under
    /// several names, such as nvidia-container-runtime.cdi.
    fn is_nvidia(&self, name: &str) -> bool {
        let handler = self.runtimes.as_ref().and_then(|runtimes| runtimes.get(name));
        let options = handler.and_then(|handler| handler.options.as_ref());
        let program = options.and_then(|options| options.get("BinaryName")?.as_str()?.rsplit('/').next());
        name.starts_with(NVIDIA_HANDLER_PREFIX)
            || program.is_some_and(|program| program.starts_with("nvidia-container-runtime"))
    }
}

/// A version as three numbers.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
struct RuntimeVersion(u32, u32, u32);

impl RuntimeVersion {
    /// Parses versions such as `v2.3.7`, `1.7.24~ds1`, `v2.0.0-rc.1` or `1.31`.
    fn parse(text: &str) -> Option<RuntimeVersion> {
        let text = text.trim().trim_start_matches('v');
        let mut numbers = text.split('.').map(|part| {
            let digits = part.find(|c: char| !c.is_ascii_digit()).unwrap_or(part.len());
            part[..digits].parse().ok()
        });
        let (major, minor) = (numbers.next()??, numbers.next()??);
        Some(RuntimeVersion(major, minor, numbers.next().flatten().unwrap_or(0)))
    }
}

impl fmt::Display for RuntimeVersion {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}.{}.{}", self.0, self.1, self.2)
    }
}

#[cfg(test)]
mod tests;
