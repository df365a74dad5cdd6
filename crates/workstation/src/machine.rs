//! The machine: its driver or a simulated one, its GPUs, and the libraries that stand in for the driver's.

use crate::home::{Home, HomeError};
use crate::settings::{InvalidSettings, Settings};
use crate::store;
use partage_core::model::{GpuUuid, Node, Share};
use partage_enforce::context_sizes::ContextSizes;
use partage_enforce::gpus::{
    DiscoveredGpus, DiscoveryError, DiscoveryOptions, SimulatedMachine, discover, find_driver,
};
use partage_enforce::libraries::{LibraryBuild, LibraryError, LibraryInstaller, StandInPaths};
use partage_enforce::records::{Durability, RecordDir};
use partage_host::driver::{self, Driver, Others};
use partage_host::files::{once, stamp_of};
use partage_host::gpus::{Gpus, GpusError};
use partage_host::process::boot_id;
use partage_host::simulated_driver::write_device_files;
use std::collections::BTreeSet;
use std::fs;
use std::io;
use std::os::unix::fs::{FileTypeExt, MetadataExt};
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

/// What the loader finds libraries by, whatever the environment says.
const LOADER_CACHE: &str = "/etc/ld.so.cache";

/// NVIDIA's number for the device files of its GPUs, everywhere.
const NVIDIA: u32 = 195;

/// This program, to be started again.
pub(crate) const PROGRAM: &str = "/proc/self/exe";

/// How the machine is called where a node has a name.
const NODE_NAME: &str = "this machine";

/// Why the GPUs of this machine cannot be shared.
#[derive(Debug, thiserror::Error)]
pub enum MachineError {
    /// The state directory cannot be used.
    #[error(transparent)]
    Home(#[from] HomeError),
    /// Libraries cannot be loaded from the state directory.
    #[error("{}: libraries cannot be loaded from there (it is mounted noexec): use another place with --home", path.display())]
    NoExec {
        /// The directory of libraries.
        path: PathBuf,
    },
    /// The directory of records cannot be opened.
    #[error("{}: cannot be opened", path.display())]
    Records {
        /// The directory.
        path: PathBuf,
        /// What the system reported.
        #[source]
        source: io::Error,
    },
    /// The settings require NVIDIA's driver, and none is installed.
    #[error("no NVIDIA driver was found, and the settings ask for one: install it, or write `driver: auto`")]
    NoDriver,
    /// There are no GPUs to share.
    #[error(transparent)]
    Gpus(DiscoveryError),
    /// The driver reports no GPUs.
    #[error(transparent)]
    Session(#[from] GpusError),
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
            error => MachineError::Gpus(error),
        }
    }
}

/// A machine whose GPUs can be shared.
pub(crate) struct Machine {
    pub(crate) driver: Driver,
    pub(crate) gpus: Gpus,
    pub(crate) node: Node,
    pub(crate) warnings: Vec<String>,
    /// GPUs that an earlier daemon of this boot found unusable or missing.
    pub(crate) previously_unhealthy: BTreeSet<GpuUuid>,
    /// Where what is known of the GPUs is kept for the next daemon.
    pub(crate) records: RecordDir,
    pub(crate) boot_id: String,
    libraries: LibraryInstaller,
    /// The directory of the stand-ins of this build, for processes in a mount namespace.
    stand_ins: PathBuf,
    /// A cache for the loader that has the simulated driver in it.
    loader_cache: Option<PathBuf>,
}

