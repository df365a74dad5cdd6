//! Calls of the simulated CUDA driver in any order: no call crashes or hangs, and no memory is in use after everything is freed.
#![no_main]

#[path = "../../crates/sim-driver/tests/support/driver.rs"]
mod driver;
#[path = "../../crates/sim-driver/tests/support/sequence.rs"]
mod sequence;

use driver::LoadedLibrary;
use driver::cuda::{CUDA_SUCCESS, CudaLibrary};
use libfuzzer_sys::fuzz_target;
use partage_driver_api::exports::DriverVersion;
use partage_sim_node::node::{NODE_DIR_VARIABLE, NodeConfig, NodeDir};
use partage_sim_node::state::SimNodeState;
use partage_sim_node::{install, profile};
use std::sync::LazyLock;

/// A simulated node for this process. It is not removed at the end, because a fuzzer is killed and runs no destructors; the
/// next run replaces it.
static DRIVER: LazyLock<(CudaLibrary, SimNodeState)> = LazyLock::new(|| {
    let config = NodeConfig::new(DriverVersion::R550, &profile::A100_SXM4_40GB, 2, 1).unwrap();
    let folder = std::env::temp_dir().join("partage-fuzz-driver");
    let _ = NodeDir::remove(&folder);
    let node = NodeDir::create(&folder, &config).unwrap();
    let object = install::shared_object().unwrap();
    install::write_libraries(&object, &node.libraries(), config.driver, node.path()).unwrap();
    // SAFETY: no other thread runs yet that would read the environment.
    unsafe { std::env::set_var(NODE_DIR_VARIABLE, &folder) };
    let cuda =
        CudaLibrary(LoadedLibrary::open(node.libraries().join("libcuda.so.1").to_str().unwrap()).unwrap());
    // SAFETY: `cuInit` takes no pointers.
    assert_eq!(unsafe { cuda.cuInit(0) }, CUDA_SUCCESS);
    (cuda, SimNodeState::attach(&folder).unwrap())
});

/// Turns LeakSanitizer off. The driver's handles are in mappings that LeakSanitizer does not scan for pointers, so it would
/// report everything that they own as leaked.
#[unsafe(no_mangle)]
extern "C" fn __lsan_is_turned_off() -> libc::c_int {
    1
}

fuzz_target!(|bytes: &[u8]| {
    let (cuda, state) = &*DRIVER;
    // SAFETY: `cuInit` has succeeded, and the fuzzer calls the driver from one thread only.
    unsafe { sequence::run(cuda, bytes) };
    assert_eq!([state.used_memory(0), state.used_memory(1)], [0, 0]);
});
