//! Exported functions for initialization, versions, error texts and symbol lookup.

use super::context::write_out;
use super::session;
use super::*;
use partage_driver_api::proc_address::{ProcAddressLookup, proc_address};
use std::collections::HashMap;
use std::ffi::CStr;
use std::sync::OnceLock;

/// Returns the address of one of the driver's own functions.
fn address(symbol: &str) -> Option<*const ()> {
    static BY_NAME: OnceLock<HashMap<&'static str, &'static SymbolAddress>> = OnceLock::new();
    let by_name = BY_NAME.get_or_init(|| SYMBOLS.iter().map(|(name, symbol)| (*name, symbol)).collect());
    by_name.get(symbol).map(|symbol| symbol.0)
}

/// Looks up a function for a CUDA version: its address, or why there is none.
fn look_up(name: &CStr, version: i32, flags: u64) -> Result<ProcAddressResult, CudaError> {
    match proc_address(session::driver_version(), name.to_str().unwrap_or_default(), version, flags) {
        ProcAddressLookup::Symbol(symbol) => Ok(address(symbol).ok_or(CU_GET_PROC_ADDRESS_SYMBOL_NOT_FOUND)),
        ProcAddressLookup::NewerThanAsked => Ok(Err(CU_GET_PROC_ADDRESS_VERSION_NOT_SUFFICIENT)),
        ProcAddressLookup::Unknown => Ok(Err(CU_GET_PROC_ADDRESS_SYMBOL_NOT_FOUND)),
        ProcAddressLookup::BadFlags => Err(CudaError::INVALID_VALUE),
    }
}

/// The address of a function, or the status that says why there is none.
type ProcAddressResult = Result<*const (), CUdriverProcAddressQueryResult>;

/// Writes the name or description of an error code; writes null for unknown codes.
///
/// # Safety
/// `to` is null or valid for writes.
unsafe fn error_text(
    error: CUresult,
    to: *mut *const c_char,
    lookup: impl FnOnce(CUresult) -> Option<&'static CStr>,
) -> Result<(), CudaError> {
    let known = Some(error).filter(|&error| session::driver_version().knows(error));
    let found = known.and_then(lookup);
    // SAFETY: CUDA requires output pointers to be null or valid for writes.
    unsafe { write_out(to, found.map_or(std::ptr::null(), CStr::as_ptr)) }?;
    if found.is_some() { Ok(()) } else { Err(CudaError::INVALID_VALUE) }
}

impl DriverApi for Library {
    unsafe fn cuInit(flags: u32) -> Result<(), CudaError> {
        if flags != 0 {
            return Err(CudaError::INVALID_VALUE);
        }
        session::open().map(|_| ())
    }

    unsafe fn cuDriverGetVersion(version: *mut i32) -> Result<(), CudaError> {
        // SAFETY: CUDA requires output pointers to be null or valid for writes.
        unsafe { write_out(version, session::driver_version().cuda()) }
    }

    unsafe fn cuGetErrorName(error: CUresult, text: *mut *const c_char) -> Result<(), CudaError> {
        // SAFETY: CUDA requires output pointers to be null or valid for writes.
        unsafe { error_text(error, text, name) }
    }

    unsafe fn cuGetErrorString(error: CUresult, text: *mut *const c_char) -> Result<(), CudaError> {
        // SAFETY: CUDA requires output pointers to be null or valid for writes.
        unsafe { error_text(error, text, partage_driver_api::cuda::text) }
    }

    /// Rejects every undocumented export table: see `docs/simulated-driver.md`.
    unsafe fn cuGetExportTable(table: *mut *const c_void, _id: *const CUuuid) -> Result<(), CudaError> {
        if !table.is_null() {
            // SAFETY: non-null, and the program passes a pointer valid for writes.
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
        // SAFETY: non-null, and the program passes a NUL-terminated string.
        let found = look_up(unsafe { CStr::from_ptr(name) }, cuda_version, flags)?;
        // The older function leaves the pointer unchanged on failure.
        let address = found.map_err(|_| CudaError::NOT_FOUND)?;
        // SAFETY: non-null, and the program passes a pointer valid for writes.
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
        // SAFETY: non-null, and the program passes a NUL-terminated string.
        let found = look_up(unsafe { CStr::from_ptr(name) }, cuda_version, flags)?;
        // SAFETY: non-null, and the program passes a pointer valid for writes.
        unsafe { function.write(found.unwrap_or(std::ptr::null()).cast_mut().cast()) };
        if !symbol_status.is_null() {
            // SAFETY: non-null, and the program passes a pointer valid for writes.
            unsafe { symbol_status.write(found.err().unwrap_or(CU_GET_PROC_ADDRESS_SUCCESS)) };
        }
        // An unknown symbol is reported in `symbol_status`, not as an error.
        Ok(())
    }

    unsafe fn cuProfilerStart() -> Result<(), CudaError> {
        session::session().map(|_| ())
    }

    unsafe fn cuProfilerStop() -> Result<(), CudaError> {
        session::session().map(|_| ())
    }
}
