//! Reads the asks of a pod, in any dialect.
//!
//! Reading never fails. Every mistake becomes a [`Problem`], and the rest of the pod is still read, so that all problems
//! are reported at once.

pub(super) mod aws;
mod carrier;
mod constraints;
mod cores_limit;
mod counted_spelling;
mod did_you_mean;
pub(super) mod gpushare;
pub(super) mod hami;
mod host_requests;
mod memory;
pub(super) mod native;
mod oversubscribe;
mod resource_list;
mod turn_preferences;
pub(super) mod vcuda;
pub(super) mod volcano;

use super::{Dialect, DialectSettings};
use crate::model::{
    Ask, Colocation, ContainerName, ContainerRole, Cores, CoresAsk, MemoryAsk, PodAsk, ShareAsk, WantedGpus,
};
use crate::pod::{PodManifest, Problem};
pub(crate) use memory::MAX_MEMORY;
pub(crate) use native::MIN_MEMORY;
use resource_list::{ResourceList, UnclearAsk};

/// The asks of a pod and its problems.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct PodReading {
    /// All containers of the pod, in the order of the spec: init containers first.
    pub containers: Vec<ContainerReading>,
    /// The ask for the allocator: only the containers that request GPUs, and the constraints of the whole pod.
    pub ask: PodAsk,
    /// All problems of the pod's requests.
    pub problems: Vec<Problem>,
}

/// The ask of one container.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ContainerReading {
    /// The name of the container.
    pub name: ContainerName,
    /// When the container runs.
    pub role: ContainerRole,
    /// The dialect of its resources; `None` if it requests no GPU or uses several dialects.
    pub dialect: Option<Dialect>,
    /// The GPUs it requests; `None` if it requests none, or if the request is unclear and a problem gives the reason.
    pub want: Option<WantedGpus>,
}

/// Reads the asks of a pod.
pub fn read(pod: &PodManifest, settings: &DialectSettings) -> PodReading {
    let mut problems = Vec::new();
    native::check_annotations(pod, &mut problems);
    let carriers = carrier::read(pod, &mut problems);
    let mut limits = cores_limit::read(pod, &mut problems);
    let exclusive = native::flag(pod, native::EXCLUSIVE, &mut problems).unwrap_or(false);
    let slot_memory = aws::memory_limit(pod, &mut problems);

    let mut containers = Vec::with_capacity(pod.containers.len());
    let mut is_split = false;
    for container in &pod.containers {
        let marked = carriers.of(&container.name);
        let mut list = ResourceList::new(container, marked, &mut problems);
        list.check_names();
        list.check_requests();
        let (dialect, mut want) = match list.dialects()[..] {
            [] => {
                list.check_carried();
                (None, None)
            }
            [dialect] => (Some(dialect), read_in(dialect, &mut list, pod, settings).unwrap_or(None)),
            _ => {
                list.refuse_several_dialects();
                (None, None)
            }
        };
        if let (Some(dialect), Some(want)) = (dialect, &mut want) {
            want.share.whole |= exclusive;
            if let (Dialect::Aws, Some(limit)) = (dialect, slot_memory) {
                want.share.memory = MemoryAsk::Exactly(limit);
            }
            list.check_carriers(want.count);
            limits.apply(dialect, want, &mut list, settings);
            is_split |= dialect == Dialect::Gpushare && want.count > 1;
        }
        let (name, role) = (container.name.clone(), container.role);
        containers.push(ContainerReading { name, role, dialect, want });
    }
    limits.check_used(&containers, &mut problems);
    aws::check_limit_used(pod, &containers, &mut problems);
    let oversubscribe = oversubscribe::read(pod, &containers, &mut problems);
    let turns = turn_preferences::read(pod, &containers, &mut problems);

    let dialects = Dialect::ALL.into_iter().filter(|d| containers.iter().any(|c| c.dialect == Some(*d)));
    let mut constraints = constraints::read(pod, &dialects.collect::<Vec<_>>(), &mut problems);
    let asks: Vec<Ask> = containers
        .iter()
        .filter_map(|c| Some(Ask { container: c.name.clone(), role: c.role, want: c.want? }))
        .collect();
    constraints.colocation = colocation(pod, &containers, &asks, is_split, &mut problems);
    let (cpu, memory) = host_requests::read(pod, &mut problems);
    PodReading { containers, ask: PodAsk { asks, constraints, cpu, memory, oversubscribe, turns }, problems }
}

