//! Two functions, so that there is something to install. The real hooks take the place of this file.
#![allow(unsafe_code)]

use std::ffi::c_int;

// SAFETY: the name is ours alone.
#[unsafe(export_name = "partage_hook_cuDriverGetVersion")]
extern "C" fn driver_version(_: *mut c_int) -> c_int {
    // CUDA_ERROR_NOT_SUPPORTED
    801
}

// SAFETY: the name is ours alone.
#[unsafe(export_name = "partage_hook_nvmlSystemGetCudaDriverVersion")]
extern "C" fn nvml_driver_version(_: *mut c_int) -> c_int {
    // NVML_ERROR_NOT_SUPPORTED
    3
}
