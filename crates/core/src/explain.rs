//! Why a pod does not fit: per node, per GPU, summed up for people, with what would make it fit.
//!
//! Every reason is found by the same tests that decide, and every suggestion has been tried: a pod changed as
//! suggested fits the node named.

mod suggest;
mod words;

pub use suggest::{Change, Suggestion};

use crate::model::{Bytes, Cores, CoresAsk, MilliCpu, NodeName, PodAsk, Together};
use crate::place::fit::{Need, Prepared, Short, Wanted};
use crate::place::order;
use crate::place::room::{GpuClass, NodeRoom, State};
use crate::place::solve::{self, NodeShort};
use crate::place::{Cluster, NodeIndex, rank};
use std::collections::{BTreeMap, HashMap, HashSet};

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

impl Has {
    /// As a number: bytes, percent of a GPU's cores (rounded down), thousandths of a CPU, or a count.
    pub fn amount(self) -> u64 {
        match self {
            Has::Memory(bytes) => bytes.0,
            Has::Cores(cores) => u64::from(cores.as_millipercent() / 1000),
            Has::Cpu(cpu) => cpu.0,
            Has::Gpus(count) | Has::Slots(count) => u64::from(count),
        }
    }
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
    /// Slots.
    Slots(u32),
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
    /// Its GPUs have too few slots left.
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
    /// The containers fit alone; whether all at once was not found out.
    GaveUp,
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
            Cause::GaveUp => "gaveUp",
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
        nodes: cluster.nodes().count(),
        fitting: Vec::new(),
        reasons: Vec::new(),
        suggestions: Vec::new(),
        per_node: Vec::new(),
    };
    // By cause and, where one container is the trouble, by container: the words are about what it asks.
    let mut reasons: BTreeMap<(Cause, usize), (usize, Option<Closest>)> = BTreeMap::new();
    // Nodes of one state are looked at once, unless the pod tells GPUs apart by UUID.
    let alike = ask.constraints.uuids.is_open();
    let mut known: HashMap<State, Option<Looked>> = HashMap::new();
    for (_, room) in cluster.nodes() {
        let look = || Looked::at(room, cluster.classes(), &prepared);
        let looked = if alike { known.entry(room.state()).or_insert_with(look).clone() } else { look() };
        let Some(looked) = looked else {
            explanation.fitting.push(room.node.name.clone());
            continue;
        };
        let (nodes, closest) = reasons.entry((looked.cause, looked.ask)).or_default();
        *nodes += 1;
        if let Some(has) = looked.has
            && closest.as_ref().is_none_or(|closest| closest.has < has)
        {
            *closest = Some(Closest { node: room.node.name.clone(), gpu: looked.gpu, has });
        }
        let text = words::node(&looked.short, looked.cause, &looked.gpus, &prepared, room, cluster.classes());
        explanation.per_node.push(NodeReport {
            node: room.node.name.clone(),
            cause: looked.cause,
            gpus: looked.gpus,
            text,
        });
    }
    explanation.reasons = reasons
        .into_iter()
        .map(|((cause, ask), (nodes, closest))| {
            let text = words::reason(cause, nodes, closest.as_ref(), &prepared, ask);
            Reason { cause, nodes, closest, text }
        })
        .collect();
    explanation.reasons.sort_by_key(|reason| (std::cmp::Reverse(reason.nodes), reason.cause));
    if explanation.fitting.is_empty() {
        explanation.suggestions = suggest::suggestions(cluster, ask);
    }
    explanation
}

/// What a look at one node shows.
#[derive(Clone)]
struct Looked {
    short: NodeShort,
    gpus: Vec<Option<Short>>,
    cause: Cause,
    /// The container that is the trouble, where one is.
    ask: usize,
    gpu: Option<usize>,
    has: Option<Has>,
}

