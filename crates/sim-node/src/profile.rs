//! The cards that can be simulated, with the figures of the real ones.
//!
//! A [`Profile`] is everything a program can read of a card that does not change while it runs. A card that is not
//! here is described by a file that names the nearest one and says what differs ([`Profile::from_json`]).

mod cards;
mod file;

pub use cards::*;
pub use file::ProfileError;

use serde::{Deserialize, Serialize};
use std::borrow::Cow;

/// A text that is part of the program or was read from a file.
pub type Text = Cow<'static, str>;

/// A card. Sizes are in bytes, clocks in MHz, power in milliwatts, temperatures in degrees Celsius.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
pub struct Profile {
    /// How people call it on a command line: `A100-SXM4-40GB`.
    pub model: Text,
    /// Its product name as the driver prints it: `NVIDIA A100-SXM4-40GB`.
    pub name: Text,
    /// Its brand as NVML says it.
    pub brand: Brand,
    /// The generation of its chip.
    pub architecture: Architecture,
    /// The server it usually sits in.
    pub machine: Machine,
    /// What it computes with.
    pub compute: Compute,
    /// What it stores in.
    pub memory: Memory,
    /// How fast it runs.
    pub clocks: Clocks,
    /// What it draws.
    pub power: Power,
    /// How warm it is and may get.
    pub temperature: Temperature,
    /// Its place on the PCI bus.
    pub pci: Pci,
    /// Its NVLinks; absent = it has none.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub nvlink: Option<NvLink>,
    /// What is printed on its board.
    pub board: Board,
    /// True where NVML answers a fan speed, be it 0 %.
    pub fan: bool,
    /// The most MIG instances it can be cut in; 0 = it cannot.
    pub mig_instances: u32,
    /// Video encoders.
    pub encoders: u32,
    /// Video decoders.
    pub decoders: u32,
    /// The performance state it idles in: 8 for P8, 0 for cards that never leave P0.
    pub idle_state: u32,
    /// How often NVML's utilisation is sampled, in microseconds.
    pub sample_period_micros: u32,
}

/// The brands NVML tells apart, as far as data centre cards have them.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub enum Brand {
    /// `NVML_BRAND_TESLA`.
    Tesla,
    /// `NVML_BRAND_NVIDIA`.
    Nvidia,
}

impl Brand {
    /// NVML's number for it.
    pub fn nvml(self) -> u32 {
        match self {
            Brand::Tesla => 2,
            Brand::Nvidia => 14,
        }
    }
}

/// The generations of chips.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub enum Architecture {
    /// V100.
    Volta,
    /// T4.
    Turing,
    /// A10, A30, A100.
    Ampere,
    /// L4, L40S.
    Ada,
    /// H100, H200.
    Hopper,
}

impl Architecture {
    /// NVML's number for it.
    pub fn nvml(self) -> u32 {
        match self {
            Architecture::Volta => 5,
            Architecture::Turing => 6,
            Architecture::Ampere => 7,
            Architecture::Ada => 8,
            Architecture::Hopper => 9,
        }
    }

    /// Whether broken memory is replaced row by row; older cards retire whole pages.
    pub fn remaps_rows(self) -> bool {
        self >= Architecture::Ampere
    }
}

/// The servers that cards usually sit in; they decide addresses, NUMA nodes and links of a node.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub enum Machine {
    /// Eight V100 in a hybrid mesh of NVLinks, two sockets.
    Dgx1,
    /// Eight A100 behind NVSwitches, eight NUMA nodes.
    HgxA100,
    /// Eight H100 behind NVSwitches, two sockets.
    HgxH100,
    /// Cards in slots, two to a PCIe switch, four to a socket.
    Slots,
}

/// What a card computes with.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
pub struct Compute {
    /// Compute capability: 80 for 8.0.
    pub capability: u32,
    /// Streaming multiprocessors.
    pub multiprocessors: u32,
    /// CUDA cores of one of them.
    pub cores_per_multiprocessor: u32,
    /// Threads that one of them holds at a time.
    pub threads_per_multiprocessor: u32,
    /// Blocks that one of them holds at a time.
    pub blocks_per_multiprocessor: u32,
    /// Threads of the largest block.
    pub threads_per_block: u32,
    /// Threads of a warp.
    pub warp: u32,
    /// 32-bit registers of one multiprocessor.
    pub registers_per_multiprocessor: u32,
    /// 32-bit registers that one block can have.
    pub registers_per_block: u32,
    /// Shared memory of one multiprocessor.
    pub shared_per_multiprocessor: u32,
    /// Shared memory that a block has without asking for more.
    pub shared_per_block: u32,
    /// Shared memory that a block can ask for.
    pub shared_per_block_optin: u32,
    /// Shared memory of every block that the driver keeps for itself.
    pub shared_reserved_per_block: u32,
    /// Copies that run beside kernels.
    pub copy_engines: u32,
    /// Single precision operations for one in double precision.
    pub single_to_double: u32,
}

