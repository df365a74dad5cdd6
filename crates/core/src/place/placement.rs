//! Where a pod's parts are, what they take, and the grant that says so.

use super::fit::{Need, Prepared};
use super::room::{Charge, GpuClass, NodeRoom};
use super::solve::host_short;
use crate::model::{Ask, Grant, PodGrant, Role, Share};

/// A part on a GPU.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Slice {
    /// The GPU's index.
    pub gpu: usize,
    /// What it takes there.
    pub need: Need,
}

/// A pod on a node: for each ask, in order, its parts.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Placement {
    /// The parts of each ask.
    pub slices: Vec<Vec<Slice>>,
}

impl Placement {
    /// What the pod takes of each GPU it touches, at the time it takes most.
    pub fn charges(&self, asks: &[Ask]) -> Vec<(usize, Charge)> {
        let roles: Vec<Role> = asks.iter().map(|ask| ask.role).collect();
        let slices = |at: usize| self.slices[at].iter().map(|slice| (slice.gpu, slice.need.charge));
        peak_charges(&roles, slices)
    }

    /// The grant that says so.
    pub fn grant(&self, asks: &[Ask], room: &NodeRoom) -> PodGrant {
        let share = |slice: &Slice| Share {
            gpu: room.node.gpus[slice.gpu].uuid.clone(),
            memory_bytes: slice.need.limit,
            cores: slice.need.cores,
            ceiling: slice.need.ceiling,
            whole: slice.need.charge.whole > 0,
        };
        let grants = asks.iter().zip(&self.slices).map(|(ask, slices)| Grant {
            container: ask.container.clone(),
            init: ask.role == Role::Init,
            shares: slices.iter().map(share).collect(),
        });
        PodGrant { node: room.node.name.clone(), grants: grants.collect() }
    }
}

/// What a pod takes of each GPU at the time it takes most, given each container's role and what it takes.
///
/// As Kubernetes counts: all sidecars and ordinary containers at once, or any one init container with the
/// sidecars declared before it.
pub(crate) fn peak_charges<I: Iterator<Item = (usize, Charge)>>(
    roles: &[Role],
    taken: impl Fn(usize) -> I,
) -> Vec<(usize, Charge)> {
    let sum = |members: &mut dyn Iterator<Item = usize>| {
        let mut charges: Vec<(usize, Charge)> = Vec::new();
        for (gpu, charge) in members.flat_map(&taken) {
            match charges.iter_mut().find(|(at, _)| *at == gpu) {
                Some((_, sum)) => *sum = sum.plus(charge),
                None => charges.push((gpu, charge)),
            }
        }
        charges
    };
    let all = 0..roles.len();
    let mut peak = sum(&mut all.clone().filter(|&at| roles[at] != Role::Init));
    for init in all.filter(|&at| roles[at] == Role::Init) {
        let mut phase = (0..=init).filter(|&at| at == init || roles[at] == Role::Sidecar);
        for (gpu, charge) in sum(&mut phase) {
            match peak.iter_mut().find(|(at, _)| *at == gpu) {
                Some((_, most)) => *most = most.max(charge),
                None => peak.push((gpu, charge)),
            }
        }
    }
    peak.sort_unstable_by_key(|(gpu, _)| *gpu);
    peak
}

/// Whether a placement found earlier still fits a node that others may have used since.
pub(crate) fn still_fits(
    room: &NodeRoom,
    classes: &[GpuClass],
    prepared: &Prepared,
    placement: &Placement,
) -> bool {
    if host_short(room, prepared).is_some() || placement.slices.len() != prepared.wants.len() {
        return false;
    }
    let role = |at: usize| prepared.wants[at].role;
    // One moment of the pod's life: its containers one after another on the room without it.
    let fits_together = |members: &mut dyn Iterator<Item = usize>| {
        let mut gpus = room.gpus.clone();
        members.flat_map(|at| &placement.slices[at]).all(|slice| {
            gpus.get_mut(slice.gpu).is_some_and(|gpu| {
                let fits = slice.need.fits(gpu, &classes[usize::from(gpu.class)]);
                gpu.used = gpu.used.plus(slice.need.charge);
                fits
            })
        })
    };
    let all = 0..prepared.wants.len();
    fits_together(&mut all.clone().filter(|&at| role(at) != Role::Init))
        && all
            .filter(|&at| role(at) == Role::Init)
            .all(|init| fits_together(&mut (0..=init).filter(|&at| at == init || role(at) == Role::Sidecar)))
}
