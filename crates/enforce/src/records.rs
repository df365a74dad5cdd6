//! Versioned records: JSON files from which a daemon restores its grants after a restart.
//!
//! Every record is a file that contains its version and is replaced atomically ([`write_file`]), so that a crash leaves
//! the old or the new one. A directory of records ([`RecordDir`]) has a quarantine beside it.
//!
//! | a file that | is |
//! |---|---|
//! | has the current version or the one before | read |
//! | has a newer version, or one older than that | left in place, reported, and neither replaced nor removed: the daemon that wrote it may come back |
//! | is truncated, malformed or misnamed, is owned by another user, or is not a regular file (a link, a directory) | moved to the quarantine and reported |
//! | cannot be read because of an I/O or permission error | an error: what it describes may be held, and must not be granted to others |

mod directory;
mod file;

pub use directory::{LoadedRecords, MAX_QUARANTINED, QuarantinedRecord, RecordDir, UnsupportedRecord};
pub use file::{MAX_RECORD_BYTES, read_file, remove_file, write_file};
pub use partage_host::atomic_file::Durability;

use serde::de::DeserializeOwned;
use serde::ser::SerializeMap;
use serde::{Serialize, Serializer};
use serde_json::{Map, Value};
use std::io;
use std::path::PathBuf;

/// The fields of a record, without its version.
pub type RecordFields = Map<String, Value>;

/// A type of record that is stored in a file.
///
/// The version goes up only when an older daemon could not read what this one writes; added optional fields leave it as
/// it is.
pub trait VersionedRecord: Serialize + DeserializeOwned {
    /// The version that this build writes.
    const VERSION: u32;
    /// The JSON field that holds the version.
    const VERSION_FIELD: &'static str = "version";

    /// Converts the fields of a record of the version before [`VersionedRecord::VERSION`]. By default they are read as
    /// they are.
    fn from_previous(fields: RecordFields) -> Result<Self, serde_json::Error> {
        serde_json::from_value(Value::Object(fields))
    }

    /// Returns whether the record belongs under this name: a copy under another name would count twice.
    fn is_named(&self, _name: &str) -> bool {
        true
    }
}

/// Why a text is not a record of this build.
#[derive(Debug, thiserror::Error)]
pub enum DecodeError {
    /// The text is not a JSON object, or not one of this type.
    #[error("malformed record")]
    Malformed(#[from] serde_json::Error),
    /// The record contains no version.
    #[error("record without a version")]
    NoVersion,
    /// The record has a version that this build does not read.
    #[error("record of version {found}, this build reads version {newest}{}", previous(*newest))]
    UnsupportedVersion {
        /// The version of the record.
        found: u64,
        /// The version that this build writes.
        newest: u32,
        /// All other fields, for a caller that can read from them what must not be granted to others.
        fields: RecordFields,
    },
}

impl DecodeError {
    /// Returns what to do with the file of the record, after what is wrong with it.
    fn remedy(&self) -> &'static str {
        match self {
            DecodeError::Malformed(_) | DecodeError::NoVersion => "unusable record (remove it)",
            DecodeError::UnsupportedVersion { .. } => {
                "unsupported record (start the version that wrote it, or remove the file together with what it \
                 describes)"
            }
        }
    }
}

/// Returns the end of a message that names the previous version, if there is one.
fn previous(newest: u32) -> String {
    if newest > 1 { format!(" and {}", newest - 1) } else { String::new() }
}

