//! Liveness locks: every process holds a lock on one byte of a file. The kernel releases it when the process ends,
//! however it ends, and processes of any namespace can test it.
#![allow(unsafe_code)]

use std::fs::File;
use std::io;
use std::mem::ManuallyDrop;
use std::os::fd::AsRawFd;
use std::sync::Once;
use std::sync::atomic::{AtomicI32, AtomicUsize, Ordering};

/// The locks of the slots. A lock belongs to an open file description: two opens in one process are two owners.
#[derive(Debug)]
pub struct LivenessLocks {
    /// File with the locks that show that a slot's process is alive (open file description locks).
    slots: ManuallyDrop<File>,
    /// File with classic POSIX locks, which carry their owner's pid and translate it between namespaces. A process
    /// loses all of them when it closes any descriptor of the file. `None` if both kinds are in the same file.
    pids: Option<ManuallyDrop<File>>,
    /// Offset of slot zero's byte, for each kind of lock.
    slots_at: u64,
    pids_at: u64,
    /// Value of [`FORKS`] when the files were opened.
    forks: usize,
    /// Identifier of the thread that is reclaiming slots of dead processes; zero if none is.
    reclaiming_thread: AtomicUsize,
}

/// Returns an identifier of the calling thread, never zero.
fn current_thread_id() -> usize {
    thread_local! {
        static THREAD_ADDRESS: u8 = const { 0 };
    }
    THREAD_ADDRESS.with(|here| std::ptr::from_ref(here).addr())
}

/// Descriptors to close in a forked child: an open file description lock lasts as long as any process has it open.
static CLOSED_IN_CHILD: [AtomicI32; 256] = [const { AtomicI32::new(-1) }; 256];

/// Number of forks since this code was loaded, counted along the line of ancestors.
static FORKS: AtomicUsize = AtomicUsize::new(0);

extern "C" fn after_fork_in_child() {
    FORKS.fetch_add(1, Ordering::Relaxed);
    for descriptor in &CLOSED_IN_CHILD {
        let number = descriptor.swap(-1, Ordering::Relaxed);
        if number >= 0 {
            // SAFETY: the descriptor was registered by its owner, and no code of this process uses or closes it after a
            // fork.
            unsafe { libc::close(number) };
        }
    }
}

/// Replaces one descriptor in the list by another. Returns whether it was there.
fn register(from: i32, to: i32) -> bool {
    static ONCE: Once = Once::new();
    ONCE.call_once(|| {
        // SAFETY: the handler only uses atomics and `close`, which are safe to call in a forked child.
        unsafe { libc::pthread_atfork(None, None, Some(after_fork_in_child)) };
    });
    CLOSED_IN_CHILD
        .iter()
        .any(|entry| entry.compare_exchange(from, to, Ordering::Relaxed, Ordering::Relaxed).is_ok())
}

impl Drop for LivenessLocks {
    fn drop(&mut self) {
        // In a forked child the descriptors were closed and removed from the list. Their numbers may belong to other
        // files by now, even to files of this list.
        if !self.is_own() {
            return;
        }
        for file in std::iter::once(&mut self.slots).chain(&mut self.pids) {
            register(file.as_raw_fd(), -1);
            // SAFETY: this is the only place that drops the file, and `drop` runs once.
            unsafe { ManuallyDrop::drop(file) };
        }
    }
}

impl LivenessLocks {
    /// Uses locks in two files, each from its first byte on.
    #[must_use]
    pub fn in_two_files(slots: File, pids: File) -> Self {
        Self::new(slots, Some(pids), 0, 0)
    }

    /// Uses locks in one file: for slots from byte `slots_at` on, for pids from byte `pids_at` on. The two ranges must
    /// not overlap, because locks of the two kinds conflict with each other.
    #[must_use]
    pub fn in_one_file(file: File, slots_at: u64, pids_at: u64) -> Self {
        Self::new(file, None, slots_at, pids_at)
    }

    fn new(slots: File, pids: Option<File>, slots_at: u64, pids_at: u64) -> Self {
        register(-1, slots.as_raw_fd());
        if let Some(pids) = &pids {
            register(-1, pids.as_raw_fd());
        }
        Self {
            slots: ManuallyDrop::new(slots),
            pids: pids.map(ManuallyDrop::new),
            slots_at,
            pids_at,
            forks: FORKS.load(Ordering::Relaxed),
            reclaiming_thread: AtomicUsize::new(0),
        }
    }

    /// Duplicates the open files. Tests use this to simulate the kernel's release of a dead process's locks.
    pub fn duplicate(&self) -> io::Result<Self> {
        let pids = self.pids.as_ref().map(|pids| pids.try_clone()).transpose()?;
        Ok(Self::new(self.slots.try_clone()?, pids, self.slots_at, self.pids_at))
    }

    /// Returns whether the calling process opened the files itself. In a forked child it did not: nothing is locked
    /// there, and the descriptors are closed.
    #[inline]
    #[must_use]
    pub fn is_own(&self) -> bool {
        self.forks == FORKS.load(Ordering::Relaxed)
    }