/// Returns whether a resource requests GPUs in some dialect, or is probably a misspelling of one that does.
pub fn is_or_resembles_ask(resource: &str) -> bool {
    dialect_of(resource).is_some() || did_you_mean::intended_resource(resource).is_some()
}

/// Returns the pod annotations that dialects read as parts of an ask, except vcuda's, which can be in any domain.
pub fn annotations() -> impl Iterator<Item = &'static str> {
    native::ANNOTATIONS.into_iter().chain(constraints::ANNOTATIONS)
}

/// Returns whether some dialect reads a pod annotation of this name as part of an ask.
pub fn reads_annotation(key: &str) -> bool {
    annotations().any(|known| known == key) || vcuda::is_core_limit(key)
}

/// Returns an ask for a whole GPU with this memory.
pub fn whole_gpu(memory: MemoryAsk) -> ShareAsk {
    ShareAsk { memory, cores: CoresAsk::Exactly(Cores::WHOLE), whole: true, ceiling: None }
}

/// The GPUs that a container requests; `None` if it requests none. The problems of an unclear ask are already recorded.
type WantResult = Result<Option<WantedGpus>, UnclearAsk>;

fn read_in(
    dialect: Dialect,
    list: &mut ResourceList<'_>,
    pod: &PodManifest,
    settings: &DialectSettings,
) -> WantResult {
    match dialect {
        Dialect::Native => native::read(list),
        Dialect::Gpushare => gpushare::read(list, pod, settings),
        Dialect::Volcano => volcano::read(list, settings),
        Dialect::Vcuda => vcuda::read(list),
        Dialect::Aws => aws::read(list),
        Dialect::Hami => hami::read(list),
    }
}

/// Returns the dialect that a resource belongs to.
fn dialect_of(resource: &str) -> Option<Dialect> {
    let is_vcuda = || vcuda::split_domain(resource).is_some();
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

/// Reads whether the pod's containers share one GPU: from the annotation, or else the default of its dialects.
fn colocation(
    pod: &PodManifest,
    containers: &[ContainerReading],
    asks: &[Ask],
    is_split: bool,
    problems: &mut Vec<Problem>,
) -> Colocation {
    match native::flag(pod, native::SAME_GPU, problems) {
        Some(false) => return Colocation::Anywhere,
        Some(true) => {}
        None => {
            let prefers = |c: &ContainerReading| match c.dialect {
                Some(Dialect::Aws) => true,
                // The upstream scheduler places a pod on one GPU or refuses it, unless a count splits it.
                Some(Dialect::Gpushare) => !is_split,
                _ => false,
            };
            let preferred = containers.iter().any(prefers);
            return if preferred { Colocation::Preferred } else { Colocation::Anywhere };
        }
    }
    let mut impossible = |message: String| problems.push(Problem::of_pod(native::SAME_GPU, message));
    if let Some(ask) = asks.iter().find(|ask| ask.want.count > 1) {
        impossible(format!(
            "container \"{}\" requests {} GPUs, which cannot be the same GPU: request 1 or remove this annotation",
            ask.container, ask.want.count
        ));
    }
    let mut running = asks.iter().filter(|ask| ask.role != ContainerRole::Init);
    if running.clone().count() > 1
        && let Some(whole) = running.find(|ask| ask.want.share.whole)
    {
        impossible(format!(
            "container \"{}\" requires a GPU for itself, but this annotation makes another container share it: remove one of the two",
            whole.container
        ));
    }
    Colocation::Required
}

#[cfg(test)]
mod tests;
