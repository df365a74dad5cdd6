//! The settings file: enabled dialects, how GPUs are divided, and what happens to pods that bypass their limits.
//!
//! One file holds for all nodes of a cluster; `nodes` overrides settings on some. It is strict: an unknown key is refused with
//! its position. It is read again when it changes; a file that cannot be used changes nothing, and is reported.

mod file;
mod reload;

pub(crate) use reload::SettingsWatcher;

use file::SettingsDocument;
use partage_core::dialect::{self, Dialect, MemoryUnit};
use partage_core::model::{MAX_PRIORITY, MAX_SLOTS, NodeName, Overcommit, Oversubscription, PlacementPolicy};
use partage_core::place::defaults;
use partage_host::simulated_driver::{self, MAX_SIMULATED_GPUS, SimulatedGpus};
use serde::Deserialize;
use std::collections::{BTreeMap, BTreeSet};
use std::io;
use std::net::{Ipv6Addr, SocketAddr};
use std::path::{Path, PathBuf};

/// Maximum size of a settings file in bytes: that of a ConfigMap.
const MAX_FILE_SIZE: u64 = 1 << 20;
/// Maximum number of shares that a GPU is counted as. Regions and kubelet's messages allow more.
const MAX_SHARES_PER_GPU: u32 = 1000;
/// Maximum length of a domain of `vcuda-core`: its socket is in kubelet's directory, and the kernel allows socket paths of 107 bytes.
const MAX_DOMAIN_LENGTH: usize = 51;

/// Why settings cannot be used.
#[derive(Debug, thiserror::Error)]
pub enum AgentSettingsError {
    /// The file cannot be read.
    #[error("cannot read {}", path.display())]
    Io {
        /// The settings file that could not be read.
        path: PathBuf,
        /// What the system reported.
        #[source]
        source: io::Error,
    },
    /// The content of the file is invalid.
    #[error("{}", path.display())]
    Invalid {
        /// The settings file with the invalid content.
        path: PathBuf,
        /// Why the content is invalid.
        #[source]
        source: InvalidAgentSettings,
    },
}

/// Why the text of a settings file cannot be used.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum InvalidAgentSettings {
    /// The text is not valid YAML, or has an unknown key or a value of the wrong type.
    #[error("{0}")]
    Malformed(String),
    /// A value is out of range or contradicts another one.
    #[error("{key}: {message}")]
    Value {
        /// The key of the value.
        key: String,
        /// The value, and what to write instead.
        message: String,
    },
}

/// The settings of one node.
#[derive(Clone, Debug, PartialEq)]
pub struct AgentSettings {
    /// The enabled dialects: at least one, each listed once.
    pub dialects: Vec<Dialect>,
    /// The domains of `vcuda-core` and `vcuda-memory`.
    pub vcuda_domains: Vec<String>,
    /// How many shares of one GPU the counts of `partage.dev/gpu`, `volcano.sh/vgpu-number` and `nvidia.com/gpu` allow.
    pub shares_per_gpu: u32,
    /// Slots of one GPU for `k8s.amazonaws.com/vgpu`.
    pub aws_slots: u32,
    /// The unit of `aliyun.com/gpu-mem`.
    pub gpushare_unit: MemoryUnit,
    /// How many MiB one `volcano.sh/vgpu-memory` is.
    pub volcano_memory_factor: u32,
    /// How much memory may be granted, in percent of each GPU's memory.
    pub memory_overcommit: Overcommit,
    /// Labels that the node gets.
    pub labels: BTreeMap<String, String>,
    /// How GPUs are chosen if no extender does.
    pub policy: PlacementPolicy,
    /// Whether a scheduler extender grants: then a pod without a grant is refused.
    pub extender: bool,
    /// Whether pods may be resized by annotation.
    pub resize: ResizePolicy,
    /// Whether pods may allocate more memory than their limits, on the host, if they ask for it by annotation.
    pub oversubscribe: Oversubscription,
    /// The highest priority that pods get; a higher one in an annotation counts as this.
    pub max_priority: u32,
    /// Whether copies and fills wait for turns as launches do.
    pub throttle_copies: bool,
    /// What happens to pods that bypass their limits.
    pub on_bypass: BypassAction,
    /// The driver that is used.
    pub driver: DriverSetting,
    /// The simulated GPUs, if the driver is simulated.
    pub simulated: SimulatedGpus,
    /// How metrics are served.
    pub metrics: MetricsSettings,
}

