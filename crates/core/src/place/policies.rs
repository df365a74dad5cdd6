//! The choice of node and GPU: a policy ranks every node that fits, the highest rank wins, and it orders the GPUs of a node.

use super::capacity::{GpuClass, NodeCapacity};
use super::cluster_capacity::unique_version;
use super::fit::{PreparedAsk, PreparedWant};
use super::gpu_order;
use super::placement::Placement;
use super::solve::{self, GpuPreference, PlacementContext};
use crate::model::{Colocation, CoresAsk, PlacementPolicy};

/// A way to choose among nodes and GPUs. It must be a function of its arguments and of its epoch.
pub trait NodeRanking: GpuPreference {
    /// Returns the name of the ranking. Rankings of one name and epoch share cached ranks.
    fn name(&self) -> &'static str;

    /// Changes whenever earlier ranks no longer hold, even for nodes that did not change.
    fn epoch(&self) -> u64 {
        0
    }

    /// Returns how good this node is for the pod, higher is better; `None` if the pod does not fit.
    fn rank(&self, capacity: &NodeCapacity, classes: &[GpuClass], prepared: &PreparedAsk) -> Option<i64>;

    /// Places the pod on the node. A placement is found wherever [`fits`] returns true.
    fn place(
        &self,
        capacity: &NodeCapacity,
        classes: &[GpuClass],
        prepared: &PreparedAsk,
    ) -> Option<Placement>
    where
        Self: Sized,
    {
        // The search is bounded, and one preference may run out of steps where another does not.
        solve::solve(capacity, classes, prepared, self)
            .or_else(|| solve::solve(capacity, classes, prepared, &StatelessPolicy(PlacementPolicy::Binpack)))
    }
}

/// Returns an epoch that no ranking has had, so that rankings of one name never share cached ranks by mistake.
pub(super) fn new_epoch() -> u64 {
    unique_version()
}

/// Returns whether a pod fits a node, without a placement. Agrees with [`solve::solve`] for every preference.
pub fn fits(capacity: &NodeCapacity, classes: &[GpuClass], prepared: &PreparedAsk) -> bool {
    if solve::host_shortfall(capacity, prepared).is_some() {
        return false;
    }
    match prepared.wants.as_slice() {
        [] => true,
        [one] => fits_alone(capacity, classes, prepared, one),
        _ => solve::solve(capacity, classes, prepared, &StatelessPolicy(PlacementPolicy::Binpack)).is_some(),
    }
}

fn fits_alone(
    capacity: &NodeCapacity,
    classes: &[GpuClass],
    prepared: &PreparedAsk,
    wanted: &PreparedWant,
) -> bool {
    let count = wanted.want.count;
    if count > 1 && prepared.ask.constraints.colocation == Colocation::Required {
        return false;
    }
    if gpu_order::fitting(capacity, classes, prepared, wanted).count_ones() >= count {
        return true;
    }
    // Slots may come from several GPUs.
    matches!(wanted.want.share.cores, CoresAsk::Slots(_))
        && solve::solve(capacity, classes, prepared, &StatelessPolicy(PlacementPolicy::Binpack)).is_some()
}

/// Orders GPUs for an ask of one whole GPU: first the one that breaks up the smallest group, then by index.
pub(super) fn least_needed_first(capacity: &NodeCapacity, gpus: &mut [usize]) {
    let mask = gpus.iter().fold(0, |mask, gpu| mask | 1 << gpu);
    if let Some(first) = gpu_order::leftover_set(capacity, mask, 1) {
        gpus.sort_by_key(|&gpu| (first != 1 << gpu, gpu));
    }
}

/// A policy that needs nothing but the node itself: binpack, spread or topology.
#[derive(Clone, Copy, Debug)]
pub struct StatelessPolicy(pub PlacementPolicy);

impl GpuPreference for StatelessPolicy {
    fn order_gpus(&self, on: &PlacementContext, wanted: &PreparedWant, gpus: &mut Vec<usize>) {
        let PlacementContext { capacity, classes, .. } = *on;
        if wanted.want.share.whole {
            return least_needed_first(capacity, gpus);
        }
        match self.0 {
            PlacementPolicy::Spread => {
                gpus.sort_by_key(|&gpu| (gpu_order::emptiness(&capacity.gpus[gpu], classes), gpu))
            }
            _ => gpus.sort_by_key(|&gpu| (gpu_order::fullness(&capacity.gpus[gpu], classes), gpu)),
        }
    }

    fn choose_gpu_set(&self, on: &PlacementContext, wanted: &PreparedWant, mask: u64) -> Option<u64> {
        let capacity = on.capacity;
        let count = wanted.want.count;
        match self.0 {
            // Of sets with equally good links, the fullest.
            PlacementPolicy::Topology => gpu_order::linked_set(capacity, mask, count, |gpu| {
                gpu_order::fullness(&capacity.gpus[gpu], on.classes)
            }),
            PlacementPolicy::Spread if wanted.want.share.whole => {
                gpu_order::linked_set(capacity, mask, count, |gpu| gpu)
            }
            _ if wanted.want.share.whole => gpu_order::leftover_set(capacity, mask, count),
            _ => {
                let mut gpus: Vec<usize> = gpu_order::indexes(mask).collect();
                self.order_gpus(on, wanted, &mut gpus);
                gpu_order::first(&gpus, count)
            }
        }
    }
}

impl NodeRanking for StatelessPolicy {
    fn name(&self) -> &'static str {
        self.0.name()
    }

    fn rank(&self, capacity: &NodeCapacity, classes: &[GpuClass], prepared: &PreparedAsk) -> Option<i64> {
        if !fits(capacity, classes, prepared) {
            return None;
        }
        let free = free_total(capacity, classes);
        Some(match self.0 {
            PlacementPolicy::Spread => free,
            PlacementPolicy::Topology => -(i64::from(worst_link(capacity, classes, prepared)) << 58) - free,
            _ => -free,
        })
    }
}

/// Returns what is free on a node as one number: compute first, memory second.
fn free_total(capacity: &NodeCapacity, classes: &[GpuClass]) -> i64 {
    let mut cores = 0i64;
    let mut mib = 0i64;
    for gpu in capacity.gpus.iter().filter(|gpu| !gpu.withheld) {
        cores += i64::from(gpu.free_cores().as_millipercent());
        mib += (gpu.free_memory(&classes[usize::from(gpu.class)]).0 >> 20) as i64;
    }
    // 64 GPUs of 100,000 need 23 bits; the 34 bits for memory hold 16 PiB.
    (cores << 34) + mib.min((1 << 34) - 1)
}

/// Returns the worst link within the best set for the container that requests most GPUs; 0 if one GPU is enough.
fn worst_link(capacity: &NodeCapacity, classes: &[GpuClass], prepared: &PreparedAsk) -> u8 {
    let several = prepared.wants.iter().filter(|wanted| wanted.want.count > 1);
    let Some(widest) = several.max_by_key(|wanted| wanted.want.count) else { return 0 };
    let mask = gpu_order::fitting(capacity, classes, prepared, widest);
    let set = gpu_order::linked_set(capacity, mask, widest.want.count, |gpu| gpu).unwrap_or(0);
    gpu_order::links(capacity, set).0.map_or(0, |worst| worst as u8)
}
