//! Manages the files of a bed, and removes what is left of beds whose cleanup process was killed.

use super::BedError;
use super::cgroups::{self, Hierarchies};
use rustix::fs::OFlags;
use std::fs::{self, OpenOptions};
use std::io::Write;
use std::os::unix::fs::{DirBuilderExt, MetadataExt, OpenOptionsExt, PermissionsExt};
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU32, Ordering};

/// Prefix of the directory and cgroups of every bed; the PID of its owner and a counter follow.
const BED_PREFIX: &str = "partage-bed-";
/// Directory for the logs of failed beds, one subdirectory each, next to the beds.
const LOGS_DIR: &str = "partage-bed-logs";
/// Number of failed beds whose logs are kept.
const MAX_KEPT_LOGS: usize = 20;
/// Space that a bed of one node needs, images and logs included.
const MIN_FREE_MIB: u64 = 512;

/// Scripts that the bed runs.
const SCRIPTS: [(&str, &str); 4] = [
    ("cleanup.sh", include_str!("scripts/cleanup.sh")),
    ("init.sh", include_str!("scripts/init.sh")),
    ("node.sh", include_str!("scripts/node.sh")),
    ("enter.sh", include_str!("scripts/enter.sh")),
];

/// The files of one bed, all in one directory that the cleanup process removes.
#[derive(Clone, Debug)]
pub(super) struct BedDir {
    /// The path of the directory.
    pub(super) path: PathBuf,
    /// Its last component, which is also the name of the bed's cgroups.
    pub(super) name: String,
    /// Directory of the logs, which outlive a bed that failed.
    pub(super) logs: PathBuf,
}

impl BedDir {
    pub(super) fn new() -> Result<Self, BedError> {
        static COUNT: AtomicU32 = AtomicU32::new(0);
        let base = parent_dir()?;
        check_free_space(&base)?;
        let number = format!("{}-{}", std::process::id(), COUNT.fetch_add(1, Ordering::Relaxed));
        let name = format!("{BED_PREFIX}{number}");
        let folder = Self { path: base.join(&name), logs: base.join(LOGS_DIR).join(number), name };
        // An earlier process with this PID may have left it.
        let _ = fs::remove_dir_all(&folder.path);
        let made = folder.create(&base.join(LOGS_DIR));
        if made.is_err() {
            let _ = fs::remove_dir_all(&folder.path);
        }
        made.map(|()| folder)
    }

    fn create(&self, all_logs: &Path) -> Result<(), BedError> {
        create_private_dir(&self.path)?;
        // Another bed may be creating it at this moment.
        if create_private_dir(all_logs).is_err() && !is_own_dir(all_logs) {
            return Err(BedError::BedProfile(format!(
                "{} does not belong to this user; remove it, or set TMPDIR to another directory",
                all_logs.display()
            )));
        }
        let doing = || format!("creating {}", self.logs.display());
        fs::set_permissions(all_logs, fs::Permissions::from_mode(0o700)).map_err(BedError::io(doing()))?;
        let _ = fs::remove_dir_all(&self.logs);
        create_private_dir(&self.logs)?;
        for (name, text) in SCRIPTS {
            self.write(name, text)?;
        }
        Ok(())
    }

    /// Writes a file into the directory, readable by its owner only, and creates the directories above it.
    pub(super) fn write(&self, name: &str, text: &str) -> Result<PathBuf, BedError> {
        let path = self.path.join(name);
        let doing = || format!("writing {}", path.display());
        if let Some(parent) = path.parent() {
            fs::create_dir_all(parent).map_err(BedError::io(doing()))?;
        }
        let file = OpenOptions::new().write(true).create(true).truncate(true).mode(0o600).open(&path);
        file.and_then(|mut file| file.write_all(text.as_bytes())).map_err(BedError::io(doing()))?;
        Ok(path)
    }

    /// Removes what the cleanup process should have removed. Returns false while a process of the bed is alive.
    pub(super) fn try_remove(&self, hierarchies: &Hierarchies) -> bool {
        if is_locked(&self.path) {
            return false;
        }
        let cgroups = hierarchies.directories(&self.name);
        cgroups.iter().for_each(|folder| cgroups::remove(folder));
        let _ = fs::remove_dir_all(&self.path);
        !self.path.exists() && cgroups.iter().all(|folder| !folder.exists())
    }

    /// Removes the logs of a bed without failures.
    pub(super) fn remove_logs(&self) {
        // The directory of all logs stays: another bed may be about to create its own there.
        let _ = fs::remove_dir_all(&self.logs);
    }
}

