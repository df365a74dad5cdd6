//! HAMi: the environment of its enforcement library. Its own record is read, never written.

use super::volcano::{List, Names, unit};
use super::{GrantError, Placed, Record, Written, environment};
use crate::dialect::asks::hami::{CORES, GPU, MEMORY, MEMORY_PERCENTAGE, RESOURCES};
use crate::model::Grant;

/// HAMi's record: a device list.
pub const IDS: &str = "hami.io/vgpu-devices-allocated";
/// The node it is for.
pub const NODE: &str = "hami.io/vgpu-node";

pub(super) fn write(placed: &[&Placed<'_>], written: &mut Written) {
    for placed in placed {
        environment::enforcement_limits(placed, written.env_of(placed));
    }
}

/// Reads HAMi's record, which has the losses of Volcano's. Its memory is always in MiB.
pub(super) fn read(record: &Record<'_>) -> Result<Option<Vec<Grant>>, GrantError> {
    let Some(text) = record.annotation(IDS)? else { return Ok(None) };
    let names = Names { count: GPU, memory: MEMORY, percent: MEMORY_PERCENTAGE, cores: CORES };
    let list = List { key: IDS, node_key: NODE, text, unit: unit(1), names };
    list.read(record, &[record.asking(&RESOURCES)?])
}
