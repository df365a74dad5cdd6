//! The CUDA driver (libcuda): types, values and errors, under their C names.
#![allow(non_camel_case_types, non_snake_case, non_upper_case_globals)]

mod error;
mod functions;
#[allow(missing_docs)] // NVIDIA's reference documents them.
mod types;
#[allow(missing_docs)]
mod values;

pub use core::ffi::{c_char, c_ulong, c_void};
pub use error::*;
pub use types::*;
pub use values::*;
