//! Nodes, their GPUs, the links between GPUs, and the settings for sharing them.

use super::{Bytes, GpuUuid, MilliCpu, NodeName};
use serde::{Deserialize, Serialize};
use std::fmt;
use std::str::FromStr;

/// Maximum number of GPUs per node: the allocator keeps sets of GPUs as the bits of one word.
pub const MAX_GPUS_PER_NODE: usize = 64;
/// Default number of slots per GPU for the AWS dialect.
pub const DEFAULT_SLOTS: u32 = 10;
/// Maximum number of slots per GPU: the maximum number of clients of an MPS server.
pub const MAX_SLOTS: u32 = 48;

/// A physical GPU of a node.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
pub struct Gpu {
    /// UUID as NVML reports it.
    pub uuid: GpuUuid,
    /// Minor number of its device node `/dev/nvidia<minor>`.
    pub minor: u32,
    /// Product name as NVML reports it.
    pub model: String,
    /// Total memory of the GPU.
    pub memory_bytes: Bytes,
    /// NUMA node, if known.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub numa: Option<u32>,
    /// PCI address, if known.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub pci: Option<String>,
    /// Why the GPU is not allocatable (unhealthy, MIG enabled); absent while it is allocatable.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub withheld: Option<String>,
}

/// A node with its capacity and settings.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
pub struct Node {
    /// Name of the node.
    pub name: NodeName,
    /// GPUs of the node. The index of a GPU is its position in this list.
    #[serde(default)]
    pub gpus: Vec<Gpu>,
    /// Links between the GPUs; derived from NUMA nodes if absent.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub links: Option<LinkMatrix>,
    /// Allocatable CPU; not accounted for if absent.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub cpu_milli: Option<MilliCpu>,
    /// Allocatable host memory; not accounted for if absent.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub memory_bytes: Option<Bytes>,
    /// Limit of granted GPU memory in percent of the total.
    #[serde(default, skip_serializing_if = "Overcommit::is_none")]
    pub memory_overcommit_percent: Overcommit,
    /// Slots per GPU for the AWS dialect.
    #[serde(default = "default_slots", skip_serializing_if = "is_default_slots")]
    pub slots_per_gpu: u32,
    /// Maximum number of shares per GPU; unlimited if absent.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub max_shares_per_gpu: Option<u32>,
}

fn default_slots() -> u32 {
    DEFAULT_SLOTS
}

// serde requires this signature.
#[allow(clippy::trivially_copy_pass_by_ref)]
fn is_default_slots(slots: &u32) -> bool {
    *slots == DEFAULT_SLOTS
}

impl Node {
    /// Creates a node with these GPUs and default settings.
    pub fn new(name: impl Into<NodeName>, gpus: Vec<Gpu>) -> Node {
        Node {
            name: name.into(),
            gpus,
            links: None,
            cpu_milli: None,
            memory_bytes: None,
            memory_overcommit_percent: Overcommit::default(),
            slots_per_gpu: DEFAULT_SLOTS,
            max_shares_per_gpu: None,
        }
    }

    /// Returns the link between two GPUs of this node.
    pub fn link(&self, a: usize, b: usize) -> GpuLink {
        if let Some(link) = self.links.as_ref().and_then(|links| links.between(a, b)) {
            return link;
        }
        match (self.gpus.get(a).and_then(|g| g.numa), self.gpus.get(b).and_then(|g| g.numa)) {
            (Some(x), Some(y)) if x == y => GpuLink::Node,
            _ => GpuLink::System,
        }
    }

    /// Returns the index of a GPU, or `None` if the node does not have it.
    pub fn gpu_index(&self, uuid: &GpuUuid) -> Option<usize> {
        self.gpus.iter().position(|gpu| gpu.uuid == *uuid)
    }
}

/// Limit of granted GPU memory in percent of the total; 100 means no overcommitment.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(try_from = "u32", into = "u32")]
pub struct Overcommit(u32);

impl Overcommit {
    /// Converts a percentage from 100 (no overcommitment) to 10,000, or returns `None`.
    pub fn percent(percent: u32) -> Option<Overcommit> {
        (100..=10_000).contains(&percent).then_some(Overcommit(percent))
    }

    /// Returns the memory that may be granted of `memory`.
    pub fn of(self, memory: Bytes) -> Bytes {
        memory.percent(self.0)
    }

    // serde requires this signature.
    #[allow(clippy::trivially_copy_pass_by_ref)]
    fn is_none(&self) -> bool {
        *self == Overcommit::default()
    }
}

impl Default for Overcommit {
    fn default() -> Self {
        Overcommit(100)
    }
}

/// A percentage by which memory cannot be overcommitted.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("memoryOvercommitPercent is {0}: write 100 (none) to 10000")]
pub struct OvercommitError(u32);

impl TryFrom<u32> for Overcommit {
    type Error = OvercommitError;

    fn try_from(percent: u32) -> Result<Self, OvercommitError> {
        Overcommit::percent(percent).ok_or(OvercommitError(percent))
    }
}

impl From<Overcommit> for u32 {
    fn from(overcommit: Overcommit) -> u32 {
        overcommit.0
    }
}

/// The connection of two GPUs, best first, with the names of `nvidia-smi topo -m`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum GpuLink {
    /// The GPUs are connected by NVLink.
    NvLink,
    /// Through one PCIe switch.
    Pix,
    /// Through several PCIe switches.
    Pxb,
    /// Through a PCIe host bridge.
    Phb,
    /// Within one NUMA node.
    Node,
    /// Across NUMA nodes, through the CPU interconnect.
    System,
}

