//! Files that are whole at every moment, also after a power cut, and work that is done once.

use std::ffi::{OsStr, OsString};
use std::fs::{self, File, OpenOptions, Permissions};
use std::io::{self, ErrorKind, Write};
use std::os::unix::ffi::OsStrExt;
use std::os::unix::fs::{MetadataExt, OpenOptionsExt, PermissionsExt};
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicUsize, Ordering};

/// How names of files end that are not finished. They begin with a dot.
const UNFINISHED: &str = ".unfinished";

/// What a file must survive once it is written.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Durability {
    /// The end of the process that wrote it. For files that mean nothing after a reboot: nothing waits for a disk.
    UntilReboot,
    /// A power failure. The file and its directory are synced to the disk.
    AcrossReboots,
}

/// Replaces a file so that it is the old or the new one at every moment, also after a power failure.
pub fn write_whole(path: &Path, bytes: &[u8], mode: u32) -> io::Result<()> {
    replace(path, bytes, mode, Durability::AcrossReboots)
}

/// Replaces a file so that readers see the old or the new one at every moment, and nothing in between.
pub fn replace(path: &Path, bytes: &[u8], mode: u32, durability: Durability) -> io::Result<()> {
    let (Some(folder), Some(name)) = (path.parent(), path.file_name()) else {
        return Err(io::Error::new(ErrorKind::InvalidInput, "it is no path of a file"));
    };
    // Beside it, where alone a rename is one step; by a name that no other writer has.
    let unfinished = folder.join(unfinished(name));
    let written = || {
        let mut file =
            OpenOptions::new().write(true).create(true).truncate(true).mode(mode).open(&unfinished)?;
        // Whatever the umask says.
        file.set_permissions(Permissions::from_mode(mode))?;
        file.write_all(bytes)?;
        if durability == Durability::AcrossReboots {
            file.sync_all()?;
        }
        fs::rename(&unfinished, path)
    };
    written().inspect_err(|_| {
        // What is left over is of no use; that it stays is not what went wrong.
        let _ = fs::remove_file(&unfinished);
    })?;
    match durability {
        Durability::AcrossReboots => sync_folder(folder),
        Durability::UntilReboot => Ok(()),
    }
}

/// Makes what was renamed in or removed from a folder durable.
pub fn sync_folder(folder: &Path) -> io::Result<()> {
    let folder = if folder.as_os_str().is_empty() { Path::new(".") } else { folder };
    File::open(folder)?.sync_all()
}

fn unfinished(name: &OsStr) -> OsString {
    static WRITTEN: AtomicUsize = AtomicUsize::new(0);
    let mut unfinished = OsString::from(".");
    unfinished.push(name);
    let number = WRITTEN.fetch_add(1, Ordering::Relaxed);
    unfinished.push(format!(".{}-{number}{UNFINISHED}", std::process::id()));
    unfinished
}

/// Removes what writers left that were killed: files [`write_whole`] did not finish whose names would begin so. Only for
/// who is alone in writing them.
pub fn remove_unfinished(folder: &Path, beginning: &str) -> io::Result<()> {
    for entry in fs::read_dir(folder)? {
        let name = entry?.file_name();
        let rest =
            name.as_bytes().strip_prefix(b".").and_then(|rest| rest.strip_prefix(beginning.as_bytes()));
        if rest.is_some_and(|rest| rest.ends_with(UNFINISHED.as_bytes())) {
            remove(&folder.join(name))?;
        }
    }
    Ok(())
}

/// Removes a file that may be gone already.
pub fn remove(path: &Path) -> io::Result<()> {
    match fs::remove_file(path) {
        Err(error) if error.kind() != ErrorKind::NotFound => Err(error),
        _ => Ok(()),
    }
}

/// Why it could not be recorded that work was done.
#[derive(Debug, thiserror::Error)]
#[error("{}: cannot be written: {source}", file.display())]
pub struct StampError {
    /// The file.
    file: PathBuf,
    /// What the system reported.
    #[source]
    source: io::Error,
}

impl From<StampError> for String {
    fn from(error: StampError) -> String {
        error.to_string()
    }
}

