//! Processes: who they are, whether they live, and signals that reach no other one.

use rustix::process::{Pid, PidfdFlags, Signal, pidfd_open, pidfd_send_signal};
use serde::{Deserialize, Serialize};
use std::fs;
use std::io::{self, Error, ErrorKind};
use std::os::fd::OwnedFd;

/// A command's name is shown up to here, in characters.
const LONGEST_NAME: usize = 256;

/// Returns the id of the current boot; empty where the kernel has none.
pub fn boot_id() -> String {
    let id = fs::read_to_string("/proc/sys/kernel/random/boot_id").unwrap_or_default();
    id.trim().to_string()
}

/// One process, and no later one that has its number again.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
pub struct Identity {
    /// The process's number.
    pub pid: u32,
    /// When it began, in the kernel's ticks since the machine started.
    pub started: u64,
}

impl Identity {
    /// The process that has this number now.
    pub fn of(pid: u32) -> io::Result<Self> {
        Ok(Self { pid, started: stat(pid)?.started })
    }

    /// The process that has this number now, if it runs: one that ended and was not yet waited for does not.
    pub fn living(pid: u32) -> Option<Self> {
        let stat = stat(pid).ok()?;
        (!stat.ended).then_some(Self { pid, started: stat.started })
    }

    /// This process.
    pub fn own() -> io::Result<Self> {
        Self::of(std::process::id())
    }

    /// Whether it still runs. One that ended and was not yet waited for does not.
    pub fn lives(&self) -> bool {
        stat(self.pid).is_ok_and(|stat| stat.started == self.started && !stat.ended)
    }

    /// A file that stands for this process and becomes readable when it ends.
    pub fn pidfd(&self) -> io::Result<OwnedFd> {
        let fd =
            pidfd_open(number(self.pid)?, PidfdFlags::empty()).map_err(|e| missing(self.pid, e.into()))?;
        // The number may have passed to another one until it was opened; from now on it cannot.
        if Self::of(self.pid)? != *self {
            return Err(gone(self.pid));
        }
        Ok(fd)
    }

    /// Sends it a signal; never to a later process with its number.
    pub fn signal(&self, signal: Signal) -> io::Result<()> {
        pidfd_send_signal(self.pidfd()?, signal).map_err(|error| missing(self.pid, error.into()))
    }
}

/// Who runs a process: the real user.
pub fn owner(pid: u32) -> io::Result<u32> {
    let status = fs::read(format!("/proc/{pid}/status")).map_err(|error| missing(pid, error))?;
    status
        .split(|byte| *byte == b'\n')
        .find_map(|line| line.strip_prefix(b"Uid:"))
        .and_then(|ids| str::from_utf8(ids).ok()?.split_whitespace().next()?.parse().ok())
        .ok_or_else(|| unreadable(pid, "status"))
}

/// What a process was started as: its first word, or the name the kernel has where it hides its words. Safe to show:
/// a program chooses it freely.
pub fn command(pid: u32) -> Option<String> {
    let words = fs::read(format!("/proc/{pid}/cmdline")).ok()?;
    let first = words.split(|byte| *byte == 0).next().unwrap_or_default();
    if !first.is_empty() {
        return Some(shown(first));
    }
    let name = fs::read(format!("/proc/{pid}/comm")).ok()?;
    Some(shown(name.strip_suffix(b"\n").unwrap_or(&name)))
}

/// Without what would move a terminal's cursor or colour its text.
fn shown(name: &[u8]) -> String {
    let text = String::from_utf8_lossy(name);
    text.chars().take(LONGEST_NAME).map(|c| if c.is_control() { '?' } else { c }).collect()
}

/// What `/proc/<pid>/stat` says.
#[derive(Debug, PartialEq, Eq)]
struct Stat {
    started: u64,
    ended: bool,
}

fn stat(pid: u32) -> io::Result<Stat> {
    let text = fs::read(format!("/proc/{pid}/stat")).map_err(|error| missing(pid, error))?;
    parse(&text).ok_or_else(|| unreadable(pid, "stat"))
}

fn parse(text: &[u8]) -> Option<Stat> {
    // The name in brackets is free text: it may have brackets, spaces and lines of its own.
    let after = text.iter().rposition(|byte| *byte == b')')? + 1;
    let mut words = str::from_utf8(&text[after..]).ok()?.split_ascii_whitespace();
    // Fields 3, 20 and 22 of the manual's count.
    let state = words.next()?;
    let threads: u64 = words.nth(16)?.parse().ok()?;
    let started = words.nth(1)?.parse().ok()?;
    // A program whose first thread has left while others work looks like a zombie and is none.
    let ended = matches!(state, "Z" | "X" | "x") && threads <= 1;
    Some(Stat { started, ended })
}

fn number(pid: u32) -> io::Result<Pid> {
    i32::try_from(pid).ok().and_then(Pid::from_raw).ok_or_else(|| gone(pid))
}

/// Reading about a process that ends meanwhile gives ESRCH instead of ENOENT.
fn missing(pid: u32, error: Error) -> Error {
    let ended = error.kind() == ErrorKind::NotFound || error.raw_os_error() == Some(libc::ESRCH);
    if ended { gone(pid) } else { error }
}

fn gone(pid: u32) -> Error {
    Error::new(ErrorKind::NotFound, format!("there is no process {pid} any more"))
}

fn unreadable(pid: u32, file: &str) -> Error {
    Error::new(ErrorKind::InvalidData, format!("/proc/{pid}/{file} is not as the kernel writes it"))
}

#[cfg(test)]
mod tests;
