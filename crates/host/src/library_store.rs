//! Installs libraries that other programs map, one directory per build.
//!
//! A library that a program has mapped must never be written to, and replacing it would mix two builds in one
//! container. So every build has a directory of its own, named after everything that determines its contents
//! ([`build_name`]). An upgrade installs beside the old directory, which is removed when no container uses it any more.
//! A directory appears atomically: a crash at any step leaves the old directories, or the old ones and the new one.

use crate::atomic_file::{list_names, sync_directory};
use crate::cgroup::proc_mounts;
use crate::share_processes::pids;
use sha2::{Digest, Sha256};
use std::collections::BTreeSet;
use std::ffi::OsStr;
use std::fs::{self, Permissions};
use std::io::{self, ErrorKind};
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};

/// The suffix of a directory that is being written. Its name starts with a dot.
const UNFINISHED_SUFFIX: &str = ".unfinished";

/// Why libraries cannot be installed.
#[derive(Debug, thiserror::Error)]
#[error("cannot {action} {}: {error}", path.display())]
pub struct LibraryStoreError {
    /// The action that was attempted.
    pub action: &'static str,
    /// The path of the directory.
    pub path: PathBuf,
    /// The error of the system.
    pub error: io::Error,
}

fn failed(action: &'static str, path: &Path) -> impl FnOnce(io::Error) -> LibraryStoreError {
    let path = path.to_path_buf();
    move |error| LibraryStoreError { action, path, error }
}

/// Returns the directory name of a build: the driver's version, and a hash of the shared object and of everything else
/// that determines what is installed.
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
    /// Opens the store, creates its directory if it is missing, and removes unfinished directories of a killed writer.
    pub fn open(root: &Path) -> Result<LibraryStore, LibraryStoreError> {
        fs::create_dir_all(root).map_err(failed("create", root))?;
        let store = LibraryStore { root: root.into() };
        for name in list_names(root).map_err(failed("read", root))? {
            if is_unfinished(&name) {
                let path = root.join(name);
                fs::remove_dir_all(&path).map_err(failed("remove", &path))?;
            }
        }
        Ok(store)
    }

    /// Returns the directory of a build, which `write` fills if it does not exist yet. Links and files in it must be
    /// durable when `write` returns; this function syncs the directories.
    pub fn install<E: From<LibraryStoreError>>(
        &self,
        name: &str,
        write: impl FnOnce(&Path) -> Result<(), E>,
    ) -> Result<PathBuf, E> {
        let folder = self.root.join(name);
        if folder.is_dir() {
            return Ok(folder);
        }
        let unfinished = self.root.join(format!(".{name}{UNFINISHED_SUFFIX}"));
        fs::create_dir_all(&unfinished).map_err(failed("create", &unfinished))?;
        // The umask does not apply: programs of other users load these files.
        fs::set_permissions(&unfinished, Permissions::from_mode(0o755))
            .map_err(failed("open", &unfinished))?;
        write(&unfinished)?;
        sync_directory(&unfinished).map_err(failed("persist", &unfinished))?;
        fs::rename(&unfinished, &folder).map_err(failed("create", &folder))?;
        sync_directory(&self.root).map_err(failed("persist", &self.root))?;
        Ok(folder)
    }

    /// Returns the directories of earlier builds that are not used: not `current`, not any for which `is_used` returns
    /// true, and not mounted in any mount namespace of this machine.
    pub fn unused(&self, current: &Path, is_used: impl Fn(&Path) -> bool) -> io::Result<Vec<PathBuf>> {
        let mut earlier: Vec<PathBuf> = list_names(&self.root)?
            .into_iter()
            .filter(|name| !is_unfinished(name))
            .map(|name| self.root.join(name))
            .filter(|path| path != current && !is_used(path))
            .collect();
        // Reading the mounts of all processes costs more than all of the above, and usually there is nothing to remove.
        if !earlier.is_empty() {
            let mounted = mounted_names()?;
            earlier.retain(|path| path.file_name().is_some_and(|name| !mounted.contains(name)));
        }
        earlier.sort();
        Ok(earlier)
    }

    /// Removes the directories that [`LibraryStore::unused`] returns. One that cannot be removed is retried the next
    /// time.
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
    name.to_str().is_some_and(|name| name.starts_with('.') && name.ends_with(UNFINISHED_SUFFIX))
}

/// Returns all names on the paths that are mounted, in every mount namespace that has a process. The kernel reports a
/// path relative to the root of its file system, so only names can be compared; those of builds are unique.
fn mounted_names() -> io::Result<BTreeSet<std::ffi::OsString>> {
    let (mut namespaces, mut found) = (BTreeSet::new(), BTreeSet::new());
    for pid in pids()? {
        // The process may have exited meanwhile.
        let Ok(namespace) = fs::read_link(format!("/proc/{pid}/ns/mnt")) else { continue };
        if !namespaces.insert(namespace) {
            continue;
        }
        let Ok(table) = fs::read(format!("/proc/{pid}/mountinfo")) else { continue };
        for mount in proc_mounts::parse_mountinfo(&table) {
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
        assert_eq!(list_names(folder.path()).unwrap(), ["b"]);
    }

    #[test]
    fn interrupted_install_leaves_no_complete_directory() {
        let folder = tempfile::tempdir().unwrap();
        let store = LibraryStore::open(folder.path()).unwrap();
        let stop = |part: &Path| {
            fs::write(part.join("libcuda.so.1"), "half").unwrap();
            Err(failed("write", part)(io::Error::other("killed here")))
        };
        store.install::<LibraryStoreError>("a", stop).unwrap_err();
        assert!(!folder.path().join("a").exists());
        // The next writer removes the unfinished directory and starts over.
        let store = LibraryStore::open(folder.path()).unwrap();
        assert_eq!(list_names(folder.path()).unwrap(), [""; 0]);
        let whole = install(&store, "a", "whole");
        assert_eq!(fs::read_to_string(whole.join("libcuda.so.1")).unwrap(), "whole");
    }

    /// A running container has the file mounted, although no CDI spec may name it any more.
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
        let mut output = [0; 8];
        if io::Read::read_exact(container.stdout.as_mut().unwrap(), &mut output).is_err() {
            container.wait().unwrap();
            eprintln!("skipped: mount namespaces are not possible here");
            return;
        }
        assert_eq!(&output, b"mounted\n");
        assert!(store.unused(&current, |_| false).unwrap().is_empty());
        drop(container.stdin.take());
        container.wait().unwrap();
        assert_eq!(store.unused(&current, |_| false).unwrap(), [old]);
    }
}
