//! A whole pod on one node: the shares of every container on GPUs, so that all of them fit together.
//!
//! Containers are placed in the order of the spec by a backtracking search; if that runs out of steps, the search is
//! repeated with the largest containers first. Init containers run before the ordinary ones and release what they used:
//! they are placed on the node without the pod plus the sidecars started before them, and the larger of the two counts.

use super::capacity::{GpuAllocation, GpuCapacity, GpuClass, NodeCapacity};
use super::fit::{PreparedAsk, PreparedWant, ShareNeed};
use super::gpu_order;
use super::placement::{PlacedShare, Placement};
use crate::model::{
    Bytes, Colocation, ContainerRole, CoresAsk, MAX_GPUS_PER_CONTAINER, MemoryAsk, MilliCpu, ShareAsk,
};

/// Maximum number of choices tried for a pod on one node, in the order of the spec: more than real pods need.
const MAX_STEPS: usize = 256;
/// Maximum number of choices tried with the largest containers first, which bounds the cost of a hostile pod.
const MAX_STEPS_LARGEST_FIRST: usize = 1024;
/// Maximum number of ways tried to choose the GPUs of one container that requests several.
const MAX_ALTERNATIVES: usize = 128;

/// Why a pod does not fit a node.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum NodeShortfall {
    /// Too little CPU is free.
    Cpu {
        /// CPU that the pod requests.
        asked: MilliCpu,
        /// Free CPU of the node.
        free: MilliCpu,
    },
    /// Too little host memory is free.
    Memory {
        /// Host memory that the pod requests.
        asked: Bytes,
        /// Free host memory of the node.
        free: Bytes,
    },
    /// The node has no GPU at all.
    NoGpu,
    /// Too few GPUs take a share of one container.
    Gpus {
        /// Index of the ask in the pod.
        ask: usize,
        /// Number of GPUs that take a share.
        fitting: u32,
    },
    /// Each container fits alone, but not all of them together.
    AllAtOnce,
    /// No single GPU takes all containers, as the pod requires.
    Colocation,
    /// The search ran out of steps: a placement may exist.
    GaveUp,
}

/// The input of a preference: the node with the containers placed so far, and the whole ask.
#[derive(Clone, Copy, Debug)]
pub struct PlacementContext<'a> {
    /// The node with the pod's earlier containers on it.
    pub capacity: &'a NodeCapacity,
    /// The classes of its GPUs.
    pub classes: &'a [GpuClass],
    /// The ask of the whole pod.
    pub prepared: &'a PreparedAsk,
}

/// The preference of a policy among GPUs, or sets of GPUs, that fit a container's shares.
pub trait GpuPreference {
    /// Orders single GPUs, best first.
    fn order_gpus(&self, on: &PlacementContext, wanted: &PreparedWant, gpus: &mut Vec<usize>);
    /// Returns the best set of `wanted.want.count` GPUs of a mask that has at least as many.
    fn choose_gpu_set(&self, on: &PlacementContext, wanted: &PreparedWant, mask: u64) -> Option<u64>;
}

/// Returns the pod's shortfall if the node's CPU or memory does not suffice.
pub fn host_shortfall(capacity: &NodeCapacity, prepared: &PreparedAsk) -> Option<NodeShortfall> {
    match (capacity.free_cpu(), capacity.free_memory()) {
        (Some(free), _) if prepared.ask.cpu > free => {
            Some(NodeShortfall::Cpu { asked: prepared.ask.cpu, free })
        }
        (_, Some(free)) if prepared.ask.memory > free => {
            Some(NodeShortfall::Memory { asked: prepared.ask.memory, free })
        }
        _ => None,
    }
}

/// Places a pod on a node, or returns `None` if it does not fit.
pub fn solve(
    capacity: &NodeCapacity,
    classes: &[GpuClass],
    prepared: &PreparedAsk,
    preference: &dyn GpuPreference,
) -> Option<Placement> {
    match search(capacity, classes, prepared, preference) {
        SearchResult::Placement(placement) => Some(placement),
        SearchResult::Nothing | SearchResult::OutOfSteps => None,
    }
}

