//! Discovers the node's driver and GPUs with the agent's configuration.

use crate::config::AgentConfig;
use crate::settings::{AgentSettings, DriverSetting};
use crate::store::AgentStore;
use partage_enforce::error_chain::describe;
use partage_enforce::gpus::{
    self, DiscoveredGpus, DiscoveryError, DiscoveryOptions, DriverChoice, SimulatedMachine,
};
use partage_host::host_root::HostRoot;
use std::path::Path;

/// Discovers the driver and its GPUs, with what earlier agents recorded about them.
pub(crate) fn discover(
    config: &AgentConfig,
    settings: &AgentSettings,
    root: &HostRoot,
    store: &AgentStore,
    boot: &str,
) -> Result<DiscoveredGpus, DiscoveryError> {
    let folder = config.state.join("simulated");
    gpus::discover(&DiscoveryOptions {
        node_name: config.node.as_str(),
        driver: match settings.driver {
            DriverSetting::Nvidia => DriverChoice::Nvidia,
            DriverSetting::Simulated => DriverChoice::Simulated,
        },
        host_root: Some(root),
        simulated: &settings.simulated,
        simulated_machine: SimulatedMachine {
            folder: &folder,
            // The same GPUs after every start, and different ones on every node.
            seed: Path::new(config.node.as_str()),
            in_use: false,
            stamp: None,
        },
        records: store.singletons(),
        boot_id: boot,
    })
}

/// Returns why there are no GPUs to share, and what to do about it.
pub(crate) fn explain(error: &DiscoveryError) -> String {
    match error {
        DiscoveryError::NoDriver { .. } => format!("{error}: install it, or set `driver: simulated`"),
        error => describe(error),
    }
}
