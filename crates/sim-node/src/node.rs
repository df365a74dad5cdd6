//! A simulated node: a folder that all its processes share.
//!
//! | what | who may write it |
//! |---|---|
//! | `node.json` | nobody: the driver, the GPUs, the settings ([`NodeConfig`]) |
//! | `lib/` | its owner: the driver's two libraries ([`crate::install`]) |
//! | `dev/` | its owner: the GPUs' device files, `nvidia0` and so on |
//! | `state` | everybody: what runs and what is allocated |
//! | `shared/` | everybody, each their own files: memory that processes give to others |
//! | `lock` | nobody: locked while the folder is made or removed |
//!
//! `node.json` comes last and as a whole, so a folder without it is none yet, and one with it is complete. The folder
//! may be a mount point: nothing is renamed over it.
//!
//! Like the device files of a real driver, the node is for every user of the machine and for containers that it is
//! mounted into: whoever may use its GPUs may write `state` (mode 0666). What is loaded into other people's
//! processes, and what says how to read `state`, is not: the folder itself belongs to who made it (0755).
//! A GPU whose device file is missing, or may not be opened, is not there for a program that starts. Where there is no
//! `dev` at all (nodes of older versions, containers that have only some of the folder), all are.
//! `shared/` is like `/tmp` (1777): open a file of another user there without `O_CREAT`, or the kernel refuses it.

mod config;
mod expected_inventory;
mod identity;
mod machine;
mod topology;

pub use config::{ConfigError, MOST_GPUS, NodeConfig, NodeGpu, Settings, driver};
pub use topology::{Cpus, LinkEnd, PciAddress, PciPath, PciPaths};

use crate::state::State;
use rustix::fs::{FlockOperation, Mode};
use std::fs::{self, File};
use std::io::{self, ErrorKind, Write};
use std::path::{Path, PathBuf};

/// The variable that names a node's folder to the programs that run on it.
pub const VARIABLE: &str = "PARTAGE_SIM_DIR";

const CONFIG: &str = "node.json";
const STATE: &str = crate::state::STATE;
const CLIENTS: &str = crate::state::CLIENTS;
const PIDS: &str = crate::state::PIDS;
const SHARED: &str = "shared";
const LIBRARIES: &str = "lib";
const DEVICES: &str = "dev";
const LOCK: &str = "lock";
/// How `node.json` is called while it is written.
const UNFINISHED: &str = ".node.json.new";

/// Why a folder is no node, or cannot become one.
#[derive(Debug, thiserror::Error)]
pub enum NodeError {
    /// Its shared memory cannot be made.
    #[error(transparent)]
    State(#[from] crate::state::StateError),
    /// Reading or writing failed.
    #[error("{}: {what}: {error}", path.display())]
    Io {
        /// Where.
        path: PathBuf,
        /// What was tried.
        what: &'static str,
        /// What the system said.
        #[source]
        error: io::Error,
    },
    /// The folder holds something else.
    #[error("{} holds {what}, which is no part of a simulated node: use an empty folder or a new one", path.display())]
    Foreign {
        /// The folder.
        path: PathBuf,
        /// One of the things in it.
        what: String,
    },
    /// The folder holds no node.
    #[error("{} is no simulated node: it has no node.json (partage sim env --dir makes one)", path.display())]
    NoNode {
        /// The folder.
        path: PathBuf,
    },
    /// The folder holds another node than asked for.
    #[error("{} is another node: {what}; use another folder, or remove it: partage sim rm {}", path.display(), path.display())]
    Another {
        /// The folder.
        path: PathBuf,
        /// How it differs.
        what: String,
    },
    /// `node.json` is wrong.
    #[error("{}: {error}", path.display())]
    Config {
        /// The file.
        path: PathBuf,
        /// What is wrong.
        #[source]
        error: ConfigError,
    },
    /// The folder holds another node than asked for, or a damaged one, and somebody uses it.
    #[error("{} is {what}, and is in use: stop what uses it first", path.display())]
    InUse {
        /// The folder.
        path: PathBuf,
        /// What is wrong with it.
        what: &'static str,
    },
    /// No program says which node.
    #[error(
        "no simulated node is named: {VARIABLE} is not set, and no node's folder is written into this file; \
         set the variable (partage sim env prints it), or load the libraries in the lib folder of a node"
    )]
    NotNamed,
}

