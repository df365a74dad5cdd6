//! The configuration of a simulated node: `node.json`.

use super::gpu_identity::IdentityGenerator;
use super::server_layout;
use super::topology::{CpuList, NvLinkEnd, PciAddress, PciPath, PciPaths};
use crate::profile::{GpuProfile, ProfileError};
use partage_driver_api::exports::DriverVersion;
use serde::{Deserialize, Deserializer, Serialize, Serializer};
use std::collections::BTreeSet;

/// The maximum number of GPUs of one node.
pub const MAX_NODE_GPUS: usize = crate::state::MAX_GPUS;

/// The version of the format of `node.json`.
const CONFIG_VERSION: u32 = 1;

/// The configuration of a node: its driver, its GPUs and its settings.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
pub struct NodeConfig {
    version: u32,
    /// The version of the simulated driver.
    #[serde(serialize_with = "write_driver", deserialize_with = "read_driver")]
    pub driver: DriverVersion,
    /// The seed of UUIDs and serial numbers.
    pub seed: u64,
    /// Timing and queuing of the simulated GPUs.
    #[serde(default)]
    pub settings: NodeSettings,
    /// The profiles of the node's GPU models, each once.
    pub profiles: Vec<GpuProfile>,
    /// The GPUs. A GPU's index is its position in this list.
    pub gpus: Vec<NodeGpu>,
    /// The PCIe paths between the GPUs.
    pub pci_paths: PciPaths,
}

/// Timing and queuing of the simulated GPUs of a node.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase", deny_unknown_fields, default)]
pub struct NodeSettings {
    /// The time slice of a context while others wait for the GPU, in microseconds.
    pub slice_micros: u32,
    /// The duration of a kernel whose name is not `busy_<n>us`, in microseconds.
    pub kernel_micros: u32,
    /// The number of queued launches of a context at which the next launch blocks.
    pub queue: u32,
    /// Whether streams can wait for values in memory and write them (`cuStreamWriteValue64` and its family).
    pub stream_memory_operations: bool,
    /// The memory that a kernel takes when it is first launched in a context, in MiB, unless its name says it.
    pub kernel_mebibytes: u32,
    /// The memory that an executable graph takes, in MiB.
    pub graph_mebibytes: u32,
}

impl Default for NodeSettings {
    fn default() -> NodeSettings {
        NodeSettings {
            slice_micros: 2000,
            kernel_micros: 10,
            queue: 1024,
            stream_memory_operations: true,
            kernel_mebibytes: 0,
            graph_mebibytes: 0,
        }
    }
}

/// The configuration of one GPU of a node.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
pub struct NodeGpu {
    /// The `model` of one of the node's profiles.
    pub model: String,
    /// The UUID, such as `GPU-513536b6-7d19-9063-b049-1e69664bb298`.
    pub uuid: String,
    /// The serial number: up to 29 letters and digits.
    pub serial: String,
    /// The minor number: `/dev/nvidia<minor>`.
    pub minor: u32,
    /// The module number on an SXM board; 0 for a PCIe card.
    pub module: u32,
    /// The PCI address, unique on the node.
    pub pci: PciAddress,
    /// The NUMA node that the GPU is attached to.
    pub numa: u32,
    /// The CPUs of that NUMA node.
    pub cpus: CpuList,
    /// The remote ends of its NVLinks, by link index. Links beyond the list are not connected.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub links: Vec<NvLinkEnd>,
    /// Whether the GPU is in MIG mode when the node is created. The mode can be switched later.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub mig: bool,
}

impl NodeGpu {
    /// Returns the board ID, which NVML derives from the PCI address.
    pub fn board_id(&self) -> u32 {
        self.pci.domain << 16 | u32::from(self.pci.bus) << 8 | u32::from(self.pci.device)
    }

    /// Returns the 16 bytes of the UUID, as CUDA reports them.
    pub fn uuid_bytes(&self) -> [u8; 16] {
        uuid_bytes(&self.uuid).unwrap_or_default()
    }
}

fn uuid_bytes(uuid: &str) -> Option<[u8; 16]> {
    let groups: Vec<&str> = uuid.strip_prefix("GPU-")?.split('-').collect();
    let lower_hex = |b: u8| b.is_ascii_digit() || (b'a'..=b'f').contains(&b);
    let shape = groups.iter().map(|group| group.len()).eq([8, 4, 4, 4, 12]);
    let hex = groups.concat();
    if !shape || !hex.bytes().all(lower_hex) {
        return None;
    }
    u128::from_str_radix(&hex, 16).ok().map(u128::to_be_bytes)
}

