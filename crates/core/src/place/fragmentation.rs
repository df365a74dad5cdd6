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
//! are frozen between refreshes, so that ranks of unchanged nodes stay valid. Scores are whole numbers.

mod tables;

use super::fit::{Prepared, Wanted};
use super::mix::Mix;
use super::placement::Placement;
use super::rank::{self, Ranking};
use super::room::{GpuClass, NodeRoom};
use super::sketch::Sketch;
use super::solve::{self, Preference, Setting};
use super::{Cluster, order};
use crate::model::{Ask, Bytes, Cores, CoresAsk, MemoryAsk, MilliCpu, Part, PodAsk, Role, Together, Want};
use tables::{Asker, Tables};

/// Arrivals after which the tables are made for the first time.
const FIRST_REFRESH: u64 = 50;
/// Arrivals after which the mix fades, so that it follows what is asked now.
const FADE_AT: u64 = 51_200;
/// How much an arrival counts; the prior counts in the same unit.
const ARRIVAL: u64 = 2;

/// The default policy and what it has learned.
#[derive(Clone, Debug)]
pub struct Fragmentation {
    mix: Mix,
    tables: Tables,
    arrived: u64,
    refresh_at: u64,
    epoch: u64,
}

impl Fragmentation {
    /// Knowing nothing but the cluster. Until pods arrive it expects whole GPUs and halves, two to one.
    pub fn new(cluster: &Cluster) -> Fragmentation {
        let mut mix = Mix::default();
        let whole = Part {
            memory: MemoryAsk::All,
            cores: CoresAsk::Exactly(Cores::WHOLE),
            whole: true,
            ceiling: None,
        };
        let half = Part {
            memory: MemoryAsk::Percent(50),
            cores: CoresAsk::Exactly(Cores::of_slots(1, 2)),
            whole: false,
            ceiling: None,
        };
        for (part, cpu, gib, times) in [(whole, 8000, 32, ARRIVAL), (half, 4000, 16, ARRIVAL / 2)] {
            let ask = Ask { container: "any".into(), role: Role::App, want: Want { count: 1, part } };
            let pod =
                PodAsk { asks: vec![ask], cpu: MilliCpu(cpu), memory: Bytes(gib << 30), ..PodAsk::default() };
            mix.add(&pod, times);
        }
        let tables = Tables::new(&mix, cluster);
        Fragmentation { mix, tables, arrived: 0, refresh_at: FIRST_REFRESH, epoch: rank::new_epoch() }
    }

    /// Takes note of a pod that arrived. Call it once per pod, before it is placed.
    pub fn arrived(&mut self, ask: &PodAsk, cluster: &Cluster) {
        self.mix.add(ask, ARRIVAL);
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
        if due || !self.tables.know(cluster) {
            self.tables = Tables::new(&self.mix, cluster);
            self.epoch = rank::new_epoch();
        }
    }

    /// What a node loses by a placement; the best loses least.
    fn gain(&self, before: &Sketch, after: &Sketch, asker: Asker) -> i64 {
        self.tables.loss(before, asker) - self.tables.loss(after, asker) + self.tables.leaning(after, asker)
    }

    /// The gain of a share on each GPU of a mask. GPUs in the same state gain the same.
    fn share_gains(&self, on: &Setting, wanted: &Wanted, mask: u64) -> impl Iterator<Item = (i64, usize)> {
        let Setting { room, classes, prepared } = *on;
        let before = Sketch::of(room, classes);
        let mut after_host = before;
        after_host.take_host(prepared);
        let loss = self.tables.loss(&before, Asker::Share);
        let mut last: Option<(u16, u16, i64)> = None;
        order::indexes(mask).filter_map(move |gpu| {
            let state = (before.idle[gpu], before.class[gpu]);
            if let Some((idle, class, gain)) = last
                && (idle, class) == state
            {
                return Some((gain, gpu));
            }
            let need = wanted.needs[usize::from(room.gpus[gpu].class)]?;
            let mut after = after_host;
            after.take_part(gpu, &room.gpus[gpu], &need, classes);
            let gain =
                loss - self.tables.loss(&after, Asker::Share) + self.tables.leaning(&after, Asker::Share);
            last = Some((state.0, state.1, gain));
            Some((gain, gpu))
        })
    }
}

