//! The default policy of a cluster: leave as little capacity as possible that no likely ask can use.
//!
//! It is derived from fragmentation gradient descent (FGD): of all placements, take the one that adds least to the
//! GPU capacity that typical pods cannot use. It differs in four points, each because it allocates more of the cluster
//! (`docs/placement.md` has the figures and what else was tried):
//!
//! * A hole on a partly used GPU is worth what the shares seen so far would fill it with, not all or nothing.
//! * GPU capacity without the CPU to use it counts as lost, gradually, before the last CPU is gone.
//! * Whole GPUs that multi-GPU pods could no longer use side by side count as lost.
//! * Placing an unconstrained pod on a model that other pods require costs score.
//!
//! Nothing is known beforehand. The demand is learned from the asks that arrived, and the tables derived from it are
//! frozen between refreshes, so that ranks of unchanged nodes stay valid. Until enough asks have arrived the policy
//! packs. Scores are integers.

mod loss_tables;

use super::capacity::{GpuClass, NodeCapacity};
use super::capacity_vector::{CapacityVector, WHOLE_GPU};
use super::demand_histogram::DemandHistogram;
use super::fit::{PreparedAsk, PreparedWant};
use super::placement::Placement;
use super::policies::{self, NodeRanking, StatelessPolicy};
use super::solve::{self, GpuPreference, PlacementContext};
use super::{ClusterCapacity, gpu_order};
use crate::model::{Colocation, CoresAsk, PlacementPolicy, PodAsk};
use loss_tables::{AskKind, LossTables};

/// Arrivals after which the demand is trusted and the tables are made for the first time. Before that, packing does
/// better.
const MIN_ARRIVALS: u64 = 50;
/// Arrivals after which all counts are halved, so that they follow what is asked now.
const DECAY_ARRIVALS: u64 = 51_200;
/// Scales a gain above every tie-breaker: of placements with equal gain, the one on the fuller GPU wins.
const GAIN_SCALE: i64 = 1 << 17;
const _: () =
    assert!(GAIN_SCALE > WHOLE_GPU as i64, "the idle part of a GPU breaks ties and must not decide");

/// The policy to use while too little is known.
const FALLBACK: StatelessPolicy = StatelessPolicy(PlacementPolicy::Binpack);

/// The policy and what it has learned.
#[derive(Clone, Debug)]
pub struct Fragmentation {
    demand: DemandHistogram,
    /// Derived from the demand; absent while too few pods have arrived.
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
    /// Returns a policy that has seen no ask yet and packs until it has.
    pub fn new() -> Fragmentation {
        Fragmentation {
            demand: DemandHistogram::default(),
            tables: None,
            arrived: 0,
            refresh_at: MIN_ARRIVALS,
            epoch: policies::new_epoch(),
        }
    }

    /// Learns from a pod that arrived. Callers must call this once per pod, before it is placed.
    pub fn arrived(&mut self, ask: &PodAsk, cluster: &ClusterCapacity) {
        self.demand.add(ask, 1);
        self.arrived += 1;
        // The gaps double: a refresh invalidates every cached rank, and all refreshes together must stay cheap.
        let due = self.arrived >= self.refresh_at;
        if due {
            self.refresh_at = self.arrived * 2;
        }
        if self.arrived >= DECAY_ARRIVALS {
            self.demand.decay();
            self.arrived /= 2;
            self.refresh_at = DECAY_ARRIVALS;
        }
        if due || self.tables.as_ref().is_some_and(|tables| !tables.cover(cluster)) {
            self.refresh(cluster);
        }
    }

