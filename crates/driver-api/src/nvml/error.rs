//! Error codes of NVML and their messages.

use super::values::*;
use crate::c::terminated;

errors! {
    /// An error of an NVML function: any [`nvmlReturn_t`] except success.
    NvmlError: nvmlReturn_t, success NVML_SUCCESS "no error",
    UNINITIALIZED = NVML_ERROR_UNINITIALIZED "NVML is not initialized: call nvmlInit first",
    INVALID_ARGUMENT = NVML_ERROR_INVALID_ARGUMENT "an argument is not valid",
    NOT_SUPPORTED = NVML_ERROR_NOT_SUPPORTED "not supported by this device",
    NO_PERMISSION = NVML_ERROR_NO_PERMISSION "no permission",
    ALREADY_INITIALIZED = NVML_ERROR_ALREADY_INITIALIZED "already initialized",
    NOT_FOUND = NVML_ERROR_NOT_FOUND "not found",
    INSUFFICIENT_SIZE = NVML_ERROR_INSUFFICIENT_SIZE "the buffer is too small",
    INSUFFICIENT_POWER = NVML_ERROR_INSUFFICIENT_POWER "a power cable is missing",
    DRIVER_NOT_LOADED = NVML_ERROR_DRIVER_NOT_LOADED "the kernel driver is not loaded",
    TIMEOUT = NVML_ERROR_TIMEOUT "timeout",
    IRQ_ISSUE = NVML_ERROR_IRQ_ISSUE "the device's interrupts do not arrive",
    LIBRARY_NOT_FOUND = NVML_ERROR_LIBRARY_NOT_FOUND "a library was not found",
    FUNCTION_NOT_FOUND = NVML_ERROR_FUNCTION_NOT_FOUND "this library has no such function",
    CORRUPTED_INFOROM = NVML_ERROR_CORRUPTED_INFOROM "the infoROM is corrupted",
    GPU_IS_LOST = NVML_ERROR_GPU_IS_LOST "the GPU has fallen off the bus",
    RESET_REQUIRED = NVML_ERROR_RESET_REQUIRED "the GPU needs a reset",
    OPERATING_SYSTEM = NVML_ERROR_OPERATING_SYSTEM "the operating system blocks the GPU",
    LIB_RM_VERSION_MISMATCH = NVML_ERROR_LIB_RM_VERSION_MISMATCH "the library does not match the version of the kernel driver",
    IN_USE = NVML_ERROR_IN_USE "the GPU is in use",
    MEMORY = NVML_ERROR_MEMORY "not enough memory",
    NO_DATA = NVML_ERROR_NO_DATA "no data",
    VGPU_ECC_NOT_SUPPORTED = NVML_ERROR_VGPU_ECC_NOT_SUPPORTED "the vGPU operation is not supported with ECC enabled",
    INSUFFICIENT_RESOURCES = NVML_ERROR_INSUFFICIENT_RESOURCES "insufficient resources",
    FREQ_NOT_SUPPORTED = NVML_ERROR_FREQ_NOT_SUPPORTED "the frequency is not supported",
    ARGUMENT_VERSION_MISMATCH = NVML_ERROR_ARGUMENT_VERSION_MISMATCH "the version in the structure is not known",
    DEPRECATED = NVML_ERROR_DEPRECATED "no longer supported",
    NOT_READY = NVML_ERROR_NOT_READY "not ready",
    GPU_NOT_FOUND = NVML_ERROR_GPU_NOT_FOUND "no GPU was found",
    INVALID_STATE = NVML_ERROR_INVALID_STATE "not possible in this state",
    UNKNOWN = NVML_ERROR_UNKNOWN "unknown error",
}
