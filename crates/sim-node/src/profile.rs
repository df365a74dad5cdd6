//! The GPU models that can be simulated, with the properties of the real ones.
//!
//! A [`GpuProfile`] has all properties of a GPU that programs can read and that do not change at run time. Other models
//! are described by a JSON file that names the nearest known one and overrides some of its fields
//! ([`GpuProfile::from_json`]).

mod cards;
mod profile_file;

pub use cards::*;
pub use profile_file::ProfileError;

use serde::{Deserialize, Serialize};
use std::borrow::Cow;

/// A string of a profile, either compiled in or read from a file.
pub type ProfileText = Cow<'static, str>;

/// A GPU model. Sizes are in bytes, clocks in MHz, power in milliwatts, temperatures in degrees Celsius.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
pub struct GpuProfile {
    /// The model name that the command line accepts: `A100-SXM4-40GB`.
    pub model: ProfileText,
    /// The product name that the driver reports: `NVIDIA A100-SXM4-40GB`.
    pub name: ProfileText,
    /// The brand that NVML reports.
    pub brand: GpuBrand,
    /// The generation of the chip.
    pub architecture: Architecture,
    /// The server that it is usually installed in.
    pub machine: ServerModel,
    /// Multiprocessors and their limits.
    pub compute: ComputeSpec,
    /// Sizes of memory and caches in bytes, and the width of the bus.
    pub memory: MemorySpec,
    /// Clock rates in MHz.
    pub clocks: ClockSpec,
    /// Power limits in milliwatts.
    pub power: PowerSpec,
    /// Temperatures and thresholds in degrees Celsius.
    pub temperature: TemperatureSpec,
    /// PCI IDs and the PCIe link.
    pub pci: PciSpec,
    /// NVLinks; absent if the GPU has none.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub nvlink: Option<NvLinkSpec>,
    /// Part numbers and firmware versions.
    pub board: BoardSpec,
    /// Whether NVML reports a fan speed, even if it is 0 %.
    pub fan: bool,
    /// The maximum number of MIG instances; 0 if MIG is not supported.
    pub mig_instances: u32,
    /// The number of video encoders.
    pub encoders: u32,
    /// The number of video decoders.
    pub decoders: u32,
    /// The performance state while idle: 8 for P8, 0 for GPUs that never leave P0.
    pub idle_state: u32,
    /// The sampling period of NVML's utilization, in microseconds.
    pub sample_period_micros: u32,
}

/// The brands that NVML reports for data center GPUs.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub enum GpuBrand {
    /// NVML reports `NVML_BRAND_TESLA`, as for V100.
    Tesla,
    /// NVML reports `NVML_BRAND_NVIDIA`, as for A100.
    Nvidia,
}

impl GpuBrand {
    /// Returns the value of `nvmlBrandType_t`.
    pub fn nvml(self) -> u32 {
        match self {
            GpuBrand::Tesla => 2,
            GpuBrand::Nvidia => 14,
        }
    }
}

/// Generations of GPU chips, oldest first.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub enum Architecture {
    /// The generation of V100.
    Volta,
    /// The generation of T4.
    Turing,
    /// The generation of A10, A30 and A100.
    Ampere,
    /// The generation of L4 and L40S.
    Ada,
    /// The generation of H100 and H200.
    Hopper,
}

impl Architecture {
    /// Returns the value of `nvmlDeviceArchitecture_t`.
    pub fn nvml(self) -> u32 {
        match self {
            Architecture::Volta => 5,
            Architecture::Turing => 6,
            Architecture::Ampere => 7,
            Architecture::Ada => 8,
            Architecture::Hopper => 9,
        }
    }

    /// Returns whether faulty memory is replaced by row remapping. Older GPUs retire whole pages.
    pub fn remaps_rows(self) -> bool {
        self >= Architecture::Ampere
    }
}

/// Server models, which determine the PCI addresses, NUMA nodes and links of a node's GPUs.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub enum ServerModel {
    /// Eight V100 in a hybrid cube mesh of NVLinks, two sockets.
    Dgx1,
    /// Eight A100 behind NVSwitches, eight NUMA nodes.
    HgxA100,
    /// Eight H100 behind NVSwitches, two sockets.
    HgxH100,
    /// PCIe cards in slots, two per PCIe switch, four per socket.
    Slots,
}

/// The multiprocessors of a GPU and their limits.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
pub struct ComputeSpec {
    /// The compute capability: 80 for 8.0.
    pub capability: u32,
    /// The number of streaming multiprocessors.
    pub multiprocessors: u32,
    /// CUDA cores per multiprocessor.
    pub cores_per_multiprocessor: u32,
    /// The maximum number of resident threads per multiprocessor.
    pub threads_per_multiprocessor: u32,
    /// The maximum number of resident blocks per multiprocessor.
    pub blocks_per_multiprocessor: u32,
    /// The maximum number of threads per block.
    pub threads_per_block: u32,
    /// The number of threads of a warp.
    pub warp: u32,
    /// 32-bit registers per multiprocessor.
    pub registers_per_multiprocessor: u32,
    /// The maximum number of 32-bit registers per block.
    pub registers_per_block: u32,
    /// Shared memory per multiprocessor.
    pub shared_per_multiprocessor: u32,
    /// The default limit of shared memory per block.
    pub shared_per_block: u32,
    /// The opt-in limit of shared memory per block.
    pub shared_per_block_optin: u32,
    /// Shared memory that the driver reserves in each block.
    pub shared_reserved_per_block: u32,
    /// The number of copy engines that run concurrently with kernels.
    pub copy_engines: u32,
    /// The ratio of single to double precision performance.
    pub single_to_double: u32,
}

