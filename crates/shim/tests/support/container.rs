//! A container on a simulated node: its region, the shim's files, and programs that run in it.
//!
//! A test binary is its own program: it runs itself again with a role, and its test `client` plays the role. In there,
//! `libcuda.so.1` and `libnvidia-ml.so.1` are the shim's, which reach the simulated driver's.
#![allow(dead_code, unreachable_pub, clippy::unwrap_used)]

use super::node::{Node, Player};
use partage_region::{GpuShare, RegionHandle, RegionOwner, RegionPolicy, UNIT, UsageReader};
use partage_shim::install::{self, Settings};
use partage_sim_node::state::State;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::Arc;

/// Where a program in a container finds its region's folder, to look at it from beside the shim.
pub const REGION: &str = "PARTAGE_TEST_REGION";

pub const MIB: u64 = 1 << 20;

/// A container, gone with the test.
pub struct Container<'a> {
    pub node: &'a Node,
    pub owner: RegionOwner,
    folder: tempfile::TempDir,
}

/// A share of each of the node's GPUs with that much memory, and the context's size as the node has it.
pub fn shares(node: &Node, memory: u64) -> Vec<GpuShare> {
    let config = node.0.config();
    let share = |gpu: usize| GpuShare {
        uuid: config.gpus[gpu].uuid_bytes(),
        memory,
        context: config.profile(gpu).unwrap().memory.context,
        ..GpuShare::default()
    };
    (0..config.gpus.len()).map(share).collect()
}

impl<'a> Container<'a> {
    /// With so many bytes of each of the node's GPUs.
    pub fn with_memory(node: &'a Node, memory: u64) -> Self {
        Self::new(node, &shares(node, memory), RegionPolicy::default())
    }

    pub fn new(node: &'a Node, shares: &[GpuShare], policy: RegionPolicy) -> Self {
        let folder = tempfile::tempdir().unwrap();
        for part in ["region", "lib"] {
            std::fs::create_dir(folder.path().join(part)).unwrap();
        }
        let owner = RegionOwner::create(&folder.path().join("region"), shares, policy).unwrap();
        let libraries = node.0.libraries();
        let settings = Settings {
            region: &folder.path().join("region"),
            real_cuda: &libraries.join("libcuda.so.1"),
            real_nvml: &libraries.join("libnvidia-ml.so.1"),
            version: Some(node.0.config().driver.version()),
        };
        install::stand_in(&install::shared_object().unwrap(), &folder.path().join("lib"), &settings).unwrap();
        Self { node, owner, folder }
    }

    pub fn region(&self) -> PathBuf {
        self.folder.path().join("region")
    }

    /// Where the shim's files are.
    pub fn libraries(&self) -> PathBuf {
        self.folder.path().join("lib")
    }

    /// A program in the container, playing a role of this test binary.
    pub fn command(&self, role: &str) -> Command {
        let mut command = self.node.command(role);
        self.env(&mut command);
        command
    }

    /// Makes a program one of the container.
    pub fn env(&self, command: &mut Command) {
        self.node.env(command);
        command.env("LD_LIBRARY_PATH", self.libraries()).env(REGION, self.region());
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

    /// The daemon's handle on its region, for an arbiter.
    pub fn handle(&self) -> Arc<RegionHandle> {
        Arc::new(RegionHandle::open(&self.region()).unwrap())
    }

    /// What its processes hold, as the agent reads it.
    pub fn reader(&self) -> UsageReader {
        UsageReader::open(&self.region()).unwrap()
    }

    /// Bytes of a GPU that its processes hold by their own account.
    pub fn used(&self, gpu: usize) -> u64 {
        self.reader().snapshot().unwrap().gpus[gpu].used
    }
}

/// Bytes of a GPU that the living have.
pub fn truth(state: &State, gpu: usize) -> u64 {
    // Looking for them is what makes the simulated driver forget the dead.
    state.processes(gpu);
    state.used_memory(gpu) * UNIT
}

/// Inside a container: its account, and the truth about the node.
pub struct Observer {
    region: UsageReader,
    state: State,
}

impl Observer {
    pub fn new() -> Self {
        let region = std::env::var_os(REGION).unwrap();
        let node = std::env::var_os(partage_sim_node::node::VARIABLE).unwrap();
        Self {
            region: UsageReader::open(Path::new(&region)).unwrap(),
            state: State::attach(Path::new(&node)).unwrap(),
        }
    }

    /// Bytes of a GPU by the container's account.
    pub fn used(&self, gpu: usize) -> u64 {
        let snapshot = self.region.snapshot().unwrap();
        assert_eq!(snapshot.forged, []);
        snapshot.gpus[gpu].used
    }

    /// Bytes of a GPU that are truly used, by everybody alive on the node.
    pub fn truth(&self, gpu: usize) -> u64 {
        truth(&self.state, gpu)
    }

    /// Fails unless the account is exact on all GPUs.
    #[track_caller]
    pub fn exact(&self, when: &str) {
        for gpu in 0..self.state.gpus() {
            assert_eq!(self.used(gpu), self.truth(gpu), "GPU {gpu}, {when}");
        }
    }
}
