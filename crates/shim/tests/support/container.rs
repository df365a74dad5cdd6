//! A container on a simulated node: its region, the shim's files, and programs that run in it.
//!
//! A test binary is its own program: it runs itself again with a role, and its test `client` runs the role. In there,
//! `libcuda.so.1` and `libnvidia-ml.so.1` are the shim's, which call the simulated driver's.
#![allow(dead_code, unreachable_pub, clippy::unwrap_used)]

use super::node::{RoleProcess, TestNode};
use partage_region::{GpuShare, MEMORY_UNIT, RegionHandle, RegionOwner, RegionPolicy, UsageReader};
use partage_shim::install::{self, StandInPaths};
use partage_sim_node::state::SimNodeState;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::Arc;

/// Environment variable with the directory of the container's region, for programs that read it without the shim.
pub const REGION_VARIABLE: &str = "PARTAGE_TEST_REGION";

pub const MIB: u64 = 1 << 20;

/// A container that is removed with the test.
pub struct TestContainer<'a> {
    pub node: &'a TestNode,
    pub owner: RegionOwner,
    folder: tempfile::TempDir,
}

/// Returns a share of each of the node's GPUs with this much memory, and the node's context size.
pub fn shares(node: &TestNode, memory: u64) -> Vec<GpuShare> {
    let config = node.0.config();
    let share = |gpu: usize| GpuShare {
        uuid: config.gpus[gpu].uuid_bytes(),
        memory,
        context: config.profile(gpu).unwrap().memory.context,
        ..GpuShare::default()
    };
    (0..config.gpus.len()).map(share).collect()
}

impl<'a> TestContainer<'a> {
    /// Creates a container with this many bytes of each of the node's GPUs.
    pub fn with_memory(node: &'a TestNode, memory: u64) -> Self {
        Self::new(node, &shares(node, memory), RegionPolicy::default())
    }

    pub fn new(node: &'a TestNode, shares: &[GpuShare], policy: RegionPolicy) -> Self {
        let folder = tempfile::tempdir().unwrap();
        for part in ["region", "lib"] {
            std::fs::create_dir(folder.path().join(part)).unwrap();
        }
        let owner = RegionOwner::create(&folder.path().join("region"), shares, policy).unwrap();
        let libraries = node.0.libraries();
        let settings = StandInPaths {
            region: &folder.path().join("region"),
            real_cuda: &libraries.join("libcuda.so.1"),
            real_nvml: &libraries.join("libnvidia-ml.so.1"),
            version: Some(node.0.config().driver.version()),
        };
        install::write_stand_ins(&install::shared_object().unwrap(), &folder.path().join("lib"), &settings)
            .unwrap();
        Self { node, owner, folder }
    }

    pub fn region(&self) -> PathBuf {
        self.folder.path().join("region")
    }

    /// Returns the directory of the shim's files.
    pub fn libraries(&self) -> PathBuf {
        self.folder.path().join("lib")
    }

    /// Returns a command that runs a role of this test binary in the container.
    pub fn command(&self, role: &str) -> Command {
        let mut command = self.node.command(role);
        self.env(&mut command);
        command
    }

    /// Sets a command's environment so that it runs in the container.
    pub fn env(&self, command: &mut Command) {
        self.node.env(command);
        command.env("LD_LIBRARY_PATH", self.libraries()).env(REGION_VARIABLE, self.region());
    }

    /// Runs a role to its end and returns its output; fails with its output if it fails.
    pub fn run_role(&self, role: &str) -> String {
        let run = self.command(role).output().unwrap();
        let (out, err) = (String::from_utf8_lossy(&run.stdout), String::from_utf8_lossy(&run.stderr));
        assert!(run.status.success(), "{role}: {}\n{out}\n{err}", run.status);
        out.into_owned()
    }

    /// Starts a role, which continues when it is resumed.
    pub fn start(&self, role: &str) -> RoleProcess {
        RoleProcess::spawn(self.command(role))
    }

    /// Returns the daemon's handle on its region, for an arbiter.
    pub fn handle(&self) -> Arc<RegionHandle> {
        Arc::new(RegionHandle::open(&self.region()).unwrap())
    }

    /// Returns the daemon's reader of its usage.
    pub fn reader(&self) -> UsageReader {
        UsageReader::open(&self.region()).unwrap()
    }

    /// Returns the nanoseconds of a GPU's time that the container was charged: by the turn scheduler, and by its own
    /// processes while there was none.
    pub fn charged(&self, gpu: usize) -> u64 {
        charged(&self.region(), gpu)
    }

    /// Returns the bytes of a GPU that its processes hold according to their account.
    pub fn used(&self, gpu: usize) -> u64 {
        self.reader().snapshot().unwrap().gpus[gpu].used
    }
}

/// Returns the nanoseconds of a GPU's time that the container with this region was charged.
pub fn charged(region: &Path, gpu: usize) -> u64 {
    let handle = RegionHandle::open(region).unwrap();
    let spent = handle.reader().snapshot().unwrap().gpus[gpu].spent;
    handle.owner().limits(gpu).unwrap().charged() + spent
}

/// Returns the bytes of a GPU that live processes hold, from the simulated driver.
pub fn true_usage(state: &SimNodeState, gpu: usize) -> u64 {
    // Listing processes makes the simulated driver reclaim dead ones.
    state.processes(gpu);
    state.used_memory(gpu) * MEMORY_UNIT
}

/// Inside a container: its account, and the true usage of the node.
pub struct Observer {
    region: UsageReader,
    state: SimNodeState,
}

impl Observer {
    pub fn new() -> Self {
        let region = std::env::var_os(REGION_VARIABLE).unwrap();
        let node = std::env::var_os(partage_sim_node::node::NODE_DIR_VARIABLE).unwrap();
        Self {
            region: UsageReader::open(Path::new(&region)).unwrap(),
            state: SimNodeState::attach(Path::new(&node)).unwrap(),
        }
    }

    /// Returns the bytes of a GPU according to the container's account.
    pub fn used(&self, gpu: usize) -> u64 {
        let snapshot = self.region.snapshot().unwrap();
        assert_eq!(snapshot.forged, []);
        snapshot.gpus[gpu].used
    }

    /// Returns the bytes of a GPU that all live processes of the node really hold.
    pub fn true_usage(&self, gpu: usize) -> u64 {
        true_usage(&self.state, gpu)
    }

    /// Fails unless the account is exact on all GPUs.
    #[track_caller]
    pub fn assert_exact(&self, when: &str) {
        for gpu in 0..self.state.gpus() {
            assert_eq!(self.used(gpu), self.true_usage(gpu), "GPU {gpu}, {when}");
        }
    }
}
