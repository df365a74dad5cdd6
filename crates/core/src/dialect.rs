//! Dialects: the ways to spell asks and grants.
//!
//! Each system Partage replaces wrote its asks as extended resources and annotations of its own. A dialect
//! reads them into the one model ([`crate::model::PodAsk`]), writes a grant back as everything that dialect's
//! users and tools look at, and reads such a grant again to take over a running cluster.

pub mod absent;
pub mod asks;
pub mod gpumounter;
pub mod grants;

use crate::model::{DEFAULT_SLOTS, MAX_SLOTS};
use std::fmt;

/// A way to spell asks and grants.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Dialect {
    /// `partage.dev/*`.
    Native,
    /// Aliyun gpushare: `aliyun.com/gpu-mem`.
    Gpushare,
    /// Volcano vGPU: `volcano.sh/vgpu-*`.
    Volcano,
    /// tkestack gpu-manager: `<any domain>/vcuda-*`.
    Vcuda,
    /// AWS virtual GPU: `k8s.amazonaws.com/vgpu`.
    Aws,
    /// HAMi: `nvidia.com/gpu` and friends.
    Hami,
}

impl Dialect {
    /// Every dialect.
    pub const ALL: [Dialect; 6] =
        [Dialect::Native, Dialect::Gpushare, Dialect::Volcano, Dialect::Vcuda, Dialect::Aws, Dialect::Hami];

    /// Its name in output and settings.
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

/// What a cluster decides about its dialects.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Settings {
    /// What one `aliyun.com/gpu-mem` is.
    pub gpushare_unit: MemoryUnit,
    /// How many MiB one `volcano.sh/vgpu-memory` is (upstream's `gpuMemoryFactor`).
    pub volcano_memory_factor: u32,
    /// Slots a GPU is split in for `k8s.amazonaws.com/vgpu`, where a node says nothing else.
    pub aws_slots: u32,
}

impl Default for Settings {
    fn default() -> Self {
        Settings { gpushare_unit: MemoryUnit::Gib, volcano_memory_factor: 1, aws_slots: DEFAULT_SLOTS }
    }
}

impl Settings {
    /// These settings, if a cluster can run with them.
    pub fn validate(self) -> Result<Settings, SettingsError> {
        if !(1..=MAX_SLOTS).contains(&self.aws_slots) {
            return Err(SettingsError::Slots(self.aws_slots));
        }
        if self.volcano_memory_factor == 0 {
            return Err(SettingsError::MemoryFactor);
        }
        Ok(self)
    }
}

/// Why settings cannot be used.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum SettingsError {
    /// Slots that no GPU can be split in.
    #[error("a GPU split in {0} slots: write 1 to {MAX_SLOTS}, one MPS server takes no more clients")]
    Slots(u32),
    /// A unit of nothing.
    #[error(
        "a volcano memory factor of 0 makes every ask empty: write the MiB one vgpu-memory is, 1 or more"
    )]
    MemoryFactor,
}

/// The unit of `aliyun.com/gpu-mem`.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum MemoryUnit {
    /// 2^30 bytes.
    #[default]
    Gib,
    /// 2^20 bytes.
    Mib,
}

impl MemoryUnit {
    /// Bytes in one unit.
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

    fn slots(aws_slots: u32) -> Result<Settings, SettingsError> {
        Settings { aws_slots, ..Settings::default() }.validate()
    }

    #[test]
    fn a02_at_most_48_slots() {
        assert!(slots(1).is_ok() && slots(48).is_ok());
        let error = slots(49).unwrap_err();
        assert_eq!(
            error.to_string(),
            "a GPU split in 49 slots: write 1 to 48, one MPS server takes no more clients"
        );
    }

    #[test]
    fn a03_no_slots_is_refused() {
        assert_eq!(slots(0), Err(SettingsError::Slots(0)));
    }

    #[test]
    fn a_memory_factor_of_zero_is_refused() {
        let settings = Settings { volcano_memory_factor: 0, ..Settings::default() };
        assert_eq!(settings.validate(), Err(SettingsError::MemoryFactor));
    }
}