impl Machine {
    /// Discovers the GPUs, measures what contexts take on them, and installs the libraries. Fast where that was done before.
    pub(crate) fn open(home: &Home, settings: &Settings) -> Result<(Machine, ContextSizes), MachineError> {
        home.make()?;
        check_executable(home)?;
        let records = home.path();
        let records = RecordDir::open(records, &records.join("quarantine"), Durability::UntilReboot)
            .map_err(|source| MachineError::Records { path: records.into(), source })?;
        let (folder, stamp, boot_id) = (home.simulated(), home.lib().join("gpus.stamp"), boot_id());
        let DiscoveredGpus { driver, session: gpus, inventory, previously_unhealthy } =
            discover(&DiscoveryOptions {
                node_name: NODE_NAME,
                driver: settings.driver,
                host_root: None,
                simulated: &settings.simulated,
                simulated_machine: SimulatedMachine {
                    folder: &folder,
                    seed: &folder,
                    in_use: store::is_any(home),
                    stamp: Some(&stamp),
                },
                records: &records,
                boot_id: &boot_id,
            })?;
        let node = inventory.node;
        settings.check_against(&node)?;
        let mut contexts = ContextSizes::read(home.lib().join("contexts.json"), gpus.driver_version());
        let warnings = contexts.measure_unknown(&node, &driver);
        let mut machine = Machine {
            driver,
            gpus,
            node,
            warnings,
            previously_unhealthy,
            records,
            boot_id,
            libraries: LibraryInstaller::open(&home.stand_ins())?,
            stand_ins: PathBuf::new(),
            loader_cache: None,
        };
        machine.stand_ins = machine.install(home)?;
        if machine.driver.simulated.is_some() {
            machine.loader_cache = loader_cache(home, &machine.driver);
        }
        Ok((machine, contexts))
    }

    /// Installs the stand-ins of this build, unless that was done before, and removes those of earlier builds that no share
    /// uses any more. A share that runs keeps the ones that it was started with.
    fn install(&self, home: &Home) -> Result<PathBuf, LibraryError> {
        let [real_cuda, real_nvml] = home.driver_files();
        let driver_version = self.gpus.driver_version();
        let region = home.region_at();
        let paths = StandInPaths {
            region: &region,
            real_cuda: &real_cuda,
            real_nvml: &real_nvml,
            version: Some(driver_version),
        };
        let (contents, stamp) = (format!("{paths:?}"), home.lib().join("stand-ins.stamp"));
        let build = LibraryBuild { driver_version, contents: &contents, stamp: Some(&stamp) };
        let directory =
            self.libraries.install(&build, |directory| self.libraries.write_stand_ins(directory, &paths))?;
        self.libraries.remove_unused(&directory)?;
        Ok(directory)
    }

    /// The directory of the stand-ins, for processes in a mount namespace.
    pub(crate) fn stand_ins(&self) -> &Path {
        &self.stand_ins
    }

