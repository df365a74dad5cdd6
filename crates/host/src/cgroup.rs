//! A cgroup for the processes of a share: it holds them together, and closes devices to them.

mod devices;
pub(crate) mod tables;

use serde::{Deserialize, Serialize};
use std::fs;
use std::io::{self, ErrorKind};
use std::path::{Path, PathBuf};
use std::thread::sleep;
use std::time::{Duration, Instant};
use tables::{Membership, Mount};

/// How long the kernel may take to notice that the last process has left.
const REMOVE_LIMIT: Duration = Duration::from_secs(2);
const PROCS: &str = "cgroup.procs";

/// Which of the kernel's trees of cgroups.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub enum Hierarchy {
    /// The one tree of cgroup v2.
    Unified,
    /// The tree of cgroup v1 that has the controller `devices`.
    Devices,
}

/// One cgroup. It can be written down and used again by a later process.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Cgroup {
    hierarchy: Hierarchy,
    folder: PathBuf,
}

/// What went wrong with a cgroup.
#[derive(Debug, thiserror::Error)]
pub enum CgroupError {
    /// The name cannot be one of a folder.
    #[error("a cgroup cannot be named {0:?}: use letters, digits, `-`, `_` and `.`, not beginning with `.`")]
    Name(String),
    /// A cgroup of that name has processes.
    #[error(
        "the cgroup {} has processes ({}); end them first",
        folder.display(), pids.iter().map(u32::to_string).collect::<Vec<_>>().join(", ")
    )]
    InUse {
        /// The cgroup.
        folder: PathBuf,
        /// Its processes.
        pids: Vec<u32>,
    },
    /// The kernel does not let this process close devices.
    #[error(
        "{count} devices cannot be closed to the cgroup {}: {source}; it takes root, and a kernel with CONFIG_CGROUP_BPF \
         (cgroup v2) or CONFIG_CGROUP_DEVICE (v1)",
        folder.display()
    )]
    Devices {
        /// The cgroup.
        folder: PathBuf,
        /// How many should be closed.
        count: usize,
        /// What the kernel said.
        source: io::Error,
    },
    /// The file system refused.
    #[error("{doing}: {source}")]
    Io {
        /// What was being done.
        doing: String,
        /// What it said.
        source: io::Error,
    },
}

impl CgroupError {
    fn io(doing: impl Into<String>) -> impl FnOnce(io::Error) -> Self {
        let doing = doing.into();
        move |source| Self::Io { doing, source }
    }
}

impl Cgroup {
    /// A new cgroup below the one in which the process `beside` is: in cgroup v2 where it is mounted, else in the tree
    /// `devices` of v1. None where there is neither or this process may not make one. An empty one of this name is
    /// made anew, so that nothing of an earlier share is left on it.
    pub fn make(name: &str, beside: u32) -> Result<Option<Self>, CgroupError> {
        Ok(match Self::make_in(Hierarchy::Unified, name, beside)? {
            Some(made) => Some(made),
            None => Self::make_in(Hierarchy::Devices, name, beside)?,
        })
    }

    /// As [`Cgroup::make`], in one tree only.
    pub fn make_in(hierarchy: Hierarchy, name: &str, beside: u32) -> Result<Option<Self>, CgroupError> {
        if !sound(name) {
            return Err(CgroupError::Name(name.into()));
        }
        let Some(parent) = place(hierarchy, beside)? else { return Ok(None) };
        let made = Self { hierarchy, folder: parent.join(name) };
        match fs::create_dir(&made.folder) {
            Err(error) if error.kind() == ErrorKind::AlreadyExists => {
                made.remove()?;
                match fs::create_dir(&made.folder) {
                    Err(error) if refused(&error) => Ok(None),
                    Err(error) => Err(CgroupError::io(format!("making {}", made.folder.display()))(error)),
                    Ok(()) => Ok(Some(made)),
                }
            }
            Err(error) if refused(&error) => Ok(None),
            Err(error) => Err(CgroupError::io(format!("making {}", made.folder.display()))(error)),
            Ok(()) => Ok(Some(made)),
        }
    }

    /// In which tree it is.
    pub fn hierarchy(&self) -> Hierarchy {
        self.hierarchy
    }

    /// Where it is.
    pub fn folder(&self) -> &Path {
        &self.folder
    }

    /// Moves a process into it, with all its threads. Its children follow; those it already has do not.
    pub fn take(&self, pid: u32) -> Result<(), CgroupError> {
        fs::write(self.folder.join(PROCS), pid.to_string())
            .map_err(CgroupError::io(format!("moving process {pid} into {}", self.folder.display())))
    }

    /// Moves its processes into the cgroup above, where they came from: they go on without it. One that ends meanwhile needs
    /// no move.
    pub fn let_go(&self) -> io::Result<()> {
        let Some(above) = self.folder.parent() else { return Ok(()) };
        for pid in self.pids()? {
            match fs::write(above.join(PROCS), pid.to_string()) {
                Err(error) if !gone(&error) && error.raw_os_error() != Some(libc::ESRCH) => {
                    return Err(error);
                }
                _ => {}
            }
        }
        Ok(())
    }

    /// The processes in it and in all cgroups below; none if it is gone.
    pub fn pids(&self) -> io::Result<Vec<u32>> {
        let mut pids = Vec::new();
        each(&self.folder, &mut |folder| match fs::read_to_string(folder.join(PROCS)) {
            Ok(text) => {
                // A process of another pid namespace is shown as 0.
                pids.extend(text.lines().filter_map(|line| line.parse().ok()).filter(|pid: &u32| *pid != 0));
                Ok(())
            }
            // A cgroup of threads shows its processes one level up.
            Err(error) if error.raw_os_error() == Some(libc::EOPNOTSUPP) || gone(&error) => Ok(()),
            Err(error) => Err(error),
        })?;
        pids.sort_unstable();
        pids.dedup();
        Ok(pids)
    }

