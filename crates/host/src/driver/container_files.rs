//! Finds the files of a driver that containers need: libraries, programs, firmware, device nodes. Paths are the host's.

use super::{
    CUDA_LIBRARY, DRIVER_CONTAINER_ROOT, InstalledDriver, LIBRARY_DIRS, NVML_LIBRARY, find_loadable,
};
use crate::host_root::HostRoot;
use std::collections::{BTreeMap, BTreeSet};
use std::fs;
use std::os::unix::fs::{FileTypeExt, PermissionsExt};
use std::path::{Path, PathBuf};

/// The programs of the driver's package.
const PROGRAMS: [&str; 5] = [
    "nvidia-smi",
    "nvidia-debugdump",
    "nvidia-persistenced",
    "nvidia-cuda-mps-control",
    "nvidia-cuda-mps-server",
];
/// The directories that are searched for programs.
const PROGRAM_DIRS: [&str; 8] = [
    "/usr/bin",
    "/usr/sbin",
    "/bin",
    "/sbin",
    "/usr/local/bin",
    "/opt/bin",
    "/usr/local/nvidia/bin",
    "/run/current-system/sw/bin",
];
/// Libraries of the driver whose names do not contain its version.
const UNVERSIONED_LIBRARIES: [&str; 2] = ["libnvidia-nvvm", "libnvidia-api.so"];
/// Where the kernel and the driver look for firmware.
const FIRMWARE_DIRS: [&str; 2] = ["/lib/firmware/nvidia", "/usr/lib/firmware/nvidia"];
/// Control devices that every CUDA program needs.
const REQUIRED_CONTROL_NODES: [&str; 2] = ["nvidiactl", "nvidia-uvm"];
/// Control devices that some programs use.
const OPTIONAL_CONTROL_NODES: [&str; 2] = ["nvidia-uvm-tools", "nvidia-modeset"];

/// The files of a driver that containers need.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct DriverFiles {
    /// The driver's version, such as `550.163.01`.
    pub version: String,
    /// The CUDA driver library.
    pub cuda: DriverLibrary,
    /// The library of NVML.
    pub nvml: DriverLibrary,
    /// All other libraries of the driver.
    pub libraries: Vec<DriverLibrary>,
    /// The programs of the driver.
    pub programs: Vec<DriverProgram>,
    /// The firmware that the kernel module loads into GPUs and that libraries look for.
    pub firmware: Vec<PathBuf>,
}

/// A library of the driver.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct DriverLibrary {
    /// The file, with symbolic links resolved.
    pub file: PathBuf,
    /// All names of the file in the loader's directories.
    pub names: BTreeSet<String>,
}

impl DriverLibrary {
    /// Returns the names by which programs and other libraries load it: its sonames (`libnvcuvid.so.1`), or else all
    /// names that are not linker names.
    pub fn sonames(&self) -> impl Iterator<Item = &str> {
        let is_soname = |name: &str| {
            let ending = name.rsplit_once(".so.").map(|(_, ending)| ending);
            ending
                .is_some_and(|ending| !ending.is_empty() && ending.bytes().all(|byte| byte.is_ascii_digit()))
        };
        let any = self.names.iter().any(|name| is_soname(name));
        let others = move |name: &str| !any && !name.ends_with(".so");
        self.names.iter().map(String::as_str).filter(move |name| is_soname(name) || others(name))
    }
}

/// A program of the driver.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct DriverProgram {
    /// The name of the command.
    pub name: &'static str,
    /// The file, with symbolic links resolved.
    pub file: PathBuf,
}

impl DriverFiles {
    /// Finds the files of a driver. A simulated driver has its two libraries, and the host's `nvidia-smi` if installed.
    pub fn find(root: &HostRoot, driver: &InstalledDriver, version: &str) -> DriverFiles {
        let main = |file: &Path, soname: &str| {
            let plain = soname.trim_end_matches(".1");
            let names = [plain.to_string(), soname.to_string(), format!("{plain}.{version}")];
            DriverLibrary { file: root.host(file), names: names.into() }
        };
        let (cuda, nvml) = (main(&driver.cuda, CUDA_LIBRARY), main(&driver.nvml, NVML_LIBRARY));
        let version = version.to_string();
        if driver.simulated.is_some() {
            let programs = programs(root, &PROGRAMS[..1]);
            return DriverFiles {
                version,
                cuda,
                nvml,
                libraries: Vec::new(),
                programs,
                firmware: Vec::new(),
            };
        }
        let root = &driver_root(root, driver);
        let mut libraries = libraries(root, driver, &version);
        let mut own = |mut library: DriverLibrary| {
            library.names.extend(libraries.remove(&library.file).unwrap_or_default());
            library
        };
        let (cuda, nvml) = (own(cuda), own(nvml));
        // Other files under the names of the two are replaced by stand-ins, never mounted.
        libraries.retain(|_, names| names.iter().all(|name| !is_main(name)));
        let libraries = libraries.into_iter().map(|(file, names)| DriverLibrary { file, names }).collect();
        let (programs, firmware) = (programs(root, &PROGRAMS), firmware(root, &version));
        DriverFiles { version, cuda, nvml, libraries, programs, firmware }
    }
}

/// Returns the root that contains the driver: the host's, or that of the driver container.
fn driver_root(root: &HostRoot, driver: &InstalledDriver) -> HostRoot {
    let inside = root.below(Path::new(DRIVER_CONTAINER_ROOT));
    inside.filter(|inside| driver.cuda.starts_with(inside.at(Path::new("/")))).unwrap_or_else(|| root.clone())
}

/// Returns whether a name is that of the CUDA or NVML library.
fn is_main(name: &str) -> bool {
    [CUDA_LIBRARY, NVML_LIBRARY].iter().any(|main| super::is_named_like(name.as_ref(), main))
}

