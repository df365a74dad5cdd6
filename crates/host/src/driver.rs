//! Finds the NVIDIA driver of this machine: the libraries that a program started from here would load.
//!
//! The search follows the dynamic loader: the directories of `LD_LIBRARY_PATH`, the loader's cache, the default
//! directories. Each library is searched for separately, as programs do, and files for other processors are skipped. A
//! simulated node that `PARTAGE_SIM_DIR` names takes precedence.
//!
//! Root finds the machine's driver and ignores its own `LD_LIBRARY_PATH`, except for simulated nodes: it searches for
//! all users, who do not have its path. A process in a container searches below its mount of the host's root; the host
//! may have its driver in a container, too.

pub mod container_files;
mod ld_cache;

use crate::host_root::HostRoot;
use std::collections::BTreeSet;
use std::env;
use std::ffi::OsStr;
use std::fs::{self, File};
use std::io::{self, ErrorKind, Read};
use std::os::unix::ffi::OsStrExt;
use std::path::{Path, PathBuf};

/// The name of the CUDA driver library.
pub const CUDA_LIBRARY: &str = "libcuda.so.1";
/// The name of the NVML library.
pub const NVML_LIBRARY: &str = "libnvidia-ml.so.1";
/// The environment variable that names the directory of a simulated node.
pub const SIM_DIR_VARIABLE: &str = "PARTAGE_SIM_DIR";

/// The library directories of Debian, of other distributions, of WSL, of container tools, and of NixOS.
const LIBRARY_DIRS: [&str; 9] = [
    "/lib/x86_64-linux-gnu",
    "/usr/lib/x86_64-linux-gnu",
    "/usr/lib/aarch64-linux-gnu",
    "/usr/lib64",
    "/lib64",
    "/usr/lib",
    "/usr/lib/wsl/lib",
    "/usr/local/nvidia/lib64",
    "/run/opengl-driver/lib",
];
/// Where CUDA toolkits install the libraries of newer drivers, each in a directory of its version.
const TOOLKITS_DIR: &str = "/usr/local";
const COMPAT_DIRS: [&str; 3] = ["compat", "compat/lib", "compat/lib.real"];
/// The root directory of a driver container, as NVIDIA's GPU operator mounts it.
const DRIVER_CONTAINER_ROOT: &str = "/run/nvidia/driver";

/// Why the driver of this machine cannot be used.
#[derive(Debug, thiserror::Error)]
pub enum DriverError {
    /// One library exists, and the other does not.
    #[error(
        "incomplete NVIDIA driver: {} exists, and {missing} was not found; reinstall the driver's package with its compute libraries", there.display()
    )]
    Incomplete {
        /// The library that exists.
        there: PathBuf,
        /// The library that was not found.
        missing: &'static str,
    },
    /// A simulated node has no libraries.
    #[error(
        "{} has no {library}: not a simulated node, or one without its driver; partage sim env --dir {} writes it",
        folder.display(), node.display()
    )]
    NoSimulatedLibrary {
        /// The directory of the node.
        node: PathBuf,
        /// The directory of its libraries.
        folder: PathBuf,
        /// The library that does not exist.
        library: &'static str,
    },
    /// A file with the name of a library is not an ELF file.
    #[error(
        "{} is not a library: programs would fail to load it; remove it, or remove its directory from LD_LIBRARY_PATH", path.display()
    )]
    NotALibrary {
        /// The path of the file.
        path: PathBuf,
    },
    /// A library exists and cannot be read.
    #[error("{}: cannot read the driver's library: {error}", path.display())]
    Unreadable {
        /// The path of the file.
        path: PathBuf,
        /// The error of the system.
        #[source]
        error: io::Error,
    },
}

/// The files of a driver that programs load, with symbolic links resolved.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct InstalledDriver {
    /// The file that programs load as `libcuda.so.1`.
    pub cuda: PathBuf,
    /// The file that programs load as `libnvidia-ml.so.1`.
    pub nvml: PathBuf,
    /// The directory of the simulated node, if the driver is simulated.
    pub simulated: Option<PathBuf>,
    /// Other files that programs may load in place of `cuda` and `nvml`: under another name, of a toolkit, or of an
    /// older driver. A simulated node has none.
    pub others: OtherLibraries,
}

/// Files that have the names of the driver's libraries and do not belong to it. Links are resolved, and each file is
/// listed once.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct OtherLibraries {
    /// The files named `libcuda.so…`.
    pub cuda: Vec<PathBuf>,
    /// The files named `libnvidia-ml.so…`.
    pub nvml: Vec<PathBuf>,
}

impl InstalledDriver {
    /// Finds the driver that a program started from here would load. Returns `None` if no driver is installed.
    pub fn find() -> Result<Option<InstalledDriver>, DriverError> {
        let mut folders =
            env::var_os("LD_LIBRARY_PATH").map(|path| split_library_path(&path)).unwrap_or_default();
        if rustix::process::geteuid().is_root() {
            folders.retain(|folder| is_simulated_library_dir(folder));
        }
        DriverSearch {
            node: env::var_os(SIM_DIR_VARIABLE).map(PathBuf::from),
            folders,
            ..DriverSearch::below(HostRoot::here())
        }
        .run()
    }