/// Why a record cannot be read or written. Each names the file and what to do.
#[derive(Debug, thiserror::Error)]
pub enum RecordError {
    /// The file cannot be read.
    #[error(
        "{}: cannot read the record (check the disk, or remove the file together with what it describes)",
        path.display()
    )]
    Read {
        /// The path of the file.
        path: PathBuf,
        /// The error of the system.
        #[source]
        source: io::Error,
    },
    /// The file cannot be written or removed.
    #[error("{}: cannot write the record (check the disk's free space and permissions)", path.display())]
    Write {
        /// The path of the file.
        path: PathBuf,
        /// The error of the system.
        #[source]
        source: io::Error,
    },
    /// The path names a link, a directory or a device.
    #[error("{}: not a regular file (remove it)", path.display())]
    NotAFile {
        /// The path that the error is about.
        path: PathBuf,
    },
    /// The file belongs to another user, who could have written anything into it.
    #[error("{}: owned by user {owner} instead of {expected} (remove it)", path.display())]
    WrongOwner {
        /// The path of the file.
        path: PathBuf,
        /// Its owner's user id.
        owner: u32,
        /// This daemon's user id.
        expected: u32,
    },
    /// The file is larger than any record.
    #[error("{}: larger than {MAX_RECORD_BYTES} bytes (remove it)", path.display())]
    TooLarge {
        /// The path of the file.
        path: PathBuf,
    },
    /// The file name is not that of a record, or not that of the record in it.
    #[error("{}: the file is not named after the record in it (remove it)", path.display())]
    Misnamed {
        /// The path of the file.
        path: PathBuf,
    },
    /// The content cannot be decoded.
    #[error("{}: {}", path.display(), source.remedy())]
    Invalid {
        /// The path of the file.
        path: PathBuf,
        /// Why the content cannot be decoded.
        #[source]
        source: DecodeError,
    },
    /// A name would lead out of the directory.
    #[error("{name:?} cannot name a record: only letters, digits and hyphens can")]
    InvalidName {
        /// The name that was given.
        name: String,
    },
}

impl RecordError {
    /// Returns whether the record has a version that this build does not read.
    pub fn is_unsupported_version(&self) -> bool {
        matches!(self, RecordError::Invalid { source: DecodeError::UnsupportedVersion { .. }, .. })
    }

    /// Returns whether the file is not a record of this build or any other: such a file can be quarantined.
    pub fn is_damaged(&self) -> bool {
        match self {
            RecordError::NotAFile { .. }
            | RecordError::WrongOwner { .. }
            | RecordError::TooLarge { .. }
            | RecordError::Misnamed { .. } => true,
            RecordError::Invalid { .. } => !self.is_unsupported_version(),
            RecordError::Read { .. } | RecordError::Write { .. } | RecordError::InvalidName { .. } => false,
        }
    }
}

/// A record that is serialized with its version as the first field.
struct Envelope<'a, T> {
    record: &'a T,
}

impl<T: VersionedRecord> Serialize for Envelope<'_, T> {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        let fields = match serde_json::to_value(self.record).map_err(serde::ser::Error::custom)? {
            Value::Object(fields) => fields,
            _ => return Err(serde::ser::Error::custom("a record must be a structure with fields")),
        };
        let mut map = serializer.serialize_map(Some(fields.len() + 1))?;
        map.serialize_entry(T::VERSION_FIELD, &T::VERSION)?;
        for (name, value) in &fields {
            map.serialize_entry(name, value)?;
        }
        map.end()
    }
}

/// Writes a record as JSON on one line, its version first.
pub fn encode<T: VersionedRecord>(record: &T) -> Result<String, serde_json::Error> {
    serde_json::to_string(&Envelope { record })
}

/// Reads a record of the current version or the one before.
pub fn decode<T: VersionedRecord>(text: &[u8]) -> Result<T, DecodeError> {
    // A later version may have other fields, so the version is checked first.
    let mut fields: RecordFields = serde_json::from_slice(text)?;
    let found = fields.remove(T::VERSION_FIELD).and_then(|version| version.as_u64());
    let found = found.ok_or(DecodeError::NoVersion)?;
    if found == u64::from(T::VERSION) {
        Ok(serde_json::from_value(Value::Object(fields))?)
    } else if found > 0 && found.checked_add(1) == Some(u64::from(T::VERSION)) {
        Ok(T::from_previous(fields)?)
    } else {
        Err(DecodeError::UnsupportedVersion { found, newest: T::VERSION, fields })
    }
}

#[cfg(test)]
mod tests;
