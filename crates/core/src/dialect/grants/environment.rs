//! Environment variables that are common to several dialects.

use super::{PlacedGrant, ShareOnGpu};
use std::collections::{BTreeMap, BTreeSet};

/// Sets the GPUs that the container sees. UUIDs are used in every dialect, because indexes change when a GPU is lost.
pub(super) fn visible_devices(placed: &PlacedGrant<'_>, env: &mut BTreeMap<String, String>) {
    let mut seen = BTreeSet::new();
    let uuids = placed.shares.iter().map(|on_gpu| on_gpu.gpu.uuid.as_str()).filter(|uuid| seen.insert(*uuid));
    env.insert("NVIDIA_VISIBLE_DEVICES".into(), comma_list(uuids));
}

/// Sets the limits of the HAMi enforcement library for programs that read them. Partage's enforcement does not use them.
pub(super) fn enforcement_limits(placed: &PlacedGrant<'_>, env: &mut BTreeMap<String, String>) {
    for (position, on_gpu) in placed.shares.iter().enumerate() {
        if let Some(memory) = on_gpu.share.memory_bytes {
            env.insert(format!("CUDA_DEVICE_MEMORY_LIMIT_{position}"), format!("{}m", memory.0 >> 20));
        }
    }
    let percent = placed.shares.first().map_or(0, ShareOnGpu::percent);
    env.insert("CUDA_DEVICE_SM_LIMIT".into(), percent.to_string());
}

/// Joins items with commas.
pub(super) fn comma_list<T: ToString>(items: impl Iterator<Item = T>) -> String {
    items.map(|item| item.to_string()).collect::<Vec<_>>().join(",")
}
