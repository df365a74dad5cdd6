//! Tables that rate free capacity by the expected demand: computed at a refresh, read at every decision.
//!
//! Losses are counted in thousandths of a percent of one GPU, as fixed-point numbers with [`FRACTION_BITS`] fractional
//! bits.

use crate::place::ClusterCapacity;
use crate::place::capacity_vector::{CapacityVector, NEVER_FITS, WHOLE_GPU};
use crate::place::demand_histogram::{DemandHistogram, DemandKind};
use crate::place::fit::PreparedAsk;

/// Maximum number of typical kinds, which bounds the cost of a decision.
const MAX_KINDS: usize = 96;
/// Maximum number of multi-GPU kinds.
const MAX_MULTI_GPU_KINDS: usize = 16;
/// Demand at which a hole is worth half of what would fill it: the part of all requested GPUs that comes as shares that fit the hole.
const RARE_DEMAND: f64 = 0.015;
/// Added to [`RARE_DEMAND`] in proportion to the part of all requested GPUs that comes as shares: more shares leave more holes.
const RARE_DEMAND_AMONG_SHARES: f64 = 0.025;
/// CPU per GPU of a pod with little CPU, in multiples of the mean.
const LOW_CPU: f64 = 0.8;
/// CPU per GPU of a pod with much CPU, in multiples of the mean.
const HIGH_CPU: f64 = 1.5;
/// Weight of GPU capacity without CPU in the loss that a share sees.
const CPU_SHORTAGE_FOR_SHARES: f64 = 0.7;
/// Weight of GPU capacity without CPU in the loss that a pod without GPUs sees.
const CPU_SHORTAGE_FOR_NO_GPU: f64 = 0.5;
/// Weight of GPU capacity without CPU in the loss that a pod with whole GPUs sees.
const CPU_SHORTAGE_FOR_WHOLE: f64 = 0.5;
/// Weight of whole GPUs lost to multi-GPU pods in the loss that a share sees.
const SPLIT_WEIGHT: f64 = 0.35;
/// How strongly whole GPUs are packed while there is enough CPU.
const PACK_WEIGHT: f64 = 0.02;
/// How strongly shares are spread over CPU while it is scarce.
const SPREAD_WEIGHT: f64 = 0.05;
/// CPU per GPU requested, relative to what the cluster has, up to which CPU is not scarce at all.
const CPU_AMPLE: f64 = 0.92;
/// CPU per GPU requested, relative to what the cluster has, from which CPU is fully scarce.
const CPU_SCARCE: f64 = 0.98;
/// The price of a model per unit of relative demand for it by name.
const MODEL_PRICE: f64 = 0.3;
/// Upper bound for the relative demand for a model.
const MAX_MODEL_DEMAND: f64 = 1.5;

/// Fractional bits of losses and of the weights that they are multiplied with.
const FRACTION_BITS: u32 = 10;
/// One, as a fixed-point number.
const ONE: i64 = 1 << FRACTION_BITS;
/// Fractional bits of ratios of GPU to CPU.
const RATIO_BITS: u32 = 20;
/// The weights of typical kinds add up to one with this many fractional bits.
const WEIGHT_BITS: u32 = 16;
/// Upper bound for the GPU capacity that free CPU can serve, so that scores do not overflow.
const MAX_SERVED: i64 = 1 << 37;
/// The value of a GPU is tabulated by whole percents of it that are idle, 0 to 100.
const VALUES: usize = 101;
/// One percent of a GPU, in thousandths of a percent.
const PERCENT: u32 = WHOLE_GPU / 100;

/// Kinds of ask that see different losses.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum AskKind {
    /// A pod without GPUs.
    NoGpu,
    /// A pod with shares of GPUs.
    Share,
    /// A pod with whole GPUs.
    Whole,
}

