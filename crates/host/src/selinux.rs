//! Labels files for containers on hosts with SELinux, where containers can use only files with a container label.

use crate::host_root::HostRoot;
use rustix::fs::{XattrFlags, lsetxattr};
use std::fs;
use std::io;
use std::path::Path;

/// A file that exists if SELinux is enabled in the kernel.
const ENFORCE_FILE: &str = "/sys/fs/selinux/enforce";
const LABEL_ATTRIBUTE: &str = "security.selinux";
/// The label that container runtimes give to volumes shared by all containers.
const CONTAINER_LABEL: &[u8] = b"system_u:object_r:container_file_t:s0\0";

/// Labels a directory and everything in it for containers, if the host has SELinux. Files created in it later inherit
/// the label.
pub fn label_for_containers(root: &HostRoot, folder: &Path) -> io::Result<()> {
    if root.at(Path::new(ENFORCE_FILE)).exists() { label(folder) } else { Ok(()) }
}

fn label(path: &Path) -> io::Result<()> {
    // A symbolic link has a label of its own.
    lsetxattr(path, LABEL_ATTRIBUTE, CONTAINER_LABEL, XattrFlags::empty())?;
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

    /// Returns the label of a path, if it has one.
    fn label_of(path: &Path) -> Option<String> {
        let mut text = [0_u8; 64];
        let length = rustix::fs::lgetxattr(path, LABEL_ATTRIBUTE, &mut text).ok()?;
        Some(String::from_utf8_lossy(&text[..length]).trim_end_matches('\0').into())
    }

    #[test]
    fn directory_is_labeled_recursively_on_selinux_hosts_only() {
        let host = tempfile::tempdir().unwrap();
        let (root, folder) = (HostRoot::new(host.path()), host.path().join("lib"));
        fs::create_dir_all(folder.join("550/lib64")).unwrap();
        fs::write(folder.join("550/lib64/libcuda.so.1"), "").unwrap();
        symlink("libcuda.so.1", folder.join("550/lib64/libcuda.so")).unwrap();
        let before = label_of(&folder);
        label_for_containers(&root, &folder).unwrap();
        assert_eq!(label_of(&folder), before, "a host without SELinux is unchanged");

        fs::create_dir_all(host.path().join("sys/fs/selinux")).unwrap();
        fs::write(host.path().join("sys/fs/selinux/enforce"), "1").unwrap();
        if let Err(error) = label_for_containers(&root, &folder) {
            // Only root can label files; others get an error.
            assert!(!rustix::process::geteuid().is_root(), "{error}");
            return;
        }
        for path in ["", "550", "550/lib64", "550/lib64/libcuda.so.1", "550/lib64/libcuda.so"] {
            let label = label_of(&folder.join(path));
            assert_eq!(label.as_deref(), Some("system_u:object_r:container_file_t:s0"), "{path}");
        }
    }
}
