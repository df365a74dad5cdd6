//! Allows one run at a time in a directory, and provides a work directory that is removed afterwards.

use crate::prerequisites::MissingPrerequisite;
use crate::process::pause_unless_stopped;
use crate::progress::ProgressLines;
use std::fs::{self, File, TryLockError};
use std::path::{Path, PathBuf};
use std::sync::atomic::AtomicBool;

/// Returns the work directory in a directory of the cache.
pub(crate) fn path(root: &Path) -> PathBuf {
    root.join("building")
}

/// The lock on a build. Dropping it removes the work directory and lets the next run start.
#[derive(Debug)]
pub(crate) struct BuildLock {
    work: PathBuf,
    _lock: File,
}

impl BuildLock {
    /// Waits until no other run builds in `root`, then creates an empty work directory. Returns `None` if interrupted.
    pub(crate) fn acquire(
        root: &Path,
        what: &str,
        progress: &mut ProgressLines<'_>,
        stop: &AtomicBool,
    ) -> Result<Option<Self>, MissingPrerequisite> {
        let here = || MissingPrerequisite::io(format!("creating {}", root.display()));
        fs::create_dir_all(root).map_err(here())?;
        let lock = File::create(root.join("lock")).map_err(here())?;
        let mut reported = false;
        loop {
            match lock.try_lock() {
                Ok(()) => break,
                Err(TryLockError::WouldBlock) if !reported => {
                    progress.line(&format!("waiting for another run that builds {what}"));
                    reported = true;
                }
                Err(TryLockError::WouldBlock) => {}
                Err(TryLockError::Error(error)) => return Err(here()(error)),
            }
            if !pause_unless_stopped(stop) {
                return Ok(None);
            }
        }
        // A run that was killed may have left files.
        let work = path(root);
        clear(&work);
        fs::create_dir_all(&work).map_err(here())?;
        Ok(Some(Self { work, _lock: lock }))
    }
}

impl Drop for BuildLock {
    fn drop(&mut self) {
        clear(&self.work);
    }
}

fn clear(folder: &Path) {
    // The next run removes what cannot be removed now.
    let _ = fs::remove_dir_all(folder);
}
