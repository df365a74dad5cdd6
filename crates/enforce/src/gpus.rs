//! GPU discovery and health: finds the driver, opens a session with it, and decides which GPUs can be granted.
//!
//! A GPU that does not respond keeps its place in the [`Inventory`], and the [`FatalErrorLog`] keeps the errors that
//! make a GPU unusable until it is reset. Both are records, so that a restarted daemon neither renumbers GPUs nor
//! grants broken ones.

mod fatal_errors;
mod inventory;
#[cfg(test)]
mod tests;

pub use fatal_errors::FatalErrorLog;
pub use inventory::{Inventory, Observation};
pub use partage_host::simulated_driver::{SimulatedDriverError, SimulatedMachine};

use crate::records::{RecordDir, RecordError};
use partage_core::model::{GpuUuid, Node};
use partage_host::driver::{DriverError, InstalledDriver};
use partage_host::gpus::{GpuSample, NvmlSession, NvmlSessionError};
use partage_host::host_root::HostRoot;
use partage_host::simulated_driver::SimulatedGpus;
use serde::Deserialize;
use std::collections::BTreeSet;
use std::path::PathBuf;
use std::time::{SystemTime, UNIX_EPOCH};

/// Which driver to use.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Deserialize)]
#[serde(rename_all = "camelCase")]
pub enum DriverChoice {
    /// NVIDIA's driver, or the simulated one if none is installed.
    #[default]
    Auto,
    /// NVIDIA's driver, or an error.
    Nvidia,
    /// The simulated driver, without a search for NVIDIA's.
    Simulated,
}

/// Where and how to look for GPUs.
#[derive(Clone, Copy, Debug)]
pub struct DiscoveryOptions<'a> {
    /// The node's name in the inventory.
    pub node_name: &'a str,
    /// Which driver to use.
    pub driver: DriverChoice,
    /// The host's root as this process sees it; `None` searches where programs that this process starts would.
    pub host_root: Option<&'a HostRoot>,
    /// The simulated GPUs of the settings.
    pub simulated: &'a SimulatedGpus,
    /// The files of the simulated GPUs.
    pub simulated_machine: SimulatedMachine<'a>,
    /// Where the inventory and fatal errors are kept.
    pub records: &'a RecordDir,
    /// The current boot: a boot resets every GPU.
    pub boot_id: &'a str,
}

/// The GPUs of this machine and a session with their driver.
#[derive(Debug)]
pub struct DiscoveredGpus {
    /// The files of the driver.
    pub driver: InstalledDriver,
    /// The open session with NVML.
    pub session: NvmlSession,
    /// The GPUs, also those that do not respond.
    pub inventory: Inventory,
    /// GPUs that an earlier daemon reported as unusable or missing: if one of them is healthy, that is a change to
    /// report.
    pub previously_unhealthy: BTreeSet<GpuUuid>,
}