impl AskKind {
    /// Returns the kind of an ask.
    pub(super) fn of(prepared: &PreparedAsk) -> AskKind {
        match prepared.wants.as_slice() {
            [] => AskKind::NoGpu,
            wants if wants.iter().all(|wanted| !wanted.want.share.whole) => AskKind::Share,
            _ => AskKind::Whole,
        }
    }
}

/// The learned tables, frozen until the next refresh.
#[derive(Clone, Debug)]
pub(super) struct LossTables {
    classes: Vec<ClassTable>,
    /// GPU capacity per thousandth of a CPU at the mean of all pods, with [`RATIO_BITS`] fractional bits.
    served: i64,
    /// GPU capacity per thousandth of a CPU for pods with little CPU, with [`RATIO_BITS`] fractional bits.
    served_low_cpu: i64,
    /// GPU capacity per thousandth of a CPU for pods with much CPU, with [`RATIO_BITS`] fractional bits.
    served_high_cpu: i64,
    /// How strongly whole GPUs are packed.
    pack: i64,
    /// How strongly shares are spread over CPU.
    spread: i64,
}

/// The tables of one class of GPU.
#[derive(Clone, Debug)]
struct ClassTable {
    /// The distinct sizes of typical shares, in thousandths of a percent.
    sizes: Vec<u32>,
    /// Typical kinds that may run on this class.
    kinds: Vec<Typical>,
    /// Kinds that want several whole GPUs.
    multi: Vec<MultiGpuKind>,
    /// The value of a GPU by its idle compute in percent.
    value: [i64; VALUES],
    /// The price of the class per unit of capacity, for pods that do not require it.
    price: i64,
}

/// A typical kind of pod.
#[derive(Clone, Debug)]
struct Typical {
    cpu: i64,
    memory: i64,
    count: u32,
    /// Index of its size in [`ClassTable::sizes`].
    size: usize,
    weight: i64,
}

/// A kind of pod that requests several whole GPUs.
#[derive(Clone, Debug)]
struct MultiGpuKind {
    cpu: i64,
    memory: i64,
    count: i64,
    allowed: bool,
    weight: i64,
}

impl LossTables {
    /// Derives the tables from what was asked for so far and what the cluster has.
    pub(super) fn new(histogram: &DemandHistogram, cluster: &ClusterCapacity) -> LossTables {
        let classes = cluster.classes();
        let kinds = histogram.kinds(classes);
        let typical = histogram.typical().min(MAX_KINDS);
        let totals = ClusterTotals::of(cluster);
        let demand = DemandTotals::of(&kinds);
        let per_cpu = demand.cores / demand.cpu_with_gpu.max(1.0);
        let ratio = |multiple: f64| fixed(per_cpu / multiple, 1 << RATIO_BITS);
        // How scarce CPU is by what all pods request, from 0 to 1.
        let requested = demand.cpu / demand.cores.max(1.0) / totals.cpu_per_core;
        let scarce = ((requested - CPU_AMPLE) / (CPU_SCARCE - CPU_AMPLE)).clamp(0.0, 1.0);
        LossTables {
            classes: (0..classes.len())
                .map(|class| ClassTable::new(class, &kinds, typical, &demand, &totals))
                .collect(),
            served: ratio(1.0),
            served_low_cpu: ratio(LOW_CPU),
            served_high_cpu: ratio(HIGH_CPU),
            pack: fixed(PACK_WEIGHT * (1.0 - scarce), ONE),
            spread: fixed(SPREAD_WEIGHT * scarce, ONE),
        }
    }

    /// Returns whether the tables contain every class of the cluster's GPUs.
    pub(super) fn cover(&self, cluster: &ClusterCapacity) -> bool {
        self.classes.len() == cluster.classes().len()
    }

