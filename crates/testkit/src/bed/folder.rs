//! The files of a bed, and what is left of beds whose keeper was killed.

use super::BedError;
use super::cgroups::{self, Hierarchies};
use rustix::fs::OFlags;
use std::fs::{self, OpenOptions};
use std::io::Write;
use std::os::unix::fs::{DirBuilderExt, MetadataExt, OpenOptionsExt, PermissionsExt};
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU32, Ordering};

/// Every bed's folder and cgroups are called so, with the number of its owner and one of its own behind.
const PREFIX: &str = "partage-bed-";
/// Logs of beds that failed, one folder each, next to the beds.
const LOGS: &str = "partage-bed-logs";
/// So many of them are kept.
const KEPT_LOGS: usize = 20;
/// What a bed of one node takes, images and logs included.
const NEEDED_MIB: u64 = 512;

/// What scripts the bed brings along.
const SCRIPTS: [(&str, &str); 4] = [
    ("keeper.sh", include_str!("scripts/keeper.sh")),
    ("init.sh", include_str!("scripts/init.sh")),
    ("node.sh", include_str!("scripts/node.sh")),
    ("enter.sh", include_str!("scripts/enter.sh")),
];

/// Files of one bed, all in one folder that the keeper removes.
#[derive(Clone, Debug)]
pub(super) struct Folder {
    /// The folder.
    pub(super) path: PathBuf,
    /// Its last part, also the name of the bed's cgroups.
    pub(super) name: String,
    /// Logs stand elsewhere: they outlive a bed that failed.
    pub(super) logs: PathBuf,
}

impl Folder {
    pub(super) fn new() -> Result<Self, BedError> {
        static COUNT: AtomicU32 = AtomicU32::new(0);
        let base = base()?;
        enough_space(&base)?;
        let number = format!("{}-{}", std::process::id(), COUNT.fetch_add(1, Ordering::Relaxed));
        let name = format!("{PREFIX}{number}");
        let folder = Self { path: base.join(&name), logs: base.join(LOGS).join(number), name };
        // A process of our number died here before.
        let _ = fs::remove_dir_all(&folder.path);
        let made = folder.make(&base.join(LOGS));
        if made.is_err() {
            let _ = fs::remove_dir_all(&folder.path);
        }
        made.map(|()| folder)
    }

    fn make(&self, all_logs: &Path) -> Result<(), BedError> {
        private(&self.path)?;
        // Another bed may be making it at this moment.
        if private(all_logs).is_err() && !is_ours(all_logs) {
            return Err(BedError::Profile(format!(
                "{} is not a folder of ours: somebody put it there; remove it, or set TMPDIR to another place",
                all_logs.display()
            )));
        }
        let doing = || format!("making {}", self.logs.display());
        fs::set_permissions(all_logs, fs::Permissions::from_mode(0o700)).map_err(BedError::io(doing()))?;
        let _ = fs::remove_dir_all(&self.logs);
        private(&self.logs)?;
        for (name, text) in SCRIPTS {
            self.write(name, text)?;
        }
        Ok(())
    }

    /// A file in the folder, for our eyes; the way to it is made.
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

    /// Removes what the keeper should have removed, where nobody lives there any more. False where somebody does.
    pub(super) fn tidy(&self, hierarchies: &Hierarchies) -> bool {
        if is_held(&self.path) {
            return false;
        }
        let cgroups = hierarchies.folders(&self.name);
        cgroups.iter().for_each(|folder| cgroups::remove(folder));
        let _ = fs::remove_dir_all(&self.path);
        !self.path.exists() && cgroups.iter().all(|folder| !folder.exists())
    }

    /// Nothing went wrong: nobody will read them.
    pub(super) fn forget_logs(&self) {
        // The folder of all logs stays: another bed may be going to put its own there.
        let _ = fs::remove_dir_all(&self.logs);
    }
}

/// Where beds are made.
fn base() -> Result<PathBuf, BedError> {
    let base = std::env::temp_dir();
    let base = std::path::absolute(&base).map_err(BedError::io(format!("looking for {}", base.display())))?;
    // Words of a mount's options.
    match base.to_string_lossy().contains([',', '\\']) {
        true => Err(BedError::Profile(format!(
            "beds cannot stand in {}: overlayfs takes no path with a comma or a backslash; set TMPDIR to another",
            base.display()
        ))),
        false => Ok(base),
    }
}

