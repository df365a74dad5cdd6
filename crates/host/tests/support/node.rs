//! Tests that run on a simulated node. A driver takes its node from the environment, which a process does not change for
//! itself: a test makes the node and runs itself again on it.
#![allow(dead_code, unreachable_pub)]

use partage_driver_api::exports::DriverVersion;
use partage_host::driver::Driver;
use partage_sim_node::node::{NodeConfig, NodeDir};
use partage_sim_node::state::State;
use partage_testkit::sim_node::SimNode;
use partage_testkit::workload::Load;
use std::io::{BufRead, BufReader};
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

/// Set in a test that was run again on its node.
const INSIDE: &str = "PARTAGE_TEST_INSIDE";
/// What a workload does: GPU, MiB, percent.
const LOAD: &str = "PARTAGE_TEST_LOAD";

/// Where a test finds itself.
pub struct Inside {
    pub driver: Driver,
    pub config: NodeConfig,
    pub state: State,
}

/// Whether this is the run on a node: a test that has several does not make more of them.
pub fn is_inside() -> bool {
    std::env::var_os(INSIDE).is_some()
}

/// Runs the body of the test of this name on a node.
pub fn on(test: &str, card: &str, gpus: usize, driver: DriverVersion, body: impl FnOnce(Inside)) {
    if is_inside() {
        let node = NodeDir::named().unwrap();
        let state = State::attach(node.path()).unwrap();
        let driver = Driver::find().unwrap().unwrap();
        return body(Inside { driver, config: node.config().clone(), state });
    }
    let node = SimNode::new(card, gpus, driver).unwrap();
    let mut command = again(test);
    let run = node.env(&mut command).env(INSIDE, "1").output().unwrap();
    let (out, err) = (String::from_utf8_lossy(&run.stdout), String::from_utf8_lossy(&run.stderr));
    assert!(run.status.success() && out.contains("1 passed"), "{card}, {driver:?}: {out}\n{err}");
}

/// This program, running one test.
pub fn again(test: &str) -> Command {
    let mut command = Command::new(std::env::current_exe().unwrap());
    command.args([test, "--exact", "--nocapture", "--test-threads=1"]);
    command
}

/// A program that uses a GPU of the node that this test is on. It ends with the value.
pub struct Program(Child);

impl Program {
    /// Begins it, as the test `workload`, which must call [`work`].
    pub fn start(load: &Load) -> Self {
        let told = format!("{} {} {}", load.gpu, load.memory_mib, load.busy);
        let mut command = again("workload");
        let mut child = command.env(LOAD, told).stdin(Stdio::piped()).stdout(Stdio::piped()).spawn().unwrap();
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

impl Drop for Program {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

/// What the test `workload` does.
pub fn work() {
    let Ok(told) = std::env::var(LOAD) else { return };
    let told: Vec<u32> = told.split(' ').map(|word| word.parse().unwrap()).collect();
    let load = Load { gpu: told[0], memory_mib: told[1].into(), busy: told[2] };
    partage_testkit::workload::run(&load, &mut std::io::stdout(), &false.into()).unwrap();
}

/// Asks again until there is an answer. Only a test that fails waits long.
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