/// The memory and caches of a GPU.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
pub struct MemorySpec {
    /// The total memory that NVML reports.
    pub total: u64,
    /// The memory that the driver reserves (NVML's `reserved`). CUDA's total is the difference.
    pub reserved: u64,
    /// The size of BAR1, through which the host maps GPU memory.
    pub bar1: u64,
    /// The width of the memory bus in bits.
    pub bus_width: u32,
    /// The size of the L2 cache.
    pub l2: u64,
    /// The part of the L2 cache that can be set aside for persisting accesses.
    pub l2_persisting: u64,
    /// The memory that the context of a process uses before the program allocates any.
    pub context: u64,
    /// Whether ECC is supported and enabled.
    pub ecc: bool,
}

impl ComputeSpec {
    /// Returns the major and minor compute capability: 8 and 0.
    pub fn major_and_minor(&self) -> (i32, i32) {
        ((self.capability / 10) as i32, (self.capability % 10) as i32)
    }
}

impl MemorySpec {
    /// Returns the memory that programs can allocate, which CUDA reports as the total.
    pub fn usable(&self) -> u64 {
        self.total.saturating_sub(self.reserved)
    }
}

/// The clock rates of a GPU, in MHz.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
pub struct ClockSpec {
    /// The maximum of the graphics and SM clocks.
    pub graphics_max: u32,
    /// The default of the graphics and SM clocks.
    pub graphics_default: u32,
    /// The graphics and SM clocks while idle.
    pub graphics_idle: u32,
    /// The maximum of the memory clock, which is also its default.
    pub memory_max: u32,
    /// The memory clock while idle.
    pub memory_idle: u32,
    /// The maximum of the video clock.
    pub video_max: u32,
    /// The video clock while idle.
    pub video_idle: u32,
}

/// The power limits of a GPU, in milliwatts.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
pub struct PowerSpec {
    /// The default power limit.
    pub default_limit: u32,
    /// The minimum power limit that can be set.
    pub min_limit: u32,
    /// The maximum power limit that can be set.
    pub max_limit: u32,
    /// The power draw while idle.
    pub idle: u32,
}

/// The temperatures of a GPU and their thresholds, in degrees Celsius.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
pub struct TemperatureSpec {
    /// The temperature while idle.
    pub idle: u32,
    /// The temperature under full load.
    pub load: u32,
    /// The maximum operating temperature.
    pub max_operating: u32,
    /// The threshold of thermal slowdown.
    pub slowdown: u32,
    /// The threshold of thermal shutdown.
    pub shutdown: u32,
    /// The maximum operating temperature of the memory; absent if the memory has no sensor.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub memory_max: Option<u32>,
}

/// The PCI IDs and the PCIe link of a GPU.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
pub struct PciSpec {
    /// The combined device and vendor ID as NVML reports it: `0x20B010DE`.
    pub device: u32,
    /// The combined subsystem and subsystem vendor ID.
    pub subsystem: u32,
    /// The maximum PCIe generation.
    pub generation: u32,
    /// The PCIe generation of the link while idle.
    pub generation_idle: u32,
    /// The number of PCIe lanes.
    pub width: u32,
}

/// The NVLinks of a GPU.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
pub struct NvLinkSpec {
    /// The NVLink version as NVML reports it.
    pub version: u32,
    /// The number of links.
    pub links: u32,
    /// The bandwidth of one link per direction, in MB/s.
    pub megabytes_per_second: u32,
}

/// The part numbers and firmware versions of a board.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
pub struct BoardSpec {
    /// The part number of the board.
    pub part: ProfileText,
    /// The part number of the chip.
    pub chip: ProfileText,
    /// The version of the VBIOS.
    pub vbios: ProfileText,
    /// The version of the inforom image.
    pub inforom: ProfileText,
    /// The version of the inforom's OEM object.
    pub inforom_oem: ProfileText,
    /// The version of the inforom's ECC object.
    pub inforom_ecc: ProfileText,
}

impl GpuProfile {
    /// All known GPU models, by ascending memory.
    pub const ALL: [&'static GpuProfile; 12] = [
        &T4,
        &V100_SXM2_16GB,
        &A10,
        &L4,
        &A30,
        &V100_SXM2_32GB,
        &A100_PCIE_40GB,
        &A100_SXM4_40GB,
        &L40S,
        &H100_SXM5_80GB,
        &A100_SXM4_80GB,
        &H200_SXM5_141GB,
    ];

    /// Returns the profile with this model or product name, ignoring case.
    pub fn named(text: &str) -> Option<&'static GpuProfile> {
        let matches = |name: &str| name.eq_ignore_ascii_case(text);
        GpuProfile::ALL.into_iter().find(|card| matches(&card.model) || matches(&card.name))
    }
}
