//! Two functions, so that there is something to install. The real hooks take the place of this file.
#![allow(unsafe_code)]

use crate::config;
use std::ffi::{CStr, c_int, c_void};

type Version = unsafe extern "C" fn(*mut c_int) -> c_int;

/// The driver's own function.
fn real(library: Option<&CStr>, name: &CStr) -> Option<Version> {
    // SAFETY: the path is a C string; the driver's library is loaded already.
    let handle = unsafe { libc::dlopen(library?.as_ptr(), libc::RTLD_LAZY) };
    if handle.is_null() {
        return None;
    }
    // SAFETY: the handle is open and the name is a C string.
    let symbol = unsafe { libc::dlsym(handle, name.as_ptr()) };
    // SAFETY: both functions have this type; null is none.
    unsafe { std::mem::transmute::<*mut c_void, Option<Version>>(symbol) }
}

// SAFETY: the name is ours alone.
#[unsafe(export_name = "partage_hook_cuDriverGetVersion")]
extern "C" fn cuda_version(version: *mut c_int) -> c_int {
    match real(config::get().real_cuda(), c"cuDriverGetVersion") {
        // SAFETY: the caller promises what the driver asks for.
        Some(real) => unsafe { real(version) },
        // CUDA_ERROR_NOT_SUPPORTED
        None => 801,
    }
}

// SAFETY: the name is ours alone.
#[unsafe(export_name = "partage_hook_nvmlSystemGetCudaDriverVersion")]
extern "C" fn nvml_version(version: *mut c_int) -> c_int {
    match real(config::get().real_nvml(), c"nvmlSystemGetCudaDriverVersion") {
        // SAFETY: the caller promises what the driver asks for.
        Some(real) => unsafe { real(version) },
        // NVML_ERROR_NOT_SUPPORTED
        None => 3,
    }
}
