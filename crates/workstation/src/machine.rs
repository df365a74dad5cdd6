//! The machine: its driver or a simulated one, its GPUs, and the libraries that stand in for the driver's.

use crate::home::Home;
use crate::settings::{DriverChoice, Settings};
use crate::store;
use partage_core::model::{Node, Share};
use partage_host::context::{self, Sizes};
use partage_host::driver::{self, Driver, Others};
use partage_host::files::{once, stamp_of};
use partage_host::gpus::Gpus;
use partage_host::shares;
use partage_region::GpuShare;
use partage_sim::node::{NodeConfig, NodeDir};
use std::fs;
use std::os::unix::fs::{FileTypeExt, MetadataExt};
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

/// What the loader finds libraries by, whatever the environment says.
const LOADER_CACHE: &str = "/etc/ld.so.cache";

/// NVIDIA's number for the device files of its GPUs, everywhere.
const NVIDIA: u32 = 195;

/// This program, to be started again.
pub(crate) const PROGRAM: &str = "/proc/self/exe";

/// The hidden command of the program that measures contexts.
pub const CONTEXT_COMMAND: &str = "context-sizes";

/// A machine whose GPUs can be shared.
pub(crate) struct Machine {
    pub(crate) driver: Driver,
    pub(crate) gpus: Gpus,
    pub(crate) node: Node,
    pub(crate) warnings: Vec<String>,
    contexts: Sizes,
    /// A cache for the loader that has the simulated driver in it.
    loader_cache: Option<PathBuf>,
}

impl Machine {
    /// Finds out what there is and puts the libraries in their places. Fast where that was done before.
    pub(crate) fn open(home: &Home, settings: &Settings) -> Result<Machine, String> {
        home.make().map_err(|error| error.to_string())?;
        check_executable(home)?;
        let driver = match found(settings)? {
            Some(driver) => driver,
            None => simulated(home, settings)?,
        };
        let gpus = Gpus::open(&driver).map_err(|error| error.to_string())?;
        let node = gpus.node("this machine").map_err(|error| error.to_string())?;
        settings.check_against(&node)?;
        let mut contexts = Sizes::read(home.lib().join("contexts.json"), gpus.driver_version());
        let mut machine = Machine {
            warnings: contexts
                .complete(&node, || context::measure(&driver, Path::new(PROGRAM), &[CONTEXT_COMMAND])),
            contexts,
            loader_cache: None,
            driver,
            gpus,
            node,
        };
        machine.install(home)?;
        if machine.driver.simulated.is_some() {
            machine.loader_cache = loader_cache(home, &machine.driver);
        }
        Ok(machine)
    }

    fn install(&self, home: &Home) -> Result<(), String> {
        let object = partage_shim::install::trusted_object().map_err(|error| error.to_string())?;
        let [real_cuda, real_nvml] = home.driver_files();
        let version = self.gpus.driver_version();
        let stamp = format!("{} {version} {real_cuda:?} {:?}", stamp_of(&object), home.region_at());
        once(&home.lib().join("stand-ins.stamp"), &stamp, || {
            let settings = partage_shim::install::Settings {
                region: &home.region_at(),
                real_cuda: &real_cuda,
                real_nvml: &real_nvml,
                pass_when_broken: false,
                version: Some(version),
            };
            partage_shim::install::stand_in(&object, &home.stand_ins(), &settings)
                .map_err(|error| error.to_string())
        })
    }

    /// The libraries of one share, for processes that have no mount namespace.
    pub(crate) fn install_for(&self, home: &Home, name: &str) -> Result<(), String> {
        let object = partage_shim::install::trusted_object().map_err(|error| error.to_string())?;
        let folder = home.own_stand_ins().join(name);
        fs::create_dir_all(&folder)
            .map_err(|error| format!("{}: cannot be made: {error}", folder.display()))?;
        let settings = partage_shim::install::Settings {
            region: &store::region(home, name),
            real_cuda: &self.driver.cuda,
            real_nvml: &self.driver.nvml,
            pass_when_broken: false,
            version: Some(self.gpus.driver_version()),
        };
        partage_shim::install::stand_in(&object, &folder, &settings).map_err(|error| error.to_string())
    }

    /// A share as the region has it.
    pub(crate) fn region_share(&self, share: &Share, gated: bool) -> Result<GpuShare, String> {
        shares::region_share(share, self.contexts.of(&share.gpu), gated)
    }

    /// What is covered in a share's mount namespace, besides the driver's libraries.
    pub(crate) fn covers(
        &self,
        home: &Home,
        name: &str,
        shares: &[Share],
    ) -> std::io::Result<Vec<(PathBuf, PathBuf)>> {
        let Some(simulated) = &self.driver.simulated else {
            return Ok(covered(&self.driver.others, &home.stand_ins()));
        };
        let cache = self.loader_cache.iter().map(|cache| (PathBuf::from(LOADER_CACHE), cache.clone()));
        let mut covers: Vec<(PathBuf, PathBuf)> = cache.collect();
        let there = simulated.join("dev");
        if there.is_dir() {
            let own = store::devices(home, name);
            fs::create_dir_all(&own)?;
            for gpu in self.node.gpus.iter().filter(|gpu| shares.iter().any(|share| share.gpu == gpu.uuid)) {
                fs::write(own.join(format!("nvidia{}", gpu.minor)), b"")?;
            }
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

/// Whether settings can be on this machine. Changes nothing.
pub fn check(settings: &Settings) -> Result<(), String> {
    let node = match found(settings)? {
        Some(driver) => {
            let gpus = Gpus::open(&driver).map_err(|error| error.to_string())?;
            gpus.node("this machine").map_err(|error| error.to_string())?
        }
        None => simulated_config(settings, Path::new("/"))?.truth("this machine"),
    };
    settings.check_against(&node)
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

/// The driver that is there and that the settings choose; none where it is to be simulated.
fn found(settings: &Settings) -> Result<Option<Driver>, String> {
    let found = match settings.driver {
        DriverChoice::Simulated => None,
        DriverChoice::Auto | DriverChoice::Nvidia => Driver::find().map_err(|error| error.to_string())?,
    };
    match found {
        None if settings.driver == DriverChoice::Nvidia => Err(
            "no NVIDIA driver was found, and the settings ask for one: install it, or write `driver: auto`"
                .into(),
        ),
        found => Ok(found),
    }
}

fn simulated_config(settings: &Settings, folder: &Path) -> Result<NodeConfig, String> {
    settings.simulated.config(partage_sim::node::seed_of(folder))
}

/// The simulated machine of this home, made where there is none.
fn simulated(home: &Home, settings: &Settings) -> Result<Driver, String> {
    let folder = home.simulated();
    let config = simulated_config(settings, &folder)?;
    let node = NodeDir::keep(&folder, &config, store::is_any(home)).map_err(|error| error.to_string())?;
    let object = partage_sim::install::trusted_object().map_err(|error| error.to_string())?;
    once(&home.lib().join("gpus.stamp"), &stamp_of(&object), || {
        partage_sim::install::libraries(&object, &node.libraries(), config.driver, node.path())
            .map_err(|error| error.to_string())
    })?;
    Driver::simulated(node.path()).map_err(|error| error.to_string())
}

/// Libraries cannot be loaded from every file system.
fn check_executable(home: &Home) -> Result<(), String> {
    let lib = home.lib();
    match rustix::fs::statvfs(lib) {
        Ok(about) if about.f_flag.contains(rustix::fs::StatVfsMountFlags::NOEXEC) => Err(format!(
            "{}: libraries cannot be loaded from there (it is mounted noexec): use another place with --home",
            lib.display()
        )),
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