impl GpuLink {
    /// All kinds of links, best first.
    pub const ALL: [GpuLink; 6] =
        [GpuLink::NvLink, GpuLink::Pix, GpuLink::Pxb, GpuLink::Phb, GpuLink::Node, GpuLink::System];
}

/// A name that belongs to no kind of link.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("\"{0}\" is not a link between GPUs: use NV<n>, PIX, PXB, PHB, NODE or SYS")]
pub struct UnknownLink(String);

impl FromStr for GpuLink {
    type Err = UnknownLink;

    fn from_str(text: &str) -> Result<Self, UnknownLink> {
        Ok(match text {
            "PIX" => GpuLink::Pix,
            "PXB" => GpuLink::Pxb,
            "PHB" => GpuLink::Phb,
            "NODE" | "SOC" => GpuLink::Node,
            "SYS" => GpuLink::System,
            _ => match text.strip_prefix("NV") {
                Some(n) if n.bytes().all(|b| b.is_ascii_digit()) => GpuLink::NvLink,
                _ => return Err(UnknownLink(text.into())),
            },
        })
    }
}

impl fmt::Display for GpuLink {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            GpuLink::NvLink => "NV",
            GpuLink::Pix => "PIX",
            GpuLink::Pxb => "PXB",
            GpuLink::Phb => "PHB",
            GpuLink::Node => "NODE",
            GpuLink::System => "SYS",
        })
    }
}

/// The links between all GPUs of a node, serialized as the rows of `nvidia-smi topo -m` (`"X PIX SYS SYS"`).
#[derive(Clone, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(try_from = "Vec<String>", into = "Vec<String>")]
pub struct LinkMatrix {
    gpus: usize,
    cells: Vec<GpuLink>,
}

impl LinkMatrix {
    /// Creates the matrix from a function of two GPU indexes.
    pub fn from_fn(gpus: usize, link: impl Fn(usize, usize) -> GpuLink) -> LinkMatrix {
        let cells = (0..gpus * gpus).map(|cell| link(cell / gpus, cell % gpus)).collect();
        LinkMatrix { gpus, cells }
    }

    fn between(&self, a: usize, b: usize) -> Option<GpuLink> {
        (a < self.gpus && b < self.gpus).then(|| self.cells[a * self.gpus + b])
    }
}

/// Why rows are not the links between the GPUs of a node.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum LinkMatrixError {
    /// A row has another number of cells than there are rows.
    #[error("links: row {row} has {cells} cells for {gpus} GPUs")]
    RowLength {
        /// The index of the row.
        row: usize,
        /// The number of cells in it.
        cells: usize,
        /// The number of rows.
        gpus: usize,
    },
    /// A cell is not a link.
    #[error("links: row {row}: {link}")]
    UnknownLink {
        /// The index of the row.
        row: usize,
        /// The text of the cell, and what to write instead.
        link: UnknownLink,
    },
    /// The two directions between a pair of GPUs differ.
    #[error("links: GPU {first} to {second} and GPU {second} to {first} differ")]
    Asymmetric {
        /// The GPU with the lower index.
        first: usize,
        /// The GPU with the higher index.
        second: usize,
    },
}

impl TryFrom<Vec<String>> for LinkMatrix {
    type Error = LinkMatrixError;

    fn try_from(rows: Vec<String>) -> Result<Self, LinkMatrixError> {
        let gpus = rows.len();
        let mut cells = Vec::with_capacity(gpus * gpus);
        for (row, text) in rows.iter().enumerate() {
            let names: Vec<&str> = text.split_whitespace().collect();
            if names.len() != gpus {
                return Err(LinkMatrixError::RowLength { row, cells: names.len(), gpus });
            }
            for name in names {
                // The link of a GPU to itself is never used.
                let link = if name == "X" { Ok(GpuLink::NvLink) } else { name.parse::<GpuLink>() };
                cells.push(link.map_err(|link| LinkMatrixError::UnknownLink { row, link })?);
            }
        }
        let links = LinkMatrix { gpus, cells };
        for second in 0..gpus {
            let differs = |first: &usize| links.between(*first, second) != links.between(second, *first);
            if let Some(first) = (0..second).find(differs) {
                return Err(LinkMatrixError::Asymmetric { first, second });
            }
        }
        Ok(links)
    }
}

impl From<LinkMatrix> for Vec<String> {
    fn from(links: LinkMatrix) -> Vec<String> {
        (0..links.gpus)
            .map(|row| {
                let cell = |column: usize| match links.between(row, column) {
                    Some(link) if row != column => link.to_string(),
                    _ => "X".to_string(),
                };
                (0..links.gpus).map(cell).collect::<Vec<_>>().join(" ")
            })
            .collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn invalid_links_and_overcommitments_have_typed_errors() {
        let links =
            |rows: &[&str]| LinkMatrix::try_from(rows.iter().map(|row| row.to_string()).collect::<Vec<_>>());
        let good = links(&["X PIX", "PIX X"]).unwrap();
        assert_eq!(Vec::from(good), ["X PIX", "PIX X"]);
        assert_eq!(links(&["X PIX"]), Err(LinkMatrixError::RowLength { row: 0, cells: 2, gpus: 1 }));
        assert_eq!(links(&["X PIX", "SYS X"]), Err(LinkMatrixError::Asymmetric { first: 0, second: 1 }));
        let unknown = links(&["X PIX", "PCI X"]).unwrap_err();
        assert_eq!(unknown, LinkMatrixError::UnknownLink { row: 1, link: UnknownLink("PCI".into()) });
        assert!(unknown.to_string().ends_with("use NV<n>, PIX, PXB, PHB, NODE or SYS"), "{unknown}");
        assert_eq!(Overcommit::try_from(99), Err(OvercommitError(99)));
        assert_eq!(Overcommit::try_from(150).map(u32::from), Ok(150));
    }
}
