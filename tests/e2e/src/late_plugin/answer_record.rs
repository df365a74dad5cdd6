//! What outlives the plugin: which name was allocated for which devices, and the CDI files.

use super::{ContainerEdits, ContainerIdentity, LatePluginError};
use partage_agent::device_plugin::CDI_KIND;
use serde::{Deserialize, Serialize};
use std::collections::{BTreeMap, BTreeSet};
use std::fs::{self, File};
use std::io::{self, Read, Write};
use std::path::{Path, PathBuf};

/// The responses of `Allocate`, in a file that is replaced atomically.
#[derive(Debug)]
pub(super) struct AnswerRecord {
    path: PathBuf,
    kept: RecordContents,
}

#[derive(Debug, Default, Serialize, Deserialize)]
struct RecordContents {
    /// Counts allocations: an earlier one has a smaller number.
    next: u64,
    answers: BTreeMap<String, AllocationAnswer>,
}

/// One response of `Allocate`.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub(super) struct AllocationAnswer {
    pub(super) number: u64,
    pub(super) ids: BTreeSet<String>,
}

impl AnswerRecord {
    pub(super) fn open(path: &Path) -> Result<AnswerRecord, LatePluginError> {
        let failed = |source| LatePluginError::Record { path: path.to_path_buf(), source };
        let kept = match fs::read(path) {
            Ok(bytes) => serde_json::from_slice(&bytes).map_err(|e| failed(e.into()))?,
            Err(e) if e.kind() == io::ErrorKind::NotFound => RecordContents::default(),
            Err(e) => return Err(failed(e)),
        };
        Ok(AnswerRecord { path: path.to_path_buf(), kept })
    }

    /// Returns a new name for these devices, which is on disk before it is returned.
    pub(super) fn answer(&mut self, ids: BTreeSet<String>) -> io::Result<String> {
        let key = key()?;
        self.kept.answers.insert(key.clone(), AllocationAnswer { number: self.kept.next, ids });
        self.kept.next += 1;
        self.write()?;
        Ok(key)
    }

    pub(super) fn answers(&self) -> impl Iterator<Item = (&str, &AllocationAnswer)> {
        self.kept.answers.iter().map(|(key, answer)| (key.as_str(), answer))
    }

    pub(super) fn get(&self, key: &str) -> Option<&AllocationAnswer> {
        self.kept.answers.get(key)
    }

    pub(super) fn remove(&mut self, keys: &[String]) -> io::Result<()> {
        if keys.is_empty() {
            return Ok(());
        }
        for key in keys {
            self.kept.answers.remove(key);
        }
        self.write()
    }

    fn write(&self) -> io::Result<()> {
        write_atomically(&self.path, &serde_json::to_vec_pretty(&self.kept)?)
    }
}

#[derive(Serialize)]
#[serde(rename_all = "camelCase")]
struct CdiSpec<'a> {
    cdi_version: &'a str,
    kind: &'a str,
    devices: [CdiSpecDevice<'a>; 1],
}

#[derive(Serialize)]
#[serde(rename_all = "camelCase")]
struct CdiSpecDevice<'a> {
    name: &'a str,
    /// For people who look into the directory.
    annotations: BTreeMap<&'a str, String>,
    container_edits: &'a ContainerEdits,
}

/// Writes the CDI file of a name. The runtime sees all of it or nothing.
pub(super) fn write_spec(
    folder: &Path,
    key: &str,
    owner: &ContainerIdentity,
    edits: &ContainerEdits,
) -> io::Result<()> {
    let annotations = BTreeMap::from([("partage.dev/owner", owner.to_string())]);
    let devices = [CdiSpecDevice { name: key, annotations, container_edits: edits }];
    // 0.6.0 is the first version with annotations.
    let spec = CdiSpec { cdi_version: "0.6.0", kind: CDI_KIND, devices };
    write_atomically(&spec_path(folder, key), &serde_json::to_vec_pretty(&spec)?)
}

pub(super) fn remove_spec(folder: &Path, key: &str) -> io::Result<()> {
    match fs::remove_file(spec_path(folder, key)) {
        Err(e) if e.kind() != io::ErrorKind::NotFound => Err(e),
        _ => Ok(()),
    }
}

/// Returns the CDI file of a name.
pub(super) fn spec_path(folder: &Path, key: &str) -> PathBuf {
    folder.join(format!("{key}.json"))
}

/// Replaces a file atomically, also with respect to a power failure. The temporary file is in the same directory, under
/// a name that CDI readers ignore.
fn write_atomically(path: &Path, bytes: &[u8]) -> io::Result<()> {
    let folder = path.parent().ok_or(io::ErrorKind::InvalidInput)?;
    let temporary = folder.join(format!(".{}.tmp", key()?));
    let mut file = File::create(&temporary)?;
    file.write_all(bytes)?;
    file.sync_all()?;
    fs::rename(&temporary, path)?;
    File::open(folder)?.sync_all()
}

/// Returns a name that was never used before.
fn key() -> io::Result<String> {
    let mut bytes = [0_u8; 16];
    File::open("/dev/urandom")?.read_exact(&mut bytes)?;
    Ok(bytes.iter().map(|byte| format!("{byte:02x}")).collect())
}
