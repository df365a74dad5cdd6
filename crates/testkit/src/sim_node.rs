//! A simulated node for a test: GPUs, a driver, and programs that use them. Dropping the value removes it.

use crate::workload::WorkloadOptions;
use partage_driver_api::exports::DriverVersion;
use partage_sim_node::install::{self, InstallError};
use partage_sim_node::node::{self, ConfigError, NodeConfig, NodeDir, NodeError};
use partage_sim_node::profile::GpuProfile;
use partage_sim_node::state::{SimNodeState, StateError};
use std::io::{BufRead, BufReader, Read};
use std::os::unix::process::CommandExt;
use std::path::Path;
use std::process::{Child, Command, Stdio};

/// Why a simulated node, or a program on it, could not be started.
#[derive(Debug, thiserror::Error)]
pub enum SimNodeError {
    /// The GPU model is unknown.
    #[error("unknown GPU model {0}")]
    NoCard(String),
    /// The node's configuration is not valid.
    #[error(transparent)]
    Config(#[from] ConfigError),
    /// The node's directory cannot be created.
    #[error(transparent)]
    Node(#[from] NodeError),
    /// The driver libraries cannot be installed.
    #[error(transparent)]
    Install(#[from] InstallError),
    /// The node's shared state cannot be opened.
    #[error(transparent)]
    State(#[from] StateError),
    /// The workload program did not start.
    #[error("the workload did not start: {0}")]
    WorkloadProcess(String),
}

/// A simulated node with its own directory.
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
    state: SimNodeState,
}

impl SimNode {
    /// Creates a node with `count` GPUs of a model, in the machine type that usually has them.
    pub fn new(model: &str, count: usize, driver: DriverVersion) -> Result<Self, SimNodeError> {
        let card = GpuProfile::named(model).ok_or_else(|| SimNodeError::NoCard(model.to_string()))?;
        Self::from_config(&NodeConfig::new(driver, card, count, node::random_seed())?)
    }

    /// Creates a node from a complete configuration.
    pub fn from_config(config: &NodeConfig) -> Result<Self, SimNodeError> {
        let dir = NodeDir::create_temporary(config)?;
        let made = || -> Result<SimNodeState, SimNodeError> {
            install::write_libraries(
                &install::shared_object()?,
                &dir.libraries(),
                config.driver,
                dir.path(),
            )?;
            Ok(SimNodeState::attach(dir.path())?)
        };
        match made() {
            Ok(state) => Ok(Self { dir, state }),
            Err(error) => {
                // The first error is more useful than one of the cleanup.
                let _ = NodeDir::remove(dir.path());
                Err(error)
            }
        }
    }

    /// Sets the environment so that a program sees the node's GPUs, as `partage sim env` does: all of them, whatever
    /// this test itself may see.
    pub fn env<'a>(&self, command: &'a mut Command) -> &'a mut Command {
        command.env_remove("CUDA_VISIBLE_DEVICES").env_remove("CUDA_DEVICE_ORDER");
        command.env(node::NODE_DIR_VARIABLE, self.dir.path()).env("LD_LIBRARY_PATH", self.dir.libraries())
    }

    /// Returns the node's configuration.
    pub fn config(&self) -> &NodeConfig {
        self.dir.config()
    }

    /// Returns the profile of a GPU.
    pub fn card(&self, gpu: usize) -> Option<&GpuProfile> {
        self.config().profile(gpu)
    }

    /// Returns the state that the node's processes share, through which faults are injected.
    pub fn state(&self) -> &SimNodeState {
        &self.state
    }

    /// Returns the node's directory.
    pub fn path(&self) -> &Path {
        self.dir.path()
    }

    /// Starts `program workload` ([`crate::workload`]) and waits until it uses the GPU as requested. Tests have the
    /// program's path in `env!("CARGO_BIN_EXE_partage-testkit")`.
    pub fn workload(&self, program: &Path, load: WorkloadOptions) -> Result<WorkloadProcess, SimNodeError> {
        self.workload_with(program, load, &self.dir.libraries())
    }

    /// Starts a workload as [`SimNode::workload`] does, with the driver libraries of another directory: those of a
    /// container.
    pub fn workload_with(
        &self,
        program: &Path,
        load: WorkloadOptions,
        libraries: &Path,
    ) -> Result<WorkloadProcess, SimNodeError> {
        let failed = |error: std::io::Error| SimNodeError::WorkloadProcess(error.to_string());
        let mut command = Command::new(program);
        command.arg0(WorkloadProcess::PROCESS_NAME).arg("workload").args(["--gpu", &load.gpu.to_string()]);
        command.args(["--memory-mib", &load.memory_mib.to_string(), "--busy", &load.busy.to_string()]);
        command.stdin(Stdio::piped()).stdout(Stdio::piped()).stderr(Stdio::piped());
        let mut child = self.env(&mut command).env("LD_LIBRARY_PATH", libraries).spawn().map_err(failed)?;
        let (out, mut err) = (child.stdout.take(), child.stderr.take());
        let workload = WorkloadProcess { child };
        let mut line = String::new();
        if let Some(out) = out {
            BufReader::new(out).read_line(&mut line).map_err(failed)?;
        }
        if line.trim_end() == "ready" {
            return Ok(workload);
        }
        let mut output = String::new();
        if let Some(err) = &mut err {
            err.read_to_string(&mut output).map_err(failed)?;
        }
        Err(SimNodeError::WorkloadProcess(output))
    }
}

impl Drop for SimNode {
    fn drop(&mut self) {
        // Removal errors are ignored: the directory is temporary.
        let _ = NodeDir::remove(self.dir.path());
    }
}

/// A program that uses a GPU. Dropping the value ends it.
#[derive(Debug)]
pub struct WorkloadProcess {
    child: Child,
}

impl WorkloadProcess {
    /// The program's name in process lists.
    pub const PROCESS_NAME: &str = "./workload";

    /// Returns the process id of the workload.
    pub fn pid(&self) -> u32 {
        self.child.id()
    }
}

impl Drop for WorkloadProcess {
    fn drop(&mut self) {
        // It may have exited already.
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}
