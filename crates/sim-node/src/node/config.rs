//! What a simulated node is made of: `node.json`.

use super::identity::Random;
use super::machine;
use super::topology::{Cpus, LinkEnd, PciAddress, PciPath, PciPaths};
use crate::profile::{Profile, ProfileError};
use partage_driver_api::exports::DriverVersion;
use serde::{Deserialize, Deserializer, Serialize, Serializer};
use std::collections::BTreeSet;

/// The most GPUs of one node.
pub const MOST_GPUS: usize = crate::state::MAX_GPUS;

/// The layout of `node.json` that this program reads and writes.
const VERSION: u32 = 1;

/// A node: its driver, its GPUs, and how it behaves.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
pub struct NodeConfig {
    version: u32,
    /// The driver it has.
    #[serde(serialize_with = "write_driver", deserialize_with = "read_driver")]
    pub driver: DriverVersion,
    /// What its UUIDs and serial numbers were made from.
    pub seed: u64,
    /// How it behaves.
    #[serde(default)]
    pub settings: Settings,
    /// The cards that its GPUs are, each once.
    pub profiles: Vec<Profile>,
    /// Its GPUs; a GPU's index is its position here.
    pub gpus: Vec<NodeGpu>,
    /// The ways over PCIe between its GPUs.
    pub pci_paths: PciPaths,
}

/// How a node behaves.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase", deny_unknown_fields, default)]
pub struct Settings {
    /// How long a context has a GPU before the next one's turn, in microseconds.
    pub slice_micros: u32,
    /// How long a kernel takes that is not called `busy_<n>us`, in microseconds.
    pub kernel_micros: u32,
    /// How many launches wait in a context before the next one waits for room.
    pub queue: u32,
}

impl Default for Settings {
    fn default() -> Settings {
        Settings { slice_micros: 2000, kernel_micros: 10, queue: 1024 }
    }
}

/// One GPU of a node.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
pub struct NodeGpu {
    /// Which card it is: the `model` of one of the node's profiles.
    pub model: String,
    /// Its UUID.
    pub uuid: String,
    /// Its serial number.
    pub serial: String,
    /// Its minor number: `/dev/nvidia<minor>`.
    pub minor: u32,
    /// Its place among the modules of a board; 0 for a card in a slot.
    pub module: u32,
    /// Its PCI address.
    pub pci: PciAddress,
    /// The NUMA node it hangs on.
    pub numa: u32,
    /// The CPUs of that NUMA node.
    pub cpus: Cpus,
    /// Where its NVLinks end, first to last. Links that are not here go nowhere.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub links: Vec<LinkEnd>,
    /// Whether it is in MIG mode, unless that was switched since the node was made.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub mig: bool,
}

impl NodeGpu {
    /// The board's number as NVML makes it from the address.
    pub fn board_id(&self) -> u32 {
        self.pci.domain << 16 | u32::from(self.pci.bus) << 8 | u32::from(self.pci.device)
    }

    /// The sixteen bytes of its UUID, as CUDA has them.
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

/// Why a node cannot be.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum ConfigError {
    /// More or fewer GPUs than a node can have.
    #[error("a node with {0} GPUs cannot be simulated: use 1 to {MOST_GPUS}")]
    Count(usize),
    /// A card is wrong.
    #[error(transparent)]
    Profile(#[from] ProfileError),
    /// It is not what this program writes.
    #[error("{0}")]
    Json(String),
    /// A GPU is wrong.
    #[error("GPU {gpu}: {what}")]
    Gpu {
        /// Its index.
        gpu: usize,
        /// What is wrong.
        what: String,
    },
    /// Something else is wrong.
    #[error("{0}")]
    Other(String),
}

impl NodeConfig {
    /// A node with `count` cards of one kind in the machine they usually sit in.
    pub fn new(
        driver: DriverVersion,
        card: &Profile,
        count: usize,
        seed: u64,
    ) -> Result<NodeConfig, ConfigError> {
        let (seats, pci_paths) = machine::seats(card, count)?;
        let gpus = seats.into_iter().zip(0..).map(|(seat, number)| {
            let mut random = Random::new(seed, number);
            NodeGpu {
                model: card.model.to_string(),
                uuid: random.uuid(),
                serial: random.serial(),
                minor: seat.minor,
                module: seat.module,
                pci: seat.pci,
                numa: seat.numa,
                cpus: seat.cpus,
                links: seat.links,
                mig: false,
            }
        });
        let gpus = gpus.collect();
        let profiles = vec![card.clone()];
        let settings = Settings::default();
        let config = NodeConfig { version: VERSION, driver, seed, settings, profiles, gpus, pci_paths };
        config.validate()?;
        Ok(config)
    }

    /// Reads `node.json`.
    pub fn from_json(text: &str) -> Result<NodeConfig, ConfigError> {
        let config: NodeConfig =
            serde_json::from_str(text).map_err(|error| ConfigError::Json(error.to_string()))?;
        config.validate()?;
        Ok(config)
    }

    /// Writes `node.json`.
    pub fn to_json(&self) -> Result<String, ConfigError> {
        let mut text =
            serde_json::to_string_pretty(self).map_err(|error| ConfigError::Json(error.to_string()))?;
        text.push('\n');
        Ok(text)
    }

