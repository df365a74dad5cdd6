//! Finds the processes of a share, and ends them.

mod process_index;

pub use process_index::{ProcessIndex, members_of_shares};

use crate::cgroup::Cgroup;
use crate::process::{self, ProcessIdentity};
use rustix::event::{PollFd, PollFlags, poll};
use rustix::process::Signal;
use rustix::time::Timespec;
use serde::{Deserialize, Serialize};
use std::collections::BTreeSet;
use std::fs;
use std::io::{self, ErrorKind};
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

/// How long the kernel may take to end killed processes.
const KILL_TIMEOUT: Duration = Duration::from_secs(10);
/// Interval between rounds of killing: processes that were started meanwhile are killed in the next round.
const KILL_ROUND_INTERVAL: Duration = Duration::from_millis(50);

/// A property that all processes of a share have and that their children inherit.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub enum Membership {
    /// The processes are in this mount namespace. The kernel reuses its inode number after the last process has exited:
    /// drop the value with the share, or use [`Membership::Region`].
    MountNamespace {
        /// The device number of the namespace's file.
        device: u64,
        /// The inode number of the namespace's file.
        inode: u64,
    },
    /// The processes see this file at this path. It also holds in mount namespaces that they create, and no other
    /// process has it by chance as long as the file exists.
    Region {
        /// The path at which the processes see the file.
        at: PathBuf,
        /// The device number of the file.
        device: u64,
        /// The inode number of the file.
        inode: u64,
    },
    /// The processes were started with this environment variable. `env -i` removes it.
    Variable {
        /// The name of the variable.
        name: String,
        /// The value of the variable.
        value: String,
    },
    /// The processes are in this cgroup or one below it.
    Cgroup(Cgroup),
}

/// How the processes of a share ended.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct EndedProcesses {
    /// The number of processes that exited after SIGTERM.
    pub ended: usize,
    /// The number of processes that had to be killed.
    pub killed: usize,
}

/// Returns the membership of all processes in the mount namespace of a process.
pub fn mount_namespace_membership(pid: u32) -> io::Result<Membership> {
    let (device, inode) = file_id(Path::new(&format!("/proc/{pid}/ns/mnt")))?;
    Ok(Membership::MountNamespace { device, inode })
}

/// Returns the membership of all processes that see, at the path `at`, the file that this process sees at `file`.
pub fn region_membership(file: &Path, at: &Path) -> io::Result<Membership> {
    let (device, inode) = file_id(file)?;
    Ok(Membership::Region { at: at.into(), device, inode })
}

/// Returns all running processes that have one of the memberships. Processes that this one may not inspect are found
/// only by cgroup.
pub fn find_members(memberships: &[Membership]) -> io::Result<Vec<ProcessIdentity>> {
    let found = scan(memberships)?;
    // A process may fork and exit while `/proc` is read, and the child may have a pid that was passed already.
    let found = if found.is_empty() { scan(memberships)? } else { found };
    Ok(found.into_iter().collect())
}

fn scan(memberships: &[Membership]) -> io::Result<BTreeSet<ProcessIdentity>> {
    let mut found = BTreeSet::new();
    let mut by_look = Vec::new();
    for membership in memberships {
        match membership {
            Membership::Cgroup(cgroup) => {
                found.extend(cgroup.pids()?.into_iter().filter_map(ProcessIdentity::of_running))
            }
            membership => by_look.push(membership),
        }
    }
    if by_look.is_empty() {
        return Ok(found);
    }
    for pid in pids()? {
        let is_member = || by_look.iter().any(|membership| membership.includes(pid));
        // Most processes have none, and reading the identity costs more than this check.
        if !is_member() {
            continue;
        }
        // The identity is read before the membership is checked again: the pid may be reused meanwhile.
        let Some(identity) = ProcessIdentity::of_running(pid) else { continue };
        if is_member() && identity.is_running() {
            found.insert(identity);
        }
    }
    Ok(found)
}

/// Returns the pids of all processes that this one sees.
pub(crate) fn pids() -> io::Result<Vec<u32>> {
    let mut pids = Vec::new();
    for entry in fs::read_dir("/proc")? {
        pids.extend(entry?.file_name().to_str().and_then(|name| name.parse::<u32>().ok()));
    }
    Ok(pids)
}

/// Returns the path to a file as another process sees it.
fn root_of(pid: u32, at: &Path) -> PathBuf {
    let mut path = PathBuf::from(format!("/proc/{pid}/root"));
    path.extend(at.strip_prefix("/"));
    path
}

impl Membership {
    /// Returns whether a process has this membership; `false` if the process cannot be inspected.
    pub fn includes(&self, pid: u32) -> bool {
        let is = |path: String, id: (u64, u64)| file_id(Path::new(&path)).is_ok_and(|found| found == id);
        match self {
            Self::MountNamespace { device, inode } => is(format!("/proc/{pid}/ns/mnt"), (*device, *inode)),
            Self::Region { at, device, inode } => {
                file_id(&root_of(pid, at)).is_ok_and(|found| found == (*device, *inode))
            }
            Self::Variable { name, value } => {
                let set = format!("{name}={value}");
                fs::read(format!("/proc/{pid}/environ"))
                    .is_ok_and(|all| all.split(|byte| *byte == 0).any(|one| one == set.as_bytes()))
            }
            Self::Cgroup(cgroup) => cgroup.pids().is_ok_and(|pids| pids.contains(&pid)),
        }
    }
}

