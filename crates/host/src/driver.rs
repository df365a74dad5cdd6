//! Which NVIDIA driver this machine has: the files that a program started from here would load.
//!
//! The search is the dynamic loader's: the folders of `LD_LIBRARY_PATH`, its cache, the usual folders. Each library is
//! searched for by itself, as programs do, and files for other processors are passed over. A simulated node that
//! `PARTAGE_SIM_DIR` names comes first: who sets it means it.
//!
//! Root finds the machine's driver, whatever its own `LD_LIBRARY_PATH` says, but for simulated nodes: it looks for all users,
//! and they do not have its path. Who runs in a container finds the host's below where it sees the host's root; that may
//! have its driver in a container, too.

mod cache;
pub mod files;

use crate::root::Root;
use std::collections::BTreeSet;
use std::env;
use std::ffi::OsStr;
use std::fs::{self, File};
use std::io::{self, ErrorKind, Read};
use std::os::unix::ffi::OsStrExt;
use std::path::{Path, PathBuf};

/// The library that programs compute with.
pub const CUDA: &str = "libcuda.so.1";
/// The library that tells about GPUs.
pub const NVML: &str = "libnvidia-ml.so.1";
/// The variable that names a simulated node's folder.
pub const SIMULATED: &str = "PARTAGE_SIM_DIR";

/// Where drivers are put by Debian, by others, by Windows for its Linux, by container tools, and by NixOS.
const USUAL: [&str; 9] = [
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
/// Where toolkits put libraries of newer drivers, each below a folder of its version.
const TOOLKITS: &str = "/usr/local";
const COMPATIBLE: [&str; 3] = ["compat", "compat/lib", "compat/lib.real"];
/// The root of a driver that runs in a container of its own, as NVIDIA's operator has it.
const DRIVER_CONTAINER: &str = "/run/nvidia/driver";

/// What is wrong with this machine's driver.
#[derive(Debug, thiserror::Error)]
pub enum DriverError {
    /// One library is there, the other is not.
    #[error(
        "half an NVIDIA driver: {} is there, and {missing} is nowhere; install the driver's package again, with its compute part", there.display()
    )]
    Half {
        /// The library that is there.
        there: PathBuf,
        /// The other one.
        missing: &'static str,
    },
    /// A simulated node without its libraries.
    #[error(
        "{} has no {library}: it is no simulated node, or one without its driver; partage sim env --dir {} writes it",
        folder.display(), node.display()
    )]
    NotSimulated {
        /// The node's folder.
        node: PathBuf,
        /// Where its libraries should be.
        folder: PathBuf,
        /// What is not there.
        library: &'static str,
    },
    /// A file with a library's name that is none.
    #[error(
        "{} is no library: programs would try to load it and fail; remove it, or take its folder off LD_LIBRARY_PATH", path.display()
    )]
    NoLibrary {
        /// The file.
        path: PathBuf,
    },
    /// A file that is there and cannot be read.
    #[error("{}: the driver's library cannot be read: {error}", path.display())]
    Unreadable {
        /// The file.
        path: PathBuf,
        /// What the system said.
        #[source]
        error: io::Error,
    },
}

/// A driver: the files that are really loaded, not the links to them.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Driver {
    /// What programs load as `libcuda.so.1`.
    pub cuda: PathBuf,
    /// What programs load as `libnvidia-ml.so.1`.
    pub nvml: PathBuf,
    /// The node's folder, where the driver is a simulated one.
    pub simulated: Option<PathBuf>,
    /// Other files that programs may load in the place of `cuda` and `nvml`: under another of their names, of a toolkit, or
    /// left from an older driver. A simulated node has none.
    pub others: Others,
}

/// Files that are not the driver's and bear its libraries' names. Real files, each once.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Others {
    /// Those called `libcuda.so…`.
    pub cuda: Vec<PathBuf>,
    /// Those called `libnvidia-ml.so…`.
    pub nvml: Vec<PathBuf>,
}

impl Driver {
    /// The driver that a program started from here would load. `None` where there is none at all.
    pub fn find() -> Result<Option<Driver>, DriverError> {
        let mut folders = env::var_os("LD_LIBRARY_PATH").map(|path| folders(&path)).unwrap_or_default();
        if rustix::process::geteuid().is_root() {
            folders.retain(|folder| has_node(folder));
        }
        Search { node: env::var_os(SIMULATED).map(PathBuf::from), folders, ..Search::below(Root::here()) }
            .run()
    }

