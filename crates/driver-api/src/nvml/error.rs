//! Failures of NVML.

use super::values::*;
use crate::c::terminated;

failures! {
    /// A failure of an NVML function: any [`nvmlReturn_t`] but success.
    NvmlError: nvmlReturn_t, success NVML_SUCCESS "no error",
    UNINITIALIZED = NVML_ERROR_UNINITIALIZED "NVML was not initialized: nvmlInit comes first",
    INVALID_ARGUMENT = NVML_ERROR_INVALID_ARGUMENT "an argument is not valid",
    NOT_SUPPORTED = NVML_ERROR_NOT_SUPPORTED "not supported by this device",
    NO_PERMISSION = NVML_ERROR_NO_PERMISSION "no permission",
    ALREADY_INITIALIZED = NVML_ERROR_ALREADY_INITIALIZED "already initialized",
    NOT_FOUND = NVML_ERROR_NOT_FOUND "not found",
    INSUFFICIENT_SIZE = NVML_ERROR_INSUFFICIENT_SIZE "the buffer is too small",
    INSUFFICIENT_POWER = NVML_ERROR_INSUFFICIENT_POWER "a power cable is missing",
    DRIVER_NOT_LOADED = NVML_ERROR_DRIVER_NOT_LOADED "the kernel driver is not loaded",
    TIMEOUT = NVML_ERROR_TIMEOUT "the time ran out",
    IRQ_ISSUE = NVML_ERROR_IRQ_ISSUE "the device's interrupts do not arrive",
    LIBRARY_NOT_FOUND = NVML_ERROR_LIBRARY_NOT_FOUND "a library was not found",
    FUNCTION_NOT_FOUND = NVML_ERROR_FUNCTION_NOT_FOUND "this library has no such function",
    CORRUPTED_INFOROM = NVML_ERROR_CORRUPTED_INFOROM "the infoROM is corrupted",
    GPU_IS_LOST = NVML_ERROR_GPU_IS_LOST "the GPU has fallen off the bus",
    RESET_REQUIRED = NVML_ERROR_RESET_REQUIRED "the GPU needs a reset",
    OPERATING_SYSTEM = NVML_ERROR_OPERATING_SYSTEM "the operating system blocks the GPU",
    LIB_RM_VERSION_MISMATCH = NVML_ERROR_LIB_RM_VERSION_MISMATCH "the library does not fit the kernel driver",
    IN_USE = NVML_ERROR_IN_USE "the GPU is in use",
    MEMORY = NVML_ERROR_MEMORY "not enough memory",
    NO_DATA = NVML_ERROR_NO_DATA "no data",
    VGPU_ECC_NOT_SUPPORTED = NVML_ERROR_VGPU_ECC_NOT_SUPPORTED "ECC stands in the way of this vGPU operation",
    INSUFFICIENT_RESOURCES = NVML_ERROR_INSUFFICIENT_RESOURCES "some resource ran out",
    FREQ_NOT_SUPPORTED = NVML_ERROR_FREQ_NOT_SUPPORTED "no such frequency",
    ARGUMENT_VERSION_MISMATCH = NVML_ERROR_ARGUMENT_VERSION_MISMATCH "the version in the structure is not known",
    DEPRECATED = NVML_ERROR_DEPRECATED "no longer supported",
    NOT_READY = NVML_ERROR_NOT_READY "not ready",
    GPU_NOT_FOUND = NVML_ERROR_GPU_NOT_FOUND "no GPU was found",
    INVALID_STATE = NVML_ERROR_INVALID_STATE "not possible in this state",
    UNKNOWN = NVML_ERROR_UNKNOWN "unknown error",
}
