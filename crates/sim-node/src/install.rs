//! Writes `libcuda.so.1` and `libnvidia-ml.so.1` of a driver version.
//!
//! Both are made from one shared object, `libpartage_sim.so`, which has the functions of both libraries in all
//! versions; [`partage_elf_rewrite::files`] says where it is. A file keeps the names that the real one exports; they lie as
//! NVIDIA's packages lay them:
//!
//! ```text
//! libcuda.so -> libcuda.so.1 -> libcuda.so.550.163.01
//! libnvidia-ml.so -> libnvidia-ml.so.1 -> libnvidia-ml.so.550.163.01
//! ```

pub use partage_elf_rewrite::InstallError;

use crate::embedded_config;
use partage_driver_api::exports::{self, DriverVersion, Library};
use partage_elf_rewrite::files::{self, Found};
use partage_elf_rewrite::{Form, Patch, elf};
use std::path::{Path, PathBuf};

/// The name of the shared object.
pub const SHARED_OBJECT: &str = "libpartage_sim.so";
/// The variable that says where it is, where it is somewhere else.
pub const VARIABLE: &str = "PARTAGE_SIM_LIBRARY";

/// The shared object that belongs to the program that runs.
pub fn shared_object() -> Result<PathBuf, InstallError> {
    files::shared_object(SHARED_OBJECT, VARIABLE)
}

/// The same for who gives it to other users: where root asks, only root may be able to write it.
pub fn trusted_object() -> Result<PathBuf, InstallError> {
    files::trusted_object(SHARED_OBJECT, VARIABLE)
}

/// What the shared object has before 512 zero bytes, and nowhere else: the place for the node's folder.
pub fn marker() -> &'static [u8] {
    embedded_config::marker()
}

/// Writes the two libraries of a driver and their usual links into a folder.
///
/// `node` is the node's folder, which must be there: a program that loads them without [`crate::node::VARIABLE`] uses that
/// one. Where the variable is set, it wins: a container has the folder elsewhere.
///
/// A file is replaced as a whole: a process that loaded the old one keeps it, one that starts gets either.
pub fn libraries(
    shared_object: &Path,
    into: &Path,
    driver: DriverVersion,
    node: &Path,
) -> Result<(), InstallError> {
    let place = place(node)?;
    let patches = [Patch { marker: marker(), bytes: &place }];
    let object = Found::read(shared_object)?;
    for library in Library::ALL {
        let soname = library.soname();
        let exports = elf::as_they_are(exports::exports(library, driver));
        let bytes = object.formed(&Form { exports, patches: &patches, ..Form::called(soname) })?;
        let plain = soname.strip_suffix(".1").unwrap_or(soname);
        let file = format!("{plain}.{}", driver.version());
        files::write(&into.join(&file), &bytes)?;
        files::link(&file, &into.join(soname))?;
        files::link(soname, &into.join(plain))?;
    }
    Ok(())
}

/// The node's folder, as it is written into the files.
fn place(node: &Path) -> Result<[u8; embedded_config::PLACE], InstallError> {
    let failed =
        |error| InstallError::Io { path: node.to_path_buf(), what: "the node cannot be found", error };
    let path = std::fs::canonicalize(node).map_err(failed)?;
    embedded_config::bytes(&path).ok_or(InstallError::Path {
        what: "the node's folder",
        path,
        why: "it is longer than 511 bytes",
    })
}
