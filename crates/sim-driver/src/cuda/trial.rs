//! Tests of the C functions. They need a node, whose folder a variable of the environment names, and a process of
//! their own, since a process opens the driver once: each such test runs itself again in a child that has both.

use crate::node::{NodeConfig, NodeDir, VARIABLE};
use crate::profile::Profile;
use partage_driver_api::exports::DriverVersion;
use std::process::Command;

/// Set in the child, to the test's name.
const CHILD: &str = "PARTAGE_SIM_TRIAL";

/// Runs `body`, the whole of a test, on a node of its own with two A100 cards and driver 550:
/// `#[test] fn name() { trial::on_node(|| { ... }) }`.
pub(super) fn on_node<F: FnOnce()>(body: F) {
    on_node_with(|_| (), body);
}

/// The same, on a node that `change` has changed.
pub(super) fn on_node_with<F: FnOnce()>(change: impl FnOnce(&mut NodeConfig), body: F) {
    // The closure is named after the test that it is written in.
    let path = std::any::type_name::<F>();
    let name = path.split_once("::").map_or(path, |(_crate, rest)| rest);
    let name = name.split("::{{").next().unwrap_or(name);
    if std::env::var(CHILD).is_ok_and(|own| own == name) {
        return body();
    }
    let card = Profile::named("A100-SXM4-40GB").expect("the card is known");
    let mut config = NodeConfig::new(DriverVersion::R550, card, 2, 4).expect("the node can be");
    change(&mut config);
    let node = Folder(NodeDir::fresh(&config).expect("the node is made"));
    let run = Command::new(std::env::current_exe().expect("this program has a path"))
        .args([name, "--exact", "--nocapture", "--include-ignored", "--test-threads=1"])
        .env(VARIABLE, node.0.path())
        .env(CHILD, name)
        .env_remove("CUDA_VISIBLE_DEVICES")
        .output()
        .expect("the test runs again");
    let (out, err) = (String::from_utf8_lossy(&run.stdout), String::from_utf8_lossy(&run.stderr));
    assert!(run.status.success() && out.contains("1 passed"), "{name}: {}\n{out}\n{err}", run.status);
}

/// Removed with the test, whatever became of it.
struct Folder(NodeDir);

impl Drop for Folder {
    fn drop(&mut self) {
        let _ = NodeDir::remove(self.0.path());
    }
}

#[cfg(test)]
mod tests {
    use super::super::exports::*;
    use super::*;

    #[test]
    fn a_trial_has_a_driver_of_its_own() {
        on_node(|| {
            let mut count = 0;
            // SAFETY: no pointers.
            assert_eq!(unsafe { cuInit(0) }, 0);
            // SAFETY: the number is ours to write.
            assert_eq!(unsafe { cuDriverGetVersion(&mut count) }, 0);
            assert_eq!(count, 12040);
        });
    }
}
