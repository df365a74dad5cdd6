//! The policies of the literature, to compare with: random, best fit, dot product, and fragmentation gradient
//! descent (FGD).

use super::SplitMix64;
use crate::model::CoresAsk;
use crate::place::capacity::{GpuClass, NodeCapacity};
use crate::place::capacity_vector::{CapacityVector, WHOLE_GPU};
use crate::place::demand_histogram::{DemandHistogram, DemandKind};
use crate::place::fit::{PreparedAsk, PreparedWant};
use crate::place::policies::{self, NodeRanking};
use crate::place::solve::{GpuPreference, PlacementContext};
use crate::place::{ClusterCapacity, gpu_order};

/// Any node that fits, any GPU that fits.
#[derive(Clone, Copy, Debug)]
pub(super) struct Random {
    seed: u64,
    decision: u64,
}

impl Random {
    /// From a seed.
    pub(super) fn new(seed: u64) -> Random {
        Random { seed, decision: 1 }
    }

    /// Before every decision: what was drawn for the last one no longer holds.
    pub(super) fn next(&mut self) {
        self.decision += 1;
    }

    /// A number drawn for something, by its name.
    fn draw(&self, name: &[u8]) -> u64 {
        let mut drawn = SplitMix64::new(self.seed ^ self.decision.rotate_left(32)).roll();
        for byte in name {
            drawn = SplitMix64::new(drawn ^ u64::from(*byte)).roll();
        }
        drawn
    }
}

impl GpuPreference for Random {
    fn sort(&self, _: &PlacementContext, _: &PreparedWant, gpus: &mut Vec<usize>) {
        gpus.sort_by_key(|&gpu| self.draw(&gpu.to_le_bytes()));
    }

    fn set(&self, _: &PlacementContext, wanted: &PreparedWant, mask: u64) -> Option<u64> {
        gpu_order::lowest(mask, wanted.want.count)
    }
}

impl NodeRanking for Random {
    fn name(&self) -> &'static str {
        "random"
    }

    fn epoch(&self) -> u64 {
        self.decision
    }

    fn rank(&self, capacity: &NodeCapacity, classes: &[GpuClass], prepared: &PreparedAsk) -> Option<i64> {
        let draw = (self.draw(capacity.node.name.as_str().as_bytes()) >> 1) as i64;
        policies::fits(capacity, classes, prepared).then_some(draw)
    }
}

/// The tightest GPU for a share, the lowest ones for whole GPUs: what best fit and dot product do on a node.
fn tightest(capacity: &NodeCapacity, classes: &[GpuClass], gpus: &mut [usize]) {
    gpus.sort_by_key(|&gpu| (capacity.gpus[gpu].idle(&classes[usize::from(capacity.gpus[gpu].class)]), gpu));
}

/// The largest node of the cluster, by which the classic scores are normalised.
#[derive(Clone, Copy, Debug)]
pub(super) struct Largest {
    cpu: f64,
    gpu_cores: f64,
}

impl Largest {
    /// Of a cluster.
    pub(super) fn of(cluster: &ClusterCapacity) -> Largest {
        let most = |of: &dyn Fn(&NodeCapacity) -> f64| {
            cluster.nodes().map(|(_, capacity)| of(capacity)).fold(1.0, f64::max)
        };
        Largest {
            cpu: most(&|capacity| capacity.node.cpu_milli.map_or(0.0, |cpu| cpu.0 as f64)),
            gpu_cores: most(&|capacity| capacity.gpus.len() as f64 * f64::from(WHOLE_GPU)),
        }
    }
}

/// Returns the compute that a pod asks for, in thousandths of a percent of one GPU.
fn asked_cores(prepared: &PreparedAsk) -> f64 {
    let cores = |wanted: &PreparedWant| match wanted.want.part.cores {
        CoresAsk::Exactly(cores) => f64::from(wanted.want.count) * f64::from(cores.as_millipercent()),
        _ => f64::from(wanted.want.count) * f64::from(WHOLE_GPU),
    };
    prepared.wants.iter().map(cores).sum::<f64>()
}

/// The node that is left with least.
#[derive(Clone, Copy, Debug)]
pub(super) struct BestFit(pub(super) Largest);

/// The node whose leftovers resemble the ask least.
#[derive(Clone, Copy, Debug)]
pub(super) struct DotProduct(pub(super) Largest);

macro_rules! tightest_on_node {
    ($($ranking:ty),*) => {$(
        impl GpuPreference for $ranking {
            fn sort(&self, on: &PlacementContext, _: &PreparedWant, gpus: &mut Vec<usize>) {
                tightest(on.capacity, on.classes, gpus);
            }

            fn set(&self, _: &PlacementContext, wanted: &PreparedWant, mask: u64) -> Option<u64> {
                gpu_order::lowest(mask, wanted.want.count)
            }
        }
    )*};
}

tightest_on_node!(BestFit, DotProduct);

impl NodeRanking for BestFit {
    fn name(&self) -> &'static str {
        "best-fit"
    }

    fn rank(&self, capacity: &NodeCapacity, classes: &[GpuClass], prepared: &PreparedAsk) -> Option<i64> {
        if !policies::fits(capacity, classes, prepared) {
            return None;
        }
        let sketch = CapacityVector::of(capacity, classes);
        let cpu_left = (sketch.cpu as f64 - prepared.ask.cpu.0 as f64) / self.0.cpu;
        let gpu_left = (f64::from(sketch.idle_sum()) - asked_cores(prepared)) / self.0.gpu_cores;
        Some((100.0 * (1.0 - 0.5 * (cpu_left + gpu_left))).floor() as i64)
    }
}

