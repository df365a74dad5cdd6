//! A directory of records, one file each, with a quarantine.

use super::{Durability, RecordError, VersionedRecord, read_file, remove_file, write_file};
use crate::error_chain::describe;
use partage_host::atomic_file;
use std::collections::BTreeMap;
use std::ffi::OsStr;
use std::fs;
use std::io::{self, ErrorKind};
use std::path::{Path, PathBuf};

/// The maximum number of files in a quarantine. It is for administrators, and must not fill a disk that damages all
/// files.
pub const MAX_QUARANTINED: usize = 100;

/// The longest name of a record. Pod UIDs and nonces have 36 characters at most.
const MAX_NAME_BYTES: usize = 128;

/// A directory of records, each in the file `<name>.json`.
#[derive(Clone, Debug)]
pub struct RecordDir {
    directory: PathBuf,
    quarantine: PathBuf,
    durability: Durability,
}

/// All records of a directory.
#[derive(Debug)]
pub struct LoadedRecords<T> {
    /// The records that can be used, by name.
    pub records: BTreeMap<String, T>,
    /// Files that are not records, and were quarantined.
    pub quarantined: Vec<QuarantinedRecord>,
    /// Records of a version that this build does not read.
    pub unsupported: Vec<UnsupportedRecord>,
}

/// A file that was not a record, and was quarantined.
#[derive(Debug)]
pub struct QuarantinedRecord {
    /// The path of the file now.
    pub path: PathBuf,
    /// Why it is not a record.
    pub reason: RecordError,
}

/// A record of a version that this build does not read. It was left in place.
#[derive(Debug)]
pub struct UnsupportedRecord {
    /// The name of the record, which identifies its owner.
    pub name: String,
    /// The error, with the file and its version.
    pub reason: RecordError,
}

impl RecordDir {
    /// Opens a directory of records, and creates it if it is missing. The quarantine must be on the same file system,
    /// because files are moved there; it is created with the first of them.
    pub fn open(directory: &Path, quarantine: &Path, durability: Durability) -> io::Result<RecordDir> {
        fs::create_dir_all(directory)?;
        Ok(RecordDir { directory: directory.into(), quarantine: quarantine.into(), durability })
    }

    /// Reads all records. Only the daemon that holds the instance lock may call it: it removes the temporary files of
    /// an earlier one.
    pub fn load_all<T: VersionedRecord>(&self) -> Result<LoadedRecords<T>, RecordError> {
        let failed = |source| RecordError::Read { path: self.directory.clone(), source };
        atomic_file::remove_temp_files(&self.directory, "").map_err(failed)?;
        let mut loaded =
            LoadedRecords { records: BTreeMap::new(), quarantined: Vec::new(), unsupported: Vec::new() };
        for entry in fs::read_dir(&self.directory).map_err(failed)? {
            let path = entry.map_err(failed)?.path();
            if path.file_name().is_some_and(is_hidden) {
                continue;
            }
            let Some(name) = record_name(&path) else {
                loaded.quarantined.push(self.quarantine(&path, RecordError::Misnamed { path: path.clone() }));
                continue;
            };
            match read_named::<T>(&path, &name) {
                Ok(Some(record)) => drop(loaded.records.insert(name, record)),
                // It was removed after the directory was listed.
                Ok(None) => {}
                Err(reason) if reason.is_unsupported_version() => {
                    report_unsupported(&reason);
                    loaded.unsupported.push(UnsupportedRecord { name, reason });
                }
                Err(reason) if reason.is_damaged() => loaded.quarantined.push(self.quarantine(&path, reason)),
                Err(error) => return Err(error),
            }
        }
        Ok(loaded)
    }

    /// Reads one record. Returns `None` if there is none that this build can use.
    pub fn load<T: VersionedRecord>(&self, name: &str) -> Result<Option<T>, RecordError> {
        let path = self.path(name)?;
        match read_named(&path, name) {
            Err(reason) if reason.is_unsupported_version() => {
                report_unsupported(&reason);
                Ok(None)
            }
            Err(reason) if reason.is_damaged() => {
                self.quarantine(&path, reason);
                Ok(None)
            }
            other => other,
        }
    }

    /// Writes a record, and replaces an earlier one of the same name.
    pub fn store<T: VersionedRecord>(&self, name: &str, record: &T) -> Result<(), RecordError> {
        write_file(&self.path(name)?, record, self.durability)
    }

    /// Removes a record, if it exists.
    pub fn remove<T: VersionedRecord>(&self, name: &str) -> Result<(), RecordError> {
        remove_file::<T>(&self.path(name)?)
    }

    fn path(&self, name: &str) -> Result<PathBuf, RecordError> {
        if is_record_name(name) {
            Ok(self.directory.join(format!("{name}.json")))
        } else {
            Err(RecordError::InvalidName { name: name.into() })
        }
    }

    /// Moves a file to the quarantine. One that cannot be moved stays, and is found again at the next start.
    fn quarantine(&self, path: &Path, reason: RecordError) -> QuarantinedRecord {
        let kept_at = match self.move_to_quarantine(path) {
            Ok(moved_to) => {
                tracing::warn!(
                    path = %path.display(),
                    moved_to = %moved_to.display(),
                    reason = %describe(&reason),
                    "record quarantined: the daemon continues without it, and the file is kept for inspection"
                );
                moved_to
            }
            Err(error) => {
                tracing::warn!(
                    path = %path.display(),
                    %error,
                    reason = %describe(&reason),
                    "cannot quarantine a record: the daemon continues without it, and finds it again at the next start"
                );
                path.to_path_buf()
            }
        };
        QuarantinedRecord { path: kept_at, reason }
    }

    fn move_to_quarantine(&self, path: &Path) -> io::Result<PathBuf> {
        let name = path.file_name().unwrap_or_default();
        fs::create_dir_all(&self.quarantine)?;
        if fs::read_dir(&self.quarantine)?.count() >= MAX_QUARANTINED {
            let full = format!("quarantine {} is full: remove files from it", self.quarantine.display());
            return Err(io::Error::new(ErrorKind::StorageFull, full));
        }
        let free = (0..=MAX_QUARANTINED)
            .map(|number| {
                let mut name = name.to_os_string();
                if number > 0 {
                    name.push(format!(".{number}"));
                }
                self.quarantine.join(name)
            })
            .find(|to| to.symlink_metadata().is_err());
        let to = free.ok_or(ErrorKind::AlreadyExists)?;
        fs::rename(path, &to)?;
        Ok(to)
    }
}

fn read_named<T: VersionedRecord>(path: &Path, name: &str) -> Result<Option<T>, RecordError> {
    match read_file::<T>(path)? {
        Some(record) if !record.is_named(name) => Err(RecordError::Misnamed { path: path.into() }),
        record => Ok(record),
    }
}

fn report_unsupported(reason: &RecordError) {
    tracing::warn!(reason = %describe(reason), "record of another version left in place");
}

fn is_hidden(name: &OsStr) -> bool {
    name.as_encoded_bytes().starts_with(b".")
}

/// Returns the name of the record that a file should contain; `None` if the file name is not that of a record.
fn record_name(path: &Path) -> Option<String> {
    let name = path.file_name()?.to_str()?.strip_suffix(".json")?;
    is_record_name(name).then(|| name.to_string())
}

/// Returns whether a name is valid. Names come from kubelet, among others, and must not lead out of the directory.
fn is_record_name(name: &str) -> bool {
    let plain = |byte: u8| byte.is_ascii_alphanumeric() || byte == b'-';
    !name.is_empty() && name.len() <= MAX_NAME_BYTES && name.bytes().all(plain)
}
