//! Values of the attributes that `cuDeviceGetAttribute` returns.

use super::super::session;
use super::Device;
use crate::profile::Architecture;
use crate::state::GpuSetting;
use partage_driver_api::cuda::*;

impl Device {
    /// Returns the value of an attribute, or `None` if the driver does not know it.
    pub(super) fn attribute(&self, attribute: CUdevice_attribute) -> Option<i32> {
        let (compute, memory, clocks) = (&self.profile.compute, &self.profile.memory, &self.profile.clocks);
        let architecture = self.profile.architecture;
        let hopper = i32::from(architecture >= Architecture::Hopper);
        let ampere = i32::from(architecture >= Architecture::Ampere);
        let of = |value: u32| i32::try_from(value).unwrap_or(i32::MAX);
        let large = |value: u64| i32::try_from(value).unwrap_or(i32::MAX);
        Some(match attribute {
            CU_DEVICE_ATTRIBUTE_MAX_THREADS_PER_BLOCK => of(compute.threads_per_block),
            CU_DEVICE_ATTRIBUTE_MAX_BLOCK_DIM_X | CU_DEVICE_ATTRIBUTE_MAX_BLOCK_DIM_Y => 1024,
            CU_DEVICE_ATTRIBUTE_MAX_BLOCK_DIM_Z => 64,
            CU_DEVICE_ATTRIBUTE_MAX_GRID_DIM_X => i32::MAX,
            CU_DEVICE_ATTRIBUTE_MAX_GRID_DIM_Y | CU_DEVICE_ATTRIBUTE_MAX_GRID_DIM_Z => 65_535,
            CU_DEVICE_ATTRIBUTE_MAX_SHARED_MEMORY_PER_BLOCK => of(compute.shared_per_block),
            CU_DEVICE_ATTRIBUTE_MAX_SHARED_MEMORY_PER_BLOCK_OPTIN => of(compute.shared_per_block_optin),
            CU_DEVICE_ATTRIBUTE_MAX_SHARED_MEMORY_PER_MULTIPROCESSOR => of(compute.shared_per_multiprocessor),
            CU_DEVICE_ATTRIBUTE_RESERVED_SHARED_MEMORY_PER_BLOCK => of(compute.shared_reserved_per_block),
            CU_DEVICE_ATTRIBUTE_TOTAL_CONSTANT_MEMORY => 64 << 10,
            CU_DEVICE_ATTRIBUTE_WARP_SIZE => of(compute.warp),
            CU_DEVICE_ATTRIBUTE_MAX_PITCH => i32::MAX,
            CU_DEVICE_ATTRIBUTE_MAX_REGISTERS_PER_BLOCK => of(compute.registers_per_block),
            CU_DEVICE_ATTRIBUTE_MAX_REGISTERS_PER_MULTIPROCESSOR => of(compute.registers_per_multiprocessor),
            CU_DEVICE_ATTRIBUTE_CLOCK_RATE => of(clocks.graphics_max) * 1000,
            CU_DEVICE_ATTRIBUTE_MEMORY_CLOCK_RATE => of(clocks.memory_max) * 1000,
            CU_DEVICE_ATTRIBUTE_TEXTURE_ALIGNMENT | CU_DEVICE_ATTRIBUTE_SURFACE_ALIGNMENT => 512,
            CU_DEVICE_ATTRIBUTE_TEXTURE_PITCH_ALIGNMENT => 32,
            CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT => of(compute.multiprocessors),
            CU_DEVICE_ATTRIBUTE_MAX_THREADS_PER_MULTIPROCESSOR => of(compute.threads_per_multiprocessor),
            CU_DEVICE_ATTRIBUTE_MAX_BLOCKS_PER_MULTIPROCESSOR => of(compute.blocks_per_multiprocessor),
            CU_DEVICE_ATTRIBUTE_ASYNC_ENGINE_COUNT => of(compute.copy_engines),
            CU_DEVICE_ATTRIBUTE_SINGLE_TO_DOUBLE_PRECISION_PERF_RATIO => of(compute.single_to_double),
            CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR => of(compute.capability / 10),
            CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR => of(compute.capability % 10),
            CU_DEVICE_ATTRIBUTE_COMPUTE_MODE => {
                self.state.setting(self.gpu, GpuSetting::ComputeMode).map_or(0, large)
            }
            CU_DEVICE_ATTRIBUTE_ECC_ENABLED => i32::from(memory.ecc),
            CU_DEVICE_ATTRIBUTE_GLOBAL_MEMORY_BUS_WIDTH => of(memory.bus_width),
            CU_DEVICE_ATTRIBUTE_L2_CACHE_SIZE => large(memory.l2),
            CU_DEVICE_ATTRIBUTE_MAX_PERSISTING_L2_CACHE_SIZE => large(memory.l2_persisting),
            CU_DEVICE_ATTRIBUTE_MAX_ACCESS_POLICY_WINDOW_SIZE if memory.l2_persisting > 0 => 128 << 20,
            CU_DEVICE_ATTRIBUTE_PCI_DOMAIN_ID => of(self.config.pci.domain),
            CU_DEVICE_ATTRIBUTE_PCI_BUS_ID => i32::from(self.config.pci.bus),
            CU_DEVICE_ATTRIBUTE_PCI_DEVICE_ID => i32::from(self.config.pci.device),
            CU_DEVICE_ATTRIBUTE_MULTI_GPU_BOARD_GROUP_ID => self.ordinal,
            CU_DEVICE_ATTRIBUTE_HOST_NUMA_ID => of(self.config.numa),
            CU_DEVICE_ATTRIBUTE_NUMA_ID => -1,

            CU_DEVICE_ATTRIBUTE_MAXIMUM_TEXTURE1D_WIDTH | CU_DEVICE_ATTRIBUTE_MAXIMUM_TEXTURE2D_WIDTH => {
                131_072
            }
            CU_DEVICE_ATTRIBUTE_MAXIMUM_TEXTURE2D_HEIGHT => 65_536,
            CU_DEVICE_ATTRIBUTE_MAXIMUM_TEXTURE1D_LINEAR_WIDTH => 1 << 28,
            CU_DEVICE_ATTRIBUTE_MAXIMUM_TEXTURE2D_LINEAR_WIDTH => 131_072,
            CU_DEVICE_ATTRIBUTE_MAXIMUM_TEXTURE2D_LINEAR_HEIGHT => 65_000,
            CU_DEVICE_ATTRIBUTE_MAXIMUM_TEXTURE2D_LINEAR_PITCH => 2_097_120,
            CU_DEVICE_ATTRIBUTE_MAXIMUM_TEXTURE3D_WIDTH_ALTERNATE
            | CU_DEVICE_ATTRIBUTE_MAXIMUM_TEXTURE3D_HEIGHT_ALTERNATE => 8192,
            CU_DEVICE_ATTRIBUTE_MAXIMUM_TEXTURE3D_DEPTH_ALTERNATE => 32_768,
            CU_DEVICE_ATTRIBUTE_MAXIMUM_TEXTURE3D_WIDTH
            | CU_DEVICE_ATTRIBUTE_MAXIMUM_TEXTURE3D_HEIGHT
            | CU_DEVICE_ATTRIBUTE_MAXIMUM_TEXTURE3D_DEPTH
            | CU_DEVICE_ATTRIBUTE_MAXIMUM_SURFACE3D_WIDTH
            | CU_DEVICE_ATTRIBUTE_MAXIMUM_SURFACE3D_HEIGHT
            | CU_DEVICE_ATTRIBUTE_MAXIMUM_SURFACE3D_DEPTH => 16_384,
            CU_DEVICE_ATTRIBUTE_MAXIMUM_TEXTURE2D_LAYERED_LAYERS
            | CU_DEVICE_ATTRIBUTE_MAXIMUM_TEXTURE1D_LAYERED_LAYERS
            | CU_DEVICE_ATTRIBUTE_MAXIMUM_SURFACE1D_LAYERED_LAYERS
            | CU_DEVICE_ATTRIBUTE_MAXIMUM_SURFACE2D_LAYERED_LAYERS => 2048,
            CU_DEVICE_ATTRIBUTE_MAXIMUM_TEXTURECUBEMAP_LAYERED_LAYERS
            | CU_DEVICE_ATTRIBUTE_MAXIMUM_SURFACECUBEMAP_LAYERED_LAYERS => 2046,
            CU_DEVICE_ATTRIBUTE_MAXIMUM_SURFACE2D_HEIGHT => 65_536,
            CU_DEVICE_ATTRIBUTE_MAXIMUM_SURFACE2D_WIDTH => 131_072,
            CU_DEVICE_ATTRIBUTE_MAXIMUM_TEXTURE2D_LAYERED_WIDTH
            | CU_DEVICE_ATTRIBUTE_MAXIMUM_TEXTURE2D_LAYERED_HEIGHT
            | CU_DEVICE_ATTRIBUTE_MAXIMUM_TEXTURE1D_LAYERED_WIDTH
            | CU_DEVICE_ATTRIBUTE_MAXIMUM_TEXTURE2D_GATHER_WIDTH
            | CU_DEVICE_ATTRIBUTE_MAXIMUM_TEXTURE2D_GATHER_HEIGHT
            | CU_DEVICE_ATTRIBUTE_MAXIMUM_TEXTURECUBEMAP_WIDTH
            | CU_DEVICE_ATTRIBUTE_MAXIMUM_TEXTURECUBEMAP_LAYERED_WIDTH
            | CU_DEVICE_ATTRIBUTE_MAXIMUM_SURFACE1D_WIDTH
            | CU_DEVICE_ATTRIBUTE_MAXIMUM_SURFACE1D_LAYERED_WIDTH
            | CU_DEVICE_ATTRIBUTE_MAXIMUM_SURFACE2D_LAYERED_WIDTH
            | CU_DEVICE_ATTRIBUTE_MAXIMUM_SURFACE2D_LAYERED_HEIGHT
            | CU_DEVICE_ATTRIBUTE_MAXIMUM_SURFACECUBEMAP_WIDTH
            | CU_DEVICE_ATTRIBUTE_MAXIMUM_SURFACECUBEMAP_LAYERED_WIDTH
            | CU_DEVICE_ATTRIBUTE_MAXIMUM_TEXTURE2D_MIPMAPPED_WIDTH
            | CU_DEVICE_ATTRIBUTE_MAXIMUM_TEXTURE2D_MIPMAPPED_HEIGHT
            | CU_DEVICE_ATTRIBUTE_MAXIMUM_TEXTURE1D_MIPMAPPED_WIDTH => 32_768,

            // Features that every simulated card supports.
            CU_DEVICE_ATTRIBUTE_GPU_OVERLAP
            | CU_DEVICE_ATTRIBUTE_CAN_MAP_HOST_MEMORY
            | CU_DEVICE_ATTRIBUTE_CONCURRENT_KERNELS
            | CU_DEVICE_ATTRIBUTE_UNIFIED_ADDRESSING
            | CU_DEVICE_ATTRIBUTE_CAN_TEX2D_GATHER
            | CU_DEVICE_ATTRIBUTE_STREAM_PRIORITIES_SUPPORTED
            | CU_DEVICE_ATTRIBUTE_GLOBAL_L1_CACHE_SUPPORTED
            | CU_DEVICE_ATTRIBUTE_LOCAL_L1_CACHE_SUPPORTED
            | CU_DEVICE_ATTRIBUTE_MANAGED_MEMORY
            | CU_DEVICE_ATTRIBUTE_CONCURRENT_MANAGED_ACCESS
            | CU_DEVICE_ATTRIBUTE_COMPUTE_PREEMPTION_SUPPORTED
            | CU_DEVICE_ATTRIBUTE_CAN_USE_HOST_POINTER_FOR_REGISTERED_MEM
            | CU_DEVICE_ATTRIBUTE_COOPERATIVE_LAUNCH
            | CU_DEVICE_ATTRIBUTE_COOPERATIVE_MULTI_DEVICE_LAUNCH
            | CU_DEVICE_ATTRIBUTE_HOST_REGISTER_SUPPORTED
            | CU_DEVICE_ATTRIBUTE_VIRTUAL_MEMORY_MANAGEMENT_SUPPORTED
            | CU_DEVICE_ATTRIBUTE_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR_SUPPORTED
            | CU_DEVICE_ATTRIBUTE_READ_ONLY_HOST_REGISTER_SUPPORTED
            | CU_DEVICE_ATTRIBUTE_MEMORY_POOLS_SUPPORTED
            | CU_DEVICE_ATTRIBUTE_MEMPOOL_SUPPORTED_HANDLE_TYPES
            | CU_DEVICE_ATTRIBUTE_UNIFIED_FUNCTION_POINTERS => 1,
            CU_DEVICE_ATTRIBUTE_CAN_USE_64_BIT_STREAM_MEM_OPS
            | CU_DEVICE_ATTRIBUTE_CAN_USE_STREAM_WAIT_VALUE_NOR => {
                i32::from(session::has_stream_memory_operations())
            }
            // Version 1 needs the parameter `NVreg_EnableStreamMemOPs=1` of the kernel module.
            CU_DEVICE_ATTRIBUTE_CAN_USE_STREAM_MEM_OPS_V1
            | CU_DEVICE_ATTRIBUTE_CAN_USE_64_BIT_STREAM_MEM_OPS_V1
            | CU_DEVICE_ATTRIBUTE_CAN_USE_STREAM_WAIT_VALUE_NOR_V1 => 0,
            CU_DEVICE_ATTRIBUTE_GENERIC_COMPRESSION_SUPPORTED => ampere,
            CU_DEVICE_ATTRIBUTE_CLUSTER_LAUNCH | CU_DEVICE_ATTRIBUTE_TENSOR_MAP_ACCESS_SUPPORTED => hopper,
            CU_DEVICE_ATTRIBUTE_MEM_SYNC_DOMAIN_COUNT => 1 + 3 * hopper,
            // Unsupported by the simulation: display, sparse arrays, multicast, direct RDMA, host page tables.
            0 | 135.. => return None,
            _ => 0,
        })
    }
}
