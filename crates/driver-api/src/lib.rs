//! The CUDA driver's and NVML's interfaces as one table, from which whoever stands at their place is
//! expanded.
//!
//! The crate promises:
//! - Every name that `libcuda.so.1` and `libnvidia-ml.so.1` of drivers 535 and 550 export is in
//!   [`cuda_functions!`] or [`nvml_functions!`], with its arguments, and in no more than one place.
//!   [`exports`](exports::exports) tells which version has which.
//! - Types have C's names, C's layout and no opinion: an enumeration is a number with named values, a handle
//!   is a pointer to something opaque, a structure is copied freely and zero by default. Any bits that a
//!   program passes are a value of its type.
//! - Failures are [`CudaError`](cuda::CudaError) and [`NvmlError`](nvml::NvmlError), so that bodies can use
//!   `?`; [`cuda::status`] and [`nvml::status`] make C's number of an outcome, [`cuda::check`] and
//!   [`nvml::check`] the reverse.
//! - [`proc_address`](proc_address::proc_address) answers what the real `cuGetProcAddress` answers.
//! - It depends on nothing, loads nothing and calls nothing.
//!
//! Its tests compare it with the export lists and the answers of the real libraries, and with the
//! declarations that other projects made from NVIDIA's headers.
//!
//! Structures and values follow the headers of CUDA 12.9. Those of 12.2 and 12.4, the drivers' own, agree but
//! for ends that have moved since: `_MAX` and `_COUNT` of enumerations, `nvmlEventTypeAll`, and the lengths of
//! `nvmlGpmMetricsGet_t`, `nvmlVgpuPlacementList_t` and `CUDA_CHILD_GRAPH_NODE_PARAMS`.
//!
//! # The table
//! A table hands itself to a macro of yours. The families are traits; a `twin` is the name of the same
//! function for programs built for per-thread default streams, with the same arguments.
//! ```text
//! /// Device, pitched, managed and host memory; what is known about an address.
//! trait Memory {
//!     fn cuMemAlloc_v2(pointer: *mut CUdeviceptr, bytes: usize);
//!     …
//! }
//! /// Copies and fills.
//! trait Copies {
//!     fn cuMemcpy(to: CUdeviceptr, from: CUdeviceptr, bytes: usize) twin cuMemcpy_ptds;
//!     …
//! }
//! ```
//! The arguments are best taken as one token tree, and taken apart by a second macro: a function and its
//! twin both need them. The argument list of a long function ends with a comma.
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
//! struct Gpuless;
//! impl Devices for Gpuless {
//!     unsafe fn cuDeviceGetCount(count: *mut i32) -> Result<(), CudaError> {
//!         // SAFETY: the caller passes a place for the answer, or null.
//!         *unsafe { count.as_mut() }.ok_or(CudaError::INVALID_VALUE)? = 0;
//!         Ok(())
//!     }
//! }
//!
//! let mut count = 7;
//! // SAFETY: `count` is a place for the answer.
//! assert_eq!(status(unsafe { Gpuless::cuDeviceGetCount(&mut count) }), CUDA_SUCCESS);
//! assert_eq!(count, 0);
//! // SAFETY: null is no place, and the body looks.
//! assert_eq!(status(unsafe { Gpuless::cuDeviceGetCount(std::ptr::null_mut()) }), CUDA_ERROR_INVALID_VALUE);
//! ```

#[macro_use]
mod c;
pub mod cuda;
pub mod exports;
pub mod nvml;
pub mod proc_address;
