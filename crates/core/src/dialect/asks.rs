//! From a pod to what it asks, whatever dialect it is written in.
//!
//! Reading never fails. What is wrong becomes a [`Problem`], and everything else is read all the same, so that
//! one look shows all there is to mend.

pub(super) mod aws;
mod carrier;
mod constraints;
mod counted;
pub(super) mod gpushare;
pub(super) mod hami;
mod host;
mod limit;
mod lines;
mod memory;
pub(super) mod native;
mod nearest;
mod oversubscribe;
pub(super) mod vcuda;
pub(super) mod volcano;

use super::{Dialect, Settings};
use crate::model::{
    Ask, ContainerName, ContainerRole, Cores, CoresAsk, MemoryAsk, PodAsk, ShareAsk, Together, WantedGpus,
};
use crate::pod::{Pod, Problem};
use lines::{Lines, Unclear};
pub(crate) use memory::MOST as MAX_MEMORY;
pub(crate) use native::LEAST as MIN_MEMORY;

/// What a pod asks and what is wrong with it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Reading {
    /// All its containers, in the order of the spec: init containers first.
    pub containers: Vec<ContainerReading>,
    /// The same for the allocator: only the containers that ask for GPUs, and what holds for the whole pod.
    pub ask: PodAsk,
    /// Everything that is wrong.
    pub problems: Vec<Problem>,
}

/// What one container asks.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ContainerReading {
    /// The container.
    pub name: ContainerName,
    /// When it runs.
    pub role: ContainerRole,
    /// The dialect it asks in; absent where it asks nothing, or in several at once.
    pub dialect: Option<Dialect>,
    /// What it wants; absent where it asks nothing, or a problem says why that is unclear.
    pub want: Option<WantedGpus>,
}

/// Reads what a pod asks.
pub fn read(pod: &Pod, settings: &Settings) -> Reading {
    let mut problems = Vec::new();
    native::check_annotations(pod, &mut problems);
    let carriers = carrier::read(pod, &mut problems);
    let mut limits = limit::read(pod, &mut problems);
    let exclusive = native::flag(pod, native::EXCLUSIVE, &mut problems).unwrap_or(false);
    let slot_memory = aws::memory_limit(pod, &mut problems);

    let mut containers = Vec::with_capacity(pod.containers.len());
    let mut spread = false;
    for container in &pod.containers {
        let marked = carriers.of(&container.name);
        let mut lines = Lines::new(container, marked, &mut problems);
        lines.check_names();
        lines.check_requests();
        let (dialect, mut want) = match lines.dialects()[..] {
            [] => {
                lines.check_carried();
                (None, None)
            }
            [dialect] => (Some(dialect), read_in(dialect, &mut lines, pod, settings).unwrap_or(None)),
            _ => {
                lines.refuse_several_dialects();
                (None, None)
            }
        };
        if let (Some(dialect), Some(want)) = (dialect, &mut want) {
            want.part.whole |= exclusive;
            if let (Dialect::Aws, Some(limit)) = (dialect, slot_memory) {
                want.part.memory = MemoryAsk::Exactly(limit);
            }
            lines.check_carriers(want.count);
            limits.apply(dialect, want, &mut lines, settings);
            spread |= dialect == Dialect::Gpushare && want.count > 1;
        }
        let (name, role) = (container.name.clone(), container.role);
        containers.push(ContainerReading { name, role, dialect, want });
    }
    limits.check_used(&containers, &mut problems);
    aws::check_limit_used(pod, &containers, &mut problems);
    let oversubscribe = oversubscribe::read(pod, &containers, &mut problems);

    let spoken = Dialect::ALL.into_iter().filter(|d| containers.iter().any(|c| c.dialect == Some(*d)));
    let mut constraints = constraints::read(pod, &spoken.collect::<Vec<_>>(), &mut problems);
    let asks: Vec<Ask> = containers
        .iter()
        .filter_map(|c| Some(Ask { container: c.name.clone(), role: c.role, want: c.want? }))
        .collect();
    constraints.together = together(pod, &containers, &asks, spread, &mut problems);
    let (cpu, memory) = host::requests(pod, &mut problems);
    Reading { containers, ask: PodAsk { asks, constraints, cpu, memory, oversubscribe }, problems }
}

