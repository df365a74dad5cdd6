//! AWS virtual GPU: `k8s.amazonaws.com/vgpu`, slots of a GPU that is divided into a fixed number of them.

use super::super::Dialect;
use super::super::defaults::DialectDefaults;
use super::memory::MAX_MEMORY;
use super::native::{self, MEMORY_LIMIT};
use super::resource_list::ResourceList;
use super::{ContainerReading, WantResult};
use crate::model::{Bytes, CoresAsk, MAX_GPUS_PER_CONTAINER, MAX_SLOTS, ShareAsk, WantedGpus};
use crate::pod::{PodManifest, Problem};
use crate::quantity::Quantity;
use crate::truncate::shorten;

/// The resource for slots.
pub(in crate::dialect) const VGPU: &str = "k8s.amazonaws.com/vgpu";
/// Maximum number of slots per container, on nodes with the maximum number of slots per GPU.
const MAX_SLOTS_PER_CONTAINER: u32 = MAX_GPUS_PER_CONTAINER * MAX_SLOTS;

/// Reads the request of one container.
pub(super) fn read(list: &mut ResourceList<'_>) -> WantResult {
    let Some(slots @ 1..) = list.count(VGPU)? else { return Ok(None) };
    let slots = match u32::try_from(slots) {
        Ok(slots @ ..=MAX_SLOTS_PER_CONTAINER) => slots,
        _ => {
            let message = format!(
                "{slots} slots are more than one container can have: request at most {MAX_SLOTS_PER_CONTAINER}, {MAX_GPUS_PER_CONTAINER} GPUs with {MAX_SLOTS} slots each"
            );
            return Err(list.problem(VGPU, message));
        }
    };
    let memory = DialectDefaults::of(Dialect::Aws).memory(false);
    Ok(memory.map(|memory| {
        let share = ShareAsk { memory, cores: CoresAsk::Slots(slots), whole: false, ceiling: None };
        WantedGpus { count: 1, share }
    }))
}

/// Returns the memory limit of the pod's slots on each GPU, if an annotation sets one.
pub(super) fn memory_limit(pod: &PodManifest, problems: &mut Vec<Problem>) -> Option<Bytes> {
    let text = pod.annotations.get(MEMORY_LIMIT)?;
    let wrong = match text.parse().and_then(Quantity::to_count) {
        Ok(bytes) if native::MIN_MEMORY <= Bytes(bytes) && Bytes(bytes) <= MAX_MEMORY => {
            return Some(Bytes(bytes));
        }
        Ok(_) => {
            let text = shorten(text);
            let min = native::MIN_MEMORY;
            format!("\"{text}\" is not a valid memory limit: write {min} to {MAX_MEMORY}, like \"8Gi\"")
        }
        Err(error) => error.to_string(),
    };
    problems.push(Problem::of_pod(MEMORY_LIMIT, wrong));
    None
}

/// Reports a memory limit annotation on a pod without slots. All other dialects request memory per container, so the
/// annotation could contradict them.
pub(super) fn check_limit_used(
    pod: &PodManifest,
    containers: &[ContainerReading],
    problems: &mut Vec<Problem>,
) {
    let asks = containers.iter().any(|container| container.want.is_some());
    let aws = containers.iter().any(|container| container.dialect == Some(Dialect::Aws));
    if pod.annotations.contains_key(MEMORY_LIMIT) && asks && !aws {
        let memory = native::MEMORY;
        let message = format!("applies to {VGPU} only: request memory as a resource, like {memory}");
        problems.push(Problem::of_pod(MEMORY_LIMIT, message));
    }
}
