//! Baseline policies of the literature: random, best fit, dot product, and fragmentation gradient
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

/// Random placement: any node that fits, any GPU that fits.
#[derive(Clone, Copy, Debug)]
pub(super) struct RandomPolicy {
    seed: u64,
    decision: u64,
}

impl RandomPolicy {
    /// Creates the policy from a seed.
    pub(super) fn new(seed: u64) -> RandomPolicy {
        RandomPolicy { seed, decision: 1 }
    }

    /// Invalidates the numbers drawn for the last decision. Call it before every decision.
    pub(super) fn start_decision(&mut self) {
        self.decision += 1;
    }

    /// Returns a number for `name` that stays the same during one decision.
    fn draw(&self, name: &[u8]) -> u64 {
        let mut drawn = SplitMix64::new(self.seed ^ self.decision.rotate_left(32)).next_u64();
        for byte in name {
            drawn = SplitMix64::new(drawn ^ u64::from(*byte)).next_u64();
        }
        drawn
    }
}

impl GpuPreference for RandomPolicy {
    fn order_gpus(&self, _: &PlacementContext, _: &PreparedWant, gpus: &mut Vec<usize>) {
        gpus.sort_by_key(|&gpu| self.draw(&gpu.to_le_bytes()));
    }

    fn choose_gpu_set(&self, _: &PlacementContext, wanted: &PreparedWant, mask: u64) -> Option<u64> {
        gpu_order::lowest(mask, wanted.want.count)
    }
}

impl NodeRanking for RandomPolicy {
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

/// Sorts GPUs by idle compute, tightest first: the GPU order of best fit and dot product for shares. For whole GPUs they
/// take the lowest indexes.
fn sort_tightest_first(capacity: &NodeCapacity, classes: &[GpuClass], gpus: &mut [usize]) {
    gpus.sort_by_key(|&gpu| (capacity.gpus[gpu].idle(&classes[usize::from(capacity.gpus[gpu].class)]), gpu));
}

/// The largest CPU and GPU capacity of any node, by which the published scores are normalized.
#[derive(Clone, Copy, Debug)]
pub(super) struct LargestNode {
    cpu: f64,
    gpu_cores: f64,
}

impl LargestNode {
    /// Reads the maxima from a cluster.
    pub(super) fn of(cluster: &ClusterCapacity) -> LargestNode {
        let max = |of: &dyn Fn(&NodeCapacity) -> f64| {
            cluster.nodes().map(|(_, capacity)| of(capacity)).fold(1.0, f64::max)
        };
        LargestNode {
            cpu: max(&|capacity| capacity.node.cpu_milli.map_or(0.0, |cpu| cpu.0 as f64)),
            gpu_cores: max(&|capacity| capacity.gpus.len() as f64 * f64::from(WHOLE_GPU)),
        }
    }
}

/// Returns the compute that a pod requests, in thousandths of a percent of one GPU.
fn requested_cores(prepared: &PreparedAsk) -> f64 {
    let cores = |wanted: &PreparedWant| match wanted.want.share.cores {
        CoresAsk::Exactly(cores) => f64::from(wanted.want.count) * f64::from(cores.as_millipercent()),
        _ => f64::from(wanted.want.count) * f64::from(WHOLE_GPU),
    };
    prepared.wants.iter().map(cores).sum::<f64>()
}

/// Best fit: prefers the node with the least capacity left over.
#[derive(Clone, Copy, Debug)]
pub(super) struct BestFitPolicy(pub(super) LargestNode);

/// Dot product: prefers the node whose free capacity, as a vector, is least aligned with the request.
#[derive(Clone, Copy, Debug)]
pub(super) struct DotProductPolicy(pub(super) LargestNode);

macro_rules! tightest_on_node {
    ($($ranking:ty),*) => {$(
        impl GpuPreference for $ranking {
            fn order_gpus(&self, on: &PlacementContext, _: &PreparedWant, gpus: &mut Vec<usize>) {
                sort_tightest_first(on.capacity, on.classes, gpus);
            }

            fn choose_gpu_set(&self, _: &PlacementContext, wanted: &PreparedWant, mask: u64) -> Option<u64> {
                gpu_order::lowest(mask, wanted.want.count)
            }
        }
    )*};
}

tightest_on_node!(BestFitPolicy, DotProductPolicy);

impl NodeRanking for BestFitPolicy {
    fn name(&self) -> &'static str {
        "best-fit"
    }

