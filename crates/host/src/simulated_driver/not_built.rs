//! Refuses simulated GPUs, in builds without the simulated driver.

use super::{SimulatedDriverError, SimulatedGpus, SimulatedMachine};
use crate::driver::InstalledDriver;
use partage_core::model::Node;
use std::path::Path;

pub(super) fn ensure_built() -> Result<(), SimulatedDriverError> {
    Err(SimulatedDriverError::NotBuilt)
}

pub(super) fn check_model(_: &SimulatedGpus) -> Result<(), SimulatedDriverError> {
    Ok(())
}

pub(super) fn expected_inventory(_: &SimulatedGpus, _: &Path, _: &str) -> Result<Node, SimulatedDriverError> {
    Err(SimulatedDriverError::NotBuilt)
}

pub(super) fn install(
    _: &SimulatedGpus,
    _: &SimulatedMachine<'_>,
) -> Result<InstalledDriver, SimulatedDriverError> {
    Err(SimulatedDriverError::NotBuilt)
}
