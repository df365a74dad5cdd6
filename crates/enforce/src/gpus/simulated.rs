//! Simulated GPUs for machines that have none: the only place where the engine reaches the simulated driver.

use partage_host::driver::{Driver, DriverError};
use partage_host::files::{StampError, once, stamp_of};
use partage_sim::install::{self, InstallError};
use partage_sim::node::{NodeDir, NodeError, Simulated, seed_of};
use std::path::Path;

/// Where the simulated GPUs of a machine live.
#[derive(Clone, Copy, Debug)]
pub struct SimulatedMachine<'a> {
    /// The folder that holds them. It is created, or adopted if it describes the same GPUs.
    pub folder: &'a Path,
    /// What the GPUs' UUIDs derive from: the same path gives the same GPUs.
    pub seed: &'a Path,
    /// Whether shares of the GPUs exist, so that they must not be replaced by others.
    pub in_use: bool,
    /// A file that records the library the driver was installed from, to install it only when that one changes.
    pub stamp: Option<&'a Path>,
}

/// Why there are no simulated GPUs.
#[derive(Debug, thiserror::Error)]
pub enum SimulatedDriverError {
    /// The settings describe GPUs that cannot be simulated.
    #[error("{0}")]
    Settings(String),
    /// The machine's folder cannot be made or used.
    #[error(transparent)]
    Folder(#[from] NodeError),
    /// The driver's libraries cannot be written.
    #[error(transparent)]
    Libraries(#[from] InstallError),
    /// What was installed cannot be recorded.
    #[error(transparent)]
    Stamp(#[from] StampError),
    /// The libraries that were written cannot be used.
    #[error(transparent)]
    Driver(#[from] DriverError),
}

/// Creates or adopts the simulated GPUs in the machine's folder and installs their driver's libraries there.
pub(super) fn install(
    gpus: &Simulated,
    machine: &SimulatedMachine<'_>,
) -> Result<Driver, SimulatedDriverError> {
    let config = gpus.config(seed_of(machine.seed)).map_err(SimulatedDriverError::Settings)?;
    let node = NodeDir::keep(machine.folder, &config, machine.in_use)?;
    let object = install::trusted_object()?;
    let libraries = || install::libraries(&object, &node.libraries(), config.driver, node.path());
    match machine.stamp {
        Some(stamp) => {
            once(stamp, &stamp_of(&object), || libraries().map_err(SimulatedDriverError::from))?;
        }
        None => libraries()?,
    }
    Ok(Driver::simulated(node.path())?)
}
