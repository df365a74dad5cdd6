//! Builds the shim so that it runs in every image: against glibc 2.17 of 2012, with zig as the linker.
//!
//! Tests call [`ZigToolchain::ready`], which never fetches; `make shim` fetches the tools once, and builds.

pub use crate::prerequisites::MissingPrerequisite;

use crate::binaries::BuildPaths;
use crate::debian::DebianTools;
use crate::disk_space;
use crate::process::{ProcessEnd, last_lines, run};
use crate::progress::{ProgressLines, format_mebibytes};
use crate::python::PythonEnv;
use crate::work_dir::{self, BuildLock};
use partage_elf_rewrite::library_files;
use partage_shim::install::SHARED_OBJECT;
use std::fs;
use std::io::{self, Write};
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::atomic::AtomicBool;

/// The packages that pip installs.
const REQUIREMENTS: &str = include_str!("../portable-requirements.txt");
/// Directory name of the tools, with their versions: other versions get another directory.
const TOOLCHAIN_NAME: &str = "cargo-zigbuild-0.24.0-zig-0.17.0";
/// The glibc version to link against: that of the oldest supported images.
const GLIBC_VERSION: &str = "2.17";
/// Required disk space, pip's temporary files included, measured and rounded up.
const REQUIRED_MIB: u64 = 1024;

/// The installed zig and cargo-zigbuild.
#[derive(Clone, Debug)]
pub struct ZigToolchain {
    root: PathBuf,
}

impl ZigToolchain {
    /// Returns the tools if they are there. Fetches nothing.
    pub fn ready() -> Result<Self, MissingPrerequisite> {
        Self::ready_in(&BuildPaths::from_environment())
    }

    /// Returns the tools if they are there, with explicit paths. Fetches nothing.
    pub fn ready_in(settings: &BuildPaths) -> Result<Self, MissingPrerequisite> {
        let zig = Self::locate(settings)?;
        if zig.zig_program().is_file() && zig.cargo_zigbuild_program().is_file() {
            Ok(zig)
        } else {
            Err(MissingPrerequisite::NoZig { folder: zig.root })
        }
    }

    fn locate(settings: &BuildPaths) -> Result<Self, MissingPrerequisite> {
        let cache = settings.cache.as_deref().ok_or(MissingPrerequisite::NoCacheDir)?;
        Ok(Self { root: cache.join("partage/tools").join(TOOLCHAIN_NAME) })
    }

    /// Returns the directory of the tools, which appears atomically.
    fn toolchain_dir(&self) -> PathBuf {
        self.root.join("kit")
    }

    fn zig_program(&self) -> PathBuf {
        self.toolchain_dir().join("zig/zig")
    }

    fn cargo_zigbuild_program(&self) -> PathBuf {
        self.toolchain_dir().join("cargo-zigbuild")
    }

    /// Builds the shim of this checkout and returns its path. Cargo skips the build if nothing changed.
    pub fn shim(&self, stop: &AtomicBool) -> Result<PathBuf, MissingPrerequisite> {
        let folder = target_dir().join("portable");
        let doing = || format!("building {SHARED_OBJECT} for glibc {GLIBC_VERSION}");
        fs::create_dir_all(&folder).map_err(MissingPrerequisite::io(doing()))?;
        let architecture = format!("{}-unknown-linux-gnu", std::env::consts::ARCH);
        let mut cargo = self.cargo_zigbuild(&folder);
        cargo.args(["zigbuild", "--quiet", "--release", "--locked", "--package", "partage-shim", "--lib"]);
        cargo.arg("--target").arg(format!("{architecture}.{GLIBC_VERSION}")).arg("--target-dir").arg(&folder);
        // A file of its own for each build, removed on drop: tests of one process build at the same time.
        let log = tempfile::NamedTempFile::new_in(&folder).map_err(MissingPrerequisite::io(doing()))?;
        match run(&mut cargo, log.path(), stop, None).map_err(MissingPrerequisite::io(doing()))? {
            ProcessEnd::Succeeded(_) => {}
            ProcessEnd::Failed(message) => {
                return Err(MissingPrerequisite::Failed { doing: doing(), message: last_lines(&message) });
            }
            ProcessEnd::Interrupted | ProcessEnd::TimedOut => return Err(interrupted()),
        }
        let built = folder.join(architecture).join("release").join(SHARED_OBJECT);
        let bytes =
            fs::read(&built).map_err(MissingPrerequisite::io(format!("reading {}", built.display())))?;
        let place = folder.join(SHARED_OBJECT);
        library_files::write(&place, &bytes)
            .map_err(|error| MissingPrerequisite::io(doing())(io::Error::other(error)))?;
        Ok(place)
    }