/// Returns whether the search for a placement runs out of steps before everything was tried.
pub(crate) fn is_given_up(capacity: &NodeCapacity, classes: &[GpuClass], prepared: &PreparedAsk) -> bool {
    let preference = super::policies::StatelessPolicy(crate::model::PlacementPolicy::Binpack);
    matches!(search(capacity, classes, prepared, &preference), SearchResult::OutOfSteps)
}

fn search(
    capacity: &NodeCapacity,
    classes: &[GpuClass],
    prepared: &PreparedAsk,
    preference: &dyn GpuPreference,
) -> SearchResult {
    if host_shortfall(capacity, prepared).is_some() {
        return SearchResult::Nothing;
    }
    if prepared.wants.len() > 1 && cannot_fit(capacity, classes, prepared) {
        return SearchResult::Nothing;
    }
    let on = |allowed: u64| {
        let in_order = |largest_first| {
            PlacementSearch::new(capacity, classes, prepared, preference, allowed, largest_first).pod()
        };
        match in_order(false) {
            SearchResult::OutOfSteps => in_order(true),
            found => found,
        }
    };
    let anywhere = || on(u64::MAX);
    let on_one = || {
        let Some(first) = prepared.wants.first() else { return anywhere() };
        let mask = gpu_order::fitting(capacity, classes, prepared, first);
        let mut gpus: Vec<usize> = gpu_order::indexes(mask).collect();
        preference.order_gpus(&PlacementContext { capacity, classes, prepared }, first, &mut gpus);
        let found = gpus
            .into_iter()
            .map(|gpu| on(1 << gpu))
            .find(|found| matches!(found, SearchResult::Placement(_)));
        found.unwrap_or(SearchResult::Nothing)
    };
    match prepared.ask.constraints.colocation {
        Colocation::Anywhere => anywhere(),
        Colocation::Required => on_one(),
        Colocation::Preferred => match on_one() {
            SearchResult::Placement(placement) => SearchResult::Placement(placement),
            _ => anywhere(),
        },
    }
}

/// Returns whether a pod of several containers cannot fit for a reason that needs no search: a container that does not
/// fit alone, or more containers running together than the GPUs can take, by count or in sum.
fn cannot_fit(capacity: &NodeCapacity, classes: &[GpuClass], prepared: &PreparedAsk) -> bool {
    let alone = |wanted: &PreparedWant| {
        let slots = matches!(wanted.want.share.cores, CoresAsk::Slots(_));
        slots || gpu_order::fitting(capacity, classes, prepared, wanted).count_ones() >= wanted.want.count
    };
    if !prepared.wants.iter().all(alone) {
        return true;
    }
    let running = || prepared.wants.iter().filter(|wanted| wanted.role != ContainerRole::Init);
    if running().any(|wanted| matches!(wanted.want.share.cores, CoresAsk::Slots(_))) {
        return false;
    }
    let parts: u64 = running().map(|wanted| u64::from(wanted.want.count)).sum();
    let at_most = |gpu: &GpuCapacity| {
        let class = usize::from(gpu.class);
        let needs = || running().filter_map(|wanted| wanted.needs[class].map(|need| need.usage));
        let smallest =
            |amount: fn(&GpuAllocation) -> u64| needs().map(|usage| amount(&usage)).min().unwrap_or(0);
        let times = |free: u64, each: u64| free.checked_div(each).unwrap_or(parts);
        if gpu.withheld || gpu.used.whole > 0 {
            return 0;
        }
        let memory = times(gpu.free_memory(&classes[class]).0, smallest(|usage| usage.memory));
        let cores = times(gpu.free_cores().as_millipercent().into(), smallest(|usage| usage.cores));
        memory.min(cores).min(parts)
    };
    if capacity.gpus.iter().map(at_most).sum::<u64>() < parts {
        return true;
    }
    // Shares only: what a whole GPU uses depends on the GPU.
    let least = |wanted: &PreparedWant, amount: fn(&GpuAllocation) -> u64| {
        let needs = wanted.needs.iter().flatten().filter(|need| need.usage.whole == 0);
        needs.map(|need| amount(&need.usage)).min().unwrap_or(0).saturating_mul(wanted.want.count.into())
    };
    let asked =
        |amount: fn(&GpuAllocation) -> u64| running().map(|wanted| least(wanted, amount)).sum::<u64>();
    let offered = || capacity.gpus.iter().filter(|gpu| !gpu.withheld && gpu.used.whole == 0);
    let memory: u64 = offered().map(|gpu| gpu.free_memory(&classes[usize::from(gpu.class)]).0).sum();
    let cores: u64 = offered().map(|gpu| u64::from(gpu.free_cores().as_millipercent())).sum();
    asked(|usage| usage.memory) > memory || asked(|usage| usage.cores) > cores
}

