//! AWS virtual GPU: `k8s.amazonaws.com/vgpu`, slots of a GPU split in so many.

use super::super::Dialect;
use super::super::absent::Absent;
use super::lines::Lines;
use super::native::{self, MEMORY_LIMIT};
use super::{ContainerReading, Read};
use crate::model::{Bytes, CoresAsk, Part, Want};
use crate::pod::{Pod, Problem};
use crate::quantity::Quantity;
use crate::quote::short;
use crate::snapshot::MOST_MEMORY;

/// The resource.
pub(in crate::dialect) const VGPU: &str = "k8s.amazonaws.com/vgpu";

pub(super) fn read(lines: &mut Lines<'_>) -> Read {
    let Some(slots @ 1..) = lines.gpus(VGPU)? else { return Ok(None) };
    let memory = Absent::of(Dialect::Aws).memory(false);
    Ok(memory.map(|memory| {
        let part = Part { memory, cores: CoresAsk::Slots(slots), whole: false, ceiling: None };
        Want { count: 1, part }
    }))
}

/// What the pod's slots are held to on each of their GPUs, where it says so.
pub(super) fn memory_limit(pod: &Pod, problems: &mut Vec<Problem>) -> Option<Bytes> {
    let text = pod.annotations.get(MEMORY_LIMIT)?;
    let wrong = match text.parse().and_then(Quantity::to_count) {
        Ok(bytes) if native::LEAST <= Bytes(bytes) && Bytes(bytes) <= MOST_MEMORY => {
            return Some(Bytes(bytes));
        }
        Ok(_) => {
            let (least, text) = (native::LEAST, short(text));
            format!("\"{text}\" is no memory limit: write {least} to {MOST_MEMORY}, like \"8Gi\"")
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
