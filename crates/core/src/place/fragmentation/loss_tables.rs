//! What the mix of asks says about room: tables made at a refresh, read at every decision.
//!
//! Losses are counted in thousandths of a GPU, times 1024 so that fractions survive in whole numbers.

use crate::place::ClusterCapacity;
use crate::place::capacity_vector::{CapacityVector, NEVER};
use crate::place::demand_histogram::{DemandHistogram, DemandKind};

/// Typical kinds looked at: a bound on what a decision costs.
const MOST_KINDS: usize = 96;
/// Multi-GPU kinds looked at.
const MOST_MULTI: usize = 16;
/// A hole is worth half of what would fill it when this part of all GPUs asked comes as shares that fit it …
const RARE: f64 = 0.015;
/// … plus this much where all asks are shares: then holes are plenty, too.
const RARE_AMONG_SHARES: f64 = 0.025;
/// CPU per GPU of a lean and of a rich pod, in multiples of the mean.
const LEAN: f64 = 0.8;
const RICH: f64 = 1.5;
/// What a thousandth of a GPU without CPU costs: to shares, pods without GPU, pods with whole GPUs.
const SHORT_FOR_SHARES: f64 = 0.7;
const SHORT_FOR_NO_GPU: f64 = 0.5;
const SHORT_FOR_WHOLE: f64 = 0.5;
/// What a whole GPU lost to multi-GPU pods costs a share.
const SPLIT: f64 = 0.35;
/// How strongly whole GPUs are packed while CPU is plenty, and shares spread over CPU while it is scarce.
const PACK: f64 = 0.02;
const SPREAD: f64 = 0.05;
/// All CPU asked per GPU asked, against what the cluster has: from plenty to scarce.
const PLENTY: f64 = 0.92;
const SCARCE: f64 = 0.98;
/// The price of a model by how much of it is asked for by name, and the most it can be.
const PRICE: f64 = 0.3;
const HIGHEST_DEMAND: f64 = 1.5;

/// The loss of one unit, times 1024.
const UNIT: i64 = 1024;
/// GPU per CPU is kept in millionths (2^20).
const RATIO_BITS: u32 = 20;
/// Weights of typical kinds add up to 2^16.
const WEIGHT_BITS: u32 = 16;
/// The values of a GPU are tabled in steps of ten thousandths.
const STEPS: usize = 101;

/// Who asks, as far as losses differ.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum AskKind {
    /// A pod without a GPU.
    NoGpu,
    /// A pod with parts of GPUs.
    Share,
    /// A pod with whole GPUs.
    Whole,
}

/// Everything learned, frozen.
#[derive(Clone, Debug)]
pub(super) struct LossTables {
    classes: Vec<ClassTable>,
    /// GPU thousandths that one thousandth of CPU serves: at the mean, for lean pods, for rich pods.
    served: i64,
    served_lean: i64,
    served_rich: i64,
    pack: i64,
    spread: i64,
}

/// What is known about one class of GPU.
#[derive(Clone, Debug)]
struct ClassTable {
    /// Distinct sizes of typical parts.
    sizes: Vec<u16>,
    /// Typical kinds that may run here.
    kinds: Vec<Typical>,
    /// Kinds that want several whole GPUs.
    multi: Vec<Multi>,
    /// What a GPU with so much idle is worth.
    value: [i64; STEPS],
    price: i64,
}

#[derive(Clone, Debug)]
struct Typical {
    cpu: i64,
    memory: i64,
    count: u32,
    /// Which of the sizes.
    size: usize,
    weight: i64,
}

#[derive(Clone, Debug)]
struct Multi {
    cpu: i64,
    memory: i64,
    count: i64,
    allowed: bool,
    weight: i64,
}

