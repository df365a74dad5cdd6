//! Locates a shared object, and installs the files that are rewritten from it.
//!
//! # The location of a shared object
//!
//! Cargo builds it together with all crates that depend on its crate, because it builds all crate types of a library
//! at once: `cargo build -p partage` and `cargo test` put it into `target/<profile>/deps`, and only `cargo build` of
//! the whole workspace or of its package puts a copy into `target/<profile>`. That copy may be older, so `deps` is
//! searched first. The file name is the same for every selection of packages, so cargo rebuilds the crate when the
//! selection changes; the last build is always complete and matches the program. The unit tests of its crate alone
//! (`cargo test -p partage-sim-driver --lib`) do not build it, nor does `cargo install`. In an installation it is in
//! `lib/partage` beside `bin`.

use crate::elf::{self, ElfError, RewriteSpec};
use std::fs::{self, File};
use std::io::{self, Write};
use std::os::unix::fs::{MetadataExt, PermissionsExt, symlink};
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicUsize, Ordering};

/// Why libraries cannot be installed.
#[derive(Debug, thiserror::Error)]
pub enum InstallError {
    /// The shared object does not exist in any of the searched locations.
    #[error(
        "{name}, from which the driver's libraries are created, was not found at {}; set {variable} to its path",
        join_paths(places)
    )]
    NotFound {
        /// The file name that was searched for.
        name: &'static str,
        /// The environment variable that overrides the location.
        variable: &'static str,
        /// The paths that were searched.
        places: Vec<PathBuf>,
    },
    /// The shared object cannot be rewritten.
    #[error("cannot create {library} from {}: {error}", path.display())]
    Rewrite {
        /// The path of the shared object.
        path: PathBuf,
        /// The library that was to be created.
        library: String,
        /// Why the rewrite was refused.
        #[source]
        error: ElfError,
    },
    /// A path cannot be embedded into a library.
    #[error("{what}, {}, cannot be embedded into a library: {why}", path.display())]
    UnusablePath {
        /// A description of the path.
        what: &'static str,
        /// The path that was to be embedded.
        path: PathBuf,
        /// The rule that the path violates, such as its maximum length.
        why: &'static str,
    },
    /// Users other than root can write the shared object, which root would install for all users.
    #[error(
        "{}: users other than root can write it, but the programs of every user would load it: install it as root with mode 0755", path.display()
    )]
    Untrusted {
        /// The path of the shared object.
        path: PathBuf,
    },
    /// A file operation failed.
    #[error("{}: {what}: {error}", path.display())]
    Io {
        /// The file or directory.
        path: PathBuf,
        /// The operation that failed.
        what: &'static str,
        /// The error of the operating system.
        #[source]
        error: io::Error,
    },
}

fn join_paths(places: &[PathBuf]) -> String {
    places.iter().map(|place| place.display().to_string()).collect::<Vec<_>>().join(", ")
}

fn failed(path: &Path, what: &'static str) -> impl FnOnce(io::Error) -> InstallError {
    let path = path.to_path_buf();
    move |error| InstallError::Io { path, what, error }
}

/// Locates the shared object that belongs to the running program, or the one that the environment variable names.
pub fn shared_object(name: &'static str, variable: &'static str) -> Result<PathBuf, InstallError> {
    let places = match std::env::var_os(variable) {
        Some(place) if !place.is_empty() => vec![PathBuf::from(place)],
        _ => {
            let program = std::env::current_exe()
                .map_err(failed(Path::new("/proc/self/exe"), "cannot read the file"))?;
            candidate_paths(name, program.parent().unwrap_or(Path::new("/")))
        }
    };
    match places.iter().find(|place| place.is_file()) {
        Some(place) => Ok(place.clone()),
        None => Err(InstallError::NotFound { name, variable, places }),
    }
}

/// Like [`shared_object`], for files that other users load. For root, only root may be able to write the file, because
/// the environment variable may name any file.
pub fn trusted_object(name: &'static str, variable: &'static str) -> Result<PathBuf, InstallError> {
    let own = fs::metadata("/proc/self").map_err(failed(Path::new("/proc/self"), "cannot read the file"))?;
    ensure_trusted(shared_object(name, variable)?, own.uid())
}

