//! The node agent as a process of a bed's node: killed and started as a test likes, with the rights that the DaemonSet's pods
//! have and not one more.

use crate::bed::{Bed, BedError, Component, Node};
use crate::clients::{Branch, Clients};
use partage_sim_node::state::State;
use std::fs;
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};

/// Where its files are on the node. Nodes do not see all of the machine's files.
const HOME: &str = "/var/lib/agent-test";
/// The simulated GPUs, on the node.
const SIMULATED: &str = "/var/lib/partage/simulated";

/// An agent on a node with simulated GPUs.
pub struct Agent<'a> {
    bed: &'a Bed,
    node: String,
    kubeconfig: PathBuf,
    process: Component,
}

/// Settings of most tests: simulated GPUs, and metrics that everybody may read.
pub const SETTINGS: &str = "driver: simulated\nsimulated: {gpus: 2, model: A100-SXM4-40GB}\nmetrics: {address: '127.0.0.1:9394', anonymous: true}\n";

impl<'a> Agent<'a> {
    /// Puts it on a node and starts it. `program` is `partage`, with what cargo puts beside it.
    pub fn start(bed: &'a Bed, node: &str, program: &Path, settings: &str) -> Result<Agent<'a>, BedError> {
        let on = bed.node(node)?;
        let home = on.path(HOME)?;
        let doing = || format!("putting the agent on {node}");
        put(program, &["partage", "libpartage_shim.so", "libpartage_sim.so"], &home, &doing())?;
        // As on a host with the driver's programs.
        if let Ok(clients) = Clients::ready() {
            let to = on.path("/usr/bin/nvidia-smi")?;
            fs::copy(clients.nvidia_smi(Branch::R550), to).map_err(BedError::io(doing()))?;
        }
        let kubeconfig = bed.agent_kubeconfig(node)?;
        let process = service(on, node, &kubeconfig, None)?;
        let agent = Agent { bed, node: node.into(), kubeconfig, process };
        agent.write_settings(settings)?;
        agent.process.start()?;
        Ok(agent)
    }

    /// Its process.
    pub fn process(&self) -> &Component {
        &self.process
    }

    /// The node it is on.
    pub fn node(&self) -> &Node {
        // It was there when we began.
        #[allow(clippy::expect_used)]
        self.bed.node(&self.node).expect("the node is there")
    }

    /// Other settings; a running agent sees them.
    pub fn write_settings(&self, text: &str) -> Result<(), BedError> {
        let path = self.node().path(HOME)?;
        let doing = || "writing the agent's settings".to_string();
        let (half, whole) = (path.join("node.yaml.half"), path.join("node.yaml"));
        fs::write(&half, text).map_err(BedError::io(doing()))?;
        fs::rename(half, whole).map_err(BedError::io(doing()))
    }

    /// After the node was rebooted: an agent there again. It is not started.
    pub fn rebooted(&mut self) -> Result<(), BedError> {
        self.process = service(self.bed.node(&self.node)?, &self.node, &self.kubeconfig, None)?;
        Ok(())
    }

    /// Kills it and starts it anew. With a step it dies when it gets there; only debug builds know steps.
    pub fn start_again(&mut self, dies_at: Option<&str>) -> Result<(), BedError> {
        self.process.kill();
        self.process = service(self.bed.node(&self.node)?, &self.node, &self.kubeconfig, dies_at)?;
        self.process.start()
    }

    /// What the simulated GPUs share: faults are injected through it. There is one once the agent has started.
    pub fn gpus(&self) -> Result<State, String> {
        let path = self.node().path(SIMULATED).map_err(|error| error.to_string())?;
        State::attach(&path).map_err(|error| error.to_string())
    }

    /// Everything it said.
    pub fn log(&self) -> String {
        fs::read_to_string(self.process.log()).unwrap_or_default()
    }

    /// A path of the node as the test sees it.
    pub fn path(&self, inside: &str) -> Result<PathBuf, BedError> {
        self.node().path(inside)
    }
}

impl Drop for Agent<'_> {
    fn drop(&mut self) {
        // The node waits for everybody who is on it.
        self.process.kill();
    }
}

/// Installs a driver on a node as NVIDIA's is, with its libraries and device files, for two GPUs of a model. It is a simulated one,
/// and what it shares is in the folder `state`: a real one has it in the kernel, so whoever uses it must see that folder, too. Major
/// 195 is NVIDIA's; no driver has it here, so who is let through gets ENXIO, and who is not gets EPERM.
pub fn install_driver(node: &Node, program: &Path, model: &str, state: &str) -> Result<(), BedError> {
    const INSTALLER: &str = "/var/lib/installer";
    put(program, &["partage", "libpartage_sim.so"], &node.path(INSTALLER)?, "installing a driver")?;
    let script = format!(
        "set -e
        {INSTALLER}/partage sim env --dir {state} --model {model} --gpus 2 --driver 550 >/dev/null
        mkdir -p /usr/lib/x86_64-linux-gnu
        cp -P {state}/lib/lib* /usr/lib/x86_64-linux-gnu/
        mknod -m 666 /dev/nvidia0 c 195 0
        mknod -m 666 /dev/nvidia1 c 195 1
        mknod -m 666 /dev/nvidiactl c 195 255
        mknod -m 666 /dev/nvidia-uvm c 510 0"
    );
    node.run("/bin/sh", ["-c", &script]).map(drop)
}

/// Puts a program, and what cargo puts beside it, into a folder.
fn put(program: &Path, files: &[&str], folder: &Path, doing: &str) -> Result<(), BedError> {
    let io = || BedError::io(doing.to_string());
    fs::create_dir_all(folder).map_err(io())?;
    for file in files {
        let places = [program.with_file_name(file), program.with_file_name("deps").join(file)];
        let from = places.iter().find(|place| place.is_file()).ok_or_else(|| BedError::Failed {
            doing: doing.to_string(),
            said: format!("{} is not built", places[0].display()),
        })?;
        fs::copy(from, folder.join(file)).map_err(io())?;
        fs::set_permissions(folder.join(file), fs::Permissions::from_mode(0o755)).map_err(io())?;
    }
    Ok(())
}

fn service(on: &Node, name: &str, kubeconfig: &Path, dies_at: Option<&str>) -> Result<Component, BedError> {
    let (settings, kubeconfig) = (format!("{HOME}/node.yaml"), kubeconfig.display().to_string());
    let program = format!("{HOME}/partage");
    let arguments =
        ["node", "--node-name", name, "--settings", &settings, "--kubeconfig", &kubeconfig, "--verbose"];
    let Some(step) = dies_at else { return on.service("agent", &program, arguments) };
    let variable = format!("PARTAGE_DIE_AT={step}");
    on.service("agent", "busybox", ["env", &variable, &program].into_iter().chain(arguments))
}