/// What a card stores in.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
pub struct Memory {
    /// All of it, as NVML says.
    pub total: u64,
    /// What the driver keeps for itself: NVML's `reserved`. CUDA's total is what is left.
    pub reserved: u64,
    /// The window that the host sees it through.
    pub bar1: u64,
    /// Width of its bus in bits.
    pub bus_width: u32,
    /// L2 cache.
    pub l2: u64,
    /// The part of the L2 cache that can be set aside for data that stays.
    pub l2_persisting: u64,
    /// What a context of one process takes before the program allocates anything.
    pub context: u64,
    /// Whether errors are corrected.
    pub ecc: bool,
}

impl Compute {
    /// Compute capability as CUDA says it: 8 and 0.
    pub fn major_and_minor(&self) -> (i32, i32) {
        ((self.capability / 10) as i32, (self.capability % 10) as i32)
    }
}

impl Memory {
    /// What CUDA calls the total: what programs can have.
    pub fn usable(&self) -> u64 {
        self.total.saturating_sub(self.reserved)
    }
}

/// How fast a card runs, in MHz.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
pub struct Clocks {
    /// Graphics and multiprocessors at most.
    pub graphics_max: u32,
    /// Graphics and multiprocessors by default.
    pub graphics_default: u32,
    /// Graphics and multiprocessors at rest.
    pub graphics_idle: u32,
    /// Memory at most, which is also its default.
    pub memory_max: u32,
    /// Memory at rest.
    pub memory_idle: u32,
    /// Video at most.
    pub video_max: u32,
    /// Video at rest.
    pub video_idle: u32,
}

/// What a card draws, in milliwatts.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
pub struct Power {
    /// The limit it comes with.
    pub default_limit: u32,
    /// The least limit it can be set to.
    pub min_limit: u32,
    /// The most.
    pub max_limit: u32,
    /// What it draws at rest.
    pub idle: u32,
}

/// How warm a card is and may get, in degrees Celsius.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
pub struct Temperature {
    /// At rest.
    pub idle: u32,
    /// Under full load.
    pub load: u32,
    /// What it should stay below.
    pub max_operating: u32,
    /// Where it slows down.
    pub slowdown: u32,
    /// Where it stops.
    pub shutdown: u32,
    /// What its memory should stay below; absent where the memory has no sensor.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub memory_max: Option<u32>,
}

/// A card's place on the PCI bus.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
pub struct Pci {
    /// Device and vendor as NVML prints them: `0x20B010DE`.
    pub device: u32,
    /// Subsystem and its vendor.
    pub subsystem: u32,
    /// The newest PCIe generation it speaks.
    pub generation: u32,
    /// The generation that its link falls back to at rest.
    pub generation_idle: u32,
    /// Lanes.
    pub width: u32,
}

/// A card's NVLinks.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
pub struct NvLink {
    /// The version as NVML numbers it.
    pub version: u32,
    /// How many the card has.
    pub links: u32,
    /// What one carries in each direction, in MB/s.
    pub megabytes_per_second: u32,
}

/// What is printed on a card's board.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
pub struct Board {
    /// Its part number.
    pub part: Text,
    /// The chip's part number.
    pub chip: Text,
    /// The version of its VBIOS.
    pub vbios: Text,
    /// The version of its inforom.
    pub inforom: Text,
    /// The version of the inforom's OEM object.
    pub inforom_oem: Text,
    /// The version of the inforom's ECC object.
    pub inforom_ecc: Text,
}

impl Profile {
    /// Every card there is, the smallest first.
    pub const ALL: [&'static Profile; 12] = [
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

    /// The card that people or the driver call so, in upper or lower case.
    pub fn named(text: &str) -> Option<&'static Profile> {
        let called = |name: &str| name.eq_ignore_ascii_case(text);
        Profile::ALL.into_iter().find(|card| called(&card.model) || called(&card.name))
    }
}
