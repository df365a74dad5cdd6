//! Finds a shared object, and puts the files made out of it in their places.
//!
//! # Where a shared object is
//!
//! Cargo builds it with everything that depends on its crate, because a library's kinds are built together: `cargo build
//! -p partage` and `cargo test` put it in `target/<profile>/deps`, and only `cargo build` of the whole workspace or
//! of its package also in `target/<profile>`. A copy there may be older, so `deps` is looked at first. It has the
//! same name for every choice of packages, so cargo builds its crate again when the choice changes; what it left
//! last is always whole and what the program was built with. The unit tests of its crate alone (`cargo test -p
//! partage-sim-driver --lib`) build none, nor does `cargo install`. Where Partage is installed, it lies in
//! `lib/partage` beside `bin`.

use crate::elf::{self, ElfError, Form};
use std::fs::{self, File};
use std::io::{self, Write};
use std::os::unix::fs::{MetadataExt, PermissionsExt, symlink};
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicUsize, Ordering};

/// Why files cannot be written.
#[derive(Debug, thiserror::Error)]
pub enum InstallError {
    /// The shared object is nowhere.
    #[error(
        "{name} is not there, which the driver's libraries are made from: looked at {}; set {variable} to where it is",
        looked_at(places)
    )]
    NotFound {
        /// Its name.
        name: &'static str,
        /// The variable that says where it is.
        variable: &'static str,
        /// Where it was looked for.
        places: Vec<PathBuf>,
    },
    /// The shared object cannot be used.
    #[error("{} cannot be made into {library}: {error}", path.display())]
    Object {
        /// The shared object.
        path: PathBuf,
        /// What it was to become.
        library: String,
        /// Why not.
        #[source]
        error: ElfError,
    },
    /// A path cannot be written into a library.
    #[error("{what}, {}, cannot be written into a library: {why}", path.display())]
    Path {
        /// Of what.
        what: &'static str,
        /// The path.
        path: PathBuf,
        /// Why not.
        why: &'static str,
    },
    /// The shared object is not root's alone, and root is to give it to everybody.
    #[error(
        "{}: others than root may write it, and every user's programs would load it: install it as root, mode 0755", path.display()
    )]
    Untrusted {
        /// The shared object.
        path: PathBuf,
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

/// The shared object that belongs to the program that runs, or the one that a variable names.
pub fn shared_object(name: &'static str, variable: &'static str) -> Result<PathBuf, InstallError> {
    let places = match std::env::var_os(variable) {
        Some(place) if !place.is_empty() => vec![PathBuf::from(place)],
        _ => {
            let program =
                std::env::current_exe().map_err(failed(Path::new("/proc/self/exe"), "cannot be read"))?;
            places(name, program.parent().unwrap_or(Path::new("/")))
        }
    };
    match places.iter().find(|place| place.is_file()) {
        Some(place) => Ok(place.clone()),
        None => Err(InstallError::NotFound { name, variable, places }),
    }
}

/// The same for who gives it to other users: where root asks, it must be root's, because a variable may name any.
pub fn trusted_object(name: &'static str, variable: &'static str) -> Result<PathBuf, InstallError> {
    let own = fs::metadata("/proc/self").map_err(failed(Path::new("/proc/self"), "cannot be read"))?;
    trusted(shared_object(name, variable)?, own.uid())
}

/// A shared object, if this user may give it to others.
fn trusted(object: PathBuf, user: u32) -> Result<PathBuf, InstallError> {
    let about = fs::metadata(&object).map_err(failed(&object, "cannot be read"))?;
    match user != 0 || (about.uid() == 0 && about.mode() & 0o022 == 0) {
        true => Ok(object),
        false => Err(InstallError::Untrusted { path: object }),
    }
}

/// Where it may be for a program in this folder.
fn places(name: &str, folder: &Path) -> Vec<PathBuf> {
    let mut places = vec![folder.join("deps").join(name), folder.join(name)];
    if let Some(above) = folder.parent() {
        places.push(above.join("lib/partage").join(name));
    }
    places
}

/// A shared object that was read.
#[derive(Clone, Debug)]
pub struct Found {
    path: PathBuf,
    bytes: Vec<u8>,
}

impl Found {
    /// Reads it.
    pub fn read(path: &Path) -> Result<Found, InstallError> {
        let bytes = fs::read(path).map_err(failed(path, "cannot be read"))?;
        Ok(Found { path: path.to_path_buf(), bytes })
    }

    /// The names it exports.
    pub fn exports(&self) -> Result<Vec<String>, InstallError> {
        elf::exports(&self.bytes).map_err(|error| self.useless("a driver's library", error))
    }

    /// The file that it becomes.
    pub fn formed(&self, form: &Form<'_>) -> Result<Vec<u8>, InstallError> {
        elf::rewrite(&self.bytes, form).map_err(|error| self.useless(form.soname, error))
    }

    fn useless(&self, library: &str, error: ElfError) -> InstallError {
        InstallError::Object { path: self.path.clone(), library: library.to_string(), error }
    }
}

/// Names that two writers at once do not share.
fn unfinished(file: &Path) -> PathBuf {
    static WRITTEN: AtomicUsize = AtomicUsize::new(0);
    let mut name = file.as_os_str().to_owned();
    name.push(format!(".{}.{}", std::process::id(), WRITTEN.fetch_add(1, Ordering::Relaxed)));
    PathBuf::from(name)
}

/// Writes a library, as a whole: a process that loaded the old one keeps it, one that starts gets either.
pub fn write(file: &Path, bytes: &[u8]) -> Result<(), InstallError> {
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

/// Makes a link, in the place of whatever file or link was there.
pub fn link(to: &str, file: &Path) -> Result<(), InstallError> {
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

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn root_gives_others_only_what_root_alone_can_write() {
        let folder = tempfile::tempdir().unwrap();
        let object = folder.path().join("libpartage.so");
        fs::write(&object, "").unwrap();
        let is_roots = fs::metadata(&object).unwrap().uid() == 0;
        for (mode, alone) in [(0o755, true), (0o775, false), (0o757, false), (0o600, true)] {
            fs::set_permissions(&object, fs::Permissions::from_mode(mode)).unwrap();
            assert_eq!(trusted(object.clone(), 0).is_ok(), alone && is_roots, "{mode:o}");
            assert!(trusted(object.clone(), 1000).is_ok(), "{mode:o}");
        }
        fs::set_permissions(&object, fs::Permissions::from_mode(0o777)).unwrap();
        let error = trusted(object.clone(), 0).unwrap_err().to_string();
        assert!(
            error.starts_with(object.to_str().unwrap()) && error.contains("install it as root"),
            "{error}"
        );
        assert!(matches!(trusted(folder.path().join("nothing"), 0), Err(InstallError::Io { .. })));
    }
}
