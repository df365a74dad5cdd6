//! Writes `libcuda.so.1` and `libnvidia-ml.so.1` of a driver version.
//!
//! Both are made from one shared object, `libpartage_sim.so`, which has the functions of both libraries in all
//! versions; [`partage_standin::files`] says where it is. A file keeps the names that the real one exports; they lie as
//! NVIDIA's packages lay them:
//!
//! ```text
//! libcuda.so -> libcuda.so.1 -> libcuda.so.550.163.01
//! libnvidia-ml.so -> libnvidia-ml.so.1 -> libnvidia-ml.so.550.163.01
//! ```

pub use partage_standin::InstallError;

use partage_driver_api::exports::{self, DriverVersion, Library};
use partage_standin::files::{self, Found};
use partage_standin::{Form, elf};
use std::path::{Path, PathBuf};

/// The name of the shared object.
pub const SHARED_OBJECT: &str = "libpartage_sim.so";
/// The variable that says where it is, where it is somewhere else.
pub const VARIABLE: &str = "PARTAGE_SIM_LIBRARY";

/// The shared object that belongs to the program that runs.
pub fn shared_object() -> Result<PathBuf, InstallError> {
    files::shared_object(SHARED_OBJECT, VARIABLE)
}

/// Writes the two libraries of a driver and their usual links into a folder.
///
/// A file is replaced as a whole: a process that loaded the old one keeps it, one that starts gets either.
pub fn libraries(shared_object: &Path, into: &Path, driver: DriverVersion) -> Result<(), InstallError> {
    let object = Found::read(shared_object)?;
    for library in Library::ALL {
        let soname = library.soname();
        let exports = elf::as_they_are(exports::exports(library, driver));
        let bytes = object.formed(&Form { exports, ..Form::called(soname) })?;
        let plain = soname.strip_suffix(".1").unwrap_or(soname);
        let file = format!("{plain}.{}", driver.version());
        files::write(&into.join(&file), &bytes)?;
        files::link(&file, &into.join(soname))?;
        files::link(soname, &into.join(plain))?;
    }
    Ok(())
}