    /// The driver that the host's own programs would load, below where we see its root; that of a driver container where
    /// the host itself has none. Paths are as we see them.
    pub fn find_in(root: &Root) -> Result<Option<Driver>, DriverError> {
        let found = Search::below(root.clone()).run();
        if matches!(found, Ok(Some(_))) {
            return found;
        }
        match root.below(Path::new(DRIVER_CONTAINER)).map(|root| Search::below(root).run()) {
            Some(Ok(Some(driver))) => Ok(Some(driver)),
            // What is wrong with the host's own says more.
            Some(inside) if matches!(found, Ok(None)) => inside,
            _ => found,
        }
    }

    /// The driver of a simulated node.
    pub fn simulated(node: &Path) -> Result<Driver, DriverError> {
        let folder = node.join("lib");
        let one = |library| {
            let absent = || DriverError::NotSimulated { node: node.into(), folder: folder.clone(), library };
            loadable(&Root::here(), &folder.join(library))?.ok_or_else(absent)
        };
        let (cuda, nvml) = (one(CUDA)?, one(NVML)?);
        let node =
            fs::canonicalize(node).map_err(|error| DriverError::Unreadable { path: node.into(), error })?;
        Ok(Driver { cuda, nvml, simulated: Some(node), others: Others::default() })
    }
}

/// Where is looked, in this order. Paths are those of the root.
struct Search {
    root: Root,
    /// A simulated node.
    node: Option<PathBuf>,
    /// Those of `LD_LIBRARY_PATH`.
    folders: Vec<PathBuf>,
    /// The loader's cache. It is read when nothing was found before.
    cache: PathBuf,
    /// Where drivers usually are.
    usual: Vec<PathBuf>,
    /// The folder that toolkits are in.
    toolkits: PathBuf,
}

impl Search {
    /// Where all users' programs look.
    fn below(root: Root) -> Search {
        Search {
            root,
            node: None,
            folders: Vec::new(),
            cache: cache::FILE.into(),
            usual: USUAL.iter().map(PathBuf::from).collect(),
            toolkits: TOOLKITS.into(),
        }
    }

    fn run(&self) -> Result<Option<Driver>, DriverError> {
        if let Some(node) = &self.node {
            let there = |library| node.join("lib").join(library).exists();
            if there(CUDA) || there(NVML) {
                return Driver::simulated(node).map(Some);
            }
        }
        let mut cache = None;
        match (self.library(CUDA, &mut cache)?, self.library(NVML, &mut cache)?) {
            (Some(cuda), Some(nvml)) => {
                let simulated = node_of(&cuda);
                let others = match simulated {
                    Some(_) => Others::default(),
                    None => self.others([&cuda, &nvml], self.cached(&mut cache)),
                };
                Ok(Some(Driver { cuda, nvml, simulated, others }))
            }
            (Some(there), None) => Err(DriverError::Half { there, missing: NVML }),
            (None, Some(there)) => Err(DriverError::Half { there, missing: CUDA }),
            (None, None) => Ok(None),
        }
    }

    /// The file that is loaded under a name.
    fn library(&self, name: &str, cache: &mut Option<Vec<PathBuf>>) -> Result<Option<PathBuf>, DriverError> {
        for folder in &self.folders {
            if let Some(file) = loadable(&self.root, &folder.join(name))? {
                return Ok(Some(file));
            }
        }
        let cached = self.cached(cache).iter();
        let cached = cached.filter(|file| file.file_name() == Some(OsStr::new(name))).cloned();
        for file in cached.chain(self.usual.iter().map(|folder| folder.join(name))) {
            if let Some(file) = loadable(&self.root, &file)? {
                return Ok(Some(file));
            }
        }
        Ok(None)
    }

