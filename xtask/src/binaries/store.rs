//! Where programs are kept: one folder per key, with a lock, a manifest, and a folder of finished programs.

use super::Missing;
use super::catalog::{Set, Source};
use crate::progress::Progress;
use crate::work::{self, Building};
use crate::{digest, machine};
use serde::{Deserialize, Serialize};
use std::fs;
use std::io;
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};
use std::sync::atomic::AtomicBool;

/// A finished program.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub(super) struct Entry {
    pub(super) name: String,
    /// The pinned version, or the Debian package's.
    pub(super) version: String,
    pub(super) sha256: String,
    pub(super) size: u64,
}

/// What is finished: `manifest.json`.
#[derive(Debug, Default, Serialize, Deserialize)]
pub(super) struct Manifest {
    pub(super) go: String,
    pub(super) arch: String,
    pub(super) programs: Vec<Entry>,
}

impl Manifest {
    pub(super) fn entry(&self, name: &str) -> Option<&Entry> {
        self.programs.iter().find(|entry| entry.name == name)
    }
}

/// The folder of one key.
#[derive(Debug)]
pub(super) struct Store {
    root: PathBuf,
    go: String,
    set: &'static Set,
}

impl Store {
    pub(super) fn new(cache: &Path, go_version: &str, set: &'static Set) -> Self {
        Self { root: cache.join("partage/kube").join(key(go_version, set)), go: go_version.to_string(), set }
    }

    /// Finished programs and nothing else.
    pub(super) fn bin(&self) -> PathBuf {
        self.root.join("bin")
    }

    /// Half programs, and what building them needs. Gone after every run.
    pub(super) fn work(&self) -> PathBuf {
        work::folder(&self.root)
    }

    /// What is finished; nothing where the file cannot be read: then all is built again.
    pub(super) fn manifest(&self) -> Manifest {
        let text = fs::read(self.root.join("manifest.json")).unwrap_or_default();
        serde_json::from_slice(&text).unwrap_or_else(|_| Manifest {
            go: self.go.clone(),
            arch: machine::architecture().to_string(),
            programs: Vec::new(),
        })
    }

    /// Whether a program is there, whole by its size. Its checksum is looked at by `--check`.
    pub(super) fn has(&self, manifest: &Manifest, name: &str) -> bool {
        let size = fs::metadata(self.bin().join(name)).map(|found| found.len());
        manifest.entry(name).is_some_and(|entry| size.is_ok_and(|size| size == entry.size))
    }

    /// Takes a finished program in: it appears whole, and then in the manifest.
    pub(super) fn take_in(&self, half: &Path, name: &str, version: &str) -> Result<Entry, Missing> {
        let failed = || Missing::io(format!("keeping {name} in {}", self.bin().display()));
        fs::set_permissions(half, fs::Permissions::from_mode(0o755)).map_err(failed())?;
        let (sha256, size) = digest::of_file(half).map_err(failed())?;
        let entry = Entry { name: name.to_string(), version: version.to_string(), sha256, size };
        fs::create_dir_all(self.bin()).map_err(failed())?;
        fs::rename(half, self.bin().join(name)).map_err(failed())?;
        let mut manifest = self.manifest();
        manifest.programs.retain(|other| other.name != name);
        manifest.programs.push(entry.clone());
        let text = serde_json::to_string_pretty(&manifest).map_err(io::Error::other).map_err(failed())?;
        let half_manifest = self.work().join("manifest.json");
        fs::write(&half_manifest, text + "\n").map_err(failed())?;
        fs::rename(half_manifest, self.root.join("manifest.json")).map_err(failed())?;
        Ok(entry)
    }

    /// Waits until nobody else builds, then makes an empty work folder.
    pub(super) fn begin(&self, progress: &mut Progress<'_>, stop: &AtomicBool) -> Result<Building, Missing> {
        let begun = Building::begin(&self.root, "these programs", progress, stop)?;
        begun.ok_or_else(|| self.interrupted())
    }

    /// The words for Ctrl-C.
    pub(super) fn interrupted(&self) -> Missing {
        let manifest = self.manifest();
        let programs = self.set.programs;
        let done = programs.iter().filter(|program| self.has(&manifest, program.name)).count();
        Missing::Interrupted { done, all: programs.len(), what: "programs" }
    }
}

