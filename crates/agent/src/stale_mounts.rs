//! Detects host directories that were deleted and recreated while they are mounted in the agent's container.
//!
//! An operator may remove kubelet's `device-plugins` to reset its plugins. The agent's mount then still refers to the old
//! directory, so the agent has to restart.

use partage_host::host_root::HostRoot;
use std::fs;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};

/// A directory as the agent sees it, and the same one below the host's root.
#[derive(Debug)]
pub(crate) struct HostMount {
    mounted: PathBuf,
    on_host: PathBuf,
    /// Whether another component creates the directory again after it was removed.
    is_recreated: bool,
}

/// A directory that was replaced on the host: the agent's mount refers to the old one.
#[derive(Debug, PartialEq, Eq, thiserror::Error)]
#[error(
    "{} was removed and created again on the host, and the agent's mount refers to the old directory: the agent has to restart; containers \
     continue to run",
    path.display()
)]
pub struct StaleMountError {
    path: PathBuf,
}

impl HostMount {
    /// Returns a mount that can be checked: the agent's directory and the host's are the same one now. `None` if they are not,
    /// or if the host's directory is not visible to the agent.
    pub(crate) fn new(directory: &Path, root: &HostRoot, is_recreated: bool) -> Option<HostMount> {
        let on_host = root.at(&root.real(directory).ok()?);
        let mount = HostMount { mounted: directory.into(), on_host, is_recreated };
        (inode(&mount.mounted).is_some() && inode(&mount.mounted) == inode(&mount.on_host)).then_some(mount)
    }

    /// Checks that the agent still has the host's directory.
    pub(crate) fn check(&self) -> Result<(), StaleMountError> {
        let on_host = inode(&self.on_host);
        let is_pending = on_host.is_none() && self.is_recreated;
        if is_pending || on_host == inode(&self.mounted) {
            return Ok(());
        }
        Err(StaleMountError { path: self.mounted.clone() })
    }
}

/// Returns the device and inode numbers of a file.
fn inode(path: &Path) -> Option<(u64, u64)> {
    fs::metadata(path).ok().map(|data| (data.dev(), data.ino()))
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A file descriptor stands for the mount: it stays with the directory that it was opened for.
    #[test]
    fn recreated_directory_is_detected() {
        let host = tempfile::tempdir().unwrap();
        let folder = host.path().join("device-plugins");
        fs::create_dir(&folder).unwrap();
        let open = fs::File::open(&folder).unwrap();
        let mounted_path = PathBuf::from(format!("/proc/self/fd/{}", std::os::fd::AsRawFd::as_raw_fd(&open)));
        let mount =
            |is_recreated| HostMount { mounted: mounted_path.clone(), on_host: folder.clone(), is_recreated };
        assert_eq!((mount(true).check(), mount(false).check()), (Ok(()), Ok(())));
        fs::remove_dir(&folder).unwrap();
        assert_eq!(mount(true).check(), Ok(()), "kubelet has not created it yet");
        assert!(mount(false).check().is_err());
        // A directory that exists already has another inode number.
        let other = host.path().join("other");
        fs::create_dir(&other).unwrap();
        fs::rename(&other, &folder).unwrap();
        let error = mount(true).check().unwrap_err().to_string();
        assert!(error.contains("was removed and created again on the host"), "{error}");
    }

    #[test]
    fn directory_that_cannot_be_compared_is_not_checked() {
        let host = tempfile::tempdir().unwrap();
        let ours = tempfile::tempdir().unwrap();
        let root = HostRoot::new(host.path());
        assert!(HostMount::new(ours.path(), &root, true).is_none(), "not visible on the host");
        let hosts = root.at(ours.path());
        fs::create_dir_all(&hosts).unwrap();
        assert!(HostMount::new(ours.path(), &root, true).is_none(), "never the same directory");
        assert!(
            HostMount::new(ours.path(), &HostRoot::here(), true).is_some_and(|same| same.check().is_ok())
        );
    }
}
