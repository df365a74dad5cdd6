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

use go::Go;
use std::io::Write;
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

    fn store(&self, go: &Go) -> Result<Store, Missing> {
        Ok(Store::new(self.cache.as_deref().ok_or(Missing::NoCacheFolder)?, &go.version))
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
        if let Some(folder) = &settings.bin_dir {
            let absent: Vec<_> = catalog::PROGRAMS
                .iter()
                .filter_map(|program| report::unusable(&folder.join(program.name)).map(|why| (program, why)))
                .map(|(program, why)| format!("{} ({why})", program.name))
                .collect();
            return match absent.is_empty() {
                true => Ok(Self { folder: folder.clone() }),
                false => Err(Missing::NotInFolder { folder: folder.clone(), absent }),
            };
        }
        let store = settings.store(&Go::find()?)?;
        let manifest = store.manifest();
        let left: Vec<_> =
            catalog::PROGRAMS.iter().map(|p| p.name).filter(|name| !store.has(&manifest, name)).collect();
        match left.is_empty() {
            true => Ok(Self { folder: store.bin() }),
            false => Err(Missing::NotBuilt { left, all: catalog::PROGRAMS.len(), folder: store.bin() }),
        }
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

/// What a test does that cannot run here: on a person's machine it says so and passes; in CI (`CI` is set and not
/// `false`) it fails, because a check that nobody runs is no check.
///
/// `make test` counts the skips: they are noted in the file that `PARTAGE_SKIPPED` names.
///
/// ```no_run
/// use partage_testkit::binaries::{Binaries, skip_or_fail};
/// # fn test() {
/// let binaries = match Binaries::ready() {
///     Ok(binaries) => binaries,
///     Err(missing) => return skip_or_fail(&missing),
/// };
/// # }
/// ```
pub fn skip_or_fail(missing: &dyn std::fmt::Display) {
    let in_ci = std::env::var("CI").is_ok_and(|value| !value.is_empty() && value != "false");
    assert!(!in_ci, "a test cannot be skipped in CI: {missing}");
    let test = std::thread::current().name().unwrap_or("a test").to_string();
    // Past the capture of the test runner: a skip should be seen.
    let _ = writeln!(std::io::stderr(), "skipped: {test}: {missing}");
    if let Some(path) = std::env::var_os("PARTAGE_SKIPPED") {
        let file = std::fs::OpenOptions::new().create(true).append(true).open(path);
        let _ = file.and_then(|mut file| writeln!(file, "{test}: {missing}"));
    }
}
