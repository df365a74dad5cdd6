//! A container on a stage's node: a region, and the shim's files in the place of the driver's.

use partage_region::{GpuShare, RegionOwner, RegionPolicy, UsageReader};
use partage_shim::install::{self, Settings};
use partage_testkit::sim_node::SimNode;
use std::path::{Path, PathBuf};

/// A container, gone with the value.
#[derive(Debug)]
pub(crate) struct Container {
    folder: tempfile::TempDir,
    /// Who could change its limits while its programs run.
    _owner: RegionOwner,
}

impl Container {
    /// With so many bytes of each of the node's GPUs.
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
        let settings = Settings {
            region: &region,
            real_cuda: &real.join("libcuda.so.1"),
            real_nvml: &real.join("libnvidia-ml.so.1"),
            version: Some(node.config().driver.version()),
        };
        install::stand_in(&install::shared_object().unwrap(), &libraries, &settings).unwrap();
        Self { folder, _owner: owner }
    }

    /// Where programs find the driver's libraries.
    pub(crate) fn libraries(&self) -> PathBuf {
        self.folder.path().join("lib")
    }

    /// Bytes of a GPU that its programs hold, as an agent reads it.
    pub(crate) fn used(&self, gpu: usize) -> u64 {
        let region: &Path = &self.folder.path().join("region");
        UsageReader::open(region).unwrap().snapshot().unwrap().gpus[gpu].used
    }
}
