//! Namespaces of this process's own, and what it may do in them.
#![allow(unsafe_code)]

use super::{BindError, reasons};
use rustix::fs::{Mode, OFlags, open};
use rustix::io::{Errno, read, write};
use rustix::mount::{MountPropagationFlags, mount_change};
use rustix::pipe::{PipeFlags, pipe_with};
use rustix::process::{Pid, WaitOptions, getegid, geteuid, waitpid};
use rustix::thread::{
    CapabilitySet, CapabilitySets, UnshareFlags, capabilities, capability_is_in_bounding_set,
    remove_capability_from_bounding_set, set_capabilities, unshare_unsafe,
};
use std::ffi::CStr;
use std::os::fd::OwnedFd;

/// Whether this process may mount.
pub(super) fn may_mount() -> bool {
    capabilities(None).is_ok_and(|sets| sets.effective.contains(CapabilitySet::SYS_ADMIN))
}

/// Into a new mount namespace.
pub(super) fn mount() -> Result<(), BindError> {
    // Either way the process sees the same mounts as before and can go on.
    unshare(UnshareFlags::NEWNS)
        .and_then(|()| keep_mounts_in())
        .map_err(|error| BindError::Impossible(reasons::no_mount_namespace(error)))
}

/// Into a new user namespace, with the same user and group, and a new mount namespace in it.
pub(super) fn user() -> Result<Capabilities, BindError> {
    let before = Capabilities::now().map_err(|error| BindError::Impossible(error.to_string()))?;
    let maps = Maps::now();
    // Some systems let everybody make a user namespace and nobody do anything in it, and there is no way back: a child
    // goes first.
    trial(&maps).map_err(|failed| BindError::Impossible(reasons::no_user_namespace(failed)))?;
    match maps.enter() {
        Ok(()) => Ok(before),
        Err((Step::Unshare, error)) => {
            Err(BindError::Impossible(reasons::no_user_namespace((Step::Unshare, error))))
        }
        Err((_, error)) => Err(BindError::half_way("entering a user namespace")(error)),
    }
}

/// How far it came.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Step {
    /// A child for the trial.
    Fork,
    /// Making the namespaces.
    Unshare,
    /// Saying who the user is in it.
    Map,
    /// Changing mounts.
    Mount,
}

pub(super) type Failed = (Step, Errno);

fn unshare(what: UnshareFlags) -> Result<(), Errno> {
    // SAFETY: unsafe for files that are no longer shared between threads; these are not asked for.
    unsafe { unshare_unsafe(what) }
}

/// What is mounted outside still comes in; what is mounted here does not go out.
fn keep_mounts_in() -> Result<(), Errno> {
    mount_change(c"/", MountPropagationFlags::DOWNSTREAM | MountPropagationFlags::REC)
}

/// Who the user and the group are in the new namespace: the same. Written beforehand, because a forked child of a
/// program with threads may not allocate.
struct Maps {
    user: String,
    group: String,
}

impl Maps {
    fn now() -> Self {
        let same = |id: u32| format!("{id} {id} 1");
        Self { user: same(geteuid().as_raw()), group: same(getegid().as_raw()) }
    }

    /// System calls only.
    fn enter(&self) -> Result<(), Failed> {
        let at = |step| move |error| (step, error);
        unshare(UnshareFlags::NEWUSER | UnshareFlags::NEWNS).map_err(at(Step::Unshare))?;
        // The kernel wants it before an unprivileged group map.
        put(c"/proc/self/setgroups", "deny").map_err(at(Step::Map))?;
        put(c"/proc/self/uid_map", &self.user).map_err(at(Step::Map))?;
        put(c"/proc/self/gid_map", &self.group).map_err(at(Step::Map))?;
        keep_mounts_in().map_err(at(Step::Mount))
    }
}

fn put(path: &CStr, text: &str) -> Result<(), Errno> {
    let file = open(path, OFlags::WRONLY | OFlags::CLOEXEC, Mode::empty())?;
    write(&file, text.as_bytes()).map(|_| ())
}