    /// Returns the open file of the slots' locks.
    #[must_use]
    pub fn file(&self) -> &File {
        &self.slots
    }

    /// Takes the slot's lock. Returns whether that succeeded: not if a live process holds it.
    #[must_use]
    pub fn try_acquire(&self, slot: usize) -> bool {
        self.slot_lock(libc::F_OFD_SETLK, libc::F_WRLCK, slot).is_ok()
    }

    /// Releases the slot's lock.
    pub fn release(&self, slot: usize) {
        let _ = self.slot_lock(libc::F_OFD_SETLK, libc::F_UNLCK, slot);
    }

    /// Returns whether another open of the file holds the slot. On an error it returns true: nothing is taken from a
    /// process that may be alive.
    #[must_use]
    pub fn is_alive(&self, slot: usize) -> bool {
        match self.slot_lock(libc::F_OFD_GETLK, libc::F_WRLCK, slot) {
            Ok(lock) => lock.l_type != libc::F_UNLCK as libc::c_short,
            Err(_) => true,
        }
    }

    /// Runs `work` while holding a dead process's slot. Returns `None` if its owner is alive or another thread is
    /// already reclaiming one.
    pub fn with_dead_slot<T>(&self, slot: usize, work: impl FnOnce() -> T) -> Option<T> {
        // The lock belongs to this open file, so it does not exclude other threads of this process. The same thread may
        // enter again: while it reclaims one slot, it may need something that another dead process held.
        let me = current_thread_id();
        let outer = self.reclaiming_thread.compare_exchange(0, me, Ordering::Acquire, Ordering::Relaxed);
        if outer.is_err_and(|other| other != me) {
            return None;
        }
        let result = self.try_acquire(slot).then(work);
        if result.is_some() {
            self.release(slot);
        }
        if outer.is_ok() {
            self.reclaiming_thread.store(0, Ordering::Release);
        }
        result
    }

    /// Makes this process's pid visible to [`LivenessLocks::pid`] of other processes. Returns whether that succeeded:
    /// with two files, the kernel may have released the slot of a process that is exiting, and not yet its pid.
    pub fn publish_pid(&self, slot: usize) -> bool {
        self.pid_lock(libc::F_SETLK, libc::F_WRLCK, slot).is_ok()
    }

    /// Hides this process's pid again, before it releases the slot. Has no effect if the pid is not published.
    pub fn withdraw_pid(&self, slot: usize) {
        let _ = self.pid_lock(libc::F_SETLK, libc::F_UNLCK, slot);
    }

    /// Returns the pid of the slot's process in the caller's pid namespace, if it has one there. A process does not see
    /// its own pid.
    #[must_use]
    pub fn pid(&self, slot: usize) -> Option<u32> {
        let lock = self.pid_lock(libc::F_GETLK, libc::F_WRLCK, slot).ok()?;
        if lock.l_type == libc::F_UNLCK as libc::c_short {
            return None;
        }
        u32::try_from(lock.l_pid).ok().filter(|&pid| pid != 0)
    }

    fn slot_lock(&self, command: libc::c_int, kind: libc::c_int, slot: usize) -> io::Result<libc::flock> {
        self.lock(&self.slots, command, kind, self.slots_at.saturating_add(slot as u64))
    }

    fn pid_lock(&self, command: libc::c_int, kind: libc::c_int, slot: usize) -> io::Result<libc::flock> {
        let file = self.pids.as_ref().unwrap_or(&self.slots);
        self.lock(file, command, kind, self.pids_at.saturating_add(slot as u64))
    }

    fn lock(&self, file: &File, command: libc::c_int, kind: libc::c_int, at: u64) -> io::Result<libc::flock> {
        if !self.is_own() {
            return Err(io::Error::from_raw_os_error(libc::EBADF));
        }
        lock_range(file, command, kind, at, 1)
    }
}

/// Returns whether any process, or another open of the file in this one, holds a lock on any byte of it. On an error it
/// returns true.
pub(crate) fn is_any_held(file: &File) -> bool {
    // A length of zero covers everything up to the largest offset.
    match lock_range(file, libc::F_OFD_GETLK, libc::F_WRLCK, 0, 0) {
        Ok(lock) => lock.l_type != libc::F_UNLCK as libc::c_short,
        Err(_) => true,
    }
}

fn lock_range(
    file: &File,
    command: libc::c_int,
    kind: libc::c_int,
    at: u64,
    length: libc::off_t,
) -> io::Result<libc::flock> {
    // SAFETY: `flock` is a C struct of integers, for which all zeros is a valid value.
    let mut lock: libc::flock = unsafe { std::mem::zeroed() };
    lock.l_type = kind as libc::c_short;
    lock.l_whence = libc::SEEK_SET as libc::c_short;
    lock.l_start = libc::off_t::try_from(at).map_err(|_| io::Error::from_raw_os_error(libc::EINVAL))?;
    lock.l_len = length;
    // SAFETY: the descriptor is open, and the struct lives through the call, which only writes to it.
    let answer = unsafe { libc::fcntl(file.as_raw_fd(), command, &mut lock) };
    if answer == -1 { Err(io::Error::last_os_error()) } else { Ok(lock) }
}
