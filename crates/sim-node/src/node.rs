//! A simulated node: a directory that all its processes share.
//!
//! | path | content | writable by |
//! |---|---|---|
//! | `node.json` | the driver, the GPUs, the settings ([`NodeConfig`]) | no process after its creation |
//! | `lib/` | the driver's two libraries ([`crate::install`]) | the owner |
//! | `dev/` | the GPUs' device files: `nvidia0` and so on | the owner |
//! | `state` | running processes and allocations | every user |
//! | `shared/` | memory that processes export to each other | every user, own files only |
//! | `lock` | locked while the directory is created or removed | no process |
//!
//! `node.json` is written last and atomically: a directory without it is not a node yet, and one with it is complete.
//! The directory may be a mount point, so it is never replaced by a rename.
//!
//! Like the device files of a real driver, the node is open to every user of the machine and to containers that mount
//! it: every process that may use its GPUs may write `state` (mode 0666). The libraries, which other users' processes
//! load, and `node.json`, which describes how to read `state`, are protected: the directory belongs to its creator
//! (0755). A GPU whose device file is missing or cannot be opened does not exist for a program that starts. Without a
//! `dev` directory (nodes of older versions, containers that mount only parts of the node), all GPUs exist. `shared/`
//! is like `/tmp` (1777): files of other users must be opened without `O_CREAT`, or the kernel refuses it.

mod config;
mod expected_inventory;
mod gpu_identity;
mod server_layout;
mod topology;

pub use config::{ConfigError, MAX_NODE_GPUS, NodeConfig, NodeGpu, NodeSettings, parse_driver_version};
pub use topology::{
    CpuList, CpuListError, NvLinkEnd, NvLinkEndError, PciAddress, PciAddressError, PciPath, PciPaths,
    PciPathsError,
};

use crate::state::SimNodeState;
use rustix::fs::{FlockOperation, Mode};
use std::fs::{self, File};
use std::io::{self, ErrorKind, Write};
use std::path::{Path, PathBuf};

/// The environment variable that passes a node's directory to the programs that run on it.
pub const NODE_DIR_VARIABLE: &str = "PARTAGE_SIM_DIR";

const CONFIG_FILE: &str = "node.json";
const STATE_FILE: &str = crate::state::STATE_FILE;
const CLIENTS_FILE: &str = crate::state::CLIENTS_FILE;
const PIDS_FILE: &str = crate::state::PIDS_FILE;
const SHARED_DIR: &str = "shared";
const LIBRARY_DIR: &str = "lib";
const DEVICE_DIR: &str = "dev";
const LOCK_FILE: &str = "lock";
/// The temporary name of `node.json` while it is written.
const CONFIG_TEMP_FILE: &str = ".node.json.new";

/// Why a node cannot be created, opened or removed.
#[derive(Debug, thiserror::Error)]
pub enum NodeError {
    /// The shared state cannot be created or opened.
    #[error(transparent)]
    State(#[from] crate::state::StateError),
    /// A file operation failed.
    #[error("{}: {what}: {error}", path.display())]
    Io {
        /// The file or directory.
        path: PathBuf,
        /// The operation that failed.
        what: &'static str,
        /// The error of the operating system.
        #[source]
        error: io::Error,
    },
    /// The directory contains a file that does not belong to a node.
    #[error("{} contains {what}, which does not belong to a simulated node: use an empty or new directory", path.display())]
    ForeignFile {
        /// The directory that was to become a node.
        path: PathBuf,
        /// The name of the file.
        what: String,
    },
    /// The directory does not contain a node.
    #[error("{} is not a simulated node: node.json is missing (partage sim env --dir creates a node)", path.display())]
    NotANode {
        /// The directory without a `node.json`.
        path: PathBuf,
    },
    /// The directory contains a node with another configuration than requested.
    #[error("{} is another node: {what}; use another directory, or remove it: partage sim rm {}", path.display(), path.display())]
    ConfigMismatch {
        /// The directory of the existing node.
        path: PathBuf,
        /// How the configurations differ.
        what: String,
    },
    /// The file `node.json` is invalid.
    #[error("{}: {error}", path.display())]
    Config {
        /// The path of `node.json`.
        path: PathBuf,
        /// The first problem that was found in it.
        #[source]
        error: ConfigError,
    },
    /// The directory contains another node than requested, or a damaged one, and processes use it.
    #[error("{} is {what}, and is in use: stop the processes that use it first", path.display())]
    InUse {
        /// The directory of the node in use.
        path: PathBuf,
        /// Why the node would have to be recreated.
        what: &'static str,
    },
    /// Neither the environment nor this library file names a node.
    #[error(
        "no simulated node is configured: {NODE_DIR_VARIABLE} is not set, and this library file contains no node directory; \
         set the variable (partage sim env prints it), or load the libraries in the lib directory of a node"
    )]
    NotConfigured,
}

