//! A simulated node for a test, and programs that run on it.
//!
//! A test binary is its own client: it runs itself again with [`ROLE_VARIABLE`] set, and its test `client` runs the
//! role.
#![allow(dead_code, unreachable_pub, clippy::print_stdout, clippy::unwrap_used)]

use partage_driver_api::exports::DriverVersion;
use partage_sim_node::install;
use partage_sim_node::node::{NODE_DIR_VARIABLE, NodeConfig, NodeDir};
use partage_sim_node::profile::GpuProfile;
use partage_sim_node::state::SimNodeState;
use std::io::{BufRead, BufReader, Read, Write};
use std::process::{Child, ChildStdin, ChildStdout, Command, ExitStatus, Stdio};

pub const ROLE_VARIABLE: &str = "PARTAGE_TEST_ROLE";

/// Returns the role of this process and its arguments.
pub fn role() -> Option<Vec<String>> {
    std::env::var(ROLE_VARIABLE).ok().map(|role| role.split(' ').map(String::from).collect())
}

/// A node with installed libraries, removed when the test ends.
pub struct TestNode(pub NodeDir);

impl TestNode {
    pub fn new(card: &str, gpus: usize, driver: DriverVersion) -> Self {
        Self::with_config(card, gpus, driver, |_| ())
    }

    /// Creates a node whose configuration `change` has modified.
    pub fn with_config(
        card: &str,
        gpus: usize,
        driver: DriverVersion,
        change: impl FnOnce(&mut NodeConfig),
    ) -> Self {
        let mut config = NodeConfig::new(driver, GpuProfile::named(card).unwrap(), gpus, 11).unwrap();
        change(&mut config);
        let node = NodeDir::create_temporary(&config).unwrap();
        let object = install::shared_object().unwrap();
        install::write_libraries(&object, &node.libraries(), driver, node.path()).unwrap();
        Self(node)
    }

    /// Returns a command that runs a role of this test binary on the node.
    pub fn command(&self, role: &str) -> Command {
        let mut command = Command::new(std::env::current_exe().unwrap());
        command.args(["client", "--exact", "--nocapture", "--test-threads=1"]).env(ROLE_VARIABLE, role);
        self.env(&mut command);
        command
    }

    /// Sets the environment in which a program sees the node's GPUs.
    pub fn env(&self, command: &mut Command) {
        command.env(NODE_DIR_VARIABLE, self.0.path()).env("LD_LIBRARY_PATH", self.0.libraries());
        command.env_remove("CUDA_VISIBLE_DEVICES");
    }

    /// Runs a role to completion and returns its output; fails if the role fails.
    pub fn run_role(&self, role: &str) -> String {
        let run = self.command(role).output().unwrap();
        let (out, err) = (String::from_utf8_lossy(&run.stdout), String::from_utf8_lossy(&run.stderr));
        assert!(run.status.success(), "{role}: {}\n{out}\n{err}", run.status);
        out.into_owned()
    }

    /// Starts a role, which the test controls by lines on standard input and output.
    pub fn start(&self, role: &str) -> RoleProcess {
        RoleProcess::spawn(self.command(role))
    }

    pub fn state(&self) -> SimNodeState {
        SimNodeState::attach(self.0.path()).unwrap()
    }
}

impl Drop for TestNode {
    fn drop(&mut self) {
        let _ = NodeDir::remove(self.0.path());
    }
}

/// A process that runs a role.
pub struct RoleProcess {
    pub child: Child,
    input: Option<ChildStdin>,
    output: BufReader<ChildStdout>,
}

impl RoleProcess {
    pub fn spawn(mut command: Command) -> Self {
        let mut child = command.stdin(Stdio::piped()).stdout(Stdio::piped()).spawn().unwrap();
        let input = child.stdin.take();
        let output = BufReader::new(child.stdout.take().unwrap());
        Self { child, input, output }
    }

    /// Waits for a line that begins with `word` and returns the rest of it.
    pub fn wait_for_line(&mut self, word: &str) -> String {
        let mut line = String::new();
        while self.output.read_line(&mut line).unwrap() > 0 {
            if let Some(rest) = line.trim().strip_prefix(word) {
                return rest.trim().to_string();
            }
            line.clear();
        }
        panic!("the process exited before it printed {word:?}");
    }

    /// Resumes the role where it waits in [`wait_for_resume`].
    pub fn resume(&mut self) {
        self.input.as_mut().unwrap().write_all(b"\n").unwrap();
    }

    pub fn kill(&mut self) {
        self.child.kill().unwrap();
        self.child.wait().unwrap();
    }

    /// Waits for the process to exit; fails unless it succeeded.
    pub fn end(mut self) {
        let mut rest = String::new();
        drop(self.input.take());
        self.output.read_to_string(&mut rest).unwrap();
        let status: ExitStatus = self.child.wait().unwrap();
        assert!(status.success(), "{status}\n{rest}");
    }
}

impl Drop for RoleProcess {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

/// In a role: prints a line for the test.
pub fn print_line(words: &str) {
    // The test harness may have begun a line.
    println!("\n{words}");
    std::io::stdout().flush().unwrap();
}

/// In a role: waits until the test resumes it. Returns false when the test is over.
pub fn wait_for_resume() -> bool {
    let mut line = String::new();
    std::io::stdin().read_line(&mut line).unwrap() > 0
}