fn file_id(path: &Path) -> io::Result<(u64, u64)> {
    let file = fs::metadata(path)?;
    Ok((file.dev(), file.ino()))
}

/// Ends all processes that have one of the memberships and that `may` accepts, except for this process: sends SIGTERM,
/// waits for the grace period, then kills the remaining ones and those that they started meanwhile.
pub fn end_members(
    memberships: &[Membership],
    may: &dyn Fn(&ProcessIdentity) -> bool,
    grace: Duration,
) -> io::Result<EndedProcesses> {
    let own = std::process::id();
    let left = || -> io::Result<Vec<ProcessIdentity>> {
        Ok(find_members(memberships)?.into_iter().filter(|one| one.pid != own && may(one)).collect())
    };
    let mut asked = BTreeSet::new();
    let mut killed = BTreeSet::new();
    let mut now = left()?;
    // The grace period starts when the processes are known: finding them may take long.
    let until = Instant::now() + grace;
    while !grace.is_zero() && !now.is_empty() {
        for one in now.iter().filter(|one| asked.insert(**one)) {
            send(one, Signal::TERM)?;
            // A stopped process would not handle SIGTERM.
            send(one, Signal::CONT)?;
        }
        wait(&now, until)?;
        now = left()?;
        if Instant::now() >= until {
            break;
        }
    }
    let until = Instant::now() + KILL_TIMEOUT;
    while !now.is_empty() {
        if Instant::now() >= until {
            return Err(kill_timeout_error(&now));
        }
        kill_cgroups(memberships, &now)?;
        for one in &now {
            killed.insert(*one);
            send(one, Signal::KILL)?;
        }
        wait(&now, Instant::now() + KILL_ROUND_INTERVAL)?;
        now = left()?;
    }
    let ended = EndedProcesses { ended: asked.difference(&killed).count(), killed: killed.len() };
    tracing::debug!(ended = ended.ended, killed = ended.killed, "processes ended");
    Ok(ended)
}

/// Kills cgroups as a whole, so that no process in them can fork faster than it is listed. A cgroup with a process that
/// must not be killed is skipped.
fn kill_cgroups(memberships: &[Membership], may: &[ProcessIdentity]) -> io::Result<()> {
    for membership in memberships {
        if let Membership::Cgroup(cgroup) = membership {
            let all = cgroup.pids()?;
            let known = |pid: &u32| {
                may.iter().any(|one| one.pid == *pid) || ProcessIdentity::of_running(*pid).is_none()
            };
            if all.iter().all(known) {
                cgroup.kill()?;
            }
        }
    }
    Ok(())
}

/// Sends a signal. A process that has exited is ignored; one that may not be signaled is reported at the end.
fn send(one: &ProcessIdentity, signal: Signal) -> io::Result<()> {
    match one.signal(signal) {
        Ok(()) => Ok(()),
        Err(error) if matches!(error.kind(), ErrorKind::NotFound | ErrorKind::PermissionDenied) => Ok(()),
        Err(error) => Err(error),
    }
}

/// Waits until all processes have exited or the deadline has passed. Waiting for one after the other needs a single
/// descriptor.
fn wait(all: &[ProcessIdentity], until: Instant) -> io::Result<()> {
    for one in all {
        let fd = match one.pidfd() {
            Ok(fd) => fd,
            Err(error) if error.kind() == ErrorKind::NotFound => continue,
            Err(error) => return Err(error),
        };
        loop {
            let left = until.saturating_duration_since(Instant::now());
            if left.is_zero() {
                return Ok(());
            }
            let left = Timespec::try_from(left).unwrap_or(Timespec { tv_sec: i64::MAX, tv_nsec: 0 });
            match poll(&mut [PollFd::new(&fd, PollFlags::IN)], Some(&left)) {
                Ok(0) | Err(rustix::io::Errno::INTR) => {}
                Ok(_) => break,
                Err(error) => return Err(error.into()),
            }
        }
    }
    Ok(())
}

fn kill_timeout_error(left: &[ProcessIdentity]) -> io::Error {
    let names: Vec<String> = left
        .iter()
        .take(5)
        .map(|one| format!("{} ({})", one.pid, process::command_name(one.pid).unwrap_or_else(|| "?".into())))
        .collect();
    let more = if left.len() > names.len() { ", …" } else { "" };
    io::Error::new(
        ErrorKind::TimedOut,
        format!(
            "{} processes still run {} s after SIGKILL: {}{more}; they wait for a device or belong to \
             another user: inspect them with `ps -o pid,user,stat,wchan`, then retry",
            left.len(),
            KILL_TIMEOUT.as_secs(),
            names.join(", ")
        ),
    )
}

#[cfg(test)]
mod tests;