fn failed(path: &Path, what: &'static str) -> impl FnOnce(io::Error) -> NodeError {
    let path = path.to_path_buf();
    move |error| NodeError::Io { path, what, error }
}

/// A node's folder.
#[derive(Clone, Debug)]
pub struct NodeDir {
    path: PathBuf,
    config: NodeConfig,
}

impl NodeDir {
    /// Makes a node, or opens it where it is already there and the same.
    pub fn create(dir: &Path, config: &NodeConfig) -> Result<NodeDir, NodeError> {
        fs::create_dir_all(dir).map_err(failed(dir, "the folder cannot be made"))?;
        if let Some(node) = NodeDir::existing(dir)? {
            return node.is(config);
        }
        // Who does not own an empty folder finds out here, before anything is in it.
        let lock = Lock::take(dir)?;
        if let Some(node) = NodeDir::existing(dir)? {
            return node.is(config);
        }
        only_ours(dir)?;
        mode(dir, 0o755)?;
        for (folder, bits) in [(LIBRARIES, 0o755), (SHARED, 0o1777)] {
            let folder = dir.join(folder);
            match fs::create_dir(&folder) {
                Err(error) if error.kind() != ErrorKind::AlreadyExists => {
                    return Err(failed(&folder, "cannot be made")(error));
                }
                _ => mode(&folder, bits)?,
            }
        }
        make_devices(&dir.join(DEVICES), config)?;
        // A maker that died may have left one half done.
        remove_if_there(&dir.join(STATE))?;
        crate::state::create(dir, &config.setup())?;
        write_config(dir, config)?;
        drop(lock);
        Ok(NodeDir { path: absolute(dir)?, config: config.clone() })
    }

    /// The node of a folder that has had one before: as it is where it is the same and whole, made anew where it is not,
    /// unless it is in use.
    pub fn keep(dir: &Path, config: &NodeConfig, in_use: bool) -> Result<NodeDir, NodeError> {
        let in_use = |what| if in_use { Err(NodeError::InUse { path: dir.into(), what }) } else { Ok(()) };
        match NodeDir::open(dir) {
            Ok(node) if node.config() == config && crate::state::State::attach(node.path()).is_ok() => {
                return Ok(node);
            }
            Ok(node) if node.config() == config => in_use("damaged")?,
            Ok(_) => in_use("a simulated node with other GPUs")?,
            Err(_) => return NodeDir::create(dir, config),
        }
        NodeDir::remove(dir)?;
        NodeDir::create(dir, config)
    }

    /// Makes a node in a folder of its own: in memory where that is possible, else where temporary files are.
    pub fn fresh(config: &NodeConfig) -> Result<NodeDir, NodeError> {
        let memory = Path::new("/dev/shm");
        let user = rustix::process::getuid().as_raw();
        let mut first = None;
        for parent in [memory, &std::env::temp_dir()] {
            let dir = parent.join(format!("partage-sim-{user}-{:016x}", identity::unforeseen()));
            match fs::create_dir(&dir) {
                Ok(()) => return NodeDir::create(&dir, config),
                Err(error) => first = first.or(Some(failed(&dir, "the folder cannot be made")(error))),
            }
        }
        Err(first.unwrap_or(NodeError::NotNamed))
    }

    /// Opens a node.
    pub fn open(dir: &Path) -> Result<NodeDir, NodeError> {
        NodeDir::existing(dir)?.ok_or_else(|| NodeError::NoNode { path: dir.to_path_buf() })
    }

    /// Opens the node that [`VARIABLE`] names; without it, the one whose library this file is
    /// ([`crate::install::libraries`]).
    pub fn named() -> Result<NodeDir, NodeError> {
        match std::env::var_os(VARIABLE).filter(|dir| !dir.is_empty()) {
            Some(dir) => NodeDir::open(Path::new(&dir)),
            None => NodeDir::open(crate::embedded_config::node().ok_or(NodeError::NotNamed)?),
        }
    }

