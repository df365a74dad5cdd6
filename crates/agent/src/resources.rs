//! Computes the devices that kubelet counts and the amounts that the node publishes. Pure functions.
//!
//! Every dialect has one resource that kubelet counts by device. Its devices are slots that belong to no GPU until they are
//! granted: a GPU that becomes unhealthy makes the slots unhealthy that are granted on it, and as many free ones as it had beyond
//! those. Memory and compute, which pods request beside the count, are amounts in the node's status.

mod amounts;

pub use amounts::{PodRequest, RequestedAmounts, amounts, requested};

use crate::device_plugin::{DeviceId, ListedDevice};
use crate::settings::AgentSettings;
use partage_core::dialect::grants::vcuda;
use partage_core::dialect::{Dialect, MemoryUnit};
use partage_core::model::{Gpu, Node, NodeName};
use partage_core::pod::ContainerManifest;
use std::collections::{BTreeMap, BTreeSet};
use std::fmt;

/// Maximum number of devices of one resource. Kubelet's limit on the size of a message allows about 63,000.
pub const MAX_DEVICES: u64 = 50_000;
/// The compute of a whole GPU in `vcuda-core`: one device for each percent.
const VCUDA_CORES: u32 = 100;
/// The beginning of device ids.
const ID_PREFIX: &str = "slot-";

/// A resource that kubelet counts by device.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum CountResource {
    /// `partage.dev/gpu`: one device for each share.
    Native,
    /// `volcano.sh/vgpu-number`: one device for each share.
    Volcano,
    /// `<domain>/vcuda-core`: one device for each percent of a GPU.
    Vcuda(String),
    /// `k8s.amazonaws.com/vgpu`: one device for each slot.
    Aws,
    /// `aliyun.com/gpu-mem`: one device for each unit of memory.
    Gpushare,
    /// `nvidia.com/gpu`: one device for each share.
    Hami,
}

impl CountResource {
    /// Returns the resources of the enabled dialects.
    pub fn enabled(settings: &AgentSettings) -> Vec<CountResource> {
        let of = |dialect: &Dialect| match dialect {
            Dialect::Native => vec![CountResource::Native],
            Dialect::Gpushare => vec![CountResource::Gpushare],
            Dialect::Volcano => vec![CountResource::Volcano],
            Dialect::Vcuda => settings.vcuda_domains.iter().cloned().map(CountResource::Vcuda).collect(),
            Dialect::Aws => vec![CountResource::Aws],
            Dialect::Hami => vec![CountResource::Hami],
        };
        // Without duplicates.
        let all: BTreeSet<CountResource> = settings.dialects.iter().flat_map(of).collect();
        all.into_iter().collect()
    }

