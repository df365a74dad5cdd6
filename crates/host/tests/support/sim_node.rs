//! Runs tests on a simulated node. The driver reads its node from the environment, which a process cannot change for
//! itself: a test creates the node and runs itself again on it.
#![allow(dead_code, unreachable_pub)]

use partage_driver_api::exports::DriverVersion;
use partage_host::driver::InstalledDriver;
use partage_sim_node::node::{NodeConfig, NodeDir};
use partage_sim_node::state::SimNodeState;
use partage_testkit::sim_node::SimNode;
use partage_testkit::workload::WorkloadOptions;
use std::io::{BufRead, BufReader};
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

/// The variable that is set in a test that runs on its node.
const ON_NODE_VARIABLE: &str = "PARTAGE_TEST_INSIDE";
/// The variable with the options of a workload: GPU, MiB, percent.
const WORKLOAD_VARIABLE: &str = "PARTAGE_TEST_LOAD";

/// The environment of a test that runs on its node.
pub struct NodeTest {
    pub driver: InstalledDriver,
    pub config: NodeConfig,
    pub state: SimNodeState,
}

/// Returns whether the test runs on a node: then it must not create another one.
pub fn is_inside() -> bool {
    std::env::var_os(ON_NODE_VARIABLE).is_some()
}

/// Runs the body of the named test on a simulated node.
pub fn on(test: &str, card: &str, gpus: usize, driver: DriverVersion, body: impl FnOnce(NodeTest)) {
    if is_inside() {
        let node = NodeDir::from_environment().unwrap();
        let state = SimNodeState::attach(node.path()).unwrap();
        let driver = InstalledDriver::find().unwrap().unwrap();
        return body(NodeTest { driver, config: node.config().clone(), state });
    }
    let node = SimNode::new(card, gpus, driver).unwrap();
    let mut command = again(test);
    let run = node.env(&mut command).env(ON_NODE_VARIABLE, "1").output().unwrap();
    let (out, err) = (String::from_utf8_lossy(&run.stdout), String::from_utf8_lossy(&run.stderr));
    assert!(run.status.success() && out.contains("1 passed"), "{card}, {driver:?}: {out}\n{err}");
}

/// Returns a command that runs this program with one test.
pub fn again(test: &str) -> Command {
    let mut command = Command::new(std::env::current_exe().unwrap());
    command.args([test, "--exact", "--nocapture", "--test-threads=1"]);
    command
}

/// A program that uses a GPU of the test's node. Dropping it kills the program.
pub struct TestWorkload(Child);

impl TestWorkload {
    /// Starts the program as the test `workload`, which must call [`work`].
    pub fn start(load: &WorkloadOptions) -> Self {
        let options = format!("{} {} {}", load.gpu, load.memory_mib, load.busy);
        let mut command = again("workload");
        let mut child = command
            .env(WORKLOAD_VARIABLE, options)
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .spawn()
            .unwrap();
        let out = BufReader::new(child.stdout.take().unwrap());
        let program = Self(child);
        let ready = out.lines().map(|line| line.unwrap()).any(|line| line.ends_with("ready"));
        assert!(ready, "the workload did not start");
        program
    }

    pub fn pid(&self) -> u32 {
        self.0.id()
    }
}

impl Drop for TestWorkload {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

/// Runs the workload. The test `workload` calls it.
pub fn work() {
    let Ok(options) = std::env::var(WORKLOAD_VARIABLE) else { return };
    let options: Vec<u32> = options.split(' ').map(|word| word.parse().unwrap()).collect();
    let load = WorkloadOptions { gpu: options[0], memory_mib: options[1].into(), busy: options[2] };
    partage_testkit::workload::run(&load, &mut std::io::stdout(), &false.into()).unwrap();
}

/// Polls until there is a result. Only a failing test waits for the timeout.
pub fn eventually<T>(what: &str, mut ask: impl FnMut() -> Option<T>) -> T {
    let begun = Instant::now();
    loop {
        if let Some(answer) = ask() {
            return answer;
        }
        assert!(begun.elapsed() < Duration::from_secs(120), "not within two minutes: {what}");
        std::thread::sleep(Duration::from_millis(50));
    }
}
