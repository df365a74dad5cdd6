//! A whole pod on one node: every container's parts on GPUs, so that all of them hold at once.
//!
//! Containers are placed in the order of the spec. A choice that leaves no room for a later container is taken
//! back and the next one tried, so that a pod that fits is found to fit. Init containers run before the
//! ordinary ones and give back what they held: they are placed against the empty node plus the sidecars
//! started before them, and the pod is charged the larger of the two.

use super::fit::{Need, Prepared, Wanted};
use super::order;
use super::room::{Charge, GpuClass, GpuRoom, NodeRoom};
use crate::model::{Ask, Bytes, CoresAsk, Grant, MemoryAsk, MilliCpu, Part, PodGrant, Role, Share, Together};

/// Choices tried before a pod of many containers is given up on: far beyond what real pods need, and a bound
/// on what a hostile one can cost.
const MOST_STEPS: usize = 20_000;
/// Alternative sets tried for one container that wants several GPUs.
const MOST_ALTERNATIVES: usize = 512;

/// A part on a GPU.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Slice {
    /// The GPU's index.
    pub gpu: usize,
    /// What it takes there.
    pub need: Need,
}

/// A pod on a node: for each ask, in order, its parts.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Placement {
    /// The parts of each ask.
    pub slices: Vec<Vec<Slice>>,
}

impl Placement {
    /// What the pod takes of each GPU it touches, at the time it takes most.
    pub fn charges(&self, asks: &[Ask]) -> Vec<(usize, Charge)> {
        let roles: Vec<Role> = asks.iter().map(|ask| ask.role).collect();
        let slices = |at: usize| self.slices[at].iter().map(|slice| (slice.gpu, slice.need.charge));
        peak_charges(&roles, slices)
    }

    /// The grant that says so.
    pub fn grant(&self, asks: &[Ask], room: &NodeRoom) -> PodGrant {
        let share = |slice: &Slice| Share {
            gpu: room.node.gpus[slice.gpu].uuid.clone(),
            memory_bytes: slice.need.limit,
            cores: slice.need.cores,
            ceiling: slice.need.ceiling,
            whole: slice.need.charge.whole > 0,
        };
        let grants = asks.iter().zip(&self.slices).map(|(ask, slices)| Grant {
            container: ask.container.clone(),
            init: ask.role == Role::Init,
            shares: slices.iter().map(share).collect(),
        });
        PodGrant { node: room.node.name.clone(), grants: grants.collect() }
    }
}

/// What a pod takes of each GPU at the time it takes most, given each container's role and what it takes.
///
/// As Kubernetes counts: all sidecars and ordinary containers at once, or any one init container with the
/// sidecars declared before it.
pub(crate) fn peak_charges<I: Iterator<Item = (usize, Charge)>>(
    roles: &[Role],
    taken: impl Fn(usize) -> I,
) -> Vec<(usize, Charge)> {
    let sum = |members: &mut dyn Iterator<Item = usize>| {
        let mut charges: Vec<(usize, Charge)> = Vec::new();
        for (gpu, charge) in members.flat_map(&taken) {
            match charges.iter_mut().find(|(at, _)| *at == gpu) {
                Some((_, sum)) => *sum = sum.plus(charge),
                None => charges.push((gpu, charge)),
            }
        }
        charges
    };
    let all = 0..roles.len();
    let mut peak = sum(&mut all.clone().filter(|&at| roles[at] != Role::Init));
    for init in all.filter(|&at| roles[at] == Role::Init) {
        let mut phase = (0..=init).filter(|&at| at == init || roles[at] == Role::Sidecar);
        for (gpu, charge) in sum(&mut phase) {
            match peak.iter_mut().find(|(at, _)| *at == gpu) {
                Some((_, most)) => *most = most.max(charge),
                None => peak.push((gpu, charge)),
            }
        }
    }
    peak.sort_unstable_by_key(|(gpu, _)| *gpu);
    peak
}

/// Why a node has no room for a pod.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum NodeShort {
    /// Too little CPU left.
    Cpu {
        /// Asked.
        asked: MilliCpu,
        /// Left.
        free: MilliCpu,
    },
    /// Too little host memory left.
    Memory {
        /// Asked.
        asked: Bytes,
        /// Left.
        free: Bytes,
    },
    /// It has no GPU at all.
    NoGpu,
    /// One container finds too few GPUs that take its part.
    Gpus {
        /// Which ask, by its place in the pod.
        ask: usize,
        /// GPUs that would take a part.
        fitting: u32,
    },
    /// Each container fits alone, not all of them at once.
    AllAtOnce,
    /// No single GPU takes all containers, as the pod demands.
    Together,
}

