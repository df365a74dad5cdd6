//! The settings file: which dialects a node speaks, how its GPUs are cut, and what happens to those who go around limits.
//!
//! One file holds for all nodes of a cluster; `nodes` says what is different on some. It is strict: an unknown key is refused with
//! its place. It is read again when it changes; a file that cannot be used changes nothing, and is told of.

mod file;
mod followed;

pub(crate) use followed::Followed;

use file::File;
use partage_core::dialect::{self, Dialect, MemoryUnit};
use partage_core::model::{MAX_SLOTS, NodeName, Overcommit, Oversubscription, Policy};
use partage_core::place::defaults;
use partage_host::simulated_driver::{self, MAX_SIMULATED_GPUS, SimulatedGpus};
use serde::Deserialize;
use std::collections::{BTreeMap, BTreeSet};
use std::io;
use std::net::{Ipv6Addr, SocketAddr};
use std::path::{Path, PathBuf};

/// The most that a settings file may be: what a ConfigMap can hold.
const LARGEST: u64 = 1 << 20;
/// The most shares that a GPU can be counted as. A region has place for more, and kubelet's messages too.
const MOST_SHARES: u32 = 1000;
/// The longest domain of `vcuda-core`: its socket is in kubelet's folder, and the kernel takes paths of sockets up to 107 bytes.
const LONGEST_DOMAIN: usize = 51;

/// Why settings cannot be used.
#[derive(Debug, thiserror::Error)]
pub enum SettingsError {
    /// The file cannot be read at all.
    #[error("{}: {error}", path.display())]
    Io {
        /// The file.
        path: PathBuf,
        /// What the system said.
        #[source]
        error: io::Error,
    },
    /// It is not what a settings file looks like.
    #[error("{0}")]
    Unreadable(String),
    /// A value that cannot be.
    #[error("{key}: {why}")]
    Wrong {
        /// Where.
        key: String,
        /// What is there, and what to write.
        why: String,
    },
}

/// What one node does.
#[derive(Clone, Debug, PartialEq)]
pub struct Settings {
    /// The dialects it speaks.
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
    /// How much memory may be promised.
    pub memory_overcommit: Overcommit,
    /// Labels that the node gets.
    pub labels: BTreeMap<String, String>,
    /// How GPUs are chosen where no extender does.
    pub policy: Policy,
    /// Whether a scheduler extender grants: then a pod without a grant is refused.
    pub extender: bool,
    /// Whether pods may wish for other amounts by annotation.
    pub resize: Resize,
    /// Whether pods may allocate more memory than their limits, on the host, if they ask for it by annotation.
    pub oversubscribe: Oversubscription,
    /// What happens to pods that go around their limits.
    pub on_bypass: OnBypass,
    /// Which driver.
    pub driver: DriverChoice,
    /// The simulated GPUs, where the driver is simulated.
    pub simulated: SimulatedGpus,
    /// Where metrics are served.
    pub metrics: Metrics,
}

impl Default for Settings {
    fn default() -> Self {
        let core = dialect::Settings::default();
        Settings {
            // `nvidia.com/gpu` is another plugin's on most clusters: that one is taken only when told to.
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
            resize: Resize::default(),
            // Host memory is shared by all pods of a node, and nothing of Partage's limits it.
            oversubscribe: Oversubscription::Refused,
            on_bypass: OnBypass::default(),
            driver: DriverChoice::default(),
            simulated: SimulatedGpus::default(),
            metrics: Metrics::default(),
        }
    }
}

impl Settings {
    /// Reads a file and takes what holds on a node.
    pub fn read(path: &Path, node: &NodeName) -> Result<Settings, SettingsError> {
        Settings::parse(&Settings::text(path)?, node)
    }

    /// What is in a file.
    fn text(path: &Path) -> Result<String, SettingsError> {
        let io = |error| SettingsError::Io { path: path.into(), error };
        let size = std::fs::metadata(path).map_err(io)?.len();
        if size > LARGEST {
            let error = io::Error::other(format!("it has {size} bytes, more than any settings need"));
            return Err(io(error));
        }
        std::fs::read_to_string(path).map_err(io)
    }

    /// The same from the text.
    pub fn parse(text: &str, node: &NodeName) -> Result<Settings, SettingsError> {
        let file = File::parse(text)?;
        file.check()?;
        Ok(file.settings(node))
    }