/// Who asks, as far as losses differ.
fn asker(prepared: &Prepared) -> Asker {
    match prepared.wants.as_slice() {
        [] => Asker::NoGpu,
        wants if wants.iter().all(|wanted| !wanted.want.part.whole) => Asker::Share,
        _ => Asker::Whole,
    }
}

impl Preference for Fragmentation {
    fn sort(&self, on: &Setting, wanted: &Wanted, gpus: &mut Vec<usize>) {
        if wanted.want.part.whole {
            return rank::least_needed_first(on.room, gpus);
        }
        let mask = gpus.iter().fold(0, |mask, gpu| mask | 1 << gpu);
        let mut gains: Vec<(i64, usize)> = self.share_gains(on, wanted, mask).collect();
        gains.sort_by_key(|&(gain, gpu)| (std::cmp::Reverse(gain), gpu));
        *gpus = gains.into_iter().map(|(_, gpu)| gpu).collect();
    }

    fn set(&self, on: &Setting, wanted: &Wanted, mask: u64) -> Option<u64> {
        if wanted.want.part.whole {
            return order::leftover_set(on.room, mask, wanted.want.count);
        }
        let mut gpus: Vec<usize> = order::indexes(mask).collect();
        self.sort(on, wanted, &mut gpus);
        order::first(&gpus, wanted.want.count)
    }
}

impl Ranking for Fragmentation {
    fn name(&self) -> &'static str {
        "fragmentation"
    }

    fn epoch(&self) -> u64 {
        self.epoch
    }

    fn rank(&self, room: &NodeRoom, classes: &[GpuClass], prepared: &Prepared) -> Option<i64> {
        if solve::host_short(room, prepared).is_some() {
            return None;
        }
        let asker = asker(prepared);
        match prepared.wants.as_slice() {
            [] => {
                let before = Sketch::of(room, classes);
                let mut after = before;
                after.take_host(prepared);
                Some(self.gain(&before, &after, asker))
            }
            [one] if one.want.count == 1 && !one.want.part.whole => {
                let mask = order::fitting(room, classes, prepared, one);
                if mask == 0 {
                    return self.rank_placed(room, classes, prepared, asker);
                }
                let on = Setting { room, classes, prepared };
                self.share_gains(&on, one, mask).map(|(gain, _)| gain).max()
            }
            [one] if one.want.part.whole && !matches!(one.want.part.cores, CoresAsk::Slots(_)) => {
                let mask = order::fitting(room, classes, prepared, one);
                let set = order::leftover_set(room, mask, one.want.count)?;
                if one.want.count > 1 && prepared.ask.constraints.together == Together::Required {
                    return None;
                }
                let before = Sketch::of(room, classes);
                let mut after = before;
                after.take_host(prepared);
                for gpu in order::indexes(set) {
                    after.idle[gpu] = 0;
                }
                Some(self.gain(&before, &after, asker))
            }
            _ => self.rank_placed(room, classes, prepared, asker),
        }
    }
}

impl Fragmentation {
    /// The rank of a pod that has to be placed to know what it takes.
    fn rank_placed(
        &self,
        room: &NodeRoom,
        classes: &[GpuClass],
        prepared: &Prepared,
        asker: Asker,
    ) -> Option<i64> {
        if prepared.wants.len() > 1 && !rank::fits(room, classes, prepared) {
            return None;
        }
        let placement: Placement = self.place(room, classes, prepared)?;
        let before = Sketch::of(room, classes);
        let mut after = before;
        after.take_host(prepared);
        for (gpu, charge) in placement.charges(&prepared.ask.asks) {
            after.take_charge(gpu, &room.gpus[gpu], charge, classes);
        }
        Some(self.gain(&before, &after, asker))
    }
}