/// Returns the directory in which beds are created.
fn parent_dir() -> Result<PathBuf, BedError> {
    let base = std::env::temp_dir();
    let base = std::path::absolute(&base).map_err(BedError::io(format!("resolving {}", base.display())))?;
    // Paths of a bed become mount options.
    if base.to_string_lossy().contains([',', '\\']) {
        Err(BedError::BedProfile(format!(
            "beds cannot be created in {}: overlayfs does not accept paths with a comma or a backslash; set TMPDIR to another directory",
            base.display()
        )))
    } else {
        Ok(base)
    }
}

/// Creates a directory that must not exist yet, accessible by its owner only: other users may write next to it, and it
/// will hold keys.
fn create_private_dir(folder: &Path) -> Result<(), BedError> {
    let made = fs::DirBuilder::new().mode(0o700).create(folder);
    made.map_err(BedError::io(format!("creating {}", folder.display())))
}

/// Returns whether a directory belongs to this user, and was not put there by another one.
fn is_own_dir(folder: &Path) -> bool {
    let us = rustix::process::geteuid().as_raw();
    fs::symlink_metadata(folder).is_ok_and(|there| there.is_dir() && there.uid() == us)
}

/// Returns whether any process of a bed is alive. All of them hold its lock.
fn is_locked(bed: &Path) -> bool {
    // Opening must not block or follow a link, whatever the file is.
    let flags = OFlags::NONBLOCK.union(OFlags::NOFOLLOW).bits();
    let lock = OpenOptions::new().read(true).custom_flags(flags.cast_signed()).open(bed.join("lock"));
    lock.is_ok_and(|lock| lock.try_lock().is_err())
}

fn check_free_space(base: &Path) -> Result<(), BedError> {
    // If the file system does not report free space, the first write will fail instead.
    let Ok(disk) = rustix::fs::statvfs(base) else { return Ok(()) };
    let free_mib = disk.f_bavail.saturating_mul(disk.f_frsize) >> 20;
    if free_mib < MIN_FREE_MIB {
        Err(BedError::NoSpace { folder: base.to_path_buf(), free_mib, needed_mib: MIN_FREE_MIB })
    } else {
        Ok(())
    }
}

/// Removes what is left of beds whose cleanup process was killed: the owner is dead and no process holds the lock.
pub(super) fn remove_stale_beds(hierarchies: &Hierarchies) {
    let Ok(base) = parent_dir() else { return };
    let roots = hierarchies.roots().map(PathBuf::as_path).chain([base.as_path()]);
    for name in roots.flat_map(entry_names) {
        let owner = name.strip_prefix(BED_PREFIX).and_then(owner_pid);
        let (path, logs) = (base.join(&name), PathBuf::new());
        // A bed that is being created has no lock yet, but its owner is alive. Directories of other users are left
        // alone.
        if owner.is_some_and(|owner| !is_alive(owner)) && (is_own_dir(&path) || !path.exists()) {
            BedDir { path, name, logs }.try_remove(hierarchies);
        }
    }
    let all_logs = base.join(LOGS_DIR);
    if !is_own_dir(&all_logs) {
        return;
    }
    let entries = fs::read_dir(&all_logs).into_iter().flatten().flatten();
    let mut old: Vec<_> =
        entries.filter_map(|entry| Some((entry.metadata().ok()?.modified().ok()?, entry.path()))).collect();
    old.sort();
    for (_, logs) in old.iter().rev().skip(MAX_KEPT_LOGS) {
        let name = logs.file_name().unwrap_or_default().to_string_lossy();
        if owner_pid(&name).is_some_and(|owner| !is_alive(owner)) {
            let _ = fs::remove_dir_all(logs);
        }
    }
}

fn entry_names(folder: &Path) -> Vec<String> {
    let entries = fs::read_dir(folder).into_iter().flatten().flatten();
    entries.map(|entry| entry.file_name().to_string_lossy().into_owned()).collect()
}

/// Parses the owner's PID from `12-0`; `None` for other names.
fn owner_pid(number: &str) -> Option<u32> {
    let (owner, count) = number.split_once('-')?;
    count.parse::<u32>().ok()?;
    owner.parse().ok()
}

/// Returns whether a process is alive. A zombie is not.
fn is_alive(process: u32) -> bool {
    let stat = fs::read_to_string(format!("/proc/{process}/stat")).unwrap_or_default();
    stat.rsplit(") ").next().is_some_and(|rest| !stat.is_empty() && !rest.starts_with(['Z', 'X']))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn owner_is_parsed_from_bed_names_only() {
        assert_eq!(owner_pid("12-0"), Some(12));
        assert_eq!([owner_pid("notes"), owner_pid("12"), owner_pid("12-old"), owner_pid("logs")], [None; 4]);
        assert!(is_alive(std::process::id()));
        assert!(!is_alive(u32::MAX));
    }
}