impl Looked {
    /// `None` where the pod fits.
    fn at(room: &NodeRoom, classes: &[GpuClass], prepared: &Prepared) -> Option<Looked> {
        let short = why_not(room, classes, prepared)?;
        let gpus = gpu_shorts(room, classes, prepared, &short);
        let (cause, gpu, has) = cause(room, classes, prepared, &short, &gpus);
        let ask = if let NodeShort::Gpus { ask, .. } = short { ask } else { 0 };
        Some(Looked { short, gpus, cause, ask, gpu, has })
    }
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
        _ if solve::is_given_up(room, classes, prepared) => NodeShort::GaveUp,
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
fn cause(
    room: &NodeRoom,
    classes: &[GpuClass],
    prepared: &Prepared,
    short: &NodeShort,
    gpus: &[Option<Short>],
) -> (Cause, Option<usize>, Option<Has>) {
    match short {
        NodeShort::Cpu { free, .. } => (Cause::Cpu, None, Some(Has::Cpu(*free))),
        NodeShort::Memory { free, .. } => (Cause::HostMemory, None, Some(Has::Memory(*free))),
        NodeShort::NoGpu => (Cause::NoGpu, None, None),
        NodeShort::AllAtOnce => (Cause::AllAtOnce, None, None),
        NodeShort::GaveUp => (Cause::GaveUp, None, None),
        NodeShort::Together => (Cause::Together, None, None),
        NodeShort::Gpus { fitting, .. } if *fitting > 0 => (Cause::TooFew, None, Some(Has::Gpus(*fitting))),
        NodeShort::Gpus { ask, .. } => {
            let near = gpus.iter().enumerate().filter_map(|(gpu, short)| {
                let (cause, has) = gpu_cause(short.as_ref()?);
                Some((cause, has, std::cmp::Reverse(gpu)))
            });
            match near.max() {
                // Slots may come from several GPUs: what counts is how many there are in all.
                Some((Cause::Cores | Cause::Slots, ..)) if asked_slots(&prepared.wants[*ask]).is_some() => {
                    let free = free_slots(room, classes, prepared, &prepared.wants[*ask]);
                    (Cause::Slots, None, Some(Has::Slots(free)))
                }
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
        Short::CoresAllPromised | Short::CoresForOthers { .. } => {
            (Cause::Cores, Some(Has::Cores(Cores::NONE)))
        }
    }
}

/// States of nodes a change is tried on: a pod of many containers is costly to try.
const MOST_TRIED: usize = 512;

/// The first node, in order, that a pod fits.
fn first_fitting(cluster: &Cluster, ask: &PodAsk) -> Option<NodeIndex> {
    let prepared = cluster.prepare(ask);
    let costly = prepared.wants.len() > 1 && ask.constraints.uuids.is_open();
    let mut tried: HashSet<State> = HashSet::new();
    for (node, room) in cluster.nodes() {
        let known = costly && (tried.len() >= MOST_TRIED || !tried.insert(room.state()));
        if !known && cluster.fits(node, &prepared) {
            return Some(node);
        }
    }
    None
}

fn asked_slots(wanted: &Wanted) -> Option<u32> {
    match wanted.want.part.cores {
        CoresAsk::Slots(slots) => Some(slots),
        _ => None,
    }
}

/// Slots that a container could have on a node.
fn free_slots(room: &NodeRoom, classes: &[GpuClass], prepared: &Prepared, wanted: &Wanted) -> u32 {
    let fits = |slots: u32| {
        let mut ask = prepared.ask.clone();
        ask.constraints.together = Together::Anywhere;
        let mut wanted = wanted.clone();
        wanted.want.part.cores = CoresAsk::Slots(slots);
        wanted.needs = classes
            .iter()
            .zip(&wanted.needs)
            .map(|(class, need)| need.map(|_| Need::of(&wanted.want.part, class)))
            .collect();
        rank::fits(room, classes, &Prepared { ask, wants: vec![wanted] })
    };
    let asked = asked_slots(wanted).unwrap_or(0);
    (1..asked).rev().find(|&slots| fits(slots)).unwrap_or(0)
}