/// A folder that was not there before, for our eyes: others may write next to it, and keys will be in it.
fn private(folder: &Path) -> Result<(), BedError> {
    let made = fs::DirBuilder::new().mode(0o700).create(folder);
    made.map_err(BedError::io(format!("making {}", folder.display())))
}

/// A folder that we made earlier, and not one that somebody put in our way.
fn is_ours(folder: &Path) -> bool {
    let us = rustix::process::geteuid().as_raw();
    fs::symlink_metadata(folder).is_ok_and(|there| there.is_dir() && there.uid() == us)
}

/// Does any process of a bed live? All of them hold its lock.
fn is_held(bed: &Path) -> bool {
    // Whatever stands there, opening it must not wait.
    let flags = OFlags::NONBLOCK.union(OFlags::NOFOLLOW).bits();
    let lock = OpenOptions::new().read(true).custom_flags(flags.cast_signed()).open(bed.join("lock"));
    lock.is_ok_and(|lock| lock.try_lock().is_err())
}

fn enough_space(base: &Path) -> Result<(), BedError> {
    // Where the file system does not say, the first write will.
    let Ok(disk) = rustix::fs::statvfs(base) else { return Ok(()) };
    let free_mib = disk.f_bavail.saturating_mul(disk.f_frsize) >> 20;
    match free_mib < NEEDED_MIB {
        true => Err(BedError::NoSpace { folder: base.to_path_buf(), free_mib, needed_mib: NEEDED_MIB }),
        false => Ok(()),
    }
}

/// Removes what beds left whose keeper was killed too: owner dead, and nobody left who holds the lock.
pub(super) fn sweep(hierarchies: &Hierarchies) {
    let Ok(base) = base() else { return };
    let roots = hierarchies.roots().map(PathBuf::as_path).chain([base.as_path()]);
    for name in roots.flat_map(names) {
        let owner = name.strip_prefix(PREFIX).and_then(owner);
        let (path, logs) = (base.join(&name), PathBuf::new());
        // A bed that is just being made has no lock yet; its owner lives. Others may call their folders as they like.
        if owner.is_some_and(|owner| !lives(owner)) && (is_ours(&path) || !path.exists()) {
            Folder { path, name, logs }.tidy(hierarchies);
        }
    }
    let all_logs = base.join(LOGS);
    if !is_ours(&all_logs) {
        return;
    }
    let entries = fs::read_dir(&all_logs).into_iter().flatten().flatten();
    let mut old: Vec<_> =
        entries.filter_map(|entry| Some((entry.metadata().ok()?.modified().ok()?, entry.path()))).collect();
    old.sort();
    for (_, logs) in old.iter().rev().skip(KEPT_LOGS) {
        let name = logs.file_name().unwrap_or_default().to_string_lossy();
        if owner(&name).is_some_and(|owner| !lives(owner)) {
            let _ = fs::remove_dir_all(logs);
        }
    }
}

fn names(folder: &Path) -> Vec<String> {
    let entries = fs::read_dir(folder).into_iter().flatten().flatten();
    entries.map(|entry| entry.file_name().to_string_lossy().into_owned()).collect()
}

/// The owner's process number in `12-0`; nothing where it is called otherwise.
fn owner(number: &str) -> Option<u32> {
    let (owner, count) = number.split_once('-')?;
    count.parse::<u32>().ok()?;
    owner.parse().ok()
}

/// A process that is dead and only not collected yet does not live.
fn lives(process: u32) -> bool {
    let stat = fs::read_to_string(format!("/proc/{process}/stat")).unwrap_or_default();
    stat.rsplit(") ").next().is_some_and(|rest| !stat.is_empty() && !rest.starts_with(['Z', 'X']))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_beds_have_owners() {
        assert_eq!(owner("12-0"), Some(12));
        assert_eq!([owner("notes"), owner("12"), owner("12-old"), owner("logs")], [None; 4]);
        assert!(lives(std::process::id()));
        assert!(!lives(u32::MAX));
    }
}
