//! The Volcano vGPU dialect: `volcano.sh/vgpu-*`.

use super::super::{Dialect, DialectSettings};
use super::WantResult;
use super::counted_spelling::CountedSpelling;
use super::resource_list::ResourceList;
use crate::model::Bytes;

pub(in crate::dialect) const NUMBER: &str = "volcano.sh/vgpu-number";
pub(in crate::dialect) const MEMORY: &str = "volcano.sh/vgpu-memory";
pub(in crate::dialect) const MEMORY_PERCENTAGE: &str = "volcano.sh/vgpu-memory-percentage";
pub(in crate::dialect) const CORES: &str = "volcano.sh/vgpu-cores";
pub(in crate::dialect) const RESOURCES: [&str; 4] = [NUMBER, MEMORY, MEMORY_PERCENTAGE, CORES];

pub(super) const USE_UUID: &str = "volcano.sh/vgpu-use-gpuuuid";
pub(super) const NO_USE_UUID: &str = "volcano.sh/vgpu-nouse-gpuuuid";
pub(super) const MODE: &str = "volcano.sh/vgpu-mode";
pub(super) const PODGROUP_POLICY: &str = "volcano.sh/vgpu-podgroup-policy";

/// Reads the request of one container.
pub(super) fn read(list: &mut ResourceList<'_>, settings: &DialectSettings) -> WantResult {
    let spelling = CountedSpelling {
        dialect: Dialect::Volcano,
        count: NUMBER,
        memory: MEMORY,
        percent: MEMORY_PERCENTAGE,
        cores: CORES,
        unit: u64::from(settings.volcano_memory_factor) << 20,
        min_memory: Bytes(1),
        percent_wins: true,
        full_is_whole: true,
        zero_is_absent: true,
    };
    spelling.read(list)
}