/// All that decides what is built: another answer is another folder.
fn key(go_version: &str, set: &Set) -> String {
    let mut parts = vec![go_version.to_string(), machine::architecture().to_string()];
    for module in set.modules {
        parts.extend([module.name, module.go_mod, module.go_sum].map(str::to_string));
    }
    for program in set.programs {
        parts.push(program.name.to_string());
        match &program.source {
            Source::Go(source) => {
                parts.push(source.package.to_string());
                parts.extend(source.flags());
            }
            Source::Debian { package, .. } => parts.push((*package).to_string()),
        }
    }
    digest::key(parts)
}

#[cfg(test)]
mod tests {
    use super::super::catalog::{BED, CHART};
    use super::*;

    struct Folder(PathBuf);

    impl Folder {
        fn new(name: &str) -> Self {
            let path = std::env::temp_dir().join(format!("partage-store-{name}-{}", std::process::id()));
            fs::create_dir_all(&path).unwrap();
            Self(path)
        }
    }

    impl Drop for Folder {
        fn drop(&mut self) {
            fs::remove_dir_all(&self.0).unwrap();
        }
    }

    #[test]
    fn another_go_is_another_folder() {
        assert_ne!(key("go1.26.8", &BED), key("go1.26.9", &BED));
        assert_ne!(key("go1.26.8", &BED), key("go1.26.8", &CHART));
        assert_eq!(key("go1.26.8", &BED), key("go1.26.8", &BED));
        assert_eq!(key("go1.26.8", &BED).len(), 16);
    }

    #[test]
    fn a_program_is_there_when_it_is_whole_and_recorded() {
        let folder = Folder::new("whole");
        let store = Store::new(&folder.0, "go1.26.8", &BED);
        let mut sink = io::sink();
        let building = store.begin(&mut Progress::new(&mut sink), &AtomicBool::new(false)).unwrap();
        let half = store.work().join("etcd");
        fs::write(&half, "abc").unwrap();
        assert!(!store.has(&store.manifest(), "etcd"));
        let entry = store.take_in(&half, "etcd", "v3").unwrap();
        assert_eq!(entry.sha256, "ba7816bf8f01cfea414140de5dae2223b00361a396177a9cb410ff61f20015ad");
        assert_eq!((entry.size, entry.version.as_str()), (3, "v3"));
        assert!(store.has(&store.manifest(), "etcd"));
        assert!(!half.exists());

        fs::write(store.bin().join("etcd"), "ab").unwrap();
        assert!(!store.has(&store.manifest(), "etcd"), "cut short");
        fs::write(store.bin().join("runc"), "abc").unwrap();
        assert!(!store.has(&store.manifest(), "runc"), "not recorded");

        drop(building);
        assert!(!store.work().exists());
    }

    /// Passes on what is written as it is written.
    struct Told(std::sync::mpsc::Sender<String>);

    impl io::Write for Told {
        fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
            self.0.send(String::from_utf8_lossy(bytes).into_owned()).map_err(io::Error::other)?;
            Ok(bytes.len())
        }

        fn flush(&mut self) -> io::Result<()> {
            Ok(())
        }
    }

    #[test]
    fn the_second_run_waits_and_says_so() {
        let folder = Folder::new("wait");
        let store = Store::new(&folder.0, "go1.26.8", &BED);
        let stop = AtomicBool::new(false);
        let mut sink = io::sink();
        let first = store.begin(&mut Progress::new(&mut sink), &stop).unwrap();
        fs::write(store.work().join("half"), "").unwrap();
        std::thread::scope(|scope| {
            let (told, hear) = std::sync::mpsc::channel();
            let (store, stop) = (&store, &stop);
            let second = scope.spawn(move || {
                drop(store.begin(&mut Progress::new(&mut Told(told)), stop).unwrap());
            });
            // It has found the lock taken once it says so.
            let mut said = String::new();
            while !said.ends_with('\n') {
                said += &hear.recv().unwrap();
            }
            assert!(store.work().join("half").exists(), "the second run touches nothing while it waits");
            drop(first);
            second.join().unwrap();
            said.extend(hear.try_iter());
            assert_eq!(said, "another run builds these programs; waiting for it\n");
        });
    }

    #[test]
    fn waiting_can_be_interrupted() {
        let folder = Folder::new("stop");
        let store = Store::new(&folder.0, "go1.26.8", &BED);
        let mut sink = io::sink();
        let first = store.begin(&mut Progress::new(&mut sink), &AtomicBool::new(false)).unwrap();
        let second = store.begin(&mut Progress::new(&mut io::sink()), &AtomicBool::new(true));
        assert!(matches!(second, Err(Missing::Interrupted { done: 0, .. })));
        drop(first);
    }
}
