//! One run at a time in a folder, and a place for half things that is gone afterwards.

use crate::missing::Missing;
use crate::process::wait_a_glance;
use crate::progress::Progress;
use std::fs::{self, File, TryLockError};
use std::path::{Path, PathBuf};
use std::sync::atomic::AtomicBool;

/// Where half things are, in a folder of the cache.
pub(crate) fn folder(root: &Path) -> PathBuf {
    root.join("building")
}

/// The right to build; when dropped, nothing half is left and the next run may go.
#[derive(Debug)]
pub(crate) struct Building {
    work: PathBuf,
    _lock: File,
}

impl Building {
    /// Waits until nobody else builds in `root`, then makes an empty work folder. None where it was interrupted.
    pub(crate) fn begin(
        root: &Path,
        what: &str,
        progress: &mut Progress<'_>,
        stop: &AtomicBool,
    ) -> Result<Option<Self>, Missing> {
        let here = || Missing::io(format!("making {}", root.display()));
        fs::create_dir_all(root).map_err(here())?;
        let lock = File::create(root.join("lock")).map_err(here())?;
        let mut told = false;
        loop {
            match lock.try_lock() {
                Ok(()) => break,
                Err(TryLockError::WouldBlock) if !told => {
                    progress.line(&format!("another run builds {what}; waiting for it"));
                    told = true;
                }
                Err(TryLockError::WouldBlock) => {}
                Err(TryLockError::Error(error)) => return Err(here()(error)),
            }
            if !wait_a_glance(stop) {
                return Ok(None);
            }
        }
        // A run that was killed hard left its half things.
        let work = folder(root);
        clear(&work);
        fs::create_dir_all(&work).map_err(here())?;
        Ok(Some(Self { work, _lock: lock }))
    }
}

impl Drop for Building {
    fn drop(&mut self) {
        clear(&self.work);
    }
}

fn clear(folder: &Path) {
    // What cannot be removed now is removed by the next run.
    let _ = fs::remove_dir_all(folder);
}
