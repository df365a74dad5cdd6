//! The default policy: leave the least room that no likely ask can use.
//!
//! It goes back to fragmentation gradient descent (FGD): of all placements, take the one that adds least to the
//! GPU room that typical pods cannot use. Four things are different, each because it gives more of the cluster
//! away (docs/placement.md has the figures and what else was tried):
//!
//! * A hole on a partly used GPU is worth what the shares seen so far would fill it with, not all or nothing.
//! * GPU room without the CPU to use it counts as lost, gradually, before the last CPU is gone.
//! * Whole GPUs that multi-GPU pods could no longer use side by side count as lost.
//! * Models that some pods insist on have a price for pods that do not.
//!
//! Nothing is known beforehand: the mix of asks is learned from those that arrived, and the tables made of it
//! are frozen between refreshes, so that ranks of unchanged nodes stay valid. Until enough has arrived it packs.
//! Scores are whole numbers.

mod loss_tables;

use super::capacity::{GpuClass, NodeCapacity};
use super::capacity_vector::CapacityVector;
use super::demand_histogram::DemandHistogram;
use super::fit::{PreparedAsk, PreparedWant};
use super::placement::Placement;
use super::policies::{self, NodeRanking, StatelessPolicy};
use super::solve::{self, GpuPreference, PlacementContext};
use super::{ClusterCapacity, gpu_order};
use crate::model::{CoresAsk, PodAsk, Policy, Together};
use loss_tables::{AskKind, LossTables};

/// Arrivals after which the mix is believed and the tables are made for the first time. A few pods are no
/// pattern; until then packing does better.
const ENOUGH: u64 = 50;
/// Arrivals after which the mix fades, so that it follows what is asked now.
const FADE_AT: u64 = 51_200;
/// A gain is worth this many ties: of placements that gain the same, the one on the fuller GPU wins.
const GAIN: i64 = 2048;

/// What stands in while too little is known.
const PACKED: StatelessPolicy = StatelessPolicy(Policy::Binpack);

/// The default policy and what it has learned.
#[derive(Clone, Debug)]
pub struct Fragmentation {
    mix: DemandHistogram,
    /// What the mix says about room; nothing while too few pods have been seen.
    tables: Option<LossTables>,
    arrived: u64,
    refresh_at: u64,
    epoch: u64,
}

impl Default for Fragmentation {
    fn default() -> Self {
        Fragmentation::new()
    }
}

impl Fragmentation {
    /// Having seen nothing yet: it packs until it has.
    pub fn new() -> Fragmentation {
        Fragmentation {
            mix: DemandHistogram::default(),
            tables: None,
            arrived: 0,
            refresh_at: ENOUGH,
            epoch: policies::new_epoch(),
        }
    }

    /// Takes note of a pod that arrived. Call it once per pod, before it is placed.
    pub fn arrived(&mut self, ask: &PodAsk, cluster: &ClusterCapacity) {
        self.mix.add(ask, 1);
        self.arrived += 1;
        // Doubling gaps: a refresh makes every cached rank stale, and all of them together must stay cheap.
        let due = self.arrived >= self.refresh_at;
        if due {
            self.refresh_at = self.arrived * 2;
        }
        if self.arrived >= FADE_AT {
            self.mix.fade();
            self.arrived /= 2;
            self.refresh_at = FADE_AT;
        }
        if due || self.tables.as_ref().is_some_and(|tables| !tables.know(cluster)) {
            self.refresh(cluster);
        }
    }

    /// Takes note of all pods that hold something, as after a restart.
    pub fn learn<'a>(&mut self, held: impl IntoIterator<Item = &'a PodAsk>, cluster: &ClusterCapacity) {
        for ask in held {
            self.mix.add(ask, 1);
            self.arrived += 1;
        }
        self.refresh_at = (self.arrived * 2).clamp(ENOUGH, FADE_AT);
        if self.arrived >= ENOUGH {
            self.refresh(cluster);
        }
    }

    fn refresh(&mut self, cluster: &ClusterCapacity) {
        self.tables = Some(LossTables::new(&self.mix, cluster));
        self.epoch = policies::new_epoch();
    }

    /// What a node loses by a placement; the best loses least.
    fn gain(tables: &LossTables, before: &CapacityVector, after: &CapacityVector, asker: AskKind) -> i64 {
        let gain = tables.loss(before, asker) - tables.loss(after, asker);
        (gain + tables.leaning(after, asker)) * GAIN
    }

    /// The gain of a share on each GPU of a mask. GPUs in the same state gain the same.
    fn share_gains(
        tables: &LossTables,
        on: &PlacementContext,
        wanted: &PreparedWant,
        mask: u64,
    ) -> impl Iterator<Item = (i64, usize)> {
        let PlacementContext { capacity, classes, prepared } = *on;
        let before = CapacityVector::of(capacity, classes);
        let mut after_host = before;
        after_host.take_host(prepared);
        let loss = tables.loss(&before, AskKind::Share);
        let mut last: Option<(u16, u16, i64)> = None;
        gpu_order::indexes(mask).filter_map(move |gpu| {
            let state = (before.idle[gpu], before.class[gpu]);
            if let Some((idle, class, gain)) = last
                && (idle, class) == state
            {
                return Some((gain, gpu));
            }
            let need = wanted.needs[usize::from(capacity.gpus[gpu].class)]?;
            let mut after = after_host;
            after.take_part(gpu, &capacity.gpus[gpu], &need, classes);
            let gain = loss - tables.loss(&after, AskKind::Share) + tables.leaning(&after, AskKind::Share);
            let gain = gain * GAIN - i64::from(after.idle[gpu]);
            last = Some((state.0, state.1, gain));
            Some((gain, gpu))
        })
    }
}