fn failed(path: &Path, what: &'static str) -> impl FnOnce(io::Error) -> NodeError {
    let path = path.to_path_buf();
    move |error| NodeError::Io { path, what, error }
}

/// The directory of an existing node, and its configuration.
#[derive(Clone, Debug)]
pub struct NodeDir {
    path: PathBuf,
    config: NodeConfig,
}

impl NodeDir {
    /// Creates a node, or opens an existing one with the same configuration.
    pub fn create(dir: &Path, config: &NodeConfig) -> Result<NodeDir, NodeError> {
        fs::create_dir_all(dir).map_err(failed(dir, "cannot create the directory"))?;
        if let Some(node) = NodeDir::existing(dir)? {
            return node.ensure_matches(config);
        }
        // Fails for a directory of another user, before any file is created in it.
        let lock = DirectoryLock::take(dir)?;
        if let Some(node) = NodeDir::existing(dir)? {
            return node.ensure_matches(config);
        }
        ensure_only_node_files(dir)?;
        set_mode(dir, 0o755)?;
        for (folder, bits) in [(LIBRARY_DIR, 0o755), (SHARED_DIR, 0o1777)] {
            let folder = dir.join(folder);
            match fs::create_dir(&folder) {
                Err(error) if error.kind() != ErrorKind::AlreadyExists => {
                    return Err(failed(&folder, "cannot create the directory")(error));
                }
                _ => set_mode(&folder, bits)?,
            }
        }
        create_device_files(&dir.join(DEVICE_DIR), config)?;
        // An interrupted creation may have left an incomplete one.
        remove_file_if_exists(&dir.join(STATE_FILE))?;
        crate::state::create(dir, &config.initial_state())?;
        write_config(dir, config)?;
        drop(lock);
        Ok(NodeDir { path: absolute(dir)?, config: config.clone() })
    }

    /// Opens a node, creating it if it does not exist. A node with another configuration or a damaged state is
    /// recreated, unless it is in use.
    pub fn open_or_recreate(dir: &Path, config: &NodeConfig, in_use: bool) -> Result<NodeDir, NodeError> {
        let in_use = |what| if in_use { Err(NodeError::InUse { path: dir.into(), what }) } else { Ok(()) };
        match NodeDir::open(dir) {
            Ok(node)
                if node.config() == config && crate::state::SimNodeState::attach(node.path()).is_ok() =>
            {
                return Ok(node);
            }
            Ok(node) if node.config() == config => in_use("damaged")?,
            Ok(_) => in_use("a simulated node with other GPUs")?,
            Err(_) => return NodeDir::create(dir, config),
        }
        NodeDir::remove(dir)?;
        NodeDir::create(dir, config)
    }

    /// Creates a node in a new directory: in `/dev/shm` if possible, otherwise in the directory for temporary files.
    pub fn create_temporary(config: &NodeConfig) -> Result<NodeDir, NodeError> {
        let memory = Path::new("/dev/shm");
        let user = rustix::process::getuid().as_raw();
        let mut first = None;
        for parent in [memory, &std::env::temp_dir()] {
            let dir = parent.join(format!("partage-sim-{user}-{:016x}", gpu_identity::random_u64()));
            match fs::create_dir(&dir) {
                Ok(()) => return NodeDir::create(&dir, config),
                Err(error) => first = first.or(Some(failed(&dir, "cannot create the directory")(error))),
            }
        }
        Err(first.unwrap_or(NodeError::NotConfigured))
    }

    /// Opens an existing node.
    pub fn open(dir: &Path) -> Result<NodeDir, NodeError> {
        NodeDir::existing(dir)?.ok_or_else(|| NodeError::NotANode { path: dir.to_path_buf() })
    }

    /// Opens the node that [`NODE_DIR_VARIABLE`] names. If it is not set, opens the node whose directory
    /// [`crate::install::write_libraries`] wrote into this library file.
    pub fn from_environment() -> Result<NodeDir, NodeError> {
        match std::env::var_os(NODE_DIR_VARIABLE).filter(|dir| !dir.is_empty()) {
            Some(dir) => NodeDir::open(Path::new(&dir)),
            None => NodeDir::open(crate::embedded_config::node_dir().ok_or(NodeError::NotConfigured)?),
        }
    }

