//! Formats the reasons of an explanation as text.

use super::{AvailableAmount, ClosestNode, Explanation, NoFitCause};
use crate::model::{CoresAsk, MemoryAsk};
use crate::place::capacity::{GpuClass, NodeCapacity};
use crate::place::fit::{PreparedAsk, PreparedWant, Shortfall};
use crate::place::solve::NodeShortfall;
use std::fmt;

/// Formats a number with thousands separators: `1,213`.
pub(super) fn group_thousands(number: usize) -> String {
    let digits = number.to_string();
    let mut grouped = String::new();
    for (at, digit) in digits.chars().enumerate() {
        if at > 0 && (digits.len() - at).is_multiple_of(3) {
            grouped.push(',');
        }
        grouped.push(digit);
    }
    grouped
}

impl fmt::Display for AvailableAmount {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            AvailableAmount::Memory(bytes) => bytes.fmt(f),
            AvailableAmount::Cores(cores) => cores.fmt(f),
            AvailableAmount::Cpu(cpu) => cpu.fmt(f),
            AvailableAmount::Gpus(count) | AvailableAmount::Slots(count) => count.fmt(f),
        }
    }
}

impl fmt::Display for ClosestNode {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} on {}", self.has, self.node)?;
        match self.gpu {
            Some(gpu) => write!(f, "/GPU {gpu}"),
            None => Ok(()),
        }
    }
}

/// Returns the summary in one sentence.
pub(super) fn summary(explanation: &Explanation) -> String {
    let nodes = match explanation.nodes {
        1 => "1 node".to_string(),
        n => format!("{} nodes", group_thousands(n)),
    };
    let fitting = match explanation.fitting.len() {
        0 => None,
        1 => Some("1 fits".to_string()),
        n => Some(format!("{} fit", group_thousands(n))),
    };
    let parts: Vec<String> =
        fitting.into_iter().chain(explanation.reasons.iter().map(|reason| reason.text.clone())).collect();
    if explanation.nodes == 0 {
        return "the cluster has no nodes".to_string();
    }
    if parts.is_empty() { nodes } else { format!("{nodes}: {}", parts.join("; ")) }
}

/// Returns why a number of nodes do not fit: "812 have no GPU with 8 GiB free, largest free share is …".
pub(super) fn reason(
    cause: NoFitCause,
    nodes: usize,
    closest: Option<&ClosestNode>,
    prepared: &PreparedAsk,
    ask: usize,
) -> String {
    let count = group_thousands(nodes);
    let (have, are) = if nodes == 1 { ("has", "is") } else { ("have", "are") };
    let wanted = prepared.wants.get(ask);
    let memory = wanted.map(describe_memory).unwrap_or_default();
    let cores = match wanted.map(|wanted| wanted.want.share.cores) {
        Some(CoresAsk::Exactly(cores)) => format!("{cores} of its cores free"),
        _ => "any cores left to guarantee".to_string(),
    };
    let gpus = wanted.map_or(0, |wanted| wanted.want.count);
    let slots = wanted.and_then(super::asked_slots).unwrap_or(0);
    let text = match cause {
        NoFitCause::NoGpu => format!("{count} {have} no GPU"),
        NoFitCause::Model => format!("{count} {have} only GPUs of models that the pod excludes"),
        NoFitCause::Uuid => format!("{count} {have} only GPUs that the pod excludes by UUID"),
        NoFitCause::Withheld => format!("{count} {have} no allocatable GPU (unhealthy or MIG)"),
        NoFitCause::Card => format!("{count} {have} no card with {memory}"),
        NoFitCause::Slots if slots == 1 => format!("{count} {have} no slot left"),
        NoFitCause::Slots => format!("{count} {have} fewer than {slots} slots left"),
        NoFitCause::Shares => format!("{count} {have} no suitable GPU that accepts another share"),
        NoFitCause::Limits => {
            format!(
                "{count} {have} suitable GPUs only where shares with and without a memory limit would be combined"
            )
        }
        NoFitCause::HeldWhole => {
            format!("{count} {have} suitable GPUs only where they are exclusive to other pods")
        }
        NoFitCause::NotEmpty => format!("{count} {have} no empty GPU"),
        NoFitCause::Memory => format!("{count} {have} no GPU with {memory} free"),
        NoFitCause::Cores => format!("{count} {have} no GPU with {cores}"),
        NoFitCause::Cpu => format!("{count} {have} less than {} free", prepared.ask.cpu),
        NoFitCause::HostMemory => {
            format!("{count} {have} less than {} of host memory free", prepared.ask.memory)
        }
        NoFitCause::TooFew => format!("{count} {have} fewer than {gpus} GPUs that fit"),
        NoFitCause::Colocation => format!("{count} {have} no single GPU for all containers of the pod"),
        NoFitCause::GaveUp => {
            format!(
                "{count} {are} large enough for each container alone; no placement was found for all at once"
            )
        }
        NoFitCause::AllAtOnce => {
            format!("{count} {are} large enough for each container alone, not for all at once")
        }
    };
    // If the pod has several containers, name the one that does not fit.
    let about_one = matches!(
        cause,
        NoFitCause::Card
            | NoFitCause::Slots
            | NoFitCause::Shares
            | NoFitCause::Limits
            | NoFitCause::HeldWhole
            | NoFitCause::NotEmpty
            | NoFitCause::Memory
            | NoFitCause::Cores
            | NoFitCause::TooFew
    );
    let text = match prepared.ask.asks.get(ask) {
        Some(asked) if about_one && prepared.wants.len() > 1 => {
            format!("{text} for container {}", asked.container)
        }
        _ => text,
    };
    match (cause, closest) {
        (NoFitCause::Memory, Some(closest)) => format!("{text}, largest free share is {closest}"),
        (NoFitCause::Card, Some(closest)) => format!("{text}, largest card is {closest}"),
        (_, Some(closest)) => format!("{text}, the maximum is {closest}"),
        (_, None) => text,
    }
}

