//! AWS virtual GPU: `k8s.amazonaws.com/vgpu`, slots of a GPU split in so many.

use super::super::Dialect;
use super::super::absent::Absent;
use super::Read;
use super::lines::Lines;
use crate::model::{CoresAsk, Part, Want};

pub(super) const VGPU: &str = "k8s.amazonaws.com/vgpu";

pub(super) fn read(lines: &mut Lines<'_>) -> Read {
    let Some(slots @ 1..) = lines.gpus(VGPU)? else { return Ok(None) };
    let memory = Absent::of(Dialect::Aws).memory(false);
    Ok(memory.map(|memory| {
        let part = Part { memory, cores: CoresAsk::Slots(slots), whole: false, ceiling: None };
        Want { count: 1, part }
    }))
}
