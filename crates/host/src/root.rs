//! The host's file system as this process sees it: `/` outside of containers, a folder such as `/host` in one.
//!
//! Links are followed as the host's own processes follow them: one to `/etc/alternatives` means the host's, not ours.

use std::collections::VecDeque;
use std::ffi::OsString;
use std::fs;
use std::io;
use std::path::{Component, Path, PathBuf};

/// As many as the kernel follows.
const MOST_LINKS: usize = 40;

/// A file system's root that is mounted somewhere.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Root {
    /// Where we see it.
    seen: PathBuf,
    /// Where the host has it: `/`, or below that for a root inside of the host's.
    host: PathBuf,
}

impl Root {
    /// The host's root, seen at a folder.
    pub fn new(seen_at: impl Into<PathBuf>) -> Root {
        Root { seen: seen_at.into(), host: "/".into() }
    }

    /// Our own root, which is the host's outside of containers.
    pub fn here() -> Root {
        Root::new("/")
    }

    /// Where this process sees it.
    pub fn seen_at(&self) -> &Path {
        &self.seen
    }

    /// A root inside of this one, as that of a container with the driver in it. `None` where there is no such folder.
    pub fn below(&self, folder: &Path) -> Option<Root> {
        let seen = self.at(&self.real(folder).ok()?);
        seen.is_dir().then(|| Root { host: self.host(&seen), seen })
    }

    /// Where we see a path of this root. Links are not followed: see [`Root::real`].
    pub fn at(&self, path: &Path) -> PathBuf {
        match self.is_ours() {
            true => path.to_path_buf(),
            false => self.seen.join(path.strip_prefix("/").unwrap_or(path)),
        }
    }

    /// The path in this root of something that we see there.
    pub fn inside(&self, seen: &Path) -> PathBuf {
        match seen.strip_prefix(&self.seen) {
            Ok(rest) => Path::new("/").join(rest),
            Err(_) => seen.to_path_buf(),
        }
    }

    /// The path in this root without links, all of which are followed inside of it.
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
            if links > MOST_LINKS {
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

    /// Where something is that we see below this root, with links followed inside of it; as far as it is there. Seen from
    /// anywhere else, a link such as `/var/run` leads out of the root into our own files.
    pub fn follow(&self, seen: &Path) -> PathBuf {
        if self.is_ours() || !seen.starts_with(&self.seen) {
            return seen.to_path_buf();
        }
        let inside = self.inside(seen);
        let there = inside.ancestors().find_map(|part| Some((self.real(part).ok()?, part)));
        let Some((real, part)) = there else { return seen.to_path_buf() };
        // Joined with nothing, a path would end in a slash.
        match inside.strip_prefix(part) {
            Ok(rest) if rest != Path::new("") => self.at(&real).join(rest),
            _ => self.at(&real),
        }
    }

    /// The host's path of something that we see. What is not below this root has the same path on the host.
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

/// The parts of a path that lead somewhere.
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
    fn links_are_followed_inside_of_the_root() {
        let folder = tempfile::tempdir().unwrap();
        let root = Root::new(folder.path());
        let at = |path: &str| root.at(Path::new(path));
        for made in ["/usr/lib/x/current", "/etc/alternatives"] {
            fs::create_dir_all(at(made)).unwrap();
        }
        fs::write(at("/usr/lib/x/current/libcuda.so.550"), "").unwrap();
        symlink("libcuda.so.550", at("/usr/lib/x/current/libcuda.so.1")).unwrap();
        symlink("/usr/lib/x/current/libcuda.so.1", at("/etc/alternatives/cuda")).unwrap();
        symlink("/etc/alternatives/cuda", at("/usr/lib/x/libcuda.so.1")).unwrap();
        symlink("usr/lib", at("/lib")).unwrap();
        // More steps up than there are folders, as in a root that processes cannot leave.
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
        // What is mounted beside the root is as we see it.
        assert_eq!(root.follow(Path::new("/nowhere")), Path::new("/nowhere"));
        assert_eq!(real("/nowhere").unwrap_err().kind(), io::ErrorKind::NotFound);
        assert_eq!(real("/again").unwrap_err().raw_os_error(), Some(rustix::io::Errno::LOOP.raw_os_error()));
        // Ours is the kernel's business.
        assert_eq!(Root::here().real(&at("/lib/x")).unwrap(), at("/usr/lib/x").canonicalize().unwrap());
    }

    #[test]
    fn paths_are_the_hosts_wherever_it_is_seen() {
        let folder = tempfile::tempdir().unwrap();
        fs::create_dir_all(folder.path().join("run/nvidia/driver/usr")).unwrap();
        let root = Root::new(folder.path());
        let seen = folder.path().join("usr/bin");
        assert_eq!((root.at(Path::new("/usr/bin")), root.host(&seen)), (seen, "/usr/bin".into()));
        // What is mounted beside the root has the same name on both sides.
        assert_eq!(root.host(Path::new("/var/lib/partage")), Path::new("/var/lib/partage"));
        let driver = root.below(Path::new("/run/nvidia/driver")).unwrap();
        let seen = driver.at(Path::new("/usr/lib64"));
        assert_eq!(seen, folder.path().join("run/nvidia/driver/usr/lib64"));
        assert_eq!(driver.host(&seen), Path::new("/run/nvidia/driver/usr/lib64"));
        assert_eq!(root.below(Path::new("/run/nvidia/other")), None);
        assert_eq!(Root::here().host(Path::new("/usr")), Path::new("/usr"));
    }
}
