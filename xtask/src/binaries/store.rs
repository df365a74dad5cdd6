//! The store of built programs: one directory per cache key, with a lock, a manifest, and a directory of finished
//! programs.

use super::MissingPrerequisite;
use super::catalog::{ProgramSet, ProgramSource};
use crate::progress::ProgressLines;
use crate::work_dir::{self, BuildLock};
use crate::{digest, host_info};
use serde::{Deserialize, Serialize};
use std::fs;
use std::io;
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};
use std::sync::atomic::AtomicBool;

/// The record of a finished program.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub(super) struct ProgramRecord {
    pub(super) name: String,
    /// The pinned version, or that of the Debian package.
    pub(super) version: String,
    pub(super) sha256: String,
    pub(super) size: u64,
}

/// The records of all finished programs: `manifest.json`.
#[derive(Debug, Default, Serialize, Deserialize)]
pub(super) struct BinaryManifest {
    pub(super) go: String,
    pub(super) arch: String,
    pub(super) programs: Vec<ProgramRecord>,
}

impl BinaryManifest {
    pub(super) fn entry(&self, name: &str) -> Option<&ProgramRecord> {
        self.programs.iter().find(|entry| entry.name == name)
    }
}

/// The directory of one cache key.
#[derive(Debug)]
pub(super) struct BinaryStore {
    root: PathBuf,
    go: String,
    set: &'static ProgramSet,
}

impl BinaryStore {
    pub(super) fn new(cache: &Path, go_version: &str, set: &'static ProgramSet) -> Self {
        Self {
            root: cache.join("partage/kube").join(cache_key(go_version, set)),
            go: go_version.to_string(),
            set,
        }
    }

    /// Returns the directory of finished programs, which holds nothing else.
    pub(super) fn bin_dir(&self) -> PathBuf {
        self.root.join("bin")
    }

    /// Returns the directory of unfinished programs and temporary files, which is removed after every run.
    pub(super) fn work_dir(&self) -> PathBuf {
        work_dir::path(&self.root)
    }

    /// Returns the records. Empty if the file cannot be read: then everything is built again.
    pub(super) fn manifest(&self) -> BinaryManifest {
        let text = fs::read(self.root.join("manifest.json")).unwrap_or_default();
        serde_json::from_slice(&text).unwrap_or_else(|_| BinaryManifest {
            go: self.go.clone(),
            arch: host_info::architecture().to_string(),
            programs: Vec::new(),
        })
    }

    /// Returns whether a program is recorded and has the right size. `--check` also verifies its checksum.
    pub(super) fn has_program(&self, manifest: &BinaryManifest, name: &str) -> bool {
        let size = fs::metadata(self.bin_dir().join(name)).map(|found| found.len());
        manifest.entry(name).is_some_and(|entry| size.is_ok_and(|size| size == entry.size))
    }

    /// Adds a finished program: it appears complete, and then in the manifest.
    pub(super) fn add_program(
        &self,
        unfinished: &Path,
        name: &str,
        version: &str,
    ) -> Result<ProgramRecord, MissingPrerequisite> {
        let failed = || MissingPrerequisite::io(format!("storing {name} in {}", self.bin_dir().display()));
        fs::set_permissions(unfinished, fs::Permissions::from_mode(0o755)).map_err(failed())?;
        let (sha256, size) = digest::of_file(unfinished).map_err(failed())?;
        let entry = ProgramRecord { name: name.to_string(), version: version.to_string(), sha256, size };
        fs::create_dir_all(self.bin_dir()).map_err(failed())?;
        fs::rename(unfinished, self.bin_dir().join(name)).map_err(failed())?;
        let mut manifest = self.manifest();
        manifest.programs.retain(|other| other.name != name);
        manifest.programs.push(entry.clone());
        let text = serde_json::to_string_pretty(&manifest).map_err(io::Error::other).map_err(failed())?;
        let half_manifest = self.work_dir().join("manifest.json");
        fs::write(&half_manifest, text + "\n").map_err(failed())?;
        fs::rename(half_manifest, self.root.join("manifest.json")).map_err(failed())?;
        Ok(entry)
    }

    /// Waits until no other run builds, then creates an empty work directory.
    pub(super) fn lock_for_build(
        &self,
        progress: &mut ProgressLines<'_>,
        stop: &AtomicBool,
    ) -> Result<BuildLock, MissingPrerequisite> {
        let started = BuildLock::acquire(&self.root, "these programs", progress, stop)?;
        started.ok_or_else(|| self.interrupted())
    }

    /// Returns the error for an interruption.
    pub(super) fn interrupted(&self) -> MissingPrerequisite {
        let manifest = self.manifest();
        let programs = self.set.programs;
        let done = programs.iter().filter(|program| self.has_program(&manifest, program.name)).count();
        MissingPrerequisite::Interrupted { done, all: programs.len(), what: "programs" }
    }
}