    /// Removes a node and its folder. Programs that still run on it keep what they have open.
    pub fn remove(dir: &Path) -> Result<(), NodeError> {
        // One whose maker was killed half way may go too: it has our names, if not yet its own.
        if !dir.join(STATE).is_file() && !dir.join(CLIENTS).is_file() {
            NodeDir::open(dir)?;
        }
        let lock = Lock::take(dir)?;
        only_ours(dir)?;
        // What says that it is a node goes last: what could not be removed can be tried again.
        remove_if_there(&dir.join(STATE))?;
        for folder in [LIBRARIES, DEVICES, SHARED] {
            remove_all_if_there(&dir.join(folder))?;
        }
        for file in [CLIENTS, PIDS, UNFINISHED, LOCK, CONFIG] {
            remove_if_there(&dir.join(file))?;
        }
        drop(lock);
        match fs::remove_dir(dir) {
            // A mount point goes with what mounted it.
            Err(error) if error.kind() != ErrorKind::ResourceBusy => {
                Err(failed(dir, "the folder cannot be removed")(error))
            }
            _ => Ok(()),
        }
    }

    /// The node in a folder, where there is one.
    fn existing(dir: &Path) -> Result<Option<NodeDir>, NodeError> {
        let file = dir.join(CONFIG);
        let text = match fs::read_to_string(&file) {
            Ok(text) => text,
            Err(error) if error.kind() == ErrorKind::NotFound => return Ok(None),
            Err(error) => return Err(failed(&file, "cannot be read")(error)),
        };
        let config = NodeConfig::from_json(&text).map_err(|error| NodeError::Config { path: file, error })?;
        Ok(Some(NodeDir { path: absolute(dir)?, config }))
    }

    /// Itself, if it is what was asked for.
    fn is(self, config: &NodeConfig) -> Result<NodeDir, NodeError> {
        match self.config.difference(config) {
            None => Ok(self),
            Some(what) => Err(NodeError::Another { path: self.path, what }),
        }
    }

    /// The folder, from the root.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// What the node is made of.
    pub fn config(&self) -> &NodeConfig {
        &self.config
    }

    /// Where the driver's libraries are.
    pub fn libraries(&self) -> PathBuf {
        self.path.join(LIBRARIES)
    }

    /// Where the GPUs' device files are.
    pub fn devices(&self) -> PathBuf {
        self.path.join(DEVICES)
    }

    /// The indexes of the GPUs that a program may use: those whose device file can be opened, as with a real driver.
    pub fn usable(&self) -> Vec<usize> {
        let devices = self.devices();
        let gpus = self.config.gpus.iter().enumerate();
        if matches!(devices.try_exists(), Ok(false)) {
            return gpus.map(|(index, _)| index).collect();
        }
        let opens = |gpu: &NodeGpu| File::open(devices.join(device(gpu))).is_ok();
        gpus.filter(|(_, gpu)| opens(gpu)).map(|(index, _)| index).collect()
    }

    /// Whether a GPU is in MIG mode.
    pub fn is_split(&self, state: &State, gpu: usize) -> bool {
        state.mig(gpu).unwrap_or_else(|| self.config.gpus.get(gpu).is_some_and(|gpu| gpu.mig))
    }

    /// The memory that its processes share.
    pub fn state(&self) -> PathBuf {
        self.path.join(STATE)
    }

    /// Where the memory lies that processes give to others.
    pub fn shared(&self) -> PathBuf {
        self.path.join(SHARED)
    }
}