impl Default for AgentSettings {
    fn default() -> Self {
        let core = dialect::DialectSettings::default();
        AgentSettings {
            // `nvidia.com/gpu` belongs to another device plugin on most clusters, so it is enabled only explicitly.
            dialects: Dialect::ALL.into_iter().filter(|dialect| *dialect != Dialect::Hami).collect(),
            vcuda_domains: vec!["tencent.com".into(), "inspur.com".into()],
            shares_per_gpu: 10,
            aws_slots: core.aws_slots,
            gpushare_unit: core.gpushare_unit,
            volcano_memory_factor: core.volcano_memory_factor,
            memory_overcommit: Overcommit::default(),
            labels: BTreeMap::new(),
            policy: defaults::NODE_AGENT_POLICY,
            extender: false,
            resize: ResizePolicy::default(),
            // Host memory is shared by all pods of a node, and Partage does not limit it.
            oversubscribe: Oversubscription::Refused,
            // Every user who can create pods can write the annotation.
            max_priority: 0,
            throttle_copies: false,
            on_bypass: BypassAction::default(),
            driver: DriverSetting::default(),
            simulated: SimulatedGpus::default(),
            metrics: MetricsSettings::default(),
        }
    }
}

impl AgentSettings {
    /// Reads a file and returns the settings of a node.
    pub fn read(path: &Path, node: &NodeName) -> Result<AgentSettings, AgentSettingsError> {
        AgentSettings::parse_file(path, &AgentSettings::text(path)?, node)
    }

    /// Parses the text of a file, whose path the error contains.
    fn parse_file(path: &Path, text: &str, node: &NodeName) -> Result<AgentSettings, AgentSettingsError> {
        AgentSettings::parse(text, node)
            .map_err(|source| AgentSettingsError::Invalid { path: path.into(), source })
    }

    /// Reads the text of a file.
    fn text(path: &Path) -> Result<String, AgentSettingsError> {
        let io = |source| AgentSettingsError::Io { path: path.into(), source };
        let size = std::fs::metadata(path).map_err(io)?.len();
        if size > MAX_FILE_SIZE {
            let error =
                io::Error::other(format!("the file has {size} bytes, and the limit is {MAX_FILE_SIZE}"));
            return Err(io(error));
        }
        std::fs::read_to_string(path).map_err(io)
    }

    /// Parses a text and returns the settings of a node.
    pub fn parse(text: &str, node: &NodeName) -> Result<AgentSettings, InvalidAgentSettings> {
        let file = SettingsDocument::parse(text)?;
        file.check()?;
        Ok(file.settings(node))
    }

    fn check(&self) -> Result<(), InvalidAgentSettings> {
        let invalid =
            |key: &str, message: String| Err(InvalidAgentSettings::Value { key: key.into(), message });
        self.dialect().validate().map_err(|error| {
            let key = match error {
                dialect::DialectSettingsError::Slots(_) => "awsSlots",
                dialect::DialectSettingsError::MemoryFactor => "volcanoMemoryFactor",
            };
            InvalidAgentSettings::Value { key: key.into(), message: error.to_string() }
        })?;
        debug_assert!(self.aws_slots <= MAX_SLOTS);
        if self.dialects.is_empty() {
            return invalid("dialects", "the node would offer nothing: enable at least native".into());
        }
        let mut seen = BTreeSet::new();
        if let Some(twice) = self.dialects.iter().find(|dialect| !seen.insert(**dialect)) {
            return invalid("dialects", format!("{twice} is listed twice"));
        }
        if !(1..=MAX_SHARES_PER_GPU).contains(&self.shares_per_gpu) {
            let message =
                format!("{} shares of one GPU: write 1 to {MAX_SHARES_PER_GPU}", self.shares_per_gpu);
            return invalid("sharesPerGpu", message);
        }
        if self.max_priority > MAX_PRIORITY {
            let message =
                format!("{}: write 0 (priorities are ignored) to {MAX_PRIORITY}", self.max_priority);
            return invalid("maxPriority", message);
        }
        if !(1..=MAX_SIMULATED_GPUS).contains(&self.simulated.gpus) {
            let message = format!("{} simulated GPUs: write 1 to {MAX_SIMULATED_GPUS}", self.simulated.gpus);
            return invalid("simulated.gpus", message);
        }
        if let Err(error) = self.simulated.check_model() {
            return invalid("simulated.model", error.to_string());
        }
        if self.driver == DriverSetting::Simulated
            && let Err(error) = simulated_driver::ensure_built()
        {
            return invalid("driver", error.to_string());
        }
        let mut domains = BTreeSet::new();
        for domain in &self.vcuda_domains {
            if !is_domain(domain) || is_kubernetes(domain) {
                return invalid(
                    "vcudaDomains",
                    format!("\"{domain}\" is not a valid domain of resources: use one such as tencent.com"),
                );
            }
            if domain.len() > MAX_DOMAIN_LENGTH {
                return invalid(
                    "vcudaDomains",
                    format!(
                        "{domain} has {} characters, which makes the path of its plugin's socket longer than the kernel allows: use \
                         one of at most {MAX_DOMAIN_LENGTH}",
                        domain.len()
                    ),
                );
            }
            if !domains.insert(domain) {
                return invalid("vcudaDomains", format!("{domain} is listed twice"));
            }
        }
        if self.dialects.contains(&Dialect::Vcuda) && self.vcuda_domains.is_empty() {
            return invalid(
                "vcudaDomains",
                "vcuda has no domain: set one, such as tencent.com, or remove vcuda from dialects".into(),
            );
        }
        for (key, value) in &self.labels {
            if !is_label(key, value) {
                return invalid(
                    "labels",
                    format!(
                        "{key}: {value} is not a valid node label: names and values have at most 63 letters, digits, - _ and ., with a \
                         letter or digit at both ends, and a name may have a domain/ before it"
                    ),
                );
            }
            if key.split_once('/').is_some_and(|(domain, _)| is_kubernetes(domain)) {
                return invalid("labels", format!("{key} is reserved for Kubernetes: use another label"));
            }
        }
        Ok(())
    }

