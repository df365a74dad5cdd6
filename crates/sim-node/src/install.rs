//! Installs `libcuda.so.1` and `libnvidia-ml.so.1` of a simulated driver version.
//!
//! Both are rewritten from one shared object, `libpartage_sim.so`, which has the functions of both libraries in all
//! versions; [`partage_elf_rewrite::library_files`] locates it. Each file exports exactly the names of the real one.
//! The files and links are named as in NVIDIA's packages:
//!
//! ```text
//! libcuda.so -> libcuda.so.1 -> libcuda.so.550.163.01
//! libnvidia-ml.so -> libnvidia-ml.so.1 -> libnvidia-ml.so.550.163.01
//! ```

pub use partage_elf_rewrite::InstallError;

use crate::embedded_config;
use partage_driver_api::exports::{self, DriverLibraryKind, DriverVersion};
use partage_elf_rewrite::library_files::{self, SharedObject};
use partage_elf_rewrite::{MarkerPatch, RewriteSpec, elf};
use std::path::{Path, PathBuf};

/// The file name of the shared object.
pub const SHARED_OBJECT: &str = "libpartage_sim.so";
/// The environment variable with the path of the shared object, if it is not in a standard location.
pub const LIBRARY_VARIABLE: &str = "PARTAGE_SIM_LIBRARY";

/// Locates the shared object that belongs to the running program.
pub fn shared_object() -> Result<PathBuf, InstallError> {
    library_files::shared_object(SHARED_OBJECT, LIBRARY_VARIABLE)
}

/// Like [`shared_object`], for libraries that other users load: for root, only root may be able to write the file.
pub fn trusted_object() -> Result<PathBuf, InstallError> {
    library_files::trusted_object(SHARED_OBJECT, LIBRARY_VARIABLE)
}

/// Returns the marker in the shared object that precedes the 512-byte field for the node's directory.
pub fn marker() -> &'static [u8] {
    embedded_config::marker()
}

/// Writes the two libraries of a driver and their links into a directory.
///
/// `node` is the node's directory, which must exist. Programs that load the libraries without
/// [`crate::node::NODE_DIR_VARIABLE`] use that node. The variable takes precedence, because a container may have
/// mounted the directory elsewhere.
///
/// Files are replaced atomically: a process that has loaded the old file keeps it, and a starting process gets one of
/// the two.
pub fn write_libraries(
    shared_object: &Path,
    into: &Path,
    driver: DriverVersion,
    node: &Path,
) -> Result<(), InstallError> {
    let path = embedded_path(node)?;
    let patches = [MarkerPatch { marker: marker(), bytes: &path }];
    let object = SharedObject::read(shared_object)?;
    for library in DriverLibraryKind::ALL {
        let soname = library.soname();
        let exports = elf::unrenamed(exports::exports(library, driver));
        let bytes = object.rewrite(&RewriteSpec {
            exports,
            patches: &patches,
            ..RewriteSpec::with_soname(soname)
        })?;
        let plain = soname.strip_suffix(".1").unwrap_or(soname);
        let file = format!("{plain}.{}", driver.version());
        library_files::write(&into.join(&file), &bytes)?;
        library_files::write_link(&file, &into.join(soname))?;
        library_files::write_link(soname, &into.join(plain))?;
    }
    Ok(())
}

/// Encodes the node's directory for the files.
fn embedded_path(node: &Path) -> Result<[u8; embedded_config::PATH_BYTES], InstallError> {
    let failed = |error| InstallError::Io {
        path: node.to_path_buf(),
        what: "cannot resolve the node's directory",
        error,
    };
    let path = std::fs::canonicalize(node).map_err(failed)?;
    embedded_config::encode_path(&path).ok_or(InstallError::UnusablePath {
        what: "the node's directory",
        path,
        why: "it is longer than 511 bytes",
    })
}
