//! Creates namespaces for this process and limits its capabilities in them.
#![allow(unsafe_code)]

use super::{ConfinementError, diagnosis};
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

/// Returns whether this process has CAP_SYS_ADMIN and so can mount.
pub(super) fn can_mount() -> bool {
    capabilities(None).is_ok_and(|sets| sets.effective.contains(CapabilitySet::SYS_ADMIN))
}

/// Moves this process into a new mount namespace.
pub(super) fn enter_mount_namespace() -> Result<(), ConfinementError> {
    // Also on an error the process sees the same mounts as before, and can continue.
    unshare(UnshareFlags::NEWNS)
        .and_then(|()| stop_outward_propagation())
        .map_err(|error| ConfinementError::Unsupported(diagnosis::explain_mount_namespace(error)))
}

/// Moves this process into a new user namespace, with the same user and group, and a new mount namespace in it. Returns
/// the capabilities that it had before.
pub(super) fn enter_user_namespace() -> Result<Capabilities, ConfinementError> {
    let before = Capabilities::current().map_err(|error| ConfinementError::Unsupported(error.to_string()))?;
    let maps = UserIdMaps::current();
    // Some systems let every user create a user namespace and then refuse everything in it. A process cannot leave the
    // namespace again, so a child process tries first.
    try_in_child(&maps)
        .map_err(|failed| ConfinementError::Unsupported(diagnosis::explain_user_namespace(failed)))?;
    match maps.enter() {
        Ok(()) => Ok(before),
        Err((NamespaceStep::Unshare, error)) => Err(ConfinementError::Unsupported(
            diagnosis::explain_user_namespace((NamespaceStep::Unshare, error)),
        )),
        Err((_, error)) => Err(ConfinementError::incomplete("entering a user namespace")(error)),
    }
}

/// The step of entering a namespace that failed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum NamespaceStep {
    /// Forking the child that tries.
    Fork,
    /// Creating the user and mount namespaces.
    Unshare,
    /// Writing the user and group maps.
    Map,
    /// Changing the propagation of mounts.
    Mount,
}

pub(super) type StepFailure = (NamespaceStep, Errno);

fn unshare(what: UnshareFlags) -> Result<(), Errno> {
    // SAFETY: `unshare` is unsafe for flags that stop sharing file descriptors between threads; no caller passes these.
    unsafe { unshare_unsafe(what) }
}

/// Receives mounts from the parent namespace, but does not propagate mounts of this one.
fn stop_outward_propagation() -> Result<(), Errno> {
    mount_change(c"/", MountPropagationFlags::DOWNSTREAM | MountPropagationFlags::REC)
}

/// The user and group maps of the new namespace, which map each id to itself. They are formatted in advance, because a
/// forked child of a program with threads must not allocate.
struct UserIdMaps {
    user: String,
    group: String,
}

impl UserIdMaps {
    fn current() -> Self {
        let same = |id: u32| format!("{id} {id} 1");
        Self { user: same(geteuid().as_raw()), group: same(getegid().as_raw()) }
    }

    /// Enters the namespaces. It makes only system calls, so that a forked child can call it.
    fn enter(&self) -> Result<(), StepFailure> {
        let at = |step| move |error| (step, error);
        unshare(UnshareFlags::NEWUSER | UnshareFlags::NEWNS).map_err(at(NamespaceStep::Unshare))?;
        // The kernel requires it before an unprivileged group map.
        write_proc_file(c"/proc/self/setgroups", "deny").map_err(at(NamespaceStep::Map))?;
        write_proc_file(c"/proc/self/uid_map", &self.user).map_err(at(NamespaceStep::Map))?;
        write_proc_file(c"/proc/self/gid_map", &self.group).map_err(at(NamespaceStep::Map))?;
        stop_outward_propagation().map_err(at(NamespaceStep::Mount))
    }
}

