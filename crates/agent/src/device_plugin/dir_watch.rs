//! Watches a directory with inotify: files that appear and disappear, and the directory itself.

use rustix::fs::inotify::{self, CreateFlags, WatchFlags};
use std::io;
use std::path::{Path, PathBuf};
use tokio::net::unix::pipe;

/// An inotify watch on a directory, which need not exist yet.
pub(super) struct DirWatch {
    path: PathBuf,
    /// `None` if the kernel allows no further inotify instance: then no change is reported, and the caller has to poll.
    events: Option<pipe::Receiver>,
}

impl DirWatch {
    pub(super) fn new(path: &Path) -> DirWatch {
        let events = events();
        if let Err(error) = &events {
            tracing::warn!(
                %error,
                path = %path.display(),
                "cannot watch a directory, changes are noticed late: raise fs.inotify.max_user_instances"
            );
        }
        DirWatch { path: path.to_path_buf(), events: events.ok() }
    }

    /// Watches what is at the path now. Call it before reading the directory: a later change ends the next
    /// [`DirWatch::changed`].
    pub(super) fn arm(&self) {
        let Some(events) = &self.events else { return };
        let files = WatchFlags::CREATE | WatchFlags::DELETE | WatchFlags::MOVE;
        let itself = WatchFlags::DELETE_SELF | WatchFlags::MOVE_SELF | WatchFlags::ONLYDIR;
        // A directory that does not exist yet appears in its parent. Adding a watch twice has no effect.
        let _ = inotify::add_watch(events, &self.path, files | itself);
        if let Some(parent) = self.path.parent() {
            let appears = WatchFlags::CREATE | WatchFlags::MOVED_TO | WatchFlags::ONLYDIR;
            let _ = inotify::add_watch(events, parent, appears);
        }
    }

    /// Returns when something has changed since the last call.
    pub(super) async fn changed(&self) {
        let Some(events) = &self.events else { return std::future::pending().await };
        if events.readable().await.is_err() {
            // The tokio runtime is shutting down.
            return std::future::pending().await;
        }
        // The kind of the events does not matter: they are drained.
        while events.try_read(&mut [0; 4096]).is_ok_and(|bytes| bytes > 0) {}
    }
}

/// Opens an inotify instance. Tokio treats a descriptor that is only read as a pipe.
fn events() -> io::Result<pipe::Receiver> {
    let events = inotify::init(CreateFlags::NONBLOCK | CreateFlags::CLOEXEC)?;
    pipe::Receiver::from_owned_fd_unchecked(events)
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;
    use std::fs;
    use std::time::Duration;

    /// Waits for a change. The timeout is for slow machines only: nothing here polls.
    async fn wait_for_change(folder: &DirWatch) {
        tokio::time::timeout(Duration::from_secs(60), folder.changed()).await.unwrap();
    }

    #[tokio::test]
    async fn changes_of_files_and_of_the_directory_itself_are_reported() {
        let parent = tempfile::tempdir().unwrap();
        let path = parent.path().join("device-plugins");
        let folder = DirWatch::new(&path);
        folder.arm();
        fs::create_dir(&path).unwrap();
        wait_for_change(&folder).await;
        folder.arm();
        fs::write(path.join("kubelet.sock"), "").unwrap();
        wait_for_change(&folder).await;
        fs::remove_file(path.join("kubelet.sock")).unwrap();
        wait_for_change(&folder).await;
        fs::rename(&path, parent.path().join("aside")).unwrap();
        wait_for_change(&folder).await;
        fs::create_dir(&path).unwrap();
        wait_for_change(&folder).await;
        folder.arm();
        fs::remove_dir(&path).unwrap();
        wait_for_change(&folder).await;
    }
}
