//! The machine's cgroup hierarchies, and a place of our own in each.

use super::BedError;
use super::profile::Cgroups;
use std::fs;
use std::path::{Path, PathBuf};

/// What the machine has mounted.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(super) struct Hierarchies {
    /// Mount point and options of each v1 hierarchy, the options as `mount` wants them: `cpu,cpuacct`, `name=systemd`.
    v1: Vec<(PathBuf, String)>,
    v2: Option<PathBuf>,
}

/// Options of a v1 mount that are no controllers.
const NOT_CONTROLLERS: &[&str] = &[
    "rw",
    "ro",
    "xattr",
    "noprefix",
    "clone_children",
    "release_agent",
    "seclabel",
    "cpuset_v2_mode",
    "favordynmods",
];

impl Hierarchies {
    pub(super) fn of_this_machine() -> Result<Self, BedError> {
        let path = "/proc/self/mountinfo";
        let text = fs::read_to_string(path).map_err(BedError::io(format!("reading {path}")))?;
        Ok(Self::from_mountinfo(&text))
    }

    fn from_mountinfo(text: &str) -> Self {
        let mut found = Self::default();
        for line in text.lines() {
            let Some((mount, source)) = line.split_once(" - ") else { continue };
            let mut source = source.split(' ');
            let (Some(kind), _, Some(options)) = (source.next(), source.next(), source.next()) else {
                continue;
            };
            // The root of the mount and where it is mounted: a part of a hierarchy is no place to begin.
            let mut mount = mount.split(' ').skip(3);
            let (Some("/"), Some(at)) = (mount.next(), mount.next()) else { continue };
            match kind {
                "cgroup2" if found.v2.is_none() => found.v2 = Some(at.into()),
                "cgroup" => {
                    let named = |option: &&str| {
                        let word = option.split('=').next().unwrap_or_default();
                        !NOT_CONTROLLERS.contains(&word)
                    };
                    let options: Vec<_> = options.split(',').filter(named).collect();
                    let options = options.join(",");
                    // The same hierarchy can be mounted in several places.
                    if !options.is_empty() && found.v1.iter().all(|(_, known)| *known != options) {
                        found.v1.push((at.into(), options));
                    }
                }
                _ => {}
            }
        }
        found
    }

    /// What a node gets that does not say: v1 where the machine has its controllers there.
    pub(super) fn usual(&self) -> Cgroups {
        if self.has_v1("devices") && self.has_v1("memory") { Cgroups::V1 } else { Cgroups::V2 }
    }

    fn has_v1(&self, controller: &str) -> bool {
        self.v1.iter().any(|(_, options)| options.split(',').any(|one| one == controller))
    }

    /// Can a node have these?
    pub(super) fn allow(&self, cgroups: Cgroups) -> Result<(), BedError> {
        let (there, asked, advice) = match cgroups {
            Cgroups::V1 => (self.usual() == Cgroups::V1, "v1", "ask for a v2 node"),
            Cgroups::V2 => {
                (self.v2.is_some(), "v2", "mount it: mount -t cgroup2 cgroup2 /sys/fs/cgroup/unified")
            }
        };
        if there {
            return Ok(());
        }
        let has = match (self.v1.is_empty(), &self.v2) {
            (true, None) => "the machine has no cgroups mounted at all".to_string(),
            (true, Some(at)) => format!("the machine has cgroup v2 only, at {}", at.display()),
            (false, _) => "the machine has not all of v1, or no v2".to_string(),
        };
        Err(BedError::NoCgroups { asked, has, advice })
    }

    /// Does a v2 node have the controllers that limits need?
    pub(super) fn v2_is_whole(&self) -> bool {
        let Some(at) = &self.v2 else { return false };
        let given = fs::read_to_string(at.join("cgroup.subtree_control")).unwrap_or_default();
        ["cpu", "memory", "pids"].iter().all(|one| given.split_whitespace().any(|word| word == *one))
    }

    /// The v1 mounts for a node's script, one word each; `v2` for the other kind.
    pub(super) fn words(&self, cgroups: Cgroups) -> String {
        match cgroups {
            Cgroups::V1 => self.v1.iter().map(|(_, options)| options.as_str()).collect::<Vec<_>>().join(" "),
            Cgroups::V2 => "v2".to_string(),
        }
    }

    /// Where the hierarchies are mounted.
    pub(super) fn roots(&self) -> impl Iterator<Item = &PathBuf> {
        self.v1.iter().map(|(at, _)| at).chain(&self.v2)
    }

    /// Where `name` is, or would be, in every hierarchy.
    pub(super) fn folders(&self, name: &str) -> Vec<PathBuf> {
        self.roots().map(|at| at.join(name)).collect()
    }

