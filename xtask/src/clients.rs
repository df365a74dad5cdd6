//! Fetches third-party programs that use an NVIDIA driver: pinned, fetched once, and shared by all checkouts.
//!
//! Tests call [`Clients::ready`], which never fetches; `make binaries` fetches. `docs/testbed.md` describes them.

mod catalog;
mod check;
mod debian_archive;
mod fetch;
mod store;

pub use crate::prerequisites::MissingPrerequisite;
pub use check::check;
pub use fetch::fetch_all;

use crate::binaries::BuildPaths;
use catalog::ClientBundle;
use std::path::{Path, PathBuf};
use store::ClientStore;

/// A branch of the NVIDIA driver.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum DriverBranch {
    /// Branch 535, in Debian 12.
    R535,
    /// Branch 550, in Debian 13.
    R550,
}

/// A directory that holds every client.
///
/// ```no_run
/// use partage_xtask::clients::{DriverBranch, Clients};
/// # fn example() -> Result<(), partage_xtask::clients::MissingPrerequisite> {
/// let clients = Clients::ready()?;
/// let nvidia_smi = clients.nvidia_smi(DriverBranch::R550);
/// # Ok(())
/// # }
/// ```
#[derive(Clone, Debug)]
pub struct Clients {
    store: ClientStore,
}

impl Clients {
    /// Returns the clients if all are there. Fetches nothing.
    pub fn ready() -> Result<Self, MissingPrerequisite> {
        Self::ready_in(&BuildPaths::from_environment())
    }

    /// Returns the clients if all are there, with explicit paths. Fetches nothing.
    pub fn ready_in(settings: &BuildPaths) -> Result<Self, MissingPrerequisite> {
        let store = ClientStore::new(settings)?;
        let missing = store.missing();
        if missing.is_empty() {
            Ok(Self { store })
        } else {
            Err(MissingPrerequisite::NotFetched {
                missing: missing.iter().map(|bundle| bundle.name()).collect(),
                all: ClientBundle::ALL.len(),
                folder: store.root().to_path_buf(),
            })
        }
    }

    /// Returns the directory of all clients.
    pub fn folder(&self) -> &Path {
        self.store.root()
    }

    /// Returns `nvidia-smi` of a driver branch. It loads `libnvidia-ml.so.1` from `LD_LIBRARY_PATH`.
    pub fn nvidia_smi(&self, branch: DriverBranch) -> PathBuf {
        self.store.program(ClientBundle::NvidiaSmi(branch))
    }

    /// Returns `nvtop`, with its libraries. It loads `libnvidia-ml.so.1` from `LD_LIBRARY_PATH`, and requires a
    /// terminal.
    pub fn nvtop(&self) -> PathBuf {
        self.store.program(ClientBundle::Nvtop)
    }

    /// Returns a Python with nvidia-ml-py, gpustat, nvitop, cuda-python, numba (with its compiler) and numpy: run
    /// `python -m gpustat`, `python -m nvitop` or a script. The driver libraries come from `LD_LIBRARY_PATH`.
    pub fn python(&self) -> PathBuf {
        self.store.program(ClientBundle::Python)
    }
}