    /// Returns the resource that kubelet counts for a container that asks in this dialect.
    pub(crate) fn of(dialect: Dialect, container: &ContainerManifest) -> CountResource {
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

    /// Returns the resource's name in manifests.
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

    fn slots_of(&self, gpu: &Gpu, settings: &AgentSettings) -> u32 {
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

/// Returns the number of slots of each GPU.
///
/// `node` is the machine with all of its GPUs (`Inventory::counted_node`), where only those in MIG mode are
/// withheld: these have none. A GPU that is unhealthy or does not respond keeps its slots, or kubelet would lose their allocations.
pub fn slots(resource: &CountResource, node: &Node, settings: &AgentSettings) -> Vec<u32> {
    let of = |gpu: &Gpu| match gpu.withheld {
        Some(_) => 0,
        None => resource.slots_of(gpu, settings),
    };
    node.gpus.iter().map(of).collect()
}

/// A resource with more devices than kubelet can count.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error(
    "{resource} would have {devices} devices on node {node}, and kubelet supports at most {MAX_DEVICES} of one resource: {remedy}"
)]
pub struct TooManyDevices {
    resource: CountResource,
    devices: u64,
    node: NodeName,
    /// What to change in the settings.
    remedy: &'static str,
}

/// Checks that kubelet can count all resources of this node.
pub fn check(settings: &AgentSettings, node: &Node) -> Result<(), TooManyDevices> {
    for resource in CountResource::enabled(settings) {
        let devices: u64 = slots(&resource, node, settings).into_iter().map(u64::from).sum();
        if devices <= MAX_DEVICES {
            continue;
        }
        let remedy = match resource {
            CountResource::Gpushare if settings.gpushare_unit == MemoryUnit::Mib => "set gpushareUnit: GiB",
            CountResource::Gpushare => "lower memoryOvercommitPercent",
            CountResource::Aws => "lower awsSlots",
            CountResource::Vcuda(_) => "remove vcuda from dialects",
            _ => "lower sharesPerGpu",
        };
        return Err(TooManyDevices { resource, devices, node: node.name.clone(), remedy });
    }
    Ok(())
}

/// Returns the devices of a resource with their health, as they are listed to kubelet.
///
/// `slots` and `unhealthy` are per GPU. `held` are the ids that containers hold, with the GPUs of their grants; the ids of a
/// grant on several GPUs are distributed among these. Held ids stay in the list even if `slots` is smaller now.
///
/// As many ids are healthy as healthy GPUs have slots, plus one for each id that is held on an unhealthy GPU: kube-scheduler
/// subtracts the requests of those pods, too, and would otherwise take them from healthy GPUs. Without any healthy GPU there are
/// none. An id that is held and belongs to no GPU counts against the slots of healthy GPUs: its container was not granted anything
/// yet, or is gone and kubelet has not reused the id.
///
/// Slots are counted for the node and not for each GPU, so one GPU may hold more than its own: when it is lost, the others still
/// offer all of theirs, with additional ids.
pub fn devices(
    slots: &[u32],
    unhealthy: &[bool],
    held: &BTreeMap<DeviceId, BTreeSet<usize>>,
) -> Vec<ListedDevice> {
    let is_unhealthy = |gpu: usize| unhealthy.get(gpu).copied().unwrap_or(false);
    let on = distribute(held);
    let is_on_unhealthy = |id: &&DeviceId| on.get(id).is_some_and(|gpu| is_unhealthy(*gpu));
    let is_on_healthy = |id: &&DeviceId| on.get(id).is_some_and(|gpu| !is_unhealthy(*gpu));
    let count = |ids: usize| ids as u64;
    let healthy_slots: u64 =
        (0..).zip(slots).filter(|(gpu, _)| !is_unhealthy(*gpu)).map(|(_, &slots)| u64::from(slots)).sum();
    let left = healthy_slots.saturating_sub(count(held.keys().filter(is_on_healthy).count()));
    let without_gpu: Vec<&DeviceId> = held.keys().filter(|id| !on.contains_key(id)).collect();
    let healthy_without_gpu: BTreeSet<&DeviceId> =
        without_gpu.into_iter().take(usize::try_from(left).unwrap_or(usize::MAX)).collect();
    let mut free = left - count(healthy_without_gpu.len());
    if healthy_slots > 0 {
        let listed = count(held.len()).saturating_add(free);
        let on_unhealthy = count(held.keys().filter(is_on_unhealthy).count());
        free += on_unhealthy.min(MAX_DEVICES.saturating_sub(listed));
    }
    let is_healthy = |id: &DeviceId| is_on_healthy(&id) || healthy_without_gpu.contains(id);

    let configured: u64 = slots.iter().map(|&slots| u64::from(slots)).sum();
    let mut listed = Vec::new();
    // The first free ids are healthy, so that those at the beginning are usable for as long as any is.
    for id in (0..).map(slot_id).take(usize::try_from(configured).unwrap_or(usize::MAX)) {
        let healthy = if held.contains_key(&id) {
            is_healthy(&id)
        } else {
            let is_free = free > 0;
            free -= u64::from(is_free);
            is_free
        };
        listed.push(ListedDevice { id, healthy });
    }
    let beyond = held.keys().filter(|id| slot_number(id).is_none_or(|number| number >= configured));
    listed.extend(beyond.map(|id| ListedDevice { id: id.clone(), healthy: is_healthy(id) }));
    let more = (configured..).map(slot_id).filter(|id| !held.contains_key(id));
    listed.extend(
        more.take(usize::try_from(free).unwrap_or(usize::MAX)).map(|id| ListedDevice { id, healthy: true }),
    );
    listed
}

/// Assigns one GPU to each id that is held on any.
fn distribute(held: &BTreeMap<DeviceId, BTreeSet<usize>>) -> BTreeMap<&DeviceId, usize> {
    let mut alike: BTreeMap<&BTreeSet<usize>, usize> = BTreeMap::new();
    let mut on = BTreeMap::new();
    for (id, gpus) in held {
        let turn = alike.entry(gpus).or_default();
        on.extend(gpus.iter().cycle().nth(*turn).map(|&gpu| (id, gpu)));
        *turn += 1;
    }
    on
}

/// Returns the id of a slot. It never changes: kubelet records allocations by it.
fn slot_id(number: u64) -> DeviceId {
    DeviceId(format!("{ID_PREFIX}{number}"))
}

fn slot_number(id: &DeviceId) -> Option<u64> {
    id.0.strip_prefix(ID_PREFIX)?.parse().ok()
}

#[cfg(test)]
pub(crate) mod tests;