    /// Returns how much of a node's free capacity is lost to likely asks.
    pub(super) fn loss(&self, node: &CapacityVector, kind: AskKind) -> i64 {
        let idle = i64::from(node.idle_sum());
        let low_cpu = without_cpu(node, idle, self.served_low_cpu);
        let high_cpu = without_cpu(node, idle, self.served_high_cpu);
        let by_class = |loss: &dyn Fn(&ClassTable, &[u32]) -> i64| self.sum(node, loss);
        match kind {
            AskKind::NoGpu => {
                by_class(&|class, gpus| class.fragments(node, gpus))
                    + fixed(CPU_SHORTAGE_FOR_NO_GPU, ONE) * (low_cpu + high_cpu)
            }
            AskKind::Share => {
                by_class(&|class, gpus| {
                    class.holes(gpus) + class.split(node, gpus) - class.price * idle_sum(gpus)
                }) + fixed(CPU_SHORTAGE_FOR_SHARES, ONE) * (low_cpu + high_cpu)
            }
            AskKind::Whole => {
                by_class(&|class, gpus| class.fragments(node, gpus) - class.price * idle_sum(gpus))
                    + fixed(CPU_SHORTAGE_FOR_WHOLE, ONE) * high_cpu
            }
        }
    }

    /// Returns a small preference among placements of equal loss: whole GPUs are packed, shares are spread over CPU.
    pub(super) fn preference(&self, after: &CapacityVector, kind: AskKind) -> i64 {
        match kind {
            AskKind::NoGpu => 0,
            AskKind::Share => {
                self.spread * (after.cpu.saturating_mul(self.served) >> RATIO_BITS).min(MAX_SERVED)
            }
            AskKind::Whole => -self.pack * i64::from(after.idle_sum()),
        }
    }

    /// Sums a loss over the classes of GPU that a node has, each with the idle parts of its GPUs.
    fn sum(&self, node: &CapacityVector, loss: &dyn Fn(&ClassTable, &[u32]) -> i64) -> i64 {
        let (idle, class) = (&node.idle[..node.gpus], &node.class[..node.gpus]);
        let Some(&first) = class.first() else { return 0 };
        let table = |class: u16| self.classes.get(usize::from(class));
        if class.iter().all(|class| *class == first) {
            return table(first).map_or(0, |table| loss(table, idle));
        }
        // A node with cards of different classes counts as one node per class.
        let mut sum = 0;
        for at in (0..class.len()).filter(|&at| !class[..at].contains(&class[at])) {
            let own: Vec<u32> =
                (at..class.len()).filter(|&b| class[b] == class[at]).map(|b| idle[b]).collect();
            sum += table(class[at]).map_or(0, |table| loss(table, &own));
        }
        sum
    }
}

/// Returns the idle GPU capacity that the free CPU cannot serve.
fn without_cpu(node: &CapacityVector, idle: i64, served: i64) -> i64 {
    (idle - (node.cpu.saturating_mul(served) >> RATIO_BITS)).max(0)
}

fn idle_sum(gpus: &[u32]) -> i64 {
    gpus.iter().map(|&idle| i64::from(idle)).sum()
}

/// Converts to a fixed-point number in which `one` stands for 1. It saturates: the ratio of a cluster without CPU has no
/// bound.
fn fixed(value: f64, one: i64) -> i64 {
    (value * one as f64).round() as i64
}