/// Held while a folder is made or removed; a maker that dies lets go of it.
struct Lock(#[expect(dead_code, reason = "closing it lets go")] File);

impl Lock {
    fn take(dir: &Path) -> Result<Lock, NodeError> {
        let path = dir.join(LOCK);
        // What is in the folder is looked at first: a folder of somebody else gets no file of ours.
        only_ours(dir)?;
        let file = File::options().write(true).create(true).truncate(false).open(&path);
        let file = file.map_err(failed(&path, "cannot be made"))?;
        rustix::fs::flock(&file, FlockOperation::LockExclusive)
            .map_err(|error| failed(&path, "cannot be locked")(error.into()))?;
        Ok(Lock(file))
    }
}

/// Refuses a folder that holds more than a node.
fn only_ours(dir: &Path) -> Result<(), NodeError> {
    let ours = [CONFIG, STATE, CLIENTS, PIDS, SHARED, LIBRARIES, DEVICES, LOCK, UNFINISHED];
    let entries = fs::read_dir(dir).and_then(|entries| entries.collect::<io::Result<Vec<_>>>());
    let entries = entries.map_err(failed(dir, "the folder cannot be read"))?;
    let names = entries.iter().map(fs::DirEntry::file_name);
    // Folders have no order; what is said has one.
    match names.filter(|name| !ours.iter().any(|ours| name == ours)).min() {
        Some(name) => Err(NodeError::Foreign { path: dir.into(), what: name.to_string_lossy().into_owned() }),
        None => Ok(()),
    }
}

/// Whatever the umask says.
fn mode(path: &Path, bits: u32) -> Result<(), NodeError> {
    rustix::fs::chmod(path, Mode::from_raw_mode(bits))
        .map_err(|error| failed(path, "its mode cannot be set")(error.into()))
}

/// How a GPU's device file is called.
fn device(gpu: &NodeGpu) -> String {
    format!("nvidia{}", gpu.minor)
}

/// Empty files: there is nothing to say to a GPU through them, only whether one may.
fn make_devices(folder: &Path, config: &NodeConfig) -> Result<(), NodeError> {
    // A maker that died may have left those of another node.
    remove_all_if_there(folder)?;
    fs::create_dir(folder).map_err(failed(folder, "cannot be made"))?;
    mode(folder, 0o755)?;
    for gpu in &config.gpus {
        let file = folder.join(device(gpu));
        File::create(&file).map_err(failed(&file, "cannot be made"))?;
        mode(&file, 0o444)?;
    }
    Ok(())
}

fn remove_all_if_there(folder: &Path) -> Result<(), NodeError> {
    match fs::remove_dir_all(folder) {
        Err(error) if error.kind() != ErrorKind::NotFound => Err(failed(folder, "cannot be removed")(error)),
        _ => Ok(()),
    }
}

fn remove_if_there(file: &Path) -> Result<(), NodeError> {
    match fs::remove_file(file) {
        Err(error) if error.kind() != ErrorKind::NotFound => Err(failed(file, "cannot be removed")(error)),
        _ => Ok(()),
    }
}

/// As a whole or not at all, and behind everything else.
fn write_config(dir: &Path, config: &NodeConfig) -> Result<(), NodeError> {
    let (unfinished, file) = (dir.join(UNFINISHED), dir.join(CONFIG));
    let text = config.to_json().map_err(|error| NodeError::Config { path: file.clone(), error })?;
    let write = || {
        let mut open = File::create(&unfinished)?;
        open.write_all(text.as_bytes())?;
        rustix::fs::fchmod(&open, Mode::from_raw_mode(0o644))?;
        open.sync_all()?;
        fs::rename(&unfinished, &file)?;
        File::open(dir)?.sync_all()
    };
    write().map_err(failed(&file, "cannot be written"))
}

/// Programs may change their folder.
fn absolute(dir: &Path) -> Result<PathBuf, NodeError> {
    fs::canonicalize(dir).map_err(failed(dir, "cannot be found"))
}

/// A seed that every folder has its own of, and a node made there again has too.
pub fn seed_of(dir: &Path) -> u64 {
    use std::os::unix::ffi::OsStrExt;
    let dir =
        fs::canonicalize(dir).or_else(|_| std::path::absolute(dir)).unwrap_or_else(|_| dir.to_path_buf());
    // FNV-1a: short, and the same in every build.
    dir.as_os_str()
        .as_bytes()
        .iter()
        .fold(0xcbf2_9ce4_8422_2325, |hash, &byte| (hash ^ u64::from(byte)).wrapping_mul(0x0100_0000_01b3))
}

/// A seed that nobody has had.
pub fn fresh_seed() -> u64 {
    // JSON readers of other languages keep 53 bits of a number.
    identity::unforeseen() >> 11
}

#[cfg(test)]
mod tests;