impl NodeRanking for DotProduct {
    fn name(&self) -> &'static str {
        "dot-product"
    }

    fn rank(&self, capacity: &NodeCapacity, classes: &[GpuClass], prepared: &PreparedAsk) -> Option<i64> {
        if !policies::fits(capacity, classes, prepared) {
            return None;
        }
        let sketch = CapacityVector::of(capacity, classes);
        let (cpu, gpu) = (self.0.cpu, self.0.gpu_cores);
        let along_cpu = sketch.cpu as f64 / cpu * (prepared.ask.cpu.0 as f64 / cpu);
        let along_gpu = f64::from(sketch.idle_sum()) / gpu * (asked_cores(prepared) / gpu);
        Some((100.0 * (1.0 - (along_cpu + along_gpu) / 2.0)).floor() as i64)
    }
}

/// Fragmentation gradient descent: it knows the whole list of pods beforehand. As published but for one thing:
/// typical pods are told apart by host memory, too, which comes nearer to the published figures.
#[derive(Clone, Debug)]
pub(super) struct Fgd {
    typical: Vec<DemandKind>,
}

impl Fgd {
    /// Returns a policy that knows this demand beforehand.
    pub(super) fn new(demand: &DemandHistogram, classes: &[GpuClass]) -> Fgd {
        let mut typical = demand.kinds(classes);
        typical.truncate(demand.typical());
        let covered: f64 = typical.iter().map(|kind| kind.weight).sum();
        for kind in &mut typical {
            kind.weight /= covered;
        }
        Fgd { typical }
    }

    /// Idle thousandths that the typical pods cannot use, weighted by how typical they are.
    fn fragments(&self, node: &CapacityVector) -> f64 {
        let all = node.idle_sum();
        if all == 0 {
            return 0.0;
        }
        let useless = |kind: &DemandKind| {
            if kind.count == 0 || kind.cpu > node.cpu || kind.memory > node.memory {
                return all;
            }
            let large_enough = |&(idle, class): &(u32, usize)| idle >= kind.size[class];
            let (count, usable) = node
                .gpus()
                .filter(large_enough)
                .fold((0, 0), |(count, usable), (idle, _)| (count + 1, usable + idle));
            if count >= kind.count { all - usable } else { all }
        };
        self.typical.iter().map(|kind| kind.weight * f64::from(useless(kind))).sum()
    }

    fn score(&self, before: f64, after: &CapacityVector) -> i64 {
        let gained = before - self.fragments(after);
        // The coarse step is part of the method: exact scores do markedly worse.
        (100.0 / (1.0 + (-gained / f64::from(WHOLE_GPU)).exp())).floor() as i64
    }

    /// The score of a share on each GPU that takes it.
    fn share_scores(&self, on: &PlacementContext, wanted: &PreparedWant, mask: u64) -> Vec<(i64, usize)> {
        let PlacementContext { capacity, classes, prepared } = *on;
        let now = CapacityVector::of(capacity, classes);
        let before = self.fragments(&now);
        let mut seen: Vec<(u32, u16, i64)> = Vec::new();
        gpu_order::indexes(mask)
            .filter_map(|gpu| {
                let state = (now.idle[gpu], now.class[gpu]);
                if let Some(&(.., score)) = seen.iter().find(|(idle, class, _)| (*idle, *class) == state) {
                    return Some((score, gpu));
                }
                let need = wanted.needs[usize::from(capacity.gpus[gpu].class)]?;
                let mut after = now;
                after.take_host(prepared);
                after.take_share(gpu, &capacity.gpus[gpu], &need, classes);
                let score = self.score(before, &after);
                seen.push((state.0, state.1, score));
                Some((score, gpu))
            })
            .collect()
    }
}

impl GpuPreference for Fgd {
    fn sort(&self, on: &PlacementContext, wanted: &PreparedWant, gpus: &mut Vec<usize>) {
        let mask = gpus.iter().fold(0, |mask, gpu| mask | 1 << gpu);
        let mut scores = self.share_scores(on, wanted, mask);
        scores.sort_by_key(|&(score, gpu)| (std::cmp::Reverse(score), gpu));
        *gpus = scores.into_iter().map(|(_, gpu)| gpu).collect();
    }

    fn set(&self, _: &PlacementContext, wanted: &PreparedWant, mask: u64) -> Option<u64> {
        gpu_order::lowest(mask, wanted.want.count)
    }
}

impl NodeRanking for Fgd {
    fn name(&self) -> &'static str {
        "fgd"
    }

    fn rank(&self, capacity: &NodeCapacity, classes: &[GpuClass], prepared: &PreparedAsk) -> Option<i64> {
        if !policies::fits(capacity, classes, prepared) {
            return None;
        }
        match prepared.wants.as_slice() {
            [share] if share.want.count == 1 && !share.want.part.whole => {
                let mask = gpu_order::fitting(capacity, classes, prepared, share);
                let scores =
                    self.share_scores(&PlacementContext { capacity, classes, prepared }, share, mask);
                scores.into_iter().map(|(score, _)| score).max()
            }
            wants => {
                let now = CapacityVector::of(capacity, classes);
                let mut after = now;
                after.take_host(prepared);
                for wanted in wants {
                    let mask = gpu_order::fitting(capacity, classes, prepared, wanted);
                    for gpu in gpu_order::indexes(gpu_order::lowest(mask, wanted.want.count)?) {
                        let need = wanted.needs[usize::from(capacity.gpus[gpu].class)]?;
                        after.take_share(gpu, &capacity.gpus[gpu], &need, classes);
                    }
                }
                Some(self.score(self.fragments(&now), &after))
            }
        }
    }
}