impl ClassTable {
    fn new(
        class: usize,
        kinds: &[DemandKind],
        typical: usize,
        demand: &DemandTotals,
        totals: &ClusterTotals,
    ) -> ClassTable {
        let mut table = ClassTable {
            sizes: Vec::new(),
            kinds: Vec::new(),
            multi: Vec::new(),
            value: values(class, kinds, demand),
            price: price(class, kinds, demand, totals),
        };
        let covered: f64 = kinds[..typical].iter().map(|kind| kind.weight).sum();
        for kind in kinds[..typical].iter().filter(|kind| kind.count > 0 && kind.size[class] != NEVER_FITS) {
            let size = kind.size[class];
            let at = table.sizes.iter().position(|known| *known == size).unwrap_or_else(|| {
                table.sizes.push(size);
                table.sizes.len() - 1
            });
            table.kinds.push(Typical {
                cpu: kind.cpu,
                memory: kind.memory,
                count: kind.count,
                size: at,
                weight: fixed(kind.weight / covered.max(1.0), 1 << WEIGHT_BITS),
            });
        }
        let mut multi: Vec<(f64, &DemandKind)> = kinds
            .iter()
            .filter(|kind| kind.count > 1)
            .map(|kind| (kind.cores() / demand.cores, kind))
            .collect();
        multi.sort_by(|a, b| b.0.total_cmp(&a.0));
        table.multi = multi
            .into_iter()
            .take(MAX_MULTI_GPU_KINDS)
            .map(|(part, kind)| MultiGpuKind {
                cpu: kind.cpu.max(1),
                memory: kind.memory.max(1),
                count: i64::from(kind.count),
                allowed: kind.size[class] != NEVER_FITS,
                weight: fixed(part, ONE),
            })
            .collect();
        table
    }

    /// Returns the idle capacity that typical pods cannot use, weighted by how frequent they are.
    fn fragments(&self, node: &CapacityVector, gpus: &[u32]) -> i64 {
        let idle = idle_sum(gpus);
        if idle == 0 {
            return 0;
        }
        // For every size, how many GPUs are large enough and their idle sum; computed only when a kind needs it.
        const UNKNOWN: u32 = u32::MAX;
        let mut fitting = [(UNKNOWN, 0u32); MAX_KINDS];
        let mut usable = 0;
        for kind in self.kinds.iter().filter(|kind| kind.cpu <= node.cpu && kind.memory <= node.memory) {
            let (count, idle) = &mut fitting[kind.size];
            if *count == UNKNOWN {
                let size = self.sizes[kind.size];
                *count = gpus.iter().map(|idle| u32::from(*idle >= size)).sum();
                *idle = gpus.iter().map(|idle| if *idle >= size { *idle } else { 0 }).sum();
            }
            if *count >= kind.count {
                usable += kind.weight * i64::from(*idle);
            }
        }
        idle * ONE - (usable >> (WEIGHT_BITS - FRACTION_BITS))
    }

    /// Returns the idle capacity beyond what the shares seen so far would fill.
    fn holes(&self, gpus: &[u32]) -> i64 {
        let value = |idle: u32| self.value[((idle / PERCENT) as usize).min(VALUES - 1)];
        idle_sum(gpus) * ONE - gpus.iter().map(|&idle| value(idle)).sum::<i64>()
    }

    /// Returns the capacity of whole free GPUs that multi-GPU pods cannot use, weighted by their part of the demand.
    fn split(&self, node: &CapacityVector, gpus: &[u32]) -> i64 {
        let whole = gpus.iter().filter(|&&idle| idle >= WHOLE_GPU).count() as i64;
        if whole == 0 {
            return 0;
        }
        let lost = |kind: &MultiGpuKind| {
            let fits = (whole / kind.count).min(node.cpu / kind.cpu).min(node.memory / kind.memory).max(0);
            kind.weight * (whole - if kind.allowed { fits * kind.count } else { 0 })
        };
        let lost: i64 = self.multi.iter().map(lost).sum();
        (fixed(SPLIT_WEIGHT, ONE) * lost * i64::from(WHOLE_GPU)) >> FRACTION_BITS
    }
}