    /// Removes a node and its directory. Programs that still run on it keep their open files and mappings.
    pub fn remove(dir: &Path) -> Result<(), NodeError> {
        // An incompletely created node may be removed, too: it has the node's files, but no node.json yet.
        if !dir.join(STATE_FILE).is_file() && !dir.join(CLIENTS_FILE).is_file() {
            NodeDir::open(dir)?;
        }
        let lock = DirectoryLock::take(dir)?;
        ensure_only_node_files(dir)?;
        // The file that marks the directory as a node is removed last, so that a failed removal can be retried.
        remove_file_if_exists(&dir.join(STATE_FILE))?;
        for folder in [LIBRARY_DIR, DEVICE_DIR, SHARED_DIR] {
            remove_dir_if_exists(&dir.join(folder))?;
        }
        for file in [CLIENTS_FILE, PIDS_FILE, CONFIG_TEMP_FILE, LOCK_FILE, CONFIG_FILE] {
            remove_file_if_exists(&dir.join(file))?;
        }
        drop(lock);
        match fs::remove_dir(dir) {
            // A mount point is removed by the process that unmounts it.
            Err(error) if error.kind() != ErrorKind::ResourceBusy => {
                Err(failed(dir, "cannot remove the directory")(error))
            }
            _ => Ok(()),
        }
    }

    /// Reads the node in a directory; `None` if there is none.
    fn existing(dir: &Path) -> Result<Option<NodeDir>, NodeError> {
        let file = dir.join(CONFIG_FILE);
        let text = match fs::read_to_string(&file) {
            Ok(text) => text,
            Err(error) if error.kind() == ErrorKind::NotFound => return Ok(None),
            Err(error) => return Err(failed(&file, "cannot read the file")(error)),
        };
        let config = NodeConfig::from_json(&text).map_err(|error| NodeError::Config { path: file, error })?;
        Ok(Some(NodeDir { path: absolute(dir)?, config }))
    }

    /// Returns the node if it has this configuration.
    fn ensure_matches(self, config: &NodeConfig) -> Result<NodeDir, NodeError> {
        match self.config.difference(config) {
            None => Ok(self),
            Some(what) => Err(NodeError::ConfigMismatch { path: self.path, what }),
        }
    }

    /// Returns the absolute path of the directory.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// Returns the configuration, which does not change after the node's creation.
    pub fn config(&self) -> &NodeConfig {
        &self.config
    }

    /// Returns the directory of the driver's libraries.
    pub fn libraries(&self) -> PathBuf {
        self.path.join(LIBRARY_DIR)
    }

    /// Returns the directory of the GPUs' device files.
    pub fn devices(&self) -> PathBuf {
        self.path.join(DEVICE_DIR)
    }

    /// Returns the indexes of the GPUs that this process may use: those whose device file it can open, as with a real
    /// driver.
    pub fn usable_gpus(&self) -> Vec<usize> {
        let devices = self.devices();
        let gpus = self.config.gpus.iter().enumerate();
        if matches!(devices.try_exists(), Ok(false)) {
            return gpus.map(|(index, _)| index).collect();
        }
        let opens = |gpu: &NodeGpu| File::open(devices.join(device_file_name(gpu))).is_ok();
        gpus.filter(|(_, gpu)| opens(gpu)).map(|(index, _)| index).collect()
    }

    /// Returns whether a GPU is in MIG mode now.
    pub fn is_mig_enabled(&self, state: &SimNodeState, gpu: usize) -> bool {
        state.mig(gpu).unwrap_or_else(|| self.config.gpus.get(gpu).is_some_and(|gpu| gpu.mig))
    }

    /// Returns the file with the memory that the node's processes share.
    pub fn state_file(&self) -> PathBuf {
        self.path.join(STATE_FILE)
    }

    /// Returns the directory of the memory that processes export to each other.
    pub fn shared_dir(&self) -> PathBuf {
        self.path.join(SHARED_DIR)
    }
}