    fn rank(&self, capacity: &NodeCapacity, classes: &[GpuClass], prepared: &PreparedAsk) -> Option<i64> {
        if !policies::fits(capacity, classes, prepared) {
            return None;
        }
        let free = CapacityVector::of(capacity, classes);
        let cpu_left = (free.cpu as f64 - prepared.ask.cpu.0 as f64) / self.0.cpu;
        let gpu_left = (f64::from(free.idle_sum()) - requested_cores(prepared)) / self.0.gpu_cores;
        Some((100.0 * (1.0 - 0.5 * (cpu_left + gpu_left))).floor() as i64)
    }
}

impl NodeRanking for DotProductPolicy {
    fn name(&self) -> &'static str {
        "dot-product"
    }

    fn rank(&self, capacity: &NodeCapacity, classes: &[GpuClass], prepared: &PreparedAsk) -> Option<i64> {
        if !policies::fits(capacity, classes, prepared) {
            return None;
        }
        let free = CapacityVector::of(capacity, classes);
        let (cpu, gpu) = (self.0.cpu, self.0.gpu_cores);
        let along_cpu = free.cpu as f64 / cpu * (prepared.ask.cpu.0 as f64 / cpu);
        let along_gpu = f64::from(free.idle_sum()) / gpu * (requested_cores(prepared) / gpu);
        Some((100.0 * (1.0 - (along_cpu + along_gpu) / 2.0)).floor() as i64)
    }
}

/// Fragmentation gradient descent (FGD), which knows the whole list of pods beforehand. As published with one
/// exception: typical pods are distinguished by host memory, too, which reproduces the published figures more closely.
#[derive(Clone, Debug)]
pub(super) struct FgdPolicy {
    typical: Vec<DemandKind>,
}

impl FgdPolicy {
    /// Creates a policy that knows this demand beforehand.
    pub(super) fn new(demand: &DemandHistogram, classes: &[GpuClass]) -> FgdPolicy {
        let mut typical = demand.kinds(classes);
        typical.truncate(demand.typical());
        let covered: f64 = typical.iter().map(|kind| kind.weight).sum();
        for kind in &mut typical {
            kind.weight /= covered;
        }
        FgdPolicy { typical }
    }

    /// Returns the idle compute that typical pods cannot use, weighted by the frequency of each kind of pod.
    fn fragmentation(&self, node: &CapacityVector) -> f64 {
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
        let gained = before - self.fragmentation(after);
        // Rounding is part of the method: exact scores perform markedly worse.
        (100.0 / (1.0 + (-gained / f64::from(WHOLE_GPU)).exp())).floor() as i64
    }

    /// Returns the score of a share on each GPU that it fits.
    fn share_scores(&self, on: &PlacementContext, wanted: &PreparedWant, mask: u64) -> Vec<(i64, usize)> {
        let PlacementContext { capacity, classes, prepared } = *on;
        let now = CapacityVector::of(capacity, classes);
        let before = self.fragmentation(&now);
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

impl GpuPreference for FgdPolicy {
    fn order_gpus(&self, on: &PlacementContext, wanted: &PreparedWant, gpus: &mut Vec<usize>) {
        let mask = gpus.iter().fold(0, |mask, gpu| mask | 1 << gpu);
        let mut scores = self.share_scores(on, wanted, mask);
        scores.sort_by_key(|&(score, gpu)| (std::cmp::Reverse(score), gpu));
        *gpus = scores.into_iter().map(|(_, gpu)| gpu).collect();
    }

    fn choose_gpu_set(&self, _: &PlacementContext, wanted: &PreparedWant, mask: u64) -> Option<u64> {
        gpu_order::lowest(mask, wanted.want.count)
    }
}

impl NodeRanking for FgdPolicy {
    fn name(&self) -> &'static str {
        "fgd"
    }

    fn rank(&self, capacity: &NodeCapacity, classes: &[GpuClass], prepared: &PreparedAsk) -> Option<i64> {
        if !policies::fits(capacity, classes, prepared) {
            return None;
        }
        match prepared.wants.as_slice() {
            [share] if share.want.count == 1 && !share.want.share.whole => {
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
                Some(self.score(self.fragmentation(&now), &after))
            }
        }
    }
}