    /// Finds the driver that the host's own programs would load, below this process's mount of its root; or that of a
    /// driver container if the host has none. Paths are as this process sees them.
    pub fn find_in(root: &HostRoot) -> Result<Option<InstalledDriver>, DriverError> {
        let found = DriverSearch::below(root.clone()).run();
        if matches!(found, Ok(Some(_))) {
            return found;
        }
        match root.below(Path::new(DRIVER_CONTAINER_ROOT)).map(|root| DriverSearch::below(root).run()) {
            Some(Ok(Some(driver))) => Ok(Some(driver)),
            // An error of the host's own driver is more useful.
            Some(inside) if matches!(found, Ok(None)) => inside,
            _ => found,
        }
    }

    /// Returns the driver of a simulated node.
    pub fn simulated(node: &Path) -> Result<InstalledDriver, DriverError> {
        let folder = node.join("lib");
        let one = |library| {
            let absent =
                || DriverError::NoSimulatedLibrary { node: node.into(), folder: folder.clone(), library };
            find_loadable(&HostRoot::here(), &folder.join(library))?.ok_or_else(absent)
        };
        let (cuda, nvml) = (one(CUDA_LIBRARY)?, one(NVML_LIBRARY)?);
        let node =
            fs::canonicalize(node).map_err(|error| DriverError::Unreadable { path: node.into(), error })?;
        Ok(InstalledDriver { cuda, nvml, simulated: Some(node), others: OtherLibraries::default() })
    }
}

/// The places to search, in this order. Paths are within the root.
struct DriverSearch {
    root: HostRoot,
    /// The simulated node that the environment names.
    node: Option<PathBuf>,
    /// The directories of `LD_LIBRARY_PATH`.
    folders: Vec<PathBuf>,
    /// The loader's cache. It is read only if nothing was found before.
    cache: PathBuf,
    /// The default library directories.
    usual: Vec<PathBuf>,
    /// The directory of CUDA toolkits.
    toolkits: PathBuf,
}

impl DriverSearch {
    /// Returns the search that programs of all users make.
    fn below(root: HostRoot) -> DriverSearch {
        DriverSearch {
            root,
            node: None,
            folders: Vec::new(),
            cache: ld_cache::LD_CACHE_FILE.into(),
            usual: LIBRARY_DIRS.iter().map(PathBuf::from).collect(),
            toolkits: TOOLKITS_DIR.into(),
        }
    }

    fn run(&self) -> Result<Option<InstalledDriver>, DriverError> {
        if let Some(node) = &self.node {
            let there = |library| node.join("lib").join(library).exists();
            if there(CUDA_LIBRARY) || there(NVML_LIBRARY) {
                return InstalledDriver::simulated(node).map(Some);
            }
        }
        let mut cache = None;
        match (self.library(CUDA_LIBRARY, &mut cache)?, self.library(NVML_LIBRARY, &mut cache)?) {
            (Some(cuda), Some(nvml)) => {
                let simulated = simulated_node_of(&cuda);
                let others = match simulated {
                    Some(_) => OtherLibraries::default(),
                    None => self.others([&cuda, &nvml], self.cached(&mut cache)),
                };
                Ok(Some(InstalledDriver { cuda, nvml, simulated, others }))
            }
            (Some(there), None) => Err(DriverError::Incomplete { there, missing: NVML_LIBRARY }),
            (None, Some(there)) => Err(DriverError::Incomplete { there, missing: CUDA_LIBRARY }),
            (None, None) => Ok(None),
        }
    }

    /// Finds the file that the loader would load under a name.
    fn library(&self, name: &str, cache: &mut Option<Vec<PathBuf>>) -> Result<Option<PathBuf>, DriverError> {
        for folder in &self.folders {
            if let Some(file) = find_loadable(&self.root, &folder.join(name))? {
                return Ok(Some(file));
            }
        }
        let cached = self.cached(cache).iter();
        let cached = cached.filter(|file| file.file_name() == Some(OsStr::new(name))).cloned();
        for file in cached.chain(self.usual.iter().map(|folder| folder.join(name))) {
            if let Some(file) = find_loadable(&self.root, &file)? {
                return Ok(Some(file));
            }
        }
        Ok(None)
    }

