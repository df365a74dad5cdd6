//! Folders of the host that this process has mounted by themselves. Who removes one and makes it again, as one does to have kubelet
//! forget its plugins, makes another folder: what is mounted here is the old one, for ever.

use partage_host::root::Root;
use std::fs;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};

/// A folder as we have it, and the same below the host's root.
#[derive(Debug)]
pub(crate) struct Mounted {
    ours: PathBuf,
    hosts: PathBuf,
    /// Whether somebody else makes it again where it is removed.
    is_made_by_others: bool,
}

impl Mounted {
    /// Where the two are one now. Where they are not, or the host's is not seen, nothing can be told by them.
    pub(crate) fn new(folder: &Path, root: &Root, is_made_by_others: bool) -> Option<Mounted> {
        let hosts = root.at(&root.real(folder).ok()?);
        let mounted = Mounted { ours: folder.into(), hosts, is_made_by_others };
        (identity(&mounted.ours).is_some() && identity(&mounted.ours) == identity(&mounted.hosts))
            .then_some(mounted)
    }

    /// Why what is here is of no use any more.
    pub(crate) fn check(&self) -> Result<(), String> {
        let hosts = identity(&self.hosts);
        let waits = hosts.is_none() && self.is_made_by_others;
        if waits || hosts == identity(&self.ours) {
            return Ok(());
        }
        Err(format!(
            "{} was removed and made again on the host, and what is mounted here is the old one: the agent must start anew to have the new \
             one; containers go on as they are",
            self.ours.display()
        ))
    }
}

fn identity(path: &Path) -> Option<(u64, u64)> {
    fs::metadata(path).ok().map(|data| (data.dev(), data.ino()))
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A host whose folder is seen twice, as by a mount: in one place by its name, in the other by a descriptor, which stays with
    /// the folder that it was opened for.
    #[test]
    fn a_folder_that_was_made_again_is_noticed() {
        let host = tempfile::tempdir().unwrap();
        let folder = host.path().join("device-plugins");
        fs::create_dir(&folder).unwrap();
        let open = fs::File::open(&folder).unwrap();
        let ours = PathBuf::from(format!("/proc/self/fd/{}", std::os::fd::AsRawFd::as_raw_fd(&open)));
        let mounted =
            |is_made_by_others| Mounted { ours: ours.clone(), hosts: folder.clone(), is_made_by_others };
        assert_eq!((mounted(true).check(), mounted(false).check()), (Ok(()), Ok(())));
        fs::remove_dir(&folder).unwrap();
        assert_eq!(mounted(true).check(), Ok(()), "kubelet has not made it yet");
        assert!(mounted(false).check().is_err());
        // Another one has its number for certain.
        let other = host.path().join("other");
        fs::create_dir(&other).unwrap();
        fs::rename(&other, &folder).unwrap();
        let why = mounted(true).check().unwrap_err();
        assert!(why.contains("was removed and made again on the host"), "{why}");
    }

    #[test]
    fn what_cannot_be_compared_is_left_alone() {
        let host = tempfile::tempdir().unwrap();
        let ours = tempfile::tempdir().unwrap();
        let root = Root::new(host.path());
        assert!(Mounted::new(ours.path(), &root, true).is_none(), "the host's is not seen");
        let hosts = root.at(ours.path());
        fs::create_dir_all(&hosts).unwrap();
        assert!(Mounted::new(ours.path(), &root, true).is_none(), "they were never one");
        assert!(Mounted::new(ours.path(), &Root::here(), true).is_some_and(|same| same.check().is_ok()));
    }
}
