//! The host's file system as this process sees it: `/` outside of containers, a directory such as `/host` in one.
//!
//! Symbolic links are resolved as for the host's own processes: one to `/etc/alternatives` means the host's, not ours.

use std::collections::VecDeque;
use std::ffi::OsString;
use std::fs;
use std::io;
use std::path::{Component, Path, PathBuf};

/// The maximum number of symbolic links on a path, as in the kernel.
const MAX_SYMLINKS: usize = 40;

/// A root directory that is mounted somewhere.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct HostRoot {
    /// The path at which this process sees it.
    seen: PathBuf,
    /// The path on the host: `/`, or a path below it for a root inside the host's.
    host: PathBuf,
}

impl HostRoot {
    /// Returns the host's root, mounted at a directory.
    pub fn new(seen_at: impl Into<PathBuf>) -> HostRoot {
        HostRoot { seen: seen_at.into(), host: "/".into() }
    }

    /// Returns the root of this process, which is the host's outside of containers.
    pub fn here() -> HostRoot {
        HostRoot::new("/")
    }

    /// Returns where this process sees the root.
    pub fn seen_at(&self) -> &Path {
        &self.seen
    }

    /// Returns a root inside this one, such as that of a driver container. Returns `None` if the directory does not
    /// exist.
    pub fn below(&self, folder: &Path) -> Option<HostRoot> {
        let seen = self.at(&self.real(folder).ok()?);
        seen.is_dir().then(|| HostRoot { host: self.host(&seen), seen })
    }

    /// Returns where this process sees a path of this root. Links are not resolved: see [`HostRoot::real`].
    pub fn at(&self, path: &Path) -> PathBuf {
        if self.is_ours() {
            path.to_path_buf()
        } else {
            self.seen.join(path.strip_prefix("/").unwrap_or(path))
        }
    }

    /// Converts a path that this process sees into the path within this root.
    pub fn inside(&self, seen: &Path) -> PathBuf {
        match seen.strip_prefix(&self.seen) {
            Ok(rest) => Path::new("/").join(rest),
            Err(_) => seen.to_path_buf(),
        }
    }

    /// Resolves all symbolic links of a path within this root, never leaving it.
    pub fn real(&self, path: &Path) -> io::Result<PathBuf> {
        if self.is_ours() {
            return fs::canonicalize(path);
        }
        let mut real = PathBuf::from("/");
        let mut links = 0;
        let mut left: VecDeque<OsString> = parts(path).collect();
        while let Some(part) = left.pop_front() {
            if part == ".." {
                real.pop();
                continue;
            }
            let next = real.join(&part);
            let seen = self.at(&next);
            if !fs::symlink_metadata(&seen)?.is_symlink() {
                real = next;
                continue;
            }
            links += 1;
            if links > MAX_SYMLINKS {
                return Err(rustix::io::Errno::LOOP.into());
            }
            let target = fs::read_link(&seen)?;
            if target.is_absolute() {
                real = PathBuf::from("/");
            }
            for part in parts(&target).collect::<Vec<_>>().into_iter().rev() {
                left.push_front(part);
            }
        }
        Ok(real)
    }

    /// Resolves the symbolic links of a path that this process sees below this root, as far as the path exists. Without
    /// this, a link such as `/var/run` would lead out of the root into our own files.
    pub fn follow(&self, seen: &Path) -> PathBuf {
        if self.is_ours() || !seen.starts_with(&self.seen) {
            return seen.to_path_buf();
        }
        let inside = self.inside(seen);
        let there = inside.ancestors().find_map(|part| Some((self.real(part).ok()?, part)));
        let Some((real, part)) = there else { return seen.to_path_buf() };
        // Joining an empty path would append a slash.
        match inside.strip_prefix(part) {
            Ok(rest) if rest != Path::new("") => self.at(&real).join(rest),
            _ => self.at(&real),
        }
    }

    /// Converts a path that this process sees into the path on the host. A path outside of this root is the same on the
    /// host.
    pub fn host(&self, seen: &Path) -> PathBuf {
        match seen.strip_prefix(&self.seen) {
            Ok(rest) => self.host.join(rest),
            Err(_) => seen.to_path_buf(),
        }
    }

