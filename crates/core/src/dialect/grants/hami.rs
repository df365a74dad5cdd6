//! HAMi: the environment of its enforcement library. HAMi's own record is read but never written.

use super::volcano::{DeviceListRecord, ResourceNames, unit};
use super::{EncodedGrant, GrantError, PlacedGrant, RecordReader, environment};
use crate::dialect::asks::hami::{CORES, GPU, MEMORY, MEMORY_PERCENTAGE, RESOURCES};
use crate::model::Grant;

/// The annotation with HAMi's record, a device list.
pub const IDS: &str = "hami.io/vgpu-devices-allocated";
/// The annotation with the node of the record.
pub const NODE: &str = "hami.io/vgpu-node";

/// Adds the environment of the containers.
pub(super) fn write(placed: &[&PlacedGrant<'_>], written: &mut EncodedGrant) {
    for placed in placed {
        environment::enforcement_limits(placed, written.env_of(placed));
    }
}

/// Decodes HAMi's record. It lacks the same details as Volcano's. Its memory is always in MiB.
pub(super) fn read(record: &RecordReader<'_>) -> Result<Option<Vec<Grant>>, GrantError> {
    let Some(text) = record.annotation(IDS)? else { return Ok(None) };
    let names = ResourceNames { count: GPU, memory: MEMORY, percent: MEMORY_PERCENTAGE, cores: CORES };
    let list = DeviceListRecord { key: IDS, node_key: NODE, text, unit: unit(1), names };
    list.read(record, &[record.requesting(&RESOURCES)?])
}
