//! Replaces files atomically, also across power failures, and runs work once per version of a file.

use std::ffi::{OsStr, OsString};
use std::fs::{self, File, OpenOptions, Permissions};
use std::io::{self, ErrorKind, Write};
use std::os::unix::ffi::OsStrExt;
use std::os::unix::fs::{MetadataExt, OpenOptionsExt, PermissionsExt};
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicUsize, Ordering};

/// The suffix of temporary files. Their names start with a dot.
const TEMP_SUFFIX: &str = ".unfinished";

/// The event that a written file must survive.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Durability {
    /// The exit of the process that wrote it. For files that are useless after a reboot: nothing waits for the disk.
    UntilReboot,
    /// A power failure. The file and its directory are synced to the disk.
    AcrossReboots,
}

/// Replaces a file atomically and durably: also after a power failure it has the old or the new content.
pub fn replace_durably(path: &Path, bytes: &[u8], mode: u32) -> io::Result<()> {
    replace(path, bytes, mode, Durability::AcrossReboots)
}

/// Replaces a file atomically: readers see the old or the new content, and nothing in between.
pub fn replace(path: &Path, bytes: &[u8], mode: u32, durability: Durability) -> io::Result<()> {
    let (Some(folder), Some(name)) = (path.parent(), path.file_name()) else {
        return Err(io::Error::new(ErrorKind::InvalidInput, "path does not name a file"));
    };
    // A rename is atomic only within a file system, so the temporary file is in the same directory; no other writer has
    // its name.
    let unfinished = folder.join(temp_name(name));
    let written = || {
        let mut file =
            OpenOptions::new().write(true).create(true).truncate(true).mode(mode).open(&unfinished)?;
        // The umask does not apply to the mode.
        file.set_permissions(Permissions::from_mode(mode))?;
        file.write_all(bytes)?;
        if durability == Durability::AcrossReboots {
            file.sync_all()?;
        }
        fs::rename(&unfinished, path)
    };
    written().inspect_err(|_| {
        // The error of the write is reported; a temporary file that cannot be removed is not.
        let _ = fs::remove_file(&unfinished);
    })?;
    match durability {
        Durability::AcrossReboots => sync_directory(folder),
        Durability::UntilReboot => Ok(()),
    }
}

/// Makes renames and removals in a directory durable.
pub fn sync_directory(folder: &Path) -> io::Result<()> {
    let folder = if folder.as_os_str().is_empty() { Path::new(".") } else { folder };
    File::open(folder)?.sync_all()
}

fn temp_name(name: &OsStr) -> OsString {
    static WRITTEN: AtomicUsize = AtomicUsize::new(0);
    let mut unfinished = OsString::from(".");
    unfinished.push(name);
    let number = WRITTEN.fetch_add(1, Ordering::Relaxed);
    unfinished.push(format!(".{}-{number}{TEMP_SUFFIX}", std::process::id()));
    unfinished
}

/// Removes temporary files of killed writers, for target files whose names start with `beginning`. Callers must be the
/// only writer of these files.
pub fn remove_temp_files(folder: &Path, beginning: &str) -> io::Result<()> {
    for entry in fs::read_dir(folder)? {
        let name = entry?.file_name();
        let rest =
            name.as_bytes().strip_prefix(b".").and_then(|rest| rest.strip_prefix(beginning.as_bytes()));
        if rest.is_some_and(|rest| rest.ends_with(TEMP_SUFFIX.as_bytes())) {
            remove_if_exists(&folder.join(name))?;
        }
    }
    Ok(())
}

/// Removes a file. Succeeds if it does not exist.
pub fn remove_if_exists(path: &Path) -> io::Result<()> {
    match fs::remove_file(path) {
        Err(error) if error.kind() != ErrorKind::NotFound => Err(error),
        _ => Ok(()),
    }
}

/// Why it could not be recorded that work was done.
#[derive(Debug, thiserror::Error)]
#[error("cannot write {}: {source}", file.display())]
pub struct StampError {
    /// The path of the stamp file.
    file: PathBuf,
    /// The error of the system.
    #[source]
    source: io::Error,
}

impl From<StampError> for String {
    fn from(error: StampError) -> String {
        error.to_string()
    }
}

