//! AWS virtual GPU: `k8s.amazonaws.com/vgpu`, slots of a GPU split in so many.

use super::super::Dialect;
use super::super::absent::Absent;
use super::lines::Lines;
use super::memory::MOST;
use super::native::{self, MEMORY_LIMIT};
use super::{ContainerReading, Read};
use crate::model::{Bytes, CoresAsk, MAX_GPUS_PER_CONTAINER, MAX_SLOTS, ShareAsk, WantedGpus};
use crate::pod::{Pod, Problem};
use crate::quantity::Quantity;
use crate::quote::short;

/// The resource.
pub(in crate::dialect) const VGPU: &str = "k8s.amazonaws.com/vgpu";
/// Maximum number of slots per container, on nodes that split their GPUs in as many as possible.
const MAX_SLOTS_PER_CONTAINER: u32 = MAX_GPUS_PER_CONTAINER * MAX_SLOTS;

pub(super) fn read(lines: &mut Lines<'_>) -> Read {
    let Some(slots @ 1..) = lines.count(VGPU)? else { return Ok(None) };
    let slots = match u32::try_from(slots) {
        Ok(slots @ ..=MAX_SLOTS_PER_CONTAINER) => slots,
        _ => {
            let message = format!(
                "{slots} slots are more than one container can have: ask for {MAX_SLOTS_PER_CONTAINER} at the most, {MAX_GPUS_PER_CONTAINER} GPUs of {MAX_SLOTS}"
            );
            return Err(lines.problem(VGPU, message));
        }
    };
    let memory = Absent::of(Dialect::Aws).memory(false);
    Ok(memory.map(|memory| {
        let part = ShareAsk { memory, cores: CoresAsk::Slots(slots), whole: false, ceiling: None };
        WantedGpus { count: 1, part }
    }))
}

/// What the pod's slots are held to on each of their GPUs, where it says so.
pub(super) fn memory_limit(pod: &Pod, problems: &mut Vec<Problem>) -> Option<Bytes> {
    let text = pod.annotations.get(MEMORY_LIMIT)?;
    let wrong = match text.parse().and_then(Quantity::to_count) {
        Ok(bytes) if native::LEAST <= Bytes(bytes) && Bytes(bytes) <= MOST => {
            return Some(Bytes(bytes));
        }
        Ok(_) => {
            let (least, text) = (native::LEAST, short(text));
            format!("\"{text}\" is no memory limit: write {least} to {MOST}, like \"8Gi\"")
        }
        Err(error) => error.to_string(),
    };
    problems.push(Problem::of_pod(MEMORY_LIMIT, wrong));
    None
}

/// Every other dialect says its memory per container, so the annotation would be a second voice there.
pub(super) fn check_limit_used(pod: &Pod, containers: &[ContainerReading], problems: &mut Vec<Problem>) {
    let asks = containers.iter().any(|container| container.want.is_some());
    let aws = containers.iter().any(|container| container.dialect == Some(Dialect::Aws));
    if pod.annotations.contains_key(MEMORY_LIMIT) && asks && !aws {
        let memory = native::MEMORY;
        let message =
            format!("limits the memory of {VGPU} only: ask for memory as a resource, like {memory}");
        problems.push(Problem::of_pod(MEMORY_LIMIT, message));
    }
}
