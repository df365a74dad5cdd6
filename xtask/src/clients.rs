//! Programs nobody here wrote that talk to an NVIDIA driver: pinned, fetched once, shared by all checkouts.
//!
//! Tests ask with [`Clients::ready`], which never fetches; `make binaries` fetches. `docs/testbed.md` has the words.

mod archive;
mod build;
mod catalog;
mod report;
mod store;

pub use crate::missing::Missing;
pub use build::build;
pub use report::check;

use crate::binaries::Settings;
use catalog::Part;
use std::path::{Path, PathBuf};
use store::Store;

/// A branch of the NVIDIA driver.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Branch {
    /// 535, in Debian 12.
    R535,
    /// 550, in Debian 13.
    R550,
}

/// A folder that holds every client.
///
/// ```no_run
/// use partage_xtask::clients::{Branch, Clients};
/// # fn example() -> Result<(), partage_xtask::clients::Missing> {
/// let clients = Clients::ready()?;
/// let nvidia_smi = clients.nvidia_smi(Branch::R550);
/// # Ok(())
/// # }
/// ```
#[derive(Clone, Debug)]
pub struct Clients {
    store: Store,
}

impl Clients {
    /// The clients, where all are there. Looks, and fetches nothing.
    pub fn ready() -> Result<Self, Missing> {
        Self::ready_in(&Settings::from_environment())
    }

    /// The same, with the places given.
    pub fn ready_in(settings: &Settings) -> Result<Self, Missing> {
        let store = Store::new(settings)?;
        let left = store.left();
        match left.is_empty() {
            true => Ok(Self { store }),
            false => Err(Missing::NotFetched {
                left: left.iter().map(|part| part.name()).collect(),
                all: Part::ALL.len(),
                folder: store.root().to_path_buf(),
            }),
        }
    }

    /// The folder with all of them.
    pub fn folder(&self) -> &Path {
        self.store.root()
    }

    /// `nvidia-smi` of a driver branch. It loads `libnvidia-ml.so.1` from `LD_LIBRARY_PATH`.
    pub fn nvidia_smi(&self, branch: Branch) -> PathBuf {
        self.store.program(Part::NvidiaSmi(branch))
    }

    /// `nvtop`, with its libraries. It loads `libnvidia-ml.so.1` from `LD_LIBRARY_PATH`, and wants a terminal.
    pub fn nvtop(&self) -> PathBuf {
        self.store.program(Part::Nvtop)
    }

    /// A Python that has nvidia-ml-py, gpustat, nvitop, cuda-python, numba (with what it compiles with) and numpy: run
    /// `python -m gpustat`, `python -m nvitop` or a script. Their libraries come from `LD_LIBRARY_PATH`.
    pub fn python(&self) -> PathBuf {
        self.store.program(Part::Python)
    }
}
