//! What GPUs become: devices that kubelet counts, and amounts that the node publishes. Pure functions.
//!
//! Every dialect has one resource that kubelet counts by device. Its devices are slots that belong to no GPU until they are
//! granted: a GPU that becomes unhealthy takes with it the slots that are granted on it, and as many free ones as it had beyond
//! those. What is requested beside the count (memory, compute) is an amount in the node's status.

mod amounts;

pub use amounts::{PodRequest, Requested, amounts, requested};

use crate::plugin::{DeviceId, Listed};
use crate::settings::Settings;
use partage_core::dialect::grants::vcuda;
use partage_core::dialect::{Dialect, MemoryUnit};
use partage_core::model::{Gpu, Node};
use partage_core::pod::Container;
use std::collections::{BTreeMap, BTreeSet};
use std::fmt;

/// The most devices of one resource: kubelet takes no longer message than about 63,000 need.
pub const MOST_DEVICES: u64 = 50_000;
/// All of one GPU's compute in `vcuda-core`.
const VCUDA_CORES: u32 = 100;
const SLOT: &str = "slot-";

/// A resource that kubelet counts.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum CountResource {
    /// `partage.dev/gpu`: one for each share.
    Native,
    /// `volcano.sh/vgpu-number`: one for each share.
    Volcano,
    /// `<domain>/vcuda-core`: one for each percent.
    Vcuda(String),
    /// `k8s.amazonaws.com/vgpu`: one for each slot.
    Aws,
    /// `aliyun.com/gpu-mem`: one for each unit of memory.
    Gpushare,
    /// `nvidia.com/gpu`: one for each share.
    Hami,
}

impl CountResource {
    /// The resources of the dialects that a node speaks.
    pub fn enabled(settings: &Settings) -> Vec<CountResource> {
        let of = |dialect: &Dialect| match dialect {
            Dialect::Native => vec![CountResource::Native],
            Dialect::Gpushare => vec![CountResource::Gpushare],
            Dialect::Volcano => vec![CountResource::Volcano],
            Dialect::Vcuda => settings.vcuda_domains.iter().cloned().map(CountResource::Vcuda).collect(),
            Dialect::Aws => vec![CountResource::Aws],
            Dialect::Hami => vec![CountResource::Hami],
        };
        // Each once, whatever was written twice.
        let all: BTreeSet<CountResource> = settings.dialects.iter().flat_map(of).collect();
        all.into_iter().collect()
    }

    /// The one that kubelet counts for a container that asks in this dialect.
    pub(crate) fn of(dialect: Dialect, container: &Container) -> CountResource {
        match dialect {
            Dialect::Native => CountResource::Native,
            Dialect::Gpushare => CountResource::Gpushare,
            Dialect::Volcano => CountResource::Volcano,
            Dialect::Vcuda => {
                CountResource::Vcuda(vcuda::domain(container).unwrap_or("tencent.com").to_string())
            }
            Dialect::Aws => CountResource::Aws,
            Dialect::Hami => CountResource::Hami,
        }
    }

    /// Its name in manifests.
    pub fn name(&self) -> String {
        match self {
            CountResource::Native => "partage.dev/gpu".into(),
            CountResource::Volcano => "volcano.sh/vgpu-number".into(),
            CountResource::Vcuda(domain) => format!("{domain}/vcuda-core"),
            CountResource::Aws => "k8s.amazonaws.com/vgpu".into(),
            CountResource::Gpushare => "aliyun.com/gpu-mem".into(),
            CountResource::Hami => "nvidia.com/gpu".into(),
        }
    }

    fn slots_of(&self, gpu: &Gpu, settings: &Settings) -> u32 {
        match self {
            CountResource::Native | CountResource::Volcano | CountResource::Hami => settings.shares_per_gpu,
            CountResource::Vcuda(_) => VCUDA_CORES,
            CountResource::Aws => settings.aws_slots,
            CountResource::Gpushare => {
                let units =
                    settings.memory_overcommit.of(gpu.memory_bytes).0 / settings.gpushare_unit.bytes();
                u32::try_from(units).unwrap_or(u32::MAX)
            }
        }
    }
}

impl fmt::Display for CountResource {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(&self.name())
    }
}

/// How many slots each GPU has.
///
/// `node` is the machine with all of its GPUs (`Inventory::counted_node`), where only those in MIG mode are
/// withheld: these have none. A GPU that is merely ill or silent keeps its slots, or kubelet would forget who holds them.
pub fn slots(resource: &CountResource, node: &Node, settings: &Settings) -> Vec<u32> {
    let of = |gpu: &Gpu| match gpu.withheld {
        Some(_) => 0,
        None => resource.slots_of(gpu, settings),
    };
    node.gpus.iter().map(of).collect()
}