    /// What the processes of the node share, at first.
    pub(crate) fn setup(&self) -> crate::state::Setup {
        let profiles = || (0..self.gpus.len()).filter_map(|gpu| self.profile(gpu));
        crate::state::Setup {
            memory: profiles().map(|profile| profile.memory.usable()).collect(),
            slice: u64::from(self.settings.slice_micros) * 1000,
            // One for all: cards that sample differently are not in one server.
            window: profiles()
                .map(|profile| u64::from(profile.sample_period_micros) * 1000)
                .min()
                .unwrap_or(1),
        }
    }

    /// The card that a GPU is. `None` beyond the last GPU.
    pub fn profile(&self, gpu: usize) -> Option<&Profile> {
        let model = &self.gpus.get(gpu)?.model;
        self.profiles.iter().find(|profile| profile.model == *model)
    }

    /// How many NVLinks lead from one GPU to another.
    pub fn nvlinks(&self, a: usize, b: usize) -> usize {
        let (Some(from), Some(to)) = (self.gpus.get(a), self.gpus.get(b)) else { return 0 };
        if a == b {
            return 0;
        }
        let mut count = 0;
        let mut switches: Vec<PciAddress> = Vec::new();
        for end in &from.links {
            match *end {
                LinkEnd::Gpu { gpu, .. } => count += usize::from(gpu == b),
                LinkEnd::Switch(switch) if switches.contains(&switch) => {}
                LinkEnd::Switch(switch) => {
                    switches.push(switch);
                    let on = |gpu: &NodeGpu| {
                        gpu.links.iter().filter(|end| **end == LinkEnd::Switch(switch)).count()
                    };
                    count += on(from).min(on(to));
                }
            }
        }
        count
    }

    /// The way over PCIe between two GPUs; `None` from a GPU to itself and beyond the last.
    pub fn pci_path(&self, a: usize, b: usize) -> Option<PciPath> {
        self.pci_paths.between(a, b)
    }

    /// Whether a node with this can be.
    pub fn validate(&self) -> Result<(), ConfigError> {
        let other = |what: String| Err(ConfigError::Other(what));
        if self.version != VERSION {
            return other(format!("version {} is not known: this program writes {VERSION}", self.version));
        }
        if !(1..=MOST_GPUS).contains(&self.gpus.len()) {
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
                return other(format!("profiles has {} twice", profile.model));
            }
        }
        self.validate_gpus()
    }

    fn validate_gpus(&self) -> Result<(), ConfigError> {
        let (mut uuids, mut minors, mut addresses) = (BTreeSet::new(), BTreeSet::new(), BTreeSet::new());
        for (index, gpu) in self.gpus.iter().enumerate() {
            let wrong = |what: String| Err(ConfigError::Gpu { gpu: index, what });
            let Some(profile) = self.profile(index) else {
                return wrong(format!("profiles has no {}", gpu.model));
            };
            if uuid_bytes(&gpu.uuid).is_none() {
                return wrong(format!(
                    "\"{}\" is no UUID like GPU-513536b6-7d19-9063-b049-1e69664bb298",
                    gpu.uuid
                ));
            }
            if gpu.serial.is_empty()
                || gpu.serial.len() > 29
                || !gpu.serial.bytes().all(|b| b.is_ascii_alphanumeric())
            {
                return wrong(format!("\"{}\" is no serial number: use up to 29 digits", gpu.serial));
            }
            if !uuids.insert(&gpu.uuid) {
                return wrong(format!("another one has the UUID {}", gpu.uuid));
            }
            if !minors.insert(gpu.minor) {
                return wrong(format!("another one has the minor number {}", gpu.minor));
            }
            if !addresses.insert(gpu.pci) {
                return wrong(format!("another one has the address {}", gpu.pci));
            }
            // 255 is the control device, 254 the one for mode setting.
            if gpu.minor > 253 {
                return wrong(format!("minor is {}: use 0 to 253", gpu.minor));
            }
            if gpu.numa > 1023 {
                return wrong(format!("numa is {}: use 0 to 1023", gpu.numa));
            }
            if gpu.mig && profile.mig_instances == 0 {
                return wrong(format!("mig is true, and a {} has no MIG mode", gpu.model));
            }
            let most = profile.nvlink.as_ref().map_or(0, |nvlink| nvlink.links as usize);
            if gpu.links.len() > most {
                return wrong(format!("{} links are given, a {} has {most}", gpu.links.len(), gpu.model));
            }
            for (link, end) in gpu.links.iter().enumerate() {
                let back = LinkEnd::Gpu { gpu: index, link };
                if let LinkEnd::Gpu { gpu: to, link: there } = *end
                    && (to == index || self.gpus.get(to).and_then(|to| to.links.get(there)) != Some(&back))
                {
                    return wrong(format!("link {link} ends at {end}, which does not end here"));
                }
            }
        }
        Ok(())
    }
}

/// The driver of a branch, by its number or its whole version.
pub fn driver(text: &str) -> Option<DriverVersion> {
    DriverVersion::ALL
        .into_iter()
        .find(|driver| driver.branch().to_string() == text || driver.version() == text)
}

// The signature is serde's.
#[allow(clippy::trivially_copy_pass_by_ref)]
fn write_driver<S: Serializer>(driver: &DriverVersion, serializer: S) -> Result<S::Ok, S::Error> {
    serializer.serialize_str(driver.version())
}

fn read_driver<'de, D: Deserializer<'de>>(deserializer: D) -> Result<DriverVersion, D::Error> {
    let text = String::deserialize(deserializer)?;
    driver(&text).ok_or_else(|| {
        let known = DriverVersion::ALL.map(DriverVersion::version).join(" or ");
        serde::de::Error::custom(format!("driver {text} cannot be simulated: use {known}"))
    })
}
