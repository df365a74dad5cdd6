//! How often each kind of pod was asked for so far, as an estimate of what will be asked for next.
//!
//! Only asks that have arrived are known. The most frequent kinds that make up 95 percent of them are typical and
//! stand for the rest.

use super::capacity::GpuClass;
use super::capacity_vector::{NEVER_FITS, WHOLE_GPU, host_amount, size_on};
use crate::model::{Ask, Bytes, ContainerRole, MilliCpu, PodAsk, Selector, ShareAsk};
use std::collections::HashMap;

/// The part of all arrivals that the typical kinds cover, in percent.
const COVERED_PERCENT: u64 = 95;

/// The properties by which pods are grouped into kinds.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
struct KindKey {
    cpu: MilliCpu,
    memory: Bytes,
    count: u32,
    share: Option<ShareAsk>,
    models: Selector,
}

/// How often each kind of pod has been asked for.
#[derive(Clone, Debug, Default)]
pub(crate) struct DemandHistogram {
    /// The kinds with their counts, in the order in which they first came.
    kinds: Vec<(KindKey, u64)>,
    index: HashMap<KindKey, usize>,
    /// The sum of all counts.
    total: u64,
}

/// A kind of pod, measured on every class of GPU.
#[derive(Clone, Debug)]
pub(crate) struct DemandKind {
    /// CPU in thousandths of a core.
    pub(crate) cpu: i64,
    /// Host memory in bytes.
    pub(crate) memory: i64,
    /// Number of GPUs; 0 for a pod without GPUs.
    pub(crate) count: u32,
    /// The part of each GPU in thousandths of a percent, by class; [`NEVER_FITS`] if the class is excluded or too
    /// small.
    pub(crate) size: Vec<u32>,
    /// How often it was asked for.
    pub(crate) weight: f64,
}

impl DemandHistogram {
    /// Counts a pod `times` times.
    pub(crate) fn add(&mut self, ask: &PodAsk, times: u64) {
        // A pod of several containers counts by the one that requests most.
        let largest = ask.asks.iter().max_by_key(|ask| (ask.want.share.whole, ask.want.count));
        let kind = KindKey {
            cpu: ask.cpu,
            memory: ask.memory,
            count: gpus_at_once(ask),
            share: largest.map(|ask| ask.want.share),
            models: ask.constraints.models.clone(),
        };
        let at = match self.index.get(&kind) {
            Some(&at) => at,
            None => {
                self.kinds.push((kind.clone(), 0));
                self.index.insert(kind, self.kinds.len() - 1);
                self.kinds.len() - 1
            }
        };
        self.kinds[at].1 += times;
        self.total += times;
    }

    /// Halves every count, so that older asks weigh less than recent ones.
    pub(crate) fn decay(&mut self) {
        self.kinds.retain_mut(|(_, count)| {
            *count /= 2;
            *count > 0
        });
        self.index = self.kinds.iter().enumerate().map(|(at, (kind, _))| (kind.clone(), at)).collect();
        self.total = self.kinds.iter().map(|(_, count)| count).sum();
    }

    /// Returns every kind, the most frequent first; equally frequent ones in the order in which they first came.
    pub(crate) fn kinds(&self, classes: &[GpuClass]) -> Vec<DemandKind> {
        let mut order: Vec<&(KindKey, u64)> = self.kinds.iter().collect();
        order.sort_by_key(|(_, count)| std::cmp::Reverse(*count));
        order.into_iter().map(|(kind, count)| DemandKind::measure(kind, *count, classes)).collect()
    }

    /// Returns how many of [`DemandHistogram::kinds`] are typical.
    pub(crate) fn typical(&self) -> usize {
        let mut counts: Vec<u64> = self.kinds.iter().map(|(_, count)| *count).collect();
        counts.sort_unstable_by_key(|count| std::cmp::Reverse(*count));
        let mut covered = 0;
        let is_enough = |covered: u64| covered * 100 >= self.total * COVERED_PERCENT;
        let needed = counts.iter().take_while(|&&count| {
            let more = !is_enough(covered);
            covered += count;
            more
        });
        needed.count()
    }
}

/// Returns how many GPUs a pod needs at the time when it needs most: those of all containers that run together, or
/// those of the largest init container.
fn gpus_at_once(ask: &PodAsk) -> u32 {
    let (init, running): (Vec<&Ask>, Vec<&Ask>) =
        ask.asks.iter().partition(|ask| ask.role == ContainerRole::Init);
    let running = running.iter().fold(0u32, |sum, ask| sum.saturating_add(ask.want.count));
    init.iter().map(|ask| ask.want.count).fold(running, u32::max)
}

impl DemandKind {
    /// Returns the compute that all pods of this kind asked for, on the smallest card that takes them, in thousandths
    /// of a percent of one GPU.
    pub(crate) fn cores(&self) -> f64 {
        self.weight * f64::from(self.count) * f64::from(self.largest_size())
    }

    /// Returns whether pods of this kind want one share that is less than a whole GPU.
    pub(crate) fn is_share(&self) -> bool {
        self.count == 1 && self.largest_size() < WHOLE_GPU
    }

    fn largest_size(&self) -> u32 {
        self.size.iter().copied().filter(|&size| size != NEVER_FITS).max().unwrap_or(0)
    }

    fn measure(kind: &KindKey, count: u64, classes: &[GpuClass]) -> DemandKind {
        let size = |class: &GpuClass| match &kind.share {
            None => 0,
            Some(_) if !(kind.models.is_open() || kind.models.admits_model(&class.model)) => NEVER_FITS,
            Some(share) => size_on(&super::ShareNeed::of(share, class), class),
        };
        DemandKind {
            cpu: host_amount(kind.cpu.0),
            memory: host_amount(kind.memory.0),
            count: kind.count,
            size: classes.iter().map(size).collect(),
            weight: count as f64,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn cpu_pod(cpu: u64) -> PodAsk {
        PodAsk { cpu: MilliCpu(cpu), ..PodAsk::default() }
    }

    #[test]
    fn typical_kinds_cover_most_arrivals() {
        let mut demand = DemandHistogram::default();
        for (cpu, times) in [(1, 2), (2, 90), (3, 6), (4, 2)] {
            demand.add(&cpu_pod(cpu), times);
        }
        let kinds = demand.kinds(&[]);
        let order: Vec<i64> = kinds.iter().map(|kind| kind.cpu).collect();
        assert_eq!(order, [2, 3, 1, 4]);
        assert_eq!(demand.typical(), 2);
    }

    #[test]
    fn decay_drops_rare_kinds() {
        let mut demand = DemandHistogram::default();
        for cpu in [1, 1, 1, 1, 2] {
            demand.add(&cpu_pod(cpu), 1);
        }
        demand.decay();
        assert_eq!(demand.total, 2);
        demand.add(&cpu_pod(2), 1);
        assert_eq!(demand.kinds(&[]).len(), 2);
    }
}