/// Returns a key over everything that determines what is built.
fn cache_key(go_version: &str, set: &ProgramSet) -> String {
    let mut parts = vec![go_version.to_string(), host_info::architecture().to_string()];
    for module in set.modules {
        parts.extend([module.name, module.go_mod, module.go_sum].map(str::to_string));
    }
    for program in set.programs {
        parts.push(program.name.to_string());
        match &program.source {
            ProgramSource::Go(source) => {
                parts.push(source.package.to_string());
                parts.extend(source.flags());
            }
            ProgramSource::Debian { package, .. } => parts.push((*package).to_string()),
        }
    }
    digest::key(parts)
}

#[cfg(test)]
mod tests {
    use super::super::catalog::{BED_PROGRAMS, CHART_TOOLS};
    use super::*;

    struct TempFolder(PathBuf);

    impl TempFolder {
        fn new(name: &str) -> Self {
            let path = std::env::temp_dir().join(format!("partage-store-{name}-{}", std::process::id()));
            fs::create_dir_all(&path).unwrap();
            Self(path)
        }
    }

    impl Drop for TempFolder {
        fn drop(&mut self) {
            fs::remove_dir_all(&self.0).unwrap();
        }
    }

    #[test]
    fn cache_key_depends_on_go_version_and_program_set() {
        assert_ne!(cache_key("go1.26.8", &BED_PROGRAMS), cache_key("go1.26.9", &BED_PROGRAMS));
        assert_ne!(cache_key("go1.26.8", &BED_PROGRAMS), cache_key("go1.26.8", &CHART_TOOLS));
        assert_eq!(cache_key("go1.26.8", &BED_PROGRAMS), cache_key("go1.26.8", &BED_PROGRAMS));
        assert_eq!(cache_key("go1.26.8", &BED_PROGRAMS).len(), 16);
    }

    #[test]
    fn program_counts_only_when_complete_and_recorded() {
        let folder = TempFolder::new("whole");
        let store = BinaryStore::new(&folder.0, "go1.26.8", &BED_PROGRAMS);
        let mut sink = io::sink();
        let building =
            store.lock_for_build(&mut ProgressLines::new(&mut sink), &AtomicBool::new(false)).unwrap();
        let unfinished = store.work_dir().join("etcd");
        fs::write(&unfinished, "abc").unwrap();
        assert!(!store.has_program(&store.manifest(), "etcd"));
        let entry = store.add_program(&unfinished, "etcd", "v3").unwrap();
        assert_eq!(entry.sha256, "ba7816bf8f01cfea414140de5dae2223b00361a396177a9cb410ff61f20015ad");
        assert_eq!((entry.size, entry.version.as_str()), (3, "v3"));
        assert!(store.has_program(&store.manifest(), "etcd"));
        assert!(!unfinished.exists());

        fs::write(store.bin_dir().join("etcd"), "ab").unwrap();
        assert!(!store.has_program(&store.manifest(), "etcd"), "truncated");
        fs::write(store.bin_dir().join("runc"), "abc").unwrap();
        assert!(!store.has_program(&store.manifest(), "runc"), "not recorded");

        drop(building);
        assert!(!store.work_dir().exists());
    }

    /// Sends everything that is written to a channel.
    struct ChannelWriter(std::sync::mpsc::Sender<String>);

    impl io::Write for ChannelWriter {
        fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
            self.0.send(String::from_utf8_lossy(bytes).into_owned()).map_err(io::Error::other)?;
            Ok(bytes.len())
        }

        fn flush(&mut self) -> io::Result<()> {
            Ok(())
        }
    }

    #[test]
    fn second_run_waits_for_the_first_and_reports_it() {
        let folder = TempFolder::new("wait");
        let store = BinaryStore::new(&folder.0, "go1.26.8", &BED_PROGRAMS);
        let stop = AtomicBool::new(false);
        let mut sink = io::sink();
        let first = store.lock_for_build(&mut ProgressLines::new(&mut sink), &stop).unwrap();
        fs::write(store.work_dir().join("half"), "").unwrap();
        std::thread::scope(|scope| {
            let (send, receive) = std::sync::mpsc::channel();
            let (store, stop) = (&store, &stop);
            let second = scope.spawn(move || {
                drop(store.lock_for_build(&mut ProgressLines::new(&mut ChannelWriter(send)), stop).unwrap());
            });
            // The message shows that the second run has found the lock taken.
            let mut message = String::new();
            while !message.ends_with('\n') {
                message += &receive.recv().unwrap();
            }
            assert!(store.work_dir().join("half").exists(), "the second run changes nothing while it waits");
            drop(first);
            second.join().unwrap();
            message.extend(receive.try_iter());
            assert_eq!(message, "waiting for another run that builds these programs\n");
        });
    }

    #[test]
    fn waiting_for_the_lock_can_be_interrupted() {
        let folder = TempFolder::new("stop");
        let store = BinaryStore::new(&folder.0, "go1.26.8", &BED_PROGRAMS);
        let mut sink = io::sink();
        let first =
            store.lock_for_build(&mut ProgressLines::new(&mut sink), &AtomicBool::new(false)).unwrap();
        let second = store.lock_for_build(&mut ProgressLines::new(&mut io::sink()), &AtomicBool::new(true));
        assert!(matches!(second, Err(MissingPrerequisite::Interrupted { done: 0, .. })));
        drop(first);
    }
}
