//! Who is alive. Every process holds a lock on one byte of a file: the kernel gives it up when the process is gone,
//! however it went, and any process of any namespace can ask for it.
#![allow(unsafe_code)]

use std::fs::File;
use std::io;
use std::mem::ManuallyDrop;
use std::os::fd::AsRawFd;
use std::sync::Once;
use std::sync::atomic::{AtomicI32, AtomicUsize, Ordering};

/// The locks of the slots. They belong to the open file: two openings in one process are two owners.
#[derive(Debug)]
pub struct LivenessLocks {
    /// Locks that say "I live".
    slots: ManuallyDrop<File>,
    /// Locks of the old kind, which know their owner's pid and translate it between namespaces. A process loses all of
    /// them when it closes any opening of the file.
    pids: Option<ManuallyDrop<File>>,
    /// The byte that is slot zero's, in each kind.
    slots_at: u64,
    pids_at: u64,
    /// How often this process's ancestors had forked when the files were opened.
    forks: usize,
    /// The thread that sees to dead processes' slots; zero while none does.
    undertaker: AtomicUsize,
}

/// A number of the calling thread, never zero.
fn this_thread() -> usize {
    thread_local! {
        static HERE: u8 = const { 0 };
    }
    HERE.with(|here| std::ptr::from_ref(here).addr())
}

/// Descriptors that a forked child must not keep: a lock on an open file lasts as long as anybody has it open.
static NOT_FOR_CHILDREN: [AtomicI32; 256] = [const { AtomicI32::new(-1) }; 256];

/// Counts, along the line of ancestors, the forks since this code was loaded.
static FORKS: AtomicUsize = AtomicUsize::new(0);

extern "C" fn in_child() {
    FORKS.fetch_add(1, Ordering::Relaxed);
    for descriptor in &NOT_FOR_CHILDREN {
        let number = descriptor.swap(-1, Ordering::Relaxed);
        if number >= 0 {
            // SAFETY: ours since it was registered, and nothing of this process uses or closes it after a fork.
            unsafe { libc::close(number) };
        }
    }
}

/// Exchanges one number in the list for another; whether it was there.
fn register(from: i32, to: i32) -> bool {
    static ONCE: Once = Once::new();
    ONCE.call_once(|| {
        // SAFETY: the handler only closes descriptors, which a forked child may do.
        unsafe { libc::pthread_atfork(None, None, Some(in_child)) };
    });
    NOT_FOR_CHILDREN
        .iter()
        .any(|entry| entry.compare_exchange(from, to, Ordering::Relaxed, Ordering::Relaxed).is_ok())
}

impl Drop for LivenessLocks {
    fn drop(&mut self) {
        // In a forked child the numbers were closed and struck off, and may by now be other files', even ones of this list.
        if !self.is_own() {
            return;
        }
        for file in std::iter::once(&mut self.slots).chain(&mut self.pids) {
            register(file.as_raw_fd(), -1);
            // SAFETY: dropped once, here.
            unsafe { ManuallyDrop::drop(file) };
        }
    }
}

impl LivenessLocks {
    /// Locks in two files, each from its first byte on.
    #[must_use]
    pub fn in_two_files(slots: File, pids: File) -> Self {
        Self::new(slots, Some(pids), 0, 0)
    }

    /// Locks in one file: for slots from byte `slots_at` on, for pids from byte `pids_at` on. The two must lie apart: a
    /// lock of one kind is in the way of the other.
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
            undertaker: AtomicUsize::new(0),
        }
    }

    /// The same open files once more: for tests, which play the kernel that lets go of a dead process's locks.
    pub fn duplicate(&self) -> io::Result<Self> {
        let pids = self.pids.as_ref().map(|pids| pids.try_clone()).transpose()?;
        Ok(Self::new(self.slots.try_clone()?, pids, self.slots_at, self.pids_at))
    }

    /// Whether the calling process opened this, rather than a process it was forked from. In a forked child nothing is
    /// locked, and the descriptors are closed.
    #[inline]
    #[must_use]
    pub fn is_own(&self) -> bool {
        self.forks == FORKS.load(Ordering::Relaxed)
    }

    /// The open file of the slots' locks.
    #[must_use]
    pub fn file(&self) -> &File {
        &self.slots
    }

    /// Takes the slot if nobody lives in it.
    #[must_use]
    pub fn try_acquire(&self, slot: usize) -> bool {
        self.slot_lock(libc::F_OFD_SETLK, libc::F_WRLCK, slot).is_ok()
    }

    /// Gives it back.
    pub fn release(&self, slot: usize) {
        let _ = self.slot_lock(libc::F_OFD_SETLK, libc::F_UNLCK, slot);
    }

    /// Whether another opening of the file holds the slot. In doubt it lives: nothing is taken from a living process.
    #[must_use]
    pub fn is_alive(&self, slot: usize) -> bool {
        match self.slot_lock(libc::F_OFD_GETLK, libc::F_WRLCK, slot) {
            Ok(lock) => lock.l_type != libc::F_UNLCK as libc::c_short,
            Err(_) => true,
        }
    }

    /// Does something while the slot is nobody's and stays so; nothing if somebody lives in it or sees to it already.
    pub fn with_dead_slot<T>(&self, slot: usize, work: impl FnOnce() -> T) -> Option<T> {
        // The lock is this open file's, so it does not keep this process's other threads away. The same thread may come
        // here again: seeing to one of the dead it may find something it needs in the hand of another.
        let me = this_thread();
        let outer = self.undertaker.compare_exchange(0, me, Ordering::Acquire, Ordering::Relaxed);
        if outer.is_err_and(|other| other != me) {
            return None;
        }
        let result = self.try_acquire(slot).then(work);
        if result.is_some() {
            self.release(slot);
        }
        if outer.is_ok() {
            self.undertaker.store(0, Ordering::Release);
        }
        result
    }

    /// Makes this process's pid known to [`LivenessLocks::pid`] of other processes.
    pub fn publish_pid(&self, slot: usize) {
        let _ = self.pid_lock(libc::F_SETLK, libc::F_WRLCK, slot);
    }

    /// No longer shows it.
    pub fn withdraw_pid(&self, slot: usize) {
        let _ = self.pid_lock(libc::F_SETLK, libc::F_UNLCK, slot);
    }

    /// The pid of the slot's process in the namespace of the caller, where it has one there. A process does not see its
    /// own.
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

/// Whether any process, or another opening of the file in this one, holds a lock on any byte of it. If the kernel does
/// not tell, the answer is yes.
pub(crate) fn is_any_held(file: &File) -> bool {
    // A length of zero is as far as a file can go.
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
    // SAFETY: a C struct of integers, for which zeros are a value.
    let mut lock: libc::flock = unsafe { std::mem::zeroed() };
    lock.l_type = kind as libc::c_short;
    lock.l_whence = libc::SEEK_SET as libc::c_short;
    lock.l_start = libc::off_t::try_from(at).map_err(|_| io::Error::from_raw_os_error(libc::EINVAL))?;
    lock.l_len = length;
    // SAFETY: the descriptor is open and the struct lives through the call, which only fills it in.
    let answer = unsafe { libc::fcntl(file.as_raw_fd(), command, &mut lock) };
    if answer == -1 { Err(io::Error::last_os_error()) } else { Ok(lock) }
}