    /// Writes the libraries of one share, for processes that have no mount namespace.
    pub(crate) fn install_for(&self, home: &Home, name: &str) -> Result<(), LibraryError> {
        let directory = home.own_stand_ins().join(name);
        fs::create_dir_all(&directory).map_err(LibraryError::io("create", &directory))?;
        let paths = StandInPaths {
            region: &store::region(home, name),
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

    /// What is covered in a share's mount namespace, besides the driver's libraries.
    pub(crate) fn covers(
        &self,
        home: &Home,
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
            let own = store::devices(home, name);
            write_device_files(&own, &self.node, shares)?;
            covers.push((there, own));
        }
        Ok(covers)
    }

    /// Device files of GPUs that a share does not have, where there are such files.
    pub(crate) fn other_devices(&self, shares: &[Share]) -> Vec<(u32, u32)> {
        if self.driver.simulated.is_some() {
            return Vec::new();
        }
        let others = self.node.gpus.iter().filter(|gpu| shares.iter().all(|share| share.gpu != gpu.uuid));
        devices(Path::new("/dev"), NVIDIA, &others.map(|gpu| gpu.minor).collect::<Vec<_>>())
    }
}

/// Checks whether settings fit this machine. Changes nothing.
pub fn check(settings: &Settings) -> Result<(), MachineError> {
    let node = match find_driver(settings.driver, None)? {
        Some(driver) => Gpus::open(&driver)?.node(NODE_NAME)?,
        None => {
            let expected = settings.simulated.expected_inventory(Path::new("/"), NODE_NAME);
            expected.map_err(DiscoveryError::from)?
        }
    };
    Ok(settings.check_against(&node)?)
}

/// The numbers of GPUs' device files. None where there are no such files, or others under their names: to close these
/// numbers would close nothing, and nobody should be told that it did.
fn devices(folder: &Path, major: u32, minors: &[u32]) -> Vec<(u32, u32)> {
    let number = |minor: &u32| {
        let about = fs::metadata(folder.join(format!("nvidia{minor}"))).ok()?;
        let device = about.file_type().is_char_device().then(|| about.rdev());
        Some(device.map(|device| (rustix::fs::major(device), rustix::fs::minor(device))))
    };
    let found: Vec<Option<bool>> =
        minors.iter().map(|minor| number(minor).map(|found| found == Some((major, *minor)))).collect();
    // One that is not there is closed too: the driver makes some when they are first asked for.
    match found.contains(&Some(true)) && !found.contains(&Some(false)) {
        true => minors.iter().map(|minor| (major, *minor)).collect(),
        false => Vec::new(),
    }
}

/// Whatever else a program may load as the driver is covered by the libraries that stand in for it.
fn covered(others: &Others, stand_ins: &Path) -> Vec<(PathBuf, PathBuf)> {
    let cover = |files: &[PathBuf], name: &str| {
        // What was removed meanwhile is in nobody's way.
        let there = files.iter().filter(|file| file.exists());
        there.map(|file| (file.clone(), stand_ins.join(name))).collect::<Vec<_>>()
    };
    [cover(&others.cuda, driver::CUDA), cover(&others.nvml, driver::NVML)].concat()
}

/// Refuses a file system from which libraries cannot be loaded.
fn check_executable(home: &Home) -> Result<(), MachineError> {
    let lib = home.lib();
    match rustix::fs::statvfs(lib) {
        Ok(about) if about.f_flag.contains(rustix::fs::StatVfsMountFlags::NOEXEC) => {
            Err(MachineError::NoExec { path: lib.into() })
        }
        _ => Ok(()),
    }
}

/// A cache for the loader that has the driver's folder in it, besides what the machine's own has.
fn loader_cache(home: &Home, driver: &Driver) -> Option<PathBuf> {
    let folder = driver.cuda.parent()?;
    let (cache, list) = (home.lib().join("loader.cache"), home.lib().join("loader.conf"));
    let stamp = format!("{} {}", stamp_of(Path::new(LOADER_CACHE)), folder.display());
    let made = once(&home.lib().join("loader.stamp"), &stamp, || {
        let text = format!("{}\ninclude /etc/ld.so.conf\n", folder.display());
        fs::write(&list, text).map_err(|error| error.to_string())?;
        let mut ldconfig = Command::new("/sbin/ldconfig");
        ldconfig.arg("-X").arg("-C").arg(&cache).arg("-f").arg(&list);
        let done = ldconfig.stdin(Stdio::null()).stdout(Stdio::null()).stderr(Stdio::null()).status();
        let done = done.map_err(|error| error.to_string())?;
        if done.success() { Ok(()) } else { Err(format!("ldconfig ended with {done}")) }
    });
    // Without it programs find the simulated driver by their environment only.
    made.ok().filter(|()| cache.is_file()).map(|()| cache)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn other_libraries_of_the_driver_are_covered_as_long_as_they_are_there() {
        let folder = tempfile::tempdir().unwrap();
        let at = |name: &str| folder.path().join(name);
        for name in ["libcuda.so.535.1", "libnvidia-ml.so.535.1"] {
            fs::write(at(name), "").unwrap();
        }
        let others = Others {
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
    fn devices_are_closed_where_they_are_what_they_are_called() {
        let folder = tempfile::tempdir().unwrap();
        let closed = |minors: &[u32]| devices(folder.path(), 1, minors);
        // As in Windows' Linux.
        assert_eq!(closed(&[3, 5]), []);
        // /dev/null is 1:3 everywhere.
        std::os::unix::fs::symlink("/dev/null", folder.path().join("nvidia3")).unwrap();
        assert_eq!(closed(&[3, 5]), [(1, 3), (1, 5)]);
        assert_eq!((closed(&[]), closed(&[5])), (vec![], vec![]));
        // Another device, and no device.
        std::os::unix::fs::symlink("/dev/null", folder.path().join("nvidia7")).unwrap();
        fs::write(folder.path().join("nvidia8"), "").unwrap();
        assert_eq!((closed(&[3, 7]), closed(&[3, 8])), (vec![], vec![]));
        assert_eq!(devices(folder.path(), NVIDIA, &[3]), []);
    }
}