impl LossTables {
    /// From what was asked so far and what the cluster has.
    pub(super) fn new(mix: &DemandHistogram, cluster: &ClusterCapacity) -> LossTables {
        let classes = cluster.classes();
        let kinds = mix.kinds(classes);
        let typical = mix.typical().min(MOST_KINDS);
        let totals = ClusterTotals::of(cluster);
        let demand = DemandTotals::of(&kinds);
        let per_cpu = demand.gpu_milli / demand.cpu_with_gpu.max(1.0);
        let ratio = |multiple: f64| fixed(per_cpu / multiple, 1 << RATIO_BITS);
        // How far from plenty to scarce the CPU is, by what all pods ask.
        let asked = demand.cpu / demand.gpu_milli.max(1.0) / totals.cpu_per_gpu_milli;
        let scarce = ((asked - PLENTY) / (SCARCE - PLENTY)).clamp(0.0, 1.0);
        LossTables {
            classes: (0..classes.len())
                .map(|class| ClassTable::new(class, &kinds, typical, &demand, &totals))
                .collect(),
            served: ratio(1.0),
            served_lean: ratio(LEAN),
            served_rich: ratio(RICH),
            pack: fixed(PACK * (1.0 - scarce), UNIT),
            spread: fixed(SPREAD * scarce, UNIT),
        }
    }

    /// Whether every class of the cluster's GPUs is in the tables.
    pub(super) fn know(&self, cluster: &ClusterCapacity) -> bool {
        self.classes.len() == cluster.classes().len()
    }

    /// How much of a node's room is lost to likely asks.
    pub(super) fn loss(&self, node: &CapacityVector, asker: AskKind) -> i64 {
        let idle = i64::from(node.idle_sum());
        let lean = without_cpu(node, idle, self.served_lean);
        let rich = without_cpu(node, idle, self.served_rich);
        let by_class = |loss: &dyn Fn(&ClassTable, &[u16]) -> i64| self.sum(node, loss);
        match asker {
            AskKind::NoGpu => {
                by_class(&|class, gpus| class.fragments(node, gpus))
                    + fixed(SHORT_FOR_NO_GPU, UNIT) * (lean + rich)
            }
            AskKind::Share => {
                by_class(&|class, gpus| {
                    class.holes(gpus) + class.split(node, gpus) - class.price * idle_sum(gpus)
                }) + fixed(SHORT_FOR_SHARES, UNIT) * (lean + rich)
            }
            AskKind::Whole => {
                by_class(&|class, gpus| class.fragments(node, gpus) - class.price * idle_sum(gpus))
                    + fixed(SHORT_FOR_WHOLE, UNIT) * rich
            }
        }
    }

    /// Small preferences among placements that lose the same: whole GPUs packed, shares spread over CPU.
    pub(super) fn leaning(&self, after: &CapacityVector, asker: AskKind) -> i64 {
        match asker {
            AskKind::NoGpu => 0,
            AskKind::Share => {
                self.spread * (after.cpu.saturating_mul(self.served) >> RATIO_BITS).min(1 << 30)
            }
            AskKind::Whole => -self.pack * i64::from(after.idle_sum()),
        }
    }

    /// Sums over the classes of GPU a node has, each with the idle thousandths of its GPUs.
    fn sum(&self, node: &CapacityVector, loss: &dyn Fn(&ClassTable, &[u16]) -> i64) -> i64 {
        let (idle, class) = (&node.idle[..node.gpus], &node.class[..node.gpus]);
        let Some(&first) = class.first() else { return 0 };
        let table = |class: u16| self.classes.get(usize::from(class));
        if class.iter().all(|class| *class == first) {
            return table(first).map_or(0, |table| loss(table, idle));
        }
        // Cards of different kinds in one node: each kind is a node of its own.
        let mut sum = 0;
        for at in (0..class.len()).filter(|&at| !class[..at].contains(&class[at])) {
            let own: Vec<u16> =
                (at..class.len()).filter(|&b| class[b] == class[at]).map(|b| idle[b]).collect();
            sum += table(class[at]).map_or(0, |table| loss(table, &own));
        }
        sum
    }
}

