//! What a context takes on simulated GPUs, measured as on real ones; and which driver is found.
#![allow(clippy::unwrap_used, clippy::expect_used)]

#[path = "support/node.rs"]
mod node;

use node::on;
use partage_core::model::{Bytes, GpuUuid};
use partage_driver_api::exports::DriverVersion;
use partage_host::context::{self, ContextError};
use partage_host::driver::{Driver, DriverError};
use partage_sim_node::node::NodeConfig;
use partage_sim_node::state::Fault;
use std::path::{Path, PathBuf};

const CUDA: &str = "PARTAGE_TEST_CUDA";
const NVML: &str = "PARTAGE_TEST_NVML";

/// Runs the test `measurement` and passes on only its answer: tests say more than that.
const CHILD: &str = r#"
    PARTAGE_TEST_CUDA="$2" PARTAGE_TEST_NVML="$3"; export PARTAGE_TEST_CUDA PARTAGE_TEST_NVML
    said=$("$1" measurement --exact --nocapture --test-threads=1 2>&1) || { echo "$said" >&2; exit 1; }
    echo "$said" | grep -o 'GPU-[0-9a-f-]* [0-9]*$' || true
"#;

/// Not a test: what the child does.
#[test]
fn measurement() {
    let (Some(cuda), Some(nvml)) = (std::env::var_os(CUDA), std::env::var_os(NVML)) else { return };
    let mut answer = Vec::new();
    context::answer(&PathBuf::from(cuda), &PathBuf::from(nvml), &mut answer).unwrap();
    println!("\n{}", String::from_utf8(answer).unwrap());
}

fn measure(driver: &Driver) -> Result<Vec<(GpuUuid, Bytes)>, ContextError> {
    let program = std::env::current_exe().unwrap();
    context::measure(driver, Path::new("/bin/sh"), &["-c", CHILD, "sh", program.to_str().unwrap()])
}

/// What the cards' contexts take, without those of `left_out`.
fn truth(config: &NodeConfig, left_out: Option<usize>) -> Vec<(GpuUuid, Bytes)> {
    let one = |gpu: usize| {
        let uuid = config.gpus[gpu].uuid.as_str().into();
        (Some(gpu) != left_out).then(|| (uuid, Bytes(config.profile(gpu).unwrap().memory.context)))
    };
    (0..config.gpus.len()).filter_map(one).collect()
}

#[test]
fn a_context_takes_what_the_card_says() {
    for (card, driver) in [("A100-SXM4-40GB", DriverVersion::R550), ("T4", DriverVersion::R535)] {
        on("a_context_takes_what_the_card_says", card, 3, driver, |inside| {
            assert_eq!(measure(&inside.driver).unwrap(), truth(&inside.config, None));
            // Nothing is left behind.
            assert!((0..3).all(|gpu| inside.state.processes(gpu).is_empty()));
        });
        if node::is_inside() {
            return;
        }
    }
}

#[test]
fn a_gpu_without_a_context_is_left_out() {
    on("a_gpu_without_a_context_is_left_out", "H100-SXM5-80GB", 3, DriverVersion::R550, |inside| {
        inside.state.inject(1, Fault::Lost);
        assert_eq!(measure(&inside.driver).unwrap(), truth(&inside.config, Some(1)));
    });
}

#[test]
fn a_driver_that_is_not_loaded_has_no_contexts() {
    on("a_driver_that_is_not_loaded_has_no_contexts", "T4", 1, DriverVersion::R550, |inside| {
        inside.state.set_loaded(false);
        let error = measure(&inside.driver).unwrap_err();
        assert!(matches!(error, ContextError::Failed { .. }), "{error}");
    });
}

#[test]
fn the_nodes_driver_is_found_behind_its_links() {
    on("the_nodes_driver_is_found_behind_its_links", "T4", 1, DriverVersion::R535, |inside| {
        let node = inside.driver.simulated.clone().unwrap();
        let file = |name: &str| node.join("lib").join(format!("{name}.{}", DriverVersion::R535.version()));
        assert_eq!(
            (&inside.driver.cuda, &inside.driver.nvml),
            (&file("libcuda.so"), &file("libnvidia-ml.so"))
        );
        assert_eq!(Driver::simulated(&node).unwrap(), inside.driver);
    });
}

#[test]
fn a_folder_is_no_node() {
    let folder = tempfile::tempdir().unwrap();
    let error = Driver::simulated(folder.path()).unwrap_err();
    assert!(matches!(error, DriverError::NotSimulated { .. }), "{error}");
    assert!(error.to_string().contains("libcuda.so.1"), "{error}");
}
