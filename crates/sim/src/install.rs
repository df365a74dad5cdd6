//! Writes `libcuda.so.1` and `libnvidia-ml.so.1` of a driver version.
//!
//! Both are made from one shared object, `libpartage_sim.so`, which has the functions of both libraries in all
//! versions. A file keeps the names that the real one exports ([`elf`]); they lie as NVIDIA's packages lay them:
//!
//! ```text
//! libcuda.so -> libcuda.so.1 -> libcuda.so.550.163.01
//! libnvidia-ml.so -> libnvidia-ml.so.1 -> libnvidia-ml.so.550.163.01
//! ```
//!
//! # Where the shared object is
//!
//! Cargo builds it with everything that uses this crate, because a library's kinds are built together: `cargo build
//! -p partage` and `cargo test` put it in `target/<profile>/deps`, and only `cargo build` of the whole workspace or
//! of this package also in `target/<profile>`. A copy there may be older, so `deps` is looked at first. It has the
//! same name for every choice of packages, so cargo builds this crate again when the choice changes; what it left
//! last is always whole and what the program was linked with. The unit tests of this crate alone (`cargo test -p
//! partage-sim --lib`) build none, nor does `cargo install`. Where Partage is installed, it lies in `lib/partage`
//! beside `bin`.

pub mod elf;

use elf::ElfError;
use partage_driver_api::exports::{self, DriverVersion, Library};
use std::collections::BTreeSet;
use std::fs::{self, File};
use std::io::{self, Write};
use std::os::unix::fs::{PermissionsExt, symlink};
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicUsize, Ordering};

/// The name of the shared object.
pub const SHARED_OBJECT: &str = "libpartage_sim.so";
/// The variable that says where it is, where it is somewhere else.
pub const VARIABLE: &str = "PARTAGE_SIM_LIBRARY";

/// Why the libraries cannot be written.
#[derive(Debug, thiserror::Error)]
pub enum InstallError {
    /// The shared object is nowhere.
    #[error("{SHARED_OBJECT} is not there, which the driver's libraries are made from: looked at {}; set {VARIABLE} to where it is", looked_at(.0))]
    NotFound(Vec<PathBuf>),
    /// The shared object cannot be used.
    #[error("{} cannot be made into {library}: {error}", path.display())]
    Object {
        /// The shared object.
        path: PathBuf,
        /// What it was to become.
        library: &'static str,
        /// Why not.
        #[source]
        error: ElfError,
    },
    /// Reading or writing failed.
    #[error("{}: {what}: {error}", path.display())]
    Io {
        /// Where.
        path: PathBuf,
        /// What was tried.
        what: &'static str,
        /// What the system said.
        #[source]
        error: io::Error,
    },
}

fn looked_at(places: &[PathBuf]) -> String {
    places.iter().map(|place| place.display().to_string()).collect::<Vec<_>>().join(", ")
}

fn failed(path: &Path, what: &'static str) -> impl FnOnce(io::Error) -> InstallError {
    let path = path.to_path_buf();
    move |error| InstallError::Io { path, what, error }
}

/// The shared object that belongs to the program that runs.
pub fn shared_object() -> Result<PathBuf, InstallError> {
    let places = match std::env::var_os(VARIABLE) {
        Some(place) if !place.is_empty() => vec![PathBuf::from(place)],
        _ => {
            let program =
                std::env::current_exe().map_err(failed(Path::new("/proc/self/exe"), "cannot be read"))?;
            places(program.parent().unwrap_or(Path::new("/")))
        }
    };
    match places.iter().find(|place| place.is_file()) {
        Some(place) => Ok(place.clone()),
        None => Err(InstallError::NotFound(places)),
    }
}

/// Where it may be for a program in this folder.
fn places(folder: &Path) -> Vec<PathBuf> {
    let mut places = vec![folder.join("deps").join(SHARED_OBJECT), folder.join(SHARED_OBJECT)];
    if let Some(above) = folder.parent() {
        places.push(above.join("lib/partage").join(SHARED_OBJECT));
    }
    places
}

/// Writes the two libraries of a driver and their usual links into a folder.
///
/// A file is replaced as a whole: a process that loaded the old one keeps it, one that starts gets either.
pub fn libraries(shared_object: &Path, into: &Path, driver: DriverVersion) -> Result<(), InstallError> {
    let object = fs::read(shared_object).map_err(failed(shared_object, "cannot be read"))?;
    for library in Library::ALL {
        let soname = library.soname();
        let wanted: BTreeSet<&str> = exports::exports(library, driver).collect();
        let bytes = elf::rewrite(&object, soname, &wanted).map_err(|error| InstallError::Object {
            path: shared_object.to_path_buf(),
            library: soname,
            error,
        })?;
        let plain = soname.strip_suffix(".1").unwrap_or(soname);
        let file = format!("{plain}.{}", driver.version());
        write(&into.join(&file), &bytes)?;
        link(&file, &into.join(soname))?;
        link(soname, &into.join(plain))?;
    }
    Ok(())
}

/// Names that two writers at once do not share.
fn unfinished(file: &Path) -> PathBuf {
    static WRITTEN: AtomicUsize = AtomicUsize::new(0);
    let mut name = file.as_os_str().to_owned();
    name.push(format!(".{}.{}", std::process::id(), WRITTEN.fetch_add(1, Ordering::Relaxed)));
    PathBuf::from(name)
}

fn write(file: &Path, bytes: &[u8]) -> Result<(), InstallError> {
    let new = unfinished(file);
    let done = || {
        let mut open = File::create(&new)?;
        open.write_all(bytes)?;
        open.set_permissions(fs::Permissions::from_mode(0o755))?;
        open.sync_all()?;
        fs::rename(&new, file)
    };
    done().map_err(|error| {
        // What is left over is of no use; that it stays is not what went wrong.
        let _ = fs::remove_file(&new);
        failed(file, "cannot be written")(error)
    })
}

fn link(to: &str, file: &Path) -> Result<(), InstallError> {
    let new = unfinished(file);
    let done = || {
        symlink(to, &new)?;
        fs::rename(&new, file)
    };
    done().map_err(|error| {
        let _ = fs::remove_file(&new);
        failed(file, "cannot be written")(error)
    })
}