    /// What the loader's cache has under our names.
    fn cached<'a>(&self, cache: &'a mut Option<Vec<PathBuf>>) -> &'a [PathBuf] {
        cache.get_or_insert_with(|| {
            let bytes = self.root.real(&self.cache).and_then(|file| fs::read(self.root.at(&file)));
            // A machine whose loader has none is no machine without a driver.
            cache::files(&bytes.unwrap_or_default(), &[CUDA, NVML])
        })
    }

    /// All files with the libraries' names where a program could come by, but for the driver's own.
    fn others(&self, own: [&PathBuf; 2], cache: &[PathBuf]) -> Others {
        // Our own two are as we see them already.
        let beside = own.into_iter().filter_map(|file| Some(file.parent()?.to_path_buf()));
        let cached = cache.iter().filter_map(|file| Some(file.parent()?.to_path_buf()));
        let toolkits = compatible(&self.root.at(&self.toolkits), &self.toolkits);
        let named = cached.chain(self.folders.iter().chain(&self.usual).cloned()).chain(toolkits);
        let real = |folder: PathBuf| self.root.real(&folder).ok().map(|folder| self.root.at(&folder));
        // Many are links to one another.
        let folders: BTreeSet<PathBuf> = beside.chain(named.filter_map(real)).collect();
        let [mut cuda, mut nvml] = [BTreeSet::new(), BTreeSet::new()];
        for entry in folders.iter().filter_map(|folder| fs::read_dir(folder).ok()).flatten().flatten() {
            let found = match entry.file_name() {
                name if is_called(&name, CUDA) => &mut cuda,
                name if is_called(&name, NVML) => &mut nvml,
                _ => continue,
            };
            // What cannot be loaded needs no cover.
            let file = loadable(&self.root, &self.root.inside(&entry.path())).ok().flatten();
            found.extend(file.filter(|file| !own.contains(&file)));
        }
        Others { cuda: cuda.into_iter().collect(), nvml: nvml.into_iter().collect() }
    }
}

/// Whether a file's name is a library's, with any version or none.
fn is_called(name: &OsStr, library: &str) -> bool {
    let plain = library.trim_end_matches(".1").as_bytes();
    name.as_bytes().strip_prefix(plain).is_some_and(|rest| rest.is_empty() || rest[0] == b'.')
}

/// The folders of toolkits that have libraries of newer drivers.
fn compatible(seen: &Path, toolkits: &Path) -> Vec<PathBuf> {
    let names = fs::read_dir(seen).into_iter().flatten().flatten().map(|entry| entry.file_name());
    let names = names.filter(|name| name.as_bytes().starts_with(b"cuda"));
    names.flat_map(|name| COMPATIBLE.map(|below| toolkits.join(&name).join(below))).collect()
}

/// The folders of a library path, as the loader reads it: an empty one is where the program stands.
fn folders(path: &OsStr) -> Vec<PathBuf> {
    let folder =
        |part: &[u8]| if part.is_empty() { PathBuf::from(".") } else { OsStr::from_bytes(part).into() };
    if path.is_empty() {
        return Vec::new();
    }
    path.as_bytes().split(|byte| b":;".contains(byte)).map(folder).collect()
}

const PASSED_OVER: [ErrorKind; 3] =
    [ErrorKind::NotFound, ErrorKind::NotADirectory, ErrorKind::PermissionDenied];

/// The file behind a name of a root, if the loader would take it: nothing, and a library for another processor, are passed
/// over. As we see it.
fn loadable(root: &Root, path: &Path) -> Result<Option<PathBuf>, DriverError> {
    let unreadable = |error| DriverError::Unreadable { path: root.at(path), error };
    let found = root.real(path).map(|real| root.at(&real)).and_then(|real| Ok((File::open(&real)?, real)));
    let (mut file, real) = match found {
        Ok(found) => found,
        // A folder of somebody else on the path hinders no program.
        Err(error) if PASSED_OVER.contains(&error.kind()) => return Ok(None),
        Err(error) => return Err(unreadable(error)),
    };
    // Class, byte order and machine; the same as this program's, or of no use to its children.
    let mut head = [0; 20];
    match file.read_exact(&mut head) {
        Ok(()) if head.starts_with(b"\x7fELF") => {}
        Ok(()) => return Err(DriverError::NoLibrary { path: root.at(path) }),
        Err(error) if error.kind() == ErrorKind::UnexpectedEof => {
            return Err(DriverError::NoLibrary { path: root.at(path) });
        }
        Err(error) => return Err(unreadable(error)),
    }
    let (class, machine) = (head[4], u16::from_ne_bytes([head[18], head[19]]));
    Ok(((class, machine) == (2, MACHINE)).then_some(real))
}

/// ELF's number for the processor that this is built for.
const MACHINE: u16 = if cfg!(target_arch = "aarch64") { libc::EM_AARCH64 } else { libc::EM_X86_64 };

/// The simulated node that a library belongs to: such a driver is found on the path like any other.
fn node_of(cuda: &Path) -> Option<PathBuf> {
    let folder = cuda.parent()?;
    let node = folder.parent()?;
    (folder.file_name()? == "lib" && node.join("node.json").is_file()).then(|| node.to_path_buf())
}

/// Whether a folder is that of a simulated node's libraries.
fn has_node(folder: &Path) -> bool {
    fs::canonicalize(folder.join(CUDA)).is_ok_and(|file| node_of(&file).is_some())
}

#[cfg(test)]
mod tests;
