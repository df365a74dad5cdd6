//! The machine: its driver or a simulated one, its GPUs, and the stand-in libraries.

use crate::settings::{InvalidSettings, WorkstationSettings};
use crate::share_store;
use crate::state_dir::{StateDir, StateDirError};
use partage_core::model::{GpuUuid, Node, Share};
use partage_enforce::context_sizes::ContextSizes;
use partage_enforce::gpus::{
    DiscoveredGpus, DiscoveryError, DiscoveryOptions, SimulatedMachine, discover, find_driver,
};
use partage_enforce::libraries::{LibraryBuild, LibraryError, LibraryInstaller, StandInPaths};
use partage_enforce::records::{Durability, RecordDir};
use partage_host::atomic_file::{file_stamp, run_once};
use partage_host::driver::{self, InstalledDriver, OtherLibraries};
use partage_host::gpus::{NvmlSession, NvmlSessionError};
use partage_host::process::boot_id;
use partage_host::simulated_driver::write_device_files;
use std::collections::BTreeSet;
use std::fs;
use std::io;
use std::os::unix::fs::{FileTypeExt, MetadataExt};
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

/// The cache by which the loader finds libraries, independent of the environment.
const LOADER_CACHE: &str = "/etc/ld.so.cache";

/// The major device number of NVIDIA GPUs.
const NVIDIA_MAJOR: u32 = 195;

/// The running program, which is started again as a daemon.
pub(crate) const PROGRAM: &str = "/proc/self/exe";

/// The name of the machine as a node of the core.
const NODE_NAME: &str = "this machine";