/// Why GPU discovery failed.
#[derive(Debug, thiserror::Error)]
pub enum DiscoveryError {
    /// The settings require NVIDIA's driver, and none is installed.
    #[error("no NVIDIA driver was found{}", below(root.as_ref()))]
    NoDriver {
        /// The root that was searched; absent if it was this process's own.
        root: Option<PathBuf>,
        /// Whether an earlier daemon found GPUs here.
        had_gpus: bool,
    },
    /// The installed driver is incomplete or unreadable.
    #[error(transparent)]
    Driver(#[from] DriverError),
    /// The simulated driver cannot be used.
    #[error(transparent)]
    Simulated(#[from] SimulatedDriverError),
    /// The driver reports no GPUs.
    #[error(transparent)]
    Session(#[from] NvmlSessionError),
    /// The inventory or the fatal errors of an earlier daemon cannot be read.
    #[error(transparent)]
    Records(#[from] RecordError),
}

fn below(root: Option<&PathBuf>) -> String {
    root.map(|root| format!(" below {}", root.display())).unwrap_or_default()
}

impl DiscoveryError {
    /// Returns whether an administrator has to act. Most nodes of a cluster never had a driver, which is normal.
    pub fn needs_attention(&self) -> bool {
        !matches!(self, DiscoveryError::NoDriver { had_gpus: false, .. })
    }
}

/// Finds the installed driver that the choice allows. Returns `None` if the simulated driver is to be used.
pub fn find_driver(
    choice: DriverChoice,
    host_root: Option<&HostRoot>,
) -> Result<Option<InstalledDriver>, DiscoveryError> {
    let search = || host_root.map_or_else(InstalledDriver::find, InstalledDriver::find_in);
    match choice {
        DriverChoice::Simulated => Ok(None),
        DriverChoice::Auto => Ok(search()?),
        DriverChoice::Nvidia => match search()? {
            None => Err(DiscoveryError::NoDriver {
                root: host_root.map(|root| root.seen_at().into()),
                had_gpus: false,
            }),
            driver => Ok(driver),
        },
    }
}

/// Finds the driver and its GPUs, opens a session, and restores the inventory and fatal errors of an earlier daemon.
pub fn discover(options: &DiscoveryOptions<'_>) -> Result<DiscoveredGpus, DiscoveryError> {
    let kept: Option<Inventory> = options.records.load(Inventory::NAME)?;
    let found = find_driver(options.driver, options.host_root).map_err(|error| match error {
        DiscoveryError::NoDriver { root, .. } => DiscoveryError::NoDriver { root, had_gpus: kept.is_some() },
        other => other,
    })?;
    let (driver, source) = match found {
        Some(driver) => {
            let source = source_of(options.driver, &driver);
            (driver, source)
        }
        None => {
            let SimulatedGpus { gpus, model } = options.simulated;
            let driver = options.simulated.install(&options.simulated_machine)?;
            (driver, format!("simulated {gpus} {model}"))
        }
    };
    tracing::debug!(cuda = %driver.cuda.display(), nvml = %driver.nvml.display(), source, "driver found");
    let session = NvmlSession::open(&driver)?;
    let fatal = FatalErrorLog::load(options.records, options.boot_id)?;
    let missing = kept.iter().flat_map(Inventory::missing);
    let unusable = fatal.iter().filter(|error| error.is_fatal()).map(|error| &error.uuid);
    let previously_unhealthy = unusable.chain(missing).cloned().collect();
    session.restore_fatal_errors(fatal);
    let (node, none_answers) = match session.node(options.node_name) {
        Ok(node) => (node, None),
        Err(error) => (Node::new(options.node_name, Vec::new()), Some(error)),
    };
    let now = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
    let observation = Observation {
        boot_id: options.boot_id,
        source: &source,
        counted: session.device_count().unwrap_or(node.gpus.len()),
        node,
        unix_seconds: i64::try_from(now.as_secs()).unwrap_or(i64::MAX),
    };
    let inventory = Inventory::new(observation, kept.as_ref());
    if let Some(error) = none_answers.filter(|_| inventory.node.gpus.is_empty()) {
        return Err(error.into());
    }
    if kept.as_ref() != Some(&inventory)
        && let Err(error) = options.records.store(Inventory::NAME, &inventory)
    {
        tracing::warn!(error = %crate::error_chain::describe(&error), "cannot record the GPU inventory");
    }
    Ok(DiscoveredGpus { driver, session, inventory, previously_unhealthy })
}

/// Names the source of the GPUs: those of another source are different GPUs, and not missing ones.
fn source_of(choice: DriverChoice, driver: &InstalledDriver) -> String {
    match &driver.simulated {
        Some(folder) if choice == DriverChoice::Auto => format!("simulated in {}", folder.display()),
        _ => "nvidia".into(),
    }
}

/// Withholds GPUs that the driver reports as unhealthy, so that no further shares are granted of them.
pub fn withhold_unhealthy(node: &mut Node, samples: &[GpuSample]) {
    for gpu in &mut node.gpus {
        let sample = samples.iter().find(|sample| sample.uuid == gpu.uuid);
        gpu.withheld = gpu.withheld.take().or_else(|| sample?.health.clone());
    }
}
