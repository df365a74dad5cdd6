//! Entry point of exported functions: stops panics from unwinding into the program.

use super::{NvmlError, nvmlReturn_t, session, status};
use std::panic::{AssertUnwindSafe, catch_unwind};

/// Runs the body of an exported function and returns its status code.
#[inline]
pub(super) fn enter(body: impl FnOnce() -> Result<(), NvmlError>) -> nvmlReturn_t {
    let result = catch_unwind(AssertUnwindSafe(body)).unwrap_or(Err(NvmlError::UNKNOWN));
    // Default bodies do not check whether the library is initialized, and some functions check it late.
    let refused = matches!(result, Err(NvmlError::NOT_SUPPORTED | NvmlError::INVALID_ARGUMENT));
    if refused && !session::is_open() {
        return NvmlError::UNINITIALIZED.code();
    }
    status(result)
}