/// Does work unless it was done for this very stamp, which is kept in a file.
pub fn once<E: From<StampError>>(
    file: &Path,
    stamp: &str,
    work: impl FnOnce() -> Result<(), E>,
) -> Result<(), E> {
    if fs::read_to_string(file).is_ok_and(|done| done == stamp) {
        return Ok(());
    }
    work()?;
    let written = write_whole(file, stamp.as_bytes(), 0o644);
    Ok(written.map_err(|source| StampError { file: file.into(), source })?)
}

/// What tells one version of a file from another.
pub fn stamp_of(file: &Path) -> String {
    let about = fs::metadata(file).map(|about| (about.len(), about.mtime(), about.mtime_nsec(), about.ino()));
    format!("{} {about:?}", file.display())
}

/// The names in a folder; none where there is no such folder.
pub(crate) fn names(folder: &Path) -> io::Result<Vec<OsString>> {
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
    fn a_file_is_replaced_whole_with_its_mode() {
        let folder = tempfile::tempdir().unwrap();
        let file = folder.path().join("record.json");
        write_whole(&file, b"one", 0o666).unwrap();
        assert_eq!((fs::read(&file).unwrap(), mode(&file)), (b"one".to_vec(), 0o666));
        let open = File::open(&file).unwrap();
        write_whole(&file, b"two", 0o600).unwrap();
        assert_eq!((io::read_to_string(open).unwrap(), mode(&file)), ("one".into(), 0o600));
        assert_eq!(names(folder.path()).unwrap(), ["record.json"]);
        // Nothing is left of what cannot be.
        fs::create_dir(folder.path().join("folder")).unwrap();
        write_whole(&folder.path().join("folder"), b"", 0o600).unwrap_err();
        assert_eq!(names(folder.path()).unwrap().len(), 2);
        assert!(write_whole(Path::new("/"), b"", 0o600).is_err());
    }

    #[test]
    fn many_may_write_the_same_file() {
        let folder = tempfile::tempdir().unwrap();
        let file = folder.path().join("record.json");
        std::thread::scope(|scope| {
            for writer in 0..8u8 {
                let file = &file;
                scope.spawn(move || {
                    for _ in 0..20 {
                        write_whole(file, &vec![writer; 5000 + usize::from(writer)], 0o644).unwrap();
                    }
                });
            }
        });
        let last = fs::read(&file).unwrap();
        assert!(last.len() == 5000 + usize::from(last[0]) && last.iter().all(|byte| *byte == last[0]));
        assert_eq!(names(folder.path()).unwrap(), ["record.json"]);
    }

    #[test]
    fn leftovers_of_the_killed_are_removed_and_nothing_else() {
        let folder = tempfile::tempdir().unwrap();
        let left = unfinished(OsStr::new("ours-1.json"));
        let others = [&unfinished(OsStr::new("other.json")), OsStr::new("ours-1.json"), OsStr::new(".ours")]
            .map(OsStr::to_os_string);
        for name in others.iter().chain([&left]) {
            fs::write(folder.path().join(name), "").unwrap();
        }
        remove_unfinished(folder.path(), "ours-").unwrap();
        let mut found = names(folder.path()).unwrap();
        found.sort();
        let mut expected = others.to_vec();
        expected.sort();
        assert_eq!(found, expected);
        assert_eq!(names(&folder.path().join("nowhere")).unwrap(), [""; 0]);
    }

    #[test]
    fn what_was_done_is_done_again_for_another_stamp_or_after_a_failure() {
        let folder = tempfile::tempdir().unwrap();
        let (file, subject) = (folder.path().join("stamp"), folder.path().join("subject"));
        let mut done = 0;
        let mut work = |stamp: &str, well: bool| {
            let work = || {
                done += 1;
                well.then_some(()).ok_or_else(|| "not now".to_string())
            };
            once(&file, stamp, work).is_ok()
        };
        fs::write(&subject, "1").unwrap();
        let first = stamp_of(&subject);
        assert_eq!([work(&first, false), work(&first, true), work(&first, true)], [false, true, true]);
        fs::write(&subject, "other").unwrap();
        assert!(work(&stamp_of(&subject), true));
        assert_eq!(done, 3);
    }
}
