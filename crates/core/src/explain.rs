//! Why a pod does not fit: per node, per GPU and in summary, with changes that would make it fit.
//!
//! Every reason is found by the same rules that decide, and every suggestion has been tried: a pod changed as
//! suggested fits the named node. Readers use it through [`Snapshot::explain`](crate::ledger::Snapshot::explain).

mod suggest;
mod words;

pub use suggest::{Change, Suggestion};

use crate::model::{Bytes, Cores, CoresAsk, MilliCpu, NodeName, PodAsk, Together};
use crate::place::capacity::{GpuClass, NodeCapacity, NodeState};
use crate::place::fit::{PreparedAsk, PreparedWant, ShareNeed, Shortfall};
use crate::place::gpu_order;
use crate::place::solve::{self, NodeShortfall};
use crate::place::{ClusterCapacity, NodeIndex, policies};
use std::collections::{BTreeMap, HashMap, HashSet};

/// Why a pod fits a cluster or does not.
#[derive(Clone, Debug)]
pub struct Explanation {
    /// Number of nodes examined.
    pub nodes: usize,
    /// Nodes that the pod fits.
    pub fitting: Vec<NodeName>,
    /// Why it does not fit the others, the most frequent reason first.
    pub reasons: Vec<Reason>,
    /// Changes that would make it fit, where it fits nowhere.
    pub suggestions: Vec<Suggestion>,
    /// Each node that does not fit, in order.
    pub per_node: Vec<NodeReport>,
}

/// One reason, and how many nodes it applies to.
#[derive(Clone, Debug)]
pub struct Reason {
    /// The cause, for programs.
    pub cause: Cause,
    /// Number of nodes.
    pub nodes: usize,
    /// The node that comes closest, and how close.
    pub closest: Option<Closest>,
    /// The reason as text.
    pub text: String,
}

/// The node that comes closest to fitting.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Closest {
    /// The node.
    pub node: NodeName,
    /// The GPU there, where the reason is about one.
    pub gpu: Option<usize>,
    /// What the node or GPU has.
    pub has: Has,
}

impl Has {
    /// Returns the amount as a number: bytes, percent of a GPU's compute (rounded down), thousandths of a CPU, or a count.
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
    /// GPUs that would take a share.
    Gpus(u32),
    /// Slots.
    Slots(u32),
}

/// Why a pod does not fit a node, as one word. Ordered from the farthest from fitting to the nearest.
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
    /// Returns its name in JSON.
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
    /// Returns a summary in one sentence: "1,213 nodes: 812 have no GPU with 8 GiB free, …; 401 …".
    pub fn summary(&self) -> String {
        words::summary(self)
    }
}

/// Why a pod does not fit one node.
#[derive(Clone, Debug)]
pub struct NodeReport {
    /// The node.
    pub node: NodeName,
    /// The cause that is nearest to fitting.
    pub cause: Cause,
    /// What each GPU is short of for the container that does not fit; `None` where it would fit.
    pub gpus: Vec<Option<Shortfall>>,
    /// The reason as text.
    pub text: String,
}