fn write_proc_file(path: &CStr, text: &str) -> Result<(), Errno> {
    let file = open(path, OFlags::WRONLY | OFlags::CLOEXEC, Mode::empty())?;
    write(&file, text.as_bytes()).map(|_| ())
}

/// Enters the namespaces in a child process, and returns the result.
fn try_in_child(maps: &UserIdMaps) -> Result<(), StepFailure> {
    let (reader, writer) = pipe_with(PipeFlags::CLOEXEC).map_err(|error| (NamespaceStep::Fork, error))?;
    // SAFETY: the child makes only system calls, and exits without returning into this program.
    let pid = unsafe { libc::fork() };
    if pid == 0 {
        let (step, code) = match maps.enter() {
            Ok(()) => (0, 0),
            Err((step, error)) => (step as u8 + 1, error.raw_os_error()),
        };
        let [a, b, c, d] = code.to_ne_bytes();
        let _ = write(&writer, &[step, a, b, c, d]);
        // SAFETY: `_exit` ends the child at once and runs no destructors.
        unsafe { libc::_exit(0) };
    }
    let Some(pid) = Pid::from_raw(pid).filter(|pid| pid.as_raw_nonzero().get() > 0) else {
        return Err((
            NamespaceStep::Fork,
            Errno::from_io_error(&std::io::Error::last_os_error()).unwrap_or(Errno::AGAIN),
        ));
    };
    drop(writer);
    let result = read_result(&reader);
    // The result in the pipe counts, not the exit status: another thread may have waited for the child.
    while matches!(waitpid(Some(pid), WaitOptions::empty()), Err(Errno::INTR)) {}
    match result {
        Some([0, ..]) => Ok(()),
        Some([step, code @ ..]) => {
            let all = [NamespaceStep::Fork, NamespaceStep::Unshare, NamespaceStep::Map, NamespaceStep::Mount];
            let step = all.get(usize::from(step) - 1).copied().unwrap_or(NamespaceStep::Fork);
            Err((step, Errno::from_raw_os_error(i32::from_ne_bytes(code))))
        }
        None => Err((NamespaceStep::Fork, Errno::CHILD)),
    }
}

fn read_result(reader: &OwnedFd) -> Option<[u8; 5]> {
    let mut bytes = [0; 5];
    let mut have = 0;
    while have < bytes.len() {
        match read(reader, &mut bytes[have..]) {
            Ok(0) => return None,
            Ok(more) => have += more,
            Err(Errno::INTR) => {}
            Err(_) => return None,
        }
    }
    Some(bytes)
}

/// The capabilities of a process before it entered a user namespace, in which it has all of them.
pub(super) struct Capabilities {
    sets: CapabilitySets,
    /// The bounding set: what an executed program can gain from its file, or from being root.
    bounding: CapabilitySet,
}

impl Capabilities {
    fn current() -> Result<Self, Errno> {
        Ok(Self { sets: capabilities(None)?, bounding: bounding_set() })
    }

    /// Restores the capabilities. No program that this process executes can mount or unmount, even if its file has the
    /// capability.
    pub(super) fn restore(&self) -> Result<(), ConfinementError> {
        let failed = || ConfinementError::incomplete("dropping capabilities");
        let keep = self.bounding - CapabilitySet::SYS_ADMIN;
        for capability in (bounding_set() - keep).iter() {
            remove_capability_from_bounding_set(capability).map_err(failed())?;
        }
        set_capabilities(None, self.sets).map_err(failed())
    }
}

/// Returns the bounding set of this process.
fn bounding_set() -> CapabilitySet {
    // Capability numbers have no gaps: the first one that the kernel does not know is the end.
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
    fn bounding_set_matches_proc_status() {
        let status = std::fs::read_to_string("/proc/thread-self/status").unwrap();
        let line = status.lines().find_map(|line| line.strip_prefix("CapBnd:")).unwrap();
        assert_eq!(bounding_set().bits(), u64::from_str_radix(line.trim(), 16).unwrap());
    }
}
