//! Writes the files that stand in for a driver's libraries in a container.
//!
//! All are made from one shared object, `libpartage_shim.so`; [`partage_elf_rewrite::files`] says where it is. A stand-in
//! exports the names that the shim hooks and nothing else, and needs the driver's own library by its path: a program that
//! asks for another name gets it from there.
//!
//! ```text
//! libcuda.so -> libcuda.so.1 <- libcuda.so.550.163.01
//! libnvidia-ml.so -> libnvidia-ml.so.1 <- libnvidia-ml.so.550.163.01
//! ```

pub use partage_elf_rewrite::InstallError;

use crate::embedded_config::{self, LibraryRole, PLACE};
use partage_driver_api::exports::Library;
use partage_elf_rewrite::files::{self, Found};
use partage_elf_rewrite::{Form, Patch};
use std::collections::BTreeMap;
use std::os::unix::ffi::OsStrExt;
use std::path::{Path, PathBuf};

/// The name of the shared object.
pub const SHARED_OBJECT: &str = "libpartage_shim.so";
/// The variable that tells the one who installs where it is, where it is somewhere else. The shim itself reads none.
pub const VARIABLE: &str = "PARTAGE_SHIM_LIBRARY";

/// How names of hooks start in the shared object.
const HOOK: &str = "partage_hook_";

/// What the files are to know. All paths are those of the container, absolute and at most 511 bytes long.
#[derive(Clone, Copy, Debug)]
pub struct Settings<'a> {
    /// The folder of the container's region.
    pub region: &'a Path,
    /// The driver's own `libcuda.so.1`: under this path no stand-in may lie.
    pub real_cuda: &'a Path,
    /// The driver's own `libnvidia-ml.so.1`.
    pub real_nvml: &'a Path,
    /// The driver's version, for the names with a version: programs may ask for `libcuda.so.550.163.01`.
    pub version: Option<&'a str>,
}

/// The shared object that belongs to the program that runs.
pub fn shared_object() -> Result<PathBuf, InstallError> {
    files::shared_object(SHARED_OBJECT, VARIABLE)
}

/// The same for who gives it to other users: where root asks, only root may be able to write it.
pub fn trusted_object() -> Result<PathBuf, InstallError> {
    files::trusted_object(SHARED_OBJECT, VARIABLE)
}

/// Writes the stand-ins and their usual links into a folder.
///
/// A file is replaced as a whole: a process that loaded the old one keeps it, one that starts gets either.
pub fn stand_in(shared_object: &Path, into: &Path, settings: &Settings<'_>) -> Result<(), InstallError> {
    let object = Found::read(shared_object)?;
    for role in LibraryRole::ALL {
        let bytes = made(&object, role, settings)?;
        let name = soname(role);
        files::write(&into.join(name), &bytes)?;
        let Some(plain) = name.strip_suffix(".1") else { continue };
        files::link(name, &into.join(plain))?;
        if let Some(version) = settings.version {
            files::link(name, &into.join(format!("{plain}.{version}")))?;
        }
    }
    Ok(())
}

fn soname(role: LibraryRole) -> &'static str {
    match role {
        LibraryRole::Cuda => Library::Cuda.soname(),
        LibraryRole::Nvml => Library::Nvml.soname(),
    }
}

fn made(object: &Found, role: LibraryRole, settings: &Settings<'_>) -> Result<Vec<u8>, InstallError> {
    let region = place("the region's folder", settings.region)?;
    let real_cuda = place("the driver's library", settings.real_cuda)?;
    let real_nvml = place("the driver's library", settings.real_nvml)?;
    let symbols = object.exports()?;
    let bytes = embedded_config::written(region.as_bytes(), real_cuda.as_bytes(), real_nvml.as_bytes(), role);
    object.formed(&Form {
        soname: soname(role),
        exports: exports(role, &symbols),
        needed: Some(match role {
            LibraryRole::Cuda => real_cuda,
            LibraryRole::Nvml => real_nvml,
        }),
        patches: &[Patch { marker: embedded_config::get().marker(), bytes: &bytes }],
    })
}

/// The names that a file exports, each with its symbol: the hooks of the library that it stands in for.
fn exports(role: LibraryRole, symbols: &[String]) -> BTreeMap<&str, &str> {
    let hooks = symbols.iter().filter_map(|symbol| Some((symbol.strip_prefix(HOOK)?, symbol.as_str())));
    hooks
        .filter(|(name, _)| match role {
            LibraryRole::Cuda => name.starts_with("cu"),
            LibraryRole::Nvml => name.starts_with("nvml"),
        })
        .collect()
}

/// A path that fits, and that a loader takes as it is.
fn place<'a>(what: &'static str, path: &'a Path) -> Result<&'a str, InstallError> {
    let refused = |why| Err(InstallError::Path { what, path: path.to_path_buf(), why });
    let Some(text) = path.to_str() else { return refused("it is no text") };
    match text {
        _ if !path.is_absolute() => refused("it does not start at the root"),
        _ if path.as_os_str().as_bytes().len() >= PLACE => refused("it is longer than 511 bytes"),
        // The loader would replace what follows.
        _ if text.contains('$') => refused("it has a $ in it"),
        _ if text.contains('\0') => refused("it has a zero byte in it"),
        _ => Ok(text),
    }
}
