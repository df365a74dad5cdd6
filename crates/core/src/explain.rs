//! Why a pod does not fit: per node, per GPU, summed up for people, with what would make it fit.
//!
//! Every reason is found by the same tests that decide, and every suggestion has been tried: a pod changed as
//! suggested fits the node named.

mod suggest;
mod words;

pub use suggest::{Change, Suggestion};

use crate::model::{Bytes, Cores, MilliCpu, NodeName, PodAsk, Together};
use crate::place::fit::{Need, Prepared, Short, Wanted};
use crate::place::order;
use crate::place::room::{GpuClass, NodeRoom};
use crate::place::solve::{self, NodeShort};
use crate::place::{Cluster, NodeIndex, rank};
use std::collections::BTreeMap;

/// What is known about a pod and a cluster.
#[derive(Clone, Debug)]
pub struct Explanation {
    /// Nodes looked at.
    pub nodes: usize,
    /// Nodes the pod fits.
    pub fitting: Vec<NodeName>,
    /// Why it does not fit the others, the commonest reason first.
    pub reasons: Vec<Reason>,
    /// What would make it fit, where it fits nowhere.
    pub suggestions: Vec<Suggestion>,
    /// Each node that does not fit, in order.
    pub per_node: Vec<NodeReport>,
}

/// One reason and the nodes it keeps the pod from.
#[derive(Clone, Debug)]
pub struct Reason {
    /// Which.
    pub cause: Cause,
    /// How many nodes.
    pub nodes: usize,
    /// The node that comes closest, and how close.
    pub closest: Option<Closest>,
    /// In words.
    pub text: String,
}

/// The node that comes closest to fitting.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Closest {
    /// The node.
    pub node: NodeName,
    /// The GPU there, where one is meant.
    pub gpu: Option<usize>,
    /// What it has.
    pub has: Has,
}

/// An amount that was not enough.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Has {
    /// Memory.
    Memory(Bytes),
    /// Compute.
    Cores(Cores),
    /// CPU.
    Cpu(MilliCpu),
    /// GPUs that would take a part.
    Gpus(u32),
}

/// Why a node does not fit, in one word. The order is from far away to nearly there.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Cause {
    /// It has no GPU.
    NoGpu,
    /// Its GPUs are excluded by model.
    Model,
    /// Its GPUs are excluded by UUID.
    Uuid,
    /// Its GPUs are not offered.
    Withheld,
    /// Its cards are too small.
    Card,
    /// Its GPUs are split in fewer slots than asked.
    Slots,
    /// Its GPUs take no more shares.
    Shares,
    /// Shares with and without memory limit exclude each other.
    Limits,
    /// Its GPUs are held whole.
    HeldWhole,
    /// None of its GPUs is empty.
    NotEmpty,
    /// Too little GPU memory.
    Memory,
    /// Too little compute.
    Cores,
    /// Too little CPU.
    Cpu,
    /// Too little host memory.
    HostMemory,
    /// Some GPUs fit, too few.
    TooFew,
    /// The containers fit alone, not together on one GPU.
    Together,
    /// The containers fit alone, not all at once.
    AllAtOnce,
}

impl Cause {
    /// Its name for programs.
    pub fn name(self) -> &'static str {
        match self {
            Cause::NoGpu => "noGpu",
            Cause::Model => "model",
            Cause::Uuid => "uuid",
            Cause::Withheld => "withheld",
            Cause::Card => "card",
            Cause::Slots => "slots",
            Cause::Shares => "shares",
            Cause::Limits => "limits",
            Cause::HeldWhole => "heldWhole",
            Cause::NotEmpty => "notEmpty",
            Cause::Memory => "memory",
            Cause::Cores => "cores",
            Cause::Cpu => "cpu",
            Cause::HostMemory => "hostMemory",
            Cause::TooFew => "tooFew",
            Cause::Together => "together",
            Cause::AllAtOnce => "allAtOnce",
        }
    }
}

impl Explanation {
    /// Everything in one sentence: "1,213 nodes: 812 have no GPU with 8 GiB free, …; 401 …".
    pub fn summary(&self) -> String {
        words::summary(self)
    }
}

/// Why one node does not fit.
#[derive(Clone, Debug)]
pub struct NodeReport {
    /// The node.
    pub node: NodeName,
    /// Why.
    pub cause: Cause,
    /// What each GPU is short of for the container that finds no place; `None` where it would fit.
    pub gpus: Vec<Option<Short>>,
    /// In words.
    pub text: String,
}

/// Explains a pod on a cluster.
pub fn explain(cluster: &Cluster, ask: &PodAsk) -> Explanation {
    let prepared = cluster.prepare(ask);
    let mut explanation = Explanation {
        nodes: cluster.rooms().len(),
        fitting: Vec::new(),
        reasons: Vec::new(),
        suggestions: Vec::new(),
        per_node: Vec::new(),
    };
    let mut reasons: BTreeMap<Cause, (usize, Option<Closest>)> = BTreeMap::new();
    for room in cluster.rooms() {
        let Some(short) = why_not(room, cluster.classes(), &prepared) else {
            explanation.fitting.push(room.node.name.clone());
            continue;
        };
        let gpus = gpu_shorts(room, cluster.classes(), &prepared, &short);
        let (cause, gpu, has) = cause(&short, &gpus);
        let (nodes, closest) = reasons.entry(cause).or_default();
        *nodes += 1;
        if let Some(has) = has
            && closest.as_ref().is_none_or(|closest| closest.has < has)
        {
            *closest = Some(Closest { node: room.node.name.clone(), gpu, has });
        }
        let text = words::node(&short, cause, &gpus, &prepared, &room.node);
        explanation.per_node.push(NodeReport { node: room.node.name.clone(), cause, gpus, text });
    }
    explanation.reasons = reasons
        .into_iter()
        .map(|(cause, (nodes, closest))| {
            let text = words::reason(cause, nodes, closest.as_ref(), &prepared);
            Reason { cause, nodes, closest, text }
        })
        .collect();
    explanation.reasons.sort_by_key(|reason| (std::cmp::Reverse(reason.nodes), reason.cause));
    if explanation.fitting.is_empty() {
        explanation.suggestions = suggest::suggestions(cluster, ask);
    }
    explanation
}

