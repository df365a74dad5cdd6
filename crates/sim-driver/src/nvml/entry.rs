//! How a call of a program enters: nothing unwinds into it.

use super::{NvmlError, nvmlReturn_t, session, status};
use std::panic::{AssertUnwindSafe, catch_unwind};

/// Enters a function.
#[inline]
pub(super) fn plain(body: impl FnOnce() -> Result<(), NvmlError>) -> nvmlReturn_t {
    let answer = catch_unwind(AssertUnwindSafe(body)).unwrap_or(Err(NvmlError::UNKNOWN));
    // What nobody wrote does not ask whether the library is open, and some ask late.
    let refused = matches!(answer, Err(NvmlError::NOT_SUPPORTED | NvmlError::INVALID_ARGUMENT));
    if refused && !session::is_open() {
        return NvmlError::UNINITIALIZED.code();
    }
    status(answer)
}