/// Returns what a GPU is worth by its idle part in percent: what the asks seen so far would fill it with if they came in
/// the same proportions, discounted if few of them fit.
fn values(class: usize, kinds: &[DemandKind], demand: &DemandTotals) -> [i64; VALUES] {
    let mut asked = [0.0; VALUES];
    for kind in kinds.iter().filter(|kind| kind.count > 0 && kind.size[class] != NEVER_FITS) {
        let percent = kind.size[class].div_ceil(PERCENT) as usize;
        asked[percent.min(VALUES - 1)] += kind.weight * f64::from(kind.count);
    }
    let rare = RARE_DEMAND + RARE_DEMAND_AMONG_SHARES * demand.shares / demand.gpus.max(1.0);
    let mut worth = [0.0f64; VALUES];
    for idle in 1..VALUES {
        let mut fitting = 0.0;
        let mut filled = 0.0;
        for size in 1..=idle {
            fitting += asked[size];
            filled += asked[size] * (f64::from(PERCENT) * size as f64 + worth[idle - size]);
        }
        if fitting > 0.0 {
            let part = fitting / demand.gpus;
            let likely = part.powi(3) / (part.powi(3) + rare.powi(3));
            worth[idle] = likely * filled / fitting;
        }
        worth[idle] = worth[idle].max(worth[idle - 1]);
    }
    worth.map(|worth| fixed(worth, ONE))
}

/// Returns what a class costs pods that do not insist on it: the demand of those that do, relative to the capacity.
fn price(class: usize, kinds: &[DemandKind], demand: &DemandTotals, totals: &ClusterTotals) -> i64 {
    let mut insisting = 0.0;
    for kind in kinds.iter().filter(|kind| kind.count > 0 && kind.size[class] != NEVER_FITS) {
        let allowed: f64 = kind
            .size
            .iter()
            .zip(&totals.by_class)
            .filter(|(size, _)| **size != NEVER_FITS)
            .map(|(_, c)| c)
            .sum();
        if allowed < totals.cores {
            insisting += kind.cores() / allowed.max(1.0);
        }
    }
    let demand = insisting * totals.cores / demand.cores.max(1.0);
    fixed(MODEL_PRICE * demand.min(MAX_MODEL_DEMAND), ONE)
}

/// Total capacity of the cluster. Compute is in thousandths of a percent of one GPU.
struct ClusterTotals {
    by_class: Vec<f64>,
    cores: f64,
    cpu_per_core: f64,
}

impl ClusterTotals {
    fn of(cluster: &ClusterCapacity) -> ClusterTotals {
        let mut by_class = vec![0.0; cluster.classes().len()];
        let mut cpu = 0.0;
        for (_, capacity) in cluster.nodes() {
            for gpu in capacity.gpus.iter().filter(|gpu| !gpu.withheld) {
                by_class[usize::from(gpu.class)] += f64::from(WHOLE_GPU);
            }
            cpu += capacity.node.cpu_milli.map_or(0.0, |cpu| cpu.0 as f64);
        }
        let cores = by_class.iter().sum::<f64>().max(1.0);
        // CPU is never scarce in a cluster that does not count it.
        let cpu_per_core = if cpu > 0.0 { cpu / cores } else { f64::INFINITY };
        ClusterTotals { by_class, cores, cpu_per_core }
    }
}

/// Total demand of the asks so far.
struct DemandTotals {
    /// CPU of all pods, in thousandths.
    cpu: f64,
    /// CPU of pods with GPUs, in thousandths.
    cpu_with_gpu: f64,
    /// Compute, in thousandths of a percent of one GPU.
    cores: f64,
    /// Number of GPUs or shares of them.
    gpus: f64,
    /// Number of pods with one share.
    shares: f64,
}

impl DemandTotals {
    fn of(kinds: &[DemandKind]) -> DemandTotals {
        let mut demand = DemandTotals { cpu: 0.0, cpu_with_gpu: 0.0, cores: 0.0, gpus: 0.0, shares: 0.0 };
        for kind in kinds {
            let cpu = kind.cpu as f64 * kind.weight;
            demand.cpu += cpu;
            if kind.count > 0 {
                demand.cpu_with_gpu += cpu;
                demand.cores += kind.cores();
                demand.gpus += kind.weight * f64::from(kind.count);
                demand.shares += if kind.is_share() { kind.weight } else { 0.0 };
            }
        }
        demand
    }
}