/// What a policy prefers among the GPUs (or sets of GPUs) that would take a container's parts.
pub trait Preference {
    /// Orders single GPUs, best first, given the room as it is with this pod's earlier containers in it.
    fn sort(&self, room: &NodeRoom, classes: &[GpuClass], wanted: &Wanted, gpus: &mut Vec<usize>);
    /// The best set of `wanted.want.count` GPUs out of a mask that has at least as many.
    fn set(&self, room: &NodeRoom, classes: &[GpuClass], wanted: &Wanted, mask: u64) -> Option<u64>;
}

/// Whether the node's CPU and memory suffice.
pub fn host_short(room: &NodeRoom, prepared: &Prepared) -> Option<NodeShort> {
    match (room.free_cpu(), room.free_memory()) {
        (Some(free), _) if prepared.ask.cpu > free => Some(NodeShort::Cpu { asked: prepared.ask.cpu, free }),
        (_, Some(free)) if prepared.ask.memory > free => {
            Some(NodeShort::Memory { asked: prepared.ask.memory, free })
        }
        _ => None,
    }
}

/// Places a pod on a node, or finds that it does not fit.
pub fn solve(
    room: &NodeRoom,
    classes: &[GpuClass],
    prepared: &Prepared,
    preference: &dyn Preference,
) -> Option<Placement> {
    if host_short(room, prepared).is_some() {
        return None;
    }
    let mut search = Search { room: room.clone(), classes, prepared, preference, steps: 0 };
    let everywhere = u64::MAX;
    match prepared.ask.constraints.together {
        Together::Anywhere => search.pod(everywhere),
        Together::Required => search.pod_on_one(),
        Together::Preferred => search.pod_on_one().or_else(|| {
            search.steps = 0;
            search.pod(everywhere)
        }),
    }
}

struct Search<'a> {
    /// The node with what has been placed so far.
    room: NodeRoom,
    classes: &'a [GpuClass],
    prepared: &'a Prepared,
    preference: &'a dyn Preference,
    steps: usize,
}

