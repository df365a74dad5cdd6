//! Why a pod does not fit: per node, per GPU and in summary, with changes that would make it fit.
//!
//! Every reason is found by the same rules that decide, and every suggestion has been tried: a pod changed as
//! suggested fits the named node. Readers use it through [`Snapshot::explain`](crate::ledger::Snapshot::explain).

mod suggest;
mod text;

pub use suggest::{SuggestedChange, Suggestion};

use crate::model::{Bytes, Colocation, Cores, CoresAsk, MilliCpu, NodeName, PodAsk};
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
    pub reasons: Vec<NoFitReason>,
    /// Changes that would make it fit, if it fits nowhere.
    pub suggestions: Vec<Suggestion>,
    /// Each node that does not fit, in order.
    pub per_node: Vec<NodeReport>,
}

/// One reason, and how many nodes it applies to.
#[derive(Clone, Debug)]
pub struct NoFitReason {
    /// The cause, for programs.
    pub cause: NoFitCause,
    /// Number of nodes with this reason.
    pub nodes: usize,
    /// The node that comes closest, and how close.
    pub closest: Option<ClosestNode>,
    /// The reason as text.
    pub text: String,
}

/// The node that comes closest to fitting.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ClosestNode {
    /// Name of the node concerned.
    pub node: NodeName,
    /// The GPU there, if the reason is about one.
    pub gpu: Option<usize>,
    /// The amount that the node or GPU has.
    pub has: AvailableAmount,
}

impl AvailableAmount {
    /// Returns the amount as a number: bytes, percent of a GPU's compute (rounded down), thousandths of a CPU, or a count.
    pub fn amount(self) -> u64 {
        match self {
            AvailableAmount::Memory(bytes) => bytes.0,
            AvailableAmount::Cores(cores) => u64::from(cores.as_whole_percent()),
            AvailableAmount::Cpu(cpu) => cpu.0,
            AvailableAmount::Gpus(count) | AvailableAmount::Slots(count) => u64::from(count),
        }
    }
}

/// An amount that was not enough.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum AvailableAmount {
    /// An amount of memory.
    Memory(Bytes),
    /// An amount of compute.
    Cores(Cores),
    /// An amount of CPU.
    Cpu(MilliCpu),
    /// GPUs that would take a share.
    Gpus(u32),
    /// A number of slots.
    Slots(u32),
}

/// Why a pod does not fit a node, as one word. Ordered from the farthest from fitting to the nearest.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum NoFitCause {
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
    /// Too little GPU memory is free.
    Memory,
    /// Too little compute is free.
    Cores,
    /// Too little CPU is free.
    Cpu,
    /// Too little host memory is free.
    HostMemory,
    /// Some GPUs fit, too few.
    TooFew,
    /// The containers fit alone, not together on one GPU.
    Colocation,
    /// The containers fit alone, not all at once.
    AllAtOnce,
    /// The containers fit alone; whether all at once was not found out.
    GaveUp,
}

impl NoFitCause {
    /// Returns its name in JSON.
    pub fn name(self) -> &'static str {
        match self {
            NoFitCause::NoGpu => "noGpu",
            NoFitCause::Model => "model",
            NoFitCause::Uuid => "uuid",
            NoFitCause::Withheld => "withheld",
            NoFitCause::Card => "card",
            NoFitCause::Slots => "slots",
            NoFitCause::Shares => "shares",
            NoFitCause::Limits => "limits",
            NoFitCause::HeldWhole => "heldWhole",
            NoFitCause::NotEmpty => "notEmpty",
            NoFitCause::Memory => "memory",
            NoFitCause::Cores => "cores",
            NoFitCause::Cpu => "cpu",
            NoFitCause::HostMemory => "hostMemory",
            NoFitCause::TooFew => "tooFew",
            NoFitCause::Colocation => "together",
            NoFitCause::AllAtOnce => "allAtOnce",
            NoFitCause::GaveUp => "gaveUp",
        }
    }
}

impl Explanation {
    /// Returns a summary in one sentence: "1,213 nodes: 812 have no GPU with 8 GiB free, …; 401 …".
    pub fn summary(&self) -> String {
        text::summary(self)
    }
}

