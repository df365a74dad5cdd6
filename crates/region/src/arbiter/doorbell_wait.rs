//! Waiting for any of many doorbells at once, with a time limit that is kept to the microsecond.
#![allow(unsafe_code)]

use crate::USAGE;
use crate::error::RegionError;
use crate::futex;
use crate::layout::{GpuAccount, GpuTimeAccount, UsageFile};
use crate::mmap::{self, MappedFile, number};
use std::fs::File;
use std::mem::offset_of;
use std::os::unix::fs::FileExt;
use std::path::Path;
use std::sync::OnceLock;
use std::sync::atomic::AtomicU32;
use std::time::Duration;

/// The kernel waits for no more at once.
const MOST: usize = 128;

/// Words of 32 bits, in memory that processes share.
const SHARED: u32 = 2;

/// A container's doorbell on one GPU, and the few words beside it.
#[derive(Debug)]
pub(super) struct Doorbell {
    file: File,
    /// Only for the kernel to know where to wait: the container may cut the file short, and who looks there then dies.
    place: MappedFile<UsageFile>,
    gpu: usize,
}

/// What can be seen without looking at every process.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) struct DoorbellSample {
    pub(super) spent: u64,
    pub(super) doorbell: u32,
}

impl Doorbell {
    pub(super) fn open(folder: &Path, gpu: usize) -> Result<Self, RegionError> {
        let path = folder.join(USAGE);
        let file = mmap::open(&path, false)?;
        mmap::check::<UsageFile>(&file, &path)?;
        let place = MappedFile::new(&file, &path, false)?;
        Ok(Self { file, place, gpu })
    }

    /// What is there now, or nothing if it is no longer there.
    pub(super) fn glance(&self) -> Option<DoorbellSample> {
        const FIRST: usize = offset_of!(GpuTimeAccount, spent);
        const LENGTH: usize = offset_of!(GpuTimeAccount, doorbell) + 4;
        let at = offset_of!(UsageFile, accounts)
            + self.gpu * size_of::<GpuAccount>()
            + offset_of!(GpuAccount, time);
        let mut bytes = [0; LENGTH];
        self.file.read_exact_at(&mut bytes, at as u64).ok()?;
        let doorbell = u32::try_from(number(&bytes, offset_of!(GpuTimeAccount, doorbell), 4)).unwrap_or(0);
        Some(DoorbellSample { spent: number(&bytes, FIRST, 8), doorbell })
    }

    fn address(&self) -> *const u32 {
        self.place.accounts.get(self.gpu).map_or(std::ptr::null(), |book| book.time.doorbell.as_ptr())
    }
}

/// What the kernel takes for one word to wait for.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
struct Waiter {
    expected: u64,
    address: u64,
    flags: u32,
    reserved: u32,
}

/// A list of doorbells, kept so that nothing is allocated for a wait.
#[derive(Debug)]
pub(super) struct DoorbellWait {
    list: Vec<Waiter>,
    /// More bells than the kernel waits for: the others are heard at the next look.
    deaf: bool,
    many: bool,
}

/// Why a wait ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum WakeReason {
    /// The time was over, and no bell has rung.
    TimedOut,
    /// This one of those that were added rang; others may have, too, and end the next wait at once.
    Doorbell(usize),
    /// Any of them may have.
    Unknown,
}

/// Whether the kernel can wait for several words at once (Linux 5.16, if no filter forbids it).
fn kernel_waits_for_many() -> bool {
    static ANSWER: OnceLock<bool> = OnceLock::new();
    *ANSWER.get_or_init(|| {
        let none = std::ptr::null::<Waiter>();
        // SAFETY: a list of nothing is refused before anything is read.
        let answer = unsafe { libc::syscall(libc::SYS_futex_waitv, none, 0, 0, none, libc::CLOCK_MONOTONIC) };
        answer == -1 && futex::errno() == libc::EINVAL
    })
}

impl DoorbellWait {
    pub(super) fn new() -> Self {
        Self { list: Vec::with_capacity(MOST), deaf: false, many: kernel_waits_for_many() }
    }

    /// As on a kernel that waits for one word only.
    #[cfg(test)]
    pub(super) fn one_at_a_time() -> Self {
        Self { many: false, ..Self::new() }
    }

    /// Begins a list with the word by which the own process is called.
    pub(super) fn begin(&mut self, word: &AtomicU32, expected: u32) {
        self.list.clear();
        self.deaf = !self.many;
        self.push(word.as_ptr(), expected);
    }

    /// Adds a doorbell that said `seen`.
    pub(super) fn add(&mut self, bell: &Doorbell, seen: u32) {
        if self.many && self.list.len() < MOST {
            self.push(bell.address(), seen);
        } else {
            self.deaf = true;
        }
    }

    fn push(&mut self, address: *const u32, expected: u32) {
        let address = address.addr() as u64;
        self.list.push(Waiter { expected: expected.into(), address, flags: SHARED, reserved: 0 });
    }

    /// Waits until one of the words is not what it was, or until `until` on the monotonic clock. Without a kernel that
    /// hears all bells it looks often while there is `active` work, and now and then otherwise.
    pub(super) fn wait(&self, word: &AtomicU32, now: u64, until: u64, active: bool) -> WakeReason {
        let deaf = if active { super::MILLI } else { 20 * super::MILLI };
        let until = if self.deaf { until.min(now.saturating_add(deaf)) } else { until };
        if !self.many {
            let expected = self.list.first().map_or(0, |own| own.expected);
            let expected = u32::try_from(expected).unwrap_or(0);
            futex::wait(word, expected, Some(Duration::from_nanos(until.saturating_sub(now))));
            return WakeReason::Unknown;
        }
        let time = libc::timespec {
            tv_sec: libc::time_t::try_from(until / 1_000_000_000).unwrap_or(libc::time_t::MAX),
            // Below a thousand million.
            tv_nsec: (until % 1_000_000_000) as libc::c_long,
        };
        let time = std::ptr::from_ref(&time);
        // At most 128.
        let length = self.list.len() as libc::c_uint;
        // SAFETY: the list and the time live through the call; the kernel checks the addresses in the list.
        let answer = unsafe {
            libc::syscall(libc::SYS_futex_waitv, self.list.as_ptr(), length, 0, time, libc::CLOCK_MONOTONIC)
        };
        if let Ok(index) = usize::try_from(answer) {
            // The first is the word of the own process.
            return index.checked_sub(1).map_or(WakeReason::Unknown, WakeReason::Doorbell);
        }
        match futex::errno() {
            libc::ETIMEDOUT if !self.deaf => WakeReason::TimedOut,
            libc::EFAULT => {
                // A file was cut short under a bell: who did it is out at the next look, and this must not spin till then.
                std::thread::sleep(Duration::from_micros(500));
                WakeReason::Unknown
            }
            _ => WakeReason::Unknown,
        }
    }
}

/// Lets the calling thread wake up when it asked for, not up to 50 us later.
pub(super) fn wake_in_time() {
    // SAFETY: a setting of the calling thread alone.
    unsafe { libc::prctl(libc::PR_SET_TIMERSLACK, 1_000, 0, 0, 0) };
}