    /// Learns from all pods that hold a grant, as after a restart.
    pub fn learn<'a>(&mut self, held: impl IntoIterator<Item = &'a PodAsk>, cluster: &ClusterCapacity) {
        for ask in held {
            self.demand.add(ask, 1);
            self.arrived += 1;
        }
        self.refresh_at = (self.arrived * 2).clamp(MIN_ARRIVALS, DECAY_ARRIVALS);
        if self.arrived >= MIN_ARRIVALS {
            self.refresh(cluster);
        }
    }

    fn refresh(&mut self, cluster: &ClusterCapacity) {
        self.tables = Some(LossTables::new(&self.demand, cluster));
        self.epoch = policies::new_epoch();
    }

    /// Returns by how much a placement lowers the loss of a node; the highest is best.
    fn gain(tables: &LossTables, before: &CapacityVector, after: &CapacityVector, kind: AskKind) -> i64 {
        let gain = tables.loss(before, kind) - tables.loss(after, kind);
        (gain + tables.preference(after, kind)) * GAIN_SCALE
    }

    /// Returns the gain of a share on each GPU of a mask. GPUs in the same state have the same gain.
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
        let mut last: Option<(u32, u16, i64)> = None;
        gpu_order::indexes(mask).filter_map(move |gpu| {
            let state = (before.idle[gpu], before.class[gpu]);
            if let Some((idle, class, gain)) = last
                && (idle, class) == state
            {
                return Some((gain, gpu));
            }
            let need = wanted.needs[usize::from(capacity.gpus[gpu].class)]?;
            let mut after = after_host;
            after.take_share(gpu, &capacity.gpus[gpu], &need, classes);
            let gain = loss - tables.loss(&after, AskKind::Share) + tables.preference(&after, AskKind::Share);
            let gain = gain * GAIN_SCALE - i64::from(after.idle[gpu]);
            last = Some((state.0, state.1, gain));
            Some((gain, gpu))
        })
    }
}

impl GpuPreference for Fragmentation {
    fn order_gpus(&self, on: &PlacementContext, wanted: &PreparedWant, gpus: &mut Vec<usize>) {
        let Some(tables) = &self.tables else { return FALLBACK.order_gpus(on, wanted, gpus) };
        if wanted.want.share.whole {
            return policies::least_needed_first(on.capacity, gpus);
        }
        let mask = gpus.iter().fold(0, |mask, gpu| mask | 1 << gpu);
        let mut gains: Vec<(i64, usize)> = Self::share_gains(tables, on, wanted, mask).collect();
        gains.sort_by_key(|&(gain, gpu)| (std::cmp::Reverse(gain), gpu));
        *gpus = gains.into_iter().map(|(_, gpu)| gpu).collect();
    }

    fn choose_gpu_set(&self, on: &PlacementContext, wanted: &PreparedWant, mask: u64) -> Option<u64> {
        if wanted.want.share.whole {
            return gpu_order::leftover_set(on.capacity, mask, wanted.want.count);
        }
        let mut gpus: Vec<usize> = gpu_order::indexes(mask).collect();
        self.order_gpus(on, wanted, &mut gpus);
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
        let Some(tables) = &self.tables else { return FALLBACK.rank(capacity, classes, prepared) };
        if solve::host_shortfall(capacity, prepared).is_some() {
            return None;
        }
        let kind = AskKind::of(prepared);
        match prepared.wants.as_slice() {
            [] => {
                let before = CapacityVector::of(capacity, classes);
                let mut after = before;
                after.take_host(prepared);
                Some(Self::gain(tables, &before, &after, kind))
            }
            [one] if one.want.count == 1 && !one.want.share.whole => {
                let mask = gpu_order::fitting(capacity, classes, prepared, one);
                if mask == 0 {
                    return self.rank_placed(tables, capacity, classes, prepared, kind);
                }
                let on = PlacementContext { capacity, classes, prepared };
                Self::share_gains(tables, &on, one, mask).map(|(gain, _)| gain).max()
            }
            [one] if one.want.share.whole && !matches!(one.want.share.cores, CoresAsk::Slots(_)) => {
                let mask = gpu_order::fitting(capacity, classes, prepared, one);
                let set = gpu_order::leftover_set(capacity, mask, one.want.count)?;
                if one.want.count > 1 && prepared.ask.constraints.colocation == Colocation::Required {
                    return None;
                }
                let before = CapacityVector::of(capacity, classes);
                let mut after = before;
                after.take_host(prepared);
                for gpu in gpu_order::indexes(set) {
                    after.idle[gpu] = 0;
                }
                Some(Self::gain(tables, &before, &after, kind))
            }
            _ => self.rank_placed(tables, capacity, classes, prepared, kind),
        }
    }
}

impl Fragmentation {
    /// Returns the rank for a pod that must be placed to know what it uses.
    fn rank_placed(
        &self,
        tables: &LossTables,
        capacity: &NodeCapacity,
        classes: &[GpuClass],
        prepared: &PreparedAsk,
        kind: AskKind,
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
        Some(Self::gain(tables, &before, &after, kind))
    }
}
