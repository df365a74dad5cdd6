//! Dialects: the extended resources and annotations for asks and grants of each GPU-sharing project.
//!
//! For each dialect, [`asks`] reads the resources and annotations into one model ([`crate::model::PodAsk`]). [`grants`]
//! encodes a grant into the annotations and environment that the users and tools of the dialect expect, and decodes such a
//! grant to take over a running cluster.

pub mod asks;
pub mod defaults;
pub mod gpumounter;
pub mod grants;

use crate::model::{DEFAULT_SLOTS, MAX_SLOTS};
use std::fmt;

/// The resource names and annotations of one GPU-sharing project.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Dialect {
    /// Partage's own dialect: `partage.dev/*`.
    Native,
    /// The dialect of Aliyun gpushare: `aliyun.com/gpu-mem`.
    Gpushare,
    /// The dialect of Volcano vGPU: `volcano.sh/vgpu-*`.
    Volcano,
    /// tkestack gpu-manager: `<any domain>/vcuda-*`.
    Vcuda,
    /// AWS virtual GPU: `k8s.amazonaws.com/vgpu`.
    Aws,
    /// HAMi: `nvidia.com/gpu`, `nvidia.com/gpumem` and others.
    Hami,
}

impl Dialect {
    /// All dialects in declaration order.
    pub const ALL: [Dialect; 6] =
        [Dialect::Native, Dialect::Gpushare, Dialect::Volcano, Dialect::Vcuda, Dialect::Aws, Dialect::Hami];

    /// Returns the name in output and settings.
    pub fn name(self) -> &'static str {
        match self {
            Dialect::Native => "native",
            Dialect::Gpushare => "gpushare",
            Dialect::Volcano => "volcano",
            Dialect::Vcuda => "vcuda",
            Dialect::Aws => "aws",
            Dialect::Hami => "hami",
        }
    }
}

impl fmt::Display for Dialect {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(self.name())
    }
}

/// Settings of a cluster for its dialects.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct DialectSettings {
    /// Size of one unit of `aliyun.com/gpu-mem`.
    pub gpushare_unit: MemoryUnit,
    /// Number of MiB in one `volcano.sh/vgpu-memory` (upstream's `gpuMemoryFactor`).
    pub volcano_memory_factor: u32,
    /// Default number of slots per GPU for `k8s.amazonaws.com/vgpu`.
    pub aws_slots: u32,
}

impl Default for DialectSettings {
    fn default() -> Self {
        DialectSettings { gpushare_unit: MemoryUnit::Gib, volcano_memory_factor: 1, aws_slots: DEFAULT_SLOTS }
    }
}

impl DialectSettings {
    /// Returns these settings if they are valid.
    pub fn validate(self) -> Result<DialectSettings, DialectSettingsError> {
        if !(1..=MAX_SLOTS).contains(&self.aws_slots) {
            return Err(DialectSettingsError::Slots(self.aws_slots));
        }
        if self.volcano_memory_factor == 0 {
            return Err(DialectSettingsError::MemoryFactor);
        }
        Ok(self)
    }
}

/// Why settings are invalid.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum DialectSettingsError {
    /// The number of slots is out of range.
    #[error(
        "{0} slots per GPU: write 1 to {MAX_SLOTS}, because an MPS server has at most {MAX_SLOTS} clients"
    )]
    Slots(u32),
    /// The memory factor is zero.
    #[error(
        "a Volcano memory factor of 0 makes every request empty: write the number of MiB in one vgpu-memory, 1 or more"
    )]
    MemoryFactor,
}

/// The unit of `aliyun.com/gpu-mem`.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum MemoryUnit {
    /// One unit is a GiB, 2^30 bytes.
    #[default]
    Gib,
    /// One unit is a MiB, 2^20 bytes.
    Mib,
}

impl MemoryUnit {
    /// Returns the number of bytes in one unit.
    pub fn bytes(self) -> u64 {
        match self {
            MemoryUnit::Gib => 1 << 30,
            MemoryUnit::Mib => 1 << 20,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn slots(aws_slots: u32) -> Result<DialectSettings, DialectSettingsError> {
        DialectSettings { aws_slots, ..DialectSettings::default() }.validate()
    }

    #[test]
    fn a02_more_than_48_slots_are_refused() {
        assert!(slots(1).is_ok() && slots(48).is_ok());
        let error = slots(49).unwrap_err();
        assert_eq!(
            error.to_string(),
            "49 slots per GPU: write 1 to 48, because an MPS server has at most 48 clients"
        );
    }

    #[test]
    fn a03_zero_slots_are_refused() {
        assert_eq!(slots(0), Err(DialectSettingsError::Slots(0)));
    }

    #[test]
    fn memory_factor_of_zero_is_refused() {
        let settings = DialectSettings { volcano_memory_factor: 0, ..DialectSettings::default() };
        assert_eq!(settings.validate(), Err(DialectSettingsError::MemoryFactor));
    }
}