/// Why a pod does not fit a node; `None` exactly where it fits.
pub fn why_not(room: &NodeRoom, classes: &[GpuClass], prepared: &Prepared) -> Option<NodeShort> {
    if rank::fits(room, classes, prepared) {
        return None;
    }
    if let Some(short) = solve::host_short(room, prepared) {
        return Some(short);
    }
    if room.gpus.is_empty() {
        return Some(NodeShort::NoGpu);
    }
    for (ask, wanted) in prepared.wants.iter().enumerate() {
        if !fits_alone(room, classes, prepared, wanted) {
            let fitting = order::fitting(room, classes, prepared, wanted).count_ones();
            return Some(NodeShort::Gpus { ask, fitting });
        }
    }
    Some(match prepared.ask.constraints.together {
        Together::Required => NodeShort::Together,
        _ => NodeShort::AllAtOnce,
    })
}

/// Whether a container would fit if it were the only one.
fn fits_alone(room: &NodeRoom, classes: &[GpuClass], prepared: &Prepared, wanted: &Wanted) -> bool {
    let mut ask = prepared.ask.clone();
    ask.constraints.together = Together::Anywhere;
    rank::fits(room, classes, &Prepared { ask, wants: vec![wanted.clone()] })
}

/// What each GPU is short of for the container that found no place.
fn gpu_shorts(
    room: &NodeRoom,
    classes: &[GpuClass],
    prepared: &Prepared,
    short: &NodeShort,
) -> Vec<Option<Short>> {
    let NodeShort::Gpus { ask, .. } = short else { return Vec::new() };
    let wanted = &prepared.wants[*ask];
    let uuids = &prepared.ask.constraints.uuids;
    let per_gpu = room.gpus.iter().zip(&room.node.gpus).map(|(state, gpu)| {
        let class = usize::from(state.class);
        if !uuids.admits_uuid(gpu.uuid.as_str()) {
            return Some(Short::Uuid);
        }
        let Some(need) = wanted.needs[class] else { return Some(Short::Model) };
        need.short_on(state, &classes[class])
    });
    per_gpu.collect()
}

/// The reason that is nearest to fitting, the GPU it is about, and what that one has.
fn cause(short: &NodeShort, gpus: &[Option<Short>]) -> (Cause, Option<usize>, Option<Has>) {
    match short {
        NodeShort::Cpu { free, .. } => (Cause::Cpu, None, Some(Has::Cpu(*free))),
        NodeShort::Memory { free, .. } => (Cause::HostMemory, None, Some(Has::Memory(*free))),
        NodeShort::NoGpu => (Cause::NoGpu, None, None),
        NodeShort::AllAtOnce => (Cause::AllAtOnce, None, None),
        NodeShort::Together => (Cause::Together, None, None),
        NodeShort::Gpus { fitting, .. } if *fitting > 0 => (Cause::TooFew, None, Some(Has::Gpus(*fitting))),
        NodeShort::Gpus { .. } => {
            let near = gpus.iter().enumerate().filter_map(|(gpu, short)| {
                let (cause, has) = gpu_cause(short.as_ref()?);
                Some((cause, has, std::cmp::Reverse(gpu)))
            });
            match near.max() {
                Some((cause, has, std::cmp::Reverse(gpu))) => (cause, Some(gpu), has),
                None => (Cause::NoGpu, None, None),
            }
        }
    }
}

fn gpu_cause(short: &Short) -> (Cause, Option<Has>) {
    match *short {
        Short::Withheld => (Cause::Withheld, None),
        Short::Model => (Cause::Model, None),
        Short::Uuid => (Cause::Uuid, None),
        Short::Card { card, .. } => (Cause::Card, Some(Has::Memory(card))),
        Short::Slots { .. } => (Cause::Slots, None),
        Short::HeldWhole => (Cause::HeldWhole, None),
        Short::Shares { .. } => (Cause::Shares, None),
        Short::NotEmpty { .. } => (Cause::NotEmpty, None),
        Short::BesideUnlimited | Short::BesideLimited => (Cause::Limits, None),
        Short::Memory { free, .. } => (Cause::Memory, Some(Has::Memory(free))),
        Short::Cores { free, .. } => (Cause::Cores, Some(Has::Cores(free))),
        Short::CoresAllPromised => (Cause::Cores, Some(Has::Cores(Cores::NONE))),
    }
}

/// The first node, in order, that a pod fits.
fn first_fitting(cluster: &Cluster, ask: &PodAsk) -> Option<NodeIndex> {
    let prepared = cluster.prepare(ask);
    (0..cluster.rooms().len()).map(NodeIndex).find(|&node| cluster.fits(node, &prepared))
}

/// What the first ask that wants anything comes to on the largest card there is.
fn largest_need(prepared: &Prepared) -> Option<Need> {
    let needs = prepared.wants.iter().flat_map(|wanted| wanted.needs.iter().flatten());
    needs.max_by_key(|need| (need.limit, need.cores)).copied()
}
