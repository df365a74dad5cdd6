//! Reasons in plain words.

use super::{Cause, Closest, Explanation, Has};
use crate::model::{CoresAsk, MemoryAsk};
use crate::place::capacity::{GpuClass, NodeCapacity};
use crate::place::fit::{PreparedAsk, PreparedWant, Shortfall};
use crate::place::solve::NodeShortfall;
use std::fmt;

/// A number with its thousands set apart: `1,213`.
pub(super) fn grouped(number: usize) -> String {
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

impl fmt::Display for Has {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Has::Memory(bytes) => bytes.fmt(f),
            Has::Cores(cores) => cores.fmt(f),
            Has::Cpu(cpu) => cpu.fmt(f),
            Has::Gpus(count) | Has::Slots(count) => count.fmt(f),
        }
    }
}

impl fmt::Display for Closest {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} on {}", self.has, self.node)?;
        match self.gpu {
            Some(gpu) => write!(f, "/GPU {gpu}"),
            None => Ok(()),
        }
    }
}

/// Everything in one sentence.
pub(super) fn summary(explanation: &Explanation) -> String {
    let nodes = match explanation.nodes {
        1 => "1 node".to_string(),
        n => format!("{} nodes", grouped(n)),
    };
    let fitting = match explanation.fitting.len() {
        0 => None,
        1 => Some("1 fits".to_string()),
        n => Some(format!("{} fit", grouped(n))),
    };
    let parts: Vec<String> =
        fitting.into_iter().chain(explanation.reasons.iter().map(|reason| reason.text.clone())).collect();
    if explanation.nodes == 0 {
        return "the cluster has no nodes".to_string();
    }
    if parts.is_empty() { nodes } else { format!("{nodes}: {}", parts.join("; ")) }
}

/// Why so many nodes do not fit: "812 have no GPU with 8 GiB free, largest free part is …".
pub(super) fn reason(
    cause: Cause,
    nodes: usize,
    closest: Option<&Closest>,
    prepared: &PreparedAsk,
    ask: usize,
) -> String {
    let count = grouped(nodes);
    let (have, are) = if nodes == 1 { ("has", "is") } else { ("have", "are") };
    let wanted = prepared.wants.get(ask);
    let memory = wanted.map(memory).unwrap_or_default();
    let cores = match wanted.map(|wanted| wanted.want.part.cores) {
        Some(CoresAsk::Exactly(cores)) => format!("{cores} of its cores free"),
        _ => "any of its cores left to promise".to_string(),
    };
    let gpus = wanted.map_or(0, |wanted| wanted.want.count);
    let slots = wanted.and_then(super::asked_slots).unwrap_or(0);
    let text = match cause {
        Cause::NoGpu => format!("{count} {have} no GPU"),
        Cause::Model => format!("{count} {have} only GPUs of models the pod excludes"),
        Cause::Uuid => format!("{count} {have} only GPUs the pod excludes by UUID"),
        Cause::Withheld => format!("{count} {have} no GPU on offer (unhealthy or MIG)"),
        Cause::Card => format!("{count} {have} no card with {memory}"),
        Cause::Slots if slots == 1 => format!("{count} {have} no slot left"),
        Cause::Slots => format!("{count} {have} fewer than {slots} slots left"),
        Cause::Shares => format!("{count} {have} no suitable GPU that takes another share"),
        Cause::Limits => {
            format!(
                "{count} {have} suitable GPUs only where shares with and without a memory limit would mix"
            )
        }
        Cause::HeldWhole => format!("{count} {have} suitable GPUs only where other pods hold them whole"),
        Cause::NotEmpty => format!("{count} {have} no empty GPU"),
        Cause::Memory => format!("{count} {have} no GPU with {memory} free"),
        Cause::Cores => format!("{count} {have} no GPU with {cores}"),
        Cause::Cpu => format!("{count} {have} less than {} free", prepared.ask.cpu),
        Cause::HostMemory => format!("{count} {have} less than {} of host memory free", prepared.ask.memory),
        Cause::TooFew => format!("{count} {have} fewer than {gpus} GPUs that fit"),
        Cause::Together => format!("{count} {have} no single GPU for all containers of the pod"),
        Cause::GaveUp => {
            format!("{count} {are} large enough for each container alone; no way was found for all at once")
        }
        Cause::AllAtOnce => {
            format!("{count} {are} large enough for each container alone, not for all at once")
        }
    };
    // With several containers it matters which one is meant.
    let about_one = matches!(
        cause,
        Cause::Card
            | Cause::Slots
            | Cause::Shares
            | Cause::Limits
            | Cause::HeldWhole
            | Cause::NotEmpty
            | Cause::Memory
            | Cause::Cores
            | Cause::TooFew
    );
    let text = match prepared.ask.asks.get(ask) {
        Some(asked) if about_one && prepared.wants.len() > 1 => {
            format!("{text} for container {}", asked.container)
        }
        _ => text,
    };
    match (cause, closest) {
        (Cause::Memory, Some(closest)) => format!("{text}, largest free part is {closest}"),
        (Cause::Card, Some(closest)) => format!("{text}, largest card is {closest}"),
        (_, Some(closest)) => format!("{text}, the most is {closest}"),
        (_, None) => text,
    }
}

