//! Installs the simulated driver, in builds that include it.

use super::{MAX_SIMULATED_GPUS, SimulatedDriverError, SimulatedGpus, SimulatedMachine};
use crate::atomic_file::{file_stamp, run_once};
use crate::driver::InstalledDriver;
use partage_core::model::Node;
use partage_driver_api::exports::DriverVersion;
use partage_sim_node::install;
use partage_sim_node::node::{self, NodeConfig, NodeDir};
use partage_sim_node::profile::GpuProfile;
use std::path::Path;

const _: () = assert!(MAX_SIMULATED_GPUS == node::MAX_NODE_GPUS);

#[allow(clippy::unnecessary_wraps)] // Builds without the driver have the same signature.
pub(super) fn ensure_built() -> Result<(), SimulatedDriverError> {
    Ok(())
}

pub(super) fn check_model(gpus: &SimulatedGpus) -> Result<(), SimulatedDriverError> {
    let found = GpuProfile::find(&gpus.model).map(drop);
    found.map_err(|error| SimulatedDriverError::Model(error.to_string()))
}

pub(super) fn expected_inventory(
    gpus: &SimulatedGpus,
    seed: &Path,
    name: &str,
) -> Result<Node, SimulatedDriverError> {
    Ok(config(gpus, seed)?.expected_inventory(name))
}

pub(super) fn install(
    gpus: &SimulatedGpus,
    machine: &SimulatedMachine<'_>,
) -> Result<InstalledDriver, SimulatedDriverError> {
    let config = config(gpus, machine.seed)?;
    let node = NodeDir::open_or_recreate(machine.folder, &config, machine.in_use).map_err(installation)?;
    let object = install::trusted_object().map_err(installation)?;
    let write = || {
        install::write_libraries(&object, &node.libraries(), config.driver, node.path())
            .map_err(|error| error.to_string())
    };
    let written = match machine.stamp {
        Some(stamp) => run_once(stamp, &file_stamp(&object), write),
        None => write(),
    };
    written.map_err(SimulatedDriverError::Installation)?;
    Ok(InstalledDriver::simulated(node.path())?)
}

fn config(gpus: &SimulatedGpus, seed: &Path) -> Result<NodeConfig, SimulatedDriverError> {
    let card = GpuProfile::find(&gpus.model).map_err(settings)?;
    NodeConfig::new(DriverVersion::R550, card, gpus.gpus, node::seed_for_dir(seed)).map_err(settings)
}

fn settings(error: impl ToString) -> SimulatedDriverError {
    SimulatedDriverError::Settings(error.to_string())
}

fn installation(error: impl ToString) -> SimulatedDriverError {
    SimulatedDriverError::Installation(error.to_string())
}
