//! The library itself: start, version, texts of errors, and where its functions are.

use super::context::answer;
use super::session;
use super::*;
use partage_driver_api::proc_address::{Lookup, proc_address};
use std::collections::HashMap;
use std::ffi::CStr;
use std::sync::OnceLock;

/// The address of one of our own functions.
fn address(symbol: &str) -> Option<*const ()> {
    static BY_NAME: OnceLock<HashMap<&'static str, &'static Symbol>> = OnceLock::new();
    let by_name = BY_NAME.get_or_init(|| SYMBOLS.iter().map(|(name, symbol)| (*name, symbol)).collect());
    by_name.get(symbol).map(|symbol| symbol.0)
}

/// What a name means for a program of that CUDA version: the address of a function, or what keeps it from one.
fn look_up(name: &CStr, version: i32, flags: u64) -> Result<Found, CudaError> {
    match proc_address(session::driver(), name.to_str().unwrap_or_default(), version, flags) {
        Lookup::Symbol(symbol) => Ok(address(symbol).ok_or(CU_GET_PROC_ADDRESS_SYMBOL_NOT_FOUND)),
        Lookup::NewerThanAsked => Ok(Err(CU_GET_PROC_ADDRESS_VERSION_NOT_SUFFICIENT)),
        Lookup::Unknown => Ok(Err(CU_GET_PROC_ADDRESS_SYMBOL_NOT_FOUND)),
        Lookup::BadFlags => Err(CudaError::INVALID_VALUE),
    }
}

type Found = Result<*const (), CUdriverProcAddressQueryResult>;

/// # Safety
/// `to` is null or the program's to write.
unsafe fn error_text(
    error: CUresult,
    to: *mut *const c_char,
    words: impl FnOnce(CUresult) -> Option<&'static CStr>,
) -> Result<(), CudaError> {
    let known = Some(error).filter(|&error| session::driver().knows(error));
    let found = known.and_then(words);
    // SAFETY: the caller's promise.
    unsafe { answer(to, found.map_or(std::ptr::null(), CStr::as_ptr)) }?;
    if found.is_some() { Ok(()) } else { Err(CudaError::INVALID_VALUE) }
}

impl Driver for Library {
    unsafe fn cuInit(flags: u32) -> Result<(), CudaError> {
        if flags != 0 {
            return Err(CudaError::INVALID_VALUE);
        }
        session::open().map(|_| ())
    }

    unsafe fn cuDriverGetVersion(version: *mut i32) -> Result<(), CudaError> {
        // SAFETY: the caller's promise.
        unsafe { answer(version, session::driver().cuda()) }
    }

    unsafe fn cuGetErrorName(error: CUresult, text: *mut *const c_char) -> Result<(), CudaError> {
        // SAFETY: the caller's promise.
        unsafe { error_text(error, text, name) }
    }

    unsafe fn cuGetErrorString(error: CUresult, text: *mut *const c_char) -> Result<(), CudaError> {
        // SAFETY: the caller's promise.
        unsafe { error_text(error, text, partage_driver_api::cuda::text) }
    }

    /// No table of the undocumented kind is given out, whichever is asked for: see `docs/simulated-driver.md`.
    unsafe fn cuGetExportTable(table: *mut *const c_void, _id: *const CUuuid) -> Result<(), CudaError> {
        if !table.is_null() {
            // SAFETY: not null, and the caller's to write.
            unsafe { table.write(std::ptr::null()) };
        }
        Err(CudaError::INVALID_VALUE)
    }

    unsafe fn cuGetProcAddress(
        name: *const c_char,
        function: *mut *mut c_void,
        cuda_version: i32,
        flags: u64,
    ) -> Result<(), CudaError> {
        if name.is_null() || function.is_null() {
            return Err(CudaError::INVALID_VALUE);
        }
        // SAFETY: not null, and the caller's text.
        let found = look_up(unsafe { CStr::from_ptr(name) }, cuda_version, flags)?;
        // The older form leaves the pointer as it was.
        let address = found.map_err(|_| CudaError::NOT_FOUND)?;
        // SAFETY: not null, and the caller's to write.
        unsafe { function.write(address.cast_mut().cast()) };
        Ok(())
    }

    unsafe fn cuGetProcAddress_v2(
        name: *const c_char,
        function: *mut *mut c_void,
        cuda_version: i32,
        flags: u64,
        symbol_status: *mut CUdriverProcAddressQueryResult,
    ) -> Result<(), CudaError> {
        if name.is_null() || function.is_null() {
            return Err(CudaError::INVALID_VALUE);
        }
        // SAFETY: not null, and the caller's text.
        let found = look_up(unsafe { CStr::from_ptr(name) }, cuda_version, flags)?;
        // SAFETY: not null, and the caller's to write.
        unsafe { function.write(found.unwrap_or(std::ptr::null()).cast_mut().cast()) };
        if !symbol_status.is_null() {
            // SAFETY: likewise.
            unsafe { symbol_status.write(found.err().unwrap_or(CU_GET_PROC_ADDRESS_SUCCESS)) };
        }
        // Not having the function is an answer, not a failure.
        Ok(())
    }

    unsafe fn cuProfilerStart() -> Result<(), CudaError> {
        session::session().map(|_| ())
    }

    unsafe fn cuProfilerStop() -> Result<(), CudaError> {
        session::session().map(|_| ())
    }
}
