//! The environment that containers of more than one dialect get.

use super::{Placed, PlacedShare};
use std::collections::{BTreeMap, BTreeSet};

/// Which GPUs the container sees, by UUID in every dialect: an index means another GPU after a card is lost.
pub(super) fn visible_devices(placed: &Placed<'_>, env: &mut BTreeMap<String, String>) {
    let mut seen = BTreeSet::new();
    let uuids = placed.parts.iter().map(|part| part.gpu.uuid.as_str()).filter(|uuid| seen.insert(*uuid));
    env.insert("NVIDIA_VISIBLE_DEVICES".into(), comma_list(uuids));
}

/// The limits that users of the HAMi enforcement library read. Ours does not depend on them.
pub(super) fn enforcement_limits(placed: &Placed<'_>, env: &mut BTreeMap<String, String>) {
    for (position, part) in placed.parts.iter().enumerate() {
        if let Some(memory) = part.share.memory_bytes {
            env.insert(format!("CUDA_DEVICE_MEMORY_LIMIT_{position}"), format!("{}m", memory.0 >> 20));
        }
    }
    let percent = placed.parts.first().map_or(0, PlacedShare::percent);
    env.insert("CUDA_DEVICE_SM_LIMIT".into(), percent.to_string());
}

/// Items with commas between them.
pub(super) fn comma_list<T: ToString>(items: impl Iterator<Item = T>) -> String {
    items.map(|item| item.to_string()).collect::<Vec<_>>().join(",")
}