/// Why a configuration is invalid.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum ConfigError {
    /// The number of GPUs is out of range.
    #[error("cannot simulate a node with {0} GPUs: use 1 to {MAX_NODE_GPUS}")]
    Count(usize),
    /// A profile is invalid.
    #[error(transparent)]
    GpuProfile(#[from] ProfileError),
    /// The text is not valid JSON of this format.
    #[error("{0}")]
    Json(String),
    /// The configuration of a GPU is invalid.
    #[error("GPU {gpu}: {what}")]
    Gpu {
        /// The index of the GPU.
        gpu: usize,
        /// The first invalid value of this GPU.
        what: String,
    },
    /// Another part of the configuration is invalid.
    #[error("{0}")]
    Other(String),
}

impl NodeConfig {
    /// Creates the configuration of a node with `count` GPUs of one model in the server that they are usually
    /// installed in.
    pub fn new(
        driver: DriverVersion,
        card: &GpuProfile,
        count: usize,
        seed: u64,
    ) -> Result<NodeConfig, ConfigError> {
        let (locations, pci_paths) = server_layout::locate_gpus(card, count)?;
        let gpus = locations.into_iter().zip(0..).map(|(location, number)| {
            let mut random = IdentityGenerator::new(seed, number);
            NodeGpu {
                model: card.model.to_string(),
                uuid: random.uuid(),
                serial: random.serial(),
                minor: location.minor,
                module: location.module,
                pci: location.pci,
                numa: location.numa,
                cpus: location.cpus,
                links: location.links,
                mig: false,
            }
        });
        let gpus = gpus.collect();
        let profiles = vec![card.clone()];
        let settings = NodeSettings::default();
        let config =
            NodeConfig { version: CONFIG_VERSION, driver, seed, settings, profiles, gpus, pci_paths };
        config.validate()?;
        Ok(config)
    }

    /// Parses and validates the content of `node.json`.
    pub fn from_json(text: &str) -> Result<NodeConfig, ConfigError> {
        let config: NodeConfig =
            serde_json::from_str(text).map_err(|error| ConfigError::Json(error.to_string()))?;
        config.validate()?;
        Ok(config)
    }

    /// Formats the content of `node.json`.
    pub fn to_json(&self) -> Result<String, ConfigError> {
        let mut text =
            serde_json::to_string_pretty(self).map_err(|error| ConfigError::Json(error.to_string()))?;
        text.push('\n');
        Ok(text)
    }

    /// Returns the initial content of the node's state file.
    pub(crate) fn initial_state(&self) -> crate::state::InitialState {
        let profiles = || (0..self.gpus.len()).filter_map(|gpu| self.profile(gpu));
        crate::state::InitialState {
            memory: profiles().map(|profile| profile.memory.usable()).collect(),
            slice: u64::from(self.settings.slice_micros) * 1000,
            // One period for the whole node: a server does not mix GPUs with different sampling periods.
            window: profiles()
                .map(|profile| u64::from(profile.sample_period_micros) * 1000)
                .min()
                .unwrap_or(1),
        }
    }

    /// Returns the profile of a GPU; `None` for an unknown index.
    pub fn profile(&self, gpu: usize) -> Option<&GpuProfile> {
        let model = &self.gpus.get(gpu)?.model;
        self.profiles.iter().find(|profile| profile.model == *model)
    }

    /// Returns the number of NVLinks between two GPUs.
    pub fn nvlinks(&self, a: usize, b: usize) -> usize {
        let (Some(from), Some(to)) = (self.gpus.get(a), self.gpus.get(b)) else { return 0 };
        if a == b {
            return 0;
        }
        let mut count = 0;
        let mut switches: Vec<PciAddress> = Vec::new();
        for end in &from.links {
            match *end {
                NvLinkEnd::Gpu { gpu, .. } => count += usize::from(gpu == b),
                NvLinkEnd::Switch(switch) if switches.contains(&switch) => {}
                NvLinkEnd::Switch(switch) => {
                    switches.push(switch);
                    let on = |gpu: &NodeGpu| {
                        gpu.links.iter().filter(|end| **end == NvLinkEnd::Switch(switch)).count()
                    };
                    count += on(from).min(on(to));
                }
            }
        }
        count
    }

    /// Returns the PCIe path between two GPUs; `None` from a GPU to itself and for an unknown index.
    pub fn pci_path(&self, a: usize, b: usize) -> Option<PciPath> {
        self.pci_paths.between(a, b)
    }