/// Returns the path if this user may install the shared object for other users.
fn ensure_trusted(object: PathBuf, user: u32) -> Result<PathBuf, InstallError> {
    let metadata = fs::metadata(&object).map_err(failed(&object, "cannot read the file"))?;
    if user != 0 || (metadata.uid() == 0 && metadata.mode() & 0o022 == 0) {
        Ok(object)
    } else {
        Err(InstallError::Untrusted { path: object })
    }
}

/// Returns the locations to search for a program in this directory.
fn candidate_paths(name: &str, folder: &Path) -> Vec<PathBuf> {
    let mut places = vec![folder.join("deps").join(name), folder.join(name)];
    if let Some(above) = folder.parent() {
        places.push(above.join("lib/partage").join(name));
    }
    places
}

/// A shared object in memory.
#[derive(Clone, Debug)]
pub struct SharedObject {
    path: PathBuf,
    bytes: Vec<u8>,
}

impl SharedObject {
    /// Reads a shared object from a file.
    pub fn read(path: &Path) -> Result<SharedObject, InstallError> {
        let bytes = fs::read(path).map_err(failed(path, "cannot read the file"))?;
        Ok(SharedObject { path: path.to_path_buf(), bytes })
    }

    /// Returns the exported names.
    pub fn exports(&self) -> Result<Vec<String>, InstallError> {
        elf::exports(&self.bytes).map_err(|error| self.rewrite_error("a driver library", error))
    }

    /// Returns the content of a library that is rewritten from this object.
    pub fn rewrite(&self, form: &RewriteSpec<'_>) -> Result<Vec<u8>, InstallError> {
        elf::rewrite(&self.bytes, form).map_err(|error| self.rewrite_error(form.soname, error))
    }

    fn rewrite_error(&self, library: &str, error: ElfError) -> InstallError {
        InstallError::Rewrite { path: self.path.clone(), library: library.to_string(), error }
    }
}

/// Returns a temporary path beside a file that no concurrent writer uses.
fn temporary_path(file: &Path) -> PathBuf {
    static NEXT_NUMBER: AtomicUsize = AtomicUsize::new(0);
    let mut name = file.as_os_str().to_owned();
    name.push(format!(".{}.{}", std::process::id(), NEXT_NUMBER.fetch_add(1, Ordering::Relaxed)));
    PathBuf::from(name)
}

/// Replaces a library atomically: a process that has loaded the old file keeps it, and a starting process gets one of
/// the two.
pub fn write(file: &Path, bytes: &[u8]) -> Result<(), InstallError> {
    let new = temporary_path(file);
    let done = || {
        let mut open = File::create(&new)?;
        open.write_all(bytes)?;
        open.set_permissions(fs::Permissions::from_mode(0o755))?;
        open.sync_all()?;
        fs::rename(&new, file)
    };
    done().map_err(|error| {
        // The first error is reported; a temporary file that cannot be removed is harmless.
        let _ = fs::remove_file(&new);
        failed(file, "cannot write the file")(error)
    })
}

/// Creates a symbolic link, replacing an existing file or link.
pub fn write_link(to: &str, file: &Path) -> Result<(), InstallError> {
    let new = temporary_path(file);
    let done = || {
        symlink(to, &new)?;
        fs::rename(&new, file)
    };
    done().map_err(|error| {
        let _ = fs::remove_file(&new);
        failed(file, "cannot write the file")(error)
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn root_installs_only_objects_writable_by_root() {
        let folder = tempfile::tempdir().unwrap();
        let object = folder.path().join("libpartage.so");
        fs::write(&object, "").unwrap();
        let is_roots = fs::metadata(&object).unwrap().uid() == 0;
        for (mode, alone) in [(0o755, true), (0o775, false), (0o757, false), (0o600, true)] {
            fs::set_permissions(&object, fs::Permissions::from_mode(mode)).unwrap();
            assert_eq!(ensure_trusted(object.clone(), 0).is_ok(), alone && is_roots, "{mode:o}");
            assert!(ensure_trusted(object.clone(), 1000).is_ok(), "{mode:o}");
        }
        fs::set_permissions(&object, fs::Permissions::from_mode(0o777)).unwrap();
        let error = ensure_trusted(object.clone(), 0).unwrap_err().to_string();
        assert!(
            error.starts_with(object.to_str().unwrap()) && error.contains("install it as root"),
            "{error}"
        );
        assert!(matches!(ensure_trusted(folder.path().join("nothing"), 0), Err(InstallError::Io { .. })));
    }
}