/// Explains why a pod fits a cluster or does not.
pub fn explain(cluster: &ClusterCapacity, ask: &PodAsk) -> Explanation {
    let prepared = cluster.prepare(ask);
    let mut explanation = Explanation {
        nodes: cluster.nodes().count(),
        fitting: Vec::new(),
        reasons: Vec::new(),
        suggestions: Vec::new(),
        per_node: Vec::new(),
    };
    // By cause and, where one container is the problem, by container: the text is about what it asks for.
    let mut reasons: BTreeMap<(Cause, usize), (usize, Option<Closest>)> = BTreeMap::new();
    // Nodes in equal states are examined once, unless the pod tells GPUs apart by UUID.
    let alike = ask.constraints.uuids.is_open();
    let mut known: HashMap<NodeState, Option<Looked>> = HashMap::new();
    for (_, capacity) in cluster.nodes() {
        let look = || Looked::at(capacity, cluster.classes(), &prepared);
        let looked = if alike { known.entry(capacity.state()).or_insert_with(look).clone() } else { look() };
        let Some(looked) = looked else {
            explanation.fitting.push(capacity.node.name.clone());
            continue;
        };
        let (nodes, closest) = reasons.entry((looked.cause, looked.ask)).or_default();
        *nodes += 1;
        if let Some(has) = looked.has
            && closest.as_ref().is_none_or(|closest| closest.has < has)
        {
            *closest = Some(Closest { node: capacity.node.name.clone(), gpu: looked.gpu, has });
        }
        let text =
            words::node(&looked.short, looked.cause, &looked.gpus, &prepared, capacity, cluster.classes());
        explanation.per_node.push(NodeReport {
            node: capacity.node.name.clone(),
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

/// The result of examining one node.
#[derive(Clone)]
struct Looked {
    short: NodeShortfall,
    gpus: Vec<Option<Shortfall>>,
    cause: Cause,
    /// Index of the ask that does not fit, where it is a single one.
    ask: usize,
    gpu: Option<usize>,
    has: Option<Has>,
}

impl Looked {
    /// Examines a node; returns `None` where the pod fits.
    fn at(capacity: &NodeCapacity, classes: &[GpuClass], prepared: &PreparedAsk) -> Option<Looked> {
        let short = why_not(capacity, classes, prepared)?;
        let gpus = gpu_shortfalls(capacity, classes, prepared, &short);
        let (cause, gpu, has) = cause(capacity, classes, prepared, &short, &gpus);
        let ask = if let NodeShortfall::Gpus { ask, .. } = short { ask } else { 0 };
        Some(Looked { short, gpus, cause, ask, gpu, has })
    }
}

/// Returns why a pod does not fit a node; `None` exactly where it fits.
pub fn why_not(
    capacity: &NodeCapacity,
    classes: &[GpuClass],
    prepared: &PreparedAsk,
) -> Option<NodeShortfall> {
    if policies::fits(capacity, classes, prepared) {
        return None;
    }
    if let Some(short) = solve::host_shortfall(capacity, prepared) {
        return Some(short);
    }
    if capacity.gpus.is_empty() {
        return Some(NodeShortfall::NoGpu);
    }
    for (ask, wanted) in prepared.wants.iter().enumerate() {
        if !fits_alone(capacity, classes, prepared, wanted) {
            let fitting = gpu_order::fitting(capacity, classes, prepared, wanted).count_ones();
            return Some(NodeShortfall::Gpus { ask, fitting });
        }
    }
    Some(match prepared.ask.constraints.together {
        Together::Required => NodeShortfall::Together,
        _ if solve::is_given_up(capacity, classes, prepared) => NodeShortfall::GaveUp,
        _ => NodeShortfall::AllAtOnce,
    })
}

/// Returns whether a container would fit if it were the only one.
fn fits_alone(
    capacity: &NodeCapacity,
    classes: &[GpuClass],
    prepared: &PreparedAsk,
    wanted: &PreparedWant,
) -> bool {
    let mut ask = prepared.ask.clone();
    ask.constraints.together = Together::Anywhere;
    policies::fits(capacity, classes, &PreparedAsk { ask, wants: vec![wanted.clone()] })
}

/// Returns what each GPU is short of for the container that does not fit.
fn gpu_shortfalls(
    capacity: &NodeCapacity,
    classes: &[GpuClass],
    prepared: &PreparedAsk,
    short: &NodeShortfall,
) -> Vec<Option<Shortfall>> {
    let NodeShortfall::Gpus { ask, .. } = short else { return Vec::new() };
    let wanted = &prepared.wants[*ask];
    let uuids = &prepared.ask.constraints.uuids;
    let per_gpu = capacity.gpus.iter().zip(&capacity.node.gpus).map(|(state, gpu)| {
        let class = usize::from(state.class);
        if !uuids.admits_uuid(gpu.uuid.as_str()) {
            return Some(Shortfall::Uuid);
        }
        let Some(need) = wanted.needs[class] else { return Some(Shortfall::Model) };
        need.shortfall_on(state, &classes[class])
    });
    per_gpu.collect()
}

/// Returns the cause that is nearest to fitting, the GPU that it is about, and what that GPU has.
fn cause(
    capacity: &NodeCapacity,
    classes: &[GpuClass],
    prepared: &PreparedAsk,
    short: &NodeShortfall,
    gpus: &[Option<Shortfall>],
) -> (Cause, Option<usize>, Option<Has>) {
    match short {
        NodeShortfall::Cpu { free, .. } => (Cause::Cpu, None, Some(Has::Cpu(*free))),
        NodeShortfall::Memory { free, .. } => (Cause::HostMemory, None, Some(Has::Memory(*free))),
        NodeShortfall::NoGpu => (Cause::NoGpu, None, None),
        NodeShortfall::AllAtOnce => (Cause::AllAtOnce, None, None),
        NodeShortfall::GaveUp => (Cause::GaveUp, None, None),
        NodeShortfall::Together => (Cause::Together, None, None),
        NodeShortfall::Gpus { fitting, .. } if *fitting > 0 => {
            (Cause::TooFew, None, Some(Has::Gpus(*fitting)))
        }
        NodeShortfall::Gpus { ask, .. } => {
            let near = gpus.iter().enumerate().filter_map(|(gpu, short)| {
                let (cause, has) = gpu_cause(short.as_ref()?);
                Some((cause, has, std::cmp::Reverse(gpu)))
            });
            match near.max() {
                // Slots may come from several GPUs, so the number on all of them counts.
                Some((Cause::Cores | Cause::Slots, ..)) if asked_slots(&prepared.wants[*ask]).is_some() => {
                    let free = free_slots(capacity, classes, prepared, &prepared.wants[*ask]);
                    (Cause::Slots, None, Some(Has::Slots(free)))
                }
                Some((cause, has, std::cmp::Reverse(gpu))) => (cause, Some(gpu), has),
                None => (Cause::NoGpu, None, None),
            }
        }
    }
}

fn gpu_cause(short: &Shortfall) -> (Cause, Option<Has>) {
    match *short {
        Shortfall::Withheld => (Cause::Withheld, None),
        Shortfall::Model => (Cause::Model, None),
        Shortfall::Uuid => (Cause::Uuid, None),
        Shortfall::Card { card, .. } => (Cause::Card, Some(Has::Memory(card))),
        Shortfall::Slots { .. } => (Cause::Slots, None),
        Shortfall::HeldWhole => (Cause::HeldWhole, None),
        Shortfall::Shares { .. } => (Cause::Shares, None),
        Shortfall::NotEmpty { .. } => (Cause::NotEmpty, None),
        Shortfall::BesideUnlimited | Shortfall::BesideLimited => (Cause::Limits, None),
        Shortfall::Memory { free, .. } => (Cause::Memory, Some(Has::Memory(free))),
        Shortfall::Cores { free, .. } => (Cause::Cores, Some(Has::Cores(free))),
        Shortfall::CoresAllPromised | Shortfall::CoresForOthers { .. } => {
            (Cause::Cores, Some(Has::Cores(Cores::NONE)))
        }
    }
}

/// Maximum number of node states that a change is tried on: trying a pod of many containers is expensive.
const MAX_TRIED_STATES: usize = 512;

/// Returns the first node, in order, that a pod fits.
fn first_fitting(cluster: &ClusterCapacity, ask: &PodAsk) -> Option<NodeIndex> {
    let prepared = cluster.prepare(ask);
    let costly = prepared.wants.len() > 1 && ask.constraints.uuids.is_open();
    let mut tried: HashSet<NodeState> = HashSet::new();
    for (node, capacity) in cluster.nodes() {
        let known = costly && (tried.len() >= MAX_TRIED_STATES || !tried.insert(capacity.state()));
        if !known && cluster.fits(node, &prepared) {
            return Some(node);
        }
    }
    None
}

fn asked_slots(wanted: &PreparedWant) -> Option<u32> {
    match wanted.want.part.cores {
        CoresAsk::Slots(slots) => Some(slots),
        _ => None,
    }
}

/// Returns how many slots a container could have on a node.
fn free_slots(
    capacity: &NodeCapacity,
    classes: &[GpuClass],
    prepared: &PreparedAsk,
    wanted: &PreparedWant,
) -> u32 {
    let fits = |slots: u32| {
        let mut ask = prepared.ask.clone();
        ask.constraints.together = Together::Anywhere;
        let mut wanted = wanted.clone();
        wanted.want.part.cores = CoresAsk::Slots(slots);
        wanted.needs = classes
            .iter()
            .zip(&wanted.needs)
            .map(|(class, need)| need.map(|_| ShareNeed::of(&wanted.want.part, class)))
            .collect();
        policies::fits(capacity, classes, &PreparedAsk { ask, wants: vec![wanted] })
    };
    let asked = asked_slots(wanted).unwrap_or(0);
    (1..asked).rev().find(|&slots| fits(slots)).unwrap_or(0)
}
