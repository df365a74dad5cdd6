//! One agent on a node: of two, neither would count what the other gives away.

use rustix::fs::{FlockOperation, flock};
use rustix::io::Errno;
use std::fs::{self, File};
use std::path::Path;

/// Held as long as the agent lives, however it ends.
#[derive(Debug)]
pub(crate) struct Alone {
    _lock: File,
}

/// Takes the node, or says who has it.
pub(crate) fn take(run: &Path) -> Result<Alone, String> {
    let path = run.join("agent.lock");
    let file = fs::create_dir_all(run)
        .and_then(|()| File::options().create(true).truncate(false).write(true).open(&path))
        .map_err(|error| format!("{}: {error}", path.display()))?;
    match flock(&file, FlockOperation::NonBlockingLockExclusive) {
        Ok(()) => Ok(Alone { _lock: file }),
        Err(Errno::WOULDBLOCK) => {
            Err(format!("another agent runs on it, and has {}; it is waited for", path.display()))
        }
        Err(error) => Err(format!("{}: {error}", path.display())),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_second_waits_for_the_first() {
        let folder = tempfile::tempdir().unwrap();
        let first = take(&folder.path().join("run")).unwrap();
        assert!(take(&folder.path().join("run")).unwrap_err().starts_with("another agent runs on it"));
        drop(first);
        take(&folder.path().join("run")).unwrap();
    }
}
