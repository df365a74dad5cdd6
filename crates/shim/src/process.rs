//! State of a process: its region, and which of its devices is which GPU of the region.
//!
//! Nothing is set up before the first call that needs it: a process that never calls CUDA or NVML is not changed.
#![allow(unsafe_code)]

pub(crate) mod current_context;
mod devices;

use crate::embedded_config;
use crate::memory::ProcessMemory;
use crate::throttle::Throttle;
pub(crate) use devices::Devices;
use partage_region::RegionTenant;
use partage_region::futex::preserve_errno;
use std::path::Path;
use std::sync::Once;
use std::sync::atomic::{AtomicBool, AtomicPtr, Ordering};

/// State of this process. It is created once and never freed: other threads may use it until the process ends.
pub(crate) struct Process {
    pub(crate) region: RegionTenant,
    pub(crate) devices: Devices,
    pub(crate) throttle: Throttle,
    pub(crate) memory: ProcessMemory,
}

/// Whether a process has a grant.
#[derive(Clone, Copy)]
pub(crate) enum GrantStatus {
    /// It has a grant, whose limits are enforced.
    Granted(&'static Process),
    /// Its region is missing, damaged or of an unsupported layout: every call that needs a grant is refused.
    Refused,
}

static PROCESS: AtomicPtr<Process> = AtomicPtr::new(std::ptr::null_mut());
/// Held by the thread that attaches. An atomic rather than a mutex, so that a forked child can reset it.
static ATTACHING: AtomicBool = AtomicBool::new(false);

/// Returns whether this process has a grant. It costs one load once the process is attached.
#[inline]
pub(crate) fn grant_status() -> GrantStatus {
    match attached() {
        Some(process) => GrantStatus::Granted(process),
        None => attach(),
    }
}

/// Returns this process's state if it is attached; does not try to attach.
#[inline]
pub(crate) fn attached() -> Option<&'static Process> {
    let process = PROCESS.load(Ordering::Acquire);
    // SAFETY: null, or a leaked box that was complete before it was stored.
    unsafe { process.as_ref() }
}

#[cold]
fn attach() -> GrantStatus {
    preserve_errno(attach_once)
}

fn attach_once() -> GrantStatus {
    let config = embedded_config::get();
    register_fork_handler();
    while ATTACHING.swap(true, Ordering::Acquire) {
        // Takes at most a millisecond, once in a process's life.
        std::thread::yield_now();
    }
    let status = match attached() {
        // Another thread was first.
        Some(process) => GrantStatus::Granted(process),
        None => match RegionTenant::attach(config.region().unwrap_or(Path::new(""))) {
            Ok(region) => {
                let process = Box::leak(Box::new(Process {
                    region,
                    devices: Devices::default(),
                    throttle: Throttle::default(),
                    memory: ProcessMemory::default(),
                }));
                PROCESS.store(process, Ordering::Release);
                GrantStatus::Granted(process)
            }
            Err(_) => GrantStatus::Refused,
        },
    };
    ATTACHING.store(false, Ordering::Release);
    status
}

/// Registers the handler that resets a forked child. The parent's slot, allocations and contexts do not belong to the
/// child. It attaches again if it ever makes a call; the parent's state stays where it is, unreachable, because its
/// locks may be held forever.
fn register_fork_handler() {
    extern "C" fn after_fork_in_child() {
        PROCESS.store(std::ptr::null_mut(), Ordering::Release);
        ATTACHING.store(false, Ordering::Release);
    }
    static ONCE: Once = Once::new();
    ONCE.call_once(|| {
        // A bug of the shim must not write to the program's output; the hook's result reports that something went
        // wrong.
        #[cfg(not(test))]
        std::panic::set_hook(Box::new(|_| {}));
        // SAFETY: the handler only stores to atomics, which is safe in a forked child.
        unsafe { libc::pthread_atfork(None, None, Some(after_fork_in_child)) };
    });
}
