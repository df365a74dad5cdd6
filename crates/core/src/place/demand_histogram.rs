//! The mix of asks: what pods have looked like so far, as a guess at what comes next.
//!
//! Only asks that have arrived are known; the most frequent kinds that make up 95 percent of them stand for
//! the rest.

use super::capacity::GpuClass;
use super::capacity_vector::{NEVER, amount, milli};
use crate::model::{Ask, Bytes, ContainerRole, MilliCpu, PodAsk, Selector, ShareAsk};
use std::collections::HashMap;

/// How much of everything seen the typical kinds cover, in percent.
const COVERED_PERCENT: u64 = 95;

/// What makes two pods the same kind.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
struct Likeness {
    cpu: MilliCpu,
    memory: Bytes,
    count: u32,
    part: Option<ShareAsk>,
    models: Selector,
}

/// How often each kind of pod has been asked for.
#[derive(Clone, Debug, Default)]
pub(crate) struct DemandHistogram {
    kinds: Vec<(Likeness, u64)>,
    known: HashMap<Likeness, usize>,
    seen: u64,
}

/// A kind of pod, measured on every class of GPU.
#[derive(Clone, Debug)]
pub(crate) struct DemandKind {
    /// CPU.
    pub(crate) cpu: i64,
    /// Host memory.
    pub(crate) memory: i64,
    /// GPUs wanted; 0 for a pod that wants none.
    pub(crate) count: u32,
    /// Thousandths wanted of each GPU, by class; [`NEVER`] where the class is excluded or too small.
    pub(crate) milli: Vec<u16>,
    /// How often it was asked for.
    pub(crate) weight: f64,
}

impl DemandHistogram {
    /// Counts a pod, so many times.
    pub(crate) fn add(&mut self, ask: &PodAsk, times: u64) {
        // A pod of several containers counts by the one that wants most.
        let largest = ask.asks.iter().max_by_key(|a| (a.want.part.whole, a.want.count));
        let kind = Likeness {
            cpu: ask.cpu,
            memory: ask.memory,
            count: gpus_at_once(ask),
            part: largest.map(|a| a.want.part),
            models: ask.constraints.models.clone(),
        };
        let at = match self.known.get(&kind) {
            Some(&at) => at,
            None => {
                self.kinds.push((kind.clone(), 0));
                self.known.insert(kind, self.kinds.len() - 1);
                self.kinds.len() - 1
            }
        };
        self.kinds[at].1 += times;
        self.seen += times;
    }

    /// Halves every count, so that what was asked long ago weighs less than what is asked now.
    pub(crate) fn fade(&mut self) {
        self.kinds.retain_mut(|(_, count)| {
            *count /= 2;
            *count > 0
        });
        self.known = self.kinds.iter().enumerate().map(|(at, (kind, _))| (kind.clone(), at)).collect();
        self.seen = self.kinds.iter().map(|(_, count)| count).sum();
    }

    /// Every kind seen, the most frequent first; equally frequent ones in the order they came.
    pub(crate) fn kinds(&self, classes: &[GpuClass]) -> Vec<DemandKind> {
        let mut order: Vec<&(Likeness, u64)> = self.kinds.iter().collect();
        order.sort_by_key(|(_, count)| std::cmp::Reverse(*count));
        order.into_iter().map(|(kind, count)| DemandKind::measure(kind, *count, classes)).collect()
    }

    /// How many of [`DemandHistogram::kinds`] it takes to cover most of what was seen.
    pub(crate) fn typical(&self) -> usize {
        let mut counts: Vec<u64> = self.kinds.iter().map(|(_, count)| *count).collect();
        counts.sort_unstable_by_key(|count| std::cmp::Reverse(*count));
        let mut covered = 0;
        let enough = |covered: u64| covered * 100 >= self.seen * COVERED_PERCENT;
        counts
            .iter()
            .take_while(|&&count| {
                let more = !enough(covered);
                covered += count;
                more
            })
            .count()
    }
}

/// GPUs a pod wants at the time it wants most: all that run together, or the largest init container.
fn gpus_at_once(ask: &PodAsk) -> u32 {
    let (init, running): (Vec<&Ask>, Vec<&Ask>) =
        ask.asks.iter().partition(|a| a.role == ContainerRole::Init);
    let running = running.iter().fold(0u32, |sum, a| sum.saturating_add(a.want.count));
    init.iter().map(|a| a.want.count).fold(running, u32::max)
}

impl DemandKind {
    /// Thousandths of a GPU all pods of this kind asked for, on the smallest card that takes them.
    pub(crate) fn gpu_milli(&self) -> f64 {
        self.weight * f64::from(self.count) * f64::from(self.largest_part())
    }

    /// One part of a GPU, less than all of it.
    pub(crate) fn is_share(&self) -> bool {
        self.count == 1 && self.largest_part() < 1000
    }

    fn largest_part(&self) -> u16 {
        self.milli.iter().copied().filter(|&milli| milli != NEVER).max().unwrap_or(0)
    }

    fn measure(kind: &Likeness, count: u64, classes: &[GpuClass]) -> DemandKind {
        let milli_on = |class: &GpuClass| match &kind.part {
            None => 0,
            Some(_) if !(kind.models.is_open() || kind.models.admits_model(&class.model)) => NEVER,
            Some(part) => milli(&super::ShareNeed::of(part, class), class),
        };
        DemandKind {
            cpu: amount(kind.cpu.0),
            memory: amount(kind.memory.0),
            count: kind.count,
            milli: classes.iter().map(milli_on).collect(),
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
    fn typical_kinds_cover_most() {
        let mut mix = DemandHistogram::default();
        for (cpu, times) in [(1, 2), (2, 90), (3, 6), (4, 2)] {
            mix.add(&cpu_pod(cpu), times);
        }
        let kinds = mix.kinds(&[]);
        let order: Vec<i64> = kinds.iter().map(|kind| kind.cpu).collect();
        assert_eq!(order, [2, 3, 1, 4]);
        assert_eq!(mix.typical(), 2);
    }

    #[test]
    fn fading_forgets_what_was_rare() {
        let mut mix = DemandHistogram::default();
        for cpu in [1, 1, 1, 1, 2] {
            mix.add(&cpu_pod(cpu), 1);
        }
        mix.fade();
        assert_eq!(mix.seen, 2);
        mix.add(&cpu_pod(2), 1);
        assert_eq!(mix.kinds(&[]).len(), 2);
    }
}
