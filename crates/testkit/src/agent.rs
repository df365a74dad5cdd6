//! Runs the node agent as a process on a node of a test bed. Tests kill and restart it; it has exactly the permissions
//! of the DaemonSet's pods.

use crate::bed::{BedError, BedNode, Component, TestBed};
use crate::clients::{Clients, DriverBranch};
use partage_sim_node::state::SimNodeState;
use std::fs;
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};

/// Directory of the agent's files on the node. Nodes do not see all files of the host.
const INSTALL_DIR: &str = "/var/lib/agent-test";
/// Directory of the simulated GPUs on the node.
const SIMULATED_DIR: &str = "/var/lib/partage/simulated";

/// An agent on a node with simulated GPUs.
pub struct TestAgent<'a> {
    bed: &'a TestBed,
    node: String,
    kubeconfig: PathBuf,
    process: Component,
}

/// Settings that most tests use: simulated GPUs, and metrics without authentication.
pub const SIMULATED_SETTINGS: &str = "driver: simulated\nsimulated: {gpus: 2, model: A100-SXM4-40GB}\nmetrics: {address: '127.0.0.1:9394', anonymous: true}\n";

impl<'a> TestAgent<'a> {
    /// Copies the agent to a node and starts it. `program` is the path of `partage`; cargo puts the shared objects
    /// beside it.
    pub fn start(
        bed: &'a TestBed,
        node: &str,
        program: &Path,
        settings: &str,
    ) -> Result<TestAgent<'a>, BedError> {
        let on = bed.node(node)?;
        let home = on.path(INSTALL_DIR)?;
        let doing = || format!("copying the agent to {node}");
        copy_programs(program, &["partage", "libpartage_shim.so", "libpartage_sim.so"], &home, &doing())?;
        // A host with NVIDIA's driver also has `nvidia-smi`.
        if let Ok(clients) = Clients::ready() {
            let to = on.path("/usr/bin/nvidia-smi")?;
            fs::copy(clients.nvidia_smi(DriverBranch::R550), to).map_err(BedError::io(doing()))?;
        }
        let kubeconfig = bed.agent_kubeconfig(node)?;
        let process = agent_component(on, node, &kubeconfig, None)?;
        let agent = TestAgent { bed, node: node.into(), kubeconfig, process };
        agent.write_settings(settings)?;
        agent.process.start()?;
        Ok(agent)
    }

    /// Returns the agent's process.
    pub fn process(&self) -> &Component {
        &self.process
    }

    /// Returns the node that the agent runs on.
    pub fn node(&self) -> &BedNode {
        // `start` has found the node.
        #[allow(clippy::expect_used)]
        self.bed.node(&self.node).expect("the bed has the node")
    }

    /// Replaces the settings file; a running agent reloads it.
    pub fn write_settings(&self, text: &str) -> Result<(), BedError> {
        let path = self.node().path(INSTALL_DIR)?;
        let doing = || "writing the agent's settings".to_string();
        let (half, whole) = (path.join("node.yaml.half"), path.join("node.yaml"));
        fs::write(&half, text).map_err(BedError::io(doing()))?;
        fs::rename(half, whole).map_err(BedError::io(doing()))
    }

    /// Creates the agent's process again after the node was rebooted, without starting it.
    pub fn recreate_after_reboot(&mut self) -> Result<(), BedError> {
        self.process = agent_component(self.bed.node(&self.node)?, &self.node, &self.kubeconfig, None)?;
        Ok(())
    }

    /// Kills the agent and starts a new one. With `fail_at` the new one exits at that fault injection point, which only
    /// debug builds have.
    pub fn restart(&mut self, fail_at: Option<&str>) -> Result<(), BedError> {
        self.process.kill();
        self.process = agent_component(self.bed.node(&self.node)?, &self.node, &self.kubeconfig, fail_at)?;
        self.process.start()
    }

    /// Returns the shared state of the simulated GPUs, through which faults are injected. It exists once the agent has
    /// started.
    pub fn simulated_gpus(&self) -> Result<SimNodeState, String> {
        let path = self.node().path(SIMULATED_DIR).map_err(|error| error.to_string())?;
        SimNodeState::attach(&path).map_err(|error| error.to_string())
    }

    /// Returns the agent's whole log.
    pub fn log(&self) -> String {
        fs::read_to_string(self.process.log()).unwrap_or_default()
    }

    /// Returns a path of the node as this process sees it.
    pub fn path(&self, inside: &str) -> Result<PathBuf, BedError> {
        self.node().path(inside)
    }
}

impl Drop for TestAgent<'_> {
    fn drop(&mut self) {
        // The node's teardown waits for every process on it.
        self.process.kill();
    }
}

/// Installs a driver on a node as NVIDIA's is installed: libraries and device files for two GPUs of a model. The driver
/// is simulated and keeps its state in the directory `state`; a real one keeps it in the kernel, so every process that
/// uses the GPUs must see that directory. Device major 195 is NVIDIA's and no driver serves it here: an allowed open
/// fails with ENXIO, a denied one with EPERM.
pub fn install_driver(node: &BedNode, program: &Path, model: &str, state: &str) -> Result<(), BedError> {
    const INSTALLER_DIR: &str = "/var/lib/installer";
    copy_programs(
        program,
        &["partage", "libpartage_sim.so"],
        &node.path(INSTALLER_DIR)?,
        "installing a driver",
    )?;
    let script = format!(
        "set -e
        {INSTALLER_DIR}/partage sim env --dir {state} --model {model} --gpus 2 --driver 550 >/dev/null
        mkdir -p /usr/lib/x86_64-linux-gnu
        cp -P {state}/lib/lib* /usr/lib/x86_64-linux-gnu/
        mknod -m 666 /dev/nvidia0 c 195 0
        mknod -m 666 /dev/nvidia1 c 195 1
        mknod -m 666 /dev/nvidiactl c 195 255
        mknod -m 666 /dev/nvidia-uvm c 510 0"
    );
    node.run("/bin/sh", ["-c", &script]).map(drop)
}

/// Copies a program, and the files that cargo puts beside it, into a directory.
fn copy_programs(program: &Path, files: &[&str], folder: &Path, doing: &str) -> Result<(), BedError> {
    let io = || BedError::io(doing.to_string());
    fs::create_dir_all(folder).map_err(io())?;
    for file in files {
        let places = [program.with_file_name(file), program.with_file_name("deps").join(file)];
        let from = places.iter().find(|place| place.is_file()).ok_or_else(|| BedError::Failed {
            doing: doing.to_string(),
            message: format!("{} is not built", places[0].display()),
        })?;
        fs::copy(from, folder.join(file)).map_err(io())?;
        fs::set_permissions(folder.join(file), fs::Permissions::from_mode(0o755)).map_err(io())?;
    }
    Ok(())
}

fn agent_component(
    on: &BedNode,
    name: &str,
    kubeconfig: &Path,
    fail_at: Option<&str>,
) -> Result<Component, BedError> {
    let (settings, kubeconfig) = (format!("{INSTALL_DIR}/node.yaml"), kubeconfig.display().to_string());
    let program = format!("{INSTALL_DIR}/partage");
    let arguments =
        ["node", "--node-name", name, "--settings", &settings, "--kubeconfig", &kubeconfig, "--verbose"];
    let Some(step) = fail_at else { return on.service("agent", &program, arguments) };
    let variable = format!("PARTAGE_FAILPOINT={step}");
    on.service("agent", "busybox", ["env", &variable, &program].into_iter().chain(arguments))
}
