//! Builds the programs of the test bed: pinned, built once, and shared by all checkouts.
//!
//! Tests call [`Binaries::ready`], which never builds; `make binaries` builds. `docs/testbed.md` describes them.

mod build;
mod catalog;
mod check;
mod disk_space;
mod go;
mod store;

pub use crate::prerequisites::MissingPrerequisite;
pub use build::build;
pub use check::check;

use catalog::{BED_PROGRAMS, CHART_TOOLS, CONTAINERD_1_7_PROGRAMS, ProgramSet, ProgramSpec};
use go::GoToolchain;
use std::path::{Path, PathBuf};
use store::BinaryStore;

/// Environment variable that names a directory with existing programs.
pub const BIN_DIR_VARIABLE: &str = "PARTAGE_KUBE_BIN_DIR";

/// Where programs are, according to the environment.
#[derive(Clone, Debug, Default)]
pub struct BuildPaths {
    /// Directory with existing programs; if set, nothing is built.
    pub bin_dir: Option<PathBuf>,
    /// The user's cache directory.
    pub cache: Option<PathBuf>,
}

impl BuildPaths {
    /// Reads `PARTAGE_KUBE_BIN_DIR`, and `XDG_CACHE_HOME` or `HOME`.
    pub fn from_environment() -> Self {
        let folder = |name| std::env::var_os(name).filter(|value| !value.is_empty()).map(PathBuf::from);
        Self {
            bin_dir: folder(BIN_DIR_VARIABLE),
            cache: folder("XDG_CACHE_HOME").or_else(|| folder("HOME").map(|home| home.join(".cache"))),
        }
    }

    fn store(&self, go: &GoToolchain, set: &'static ProgramSet) -> Result<BinaryStore, MissingPrerequisite> {
        Ok(BinaryStore::new(self.cache.as_deref().ok_or(MissingPrerequisite::NoCacheDir)?, &go.version, set))
    }

    /// Returns the directory of a set if all its programs are there.
    fn find_dir(&self, set: &'static ProgramSet) -> Result<PathBuf, MissingPrerequisite> {
        if let Some(folder) = &self.bin_dir {
            let unusable = |program: &ProgramSpec| {
                let why = check::why_unusable(&folder.join(program.name))?;
                Some(format!("{} ({why})", program.name))
            };
            let absent: Vec<_> = set.programs.iter().filter_map(unusable).collect();
            return if absent.is_empty() {
                Ok(folder.clone())
            } else {
                Err(MissingPrerequisite::NotInBinDir { folder: folder.clone(), absent })
            };
        }
        let store = self.store(&GoToolchain::find()?, set)?;
        let manifest = store.manifest();
        let names = set.programs.iter().map(|program| program.name);
        let missing: Vec<_> = names.filter(|name| !store.has_program(&manifest, name)).collect();
        if missing.is_empty() {
            Ok(store.bin_dir())
        } else {
            Err(MissingPrerequisite::NotBuilt { missing, all: set.programs.len(), folder: store.bin_dir() })
        }
    }
}

/// A directory that holds every program of the test bed.
#[derive(Clone, Debug)]
pub struct Binaries {
    folder: PathBuf,
}

impl Binaries {
    /// Returns the programs if all are there. Builds nothing.
    pub fn ready() -> Result<Self, MissingPrerequisite> {
        Self::ready_in(&BuildPaths::from_environment())
    }

    /// Returns the programs if all are there, with explicit paths. Builds nothing.
    pub fn ready_in(settings: &BuildPaths) -> Result<Self, MissingPrerequisite> {
        Ok(Self { folder: settings.find_dir(&BED_PROGRAMS)? })
    }

    /// Returns the directory of the programs, CNI plugins included. It holds nothing else.
    pub fn folder(&self) -> &Path {
        &self.folder
    }

    /// Returns the path of a program by its name (`kubelet`).
    pub fn path(&self, program: &str) -> PathBuf {
        self.folder.join(program)
    }
}

/// Returns the paths of containerd 1.7 and of its shim, in this order. Builds nothing.
pub fn containerd_1_7(settings: &BuildPaths) -> Result<[PathBuf; 2], MissingPrerequisite> {
    let folder = settings.find_dir(&CONTAINERD_1_7_PROGRAMS)?;
    Ok(["containerd-1.7", "containerd-shim-runc-1.7"].map(|program| folder.join(program)))
}

/// Returns the path of helm, which renders the plain manifests from the chart. Builds nothing.
pub fn helm(settings: &BuildPaths) -> Result<PathBuf, MissingPrerequisite> {
    Ok(settings.find_dir(&CHART_TOOLS)?.join("helm"))
}