/// Finds the driver's libraries in the default directories and in the driver's own, with all their names.
fn libraries(
    root: &HostRoot,
    driver: &InstalledDriver,
    version: &str,
) -> BTreeMap<PathBuf, BTreeSet<String>> {
    let own = [&driver.cuda, &driver.nvml].into_iter().filter_map(|file| file.parent());
    let usual = LIBRARY_DIRS.iter().filter_map(|folder| root.real(Path::new(folder)).ok());
    // Many of the directories are links to one another. The driver's own come first: of two copies of a library, the
    // one beside the driver belongs to it.
    let mut folders: Vec<PathBuf> = Vec::new();
    for folder in own.map(|folder| root.inside(folder)).chain(usual) {
        if !folders.contains(&folder) {
            folders.push(folder);
        }
    }
    let ending = format!(".so.{version}");
    let is_drivers = |name: &str| {
        name.ends_with(&ending) || UNVERSIONED_LIBRARIES.iter().any(|other| name.starts_with(other))
    };
    let mut found: BTreeMap<PathBuf, BTreeSet<String>> = BTreeMap::new();
    let mut taken = BTreeSet::new();
    for folder in &folders {
        for entry in fs::read_dir(root.at(folder)).into_iter().flatten().flatten() {
            let Ok(name) = entry.file_name().into_string() else { continue };
            if !name.starts_with("lib") || !name.contains(".so") {
                continue;
            }
            let Ok(real) = root.real(&folder.join(&name)) else { continue };
            if !real.file_name().and_then(|name| name.to_str()).is_some_and(is_drivers) {
                continue;
            }
            // Libraries for other processors may be in the same directory.
            if let Ok(Some(seen)) = find_loadable(root, &real)
                && taken.insert(name.clone())
            {
                found.entry(root.host(&seen)).or_default().insert(name);
            }
        }
    }
    found
}

/// Finds programs by name, for each the first file that is executable.
fn programs(root: &HostRoot, names: &[&'static str]) -> Vec<DriverProgram> {
    let runs = |file: &Path| {
        fs::metadata(file).is_ok_and(|about| about.is_file() && about.permissions().mode() & 0o111 != 0)
    };
    let find = |name: &&'static str| {
        let files = PROGRAM_DIRS.iter().filter_map(|folder| root.real(&Path::new(folder).join(name)).ok());
        let seen = files.map(|file| root.at(&file)).find(|file| runs(file))?;
        Some(DriverProgram { name, file: root.host(&seen) })
    };
    names.iter().filter_map(find).collect()
}

/// Finds the firmware of a driver version.
fn firmware(root: &HostRoot, version: &str) -> Vec<PathBuf> {
    let folders = FIRMWARE_DIRS.iter().filter_map(|folder| root.real(&Path::new(folder).join(version)).ok());
    // One directory may be a link to the other.
    let folders: BTreeSet<PathBuf> = folders.collect();
    let mut found = Vec::new();
    for folder in folders {
        for entry in fs::read_dir(root.at(&folder)).into_iter().flatten().flatten() {
            let name = entry.file_name();
            let name = name.to_string_lossy();
            if name.starts_with("gsp") && name.ends_with(".bin") {
                found.push(root.host(&entry.path()));
            }
        }
    }
    found.sort();
    found
}

/// The device nodes of a driver. The driver creates some of them when they are first needed, so each call looks again.
#[derive(Clone, Debug)]
pub struct DeviceNodes {
    /// The roots whose `/dev` may contain them, the host's first.
    roots: Vec<HostRoot>,
}

/// A device node that exists on the host.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct HostDeviceNode {
    /// The standard path, below `/dev`.
    pub path: PathBuf,
    /// The path on the host.
    pub host: PathBuf,
}

/// A device node that all containers need and that the driver has not created yet.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error(
    "/dev/{name} does not exist on the node: run `nvidia-modprobe -c 0 -u` there; kubelet retries automatically"
)]
pub struct MissingDeviceNode {
    /// The name below `/dev`.
    pub name: &'static str,
}

impl DeviceNodes {
    /// Returns the device nodes of a host. A driver container may have them in its own `/dev`.
    pub fn new(root: &HostRoot) -> DeviceNodes {
        let inside = root.below(Path::new(DRIVER_CONTAINER_ROOT));
        DeviceNodes { roots: [root.clone()].into_iter().chain(inside).collect() }
    }

    /// Returns the node of a GPU, if it exists.
    pub fn gpu(&self, minor: u32) -> Option<HostDeviceNode> {
        self.find(&format!("nvidia{minor}"))
    }

    /// Returns the nodes that all containers need.
    pub fn control(&self) -> Result<Vec<HostDeviceNode>, MissingDeviceNode> {
        let needed = |name: &'static str| self.find(name).ok_or(MissingDeviceNode { name });
        let mut nodes: Vec<HostDeviceNode> =
            REQUIRED_CONTROL_NODES.into_iter().map(needed).collect::<Result<_, _>>()?;
        nodes.extend(OPTIONAL_CONTROL_NODES.iter().filter_map(|name| self.find(name)));
        Ok(nodes)
    }

    fn find(&self, name: &str) -> Option<HostDeviceNode> {
        let path = Path::new("/dev").join(name);
        let is_node =
            |seen: &PathBuf| fs::metadata(seen).is_ok_and(|about| about.file_type().is_char_device());
        let host =
            self.roots.iter().find_map(|root| Some(root.host(&Some(root.at(&path)).filter(is_node)?)))?;
        Some(HostDeviceNode { path, host })
    }
}

#[cfg(test)]
mod tests;
