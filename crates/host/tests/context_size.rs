//! Measures contexts on simulated GPUs as on real ones, and finds the simulated driver.
#![allow(clippy::unwrap_used, clippy::expect_used)]

#[path = "support/sim_node.rs"]
mod node;

use node::on;
use partage_core::model::{Bytes, GpuUuid};
use partage_driver_api::exports::DriverVersion;
use partage_host::context_size::{self, ContextSizeError};
use partage_host::driver::{DriverError, InstalledDriver};
use partage_sim_node::node::NodeConfig;
use partage_sim_node::state::GpuFault;
use std::path::{Path, PathBuf};

const CUDA: &str = "PARTAGE_TEST_CUDA";
const NVML: &str = "PARTAGE_TEST_NVML";

/// Runs the test `measurement` and filters its output: the test runner prints more than the sizes.
const CHILD: &str = r#"
    PARTAGE_TEST_CUDA="$2" PARTAGE_TEST_NVML="$3"; export PARTAGE_TEST_CUDA PARTAGE_TEST_NVML
    output=$("$1" measurement --exact --nocapture --test-threads=1 2>&1) || { echo "$output" >&2; exit 1; }
    echo "$output" | grep -o 'GPU-[0-9a-f-]* [0-9]*$' || true
"#;

/// Not a test: the child process.
#[test]
fn measurement() {
    let (Some(cuda), Some(nvml)) = (std::env::var_os(CUDA), std::env::var_os(NVML)) else { return };
    let mut answer = Vec::new();
    context_size::print_sizes(&PathBuf::from(cuda), &PathBuf::from(nvml), &mut answer).unwrap();
    println!("\n{}", String::from_utf8(answer).unwrap());
}

fn measure(driver: &InstalledDriver) -> Result<Vec<(GpuUuid, Bytes)>, ContextSizeError> {
    let program = std::env::current_exe().unwrap();
    context_size::measure(driver, Path::new("/bin/sh"), &["-c", CHILD, "sh", program.to_str().unwrap()])
}

/// Returns the configured context sizes, without that of the GPU `left_out`.
fn expected_sizes(config: &NodeConfig, left_out: Option<usize>) -> Vec<(GpuUuid, Bytes)> {
    let one = |gpu: usize| {
        let uuid = config.gpus[gpu].uuid.as_str().into();
        (Some(gpu) != left_out).then(|| (uuid, Bytes(config.profile(gpu).unwrap().memory.context)))
    };
    (0..config.gpus.len()).filter_map(one).collect()
}

#[test]
fn context_size_matches_the_card() {
    for (card, driver) in [("A100-SXM4-40GB", DriverVersion::R550), ("T4", DriverVersion::R535)] {
        on("context_size_matches_the_card", card, 3, driver, |inside| {
            assert_eq!(measure(&inside.driver).unwrap(), expected_sizes(&inside.config, None));
            // No process is left on the GPUs.
            assert!((0..3).all(|gpu| inside.state.processes(gpu).is_empty()));
        });
        if node::is_inside() {
            return;
        }
    }
}

#[test]
fn lost_gpu_is_left_out() {
    on("lost_gpu_is_left_out", "H100-SXM5-80GB", 3, DriverVersion::R550, |inside| {
        inside.state.inject(1, GpuFault::Lost);
        assert_eq!(measure(&inside.driver).unwrap(), expected_sizes(&inside.config, Some(1)));
    });
}

#[test]
fn unloaded_driver_fails_the_measurement() {
    on("unloaded_driver_fails_the_measurement", "T4", 1, DriverVersion::R550, |inside| {
        inside.state.set_loaded(false);
        let error = measure(&inside.driver).unwrap_err();
        assert!(matches!(error, ContextSizeError::Failed { .. }), "{error}");
    });
}

#[test]
fn driver_of_the_node_is_resolved() {
    on("driver_of_the_node_is_resolved", "T4", 1, DriverVersion::R535, |inside| {
        let node = inside.driver.simulated.clone().unwrap();
        let file = |name: &str| node.join("lib").join(format!("{name}.{}", DriverVersion::R535.version()));
        assert_eq!(
            (&inside.driver.cuda, &inside.driver.nvml),
            (&file("libcuda.so"), &file("libnvidia-ml.so"))
        );
        assert_eq!(InstalledDriver::simulated(&node).unwrap(), inside.driver);
    });
}

#[test]
fn plain_directory_is_not_a_simulated_node() {
    let folder = tempfile::tempdir().unwrap();
    let error = InstalledDriver::simulated(folder.path()).unwrap_err();
    assert!(matches!(error, DriverError::NoSimulatedLibrary { .. }), "{error}");
    assert!(error.to_string().contains("libcuda.so.1"), "{error}");
}