    fn check(&self) -> Result<(), SettingsError> {
        let wrong = |key: &str, why: String| Err(SettingsError::Wrong { key: key.into(), why });
        self.dialect().validate().map_err(|error| {
            let key = match error {
                dialect::SettingsError::Slots(_) => "awsSlots",
                dialect::SettingsError::MemoryFactor => "volcanoMemoryFactor",
            };
            SettingsError::Wrong { key: key.into(), why: error.to_string() }
        })?;
        debug_assert!(self.aws_slots <= MAX_SLOTS);
        if self.dialects.is_empty() {
            return wrong("dialects", "the node would offer nothing: write at least native".into());
        }
        let mut seen = BTreeSet::new();
        if let Some(twice) = self.dialects.iter().find(|dialect| !seen.insert(**dialect)) {
            return wrong("dialects", format!("{twice} is there twice"));
        }
        if !(1..=MOST_SHARES).contains(&self.shares_per_gpu) {
            let why = format!("{} shares of one GPU: write 1 to {MOST_SHARES}", self.shares_per_gpu);
            return wrong("sharesPerGpu", why);
        }
        if !(1..=MAX_SIMULATED_GPUS).contains(&self.simulated.gpus) {
            let why = format!("{} simulated GPUs: write 1 to {MAX_SIMULATED_GPUS}", self.simulated.gpus);
            return wrong("simulated.gpus", why);
        }
        if let Err(error) = self.simulated.check_model() {
            return wrong("simulated.model", error.to_string());
        }
        if self.driver == DriverChoice::Simulated
            && let Err(error) = simulated_driver::ensure_built()
        {
            return wrong("driver", error.to_string());
        }
        let mut domains = BTreeSet::new();
        for domain in &self.vcuda_domains {
            if !is_domain(domain) || is_kubernetes(domain) {
                return wrong(
                    "vcudaDomains",
                    format!("\"{domain}\" can be no domain of resources: write one such as tencent.com"),
                );
            }
            if domain.len() > LONGEST_DOMAIN {
                return wrong(
                    "vcudaDomains",
                    format!(
                        "{domain} has {} letters, which makes the path of its plugin's socket longer than the kernel takes: write \
                         one of at most {LONGEST_DOMAIN}",
                        domain.len()
                    ),
                );
            }
            if !domains.insert(domain) {
                return wrong("vcudaDomains", format!("{domain} is there twice"));
            }
        }
        if self.dialects.contains(&Dialect::Vcuda) && self.vcuda_domains.is_empty() {
            return wrong("vcudaDomains", "vcuda is spoken in no domain: write one, such as tencent.com, or leave vcuda out of dialects".into());
        }
        for (key, value) in &self.labels {
            if !is_label(key, value) {
                return wrong(
                    "labels",
                    format!(
                        "{key}: {value} can be no label of a node: names and values have at most 63 letters, digits, - _ and ., with a \
                         letter or digit at both ends, and a name may have a domain/ before it"
                    ),
                );
            }
            if key.split_once('/').is_some_and(|(domain, _)| is_kubernetes(domain)) {
                return wrong("labels", format!("{key} is one of Kubernetes' own labels: write another"));
            }
        }
        Ok(())
    }

    /// What the core is told about dialects.
    pub fn dialect(&self) -> dialect::Settings {
        dialect::Settings {
            gpushare_unit: self.gpushare_unit,
            volcano_memory_factor: self.volcano_memory_factor,
            aws_slots: self.aws_slots,
        }
    }
}

/// What happens to pods that go around their limits.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Deserialize)]
#[serde(rename_all = "camelCase")]
pub enum OnBypass {
    /// A metric and an event tell.
    #[default]
    Report,
    /// They are evicted, too.
    Evict,
}

/// Whether pods may wish for other amounts by annotation.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Deserialize)]
#[serde(rename_all = "camelCase")]
pub enum Resize {
    /// Who may annotate a pod may change its shares, within what their GPU has free.
    #[default]
    On,
    /// Wishes are refused: quotas count what manifests ask.
    Off,
}

/// Which driver to use.
#[derive(Clone, Debug, Default, PartialEq, Eq, Deserialize)]
#[serde(rename_all = "camelCase")]
pub enum DriverChoice {
    /// NVIDIA's.
    #[default]
    Nvidia,
    /// A simulated one.
    Simulated,
}

/// Where metrics are served.
#[derive(Clone, Debug, PartialEq, Eq, Deserialize)]
#[serde(rename_all = "camelCase", deny_unknown_fields, default)]
pub struct Metrics {
    /// The address. `[::]` is every address of both families.
    pub address: SocketAddr,
    /// Plain HTTP for everybody who reaches the address. Otherwise HTTPS, for those whose token may `get /metrics`.
    pub anonymous: bool,
}

impl Default for Metrics {
    fn default() -> Self {
        Metrics { address: SocketAddr::from((Ipv6Addr::UNSPECIFIED, 9394)), anonymous: false }
    }
}

/// Whether a text is a domain as Kubernetes has them.
fn is_domain(text: &str) -> bool {
    let part = |part: &str| {
        let inner = |byte: u8| byte.is_ascii_lowercase() || byte.is_ascii_digit() || byte == b'-';
        !part.is_empty() && part.bytes().all(inner) && !part.starts_with('-') && !part.ends_with('-')
    };
    text.len() <= 200 && text.split('.').all(part)
}

/// Whether a domain is one of those that Kubernetes keeps for itself.
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