/// Returns the memory that a container requests of one GPU, in a form that is correct for every GPU.
fn describe_memory(wanted: &PreparedWant) -> String {
    match wanted.want.share.memory {
        MemoryAsk::Exactly(bytes) => bytes.to_string(),
        MemoryAsk::Percent(percent) => format!("{percent} % of its memory"),
        MemoryAsk::All | MemoryAsk::AtMost(_) => "all of its memory".to_string(),
        MemoryAsk::Unlimited => "any memory".to_string(),
    }
}

/// Returns why one node does not fit.
pub(super) fn node(
    short: &NodeShortfall,
    cause: NoFitCause,
    gpus: &[Option<Shortfall>],
    prepared: &PreparedAsk,
    capacity: &NodeCapacity,
    classes: &[GpuClass],
) -> String {
    match short {
        NodeShortfall::Cpu { asked, free } => format!("{free} free, {asked} requested"),
        NodeShortfall::Memory { asked, free } => format!("{free} of host memory free, {asked} requested"),
        NodeShortfall::NoGpu => "no GPU".to_string(),
        NodeShortfall::AllAtOnce => {
            format!("each container fits alone, not all at once: {}", free_capacity(capacity, classes))
        }
        NodeShortfall::GaveUp => {
            format!(
                "each container fits alone; no placement was found for all at once: {}",
                free_capacity(capacity, classes)
            )
        }
        NodeShortfall::Colocation => {
            format!("no single GPU fits all containers: {}", free_capacity(capacity, classes))
        }
        NodeShortfall::Gpus { ask, fitting } => {
            let container = &prepared.ask.asks[*ask].container;
            let wanted = prepared.wants[*ask].want.count;
            let each = gpus.iter().enumerate().map(|(gpu, short)| match short {
                Some(Shortfall::Withheld) => {
                    let reason = capacity.node.gpus[gpu].withheld.as_deref().unwrap_or("no reason given");
                    format!("GPU {gpu} is not allocatable ({reason})")
                }
                Some(short) => format!("GPU {gpu} {short}"),
                None => format!("GPU {gpu} fits"),
            });
            let each = each.collect::<Vec<_>>().join("; ");
            match cause {
                NoFitCause::TooFew => {
                    format!("container {container} requests {wanted} GPUs, {fitting} fit: {each}")
                }
                NoFitCause::Slots => format!("container {container} has too few free slots: {each}"),
                _ => format!("container {container}: {each}"),
            }
        }
    }
}

/// Returns the free memory and compute of each GPU of a node.
fn free_capacity(capacity: &NodeCapacity, classes: &[GpuClass]) -> String {
    let each = capacity.gpus.iter().enumerate().map(|(index, gpu)| {
        let memory = gpu.free_memory(&classes[usize::from(gpu.class)]);
        if gpu.withheld {
            format!("GPU {index} is not allocatable")
        } else {
            format!("GPU {index} has {memory} and {} of its cores free", gpu.free_cores())
        }
    });
    each.collect::<Vec<_>>().join("; ")
}