/// Whether a resource is an ask for GPUs, or was meant to be one.
pub fn is_or_resembles_ask(resource: &str) -> bool {
    dialect_of(resource).is_some() || nearest::meant(resource).is_some()
}

/// Whether a pod's annotation of this name says something about its asks, in any dialect.
pub fn reads_annotation(key: &str) -> bool {
    native::ANNOTATIONS.contains(&key) || constraints::ANNOTATIONS.contains(&key) || vcuda::is_core_limit(key)
}

/// A whole GPU, its memory as asked.
pub fn whole_gpu(memory: MemoryAsk) -> ShareAsk {
    ShareAsk { memory, cores: CoresAsk::Exactly(Cores::WHOLE), whole: true, ceiling: None }
}

/// What a container wants, where it asks anything; the problems that make it unclear are recorded.
type Read = Result<Option<WantedGpus>, Unclear>;

fn read_in(dialect: Dialect, lines: &mut Lines<'_>, pod: &Pod, settings: &Settings) -> Read {
    match dialect {
        Dialect::Native => native::read(lines),
        Dialect::Gpushare => gpushare::read(lines, pod, settings),
        Dialect::Volcano => volcano::read(lines, settings),
        Dialect::Vcuda => vcuda::read(lines),
        Dialect::Aws => aws::read(lines),
        Dialect::Hami => hami::read(lines),
    }
}

/// The dialect a resource belongs to.
fn dialect_of(resource: &str) -> Option<Dialect> {
    let is_vcuda = || vcuda::split(resource).is_some();
    Some(match resource {
        r if native::RESOURCES.contains(&r) => Dialect::Native,
        r if gpushare::RESOURCES.contains(&r) => Dialect::Gpushare,
        r if volcano::RESOURCES.contains(&r) => Dialect::Volcano,
        r if hami::RESOURCES.contains(&r) => Dialect::Hami,
        aws::VGPU => Dialect::Aws,
        _ if is_vcuda() => Dialect::Vcuda,
        _ => return None,
    })
}

/// Whether the pod's containers sit on one GPU: as it says, else as its dialect's users expect.
fn together(
    pod: &Pod,
    containers: &[ContainerReading],
    asks: &[Ask],
    spread: bool,
    problems: &mut Vec<Problem>,
) -> Together {
    match native::flag(pod, native::SAME_GPU, problems) {
        Some(false) => return Together::Anywhere,
        Some(true) => {}
        None => {
            let prefers = |c: &ContainerReading| match c.dialect {
                Some(Dialect::Aws) => true,
                // Upstream packs a pod on one GPU or refuses it; a count says to spread it.
                Some(Dialect::Gpushare) => !spread,
                _ => false,
            };
            let preferred = containers.iter().any(prefers);
            return if preferred { Together::Preferred } else { Together::Anywhere };
        }
    }
    let mut impossible = |message: String| problems.push(Problem::of_pod(native::SAME_GPU, message));
    if let Some(ask) = asks.iter().find(|ask| ask.want.count > 1) {
        impossible(format!(
            "container \"{}\" asks for {} GPUs, which cannot be one: ask for 1 or leave this annotation out",
            ask.container, ask.want.count
        ));
    }
    let mut running = asks.iter().filter(|ask| ask.role != ContainerRole::Init);
    if running.clone().count() > 1
        && let Some(whole) = running.find(|ask| ask.want.part.whole)
    {
        impossible(format!(
            "container \"{}\" wants its GPU for itself, but another container shall share it: drop one of the two",
            whole.container
        ));
    }
    Together::Required
}

#[cfg(test)]
mod tests;
