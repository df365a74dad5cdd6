//! The node's GPUs, also those that do not answer.
//!
//! A GPU that is lost tells nothing, not even its name. Without it the others would move up, and what pods hold on it would be held
//! on nothing. So the last list is kept: a GPU that is missing now is still in its place, and withheld.

use crate::settings::{DriverChoice, Settings};
use jiff::Timestamp;
use partage_core::model::{Gpu, GpuUuid, Links, Node};
use partage_enforce::records::VersionedRecord;
use partage_host::gpus::Look;
use serde::{Deserialize, Serialize};
use std::collections::BTreeMap;

/// What the list is called among the agent's records.
pub(crate) const INVENTORY: &str = "inventory";

/// The GPUs of a node.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub(crate) struct Inventory {
    /// The boot in which it was made.
    boot: String,
    /// Which GPUs these are: the machine's, or simulated ones.
    of: String,
    /// How many the driver counted, whether they answered or not.
    counted: usize,
    /// The GPUs, before anything is withheld for its health.
    pub(crate) node: Node,
    /// Those that do not answer, and since when, in seconds since 1970.
    missing: BTreeMap<GpuUuid, i64>,
}

impl VersionedRecord for Inventory {
    const VERSION: u32 = 1;
}

/// What the driver tells at one moment.
pub(crate) struct Found<'a> {
    pub(crate) boot: &'a str,
    pub(crate) settings: &'a Settings,
    /// How many GPUs it counts.
    pub(crate) counted: usize,
    /// Those that answer.
    pub(crate) node: Node,
    /// In seconds since 1970.
    pub(crate) now: i64,
}

impl Inventory {
    /// What is there now, and what is missing of what was there.
    pub(crate) fn new(found: Found<'_>, kept: Option<&Inventory>) -> Inventory {
        let of = of(found.settings);
        let missing = kept.map(|kept| kept.missing_from(&of, &found)).unwrap_or_default();
        let node = match kept {
            Some(kept) if !missing.is_empty() => merged(&kept.node, &found.node, &missing),
            _ => found.node,
        };
        Inventory { boot: found.boot.into(), of, counted: found.counted, node, missing }
    }

    /// Which of these do not answer now and are still to be listed.
    fn missing_from(&self, of: &str, found: &Found<'_>) -> BTreeMap<GpuUuid, i64> {
        let silent = found.counted.saturating_sub(found.node.gpus.len());
        let missing: BTreeMap<GpuUuid, i64> = self
            .node
            .gpus
            .iter()
            .filter(|gpu| in_place_of(gpu, &self.node, &found.node).is_none())
            .map(|gpu| (gpu.uuid.clone(), self.missing.get(&gpu.uuid).copied().unwrap_or(found.now)))
            .collect();
        // While a machine runs nobody takes cards out of it. After a boot one that the driver does not even count is not there any
        // more; and where others are silent than could be those, the cards are others.
        let same = self.of == of && (self.boot == found.boot || missing.len() == silent);
        if same { missing } else { BTreeMap::new() }
    }

    /// The GPUs as kubelet is to count them: one that does not answer keeps its place, as one that falls ill does.
    pub(crate) fn counted_node(&self) -> Node {
        let mut node = self.node.clone();
        for gpu in node.gpus.iter_mut().filter(|gpu| self.missing.contains_key(&gpu.uuid)) {
            gpu.withheld = None;
        }
        node
    }

    /// Those that do not answer.
    pub(crate) fn missing(&self) -> impl Iterator<Item = &GpuUuid> {
        self.missing.keys()
    }

    /// What is no longer as it was when this was made, of how many GPUs the driver counts now and what they tell. An agent that starts
    /// anew makes another list; containers do not notice.
    pub(crate) fn change(&self, counted: Option<usize>, looks: &[Look]) -> Option<String> {
        if let Some(counted) = counted.filter(|counted| *counted != self.counted) {
            return Some(format!("the driver counts {counted} of them, and counted {}", self.counted));
        }
        looks.iter().find_map(|Look { uuid, mig, .. }| {
            // One that does not answer is ill, and as it was.
            let mig = (*mig)?;
            let Some(at) = self.node.gpu_index(uuid) else { return Some(format!("GPU {uuid} is new")) };
            if self.missing.contains_key(uuid) {
                return Some(format!("GPU {uuid} answers again"));
            }
            let was = self.node.gpus[at].withheld.is_some();
            let how = if mig { "enabled" } else { "disabled" };
            (mig != was).then(|| format!("MIG mode of GPU {uuid} was {how}"))
        })
    }
}

/// Other settings of a simulated node are other GPUs.
fn of(settings: &Settings) -> String {
    match settings.driver {
        DriverChoice::Nvidia => "nvidia".into(),
        DriverChoice::Simulated => {
            format!("simulated {} {}", settings.simulated.gpus, settings.simulated.model)
        }
    }
}

/// What is now where a GPU was: itself, or a new card in its slot.
fn in_place_of<'a>(gpu: &Gpu, kept: &Node, found: &'a Node) -> Option<&'a Gpu> {
    let is_new = |other: &Gpu| kept.gpu_index(&other.uuid).is_none();
    let in_slot = |other: &&Gpu| gpu.pci.is_some() && other.pci == gpu.pci && is_new(other);
    found.gpus.iter().find(|other| other.uuid == gpu.uuid).or_else(|| found.gpus.iter().find(in_slot))
}

/// All GPUs in their old places, then those that are new.
fn merged(kept: &Node, found: &Node, missing: &BTreeMap<GpuUuid, i64>) -> Node {
    let place = |gpu: &Gpu| match missing.get(&gpu.uuid) {
        Some(since) => Some(Gpu { withheld: Some(silence(*since)), ..gpu.clone() }),
        None => in_place_of(gpu, kept, found).cloned(),
    };
    let mut gpus: Vec<Gpu> = kept.gpus.iter().filter_map(place).collect();
    for gpu in &found.gpus {
        if gpus.iter().all(|listed| listed.uuid != gpu.uuid) {
            gpus.push(gpu.clone());
        }
    }
    let mut node = Node { gpus, links: None, ..found.clone() };
    let place = |of: &Node, at: usize| of.gpu_index(&node.gpus[at].uuid);
    node.links = Some(Links::from_fn(node.gpus.len(), |a, b| {
        let both = |of| place(of, a).zip(place(of, b)).map(|(a, b)| of.link(a, b));
        // A link to one that is missing is as it was; where one is new, too, by NUMA.
        both(found).or_else(|| both(kept)).unwrap_or_else(|| node.link(a, b))
    }));
    node
}

fn silence(since: i64) -> String {
    let since = Timestamp::from_second(since).map_or_else(|_| "long ago".into(), |since| since.to_string());
    format!("it does not answer, since {since} or earlier: see dmesg, then reset it or restart the machine")
}

#[cfg(test)]
mod tests;
