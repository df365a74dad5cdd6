//! Which NVIDIA driver this machine has: the files that a program started from here would load.
//!
//! The search is the dynamic loader's: the folders of `LD_LIBRARY_PATH`, its cache, the usual folders. Each library is
//! searched for by itself, as programs do, and files for other processors are passed over. A simulated node that
//! `PARTAGE_SIM_DIR` names comes first: who sets it means it.
//!
//! Root finds the machine's driver, whatever its own `LD_LIBRARY_PATH` says, but for simulated nodes: it looks for all users,
//! and they do not have its path.

use std::collections::BTreeSet;
use std::env;
use std::ffi::{OsStr, OsString};
use std::fs::{self, File};
use std::io::{self, ErrorKind, Read};
use std::os::unix::ffi::OsStrExt;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

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
/// It is not on everybody's path.
const LDCONFIG: [&str; 4] = ["/sbin/ldconfig", "/usr/sbin/ldconfig", "/bin/ldconfig", "/usr/bin/ldconfig"];

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
        Search {
            node: env::var_os(SIMULATED).map(PathBuf::from),
            folders,
            cache,
            usual: USUAL.iter().map(PathBuf::from).collect(),
            toolkits: TOOLKITS.into(),
        }
        .run()
    }

    /// The driver of a simulated node.
    pub fn simulated(node: &Path) -> Result<Driver, DriverError> {
        let folder = node.join("lib");
        let one = |library| {
            let absent = || DriverError::NotSimulated { node: node.into(), folder: folder.clone(), library };
            loadable(&folder.join(library))?.ok_or_else(absent)
        };
        let (cuda, nvml) = (one(CUDA)?, one(NVML)?);
        let node =
            fs::canonicalize(node).map_err(|error| DriverError::Unreadable { path: node.into(), error })?;
        Ok(Driver { cuda, nvml, simulated: Some(node), others: Others::default() })
    }
}

/// Where is looked, in this order.
struct Search {
    /// A simulated node.
    node: Option<PathBuf>,
    /// Those of `LD_LIBRARY_PATH`.
    folders: Vec<PathBuf>,
    /// What the loader's cache has. It is asked when nothing was found before: that takes a process.
    cache: fn() -> Vec<PathBuf>,
    /// Where drivers usually are.
    usual: Vec<PathBuf>,
    /// The folder that toolkits are in.
    toolkits: PathBuf,
}

impl Search {
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
                    None => self.others([&cuda, &nvml], cache.get_or_insert_with(self.cache)),
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
            if let Some(file) = loadable(&folder.join(name))? {
                return Ok(Some(file));
            }
        }
        let cached = cache.get_or_insert_with(self.cache).iter();
        let cached = cached.filter(|file| file.file_name() == Some(OsStr::new(name))).cloned();
        for file in cached.chain(self.usual.iter().map(|folder| folder.join(name))) {
            if let Some(file) = loadable(&file)? {
                return Ok(Some(file));
            }
        }
        Ok(None)
    }
}

impl Search {
    /// All files with the libraries' names where a program could come by, but for the driver's own.
    fn others(&self, own: [&PathBuf; 2], cache: &[PathBuf]) -> Others {
        let known = own.into_iter().chain(cache).filter_map(|file| file.parent());
        let named = self.folders.iter().chain(&self.usual).map(PathBuf::as_path);
        let toolkits = compatible(&self.toolkits);
        let folders = known.chain(named).chain(toolkits.iter().map(PathBuf::as_path));
        // Many are links to one another.
        let folders: BTreeSet<PathBuf> = folders.filter_map(|folder| fs::canonicalize(folder).ok()).collect();
        let [mut cuda, mut nvml] = [BTreeSet::new(), BTreeSet::new()];
        for entry in folders.iter().filter_map(|folder| fs::read_dir(folder).ok()).flatten().flatten() {
            let found = match entry.file_name() {
                name if is_called(&name, CUDA) => &mut cuda,
                name if is_called(&name, NVML) => &mut nvml,
                _ => continue,
            };
            // What cannot be loaded needs no cover.
            found.extend(loadable(&entry.path()).ok().flatten().filter(|file| !own.contains(&file)));
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
fn compatible(toolkits: &Path) -> Vec<PathBuf> {
    let entries = fs::read_dir(toolkits).into_iter().flatten().flatten();
    let toolkits = entries.filter(|entry| entry.file_name().as_bytes().starts_with(b"cuda"));
    toolkits.flat_map(|entry| COMPATIBLE.map(|below| entry.path().join(below))).collect()
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

/// All files of the loader's cache that have one of our names.
fn cache() -> Vec<PathBuf> {
    let ask = |program: &&str| {
        let mut command = Command::new(program);
        command.arg("-p").stdin(Stdio::null()).stderr(Stdio::null()).env("LC_ALL", "C");
        command.output().ok().filter(|run| run.status.success())
    };
    let Some(run) = LDCONFIG.iter().find_map(ask) else { return Vec::new() };
    cached(&run.stdout)
}

/// Reads lines such as `libcuda.so.1 (libc6,x86-64) => /usr/lib/x86_64-linux-gnu/libcuda.so.1`.
fn cached(text: &[u8]) -> Vec<PathBuf> {
    let file = |line: &[u8]| -> Option<PathBuf> {
        let ours = [CUDA, NVML].iter().any(|name| {
            line.trim_ascii_start().strip_prefix(name.as_bytes()).is_some_and(|rest| rest.starts_with(b" "))
        });
        let arrow = line.windows(4).position(|part| part == b" => ")?;
        ours.then(|| OsString::from(OsStr::from_bytes(&line[arrow + 4..])).into())
    };
    text.split(|&byte| byte == b'\n').filter_map(file).collect()
}

const PASSED_OVER: [ErrorKind; 3] =
    [ErrorKind::NotFound, ErrorKind::NotADirectory, ErrorKind::PermissionDenied];

/// The file behind a name, if the loader would take it: nothing, and a library for another processor, are passed over.
fn loadable(path: &Path) -> Result<Option<PathBuf>, DriverError> {
    let unreadable = |error| DriverError::Unreadable { path: path.into(), error };
    let mut file = match File::open(path) {
        Ok(file) => file,
        // A folder of somebody else on the path hinders no program.
        Err(error) if PASSED_OVER.contains(&error.kind()) => return Ok(None),
        Err(error) => return Err(unreadable(error)),
    };
    // Class, byte order and machine; the same as this program's, or of no use to its children.
    let mut head = [0; 20];
    match file.read_exact(&mut head) {
        Ok(()) if head.starts_with(b"\x7fELF") => {}
        Ok(()) => return Err(DriverError::NoLibrary { path: path.into() }),
        Err(error) if error.kind() == ErrorKind::UnexpectedEof => {
            return Err(DriverError::NoLibrary { path: path.into() });
        }
        Err(error) => return Err(unreadable(error)),
    }
    let (class, machine) = (head[4], u16::from_ne_bytes([head[18], head[19]]));
    if (class, machine) != (2, MACHINE) {
        return Ok(None);
    }
    fs::canonicalize(path).map(Some).map_err(unreadable)
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