/// Runs `work` unless it succeeded before for the same stamp. The stamp is stored in a file.
pub fn run_once<E: From<StampError>>(
    file: &Path,
    stamp: &str,
    work: impl FnOnce() -> Result<(), E>,
) -> Result<(), E> {
    if fs::read_to_string(file).is_ok_and(|done| done == stamp) {
        return Ok(());
    }
    work()?;
    let written = replace_durably(file, stamp.as_bytes(), 0o644);
    Ok(written.map_err(|source| StampError { file: file.into(), source })?)
}

/// Returns a text that identifies the version of a file: its path, size, modification time and inode.
pub fn file_stamp(file: &Path) -> String {
    let about = fs::metadata(file).map(|about| (about.len(), about.mtime(), about.mtime_nsec(), about.ino()));
    format!("{} {about:?}", file.display())
}

/// Returns the names in a directory; none if it does not exist.
pub(crate) fn list_names(folder: &Path) -> io::Result<Vec<OsString>> {
    let entries = match fs::read_dir(folder) {
        Err(error) if error.kind() == ErrorKind::NotFound => return Ok(Vec::new()),
        entries => entries?,
    };
    entries.map(|entry| Ok(entry?.file_name())).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn mode(path: &Path) -> u32 {
        fs::metadata(path).unwrap().mode() & 0o7777
    }

    #[test]
    fn file_is_replaced_atomically_with_its_mode() {
        let folder = tempfile::tempdir().unwrap();
        let file = folder.path().join("record.json");
        replace_durably(&file, b"one", 0o666).unwrap();
        assert_eq!((fs::read(&file).unwrap(), mode(&file)), (b"one".to_vec(), 0o666));
        let open = File::open(&file).unwrap();
        replace_durably(&file, b"two", 0o600).unwrap();
        assert_eq!((io::read_to_string(open).unwrap(), mode(&file)), ("one".into(), 0o600));
        assert_eq!(list_names(folder.path()).unwrap(), ["record.json"]);
        // A failed write leaves no temporary file.
        fs::create_dir(folder.path().join("folder")).unwrap();
        replace_durably(&folder.path().join("folder"), b"", 0o600).unwrap_err();
        assert_eq!(list_names(folder.path()).unwrap().len(), 2);
        assert!(replace_durably(Path::new("/"), b"", 0o600).is_err());
    }

    #[test]
    fn concurrent_writers_leave_one_whole_file() {
        let folder = tempfile::tempdir().unwrap();
        let file = folder.path().join("record.json");
        std::thread::scope(|scope| {
            for writer in 0..8u8 {
                let file = &file;
                scope.spawn(move || {
                    for _ in 0..20 {
                        replace_durably(file, &vec![writer; 5000 + usize::from(writer)], 0o644).unwrap();
                    }
                });
            }
        });
        let last = fs::read(&file).unwrap();
        assert!(last.len() == 5000 + usize::from(last[0]) && last.iter().all(|byte| *byte == last[0]));
        assert_eq!(list_names(folder.path()).unwrap(), ["record.json"]);
    }

    #[test]
    fn only_temporary_files_with_the_prefix_are_removed() {
        let folder = tempfile::tempdir().unwrap();
        let left = temp_name(OsStr::new("ours-1.json"));
        let others = [&temp_name(OsStr::new("other.json")), OsStr::new("ours-1.json"), OsStr::new(".ours")]
            .map(OsStr::to_os_string);
        for name in others.iter().chain([&left]) {
            fs::write(folder.path().join(name), "").unwrap();
        }
        remove_temp_files(folder.path(), "ours-").unwrap();
        let mut found = list_names(folder.path()).unwrap();
        found.sort();
        let mut expected = others.to_vec();
        expected.sort();
        assert_eq!(found, expected);
        assert_eq!(list_names(&folder.path().join("nowhere")).unwrap(), [""; 0]);
    }

    #[test]
    fn work_is_repeated_for_another_stamp_or_after_a_failure() {
        let folder = tempfile::tempdir().unwrap();
        let (file, subject) = (folder.path().join("stamp"), folder.path().join("subject"));
        let mut done = 0;
        let mut work = |stamp: &str, well: bool| {
            let work = || {
                done += 1;
                well.then_some(()).ok_or_else(|| "not now".to_string())
            };
            run_once(&file, stamp, work).is_ok()
        };
        fs::write(&subject, "1").unwrap();
        let first = file_stamp(&subject);
        assert_eq!([work(&first, false), work(&first, true), work(&first, true)], [false, true, true]);
        fs::write(&subject, "other").unwrap();
        assert!(work(&file_stamp(&subject), true));
        assert_eq!(done, 3);
    }
}