/// An exclusive lock on a node's directory, held while it is created or removed. The kernel releases it when the
/// process exits.
struct DirectoryLock(#[expect(dead_code, reason = "closing the file releases the lock")] File);

impl DirectoryLock {
    fn take(dir: &Path) -> Result<DirectoryLock, NodeError> {
        let path = dir.join(LOCK_FILE);
        // Checked first: no file is created in a directory that is not a node's.
        ensure_only_node_files(dir)?;
        let file = File::options().write(true).create(true).truncate(false).open(&path);
        let file = file.map_err(failed(&path, "cannot create the file"))?;
        rustix::fs::flock(&file, FlockOperation::LockExclusive)
            .map_err(|error| failed(&path, "cannot lock the file")(error.into()))?;
        Ok(DirectoryLock(file))
    }
}

/// Refuses a directory that contains other files than those of a node.
fn ensure_only_node_files(dir: &Path) -> Result<(), NodeError> {
    let ours = [
        CONFIG_FILE,
        STATE_FILE,
        CLIENTS_FILE,
        PIDS_FILE,
        SHARED_DIR,
        LIBRARY_DIR,
        DEVICE_DIR,
        LOCK_FILE,
        CONFIG_TEMP_FILE,
    ];
    let entries = fs::read_dir(dir).and_then(|entries| entries.collect::<io::Result<Vec<_>>>());
    let entries = entries.map_err(failed(dir, "cannot read the directory"))?;
    let names = entries.iter().map(fs::DirEntry::file_name);
    // Directory entries are unordered; the minimum makes the message deterministic.
    match names.filter(|name| !ours.iter().any(|ours| name == ours)).min() {
        Some(name) => {
            Err(NodeError::ForeignFile { path: dir.into(), what: name.to_string_lossy().into_owned() })
        }
        None => Ok(()),
    }
}

/// Sets a mode independently of the umask.
fn set_mode(path: &Path, bits: u32) -> Result<(), NodeError> {
    rustix::fs::chmod(path, Mode::from_raw_mode(bits))
        .map_err(|error| failed(path, "cannot set the mode")(error.into()))
}

/// Returns the name of a GPU's device file.
fn device_file_name(gpu: &NodeGpu) -> String {
    format!("nvidia{}", gpu.minor)
}

/// Creates the device files. They are empty: only the permission to open them has a meaning.
fn create_device_files(folder: &Path, config: &NodeConfig) -> Result<(), NodeError> {
    // An interrupted creation may have left those of another configuration.
    remove_dir_if_exists(folder)?;
    fs::create_dir(folder).map_err(failed(folder, "cannot create the directory"))?;
    set_mode(folder, 0o755)?;
    for gpu in &config.gpus {
        let file = folder.join(device_file_name(gpu));
        File::create(&file).map_err(failed(&file, "cannot create the file"))?;
        set_mode(&file, 0o444)?;
    }
    Ok(())
}

fn remove_dir_if_exists(folder: &Path) -> Result<(), NodeError> {
    match fs::remove_dir_all(folder) {
        Err(error) if error.kind() != ErrorKind::NotFound => {
            Err(failed(folder, "cannot remove the directory")(error))
        }
        _ => Ok(()),
    }
}

fn remove_file_if_exists(file: &Path) -> Result<(), NodeError> {
    match fs::remove_file(file) {
        Err(error) if error.kind() != ErrorKind::NotFound => {
            Err(failed(file, "cannot remove the file")(error))
        }
        _ => Ok(()),
    }
}

/// Writes `node.json` atomically and durably. Everything else must be written before.
fn write_config(dir: &Path, config: &NodeConfig) -> Result<(), NodeError> {
    let (unfinished, file) = (dir.join(CONFIG_TEMP_FILE), dir.join(CONFIG_FILE));
    let text = config.to_json().map_err(|error| NodeError::Config { path: file.clone(), error })?;
    let write = || {
        let mut open = File::create(&unfinished)?;
        open.write_all(text.as_bytes())?;
        rustix::fs::fchmod(&open, Mode::from_raw_mode(0o644))?;
        open.sync_all()?;
        fs::rename(&unfinished, &file)?;
        File::open(dir)?.sync_all()
    };
    write().map_err(failed(&file, "cannot write the file"))
}

/// Makes a path absolute: programs may change their working directory.
fn absolute(dir: &Path) -> Result<PathBuf, NodeError> {
    fs::canonicalize(dir).map_err(failed(dir, "cannot resolve the path"))
}

/// Derives a seed from a directory's path, so that a node that is created there again has the same identity.
pub fn seed_for_dir(dir: &Path) -> u64 {
    use std::os::unix::ffi::OsStrExt;
    let dir =
        fs::canonicalize(dir).or_else(|_| std::path::absolute(dir)).unwrap_or_else(|_| dir.to_path_buf());
    // FNV-1a: short, and stable across builds.
    dir.as_os_str()
        .as_bytes()
        .iter()
        .fold(0xcbf2_9ce4_8422_2325, |hash, &byte| (hash ^ u64::from(byte)).wrapping_mul(0x0100_0000_01b3))
}

/// Returns a random seed.
pub fn random_seed() -> u64 {
    // 53 bits: JSON readers of other languages decode numbers as doubles.
    gpu_identity::random_u64() >> 11
}

#[cfg(test)]
mod tests;
