//! Checks the free disk space.

use crate::prerequisites::MissingPrerequisite;
use std::path::Path;

/// Checks that a directory has this much free space; `places` are the settings that determine the directory.
pub(crate) fn check_free(
    folder: &Path,
    needed_mib: u64,
    places: &'static str,
) -> Result<(), MissingPrerequisite> {
    // A directory that does not exist yet will be on the disk of its nearest existing parent.
    let Some(there) = folder.ancestors().find(|ancestor| ancestor.exists()) else { return Ok(()) };
    // If the file system does not report free space, the build will fail instead.
    let Ok(disk) = rustix::fs::statvfs(there) else { return Ok(()) };
    let free_mib = (disk.f_bavail.saturating_mul(disk.f_frsize)) >> 20;
    if free_mib < needed_mib {
        Err(MissingPrerequisite::NoSpace { folder: folder.to_path_buf(), free_mib, needed_mib, places })
    } else {
        Ok(())
    }
}
