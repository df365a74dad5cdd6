//! Installs libraries that other programs map, one directory per build.
//!
//! A library that a program has mapped must never be written to, and replacing it would mix two builds in one container. So
//! every build has a directory of its own, named after all that decides its contents ([`build_name`]). An upgrade installs
//! beside the old directory, which is removed when no container uses it any more. A directory appears whole: a crash at any
//! step leaves the old ones, or the old ones and the new one.

use crate::cgroup::tables;
use crate::files::{names, sync_folder};
use crate::members::pids;
use sha2::{Digest, Sha256};
use std::collections::BTreeSet;
use std::ffi::OsStr;
use std::fs::{self, Permissions};
use std::io::{self, ErrorKind};
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};

/// The end of the name of a directory that is being written. It begins with a dot.
const UNFINISHED: &str = ".unfinished";

/// Why libraries cannot be installed.
#[derive(Debug, thiserror::Error)]
#[error("cannot {action} {}: {error}", path.display())]
pub struct LibraryStoreError {
    /// What was attempted.
    pub action: &'static str,
    /// The directory.
    pub path: PathBuf,
    /// The system's answer.
    pub error: io::Error,
}

fn failed(action: &'static str, path: &Path) -> impl FnOnce(io::Error) -> LibraryStoreError {
    let path = path.to_path_buf();
    move |error| LibraryStoreError { action, path, error }
}

/// Names the directory of a build: the driver's version, and a hash of the shared object and of everything else that
/// decides what is installed.
#[must_use]
pub fn build_name(driver_version: &str, object: &[u8], settings: &str) -> String {
    let mut hash = Sha256::new();
    hash.update(object);
    hash.update(settings);
    let digest: String = hash.finalize().iter().take(8).map(|byte| format!("{byte:02x}")).collect();
    format!("{driver_version}-{digest}")
}

/// A directory with one directory per build. One process at a time writes to it.
#[derive(Clone, Debug)]
pub struct LibraryStore {
    root: PathBuf,
}

impl LibraryStore {
    /// Opens the store, creating its directory, and removes what a killed writer left unfinished.
    pub fn open(root: &Path) -> Result<LibraryStore, LibraryStoreError> {
        fs::create_dir_all(root).map_err(failed("create", root))?;
        let store = LibraryStore { root: root.into() };
        for name in names(root).map_err(failed("read", root))? {
            if is_unfinished(&name) {
                let path = root.join(name);
                fs::remove_dir_all(&path).map_err(failed("remove", &path))?;
            }
        }
        Ok(store)
    }

    /// Returns the directory of a build, which `write` fills if there is none yet. Links and files in it must be durable
    /// when `write` returns; their directories are made so here.
    pub fn install<E: From<LibraryStoreError>>(
        &self,
        name: &str,
        write: impl FnOnce(&Path) -> Result<(), E>,
    ) -> Result<PathBuf, E> {
        let folder = self.root.join(name);
        if folder.is_dir() {
            return Ok(folder);
        }
        let unfinished = self.root.join(format!(".{name}{UNFINISHED}"));
        fs::create_dir_all(&unfinished).map_err(failed("create", &unfinished))?;
        // Whatever the umask: other users' programs load what lies here.
        fs::set_permissions(&unfinished, Permissions::from_mode(0o755))
            .map_err(failed("open", &unfinished))?;
        write(&unfinished)?;
        sync_folder(&unfinished).map_err(failed("persist", &unfinished))?;
        fs::rename(&unfinished, &folder).map_err(failed("create", &folder))?;
        sync_folder(&self.root).map_err(failed("persist", &self.root))?;
        Ok(folder)
    }

    /// Lists what earlier builds left that is not used: not `current`, not what `is_used` tells of, and not mounted in any
    /// mount namespace of this machine.
    pub fn unused(&self, current: &Path, is_used: impl Fn(&Path) -> bool) -> io::Result<Vec<PathBuf>> {
        let mut earlier: Vec<PathBuf> = names(&self.root)?
            .into_iter()
            .filter(|name| !is_unfinished(name))
            .map(|name| self.root.join(name))
            .filter(|path| path != current && !is_used(path))
            .collect();
        // Looking at all processes costs more than all of the above, and mostly there is nothing to remove.
        if !earlier.is_empty() {
            let mounted = mounted_names()?;
            earlier.retain(|path| path.file_name().is_some_and(|name| !mounted.contains(name)));
        }
        earlier.sort();
        Ok(earlier)
    }

    /// Removes what [`LibraryStore::unused`] lists. What cannot be removed is tried again the next time.
    pub fn remove_unused(&self, current: &Path, is_used: impl Fn(&Path) -> bool) -> io::Result<()> {
        for path in self.unused(current, is_used)? {
            let removed = if path.is_dir() { fs::remove_dir_all(&path) } else { fs::remove_file(&path) };
            match removed {
                Err(error) if error.kind() != ErrorKind::NotFound => return Err(error),
                _ => {}
            }
        }
        Ok(())
    }
}

