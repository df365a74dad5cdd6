//! The programs of the test bed: pinned, built once, shared by all checkouts.
//!
//! Tests ask with [`Binaries::ready`], which never builds; `make binaries` builds. `docs/testbed.md` has the words.

mod build;
mod catalog;
mod go;
mod report;
mod space;
mod store;

pub use crate::missing::Missing;
pub use build::build;
pub use report::check;

use catalog::{BED, CHART, OLDER, Program, Set};
use go::Go;
use std::path::{Path, PathBuf};
use store::Store;

/// Names a folder with programs that exist already.
pub const BIN_DIR: &str = "PARTAGE_KUBE_BIN_DIR";

/// What the environment says about where programs are.
#[derive(Clone, Debug, Default)]
pub struct Settings {
    /// Use the programs in this folder, build nothing.
    pub bin_dir: Option<PathBuf>,
    /// The user's cache folder.
    pub cache: Option<PathBuf>,
}

impl Settings {
    /// From `PARTAGE_KUBE_BIN_DIR`, and `XDG_CACHE_HOME` or `HOME`.
    pub fn from_environment() -> Self {
        let folder = |name| std::env::var_os(name).filter(|value| !value.is_empty()).map(PathBuf::from);
        Self {
            bin_dir: folder(BIN_DIR),
            cache: folder("XDG_CACHE_HOME").or_else(|| folder("HOME").map(|home| home.join(".cache"))),
        }
    }

    fn store(&self, go: &Go, set: &'static Set) -> Result<Store, Missing> {
        Ok(Store::new(self.cache.as_deref().ok_or(Missing::NoCacheFolder)?, &go.version, set))
    }

    /// The folder of a set, where all of it is there.
    fn folder(&self, set: &'static Set) -> Result<PathBuf, Missing> {
        if let Some(folder) = &self.bin_dir {
            let unusable = |program: &Program| {
                let why = report::unusable(&folder.join(program.name))?;
                Some(format!("{} ({why})", program.name))
            };
            let absent: Vec<_> = set.programs.iter().filter_map(unusable).collect();
            return match absent.is_empty() {
                true => Ok(folder.clone()),
                false => Err(Missing::NotInFolder { folder: folder.clone(), absent }),
            };
        }
        let store = self.store(&Go::find()?, set)?;
        let manifest = store.manifest();
        let names = set.programs.iter().map(|program| program.name);
        let left: Vec<_> = names.filter(|name| !store.has(&manifest, name)).collect();
        match left.is_empty() {
            true => Ok(store.bin()),
            false => Err(Missing::NotBuilt { left, all: set.programs.len(), folder: store.bin() }),
        }
    }
}

/// A folder that holds every program of the test bed.
#[derive(Clone, Debug)]
pub struct Binaries {
    folder: PathBuf,
}

impl Binaries {
    /// The programs, where all are there. Looks, and builds nothing.
    pub fn ready() -> Result<Self, Missing> {
        Self::ready_in(&Settings::from_environment())
    }

    /// The same, with the places given.
    pub fn ready_in(settings: &Settings) -> Result<Self, Missing> {
        Ok(Self { folder: settings.folder(&BED)? })
    }

    /// The folder with the programs and nothing else; CNI plugins are among them.
    pub fn folder(&self) -> &Path {
        &self.folder
    }

    /// Where one program is, by its name (`kubelet`).
    pub fn path(&self, program: &str) -> PathBuf {
        self.folder.join(program)
    }
}

/// Where containerd 1.7 and its shim are, in this order. Looks, and builds nothing.
pub fn containerd_1_7(settings: &Settings) -> Result<[PathBuf; 2], Missing> {
    let folder = settings.folder(&OLDER)?;
    Ok(["containerd-1.7", "containerd-shim-runc-1.7"].map(|program| folder.join(program)))
}

/// Where helm is, which makes the plain manifests of the chart. Looks, and builds nothing.
pub fn helm(settings: &Settings) -> Result<PathBuf, Missing> {
    Ok(settings.folder(&CHART)?.join("helm"))
}
