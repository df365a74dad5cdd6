//! SELinux, where a host has it: containers may use only files with a label of theirs.

use crate::root::Root;
use rustix::fs::{XattrFlags, lsetxattr};
use std::fs;
use std::io;
use std::path::Path;

/// Is there where the kernel has SELinux switched on.
const ENFORCE: &str = "/sys/fs/selinux/enforce";
const ATTRIBUTE: &str = "security.selinux";
/// What container runtimes give to volumes that all containers share.
const FOR_CONTAINERS: &[u8] = b"system_u:object_r:container_file_t:s0\0";

/// Labels a folder and all that is in it for containers, where the host has SELinux. What is made in it later has its label from
/// the folder.
pub fn open_to_containers(root: &Root, folder: &Path) -> io::Result<()> {
    match root.at(Path::new(ENFORCE)).exists() {
        true => label(folder),
        false => Ok(()),
    }
}

fn label(path: &Path) -> io::Result<()> {
    // A link has a label of its own.
    lsetxattr(path, ATTRIBUTE, FOR_CONTAINERS, XattrFlags::empty())?;
    if fs::symlink_metadata(path)?.is_dir() {
        for entry in fs::read_dir(path)? {
            label(&entry?.path())?;
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::os::unix::fs::symlink;

    /// The label of a path; none where it has none.
    fn label_of(path: &Path) -> Option<String> {
        let mut text = [0_u8; 64];
        let length = rustix::fs::lgetxattr(path, ATTRIBUTE, &mut text).ok()?;
        Some(String::from_utf8_lossy(&text[..length]).trim_end_matches('\0').into())
    }

    #[test]
    fn everything_in_a_folder_is_labelled_where_the_host_has_selinux() {
        let host = tempfile::tempdir().unwrap();
        let (root, folder) = (Root::new(host.path()), host.path().join("lib"));
        fs::create_dir_all(folder.join("550/lib64")).unwrap();
        fs::write(folder.join("550/lib64/libcuda.so.1"), "").unwrap();
        symlink("libcuda.so.1", folder.join("550/lib64/libcuda.so")).unwrap();
        let before = label_of(&folder);
        open_to_containers(&root, &folder).unwrap();
        assert_eq!(label_of(&folder), before, "a host without SELinux is left alone");

        fs::create_dir_all(host.path().join("sys/fs/selinux")).unwrap();
        fs::write(host.path().join("sys/fs/selinux/enforce"), "1").unwrap();
        if let Err(error) = open_to_containers(&root, &folder) {
            // Only root labels files; who is not is told so.
            assert!(!rustix::process::geteuid().is_root(), "{error}");
            return;
        }
        for path in ["", "550", "550/lib64", "550/lib64/libcuda.so.1", "550/lib64/libcuda.so"] {
            let label = label_of(&folder.join(path));
            assert_eq!(label.as_deref(), Some("system_u:object_r:container_file_t:s0"), "{path}");
        }
    }
}
