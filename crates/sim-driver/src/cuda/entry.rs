//! How a call of a program enters: nothing unwinds into it, and a function's twin means another default stream.

use super::context::Context;
use super::{CUresult, CudaError, status};
use std::cell::Cell;
use std::panic::{AssertUnwindSafe, catch_unwind};

/// What every call needs to know of its thread, in one place: finding it costs as much as reading it.
pub(super) struct Thread {
    /// Whether the call that this thread is in means its own default stream by "no stream".
    per_thread: Cell<bool>,
    /// Whether it is the driver's own, which calls the program's functions.
    drivers: Cell<bool>,
    /// The thread's context.
    pub(super) current: Cell<Option<&'static Context>>,
}

impl Thread {
    /// Whether "no stream" means the thread's own.
    #[inline]
    pub(super) fn is_per_thread(&self) -> bool {
        self.per_thread.get()
    }
}

thread_local! {
    pub(super) static THREAD: Thread = const { Thread { per_thread: Cell::new(false), drivers: Cell::new(false), current: Cell::new(None) } };
}

/// Enters a function.
#[inline]
pub(super) fn plain(body: impl FnOnce() -> Result<(), CudaError>) -> CUresult {
    match catch_unwind(AssertUnwindSafe(body)) {
        Ok(answer) => status(answer),
        Err(_) => CudaError::UNKNOWN.code(),
    }
}

/// Enters the `_ptsz` or `_ptds` twin of a function.
#[inline]
pub(super) fn per_thread(body: impl FnOnce() -> Result<(), CudaError>) -> CUresult {
    THREAD.with(|thread| thread.per_thread.set(true));
    let code = plain(body);
    THREAD.with(|thread| thread.per_thread.set(false));
    code
}

/// The calling thread is the driver's own.
pub(super) fn enter_driver_thread() {
    THREAD.with(|thread| thread.drivers.set(true));
}

/// A function that the driver calls must not wait for the driver.
pub(super) fn outside_driver_thread() -> Result<(), CudaError> {
    if THREAD.with(|thread| thread.drivers.get()) { Err(CudaError::NOT_PERMITTED) } else { Ok(()) }
}
