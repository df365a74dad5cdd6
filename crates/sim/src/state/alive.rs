//! Who is alive. Every client holds a lock on one byte of the file `clients`: the kernel gives it up when the process is
//! gone, however it went, and any process of any namespace can ask for it.
#![allow(unsafe_code)]

use std::fs::File;
use std::io;
use std::os::fd::AsRawFd;
use std::sync::Once;
use std::sync::atomic::{AtomicI32, AtomicUsize, Ordering};

/// The lock file of the slots. Its locks belong to the open file: two openings in one process are two owners.
#[derive(Debug)]
pub(super) struct Alive {
    /// Locks that say "I live".
    slots: File,
    /// Locks of the old kind on a second file, which know their owner's pid and translate it between namespaces.
    pids: File,
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

extern "C" fn in_child() {
    for descriptor in &NOT_FOR_CHILDREN {
        let number = descriptor.swap(-1, Ordering::Relaxed);
        if number >= 0 {
            // SAFETY: ours since it was registered; the driver refuses every call in a forked child that would use it.
            unsafe { libc::close(number) };
        }
    }
}

/// Exchanges one number in the list for another.
fn register(from: i32, to: i32) {
    static ONCE: Once = Once::new();
    ONCE.call_once(|| {
        // SAFETY: the handler only closes descriptors, which a forked child may do.
        unsafe { libc::pthread_atfork(None, None, Some(in_child)) };
    });
    let _ = NOT_FOR_CHILDREN
        .iter()
        .any(|entry| entry.compare_exchange(from, to, Ordering::Relaxed, Ordering::Relaxed).is_ok());
}

impl Drop for Alive {
    fn drop(&mut self) {
        register(self.slots.as_raw_fd(), -1);
        register(self.pids.as_raw_fd(), -1);
    }
}

impl Alive {
    pub(super) fn new(slots: File, pids: File) -> Self {
        register(-1, slots.as_raw_fd());
        register(-1, pids.as_raw_fd());
        Self { slots, pids, undertaker: AtomicUsize::new(0) }
    }

    /// The same open files once more.
    #[cfg(test)]
    pub(super) fn second(&self) -> Self {
        Self::new(self.slots.try_clone().unwrap(), self.pids.try_clone().unwrap())
    }

    /// Takes the slot if nobody lives in it.
    pub(super) fn take(&self, slot: usize) -> bool {
        self.lock(&self.slots, libc::F_OFD_SETLK, libc::F_WRLCK, slot).is_ok()
    }

    /// Gives it back.
    pub(super) fn leave(&self, slot: usize) {
        let _ = self.lock(&self.slots, libc::F_OFD_SETLK, libc::F_UNLCK, slot);
    }

    /// Whether another opening of the file holds the slot. In doubt it lives: nothing is taken from a living process.
    pub(super) fn lives(&self, slot: usize) -> bool {
        match self.lock(&self.slots, libc::F_OFD_GETLK, libc::F_WRLCK, slot) {
            Ok(lock) => lock.l_type != libc::F_UNLCK as libc::c_short,
            Err(_) => true,
        }
    }

    /// Does something while the slot is nobody's and stays so; nothing if somebody lives in it or sees to it already.
    pub(super) fn while_dead<T>(&self, slot: usize, work: impl FnOnce() -> T) -> Option<T> {
        // The lock is this open file's, so it does not keep this process's other threads away. The same thread may come
        // here again: seeing to one of the dead it may find a GPU's lock in the hand of another.
        let me = this_thread();
        let outer = self.undertaker.compare_exchange(0, me, Ordering::Acquire, Ordering::Relaxed);
        if outer.is_err_and(|other| other != me) {
            return None;
        }
        let result = self.take(slot).then(work);
        if result.is_some() {
            self.leave(slot);
        }
        if outer.is_ok() {
            self.undertaker.store(0, Ordering::Release);
        }
        result
    }

    /// Makes this process's pid known to [`Alive::pid`] of other processes.
    pub(super) fn show_pid(&self, slot: usize) {
        let _ = self.lock(&self.pids, libc::F_SETLK, libc::F_WRLCK, slot);
    }

    /// The pid of the slot's process in the namespace of the caller, where it has one there.
    pub(super) fn pid(&self, slot: usize) -> Option<u32> {
        let lock = self.lock(&self.pids, libc::F_GETLK, libc::F_WRLCK, slot).ok()?;
        if lock.l_type == libc::F_UNLCK as libc::c_short {
            return None;
        }
        u32::try_from(lock.l_pid).ok().filter(|&pid| pid != 0)
    }

    fn lock(
        &self,
        file: &File,
        command: libc::c_int,
        kind: libc::c_int,
        slot: usize,
    ) -> io::Result<libc::flock> {
        // SAFETY: a C struct of integers, for which zeros are a value.
        let mut lock: libc::flock = unsafe { std::mem::zeroed() };
        lock.l_type = kind as libc::c_short;
        lock.l_whence = libc::SEEK_SET as libc::c_short;
        lock.l_start = slot as libc::off_t;
        lock.l_len = 1;
        // SAFETY: the descriptor is open and the struct lives through the call, which only fills it in.
        let answer = unsafe { libc::fcntl(file.as_raw_fd(), command, &mut lock) };
        if answer == -1 { Err(io::Error::last_os_error()) } else { Ok(lock) }
    }
}