/// The result of a search.
enum SearchResult {
    Placement(Placement),
    Nothing,
    OutOfSteps,
}

/// A backtracking search: first the containers that run together, then each init container.
struct PlacementSearch<'a> {
    /// The node without this pod.
    base: &'a NodeCapacity,
    /// The node with the containers placed so far that run together.
    capacity: NodeCapacity,
    /// The peak usage of this pod on each GPU.
    peak: Vec<GpuAllocation>,
    /// Indexes of the asks, in the order in which they are placed.
    order: Vec<usize>,
    shares: Vec<Vec<PlacedShare>>,
    classes: &'a [GpuClass],
    prepared: &'a PreparedAsk,
    preference: &'a dyn GpuPreference,
    /// The GPUs that the pod may use.
    allowed: u64,
    steps: usize,
    max_steps: usize,
}

impl<'a> PlacementSearch<'a> {
    fn new(
        base: &'a NodeCapacity,
        classes: &'a [GpuClass],
        prepared: &'a PreparedAsk,
        preference: &'a dyn GpuPreference,
        allowed: u64,
        largest_first: bool,
    ) -> PlacementSearch<'a> {
        let wants = &prepared.wants;
        let mut order: Vec<usize> = (0..wants.len()).collect();
        order.sort_by_key(|&at| {
            let largest =
                wants[at].needs.iter().flatten().map(|need| (need.usage.memory, need.usage.cores)).max();
            let size = (wants[at].want.share.whole, wants[at].want.count, largest);
            (wants[at].role == ContainerRole::Init, std::cmp::Reverse(largest_first.then_some(size)))
        });
        PlacementSearch {
            base,
            capacity: base.clone(),
            peak: vec![GpuAllocation::default(); base.gpus.len()],
            order,
            shares: vec![Vec::new(); wants.len()],
            classes,
            prepared,
            preference,
            allowed,
            steps: 0,
            max_steps: if largest_first { MAX_STEPS_LARGEST_FIRST } else { MAX_STEPS },
        }
    }

    fn pod(mut self) -> SearchResult {
        if self.place_from(0) {
            SearchResult::Placement(Placement { shares: self.shares })
        } else if self.steps > self.max_steps {
            SearchResult::OutOfSteps
        } else {
            SearchResult::Nothing
        }
    }

    /// Places every ask from `depth` on, and reverts choices that lead nowhere.
    fn place_from(&mut self, depth: usize) -> bool {
        let Some(&at) = self.order.get(depth) else { return true };
        let init = self.prepared.wants[at].role == ContainerRole::Init;
        let choices = if init { self.init_choices(at) } else { self.running_choices(at) };
        for parts in choices {
            self.steps += 1;
            if self.steps > self.max_steps {
                return false;
            }
            let before = (self.capacity.gpus.clone(), self.peak.clone());
            for placed in &parts {
                let peak = self.peak[placed.gpu];
                self.peak[placed.gpu] = if init {
                    peak.max(self.sidecars_before(at, placed.gpu).plus(placed.need.usage))
                } else {
                    let gpu = &mut self.capacity.gpus[placed.gpu];
                    gpu.used = gpu.used.plus(placed.need.usage);
                    peak.plus(placed.need.usage)
                };
            }
            self.shares[at] = parts;
            if self.place_from(depth + 1) {
                return true;
            }
            (self.capacity.gpus, self.peak) = before;
        }
        false
    }

    /// Returns the ways to place a container that runs together with those placed so far, best first.
    fn running_choices(&self, at: usize) -> Vec<Vec<PlacedShare>> {
        let wanted = &self.prepared.wants[at];
        let fitting = gpu_order::fitting(&self.capacity, self.classes, self.prepared, wanted) & self.allowed;
        if fitting.count_ones() < wanted.want.count {
            return self.split(&self.capacity, wanted, self.allowed).into_iter().collect();
        }
        if wanted.want.count > 1 {
            let best = self.preference.choose_gpu_set(&self.setting(&self.capacity), wanted, fitting);
            return self.sets(wanted, best, fitting, |gpu| self.capacity.gpus[gpu]);
        }
        let mut gpus: Vec<usize> = gpu_order::indexes(fitting).collect();
        self.preference.order_gpus(&self.setting(&self.capacity), wanted, &mut gpus);
        self.singles(wanted, gpus, |gpu| self.capacity.gpus[gpu])
    }

    /// Returns the ways to place an init container, first where the pod will use most anyway.
    fn init_choices(&self, at: usize) -> Vec<Vec<PlacedShare>> {
        let wanted = &self.prepared.wants[at];
        let mut phase = self.base.clone();
        for (gpu, state) in phase.gpus.iter_mut().enumerate() {
            state.used = state.used.plus(self.sidecars_before(at, gpu));
        }
        // One pod never has limited and unlimited shares on one GPU, not even at different times: the GPU would have
        // to be closed to both kinds of neighbors.
        let unlimited = wanted.want.share.memory == MemoryAsk::Unlimited && !wanted.want.share.whole;
        let limited = !unlimited && !wanted.want.share.whole;
        let mixes = |peak: &GpuAllocation| (unlimited && peak.limited > 0) || (limited && peak.unlimited > 0);
        let unmixed = (0..self.peak.len()).filter(|&gpu| !mixes(&self.peak[gpu]));
        let allowed = self.allowed & unmixed.fold(0, |mask, gpu| mask | 1 << gpu);
        let fitting = gpu_order::fitting(&phase, self.classes, self.prepared, wanted) & allowed;
        let count = wanted.want.count as usize;
        let mut gpus: Vec<usize> = gpu_order::indexes(fitting).collect();
        if gpus.len() < count {
            return self.split(&phase, wanted, allowed).into_iter().collect();
        }
        self.preference.order_gpus(&self.setting(&phase), wanted, &mut gpus);
        gpus.sort_by_key(|&gpu| {
            let (with, held) = (self.need(wanted, gpu).usage, self.peak[gpu]);
            (with.memory.saturating_sub(held.memory), with.cores.saturating_sub(held.cores))
        });
        if count > 1 {
            let best = gpus[..count].iter().fold(0, |set, gpu| set | 1 << gpu);
            return self.sets(wanted, Some(best), fitting, |gpu| (phase.gpus[gpu], self.peak[gpu]));
        }
        self.singles(wanted, gpus, |gpu| (phase.gpus[gpu], self.peak[gpu]))
    }

    /// Returns what the sidecars started before an init container use of a GPU.
    fn sidecars_before(&self, init: usize, gpu: usize) -> GpuAllocation {
        let sidecars = (0..init).filter(|&at| self.prepared.wants[at].role == ContainerRole::Sidecar);
        let placed = sidecars.flat_map(|at| &self.shares[at]).filter(|placed| placed.gpu == gpu);
        placed.fold(GpuAllocation::default(), |sum, placed| sum.plus(placed.need.usage))
    }

    /// Returns one choice per GPU, in the given order. Of GPUs in the same state only the first is tried.
    fn singles<S: PartialEq>(
        &self,
        wanted: &PreparedWant,
        gpus: Vec<usize>,
        state: impl Fn(usize) -> S,
    ) -> Vec<Vec<PlacedShare>> {
        let mut tried: Vec<S> = Vec::new();
        let fresh = gpus.into_iter().filter(|&gpu| {
            let new = !tried.contains(&state(gpu));
            tried.push(state(gpu));
            new
        });
        fresh.map(|gpu| self.slices_on(wanted, 1 << gpu)).collect()
    }

    /// Returns the best set first, then the others. Of GPUs in the same state only the number matters.
    fn sets<S: PartialEq>(
        &self,
        wanted: &PreparedWant,
        best: Option<u64>,
        fitting: u64,
        state: impl Fn(usize) -> S,
    ) -> Vec<Vec<PlacedShare>> {
        let mut alike: Vec<(S, u64)> = Vec::new();
        for gpu in gpu_order::indexes(fitting) {
            let state = state(gpu);
            match alike.iter_mut().find(|(known, _)| *known == state) {
                Some((_, members)) => *members |= 1 << gpu,
                None => alike.push((state, 1 << gpu)),
            }
        }
        let groups: Vec<u64> = alike.into_iter().map(|(_, members)| members).collect();
        let mut others = Vec::new();
        from_each(&groups, wanted.want.count, 0, &mut others);
        let others = others.into_iter().filter(|set| Some(*set) != best);
        best.into_iter().chain(others).map(|set| self.slices_on(wanted, set)).collect()
    }

    fn slices_on(&self, wanted: &PreparedWant, set: u64) -> Vec<PlacedShare> {
        gpu_order::indexes(set).map(|gpu| PlacedShare { gpu, need: self.need(wanted, gpu) }).collect()
    }

    /// Takes slots that no single GPU has free from as few GPUs as possible, at most [`MAX_GPUS_PER_CONTAINER`].
    fn split(
        &self,
        capacity: &NodeCapacity,
        wanted: &PreparedWant,
        allowed: u64,
    ) -> Option<Vec<PlacedShare>> {
        let CoresAsk::Slots(asked) = wanted.want.share.cores else { return None };
        let slots = |slots: u32| ShareAsk { cores: CoresAsk::Slots(slots), ..wanted.want.share };
        let class = |gpu: usize| &self.classes[usize::from(capacity.gpus[gpu].class)];
        let take = |gpu: usize, count: u32| {
            let need = ShareNeed::of(&slots(count), class(gpu));
            need.fits(&capacity.gpus[gpu], class(gpu)).then_some(need)
        };
        let one_slot =
            |(class, need): (&GpuClass, &Option<ShareNeed>)| need.map(|_| ShareNeed::of(&slots(1), class));
        let one = PreparedWant {
            needs: self.classes.iter().zip(&wanted.needs).map(one_slot).collect(),
            ..wanted.clone()
        };
        let fitting = gpu_order::fitting(capacity, self.classes, self.prepared, &one) & allowed;
        let most = |gpu: usize| (1..=class(gpu).slots).rev().find(|&n| take(gpu, n).is_some()).unwrap_or(0);
        let mut free: Vec<(usize, u32)> = gpu_order::indexes(fitting).map(|gpu| (gpu, most(gpu))).collect();
        free.sort_by_key(|&(gpu, slots)| (std::cmp::Reverse(slots), gpu));
        let mut left = asked;
        let mut placed = Vec::new();
        for (gpu, slots) in free.into_iter().take(MAX_GPUS_PER_CONTAINER as usize) {
            let taken = slots.min(left);
            if taken == 0 {
                break;
            }
            placed.push(PlacedShare { gpu, need: take(gpu, taken)? });
            left -= taken;
        }
        placed.sort_by_key(|placed| placed.gpu);
        (left == 0).then_some(placed)
    }

    fn setting<'b>(&'b self, capacity: &'b NodeCapacity) -> PlacementContext<'b> {
        PlacementContext { capacity, classes: self.classes, prepared: self.prepared }
    }

    fn need(&self, wanted: &PreparedWant, gpu: usize) -> ShareNeed {
        let class = usize::from(self.base.gpus[gpu].class);
        // Only GPUs of admitted classes are chosen; for the others the need is resolved again.
        wanted.needs[class].unwrap_or_else(|| ShareNeed::of(&wanted.want.share, &self.classes[class]))
    }
}

/// Collects the ways to take `count` GPUs by how many come from each group, the lowest of each, up to a bound.
fn from_each(groups: &[u64], count: u32, taken: u64, found: &mut Vec<u64>) {
    if count == 0 {
        found.push(taken);
        return;
    }
    let Some((group, rest)) = groups.split_first() else { return };
    let left: u32 = rest.iter().map(|group| group.count_ones()).sum();
    for number in (count.saturating_sub(left)..=group.count_ones().min(count)).rev() {
        if found.len() >= MAX_ALTERNATIVES {
            return;
        }
        let lowest = gpu_order::lowest(*group, number).unwrap_or(0);
        from_each(rest, count - number, taken | lowest, found);
    }
}