/// Why a pod does not fit one node.
#[derive(Clone, Debug)]
pub struct NodeReport {
    /// Name of the node concerned.
    pub node: NodeName,
    /// The cause that is nearest to fitting.
    pub cause: NoFitCause,
    /// The shortfall of each GPU for the container that does not fit; `None` for GPUs that it fits.
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
    // By cause and, if one container is the problem, by container: the text is about what it asks for.
    let mut reasons: BTreeMap<(NoFitCause, usize), (usize, Option<ClosestNode>)> = BTreeMap::new();
    // Nodes in equal states are examined once, unless the pod selects GPUs by UUID.
    let alike = ask.constraints.uuids.is_open();
    let mut examined: HashMap<NodeState, Option<NodeExamination>> = HashMap::new();
    for (_, capacity) in cluster.nodes() {
        let look = || NodeExamination::at(capacity, cluster.classes(), &prepared);
        let looked =
            if alike { examined.entry(capacity.state()).or_insert_with(look).clone() } else { look() };
        let Some(looked) = looked else {
            explanation.fitting.push(capacity.node.name.clone());
            continue;
        };
        let (nodes, closest) = reasons.entry((looked.cause, looked.ask)).or_default();
        *nodes += 1;
        if let Some(has) = looked.has
            && closest.as_ref().is_none_or(|closest| closest.has < has)
        {
            *closest = Some(ClosestNode { node: capacity.node.name.clone(), gpu: looked.gpu, has });
        }
        let text =
            text::node(&looked.short, looked.cause, &looked.gpus, &prepared, capacity, cluster.classes());
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
            let text = text::reason(cause, nodes, closest.as_ref(), &prepared, ask);
            NoFitReason { cause, nodes, closest, text }
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
struct NodeExamination {
    short: NodeShortfall,
    gpus: Vec<Option<Shortfall>>,
    cause: NoFitCause,
    /// Index of the ask that does not fit, if it is a single one.
    ask: usize,
    gpu: Option<usize>,
    has: Option<AvailableAmount>,
}

impl NodeExamination {
    /// Examines a node; returns `None` if the pod fits.
    fn at(capacity: &NodeCapacity, classes: &[GpuClass], prepared: &PreparedAsk) -> Option<NodeExamination> {
        let short = why_not(capacity, classes, prepared)?;
        let gpus = gpu_shortfalls(capacity, classes, prepared, &short);
        let (cause, gpu, has) = cause(capacity, classes, prepared, &short, &gpus);
        let ask = if let NodeShortfall::Gpus { ask, .. } = short { ask } else { 0 };
        Some(NodeExamination { short, gpus, cause, ask, gpu, has })
    }
}

/// Returns why a pod does not fit a node; `None` exactly if it fits.
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
    Some(match prepared.ask.constraints.colocation {
        Colocation::Required => NodeShortfall::Colocation,
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
    ask.constraints.colocation = Colocation::Anywhere;
    policies::fits(capacity, classes, &PreparedAsk { ask, wants: vec![wanted.clone()] })
}

/// Returns the shortfall of each GPU for the container that does not fit.
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
) -> (NoFitCause, Option<usize>, Option<AvailableAmount>) {
    match short {
        NodeShortfall::Cpu { free, .. } => (NoFitCause::Cpu, None, Some(AvailableAmount::Cpu(*free))),
        NodeShortfall::Memory { free, .. } => {
            (NoFitCause::HostMemory, None, Some(AvailableAmount::Memory(*free)))
        }
        NodeShortfall::NoGpu => (NoFitCause::NoGpu, None, None),
        NodeShortfall::AllAtOnce => (NoFitCause::AllAtOnce, None, None),
        NodeShortfall::GaveUp => (NoFitCause::GaveUp, None, None),
        NodeShortfall::Colocation => (NoFitCause::Colocation, None, None),
        NodeShortfall::Gpus { fitting, .. } if *fitting > 0 => {
            (NoFitCause::TooFew, None, Some(AvailableAmount::Gpus(*fitting)))
        }
        NodeShortfall::Gpus { ask, .. } => {
            let near = gpus.iter().enumerate().filter_map(|(gpu, short)| {
                let (cause, has) = gpu_cause(short.as_ref()?);
                Some((cause, has, std::cmp::Reverse(gpu)))
            });
            match near.max() {
                // Slots may come from several GPUs, so the number on all of them counts.
                Some((NoFitCause::Cores | NoFitCause::Slots, ..))
                    if asked_slots(&prepared.wants[*ask]).is_some() =>
                {
                    let free = free_slots(capacity, classes, prepared, &prepared.wants[*ask]);
                    (NoFitCause::Slots, None, Some(AvailableAmount::Slots(free)))
                }
                Some((cause, has, std::cmp::Reverse(gpu))) => (cause, Some(gpu), has),
                None => (NoFitCause::NoGpu, None, None),
            }
        }
    }
}

fn gpu_cause(short: &Shortfall) -> (NoFitCause, Option<AvailableAmount>) {
    match *short {
        Shortfall::Withheld => (NoFitCause::Withheld, None),
        Shortfall::Model => (NoFitCause::Model, None),
        Shortfall::Uuid => (NoFitCause::Uuid, None),
        Shortfall::Card { card, .. } => (NoFitCause::Card, Some(AvailableAmount::Memory(card))),
        Shortfall::Slots { .. } => (NoFitCause::Slots, None),
        Shortfall::HeldWhole => (NoFitCause::HeldWhole, None),
        Shortfall::Shares { .. } => (NoFitCause::Shares, None),
        Shortfall::NotEmpty { .. } => (NoFitCause::NotEmpty, None),
        Shortfall::BesideUnlimited | Shortfall::BesideLimited => (NoFitCause::Limits, None),
        Shortfall::Memory { free, .. } => (NoFitCause::Memory, Some(AvailableAmount::Memory(free))),
        Shortfall::Cores { free, .. } => (NoFitCause::Cores, Some(AvailableAmount::Cores(free))),
        Shortfall::CoresAllGuaranteed | Shortfall::CoresForOthers { .. } => {
            (NoFitCause::Cores, Some(AvailableAmount::Cores(Cores::NONE)))
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
    match wanted.want.share.cores {
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
        ask.constraints.colocation = Colocation::Anywhere;
        let mut wanted = wanted.clone();
        wanted.want.share.cores = CoresAsk::Slots(slots);
        wanted.needs = classes
            .iter()
            .zip(&wanted.needs)
            .map(|(class, need)| need.map(|_| ShareNeed::of(&wanted.want.share, class)))
            .collect();
        policies::fits(capacity, classes, &PreparedAsk { ask, wants: vec![wanted] })
    };
    let asked = asked_slots(wanted).unwrap_or(0);
    (1..asked).rev().find(|&slots| fits(slots)).unwrap_or(0)
}