    /// Returns a cargo-zigbuild command that keeps all its caches in the target directory.
    fn cargo_zigbuild(&self, folder: &Path) -> Command {
        let mut command = Command::new(self.cargo_zigbuild_program());
        command.current_dir(workspace_dir()).env("CARGO_ZIGBUILD_ZIG_PATH", self.zig_program());
        command.env("CARGO_ZIGBUILD_CACHE_DIR", folder.join("zigbuild"));
        command
            .env("ZIG_GLOBAL_CACHE_DIR", folder.join("zig"))
            .env("ZIG_LOCAL_CACHE_DIR", folder.join("zig"));
        command
    }
}

/// Fetches the tools if they are missing, builds the shim, and returns its path.
pub fn build(
    settings: &BuildPaths,
    out: &mut dyn Write,
    stop: &AtomicBool,
) -> Result<PathBuf, MissingPrerequisite> {
    let mut progress = ProgressLines::new(out);
    let zig = fetch(settings, &mut progress, stop)?;
    let what = format!("{SHARED_OBJECT} for glibc {GLIBC_VERSION}");
    let size = |place: &PathBuf| format_mebibytes(fs::metadata(place).map_or(0, |file| file.len()));
    let place = progress.step(&what, || zig.shim(stop), size)?;
    progress.line(&format!("the portable shim is {}", place.display()));
    Ok(place)
}

fn fetch(
    settings: &BuildPaths,
    progress: &mut ProgressLines<'_>,
    stop: &AtomicBool,
) -> Result<ZigToolchain, MissingPrerequisite> {
    if let Ok(zig) = ZigToolchain::ready_in(settings) {
        return Ok(zig);
    }
    let zig = ZigToolchain::locate(settings)?;
    disk_space::check_free(&zig.root, REQUIRED_MIB, "XDG_CACHE_HOME")?;
    let building = BuildLock::acquire(&zig.root, "these tools", progress, stop)?.ok_or_else(interrupted)?;
    // Another run may have fetched them while this one waited.
    if ZigToolchain::ready_in(settings).is_err() {
        progress.line(&format!("fetching the tools that build the shim into {}", zig.root.display()));
        progress.step("  zig and cargo-zigbuild from pip", || zig.install(stop), |()| String::new())?;
    }
    drop(building);
    ZigToolchain::ready_in(settings)
}

impl ZigToolchain {
    /// Installs with pip and keeps only the two programs, which need no Python.
    fn install(&self, stop: &AtomicBool) -> Result<(), MissingPrerequisite> {
        let work = work_dir::path(&self.root);
        let (environment, unfinished) = (work.join("environment"), work.join("half"));
        let alternative = "install Python with its venv module";
        let debian = DebianTools {
            work: work.clone(),
            stop,
            interrupted: &interrupted,
            alternative,
            private_config: None,
        };
        let python = PythonEnv { what: "zig and cargo-zigbuild", work, stop, interrupted: &interrupted };
        python.create(&python.find(&debian)?, &environment, REQUIREMENTS)?;
        let keeping = || MissingPrerequisite::io(format!("storing {TOOLCHAIN_NAME}"));
        fs::create_dir(&unfinished).map_err(keeping())?;
        fs::rename(environment.join("bin/cargo-zigbuild"), unfinished.join("cargo-zigbuild"))
            .map_err(keeping())?;
        let zig = find_installed_zig(&environment.join("lib")).map_err(keeping())?;
        fs::rename(zig, unfinished.join("zig")).map_err(keeping())?;
        let _ = fs::remove_dir_all(self.toolchain_dir());
        fs::rename(unfinished, self.toolchain_dir()).map_err(keeping())
    }
}

/// Returns the directory of zig; its parent has the version of Python in its name.
fn find_installed_zig(lib: &Path) -> io::Result<PathBuf> {
    for version in fs::read_dir(lib)? {
        let zig = version?.path().join("site-packages/ziglang");
        if zig.is_dir() {
            return Ok(zig);
        }
    }
    Err(io::Error::new(io::ErrorKind::NotFound, "pip installed no zig"))
}

fn interrupted() -> MissingPrerequisite {
    MissingPrerequisite::Interrupted { done: 0, all: 1, what: "shims" }
}

fn workspace_dir() -> &'static Path {
    let here = Path::new(env!("CARGO_MANIFEST_DIR"));
    here.parent().unwrap_or(here)
}

/// Returns cargo's target directory.
fn target_dir() -> PathBuf {
    let set = std::env::var_os("CARGO_TARGET_DIR").filter(|value| !value.is_empty());
    workspace_dir().join(set.map_or_else(|| PathBuf::from("target"), PathBuf::from))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn requirements_are_pinned_and_match_the_toolchain_name() {
        let pinned: Vec<_> = REQUIREMENTS.lines().filter_map(|line| line.split_once("==")).collect();
        let versions: Vec<_> = pinned.iter().map(|(_, rest)| rest.trim_end_matches([' ', '\\'])).collect();
        assert_eq!(TOOLCHAIN_NAME, format!("cargo-zigbuild-{}-zig-{}", versions[0], versions[1]));
        assert_eq!(REQUIREMENTS.matches("--hash=sha256:").count(), 4, "two programs, two machines");
    }
}
