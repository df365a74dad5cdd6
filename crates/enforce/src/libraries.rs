//! Installs the libraries that stand in for the driver's, one directory per build of the shim and version of the
//! driver.
//!
//! A front end decides what else is in the directory, and which paths are embedded in the libraries. Directories of
//! earlier builds stay for as long as a tenant uses them: see [`partage_host::library_store`].

use partage_host::atomic_file::{file_stamp, replace_durably};
use partage_host::library_store::{LibraryStore, LibraryStoreError, build_name};
use partage_shim::install::{self, InstallError};
use std::fs;
use std::io;
use std::path::{Path, PathBuf};

pub use partage_shim::install::StandInPaths;

/// Why the libraries cannot be installed.
#[derive(Debug, thiserror::Error)]
pub enum LibraryError {
    /// The shim's shared object is missing, not trusted, or cannot be rewritten.
    #[error(transparent)]
    Install(#[from] InstallError),
    /// A file or directory cannot be read or written.
    #[error(transparent)]
    Store(#[from] LibraryStoreError),
}

impl LibraryError {
    /// Adds the attempted action and the path to an error of the system.
    pub fn io(action: &'static str, path: &Path) -> impl FnOnce(io::Error) -> LibraryError {
        let path = path.to_path_buf();
        move |error| LibraryStoreError { action, path, error }.into()
    }
}

/// The stand-in libraries of one daemon.
#[derive(Clone, Debug)]
pub struct LibraryInstaller {
    directory: PathBuf,
    store: LibraryStore,
    /// The shim's shared object, which belongs to the program that runs.
    object: PathBuf,
}

/// The inputs of a build's directory, besides the shim.
#[derive(Clone, Copy, Debug)]
pub struct LibraryBuild<'a> {
    /// The version of the driver that the libraries stand in for.
    pub driver_version: &'a str,
    /// Everything else that determines the contents, as text: a different text is a different build.
    pub contents: &'a str,
    /// A file that records the build of the last start. With it the shared object is hashed only when it has changed:
    /// hashing takes longer than the rest of a start.
    pub stamp: Option<&'a Path>,
}

impl LibraryInstaller {
    /// Opens the directory of all builds, creating it if it is missing.
    pub fn open(directory: &Path) -> Result<LibraryInstaller, LibraryError> {
        let object = install::trusted_object()?;
        Ok(LibraryInstaller { directory: directory.into(), store: LibraryStore::open(directory)?, object })
    }

    /// Returns the directory of a build, which `write` fills unless an earlier start did. Another start sees the
    /// directory with everything in it, or not at all.
    pub fn install(
        &self,
        build: &LibraryBuild<'_>,
        write: impl FnOnce(&Path) -> Result<(), LibraryError>,
    ) -> Result<PathBuf, LibraryError> {
        let LibraryBuild { driver_version, contents, stamp } = build;
        let current = format!("{} {driver_version} {contents}", file_stamp(&self.object));
        let known = stamp.and_then(|stamp| fs::read_to_string(stamp).ok());
        let known = known.as_deref().and_then(|known| known.split_once('\n'));
        let known = known.filter(|(of, _)| *of == current).map(|(_, name)| name);
        let name = match known {
            Some(name) => name.to_string(),
            None => {
                let object = fs::read(&self.object).map_err(LibraryError::io("read", &self.object))?;
                build_name(driver_version, &object, contents)
            }
        };
        let directory = self.store.install(&name, write)?;
        if known.is_none()
            && let Some(stamp) = stamp
        {
            // Without the stamp the object is hashed again at the next start: a full disk must not keep a daemon from
            // starting.
            let _ = replace_durably(stamp, format!("{current}\n{name}").as_bytes(), 0o644);
        }
        Ok(directory)
    }

    /// Writes the stand-ins and the links to them into a directory that exists.
    pub fn write_stand_ins(&self, directory: &Path, paths: &StandInPaths<'_>) -> Result<(), LibraryError> {
        Ok(install::write_stand_ins(&self.object, directory, paths)?)
    }

    /// Returns the directories of earlier builds that no tenant uses: neither `current`, nor any for which `is_used`
    /// returns true, nor any that is mounted in a mount namespace of this machine.
    pub fn unused(&self, current: &Path, is_used: impl Fn(&Path) -> bool) -> io::Result<Vec<PathBuf>> {
        self.store.unused(current, is_used)
    }

    /// Removes all directories but `current` that are not mounted in any mount namespace of this machine.
    pub fn remove_unused(&self, current: &Path) -> Result<(), LibraryError> {
        let removed = self.store.remove_unused(current, |_| false);
        removed.map_err(LibraryError::io("clean up", &self.directory))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn installer(folder: &Path) -> LibraryInstaller {
        let object = folder.join("shim.so");
        fs::write(&object, "first").unwrap();
        let directory = folder.join("lib");
        LibraryInstaller { store: LibraryStore::open(&directory).unwrap(), directory, object }
    }

    fn install(installer: &LibraryInstaller, contents: &str, stamp: Option<&Path>) -> (PathBuf, bool) {
        let mut written = false;
        let build = LibraryBuild { driver_version: "550.1", contents, stamp };
        let directory = installer.install(&build, |directory| {
            written = true;
            fs::write(directory.join("libcuda.so.1"), contents).map_err(LibraryError::io("write", directory))
        });
        (directory.unwrap(), written)
    }

    #[test]
    fn build_is_written_once_and_again_for_other_contents() {
        let folder = tempfile::tempdir().unwrap();
        let (installer, stamp) = (installer(folder.path()), folder.path().join("stamp"));
        let (first, written) = install(&installer, "a", Some(&stamp));
        assert!(written && first.starts_with(folder.path().join("lib")));
        assert_eq!(install(&installer, "a", Some(&stamp)), (first.clone(), false));
        assert_eq!(install(&installer, "a", None), (first.clone(), false), "the stamp only saves the hash");
        let (second, written) = install(&installer, "b", Some(&stamp));
        assert!(written && second != first);
        installer.remove_unused(&second).unwrap();
        assert!(!first.exists() && second.exists());
    }

    #[test]
    fn damaged_or_outdated_stamp_is_ignored() {
        let folder = tempfile::tempdir().unwrap();
        let (installer, stamp) = (installer(folder.path()), folder.path().join("stamp"));
        let (first, _) = install(&installer, "a", Some(&stamp));
        let whole = fs::read_to_string(&stamp).unwrap();
        for damaged in ["", "\n", "no stamp\nelsewhere", &whole[1..]] {
            fs::write(&stamp, damaged).unwrap();
            assert_eq!(install(&installer, "a", Some(&stamp)), (first.clone(), false), "{damaged:?}");
        }
        fs::write(&installer.object, "another build").unwrap();
        let (second, written) = install(&installer, "a", Some(&stamp));
        assert!(written && second != first);
        // A stamp that cannot be written only slows the next start.
        let nowhere = folder.path().join("missing/stamp");
        assert_eq!(install(&installer, "a", Some(&nowhere)), (second, false));
    }
}
