//! Is there room on the disk?

use crate::missing::Missing;
use std::path::Path;

/// The folder must have this much room; `places` are the settings that could point elsewhere.
pub(crate) fn enough(folder: &Path, needed_mib: u64, places: &'static str) -> Result<(), Missing> {
    // A folder that does not exist yet will stand where its nearest parent does.
    let Some(there) = folder.ancestors().find(|ancestor| ancestor.exists()) else { return Ok(()) };
    // Where the file system does not say, the build itself will.
    let Ok(disk) = rustix::fs::statvfs(there) else { return Ok(()) };
    let free_mib = (disk.f_bavail.saturating_mul(disk.f_frsize)) >> 20;
    match free_mib < needed_mib {
        true => Err(Missing::NoSpace { folder: folder.to_path_buf(), free_mib, needed_mib, places }),
        false => Ok(()),
    }
}