/// The memory a container wants of one GPU, in words that hold on every card.
fn memory(wanted: &PreparedWant) -> String {
    match wanted.want.part.memory {
        MemoryAsk::Exactly(bytes) => bytes.to_string(),
        MemoryAsk::Percent(percent) => format!("{percent} % of its memory"),
        MemoryAsk::All | MemoryAsk::AtMost(_) => "all of its memory".to_string(),
        MemoryAsk::Unlimited => "any memory".to_string(),
    }
}

/// Why one node does not fit.
pub(super) fn node(
    short: &NodeShortfall,
    cause: Cause,
    gpus: &[Option<Shortfall>],
    prepared: &PreparedAsk,
    capacity: &NodeCapacity,
    classes: &[GpuClass],
) -> String {
    match short {
        NodeShortfall::Cpu { asked, free } => format!("{free} free, {asked} asked"),
        NodeShortfall::Memory { asked, free } => format!("{free} of host memory free, {asked} asked"),
        NodeShortfall::NoGpu => "no GPU".to_string(),
        NodeShortfall::AllAtOnce => {
            format!("each container fits alone, not all at once: {}", nodes(capacity, classes))
        }
        NodeShortfall::GaveUp => {
            format!(
                "each container fits alone; no way was found for all at once: {}",
                nodes(capacity, classes)
            )
        }
        NodeShortfall::Together => {
            format!("no single GPU takes all containers: {}", nodes(capacity, classes))
        }
        NodeShortfall::Gpus { ask, fitting } => {
            let container = &prepared.ask.asks[*ask].container;
            let wanted = prepared.wants[*ask].want.count;
            let each = gpus.iter().enumerate().map(|(gpu, short)| match short {
                Some(Shortfall::Withheld) => {
                    let reason = capacity.node.gpus[gpu].withheld.as_deref().unwrap_or("no reason given");
                    format!("GPU {gpu} is not offered ({reason})")
                }
                Some(short) => format!("GPU {gpu} {short}"),
                None => format!("GPU {gpu} would do"),
            });
            let each = each.collect::<Vec<_>>().join("; ");
            match cause {
                Cause::TooFew => format!("container {container} wants {wanted} GPUs, {fitting} fit: {each}"),
                Cause::Slots => format!("container {container} finds too few slots: {each}"),
                _ => format!("container {container}: {each}"),
            }
        }
    }
}

/// What is free on each GPU of a node.
fn nodes(capacity: &NodeCapacity, classes: &[GpuClass]) -> String {
    let each = capacity.gpus.iter().enumerate().map(|(index, gpu)| {
        let memory = gpu.free_memory(&classes[usize::from(gpu.class)]);
        if gpu.withheld {
            format!("GPU {index} is not offered")
        } else {
            format!("GPU {index} has {memory} and {} of its cores free", gpu.free_cores())
        }
    });
    each.collect::<Vec<_>>().join("; ")
}
