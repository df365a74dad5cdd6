//! What a process knows of its grant: its region, and which of its devices is which GPU of the region.
//!
//! Nothing is looked at before the first call that needs it: a process that never calls CUDA or NVML stays as it was.
#![allow(unsafe_code)]

pub(crate) mod current_context;
mod devices;

use crate::embedded_config;
use crate::memory::Memory;
use crate::throttle::Throttle;
pub(crate) use devices::Devices;
use partage_region::RegionTenant;
use partage_region::futex::keeping_errno;
use std::path::Path;
use std::sync::Once;
use std::sync::atomic::{AtomicBool, AtomicPtr, Ordering};

/// What this process knows. Made once and never freed: other threads may use it until the very end.
pub(crate) struct Process {
    pub(crate) region: RegionTenant,
    pub(crate) devices: Devices,
    pub(crate) throttle: Throttle,
    pub(crate) memory: Memory,
}

/// Whether a process has a grant.
#[derive(Clone, Copy)]
pub(crate) enum Standing {
    /// It has a grant, and is held to it.
    Held(&'static Process),
    /// Its region is missing, damaged or of an unsupported layout: every call that needs a grant is refused.
    Refused,
}

static PROCESS: AtomicPtr<Process> = AtomicPtr::new(std::ptr::null_mut());
/// Held by the thread that attaches. A word, not a mutex: a forked child sets it free.
static ATTACHING: AtomicBool = AtomicBool::new(false);

/// Whether this process has a grant. One load, once it is attached.
#[inline]
pub(crate) fn standing() -> Standing {
    match attached() {
        Some(process) => Standing::Held(process),
        None => attach(),
    }
}

/// This process's knowledge, if it has attached; does not try to.
#[inline]
pub(crate) fn attached() -> Option<&'static Process> {
    let process = PROCESS.load(Ordering::Acquire);
    // SAFETY: null, or a box that was leaked whole before it was stored.
    unsafe { process.as_ref() }
}

#[cold]
fn attach() -> Standing {
    keeping_errno(try_to_attach)
}

fn try_to_attach() -> Standing {
    let config = embedded_config::get();
    watch_forks();
    while ATTACHING.swap(true, Ordering::Acquire) {
        // A millisecond at most, and once in a process's life.
        std::thread::yield_now();
    }
    let standing = match attached() {
        // Another thread was first.
        Some(process) => Standing::Held(process),
        None => match RegionTenant::attach(config.region().unwrap_or(Path::new(""))) {
            Ok(region) => {
                let process = Box::leak(Box::new(Process {
                    region,
                    devices: Devices::default(),
                    throttle: Throttle::default(),
                    memory: Memory::default(),
                }));
                PROCESS.store(process, Ordering::Release);
                Standing::Held(process)
            }
            Err(_) => Standing::Refused,
        },
    };
    ATTACHING.store(false, Ordering::Release);
    standing
}

/// In a forked child nothing of the parent's holds: its slot, its allocations, its contexts. It attaches anew if it ever
/// calls; the parent's knowledge stays where it is, unreachable, because locks in it may be taken for ever.
fn watch_forks() {
    extern "C" fn in_child() {
        PROCESS.store(std::ptr::null_mut(), Ordering::Release);
        ATTACHING.store(false, Ordering::Release);
    }
    static ONCE: Once = Once::new();
    ONCE.call_once(|| {
        // A bug of ours must not write into the program's output; the hook's answer says that something went wrong.
        #[cfg(not(test))]
        std::panic::set_hook(Box::new(|_| {}));
        // SAFETY: the handler only stores words.
        unsafe { libc::pthread_atfork(None, None, Some(in_child)) };
    });
}
