//! Calls of the simulated CUDA driver in any order: none crashes or hangs, and nothing is left when all was given back.
#![no_main]

#[path = "../../crates/sim-driver/tests/support/driver.rs"]
mod driver;
#[path = "../../crates/sim-driver/tests/support/sequence.rs"]
mod sequence;

use driver::Library;
use driver::cuda::{CUDA_SUCCESS, Cuda};
use libfuzzer_sys::fuzz_target;
use partage_driver_api::exports::DriverVersion;
use partage_sim_node::node::{NodeConfig, NodeDir, VARIABLE};
use partage_sim_node::state::State;
use partage_sim_node::{install, profile};
use std::sync::LazyLock;

/// A node of this process's own, which goes with the machine's memory: a fuzzer is ended, it does not end.
static DRIVER: LazyLock<(Cuda, State)> = LazyLock::new(|| {
    let config = NodeConfig::new(DriverVersion::R550, &profile::A100_SXM4_40GB, 2, 1).unwrap();
    let folder = std::env::temp_dir().join("partage-fuzz-driver");
    let _ = NodeDir::remove(&folder);
    let node = NodeDir::create(&folder, &config).unwrap();
    let object = install::shared_object().unwrap();
    install::libraries(&object, &node.libraries(), config.driver, node.path()).unwrap();
    // SAFETY: no other thread runs yet that would read the environment.
    unsafe { std::env::set_var(VARIABLE, &folder) };
    let cuda = Cuda(Library::open(node.libraries().join("libcuda.so.1").to_str().unwrap()).unwrap());
    // SAFETY: no pointers.
    assert_eq!(unsafe { cuda.cuInit(0) }, CUDA_SUCCESS);
    (cuda, State::attach(&folder).unwrap())
});

/// Asked by the leak checker. The driver's handles live in mappings of its own, where the checker does not look for
/// pointers: it would take everything that hangs on them for lost.
#[unsafe(no_mangle)]
extern "C" fn __lsan_is_turned_off() -> libc::c_int {
    1
}

fuzz_target!(|bytes: &[u8]| {
    let (cuda, state) = &*DRIVER;
    // SAFETY: the driver is started, and the fuzzer has one thread.
    unsafe { sequence::run(cuda, bytes) };
    assert_eq!([state.used_memory(0), state.used_memory(1)], [0, 0]);
});
