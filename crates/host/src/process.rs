//! Identifies processes across pid reuse: whether one still runs, and signals that cannot reach a later process.
//!
//! `/proc` is parsed here and not with the `procfs` crate: that decodes all fields of a file where three are needed,
//! and indexes into a malformed `stat` line, so that it can panic.

use rustix::process::{Pid, PidfdFlags, Signal, pidfd_open, pidfd_send_signal};
use serde::{Deserialize, Serialize};
use std::fs;
use std::io::{self, Error, ErrorKind};
use std::os::fd::OwnedFd;

/// The maximum number of characters of a command name that is shown.
const MAX_COMMAND_CHARS: usize = 256;

/// Returns the id of the current boot; empty if the kernel does not provide one.
pub fn boot_id() -> String {
    let id = fs::read_to_string("/proc/sys/kernel/random/boot_id").unwrap_or_default();
    id.trim().to_string()
}

/// A process, distinguished from later processes with the same pid.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
pub struct ProcessIdentity {
    /// The pid of the process.
    pub pid: u32,
    /// The start time, in clock ticks since boot.
    pub started: u64,
}

impl ProcessIdentity {
    /// Returns the process that has this pid now.
    pub fn of(pid: u32) -> io::Result<Self> {
        Ok(Self { pid, started: stat(pid)?.started })
    }

    /// Returns the process that has this pid now, if it runs. A zombie does not.
    pub fn of_running(pid: u32) -> Option<Self> {
        let stat = stat(pid).ok()?;
        (!stat.ended).then_some(Self { pid, started: stat.started })
    }

    /// Returns the calling process.
    pub fn current() -> io::Result<Self> {
        Self::of(std::process::id())
    }

    /// Returns whether the process still runs. A zombie does not.
    pub fn is_running(&self) -> bool {
        stat(self.pid).is_ok_and(|stat| stat.started == self.started && !stat.ended)
    }

    /// Opens a pidfd of the process, which becomes readable when the process exits.
    pub fn pidfd(&self) -> io::Result<OwnedFd> {
        let fd =
            pidfd_open(as_pid(self.pid)?, PidfdFlags::empty()).map_err(|e| missing(self.pid, e.into()))?;
        // The pid may have been reused before it was opened; from now on the descriptor refers to one process.
        if Self::of(self.pid)? != *self {
            return Err(process_not_found_error(self.pid));
        }
        Ok(fd)
    }

    /// Sends a signal to the process, never to a later process with the same pid.
    pub fn signal(&self, signal: Signal) -> io::Result<()> {
        pidfd_send_signal(self.pidfd()?, signal).map_err(|error| missing(self.pid, error.into()))
    }
}

/// Returns the real user id of a process.
pub fn real_uid(pid: u32) -> io::Result<u32> {
    let status = fs::read(format!("/proc/{pid}/status")).map_err(|error| missing(pid, error))?;
    status
        .split(|byte| *byte == b'\n')
        .find_map(|line| line.strip_prefix(b"Uid:"))
        .and_then(|ids| str::from_utf8(ids).ok()?.split_whitespace().next()?.parse().ok())
        .ok_or_else(|| unreadable(pid, "status"))
}

/// Returns the command of a process: the first word of its command line, or the kernel's name for it if that is empty.
/// A program can choose both, so control characters are replaced.
pub fn command_name(pid: u32) -> Option<String> {
    let words = fs::read(format!("/proc/{pid}/cmdline")).ok()?;
    let first = words.split(|byte| *byte == 0).next().unwrap_or_default();
    if !first.is_empty() {
        return Some(sanitize(first));
    }
    let name = fs::read(format!("/proc/{pid}/comm")).ok()?;
    Some(sanitize(name.strip_suffix(b"\n").unwrap_or(&name)))
}

/// Replaces control characters, which could move the cursor of a terminal or color its text.
fn sanitize(name: &[u8]) -> String {
    let text = String::from_utf8_lossy(name);
    text.chars().take(MAX_COMMAND_CHARS).map(|c| if c.is_control() { '?' } else { c }).collect()
}

/// The fields of `/proc/<pid>/stat` that are used.
#[derive(Debug, PartialEq, Eq)]
struct ProcessStat {
    started: u64,
    ended: bool,
}

fn stat(pid: u32) -> io::Result<ProcessStat> {
    let text = fs::read(format!("/proc/{pid}/stat")).map_err(|error| missing(pid, error))?;
    parse_stat(&text).ok_or_else(|| unreadable(pid, "stat"))
}

fn parse_stat(text: &[u8]) -> Option<ProcessStat> {
    // The name in parentheses is free text: it may contain parentheses, spaces and newlines.
    let after = text.iter().rposition(|byte| *byte == b')')? + 1;
    let mut words = str::from_utf8(&text[after..]).ok()?.split_ascii_whitespace();
    // Fields 3, 20 and 22 in the numbering of proc(5).
    let state = words.next()?;
    let threads: u64 = words.nth(16)?.parse().ok()?;
    let started = words.nth(1)?.parse().ok()?;
    // A process whose main thread has exited while others run has the state of a zombie.
    let ended = matches!(state, "Z" | "X" | "x") && threads <= 1;
    Some(ProcessStat { started, ended })
}

fn as_pid(pid: u32) -> io::Result<Pid> {
    i32::try_from(pid).ok().and_then(Pid::from_raw).ok_or_else(|| process_not_found_error(pid))
}

/// Converts the error of a missing process: reading a file of a process that exits meanwhile gives ESRCH instead of
/// ENOENT.
fn missing(pid: u32, error: Error) -> Error {
    let ended = error.kind() == ErrorKind::NotFound || error.raw_os_error() == Some(libc::ESRCH);
    if ended { process_not_found_error(pid) } else { error }
}

fn process_not_found_error(pid: u32) -> Error {
    Error::new(ErrorKind::NotFound, format!("process {pid} no longer exists"))
}

fn unreadable(pid: u32, file: &str) -> Error {
    Error::new(ErrorKind::InvalidData, format!("/proc/{pid}/{file} is malformed"))
}

#[cfg(test)]
mod tests;