    /// Returns the settings of the dialects, for the core.
    pub fn dialect(&self) -> dialect::DialectSettings {
        dialect::DialectSettings {
            gpushare_unit: self.gpushare_unit,
            volcano_memory_factor: self.volcano_memory_factor,
            aws_slots: self.aws_slots,
        }
    }
}

/// What happens to pods that bypass their limits.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Deserialize)]
#[serde(rename_all = "camelCase")]
pub enum BypassAction {
    /// A metric and an event report them.
    #[default]
    Report,
    /// They are also evicted.
    Evict,
}

/// Whether pods may be resized by annotation.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Deserialize)]
#[serde(rename_all = "camelCase")]
pub enum ResizePolicy {
    /// Users who may annotate a pod may resize it, within the free capacity of its GPUs.
    #[default]
    On,
    /// Resizes are refused: quotas count the amounts in manifests.
    Off,
}

/// The driver that is used.
#[derive(Clone, Debug, Default, PartialEq, Eq, Deserialize)]
#[serde(rename_all = "camelCase")]
pub enum DriverSetting {
    /// NVIDIA's driver, as installed on the node.
    #[default]
    Nvidia,
    /// A simulated driver with the GPUs of [`AgentSettings::simulated`], if this build contains it.
    Simulated,
}

/// How metrics are served.
#[derive(Clone, Debug, PartialEq, Eq, Deserialize)]
#[serde(rename_all = "camelCase", deny_unknown_fields, default)]
pub struct MetricsSettings {
    /// The address to listen on. `[::]` is every address of both families.
    pub address: SocketAddr,
    /// Whether every client may read metrics, over plain HTTP. Otherwise HTTPS, for clients whose token may `get /metrics`.
    pub anonymous: bool,
}

impl Default for MetricsSettings {
    fn default() -> Self {
        MetricsSettings { address: SocketAddr::from((Ipv6Addr::UNSPECIFIED, 9394)), anonymous: false }
    }
}

/// Returns whether a text is a valid domain of resource names.
fn is_domain(text: &str) -> bool {
    let part = |part: &str| {
        let inner = |byte: u8| byte.is_ascii_lowercase() || byte.is_ascii_digit() || byte == b'-';
        !part.is_empty() && part.bytes().all(inner) && !part.starts_with('-') && !part.ends_with('-')
    };
    text.len() <= 200 && text.split('.').all(part)
}

/// Returns whether a domain is reserved for Kubernetes.
fn is_kubernetes(domain: &str) -> bool {
    ["kubernetes.io", "k8s.io"]
        .iter()
        .any(|own| domain.strip_suffix(own).is_some_and(|before| before.is_empty() || before.ends_with('.')))
}

fn is_label(key: &str, value: &str) -> bool {
    let word = |text: &str| {
        let ends = |byte: Option<u8>| byte.is_none_or(|byte| byte.is_ascii_alphanumeric());
        let inner = |byte: u8| byte.is_ascii_alphanumeric() || b"-_.".contains(&byte);
        text.len() <= 63
            && text.bytes().all(inner)
            && ends(text.bytes().next())
            && ends(text.bytes().next_back())
    };
    let (domain, name) = key.rsplit_once('/').map_or((None, key), |(domain, name)| (Some(domain), name));
    domain.is_none_or(is_domain) && !name.is_empty() && word(name) && word(value)
}

#[cfg(test)]
mod tests;