    /// Whether it is there.
    pub fn exists(&self) -> bool {
        self.folder.join(PROCS).exists()
    }

    /// Kills all that is in it and below, at once. False where the kernel cannot: cgroup v1, and v2 before Linux 5.14.
    pub fn kill(&self) -> io::Result<bool> {
        if self.hierarchy == Hierarchy::Devices {
            return Ok(false);
        }
        match fs::OpenOptions::new().write(true).open(self.folder.join("cgroup.kill")) {
            Err(error) if gone(&error) || refused(&error) => Ok(false),
            Err(error) => Err(error),
            Ok(mut file) => match io::Write::write_all(&mut file, b"1") {
                Err(error) if gone(&error) => Ok(false),
                other => other.map(|()| true),
            },
        }
    }

    /// Removes it and all cgroups below. Fine if it is gone already.
    pub fn remove(&self) -> Result<(), CgroupError> {
        let until = Instant::now() + REMOVE_LIMIT;
        loop {
            let removed = each(&self.folder, &mut |folder| match fs::remove_dir(folder) {
                Err(error) if gone(&error) => Ok(()),
                other => other,
            });
            let doing = || format!("removing {}", self.folder.display());
            match removed {
                Ok(()) => return Ok(()),
                Err(error) if error.kind() == ErrorKind::ResourceBusy => {
                    let pids = self.pids().map_err(CgroupError::io(doing()))?;
                    if !pids.is_empty() {
                        return Err(CgroupError::InUse { folder: self.folder.clone(), pids });
                    }
                    if Instant::now() >= until {
                        return Err(CgroupError::io(doing())(error));
                    }
                    sleep(Duration::from_millis(5));
                }
                Err(error) => return Err(CgroupError::io(doing())(error)),
            }
        }
    }

    /// Closes character devices, each a major and a minor number, to all that is in it and below; all others stay as
    /// they were. What was closed before stays closed. Files that are open already stay open.
    pub fn close_devices(&self, devices: &[(u32, u32)]) -> Result<(), CgroupError> {
        if devices.is_empty() {
            return Ok(());
        }
        let closed = match self.hierarchy {
            Hierarchy::Unified => devices::attach(&self.folder, devices),
            Hierarchy::Devices => devices::deny(&self.folder, devices),
        };
        let count = devices.len();
        closed.map_err(|source| CgroupError::Devices { folder: self.folder.clone(), count, source })?;
        tracing::debug!(cgroup = %self.folder.display(), devices = count, "device files closed");
        Ok(())
    }
}

/// The folder of the cgroup of a process in a tree; none where the tree is not mounted, or not that part of it.
fn place(hierarchy: Hierarchy, pid: u32) -> Result<Option<PathBuf>, CgroupError> {
    let read = |path: String| fs::read(&path).map_err(CgroupError::io(format!("reading {path}")));
    let mounts = tables::mounts(&read("/proc/self/mountinfo".into())?);
    let memberships = tables::memberships(&read(format!("/proc/{pid}/cgroup"))?);
    Ok(folder(hierarchy, &mounts, &memberships).filter(|folder| folder.join(PROCS).exists()))
}

fn folder(hierarchy: Hierarchy, mounts: &[Mount], memberships: &[Membership]) -> Option<PathBuf> {
    let (kind, controller) = match hierarchy {
        Hierarchy::Unified => ("cgroup2", None),
        Hierarchy::Devices => ("cgroup", Some("devices")),
    };
    let path = &memberships.iter().find(|one| match controller {
        None => one.id == 0 && one.controllers.is_empty(),
        Some(name) => one.controllers.iter().any(|has| has == name),
    })?;
    mounts
        .iter()
        .filter(|mount| mount.kind == kind)
        .filter(|mount| controller.is_none_or(|name| mount.options.iter().any(|option| option == name)))
        .find_map(|mount| mount.find(&path.path))
}

/// A folder and all below, the deepest first.
fn each(folder: &Path, run: &mut dyn FnMut(&Path) -> io::Result<()>) -> io::Result<()> {
    match fs::read_dir(folder) {
        Err(error) if gone(&error) => return Ok(()),
        Err(error) => return Err(error),
        Ok(entries) => {
            for entry in entries {
                let entry = match entry {
                    Err(error) if gone(&error) => break,
                    entry => entry?,
                };
                if entry.file_type().is_ok_and(|kind| kind.is_dir()) {
                    each(&entry.path(), run)?;
                }
            }
        }
    }
    run(folder)
}

fn sound(name: &str) -> bool {
    let allowed = |c: char| c.is_ascii_alphanumeric() || matches!(c, '-' | '_' | '.');
    !name.is_empty() && name.len() <= 200 && !name.starts_with('.') && name.chars().all(allowed)
}

/// A cgroup that is removed while it is read says ENODEV.
fn gone(error: &io::Error) -> bool {
    error.kind() == ErrorKind::NotFound || error.raw_os_error() == Some(libc::ENODEV)
}

fn refused(error: &io::Error) -> bool {
    matches!(error.kind(), ErrorKind::PermissionDenied | ErrorKind::ReadOnlyFilesystem)
}

#[cfg(test)]
mod tests;
