//! The placement of a pod: its shares, their usage, and the grant that records them.

use super::capacity::{GpuAllocation, GpuClass, NodeCapacity};
use super::fit::{PreparedAsk, ShareNeed};
use super::solve::host_shortfall;
use crate::model::{Ask, ContainerRole, Grant, PodGrant, Share};

/// A share on a GPU.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct PlacedShare {
    /// The index of the GPU on its node.
    pub gpu: usize,
    /// The requirements of the share there.
    pub need: ShareNeed,
}

/// A pod on a node: the shares of each container.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Placement {
    /// The shares of each ask, in the order of the asks.
    pub shares: Vec<Vec<PlacedShare>>,
}

impl Placement {
    /// Returns what the pod uses of each GPU, at the time when it uses most.
    pub fn usage_by_gpu(&self, asks: &[Ask]) -> Vec<(usize, GpuAllocation)> {
        let roles: Vec<ContainerRole> = asks.iter().map(|ask| ask.role).collect();
        let placed = |at: usize| self.shares[at].iter().map(|placed| (placed.gpu, placed.need.usage));
        peak_usage(&roles, placed)
    }

    /// Returns the grant that records the placement.
    pub fn grant(&self, asks: &[Ask], capacity: &NodeCapacity) -> PodGrant {
        let share = |placed: &PlacedShare| Share {
            gpu: capacity.node.gpus[placed.gpu].uuid.clone(),
            memory_bytes: placed.need.limit,
            cores: placed.need.cores,
            ceiling: placed.need.ceiling,
            whole: placed.need.usage.whole > 0,
        };
        let grants = asks.iter().zip(&self.shares).map(|(ask, placed)| Grant {
            container: ask.container.clone(),
            init: ask.role == ContainerRole::Init,
            shares: placed.iter().map(share).collect(),
        });
        PodGrant { node: capacity.node.name.clone(), grants: grants.collect() }
    }
}

/// Returns what a pod uses of each GPU at the time when it uses most, given the role and the usage of each container.
///
/// As Kubernetes counts: all sidecars and ordinary containers together, or any one init container with the sidecars
/// declared before it.
pub(crate) fn peak_usage<I: Iterator<Item = (usize, GpuAllocation)>>(
    roles: &[ContainerRole],
    taken: impl Fn(usize) -> I,
) -> Vec<(usize, GpuAllocation)> {
    let sum = |members: &mut dyn Iterator<Item = usize>| {
        let mut sums: Vec<(usize, GpuAllocation)> = Vec::new();
        for (gpu, usage) in members.flat_map(&taken) {
            match sums.iter_mut().find(|(at, _)| *at == gpu) {
                Some((_, sum)) => *sum = sum.plus(usage),
                None => sums.push((gpu, usage)),
            }
        }
        sums
    };
    let all = 0..roles.len();
    let mut peak = sum(&mut all.clone().filter(|&at| roles[at] != ContainerRole::Init));
    for init in all.filter(|&at| roles[at] == ContainerRole::Init) {
        let mut phase = (0..=init).filter(|&at| at == init || roles[at] == ContainerRole::Sidecar);
        for (gpu, usage) in sum(&mut phase) {
            match peak.iter_mut().find(|(at, _)| *at == gpu) {
                Some((_, most)) => *most = most.max(usage),
                None => peak.push((gpu, usage)),
            }
        }
    }
    peak.sort_unstable_by_key(|(gpu, _)| *gpu);
    peak
}

/// Returns whether a placement that was found earlier still fits its node, which may have changed since.
pub(crate) fn still_fits(
    capacity: &NodeCapacity,
    classes: &[GpuClass],
    prepared: &PreparedAsk,
    placement: &Placement,
) -> bool {
    if host_shortfall(capacity, prepared).is_some() || placement.shares.len() != prepared.wants.len() {
        return false;
    }
    let role = |at: usize| prepared.wants[at].role;
    // Containers that run at the same time, one after another on the node without the pod.
    let fits_together = |members: &mut dyn Iterator<Item = usize>| {
        let mut gpus = capacity.gpus.clone();
        members.flat_map(|at| &placement.shares[at]).all(|placed| {
            gpus.get_mut(placed.gpu).is_some_and(|gpu| {
                let fits = placed.need.fits(gpu, &classes[usize::from(gpu.class)]);
                gpu.used = gpu.used.plus(placed.need.usage);
                fits
            })
        })
    };
    let all = 0..prepared.wants.len();
    fits_together(&mut all.clone().filter(|&at| role(at) != ContainerRole::Init))
        && all.filter(|&at| role(at) == ContainerRole::Init).all(|init| {
            fits_together(&mut (0..=init).filter(|&at| at == init || role(at) == ContainerRole::Sidecar))
        })
}
