//! Detects the host's cgroup hierarchies and creates cgroups for beds in each of them.

use super::BedError;
use super::profile::CgroupVersion;
use std::fs;
use std::path::{Path, PathBuf};

/// The cgroup hierarchies that the host has mounted.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(super) struct Hierarchies {
    /// Mount point and options of each v1 hierarchy. The options are those that `mount` takes: `cpu,cpuacct`,
    /// `name=systemd`.
    v1: Vec<(PathBuf, String)>,
    v2: Option<PathBuf>,
}

/// Options of a v1 mount that are not controllers.
const NON_CONTROLLER_OPTIONS: &[&str] = &[
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
    pub(super) fn detect() -> Result<Self, BedError> {
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
            // Mounts of a subtree are skipped: beds need the root of a hierarchy.
            let mut mount = mount.split(' ').skip(3);
            let (Some("/"), Some(at)) = (mount.next(), mount.next()) else { continue };
            match kind {
                "cgroup2" if found.v2.is_none() => found.v2 = Some(at.into()),
                "cgroup" => {
                    let named = |option: &&str| {
                        let word = option.split('=').next().unwrap_or_default();
                        !NON_CONTROLLER_OPTIONS.contains(&word)
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

    /// Returns the version of a node whose profile does not set one: v1 if the host has its controllers there.
    pub(super) fn default_version(&self) -> CgroupVersion {
        if self.has_v1("devices") && self.has_v1("memory") { CgroupVersion::V1 } else { CgroupVersion::V2 }
    }

    fn has_v1(&self, controller: &str) -> bool {
        self.v1.iter().any(|(_, options)| options.split(',').any(|one| one == controller))
    }

    /// Checks that the host can provide this version to a node.
    pub(super) fn check_available(&self, cgroups: CgroupVersion) -> Result<(), BedError> {
        let (there, asked, advice) = match cgroups {
            CgroupVersion::V1 => (self.default_version() == CgroupVersion::V1, "v1", "request a v2 node"),
            CgroupVersion::V2 => {
                (self.v2.is_some(), "v2", "mount it: mount -t cgroup2 cgroup2 /sys/fs/cgroup/unified")
            }
        };
        if there {
            return Ok(());
        }
        let has = match (self.v1.is_empty(), &self.v2) {
            (true, None) => "no cgroups are mounted on this host".to_string(),
            (true, Some(at)) => format!("this host has cgroup v2 only, at {}", at.display()),
            (false, _) => "this host lacks some v1 controllers, or v2".to_string(),
        };
        Err(BedError::NoCgroups { asked, has, advice })
    }

    /// Returns whether a v2 node has the controllers that limits need.
    pub(super) fn v2_has_all_controllers(&self) -> bool {
        let Some(at) = &self.v2 else { return false };
        let given = fs::read_to_string(at.join("cgroup.subtree_control")).unwrap_or_default();
        ["cpu", "memory", "pids"].iter().all(|one| given.split_whitespace().any(|word| word == *one))
    }

    /// Returns the v1 mount options for a node's script, one word per mount; `v2` for v2.
    pub(super) fn mount_options(&self, cgroups: CgroupVersion) -> String {
        match cgroups {
            CgroupVersion::V1 => {
                self.v1.iter().map(|(_, options)| options.as_str()).collect::<Vec<_>>().join(" ")
            }
            CgroupVersion::V2 => "v2".to_string(),
        }
    }

    /// Returns the mount points of all hierarchies.
    pub(super) fn roots(&self) -> impl Iterator<Item = &PathBuf> {
        self.v1.iter().map(|(at, _)| at).chain(&self.v2)
    }

    /// Returns the directory of `name` in every hierarchy, whether or not it exists.
    pub(super) fn directories(&self, name: &str) -> Vec<PathBuf> {
        self.roots().map(|at| at.join(name)).collect()
    }

    /// Creates `name` in every hierarchy and returns the directories.
    pub(super) fn create(&self, name: &str) -> Result<Vec<PathBuf>, BedError> {
        let mounts = self.v1.iter().map(|(at, options)| (at, options.as_str()));
        let mounts = mounts.chain(self.v2.iter().map(|at| (at, "")));
        for (at, options) in mounts {
            let folder = at.join(name);
            create_below(at, &folder, options.split(',').any(|one| one == "cpuset"))
                .map_err(BedError::io(format!("creating the cgroup {}", folder.display())))?;
        }
        Ok(self.directories(name))
    }

    /// In v2 a cgroup that delegates controllers cannot hold processes itself: its processes move into `below`.
    pub(super) fn create_leaf(&self, name: &str, below: &str) -> Result<Vec<PathBuf>, BedError> {
        let Some(at) = &self.v2 else { return Ok(self.directories(name)) };
        let (folder, leaf) = (at.join(name), at.join(name).join(below));
        let doing = || format!("creating the cgroup {}", leaf.display());
        fs::create_dir_all(&leaf).map_err(BedError::io(doing()))?;
        // A process may fork while it is moved, so this repeats until none is left. If that never happens, enabling the
        // controllers fails below.
        for _ in 0..100 {
            let inside = fs::read_to_string(folder.join("cgroup.procs")).map_err(BedError::io(doing()))?;
            if inside.is_empty() {
                break;
            }
            for process in inside.lines() {
                // A process that has exited cannot be moved.
                let _ = fs::write(leaf.join("cgroup.procs"), process);
            }
        }
        enable_subtree_controllers(&folder).map_err(BedError::io(doing()))?;
        let v1 = self.v1.iter().map(|(at, _)| at.join(name));
        Ok(v1.chain([leaf]).collect())
    }
}

/// Delegates every controller of the cgroup to its children.
fn enable_subtree_controllers(folder: &Path) -> std::io::Result<()> {
    for controller in fs::read_to_string(folder.join("cgroup.controllers"))?.split_whitespace() {
        fs::write(folder.join("cgroup.subtree_control"), format!("+{controller}"))?;
    }
    Ok(())
}

/// Creates the directories from `root` to `folder`. A cpuset accepts no process until its CPUs are set.
fn create_below(root: &Path, folder: &Path, fill: bool) -> std::io::Result<()> {
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
        // The root belongs to the host.
        if parent != root && parent.join("cgroup.controllers").exists() {
            enable_subtree_controllers(&parent)?;
        }
        parent = child;
    }
    Ok(())
}

/// Removes a cgroup and its children; those that still have processes stay.
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
    fn hybrid_host_defaults_to_v1_and_offers_both() {
        let found = Hierarchies::from_mountinfo(HYBRID);
        assert_eq!(found.mount_options(CgroupVersion::V1), "cpu,cpuacct memory devices name=systemd");
        assert_eq!(found.v2.as_deref(), Some(Path::new("/sys/fs/cgroup/unified")));
        assert_eq!(found.default_version(), CgroupVersion::V1);
        assert!(
            found.check_available(CgroupVersion::V1).is_ok()
                && found.check_available(CgroupVersion::V2).is_ok()
        );
    }

    #[test]
    fn v1_node_on_v2_host_is_refused_with_the_reason() {
        let found =
            Hierarchies::from_mountinfo("30 24 0:38 / /sys/fs/cgroup rw,relatime - cgroup2 cgroup2 rw\n");
        assert_eq!(found.default_version(), CgroupVersion::V2);
        assert_eq!(
            found.check_available(CgroupVersion::V1).unwrap_err().to_string(),
            "cgroup v1 is not available for a node: this host has cgroup v2 only, at /sys/fs/cgroup; request a v2 node"
        );
    }
}
