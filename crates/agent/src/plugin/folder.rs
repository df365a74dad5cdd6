//! Noticing at once that files of a folder come and go, also when the folder itself does.

use rustix::fs::inotify::{self, CreateFlags, WatchFlags};
use std::io;
use std::path::{Path, PathBuf};
use tokio::net::unix::pipe;

/// A folder that is watched.
pub(super) struct Folder {
    path: PathBuf,
    /// `None` where the kernel has no room for another watcher: then nothing is noticed, and the caller's beat must do.
    events: Option<pipe::Receiver>,
}

impl Folder {
    pub(super) fn new(path: &Path) -> Folder {
        let events = events();
        if let Err(error) = &events {
            tracing::warn!(%error, folder = %path.display(), "changes are noticed late: raise fs.inotify.max_user_instances");
        }
        Folder { path: path.to_path_buf(), events: events.ok() }
    }

    /// Watches what is at the path now. Call it before looking: what changes after it ends the next [`Folder::changed`].
    pub(super) fn arm(&self) {
        let Some(events) = &self.events else { return };
        let files = WatchFlags::CREATE | WatchFlags::DELETE | WatchFlags::MOVE;
        let itself = WatchFlags::DELETE_SELF | WatchFlags::MOVE_SELF | WatchFlags::ONLYDIR;
        // A folder that is not there yet appears in the one above. One that is watched already stays so.
        let _ = inotify::add_watch(events, &self.path, files | itself);
        if let Some(above) = self.path.parent() {
            let appears = WatchFlags::CREATE | WatchFlags::MOVED_TO | WatchFlags::ONLYDIR;
            let _ = inotify::add_watch(events, above, appears);
        }
    }

    /// Returns when something changed since it was last called.
    pub(super) async fn changed(&self) {
        let Some(events) = &self.events else { return std::future::pending().await };
        if events.readable().await.is_err() {
            // The runtime ends.
            return std::future::pending().await;
        }
        // Which events they were does not matter: they are read away.
        while events.try_read(&mut [0; 4096]).is_ok_and(|bytes| bytes > 0) {}
    }
}

/// To the runtime a descriptor that is only read is a pipe.
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

    /// The patience is for slow machines only: nothing here polls.
    async fn notices(folder: &Folder) {
        tokio::time::timeout(Duration::from_secs(60), folder.changed()).await.unwrap();
    }

    #[tokio::test]
    async fn files_the_folder_and_its_successor_are_noticed() {
        let above = tempfile::tempdir().unwrap();
        let path = above.path().join("device-plugins");
        let folder = Folder::new(&path);
        folder.arm();
        fs::create_dir(&path).unwrap();
        notices(&folder).await;
        folder.arm();
        fs::write(path.join("kubelet.sock"), "").unwrap();
        notices(&folder).await;
        fs::remove_file(path.join("kubelet.sock")).unwrap();
        notices(&folder).await;
        fs::rename(&path, above.path().join("aside")).unwrap();
        notices(&folder).await;
        fs::create_dir(&path).unwrap();
        notices(&folder).await;
        folder.arm();
        fs::remove_dir(&path).unwrap();
        notices(&folder).await;
    }
}
