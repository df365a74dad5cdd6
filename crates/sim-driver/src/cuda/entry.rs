//! Entry points of exported functions: they stop panics from unwinding into the program and select the default stream
//! of the `_ptsz` and `_ptds` variants.

use super::context::Context;
use super::{CUresult, CudaError, status};
use std::cell::Cell;
use std::panic::{AssertUnwindSafe, catch_unwind};

/// Thread-local state that every call needs, in one variable: locating it costs as much as reading it.
pub(super) struct ThreadState {
    /// Whether the null stream means the per-thread default stream in the current call.
    per_thread: Cell<bool>,
    /// Whether this is the driver's worker thread, which calls functions of the program.
    is_driver_thread: Cell<bool>,
    /// The thread's current context.
    pub(super) current: Cell<Option<&'static Context>>,
}

impl ThreadState {
    /// Returns whether the null stream means the per-thread default stream.
    #[inline]
    pub(super) fn is_per_thread(&self) -> bool {
        self.per_thread.get()
    }
}

thread_local! {
    pub(super) static THREAD: ThreadState = const { ThreadState { per_thread: Cell::new(false), is_driver_thread: Cell::new(false), current: Cell::new(None) } };
}

/// Runs the body of an exported function and returns its status code.
#[inline]
pub(super) fn enter(body: impl FnOnce() -> Result<(), CudaError>) -> CUresult {
    match catch_unwind(AssertUnwindSafe(body)) {
        Ok(answer) => status(answer),
        Err(_) => CudaError::UNKNOWN.code(),
    }
}

/// Runs the body of the `_ptsz` or `_ptds` variant of an exported function.
#[inline]
pub(super) fn enter_per_thread(body: impl FnOnce() -> Result<(), CudaError>) -> CUresult {
    THREAD.with(|thread| thread.per_thread.set(true));
    let code = enter(body);
    THREAD.with(|thread| thread.per_thread.set(false));
    code
}

/// Marks the calling thread as the driver's worker thread.
pub(super) fn mark_driver_thread() {
    THREAD.with(|thread| thread.is_driver_thread.set(true));
}

/// Fails in functions of the program that the driver calls: they must not wait for the driver.
pub(super) fn ensure_not_driver_thread() -> Result<(), CudaError> {
    if THREAD.with(|thread| thread.is_driver_thread.get()) { Err(CudaError::NOT_PERMITTED) } else { Ok(()) }
}
