//! The log file of a daemon that runs in the background: bounded, and rotated.
//!
//! The daemon and its standby process write to the same file. The file is opened for every line, so that neither of
//! them keeps writing to a file that the other one has rotated. A daemon logs a few lines for each share.

use std::fs::{self, File, OpenOptions};
use std::io::{self, Write};
use std::os::unix::fs::OpenOptionsExt;
use std::path::{Path, PathBuf};

/// The size, in bytes, beyond which a log file is rotated. One rotated file is kept, so that a log has twice as many at
/// most.
pub const MAX_LOG_BYTES: u64 = 1 << 20;

/// A log file that is rotated to `<file>.1` when it grows beyond [`MAX_LOG_BYTES`].
#[derive(Clone, Debug)]
pub struct RotatingLog {
    path: PathBuf,
}

impl RotatingLog {
    /// Returns the log in this file. It is opened with the first line.
    pub fn new(path: impl Into<PathBuf>) -> RotatingLog {
        RotatingLog { path: path.into() }
    }

    /// Returns the path that the log is rotated to.
    pub fn rotated(&self) -> PathBuf {
        let mut name = self.path.clone().into_os_string();
        name.push(".1");
        name.into()
    }

    /// Opens the file to append to it, after a rotation if it has become too large.
    pub fn open(&self) -> io::Result<File> {
        if is_full(&self.path) {
            // If that fails the file keeps growing, which is better than losing lines.
            let _ = fs::rename(&self.path, self.rotated());
        }
        OpenOptions::new().create(true).append(true).mode(0o600).open(&self.path)
    }
}

fn is_full(path: &Path) -> bool {
    fs::metadata(path).is_ok_and(|file| file.len() >= MAX_LOG_BYTES)
}

impl Write for RotatingLog {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        self.open()?.write(bytes)
    }

    fn write_all(&mut self, bytes: &[u8]) -> io::Result<()> {
        self.open()?.write_all(bytes)
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn full_log_is_rotated_and_the_last_lines_are_kept() {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("daemon.log");
        let mut log = RotatingLog::new(&path);
        let line = "x".repeat(1023) + "\n";
        for number in 0..1024 {
            assert!(!log.rotated().exists(), "after {number} lines");
            log.write_all(line.as_bytes()).unwrap();
        }
        // Another process that logs to the same path follows the rotation.
        let mut other = RotatingLog::new(&path);
        log.write_all(b"after\n").unwrap();
        other.write_all(b"other\n").unwrap();
        assert_eq!(fs::read_to_string(&path).unwrap(), "after\nother\n");
        assert_eq!(fs::metadata(log.rotated()).unwrap().len(), MAX_LOG_BYTES);
        // The next rotation replaces the first one.
        fs::write(&path, "y".repeat(1 << 20)).unwrap();
        log.write_all(b"last\n").unwrap();
        assert_eq!(fs::read_to_string(&path).unwrap(), "last\n");
        assert!(fs::read_to_string(log.rotated()).unwrap().starts_with('y'));
        assert_eq!(fs::read_dir(directory.path()).unwrap().count(), 2);
    }
}