    /// Checks that a node with this configuration can be simulated.
    pub fn validate(&self) -> Result<(), ConfigError> {
        let other = |what: String| Err(ConfigError::Other(what));
        if self.version != CONFIG_VERSION {
            return other(format!(
                "unsupported version {}: this program supports version {CONFIG_VERSION}",
                self.version
            ));
        }
        if !(1..=MAX_NODE_GPUS).contains(&self.gpus.len()) {
            return Err(ConfigError::Count(self.gpus.len()));
        }
        if self.pci_paths.gpus() != self.gpus.len() {
            let (paths, gpus) = (self.pci_paths.gpus(), self.gpus.len());
            return other(format!("pciPaths has {paths} rows for {gpus} GPUs"));
        }
        let settings = &self.settings;
        for (field, value, most) in [
            ("settings.sliceMicros", settings.slice_micros, 1_000_000),
            ("settings.queue", settings.queue, 1 << 20),
        ] {
            if !(1..=most).contains(&value) {
                return other(format!("{field} is {value}: use 1 to {most}"));
            }
        }
        let mut models = BTreeSet::new();
        for profile in &self.profiles {
            profile.validate()?;
            if !models.insert(profile.model.as_ref()) {
                return other(format!("profiles contains {} twice", profile.model));
            }
        }
        self.validate_gpus()
    }

    fn validate_gpus(&self) -> Result<(), ConfigError> {
        let (mut uuids, mut minors, mut addresses) = (BTreeSet::new(), BTreeSet::new(), BTreeSet::new());
        for (index, gpu) in self.gpus.iter().enumerate() {
            let invalid = |what: String| Err(ConfigError::Gpu { gpu: index, what });
            let Some(profile) = self.profile(index) else {
                return invalid(format!("profiles does not contain {}", gpu.model));
            };
            if uuid_bytes(&gpu.uuid).is_none() {
                return invalid(format!(
                    "invalid UUID \"{}\": use the form GPU-513536b6-7d19-9063-b049-1e69664bb298",
                    gpu.uuid
                ));
            }
            if gpu.serial.is_empty()
                || gpu.serial.len() > 29
                || !gpu.serial.bytes().all(|b| b.is_ascii_alphanumeric())
            {
                return invalid(format!(
                    "invalid serial number \"{}\": use up to 29 letters and digits",
                    gpu.serial
                ));
            }
            if !uuids.insert(&gpu.uuid) {
                return invalid(format!("UUID {} is used by another GPU", gpu.uuid));
            }
            if !minors.insert(gpu.minor) {
                return invalid(format!("minor number {} is used by another GPU", gpu.minor));
            }
            if !addresses.insert(gpu.pci) {
                return invalid(format!("PCI address {} is used by another GPU", gpu.pci));
            }
            // 255 is the control device, 254 the modesetting device.
            if gpu.minor > 253 {
                return invalid(format!("minor is {}: use 0 to 253", gpu.minor));
            }
            if gpu.numa > 1023 {
                return invalid(format!("numa is {}: use 0 to 1023", gpu.numa));
            }
            if gpu.mig && profile.mig_instances == 0 {
                return invalid(format!("mig is true, but {} does not support MIG mode", gpu.model));
            }
            let most = profile.nvlink.as_ref().map_or(0, |nvlink| nvlink.links as usize);
            if gpu.links.len() > most {
                return invalid(format!("{} links are given, but {} has {most}", gpu.links.len(), gpu.model));
            }
            for (link, end) in gpu.links.iter().enumerate() {
                let back = NvLinkEnd::Gpu { gpu: index, link };
                if let NvLinkEnd::Gpu { gpu: to, link: there } = *end
                    && (to == index || self.gpus.get(to).and_then(|to| to.links.get(there)) != Some(&back))
                {
                    return invalid(format!("link {link} ends at {end}, which is not linked back"));
                }
            }
        }
        Ok(())
    }
}

/// Parses a driver version: a branch such as `550`, or a full version such as `550.163.01`.
pub fn parse_driver_version(text: &str) -> Option<DriverVersion> {
    DriverVersion::ALL
        .into_iter()
        .find(|driver| driver.branch().to_string() == text || driver.version() == text)
}

// serde prescribes the signature.
#[allow(clippy::trivially_copy_pass_by_ref)]
fn write_driver<S: Serializer>(driver: &DriverVersion, serializer: S) -> Result<S::Ok, S::Error> {
    serializer.serialize_str(driver.version())
}

fn read_driver<'de, D: Deserializer<'de>>(deserializer: D) -> Result<DriverVersion, D::Error> {
    let text = String::deserialize(deserializer)?;
    parse_driver_version(&text).ok_or_else(|| {
        let known = DriverVersion::ALL.map(DriverVersion::version).join(" or ");
        serde::de::Error::custom(format!("cannot simulate driver {text}: use {known}"))
    })
}
