//! HAMi: `nvidia.com/gpu`, `nvidia.com/gpumem`, `nvidia.com/gpumem-percentage` and `nvidia.com/gpucores`.

use super::super::Dialect;
use super::WantResult;
use super::counted_spelling::CountedSpelling;
use super::resource_list::ResourceList;
use crate::model::Bytes;

pub(in crate::dialect) const GPU: &str = "nvidia.com/gpu";
pub(in crate::dialect) const MEMORY: &str = "nvidia.com/gpumem";
pub(in crate::dialect) const MEMORY_PERCENTAGE: &str = "nvidia.com/gpumem-percentage";
pub(in crate::dialect) const CORES: &str = "nvidia.com/gpucores";
pub(in crate::dialect) const RESOURCES: [&str; 4] = [GPU, MEMORY, MEMORY_PERCENTAGE, CORES];
/// Prefix of the resources for MIG devices in NVIDIA's device plugin.
pub(super) const MIG: &str = "nvidia.com/mig-";
/// The resource for a time-sliced GPU in NVIDIA's device plugin.
pub(super) const TIME_SLICED: &str = "nvidia.com/gpu.shared";

/// The resource for a priority among the shares of a GPU.
pub(super) const PRIORITY: &str = "nvidia.com/priority";

pub(super) const MODE: &str = "nvidia.com/vgpu-mode";
pub(super) const USE_TYPE: &str = "nvidia.com/use-gputype";
pub(super) const NO_USE_TYPE: &str = "nvidia.com/nouse-gputype";
pub(super) const USE_UUID: &str = "nvidia.com/use-gpuuuid";
pub(super) const NO_USE_UUID: &str = "nvidia.com/nouse-gpuuuid";
pub(super) const GPU_POLICY: &str = "hami.io/gpu-scheduler-policy";
pub(super) const NODE_POLICY: &str = "hami.io/node-scheduler-policy";

/// Reads the request of one container.
pub(super) fn read(list: &mut ResourceList<'_>) -> WantResult {
    let spelling = CountedSpelling {
        dialect: Dialect::Hami,
        count: GPU,
        memory: MEMORY,
        percent: MEMORY_PERCENTAGE,
        cores: CORES,
        unit: 1 << 20,
        min_memory: Bytes(1),
        percent_wins: false,
        full_is_whole: true,
        zero_is_absent: true,
    };
    spelling.read(list)
}