/// Idle thousandths that the CPU left cannot serve.
fn without_cpu(node: &CapacityVector, idle: i64, served: i64) -> i64 {
    (idle - (node.cpu.saturating_mul(served) >> RATIO_BITS)).max(0)
}

fn idle_sum(gpus: &[u16]) -> i64 {
    gpus.iter().map(|&idle| i64::from(idle)).sum()
}

fn fixed(value: f64, unit: i64) -> i64 {
    // Saturates: a ratio of a cluster without CPU is as good as endless.
    (value * unit as f64).round() as i64
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
        for kind in kinds[..typical].iter().filter(|kind| kind.count > 0 && kind.milli[class] != NEVER) {
            let size = kind.milli[class];
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
            .map(|kind| (kind.gpu_milli() / demand.gpu_milli, kind))
            .collect();
        multi.sort_by(|a, b| b.0.total_cmp(&a.0));
        table.multi = multi
            .into_iter()
            .take(MOST_MULTI)
            .map(|(part, kind)| Multi {
                cpu: kind.cpu.max(1),
                memory: kind.memory.max(1),
                count: i64::from(kind.count),
                allowed: kind.milli[class] != NEVER,
                weight: fixed(part, UNIT),
            })
            .collect();
        table
    }

    /// Idle thousandths that typical pods cannot use, weighted by how typical they are.
    fn fragments(&self, node: &CapacityVector, gpus: &[u16]) -> i64 {
        let idle = idle_sum(gpus);
        if idle == 0 {
            return 0;
        }
        // For every size: GPUs large enough, and their idle thousandths; looked at only when a kind needs it.
        const UNKNOWN: u32 = u32::MAX;
        let mut fitting = [(UNKNOWN, 0u32); MOST_KINDS];
        let mut usable = 0;
        for kind in self.kinds.iter().filter(|kind| kind.cpu <= node.cpu && kind.memory <= node.memory) {
            let (count, idle) = &mut fitting[kind.size];
            if *count == UNKNOWN {
                let size = self.sizes[kind.size];
                *count = gpus.iter().map(|idle| u32::from(*idle >= size)).sum();
                *idle = gpus.iter().map(|idle| if *idle >= size { u32::from(*idle) } else { 0 }).sum();
            }
            if *count >= kind.count {
                usable += kind.weight * i64::from(*idle);
            }
        }
        idle * UNIT - (usable >> (WEIGHT_BITS - UNIT.trailing_zeros()))
    }

    /// Idle thousandths beyond what the shares seen so far would fill.
    fn holes(&self, gpus: &[u16]) -> i64 {
        let value: i64 = gpus.iter().map(|&idle| self.value[usize::from(idle / 10).min(STEPS - 1)]).sum();
        idle_sum(gpus) * UNIT - value
    }

    /// Whole free GPUs that multi-GPU pods could not use, weighted by their part of the demand.
    fn split(&self, node: &CapacityVector, gpus: &[u16]) -> i64 {
        let whole = gpus.iter().filter(|&&idle| idle >= 1000).count() as i64;
        if whole == 0 {
            return 0;
        }
        let lost = |kind: &Multi| {
            let fits = (whole / kind.count).min(node.cpu / kind.cpu).min(node.memory / kind.memory).max(0);
            kind.weight * (whole - if kind.allowed { fits * kind.count } else { 0 })
        };
        let lost: i64 = self.multi.iter().map(lost).sum();
        (fixed(SPLIT, UNIT) * lost * 1000) >> UNIT.trailing_zeros()
    }
}