fn is_unfinished(name: &OsStr) -> bool {
    name.to_str().is_some_and(|name| name.starts_with('.') && name.ends_with(UNFINISHED))
}

/// All names on the paths of what is mounted, in every mount namespace that has a process. The kernel writes a path as its
/// file system has it, which may begin anywhere on the way: so names are compared, and those of builds are unique.
fn mounted_names() -> io::Result<BTreeSet<std::ffi::OsString>> {
    let (mut namespaces, mut found) = (BTreeSet::new(), BTreeSet::new());
    for pid in pids()? {
        // A process that ended meanwhile has nothing mounted.
        let Ok(namespace) = fs::read_link(format!("/proc/{pid}/ns/mnt")) else { continue };
        if !namespaces.insert(namespace) {
            continue;
        }
        let Ok(table) = fs::read(format!("/proc/{pid}/mountinfo")) else { continue };
        for mount in tables::mounts(&table) {
            found.extend(mount.root.iter().map(OsStr::to_os_string));
        }
    }
    Ok(found)
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::os::unix::process::CommandExt;
    use std::process::{Command, Stdio};

    fn install(store: &LibraryStore, name: &str, contents: &str) -> PathBuf {
        let write =
            |folder: &Path| fs::write(folder.join("libcuda.so.1"), contents).map_err(failed("write", folder));
        store.install::<LibraryStoreError>(name, write).unwrap()
    }

    #[test]
    fn build_name_depends_on_object_driver_and_settings() {
        let name = build_name("550.1", b"object", "/region");
        assert!(name.starts_with("550.1-") && name.len() == "550.1-".len() + 16, "{name}");
        assert_eq!(name, build_name("550.1", b"object", "/region"));
        for other in [build_name("551", b"object", "/region"), build_name("550.1", b"other", "/region")] {
            assert_ne!(name, other);
        }
        assert_ne!(name, build_name("550.1", b"object", "/elsewhere"));
    }

    #[test]
    fn upgrade_installs_beside_a_mapped_library() {
        let folder = tempfile::tempdir().unwrap();
        let store = LibraryStore::open(folder.path()).unwrap();
        let first = install(&store, "a", "first");
        let mapped = fs::File::open(first.join("libcuda.so.1")).unwrap();
        assert_eq!(install(&store, "a", "not written again"), first);
        let second = install(&store, "b", "second");
        assert_ne!(first, second);
        assert_eq!(io::read_to_string(mapped).unwrap(), "first");
        assert!(store.unused(&second, |path| path == first).unwrap().is_empty());
        store.remove_unused(&second, |_| false).unwrap();
        assert_eq!(names(folder.path()).unwrap(), ["b"]);
    }

    #[test]
    fn interrupted_install_leaves_nothing_that_is_taken_for_whole() {
        let folder = tempfile::tempdir().unwrap();
        let store = LibraryStore::open(folder.path()).unwrap();
        let stop = |part: &Path| {
            fs::write(part.join("libcuda.so.1"), "half").unwrap();
            Err(failed("write", part)(io::Error::other("killed here")))
        };
        store.install::<LibraryStoreError>("a", stop).unwrap_err();
        assert!(!folder.path().join("a").exists());
        // The next one finds what the killed one left, and begins anew.
        let store = LibraryStore::open(folder.path()).unwrap();
        assert_eq!(names(folder.path()).unwrap(), [""; 0]);
        let whole = install(&store, "a", "whole");
        assert_eq!(fs::read_to_string(whole.join("libcuda.so.1")).unwrap(), "whole");
    }

    /// A container that runs has the file mounted, and no file names it: a CDI file may have been written again since.
    #[test]
    fn mounted_library_is_in_use() {
        let folder = tempfile::tempdir().unwrap();
        let store = LibraryStore::open(folder.path()).unwrap();
        let name = build_name("550.1", folder.path().to_str().unwrap().as_bytes(), "");
        let (old, current) = (install(&store, &name, "old"), install(&store, "current", "new"));
        let at = folder.path().join("current/libcuda.so.1");
        let text = format!(
            "mount --bind {}/libcuda.so.1 {} && echo mounted && read line",
            old.display(),
            at.display()
        );
        let mut command = Command::new("unshare");
        command.args(["--mount", "--propagation", "private", "/bin/sh", "-c", &text]);
        command.stdin(Stdio::piped()).stdout(Stdio::piped()).process_group(0);
        let mut container = command.spawn().unwrap();
        let mut said = [0; 8];
        if io::Read::read_exact(container.stdout.as_mut().unwrap(), &mut said).is_err() {
            container.wait().unwrap();
            eprintln!("skipped: mount namespaces are not possible here");
            return;
        }
        assert_eq!(&said, b"mounted\n");
        assert!(store.unused(&current, |_| false).unwrap().is_empty());
        drop(container.stdin.take());
        container.wait().unwrap();
        assert_eq!(store.unused(&current, |_| false).unwrap(), [old]);
    }
}