/// Enters in a child, and tells how that went.
fn trial(maps: &Maps) -> Result<(), Failed> {
    let (hear, tell) = pipe_with(PipeFlags::CLOEXEC).map_err(|error| (Step::Fork, error))?;
    // SAFETY: the child makes system calls only, and ends without going back into this program.
    let pid = unsafe { libc::fork() };
    if pid == 0 {
        let (step, code) = match maps.enter() {
            Ok(()) => (0, 0),
            Err((step, error)) => (step as u8 + 1, error.raw_os_error()),
        };
        let [a, b, c, d] = code.to_ne_bytes();
        let _ = write(&tell, &[step, a, b, c, d]);
        // SAFETY: ends the child at once.
        unsafe { libc::_exit(0) };
    }
    let Some(pid) = Pid::from_raw(pid).filter(|pid| pid.as_raw_nonzero().get() > 0) else {
        return Err((
            Step::Fork,
            Errno::from_io_error(&std::io::Error::last_os_error()).unwrap_or(Errno::AGAIN),
        ));
    };
    drop(tell);
    let heard = hear_out(&hear);
    // Its answer counts, not its end: someone else may have waited for it.
    while matches!(waitpid(Some(pid), WaitOptions::empty()), Err(Errno::INTR)) {}
    match heard {
        Some([0, ..]) => Ok(()),
        Some([step, code @ ..]) => {
            let all = [Step::Fork, Step::Unshare, Step::Map, Step::Mount];
            let step = all.get(usize::from(step) - 1).copied().unwrap_or(Step::Fork);
            Err((step, Errno::from_raw_os_error(i32::from_ne_bytes(code))))
        }
        None => Err((Step::Fork, Errno::CHILD)),
    }
}

fn hear_out(hear: &OwnedFd) -> Option<[u8; 5]> {
    let mut answer = [0; 5];
    let mut have = 0;
    while have < answer.len() {
        match read(hear, &mut answer[have..]) {
            Ok(0) => return None,
            Ok(more) => have += more,
            Err(Errno::INTR) => {}
            Err(_) => return None,
        }
    }
    Some(answer)
}

/// What a process had before it became the lord of its own namespace.
pub(super) struct Capabilities {
    sets: CapabilitySets,
    /// What a program that is started could be given by its file, or by being root.
    bounding: CapabilitySet,
}

impl Capabilities {
    fn now() -> Result<Self, Errno> {
        Ok(Self { sets: capabilities(None)?, bounding: bounding() })
    }

    /// Has no more than it had before. Nothing that is started here may mount or unmount, not even if its file says so.
    pub(super) fn restore(&self) -> Result<(), BindError> {
        let failed = || BindError::half_way("giving capabilities back");
        let keep = self.bounding - CapabilitySet::SYS_ADMIN;
        for capability in (bounding() - keep).iter() {
            remove_capability_from_bounding_set(capability).map_err(failed())?;
        }
        set_capabilities(None, self.sets).map_err(failed())
    }
}

/// All that this kernel knows and this process's programs may get.
fn bounding() -> CapabilitySet {
    // The numbers have no gaps; the first one that the kernel does not know is the end.
    (0..u64::BITS)
        .map(|number| CapabilitySet::from_bits_retain(1 << number))
        .map_while(|one| capability_is_in_bounding_set(one).ok().map(|has| (one, has)))
        .filter_map(|(one, has)| has.then_some(one))
        .fold(CapabilitySet::empty(), |all, one| all | one)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_bounding_set_is_what_the_kernel_says() {
        let status = std::fs::read_to_string("/proc/thread-self/status").unwrap();
        let line = status.lines().find_map(|line| line.strip_prefix("CapBnd:")).unwrap();
        assert_eq!(bounding().bits(), u64::from_str_radix(line.trim(), 16).unwrap());
    }
}
