//! Reads, writes and removes one record in a file.

use super::{DecodeError, Durability, RecordError, VersionedRecord, decode, encode};
use partage_host::atomic_file;
use rustix::fs::{Mode, OFlags};
use rustix::io::Errno;
use std::fs::File;
use std::io::{self, Read};
use std::os::unix::fs::MetadataExt;
use std::path::Path;

/// The maximum size of a record. The largest ones, of pods with many containers, have some kilobytes.
pub const MAX_RECORD_BYTES: u64 = 16 << 20;

/// The file mode. Records can contain command lines, so only the daemon's user may read them.
const RECORD_MODE: u32 = 0o600;

/// Reads the record in a file. Returns `None` if the file does not exist. Links are not followed.
pub fn read_file<T: VersionedRecord>(path: &Path) -> Result<Option<T>, RecordError> {
    let Some(bytes) = read_bytes(path)? else { return Ok(None) };
    decode(&bytes).map(Some).map_err(|source| RecordError::Invalid { path: path.into(), source })
}

fn read_bytes(path: &Path) -> Result<Option<Vec<u8>>, RecordError> {
    let failed = |source: io::Error| RecordError::Read { path: path.into(), source };
    let not_a_file = || RecordError::NotAFile { path: path.into() };
    // A pipe without a writer would block.
    let flags = OFlags::RDONLY | OFlags::NOFOLLOW | OFlags::NONBLOCK | OFlags::CLOEXEC;
    let file = match rustix::fs::open(path, flags, Mode::empty()) {
        Ok(file) => File::from(file),
        Err(Errno::NOENT) => return Ok(None),
        // A symbolic link or a socket.
        Err(Errno::LOOP | Errno::NXIO) => return Err(not_a_file()),
        Err(error) => return Err(failed(error.into())),
    };
    let metadata = file.metadata().map_err(failed)?;
    if !metadata.is_file() {
        return Err(not_a_file());
    }
    let expected = rustix::process::geteuid().as_raw();
    if metadata.uid() != expected {
        return Err(RecordError::WrongOwner { path: path.into(), owner: metadata.uid(), expected });
    }
    let mut bytes = Vec::new();
    file.take(MAX_RECORD_BYTES + 1).read_to_end(&mut bytes).map_err(failed)?;
    if bytes.len() as u64 > MAX_RECORD_BYTES {
        return Err(RecordError::TooLarge { path: path.into() });
    }
    Ok(Some(bytes))
}

/// Replaces the record in a file atomically. A record of an unsupported version is not replaced.
pub fn write_file<T: VersionedRecord>(
    path: &Path,
    record: &T,
    durability: Durability,
) -> Result<(), RecordError> {
    check_replaceable::<T>(path)?;
    let failed = |source: io::Error| RecordError::Write { path: path.into(), source };
    let text = encode(record).map_err(|error| failed(error.into()))?;
    atomic_file::replace(path, text.as_bytes(), RECORD_MODE, durability).map_err(failed)
}

/// Removes a record, if it exists. One of an unsupported version is left in place: its own daemon removes it.
pub fn remove_file<T: VersionedRecord>(path: &Path) -> Result<(), RecordError> {
    if let Err(error) = check_replaceable::<T>(path) {
        tracing::info!(path = %path.display(), reason = %crate::error_chain::describe(&error), "record left in place");
        return Ok(());
    }
    atomic_file::remove_if_exists(path).map_err(|source| RecordError::Write { path: path.into(), source })
}

/// Refuses to replace a record of an unsupported version. A file that is not a record can be replaced.
fn check_replaceable<T: VersionedRecord>(path: &Path) -> Result<(), RecordError> {
    match read_bytes(path) {
        Ok(Some(bytes)) => match decode::<T>(&bytes) {
            Err(source @ DecodeError::UnsupportedVersion { .. }) => {
                Err(RecordError::Invalid { path: path.into(), source })
            }
            _ => Ok(()),
        },
        _ => Ok(()),
    }
}