    fn is_ours(&self) -> bool {
        self.seen == Path::new("/")
    }
}

/// Returns the normal and parent components of a path.
fn parts(path: &Path) -> impl Iterator<Item = OsString> {
    let leads = |part: Component<'_>| match part {
        Component::Normal(name) => Some(name.to_os_string()),
        Component::ParentDir => Some("..".into()),
        Component::Prefix(_) | Component::RootDir | Component::CurDir => None,
    };
    path.components().filter_map(leads)
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::os::unix::fs::symlink;

    #[test]
    fn links_are_resolved_within_the_root() {
        let folder = tempfile::tempdir().unwrap();
        let root = HostRoot::new(folder.path());
        let at = |path: &str| root.at(Path::new(path));
        for made in ["/usr/lib/x/current", "/etc/alternatives"] {
            fs::create_dir_all(at(made)).unwrap();
        }
        fs::write(at("/usr/lib/x/current/libcuda.so.550"), "").unwrap();
        symlink("libcuda.so.550", at("/usr/lib/x/current/libcuda.so.1")).unwrap();
        symlink("/usr/lib/x/current/libcuda.so.1", at("/etc/alternatives/cuda")).unwrap();
        symlink("/etc/alternatives/cuda", at("/usr/lib/x/libcuda.so.1")).unwrap();
        symlink("usr/lib", at("/lib")).unwrap();
        // More parent components than directories: `..` stays at the root, as in a chroot.
        symlink("../../../../../usr/./lib/x/libcuda.so.1", at("/usr/lib/up")).unwrap();
        symlink("again", at("/again")).unwrap();
        let real = |path: &str| root.real(Path::new(path));
        for path in ["/lib/x/libcuda.so.1", "/usr/lib/up", "/usr/lib/x/current/libcuda.so.550"] {
            let found = real(path).unwrap();
            assert_eq!(found, Path::new("/usr/lib/x/current/libcuda.so.550"), "{path}");
        }
        symlink("/etc/alternatives", at("/links")).unwrap();
        for (path, followed) in [
            ("/links", "/etc/alternatives"),
            ("/links/cuda", "/usr/lib/x/current/libcuda.so.550"),
            ("/links/not/yet", "/etc/alternatives/not/yet"),
            ("/nowhere/at/all", "/nowhere/at/all"),
        ] {
            assert_eq!(root.follow(&at(path)), at(followed), "{path}");
        }
        // A path beside the root stays as it is.
        assert_eq!(root.follow(Path::new("/nowhere")), Path::new("/nowhere"));
        assert_eq!(real("/nowhere").unwrap_err().kind(), io::ErrorKind::NotFound);
        assert_eq!(real("/again").unwrap_err().raw_os_error(), Some(rustix::io::Errno::LOOP.raw_os_error()));
        // The kernel resolves links of our own root.
        assert_eq!(HostRoot::here().real(&at("/lib/x")).unwrap(), at("/usr/lib/x").canonicalize().unwrap());
    }

    #[test]
    fn paths_are_converted_to_those_of_the_host() {
        let folder = tempfile::tempdir().unwrap();
        fs::create_dir_all(folder.path().join("run/nvidia/driver/usr")).unwrap();
        let root = HostRoot::new(folder.path());
        let seen = folder.path().join("usr/bin");
        assert_eq!((root.at(Path::new("/usr/bin")), root.host(&seen)), (seen, "/usr/bin".into()));
        // A path beside the root is the same on both sides.
        assert_eq!(root.host(Path::new("/var/lib/partage")), Path::new("/var/lib/partage"));
        let driver = root.below(Path::new("/run/nvidia/driver")).unwrap();
        let seen = driver.at(Path::new("/usr/lib64"));
        assert_eq!(seen, folder.path().join("run/nvidia/driver/usr/lib64"));
        assert_eq!(driver.host(&seen), Path::new("/run/nvidia/driver/usr/lib64"));
        assert_eq!(root.below(Path::new("/run/nvidia/other")), None);
        assert_eq!(HostRoot::here().host(Path::new("/usr")), Path::new("/usr"));
    }
}
