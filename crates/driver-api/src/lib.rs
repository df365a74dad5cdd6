//! The interfaces of the CUDA driver and NVML as one table, from which replacements of the libraries are
//! expanded.
//!
//! The crate guarantees:
//! - Every name that `libcuda.so.1` and `libnvidia-ml.so.1` of drivers 535 and 550 export is in
//!   [`cuda_functions!`] or [`nvml_functions!`] exactly once, with its arguments.
//!   [`exports`](exports::exports) lists the names of each version.
//! - Types have the names and layouts of C. An enumeration is an integer with named values, a handle is a
//!   pointer to an opaque type, and structures are `Copy` and zero by default. Every bit pattern that a program
//!   passes is a valid value of its type.
//! - Errors are [`CudaError`](cuda::CudaError) and [`NvmlError`](nvml::NvmlError), so that function bodies can
//!   use `?`. [`cuda::status`] and [`nvml::status`] convert a result to the C code, [`cuda::check`] and
//!   [`nvml::check`] convert it back.
//! - [`proc_address`](proc_address::proc_address) returns the same results as the real `cuGetProcAddress`.
//! - The crate has no dependencies, and does not load or call a driver.
//!
//! Its tests compare it with the export lists and recorded lookups of the real libraries, and with
//! declarations that other projects generated from NVIDIA's headers.
//!
//! Structures and values follow the headers of CUDA 12.9. Those of 12.2 and 12.4, which belong to the drivers,
//! are the same except for values that grow with each version: `_MAX` and `_COUNT` of enumerations,
//! `nvmlEventTypeAll`, and the lengths of `nvmlGpmMetricsGet_t`, `nvmlVgpuPlacementList_t` and
//! `CUDA_CHILD_GRAPH_NODE_PARAMS`.
//!
//! # The table
//! A table macro passes itself to a macro of the caller. Function families are traits. A `twin` is the name of
//! the same function for programs that were compiled for per-thread default streams; it has the same arguments.
//! ```text
//! /// Device, pitched, managed and host memory; attributes of addresses.
//! trait MemoryApi {
//!     fn cuMemAlloc_v2(pointer: *mut CUdeviceptr, bytes: usize);
//!     …
//! }
//! /// Copies and fills.
//! trait CopyApi {
//!     fn cuMemcpy(to: CUdeviceptr, from: CUdeviceptr, bytes: usize) twin cuMemcpy_ptds;
//!     …
//! }
//! ```
//! It is best to match the arguments as one token tree and to parse them in a second macro, because a function
//! and its twin both need them. The argument list of a long function ends with a comma.
//! ```
//! use partage_driver_api::cuda::*;
//!
//! macro_rules! traits {
//!     ($($(#[$doc:meta])* trait $family:ident { $(fn $name:ident $args:tt $(twin $twin:ident)?;)* })*) => {
//!         $($(#[$doc])* trait $family { $(method! { $name $args })* })*
//!     };
//! }
//! macro_rules! method {
//!     ($name:ident($($arg:ident: $type:ty),* $(,)?)) => {
//!         #[allow(non_snake_case, unused_variables)]
//!         unsafe fn $name($($arg: $type),*) -> Result<(), CudaError> {
//!             Err(CudaError::NOT_SUPPORTED)
//!         }
//!     };
//! }
//! partage_driver_api::cuda_functions!(traits);
//!
//! struct NoGpuDriver;
//! impl DeviceApi for NoGpuDriver {
//!     unsafe fn cuDeviceGetCount(count: *mut i32) -> Result<(), CudaError> {
//!         // SAFETY: the caller passes null or a pointer that is valid for writes.
//!         *unsafe { count.as_mut() }.ok_or(CudaError::INVALID_VALUE)? = 0;
//!         Ok(())
//!     }
//! }
//!
//! let mut count = 7;
//! // SAFETY: the pointer is to a live variable.
//! assert_eq!(status(unsafe { NoGpuDriver::cuDeviceGetCount(&mut count) }), CUDA_SUCCESS);
//! assert_eq!(count, 0);
//! // SAFETY: the function checks for null.
//! assert_eq!(status(unsafe { NoGpuDriver::cuDeviceGetCount(std::ptr::null_mut()) }), CUDA_ERROR_INVALID_VALUE);
//! ```

#[macro_use]
mod c;
pub mod cuda;
pub mod exports;
pub mod nvml;
pub mod proc_address;
