//! What a node has: its GPUs, how they are linked, and how it may be shared.

use super::{Bytes, GpuUuid, MilliCpu, NodeName};
use serde::{Deserialize, Serialize};
use std::fmt;
use std::str::FromStr;

/// Maximum number of GPUs per node: the allocator keeps sets of GPUs as the bits of one word.
pub const MAX_GPUS_PER_NODE: usize = 64;
/// Slots a GPU is split in for the AWS dialect where a node says nothing else.
pub const DEFAULT_SLOTS: u32 = 10;
/// The most slots a GPU can be split in: the clients one MPS server takes.
pub const MAX_SLOTS: u32 = 48;

/// A physical GPU.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
pub struct Gpu {
    /// Its UUID.
    pub uuid: GpuUuid,
    /// Its minor number: `/dev/nvidia<minor>`.
    pub minor: u32,
    /// Its product name.
    pub model: String,
    /// Its memory.
    pub memory_bytes: Bytes,
    /// The NUMA node it hangs on, where known.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub numa: Option<u32>,
    /// Its PCI address, where known.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub pci: Option<String>,
    /// Why it is listed but not offered (unhealthy, MIG enabled); absent while it is offered.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub withheld: Option<String>,
}

/// A node and what it has.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
pub struct Node {
    /// Its name.
    pub name: NodeName,
    /// Its GPUs; a GPU's index is its position here.
    #[serde(default)]
    pub gpus: Vec<Gpu>,
    /// How its GPUs are linked; derived from NUMA nodes where absent.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub links: Option<Links>,
    /// CPU that pods may use; absent = not counted here.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub cpu_milli: Option<MilliCpu>,
    /// Memory that pods may use; absent = not counted here.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub memory_bytes: Option<Bytes>,
    /// How much GPU memory may be promised.
    #[serde(default, skip_serializing_if = "Overcommit::is_none")]
    pub memory_overcommit_percent: Overcommit,
    /// Slots per GPU for the AWS dialect.
    #[serde(default = "default_slots", skip_serializing_if = "is_default_slots")]
    pub slots_per_gpu: u32,
    /// The most shares one GPU takes; absent = as many as fit.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub max_shares_per_gpu: Option<u32>,
}

fn default_slots() -> u32 {
    DEFAULT_SLOTS
}

// The signature is serde's.
#[allow(clippy::trivially_copy_pass_by_ref)]
fn is_default_slots(slots: &u32) -> bool {
    *slots == DEFAULT_SLOTS
}

impl Node {
    /// A node with these GPUs and every setting at its default.
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

    /// The link between two GPUs of this node.
    pub fn link(&self, a: usize, b: usize) -> Link {
        if let Some(link) = self.links.as_ref().and_then(|links| links.between(a, b)) {
            return link;
        }
        match (self.gpus.get(a).and_then(|g| g.numa), self.gpus.get(b).and_then(|g| g.numa)) {
            (Some(x), Some(y)) if x == y => Link::Node,
            _ => Link::System,
        }
    }

    /// The index of a GPU.
    pub fn gpu_index(&self, uuid: &GpuUuid) -> Option<usize> {
        self.gpus.iter().position(|gpu| gpu.uuid == *uuid)
    }
}

/// Promised GPU memory in percent of the real one; 100 = never more than there is.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(try_from = "u32", into = "u32")]
pub struct Overcommit(u32);

impl Overcommit {
    /// From 100 (none) to 10,000 percent.
    pub fn percent(percent: u32) -> Option<Overcommit> {
        (100..=10_000).contains(&percent).then_some(Overcommit(percent))
    }

    /// What may be promised of `memory`.
    pub fn of(self, memory: Bytes) -> Bytes {
        memory.percent(self.0)
    }

    // The signature is serde's.
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

impl TryFrom<u32> for Overcommit {
    type Error = String;

    fn try_from(percent: u32) -> Result<Self, String> {
        Overcommit::percent(percent)
            .ok_or_else(|| format!("memoryOvercommitPercent is {percent}: write 100 (none) to 10000"))
    }
}

impl From<Overcommit> for u32 {
    fn from(overcommit: Overcommit) -> u32 {
        overcommit.0
    }
}

/// How two GPUs reach each other, best first, in the words of `nvidia-smi topo -m`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Link {
    /// NVLink.
    NvLink,
    /// One PCIe switch.
    Pix,
    /// Several PCIe switches.
    Pxb,
    /// A PCIe host bridge.
    Phb,
    /// The same NUMA node.
    Node,
    /// Across NUMA nodes.
    System,
}

impl Link {
    /// Every kind of link, best first.
    pub const ALL: [Link; 6] = [Link::NvLink, Link::Pix, Link::Pxb, Link::Phb, Link::Node, Link::System];
}

/// A link name nobody prints.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("\"{0}\" is no link between GPUs: use NV<n>, PIX, PXB, PHB, NODE or SYS")]
pub struct UnknownLink(String);

impl FromStr for Link {
    type Err = UnknownLink;

    fn from_str(text: &str) -> Result<Self, UnknownLink> {
        Ok(match text {
            "PIX" => Link::Pix,
            "PXB" => Link::Pxb,
            "PHB" => Link::Phb,
            "NODE" | "SOC" => Link::Node,
            "SYS" => Link::System,
            _ => match text.strip_prefix("NV") {
                Some(n) if n.bytes().all(|b| b.is_ascii_digit()) => Link::NvLink,
                _ => return Err(UnknownLink(text.into())),
            },
        })
    }
}

impl fmt::Display for Link {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Link::NvLink => "NV",
            Link::Pix => "PIX",
            Link::Pxb => "PXB",
            Link::Phb => "PHB",
            Link::Node => "NODE",
            Link::System => "SYS",
        })
    }
}

/// The links between all GPUs of a node: rows of `nvidia-smi topo -m`, as text (`"X PIX SYS SYS"`).
#[derive(Clone, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(try_from = "Vec<String>", into = "Vec<String>")]
pub struct Links {
    gpus: usize,
    cells: Vec<Link>,
}

impl Links {
    /// Links given by a function of two GPU indexes.
    pub fn from_fn(gpus: usize, link: impl Fn(usize, usize) -> Link) -> Links {
        let cells = (0..gpus * gpus).map(|cell| link(cell / gpus, cell % gpus)).collect();
        Links { gpus, cells }
    }

    fn between(&self, a: usize, b: usize) -> Option<Link> {
        (a < self.gpus && b < self.gpus).then(|| self.cells[a * self.gpus + b])
    }
}

impl TryFrom<Vec<String>> for Links {
    type Error = String;

    fn try_from(rows: Vec<String>) -> Result<Self, String> {
        let gpus = rows.len();
        let mut cells = Vec::with_capacity(gpus * gpus);
        for (index, row) in rows.iter().enumerate() {
            let names: Vec<&str> = row.split_whitespace().collect();
            if names.len() != gpus {
                return Err(format!("links: row {index} has {} cells for {gpus} GPUs", names.len()));
            }
            for name in names {
                // A GPU's link to itself is never asked for.
                let link = if name == "X" { Ok(Link::NvLink) } else { name.parse::<Link>() };
                cells.push(link.map_err(|e| format!("links: row {index}: {e}"))?);
            }
        }
        let links = Links { gpus, cells };
        for a in 0..gpus {
            for b in 0..a {
                if links.between(a, b) != links.between(b, a) {
                    return Err(format!("links: GPU {b} to {a} and GPU {a} to {b} differ"));
                }
            }
        }
        Ok(links)
    }
}

impl From<Links> for Vec<String> {
    fn from(links: Links) -> Vec<String> {
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
