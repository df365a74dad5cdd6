//! HAMi: `nvidia.com/gpu` and friends.

use super::super::Dialect;
use super::Read;
use super::counted::Counted;
use super::lines::Lines;
use crate::model::Bytes;

pub(in crate::dialect) const GPU: &str = "nvidia.com/gpu";
pub(in crate::dialect) const MEMORY: &str = "nvidia.com/gpumem";
pub(in crate::dialect) const MEMORY_PERCENTAGE: &str = "nvidia.com/gpumem-percentage";
pub(in crate::dialect) const CORES: &str = "nvidia.com/gpucores";
pub(in crate::dialect) const RESOURCES: [&str; 4] = [GPU, MEMORY, MEMORY_PERCENTAGE, CORES];
/// What NVIDIA's own plugin calls slices of a partitioned GPU.
pub(super) const MIG: &str = "nvidia.com/mig-";
/// What it calls a GPU whose time is sliced.
pub(super) const TIME_SLICED: &str = "nvidia.com/gpu.shared";

/// Which of two shares goes first.
pub(super) const PRIORITY: &str = "nvidia.com/priority";

pub(super) const MODE: &str = "nvidia.com/vgpu-mode";
pub(super) const USE_TYPE: &str = "nvidia.com/use-gputype";
pub(super) const NO_USE_TYPE: &str = "nvidia.com/nouse-gputype";
pub(super) const USE_UUID: &str = "nvidia.com/use-gpuuuid";
pub(super) const NO_USE_UUID: &str = "nvidia.com/nouse-gpuuuid";
pub(super) const GPU_POLICY: &str = "hami.io/gpu-scheduler-policy";
pub(super) const NODE_POLICY: &str = "hami.io/node-scheduler-policy";

pub(super) fn read(lines: &mut Lines<'_>) -> Read {
    let spelling = Counted {
        dialect: Dialect::Hami,
        count: GPU,
        memory: MEMORY,
        percent: MEMORY_PERCENTAGE,
        cores: CORES,
        unit: 1 << 20,
        least: Bytes(1),
        percent_wins: false,
        full_is_whole: true,
        zero_is_absent: true,
    };
    spelling.read(lines)
}
