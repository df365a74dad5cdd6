//! Where clients are kept: one folder per key, with a folder per client that is used once its record is there.

use super::Missing;
use super::catalog::Part;
use crate::binaries::Settings;
use crate::progress::Progress;
use crate::work::{self, Building};
use crate::{digest, machine};
use serde::{Deserialize, Serialize};
use std::fs;
use std::io;
use std::path::{Path, PathBuf};
use std::sync::atomic::AtomicBool;

/// What is known of a finished client: `client.json` in its folder.
#[derive(Debug, Serialize, Deserialize)]
pub(super) struct Record {
    /// The version that was fetched: usually the pinned one.
    pub(super) version: String,
    /// Of the sealed file.
    pub(super) sha256: String,
    pub(super) size: u64,
}

const RECORD: &str = "client.json";

/// The folder of one key.
#[derive(Clone, Debug)]
pub(super) struct Store {
    root: PathBuf,
}

impl Store {
    pub(super) fn new(settings: &Settings) -> Result<Self, Missing> {
        let cache = settings.cache.as_deref().ok_or(Missing::NoCacheFolder)?;
        Ok(Self { root: cache.join("partage/clients").join(key()) })
    }

    pub(super) fn root(&self) -> &Path {
        &self.root
    }

    /// Half clients, and what fetching them needs. Gone after every run.
    pub(super) fn work(&self) -> PathBuf {
        work::folder(&self.root)
    }

    pub(super) fn folder(&self, part: Part) -> PathBuf {
        self.root.join(part.name())
    }

    pub(super) fn program(&self, part: Part) -> PathBuf {
        self.folder(part).join(part.program())
    }

    pub(super) fn sealed(&self, part: Part) -> PathBuf {
        self.folder(part).join(part.sealed())
    }

    /// What is written down, where the program is there and whole by its size. Its checksum is looked at by `--check`.
    pub(super) fn record(&self, part: Part) -> Option<Record> {
        let record: Record = serde_json::from_slice(&fs::read(self.folder(part).join(RECORD)).ok()?).ok()?;
        let whole = fs::metadata(self.sealed(part)).ok()?.len() == record.size;
        (whole && self.program(part).exists()).then_some(record)
    }

    /// The clients that are not there.
    pub(super) fn left(&self) -> Vec<Part> {
        Part::ALL.into_iter().filter(|part| self.record(*part).is_none()).collect()
    }

    /// Whatever is in the place of a client goes: something half, or something old.
    pub(super) fn clear(&self, part: Part) -> Result<(), Missing> {
        let folder = self.folder(part);
        match fs::remove_dir_all(&folder) {
            Err(error) if error.kind() != io::ErrorKind::NotFound => {
                Err(Missing::io(format!("removing {}", folder.display()))(error))
            }
            _ => Ok(()),
        }
    }

    /// Takes in a client that was made in the work folder: it appears whole.
    pub(super) fn take_in(&self, half: &Path, part: Part) -> Result<(), Missing> {
        self.clear(part)?;
        fs::rename(half, self.folder(part)).map_err(keeping(part))
    }

    /// Writes down that a client is finished; `folder` is where it stands now.
    pub(super) fn finish(&self, folder: &Path, part: Part, version: &str) -> Result<(), Missing> {
        let (sha256, size) = digest::of_file(&folder.join(part.sealed())).map_err(keeping(part))?;
        let record = Record { version: version.to_string(), sha256, size };
        let text = serde_json::to_string_pretty(&record).map_err(io::Error::other).map_err(keeping(part))?;
        let half = self.work().join(RECORD);
        fs::write(&half, text + "\n").map_err(keeping(part))?;
        fs::rename(half, folder.join(RECORD)).map_err(keeping(part))
    }

    /// Waits until nobody else fetches, then makes an empty work folder.
    pub(super) fn begin(&self, progress: &mut Progress<'_>, stop: &AtomicBool) -> Result<Building, Missing> {
        let begun = Building::begin(&self.root, "these clients", progress, stop)?;
        begun.ok_or_else(|| self.interrupted())
    }

    /// The words for Ctrl-C.
    pub(super) fn interrupted(&self) -> Missing {
        let all = Part::ALL.len();
        Missing::Interrupted { done: all - self.left().len(), all, what: "clients" }
    }
}

fn keeping(part: Part) -> impl FnOnce(io::Error) -> Missing {
    Missing::io(format!("keeping {}", part.name()))
}

/// All that decides what is fetched: another answer is another folder. Another release may have another Python.
fn key() -> String {
    let mut parts = vec![machine::release(), machine::architecture().to_string()];
    parts.extend(Part::ALL.iter().flat_map(|part| part.pins()).map(str::to_string));
    digest::key(parts)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_client_is_there_when_it_is_whole_and_recorded() {
        let cache = std::env::temp_dir().join(format!("partage-clients-{}", std::process::id()));
        let store = Store::new(&Settings { bin_dir: None, cache: Some(cache.clone()) }).unwrap();
        let building = store.begin(&mut Progress::new(&mut io::sink()), &AtomicBool::new(false)).unwrap();
        assert_eq!(store.left().len(), Part::ALL.len());
        let half = store.work().join("half");
        fs::create_dir(&half).unwrap();
        for file in [Part::Nvtop.program(), Part::Nvtop.sealed()] {
            fs::write(half.join(file), "abc").unwrap();
        }
        store.finish(&half, Part::Nvtop, "3").unwrap();
        assert!(store.record(Part::Nvtop).is_none(), "not yet in its place");
        store.take_in(&half, Part::Nvtop).unwrap();
        assert_eq!(store.record(Part::Nvtop).unwrap().version, "3");
        assert!(!store.left().contains(&Part::Nvtop));
        fs::write(store.sealed(Part::Nvtop), "ab").unwrap();
        assert!(store.record(Part::Nvtop).is_none(), "cut short");
        fs::write(store.sealed(Part::Nvtop), "abc").unwrap();
        fs::remove_file(store.program(Part::Nvtop)).unwrap();
        assert!(store.record(Part::Nvtop).is_none(), "without its program");
        store.clear(Part::Nvtop).unwrap();
        store.clear(Part::Nvtop).unwrap();
        drop(building);
        fs::remove_dir_all(cache).unwrap();
    }
}
