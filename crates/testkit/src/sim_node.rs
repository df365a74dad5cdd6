//! A simulated node for a test: GPUs, a driver, and programs that use them. It goes with the value.

use crate::workload::Load;
use partage_driver_api::exports::DriverVersion;
use partage_sim_node::install::{self, InstallError};
use partage_sim_node::node::{self, ConfigError, NodeConfig, NodeDir, NodeError};
use partage_sim_node::profile::Profile;
use partage_sim_node::state::{State, StateError};
use std::io::{BufRead, BufReader, Read};
use std::os::unix::process::CommandExt;
use std::path::Path;
use std::process::{Child, Command, Stdio};

/// Why there is no simulated node, or no program on it.
#[derive(Debug, thiserror::Error)]
pub enum SimNodeError {
    /// No such card.
    #[error("no card is called {0}")]
    NoCard(String),
    /// Such a node cannot be.
    #[error(transparent)]
    Config(#[from] ConfigError),
    /// Its folder cannot be made.
    #[error(transparent)]
    Node(#[from] NodeError),
    /// Its libraries cannot be made.
    #[error(transparent)]
    Install(#[from] InstallError),
    /// Its state cannot be had.
    #[error(transparent)]
    State(#[from] StateError),
    /// A program did not start.
    #[error("the workload did not start: {0}")]
    Workload(String),
}

/// A simulated node of its own.
///
/// ```no_run
/// use partage_driver_api::exports::DriverVersion;
/// use partage_testkit::sim_node::SimNode;
/// # fn test() -> Result<(), Box<dyn std::error::Error>> {
/// let node = SimNode::new("A100-SXM4-40GB", 8, DriverVersion::R550)?;
/// let mut client = std::process::Command::new("python3");
/// node.env(&mut client).arg("train.py").status()?;
/// # Ok(())
/// # }
/// ```
#[derive(Debug)]
pub struct SimNode {
    dir: NodeDir,
    state: State,
}

impl SimNode {
    /// A fresh node with so many cards of a model in the machine they usually sit in.
    pub fn new(model: &str, count: usize, driver: DriverVersion) -> Result<Self, SimNodeError> {
        let card = Profile::named(model).ok_or_else(|| SimNodeError::NoCard(model.to_string()))?;
        Self::of(&NodeConfig::new(driver, card, count, node::fresh_seed())?)
    }

    /// A fresh node that is described whole.
    pub fn of(config: &NodeConfig) -> Result<Self, SimNodeError> {
        let dir = NodeDir::fresh(config)?;
        let made = || -> Result<State, SimNodeError> {
            install::libraries(&install::shared_object()?, &dir.libraries(), config.driver, dir.path())?;
            Ok(State::attach(dir.path())?)
        };
        match made() {
            Ok(state) => Ok(Self { dir, state }),
            Err(error) => {
                // The first error says more than what may go wrong now.
                let _ = NodeDir::remove(dir.path());
                Err(error)
            }
        }
    }

    /// Lets a program see the node's GPUs, as `partage sim env` does: all of them, whatever the test itself may see.
    pub fn env<'a>(&self, command: &'a mut Command) -> &'a mut Command {
        command.env_remove("CUDA_VISIBLE_DEVICES").env_remove("CUDA_DEVICE_ORDER");
        command.env(node::VARIABLE, self.dir.path()).env("LD_LIBRARY_PATH", self.dir.libraries())
    }

    /// What the node is made of.
    pub fn config(&self) -> &NodeConfig {
        self.dir.config()
    }

    /// The card that a GPU is.
    pub fn card(&self, gpu: usize) -> Option<&Profile> {
        self.config().profile(gpu)
    }

    /// What its processes share: faults are injected through it.
    pub fn state(&self) -> &State {
        &self.state
    }

    /// Its folder.
    pub fn path(&self) -> &Path {
        self.dir.path()
    }

    /// Starts `program workload` ([`crate::workload`]) and waits until it uses the GPU as told. Tests have the program
    /// in `env!("CARGO_BIN_EXE_partage-testkit")`.
    pub fn workload(&self, program: &Path, load: Load) -> Result<Workload, SimNodeError> {
        self.workload_with(program, load, &self.dir.libraries())
    }

    /// The same with the driver's libraries from another folder: those of a container.
    pub fn workload_with(
        &self,
        program: &Path,
        load: Load,
        libraries: &Path,
    ) -> Result<Workload, SimNodeError> {
        let failed = |error: std::io::Error| SimNodeError::Workload(error.to_string());
        let mut command = Command::new(program);
        command.arg0(Workload::NAME).arg("workload").args(["--gpu", &load.gpu.to_string()]);
        command.args(["--memory-mib", &load.memory_mib.to_string(), "--busy", &load.busy.to_string()]);
        command.stdin(Stdio::piped()).stdout(Stdio::piped()).stderr(Stdio::piped());
        let mut child = self.env(&mut command).env("LD_LIBRARY_PATH", libraries).spawn().map_err(failed)?;
        let (out, mut err) = (child.stdout.take(), child.stderr.take());
        let workload = Workload { child };
        let mut line = String::new();
        if let Some(out) = out {
            BufReader::new(out).read_line(&mut line).map_err(failed)?;
        }
        if line.trim_end() == "ready" {
            return Ok(workload);
        }
        let mut words = String::new();
        if let Some(err) = &mut err {
            err.read_to_string(&mut words).map_err(failed)?;
        }
        Err(SimNodeError::Workload(words))
    }
}

impl Drop for SimNode {
    fn drop(&mut self) {
        // What cannot be removed is a folder in memory with nothing of value.
        let _ = NodeDir::remove(self.dir.path());
    }
}

/// A program that uses a GPU. It ends with the value.
#[derive(Debug)]
pub struct Workload {
    child: Child,
}

impl Workload {
    /// How it is called: what lists of processes show.
    pub const NAME: &str = "./workload";

    /// Its process id.
    pub fn pid(&self) -> u32 {
        self.child.id()
    }
}

impl Drop for Workload {
    fn drop(&mut self) {
        // It may have ended by itself.
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}
