//! Creates a cgroup for the processes of a share: it groups them, and denies them access to device files.

mod device_filter;
pub(crate) mod proc_mounts;

use proc_mounts::{CgroupMembership, MountEntry};
use serde::{Deserialize, Serialize};
use std::fs;
use std::io::{self, ErrorKind};
use std::path::{Path, PathBuf};
use std::thread::sleep;
use std::time::{Duration, Instant};

/// How long the kernel may take to notice that the last process has exited.
const REMOVE_TIMEOUT: Duration = Duration::from_secs(2);
const PROCS_FILE: &str = "cgroup.procs";

/// A cgroup hierarchy of the kernel.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub enum Hierarchy {
    /// The unified hierarchy of cgroup v2.
    Unified,
    /// The hierarchy of cgroup v1 with the controller `devices`.
    Devices,
}

/// A cgroup. It can be serialized, and used by a later process.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Cgroup {
    hierarchy: Hierarchy,
    folder: PathBuf,
}

/// Why an operation on a cgroup failed.
#[derive(Debug, thiserror::Error)]
pub enum CgroupError {
    /// The name is not a valid directory name.
    #[error("invalid cgroup name {0:?}: use letters, digits, `-`, `_` and `.`, not starting with `.`")]
    InvalidName(String),
    /// The cgroup contains processes.
    #[error(
        "cgroup {} has processes ({}); end them first",
        folder.display(), pids.iter().map(u32::to_string).collect::<Vec<_>>().join(", ")
    )]
    InUse {
        /// The path of the cgroup.
        folder: PathBuf,
        /// The processes in it.
        pids: Vec<u32>,
    },
    /// The kernel refuses the device filter.
    #[error(
        "cannot deny {count} devices to cgroup {}; this requires root, and a kernel with CONFIG_CGROUP_BPF (cgroup v2) or \
         CONFIG_CGROUP_DEVICE (v1)",
        folder.display()
    )]
    DeviceFilter {
        /// The path of the cgroup.
        folder: PathBuf,
        /// The number of devices to deny.
        count: usize,
        /// The error of the kernel.
        source: io::Error,
    },
    /// A file operation on the cgroup failed.
    #[error("{doing}: {source}")]
    Io {
        /// The operation that failed.
        doing: String,
        /// The error of the system.
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
    /// Creates a cgroup below that of the process `beside`: in cgroup v2 if it is mounted, else in the hierarchy
    /// `devices` of v1. Returns `None` if neither is mounted or this process may not create one. An empty cgroup of
    /// this name is replaced, so that no filter of an earlier share stays on it.
    pub fn create(name: &str, beside: u32) -> Result<Option<Self>, CgroupError> {
        Ok(match Self::create_in(Hierarchy::Unified, name, beside)? {
            Some(made) => Some(made),
            None => Self::create_in(Hierarchy::Devices, name, beside)?,
        })
    }

    /// Creates a cgroup as [`Cgroup::create`] does, but only in the given hierarchy.
    pub fn create_in(hierarchy: Hierarchy, name: &str, beside: u32) -> Result<Option<Self>, CgroupError> {
        if !is_valid_name(name) {
            return Err(CgroupError::InvalidName(name.into()));
        }
        let Some(parent) = cgroup_dir_of(hierarchy, beside)? else { return Ok(None) };
        let made = Self { hierarchy, folder: parent.join(name) };
        match fs::create_dir(&made.folder) {
            Err(error) if error.kind() == ErrorKind::AlreadyExists => {
                made.remove()?;
                match fs::create_dir(&made.folder) {
                    Err(error) if is_refused(&error) => Ok(None),
                    Err(error) => Err(CgroupError::io(format!("creating {}", made.folder.display()))(error)),
                    Ok(()) => Ok(Some(made)),
                }
            }
            Err(error) if is_refused(&error) => Ok(None),
            Err(error) => Err(CgroupError::io(format!("creating {}", made.folder.display()))(error)),
            Ok(()) => Ok(Some(made)),
        }
    }

    /// Returns the hierarchy of the cgroup.
    pub fn hierarchy(&self) -> Hierarchy {
        self.hierarchy
    }

    /// Returns the directory of the cgroup.
    pub fn path(&self) -> &Path {
        &self.folder
    }

    /// Moves a process with all its threads into the cgroup. Children that it starts later are in it, too; children
    /// that it already has are not moved.
    pub fn add_process(&self, pid: u32) -> Result<(), CgroupError> {
        fs::write(self.folder.join(PROCS_FILE), pid.to_string())
            .map_err(CgroupError::io(format!("moving process {pid} into {}", self.folder.display())))
    }

    /// Moves all processes back into the parent cgroup. Processes that exit meanwhile are ignored.
    pub fn move_to_parent(&self) -> io::Result<()> {
        let Some(above) = self.folder.parent() else { return Ok(()) };
        for pid in self.pids()? {
            match fs::write(above.join(PROCS_FILE), pid.to_string()) {
                Err(error) if !is_gone(&error) && error.raw_os_error() != Some(libc::ESRCH) => {
                    return Err(error);
                }
                _ => {}
            }
        }
        Ok(())
    }

    /// Returns the processes in the cgroup and in all cgroups below it; none if it does not exist.
    pub fn pids(&self) -> io::Result<Vec<u32>> {
        let mut pids = Vec::new();
        visit_bottom_up(&self.folder, &mut |folder| match fs::read_to_string(folder.join(PROCS_FILE)) {
            Ok(text) => {
                // A process of another pid namespace is shown as 0.
                pids.extend(text.lines().filter_map(|line| line.parse().ok()).filter(|pid: &u32| *pid != 0));
                Ok(())
            }
            // A threaded cgroup lists its processes in its parent.
            Err(error) if error.raw_os_error() == Some(libc::EOPNOTSUPP) || is_gone(&error) => Ok(()),
            Err(error) => Err(error),
        })?;
        pids.sort_unstable();
        pids.dedup();
        Ok(pids)
    }

    /// Returns whether the cgroup exists.
    pub fn exists(&self) -> bool {
        self.folder.join(PROCS_FILE).exists()
    }

    /// Kills all processes in the cgroup and below it at once. Returns `false` if the kernel cannot: cgroup v1, and
    /// v2 before Linux 5.14.
    pub fn kill(&self) -> io::Result<bool> {
        if self.hierarchy == Hierarchy::Devices {
            return Ok(false);
        }
        match fs::OpenOptions::new().write(true).open(self.folder.join("cgroup.kill")) {
            Err(error) if is_gone(&error) || is_refused(&error) => Ok(false),
            Err(error) => Err(error),
            Ok(mut file) => match io::Write::write_all(&mut file, b"1") {
                Err(error) if is_gone(&error) => Ok(false),
                other => other.map(|()| true),
            },
        }
    }

    /// Removes the cgroup and all cgroups below it. Succeeds if it does not exist.
    pub fn remove(&self) -> Result<(), CgroupError> {
        let until = Instant::now() + REMOVE_TIMEOUT;
        loop {
            let removed = visit_bottom_up(&self.folder, &mut |folder| match fs::remove_dir(folder) {
                Err(error) if is_gone(&error) => Ok(()),
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

    /// Denies access to character devices, given as major and minor numbers, to all processes in the cgroup and below
    /// it. Devices that were denied before stay denied, and all others stay as they were. Open files stay open.
    pub fn deny_devices(&self, devices: &[(u32, u32)]) -> Result<(), CgroupError> {
        if devices.is_empty() {
            return Ok(());
        }
        let closed = match self.hierarchy {
            Hierarchy::Unified => device_filter::attach_v2(&self.folder, devices),
            Hierarchy::Devices => device_filter::deny_v1(&self.folder, devices),
        };
        let count = devices.len();
        closed.map_err(|source| CgroupError::DeviceFilter { folder: self.folder.clone(), count, source })?;
        tracing::debug!(cgroup = %self.folder.display(), devices = count, "devices denied");
        Ok(())
    }
}

/// Returns the directory of a process's cgroup in a hierarchy; `None` if the hierarchy, or that part of it, is not
/// mounted.
fn cgroup_dir_of(hierarchy: Hierarchy, pid: u32) -> Result<Option<PathBuf>, CgroupError> {
    let read = |path: String| fs::read(&path).map_err(CgroupError::io(format!("reading {path}")));
    let mounts = proc_mounts::parse_mountinfo(&read("/proc/self/mountinfo".into())?);
    let memberships = proc_mounts::parse_cgroups(&read(format!("/proc/{pid}/cgroup"))?);
    Ok(find_cgroup_dir(hierarchy, &mounts, &memberships).filter(|folder| folder.join(PROCS_FILE).exists()))
}

fn find_cgroup_dir(
    hierarchy: Hierarchy,
    mounts: &[MountEntry],
    memberships: &[CgroupMembership],
) -> Option<PathBuf> {
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

/// Visits a directory and all directories below it, the deepest first.
fn visit_bottom_up(folder: &Path, run: &mut dyn FnMut(&Path) -> io::Result<()>) -> io::Result<()> {
    match fs::read_dir(folder) {
        Err(error) if is_gone(&error) => return Ok(()),
        Err(error) => return Err(error),
        Ok(entries) => {
            for entry in entries {
                let entry = match entry {
                    Err(error) if is_gone(&error) => break,
                    entry => entry?,
                };
                if entry.file_type().is_ok_and(|kind| kind.is_dir()) {
                    visit_bottom_up(&entry.path(), run)?;
                }
            }
        }
    }
    run(folder)
}

fn is_valid_name(name: &str) -> bool {
    let allowed = |c: char| c.is_ascii_alphanumeric() || matches!(c, '-' | '_' | '.');
    !name.is_empty() && name.len() <= 200 && !name.starts_with('.') && name.chars().all(allowed)
}

/// Returns whether an error means that the cgroup does not exist. Reading one that is being removed fails with ENODEV.
fn is_gone(error: &io::Error) -> bool {
    error.kind() == ErrorKind::NotFound || error.raw_os_error() == Some(libc::ENODEV)
}

fn is_refused(error: &io::Error) -> bool {
    matches!(error.kind(), ErrorKind::PermissionDenied | ErrorKind::ReadOnlyFilesystem)
}

#[cfg(test)]
mod tests;
