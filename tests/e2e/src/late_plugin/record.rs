//! What outlives the plugin: which name was answered for which devices, and the CDI files.

use super::{Edits, Owner, PluginError};
use partage_agent::plugin::CDI_KIND;
use serde::{Deserialize, Serialize};
use std::collections::{BTreeMap, BTreeSet};
use std::fs::{self, File};
use std::io::{self, Read, Write};
use std::path::{Path, PathBuf};

/// What `Allocate` answered, in a file that is whole at every moment.
#[derive(Debug)]
pub(super) struct Record {
    path: PathBuf,
    kept: Kept,
}

#[derive(Debug, Default, Serialize, Deserialize)]
struct Kept {
    /// Counts allocations: what was answered earlier has a smaller number.
    next: u64,
    answers: BTreeMap<String, Answer>,
}

/// One answer of `Allocate`.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub(super) struct Answer {
    pub(super) number: u64,
    pub(super) ids: BTreeSet<String>,
}

impl Record {
    pub(super) fn open(path: &Path) -> Result<Record, PluginError> {
        let failed = |source| PluginError::Record { path: path.to_path_buf(), source };
        let kept = match fs::read(path) {
            Ok(bytes) => serde_json::from_slice(&bytes).map_err(|e| failed(e.into()))?,
            Err(e) if e.kind() == io::ErrorKind::NotFound => Kept::default(),
            Err(e) => return Err(failed(e)),
        };
        Ok(Record { path: path.to_path_buf(), kept })
    }

    /// A fresh name for these devices, on disk before it is told to anyone.
    pub(super) fn answer(&mut self, ids: BTreeSet<String>) -> io::Result<String> {
        let key = key()?;
        self.kept.answers.insert(key.clone(), Answer { number: self.kept.next, ids });
        self.kept.next += 1;
        self.write()?;
        Ok(key)
    }

    pub(super) fn answers(&self) -> impl Iterator<Item = (&str, &Answer)> {
        self.kept.answers.iter().map(|(key, answer)| (key.as_str(), answer))
    }

    pub(super) fn get(&self, key: &str) -> Option<&Answer> {
        self.kept.answers.get(key)
    }

    pub(super) fn forget(&mut self, keys: &[String]) -> io::Result<()> {
        if keys.is_empty() {
            return Ok(());
        }
        for key in keys {
            self.kept.answers.remove(key);
        }
        self.write()
    }

    fn write(&self) -> io::Result<()> {
        write_whole(&self.path, &serde_json::to_vec_pretty(&self.kept)?)
    }
}

#[derive(Serialize)]
#[serde(rename_all = "camelCase")]
struct Spec<'a> {
    cdi_version: &'a str,
    kind: &'a str,
    devices: [SpecDevice<'a>; 1],
}

#[derive(Serialize)]
#[serde(rename_all = "camelCase")]
struct SpecDevice<'a> {
    name: &'a str,
    /// For people who look into the folder.
    annotations: BTreeMap<&'a str, String>,
    container_edits: &'a Edits,
}

/// Writes the CDI file of a name. The runtime sees all of it or nothing.
pub(super) fn write_spec(folder: &Path, key: &str, owner: &Owner, edits: &Edits) -> io::Result<()> {
    let annotations = BTreeMap::from([("partage.dev/owner", owner.to_string())]);
    let devices = [SpecDevice { name: key, annotations, container_edits: edits }];
    // 0.6.0 is the first version with annotations.
    let spec = Spec { cdi_version: "0.6.0", kind: CDI_KIND, devices };
    write_whole(&spec_path(folder, key), &serde_json::to_vec_pretty(&spec)?)
}

pub(super) fn remove_spec(folder: &Path, key: &str) -> io::Result<()> {
    match fs::remove_file(spec_path(folder, key)) {
        Err(e) if e.kind() != io::ErrorKind::NotFound => Err(e),
        _ => Ok(()),
    }
}

/// The CDI file of a name.
pub(super) fn spec_path(folder: &Path, key: &str) -> PathBuf {
    folder.join(format!("{key}.json"))
}

/// A file that is the old or the new one at every moment, also after a power cut. The temporary file is in the same
/// folder, under a name that a CDI reader passes over.
fn write_whole(path: &Path, bytes: &[u8]) -> io::Result<()> {
    let folder = path.parent().ok_or(io::ErrorKind::InvalidInput)?;
    let temporary = folder.join(format!(".{}.tmp", key()?));
    let mut file = File::create(&temporary)?;
    file.write_all(bytes)?;
    file.sync_all()?;
    fs::rename(&temporary, path)?;
    File::open(folder)?.sync_all()
}

/// A name nobody can have used before.
fn key() -> io::Result<String> {
    let mut bytes = [0_u8; 16];
    File::open("/dev/urandom")?.read_exact(&mut bytes)?;
    Ok(bytes.iter().map(|byte| format!("{byte:02x}")).collect())
}