/// Whether kubelet can count all resources of this node. The error says which one it cannot, and what to do.
pub fn check(settings: &Settings, node: &Node) -> Result<(), String> {
    for resource in CountResource::enabled(settings) {
        let devices: u64 = slots(&resource, node, settings).into_iter().map(u64::from).sum();
        if devices <= MOST_DEVICES {
            continue;
        }
        let instead = match resource {
            CountResource::Gpushare if settings.gpushare_unit == MemoryUnit::Mib => "count it in GiB",
            CountResource::Gpushare => "lower the overcommitment of memory",
            CountResource::Aws => "split GPUs in fewer slots",
            CountResource::Vcuda(_) => "switch this dialect off",
            _ => "allow fewer shares of each GPU",
        };
        return Err(format!(
            "{resource} would be {devices} devices on node {}, and kubelet takes {MOST_DEVICES} of one resource at the most: {instead}",
            node.name
        ));
    }
    Ok(())
}

/// The devices of a resource with their health, as kubelet is told of them.
///
/// `slots` and `ill` are per GPU. `held` are the ids that containers hold, with the GPUs that their grants lie on; the ids of
/// a grant on several GPUs are shared out among these. Ids that are held stay in the list whatever `slots` says now.
///
/// As many ids are healthy as healthy GPUs have slots, plus one for each id that is held on an unhealthy GPU: kube-scheduler
/// subtracts the requests of those pods, too, and would otherwise take them from healthy GPUs. Without any healthy GPU there are
/// none. An id that is held and belongs to no GPU counts against the slots of healthy GPUs: its container was not granted anything
/// yet, or is gone and kubelet has not reused the id.
///
/// Slots are counted for the node and not for each GPU, so more may be held on one than it has: when it is lost, others still offer
/// all of theirs, by further ids.
pub fn devices(slots: &[u32], ill: &[bool], held: &BTreeMap<DeviceId, BTreeSet<usize>>) -> Vec<Listed> {
    let is_ill = |gpu: usize| ill.get(gpu).copied().unwrap_or(false);
    let on = share_out(held);
    let is_on_ill = |id: &&DeviceId| on.get(id).is_some_and(|gpu| is_ill(*gpu));
    let is_on_well = |id: &&DeviceId| on.get(id).is_some_and(|gpu| !is_ill(*gpu));
    let count = |ids: usize| ids as u64;
    let well_slots: u64 =
        (0..).zip(slots).filter(|(gpu, _)| !is_ill(*gpu)).map(|(_, &slots)| u64::from(slots)).sum();
    let left = well_slots.saturating_sub(count(held.keys().filter(is_on_well).count()));
    let without_gpu: Vec<&DeviceId> = held.keys().filter(|id| !on.contains_key(id)).collect();
    let healthy_without_gpu: BTreeSet<&DeviceId> =
        without_gpu.into_iter().take(usize::try_from(left).unwrap_or(usize::MAX)).collect();
    let mut free = left - count(healthy_without_gpu.len());
    if well_slots > 0 {
        let listed = count(held.len()).saturating_add(free);
        let on_ill = count(held.keys().filter(is_on_ill).count());
        free += on_ill.min(MOST_DEVICES.saturating_sub(listed));
    }
    let is_well = |id: &DeviceId| is_on_well(&id) || healthy_without_gpu.contains(id);

    let configured: u64 = slots.iter().map(|&slots| u64::from(slots)).sum();
    let mut listed = Vec::new();
    // The first free ids are healthy, so that those at the beginning are usable for as long as any is.
    for id in (0..).map(id).take(usize::try_from(configured).unwrap_or(usize::MAX)) {
        let healthy = if held.contains_key(&id) {
            is_well(&id)
        } else {
            let well = free > 0;
            free -= u64::from(well);
            well
        };
        listed.push(Listed { id, healthy });
    }
    let beyond = held.keys().filter(|id| number(id).is_none_or(|number| number >= configured));
    listed.extend(beyond.map(|id| Listed { id: id.clone(), healthy: is_well(id) }));
    let more = (configured..).map(id).filter(|id| !held.contains_key(id));
    listed.extend(
        more.take(usize::try_from(free).unwrap_or(usize::MAX)).map(|id| Listed { id, healthy: true }),
    );
    listed
}

/// One GPU for each id that is held on any.
fn share_out(held: &BTreeMap<DeviceId, BTreeSet<usize>>) -> BTreeMap<&DeviceId, usize> {
    let mut alike: BTreeMap<&BTreeSet<usize>, usize> = BTreeMap::new();
    let mut on = BTreeMap::new();
    for (id, gpus) in held {
        let turn = alike.entry(gpus).or_default();
        on.extend(gpus.iter().cycle().nth(*turn).map(|&gpu| (id, gpu)));
        *turn += 1;
    }
    on
}

/// The same for ever: kubelet remembers by it who holds what.
fn id(number: u64) -> DeviceId {
    DeviceId(format!("{SLOT}{number}"))
}

fn number(id: &DeviceId) -> Option<u64> {
    id.0.strip_prefix(SLOT)?.parse().ok()
}

#[cfg(test)]
pub(crate) mod tests;
