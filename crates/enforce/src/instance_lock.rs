//! Ensures that one daemon at a time manages this node's GPUs.
//!
//! Two daemons would each hand out the full capacity. The lock is an advisory `flock` on a file in the
//! runtime directory; the kernel releases it when the process exits, however it exits.
//!
//! Each front end has its own lock file, and keeps its name across versions: during an upgrade the old daemon still
//! holds it.

use std::fs::{self, File, OpenOptions, TryLockError};
use std::io;
use std::os::unix::fs::OpenOptionsExt;
use std::path::{Path, PathBuf};

/// An exclusive lock on a lock file, released on drop.
#[derive(Debug)]
pub struct InstanceLock {
    _file: File,
}

/// Why the lock could not be acquired.
#[derive(Debug, thiserror::Error)]
pub enum LockError {
    /// Another daemon holds the lock.
    #[error("another daemon already manages this node (lock file {})", path.display())]
    Held {
        /// The path of the lock file.
        path: PathBuf,
    },
    /// The lock file could not be created or locked.
    #[error("cannot lock {}", path.display())]
    Io {
        /// The path of the lock file.
        path: PathBuf,
        /// The error of the system.
        #[source]
        source: io::Error,
    },
}

impl InstanceLock {
    /// Acquires the lock without waiting. The file and its directory are created if they are missing.
    pub fn try_acquire(lock_file: &Path) -> Result<InstanceLock, LockError> {
        let file = open(lock_file)?;
        match file.try_lock() {
            Ok(()) => Ok(InstanceLock { _file: file }),
            Err(TryLockError::WouldBlock) => Err(LockError::Held { path: lock_file.into() }),
            Err(TryLockError::Error(source)) => Err(LockError::Io { path: lock_file.into(), source }),
        }
    }

    /// Acquires the lock, and blocks for as long as another process holds it.
    pub fn acquire(lock_file: &Path) -> Result<InstanceLock, LockError> {
        let file = open(lock_file)?;
        loop {
            match file.lock() {
                Ok(()) => return Ok(InstanceLock { _file: file }),
                Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
                Err(source) => return Err(LockError::Io { path: lock_file.into(), source }),
            }
        }
    }
}

/// Opens the lock file for this user alone: any process that can open a file can lock it.
fn open(lock_file: &Path) -> Result<File, LockError> {
    let failed = |source| LockError::Io { path: lock_file.into(), source };
    if let Some(directory) = lock_file.parent() {
        fs::create_dir_all(directory).map_err(failed)?;
    }
    OpenOptions::new().write(true).create(true).truncate(false).mode(0o600).open(lock_file).map_err(failed)
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::os::unix::fs::MetadataExt;

    #[test]
    fn second_daemon_is_refused_until_the_first_exits() {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("run/agent.lock");
        let first = InstanceLock::try_acquire(&path).unwrap();
        let error = InstanceLock::try_acquire(&path).unwrap_err();
        let expected = format!("another daemon already manages this node (lock file {})", path.display());
        assert_eq!(error.to_string(), expected);
        drop(first);
        InstanceLock::try_acquire(&path).unwrap();
    }

    #[test]
    fn waiting_daemon_acquires_the_lock_when_the_first_exits() {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("daemon.lock");
        let first = InstanceLock::try_acquire(&path).unwrap();
        let waiting = std::thread::spawn({
            let path = path.clone();
            move || InstanceLock::acquire(&path)
        });
        drop(first);
        let second = waiting.join().unwrap().unwrap();
        assert!(matches!(InstanceLock::try_acquire(&path), Err(LockError::Held { .. })));
        drop(second);
    }

    #[test]
    fn lock_file_is_created_for_its_owner_alone() {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("daemon.lock");
        let _lock = InstanceLock::try_acquire(&path).unwrap();
        assert_eq!(fs::metadata(&path).unwrap().mode() & 0o777, 0o600);
        let unusable = InstanceLock::try_acquire(directory.path()).unwrap_err();
        assert!(matches!(unusable, LockError::Io { .. }), "{unusable}");
    }
}
