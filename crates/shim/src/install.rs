//! Writes the stand-ins: files that replace a driver's libraries in a container.
//!
//! All are built from one shared object, `libpartage_shim.so`, which [`partage_elf_rewrite::library_files`] finds. A
//! stand-in exports only the names that the shim hooks, and depends on the driver's own library by its path: a program
//! that looks up another name gets it from there.
//!
//! ```text
//! libcuda.so -> libcuda.so.1 <- libcuda.so.550.163.01
//! libnvidia-ml.so -> libnvidia-ml.so.1 <- libnvidia-ml.so.550.163.01
//! ```

pub use partage_elf_rewrite::InstallError;

use crate::embedded_config::{self, LibraryRole, PATH_CAPACITY};
use partage_driver_api::exports::DriverLibraryKind;
use partage_elf_rewrite::library_files::{self, SharedObject};
use partage_elf_rewrite::{MarkerPatch, RewriteSpec};
use std::collections::BTreeMap;
use std::os::unix::ffi::OsStrExt;
use std::path::{Path, PathBuf};

/// File name of the shared object.
pub const SHARED_OBJECT: &str = "libpartage_shim.so";
/// Environment variable with the path of the shared object, for the program that installs. The shim itself reads no
/// environment variables.
pub const LIBRARY_VARIABLE: &str = "PARTAGE_SHIM_LIBRARY";

/// Prefix of hook symbols in the shared object.
const HOOK_SYMBOL_PREFIX: &str = "partage_hook_";

/// Paths and version that are written into the stand-ins. All paths are paths in the container, absolute and at most
/// 511 bytes long.
#[derive(Clone, Copy, Debug)]
pub struct StandInPaths<'a> {
    /// Directory of the container's region.
    pub region: &'a Path,
    /// Path of the driver's own `libcuda.so.1`; no stand-in may be at this path.
    pub real_cuda: &'a Path,
    /// Path of the driver's own `libnvidia-ml.so.1`.
    pub real_nvml: &'a Path,
    /// The driver's version, for file names with a version: programs may open `libcuda.so.550.163.01`.
    pub version: Option<&'a str>,
}

/// Returns the path of the shared object that belongs to the running program.
pub fn shared_object() -> Result<PathBuf, InstallError> {
    library_files::shared_object(SHARED_OBJECT, LIBRARY_VARIABLE)
}

/// Returns the path of the shared object for a program that installs it for other users: if root installs it, only root
/// may be able to write it.
pub fn trusted_object() -> Result<PathBuf, InstallError> {
    library_files::trusted_object(SHARED_OBJECT, LIBRARY_VARIABLE)
}

/// Writes the stand-ins and their usual symbolic links into a directory.
///
/// Each file is replaced by a rename: a process that loaded the old file keeps it, and a process that starts gets one
/// of the two.
pub fn write_stand_ins(
    shared_object: &Path,
    into: &Path,
    paths: &StandInPaths<'_>,
) -> Result<(), InstallError> {
    let object = SharedObject::read(shared_object)?;
    for role in LibraryRole::ALL {
        let bytes = build_stand_in(&object, role, paths)?;
        let name = soname(role);
        library_files::write(&into.join(name), &bytes)?;
        let Some(plain) = name.strip_suffix(".1") else { continue };
        library_files::write_link(name, &into.join(plain))?;
        if let Some(version) = paths.version {
            library_files::write_link(name, &into.join(format!("{plain}.{version}")))?;
        }
    }
    Ok(())
}

fn soname(role: LibraryRole) -> &'static str {
    match role {
        LibraryRole::Cuda => DriverLibraryKind::Cuda.soname(),
        LibraryRole::Nvml => DriverLibraryKind::Nvml.soname(),
    }
}

fn build_stand_in(
    object: &SharedObject,
    role: LibraryRole,
    paths: &StandInPaths<'_>,
) -> Result<Vec<u8>, InstallError> {
    let region = validate_path("the region's directory", paths.region)?;
    let real_cuda = validate_path("the driver's library", paths.real_cuda)?;
    let real_nvml = validate_path("the driver's library", paths.real_nvml)?;
    let symbols = object.exports()?;
    let bytes = embedded_config::encode(region.as_bytes(), real_cuda.as_bytes(), real_nvml.as_bytes(), role);
    object.rewrite(&RewriteSpec {
        soname: soname(role),
        exports: exports(role, &symbols),
        needed: Some(match role {
            LibraryRole::Cuda => real_cuda,
            LibraryRole::Nvml => real_nvml,
        }),
        patches: &[MarkerPatch { marker: embedded_config::get().marker(), bytes: &bytes }],
    })
}

/// Returns the names that a stand-in exports, each with its symbol: the hooks of the library that it replaces.
fn exports(role: LibraryRole, symbols: &[String]) -> BTreeMap<&str, &str> {
    let hooks =
        symbols.iter().filter_map(|symbol| Some((symbol.strip_prefix(HOOK_SYMBOL_PREFIX)?, symbol.as_str())));
    hooks
        .filter(|(name, _)| match role {
            LibraryRole::Cuda => name.starts_with("cu"),
            LibraryRole::Nvml => name.starts_with("nvml"),
        })
        .collect()
}

/// Validates a path: it must fit into its field, and the loader must take it literally.
fn validate_path<'a>(what: &'static str, path: &'a Path) -> Result<&'a str, InstallError> {
    let refused = |why| Err(InstallError::UnusablePath { what, path: path.to_path_buf(), why });
    let Some(text) = path.to_str() else { return refused("it is not valid UTF-8") };
    match text {
        _ if !path.is_absolute() => refused("it is not absolute"),
        _ if path.as_os_str().as_bytes().len() >= PATH_CAPACITY => refused("it is longer than 511 bytes"),
        // The loader would expand what follows.
        _ if text.contains('$') => refused("it contains a $"),
        _ if text.contains('\0') => refused("it contains a zero byte"),
        _ => Ok(text),
    }
}
