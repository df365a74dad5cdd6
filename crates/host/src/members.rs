//! Which processes belong to a share, and how they are ended.

mod census;

pub use census::{Census, census};

use crate::cgroup::Cgroup;
use crate::process::{self, Identity};
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

/// How long the kernel may take to end what was killed.
const KILL_LIMIT: Duration = Duration::from_secs(10);
/// How long one round of killing waits before it looks again.
const ROUND: Duration = Duration::from_millis(50);

/// What all processes of a share have, and their children inherit.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub enum Mark {
    /// They are in this mount namespace. The kernel gives its number to another one after the last process left: forget
    /// the mark with the share, or use [`Mark::Region`].
    MountNamespace {
        /// The device of the namespace's file.
        device: u64,
        /// The number of the namespace's file.
        inode: u64,
    },
    /// They see this file there. It holds in mount namespaces that they make themselves, and no other process has it by
    /// chance as long as the file exists.
    Region {
        /// Where they see it.
        at: PathBuf,
        /// The file's device.
        device: u64,
        /// The file's number.
        inode: u64,
    },
    /// They were started with this variable. Lost with `env -i`.
    Variable {
        /// Its name.
        name: String,
        /// Its value.
        value: String,
    },
    /// They are in this cgroup or one below.
    Cgroup(Cgroup),
}

/// How the processes of a share ended.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Ended {
    /// So many ended of themselves when they were asked.
    pub ended: usize,
    /// So many had to be killed.
    pub killed: usize,
}

/// The mount namespace of a process, as a mark.
pub fn mount_namespace(pid: u32) -> io::Result<Mark> {
    let (device, inode) = file_id(Path::new(&format!("/proc/{pid}/ns/mnt")))?;
    Ok(Mark::MountNamespace { device, inode })
}

/// That a process sees `file`, which this process has at the path `file`, at the path `at`.
pub fn region(file: &Path, at: &Path) -> io::Result<Mark> {
    let (device, inode) = file_id(file)?;
    Ok(Mark::Region { at: at.into(), device, inode })
}

/// All living processes that carry one of the marks. What this process may not look into is not found by namespace,
/// region and variable.
pub fn members(marks: &[Mark]) -> io::Result<Vec<Identity>> {
    let found = scan(marks)?;
    // A process may fork and end while the list is read, its child being before the place that was read.
    let found = if found.is_empty() { scan(marks)? } else { found };
    Ok(found.into_iter().collect())
}

fn scan(marks: &[Mark]) -> io::Result<BTreeSet<Identity>> {
    let mut found = BTreeSet::new();
    let mut by_look = Vec::new();
    for mark in marks {
        match mark {
            Mark::Cgroup(cgroup) => found.extend(cgroup.pids()?.into_iter().filter_map(Identity::living)),
            mark => by_look.push(mark),
        }
    }
    if by_look.is_empty() {
        return Ok(found);
    }
    for pid in pids()? {
        let is_marked = || by_look.iter().any(|mark| mark.is_on(pid));
        // Most are not, and to know who each is costs more than to see that.
        if !is_marked() {
            continue;
        }
        // Who it is comes before what it has: the number may pass to another process meanwhile.
        let Some(identity) = Identity::living(pid) else { continue };
        if is_marked() && identity.lives() {
            found.insert(identity);
        }
    }
    Ok(found)
}

/// The numbers of all processes that this one sees.
pub(crate) fn pids() -> io::Result<Vec<u32>> {
    let mut pids = Vec::new();
    for entry in fs::read_dir("/proc")? {
        pids.extend(entry?.file_name().to_str().and_then(|name| name.parse::<u32>().ok()));
    }
    Ok(pids)
}

/// A path as a process sees it.
fn root_of(pid: u32, at: &Path) -> PathBuf {
    let mut path = PathBuf::from(format!("/proc/{pid}/root"));
    path.extend(at.strip_prefix("/"));
    path
}

impl Mark {
    /// Whether a process has it; not if that cannot be seen.
    pub fn is_on(&self, pid: u32) -> bool {
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

/// Ends all processes that carry one of the marks and that `may` allows, this one excepted: asks them to, waits for as
/// long as `grace`, then kills what is left, and what they started meanwhile.
pub fn end(marks: &[Mark], may: &dyn Fn(&Identity) -> bool, grace: Duration) -> io::Result<Ended> {
    let own = std::process::id();
    let left = || -> io::Result<Vec<Identity>> {
        Ok(members(marks)?.into_iter().filter(|one| one.pid != own && may(one)).collect())
    };
    let mut asked = BTreeSet::new();
    let mut killed = BTreeSet::new();
    let mut now = left()?;
    // Not before they are known: to find them may take long, and each must have been asked.
    let until = Instant::now() + grace;
    while !grace.is_zero() && !now.is_empty() {
        for one in now.iter().filter(|one| asked.insert(**one)) {
            send(one, Signal::TERM)?;
            // One that was stopped would not hear of it.
            send(one, Signal::CONT)?;
        }
        wait(&now, until)?;
        now = left()?;
        if Instant::now() >= until {
            break;
        }
    }
    let until = Instant::now() + KILL_LIMIT;
    while !now.is_empty() {
        if Instant::now() >= until {
            return Err(stuck(&now));
        }
        kill_cgroups(marks, &now)?;
        for one in &now {
            killed.insert(*one);
            send(one, Signal::KILL)?;
        }
        wait(&now, Instant::now() + ROUND)?;
        now = left()?;
    }
    let ended = Ended { ended: asked.difference(&killed).count(), killed: killed.len() };
    tracing::debug!(ended = ended.ended, killed = ended.killed, "processes ended");
    Ok(ended)
}

/// A cgroup is killed at once, so that nothing in it can be faster than the list; only if all in it may be killed.
fn kill_cgroups(marks: &[Mark], may: &[Identity]) -> io::Result<()> {
    for mark in marks {
        if let Mark::Cgroup(cgroup) = mark {
            let all = cgroup.pids()?;
            let known = |pid: &u32| may.iter().any(|one| one.pid == *pid) || Identity::living(*pid).is_none();
            if all.iter().all(known) {
                cgroup.kill()?;
            }
        }
    }
    Ok(())
}

/// A process that ended meanwhile needs no signal; one that may not be signalled is told of at the end.
fn send(one: &Identity, signal: Signal) -> io::Result<()> {
    match one.signal(signal) {
        Ok(()) => Ok(()),
        Err(error) if matches!(error.kind(), ErrorKind::NotFound | ErrorKind::PermissionDenied) => Ok(()),
        Err(error) => Err(error),
    }
}

/// Until all have ended, one after the other, or it is time: this needs one file however many they are.
fn wait(all: &[Identity], until: Instant) -> io::Result<()> {
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

fn stuck(left: &[Identity]) -> io::Error {
    let names: Vec<String> = left
        .iter()
        .take(5)
        .map(|one| format!("{} ({})", one.pid, process::command(one.pid).unwrap_or_else(|| "?".into())))
        .collect();
    let more = if left.len() > names.len() { ", …" } else { "" };
    io::Error::new(
        ErrorKind::TimedOut,
        format!(
            "{} processes still run {} s after they were killed: {}{more}; they wait for a device or belong to \
             someone else: look at them with `ps -o pid,user,stat,wchan`, then repeat",
            left.len(),
            KILL_LIMIT.as_secs(),
            names.join(", ")
        ),
    )
}

#[cfg(test)]
mod tests;
