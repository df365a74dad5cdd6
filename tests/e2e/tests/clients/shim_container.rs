//! A container on a test node: a region, and the shim's files in the place of the driver's libraries.

use partage_region::{GpuShare, RegionOwner, RegionPolicy, UsageReader};
use partage_shim::install::{self, StandInPaths};
use partage_testkit::sim_node::SimNode;
use std::path::{Path, PathBuf};

/// A container, removed when dropped.
#[derive(Debug)]
pub(crate) struct ShimContainer {
    folder: tempfile::TempDir,
    /// Keeps the region; it could change the limits while programs run.
    _owner: RegionOwner,
}

impl ShimContainer {
    /// Creates a container with `memory` bytes of each of the node's GPUs.
    pub(crate) fn new(node: &SimNode, memory: u64) -> Self {
        let folder = tempfile::tempdir().unwrap();
        let (region, libraries) = (folder.path().join("region"), folder.path().join("lib"));
        for part in [&region, &libraries] {
            std::fs::create_dir(part).unwrap();
        }
        let share = |index: usize| GpuShare {
            uuid: node.config().gpus[index].uuid_bytes(),
            memory,
            context: node.card(index).unwrap().memory.context,
            ..GpuShare::default()
        };
        let shares: Vec<GpuShare> = (0..node.config().gpus.len()).map(share).collect();
        let owner = RegionOwner::create(&region, &shares, RegionPolicy::default()).unwrap();
        let real = node.path().join("lib");
        let settings = StandInPaths {
            region: &region,
            real_cuda: &real.join("libcuda.so.1"),
            real_nvml: &real.join("libnvidia-ml.so.1"),
            version: Some(node.config().driver.version()),
        };
        install::write_stand_ins(&install::shared_object().unwrap(), &libraries, &settings).unwrap();
        Self { folder, _owner: owner }
    }

    /// Returns the directory where programs find the driver's libraries.
    pub(crate) fn libraries(&self) -> PathBuf {
        self.folder.path().join("lib")
    }

    /// Returns the bytes of a GPU that its programs hold, as the agent reads it.
    pub(crate) fn used(&self, gpu: usize) -> u64 {
        let region: &Path = &self.folder.path().join("region");
        UsageReader::open(region).unwrap().snapshot().unwrap().gpus[gpu].used
    }
}
