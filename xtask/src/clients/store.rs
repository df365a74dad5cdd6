//! The store of clients: one directory per cache key, with a directory per client that is used once its record exists.

use super::MissingPrerequisite;
use super::catalog::ClientBundle;
use crate::binaries::BuildPaths;
use crate::progress::ProgressLines;
use crate::work_dir::{self, BuildLock};
use crate::{digest, host_info};
use serde::{Deserialize, Serialize};
use std::fs;
use std::io;
use std::path::{Path, PathBuf};
use std::sync::atomic::AtomicBool;

/// The record of a finished client: `client.json` in its directory.
#[derive(Debug, Serialize, Deserialize)]
pub(super) struct ClientRecord {
    /// The fetched version, usually the pinned one.
    pub(super) version: String,
    /// SHA-256 of the checksummed file.
    pub(super) sha256: String,
    pub(super) size: u64,
}

const RECORD_FILE: &str = "client.json";

/// The directory of one cache key.
#[derive(Clone, Debug)]
pub(super) struct ClientStore {
    root: PathBuf,
}

impl ClientStore {
    pub(super) fn new(settings: &BuildPaths) -> Result<Self, MissingPrerequisite> {
        let cache = settings.cache.as_deref().ok_or(MissingPrerequisite::NoCacheDir)?;
        Ok(Self { root: cache.join("partage/clients").join(cache_key()) })
    }

    pub(super) fn root(&self) -> &Path {
        &self.root
    }

    /// Returns the directory of unfinished clients and temporary files, which is removed after every run.
    pub(super) fn work_dir(&self) -> PathBuf {
        work_dir::path(&self.root)
    }

    pub(super) fn folder(&self, bundle: ClientBundle) -> PathBuf {
        self.root.join(bundle.name())
    }

    pub(super) fn program(&self, bundle: ClientBundle) -> PathBuf {
        self.folder(bundle).join(bundle.program())
    }

    pub(super) fn checksummed_file(&self, bundle: ClientBundle) -> PathBuf {
        self.folder(bundle).join(bundle.checksummed_file())
    }

    /// Returns the record if the program exists and has the right size. `--check` also verifies its checksum.
    pub(super) fn record(&self, bundle: ClientBundle) -> Option<ClientRecord> {
        let record: ClientRecord =
            serde_json::from_slice(&fs::read(self.folder(bundle).join(RECORD_FILE)).ok()?).ok()?;
        let whole = fs::metadata(self.checksummed_file(bundle)).ok()?.len() == record.size;
        (whole && self.program(bundle).exists()).then_some(record)
    }

    /// Returns the clients that are missing.
    pub(super) fn missing(&self) -> Vec<ClientBundle> {
        ClientBundle::ALL.into_iter().filter(|bundle| self.record(*bundle).is_none()).collect()
    }

    /// Removes whatever is in the place of a client: something unfinished or old.
    pub(super) fn clear(&self, bundle: ClientBundle) -> Result<(), MissingPrerequisite> {
        let folder = self.folder(bundle);
        match fs::remove_dir_all(&folder) {
            Err(error) if error.kind() != io::ErrorKind::NotFound => {
                Err(MissingPrerequisite::io(format!("removing {}", folder.display()))(error))
            }
            _ => Ok(()),
        }
    }

    /// Moves a client from the work directory into place, atomically.
    pub(super) fn move_into_place(
        &self,
        unfinished: &Path,
        bundle: ClientBundle,
    ) -> Result<(), MissingPrerequisite> {
        self.clear(bundle)?;
        fs::rename(unfinished, self.folder(bundle)).map_err(store_error(bundle))
    }

    /// Records that a client is finished; `folder` is its current directory.
    pub(super) fn write_record(
        &self,
        folder: &Path,
        bundle: ClientBundle,
        version: &str,
    ) -> Result<(), MissingPrerequisite> {
        let (sha256, size) =
            digest::of_file(&folder.join(bundle.checksummed_file())).map_err(store_error(bundle))?;
        let record = ClientRecord { version: version.to_string(), sha256, size };
        let text =
            serde_json::to_string_pretty(&record).map_err(io::Error::other).map_err(store_error(bundle))?;
        let unfinished = self.work_dir().join(RECORD_FILE);
        fs::write(&unfinished, text + "\n").map_err(store_error(bundle))?;
        fs::rename(unfinished, folder.join(RECORD_FILE)).map_err(store_error(bundle))
    }

    /// Waits until no other run fetches, then creates an empty work directory.
    pub(super) fn lock_for_fetch(
        &self,
        progress: &mut ProgressLines<'_>,
        stop: &AtomicBool,
    ) -> Result<BuildLock, MissingPrerequisite> {
        let started = BuildLock::acquire(&self.root, "these clients", progress, stop)?;
        started.ok_or_else(|| self.interrupted())
    }

    /// Returns the error for an interruption.
    pub(super) fn interrupted(&self) -> MissingPrerequisite {
        let all = ClientBundle::ALL.len();
        MissingPrerequisite::Interrupted { done: all - self.missing().len(), all, what: "clients" }
    }
}

fn store_error(bundle: ClientBundle) -> impl FnOnce(io::Error) -> MissingPrerequisite {
    MissingPrerequisite::io(format!("storing {}", bundle.name()))
}

/// Returns a key over everything that determines what is fetched. Another release may have another Python.
fn cache_key() -> String {
    let mut parts = vec![host_info::release(), host_info::architecture().to_string()];
    parts.extend(ClientBundle::ALL.iter().flat_map(|bundle| bundle.cache_key_parts()).map(str::to_string));
    digest::key(parts)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn client_counts_only_when_complete_and_recorded() {
        let cache = std::env::temp_dir().join(format!("partage-clients-{}", std::process::id()));
        let store = ClientStore::new(&BuildPaths { bin_dir: None, cache: Some(cache.clone()) }).unwrap();
        let building =
            store.lock_for_fetch(&mut ProgressLines::new(&mut io::sink()), &AtomicBool::new(false)).unwrap();
        assert_eq!(store.missing().len(), ClientBundle::ALL.len());
        let unfinished = store.work_dir().join("half");
        fs::create_dir(&unfinished).unwrap();
        for file in [ClientBundle::Nvtop.program(), ClientBundle::Nvtop.checksummed_file()] {
            fs::write(unfinished.join(file), "abc").unwrap();
        }
        store.write_record(&unfinished, ClientBundle::Nvtop, "3").unwrap();
        assert!(store.record(ClientBundle::Nvtop).is_none(), "not moved into place yet");
        store.move_into_place(&unfinished, ClientBundle::Nvtop).unwrap();
        assert_eq!(store.record(ClientBundle::Nvtop).unwrap().version, "3");
        assert!(!store.missing().contains(&ClientBundle::Nvtop));
        fs::write(store.checksummed_file(ClientBundle::Nvtop), "ab").unwrap();
        assert!(store.record(ClientBundle::Nvtop).is_none(), "truncated");
        fs::write(store.checksummed_file(ClientBundle::Nvtop), "abc").unwrap();
        fs::remove_file(store.program(ClientBundle::Nvtop)).unwrap();
        assert!(store.record(ClientBundle::Nvtop).is_none(), "the program is missing");
        store.clear(ClientBundle::Nvtop).unwrap();
        store.clear(ClientBundle::Nvtop).unwrap();
        drop(building);
        fs::remove_dir_all(cache).unwrap();
    }
}