impl Search<'_> {
    /// All containers on one GPU, the preferred one that takes them.
    fn pod_on_one(&mut self) -> Option<Placement> {
        let Some(first) = self.prepared.wants.iter().find(|wanted| wanted.role != Role::Init) else {
            return self.pod(u64::MAX);
        };
        let mask = order::fitting(&self.room, self.classes, self.prepared, first);
        let mut gpus: Vec<usize> = order::indexes(mask).collect();
        self.preference.sort(&self.room, self.classes, first, &mut gpus);
        gpus.into_iter().find_map(|gpu| self.pod(1 << gpu))
    }

    /// All containers on GPUs of `allowed`.
    fn pod(&mut self, allowed: u64) -> Option<Placement> {
        let wants = &self.prepared.wants;
        let running: Vec<usize> = (0..wants.len()).filter(|&at| wants[at].role != Role::Init).collect();
        let before = self.room.gpus.clone();
        let mut slices = vec![Vec::new(); wants.len()];
        let placed = self.running_set(&running, allowed, &mut slices);
        let peak = std::mem::replace(&mut self.room.gpus, before.clone());
        if !placed {
            return None;
        }
        for (at, wanted) in wants.iter().enumerate() {
            match wanted.role {
                Role::App => {}
                // A sidecar started by now stays for every later phase.
                Role::Sidecar => {
                    for slice in &slices[at] {
                        take(&mut self.room.gpus, slice);
                    }
                }
                Role::Init => {
                    let placed = self.init(wanted, allowed, &peak);
                    match placed {
                        Some(parts) => slices[at] = parts,
                        None => {
                            self.room.gpus = before;
                            return None;
                        }
                    }
                }
            }
        }
        self.room.gpus = before;
        Some(Placement { slices })
    }

    /// Sidecars and ordinary containers, with second thoughts. On success `self.room` holds all of them.
    fn running_set(&mut self, left: &[usize], allowed: u64, slices: &mut [Vec<Slice>]) -> bool {
        let Some((&at, rest)) = left.split_first() else { return true };
        for parts in self.choices(&self.prepared.wants[at], allowed) {
            self.steps += 1;
            if self.steps > MOST_STEPS {
                return false;
            }
            let before = self.room.gpus.clone();
            for slice in &parts {
                take(&mut self.room.gpus, slice);
            }
            slices[at] = parts;
            if self.running_set(rest, allowed, slices) {
                return true;
            }
            self.room.gpus = before;
        }
        false
    }

    /// An init container, on the GPUs where the pod will hold most anyway.
    fn init(&self, wanted: &Wanted, allowed: u64, peak: &[GpuRoom]) -> Option<Vec<Slice>> {
        let fitting = order::fitting(&self.room, self.classes, self.prepared, wanted) & allowed;
        let count = wanted.want.count as usize;
        // One pod never holds limited and unlimited memory on one GPU, not even at different times: the GPU
        // would have to be closed to both kinds of neighbours.
        let unlimited = matches!(wanted.want.part.memory, MemoryAsk::Unlimited);
        let mixes = |gpu: &usize| {
            let (held, now) = (&peak[*gpu].used, &self.room.gpus[*gpu].used);
            if unlimited { held.limited > now.limited } else { held.unlimited > now.unlimited }
        };
        let mut gpus: Vec<usize> = order::indexes(fitting).filter(|gpu| !mixes(gpu)).collect();
        if gpus.len() < count {
            return self.split(wanted, allowed);
        }
        self.preference.sort(&self.room, self.classes, wanted, &mut gpus);
        gpus.sort_by_key(|&gpu| {
            let with = self.room.gpus[gpu].used.plus(self.need(wanted, gpu).charge);
            let held = peak[gpu].used;
            // What the init container adds on top of what the pod will hold there later.
            (with.memory.saturating_sub(held.memory), with.cores.saturating_sub(held.cores))
        });
        gpus.truncate(count);
        gpus.sort_unstable();
        Some(gpus.into_iter().map(|gpu| Slice { gpu, need: self.need(wanted, gpu) }).collect())
    }

    /// Ways to place one container now, best first.
    fn choices(&self, wanted: &Wanted, allowed: u64) -> Vec<Vec<Slice>> {
        let fitting = order::fitting(&self.room, self.classes, self.prepared, wanted) & allowed;
        let slices =
            |set: u64| order::indexes(set).map(|gpu| Slice { gpu, need: self.need(wanted, gpu) }).collect();
        if fitting.count_ones() < wanted.want.count {
            return self.split(wanted, allowed).into_iter().collect();
        }
        if wanted.want.count != 1 {
            let best = self.preference.set(&self.room, self.classes, wanted, fitting);
            let others = order::subsets(fitting, wanted.want.count).take(MOST_ALTERNATIVES);
            return best.into_iter().chain(others.filter(|set| Some(*set) != best)).map(slices).collect();
        }
        let mut gpus: Vec<usize> = order::indexes(fitting).collect();
        self.preference.sort(&self.room, self.classes, wanted, &mut gpus);
        // Of GPUs in the same state, trying one is trying all.
        let mut tried: Vec<GpuRoom> = Vec::new();
        gpus.retain(|&gpu| {
            let new = !tried.contains(&self.room.gpus[gpu]);
            tried.push(self.room.gpus[gpu]);
            new
        });
        gpus.into_iter().map(|gpu| slices(1 << gpu)).collect()
    }

    /// Slots that no single GPU has left, from as few GPUs as possible.
    fn split(&self, wanted: &Wanted, allowed: u64) -> Option<Vec<Slice>> {
        let CoresAsk::Slots(asked) = wanted.want.part.cores else { return None };
        let slots_on = |gpu: usize, slots: u32| {
            let class = &self.classes[usize::from(self.room.gpus[gpu].class)];
            let part = Part { cores: CoresAsk::Slots(slots), ..wanted.want.part };
            let need = Need::of(&part, class);
            need.fits(&self.room.gpus[gpu], class).then_some(need)
        };
        let one = Wanted {
            needs: self
                .classes
                .iter()
                .zip(&wanted.needs)
                .map(|(class, need)| {
                    need.map(|_| Need::of(&Part { cores: CoresAsk::Slots(1), ..wanted.want.part }, class))
                })
                .collect(),
            ..wanted.clone()
        };
        let fitting = order::fitting(&self.room, self.classes, self.prepared, &one) & allowed;
        let mut free: Vec<(usize, u32)> = order::indexes(fitting)
            .map(|gpu| {
                let slots = self.classes[usize::from(self.room.gpus[gpu].class)].slots;
                (gpu, (1..=slots).rev().find(|&n| slots_on(gpu, n).is_some()).unwrap_or(0))
            })
            .collect();
        free.sort_by_key(|&(gpu, slots)| (std::cmp::Reverse(slots), gpu));
        let mut left = asked;
        let mut slices = Vec::new();
        for (gpu, slots) in free {
            let taken = slots.min(left);
            if taken == 0 {
                break;
            }
            slices.push(Slice { gpu, need: slots_on(gpu, taken)? });
            left -= taken;
        }
        slices.sort_by_key(|slice| slice.gpu);
        (left == 0).then_some(slices)
    }

    fn need(&self, wanted: &Wanted, gpu: usize) -> Need {
        let class = usize::from(self.room.gpus[gpu].class);
        // Only GPUs of admitted classes are ever chosen; the part itself says what it needs on any.
        wanted.needs[class].unwrap_or_else(|| Need::of(&wanted.want.part, &self.classes[class]))
    }
}

fn take(gpus: &mut [GpuRoom], slice: &Slice) {
    gpus[slice.gpu].used = gpus[slice.gpu].used.plus(slice.need.charge);
}