    /// Makes `name` in every hierarchy; the folders.
    pub(super) fn make(&self, name: &str) -> Result<Vec<PathBuf>, BedError> {
        let mounts = self.v1.iter().map(|(at, options)| (at, options.as_str()));
        let mounts = mounts.chain(self.v2.iter().map(|at| (at, "")));
        for (at, options) in mounts {
            let folder = at.join(name);
            make_below(at, &folder, options.split(',').any(|one| one == "cpuset"))
                .map_err(BedError::io(format!("making the cgroup {}", folder.display())))?;
        }
        Ok(self.folders(name))
    }

    /// In v2 a cgroup that hands controllers down may hold no process itself: its processes move into `below`.
    pub(super) fn make_leaf(&self, name: &str, below: &str) -> Result<Vec<PathBuf>, BedError> {
        let Some(at) = &self.v2 else { return Ok(self.folders(name)) };
        let (folder, leaf) = (at.join(name), at.join(name).join(below));
        let doing = || format!("making the cgroup {}", leaf.display());
        fs::create_dir_all(&leaf).map_err(BedError::io(doing()))?;
        // While one is moved it may fork: again until none is left, and hand_down says where that never happens.
        for _ in 0..100 {
            let inside = fs::read_to_string(folder.join("cgroup.procs")).map_err(BedError::io(doing()))?;
            if inside.is_empty() {
                break;
            }
            for process in inside.lines() {
                // One that ended meanwhile needs no moving.
                let _ = fs::write(leaf.join("cgroup.procs"), process);
            }
        }
        hand_down(&folder).map_err(BedError::io(doing()))?;
        let v1 = self.v1.iter().map(|(at, _)| at.join(name));
        Ok(v1.chain([leaf]).collect())
    }
}

/// Gives children every controller that the cgroup has itself.
fn hand_down(folder: &Path) -> std::io::Result<()> {
    for controller in fs::read_to_string(folder.join("cgroup.controllers"))?.split_whitespace() {
        fs::write(folder.join("cgroup.subtree_control"), format!("+{controller}"))?;
    }
    Ok(())
}

/// A cpuset takes no process before it was told its CPUs.
fn make_below(root: &Path, folder: &Path, fill: bool) -> std::io::Result<()> {
    fs::create_dir_all(folder)?;
    let Ok(below) = folder.strip_prefix(root) else { return Ok(()) };
    let mut parent = root.to_path_buf();
    for part in below.components() {
        let child = parent.join(part);
        if fill {
            for file in ["cpuset.cpus", "cpuset.mems"] {
                fs::write(child.join(file), fs::read(parent.join(file))?)?;
            }
        }
        // Not at the root, which is the machine's.
        if parent != root && parent.join("cgroup.controllers").exists() {
            hand_down(&parent)?;
        }
        parent = child;
    }
    Ok(())
}

/// Removes a cgroup and what is below; what still has processes stays.
pub(super) fn remove(folder: &Path) {
    for entry in fs::read_dir(folder).into_iter().flatten().flatten() {
        if entry.file_type().is_ok_and(|kind| kind.is_dir()) {
            remove(&entry.path());
        }
    }
    let _ = fs::remove_dir(folder);
}

#[cfg(test)]
mod tests {
    use super::*;

    const HYBRID: &str = "\
24 1 0:28 / /sys/fs/cgroup rw,relatime - tmpfs tmpfs rw,mode=755
25 24 0:29 / /sys/fs/cgroup/cpu,cpuacct rw,relatime - cgroup cgroup rw,cpu,cpuacct
26 24 0:32 / /sys/fs/cgroup/memory rw,relatime - cgroup cgroup rw,memory
27 24 0:33 / /sys/fs/cgroup/devices rw,relatime - cgroup cgroup rw,devices
28 24 0:37 / /sys/fs/cgroup/systemd rw,relatime - cgroup cgroup rw,xattr,release_agent=/x,name=systemd
29 24 0:38 / /sys/fs/cgroup/unified rw,relatime - cgroup2 cgroup2 rw
30 24 0:38 /part /mnt/part rw,relatime - cgroup2 cgroup2 rw
";

    #[test]
    fn a_hybrid_machine() {
        let found = Hierarchies::from_mountinfo(HYBRID);
        assert_eq!(found.words(Cgroups::V1), "cpu,cpuacct memory devices name=systemd");
        assert_eq!(found.v2.as_deref(), Some(Path::new("/sys/fs/cgroup/unified")));
        assert_eq!(found.usual(), Cgroups::V1);
        assert!(found.allow(Cgroups::V1).is_ok() && found.allow(Cgroups::V2).is_ok());
    }

    #[test]
    fn a_v2_machine_says_why_it_has_no_v1_node() {
        let found =
            Hierarchies::from_mountinfo("30 24 0:38 / /sys/fs/cgroup rw,relatime - cgroup2 cgroup2 rw\n");
        assert_eq!(found.usual(), Cgroups::V2);
        assert_eq!(
            found.allow(Cgroups::V1).unwrap_err().to_string(),
            "a node cannot have cgroup v1 here: the machine has cgroup v2 only, at /sys/fs/cgroup; ask for a v2 node"
        );
    }
}