    /// Returns the files that the loader's cache has for the two libraries.
    fn cached<'a>(&self, cache: &'a mut Option<Vec<PathBuf>>) -> &'a [PathBuf] {
        cache.get_or_insert_with(|| {
            let bytes = self.root.real(&self.cache).and_then(|file| fs::read(self.root.at(&file)));
            // A machine without a cache can still have a driver in a default directory.
            ld_cache::find_libraries(&bytes.unwrap_or_default(), &[CUDA_LIBRARY, NVML_LIBRARY])
        })
    }

    /// Finds all files with the names of the libraries that a program could load, except for the driver's own.
    fn others(&self, own: [&PathBuf; 2], cache: &[PathBuf]) -> OtherLibraries {
        // The driver's own two paths are as this process sees them already.
        let beside = own.into_iter().filter_map(|file| Some(file.parent()?.to_path_buf()));
        let cached = cache.iter().filter_map(|file| Some(file.parent()?.to_path_buf()));
        let toolkits = compat_dirs(&self.root.at(&self.toolkits), &self.toolkits);
        let named = cached.chain(self.folders.iter().chain(&self.usual).cloned()).chain(toolkits);
        let real = |folder: PathBuf| self.root.real(&folder).ok().map(|folder| self.root.at(&folder));
        // Many of the directories are links to one another.
        let folders: BTreeSet<PathBuf> = beside.chain(named.filter_map(real)).collect();
        let [mut cuda, mut nvml] = [BTreeSet::new(), BTreeSet::new()];
        for entry in folders.iter().filter_map(|folder| fs::read_dir(folder).ok()).flatten().flatten() {
            let found = match entry.file_name() {
                name if is_named_like(&name, CUDA_LIBRARY) => &mut cuda,
                name if is_named_like(&name, NVML_LIBRARY) => &mut nvml,
                _ => continue,
            };
            // A file that cannot be loaded need not be covered.
            let file = find_loadable(&self.root, &self.root.inside(&entry.path())).ok().flatten();
            found.extend(file.filter(|file| !own.contains(&file)));
        }
        OtherLibraries { cuda: cuda.into_iter().collect(), nvml: nvml.into_iter().collect() }
    }
}

/// Returns whether a file name is that of a library, with any version or none.
fn is_named_like(name: &OsStr, library: &str) -> bool {
    let plain = library.trim_end_matches(".1").as_bytes();
    name.as_bytes().strip_prefix(plain).is_some_and(|rest| rest.is_empty() || rest[0] == b'.')
}

/// Returns the directories of toolkits that contain the libraries of newer drivers.
fn compat_dirs(seen: &Path, toolkits: &Path) -> Vec<PathBuf> {
    let names = fs::read_dir(seen).into_iter().flatten().flatten().map(|entry| entry.file_name());
    let names = names.filter(|name| name.as_bytes().starts_with(b"cuda"));
    names.flat_map(|name| COMPAT_DIRS.map(|below| toolkits.join(&name).join(below))).collect()
}

/// Splits a library path as the loader does: an empty entry is the working directory.
fn split_library_path(path: &OsStr) -> Vec<PathBuf> {
    let folder =
        |part: &[u8]| if part.is_empty() { PathBuf::from(".") } else { OsStr::from_bytes(part).into() };
    if path.is_empty() {
        return Vec::new();
    }
    path.as_bytes().split(|byte| b":;".contains(byte)).map(folder).collect()
}

const SKIPPED_ERRORS: [ErrorKind; 3] =
    [ErrorKind::NotFound, ErrorKind::NotADirectory, ErrorKind::PermissionDenied];

/// Returns the file that a path within a root resolves to, if the loader would load it. A file that does not exist and
/// a library for another processor are skipped. The returned path is as this process sees it.
fn find_loadable(root: &HostRoot, path: &Path) -> Result<Option<PathBuf>, DriverError> {
    let unreadable = |error| DriverError::Unreadable { path: root.at(path), error };
    let found = root.real(path).map(|real| root.at(&real)).and_then(|real| Ok((File::open(&real)?, real)));
    let (mut file, real) = match found {
        Ok(found) => found,
        // The loader skips directories of the path that it may not read.
        Err(error) if SKIPPED_ERRORS.contains(&error.kind()) => return Ok(None),
        Err(error) => return Err(unreadable(error)),
    };
    // Class, byte order and machine must be those of this program, or its children cannot load the library.
    let mut head = [0; 20];
    match file.read_exact(&mut head) {
        Ok(()) if head.starts_with(b"\x7fELF") => {}
        Ok(()) => return Err(DriverError::NotALibrary { path: root.at(path) }),
        Err(error) if error.kind() == ErrorKind::UnexpectedEof => {
            return Err(DriverError::NotALibrary { path: root.at(path) });
        }
        Err(error) => return Err(unreadable(error)),
    }
    let (class, machine) = (head[4], u16::from_ne_bytes([head[18], head[19]]));
    Ok(((class, machine) == (2, ELF_MACHINE)).then_some(real))
}

/// The ELF machine number of the processor that this program is built for.
const ELF_MACHINE: u16 = if cfg!(target_arch = "aarch64") { libc::EM_AARCH64 } else { libc::EM_X86_64 };

/// Returns the simulated node that a library belongs to: such a driver may also be found on the library path.
fn simulated_node_of(cuda: &Path) -> Option<PathBuf> {
    let folder = cuda.parent()?;
    let node = folder.parent()?;
    (folder.file_name()? == "lib" && node.join("node.json").is_file()).then(|| node.to_path_buf())
}

/// Returns whether a directory contains the libraries of a simulated node.
fn is_simulated_library_dir(folder: &Path) -> bool {
    fs::canonicalize(folder.join(CUDA_LIBRARY)).is_ok_and(|file| simulated_node_of(&file).is_some())
}

#[cfg(test)]
mod tests;