/// What a GPU with so many idle thousandths is worth: what the asks seen so far would fill it with if they came
/// as they came until now, discounted where few of them fit.
fn values(class: usize, kinds: &[DemandKind], demand: &DemandTotals) -> [i64; STEPS] {
    let mut asked = [0.0; STEPS];
    for kind in kinds.iter().filter(|kind| kind.count > 0 && kind.milli[class] != NEVER) {
        asked[usize::from(kind.milli[class]).div_ceil(10).min(STEPS - 1)] +=
            kind.weight * f64::from(kind.count);
    }
    let rare = RARE + RARE_AMONG_SHARES * demand.shares / demand.gpus.max(1.0);
    let mut worth = [0.0f64; STEPS];
    for capacity in 1..STEPS {
        let (mut fitting, mut filled) = (0.0, 0.0);
        for size in 1..=capacity {
            fitting += asked[size];
            filled += asked[size] * (10.0 * size as f64 + worth[capacity - size]);
        }
        if fitting > 0.0 {
            let part = fitting / demand.gpus;
            let likely = part.powi(3) / (part.powi(3) + rare.powi(3));
            worth[capacity] = likely * filled / fitting;
        }
        worth[capacity] = worth[capacity].max(worth[capacity - 1]);
    }
    worth.map(|worth| fixed(worth, UNIT))
}

/// What a class costs pods that do not insist on it: the demand of those that do, against what there is.
fn price(class: usize, kinds: &[DemandKind], demand: &DemandTotals, totals: &ClusterTotals) -> i64 {
    let mut insisting = 0.0;
    for kind in kinds.iter().filter(|kind| kind.count > 0 && kind.milli[class] != NEVER) {
        let allowed: f64 = kind
            .milli
            .iter()
            .zip(&totals.by_class)
            .filter(|(milli, _)| **milli != NEVER)
            .map(|(_, c)| c)
            .sum();
        if allowed < totals.gpu_milli {
            insisting += kind.gpu_milli() / allowed.max(1.0);
        }
    }
    let demand = insisting * totals.gpu_milli / demand.gpu_milli.max(1.0);
    fixed(PRICE * demand.min(HIGHEST_DEMAND), UNIT)
}

/// What the cluster has.
struct ClusterTotals {
    by_class: Vec<f64>,
    gpu_milli: f64,
    cpu_per_gpu_milli: f64,
}

impl ClusterTotals {
    fn of(cluster: &ClusterCapacity) -> ClusterTotals {
        let mut by_class = vec![0.0; cluster.classes().len()];
        let mut cpu = 0.0;
        for (_, capacity) in cluster.nodes() {
            for gpu in capacity.gpus.iter().filter(|gpu| !gpu.withheld) {
                by_class[usize::from(gpu.class)] += 1000.0;
            }
            cpu += capacity.node.cpu_milli.map_or(0.0, |cpu| cpu.0 as f64);
        }
        let gpu_milli = by_class.iter().sum::<f64>().max(1.0);
        // A cluster whose CPU nobody counts has plenty.
        let cpu_per_gpu_milli = if cpu > 0.0 { cpu / gpu_milli } else { f64::INFINITY };
        ClusterTotals { by_class, gpu_milli, cpu_per_gpu_milli }
    }
}

/// What was asked so far.
struct DemandTotals {
    /// CPU of all pods.
    cpu: f64,
    /// CPU of pods with GPUs.
    cpu_with_gpu: f64,
    gpu_milli: f64,
    /// Parts of GPUs.
    gpus: f64,
    /// Pods with one part of a GPU.
    shares: f64,
}

impl DemandTotals {
    fn of(kinds: &[DemandKind]) -> DemandTotals {
        let mut demand = DemandTotals { cpu: 0.0, cpu_with_gpu: 0.0, gpu_milli: 0.0, gpus: 0.0, shares: 0.0 };
        for kind in kinds {
            let cpu = kind.cpu as f64 * kind.weight;
            demand.cpu += cpu;
            if kind.count > 0 {
                demand.cpu_with_gpu += cpu;
                demand.gpu_milli += kind.gpu_milli();
                demand.gpus += kind.weight * f64::from(kind.count);
                demand.shares += if kind.is_share() { kind.weight } else { 0.0 };
            }
        }
        demand
    }
}
