//! A simulated node for a test, and programs that run on it.
//!
//! A test binary is its own client: it runs itself again with [`ROLE`] set, and its test `client` plays the role.
#![allow(dead_code, unreachable_pub, clippy::print_stdout, clippy::unwrap_used)]

use partage_driver_api::exports::DriverVersion;
use partage_sim_node::install;
use partage_sim_node::node::{NodeConfig, NodeDir, VARIABLE};
use partage_sim_node::profile::Profile;
use partage_sim_node::state::State;
use std::io::{BufRead, BufReader, Read, Write};
use std::process::{Child, ChildStdin, ChildStdout, Command, ExitStatus, Stdio};

pub const ROLE: &str = "PARTAGE_TEST_ROLE";

/// The part a process plays, and its arguments.
pub fn role() -> Option<Vec<String>> {
    std::env::var(ROLE).ok().map(|role| role.split(' ').map(String::from).collect())
}

/// A node with its libraries, gone with the test.
pub struct Node(pub NodeDir);

impl Node {
    pub fn new(card: &str, gpus: usize, driver: DriverVersion) -> Self {
        let config = NodeConfig::new(driver, Profile::named(card).unwrap(), gpus, 11).unwrap();
        let node = NodeDir::fresh(&config).unwrap();
        let object = install::shared_object().unwrap();
        install::libraries(&object, &node.libraries(), driver, node.path()).unwrap();
        Self(node)
    }

    /// A program on the node, playing a role of this test binary.
    pub fn command(&self, role: &str) -> Command {
        let mut command = Command::new(std::env::current_exe().unwrap());
        command.args(["client", "--exact", "--nocapture", "--test-threads=1"]).env(ROLE, role);
        self.env(&mut command);
        command
    }

    /// Makes a program see the node's GPUs.
    pub fn env(&self, command: &mut Command) {
        command.env(VARIABLE, self.0.path()).env("LD_LIBRARY_PATH", self.0.libraries());
        command.env_remove("CUDA_VISIBLE_DEVICES");
    }

    /// Plays a role to its end; fails with what it printed.
    pub fn play(&self, role: &str) -> String {
        let run = self.command(role).output().unwrap();
        let (out, err) = (String::from_utf8_lossy(&run.stdout), String::from_utf8_lossy(&run.stderr));
        assert!(run.status.success(), "{role}: {}\n{out}\n{err}", run.status);
        out.into_owned()
    }

    /// Begins a role; it goes on when told to.
    pub fn start(&self, role: &str) -> Player {
        Player::of(self.command(role))
    }

    pub fn state(&self) -> State {
        State::attach(self.0.path()).unwrap()
    }
}

impl Drop for Node {
    fn drop(&mut self) {
        let _ = NodeDir::remove(self.0.path());
    }
}

/// A process that plays a role.
pub struct Player {
    pub child: Child,
    input: Option<ChildStdin>,
    output: BufReader<ChildStdout>,
}

impl Player {
    pub fn of(mut command: Command) -> Self {
        let mut child = command.stdin(Stdio::piped()).stdout(Stdio::piped()).spawn().unwrap();
        let input = child.stdin.take();
        let output = BufReader::new(child.stdout.take().unwrap());
        Self { child, input, output }
    }

    /// The next line that begins with the word, without it.
    pub fn hear(&mut self, word: &str) -> String {
        let mut line = String::new();
        while self.output.read_line(&mut line).unwrap() > 0 {
            if let Some(rest) = line.trim().strip_prefix(word) {
                return rest.trim().to_string();
            }
            line.clear();
        }
        panic!("the process ended before it said {word:?}");
    }

    /// Lets it go on from where it waits.
    pub fn tell(&mut self) {
        self.input.as_mut().unwrap().write_all(b"\n").unwrap();
    }

    pub fn kill(&mut self) {
        self.child.kill().unwrap();
        self.child.wait().unwrap();
    }

    /// Waits for its end; fails unless it was a good one.
    pub fn end(mut self) {
        let mut rest = String::new();
        drop(self.input.take());
        self.output.read_to_string(&mut rest).unwrap();
        let status: ExitStatus = self.child.wait().unwrap();
        assert!(status.success(), "{status}\n{rest}");
    }
}

impl Drop for Player {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

/// In a role: says a word to the test.
pub fn say(words: &str) {
    // The test harness has begun a line of its own.
    println!("\n{words}");
    std::io::stdout().flush().unwrap();
}

/// In a role: waits until the test lets it go on. False when the test is over.
pub fn wait_to_be_told() -> bool {
    let mut line = String::new();
    std::io::stdin().read_line(&mut line).unwrap() > 0
}
