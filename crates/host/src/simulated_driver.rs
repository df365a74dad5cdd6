//! Simulated GPUs for machines without GPUs. The daemons use the simulated driver only through this module.
//!
//! The feature `simulated-driver` links it. A build without the feature reads the same settings, and reports
//! [`SimulatedDriverError::NotBuilt`] if simulated GPUs are requested.

#[cfg(feature = "simulated-driver")]
mod built;
#[cfg(feature = "simulated-driver")]
use built as backend;

#[cfg(any(test, not(feature = "simulated-driver")))]
mod not_built;
#[cfg(not(feature = "simulated-driver"))]
use not_built as backend;

use crate::driver::{DriverError, InstalledDriver};
use partage_core::model::{Node, Share};
use serde::Deserialize;
use std::fs;
use std::io;
use std::path::Path;

/// The maximum number of GPUs of a simulated machine.
pub const MAX_SIMULATED_GPUS: usize = 16;

/// The simulated GPUs of a machine, as settings files describe them.
#[derive(Clone, Debug, PartialEq, Eq, Deserialize)]
#[serde(rename_all = "camelCase", deny_unknown_fields, default)]
pub struct SimulatedGpus {
    /// The number of GPUs, 1 to [`MAX_SIMULATED_GPUS`].
    pub gpus: usize,
    /// The card, by a name that `partage sim list` prints.
    pub model: String,
}

impl Default for SimulatedGpus {
    fn default() -> Self {
        SimulatedGpus { gpus: 2, model: "A100-SXM4-40GB".into() }
    }
}

/// Why simulated GPUs cannot be created.
#[derive(Debug, thiserror::Error)]
pub enum SimulatedDriverError {
    /// This program was built without the feature `simulated-driver`.
    #[error(
        "this build of partage has no simulated driver: install an NVIDIA driver, or build partage with the feature \
         simulated-driver, which `cargo build --package partage` does"
    )]
    NotBuilt,
    /// The card is unknown.
    #[error("{0}")]
    Model(String),
    /// The settings describe GPUs that cannot be simulated.
    #[error("simulated: {0}")]
    Settings(String),
    /// The machine's directory or its libraries cannot be written.
    #[error("{0}")]
    Installation(String),
    /// The libraries that were written cannot be used.
    #[error(transparent)]
    Driver(#[from] DriverError),
}

/// The files of the simulated GPUs of a machine.
#[derive(Clone, Copy, Debug)]
pub struct SimulatedMachine<'a> {
    /// The directory of the GPUs. It is created, or adopted if it describes the same GPUs.
    pub folder: &'a Path,
    /// The seed of the GPUs' UUIDs: the same path gives the same GPUs.
    pub seed: &'a Path,
    /// Whether shares of the GPUs exist, so that they must not be replaced by others.
    pub in_use: bool,
    /// A file that records the library from which the driver was installed, to install it again only when that changes.
    pub stamp: Option<&'a Path>,
}

/// Checks that this build has the simulated driver.
pub fn ensure_built() -> Result<(), SimulatedDriverError> {
    backend::ensure_built()
}

impl SimulatedGpus {
    /// Checks that the card is known. A build without the simulated driver knows no cards and accepts any name: one
    /// settings file serves machines with and without it.
    pub fn check_model(&self) -> Result<(), SimulatedDriverError> {
        backend::check_model(self)
    }

    /// Returns the GPUs that discovery would find, without creating anything.
    pub fn expected_inventory(&self, seed: &Path, name: &str) -> Result<Node, SimulatedDriverError> {
        backend::expected_inventory(self, seed, name)
    }

    /// Creates or adopts the GPUs in the machine's directory and installs their driver's libraries there.
    pub fn install(&self, machine: &SimulatedMachine<'_>) -> Result<InstalledDriver, SimulatedDriverError> {
        backend::install(self, machine)
    }
}

/// Writes the device files of the GPUs of these shares, and no others, into a directory, which is created if it is
/// missing. The simulated driver shows a program the GPUs that have a file in its machine's `dev`.
pub fn write_device_files(directory: &Path, node: &Node, shares: &[Share]) -> io::Result<()> {
    fs::create_dir_all(directory)?;
    for gpu in node.gpus.iter().filter(|gpu| shares.iter().any(|share| share.gpu == gpu.uuid)) {
        fs::write(directory.join(format!("nvidia{}", gpu.minor)), b"")?;
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn build_without_the_driver_refuses_gpus_and_accepts_settings() {
        let gpus = SimulatedGpus { model: "H100-SXM5-80GB".into(), ..SimulatedGpus::default() };
        not_built::check_model(&gpus).unwrap();
        let folder = Path::new("/nowhere");
        let machine = SimulatedMachine { folder, seed: folder, in_use: false, stamp: None };
        let refusals = [
            not_built::ensure_built().unwrap_err(),
            not_built::expected_inventory(&gpus, folder, "here").unwrap_err(),
            not_built::install(&gpus, &machine).unwrap_err(),
        ];
        for refusal in refusals {
            assert!(matches!(refusal, SimulatedDriverError::NotBuilt));
            let words = refusal.to_string();
            assert!(words.contains("NVIDIA driver") && words.contains("feature simulated-driver"), "{words}");
        }
    }
}
