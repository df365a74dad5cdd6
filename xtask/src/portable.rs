//! The shim as it runs in every image: built against the C library of 2012, with zig as the linker.
//!
//! Tests ask with [`Zig::ready`], which never fetches; `make shim` fetches, once, and builds.

pub use crate::missing::Missing;

use crate::binaries::Settings;
use crate::debian::Debian;
use crate::process::{End, last_words, run};
use crate::progress::{Progress, mebibytes};
use crate::python::Python;
use crate::space;
use crate::work::{self, Building};
use partage_elf_rewrite::files;
use partage_shim::install::SHARED_OBJECT;
use std::fs;
use std::io::{self, Write};
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::atomic::AtomicBool;

/// What pip installs.
const REQUIREMENTS: &str = include_str!("../portable-requirements.txt");
/// The folder of what it installed has its versions in its name; another version is another folder.
const KIT: &str = "cargo-zigbuild-0.24.0-zig-0.17.0";
/// The version of glibc that is asked for: of the oldest images that anybody still runs.
const GLIBC: &str = "2.17";
/// With what pip needs on the way, measured and rounded up.
const NEEDED_MIB: u64 = 1024;

/// zig and cargo-zigbuild.
#[derive(Clone, Debug)]
pub struct Zig {
    root: PathBuf,
}

impl Zig {
    /// The tools, where they are there. Looks, and fetches nothing.
    pub fn ready() -> Result<Self, Missing> {
        Self::ready_in(&Settings::from_environment())
    }

    /// The same, with the places given.
    pub fn ready_in(settings: &Settings) -> Result<Self, Missing> {
        let zig = Self::place(settings)?;
        match zig.program().is_file() && zig.builder().is_file() {
            true => Ok(zig),
            false => Err(Missing::NoZig { folder: zig.root }),
        }
    }

    fn place(settings: &Settings) -> Result<Self, Missing> {
        let cache = settings.cache.as_deref().ok_or(Missing::NoCacheFolder)?;
        Ok(Self { root: cache.join("partage/tools").join(KIT) })
    }

    /// Appears whole.
    fn kit(&self) -> PathBuf {
        self.root.join("kit")
    }

    fn program(&self) -> PathBuf {
        self.kit().join("zig/zig")
    }

    fn builder(&self) -> PathBuf {
        self.kit().join("cargo-zigbuild")
    }

    /// Builds the shim of this checkout, and says where it is. Where nothing changed, cargo sees that.
    pub fn shim(&self, stop: &AtomicBool) -> Result<PathBuf, Missing> {
        let folder = target().join("portable");
        let doing = || format!("building {SHARED_OBJECT} for glibc {GLIBC}");
        fs::create_dir_all(&folder).map_err(Missing::io(doing()))?;
        let architecture = format!("{}-unknown-linux-gnu", std::env::consts::ARCH);
        let mut cargo = self.cargo_zigbuild(&folder);
        cargo.args(["zigbuild", "--quiet", "--release", "--locked", "--package", "partage-shim", "--lib"]);
        cargo.arg("--target").arg(format!("{architecture}.{GLIBC}")).arg("--target-dir").arg(&folder);
        let log = folder.join(format!("build.{}.log", std::process::id()));
        let end = run(&mut cargo, &log, stop, None);
        // Its words are in the error.
        let _ = fs::remove_file(log);
        match end.map_err(Missing::io(doing()))? {
            End::Well(_) => {}
            End::Badly(said) => return Err(Missing::Failed { doing: doing(), said: last_words(&said) }),
            End::Interrupted | End::TooLate => return Err(interrupted()),
        }
        let built = folder.join(architecture).join("release").join(SHARED_OBJECT);
        let bytes = fs::read(&built).map_err(Missing::io(format!("reading {}", built.display())))?;
        let place = folder.join(SHARED_OBJECT);
        files::write(&place, &bytes).map_err(|error| Missing::io(doing())(io::Error::other(error)))?;
        Ok(place)
    }

    /// Everything that it keeps goes into the folder of what it builds.
    fn cargo_zigbuild(&self, folder: &Path) -> Command {
        let mut command = Command::new(self.builder());
        command.current_dir(workspace()).env("CARGO_ZIGBUILD_ZIG_PATH", self.program());
        command.env("CARGO_ZIGBUILD_CACHE_DIR", folder.join("zigbuild"));
        command
            .env("ZIG_GLOBAL_CACHE_DIR", folder.join("zig"))
            .env("ZIG_LOCAL_CACHE_DIR", folder.join("zig"));
        command
    }
}

