//! Discovers simulated GPUs with two daemons, one after the other: the second restores the records of the first.
#![allow(clippy::unwrap_used, clippy::expect_used)]

#[path = "../../host/tests/support/sim_node.rs"]
mod node;

use node::{NodeTest, on};
use partage_driver_api::exports::DriverVersion;
use partage_enforce::gpus::{
    DiscoveredGpus, DiscoveryError, DiscoveryOptions, DriverChoice, FatalErrorLog, SimulatedMachine, discover,
};
use partage_enforce::records::{Durability, RecordDir};
use partage_host::simulated_driver::SimulatedGpus;
use partage_sim_node::state::GpuFault;
use std::path::Path;

const TEST_DRIVER: DriverVersion = DriverVersion::R550;

/// Discovers GPUs as a daemon that starts in this boot. The simulated node of the test is found as an installed driver.
fn start(records: &RecordDir, boot_id: &str) -> Result<DiscoveredGpus, DiscoveryError> {
    let unused = Path::new("/nonexistent");
    discover(&DiscoveryOptions {
        node_name: "node1",
        driver: DriverChoice::Auto,
        host_root: None,
        simulated: &SimulatedGpus::default(),
        simulated_machine: SimulatedMachine { folder: unused, seed: unused, in_use: false, stamp: None },
        records,
        boot_id,
    })
}

fn records() -> (tempfile::TempDir, RecordDir) {
    let directory = tempfile::tempdir().unwrap();
    let quarantine = directory.path().join("quarantine");
    let records = RecordDir::open(directory.path(), &quarantine, Durability::UntilReboot).unwrap();
    (directory, records)
}

/// Returns whether each GPU is withheld, in the order of the inventory.
fn withheld(gpus: &DiscoveredGpus) -> Vec<bool> {
    gpus.inventory.node.gpus.iter().map(|gpu| gpu.withheld.is_some()).collect()
}

#[test]
fn lost_gpu_keeps_its_index_across_a_restart() {
    on("lost_gpu_keeps_its_index_across_a_restart", "T4", 3, TEST_DRIVER, |inside: NodeTest| {
        let (_directory, records) = records();
        let uuids: Vec<String> = inside.config.gpus.iter().map(|gpu| gpu.uuid.clone()).collect();
        let listed = |gpus: &DiscoveredGpus| -> Vec<String> {
            gpus.inventory.node.gpus.iter().map(|gpu| gpu.uuid.to_string()).collect()
        };
        let first = start(&records, "boot-1").unwrap();
        assert_eq!((listed(&first), withheld(&first)), (uuids.clone(), vec![false; 3]));
        drop(first);

        inside.state.inject(0, GpuFault::Lost);
        let second = start(&records, "boot-1").unwrap();
        assert_eq!((listed(&second), withheld(&second)), (uuids.clone(), vec![true, false, false]));
        drop(second);

        // All of them are lost: the daemon starts, and nothing is granted.
        inside.state.inject(1, GpuFault::Lost);
        inside.state.inject(2, GpuFault::Lost);
        let third = start(&records, "boot-1").unwrap();
        assert_eq!((listed(&third), withheld(&third)), (uuids.clone(), vec![true; 3]));
        drop(third);

        for gpu in 0..3 {
            inside.state.inject(gpu, GpuFault::Returned);
        }
        let fourth = start(&records, "boot-1").unwrap();
        assert_eq!((listed(&fourth), withheld(&fourth)), (uuids, vec![false; 3]));
        assert_eq!(fourth.previously_unhealthy.len(), 3, "their recovery has to be reported");
    });
}

#[test]
fn fatal_error_is_known_after_a_restart_and_forgotten_after_a_boot() {
    on("fatal_error_is_known_after_a_restart_and_forgotten_after_a_boot", "T4", 2, TEST_DRIVER, |inside| {
        let (_directory, records) = records();
        let first = start(&records, "boot-1").unwrap();
        first.session.sample();
        inside.state.inject(1, GpuFault::Xid(62));
        first.session.sample();
        FatalErrorLog::default().store(&records, "boot-1", first.session.fatal_errors());
        drop(first);

        let second = start(&records, "boot-1").unwrap();
        let health: Vec<bool> =
            second.session.sample().iter().map(|sample| sample.health.is_none()).collect();
        assert_eq!(health, [true, false]);
        let unhealthy: Vec<&str> = second.previously_unhealthy.iter().map(|uuid| uuid.as_str()).collect();
        assert_eq!(unhealthy, [inside.config.gpus[1].uuid.as_str()]);
        drop(second);

        let after_boot = start(&records, "boot-2").unwrap();
        assert!(after_boot.previously_unhealthy.is_empty());
        assert!(after_boot.session.sample().iter().all(|sample| sample.health.is_none()));
    });
}
