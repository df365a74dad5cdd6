//! libcuda: the CUDA driver's functions, a module to a family or a few.
//!
//! Everything a program holds (contexts, streams, events, modules) is of its process; what processes share is in
//! [`state`](crate::state).
#![allow(unsafe_code, non_snake_case)]

mod arrays;
mod capture;
mod context;
mod copies;
mod device;
mod driver;
mod engine;
mod entry;
mod event;
mod graph;
mod handle;
mod launch;
mod memory;
mod module;
mod pools;
mod session;
mod sharing;
mod spin;
mod stream;
#[cfg(test)]
mod trial;
mod virtual_memory;
mod visible;

use crate::table::{Symbol, library, symbols};
use partage_driver_api::cuda::*;

/// What the families are implemented for.
struct Library;

macro_rules! expand { ($($table:tt)*) => { library! { CudaError, CUresult, $($table)* } }; }
partage_driver_api::cuda_functions!(expand);
partage_driver_api::cuda_functions!(symbols);

impl References for Library {}
impl Graphics for Library {}
impl Debugger for Library {}