/// Why the GPUs of this machine cannot be shared.
#[derive(Debug, thiserror::Error)]
pub enum MachineError {
    /// The state directory cannot be used.
    #[error(transparent)]
    StateDir(#[from] StateDirError),
    /// Libraries cannot be loaded from the state directory.
    #[error("{}: programs cannot load libraries from there (it is mounted noexec): use another directory with --state-dir", path.display())]
    NoExec {
        /// The directory of libraries.
        path: PathBuf,
    },
    /// The directory of records cannot be opened.
    #[error("cannot open {}", path.display())]
    Records {
        /// The path of the directory.
        path: PathBuf,
        /// The error of the system.
        #[source]
        source: io::Error,
    },
    /// The settings require NVIDIA's driver, and none is installed.
    #[error("no NVIDIA driver found, and the settings require one: install it, or write `driver: auto`")]
    NoDriver,
    /// There are no GPUs to share.
    #[error(transparent)]
    NvmlSession(DiscoveryError),
    /// The driver reports no GPUs.
    #[error(transparent)]
    Session(#[from] NvmlSessionError),
    /// The settings do not fit this machine.
    #[error(transparent)]
    Settings(#[from] InvalidSettings),
    /// The libraries that stand in for the driver's cannot be installed.
    #[error(transparent)]
    Libraries(#[from] LibraryError),
}

impl From<DiscoveryError> for MachineError {
    fn from(error: DiscoveryError) -> MachineError {
        match error {
            DiscoveryError::NoDriver { .. } => MachineError::NoDriver,
            error => MachineError::NvmlSession(error),
        }
    }
}

/// A machine whose GPUs can be shared.
pub(crate) struct Machine {
    pub(crate) driver: InstalledDriver,
    pub(crate) gpus: NvmlSession,
    pub(crate) node: Node,
    pub(crate) warnings: Vec<String>,
    /// GPUs that an earlier daemon of this boot found unusable or missing.
    pub(crate) previously_unhealthy: BTreeSet<GpuUuid>,
    /// The records of the GPUs for the next daemon.
    pub(crate) records: RecordDir,
    pub(crate) boot_id: String,
    libraries: LibraryInstaller,
    /// The directory of the stand-ins of this build, for processes in a mount namespace.
    stand_ins: PathBuf,
    /// A cache for the loader that contains the simulated driver.
    loader_cache: Option<PathBuf>,
}

impl Machine {
    /// Discovers the GPUs, measures the size of contexts on them, and installs the libraries. It is fast if that was
    /// done before.
    pub(crate) fn open(
        state_dir: &StateDir,
        settings: &WorkstationSettings,
    ) -> Result<(Machine, ContextSizes), MachineError> {
        state_dir.create()?;
        check_executable(state_dir)?;
        let records = state_dir.path();
        let records = RecordDir::open(records, &records.join("quarantine"), Durability::UntilReboot)
            .map_err(|source| MachineError::Records { path: records.into(), source })?;
        let (folder, stamp, boot_id) = (state_dir.simulated(), state_dir.lib().join("gpus.stamp"), boot_id());
        let DiscoveredGpus { driver, session: gpus, inventory, previously_unhealthy } =
            discover(&DiscoveryOptions {
                node_name: NODE_NAME,
                driver: settings.driver,
                host_root: None,
                simulated: &settings.simulated,
                simulated_machine: SimulatedMachine {
                    folder: &folder,
                    seed: &folder,
                    in_use: share_store::has_shares(state_dir),
                    stamp: Some(&stamp),
                },
                records: &records,
                boot_id: &boot_id,
            })?;
        let node = inventory.node;
        settings.check_against(&node)?;
        let mut contexts = ContextSizes::read(state_dir.lib().join("contexts.json"), gpus.driver_version());
        let warnings = contexts.measure_unknown(&node, &driver);
        let mut machine = Machine {
            driver,
            gpus,
            node,
            warnings,
            previously_unhealthy,
            records,
            boot_id,
            libraries: LibraryInstaller::open(&state_dir.stand_ins())?,
            stand_ins: PathBuf::new(),
            loader_cache: None,
        };
        machine.stand_ins = machine.install(state_dir)?;
        if machine.driver.simulated.is_some() {
            machine.loader_cache = loader_cache(state_dir, &machine.driver);
        }
        Ok((machine, contexts))
    }

    /// Installs the stand-ins of this build, unless that was done before, and removes those of earlier builds that no
    /// share uses any more. A running share keeps the ones that it was started with.
    fn install(&self, state_dir: &StateDir) -> Result<PathBuf, LibraryError> {
        let [real_cuda, real_nvml] = state_dir.driver_files();
        let driver_version = self.gpus.driver_version();
        let region = state_dir.region_at();
        let paths = StandInPaths {
            region: &region,
            real_cuda: &real_cuda,
            real_nvml: &real_nvml,
            version: Some(driver_version),
        };
        let (contents, stamp) = (format!("{paths:?}"), state_dir.lib().join("stand-ins.stamp"));
        let build = LibraryBuild { driver_version, contents: &contents, stamp: Some(&stamp) };
        let directory =
            self.libraries.install(&build, |directory| self.libraries.write_stand_ins(directory, &paths))?;
        self.libraries.remove_unused(&directory)?;
        Ok(directory)
    }

    /// Returns the directory of the stand-ins, for processes in a mount namespace.
    pub(crate) fn stand_ins(&self) -> &Path {
        &self.stand_ins
    }

    /// Writes the libraries of one share, for processes that have no mount namespace.
    pub(crate) fn install_for(&self, state_dir: &StateDir, name: &str) -> Result<(), LibraryError> {
        let directory = state_dir.own_stand_ins().join(name);
        fs::create_dir_all(&directory).map_err(LibraryError::io("create", &directory))?;
        let paths = StandInPaths {
            region: &share_store::region_dir(state_dir, name),
            real_cuda: &self.driver.cuda,
            real_nvml: &self.driver.nvml,
            version: Some(self.gpus.driver_version()),
        };
        self.libraries.write_stand_ins(&directory, &paths)
    }

    /// Returns the directory of the GPUs' device files.
    pub(crate) fn device_files(&self) -> PathBuf {
        self.driver.simulated.as_ref().map_or_else(|| "/dev".into(), |machine| machine.join("dev"))
    }

    /// Returns what is covered in a share's mount namespace, besides the driver's libraries.
    pub(crate) fn covers(
        &self,
        state_dir: &StateDir,
        name: &str,
        shares: &[Share],
    ) -> std::io::Result<Vec<(PathBuf, PathBuf)>> {
        let Some(simulated) = &self.driver.simulated else {
            return Ok(covered(&self.driver.others, &self.stand_ins));
        };
        let cache = self.loader_cache.iter().map(|cache| (PathBuf::from(LOADER_CACHE), cache.clone()));
        let mut covers: Vec<(PathBuf, PathBuf)> = cache.collect();
        let there = simulated.join("dev");
        if there.is_dir() {
            let own = share_store::device_dir(state_dir, name);
            write_device_files(&own, &self.node, shares)?;
            covers.push((there, own));
        }
        Ok(covers)
    }

    /// Returns the device numbers of GPUs that a share does not have; none if their device files do not exist.
    pub(crate) fn other_devices(&self, shares: &[Share]) -> Vec<(u32, u32)> {
        if self.driver.simulated.is_some() {
            return Vec::new();
        }
        let others = self.node.gpus.iter().filter(|gpu| shares.iter().all(|share| share.gpu != gpu.uuid));
        devices(Path::new("/dev"), NVIDIA_MAJOR, &others.map(|gpu| gpu.minor).collect::<Vec<_>>())
    }
}

/// Checks whether settings fit this machine, without changing anything.
pub fn check(settings: &WorkstationSettings) -> Result<(), MachineError> {
    let node = match find_driver(settings.driver, None)? {
        Some(driver) => NvmlSession::open(&driver)?.node(NODE_NAME)?,
        None => {
            let expected = settings.simulated.expected_inventory(Path::new("/"), NODE_NAME);
            expected.map_err(DiscoveryError::from)?
        }
    };
    Ok(settings.check_against(&node)?)
}

/// Returns the device numbers of GPUs. None if no device file exists, or files under their names are other devices:
/// then the filter would deny nothing, and must not be reported as active.
fn devices(folder: &Path, major: u32, minors: &[u32]) -> Vec<(u32, u32)> {
    let number = |minor: &u32| {
        let about = fs::metadata(folder.join(format!("nvidia{minor}"))).ok()?;
        let device = about.file_type().is_char_device().then(|| about.rdev());
        Some(device.map(|device| (rustix::fs::major(device), rustix::fs::minor(device))))
    };
    let found: Vec<Option<bool>> =
        minors.iter().map(|minor| number(minor).map(|found| found == Some((major, *minor)))).collect();
    // A device whose file does not exist is denied, too: the driver creates some files on first use.
    if found.contains(&Some(true)) && !found.contains(&Some(false)) {
        minors.iter().map(|minor| (major, *minor)).collect()
    } else {
        Vec::new()
    }
}

/// Covers all other files that a program may load as the driver by the stand-in libraries.
fn covered(others: &OtherLibraries, stand_ins: &Path) -> Vec<(PathBuf, PathBuf)> {
    let cover = |files: &[PathBuf], name: &str| {
        // A file that was removed meanwhile need not be covered.
        let there = files.iter().filter(|file| file.exists());
        there.map(|file| (file.clone(), stand_ins.join(name))).collect::<Vec<_>>()
    };
    [cover(&others.cuda, driver::CUDA_LIBRARY), cover(&others.nvml, driver::NVML_LIBRARY)].concat()
}

/// Refuses a file system from which libraries cannot be loaded.
fn check_executable(state_dir: &StateDir) -> Result<(), MachineError> {
    let lib = state_dir.lib();
    match rustix::fs::statvfs(lib) {
        Ok(about) if about.f_flag.contains(rustix::fs::StatVfsMountFlags::NOEXEC) => {
            Err(MachineError::NoExec { path: lib.into() })
        }
        _ => Ok(()),
    }
}

/// Creates a cache for the loader that contains the driver's directory in addition to the machine's own libraries.
fn loader_cache(state_dir: &StateDir, driver: &InstalledDriver) -> Option<PathBuf> {
    let folder = driver.cuda.parent()?;
    let (cache, list) = (state_dir.lib().join("loader.cache"), state_dir.lib().join("loader.conf"));
    let stamp = format!("{} {}", file_stamp(Path::new(LOADER_CACHE)), folder.display());
    let made = run_once(&state_dir.lib().join("loader.stamp"), &stamp, || {
        let text = format!("{}\ninclude /etc/ld.so.conf\n", folder.display());
        fs::write(&list, text).map_err(|error| error.to_string())?;
        let mut ldconfig = Command::new("/sbin/ldconfig");
        ldconfig.arg("-X").arg("-C").arg(&cache).arg("-f").arg(&list);
        let done = ldconfig.stdin(Stdio::null()).stdout(Stdio::null()).stderr(Stdio::null()).status();
        let done = done.map_err(|error| error.to_string())?;
        if done.success() { Ok(()) } else { Err(format!("ldconfig failed: {done}")) }
    });
    // Without it, programs find the simulated driver only by their environment.
    made.ok().filter(|()| cache.is_file()).map(|()| cache)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn existing_other_libraries_are_covered() {
        let folder = tempfile::tempdir().unwrap();
        let at = |name: &str| folder.path().join(name);
        for name in ["libcuda.so.535.1", "libnvidia-ml.so.535.1"] {
            fs::write(at(name), "").unwrap();
        }
        let others = OtherLibraries {
            cuda: vec![at("libcuda.so.535.1"), at("libcuda.so.removed")],
            nvml: vec![at("libnvidia-ml.so.535.1")],
        };
        let expected = [
            (at("libcuda.so.535.1"), PathBuf::from("/ours/libcuda.so.1")),
            (at("libnvidia-ml.so.535.1"), PathBuf::from("/ours/libnvidia-ml.so.1")),
        ];
        assert_eq!(covered(&others, Path::new("/ours")), expected);
    }
    #[test]
    fn device_numbers_are_returned_only_for_nvidia_devices() {
        let folder = tempfile::tempdir().unwrap();
        let closed = |minors: &[u32]| devices(folder.path(), 1, minors);
        // As in WSL, where the files do not exist.
        assert_eq!(closed(&[3, 5]), []);
        // /dev/null has the number 1:3 on all machines.
        std::os::unix::fs::symlink("/dev/null", folder.path().join("nvidia3")).unwrap();
        assert_eq!(closed(&[3, 5]), [(1, 3), (1, 5)]);
        assert_eq!((closed(&[]), closed(&[5])), (vec![], vec![]));
        // Another device, and a regular file.
        std::os::unix::fs::symlink("/dev/null", folder.path().join("nvidia7")).unwrap();
        fs::write(folder.path().join("nvidia8"), "").unwrap();
        assert_eq!((closed(&[3, 7]), closed(&[3, 8])), (vec![], vec![]));
        assert_eq!(devices(folder.path(), NVIDIA_MAJOR, &[3]), []);
    }
}
