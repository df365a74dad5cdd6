//! The inventory that discovery must report for a node's configuration. Tests compare discovery with it, and settings
//! are checked against it before a node exists.

use super::config::NodeConfig;
use super::topology::PciPath;
use partage_core::model::{Bytes, Gpu, GpuLink, LinkMatrix, Node};

impl NodeConfig {
    /// Returns the GPUs and links that discovery through the driver must report. A GPU's memory is what programs can
    /// allocate.
    pub fn expected_inventory(&self, name: &str) -> Node {
        let gpu = |index: usize| {
            let (gpu, profile) = (&self.gpus[index], self.profile(index)?);
            Some(Gpu {
                uuid: gpu.uuid.as_str().into(),
                minor: gpu.minor,
                model: profile.name.to_string(),
                memory_bytes: Bytes(profile.memory.usable()),
                numa: Some(gpu.numa),
                pci: Some(gpu.pci.to_string()),
                withheld: None,
            })
        };
        let mut node = Node::new(name, (0..self.gpus.len()).filter_map(gpu).collect());
        node.links = Some(LinkMatrix::from_fn(self.gpus.len(), |a, b| self.link(a, b)));
        node
    }

    /// Returns the best link between two GPUs.
    pub fn link(&self, a: usize, b: usize) -> GpuLink {
        match self.pci_path(a, b) {
            // `LinkMatrix` uses NVLink for the link of a GPU to itself.
            None => GpuLink::NvLink,
            Some(_) if self.nvlinks(a, b) > 0 => GpuLink::NvLink,
            Some(PciPath::Pix) => GpuLink::Pix,
            Some(PciPath::Pxb) => GpuLink::Pxb,
            Some(PciPath::Phb) => GpuLink::Phb,
            Some(PciPath::Node) => GpuLink::Node,
            Some(PciPath::System) => GpuLink::System,
        }
    }

    /// Describes how a requested configuration differs from this one; `None` if they are equal.
    pub fn difference(&self, other: &NodeConfig) -> Option<String> {
        let cards = |config: &NodeConfig| {
            let mut words: Vec<(usize, &str)> = Vec::new();
            for gpu in &config.gpus {
                match words.last_mut() {
                    Some((count, model)) if *model == gpu.model => *count += 1,
                    _ => words.push((1, &gpu.model)),
                }
            }
            words.iter().map(|(count, model)| format!("{count} x {model}")).collect::<Vec<_>>().join(", ")
        };
        let modes = |config: &NodeConfig| config.gpus.iter().map(|gpu| gpu.mig).collect::<Vec<_>>();
        let differs =
            |what: &str, is: String, asked: String| Some(format!("its {what} is {is}, requested {asked}"));
        if self == other {
            return None;
        }
        if self.driver != other.driver {
            differs("driver", self.driver.version().into(), other.driver.version().into())
        } else if cards(self) != cards(other) {
            Some(format!("it has {}, requested {}", cards(self), cards(other)))
        } else if self.profiles != other.profiles {
            Some("its GPU profiles differ".into())
        } else if self.settings != other.settings {
            differs("settings", format!("{:?}", self.settings), format!("{:?}", other.settings))
        } else if self.seed != other.seed {
            differs("seed", self.seed.to_string(), other.seed.to_string())
        } else if modes(self) != modes(other) {
            Some("the MIG mode of its GPUs differs".into())
        } else {
            Some("the locations of its GPUs differ".into())
        }
    }
}