/// Who asks, as far as losses differ.
fn asker(prepared: &PreparedAsk) -> AskKind {
    match prepared.wants.as_slice() {
        [] => AskKind::NoGpu,
        wants if wants.iter().all(|wanted| !wanted.want.part.whole) => AskKind::Share,
        _ => AskKind::Whole,
    }
}

impl GpuPreference for Fragmentation {
    fn sort(&self, on: &PlacementContext, wanted: &PreparedWant, gpus: &mut Vec<usize>) {
        let Some(tables) = &self.tables else { return PACKED.sort(on, wanted, gpus) };
        if wanted.want.part.whole {
            return policies::least_needed_first(on.capacity, gpus);
        }
        let mask = gpus.iter().fold(0, |mask, gpu| mask | 1 << gpu);
        let mut gains: Vec<(i64, usize)> = Self::share_gains(tables, on, wanted, mask).collect();
        gains.sort_by_key(|&(gain, gpu)| (std::cmp::Reverse(gain), gpu));
        *gpus = gains.into_iter().map(|(_, gpu)| gpu).collect();
    }

    fn set(&self, on: &PlacementContext, wanted: &PreparedWant, mask: u64) -> Option<u64> {
        if wanted.want.part.whole {
            return gpu_order::leftover_set(on.capacity, mask, wanted.want.count);
        }
        let mut gpus: Vec<usize> = gpu_order::indexes(mask).collect();
        self.sort(on, wanted, &mut gpus);
        gpu_order::first(&gpus, wanted.want.count)
    }
}

impl NodeRanking for Fragmentation {
    fn name(&self) -> &'static str {
        "fragmentation"
    }

    fn epoch(&self) -> u64 {
        self.epoch
    }

    fn rank(&self, capacity: &NodeCapacity, classes: &[GpuClass], prepared: &PreparedAsk) -> Option<i64> {
        let Some(tables) = &self.tables else { return PACKED.rank(capacity, classes, prepared) };
        if solve::host_shortfall(capacity, prepared).is_some() {
            return None;
        }
        let asker = asker(prepared);
        match prepared.wants.as_slice() {
            [] => {
                let before = CapacityVector::of(capacity, classes);
                let mut after = before;
                after.take_host(prepared);
                Some(Self::gain(tables, &before, &after, asker))
            }
            [one] if one.want.count == 1 && !one.want.part.whole => {
                let mask = gpu_order::fitting(capacity, classes, prepared, one);
                if mask == 0 {
                    return self.rank_placed(tables, capacity, classes, prepared, asker);
                }
                let on = PlacementContext { capacity, classes, prepared };
                Self::share_gains(tables, &on, one, mask).map(|(gain, _)| gain).max()
            }
            [one] if one.want.part.whole && !matches!(one.want.part.cores, CoresAsk::Slots(_)) => {
                let mask = gpu_order::fitting(capacity, classes, prepared, one);
                let set = gpu_order::leftover_set(capacity, mask, one.want.count)?;
                if one.want.count > 1 && prepared.ask.constraints.together == Together::Required {
                    return None;
                }
                let before = CapacityVector::of(capacity, classes);
                let mut after = before;
                after.take_host(prepared);
                for gpu in gpu_order::indexes(set) {
                    after.idle[gpu] = 0;
                }
                Some(Self::gain(tables, &before, &after, asker))
            }
            _ => self.rank_placed(tables, capacity, classes, prepared, asker),
        }
    }
}

impl Fragmentation {
    /// The rank of a pod that has to be placed to know what it takes.
    fn rank_placed(
        &self,
        tables: &LossTables,
        capacity: &NodeCapacity,
        classes: &[GpuClass],
        prepared: &PreparedAsk,
        asker: AskKind,
    ) -> Option<i64> {
        if prepared.wants.len() > 1 && !policies::fits(capacity, classes, prepared) {
            return None;
        }
        let placement: Placement = self.place(capacity, classes, prepared)?;
        let before = CapacityVector::of(capacity, classes);
        let mut after = before;
        after.take_host(prepared);
        for (gpu, usage) in placement.usage_by_gpu(&prepared.ask.asks) {
            after.take_usage(gpu, &capacity.gpus[gpu], usage, classes);
        }
        Some(Self::gain(tables, &before, &after, asker))
    }
}