/// Fetches the tools, where they are not there, and builds the shim; says where it is.
pub fn build(settings: &Settings, out: &mut dyn Write, stop: &AtomicBool) -> Result<PathBuf, Missing> {
    let mut progress = Progress::new(out);
    let zig = fetch(settings, &mut progress, stop)?;
    let what = format!("{SHARED_OBJECT} for glibc {GLIBC}");
    let size = |place: &PathBuf| mebibytes(fs::metadata(place).map_or(0, |file| file.len()));
    let place = progress.step(&what, || zig.shim(stop), size)?;
    progress.line(&format!("the shim for every image is {}", place.display()));
    Ok(place)
}

fn fetch(settings: &Settings, progress: &mut Progress<'_>, stop: &AtomicBool) -> Result<Zig, Missing> {
    if let Ok(zig) = Zig::ready_in(settings) {
        return Ok(zig);
    }
    let zig = Zig::place(settings)?;
    space::enough(&zig.root, NEEDED_MIB, "XDG_CACHE_HOME")?;
    let building = Building::begin(&zig.root, "these tools", progress, stop)?.ok_or_else(interrupted)?;
    // Another run may have fetched while we waited.
    if Zig::ready_in(settings).is_err() {
        progress.line(&format!("fetching what builds the shim into {}, once", zig.root.display()));
        progress.step("  zig and cargo-zigbuild from pip", || zig.make(stop), |()| String::new())?;
    }
    drop(building);
    Zig::ready_in(settings)
}

impl Zig {
    /// Of what pip installs, the two programs are kept: they need no Python.
    fn make(&self, stop: &AtomicBool) -> Result<(), Missing> {
        let work = work::folder(&self.root);
        let (environment, half) = (work.join("environment"), work.join("half"));
        let instead = "install Python with its venv module";
        let debian = Debian { work: work.clone(), stop, interrupted: &interrupted, instead, private: None };
        let python = Python { what: "zig and cargo-zigbuild", work, stop, interrupted: &interrupted };
        python.make(&python.find(&debian)?, &environment, REQUIREMENTS)?;
        let keeping = || Missing::io(format!("keeping {KIT}"));
        fs::create_dir(&half).map_err(keeping())?;
        fs::rename(environment.join("bin/cargo-zigbuild"), half.join("cargo-zigbuild")).map_err(keeping())?;
        let zig = installed(&environment.join("lib")).map_err(keeping())?;
        fs::rename(zig, half.join("zig")).map_err(keeping())?;
        let _ = fs::remove_dir_all(self.kit());
        fs::rename(half, self.kit()).map_err(keeping())
    }
}

/// The folder of zig; the one above it has the version of Python in its name.
fn installed(lib: &Path) -> io::Result<PathBuf> {
    for version in fs::read_dir(lib)? {
        let zig = version?.path().join("site-packages/ziglang");
        if zig.is_dir() {
            return Ok(zig);
        }
    }
    Err(io::Error::new(io::ErrorKind::NotFound, "pip installed no zig"))
}

fn interrupted() -> Missing {
    Missing::Interrupted { done: 0, all: 1, what: "shims" }
}

fn workspace() -> &'static Path {
    let here = Path::new(env!("CARGO_MANIFEST_DIR"));
    here.parent().unwrap_or(here)
}

/// Where cargo puts what it builds.
fn target() -> PathBuf {
    let set = std::env::var_os("CARGO_TARGET_DIR").filter(|value| !value.is_empty());
    workspace().join(set.map_or_else(|| PathBuf::from("target"), PathBuf::from))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_required_is_pinned_and_named() {
        let pinned: Vec<_> = REQUIREMENTS.lines().filter_map(|line| line.split_once("==")).collect();
        let versions: Vec<_> = pinned.iter().map(|(_, rest)| rest.trim_end_matches([' ', '\\'])).collect();
        assert_eq!(KIT, format!("cargo-zigbuild-{}-zig-{}", versions[0], versions[1]));
        assert_eq!(REQUIREMENTS.matches("--hash=sha256:").count(), 4, "two programs, two machines");
    }
}
