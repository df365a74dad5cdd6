//! Which node: a ranking gives every node that fits a number, and the highest wins.

use super::fit::{Prepared, Wanted};
use super::order;
use super::placement::Placement;
use super::room::{GpuClass, NodeRoom};
use super::solve::{self, Preference, Setting};
use crate::model::{CoresAsk, Policy, Together};
use std::sync::atomic::{AtomicU64, Ordering};

/// A way to choose among nodes and GPUs. Must be a function of what it is given and of its epoch.
pub trait Ranking: Preference {
    /// Its name: rankings of one name and epoch share cached ranks.
    fn name(&self) -> &'static str;

    /// Grows whenever ranks given earlier no longer hold, even for nodes that did not change.
    fn epoch(&self) -> u64 {
        0
    }

    /// How good this node is for the pod, higher is better; `None` where the pod does not fit.
    fn rank(&self, room: &NodeRoom, classes: &[GpuClass], prepared: &Prepared) -> Option<i64>;

    /// Where on the node: found wherever [`fits`] says that it fits.
    fn place(&self, room: &NodeRoom, classes: &[GpuClass], prepared: &Prepared) -> Option<Placement>
    where
        Self: Sized,
    {
        // The search is bounded, and another preference may run out of steps where this one did not.
        solve::solve(room, classes, prepared, self)
            .or_else(|| solve::solve(room, classes, prepared, &Plain(Policy::Binpack)))
    }
}

/// An epoch nobody has had: rankings of one name never take each other's cached ranks for their own.
pub fn new_epoch() -> u64 {
    // It decides nothing; it only tells caches apart.
    static NEXT: AtomicU64 = AtomicU64::new(1);
    NEXT.fetch_add(1, Ordering::Relaxed)
}

/// Whether a pod fits a node, without saying where. Agrees with [`solve::solve`], whatever the preference.
pub fn fits(room: &NodeRoom, classes: &[GpuClass], prepared: &Prepared) -> bool {
    if solve::host_short(room, prepared).is_some() {
        return false;
    }
    match prepared.wants.as_slice() {
        [] => true,
        [one] => fits_alone(room, classes, prepared, one),
        _ => solve::solve(room, classes, prepared, &Plain(Policy::Binpack)).is_some(),
    }
}

fn fits_alone(room: &NodeRoom, classes: &[GpuClass], prepared: &Prepared, wanted: &Wanted) -> bool {
    let count = wanted.want.count;
    if count > 1 && prepared.ask.constraints.together == Together::Required {
        return false;
    }
    if order::fitting(room, classes, prepared, wanted).count_ones() >= count {
        return true;
    }
    // Slots may come from several GPUs.
    matches!(wanted.want.part.cores, CoresAsk::Slots(_))
        && solve::solve(room, classes, prepared, &Plain(Policy::Binpack)).is_some()
}

/// Puts the GPU first that breaks up the smallest group, for one whole GPU; the others follow in order.
pub(super) fn least_needed_first(room: &NodeRoom, gpus: &mut [usize]) {
    let mask = gpus.iter().fold(0, |mask, gpu| mask | 1 << gpu);
    if let Some(first) = order::leftover_set(room, mask, 1) {
        gpus.sort_by_key(|&gpu| (first != 1 << gpu, gpu));
    }
}

/// The policies that need nothing but the node itself: binpack, spread and topology.
#[derive(Clone, Copy, Debug)]
pub struct Plain(pub Policy);

impl Preference for Plain {
    fn sort(&self, on: &Setting, wanted: &Wanted, gpus: &mut Vec<usize>) {
        let Setting { room, classes, .. } = *on;
        if wanted.want.part.whole {
            return least_needed_first(room, gpus);
        }
        match self.0 {
            Policy::Spread => gpus.sort_by_key(|&gpu| (order::emptiness(&room.gpus[gpu], classes), gpu)),
            _ => gpus.sort_by_key(|&gpu| (order::fullness(&room.gpus[gpu], classes), gpu)),
        }
    }

    fn set(&self, on: &Setting, wanted: &Wanted, mask: u64) -> Option<u64> {
        let room = on.room;
        let count = wanted.want.count;
        match self.0 {
            // Among sets that are linked as well, the fullest.
            Policy::Topology => {
                order::linked_set(room, mask, count, |gpu| order::fullness(&room.gpus[gpu], on.classes))
            }
            Policy::Spread if wanted.want.part.whole => order::linked_set(room, mask, count, |gpu| gpu),
            _ if wanted.want.part.whole => order::leftover_set(room, mask, count),
            _ => {
                let mut gpus: Vec<usize> = order::indexes(mask).collect();
                self.sort(on, wanted, &mut gpus);
                order::first(&gpus, count)
            }
        }
    }
}

impl Ranking for Plain {
    fn name(&self) -> &'static str {
        self.0.name()
    }

    fn rank(&self, room: &NodeRoom, classes: &[GpuClass], prepared: &Prepared) -> Option<i64> {
        if !fits(room, classes, prepared) {
            return None;
        }
        let room_left = room_left(room, classes);
        Some(match self.0 {
            Policy::Spread => room_left,
            Policy::Topology => -(i64::from(worst_link(room, classes, prepared)) << 58) - room_left,
            _ => -room_left,
        })
    }
}

/// What is left on a node in one number: compute first, memory second.
fn room_left(room: &NodeRoom, classes: &[GpuClass]) -> i64 {
    let offered = room.gpus.iter().filter(|gpu| !gpu.withheld);
    let (mut cores, mut mib) = (0i64, 0i64);
    for gpu in offered {
        cores += i64::from(gpu.free_cores().as_millipercent());
        mib += (gpu.free_memory(&classes[usize::from(gpu.class)]).0 >> 20) as i64;
    }
    // 64 GPUs x 100,000 need 23 bits; the memory's 34 bits hold 16 PiB.
    (cores << 34) + mib.min((1 << 34) - 1)
}

/// The worst link within the best set for the ask that wants most GPUs; 0 where one GPU is enough.
fn worst_link(room: &NodeRoom, classes: &[GpuClass], prepared: &Prepared) -> u8 {
    let Some(widest) = prepared.wants.iter().filter(|w| w.want.count > 1).max_by_key(|w| w.want.count) else {
        return 0;
    };
    let mask = order::fitting(room, classes, prepared, widest);
    let set = order::linked_set(room, mask, widest.want.count, |gpu| gpu).unwrap_or(0);
    order::links(room, set).0.map_or(0, |worst| worst as u8)
}
