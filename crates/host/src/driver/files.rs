//! Everything of a driver that containers get: libraries, programs, firmware, device nodes. Paths are the host's.

use super::{CUDA, DRIVER_CONTAINER, Driver, NVML, USUAL, loadable};
use crate::root::Root;
use std::collections::{BTreeMap, BTreeSet};
use std::fs;
use std::os::unix::fs::{FileTypeExt, PermissionsExt};
use std::path::{Path, PathBuf};

/// Programs of the driver's package.
const PROGRAMS: [&str; 5] = [
    "nvidia-smi",
    "nvidia-debugdump",
    "nvidia-persistenced",
    "nvidia-cuda-mps-control",
    "nvidia-cuda-mps-server",
];
/// Where programs are.
const USUAL_PROGRAMS: [&str; 8] = [
    "/usr/bin",
    "/usr/sbin",
    "/bin",
    "/sbin",
    "/usr/local/bin",
    "/opt/bin",
    "/usr/local/nvidia/bin",
    "/run/current-system/sw/bin",
];
/// Libraries of the driver that do not have its version in their names.
const UNVERSIONED: [&str; 2] = ["libnvidia-nvvm", "libnvidia-api.so"];
/// Where kernel and driver look for firmware.
const FIRMWARE: [&str; 2] = ["/lib/firmware/nvidia", "/usr/lib/firmware/nvidia"];
/// Devices that are no GPU's, and without which no program computes.
const CONTROL: [&str; 2] = ["nvidiactl", "nvidia-uvm"];
/// Those that some programs use.
const MORE_CONTROL: [&str; 2] = ["nvidia-uvm-tools", "nvidia-modeset"];

/// The files of a driver.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Files {
    /// The driver's version, such as `550.163.01`.
    pub version: String,
    /// What programs compute with.
    pub cuda: Library,
    /// What tells about GPUs.
    pub nvml: Library,
    /// All others.
    pub libraries: Vec<Library>,
    /// Its programs.
    pub programs: Vec<Program>,
    /// What the kernel module loads into GPUs, and libraries look for.
    pub firmware: Vec<PathBuf>,
}

/// A library.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Library {
    /// The file that is really loaded, not a link to it.
    pub file: PathBuf,
    /// Every name it has in the folders of the loader.
    pub names: BTreeSet<String>,
}

impl Library {
    /// The names that programs and other libraries load it by: its sonames (`libnvcuvid.so.1`), or its only one.
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

/// A program.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Program {
    /// How it is called.
    pub name: &'static str,
    /// The file that really runs.
    pub file: PathBuf,
}

impl Files {
    /// Finds them. A simulated driver has its two libraries, and the host's `nvidia-smi` where there is one.
    pub fn find(root: &Root, driver: &Driver, version: &str) -> Files {
        let main = |file: &Path, soname: &str| {
            let plain = soname.trim_end_matches(".1");
            let names = [plain.to_string(), soname.to_string(), format!("{plain}.{version}")];
            Library { file: root.host(file), names: names.into() }
        };
        let (cuda, nvml) = (main(&driver.cuda, CUDA), main(&driver.nvml, NVML));
        let version = version.to_string();
        if driver.simulated.is_some() {
            let programs = programs(root, &PROGRAMS[..1]);
            return Files { version, cuda, nvml, libraries: Vec::new(), programs, firmware: Vec::new() };
        }
        let root = &driver_root(root, driver);
        let mut libraries = libraries(root, driver, &version);
        let mut own = |mut library: Library| {
            library.names.extend(libraries.remove(&library.file).unwrap_or_default());
            library
        };
        let (cuda, nvml) = (own(cuda), own(nvml));
        // Other files under the names of the two are stood in for, never given.
        libraries.retain(|_, names| names.iter().all(|name| !is_main(name)));
        let libraries = libraries.into_iter().map(|(file, names)| Library { file, names }).collect();
        let (programs, firmware) = (programs(root, &PROGRAMS), firmware(root, &version));
        Files { version, cuda, nvml, libraries, programs, firmware }
    }
}

/// The root that the driver is in: the host's, or that of its container.
fn driver_root(root: &Root, driver: &Driver) -> Root {
    let inside = root.below(Path::new(DRIVER_CONTAINER));
    inside.filter(|inside| driver.cuda.starts_with(inside.at(Path::new("/")))).unwrap_or_else(|| root.clone())
}

