//! Support for tests of the C functions. Such a test needs a node, named by an environment variable, and its own
//! process, because a process initializes the driver only once: it runs itself again in a child that has both.

use crate::node::{NODE_DIR_VARIABLE, NodeConfig, NodeDir};
use crate::profile::GpuProfile;
use partage_driver_api::exports::DriverVersion;
use std::process::Command;

/// Set in the child, to the name of the test.
const CHILD_TEST_VARIABLE: &str = "PARTAGE_SIM_CHILD_TEST";

/// Runs `body`, a whole test, on its own node with two A100 cards and driver 550: `#[test] fn name() {
/// test_node::run(|| { ... }) }`.
pub(super) fn run<F: FnOnce()>(body: F) {
    run_with_config(|_| (), body);
}

/// Runs `body` on a node whose configuration `change` has modified.
pub(super) fn run_with_config<F: FnOnce()>(change: impl FnOnce(&mut NodeConfig), body: F) {
    // The type name of the closure contains the name of the enclosing test.
    let path = std::any::type_name::<F>();
    let name = path.split_once("::").map_or(path, |(_crate, rest)| rest);
    let name = name.split("::{{").next().unwrap_or(name);
    if std::env::var(CHILD_TEST_VARIABLE).is_ok_and(|own| own == name) {
        return body();
    }
    let card = GpuProfile::named("A100-SXM4-40GB").expect("profile exists");
    let mut config = NodeConfig::new(DriverVersion::R550, card, 2, 4).expect("valid node configuration");
    change(&mut config);
    let node = NodeDirGuard(NodeDir::create_temporary(&config).expect("node directory is created"));
    let output = Command::new(std::env::current_exe().expect("path of the test program"))
        .args([name, "--exact", "--nocapture", "--include-ignored", "--test-threads=1"])
        .env(NODE_DIR_VARIABLE, node.0.path())
        .env(CHILD_TEST_VARIABLE, name)
        .env_remove("CUDA_VISIBLE_DEVICES")
        .output()
        .expect("child test process runs");
    let (out, err) = (String::from_utf8_lossy(&output.stdout), String::from_utf8_lossy(&output.stderr));
    assert!(output.status.success() && out.contains("1 passed"), "{name}: {}\n{out}\n{err}", output.status);
}

/// Removes the node directory when the test ends, even by a panic.
struct NodeDirGuard(NodeDir);

impl Drop for NodeDirGuard {
    fn drop(&mut self) {
        let _ = NodeDir::remove(self.0.path());
    }
}

#[cfg(test)]
mod tests {
    use super::super::exports::*;
    use super::*;

    #[test]
    fn child_process_opens_its_own_driver() {
        run(|| {
            let mut count = 0;
            // SAFETY: no pointer is passed.
            assert_eq!(unsafe { cuInit(0) }, 0);
            // SAFETY: the output is a local variable, valid for writes during the call.
            assert_eq!(unsafe { cuDriverGetVersion(&mut count) }, 0);
            assert_eq!(count, 12040);
        });
    }
}
