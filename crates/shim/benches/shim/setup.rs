//! A simulated node, and containers on it.

use partage_driver_api::exports::DriverVersion;
use partage_region::{GpuShare, RegionHandle, RegionOwner, RegionPolicy};
use partage_shim::install as shim;
use partage_sim_node::node::{NODE_DIR_VARIABLE, NodeConfig, NodeDir};
use partage_sim_node::profile::GpuProfile;
use partage_sim_node::state::SimNodeState;
use std::io::{BufRead, BufReader, Write};
use std::os::unix::process::CommandExt;
use std::path::Path;
use std::process::{Child, ChildStdout, Stdio};
use std::sync::Arc;

pub struct BenchNode {
    pub dir: NodeDir,
    pub state: SimNodeState,
}

impl BenchNode {
    pub fn new(card: &str) -> Self {
        Self::with_gpus(card, 1)
    }

    pub fn with_gpus(card: &str, gpus: usize) -> Self {
        let config = NodeConfig::new(DriverVersion::R550, GpuProfile::named(card).unwrap(), gpus, 7).unwrap();
        let dir = NodeDir::create_temporary(&config).unwrap();
        let object = partage_sim_node::install::shared_object().unwrap();
        partage_sim_node::install::write_libraries(
            &object,
            &dir.libraries(),
            DriverVersion::R550,
            dir.path(),
        )
        .unwrap();
        let state = SimNodeState::attach(dir.path()).unwrap();
        Self { dir, state }
    }

    pub fn uuid(&self) -> [u8; 16] {
        self.uuid_of(0)
    }

    pub fn uuid_of(&self, gpu: usize) -> [u8; 16] {
        self.dir.config().gpus[gpu].uuid_bytes()
    }

    /// Returns the nanoseconds of the first GPU's time that a process has had.
    pub fn served(&self, pid: u32) -> u64 {
        let processes = self.state.processes(0);
        let slot = processes.iter().find(|process| process.pid == pid).map(|process| process.slot);
        slot.map_or(0, |slot| self.state.service_time(0, slot).0)
    }
}

impl Drop for BenchNode {
    fn drop(&mut self) {
        let _ = NodeDir::remove(self.dir.path());
    }
}

/// A container: its region and its libraries.
pub struct BenchContainer {
    pub folder: tempfile::TempDir,
}

impl BenchContainer {
    pub fn new(node: &BenchNode, share: GpuShare) -> Self {
        Self::with_shares(node, &[share])
    }

    /// Creates a container with shares of several GPUs.
    pub fn with_shares(node: &BenchNode, shares: &[GpuShare]) -> Self {
        let folder = tempfile::tempdir_in("/dev/shm").unwrap();
        RegionOwner::create(folder.path(), shares, RegionPolicy::default()).unwrap();
        let libraries = folder.path().join("lib");
        std::fs::create_dir(&libraries).unwrap();
        let settings = shim::StandInPaths {
            region: folder.path(),
            real_cuda: &node.dir.libraries().join("libcuda.so.1"),
            real_nvml: &node.dir.libraries().join("libnvidia-ml.so.1"),
            version: None,
        };
        shim::write_stand_ins(&shim::shared_object().unwrap(), &libraries, &settings).unwrap();
        Self { folder }
    }

    pub fn libraries(&self) -> std::path::PathBuf {
        self.folder.path().join("lib")
    }

    /// Returns the daemon's handle on its region, for an arbiter.
    pub fn handle(&self) -> Arc<RegionHandle> {
        Arc::new(RegionHandle::open(self.folder.path()).unwrap())
    }
}

/// A process that acts as a tenant.
pub struct BenchTenant {
    pub child: Child,
    output: BufReader<ChildStdout>,
}

impl BenchTenant {
    pub fn start(node: &BenchNode, libraries: &Path, arguments: &[&str]) -> Self {
        Self::start_with(node, libraries, arguments, &[])
    }

    /// Starts a tenant with more environment variables.
    pub fn start_with(
        node: &BenchNode,
        libraries: &Path,
        arguments: &[&str],
        variables: &[(&str, &Path)],
    ) -> Self {
        let mut command = crate::tenant_command(arguments);
        command.env(NODE_DIR_VARIABLE, node.dir.path()).env("LD_LIBRARY_PATH", libraries);
        command.envs(variables.iter().copied());
        // SAFETY: the function only makes a system call: a tenant must not outlive a benchmark that was interrupted.
        unsafe {
            command.pre_exec(|| {
                libc::prctl(libc::PR_SET_PDEATHSIG, libc::SIGKILL);
                Ok(())
            })
        };
        let mut child = command.stdin(Stdio::piped()).stdout(Stdio::piped()).spawn().unwrap();
        let output = BufReader::new(child.stdout.take().unwrap());
        Self { child, output }
    }

    pub fn line(&mut self) -> String {
        let mut line = String::new();
        self.output.read_line(&mut line).unwrap();
        line.trim().to_string()
    }

    /// Waits until it is ready.
    pub fn ready(&mut self) {
        // A test harness prints lines of its own, and an empty one at the end of the output.
        for _ in 0..16 {
            if self.line() == "ready" {
                return;
            }
        }
        panic!("the tenant did not start");
    }

    pub fn go(&mut self) {
        self.child.stdin.as_mut().unwrap().write_all(b"go\n").unwrap();
    }

    pub fn pid(&self) -> u32 {
        self.child.id()
    }
}

impl Drop for BenchTenant {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}