/// Whether a name is one of the two libraries'.
fn is_main(name: &str) -> bool {
    [CUDA, NVML].iter().any(|main| super::is_called(name.as_ref(), main))
}

/// The libraries in the loader's usual folders and in the driver's own, with all names.
fn libraries(root: &Root, driver: &Driver, version: &str) -> BTreeMap<PathBuf, BTreeSet<String>> {
    let own = [&driver.cuda, &driver.nvml].into_iter().filter_map(|file| file.parent());
    let usual = USUAL.iter().filter_map(|folder| root.real(Path::new(folder)).ok());
    // Many are links to one another. The driver's own come first: of two copies of a library, those beside it are its.
    let mut folders: Vec<PathBuf> = Vec::new();
    for folder in own.map(|folder| root.inside(folder)).chain(usual) {
        if !folders.contains(&folder) {
            folders.push(folder);
        }
    }
    let ending = format!(".so.{version}");
    let is_drivers =
        |name: &str| name.ends_with(&ending) || UNVERSIONED.iter().any(|other| name.starts_with(other));
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
            // Not those for other processors, which may have the same folder.
            if let Ok(Some(seen)) = loadable(root, &real)
                && taken.insert(name.clone())
            {
                found.entry(root.host(&seen)).or_default().insert(name);
            }
        }
    }
    found
}

/// Programs of these names, each the first that can be run.
fn programs(root: &Root, names: &[&'static str]) -> Vec<Program> {
    let runs = |file: &Path| {
        fs::metadata(file).is_ok_and(|about| about.is_file() && about.permissions().mode() & 0o111 != 0)
    };
    let find = |name: &&'static str| {
        let files = USUAL_PROGRAMS.iter().filter_map(|folder| root.real(&Path::new(folder).join(name)).ok());
        let seen = files.map(|file| root.at(&file)).find(|file| runs(file))?;
        Some(Program { name, file: root.host(&seen) })
    };
    names.iter().filter_map(find).collect()
}

/// Firmware of this version.
fn firmware(root: &Root, version: &str) -> Vec<PathBuf> {
    let folders = FIRMWARE.iter().filter_map(|folder| root.real(&Path::new(folder).join(version)).ok());
    // One may be a link to the other.
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

/// The device nodes of a driver. Some appear when they are first needed, so each is looked for when it is asked for.
#[derive(Clone, Debug)]
pub struct Nodes {
    /// Where they may be, the host's own first.
    roots: Vec<Root>,
}

/// A device node that is there.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct DeviceNode {
    /// Its usual path.
    pub path: PathBuf,
    /// Where the host has it.
    pub host: PathBuf,
}

/// A device node that all containers need and that the driver has not made yet.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("/dev/{name} is not on the node: run `nvidia-modprobe -c 0 -u` there; kubelet tries again by itself")]
pub struct MissingDeviceNode {
    /// Its name below `/dev`.
    pub name: &'static str,
}

impl Nodes {
    /// Those of a host. A driver container may have them in its own `/dev`.
    pub fn new(root: &Root) -> Nodes {
        let inside = root.below(Path::new(DRIVER_CONTAINER));
        Nodes { roots: [root.clone()].into_iter().chain(inside).collect() }
    }

    /// The node of a GPU.
    pub fn gpu(&self, minor: u32) -> Option<DeviceNode> {
        self.find(&format!("nvidia{minor}"))
    }

    /// Returns the nodes that all containers need.
    pub fn control(&self) -> Result<Vec<DeviceNode>, MissingDeviceNode> {
        let needed = |name: &'static str| self.find(name).ok_or(MissingDeviceNode { name });
        let mut nodes: Vec<DeviceNode> = CONTROL.into_iter().map(needed).collect::<Result<_, _>>()?;
        nodes.extend(MORE_CONTROL.iter().filter_map(|name| self.find(name)));
        Ok(nodes)
    }

    fn find(&self, name: &str) -> Option<DeviceNode> {
        let path = Path::new("/dev").join(name);
        let is_node =
            |seen: &PathBuf| fs::metadata(seen).is_ok_and(|about| about.file_type().is_char_device());
        let host =
            self.roots.iter().find_map(|root| Some(root.host(&Some(root.at(&path)).filter(is_node)?)))?;
        Some(DeviceNode { path, host })
    }
}

#[cfg(test)]
mod tests;
