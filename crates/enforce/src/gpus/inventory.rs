//! The GPUs of the machine, including those that do not respond.
//!
//! A lost GPU reports nothing, not even its UUID. Without it the others would be renumbered, and the grants on it would
//! refer to no GPU. So the last list is kept as a record: a GPU that is missing now keeps its place, and is withheld.

use crate::records::VersionedRecord;
use jiff::Timestamp;
use partage_core::model::{Gpu, GpuUuid, LinkMatrix, Node};
use partage_host::gpus::GpuSample;
use serde::{Deserialize, Serialize};
use std::collections::BTreeMap;

/// The GPUs of a machine in a stable order.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct Inventory {
    /// The boot in which the list was created.
    #[serde(rename = "boot")]
    boot_id: String,
    /// The source of the GPUs: NVIDIA's driver, or which simulated GPUs.
    #[serde(rename = "of")]
    source: String,
    /// How many GPUs the driver counted, whether they answered or not.
    counted: usize,
    /// The GPUs, before any is withheld for its health.
    pub node: Node,
    /// GPUs that do not respond, with the time of the first observation without them, in seconds since 1970.
    missing: BTreeMap<GpuUuid, i64>,
}

impl VersionedRecord for Inventory {
    const VERSION: u32 = 1;
}

/// The GPUs that the driver reports at one moment.
#[derive(Clone, Debug)]
pub struct Observation<'a> {
    /// The id of the current boot.
    pub boot_id: &'a str,
    /// The source of the GPUs. GPUs of another source are different GPUs, and not missing ones.
    pub source: &'a str,
    /// How many GPUs the driver counts.
    pub counted: usize,
    /// The GPUs that answer.
    pub node: Node,
    /// The time of the observation, in seconds since 1970.
    pub unix_seconds: i64,
}

impl Inventory {
    /// The name of its record.
    pub const NAME: &str = "inventory";

    /// Lists the GPUs that answer now, and those of the last list that are missing.
    pub fn new(observed: Observation<'_>, kept: Option<&Inventory>) -> Inventory {
        let missing = kept.map(|kept| kept.missing_from(&observed)).unwrap_or_default();
        let node = match kept {
            Some(kept) if !missing.is_empty() => merge(&kept.node, &observed.node, &missing),
            _ => observed.node,
        };
        Inventory {
            boot_id: observed.boot_id.into(),
            source: observed.source.into(),
            counted: observed.counted,
            node,
            missing,
        }
    }

    /// Returns the GPUs of this list that do not respond now and stay listed.
    fn missing_from(&self, observed: &Observation<'_>) -> BTreeMap<GpuUuid, i64> {
        let silent = observed.counted.saturating_sub(observed.node.gpus.len());
        let missing: BTreeMap<GpuUuid, i64> = self
            .node
            .gpus
            .iter()
            .filter(|gpu| successor_of(gpu, &self.node, &observed.node).is_none())
            .map(|gpu| {
                let since = self.missing.get(&gpu.uuid).copied().unwrap_or(observed.unix_seconds);
                (gpu.uuid.clone(), since)
            })
            .collect();
        // Cards are not removed from a running machine. After a boot, a GPU that the driver does not even count was
        // removed; and if the number of silent GPUs differs from the number of missing ones, the cards were replaced.
        let same_gpus =
            self.source == observed.source && (self.boot_id == observed.boot_id || missing.len() == silent);
        if same_gpus { missing } else { BTreeMap::new() }
    }

    /// Returns the GPUs as kubelet counts them: one that does not respond keeps its place, like one that becomes
    /// unhealthy.
    pub fn counted_node(&self) -> Node {
        let mut node = self.node.clone();
        for gpu in node.gpus.iter_mut().filter(|gpu| self.missing.contains_key(&gpu.uuid)) {
            gpu.withheld = None;
        }
        node
    }

    /// Returns the GPUs that do not respond.
    pub fn missing(&self) -> impl Iterator<Item = &GpuUuid> {
        self.missing.keys()
    }

    /// Compares the list with the driver's current count and samples. Returns what changed if the list has to be
    /// created again; a GPU that became unhealthy does not change it.
    pub fn change(&self, counted: Option<usize>, samples: &[GpuSample]) -> Option<String> {
        if let Some(counted) = counted.filter(|counted| *counted != self.counted) {
            return Some(format!("the driver reports {counted} GPUs, previously {}", self.counted));
        }
        samples.iter().find_map(|GpuSample { uuid, mig, .. }| {
            // A GPU that does not respond is unhealthy, and otherwise unchanged.
            let mig = (*mig)?;
            let Some(at) = self.node.gpu_index(uuid) else { return Some(format!("GPU {uuid} is new")) };
            if self.missing.contains_key(uuid) {
                return Some(format!("GPU {uuid} responds again"));
            }
            let was = self.node.gpus[at].withheld.is_some();
            let how = if mig { "enabled" } else { "disabled" };
            (mig != was).then(|| format!("MIG mode of GPU {uuid} was {how}"))
        })
    }
}

/// Returns the GPU that is now in the place of another: itself, or a new card in its slot.
fn successor_of<'a>(gpu: &Gpu, kept: &Node, observed: &'a Node) -> Option<&'a Gpu> {
    let is_new = |other: &Gpu| kept.gpu_index(&other.uuid).is_none();
    let in_slot = |other: &&Gpu| gpu.pci.is_some() && other.pci == gpu.pci && is_new(other);
    observed.gpus.iter().find(|other| other.uuid == gpu.uuid).or_else(|| observed.gpus.iter().find(in_slot))
}

/// Lists all GPUs in their old places, then those that are new.
fn merge(kept: &Node, observed: &Node, missing: &BTreeMap<GpuUuid, i64>) -> Node {
    let place = |gpu: &Gpu| match missing.get(&gpu.uuid) {
        Some(since) => Some(Gpu { withheld: Some(missing_reason(*since)), ..gpu.clone() }),
        None => successor_of(gpu, kept, observed).cloned(),
    };
    let mut gpus: Vec<Gpu> = kept.gpus.iter().filter_map(place).collect();
    for gpu in &observed.gpus {
        if gpus.iter().all(|listed| listed.uuid != gpu.uuid) {
            gpus.push(gpu.clone());
        }
    }
    let mut node = Node { gpus, links: None, ..observed.clone() };
    let place = |of: &Node, at: usize| of.gpu_index(&node.gpus[at].uuid);
    node.links = Some(LinkMatrix::from_fn(node.gpus.len(), |a, b| {
        let both = |of| place(of, a).zip(place(of, b)).map(|(a, b)| of.link(a, b));
        // A link to a missing GPU is kept; if the other GPU is new, the NUMA nodes decide.
        both(observed).or_else(|| both(kept)).unwrap_or_else(|| node.link(a, b))
    }));
    node
}

fn missing_reason(since: i64) -> String {
    let since = Timestamp::from_second(since).map_or_else(|_| "long ago".into(), |since| since.to_string());
    format!("no response since {since} or earlier: see dmesg, then reset it or restart the machine")
}
